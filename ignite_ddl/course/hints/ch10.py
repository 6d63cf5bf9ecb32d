"""Hints for chapter 10's guesses: wrong answers that have a reason, from what its cells have computed."""


def times(times):
    """How many times the model's bytes pass through the master."""
    return {2 * 4: "The master is one of the four.", times // 2: "Weights go out and gradients come in."}


def slip(n_bytes):
    """Bytes that a rank sends when the inner model is called."""
    return {n_bytes: "The hooks are there, but the wrapper's forward makes them ready."}


def buckets(with_one):
    """Milliseconds of a step with one bucket a layer."""
    return {with_one: "That is with one bucket.", 80 + 160: "The last bucket begins when backward ends."}


def first(of_second):
    """All-reduces of DDP's first step; of_second are those of the second."""
    return {of_second: "So many once DDP has seen in which order gradients come."}


def fastest(largest):
    """The world in which a master's step is fastest."""
    return {largest: "Each rank more is a trip more for the master."}


def sums(three_inside):
    """All-reduces with only backward inside."""
    return {three_inside: "The forward pass decides whether backward will send."}


def step():
    """The step in which DDP complains."""
    return {
        1: "In step 1 DDP does not know yet that a gradient will never come.",
        "never": "The next forward looks back.",
    }
