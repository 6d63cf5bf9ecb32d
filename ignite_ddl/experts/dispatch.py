"""Tokens to the ranks of their experts and back: two exchanges of uneven sizes, in the backward pass two more."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ignite_ddl.collectives import exchange
from ignite_ddl.mesh import Mesh


def sorted_by_expert(index: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices of all tokens by expert, those of one expert in the order of tokens.

    Args:
        index: (tokens, top_k) integers: the experts of each token; ``n_experts``: this choice was dropped.
        n_experts: number of experts.

    Returns:
        tuple: positions in the flattened ``index`` without those that were dropped, and the number of each expert.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl.experts.dispatch import sorted_by_expert

            order, counts = sorted_by_expert(torch.tensor([[2, 0], [0, 3], [1, 0]]), n_experts=3)
            assert order.tolist() == [1, 2, 5, 4, 0] and counts.tolist() == [3, 1, 1]
    """
    flat = index.reshape(-1)
    counts = torch.bincount(flat, minlength=n_experts + 1)[:n_experts]
    return flat.argsort(stable=True)[: int(counts.sum())], counts


class Dispatch:
    """One exchange of tokens among the ep ranks, each of which holds an equal part of the experts, in their order.

    Gradients come back multiplied by ep, and go to the experts divided by it: what reduces gradients of experts divides
    by the number of copies, dp × cp / ep, but the loss of a rank is weighted for an average over dp × cp.

    Args:
        index: (tokens, top_k) integers, the experts of this rank's tokens.
        n_experts: number of experts.
        mesh: the mesh.

    Attributes:
        order: positions in the flattened ``index`` of what is sent, by expert.
        local: the expert of each token that arrives, counted from this rank's first.
    """

    def __init__(self, index: torch.Tensor, n_experts: int, mesh: Mesh) -> None:
        self.order, counts = sorted_by_expert(index, n_experts)
        self.top_k, self.ep, self.group = index.shape[1], mesh.ep_size, mesh.ep_group
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        counts, arriving = counts.view(self.ep, -1), arriving.view(self.ep, -1)
        self.sent, self.got = counts.sum(1).tolist(), arriving.sum(1).tolist()
        local_index = torch.arange(arriving.shape[1], device=index.device).repeat(self.ep)
        self.local = local_index.repeat_interleave(arriving.flatten())

    def to_experts(self, x: torch.Tensor) -> torch.Tensor:
        """A row for each token that chose an expert of this rank, from (tokens, width) of this rank's tokens."""
        return exchange(x[self.order // self.top_k], self.group, self.sent, self.got, float(self.ep))

    def to_tokens(self, y: torch.Tensor) -> torch.Tensor:
        """What experts made of these rows, back where the tokens are, in the order of ``order``."""
        return exchange(y, self.group, self.got, self.sent, 1 / self.ep)
