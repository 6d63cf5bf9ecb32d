"""A synchronous step of a parameter server between real processes, with the network's and the workers' time put in."""

from __future__ import annotations

import time

import ignite.distributed as idist
import torch
import torch.distributed as dist

from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab import Timeline, cost
from ignite_ddl.lab.record import Record

__all__ = ["time_server_step"]


def time_server_step(
    n_workers: int, n_servers: int, weight_bytes: int, link: cost.Link, compute_seconds: float, rounds: int = 4
) -> tuple[float, dict[str, list[Record]]]:
    """Pull, compute, push: the messages are real, a server's port and a worker's computing are sleeps.

    Each message keeps its server's port busy for ``link.seconds`` of its bytes, one message after the other. The
    three phases do not overlap: in truth a port serves all workers at once, a little each, so all have their weights
    at the end of the pull. What a busy machine adds only makes a step longer, so the shortest of the rounds is kept.

    Args:
        n_workers: number of workers.
        n_servers: number of servers; each holds an equal part of the weights.
        weight_bytes: bytes of all weights; their gradients are as large.
        link: of a server's port.
        compute_seconds: forward and backward of one worker's part.
        rounds: number of steps, of which the shortest is returned. Default: 4.

    Returns:
        tuple: the step's seconds; and a row for each process, "server 0", ..., "worker 0", ..., with its records:
        "↓2" is the message with weights for worker 2, "↑2" its gradient.

    Example:
        >>> from ignite_ddl.course import time_server_step
        >>> from ignite_ddl.lab import cost
        >>> line = cost.Link(latency=0.005, bandwidth=1e9)
        >>> seconds, rows = time_server_step(2, 1, 80, line, compute_seconds=0.01, rounds=1)
        >>> seconds >= 4 * 0.005 + 0.01
        True
        >>> [record.name for record in rows["server 0"]]
        ['↓0', '↓1', '↑0', '↑1']
    """
    steps = on_ranks(n_servers + n_workers, _steps, n_servers, weight_bytes // n_servers, link, compute_seconds, rounds)
    step = min(zip(*steps, strict=True), key=_seconds)
    names = [f"server {i}" for i in range(n_servers)] + [f"worker {i}" for i in range(n_workers)]
    return _seconds(step), dict(zip(names, step, strict=True))


def _steps(
    local_rank: int, n_servers: int, part_bytes: int, link: cost.Link, compute_seconds: float, rounds: int
) -> list[list[Record]]:
    servers, workers = range(n_servers), range(n_servers, idist.get_world_size())
    serves, part, steps = local_rank in servers, torch.zeros(part_bytes, dtype=torch.uint8), []
    for _ in range(rounds):
        with Timeline() as timeline:
            for phase in ("↓", "compute", "↑"):
                idist.barrier()
                if phase == "compute":
                    if not serves:
                        with timeline.span(phase, "compute"):
                            time.sleep(compute_seconds)
                    continue
                for other in workers if serves else servers:
                    if serves:
                        with timeline.span(f"{phase}{other - n_servers}", "communication"):
                            time.sleep(link.seconds(part_bytes))
                    (dist.send if serves == (phase == "↓") else dist.recv)(part, other)
        steps.append([record for record in timeline.records if record.name[0] in "↓c↑"])
    return steps


def _seconds(step: tuple[list[Record], ...]) -> float:
    records = [record for of_rank in step for record in of_rank]
    return max(record.end for record in records) - min(record.start for record in records)
