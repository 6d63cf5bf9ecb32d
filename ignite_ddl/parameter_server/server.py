"""The server's side: a shard of the parameters, its optimizer, and the update rules of each mode."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import nn

MODES = ("sync", "async", "bounded", "backup")


class WaitTimeout(Exception):
    """Raised when a limit of seconds has passed; its argument is the list of workers that are waited for."""


class Shard:
    """A shard of the parameters, its optimizer, and the update rules; independent of the wire.

    Each worker's calls come in a thread of its own. Those that may have to wait for other workers take a limit.
    """

    def __init__(self, finished: Mapping[int, str | None] | None = None) -> None:
        self.changed = threading.Condition()
        self.finished = dict(finished or {})  # workers that have ended: their failure, or None
        self.agreed: dict[str, Any] | None = None  # settings that all workers share, from create()
        self.others: list[torch.Tensor] = []  # buffers and parameters without gradient

    def create(
        self, agreed: dict[str, Any], optimizer: bytes, tensors: list[torch.Tensor], others: list[torch.Tensor]
    ) -> None:
        """Called by worker 0: sets the initial parameters and makes their optimizer."""
        with self._locked_for_change():
            self.mode, self.staleness = agreed["mode"], agreed["staleness"]
            self.workers = set(range(agreed["workers"]))
            self.needed = agreed["workers"] - agreed["backup"]  # gradients per synchronous update
            # A single server can replace a dead worker by a backup; several would have to agree on the gradients.
            self.spare = agreed["backup"] if agreed["servers"] == 1 else 0
            self.parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
            self.others = others
            self.optimizer = cloudpickle.loads(optimizer)(self.parameters)
            _check_optimizer(self.optimizer, self.parameters)
            self.version = 0  # number of updates
            self.clock = dict.fromkeys(self.workers, 0)  # pushes in this epoch
            self.pushes = dict.fromkeys(self.workers, 0)  # pushes in all
            self.ended: set[int] = set()  # workers that have ended this epoch
            self.pending: dict[int, dict[str, Any]] = {}  # records of gradients not yet applied, by worker
            self.means: dict[tuple[int, int], _Mean] = {}  # means of these gradients, see _average
            self.reading: set[int] = set()  # workers whose pull may still read the parameters: no push since
            self.times: dict[int, dict[str, float]] = {}  # of each worker's latest pull
            self.updates: list[dict[str, Any]] = []
            self.dropped: list[dict[str, Any]] = []
            self.size = _bytes(self.parameters)
            self.bytes_in = self.bytes_out = 0
            self.start = time.monotonic()
            self.agreed = agreed

    def join(self, limit: float) -> tuple[dict[str, Any] | None, list[torch.Tensor]]:
        """The settings and the tensors that are not trained, as given by worker 0 to :meth:`create`.

        The settings are None if worker 0 ended without calling it.
        """
        with self._locked_once(lambda: self.agreed is not None or 0 in self.finished, limit):
            return self.agreed, self.others

    def pull(self, worker: int, at_least: int, limit: float) -> tuple[int, list[torch.Tensor]]:
        """The version and its parameters, once the mode lets this worker pull."""
        requested = time.monotonic()
        with self._locked_once(lambda: self.version >= at_least and self._may_pull(worker), limit):
            now = time.monotonic()
            self.times[worker] = {"waited": now - requested, "pulled_at": now - self.start}
            self.reading.add(worker)
            self.bytes_out += self.size
            return self.version, [parameter.detach() for parameter in self.parameters]

    def push(self, worker: int, pulled: int, gradients: list[torch.Tensor | None], rows: int) -> bool:
        """Takes a gradient; returns False if it is too late and was dropped."""
        with self._locked_for_change():
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
        with self._locked_for_change():
            self.ended.add(worker)
            self._after_worker_left()

    def end(self, worker: int, failed: str | None) -> bool:
        """Removes a worker that has returned, or failed; returns whether the others can continue."""
        with self._locked_for_change():
            self.finished[worker] = failed
            if self.agreed is None:
                return failed is None
            self._after_worker_left()
            if failed is None or self.mode in ("async", "bounded"):
                return True
            return sum(reason is not None for reason in self.finished.values()) <= self.spare

    def stop_reason(self) -> str:
        """Why the others cannot continue without a worker that failed, and what to do."""
        with self.changed:
            if self.agreed is None:
                return "It failed before worker 0 had made the ParameterServer, so the others cannot continue."
            needs = "every worker" if self.mode == "sync" else f"{len(self.workers) - self.spare} workers"
            servers = f" with {self.agreed['servers']} servers" if self.mode == "backup" else ""
            return (
                f"on_failure='continue' cannot continue: mode={self.mode!r}{servers} needs {needs}. mode='async' and "
                "mode='bounded' continue without lost workers, and mode='backup' with one server without up to "
                "`backup` workers."
            )

    def waits_for(self) -> list[int]:
        """The workers that the others wait for."""
        with self.changed:
            if self.agreed is None:
                return [0]
            if self.mode == "bounded":
                slowest = min(self.clock[worker] for worker in self._active() or self.workers)
                return sorted(worker for worker in self._active() if self.clock[worker] == slowest)
            return sorted(self._active() - self.pending.keys())

    def statistics(self) -> dict[str, Any]:
        with self.changed:
            return {
                "bytes": self.size,
                "version": self.version,
                "updates": list(self.updates),
                "dropped": list(self.dropped),
                "lost": {worker: reason for worker, reason in self.finished.items() if reason is not None},
                "bytes_in": self.bytes_in,
                "bytes_out": self.bytes_out,
            }

    # The update rules. All methods below, except _locked_once and _locked_for_change, run with the lock held.

    def _active(self) -> set[int]:
        return self.workers - self.ended - self.finished.keys()

    def _may_pull(self, worker: int) -> bool:
        if self.mode == "async":
            return True
        if worker in self.ended:
            return False  # all workers begin the next epoch together
        if self.mode == "bounded":
            slowest = min((self.clock[other] for other in self._active()), default=self.clock[worker])
            return self.clock[worker] - slowest <= self.staleness
        return worker not in self.pending

    def _after_worker_left(self) -> None:
        if self.pending:
            self._update_if_complete()
        if not self._active():  # the last worker ended: a new epoch
            self.ended.clear()
            self.clock = dict.fromkeys(self.workers, 0)

    def _average(self, worker: int, mean: _Mean) -> None:
        """Adds a gradient to the means of the gradients that have arrived.

        Means are combined in a binary tree over the workers' ranks, two neighbours as soon as both have arrived. So
        little work is left when the last gradient arrives, and the result does not depend on the order of arrival.
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
        if self.reading:  # copy on write: a pull returns one version of all parameters
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

    @contextlib.contextmanager
    def _locked_once(self, condition: Callable[[], bool], limit: float):
        """Waits until a condition is true, and holds the lock. It stays true until this worker's next call."""
        with self.changed:
            if not self.changed.wait_for(condition, limit):
                raise WaitTimeout(self.waits_for())
            yield

    @contextlib.contextmanager
    def _locked_for_change(self):
        """Holds the lock for a change, then wakes those that wait for one."""
        with self.changed:
            yield
            self.changed.notify_all()


_Mean = tuple[int, list[torch.Tensor | None]]  # number of rows, mean gradient over them


def _mean_of(one: _Mean, other: _Mean) -> _Mean:
    """The mean over the rows of both, computed in place. A missing gradient counts as zeros."""
    (rows, gradients), (other_rows, others) = one, other
    if not rows or not other_rows:
        return one if rows else other
    share = other_rows / (rows + other_rows)
    mean = []
    for mine, theirs in zip(gradients, others, strict=True):
        if mine is None:
            mean.append(theirs if theirs is None else theirs.mul_(share))
        else:
            mean.append(mine.mul_(1 - share) if theirs is None else mine.lerp_(theirs, share))
    return rows + other_rows, mean


def _check_optimizer(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    """Raises a ValueError unless the optimizer has exactly these parameters, not copies of the model's."""
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"optimizer should return an optimizer, but it returned {optimizer!r}")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    given = {id(parameter) for parameter in parameters}
    if held != given:
        raise ValueError(
            f"optimizer should return an optimizer of all {len(given)} parameters that it is given and of no others, "
            f"but it leaves out {len(given - held)} and has {len(held - given)} others; parameters of a model that "
            "the function refers to are copies on the server"
        )


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
