"""The divisor of a loss, by which ranks and microbatches are weighted: known, declared, or checked.

- *Known*: torch's classification losses and ``ddl.cross_entropy`` divide by the targets that count (``ignore_index``,
  ``weight``), and every loss of torch with ``reduction="sum"`` has no divisor. Of other functions, and of modules with
  hooks, the same is taken for declared.
- *Declared*: ``loss_divisor=`` is ``"rows"``, ``"sum"``, or a function from targets to the divisor; its values for
  parts of the rows have to add up to that of all. ``"local"`` is the mean of what ranks and microbatches compute from
  their own rows, whatever that is: it is not compared with anything.
- *Checked*: any other loss is assumed to be a mean over rows, and compared with the mean of its values for parts of the
  rows (loss_contract.py). What cannot be checked has to be declared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ignite_ddl.arguments import FUNCTION, Fits, check, one_of
from ignite_ddl.structure import n_rows, n_samples, tensors_of, tensors_of_rows
from ignite_ddl.tensor.loss import cross_entropy

DIVISOR = Fits(
    '"rows", "sum", "local" or a function from targets to a number', (one_of("rows", "sum", "local") | FUNCTION).read
)
IGNORED = -100  # torch's default of ignore_index
_CLASSIFICATION_LOSSES = (F.cross_entropy, F.nll_loss, cross_entropy)


class Divisor:
    """The divisor of the loss of some rows, as a function of their targets.

    Args:
        kind: "rows", "sum" (no divisor), or a function from targets to a number.
        certain: whether it is known or declared; else it is checked.
        pads: whether targets of a batch may be padding, which does not count: a function of them, or a bool.
        declared: whether the user has declared it, or named it by ``reduction="sum"``, so that it is compared where
            that is possible.
        is_local: whether the mean of what ranks compute is meant.
    """

    def __init__(
        self,
        kind: str | Callable[[Any], Any],
        certain: bool = True,
        pads: bool | Callable[[Any], Any] = False,
        declared: bool = False,
        is_local: bool = False,
    ) -> None:
        self.kind, self.certain, self.pads, self.declared, self.is_local = kind, certain, pads, declared, is_local
        self.known: dict[int, tuple[Any, float]] | None = None  # of targets of this step, by id: a GPU is read once

    def of(self, y: Any) -> float:
        """The divisor of these targets."""
        if not callable(self.kind):
            return float(n_rows(y))
        if self.known is None:
            return float(self.kind(y))
        if id(y) not in self.known:
            self.known[id(y)] = y, float(self.kind(y))
        return self.known[id(y)][1]

    def share(self, part: Any, batch: Any) -> float:
        """The weight of the loss of a part in the loss of a batch, given the targets of both."""
        if self.kind == "sum":
            return 1.0
        divisor = self.of(batch)
        return self.of(part) / divisor if divisor else 0.0

    def may_pad(self, y: Any) -> bool:
        """Whether these targets may hold padding that does not count, so that ranks may pad to other lengths."""
        return bool(self.pads(y) if callable(self.pads) else self.pads)

    def local(self, rows: tuple[int, int | None] | None, x: Any, y: Any, strict: bool = False) -> float | None:
        """The divisor of this rank's part of a batch; None for a sum.

        Args:
            rows: the local and the global number of rows of the batch; None if the loader does not say.
            x: this rank's inputs.
            y: their targets.
            strict: whether to refuse targets whose rows may be in dim 1. Default: False.
        """
        if self.kind == "sum":
            return None
        if rows is not None and rows[0] == 0:
            return 0.0
        if callable(self.kind):
            return self.of(y)
        if rows is None:
            return float(n_samples(x, y))
        if self.is_local:
            return float(rows[0])
        return float(_rows_left(rows[0], x, y) if self.certain else _count_rows(rows[0], x, y, strict))


def _rows_left(loader_rows: int, x: Any, y: Any) -> int:
    """The rows of a batch: as many as the loader has read, or the other length of all tensors, if not that of dim 0
    beside rows in dim 1.
    """
    tensors = [[t for t in tensors_of_rows(part, loader_rows) if t.ndim] for part in (x, y)]
    lengths, in_dim_1 = {len(t) for t in sum(tensors, [])}, [t.shape[1:2] == (loader_rows,) for t in sum(tensors, [])]
    return lengths.pop() if tensors[0] and len(lengths) == 1 and not all(in_dim_1) else loader_rows


def _count_rows(loader_rows: int, x: Any, y: Any, strict: bool) -> int:
    """The rows of a batch: as many as the loader has read, or as collate_fn has made of them."""
    tensors = [tensor for tensor in tensors_of(y) or tensors_of(x) if tensor.ndim]
    if not tensors or len(tensors[0]) == loader_rows or (isinstance(y, list | tuple) and len(y) == loader_rows):
        return loader_rows
    first = tensors[0]
    uneven = any(len(tensor) != len(first) for tensor in tensors)
    if strict and (uneven or first.ndim > 1 and first.shape[1] == loader_rows):
        raise ValueError(
            f"targets should have a row for each of this rank's {loader_rows} rows, but have shape "
            f"{tuple(first.shape)}: if collate_fn leaves rows out, leave them out of the dataset instead (torch's "
            'Subset); if rows are in dim 1, pass loss_divisor="rows"; else a function from targets to the divisor of '
            "the loss, such as loss_divisor=len"
        )
    return len(first)  # packed, dropped, or several views of each: a mean over these, which is checked


def divisor_of(loss_fn: Callable, declared: str | Callable[[Any], Any] | None = None) -> Divisor:
    """The divisor of a loss function, as declared by the user or known from the function.

    Args:
        loss_fn: the loss function; its keyword arguments may be given by ``functools.partial``.
        declared: the user's ``loss_divisor``: "rows", "sum", "local", a function of targets, or None.

    Returns:
        Divisor: the divisor; of an unknown function "rows", not certain.

    Raises:
        ValueError: if ``declared`` is something else.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl.loss_contract import divisor_of

            loss_fn = torch.nn.CrossEntropyLoss(ignore_index=0)
            assert divisor_of(loss_fn).of(torch.tensor([0, 3, 1])) == 2
    """
    if declared is not None:
        kind = check("loss_divisor", declared, DIVISOR)
        return Divisor(
            "rows" if kind == "local" else kind, pads=True, declared=kind != "local", is_local=kind == "local"
        )
    options: dict[str, Any] = {}
    function = loss_fn
    while isinstance(function, functools.partial):
        options = {**function.keywords, **options}
        function = function.func
    is_classification = function in _CLASSIFICATION_LOSSES
    is_known = is_classification or getattr(F, getattr(function, "__name__", ""), None) is function
    if type(function).__module__ == nn.modules.loss.__name__:  # a subclass may compute something else
        names = ("ignore_index", "weight", "reduction")
        options = {name: getattr(function, name) for name in names if hasattr(function, name)}
        is_classification = isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss)
        is_known = not (function._forward_hooks or function._forward_pre_hooks or "forward" in vars(function))
    ignore_index = options.get("ignore_index", IGNORED)
    pads: bool | Callable[[Any], bool] = is_classification
    if is_classification and ignore_index == IGNORED:
        pads = functools.partial(_has_ignored, ignore_index=IGNORED)
    of_old = [options[name] for name in ("size_average", "reduce") if is_known and options.get(name) is not None]
    is_sum = not all(of_old) if of_old else options.get("reduction", "mean") == "sum"  # the old names have precedence
    if is_sum:
        return Divisor("sum", pads=pads, declared=not is_known)
    if not is_classification:
        return Divisor("rows", certain=False)
    weight = options.get("weight")
    n_counted = functools.partial(_n_counted, ignore_index=ignore_index, weight=weight)
    divisor = Divisor(n_counted, pads=pads, declared=not is_known)
    if callable(pads) and weight is None:
        divisor.pads = lambda y: _has_indices(y) and divisor.of(y) < y.numel()  # a GPU is read once for both
    return divisor


def _has_ignored(y: Any, ignore_index: int) -> bool:
    return _has_indices(y) and bool((y == ignore_index).any())


def _has_indices(y: Any) -> bool:
    return isinstance(y, torch.Tensor) and y.dtype in (torch.int64, torch.int32, torch.int16)


def _n_counted(y: torch.Tensor, ignore_index: int, weight: torch.Tensor | None) -> torch.Tensor | int:
    """The divisor of a classification loss: the targets that are not ignored, or the weights of their classes."""
    if y.is_floating_point():  # probabilities of classes
        return y.numel() // y.shape[1] if y.ndim > 1 else 1
    if weight is None:
        return (y != ignore_index).sum()
    return weight.to(y.device)[y[y != ignore_index]].sum()
