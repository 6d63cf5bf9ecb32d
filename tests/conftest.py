"""For every test: one thread a process, the right kernel for notebooks, each chapter's seconds at the end.

All tests: ``pytest tests notebooks --nbval -n 2 --dist loadfile``. Without ``loadfile`` xdist would spread
the cells of one chapter over two kernels.
"""

import itertools
import os
import sys
import tempfile
from collections import defaultdict
from importlib.util import find_spec
from multiprocessing import forkserver

import pytest

# Set before torch is imported, and inherited by kernels and ranks: 4 ranks on 2 cores with default threads
# are many times slower than with one thread each.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["IGNITE_DDL_RAISES"] = "1"  # a check that fails by itself raises

CHAPTER_LIMIT = 60  # seconds; DESIGN's bound for a chapter on 2 cores
CELL_TIMEOUT = 120  # seconds; nbval's own 2000 would hide a hang for half an hour


def pytest_configure(config):
    # Chapters run in the environment of the tests, whatever kernel named python3 is installed elsewhere.
    if hasattr(config.option, "nbval_current_env"):
        config.option.nbval_current_env = True
        config.option.nbval_cell_timeout = min(config.option.nbval_cell_timeout, CELL_TIMEOUT)
    if find_spec("hypothesis"):  # tests/extra_tpu.sh lacks it
        from hypothesis import settings

        settings.register_profile("no deadline", deadline=None)  # for a busy machine
        settings.load_profile("no deadline")
    if os.name == "posix" and find_spec("jupyter_client"):
        reach_kernels_by_files()
    # A plugin of its own: pytest calls the hooks of this file for what lies beside it, not for notebooks/.
    config.pluginmanager.register(ChapterSeconds())


def reach_kernels_by_files():
    """Jupyter chooses free ports, which the kernel binds half a second later: a rank of another test may be first."""
    from jupyter_client.manager import KernelManager

    init, numbers = KernelManager.__init__, itertools.count()
    folder = tempfile.TemporaryDirectory(prefix="kernels", dir="/tmp")  # a socket's path has at most 104 bytes

    def by_files(manager, *args, **kwargs):
        init(manager, *args, transport="ipc", ip=f"{folder.name}/{next(numbers)}", **kwargs)

    KernelManager.__init__ = by_files


def pytest_collection_finish(session):
    """Ranks find a test's function in its file, which imports these: once in the server, not in each rank."""
    if launch := sys.modules.get("ignite_ddl.launch.parallel"):
        # Else each rank of each test would import all of this, 0.9 s of processor time here.
        assert forkserver._forkserver._forkserver_pid is None, "a test's file, or what it imports, started the server"
        wanted = ["pytest", "hypothesis", "psutil", "sklearn.metrics", "ignite_ddl.course"]
        launch.PRELOAD.extend(name for name in wanted if find_spec(name.split(".")[0]))  # tests/extra_tpu.sh lacks some


class ChapterSeconds:
    """Sums the seconds of a chapter's cells; under xdist the controller gets the reports and prints."""

    def __init__(self):
        self.seconds = defaultdict(float)

    def pytest_runtest_logreport(self, report):
        path = report.nodeid.split("::")[0]
        if path.endswith(".ipynb"):
            self.seconds[path] += report.duration  # set-up (it starts the kernel), call and teardown

    def pytest_terminal_summary(self, terminalreporter):
        if not self.seconds:
            return
        terminalreporter.section("seconds per chapter")
        for path, total in sorted(self.seconds.items()):
            slow = total > CHAPTER_LIMIT
            note = f"  over the limit of {CHAPTER_LIMIT} s" if slow else ""
            terminalreporter.line(f"{total:7.1f}  {path}{note}", red=slow)


@pytest.fixture
def no_window():
    """For tests of figures: drawn without a screen, and closed afterwards."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    yield
    plt.close("all")
