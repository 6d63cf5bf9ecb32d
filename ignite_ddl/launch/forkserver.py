"""Imported first by the forkserver: lets it end quickly, and remove the folders that a killed parent has left."""

import atexit
import contextlib
import glob
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing import forkserver, util

_parent, _server, _group = os.getppid(), os.getpid(), os.getpgrp()


def _end() -> None:
    address = forkserver._forkserver._forkserver_address
    deadline = time.monotonic() + 1.0  # a parent closes its pipes shortly before it exits
    while address is not None and os.getppid() == _parent and time.monotonic() < deadline:
        time.sleep(0.01)
    if address is not None and os.getppid() != _parent:
        sockets = os.path.dirname(address)
        runs = glob.glob(os.path.join(tempfile.gettempdir(), f"ignite_ddl_{os.path.basename(sockets)}_*"))
        for folder in [sockets, *runs]:
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # Python would take all modules apart first: a second, and seven on a busy machine


def _join_group(_: object) -> None:
    """Of a child that is no rank, as of a DataLoader: who ends the group, as Jupyter that of a kernel, ends it, too."""
    if os.getppid() == _server and not multiprocessing.current_process().name.startswith("ignite_ddl "):
        with contextlib.suppress(OSError):  # nobody is in it any more
            os.setpgid(0, _group)


if any("multiprocessing.forkserver import main" in argument for argument in sys.orig_argv):
    os.setpgid(0, 0)  # a signal to the parent's group (a closed terminal) would end it before the cleanup
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # forgets one that came while it was blocked, see ensure_forkserver
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    util.register_after_fork(_join_group, _join_group)
    atexit.register(_end)  # registered first, so it runs last
