"""Hints for chapter 27's guesses: wrong answers that have a reason, from what its cells have computed."""


def scores(n_tokens):
    """GB of one head's scores, of 2 bytes each."""
    return {
        n_tokens**2 / 1e9: "So many scores are there; how many bytes has each?",
        n_tokens**2 * 4 / 1e9: "In bfloat16 a number has 2 bytes.",
        n_tokens**2 * 2 / 2**20: "That is in units of a thousandth.",
    }


def merged(outputs, sums):
    """Attention to two blocks together, from the attention to each and the sums of their exponentials."""
    weighted = sum(output * total for output, total in zip(outputs, sums, strict=True))
    return {sum(outputs) / 2: "That is the mean. Which block's keys count for more?", weighted: "Divided by what?"}


def sent(one_part, n_ranks):
    """Bytes that a rank of the ring sends forward, from the bytes of its keys."""
    return {
        2 * one_part * n_ranks: "After the last step nobody needs them any more.",
        one_part * (n_ranks - 1): "Values travel, too.",
        2 * one_part: "So many in each step.",
        2 * one_part * (n_ranks - 1) * n_ranks: "That is all ranks together.",
    }


def right():
    """How many of the three gradients survive a logarithm without a gradient."""
    return {0: "Which of the three does no logarithm depend on?", 3: "Output and logarithm both depend on the scores."}


def pairs(by_rank, n_tokens):
    """Pairs of tokens that the last rank computes."""
    width = n_tokens // len(by_rank)
    return {
        sum(by_rank) // len(by_rank): "That is the mean; what do the last tokens see?",
        width * n_tokens: "Its first token does not see its last one.",
        width * (n_tokens - width): "Its own tokens see each other, too.",
    }


def ratio(n_ranks):
    """How many times as many bytes the ring sends as Ulysses."""
    return {
        n_ranks: "Ulysses sends queries and outputs as well.",
        2 / n_ranks: "That is the other way round.",
        1: "The ring's keys and values visit every rank; where does a number go in an exchange?",
    }


def targets(n_tokens):
    """How many targets of a row are right if each rank shifts its own ids."""
    return {
        n_tokens - 1: "What follows token 1 on rank 0?",
        n_tokens - 2: "So many are there at all; is each the right one?",
    }
