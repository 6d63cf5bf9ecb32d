"""Forward passes for checks, which leave no trace: buffers, random states and attributes of modules are restored."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ignite_ddl.collectives import gathered, gathered_values, on_any_rank
from ignite_ddl.compat import forget_forward_pass, gathers, no_transforms, without_dispatch_modes
from ignite_ddl.data_parallel import reshard
from ignite_ddl.mesh import get_mesh
from ignite_ddl.pipeline.structure import (
    SomeRows,
    concatenated,
    local_tensor,
    map_leaves,
    may_be_a_sample,
    n_rows,
    pickled,
    some_rows,
    tensors_of,
    unpickled,
)
from ignite_ddl.tensor.random import random_states, random_stream, set_random_states, state_of

UNLIKE_MODULES = (
    "dp ranks should call the same modules in a step, equally often, and get gradients of the same weights, but do "
    "not: gradients of different weights would be added, or ranks would wait for each other. Make the same choice on "
    "all ranks (draw it with the same seed; end a loop by the largest residual of all ranks, "
    'idist.all_reduce(residual, "MAX") of a number), or train with DDP alone, with find_unused_parameters=True if a '
    "rank leaves weights out."
)
_KINDS = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, deque, set, torch.Tensor)
_NUMBERS = (bool, int, float, complex, str)
_OF_EACH_MODULE = frozenset(vars(nn.Module()))
_LARGE = 2**16  # entries and numbers of a variable, of which no more are copied
_MOST = 1000  # things that a function uses, of which no more are looked at
_LIBRARIES = ("torch", "torchvision", "transformers", "ignite", "ignite_ddl", "numpy", *sys.stdlib_module_names)

Held = MutableMapping[str, Any]


class _SavedState:
    """Variables by name, such as a module's attributes or its buffers, with copies of what may be changed in place.

    Args:
        held: their values, by name.
        names: those that are looked at. Default: all.
        whole: whether a variable is copied also if it is large, such as a buffer. Default: True.
    """

    def __init__(self, held: Held, names: Iterable[str] | None = None, whole: bool = True) -> None:
        self.held, self.names = held, names
        self.values = {name: (value, _parts(value, whole)) for name, value in self.state().items()}

    def state(self) -> dict[str, Any]:
        names = [k for k in (self.held if self.names is None else self.names) if k in self.held]
        values = {k: v for k in names if k not in _OF_EACH_MODULE and isinstance(v := self.held[k], _KINDS)}
        return {k: v for k, v in values.items() if not _lists_weights(v)}

    def changed(self) -> list[str]:
        """The names of what has changed."""
        now = self.state()
        return [k for k in {**self.values, **now} if k not in now or k not in self.values or self._differs(k, now[k])]

    def _differs(self, name: str, now: Any) -> bool:
        value, parts = self.values[name]
        if now is value:
            return not all(_same(part, before) for part, before in parts)
        return not _same(now, parts[0][1] if parts and parts[0][0] is value else value)

    def has_rows(self, n: int) -> bool:
        """Whether something that a forward pass has changed has a row for each of n rows, as a hidden state has."""
        now = self.state()
        changed = [now[name] for name in self.changed() if name in now]
        return any(isinstance(leaf, torch.Tensor) and n in leaf.shape for leaf in tree_leaves(changed))

    def restore(self, but: Iterable[str] = ()) -> None:
        now, but = self.state(), set(but)
        for name in now.keys() - self.values.keys() - but:
            del self.held[name]
        for name, (value, parts) in ((name, kept) for name, kept in self.values.items() if name not in but):
            for part, before in parts:
                if not _same(part, before):
                    _refill(part, before)
            if name not in now or now[name] is not value:
                self.held[name] = value


def _lists_weights(value: Any) -> bool:
    """Whether this is a list of weights, such as an LSTM's, in which FSDP2 replaces these by gathered ones."""
    return isinstance(value, list | tuple) and any(isinstance(one, nn.Parameter) for one in value)


def _parts(value: Any, whole: bool) -> list[tuple[Any, Any]]:
    """What may be changed in place in a variable, itself first, each with a copy: containers, and tensors."""
    found: dict[int, tuple[Any, Any]] = {}
    pending, left = [value], _LARGE
    while pending:
        part = pending.pop()
        size = part.numel() if isinstance(part, torch.Tensor) else len(part) if isinstance(part, _NESTS) else 0
        if id(part) in found or isinstance(part, nn.Parameter) or size > left and not (whole and part is value):
            continue
        if isinstance(part, torch.Tensor):
            found[id(part)] = part, part.detach().clone()
        elif isinstance(part, _NESTS):
            pending += [one for one in (part.values() if isinstance(part, dict) else part) if isinstance(one, _PARTS)]
            if not isinstance(part, tuple):
                found[id(part)] = part, part.copy()
        left -= size
    return list(found.values())


_NESTS = (list, dict, deque, set, tuple)
_PARTS = (*_NESTS, torch.Tensor)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _refill(value: Any, before: Any) -> None:
    if isinstance(value, dict | set):
        value.clear()
        value.update(before)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(before)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            if value.shape != before.shape:  # resized in place, as a buffer of an observer in its first pass
                value.resize_(before.shape)
            value.copy_(before)


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor):
        same_shape = isinstance(before, torch.Tensor) and value.shape == before.shape
        return same_shape and bool(((value == before) | (value != value) & (before != before)).all())
    if isinstance(value, list | dict | deque):
        if type(value) is not type(before) or len(value) != len(before):
            return False
        if isinstance(value, dict) and list(value) != list(before):
            return False
        pairs = zip(*(held.values() if isinstance(held, dict) else held for held in (value, before)), strict=True)
        return all(one is other or type(one) in _NUMBERS and one == other for one, other in pairs)
    return value is before or type(value) is type(before) and not isinstance(value, tuple) and value == before


def _modules(stages: Iterable[nn.Module]) -> dict[str, nn.Module]:
    return {name: module for stage in stages for name, module in stage.named_modules()}


class _Attributes(MutableMapping):
    """Attributes of a class, or the content of a cell, by name."""

    def __init__(self, owner: Any, names: dict[str, str]) -> None:
        self.owner, self.names = owner, names

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.owner, self.names[name])
        except (AttributeError, ValueError) as error:  # an empty cell
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, self.names[name], value)

    def __delitem__(self, name: str) -> None:
        delattr(self.owner, self.names[name])

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes that code uses, nested functions included."""
    nested = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*nested)


def _has_attributes(one: Any) -> bool:
    """Whether the user may have given it attributes: not to what a library has made."""
    of = one if isinstance(one, type | types.FunctionType) else type(one)
    return hasattr(one, "__dict__") and not isinstance(one, types.ModuleType) and not _is_of_a_library(of.__module__)


def _is_of_a_library(name: Any) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES and name != "__main__"


def _variables(owner: Any) -> list[tuple[Held, Iterable[str] | None]]:
    """Where something keeps variables: mappings by name, and which of their names (None: all)."""
    if state_of(owner):  # see random_kept
        return []
    if isinstance(owner, nn.Module):
        return [(held, None) for module in owner.modules() for held in (module._buffers, vars(module))]
    if isinstance(owner, functools.partial):
        return [(dict(enumerate(owner.args)), None), (owner.keywords, None)]
    if isinstance(owner, types.FunctionType):
        names = _names(owner.__code__)
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        modules = [one for name in names if isinstance(one := owner.__globals__.get(name), types.ModuleType)]
        return [
            *((_Attributes(cell, {name: "cell_contents"}), None) for name, cell in cells),
            (owner.__globals__, sorted(names)),
            *((vars(module), sorted(names)) for module in modules if not _is_of_a_library(module.__name__)),
            (_Attributes(owner, {"its defaults": "__defaults__"}), None),
            (owner.__kwdefaults__ or {}, None),
            (vars(owner), None),
        ]
    if isinstance(owner, type):
        return [(_Attributes(owner, {name: name for name in vars(owner) if not name.startswith("__")}), None)]
    return [(vars(owner), None)]


def reached(function: Any) -> list[Any]:
    """What may keep a state for a function, and is no library's: itself, and what it uses by its closure, its defaults,
    arguments that are bound, globals that its code names, and attributes of what is found there.
    """
    found: dict[int, Any] = {}
    pending, seen = deque([function]), {}
    while pending and len(found) < _MOST:
        one = pending.popleft()
        if isinstance(one, DistributedDataParallel):
            one = one.module
        if id(one) in seen or isinstance(one, (torch.Tensor, *_NUMBERS)):
            continue
        seen[id(one)] = one  # which lives, so that no other has its id
        if isinstance(one, types.MethodType | classmethod | staticmethod):
            pending += [one.__func__, getattr(one, "__self__", None)]
        elif isinstance(one, _NESTS):
            pending += [] if len(one) > _MOST else one.values() if isinstance(one, dict) else one
        elif isinstance(one, nn.Module | functools.partial) or state_of(one) or _has_attributes(one):
            found[id(one)] = one
            variables = [(held, list(held) if names is None else names) for held, names in _variables(one)]
            pending += [held[name] for held, names in variables for name in names if name in held]
            pending += [] if isinstance(one, types.FunctionType | functools.partial) else [type(one)]
            pending += [one.func] if isinstance(one, functools.partial) else []
            pending += one.__mro__[1:-1] if isinstance(one, type) else []
    return list(found.values())


def saved_states(owners: Iterable[Any]) -> list[_SavedState]:
    """The states of modules, and of what else keeps some, as they are now."""
    looked_at: dict[int, tuple[Held, dict[str, None] | None, bool]] = {}
    for owner in owners:
        for held, names in _variables(owner):
            _, others, _ = looked_at.get(id(held), (held, {}, False))
            both = None if names is None or others is None else {**others, **dict.fromkeys(names)}
            looked_at[id(held)] = held, both, isinstance(owner, nn.Module)
    return [_SavedState(*each) for each in looked_at.values()]


def holds_iterators(owners: Iterable[Any]) -> bool:
    """Whether something keeps an iterator, whose place cannot be restored: of a loader, or a generator."""
    variables = [variable for owner in owners for variable in _variables(owner)]
    named = [(held, name) for held, names in variables for name in (list(held) if names is None else names)]
    values = [held[name] for held, name in named if name in held]
    for value in list(values):
        if isinstance(value, _NESTS) and len(value) <= _MOST:
            values += value.values() if isinstance(value, dict) else value
    return any(hasattr(value, "__next__") for value in values)


def captured(owners: Iterable[Any], n: int) -> list[tuple[Held, str]]:
    """Where closures, globals, objects and batches of engines hold tensors with n rows: mappings, and names in them."""
    variables = [variable for owner in owners if not isinstance(owner, nn.Module) for variable in _variables(owner)]
    named = [(held, name) for held, names in variables for name in (list(held) if names is None else names)]
    named += [(vars(held[k].state), "batch") for held, k in named if isinstance(held.get(k), Engine)]
    return [(held, name) for held, name in named if name in held and _has_rows(held[name], n)]


@contextlib.contextmanager
def captured_rows(owners: Iterable[Any], rows: SomeRows | None) -> Iterator[None]:
    """Inside, tensors of a batch that these owners hold are cut to some rows."""
    kept = [(held, name, held[name]) for held, name in (captured(owners, rows.n) if rows else ())]
    for held, name, value in kept:
        held[name] = rows.of(value)
    try:
        yield
    finally:
        for held, name, value in kept:
            held[name] = value


def _has_rows(value: Any, n: int) -> bool:
    found = tensors_of(value) if isinstance(value, _PARTS) and not isinstance(value, nn.Parameter) else []
    return any(tensor.ndim and len(tensor) == n for tensor in found)


@contextlib.contextmanager
def states_kept(owners: Iterable[Any]) -> Iterator[list[_SavedState]]:
    """Restores at its end what code inside changes in the states of modules, and of what else keeps some."""
    kept = saved_states(owners)
    try:
        yield kept
    finally:
        for of_owner in kept:
            of_owner.restore()


@contextlib.contextmanager
def random_kept(owners: Iterable[Any]) -> Iterator[None]:
    """Restores at its end all streams of random numbers, those of generators among the owners included."""
    drawn, kept = random_states(), [stream for one in owners if (stream := state_of(one))]
    try:
        yield
    finally:
        set_random_states(drawn)
        for state, put in kept:
            put(state)


@contextlib.contextmanager
def without_trace(stages: Iterable[nn.Module], seed: int = 0) -> Iterator[list[_SavedState]]:
    """Restores at its end what forward passes inside change in these modules; random numbers there depend on the seed.

    Raises:
        UnlikeModules: if ranks that gather weights in these passes need other ones, or only some of them fail.
    """
    held = [one for module in _modules(stages).values() for one in vars(module).values() if state_of(one)]
    with (
        random_kept(held),
        _gathering_alike(stages),
        weights_kept(stages),
        states_kept(stages) as kept,
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
                reshard(stage)
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
    group, sharded = get_mesh().dp_cp_group, [module for module in _modules(stages).values() if gathers(module)]

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


def address_of(tensor: torch.Tensor) -> int:
    """Where the memory of this rank's part of a tensor begins; 0 if it has none."""
    local = local_tensor(tensor)
    plain = type(local) in (torch.Tensor, nn.Parameter) and local.layout is torch.strided
    return local.untyped_storage().data_ptr() if plain else 0


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
    BatchNorm.
    """
    modules = {name: module for name, module in _modules(stages).items() if not isinstance(module, _NormBase)}
    dicts = [(k, held) for k, m in modules.items() for held in (m._buffers, *([vars(m)] if attributes else []))]
    kept = [(name, _SavedState(held)) for name, held in dicts]
    yield
    found += [f"{name}.{changed}".removeprefix(".") for name, of_module in kept for changed in of_module.changed()]


def stored_values(stages: Iterable[nn.Module], n: int) -> dict[str, Any]:
    """Plain attributes of modules that forward passes may read: numbers, and tensors without n rows."""
    found = {}
    for name, module in _modules(stages).items():
        for attribute, value in vars(module).items():
            leaves = [] if attribute in _OF_EACH_MODULE else tree_leaves(value)
            plain = all(type(leaf) in (bool, int, float, complex, torch.Tensor) for leaf in leaves)
            if leaves and plain and not any(isinstance(leaf, torch.Tensor) and n in leaf.shape for leaf in leaves):
                found[f"{name}.{attribute}".removeprefix(".")] = map_leaves(_copied, value)
    return found


def _outputs(run: Callable[[Any], Any], x: Any, stages: Iterable[nn.Module]) -> list[torch.Tensor]:
    with without_trace(stages):
        return [local_tensor(output).clone() for output in tensors_of(run(x)) if output.is_floating_point()]


def outputs_depend_on(run: Callable[[Any], Any], x: Any, stages: Sequence[nn.Module], others: dict[str, Any]) -> bool:
    """Whether outputs change if attributes of modules have these values instead; two passes on every rank."""

    def run_with_others(x: Any) -> Any:
        for name, value in others.items():
            module, _, attribute = name.rpartition(".")
            setattr(_modules(stages)[module], attribute, map_leaves(_copied, value))
        return run(x)

    try:
        with torch.no_grad():
            plain, other = _outputs(run, x, stages), _outputs(run_with_others, x, stages)
    except Exception:
        return False
    return not all(
        a.shape == b.shape and torch.allclose(a, b, equal_nan=True) for a, b in zip(plain, other, strict=False)
    )


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

    try:
        with torch.no_grad(), evaluating(stages):
            plain, with_more = _outputs(run, x, stages), _outputs(run, map_leaves(padded, x), stages)
    except Exception:
        return False
    pairs = [(a, b[tuple(map(slice, a.shape))]) for a, b in zip(plain, with_more, strict=False) if a.ndim == b.ndim]
    return any(differ(a, b) for a, b in pairs)


@contextlib.contextmanager
def evaluating(stages: Iterable[nn.Module], all_of_them: bool = True) -> Iterator[None]:
    """Inside, modules are in evaluation mode; or only torch's and ours, whose rules for training are stated."""
    was = [(module, module.training) for module in _modules(stages).values()]
    for module, training in was:
        libraries = all(of.__module__.startswith(("torch.", "ignite_ddl.")) for of in type(module).__mro__[:-1])
        module.training = training and not (all_of_them or libraries or isinstance(module, _BatchNorm))
    try:
        yield
    finally:
        for module, training in was:
            module.training = training


class WatchForSums(TorchDispatchMode):
    """Notes whether code sums or gathers over ranks by itself, as DDP, FSDP2 and DTensor do not."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or str(func) in ("c10d.allreduce_.default", "c10d.allgather_.default")
        return func(*args, **(kwargs or {}))


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

    False where it cannot be known: of a model that draws random numbers there, sums over ranks by itself, or cannot be
    called with fewer rows, and of BatchNorm without running statistics, which takes a rank's rows by a stated rule. In
    training, torch's modules and ours are in evaluation mode for that reason. Every rank makes eight passes; nine with
    ``counted``, to which the names and values are added of what modules keep in training of the number of rows.
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
    few, part = few_rows(x)
    n, last = n_rows(x), n_rows(few)
    all_have_rows = all(len(tensor) == n for tensor in tensors_of(x) if tensor.ndim)
    keeps_rows = False  # whether modules keep a state of each row from call to call, which other rows would read
    kept_values = []  # after each pass
    plain = [stage.module if isinstance(stage, DistributedDataParallel) else stage for stage in stages]

    def outputs(rows: Any, seed: int) -> list[torch.Tensor]:
        nonlocal keeps_rows
        with without_trace(stages, seed) as kept:
            found = [local_tensor(output).clone() for output in tensors_of(run(rows)) if output.ndim]
            keeps_rows = keeps_rows or any(of_module.has_rows(n_rows(rows)) for of_module in kept)
            if counted is not None:
                kept_values.append({**stored_values(plain, n_rows(rows)), **_small_buffers(plain)})
            return found

    with torch.no_grad(), evaluating(stages, evaluates), WatchForSums() as watch:
        try:
            together, again = outputs(few, 0), outputs(few, 1)
            if counted is not None:
                outputs(some_rows(few, slice(None), last, lambda leaf, _: leaf[:1].expand_as(leaf).clone()), 0)
            parts = [slice(0, part.start or last), part]  # the largest of all rows is in one of them
            alone = [outputs(some_rows(few, of, last) if all_have_rows else few, 0) for of in parts]
        except Exception:
            return False
    no_statistics = any(isinstance(m, _BatchNorm) and m.running_mean is None for m in _modules(stages).values())
    draws = any(not torch.equal(one, other) for one, other in zip(together, again, strict=True))
    if no_statistics or draws or keeps_rows or watch.found or n < 2 or not all_have_rows:
        return False
    if counted is not None:
        del kept_values[-2]  # that of the first part
        counted.update(_of_their_number(*kept_values))
    pairs = [(of, *pair) for of, found in zip(parts, alone, strict=True) for pair in zip(together, found, strict=False)]
    for of, output, of_part in pairs:
        each = len(output) // last  # such as a row for each token
        rows = output[of.start * each : of.stop * each]
        of_rows = len(output) == each * last and len(of_part) < len(output)  # not a table, which has as many entries
        if output.is_floating_point() and of_rows and differ(rows, of_part):
            return True
    return False


def _small_buffers(stages: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """Buffers of all modules but BatchNorm, by name; large ones, which hold no numbers of rows, are left out."""
    modules = {name: module for name, module in _modules(stages).items() if not isinstance(module, _NormBase)}
    named = {f"{name}.{k}".removeprefix("."): b for name, module in modules.items() for k, b in module._buffers.items()}
    return {name: local_tensor(b).clone() for name, b in named.items() if b is not None and b.numel() <= _LARGE}


def _of_their_number(*kept: dict[str, Any]) -> dict[str, Any]:
    """What depends on the number of rows, and on nothing else: the last pass had fewer."""

    def shapes(value: Any) -> list[Any]:
        return [getattr(leaf, "shape", None) for leaf in tree_leaves(value)]

    def same(value: Any, other: Any) -> bool:
        return shapes(value) == shapes(other) and all(map(_same, tree_leaves(value), tree_leaves(other)))

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


def several_rows(x: Any) -> Any:
    """The rows of a rank, or a single row with some of other dp ranks: of one row nothing would show.

    All dp ranks call it.
    """
    mesh, n = get_mesh(), n_rows(x)
    if not on_any_rank(n < 2, mesh.dp_group):
        return x
    peers = gathered_values(pickled(some_rows(x, slice(1), n)), mesh.dp_group)
    others = [peer for rank, peer in enumerate(peers) if rank != mesh.dp_rank and peer is not None][:MAX_ROWS]
    with contextlib.suppress(Exception):  # rows of another length
        joined = concatenated([x, *(unpickled(x, other) for other in others)], [1] * (1 + len(others)))
        return joined if n < 2 and not may_be_a_sample(x) else x
    return x


def norm_over_rows(stages: Iterable[nn.Module]) -> str | None:
    """The name of a BatchNorm that takes the statistics of the rows that it gets; None if there is none."""
    norms = ((name, module) for name, module in _modules(stages).items() if isinstance(module, _BatchNorm))
    return next((name for name, norm in norms if norm.training or norm.running_mean is None), None)


def differ(rows: torch.Tensor, alone: torch.Tensor) -> bool:
    """Whether two results of the same computation differ by more than rounding."""
    if rows.shape != alone.shape or not rows.numel():
        return rows.shape != alone.shape
    tolerance = 10 * torch.finfo(rows.dtype).eps ** 0.5 * max(float(alone.abs().nan_to_num().max()), 1e-6)
    far = float((rows - alone).abs().nan_to_num().max()) > tolerance
    return far or not torch.equal(rows.isnan(), alone.isnan())  # such as the deviation of a single row
