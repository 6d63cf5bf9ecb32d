"""Natural mistakes in chapter 16's exercises."""

from functools import partial

import ignite.distributed as idist
import torch
import torch.nn.functional as F


def summed(x):
    return idist.all_reduce(x.clone())


class Sum(torch.autograd.Function):
    """Sums over ranks forward, backward, or both ways."""

    @staticmethod
    def forward(ctx, x, ways):
        ctx.ways = ways
        return summed(x) if "forward" in ways else x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient) if "backward" in ctx.ways else gradient, None


def enter(x):
    return Sum.apply(x, "backward")


def leave(x):
    return Sum.apply(x, "forward")


def both(x):
    return Sum.apply(x, "forward and backward")


def same(x):
    return x


def gated(x, gate, up, down, first=enter, gate_in=same, up_in=same, middle=same, last=leave):
    x = first(x)
    return last(middle(F.silu(gate_in(x) @ gate)) * middle(up_in(x) @ up) @ down)


def moves_the_hidden_layer(x, gate, up, down):
    summed((x @ up).detach())
    return gated(x, gate, up, down)


def norm(x, gain, n_features, eps, total=lambda squares: enter(leave(squares))):
    return x / (total(x.square().sum(1, keepdim=True)) / n_features + eps).sqrt() * gain


RIGHT = {"rms_norm": [partial(norm, total=both)]}
MISTAKES = {
    "gated_mlp": {
        "should return a float64 tensor of shape (6, 8)": lambda x, gate, up, down: (x @ gate)[:, 1:],
        "y has no backward": partial(gated, last=lambda y: summed(y.detach())),
        "rank 0 returns its own term of y": partial(gated, last=same),
        "y on rank 0 is not that of one process": partial(gated, middle=leave, last=same),
        "dx on rank 0 is 4 times too large": partial(gated, last=both),
        "dx on rank 0 is only its share": partial(gated, first=same),
        "dx on rank 0 is not that of one process": partial(gated, first=same, gate_in=enter),
        "768 bytes backward, in 2 collectives": partial(gated, first=same, gate_in=enter, up_in=enter),
        "768 bytes forward, in 2 collectives": moves_the_hidden_layer,
    },
    "rms_norm": {
        "should return a float64 tensor of shape (5, 2)": lambda x, *_: x[:, 1:],
        "rank 0 divides by what it knows of its own features": partial(norm, total=same),
        "0 divides the sum of all squares by": lambda x, gain, _, eps: norm(x, gain, x.shape[1], eps),
        "y on rank 0 is not that of one process": lambda x, gain, n_features, _: norm(x, gain, n_features, 0),
        "the mean counts as a constant": partial(norm, total=lambda squares: summed(squares.detach())),
        "only what comes back from its own features": partial(norm, total=leave),
        "dx on rank 0 is not that of one process": partial(norm, total=lambda squares: enter(both(squares))),
        "puts in 120 bytes forward, in 2 collectives; one number a row is 40": lambda x, *args: (
            norm(x, *args) + 0 * summed(x.detach()).sum()
        ),
    },
}
