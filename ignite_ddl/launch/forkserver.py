"""Imported first by the forkserver: lets it end quickly, and remove the folders that a killed parent has left."""

import atexit
import glob
import os
import shutil
import sys
import tempfile
import time
from multiprocessing import forkserver

_parent = os.getppid()


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


if any("multiprocessing.forkserver import main" in argument for argument in sys.orig_argv):
    os.setpgid(0, 0)  # a signal to the parent's group (a closed terminal) would end it before the cleanup
    atexit.register(_end)  # registered first, so it runs last
