"""Natural mistakes in chapter 14's exercises."""

from functools import partial

import ignite.distributed as idist
import torch
import torch.distributed as dist

from ignite_ddl.lab import cost


def rounded_down(n_parameters, n_ranks, rank):
    size = n_parameters // n_ranks
    return rank * size, (rank + 1) * size


def whole_norm(mine, max_norm, eps=0.0):
    return (max_norm / (idist.all_reduce(mine.square().sum()).sqrt() + eps)).clamp(max=1)


def step(weights, gradient, lr, max_norm, scale=whole_norm, mean=True, gather=True):
    rank, n = idist.get_rank(), idist.get_world_size()
    mine = torch.empty_like(gradient.chunk(n)[rank])
    dist.reduce_scatter(mine, list(gradient.chunk(n)))
    if mean:
        mine /= n
    shard = weights.chunk(n)[rank]
    shard -= lr * mine * scale(mine, max_norm)
    if gather:
        dist.all_gather(list(weights.chunk(n)), shard)


def all_reduced(weights, gradient, lr, max_norm):
    mean = idist.all_reduce(gradient) / idist.get_world_size()
    weights -= lr * mean * (max_norm / mean.norm()).clamp(max=1)


def clipped_too_soon(weights, gradient, lr, max_norm):
    step(weights, gradient * (max_norm / gradient.norm()).clamp(max=1), lr, max_norm, scale=lambda *_: 1)


def smallest(n_parameters, n_ranks, memory, room):
    fits = [s for s in range(4) if cost.zero_memory(n_parameters, n_ranks, s).total <= 1e9 * (memory - room)]
    return min(fits, default=None)


RIGHT = {"clipped_step": [partial(step, scale=partial(whole_norm, eps=1e-6))]}  # as torch does
MISTAKES = {
    "my_slice": {
        "12 parameters on 4 ranks: return (start, stop), two": lambda n, ranks, rank: rank,
        "rank 3 gets (9, 12)": lambda n, ranks, rank: (rank * -(-n // ranks), (rank + 1) * -(-n // ranks)),
        "10 parameters on 4 ranks: of the parameters 2 have no owner": rounded_down,
        "12 parameters on 4 ranks: of the parameters 36 have two owners": lambda n, ranks, rank: (0, n),
        "3, so rank 0 owns (0, 3)": lambda n, ranks, rank: (n * rank // ranks, n * (rank + 1) // ranks),
    },
    "clipped_step": {
        "should keep their shape": lambda weights, *_: weights.resize_(3),
        "the weights of rank 0 are as they were: update in place": lambda *args: None,
        "max_norm 1e+06: rank 0 divides the sum of gradients by nothing": partial(step, mean=False),
        "the gradient is not clipped": partial(step, scale=lambda mine, max_norm: 1),
        "rank 0 clips by the norm of its shard": partial(
            step, scale=lambda mine, max_norm: (max_norm / mine.norm()).clamp(max=1)
        ),
        "rank 0 adds up the norms of the shards": partial(
            step, scale=lambda mine, max_norm: (max_norm / idist.all_reduce(mine.norm())).clamp(max=1)
        ),
        "each rank clips its own gradient before the mean": clipped_too_soon,
        "rank 0 scales the gradient up": partial(
            step, scale=lambda mine, max_norm: max_norm / idist.all_reduce(mine.square().sum()).sqrt()
        ),
        "rank 0's own shard is right, the others' are not: gather the": partial(step, gather=False),
        "right, but an all-reduce leaves the whole mean gradient on every rank": all_reduced,
        "right, but your rank 0 sends 216 bytes": partial(
            step, scale=lambda mine, max_norm: (max_norm / idist.all_gather(mine[None]).norm()).clamp(max=1)
        ),
    },
    "smallest_stage": {
        "return a stage from 0 to 3, or None, not '1'": lambda n, ranks, memory, room: "1",
        "stage 1 takes 31.4 GB, which fits": lambda n, ranks, memory, room: None,
        "4 GB of room: stage 1 takes 31.4 GB": lambda n, ranks, memory, room: smallest(n, ranks, memory, 0),
        "64 ranks of 32 GB, 0 GB of room: stage 3 fits, but so": lambda n, ranks, memory, room: 3,
    },
}
WAITING = {
    "clipped_step": {
        "your ranks wait for each other": lambda *args: step(*args) if idist.get_rank() else None
    }
}
