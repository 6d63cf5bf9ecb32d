"""Run a function on N ranks and get N results back, from a notebook, a script, torchrun or Slurm.

How a launch works: a *forkserver*, started once, has imported torch and ignite and has not computed anything, so
forking it is fast and, unlike forking the kernel, safe. The function is sent by cloudpickle, so it may be defined
in a cell. Each rank writes its output to a file, which the parent reads and shows in rank order, and sends its
result or its exception through a pipe. A rank ends when its parent ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import linecache
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ignite.distributed as idist
import torch

from ignite_ddl.arguments import FUNCTION, PROCESSES, SECONDS, TEXT, WORLD, Fits, a, check, one_of, shown, takes, whole
from ignite_ddl.compat import address_for_ignite, hide_slurm_under_torchrun
from ignite_ddl.launch import pickling
from ignite_ddl.launch.companions import check_companions
from ignite_ddl.launch.job import MARK, Job
from ignite_ddl.launch.meeting import RESOLVE_SECONDS, Meeting, check_address, check_file, file_of
from ignite_ddl.launch.parent import GRACE_SECONDS, Launch, ensure_forkserver, run_folder
from ignite_ddl.launch.rank import run_here
from ignite_ddl.launch.settings import Settings
from ignite_ddl.launch.signals import Signals
from ignite_ddl.launch.torchrun import address_in_torchrun, end_after_gloo, end_with_torchrun
from ignite_ddl.mesh import AXIS, check_experts, check_mesh, initialize_mesh

P = ParamSpec("P")
T = TypeVar("T")
# Imported once by the forkserver instead of by each rank. Modules may be appended; if the forkserver is already
# running, the ranks import them.
PRELOAD = [
    "ignite_ddl.launch.forkserver",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "ignite.distributed",
    "ignite.engine",
    "ignite.metrics",
    "ignite.handlers",
    "ignite_ddl",
    "ignite_ddl.diagnose",  # a rank that hangs should not have to read files to say where
    "ignite_ddl.pipeline.stage",
]


class Parallel:
    """Runs a function on several ranks: ``idist.Parallel`` with results, errors and notebooks.

    The same code runs in three ways:

    - with ``nproc_per_node``: starts that many processes on this machine and joins them in a process group.
    - without it, under torchrun or Slurm: joins their job as one rank.
    - without it, otherwise: runs the function in this process.

    In a notebook, functions, lambdas and closures of cells can be run. Output is shown with its rank: that of the
    lowest running rank live, the others after it, in rank order (after 30 seconds all are live). When a rank fails,
    the other ranks are stopped at once and a :class:`RankError` is raised. No rank outlives this process, and Ctrl-C
    (or the notebook's stop button) ends them.

    Ranks that are started compute as this process would: the default dtype, the precision of float32 products, the
    deterministic algorithms, cuDNN's flags, anomaly mode and grad mode reach them, and the state of torch's generator
    if it was seeded. If not, each launch draws a new seed for all its ranks. Not passed on, to be set in the function:
    the default device, autocast and other contexts, switches of attention kernels, filters of warnings, logging, what
    was set in imported modules and their classes (values of a config, patched functions), and Python's and NumPy's
    random numbers, which differ from rank to rank (among tp, pp and cp peers until ``ddl.auto_model``).

    A rank gets a copy of the function, its arguments, and the globals that its code names, as they are when ``run`` is
    called: not those named in strings only (``eval("Net")``, ``globals()["Net"]``, ``df.query("a > @limit")``), and
    not what a notebook adds, such as magics and ``display`` (import it). Modules are imported from their files as these
    are now: after an edit, call ``importlib.reload`` in a notebook, or it goes on with the old one. What ranks change
    stays there, in shared or mapped memory and in attributes of classes, too: return it. Tensors that share memory
    share it there; NumPy arrays do not, with each other or with tensors. Pickle does not find classes of cells in
    ranks: save state dicts, or define the classes in a file.

    A signal that ranks ask for (:meth:`ddl.Checkpoint.save_on_signal`) is passed on to them when this process gets it,
    if ``run`` was called in its main thread. It then waits for them, at most ten minutes and ``timeout``, and ends as
    by that signal, or calls the handler that it had before. A second signal ends the ranks at once.

    Ranks of this machine are asked now and then whether they can go on, at most a minute apart. Where some wait in
    collectives for each other, or for a rank that has returned, all are stopped, and the error shows where each was
    (gloo; with NCCL a rank does not wait in the call).

    Args:
        backend: "gloo" (ranks on the CPU) or "nccl" (one GPU per rank), or another backend of
            ``idist.available_backends()`` where a job is joined. None runs serially.
        nproc_per_node: number of ranks to start on this machine.
        nnodes: number of machines, default 1. Each runs this same code.
        node_rank: this machine's index; needed if ``nnodes`` > 1.
        master_addr: address of machine 0; needed if ``nnodes`` > 1.
        master_port: a free port of machine 0; needed if ``nnodes`` > 1. On one machine the ranks meet through a
            file instead, which cannot collide with another job.
        init_method: how ranks meet, as in ``torch.distributed.init_process_group``; "env://" or "file://...": a new
            file in a folder that all machines see. After a run on one machine it is removed.
        dp: size of the mesh's data-parallel axis; -1: the ranks that pp and tp leave. See :mod:`ignite_ddl.mesh`.
        pp: number of pipeline ranks.
        tp: number of ranks that share each layer. Without dp, pp and tp, the job is data parallel.
        dp_replicate: HSDP: number of replicas of the model. Their ranks' gradients are averaged, so it suits slower
            links, as between machines. -1 or left out with ``dp_shard``: what is left; dp is dp_replicate × dp_shard.
        dp_shard: HSDP: number of dp ranks, which are neighbours, over which ``ddl.auto_model`` shards the weights of a
            replica. -1 or left out with ``dp_replicate``: what is left.
        cp: number of ranks that share each sequence of a batch, see :func:`ring_attention`.
        ep: number of ranks, neighbours on dp × cp, that share the experts of a layer: a divisor of dp × cp, see
            :class:`Experts`. It adds no ranks.
        timeout: seconds (or a ``timedelta``) that a run may take once its processes have started. After that, every
            rank is stopped and the error shows the stack of each, and in its ``report`` which rank was in which
            collective (:class:`HangReport`). In a joined job, this process prints its stack, one rank the report,
            and exits; see also :func:`report_hangs`. Default None: no limit.
        group_timeout: seconds (or a ``timedelta``) that one collective may take: the ``timeout`` of
            ``torch.distributed.init_process_group``. Default None: torch's default (30 minutes; NCCL 10), or, for
            ranks started with ``timeout``, one minute more than ``timeout``.
        threads_per_rank: CPU threads per rank. Default ``max(1, cores // (nproc_per_node + servers))``.
        start_method: "forkserver" (default) or "spawn" (slower; the default on Windows, which has no forkserver).
            "fork" is refused: a fork of a process that has computed may hang.
        servers: parameter-server processes to start beside the ranks, default 0. They are not ranks: idist's world
            is the workers only. See :class:`ignite_ddl.ParameterServer`. On a serial run the server is in-process.
        on_failure: "raise" (default), or "continue" with ``servers``: if a worker fails and the mode of the
            parameter server allows it, the other workers continue, a message is printed, and the failed worker's
            entry in the list of results is its :class:`RankError`. Do not call a collective after that: it needs
            every rank, so it fails, and so does the worker that called it. If no worker is left, the error names
            the one that failed first.

    Raises:
        ValueError: if an argument is invalid; no process is started then.

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

    @takes(
        nnodes=WORLD, node_rank=whole(0), init_method=TEXT, dp=AXIS, pp=AXIS, tp=AXIS, dp_replicate=AXIS,
        dp_shard=AXIS, cp=AXIS, ep=WORLD,
        master_addr=a("an address", lambda value: isinstance(value, str) and value.strip() and "\0" not in value),
        master_port=Fits("a port", lambda value: whole(1, 65535).read(int(value) if isinstance(value, str) else value)),
        timeout=SECONDS, group_timeout=SECONDS, servers=whole(0, PROCESSES), on_failure=one_of("raise", "continue"),
        **dict.fromkeys(("backend", "start_method"), TEXT),
        **dict.fromkeys(("nproc_per_node", "threads_per_rank"), whole(most=PROCESSES)),
    )  # fmt: skip
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
        dp_replicate: int | None = None,
        dp_shard: int | None = None,
        cp: int | None = None,
        ep: int | None = None,
        timeout: float | timedelta | None = None,
        group_timeout: float | timedelta | None = None,
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
        self.timeout, self.group_timeout = timeout, group_timeout
        self.threads_per_rank = threads_per_rank
        self.start_method = start_method
        self.servers = servers
        self.on_failure = on_failure
        sizes = {"dp": dp, "pp": pp, "tp": tp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp}
        self.mesh_sizes = {name: size for name, size in sizes.items() if size is not None}
        self.ep = ep
        self._joined = False
        self._check(nnodes, node_rank)

    def _check(self, nnodes: int | None, node_rank: int | None) -> None:
        """Raises a ValueError for invalid arguments before any process is started."""
        self._check_backend(nnodes, node_rank)
        self._check_environment()
        if self.mesh_sizes or self.ep:
            self.mesh_sizes = check_mesh(self._world_size(), **self.mesh_sizes)
        if self.ep is not None and check_experts(self.mesh_sizes, self.ep) > 1:
            self.mesh_sizes["ep"] = self.ep
        joins = self.nproc_per_node is None and self.backend is not None and _inside_a_job()
        check_companions(self.servers, self.on_failure, joins, self.nnodes)
        if self.nproc_per_node is not None:
            self._check_start()
            self._check_nodes(node_rank)

    def _check_backend(self, nnodes: int | None, node_rank: int | None) -> None:
        if self.backend is None:
            given = {name: getattr(self, name) for name in ("nproc_per_node", "master_addr", "master_port")}
            for name, value in (given | {"nnodes": nnodes, "node_rank": node_rank}).items():
                if value is not None:
                    raise ValueError(
                        f"{name} needs a backend such as 'gloo', but given {name}={value} and backend=None"
                    )
        elif self.backend not in idist.available_backends():
            raise ValueError(
                f"backend should be one of {idist.available_backends()} or None, but given {shown(self.backend)}"
            )
        if self.init_method is not None and (self.init_method.startswith("tcp://") or "://" not in self.init_method):
            raise ValueError(
                f"init_method should be 'env://' or 'file://...', but given {shown(self.init_method)}: for tcp, set "
                "master_addr and master_port instead (idist cannot take the address from init_method)"
            )

    def _check_environment(self) -> None:
        """Checks the environment variables of a job, which may be left over from another one."""
        starts = self.nproc_per_node is not None
        if MARK in os.environ and self.backend is not None and (starts or torch.distributed.is_initialized()):
            raise ValueError(
                f"a rank can neither start ranks nor join its job again, but this process is rank "
                f"{os.environ.get('RANK')} of a run of ddl.Parallel: use ddl.Parallel in the process that started "
                "that run, outside of the function that its ranks run"
            )
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
            if self.backend is not None and not (value := os.environ.get(name, "0")).isdigit():
                raise ValueError(
                    f"the environment variable {name} should be an integer, but given {value!r}: correct it, or "
                    "unset it if there is no job to join"
                )
        slurm = self.backend is not None and not starts and "RANK" not in os.environ and _inside_a_job()
        if slurm and "SLURM_STEP_ID" not in os.environ:
            raise ValueError(
                f"this is the batch script of a Slurm job for {os.environ['SLURM_NTASKS']} ranks, and only srun starts "
                "them: write `srun python ...` there, or give nproc_per_node to start ranks on this machine alone"
            )

    def _check_start(self) -> None:
        """Checks that ranks can be started on this machine."""
        if self.backend not in ("gloo", "nccl"):
            raise ValueError(f"backend should be 'gloo' or 'nccl' to start ranks, but given {self.backend!r}")
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ValueError(
                f"nproc_per_node={self.nproc_per_node} starts ranks, but this process already is rank "
                f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}; leave nproc_per_node out to join that job, or, "
                "if the environment variables RANK and WORLD_SIZE are left over from another one, unset them"
            )
        if self.backend == "nccl" and torch.cuda.device_count() < self.nproc_per_node:
            raise ValueError(
                f"backend='nccl' needs one GPU per rank, but given nproc_per_node={self.nproc_per_node} with "
                f"{torch.cuda.device_count()} GPUs here; use backend='gloo' for ranks on the CPU"
            )
        methods = [method for method in multiprocessing.get_all_start_methods() if method != "fork"]
        if self.start_method is not None and self.start_method not in methods:
            raise ValueError(f"start_method should be one of {methods}, but given {shown(self.start_method)}")

    def _check_nodes(self, node_rank: int | None) -> None:
        if self.nnodes > 1 and node_rank is None:
            raise ValueError(f"node_rank should be given with nnodes={self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node_rank should be between 0 and {self.nnodes - 1}, but given {self.node_rank}")
        no_address = self.master_addr is None or self.master_port is None
        if self.nnodes > 1 and self.init_method is None and no_address:
            raise ValueError(
                f"master_addr and master_port should be given with nnodes={self.nnodes}, but given "
                f"master_addr={self.master_addr}, master_port={self.master_port}"
            )

    def _check_meeting(self) -> None:
        """Checks that ranks can meet, which would otherwise wait for it."""
        if self.init_method is not None and not self.init_method.startswith("env"):
            check_file(self.init_method, self.nnodes == 1)
        elif self.nnodes > 1 or self.master_port is not None:
            given = (self.master_addr, "MASTER_ADDR"), (self.master_port, "MASTER_PORT")
            host, port = (os.environ.get(name) if value is None else value for value, name in given)
            if host is None or port is None:
                raise ValueError(
                    "ranks need master_addr and master_port, or the environment variables MASTER_ADDR and MASTER_PORT, "
                    f"to meet, but given master_addr={host}, master_port={port}"
                )
            check_address(host, int(port), self.node_rank == 0, 0 if self.nnodes == 1 else RESOLVE_SECONDS)

    def _world_size(self) -> int:
        if self.nproc_per_node is not None:
            return self.nnodes * self.nproc_per_node
        if self.backend is None or not _inside_a_job():
            return 1
        return int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])

    def __enter__(self) -> Parallel:
        # XLA needs no launcher: one process drives every device.
        if self.nproc_per_node is None and (self.backend == "xla-tpu" or (self.backend and _inside_a_job())):
            if self.backend == "gloo":
                os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo neither sends nor receives what a GPU holds
            limit = {} if self.group_timeout is None else {"timeout": timedelta(seconds=self.group_timeout)}
            end_with_torchrun()
            end_after_gloo()
            with hide_slurm_under_torchrun():
                idist.initialize(self.backend, init_method=self._address(), **limit)
            self._joined = True
            if self.mesh_sizes:
                initialize_mesh(**self.mesh_sizes)
        return self

    def _address(self) -> str | None:
        """Where the ranks of the job to join meet; None: where idist finds it."""
        address, tpu = self.init_method, self.backend == "xla-tpu"
        if not tpu and (address is None or address.startswith("env")):
            address = address_in_torchrun() or address
        if address is not None and file_of(address):
            check_file(address, alone=False)
        if "RANK" in os.environ and not tpu and (address or "env").startswith(("env", "file")):
            return Meeting(address or "env://").address
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
        return address and address_for_ignite(address, int(rank), self._world_size())

    def __exit__(self, *exc_info: Any) -> None:
        if self._joined:
            self._joined = False
            with hide_slurm_under_torchrun():
                idist.finalize()

    def run(self, func: Callable[Concatenate[int, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Runs ``func(local_rank, *args, **kwargs)`` on every rank and waits for all of them.

        Args:
            func: the function to run; its first argument is the local rank. It may be defined in a cell.
            args: further positional arguments.
            kwargs: keyword arguments.

        Returns:
            list: one result for each rank started here, in rank order; tensors are on the CPU. In a joined job and
            on a serial run, the list holds the result of this process. What ranks still do after the last result has
            come (threads) is ended after 5 seconds; asynchronous checkpoints come first. Functions of ``atexit`` do not
            run in ranks that were started: close trackers and loggers in ``func``.

        Raises:
            ValueError: if ``func`` or an argument cannot be sent to a rank, or ranks cannot meet where they are told
                to (no such folder, a file that is in use, an unknown address, a port that is taken); no process is
                started then.
            RankError: if a rank raises, dies, or does not finish within ``timeout``, or if ranks wait without end.
        """
        check("func", func, Fits("a function whose first argument is the local rank", FUNCTION.read))
        if self.nproc_per_node is None:
            with self._limited(), _explain_lost_peer():
                return [run_here(func, (idist.get_local_rank(), *args), kwargs)]
        payload = _pack_function(func, args, kwargs)
        _check_folder()
        _check_files(self.nproc_per_node, self.servers)
        self._check_meeting()
        with Signals() as signals, run_folder() as folder:
            go_on = self.on_failure == "continue"
            try:
                return Launch(self._job(folder), self._context(), signals, go_on).run(payload)
            finally:
                if self.nnodes == 1 and self.init_method and (file := file_of(self.init_method)):
                    file.unlink(missing_ok=True)  # its ranks have ended, and the next ones need a new one

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """In a joined job no parent enforces the timeout: this process prints its stack and exits by itself."""
        if self.timeout is None or not self._joined:
            yield
            return
        thread = threading.get_ident()

        from ignite_ddl.diagnose.hangs import Watch

        watch = torch.distributed.is_initialized() and Watch(self.timeout, thread, "ignite_ddl/timeout")

        def end() -> None:
            faulthandler.cancel_dump_traceback_later()
            stack = "".join(traceback.format_stack(sys._current_frames()[thread]))
            who = f"rank {idist.get_rank()} did not finish within {self.timeout:g} s"
            sys.stderr.write(f"{who}; it was here (most recent call last):\n{stack}")
            sys.stderr.flush()
            with contextlib.suppress(RuntimeError):  # the store has gone with the rank that holds it
                if watch:
                    watch.report(f"the job did not finish within {self.timeout:g} s")
            time.sleep(8 * GRACE_SECONDS)  # torchrun ends the others after the first: let them print too
            os._exit(1)

        timer = threading.Timer(self.timeout, end)
        timer.daemon = True
        timer.start()
        # In case the timer's thread cannot run, because some C++ code holds the GIL.
        faulthandler.dump_traceback_later(self.timeout + 10 * GRACE_SECONDS, exit=True)
        try:
            yield
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _job(self, folder: str) -> Job:
        nproc = self.nproc_per_node
        # Without Slurm's variables, by which idist would join its job.
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        environ |= {"WORLD_SIZE": str(self.nnodes * nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        if self.master_addr is not None:
            environ["MASTER_ADDR"] = self.master_addr
        if self.master_port is not None:
            environ["MASTER_PORT"] = str(self.master_port)
        if self.nnodes == 1 and sys.platform != "win32":
            # Loopback: no look-up of the host name, no question of a firewall.
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        init_method = self.init_method
        if init_method is None:
            by_file = self.nnodes == 1 and self.master_port is None
            init_method = _file_address(folder, "store") if by_file else "env://"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        chosen, default = multiprocessing.get_start_method(allow_none=True), multiprocessing.get_all_start_methods()[0]
        return Job(
            backend=self.backend,
            nproc=nproc,
            world_size=self.nnodes * nproc,
            first_rank=self.node_rank * nproc,
            folder=folder,
            init_method=init_method,
            timeout=self.timeout,
            group_timeout=self.group_timeout,
            threads=self.threads_per_rank or max(1, cores // (nproc + self.servers)),
            environ=environ,
            cwd=os.getcwd(),
            path=_import_path(),
            modules=list(PRELOAD),
            mesh_sizes=self.mesh_sizes,
            start_method=None if chosen == default else chosen,  # whoever asks for the method fixes the default one
            settings=Settings(),
            companions=self.servers,
            sources=_cell_sources(),
        )

    def _context(self) -> multiprocessing.context.BaseContext:
        if multiprocessing.current_process().daemon:
            raise ValueError(
                "ranks cannot be started in a daemonic process, such as a worker of multiprocessing.Pool or of a "
                "DataLoader: use concurrent.futures.ProcessPoolExecutor, or leave nproc_per_node out for one process"
            )
        method = self.start_method
        if method is None:
            method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
            if method == "spawn":
                _warn_about_spawn()
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            if sys.platform == "darwin":  # else macOS kills forks of a process that has loaded its frameworks
                os.environ.setdefault("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "YES")
            _forget_parents_server()
            context.set_forkserver_preload(PRELOAD)
            ensure_forkserver()
        return context


def _forget_parents_server() -> None:
    """Lets a forked child start a forkserver of its own, in place of that of its parent, for which it cannot wait."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None and hasattr(os, "waitid"):  # not on macOS before Python 3.13
        try:
            os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            server.__init__()


def start_forkserver() -> None:
    """Starts the process from which ranks are forked, as the first run would: its imports go on beside this process."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        Parallel()._context()


# The last one is what gloo says where another of the rank's operations has timed out, perhaps one in the background.
_LOST_PEER = re.compile(r"gloo.*(Timed out|(closed|reset) by peer)|Application timeout caused pair closure")


@contextlib.contextmanager
def _explain_lost_peer() -> Iterator[None]:
    """Adds to gloo's error of a silent or lost peer, which names neither, what it means."""
    try:
        yield
    except RuntimeError as error:
        if _LOST_PEER.search(str(error)):
            error.add_note(
                f"rank {idist.get_rank()} on {socket.gethostname()} waited for another rank, which has ended, is cut "
                "off from this machine, or never made this call; group_timeout of ddl.Parallel is how long a rank waits"
            )
        raise


def _check_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ValueError(
            "ranks start in the working folder of this process, but it has been deleted: change to one that exists, "
            "by os.chdir(...)"
        ) from None


def _check_files(nproc: int, companions: int) -> None:
    """Checks the limit of open files: pipes to each rank here, and in a rank a socket to each other rank.

    While they start, also both ends of each connection between a rank and a companion.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 16
    count = nproc + companions
    needed = max(open_now + 4 * count + 2 * nproc * companions + 16, count + 40)
    if limit < needed:
        raise ValueError(
            f"{count} ranks and servers need about {needed} open files a process, but at most {limit} are allowed: "
            f"run `ulimit -n {max(1024, 2 * needed)}` in the shell before Python starts"
        )


def _import_path() -> list[str]:
    """That of this process; then where its relative entries, as a notebook's "", led to before the folder changed."""
    before = multiprocessing.process.ORIGINAL_DIR or ""
    return [*sys.path, *(os.path.join(before, entry) for entry in sys.path if not os.path.isabs(entry))]


def _cell_sources() -> dict[str, list[str]]:
    """The source of notebook cells, which is in no file: ranks need it to show the lines of a traceback."""
    return {
        name: entry[2]
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and ("ipykernel" in name or name.startswith("<")) and not os.path.exists(name)
    }


def _pack_function(func: Callable, args: tuple, kwargs: dict) -> bytes:
    try:
        return pickling.dumps((func, args, kwargs))
    except Exception as error:
        unpicklable = _find_unpicklable(func, args, kwargs)
        notebook = isinstance(error, pickling.NeedsNotebook)
        cure = "" if notebook else ". Create it inside the function instead."
        raise ValueError(
            f"func and its arguments should be picklable to reach the ranks, but {unpicklable} is not: {error}{cure}"
        ) from (None if notebook else error)


def _find_unpicklable(func: Callable, args: tuple, kwargs: dict) -> str:
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
            pickling.dumps(value)
        except Exception:
            return f"{name} ({type(value).__name__})"
    return f"{getattr(func, '__name__', func)!r}"


def _inside_a_job() -> bool:
    """Whether torchrun (or mpirun, or a script with the same variables) or Slurm's srun started this process."""
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return torchrun or int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ


@functools.cache  # once
def _warn_about_spawn() -> None:
    message = "There is no forkserver on this platform: ranks are spawned, and each launch imports torch again."
    warnings.warn(message, stacklevel=4)


def _file_address(folder: str, name: str) -> str:
    path = Path(folder) / name
    # torch decodes %20 and the like on Windows only.
    return path.as_uri() if sys.platform == "win32" else f"file://{path}"
