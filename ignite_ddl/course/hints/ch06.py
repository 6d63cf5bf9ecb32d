"""Hints for chapter 06's guesses: wrong answers that have a reason, from what its cells have computed."""


def way():
    """The way in which each rank gets the text back."""
    return {"only": "The others skip the function.", "both": "With one of them the others skip the function."}


def alike(n_units):
    """About how many units two ranks with a seed each decide alike."""
    return {n_units: "That is with one seed."}


def precision(mean):
    """The precision of all images; mean is that of the ranks' own, in percent."""
    return {mean: "That is the mean of the ranks' shares."}


def outputs(n_images, n_outputs, n_bytes):
    """Bytes for a metric that needs all outputs; n_bytes are those of a number."""
    return {
        n_images * n_outputs * n_bytes: "And the labels?",
        n_images * n_bytes: "An image has ten outputs.",
        n_outputs * n_bytes: "That is one image.",
    }


def same():
    """What is the same on both ranks when only rank 0 has a schedule."""
    averaged = "DDP averages gradients, not weights."
    return {"both": averaged, "the weights": averaged, "neither": "Ignite's metrics count over all ranks."}


def exact(n_cases):
    """How many resumed runs repeat every loss."""
    return {n_cases: "What of momentum, the place in the epoch, the masks?"}


def models():
    """How many models go on when rank 0 reads the file."""
    return {1: "When does DDP copy weights, and when not?"}
