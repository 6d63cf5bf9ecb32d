"""What the parent process and a rank both know: the job, and the error of a rank that failed."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

__all__ = ["HAS_SIGNALS", "Job", "RankError", "label"]
HAS_SIGNALS = hasattr(signal, "SIGUSR1")  # not on Windows


class RankError(RuntimeError):
    """The first rank that failed, with its own traceback.

    Attributes:
        rank: the global rank that failed first; of a parameter server its name, such as "server0".
        summary: what happened to it, in a line.
        traceback: that rank's traceback as text, or how it ended (a signal, a time-out).
        exception: the exception itself where it could be sent back, else None.
        exitcode: the process's exit code where it died without a word (negative: the signal), else None.
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


def label(rank: int | str) -> str:
    return rank if isinstance(rank, str) else f"rank {rank}"
