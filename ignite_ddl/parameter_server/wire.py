"""The connection between workers and servers. The only file that uses ``torch.distributed.rpc``."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections import defaultdict
from multiprocessing import util
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from ignite_ddl.parameter_server.server import Shard

__all__ = ["LONGEST_SECONDS", "Servers", "join", "worker_ended"]
# Plain TCP: TensorPipe's shared memory polls, which costs half a core per waiting process.
_TRANSPORT = {"_transports": ["uv"], "_channels": ["basic"]}
_THREADS = 8  # threads that serve requests; they may wait for a lock, never for a worker
LONGEST_SECONDS = 2e6  # limit of a timeout: torch counts milliseconds in 32 bits
_JOIN_SECONDS = 600.0  # limit for all workers and servers to join
_servers: list[rpc.WorkerInfo] = []  # in order, once this process has joined them
_gone: dict[int, str | None] = {}  # on a server: the workers that have ended, as Shard.gone
_shards: dict[int, Shard] = defaultdict(lambda: Shard(_gone))  # on a server, by the ParameterServer's number
_shards_lock = threading.Lock()  # for _gone and _shards
_numbers = itertools.count()  # on a worker: the numbers of its ParameterServers, the same on all workers


def join(index: int, workers: int, servers: int, init_method: str) -> None:
    """Joins the RPC group of all workers and servers; returns once all have joined.

    Args:
        index: this process's number: the workers' ranks first, then the servers.
        workers: number of workers.
        servers: number of servers.
        init_method: URL of the rendezvous, "file://...".
    """
    name = f"worker{index}" if index < workers else f"server{index - workers}"
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=init_method, rpc_timeout=_JOIN_SECONDS, num_worker_threads=_THREADS, **_TRANSPORT
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own use of gloo
        rpc.init_rpc(name, rank=index, world_size=workers + servers, rpc_backend_options=options)
    util.Finalize(None, rpc.shutdown, args=(False,), exitpriority=1)  # without waiting for others
    _servers[:] = [rpc.get_worker_info(f"server{i}") for i in range(servers)]


def worker_ended(worker: int, failed: str | None) -> str | None:
    """Called on a server when a worker returned or failed. Returns why the others cannot continue, or None."""
    with _shards_lock:
        _gone[worker] = failed  # for shards made later
        shards = [_shards[number] for number in sorted(_shards)]
    can_go_on = [shard.end(worker, failed) for shard in shards]
    if failed is None or can_go_on and can_go_on[-1]:  # earlier shards are no longer in use
        return None
    return shards[-1].why_not() if shards else "It failed before a ParameterServer was made."


def _answer(number: int, method: str, *arguments: Any) -> Any:
    """Runs a shard's method in a thread of the server, for a worker."""
    with _shards_lock:
        shard = _shards[number]
    return getattr(shard, method)(*arguments)


@rpc.functions.async_execution
def _answer_when_ready(*request: Any) -> Future:
    """As _answer, for methods that return a Future, without blocking a thread."""
    return _answer(*request)


class Servers:
    """A worker's connection to the servers of one ``ParameterServer``; in-process if no server was started.

    Args:
        mode: the mode of the ``ParameterServer``, for error messages.
        timeout: seconds that a request may take.
    """

    def __init__(self, mode: str, timeout: float) -> None:
        self.mode, self.timeout = mode, timeout
        self._joined = list(_servers)
        self.count = len(self._joined)
        self._here = None if self._joined else Shard()
        self._number = next(_numbers)

    def ask(self, method: str, requests: list[tuple], servers: slice = slice(None)) -> list[Any]:
        """Sends a request to all servers in parallel, then waits for all answers.

        Args:
            method: a method of :class:`~ignite_ddl.parameter_server.server.Shard`.
            requests: the arguments for each server.
            servers: the servers to ask. Default: all.

        Raises:
            ConnectionError: if a server is gone.
            TimeoutError: if one does not answer in time.
        """
        if self._here is not None:
            answers = [getattr(self._here, method)(*request) for request in requests]
            return [answer.wait() if isinstance(answer, Future) else answer for answer in answers]
        asked = self._joined[servers]
        try:
            # Workers make their ParameterServer at different times, for example after loading data.
            limit = _JOIN_SECONDS if method in ("create", "join") else self.timeout
            function = _answer_when_ready if method in ("join", "pull") else _answer
            futures = [
                rpc.rpc_async(server, function, args=(self._number, method, *request), timeout=limit)
                for server, request in zip(asked, requests, strict=True)
            ]
        except RuntimeError as error:
            raise ConnectionError(f"a parameter server is gone, at {method}: {error}") from None
        return [self._wait(server.name, method, f, limit) for server, f in zip(asked, futures, strict=True)]

    def _wait(self, server: str, method: str, future: Future, limit: float) -> Any:
        try:
            return future.wait()
        except RuntimeError as error:
            if "On WorkerInfo" in str(error):  # raised on the server, for example by the optimizer
                raise
            if "timeout" not in str(error):
                raise ConnectionError(f"{server} is gone, at {method}: {error}") from None
        waits_for = "something"
        with contextlib.suppress(RuntimeError):
            waits_for = rpc.rpc_sync(server, _answer, args=(self._number, "waits_for"), timeout=2.0)
        raise TimeoutError(
            f"{method} took more than {limit:g} s: {server} (mode {self.mode!r}) waits for workers {waits_for}"
        )
