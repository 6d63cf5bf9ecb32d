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


def backward(gradient, normalised, std, sums=lambda both, n: idist.all_reduce(both), rows=None):
    both = torch.stack([gradient.sum(dim=0), (gradient * normalised).sum(dim=0)])
    means = sums(both, len(gradient)) / (idist.all_reduce(len(gradient)) if rows is None else rows(gradient))
    return (gradient - means[0] - normalised * means[1]) / std


MISTAKES = {
    "reduce_scatter": {
        "rank 0 should return a float64 tensor of shape (3,)": lambda gradient: gradient,
        "returns chunk 1 of the sum, not chunk 0: which": partial(ring, first=0, keep=1),
        "0 should return [15, 30, 45], the sum of all 4 ranks' chunk 0, but returns [1.0": lambda g: g[:3],
        "right, but your rank 0 sent 96 bytes, a ring's first round sends 72": lambda gradient: (
            idist.all_reduce(gradient.clone()).chunk(idist.get_world_size())[idist.get_rank()]
        ),
        "right, but rank 0 sent to rank 2; in the ring it sends to rank 1 only": straight_there,
        "gloo gave up: a message had another size": whole_to_a_chunk,
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
    "normalise_backward": {
        "rank 0 should return a tensor of shape (4, 3)": lambda gradient, normalised, std: None,
        "mean and std depend on x, too": lambda gradient, normalised, std: gradient / std,
        "rank 0 takes the means over its own rows": partial(backward, sums=lambda both, n: both, rows=len),
        "7, 5, 3, 1 rows of 6 features: rank 0 takes the mean of the ranks' means": partial(
            backward, sums=lambda both, n: idist.all_reduce(both / n), rows=lambda g: 4
        ),
        "4, 4, 4, 4 rows of 3 features: the largest error on rank 0 is": partial(backward, rows=lambda g: 1),
        "bytes; two sums a feature and its number of rows are 56": partial(
            backward, sums=lambda both, n: sum(idist.all_gather({"sums": both})[r]["sums"] for r in range(4))
        ),
    },
}
WAITING = {
    "reduce_scatter": {"your ranks wait for each other: start sending before you receive": receives_first}
}
