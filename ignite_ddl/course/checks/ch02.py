"""The checks of chapter 02: a stopwatch for a device that works by itself, and a loss scale that finds its size."""

import torch

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
        raise Hint(
            f"{case}; the first launch of a kernel compiles it: launch one more, before you start the clock"
        )
    raise Hint(f"{case}; when the clock starts, the queue still holds work: wait once before, too")


@exercise
def scaled_step(function):
    # As backward leaves them in float16, times a scale of 65536 at first; the tiny ones are 1e-8 and 2e-8.
    ordinary, tiny, overflow = [1024.0, -2048.0], [6.55e-4, 1.31e-3], [1024.0, float("inf")]
    runs = (
        ("ordinary gradients", [ordinary] * 9, 4),
        ("tiny gradients", [tiny, tiny], 4),
        ("an overflow in the third step", [ordinary, ordinary, overflow, ordinary, ordinary, ordinary], 3),
        ("a NaN in the second step", [ordinary, [float("nan"), 1.0], ordinary, ordinary], 2),
    )
    for name, steps, interval in runs:
        _compare_scale(function, name, steps, interval)
    return "the steps and the scales of torch.amp.GradScaler, unscaled in float32"


def _compare_scale(function, name, steps, interval):
    parameters = [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)
    scaler.scale(torch.ones(()))  # makes the scale, as scaling a loss does
    scale, good = 2.0**16, 0
    for number, step in enumerate(steps, start=1):
        arrived = [torch.tensor([512.0]).half(), torch.tensor(step).half()]
        result = function([gradient.clone() for gradient in arrived], scale, good, interval)
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise Hint(
                "return three things: the gradients or None, the next scale, the next count of good steps"
            )
        gradients, next_scale, good = result

        for parameter, gradient in zip(parameters, arrived, strict=True):
            parameter.data.zero_()
            parameter.grad = gradient.float()
        scaler.step(optimizer)  # with a rate of 1 the weights are now minus the gradients
        scaler.update()
        true = [-parameter.detach() for parameter in parameters]
        _compare_gradients(gradients, true, f"{name}, step {number}", arrived, scale)
        if next_scale != scaler.get_scale():
            raise Hint(
                f"{name}, step {number} (interval {interval}): the scale goes from {scale:,.0f} to "
                f"{scaler.get_scale():,.0f}, yours to {next_scale:,.0f}"
            )
        scale = next_scale


def _compare_gradients(gradients, true, case, arrived, scale):
    finite = all(torch.isfinite(gradient).all() for gradient in arrived)
    if not finite:
        if gradients is not None:
            raise Hint(f"{case}: a gradient is inf or NaN; return None, this step must be left out")
        return
    if gradients is None:
        raise Hint(f"{case}: all gradients are finite, and you left the step out")
    for mine, right in zip(gradients, true, strict=True):
        if mine.dtype != torch.float32:
            raise Hint(
                f"{case}: your gradients are {mine.dtype}; the weights are float32, and so is the step"
            )
        if not torch.allclose(mine, right, rtol=1e-4, atol=0):
            text = f"{case}: gradients are {_digits(right)}, yours {_digits(mine)}"
            if bool((mine == 0).any()) and bool((right != 0).all()):
                text += "; divided in float16 it vanishes after all, so make it float32 first"
            elif torch.allclose(mine, right * scale, rtol=1e-3):
                text += ", still times the scale"
            raise Hint(text)


def _digits(values):
    return ", ".join(f"{value:.3g}" for value in values.tolist())
