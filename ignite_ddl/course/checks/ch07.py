"""The checks of chapter 07: a profiler whose parts add up, and the slow rank found from four tables."""

from ignite.engine import Engine, Events

from ignite_ddl.course.clock import HandClock, TimedBatches
from ignite_ddl.course.exercises import Hint, exercise

# (seconds that a batch takes, a step, a handler before a step, one after it, one after each epoch), epochs
RUNS = (((7, 3, 0, 0, 0), 1), ((2, 5, 1, 4, 6), 2), ((1, 1, 8, 2, 0), 3))
BATCHES = 3


@exercise
def profile(function):
    for parts, epochs in RUNS:
        batch, step, before, after, epoch = parts
        clock = HandClock()
        engine = Engine(lambda engine, batch, step=step, clock=clock: clock.advance(step))
        engine.add_event_handler(Events.ITERATION_STARTED, clock.advance, before)
        seconds = function(engine, clock)
        if not isinstance(seconds, dict) or set(seconds) != {"data", "step", "handlers"}:
            raise Hint('return the dict with the keys "data", "step" and "handlers" before the run begins')
        engine.add_event_handler(Events.ITERATION_COMPLETED, clock.advance, after)
        engine.add_event_handler(Events.EPOCH_COMPLETED, clock.advance, epoch)
        began = clock.now
        engine.run(TimedBatches(clock, BATCHES, batch), max_epochs=epochs)
        steps = BATCHES * epochs
        true = {"data": batch * steps, "step": step * steps, "handlers": (before + after) * steps + epoch * epochs}
        _compare(seconds, true, clock.now - began, parts)
        if clock.reads > 4 * steps + 2:
            raise Hint(
                f"right, but you read the clock {clock.reads} times in {steps} steps; four times a step and "
                "twice a run are enough"
            )
    return "three parts that add up to the run, from four readings of the clock a step"


def _compare(seconds, true, run, parts):
    batch, step, before, after, epoch = parts
    case = (
        f"a batch takes {batch} s, a step {step} s, handlers {before} s before it and {after} s after it, "
        f"and {epoch} s after an epoch"
    )
    part = next((part for part in true if not abs(seconds[part] - true[part]) < 1e-6), None)
    if part is None:
        return
    text = f"{case}: {part} took {true[part]} s, you have {seconds[part]:g} s"
    if not abs(sum(seconds.values()) - run) < 1e-6:
        text += f"; your parts make {sum(seconds.values()):g} s, the run took {run:g} s"
    raise Hint(text)


@exercise
def straggler(function):
    # For each rank: seconds of data, of computing in the step and of handlers. What is left is the meeting.
    for own in (
        ([(0.009, 0.020, 0.005), (0.012, 0.020, 0.004), (0.060, 0.020, 0.005), (0.011, 0.020, 0.005)]),
        ([(0.010, 0.020, 0.090), (0.030, 0.020, 0.004), (0.010, 0.020, 0.005), (0.011, 0.020, 0.005)]),
        ([(0.010, 0.010, 0.010), (0.030, 0.010, 0.010), (0.010, 0.070, 0.010), (0.010, 0.010, 0.010)]),  # the page's
        ([(0.020, 0.100, 0.020), (0.050, 0.100, 0.001)]),
        ([(0.0102, 0.200, 0.005), (0.010, 0.200, 0.005), (0.010, 0.200, 0.0051), (0.0101, 0.200, 0.005)]),
        ([(0.010, 0.010, 0.005)] * 7 + [(0.010, 0.035, 0.030)]),
        ([(0.010, 0.050, 0.005), (0.0103, 0.0505, 0.005), (0.010, 0.050, 0.005)]),  # 0.8 ms are noise
        ([(0.010, 0.050, 0.005), (0.010, 0.050, 0.005), (0.010, 0.0515, 0.005)]),  # 1.5 ms are not
    ):
        sums = [sum(parts) for parts in own]
        whole = max(sums) + 0.002
        tables = [
            {"data": data, "step": whole - data - handlers, "handlers": handlers, "meeting": whole - mine}
            for (data, _, handlers), mine in zip(own, sums, strict=True)
        ]
        second, last = sorted(sums)[-2:]
        true = (sums.index(last), last - second) if last - second > 0.001 else (None, 0.0)
        _compare_straggler(function(tables), true, tables)
    return "the rank that the others wait for, what an iteration gains without it, and None where nobody is late"


def _compare_straggler(answer, true, tables):
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Hint("return two things: the rank, or None, and the seconds that an iteration gains")
    rank, gain = answer
    rows = [", ".join(f"{1e3 * table[part]:.1f}" for part in table) for table in tables]
    case = f"data, step, handlers and meeting in ms are {'; '.join(rows)}"
    if rank != true[0]:
        steps = [table["step"] for table in tables]
        why = ""
        if true[0] is None:
            why = ": all ranks come to the meeting within 1 ms"
        elif rank is None:
            why = f": rank {true[0]} comes {1e3 * true[1]:.1f} ms after the next one"
        elif tables[rank]["meeting"] == max(table["meeting"] for table in tables):
            why = f": rank {rank} stays in the meeting for the longest time because it came first"
        elif rank in (steps.index(min(steps)), steps.index(max(steps))):
            why = f": the step of rank {rank} holds computing and the meeting; which of them makes it so long?"
        raise Hint(f"{case}; the others wait for {'none' if true[0] is None else true[0]}, not for {rank}{why}")
    if not abs(gain - true[1]) <= 1e-6:
        raise Hint(
            f"{case}; without rank {rank}'s delay an iteration gains {1e3 * true[1]:.1f} ms, not {1e3 * gain:.1f}: "
            "then the ranks wait for the next one"
        )
