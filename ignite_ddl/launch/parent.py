"""The parent's side of a launch: start the ranks, watch them, and leave nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import connection, forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import cloudpickle

from ignite_ddl.launch.companions import names_of
from ignite_ddl.launch.job import Job, RankError, kill_orphans, label
from ignite_ddl.launch.output import Output
from ignite_ddl.launch.rank import companion_main, rank_main
from ignite_ddl.launch.settings import set_next_hook
from ignite_ddl.launch.signals import SIGNAL_SECONDS, Signals, name_of

POLL_SECONDS = 0.05  # how often the ranks' output is read
GRACE_SECONDS = 0.2  # after the first failure: time for the report of the rank that caused it to arrive
LOOK_SECONDS = 5.0, 60.0  # after the start or a result, and at most: until ranks are asked whether they can go on
SAME_LOOKS, LOOK_AGAIN_SECONDS = 3, 2.0  # before waits count as endless
EXIT_SECONDS = 5.0  # after the last result: time for the ranks to close their process group
_FULL_BYTES = 2**16  # a disk with fewer free bytes counts as full
_ABORT = -getattr(signal, "SIGABRT", 99)
_UNLIKE_SIZES = (
    ": gloo got a tensor of another size than expected, so ranks called different collectives, or gave them tensors of "
    "different sizes. Make the same choices on all ranks (a branch, a dropped layer, a last batch; with shard=True, "
    'also how often a loop in forward calls a layer: end it by idist.all_reduce(residual, "MAX"))'
)
_CRASHES = [-getattr(signal, name, 99) for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")]
_SOCKET_PATH_BYTES = 104  # limit of a socket's path: 104 on macOS, 108 on Linux
_starting = threading.Lock()


@dataclass
class _Rank:
    rank: int | str  # the name of a companion
    process: multiprocessing.process.BaseProcess
    reports: connection.Connection  # the rank's result or exception comes through here, once
    release: connection.Connection  # closing it lets the rank close its process group
    ready: bool = False  # of a companion: ranks can reach it
    signals: list[int] = field(default_factory=list)  # that it wants passed on
    unanswered: int = 0  # of a companion: lost ranks about which it has not answered yet
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
    report: Any = None  # after a timeout, a HangReport

    def with_note(self, note: str) -> _Failure:
        return replace(self, traceback=f"{self.traceback}\n{note}".lstrip())

    def error(self) -> RankError:
        return RankError(self.rank, self.summary, self.traceback, self.exception, self.exitcode, self.report)


class Launch:
    """One run, seen from the parent: start the ranks, watch them, and leave nothing behind."""

    def __init__(
        self, job: Job, context: multiprocessing.context.BaseContext, signals: Signals, go_on: bool = False
    ) -> None:
        self.job = job
        self.context = context
        self.signals = signals
        self.patience: float | None = None  # until when ranks may run on after a signal
        self.go_on = go_on  # whether to continue without failed ranks, if the companions can
        self.ranks: list[_Rank] = []
        self.companions: list[_Rank] = []
        self.failures: list[_Failure] = []
        self.lost: list[_Failure] = []  # ranks without which the run continues
        self.n_printed = 0  # how many of them have been printed
        self.since = self.next_look = 0.0  # the start or the last result; when ranks are asked whether they can go on
        self.places: dict[int, Any] = {}  # of the ranks that waited then
        self.waits: list[list[Any]] = []  # that cannot end, as the ranks last said, the same each time
        names = [job.first_rank + i for i in range(job.nproc)] + names_of(job.companions)
        self.output = Output(Path(job.folder), names)

    def run(self, payload: bytes) -> list[Any]:
        try:
            with no_main_module():
                self._start_all(payload)
            # The time starts here, because starting the forkserver may take long.
            self._watch(None if self.job.timeout is None else time.monotonic() + self.job.timeout)
            if not self.failures:
                self._wait_for_exit()
        except KeyboardInterrupt:
            running = [rank for rank in self.ranks if not rank.done]
            from ignite_ddl.diagnose import ask

            raise ask.interrupted(self.job, running) from None
        finally:
            self._stop()
            self.output.show(all_of_it=True)
        if self.failures:
            raise self._first_failure()
        return [rank.result for rank in self.ranks]

    def _start_all(self, payload: bytes) -> None:
        nproc, companions = range(self.job.nproc), names_of(self.job.companions)
        with contextlib.ExitStack() as opened:  # here only: a process that ends is an end of file at the other end
            # Each rank's connection to each companion. They have no name or port: nobody else can connect.
            pairs = [[socket.socketpair() for _ in companions] for _ in nproc]
            for end in itertools.chain(*itertools.chain(*pairs)):
                opened.enter_context(end)
            for local_rank in nproc:
                ends = [mine for mine, _ in pairs[local_rank]]
                rank = self.job.first_rank + local_rank
                self.ranks.append(self._start(rank, rank_main, local_rank, payload, ends))
            for index, name in enumerate(companions):
                ends = [of_rank[index][1] for of_rank in pairs]
                self.companions.append(self._start(name, companion_main, name, ends))

    def _start(self, rank: int | str, main: Callable, *args: Any) -> _Rank:
        reports, rank_reports = self.context.Pipe(duplex=False)
        rank_release, release = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=main, args=(self.job, *args, rank_reports, rank_release), name=f"ignite_ddl {label(rank)}"
        )
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            why = f"could not be started: multiprocessing's forkserver, which starts ranks, was killed ({error!r})"
            raise RankError(rank, why) from error
        rank_reports.close()  # so that a rank's death is an end of file here
        rank_release.close()
        return _Rank(rank, process, reports, release)

    def _watch(self, deadline: float | None) -> None:
        """Waits until every rank has reported, one has failed, ranks wait without end, or time is up."""
        self._look_soon()
        while True:
            running = [rank for rank in self.ranks if not rank.done]
            if not running and not any(each.unanswered for each in self.companions):
                return
            now = time.monotonic()
            if self.failures and now > min(f.when for f in self.failures) + GRACE_SECONDS:
                return
            if deadline is not None and now > deadline:
                self._report_timeout(running or self.companions)
                return
            if self.signals.received and not self._forward_signals(running):
                return
            if running and now > self.next_look:
                self._look_for_endless_waits(running)
            running = [each for each in self.companions if not each.done] + running
            handles = [handle for rank in running for handle in (rank.reports, rank.process.sentinel)]
            ready = connection.wait(handles, timeout=POLL_SECONDS)
            for rank in running:
                if rank.reports in ready or rank.process.sentinel in ready:
                    self._receive_report(rank)
            self.output.show(finished=[rank.done for rank in self.ranks])

    def _forward_signals(self, running: list[_Rank]) -> bool:
        """Passes signals on to the ranks that want them; whether to go on waiting for these."""
        received = self.signals.received
        names = " and ".join(name_of(signum) for signum in dict.fromkeys(received))
        if self.patience is None:
            self.patience = time.monotonic() + SIGNAL_SECONDS
            line = f"{names}: waiting for the ranks, at most {SIGNAL_SECONDS:g} s; a second {names} ends them at once"
            print(line, file=sys.stderr, flush=True)
        for rank in running:
            for signum in set(received) & set(rank.signals):
                rank.signals.remove(signum)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signum)
        again = len(received) > len(set(received))
        if running and (again or time.monotonic() > self.patience):
            why = "a second one came" if again else f"had not returned {SIGNAL_SECONDS:g} s later"
            summary = f"was stopped: this process got {names}, and {why}"
            self.failures.append(_Failure(running[0].rank, time.monotonic(), False, summary))
        return not self.failures

    def _failure_of_dead(self, rank: _Rank) -> _Failure:
        rank.process.join(5 * GRACE_SECONDS)  # on a busy machine, the exit code comes late
        code = rank.process.exitcode
        where = self._crash_stack(rank) if code in _CRASHES else ""
        summary = _exit_reason(code)
        if code == _ABORT and self._has_size_mismatch(rank):
            summary += _UNLIKE_SIZES
        return _Failure(rank.rank, time.monotonic(), True, summary, where, exitcode=code)

    def _receive_report(self, rank: _Rank) -> None:
        rank.done = True
        try:
            if not rank.reports.poll():
                raise EOFError
            message = cloudpickle.loads(rank.reports.recv_bytes())
        except (EOFError, OSError):
            self._fail(self._failure_of_dead(rank))
            return
        except BaseException as error:  # for example, a module that only the ranks can import
            error_text = "".join(traceback.format_exception_only(error)).strip()
            advice = "Return numbers, tensors, or containers of them; of a model ddl.full_state_dict(model)."
            summary = f"returned what cannot be unpickled here: {error_text}. {advice}"
            message = {"summary": summary, "when": time.monotonic()}
        if "can_go_on" in message:  # from a companion: when ranks can reach it, and after each lost rank
            rank.done, rank.unanswered, rank.ready = False, rank.unanswered - rank.ready, True
            if not message["can_go_on"]:
                why = message["why_not"]
                self.failures += [failure.with_note(why) for failure in self.lost]
            elif not self.failures and not any(each.unanswered for each in self.companions):
                self._report_lost_rank()
        elif "signal" in message:
            rank.done = False
            rank.signals.append(message["signal"])
            if threading.current_thread() is threading.main_thread():
                self.signals.handle(message["signal"])
        elif "result" in message:
            rank.result = message["result"]
            set_next_hook(message["next_hook"])  # as on the way there
            self._look_soon()
            self._notify_companions(rank.rank, None)
        else:
            from ignite_ddl.diagnose.stacks import name_cells

            message["traceback"] = name_cells(message.get("traceback", ""))
            exception = message.pop("exception", None)
            with contextlib.suppress(BaseException):  # some exceptions cannot be unpickled
                message["exception"] = exception and cloudpickle.loads(exception)
            self._fail(_Failure(rank=rank.rank, died=False, **message))

    def _fail(self, failure: _Failure) -> None:
        """Ends the run, or asks the companions whether it can continue without a rank."""
        alive = len(self.lost) + 1 < len(self.ranks) and all(each.ready for each in self.companions)
        if not self.go_on or self.failures or isinstance(failure.rank, str):
            self.failures.append(failure)
        elif not alive:
            self.failures += [*self.lost, failure]
        else:
            self.lost.append(failure)
            rank = self.ranks[failure.rank - self.job.first_rank]
            rank.result = failure.error()
            # Else it would wait for its release, and collectives of the others would wait for it.
            _kill(rank.process)
            self._notify_companions(failure.rank, failure.summary)

    def _report_lost_rank(self) -> None:
        for failure in self.lost[self.n_printed :]:
            print(f"{label(failure.rank)} {failure.summary}; the others go on", file=sys.stderr, flush=True)
        self.n_printed = len(self.lost)

    def _notify_companions(self, rank: int, failed: str | None) -> None:
        """Notifies the companions that a rank has returned or failed, so that nobody waits for it."""
        for each in self.companions:
            each.unanswered += failed is not None
            with contextlib.suppress(OSError):  # it has ended, which is noticed elsewhere
                each.release.send((rank, failed))

    def _look_soon(self) -> None:
        self.since, self.places = time.monotonic(), {}
        self.next_look = self.since + LOOK_SECONDS[0]

    def _look_for_endless_waits(self, running: list[_Rank]) -> None:
        """Ends the run if ranks wait for each other, or for one that has returned."""
        from ignite_ddl.diagnose import ask

        earlier, self.places = self.places, ask.places_of_waits(self.job, self.ranks)
        still = any(earlier.get(rank) == place for rank, place in self.places.items())  # in the same call as before
        waits = ask.find_endless_waits(self.job, self.ranks) if still else []
        self.waits = [*self.waits, waits] if self.waits[-1:] == [waits] else [waits]
        now = time.monotonic()
        soon = waits or (self.places and not earlier)
        self.next_look = now + (LOOK_AGAIN_SECONDS if soon else min(LOOK_SECONDS[1], now - self.since))
        if waits and len(self.waits) == SAME_LOOKS:
            rank, text, report = ask.explain_timeout(self.job, self.ranks, running)
            why = "one of its ranks has returned" if len(running) < len(self.ranks) else "ranks wait for each other"
            call = next((call for call in waits if call.rank == rank), waits[0])
            summary = f"waits in {call.operation} at {call.where}, which cannot complete: {why}"
            self.failures.append(_Failure(call.rank, now, False, summary, text, report=report))

    def _report_timeout(self, running: list[_Rank]) -> None:
        from ignite_ddl.diagnose import ask

        missing, text, report = ask.explain_timeout(self.job, self.ranks, running)
        summary = f"did not finish within {self.job.timeout:g} s"
        self.failures.append(_Failure(missing, time.monotonic(), False, summary, text, report=report))

    def _crash_stack(self, rank: _Rank) -> str:
        from ignite_ddl.diagnose.stacks import name_cells, read_stack

        stack = read_stack(Path(self.job.folder) / f"{rank.rank}.stack")
        return f"It was here (most recent call first):\n{name_cells(stack)}" if stack else ""

    def _has_size_mismatch(self, rank: _Rank) -> bool:
        """Whether gloo, which aborts then, got a tensor of another size than expected."""
        stderr = (Path(self.job.folder) / f"{rank.rank}.stderr").read_text(errors="replace")
        return "Received data size doesn't match expected size" in stderr

    def _first_failure(self) -> RankError:
        # Peers of a dead rank fail too, on their broken connections: the dead rank is the cause.
        first = min(self.failures, key=lambda failure: (not failure.died, failure.when))
        if self.lost and len(self.failures) > 1:
            others = sorted((f for f in self.failures if f is not first), key=lambda failure: failure.when)
            other_failures = "; ".join(f"{label(f.rank)} {f.summary.splitlines()[0]}" for f in others)
            more = f"Also lost: {other_failures}. A collective needs all ranks: do not call one after a worker is lost."
            first = first.with_note(more)
        if shutil.disk_usage(self.job.folder).free < _FULL_BYTES:
            more = (
                f"The disk of {Path(self.job.folder).parent}, where ranks meet and write their output, is full: "
                "make room there, or set TMPDIR to a folder on another disk before Python starts."
            )
            first = first.with_note(more)
        from ignite_ddl.diagnose import stacks

        error = first.error()
        error._calls = stacks.calls()
        return error

    def _wait_for_exit(self) -> None:
        for rank in self.ranks + self.companions:
            rank.release.close()
        deadline = time.monotonic() + EXIT_SECONDS
        for rank in self.ranks + self.companions:
            rank.process.join(max(0.0, deadline - time.monotonic()))

    def _stop(self) -> None:
        for rank in self.ranks + self.companions:
            _kill(rank.process)
        pids = [rank.process.pid for rank in self.ranks + self.companions]
        for rank in self.ranks + self.companions:
            rank.process.join()
            rank.process.close()
            for pipe in (rank.reports, rank.release):
                pipe.close()
        if pids:
            kill_orphans(self.job.folder, min(pids))


def _kill(process: multiprocessing.process.BaseProcess) -> None:
    """Kills a rank and the processes that it has started; does nothing if it has ended."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # each rank leads a group of its own
    process.kill()  # it may not have made its group yet


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "closed its connection without a result"
    if code < 0:
        name = name_of(-code)
        more = "; if nobody killed it, the machine may be out of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{more}"
    more = ", or multiprocessing's forkserver, which started it, was killed" if code == 255 else ""
    return f"ended with exit code {code} before it returned{more}"


def run_folder() -> tempfile.TemporaryDirectory:
    """Where ranks meet and write their output. The forkserver removes it if this process is killed before they run."""
    name = os.path.basename(_socket_folder())
    return tempfile.TemporaryDirectory(prefix=f"ignite_ddl_{name}_", ignore_cleanup_errors=True)


def _socket_folder() -> str:
    """Makes multiprocessing's folder of sockets before the first rank starts: ranks share it and leave none behind.

    If TMPDIR is too long for the path of a socket, the folder is in /tmp; ranks keep the user's TMPDIR.
    """
    config = multiprocessing.current_process()._config
    longest = _SOCKET_PATH_BYTES - len("/listener-12345678") - 1
    folder, owner = config.get("tempdir") or "", config.get("ignite_ddl_pid")  # a child has its parent's, which owns it
    is_own = owner == os.getpid() and os.path.isdir(folder) and len(os.fsencode(folder)) <= longest
    if os.name == "posix" and not is_own:
        base = tempfile.gettempdir()
        base = base if len(os.fsencode(base)) <= longest - len("/pymp-12345678") else "/tmp"
        config["tempdir"], config["ignite_ddl_pid"] = tempfile.mkdtemp(prefix="pymp-", dir=base), os.getpid()
        util.Finalize(None, shutil.rmtree, args=(config["tempdir"], True), exitpriority=-100)
    return config.get("tempdir") or ""


def ensure_forkserver() -> None:
    """Starts the process from which ranks are forked, if it does not run."""
    _socket_folder()
    resource_tracker.ensure_running()  # which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # there, too, until it has a group of its own
    try:
        with no_main_module():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def no_main_module():
    """Hides ``__main__`` while processes start, so that no rank runs the user's script again.

    Functions travel by value, so ranks need no ``__main__``, and a script needs no ``if __name__`` guard.
    """
    with _starting:  # one thread at a time: another would take this empty module for the user's
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
