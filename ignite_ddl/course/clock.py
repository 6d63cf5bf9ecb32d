"""Times calls in this process, and what ranks do together, step by step; a clock that is set by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import ignite.distributed as idist
import torch

import ignite_ddl as ddl

__all__ = ["HandClock", "TimedBatches", "median_seconds", "other_programs", "time_steps"]


def median_seconds(*functions: Callable[[], Any], rounds: int = 7) -> list[float]:
    """Times functions in turns: a call of each to warm up, then rounds of one call each.

    Where there is an accelerator, its queue is empty before the clock is read, at both ends of each call.

    Args:
        functions: each is called without arguments.
        rounds: how often each is timed. Default: 7.

    Returns:
        list: the median seconds of each function.

    Example:
        >>> import time
        >>> from ignite_ddl.course import median_seconds
        >>> [short, long] = median_seconds(lambda: None, lambda: time.sleep(0.01), rounds=3)
        >>> long >= 0.01
        True
    """
    wait = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    for function in functions:
        function()
    found = []
    for _ in range(rounds):
        for function in functions:
            wait()
            began = time.perf_counter()
            function()
            wait()
            found.append(time.perf_counter() - began)
    return [median(found[place :: len(functions)]) for place in range(len(functions))]


def time_steps(
    n_ranks: int, prepare: Callable[[int], Any], *steps: Callable[[Any], Any], tries: int = 3, threads_per_rank: int = 1
) -> list[tuple[float, ...]]:
    """Runs steps on gloo ranks of this machine; all ranks begin each step together.

    Args:
        n_ranks: number of ranks.
        prepare: called with the local rank, not timed.
        steps: each is called with what the one before it returned, the first with what ``prepare`` returned.
        tries: how often to launch and run. Default: 3.
        threads_per_rank: CPU threads of a rank. Default: 1.

    Returns:
        list: for each try the seconds of each step, until the last rank is done; the fastest try is the first.

    Example:
        >>> import time
        >>> from ignite_ddl.course.clock import time_steps
        >>> [(seconds,)] = time_steps(2, int, lambda rank: time.sleep(0.1), tries=1)
        >>> seconds >= 0.1
        True
    """
    found = []
    for _ in range(tries):
        with ddl.Parallel("gloo", nproc_per_node=n_ranks, threads_per_rank=threads_per_rank, timeout=120) as ranks:
            # The longest: a rank that is late to start its clock measures less.
            found.append(tuple(map(max, zip(*ranks.run(_on_a_rank, prepare, steps), strict=True))))
    return sorted(found, key=sum)


def other_programs(seconds: float = 1.0) -> str:
    """How busy the cores are while this process waits: what a measured time is worth.

    Args:
        seconds: how long to look. Default: 1.

    Returns:
        str: such as "2 cores, 3 % busy with other programs".

    Example:
        >>> from ignite_ddl.course.clock import other_programs
        >>> other_programs(0.1).endswith("busy with other programs")
        True
    """
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} core{'s' * (cores > 1)}, {psutil.cpu_percent(seconds):.0f} % busy with other programs"


def _on_a_rank(
    local_rank: int, prepare: Callable[[int], Any], steps: tuple[Callable[[Any], Any], ...]
) -> tuple[float, ...]:
    given, seconds = prepare(local_rank), []
    for step in steps:
        idist.barrier()
        began = time.perf_counter()
        given = step(given)
        idist.barrier()
        seconds.append(time.perf_counter() - began)
    return tuple(seconds)


class HandClock:
    """A clock that moves only when it is told to: what is measured with it is known exactly.

    Attributes:
        now: seconds.
        reads: how often it was called.

    Example:
        >>> from ignite_ddl.course.clock import HandClock
        >>> clock = HandClock()
        >>> clock.advance(3)
        >>> clock(), clock.reads
        (1003.0, 1)
    """

    def __init__(self) -> None:
        self.now, self.reads = 1000.0, 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now

    def advance(self, seconds: float) -> None:
        """Moves the clock."""
        self.now += seconds


class TimedBatches:
    """Batches that take their time on a :class:`HandClock`.

    Args:
        clock: the clock.
        n: number of batches.
        seconds: of each batch.
        first: seconds more of the first batch of an epoch. Default: 0.
        growth: seconds more of each batch in each further epoch. Default: 0.

    Example:
        >>> from ignite_ddl.course.clock import HandClock, TimedBatches
        >>> clock = HandClock()
        >>> [(batch, clock.now) for batch in TimedBatches(clock, 2, seconds=3, first=1)]
        [(0, 1004.0), (1, 1007.0)]
    """

    def __init__(self, clock: HandClock, n: int, seconds: float, first: float = 0, growth: float = 0) -> None:
        self.clock, self.n, self.seconds, self.first, self.growth = clock, n, seconds, first, growth

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.n):
            self.clock.advance(self.seconds + (0 if batch else self.first))
            yield batch
        self.seconds += self.growth
