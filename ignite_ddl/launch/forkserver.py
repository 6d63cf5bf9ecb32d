"""Imported first by the forkserver: where its parent was killed, it removes the folder of sockets in the end."""

import atexit
import os
import shutil
import sys
import time
from multiprocessing import forkserver

_parent = os.getppid()


def _remove_folder_of_sockets() -> None:
    address = forkserver._forkserver._forkserver_address
    deadline = time.monotonic() + 1.0  # an ending parent closes its pipes a moment before it is gone
    while address is not None and os.getppid() == _parent and time.monotonic() < deadline:
        time.sleep(0.01)
    if address is not None and os.getppid() != _parent:
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)


if any("multiprocessing.forkserver import main" in argument for argument in sys.orig_argv):
    os.setpgid(0, 0)  # what ends the group of its parent, a closed terminal say, would end it before it can
    atexit.register(_remove_folder_of_sockets)
