"""What a rank is connected to."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["connected"]


def connected(local_rank: int = 0) -> list[tuple[str, str]]:
    """Makes one all-reduce and lists this process' TCP connections, as Linux has them in ``/proc``.

    Args:
        local_rank: not used; given by what starts the ranks. Default: 0.

    Returns:
        list: (own port, other port) of each established connection, addresses included, in hexadecimal as
        ``/proc/net/tcp`` writes them.

    Example:
        >>> from ignite_ddl.course.connected import connected
        >>> from ignite_ddl.course.ranks import on_nodes
        >>> ranks = on_nodes(2, 1, connected)
        >>> sum(other == own for _, other in ranks[0] for own, _ in ranks[1])
        1
    """
    dist.all_reduce(torch.ones(1))
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    mine = {os.readlink(link)[8:-1] for link in links if os.path.lexists(link)}  # "socket:[123]"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [(line[1], line[2]) for line in lines if line[9] in mine and line[3] == "01"]  # established
