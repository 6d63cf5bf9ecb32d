"""Natural mistakes in chapter 09's exercises."""

from functools import partial

import ignite.distributed as idist
import torch
import torch.distributed as dist


def exchange(values, to, source, room=None):
    sending, room = dist.isend(values, to), torch.empty_like(values if room is None else room)
    dist.recv(room, source)
    sending.wait()
    return room


def neighbours():
    rank, n = idist.get_rank(), idist.get_world_size()
    return rank, n, (rank + 1) % n, (rank - 1) % n


def ring(gradient, first=1, keep=0):
    """A ring's first round in which rank r sends off chunk r - first, and chunk r + keep is returned."""
    rank, n, to, source = neighbours()
    chunks = gradient.clone().chunk(n)
    for step in range(n - 1):
        chunks[(rank - first - step - 1) % n].add_(exchange(chunks[(rank - first - step) % n], to, source))
    return chunks[(rank + keep) % n]


def straight_there(gradient):
    """Every chunk goes to its owner at once: as many bytes, but no ring."""
    rank, n, *_ = neighbours()
    chunks = gradient.chunk(n)
    away = [exchange(chunks[(rank + k) % n], (rank + k) % n, (rank - k) % n) for k in range(1, n)]
    return chunks[rank] + sum(away)


def whole_to_a_chunk(gradient):
    _, n, to, source = neighbours()
    return exchange(gradient, to, source, room=gradient.chunk(n)[0])


def receives_first(gradient):
    dist.recv(torch.empty_like(gradient), neighbours()[3])
    return gradient


def crossover(n_ranks, latency, bandwidth, rounds=lambda n: (n - 1).bit_length()):
    fewer_bytes = rounds(n_ranks) - (n_ranks - 1) / n_ranks
    return latency * bandwidth * (n_ranks - 1 - rounds(n_ranks)) / fewer_bytes


def moments(x, between=1.0, rows=len, extra=0, rounds=1):
    """Mean and variance by all ranks' rows, means and squared distances, less what the mistakes leave out."""
    mean = x.sum(dim=0) / max(len(x), 1)
    own = [torch.tensor([float(rows(x))]), mean, (x - mean).square().sum(dim=0) / max(len(x), 1)]
    own = torch.cat([*own, torch.zeros(extra)])
    half = len(own) // 2
    pieces = [own] if rounds == 1 else [own[:half], own[half:]]
    every = torch.cat([idist.all_gather(piece[None]) for piece in pieces], dim=1)
    n, means, variances, _ = every.split([1, x.shape[1], x.shape[1], extra], dim=1)
    mean = (n * means).sum(dim=0) / n.sum()
    return mean, (n * (variances + between * (means - mean).square())).sum(dim=0) / n.sum()


def of_squares(x):
    sums = idist.all_reduce(torch.cat([torch.tensor([float(len(x))]), x.sum(dim=0), x.square().sum(dim=0)]))
    mean, squares = (sums[1:] / sums[0]).chunk(2)
    return mean, squares - mean.square()


MISTAKES = {
    "reduce_scatter": {
        "rank 0 should return a float64 tensor of shape (3,)": lambda gradient: gradient,
        "returns chunk 1 of the sum, not chunk 0: which": partial(ring, first=0, keep=1),
        "0 should return [15, 30, 45], the sum of all 4 ranks' chunk 0, but returns [1.0": lambda g: g[:3],
        "right, but your rank 0 sent 96 bytes, a ring's first round sends 72": lambda gradient: (
            idist.all_reduce(gradient.clone()).chunk(idist.get_world_size())[idist.get_rank()]
        ),
        "right, but rank 0 sent to rank 2; in the ring it sends to rank 1 only": straight_there,
        "gloo gave up: a rank was sent a tensor": whole_to_a_chunk,
    },
    "crossover_bytes": {
        "return a number of bytes, not NoneType": lambda n_ranks, latency, bandwidth: None,
        "the tree is faster, so the answer is above 0": lambda n_ranks, latency, bandwidth: 0,
        "4 ranks, 1e-05 s, 1e+09 bytes/s: with your 3.765e+04 bytes the tree": lambda *_: 37647.0588235294,
        "Does your tree round log2(3) up?": lambda n, *link: crossover(n, *link) if n != 3 else 1.0,
        "5 ranks need 3 rounds up": partial(
            crossover, rounds=lambda n: 2 if n in (3, 5) else (n - 1).bit_length()
        ),
    },
    "moments": {
        "rank 0 should return two float32 tensors of shape (5,)": lambda x: None,
        "rank 0 takes the moments of its own rows": lambda x: (x.mean(dim=0), x.var(dim=0, correction=0)),
        "7, 5, 3, 1 rows of 5 features with mean 0: the mean of means": partial(moments, rows=lambda x: 4),
        "rank 0's mean is off": lambda x: (moments(x)[0] + 1, moments(x)[1]),
        "the ranks' means differ, and that is variance, too": partial(moments, between=0.0),
        "rank 0's variance is off": partial(moments, between=2.0),
        "drowned in float32's rounding": of_squares,
        "right, but a rank puts in 48 bytes; two numbers a feature and its number of rows are 44": partial(
            moments, extra=1
        ),
        "right, but in 2 collectives": partial(moments, rounds=2),
    },
}
WAITING = {
    "reduce_scatter": {"your ranks wait for each other: start sending before you receive": receives_first}
}
