"""Natural mistakes in chapter 11's exercises."""

from functools import partial

from ignite.engine import Events
from ignite.handlers import PiecewiseLinear

from ignite_ddl.lab import cost


def line(rate, factor, step, n_steps):
    return rate * (1 + (factor - 1) * min(step / n_steps, 1))


def scaler(rate_at, event=Events.ITERATION_STARTED, one_rate=False):
    """An answer whose rates are rate_at(rate, factor, step, n_steps)."""

    def scale_and_warm_up(trainer, optimizer, base_batch, batch_size, warm_up_steps):
        rates = [optimizer.param_groups[0 if one_rate else index]["lr"] for index in range(2)]

        def set_rates(trainer):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate_at(
                    rate, batch_size / base_batch, trainer.state.iteration - 1, warm_up_steps
                )

        trainer.add_event_handler(event, set_rates)

    return scale_and_warm_up


def by_library(trainer, optimizer, base_batch, batch_size, warm_up_steps):
    for index, group in enumerate(optimizer.param_groups):
        milestones = [(0, group["lr"]), (warm_up_steps, group["lr"] * batch_size / base_batch)]
        schedule = PiecewiseLinear(optimizer, "lr", milestones, param_group_index=index)
        trainer.add_event_handler(Events.ITERATION_STARTED, schedule)


def same_noise(rates, batch_size, n_samples, largest, rounding=round):
    stages = []
    for rate in rates:
        batch = rounding(cost.batch_size_of_same_noise(batch_size, rate, rates[0], n_samples))
        if batch <= largest:
            stages.append((rates[0], batch))
        else:
            stages.append((rate * (n_samples / batch_size - 1) / (n_samples / largest - 1), largest))
    return stages


def rate_of_the_rounded_batch(rates, batch_size, n_samples, largest):
    """The rounding may ask for a rate a hair above the first, which is not allowed: min() mends it."""
    batches = [batch for _, batch in same_noise(rates, batch_size, n_samples, largest)]
    noises = [rate * (n_samples / batch_size - 1) for rate in rates]
    pairs = zip(noises, batches, strict=True)
    return [(min(noise / (n_samples / batch - 1), rates[0]), batch) for noise, batch in pairs]


def factor_alone(rates, batch_size, n_samples, largest):
    batches = [round(batch_size * rates[0] / rate) for rate in rates]
    return [(rates[0] / max(batch / largest, 1), min(batch, largest)) for batch in batches]


RIGHT = {"scale_and_warm_up": [by_library], "grow_instead": [rate_of_the_rounded_batch]}
MISTAKES = {
    "scale_and_warm_up": {
        "in step 1 your rate is 0.1, not 0.24; the rate never moves": lambda *args: None,
        "start from the rate that was tuned": scaler(lambda r, f, s, n: r * f * min(s / n, 1)),
        "one step late": scaler(line, Events.ITERATION_COMPLETED),
        "the square root of the factor": scaler(lambda r, f, s, n: line(r, f**0.5, s, n)),
        "that is scaled, and not warmed up": scaler(lambda r, f, s, n: r * f),
        "this is parameter group 1, which has a rate of its own": scaler(line, one_rate=True),
        "after the warm-up the rate stays at 0.8": scaler(lambda r, f, s, n: r * (1 + (f - 1) * s / n)),
        "in step 1 your rate is 0.275, not 0.24": scaler(lambda r, f, s, n: line(r, f, s, n - 1)),
    },
    "grow_instead": {
        "return a list of 3 pairs": lambda *args: same_noise(*args)[1:],
        "a whole number of rows": partial(same_noise, rounding=float),
        "does not fit": lambda rates, batch, n, largest: same_noise(rates, batch, n, n),
        "was never tried": lambda rates, batch, n, largest: [
            (rate * (n / batch - 1) / (n / largest - 1), largest) for rate in rates
        ],
        "scale is 255.000, the decay's 51.000": lambda rates, batch, *_: [(rates[0], batch)] * len(rates),
        "the factor alone forgets the - 1": factor_alone,
        "you took both, the smaller rate and the larger batch": lambda rates, *args: [
            (rate, batch) for rate, (_, batch) in zip(rates, same_noise(rates, *args), strict=True)
        ],
        "is right, at 256 steps an epoch; 52": lambda rates, batch, *_: [(rate, batch) for rate in rates],
    },
}
