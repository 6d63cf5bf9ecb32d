"""The report for a job that hangs, where no parent can ask the ranks: under torchrun, Slurm or another launcher."""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from ignite_ddl.arguments import SECONDS, takes
from ignite_ddl.diagnose.calls import calls_counted, job_store, recorded_calls
from ignite_ddl.diagnose.report import NEWEST, hang_report
from ignite_ddl.diagnose.stacks import thread_stack, waits_in

PATIENCE = 12.0  # seconds for which the others' parts are waited for; on a busy machine a part takes several


@takes(after=SECONDS)
def report_hangs(after: float) -> None:
    """Prints a report when this job hangs: which rank is in which collective, who never came, where each rank is.

    Call it once on each rank of a job that torchrun, Slurm or another launcher has started, after the process group is
    made. A thread looks from time to time. When the main thread has been in the same collective, send or receive for
    ``after`` seconds, all ranks put their part into the job's store, and the first one prints a
    :class:`~ignite_ddl.HangReport` to its standard error; the job goes on, until its own limit ends it
    (``group_timeout``), or until the slow rank comes. Ranks that ``ddl.Parallel(timeout=)`` has started need no such
    call: the report is in the :class:`~ignite_ddl.RankError`.

    Tested with gloo. With NCCL torch records the same (tried with two ranks on one H200, November 2026), but a rank
    waits in its synchronisation with the GPU, in no collective of Python's: there ``ddl.Parallel(timeout=)`` reports.

    Args:
        after: seconds (or a ``timedelta``). Above the longest time for which ranks wait in a healthy run, such as for
            rank 0's validation, and below ``group_timeout``.

    Raises:
        ValueError: if ``after`` is not a positive time.

    Examples:
        .. code-block:: python

            import ignite.distributed as idist
            import ignite_ddl as ddl

            def training(local_rank):
                ddl.report_hangs(after=60)
                return idist.all_reduce(1)

            with ddl.Parallel(backend="gloo") as parallel:      # joins torchrun's or Slurm's job; else runs serially
                assert parallel.run(training) == [1]
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        watch = Watch(after, threading.get_ident(), "ignite_ddl/hang")
        thread = threading.Thread(target=watch.run, name="ignite_ddl report_hangs", daemon=True)
        thread.start()
        # Python ends daemon threads at exit, and one inside the store's C++ then aborts the process.
        atexit.register(thread.join, PATIENCE)
        atexit.register(watch.over.set)  # runs first


def answer(thread: int, with_calls: bool = True) -> dict[str, Any]:
    """A rank's part of a report: where a thread of it is, and its newest collectives, or only how many there were."""
    counted = {"calls": recorded_calls(NEWEST)} if with_calls else {"counted": calls_counted().decode()}
    return {"stack": thread_stack(thread)} | counted


class Watch:
    """One rank's watch over a thread; ``name`` is where the ranks of this watch meet in the store."""

    def __init__(self, after: float, thread: int, name: str) -> None:
        self.after, self.thread, self.name = after, thread, name
        self.number = 0  # of reports
        self.over = threading.Event()
        self.store = job_store()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def run(self) -> None:
        pause = min(1.0, self.after / 4)
        seen, since, reported = "", time.monotonic(), ""
        try:
            while dist.is_initialized() and not self.over.wait(pause):
                stack = thread_stack(self.thread)
                # The frames of a call are the same in each step: the number of the last call is not.
                now = f"{stack}{calls_counted()}"
                if now != seen:
                    seen, since = now, time.monotonic()
                hangs = time.monotonic() - since > self.after and waits_in(stack) and reported != seen
                if hangs or self.store.check([f"{self.name}/{self.number}"]):
                    self.report(f"rank {self.rank} waits for more than {self.after:g} s")
                    reported = seen
        except RuntimeError:  # the store has gone, and the job with it
            return

    def report(self, why: str) -> None:
        """Puts in this rank's part; the first rank waits for the others' and prints.

        torch reads the symbols of its frames first: 0.3 s, and several seconds on a very busy machine.
        """
        key = f"{self.name}/{self.number}"
        self.number += 1
        self.store.set(f"{key}/{self.rank}", json.dumps(answer(self.thread)))
        if self.store.add(key, 1) > 1:
            return
        deadline, others = time.monotonic() + PATIENCE, range(self.world_size)
        while time.monotonic() < deadline and not self.store.check([f"{key}/{rank}" for rank in others]):
            if self.over.wait(0.05):
                return
        answered = [rank for rank in others if self.store.check([f"{key}/{rank}"])]
        parts = {rank: json.loads(self.store.get(f"{key}/{rank}")) for rank in answered}
        report = hang_report(
            {rank: part["stack"] for rank, part in parts.items()}, {rank: part["calls"] for rank, part in parts.items()}
        )
        silent = [str(rank) for rank in others if rank not in parts]
        silence = f"\nNo answer from: {', '.join(silent)}." if silent else ""
        stacks = [f"rank {r} is here (most recent call first):\n{parts[r]['stack']}" for r in parts]
        sys.stderr.write("\n\n".join([f"{why}\n{report}{silence}", *stacks]) + "\n")
        sys.stderr.flush()
