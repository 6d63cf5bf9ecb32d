"""A model on a mesh, in four phases: check (nothing is sent), materialise, shard, protect."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.arguments import FLAG, MODULE, OPTIMIZER, WORLD, a, each, one_of, takes
from ignite_ddl.audit import ROWS_CHECKED, TOKENS_CHECKED
from ignite_ddl.checks.fingerprint import take_fingerprint
from ignite_ddl.checks.guards import (
    check_layers,
    check_optimizer,
    check_parameter_hooks,
    copy_parameter_attributes,
    mark_trained,
    refuse_copies,
    refuse_full_states,
    refuse_ignites_checkpoint,
    refuse_plain_names,
    strip_ddp_prefix,
)
from ignite_ddl.checks.regions import check_regions_once
from ignite_ddl.collectives import SENT, octets
from ignite_ddl.comm_hooks import COMM_HOOK, check_comm_hook, register_comm_hook
from ignite_ddl.compat import keep_sparse_gradients_apart, use_usual_strides
from ignite_ddl.context.sequence import SharedSequences
from ignite_ddl.data_parallel import LOCAL_ROUNDS, LocalRound, apply_data_parallel, fully_shard, share_buffers
from ignite_ddl.errors import explain_transforms
from ignite_ddl.experts.routing import routers_of
from ignite_ddl.experts.style import Experts, apply_experts, check_experts_of
from ignite_ddl.lazy import LazyLayers, materialize
from ignite_ddl.mesh import Mesh, check_experts, get_mesh, sizes_without_world
from ignite_ddl.metrics import reduce_metrics_over_dp
from ignite_ddl.optim import adapt_optimizer
from ignite_ddl.parts import MODELS
from ignite_ddl.pipeline.cut import CUT_FITS, Cut, add_submodule, cut_into_stages, trains
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.pipeline.pipeline import Pipeline
from ignite_ddl.pipeline.schedules import ROWS, SCHEDULES, check_same_microbatches, microbatches_for
from ignite_ddl.pipeline.trace import TracedLayer
from ignite_ddl.tensor.plan import apply_plan, check_plan
from ignite_ddl.tensor.random import share_random_stream

FITS = {
    "model": MODULE,
    "tensor_plan": a(
        'a dict from globs of module names to styles, or "auto"',
        lambda plan: isinstance(plan, Mapping) or plan == "auto",
    ),
    **CUT_FITS,
    **dict.fromkeys(("dp", "pp", "tp", "dp_replicate", "dp_shard", "cp", "ep"), WORLD),
}


class DDPOptions(TypedDict, total=False):
    """What ``idist.auto_model`` takes for torch's ``DistributedDataParallel``."""

    sync_bn: bool
    device_ids: Any
    output_device: Any
    dim: int
    broadcast_buffers: bool | None
    init_sync: bool
    process_group: Any
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    delay_all_reduce_named_params: Any
    param_to_hook_all_reduce: Any
    mixed_precision: Any
    device_mesh: Any
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: list[int] | None
    batched_grad_copy: bool
    forward_sync_buffers: bool | None
    lazy_bucket_allocation: bool


@takes(
    FITS, mp_policy=a("a MixedPrecisionPolicy", MixedPrecisionPolicy),
    dp_sync=one_of("step", "local"), comm_hook=COMM_HOOK,
    **dict.fromkeys(("shard", "checks", "reshard_after_forward", "offload"), FLAG),
)  # fmt: skip
def auto_model(
    model: nn.Module,
    tensor_plan: Mapping[str, ParallelStyle] | Literal["auto"] | None = None,
    *,
    schedule: str = "1f1b",
    n_microbatches: int | None = None,
    split: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    shard: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    offload: bool = False,
    checks: bool = True,
    dp_sync: str = "step",
    comm_hook: str | Callable[..., Any] | None = None,
    **kwargs: Unpack[DDPOptions],
) -> nn.Module:
    """Cuts a model for the mesh; the weights are those of rank 0, which are those of one process.

    On a mesh that is data parallel only, this is ``idist.auto_model`` (DDP). With tp, the weights of the plan's modules
    become DTensors; with pp, the model becomes a :class:`~ignite_ddl.pipeline.pipeline.Pipeline` of this rank's
    stages; over dp, torch's ``replicate`` is applied, or FSDP2 with ``shard=True``.

    Args:
        model: any module; where the mesh has a pp axis, an ``nn.Sequential`` or a module whose attribute
            ``pipeline_layers`` lists the names of its layers, in order; for others see :func:`trace_layers`. Layers
            may be ``ddl.lazy``.
        tensor_plan: globs of module names to styles, see :mod:`ignite_ddl.tensor`; or "auto": the plan that a model of
            Hugging Face's transformers brings along (``base_model_tp_plan``), of which a style without a counterpart
            (of experts, or of multi-head latent attention) is refused. Checked on every mesh. Default None: every tp
            rank has all weights; a mesh with a tp axis then warns, unless the plan is ``{}``.
        schedule: a name of ``ignite_ddl.pipeline.schedules.SCHEDULES``, default "1f1b". Used with pp.
        n_microbatches: microbatches per batch, default the number of stages. Used with pp.
        split: layers per stage, default balanced by ``costs``. Used with pp.
        costs: the cost of each layer, in any unit, for example from ``ddl.layer_costs``; the same on every rank.
            Default: its number of parameters. Used with pp.
        shard: shard parameters, gradients and optimizer state over dp (FSDP2), or, on a mesh that was given dp_shard,
            over that (HSDP). Default: whether dp_shard was given and is more than 1; another value is refused then.
            Each unit is gathered before its forward and backward pass and freed after it. A unit is a transformer
            block (an element of an ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict`` that has a sibling of
            the same shapes), or a module that contains no such list. Tied weights, and parameters of the model
            itself, are one more unit, which is gathered for the whole forward pass. Do not read a weight without
            calling its unit: it is sharded then.
        mp_policy: with ``shard=True``, the dtypes in which FSDP2 gathers weights and reduces gradients, and that of
            activations: ``torch.distributed.fsdp.MixedPrecisionPolicy``. Without ranks over which to shard, it has no
            effect. Default: those of the parameters.
        reshard_after_forward: with sharded weights, whether they are freed between the forward and the backward pass
            (ZeRO-3). With False they are gathered once for both (ZeRO-2), and stay full until the optimizer steps
            where gradients are accumulated (ZeRO-1). Default: True, under pp False.
        offload: with sharded weights, whether this rank's part of them, of gradients and of the optimizer's state are
            in the CPU's memory, where the optimizer steps (``CPUOffloadPolicy``). Default: False.
        checks: whether the first forward pass, in training or not, checks the code between layers that are cut over
            tp, and, under pp, that layers keep no state from one pass to the next and that rows do not depend on each
            other. Default: True.
        dp_sync: "step": gradients are averaged over dp in each step, or "local": each dp rank trains weights of its
            own, which :class:`ddl.LocalSGD <ignite_ddl.local.LocalSGD>` or :class:`ddl.DiLoCo
            <ignite_ddl.local.DiLoCo>` averages; a step is refused without one of them. With dp_replicate
            and dp_shard, FSDP2 averages over dp_shard and rounds over dp_replicate. Not with ``shard=True`` over the
            same ranks, nor with cp. Default: "step".
        comm_hook: how DDP compresses gradients before it averages them, on a mesh that is data parallel only: "fp16",
            "bf16" (not on gloo), "powersgd" of rank 1, or "powersgd:4" of rank 4; or a function ``(state, bucket)`` as
            DDP's ``register_comm_hook`` takes, called with the state None. PowerSGD (Vogels et al. 2019,
            arXiv:1905.13727) approximates the gradient of each matrix from the second step on, adds what a step has
            left out to the next one (error feedback), and is exact for gradients of at most its rank. That belongs to
            a rank: ``model.comm_state`` goes into ``to_save`` beside the model, and is refused on another number of
            ranks; left out of ``to_load``, it begins with zeros. DDP then looks for unused parameters, so that it keeps
            its buckets in their order. Default None: none.
        kwargs: for ``idist.auto_model`` on a mesh that is data parallel only, such as ``find_unused_parameters``.

    Returns:
        nn.Module: the model to train. With pp, train it by ``ddl.create_supervised_trainer``. Its parameters have the
        names of the uncut model on every mesh; the keys of DDP's ``state_dict()`` begin with "module.", those of
        ``ddl.full_state_dict(model)`` do not. What is changed later, such as a new head or a frozen layer under DDP,
        would not reach the ranks' common gradients, and the next step refuses it.

    Raises:
        ValueError: if a key of the plan matches nothing, a module cannot be cut, or the mesh does not support the
            model or the schedule; nothing is sent then.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def weights_held(local_rank):
                torch.manual_seed(0)
                model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
                model = ddl.auto_model(model, tensor_plan={"0": ddl.Column(), "2": ddl.Row()})
                held = model[0].weight.to_local().numel()
                return held, model(torch.ones(1, 8)).sum().item()

            with ddl.Parallel(backend="gloo", nproc_per_node=2, tp=2) as parallel:
                (held, cut), _ = parallel.run(weights_held)

            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
            assert held == 64                                   # of the first layer's 128 weights
            assert abs(cut - model(torch.ones(1, 8)).sum().item()) < 1e-5
    """
    stages, fsdp = (schedule, n_microbatches, split, costs), (mp_policy, reshard_after_forward, offload)
    layout = _check(model, tensor_plan, stages, shard, fsdp, checks, dp_sync == "local", comm_hook, ddp=kwargs)
    _materialise(model, layout)
    return _protect(_shard(model, layout), layout)


@dataclass
class _Layout:
    """The decisions of the first phase, for the others."""

    mesh: Mesh
    styles: dict[str, ParallelStyle]
    cut: Cut | None
    shard: bool
    fsdp: dict[str, Any]
    checks: bool
    ddp: dict[str, Any] | None  # arguments of DDP; None: dp is left to FSDP2, replicate or rounds of local steps
    local: bool
    comm_hook: str | Callable[..., Any] | None

    def stages_with(self, name: str) -> int:
        """The number of this rank's stages that hold the module of that name."""
        if self.cut is None:
            return 1
        layer_names = (self.cut.layers[stage] for stage in self.cut.stages_of(self.mesh.pp_rank))
        return sum(any(f"{name}.".startswith(f"{layer}.") for layer in layers) for layers in layer_names)


def _check(
    model: nn.Module,
    tensor_plan: Mapping[str, ParallelStyle] | Literal["auto"] | None,
    stages: tuple,
    shard: bool | None,
    fsdp: tuple,
    checks: bool,
    local: bool,
    comm_hook: str | Callable[..., Any] | None,
    ddp: dict[str, Any],
) -> _Layout:
    """Decides everything, and refuses what the mesh does not support, without making, changing or sending anything."""
    mesh = get_mesh()
    shard = _shards(mesh, shard)
    by_ddp = _is_by_ddp(mesh, shard, local, ddp)
    if comm_hook is not None:
        check_comm_hook(comm_hook, mesh, by_ddp, ddp)
    if mesh.world_size > 1:
        check_layers(model, mesh, plain=by_ddp or (local and not shard and mesh.pp_size * mesh.tp_size == 1))
        check_parameter_hooks(model.named_parameters(), mesh, by_ddp, before=True)
    warn_without_plan(tensor_plan, mesh.tp_size, stacklevel=5)
    copies = mesh.dp_cp_size // mesh.ep_size if shard else None
    styles, cut = _check_cut(model, tensor_plan, mesh.pp_size, mesh.tp_size, stages, mesh.ep_size, copies)
    _check_routers(model, mesh.dp_size, mesh.cp_size, cut, local, mesh.ep_size)
    how = _fsdp_arguments(mesh, shard, *fsdp) | ({"mesh": mesh.device_mesh["dp_shard"]} if local and shard else {})
    return _Layout(mesh, styles, cut, shard, how, checks, ddp if by_ddp else None, local, comm_hook)


def _shards(mesh: Mesh, shard: bool | None) -> bool:
    """Whether weights are sharded over dp: as the mesh says, if it was given dp_shard, else as ``shard``."""
    if mesh.dp_shard_size is None or mesh.dp_cp_size == 1:
        return bool(shard)
    if shard is not None and shard != (mesh.dp_shard_size > 1):
        raise ValueError(
            f"shard should be left out, or {not shard}, where the mesh was given dp_shard={mesh.dp_shard_size}, but "
            f"given {shard}: the mesh says over how many of the {mesh.dp_size} dp ranks weights are sharded"
        )
    return mesh.dp_shard_size > 1


def _is_by_ddp(mesh: Mesh, shard: bool, local: bool, ddp: Mapping[str, Any]) -> bool:
    """Whether DDP reduces gradients, which takes ``ddp``."""
    if local and ((shard and not mesh.hybrid) or mesh.cp_size > 1):
        raise ValueError(
            f'dp_sync="local" needs all weights and full sequences on each dp rank, or on its dp_shard peers, but the '
            f"mesh is {mesh!r}, shard={shard}: leave out shard and cp, give dp_replicate, too, or leave out dp_sync"
        )
    by_ddp = mesh.dp_cp_size == mesh.world_size and not ((shard or local or mesh.ep_size > 1) and mesh.world_size > 1)
    if ddp and not by_ddp:
        sync = ', dp_sync="local"' if local else ""
        raise ValueError(f"{', '.join(ddp)} are for DDP, but the mesh is {mesh!r}, shard={shard}{sync}: leave them out")
    return by_ddp


def _fsdp_arguments(
    mesh: Mesh, shard: bool, mp_policy: MixedPrecisionPolicy | None, reshard: bool | None, offload: bool
) -> dict[str, Any]:
    """The arguments of torch's ``fully_shard``."""
    given = {"mp_policy": mp_policy, "reshard_after_forward": reshard, "offload": offload or None}
    for name, value in given.items() if not shard else ():
        if value is not None:
            other = ": give amp_mode to ddl.create_supervised_trainer instead" if name == "mp_policy" else ""
            raise ValueError(f"{name} is for shard=True{other}")
    return {
        # Under pp, weights stay gathered until the backward pass ends: one gather per batch, not per microbatch.
        "reshard_after_forward": mesh.pp_size == 1 if reshard is None else reshard,
        "mp_policy": mp_policy or MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy(),
    }


def warn_without_plan(tensor_plan: Any, tp_size: int, stacklevel: int) -> None:
    """Of tp ranks that all compute the same, on rank 0 and once."""
    if tp_size > 1 and tensor_plan is None and idist.get_rank() == 0:
        warnings.warn(
            f"the mesh has tp={tp_size}, but tensor_plan is None: every tp rank computes the full model; give a plan, "
            'or tensor_plan="auto" for a model of transformers, or tensor_plan={} if that is meant',
            stacklevel=stacklevel,
        )


def _check_cut(
    model: nn.Module,
    tensor_plan: Mapping[str, ParallelStyle] | Literal["auto"] | None,
    pp_size: int,
    tp_size: int,
    stages: tuple,
    ep_size: int,
    copies: int | None = None,
) -> tuple[dict[str, ParallelStyle], Cut | None]:
    """The style of each module, and the stages."""
    if tp_size > 1 and any(isinstance(module, TracedLayer) for module in model.modules()):
        raise ValueError(
            "a model from ddl.trace_layers cannot be cut over tp, since tracing leaves operations in place of modules: "
            "use pp and dp, or make the model an nn.Sequential"
        )
    with LazyLayers(model).shapes_only():
        styles = check_plan(model, tensor_plan or {}, tp_size)
        check_experts_of(dict(model.named_modules(remove_duplicate=False)), styles, ep_size, tp_size, copies)
        return styles, cut_into_stages(model, pp_size, *stages) if pp_size > 1 else None


def _check_routers(model: nn.Module, dp_size: int, cp_size: int, cut: Cut | None, local: bool, ep_size: int) -> None:
    """Refuses a mesh on which a router's batch, or its order, would not be that of one process."""
    routers = routers_of(model)
    if cp_size > 1 and any(router.capacity_factor is not None for router in routers):
        raise ValueError(
            "capacity_factor drops the last choices in the order of tokens, which cp gives to ranks in another order: "
            "leave one of them out"
        )
    if local and (routers or ep_size > 1):
        raise ValueError(
            'dp_sync="local" leaves dp ranks alone, but experts over ep, and a router with a balance loss, a z-loss, a '
            "bias or a capacity, need the tokens of all of them in each step: leave one of them out"
        )
    configs = (getattr(module, "config", None) for module in model.modules())
    if (dp_size * cp_size > 1 or cut is not None) and any(
        getattr(config, "output_router_logits", None) is True for config in configs
    ):
        raise ValueError(
            "config.output_router_logits=True lets transformers add a balance loss that counts a rank's own rows: set "
            "it to False; the balance loss of ddl.Router, in a layer of your own, counts those of all ranks"
        )
    if cut is not None and (routers or ep_size > 1) and SCHEDULES[cut.schedule].split_backward:
        raise ValueError(
            f"schedule={cut.schedule!r} runs backward passes in parts, in which exchanges of tokens and losses of "
            "routers would run twice or not at all: use gpipe, 1f1b or interleaved_1f1b"
        )


def _materialise(model: nn.Module, layout: _Layout) -> None:
    """Gives every rank rank 0's weights, and makes lazy layers, each sharded before the next one takes memory."""
    if layout.ddp is None:
        _copy_weights_of_rank_0(model)  # except those of lazy layers
    for names in LazyLayers(model).make(layout.mesh, is_held=layout.stages_with):
        _shard_lazy_layer(model, names, layout)
    if layout.ddp is not None:
        materialize(model)  # with NaN: DDP sends weights when it wraps, if it has something to train
        if layout.mesh.world_size > 1 and not trains(model):
            _copy_weights_of_rank_0(model)


def _shard_lazy_layer(model: nn.Module, names: list[str], layout: _Layout) -> None:
    layer = model.get_submodule(names[0])
    layer.to(idist.device())
    uncut = dict(layer.named_parameters(remove_duplicate=False))
    if layout.mesh.tp_size * layout.mesh.ep_size > 1:
        holder = nn.Module()
        for name in names:
            add_submodule(holder, name, layer)
        inside = tuple(f"{name}." for name in names)
        layer_styles = {name: layout.styles.pop(name) for name in list(layout.styles) if f"{name}.".startswith(inside)}
        _apply_styles(holder, layer_styles, layout.mesh)
    alone = sum(map(layout.stages_with, names)) == 1  # else it is copied before it is sharded
    if layout.shard and alone and layout.mesh.dp_cp_size > 1 and any(True for _ in layer.parameters()):
        fully_shard(layer, layout.mesh, layout.fsdp)
    copy_parameter_attributes(uncut, layer)


def _shard(model: nn.Module, layout: _Layout) -> nn.Module:
    """Leaves each rank its part: its stages (pp), its part of their layers (tp), its rows or weights (dp)."""
    if layout.mesh.world_size > layout.mesh.dp_size:
        share_random_stream(layout.mesh)
    if layout.ddp is not None:  # which refuses a model that trains nothing
        if layout.mesh.world_size == 1 or trains(model):
            model = _wrapped(model, layout)
        return register_comm_hook(model, layout.comm_hook, layout.mesh)
    uncut = dict(model.named_parameters(remove_duplicate=False))
    if layout.cut is not None:
        communicates = layout.shard or layout.mesh.ep_size > 1 or bool(routers_of(model))
        gathers = layout.shard and bool(layout.fsdp["reshard_after_forward"])
        _warn_of_balance_by_microbatch(model, layout)
        model = Pipeline(model, layout.cut, layout.mesh, communicates, gathers, layout.checks)
    _apply_styles(model, layout.styles, layout.mesh)
    for stage in stages_of(model).local_stages():
        apply_data_parallel(stage, layout.mesh, layout.fsdp if layout.shard else None, layout.local)
    copy_parameter_attributes(uncut, model)
    return model


def _warn_of_balance_by_microbatch(model: nn.Module, layout: _Layout) -> None:
    balanced = any(router.balance_weight or router.capacity_factor is not None for router in routers_of(model))
    if balanced and layout.cut.n_microbatches > 1 and layout.mesh.rank == 0:
        warnings.warn(
            "under pp, balance_weight and capacity_factor of ddl.Router count the tokens of a microbatch, not those of "
            "a batch as in one process: for its numbers take n_microbatches=1, bias_rate, or a mesh without pp",
            stacklevel=2,
        )


def _wrapped(model: nn.Module, layout: _Layout) -> nn.Module:
    """A model under DDP; its buffers and frozen weights of types that DDP does not send are sent as bytes."""
    if layout.mesh.world_size > 1:
        keep_sparse_gradients_apart(model)
        use_usual_strides(model.buffers())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    unsent = [name for name, tensor in tensors if tensor.dtype not in SENT and not tensor.requires_grad]
    if layout.mesh.world_size == 1 or not unsent or layout.ddp.get("broadcast_buffers") is False:
        return idist.auto_model(model, **layout.ddp)
    _copy_weights_of_rank_0(model)
    model._ddp_params_and_buffers_to_ignore = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *unsent]
    wrapped = idist.auto_model(model, **layout.ddp)
    if layout.ddp.get("forward_sync_buffers") is not False:
        wrapped.register_forward_pre_hook(lambda root, _: share_buffers(root, layout.mesh))
    return wrapped


def _apply_styles(model: nn.Module, styles: dict[str, ParallelStyle], mesh: Mesh) -> None:
    apply_experts(model, styles, mesh)
    if mesh.tp_size > 1:
        others = {name: style for name, style in styles.items() if not isinstance(style, Experts)}
        apply_plan(model, others, mesh.device_mesh["tp"])


def _protect(model: nn.Module, layout: _Layout) -> nn.Module:
    """Records the model as it is, so that what would train, save or copy it wrongly is refused."""
    if layout.local:
        local = LocalRound()
        for module in (model, *stages_of(model).local_stages()):
            module._local_round = local
        for parameter in model.parameters():
            setattr(parameter, LOCAL_ROUNDS, True)
    if layout.mesh.world_size == 1:
        return model
    reduce_metrics_over_dp()
    for router in routers_of(model) if not layout.local else ():
        router.over_ranks = layout.mesh.dp_cp_size > 1
    if layout.ddp is None:
        _protect_cut_model(model, layout)
    else:
        mark_trained(model.parameters(), frozen_too=False)
        if not trains(model):
            model.register_load_state_dict_pre_hook(strip_ddp_prefix)
            return model
        if isinstance(model, DistributedDataParallel):  # names as on every other mesh, without "module."
            vars(model).update({k: m for k, m in model.module._modules.items() if not hasattr(model, k)})
            model.named_parameters, model.named_buffers = model.module.named_parameters, model.module.named_buffers
            model.register_load_state_dict_pre_hook(refuse_plain_names)
    MODELS.add(model)
    if not layout.checks:
        for kind in (ROWS_CHECKED, TOKENS_CHECKED):
            setattr(model, kind, True)
    elif layout.mesh.cp_size > 1 and layout.mesh.pp_size == 1:
        SharedSequences(model)
    take_fingerprint(model, layout.shard or layout.local)  # later changes would not reach what reduces its gradients
    return model


def _protect_cut_model(model: nn.Module, layout: _Layout) -> None:
    for stage in stages_of(model).local_stages():
        refuse_copies(stage)
        explain_transforms(stage, layout.mesh.tp_size > 1)
        mark_trained(stage.parameters(), frozen_too=layout.mesh.dp_cp_size == 1 or trains(stage))
        if layout.checks and layout.mesh.tp_size > 1:
            check_regions_once(stage)
    refuse_ignites_checkpoint(model)
    refuse_full_states(model)


@takes(FITS, batches=each(ROWS, "numbers of rows"))
def check_model(
    model: nn.Module,
    tensor_plan: Mapping[str, ParallelStyle] | Literal["auto"] | None = None,
    *,
    dp: int | None = None,
    pp: int = 1,
    tp: int = 1,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    cp: int = 1,
    ep: int = 1,
    schedule: str = "1f1b",
    n_microbatches: int | None = None,
    split: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    batches: Sequence[int] = (),
) -> None:
    """Raises in one process, before any rank is started, the errors that :func:`auto_model` would raise on a mesh.

    Args:
        model: the model, which is not changed.
        tensor_plan: as in :func:`auto_model`.
        dp: size of the mesh's data-parallel axis. Default: dp_replicate × dp_shard.
        pp: number of pipeline ranks.
        tp: number of ranks that share each layer.
        dp_replicate: number of replicas of the model over dp. Default: 1, or what dp_shard leaves of dp.
        dp_shard: number of dp ranks that share the weights of a replica, in the same way.
        cp: number of ranks that share each sequence.
        ep: number of ranks of dp × cp that share experts.
        schedule: as in :func:`auto_model`.
        n_microbatches: as in :func:`auto_model`.
        split: as in :func:`auto_model`.
        costs: as in :func:`auto_model`.
        batches: the numbers of rows of the global batches, such as ``batch_size`` and that of the last batch: some
            schedules do not support every number of rows.

    Raises:
        ValueError: if the mesh does not support the model, the plan, the schedule or a batch.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
            ddl.check_model(layers, {"0": ddl.Column(), "2": ddl.Row()}, dp=2, tp=4)
            try:
                ddl.check_model(layers, pp=4)
            except ValueError as error:
                assert "a model of 3 layers cannot be cut into 4 stages" in str(error)
    """
    sizes = sizes_without_world(dp, pp, tp, dp_replicate, dp_shard, cp)
    check_experts(sizes, ep)
    dp = sizes["dp"]
    warn_without_plan(tensor_plan, tp, stacklevel=4)
    _, cut = _check_cut(model, tensor_plan, pp, tp, (schedule, n_microbatches, split, costs), ep)
    _check_routers(model, dp, cp, cut, False, ep)
    communicates = ep > 1 or bool(routers_of(model))
    if cut is not None:
        for rows in batches:
            numbers = {  # of a dp rank
                microbatches_for(dp_rows, cut.n_microbatches, schedule, pp)[0]
                for dp_rows in {rows // dp, -(-rows // dp)} - {0}
            }
            if communicates:
                check_same_microbatches(numbers)


def _copy_weights_of_rank_0(model: nn.Module) -> None:
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(idist.device()))
    with torch.no_grad():
        for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()] if not t.is_meta}.values():
            # As one that is channels_last, or conjugated lazily, is not: it could not be sharded, or sent.
            tensor.data = tensor.resolve_conj().resolve_neg().contiguous()
            dist.broadcast(octets(tensor), src=0)


@takes(optimizer=OPTIMIZER, checks=FLAG)
def auto_optim(optimizer: torch.optim.Optimizer, *, checks: bool = True) -> torch.optim.Optimizer:
    """``idist.auto_optim``: the optimizer itself on gloo and NCCL, adapted on Horovod and XLA; every rank calls it.

    Where the model is cut, small weights are stepped for a moment, cut and full, by another optimizer of the same
    class and options: one that computes norms over a weight or over all weights may be right (Muon), fail (Adafactor)
    or be wrong without an error. What optimizers and code of your own must not do is to compute a number from this
    rank's part: under tp and shard=True, ``p.grad.norm().full_tensor()`` is the norm of the full gradient, on every
    rank; under pp, a sum over ``model.parameters()`` is that of this rank's stages; ``clip_grad_value_`` is right
    everywhere, :func:`clip_grad_norm_` computes the norm of all gradients.

    Args:
        optimizer: an optimizer of the parameters of the model that :func:`auto_model` returned. Under pp, a rank may
            hold none of those that it steps: it takes an empty list there.
        checks: whether to refuse an optimizer that does not do the same to parts of a model as to the full one, or of
            which that cannot be found out. Default: True.

    Returns:
        torch.optim.Optimizer: the optimizer to step.

    Raises:
        ValueError: if it holds parameters that :func:`auto_model` has replaced, steps parts of weights differently
            from full ones, or has the names of a tied weight in groups of different options under pp.
    """
    check_optimizer(optimizer)
    adapt_optimizer(optimizer, checks)
    return idist.auto_optim(optimizer)
