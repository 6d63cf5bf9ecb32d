"""Hints for chapter 19's guesses: wrong answers that have a reason, from what its cells have computed."""


def in_place():
    """What becomes of a gradient where weights change in place before its backward pass."""
    return {
        "wrong": "Autograd counts the versions of what it keeps.",
        "right": "Backward needs the weights of the forward pass.",
    }


def second():
    """Which way to train comes second."""
    return {"no bubble": "It makes a quarter of the updates.", "1F1B": "It makes the fewest updates."}


def idle(of_1f1b):
    """Idle units of rank 0 where W waits; of_1f1b are those of 1F1B."""
    return {of_1f1b: "That is 1F1B.", 0: "Before the first backward pass there is no W."}


def wasted(percent):
    """What zbv wastes; percent holds the bubble of each schedule."""
    return {percent["interleaved_1f1b"]: "It splits the backward pass, too.", percent["1f1b"]: "That is 1F1B."}


def fastest(of_free_messages):
    """The fastest number of stages a rank."""
    return {
        of_free_messages: "That is with free messages; with four stages a rank there are four times as many.",
        1: "A message of 1 unit costs less than the bubble.",
    }
