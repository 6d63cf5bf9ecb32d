"""Forward passes for checks, which leave no trace: buffers, random states and attributes of modules are restored."""

from __future__ import annotations

import contextlib
import contextvars
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ignite.distributed as idist
import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ignite_ddl.checks.kept_state import (
    LARGE,
    OF_EACH_MODULE,
    Held,
    SavedState,
    beside,
    cloned,
    copied,
    is_dense,
    kept_beside,
    label_of,
    leaves_of,
    modules_of,
    random_kept,
    saved_states,
    size_of,
    states_kept,
)
from ignite_ddl.checks.trying import may_fail
from ignite_ddl.collectives import gathered
from ignite_ddl.compat import forget_forward_pass, gathers, no_transforms, without_dispatch_modes
from ignite_ddl.data_parallel import buffers_apart
from ignite_ddl.mesh import get_mesh
from ignite_ddl.structure import address_of, local_tensor, map_leaves, tensors_of
from ignite_ddl.tensor.random import random_stream, state_of

UNLIKE_MODULES = (
    "dp ranks should call the same modules in a step, equally often, and get gradients of the same weights, but do "
    "not: gradients of different weights would be added, or ranks would wait for each other. Make the same choice on "
    "all ranks (draw it with the same seed; end a loop by the largest residual of all ranks, "
    'idist.all_reduce(residual, "MAX") of a number), or train with DDP alone, with find_unused_parameters=True if a '
    "rank leaves weights out."
)


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Inside, products of float32 numbers are not rounded to TF32 or bfloat16: a GPU takes another kernel for another
    number of rows, and what two of them round apart grows from layer to layer.
    """
    try:
        old = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        new = []
    except RuntimeError:  # torch's new settings are used, and the old ones refuse to be read then
        old, backends = ("highest", False), (torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn)
        found = [getattr(of, name, None) for of in backends for name in ("matmul", "conv", "rnn")]
        new = [(of, of.fp32_precision) for of in found if of is not None and of.fp32_precision in ("tf32", "bf16")]
    precision, by_cudnn = old
    if precision != "highest":
        torch.set_float32_matmul_precision("highest")
    if by_cudnn:
        torch.backends.cudnn.allow_tf32 = False
    for of, _ in new:
        of.fp32_precision = "ieee"
    try:
        yield
    finally:
        for of, was in new:
            of.fp32_precision = was
        if by_cudnn:
            torch.backends.cudnn.allow_tf32 = True
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def without_trace(stages: Iterable[nn.Module], seed: int = 0) -> Iterator[list[SavedState]]:
    """Restores at its end what forward passes inside change in these modules, and beside them in objects and globals;
    random numbers there depend on the seed.

    Raises:
        UnlikeModules: if ranks that gather weights in these passes need other ones, or only some of them fail.
    """
    others = beside(stages)
    held = [one for one in others if state_of(one)]
    with (
        exact_float32(),
        random_kept(held),
        buffers_apart(stages),
        _gathering_alike(stages),
        weights_kept(stages),
        states_kept([*stages, *others]) as kept,
        random_stream(seed),
    ):
        for stream in (random, sys.modules.get("numpy.random", random), *held):
            if isinstance(stream, torch.Generator):
                stream.manual_seed(seed)
            elif seed and hasattr(stream, "random"):
                stream.random()
        try:
            yield kept
        except Exception:  # which leaves weights of FSDP2 gathered, of which a step would not see the next values
            for stage in stages:
                forget_forward_pass(stage)
            raise


def peers_are_elsewhere(calls: int, number: int, group: Any) -> bool:
    """Whether ranks of the group are at other places of a forward pass than this one, with other numbers."""
    with no_transforms(), without_dispatch_modes():  # which would count or transform what is sent here
        local = torch.tensor([calls, number], device=idist.device())
        return any(not torch.equal(peer, local) for peer in gathered(local, group))


class UnlikeModules(ValueError):
    """What a check tried is not known, since ranks called different modules, or some of them failed."""


_END, _FAILED = -1, -2  # instead of a module's number: the end of passes, or an error in them


@contextlib.contextmanager
def _gathering_alike(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, ranks agree before each gather of FSDP2: else it would wait for a peer that has failed, or get another's
    weights, with which a check's few rows do not go.
    """
    group, sharded = get_mesh().dp_cp_group, [module for module in modules_of(stages).values() if gathers(module)]

    def meet(number: int) -> None:
        if peers_are_elsewhere(0, number, group):
            raise UnlikeModules(UNLIKE_MODULES)

    handles = [m.register_forward_pre_hook(lambda *_, i=i: meet(i), prepend=True) for i, m in enumerate(sharded)]
    try:
        yield
        if sharded:
            meet(_END)
    except UnlikeModules:
        raise
    except Exception:
        if sharded:
            meet(_FAILED)
        raise
    finally:
        for handle in handles:
            handle.remove()


Written = dict[str, tuple[torch.Tensor, torch.Tensor]]  # weights to which a pass has written: before, and after


class _KeepingWeights(TorchDispatchMode):
    """Copies a weight before an operation writes to its memory, also through ``.data``, so that it can be restored."""

    supports_higher_order_operators = True

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        named = {name: p for stage in stages for name, p in stage.named_parameters() if not p.is_meta}
        held = [(name, p, p.data, address_of(p.data)) for name, p in named.items()]
        self.held = {address: (name, p, data) for name, p, data, address in held if address}
        self.copies: dict[int, torch.Tensor] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(getattr(func, "_schema", None), "is_mutable", False):
            for leaf in tree_leaves((args, kwargs)):
                address = address_of(leaf) if isinstance(leaf, torch.Tensor) else 0
                if address in self.held and address not in self.copies:
                    self.copies[address] = local_tensor(self.held[address][2]).clone()
        return func(*args, **(kwargs or {}))

    def restore(self) -> Written:
        """Restores the weights, and returns those that were written to."""
        written = {}
        for address, (name, p, data) in self.held.items():
            replaced = address_of(p.data) != address_of(data)
            if replaced or address in self.copies:
                before = self.copies.get(address, local_tensor(data))
                written[name] = before, local_tensor(p.data).clone()
                local_tensor(data).copy_(before)
            if replaced:
                p.data = data
        return written


@contextlib.contextmanager
def weights_kept(stages: Iterable[nn.Module]) -> Iterator[Written]:
    """Restores the weights that forward passes inside change, such as those of a moving average; at its end, the dict
    has them.
    """
    written: Written = {}
    keeping = _KeepingWeights(stages)
    try:
        with keeping:
            yield written
    finally:
        with torch.no_grad():
            written.update(keeping.restore())


def not_settled(first: Written, again: Written, other: Written) -> tuple[list[str], bool]:
    """Weights that forward changes by its rows, or further each time: not if it clamps or normalises them.

    Args:
        first: what one pass has written.
        again: what the next one has, with the same rows.
        other: what one with other rows has in the place of the first.

    Returns:
        tuple: their names; and whether it has written to some without an effect, so that this is not known yet.
    """
    found, unknown = [], False
    for name, (before, _) in {**other, **again, **first}.items():
        after = first.get(name, (before, before))[1]
        values = after, again.get(name, (after, after))[1], other.get(name, (before, before))[1], before
        if any(value.shape != before.shape for value in values):
            found.append(name)
            continue
        after, *others = (value.to(torch.complex128) for value in values)
        twice, of_others, change = (_largest(after - value) for value in others)
        rounding = 16 * torch.finfo(before.dtype).eps * _largest(after) if before.is_floating_point() else 0.0
        if max(twice, of_others, change) <= rounding:
            unknown = True
        elif max(twice, of_others) > min(rounding, change / 8):
            found.append(name)
    return found, unknown


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().nan_to_num().max()) if tensor.numel() else 0.0


@contextlib.contextmanager
def state_that_grows(stages: Iterable[nn.Module], found: list[str], attributes: bool = True) -> Iterator[None]:
    """Adds to ``found`` the names of buffers, and of attributes, that a forward pass inside has changed; of modules but
    BatchNorm, and of objects and globals that forward uses.
    """
    modules = {name: module for name, module in modules_of(stages).items() if not isinstance(module, _NormBase)}
    dicts = [(k, held) for k, m in modules.items() for held in (m._buffers, *([vars(m)] if attributes else []))]
    kept = [(name, SavedState(held)) for name, held in dicts]
    others = beside(stages, by_hooks=False) if attributes else []
    kept += [(label_of(one), state) for one in others for state in saved_states([one])]
    yield
    found += [f"{name}.{changed}".removeprefix(".") for name, of_module in kept for changed in of_module.changed()]


def stored_values(stages: Iterable[nn.Module], n: int) -> dict[str, Any]:
    """Plain attributes that forward passes may read, of modules and beside them: numbers, and what has not n rows."""
    found = {}
    for name, (held, attribute) in _attributes(stages).items():
        value = held[attribute]
        leaves = [] if attribute in OF_EACH_MODULE else leaves_of(value)
        if leaves and all(map(_is_plain, leaves)) and not any(n in getattr(leaf, "shape", ()) for leaf in leaves):
            found[name] = map_leaves(copied, value)
    return found


def _is_plain(leaf: Any) -> bool:
    numbers = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc"
    return numbers or type(leaf) in (bool, int, float, complex) or type(leaf) is torch.Tensor and is_dense(leaf)


def _attributes(stages: Iterable[nn.Module]) -> dict[str, tuple[Held, str]]:
    """By name where modules, and what else forward uses, hold attributes; of the latter those that are not large."""
    others = {k: place for k, place in kept_beside(beside(stages)).items() if _is_small(place[0][place[1]])}
    named = [(name, vars(module)) for name, module in modules_of(stages).items()]
    return others | {f"{name}.{k}".removeprefix("."): (held, k) for name, held in named for k in held}


def _is_small(value: Any) -> bool:
    if size_of(value) > LARGE:
        return False
    return sum(map(size_of, leaves_of(value))) <= LARGE


Kept = tuple[Held, str, Any]  # where a variable is, and its value


def rows_kept(states: Iterable[SavedState], n: int) -> list[Kept]:
    """Copies of what a forward pass has changed that have a row for each of n rows, as a hidden state has."""
    changed = [(of, name, of.state()) for of in states for name in of.changed()]
    values = [(of.held, name, now[name]) for of, name, now in changed if name in now]
    found = [(held, name, value) for held, name, value in values if any(n in shape for shape in _shapes(value))]
    return [(held, name, map_leaves(copied, value)) for held, name, value in found]


def _shapes(value: Any) -> list[torch.Size]:
    leaves = [leaf for leaf in leaves_of(value) if not isinstance(leaf, dict | list)]  # such as one with itself inside
    return [tensor.shape for tensor in tensors_of(leaves) if is_dense(tensor)]


def put(kept: Iterable[Kept]) -> None:
    """Lets the next pass go on with it."""
    for held, name, value in kept:
        held[name] = value


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs, in another dim; real ones as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _outputs(run: Callable[[Any], Any], x: Any, stages: Iterable[nn.Module]) -> list[torch.Tensor]:
    with without_trace(stages):
        outputs = [as_real(local_tensor(output)).clone() for output in tensors_of(run(cloned(x)))]
        return [output for output in outputs if output.is_floating_point()]


def outputs_depend_on(run: Callable[[Any], Any], x: Any, stages: Sequence[nn.Module], others: dict[str, Any]) -> bool:
    """Whether outputs change if attributes of modules have these values instead; three passes on every rank."""

    def run_with_others(x: Any) -> Any:
        places = _attributes(stages)
        for name, value in others.items():
            held, attribute = places[name]
            held[attribute] = map_leaves(copied, value)
        return run(x)

    with may_fail("outputs that depend on what modules keep"), torch.no_grad():
        plain, other, again = (_outputs(given, x, stages) for given in (run, run_with_others, run))
        if not all(map(torch.equal, plain, again)):  # a GPU adds up by atomic operations (scatter_add), in any order
            return any(map(differ, other, plain))
        return not all(
            a.shape == b.shape and torch.allclose(a, b, equal_nan=True) for a, b in zip(plain, other, strict=False)
        )
    return False


def outputs_depend_on_padding(
    run: Callable[[Any], Any], x: Any, lengths: list[torch.Size], stages: Sequence[nn.Module]
) -> bool:
    """Whether outputs change if zeros are appended to each tensor of x, up to these lengths of a row.

    Two passes on every rank, in evaluation mode. False of a model that cannot be called with longer rows.
    """
    longer = iter(lengths)

    def padded(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        larger = leaf.new_zeros((*leaf.shape[:1], *next(longer)))
        larger[tuple(map(slice, leaf.shape))] = leaf
        return larger

    with may_fail("outputs that depend on padding"):
        with torch.no_grad(), evaluating(stages), WatchForSums() as watch:
            plain, with_more = _outputs(run, x, stages), _outputs(run, map_leaves(padded, x), stages)
        pairs = [(a, b[tuple(map(slice, a.shape))]) for a, b in zip(plain, with_more, strict=False) if a.ndim == b.ndim]
        return any(differ(a, b, watch.coarsest) for a, b in pairs)
    return False


@contextlib.contextmanager
def evaluating(stages: Iterable[nn.Module], all_of_them: bool = True) -> Iterator[None]:
    """Inside, modules are in evaluation mode; or only torch's and ours, whose rules for training are stated."""
    was = [(module, module.training) for stage in stages for module in stage.modules()]
    for module, training in was:
        libraries = all(of.__module__.startswith(("torch.", "ignite_ddl.")) for of in type(module).__mro__[:-1])
        module.training = training and not (all_of_them or libraries or isinstance(module, _BatchNorm))
    try:
        yield
    finally:
        for module, training in was:
            module.training = training


GATHERS_ROWS = contextvars.ContextVar("inside of ddl.gather_rows", default=False)


class WatchForSums(TorchDispatchMode):
    """Notes whether code sums or gathers over ranks by itself, as DDP, FSDP2 and DTensor do not.

    Args:
        every_way: also by collectives that FSDP2 and DTensor use, of code without these. Default: False.

    Attributes:
        found: whether it does.
        found_others: whether it does so otherwise than by ``ddl.gather_rows``, for which ranks may have unlike rows.
        coarsest: the largest relative distance of two numbers in the dtypes of products of matrices, convolutions or
            attention; 0 if there are none. Results may have more digits: float32 under autocast, or float64 where a
            part of a model is float32.
    """

    found = found_others = False
    coarsest = 0.0

    def __init__(self, every_way: bool = False) -> None:
        super().__init__()
        self.every_way = every_way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in _SUMS or self.every_way and "c10d" in func.namespace and str(func) not in _WAITS:
            self.found, self.found_others = True, self.found_others or not GATHERS_ROWS.get()
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and any(part in func.__name__ for part in _PRODUCTS):
            first = result[0] if isinstance(result, tuple) and result else result
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                self.coarsest = max(self.coarsest, torch.finfo(first.dtype).eps)
        return result


_SUMS = "c10d.allreduce_.default", "c10d.allgather_.default"
_WAITS = "c10d.barrier.default", "_c10d_functional.wait_tensor.default"
_PRODUCTS = "mm", "mv", "dot", "conv", "linear", "attention", "rnn", "lstm", "gru"  # in names of torch's operators


LAYERS = 32  # how many times numbers of 16 bits are rounded apart, one layer after the other


def differ(rows: torch.Tensor, alone: torch.Tensor, coarsest: float = 0.0) -> bool:
    """Whether two results of the same computation differ by more than rounding.

    Args:
        rows: one of them.
        alone: the other one.
        coarsest: as :class:`WatchForSums` has noted it. Default: all was computed in the dtype of the results.
    """
    if rows.shape != alone.shape or not rows.numel():
        return rows.shape != alone.shape
    share = max(10 * torch.finfo(rows.dtype).eps ** 0.5, LAYERS * coarsest)
    if rows.dtype.itemsize == 1:  # float8, with which torch does not compute
        rows, alone = rows.float(), alone.float()
    tolerance = share * max(float(alone.abs().nan_to_num().max()), 1e-6)
    far = float((rows - alone).abs().nan_to_num().max()) > tolerance
    return far or not torch.equal(rows.isnan(), alone.isnan())  # such as the deviation of a single row
