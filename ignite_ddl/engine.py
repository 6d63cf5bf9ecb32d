"""Ignite's supervised trainer and evaluator, whose state is the same on every rank of a mesh.

Losses are means over the rows of the global batch, gradients are clipped by their one global norm, and metrics
reduce over the ranks that saw different rows: so handlers that decide on values decide the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.engine import Engine, _prepare_batch
from ignite.handlers.base_logger import BaseOutputHandler
from ignite.handlers.tqdm_logger import ProgressBar
from ignite.metrics import Metric
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from ignite_ddl.arguments import check_count
from ignite_ddl.data import ShardedDataLoader, without_rows
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.metrics import over_data_parallel
from ignite_ddl.pipeline.one_stage import OneStage, as_stages, gradient_sync
from ignite_ddl.pipeline.pipeline import Pipeline
from ignite_ddl.tensor.gradients import WholeWeights, redistribute_gradient

__all__ = ["MeshEngine", "clip_grad_norm_", "create_supervised_evaluator", "create_supervised_trainer"]


class MeshEngine(Engine):
    """An Ignite ``Engine`` that makes every attached metric reduce over the data-parallel group.

    Of the progress bars that all ranks attach, rank 0's is shown. Use it in place of ``ignite.engine.Engine`` for
    an update function of your own.
    """

    def add_event_handler(self, event_name: Any, handler: Callable, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(handler, "__self__", None)
        if isinstance(owner, Metric):
            over_data_parallel(owner)
        # What ProgressBar.attach adds; a handler of the user's that is given the bar runs on every rank.
        draws = isinstance(handler, BaseOutputHandler) and any(isinstance(arg, ProgressBar) for arg in args)
        if draws and idist.get_rank() > 0:
            handler = _show_nothing
        return super().add_event_handler(event_name, handler, *args, **kwargs)


def _show_nothing(*_: Any) -> None:
    """In place of a progress bar."""


def create_supervised_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable = _prepare_batch,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any, torch.Tensor], Any] | None = None,
    gradient_accumulation_steps: int = 1,
    max_norm: float | None = None,
) -> MeshEngine:
    """Ignite's ``create_supervised_trainer`` on a mesh.

    What a mesh asks for: run it on the loader of ``ddl.auto_dataloader`` itself, which knows the rows of each
    rank (a generator around it does not, and losses would be means of means); let ``loss_fn`` be a mean over rows
    (``ignore_index`` makes it a mean over those that are left, on each dp rank by itself); under pp ``x`` is one
    tensor. BatchNorm normalises over a dp rank's rows, or a microbatch's, and refuses a single one, as in DDP; the
    running statistics are those of dp rank 0.

    Args:
        model: what ``ddl.auto_model`` returned.
        optimizer: what ``ddl.auto_optim`` returned.
        loss_fn: takes the output and the targets of some rows and returns their mean loss.
        device: where batches go, default ``idist.device()``.
        non_blocking: as in Ignite.
        prepare_batch: as in Ignite: ``(batch, device, non_blocking)`` to ``(x, y)``.
        model_transform: as in Ignite: the model's output to what ``loss_fn`` takes.
        output_transform: as in Ignite: ``(x, y, y_pred, loss)`` to ``engine.state.output``; ``loss`` is the mean
            over the global batch. Under pp it runs where the last stage is and its result is sent to the other
            pp ranks. Default: ``loss.item()``. What it returns of ``y_pred`` is this dp rank's.
        gradient_accumulation_steps: iterations per optimizer step, default 1. Gradients are reduced over dp in
            the last; under pp in each, because torch's schedules do.
        max_norm: clips the gradients of all ranks by their one global 2-norm. Default None: no clipping. The norm
            before clipping is ``engine.state.grad_norm``.

    Returns:
        MeshEngine: the trainer; its ``state.output``, the loss, is the same on every rank.

    Raises:
        ValueError: if ``gradient_accumulation_steps`` is not a positive integer, ``max_norm`` is not positive, or
            the optimizer has none of the model's parameters; and by a step, if a batch does not suit the mesh,
            the loss is a DTensor, or tp ranks have different gradients of a weight that each holds whole.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def training(local_rank):
                torch.manual_seed(0)
                data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
                loader = ddl.auto_dataloader(data, batch_size=5)
                model = ddl.auto_model(torch.nn.Linear(3, 1))
                optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
                trainer = ddl.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss, max_norm=1.0)
                trainer.run(loader, max_epochs=2)
                return trainer.state.output

            with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                first, second = parallel.run(training)
            assert first == second
            assert abs(first - training(0)) < 1e-5
    """
    check_count("gradient_accumulation_steps", gradient_accumulation_steps)
    if max_norm is not None:
        _check_max_norm(max_norm)
    _check_optimizer(optimizer, model)
    mesh = get_mesh()
    device = idist.device() if device is None else device
    stages = as_stages(model)
    whole_weights = WholeWeights(mesh)

    def checked_loss(y_pred: Any, y: Any) -> torch.Tensor:
        return _plain_loss(loss_fn, y_pred, y)

    def update(engine: Engine, batch: Any) -> Any:
        iteration = engine.state.iteration
        if (iteration - 1) % gradient_accumulation_steps == 0:
            optimizer.zero_grad()
        last = iteration % gradient_accumulation_steps == 0
        model.train()
        here, in_all = _rows(engine)
        x, y = prepare_batch(_filled(engine, batch), device=device, non_blocking=non_blocking)
        _check_rows(x)
        # dp averages gradients: with this weight the average is the mean over the rows of the global batch.
        weight = 1.0 if in_all is None else here * mesh.dp_size / in_all
        with gradient_sync(stages.local_stages(), last):
            share = weight / gradient_accumulation_steps
            y_pred, loss = stages.step(x, y, checked_loss, model_transform, share)
        loss = _mean_loss(loss, weight, mesh, stages)
        if last:
            stages.sum_shared_gradients()
            if mesh.tp_size > 1:
                for parameter in model.parameters():
                    redistribute_gradient(parameter)
                whole_weights.check(model)
            if max_norm is not None:
                engine.state.grad_norm = float(clip_grad_norm_(model, max_norm))
            optimizer.step()
        if output_transform is None:
            return loss.item()
        if here == 0:
            x, y = prepare_batch(batch, device=device, non_blocking=non_blocking)
            y_pred = without_rows(y_pred)
        return _output(stages, lambda: output_transform(x, y, y_pred, loss))

    return MeshEngine(update)


def create_supervised_evaluator(
    model: nn.Module,
    metrics: dict[str, Metric] | None = None,
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable = _prepare_batch,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any], Any] = lambda x, y, y_pred: (y_pred, y),
) -> MeshEngine:
    """Ignite's ``create_supervised_evaluator`` on a mesh: no gradients, metrics the same on every rank.

    Args:
        model: what ``ddl.auto_model`` returned.
        metrics: names to Ignite metrics, attached unchanged.
        device: where batches go, default ``idist.device()``.
        non_blocking: as in Ignite.
        prepare_batch: as in Ignite: ``(batch, device, non_blocking)`` to ``(x, y)``.
        model_transform: as in Ignite.
        output_transform: as in Ignite: ``(x, y, y_pred)`` to ``engine.state.output``. Under pp it runs where the
            last stage is and its result is sent to the other pp ranks: return little there. Default
            ``(y_pred, y)``.

    Returns:
        MeshEngine: the evaluator.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl
            from ignite.metrics import Accuracy

            def evaluation(local_rank):
                rows = torch.eye(3).repeat(4, 1)[:10]                      # 10 rows of 3 classes
                data = torch.utils.data.TensorDataset(rows, torch.zeros(10, dtype=torch.long))
                evaluator = ddl.create_supervised_evaluator(torch.nn.Identity(), {"accuracy": Accuracy()})
                return evaluator.run(ddl.auto_dataloader(data, batch_size=4)).metrics["accuracy"]

            with ddl.Parallel(backend="gloo", nproc_per_node=4, dp=2, tp=2) as parallel:
                assert parallel.run(evaluation) == [0.4] * 4               # 4 of the 10 rows are of class 0
    """
    device = idist.device() if device is None else device
    stages = as_stages(model)

    def evaluate(engine: Engine, batch: Any) -> Any:
        model.eval()
        here, _ = _rows(engine)
        with torch.no_grad():
            x, y = prepare_batch(_filled(engine, batch), device=device, non_blocking=non_blocking)
            _check_rows(x)
            y_pred = stages.forward_only(x)
            if y_pred is not None:
                y_pred = model_transform(y_pred)
            if here == 0:
                x, y = prepare_batch(batch, device=device, non_blocking=non_blocking)
                y_pred = without_rows(y_pred)
            return _output(stages, lambda: output_transform(x, y, y_pred))

    evaluator = MeshEngine(evaluate)
    for name, metric in (metrics or {}).items():
        metric.attach(evaluator, name)
    return evaluator


def _plain_loss(loss_fn: Callable, y_pred: Any, y: Any) -> torch.Tensor:
    """torch's own losses fail, or give a DTensor, where the logits are cut by vocabulary."""
    advice = "of logits that are cut by vocabulary take ddl.cross_entropy as loss_fn"
    try:
        loss = loss_fn(y_pred, y)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            raise ValueError(
                f"loss_fn should take what the model returns, but fails on a DTensor: {advice}"
            ) from error
        raise
    if isinstance(loss, DTensor):
        raise ValueError(
            f"loss_fn should return a plain tensor, but gave a DTensor, {loss.placements}: {advice}"
        )
    return loss


def _mean_loss(
    loss: torch.Tensor | None, weight: float, mesh: Mesh, stages: Pipeline | OneStage
) -> torch.Tensor:
    """The mean over the rows of the global batch, on every rank, in one reduction."""
    if mesh.world_size == 1:
        return loss
    if loss is None:
        loss = torch.zeros((), device=idist.device())
    part = loss.to(torch.float64) * (weight / mesh.dp_size)
    stages.reduce_loss(part)
    return part


def _rows(engine: Engine) -> tuple[int, int | None]:
    loader = engine.state.dataloader
    return loader.rows if isinstance(loader, ShardedDataLoader) else (1, None)


def _filled(engine: Engine, batch: Any) -> Any:
    """A rank without rows computes one that is not its own, with weight 0: its peers need it in collectives."""
    loader = engine.state.dataloader
    if isinstance(loader, ShardedDataLoader) and loader.rows[0] == 0:
        return loader.filler
    return batch


def _check_rows(x: Any) -> None:
    if isinstance(x, torch.Tensor) and x.ndim and not len(x):
        raise ValueError(
            "this rank's batch has no rows: run the engine on the loader of ddl.auto_dataloader itself, which fills "
            "such a batch, and not on something made of it"
        )


def _check_max_norm(max_norm: float) -> None:
    if not max_norm > 0:  # nor is NaN
        raise ValueError(f"max_norm should be positive, but given {max_norm!r}")


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """An optimizer that was made before the model was cut holds weights that nobody trains."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained and not any(id(p) in stepped for p in trained):
        raise ValueError(
            "optimizer should hold parameters of the model, but holds none of them: make it after ddl.auto_model, "
            "of what that returned"
        )


def _output(stages: Pipeline | OneStage, transform: Callable[[], Any]) -> Any:
    return stages.from_last_stage(tree_map(_whole, transform()) if stages.is_last else None)


def _whole(leaf: Any) -> Any:
    """Logits that tp has cut, as Ignite's metrics know them; of what an output_transform leaves out nothing is sent."""
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clips by the 2-norm of all gradients of all ranks: shards add up, copies count once.

    Args:
        model: what ``ddl.auto_model`` returned.
        max_norm: the largest norm to leave, positive.

    Returns:
        Tensor: the norm before clipping, the same on every rank.

    Raises:
        ValueError: if ``max_norm`` is not positive.
    """
    _check_max_norm(max_norm)
    mesh = get_mesh()
    total = torch.zeros((), dtype=torch.float64, device=idist.device())
    cut = False
    gradients = []
    stages = as_stages(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        redistribute_gradient(parameter)
        local, copies = _local_and_copies(parameter.grad, mesh)
        gradients.append(local)
        cut = cut or copies < mesh.dp_size * mesh.tp_size
        if stages.counts(name):
            total += local.double().square().sum() / copies
    if mesh.world_size > 1 and (cut or mesh.pp_size > 1):
        dist.all_reduce(total)
    else:
        total *= mesh.dp_size * mesh.tp_size
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in gradients:
        local.mul_(scale.to(local.device))
    return norm


def _local_and_copies(grad: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, int]:
    """A gradient's local part, and how many ranks of a stage hold that same part."""
    copies = mesh.dp_size * mesh.tp_size
    if not isinstance(grad, DTensor):
        return grad, copies
    for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
        if not placement.is_replicate():  # Shard, or _StridedShard where FSDP2 cuts what tp has cut
            copies //= size
    return grad.to_local(), copies
