"""The positions of engines and loaders, and what is repeated when a run resumes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ignite.distributed as idist
from ignite.engine import Engine, Events

from ignite_ddl.checkpoint.kinds import Kinds
from ignite_ddl.checkpoint.values import encoded
from ignite_ddl.data import ShardedDataLoader
from ignite_ddl.engine import MeshEngine, mid_step_error
from ignite_ddl.loader_pass import Pass


def capture_runs(kinds: Kinds) -> dict[str, dict[str, Any]]:
    """The position of each engine in its run and in each loader, by their names.

    Raises:
        ValueError: in the middle of a step.
    """
    return {name: _capture_run(name, engine, kinds) for name, engine in kinds.engines.items()}


def _capture_run(name: str, engine: Engine, kinds: Kinds) -> dict[str, Any]:
    state, resume = engine.state, getattr(engine, "resume", None)
    if isinstance(state.dataloader, Pass):
        raise ValueError(f"{name!r} should run on the loader itself, so that it can resume, not on an iterator over it")
    if resume:  # it was loaded, and has not run since
        run = dict(resume.run)
    else:
        steps = getattr(engine, "steps", {})
        open_steps = {key: steps[id(model)] for key, model in kinds.models.items() if id(model) in steps}
        run = _progress(engine) | {
            "metrics": _encodable(state.metrics),
            "batches": _length(state.dataloader),
            "reads": next((key for key, loader in kinds.loaders.items() if loader is state.dataloader), None),
            "precedence": [bool(steps), engine._dataloader_iter is not None, state.iteration],
            "windows": {key: [step.expected, step.counted] for key, step in open_steps.items() if step.open},
        }
        if run["ended"] or state.epoch_length is None:  # EPOCH_COMPLETED may be next
            run |= _encodable({"output": state.output})
    new_pass = bool(engine.should_terminate_single_epoch)
    positions = {key: loader.state_dict(engine, new_pass=new_pass) for key, loader in kinds.loaders.items()}
    return run | {"positions": {key: position for key, position in positions.items() if position is not None}}


def _progress(engine: Engine) -> dict[str, Any]:
    """As ``MeshEngine.progress``; of Ignite's plain engine by its last event."""
    if isinstance(engine, MeshEngine):
        return engine.progress()
    state, last = engine.state, engine.last_event_name
    if last in (Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.EXCEPTION_RAISED):
        raise mid_step_error(state.iteration)
    done = state.iteration % (state.epoch_length or state.iteration + 1)
    if done and engine._dataloader_iter is None and isinstance(state.dataloader, ShardedDataLoader):
        raise ValueError(
            "a run of Ignite's Engine that was left in mid-epoch has lost its position in the loader: save in one of "
            "its handlers, or run a ddl.MeshEngine"
        )
    ended = done == 0 and last == Events.ITERATION_COMPLETED
    begun = done > 0 or ended or last == Events.EPOCH_STARTED
    return {"epoch": state.epoch, "iterations": done, "begun": begun, "ended": ended}


def _encodable(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        with contextlib.suppress(ValueError):
            encoded(value, name)
            kept[name] = value
    return kept


def resumed_engine(engines: Mapping[str, Engine], runs: Mapping[str, Any]) -> str | None:
    """The engine to resume: a trainer, not an evaluator; preferably one that was running."""
    trainers = [key for key, engine in engines.items() if not hasattr(engine, "is_evaluator")]
    return max(trainers, key=lambda key: runs[key]["precedence"], default=None)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of an iterable dataset
        return None


def load_engine(engine: Engine, state: dict[str, Any], run: Mapping[str, Any], loader: Any) -> None:
    """Loads Ignite's state, with the epoch that Ignite derives wrongly from it, and the epoch_length of the loader."""
    # Without an epoch_length, Ignite 0.5.5 refuses the state.
    engine.load_state_dict(state if state["epoch_length"] is not None else state | {"iteration": 0})
    engine.state.iteration = state["iteration"]
    engine.state.epoch = run["epoch"] - (run["begun"] and not run["ended"])
    was, now = run.get("batches"), _length(loader)
    if now is None or was is None or now == was or was != state["epoch_length"] or (run["begun"] and not run["ended"]):
        return
    engine.state.epoch_length, engine.state.iteration = now, engine.state.epoch * now
    if idist.get_rank() == 0:
        warnings.warn(
            f"to_load[{run['reads']!r}] has {now} batches, but had {was} when the run was saved: its epochs have {now} "
            f"iterations from now on, and it goes on at iteration {engine.state.iteration} instead of "
            f"{state['iteration']}, since Ignite counts as if each epoch had as many",
            stacklevel=2,
        )


def load_loader(
    key: str,
    loader: ShardedDataLoader,
    state: dict[str, Any],
    of_other_rank: bool,
    engines: Mapping[str, Engine],
    runs: Mapping[str, Any],
) -> None:
    """Gives each position to the consumer that had it: a MeshEngine, or the next loop."""
    found = {name: runs[name]["positions"].get(key) for name in engines}
    positions = [(engines[name], position) for name, position in found.items() if position is not None]
    for engine, position in positions or [(None, state)]:
        consumer = engine if isinstance(engine, MeshEngine) else None
        loader.load_state_dict(position, consumer)
        if of_other_rank:
            loader.reseed(consumer)


class Resume:
    """Applies loaded state again where Ignite's handlers have reset it, since Ignite begins a resumed run as a new one.

    Ignite fires STARTED, and in mid-epoch EPOCH_STARTED, once more: their handlers may reset what was loaded (running
    averages, schedulers, seeds), so what held before them is set again after them: what was loaded, or what a script
    has changed since. An EPOCH_COMPLETED that was still to come is fired after STARTED. A run that is complete does
    nothing but STARTED and COMPLETED, where Ignite would begin it anew.

    Args:
        engine: the engine, loaded.
        run: its position, of :func:`capture_runs`.
        loader: the loader that it has to run on; None: any.
        capture_resettable: takes the states that those handlers may reset, and returns what sets them again. Default
            None: none.
        accumulating: models that have gradients of an open window of gradient accumulation.
    """

    def __init__(
        self,
        engine: Engine,
        run: dict[str, Any],
        loader: ShardedDataLoader | None,
        capture_resettable: Callable[[], Callable[[], None]] | None = None,
        accumulating: Sequence[Any] = (),
    ) -> None:
        self.run, self.loader, self.capture, self.accumulating = run, loader, capture_resettable, accumulating
        self.iteration = engine.state.iteration
        engine.state.metrics.update(run["metrics"])
        engine.state.output = run.get("output")
        for step in getattr(engine, "steps", {}).values():
            step.open = any(step.model is model for model in accumulating)
        engine.resume = self
        engine.add_event_handler(Events.STARTED, self._before_started)
        of_started = engine._event_handlers[Events.STARTED]
        of_started.sort(key=lambda each: each[0] != self._before_started)  # Ignite's own engine does not sort them
        engine.add_event_handler(Events.STARTED, self._after_started)
        engine.add_event_handler(Events.EPOCH_STARTED, self._after_epoch_started)
        left = engine._internal_run_generator
        if engine.interrupt_resume_enabled and (left is None or left.gi_frame is None):
            engine._internal_run_generator = engine._internal_run_as_gen()

    def _before_started(self, engine: Engine) -> None:
        if self._is_waiting(engine):
            self.metrics, self.output = dict(engine.state.metrics), engine.state.output
            self.apply_resettable = self.capture and self.capture()

    def _after_started(self, engine: Engine) -> None:
        if not self._is_waiting(engine):
            return
        self._reapply(engine)
        state, run = engine.state, self.run
        if run["begun"] and not run["ended"]:
            engine._init_iter = run["iterations"]  # EPOCH_STARTED comes
            return
        engine._init_iter = 0
        self._finish(engine)
        if not run["begun"] and engine._is_done(state) and idist.get_rank() == 0:
            warnings.warn(
                f"the run that was loaded is complete after {state.epoch} epochs and {state.iteration} iterations: "
                "nothing is left to do; give a larger max_epochs, or set state.max_epochs to None to begin anew",
                stacklevel=2,
            )

    def _after_epoch_started(self, engine: Engine) -> None:
        if self._is_waiting(engine):
            self._reapply(engine)
            self._finish(engine)

    _before_started.runs_last = -1
    _after_started.runs_last = _after_epoch_started.runs_last = 1  # before a checkpoint

    def _is_waiting(self, engine: Engine) -> bool:
        """Whether this is the run that was loaded, and it has not continued yet."""
        if engine.resume is not self:
            return False
        if engine.state.iteration == self.iteration:
            return True
        engine.resume = None  # the user has set max_epochs to None: a new run
        if isinstance(engine.state.dataloader, ShardedDataLoader):
            engine.state.dataloader.consumers.pop(engine, None)
        return False

    def _reapply(self, engine: Engine) -> None:
        state = engine.state
        if self.loader is not None and state.dataloader is not self.loader:
            raise ValueError(f"run should get the loader that the interrupted run was reading, {self.run['reads']!r}")
        if self.apply_resettable is not None:
            self.apply_resettable()
        state.metrics.update(self.metrics)
        state.output = self.output

    def _finish(self, engine: Engine) -> None:
        engine.resume = self.capture = self.apply_resettable = None
        if self.run["begun"] and self.run["ended"]:
            engine.fire_event(Events.EPOCH_COMPLETED)
