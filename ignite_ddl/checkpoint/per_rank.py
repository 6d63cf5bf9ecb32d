"""Tensors that belong to a rank: gradients of an open window, weights inside a round of local steps, error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard as Cut

from ignite_ddl.checkpoint.kinds import Kinds
from ignite_ddl.compat import held_by_fsdp, local_gradients, set_local_gradients
from ignite_ddl.mesh import Mesh
from ignite_ddl.parts import ROW_ORDER
from ignite_ddl.state import Shard, local_state

_DP = {"dp", "dp_replicate", "dp_shard", "edp"}  # dims of device meshes over which gradients are reduced


def add_tensors(prefix: str, tensors: Mapping[str, torch.Tensor], shards: dict[str, Shard]) -> dict[str, list[Any]]:
    """Adds a rank's tensors to ``shards``; returns their shapes and dtypes by name."""
    shards |= {f"{prefix}.{name}": Shard.full(tensor.detach()) for name, tensor in tensors.items() if tensor.numel()}
    return {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()}


def plan_tensors(
    prefix: str, layouts: Mapping[str, list[Any]], reads: dict[str, tuple[str, Shard]]
) -> dict[str, torch.Tensor]:
    """Adds what :func:`add_tensors` has saved to ``reads``; returns the empty tensors that are filled."""
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype, *_) in layouts.items()}
    for name, tensor in tensors.items():
        if tensor.numel():
            reads[f"{prefix}.{name}"] = f"{prefix}.{name}", Shard.full(tensor)
    return tensors


def capture_gradients(kinds: Kinds, shards: dict[str, Shard], mesh: Mesh) -> dict[str, Any]:
    """Adds this rank's gradients of open windows to ``shards``; returns their layouts by model and name."""
    accumulating: list[nn.Module] = []
    for engine in kinds.engines.values():
        accumulating += [step.model for step in getattr(engine, "steps", {}).values() if step.open]
        accumulating += getattr(getattr(engine, "resume", None), "accumulating", ())
    parameters = {id(parameter) for model in accumulating for parameter in model.parameters()}
    return {
        key: _capture_model(model, _prefix(mesh, key), shards)
        for key, model in kinds.models.items()
        if any(id(parameter) in parameters for parameter in model.parameters())
    }


def _capture_model(model: nn.Module, prefix: str, shards: dict[str, Shard]) -> dict[str, Any]:
    found, locals_, rest = local_gradients(model), {}, {}
    for name, tensor in local_state(model)[0].items():
        gradient, unsharded = found.pop(id(tensor), (None, False))
        if gradient is None:
            continue
        placements = None
        if isinstance(gradient, DTensor):
            placements = [_encoded(placement) for placement in gradient.placements]
            gradient = gradient.to_local()
        locals_[name], rest[name] = gradient.clone(), [_cut_of(tensor, unsharded), placements, unsharded]
    return {name: layout + rest[name] for name, layout in add_tensors(prefix, locals_, shards).items()}


def plan_gradients(
    folder: Any, models: Mapping[str, nn.Module], layouts: Any, mesh: Mesh, reads: dict[str, tuple[str, Shard]]
) -> dict[str, dict[str, torch.Tensor]]:
    """Adds what this rank reads to ``reads``; returns the empty tensors that are filled.

    Raises:
        ValueError: if the mesh or the cut of the weights is another one, or the model is not loaded.
    """
    ep, between = folder.content.get("ep", 1), f"{folder.path} was saved between two optimizer steps of gradient "
    between += "accumulation, and each rank of its mesh "
    cures = "take a checkpoint of an iteration in which the optimizer steps, or leave the trainer out of to_load"
    if folder.content["mesh"] != mesh.sizes or ep != mesh.ep_size:
        was = ", ".join(f"{axis}={size}" for axis, size in folder.content["mesh"].items()) + f", ep={ep}" * (ep > 1)
        raise ValueError(f"{between}({was}) has gradients of its own: load it on that mesh, {cures}")
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for key, of_model in layouts.items():
        if key not in models:
            raise ValueError(f"to_load should have {key!r}, too: its gradients wait for the trainer's next batch")
        if (name := _cut_otherwise(models[key], of_model, folder.content["models"][key]["saved_as"])) is not None:
            raise ValueError(
                f"{between}has gradients of its part of the weights, but {name!r} of to_load[{key!r}] is cut, placed "
                "or tied otherwise here: make the model with the same arguments of ddl.auto_model (shard, tensor_plan, "
                f"split, schedule), {cures}"
            )
        gradients[key] = plan_tensors(_prefix(mesh, key), of_model, reads)
    return gradients


def row_order(parameter: torch.Tensor) -> int | None:
    """A number for the order of the rows of a weight that ``Column(parts=)`` has cut."""
    order = getattr(parameter, ROW_ORDER, None)
    return None if order is None else crc32(order.cpu().numpy().tobytes())


def _cut_of(parameter: torch.Tensor, unsharded: bool) -> list[Any]:
    """How a weight is cut, without the axes of dp if FSDP2 or ``replicate`` has still to reduce its gradient."""
    cut: list[Any] = [row_order(parameter)]
    if isinstance(parameter, DTensor):
        axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
        cut += [[axis, _encoded(p)] for axis, p in axes if not (unsharded and axis in _DP)]
    return cut


def _cut_otherwise(model: nn.Module, layouts: Mapping[str, list[Any]], tied: Mapping[str, str]) -> str | None:
    """The first name of a weight that is not here, or not as it was when its gradient was saved."""
    tensors, saved_as, _ = local_state(model)
    of_fsdp = held_by_fsdp(model)
    for name, (_, _, *cut, _, unsharded) in layouts.items():
        here = tensors.get(name)
        if here is None or (unsharded and id(here) not in of_fsdp) or cut not in ([], [_cut_of(here, unsharded)]):
            return name  # no cut is in checkpoints of earlier versions
    return next((name for name, first in saved_as.items() if tied.get(name, name) != first), None)


def apply_gradients(model: nn.Module, gradients: Mapping[str, torch.Tensor], layouts: Mapping[str, Any]) -> None:
    """Gives a model the gradients of its open window, and removes others."""
    tensors, given = local_state(model)[0], {}
    for name, local in gradients.items():
        *_, placements, unsharded = layouts[name]
        given[id(tensors[name])] = local, placements and [_decoded(each) for each in placements], unsharded
    set_local_gradients(model, given)


def _prefix(mesh: Mesh, key: str) -> str:
    return f"gradients of rank {mesh.rank}.{key}"


def _encoded(placement: Any) -> str | int:
    """A placement as JSON: the dim of a Shard, the operation of a Partial, or an empty string."""
    if isinstance(placement, Cut):
        return placement.dim
    if not isinstance(placement, Partial | Replicate):  # FSDP2's over tp is no Shard
        raise ValueError(
            f"a gradient that is placed as {placement} cannot be saved between two optimizer steps: take a checkpoint "
            "of an iteration in which the optimizer steps"
        )
    return placement.reduce_op if isinstance(placement, Partial) else ""


def _decoded(encoded: str | int) -> Any:
    if isinstance(encoded, int):
        return Cut(encoded)
    return Partial(encoded) if encoded else Replicate()
