"""Checks of the numbers that ``cost`` and ``simulate`` are given. Plain Python, no torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar

__all__ = ["at_least", "checked"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_COUNTS = {
    *("n_ranks", "n_workers", "n_servers", "n_microbatches", "n_chunks"),
    *("batch_size", "batch_per_rank"),
}


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
