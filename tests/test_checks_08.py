"""Chapter 08's checks: what is right passes, and each way to go wrong gets its own hint."""

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from ignite.handlers import Timer

from ignite_ddl.course.checks import ch08 as checks

STEP = {
    "resume": Events.ITERATION_STARTED,
    "pause": Events.ITERATION_COMPLETED,
    "step": Events.ITERATION_COMPLETED,
}
DATA = {
    "resume": Events.GET_BATCH_STARTED,
    "pause": Events.GET_BATCH_COMPLETED,
    "step": Events.GET_BATCH_COMPLETED,
}


def right(trainer):
    timers = Timer(average=True), Timer(average=True)
    for timer, events in zip(timers, (STEP, DATA), strict=True):
        timer.attach(trainer, **events)
        trainer.add_event_handler(Events.STARTED, timer.pause)
    return timers


def by_hand(trainer):
    steps, data = Timer(average=True), Timer(average=True)
    for timer, events in ((steps, STEP), (data, DATA)):
        for event, method in (
            (Events.STARTED, timer.reset),
            (Events.STARTED, timer.pause),
            (events["resume"], timer.resume),
            (events["pause"], timer.pause),
            (events["step"], timer.step),
        ):
            trainer.add_event_handler(event, method)
    return [steps, data]


@pytest.mark.parametrize("function", [right, by_hand])
def test_timers_right(function, capsys):
    assert checks.two_timers(function)
    assert capsys.readouterr().out.startswith("right: steps and data apart")


def stub(trainer):
    raise NotImplementedError


def as_documented(trainer):
    return tuple(Timer(average=True).attach(trainer, **events) for events in (STEP, DATA))


def one_timer(trainer):
    timer = Timer(average=True).attach(trainer, **STEP)
    return timer, timer


def sums(trainer):
    timers = right(trainer)
    for timer in timers:
        timer._average = False
    return timers


def exchanged(trainer):
    return right(trainer)[::-1]


def never_reset(trainer):
    timers = Timer(average=True), Timer(average=True)
    for timer, events in zip(timers, (STEP, DATA), strict=True):
        timer.pause()
        for key, method in (("resume", timer.resume), ("pause", timer.pause)):
            trainer.add_event_handler(events[key], method)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), timer.step)
    return timers


def of_the_last_epoch(trainer):
    timers = right(trainer)
    for timer in timers:
        trainer.add_event_handler(Events.EPOCH_STARTED, timer.reset)
        trainer.add_event_handler(Events.EPOCH_STARTED, timer.pause)
    return timers


WRONG_TIMERS = [
    (of_the_last_epoch, "your timer of the steps says 11 s, not 10.5; that is the last epoch alone"),
    (stub, "write the body of stub"),
    (as_documented, "your timer of the steps says 17.5 s, not 10; it ran before the first step"),
    (one_timer, "two timers, please"),
    (sums, "your timer of the steps says 40 s, not 10; that is the sum of all"),
    (exchanged, "your timer of the steps says 30 s, not 10\n"),
    (lambda trainer: (1.0, 2.0), "return two timers of Ignite"),
    (lambda trainer: right(trainer)[0], "return two timers of Ignite"),
    (never_reset, "your timer of the steps says 40 s, not 10; that is the sum of all"),
]


@pytest.mark.parametrize(("function", "hint"), WRONG_TIMERS, ids=lambda value: getattr(value, "__name__", ""))
def test_timers_wrong(function, hint, capsys):
    assert not checks.two_timers(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1


def split(entered, left):
    moments = idist.all_gather(entered)
    last = max(moments)
    return moments.index(last), last - entered, left - last


def split_by_tensor(entered, left):
    moments = idist.all_gather(torch.tensor([entered], dtype=torch.float64))
    last = int(moments.argmax())
    return last, float(moments[last]) - entered, left - float(moments[last])


@pytest.mark.parametrize("function", [split, split_by_tensor])
def test_split_right(function, capsys):
    assert checks.split_wait(function)
    assert capsys.readouterr().out.startswith("right: who came last, idle and communication")


def split_stub(entered, left):
    raise NotImplementedError


def whole_stay(entered, left):
    last, idle, _ = split(entered, left)
    return last, idle, left - entered


def single(entered, left):
    moments = idist.all_gather(torch.tensor([entered]))  # float32
    last = int(moments.argmax())
    return last, float(moments[last]) - entered, left - float(moments[last])


def first_come(entered, left):
    moments = idist.all_gather(entered)
    return moments.index(min(moments)), min(moments) - entered, left - min(moments)


def everything(entered, left):
    idist.all_gather(left)
    return split(entered, left)


WRONG_SPLITS = [
    (split_stub, "write the body of split_stub"),
    (whole_stay, "rank 0 leaves at 12.5: it is 0.5 s of communication, you say 2.5; that is its whole stay"),
    (single, "float32 has 7 digits"),
    (first_come, "the last to come is rank 1, your rank 0 says 0"),
    (everything, "right, but rank 0 hands 16 bytes to its collectives; one number is 8"),
    (lambda entered, left: (1, 2.0, 0.5), "it is 0 s of idle, you say 2"),
    (lambda entered, left: idist.get_rank(), "return three things"),
]


@pytest.mark.parametrize(("function", "hint"), WRONG_SPLITS, ids=lambda value: getattr(value, "__name__", ""))
def test_split_wrong(function, hint, capsys):
    assert not checks.split_wait(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1
