"""Whether rows of a batch meet outside of the model: in ``collate_fn``, ``prepare_batch``, and transforms of outputs.

A dp rank has some rows of a batch. What makes a row from others of them (mixup, a mean, a norm) makes another one than
in one process. It is tried with other rows in the place of the last ones.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info

from ignite_ddl.checks.kept_state import holds_iterators, random_kept, reached, states_kept, versions
from ignite_ddl.checks.traceless import WatchForSums, differ, weights_kept
from ignite_ddl.checks.trying import may_fail, without_peers
from ignite_ddl.collectives import gathered_values, on_any_rank
from ignite_ddl.context.sequence import are_shards, full_rows, full_sequences, shard_tokens
from ignite_ddl.mesh import get_mesh
from ignite_ddl.structure import concatenated, detached, local_tensor, map_leaves, n_rows, some_rows, tensors_of
from ignite_ddl.tensor.random import has_drawn, random_states

_FEW = 4  # rows of outputs that are tried
_MIXES = (
    "makes rows of a batch from other rows of it, or by their number or places (a mean, a norm, mixup, x / len(x)?), "
    "of which each dp rank has some, and one process all of them"
)


def rows_meet(function: Callable[[Any], Any], rows: Any, n: int) -> tuple[bool, bool]:
    """Whether what a function makes of some rows changes with the others or their number, and whether it draws random
    numbers.

    Rows may change places, and have several results. It is called six times, with copies, also for a single row; what
    these calls change is restored. Nothing is found where it fails, sums over ranks, calls a model whose weights are
    gathered, or reads an iterator, which would go on, nor in a tensor that has another shape for other rows, or is as
    large for fewer of them: a table.

    Args:
        function: takes rows.
        rows: a batch, or a list of samples.
        n: how many there are.
    """
    owners, n_kept = reached(function), min(n, n // 2 | 1)  # odd, so that pairs are not kept as a whole
    rows_in_lists = False  # each row by itself, which may be as long as there are rows

    def noting(rows: Any) -> Any:
        nonlocal rows_in_lists
        result = function(rows)
        lists = tree_leaves(result, is_leaf=lambda node: type(node) is list and len(node) == n > 2)
        rows_in_lists = rows_in_lists or any(type(one) is list for one in lists)
        return result

    parts = slice(0, n_kept), slice(n - n_kept, n)  # the largest of all rows is replaced in one of them
    if holds_iterators(owners):
        return False, False
    with may_fail("rows that meet"), torch.no_grad(), without_peers():
        (first, draws), (again, _) = (tried(noting, _replaced(rows, slice(0, n), n), owners) for _ in range(2))
        others = [tried(function, _replaced(rows, kept, n), owners)[0] for kept in parts]
        same = all(a.shape == b.shape and not _differ(a, b) for a, b in zip(first, again, strict=False))
        if n < 2 or not same or rows_in_lists:
            return False, draws
        pairs = [(kept, *one) for kept, other in zip(parts, others, strict=True) for one in enumerate(other)]
        meet = {i for kept, i, other in pairs if _meet(first[i], other, kept, n)}
        if meet or not draws:
            with may_fail("rows that meet"):  # it may need as many rows
                of_parts = [tried(function, _some(rows, kept, n), owners)[0] for kept in parts]
                if all(len(fewer) == len(first) for fewer in of_parts):
                    meet = {i for i in meet if any(first[i].shape != fewer[i].shape for fewer in of_parts)}
                    of_number = (_depend_on_number(first, *one, n) for one in zip(of_parts, parts, strict=True))
                    if not draws and any(of_number):
                        return True, draws
        return bool(meet), draws
    return False, False


def tokens_meet(function: Callable[[Any], Any], tree: Any) -> bool:
    """Over cp, whether a function makes of a rank's tokens another thing than that part of what it makes of all tokens.

    So it does where it numbers them, or leaves out the last ones, too. All cp ranks call it, and get the same answer:
    False where nothing counts tokens, or the function fails, draws random numbers, or chooses tokens by a mask.

    Args:
        function: takes a tree of tensors for a rank's tokens.
        tree: this rank's.
    """
    group = get_mesh().cp_group
    if group is None:
        return False
    rows, n, length = full_rows(tree)
    owners, meet = reached(function), False
    if n and not holds_iterators(owners):
        with may_fail("tokens that are numbered or left out"), torch.no_grad(), WatchForSums() as watch:
            with full_sequences():
                of_all, draws = tried(function, copy.deepcopy(rows), owners)
            of_part, _ = tried(function, copy.deepcopy(shard_tokens(rows, n, length)), owners)
            pairs = [pair for pair in zip(of_part, of_all, strict=True) if pair[0].ndim]
            chooses = any(a.shape[1:] == b.shape[1:] and len(b) not in (len(a), n * length) for a, b in pairs)  # a mask
            parts_differ = not are_shards(*zip(*pairs, strict=True), length, get_mesh()) if pairs else False
            meet = parts_differ and not chooses and not draws and not watch.found
    return any(gathered_values(meet, group))


def _replaced(rows: Any, kept: slice, n: int) -> Any:
    """A copy of rows, with the first or the last of those that are kept in the place of all others."""
    spare = some_rows(rows, slice(n - 1, n) if kept.start else slice(1), n)
    parts = [*[spare] * kept.start, some_rows(rows, kept, n), *[spare] * (n - kept.stop)]
    sizes = [*[1] * kept.start, kept.stop - kept.start, *[1] * (n - kept.stop)]
    return copy.deepcopy(detached(concatenated(parts, sizes)))


def tried(function: Callable[[Any], Any], rows: Any, owners: list[Any]) -> tuple[list[torch.Tensor], bool]:
    """The tensors that a function makes, and whether it has drawn random numbers; without a trace."""
    kept = weights_kept(one for one in owners if isinstance(one, nn.Module))
    with kept, states_kept(owners), random_kept(owners):
        before = random_states()
        found = [local_tensor(tensor.detach()).clone() for tensor in tensors_of(function(rows))]
        return found, has_drawn(before)


def _meet(first: torch.Tensor, other: torch.Tensor, kept: slice, n: int) -> bool:
    """Whether rows that were kept differ, and not only by their places."""
    if not first.ndim or first.shape != other.shape or not first.numel() or len(first) % n:
        return False
    each = len(first) // n  # such as two views, one after the other or by turns
    of_rows = [(t.unflatten(0, (each, n))[:, kept], t.unflatten(0, (n, each))[kept]) for t in (first, other)]
    if any(not _differ(a, b) for a, b in zip(*of_rows, strict=True)):
        return False
    return _has_new_rows(first, other)


def _some(rows: Any, kept: slice, n: int) -> Any:
    return copy.deepcopy(detached(some_rows(rows, kept, n)))


def _depend_on_number(first: list[torch.Tensor], fewer: list[torch.Tensor], kept: slice, n: int) -> bool:
    """Whether some of the rows differ where there are no others; indices, which are integers, may."""
    are_placed, moved = False, False  # whether rows of one tensor stay in their places, and those of another do not
    for of_all, of_some in zip(first, fewer, strict=False):
        if not of_all.ndim or of_all.shape[1:] != of_some.shape[1:] or len(of_all) != n or len(of_some) == n:
            continue
        same = len(of_some) == kept.stop - kept.start and not _differ(of_all[kept], of_some)
        if of_all.is_floating_point() and not same:
            moved = True
            if _has_new_rows(of_all, of_some):
                return True
        are_placed = are_placed or same and len(of_all.unique(dim=0)) == n
    return are_placed and moved


def _has_new_rows(known: torch.Tensor, found: torch.Tensor) -> bool:
    drawn = torch.randn(known[0].numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    have, should = ((numbers(t).reshape(len(t), -1).double() @ drawn.to(t.device)).flatten() for t in (known, found))
    have, should = torch.nan_to_num(have), torch.nan_to_num(should)  # NaN is another row, such as a mean of none
    return bool(((should[:, None] - have[None]).abs().amin(1) > 1e-6 * have.abs().amax()).any())


def _differ(first: torch.Tensor, other: torch.Tensor) -> bool:
    return differ(numbers(first), numbers(other))


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    real = real if real.is_floating_point() else real.double()
    return real.flatten(1) if real.ndim > 1 else real


class CheckedCollate:
    """A ``collate_fn``, tried with its first batch; it can be pickled. One rank's is enough for a warning."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn, self.is_checked = collate_fn, False

    def __call__(self, samples: list[Any]) -> Any:
        worker = get_worker_info()
        if not self.is_checked and len(samples) > 1 and (worker is None or worker.id == 0):
            self.is_checked = True
            if rows_meet(self.collate_fn, list(samples), len(samples))[0]:
                warnings.warn(
                    f"collate_fn {_MIXES}: to get the numbers of one process, do that in the dataset", stacklevel=2
                )
        return self.collate_fn(samples)


class CheckedTransform:
    """A ``model_transform``, tried with the first output, and under pp with the first one of several rows."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform, self.tried = transform, 0  # with how many rows: 2 for more

    def __call__(self, output: Any) -> Any:
        if self.tried == 2 or (n := n_rows(output)) <= self.tried:
            return self.transform(output)
        given = map_leaves(lambda leaf: leaf, output)  # it may change the output, and return it
        tensors, before = tensors_of(given), versions(given)
        result = self.transform(output)
        same = result is output and versions(given) == before
        if not (same and len(now := tensors_of(output)) == len(tensors) and all(map(operator.is_, now, tensors))):
            self.tried = min(n, 2) if get_mesh().pp_size > 1 else 2
            check_transform("model_transform", self.transform, given, n, "in loss_fn, which is compared")
            check_tokens_of("model_transform", self.transform, given)
        return result


def check_transform(name: str, transform: Callable[[Any], Any], output: Any, n: int, cure: str) -> None:
    """Raises a ValueError if what a transform makes of a row of an output depends on others: of a few, which it copies.

    Args:
        name: of what is given as an argument.
        transform: takes an output.
        output: with ``n`` rows.
        n: how many there are.
        cure: where else it may be computed.
    """
    few = min(n, _FEW)
    if rows_meet(transform, some_rows(output, slice(few), n), few)[0]:
        raise ValueError(f"{name} {_MIXES}: compute it from one row, or {cure}")


def check_tokens_of(name: str, transform: Callable[[Any], Any], output: Any) -> None:
    """Raises a ValueError on all cp ranks if what a transform makes of a token depends on others, or on its place."""
    if tokens_meet(transform, output):
        raise ValueError(
            f"{name} makes something of a token from other tokens, or by its place (a shift, a mean, x[:, -1]?), of "
            "which each cp rank has some: shift targets in prepare_batch, which gets full sequences, compute the rest "
            "by ddl.sequence_positions or from one token, or take a mesh without cp"
        )


def check_prepare_batch(prepare: Callable[[Any], Any], batch: Any, rows: tuple[int, int] | None, escape: str) -> None:
    """Raises a ValueError on every rank if batches are prepared unlike in one process; all ranks call it.

    Args:
        prepare: takes a batch.
        batch: this dp rank's rows.
        rows: their number, and that of all dp ranks; None if it is not known.
        escape: what lets it be, as the end of a sentence.
    """
    mesh = get_mesh()
    if mesh.dp_size == 1 or rows is None:
        return
    n = max(1, rows[0])
    found = gathered_values(rows_meet(prepare, batch, n), mesh.groups["dp"])
    if not any(meet for meet, _ in found):
        return
    if any(draws for _, draws in found):  # others on each dp rank, in any case
        if mesh.rank == 0:
            warnings.warn(
                f"prepare_batch {_MIXES}: to get the numbers of one process, do that in the dataset", stacklevel=2
            )
        return
    if on_any_rank(_differs_from_one_process(prepare, batch, rows[0])):
        raise ValueError(
            f"prepare_batch {_MIXES}: compute it from one row, do it in the dataset, or sum over ranks what it is "
            f"computed from (idist.all_reduce in prepare_batch){escape}"
        )


def _differs_from_one_process(prepare: Callable[[Any], Any], batch: Any, n: int) -> bool:
    """Whether a rank's rows are prepared unlike among those of all ranks: not groups that a rank has in full."""
    mesh, owners = get_mesh(), reached(prepare)
    parts = gathered_values((n, detached(batch)), mesh.groups["dp"])
    sizes = [size for size, _ in parts]
    begin = sum(sizes[: mesh.dp_rank])
    with may_fail("rows that meet in prepare_batch"), torch.no_grad():
        whole = concatenated([part for size, part in parts if size], [size for size in sizes if size])
        (own, _), (of_all, _) = (tried(prepare, copy.deepcopy(of), owners) for of in (detached(batch), whole))
        pairs = [(a, b) for a, b in zip(own, of_all, strict=True) if a.ndim and len(a) == n and len(b) == sum(sizes)]
        return any(_differ(a, b[begin : begin + n]) for a, b in pairs)
    return False
