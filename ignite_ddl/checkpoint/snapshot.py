"""What goes into a checkpoint: the state of objects as tensors and as JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ignite_ddl.checkpoint.form import GRADIENTS, RANDOM, RUNS
from ignite_ddl.checkpoint.kinds import Kinds
from ignite_ddl.checkpoint.per_rank import add_tensors, capture_gradients
from ignite_ddl.checkpoint.resume import capture_runs
from ignite_ddl.checkpoint.values import decoded, encoded, plain_state
from ignite_ddl.checks.replicas import check_replicas
from ignite_ddl.data_parallel import LOCAL_ROUNDS, local_round, share_buffers
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.state import Shard, cannot_load, local_state, shard_of
from ignite_ddl.tensor.random import random_states


@dataclass
class Snapshot:
    """What one rank gives to a checkpoint.

    Attributes:
        shards: its parts of tensors, by name.
        state: all the rest, ready for JSON, which rank 0 merges and writes.
    """

    shards: dict[str, Shard]
    state: dict[str, Any]

    def copy(self) -> Snapshot:
        """The same, in memory that training does not change."""
        return Snapshot({name: shard.copy() for name, shard in self.shards.items()}, self.state)


def capture(objects: Mapping[str, Any]) -> Snapshot:
    """Reads the state of this rank's objects; every rank calls it. Nothing is copied or written yet.

    Args:
        objects: models, optimizers, and whatever has a ``state_dict()`` of numbers, strings, small tensors and
            containers of them, by name.

    Raises:
        ValueError: if an optimizer holds a parameter of no model, or a state cannot be written as JSON.
    """
    kinds, mesh = Kinds.of(objects), get_mesh()
    _check_per_rank_states(kinds)
    for model in kinds.models.values():  # DDP did so before the last forward pass, which has changed them
        for stage in stages_of(model).local_stages() if local_round(model) is None else ():
            share_buffers(stage, mesh)
    for model in kinds.models.values():
        check_replicas(model)
    shards: dict[str, Shard] = {}
    names: dict[int, str] = {}  # of parameters, by id
    models = {key: _capture_model(key, model, names, shards) for key, model in kinds.models.items()}
    optimizers = {key: _capture_optimizer(key, each, names, shards) for key, each in kinds.optimizers.items()}
    runs = capture_runs(kinds)
    states = {key: plain_state(other) for key, other in (kinds.engines | kinds.others).items()}
    for key, loader in kinds.loaders.items():
        positions = (run["positions"][key] for run in runs.values() if key in run["positions"])
        states[key] = next(positions, None) or loader.state_dict()
    for key in (key for key, other in kinds.others.items() if getattr(other, "is_per_rank", None) is True):
        tensors = add_tensors(f"{key} of rank {mesh.rank}", states[key]["tensors"], shards)
        states[key] = states[key] | {"tensors": tensors}
    states |= {RANDOM: random_states(), RUNS: runs}
    if gradients := capture_gradients(kinds, shards, mesh):
        states[GRADIENTS] = gradients
    encoded_states = {key: encoded(state, key) for key, state in states.items()}
    everything = {"models": models, "optimizers": optimizers, "objects": encoded_states, "loaders": list(kinds.loaders)}
    return Snapshot(shards, everything)


def _check_per_rank_states(kinds: Kinds) -> None:
    """Refuses to save a run without what belongs to a rank: the weights of a round of local steps, error feedback."""
    for key, model in kinds.models.items() if kinds.optimizers or kinds.engines else ():
        local, hook = local_round(model), getattr(model, "comm_state", None)
        for name, owner in (("its ddl.LocalSGD or ddl.DiLoCo", local and local.averager), ("its comm_state", hook)):
            if owner is not None and not any(other is owner for other in kinds.others.values()):
                raise ValueError(
                    f"to_save should have {name} beside {key!r}, whose state differs by rank: without it a resumed "
                    "run would differ"
                )


def _capture_model(key: str, model: nn.Module, names: dict[int, str], shards: dict[str, Shard]) -> dict[str, Any]:
    if refusal := cannot_load(model):
        raise ValueError(f"to_save[{key!r}] could not be loaded again: {refusal}")
    tensors, saved_as, extra = local_state(model)
    local = local_round(model)
    in_a_round = local is not None and local.steps > 0
    averages = local.averager.averages() if in_a_round else {}
    for name, tensor in tensors.items():
        saved = f"{key}.{saved_as[name]}"
        names.setdefault(id(tensor), saved)
        if id(tensor) in averages or not in_a_round or get_mesh().replica == 0:
            shards.setdefault(saved, shard_of(averages.get(id(tensor), tensor), tensor))
    return {
        "names": list(tensors),
        "saved_as": {name: first for name, first in saved_as.items() if name != first},
        "extra": {name: encoded(value, f"{key}.{name}") for name, value in extra.items()},
    }


def _capture_optimizer(
    key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], shards: dict[str, Shard]
) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    states: dict[str, Any] = {}
    by_name = groups_by_name("to_save", key, optimizer, names, "add its model to to_save")
    for group, parameters in zip(optimizer.param_groups, by_name, strict=True):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({"names": [name for name, _ in parameters], "options": encoded(options, key)})
        for name, parameter in parameters:
            if getattr(parameter, LOCAL_ROUNDS, False) and get_mesh().replica > 0:
                continue  # those of dp rank 0, or of its replica, are for other meshes
            state = states[name] = {"tensors": [], "values": {}}
            for part, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    _check_layout(key, name, part, value, parameter)
                    state["tensors"].append(part)
                    shards.setdefault(f"{key}.{name}.{part}", shard_of(value, parameter))
                else:
                    state["values"][part] = encoded(value, f"{key}: {part} of {name}")
    _check_own_state(key, optimizer)
    of_none = {part: value for part, value in optimizer.state.items() if not isinstance(part, torch.Tensor)}
    return {"kind": type(optimizer).__name__, "groups": groups, "states": states, "of_none": encoded(of_none, key)}


def _check_own_state(key: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises a ValueError where an optimizer's own ``state_dict`` has more than is saved by parameter."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return
    more = [part for part in optimizer.state_dict() if part not in ("state", "param_groups")]
    if more:
        raise ValueError(
            f"to_save[{key!r}] is a {type(optimizer).__name__}, whose own state_dict() has {more[0]!r} besides, which "
            "would be lost: what is saved for any mesh is what an optimizer has in its state and param_groups. Keep "
            f"numbers there (self.state[{more[0]!r}]), and tensors in the state of their parameters"
        )


def groups_by_name(
    argument: str, key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], cure: str
) -> list[list[tuple[str, torch.Tensor]]]:
    """The parameters of each group with the names under which they are saved.

    Args:
        argument: what the error names.
        key: the optimizer's name in it.
        optimizer: the optimizer.
        names: names of all models' tensors, by id.
        cure: how the error ends.

    Raises:
        ValueError: if a parameter is of no model.
    """
    groups = []
    for group in optimizer.param_groups:
        unknown = next((p for p in group["params"] if id(p) not in names), None)
        if unknown is not None:
            raise ValueError(
                f"{argument}[{key!r}] holds a parameter of shape {tuple(unknown.shape)} of no model in {argument}: "
                f"{cure}"
            )
        groups.append([(names[id(p)], p) for p in group["params"]])
    return groups


def _check_layout(key: str, name: str, part: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.shape != parameter.shape:
        raise ValueError(
            f"to_save[{key!r}] keeps {part!r} of {name!r} as a plain tensor of shape {tuple(value.shape)}, though the "
            f"parameter is cut: which part of it that is cannot be known. Take an optimizer that keeps DTensors, as "
            "torch's own do"
        )


def merge(parts: list[dict[str, Any]], mesh: Mesh) -> dict[str, Any]:
    """The ``Snapshot.state`` of all ranks as one, as ``state.json`` holds it.

    Raises:
        ValueError: if ranks have parameter groups of different numbers.
    """
    first = parts[0]
    return {
        "mesh": dict(mesh.sizes),
        **({"ep": mesh.ep_size} if mesh.ep_size > 1 else {}),
        "models": {key: _merge_models([part["models"][key] for part in parts]) for key in first["models"]},
        "optimizers": {
            key: _merge_optimizers(key, [part["optimizers"][key] for part in parts]) for key in first["optimizers"]
        },
        "objects": {key: _merge_objects([part["objects"][key] for part in parts]) for key in first["objects"]},
        "loaders": first["loaders"],
    }


def _merge_models(models: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "names": _without_duplicates(model["names"] for model in models),
        "saved_as": {name: first for model in models for name, first in model["saved_as"].items()},
        "extra": {name: value for model in models for name, value in model["extra"].items()},
    }


def _merge_optimizers(key: str, optimizers: list[dict[str, Any]]) -> dict[str, Any]:
    counts = [len(optimizer["groups"]) for optimizer in optimizers]
    if len(set(counts)) > 1:
        raise ValueError(
            f"to_save[{key!r}] should have the same parameter groups on every rank, in one order, but has "
            f"{counts} of them: give a rank without such parameters an empty group"
        )
    for i, of_ranks in enumerate(zip(*(optimizer["groups"] for optimizer in optimizers), strict=True)):
        options = [group["options"] for group in of_ranks if group["names"]]  # of the ranks that have such parameters
        if not all(_same(of_rank, options[0]) for of_rank in options):
            raise ValueError(
                f"to_save[{key!r}] should have the same parameter groups on every rank, in one order, but the options "
                f"of group {i} differ between stages: make all groups on every rank, an empty one where a rank has "
                "none of its parameters"
            )
    for other in optimizers:
        if not _same(other["of_none"], optimizers[0]["of_none"]):
            raise ValueError(
                f"to_save[{key!r}] should have the same on every rank in its state of no parameter, but has "
                f"{decoded(optimizers[0]['of_none'])} and {decoded(other['of_none'])}"
            )
    groups = [
        {
            "names": _without_duplicates(group["names"] for group in of_ranks),
            "options": next((group for group in of_ranks if group["names"]), of_ranks[0])["options"],
        }
        for of_ranks in zip(*(optimizer["groups"] for optimizer in optimizers), strict=True)
    ]
    states = {name: state for optimizer in optimizers for name, state in optimizer["states"].items()}
    return {**optimizers[0], "groups": groups, "states": states}


def _merge_objects(states: list[Any]) -> dict[str, Any]:
    return {"all": states[0]} if all(_same(state, states[0]) for state in states) else {"by_rank": states}


def _same(one: Any, other: Any) -> bool:
    """Whether two states are the same; a NaN is that of another rank."""
    return one == other or json.dumps(one) == json.dumps(other)


def _without_duplicates(lists: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(lists)))
