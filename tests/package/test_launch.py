"""ddl.Parallel: results, output, errors, and every fault of the design's list; no process may be left."""

import importlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import ignite.distributed as idist
import psutil
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from ranks import TIMEOUT, comes_true, failing, gone, parallel, time_to_start
from torch.utils.hooks import RemovableHandle

import ignite_ddl as ddl
from ignite_ddl.launch import torchrun
from ignite_ddl.launch.parallel import _warn_about_spawn
from ignite_ddl.launch.parent import Launch

posix = pytest.mark.skipif(os.name != "posix", reason="signals and process groups are POSIX")


def leave_pid(folder):
    open(os.path.join(folder, f"{os.getpid()}.pid"), "w").close()


def pids_in(folder, expected):
    """Of ranks that have left theirs there."""
    comes_true(lambda: len(list(folder.glob("*.pid"))) >= expected, within=90)
    return [int(path.stem) for path in folder.glob("*.pid")]


# ------------------------------------------------------------------------------------------------ results


def test_results_come_in_rank_order():
    offset = 100  # a closure

    def work(local_rank, factor, power=1):
        return offset + factor * idist.all_reduce(idist.get_rank() ** power) + local_rank

    assert parallel(4).run(work, 10, power=2) == [240, 241, 242, 243]


@pytest.mark.parametrize("servers", [0, 1])
def test_any_folder_for_temporary_files(tmp_path, monkeypatch, servers):
    """Ignite takes an address with "env" in it for "env://", and torch decodes no %20."""
    folder = tmp_path / "my envs"
    folder.mkdir()
    parallel(1).run(abs)  # multiprocessing makes its own folder, for good, with the first launch
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert parallel(servers=servers).run(lambda rank: idist.all_reduce(idist.get_rank() + 1)) == [3, 3]
    assert list(folder.iterdir()) == []


@posix
def test_no_other_user_can_enter_the_folders_of_a_run():
    def modes(local_rank):
        config = multiprocessing.current_process()._config
        return [os.stat(folder).st_mode & 0o777 for folder in (os.environ["IGNITE_DDL_RUN"], config["tempdir"])]

    before = os.umask(0)
    try:
        assert parallel(1).run(modes) == [[0o700, 0o700]]
    finally:
        os.umask(before)


def test_idist_knows_the_job():
    def config(local_rank):
        return (
            idist.get_rank(),
            idist.get_local_rank(),
            idist.get_nproc_per_node(),
            idist.get_nnodes(),
            idist.backend(),
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parallel(2).run(config) == [(0, 0, 2, 1, "gloo"), (1, 1, 2, 1, "gloo")]


def test_tensors_and_large_results():
    def work(local_rank):
        return {"tensor": torch.full((25_000_000,), float(local_rank)), "module": torch.nn.Linear(2, 2)}  # 100 MB

    first, second = parallel(2).run(work)
    assert first["tensor"].sum() == 0
    assert second["tensor"].sum() == 25_000_000
    assert second["tensor"].device.type == "cpu"
    assert isinstance(second["module"].weight, torch.nn.Parameter)


def add_half(weight):
    weight.grad += 0.5


def test_tensors_keep_what_pickle_drops():
    model, rows = torch.nn.Linear(2, 1), torch.zeros(4, dtype=torch.uint16)
    torch.nn.init.ones_(model.weight)
    state, middle, column = model.state_dict(), rows[1:3], model.weight.t()
    handle = model.weight.register_hook(lambda gradient: 2 * gradient)
    model.weight.register_hook(lambda gradient: 3 * gradient)
    model.weight.register_post_accumulate_grad_hook(add_half)
    model.register_forward_hook(lambda module, given, output: 10 * output)
    model.bias.grad = torch.full((1,), 7.0)
    computed, storage = model.bias + 0, rows.untyped_storage()

    def work(rank):
        gradients = []
        for _ in range(2):  # with the hook and without
            model.weight.grad = None
            column.sum().backward()
            gradients.append(model.weight.grad.tolist())
            handle.remove()
        rows.view(torch.int16)[:] = 9
        new = model.register_forward_hook(lambda module, given, output: 0.5 * output)  # in addition
        with torch.no_grad():
            model.weight.fill_(4.0)
            model.bias.zero_()
            output = model(torch.ones(2)).item()
        new.remove()
        with pytest.raises(RuntimeError, match="computed before ddl.Parallel.run, and ranks have only its values"):
            computed.sum().backward()
        shared = state["weight"].tolist(), middle.tolist(), storage.tolist() == [9, 0] * 4
        return gradients, shared, output, model.bias.grad.item(), computed.tolist() == [0.0]

    computed.data.zero_()
    assert parallel(1).run(work) == [([[[6.5, 6.5]], [[3.5, 3.5]]], ([[4.0, 4.0]], [9, 9], True), 40.0, 7.0, True)]


def hooked(rank):
    model = torch.nn.Linear(1, 1)
    for _ in range(9):
        model.register_forward_hook(print)
    return model


def test_hooks_of_a_result_are_not_replaced_by_new_ones(monkeypatch):
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    (model,) = parallel(1).run(hooked)
    assert max(model._forward_hooks) < RemovableHandle.next_id


CLASSES = """
import enum
unit = 1

class Point(Exception):
    total = 0

    def seen(self):
        return unit

class Kind(enum.Enum):
    ONE = 1

    def seen(self):
        return unit

def make(rank, fails=False):
    Point.total += 7
    if fails:
        raise Point(rank)
    return Point(rank), Kind.ONE
"""


def test_class_of_this_session_keeps_its_identity():
    space = {"__name__": "__main__"}  # as in a cell
    exec(CLASSES, space)
    results = parallel(2).run(space["make"])
    assert [type(point) is space["Point"] for point, _ in results] == [True, True]
    assert [kind is space["Kind"].ONE for _, kind in results] == [True, True]
    assert type(failing(space["make"], True).exception) is space["Point"]
    space["unit"] = 2  # their methods are those of this session, too, and see its globals
    assert (space["Point"]().seen(), space["Kind"].ONE.seen(), space["Point"].total) == (2, 2, 0)


def test_environment_folder_and_threads(monkeypatch, tmp_path):
    monkeypatch.setenv("SET_AFTER_THE_SERVER_STARTED", "yes")
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # idist would try to join that job
    monkeypatch.chdir(tmp_path)

    def look(local_rank):
        return os.environ["SET_AFTER_THE_SERVER_STARTED"], os.getcwd(), torch.get_num_threads()

    assert parallel(2, threads_per_rank=3).run(look) == [("yes", str(tmp_path), 3)] * 2
    assert parallel(64)._job(str(tmp_path)).threads == 1


def test_modules_are_found_where_this_process_finds_them(monkeypatch, tmp_path):
    (tmp_path / "of_the_new_folder.py").write_text("value = 7")
    monkeypatch.syspath_prepend("")  # as in a notebook
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("of_the_new_folder")
    assert parallel(1).run(lambda rank: module.value) == [7]
    monkeypatch.chdir("/")
    assert "No module named 'of_the_new_folder'\nranks look in this process's sys.path, from /:" in str(
        failing(lambda rank: module.value, nproc=1)
    )
    del sys.modules["of_the_new_folder"]


def test_numpy_draws_differ_by_rank():
    import numpy

    first, second = parallel(2).run(lambda rank: numpy.random.rand())  # noqa: NPY002
    assert first != second


def test_workers_of_a_rank_have_classes_of_cells_or_start_as_the_parent_says():
    import multiprocessing

    source = (
        "import torch\nclass Rows(torch.utils.data.Dataset):\n    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, row):\n        return row\n"
        "def read(rank):\n    import multiprocessing\n"
        "    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=1)\n"
        "    return multiprocessing.get_start_method(), [rows.tolist() for rows in loader]\n"
    )
    space = {"__name__": "__main__"}  # a dataset of a cell
    exec(source, space)
    multiprocessing.get_start_method()  # as a library may: it fixes the default, which is no choice
    read = parallel(2).run(space["read"])
    assert [rows for _, rows in read] == [[[0, 1], [2, 3]]] * 2
    if sys.platform == "linux":
        assert [method for method, _ in read] == ["fork"] * 2
    multiprocessing.set_start_method("spawn", force=True)
    try:
        assert parallel(2).run(lambda rank: multiprocessing.get_start_method()) == ["spawn"] * 2
    finally:
        multiprocessing.set_start_method(None, force=True)


def test_ranks_that_return_early_do_not_disturb_the_others():
    def work(local_rank):
        if local_rank == 0:
            return "early"
        time.sleep(0.5)
        if local_rank == 1:
            torch.distributed.send(torch.ones(3), dst=2)
            return "sent"
        received = torch.zeros(3)
        torch.distributed.recv(received)  # from any source: a closed peer would raise here
        return received.tolist()

    assert parallel(3).run(work) == ["early", "sent", [1.0, 1.0, 1.0]]


# ------------------------------------------------------------------------------------------------- output


def test_output_is_shown_by_rank(capfd):
    def work(local_rank):
        time.sleep(0.1 * (2 - local_rank))  # the last rank prints first
        print("line", local_rank)
        print("no end of line", end="", flush=True)
        print("error line", file=sys.stderr)
        os.write(1, b"\nfrom C\n")
        subprocess.run(["echo", "from a child"], check=True)

    parallel(3).run(work)
    out, err = capfd.readouterr()
    expected = [
        f"[rank {r}] {text}" for r in range(3) for text in (f"line {r}", "no end of line", "from C", "from a child")
    ]
    assert out.splitlines() == expected
    assert err.splitlines() == [f"[rank {r}] error line" for r in range(3)]


def test_progress_bars_redraw(capfd):
    def work(local_rank):
        for step in range(3):
            sys.stderr.write(f"\r{step + 1}/3")

    parallel(1).run(work)
    assert capfd.readouterr().err == "[rank 0] 1/3\r[rank 0] 2/3\r[rank 0] 3/3\n"


def arrival_times(monkeypatch, work, nproc):
    seen = {}

    class Recorder:
        def write(self, text):
            seen.setdefault(text.strip(), time.monotonic())

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", Recorder())
    parallel(nproc).run(work)
    return seen, time.monotonic()


def test_first_rank_is_live_and_the_others_wait_their_turn(monkeypatch):
    def work(local_rank):
        print("hello")
        time.sleep(0.8 if local_rank == 0 else 0)

    seen, end = arrival_times(monkeypatch, work, 2)
    assert end - seen["[rank 0] hello"] > 0.5
    assert seen["[rank 1] hello"] - seen["[rank 0] hello"] > 0.5


def test_long_runs_show_every_rank_live(monkeypatch):
    monkeypatch.setattr("ignite_ddl.launch.output.HOLD_SECONDS", 0.1)

    def work(local_rank):
        time.sleep(0.3)
        print("hello")
        time.sleep(0.8)

    seen, end = arrival_times(monkeypatch, work, 2)
    assert end - seen["[rank 1] hello"] > 0.5


# ------------------------------------------------------------------------------------------------- faults


def test_exception_names_the_first_rank_and_ends_its_peers(tmp_path, capfd):
    def work(local_rank, folder):
        leave_pid(folder)
        print("before")
        if local_rank == 2:
            raise KeyError("lost key")
        idist.all_reduce(1)

    error = failing(work, tmp_path, nproc=4)
    assert error.rank == 2
    assert isinstance(error.exception, KeyError)
    assert "lost key" in str(error)
    assert 'raise KeyError("lost key")' in error.traceback
    assert "_rank_main" not in error.traceback
    assert "[rank 2] before" in capfd.readouterr().out
    assert gone(pids_in(tmp_path, 4))


def test_message_leaves_out_frames_of_libraries_between_the_users_own(monkeypatch):
    def lost(local_rank):
        torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 2)))(torch.ones(2, 7))

    with pytest.raises(ddl.RankError) as caught:
        ddl.Parallel("gloo", nproc_per_node=1).run(lost)
    error = caught.value
    text, whole = str(error), error.traceback
    assert "torch.nn.Sequential(torch.nn.Sequential(" in text  # the user's line
    assert "frames of torch are left out; IGNITE_DDL_FULL_TRACEBACK=1 shows them" in text
    assert "return F.linear(" in text, "the last frame says where it was raised"
    assert text.count('  File "') == 2
    assert whole.count('  File "') >= 6
    left_out = int(re.search(r"\.\.\. (\d+) frames", text)[1])
    assert left_out == whole.count('  File "') - 2
    monkeypatch.setenv("IGNITE_DDL_FULL_TRACEBACK", "1")
    assert whole.rstrip() in str(ddl.RankError(0, "raised", whole))


@posix
def test_killed_rank_is_named_not_its_peers(tmp_path):
    def work(local_rank, folder):
        leave_pid(folder)
        if local_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        idist.all_reduce(1)

    error = failing(work, tmp_path, nproc=4)
    assert (error.rank, error.exitcode) == (1, -9)
    assert "SIGKILL" in str(error)
    assert gone(pids_in(tmp_path, 4))


def test_rank_that_exits_is_an_error():
    def leave(local_rank):
        if local_rank == 1:
            os._exit(3)
        idist.barrier()

    error = failing(leave)
    assert (error.rank, error.exitcode) == (1, 3)
    assert "SystemExit: enough" in str(failing(lambda rank: sys.exit("enough")))


def test_the_timeout_counts_from_when_all_have_started(monkeypatch):
    """A first launch starts the forkserver, too: 20 s on a busy machine."""
    start, watch, started, deadlines = Launch._start, Launch._watch, [], []

    def starting(self, *args):
        rank = start(self, *args)
        started.append(time.monotonic())
        return rank

    def watching(self, deadline):
        deadlines.append(deadline)
        watch(self, deadline)

    monkeypatch.setattr(Launch, "_start", starting)
    monkeypatch.setattr(Launch, "_watch", watching)
    parallel(2).run(lambda rank: None)
    assert deadlines[0] >= started[1] + TIMEOUT


def test_what_a_rank_started_ends_with_it(tmp_path):
    def work(local_rank, folder):
        child = subprocess.Popen(["sleep", "60"])
        open(os.path.join(folder, f"{child.pid}.pid"), "w").close()
        raise RuntimeError

    failing(work, str(tmp_path))
    assert gone([int(path.stem) for path in tmp_path.glob("*.pid")])


def test_unpicklable_function_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("ignite_ddl.launch.parallel.Launch", None)  # would fail if a launch were tried
    lock = threading.Lock()
    with pytest.raises(ValueError, match="the variable 'lock' that it uses"):
        parallel().run(lambda rank: lock)
    with pytest.raises(ValueError, match="argument 2"):
        parallel().run(print, 1, lock)
    with pytest.raises(ValueError, match="argument 'key'"):
        parallel().run(print, key=lock)
    with pytest.raises(ValueError, match="func should be a function"):
        parallel().run(3)
    shell = InteractiveShell.__new__(InteractiveShell)
    with pytest.raises(
        ValueError, match=r"'shell' that it uses .* is not: it is a part of the notebook.*: leave magics"
    ):
        parallel().run(lambda rank: shell.run_line_magic("time", "x = 1"))


def test_a_function_may_use_names_of_torchs_modules():
    """cloudpickle takes these names for torch.ops and torch.classes, which pickle does not know."""

    class Counted:
        ops = classes = 3

    assert parallel(2).run(lambda rank: torch.ones(2).sum().item() + Counted.ops + Counted.classes) == [8.0, 8.0]


SCRIPT = """
import os, sys, time
import ignite_ddl as ddl

def work(local_rank, folder):
    open(os.path.join(folder, f"{os.getpid()}.pid"), "w").close()
    time.sleep(60)

ddl.Parallel("gloo", 2, timeout=60).run(work, sys.argv[1])  # and no `if __name__ == "__main__"`
"""


@posix
@pytest.mark.parametrize(
    "sent",
    [signal.SIGTERM, signal.SIGINT],  # SIGINT also reaches the kernel below; SIGKILL: test_launch_faults.py
)
@pytest.mark.slow
def test_signals_to_the_parent_leave_no_rank(tmp_path, sent):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.Popen(
        [sys.executable, str(script), tmp_path],
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs these tests in the background has them ignore Ctrl-C, and what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    ranks = pids_in(tmp_path, 2)
    assert len(ranks) == 2
    run.send_signal(sent)
    _, err = run.communicate(timeout=60)
    assert run.returncode != 0
    if sent == signal.SIGINT:
        assert "KeyboardInterrupt" in err
    assert gone(ranks)


# ------------------------------------------------------------------------------------------ a real kernel


@pytest.fixture(scope="module")
def kernel():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    yield Kernel(manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


class Kernel:
    def __init__(self, manager, client):
        self.manager, self.client = manager, client

    def run(self, code, timeout=60):
        """Runs a cell; returns its printed text and its error ("" if none)."""
        out, error = [], []

        def hear(message):
            content = message["content"]
            if message["msg_type"] == "stream":
                out.append(content["text"])
            if message["msg_type"] == "error":
                error.append("\n".join(content["traceback"]))

        self.client.execute_interactive(textwrap.dedent(code), timeout=timeout, output_hook=hear)
        return "".join(out), "".join(error)


def test_kernel_runs_functions_of_cells_after_heavy_work(kernel):
    kernel.run("import os, time, torch, ignite_ddl as ddl, ignite.distributed as idist")
    kernel.run("(torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()")  # a fork would hang after this
    kernel.run("""
        parallel = ddl.Parallel("gloo", 4, timeout=30)
        def work(local_rank):
            print("sum", idist.all_reduce(torch.ones(1)).item(), (torch.randn(300, 300) @ torch.randn(300, 300)).shape)
            return local_rank
    """)
    out, error = kernel.run("print(parallel.run(work))")
    assert error == ""
    lines = [f"[rank {r}] sum 4.0 torch.Size([300, 300])" for r in range(4)]
    assert out.splitlines() == [*lines, "[0, 1, 2, 3]"]


def test_kernel_shows_the_cell_of_the_failing_rank(kernel):
    kernel.run(
        "def broken(local_rank):\n    if local_rank == 1:\n        raise ValueError('not today')\n    idist.barrier()"
    )
    _, error = kernel.run("parallel.run(broken)")
    assert "rank 1 raised ValueError: not today" in error
    assert "raise ValueError('not today')" in error
    assert re.search(r"The run was started at Cell In\[\d+\], line 1, in <module>$", error)
    assert "ignite_ddl" not in error
    assert "ipykernel_" not in error
    assert kernel.run("print('alive')")[0] == "alive\n"


KERNEL_FAULTS = {
    "os.kill(os.getpid(), 9)": (30, "rank 1 was killed by SIGKILL"),
    "time.sleep(60)": (2, "rank 1 did not finish within 2 s"),
}


@posix
@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_kernel_faults_end_with_an_error_and_leave_no_rank(kernel, fault):
    timeout, expected = KERNEL_FAULTS[fault]
    kernel.run("ddl.Parallel('gloo', 2, timeout=30).run(lambda rank: 0)")
    limit = 4 + time_to_start(2) + timeout % 30
    started = time.monotonic()
    faulty = f"lambda rank: {fault} if rank == 1 else idist.barrier()"
    _, error = kernel.run(f"ddl.Parallel('gloo', 2, timeout={timeout}).run({faulty})")
    assert expected in error
    assert time.monotonic() - started < limit
    left = "[c.pid for c in psutil.Process().children(recursive=True) if 'tracker' not in ' '.join(c.cmdline())]"
    out, _ = kernel.run(f"import psutil\ntime.sleep(0.5)\nprint(len({left}))")
    assert out == "1\n"  # the server alone
    assert kernel.run("print(ddl.Parallel('gloo', 2, timeout=30).run(lambda rank: rank))")[0] == "[0, 1]\n"


@posix
def test_kernel_interrupt_ends_the_ranks(kernel, tmp_path):
    kernel.run(f"folder = {str(tmp_path)!r}")
    kernel.run("""
        def hang(local_rank):
            open(f"{folder}/{os.getpid()}.pid", "w").close()
            if local_rank == 0: time.sleep(60)
            idist.barrier()
    """)
    pressed = []

    def press():
        pids_in(tmp_path, 4)
        time.sleep(0.2)
        pressed.append(time.monotonic())
        kernel.manager.interrupt_kernel()

    timer = threading.Thread(target=press)
    timer.start()
    _, error = kernel.run("parallel.run(hang)", timeout=60)
    timer.join()
    assert "KeyboardInterrupt" in error
    assert re.search(r"rank 0 was at Cell In\[\d+\], line \d, in hang\nrank 1 was at Cell", error)
    assert "selectors" not in error
    assert time.monotonic() - pressed[0] < 10
    assert gone(pids_in(tmp_path, 4))
    assert kernel.run("print(parallel.run(lambda rank: rank))")[0] == "[0, 1, 2, 3]\n"


@posix
@pytest.mark.slow  # as a script that is killed, in test_launch_faults.py
def test_killed_kernel_leaves_no_rank(tmp_path):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute(f"import os, time, ignite_ddl as ddl\nfolder = {str(tmp_path)!r}")
        client.execute(
            "def hang(local_rank):\n"
            "    open(f'{folder}/{os.getpid()}.pid', 'w').close()\n"
            "    time.sleep(60)\n"
            "ddl.Parallel('gloo', 3, timeout=60).run(hang)"
        )
        ranks = pids_in(tmp_path, 3)
        assert len(ranks) == 3
        servers = [child.pid for child in psutil.Process(manager.provisioner.pid).children(recursive=True)]
        os.kill(manager.provisioner.pid, signal.SIGKILL)  # the kernel alone, as the out-of-memory killer does
        assert gone(ranks + servers)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


# ------------------------------------------------------------------------------------- joining, serial, other


def test_serial_runs_in_this_process():
    for arguments in ({}, {"backend": "gloo"}):
        with ddl.Parallel(**arguments) as alone:
            assert alone.run(lambda rank, x: (rank, x, os.getpid()), 5) == [(0, 5, os.getpid())]


@pytest.mark.slow
def test_script_joins_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, ignite.distributed as idist, ignite_ddl as ddl\n"
        "def work(local_rank):\n    return local_rank, idist.all_reduce(idist.get_rank() + 1), ddl.get_mesh().pp_rank\n"
        "with ddl.Parallel('gloo', **({'pp': 2, 'dp': -1} if 'RANK' in os.environ else {})) as parallel:\n"
        "    text = f'got {parallel.run(work)} '\n    print(text, flush=True)\n"
        "assert ddl.get_mesh().world_size == 1\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "got [(0, 3, 0)]" in done.stdout
    assert "got [(1, 3, 1)]" in done.stdout
    alone = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert alone.stdout.strip() == "got [(0, 1, 0)]", alone.stderr


@pytest.mark.slow
def test_a_killed_torchrun_leaves_no_rank(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "import ignite_ddl as ddl\n"
        "def work(local_rank):\n"
        "    open(f'{sys.argv[1]}/{os.getpid()}.pid', 'w').close()\n"
        "    if local_rank == 0:\n"
        "        while len([name for name in os.listdir(sys.argv[1]) if name.endswith('pid')]) < 2:\n"
        "            time.sleep(0.02)\n"
        "        os.kill(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(600)\n"
        "with ddl.Parallel('gloo') as parallel:\n    parallel.run(work)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, script, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert gone(pids_in(tmp_path, 2))
    for rank in (0, 1):
        assert f"rank {rank} ends: torchrun, which started it, was killed" in done.stderr


def test_starting_ranks_inside_a_job_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="already is rank 1 of 4"):
        parallel(2)


SLURM = {"JOB_ID": "7", "PROCID": "1", "LOCALID": "0", "NTASKS": "2", "JOB_NODELIST": "node[1-2]", "JOB_NUM_NODES": "2"}


def test_torchruns_ranks_count_where_srun_started_torchrun(monkeypatch, tmp_path):
    """One task a machine starts all of its ranks: torchrun's numbers are not Slurm's, which idist would refuse.

    It meets in any folder: Ignite takes an address with "env" in it for "env://".
    """
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in torchrun.items() | {(f"SLURM_{name}", value) for name, value in SLURM.items()}:
        monkeypatch.setenv(name, value)
    with ddl.Parallel("gloo", init_method=f"file://{tmp_path}/my environment", timeout=TIMEOUT) as job:
        assert job.run(lambda rank: (rank, idist.get_world_size(), os.environ["SLURM_JOB_ID"])) == [(0, 1, "7")]
    assert os.environ["SLURM_JOB_ID"] == "7"


def test_a_batch_script_is_no_rank(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(ValueError, match="batch script of a Slurm job for 2 ranks, and only srun starts them"):
        ddl.Parallel("gloo")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert not ddl.Parallel("gloo")._joined


@pytest.mark.slow
def test_two_nodes_on_one_machine():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = (
        "import sys, ignite_ddl as ddl, ignite.distributed as i\n"
        f"here = dict(node_rank=int(sys.argv[1]), master_addr='127.0.0.1', master_port={port})\n"
        "p = ddl.Parallel('gloo', 2, nnodes=2, timeout=60, **here)\n"
        "print(p.run(lambda r: (r, i.get_rank(), i.get_nnodes(), i.get_node_rank(), i.all_reduce(1))))\n"
    )
    nodes = [
        subprocess.Popen([sys.executable, "-c", script, str(node)], stdout=subprocess.PIPE, text=True)
        for node in (0, 1)
    ]
    outputs = [node.communicate(timeout=240)[0].strip() for node in nodes]
    assert outputs == ["[(0, 0, 2, 0, 4), (1, 1, 2, 0, 4)]", "[(0, 2, 2, 1, 4), (1, 3, 2, 1, 4)]"]


EARLY = """
import concurrent.futures, glob, multiprocessing, os, signal, tempfile, time
from multiprocessing import forkserver
import ignite_ddl as ddl
from ignite_ddl.launch.parallel import start_forkserver
start_forkserver()
pid = forkserver._forkserver._forkserver_pid
signal.signal(signal.SIGINT, lambda *_: None)
time.sleep(0.2)
os.killpg(0, signal.SIGINT)  # a notebook's stop button, while the server imports
with ddl.Parallel("gloo", nproc_per_node=2) as parallel:
    print(parallel.run(lambda rank: os.getppid()) == [pid, pid])
with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as others:
    print(others.submit(os.getpgrp).result() == os.getpgrp())  # ended with this group, as without ranks
print(len(glob.glob(f"{tempfile.gettempdir()}/pymp-*")) < 2)  # none where this path is too long for a socket
"""


@posix
def test_the_forkserver_may_be_started_before_the_first_run(tmp_path):
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", EARLY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, start_new_session=True)
    assert (done.stdout, done.stderr) == ("True\nTrue\nTrue\n", "")


@pytest.mark.slow
def test_spawn_works_and_warns_once_where_there_is_no_forkserver(monkeypatch):
    assert parallel(2, start_method="spawn", timeout=120).run(lambda rank: idist.all_reduce(rank)) == [1, 1]
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    _warn_about_spawn.cache_clear()
    with pytest.warns(UserWarning, match="no forkserver"):
        assert parallel()._context().get_start_method() == "spawn"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel()._context()


def gpus_seen(local_rank):
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_gloo_ranks_compute_on_the_cpu(monkeypatch):
    """Else one rank would take the only GPU, and two the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert parallel(1).run(gpus_seen) == [""]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "smoke"}, "backend should be one of .* given 'smoke'"),
        ({"backend": None}, "nproc_per_node needs a backend"),
        ({"nproc_per_node": 0}, "nproc_per_node should be a positive integer, but given 0"),
        ({"nproc_per_node": 2.0}, "nproc_per_node should be a positive integer, but given 2.0"),
        ({"timeout": -1}, "timeout should be a positive number of seconds, but given -1"),
        ({"timeout": float("inf")}, r"but given inf; the longest is 1e\+09"),
        ({"timeout": "60"}, "timeout should be a positive number of seconds, but given '60'"),
        ({"threads_per_rank": 0}, "threads_per_rank should be a positive integer"),
        ({"init_method": "tcp://127.0.0.1:1"}, "init_method should be"),
        ({"nnodes": 2}, "node_rank should be given with nnodes=2"),
        ({"nnodes": 2, "node_rank": 2}, "node_rank should be between 0 and 1, but given 2"),
        ({"nnodes": 2, "node_rank": 0}, "master_addr and master_port should be given"),
        ({"start_method": "fork"}, "start_method should be one of"),
        pytest.param(
            {"backend": "nccl", "nproc_per_node": 4},
            "one GPU per rank, but given nproc_per_node=4",
            marks=pytest.mark.skipif(
                "nccl" not in idist.available_backends() or torch.cuda.device_count() >= 4,
                reason="needs a torch with NCCL on a machine with fewer than 4 GPUs",
            ),
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        parallel(**arguments)


def test_python_ends_when_gloos_threads_rest(monkeypatch):
    """Else one that asks for Python's lock meanwhile aborts the process; of real ones see launch/torchrun.py."""
    found, registered = iter([True] * 3 + [False] * 4), []
    monkeypatch.setattr(torchrun.atexit, "register", registered.append)
    monkeypatch.setattr(torchrun, "_gloo_runs", lambda: next(found))
    torchrun.end_after_gloo.__wrapped__()
    registered[0]()
    assert not list(found)


@posix
def test_a_joined_job_waits_for_gloos_threads():
    text = """
import threading, time, ignite_ddl as ddl, ignite.distributed as idist
from ignite_ddl.launch import torchrun
with ddl.Parallel("gloo") as job:
    job.run(lambda rank: idist.all_reduce(1))
runs = torchrun._gloo_runs
torchrun._gloo_runs = lambda: print("looked", flush=True) or runs()
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        job["MASTER_PORT"] = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", text], env=os.environ | job, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.count("looked") >= 4) == (0, True), done.stderr


HABITS = """
from typing import Optional
import torch
import torch._inductor.config
from torch import nn

WIDTH = 3

def settings(rank):
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.backends.cudnn.benchmark, torch.backends.opt_einsum.enabled in (True, False)

def inductor(rank):
    return torch._inductor.config.max_autotune

def class_inside(rank):
    class Net(nn.Module):
        width = WIDTH

        @torch.no_grad()
        def forward(self, x: Optional[torch.Tensor]) -> torch.Tensor:
            return x

    return Net()(rank), Net.width
"""


@pytest.mark.parametrize(
    ("name", "returned"), [("settings", (True, True)), ("inductor", False), ("class_inside", (0, 3))]
)
def test_habits_of_scripts_reach_the_ranks(name, returned):
    """Modules of types of their own, and what bodies of classes inside a function use."""
    space = {"__name__": "__main__"}
    exec(HABITS, space)
    assert parallel(1).run(space[name]) == [returned]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


JOINED = """
import os, ignite_ddl as ddl
with ddl.Parallel("gloo") as parallel:
    print(parallel.run(lambda rank: os.environ["CUDA_VISIBLE_DEVICES"]))
"""


def test_a_joined_job_of_gloo_computes_on_the_cpu_too():
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": "0"}
    environ = os.environ | place | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", JOINED], capture_output=True, text=True, env=environ, timeout=120)
    assert done.stdout == "['']\n", done.stderr


_A_CHILD_THAT_LAUNCHES = """
import multiprocessing, sys
import ignite_ddl as ddl

def on_a_rank(local_rank):
    return local_rank

def launched():
    return ddl.Parallel("gloo", nproc_per_node=2, timeout=60).run(on_a_rank)

def child():
    assert launched() == [0, 1]

if __name__ == "__main__":
    assert launched() == [0, 1]
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert launched() == [0, 1]
"""


@pytest.mark.skipif(os.name != "posix", reason="a forkserver")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_process_that_launches_leaves_its_parents_server_alone(method, tmp_path):
    """As a search over options by processes does."""
    (tmp_path / "script.py").write_text(_A_CHILD_THAT_LAUNCHES)
    subprocess.run([sys.executable, "script.py", method], cwd=tmp_path, check=True, timeout=TIMEOUT)


_LAUNCHES_IN_CHILDREN = """
import concurrent.futures, multiprocessing, os
import ignite_ddl as ddl

def on_a_rank(local_rank):
    return local_rank

def launched(_=None):
    return ddl.Parallel("gloo", nproc_per_node=2, timeout=60).run(on_a_rank)

def refused(_):
    try:
        launched()
    except ValueError as error:
        return str(error)

if __name__ == "__main__":
    assert launched() == [0, 1]
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
        assert list(pool.map(launched, range(2))) == [[0, 1]] * 2
    with fork.Pool(1) as pool:
        assert "cannot be started in a daemonic process" in pool.map(refused, [0])[0]
    assert launched() == [0, 1]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a fork is safe there")
def test_forked_children_launch_by_servers_of_their_own_or_say_why_not(tmp_path):
    (tmp_path / "script.py").write_text(_LAUNCHES_IN_CHILDREN)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=TIMEOUT)
