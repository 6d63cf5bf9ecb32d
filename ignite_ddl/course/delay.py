"""A layer that does nothing but take a stated time: how a chapter gives ranks equal, known work on any machine.

Four ranks on two cores compute in each other's way; four ranks that sleep do not. So where a schedule's shape is
the matter, its passes are made of stated delays, and the page says so.
"""

from __future__ import annotations

import time

import torch
from torch import nn

__all__ = ["Delay"]


class Delay(nn.Module):
    """Hands its input on, after a stated time; backward likewise.

    Put it behind a layer with weights: the first stage's input needs no gradient, and a Delay right there would
    have no backward pass. Where a schedule cuts the backward pass in two, ``backward`` is spent on the gradient of
    the input and ``backward_weight`` on that of the weights (on stage 0 torch does both in the second part).

    Args:
        forward: Seconds of a forward pass with gradients, as each microbatch makes one. Default: 0.
        backward: Seconds of a backward pass, as far as the input is concerned. Default: 0.
        backward_weight: Seconds of a backward pass, as far as weights are concerned. Default: 0.
        per_row: Whether the times are per row of the microbatch instead. Default: False.

    Returns:
        Of its forward: the input's values, shape unchanged.

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
        # A weight that changes nothing, so that there is a gradient of weights to take time for.
        self.weight = nn.Parameter(torch.zeros(1)) if backward_weight else None

    def extra_repr(self):
        given = ", ".join(f"{name}={seconds:g}" for name, seconds in self.seconds.items())
        return given + ", per_row=True" * self.per_row

    def forward(self, x):
        if not torch.is_grad_enabled():
            return x
        times = {name: seconds * (len(x) if self.per_row else 1) for name, seconds in self.seconds.items()}
        time.sleep(times["forward"])
        y = _SleepInBackward.apply(x, times["backward"])
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
