"""The checks of chapter 18: the order of 1F1B, a recomputed backward pass, and the number of microbatches."""

import operator

import torch
from torch import nn

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.orders import SECONDS, most_kept, play, read


@exercise(
    cases=((4, 8), (2, 5), (3, 3), (4, 6), (1, 3)),
    about="{n_ranks} ranks, {n_microbatches} microbatches",
    right="the time of GPipe, and rank r keeps no more than p - r microbatches",
)
def one_f_one_b(function, n_ranks, n_microbatches):
    orders = [read(function(rank, n_ranks, n_microbatches), "FB", rank, n_microbatches) for rank in range(n_ranks)]
    seconds = play(orders)
    least = (n_microbatches + n_ranks - 1) * (SECONDS["F"] + SECONDS["B"])
    if seconds > least:
        raise Hint(f"your step takes {seconds} time units, 1F1B takes {least}")
    for rank, order in enumerate(orders):
        kept, fewest = most_kept(order), min(n_microbatches, n_ranks - rank)
        if kept > fewest:
            raise Hint(
                f"your step takes {seconds} time units, as it should, but rank {rank} keeps the "
                f"activations of {kept} microbatches at once; 1F1B keeps {fewest}"
            )


@exercise
def backward_again(function):
    for seed, n_rows in ((0, 4), (1, 6)):
        with torch.random.fork_rng():
            _one_microbatch(function, seed, n_rows)
    return "the gradients of kept activations, for one forward pass more"


def _one_microbatch(function, seed, n_rows):
    torch.manual_seed(seed)
    stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8)).double()
    hidden, gradient = torch.randn(2, n_rows, 8, dtype=torch.float64)
    state = torch.get_rng_state()
    kept = hidden.clone().requires_grad_()
    stage(kept).backward(gradient)
    right = [parameter.grad for parameter in stage.parameters()]
    for parameter in stage.parameters():  # of the microbatch before
        parameter.grad = torch.ones_like(parameter)
    torch.manual_seed(seed + 100)  # other microbatches have drawn their numbers since
    now, runs = torch.get_rng_state(), []
    stage[0].register_forward_pre_hook(lambda *_: runs.append(1))  # of its first layer: also by stage.forward
    found = function(stage, hidden.clone(), state, gradient.clone())
    if not isinstance(found, torch.Tensor) or found.shape != hidden.shape:
        raise Hint(f"return the gradient of hidden, a tensor of shape {tuple(hidden.shape)}")
    if len(runs) != 1:
        raise Hint(f"your function runs the stage forward {len(runs)} times; the price is one pass")
    if not float((found - kept.grad).abs().max()) <= 1e-12:
        raise Hint(
            "the gradient of hidden is not that of the first forward pass: did dropout set the same numbers to zero?"
        )
    added = [parameter.grad - 1 for parameter in stage.parameters()]
    if not all(float((mine - theirs).abs().max()) <= 1e-12 for mine, theirs in zip(added, right, strict=True)):
        raise Hint("the weights' gradients are not in .grad, added to those of the microbatch before")
    if not torch.equal(torch.get_rng_state(), now):
        raise Hint(
            "the next forward pass would draw other random numbers than without your function: put the generator's "
            "state back"
        )


@exercise
def choose_microbatches(function):
    for rows, n_ranks, row_seconds, overhead, max_rows in (
        (64, 4, 0.001, 0.002, 64),
        (64, 4, 0.001, 0.0001, 64),
        (64, 4, 0.001, 0.02, 64),
        (64, 4, 0.001, 0.02, 16),
        (60, 8, 0.003, 0.01, 60),
        (60, 8, 0.003, 0.01, 30),
        (48, 4, 0.003, 0.2, 48),  # 2 is best, fewer than ranks, though 1 is nearer to the formula's 1.47
        (48, 2, 0.002, 0.005, 24),
        (48, 1, 0.002, 0.005, 48),
    ):
        case = (
            f"{rows} rows on {n_ranks} ranks, {1e3 * row_seconds:g} ms a row, "
            f"{1e3 * overhead:g} ms a microbatch, room for {max_rows} rows"
        )
        m = function(rows, n_ranks, row_seconds, overhead, max_rows)
        if not hasattr(m, "__index__") or m < 1 or rows % m:
            raise Hint(f"{case}: you return {m!r}, which does not cut {rows} rows into equal microbatches")
        m = operator.index(m)
        if (alive := _alive(rows, n_ranks, m)) > max_rows:
            raise Hint(f"{case}: with your {m} microbatches rank 0 keeps {alive} rows")

        def seconds(m, rows=rows, n_ranks=n_ranks, row_seconds=row_seconds, overhead=overhead):
            return (m + n_ranks - 1) * (rows / m * row_seconds + overhead)

        fitting = [m for m in range(1, rows + 1) if rows % m == 0 and _alive(rows, n_ranks, m) <= max_rows]
        best = min(fitting, key=seconds)
        if seconds(m) > seconds(best) * (1 + 1e-9):
            raise Hint(
                f"{case}: with your {m} microbatches a step takes {1e3 * seconds(m):.1f} ms, "
                f"{1e3 * seconds(best):.1f} can be had"
            )
    return "the fastest number of microbatches that fits"


def _alive(rows, n_ranks, m):
    """Rows whose activations rank 0 keeps at most, under 1F1B."""
    return min(m, n_ranks) * rows // m
