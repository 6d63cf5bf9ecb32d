"""Checks of what ``cost``, ``plan`` and ``simulate`` are given. Plain Python, no torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, TypeVar

__all__ = ["above_zero", "at_least", "checked", "one_of", "share"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_COUNTS = {*("n_ranks", "n_workers", "n_servers", "n_microbatches", "n_chunks"), *("batch_size", "batch_per_rank")}


def checked(function: _Function) -> _Function:
    """Decorator that raises a ValueError for numeric arguments out of range.

    Numbers of ranks, workers, servers, microbatches and chunks, and batch sizes, should be whole numbers of at least 1.
    All other numbers, alone or in a list, a tuple, an array or a tensor, should be at least 0; NaN is refused.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            at_least(1 if name in _COUNTS else 0, whole=name in _COUNTS, **{name: value})
        return function(*args, **kwargs)

    return call


def at_least(least: float, *, whole: bool = False, **given: Any) -> None:
    """Raises a ValueError for a number, or one in a sequence, that is NaN or less than ``least``."""
    for name, value in given.items():
        plain = value.tolist() if hasattr(value, "tolist") else value  # an array or a tensor
        for number in plain if isinstance(plain, list | tuple) else [plain]:
            if isinstance(number, Real) and (not number >= least or (whole and number % 1)):
                kind = "a whole number of at least" if whole else "at least"
                raise ValueError(f"{name} should be {kind} {least}, but given {value}")


def above_zero(**given: float) -> None:
    """Raises a ValueError for a number that is NaN, 0 or less."""
    for name, value in given.items():
        if not value > 0:
            raise ValueError(f"{name} should be above 0, but given {value}")


def share(**given: float) -> None:
    """Raises a ValueError for a number that is not from 0 to 1."""
    for name, value in given.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} should be a share, from 0 to 1, but given {value}")


def one_of(known: Iterable, **given: Any) -> None:
    """Raises a ValueError for a value that is not among the known ones."""
    for name, value in given.items():
        if value not in known:
            raise ValueError(f"{name} should be one of {', '.join(map(str, known))}, but given {value!r}")
