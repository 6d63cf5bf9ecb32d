"""Checks that ``ddl.auto_model`` adds to a model, so that nothing trains wrongly without an error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import ignite.distributed as idist
import torch
from ignite.handlers.base_logger import BaseWeightsHandler
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ignite_ddl.compat import PART_OF_A_MODEL, called_by_ignites_checkpoint, guard_clipping
from ignite_ddl.mesh import get_mesh

__all__ = [
    "advice_of",
    "check_handler",
    "check_layers",
    "check_optimizer",
    "check_parameter_hooks",
    "explain_errors",
    "hand_on_attributes",
    "refuse_copies",
    "refuse_ignites_checkpoint",
    "refuse_second_derivatives",
]

THIS_WAS_IN = "This was in "
_REPLACED = "_replaced_by_auto_model"  # on a parameter that another has replaced: its name


# ------------------------------------------------------------------------------------------- parameters


def check_parameter_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters with hooks, which would see a rank's own gradient, or be lost if the parameter is cut."""
    for name, parameter in parameters:
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name!r} has a hook, which would get this rank's gradient instead of the average over ranks, or not "
                "run on shards: change p.grad between ddl.forward_backward and the optimizer's step, or in "
                "optimizer.register_step_pre_hook"
            )


def check_layers(model: nn.Module, rows_are_shared: bool) -> None:
    """Refuses layers of torch that compute something else, or nothing, on ranks that share the rows of a batch."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and idist.device().type == "cpu":
            raise ValueError(
                f"{name!r} is an nn.SyncBatchNorm, which torch runs on GPUs only: use nn.BatchNorm, or GroupNorm"
            )
        if rows_are_shared and getattr(module, "scale_grad_by_freq", False):
            raise ValueError(
                f"{name!r} has scale_grad_by_freq=True, which divides gradients by how often a word is in the batch; "
                "each rank or microbatch counts its own rows only: leave it out"
            )


def hand_on_attributes(before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Copies attributes of replaced parameters to their replacements, and marks the replaced ones.

    Args:
        before: the parameters of the whole model before it was cut, by name.
        model: the cut model.
    """
    after = dict(model.named_parameters(remove_duplicate=False))
    mesh = get_mesh()
    if mesh.tp_size * mesh.pp_size > 1:
        guard_clipping()
        for parameter in after.values():
            setattr(parameter, PART_OF_A_MODEL, True)
    still = {id(parameter) for parameter in after.values()}
    replaced = {name: old for name, old in before.items() if id(old) not in still}
    for name, old in replaced.items():
        if name in after:
            for attribute, value in vars(old).items():
                if not hasattr(after[name], attribute):
                    setattr(after[name], attribute, value)
    for name, old in replaced.items():  # in a second loop: a tied weight has two names
        setattr(old, _REPLACED, name)


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> None:
    """Refuses an optimizer that has replaced parameters, or none of the model's parameters.

    Raises:
        ValueError: if so, with the name of such a parameter.
    """
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [getattr(p, _REPLACED) for p in stepped if hasattr(p, _REPLACED)]
    trained = {id(p) for p in model.parameters() if p.requires_grad} if model is not None else set()
    if stale or (trained and trained.isdisjoint(id(p) for p in stepped)):
        what = f"{stale[0]!r} as it was before ddl.auto_model cut it" if stale else "none of them"
        raise ValueError(
            f"optimizer should hold parameters of the model, but holds {what}: make it after ddl.auto_model, of the "
            "returned model's parameters"
        )


# ------------------------------------------------------------------------------------------- the cut model


def refuse_ignites_checkpoint(thing: nn.Module | torch.optim.Optimizer) -> None:
    """Ignite's Checkpoint would save this rank's shard and load it into every rank."""

    def refuse(*_: Any) -> None:
        if called_by_ignites_checkpoint():
            raise ValueError(
                "Ignite's Checkpoint saves rank 0's part of a model that is cut over ranks: take ddl.Checkpoint, which "
                "has the same arguments; or save ddl.full_state_dict(model), gathered on every rank"
            )

    thing.register_state_dict_pre_hook(refuse)
    thing.register_load_state_dict_pre_hook(refuse)


def refuse_copies(module: nn.Module) -> None:
    """torch's FSDP2 cannot be copied, as Ignite's EMAHandler does."""

    def refuse(*_: Any) -> None:
        raise ValueError(
            "a model that torch shards or replicates over dp cannot be copied. For a moving average, copy the model "
            "before ddl.auto_model, cut the copy in the same way, and update its parameters from the model's: "
            "for mean, p in zip(copied.parameters(), model.parameters()): mean.data.lerp_(p.data, momentum)"
        )

    for part in module.modules():
        if isinstance(part, FSDPModule):
            type(part).__deepcopy__ = refuse  # of a class that torch makes for FSDP2


def check_handler(handler: Any) -> None:
    """Refuses Ignite's loggers of weights and gradients on cut weights: they would log a rank's part as the whole.

    Raises:
        ValueError: if so.
    """
    if isinstance(handler, BaseWeightsHandler):
        cut = next((name for name, p in handler.weights if isinstance(p, DTensor)), None)
        if cut is not None:
            raise ValueError(
                f"{type(handler).__name__} would log this rank's part of {cut!r}, which is cut over ranks: log what "
                "ddl.full_state_dict(model, on_rank=0) gives, called on every rank, or engine.state.grad_norm, the "
                "norm of all gradients, which max_norm of ddl.create_supervised_trainer computes"
            )


def refuse_second_derivatives(module: nn.Module, name: str) -> None:
    """Refuses create_graph=True through a cut module: DTensor and FSDP2 lose second derivatives."""

    def check(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # in a backward pass: with create_graph=True
            raise ValueError(
                f"second derivatives (create_graph=True) are not supported through {name!r}, which is cut over ranks: "
                "leave modules with a gradient penalty out of tensor_plan, and do not use shard=True"
            )

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        leaves = (output,) if isinstance(output, torch.Tensor) else tree_leaves(output)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(check)

    module.register_forward_hook(watch)


def explain_errors(module: nn.Module, advice: str) -> None:
    """Adds a note to exceptions of the module's call, such as torch's errors about shapes and DTensors."""

    def explain(*_: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and advice not in advice_of(error):
            error.add_note(advice)

    module.register_forward_hook(explain, always_call=True)


def advice_of(error: BaseException) -> list[str]:
    """The lines that :func:`explain_errors` added."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith(THIS_WAS_IN)]
