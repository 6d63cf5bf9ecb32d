"""Natural mistakes in chapter 12's exercises."""

from functools import partial
from itertools import pairwise

import ignite.distributed as idist
import torch
import torch.distributed as dist


def cut_evenly(sizes, n_servers, step=None):
    cuts = [sum(sizes) * server // n_servers for server in range(n_servers + 1)]
    shares = []
    for low, high in pairwise(cuts):
        share, first = [], 0
        for parameter, size in enumerate(sizes):
            start, stop = max(low - first, 0), min(high - first, size)
            share += [(parameter, s, min(s + (step or size), stop)) for s in range(start, stop, step or size)]
            first += size
        shares.append(share)
    return shares


def whole_parameters(sizes, n_servers):
    shares, held = [[] for _ in range(n_servers)], [0] * n_servers
    for parameter in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = held.index(min(held))
        shares[least].append((parameter, 0, sizes[parameter]))
        held[least] += sizes[parameter]
    return shares


def receive(like, source):
    room = torch.empty_like(like)
    dist.recv(room, source)
    return room


def everyone(weights, gradient, rate, whole=False, mean=True, pull=True):
    rank, n = idist.get_rank(), idist.get_world_size()
    others = [r for r in range(n) if r != rank]
    parts, chunks = gradient.chunk(n), list(weights.chunk(n))
    pushes = [dist.isend(gradient if whole else parts[r].contiguous(), r) for r in others]
    come = [receive(gradient if whole else parts[rank], r) for r in others]
    total = parts[rank] + sum(part.chunk(n)[rank] if whole else part for part in come)
    chunks[rank] = chunks[rank] - rate * total / (n if mean else 1)
    pushes += [dist.isend(chunks[rank], r) for r in others if pull]
    for r in others if pull else []:
        chunks[r] = receive(chunks[r], r)
    for push in pushes:
        push.wait()
    return torch.cat(chunks)


MISTAKES = {
    "ranges": {
        "one list for each server": lambda sizes, n: [[(i, 0, size) for i, size in enumerate(sizes)]],
        "a tuple (parameter, start, stop)": lambda sizes, n: [[0]] * n,
        "is empty": lambda sizes, n: [[*share, (0, 0, 0)] for share in cut_evenly(sizes, n)],
        "no server holds numbers 0 to 9 of parameter 1": lambda sizes, n: [
            [piece for piece in share if piece[0] != 1] for share in cut_evenly(sizes, n)
        ],
        "two pieces hold number 0": lambda sizes, n: [[(i, 0, size) for i, size in enumerate(sizes)]] * n,
        "your servers hold [7840, 120] numbers; none has to hold more than 3980": whole_parameters,
        "even, but in": partial(cut_evenly, step=1),
    },
    "everyone_a_server": {
        "should return all weights": lambda weights, gradient, rate: weights[:3],
        "the step is 4 times too long": partial(everyone, mean=False),
        "only its own gradient": lambda weights, gradient, rate: weights - rate * gradient,
        "is not what worker 1 made of it: pull it": partial(everyone, pull=False),
        "chunk 0 of worker 0 should be": lambda weights, gradient, rate: weights,
        "differ in the last bits": lambda weights, gradient, rate: (
            weights
            - rate * sum(idist.all_gather(gradient[None]).roll(idist.get_rank(), 0)) / idist.get_world_size()
        ),
        "by all_reduce": lambda weights, gradient, rate: (
            weights - rate * idist.all_reduce(gradient) / idist.get_world_size()
        ),
        "sent 360 bytes; 3 chunks of gradient and as many of weights are 144": partial(everyone, whole=True),
    },
}
