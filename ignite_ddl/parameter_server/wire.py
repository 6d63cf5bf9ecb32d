"""The connections between workers and servers: sockets that the launcher has made, so that nobody else can connect."""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import socket
import threading
import traceback
from collections import defaultdict
from typing import IO, Any, NamedTuple

import cloudpickle
import numpy
import torch

from ignite_ddl.parameter_server.server import Shard, WaitTimeout

_JOIN_SECONDS = 600.0  # limit of making a ParameterServer: workers come at different times, after loading data
_REPORT_SECONDS = 2.0  # for a server to report that a limit has passed, and for whom it waits
_MAX_SECONDS = 2e6  # 23 days: poll counts milliseconds in 32 bits
_BUFFER = 2**17  # bytes: what is smaller is sent together
_ALIGNED = 16  # bytes: where a tensor begins
# numpy does not know all types: tensors go as if they were of another one that is as large.
_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_DISCONNECTED = OSError, EOFError, pickle.UnpicklingError  # of a connection that ends, perhaps within a message


class _Server(NamedTuple):
    name: str
    connection: socket.socket
    file: IO[bytes]  # reads from the connection, and writes to it


_servers: list[_Server] = []  # on a worker, in order
_request_lock = threading.Lock()  # on a worker: a connection has one request at a time
_finished: dict[int, str | None] = {}  # on a server: the workers that have ended, as Shard.finished
_shards: dict[int, Shard] = defaultdict(lambda: Shard(_finished))  # on a server, by the ParameterServer's number
_shards_lock = threading.Lock()  # for _finished and _shards
_numbers = itertools.count()  # on a worker: the numbers of its ParameterServers, the same on all workers


def connect(sockets: list[socket.socket]) -> None:
    """Called on a worker: its connections to the servers, in order."""
    _servers[:] = [_Server(f"server{index}", each, each.makefile("rwb", _BUFFER)) for index, each in enumerate(sockets)]


def serve(sockets: list[socket.socket]) -> None:
    """Called on a server: answers each worker in a thread of its own, which may wait for other workers."""
    for each in sockets:
        threading.Thread(target=_serve, args=(each,), name="ignite_ddl server", daemon=True).start()


def worker_ended(worker: int, failed: str | None) -> str | None:
    """Called on a server when a worker returned or failed. Returns why the others cannot continue, or None."""
    with _shards_lock:
        _finished[worker] = failed  # for shards made later
        shards = [_shards[number] for number in sorted(_shards)]
    can_go_on = [shard.end(worker, failed) for shard in shards]
    if failed is None or can_go_on and can_go_on[-1]:  # earlier shards are no longer in use
        return None
    return shards[-1].stop_reason() if shards else "It failed before a ParameterServer was made."


def _serve(worker: socket.socket) -> None:
    with contextlib.suppress(*_DISCONNECTED), worker, worker.makefile("rwb", _BUFFER) as file:
        while True:
            number, method, arguments = _receive(file)
            with _shards_lock:
                shard = _shards[number]
            try:
                answer = "", getattr(shard, method)(*arguments)
            except BaseException as error:  # for example of the optimizer
                answer = "".join(traceback.format_exception(error)), _packed(error)
            _send(file, answer)
            del arguments, answer  # their tensors


def _packed(error: BaseException) -> bytes:
    try:
        packed = cloudpickle.dumps(error.with_traceback(None))
        cloudpickle.loads(packed)  # not every pickled exception can be unpickled
        return packed
    except Exception:
        return pickle.dumps(RuntimeError(repr(error)))


class Servers:
    """A worker's connection to the servers of one ``ParameterServer``; in-process if no server was started.

    Args:
        mode: the mode of the ``ParameterServer``, for error messages.
        timeout: seconds that a request may take.
    """

    def __init__(self, mode: str, timeout: float) -> None:
        self.mode, self.timeout = mode, timeout
        self.count = len(_servers)
        self._in_process = None if _servers else Shard()
        self._number = next(_numbers)

    def ask(self, method: str, requests: list[tuple], servers: slice = slice(None)) -> list[Any]:
        """Sends a request to all servers, then waits for all answers. What a server raises is raised here.

        Args:
            method: a method of :class:`~ignite_ddl.parameter_server.server.Shard`.
            requests: the arguments for each server.
            servers: the servers to ask. Default: all.

        Raises:
            ConnectionError: if a server is gone.
            TimeoutError: if one does not answer in time.
        """
        limit = _JOIN_SECONDS if method in ("create", "join") else min(self.timeout, _MAX_SECONDS)
        if method in ("join", "pull"):  # these may wait for other workers
            requests = [(*request, limit) for request in requests]
        if self._in_process is not None:
            return [getattr(self._in_process, method)(*request) for request in requests]
        targets = _servers[servers]
        with _request_lock:
            answers = self._exchange(method, requests, targets, limit)
        for server, (text, answer) in zip(targets, answers, strict=True):
            if text:
                error = cloudpickle.loads(answer)
                if isinstance(error, WaitTimeout):
                    waits = f"{server.name} (mode {self.mode!r}) waits for workers {error}"
                    raise TimeoutError(f"{method} took more than {limit:g} s: {waits}")
                raise error from RuntimeError(f"on {server.name}:\n{text}")
        return [answer for _, answer in answers]

    def _exchange(self, method: str, requests: list[tuple], targets: list[_Server], limit: float) -> list[tuple]:
        answers = []
        try:
            for server, request in zip(targets, requests, strict=True):
                server.connection.settimeout(limit + _REPORT_SECONDS)
                _send(server.file, (self._number, method, request))
            for server in targets:
                answers.append(_receive(server.file))
        except BaseException as error:
            for one in targets:  # what they still send would be taken for the next answer
                with contextlib.suppress(OSError):
                    one.connection.shutdown(socket.SHUT_RDWR)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"{method} took more than {limit:g} s: {server.name} does not answer") from None
            if isinstance(error, _DISCONNECTED):
                raise ConnectionError(f"{server.name} is gone, at {method}: {error}") from None
            raise
        return answers


class _Pickler(pickle.Pickler):
    """Leaves the numbers of tensors out: they are sent as they are in memory."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        numbers = obj.resolve_conj().resolve_neg().contiguous().view(_OF_BYTES[obj.element_size()]).numpy()
        return _tensor, (pickle.PickleBuffer(numbers), numbers.dtype, obj.dtype, tuple(obj.shape))


def _tensor(numbers: numpy.ndarray, known: numpy.dtype, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(numbers.view(known).reshape(shape)).view(dtype)


def _send(file: IO[bytes], message: Any) -> None:
    head, tensors = io.BytesIO(), []
    _Pickler(head, 5, buffer_callback=lambda tensor: tensors.append(tensor.raw())).dump(message)
    pickle.dump((head.getvalue(), list(map(len, tensors))), file)
    for tensor in tensors:
        file.write(tensor)
        file.write(bytes(-len(tensor) % _ALIGNED))
    file.flush()


def _receive(file: IO[bytes]) -> Any:
    head, sizes = pickle.load(file)
    places = [0, *itertools.accumulate(size + -size % _ALIGNED for size in sizes)]
    numbers = numpy.empty(places[-1], numpy.uint8)  # one piece: numpy asks for huge pages, so it is there sooner
    if file.readinto(numbers) < len(numbers):
        raise EOFError("it ended within a message")
    return pickle.loads(head, buffers=[numbers[at : at + size] for at, size in zip(places, sizes, strict=False)])
