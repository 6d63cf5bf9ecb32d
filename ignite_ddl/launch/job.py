"""What the parent process and the ranks share: the job's settings, and the error of a failed rank."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ignite_ddl.launch.frames import without_libraries
from ignite_ddl.launch.settings import Settings

# By this signal the parent asks for a rank's stack: programs do not use it, and it is ignored by default.
STACK_SIGNAL = getattr(signal, "SIGURG", None)  # None on Windows
PLACE, ALL_CALLS = b"where?", b"which calls?"  # what the parent asks a rank through its pipe
MARK = "IGNITE_DDL_RUN"  # environment variable of ranks and of what they start: the folder of the run


class RankError(RuntimeError):
    """Raised when a rank fails; carries the traceback of the first rank that failed.

    Attributes:
        rank: the global rank that failed first, or the name of a companion, such as "server0".
        summary: one line that says what happened.
        traceback: the rank's traceback as text, in full (the message leaves out most frames of libraries); after a
            timeout, the stacks of all ranks.
        exception: the exception itself if it could be sent back, else None.
        exitcode: the exit code if the process ended without a report (negative: the signal), else None.
        report: after a timeout, which rank was in which collective: a :class:`~ignite_ddl.HangReport`; else None.
    """

    def __init__(
        self,
        rank: int | str,
        summary: str,
        traceback: str = "",
        exception: BaseException | None = None,
        exitcode: int | None = None,
        report: Any = None,
    ) -> None:
        shown = without_libraries(traceback).rstrip()
        super().__init__(f"{label(rank)} {summary}" + (f"\n\n{shown}" if shown else ""))
        self.rank = rank
        self.summary = summary
        self.traceback = traceback
        self.exception = exception
        self.exitcode = exitcode
        self.report = report
        self._calls = ""  # the lines of the user's code that have called run

    def __reduce__(self) -> tuple:
        return RankError, (self.rank, self.summary, self.traceback, None, self.exitcode, self.report)

    def _render_traceback_(self) -> list[str]:
        # IPython calls this. The launcher's own frames would not help the user.
        return [f"RankError: {self}" + (f"\n\nThe run was started {self._calls}" if self._calls else "")]


@dataclass
class Job:
    """What a rank needs to know to join the run; the same for all ranks."""

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
    path: list[str]  # where modules are looked for
    modules: list[str]
    mesh_sizes: dict[str, int]
    start_method: str | None
    settings: Settings
    companions: int = 0  # processes beside the ranks
    sources: dict[str, list[str]] = field(default_factory=dict)


def kill_orphans(folder: str, oldest: int = 0) -> None:
    """Kills orphans, which ranks started outside their process groups (setsid), found by their environment.

    Args:
        folder: the folder of the run.
        oldest: processes with a lower pid are skipped, since reading all of /proc is slow.
    """
    if not os.path.exists("/proc/loadavg"):  # not Linux
        return
    newest = int(Path("/proc/loadavg").read_text().split()[-1])
    mark = f"{MARK}={folder}".encode()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid > oldest or newest < oldest:  # pids wrap around
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)


def label(rank: int | str) -> str:
    return rank if isinstance(rank, str) else f"rank {rank}"
