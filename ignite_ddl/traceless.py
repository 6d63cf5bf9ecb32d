"""Forward passes of our own that leave no trace: buffers, random states and attributes of modules stay as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ignite_ddl.tensor.random import random_stream

__all__ = ["evaluating", "state_that_grows", "without_trace"]

_KINDS = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, torch.Tensor)
_OF_EACH_MODULE = frozenset(vars(nn.Module()))


class _Kept:
    """What a module keeps in a dict, its attributes or its buffers, with copies of what may be changed in place."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held
        self.values = {name: (value, _copied(value)) for name, value in self._state().items()}

    def _state(self) -> dict[str, Any]:
        return {k: v for k, v in self.held.items() if k not in _OF_EACH_MODULE and isinstance(v, _KINDS)}

    def changed(self) -> str | None:
        """The name of something that is not what it was."""
        now = self._state()
        for name in {**self.values, **now}:
            if name not in now or name not in self.values or not _same(now[name], self.values[name][1]):
                return name
        return None

    def restore(self) -> None:
        for name in self._state().keys() - self.values.keys():
            del self.held[name]
        for name, (value, before) in self.values.items():
            if not _same(value, before):
                _refill(value, before)
            self.held[name] = value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, list | dict) else value


def _refill(value: Any, before: Any) -> None:
    if isinstance(value, list):
        value[:] = before
    elif isinstance(value, dict):
        value.clear()
        value.update(before)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(before)


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor):
        alike = isinstance(before, torch.Tensor) and value.shape == before.shape
        return alike and bool(((value == before) | (value != value) & (before != before)).all())
    if isinstance(value, list | dict):
        return type(value) is type(before) and len(value) == len(before)
    return value is before or type(value) is type(before) and not isinstance(value, tuple) and value == before


def _modules(stages: Iterable[nn.Module]) -> dict[str, nn.Module]:
    return {name: module for stage in stages for name, module in stage.named_modules()}


@contextlib.contextmanager
def without_trace(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, what these modules' forward passes change is put back at the end; random numbers are others'."""
    kept = [_Kept(held) for module in _modules(stages).values() for held in (module._buffers, vars(module))]
    try:
        with random_stream(0):
            yield
    finally:
        for of_module in kept:
            of_module.restore()


@contextlib.contextmanager
def state_that_grows(stages: Iterable[nn.Module], found: list[str]) -> Iterator[None]:
    """Adds to ``found`` the names of buffers and attributes that a forward pass inside has changed, but BatchNorm's."""
    modules = {name: module for name, module in _modules(stages).items() if not isinstance(module, _NormBase)}
    kept = [(name, _Kept(held)) for name, module in modules.items() for held in (module._buffers, vars(module))]
    yield
    changed = [(name, of_module.changed()) for name, of_module in kept]
    found += [f"{name}.{attribute}".removeprefix(".") for name, attribute in changed if attribute is not None]


@contextlib.contextmanager
def evaluating(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, modules are in evaluation mode."""
    was = [(module, module.training) for module in _modules(stages).values()]
    for module, _ in was:
        module.training = False
    try:
        yield
    finally:
        for module, training in was:
            module.training = training
