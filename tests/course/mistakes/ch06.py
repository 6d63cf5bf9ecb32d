"""Natural mistakes in chapter 06's exercises."""

from functools import partial

import ignite.distributed as idist
import torch

from ignite_ddl.course.checks.ch06 import _stops_after


def std(errors, less=0):
    n = idist.all_reduce(len(errors))
    mean = idist.all_reduce(errors.sum().item()) / n
    return (idist.all_reduce((errors - mean).square().sum().item()) / (n - less)) ** 0.5


def by_squares(errors, reduce=idist.all_reduce):
    count = torch.tensor(float(len(errors)), dtype=errors.dtype)
    n, total, squares = reduce(torch.stack([count, errors.sum(), errors.square().sum()])).tolist()
    return max(0.0, squares / n - (total / n) ** 2) ** 0.5


def own(errors):
    return errors.std(correction=0).item() if len(errors) else 0.0


def stop(right, patience, score=idist.all_reduce, equal=False, leave=lambda epoch: False):
    best, waited = -1, 0
    for epoch, mine in enumerate(right, start=1):
        now = score(mine)
        best, waited = (now, 0) if now > best or (equal and now == best) else (best, waited + 1)
        if waited == patience or leave(epoch):
            return epoch
    return len(right)


RIGHT = {"std_of_all": [by_squares]}
MISTAKES = {
    "std_of_all": {
        "your function returns nothing": lambda errors: None,
        "[7, 9]: the standard deviation is 3.162, rank 0 returns 1.000, the mean of the ranks' own": own,
        "divide by the number of errors, not by one less": partial(std, less=1),
        "rank 1 returns 0.000": lambda errors: std(errors) * (idist.get_rank() == 0),
        "errors [4] and [0, 0, 0, 8, 8, 4]": lambda errors: 10**0.5,
        "right, but a rank hands 32 bytes": lambda errors: std(errors) + 0 * idist.all_reduce(0.0),
        "right, but a rank is handed 48 bytes, the numbers of every rank": partial(
            by_squares, reduce=lambda mine: idist.all_gather(mine).view(-1, 3).sum(0)
        ),
    },
    "stop_epoch": {
        "your function returns nothing": lambda right, patience: None,
        "your ranks stop after epochs [5, 4]; the later ones wait for ever": _stops_after,
        "rank 0 alone would do that": lambda right, patience: idist.all_reduce(
            _stops_after(right, patience) * (idist.get_rank() == 0)
        ),
        "and stop after epoch 5, yours after 6": partial(stop, equal=True),
        "until epoch 5 one number an epoch is enough (40 bytes)": lambda right, patience: _stops_after(
            idist.all_reduce(torch.tensor(right)).tolist(), patience
        ),
    },
}
WAITING = {
    "stop_epoch": {
        "your ranks wait for each other": lambda right, patience: stop(
            right, patience, leave=lambda epoch: epoch == _stops_after(right, patience)
        )
    }
}
