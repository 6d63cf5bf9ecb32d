"""The checks of chapter 04: a training function, and gradients averaged where ranks hold different row counts."""

import logging

import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler, TensorDataset

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.models import MLP
from ignite_ddl.course.ranks import NumbersSent, try_on_ranks

BOUND = 1e-12  # float64


@exercise(
    # World of 1: the whole batch at once, so that the order of the rows does not matter.
    cases=((4, 48, 16, 3), (2, 60, 12, 2), (1, 24, 24, 3)),
    about=lambda world_size, n_rows, batch_size, epochs: (
        f"{world_size} rank{'s' * (world_size > 1)}, {n_rows} rows, batches of {batch_size}, {epochs} epochs"
    ),
    right=f"1, 2 and 4 ranks end with the weights of one process, within {BOUND:.0e}",
)
def train(function, world_size, n_rows, batch_size, epochs):
    found = try_on_ranks(world_size, _train_on_a_rank, function, n_rows, batch_size, epochs, timeout=60)
    _check_weights(found, n_rows, batch_size, epochs)


def _check_weights(found, n_rows, batch_size, epochs):
    expected = _trained(n_rows, batch_size, epochs, first=1)
    for weights in found:
        if not isinstance(weights, dict) or not all(torch.is_tensor(weight) for weight in weights.values()):
            raise Hint("return the trained weights by their names, as model.state_dict() gives them")
        if weights.keys() != expected.keys():
            raise Hint(
                f"your weights are called {', '.join(list(weights)[:2])}, ...; those of `model` are called "
                f"{', '.join(list(expected)[:2])}, ...: DDP wraps the model, and changes the same weights"
            )
    found = [torch.cat([weight.flatten() for weight in weights.values()]) for weights in found]

    def equals(*alike):
        return any(_near(found[0], torch.cat([w.flatten() for w in weights.values()])) for weights in alike)

    if not all(_near(found[0], mine) for mine in found):
        raise Hint("the ranks end with different weights; nothing averages their gradients")
    if equals(*(_trained(n_rows, batch_size, epochs, first) for first in (1, 0))):
        return
    if equals(_trained(n_rows, batch_size, epochs, first=None)):
        raise Hint("every epoch has the same order; tell the sampler the epoch's number")
    if equals(*(_trained(n_rows, batch_size // len(found), epochs, first) for first in (1, 0))):
        raise Hint("your batches are divided twice; in idist the batch size is the global one")
    raise Hint(
        "all ranks end with the same weights, but not with those of one process: not the same rows at "
        "each step, another average, or another optimizer"
    )


def _trained(n_rows, batch_size, epochs, first):
    """What one process ends with; ``first`` is the number of the first epoch, None for the same order in each."""
    model, x, y = _model_and_rows(n_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(range(n_rows), num_replicas=1, rank=0)
    for epoch in range(epochs):
        if first is not None:
            sampler.set_epoch(first + epoch)
        for rows in torch.tensor(list(sampler)).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.state_dict()


def _train_on_a_rank(rank, function, n_rows, batch_size, epochs):
    logging.disable(logging.INFO)  # idist tells of each of its decisions
    model, x, y = _model_and_rows(n_rows)
    if rank:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(rank)
    weights = function(rank, TensorDataset(x, y), model, batch_size, epochs)
    if isinstance(weights, dict):
        return {name: torch.as_tensor(weight).detach() for name, weight in weights.items()}
    return weights


@exercise(
    cases=((4, 4, 4, 4), (7, 5, 3, 1), (2, 6, 4, 0)),
    about=lambda *shares: f"ranks with {', '.join(map(str, shares[:-1]))} and {shares[-1]} rows",
    right=f"4 ranks with unequal shares give the gradients of one process within {BOUND:.0e}",
)
def average_gradients(function, *shares):
    expected = _one_process(shares)
    results = try_on_ranks(len(shares), _on_a_rank, function, shares, timeout=60)
    _check_gradients(results, expected, shares)


def _check_gradients(results, expected, shares):
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
            raise Hint("you added the gradients up; a mean over all rows is asked for")
        if _near(found[0], plain):
            raise Hint(
                f"your mean weighs each rank alike, so a row of rank {shares.index(min(shares))} "
                f"counts otherwise than a row of rank {shares.index(max(shares))}; weigh by rows"
            )
        if not all(_near(mine, found[0]) for mine in found):
            raise Hint("the ranks end with different gradients, and their weights would part")
        raise Hint("the gradients are the same everywhere, but not those of one process with all rows")
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
    with NumbersSent() as sent:
        function(model, shares[rank])
    return _flat(model), local, sent.numbers
