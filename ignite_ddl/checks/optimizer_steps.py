"""What an optimizer steps in an update function: gradients that are not those of all ranks' rows are refused."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ignite_ddl.checks.replicas import digest
from ignite_ddl.collectives import gathered_values
from ignite_ddl.compat import BELONGS_TO_A_MODEL, UNREDUCED, local_gradients, zero_unreduced_gradients
from ignite_ddl.data_parallel import LOCAL_ROUNDS
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.structure import local_tensor

_IN_A_WINDOW = (
    "the optimizer steps in the middle of a window, last=False of ddl.forward_backward or the trainer's "
    "gradient_accumulation_steps, or after a backward pass that has failed, whose gradients are not reduced over "
    "ranks: pass last=True before a step, give the trainer epochs of a multiple of gradient_accumulation_steps batches "
    "(epoch_length of its run), and call zero_grad after an error"
)
_is_watching = False


def watch_unreduced_gradients() -> None:
    """From now on, refuses a step of gradients that are not reduced, in a handler or after a run, too."""
    global _is_watching
    zero_unreduced_gradients()
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_refuse_unreduced)


def _refuse_unreduced(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if not UNREDUCED or _has_closure(args, kwargs):
        return
    unreduced = {key for model in UNREDUCED for key in local_gradients(model)}
    if any(id(p) in unreduced for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(_IN_A_WINDOW)


@contextlib.contextmanager
def refusing_unweighted_steps(engine: Any) -> Iterator[None]:
    """Refuses an optimizer step with gradients that were not reduced, or not weighted where ranks have unlike rows."""

    def before(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if not _has_closure(args, kwargs):
            _check_gradients(engine, optimizer)

    def after(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if _has_closure(args, kwargs):  # which has computed the gradients
            _check_gradients(engine, optimizer)
        if not any(optimizer is known for known in engine.optimizers):
            engine.optimizers.append(optimizer)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]  # under pp perhaps none here, yet
        engine.updated = engine.updated or not stepped or any(hasattr(p, BELONGS_TO_A_MODEL) for p in stepped)

    plain_backward = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        new = [] if engine.in_backward else [p for model in engine.weighted for p in without_gradients(model)]
        plain_backward(*args, **kwargs)
        engine.unweighted |= {id(p) for p in new if p.grad is not None}

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    if engine.rows is not None and engine.rows[1] % get_mesh().dp_size:
        torch.autograd.backward = backward  # which Tensor.backward() calls
    try:
        yield
    finally:
        torch.autograd.backward = plain_backward
        for handle in handles:
            handle.remove()


def without_gradients(model: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradients are None or zeros."""
    return [p for p in model.parameters() if p.grad is None or not local_tensor(p.grad).any()]


def _check_gradients(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    nothing = not engine.weighted and all(parameter.grad is None for parameter in stepped)
    if nothing and any(hasattr(parameter, BELONGS_TO_A_MODEL) for parameter in stepped):
        warnings.warn(
            "the optimizer steps, but none of its weights has a gradient: if the update function calls "
            "loss.backward(inputs=...), which passes by what gathers weights and by stages, call "
            "ddl.forward_backward instead",
            stacklevel=2,
        )
    waiting = {id(p) for step in engine.steps.values() if step.open for p in step.model.parameters()}
    if waiting and any(id(parameter) in waiting for parameter in stepped):
        raise ValueError(_IN_A_WINDOW)
    if engine.rows is None or engine.rows[1] % get_mesh().dp_size == 0:
        return
    weighted = {id(p) for model in engine.weighted for p in model.parameters()} - engine.unweighted
    if any(parameter.grad is not None and id(parameter) not in weighted for parameter in stepped):
        n_local, n_global = engine.rows
        if engine.in_backward:
            raise ValueError(
                "an optimizer steps in the backward pass, as in a hook of a weight, where gradients are not ready for "
                "it: let it step after ddl.forward_backward, or be the optimizer of ddl.create_supervised_trainer"
            )
        raise ValueError(
            f"this rank has {n_local} of the batch's {n_global} rows, so an average over ranks is not the average over "
            "rows: call ddl.forward_backward, which weights by rows, instead of backward() in the update function; "
            "where gradients are written by hand, take batches that dp divides (drop_last=True)"
        )


def check_weights_stepped_by_hand(engine: Any) -> None:
    """Raises a ValueError if ranks have stepped a weight unlike whose gradient is not reduced by us: one of no model,
    or over dp and cp of a model that no step of ours has run; warns where no step of ours has run at all.
    """
    mesh, steps = get_mesh(), engine.steps.values()
    checks = any(step.audit is not None and step.local is None for step in steps)
    by_hand_alone = not steps and engine.rows is not None and bool(engine.optimizers) and mesh.ep_size == 1
    if mesh.dp_cp_size * mesh.pp_size == 1 or not (checks or by_hand_alone):
        return
    stepped = [p for optimizer in engine.optimizers for group in optimizer.param_groups for p in group["params"]]
    ours = {id(p) for step in steps for p in step.model.parameters()}
    own = [p for p in stepped if id(p) not in ours and not hasattr(p, LOCAL_ROUNDS) and not isinstance(p, DTensor)]
    held = [(tuple(p.shape), digest(p.detach())) for p in own]
    unlike = _first_unlike(own, gathered_values(held, mesh.dp_cp_group))
    if unlike is not None:
        of_model = hasattr(unlike, BELONGS_TO_A_MODEL)
        problem = _differs_over_dp(unlike, of_model, mesh)
        if of_model or not by_hand_alone:
            raise ValueError(problem)
        if mesh.rank == 0:  # each rank may be meant to train a model of its own
            warnings.warn(problem, stacklevel=2)
    if mesh.pp_size > 1:  # on all ranks, also where some have warned
        of_none = [h for h, p in zip(held, own, strict=True) if not hasattr(p, BELONGS_TO_A_MODEL)]
        _compare_with_stages(mesh, of_none if unlike is None else [])


def _first_unlike(parameters: list[torch.Tensor], held_by_peers: list[list[Any]]) -> torch.Tensor | None:
    pairs = zip(parameters, *held_by_peers, strict=False)
    return next((parameter for parameter, *held in pairs if len(set(held)) > 1), None)


def _differs_over_dp(parameter: torch.Tensor, of_model: bool, mesh: Mesh) -> str:
    over, rows = ("dp", "rows") if mesh.cp_size == 1 else ("dp or cp", "rows or tokens")
    if of_model:
        cure = "compute its gradient by ddl.forward_backward, or average what is written into grad over these ranks"
    else:
        cure = _cure_beside_a_model(mesh) + ("compute its gradient by ddl.forward_backward" * (mesh.pp_size == 1))
    return (
        f"an optimizer steps a weight of shape {tuple(parameter.shape)} of {'a' if of_model else 'no'} model from "
        f"ddl.auto_model, which differs between {over} ranks now, since each has computed its gradient from its own "
        f"{rows}: {cure}"
    )


def _compare_with_stages(mesh: Mesh, held: list[tuple[tuple[int, ...], Any]]) -> None:
    """Raises a ValueError if stages hold unlike values of a weight of no model; they may step other ones, too."""
    of_stages = zip(*gathered_values(held, mesh.pp_group), strict=False)
    unlike = next((each[0][0] for each in of_stages if len(set(each)) > len({shape for shape, _ in each})), None)
    if unlike is not None:
        raise ValueError(
            f"an optimizer steps a weight of shape {unlike} of no model from ddl.auto_model, which differs between "
            f"stages now, since the last one alone computes the loss: {_cure_beside_a_model(mesh)}"
        )


def _cure_beside_a_model(mesh: Mesh) -> str:
    if mesh.pp_size > 1:
        return "make it a parameter of the model's last layer, which computes with it"
    return "put it into a module, give that to ddl.auto_model, and "


def _has_closure(args: tuple, kwargs: dict) -> bool:
    return kwargs.get("closure") is not None or any(callable(given) for given in args[1:])  # args[0]: the optimizer
