"""Many launches, kills at random times, strangers at the ports: nothing grows, nothing is left, nothing is silent."""

import contextlib
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ignite.distributed as idist
import psutil
import pytest
import torch
from ranks import comes_true, parallel

import ignite_ddl as ddl
from ignite_ddl.launch.rank import on_signal, wait_before_result

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


# ---------------------------------------------------------------------------------------------- 500 launches


def of_each_kind(local_rank, number):
    wait_before_result(lambda: None)
    on_signal(signal.SIGTERM, lambda: None)
    total = idist.all_reduce(torch.ones(1000)).sum().item()
    if number % 10 == 9 and local_rank == 1:
        raise ValueError("as every tenth")
    return total


def held():
    """What this process and its server of ranks hold: open files, threads, megabytes, entries of folders."""
    gc.collect()
    here = psutil.Process()
    [server] = [child for child in here.children() if "forkserver" in " ".join(child.cmdline())]
    processes = {"parent": here, "server": server}
    counts = {f"{name} files": process.num_fds() for name, process in processes.items()}
    counts |= {f"{name} threads": process.num_threads() for name, process in processes.items()}
    counts |= {f"{name} MB": process.memory_info().rss / 2**20 for name, process in processes.items()}
    counts["processes"] = len(here.children(recursive=True))
    counts["handlers"] = str([signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)])
    mine = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(("ignite_ddl_", "pymp-"))]
    return counts | {"in /tmp": len(mine), "in /dev/shm": len(os.listdir("/dev/shm"))}


def test_500_launches_hold_no_more_than_50(tmp_path, monkeypatch):
    parallel(1).run(abs)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for number in range(500):
        try:
            assert parallel(2).run(of_each_kind, number) == [2000.0] * 2
        except ddl.RankError:
            assert number % 10 == 9
        if number == 49:
            before = held()
    after = held()
    for name, most in (("parent MB", 10), ("server MB", 5)):
        assert after.pop(name) - before.pop(name) < most, name
    assert after == before


# ------------------------------------------------------------------------------------------------ 70 kills

WHOLE = "[0, 1, 2]\n"
LOOP = """
import os, random, sys, time
import ignite.distributed as idist
import torch
import ignite_ddl as ddl

def work(local_rank, seconds):
    until = time.monotonic() + seconds
    while idist.all_reduce(float(time.monotonic() < until)) == 3.0:
        torch.rand(100, 100) @ torch.rand(100, 100)
    return local_rank

while True:
    try:
        print(ddl.Parallel("gloo", 3, timeout=60, threads_per_rank=1).run(work, random.random() / 2), flush=True)
    except ddl.RankError as error:
        print("failed:", error.summary.splitlines()[0], flush=True)
"""


def family(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def servers_and_ranks(pid):
    """Of a process that launches; the server, which has the same command as its ranks, comes first."""
    return [child for child in family(pid) if "forkserver" in " ".join(command_of(child))]


@pytest.mark.parametrize("victim", ["a rank", "the server", "the parent"])
def test_kills_at_random_times_leave_nothing(victim):
    draw, seen, said, run = random.Random(victim), set(), [], None
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # short: a long one is replaced by /tmp itself, for its sockets
    command = [sys.executable, "-c", LOOP]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        for _ in range({"a rank": 30, "the server": 20, "the parent": 20}[victim]):
            if run is None:
                run = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(folder)}, **pipes)
                threading.Thread(target=lambda out=run.stdout: said.extend(out), daemon=True).start()
                assert comes_true(lambda: WHOLE in said, within=90)
            time.sleep(draw.random())
            found = []
            while len(found) < 2:
                found = servers_and_ranks(run.pid)
                assert run.poll() is None, "".join(said[-30:])
            server, *ranks = found
            seen |= set(family(run.pid))
            before = len(said)
            with contextlib.suppress(psutil.NoSuchProcess):
                {"a rank": draw.choice(ranks), "the server": server, "the parent": run}[victim].kill()
            if victim != "the parent":
                assert goes_on(said, before), "".join(said[-30:])
                continue
            run.wait()
            check_gone(seen, folder)
            run = None
            said.clear()
        if run:
            run.kill()
            run.wait()
        check_gone(seen, folder)
        causes = "was killed by SIGKILL", "multiprocessing's forkserver, which start"
        assert all(any(cause in line for cause in causes) for line in said if line.startswith("failed")), set(said)
    finally:
        if run:
            run.kill()
        subprocess.run(["rm", "-rf", folder], check=True)


def goes_on(said, before):
    return comes_true(lambda: WHOLE in said[before + 1 :], within=60)


def check_gone(processes, folder):
    assert comes_true(lambda: not any(map(runs, processes)), within=90), [p.as_dict() for p in processes if runs(p)]
    assert comes_true(lambda: not left(folder), within=90), left(folder)


def runs(process):
    """Whether it is this process, and not another one with its number."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def command_of(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def left(folder):
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor")]


# ------------------------------------------------------------------------------------------------ strangers


def summing(local_rank, seconds):
    until, size, steps = time.monotonic() + seconds, idist.get_world_size(), 0
    while idist.all_reduce(float(time.monotonic() < until)) == size:
        assert bool((idist.all_reduce(torch.ones(10_000)) == size).all())
        torch.distributed.new_group(range(size))  # meets at the store
        steps += 1
    return steps


@contextlib.contextmanager
def strangers(addresses):
    """Send bytes of their own to each address, and hang up or stay."""
    draw, over, sent, held = random.Random(0), threading.Event(), [], []
    words = [b"", b"\0", b"\xff" * 64, b"GET / HTTP/1.0\r\n\r\n", *map(draw.randbytes, (8, 100, 20_000))]

    def talk():
        while not over.wait(0.02):
            for address in addresses():
                with contextlib.suppress(OSError):
                    one = socket.create_connection(address, timeout=1)
                    one.sendall(draw.choice(words))
                    sent.append(address)
                    held.append(one) if draw.random() < 0.5 else one.close()

    thread = threading.Thread(target=talk)
    thread.start()
    yield sent
    over.set()
    thread.join()
    for one in held:
        one.close()


def listening():
    """Where this process's ranks listen: gloo's ports."""
    for child in family(os.getpid()):
        with contextlib.suppress(psutil.Error):
            yield from (one.laddr for one in child.net_connections("tcp") if one.status == psutil.CONN_LISTEN)


def test_strangers_at_gloos_ports_change_nothing():
    with strangers(listening) as sent:
        for _ in range(5):
            steps = parallel(3).run(summing, 1.0)
            assert steps[0] > 0
            assert len(set(steps)) == 1
    assert len(sent) > 20


def test_strangers_at_the_stores_port_of_two_machines_change_nothing():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    where = {"nnodes": 2, "master_addr": address[0], "master_port": address[1]}
    with strangers(lambda: [address]) as sent, ThreadPoolExecutor(2) as machines:
        runs = [machines.submit(parallel(2, node_rank=node, **where).run, summing, 2.0) for node in range(2)]
        steps = [step for run in runs for step in run.result()]
    assert steps[0] > 0
    assert len(set(steps)) == 1
    assert len(sent) > 20
