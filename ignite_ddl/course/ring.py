"""What a ring all-reduce that a page has written leaves in each chunk, step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ignite_ddl.course.ranks import on_ranks

__all__ = ["watch_ring"]


def watch_ring(n_ranks: int, ring: Callable[[torch.Tensor, int], None]) -> list[list[list[int]]]:
    """Runs a ring once for each number of steps, 0 to all of them, and reads the chunks where it stopped.

    Rank r puts in 2 ** r, so that a number says who is in it.

    Args:
        n_ranks: ranks to start.
        ring: takes a gradient and the steps after which to stop, and sums in place.

    Returns:
        ``states[step][rank][chunk]``, as ``figures.ch09.ring_steps`` draws it.

    Example:
        >>> from ignite_ddl.course import watch_ring
        >>> watch_ring(2, lambda gradient, steps: gradient.add_(steps))
        [[[1, 1], [2, 2]], [[2, 2], [3, 3]], [[3, 3], [4, 4]]]
    """
    ranks = on_ranks(n_ranks, _watched, n_ranks, ring)
    return [list(state) for state in zip(*ranks, strict=True)]


def _watched(local_rank: int, n_ranks: int, ring: Callable[[torch.Tensor, int], None]) -> list[list[int]]:
    states = []
    for steps in range(2 * n_ranks - 1):
        gradient = torch.full((3 * n_ranks,), 2.0**local_rank)
        ring(gradient, steps)
        states.append([int(chunk[0]) for chunk in gradient.tensor_split(n_ranks)])
    return states
