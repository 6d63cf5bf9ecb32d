"""Gradients that wait for a later batch: a checkpoint inside a window of gradient accumulation keeps them by rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ignite.engine import Engine
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard as Cut

from ignite_ddl.compat import local_gradients, set_local_gradients
from ignite_ddl.mesh import Mesh
from ignite_ddl.state import Shard, local_state

__all__ = ["GRADIENTS", "load_gradients", "match_gradients", "take_gradients"]

GRADIENTS = "gradients that wait"  # the name under which their layouts are saved beside the objects


def take_gradients(objects: Mapping[str, Any], shards: dict[str, Shard], mesh: Mesh) -> dict[str, Any]:
    """Adds this rank's gradients of open windows to ``shards``; returns their layouts by model and name."""
    engines = [thing for thing in objects.values() if isinstance(thing, Engine)]
    steps = [step for engine in engines for step in getattr(engine, "steps", {}).values()]
    waiting = [step.model for step in steps if step.open]
    waiting += [model for engine in engines for model in getattr(getattr(engine, "resume", None), "waiting", ())]
    parameters = {id(parameter) for model in waiting for parameter in model.parameters()}
    layouts: dict[str, Any] = {}
    for key, model in objects.items():
        if not isinstance(model, nn.Module) or not any(id(p) in parameters for p in model.parameters()):
            continue
        found, layouts[key] = local_gradients(model), {}
        for name, tensor in local_state(model)[0].items():
            gradient, unsharded = found.pop(id(tensor), (None, False))
            if gradient is None:
                continue
            placements = None
            if isinstance(gradient, DTensor):
                placements = [_written(placement) for placement in gradient.placements]
                gradient = gradient.to_local()
            local = gradient.detach().clone()
            dtype = str(local.dtype).removeprefix("torch.")
            layouts[key][name] = [list(local.shape), dtype, placements, unsharded]
            if local.numel():
                shards[_name(mesh, key, name)] = _shard(local)
    return layouts


def match_gradients(
    folder: Any, models: Mapping[str, nn.Module], layouts: Any, mesh: Mesh, targets: dict[str, tuple[str, Shard]]
) -> dict[str, dict[str, torch.Tensor]]:
    """Adds what this rank reads to ``targets``; returns the empty tensors that are filled.

    Raises:
        ValueError: if the mesh is another one, or the model is not loaded.
    """
    if folder.content["mesh"] != mesh.sizes:
        was = ", ".join(f"{axis}={size}" for axis, size in folder.content["mesh"].items())
        raise ValueError(
            f"{folder.path} was saved between two optimizer steps of gradient accumulation, and each rank of its mesh "
            f"({was}) has gradients of its own: load it on that mesh, take a checkpoint of an iteration in which the "
            "optimizer steps, or leave the trainer out of to_load"
        )
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for key, names in layouts.items():
        if key not in models:
            raise ValueError(f"to_load should have {key!r}, too: its gradients wait for the trainer's next batch")
        gradients[key] = {}
        for name, (shape, dtype, _, _) in names.items():
            local = gradients[key][name] = torch.empty(shape, dtype=getattr(torch, dtype))
            if local.numel():
                targets[_name(mesh, key, name)] = (_name(mesh, key, name), _shard(local))
    return gradients


def load_gradients(model: nn.Module, gradients: Mapping[str, torch.Tensor], layouts: Mapping[str, Any]) -> None:
    """Gives a model the gradients of its open window, and removes others."""
    tensors, given = local_state(model)[0], {}
    for name, local in gradients.items():
        *_, placements, unsharded = layouts[name]
        given[id(tensors[name])] = local, placements and [_read(text) for text in placements], unsharded
    set_local_gradients(model, given)


def _name(mesh: Mesh, key: str, name: str) -> str:
    return f"gradients of rank {mesh.rank}.{key}.{name}"


def _shard(local: torch.Tensor) -> Shard:
    return Shard(tuple(local.shape), local.dtype, [((0,) * local.ndim, local)])


def _written(placement: Any) -> str | int:
    """A placement as JSON: the dim of a Shard, the operation of a Partial, or an empty string."""
    if isinstance(placement, Cut):
        return placement.dim
    return placement.reduce_op if isinstance(placement, Partial) else ""


def _read(written: str | int) -> Any:
    if isinstance(written, int):
        return Cut(written)
    return Partial(written) if written else Replicate()
