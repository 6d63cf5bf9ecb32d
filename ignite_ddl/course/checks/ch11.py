"""The checks of chapter 11: a rate that is scaled and warmed up, and a batch that grows where a rate would fall."""

import torch
from ignite.engine import Engine

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.lab import cost

# Rates of two parameter groups, the batch that they were tuned for, the new batch, steps of warm-up
SCALED = (((0.1, 0.01), 32, 256, 5), ((0.2, 0.3), 10, 40, 3), ((0.5, 0.5), 64, 64, 2), ((0.1, 0.2), 32, 80, 4))
MOMENTUM = 0.9  # it cancels out: any will do


@exercise(cases=SCALED, right="every group starts at its own rate, climbs in a line, and stays at the scaled one")
def scale_and_warm_up(function, rates, base_batch, batch_size, warm_up_steps):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    used = []
    trainer = Engine(lambda engine, batch, o=optimizer, u=used: u.append([g["lr"] for g in o.param_groups]))
    function(trainer, optimizer, base_batch, batch_size, warm_up_steps)
    trainer.run(range(4), max_epochs=3)  # 12 steps: warm-up goes on over the end of an epoch
    for group, rate in enumerate(rates):
        values = [step[group] for step in used]
        _compare_rates(values, rate, group, batch_size / base_batch, warm_up_steps)


def _compare_rates(values, rate, group, factor, n_steps):
    expected = [rate * (1 + (factor - 1) * min(step / n_steps, 1)) for step in range(len(values))]
    wrong = [step for step, pair in enumerate(zip(values, expected, strict=True)) if not _close(*pair)]
    if not wrong:
        return
    step = wrong[0]
    text = (
        f"batch {factor:g} times as large, {n_steps} steps of warm-up from rate {rate:g}: "
        f"in step {step} your rate is {values[step]:.4g}, not {expected[step]:.4g}"
    )
    end = values[-1]
    if _close(values[0], 0) and not _close(rate, 0):
        text += "; start from the rate that was tuned, not from 0"
    elif _close(values[1], expected[0]) and _close(values[2], expected[1]):
        text += "; you are one step late: set the rate before the step that uses it"
    elif factor % 1 and _close(end, rate * (factor // 1)):
        text += f"; // makes {factor // 1:g} of the factor"
    elif _close(end, rate * factor**0.5):
        text += "; that is the square root of the factor, linear scaling takes the factor"
    elif all(_close(value, rate) for value in values):
        text += "; the rate never moves"
    elif step == 0 and group == 0 and _close(values[0], expected[-1]):
        text += "; that is scaled, and not warmed up"
    elif group and _close(values[0] * factor, end):
        text += f"; this is parameter group {group}, which has a rate of its own"
    elif end > expected[-1] and not _close(end, expected[-1]):
        text += f"; after the warm-up the rate stays at {expected[-1]:.4g}"
    raise Hint(text)


def _close(one, other):
    return abs(one - other) <= 1e-9 + 1e-6 * abs(other)


# The decay's rates, the batch, rows of the training set, the largest batch that fits
DECAYS = (
    ([0.1, 0.02, 0.004], 32, 8192, 4096),
    ([0.1, 0.02, 0.004], 32, 8192, 256),
    ([0.4, 0.2, 0.1, 0.05], 64, 1024, 200),
    ([0.05, 0.01], 24, 1200, 1000),
)


@exercise(cases=DECAYS, right="the noise of the decay, with the fewest steps")
def grow_instead(function, rates, batch_size, n_samples, largest):
    stages = function(rates, batch_size, n_samples, largest)
    where = f"{n_samples} rows, batch {batch_size} (at most {largest}), rates {rates}"
    if not isinstance(stages, list | tuple) or len(stages) != len(rates):
        raise Hint(f"{where}: return a list of {len(rates)} pairs, one a stage")
    best = _fewest_steps(rates, batch_size, n_samples, largest)
    for number, ((rate, batch), decayed) in enumerate(zip(stages, rates, strict=True)):
        here = f"{where}, stage {number + 1}"
        _check_stage(rate, batch, decayed, rates[0], batch_size, n_samples, largest, here)
        steps = -(-n_samples // batch)
        if steps > best[number]:
            raise Hint(f"{here}: the noise is right, at {steps} steps an epoch; {best[number]} are enough")


def _check_stage(rate, batch, decayed, first, batch_size, n_samples, largest, here):
    if batch != int(batch) or batch < 1:
        raise Hint(f"{here}: a batch has a whole number of rows, yours has {batch}")
    if batch > largest:
        raise Hint(f"{here}: a batch of {batch} does not fit")
    if rate > first * (1 + 1e-9):
        raise Hint(f"{here}: a rate of {rate:.4g} was never tried; stay at {first:g} or below")
    target = cost.noise_scale(decayed, batch_size, n_samples, MOMENTUM)
    noise = cost.noise_scale(rate, int(batch), n_samples, MOMENTUM)
    # What one row of rounding does to the noise, and a little.
    allowed = 1.02 * rate / (1 - MOMENTUM) * n_samples / (batch * max(batch - 1, 1)) + 1e-9
    if abs(noise - target) <= allowed:
        return
    text = f"{here}: momentum {MOMENTUM}, your noise scale is {noise:.3f}, the decay's {target:.3f}"
    if batch > batch_size and _close(batch, min(round(batch_size * first / decayed), largest)):
        text += "; the factor alone forgets the - 1 in N / B - 1"
    elif batch > batch_size and _close(rate, decayed):
        text += "; you took both, the smaller rate and the larger batch"
    raise Hint(text)


def _fewest_steps(rates, batch_size, n_samples, largest):
    steps = []
    for rate in rates:
        batch = round(cost.batch_size_of_same_noise(batch_size, rate, rates[0], n_samples))
        steps.append(-(-n_samples // min(batch, largest)))
    return steps
