"""Signals that a run asks for, such as SIGTERM by which a cluster says that it takes the machine away."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

SIGNAL_SECONDS = 600.0  # how long a parent waits for its ranks after a signal that it has passed on to them


class Signals:
    """Handlers of signals in this process, which get the signals until :meth:`restore`.

    As a context, restores the previous handlers at its end and raises received signals again: the process ends by
    them, or its previous handler is called.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}
        self._functions: list[tuple[int, Callable[[], None]]] = []

    def handle(self, signum: int, function: Callable[[], None] = lambda: None) -> None:
        """Calls the function when the signal comes. In the main thread only, as ``signal.signal``."""
        if signum not in self._before:
            self._before[signum] = signal.signal(signum, self._note)
        self._functions.append((signum, function))

    def _note(self, signum: int, frame: Any) -> None:
        self.received.append(signum)
        for wanted, function in self._functions:
            if wanted == signum:
                function()

    def restore(self) -> None:
        self._functions.clear()
        while self._before:
            signum, handler = self._before.popitem()
            if signal.getsignal(signum) == self._note:  # else somebody has set another one since
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        self.restore()
        for signum in dict.fromkeys(self.received):
            if signal.getsignal(signum) == signal.SIG_DFL:
                with contextlib.suppress(Exception):  # nothing is printed or flushed after the signal
                    sys.stderr.write(f"{error}\n" if error else "")
                    sys.stdout.flush()
                    sys.stderr.flush()
            signal.raise_signal(signum)
            if os.getpid() == 1 and signal.getsignal(signum) == signal.SIG_DFL:
                raise SystemExit(128 + signum)  # in a container: the kernel protects process 1 from its own signals


def name_of(signum: int) -> str:
    return next((known.name for known in signal.Signals if known == signum), f"signal {signum}")
