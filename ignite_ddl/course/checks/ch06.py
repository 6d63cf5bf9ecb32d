"""The checks of chapter 06: a standard deviation over all ranks, and early stopping that agrees."""

import torch

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import counted_on_ranks

WAIT_SECONDS = 30  # ranks that only add a few numbers take a fraction of a second
NUMBER = 8  # bytes of the largest number that idist sends


@exercise(
    cases=[  # the errors on each rank
        [[1, 3], [7, 9]],
        [[4], [0, 0, 0, 8, 8, 4]],
        [[2, 2, 2], [2]],
        [[1, 2, 3], [], [4, 5, 6, 9]],
    ],
    about=lambda errors: f"errors {' and '.join(map(str, errors))}",
    right="the standard deviation over all rows on every rank, and a rank sends three numbers at most",
)
def std_of_all(function, errors):
    """The standard deviation over the errors of all ranks, for three numbers sent."""
    parts = [torch.tensor(mine, dtype=torch.float64) for mine in errors]
    ranks = counted_on_ranks(function, [(part,) for part in parts], WAIT_SECONDS)
    told, traffic = zip(*ranks, strict=True)
    if None in told:
        raise Hint("your function returns nothing: it should return the standard deviation")
    everything = torch.cat(parts)
    true = everything.std(correction=0).item()
    if wrong := [rank for rank, value in enumerate(told) if not _near(value, true)]:
        value = told[wrong[0]]
        text = f"the standard deviation is {true:.3f}, rank {wrong[0]} returns {value:.3f}"
        own = [part.std(correction=0).item() for part in parts if len(part)]
        if _near(value, sum(own) / len(own)) and true:
            text += ", the mean of the ranks' own; how far their means lie apart is lost there"
        elif len(everything) > 1 and _near(value, everything.std().item()):
            text += "; divide by the number of errors, not by one less"
        raise Hint(text)
    _check_traffic(traffic, 3 * NUMBER, "three numbers are enough")


@exercise(
    cases=[  # right answers of each rank by epoch, patience
        ([[1, 2, 3, 3, 3, 3], [1, 2, 2, 2, 2, 2]], 2),
        ([[5, 4, 3, 2, 1, 0, 0], [1, 3, 5, 7, 8, 8, 7]], 2),
        ([[1, 2, 3, 4], [4, 4, 4, 4]], 3),
        ([[6, 7, 6, 5, 9, 9], [3, 1, 2, 3, 9, 9], [2, 2, 2, 2, 9, 9]], 3),
        ([[0, 9, 9, 9, 9], [9, 1, 0, 0, 0]], 1),
        ([[2, 1, 3, 2, 2, 1], [1, 1, 2, 1, 2, 0]], 2),
    ],
    about=lambda right, patience: f"right answers {' and '.join(map(str, right))}, patience {patience}",
    right="all ranks stop after the same epoch, and send one number an epoch",
)
def stop_epoch(function, right, patience):
    """Every rank stops after the same epoch, that of the answers of all ranks, for a number an epoch."""
    ranks = counted_on_ranks(function, [(mine, patience) for mine in right], WAIT_SECONDS)
    epochs, traffic = zip(*ranks, strict=True)
    if None in epochs:
        raise Hint("your function returns nothing: it should return the last epoch that is trained")
    if any(epoch != epochs[0] for epoch in epochs[1:]):  # a set tells equal tensors apart
        raise Hint(f"your ranks stop after epochs {list(epochs)}; the later ones wait for ever")
    together = [sum(column) for column in zip(*right, strict=True)]
    true = _stops_after(together, patience)
    if epochs[0] != true:
        text = f"together they have {together} right and stop after epoch {true}, yours after {epochs[0]}"
        if epochs[0] == _stops_after(right[0], patience):
            text += "; rank 0 alone would do that"
        elif epochs[0] == _stops_after(together, patience, anew=False):
            text += "; with a better score the count begins anew"
        elif epochs[0] == _stops_after(together, patience, than="the last"):
            text += "; better is better than the best so far, not than the epoch before"
        raise Hint(text)
    _check_traffic(traffic, true * NUMBER, f"until epoch {true} one number an epoch is enough")


def _stops_after(right, patience, anew=True, than="the best"):
    best, waited = right[0], 0
    for epoch, now in enumerate(right[1:], start=2):
        better = now > best
        best = now if better or than == "the last" else best
        waited = 0 if better and anew else waited + (not better)
        if waited == patience:
            return epoch
    return len(right)


def _check_traffic(traffic, limit, enough):
    put_in, got = max(mine.put_in for mine in traffic), max(mine.got for mine in traffic)
    if put_in > limit:
        raise Hint(f"right, but a rank hands {put_in} bytes to its collectives; {enough} ({limit} bytes)")
    if got > limit:
        raise Hint(f"right, but a rank is handed {got} bytes, the numbers of every rank; let all_reduce add them")


def _near(value, true):
    return abs(value - true) <= 1e-5 * max(1.0, abs(true))
