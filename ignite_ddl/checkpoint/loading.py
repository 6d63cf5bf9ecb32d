"""Loading a checkpoint in three steps: plan what this rank reads, check it on all ranks, apply it.

Nothing is changed before all of it is checked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from ignite.metrics import Metric
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ignite_ddl.checkpoint.form import GRADIENTS, RANDOM, RESERVED, RUNS, LacksObject
from ignite_ddl.checkpoint.kinds import Kinds
from ignite_ddl.checkpoint.per_rank import apply_gradients, plan_gradients, plan_tensors
from ignite_ddl.checkpoint.resume import Resume, load_engine, load_loader, resumed_engine
from ignite_ddl.checkpoint.snapshot import groups_by_name
from ignite_ddl.checkpoint.storage import Folder, agree, attempt
from ignite_ddl.checkpoint.values import decoded, plain_state
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.state import Shard, call_load_hooks, cannot_load, local_state, set_extra_state, shard_of
from ignite_ddl.tensor.random import draw_seed, set_random_states


def load(folder: Folder, objects: Mapping[str, Any], strict: bool = True) -> None:
    """Loads objects from a checkpoint; every rank calls it.

    Args:
        folder: the checkpoint.
        objects: some or all of those that were saved, by the same names.
        strict: whether models have to have all names of the checkpoint and no others. Default: True.

    Raises:
        ValueError: if names, shapes, dtypes or parameter groups differ.
        DamagedCheckpoint: if what is needed is not what was written.
    """
    plan, error = attempt(make_plan, folder, objects)
    names = agree(error, value=plan and plan.names)
    _, error = attempt(check, plan, names, strict)
    agree(error)
    apply(plan)


@dataclass
class Plan:
    """What this rank loads.

    Attributes:
        folder: the checkpoint.
        kinds: the objects.
        mesh: the mesh.
        reads: any key to the name of a tensor in the checkpoint and the shard that is filled with it.
        names: of each model and optimizer this rank's names, and those that the checkpoint lacks.
        states: of each optimizer the new state of each parameter.
        gradients: of each model with an open window of gradient accumulation the gradients, by name.
        layouts: of these gradients.
        per_rank: states of objects that belong to a rank.
        refusal: what is wrong with an optimizer whose model has names that the checkpoint lacks.
        checked: what ``reads`` makes :meth:`Folder.read` do, once its digests have been compared.
    """

    folder: Folder
    kinds: Kinds
    mesh: Mesh
    reads: dict[str, tuple[str, Shard]] = field(default_factory=dict)
    names: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    states: dict[str, dict[torch.Tensor, dict[str, Any]]] = field(default_factory=dict)
    gradients: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    layouts: dict[str, Any] = field(default_factory=dict)
    checked: Any = None
    per_rank: dict[str, dict[str, Any]] = field(default_factory=dict)
    refusal: ValueError | None = None

    def state_of(self, key: str, on_any_mesh: bool = False) -> tuple[Any, bool]:
        """An object's state on this rank, and whether it is that of another dp rank."""
        state = self.folder.content["objects"][key]
        if "all" in state:
            return decoded(state["all"]), False
        saved_on = Mesh(self.folder.content["mesh"], 0, None, {})
        if saved_on.sizes == self.mesh.sizes:
            return decoded(state["by_rank"][self.mesh.rank]), False
        if not on_any_mesh:
            raise ValueError(
                f"to_load[{key!r}] had another state on each rank of {saved_on.sizes}, so that it cannot be loaded on "
                f"{self.mesh}: leave it out of to_load"
            )
        replica = self.mesh.dp_rank % saved_on.dp_size
        return decoded(state["by_rank"][saved_on.rank_at(dp=replica)]), self.mesh.dp_rank >= saved_on.dp_size


# ----------------------------------------------------------------------------------------------- 1. plan


def make_plan(folder: Folder, objects: Mapping[str, Any]) -> Plan:
    """What this rank reads, and into which tensors; nothing is read yet."""
    kinds = Kinds.of(objects)
    _check_kinds(folder, kinds)
    plan = Plan(folder, kinds, get_mesh())
    saved_as: dict[int, str] = {}  # of tensors, by id
    for key, model in kinds.models.items():
        plan.names[key] = _plan_model(plan, key, model, saved_as)
        for name, tensor in local_state(model)[0].items():  # those that the checkpoint lacks, too
            saved_as.setdefault(id(tensor), f"{key}.{name}")
    for key, optimizer in kinds.optimizers.items():
        plan.names[key], plan.states[key] = _plan_optimizer(plan, key, optimizer, saved_as)
    if kinds.engines and GRADIENTS in folder.content["objects"]:
        plan.layouts, _ = plan.state_of(GRADIENTS, on_any_mesh=True)
        plan.gradients = plan_gradients(folder, kinds.models, plan.layouts, plan.mesh, plan.reads)
    for key in kinds.engines | kinds.others:
        state, _ = plan.state_of(key)  # or raises, before anything is changed
        if isinstance(kinds.others.get(key), Metric):
            _check_metric(plan, key, state)
        if getattr(kinds.others.get(key), "is_per_rank", None) is True:  # a metric has any attribute
            _plan_per_rank(plan, key, state)
    return plan


def _check_metric(plan: Plan, key: str, state: dict[str, Any]) -> None:
    """Raises where a metric's state, which has one of each dp rank in a list, is that of other ranks."""
    of_ranks = next(iter(state.values()), None)
    if isinstance(of_ranks, list) and len(of_ranks) != plan.mesh.dp_cp_size:  # Ignite's, not one of the user's own
        raise ValueError(
            f"to_load[{key!r}] is a metric with the counts of {len(of_ranks)} dp ranks, so that it cannot be loaded on "
            f"{plan.mesh!r}: leave it out of to_load, and it starts from the beginning there"
        )


def _plan_per_rank(plan: Plan, key: str, state: dict[str, Any]) -> None:
    if plan.folder.content["mesh"] != plan.mesh.sizes:
        raise ValueError(
            f"to_load[{key!r}] belongs to the ranks of {plan.folder.content['mesh']}, so that it cannot be loaded on "
            f"{plan.mesh!r}: leave it out of to_load, and it starts from the beginning there"
        )
    if (misfit := plan.kinds.others[key]._misfit(state)) is not None:
        raise ValueError(
            f"to_load[{key!r}] {misfit}, so that it cannot be loaded: leave it out of to_load, and it starts from the "
            "beginning, or make it as it was"
        )
    tensors = plan_tensors(f"{key} of rank {plan.mesh.rank}", state["tensors"], plan.reads)
    plan.per_rank[key] = state | {"tensors": tensors}


def _check_kinds(folder: Folder, kinds: Kinds) -> None:
    content = folder.content
    others = {key: state for key, state in content["objects"].items() if key not in RESERVED}
    known = [key for saved in (content["models"], content["optimizers"], others) for key in saved]
    for given, saved in (
        (kinds.models, content["models"]),
        (kinds.optimizers, content["optimizers"]),
        (kinds.engines | kinds.loaders | kinds.others, others),
    ):
        for key, value in given.items():
            if key not in saved:
                raise LacksObject(
                    f"to_load[{key!r}] is a {type(value).__name__}, but {folder.path} has none of that name; it has "
                    f"{', '.join(map(repr, known))}: leave it out of to_load, or load another checkpoint"
                )
    if kinds.engines and content["loaders"] and not kinds.loaders:
        raise ValueError(
            f"to_load should have the loader, too, as {content['loaders'][0]!r}: without it a resumed trainer reads "
            "other rows"
        )
    for key, engine in kinds.engines.items():
        if engine._dataloader_iter is not None:
            raise ValueError(f"to_load[{key!r}] is running: load it before the run, or leave it out of to_load")


def _plan_model(plan: Plan, key: str, model: nn.Module, saved_as: dict[int, str]) -> tuple[list[str], list[str]]:
    """Adds what this rank reads of a model; returns its names, and those that the checkpoint lacks."""
    if refusal := cannot_load(model):
        raise ValueError(f"to_load[{key!r}] cannot be loaded: {refusal}")
    folder, tensors = plan.folder, local_state(model)[0]
    first_names = folder.content["models"][key]["saved_as"]
    of_model: dict[int, str] = {}
    missing = []
    for name, tensor in tensors.items():
        saved = f"{key}.{first_names.get(name, name)}"
        if saved not in folder.tensors:
            missing.append(name)
            continue
        if of_model.setdefault(id(tensor), saved) != saved:
            raise ValueError(
                f"to_load[{key!r}] ties {name!r} to another weight, but {folder.path} has two weights there: untie "
                "them, or load with a model that does not tie them"
            )
        if id(tensor) not in saved_as:
            _check_tensor(folder, saved, key, name, tensor)
            saved_as[id(tensor)] = saved
            plan.reads[f"{key}.{name}"] = (saved, shard_of(tensor))
    return list(tensors), missing


def _check_tensor(folder: Folder, saved: str, key: str, name: str, tensor: torch.Tensor) -> None:
    in_folder = folder.tensors[saved]
    for what, given, expected in (
        ("shape", tuple(in_folder.size), tuple(tensor.shape)),
        ("dtype", in_folder.properties.dtype, tensor.dtype),
    ):
        if given != expected:
            raise ValueError(
                f"to_load[{key!r}]: {name!r} has the {what} {expected}, but in {folder.path} it has {given}"
            )


def _plan_optimizer(
    plan: Plan, key: str, optimizer: torch.optim.Optimizer, saved_as: Mapping[int, str]
) -> tuple[tuple[list[str], list[str]], dict[torch.Tensor, dict[str, Any]]]:
    """Adds what this rank reads of an optimizer; returns its names, and the states that reading fills."""
    folder = plan.folder
    kind = folder.content["optimizers"][key].get("kind")  # not in checkpoints of earlier versions
    if kind is not None and kind not in [each.__name__ for each in type(optimizer).__mro__]:
        raise ValueError(
            f"to_load[{key!r}] is of the class {type(optimizer).__name__}, but in {folder.path} of {kind}, whose state "
            f"means something else: make it {kind}, or leave it out of to_load, and its state begins anew"
        )
    saved_groups = folder.content["optimizers"][key]["groups"]
    if len(saved_groups) != len(optimizer.param_groups):
        raise ValueError(
            f"to_load[{key!r}] should have {len(saved_groups)} parameter groups, as in {folder.path}, but has "
            f"{len(optimizer.param_groups)}"
        )
    states: dict[torch.Tensor, dict[str, Any]] = {}
    names: list[str] = []
    groups = groups_by_name("to_load", key, optimizer, saved_as, "load the optimizer together with its model")
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if unknown := next((name for name, _ in group if name not in saved["names"]), None):
            error = ValueError(
                f"to_load[{key!r}] has {unknown!r} in parameter group {number}, but in {folder.path} that group has "
                f"{_short(saved['names'])}: leave it out of to_load, and its state begins anew"
            )
            if not any(missing for _, missing in plan.names.values()):
                raise error
            plan.refusal = error  # after that about the names of the model, if these have to be the same
            return (names, []), {}
        options = decoded(saved["options"])
        on_device = options.get("capturable") or options.get("fused")
        for name, parameter in group:
            states[parameter] = _plan_state(plan, key, name, parameter, on_device)
            names.append(name)
    return (names, []), states


def _plan_state(plan: Plan, key: str, name: str, parameter: torch.Tensor, on_device: bool) -> dict[str, Any]:
    saved = plan.folder.content["optimizers"][key]["states"][name]
    state = {part: decoded(value) for part, value in saved["values"].items()}
    for part, value in state.items():
        if isinstance(value, torch.Tensor) and (on_device or part != "step"):
            state[part] = value.to(parameter.device)  # as torch's load_state_dict does
        of_cut_scalar = isinstance(parameter, DTensor) and not parameter.ndim and part not in _NUMBERS
        if of_cut_scalar and isinstance(value, torch.Tensor):
            state[part] = _replicated(state[part], parameter)
    for part in saved["tensors"]:
        in_folder = f"{key}.{name}.{part}"
        state[part] = _empty_state(parameter, plan.folder.tensors[in_folder])
        plan.reads[f"{in_folder}.{id(parameter)}"] = (in_folder, shard_of(state[part], parameter))
    return state


def _empty_state(parameter: torch.Tensor, saved: Any) -> torch.Tensor:
    """For a state of a parameter: cut as the parameter is, if it has the parameter's shape."""
    size, dtype = tuple(saved.size), saved.properties.dtype
    if size == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if not isinstance(parameter, DTensor):
        return torch.empty(size, dtype=dtype, device=parameter.device)
    return _replicated(torch.empty(size, dtype=dtype, device=parameter.to_local().device), parameter)


_NUMBERS = ("step", "mu", "eta", "mu_product")  # that torch's optimizers keep beside a state of a parameter's shape


def _replicated(local: torch.Tensor, parameter: DTensor) -> DTensor:
    return DTensor.from_local(local, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False)


# ---------------------------------------------------------------------------------------------- 2. check


def check(plan: Plan, of_ranks: list[dict[str, tuple[list[str], list[str]]]], strict: bool) -> None:
    """Raises where all ranks together have other names than the checkpoint, or bytes are not what was written."""
    for key in plan.names:
        names = {name for of_rank in of_ranks for name in of_rank[key][0]}
        missing = sorted({name for of_rank in of_ranks for name in of_rank[key][1]})
        unmatched = sorted(_saved_names(plan.folder, key) - names)
        cure = "strict=False loads what both have" if len(missing) < len(names) else "it has none of them"
        if (missing or unmatched) and (strict or len(missing) == len(names) > 0):
            raise ValueError(
                f"{plan.folder.path} should have the names of to_load[{key!r}], but lacks {_short(missing)} and has "
                f"{_short(unmatched)} besides; {cure}"
            )
    if plan.refusal is not None:
        raise plan.refusal
    plan.checked = plan.folder.check(plan.reads)


def _saved_names(folder: Folder, key: str) -> set[str]:
    if key in folder.content["models"]:
        return set(folder.content["models"][key]["names"])
    return {name for group in folder.content["optimizers"][key]["groups"] for name in group["names"]}


def _short(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more if names else "none"


# ---------------------------------------------------------------------------------------------- 3. apply


def apply(plan: Plan) -> None:
    """Reads the tensors and sets the states; what a run's first events may reset is set again after them."""
    _, error = attempt(plan.folder.read, plan.checked)
    agree(error)
    for key, model in plan.kinds.models.items():
        extra = plan.folder.content["models"][key]["extra"]
        for name in local_state(model)[2]:
            if name in extra:
                set_extra_state(model, name, decoded(extra[name]))
        call_load_hooks(model)
    for key, optimizer in plan.kinds.optimizers.items():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state.pop(parameter, None)
            if state := plan.states[key].get(parameter):
                optimizer.state[parameter] = state
        of_none = plan.folder.content["optimizers"][key].get("of_none", {"dict": []})  # not in earlier versions
        optimizer.state.update(decoded(of_none))
    _apply_runs(plan)
    _apply_resettable(plan)  # random states after all that may draw
    if plan.kinds.engines:
        for key, model in plan.kinds.models.items():
            apply_gradients(model, plan.gradients.get(key, {}), plan.layouts.get(key, {}))


def _apply_resettable(plan: Plan) -> None:
    """Sets what handlers of STARTED and EPOCH_STARTED may reset."""
    for key, optimizer in plan.kinds.optimizers.items():
        for group, saved in zip(optimizer.param_groups, plan.folder.content["optimizers"][key]["groups"], strict=True):
            options = decoded(saved["options"])
            rates = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
            on_device = {name: group[name].device for name in rates if isinstance(group.get(name), torch.Tensor)}
            group.update(options | {name: rates[name].to(device) for name, device in on_device.items()})
        optimizer.__setstate__({"param_groups": optimizer.param_groups})  # as torch does: of Adam's state AdamW's
        for hook in getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
            hook(optimizer)
    for key, other in plan.kinds.others.items():
        other.load_state_dict(plan.per_rank[key] if key in plan.per_rank else plan.state_of(key)[0])
    _apply_random(plan)


def _apply_random(plan: Plan) -> None:
    if plan.kinds.engines:
        state, of_another_rank = plan.state_of(RANDOM, on_any_mesh=True)
        set_random_states(state)
        same_mesh = plan.mesh.sizes == plan.folder.content["mesh"]
        if of_another_rank or (plan.mesh.cp_rank and not same_mesh):
            torch.manual_seed(draw_seed() + plan.mesh.dp_cp_rank)


def _capture_resettable(plan: Plan) -> Callable[[], None]:
    """What sets again what holds now: a script may have changed it since. Random states are those of the checkpoint."""
    groups = [group for optimizer in plan.kinds.optimizers.values() for group in optimizer.param_groups]
    options = [copy.deepcopy({name: value for name, value in group.items() if name != "params"}) for group in groups]
    others = list(plan.kinds.others.values())
    states = [copy.deepcopy(plain_state(other)) for other in others]

    def apply() -> None:
        for group, of_group in zip(groups, options, strict=True):
            group.update(of_group)
        for other, state in zip(others, states, strict=True):
            other.load_state_dict(state)
        _apply_random(plan)

    return apply


def _apply_runs(plan: Plan) -> None:
    """Puts loaders and engines where they were; the trainer goes on from there."""
    kinds, (runs, _) = plan.kinds, plan.state_of(RUNS, on_any_mesh=True)
    for key, loader in kinds.loaders.items():
        load_loader(key, loader, *plan.state_of(key, on_any_mesh=True), kinds.engines, runs)
    for key, engine in kinds.engines.items():
        load_engine(engine, plan.state_of(key)[0], runs[key], kinds.loaders.get(runs[key]["reads"]))
    trainer = resumed_engine(kinds.engines, runs)
    for key, engine in kinds.engines.items():
        loader = kinds.loaders.get(runs[key]["reads"])
        if key == trainer:
            accumulating = [kinds.models[name] for name in plan.gradients]
            Resume(engine, runs[key], loader, lambda: _capture_resettable(plan), accumulating)
        elif not engine._is_done(engine.state):
            Resume(engine, runs[key], loader)
        else:
            continue
        for name, (expected, counted) in runs[key]["windows"].items():
            if step := getattr(engine, "steps", {}).get(id(kinds.models.get(name))):
                step.expected, step.counted = expected, counted
