"""The exercises of chapter 16: what is right passes, and each natural mistake gets a hint that helps."""

import ignite.distributed as idist
import pytest
import torch
import torch.nn.functional as F
from checking import said, stub, wrong

from ignite_ddl.course.checks import ch16 as checks


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return idist.all_reduce(gradient.clone())


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return idist.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return idist.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return idist.all_reduce(gradient.clone())


def whole_of(part):
    """Gathered along the last dim, by a sum of what is padded with zeros: differentiable."""
    rank, n, wide = idist.get_rank(), idist.get_world_size(), part.shape[-1]
    return SumBothWays.apply(F.pad(part, (rank * wide, (n - rank - 1) * wide)))


# --- a gated MLP ----------------------------------------------------------------------------------------


def gated(x, gate, up, down):
    x = Enter.apply(x)
    return Leave.apply(F.silu(x @ gate) * (x @ up) @ down)


def not_entered(x, gate, up, down):
    return Leave.apply(F.silu(x @ gate) * (x @ up) @ down)


def not_left(x, gate, up, down):
    x = Enter.apply(x)
    return F.silu(x @ gate) * (x @ up) @ down


def entered_twice(x, gate, up, down):
    return Leave.apply(F.silu(Enter.apply(x) @ gate) * (Enter.apply(x) @ up) @ down)


def one_branch_entered(x, gate, up, down):
    return Leave.apply(F.silu(Enter.apply(x) @ gate) * (x @ up) @ down)


def left_early(x, gate, up, down):
    x = Enter.apply(x)
    return Leave.apply(F.silu(x @ gate)) * Leave.apply(x @ up) @ down


def plain_sum(x, gate, up, down):
    return idist.all_reduce((F.silu(x @ gate) * (x @ up) @ down).detach())


def gathered(x, gate, up, down):
    """Sums too much, but right: the hidden layer travels."""
    x = Enter.apply(x)
    Leave.apply((x @ up).detach())
    return Leave.apply(F.silu(x @ gate) * (x @ up) @ down)


def test_a_gated_mlp(capsys):
    assert checks.gated_mlp(gated)
    assert said(capsys) == "right: every derivative is that of one process, for one all-reduce each way"


WRONG_MLPS = {
    "write the body": stub,
    "should return a float64 tensor of shape (6, 8)": lambda x, gate, up, down: (x @ gate)[:, 1:],
    "y has no backward": plain_sum,
    "rank 0 returns its own term of y": not_left,
    "y on rank 0 is not that of one process": left_early,
    "dx on rank 0 is only its share": not_entered,
    "dx on rank 0 is not that of one process": one_branch_entered,
    "dx on rank 0 is 4 times too large": lambda x, gate, up, down: SumBothWays.apply(
        F.silu(Enter.apply(x) @ gate) * (Enter.apply(x) @ up) @ down
    ),
    "768 bytes backward, in 2 collectives; one all-reduce of a narrow tensor is 384": entered_twice,
    "768 bytes forward, in 2 collectives": gathered,
}


@pytest.mark.parametrize("hint", WRONG_MLPS)
def test_a_wrong_gated_mlp_gets_its_hint(hint, capsys):
    wrong(checks.gated_mlp, WRONG_MLPS[hint], hint, capsys)


# --- a norm over cut features ---------------------------------------------------------------------------


def norm_by(summed):
    def rms_norm(x, gain, n_features, eps):
        return x / (summed(x.square().sum(1, keepdim=True)) / n_features + eps).sqrt() * gain

    return rms_norm


def own_mean(x, gain, n_features, eps):
    return x / (x.square().mean(1, keepdim=True) + eps).sqrt() * gain


def own_count(x, gain, n_features, eps):
    return x / (SumBothWays.apply(x.square().sum(1, keepdim=True)) / x.shape[1] + eps).sqrt() * gain


def gathers(x, gain, n_features, eps):
    return x / (whole_of(x).square().mean(1, keepdim=True) + eps).sqrt() * gain


def whole_rows(x, gain, n_features, eps):
    return whole_of(x)


def no_eps(x, gain, n_features, eps):
    return norm_by(SumBothWays.apply)(x, gain, n_features, 0)


RIGHT_NORMS = {
    "Enter(Leave)": norm_by(lambda squares: Enter.apply(Leave.apply(squares))),
    "an all-reduce both ways": norm_by(SumBothWays.apply),
}


@pytest.mark.parametrize("name", RIGHT_NORMS)
def test_a_norm_over_cut_features(name, capsys):
    assert checks.rms_norm(RIGHT_NORMS[name])
    assert said(capsys) == "right: the norm of whole rows and its derivatives, for one number a row each way"


WRONG_NORMS = {
    "write the body": stub,
    "should return a float64 tensor of shape (5, 2)": whole_rows,
    "rank 0 divides by what it knows of its own features": own_mean,
    "rank 0 divides by what it knows of its own": norm_by(lambda squares: squares),
    "rank 0 divides the sum of all squares by its own number of features": own_count,
    "y on rank 0 is not that of one process": no_eps,
    "the mean counts as a constant": norm_by(lambda squares: idist.all_reduce(squares.detach())),
    "only what comes back from its own features": norm_by(Leave.apply),
    "dx on rank 0 is not that of one process": norm_by(lambda s: Enter.apply(SumBothWays.apply(s))),
    "puts in 320 bytes forward, in 1 collective; one number a row is 40": gathers,
}


@pytest.mark.parametrize("hint", WRONG_NORMS)
def test_a_wrong_norm_gets_its_hint(hint, capsys):
    wrong(checks.rms_norm, WRONG_NORMS[hint], hint, capsys)
