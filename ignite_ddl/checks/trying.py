"""What a check tries may fail: in a user's code, which ends the check, or in our own, which is said."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_ddl.arguments import first_line
from ignite_ddl.data_parallel import without_calls_of_models

RAISES = "IGNITE_DDL_RAISES"  # tests set this variable: what would be said is raised
_OURS = str(Path(__file__).parents[1])
_LIBRARY = str(Path(torch.__file__).parent), sysconfig.get_path("stdlib")
_MODULES = str(Path(torch.nn.__file__).parent)
_said: set[str] = set()


@contextlib.contextmanager
def may_fail(what: str) -> Iterator[None]:
    """Ends what is inside where code of a user fails, which may not run with a part of the rows.

    An error of the check's own code would switch it off without a word: of this it warns, once.

    Args:
        what: what the check finds, such as "rows that depend on each other".
    """
    try:
        yield
    except Exception as error:
        place = _place_in_our_code(error)
        if place is None:
            return
        if RAISES in os.environ:
            raise
        if what not in _said:
            _said.add(what)
            warnings.warn(
                f"{what} are not looked for here, since ignite_ddl's check failed by itself ({place}: "
                f"{type(error).__name__}: {first_line(error)}): please report it, with the model",
                stacklevel=3,
            )


def _place_in_our_code(error: Exception) -> str | None:
    """Where Python raised an error in a check; None if we, a user's code or a layer did, or torch for given values."""
    if isinstance(error, RuntimeError):
        return None
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.name in ("__torch_dispatch__", "__torch_function__"):  # of what somebody else calls
            continue
        if frame.filename.startswith(_OURS):
            raised = (frame.line or "").startswith("raise")
            return None if raised else f"{Path(frame.filename).name}, line {frame.lineno}"
        is_installed = "-packages" in frame.filename and not frame.filename.startswith(_LIBRARY[0])
        if is_installed or frame.filename.startswith(_MODULES) or not frame.filename.startswith(_LIBRARY):
            return None
    return None


@contextlib.contextmanager
def without_peers() -> Iterator[None]:
    """Inside, code fails to which other ranks would have to answer, as they may not try it, or less often: a
    collective, and a model whose weights are gathered.
    """
    with without_calls_of_models(), _RefusesCollectives():
        yield


class _RefusesCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("a collective that other ranks do not call")
        return func(*args, **(kwargs or {}))
