"""How ranks meet: what makes it impossible is refused before anything starts, and who does not come is named."""

import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import ignite.distributed as idist
import pytest
from ranks import failing, parallel, time_to_start

import ignite_ddl as ddl


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setattr("ignite_ddl.launch.parallel.Launch", None)
    monkeypatch.setattr("ignite_ddl.launch.parallel.idist.initialize", None)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("file:///nowhere/x", "there is no folder /nowhere on this machine"),
        ("file://nowhere/x", "three slashes"),
        ("file://{}", "is a folder"),
        ("file://{}/old", "not empty: another job meets by it, or an earlier one has left it"),
        ("file:///proc/x", "it cannot be written here"),
    ],
)
@pytest.mark.parametrize("joins", [False, True])
def test_a_file_that_cannot_be_used_is_refused(tmp_path, monkeypatch, nothing_starts, address, said, joins):
    if address.startswith("file:///proc") and sys.platform != "linux":
        pytest.skip("has no /proc")
    (tmp_path / "old").write_text("of an earlier job")
    address = address.format(tmp_path)
    if joins:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        if address.endswith("old"):
            return  # other ranks of this job may have been there before
    start = ddl.Parallel("gloo", init_method=address).__enter__ if joins else parallel(2, init_method=address).run
    with pytest.raises(ValueError, match=f"init_method should be a new file .*given '{address}': .*{said}"):
        start(*() if joins else (abs,))


def test_a_file_is_removed_after_the_run(tmp_path):
    two = parallel(2, init_method=f"file://{tmp_path}/meet here")
    for _ in range(2):
        assert two.run(lambda rank: idist.all_reduce(1)) == [2, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("port", [None, 1 << 20])
def test_a_port_that_cannot_be_used_is_refused(nothing_starts, port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = port or taken.getsockname()[1]
        for more in ({}, {"nnodes": 2, "node_rank": 0}):
            with pytest.raises(
                ValueError, match=rf"master_port should be (free on this machine|a port), but given {port}"
            ):
                parallel(2, master_addr="127.0.0.1", master_port=port, **more).run(abs)


def test_an_address_that_nobody_knows_is_refused(monkeypatch, nothing_starts):
    monkeypatch.setattr("ignite_ddl.launch.parallel.RESOLVE_SECONDS", 0.3)
    for more in ({}, {"nnodes": 2, "node_rank": 1}):
        with pytest.raises(ValueError, match="master_addr should be the name .* given 'no.such.host.invalid'"):
            parallel(2, master_addr="no.such.host.invalid", master_port=12345, **more).run(abs)
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT, to meet, but given master_addr=None"):
        parallel(2, nnodes=2, node_rank=0, init_method="env://").run(abs)
    with pytest.raises(ValueError, match="given master_addr=None, master_port=12345"):
        parallel(2, master_port=12345).run(abs)


def test_a_machine_that_never_comes_is_named(tmp_path):
    started = {"nnodes": 3, "node_rank": 1, "timeout": time_to_start(2), "within": 10}
    here = f"{tmp_path}/here"
    error = failing(abs, init_method=f"file://{here}", **started)
    assert f"rank 2 waits through {here} for node_rank=0 and node_rank=2 (ranks 0, 1, 4, 5)." in str(error)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    error = failing(abs, master_addr="127.0.0.1", master_port=port, **started)
    assert f"rank 2 waits at 127.0.0.1:{port} for node_rank=0 (rank 0)." in str(error)


def test_without_a_time_out_of_the_run_that_of_the_group_ends_the_wait(tmp_path):
    error = failing(
        abs, nnodes=2, node_rank=0, init_method=f"file://{tmp_path}/here", timeout=None, group_timeout=1, within=10
    )
    assert f"raised TimeoutError: node_rank=1 (ranks 2, 3) did not come through {tmp_path}/here" in str(error)


@pytest.mark.parametrize("left", [False, True])
def test_a_machine_that_is_there_twice_is_named(tmp_path, left):
    """Or the file of an earlier job, which cannot be told from it."""
    here = {"nnodes": 2, "node_rank": 0, "init_method": f"file://{tmp_path}/here"}
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(failing, abs, timeout=time_to_start(2) if left else 60, within=20, **here)
        if left:
            first.result()
        errors = [threads.submit(failing, abs, within=20, **here).result(), first.result()]
    said = r"rank [01] is there twice through .*here: node_rank=0 was given to two processes, or the file is of an"
    for error in errors[: 2 - left]:
        assert re.search(said, str(error))


BY_HAND = """
import sys, ignite_ddl as ddl, ignite.distributed as idist
with ddl.Parallel("gloo", group_timeout=float(sys.argv[1])) as parallel:
    print(parallel.run(lambda rank: idist.all_reduce(1)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,), (0, 1, 1)])
def test_a_job_that_is_joined_by_hand_says_who_is_not_there(ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", BY_HAND, "60" if len(ranks) > 1 else "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen(command, env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
        for rank in reversed(ranks)
    ]
    start = time.monotonic()
    said = [process.communicate(timeout=90) for process in started]
    if ranks == (0, 1):
        assert [out for out, _ in said] == ["[2]\n"] * 2
    elif len(ranks) == 1:
        assert f"TimeoutError: rank {1 - ranks[0]} did not come at 127.0.0.1:{port}" in said[0][1]
        assert time.monotonic() - start < 60
    else:
        assert "rank 1 is there twice" in said[0][1] + said[1][1]
