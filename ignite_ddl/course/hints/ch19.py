"""Hints for chapter 19's guesses: wrong answers that have a reason, from what its cells have computed."""


def in_place():
    """What becomes of a gradient where weights change in place before its backward pass."""
    return {
        "wrong": "Autograd counts the versions of what it keeps.",
        "right": "Backward needs the weights of the forward pass.",
    }


def last():
    """Which way to train comes last."""
    return {
        "PipeDream": "Its weights are three small steps behind at most, and it makes seven times as many as 1F1B.",
        "no bubble": "It makes more updates than 1F1B, of the same batch.",
    }


def idle(of_1f1b):
    """Idle units of rank 0 where W waits; of_1f1b are those of 1F1B."""
    return {of_1f1b: "That is 1F1B.", 0: "Before the first backward pass there is no W."}


def wasted(percent):
    """What zbv wastes; percent holds the bubble of each schedule."""
    return {percent["interleaved_1f1b"]: "It splits the backward pass, too.", percent["1f1b"]: "That is 1F1B."}


def faster(of_free_messages):
    """The faster of 1 and 4 stages a rank; of_free_messages where messages take no time."""
    return {of_free_messages: "That is with free messages. It gains 13.5 units and sends 192 messages more."}
