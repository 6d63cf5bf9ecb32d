"""The exercises of chapter 14: what is right passes, and each natural mistake gets a hint that helps."""

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from checking import said, stub, wrong

import ignite_ddl as ddl
from ignite_ddl.course.checks import ch14 as checks
from ignite_ddl.lab import cost


@pytest.fixture(scope="module", autouse=True)
def _ranks_have_started_once():
    """The first launch of a process loads torch, which on a busy machine takes longer than a check waits."""
    with ddl.Parallel(backend="gloo", nproc_per_node=1, threads_per_rank=1) as parallel:
        parallel.run(int)


# --- who owns which slice ------------------------------------------------------------------------------


def own(n_parameters, n_ranks, rank):
    size = -(-n_parameters // n_ranks)
    return min(rank * size, n_parameters), min((rank + 1) * size, n_parameters)


def balanced(n_parameters, n_ranks, rank):
    return n_parameters * rank // n_ranks, n_parameters * (rank + 1) // n_ranks


def rounded_down(n_parameters, n_ranks, rank):
    size = n_parameters // n_ranks
    return rank * size, (rank + 1) * size


def not_cut(n_parameters, n_ranks, rank):
    size = -(-n_parameters // n_ranks)
    return rank * size, (rank + 1) * size


def last_takes_the_rest(n_parameters, n_ranks, rank):
    size = n_parameters // n_ranks
    return rank * size, n_parameters if rank == n_ranks - 1 else (rank + 1) * size


def test_my_slice_right(capsys):
    assert checks.my_slice(own)
    assert said(capsys) == "right: equal shards, padding at the end"


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (stub, "write the body of stub"),
        (
            lambda n, ranks, rank: rank,
            "12 parameters on 4 ranks: return (start, stop), two whole numbers, not 0",
        ),
        (lambda n, ranks, rank: (0, n), "12 parameters on 4 ranks: of the parameters 36 have two owners"),
        (lambda n, ranks, rank: (3 * rank, 3 * rank + 3), "10 parameters on 4 ranks: rank 3 gets (9, 12)"),
        (rounded_down, "10 parameters on 4 ranks: of the parameters 2 have no owner"),
        (
            not_cut,
            "10 parameters on 4 ranks: rank 3 gets (9, 12); start and stop should lie between 0 and 10",
        ),
        (balanced, "10 parameters on 4 ranks: shards of 3, so rank 0 owns (0, 3), but yours (0, 2)"),
        (last_takes_the_rest, "10 parameters on 4 ranks: shards of 3, so rank 0 owns (0, 3)"),
    ],
)
def test_my_slice_wrong(function, hint, capsys):
    wrong(checks.my_slice, function, hint, capsys)


# --- a step that clips -----------------------------------------------------------------------------------


def step(weights, gradient, lr, max_norm, scale=None, mean=True, gather=True):
    rank, n = idist.get_rank(), idist.get_world_size()
    mine = torch.empty_like(gradient.chunk(n)[rank])
    dist.reduce_scatter(mine, list(gradient.chunk(n)))
    if mean:
        mine /= n
    shard = weights.chunk(n)[rank]
    shard -= lr * mine * (scale or by_all)(mine, max_norm)
    if gather:
        dist.all_gather(list(weights.chunk(n)), shard)


def by_all(mine, max_norm):
    return (max_norm / idist.all_reduce(mine.square().sum()).sqrt()).clamp(max=1)


def as_torch_does(mine, max_norm):
    return (max_norm / (idist.all_reduce(mine.square().sum()).sqrt() + 1e-6)).clamp(max=1)


def by_own(mine, max_norm):
    return (max_norm / mine.norm()).clamp(max=1)


def by_sum_of_norms(mine, max_norm):
    return (max_norm / idist.all_reduce(mine.norm())).clamp(max=1)


def upwards_too(mine, max_norm):
    return max_norm / idist.all_reduce(mine.square().sum()).sqrt()


def by_gathered_shards(mine, max_norm):
    return (max_norm / idist.all_gather(mine[None]).norm()).clamp(max=1)


def all_reduced(weights, gradient, lr, max_norm):
    mean = idist.all_reduce(gradient) / idist.get_world_size()
    weights -= lr * mean * (max_norm / mean.norm()).clamp(max=1)


def clipped_too_soon(weights, gradient, lr, max_norm):
    step(weights, gradient * (max_norm / gradient.norm()).clamp(max=1), lr, max_norm, scale=lambda *_: 1)


def one_rank_skips(weights, gradient, lr, max_norm):
    if idist.get_rank():
        step(weights, gradient, lr, max_norm)


@pytest.mark.parametrize("scale", [by_all, as_torch_does])
def test_clipped_step_right(scale, capsys):
    assert checks.clipped_step(lambda *args: step(*args, scale=scale))
    assert said(capsys) == "right: clipped by the norm of all shards, for a ring's bytes and one number"


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (stub, "write the body of stub"),
        (lambda *args: None, "the weights of rank 0 are as they were: update in place"),
        (lambda *args: step(*args, scale=lambda *_: 1), "the gradient is not clipped"),
        (lambda *args: step(*args, scale=by_own), "rank 0 clips by the norm of its shard"),
        (lambda *args: step(*args, scale=by_sum_of_norms), "rank 0 adds up the norms of the shards"),
        (lambda *args: step(*args, scale=upwards_too), "rank 0 scales the gradient up"),
        (
            lambda *args: step(*args, mean=False),
            "max_norm 1e+06: rank 0 divides the sum of gradients by nothing",
        ),
        (
            lambda *args: step(*args, gather=False),
            "rank 0's own shard is right, the others' are not: gather the",
        ),
        (clipped_too_soon, "each rank clips its own gradient before the mean"),
        (all_reduced, "right, but an all-reduce leaves the whole mean gradient on every rank"),
        (lambda *args: step(*args, scale=by_gathered_shards), "right, but your rank 0 sends 216 bytes"),
    ],
)
def test_clipped_step_wrong(function, hint, capsys):
    wrong(checks.clipped_step, function, hint, capsys)


def test_a_rank_that_skips_the_step(capsys, monkeypatch):
    monkeypatch.setattr(checks, "WAIT_SECONDS", 2)
    assert not checks.clipped_step(one_rank_skips)
    assert "not yet: " in capsys.readouterr().out


# --- the smallest stage ----------------------------------------------------------------------------------


def smallest(n_parameters, n_ranks, memory, room):
    fits = [s for s in range(4) if cost.zero_memory(n_parameters, n_ranks, s).total <= 1e9 * (memory - room)]
    return min(fits, default=None)


def test_smallest_stage_right(capsys):
    assert checks.smallest_stage(smallest)
    assert said(capsys) == "right: no stage more than the model needs"


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (stub, "write the body of stub"),
        (lambda n, ranks, memory, room: "1", "return a stage from 0 to 3, or None, not '1'"),
        (
            lambda n, ranks, memory, room: 3,
            "64 ranks of 32 GB, 0 GB of room: stage 3 fits, but so does stage 1",
        ),
        (lambda n, ranks, memory, room: None, "stage 1 takes 31.4 GB, which fits"),
        (
            lambda n, ranks, memory, room: smallest(n, ranks, memory, 0),
            "4 GB of room: stage 1 takes 31.4 GB and",
        ),
        (
            lambda n, ranks, memory, room: 0 if 16e-9 * n / ranks + room <= memory else None,
            "stage 0 takes 120.0 GB and the room, which does not fit",
        ),
    ],
)
def test_smallest_stage_wrong(function, hint, capsys):
    wrong(checks.smallest_stage, function, hint, capsys)
