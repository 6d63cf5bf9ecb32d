"""The pipeline schedules: their names, stage owners and numbers of microbatches; torch runs them.

The order of each rank's passes is in torch, and in ``lab/orders.py``. This file and what it
imports need only the standard library, so that a web page can run it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from ignite_ddl.arguments import COUNT, WORLD, check, one_of, whole

# ------------------------------------------------------------------------------------------- the table


class Schedule(NamedTuple):
    """The properties of a schedule.

    Attributes:
        torch_class: its class in ``torch.distributed.pipelining.schedules``.
        stages_per_rank: number of stages per rank: 1, or by default 2.
        v_shaped: whether rank r owns stages r and 2p - 1 - r; else it owns stages r, r + p, r + 2p, ...
        split_backward: whether some backward passes are split into "I" and "W".
        least_per_rank: minimal number of microbatches per rank.
        equal_rounds: whether it needs equal rounds of at least p microbatches.
    """

    torch_class: str
    stages_per_rank: int
    v_shaped: bool = False
    split_backward: bool = False
    least_per_rank: int = 0
    equal_rounds: bool = False


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("ScheduleGPipe", 1),
    "1f1b": Schedule("Schedule1F1B", 1, least_per_rank=1),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", 2, equal_rounds=True),
    "looped_bfs": Schedule("ScheduleLoopedBFS", 2),
    "interleaved_zero_bubble": Schedule("ScheduleInterleavedZeroBubble", 2, split_backward=True, equal_rounds=True),
    "zbv": Schedule("ScheduleZBVZeroBubble", 2, v_shaped=True, split_backward=True),
    "dualpipev": Schedule("ScheduleDualPipeV", 2, v_shaped=True, split_backward=True, least_per_rank=2),
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
    default = known.stages_per_rank
    n_chunks = default if n_chunks is None else n_chunks
    n_ranks, n_chunks = check("n_ranks", n_ranks, WORLD), check("n_chunks", n_chunks, WORLD)
    if n_chunks != default and (default == 1 or known.v_shaped):
        raise ValueError(f"schedule={schedule!r} has {default} stages on each rank, but given n_chunks={n_chunks}")
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
        least = max(1, known.least_per_rank) * n_ranks
        raise ValueError(
            f"n_microbatches={n_microbatches} does not suit schedule={schedule!r} on pp={n_ranks}; "
            f"use {f'a multiple of {least}' if known.equal_rounds else f'{least} or more'}"
        )


def divisors(n: int) -> list[int]:
    """The divisors of n, in ascending order."""
    low = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return low + [n // k for k in reversed(low) if k * k != n]


def check_same_microbatches(numbers: Collection[int]) -> None:
    """Refuses different numbers of microbatches on dp ranks, for layers that communicate in each."""
    if len(set(numbers)) > 1:
        raise ValueError(
            f"dp ranks should have equal numbers of microbatches, in each of which experts and routers meet, but have "
            f"{min(numbers)} and {max(numbers)}: use a batch_size that is a multiple of dp × n_microbatches, and "
            "drop_last=True"
        )


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
