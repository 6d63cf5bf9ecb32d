"""Times steps of a pipeline, pass by pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from statistics import mean
from typing import NamedTuple

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.course.delay import Delay
from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab import Timeline, bubble
from ignite_ddl.lab.record import PASSES, Record

__all__ = ["PipelineStep", "steps_by_hand", "time_pipeline"]


class PipelineStep(NamedTuple):
    """A measured step.

    Attributes:
        seconds: from the first pass of any rank to the end of the last.
        bubble: the share of these seconds in which a rank does not compute, a mean over the ranks.
        records: the passes of all ranks, and what was sent between them.
    """

    seconds: float
    bubble: float
    records: list[Record]

    def mean_seconds(self, kind: str) -> list[float]:
        """The mean time of each stage's passes of one kind.

        Args:
            kind: of the passes, as "forward".

        Returns:
            list: seconds, in the order of the stages.

        Example:
            >>> from ignite_ddl.course.pipeline_steps import PipelineStep
            >>> from ignite_ddl.lab import simulate
            >>> simulated = simulate.pipeline("1f1b", 2, 4, [1, 2], [1, 2], [1, 2])
            >>> step = PipelineStep(simulated.seconds, simulated.bubble, simulated.records)
            >>> step.mean_seconds("forward")
            [1.0, 2.0]
        """
        passes = [record for record in self.records if record.kind == kind]
        stages = sorted({record.stage for record in passes})
        return [mean(record.seconds for record in passes if record.stage == stage) for stage in stages]


def time_pipeline(
    n_ranks: int,
    cases: Iterable[tuple[str, int]],
    layer: Callable[[], nn.Module],
    n_layers: int,
    x: torch.Tensor,
    n_steps: int = 3,
) -> dict[tuple[str, int], list[PipelineStep]]:
    """Runs steps of pipelines on gloo ranks of this machine. The first step of each, which sets it up, is left out.

    Args:
        n_ranks: stages of the pipeline, or half as many for a schedule with two on each rank.
        cases: schedules with their numbers of microbatches.
        layer: makes one layer; its output has the input's shape. A ``Delay`` in it sleeps in timed steps only.
        n_layers: layers of the model.
        x: a batch.
        n_steps: timed steps of each case. Default: 3.

    Returns:
        dict: case to its steps, the shortest first.

    Example:
        >>> import torch
        >>> from ignite_ddl.course import Delay, time_pipeline
        >>> def layer():
        ...     return torch.nn.Sequential(torch.nn.Linear(4, 4), Delay(0.01, 0.02))
        >>> steps = time_pipeline(2, [("gpipe", 2)], layer, n_layers=2, x=torch.ones(4, 4), n_steps=1)
        >>> steps["gpipe", 2][0].seconds >= 0.09  # three turns of 30 ms
        True
    """
    cases = list(cases)
    watches = zip(*on_ranks(n_ranks, _watched, cases, layer, n_layers, x, n_steps, dp=1, pp=n_ranks), strict=True)
    return {
        case: sorted(map(_step, Timeline.merge(of_case).actions()), key=lambda step: step.seconds)
        for case, of_case in zip(cases, watches, strict=True)
    }


def steps_by_hand(ranks: Iterable[Iterable[Timeline]]) -> list[PipelineStep]:
    """Steps whose passes were noted with ``watch.span(microbatch, kind)``, for ``draw.schedules``; the shortest first.

    Args:
        ranks: for each rank a timeline of each step.

    Example:
        >>> from ignite_ddl.course import steps_by_hand
        >>> from ignite_ddl.lab import Timeline
        >>> with Timeline() as watch, watch.span("0", kind="forward"):
        ...     pass
        >>> steps_by_hand([[watch]])[0].records[0].microbatch
        '0'
    """
    merged = (Timeline.merge(watches).records for watches in zip(*ranks, strict=True))
    named = ([record._replace(microbatch=record.name) for record in records] for records in merged)
    return sorted(map(_step, named), key=lambda step: step.seconds)


def _step(records: list[Record]) -> PipelineStep:
    passes = [record for record in records if record.kind in PASSES]
    seconds = max(record.end for record in passes) - min(record.start for record in passes)
    return PipelineStep(seconds, mean(bubble(records).values()), records)


def _watched(
    local_rank: int,
    cases: list[tuple[str, int]],
    layer: Callable[[], nn.Module],
    n_layers: int,
    x: torch.Tensor,
    n_steps: int,
) -> list[Timeline]:
    logging.disable(logging.INFO)
    watches = []
    for schedule, n_microbatches in cases:
        whole = nn.Sequential(*[layer() for _ in range(n_layers)])
        model = ddl.auto_model(whole, schedule=schedule, n_microbatches=n_microbatches)
        delays = [(module, module.seconds) for module in model.modules() if isinstance(module, Delay)]
        for delay, seconds in delays:
            delay.seconds = dict.fromkeys(seconds, 0.0)
        model.train_step(x, x, F.mse_loss)
        for delay, seconds in delays:
            delay.seconds = seconds
        with Timeline() as watch:
            for _ in range(n_steps):
                idist.barrier()  # no rank begins while another is still in the step before
                model.train_step(x, x, F.mse_loss)
        watches.append(watch)
    return watches
