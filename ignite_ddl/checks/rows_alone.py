"""Whether a model computes each row by itself: rows are tried alone and with others."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from ignite_ddl.checks.kept_state import LARGE, cloned, modules_of, same_value
from ignite_ddl.checks.traceless import (
    Kept,
    WatchForSums,
    as_real,
    differ,
    evaluating,
    put,
    rows_kept,
    stored_values,
    without_trace,
)
from ignite_ddl.checks.trying import may_fail
from ignite_ddl.collectives import gathered_values, on_any_rank
from ignite_ddl.mesh import get_mesh
from ignite_ddl.structure import (
    concatenated,
    local_tensor,
    may_be_a_sample,
    n_rows,
    pickled,
    some_rows,
    tensors_of,
    unpickled,
)

MAX_ROWS = 8  # rows on which a model is tried
ROWS_DEPEND = (
    "a row of the model's output should depend on that row of the input alone, but depends on other rows of the batch "
    "(a mean, a norm or attention over rows?), of which each rank or microbatch has some: compute it from one row. If "
    "it should be computed from each rank's rows, or if x has two views of each row (torch.cat([x, view])) that the "
    "loss compares, pass checks=False to ddl.auto_model and ddl.create_supervised_trainer"
)
MAY_DEPEND = contextvars.ContextVar("rows may depend on each other", default=False)


@contextlib.contextmanager
def rows_may_depend() -> Iterator[None]:
    """Inside, rows may depend on each other: the check is off, since results are compared instead."""
    token = MAY_DEPEND.set(True)
    try:
        yield
    finally:
        MAY_DEPEND.reset(token)


def rows_depend_on_each_other(
    run: Callable[[Any], Any], x: Any, stages: Sequence[nn.Module], counted: dict[str, Any] | None = None
) -> bool:
    """Whether the outputs for some rows change if these rows run without the others, in training or in evaluation.

    False where it cannot be known: of a model that draws random numbers there, goes on with what it has kept of each
    row, sums over ranks by itself, or cannot be called with fewer rows, and of BatchNorm without running statistics,
    which takes a rank's rows by a stated rule. In training, torch's modules and ours are in evaluation mode for that
    reason. Every rank makes eight passes; nine with ``counted``, to which the names and values are added of what
    modules keep in training of the number of rows.
    """
    in_training = not MAY_DEPEND.get() and _depend(run, x, stages, False, counted)
    return evaluated_rows_depend(run, x, stages) or in_training


def evaluated_rows_depend(run: Callable[[Any], Any], x: Any, stages: Sequence[nn.Module]) -> bool:
    """The same in evaluation alone: four passes."""
    return not MAY_DEPEND.get() and _depend(run, x, stages, True)


def _depend(
    run: Callable[[Any], Any],
    x: Any,
    stages: Sequence[nn.Module],
    evaluates: bool,
    counted: dict[str, Any] | None = None,
) -> bool:
    run, x = opened(run, x)
    few, part = few_rows(x)
    n, last = n_rows(x), n_rows(few)
    all_have_rows = all(len(tensor) == n for tensor in tensors_of(x) if tensor.ndim)
    left: list[Kept] = []  # of each row, by the last pass: a model that goes on with it would read other rows' in parts
    kept_values = []  # after each pass
    plain = [stage.module if isinstance(stage, DistributedDataParallel) else stage for stage in stages]

    def outputs(rows: Any, seed: int, first: Iterable[Kept] = ()) -> list[torch.Tensor]:
        with without_trace(stages, seed) as kept:
            put(first)
            found = [as_real(local_tensor(out)).clone() for out in tensors_of(run(cloned(rows))) if out.ndim]
            left[:] = rows_kept(kept, n_rows(rows))
            if counted is not None:
                kept_values.append({**stored_values(plain, n_rows(rows)), **_small_buffers(plain)})
            return found

    with may_fail("rows that depend on each other"):
        with torch.no_grad(), evaluating(stages, evaluates), WatchForSums() as watch:
            together, again = outputs(few, 0), outputs(few, 1, list(left))
            if counted is not None:
                outputs(some_rows(few, slice(None), last, lambda leaf, _: leaf[:1].expand_as(leaf).clone()), 0)
            parts = [slice(0, part.start or last), part]  # the largest of all rows is in one of them
            alone = [outputs(some_rows(few, of, last) if all_have_rows else few, 0) for of in parts]
        no_statistics = any(isinstance(m, _BatchNorm) and m.running_mean is None for m in modules_of(stages).values())
        unlike = any(not torch.equal(one, other) for one, other in zip(together, again, strict=True))
        if no_statistics or unlike or watch.found or n < 2 or not all_have_rows:
            return False
        if counted is not None:
            del kept_values[-2]  # that of the first part
            counted.update(_of_their_number(*kept_values))
        pairs = [
            (of, *pair) for of, found in zip(parts, alone, strict=True) for pair in zip(together, found, strict=False)
        ]
        for of, output, of_part in pairs:
            each = len(output) // last  # such as a row for each token
            rows = output[of.start * each : of.stop * each]
            of_rows = len(output) == each * last and len(of_part) < len(output)  # not a table, with as many entries
            if output.is_floating_point() and of_rows and differ(rows, of_part, watch.coarsest):
                return True
    return False


def _small_buffers(stages: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """Buffers of all modules but BatchNorm, by name; large ones, which hold no numbers of rows, are left out."""
    modules = {name: module for name, module in modules_of(stages).items() if not isinstance(module, _NormBase)}
    named = {f"{name}.{k}".removeprefix("."): b for name, module in modules.items() for k, b in module._buffers.items()}
    return {name: local_tensor(b).clone() for name, b in named.items() if b is not None and b.numel() <= LARGE}


def _of_their_number(*kept: dict[str, Any]) -> dict[str, Any]:
    """What depends on the number of rows, and on nothing else: the last pass had fewer."""

    def shapes(value: Any) -> list[Any]:
        return [getattr(leaf, "shape", None) for leaf in tree_leaves(value)]

    def same(value: Any, other: Any) -> bool:
        return shapes(value) == shapes(other) and all(map(same_value, tree_leaves(value), tree_leaves(other)))

    first, *others, last = kept
    names = [name for name in last if name in first and all(same(first[name], other.get(name)) for other in others)]
    return {k: last[k] for k in names if shapes(first[k]) == shapes(last[k]) and not same(first[k], last[k])}


def few_rows(x: Any) -> tuple[Any, slice]:
    """Rows on which a model is tried, few if each tensor has rows; and which of them are tried without the others."""
    n = n_rows(x)
    all_have_rows = all(len(tensor) == n for tensor in tensors_of(x) if tensor.ndim)
    few = some_rows(x, slice(MAX_ROWS), n) if all_have_rows else x
    last = n_rows(few)
    return few, slice(last - max(1, last // 3), last)


@dataclasses.dataclass
class _Opened:
    """What is in a container that torch's pytree takes for a leaf, as transformers' BatchEncoding; and this itself."""

    held: dict[Any, Any]
    of: Any


def opened(run: Callable[[Any], Any], x: Any) -> tuple[Callable[[Any], Any], Any]:
    """The batch with such containers opened, so that rows in them are seen, and a run that takes it."""

    def open_one(leaf: Any) -> Any:
        is_mapping = isinstance(leaf, MutableMapping)
        if not is_mapping and (isinstance(leaf, torch.Tensor | nn.Module | type) or dataclasses.is_dataclass(leaf)):
            return leaf
        held = tree_map(open_one, dict(leaf if is_mapping else getattr(leaf, "__dict__", {})))
        return _Opened(held, leaf) if any(isinstance(t, torch.Tensor | _Opened) for t in tree_leaves(held)) else leaf

    def close(leaf: Any) -> Any:
        if not isinstance(leaf, _Opened):
            return leaf
        made = copy.copy(leaf.of)
        (made if isinstance(made, MutableMapping) else vars(made)).update(closed(leaf.held))
        return made

    def closed(tree: Any) -> Any:
        return tree_map(close, tree, is_leaf=lambda leaf: isinstance(leaf, _Opened))

    try:
        inside = tree_map(open_one, x)
    except Exception:  # objects that hold each other
        return run, x
    return lambda rows: run(closed(rows)), inside


def several_rows(x: Any) -> Any:
    """The rows of a rank, or a single row with some of other dp ranks: of one row nothing would show.

    All dp ranks call it.
    """
    mesh, n = get_mesh(), n_rows(x)
    if not on_any_rank(n < 2, mesh.dp_group):
        return x
    peers = gathered_values(pickled(some_rows(x, slice(1), n)), mesh.dp_group)
    others = [peer for rank, peer in enumerate(peers) if rank != mesh.dp_rank and peer is not None][:MAX_ROWS]
    with may_fail("rows that depend on each other"):  # rows of another length
        joined = concatenated([x, *(unpickled(x, other) for other in others)], [1] * (1 + len(others)))
        return joined if n < 2 and not may_be_a_sample(x) else x
    return x


def norm_over_rows(stages: Iterable[nn.Module]) -> str | None:
    """The name of a BatchNorm that takes the statistics of the rows that it gets; None if there is none."""
    norms = ((name, module) for name, module in modules_of(stages).items() if isinstance(module, _BatchNorm))
    return next((name for name, norm in norms if norm.training or norm.running_mean is None), None)
