"""The exchange that turns a part of the tokens of all heads into all tokens of a part of the heads, and its inverse."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ignite_ddl.collectives import exchange


def tokens_to_heads(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """From (batch, heads, tokens / P, width) to (batch, heads / P, tokens, width), rank 0's tokens first."""
    if group is None:
        return tensor
    parts = tensor.unflatten(1, (group.size(), -1)).movedim(1, 0)
    return exchange(parts, group).movedim(0, 2).flatten(2, 3)


def heads_to_tokens(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The inverse of :func:`tokens_to_heads`."""
    if group is None:
        return tensor
    parts = tensor.unflatten(2, (group.size(), -1)).movedim(2, 0)
    return exchange(parts, group).movedim(0, 1).flatten(1, 2)
