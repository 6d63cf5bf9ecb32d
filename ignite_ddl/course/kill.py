"""Kills a rank while it writes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["killed_before_sync"]


@contextmanager
def killed_before_sync(call: int | None) -> Iterator[list[int]]:
    """Counts ``os.fsync``, and before one of these calls ends the process by SIGKILL, which tidies nothing up.

    Args:
        call: the number of the call, from 1; None to count only.

    Yields:
        list: of the file descriptors that were synced.

    Example:
        >>> import os, tempfile
        >>> from ignite_ddl.course.kill import killed_before_sync
        >>> with tempfile.TemporaryFile() as file, killed_before_sync(None) as synced:
        ...     os.fsync(file.fileno())
        >>> len(synced)
        1
    """
    sync, synced = os.fsync, []

    def counted(file: int) -> None:
        synced.append(file)
        if len(synced) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(file)

    os.fsync = counted
    try:
        yield synced
    finally:
        os.fsync = sync
