"""Hints for chapter 04's guesses: wrong answers that have a reason, from what its cells have computed."""


def rows(n_rows, n_ranks):
    """Rows that a rank gets for each step."""
    return {n_ranks * n_rows: "In torch's DataLoader, yes; idist means the global batch."}


def steps(n_steps, n_ranks):
    """Steps that each rank takes in an epoch."""
    return {n_steps // n_ranks: "The ranks share each step, they do not share out the steps."}


def whose():
    """Whose accuracy Ignite's metric is."""
    return {"rank 3": "Every rank prints the same.", "the mean": "Ignite adds up counts, and divides at the end."}


def sent(n_bytes, n_rows):
    """Bytes that a rank hands to the all-reduce at each step."""
    return {
        n_bytes // 4: "That is how many numbers.",
        n_rows * n_bytes: "It is as large as the model, not as the batch.",
    }


def images(n_images):
    """Images a GPU with which sending takes as long as computing."""
    once = "A ring sends nearly twice the gradient."  # with the ring's 7/8, or without
    return {n_images / 4: "4 bytes a weight.", n_images / 2: once, n_images * 4 / 7: once}
