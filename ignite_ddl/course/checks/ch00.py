"""The checks of chapter 00's exercises: the true mean, and a layer cut by its inputs."""

import torch

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import counted_on_ranks

WAIT_SECONDS = 10  # four ranks that only add two numbers take a fraction of a second


@exercise(
    cases=(  # the losses of the rows that each of 4 ranks holds
        [[1, 2, 3], [4, 5, 6], [7, 8], [9, 10]],
        [[8], [1, 3], [2, 2, 5], [4, 4, 4, 7]],
        [[1, 2], [3, 4], [5, 6], [7, 8]],
    ),
    right="the true mean on every rank, and a rank sends two numbers",
)
def mean_of_all(function, losses):
    """The mean over all rows, on every rank, for one or two numbers sent."""
    ranks = counted_on_ranks(function, [(sum(mine) / len(mine), len(mine)) for mine in losses], WAIT_SECONDS)
    if None in (value for value, _ in ranks):
        raise Hint("your function returns nothing: it should return the mean")
    values = [float(value) for value, _ in ranks]
    true = sum(map(sum, losses)) / sum(map(len, losses))
    naive = sum(sum(part) / len(part) for part in losses) / len(losses)
    if others := sorted({op for _, traffic in ranks for op in traffic.ops} - {"all_reduce", "barrier"}):
        raise Hint(f"you used {others[0]}; idist.all_reduce is enough")
    if not _near(values[0], true):
        told = f"with {_sizes(map(len, losses))} rows the mean is {true:g}, yours is {values[0]:g}"
        if _near(values[0], naive):
            told += ": the mean of the four means gives every rank the same weight, however few its rows"
        raise Hint(told)
    if wrong := [rank for rank, value in enumerate(values) if not _near(value, true)]:
        raise Hint(f"rank 0 returns {values[0]:g}, rank {wrong[0]} returns {values[wrong[0]]:g}: all need the mean")
    if (sent := max(traffic.numbers for _, traffic in ranks)) > 2:
        raise Hint(f"right, but a rank sends {sent} numbers; two are enough")


@exercise(
    cases=((8, 12, (2, 1, 1, 1)), (3, 2, (1, 4, 2, 3))),  # rows, outputs, inputs of each rank
    about=lambda n_rows, n_outputs, held: f"ranks with {_sizes(held)} inputs",
    right="the whole output on every rank, from one sum",
)
def cut_by_inputs(function, n_rows, n_outputs, held):
    """The whole output on every rank, from one sum over the ranks."""
    numbers = torch.arange(sum(held) * n_rows, dtype=torch.float64)
    rows = numbers.reshape(n_rows, -1) % 7 + 1
    weight = torch.arange(sum(held) * n_outputs, dtype=torch.float64).reshape(n_outputs, -1) % 11 + 1
    firsts = [sum(held[:rank]) for rank in range(4)]
    given = [(rows, part, first) for part, first in zip(weight.split(held, dim=1), firsts, strict=True)]
    true = rows @ weight.T
    for rank, (outputs, traffic) in enumerate(counted_on_ranks(function, given, WAIT_SECONDS)):
        if not isinstance(outputs, torch.Tensor) or outputs.shape != true.shape:
            raise Hint(f"rank {rank} should return a tensor of shape {tuple(true.shape)}")
        if others := [op for op in traffic.ops if op != "all_reduce"]:
            raise Hint(f"you used {others[0]}; one idist.all_reduce is enough")
        if not _near((outputs - true).abs().max(), 0):
            told = f"output 0 of row 0 should be {true[0, 0]:g}, on rank {rank} it is {outputs[0, 0]:g}"
            if not traffic.ops:
                told += ": it has only its own inputs' part, and an output is a sum over all inputs"
            elif _near((4 * outputs - true).abs().max(), 0):
                told += ": the ranks' parts make a sum, not a mean"
            raise Hint(told)
        if len(traffic) > 1:
            raise Hint(f"right, but you called all_reduce {len(traffic)} times; once is enough")


def _near(value, true):
    return abs(value - true) <= 1e-5


def _sizes(sizes):
    """ "3, 3, 2 and 2" of four numbers."""
    *first, last = map(str, sizes)
    return f"{', '.join(first)} and {last}"
