"""The checks of chapter 02: a stopwatch for a device that works by itself, and a loss scale that finds its size."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from ignite_ddl.course.exercises import Hint, exercise


class _Device:
    """A device and a host that share one clock, which moves only when it is told to: all times are exact.

    Seconds: ``launch`` keeps the host for ``call``, a kernel keeps the device for ``kernel``, the first launch
    costs the host ``first`` more (it compiles), and whoever waits pays ``latency`` besides.
    """

    def __init__(self, kernel, call=5e-6, first=0.3, latency=2e-5, busy=0.5):
        self.kernel, self.call, self.first, self.latency = kernel, call, first, latency
        self.now = 100.0
        self.free = self.now + busy  # somebody else's work is in the queue
        self.launches = self.waits = 0

    def launch(self):
        self.now += self.call + (0 if self.launches else self.first)
        self.launches += 1
        self.free = max(self.free, self.now) + self.kernel

    def synchronize(self):
        self.waits += 1
        self.now = max(self.now, self.free) + self.latency

    def clock(self):
        return self.now


@exercise
def time_kernel(function):
    for kernel, n in ((2e-3, 100), (3e-4, 50), (7e-3, 20)):
        device = _Device(kernel)
        answer = function(device.launch, device.synchronize, device.clock, n)
        if not isinstance(answer, int | float):
            raise Hint(f"return seconds, a number, not {type(answer).__name__}")
        _compare_time(answer, device, kernel, n)
    return "a warm-up, two waits, and one kernel's time"


def _compare_time(answer, device, kernel, n):
    case = f"a kernel takes {1e3 * kernel:g} ms, n is {n}: you say {1e3 * answer:.3g} ms"
    right = abs(answer - kernel) <= 0.02 * kernel
    if device.launches not in (n + 1,) and right:
        raise Hint(f"right, but with {device.launches} launches; one to warm up and {n} to time are {n + 1}")
    if device.waits > 2:
        raise Hint(
            f"{case}, and you waited {device.waits} times; each wait empties the queue and costs, two are enough"
        )
    if right:
        return
    if abs(answer - n * kernel) <= 0.02 * n * kernel:
        raise Hint(f"{case}; that is all {n} together")
    if answer < 0.5 * kernel:
        raise Hint(f"{case}; the clock is read before the kernels are done: that is what launching costs")
    if device.launches <= n:
        raise Hint(f"{case}; the first launch of a kernel compiles it: launch one more, before you start the clock")
    raise Hint(f"{case}; when the clock starts, the queue still holds work: wait once before, too")


@exercise
def scaled_step(function):
    # Factors of the loss: 1e-6 makes gradients too small for float16, 0.5 lets those of the matrices overflow.
    runs = (
        ("ordinary losses", [0.02] * 9, 4),
        ("tiny losses", [1e-6] * 2, 4),
        ("an overflow in the third step", [0.02, 0.02, 0.5, 0.02, 0.02, 0.02], 3),
        ("a NaN in the second step", [0.02, float("nan"), 0.02, 0.02], 2),
    )
    for name, factors, interval in runs:
        _compare_scale(function, name, factors, interval)
    return "the gradients, the steps and the scales of torch.amp.GradScaler"


def _network():
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    return model, 8 * torch.randn(8, 6, generator=generator), torch.arange(8) % 3


def _loss(model, rows, labels, factor):
    with torch.autocast("cpu", torch.float16):
        return factor * F.cross_entropy(model(rows), labels)


def _compare_scale(function, name, factors, interval):
    model, rows, labels = _network()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)
    scale, good = 2.0**16, 0
    for number, factor in enumerate(factors, start=1):
        case = f"{name}, step {number}"
        model.zero_grad()
        weights = list(model.parameters())
        result = function(_loss(model, rows, labels, factor), weights, scale, good, interval)
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise Hint("return three things: whether to step, the next scale, the next count of good steps")
        step, next_scale, good = result

        optimizer.zero_grad()
        scaler.scale(_loss(reference, rows, labels, factor)).backward()
        scaler.unscale_(optimizer)
        found = [weight.grad for weight in reference.parameters()]
        scaler.step(optimizer)
        scaler.update()
        finite = all(gradient.isfinite().all() for gradient in found)
        if bool(step) != finite:
            if finite:
                raise Hint(f"{case}: all gradients are finite, and you leave the step out")
            raise Hint(f"{case}: a gradient is inf or NaN, so this step must be left out")
        if finite:
            _compare_gradients(weights, found, (model, rows, labels, factor, scale), case)
        if next_scale != scaler.get_scale():
            raise Hint(
                f"{case} (interval {interval}): the scale goes from {scale:,.0f} to {scaler.get_scale():,.0f}, "
                f"yours to {next_scale:,.0f}"
            )
        scale = next_scale


def _compare_gradients(weights, right, step, case):
    if any(weight.grad is None for weight in weights):
        raise Hint(f"{case}: a weight has no gradient; call backward")
    if _near(_flat(weights), right):
        return
    model, rows, labels, factor, scale = step
    mine = [weight.grad.clone() for weight in weights]
    if _near([gradient / scale for gradient in mine], right):
        raise Hint(f"{case}: your gradients are still times the scale")
    model.zero_grad()
    _loss(model, rows, labels, factor).backward()  # without a scale: what float16 leaves of it
    if _near(_flat(weights), mine):
        raise Hint(
            f"{case}: these gradients went without a scale, and on the way, in float16, much of them became zero; "
            "scale before backward"
        )
    raise Hint(f"{case}: the weights' gradients are not those of torch.amp.GradScaler")


def _flat(weights):
    return [weight.grad for weight in weights]


def _near(mine, right):
    return all(
        (a - b).norm() <= 1e-3 * b.norm() if b.norm() else not a.norm() for a, b in zip(mine, right, strict=True)
    )
