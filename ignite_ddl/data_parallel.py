"""Data parallelism of a module: torch's ``replicate``, or FSDP2 around each unit that is gathered by itself; buffers,
and when gradients are reduced and weights freed. A round of local steps reduces nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.checks.guards import refuse_second_derivatives
from ignite_ddl.collectives import SENT, octets
from ignite_ddl.compat import (
    forget_forward_pass,
    gathered_parameters,
    is_left_in_a_pass,
    keep_missing_gradients,
    replaced_parameter,
    replicate,
    unsharded_parameters,
    without_transforms,
)
from ignite_ddl.experts.style import dim_to_shard, experts_of
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.structure import address_of, map_leaves, tensors_of

_in_step = contextvars.ContextVar("a step: a backward pass follows", default=False)
_in_trial = contextvars.ContextVar("a function is tried on this rank", default=False)
LOCAL_ROUNDS = "_trains_in_local_rounds"  # on a parameter


class LocalRound:
    """The local steps of dp ranks since their weights were equal, with ``dp_sync="local"``.

    Attributes:
        steps: their number, the same on every rank.
        counted: what this rank's losses divided by in these steps, such as rows.
        averager: the ``ddl.LocalSGD`` that averages the weights; None if there is none yet.
    """

    def __init__(self) -> None:
        self.steps, self.counted, self.averager = 0, 0.0, None

    def check_loss(self, is_sum: bool) -> None:
        """Raises a ValueError if nothing averages weights, or a loss without a divisor could not weight them."""
        if self.averager is None:
            raise ValueError(
                'the model was made with dp_sync="local", but nothing averages the weights of its dp ranks: call '
                "ddl.LocalSGD(...).attach(trainer, model, optimizer), or that of ddl.DiLoCo"
            )
        if is_sum:
            raise ValueError(
                'a loss that is a sum has no mean by which dp_sync="local" could weight ranks: divide it, by rows or '
                "by what counts, and pass that as loss_divisor"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            'a model with dp_sync="local" cannot be copied or pickled, since a copy would be of one dp rank: load '
            "ddl.full_state_dict(model), at the end of a round, into a model of its own"
        )


def local_round(model: nn.Module) -> LocalRound | None:
    """The round of a model that was made with ``dp_sync="local"``; None of any other."""
    return getattr(model, "_local_round", None)


def refuse_in_a_round(model: nn.Module, what: str) -> None:
    """Raises a ValueError if dp ranks have weights of their own now."""
    local = local_round(model)
    if local is not None and local.steps and get_mesh().dp_size > 1:
        raise ValueError(
            f"{what} in the middle of a round of local steps (after {local.steps}), where each dp rank has weights of "
            f"its own: do it where a round ends, or call {type(local.averager).__name__}.end_round on every rank first"
        )


def apply_data_parallel(module: nn.Module, mesh: Mesh, options: Mapping[str, Any] | None, local: bool = False) -> None:
    """Lets the dp ranks of a stage share its rows, and with ``options`` its weights, too.

    Args:
        module: a stage of this rank.
        mesh: the mesh.
        options: arguments of torch's ``fully_shard``; None: each rank keeps all weights of the stage.
        local: whether only FSDP2 acts in each step, since rounds average the rest. Default: False.
    """
    if mesh.dp_cp_size == 1 or (local and options is None):
        return
    if mesh.pp_size == 1 and not local:  # a Pipeline does it itself, once per batch
        module.register_forward_pre_hook(lambda root, _: share_buffers(root, mesh))
    parameters = list(module.parameters())  # also of a frozen model, such as a teacher that follows its student
    if not parameters or (mesh.pp_size > 1 and not any(p.requires_grad for p in parameters)):
        return
    keep_missing_gradients()
    if options is None:  # not DDP, which loses parameters of models with DTensors and of pipelines
        for experts in experts_of(module):
            replicate(experts, mesh.expert_mesh["edp"])
        for part in [*_modules_of_other_dtypes(module), module]:
            replicate(part, mesh.device_mesh["dp"])
    else:
        fully_shard(module, mesh, options)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.register_forward_pre_hook(_refuse_replaced_weights, prepend=True)
            unit.register_forward_hook(_copy_weights, prepend=True)
            unit.register_forward_hook(_forget_failed_pass, always_call=True)
    module.register_forward_pre_hook(_make_full_weights, prepend=True)
    module.register_forward_pre_hook(_forget_failed_pass, prepend=True)  # of a backward pass by hand
    module.register_forward_pre_hook(_refuse_in_a_trial, prepend=True)  # before FSDP2 begins a pass
    if mesh.pp_size == 1:
        module.register_forward_hook(_reshard_outside_of_a_step)


def _reshard_outside_of_a_step(root: nn.Module, *_: Any) -> None:
    """After a forward pass that perhaps no backward pass follows, which would do it: an optimizer made later, or a
    change of weights by hand, would get the full weights that FSDP2 keeps. A backward pass gathers them again.
    """
    if not (torch.is_grad_enabled() and _in_step.get()):
        reshard(root)


def _forget_failed_pass(unit: nn.Module, _: Any, *output: Any) -> None:
    """After a forward pass that an error has ended, which the script may catch, and before the one that follows such a
    backward pass: FSDP2 does not see that they have ended.
    """
    if not torch.compiler.is_compiling() and is_left_in_a_pass(unit, forward=bool(output)):
        forget_forward_pass(unit)


def _copy_weights(unit: nn.Module, _: Any, output: Any) -> Any:
    """Before FSDP2's own hook: weights in the unit's output, or views of them, as copies, which have their gradients.

    FSDP2 frees the memory of those that it has gathered, also before a loss reads it: to do so would end the process.
    """
    if torch.compiler.is_compiling():
        return output
    held = {address_of(weight) for weight in gathered_parameters(unit)} - {0}

    def is_held(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and address_of(without_transforms(leaf)) in held

    if not any(map(is_held, tensors_of(output))):
        return output
    return map_leaves(lambda leaf: leaf.clone() if is_held(leaf) else leaf, output)


@contextlib.contextmanager
def without_calls_of_models() -> Iterator[None]:
    """Inside, a function that is tried fails where it calls a model whose weights are gathered: it may fail on this
    rank alone, and in the middle of a pass.
    """
    token = _in_trial.set(True)
    try:
        yield
    finally:
        _in_trial.reset(token)


def _refuse_in_a_trial(*_: Any) -> None:
    if _in_trial.get():
        raise RuntimeError("a model, whose weights other ranks do not gather now")


def _refuse_replaced_weights(unit: nn.Module, *_: Any) -> None:
    """Before FSDP2's own hook, which puts the weights that it gathers in the places of whatever stands there."""
    replaced = None if torch.compiler.is_compiling() else replaced_parameter(unit)
    if replaced is not None:
        raise ValueError(
            f"{replaced[1]!r} of a {type(replaced[0]).__name__.removeprefix('FSDP')} was replaced for this pass "
            "(torch.func.functional_call, or an assignment), but on this mesh forward computes with the weights of "
            "ddl.auto_model instead: load others with ddl.load_full_state_dict, or leave out shard=True, and dp beside "
            "tp or pp (a mesh of dp alone)"
        )


def _make_full_weights(root: nn.Module, *_: Any) -> None:
    """Makes FSDP2's full weights, which it reuses, outside of inference mode: they could not be trained otherwise."""
    if torch.is_inference_mode_enabled() and not unsharded_parameters(root):
        with torch.inference_mode(False):
            for module in root.modules():  # the root is the first, as FSDP2 demands
                if isinstance(module, FSDPModule):
                    module.unshard()
                    module.reshard()


def fully_shard(module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> None:
    """Shards a module's weights over dp (FSDP2); arguments as in :func:`apply_data_parallel`."""
    for experts in experts_of(module):  # whose copies are fewer; dim 0 is cut already
        if not isinstance(experts, FSDPModule):
            fsdp.fully_shard(
                experts, mesh=mesh.expert_mesh["edp"], shard_placement_fn=partial(_shard_experts, mesh=mesh), **options
            )
            refuse_second_derivatives(experts, type(experts).__name__, gathered=True)
    unsent = {p for p in module.parameters() if p.dtype not in SENT and not p.requires_grad}  # each rank keeps them
    sharded = {id(p) for experts in experts_of(module) for p in experts.parameters()} | set(map(id, unsent))
    for unit in [*_fsdp_units(module), module]:  # the last one has the remaining parameters
        for part in [*_modules_of_other_dtypes(unit), unit]:
            if not sharded.issuperset(map(id, part.parameters())):
                refuse_second_derivatives(part, type(part).__name__, gathered=True)
            fsdp.fully_shard(part, **{"mesh": mesh.dp_mesh, "ignored_params": unsent or None, **options})
            sharded.update(map(id, part.parameters()))
    module._keeps_gathered = not options["reshard_after_forward"] and mesh.pp_size == 1  # read by gradient_sync


def _shard_experts(weight: nn.Parameter, mesh: Mesh) -> Shard:
    return Shard(dim_to_shard(tuple(weight.to_local().shape), mesh.dp_cp_size // mesh.ep_size))


_LISTS = nn.Sequential | nn.ModuleList | nn.ModuleDict


def _fsdp_units(root: nn.Module) -> list[nn.Module]:
    """The units that FSDP2 gathers one at a time, by the rule in ``ddl.auto_model``."""
    passed, units = [root], []
    for module in passed:  # the list grows meanwhile
        shapes = {child: tuple(p.shape for p in child.parameters()) for child in module.children()}
        shape_counts = Counter(shapes.values() if isinstance(module, _LISTS) else ())
        for child in (child for child in shapes if shapes[child]):
            block = shape_counts[shapes[child]] > 1 and not isinstance(child, _LISTS)
            is_lazy_layer = isinstance(child, FSDPModule)  # a lazy layer, already sharded
            alone = _is_called(child) and (block or is_lazy_layer or not _holds_layers(child))
            known = units if alone else passed
            if child not in known:
                known.append(child)
    # A weight that is tied across units has to be gathered for all of them: it belongs to the root.
    holders = Counter(id(p) for unit in units for p in unit.parameters())
    holders.update(id(p) for module in passed for p in module.parameters(recurse=False))
    return [
        unit
        for unit in units
        if not isinstance(unit, FSDPModule) and all(holders[id(p)] == 1 for p in unit.parameters())
    ]


def _modules_of_other_dtypes(unit: nn.Module) -> list[nn.Module]:
    """What to wrap by itself in a unit whose weights have several dtypes, since torch reduces one dtype together."""
    inside = [unit]
    for module in inside:  # the list grows meanwhile
        inside += [m for m in module.children() if not isinstance(m, FSDPModule) and m not in inside]
    trained = {m: [p for p in m.parameters(recurse=False) if p.requires_grad] for m in inside}
    if len({p.dtype for weights in trained.values() for p in weights}) < 2:
        return []
    holders = Counter(id(p) for weights in trained.values() for p in weights)
    alone = [m for m in inside[1:] if trained[m] and _is_called(m) and all(holders[id(p)] == 1 for p in trained[m])]
    for modules in [*([m] for m in alone), [m for m in inside if m not in alone]]:
        dtypes = sorted({str(p.dtype) for m in modules for p in trained[m]})
        if len(dtypes) > 1:
            raise ValueError(
                f"a {type(modules[0]).__name__} has weights of {' and '.join(dtypes)} side by side, which torch does "
                "not reduce together on this mesh: give each dtype a module of its own, or all weights one dtype"
            )
    return alone[::-1]


def _is_called(module: nn.Module) -> bool:
    """Whether it has a forward, before which FSDP2 gathers; an nn.ParameterList has none."""
    return type(module).forward is not nn.Module.forward


def _holds_layers(module: nn.Module) -> bool:
    return any(isinstance(m, _LISTS) and any(True for _ in m.parameters()) for m in module.modules())


@contextlib.contextmanager
def gradient_sync(stages: list[nn.Module], sync: bool) -> Iterator[None]:
    """Reduces gradients over dp only if an optimizer step follows."""
    with contextlib.ExitStack() as stack:
        token = _in_step.set(True)
        stack.callback(_in_step.reset, token)
        for stage in stages:
            if isinstance(stage, DistributedDataParallel) and not sync:
                stack.enter_context(stage.no_sync())
            elif isinstance(stage, FSDPModule):
                stage.set_requires_gradient_sync(sync)
                if getattr(stage, "_keeps_gathered", False):  # until the optimizer steps
                    stage.set_reshard_after_backward(sync)
                    stage._holds_weights = not sync
        try:
            yield
        except Exception:  # which the script may catch, and leave out this batch
            for stage in stages:
                with contextlib.suppress(Exception):  # of torch.func, with torch 2.11: the first one says more
                    forget_forward_pass(stage)
            raise


def reshard(root: nn.Module) -> None:
    """Frees the unsharded parameters of FSDP2, which otherwise a backward pass frees."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


_SENDS_NONE = contextvars.ContextVar("forward passes send no buffers", default=False)


@contextlib.contextmanager
def buffers_apart(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, forward passes send no buffers, for which ranks would wait if a pass of a check fails on one of them."""
    modules = {module for stage in stages for module in stage.modules()}
    wrapped = [m for m in modules if isinstance(m, DistributedDataParallel) and m.require_forward_param_sync]
    token = _SENDS_NONE.set(True)
    for module in wrapped:
        module.require_forward_param_sync = False
    try:
        yield
    finally:
        _SENDS_NONE.reset(token)
        for module in wrapped:
            module.require_forward_param_sync = True


def share_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Broadcasts dp rank 0's buffers (BatchNorm's running statistics) over dp, as DDP does before a forward pass."""
    if mesh.dp_cp_size == 1 or _SENDS_NONE.get():
        return
    buffers = [b for b in module.buffers() if not isinstance(b, DTensor)]
    if not buffers:
        return
    flat = torch.cat(list(map(octets, buffers)))
    dist.broadcast(flat, src=dist.get_global_rank(mesh.dp_cp_group, 0), group=mesh.dp_cp_group)
    if mesh.dp_cp_rank > 0:
        with torch.no_grad():
            for buffer, values in zip(buffers, flat.split([b.nbytes for b in buffers]), strict=True):
                buffer.data.copy_(values.clone().view(buffer.dtype).view(buffer.shape))  # the clone is aligned
