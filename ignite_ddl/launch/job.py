"""What the parent process and a rank both know: the job, and the error of a rank that failed."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["HAS_SIGNALS", "MARK", "Job", "RankError", "kill_who_left", "label"]
HAS_SIGNALS = hasattr(signal, "SIGUSR1")  # not on Windows
MARK = "IGNITE_DDL_RUN"  # in the environment of a rank, and of all that it starts: the folder of its run


class RankError(RuntimeError):
    """The first rank that failed, with its own traceback.

    Attributes:
        rank: the global rank that failed first; of a parameter server its name, such as "server0".
        summary: what happened to it, in a line.
        traceback: that rank's traceback as text, or how it ended (a signal, a time-out).
        exception: the exception itself where it could be sent back, else None.
        exitcode: the process's exit code where it ended without a report (negative: the signal), else None.
    """

    def __init__(
        self,
        rank: int | str,
        summary: str,
        traceback: str = "",
        exception: BaseException | None = None,
        exitcode: int | None = None,
    ) -> None:
        super().__init__(f"{label(rank)} {summary}" + (f"\n\n{traceback.rstrip()}" if traceback else ""))
        self.rank = rank
        self.summary = summary
        self.traceback = traceback
        self.exception = exception
        self.exitcode = exitcode

    def __reduce__(self) -> tuple:
        return RankError, (self.rank, self.summary, self.traceback, None, self.exitcode)

    def _render_traceback_(self) -> list[str]:
        # IPython calls this: the rank's own frames are what helps, not the launcher's.
        return [f"RankError: {self}"]


@dataclass
class Job:
    """What a rank must know to join: the same for all ranks but for ``local_rank``."""

    backend: str
    nproc: int
    world_size: int
    first_rank: int
    folder: str
    init_method: str
    timeout: float | None
    group_timeout: float | None
    threads: int
    environ: dict[str, str]
    cwd: str
    modules: list[str]
    mesh_sizes: dict[str, int]
    start_method: str | None
    servers: int = 0
    rpc_method: str = ""  # how workers and parameter servers meet
    sources: dict[str, list[str]] = field(default_factory=dict)


def kill_who_left(folder: str, oldest: int = 0) -> None:
    """Ends what ranks have started outside of their process groups (setsid); its environment names the run.

    Args:
        folder: of the run.
        oldest: pid of a process that was there before. Reading all of /proc takes a while.
    """
    if not os.path.exists("/proc/loadavg"):  # not Linux
        return
    newest = int(Path("/proc/loadavg").read_text().split()[-1])
    mark = f"{MARK}={folder}".encode()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid > oldest or newest < oldest:  # pids begin again at 300 some time
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)


def label(rank: int | str) -> str:
    return rank if isinstance(rank, str) else f"rank {rank}"
