"""Ignite's supervised trainer and evaluator on a mesh, and one step of them for an update function of one's own.

Losses are means over the rows of the global batch, gradients are clipped by their global norm, and metrics reduce over
the ranks that had different rows. So handlers that depend on these values decide the same on every rank.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Events, _prepare_batch
from ignite.metrics import Metric
from torch import nn
from torch.amp import GradScaler
from torch.utils._pytree import tree_leaves

from ignite_ddl.arguments import COUNT, FLAG, FUNCTION, MODULE, NUMBER, OPTIMIZER, a, having, takes
from ignite_ddl.audit import check_evaluated_rows, check_same_rows, check_tokens_are_independent
from ignite_ddl.checks.fingerprint import fingerprint_of
from ignite_ddl.checks.guards import check_optimizer
from ignite_ddl.checks.mixing import check_prepare_batch, check_tokens_of, check_transform
from ignite_ddl.checks.replicas import make_alike_for_evaluation
from ignite_ddl.checks.unlike_results import CURE, unlike_results
from ignite_ddl.clipping import MAX_NORM, clip, parameters_of_others
from ignite_ddl.context.sequence import full_sequences, shard_prepared
from ignite_ddl.data_parallel import refuse_in_a_round, without_calls_of_models
from ignite_ddl.divisor import DIVISOR
from ignite_ddl.engine import MeshEngine
from ignite_ddl.lent_row import without_rows
from ignite_ddl.loader_pass import Pass
from ignite_ddl.mesh import get_mesh
from ignite_ddl.optim import adapt_optimizer
from ignite_ddl.pipeline.local_stages import PipelineStages, Stages, call, on_some_ranks, stages_of
from ignite_ddl.precision import AMP_MODE, ScaledOptimizer, autocast_for, make_scaler
from ignite_ddl.step import TrainingStep
from ignite_ddl.structure import full_tensors, n_rows


def _is_device(value: Any) -> bool:
    return isinstance(value, str | torch.device | int) and torch.device(value) is not None


FITS = {
    "model": MODULE,
    "optimizer": OPTIMIZER,
    "device": a("a device of torch", _is_device),
    "amp_mode": AMP_MODE,
    "loss_divisor": DIVISOR,
    "max_norm": MAX_NORM,
    **dict.fromkeys(("loss_fn", "prepare_batch", "model_transform", "output_transform", "model_fn"), FUNCTION),
    **dict.fromkeys(("non_blocking", "deterministic", "checks", "last"), FLAG),
}


@takes(FITS, scaler=FLAG | having("a GradScaler", "scale", "step", "update"), gradient_accumulation_steps=COUNT)
def create_supervised_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable = _prepare_batch,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any, torch.Tensor], Any] | None = None,
    deterministic: bool = False,
    amp_mode: str | None = None,
    scaler: bool | GradScaler = False,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[nn.Module, Any], Any] = call,
    *,
    max_norm: float | None = None,
    loss_divisor: str | Callable[[Any], Any] | None = None,
    checks: bool = True,
) -> MeshEngine:
    """Ignite's ``create_supervised_trainer`` on a mesh.

    Requirements on a mesh: run the trainer on the loader of ``ddl.auto_dataloader`` itself; ``loss_fn`` is a mean over
    rows, or ``loss_divisor`` gives its divisor; under pp, each tensor of ``x`` and ``y`` has a row for each sample. A
    row of the output depends on that row of the input alone, except for BatchNorm, which normalises over the rows of a
    dp rank or a microbatch, as in DDP, where BatchNorm1d refuses a single row; its statistics are those of dp rank 0.

    Args:
        model: what ``ddl.auto_model`` returned.
        optimizer: what ``ddl.auto_optim`` returned.
        loss_fn: takes the output and the targets of some rows and returns their mean loss.
        device: the device of batches, default ``idist.device()``.
        non_blocking: as in Ignite.
        prepare_batch: as in Ignite: ``(batch, device, non_blocking)`` to ``(x, y)``. Over cp it gets full sequences, as
            does ``engine.state.batch`` then, and each rank its tokens of ``x`` and ``y``. Default: Ignite's.
        model_transform: as in Ignite: the model's output to the input of ``loss_fn``.
        output_transform: as in Ignite: ``(x, y, y_pred, loss)`` to ``engine.state.output``; ``loss`` is the mean
            over the global batch, ``y_pred`` the output for this dp rank's rows. A rank without rows calls it with
            none; where it has no value of none (an error, NaN), with the row that it was lent. Under pp, it runs on the
            rank with the last stage, and its result is sent to the other pp ranks. Default: ``loss.item()``.
        deterministic: whether cuDNN chooses deterministic algorithms, as in Ignite. Rows and workers' random numbers
            are the same in each run in any case. Default: False.
        amp_mode: mixed precision by autocast: "amp" (float16 on CUDA, bfloat16 on CPU), "bfloat16" or "float16".
            Default None: none. With ``shard=True`` weights are gathered in their own dtype; to gather them in another
            one, give ``mp_policy`` to ``ddl.auto_model`` instead.
        scaler: whether to scale losses by a GradScaler, which is then ``engine.state.scaler``, or a GradScaler. All
            ranks skip a step if a gradient of any of them is not finite. Default: False.
        gradient_accumulation_steps: iterations per optimizer step, default 1. The gradient is that of one batch with
            the rows of all these iterations, also in one process (Ignite's is the mean of their means); a loss that is
            a sum is divided by the number of iterations, as in Ignite. Gradients are reduced over dp in the last
            iteration, or under pp in each, because torch's schedules do so.
        model_fn: as in Ignite: takes the model and ``x``, returns the output. Not under pp.
        max_norm: clips the gradients that the optimizer steps, of all ranks, by their global 2-norm. Default None: no
            clipping. The norm before clipping is ``engine.state.grad_norm``.
        loss_divisor: the divisor of the loss of some rows: "rows", "sum" (no divisor), or a function from their targets
            to a number, such as ``lambda y: (y != 0).sum()``, or 1 at least if the loss divides by that. Default None:
            torch's losses for classes and ``ddl.cross_entropy`` are recognised with ``ignore_index``, ``weight`` and
            ``reduction``; another loss has to be a mean over rows, which is checked by calling it with parts of a
            batch: in each of the first 16 steps, every 17th and the last one, until that was conclusive, and where
            targets are smaller or larger than
            before. What these calls change is put back: attributes and
            buffers of objects, modules and models, variables of its closure, globals, defaults, generators of random
            numbers; not files, iterators, and lists or tensors of more than 65536 entries. For a loss that uses
            something else than rows of the output, such as a loss that the model returns or a gradient by its input,
            the model runs with these parts; under pp or cp, it has to be declared. What is declared is compared in the
            same steps, where losses of some rows can be computed. "local" is not: the mean, weighted by rows, of what
            each rank and microbatch computes from its own rows, another number than that of one process where rows meet
            in the loss.
        checks: whether steps check for errors that would otherwise be silent; :mod:`ignite_ddl.audit` lists them.
            Default: True.

    Returns:
        MeshEngine: the trainer; its ``state.output``, the loss, is the same on every rank.

    Raises:
        ValueError: if ``gradient_accumulation_steps`` is not a positive integer, ``max_norm`` is not positive,
            ``amp_mode`` is unknown, or the optimizer has no parameter of the model; in a step, if the mesh does not
            support a batch, the loss is a DTensor, or tp ranks have different gradients of a replicated weight.

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
    check_optimizer(optimizer, model)
    adapt_optimizer(optimizer, checks)
    device = idist.device() if device is None else device
    step, autocast = TrainingStep(model, model_transform, checks, model_fn), autocast_for(amp_mode, device)
    step.optimizer = optimizer
    prepare = functools.partial(prepare_batch, device=device, non_blocking=non_blocking)
    grad_scaler = make_scaler(scaler, amp_mode, device)
    scaled = None if grad_scaler is None else ScaledOptimizer(optimizer, grad_scaler)

    def update(engine: MeshEngine, batch: Any) -> Any:
        iteration = engine.state.iteration
        if (iteration - 1) % gradient_accumulation_steps == 0:
            optimizer.zero_grad()
            step.open, step.expected, step.counted = False, 0.0, 0.0  # perhaps of a window that a run's end has cut
        last = iteration % gradient_accumulation_steps == 0
        fingerprint = fingerprint_of(model)
        if fingerprint is None or not fingerprint.is_training():
            model.train()
        is_checked = step.audit is not None and not step.audit.step
        escape = ", or, for each rank's rows, pass checks=False" if is_checked else None
        x, y = _prepared(engine, prepare, batch, escape)
        n_earlier = 0 if step.audit is None else step.audit.step
        if n_earlier and n_earlier & (n_earlier + 1) == 0:  # steps 2, 4, 8, …
            _warn_of_unlike_batches(engine, prepare, batch)
        scale = 1.0 if scaled is None else scaled.loss_scale(device)
        window = gradient_accumulation_steps
        y_pred, loss = engine.run_step(step, engine.rows, x, y, loss_fn, loss_divisor, scale, last, window, autocast)
        if last:
            _step_optimizer(engine, model, optimizer, max_norm, scaled)
        if output_transform is None:
            return loss.item()
        return _output(engine, step.stages, output_transform, x, y, y_pred, loss)

    trainer = MeshEngine(update)
    trainer.removes_lent_rows = False
    trainer.reads_full_sequences = prepare_batch is not _prepare_batch
    trainer.steps[id(model)] = step
    if scaler is True:
        trainer.state.scaler = grad_scaler
    if deterministic:
        trainer.add_event_handler(Events.STARTED, _choose_deterministic_algorithms)
    return trainer


def _step_optimizer(
    engine: MeshEngine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None,
    scaled: ScaledOptimizer | None,
) -> None:
    if scaled is not None:
        scaled.unscale()
    if max_norm is not None:
        engine.state.grad_norm = float(clip(model, max_norm, optimizer, parameters_of_others(optimizer, model)))
    if scaled is not None:
        scaled.step_if_finite()
    else:
        optimizer.step()


@takes(FITS, engine=a("the ddl.MeshEngine that runs the update function", MeshEngine), scale=NUMBER)
def forward_backward(
    engine: MeshEngine,
    model: nn.Module,
    x: Any,
    y: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    loss_divisor: str | Callable[[Any], Any] | None = None,
    scale: float = 1.0,
    last: bool = True,
    amp_mode: str | None = None,
) -> tuple[Any, torch.Tensor]:
    """Forward, loss and backward of one batch with the mesh's weighting, in an update function of your own.

    On every mesh, the gradients are those of one process with the global batch: weighted by rows, reduced over dp,
    summed over stages that share a weight. ``create_supervised_trainer`` does the same. Call it in the update function
    of a :class:`MeshEngine`, on every rank and in the same order, once for each model and loss that gives gradients;
    then step the optimizer. ``loss_fn`` may call other models (a GAN's discriminator), except under pp.

    Args:
        engine: the engine that runs the update function.
        model: what ``ddl.auto_model`` returned.
        x: this rank's rows of the batch.
        y: their targets.
        loss_fn: takes the model's output and the targets of some rows and returns their mean loss.
        loss_divisor: as in :func:`create_supervised_trainer`.
        scale: factor of the loss in the backward pass, such as 1 / number of accumulated batches. Default: 1.
        last: whether the model's optimizer steps next; False if another call adds to these gradients before, until
            which ``p.grad`` is not the gradient of all ranks, and on some meshes None. Default: True.
        amp_mode: as in :func:`create_supervised_trainer`.

    Returns:
        tuple: this rank's output (None where the last stage of a pipeline is elsewhere), and the loss of the global
        batch, a tensor that is the same on every rank.

    Raises:
        ValueError: if ``engine`` is not a MeshEngine, or the mesh does not support the batch or the loss.

    Examples:
        .. code-block:: python

            import ignite.distributed as idist
            import torch
            import ignite_ddl as ddl

            def training(local_rank):
                torch.manual_seed(0)
                data = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.randn(10, 1))
                model = ddl.auto_model(torch.nn.Linear(3, 1))
                optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

                def update(engine, batch):
                    x, y = (tensor.to(idist.device()) for tensor in batch)
                    optimizer.zero_grad()
                    _, loss = ddl.forward_backward(engine, model, x, y, torch.nn.functional.l1_loss)
                    optimizer.step()
                    return loss.item()

                return ddl.MeshEngine(update).run(ddl.auto_dataloader(data, batch_size=7)).output

            with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                first, second = parallel.run(training)
            assert first == second and abs(first - training(0)) < 1e-6
    """
    step = engine.steps.get(id(model))
    if step is None:
        step = engine.steps[id(model)] = TrainingStep(model)
    autocast, batches = autocast_for(amp_mode, idist.device()), engine._dataloader_iter
    rows = batches.rows_in(x) if isinstance(batches, Pass) else engine.rows
    return engine.run_step(step, rows, x, y, loss_fn, loss_divisor, scale, last, autocast=autocast)


def _are_metrics(value: Any) -> bool:
    return isinstance(value, Mapping) and all(hasattr(metric, "attach") for metric in value.values())


@takes(FITS, metrics=a("a dict from names to metrics", _are_metrics))
def create_supervised_evaluator(
    model: nn.Module,
    metrics: dict[str, Metric] | None = None,
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable = _prepare_batch,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any], Any] = lambda x, y, y_pred: (y_pred, y),
    amp_mode: str | None = None,
    model_fn: Callable[[nn.Module, Any], Any] = call,
) -> MeshEngine:
    """Ignite's ``create_supervised_evaluator`` on a mesh: no gradients, metrics the same on every rank.

    Args:
        model: what ``ddl.auto_model`` returned.
        metrics: names to Ignite metrics, attached unchanged.
        device: the device of batches, default ``idist.device()``.
        non_blocking: as in Ignite.
        prepare_batch: as in Ignite: ``(batch, device, non_blocking)`` to ``(x, y)``. Over cp it gets full sequences, as
            does ``engine.state.batch`` then, and each rank its tokens of ``x`` and ``y``. Default: Ignite's.
        model_transform: as in Ignite.
        output_transform: as in Ignite: ``(x, y, y_pred)`` to ``engine.state.output``. A rank without rows calls it with
            none; where it has no value of none (an error, NaN), with the row that it was lent. Under pp, it runs on the
            rank with the last stage, and its result, which should be small, is sent to the other pp ranks. Default
            ``(y_pred, y)``.
        amp_mode: as in :func:`create_supervised_trainer`.
        model_fn: as in :func:`create_supervised_trainer`.

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
    stages = stages_of(model, model_fn)
    prepare = functools.partial(prepare_batch, device=device, non_blocking=non_blocking)
    autocast = autocast_for(amp_mode, device)
    is_first, runs = True, 0

    transformed = functools.partial(_both_transforms, model_transform, output_transform)

    def evaluate(engine: MeshEngine, batch: Any) -> Any:
        nonlocal is_first, runs
        refuse_in_a_round(model, "the evaluator runs")
        model.eval()
        if engine.state.iteration == 1 and engine.rows is not None and get_mesh().world_size > 1:
            runs += 1
            is_checked = runs & (runs - 1) == 0  # runs 1, 2, 4, 8, …
            make_alike_for_evaluation(model, checks=is_checked)
            if is_checked:
                _warn_of_unlike_batches(engine, prepare, batch)
        with torch.no_grad():
            x, y = _prepared(engine, prepare, batch, "" if is_first else None)
            if engine.rows is None and engine.state.iteration == 1:  # not a loader of ddl.auto_dataloader
                check_same_rows(get_mesh(), x, y)
            with autocast:
                check_tokens_are_independent(model, stages, x, repeat=False)
                y_pred = stages.forward_only(x, checks=True)
                if engine.rows is not None or get_mesh().pp_size > 1:
                    check_evaluated_rows(model, stages, x)
                if is_first and engine.rows is not None and y_pred is not None:
                    names, given = "model_transform or output_transform", (x, y, y_pred)
                    if get_mesh().dp_size > 1:
                        check_transform(names, transformed, given, n_rows(x), "in a metric")
                    check_tokens_of(names, transformed, given)
                is_first = False
                if y_pred is not None:
                    y_pred = model_transform(y_pred)
            return _output(engine, stages, output_transform, x, y, y_pred)

    evaluator = MeshEngine(evaluate)
    evaluator.removes_lent_rows = False
    evaluator.reads_full_sequences = prepare_batch is not _prepare_batch
    evaluator.is_evaluator = True
    for name, metric in (metrics or {}).items():
        metric.attach(evaluator, name)
    return evaluator


def _both_transforms(model_transform: Callable, output_transform: Callable, given: tuple[Any, Any, Any]) -> Any:
    x, y, y_pred = given
    return output_transform(x, y, model_transform(y_pred))


def _choose_deterministic_algorithms() -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def _prepared(engine: MeshEngine, prepare: Callable, batch: Any, escape: str | None) -> tuple[Any, Any]:
    """The inputs and targets of a batch, of which a cp rank has its tokens.

    Args:
        engine: the engine.
        prepare: takes the batch.
        batch: this dp rank's rows; with full sequences where the engine reads these.
        escape: the end of the sentence that refuses a function that mixes rows; None: it was checked before.
    """
    is_sharded = not engine.reads_full_sequences or engine.rows is None
    with contextlib.nullcontext() if is_sharded else full_sequences():
        if escape is not None and engine.reads_full_sequences:
            check_prepare_batch(prepare, batch, engine.rows, escape)
        x, y = prepare(batch)
    if not is_sharded and get_mesh().cp_size > 1:
        x, y = shard_prepared((x, y), batch)
    _check_rows(x, batch)
    return x, y


def _warn_of_unlike_batches(engine: MeshEngine, prepare: Callable, batch: Any) -> None:
    """Warns once if dp ranks prepare the same rows unlike; all ranks call it."""
    is_own = engine.reads_full_sequences and engine.rows is not None
    if engine.has_warned or not is_own or get_mesh().dp_size == 1:
        return
    with full_sequences():
        engine.has_warned = unlike_results(prepare, batch, engine.rows[0])
    if engine.has_warned and idist.get_rank() == 0:
        warnings.warn(f"prepare_batch makes something else of the same rows on other dp ranks. {CURE}", stacklevel=2)


def _check_rows(x: Any, batch: Any) -> None:
    if not n_rows(x) and n_rows(batch):
        raise ValueError(
            "prepare_batch leaves no row of this rank's part of the batch: leave rows out of the dataset (torch's "
            "Subset), or keep them, with targets that do not count in loss_fn (ignore_index)"
        )
    if not n_rows(x):
        raise ValueError(
            "this rank's batch has no rows: run the engine on the loader of ddl.auto_dataloader itself, which fills "
            "such a batch, and not on an iterator over it"
        )


def _output(engine: MeshEngine, stages: Stages, transform: Callable, *values: Any) -> Any:
    # Ignite's metrics expect plain tensors. Cut logits are gathered only if output_transform returns them.
    with on_some_ranks() if isinstance(stages, PipelineStages) else contextlib.nullcontext():
        output = full_tensors(_transformed(engine, transform, values)) if stages.is_last else None
    return stages.from_last_stage(output)


def _transformed(engine: MeshEngine, transform: Callable, values: tuple[Any, ...]) -> Any:
    """What a transform makes of this rank's rows; of the lent one, if it has no value (an error, NaN) of no rows."""
    if engine.rows is not None and engine.rows[0] == 0:
        with contextlib.suppress(Exception), without_calls_of_models():  # which would be one more
            output = transform(*(without_rows(value) for value in values))
            numbers = [leaf for leaf in tree_leaves(output) if isinstance(leaf, float) or getattr(leaf, "ndim", 1) == 0]
            if all(number == number for number in numbers):
                return output
        return without_rows(transform(*values))
    return transform(*values)
