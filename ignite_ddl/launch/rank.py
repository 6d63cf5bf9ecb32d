"""The rank's side of a launch: join the job, run the function, send its result or its exception back."""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import io
import json
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from cloudpickle import cloudpickle
from torch.utils.hooks import RemovableHandle

from ignite_ddl.collectives import reduced
from ignite_ddl.compat import address_for_ignite, set_nproc_per_node
from ignite_ddl.launch.companions import kind
from ignite_ddl.launch.job import ALL_CALLS, MARK, STACK_SIGNAL, Job, kill_orphans
from ignite_ddl.launch.meeting import Meeting
from ignite_ddl.launch.signals import Signals
from ignite_ddl.mesh import initialize_mesh


class _Run:
    """The signals and last calls that the function of a run in this process has asked for."""

    def __init__(self, send_to_parent: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.send_to_parent = send_to_parent
        self.waits: list[Callable[[], None]] = []
        self.signals = Signals()


_outside = _Run()
_runs = [_outside]  # the innermost last


def wait_before_result(function: Callable[[], None]) -> None:
    """Has this rank call a function once, after the user's function has returned and before its result is reported.

    What works in the background is so completed before the run counts as finished, however long that takes. Such
    functions are called in the order in which they came; one may ask for another. If one raises, that is the rank's
    error. If the user's function raises, they are not called: its error is reported at once. It is the same in a
    joined job and on a serial run, where ``Parallel.run`` calls them. Outside of a run nothing is called.

    Args:
        function: takes no argument; its result is not used.
    """
    if _runs[-1] is not _outside:
        _runs[-1].waits.append(function)


def on_signal(signum: int, function: Callable[[], None]) -> None:
    """Calls a function in this process when it gets a signal, or when the process that started it does.

    The previous handler is restored when the run of ``ddl.Parallel`` ends, or, outside of one, by
    :func:`restore_signals`. The process that started this rank passes the signal on while the run lasts, waits for
    its ranks, and then ends as by the signal (see :class:`ignite_ddl.Parallel`).

    Args:
        signum: the signal. Call this in the main thread, as ``signal.signal``.
        function: takes no argument; it should only make a note, since it may interrupt anything.
    """
    run = _runs[-1]
    run.signals.handle(signum, function)
    if run.send_to_parent is not None:
        run.send_to_parent({"signal": int(signum)})


def restore_signals() -> None:
    """Outside of a run, restores the handlers that :func:`on_signal` has replaced. A run does so at its end."""
    if _runs[-1] is _outside:
        _outside.signals.restore()


def run_here(
    func: Callable, args: tuple, kwargs: dict, send_to_parent: Callable[[dict[str, Any]], None] | None = None
) -> Any:
    """Calls the user's function in this process, and what has been given to :func:`wait_before_result`."""
    run = _Run(send_to_parent)
    _runs.append(run)
    try:
        try:
            result = func(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__.tb_next is None:  # the call itself
                error.add_note("run calls func(local_rank, ...): its first argument is the local rank")
            raise
        while run.waits:
            run.waits.pop(0)()
        return result
    finally:
        _runs.remove(run)
        if send_to_parent is None:  # else the process ends soon, and a late signal should not come before its result
            run.signals.restore()


def rank_main(
    job: Job,
    local_rank: int,
    payload: bytes,
    companions: list[socket.socket],
    reports: connection.Connection,
    release: connection.Connection,
) -> None:
    rank = job.first_rank + local_rank
    _redirect_output(job, rank)
    released = threading.Event()
    _end_with_parent(job.folder, release, released, os.path.join(job.folder, f"{rank}.calls"))
    try:
        _set_up(job, {"RANK": str(rank), "LOCAL_RANK": str(local_rank)})
        try:
            func, args, kwargs = cloudpickle.loads(payload)
        except ModuleNotFoundError as error:
            error.add_note(f"ranks look in this process's sys.path, from {job.cwd}: add the module's folder to it")
            raise
        _classes_of_parent.update(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)
        # Longer than the run's timeout: the parent, which can show every rank's stack, should raise first.
        longest = job.group_timeout or (job.timeout and job.timeout + 60)
        limit = {"timeout": timedelta(seconds=longest)} if longest else {}
        if not job.init_method.startswith("env") or job.world_size > job.nproc:
            limit |= {"rank": rank, "world_size": job.world_size}
        set_nproc_per_node(job.nproc)
        init_method = address_for_ignite(job.init_method, rank, job.world_size)
        meeting = None
        if job.world_size > job.nproc:
            note = Path(job.folder, f"{rank}.waits") if local_rank == 0 else None
            meeting = Meeting(job.init_method, job.nproc, note, prints=local_rank == 0, seed=job.settings.seed)
            init_method = meeting.address
        idist.initialize(job.backend, init_method=init_method, **limit)
        if job.mesh_sizes:
            initialize_mesh(**job.mesh_sizes)
        if companions:
            kind().connect(companions)
        job.settings.apply(meeting and meeting.seed)
        result = run_here(func, (local_rank, *args), kwargs, lambda ask: reports.send_bytes(cloudpickle.dumps(ask)))
        message = _pack_result(result)
    except BaseException as error:
        message = _pack_error(error)
    _flush()
    with contextlib.suppress(OSError):
        reports.send_bytes(message)
    reports.close()
    # Leave the process group only when every rank has returned: peers may still need this one.
    released.wait()
    if job.backend != "gloo":  # gloo's sockets close with the process; destroying its group would take 35 ms
        with contextlib.suppress(Exception):
            idist.finalize()


def companion_main(
    job: Job, name: str, ranks: list[socket.socket], reports: connection.Connection, release: connection.Connection
) -> None:
    """Runs a companion, which answers the ranks until the parent closes the pipe."""
    _redirect_output(job, name)
    _end_with_parent(job.folder)
    try:
        _set_up(job, {})
        kind().serve(ranks)
        reports.send({"can_go_on": True})
        with contextlib.suppress(EOFError):
            while True:
                rank, failed = release.recv()
                why_not = kind().worker_ended(rank, failed)
                if failed is not None:
                    reports.send({"can_go_on": why_not is None, "why_not": why_not})
    except BaseException as error:
        with contextlib.suppress(OSError):
            reports.send_bytes(_pack_error(error))
    _flush()


def _set_up(job: Job, environ: dict[str, str]) -> None:
    # By forkserver, the default of Python 3.14 too, workers of a DataLoader start slowly and without classes of cells.
    default = "fork" if sys.platform == "linux" else None
    multiprocessing.set_start_method(job.start_method or default, force=True)
    os.environ.clear()
    os.environ.update(job.environ | environ | {MARK: job.folder})
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    os.chdir(job.cwd)
    sys.path[:] = job.path  # multiprocessing gives ranks the folder in which it was imported for ""
    torch.set_num_threads(job.threads)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all forks of the forkserver draw the same numbers
    linecache.cache.update({name: (len(lines), None, lines, name) for name, lines in job.sources.items()})
    if job.backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # idist would give rank r GPU r
    for module in job.modules:
        __import__(module)


def _redirect_output(job: Job, rank: int | str) -> None:
    """Sends the output of this process and its children, also from C++, to files that the parent reads."""
    if not os.path.isdir(job.folder):  # the run was stopped while the forkserver was still importing
        raise SystemExit
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = os.open(os.path.join(job.folder, f"{rank}.{name}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
        options = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1, "closefd": False}
        stream = open(descriptor, "w", **options)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if STACK_SIGNAL is not None:
        stacks = open(os.path.join(job.folder, f"{rank}.stack"), "w")  # noqa: SIM115
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
        faulthandler.enable(file=stacks, all_threads=False)  # the stack of a crash


def _flush() -> None:
    """Ignores errors: the function may have closed its streams, or the disk may be full."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _end_with_parent(
    folder: str, release: connection.Connection | None = None, released: threading.Event | None = None, calls: str = ""
) -> None:
    """Ends this process when its parent ends, and cleans up, which a killed parent cannot do.

    Of a rank, the same thread waits for its release. A message before that asks which collectives it has called: the
    main thread, which may hang in one, could not answer.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C of a terminal reaches only the parent, which can kill the whole group
    parent = multiprocessing.parent_process()

    def watch() -> None:
        waits = [parent.sentinel, release] if release else [parent.sentinel]
        while parent.sentinel not in connection.wait(waits):
            try:
                question = release.recv_bytes()
                from ignite_ddl.diagnose.hangs import answer

                answered = answer(threading.main_thread().ident, with_calls=question == ALL_CALLS)
                Path(f"{calls}.new").write_text(json.dumps(answered))
                os.replace(f"{calls}.new", calls)  # complete, or not there
            except (EOFError, OSError):
                released.set()
                waits = [parent.sentinel]
        kill_orphans(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="ignite_ddl parent watch", daemon=True).start()


_classes_of_parent: dict[type, str] = {}  # of its script or cells, by the names that cloudpickle gave them there


def _class_of_parent(known: str) -> type:
    return cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[known]


class _ResultPickler(cloudpickle.Pickler):
    """Moves tensors to the CPU: the parent may not have the rank's device, and should not initialise it.

    Sends the parent's classes by name: by value, cloudpickle would set their methods anew there, which would then see
    a copy of the script's globals.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and (known := _classes_of_parent.get(obj)):
            return _class_of_parent, (known,)
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            moved = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, requires_grad=obj.requires_grad)
            return reduced(moved) or moved.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return reduced(obj) or super().reducer_override(obj)


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    _ResultPickler(file).dump(value)
    return file.getvalue()


def _pack_result(result: Any) -> bytes:
    try:
        return _packed({"result": result, "next_hook": RemovableHandle.next_id})
    except BaseException as error:
        cure = "Return numbers, tensors (full_tensor() of a DTensor), or containers of them."
        if inspect.iscoroutine(result):
            cure = "Ranks run plain functions: call asyncio.run(...) in one."
        where = f"the result ({type(result).__name__}{_part_of(result)})"
        raise ValueError(f"{where} cannot be sent back: {error}. {cure}") from error


def _part_of(result: Any) -> str:
    """Which part of a container cannot be sent back."""
    parts = (
        result.items() if isinstance(result, dict) else enumerate(result) if isinstance(result, list | tuple) else ()
    )
    for key, value in parts:
        try:
            _packed(value)
        except BaseException:
            return f", whose part {key!r} is a {type(value).__name__}"
    return ""


def _pack_error(error: BaseException) -> bytes:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    shown = traceback.TracebackException(type(error), error, frames)
    message = {
        "when": time.monotonic(),
        "summary": f"raised {''.join(shown.format_exception_only()).strip()}",
        "traceback": "".join(shown.format()),
    }
    with contextlib.suppress(BaseException):  # as bytes: not every pickled exception can be unpickled
        message["exception"] = _packed(error.with_traceback(None))
    return cloudpickle.dumps(message)
