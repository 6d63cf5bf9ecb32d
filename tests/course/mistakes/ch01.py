"""Natural mistakes in chapter 01's exercises."""

import ignite.distributed as idist
import torch
import torch.distributed as dist


def broadcasts(part):
    """To receivers that know its length: fewer bytes still."""
    rooms = [torch.zeros(length, dtype=part.dtype) for length in idist.all_gather(len(part))]
    rooms[idist.get_rank()].copy_(part)
    for source, room in enumerate(rooms):
        dist.broadcast(room, src=source)
    return tuple(rooms)


BROADCAST = "dist.broadcast(total, src=first_ranks[node], group=nodes[node])"
RIGHT = {"gather_parts": [broadcasts]}
MISTAKES = {
    "two_level_sum": {
        "rank 0 should return a float64 tensor of shape (3,)": lambda x, ranks_per_node: x.sum(),
        "number 0 on rank 0 should be 111111, it is 1: what it put in": lambda x, ranks_per_node: x,
        "number 0 on rank 0 should be 111111, it is 111: the sum": {"if local_rank == 0": "if False"},
        "number 0 on rank 1 should be 111111, it is 111: the sum of its own": {BROADCAST: "pass"},
        "it is 333333: every": {"if local_rank == 0": "if True", ", group=leaders": ""},
        "number 1 on rank 0 should be 222222, it is 111111": lambda x, n: torch.full_like(x, 111111),
        "right, but the ranks of node 0 together put 72 bytes": lambda x, ranks_per_node: idist.all_reduce(x),
    },
    "gather_parts": {
        "rank 0 should return a list of 4 tensors, one a rank": {"[row[": "torch.cat([row[", "True)]": "True)])"},
        "on rank 0 the part of rank 0 has shape (2,)": {"row[:length]": "row[row != 0]"},
        "type torch.float64 instead of torch.float32": {"row[:length]": "row[:length].double()"},
        "on rank 0 the part of rank 1 holds other numbers than rank 1 put in": lambda part: [part] * 4,
        "right, but a rank puts in 408 bytes; its length (8 bytes)": {"max(lengths)": "100"},
        "(4 bytes a number) are 20": lambda part: [found[0] for found in idist.all_gather([part])],
        "gloo gave up: a rank was sent a tensor": lambda part: list(idist.all_gather(part)),
    },
}
WAITING = {
    "two_level_sum": {
        "all ranks of the world must make the same groups": {
            "idist.new_group(first_ranks)": "local_rank or idist.new_group(first_ranks)"
        }
    }
}
