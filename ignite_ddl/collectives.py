"""What ranks tell each other beside training: the tensors, the values or a yes of all ranks of a group."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The tensors of all ranks of a group, which have one shape, in the order of ranks."""
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts


def gathered_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of a group, by pickle, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_any_rank(found: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether this is so on any rank of a group."""
    flag = torch.tensor(float(found), device=idist.device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag)
