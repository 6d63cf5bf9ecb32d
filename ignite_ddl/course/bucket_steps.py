"""DDP's buckets on a line that takes as long as it says, watched for chapter 10's timelines."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ignite_ddl.course.delay import Delay
from ignite_ddl.course.line import SlowLine
from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab import Timeline, cost

__all__ = ["watch_buckets"]


def watch_buckets(n_ranks: int, bucket_bytes: int, link: cost.Link) -> tuple[dict[str, list], float]:
    """A training step of DDP over four equal layers: 20 ms of forward and 40 of backward each, as delays put in.

    A layer's gradient has 128 × 128 float32 numbers. Two steps run first, in which DDP arranges its buckets; of the
    next four the fastest is returned, since a busy machine only adds time.

    Args:
        n_ranks: ranks to start.
        bucket_bytes: DDP's ``bucket_cap_mb``, in bytes.
        link: the line that a ring all-reduce of each bucket takes.

    Returns:
        rank 0's records of forward, backward and of its line, by row, and the step's seconds, until the last pass
        and the last bucket are done.

    Example:
        >>> from ignite_ddl.course import watch_buckets
        >>> from ignite_ddl.lab import cost
        >>> rows, seconds = watch_buckets(2, 128 * 128 * 4, cost.Link(latency=0, bandwidth=1e9))
        >>> list(rows), len(rows["its line"]), seconds > 0.24
        (['rank 0', 'its line'], 4, True)
    """
    return min(on_ranks(n_ranks, _watched_steps, bucket_bytes, link)[0], key=lambda step: step[1])


def _watched_steps(local_rank: int, bucket_bytes: int, link: cost.Link) -> list[tuple[dict[str, list[Any]], float]]:
    layers = [[nn.Linear(128, 128, bias=False), Delay(0.020, 0.040)] for _ in range(4)]
    replica = DDP(nn.Sequential(*sum(layers, [])), bucket_cap_mb=bucket_bytes / 2**20)
    slow = SlowLine(link)
    replica.register_comm_hook(slow, SlowLine.average)
    steps = []
    for _ in range(6):
        slow.records.clear()
        idist.barrier()
        with Timeline() as timeline:
            with timeline.span("forward", "forward"):
                loss = replica(torch.ones(2, 128)).sum()
            with timeline.span("backward", "backward"):
                loss.backward()
        passes = [record for record in timeline.records if record.kind in ("forward", "backward")]
        rows = {"rank 0": passes, "its line": list(slow.records)}
        steps.append((rows, max(row[-1].end for row in rows.values()) - passes[0].start))
    return steps[2:]
