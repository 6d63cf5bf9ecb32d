"""Where engines and loaders are, and the rule of what happens again when a run goes on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import ignite.distributed as idist
from ignite.engine import Engine, Events

from ignite_ddl.checkpoint.values import encoded
from ignite_ddl.data import Pass, ShardedDataLoader
from ignite_ddl.engine import MeshEngine, in_a_step

__all__ = ["Resume", "load_engine", "load_loader", "resumed_engine", "take_runs"]


def take_runs(objects: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Where each engine is in its run, and where it is in each loader, by their names.

    Raises:
        ValueError: in the middle of a step.
    """
    loaders = {key: thing for key, thing in objects.items() if isinstance(thing, ShardedDataLoader)}
    runs = {}
    for name, engine in objects.items():
        if not isinstance(engine, Engine):
            continue
        state, waiting = engine.state, getattr(engine, "resume", None)
        if isinstance(state.dataloader, Pass):
            raise ValueError(
                f"{name!r} should run on the loader itself, so that it can go on, not on an iterator over it"
            )
        run = dict(waiting.run) if waiting else _progress(engine) | {"metrics": _encodable(state.metrics)}
        if not waiting and (run["ended"] or state.epoch_length is None):  # EPOCH_COMPLETED may be next
            run |= _encodable({"output": state.output})
        ends = bool(engine.should_terminate_single_epoch)
        places = {key: loader.state_dict(engine, new_pass=ends) for key, loader in loaders.items()}
        run["positions"] = {key: place for key, place in places.items() if place is not None}
        if not waiting:
            run["reads"] = next((key for key, loader in loaders.items() if loader is state.dataloader), None)
            trains, running = bool(getattr(engine, "steps", {})), engine._dataloader_iter is not None
            run["weight"] = [trains, running, state.iteration]
            steps = {id(step.model): step for step in getattr(engine, "steps", {}).values() if step.open}
            windows = {key: steps[id(thing)] for key, thing in objects.items() if id(thing) in steps}
            run["windows"] = {key: [step.expected, step.counted] for key, step in windows.items()}
        runs[name] = run
    return runs


def _progress(engine: Engine) -> dict[str, Any]:
    """As ``MeshEngine.progress``; of Ignite's own engine by what it fired last."""
    if isinstance(engine, MeshEngine):
        return engine.progress()
    state, last = engine.state, engine.last_event_name
    if last in (Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.EXCEPTION_RAISED):
        raise in_a_step(state.iteration)
    done = state.iteration % (state.epoch_length or state.iteration + 1)
    if done and engine._dataloader_iter is None and isinstance(state.dataloader, ShardedDataLoader):
        raise ValueError(
            "a run of Ignite's own Engine that was left in mid-epoch has lost its place in the loader: save in one of "
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


def resumed_engine(objects: Mapping[str, Any], runs: Mapping[str, Any]) -> str | None:
    """The engine whose run goes on: one that trains, rather one that was running, and no evaluator."""
    trainers = [key for key, thing in objects.items() if isinstance(thing, Engine) and not hasattr(thing, "repeats")]
    return max(trainers, key=lambda key: runs.get(key, {}).get("weight", []), default=None)


def load_engine(engine: Engine, state: dict[str, Any], run: dict[str, Any] | None) -> dict[str, Any]:
    """Loads Ignite's state and what Ignite derives wrongly from it: the epoch. Returns the run."""
    known = state["epoch_length"] is not None  # otherwise Ignite 0.5.5 refuses the state
    engine.load_state_dict(state if known else state | {"iteration": 0})
    engine.state.iteration = state["iteration"]
    if run is None:  # a checkpoint of before
        done = state["iteration"] % state["epoch_length"] if known else state["iteration"]
        run = {"epoch": engine.state.epoch + bool(done), "iterations": done, "begun": done > 0, "ended": False}
    engine.state.epoch = run["epoch"] - (run["begun"] and not run["ended"])
    return run


def load_loader(
    key: str,
    loader: ShardedDataLoader,
    state: dict[str, Any],
    moved: bool,
    engines: Mapping[str, Engine],
    runs: Mapping[str, Any],
) -> None:
    """Hands each position to who was there: a MeshEngine, or the next loop."""
    places = [(engine, runs[name].get("positions", {}).get(key)) for name, engine in engines.items() if name in runs]
    places = [(engine, place) for engine, place in places if place is not None]
    if not runs and engines:
        places = [(next(iter(engines.values())), state)]
    for engine, place in places or [(None, state)]:
        reader = engine if isinstance(engine, MeshEngine) else None
        loader.load_state_dict(place, reader)
        if moved:
            loader.reseed(reader)


class Resume:
    """What happens again when a loaded run goes on, since Ignite begins it as it begins a new one.

    Ignite fires STARTED, and in mid-epoch EPOCH_STARTED, once more: their handlers may reset what was loaded (running
    averages, schedulers, seeds), so it is loaded again after them. An EPOCH_COMPLETED that was still to come is fired
    after STARTED. A run that is complete does nothing but STARTED and COMPLETED, where Ignite would begin it anew.

    Args:
        engine: the engine, loaded.
        run: where it is, of :func:`take_runs`.
        loader: the loader that it has to run on; None: any.
        again: functions that load the states.
        waiting: models that have gradients of an open window.
    """

    runs_last = 1  # before a checkpoint

    def __init__(
        self,
        engine: Engine,
        run: dict[str, Any],
        loader: ShardedDataLoader | None,
        again: list[Callable[[], Any]],
        waiting: list[Any],
    ) -> None:
        self.run, self.loader, self.again, self.waiting = run, loader, again, waiting
        self.iteration = engine.state.iteration
        for step in getattr(engine, "steps", {}).values():
            step.open = any(step.model is model for model in waiting)
        engine.resume = self
        engine.add_event_handler(Events.STARTED, self, True)
        engine.add_event_handler(Events.EPOCH_STARTED, self, False)
        left = engine._internal_run_generator
        if engine.interrupt_resume_enabled and (left is None or left.gi_frame is None):
            engine._internal_run_generator = engine._internal_run_as_gen()

    def __call__(self, engine: Engine, started: bool) -> None:
        if engine.resume is not self:
            return
        run, state = self.run, engine.state
        if state.iteration != self.iteration:  # the user has set max_epochs to None: a new run
            engine.resume = None
            if isinstance(state.dataloader, ShardedDataLoader):
                state.dataloader.readers.pop(engine, None)
            return
        if self.loader is not None and state.dataloader is not self.loader:
            raise ValueError(f"run should get the loader that the interrupted run was reading, {run['reads']!r}")
        for load in self.again:
            load()
        state.metrics.update(run.get("metrics", {}))
        state.output = run.get("output")
        in_mid_epoch = run["begun"] and not run["ended"]
        if started:
            engine._init_iter = run["iterations"] if in_mid_epoch else 0
            if in_mid_epoch:
                return
        engine.resume, self.again = None, []
        if run["begun"] and run["ended"]:
            engine.fire_event(Events.EPOCH_COMPLETED)
        elif started and engine._is_done(state) and idist.get_rank() == 0:
            warnings.warn(
                f"the run that was loaded is complete after {state.epoch} epochs and {state.iteration} iterations: "
                "nothing is left to do; give a larger max_epochs, or set state.max_epochs to None to begin anew",
                stacklevel=2,
            )
