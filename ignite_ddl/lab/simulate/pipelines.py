"""Simulation of pipeline schedules with given stage times."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ignite_ddl.arguments import WORLD, each, number, takes
from ignite_ddl.lab.cost import FITS, Link
from ignite_ddl.lab.orders import Action, schedule_entries
from ignite_ddl.lab.record import Record
from ignite_ddl.lab.simulate.world import ONE_OR_EACH, Rank, number_for_each, run
from ignite_ddl.pipeline.schedules import NAME, SCHEDULES, divisors, stage_owners, suits

__all__ = ["PipeDream", "Pipeline", "PipelinePlan", "best_pipelines", "pipedream", "pipeline"]
_FITS = FITS | {
    "schedule": NAME,
    **dict.fromkeys(("n_microbatches", "batch_size"), WORLD),
    **dict.fromkeys(("forward", "backward_input", "backward_weight"), ONE_OR_EACH),
}
_KINDS = {"F": "forward", "I": "backward", "B": "backward", "W": "backward_weight"}


class Pipeline(NamedTuple):
    """A simulated pipeline step. The first six fields are those of :class:`Simulation`.

    Attributes:
        seconds: makespan.
        messages: number of messages that each rank sent: a microbatch's activation, or its gradient.
        bytes: zeros; sizes are not simulated.
        records: what each rank did, gaps as "idle".
        in_flight: every transfer.
        returned: None for each rank.
        bubble: the share of all ranks' time, up to the makespan, in which they do not compute.
        idle: for each rank the seconds between its first and its last action in which it does not compute. Papers on
            zero bubbles report these: a rank may then begin its next step before others have ended theirs.
        peak_activations: for each rank the peak number of (microbatch, stage) pairs kept for backward.
        actions: the simulated schedule, one list per rank.
    """

    seconds: float
    messages: list[int]
    bytes: list[float]
    records: list[Record]
    in_flight: list[Record]
    returned: list[Any]
    bubble: float
    idle: list[float]
    peak_activations: list[int]
    actions: list[list[Action]]


@takes(_FITS)
def pipeline(
    schedule: str,
    n_ranks: int,
    n_microbatches: int,
    forward: float | Sequence[float] = 1.0,
    backward_input: float | Sequence[float] = 1.0,
    backward_weight: float | Sequence[float] = 1.0,
    transfer: float = 0.0,
    overhead: float = 0.0,
    n_chunks: int | None = None,
) -> Pipeline:
    """Simulates a schedule: each rank runs its actions in order, each as soon as its inputs have arrived.

    Equal stages and free transfers give the closed forms. gpipe, 1f1b, interleaved_1f1b and looped_bfs:
    ``cost.pipeline_bubble`` (Narayanan et al. 2021). interleaved_zero_bubble: ``cost.zero_bubble_seconds`` with a
    stage's times; with one stage per rank this is ZB-H1 (Qi et al. 2023, table 2; torch has no schedule for ZB-H2).
    zbv with F = B = W and at least 2p - 1 microbatches: no rank is idle between its first and its last action (Qi et
    al., section 6 of the arXiv version), and for (p - 1) F within the makespan. torch differs from the papers: its zbv
    has one fixed order, the paper's scheduler adapts the order to F, B and W; its dualpipev pairs a forward with a
    backward, which torch runs one after the other, forward first, and sends the outputs of both when both are done.
    This is simulated so.

    Args:
        schedule: a name of ``SCHEDULES``.
        n_ranks: ranks of the pipeline.
        n_microbatches: microbatches per step.
        forward: seconds of one microbatch on one stage, a number or one per stage (a list, an array or a tensor).
            Default: 1.
        backward_input: the same for the gradient of the input. Default: 1. A whole backward is both parts.
        backward_weight: the same for the gradient of the weights. Default: 1.
        transfer: seconds of an activation or its gradient between two ranks. Default: 0.
        overhead: additional seconds of every action. Default: 0.
        n_chunks: stages on each rank. Default: 1 for gpipe and 1f1b, 2 for the others.

    Returns:
        Pipeline: seconds, bubble, peak activations, and records for ``draw.timeline``.

    Raises:
        ValueError: for an unknown schedule, numbers that do not suit it, negative times, or a number of times that is
            not the number of stages.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost, simulate

            step = simulate.pipeline("1f1b", n_ranks=4, n_microbatches=8)
            assert abs(step.bubble - cost.pipeline_bubble(4, 8)) < 1e-9
            assert step.peak_activations == [4, 3, 2, 1]
    """
    owners = stage_owners(schedule, n_ranks, n_chunks)
    entries = schedule_entries(schedule, n_ranks, n_microbatches, n_chunks)
    actions = [[action for entry in row for action in entry] for row in entries]
    given = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    times = [number_for_each(len(owners), **{name: seconds}) for name, seconds in given.items()]

    def seconds(action: Action) -> float:
        f, i, w = (of_stage[action.stage] for of_stage in times)
        return overhead + {"F": f, "I": i, "W": w, "B": i + w}[action.kind]

    # Actions whose outputs are sent after the next action, because torch runs the two as an overlapped pair.
    sent_later = {entry[0] for row in entries for entry in row if len(entry) == 2}

    def program(rank: Rank) -> Generator:
        return _run_actions(rank, actions[rank.number], owners, seconds, sent_later)

    played = run(program, n_ranks, Link(latency=transfer, bandwidth=math.inf))
    busy = [sum(seconds(action) for action in order) for order in actions]
    computed = [
        [span for span in played.records if span.rank == rank and span.kind in _KINDS.values()]
        for rank in range(n_ranks)
    ]
    kept = {"F": 1, "B": -1, "W": -1, "I": 0}  # microbatches more
    peaks = [max(accumulate(kept[action.kind] for action in order)) for order in actions]
    return Pipeline(
        *played._replace(records=_with_idle_ends(played.records, n_ranks, played.seconds)),
        bubble=1 - sum(busy) / (n_ranks * played.seconds) if played.seconds else 0.0,
        idle=[
            spans[-1].end - spans[0].start - work if spans else 0.0 for spans, work in zip(computed, busy, strict=True)
        ],
        peak_activations=peaks,
        actions=actions,
    )


def _run_actions(
    rank: Rank, order: list[Action], owners: list[int], seconds: Callable[[Action], float], sent_later: set[Action]
) -> Generator:
    """The program of a rank: each action as soon as its inputs have arrived."""
    done, outgoing = set(), []
    for action in order:
        kind, stage, microbatch = action
        # Forward needs the output of the previous stage, backward the gradient of the next stage.
        source, target = {"F": (stage - 1, stage + 1), "W": (-1, -1)}.get(kind, (stage + 1, stage - 1))
        tag = ("F" if kind == "F" else "B", microbatch)
        if 0 <= source < len(owners):
            if owners[source] != rank.number:
                yield rank.recv(owners[source], (*tag, stage))
            elif (tag[0], source, microbatch) not in done:
                raise RuntimeError(f"rank {rank.number}: {action} comes before what it needs")
        if kind != "F" and ("B" if kind == "W" else "F", stage, microbatch) not in done:
            raise RuntimeError(f"rank {rank.number}: {action} comes before what it needs")
        name = f"{stage}{kind}{microbatch}"  # as torch and Timeline call it
        yield rank.compute(seconds(action), name, _KINDS[kind], stage=stage, microbatch=microbatch)
        if kind != "W":
            done.add((tag[0], stage, microbatch))
            if 0 <= target < len(owners) and owners[target] != rank.number:
                outgoing.append((owners[target], (*tag, target)))
        if action not in sent_later:
            for to, message_tag in outgoing:
                rank.send(to, 0, tag=message_tag)
            outgoing.clear()


def _with_idle_ends(records: list[Record], n_ranks: int, end: float) -> list[Record]:
    """Adds "idle" records so that every rank's records last until the end of the step."""
    last = dict.fromkeys(range(n_ranks), 0.0)
    for span in records:
        last[span.rank] = max(last[span.rank], span.end)
    ends = [Record(rank, "idle", "done", at, end) for rank, at in last.items() if at < end]
    return sorted([*records, *ends], key=lambda span: (span.rank, span.start, span.end))


class PipeDream(NamedTuple):
    """A simulated asynchronous pipeline. A version is the number of updates that a stage has made.

    Attributes:
        pipeline: the passes, times and activations of the whole run, as one 1F1B step.
        forward_versions: for each stage, the version used by each microbatch's forward pass, and with weight stashing
            also by its backward pass.
        backward_versions: for each stage, the newest version at each microbatch's backward pass, which that pass uses
            without weight stashing.
        stashed: for each stage the peak number of versions held with weight stashing, including the newest.
    """

    pipeline: Pipeline
    forward_versions: list[list[int]]
    backward_versions: list[list[int]]
    stashed: list[int]


@takes(_FITS)
def pipedream(
    n_ranks: int,
    n_microbatches: int,
    forward: float | Sequence[float] = 1.0,
    backward_input: float | Sequence[float] = 1.0,
    backward_weight: float | Sequence[float] = 1.0,
    transfer: float = 0.0,
    overhead: float = 0.0,
) -> PipeDream:
    """Simulates PipeDream: 1F1B without flushes, where a stage updates its weights after each backward pass.

    The order is that of one 1F1B step over all microbatches of the run, so with equal stages and free transfers the
    bubble is (p - 1) / (m + p - 1) of the whole run. Stage s (from 0) runs microbatch k forward with version
    max(0, k - (p - 1 - s)) and has version k at its backward pass; it stashes p - s versions
    if m is at least 2 (p - s) - 1. Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism
    for DNN Training", SOSP 2019, sections 3.2 (1F1B) and 3.3 (weight stashing, with stages from 1).

    Args:
        n_ranks: p, ranks of the pipeline, one stage each.
        n_microbatches: m, all microbatches of the run (the paper's minibatches), at least ``n_ranks``.
        forward: seconds of one microbatch on one stage, a number or one per stage. Default: 1.
        backward_input: the same for the gradient of the input. Default: 1.
        backward_weight: the same for the gradient of the weights and the update. Default: 1.
        transfer: seconds of an activation or its gradient between two ranks. Default: 0.
        overhead: additional seconds of every pass. Default: 0.

    Returns:
        PipeDream: the run, and which version of the weights each pass uses.

    Raises:
        ValueError: for numbers that do not suit 1F1B.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import simulate

            run = simulate.pipedream(n_ranks=4, n_microbatches=8)
            assert run.forward_versions[0] == [0, 0, 0, 0, 1, 2, 3, 4]
            assert run.forward_versions[3] == run.backward_versions[3] == list(range(8))
            assert run.stashed == [4, 3, 2, 1]
    """
    played = pipeline("1f1b", n_ranks, n_microbatches, forward, backward_input, backward_weight, transfer, overhead)
    forward_versions, backward_versions, stashed = [], [], []
    for order in played.actions:
        version, most = 0, 1
        used, met, in_flight = [], [], {}
        for action in order:
            if action.kind == "F":
                used.append(version)
                in_flight[action.microbatch] = version
            else:
                met.append(version)
                del in_flight[action.microbatch]
                version += 1
            most = max(most, len({version, *in_flight.values()}))
        forward_versions.append(used)
        backward_versions.append(met)
        stashed.append(most)
    return PipeDream(played, forward_versions, backward_versions, stashed)


class PipelinePlan(NamedTuple):
    """A schedule and a number of microbatches, with their simulated cost.

    Attributes:
        schedule: its name.
        n_microbatches: microbatches per step.
        seconds: of the step.
        bubble: the share of all ranks' time in which they do not compute.
        peak_samples: the peak number of samples whose activations one rank keeps, for all of its layers.
    """

    schedule: str
    n_microbatches: int
    seconds: float
    bubble: float
    peak_samples: float


@takes(
    _FITS, schedules=each(NAME, f"some of {', '.join(SCHEDULES)}"), n_microbatches=each(WORLD, "positive integers"),
    max_peak_samples=number(0, math.inf),
)  # fmt: skip
def best_pipelines(
    n_ranks: int,
    batch_size: int,
    forward: float | Sequence[float],
    backward_input: float | Sequence[float],
    backward_weight: float | Sequence[float],
    overhead: float = 0.0,
    activation_bytes: float = 0.0,
    link: Link | None = None,
    schedules: Iterable[str] = SCHEDULES,
    n_microbatches: Iterable[int] | None = None,
    max_peak_samples: float = math.inf,
) -> list[PipelinePlan]:
    """Simulates schedules and numbers of microbatches, and sorts them by time.

    More microbatches reduce the bubble, but add ``overhead`` and latency, so there is an optimal number. A stage's time
    is its seconds per sample times the samples of a microbatch, plus ``overhead``.

    Args:
        n_ranks: ranks of the pipeline.
        batch_size: samples per step, on this pipeline.
        forward: seconds per sample, of the whole model, or measured: one number for each of 2 ``n_ranks`` consecutive
            parts of it (a schedule with one stage per rank joins two parts).
        backward_input: the same for the gradients of the inputs.
        backward_weight: the same for the gradients of the weights.
        overhead: additional seconds of each action, independent of the microbatch. Default: 0.
        activation_bytes: of one sample between two stages. Default: 0.
        link: the network; with None (default) transfers are free.
        schedules: names to try. Default: all.
        n_microbatches: numbers to try, each a divisor of the batch size; those that do not suit a schedule are
            skipped for it. Default: all divisors of the batch size.
        max_peak_samples: excludes plans that keep the activations of more samples. Default: no limit.

    Returns:
        list: of :class:`PipelinePlan`, by time, then by ``peak_samples``.

    Raises:
        ValueError: for an unknown schedule, a number of microbatches that does not divide the batch size, negative
            times, or a number of measured times other than 2 ``n_ranks``.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import simulate

            plans = simulate.best_pipelines(
                4, 32, forward=0.004, backward_input=0.004, backward_weight=0.004, overhead=0.001,
                schedules=["gpipe", "1f1b"],
            )
            assert plans[0].schedule == "1f1b" and plans[0].n_microbatches == 16
    """
    candidates = divisors(batch_size) if n_microbatches is None else n_microbatches
    if uneven := [count for count in candidates if batch_size % count]:
        raise ValueError(f"n_microbatches should divide batch_size={batch_size}, but given {uneven[0]}")
    measured = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    plans = []
    for schedule in schedules:
        n_chunks = len(stage_owners(schedule, n_ranks)) // n_ranks
        parts = [_parts(name, given, n_ranks, n_chunks) for name, given in measured.items()]
        for count in candidates:
            if not suits(schedule, count, n_ranks):
                continue
            size = batch_size / count
            times = [[size * seconds for seconds in part] for part in parts]
            transfer = link.seconds(size * activation_bytes) if link is not None else 0.0
            step = pipeline(schedule, n_ranks, count, *times, transfer=transfer, overhead=overhead)
            peak = max(step.peak_activations) * size / n_chunks
            if peak <= max_peak_samples:
                plans.append(PipelinePlan(schedule, count, step.seconds, step.bubble, peak))
    return sorted(plans, key=lambda plan: (plan.seconds, plan.peak_samples, plan.n_microbatches))


def _parts(name: str, given: float | Sequence[float], n_ranks: int, n_chunks: int) -> list[float]:
    """Seconds of each stage, given those of the whole model or of 2 n_ranks parts."""
    if not isinstance(given, list):
        return [given / (n_ranks * n_chunks)] * (n_ranks * n_chunks)
    if len(given) != 2 * n_ranks:
        raise ValueError(f"{name}, if measured, should have 2 n_ranks = {2 * n_ranks} parts, but given {len(given)}")
    return given if n_chunks == 2 else [a + b for a, b in zip(given[::2], given[1::2], strict=True)]
