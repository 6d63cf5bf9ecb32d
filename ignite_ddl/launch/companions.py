"""Processes beside the ranks, such as parameter servers: the launcher starts, connects and ends them."""

from __future__ import annotations

from types import ModuleType


def kind() -> ModuleType:
    """The module that companions run; a run without them does not import it.

    Each rank has a socket to each companion. A rank calls ``connect(sockets)``. A companion calls ``serve(sockets)``,
    and after a rank has ended ``worker_ended(rank, why)``, which returns why the others cannot go on, or None.
    """
    from ignite_ddl.parameter_server import wire

    return wire


def names_of(count: int) -> list[str]:
    """The names of a run's companions, in order."""
    return [f"server{index}" for index in range(count)]


def check_companions(count: int, on_failure: str, joins: bool, nnodes: int) -> None:
    """Refuses what companions cannot do.

    Args:
        count: how many are asked for.
        on_failure: as in ``ddl.Parallel``.
        joins: whether this process joins a job, instead of starting one.
        nnodes: as in ``ddl.Parallel``.

    Raises:
        ValueError: if they cannot.
    """
    if on_failure == "continue" and count == 0:
        raise ValueError(
            "on_failure='continue' needs parameter servers, which can continue without a worker, but given servers=0"
        )
    if count and (joins or nnodes > 1):
        raise ValueError(
            f"servers={count} needs ranks that are started on one machine, but given "
            + (f"nnodes={nnodes}" if nnodes > 1 else "a job to join; set nproc_per_node")
        )
