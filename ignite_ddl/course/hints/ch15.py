"""Hints for chapter 15's guesses: wrong answers that have a reason, from what its cells have computed."""


def wrong_layers(n_layers):
    """How many layers get a wrong gradient without the sum."""
    return {
        n_layers: "What the last layer needs is there.",
        0: "Backward, a rank knows only what its own part of a layer asks for.",
    }


def rows(counted_once):
    """Rows from which the cut inside sends more; counted_once is where an all-reduce counts like a gather."""
    return {counted_once: "An all-reduce counts twice, a gather once."}


def kilobytes(forward, backward):
    """kB that a rank sends with the cut by channels."""
    return {
        forward: "That is forward.",
        backward: "That is backward.",
        (forward + backward) / 2: "A number has 8 bytes.",
    }


def share(n_ranks):
    """The share in percent of the model that the fullest rank holds."""
    return {100 / n_ranks: "The cut falls between layers, which are not equal."}
