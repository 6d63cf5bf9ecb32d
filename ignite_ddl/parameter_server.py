"""A parameter server: workers pull the parameters and push gradients, and the server takes the step.

Three parts, from the inside out. A ``_Shard`` holds some of the parameters with their optimizer and knows the four
rules for when a gradient is applied and who has to wait. ``join`` and ``worker_ended`` are the launcher's side:
they put a shard's answers on the wire. :class:`ParameterServer` is what a worker holds. This file is the only one
that knows ``torch.distributed.rpc``.
"""

from __future__ import annotations

import cmath
import contextlib
import functools
import itertools
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from multiprocessing import util
from typing import Any

import cloudpickle
import ignite.distributed as idist
import torch
from torch import nn
from torch.distributed import rpc
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.launch import limit_in_seconds
from ignite_ddl.mesh import get_mesh

__all__ = ["ParameterServer"]

MODES = ("sync", "async", "bounded", "backup")

# Plain TCP: TensorPipe's shared memory polls, which costs half a core for each process that waits.
_TRANSPORT = {"_transports": ["uv"], "_channels": ["basic"]}
_THREADS = 8  # that serve requests; they wait for a lock at most, never for a worker
_LONGEST_SECONDS = 2e6  # that a request may take: torch counts its milliseconds in 32 bits
_JOIN_SECONDS = 600.0  # until every worker and server has met the others


# -------------------------------------------------------------------------------------------- one server's part


class _Shard:
    """Some of the parameters, their optimizer, and the rules by which they change; knows nothing of RPC.

    What a method returns at once is its answer; a ``Future`` is an answer that has to wait for other workers.
    """

    def __init__(self, gone: Mapping[int, str | None] | None = None) -> None:
        self.lock = threading.Lock()
        self.waiting: list[tuple[Callable[[], bool], Callable[[], Any], Future]] = []
        self.gone = dict(gone or {})  # workers through with everything: why, or None
        self.agreed: dict[str, Any] | None = None  # what every worker must have in common; None: not made yet
        self.others: list[torch.Tensor] = []

    def create(
        self,
        agreed: dict[str, Any],
        optimizer: bytes,
        tensors: list[torch.Tensor],
        others: list[torch.Tensor],
    ) -> str | None:
        """Worker 0's call: the parameters as they are at the start, and how to make their optimizer.

        What is wrong with that comes back as text: RPC would bring an exception as a RuntimeError.
        """
        with self._changing():
            self.mode, self.staleness = agreed["mode"], agreed["staleness"]
            self.workers = set(range(agreed["workers"]))
            self.needed = agreed["workers"] - agreed["backup"]  # gradients that make a synchronous update
            # A lone server can replace a dead worker by a backup; several would have to agree on whom they heard.
            self.spare = agreed["backup"] if agreed["servers"] == 1 else 0
            self.parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
            self.others = others
            self.optimizer = cloudpickle.loads(optimizer)(self.parameters)
            if wrong := _whats_wrong(self.optimizer, self.parameters):
                return wrong
            self.version = 0  # updates so far
            self.clock = dict.fromkeys(self.workers, 0)  # pushes since the epoch began
            self.pushes = dict.fromkeys(self.workers, 0)  # pushes in all
            self.ended: set[int] = set()  # through with their epoch
            self.pending: dict[
                int, dict[str, Any]
            ] = {}  # workers whose gradients wait for the others', records
            self.means: dict[tuple[int, int], _Mean] = {}  # of those gradients, see _average
            self.reading: set[int] = set()  # pulled, and not heard of since: their answer may be on its way
            self.times: dict[int, dict[str, float]] = {}  # of each worker's latest pull
            self.updates: list[dict[str, Any]] = []
            self.dropped: list[dict[str, Any]] = []
            self.size = _bytes(self.parameters)
            self.bytes_in = self.bytes_out = 0
            self.start = time.monotonic()
            self.agreed = agreed
            return None

    def join(self) -> Future:
        """What worker 0 made: what all must have in common, and the tensors that are not trained.

        None and nothing if worker 0 has ended before it made them.
        """
        return self._when(
            lambda: self.agreed is not None or 0 in self.gone, lambda: (self.agreed, self.others)
        )

    def pull(self, worker: int, at_least: int) -> Future:
        """The version and its tensors, as soon as this worker may have them."""
        asked = time.monotonic()

        def answer() -> tuple[int, list[torch.Tensor]]:
            now = time.monotonic()
            self.times[worker] = {"waited": now - asked, "pulled_at": now - self.start}
            self.reading.add(worker)
            tensors = [parameter.detach() for parameter in self.parameters]
            self.bytes_out += self.size
            return self.version, tensors

        return self._when(lambda: self.version >= at_least and self._may_pull(worker), answer)

    def push(self, worker: int, pulled: int, gradients: list[torch.Tensor | None], rows: int) -> bool:
        """Takes a gradient; False where it comes too late."""
        with self._changing():
            self.bytes_in += _bytes(gradients)
            self.reading.discard(worker)
            record = {"worker": worker, "step": self.pushes[worker], "pulled": pulled, "rows": rows}
            record |= self.times[worker] | {"pushed_at": time.monotonic() - self.start}
            self.pushes[worker] += 1
            if self.mode in ("async", "bounded"):
                self.clock[worker] += 1
                if rows:
                    self._update(gradients, [record])
            elif pulled == self.version:
                self.pending[worker] = record
                self._average(worker, (rows, gradients))
                self._update_if_complete()
            else:
                self.dropped.append(record | {"version": self.version, "staleness": self.version - pulled})
                return False
            return True

    def end_epoch(self, worker: int) -> None:
        with self._changing():
            self.ended.add(worker)
            self._someone_left()

    def end(self, worker: int, failed: str | None) -> bool:
        """A worker has returned, or failed: nobody waits for it any more. Whether the others can go on."""
        with self._changing():
            self.gone[worker] = failed
            if self.agreed is None:
                return failed is None
            self._someone_left()
            if failed is None or self.mode in ("async", "bounded"):
                return True
            return sum(reason is not None for reason in self.gone.values()) <= self.spare

    def waits_for(self) -> list[int]:
        """The workers without whom nothing moves now."""
        with self.lock:
            if self.agreed is None:
                return [0]
            if self.mode == "bounded":
                slowest = min(self.clock[worker] for worker in self._active() or self.workers)
                return sorted(worker for worker in self._active() if self.clock[worker] == slowest)
            return sorted(self._active() - self.pending.keys())

    def statistics(self) -> dict[str, Any]:
        with self.lock:
            return {
                "bytes": self.size,
                "version": self.version,
                "updates": list(self.updates),
                "dropped": list(self.dropped),
                "lost": {worker: reason for worker, reason in self.gone.items() if reason is not None},
                "bytes_in": self.bytes_in,
                "bytes_out": self.bytes_out,
            }

    # The rules. All that follows runs with the lock held.

    def _active(self) -> set[int]:
        return self.workers - self.ended - self.gone.keys()

    def _may_pull(self, worker: int) -> bool:
        if self.mode == "async":
            return True
        if worker in self.ended:
            return False  # the next epoch begins for all together
        if self.mode == "bounded":
            slowest = min((self.clock[other] for other in self._active()), default=self.clock[worker])
            return self.clock[worker] - slowest <= self.staleness
        return worker not in self.pending

    def _someone_left(self) -> None:
        if self.pending:
            self._update_if_complete()
        if not self._active():  # the last one: a new epoch
            self.ended.clear()
            self.clock = dict.fromkeys(self.workers, 0)

    def _average(self, worker: int, mean: _Mean) -> None:
        """Takes a gradient into the means of those that have come.

        They meet along a binary tree over the workers' numbers, two neighbours as soon as both are there: little is
        left to do when the last one comes, and whoever comes first, the same workers give the same bits.
        """
        level = 0
        while (neighbour := self.means.pop((level, worker ^ 1), None)) is not None:
            mean = _mean_of(neighbour, mean) if worker % 2 else _mean_of(mean, neighbour)
            level, worker = level + 1, worker // 2
        self.means[level, worker] = mean

    def _update_if_complete(self) -> None:
        if len(self.pending) < self.needed and not self._active() <= self.pending.keys():
            return
        rows, mean = functools.reduce(_mean_of, (self.means[place] for place in sorted(self.means)))
        records = [self.pending[worker] for worker in sorted(self.pending)]
        self.pending, self.means = {}, {}
        if rows:
            self._update(mean, [record for record in records if record["rows"]])

    def _update(self, gradients: list[torch.Tensor | None], records: list[dict[str, Any]]) -> None:
        if self.reading:  # leave them the memory that they read: what is pulled is one version, whole
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()
            self.reading.clear()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        now = time.monotonic() - self.start
        for record in records:
            staleness = self.version - record["pulled"]
            self.updates.append(record | {"version": self.version, "staleness": staleness, "applied_at": now})
        self.version += 1

    def _when(self, condition: Callable[[], bool], answer: Callable[[], Any]) -> Future:
        future = Future()
        with self._changing():
            self.waiting.append((condition, answer, future))
        return future

    @contextlib.contextmanager
    def _changing(self):
        """Holds the lock for a change, then answers those who waited for it."""
        with self.lock:
            yield
            answers, still = [], []
            for condition, answer, future in self.waiting:
                if condition():
                    answers.append((future, answer()))
                else:
                    still.append((condition, answer, future))
            self.waiting = still
        for future, answer in answers:
            future.set_result(answer)


_Mean = tuple[int, list[torch.Tensor | None]]  # a number of rows, and the mean gradient over them


def _scaled(gradient: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    return None if gradient is None else gradient.mul_(factor)


def _mean_of(one: _Mean, other: _Mean) -> _Mean:
    """Over the rows of both, in the memory of one of them. No gradient counts as zeros."""
    (rows, gradients), (other_rows, others) = one, other
    if not rows or not other_rows:
        return one if rows else other
    share = other_rows / (rows + other_rows)
    mean = []
    for mine, theirs in zip(gradients, others, strict=True):
        if mine is None or theirs is None:
            mean.append(_scaled(mine, 1 - share) if theirs is None else _scaled(theirs, share))
        else:
            mean.append(mine.lerp_(theirs, share))
    return rows + other_rows, mean


def _whats_wrong(optimizer: Any, parameters: list[nn.Parameter]) -> str | None:
    """It should take steps over exactly these parameters: over copies of the model's it would learn for nobody."""
    if not hasattr(optimizer, "param_groups"):
        return f"optimizer should return an optimizer, but it returned {optimizer!r}"
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    given = {id(parameter) for parameter in parameters}
    if held == given:
        return None
    return (
        f"optimizer should return an optimizer of all {len(given)} parameters that it is given and of no others, but "
        f"it leaves out {len(given - held)} and has {len(held - given)} others; on the server, the parameters of a "
        "model that it uses are copies"
    )


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


# ----------------------------------------------------------------------------------------- the launcher's side

_servers: list[rpc.WorkerInfo] = []  # in order, once this process has joined them
_gone: dict[int, str | None] = {}  # on a server: the workers that are through, as _Shard.gone
_shards: dict[int, _Shard] = defaultdict(lambda: _Shard(_gone))  # by the number of the ParameterServer
_shards_lock = threading.Lock()  # for both
_numbers = itertools.count()  # on a worker: its ParameterServers, in the order in which all workers make them


def join(index: int, workers: int, servers: int, init_method: str) -> None:
    """Lets this process and the others of the run reach each other by RPC; returns when all can.

    Args:
        index: this process's number: the workers' ranks first, then the servers.
        workers: number of workers.
        servers: number of servers.
        init_method: how they meet, "file://...".
    """
    name = f"worker{index}" if index < workers else f"server{index - workers}"
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=init_method, rpc_timeout=_JOIN_SECONDS, num_worker_threads=_THREADS, **_TRANSPORT
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own use of gloo
        rpc.init_rpc(name, rank=index, world_size=workers + servers, rpc_backend_options=options)
    util.Finalize(None, rpc.shutdown, kwargs={"graceful": False}, exitpriority=1)  # waits for nobody
    _servers[:] = [rpc.get_worker_info(f"server{i}") for i in range(servers)]


def worker_ended(worker: int, failed: str | None) -> bool:
    """On a server, from the launcher: a worker has returned, or failed. Whether the others can go on."""
    with _shards_lock:
        _gone[worker] = failed  # for those to come
        shards = [_shards[number] for number in sorted(_shards)]
    can_go_on = [shard.end(worker, failed) for shard in shards]
    return failed is None or bool(can_go_on) and can_go_on[-1]  # earlier ones are through


def _ask(number: int, method: str, *arguments: Any) -> Any:
    """Runs on a server, in one of its threads, for a worker."""
    with _shards_lock:
        shard = _shards[number]
    return getattr(shard, method)(*arguments)


@rpc.functions.async_execution
def _ask_and_wait(*request: Any) -> Future:
    """The same for answers that may have to wait; no thread waits with them."""
    return _ask(*request)


# ------------------------------------------------------------------------------------------- the worker's side


class ParameterServer:
    """What a worker holds of the parameter server: pull the parameters, push a gradient.

    Started by ``ddl.Parallel(..., servers=1)``, the server keeps the parameters and their optimizer. Every worker
    makes a ``ParameterServer`` of its own copy of the model; all then begin with worker 0's weights. A worker
    is an ordinary Ignite trainer, whose update step is pull, forward, backward, push. Its loader and its metrics
    see the workers alone, and on a serial run the server is in-process, so the same code runs.

    When is a gradient applied, and who waits?

    - ``mode="sync"``: when all workers have pushed, their average is one update. A pull waits for it. The result is
      that of one process with the global batch (Dean et al., Large Scale Distributed Deep Networks, 2012, has the
      server; Chen et al., 2016, the synchronous form).
    - ``mode="async"``: each as it comes. Nobody waits; a gradient may be of parameters that others have changed
      since (Dean et al., section 4.1, Downpour SGD).
    - ``mode="bounded"``: as async, but the pull of a worker that is more than ``staleness`` steps ahead of the
      slowest waits (Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server,
      2013, section 2). A gradient is then at most (workers − 1)(2 · staleness + 1) updates old when it is applied.
    - ``mode="backup"``: of the N + b workers, the first N gradients of a step make the update; those that come
      later are dropped and counted (Chen et al., Revisiting Distributed Synchronous SGD, 2016, section 3). A step
      is the server's here, not the worker's: end training at a version, not after a number of batches.

    With several servers each holds whole parameters, shared out by bytes, so any optimizer that treats parameters one
    by one is exact. A pull is always one version of a server, never half an update. The servers of "async" and
    "bounded" count their versions each for itself, and a pull may be version 7 of one and 8 of another; in "sync" and
    "backup" they go in step.

    BatchNorm's running statistics, as all buffers, are not the server's: they start as worker 0's, then each
    worker keeps its own. Evaluate on one worker, or average them yourself.

    A worker that dies ends the run with a :class:`RankError` that names it. With ``on_failure="continue"`` in
    ``ddl.Parallel``, "async" and "bounded" go on without it, and "backup" on one server as long as N are left. A
    ParameterServer that is made later counts on the living. Use no collective after a loss: it needs every rank, so
    it fails, and whoever called it is lost too.

    RPC runs what it is sent: whoever can reach its port owns the process. It listens on loopback; the environment's
    ``TP_SOCKET_IFNAME`` names another interface, and says that you trust all of that network.

    Args:
        model: a plain module, the same on every worker. Parameters that require no gradient stay with the workers.
        optimizer: takes the list of a server's parameters and returns their optimizer, say
            ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``: of all of these, not of the model's, which are
            elsewhere. It is called once on each server, and its state stays there. To schedule the rate, step the
            scheduler in a ``register_step_post_hook`` of the optimizer.
        mode: "sync" (default), "async", "bounded" or "backup".
        staleness: for "bounded": how many steps a worker may be ahead of the slowest, 0 or more.
        backup: for "backup": b, how many of the workers' gradients a step can do without, 1 or more.
        timeout: seconds (or a ``timedelta``) that a pull or a push may take, waiting for other workers included.
            Default 300. Making a ParameterServer waits for worker 0, which may be reading data: up to 600 s.

    Raises:
        ValueError: if an argument does not fit, there is no server, the model is wrapped by DDP or cut by pp or tp,
            or differs from worker 0's, or if ``optimizer`` makes no optimizer of all the parameters that it is
            given. The server is untouched then.
        RuntimeError: if worker 0, whose weights are to be the first, has ended.
        TimeoutError: if worker 0 does not make its ParameterServer within 600 seconds.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl
            from ignite.engine import Engine

            def training(local_rank):
                torch.manual_seed(0)
                data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
                loader = ddl.auto_dataloader(data, batch_size=6)        # 6 rows over all workers
                model = torch.nn.Linear(3, 1)
                server = ddl.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=0.1), mode="sync")

                def step(engine, batch):
                    x, y = batch
                    server.pull()
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    server.push(rows=len(x))
                    return loss.item()

                Engine(step).run(loader, max_epochs=2)
                server.pull()                                           # the weights after the last update
                return model.weight.detach(), server.statistics()["updates"]

            with ddl.Parallel(backend="gloo", nproc_per_node=2, servers=1) as parallel:
                (weight, updates), _ = parallel.run(training)
            assert [(u["worker"], u["version"]) for u in updates[:3]] == [(0, 0), (1, 0), (0, 1)]
            assert torch.allclose(weight, training(0)[0], atol=1e-6)    # one process, the same script
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        mode: str = "sync",
        *,
        staleness: int | None = None,
        backup: int = 0,
        timeout: float | timedelta = 300.0,
    ) -> None:
        self.mode = mode
        self.timeout = limit_in_seconds(timeout, _LONGEST_SECONDS)
        self._worker = idist.get_rank()
        workers = idist.get_world_size()
        _check_arguments(optimizer, mode, staleness, backup, workers)
        _check_model(model)
        if workers > 1 and not _servers:
            raise ValueError(
                f"a ParameterServer of {workers} workers needs a server, but given none: start the workers by "
                "ddl.Parallel(..., servers=1)"
            )
        self._servers = list(_servers)
        self._local = None if _servers else _Shard()
        self._number = next(_numbers)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        self._names = _share_out(self._parameters, max(1, len(_servers)))
        # Several servers must agree which gradients are late: the first decides, and is asked first.
        self._first_decides = mode == "backup" and len(_servers) > 1
        self._pulled: list[int] | None = None  # the versions of a pull that no push has answered yet
        self.versions: list[int] = []
        self._start(model, optimizer, staleness, backup if workers > 1 else 0, workers)

    def _start(self, model, optimizer, staleness, backup, workers) -> None:
        others = [p for p in model.parameters() if not p.requires_grad] + list(model.buffers())
        shapes = {
            name: (tuple(p.shape), str(p.dtype)) + (() if p.requires_grad else ("no gradient",))
            for name, p in model.named_parameters()
        }
        agreed = {"mode": self.mode, "staleness": staleness, "backup": backup, "workers": workers}
        agreed |= {"servers": len(self._names), "parameters": shapes, "other tensors": len(others)}
        if self._worker == 0:
            make = cloudpickle.dumps(optimizer)
            found = self._ask_all(
                "create",
                [
                    (agreed, make, self._on_cpu(names), [t.detach().cpu() for t in others] if i == 0 else [])
                    for i, names in enumerate(self._names)
                ],
            )
            for wrong in filter(None, found):
                raise ValueError(wrong)
        answers = self._ask_all("join", [()] * len(self._names))
        if any(theirs is None for theirs, _ in answers):
            raise RuntimeError(
                "a ParameterServer begins with the weights of worker 0, and worker 0 has ended"
            )
        theirs = answers[0][0]
        for what, value in agreed.items():
            if theirs[what] != value:
                raise ValueError(_difference(what, value, theirs[what], self._worker))
        with torch.no_grad():
            for tensor, first in zip(others, answers[0][1], strict=True):
                tensor.copy_(first)

    def pull(self) -> list[int]:
        """Copies the server's parameters into the model, waiting where the mode asks for it.

        Returns:
            list: the version pulled from each server: the number of updates that it has seen.

        Raises:
            TimeoutError: if other workers keep this one waiting for more than ``timeout`` seconds.
            ConnectionError: if a server is gone.
        """
        answers = self._ask_for_parameters()
        while self._first_decides and len({version for version, _ in answers}) > 1:
            # An update came in between: a gradient of these would be late.
            answers = self._ask_for_parameters()
        with torch.no_grad():
            for names, (_, tensors) in zip(self._names, answers, strict=True):
                for name, tensor in zip(names, tensors, strict=True):
                    self._parameters[name].copy_(tensor)
        self.versions = [version for version, _ in answers]
        self._pulled = self.versions
        return list(self.versions)

    def _ask_for_parameters(self) -> list[tuple[int, list[torch.Tensor]]]:
        if not self._first_decides:
            return self._ask_all("pull", [(self._worker, 0)] * len(self._names))
        answers = self._ask_all("pull", [(self._worker, 0)], servers=slice(1))
        request = (self._worker, answers[0][0])
        return answers + self._ask_all("pull", [request] * (len(self._names) - 1), servers=slice(1, None))

    def push(self, gradients: Mapping[str, torch.Tensor] | None = None, rows: int = 1) -> bool:
        """Sends a gradient and takes it away from the model: ``p.grad`` is None afterwards.

        Args:
            gradients: parameter names to gradients of their shapes. Default: each ``p.grad`` that is not None.
                A parameter without gradient is left alone, as torch's optimizers do.
            rows: how many rows this gradient is the mean of. Where gradients are averaged ("sync", "backup") they
                weigh as their rows, so an uneven last batch is exact; the default 1 weighs all alike. With 0 the
                worker takes part in the step and sends nothing.

        Returns:
            bool: False if it came too late and was dropped (``mode="backup"``), else True.

        Raises:
            RuntimeError: if there was no pull since the last push.
            ValueError: if a gradient is not finite, not dense, of another shape or dtype, or of no trainable
                parameter, or if there is none. Nothing has been sent then, each ``p.grad`` is as it was, and push
                can be called again: with other gradients, or with ``rows=0``, which leaves this batch out and
                takes its ``p.grad`` away. (Without that the next ``backward()`` would add to them.)
            TimeoutError: if a server does not answer within ``timeout`` seconds.
            ConnectionError: if a server is gone.
        """
        if self._pulled is None:
            raise RuntimeError(
                "push needs a pull before it, and a new one after each push: a gradient belongs to the version "
                "of the parameters that it was computed with"
            )
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 0:
            raise ValueError(f"rows should be a number of rows, 0 or more, but given {rows!r}")
        if gradients is None:
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if rows:
            self._check_gradients(gradients)
        else:
            gradients = {}
        requests = []
        for names, version in zip(self._names, self._pulled, strict=True):
            version = self._pulled[0] if self._first_decides else version
            parts = [gradients[n].detach().cpu().contiguous() if n in gradients else None for n in names]
            requests.append((self._worker, version, parts, rows))
        if self._first_decides:
            accepted = self._ask_all("push", requests[:1], servers=slice(1))[0]
            if accepted:
                self._ask_all("push", requests[1:], servers=slice(1, None))
        else:
            accepted = all(self._ask_all("push", requests))
        self._pulled = None
        for parameter in self._parameters.values():
            parameter.grad = None
        return accepted

    def end_epoch(self, engine: Any = None) -> None:
        """Says that this worker has no more batches in this epoch, so that nobody waits for it.

        Needed only where the workers' loaders are of different lengths. The next pull then waits until all workers
        have ended theirs (in "async" nobody waits, ever). An Ignite handler:
        ``trainer.add_event_handler(Events.EPOCH_COMPLETED, server.end_epoch)``.

        Args:
            engine: not used.
        """
        self._pulled = None
        if self.mode != "async":
            self._ask_all("end_epoch", [(self._worker,)] * len(self._names))

    def statistics(self) -> dict[str, Any]:
        """What has happened so far, as plain data for plots.

        Returns:
            dict: "mode"; "updates", a list of dicts, one for each gradient that went into an update, in the order of
            application: "server", "worker", "step" (of this worker, from 0), "pulled" (the version that
            the gradient was computed with), "version" (the version that it was applied to), "staleness" (their
            difference: updates in between), "rows", and in seconds on the server's clock "waited" (by the pull),
            "pulled_at", "pushed_at", "applied_at"; "dropped", the same of gradients that came too late ("version"
            is the one they met); "lost", workers to what happened to them; "servers", a list of dicts with
            "name", "parameters" (names), "bytes" (of its parameters), "version" (number of updates), "bytes_in" and
            "bytes_out" (tensors of pushes and pulls). Workers that still push go on being counted: meet at an
            ``idist.barrier()`` first if all are to be in.
        """
        parts = self._ask_all("statistics", [()] * len(self._names))
        result = {"mode": self.mode, "updates": [], "dropped": [], "lost": parts[0]["lost"], "servers": []}
        for index, (part, names) in enumerate(zip(parts, self._names, strict=True)):
            for kind in ("updates", "dropped"):
                result[kind] += [{"server": index} | record for record in part[kind]]
            counts = {key: part[key] for key in ("bytes", "version", "bytes_in", "bytes_out")}
            result["servers"].append({"name": f"server{index}", "parameters": list(names)} | counts)
        return result

    def _on_cpu(self, names: list[str]) -> list[torch.Tensor]:
        return [self._parameters[name].detach().cpu() for name in names]

    def _check_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        if not isinstance(gradients, Mapping):
            raise ValueError(
                f"gradients should be a dict, parameter names to gradients, but given {type(gradients).__name__}"
            )
        if not gradients:
            raise ValueError("no parameter has a gradient: call loss.backward() before push, or push(rows=0)")
        for name, gradient in gradients.items():
            parameter = self._parameters.get(name)
            if parameter is None:
                why = "requires no gradient" if name in self._frozen else "is unknown"
                raise ValueError(f"gradients should be of trainable parameters, but {name!r} {why}")
            if not isinstance(gradient, torch.Tensor):
                raise ValueError(
                    f"the gradient of {name!r} should be a tensor, but given {type(gradient).__name__}; leave a "
                    "parameter without gradient out"
                )
            if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
                raise ValueError(
                    f"the gradient of {name!r} should be {tuple(parameter.shape)}, {parameter.dtype}, "
                    f"but given {tuple(gradient.shape)}, {gradient.dtype}"
                )
            if gradient.layout != torch.strided:
                raise ValueError(f"the gradient of {name!r} should be dense, but given {gradient.layout}")
            # One pass without memory of its own; a sum of finite numbers may overflow, then look at each.
            if not cmath.isfinite(gradient.sum().item()) and not (finite := gradient.isfinite()).all():
                raise ValueError(
                    f"the gradient of {name!r} should be finite, but {int((~finite).sum())} of its "
                    f"{gradient.numel()} numbers are not; push(rows=0) leaves this batch out"
                )

    def _ask_all(self, method: str, requests: list[tuple], servers: slice = slice(None)) -> list[Any]:
        """The one place where anything is sent: a request to each server at once, then all their answers."""
        if self._local is not None:
            answers = [getattr(self._local, method)(*request) for request in requests]
            return [answer.wait() if isinstance(answer, Future) else answer for answer in answers]
        asked = self._servers[servers]
        try:
            # Workers reach their first line with a server at different times: loading data may take long.
            limit = _JOIN_SECONDS if method in ("create", "join") else self.timeout
            ask = _ask_and_wait if method in ("join", "pull") else _ask
            futures = [
                rpc.rpc_async(server, ask, args=(self._number, method, *request), timeout=limit)
                for server, request in zip(asked, requests, strict=True)
            ]
        except RuntimeError as error:
            raise ConnectionError(f"a parameter server is gone, at {method}: {error}") from None
        return [self._answer(server.name, method, f, limit) for server, f in zip(asked, futures, strict=True)]

    def _answer(self, server: str, method: str, future: Future, limit: float) -> Any:
        try:
            return future.wait()
        except RuntimeError as error:
            if "On WorkerInfo" in str(error):  # raised there, by the optimizer, say
                raise
            if "timeout" not in str(error):
                raise ConnectionError(f"{server} is gone, at {method}: {error}") from None
        waits_for = "something"
        with contextlib.suppress(RuntimeError):
            waits_for = rpc.rpc_sync(server, _ask, args=(self._number, "waits_for"), timeout=2.0)
        raise TimeoutError(
            f"{method} took more than {limit:g} s: {server} (mode {self.mode!r}) waits for workers "
            f"{waits_for}"
        )


def _check_arguments(optimizer: Any, mode: str, staleness: int | None, backup: int, workers: int) -> None:
    if not callable(optimizer):
        raise ValueError(
            "optimizer should be a function that takes parameters and returns their optimizer, say "
            f"lambda parameters: torch.optim.SGD(parameters, lr=0.1), but given {type(optimizer).__name__}"
        )
    if mode not in MODES:
        raise ValueError(f"mode should be one of {MODES}, but given {mode!r}")
    if mode == "bounded":
        if not isinstance(staleness, int) or isinstance(staleness, bool) or staleness < 0:
            raise ValueError(
                f"staleness should be a number of steps, 0 or more, with mode='bounded', but given {staleness!r}"
            )
    elif staleness is not None:
        raise ValueError(f"staleness={staleness!r} needs mode='bounded', but given mode={mode!r}")
    if mode == "backup":
        if not isinstance(backup, int) or isinstance(backup, bool) or backup < 1 or 1 < workers <= backup:
            raise ValueError(
                f"backup should be between 1 and {max(1, workers - 1)} of {workers} workers with mode='backup', "
                f"but given {backup!r}"
            )
    elif backup != 0:
        raise ValueError(f"backup={backup!r} needs mode='backup', but given mode={mode!r}")


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "model should be the plain module, but given a DistributedDataParallel, which averages too"
        )
    mesh = get_mesh()
    if mesh.pp_size > 1 or mesh.tp_size > 1:
        raise ValueError(f"a parameter server trains data-parallel workers, but given {mesh!r}")


def _share_out(parameters: Mapping[str, nn.Parameter], servers: int) -> list[list[str]]:
    """The names for each server: the largest first, each to the server that holds the fewest bytes."""
    if len(parameters) < servers:
        raise ValueError(
            f"model should have a trainable parameter for each server, but given {len(parameters)} for "
            f"{servers} servers"
        )
    order = {name: index for index, name in enumerate(parameters)}
    shares: list[list[str]] = [[] for _ in range(servers)]
    held = [0] * servers
    for name in sorted(parameters, key=lambda name: (-parameters[name].nbytes, order[name])):
        least = held.index(min(held))
        shares[least].append(name)
        held[least] += parameters[name].nbytes
    return [sorted(share, key=order.__getitem__) for share in shares]


def _difference(what: str, mine: Any, theirs: Any, worker: int) -> str:
    if what == "parameters":
        name = next(n for n in [*mine, *theirs] if mine.get(n) != theirs.get(n))
        what, mine, theirs = repr(name), mine.get(name, "missing"), theirs.get(name, "missing")
    return f"{what} should be the same on all workers, but given {mine} on worker {worker} and {theirs} on worker 0"
