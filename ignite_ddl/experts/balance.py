"""What keeps experts equally busy: losses of a router, which it adds to the gradient, and a bias without a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


def balance_loss(probabilities: torch.Tensor, counts: torch.Tensor, n_tokens: float) -> torch.Tensor:
    """E Σ f_i P_i of the Switch Transformer (Fedus et al. 2022, arXiv:2101.03961, eq. 4 to 6); 1 at perfect balance.

    f_i is expert i's part of all choices, P_i the mean of its probability over all tokens. Only P has a gradient, so
    with counts of all ranks, the sum of the ranks' values is the loss of all tokens. The mean of losses in which each
    rank counts its own tokens is another number.

    Args:
        probabilities: (tokens, experts) of this rank's tokens; each row sums to 1.
        counts: (experts,) integers: how many choices of all ranks' tokens fell on each expert.
        n_tokens: number of tokens of all ranks.

    Returns:
        Tensor: this rank's part of the loss, a number.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl.experts.balance import balance_loss

            probabilities = torch.tensor([[0.8, 0.2], [0.6, 0.4]])
            assert balance_loss(probabilities, torch.tensor([2, 0]), n_tokens=2).isclose(torch.tensor(2 * 0.7))
            assert balance_loss(probabilities, torch.tensor([1, 1]), n_tokens=2).isclose(torch.tensor(1.0))
    """
    f = counts.to(probabilities.dtype) / counts.sum().clamp(min=1)
    return len(f) * (f * probabilities.sum(0)).sum() / n_tokens


def z_loss(logits: torch.Tensor, n_tokens: float) -> torch.Tensor:
    """The mean of log²Σexp(logits) of ST-MoE (Zoph et al. 2022, arXiv:2202.08906, eq. 5), which keeps logits small.

    Args:
        logits: (tokens, experts) of this rank's tokens.
        n_tokens: number of tokens of all ranks.

    Returns:
        Tensor: this rank's part of the loss, a number.
    """
    return logits.logsumexp(1).square().sum() / n_tokens


def change_of_bias(counts: torch.Tensor) -> torch.Tensor:
    """+1 for experts below the mean load, -1 above it, 0 at it (Wang et al. 2024, arXiv:2408.15664, algorithm 1).

    Args:
        counts: (experts,) integers: the choices since the last change.

    Returns:
        Tensor: (experts,) integers, by which :class:`Router <ignite_ddl.experts.routing.Router>` moves its bias, times
        ``bias_rate``.
    """
    return torch.sign(counts.sum() - len(counts) * counts)


def add_loss(x: torch.Tensor, loss: torch.Tensor, then: Callable[[], None] = lambda: None) -> torch.Tensor:
    """``x``, whose backward pass also runs that of ``loss``, times the current weight, and calls ``then``.

    A backward pass runs once for each batch: not in evaluation, and not again where a forward pass is recomputed.

    Args:
        x: a tensor on which the loss of the model depends.
        loss: a number.
        then: called in the backward pass.

    Returns:
        Tensor: ``x``.
    """
    return _AddLoss.apply(x, loss, then)


class _AddLoss(torch.autograd.Function):
    """As in DeepSeek-V2's code and Megatron-LM's ``MoEAuxLossAutoScaler``, but for the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, then: Callable) -> torch.Tensor:
        ctx.then, ctx.like = then, loss.detach()
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        ctx.then()
        return grad, torch.full_like(ctx.like, _weight), None


_weight, _has_rows = 1.0, True  # not contextvars: on a GPU, backward passes run in a thread of their own


@contextlib.contextmanager
def router_loss_weight(factor: float, rows: bool = True) -> Iterator[None]:
    """Multiplies the weight that losses of routers have in backward passes by a factor, inside of a ``with`` block.

    A training step gives the factor of the batch (gradients are scaled, or accumulated over several batches), a
    pipeline that of a microbatch of its batch.

    Args:
        factor: by which the weight outside is multiplied.
        rows: False: the rows are those of another rank, lent to a rank without rows, and do not count. Default: True.
    """
    global _weight, _has_rows
    before = _weight, _has_rows
    _weight, _has_rows = _weight * factor, _has_rows and rows
    try:
        yield
    finally:
        _weight, _has_rows = before


def has_rows() -> bool:
    """Whether tokens of forward passes now count: not where a rank without rows computes with those of another."""
    return _has_rows
