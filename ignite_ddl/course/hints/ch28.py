"""Hints for chapter 28's guesses: wrong answers that have a reason, from what its cells have computed."""


def billions(whole, active):
    """Billions of weights in the experts of a model that has eight, of which a token visits two."""
    return {
        whole - active: "That is the six experts that a token leaves out.",
        whole: "Attention and embeddings are no experts.",
        4 * active: "The active weights are not experts alone.",
    }


def dropped(counts, places):
    """Choices that find no place."""
    full = [count for count in counts if count > places]
    return {
        0: "There are places enough, but not where they are wanted.",
        len(full): "So many experts are full; by how many choices each?",
        max(full) - places: "The busiest expert is not the only full one.",
        sum(full): "A full expert keeps as many as it has places.",
    }


def sent_rows(all_bytes):
    """Bytes of the rows of all ranks in a step: two exchanges forward and two backward."""
    return {
        all_bytes // 2: "Each token has two choices, and gradients go both ways, too.",
        all_bytes // 4: "That is one exchange of four, or one rank of four.",
        all_bytes // 8: "Each token has two choices, and there are four exchanges.",
        all_bytes // 16: "That is one exchange of one rank.",
    }


def visits(n_ranks):
    """Ranks that a token visits, if it chooses as many experts as there are ranks."""
    return {
        n_ranks: "Two of its experts may live on one rank.",
        n_ranks / 2: "Which part of the time is a rank missed?",
    }


def own_losses(together):
    """The mean of the losses of two ranks, each of which uses one of two experts."""
    return {together: "That is with the counts of both.", 4.0: "Take the mean of the two, not the sum."}


def highest():
    """Which way to balance ends with the highest test loss."""
    return {
        "nothing": "Idle experts cost less here than a rule against experts of one cipher.",
        "bias": "It has no gradient, so it disturbs none.",
    }


def lower():
    """Which of two models of equal compute ends with the lower test loss."""
    return {"dense": "It makes as many multiplications, with an eighth of the weights."}
