"""Natural mistakes in chapter 01's exercises."""

from functools import partial

import ignite.distributed as idist
import torch
import torch.distributed as dist


def two_steps(x, ranks_per_node, up=True, down=True):
    """Sums in the node, over one rank of each node, and in the node again, where the others add zeros."""
    firsts = list(range(0, idist.get_world_size(), ranks_per_node))
    nodes = [idist.new_group(list(range(first, first + ranks_per_node))) for first in firsts]
    node, local_rank = divmod(idist.get_rank(), ranks_per_node)
    leaders = idist.new_group(firsts)
    total = idist.all_reduce(x, group=nodes[node])
    if up and local_rank == 0:
        total = idist.all_reduce(total, group=leaders)
    if down:
        total = total if local_rank == 0 else torch.zeros_like(x)
        total = idist.all_reduce(total, group=nodes[node])
    return total


def own_group_only(x, ranks_per_node):
    if idist.get_rank() % ranks_per_node == 0:
        idist.new_group([0, ranks_per_node])
    return idist.all_reduce(x)


def padded(part, room=None):
    lengths = idist.all_gather(len(part))
    row = torch.zeros(room or max(lengths), dtype=part.dtype)
    row[: len(part)] = part
    rows = idist.all_gather(row).reshape(len(lengths), -1)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def broadcasts(part):
    """To receivers that know its length: fewer bytes still."""
    rooms = [torch.zeros(length, dtype=part.dtype) for length in idist.all_gather(len(part))]
    rooms[idist.get_rank()].copy_(part)
    for source, room in enumerate(rooms):
        dist.broadcast(room, src=source)
    return tuple(rooms)


RIGHT = {"gather_parts": [broadcasts]}
MISTAKES = {
    "two_level_sum": {
        "rank 0 should return a float64 tensor of shape (3,)": lambda x, ranks_per_node: x.sum(),
        "number 0 on rank 0 should be 111111, it is 1: what it put in": lambda x, ranks_per_node: x,
        "number 0 on rank 0 should be 111111, it is 111: the sum": partial(two_steps, up=False, down=False),
        "number 0 on rank 1 should be 111111, it is 111: the sum of its own": partial(two_steps, down=False),
        "it is 333333: every": lambda x, n: idist.all_reduce(two_steps(x, n, up=False, down=False)),
        "number 1 on rank 0 should be 222222, it is 111111": lambda x, n: torch.full_like(x, 111111),
        "right, but the ranks of node 0 together put 72 bytes": lambda x, ranks_per_node: idist.all_reduce(x),
    },
    "gather_parts": {
        "rank 0 should return a list of 4 tensors, one a rank": lambda part: torch.cat(padded(part)),
        "on rank 0 the part of rank 0 has shape (2,)": lambda part: [row[row != 0] for row in padded(part)],
        "type torch.float64 instead of torch.float32": lambda part: [row.double() for row in padded(part)],
        "on rank 0 the part of rank 1 holds other numbers than rank 1 put in": lambda part: [part] * 4,
        "right, but a rank puts in 408 bytes; its length (8 bytes)": partial(padded, room=100),
        "(4 bytes a number) are 20": lambda part: [found[0] for found in idist.all_gather([part])],
        "gloo gave up: a rank was sent a tensor": lambda part: list(idist.all_gather(part)),
    },
}
WAITING = {"two_level_sum": {"all ranks of the world must make the same groups": own_group_only}}
