"""Starts ranks for chapters and checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ignite_ddl as ddl

__all__ = ["on_ranks"]


def on_ranks(
    n_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    dp: int | None = None,
    pp: int | None = None,
    tp: int | None = None,
    servers: int = 0,
    timeout: float = 120,
    **kwargs: Any,
) -> list[Any]:
    """Runs a function on gloo ranks of this machine, each with one CPU thread.

    Args:
        n_ranks: number of ranks.
        function: its first argument is the local rank.
        args: its other arguments.
        dp: size of the mesh's data-parallel axis. Default: all ranks on dp.
        pp: size of the pipeline-parallel axis.
        tp: size of the tensor-parallel axis.
        servers: parameter servers beside the ranks. Default: 0.
        timeout: seconds that the run may take. Default: 120.
        kwargs: keyword arguments of ``function``.

    Returns:
        list: what each rank returned, in rank order.

    Example:
        >>> from ignite_ddl.course import on_ranks
        >>> on_ranks(2, lambda rank, factor: factor * rank, 10)
        [0, 10]
    """
    axes = {"dp": dp, "pp": pp, "tp": tp}
    launch = {"servers": servers, "timeout": timeout, "threads_per_rank": 1}
    with ddl.Parallel("gloo", nproc_per_node=n_ranks, **axes, **launch) as parallel:
        return parallel.run(function, *args, **kwargs)
