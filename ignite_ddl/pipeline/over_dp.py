"""What data parallelism needs of a stage: equal buffers, weights freed in time, gradients reduced when it is time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.mesh import Mesh

__all__ = ["gradient_sync", "reshard", "share_buffers"]


@contextlib.contextmanager
def gradient_sync(stages: list[nn.Module], sync: bool) -> Iterator[None]:
    """Reduces gradients over dp only if an optimizer step follows."""
    with contextlib.ExitStack() as stack:
        for stage in stages:
            if isinstance(stage, DistributedDataParallel) and not sync:
                stack.enter_context(stage.no_sync())
            elif isinstance(stage, FSDPModule):
                stage.set_requires_gradient_sync(sync)
        yield


def reshard(root: nn.Module) -> None:
    """Frees the unsharded parameters of FSDP2, which otherwise a backward pass frees."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def share_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Broadcasts dp rank 0's buffers (BatchNorm's running statistics) over dp, as DDP does before a forward pass."""
    if mesh.dp_size == 1:
        return
    buffers = [b for b in module.buffers() if not isinstance(b, DTensor)]
    source = dist.get_global_rank(mesh.dp_group, 0)
    for dtype in dict.fromkeys(b.dtype for b in buffers):  # one message per dtype
        of_dtype = [b for b in buffers if b.dtype == dtype]
        flat = torch.cat([b.detach().reshape(-1) for b in of_dtype])
        dist.broadcast(flat, src=source, group=mesh.dp_group)
        if mesh.dp_rank > 0:
            with torch.no_grad():
                for buffer, values in zip(of_dtype, flat.split([b.numel() for b in of_dtype]), strict=True):
                    buffer.copy_(values.view_as(buffer))
