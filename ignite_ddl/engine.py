"""Ignite's supervised trainer and evaluator, with the same state on every rank of a mesh.

Losses are means over the rows of the global batch, gradients are clipped by their global norm, and metrics reduce over
the ranks that had different rows. So handlers that depend on these values decide the same on every rank.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import ignite
import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, State, _prepare_batch
from ignite.handlers import FastaiLRFinder, TerminateOnNan, TimeLimit
from ignite.handlers.base_logger import BaseOutputHandler
from ignite.handlers.tqdm_logger import ProgressBar
from ignite.metrics import Metric
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ignite_ddl.arguments import COUNT, FLAG, FUNCTION, MODULE, NUMBER, OPTIMIZER, a, having, takes
from ignite_ddl.audit import check_evaluated_rows, check_same_rows, check_tokens_are_independent, warn_of_same_batch
from ignite_ddl.clipping import MAX_NORM, clip, parameters_of_others
from ignite_ddl.collectives import gathered_values, meet, on_any_rank
from ignite_ddl.compat import BELONGS_TO_A_MODEL
from ignite_ddl.context.sequence import NOT_SHARED, full_sequences, shard_prepared
from ignite_ddl.data import Pass, ShardedDataLoader, without_rows
from ignite_ddl.data_parallel import LOCAL_ROUNDS, refuse_in_a_round
from ignite_ddl.divisor import DIVISOR
from ignite_ddl.errors import reason_in_a_run
from ignite_ddl.guards import check_handler, check_optimizer
from ignite_ddl.mesh import get_mesh
from ignite_ddl.metrics import NOT_REDUCED, completing, on_this_rank, over_data_parallel, warning_of_sums_over_peers
from ignite_ddl.mixing import check_prepare_batch, check_tokens_of, check_transform
from ignite_ddl.optim import adapt_optimizer
from ignite_ddl.parts import PartError
from ignite_ddl.pipeline.local_stages import PipelineStages, Stages, call, on_some_ranks, stages_of
from ignite_ddl.pipeline.structure import full_tensors, n_rows
from ignite_ddl.precision import AMP_MODE, ScaledOptimizer, autocast_for, make_scaler
from ignite_ddl.replicas import digest, make_alike_for_evaluation
from ignite_ddl.step import TrainingStep
from ignite_ddl.uneven_rows import forget_uneven_rows, warn_of_padded_rows
from ignite_ddl.unlike_results import CURE, unlike_results


def _is_data(value: Any) -> bool:
    kind, has_rows = type(value), getattr(value, "ndim", 1) != 0 and not isinstance(value, type)
    return has_rows and (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__"))


WAIT_SECONDS = 60  # until every rank has ended its run early
_END_ALIKE = (
    "decide by what all ranks know, such as engine.state.output, or let one decide for all, by "
    "idist.broadcast(float(stop), src=0)"
)
_DATA = a("batches: a loader, or what can be iterated over", _is_data)


class MeshEngine(Engine):
    """An Ignite ``Engine`` for a mesh: metrics that are attached to it reduce over the data-parallel group.

    Use it in place of ``ignite.engine.Engine`` with an update function of your own that calls
    :func:`forward_backward`. With the loader of ``ddl.auto_dataloader``, a rank without rows gets one row of another
    rank, since its peers need it in collectives; this row has weight 0 and is removed from tensors of the output. What
    your function itself counts should leave it out: ``y[:engine.rows[0]]`` are the rows of this rank, and
    ``engine.rows[1]`` is their number on all ranks. Only rank 0 shows a progress bar.

    Args:
        process_function: as in Ignite: takes the engine and a batch, returns the output.

    Attributes:
        rows: ``(local, global)``, the numbers of rows of the current batch on this dp rank and on all dp ranks; None if
            the loader is not that of ``ddl.auto_dataloader``.
    """

    @takes(process_function=FUNCTION)
    def __init__(self, process_function: Callable[[MeshEngine, Any], Any]) -> None:
        super().__init__(process_function)
        self._process_function = functools.partial(self._process, process_function)
        self.rows: tuple[int, int] | None = None
        self.reads_full_sequences = False  # whether a loader leaves it to the engine to divide tokens among cp ranks
        self.removes_lent_rows = True  # from all tensors of an output; a trainer's or evaluator's has done so
        self.counts_rows = False  # whether a metric that is attached sums over ranks
        self.steps: dict[int, TrainingStep] = {}  # by id of the model
        self.optimizers: list[torch.optim.Optimizer] = []  # that have stepped
        self.weighted: list[nn.Module] = []  # models whose gradients of this batch are weighted by rows
        self.in_backward = False  # whether it is inside of ddl.forward_backward, or the trainer's
        self.has_warned = False  # of batches that dp ranks prepare unlike
        self.n_batches = 0  # of all runs
        self.updates, self.updated = 0, False  # earlier batches after which a model was stepped; whether this is one
        self.resume: Any = None  # what was loaded, until the run continues from there
        self._pass: Pass | None = None  # over the loader; also after the run, so that its position can be saved
        self._in_step, self._in_epoch = False, False
        self._broken_at: tuple[int, int] | None = None  # iteration and epoch in which a run has ended with an error
        self._epoch_began = 0  # after this iteration

    @staticmethod
    def _process(process_function: Callable, engine: MeshEngine, batch: Any) -> Any:
        batches = engine._dataloader_iter  # a handler may have read the same loader since
        engine.rows = None
        if isinstance(batches, Pass):
            engine.rows = batches.rows
            batches.begin_step()
        if get_mesh().cp_size > 1:
            if engine.rows is None:
                raise ValueError(NOT_SHARED)
            if batches.full_batch is not None:
                check_same_rows(get_mesh(), batches.full_batch, axes=("cp",))
        engine.weighted, engine.in_backward = [], False
        engine.updates, engine.updated = engine.updates + engine.updated, False
        if get_mesh().world_size == 1:
            return process_function(engine, batch)
        if engine.counts_rows and engine.rows is None and engine.state.iteration == 1:
            warn_of_same_batch(get_mesh(), batch)
        with _refusing_unweighted_steps(engine):
            if engine.rows is not None and engine.rows[0] == 0:
                output = process_function(engine, batches.filler)
                output = without_rows(output) if engine.removes_lent_rows else output
            else:
                output = process_function(engine, batch)
        engine.n_batches += 1
        if engine.n_batches & (engine.n_batches - 1) == 0:
            _check_weights_stepped_by_hand(engine)
        return output

    def _run_step(self, step: TrainingStep, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        plan = getattr(self._dataloader_iter, "plan", None)  # of the loader of ddl.auto_dataloader
        step.updates, step.order, state = self.updates, getattr(plan, "digest", 0) % 2**20, self.state
        n_epochs, n_iterations = state.max_epochs or 0, getattr(state, "max_iters", None)  # one of them is None
        step.ends_run = state.iteration in (n_epochs * (state.epoch_length or 0), n_iterations)
        self.in_backward = True
        output, loss = step(*args, **kwargs)
        self.in_backward = False
        self.weighted += step.models
        forget_uneven_rows()  # perhaps of an iterator over the loader of ddl.auto_dataloader: the step counts rows
        return output, loss

    @takes(data=_DATA, max_epochs=COUNT, max_iters=COUNT, epoch_length=COUNT)
    def run(
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> State:
        """As in Ignite; but a run that was loaded and is complete ends at once, where Ignite would begin it anew.

        Raises:
            ValueError: if the last run ended with an error in the middle of an epoch: Ignite would return at once.
        """
        place = self.state.iteration, self.state.epoch
        if self._broken_at == place and self.resume is None and self.state.max_epochs is not None:
            raise ValueError(
                f"the last run of this engine ended with an error in iteration {place[0]}, in the middle of epoch "
                f"{place[1]}, from where it cannot go on: load a checkpoint of it, or set its state.max_epochs to None "
                "to begin anew"
            )
        self._broken_at = None
        limit = {} if max_iters is None else {"max_iters": max_iters}
        if limit and "max_iters" not in inspect.signature(Engine.run).parameters:
            raise ValueError(
                f"max_iters is new in Ignite 0.5.5, but given {max_iters} with Ignite {ignite.__version__}: update "
                "Ignite, or give max_epochs and epoch_length"
            )
        try:
            with warning_of_sums_over_peers(lambda: self._in_step):
                state = super().run(data, max_epochs, epoch_length=epoch_length, **limit)
            for step in self.steps.values():
                if step.audit is not None:
                    step.audit.at_the_end(self.optimizers)
            return state
        except BaseException as error:
            self._internal_run_generator = None  # with which Ignite's next run would return at once
            if self._in_step and self.state.iteration <= 1:
                self.state.max_epochs = None  # the next run is the first
            elif self._in_epoch and not hasattr(self, "is_evaluator"):
                self._broken_at = self.state.iteration, self.state.epoch
            if (reason := reason_in_a_run(error)) is not None:
                raise ValueError(reason) from error
            if isinstance(error, RuntimeError) and "got mixed torch.Tensor and DTensor" in str(error):
                raise PartError(error) from error  # of a handler or of an update function of one's own
            of_layers = get_mesh().tp_size > 1 and "autograd.Function with functorch transforms" in str(error)
            if of_layers or isinstance(error, AttributeError) and "'_local_tensor'" in str(error):
                raise ValueError(
                    "torch.func (vmap, grad) cannot compute with weights that are cut over ranks: take a mesh of dp "
                    "alone, without shard=True"
                ) from error
            if self._in_epoch and self.rows is not None and self.rows[0] == 0:
                error.add_note(
                    f"This rank had none of the {self.rows[1]} rows of this batch, so that outputs are empty: let "
                    "handlers and metrics of other libraries skip them, or take drop_last=True"
                )
            raise
        finally:
            if self._pass is not None and self._dataloader_iter is None:
                self._pass.close()

    @takes(data=_DATA)
    def set_data(self, data: Any) -> None:
        """As in Ignite."""
        self.state.dataloader = data
        self._setup_dataloader_iter()

    def _setup_dataloader_iter(self) -> None:
        self._pass, loader = None, self.state.dataloader
        if isinstance(loader, ShardedDataLoader):
            self._dataloader_iter = self._pass = loader.pass_of(self)
        else:
            warn_of_padded_rows(loader)
            super()._setup_dataloader_iter()

    def _fire_event(self, event_name: Any, *args: Any, **kwargs: Any) -> None:
        if event_name is Events.GET_BATCH_COMPLETED or event_name is Events.ITERATION_STARTED:
            self._in_step = True
        elif event_name is Events.ITERATION_COMPLETED:
            self._in_step = False
        elif event_name is Events.EPOCH_COMPLETED:
            self._in_epoch = False
        elif event_name is Events.TERMINATE_SINGLE_EPOCH:
            self._in_epoch = self.should_terminate_single_epoch is True  # and not "skip_epoch_completed"
        elif event_name is Events.TERMINATE and self.steps and get_mesh().world_size > 1:
            meet("terminate() of a trainer", WAIT_SECONDS, _END_ALIKE)
        elif event_name is Events.STARTED:
            self._in_step = self._in_epoch = False
            self._pass = self._dataloader_iter and self._pass
        elif event_name is Events.EPOCH_STARTED:
            iteration, done = self.state.iteration, self._init_iter  # of this epoch, in runs before
            if done is None and self._dataloader_iter is None:  # as Ignite is going to count them
                done = iteration % (self.state.epoch_length or iteration + 1)
            self._in_epoch, self._epoch_began = True, iteration - (done or 0)
        of_all_ranks = event_name is Events.ITERATION_COMPLETED and self.rows is not None
        with completing(self.state.output if of_all_ranks else None):
            super()._fire_event(event_name, *args, **kwargs)

    def terminate_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As in Ignite; the next epoch has its own order of rows."""
        super().terminate_epoch(*args, **kwargs)
        if self._pass is not None:
            self._pass.end()

    def progress(self) -> dict[str, Any]:
        """The position in the run: the epoch, how many of its iterations are done, whether it has begun and ended.

        Raises:
            ValueError: in the middle of a step.
        """
        if self._in_step:
            raise mid_step_error(self.state.iteration)
        done, left = self.state.iteration - self._epoch_began, self.should_terminate_single_epoch
        begun, ended = self._in_epoch and left != "skip_epoch_completed", bool(left) or done == self.state.epoch_length
        return {"epoch": self.state.epoch, "iterations": done, "begun": begun, "ended": ended}

    def add_event_handler(self, event_name: Any, handler: Callable, *args: Any, **kwargs: Any) -> Any:
        check_handler(handler)
        owner = getattr(handler, "__self__", None)
        if isinstance(owner, Metric):
            over_data_parallel(owner)
            self.counts_rows = self.counts_rows or not isinstance(owner, NOT_REDUCED)
        if isinstance(handler, TimeLimit | TerminateOnNan):
            handler = functools.partial(_end_together, handler)
        if isinstance(owner, FastaiLRFinder) and handler == owner._log_lr_and_loss:
            handler = on_this_rank(owner, handler)
        # Handlers of ProgressBar.attach; a user's handlers of the bar run on every rank.
        shows = isinstance(handler, BaseOutputHandler) and any(isinstance(arg, ProgressBar) for arg in args)
        if shows and idist.get_rank() > 0:
            handler = _do_nothing
        added = super().add_event_handler(event_name, handler, *args, **kwargs)
        for handlers in self._event_handlers.values():  # checkpoints last: they hold what all others have done
            handlers.sort(key=_runs_last)
        return added


def _end_together(limit: TimeLimit | TerminateOnNan, engine: MeshEngine) -> None:
    """Ends the run where any rank's clock or output says so: if some ranks ended it, the others would wait for them."""
    limit(engine)
    if get_mesh().world_size > 1 and on_any_rank(engine.should_terminate):
        engine.terminate()


@contextlib.contextmanager
def _refusing_unweighted_steps(engine: MeshEngine) -> Iterator[None]:
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

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_gradients(engine: MeshEngine, optimizer: torch.optim.Optimizer) -> None:
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
        raise ValueError(
            "the optimizer steps, but the last ddl.forward_backward of its model had last=False, so that gradients "
            "are not reduced over ranks: pass last=True before a step"
        )
    if engine.rows is None or engine.rows[1] % get_mesh().dp_size == 0:
        return
    weighted = {id(parameter) for model in engine.weighted for parameter in model.parameters()}
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


def _check_weights_stepped_by_hand(engine: MeshEngine) -> None:
    """Raises a ValueError if dp ranks have stepped a weight unlike whose gradient is not reduced by us: one of no
    model, or of a model that no step of ours has run.
    """
    mesh, steps = get_mesh(), engine.steps.values()
    checks = any(step.audit is not None and step.local is None for step in steps)
    by_hand_alone = not steps and engine.rows is not None and bool(engine.optimizers) and mesh.ep_size == 1
    if mesh.dp_size == 1 or not (checks or by_hand_alone):
        return
    stepped = [p for optimizer in engine.optimizers for group in optimizer.param_groups for p in group["params"]]
    ours = {id(p) for step in steps for p in step.model.parameters()}
    own = [p for p in stepped if id(p) not in ours and not hasattr(p, LOCAL_ROUNDS) and not isinstance(p, DTensor)]
    own = [p for p in own if hasattr(p, BELONGS_TO_A_MODEL) or not by_hand_alone]
    of_models = [hasattr(p, BELONGS_TO_A_MODEL) for p in own]
    peers = gathered_values([digest(p.detach()) for p in own], get_mesh().dp_group)
    for parameter, of_model, *digests in zip(own, of_models, *peers, strict=False):
        if len(set(digests)) > 1:
            raise ValueError(
                f"an optimizer steps a weight of shape {tuple(parameter.shape)} of "
                f"{'a' if of_model else 'no'} model from ddl.auto_model, which "
                "differs between dp ranks now, since each has computed its gradient from its own rows: "
                + ("" if of_model else "put it into a module, give that to ddl.auto_model, and ")
                + "compute its gradient by ddl.forward_backward"
                + (", or sum what is written into grad over ranks (idist.all_reduce)" if of_model else "")
            )


def _has_closure(args: tuple, kwargs: dict) -> bool:
    return kwargs.get("closure") is not None or any(callable(given) for given in args[1:])  # args[0]: the optimizer


def mid_step_error(iteration: int) -> ValueError:
    """The error of a save in the middle of a step."""
    return ValueError(
        f"the step of iteration {iteration} has begun and is not complete: save in a handler of "
        "Events.ITERATION_COMPLETED or of a later event, or leave the trainer out of to_save"
    )


def _runs_last(handler: tuple) -> int:
    function = handler[0]
    parent = getattr(function, "_parent", None)  # of an event with a filter, such as every=2: a weak reference
    return getattr(parent() if parent is not None else function, "runs_last", 0)


def _do_nothing(*_: Any) -> None:
    """In place of a progress bar's handler."""


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
    prepare = functools.partial(prepare_batch, device=device, non_blocking=non_blocking)
    grad_scaler = make_scaler(scaler, amp_mode, device)
    scaled = None if grad_scaler is None else ScaledOptimizer(optimizer, grad_scaler)

    def update(engine: MeshEngine, batch: Any) -> Any:
        iteration = engine.state.iteration
        if (iteration - 1) % gradient_accumulation_steps == 0:
            optimizer.zero_grad()
        last = iteration % gradient_accumulation_steps == 0
        if not _is_training(model):
            model.train()
        is_checked = step.audit is not None and not step.audit.step
        escape = ", or, for each rank's rows, pass checks=False" if is_checked else None
        x, y = _prepared(engine, prepare, batch, escape)
        n_earlier = 0 if step.audit is None else step.audit.step
        if n_earlier and n_earlier & (n_earlier + 1) == 0:  # steps 2, 4, 8, …
            _warn_of_unlike_batches(engine, prepare, batch)
        scale = 1.0 if scaled is None else scaled.loss_scale(device)
        window = gradient_accumulation_steps
        y_pred, loss = engine._run_step(step, engine.rows, x, y, loss_fn, loss_divisor, scale, last, window, autocast)
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


def _is_training(module: nn.Module | None) -> bool:
    """Whether ``module.train()``, which sets each attribute anew, would change nothing."""
    if module is None:
        return True
    if isinstance(module, DistributedDataParallel):  # has a train() of its own, which calls the model's
        return module.training and _is_training(module.module)
    as_written = "train" not in vars(module) and type(module).train is nn.Module.train  # one's own may freeze layers
    return as_written and module.training and all(map(_is_training, module._modules.values()))


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
    return engine._run_step(step, rows, x, y, loss_fn, loss_divisor, scale, last, autocast=autocast)


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

    def transformed(x: Any, y: Any, y_pred: Any) -> Any:
        return output_transform(x, y, model_transform(y_pred))

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
                        check_transform(names, lambda given: transformed(*given), given, n_rows(x), "in a metric")
                    check_tokens_of(names, lambda given: transformed(*given), given)
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
        with contextlib.suppress(Exception):
            output = transform(*(without_rows(value) for value in values))
            numbers = [leaf for leaf in tree_leaves(output) if isinstance(leaf, float) or getattr(leaf, "ndim", 1) == 0]
            if all(number == number for number in numbers):
                return output
        return without_rows(transform(*values))
    return transform(*values)
