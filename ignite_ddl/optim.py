"""Optimizers of a cut model: those that step its parts as they would step the full model; others are refused."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ignite_ddl.arguments import first_line
from ignite_ddl.checks.guards import LocalStateDict, refuse_full_states, refuse_ignites_checkpoint
from ignite_ddl.collectives import gathered_values, on_any_rank
from ignite_ddl.compat import quiet_redistribution
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.parts import is_part
from ignite_ddl.pipeline.pipeline import SHARED
from ignite_ddl.structure import local_tensor
from ignite_ddl.tensor.random import random_states, set_random_states

_ADAPTED = "_adapted_to_the_mesh"  # on an optimizer
_N_STEPS = 3  # steps
_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # right on every mesh; to try them out takes 30 ms


def adapt_optimizer(optimizer: torch.optim.Optimizer, checks: bool = True) -> None:
    """Makes an optimizer step what this rank holds of a model, or refuses it; every rank calls it.

    Args:
        optimizer: of the parameters of a model from ``ddl.auto_model``.
        checks: as in ``ddl.auto_optim``. Default: True.

    Raises:
        ValueError: if it would step parts of a model differently from the full one, or stages that share a weight
            would step it differently.
    """
    mesh = get_mesh()
    if mesh.world_size == 1 or hasattr(optimizer, _ADAPTED) or not isinstance(optimizer, torch.optim.Optimizer):
        return
    wrapped = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    takes_hooks = hasattr(optimizer, "_optimizer_state_dict_pre_hooks")
    if wrapped and not takes_hooks:  # without Optimizer.__init__, as many a Lookahead
        for each in wrapped:
            adapt_optimizer(each, checks)
        return
    setattr(optimizer, _ADAPTED, _options(optimizer))  # at the beginning
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    dtensors = any(isinstance(p, DTensor) for p in parameters)
    if not takes_hooks and (dtensors or mesh.pp_size > 1):
        raise ValueError(
            f"a {type(optimizer).__name__} should call torch.optim.Optimizer.__init__(self, params, defaults), or hold "
            "in an attribute the optimizer that it wraps, but does neither"
        )
    if mesh.pp_size > 1:
        if not on_any_rank(bool(parameters), mesh.pp_group):
            raise ValueError(
                "optimizer should hold parameters of the model, but holds none on any stage: choose some of "
                "model.named_parameters(), whose names are those of the uncut model"
            )
        optimizer.register_state_dict_post_hook(lambda _, state: LocalStateDict(state))
    if dtensors or mesh.pp_size > 1:
        refuse_ignites_checkpoint(optimizer)
        refuse_full_states(optimizer)
    if checks and type(optimizer) not in _KNOWN and (mesh.pp_size > 1 or any(map(is_part, parameters))):
        _check_on_small_weights(optimizer, mesh)
    if checks and mesh.pp_size > 1:
        _check_shared(optimizer, mesh)


def check_same_options(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises a ValueError if an option of an optimizer differs between ranks, such as a rate that a scheduler of rank 0
    alone has changed; every rank calls it.

    Stages of a pipeline may have different options: groups are compared if they were the same at the beginning, and
    unlike all others of the optimizer, such as one for each weight, whose numbers are other weights on each stage.
    """
    mesh = get_mesh()
    adapted = [each for each in optimizers if hasattr(each, _ADAPTED)]
    peers = gathered_values([(getattr(each, _ADAPTED), _options(each)) for each in adapted])
    for rank, peer in enumerate(peers):
        same_stage = mesh.coordinates(rank)["pp"] == mesh.pp_rank
        for (at_first, mine), (others_at_first, others) in zip(peers[mesh.rank], peer, strict=False):
            for number, (one, other) in enumerate(zip(mine, others, strict=False)):
                name = next((name for name in one if not _same(one[name], other.get(name, one[name]))), None)
                is_alone = at_first.count(next(iter(at_first[number:]), None)) == 1
                if name is not None and (same_stage or is_alone and _same(at_first, others_at_first)):
                    raise ValueError(
                        f"the optimizer should have the same options on all ranks, but {name!r} of parameter group "
                        f"{number} is {one[name]} on rank {mesh.rank} and {other[name]} on rank {rank}: change it, as "
                        "a scheduler does, on every rank"
                    )


def _same(one: Any, other: Any) -> bool:
    return one == other or repr(one) == repr(other)  # of NaN


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group that are numbers, words or tuples of them."""
    groups = [dict(sorted(group.items())) for group in optimizer.param_groups]
    as_numbers = [{k: v.item() if getattr(v, "ndim", None) == 0 else v for k, v in group.items()} for group in groups]
    return [{k: v for k, v in group.items() if isinstance(v, int | float | str | tuple)} for group in as_numbers]


# ------------------------------------------------------------------------- small weights, cut and full


def _check_on_small_weights(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Steps small weights that are cut as the model's are, and the same weights full, and compares.

    Under pp there is a second set of them, as of another stage, that the first has to be independent of.
    """
    name = type(optimizer).__name__
    given: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
    for group in optimizer.param_groups:
        given.append((group, list({_kind(p): p for p in group["params"]}.values())))
    if not any(params for _, params in given):
        return
    other = "take an optimizer that steps each number by itself, such as SGD or AdamW (foreach or fused, too)"
    drawn = random_states()  # an optimizer may draw, as for noise: the model's stream stays as it is
    try:
        full = _small_steps(optimizer, given, mesh, stages=min(mesh.pp_size, 2), cut=False)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be tried out on small weights ({first_line(error)}), so that it is not known whether it "
            "does the same to parts of a model as to the full model: pass checks=False to ddl.auto_optim if it steps "
            f"each number by itself, or {other}"
        ) from error
    finally:
        set_random_states(drawn)
    try:
        with quiet_redistribution():
            parts = _small_steps(optimizer, given, mesh, stages=1, cut=True)
    except Exception as error:
        raise ValueError(
            f"{name} cannot step weights that are cut over ranks ({first_line(error)}): {other}, with fused=False if "
            "this is about a fused operator; or leave weights uncut, by dp without shard=True"
        ) from error
    finally:
        set_random_states(drawn)
    for before, part, right in zip(_values(given, mesh), parts, full, strict=False):
        size = float((right - before).abs().max())
        differences = local_tensor(part) - local_tensor(_cut_like(right, part))
        difference = float(differences.abs().amax()) if differences.numel() else 0.0
        # Muon computes in bfloat16: its parts differ by rounding, which is far from what wrong norms make.
        if not difference < 0.05 * size:  # a size of 0 shows nothing
            raise ValueError(
                f"{name} should do the same to a weight that is cut over ranks, or to a stage of a pipeline, as to the "
                "full model, but does not: it seems to compute norms or the like of what a rank holds. Use another "
                f"mesh (dp without shard=True), or {other}"
            )


def _small_steps(
    optimizer: torch.optim.Optimizer, given: Sequence[tuple[dict, list]], mesh: Mesh, stages: int, cut: bool
) -> list[torch.Tensor]:
    """The small weights after a few steps of an optimizer of the same class and options."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    options = {k: v for k, v in optimizer.defaults.items() if k in accepted or takes_any}
    originals = [p for _, params in given for p in params]  # the model's weights, each in place of a small one
    weights = [
        nn.Parameter(_cut_like(value, p) if cut else value)
        for value, p in zip(_values(given, mesh, stages), originals * stages, strict=True)
    ]
    left, groups = iter(range(len(originals))), []
    for group, params in given:
        places = [next(left) for _ in params]
        of_group = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        if isinstance(of_group.get("lr"), int | float):
            of_group["lr"] = of_group["lr"] or 1e-2  # a warm-up's first one would say nothing
        chosen = [weights[place + stage * len(originals)] for stage in range(stages) for place in places]
        if chosen:
            groups.append(copy.deepcopy(of_group) | {"params": chosen})
    twin = type(optimizer)(groups, **copy.deepcopy(options))
    seeds = itertools.count(1)

    def closure() -> torch.Tensor:
        seed = next(seeds)
        with torch.no_grad():
            for p, value in zip(weights, _values(given, mesh, stages, seed), strict=True):
                p.grad = _cut_like(value, p)
        return torch.tensor(1.0 / seed)

    for _ in range(_N_STEPS):
        closure()  # not every step calls it
        twin.step(*([closure] if "closure" in inspect.signature(twin.step).parameters else []))
    return [p.detach() for p in weights]


def _values(given: Sequence[tuple[dict, list]], mesh: Mesh, stages: int = 1, seed: int = 0) -> list[torch.Tensor]:
    """Values of a small weight for each of the model's; the parts of its ranks differ from each other."""
    found = []
    ranks = mesh.dp_cp_size * mesh.tp_size
    draw = torch.Generator().manual_seed(seed)
    for _ in range(stages):
        for _, params in given:
            for p in params:
                shape = [2 * ranks + _is_uneven(p) if d < 2 else 3 for d in range(p.ndim)]
                value = torch.randn(shape, generator=draw, dtype=torch.float64)
                for d in range(min(p.ndim, 2)):
                    sizes = torch.linspace(1, 4, shape[d], dtype=torch.float64)
                    value *= sizes.view([-1 if d == at else 1 for at in range(p.ndim)])
                found.append(value.to(p.device))
    return found


def _cut_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor cut as a parameter is, without communication."""
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _kind(parameter: torch.Tensor) -> Any:
    if isinstance(parameter, DTensor):
        return parameter.ndim, parameter.device_mesh, parameter.placements, _is_uneven(parameter)
    return parameter.ndim


def _is_uneven(parameter: torch.Tensor) -> bool:
    """Whether ranks hold parts of unlike sizes, on which some operations fail."""
    if not isinstance(parameter, DTensor):
        return False
    cuts = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return any(type(cut) is Shard and parameter.shape[cut.dim] % size > 0 for cut, size in cuts)


# ------------------------------------------------------------------------- one weight on several stages


def _check_shared(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Refuses an optimizer in which stages step a weight that they share by other options."""
    shared = [
        (*getattr(p, SHARED), repr(options))
        for group, options in zip(optimizer.param_groups, _options(optimizer), strict=True)
        for p in group["params"]
        if hasattr(p, SHARED) and p.requires_grad
    ]
    of_ranks = gathered_values(shared, mesh.pp_group)
    for name, ranks in dict.fromkeys((name, ranks) for of_rank in of_ranks for name, ranks, _ in of_rank):
        held = [(r, options) for r, of_rank in enumerate(of_ranks) for n, _, options in of_rank if n == name]
        if {r for r, _ in held} != ranks or len({options for _, options in held}) > 1:
            raise ValueError(
                f"optimizer steps {name!r} differently on the stages that hold it: it is one weight on several stages "
                "(tied), so its names should be in parameter groups of the same options (lr, weight_decay, …) on each, "
                "or on none"
            )
