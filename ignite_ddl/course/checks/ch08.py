"""The checks of chapter 08: two timers that count the right part, and a wait cut into idle and communication."""

from unittest.mock import patch

import ignite.handlers.timing
from ignite.engine import Engine, Events
from ignite.handlers import Timer

from ignite_ddl.course.clock import HandClock, TimedBatches
from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import counted_on_ranks

BATCHES = 4

# Seconds of: a step, each batch, the first batch more, a handler before a step, one after it, around an epoch.
# Steps and batches take one second more in each further epoch, so that an epoch is not the mean of all.
RUNS = ((10, 30, 0, 0, 0, 0), (10, 20, 40, 0, 0, 8), (5, 1, 7, 2, 3, 4))


@exercise
def two_timers(function):
    for epochs, parts in zip((1, 2, 3), RUNS, strict=True):
        step, batch, first, before, after, around = parts
        clock = HandClock()
        with patch.object(ignite.handlers.timing, "perf_counter", clock):
            engine = Engine(lambda engine, batch, step=step, clock=clock: clock.advance(step + engine.state.epoch - 1))
            engine.add_event_handler(Events.ITERATION_STARTED, clock.advance, before)
            engine.add_event_handler(Events.EPOCH_STARTED, clock.advance, around)
            timers = function(engine)
            if not isinstance(timers, tuple | list) or not all(isinstance(timer, Timer) for timer in timers):
                raise Hint("return two timers of Ignite, the one of the steps and the one of the data")
            if len(timers) != 2 or timers[0] is timers[1]:
                raise Hint("two timers, please: a timer is running or it is not, it cannot hold two sums")
            engine.add_event_handler(Events.ITERATION_COMPLETED, clock.advance, after)
            engine.add_event_handler(Events.EPOCH_COMPLETED, clock.advance, around)
            for run in range(2):  # the second run must not add to the first one
                batches = TimedBatches(clock, BATCHES, batch + run * epochs, first, growth=1)
                engine.run(batches, max_epochs=epochs * (run + 1))
                clock.advance(1000)
                _compare_timers([timer.value() for timer in timers], parts, epochs, run)
    return "steps and data apart, without the first wait, other handlers, or the time between runs"


def _compare_timers(values, parts, epochs, run):
    step, batch, first, before, after, around = parts
    later = run * epochs + (epochs - 1) / 2  # seconds that further epochs add, in the mean of this run's
    true = {"steps": step + later, "data": batch + first / BATCHES + later}
    for (name, expected), value in zip(true.items(), values, strict=True):
        if abs(value - expected) < 1e-6:
            continue
        n_steps = BATCHES * epochs
        text = (
            f"a step takes {step} s, a batch {batch} s, the first of an epoch {first} s more; handlers take "
            f"{before} s before a step, {after} s after it, {around} s before and after an epoch; "
            f"{'steps and batches take 1 s more in each further epoch; ' if epochs > 1 or run else ''}"
            f"your timer of the {name} says {value:g} s, not {expected:g}"
        )
        if run:
            text += ", after a second run; each run starts anew"
        elif epochs > 1 and abs(value - expected - (epochs - 1) / 2) < 1e-6:
            text += "; that is the last epoch alone"
        elif abs(value - n_steps * expected) < 1e-6:
            text += "; that is the sum of all, an average needs to be told of each step"
        elif name == "steps" and abs(value - expected - (batch + first + around + before) / n_steps) < 1e-6:
            text += "; it ran before the first step, because `start` does not only reset a timer, it starts it"
        raise Hint(text)


@exercise(
    cases=(  # when each of four ranks entered a collective and left it, by one clock
        ((10.0, 12.0, 11.0, 10.5), (12.5, 12.5, 12.5, 12.5)),
        ((7.25, 7.0, 7.0, 7.125), (8.0, 8.25, 8.0, 8.0)),
        ((3000000.1, 3000000.3, 3000000.6, 3000001.1), (3000001.3,) * 4),
    ),
    right="who came last, idle and communication, for one number a rank",
)
def split_wait(function, entered, left):
    given = list(zip(entered, left, strict=True))
    for rank, (answer, traffic) in enumerate(counted_on_ranks(function, given, timeout=30)):
        _compare_split(answer, rank, entered, left, entered.index(max(entered)))
        if traffic.put_in > 8:
            raise Hint(f"right, but rank {rank} hands {traffic.put_in} bytes to its collectives; one number is 8")


def _compare_split(answer, rank, entered, left, came_last):
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise Hint("return three things: the rank that came last, and the seconds of idle and of communication")
    idle, communication = entered[came_last] - entered[rank], left[rank] - entered[came_last]
    moments = ", ".join(f"{moment:.10g}" for moment in entered)
    case = f"the ranks enter at {moments} s, and rank {rank} leaves at {left[rank]:.10g}"
    last, *seconds = answer
    if last != came_last:
        raise Hint(f"{case}: the last to come is rank {came_last}, your rank {rank} says {last}")
    for name, value, true in zip(("idle", "communication"), seconds, (idle, communication), strict=True):
        if not abs(value - true) <= 1e-6:
            text = f"{case}: it is {true:g} s of {name}, you say {value:g}"
            if name == "communication" and abs(value - (left[rank] - entered[rank])) < 1e-6:
                text += "; that is its whole stay"
            if abs(value - true) < 0.2 and entered[0] > 1e6:
                text += "; float32 has 7 digits, too few for a clock"
            raise Hint(text)
