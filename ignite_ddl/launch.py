"""Run a function on N ranks and get N results back, from a notebook, a script, torchrun or Slurm.

How a launch works: a *forkserver*, started once, has torch and ignite imported and has never computed
anything; forking it is fast and, unlike forking the kernel, safe. The function travels by cloudpickle, so it
may be defined in a cell. Each rank writes what it prints into a file that the parent reads and shows in rank
order, and sends its result, or its exception, through a pipe. A rank ends when its parent does.
"""

from __future__ import annotations

import codecs
import contextlib
import faulthandler
import io
import linecache
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection
from numbers import Real
from pathlib import Path
from typing import Any

import cloudpickle
import ignite.distributed as idist
import torch
from ignite.distributed.comp_models.native import _NativeDistModel

from ignite_ddl.mesh import check_mesh, initialize_mesh

__all__ = ["Parallel", "RankError"]

# Imported once by the forkserver, so that no rank pays for it. Anything that a rank needs before it can read
# its function may be appended; ranks import what the forkserver, once started, does not know yet.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "ignite.distributed",
    "ignite.engine",
    "ignite.metrics",
    "ignite.handlers",
    "ignite_ddl",
    "ignite_ddl.stage",
]

HOLD_SECONDS = (
    30.0  # lines of ranks above the first running one are held this long, so that short runs print in order
)
POLL_SECONDS = 0.05  # how often printed lines are looked for
GRACE_SECONDS = 0.2  # after a first failure: time for the rank that caused it to be heard
EXIT_SECONDS = 5.0  # after the last result: time for the ranks to close their process group
_SIGNALS = hasattr(signal, "SIGUSR1")  # not on Windows


def limit_in_seconds(timeout: float | timedelta, longest: float = 1e9) -> float:
    """The argument ``timeout`` as a number of seconds; a ValueError where it is no limit of time.

    Thirty years, the default of ``longest``, is what clocks that count nanoseconds can still add up.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < seconds <= longest:
        raise ValueError(
            f"timeout should be a positive number of seconds, but given {timeout!r}"
            + (f"; the longest is {longest:g}" if isinstance(seconds, Real) and seconds > 0 else "")
        )
    return float(seconds)


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
        super().__init__(f"{_label(rank)} {summary}" + (f"\n\n{traceback.rstrip()}" if traceback else ""))
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
class _Job:
    """What a rank must know to join: the same for all ranks but for ``local_rank``."""

    backend: str
    nproc: int
    world_size: int
    first_rank: int
    folder: str
    init_method: str
    timeout: float | None
    threads: int
    environ: dict[str, str]
    cwd: str
    modules: list[str]
    mesh_sizes: dict[str, int]
    start_method: str | None
    servers: int = 0
    rpc_method: str = ""  # how workers and parameter servers meet
    sources: dict[str, list[str]] = field(default_factory=dict)


class Parallel:
    """Runs a function on several ranks: ``idist.Parallel`` with results, errors and notebooks.

    Three ways, one code:

    - ``nproc_per_node`` given: starts that many processes on this machine and joins them in a process group.
    - not given, under torchrun or Slurm: joins their job as one rank of it.
    - not given, alone: runs the function in this process.

    In a notebook, functions, lambdas and closures of cells can be run. What ranks print comes back with their
    rank: the lowest running rank live, the others after it, in rank order (after 30 seconds all are live). The
    first rank that fails is raised as :class:`RankError` and its peers end at once. No rank outlives this
    process, and Ctrl-C (or the notebook's stop button) ends them.

    Args:
        backend: "gloo" (CPU, or GPU) or "nccl" (one GPU per rank), or another backend of
            ``idist.available_backends()`` where a job is joined. None runs serially.
        nproc_per_node: number of ranks to start on this machine.
        nnodes: number of machines, default 1. Each runs this same code.
        node_rank: this machine's index; needed if ``nnodes`` > 1.
        master_addr: address of machine 0; needed if ``nnodes`` > 1.
        master_port: a free port of machine 0; needed if ``nnodes`` > 1. On one machine none is used: ranks meet
            through a file of their own, which cannot collide.
        init_method: how ranks meet, as in ``torch.distributed.init_process_group``; "env://" or "file://...".
        dp: size of the mesh's data-parallel axis; -1 takes what the others leave. See :mod:`ignite_ddl.mesh`.
        pp: number of pipeline ranks.
        tp: number of ranks that share each layer. With none of the three, the job is data parallel.
        timeout: seconds (or a ``timedelta``) that the run may take, once its processes have started. Beyond it every
            rank is stopped and the error says where each one was. Default None: no limit.
        threads_per_rank: CPU threads per rank. Default ``max(1, cores // (nproc_per_node + servers))``.
        start_method: "forkserver" (default) or "spawn" (the default where there is no forkserver, as on Windows:
            slower). "fork" is refused: a fork of a process that has computed may hang.
        servers: parameter-server processes to start beside the ranks, default 0. They are not ranks: idist's world
            is the workers only. See :class:`ignite_ddl.ParameterServer`. On a serial run the server is in-process.
        on_failure: "raise" (default), or "continue" with ``servers``: where a worker fails and the mode of the
            parameter server can do without it, the others go on, a line says so, and the failed worker's place
            in the list of results holds its :class:`RankError`. Use no collective after a loss: it needs every
            rank, so it fails, and whoever called it is lost too. When nobody is left, the error names the worker
            that was lost first.

    Raises:
        ValueError: if an argument does not fit; nothing has been started then.

    Examples:
        .. code-block:: python

            import ignite.distributed as idist
            import ignite_ddl as ddl

            def add_ranks(local_rank, factor):
                return factor * idist.all_reduce(idist.get_rank())

            with ddl.Parallel(backend="gloo", nproc_per_node=4) as parallel:
                sums = parallel.run(add_ranks, factor=10)

            assert sums == [60, 60, 60, 60]
    """

    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int | None = None,
        nnodes: int | None = None,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        init_method: str | None = None,
        *,
        dp: int | None = None,
        pp: int | None = None,
        tp: int | None = None,
        timeout: float | timedelta | None = None,
        threads_per_rank: int | None = None,
        start_method: str | None = None,
        servers: int = 0,
        on_failure: str = "raise",
    ) -> None:
        self.backend = backend
        self.nproc_per_node = nproc_per_node
        self.nnodes = 1 if nnodes is None else nnodes
        self.node_rank = 0 if node_rank is None else node_rank
        self.master_addr = master_addr
        self.master_port = master_port
        self.init_method = init_method
        self.timeout = None if timeout is None else limit_in_seconds(timeout)
        self.threads_per_rank = threads_per_rank
        self.start_method = start_method
        self.servers = servers
        self.on_failure = on_failure
        sizes = {"dp": dp, "pp": pp, "tp": tp}
        self.mesh_sizes = {name: size for name, size in sizes.items() if size is not None}
        self._joined = False
        self._check(nnodes, node_rank)

    def _check(self, nnodes: int | None, node_rank: int | None) -> None:
        if self.backend is not None and self.backend not in idist.available_backends():
            raise ValueError(
                f"backend should be one of {idist.available_backends()} or None, but given {self.backend!r}"
            )
        launch_only = {
            "nproc_per_node": self.nproc_per_node,
            "nnodes": nnodes,
            "node_rank": node_rank,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
        }
        if self.backend is None:
            for name, value in launch_only.items():
                if value is not None:
                    raise ValueError(
                        f"{name} needs a backend such as 'gloo', but given {name}={value} and backend=None"
                    )
        if self.init_method is not None and self.init_method.startswith("tcp://"):
            raise ValueError(
                f"init_method should be 'env://' or 'file://...', but given {self.init_method!r}: for tcp, set "
                "master_addr and master_port instead (idist cannot take the address from init_method)"
            )
        for name in ("nproc_per_node", "nnodes", "threads_per_rank"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} should be a positive integer, but given {value!r}")
        if self.mesh_sizes:
            self.mesh_sizes = check_mesh(self._world_size(), **self.mesh_sizes)
        self._check_servers()
        if self.nproc_per_node is None:
            return
        if self.backend not in ("gloo", "nccl"):
            raise ValueError(f"backend should be 'gloo' or 'nccl' to start ranks, but given {self.backend!r}")
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ValueError(
                f"nproc_per_node={self.nproc_per_node} starts ranks, but this process already is rank "
                f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}; leave nproc_per_node out to join that job"
            )
        if self.nnodes > 1 and node_rank is None:
            raise ValueError(f"node_rank should be given with nnodes={self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"node_rank should be between 0 and {self.nnodes - 1}, but given {self.node_rank}"
            )
        if (
            self.nnodes > 1
            and self.init_method is None
            and (self.master_addr is None or self.master_port is None)
        ):
            raise ValueError(
                f"master_addr and master_port should be given with nnodes={self.nnodes}, but given "
                f"master_addr={self.master_addr}, master_port={self.master_port}"
            )
        if self.backend == "nccl" and torch.cuda.device_count() < self.nproc_per_node:
            raise ValueError(
                f"backend='nccl' needs one GPU per rank, but given nproc_per_node={self.nproc_per_node} with "
                f"{torch.cuda.device_count()} GPUs here; use backend='gloo' for ranks on the CPU"
            )
        methods = multiprocessing.get_all_start_methods()
        if self.start_method is not None and (
            self.start_method == "fork" or self.start_method not in methods
        ):
            raise ValueError(
                f"start_method should be one of {[m for m in methods if m != 'fork']}, but given {self.start_method!r}"
            )

    def _check_servers(self) -> None:
        if not isinstance(self.servers, int) or isinstance(self.servers, bool) or self.servers < 0:
            raise ValueError(
                f"servers should be a number of parameter servers, 0 or more, but given {self.servers!r}"
            )
        if self.on_failure not in ("raise", "continue"):
            raise ValueError(f"on_failure should be 'raise' or 'continue', but given {self.on_failure!r}")
        if self.on_failure == "continue" and self.servers == 0:
            raise ValueError(
                "on_failure='continue' needs parameter servers, which know how to do without a worker, "
                "but given servers=0"
            )
        joins = self.nproc_per_node is None and self.backend is not None and _inside_a_job()
        if self.servers and (joins or self.nnodes > 1):
            raise ValueError(
                f"servers={self.servers} are started beside the workers of one machine, but given "
                + (f"nnodes={self.nnodes}" if self.nnodes > 1 else "a job to join; set nproc_per_node")
            )

    def _world_size(self) -> int:
        if self.nproc_per_node is not None:
            return self.nnodes * self.nproc_per_node
        if self.backend is None or not _inside_a_job():
            return 1
        return int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])

    def __enter__(self) -> Parallel:
        # XLA needs no launcher: one process drives every device. See tpu.py.
        if self.nproc_per_node is None and (self.backend == "xla-tpu" or (self.backend and _inside_a_job())):
            if self.backend == "gloo":
                _hide_gpus_if_too_few(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            limit = {} if self.timeout is None else {"timeout": timedelta(seconds=self.timeout)}
            init_method = self.init_method and _for_ignite(self.init_method, _rank_here(), self._world_size())
            idist.initialize(self.backend, init_method=init_method, **limit)
            self._joined = True
            if self.mesh_sizes:
                initialize_mesh(**self.mesh_sizes)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._joined:
            self._joined = False
            idist.finalize()

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Runs ``func(local_rank, *args, **kwargs)`` on every rank and waits for all of them.

        Args:
            func: the function to run; its first argument is the local rank. It may be defined in a cell.
            args: further positional arguments.
            kwargs: keyword arguments.

        Returns:
            list: what each rank of this process returned, in rank order; tensors are on the CPU. Where a job
            was joined, or without ranks, the list holds this process's one result.

        Raises:
            ValueError: if ``func`` or an argument cannot be sent to a rank; nothing has been started then.
            RankError: if a rank raises, dies, or does not finish within ``timeout``.
        """
        if not callable(func):
            raise ValueError(
                f"func should be a function whose first argument is the local rank, but given {func!r}"
            )
        if self.nproc_per_node is None:
            return [func(idist.get_local_rank(), *args, **kwargs)]
        payload = _pack_function(func, args, kwargs)
        with tempfile.TemporaryDirectory(prefix="ignite_ddl_", ignore_cleanup_errors=True) as folder:
            return _Launch(self._job(folder), self._context(), self.on_failure == "continue").run(payload)

    def _job(self, folder: str) -> _Job:
        nproc = self.nproc_per_node
        environ = {
            k: v for k, v in os.environ.items() if not k.startswith("SLURM_")
        }  # idist would join that job
        environ |= {"WORLD_SIZE": str(self.nnodes * nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        if self.master_addr is not None:
            environ["MASTER_ADDR"] = self.master_addr
        if self.master_port is not None:
            environ["MASTER_PORT"] = str(self.master_port)
        if self.nnodes == 1:
            # Loopback: no look-up of the host's name, nothing for a firewall to ask about.
            loopback = "lo0" if sys.platform == "darwin" else "lo"
            if sys.platform != "win32":
                environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
                environ.setdefault("TP_SOCKET_IFNAME", loopback)  # RPC's
        init_method = self.init_method
        if init_method is None:
            by_file = self.nnodes == 1 and self.master_port is None
            init_method = _file_address(folder, "store") if by_file else "env://"
        threads = self.threads_per_rank or max(1, _cores() // (nproc + self.servers))
        return _Job(
            backend=self.backend,
            nproc=nproc,
            world_size=self.nnodes * nproc,
            first_rank=self.node_rank * nproc,
            folder=folder,
            init_method=init_method,
            timeout=self.timeout,
            threads=threads,
            environ=environ,
            cwd=os.getcwd(),
            modules=list(PRELOAD),
            mesh_sizes=self.mesh_sizes,
            start_method=multiprocessing.get_start_method(allow_none=True),
            servers=self.servers,
            rpc_method=_file_address(folder, "rpc"),
            sources=_cell_sources(),
        )

    def _context(self) -> multiprocessing.context.BaseContext:
        method = self.start_method
        if method is None:
            method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
            if method == "spawn":
                _warn_about_spawn()
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            if sys.platform == "darwin":  # else macOS ends forks of a process that has loaded its frameworks
                os.environ.setdefault("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "YES")
            context.set_forkserver_preload(PRELOAD)
        return context


# ------------------------------------------------------------------------------------------- the parent's side


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


class _Launch:
    """One run, seen from the parent: start the ranks, watch them, and leave nothing behind."""

    def __init__(self, job: _Job, context: multiprocessing.context.BaseContext, go_on: bool = False) -> None:
        self.job = job
        self.context = context
        self.go_on = go_on  # without workers that fail, where the parameter servers can
        self.ranks: list[_Rank] = []
        self.servers: list[_Rank] = []
        self.failures: list[_Failure] = []
        self.lost: list[_Failure] = []  # the run goes on without these
        self.said = 0  # of these, once all servers can go on
        names = [job.first_rank + i for i in range(job.nproc)] + [f"server{i}" for i in range(job.servers)]
        self.output = _Output(Path(job.folder), names)

    def run(self, payload: bytes) -> list[Any]:
        try:
            with _no_main_module():
                for local_rank in range(self.job.nproc):
                    rank = self.job.first_rank + local_rank
                    self.ranks.append(self._start(rank, _rank_main, local_rank, payload))
                for index in range(self.job.servers):
                    self.servers.append(self._start(f"server{index}", _server_main, index))
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
            target=main, args=(self.job, *args, rank_reports, rank_release), name=f"ignite_ddl {_label(rank)}"
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
            print(f"{_label(failure.rank)} {failure.summary}; the others go on", file=sys.stderr, flush=True)
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
        if not _SIGNALS:
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
            said = "; ".join(f"{_label(f.rank)} {f.summary.splitlines()[0]}" for f in others)
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


class _Output:
    """Shows what ranks print, each line with its rank: the lowest running rank live, the others after it."""

    def __init__(self, folder: Path, ranks: list[int | str]) -> None:
        self.labels = [_label(rank) for rank in ranks]
        self.files = [{name: folder / f"{rank}.{name}" for name in ("stdout", "stderr")} for rank in ranks]
        for names in self.files:
            for path in names.values():
                path.touch()
        self.offsets = [dict.fromkeys(names, 0) for names in self.files]
        decoder = codecs.getincrementaldecoder("utf-8")
        self.decoders = [{name: decoder(errors="replace") for name in names} for names in self.files]
        self.partial = [dict.fromkeys(names, "") for names in self.files]
        self.held: list[list[tuple[str, str]]] = [[] for _ in self.files]
        self.started = time.monotonic()

    def show(self, finished: list[bool] | None = None, all_of_it: bool = False) -> None:
        finished = finished or [False] * len(self.files)
        live = all_of_it or time.monotonic() > self.started + HOLD_SECONDS
        for index in range(len(self.files)):
            self._read(index, at_end=all_of_it)
        for index, done in enumerate(finished):
            self._write(index)
            if not done and not live:
                return

    def _read(self, index: int, at_end: bool) -> None:
        for name, path in self.files[index].items():
            try:
                with path.open("rb") as file:
                    file.seek(self.offsets[index][name])
                    data = file.read()
            except FileNotFoundError:
                continue
            self.offsets[index][name] += len(data)
            text = self.partial[index][name] + self.decoders[index][name].decode(data, final=at_end)
            # A carriage return ends a line too: progress bars redraw with it.
            *lines, rest = re.split(r"(?<=[\n\r])", text.replace("\r\n", "\n"))
            if at_end and rest:
                lines, rest = [*lines, rest + "\n"], ""
            self.partial[index][name] = rest
            self.held[index] += [(name, line) for line in lines if line.strip("\r")]

    def _write(self, index: int) -> None:
        held, self.held[index] = self.held[index], []
        for name, line in held:
            stream = getattr(sys, name)
            if "tensorpipe_agent.cpp" in line:  # RPC, of a peer's end, also of each ordinary one
                continue
            # A progress bar that clears its line has no words to put a rank before.
            stream.write(f"[{self.labels[index]}] {line}" if line.strip() else line)
        if held:
            sys.stdout.flush()
            sys.stderr.flush()


def _label(rank: int | str) -> str:
    return rank if isinstance(rank, str) else f"rank {rank}"


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
    ours = [i for i, line in enumerate(frames) if line.rstrip().endswith("in _rank_main")]
    frames = frames[: ours[0]] if ours else frames
    return "\n".join(frames) or "  (in its set-up: it was starting, or meeting its peers)"


def _name_cells(text: str) -> str:
    """``File "/tmp/ipykernel_7/42.py", line 3`` becomes ``Cell In[5], line 3``, as IPython says it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})

    def name(match: re.Match) -> str:
        return f"Cell In[{numbers[match[1]]}]" if match[1] in numbers else match[0]

    return re.sub(r'File "([^"]+)"', name, text)


def _cell_sources() -> dict[str, list[str]]:
    """The text of cells, which ranks need to show the lines of a traceback: no file holds it."""
    return {
        name: entry[2]
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and ("ipykernel" in name or name.startswith("<")) and not os.path.exists(name)
    }


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


def _pack_function(func: Callable, args: tuple, kwargs: dict) -> bytes:
    try:
        return cloudpickle.dumps((func, args, kwargs))
    except Exception as error:
        culprit = _find_culprit(func, args, kwargs)
        raise ValueError(
            f"func and its arguments should be picklable to reach the ranks, but {culprit} is not: {error}. "
            "Make it inside the function instead."
        ) from error


def _find_culprit(func: Callable, args: tuple, kwargs: dict) -> str:
    parts = {f"argument {i + 1}": value for i, value in enumerate(args)}
    parts |= {f"argument {name!r}": value for name, value in kwargs.items()}
    code = getattr(func, "__code__", None)
    if code is not None:
        cells = zip(code.co_freevars, func.__closure__ or (), strict=False)
        parts |= {f"the variable {name!r} that it uses": cell.cell_contents for name, cell in cells}
        parts |= {
            f"the global {name!r} that it uses": func.__globals__[name]
            for name in code.co_names
            if name in func.__globals__
        }
    for name, value in parts.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"{name} ({type(value).__name__})"
    return f"{getattr(func, '__name__', func)!r}"


def _inside_a_job() -> bool:
    """Whether torchrun (or mpirun, or a script with the same variables) or Slurm's srun started this process."""
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return torchrun or int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ


def _rank_here() -> int:
    return int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_spawn_warned = False


def _warn_about_spawn() -> None:
    global _spawn_warned
    if not _spawn_warned:
        _spawn_warned = True
        warnings.warn(
            "There is no forkserver on this platform: ranks are spawned, and each launch imports torch anew "
            "(some seconds).",
            stacklevel=4,
        )


# --------------------------------------------------------------------------------------------- the rank's side


def _rank_main(
    job: _Job, local_rank: int, payload: bytes, reports: connection.Connection, release: connection.Connection
) -> None:
    rank = job.first_rank + local_rank
    _redirect_output(job, rank)
    _die_with_parent(job.folder)
    try:
        _set_up(job, {"RANK": str(rank), "LOCAL_RANK": str(local_rank)})
        func, args, kwargs = cloudpickle.loads(payload)
        # Longer than the run may take: the parent, which knows where every rank is, speaks first.
        limit = {} if job.timeout is None else {"timeout": timedelta(seconds=job.timeout + 60)}
        if not job.init_method.startswith("env"):
            limit |= {"rank": rank, "world_size": job.world_size}
        _tell_nproc(job.nproc)
        init_method = _for_ignite(job.init_method, rank, job.world_size)
        idist.initialize(job.backend, init_method=init_method, **limit)
        if job.mesh_sizes:
            initialize_mesh(**job.mesh_sizes)
        if job.servers:
            from ignite_ddl import parameter_server  # it stands on this file: imported where it is needed

            parameter_server.join(rank, job.world_size, job.servers, job.rpc_method)
        result = func(local_rank, *args, **kwargs)
        message = _pack_result(result)
    except BaseException as error:
        message = _pack_error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        reports.send_bytes(message)
    reports.close()
    # Leave the process group only when every rank is through: peers may still be talking to this one.
    with contextlib.suppress(EOFError, OSError):
        release.recv_bytes()
    if job.backend != "gloo":  # gloo's sockets close with the process; destroying the group takes 35 ms more
        with contextlib.suppress(Exception):
            idist.finalize()


def _for_ignite(init_method: str, rank: int, world_size: int) -> str:
    """An address that Ignite cannot take for "env://".

    Ignite tells torch the rank only if "env" is nowhere in the address, and a folder's name may hold these
    letters (one in eight thousand random names does). Then rank and world size stand in the address itself.
    """
    if init_method.startswith("env") or "env" not in init_method or "rank=" in init_method:
        return init_method
    return f"{init_method}{'&' if '?' in init_method else '?'}rank={rank}&world_size={world_size}"


def _file_address(folder: str, name: str) -> str:
    path = Path(folder) / name
    # torch decodes %20 and the like on Windows only.
    return path.as_uri() if sys.platform == "win32" else f"file://{path}"


def _server_main(
    job: _Job, index: int, reports: connection.Connection, release: connection.Connection
) -> None:
    """A parameter server: no rank, it answers the workers until the launcher lets it go."""
    _redirect_output(job, f"server{index}")
    _die_with_parent(job.folder)
    try:
        _set_up(job, {})
        from ignite_ddl import parameter_server

        parameter_server.join(job.world_size + index, job.world_size, job.servers, job.rpc_method)
        reports.send({"can_go_on": True})
        with contextlib.suppress(EOFError):
            while True:
                worker, failed = release.recv()
                can_go_on = parameter_server.worker_ended(worker, failed)
                if failed is not None:
                    reports.send({"can_go_on": can_go_on})
    except BaseException as error:
        with contextlib.suppress(OSError):
            reports.send_bytes(_pack_error(error))
    sys.stdout.flush()
    sys.stderr.flush()


def _set_up(job: _Job, environ: dict[str, str]) -> None:
    # Else the workers of a rank's DataLoader would be started as the rank was, slowly, and not know its classes.
    multiprocessing.set_start_method(job.start_method, force=True)
    os.environ.clear()
    os.environ.update(job.environ | environ)
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    os.chdir(job.cwd)
    torch.set_num_threads(job.threads)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # forks of one server would all draw the same numbers
    linecache.cache.update({name: (len(lines), None, lines, name) for name, lines in job.sources.items()})
    if job.backend == "gloo":
        _hide_gpus_if_too_few(job.nproc)
    for module in job.modules:
        __import__(module)


def _tell_nproc(nproc: int) -> None:
    """idist makes and destroys a process group to count the ranks of this machine (30 ms): it is known here."""
    if hasattr(_NativeDistModel, "_compute_nproc_per_node"):
        _NativeDistModel._compute_nproc_per_node = lambda model: nproc


def _hide_gpus_if_too_few(nproc: int) -> None:
    """idist gives rank r GPU r, for gloo too: with fewer GPUs than ranks, gloo ranks compute on the CPU."""
    if torch.cuda.device_count() < nproc:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if hasattr(torch.cuda.device_count, "cache_clear"):
            torch.cuda.device_count.cache_clear()


def _redirect_output(job: _Job, rank: int | str) -> None:
    """Everything that this process and its children write, C++ included, goes to files that the parent reads."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = os.open(
            os.path.join(job.folder, f"{rank}.{name}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        os.dup2(file, descriptor)
        os.close(file)
        options = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1, "closefd": False}
        stream = open(descriptor, "w", **options)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if _SIGNALS:  # the parent asks by this signal where a rank is that does not finish
        stacks = open(os.path.join(job.folder, f"{rank}.stack"), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)


def _die_with_parent(folder: str) -> None:
    """A killed parent cannot clean up: each rank waits for the end of its parent, and follows."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C in a terminal is the parent's to handle; and a group can be killed as one
    parent = multiprocessing.parent_process()

    def watch() -> None:
        connection.wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="ignite_ddl parent watch", daemon=True).start()


class _ResultPickler(cloudpickle.Pickler):
    """Brings tensors to the CPU: the parent may have no such device, and must not open one on a rank's behalf."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            moved = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, requires_grad=obj.requires_grad)
            return moved.__reduce_ex__(self.proto)
        return super().reducer_override(obj)


def _pack_result(result: Any) -> bytes:
    file = io.BytesIO()
    try:
        pickler = _ResultPickler(file)
        pickler.proto = 5
        pickler.dump({"result": result})
    except Exception as error:
        raise ValueError(
            f"the result ({type(result).__name__}) cannot be sent back: {error}. Return numbers, tensors "
            "(of a DTensor its full_tensor()), or containers of them."
        ) from error
    return file.getvalue()


def _pack_error(error: BaseException) -> bytes:
    frames = (
        error.__traceback__.tb_next if error.__traceback__ is not None else None
    )  # without this file's frame
    shown = traceback.TracebackException(type(error), error, frames)
    message = {
        "when": time.monotonic(),
        "summary": f"raised {''.join(shown.format_exception_only()).strip()}",
        "traceback": "".join(shown.format()),
    }
    try:
        return cloudpickle.dumps(message | {"exception": error.with_traceback(None)})
    except Exception:
        return cloudpickle.dumps(message)
