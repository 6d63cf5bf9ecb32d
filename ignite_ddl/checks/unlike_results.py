"""Whether a function makes the same of the same rows on all dp ranks, or reads what a script has computed on each.

A queue of keys, a bank of features, running statistics of inputs: a script that keeps them outside of the model has
those of its rank's rows, where one process has those of all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ignite_ddl.checks.kept_state import Held, captured, holds_iterators, reached
from ignite_ddl.checks.mixing import numbers, tried
from ignite_ddl.checks.traceless import differ
from ignite_ddl.checks.trying import may_fail, without_peers
from ignite_ddl.collectives import gathered_values
from ignite_ddl.mesh import get_mesh
from ignite_ddl.structure import SomeRows, pickled, tensors_of, unpickled

_FEW = 4  # rows that are tried
_MOST_SENT = 2**20  # numbers in them
CURE = (
    "If a script computes it from its rank's rows (a queue of keys, a bank of features, counts of classes, a running "
    "mean), sum or gather these over ranks before (idist.all_reduce, torch.distributed.all_gather), since one process "
    "has all rows; if it belongs to the rows of this batch, let it come with them, from the dataset or as y=(y, it)"
)


def unlike_results(function: Callable[[Any], Any], rows: Any, n: int) -> bool:
    """Whether a function makes something else of the same rows on another dp rank; all dp ranks call it.

    They are the first of dp rank 0, together with those of tensors that the function captures and that have as many
    rows. Calls leave no trace. Nothing is found where the function fails, perhaps on some ranks alone, sums over
    ranks, calls a model whose weights are gathered, draws random numbers, or reads an iterator.

    Args:
        function: takes a tree of rows.
        rows: this rank's, such as a batch.
        n: how many there are; 0 where it cannot be tried.
    """
    mesh, own = get_mesh(), None
    group, owners = mesh.groups["dp"], reached(function)
    of_batch = captured(owners, n, of_modules=True) if n else []
    few = SomeRows(slice(min(n, _FEW)), n)
    part = [few.of(value) for value in (rows, *(held[name] for held, name in of_batch))] if n else None
    is_sent = mesh.dp_rank == 0 and sum(t.numel() for t in tensors_of(part)) <= _MOST_SENT
    peers = gathered_values((n > 0 and not holds_iterators(owners), pickled(part) if is_sent else None), group)
    given = peers[0][1]
    if given is None or not all(may_try for may_try, _ in peers):
        return False
    with may_fail("unlike results of ranks"), torch.no_grad(), without_peers():
        rows, *values = unpickled(part, given)
        with _replaced(of_batch, values):
            found, draws = tried(function, rows, owners)
        own = None if draws else [numbers(tensor).cpu() for tensor in found]
    results = [of_rank for of_rank in gathered_values(own, group) if of_rank is not None]
    return any(any(differ(*pair) for pair in zip(results[0], other, strict=False)) for other in results[1:])


@contextlib.contextmanager
def _replaced(variables: list[tuple[Held, str]], values: list[Any]) -> Iterator[None]:
    before = [held[name] for held, name in variables]
    try:
        for (held, name), value in zip(variables, values, strict=True):
            held[name] = value
        yield
    finally:
        for (held, name), value in zip(variables, before, strict=True):
            held[name] = value
