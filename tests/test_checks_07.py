"""Chapter 07's checks: what is right passes, and each way to go wrong gets its own hint."""

import pytest
from ignite.engine import Events

from ignite_ddl.course.checks import ch07 as checks

BORDERS = {
    Events.STARTED: "handlers",
    Events.GET_BATCH_STARTED: "data",
    Events.GET_BATCH_COMPLETED: "handlers",
    Events.ITERATION_STARTED: "step",
    Events.ITERATION_COMPLETED: "handlers",
    Events.COMPLETED: "handlers",
}


def by_borders(engine, clock, borders=BORDERS):
    seconds = {"data": 0.0, "step": 0.0, "handlers": 0.0}
    last = []

    def border(part):
        now = clock()
        if last:
            seconds[last[0]] += now - last[1]
        last[:] = part, now

    for event, part in borders.items():
        engine.add_event_handler(event, border, part)
    return seconds


def by_differences(engine, clock):
    seconds = {"data": 0.0, "step": 0.0, "handlers": 0.0}

    def add(part, sign):
        now = clock()
        seconds[part] += sign * now
        if part != "handlers":
            seconds["handlers"] -= sign * now

    for event, part, sign in (
        (Events.STARTED, "handlers", -1),
        (Events.GET_BATCH_STARTED, "data", -1),
        (Events.GET_BATCH_COMPLETED, "data", 1),
        (Events.ITERATION_STARTED, "step", -1),
        (Events.ITERATION_COMPLETED, "step", 1),
        (Events.COMPLETED, "handlers", 1),
    ):
        engine.add_event_handler(event, add, part, sign)
    return seconds


@pytest.mark.parametrize("function", [by_borders, by_differences])
def test_profile_right(function, capsys):
    assert checks.profile(function)
    assert capsys.readouterr().out.startswith("right: three parts that add up")


def stub(engine, clock):
    raise NotImplementedError


def no_dict(engine, clock):
    return [0, 0, 0]


def constant(engine, clock):
    return {"data": 21.0, "step": 9.0, "handlers": 0.0}


def without_ends(engine, clock):
    return by_borders(
        engine, clock, {e: p for e, p in BORDERS.items() if e not in (Events.STARTED, Events.COMPLETED)}
    )


def handlers_in_step(engine, clock):
    return by_borders(engine, clock, BORDERS | {Events.GET_BATCH_COMPLETED: "step"})


def reads_often(engine, clock):
    engine.add_event_handler(Events.ITERATION_STARTED, clock)
    return by_borders(engine, clock)


WRONG_PROFILES = [
    (stub, "write the body of stub"),
    (no_dict, "return the dict with the keys"),
    (constant, "data took 12 s, you have 21 s; your parts make 30 s, the run took 84 s"),
    (without_ends, "handlers took 42 s, you have"),
    (handlers_in_step, "step took 30 s, you have 36 s\n"),
    (reads_often, "right, but you read the clock 17 times in 3 steps"),
]


@pytest.mark.parametrize(
    ("function", "hint"), WRONG_PROFILES, ids=lambda value: getattr(value, "__name__", "")
)
def test_profile_wrong(function, hint, capsys):
    assert not checks.profile(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1


def find(tables):
    visible = [table["data"] + table["handlers"] for table in tables]
    second, first = sorted(visible)[-2:]
    return (visible.index(first), first - second) if first - second > 0.001 else (None, 0.0)


def find_by_shortest(tables):
    processing = sorted(table["processing"] for table in tables)
    gain = processing[1] - processing[0]
    if gain < 0.001:
        return None, 0.0
    return min(range(len(tables)), key=lambda rank: tables[rank]["processing"]), gain


@pytest.mark.parametrize("function", [find, find_by_shortest])
def test_straggler_right(function, capsys):
    assert checks.straggler(function)
    assert capsys.readouterr().out.startswith("right: the rank that the others wait for")


def straggler_stub(tables):
    raise NotImplementedError


def longest_processing(tables):
    return max(range(len(tables)), key=lambda rank: tables[rank]["processing"]), 0.045


def data_only(tables):
    return max(range(len(tables)), key=lambda rank: tables[rank]["data"]), find(tables)[1]


def never_none(tables):
    visible = [table["data"] + table["handlers"] for table in tables]
    return visible.index(max(visible)), max(visible) - sorted(visible)[-2]


def whole_delay(tables):
    rank, _ = find(tables)
    visible = [table["data"] + table["handlers"] for table in tables]
    return rank, 0.0 if rank is None else max(visible) - min(visible)


def within(limit):
    def function(tables):
        visible = [table["data"] + table["handlers"] for table in tables]
        second, first = sorted(visible)[-2:]
        return (visible.index(first), first - second) if first - second > limit else (None, 0.0)

    return function


WRONG_STRAGGLERS = [
    (within(0.0003), "the others wait for none, not for 1: all ranks are ready for the step within 1 ms"),
    (within(0.010), "the others wait for 2, not for None: rank 2 is ready 1.5 ms after the next one"),
    (straggler_stub, "write the body of straggler_stub"),
    (
        longest_processing,
        "the others wait for 2, not for 0: rank 0 has the longest processing because it waits in it",
    ),
    (data_only, "the others wait for 0, not for 1"),
    (never_none, "the others wait for none, not for 0: all ranks are ready"),
    (whole_delay, "a step gains 49.0 ms, not 50.0: then the ranks wait for the next one"),
    (lambda tables: (2, 0.049), "the others wait for 0, not for 2"),
    (lambda tables: 2, "return two things"),
    (lambda tables: (None, 0.0), "the others wait for 2, not for None"),
]


@pytest.mark.parametrize(
    ("function", "hint"), WRONG_STRAGGLERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_straggler_wrong(function, hint, capsys):
    assert not checks.straggler(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1
