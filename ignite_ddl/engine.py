"""An Ignite ``Engine`` for a mesh: which rows a step has, where a run is, and what handlers of it do on each rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import ignite
import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, State
from ignite.handlers import FastaiLRFinder, TerminateOnNan, TimeLimit
from ignite.handlers.base_logger import BaseOutputHandler
from ignite.handlers.tqdm_logger import ProgressBar
from ignite.metrics import Metric
from torch import nn

from ignite_ddl.arguments import COUNT, FUNCTION, a, takes
from ignite_ddl.audit import check_same_rows, warn_of_same_batch
from ignite_ddl.checks.guards import check_handler
from ignite_ddl.checks.optimizer_steps import (
    check_weights_stepped_by_hand,
    refusing_unweighted_steps,
    without_gradients,
)
from ignite_ddl.collectives import gathered, meet, on_any_rank
from ignite_ddl.context.sequence import NOT_SHARED, tokens_kept
from ignite_ddl.data import ShardedDataLoader
from ignite_ddl.errors import reason_in_a_run
from ignite_ddl.idist_view import on_this_rank, warning_of_sums_over_peers
from ignite_ddl.lent_row import without_rows
from ignite_ddl.loader_pass import Pass
from ignite_ddl.mesh import get_mesh
from ignite_ddl.metrics import NOT_REDUCED, completing, over_data_parallel
from ignite_ddl.parts import PartError
from ignite_ddl.step import TrainingStep
from ignite_ddl.uneven_rows import forget_uneven_rows, warn_of_padded_rows


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
        self.unweighted: set[int] = set()  # ids of their parameters that got new ones since, by a plain backward()
        self.in_backward = False  # whether it is inside of ddl.forward_backward, or the trainer's
        self.has_warned = False  # of batches that dp ranks prepare unlike
        self.knows_limits = False  # whether ranks have compared their limits in this epoch
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
        engine.weighted, engine.unweighted, engine.in_backward = [], set(), False
        engine.updates, engine.updated = engine.updates + engine.updated, False
        if get_mesh().world_size == 1:
            return process_function(engine, batch)
        if hasattr(engine, "is_evaluator") and engine.rows is not None and not engine.knows_limits:
            engine._compare_limits()
        if engine.counts_rows and engine.rows is None and engine.state.iteration == 1:
            warn_of_same_batch(get_mesh(), batch)
        with refusing_unweighted_steps(engine):
            if engine.rows is not None and engine.rows[0] == 0:
                output = process_function(engine, batches.filler)
                output = without_rows(output) if engine.removes_lent_rows else output
            else:
                output = process_function(engine, batch)
        engine.n_batches += 1
        if engine.n_batches & (engine.n_batches - 1) == 0:
            check_weights_stepped_by_hand(engine)
        return output

    def run_step(self, step: TrainingStep, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        plan = getattr(self._dataloader_iter, "plan", None)  # of the loader of ddl.auto_dataloader
        step.updates, step.order, state = self.updates, getattr(plan, "digest", 0) % 2**20, self.state
        n_epochs, n_iterations = state.max_epochs or 0, getattr(state, "max_iters", None)  # one of them is None
        step.ends_run = state.iteration in (n_epochs * (state.epoch_length or 0), n_iterations)
        if get_mesh().world_size > 1 and not self.knows_limits:
            self._compare_limits()
        if self.unweighted:
            self.unweighted -= set(map(id, without_gradients(step.model)))
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
            with warning_of_sums_over_peers(lambda: self._in_step), tokens_kept():
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
            self._pass = None if self._dataloader_iter is None else self._pass
        elif event_name is Events.EPOCH_STARTED:
            iteration, done = self.state.iteration, self._init_iter  # of this epoch, in runs before
            if done is None and self._dataloader_iter is None:  # as Ignite is going to count them
                done = iteration % (self.state.epoch_length or iteration + 1)
            self._in_epoch, self._epoch_began, self.knows_limits = True, iteration - (done or 0), False
        of_all_ranks = event_name is Events.ITERATION_COMPLETED and self.rows is not None
        with completing(self.state.output if of_all_ranks else None):
            super()._fire_event(event_name, *args, **kwargs)

    def _compare_limits(self) -> None:
        """In the first step of an epoch, in which all ranks are: limits of some ranks alone must not ask the others."""
        self.knows_limits = True
        limits = [handler for handler in self._handlers() if isinstance(handler, _EndTogether)]
        of_ranks = gathered(torch.tensor([len(limits)], device=idist.device()), None)
        for limit in limits:
            limit.is_everywhere = all(int(n) == len(limits) for n in of_ranks)

    def _handlers(self) -> list[Callable]:
        """All handlers; those of an event with a filter, such as every=2, are in a function of Ignite's."""
        of_events = [handler for handlers in self._event_handlers.values() for handler, *_ in handlers]
        return [handler._parent() if hasattr(handler, "_parent") else handler for handler in of_events]

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
            handler = _EndTogether(handler)
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


class _EndTogether:
    """Ends the run where any rank's clock or output says so: if some ranks ended it, the others would wait for them.

    It equals the handler of which it is made, by which Ignite finds what to remove.
    """

    def __init__(self, limit: TimeLimit | TerminateOnNan) -> None:
        self.limit, self.is_everywhere = limit, False

    def __call__(self, engine: MeshEngine) -> None:
        self.limit(engine)
        if self.is_everywhere and on_any_rank(engine.should_terminate):
            engine.terminate()

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.limit

    __hash__ = object.__hash__


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
