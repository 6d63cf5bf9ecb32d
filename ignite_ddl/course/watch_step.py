"""Runs a step on ranks under a timeline, and says who computes, who waits and who talks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab.record import PASSES, Record
from ignite_ddl.lab.timeline import Timeline

__all__ = ["watch_step"]


def watch_step(n_ranks: int, step: Callable[..., Any], **kwargs: Any) -> tuple[Timeline, float]:
    """Runs a step twice on ranks, the first time to connect them, and prints a line for each rank of the second.

    Talking is a call from when the other ranks have entered it, too. The rest of the step is waiting.

    Args:
        n_ranks: number of ranks.
        step: called with the rank and ``watch=``, a ``Timeline`` on which it marks spans of kind "forward" and
            "backward".
        kwargs: for ``step``.

    Returns:
        tuple: the merged timeline of the second step, and the seconds from its first pass to the end of its last.

    Example:
        >>> import ignite.distributed as idist
        >>> from ignite_ddl.course import watch_step
        >>> def step(rank, watch):
        ...     with watch.span("0", kind="forward"):
        ...         sum(range(1000))
        ...     idist.all_reduce(1.0)
        >>> timeline, seconds = watch_step(2, step)  # doctest: +ELLIPSIS
        rank 0: computes ... ms, waits ... ms, talks ... ms
        rank 1: computes ... ms, waits ... ms, talks ... ms
        >>> 0 < seconds < 60
        True
    """
    timeline = Timeline.merge(on_ranks(n_ranks, _watched, step, kwargs))
    passes = [record for record in timeline.records if record.kind in PASSES]
    start, end = min(record.start for record in passes), max(record.end for record in passes)
    for rank in range(n_ranks):
        mine = [record for record in timeline.records if record.rank == rank]
        computes = sum(record.seconds for record in mine if record.kind in PASSES)
        talks = sum(_overlap(record, start, end) for record in mine if record.kind == "communication")
        spent = {"computes": computes, "waits": end - start - computes - talks, "talks": talks}
        print(f"rank {rank}: " + ", ".join(f"{word} {1e3 * seconds:3.0f} ms" for word, seconds in spent.items()))
    return timeline, end - start


def _overlap(record: Record, start: float, end: float) -> float:
    return max(0.0, min(record.end, end) - max(record.start, start))


def _watched(rank: int, step: Callable[..., Any], kwargs: dict[str, Any]) -> Timeline:
    for _ in range(2):
        with Timeline() as watch:
            step(rank, watch=watch, **kwargs)
    return watch
