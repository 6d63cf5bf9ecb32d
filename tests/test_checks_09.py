"""The exercises of chapter 09: what is right passes, and each natural mistake gets a hint that helps."""

import math

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from checking import said, stub

from ignite_ddl.course.checks import ch09 as checks

# --- a ring's first round ------------------------------------------------------------------------------


def exchange(values, to, source):
    sending, room = dist.isend(values, to), torch.empty_like(values)
    dist.recv(room, source)
    sending.wait()
    return room


def round_one(gradient, first):
    """A ring's first round in which rank r sends off chunk r - first; it ends with chunk r - first + 1."""
    rank, n = idist.get_rank(), idist.get_world_size()
    chunks = gradient.clone().chunk(n)
    for step in range(n - 1):
        going, coming = (rank - first - step) % n, (rank - first - step - 1) % n
        chunks[coming].add_(exchange(chunks[going], (rank + 1) % n, (rank - 1) % n))
    return chunks


def right(gradient):
    return round_one(gradient, first=1)[idist.get_rank()]


def chapters_ring(gradient):
    rank, n = idist.get_rank(), idist.get_world_size()
    return round_one(gradient, first=0)[(rank + 1) % n]


def moved_on(gradient):
    """The chapter's round, and one message more that takes the chunk to its place."""
    rank, n = idist.get_rank(), idist.get_world_size()
    return exchange(chapters_ring(gradient), (rank + 1) % n, (rank - 1) % n)


def all_reduced(gradient):
    return idist.all_reduce(gradient.clone()).chunk(idist.get_world_size())[idist.get_rank()]


def straight_there(gradient):
    """Every chunk goes to its owner at once: as many bytes, but no ring."""
    rank, n = idist.get_rank(), idist.get_world_size()
    chunks = gradient.clone().chunk(n)
    mine = chunks[rank].clone()
    for away in range(1, n):
        mine += exchange(chunks[(rank + away) % n], (rank + away) % n, (rank - away) % n)
    return mine


def one_step_short(gradient):
    rank, n = idist.get_rank(), idist.get_world_size()
    return gradient.chunk(n)[rank] * (2**n - 1 - 2 ** ((rank + 1) % n)) / 2**rank


def receives_first(gradient):
    dist.recv(torch.empty_like(gradient), (idist.get_rank() - 1) % idist.get_world_size())
    return gradient


def test_reduce_scatter_right(capsys):
    assert checks.reduce_scatter(right)
    assert said(capsys) == "right: rank r ends with chunk r of the sum, for half a ring's bytes"


WRONG_ROUNDS = [
    (stub, "write the body of stub"),
    (lambda gradient: None, "rank 0 should return a float64 tensor of shape (3,)"),
    (lambda gradient: gradient, "rank 0 should return a float64 tensor of shape (3,)"),
    (chapters_ring, "rank 0 returns chunk 1 of the sum, not chunk 0: which chunk goes off first?"),
    (one_step_short, "rank 0 should return [15, 30, 45], the sum of all 4 ranks' chunk 0, but returns [13.0"),
    (lambda gradient: gradient[:3], "but returns [1.0, 2.0, 3.0]"),
    (moved_on, "4 ranks, 12 numbers: right, but your rank 0 sent 96 bytes, a ring's first round sends 72"),
    (all_reduced, "your rank 0 sent 96 bytes, a ring's first round sends 72"),
    (straight_there, "right, but rank 0 sent to rank 2; in the ring it sends to rank 1 only"),
]


@pytest.mark.parametrize(("function", "hint"), WRONG_ROUNDS, ids=lambda value: getattr(value, "__name__", ""))
def test_reduce_scatter_wrong(function, hint, capsys):
    assert not checks.reduce_scatter(function)
    line = said(capsys)
    assert line.startswith("not yet: ")
    assert hint in line


def test_ranks_that_wait_for_each_other(capsys, monkeypatch):
    monkeypatch.setattr(checks, "WAIT_SECONDS", 2)
    assert not checks.reduce_scatter(receives_first)
    assert "your ranks wait for each other: start sending before you receive" in capsys.readouterr().out


# --- where tree and ring cost the same -----------------------------------------------------------------


def rounds(n_ranks):
    return (n_ranks - 1).bit_length()


def crossover(n_ranks, latency, bandwidth):
    more_messages = (n_ranks - 1) - rounds(n_ranks)
    fewer_bytes = rounds(n_ranks) - (n_ranks - 1) / n_ranks
    return latency * bandwidth * more_messages / fewer_bytes


def test_crossover_right(capsys):
    assert checks.crossover_bytes(crossover)
    assert said(capsys) == "right: below it take the tree, above it the ring"


WRONG_CROSSOVERS = [
    (stub, "write the body of stub"),
    (lambda n_ranks, latency, bandwidth: None, "return a number of bytes, not NoneType"),
    (lambda n_ranks, latency, bandwidth: 0, "the tree is faster, so the answer is above 0"),
    (lambda n_ranks, latency, bandwidth: latency * bandwidth, "8 ranks, 0.02 s, 1e+06 bytes/s: with your 2e+04"),
    (lambda n_ranks, latency, bandwidth: 37647.0588235294, "4 ranks, 1e-05 s, 1e+09 bytes/s: with your 3.765e+04"),
    (
        lambda n_ranks, latency, bandwidth: crossover(n_ranks, latency, bandwidth)
        if n_ranks != 3 else latency * bandwidth * (2 - 1.585) / (1.585 - 2 / 3),
        "Does your tree round log2(3) up?",
    ),
    (
        lambda n_ranks, latency, bandwidth: latency * bandwidth * (n_ranks - 1 - round(math.log2(n_ranks)))
        / (round(math.log2(n_ranks)) - (n_ranks - 1) / n_ranks),
        "5 ranks need 3 rounds up",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("function", "hint"), WRONG_CROSSOVERS)
def test_crossover_wrong(function, hint, capsys):
    assert not checks.crossover_bytes(function)
    line = said(capsys)
    assert line.startswith("not yet: ")
    assert hint in line


# --- backward through moments of all ranks -------------------------------------------------------------


def two_sums(gradient, normalised, std):
    sums = torch.stack([gradient.sum(dim=0), (gradient * normalised).sum(dim=0)])
    means = idist.all_reduce(sums) / idist.all_reduce(len(gradient))
    return (gradient - means[0] - normalised * means[1]) / std


def only_its_own(gradient, normalised, std):
    return (gradient - gradient.mean(dim=0) - normalised * (gradient * normalised).mean(dim=0)) / std


def mean_of_means(gradient, normalised, std):
    means = torch.stack([gradient.mean(dim=0), (gradient * normalised).mean(dim=0)])
    means = idist.all_reduce(means) / idist.get_world_size()
    return (gradient - means[0] - normalised * means[1]) / std


def sums_not_means(gradient, normalised, std):
    sums = idist.all_reduce(torch.stack([gradient.sum(dim=0), (gradient * normalised).sum(dim=0)]))
    return (gradient - sums[0] - normalised * sums[1]) / std


def everything_everywhere(gradient, normalised, std):
    """All rows to all ranks, as objects, since their numbers differ."""
    pairs = idist.all_gather({"gradient": gradient, "normalised": normalised})
    all_gradients, all_rows = (torch.cat([pair[name] for pair in pairs]) for name in pairs[0])
    means = all_gradients.mean(dim=0), (all_gradients * all_rows).mean(dim=0)
    return (gradient - means[0] - normalised * means[1]) / std


def test_backward_right(capsys):
    assert checks.normalise_backward(two_sums)
    assert said(capsys) == "right: one process's gradient to 1e-12, for two sums a feature"


WRONG_BACKWARDS = [
    (stub, "write the body of stub"),
    (lambda gradient, normalised, std: None, "rank 0 should return a tensor of shape (4, 3)"),
    (lambda gradient, normalised, std: gradient / std, "mean and std depend on x, too"),
    (only_its_own, "rank 0 takes the means over its own rows; x was normalised over all ranks'"),
    (mean_of_means, "7, 5, 3, 1 rows of 6 features: rank 0 takes the mean of the ranks' means"),
    (sums_not_means, "4, 4, 4, 4 rows of 3 features: the largest error on rank 0 is"),
    (everything_everywhere, "bytes; two sums a feature and its number of rows are 56"),
]


@pytest.mark.parametrize(
    ("function", "hint"), WRONG_BACKWARDS, ids=lambda value: getattr(value, "__name__", "")
)
def test_backward_wrong(function, hint, capsys):
    assert not checks.normalise_backward(function)
    line = said(capsys)
    assert line.startswith("not yet: ")
    assert hint in line
