"""A model on a mesh: first all arguments are checked without communication, then the layers are made and cut."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.arguments import AMOUNTS, COUNT, FLAG, MODULE, OPTIMIZER, WORLD, a, each, takes
from ignite_ddl.audit import remember
from ignite_ddl.compat import BELONGS_TO_A_MODEL, MODELS, attach_metrics_over, replicate
from ignite_ddl.guards import (
    check_layers,
    check_optimizer,
    check_parameter_hooks,
    hand_on_attributes,
    mark_trained,
    refuse_copies,
    refuse_ignites_checkpoint,
    refuse_second_derivatives,
    refuse_whole_states,
)
from ignite_ddl.lazy import LazyLayers, materialize
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.metrics import over_data_parallel
from ignite_ddl.optim import adapt_optimizer
from ignite_ddl.pipeline.cut import Cut, add_submodule, cut_into_stages
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.pipeline.over_dp import reshard, share_buffers
from ignite_ddl.pipeline.pipeline import Pipeline
from ignite_ddl.pipeline.schedules import NAME, ROWS, microbatches_for
from ignite_ddl.pipeline.trace import TracedLayer
from ignite_ddl.regions import check_regions_once
from ignite_ddl.tensor.plan import apply_plan, check_plan
from ignite_ddl.tensor.random import share_random_stream

__all__ = ["auto_model", "auto_optim", "check_model"]


FITS = {
    "model": MODULE,
    "tensor_plan": a(
        'a dict from globs of module names to styles, or "auto"',
        lambda plan: isinstance(plan, Mapping) or plan == "auto",
    ),
    "schedule": NAME,
    "n_microbatches": WORLD,
    "split": each(COUNT, "a number of layers for each stage"),
    "costs": AMOUNTS,
    **dict.fromkeys(("dp", "pp", "tp"), WORLD),
}


@takes(FITS, shard=FLAG, checks=FLAG, mp_policy=a("a MixedPrecisionPolicy", MixedPrecisionPolicy))
def auto_model(
    model: nn.Module,
    tensor_plan: Mapping[str, ParallelStyle] | Literal["auto"] | None = None,
    *,
    schedule: str = "1f1b",
    n_microbatches: int | None = None,
    split: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    shard: bool = False,
    mp_policy: MixedPrecisionPolicy | None = None,
    checks: bool = True,
    **kwargs: Any,
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
        shard: shard parameters, gradients and optimizer state over dp (FSDP2). Default False. Each unit is gathered
            before its forward and backward pass and freed after it. A unit is a transformer block (an element of an
            ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict`` that has a sibling of the same shapes), or a
            module that contains no such list. Tied weights, and parameters of the model itself, are one more unit,
            which is gathered for the whole forward pass. Do not read a weight without calling its unit: it is sharded
            then.
        mp_policy: with ``shard=True``, the dtypes in which FSDP2 gathers weights and reduces gradients, and that of
            activations: ``torch.distributed.fsdp.MixedPrecisionPolicy``. Without ranks over which to shard, it has no
            effect. Default: those of the parameters.
        checks: whether the first forward pass, in training or not, checks the code between layers that are cut over
            tp, and, under pp, that layers keep no state from one pass to the next. Default: True.
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
    mesh = get_mesh()
    for_ddp = mesh.dp_size == mesh.world_size and not (shard and mesh.world_size > 1)
    if kwargs and not for_ddp:
        raise ValueError(f"{', '.join(kwargs)} are for DDP, but the mesh is {mesh!r}, shard={shard}: leave them out")
    if mp_policy is not None and not shard:
        raise ValueError("mp_policy is for shard=True: give amp_mode to ddl.create_supervised_trainer instead")
    if mesh.world_size > 1:
        check_layers(model, mesh, for_ddp)
    styles, cut = _check(model, tensor_plan, mesh.pp_size, mesh.tp_size, schedule, n_microbatches, split, costs)
    if mesh.world_size > 1:
        check_parameter_hooks(model.named_parameters(), mesh, for_ddp, before=True)
    if not for_ddp:
        _copy_weights_of_rank_0(model)  # except those of lazy layers

    def stages_with(name: str) -> int:
        """The number of this rank's stages that hold the module of that name."""
        if cut is None:
            return 1
        own = (cut.layers[stage] for stage in cut.stages_of(mesh.pp_rank))
        return sum(any(f"{name}.".startswith(f"{layer}.") for layer in layers) for layers in own)

    for names in LazyLayers(model).make(mesh, is_held=stages_with):
        alone = sum(map(stages_with, names)) == 1  # else it is copied before it is sharded
        _cut_layer(model, names, styles, mesh, shard and alone, mp_policy)
    if for_ddp:
        materialize(model)  # with NaN: DDP sends weights when it wraps
        if mesh.world_size > 1:
            mark_trained(model.parameters(), frozen_too=False)
        if mesh.world_size > 1 and not any(p.requires_grad for p in model.parameters()):
            _copy_weights_of_rank_0(model)  # DDP refuses it
            return model
        return _watched(_with_plain_names(idist.auto_model(model, **kwargs)), mesh, shard)
    if mesh.tp_size * mesh.pp_size > 1:
        share_random_stream(mesh)
    whole = dict(model.named_parameters(remove_duplicate=False))
    if cut is not None:
        model = Pipeline(model, cut, mesh, shard, checks)
    if mesh.tp_size > 1:
        apply_plan(model, styles, mesh.device_mesh["tp"])
    stages = stages_of(model).local_stages()
    for stage in stages:
        _over_dp(stage, mesh, shard, mp_policy)
        refuse_copies(stage)
        if checks and mesh.tp_size > 1:
            check_regions_once(stage)
    hand_on_attributes(whole, model)
    for stage in stages:
        averaged = mesh.dp_size == 1 or any(p.requires_grad for p in stage.parameters())
        mark_trained(stage.parameters(), frozen_too=averaged)
    if mesh.tp_size * mesh.pp_size > 1:
        attach_metrics_over(over_data_parallel)
    refuse_ignites_checkpoint(model)
    refuse_whole_states(model)
    return _watched(model, mesh, shard)


def _with_plain_names(model: nn.Module) -> nn.Module:
    """DDP's parameters by their names in the uncut model, as on every other mesh, without "module."."""
    if isinstance(model, DistributedDataParallel):
        model.named_parameters, model.named_buffers = model.module.named_parameters, model.module.named_buffers
    return model


def _watched(model: nn.Module, mesh: Mesh, shard: bool) -> nn.Module:
    """Notes what the model is now: later changes would not reach what reduces its gradients."""
    if mesh.world_size > 1:
        for parameter in model.parameters():
            setattr(parameter, BELONGS_TO_A_MODEL, True)
        MODELS.add(model)
        remember(model, shard)
    return model


@takes(FITS, batches=each(ROWS, "numbers of rows"))
def check_model(
    model: nn.Module,
    tensor_plan: Mapping[str, ParallelStyle] | Literal["auto"] | None = None,
    *,
    dp: int = 1,
    pp: int = 1,
    tp: int = 1,
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
        dp: size of the mesh's data-parallel axis.
        pp: number of pipeline ranks.
        tp: number of ranks that share each layer.
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
    _, cut = _check(model, tensor_plan, pp, tp, schedule, n_microbatches, split, costs)
    if cut is not None:
        for rows in batches:
            for here in {rows // dp, -(-rows // dp)} - {0}:  # of a dp rank
                microbatches_for(here, cut.n_microbatches, schedule, pp)


def _check(
    model: nn.Module,
    tensor_plan: Mapping[str, ParallelStyle] | Literal["auto"] | None,
    pp_size: int,
    tp_size: int,
    schedule: str,
    n_microbatches: int | None,
    split: Sequence[int] | None,
    costs: Sequence[float] | None,
) -> tuple[dict[str, ParallelStyle], Cut | None]:
    """The first phase: decides and checks everything, without making, changing or sending anything."""
    if tp_size > 1 and any(isinstance(module, TracedLayer) for module in model.modules()):
        raise ValueError(
            "a model from ddl.trace_layers cannot be cut over tp, since tracing leaves operations in place of modules: "
            "use pp and dp, or make the model an nn.Sequential"
        )
    if tp_size > 1 and tensor_plan is None and idist.get_rank() == 0:
        warnings.warn(
            f"the mesh has tp={tp_size}, but tensor_plan is None: every tp rank computes the full model; give a plan, "
            'or tensor_plan="auto" for a model of transformers, or tensor_plan={} if that is meant',
            stacklevel=4,
        )
    with LazyLayers(model).shapes_only():
        styles = check_plan(model, tensor_plan or {}, tp_size)
        cut = cut_into_stages(model, pp_size, schedule, n_microbatches, split, costs) if pp_size > 1 else None
    return styles, cut


def _cut_layer(
    model: nn.Module,
    names: list[str],
    styles: dict[str, ParallelStyle],
    mesh: Mesh,
    shard: bool,
    mp_policy: MixedPrecisionPolicy | None,
) -> None:
    """Cuts a layer that was just made, before the next one takes memory."""
    layer = model.get_submodule(names[0])
    layer.to(idist.device())
    whole = dict(layer.named_parameters(remove_duplicate=False))
    if mesh.tp_size > 1:
        holder = nn.Module()
        for name in names:
            add_submodule(holder, name, layer)
        inside = tuple(f"{name}." for name in names)
        own = {name: styles.pop(name) for name in list(styles) if f"{name}.".startswith(inside)}
        apply_plan(holder, own, mesh.device_mesh["tp"])
    if shard and mesh.dp_size > 1 and any(True for _ in layer.parameters()):
        _fully_shard(layer, mesh, mp_policy)
    hand_on_attributes(whole, layer)


def _over_dp(module: nn.Module, mesh: Mesh, shard: bool, mp_policy: MixedPrecisionPolicy | None) -> nn.Module:
    if mesh.dp_size == 1:
        return module
    if mesh.pp_size == 1:  # a Pipeline does it itself, once per batch
        module.register_forward_pre_hook(lambda root, _: share_buffers(root, mesh))
    if not any(p.requires_grad for p in module.parameters()):
        return module
    if shard:
        refuse_second_derivatives(module, type(module).__name__)
        return _resharded_after_evaluation(_fully_shard(module, mesh, mp_policy))
    # Not DistributedDataParallel, which loses parameters of models with DTensors and of pipelines.
    return _resharded_after_evaluation(replicate(module, mesh.device_mesh["dp"]))


def _fully_shard(module: nn.Module, mesh: Mesh, mp_policy: MixedPrecisionPolicy | None) -> nn.Module:
    # Under pp, weights stay gathered until the backward pass ends: one gather per batch, not per microbatch.
    how = {"mesh": mesh.device_mesh["dp"], "reshard_after_forward": mesh.pp_size == 1}
    how["mp_policy"] = mp_policy or MixedPrecisionPolicy()
    for unit in _gathered_alone(module):
        fully_shard(unit, **how)
    return fully_shard(module, **how)  # the remaining parameters


def _resharded_after_evaluation(module: nn.Module) -> nn.Module:
    """Frees FSDP2's unsharded parameters, which it keeps without a backward pass, for an optimizer made later."""
    if get_mesh().pp_size == 1:  # a Pipeline does it itself, after its last microbatch
        module.register_forward_hook(lambda root, *_: None if torch.is_grad_enabled() else reshard(root))
    return module


_LISTS = nn.Sequential | nn.ModuleList | nn.ModuleDict


def _gathered_alone(root: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 gathers one at a time, by the rule that :func:`auto_model` states."""
    passed, units = [root], []
    for module in passed:  # the list grows meanwhile
        shapes = {child: tuple(p.shape for p in child.parameters()) for child in module.children()}
        alike = Counter(shapes.values() if isinstance(module, _LISTS) else ())
        for child in (child for child in shapes if shapes[child]):
            block = alike[shapes[child]] > 1 and not isinstance(child, _LISTS)
            made_late = isinstance(child, FSDPModule)  # a lazy layer, already sharded
            known = units if block or made_late or not _holds_layers(child) else passed
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


def _holds_layers(module: nn.Module) -> bool:
    return any(isinstance(m, _LISTS) and any(True for _ in m.parameters()) for m in module.modules())


def _copy_weights_of_rank_0(model: nn.Module) -> None:
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(idist.device()))
    with torch.no_grad():
        for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()] if not t.is_meta}.values():
            # A channels_last weight is not contiguous: it could be neither sent nor sharded.
            tensor.data = tensor.contiguous()
            dist.broadcast(tensor, src=0)


@takes(optimizer=OPTIMIZER, checks=FLAG)
def auto_optim(optimizer: torch.optim.Optimizer, *, checks: bool = True, **kwargs: Any) -> torch.optim.Optimizer:
    """``idist.auto_optim``: the optimizer itself on gloo and NCCL, adapted on Horovod and XLA; every rank calls it.

    Where the model is cut, small weights are stepped for a moment, cut and whole, by another optimizer of the same
    class and options: one that computes norms over a weight or over all weights may be right (Muon), fail (Adafactor)
    or be wrong without an error. What optimizers and code of your own must not do is to compute a number from this
    rank's part: under tp and shard=True, ``p.grad.norm().full_tensor()`` is the norm of the whole gradient, on every
    rank; under pp, a sum over ``model.parameters()`` is that of this rank's stages; ``clip_grad_value_`` is right
    everywhere, :func:`clip_grad_norm_` computes the norm of all gradients.

    Args:
        optimizer: an optimizer of the parameters of the model that :func:`auto_model` returned.
        checks: whether to refuse an optimizer that does not do the same to parts of a model as to the whole, or of
            which that cannot be found out. Default: True.
        kwargs: those of ``idist.auto_optim``.

    Returns:
        torch.optim.Optimizer: the optimizer to step.

    Raises:
        ValueError: if it holds parameters that :func:`auto_model` has replaced, steps parts of weights differently
            from whole ones, or has the names of a tied weight in groups of different options under pp.
    """
    check_optimizer(optimizer)
    adapt_optimizer(optimizer, checks)
    return idist.auto_optim(optimizer, **kwargs)
