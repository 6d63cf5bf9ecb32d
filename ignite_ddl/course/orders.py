"""Parses, simulates and measures orders of a pipeline's passes, as written in exercises: "F0", "B0", ...

F is a forward pass, B a whole backward pass, I and W its two halves: gradients of the input and of the weights.
"""

from itertools import accumulate

from ignite_ddl.course.exercises import Hint

SECONDS = {"F": 1, "B": 2, "I": 1, "W": 1}  # time units, as in the chapters' drawings
_KEPT = {"F": 1, "B": -1, "I": 0, "W": -1}  # W needs the activations too


def read(order, kinds, rank, n_microbatches):
    """Parses an order into pairs such as ("F", 0); each pass must occur once.

    Args:
        order: the result of the learner's function.
        kinds: the kinds of passes of a microbatch: "FB" or "FIW".
        rank: the rank of the order.
        n_microbatches: number of microbatches.

    Raises:
        Hint: if the result is not a list of names, or a pass is unknown, missing or occurs twice.
    """
    order = list(order) if hasattr(order, "__iter__") and not isinstance(order, str) else [None]
    if not all(isinstance(name, str) for name in order):
        raise Hint("return a list of names such as [" + ", ".join(f'"{kind}0"' for kind in kinds) + "]")
    wanted = {f"{kind}{m}" for kind in kinds for m in range(n_microbatches)}
    if unknown := [name for name in order if name not in wanted]:
        others = " and ".join(kinds[1:])
        raise Hint(f"rank {rank} has a pass {unknown[0]!r}; there are F0 to F{n_microbatches - 1}, and {others}")
    if missing := sorted(wanted - set(order)):
        waits = "" if missing[0][0] == "W" else ", and the passes that need it wait forever"
        raise Hint(f"rank {rank} leaves out {missing[0]}{waits}")
    if len(order) > len(wanted):
        raise Hint(f"rank {rank} has {len(order)} passes, {len(wanted)} are there to do")
    return [(name[0], int(name[1:])) for name in order]


def play(orders):
    """The time at which the last pass ends; a pass starts once its rank is free and its inputs are done.

    Args:
        orders: for each rank, the result of :func:`read`.

    Raises:
        Hint: if the ranks wait for one another forever.
    """
    last, done = len(orders) - 1, {}
    free, place = [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            if place[rank] == len(order):
                continue
            kind, m = order[place[rank]]
            if kind == "F":
                needs = [("F", rank - 1, m)] if rank > 0 else []
            elif kind == "W":
                needs = [("I", rank, m)]
            else:
                needs = [("F", rank, m)] + ([(kind, rank + 1, m)] if rank < last else [])
            if all(need in done for need in needs):
                start = max([free[rank], *(done[need] for need in needs)])
                free[rank] = done[kind, rank, m] = start + SECONDS[kind]
                place[rank] += 1
                moved = True
    for rank, order in enumerate(orders):
        if place[rank] < len(order):
            kind, m = order[place[rank]]
            raise Hint(f"nobody can go on, rank {rank} stands before {kind}{m} for ever")
    return max(free)


def most_kept(order):
    """The peak number of microbatches whose activations a rank keeps."""
    return max(accumulate(_KEPT[kind] for kind, _ in order))
