"""A script's settings of torch, passed on to the ranks that it starts, which compute as it would."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_AT_IMPORT = torch.initial_seed()
_LARGEST_USER_SEED = 2**32  # the seed that torch takes for itself has 64 random bits, those of users are smaller


def _set_deterministic(given: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(given[0], warn_only=given[1])


def _set_anomaly(given: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(given[0], check_nan=given[1])


def set_next_hook(number: int) -> None:
    RemovableHandle.next_id = max(RemovableHandle.next_id, number)


def _flag(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    "fill": _flag(torch.utils.deterministic, "fill_uninitialized_memory"),
    "anomaly": (lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), _set_anomaly),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    **{f"cudnn {name}": _flag(torch.backends.cudnn, name) for name in ("enabled", "deterministic", "benchmark")},
    "cudnn tf32": _flag(torch.backends.cudnn, "allow_tf32"),
    # Else a hook that a rank registers could get the number of one that came with a model, and replace it.
    "next hook": (lambda: RemovableHandle.next_id, set_next_hook),
}


class Settings:
    """Made in the process that starts the ranks, applied in each of them."""

    def __init__(self) -> None:
        self.values = _now()
        seed = torch.initial_seed()
        # The state, not the seed: a rank does not draw again what this process has drawn, as one process would not.
        self.random = torch.get_rng_state() if seed != _AT_IMPORT or seed < _LARGEST_USER_SEED else None
        self.seed = secrets.randbits(63) if self.random is None else seed

    def apply(self, seed: int | None = None) -> None:
        """
        Args:
            seed: that of machine 0, for all ranks of several machines. Default: this machine's.
        """
        before = _now()
        for name, value in self.values.items():
            if before.get(name) != value:
                _SETTINGS[name][1](value)
        torch.manual_seed(self.seed if seed is None or self.random is not None else seed)  # of GPUs, too
        if self.random is not None:
            torch.set_rng_state(self.random)


def _now() -> dict[str, Any]:
    values = {}
    for name, (get, _) in _SETTINGS.items():
        with contextlib.suppress(Exception):  # torch refuses to read where its old and new ways to set TF32 are mixed
            values[name] = get()
    return values
