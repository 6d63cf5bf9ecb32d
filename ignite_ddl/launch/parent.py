"""The parent's side of a launch: start the ranks, watch them, and leave nothing behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import cloudpickle

from ignite_ddl.launch.job import HAS_SIGNALS, Job, RankError, label
from ignite_ddl.launch.output import Output
from ignite_ddl.launch.rank import rank_main, server_main

__all__ = ["EXIT_SECONDS", "GRACE_SECONDS", "Launch", "POLL_SECONDS"]
POLL_SECONDS = 0.05  # how often printed lines are looked for
GRACE_SECONDS = 0.2  # after a first failure: time for the rank that caused it to be heard
EXIT_SECONDS = 5.0  # after the last result: time for the ranks to close their process group


@dataclass
class _Rank:
    rank: int | str  # a parameter server has a name
    process: multiprocessing.process.BaseProcess
    reports: connection.Connection  # the rank's result or exception comes through here, once
    release: connection.Connection  # closing it lets the rank close its process group
    ready: bool = False  # a parameter server: workers can reach it
    asked: int = 0  # how often it was asked whether the others can go on, and has not said
    done: bool = False
    result: Any = None


@dataclass
class _Failure:
    rank: int | str
    when: float
    died: bool
    summary: str
    traceback: str = ""
    exception: BaseException | None = None
    exitcode: int | None = None


class Launch:
    """One run, seen from the parent: start the ranks, watch them, and leave nothing behind."""

    def __init__(self, job: Job, context: multiprocessing.context.BaseContext, go_on: bool = False) -> None:
        self.job = job
        self.context = context
        self.go_on = go_on  # without workers that fail, where the parameter servers can
        self.ranks: list[_Rank] = []
        self.servers: list[_Rank] = []
        self.failures: list[_Failure] = []
        self.lost: list[_Failure] = []  # the run goes on without these
        self.said = 0  # of these, once all servers can go on
        names = [job.first_rank + i for i in range(job.nproc)] + [f"server{i}" for i in range(job.servers)]
        self.output = Output(Path(job.folder), names)

    def run(self, payload: bytes) -> list[Any]:
        try:
            with _no_main_module():
                for local_rank in range(self.job.nproc):
                    rank = self.job.first_rank + local_rank
                    self.ranks.append(self._start(rank, rank_main, local_rank, payload))
                for index in range(self.job.servers):
                    self.servers.append(self._start(f"server{index}", server_main, index))
            # Not before: the first launch starts the forkserver, too, which a busy machine may take long for.
            self._watch(None if self.job.timeout is None else time.monotonic() + self.job.timeout)
            if not self.failures:
                self._wait_for_exit()
        finally:
            self._stop()
            self.output.show(all_of_it=True)
        if self.failures:
            raise self._first_failure()
        return [rank.result for rank in self.ranks]

    def _start(self, rank: int | str, main: Callable, *args: Any) -> _Rank:
        reports, rank_reports = self.context.Pipe(duplex=False)
        rank_release, release = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=main, args=(self.job, *args, rank_reports, rank_release), name=f"ignite_ddl {label(rank)}"
        )
        process.start()
        rank_reports.close()  # so that a rank's death is an end of file here
        rank_release.close()
        return _Rank(rank, process, reports, release)

    def _watch(self, deadline: float | None) -> None:
        """Waits until every rank has reported, one has failed, or time is up."""
        while True:
            running = [rank for rank in self.ranks if not rank.done]
            if not running and not any(server.asked for server in self.servers):
                return
            now = time.monotonic()
            if self.failures and now > min(f.when for f in self.failures) + GRACE_SECONDS:
                return
            if deadline is not None and now > deadline:
                self._report_timeout(running or self.servers)
                return
            for rank in self._ready([server for server in self.servers if not server.done] + running):
                self._hear(rank)
            self.output.show(finished=[rank.done for rank in self.ranks])

    def _ready(self, running: list[_Rank]) -> list[_Rank]:
        by_handle = {rank.reports: rank for rank in running} | {
            rank.process.sentinel: rank for rank in running
        }
        handles = connection.wait(list(by_handle), timeout=POLL_SECONDS)
        return list({id(by_handle[handle]): by_handle[handle] for handle in handles}.values())

    def _hear(self, rank: _Rank) -> None:
        rank.done = True
        try:
            if not rank.reports.poll():
                raise EOFError
            message = cloudpickle.loads(rank.reports.recv_bytes())
        except (EOFError, OSError):
            rank.process.join(GRACE_SECONDS)
            code = rank.process.exitcode
            self._fail(_Failure(rank.rank, time.monotonic(), True, _how_it_ended(code), exitcode=code))
            return
        except (
            Exception
        ) as error:  # the result arrived and cannot be read here, say a module that only ranks have
            message = {"summary": f"returned what cannot be read here: {error!r}", "when": time.monotonic()}
        if "can_go_on" in message:  # a server's: once when workers can reach it, then after each lost worker
            rank.done, rank.asked, rank.ready = False, rank.asked - rank.ready, True
            if not message["can_go_on"]:
                self.failures += self.lost
            elif not self.failures and not any(server.asked for server in self.servers):
                self._say_who_is_lost()
        elif "result" in message:
            rank.result = message["result"]
            self._tell_servers(rank.rank, None)
        else:
            message["traceback"] = _name_cells(message.get("traceback", ""))
            self._fail(_Failure(rank=rank.rank, died=False, **message))

    def _fail(self, failure: _Failure) -> None:
        """Ends the run, or asks the servers whether it can go on without a worker."""
        alive = len(self.lost) + 1 < len(self.ranks) and all(server.ready for server in self.servers)
        if not self.go_on or self.failures or isinstance(failure.rank, str):
            self.failures.append(failure)
        elif not alive:
            self.failures += [*self.lost, failure]
        else:
            self.lost.append(failure)
            rank = self.ranks[failure.rank - self.job.first_rank]
            rank.result = _rank_error(failure)
            # It would stand until it is let go, and whoever calls a collective would stand with it.
            _kill(rank.process)
            self._tell_servers(failure.rank, failure.summary)

    def _say_who_is_lost(self) -> None:
        for failure in self.lost[self.said :]:
            print(f"{label(failure.rank)} {failure.summary}; the others go on", file=sys.stderr, flush=True)
        self.said = len(self.lost)

    def _tell_servers(self, rank: int, failed: str | None) -> None:
        """That a worker is through, or failed: nobody should wait for it."""
        for server in self.servers:
            server.asked += failed is not None
            with contextlib.suppress(OSError):  # its own end will be heard
                server.release.send((rank, failed))

    def _report_timeout(self, running: list[_Rank]) -> None:
        names = ", ".join(str(rank.rank) for rank in running)
        finished = ", ".join(str(rank.rank) for rank in self.ranks if rank.done) or "none"
        lines = [f"Not finished: {names}. Finished: {finished}."]
        for rank, stack in zip(running, self._stacks(running), strict=True):
            lines += [f"\nrank {rank.rank} was here (most recent call first):", stack]
        summary = f"did not finish within {self.job.timeout:g} s"
        text = _name_cells("\n".join(lines))
        self.failures.append(_Failure(running[0].rank, time.monotonic(), False, summary, traceback=text))

    def _stacks(self, running: list[_Rank]) -> list[str]:
        if not HAS_SIGNALS:
            return ["  (not known on this platform)"] * len(running)
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(GRACE_SECONDS)
        return [_read_stack(Path(self.job.folder) / f"{rank.rank}.stack") for rank in running]

    def _first_failure(self) -> RankError:
        # Peers of a dead rank fail too, on their broken connections: the dead one is the cause.
        first = min(self.failures, key=lambda failure: (not failure.died, failure.when))
        if self.lost and len(self.failures) > 1:
            others = sorted((f for f in self.failures if f is not first), key=lambda failure: failure.when)
            said = "; ".join(f"{label(f.rank)} {f.summary.splitlines()[0]}" for f in others)
            more = f"Lost as well: {said}. A collective needs all ranks: use none after a loss."
            first = replace(first, traceback=f"{first.traceback}\n{more}".lstrip())
        return _rank_error(first)

    def _wait_for_exit(self) -> None:
        for rank in self.ranks + self.servers:
            rank.release.close()
        deadline = time.monotonic() + EXIT_SECONDS
        for rank in self.ranks + self.servers:
            rank.process.join(max(0.0, deadline - time.monotonic()))

    def _stop(self) -> None:
        for rank in self.ranks + self.servers:
            _kill(rank.process)
        for rank in self.ranks + self.servers:
            rank.process.join()
            rank.process.close()
            for pipe in (rank.reports, rank.release):
                pipe.close()


def _rank_error(failure: _Failure) -> RankError:
    return RankError(failure.rank, failure.summary, failure.traceback, failure.exception, failure.exitcode)


def _kill(process: multiprocessing.process.BaseProcess) -> None:
    """Ends a rank and whatever it has started; harmless where it has ended."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # each rank leads a group of its own
    process.kill()  # it may not have got as far as making its group


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its connection without a result"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        more = "; if nobody killed it, the machine may be out of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{more}"
    return f"ended with exit code {code} before it returned"


def _read_stack(path: Path) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    frames = [line for line in text.splitlines() if line.startswith("  File")]
    ours = [i for i, line in enumerate(frames) if line.rstrip().endswith("in rank_main")]
    frames = frames[: ours[0]] if ours else frames
    return "\n".join(frames) or "  (in its set-up: it was starting, or meeting its peers)"


def _name_cells(text: str) -> str:
    """``File "/tmp/ipykernel_7/42.py", line 3`` becomes ``Cell In[5], line 3``, as IPython says it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})

    def name(match: re.Match) -> str:
        return f"Cell In[{numbers[match[1]]}]" if match[1] in numbers else match[0]

    return re.sub(r'File "([^"]+)"', name, text)


@contextlib.contextmanager
def _no_main_module():
    """Hides ``__main__`` while processes start, so that no rank runs the user's script again.

    Functions travel by value, so ranks need no ``__main__``, and a script needs no ``if __name__`` guard.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
