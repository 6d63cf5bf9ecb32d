"""What modules and functions keep from call to call: saved, restored, and compared."""

from __future__ import annotations

import argparse
import array
import contextlib
import copy
import enum
import functools
import itertools
import sys
import types
import warnings
from collections import Counter, UserDict, UserList, deque
from collections.abc import Generator, Iterable, Iterator, MutableMapping
from typing import Any

import numpy as np
import torch
from ignite.engine import Engine
from ignite.metrics import Metric
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ignite_ddl.structure import SomeRows, local_tensor, map_leaves, tensors_of
from ignite_ddl.tensor.random import random_states, set_random_states, state_of

_BYTES = (array.array, bytearray)
_ARRAYS = (torch.Tensor, np.ndarray, *_BYTES)
_CACHED = type(functools.cache(id))
_WRAPPERS = (types.MethodType, classmethod, staticmethod, property, functools.cached_property, _CACHED)
_OBJECTS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, Metric)  # of libraries, for users' states
_KINDS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, np.generic, tuple, list, dict, deque, set)
_KINDS = (*_KINDS, *_ARRAYS)
_NUMBERS = (bool, int, float, complex, str)
OF_EACH_MODULE = frozenset(vars(nn.Module()))
LARGE = 2**16  # entries and numbers of a variable, of which no more are copied
_MOST = 1000  # things that a function uses, of which no more are looked at
_LIBRARIES = ("torch", "torchvision", "transformers", "ignite", "ignite_ddl", "numpy", *sys.stdlib_module_names)
Held = MutableMapping[str, Any]


class SavedState:
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
        values = {k: v for k in names if k not in OF_EACH_MODULE and isinstance(v := self.held[k], _KINDS)}
        return {k: v for k, v in values.items() if not _lists_weights(v)}

    def changed(self) -> list[str]:
        """The names of what has changed."""
        now = self.state()
        return [k for k in {**self.values, **now} if k not in now or k not in self.values or self._differs(k, now[k])]

    def _differs(self, name: str, now: Any) -> bool:
        value, parts = self.values[name]
        if now is value:
            return not all(same_value(part, before) for part, before in parts)
        return not same_value(now, parts[0][1] if parts and parts[0][0] is value else value)

    def restore(self, but: Iterable[str] = ()) -> None:
        now, but = self.state(), set(but)
        for name in now.keys() - self.values.keys() - but:
            del self.held[name]
        for name, (value, parts) in ((name, kept) for name, kept in self.values.items() if name not in but):
            for part, before in parts:
                if not same_value(part, before):
                    _refill(part, before)
            if name not in now or now[name] is not value:
                self.held[name] = value


def _lists_weights(value: Any) -> bool:
    """Whether this is a list of weights, such as an LSTM's, in which FSDP2 replaces these by gathered ones."""
    return isinstance(value, list | tuple) and any(isinstance(one, nn.Parameter) for one in value)


def _parts(value: Any, whole: bool) -> list[tuple[Any, Any]]:
    """What may be changed in place in a variable, itself first, each with a copy: containers, and tensors."""
    found: dict[int, tuple[Any, Any]] = {}
    pending, left = [value] if isinstance(value, _PARTS) else [], LARGE
    while pending:
        part = pending.pop()
        size = size_of(part)
        if id(part) in found or isinstance(part, nn.Parameter) or size > left and not (whole and part is value):
            continue
        if isinstance(part, _ARRAYS):
            if isinstance(part, torch.Tensor) and not is_dense(part):
                continue
            found[id(part)] = part, copied(part)
        elif isinstance(part, _NESTS):
            pending += [one for one in (part.values() if isinstance(part, dict) else part) if isinstance(one, _PARTS)]
            if not isinstance(part, tuple):
                found[id(part)] = part, part.copy()
        left -= size
    return list(found.values())


def size_of(part: Any) -> int:
    if isinstance(part, torch.Tensor):
        return part.numel()
    return part.size if isinstance(part, np.ndarray) else len(part) if isinstance(part, (*_NESTS, *_BYTES)) else 1


_NESTS = (list, dict, deque, set, tuple)
_PARTS = (*_NESTS, *_ARRAYS)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its numbers can be copied and compared: not if it is sparse, nested, quantized, or has none."""
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, _BYTES):
        return value[:]
    return value.copy() if type(value) is np.ndarray else value  # not a file's, which are mapped to memory


def cloned(tree: Any, all_of_them: bool = False) -> Any:
    """Copies for code that may change tensors in place, but for those that require gradients, or of all."""

    def clone(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and (all_of_them or not leaf.requires_grad) else leaf

    return map_leaves(clone, tree)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of what is kept; a tree that contains itself is one."""
    try:
        return tree_leaves(tree)
    except RecursionError:
        return [tree]


def versions(tree: Any) -> list[int]:
    """Numbers of tensors, which grow where one is changed in place."""
    return [tensor._version for tensor in tensors_of(tree) if not tensor.is_inference()]


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
            local_tensor(value).data.copy_(local_tensor(before))  # a graph may have saved it, as BatchNorm's has
    elif isinstance(value, np.ndarray):
        value[...] = before
    elif isinstance(value, _BYTES):
        value[:] = before


def same_value(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value is before:
            return True
        if not isinstance(before, torch.Tensor) or not is_dense(value) or not is_dense(before):
            return False
        if value.shape != before.shape:
            return False
        if isinstance(value, FakeTensor):  # of a trace, without values
            return True
        value, before = local_tensor(value), local_tensor(before)  # of this rank's part, since peers may not ask
        return bool(((value == before) | (value != value) & (before != before)).all())
    if isinstance(value, np.ndarray):
        same = type(value) is type(before) and value.shape == before.shape and value.dtype == before.dtype
        return value is before or same and value.tobytes() == before.tobytes()
    if isinstance(value, list | dict | deque):
        if not isinstance(value, type(before)) or len(value) != len(before):  # a copy of a subclass may be none
            return False
        if isinstance(value, dict) and list(value) != list(before):
            return False
        pairs = zip(*(held.values() if isinstance(held, dict) else held for held in (value, before)), strict=True)
        return all(one is other or type(one) in _NUMBERS and one == other for one, other in pairs)
    return value is before or type(value) is type(before) and not isinstance(value, tuple) and value == before


def modules_of(stages: Iterable[nn.Module]) -> dict[str, nn.Module]:
    return {name: module for stage in stages for name, module in stage.named_modules()}


class _Attributes(MutableMapping):
    """Attributes of a class, or the content of a cell, by name."""

    def __init__(self, owner: Any, names: dict[str, str]) -> None:
        self.owner, self.names = owner, names

    def __getitem__(self, name: str) -> Any:
        if isinstance(self.owner, type):  # by getattr, a descriptor would compute a value, to be put in its place
            return vars(self.owner)[name]
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
    if isinstance(one, _OBJECTS):
        return True
    of = one if isinstance(one, type | types.FunctionType) else type(one)
    if isinstance(one, types.ModuleType) or _is_of_a_library(of.__module__):
        return False
    if of is one and _knows_no_torch(str(of.__module__).partition(".")[0]):
        return False
    return hasattr(one, "__dict__") or bool(_slots(one))


def _slots(one: Any) -> dict[str, str]:
    held = [vars(of) for of in type(one).__mro__ if not _is_of_a_library(of.__module__)]
    slots = {k: k for of in held for k, v in of.items() if isinstance(v, types.MemberDescriptorType)}
    return {k: k for k in slots if not k.startswith("__")}  # which Cython has, and which cannot be set


def _is_of_a_library(name: Any) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES and name != "__main__"


@functools.lru_cache
def _knows_no_torch(package: str) -> bool:
    """Whether it is an installed package such as scikit-learn, whose functions and classes, of which there are
    thousands, keep no state of a training; of its objects some may.
    """
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    installed = any(part in str(place) for place in places for part in ("site-packages", "dist-packages"))
    of_package = [one for name, one in list(sys.modules.items()) if name.partition(".")[0] == package]
    return installed and not any(getattr(one, "__dict__", {}).get("torch") is torch for one in of_package)


def _variables(owner: Any) -> list[tuple[Held, Iterable[str] | None]]:
    """Where something keeps variables: mappings by name, and which of their names (None: all)."""
    if state_of(owner):  # see random_kept
        return []
    if isinstance(owner, nn.Module):
        return [(held, None) for module in owner.modules() for held in (module._buffers, vars(module))]
    if isinstance(owner, types.BuiltinMethodType):
        return [({"__self__": owner.__self__}, None)]
    if isinstance(owner, functools.partial):
        return [(dict(enumerate(owner.args)), None), (owner.keywords, None)]
    if isinstance(owner, types.FunctionType):
        names = sorted(_names(owner.__code__))  # the order of a set differs from rank to rank
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        modules = [one for name in names if isinstance(one := owner.__globals__.get(name), types.ModuleType)]
        return [
            *((_Attributes(cell, {name: "cell_contents"}), None) for name, cell in cells),
            (owner.__globals__, names),
            *((vars(module), names) for module in modules if not _is_of_a_library(module.__name__)),
            (_Attributes(owner, {"its defaults": "__defaults__"}), None),
            (owner.__kwdefaults__ or {}, None),
            (vars(owner), None),
        ]
    if isinstance(owner, type):
        return [(_Attributes(owner, {name: name for name in vars(owner) if not name.startswith("__")}), None)]
    held = [(vars(owner), None)] if hasattr(owner, "__dict__") else []
    return [*held, (_Attributes(owner, slots), None)] if (slots := _slots(owner)) else held


def reached(*functions: Any, by_hooks: bool = True) -> list[Any]:
    """What may keep a state for functions or modules, and is no library's: themselves, and what they use by a closure,
    defaults, arguments that are bound, globals that code names, and attributes of what is found there.

    Args:
        functions: functions, modules, or other objects.
        by_hooks: whether to look at what hooks of modules use, too. Default: True.
    """
    found: dict[int, Any] = {}
    pending, seen, n_modules = deque(functions), {}, 0
    while pending and len(found) - n_modules < _MOST:
        one = pending.popleft()
        if isinstance(one, DistributedDataParallel):
            one = one.module
        if id(one) in seen or isinstance(one, (torch.Tensor, *_NUMBERS)):
            continue
        seen[id(one)] = one  # which lives, so that no other has its id
        if isinstance(one, _WRAPPERS):
            pending += [getattr(one, name, None) for name in ("__func__", "__self__", "__wrapped__", "fget", "func")]
        elif isinstance(one, types.BuiltinMethodType):
            if isinstance(one.__self__, _PARTS):  # such as kept.append
                found[id(one)] = one
            pending.append(one.__self__)
        elif isinstance(one, _NESTS):
            if _has_attributes(one):  # of a class of the user
                found[id(one)] = one
                pending += type(one).__mro__[:-1]
            pending += [] if len(one) > _MOST else one.values() if isinstance(one, dict) else one
        elif isinstance(one, nn.Module):
            found[id(one)] = one
            n_modules += 1
            hooks = (one._forward_hooks, one._forward_pre_hooks) if by_hooks else ()
            pending += [value for name, value in vars(one).items() if name not in OF_EACH_MODULE]
            pending += [value for held in (one._modules, *hooks) for value in held.values()]
            pending += type(one).__mro__[:-1]  # FSDP2's class comes before the user's
        elif isinstance(one, functools.partial) or state_of(one) or _has_attributes(one):
            found[id(one)] = one
            variables = [(held, list(held) if names is None else names) for held, names in _variables(one)]
            pending += [held[name] for held, names in variables for name in names if name in held]
            pending += [] if isinstance(one, types.FunctionType | functools.partial | type) else type(one).__mro__[:-1]
            pending += [one.func] if isinstance(one, functools.partial) else []
            pending += one.__mro__[1:-1] if isinstance(one, type) else []
    return list(found.values())


def beside(stages: Iterable[nn.Module], by_hooks: bool = True) -> list[Any]:
    """What may keep a state for modules, but for these: objects, classes, globals and closures of what they call."""
    stages = list(stages)
    own = {id(module) for stage in stages for module in stage.modules()}
    return [one for one in reached(*stages, by_hooks=by_hooks) if id(one) not in own]


def label_of(owner: Any) -> str:
    return owner.__qualname__ if isinstance(owner, type | types.FunctionType) else type(owner).__name__


def kept_beside(owners: Iterable[Any]) -> dict[str, tuple[Held, str]]:
    """By a name of each where such owners hold their variables, and under which names."""
    found: dict[tuple[int, str], tuple[str, Held]] = {}
    for owner in owners:
        for held, names in _variables(owner):
            for name in [k for k in (list(held) if names is None else names) if k in held]:
                found.setdefault((id(held), name), (f"{label_of(owner)}.{name}", held))
    keys, numbers, named = Counter(key for key, _ in found.values()), Counter(), {}
    for (_, name), (key, held) in found.items():
        named[f"{key} ({numbers[key]})" if keys[key] > 1 else key] = held, name
        numbers[key] += 1  # of its own label, since a rank may have more of another
    return named


def saved_states(owners: Iterable[Any]) -> list[SavedState]:
    """The states of modules, and of what else keeps some, as they are now."""
    looked_at: dict[int, tuple[Held, dict[str, None] | None, bool]] = {}
    for owner in owners:
        for held, names in _variables(owner):
            _, others, _ = looked_at.get(id(held), (held, {}, False))
            both = None if names is None or others is None else {**others, **dict.fromkeys(names)}
            looked_at[id(held)] = held, both, isinstance(owner, nn.Module)
    return [SavedState(*each) for each in looked_at.values()]


def holds_iterators(owners: Iterable[Any]) -> bool:
    """Whether something keeps an iterator, whose place cannot be restored: of a loader, or a generator."""
    variables = [variable for owner in owners for variable in _variables(owner)]
    named = [(held, name) for held, names in variables for name in (list(held) if names is None else names)]
    values = [held[name] for held, name in named if name in held]
    for value in list(values):
        if isinstance(value, _NESTS) and len(value) <= _MOST:
            values += value.values() if isinstance(value, dict) else value
    return any(map(_is_iterator, values))


def _is_iterator(value: Any) -> bool:
    """Whether it is one itself: a class of iterators, and what has any attribute, are none."""
    return not isinstance(value, type) and hasattr(type(value), "__next__")


def captured(owners: Iterable[Any], n: int, of_modules: bool = False) -> list[tuple[Held, str]]:
    """Where closures, globals, objects and batches of engines hold tensors with n rows: mappings, and names in them.

    Args:
        owners: what may hold some.
        n: the number of rows.
        of_modules: whether to look at modules, too. Default: False.
    """
    looked_at = [owner for owner in owners if of_modules or not isinstance(owner, nn.Module)]
    variables = [variable for owner in looked_at for variable in _variables(owner)]
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
    found = leaves_of(value) if isinstance(value, _PARTS) and not isinstance(value, nn.Parameter) else []
    found = [leaf for leaf in found if not isinstance(leaf, _NESTS)]
    tensors = [tensor for tensor in tensors_of(found) if is_dense(tensor) and not isinstance(tensor, DTensor)]
    return any(tensor.ndim and len(tensor) == n for tensor in tensors)


@contextlib.contextmanager
def states_kept(owners: Iterable[Any]) -> Iterator[list[SavedState]]:
    """Restores at its end what code inside changes in the states of modules, and of what else keeps some."""
    with _iterators_kept(owners := list(owners)):
        kept = saved_states(owners)
        try:
            yield kept
        finally:
            for of_owner in kept:
                of_owner.restore()


class ReadAhead(Generator):
    """An iterator of which checks read ahead, each by a copy of this; what is sent to a generator cannot be kept back.

    Args:
        of: the iterator.
    """

    def __init__(self, of: Any) -> None:
        self.of, self.read, self.place = of, [], None  # what was read ahead; in a copy how much of it it has read

    def copy(self) -> ReadAhead:
        other = ReadAhead(self.of)
        other.read, other.place = self.read, self.place or 0
        return other

    def send(self, value: Any) -> Any:
        if value is not None and (self.place is not None or self.read):
            raise ValueError("a generator of which checks have read ahead cannot be sent a value: pass checks=False")
        if self.place is None:
            return self.read.pop(0) if self.read else next(self.of) if value is None else self.of.send(value)
        if self.place == len(self.read):
            self.read.append(next(self.of))
        self.place += 1
        return self.read[self.place - 1]

    def throw(self, *error: Any) -> Any:
        if self.place is None:
            return self.of.throw(*error)
        raise ValueError("a generator cannot be closed by a check")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as of a copy that is being made
            raise AttributeError(name)
        return getattr(self.of, name)


_COPIED = (itertools.count, *(type(iter(of)) for of in ([], (), range(0))))  # iterators that read no other ones


@contextlib.contextmanager
def _iterators_kept(owners: Iterable[Any]) -> Iterator[None]:
    """Inside, variables hold a copy of an iterator; in the end one that has not moved."""
    variables = [variable for owner in owners for variable in _variables(owner)]
    named = [(held, name) for held, names in variables for name in (list(held) if names is None else names)]
    places = [(held, name, held[name]) for held, name in named if name in held and _is_iterator(held[name])]
    pairs: dict[int, tuple[Any, Any]] = {}  # one iterator in several places stays one
    for value in (value for *_, value in places if id(value) not in pairs):
        if isinstance(value, _COPIED):
            with warnings.catch_warnings(action="ignore"), contextlib.suppress(TypeError):  # count, from Python 3.12 on
                pairs[id(value)] = copy.copy(value), value
                continue
        if type(value).__module__ in ("builtins", "itertools") or isinstance(value, _BaseDataLoaderIter | ReadAhead):
            after = value if isinstance(value, ReadAhead) else ReadAhead(value)
            pairs[id(value)] = after.copy(), after
    places = [(held, name, *pairs[id(value)]) for held, name, value in places if id(value) in pairs]
    for held, name, inside, _ in places:
        held[name] = inside
    try:
        yield
    finally:
        for held, name, _, after in places:
            held[name] = after


@contextlib.contextmanager
def random_kept(owners: Iterable[Any]) -> Iterator[None]:
    """Restores at its end all streams of random numbers, those of generators among the owners included."""
    drawn = random_states()
    try:
        with streams_kept(owners):
            yield
    finally:
        set_random_states(drawn)


@contextlib.contextmanager
def streams_kept(owners: Iterable[Any]) -> Iterator[None]:
    """Restores at its end the streams of generators among the owners alone."""
    kept = [stream for one in owners if (stream := state_of(one))]
    try:
        yield
    finally:
        for state, put in kept:
            put(state)
