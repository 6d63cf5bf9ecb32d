"""What torchrun's ranks need besides torch: to meet again after a restart, and to end when torchrun is killed.

torchrun keeps one store for all its restarts and gives it to the ranks without separating the rounds (torch 2.13:
``DynamicRendezvousHandler`` makes its server once, ``rendezvous.py`` takes it for a new one; pytorch issue 135712 is
of the same kind). Restarted ranks then read the addresses of the dead ones: "Gloo connectFullMesh failed: Connection
refused". Neither the number of restarts, which each agent counts for itself, nor anything else in the environment is
the same for all ranks of a round and new in it. So rank 0 gives the round a name.

A torchrun that is killed (``kill -9``, the out-of-memory killer) leaves its ranks behind. gloo does not always tell
them that their peers have ended: its thread may spin on a closed socket until the group's limit, half an hour by
default (seen with torch 2.13, once in some 60 such ends).

gloo's threads drop the tensors of a collective after it has returned, for which they need Python's lock. Python ends a
thread that asks for it while Python itself ends; in a destructor of C++ that aborts the process ("terminate called
without an active exception", exit code -6), after all work is done: with torch 2.13 in some 5 % of ends on a busy
machine.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

_SCHEME = "ignite-ddl"
_KEY = "ignite_ddl/round"


def address_in_torchrun() -> str | None:
    """Where ranks meet if torchrun's agent keeps the store; None elsewhere."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    with contextlib.suppress(RuntimeError):  # it is registered
        register_rendezvous_handler(_SCHEME, _rendezvous)
    return f"{_SCHEME}://"


def _rendezvous(url: str, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple]:
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    yield dist.PrefixStore(_round_name(store, rank, world_size, timeout), store), rank, world_size


def _round_name(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that is new in this round, the same on all its ranks.

    Each rank stores a token and waits for rank 0's answer to it: answers to tokens of dead ranks are never read.
    """
    token = uuid.uuid4().hex
    if rank > 0:
        store.set(f"{_KEY}/{rank}", token)
        name = store.get(f"{_KEY}/answer to {token}").decode()
        store.set(f"{name}/{rank} is here", "")
        return name
    absent, deadline, answered = set(range(1, world_size)), time.monotonic() + timeout.total_seconds(), set()
    while absent:
        for other in sorted(absent):
            if store.check([f"{_KEY}/{other}"]):
                other_token = store.get(f"{_KEY}/{other}").decode()
                if other_token not in answered:
                    answered.add(other_token)
                    store.set(f"{_KEY}/answer to {other_token}", token)
                if store.check([f"{token}/{other} is here"]):
                    absent.discard(other)
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(absent)} did not join the job within {timeout}")
        time.sleep(0.01)
    return token


@functools.cache  # one thread, however many jobs are joined
def end_with_torchrun() -> None:
    """Ends this process soon after the torchrun that started it was killed; does nothing elsewhere."""
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(1.0)
        rank = os.environ.get("RANK", "?")
        with contextlib.suppress(Exception):
            print(f"rank {rank} ends: torchrun, which started it, was killed", file=sys.stderr, flush=True)
        os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ and os.name == "posix":
        threading.Thread(target=watch, name="ignite_ddl torchrun watch", daemon=True).start()


@functools.cache
def end_after_gloo() -> None:
    """Lets Python end only when gloo's threads rest: not running, and not waiting for Python's lock or a core."""

    def wait() -> None:
        rests, deadline = 0, time.monotonic() + 5
        while rests < 4 and time.monotonic() < deadline:
            time.sleep(0.005)  # without the lock, which a thread that waits for it takes meanwhile
            rests = 0 if _gloo_runs() else rests + 1

    atexit.register(wait)


def _gloo_runs() -> bool:
    for thread in Path("/proc/self/task").glob("*/stat"):  # of Linux; nothing elsewhere
        with contextlib.suppress(OSError):  # it has ended
            name, state = thread.read_text().split("(", 1)[1].rsplit(")", 1)
            if "gloo" in name and state.split()[0] == "R":
                return True
    return False
