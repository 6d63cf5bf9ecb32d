"""The divisor of a loss: rows, counted targets, or nothing. Ranks and microbatches are weighted by it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from ignite_ddl.arguments import FUNCTION, Fits, check, one_of
from ignite_ddl.tensor.loss import cross_entropy

__all__ = ["Divisor", "divisor_of", "n_rows"]

DIVISOR = Fits('"rows", "sum" or a function from targets to a number', (one_of("rows", "sum") | FUNCTION).read)
IGNORED = -100  # torch's default of ignore_index
_CLASSIFYING = (F.cross_entropy, F.nll_loss, cross_entropy)


def n_rows(y: Any) -> int:
    """The number of rows of a batch of any structure: the length of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(y) if isinstance(leaf, torch.Tensor) and leaf.ndim), 1)


class Divisor:
    """The divisor of the loss of some rows, as a function of their targets.

    Args:
        kind: "rows", "sum" (no divisor), or a function from targets to a number.
        known: whether this is certain; else a trainer compares the loss of a batch with those of its parts.
        ignored: with "rows": whether the loss ignores targets of -100.
    """

    def __init__(self, kind: str | Callable[[Any], Any], known: bool = True, ignored: bool = False) -> None:
        self.kind, self.known, self.ignored = kind, known, ignored

    @property
    def counts(self) -> bool:
        """Whether the ranks have to sum their divisors before the backward pass."""
        return callable(self.kind)

    def of(self, y: Any) -> float:
        """The divisor of these targets."""
        return float(self.kind(y)) if callable(self.kind) else float(n_rows(y))

    def share(self, part: Any, whole: Any) -> float:
        """The weight of a part's loss in the loss of the whole."""
        if self.kind == "sum":
            return 1.0
        divisor = self.of(whole)
        return self.of(part) / divisor if divisor else 0.0


def divisor_of(loss_fn: Callable, given: str | Callable[[Any], Any] | None = None) -> Divisor:
    """The divisor of a loss function, as given by the user or recognised from the function.

    Recognised are ``nn.CrossEntropyLoss``, ``nn.NLLLoss``, their functions and ``ddl.cross_entropy``, with their
    ``ignore_index`` and ``weight``, also in a ``functools.partial``, and ``reduction="sum"`` of all losses of torch.

    Args:
        loss_fn: the loss function.
        given: the user's ``loss_divisor``: "rows", "sum", a function of targets, or None.

    Returns:
        Divisor: the divisor.

    Raises:
        ValueError: if ``given`` is something else.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl.divisor import divisor_of

            loss_fn = torch.nn.CrossEntropyLoss(ignore_index=0)
            assert divisor_of(loss_fn).of(torch.tensor([0, 3, 1])) == 2
    """
    if given is not None:
        return Divisor(check("loss_divisor", given, DIVISOR))
    options: dict[str, Any] = {}
    function = loss_fn
    while isinstance(function, functools.partial):
        options = {**function.keywords, **options}
        function = function.func
    classifies = function in _CLASSIFYING
    if isinstance(function, nn.modules.loss._Loss):
        names = ("ignore_index", "weight", "reduction")
        options = {name: getattr(function, name) for name in names if hasattr(function, name)}
        classifies = isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss)
    if options.get("reduction", "mean") == "sum":
        return Divisor("sum")
    weight, ignore_index = options.get("weight"), options.get("ignore_index", IGNORED)
    if not classifies:
        return Divisor("rows", known=False)
    if weight is None and ignore_index == IGNORED:
        return Divisor("rows", ignored=True)
    return Divisor(functools.partial(_counted, ignore_index=ignore_index, weight=weight))


def _counted(y: torch.Tensor, ignore_index: int, weight: torch.Tensor | None) -> torch.Tensor:
    """The divisor of a classification loss: the targets that are not ignored, or the weights of their classes."""
    if y.is_floating_point():  # probabilities: each row counts
        return torch.tensor(len(y))
    counted = y[y != ignore_index]
    return counted.numel() if weight is None else weight.to(counted.device)[counted].sum()
