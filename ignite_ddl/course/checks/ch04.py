"""The checks of chapter 04: rows dealt to ranks, and gradients averaged where ranks hold different row counts."""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.models import MLP
from ignite_ddl.course.ranks import on_ranks

BOUND = 1e-12  # float64


@exercise
def deal_rows(function):
    for n_rows, batch_size, world_size in ((64, 16, 4), (24, 8, 2), (50, 12, 4), (21, 8, 4), (9, 4, 1)):
        order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(n_rows)).tolist()
        dealt = [function(list(order), batch_size, world_size, rank) for rank in range(world_size)]
        _check_deal(dealt, order, batch_size)
    return (
        "at every step the ranks together see the batch of one process, and shares differ by at most one row"
    )


def _check_deal(dealt, order, batch_size):
    case = f"{len(order)} rows, batches of {batch_size}, {len(dealt)} ranks"
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    for rank, steps in enumerate(dealt):
        lists = isinstance(steps, list | tuple) and all(isinstance(rows, list | tuple) for rows in steps)
        if not lists:
            raise Hint(
                f"return a list with one list of row numbers for each step (rank {rank} gave another kind)"
            )
        if len(steps) != len(batches):
            raise Hint(
                f"{case}: one process makes {len(batches)} steps, your rank {rank} makes {len(steps)}; "
                "a rank that steps less leaves its peers waiting in all-reduce"
            )
    for step, batch in enumerate(batches):
        shares = [steps[step] for steps in dealt]
        together = [row for share in shares for row in share]
        if len(together) != len(set(together)):
            twice = next(row for row in together if together.count(row) > 1)
            raise Hint(f"{case}: at step {step} row {twice} is dealt more than once, and counts double")
        if set(together) != set(batch):
            foreign = len(set(together) - set(batch))
            missing = len(set(batch) - set(together))
            raise Hint(
                f"{case}: at step {step} your ranks miss {missing} rows of the batch of one process "
                f"and see {foreign} that are not in it"
            )
        sizes = [len(share) for share in shares]
        if max(sizes) - min(sizes) > 1:
            raise Hint(f"{case}: at step {step} your ranks hold {sizes} rows; deal as evenly as it goes")


@exercise
def average_gradients(function):
    for shares in ((4, 4, 4, 4), (7, 5, 3, 1), (2, 6, 4, 0)):
        expected = _one_process(shares)
        results = on_ranks(len(shares), _on_a_rank, function, shares, timeout=60)
        _check_gradients(results, expected, shares)
    return f"4 ranks with unequal shares give the gradients of one process within {BOUND:.0e}"


def _check_gradients(results, expected, shares):
    case = f"ranks with {', '.join(map(str, shares[:-1]))} and {shares[-1]} rows"
    found, local, moved = zip(*results, strict=True)
    n_numbers = expected.numel()
    for rank, gradient in enumerate(found):
        if gradient is None or gradient.shape != expected.shape:
            raise Hint(f"rank {rank} ends without a gradient of its parameter's shape for every parameter")
    if all(_near(mine, before) for mine, before in zip(found, local, strict=True)):
        raise Hint("the gradients are still each rank's own; they have to be added up over the ranks")
    if not all(_near(mine, expected) for mine in found):
        plain = sum(local) / len(shares)
        if _near(found[0], sum(local)):
            raise Hint(f"{case}: you added the gradients up; a mean over all rows is asked for")
        if _near(found[0], plain):
            raise Hint(
                f"{case}: your mean weighs each rank alike, so a row of rank {shares.index(min(shares))} "
                f"counts otherwise than a row of rank {shares.index(max(shares))}; weigh by rows"
            )
        if not all(_near(mine, found[0]) for mine in found):
            raise Hint(f"{case}: the ranks end with different gradients, and their weights would part")
        raise Hint(
            f"{case}: the gradients are the same everywhere, but not those of one process with all rows"
        )
    # One number a parameter may go to the count of rows.
    if max(moved) > n_numbers + 32:
        raise Hint(
            f"right values, but a rank handles {max(moved)} numbers in its collectives and the gradients are "
            f"{n_numbers}: weigh before you send, and let all_reduce add"
        )


def _near(left, right):
    return bool((left - right).abs().max() <= BOUND)


def _model_and_rows(n_rows):
    torch.manual_seed(4)
    model = MLP(in_features=6, hidden=5, out_features=3).double()
    return model, torch.randn(n_rows, 6, dtype=torch.float64), torch.randint(3, (n_rows,))


def _flat(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    if any(g is None or g.shape != p.shape for g, p in zip(gradients, model.parameters(), strict=True)):
        return None
    return torch.cat([gradient.detach().flatten() for gradient in gradients])


def _one_process(shares):
    model, x, y = _model_and_rows(sum(shares))
    F.cross_entropy(model(x), y).backward()
    return _flat(model)


def _on_a_rank(rank, function, shares):
    model, x, y = _model_and_rows(sum(shares))
    mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if shares[rank]:
        F.cross_entropy(model(x[mine]), y[mine]).backward()
    local = _flat(model).clone()
    with _Traffic() as traffic:
        function(model, shares[rank])
    return _flat(model), local, traffic.numbers


class _Traffic(TorchDispatchMode):
    """Counts the numbers in the tensors of each collective, whoever calls it: all of them pass the dispatcher."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.numbers += max(_numbers(argument) for argument in args)
        return func(*args, **(kwargs or {}))


def _numbers(value):
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(_numbers, value)) if isinstance(value, list | tuple) else 0
