"""Simulation of workers of different speeds and a parameter server, synchronous or asynchronous."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ignite_ddl.arguments import AMOUNT, FUNCTION, INTEGER, POSITIVE, check, one_of, takes, whole
from ignite_ddl.lab.cost import FITS
from ignite_ddl.lab.simulate.world import ONE_OR_EACH, number_for_each

__all__ = ["Gradient", "Lognormal", "ServerRun", "parameter_server"]


class Gradient(NamedTuple):
    """The record of one gradient; the names are those of ``ddl.ParameterServer``'s records.

    Attributes:
        worker: the worker that computed it.
        step: the step of this worker, from 0.
        pulled: the version of the weights that it was computed with.
        version: number of updates when it was applied, or dropped.
        pulled_at: virtual seconds.
        pushed_at: virtual seconds.
        applied_at: virtual seconds; of a dropped gradient, when it arrived.
        waited: seconds that the worker waited before it could pull.
    """

    worker: int
    step: int
    pulled: int
    version: int
    pulled_at: float
    pushed_at: float
    applied_at: float
    waited: float

    @property
    def staleness(self) -> int:
        """Updates between pull and apply."""
        return self.version - self.pulled


class ServerRun(NamedTuple):
    """A simulated training with a parameter server.

    Attributes:
        seconds: time of the last update.
        times: time of each update.
        updates: every gradient that was applied, in order of application.
        dropped: every gradient that arrived too late.
    """

    seconds: float
    times: list[float]
    updates: list[Gradient]
    dropped: list[Gradient]


class Lognormal:
    """Log-normal compute times, drawn for each worker and step.

    A worker and step have the same time in every simulation, independent of the order of the calls, so modes are
    compared on the same times.

    Args:
        median: seconds.
        sigma: standard deviation of the logarithm.
        seed: of the draws. Default: 0.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import simulate

            draw = simulate.Lognormal(median=1.0, sigma=0.1)
            assert draw(3, 7) == simulate.Lognormal(median=1.0, sigma=0.1)(3, 7) != draw(3, 8)
    """

    @takes(median=POSITIVE, sigma=AMOUNT, seed=INTEGER)
    def __init__(self, median: float, sigma: float, seed: int = 0) -> None:
        self.median, self.sigma, self.seed = median, sigma, seed
        self._drawn: dict[int, tuple[random.Random, list[float]]] = {}

    @takes(worker=whole(0), step=whole(0, 10**8))
    def __call__(self, worker: int, step: int) -> float:
        if worker not in self._drawn:
            self._drawn[worker] = random.Random(f"{self.seed} {worker}"), []
        source, drawn = self._drawn[worker]
        while len(drawn) <= step:
            drawn.append(self.median * math.exp(self.sigma * source.gauss(0, 1)))
        return drawn[step]


@takes(
    FITS, seconds=ONE_OR_EACH | FUNCTION, n_updates=whole(0, 10**8, floats=True),
    mode=one_of("sync", "async", "bounded", "backup"), staleness=whole(0, floats=True), backup=whole(0, floats=True),
)  # fmt: skip
def parameter_server(
    n_workers: int,
    seconds: float | Sequence[float] | Callable[[int, int], float],
    n_updates: int,
    mode: str = "sync",
    staleness: int | None = None,
    backup: int = 0,
    server_seconds: float = 0.0,
) -> ServerRun:
    """Simulates training with a parameter server, by the rules of ``ddl.ParameterServer``.

    - "sync": an update when the gradients of all workers for this version have arrived; workers wait for it.
    - "async": every gradient is applied on arrival, and its worker pulls at once.
    - "bounded": as async, but a worker more than ``staleness`` steps ahead of the slowest waits.
    - "backup": an update when ``n_workers - backup`` gradients for this version have arrived. A later gradient is
      dropped, and its worker pulls the newest weights, as in Chen et al. 2016.

    Args:
        n_workers: all workers, including backups: N + b.
        seconds: of computing a gradient: one number, one per worker, or a function of worker and step, such as
            :class:`Lognormal`.
        n_updates: number of updates to simulate.
        mode: "sync" (default), "async", "bounded" or "backup".
        staleness: s, for "bounded".
        backup: b, for "backup". Default: 0.
        server_seconds: pull, push and update of one gradient; the server handles one at a time. Default: 0.

    Returns:
        ServerRun: the time of each update, and the record of every gradient.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import simulate

            two = dict(n_workers=2, seconds=[1.0, 3.0], n_updates=4)
            assert simulate.parameter_server(**two).times == [3, 6, 9, 12]
            stale = simulate.parameter_server(**two, mode="async")
            assert stale.times == [1, 2, 3, 3] and [g.staleness for g in stale.updates] == [0, 0, 0, 3]
    """
    _check_mode(mode, staleness, backup, n_workers)
    fixed = [] if callable(seconds) else number_for_each(n_workers, seconds=seconds)
    compute_seconds = seconds if callable(seconds) else lambda worker, step: fixed[worker]
    synchronous = mode in ("sync", "backup")
    needed = n_workers - backup
    version, server_free = 0, 0.0
    steps = [0] * n_workers  # pushes of each worker
    pulls: list[tuple] = [()] * n_workers  # (version, when, seconds waited)
    heap: list[tuple[float, int]] = []  # (arrival of a gradient, its worker)
    waiting: dict[int, float] = {}  # workers that wait to pull, since when
    pending: list[tuple] = []
    times, updates, dropped = [], [], []

    def pull(worker: int, now: float, since: float) -> None:
        pulls[worker] = (version, now, now - since)
        took = check("seconds", compute_seconds(worker, steps[worker]), AMOUNT)
        heapq.heappush(heap, (now + took, worker))

    for worker in range(n_workers):
        pull(worker, 0.0, 0.0)
    while len(times) < n_updates:
        pushed, worker = heapq.heappop(heap)
        now = server_free = max(pushed, server_free) + server_seconds
        pulled, pulled_at, waited = pulls[worker]
        step = steps[worker]
        steps[worker] += 1
        if synchronous and pulled < version:
            dropped.append(Gradient(worker, step, pulled, version, pulled_at, pushed, now, waited))
            pull(worker, now, now)
            continue
        pending.append((worker, step, pulled, pulled_at, pushed, waited))
        waiting[worker] = now
        if synchronous and len(pending) < needed:
            continue
        for *about, its_pulled_at, its_pushed_at, its_waited in pending:
            updates.append(Gradient(*about, version, its_pulled_at, its_pushed_at, now, its_waited))
        pending.clear()
        times.append(now)
        version += 1
        slowest = min(steps) if mode == "bounded" else 0
        for one in [one for one in waiting if mode != "bounded" or steps[one] - slowest <= staleness]:
            pull(one, now, waiting.pop(one))
    return ServerRun(times[-1] if times else 0.0, times, updates, dropped)


def _check_mode(mode: str, staleness: int | None, backup: int, n_workers: int) -> None:
    if (mode == "bounded") != (staleness is not None):
        raise ValueError(f"staleness={staleness} does not suit mode={mode!r}: 'bounded' needs 0 or more, others None")
    if backup >= n_workers or (backup and mode != "backup"):
        raise ValueError(f"backup={backup} does not suit mode={mode!r} with {n_workers} workers")
