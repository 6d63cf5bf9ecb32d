"""The exercises of chapter 12: what is right passes, and each natural mistake gets a hint that helps."""

from itertools import pairwise

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from checking import said, stub

from ignite_ddl.course.checks import ch12 as checks

# --- a model cut by bytes -------------------------------------------------------------------------------


def right_ranges(sizes, n_servers, step=None):
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


def each_cut_in_equal_parts(sizes, n_servers):
    """Even where every size can be divided, and never few pieces."""
    return [
        [
            (parameter, size * server // n_servers, size * (server + 1) // n_servers)
            for parameter, size in enumerate(sizes)
            if size * server // n_servers < size * (server + 1) // n_servers
        ]
        for server in range(n_servers)
    ]


def test_the_right_ranges_pass(capsys):
    assert checks.ranges(right_ranges)
    assert (
        said(capsys)
        == "right: no server holds more than its share, and you cut less often than there are servers"
    )


WRONG_RANGES = {
    "write the body": stub,
    "one list for each server": lambda sizes, n: [[(i, 0, s) for i, s in enumerate(sizes)]],
    "a tuple (parameter, start, stop)": lambda sizes, n: [[0]] * n,
    "is empty": lambda sizes, n: [[*share, (0, 0, 0)] for share in right_ranges(sizes, n)],
    "no server holds numbers 0 to 9 of parameter 1": lambda sizes, n: [
        [piece for piece in share if piece[0] != 1] for share in right_ranges(sizes, n)
    ],
    "two pieces hold number 0": lambda sizes, n: [[(i, 0, s) for i, s in enumerate(sizes)]] * n,
    "your servers hold [7840, 120] numbers; none has to hold more than 3980": whole_parameters,
    "even, but in 8 pieces; 1 cut of 4 parameters leave 5 at most": each_cut_in_equal_parts,
    "even, but in": lambda sizes, n: right_ranges(sizes, n, step=1),
}


@pytest.mark.parametrize("hint", WRONG_RANGES)
def test_wrong_ranges_get_a_hint(hint, capsys):
    assert not checks.ranges(WRONG_RANGES[hint])
    message = said(capsys)
    assert message.startswith("not yet: ")
    assert hint in message


# --- every worker a server ------------------------------------------------------------------------------


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
    for push in pushes:
        push.wait()
    chunks[rank] = chunks[rank] - rate * total / (n if mean else 1)
    sent = [dist.isend(chunks[rank], r) for r in others if pull]
    for r in others:
        chunks[r] = receive(chunks[r], r) if pull else chunks[r]
    for one in sent:
        one.wait()
    return torch.cat(chunks)


def adds_everywhere(weights, gradient, rate):
    """Each sums in an order of its own: right but for the last bits, and far more bytes."""
    rank, n = idist.get_rank(), idist.get_world_size()
    sendings = [dist.isend(gradient, (rank + away) % n) for away in range(1, n)]
    total = gradient.clone()
    for away in range(1, n):
        total += receive(gradient, (rank - away) % n)
    for sending in sendings:
        sending.wait()
    return weights - rate * total / n


def test_the_right_step_passes(capsys):
    assert checks.everyone_a_server(everyone)
    assert said(capsys) == "right: one process's step, and every worker sent what a ring's rank sends"


WRONG_STEPS = {
    "write the body": stub,
    "should return all weights": lambda weights, gradient, rate: weights[:3],
    "the step is 4 times too long": lambda *given: everyone(*given, mean=False),
    "only its own gradient": lambda weights, gradient, rate: weights - rate * gradient,
    "is not what worker 1 made of it: pull it": lambda *given: everyone(*given, pull=False),
    "chunk 0 of worker 0 should be": lambda weights, gradient, rate: weights,
    "differ in the last bits": adds_everywhere,
    "by all_reduce": lambda weights, gradient, rate: (
        weights - rate * idist.all_reduce(gradient.clone()) / idist.get_world_size()
    ),
    "right, but worker 0 sent 360 bytes; 3 chunks of gradient and as many of weights are 144": lambda *given: (
        everyone(*given, whole=True)
    ),
}


@pytest.mark.parametrize("hint", WRONG_STEPS)
def test_wrong_steps_get_a_hint(hint, capsys):
    assert not checks.everyone_a_server(WRONG_STEPS[hint])
    message = said(capsys)
    assert message.startswith("not yet: ")
    assert hint in message
