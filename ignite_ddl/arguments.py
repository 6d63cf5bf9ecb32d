"""Checks of arguments that several files share. Plain Python."""

from __future__ import annotations

from datetime import timedelta
from numbers import Real
from typing import Any

__all__ = ["check_count", "is_count", "limit_in_seconds"]
_LONGEST_SECONDS = 1e9  # thirty years, which fits into nanosecond clocks


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is an integer of at least ``least``, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raises a ValueError unless ``value`` is an integer of at least ``least``.

    Args:
        name: the argument's name, for the message.
        value: the argument's value.
        least: the smallest valid number. Default: 1.
    """
    if not is_count(value, least):
        fits = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} should be {fits}, but given {value!r}")


def limit_in_seconds(timeout: float | timedelta, name: str = "timeout") -> float:
    """A time limit as a number of seconds.

    Args:
        timeout: seconds, or a ``timedelta``.
        name: the argument's name, for the message.

    Raises:
        ValueError: if it is not a positive number of seconds, or too long.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < seconds <= _LONGEST_SECONDS:
        raise ValueError(
            f"{name} should be a positive number of seconds, but given {timeout!r}"
            + (f"; the longest is {_LONGEST_SECONDS:g}" if isinstance(seconds, Real) and seconds > 0 else "")
        )
    return float(seconds)
