"""Natural mistakes in chapter 11's exercises."""

from ignite.engine import Events
from ignite.handlers import PiecewiseLinear


def by_library(trainer, optimizer, base_batch, batch_size, warm_up_steps):
    for index, group in enumerate(optimizer.param_groups):
        milestones = [(0, group["lr"]), (warm_up_steps, group["lr"] * batch_size / base_batch)]
        schedule = PiecewiseLinear(optimizer, "lr", milestones, param_group_index=index)
        trainer.add_event_handler(Events.ITERATION_STARTED, schedule)


# The rounding may ask for a rate a hair above the first, which is not allowed: min() mends it.
OF_THE_ROUNDED_BATCH = "(min(noise / (n_samples / batch - 1), rates[0]), batch)"
RIGHT = {"scale_and_warm_up": [by_library], "grow_instead": [{"(rates[0], batch)": OF_THE_ROUNDED_BATCH}]}
MISTAKES = {
    "scale_and_warm_up": {
        "in step 1 your rate is 0.1, not 0.24; the rate never moves": lambda *args: None,
        "start from the rate that was tuned": {"1 + (batch_size / base_batch - 1)": "batch_size / base_batch"},
        "one step late": {"ITERATION_STARTED": "ITERATION_COMPLETED"},
        "the square root of the factor": {"batch_size / base_batch": "(batch_size / base_batch) ** 0.5"},
        "your rate is 0.125, not 0.1375; // makes 2 of the factor": {
            "batch_size / base_batch": "batch_size // base_batch"
        },
        "that is scaled, and not warmed up": {" * climbed": ""},
        "this is parameter group 1, which has a rate of its own": {"[group[": "[optimizer.param_groups[0]["},
        "after the warm-up the rate stays at 0.8": {"warm_up_steps, 1)": "warm_up_steps, 9)"},
        "in step 1 your rate is 0.275, not 0.24": {"/ warm_up_steps": "/ (warm_up_steps - 1)"},
    },
    "grow_instead": {
        "return a list of 3 pairs": {"return stages": "return stages[1:]"},
        "a whole number of rows": {"round": "float"},
        "does not fit": {"if batch <= largest": "if batch <= n_samples"},
        "was never tried": {"if batch <= largest": "if False"},
        "scale is 255.000, the decay's 51.000": lambda rates, batch, *_: [(rates[0], batch)] * len(rates),
        "the factor alone forgets the - 1": {"n_samples / (1 + noise / rates[0])": "batch_size * rates[0] / rate"},
        "you took both, the smaller rate and the larger batch": {"(rates[0], batch)": "(rate, batch)"},
        "is right, at 256 steps an epoch; 52": lambda rates, batch, *_: [(rate, batch) for rate in rates],
    },
}
