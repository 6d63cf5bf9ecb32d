"""Hints for chapter 17's guesses: wrong answers that have a reason, from what its cells have computed."""


def right_models(n_models):
    """In how many of the models the sum over ranks is right."""
    return {n_models: "Four columns of a head of eight: what are their scores?"}


def fused():
    """In which orders of columns one matrix for q, k and v can be cut."""
    first = "Of which of q, k and v are rank 0's first 12 columns?"
    return {"q, then k, then v": first, "both": first, "neither": "Which head's q, k and v make 12 columns in a row?"}


def bytes_of_loss(rows, words, value_bytes):
    """Bytes that a rank puts in for the loss of its words' logits."""
    a_number_each = rows * value_bytes
    return {
        words * a_number_each: "Those are its logits. What of them do the others need?",
        2 * a_number_each: "The maximum, the sum, and who has the target's logit?",
        a_number_each: "That is one number a row.",
    }


def wrong_derivative():
    """Which derivative is wrong where tokens are cut."""
    return {"dx": "Each rank has all of the gradient of its tokens.", "dup": "The gather brings all tokens."}


def on_a_ring(in_four):
    """Bytes that a ring sends in eight collectives; in_four are those of the four all-reduces."""
    return {2 * in_four: "A gather or a scatter is half of an all-reduce."}


def times():
    """How many times the variance of independent draws the kept features have where all ranks draw alike."""
    return {
        1: "Are the draws of two ranks independent?",
        16: "Four times as large, squared; but there are fewer draws.",
    }


def share(n_ranks):
    """The share in percent of a block's activations that a rank keeps."""
    return {100 / n_ranks: "One line of the table is not cut by heads or features."}
