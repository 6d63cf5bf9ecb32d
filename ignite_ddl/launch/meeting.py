"""The rendezvous of ranks on several machines: names ranks that are missing, or that joined twice.

torch waits for a missing machine silently, and takes a machine that was started twice, or the file of an
earlier job, for the ranks that it knows.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlparse
from urllib.request import url2pathname

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

RESOLVE_SECONDS = 10.0  # how long an address may take to be known: machines of a cluster start together
_PRINT_AFTER = 30.0  # seconds after which a machine says for whom it waits
_KEY = "ignite_ddl/meeting"


class Meeting:
    """Where the ranks of a job meet.

    Args:
        init_method: "env://" or "file://...".
        nproc: ranks on each machine, if that is known.
        note: a file that says for whom this rank waits, while it does.
        prints: whether this rank prints that after half a minute.
        seed: of this machine; when the ranks have met, machine 0's.
    """

    def __init__(
        self, init_method: str, nproc: int | None = None, note: Path | None = None, prints: bool = True, seed: int = 0
    ) -> None:
        self.seed = seed
        self.nproc, self.note, self.prints, self.waits_for = nproc, note, prints, ""
        self.path = urlparse(init_method).path
        # A scheme can be registered once in a process.
        scheme = f"ignite-ddl-{id(self)}-{time.monotonic_ns()}"
        self.address = f"{scheme}://"
        register_rendezvous_handler(scheme, self._rendezvous)

    def _rendezvous(self, url: str, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple]:
        query = dict(parse_qsl(urlparse(url).query))
        rank, world_size = int(query["rank"]), int(query["world_size"])
        deadline = time.monotonic() + timeout.total_seconds()
        timer = threading.Timer(
            _PRINT_AFTER, lambda: print(f"rank {rank} {self.waits_for}", file=sys.stderr, flush=True)
        )
        timer.daemon = True
        if self.prints:
            timer.start()
        try:
            if self.path:
                where = f"through {self.path}"
                store, _, _ = next(rendezvous(f"file://{self.path}?rank={rank}&world_size={world_size}"))
            else:
                host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                where = f"at {host}:{port}"
                if rank > 0:
                    self._wait_for_machine_0(host, port, where, deadline)
                store = dist.TCPStore(host, port, world_size, rank == 0, timeout=timeout, wait_for_workers=False)
            self._check_in(store, rank, world_size, where, deadline)
        finally:
            timer.cancel()
            if self.note:
                self.note.unlink(missing_ok=True)
        yield store, rank, world_size

    def _wait_for_machine_0(self, host: str, port: int, where: str, deadline: float) -> None:
        """Not left to torch, which sleeps up to half a minute between two attempts."""
        self._note_wait(f"waits {where} for {self._name_absent([0])}")
        while True:
            try:
                return socket.create_connection((host, port), timeout=5).close()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._name_absent([0])} did not come {where}: {error}") from None
                time.sleep(0.1)

    def _check_in(self, store: dist.Store, rank: int, world_size: int, where: str, deadline: float) -> None:
        keys = [f"{_KEY}/{other}" for other in range(world_size)]
        if rank == 0:
            store.set(f"{_KEY}/seed", str(self.seed))
        if store.add(keys[rank], 1) > 1:
            twice = f"rank {rank} is there twice {where}: "
            if self.nproc:
                twice += f"node_rank={rank // self.nproc} was given to two processes"
            else:
                twice += f"RANK={rank} was given to two processes"
            store.set(f"{_KEY}/twice", twice + (", or the file is of an earlier job: remove it" if self.path else ""))
        while True:
            if store.check([f"{_KEY}/twice"]):
                raise RuntimeError(store.get(f"{_KEY}/twice").decode())
            if store.check(keys):
                self.seed = int(store.get(f"{_KEY}/seed"))
                return
            absent = [other for other in range(world_size) if not store.check(keys[other : other + 1])]
            self._note_wait(f"waits {where} for {self._name_absent(absent)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._name_absent(absent)} did not come {where}")
            time.sleep(0.05)

    def _note_wait(self, waits_for: str) -> None:
        if self.note and waits_for != self.waits_for:
            self.note.write_text(waits_for)
        self.waits_for = waits_for

    def _name_absent(self, absent: list[int]) -> str:
        ranks = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
        machines = sorted({rank // self.nproc for rank in absent}) if self.nproc else []
        names = " and ".join(f"node_rank={machine}" for machine in machines)
        return f"{names} ({ranks})" if names else ranks


def file_of(init_method: str) -> Path | None:
    """The file by which ranks meet, if it is one."""
    path = urlparse(init_method).path
    if not init_method.startswith("file:"):
        return None
    return Path(url2pathname(path) if sys.platform == "win32" else path)  # as torch: no %20 elsewhere


def check_file(init_method: str, alone: bool) -> None:
    """Raises a ValueError if ranks cannot meet by this file, for which they would wait until a time-out.

    Args:
        init_method: "file://...".
        alone: whether no rank of the job is there before this call: then the file should be new.
    """
    path, folder = file_of(init_method), file_of(init_method).parent
    wrong = None
    if urlparse(init_method).netloc or not path.is_absolute():
        wrong = "a file is written with three slashes, as file:///folder/file"
    elif path.is_dir():
        wrong = f"{path} is a folder"
    elif not folder.is_dir():
        wrong = f"there is no folder {folder} on this machine"
    elif alone and path.exists() and path.stat().st_size:
        wrong = "that file is not empty: another job meets by it, or an earlier one has left it. Remove it if none does"
    else:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            wrong = f"it cannot be written here: {error.strerror}"
    if wrong:
        raise ValueError(
            f"init_method should be a new file in a folder that exists, but given {init_method!r}: {wrong}"
        )


def check_address(host: str, port: int, is_machine_0: bool, patience: float = RESOLVE_SECONDS) -> None:
    """Raises a ValueError if ranks cannot meet there.

    Args:
        host: of machine 0.
        port: of machine 0.
        is_machine_0: whether this is machine 0, where the port should be free.
        patience: seconds until the name should be known.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(host, port)
            break
        except (OSError, UnicodeError) as error:  # the latter: a label that is too long
            if time.monotonic() > deadline:
                raise ValueError(
                    f"master_addr should be the name or address of machine 0, but given {host!r}, which this machine "
                    f"cannot find: {error}"
                ) from None
            time.sleep(0.2)
    if not is_machine_0:
        return
    with socket.socket() as probe:
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a closed connection counts for a minute
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            taken = "another process has it" if getattr(error, "errno", 0) == errno.EADDRINUSE else str(error)
            raise ValueError(f"master_port should be free on this machine, but given {port}: {taken}") from None
