"""Hints for chapter 16's guesses: wrong answers that have a reason, from what its cells have computed."""


def right_by_columns(right):
    """How many of output and derivatives are right without a sum."""
    return {len(right) + 1: "Which of them is a sum over all columns?"}


def biases():
    """How many times the bias is in the output."""
    return {1: "Each rank adds it before the sum."}


def summed_twice():
    """How many times too large the weights' gradient is."""
    return {1: "Backward, each rank puts in a copy of the same gradient."}


def saved_loss():
    """How the loss of the model that rank 0 saves compares with the last one reported, without the sum."""
    return {
        "equal": "The slices of ranks 1 to 3 have learned behind another first layer.",
        "lower": "Who has trained the first layer that is saved?",
    }


def ratio(by_width):
    """How many times as many bytes as columns, then rows; by_width compares the layers' widths."""
    return {by_width: "So much wider is the sum; what else is sent?"}
