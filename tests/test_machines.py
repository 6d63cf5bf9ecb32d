"""The example of chapter 23 on two hosts: by torchrun, by Slurm, on a slow link, cut off, and badly set up.

tests/extra_slurm.sh makes the hosts and runs this file; anywhere else it skips. With IGNITE_DDL_RECORD set, what it
sees goes into ignite_ddl/course/recorded_machines.json, which the chapter shows.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import pytest
import torch

NODE2 = os.environ.get("IGNITE_DDL_NODE2")
pytestmark = pytest.mark.skipif(NODE2 is None, reason="needs two hosts and Slurm: bash tests/extra_slurm.sh")
ROOT = Path(__file__).parents[1]
SCRIPT = "examples/many_machines.py"
SCRATCH = "/run/scratch"  # a disk of its own on each host
RECORD = ROOT / "ignite_ddl/course/recorded_machines.json"
ON_NODE2 = f"nsenter --target {NODE2} --net --uts --mount env -C {ROOT}".split()
TORCHRUN = "torchrun --nnodes 2 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint node1:29500"
LIMIT = 300  # seconds: a hang, not a busy machine
WAIT = 8  # seconds that a rank waits for others where it waits in vain


class Hosts:
    """Runs commands on the two hosts; what is left of them ends with the test."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []

    def start(self, command, node=1, **environ):
        """Starts a command; its output grows in the file ``process.out``."""
        out = self.folder / f"out{len(self.processes)}"
        words = [sys.executable if word == "python" else word for word in command.split(" ")]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
        with out.open("w") as file:
            process = subprocess.Popen(
                (ON_NODE2 if node == 2 else []) + words,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=ROOT,
                start_new_session=True,
            )
        process.out = out
        self.processes.append(process)
        return process

    def run(self, *commands, **environ):
        """Runs a command on node1 and, if there is a second, that one on node2: [(status, output, seconds)]."""
        began = time.monotonic()
        started = [self.start(command, node, **environ) for node, command in enumerate(commands, 1)]
        return [(p.wait(LIMIT), p.out.read_text(), time.monotonic() - began) for p in started]

    def close(self):
        everywhere("iptables -F", check=True)
        everywhere("ip link set eth1 up", check=True)
        everywhere("tc qdisc del dev eth1 root")
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def everywhere(command, **options):
    for where in ([], ON_NODE2):
        subprocess.run(where + command.split(), stderr=subprocess.DEVNULL, **options)


@pytest.fixture
def hosts(tmp_path):
    everywhere(f"find {SCRATCH} -type f -delete", check=True)
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.close()


def wait_for(text, process):
    """Waits until a process has printed a text; returns the time."""
    end = time.monotonic() + LIMIT
    while text not in process.out.read_text():
        assert time.monotonic() < end
        assert process.poll() is None, process.out.read_text()
        time.sleep(0.005)
    return time.monotonic()


def record(name, **values):
    if "IGNITE_DDL_RECORD" not in os.environ:
        return
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    slurm = subprocess.check_output(["srun", "-V"], text=True).split()[1]
    known["date"] = date.today().isoformat()
    known["machine"] = f"two hosts (network namespaces) of one machine with {os.cpu_count()} cores"
    known["versions"] = f"torch {torch.__version__.split('+')[0]}, Slurm {slurm}"
    known[name] = json.loads(json.dumps(values), parse_float=lambda number: float(f"{float(number):.3g}"))
    RECORD.write_text(json.dumps(known, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def losses(output):
    return torch.tensor([float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)], dtype=torch.float64)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    hosts = Hosts(tmp_path_factory.mktemp("one"))
    weights = hosts.folder / "weights"
    [(status, output, _)] = hosts.run(f"python {SCRIPT} --folder {SCRATCH} --save {weights}")
    assert status == 0, output
    return losses(output), torch.load(weights)


@pytest.mark.parametrize("launcher", ["ddl.Parallel", "torchrun", "srun", "sbatch", "torchrun by srun"])
def test_each_launcher_gives_the_numbers_of_one_process(launcher, one_process, hosts, tmp_path):
    saved = tmp_path / "weights"
    to_files = f"--folder {SCRATCH} --save {saved}"
    commands = {
        "ddl.Parallel": [f"python {SCRIPT} --ranks 4 --tp 2"],
        "torchrun": [f"{TORCHRUN} {SCRIPT} --tp 2"] * 2,
        "srun": [f"srun --nodes 2 --ntasks-per-node 2 python {SCRIPT} --tp 2"],
        "sbatch": ["sbatch examples/machines.sbatch"],
        "torchrun by srun": [f"srun --nodes 2 --ntasks-per-node 1 {TORCHRUN} {SCRIPT} --tp 2"],
    }[launcher]
    options = [f"--wait --output={tmp_path}/job" if launcher == "sbatch" else ""] * len(commands)
    real = [
        command.replace("sbatch ", f"sbatch {option} ") + f" {to_files}"
        for command, option in zip(commands, options, strict=True)
    ]
    results = hosts.run(*real)
    output = "".join(output for _, output, _ in results)
    if launcher == "sbatch":
        output += (tmp_path / "job").read_text()
    assert [status for status, _, _ in results] == [0] * len(commands), output

    error = (losses(output) - one_process[0]).abs().max()
    for name, weight in torch.load(saved).items():
        error = max(error, (weight - one_process[1][name]).abs().max())
    assert error <= 1e-12
    one_host = launcher == "ddl.Parallel"
    places = {
        int(r): (h, int(local)) for h, r, local in re.findall(r"(node\d): rank (\d) of 4, local rank (\d)", output)
    }
    expected = [("node1", 0), ("node1", 1), ("node1", 2), ("node1", 3)]
    if not one_host:
        expected[2:] = [("node2", 0), ("node2", 1)]
    assert [places[rank] for rank in range(4)] == expected
    assert sorted(re.findall(r"(node\d): rank \d downloads", output)) == ["node1", "node2"][: 1 if one_host else 2]
    shown = re.findall(r"(?:\[rank \d\] )?node\d: rank.*|(?:\[rank 0\] )?step \d+: loss.*", output)
    record(f"launched by {launcher}", commands=commands, lines=shown, error=float(error))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--nodes 2 --ntasks 4", [1, 1, 1, 2]),  # a machine is filled before the next one gets a rank
        ("--nodes 2 --ntasks-per-node 2", [1, 1, 2, 2]),
        ("--nodes 2 --ntasks-per-node 2 --distribution cyclic", [1, 2, 1, 2]),
    ],
)
def test_how_slurm_deals_ranks(options, expected, hosts):
    [(status, output, _)] = hosts.run(f"srun {options} --label hostname")
    assert status == 0
    nodes = [int(node) for _, node in sorted(re.findall(r"(\d): node(\d)", output))]
    record(f"dealt by srun {options}", nodes=nodes)
    assert nodes == expected


# --------------------------------------------------------------------------------------------------- the slow link


def sent_and_received():
    [eth1] = json.loads(subprocess.check_output(["ip", "-s", "-j", "link", "show", "eth1"]))
    return eth1["stats64"]["tx"]["bytes"] + eth1["stats64"]["rx"]["bytes"]


def test_tp_inside_the_hosts_sends_less_than_tp_across_them(hosts):
    """The same 8 ranks, 4 a host; Slurm deals them in blocks (tp inside) or like cards (tp across)."""
    everywhere("tc qdisc add dev eth1 root tbf rate 50mbit burst 64kb latency 400ms", check=True)
    seen = {}
    for placement, distribution in (("inside", "block"), ("across", "cyclic")):
        job = hosts.start(
            f"srun --nodes 2 --ntasks-per-node 4 --distribution {distribution} python {SCRIPT} --tp 4 "
            f"--width 64 --steps 6 --folder {SCRATCH}"
        )
        began, before = wait_for("step 1:", job), sent_and_received()
        ended, after = wait_for("step 6:", job), sent_and_received()
        assert job.wait(LIMIT) == 0
        bytes_a_step, seconds = (after - before) / 5, (ended - began) / 5
        record(
            f"slow link, tp {placement}", megabit_per_s=50, bytes_per_step=round(bytes_a_step), seconds_per_step=seconds
        )
        seen[placement] = bytes_a_step, seconds, losses(job.out.read_text())
    assert (seen["inside"][2] - seen["across"][2]).abs().max() <= 1e-12
    assert seen["across"][0] > 5 * seen["inside"][0]
    assert seen["across"][1] > seen["inside"][1]


# -------------------------------------------------------------------------------------------- what hangs or fails


@pytest.mark.parametrize("cut", ["iptables -A INPUT -i eth1 -j DROP", "ip link set eth1 down"])
def test_a_host_that_is_cut_off_ends_the_other(cut, hosts):
    command = f"{TORCHRUN} {SCRIPT} --tp 2 --steps 10000 --group-timeout {WAIT} --folder {SCRATCH}"
    first, second = (hosts.start(command, node) for node in (1, 2))
    wait_for("step 3:", first)
    subprocess.run(ON_NODE2 + cut.split(), check=True)
    began = time.monotonic()
    seconds = {
        f"ranks of node{n}": wait_for("group_timeout of ddl.Parallel", p) - began
        for n, p in enumerate((first, second), 1)
    }
    first.wait(LIMIT)
    seconds["torchrun of node1"] = time.monotonic() - began
    output = first.out.read_text()
    # The second where both ranks wait in the foreground, and an operation in the background has timed out.
    assert re.search("RuntimeError: .*(Timed out waiting|Application timeout caused pair closure)", output)
    [note] = set(re.findall(r"rank [01] (on node1 waited for another rank, .*)", output))
    record(f"cut off by {cut}", group_timeout=WAIT, seconds=seconds, message=message(output), note=note)
    assert first.returncode != 0
    assert max(seconds.values()) < WAIT + 60  # torchrun gives a rank 30 s to end, and the machine is busy


def message(output):
    """The last error of an output, in one line, without what a machine decides."""
    found = re.findall(r"^(?:\[rank\d\]: |\[rank \d\] )?((?:[\w.]+\.)?\w*(?:Error|Exception)\b.*)", output, re.M)
    found = [line for line in found if "ChildFailedError" not in line]  # torchrun's own
    shown = found[-1] if found else output.strip().splitlines()[-1]
    shown = re.sub(r"\[?(?:/\w+)+/(\w+\.(?:cc|h):\d+)\]?", r"\1", shown)  # without a folder
    return re.sub(r"(\[[\d.]+\]):\d+\S*", r"\1", shown)  # without a port


CLOSED = "iptables -A INPUT -i eth1 -p tcp --syn"
# name: what is done on both hosts before, environment variables, more arguments on node2, what node1 or node2 then says
FAILURES = {
    "a wrong interface": ([], {"GLOO_SOCKET_IFNAME": "eth7"}, "", "eth7"),
    "the loopback interface": ([], {"GLOO_SOCKET_IFNAME": "lo"}, "", "127.0.0.1"),
    "127.0.0.1 as master": ([], {"MASTER_ADDR": "127.0.0.1"}, "", r"rank 1 did not come at 127\.0\.0\.1:29501"),
    "a firewall before the master port": ([f"{CLOSED} -j DROP"], {}, "", "rank 1 did not come at node1:29501"),
    "a firewall before all other ports": ([f"{CLOSED} ! --dport 29501 -j DROP"], {}, "", "connectFullMesh failed"),
    "a world that nobody fills": ([], {"WORLD_SIZE": "3"}, "", "rank 2 did not come at node1:29501"),
    "another copy of the script": ([], {}, "--width 64", "appears not to match sizes"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_is_set_up_badly_ends_with_an_error(name, hosts):
    before, variables, more, expected = FAILURES[name]
    for command in before:
        everywhere(command, check=True)
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29501"} | variables
    command = f"python {SCRIPT} --group-timeout {WAIT} --folder {SCRATCH}"
    results = hosts.run(f"env RANK=0 {command}", f"env RANK=1 {command} {more}".strip(), **variables)
    assert all(status for status, _, _ in results), [output for _, output, _ in results]
    messages = [message(output) for _, output, _ in results]
    record(f"failed by {name}", wait=WAIT, messages=messages, seconds=[seconds for _, _, seconds in results])
    assert re.search(expected, "\n".join(messages)), messages


def test_a_batch_script_without_srun_is_refused(hosts, tmp_path):
    wrapped = tmp_path / "job.sh"
    wrapped.write_text(f"#!/bin/sh\n{sys.executable} {SCRIPT}\n")
    [(status, _, seconds)] = hosts.run(f"sbatch --wait -N 2 --ntasks-per-node 2 --output={tmp_path}/job {wrapped}")
    said = message((tmp_path / "job").read_text())
    record("failed by no srun", messages=[said], seconds=[seconds])
    assert status != 0
    assert "only srun starts them" in said
