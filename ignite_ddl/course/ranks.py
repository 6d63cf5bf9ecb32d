"""The one call by which chapters and checks start ranks."""

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
        n_ranks: how many.
        function: its first argument is the local rank.
        args: its further arguments.
        dp: size of the mesh's data-parallel axis; ``pp`` and ``tp`` likewise. Default: all ranks on dp.
        pp: number of pipeline ranks.
        tp: number of ranks that share each layer.
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
