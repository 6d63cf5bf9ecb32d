"""Hints for chapter 11's guesses: wrong answers that have a reason, from what its cells have computed."""


def accuracy(of_24):
    """The accuracy with batches of 600 at the same rate; of_24 is that with batches of 24, in %."""
    return {of_24: "How many steps are left of 3,000?"}


def worst(largest):
    """The worst batch size at equal steps."""
    return {largest: "It takes as many steps as the others now, and has read most."}


def scaled():
    """Whether batches of 600 do better or worse at the scaled rate."""
    return {"better": "Do the gradients of a fresh network stay the same for 25 steps?"}


def steps(of_24):
    """The steps with batches of 600; of_24 are those with batches of 24."""
    return {of_24 * 24 / 600: "That is perfect scaling, without the S_min."}


def grown():
    """The batch with the noise of a fifth of the rate."""
    return {24 * 5: "Near the whole set a batch has less noise: the formula has a − 1."}


def negatives(own, everybody):
    """The other images that an image meets: on its rank, and when all are gathered."""
    return {everybody: "A rank sees its own 16 images.", own + 1: "An image is not its own negative."}


def share(at_256):
    """The share of communication at 1024 GPUs, in %."""
    return {
        at_256: "The bytes stay; the messages are four times as many.",
        4 * 17: "Only the latencies are four times as long.",
    }
