"""Chapter 11's checks: what is right passes, and each way to go wrong gets its own hint."""

import pytest
from checking import stub
from ignite.engine import Events
from ignite.handlers import PiecewiseLinear, create_lr_scheduler_with_warmup

from ignite_ddl.course.checks import ch11 as checks
from ignite_ddl.lab import cost


def scaler(rate_at, event=Events.ITERATION_STARTED, first_group_only=False):
    """An answer whose rates are rate_at(rate, factor, step, n_steps)."""

    def answer(trainer, optimizer, base_batch, batch_size, warm_up_steps):
        rates = [group["lr"] for group in optimizer.param_groups]

        def set_rates(trainer):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                rate = rates[0] if first_group_only else rate
                step = trainer.state.iteration - 1
                group["lr"] = rate_at(rate, batch_size / base_batch, step, warm_up_steps)

        trainer.add_event_handler(event, set_rates)

    return answer


def line(rate, factor, step, n_steps):
    return rate * (1 + (factor - 1) * min(step / n_steps, 1))


def by_library(trainer, optimizer, base_batch, batch_size, warm_up_steps):
    for index, group in enumerate(optimizer.param_groups):
        rate = group["lr"]
        milestones = [(0, rate), (warm_up_steps, rate * batch_size / base_batch)]
        schedule = PiecewiseLinear(optimizer, "lr", milestones, param_group_index=index)
        trainer.add_event_handler(Events.ITERATION_STARTED, schedule)


def one_value_for_all(trainer, optimizer, base_batch, batch_size, warm_up_steps):
    rate = optimizer.param_groups[0]["lr"]
    end = rate * batch_size / base_batch
    after = PiecewiseLinear(optimizer, "lr", [(0, end)])
    schedule = create_lr_scheduler_with_warmup(after, rate, warm_up_steps + 1, end)
    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)


@pytest.mark.parametrize("function", [scaler(line), by_library])
def test_scaling_right(function, capsys):
    assert checks.scale_and_warm_up(function)
    assert capsys.readouterr().out.startswith("right: every group starts at its own rate")


WRONG_SCALING = {
    "stub": (stub, "write the body of stub"),
    "nothing": (lambda *args: None, "in step 1 your rate is 0.1, not 0.24; the rate never moves"),
    "from 0": (scaler(lambda r, f, s, n: r * f * min(s / n, 1)), "start from the rate that was tuned"),
    "square root": (scaler(lambda r, f, s, n: line(r, f**0.5, s, n)), "the square root of the factor"),
    "no warm-up": (scaler(lambda r, f, s, n: r * f), "that is scaled, and not warmed up"),
    "late": (scaler(lambda r, f, s, n: line(r, f, s, n), Events.ITERATION_COMPLETED), "one step late"),
    "too short": (scaler(lambda r, f, s, n: line(r, f, s, n - 1)), "in step 1 your rate is 0.275, not 0.24"),
    "never ends": (
        scaler(lambda r, f, s, n: r * (1 + (f - 1) * s / n)),
        "after the warm-up the rate stays at 0.8",
    ),
    "one for all": (
        scaler(line, first_group_only=True),
        "this is parameter group 1, which has a rate of its own",
    ),
    "the library's": (one_value_for_all, "this is parameter group 1, which has a rate of its own"),
}


@pytest.mark.parametrize("name", WRONG_SCALING)
def test_scaling_wrong(name, capsys):
    function, hint = WRONG_SCALING[name]
    assert not checks.scale_and_warm_up(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1


def same_noise(rates, batch_size, n_samples, largest, rounding=round):
    stages = []
    for rate in rates:
        batch = rounding(cost.batch_size_of_same_noise(batch_size, rate, rates[0], n_samples))
        noise = rate * (n_samples / batch_size - 1)
        fits = batch <= largest
        stages.append((rates[0], batch) if fits else (noise / (n_samples / largest - 1), largest))
    return stages


def test_growing_right(capsys):
    assert checks.grow_instead(same_noise)
    assert capsys.readouterr().out == "right: the noise of the decay, with the fewest steps\n"


def rounded_up_with_the_rate_that_fits(rates, batch_size, n_samples, largest):
    stages = same_noise(rates, batch_size, n_samples, largest)
    return [
        (rate * (n_samples / batch_size - 1) / (n_samples / batch - 1), batch)
        for rate, (_, batch) in zip(rates, stages, strict=True)
    ]


def test_growing_right_with_the_rate_that_fits_the_rounded_batch():
    # The rounding may ask for a rate a hair above the first: that is not allowed, and min() mends it.
    def answer(rates, *args):
        return [(min(rate, rates[0]), b) for rate, b in rounded_up_with_the_rate_that_fits(rates, *args)]

    assert checks.grow_instead(answer)


def factor_only(rates, batch_size, n_samples, largest):
    batches = [round(batch_size * rates[0] / rate) for rate in rates]
    return [(rates[0] * max(b / largest, 1) ** -1, min(b, largest)) for b in batches]


WRONG_GROWING = {
    "stub": (stub, "write the body of stub"),
    "decay": (
        lambda r, b, n, largest: [(rate, b) for rate in r],
        "the noise is right, at 256 steps an epoch; 52",
    ),
    "neither": (
        lambda r, b, n, largest: [(r[0], b)] * len(r),
        "your noise scale is 255.000, the decay's 51.000",
    ),
    "both": (
        lambda r, b, n, largest: [
            (rate, s[1]) for rate, s in zip(r, same_noise(r, b, n, largest), strict=True)
        ],
        "you took both, the smaller rate and the larger batch",
    ),
    "factor": (factor_only, "the factor alone forgets the - 1"),
    "no limit": (lambda r, b, n, largest: same_noise(r, b, n, n), "does not fit"),
    "halves": (
        lambda r, b, n, largest: same_noise(r, b, n, largest, rounding=float),
        "a whole number of rows",
    ),
    "rate too large": (
        lambda r, b, n, largest: [(rate * (n / b - 1) / (n / largest - 1), largest) for rate in r],
        "was never tried",
    ),
    "too few": (lambda r, b, n, largest: same_noise(r, b, n, largest)[1:], "return a list of 3 pairs"),
}


@pytest.mark.parametrize("name", WRONG_GROWING)
def test_growing_wrong(name, capsys):
    function, hint = WRONG_GROWING[name]
    assert not checks.grow_instead(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1
