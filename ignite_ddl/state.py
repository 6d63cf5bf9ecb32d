"""The state of a model on a mesh, gathered into and loaded from the plain state dict of one process."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ignite_ddl.compat import quiet_redistribution
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.pipeline.one_stage import as_stages
from ignite_ddl.pipeline.pipeline import share_buffers
from ignite_ddl.tensor.styles import ROW_ORDER

__all__ = ["full_state_dict", "load_full_state_dict"]

WAIT_SECONDS = 60  # until every rank has called


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the uncut model, on the CPU of every rank; every rank calls it.

    Args:
        model: what :func:`auto_model` returned.

    Returns:
        dict: names as in the model that was given to :func:`auto_model`, to plain tensors.
    """
    stages, mesh = as_stages(model), get_mesh()
    _wait_for_all(mesh)
    for stage in stages.local_stages():
        share_buffers(stage, mesh)  # DDP did so before the last forward pass, and that one changed them
    with quiet_redistribution():
        state = stages.plain_module().state_dict(keep_vars=True)
        mine = {name: _whole(tensor) for name, tensor in state.items()}
    return stages.gather_stages(mine)


def _wait_for_all(mesh: Mesh) -> None:
    """An error, not a hang, where some ranks do not come."""
    if mesh.world_size > 1 and dist.get_backend() == "gloo":
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=WAIT_SECONDS))
        except RuntimeError as error:
            raise ValueError(
                f"full_state_dict should be called on every rank, but some did not call it within {WAIT_SECONDS} s: "
                "call it on all and use the result on one"
            ) from error


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Loads a plain state dict into a cut model, in place; every rank calls it with the whole dict.

    Args:
        model: what :func:`auto_model` returned.
        state: a state dict of the uncut model.

    Raises:
        ValueError: if a name is missing, unknown, or has another shape.
    """
    stages = as_stages(model)
    targets = stages.plain_module().state_dict(keep_vars=True)
    known = stages.full_shapes()  # of every stage, so that all ranks refuse alike
    if set(state) != set(known):
        raise ValueError(
            f"state should have the model's names, but lacks {sorted(set(known) - set(state))} and has "
            f"{sorted(set(state) - set(known))} besides"
        )
    for name, shape in known.items():
        if shape != tuple(state[name].shape):
            raise ValueError(f"state[{name!r}] should have shape {shape}, but has {tuple(state[name].shape)}")
    with torch.no_grad():
        for name, target in targets.items():
            value = state[name].to(target.device, target.dtype)
            if hasattr(target, ROW_ORDER):
                value = value[getattr(target, ROW_ORDER).to(value.device)]
            if isinstance(target, DTensor):
                value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(value)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    whole = whole.detach().cpu()
    order = getattr(tensor, ROW_ORDER, None)
    return whole.clone() if order is None else torch.empty_like(whole).index_copy_(0, order, whole)
