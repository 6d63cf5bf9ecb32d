"""Starts ranks for chapters and checks."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ignite_ddl as ddl
from ignite_ddl.course.exercises import Hint
from ignite_ddl.lab.bytes import Traffic, count_bytes
from ignite_ddl.launch.parallel import PRELOAD, start_forkserver

__all__ = ["NumbersSent", "counted_on_ranks", "on_nodes", "on_ranks", "try_on_ranks"]
_WAITS = re.compile("[Ww]aiting in |which cannot complete: |[Tt]imed out")  # the launcher's words, or gloo's
PRELOAD.append("ignite_ddl.course")  # nearly every cell's function uses it: imported once, not by each rank
if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():  # so that the first launch finds imports done
    start_forkserver()


def on_ranks(
    n_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    dp: int | None = None,
    pp: int | None = None,
    tp: int | None = None,
    cp: int | None = None,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
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
        cp: number of ranks that share each sequence.
        dp_replicate: replicas of the model over dp, as in ``ddl.Parallel``.
        dp_shard: dp ranks that share the weights of a replica.
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
    axes = {"dp": dp, "pp": pp, "tp": tp, "cp": cp, "dp_replicate": dp_replicate, "dp_shard": dp_shard}
    launch = {"servers": servers, "timeout": timeout, "threads_per_rank": 1}
    with ddl.Parallel("gloo", nproc_per_node=n_ranks, **axes, **launch) as parallel:
        return parallel.run(function, *args, **kwargs)


def try_on_ranks(
    n_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float,
    cure: str = "every rank has to make the same calls, in the same order",
    **axes: int | None,
) -> list[Any]:
    """:func:`on_ranks` for the check of an exercise: the usual ways to fail together become hints.

    Args:
        n_ranks: number of ranks.
        function: its first argument is the local rank.
        args: its other arguments.
        timeout: seconds that the run may take.
        cure: what to do if ranks wait for each other. Default: to make the same calls, in the same order.
        axes: sizes of the mesh's axes, as in :func:`on_ranks`.

    Returns:
        list: what each rank returned, in rank order.

    Raises:
        Hint: if ranks wait for each other, never end, or hand tensors of different sizes to one collective.

    Example:
        >>> from ignite_ddl.course.ranks import try_on_ranks
        >>> try_on_ranks(2, lambda rank: rank, timeout=20)
        [0, 1]
    """
    try:
        return on_ranks(n_ranks, function, *args, timeout=timeout, **axes)
    except ddl.RankError as error:
        if _WAITS.search(str(error)):
            raise Hint(f"your ranks wait for each other: {cure}") from None
        if (early := re.match(r"(rank \d+) did not finish within \S+ s", str(error))) is not None:
            raise Hint(f"{early[0]}, and waited for no rank then: does a loop there end?") from None
        if "SIGABRT" in str(error):
            raise Hint("gloo gave up: a rank was sent a tensor of another size than it expected") from None
        raise


@dataclass
class Counted(Traffic):
    """The calls of a learner's function on a rank, in order.

    Attributes:
        numbers: how many it put into collectives, whatever their dtype; of input and output, the larger.
    """

    numbers: int = 0


def counted_on_ranks(
    function: Callable[..., Any], given: Sequence[tuple], timeout: float, **kwargs: Any
) -> list[tuple[Any, Counted]]:
    """:func:`try_on_ranks` with a learner's function: what it returned on each rank, and what it has sent there.

    Args:
        function: the learner's.
        given: for each rank, the arguments.
        timeout: seconds that the run may take.
        kwargs: of :func:`try_on_ranks`.

    Returns:
        list: for each rank what the function returned, and its collectives and messages.

    Example:
        >>> import ignite.distributed as idist
        >>> from ignite_ddl.course.ranks import counted_on_ranks
        >>> [(found, traffic.ops) for found, traffic in counted_on_ranks(idist.all_reduce, [(1,), (2,)], timeout=20)]
        [(3, ['all_reduce']), (3, ['all_reduce'])]
    """
    return try_on_ranks(len(given), _counted, function, given, timeout=timeout, **kwargs)


def _counted(local_rank: int, function: Callable[..., Any], given: Sequence[tuple]) -> tuple[Any, Counted]:
    with count_bytes() as traffic, NumbersSent() as sent:
        found = function(*given[local_rank])
    return found, Counted(traffic.calls, sent.numbers)


class NumbersSent(TorchDispatchMode):
    """Counts the numbers in the tensors of each collective of a ``with`` block, whoever calls it.

    Attributes:
        numbers: how many; of input and output of a collective, the larger.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d" and func is not torch.ops.c10d.barrier.default:
            self.numbers += max(map(_numbers, args))
        return func(*args, **(kwargs or {}))


def _numbers(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(_numbers, value)) if isinstance(value, list | tuple) else 0


def on_nodes(n_nodes: int, ranks_per_node: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs a function on gloo ranks of several nodes, all of which are this machine.

    Each node is a launch of its own with ``nnodes`` and ``node_rank``, as it would be on machines of their own.

    Args:
        n_nodes: number of launches.
        ranks_per_node: ranks of each, with one CPU thread each.
        function: its first argument is the local rank.
        args: its other arguments.

    Returns:
        list: what each rank returned, in rank order.

    Example:
        >>> import ignite.distributed as idist
        >>> from ignite_ddl.course.ranks import on_nodes
        >>> on_nodes(2, 1, lambda local_rank: (idist.get_rank(), local_rank))
        [(0, 0), (1, 0)]
    """
    with socket.socket() as one:  # a port that is free now
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]

    def launch(node: int) -> list[Any]:
        where = {"nnodes": n_nodes, "node_rank": node, "master_addr": "127.0.0.1", "master_port": port}
        with ddl.Parallel("gloo", nproc_per_node=ranks_per_node, threads_per_rank=1, timeout=120, **where) as parallel:
            return parallel.run(function, *args)

    with ThreadPoolExecutor(n_nodes) as nodes:
        return [result for results in nodes.map(launch, range(n_nodes)) for result in results]
