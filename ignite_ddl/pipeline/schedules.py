"""The pipeline schedules: their names, stage owners, numbers of microbatches, and the order of passes on each rank.

A schedule is an order of passes for each rank. Below, an order is a list of words such as ``F0 I1 W1 F1``:

- The letter is the pass, as in torch: "F" forward, "B" the whole backward pass, "I" its part for the gradient of the
  stage's input, "W" its part for the gradients of the weights.
- The digits are the chunk: the index of the stage among the rank's own stages.
- The microbatch is omitted if each stage takes microbatches in order: its third "F" is that of microbatch 2. Otherwise
  it follows a colon, as in ``B1:7``.
- ``F0+B1`` are two passes that should overlap.

The orders are those of ``torch.distributed.pipelining``, which runs them; a test compares them for each rank. This
file and what it imports need only the standard library, so that a web page can run it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ignite_ddl.arguments import COUNT, WORLD, check, one_of, whole

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "check_microbatches",
    "divisors",
    "microbatches_for",
    "schedule_actions",
    "schedule_entries",
    "stage_owners",
    "suits",
]


class Action(NamedTuple):
    """One pass of a schedule.

    Attributes:
        kind: "F" forward, "B" the whole backward, "I" its input part, "W" its weight part (torch's letters).
        stage: index of the stage.
        microbatch: index of the microbatch.
    """

    kind: str
    stage: int
    microbatch: int


# ------------------------------------------------------------------------------------------- orders
# Each takes a rank, the number of ranks p, of microbatches m and of chunks v, and returns that rank's words.


def _gpipe(rank: int, p: int, m: int, v: int) -> list[str]:
    """All forward passes, then all backward passes. Huang et al. 2019, "GPipe" (arXiv 1811.06965), section 2.3."""
    return ["F0"] * m + ["B0"] * m


def _1f1b(rank: int, p: int, m: int, v: int) -> list[str]:
    """p - r forward passes on rank r, then one backward and one forward pass in turn.

    So rank r keeps the activations of at most p - r microbatches. Narayanan et al. 2021, "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 2.2.1.
    """
    ahead = min(m, p - rank)
    return ["F0"] * ahead + ["B0", "F0"] * (m - ahead) + ["B0"] * ahead


def _interleaved_1f1b(rank: int, p: int, m: int, v: int, passes_per_hop: int = 2) -> list[str]:
    """1F1B with v stages on each rank, depth first: a round of microbatches passes all chunks, one after the other.

    The last rank runs its first backward pass after all chunks but the last have processed a round, and the last
    chunk has processed its first microbatch. Each rank before it runs two more forward passes first for each hop to
    the last rank: one while the microbatch travels there and one while its gradient returns. Narayanan et al. 2021
    (arXiv 2104.04473), section 2.2.2. There a round has p microbatches; torch uses equal rounds of p or more, or a
    single round of fewer.
    """
    per_round = m // max(1, m // p)
    forward = [chunk for _ in range(m // per_round) for chunk in range(v) for _ in range(per_round)]
    ahead = min(len(forward), (v - 1) * per_round + passes_per_hop * (p - 1 - rank))
    order = [f"F{chunk}" for chunk in forward[:ahead]]
    for n, chunk in enumerate(forward):
        order += [f"F{later}" for later in forward[ahead + n : ahead + n + 1]]
        order.append(f"B{v - 1 - chunk}")
    return order


def _interleaved_zero_bubble(rank: int, p: int, m: int, v: int) -> list[str]:
    """Interleaved 1F1B with a split backward pass: earlier stages need only "I", and "W" is delayed.

    A rank starts with one forward pass less for each hop to the last rank, and delays as many "W" as there are ranks
    before it: so every rank keeps the activations of equally many microbatches, and the delayed "W" fill the bubble
    at the end. With v = 1 it is ZB-H1 of Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv
    2401.10241), section 2.1.
    """
    order, waiting = [], deque()
    for word in _interleaved_1f1b(rank, p, m, v, passes_per_hop=1):
        if word.startswith("F"):
            order.append(word)
            continue
        order.append(word.replace("B", "I"))
        waiting.append(word.replace("B", "W"))
        if len(waiting) > rank:
            order.append(waiting.popleft())
    return order + list(waiting)


def _looped_bfs(rank: int, p: int, m: int, v: int) -> list[str]:
    """Breadth first: all microbatches through one chunk, then all through the next; then the backward passes.

    Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism" (arXiv 2211.05953). torch runs the backward passes from
    the last microbatch to the first.
    """
    forward = [f"F{chunk}:{microbatch}" for chunk in range(v) for microbatch in range(m)]
    return forward + [word.replace("F", "B") for word in reversed(forward)]


def _zbv(rank: int, p: int, m: int, v: int) -> list[str]:
    """Zero bubble in a V shape: the last rank owns the two stages in the middle, the first rank the two outer ones.

    The order is optimal for F = I = W: then no rank waits between its first and its last pass. It needs 2p - 1
    microbatches; with fewer it is the order for 2p - 1 without the missing microbatches. Qi et al.
    2023 (arXiv 2401.10241), section 6.
    """
    full = max(m, 2 * p - 1)
    from_here = p - rank
    return (
        "F0 " * (2 * from_here - 1)  # until the first microbatch returns
        + "F1 F0 " * rank
        + "F1 I1 W1 " * from_here  # until the first gradient reaches chunk 0
        + "F0 I0 W0 F1 I1 W1 " * (full - 2 * p + rank + 1)
        + "I0 W0 F1 I1 W1 " * (from_here - 1)
        + "I0 I1 " * rank  # first what other ranks wait for, then the weights
        + "I0 W0 " * from_here
        + "W1 " * rank
        + "W0 " * rank
    ).split()


def _dualpipev(rank: int, p: int, m: int, v: int) -> list[str]:
    """A forward and a backward pass of different microbatches overlap: one computes while the other communicates.

    DualPipe sends microbatches in from both ends of the pipeline and so keeps two copies of the weights: DeepSeek-AI
    2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.2.1. Cut in half, as a V, it needs one: Sea AI
    Lab 2025, "Cut-in-half" (https://huggingface.co/blog/ufotalent/cut-in-half). DeepSeek calls this DualPipeV and has
    its code in https://github.com/deepseek-ai/DualPipe.
    """
    after = p - 1 - rank  # number of later ranks
    main = "F0+B1 F1+B0 " * (m - 2 * p + rank + 1)
    if after == 0:
        main = main.replace("+", " ", 1)  # on the last rank the first pair does not overlap: a smaller bubble
    rest = [1, 0] * (rank + 1) + [0] * after  # chunks of the last backward passes
    whole, split = rest[: rank + 1], rest[rank + 1 :]  # the later ones are split; the oldest "W" runs first
    order = (
        "F0 " * 2 * after
        + "F0 F1 " * (rank + 1)
        + "I1 W1 F1 " * after
        + main
        + "B1 F1+B0 " * after
        + "".join(f"B{chunk} " for chunk in whole)
        + "".join(f"I{chunk} " for chunk in split[: rank + 1])
        + "".join(f"W{chunk} I0 " for chunk in split[:after])
        + "".join(f"W{chunk} " for chunk in split[after:])
    )
    return order.split()


# ------------------------------------------------------------------------------------------- the table


class Schedule(NamedTuple):
    """The properties of a schedule.

    Attributes:
        torch_class: its class in ``torch.distributed.pipelining.schedules``.
        stages_per_rank: number of stages per rank: 1, or by default 2.
        order: a function from a rank and the numbers of ranks, microbatches and chunks to that rank's words.
        v_shaped: whether rank r owns stages r and 2p - 1 - r; else it owns stages r, r + p, r + 2p, ...
        split_backward: whether some backward passes are split into "I" and "W".
        least_per_rank: minimal number of microbatches per rank.
        equal_rounds: whether it needs equal rounds of at least p microbatches.
    """

    torch_class: str
    stages_per_rank: int
    order: Callable[[int, int, int, int], list[str]]
    v_shaped: bool = False
    split_backward: bool = False
    least_per_rank: int = 0
    equal_rounds: bool = False


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("ScheduleGPipe", 1, _gpipe),
    "1f1b": Schedule("Schedule1F1B", 1, _1f1b, least_per_rank=1),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", 2, _interleaved_1f1b, equal_rounds=True),
    "looped_bfs": Schedule("ScheduleLoopedBFS", 2, _looped_bfs),
    "interleaved_zero_bubble": Schedule(
        "ScheduleInterleavedZeroBubble", 2, _interleaved_zero_bubble, split_backward=True, equal_rounds=True
    ),
    "zbv": Schedule("ScheduleZBVZeroBubble", 2, _zbv, v_shaped=True, split_backward=True),
    "dualpipev": Schedule("ScheduleDualPipeV", 2, _dualpipev, v_shaped=True, split_backward=True, least_per_rank=2),
}


NAME = one_of(*SCHEDULES)
ROWS = whole(most=10**9)  # whose divisors are tried


def _known(schedule: str) -> Schedule:
    return SCHEDULES[check("schedule", schedule, NAME)]


# ------------------------------------------------------------------------------------------- stages and microbatches


def stage_owners(schedule: str, n_ranks: int, n_chunks: int | None = None) -> list[int]:
    """The rank of each stage: 0 to p - 1 repeatedly, or 0 to p - 1 and back to 0 for zbv and dualpipev.

    Args:
        schedule: a name of ``SCHEDULES``.
        n_ranks: ranks of the pipeline.
        n_chunks: stages on each rank. Default: the schedule's own, 1 or 2.

    Returns:
        list: a rank for each stage.

    Raises:
        ValueError: if the schedule is unknown or does not support the numbers.

    Examples:
        .. code-block:: python

            from ignite_ddl.pipeline.schedules import stage_owners

            assert stage_owners("interleaved_1f1b", 2) == [0, 1, 0, 1]
            assert stage_owners("zbv", 2) == [0, 1, 1, 0]
    """
    known = _known(schedule)
    own = known.stages_per_rank
    n_chunks = own if n_chunks is None else n_chunks
    n_ranks, n_chunks = check("n_ranks", n_ranks, WORLD), check("n_chunks", n_chunks, WORLD)
    if n_chunks != own and (own == 1 or known.v_shaped):
        raise ValueError(f"schedule={schedule!r} has {own} stages on each rank, but given n_chunks={n_chunks}")
    ranks = list(range(n_ranks))
    return ranks + ranks[::-1] if known.v_shaped else ranks * n_chunks


def suits(schedule: str, n_microbatches: int, n_ranks: int) -> bool:
    """Whether a schedule supports a number of microbatches; torch refuses the others.

    1f1b needs at least ``n_ranks``, dualpipev at least 2 ``n_ranks``, the two interleaved schedules a multiple of
    ``max(1, n_microbatches // n_ranks)``; the others support any number.

    Args:
        schedule: a name of ``SCHEDULES``.
        n_microbatches: number of microbatches.
        n_ranks: ranks of the pipeline.

    Returns:
        bool: whether it does.

    Raises:
        ValueError: if the schedule is unknown, or ``n_ranks`` is less than 1.

    Examples:
        .. code-block:: python

            from ignite_ddl.pipeline.schedules import suits

            assert suits("1f1b", 5, n_ranks=4) and not suits("1f1b", 3, n_ranks=4)
            assert suits("interleaved_1f1b", 10, n_ranks=4)  # two rounds of 5
            assert not suits("interleaved_1f1b", 9, n_ranks=4)
    """
    known = _known(schedule)
    check("n_ranks", n_ranks, WORLD)
    if n_microbatches < max(1, known.least_per_rank * n_ranks):
        return False
    return not known.equal_rounds or n_microbatches % max(1, n_microbatches // n_ranks) == 0


def check_microbatches(schedule: str, n_microbatches: int, n_ranks: int) -> None:
    """Refuses a number of microbatches that the schedule does not support: see :func:`suits`.

    Args:
        schedule: a name of ``SCHEDULES``.
        n_microbatches: number of microbatches.
        n_ranks: ranks of the pipeline.

    Raises:
        ValueError: if it is not supported or not a positive integer, or the schedule is unknown.

    Examples:
        .. code-block:: python

            from ignite_ddl.pipeline.schedules import check_microbatches

            check_microbatches("dualpipev", 8, n_ranks=4)
    """
    known = _known(schedule)
    check("n_microbatches", n_microbatches, COUNT)
    if not suits(schedule, n_microbatches, n_ranks):
        raise ValueError(
            f"n_microbatches={n_microbatches} does not suit schedule={schedule!r} on pp={n_ranks}; "
            f"use a multiple of {max(1, known.least_per_rank) * n_ranks}"
        )


def divisors(n: int) -> list[int]:
    """In order."""
    low = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return low + [n // k for k in reversed(low) if k * k != n]


def microbatches_for(rows: int, wanted: int, schedule: str, pp_size: int) -> tuple[int, str]:
    """The number of equal microbatches for a batch, and the schedule that runs it.

    torch's schedules need equal microbatches. If ``wanted`` does not divide a batch (the last one), the nearest number
    that divides it and that the schedule supports is used. If there is none, the nearest divisor is used with a plain
    schedule (gpipe, or looped_bfs for several stages per rank), whose gradients are the same.

    Args:
        rows: rows of this rank's batch, at least 1.
        wanted: the requested number of microbatches.
        schedule: a name of ``SCHEDULES``.
        pp_size: number of pp ranks.

    Returns:
        tuple: number of microbatches, name of the schedule.

    Raises:
        ValueError: if the schedule is unknown, ``rows`` or ``wanted`` is less than 1, or a V-shaped schedule ("zbv",
            "dualpipev"), which no plain schedule can replace, supports no number that divides the rows.

    Examples:
        .. code-block:: python

            from ignite_ddl.pipeline.schedules import microbatches_for

            assert microbatches_for(16, 4, "1f1b", pp_size=2) == (4, "1f1b")
            assert microbatches_for(14, 4, "1f1b", pp_size=2) == (2, "1f1b")
            assert microbatches_for(1, 4, "1f1b", pp_size=2) == (1, "gpipe")
    """
    known = _known(schedule)
    check("rows", rows, ROWS), check("wanted", wanted, COUNT)
    tried = sorted(divisors(rows), key=lambda m: (abs(m - wanted), m))
    for m in tried:
        if suits(schedule, m, pp_size):
            return m, schedule
    if known.v_shaped:
        raise ValueError(
            f"a batch of {rows} rows cannot be cut into microbatches for schedule={schedule!r} on pp={pp_size}; "
            "use drop_last=True, another batch_size, or another schedule"
        )
    return tried[0], "gpipe" if known.stages_per_rank == 1 else "looped_bfs"


# ------------------------------------------------------------------------------------------- who does what when


def schedule_entries(
    schedule: str, n_ranks: int, n_microbatches: int, n_chunks: int | None = None
) -> list[list[tuple[Action, ...]]]:
    """The order of passes on each rank, with passes that should overlap in one entry.

    Args:
        schedule: a name of ``SCHEDULES``.
        n_ranks: ranks of the pipeline.
        n_microbatches: a number that the schedule supports, see :func:`suits`.
        n_chunks: stages on each rank. Default: 1 for gpipe and 1f1b, 2 for the others.

    Returns:
        list: for each rank its entries, each a tuple of one action, or of two that overlap (dualpipev).

    Raises:
        ValueError: if the schedule is unknown or does not support the numbers.

    Examples:
        .. code-block:: python

            from ignite_ddl.pipeline.schedules import schedule_entries

            first, last = schedule_entries("dualpipev", n_ranks=2, n_microbatches=4)
            pairs = [entry for entry in first if len(entry) == 2]
            assert all([action.kind for action in pair] == ["F", "B"] for pair in pairs) and len(pairs) == 3
    """
    owners = stage_owners(schedule, n_ranks, n_chunks)
    check_microbatches(schedule, n_microbatches, n_ranks)
    table = []
    for rank in range(n_ranks):
        stages = [stage for stage, owner in enumerate(owners) if owner == rank]
        words = SCHEDULES[schedule].order(rank, n_ranks, n_microbatches, len(stages))
        # zbv's order may contain more microbatches than there are.
        table.append([entry for entry in _entries(words, stages) if entry[0].microbatch < n_microbatches])
    return table


def _entries(words: list[str], stages: list[int]) -> Iterator[tuple[Action, ...]]:
    """Parses a rank's words; ``stages`` are its own."""
    # Passes so far of each chunk; a "B" counts as an "I" and a "W".
    passes = {kind: [0] * len(stages) for kind in "FIW"}
    for entry in words:
        actions = []
        for word in entry.split("+"):
            kind, (number, _, given) = word[0], word[1:].partition(":")
            chunk, counts = int(number), passes["I" if kind == "B" else kind]
            actions.append(Action(kind, stages[chunk], int(given) if given else counts[chunk]))
            counts[chunk] += 1
            if kind == "B":
                passes["W"][chunk] += 1
        yield tuple(actions)


def schedule_actions(
    schedule: str, n_ranks: int, n_microbatches: int, n_chunks: int | None = None
) -> list[list[Action]]:
    """The order of passes on each rank, as in torch.

    Overlapping passes of dualpipev follow one another, forward first, as torch runs them by default;
    :func:`schedule_entries` keeps the pairs.

    Args:
        schedule: a name of ``SCHEDULES``.
        n_ranks: ranks of the pipeline.
        n_microbatches: at least ``n_ranks`` for 1f1b, 2 ``n_ranks`` for dualpipev; for the two interleaved ones
            a multiple of ``max(1, n_microbatches // n_ranks)``.
        n_chunks: stages on each rank. Default: 1 for gpipe and 1f1b, 2 for the others.

    Returns:
        list: for each rank its actions.

    Raises:
        ValueError: if the schedule is unknown or does not support the numbers.

    Examples:
        .. code-block:: python

            from ignite_ddl.pipeline.schedules import schedule_actions

            first, last = schedule_actions("1f1b", n_ranks=2, n_microbatches=2)
            assert [action.kind for action in first] == ["F", "F", "B", "B"]
            assert [action.kind for action in last] == ["F", "B", "F", "B"]
    """
    entries = schedule_entries(schedule, n_ranks, n_microbatches, n_chunks)
    return [[action for entry in row for action in entry] for row in entries]
