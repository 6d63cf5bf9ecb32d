"""What goes into a checkpoint: objects as tensors and JSON, and back, on this mesh or another one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from ignite.engine import Engine
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ignite_ddl.checkpoint.form import RANDOM
from ignite_ddl.checkpoint.gradients import GRADIENTS, load_gradients, match_gradients, take_gradients
from ignite_ddl.checkpoint.resume import Resume, load_engine, load_loader, resumed_engine, take_runs
from ignite_ddl.checkpoint.storage import Folder, agree
from ignite_ddl.checkpoint.values import decoded, encoded
from ignite_ddl.data import ShardedDataLoader
from ignite_ddl.data_parallel import share_buffers
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.replicas import check_replicas
from ignite_ddl.state import AS_MADE, Shard, local_state, set_extra_state, shard_of
from ignite_ddl.tensor.random import draw_seed, random_states, set_random_states

__all__ = ["Taken", "load", "merged", "take"]

RUNS = "runs of engines"
BESIDE = {RANDOM, RUNS, GRADIENTS}


class Taken:
    """What this rank gives to a checkpoint.

    Attributes:
        shards: its parts of tensors, by name.
        own: what rank 0 has to know: all the rest, ready for JSON.
    """

    def __init__(self, shards: dict[str, Shard], own: dict[str, Any]) -> None:
        self.shards, self.own = shards, own

    def copy(self) -> Taken:
        """The same, in memory that training does not change."""
        return Taken({name: shard.copy() for name, shard in self.shards.items()}, self.own)


# ----------------------------------------------------------------------------------------------- saving


def take(objects: Mapping[str, Any]) -> Taken:
    """Reads the state of this rank's objects; every rank calls it. Nothing is copied or written yet.

    Args:
        objects: models, optimizers, and whatever has a ``state_dict()`` of numbers, strings, small tensors and
            containers of them, by name.

    Returns:
        Taken: this rank's part.

    Raises:
        ValueError: if an optimizer holds a parameter of no model, or a state cannot be written as JSON.
    """
    shards: dict[str, Shard] = {}
    own: dict[str, Any] = {"models": {}, "optimizers": {}, "objects": {}}
    own["loaders"] = [key for key, thing in objects.items() if isinstance(thing, ShardedDataLoader)]
    names: dict[int, str] = {}  # of parameters, by id
    models = {key: thing for key, thing in objects.items() if isinstance(thing, nn.Module)}
    for model in models.values():  # DDP did so before the last forward pass, and that one changed them
        for stage in stages_of(model).local_stages():
            share_buffers(stage, get_mesh())
    for model in models.values():
        check_replicas(model)
    for key, model in models.items():
        tensors, saved_as, extra = local_state(model)
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), f"{key}.{saved_as[name]}")
            shards.setdefault(f"{key}.{saved_as[name]}", shard_of(tensor))
        own["models"][key] = {
            "names": list(tensors),
            "saved_as": {name: first for name, first in saved_as.items() if name != first},
            "extra": {name: encoded(value, f"{key}.{name}") for name, value in extra.items()},
        }
    runs = take_runs(objects)
    for key, thing in objects.items():
        if isinstance(thing, torch.optim.Optimizer):
            own["optimizers"][key] = _take_optimizer(key, thing, names, shards)
        elif isinstance(thing, ShardedDataLoader):
            places = [run["positions"][key] for run in runs.values() if key in run["positions"]]
            own["objects"][key] = encoded(places[0] if places else thing.state_dict(), key)
        elif not isinstance(thing, nn.Module):
            own["objects"][key] = encoded(thing.state_dict(), key)
    own["objects"] |= {RANDOM: encoded(random_states(), RANDOM), RUNS: encoded(runs, RUNS)}
    gradients = take_gradients(objects, shards, get_mesh())
    if gradients:
        own["objects"][GRADIENTS] = encoded(gradients, GRADIENTS)
    return Taken(shards, own)


def _take_optimizer(
    key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], shards: dict[str, Shard]
) -> dict[str, Any]:
    groups, states = [], {}
    for group in optimizer.param_groups:
        of_group = []
        for parameter in group["params"]:
            if id(parameter) not in names:
                if parameter.numel():  # a stage without weights has an empty one
                    raise ValueError(
                        f"to_save[{key!r}] holds a parameter of shape {tuple(parameter.shape)} of no model in to_save: "
                        "add its model to to_save"
                    )
                continue
            name = names[id(parameter)]
            of_group.append(name)
            states[name] = {"tensors": [], "values": {}}
            for part, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    _check_layout(key, name, part, value, parameter)
                    states[name]["tensors"].append(part)
                    shards.setdefault(f"{key}.{name}.{part}", shard_of(value, parameter))
                else:
                    states[name]["values"][part] = encoded(value, f"{key}: {part} of {name}")
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({"names": of_group, "options": encoded(options, key)})
    return {"groups": groups, "states": states}


def _check_layout(key: str, name: str, part: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.shape != parameter.shape:
        raise ValueError(
            f"to_save[{key!r}] keeps {part!r} of {name!r} as a plain tensor of shape {tuple(value.shape)}, though the "
            f"parameter is cut: which part of it that is cannot be known. Take an optimizer that keeps DTensors, as "
            "torch's own do"
        )


def merged(parts: list[dict[str, Any]], mesh: Mesh) -> dict[str, Any]:
    """What all ranks have taken, as one: what ``state.json`` holds.

    Args:
        parts: ``Taken.own`` of each rank.
        mesh: the mesh.

    Raises:
        ValueError: if ranks have parameter groups of different numbers.
    """
    first = parts[0]
    models = {
        key: {
            "names": list(dict.fromkeys(name for part in parts for name in part["models"][key]["names"])),
            "saved_as": {k: v for part in parts for k, v in part["models"][key]["saved_as"].items()},
            "extra": {k: v for part in parts for k, v in part["models"][key]["extra"].items()},
        }
        for key in first["models"]
    }
    optimizers = {}
    for key in first["optimizers"]:
        counts = [len(part["optimizers"][key]["groups"]) for part in parts]
        if len(set(counts)) > 1:
            raise ValueError(
                f"to_save[{key!r}] should have the same parameter groups on every rank, in one order, but has "
                f"{counts} of them: give a rank without such parameters an empty group"
            )
        groups = []
        for number, group in enumerate(first["optimizers"][key]["groups"]):
            of_ranks = [name for part in parts for name in part["optimizers"][key]["groups"][number]["names"]]
            groups.append({"names": list(dict.fromkeys(of_ranks)), "options": group["options"]})
        states = {name: state for part in parts for name, state in part["optimizers"][key]["states"].items()}
        optimizers[key] = {"groups": groups, "states": states}
    objects = {}
    for key in first["objects"]:
        states = [part["objects"][key] for part in parts]
        same = all(state == states[0] for state in states)
        objects[key] = {"all": states[0]} if same else {"by_rank": states}
    return {
        "mesh": dict(mesh.sizes),
        "models": models,
        "optimizers": optimizers,
        "objects": objects,
        "loaders": first["loaders"],
    }


# ---------------------------------------------------------------------------------------------- loading


def load(folder: Folder, objects: Mapping[str, Any], strict: bool = True) -> None:
    """Loads objects from a checkpoint; every rank calls it. Nothing is changed before all of it is checked.

    Args:
        folder: the checkpoint.
        objects: as in :func:`take`, some or all of those that were saved, by the same names.
        strict: whether models have to have all names of the checkpoint and no others. Default: True.

    Raises:
        ValueError: if names, shapes, dtypes or parameter groups differ.
        DamagedCheckpoint: if what is needed is not what was written.
    """
    mesh = get_mesh()
    targets: dict[str, tuple[str, Shard]] = {}
    found: dict[str, Any] = {}
    names: dict[int, str] = {}
    error: Exception | None = None
    engines = {key: thing for key, thing in objects.items() if isinstance(thing, Engine)}
    waiting, layouts = {}, {}
    try:
        _check_names(folder, objects)
        running = next((key for key, engine in engines.items() if engine._dataloader_iter is not None), None)
        if running is not None:
            raise ValueError(f"to_load[{running!r}] is running: load it before the run, or leave it out of to_load")
        if engines and GRADIENTS in folder.content["objects"]:
            layouts, _ = _state_for(folder, GRADIENTS, mesh, True)
            waiting = match_gradients(folder, objects, layouts, mesh, targets)
        for key, thing in objects.items():
            if isinstance(thing, nn.Module):
                found[key] = _match_model(folder, key, thing, targets, names)
        new_states = {
            key: _match_optimizer(folder, key, thing, names, targets)
            for key, thing in objects.items()
            if isinstance(thing, torch.optim.Optimizer)
        }
        found |= {key: {"names": held, "missing": []} for key, (held, _, _) in new_states.items()}
    except Exception as raised:
        error = raised
    of_ranks = agree(error, value=found)
    try:
        _check_the_rest(folder, of_ranks, strict)
        folder.check(targets)
    except Exception as raised:
        error = raised
    agree(error)
    folder.read(targets)
    for key, of_model in folder.content["models"].items():
        for name in set(found.get(key, {}).get("extra", ())) & set(of_model["extra"]):
            set_extra_state(objects[key], name, decoded(of_model["extra"][name]))
    for key, (_, groups, states) in new_states.items():
        optimizer = objects[key]
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
                if states.get(id(parameter)):
                    optimizer.state[parameter] = states[id(parameter)]
    saved = _state_for(folder, RUNS, mesh, True)[0] if RUNS in folder.content["objects"] else {}
    again = [functools.partial(_set_random_states, folder, mesh)]
    for key, (_, groups, _) in new_states.items():
        pairs = zip(objects[key].param_groups, groups, strict=True)
        again += [functools.partial(group.update, new) for group, new in pairs]
    runs: dict[str, dict[str, Any]] = {}
    for key, thing in objects.items():
        if isinstance(thing, ShardedDataLoader):
            load_loader(key, thing, *_state_for(folder, key, mesh, True), engines, saved)
        elif isinstance(thing, Engine):
            runs[key] = load_engine(thing, _state_for(folder, key, mesh, False)[0], saved.get(key))
        elif not isinstance(thing, nn.Module | torch.optim.Optimizer):
            again.append(functools.partial(_load_object, folder, mesh, key, thing))
            again[-1]()
    resumed = resumed_engine(objects, saved)
    for key, engine in engines.items():
        if key == resumed or not engine._is_done(engine.state):
            loader, models = objects.get(runs[key].get("reads")), [objects[name] for name in waiting]
            Resume(engine, runs[key], loader, *((again, models) if key == resumed else ([], [])))
            for name, window in runs[key].get("windows", {}).items():
                if id(objects.get(name)) in getattr(engine, "steps", {}):
                    engine.steps[id(objects[name])].expected, engine.steps[id(objects[name])].counted = window
    if engines:
        again[0]()
        for key, model in objects.items():
            if isinstance(model, nn.Module):
                load_gradients(model, waiting.get(key, {}), layouts.get(key, {}))


def _load_object(folder: Folder, mesh: Mesh, key: str, thing: Any) -> None:
    thing.load_state_dict(_state_for(folder, key, mesh, False)[0])


def _set_random_states(folder: Folder, mesh: Mesh) -> None:
    state, moved = _state_for(folder, RANDOM, mesh, True)
    set_random_states(state)
    if moved:
        torch.manual_seed(draw_seed() + mesh.dp_rank)


def _check_names(folder: Folder, objects: Mapping[str, Any]) -> None:
    content = folder.content
    known = {
        nn.Module: content["models"],
        torch.optim.Optimizer: content["optimizers"],
        object: {k: v for k, v in content["objects"].items() if k not in BESIDE},
    }
    for key, thing in objects.items():
        kind = next(kind for kind in known if isinstance(thing, kind))
        if key not in known[kind]:
            there = ", ".join(repr(name) for names in known.values() for name in names)
            raise ValueError(
                f"to_load[{key!r}] is a {type(thing).__name__}, but {folder.path} has no such thing of that name; it "
                f"has {there}"
            )
    has = {kind: any(isinstance(thing, kind) for thing in objects.values()) for kind in (Engine, ShardedDataLoader)}
    loaders = content["loaders"]
    if has[Engine] and loaders and not has[ShardedDataLoader]:
        raise ValueError(
            f"to_load should have the loader, too, as {loaders[0]!r}: without it a resumed trainer reads other rows"
        )


def _match_model(
    folder: Folder, key: str, model: nn.Module, targets: dict[str, tuple[str, Shard]], names: dict[int, str]
) -> dict[str, Any]:
    """Adds what this rank reads of a model to ``targets``, and the names of its tensors to ``names``."""
    tensors, _, extra = local_state(model)
    vars(model).pop(AS_MADE, None)
    of_model = folder.content["models"][key]
    apart: dict[int, str] = {}
    missing = []
    for name, tensor in tensors.items():
        saved = f"{key}.{of_model['saved_as'].get(name, name)}"
        if saved not in folder.tensors:
            missing.append(name)
            continue
        if apart.setdefault(id(tensor), saved) != saved:
            raise ValueError(
                f"to_load[{key!r}] ties {name!r} to another weight, but {folder.path} has two weights there: untie "
                "them, or load with a model that does not tie them"
            )
        if id(tensor) in names:
            continue
        _check_tensor(folder, saved, key, name, tensor)
        names[id(tensor)] = saved
        targets[f"{key}.{name}"] = (saved, shard_of(tensor))
    return {"names": list(tensors), "missing": missing, "extra": list(extra)}


def _check_tensor(folder: Folder, saved: str, key: str, name: str, tensor: torch.Tensor) -> None:
    there = folder.tensors[saved]
    for what, given, expected in (
        ("shape", tuple(there.size), tuple(tensor.shape)),
        ("dtype", there.properties.dtype, tensor.dtype),
    ):
        if given != expected:
            raise ValueError(
                f"to_load[{key!r}]: {name!r} has the {what} {expected}, but in {folder.path} it has {given}"
            )


def _check_the_rest(folder: Folder, of_ranks: list[dict[str, Any]], strict: bool) -> None:
    """Raises where a model or an optimizer of all ranks has other names than the checkpoint."""
    for key in of_ranks[0] if strict else ():
        has = {name for of_rank in of_ranks for name in of_rank[key]["names"]}
        lacks = sorted({name for of_rank in of_ranks for name in of_rank[key]["missing"]})
        if key in folder.content["models"]:
            saved = set(folder.content["models"][key]["names"])
        else:
            saved = {name for group in folder.content["optimizers"][key]["groups"] for name in group["names"]}
        besides = sorted(saved - has)
        if lacks or besides:
            raise ValueError(
                f"{folder.path} should have the names of to_load[{key!r}], but lacks {_few(lacks)} and has "
                f"{_few(besides)} besides; strict=False loads what both have"
            )


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"


def _match_optimizer(
    folder: Folder,
    key: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    targets: dict[str, tuple[str, Shard]],
) -> tuple[list[str], list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Names of its parameters, options of each group, and new states that :meth:`Folder.read` is going to fill."""
    of_optimizer = folder.content["optimizers"][key]
    saved_groups, saved_states = of_optimizer["groups"], of_optimizer["states"]
    if len(saved_groups) != len(optimizer.param_groups):
        raise ValueError(
            f"to_load[{key!r}] should have {len(saved_groups)} parameter groups, as in {folder.path}, but has "
            f"{len(optimizer.param_groups)}"
        )
    states: dict[int, dict[str, Any]] = {}
    held = []
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        options = decoded(saved["options"])
        for parameter in group["params"]:
            if id(parameter) not in names:
                if parameter.numel():
                    raise ValueError(
                        f"to_load[{key!r}] holds a parameter of shape {tuple(parameter.shape)} of no model in to_load: "
                        "load the optimizer together with its model"
                    )
                continue
            name = names[id(parameter)]
            if name not in saved["names"]:
                raise ValueError(
                    f"to_load[{key!r}] has {name!r} in parameter group {number}, but in {folder.path} that group has "
                    f"{_few(saved['names'])}"
                )
            held.append(name)
            new = {part: decoded(value) for part, value in saved_states[name]["values"].items()}
            if isinstance(new.get("step"), torch.Tensor) and (options.get("capturable") or options.get("fused")):
                new["step"] = new["step"].to(parameter.device)  # as torch's load_state_dict does
            for part in saved_states[name]["tensors"]:
                at = f"{key}.{name}.{part}"
                new[part] = _empty(parameter, folder.tensors[at])
                targets[f"{at}.{id(parameter)}"] = (at, shard_of(new[part], parameter))
            states[id(parameter)] = new
    return held, [decoded(saved["options"]) for saved in saved_groups], states


def _empty(parameter: torch.Tensor, saved: Any) -> torch.Tensor:
    """For a state of a parameter: cut as the parameter is, if it has the parameter's shape."""
    size, dtype = tuple(saved.size), saved.properties.dtype
    if size == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if not isinstance(parameter, DTensor):
        return torch.empty(size, dtype=dtype, device=parameter.device)
    local = torch.empty(size, dtype=dtype, device=parameter.to_local().device)
    mesh = parameter.device_mesh
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _state_for(folder: Folder, key: str, mesh: Mesh, on_any_mesh: bool) -> tuple[Any, bool]:
    """An object's state on this rank, and whether it is that of another dp rank."""
    state = folder.content["objects"][key]
    if "all" in state:
        return decoded(state["all"]), False
    was = Mesh(folder.content["mesh"], 0, None, {})
    if was.sizes == mesh.sizes:
        return decoded(state["by_rank"][mesh.rank]), False
    if not on_any_mesh:
        raise ValueError(
            f"to_load[{key!r}] had another state on each rank of {was.sizes}, so that it cannot be loaded on {mesh}: "
            "leave it out of to_load"
        )
    replica = mesh.dp_rank % was.dp_size
    return decoded(state["by_rank"][was.rank_at(dp=replica)]), mesh.dp_rank >= was.dp_size
