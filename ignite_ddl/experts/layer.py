"""A layer of experts: a router, feed-forward networks of which each token visits some, and perhaps one for all."""

from __future__ import annotations

import math
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import nn

from ignite_ddl.arguments import COUNT, MODULE, takes
from ignite_ddl.experts.dispatch import sorted_by_expert
from ignite_ddl.experts.routing import Router


@takes(n_experts=COUNT, n_features=COUNT, n_hidden=COUNT)
class FeedForwardExperts(nn.Module):
    """Experts that are SwiGLU networks, down(silu(gate x) ⊙ up x) (Shazeer 2020, arXiv:2002.05202), one after another.

    A loop over experts, in any dtype, float64 too, which torch's ``grouped_mm`` refuses. Arguments and weights are laid
    out as in Hugging Face's transformers 5, so that ``ddl.Experts`` cuts both.

    Args:
        n_experts: number of experts.
        n_features: width of a token.
        n_hidden: width inside an expert.

    Attributes:
        gate: weights, (experts, hidden, width); ``up`` as well; ``down``: (experts, width, hidden).

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl.experts.layer import FeedForwardExperts

            experts = FeedForwardExperts(n_experts=4, n_features=8, n_hidden=16)
            x, index = torch.randn(3, 8), torch.tensor([[0, 1], [2, 0], [3, 4]])   # 4: a choice that was dropped
            assert experts(x, index, torch.ones(3, 2)).shape == (3, 8)
    """

    def __init__(self, n_experts: int, n_features: int, n_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(n_experts, n_hidden, n_features))
        self.up = nn.Parameter(torch.empty(n_experts, n_hidden, n_features))
        self.down = nn.Parameter(torch.empty(n_experts, n_features, n_hidden))
        for weight in (self.gate, self.up, self.down):
            nn.init.uniform_(weight, -1 / math.sqrt(weight.shape[2]), 1 / math.sqrt(weight.shape[2]))  # as nn.Linear

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sums what each token's experts make of it, times their weights.

        Args:
            x: (tokens, width).
            index: (tokens, top_k) integers; as many as there are experts means none.
            weights: (tokens, top_k).

        Returns:
            Tensor: (tokens, width).
        """
        order, counts = sorted_by_expert(index, len(self.gate))
        rows = x[order // index.shape[1]].split(counts.tolist())
        experts = zip(self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        made = [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, (gate, up, down) in zip(rows, experts, strict=True)
        ]
        return combined(torch.cat(made), order, weights, x)


def combined(made: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Sums rows of choices, at places ``order`` of (tokens, top_k), into rows of tokens, by their weights."""
    placed = made.new_zeros(weights.numel(), made.shape[1]).index_copy(0, order, made)
    return (placed.view(*weights.shape, made.shape[1]) * weights.unsqueeze(2)).sum(1).to(x.dtype)


class RouterOptions(TypedDict, total=False):
    """Further arguments of :class:`Router <ignite_ddl.experts.routing.Router>`."""

    normalize: bool
    balance_weight: float
    z_weight: float
    bias_rate: float
    capacity_factor: float | None


@takes(shared=MODULE)
class MixtureOfExperts(nn.Module):
    """A layer in place of a transformer's feed-forward network, in which each token visits ``top_k`` experts.

    Args:
        n_features: width of a token.
        n_hidden: width inside an expert.
        n_experts: number of experts.
        top_k: number of experts that a token visits.
        shared: a network that all tokens visit, whose output is added (DeepSeekMoE, Dai et al. 2024,
            arXiv:2401.06066, section 3.2). Default: none.
        options: further arguments of :class:`Router <ignite_ddl.experts.routing.Router>`.

    Attributes:
        router: the :class:`Router <ignite_ddl.experts.routing.Router>`.
        experts: the :class:`FeedForwardExperts`, which ``ddl.Experts`` cuts.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            layer = ddl.MixtureOfExperts(8, 16, n_experts=4, top_k=2, balance_weight=0.01)
            assert layer(torch.randn(2, 5, 8)).shape == (2, 5, 8)
    """

    def __init__(
        self,
        n_features: int,
        n_hidden: int,
        n_experts: int,
        top_k: int,
        shared: nn.Module | None = None,
        **options: Unpack[RouterOptions],
    ) -> None:
        super().__init__()
        self.router = Router(n_features, n_experts, top_k, **options)
        self.experts = FeedForwardExperts(n_experts, n_features, n_hidden)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of tokens, (..., width), the same shape."""
        flat = x.flatten(0, -2)
        y = self.experts(flat, *self.router(flat)).view_as(x)
        return y if self.shared is None else y + self.shared(x)
