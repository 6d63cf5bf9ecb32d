"""The same training with many seeds at once: one result a seed, so that a mean has an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn

from ignite_ddl.course.data import fashion_mnist_tensors

__all__ = ["Trained", "steps_to_target", "train_copies"]


class Trained(NamedTuple):
    """What came of a training.

    Attributes:
        accuracies: on the 1,000 test images, after each epoch for each seed: (epochs, seeds).
        shut: share of the hidden units that give 0 for every test image, at the end, over all seeds.
    """

    accuracies: torch.Tensor
    shut: float


def train_copies(
    stages: list[tuple[int, int, Callable[[torch.optim.Optimizer, int], Any]]],
    hidden: tuple[int, ...],
    n_seeds: int,
    spread: float = 1.0,
    labels: torch.Tensor | None = None,
    epoch_length: int | None = None,
) -> Trained:
    """Trains a ReLU network with each seed by Ignite, on 7 × 7 tiles of Fashion-MNIST, with SGD of momentum 0.9.

    The networks lie side by side in one tensor and are trained at once, which takes far less time than one after the
    other. Each seed has its own first weights, and its own order of the rows. Each stage is a run of an engine of its
    own; all share the optimizer, and its momentum.

    Args:
        stages: of each the epochs, the batch size, and a function that takes the optimizer and the number of steps
            in an epoch, and returns the scheduler (an Ignite handler of ``Events.ITERATION_STARTED``).
        hidden: units of each hidden layer.
        n_seeds: number of networks.
        spread: factor of the first weights; with 1 they are drawn as He's rule says. Default: 1.
        labels: of the first images, as many as are trained on. Default: of all 6,000.
        epoch_length: steps that are counted as an epoch. Default: a pass through all rows.

    Returns:
        Trained: accuracies and the share of shut units.

    Example:
        >>> from ignite.handlers import PiecewiseLinear
        >>> from ignite_ddl.course import train_copies
        >>> def schedule(optimizer, epoch_length):
        ...     return PiecewiseLinear(optimizer, "lr", [(0, 0.01), (2 * epoch_length, 0.1)])
        >>> found = train_copies([(2, 600, schedule)], hidden=(8,), n_seeds=3)
        >>> found.accuracies.shape
        torch.Size([2, 3])
    """
    torch.manual_seed(0)
    tiles, given = _tiles(train=True)
    test_tiles, test_labels = _tiles(train=False)
    labels = given if labels is None else labels
    models, history = _Copies((49, *hidden, 10), range(n_seeds), spread), []
    optimizer = torch.optim.SGD(models.parameters(), lr=0.0, momentum=0.9, fused=True)

    def step(engine: Engine, rows: torch.Tensor) -> None:  # rows: (seeds, batch)
        logits = models(tiles[rows])[-1]  # (seeds, batch, 10)
        loss = n_seeds * F.cross_entropy(logits.transpose(1, 2), labels[rows])  # a sum over seeds of means
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def test(engine: Engine) -> None:
        guesses = models(test_tiles.expand(n_seeds, -1, -1))[-1].argmax(dim=2)
        history.append((guesses == test_labels).float().mean(dim=1))

    for epochs, batch_size, schedule in stages:
        loader, trainer = _Shuffled(len(labels), batch_size, n_seeds), Engine(step)
        length = epoch_length or len(loader)
        trainer.add_event_handler(Events.ITERATION_STARTED, schedule(optimizer, length))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, test)
        trainer.run(loader, max_epochs=epochs, epoch_length=length)
    with torch.no_grad():
        inside = torch.cat(models(test_tiles.expand(n_seeds, -1, -1))[:-1], dim=2)
    return Trained(torch.stack(history), (inside == 0).all(dim=1).float().mean().item())


def steps_to_target(
    batch_size: int,
    rates: list[float],
    target: float,
    adam: bool = False,
    n_seeds: int = 8,
    at_most: int = 3000,
    first_seed: int = 0,
) -> tuple[int, float]:
    """The fewest steps to an accuracy, over learning rates: the race ends when the first rate is there.

    Trains networks with one hidden layer of 32, one for each rate with each seed, on random batches of the 7 × 7 tiles
    of ``train_copies``. A rate is there when the mean of its seeds is. It looks at the test images every step at
    first, and later about every twentieth part of the steps so far.

    Args:
        batch_size: images of a step.
        rates: learning rates, each constant.
        target: share of the 1,000 test images, such as 0.78.
        adam: Adam in place of SGD with momentum 0.9. Default: False.
        n_seeds: networks for each rate. Default: 8.
        at_most: steps after which it gives up. Default: 3,000.
        first_seed: of ``n_seeds`` in a row: of the first weights and of the batches. Default: 0.

    Returns:
        the steps, and the rate that was first.

    Raises:
        RuntimeError: if no rate is there after ``at_most`` steps.

    Example:
        >>> from ignite_ddl.course import steps_to_target
        >>> steps, rate = steps_to_target(120, [0.05, 0.1], target=0.3, n_seeds=2)
        >>> steps < 100
        True
    """
    tiles, labels = _tiles(train=True)
    test_tiles, test_labels = _tiles(train=False)
    n_networks, seeds = len(rates) * n_seeds, range(first_seed, first_seed + n_seeds)
    sources = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]
    models = _Copies((49, 32, 10), seeds, 1.0)
    for weight in models.parameters():  # the same first weights for each rate
        weight.data = weight.data.repeat(len(rates), 1, 1)
    rate_of = torch.tensor(rates).repeat_interleave(n_seeds).view(-1, 1, 1)
    first, second = ([torch.zeros_like(weight) for weight in models.parameters()] for _ in range(2))
    for step in range(1, at_most + 1):
        rows = torch.stack([torch.randint(len(labels), (batch_size,), generator=source) for source in sources])
        logits = models(tiles[rows].repeat(len(rates), 1, 1))[-1].transpose(1, 2)
        loss = n_networks * F.cross_entropy(logits, labels[rows].repeat(len(rates), 1))
        gradients = torch.autograd.grad(loss, list(models.parameters()))
        with torch.no_grad():
            for weight, gradient, m, v in zip(models.parameters(), gradients, first, second, strict=True):
                if adam:
                    m.mul_(0.9).add_(gradient, alpha=0.1)
                    v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                    weight -= rate_of * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
                else:
                    weight -= rate_of * m.mul_(0.9).add_(gradient)
            if step % max(1, step // 20) == 0:
                guesses = models(test_tiles.expand(n_networks, -1, -1))[-1].argmax(dim=2)
                reached = (guesses == test_labels).float().mean(dim=1).view(len(rates), n_seeds).mean(dim=1)
                if reached.max() >= target:
                    return step, rates[int(reached.argmax())]
    raise RuntimeError(f"after {at_most} steps no rate has reached {target:.0%}")


def _tiles(train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = fashion_mnist_tensors(train=train).tensors
    return F.avg_pool2d(images, 4).flatten(1), labels


class _Copies(nn.Module):
    """A network for each seed: entry s of every weight belongs to the seed at place s."""

    def __init__(self, sizes: tuple[int, ...], seeds: range, spread: float) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        for n_in, n_out in pairwise(sizes):
            drawn = torch.stack([torch.randn(n_in, n_out, generator=g) for g in generators])
            self.weights.append(nn.Parameter(drawn * spread * (2 / n_in) ** 0.5))
            self.biases.append(nn.Parameter(torch.zeros(len(seeds), 1, n_out)))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What each layer gives, the logits last; hidden ones after the ReLU: (seeds, rows, units)."""
        outputs = []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.baddbmm(bias, outputs[-1] if outputs else x, weight)
            outputs.append(x.relu())
        return [*outputs[:-1], x]


class _Shuffled:
    """Row numbers for each step, (seeds, batch_size); every seed has its own order."""

    def __init__(self, n_rows: int, batch_size: int, n_seeds: int) -> None:
        self.n_rows, self.batch_size, self.n_seeds = n_rows, batch_size, n_seeds

    def __len__(self) -> int:
        return -(-self.n_rows // self.batch_size)  # rounded up

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.rand(self.n_seeds, self.n_rows).argsort(dim=1).split(self.batch_size, dim=1)
