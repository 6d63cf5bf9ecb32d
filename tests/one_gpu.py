"""Several NCCL ranks on one GPU, or with gloo on the CPU, to try what starts them.

NCCL refuses two ranks on one GPU of one host. So each rank says that it is on a host of its own (NCCL_HOSTID), and
they talk through sockets: what they compute can be checked, not how fast.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch


def gpu_or_exit(backend: str) -> str:
    """The device's name; without a GPU, NCCL ranks exit with 77, which `make test-all` counts as skipped."""
    if backend == "gloo":
        return "the CPU"
    if not torch.cuda.is_available():
        print("SKIPPED: torch sees no GPU here; --backend gloo tries this program without one")
        sys.exit(77)
    return torch.cuda.get_device_name(0)


def run_ranks(world: int, arguments: Sequence[str], folder: Path, seconds: float) -> str:
    """Runs ``python ARGUMENTS`` as each rank, with ``folder``/RANK.log, until all end, or 3 seconds after a failure.

    Returns:
        str: "", or the log of the first rank that failed, or that did not end in time.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "NCCL_SOCKET_IFNAME": "lo"}
    shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(world):
        environ = os.environ | shared | {"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}
        with (folder / f"{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen([sys.executable, *arguments], env=environ, stdout=log, stderr=log))
    end = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
        if any(rank.poll() for rank in ranks):
            end = min(end, time.monotonic() + 3)  # the others' own words
        time.sleep(0.1)
    failed = [number for number, rank in enumerate(ranks) if rank.poll()]
    failed += [number for number, rank in enumerate(ranks) if rank.poll() is None]
    for rank in ranks:
        rank.kill()
        rank.wait()
    return f"rank {failed[0]}: {(folder / f'{failed[0]}.log').read_text()[:3000]}" if failed else ""
