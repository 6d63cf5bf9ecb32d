"""The rank's side of a launch: join the job, run the function, send its result or its exception back."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import cloudpickle
import ignite.distributed as idist
import torch

from ignite_ddl.compat import (
    address_for_ignite,
    hide_gpus_if_too_few,
    recorded_calls,
    repair_torchvision,
    tell_ignite_nproc,
)
from ignite_ddl.launch.job import HAS_SIGNALS, MARK, Job, kill_who_left
from ignite_ddl.launch.report import NEWEST
from ignite_ddl.mesh import initialize_mesh

__all__ = ["rank_main", "run_here", "server_main", "wait_before_result"]
_waits: list[list[Callable[[], None]]] = []  # of each run that goes on in this process, the innermost last


def wait_before_result(function: Callable[[], None]) -> None:
    """Has this rank call a function once, after the user's function has returned and before its result is reported.

    What works in the background is so completed before the run counts as finished, however long that takes. Such
    functions are called in the order in which they came; one may ask for another. If one raises, that is the rank's
    error. If the user's function raises, they are not called: its error is reported at once. It is the same in a
    joined job and on a serial run, where ``Parallel.run`` calls them. Outside of a run nothing is called.

    Args:
        function: takes no argument; its result is not used.
    """
    if _waits:
        _waits[-1].append(function)


def run_here(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls the user's function in this process, and what has been given to :func:`wait_before_result`."""
    waits: list[Callable[[], None]] = []
    _waits.append(waits)
    try:
        result = func(*args, **kwargs)
        while waits:
            waits.pop(0)()
        return result
    finally:
        _waits[:] = [other for other in _waits if other is not waits]


def rank_main(
    job: Job, local_rank: int, payload: bytes, reports: connection.Connection, release: connection.Connection
) -> None:
    rank = job.first_rank + local_rank
    _redirect_output(job, rank)
    released = threading.Event()
    _die_with_parent(job.folder, release, released, os.path.join(job.folder, f"{rank}.calls"))
    try:
        _set_up(job, {"RANK": str(rank), "LOCAL_RANK": str(local_rank)})
        func, args, kwargs = cloudpickle.loads(payload)
        # Longer than the run's timeout: the parent, which can show every rank's stack, should raise first.
        longest = job.group_timeout or (job.timeout and job.timeout + 60)
        limit = {"timeout": timedelta(seconds=longest)} if longest else {}
        if not job.init_method.startswith("env"):
            limit |= {"rank": rank, "world_size": job.world_size}
        tell_ignite_nproc(job.nproc)
        init_method = address_for_ignite(job.init_method, rank, job.world_size)
        idist.initialize(job.backend, init_method=init_method, **limit)
        if job.mesh_sizes:
            initialize_mesh(**job.mesh_sizes)
        if job.servers:
            from ignite_ddl.parameter_server import wire  # here: importing RPC is slow

            wire.join(rank, job.world_size, job.servers, job.rpc_method)
        message = _pack_result(run_here(func, local_rank, *args, **kwargs))
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


def server_main(job: Job, index: int, reports: connection.Connection, release: connection.Connection) -> None:
    """Runs a parameter server, which is not a rank: it answers the workers until the parent closes the pipe."""
    _redirect_output(job, f"server{index}")
    _die_with_parent(job.folder)
    try:
        _set_up(job, {})
        from ignite_ddl.parameter_server import wire

        wire.join(job.world_size + index, job.world_size, job.servers, job.rpc_method)
        reports.send({"can_go_on": True})
        with contextlib.suppress(EOFError):
            while True:
                worker, failed = release.recv()
                why_not = wire.worker_ended(worker, failed)
                if failed is not None:
                    reports.send({"can_go_on": why_not is None, "why_not": why_not})
    except BaseException as error:
        with contextlib.suppress(OSError):
            reports.send_bytes(_pack_error(error))
    _flush()


def _set_up(job: Job, environ: dict[str, str]) -> None:
    # Else a rank's DataLoader would start its workers by forkserver: slowly, and without classes of cells.
    multiprocessing.set_start_method(job.start_method, force=True)
    os.environ.clear()
    os.environ.update(job.environ | environ | {MARK: job.folder})
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    os.chdir(job.cwd)
    torch.set_num_threads(job.threads)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all forks of the forkserver draw the same numbers
    linecache.cache.update({name: (len(lines), None, lines, name) for name, lines in job.sources.items()})
    if job.backend == "gloo":
        hide_gpus_if_too_few(job.nproc)
    repair_torchvision()
    for module in job.modules:
        __import__(module)


def _redirect_output(job: Job, rank: int | str) -> None:
    """Sends the output of this process and its children, also from C++, to files that the parent reads."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = os.open(os.path.join(job.folder, f"{rank}.{name}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
        options = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1, "closefd": False}
        stream = open(descriptor, "w", **options)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if HAS_SIGNALS:  # by this signal the parent asks for the stack of a rank that does not finish
        stacks = open(os.path.join(job.folder, f"{rank}.stack"), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        faulthandler.enable(file=stacks, all_threads=False)  # the stack of a crash


def _flush() -> None:
    """Ignores errors: the function may have closed its streams, or the disk may be full."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _die_with_parent(
    folder: str, release: connection.Connection | None = None, released: threading.Event | None = None, calls: str = ""
) -> None:
    """Ends this process when its parent ends, and cleans up, which a killed parent cannot do.

    Of a rank, the same thread waits for its release. A message before that asks which collectives it has called: the
    main thread, which may stand in one, could not answer.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C of a terminal reaches only the parent, which can kill the whole group
    parent = multiprocessing.parent_process()

    def watch() -> None:
        waits = [parent.sentinel, release] if release else [parent.sentinel]
        while parent.sentinel not in connection.wait(waits):
            try:
                release.recv_bytes()
                Path(f"{calls}.new").write_text(json.dumps(recorded_calls(NEWEST)))
                os.replace(f"{calls}.new", calls)  # complete, or not there
            except (EOFError, OSError):
                released.set()
                waits = [parent.sentinel]
        kill_who_left(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="ignite_ddl parent watch", daemon=True).start()


class _ResultPickler(cloudpickle.Pickler):
    """Moves tensors to the CPU: the parent may not have the rank's device, and should not initialise it."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            moved = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, requires_grad=obj.requires_grad)
            return moved.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return super().reducer_override(obj)


def _pack_result(result: Any) -> bytes:
    file = io.BytesIO()
    try:
        _ResultPickler(file).dump({"result": result})
    except Exception as error:
        raise ValueError(
            f"the result ({type(result).__name__}) cannot be sent back: {error}. Return numbers, tensors "
            "(full_tensor() of a DTensor), or containers of them."
        ) from error
    return file.getvalue()


def _pack_error(error: BaseException) -> bytes:
    frames = error.__traceback__ and error.__traceback__.tb_next  # without this file's frame
    shown = traceback.TracebackException(type(error), error, frames)
    message = {
        "when": time.monotonic(),
        "summary": f"raised {''.join(shown.format_exception_only()).strip()}",
        "traceback": "".join(shown.format()),
    }
    with contextlib.suppress(Exception):  # as bytes: not every pickled exception can be unpickled
        message["exception"] = cloudpickle.dumps(error.with_traceback(None))
    return cloudpickle.dumps(message)
