"""What a fault says: the rank, and what to do. Each of these once said something else, or nothing."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import ignite.distributed as idist
import pytest
import torch
from ranks import alive, comes_true, failing, on_each_rank, parallel, time_to_start

import ignite_ddl as ddl
from ignite_ddl.launch import parent
from ignite_ddl.launch.torchrun import _round_name

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
posix = pytest.mark.skipif(os.name != "posix", reason="signals, sockets and limits of POSIX")
PREFIX = "import os, sys, time, signal, ignite_ddl as ddl, ignite.distributed as idist\n"


def script(text, **kwargs):
    """Runs a program of its own; its standard output, its errors, its exit code."""
    options = {"capture_output": True, "text": True, "timeout": 120} | kwargs
    done = subprocess.run([sys.executable, "-c", PREFIX + text], **options)
    return done.stdout, done.stderr, done.returncode


def left(folder):
    """What launches leave there; torch keeps a folder of its own there for good."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor")]


class TwoArguments(Exception):
    """Can be sent, but not be read."""

    def __init__(self, name, number):
        super().__init__(f"{name} has number {number}")


class WithALock(Exception):
    """Cannot be sent."""

    def __init__(self, name, number):
        super().__init__(f"{name} has number {number}")
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [TwoArguments, WithALock])
def test_an_exception_that_cannot_be_sent_or_read_keeps_its_words(kind):
    def work(local_rank):
        if local_rank == 1:
            raise kind("a layer", 7)

    error = failing(work)
    assert (error.rank, error.exception) == (1, None)
    assert error.summary.endswith(f"{kind.__name__}: a layer has number 7")
    assert 'raise kind("a layer", 7)' in error.traceback


async def coroutine():
    pass


class Unreadable:
    def __reduce__(self):
        return (int, ("no number",))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Unreadable, "Return numbers, tensors, or containers"),
        (threading.Lock, "result (lock) cannot be sent"),
        (lambda: {"a": 1, "key": threading.Lock()}, "result (dict, whose part 'key' is a lock) cannot be sent"),
        (coroutine, "call asyncio.run(...)"),
    ],
)
def test_a_result_that_cannot_be_sent_or_read_is_named(make, said):
    error = failing(lambda rank: make() if rank == 1 else 0)
    assert error.rank == 1
    assert said in str(error)


def test_a_function_without_the_rank_is_told_of_it():
    assert "1 was given\nrun calls func(local_rank, ...)" in str(failing(lambda: 0, nproc=1))


@pytest.mark.parametrize("how", ["closed", "None", "full"])
def test_a_stream_that_cannot_be_flushed_loses_no_result(how):
    def work(local_rank):
        if how == "closed":
            sys.stdout.close()
            sys.stderr.close()
        elif how == "None":
            sys.stdout = sys.stderr = None
        else:
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            print("no end of line", end="")
        return local_rank

    if how == "full" and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    assert parallel().run(work) == [0, 1]


@pytest.fixture
def small_disk(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs root, to mount a small disk")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("filled", ["before", "by printing"])
def test_a_full_disk_is_named(small_disk, monkeypatch, filled):
    def work(local_rank):
        for _ in range(2000):
            print("x" * 100)

    parallel(1).run(abs)
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    if filled == "before":
        with contextlib.suppress(OSError):
            (small_disk / "filler").write_bytes(bytes(2**16))
    with pytest.raises(ddl.RankError) as error:
        parallel().run(work)
    error = error.value
    assert f"The disk of {small_disk}, where ranks meet and write their output, is full" in str(error)
    assert "set TMPDIR" in str(error)


@posix
@pytest.mark.slow
def test_a_long_folder_for_temporary_files(tmp_path):
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    text = "import tempfile\nprint(ddl.Parallel('gloo', 2, timeout=30).run(lambda rank: tempfile.gettempdir()))"
    out, err, _ = script(text, env=os.environ | {"TMPDIR": str(folder)})
    assert out == f"{[str(folder)] * 2}\n", err
    assert left(folder) == []


def test_launches_at_the_same_time_do_not_collide_and_give_the_main_module_back():
    main = sys.modules["__main__"]
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(parallel(2).run, lambda rank: idist.all_reduce(rank)) for _ in range(8)]
    assert [run.result() for run in runs] == [[1, 1]] * 8
    assert sys.modules["__main__"] is main


@on_each_rank(dp=2)
def test_a_rank_cannot_start_ranks(rank):
    neither = f"a rank can neither start ranks nor join its job again, but this process is rank {rank}"
    for nproc in (2, None):
        with pytest.raises(ValueError, match=f"(?s){neither}.*in the process that started that run"):
            ddl.Parallel("gloo", nproc).__enter__()


def test_what_is_left_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "junk")
    with pytest.raises(ValueError, match="environment variable MASTER_PORT should be an integer, but given 'junk'"):
        parallel()
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="leave nproc_per_node out .* RANK and WORLD_SIZE are left over .* unset them"):
        parallel()


@posix
def test_a_deleted_working_folder_is_named(monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(ValueError, match="working folder of this process, but it has been deleted: change to"):
        parallel().run(abs)


@posix
def test_too_few_files_are_named(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda what: (40, 4000))
    with pytest.raises(ValueError, match=r"^8 ranks and servers need .* at most 40 are allowed: run `ulimit -n 1024`"):
        parallel(8).run(abs)


@posix
@pytest.mark.slow
def test_as_many_files_as_named_are_enough():
    text = (
        "import resource\n"
        "for limit in range(30, 80, 2):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 4000))\n"
        "    try:\n        results = ddl.Parallel('gloo', 8, timeout=30).run(lambda rank: idist.all_reduce(1))\n"
        "    except ValueError as error:\n        said = str(error)\n"
        "    else:\n        break\n"
        "print(results[0], said)"
    )
    out, err, _ = script(text)
    assert out.startswith("8 8 ranks and servers need about "), err


def all_but_rank_1(local_rank, started=None):
    if started:
        (started / str(local_rank)).touch()
    if local_rank == 1:
        time.sleep(60)
    idist.all_reduce(1)


def each_another(local_rank):
    idist.barrier() if local_rank == 1 else idist.all_reduce(1)


def without_rank_1(local_rank):
    if local_rank != 1:
        torch.distributed.all_reduce(torch.ones(1), async_op=True).wait()


def all_of_other_sizes(local_rank):
    torch.distributed.recv(torch.ones(1), src=(local_rank + 1) % 3)


def who_waits_for_whom(local_rank):
    """Rank 0 waits for rank 1, which waits for rank 2 on another group."""
    pairs = [torch.distributed.new_group(pair) for pair in ([0, 1], [1, 2])]
    if local_rank == 2:
        background = torch.distributed.all_reduce(torch.ones(1), async_op=True)  # noqa: F841
        time.sleep(60)
    alone = torch.distributed.new_group([local_rank], use_local_synchronization=True)
    for _ in range(300):  # more than a report has
        torch.distributed.all_reduce(torch.ones(1), group=alone)
    for pair in pairs[local_rank:]:
        torch.distributed.all_reduce(torch.ones(4, 5), group=pair)


HANGS = (all_but_rank_1, each_another, without_rank_1, all_of_other_sizes, who_waits_for_whom)


@pytest.fixture(scope="module")
def hung():
    """The error of each of them, which wait for their time-out together."""
    return timed_out(HANGS)


def timed_out(functions):
    """The limit, and the error of each, at a time when as many runs start together."""
    parallel(1).run(abs)
    with ThreadPoolExecutor(len(functions)) as threads:
        limit = max(threads.map(time_to_start, [3] * len(functions)))
        errors = threads.map(lambda work: failing(work, nproc=3, timeout=limit, within=60 + limit), functions)
        return limit, dict(zip(functions, errors, strict=True))


@posix
@pytest.mark.parametrize(
    ("work", "rank", "said", "missing", "operations"),
    [
        (
            all_but_rank_1,
            1,
            r"Waiting in all_reduce: 0, 2. Missing: rank 1 was at test_launch_faults.py:\d+ in all_but_rank_1.",
            (1,),
            ["all_reduce", None, "all_reduce"],
        ),
        (
            each_another,
            1,
            r"Waiting in all_reduce: 0, 2. Missing: rank 1 was at .*each_another, waiting in barrier.\n"
            "Ranks wait for each other in different calls: run a model, an evaluator or a save on all of them, or "
            "none; with shard=True, call each layer equally often on all of them: a loop must not end by a rank's "
            "rows.",
            (),
            ["all_reduce", "barrier", "all_reduce"],
        ),
        (
            without_rank_1,
            0,
            "Waiting in an asynchronous call: 0, 2. Missing: rank 1 had returned.",
            (1,),
            ["all_reduce", None, "all_reduce"],
        ),
        (
            all_of_other_sizes,
            0,
            "Waiting in recv: 0, 1, 2. No rank is missing: compare lines, groups and sizes.",
            (),
            ["recv"] * 3,
        ),
        (
            who_waits_for_whom,
            2,
            "Waiting in all_reduce: 0, 1. Missing: rank 2",
            (2,),
            ["all_reduce", "all_reduce", "all_reduce"],  # rank 2's is in the background
        ),
    ],
)
def test_a_time_out_names_the_rank_that_never_came(work, rank, said, missing, operations, hung):
    limit, errors = hung
    error = errors[work]
    assert (error.rank, error.summary) == (rank, f"did not finish within {limit:g} s")
    assert re.search(said, str(error))
    finished = [r for r in range(3) if work is without_rank_1 and r == 1]
    waiting = ", ".join(str(r) for r in range(3) if r not in finished)
    assert f"Not finished: {waiting}." + " Finished: 1." * len(finished) in str(error)
    assert "rank 0 was here (most recent call first)" in str(error)
    assert f"in {work.__name__}" in str(error).split("rank 0 was here")[1]
    report = pickle.loads(pickle.dumps(error)).report
    assert str(report) in str(error)
    assert (report.missing, [call.operation for call in report.calls]) == (missing, operations)
    numbers = [call.number for call in report.calls]
    first = numbers[0]
    if work is all_of_other_sizes:
        assert numbers == [None] * 3
    elif work is who_waits_for_whom:
        assert [(call.number, call.group) for call in report.calls[:2]] == [(1, (0, 1)), (1, (1, 2))]
        assert report.calls[0].sizes == "Float[4, 5]"
    else:
        assert numbers == [first, first - (operations[1] is None), first]
    assert [one.differ_in for one in report.unlike] == ["operation"] * (work is each_another)


def in_unlike_calls(local_rank):
    torch.distributed.all_reduce(torch.ones(2))
    if local_rank:
        torch.distributed.all_reduce(torch.ones(3))
    else:
        torch.distributed.all_gather([torch.ones(3)] * 3, torch.ones(3))


def in_a_circle(local_rank):
    pairs = [torch.distributed.new_group(pair) for pair in ([0, 1], [1, 2], [2, 0])]
    torch.distributed.all_reduce(torch.ones(1), group=pairs[local_rank])


def received_from_who_waits(local_rank):
    if local_rank == 0:
        torch.distributed.recv(torch.ones(1), 1)
    torch.distributed.barrier()


def received_from_who_returned(local_rank):
    if local_rank == 0:
        torch.distributed.recv(torch.ones(1), 1)


@pytest.fixture
def often(monkeypatch):
    """Ranks are asked often whether they can go on."""
    monkeypatch.setattr(parent, "LOOK_SECONDS", (0.5, 0.5))
    monkeypatch.setattr(parent, "LOOK_AGAIN_SECONDS", 0.3)


RETURNED, EACH_OTHER = "one of its ranks has returned", "ranks wait for each other"


@posix
@pytest.mark.parametrize(
    ("work", "rank", "call", "why"),
    [
        (without_rank_1, 0, "all_reduce", RETURNED),
        (in_unlike_calls, 0, "all_gather", EACH_OTHER),
        (in_a_circle, 0, "all_reduce", EACH_OTHER),
        (received_from_who_waits, 0, "recv", EACH_OTHER),
        (received_from_who_returned, 0, "recv", RETURNED),
    ],
)
def test_ranks_that_wait_without_end_are_stopped(work, rank, call, why, often):
    error = failing(work, nproc=3, within=20)
    place = rf"test_launch_faults.py:\d+ in {work.__name__}"
    assert error.rank == rank
    assert re.fullmatch(rf"waits in {call} at {place}, which cannot complete: {why}", error.summary)
    assert error.report.calls[rank].operation == call


def for_the_slow(local_rank):
    """Long waits, which end: for a rank that computes, a rank in a thread, and one that returns while others go on."""
    if local_rank == 0:
        time.sleep(3)
    torch.distributed.all_reduce(torch.ones(1))
    late = torch.distributed.new_group()
    if local_rank == 1:
        with ThreadPoolExecutor() as thread:
            thread.submit(lambda: (time.sleep(3), torch.distributed.all_reduce(torch.ones(1), group=late))).result()
    else:
        torch.distributed.all_reduce(torch.ones(1), group=late)
    if local_rank == 2:
        return "early"
    first = torch.distributed.new_group([0, 1], use_local_synchronization=True)
    time.sleep(3 * (local_rank == 0))
    torch.distributed.all_reduce(torch.ones(1), group=first)
    return "late"


@posix
def test_a_long_wait_is_not_taken_for_an_endless_one(often):
    assert parallel(3).run(for_the_slow) == ["late", "late", "early"]


@posix
def test_ctrl_c_says_where_each_rank_was(capsys, tmp_path):
    """Of a notebook's kernel see test_launch.py."""
    calling = time_to_start(2)

    def press():
        assert comes_true(lambda: len(left(tmp_path)) == 2, within=60)
        time.sleep(calling)  # rank 0 is in its call
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=press).start()
        with pytest.raises(KeyboardInterrupt) as caught:
            parallel(2).run(all_but_rank_1, tmp_path)
    finally:
        signal.signal(signal.SIGINT, handler)
    here = r"was at test_launch_faults.py:"
    lines = rf"rank 0 {here}\d+ in all_but_rank_1, waiting in all_reduce\nrank 1 {here}"
    assert re.search(lines, capsys.readouterr().err)
    assert len(caught.traceback) == 3  # the test's, Parallel.run's and Launch.run's


@posix
@pytest.mark.parametrize(
    ("error", "explained"),
    [
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.0.2]:29501"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("Timed out waiting for the camera"), False),
        (TimeoutError("gloo.csv: Timed out"), False),
    ],
)
def test_gloos_errors_of_a_peer_that_is_missing_are_explained(error, explained):
    def fail(local_rank):
        raise error

    with pytest.raises(type(error)) as caught:
        ddl.Parallel().run(fail)
    notes = getattr(caught.value, "__notes__", [])
    assert ["waited for another rank, which has ended" in note for note in notes] == [True] * explained


@pytest.mark.parametrize("how", ["SIGSEGV", "SIGABRT"])
def test_a_crash_says_where(how):
    def work(local_rank):
        if local_rank == 1:
            os.kill(os.getpid(), getattr(signal, how))
        idist.barrier()

    error = failing(work)
    assert error.summary == f"was killed by {how}"
    assert re.search(
        r'It was here \(most recent call first\):\n  File ".*test_launch_faults.py", line \d+ in work', str(error)
    )


ORPHAN = """
def work(rank, file):
    import subprocess
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    open(file + str(rank), "w").write(str(child.pid))
    if %s: time.sleep(60)
ddl.Parallel("gloo", 2, timeout=60).run(work, sys.argv[1])
"""


@linux
@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nothing_is_left_by_a_run_or_by_a_killed_one(tmp_path, killed):
    folder = tmp_path / "tmp"
    folder.mkdir()
    files = [Path(f"{tmp_path}/pid{rank}") for rank in range(2)]
    command = [sys.executable, "-c", PREFIX + ORPHAN % killed, f"{tmp_path}/pid"]
    run = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(folder)})
    if killed:
        assert comes_true(lambda: all(file.exists() and file.read_text() for file in files), within=60)
        run.kill()
    assert run.wait(60) == (-signal.SIGKILL if killed else 0)
    assert comes_true(lambda: not any(alive(int(file.read_text())) for file in files))
    assert comes_true(lambda: left(folder) == []), left(folder)


@posix
@pytest.mark.slow
def test_a_killed_parent_of_ranks_long_gone_leaves_no_folder():
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # short: a long one is replaced by /tmp itself, for its sockets
    run = subprocess.Popen(
        [sys.executable, "-c", PREFIX + "ddl.Parallel('gloo', 1).run(abs); print('idle', flush=True); time.sleep(60)"],
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout.readline() == "idle\n"
    assert [name[:5] for name in left(folder)] == ["pymp-"]
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    assert comes_true(lambda: left(folder) == []), left(folder)
    shutil.rmtree(folder)


def test_what_ranks_of_earlier_rounds_have_left_does_not_count():
    """torchrun keeps one store for all its restarts; of real ones see test_examples.py."""
    store, names = torch.distributed.HashStore(), []
    store.set("ignite_ddl/round/1", "of a rank that died before it got an answer")
    for _ in range(2):
        with ThreadPoolExecutor(3) as ranks:
            jobs = [ranks.submit(_round_name, store, rank, 3, timedelta(seconds=30)) for rank in (0, 2, 1)]
        [name] = {job.result() for job in jobs}
        names.append(name)
    assert names[0] != names[1]


def joined(rank, folder):
    """A rank of a job that somebody else has launched."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}

    def step(local_rank):
        ddl.report_hangs(after=0.5)
        if rank == 1:
            time.sleep(60)
        idist.all_reduce(1)

    with ddl.Parallel("gloo", timeout=3, init_method=f"file://{folder}/store") as job:
        job.run(step)


WATCHED = """
import time, torch.distributed as dist, ignite_ddl as ddl
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.get_world_size = lambda: 2
for _ in range(8):
    ddl.report_hangs(after=0.0001)  # eight threads that are always at the store
time.sleep(0.2)
"""


def test_a_job_that_looks_for_hangs_ends_in_peace():
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@linux
def test_a_hang_in_a_joined_job_says_where_each_rank_was(tmp_path):
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=joined, args=(rank, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [1, 1]
    said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    for rank, line in ((0, "idist.all_reduce(1)"), (1, "time.sleep(60)")):
        head = f"rank {rank} did not finish within 3 s; it was here (most recent call last):\n"
        assert line in said[rank].split(head)[1].split("did not finish")[0]
    for why in ("rank 0 waits for more than 0.5 s", "the job did not finish within 3 s"):
        [(_, after)] = (text.split(f"{why}\n") for text in said if why in text)  # one rank says it, once
        _, *table = after.splitlines()[:4]
        assert [line.split()[:2] for line in table] == [["0", "all_reduce"], ["1", "-"], ["Never", "came:"]]


def stopped(local_rank):
    if local_rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    idist.all_reduce(1)


def deaf(local_rank):
    """Has taken, or blocked, what somebody may use to ask for its stack."""
    if local_rank == 1:
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
        time.sleep(60)
    idist.all_reduce(1)


def each_for_another(local_rank):
    pair = torch.distributed.new_group([0, 1])
    torch.distributed.all_reduce(torch.ones(1), group=[pair, None, None][local_rank])


SILENT = (stopped, deaf, each_for_another)


@pytest.fixture(scope="module")
def silent():
    return {work: str(error) for work, error in timed_out(SILENT)[1].items()}


@linux
def test_a_time_out_says_only_what_is_known(silent):
    assert "in its set-up" not in "".join(silent.values())
    assert "Missing: rank 1 was stopped, by SIGSTOP or a debugger." in silent[stopped]
    assert "No answer from: rank 1." in silent[stopped]
    assert "Never came" not in silent[stopped]  # it may have come
    assert re.search(r"Missing: rank 1 was at test_launch_faults.py:\d+ in deaf\.", silent[deaf])
    assert re.search(r"rank 1 was here \(most recent call first\):\n  File .* in deaf\n", silent[deaf] + "\n")
    assert "Never came" in silent[each_for_another]
    assert "No rank is missing" not in silent[each_for_another]


class Raising:
    """A result or an exception that ends who reads it, or who sends it."""

    def __init__(self, error, sent=True):
        self.error, self.sent = error, sent

    def __reduce__(self):
        if not self.sent:
            raise self.error
        return raise_it, (self.error,)


def raise_it(error):
    raise error


class RaisingError(Raising, Exception):
    pass


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), BaseException("odd")])
def test_no_result_and_no_exception_ends_this_process(error):
    name = type(error).__name__
    said = failing(lambda rank: Raising(error))
    assert f"returned what cannot be unpickled here: {name}" in str(said)
    assert "Return numbers, tensors, or containers of them; of a model ddl.full_state_dict(model)." in str(said)
    assert f"cannot be sent back: {error}" in str(failing(lambda rank: Raising(error, sent=False)))
    for sent in (True, False):
        said = failing(lambda rank, sent=sent: raise_it(RaisingError(error, sent)))
        assert "RaisingError" in said.summary
        assert said.exception is None


def test_code_that_is_not_python_is_no_set_up():
    sleeping = functools.partial(max, 60.0, key=time.sleep)  # for 60 seconds, on each rank
    error = failing(sleeping, nproc=3, timeout=time_to_start(3), within=10)
    assert re.search(r"2 .*in (its|their) functions?, in code that is not Python", str(error))
