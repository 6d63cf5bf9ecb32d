"""Simulation of a run whose nodes fail at random, and which goes on from its last checkpoint."""

from __future__ import annotations

import random
from typing import NamedTuple

from ignite_ddl.arguments import INTEGER, POSITIVE, takes
from ignite_ddl.lab.cost import FITS

__all__ = ["RunWithFailures", "failures"]

_INTERVALS = 1e8  # each is played


class RunWithFailures(NamedTuple):
    """A simulated run; the four times add up to ``seconds``.

    Attributes:
        seconds: time from the beginning to the end.
        useful: work that counts.
        saving: complete checkpoints.
        lost: work and saves that a failure destroyed.
        restarting: restarts, also those that failed.
        n_failures: how often a node failed.
    """

    seconds: float
    useful: float
    saving: float
    lost: float
    restarting: float
    n_failures: int

    @property
    def goodput(self) -> float:
        """The share of the time that is work that counts."""
        return self.useful / self.seconds if self.seconds else 1.0


@takes(FITS, interval=POSITIVE, node_mean_time=POSITIVE, seed=INTEGER)
def failures(
    n_nodes: int, node_mean_time: float, interval: float, save: float, restart: float, work: float, seed: int = 0
) -> RunWithFailures:
    """Plays a run of many nodes, any of which stops all of them when it fails.

    Work goes on for ``interval``, then a checkpoint is saved, and so on until ``work`` is done and saved. At a failure
    everything since the last complete checkpoint is lost, and a restart follows, during which a node may fail, too.
    ``cost.goodput`` is the closed form of its mean.

    Args:
        n_nodes: nodes of the run.
        node_mean_time: seconds until one node fails, on average; the times are exponential.
        interval: seconds of work between two checkpoints.
        save: seconds for which a checkpoint stops the work.
        restart: seconds from a failure until work goes on.
        work: seconds of work to be done.
        seed: of the random numbers. Default: 0.

    Returns:
        RunWithFailures: where the time went.

    Raises:
        ValueError: if ``interval`` or ``node_mean_time`` is not positive, or so little of an interval and its save fits
            between two failures that the run would not end.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import simulate

            year, minute = 365 * 24 * 3600, 60
            run = simulate.failures(
                n_nodes=2000, node_mean_time=6 * year, interval=30 * minute, save=minute, restart=10 * minute,
                work=year / 12,
            )
            assert 0.9 < run.goodput < 1 and run.n_failures > 10
    """
    mean_time = node_mean_time / n_nodes
    if (interval + save + restart) / mean_time > 20:  # one attempt in 10 ** 8 would succeed
        raise ValueError(
            f"one of {n_nodes} nodes of node_mean_time={node_mean_time:g} fails every {mean_time:g} s on average, but "
            f"restart, interval and save take {interval + save + restart:g} s together, so that the run would not end: "
            "save more often"
        )
    if work / interval > _INTERVALS:
        raise ValueError(f"work should be {_INTERVALS:g} intervals of {interval:g} s at most, but given {work:g} s")
    chance = random.Random(seed)
    done = saving = lost = restarting = 0.0
    n_failures = 0
    left = chance.expovariate(1 / mean_time)  # until the next failure
    while done < work:
        part = min(interval, work - done)
        if left >= part + save:
            left -= part + save
            done, saving = done + part, saving + save
            continue
        lost += left
        n_failures += 1
        while (left := chance.expovariate(1 / mean_time)) < restart:
            restarting += left
            n_failures += 1
        left -= restart
        restarting += restart
    return RunWithFailures(done + saving + lost + restarting, done, saving, lost, restarting, n_failures)
