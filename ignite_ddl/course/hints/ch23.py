"""Hints for chapter 23's guesses: wrong answers that have a reason, from what its cells have computed."""


def downloads(n_ranks):
    """How often n_ranks on two machines download a file."""
    return {1: "The other machine's disk would stay empty.", n_ranks: "One rank of each machine goes first."}


def connections(n_ranks):
    """Connections between n_ranks, of which each pair has one."""
    return {
        n_ranks: "That is a ring's.",
        n_ranks * (n_ranks - 1): "Each has two ends.",
        n_ranks - 1: "So many each rank has.",
    }


def storeys(part, flat):
    """Bytes on the cable in two storeys; part is one way's, flat the flat ring's."""
    return {part: "Each part goes both ways.", flat: "Who sends how much of the gradient across?"}


def steps(on_two, on_four):
    """Steps of an epoch on four ranks: of a global batch, and of a batch a rank."""
    return {on_two: "One of the two sizes is a rank's.", on_four[::-1]: "Whose batch size is the global one?"}
