"""Natural mistakes in chapter 10's exercises."""

import contextlib
from functools import partial

import torch
import torch.nn.functional as F

from ignite_ddl.course.checks.ch10 import _buckets, _never_above


def accumulate(
    replica, micro_batches, weigh=lambda rows, n_rows, n: rows / n_rows, leaves=True, forward_inside=True
):
    n_rows, n = sum(len(x) for x, _ in micro_batches), len(micro_batches)
    for place, (x, y) in enumerate(micro_batches, start=1):
        inside = contextlib.nullcontext if place == n and leaves else replica.no_sync
        with inside() if forward_inside else contextlib.nullcontext():
            loss = F.cross_entropy(replica(x), y) * weigh(len(x), n_rows, n)
            with inside():
                loss.backward()


def in_one_pass(replica, micro_batches):
    accumulate(replica, [tuple(torch.cat(parts) for parts in zip(*micro_batches, strict=True))])


MISTAKES = {
    "buckets": {
        "return a list of lists": lambda sizes, cap, first_cap: [0],
        "is empty": lambda *args: [*_buckets(*args), []],
        "is in no bucket": lambda *args: _buckets(*args)[:-1],
        "your buckets hold": lambda *args: 2 * _buckets(*args),
        "backward goes from the last": lambda sizes, cap, first_cap: [list(range(len(sizes)))],
        "bucket by bucket": lambda *args: [bucket[::-1] for bucket in _buckets(*args)],
        "a cap of its own": lambda sizes, cap, first_cap: _buckets(sizes, cap, cap),
        "its cap or more; yours never hold more, and make": _never_above,
        "bucket 0 should hold": lambda sizes, cap, first_cap: [[i] for i in reversed(range(len(sizes)))],
    },
    "accumulate": {
        "has no gradient": lambda replica, micro_batches: None,
        "sends nothing": partial(accumulate, leaves=False),
        "add up": partial(accumulate, weigh=lambda rows, n_rows, n: 1),
        "weight by rows": partial(accumulate, weigh=lambda rows, n_rows, n: 1 / n),
        "off that of the big batch": lambda replica, micro_batches: accumulate(replica, micro_batches[-1:]),
        "right, but a forward pass of 12 rows; the largest micro-batch has 4": in_one_pass,
        "right, but 3 all-reduces": partial(accumulate, forward_inside=False),
    },
}
