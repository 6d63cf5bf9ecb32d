"""The norm of all gradients of a mesh, and clipping by it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ignite_ddl.arguments import MODULE, OPTIMIZER, a, number, takes
from ignite_ddl.data_parallel import local_round
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.tensor.gradients import redistribute_gradient

MAX_NORM = number(above=0, most=math.inf)  # inf: computes the norm without clipping


def _are_parameters(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, torch.Tensor) for one in value)  # or none, under pp


@takes(
    model=MODULE,
    optimizer=OPTIMIZER,
    max_norm=MAX_NORM,
    parameters=a('a list of parameters, such as group["params"]', _are_parameters),
)
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    parameters: Iterable[nn.Parameter] | None = None,
) -> torch.Tensor:
    """Clips gradients by their global 2-norm over all ranks: every shard counts, and copies count once.

    With ``dp_sync="local"`` the norm is that of this dp rank's gradients, over its dp_shard, tp and pp peers.

    Args:
        model: what ``ddl.auto_model`` returned.
        max_norm: the largest norm after clipping, positive.
        optimizer: whose parameters alone count and are clipped, where it steps a part of the model. Default: all.
        parameters: which of them alone count and are clipped, such as those of a parameter group. Default: all.

    Returns:
        Tensor: the norm before clipping, the same on every rank.

    Raises:
        ValueError: if ``max_norm`` is not positive.
    """
    return clip(model, max_norm, optimizer, parameters=parameters)


def parameters_of_others(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """Weights that the optimizer steps, but that are another model's, such as those of a loss."""
    own = {id(parameter) for parameter in model.parameters()}
    return [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]


def clip(
    model: nn.Module,
    max_norm: float,
    optimizer: torch.optim.Optimizer | None,
    others: Iterable[nn.Parameter] = (),
    parameters: Iterable[nn.Parameter] | None = None,
) -> torch.Tensor:
    mesh, stages, is_local = get_mesh(), stages_of(model), local_round(model) is not None
    shard_size = mesh.dp_shard_size if mesh.hybrid else 1
    n_ranks = (shard_size if is_local else mesh.dp_cp_size) * mesh.tp_size
    given = [] if optimizer is None else [[p for group in optimizer.param_groups for p in group["params"]]]
    chosen = [{id(p) for p in each} for each in (*given, *([] if parameters is None else [parameters]))]
    total = torch.zeros((), dtype=torch.float64, device=idist.device())
    gradients, is_cut = [], False
    for name, parameter in itertools.chain(model.named_parameters(), (("", parameter) for parameter in others)):
        if parameter.grad is None or any(id(parameter) not in each for each in chosen):
            continue
        redistribute_gradient(parameter)
        local, n_copies = _local_and_copies(parameter.grad, n_ranks)
        gradients.append(local)
        is_cut = is_cut or n_copies < n_ranks
        if stages.counts(name):
            real = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
            total += real.double().square().sum() / n_copies
    if is_local or is_cut or mesh.pp_size > 1:
        _sum_over_ranks(total, mesh, is_local)
    else:
        total *= n_ranks
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in gradients:
        local.mul_(scale.to(local.device))
    return norm


def _sum_over_ranks(total: torch.Tensor, mesh: Mesh, is_local: bool) -> None:
    """Over all ranks, or in a round of local steps over those of this replica."""
    if mesh.world_size == 1:
        return
    if not is_local:
        dist.all_reduce(total)
        return
    for group in (mesh.tp_group, mesh.pp_group, *([mesh.groups["dp_shard"]] if mesh.hybrid else [])):
        dist.all_reduce(total, group=group)


def _local_and_copies(grad: torch.Tensor, n_ranks: int) -> tuple[torch.Tensor, int]:
    """A gradient's local part, and how many of a stage's ``n_ranks`` ranks hold the same part."""
    if not isinstance(grad, DTensor):
        return grad, n_ranks
    for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
        if not placement.is_replicate():  # Shard, or _StridedShard where FSDP2 cuts what tp has cut
            n_ranks //= size
    return grad.to_local(), n_ranks
