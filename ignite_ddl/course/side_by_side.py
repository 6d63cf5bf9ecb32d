"""Small networks side by side in one tensor: every learning rate with every seed, trained at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F

from ignite_ddl.course.data import fashion_mnist_tensors

__all__ = ["SideBySide"]


class SideBySide:
    """Networks on 7 × 7 tiles of Fashion-MNIST, 49 numbers in and 10 out, one for each rate with each seed.

    Weights are handed in and handed back, so that a gradient may be computed at old weights and applied to new ones.
    A seed has its own first weights and its own rows, the same for every rate.

    Args:
        rates: learning rates.
        n_seeds: networks for each rate.
        batch_size: images of a gradient. Default: 16.
        hidden: units of each hidden layer. Default: one of 32.
        classes: for each reader the labels of its images. Several readers train the same networks, each on rows of its
            own: gradients, and weights that readers have changed alone, are (readers, networks, ...). Default: one
            reader, of all ten.

    Example:
        >>> networks = SideBySide([0.1, 0.05], n_seeds=3)
        >>> weights = networks.start()
        >>> weights = networks.step(weights, networks.gradients(weights))
        >>> networks.accuracies(weights).shape
        torch.Size([2, 3])
    """

    def __init__(
        self, rates: list[float], n_seeds: int, batch_size: int = 16, hidden: tuple[int, ...] = (32,),
        classes: Sequence[Sequence[int]] = (range(10),),
    ):  # fmt: skip
        self.sizes = (49, *hidden, 10)
        self.n_rates, self.n_seeds, self.batch_size = len(rates), n_seeds, batch_size
        self.rate_of = torch.tensor(rates).repeat_interleave(n_seeds).view(-1, 1, 1)
        (self.tiles, self.labels), (self.test_tiles, self.test_labels) = _tiles(True), _tiles(False)
        self.images = [torch.isin(self.labels, torch.tensor(own)).nonzero()[:, 0] for own in classes]
        self.rows = [
            [torch.Generator().manual_seed(1000 * (reader + 1) + seed) for seed in range(n_seeds)]
            for reader in range(len(classes))
        ]

    def start(self) -> list[torch.Tensor]:
        """The first weights: for each layer a matrix and a bias, their first dimension is (rate, seed)."""
        weights = []
        for layer, (n_in, n_out) in enumerate(pairwise(self.sizes)):
            sources = [torch.Generator().manual_seed(seed + 100 * (layer // 2)) for seed in range(self.n_seeds)]
            drawn = [torch.randn(n_in, n_out, generator=source) * (2 / n_in) ** 0.5 for source in sources]
            weights += [torch.stack(drawn * self.n_rates), torch.zeros(self.n_rates * self.n_seeds, 1, n_out)]
        return weights

    def gradients(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients at these weights, of the next batch of each reader and seed."""
        drawn = [
            own[torch.randint(len(own), (self.batch_size,), generator=source)]
            for own, sources in zip(self.images, self.rows, strict=True)
            for source in sources
        ]
        rows = torch.stack(drawn).view(len(self.rows), self.n_seeds, -1).repeat(1, self.n_rates, 1).flatten(0, 1)
        weights = [
            weight.detach().expand(len(self.rows), *weight.shape[-3:]).flatten(0, 1).requires_grad_()
            for weight in weights
        ]
        loss = F.cross_entropy(_logits(weights, self.tiles[rows]).transpose(1, 2), self.labels[rows])
        found = torch.autograd.grad(len(rows) * loss, weights)  # of each network's own mean
        return [each.unflatten(0, (len(self.rows), -1)) for each in found] if len(self.rows) > 1 else list(found)

    def step(self, weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """New weights: each network's gradients subtracted at its own rate."""
        return [w - self.rate_of * g for w, g in zip(weights, gradients, strict=True)]

    def accuracies(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """Shares of the 1,000 test images: (rates, seeds)."""
        guesses = _logits(weights, self.test_tiles.expand(len(self.rate_of), -1, -1)).argmax(dim=2)
        return (guesses == self.test_labels).float().mean(dim=1).view(self.n_rates, self.n_seeds)

    def losses(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """Mean cross-entropy of the 1,000 test images: (rates, seeds)."""
        logits = _logits(weights, self.test_tiles.expand(len(self.rate_of), -1, -1))
        labels = self.test_labels.expand(len(logits), -1)
        loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(dim=1)
        return loss.view(self.n_rates, self.n_seeds)


def _logits(
    weights: list[torch.Tensor], x: torch.Tensor
) -> torch.Tensor:  # (networks, rows, 49) -> (networks, rows, 10)
    for place in range(0, len(weights) - 2, 2):
        x = torch.baddbmm(weights[place + 1], x, weights[place]).relu()
    return torch.baddbmm(weights[-1], x, weights[-2])


@cache
def _tiles(train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = fashion_mnist_tensors(train=train).tensors
    return F.avg_pool2d(images, 4).flatten(1), labels
