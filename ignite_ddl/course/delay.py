"""A layer that only sleeps for a given time, so that ranks have equal, known work on any machine.

Four ranks that compute on two cores slow each other down; four ranks that sleep do not. Chapters about schedules
therefore use stated delays as passes, and say so.
"""

from __future__ import annotations

import time

import torch
from torch import nn

__all__ = ["Delay"]


class Delay(nn.Module):
    """The identity, with a given time for the forward and the backward pass.

    Place it after a layer with weights: the first stage's input needs no gradient, so a Delay as its first layer
    would have no backward pass. In a schedule that splits backward, ``backward`` is the time of the gradient of the
    input and ``backward_weight`` that of the weights (on stage 0 torch computes both in the second part).

    Args:
        forward: Seconds of a forward pass with gradients enabled, per microbatch. Default: 0.
        backward: Seconds of a backward pass for the gradient of the input. Default: 0.
        backward_weight: Seconds of a backward pass for the gradient of the weights. Default: 0.
        per_row: Whether the times are per row of the microbatch. Default: False.

    Returns:
        Of its forward: the input, unchanged.

    Raises:
        ValueError: If a time is negative.

    Example:
        >>> import time, torch
        >>> from ignite_ddl.course import Delay
        >>> stage = torch.nn.Sequential(torch.nn.Linear(4, 4), Delay(forward=0.02, backward=0.04))
        >>> start = time.perf_counter()
        >>> stage(torch.zeros(2, 4)).sum().backward()
        >>> time.perf_counter() - start >= 0.06
        True
    """

    def __init__(self, forward=0.0, backward=0.0, backward_weight=0.0, per_row=False):
        super().__init__()
        self.seconds = {"forward": forward, "backward": backward, "backward_weight": backward_weight}
        for name, seconds in self.seconds.items():
            if seconds < 0:
                raise ValueError(f"{name} is {seconds!r}; it has to be a time of at least 0 seconds")
        self.per_row = per_row
        # A weight without effect, whose gradient takes the time.
        self.weight = nn.Parameter(torch.zeros(1)) if backward_weight else None

    def extra_repr(self):
        given = ", ".join(f"{name}={seconds:g}" for name, seconds in self.seconds.items())
        return given + ", per_row=True" * self.per_row

    def forward(self, x):
        if not torch.is_grad_enabled():
            return x
        times = {name: seconds * (len(x) if self.per_row else 1) for name, seconds in self.seconds.items()}
        time.sleep(times["forward"])
        y = _SleepInBackward.apply(x, times["backward"]) if times["backward"] else x  # without a time: no copy
        if self.weight is not None:
            y = y + 0 * _SleepInBackward.apply(self.weight, times["backward_weight"]).to(y.dtype)
        return y


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None
