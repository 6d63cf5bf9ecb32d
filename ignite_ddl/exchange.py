"""An exchange of rows between all ranks of a group, whose gradient takes the same way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def exchange(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    sent: Sequence[int] | None = None,
    got: Sequence[int] | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """Sends rows to each rank of a group, and returns those of each rank, rank 0's first.

    Args:
        x: (rows, ...), those for rank 0 first.
        group: the ranks that call it together.
        sent: how many rows go to each rank. Default: as many to each.
        got: how many come from each rank. Default: as many from each.
        factor: of the gradient on its way back. Default: 1.
    """
    return _Exchange.apply(x, sent, got, group, factor)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: Any, got: Any, group: Any, factor: float) -> torch.Tensor:
        ctx.back, ctx.factor = (got, sent, group, 1.0), factor
        arrived = x.new_empty(len(x) if got is None else sum(got), *x.shape[1:])
        dist.all_to_all_single(arrived, x.contiguous(), got, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return _Exchange.apply(gradient * ctx.factor, *ctx.back), None, None, None, None
