"""Hints for chapter 09's guesses: wrong answers that have a reason, from what its cells have computed."""


def ring(sent):
    """Bytes that a rank of four sends in a ring, for a gradient of 48."""
    return {
        3 * 48: "A message is a quarter of the gradient.",
        sent // 2: "Round it goes twice: to add, and to hand out.",
    }


def fastest():
    """The fastest way for a large buffer."""
    return {"tree": "It passes whole gradients on.", "naive": "Seven whole gradients a rank."}


def times():
    """How many times as long a ring of 1,000 ranks takes as one of 4."""
    by_bytes, by_messages = (1 - 1 / 1000) / (1 - 1 / 4), (1000 - 1) / (4 - 1)
    return {
        by_bytes: "So grow the bytes; what of the latencies?",
        by_messages: "So grow the latencies; among four the bytes count, too.",
    }


def loss(of_200):
    """The loss of the same rate with twice the batch; of_200 is the mean loss of the smaller batch."""
    return {of_200: "That takes twice as many steps, or steps twice as long."}


def calls(of_ddp):
    """All-reduces of a step with the synchronised norm; of_ddp are those of a step without it."""
    return {of_ddp + 2: "Each sum of the forward comes back as one.", 2 + 2: "DDP adds up the gradients, too."}
