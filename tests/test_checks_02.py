"""Chapter 02's checks: what is right passes, and each way to go wrong gets its own hint."""

import pytest
import torch

from ignite_ddl.course.checks import ch02 as checks


def timed(launch, synchronize, clock, n):
    launch()
    synchronize()
    start = clock()
    for _ in range(n):
        launch()
    synchronize()
    return (clock() - start) / n


def test_timed_right(capsys):
    assert checks.time_kernel(timed)
    assert capsys.readouterr().out.startswith("right: a warm-up, two waits")


def stub(launch, synchronize, clock, n):
    raise NotImplementedError


def never_waits(launch, synchronize, clock, n):
    launch()
    start = clock()
    for _ in range(n):
        launch()
    return (clock() - start) / n


def reads_before_waiting(launch, synchronize, clock, n):
    launch()
    synchronize()
    start = clock()
    for _ in range(n):
        launch()
    end = clock()
    synchronize()
    return (end - start) / n


def no_warm_up(launch, synchronize, clock, n):
    synchronize()
    start = clock()
    for _ in range(n):
        launch()
    synchronize()
    return (clock() - start) / n


def starts_on_a_full_queue(launch, synchronize, clock, n):
    launch()
    start = clock()
    for _ in range(n):
        launch()
    synchronize()
    return (clock() - start) / n


def waits_every_time(launch, synchronize, clock, n):
    launch()
    synchronize()
    start = clock()
    for _ in range(n):
        launch()
        synchronize()
    return (clock() - start) / n


def forgets_to_divide(launch, synchronize, clock, n):
    return n * timed(launch, synchronize, clock, n)


def takes_too_many(launch, synchronize, clock, n):
    return timed(launch, synchronize, clock, 3 * n)


WRONG_TIMES = [
    (stub, "write the body of stub"),
    (never_waits, "that is what launching costs"),
    (reads_before_waiting, "that is what launching costs"),
    (no_warm_up, "the first launch of a kernel compiles it"),
    (starts_on_a_full_queue, "the queue still holds work"),
    (waits_every_time, "you waited 101 times"),
    (forgets_to_divide, "that is all 100 together"),
    (takes_too_many, "right, but with 301 launches"),
    (lambda launch, synchronize, clock, n: None, "return seconds"),
    (lambda launch, synchronize, clock, n: 2e-3, "right, but with 0 launches"),
]


@pytest.mark.parametrize(("function", "hint"), WRONG_TIMES, ids=lambda value: getattr(value, "__name__", ""))
def test_timed_wrong(function, hint, capsys):
    assert not checks.time_kernel(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1


def scaled(gradients, scale, good, interval):
    if not all(torch.isfinite(gradient).all() for gradient in gradients):
        return None, scale / 2, 0
    gradients = [gradient.float() / scale for gradient in gradients]
    good += 1
    return (gradients, scale * 2, 0) if good == interval else (gradients, scale, good)


def test_scaled_right(capsys):
    assert checks.scaled_step(scaled)
    assert capsys.readouterr().out.startswith("right: the steps and the scales of torch.amp.GradScaler")


def scaled_stub(gradients, scale, good, interval):
    raise NotImplementedError


def changed(**changes):
    """The right one with one part replaced."""

    def function(gradients, scale, good, interval):
        step, next_scale, next_good = scaled(gradients, scale, good, interval)
        names = {"step": step, "next_scale": next_scale, "next_good": next_good, "gradients": gradients}
        names |= {"scale": scale, "good": good}
        parts = [changes[name](names) if name in changes else names[name] for name in list(names)[:3]]
        return tuple(parts)

    return function


def looks_at_the_first_only(gradients, scale, good, interval):
    if not torch.isfinite(gradients[0]).all():
        return None, scale / 2, 0
    return scaled([torch.nan_to_num(gradient, posinf=1.0) for gradient in gradients], scale, good, interval)


WRONG_SCALES = [
    (scaled_stub, "write the body of scaled_stub"),
    (
        changed(step=lambda n: n["step"] and [g.half() / n["scale"] for g in n["gradients"]]),
        "float16; the weights",
    ),
    (
        changed(step=lambda n: n["step"] and [(g / n["scale"]).float() for g in n["gradients"]]),
        "divided in float16 it vanishes after all",
    ),
    (changed(step=lambda n: n["step"] and [g.float() for g in n["gradients"]]), "still times the scale"),
    (changed(step=lambda n: [g.float() / n["scale"] for g in n["gradients"]]), "this step must be left out"),
    (changed(step=lambda n: None), "all gradients are finite, and you left the step out"),
    (looks_at_the_first_only, "this step must be left out"),
    (changed(next_scale=lambda n: n["scale"]), "step 4 (interval 4): the scale goes from 65,536 to 131,072"),
    (
        changed(next_scale=lambda n: n["next_scale"] if n["step"] else n["scale"]),
        "to 32,768, yours to 65,536",
    ),
    (
        changed(next_good=lambda n: n["good"] + 1),
        "step 8 (interval 4): the scale goes from 131,072 to 262,144",
    ),
    (
        changed(next_good=lambda n: n["next_good"] if n["step"] else n["good"]),
        "an overflow in the third step, step 4",
    ),
    (lambda gradients, scale, good, interval: gradients, "return three things"),
]


@pytest.mark.parametrize(("function", "hint"), WRONG_SCALES, ids=range(len(WRONG_SCALES)))
def test_scaled_wrong(function, hint, capsys):
    assert not checks.scaled_step(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1
