"""What a loss divides by, which is how ranks and microbatches are weighted: known, declared, or checked.

- *Known*: torch's classification losses and ``ddl.cross_entropy`` divide by the targets that count (``ignore_index``,
  ``weight``), and every loss of torch with ``reduction="sum"`` by nothing.
- *Declared*: ``loss_divisor=`` is ``"rows"``, ``"sum"``, or a function from targets to the divisor.
- *Checked*: any other loss is taken for a mean over rows, and compared with the mean of its parts: in each step until a
  comparison was conclusive, and again in steps 2, 4, 8, …, since a mask or padding may first come later. What cannot be
  checked has to be declared.

This holds for each loss function and each model.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.arguments import FUNCTION, Fits, check, one_of
from ignite_ddl.compat import BELONGS_TO_A_MODEL, MODELS, unsharded_parameters
from ignite_ddl.context.sequence import two_halves
from ignite_ddl.mesh import Mesh
from ignite_ddl.pipeline.structure import concatenated, map_leaves, n_rows, some_rows, tensors_of
from ignite_ddl.tensor.loss import cross_entropy

__all__ = ["Divisor", "LossContract", "divisor_of"]

DIVISOR = Fits('"rows", "sum" or a function from targets to a number', (one_of("rows", "sum") | FUNCTION).read)
IGNORED = -100  # torch's default of ignore_index
_CLASSIFYING = (F.cross_entropy, F.nll_loss, cross_entropy)
_PATIENCE = 16  # inconclusive checks in a row, after which this is said
_DECLARE = (
    'pass loss_divisor="rows" for a mean over rows, "sum" for a sum, or a function from targets to the divisor of the '
    "loss, such as lambda y: (y != 0).sum()"
)


class Divisor:
    """The divisor of the loss of some rows, as a function of their targets.

    Args:
        kind: "rows", "sum" (no divisor), or a function from targets to a number.
        certain: whether it is known or declared; else it is checked.
        pads: whether targets of a batch may be padding, which does not count: a function of them, or a bool.
        declared: whether the user says so, of a loss that may do anything.
    """

    def __init__(
        self,
        kind: str | Callable[[Any], Any],
        certain: bool = True,
        pads: bool | Callable[[Any], Any] = False,
        declared: bool = False,
    ) -> None:
        self.kind, self.certain, self.pads, self.declared = kind, certain, pads, declared

    def of(self, y: Any) -> float:
        """The divisor of these targets."""
        return float(self.kind(y)) if callable(self.kind) else float(n_rows(y))

    def share(self, part: Any, whole: Any) -> float:
        """The weight of a part's loss in the loss of the whole."""
        if self.kind == "sum":
            return 1.0
        divisor = self.of(whole)
        return self.of(part) / divisor if divisor else 0.0

    def may_pad(self, y: Any) -> bool:
        """Whether these targets may hold padding that does not count, so that ranks may pad to other lengths."""
        return bool(self.pads(y) if callable(self.pads) else self.pads)

    def here(self, rows: tuple[int, int] | None, x: Any, y: Any, first: bool = False) -> float | None:
        """The divisor of this rank's part of a batch; None if there is none, or nobody knows.

        Args:
            rows: the numbers of rows of the batch here and on all dp ranks; None if the loader does not say.
            x: the inputs here.
            y: their targets.
            first: whether to refuse targets whose rows may be in dim 1. Default: False.
        """
        if self.kind == "sum":
            return None
        if rows is not None and rows[0] == 0:
            return 0.0
        if callable(self.kind):
            return self.of(y)
        if rows is None:  # of a loader that does not say
            return float(n_rows(y if tensors_of(y) else x))
        return float(rows[0] if self.certain else _rows_counted(rows[0], x, y, first))


def _rows_counted(dealt: int, x: Any, y: Any, strict: bool) -> int:
    """The rows of a batch: those that the loader has dealt, or those that collate_fn has made of them."""
    tensors = [tensor for tensor in tensors_of(y) or tensors_of(x) if tensor.ndim]
    if not tensors or len(tensors[0]) == dealt or (isinstance(y, list | tuple) and len(y) == dealt):
        return dealt
    first = tensors[0]
    if strict and (any(len(tensor) != len(first) for tensor in tensors) or first.ndim > 1 and first.shape[1] == dealt):
        raise ValueError(
            f"targets should have a row for each of the {dealt} rows that this rank was dealt, but have shape "
            f"{tuple(first.shape)}: if dim 1 counts rows, "
            + 'pass loss_divisor="rows"; else a function from targets to the divisor of the loss, such as '
            "loss_divisor=len"
        )
    return len(first)  # packed, dropped, or several views of each: a mean over these, which is checked


def divisor_of(loss_fn: Callable, declared: str | Callable[[Any], Any] | None = None) -> Divisor:
    """The divisor of a loss function, as declared by the user or known from the function.

    Args:
        loss_fn: the loss function; its keyword arguments may be given by ``functools.partial``.
        declared: the user's ``loss_divisor``: "rows", "sum", a function of targets, or None.

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
        return Divisor(check("loss_divisor", declared, DIVISOR), pads=True, declared=True)
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
    ignore_index = options.get("ignore_index", IGNORED)
    pads = classifies and (functools.partial(_ignores, ignore_index=IGNORED) if ignore_index == IGNORED else True)
    if options.get("reduction", "mean") == "sum":
        return Divisor("sum", pads=pads)
    if not classifies:
        return Divisor("rows", certain=False)
    return Divisor(functools.partial(_counted, ignore_index=ignore_index, weight=options.get("weight")), pads=pads)


def _ignores(y: Any, ignore_index: int) -> bool:
    whole_numbers = isinstance(y, torch.Tensor) and y.dtype in (torch.int64, torch.int32, torch.int16)
    return whole_numbers and bool((y == ignore_index).any())


def _counted(y: torch.Tensor, ignore_index: int, weight: torch.Tensor | None) -> torch.Tensor | int:
    """The divisor of a classification loss: the targets that are not ignored, or the weights of their classes."""
    if y.is_floating_point():  # probabilities of classes
        return y.numel() // y.shape[1] if y.ndim > 1 else 1
    if weight is None:
        return (y != ignore_index).sum()
    return weight.to(y.device)[y[y != ignore_index]].sum()


class LossContract:
    """One loss function of one model, and what is known of it.

    Args:
        loss_fn: takes an output and targets.
        divisor: its :class:`Divisor`.
        mesh: the mesh.
        model: the model. DDP reduces gradients of its weights wherever they are used; others only inside of it.

    Attributes:
        density: the divisor per row of the first batch, the same on all ranks; None before that.
        others: models of ``ddl.auto_model`` whose weights the loss depends on besides ``model``'s.
    """

    def __init__(self, loss_fn: Callable, divisor: Divisor, mesh: Mesh, model: nn.Module) -> None:
        self.loss_fn, self.divisor, self.mesh, self.model = loss_fn, divisor, mesh, model
        self.density: float | None = None
        self.others: list[nn.Module] = []
        self.calls = self.inconclusive = 0
        self.padded = False  # whether targets of a step were padding
        self.looks = False  # whether this step checks
        self.agreed = divisor.certain or mesh.dp_cp_size * mesh.pp_size == 1
        self.is_compared = not divisor.certain or (mesh.cp_size > 1 and divisor.declared)
        self.seen: list[tuple[Any, Any]] = []  # detached outputs and targets of this step, by microbatch
        self.kept: list[tuple[Any, Any]] = []  # of steps before, until there are two rows

    def begin(self, y: Any) -> None:
        """Starts a step; one with targets of -100, which torch's losses ignore by default, is always checked."""
        self.calls += 1
        again = self.calls & (self.calls - 1) == 0
        waits = not self.agreed and self.inconclusive < _PATIENCE
        ignores = not self.divisor.certain and any(bool((tensor == IGNORED).any()) for tensor in tensors_of(y))
        self.looks = self.mesh.dp_cp_size * self.mesh.pp_size > 1 and (again or waits or ignores)
        self.seen = []

    def look(self, loss: torch.Tensor, output: Any, y: Any, since: int) -> None:
        """Looks at the graph of a loss, and keeps what :meth:`compare` needs; called in steps that check.

        Args:
            loss: what ``loss_fn`` returned.
            output: what it was given.
            y: the targets.
            since: the number of the newest node of autograd before it was called.

        Raises:
            ValueError: if the loss depends on weights whose gradients would be wrong, or, if its divisor was not
                declared, on anything else than rows of the output.
        """
        if not self.seen:
            ends, weights, older = _reached(loss, output, since)
            self._check_weights(weights)
            n = n_rows(y) if tensors_of(y) else n_rows(output)
            without = bool(ends) and not any(end.ndim and len(end) == n for end in ends)
            if not self.divisor.certain and (older or without):
                what = "a number without rows" if without else "something that the model has kept besides its output"
                raise ValueError(
                    f"loss_fn should be a function of the output's rows, but uses {what} (a loss or an auxiliary term "
                    f"that the model computes), so what it divides by cannot be checked: {_DECLARE}"
                )
        if self.is_compared:
            self.seen.append(map_leaves(_detached, (output, y)))

    def _check_weights(self, weights: list[nn.Parameter]) -> None:
        if not weights:
            return
        mine = {id(p) for p in [*self.model.parameters(), *unsharded_parameters(self.model)]}
        if not mine.isdisjoint(map(id, weights)) and not isinstance(self.model, DistributedDataParallel):
            raise ValueError(
                "loss_fn uses weights besides the model's output (a regulariser?), whose gradients are not added up "
                "over ranks here: use weight_decay, or compute the term in a layer"
            )
        reached = set(map(id, weights))
        self.others = [
            model
            for model in list(MODELS)
            if model is not self.model
            and not reached.isdisjoint(map(id, [*model.parameters(), *unsharded_parameters(model)]))
        ]
        known = {id(p) for model in list(MODELS) for p in unsharded_parameters(model)}
        foreign = [weight for weight in weights if not hasattr(weight, BELONGS_TO_A_MODEL) and id(weight) not in known]
        if foreign and not isinstance(self.loss_fn, DistributedDataParallel):
            raise ValueError(
                f"loss_fn has weights of its own, such as one of shape {tuple(foreign[0].shape)}, whose gradients "
                "nobody averages over ranks: make them a part of the model, or pass loss_fn to ddl.auto_model"
            )

    def compare(self) -> bool:
        """Compares the loss of this step's rows with the weighted mean of those of up to three parts.

        ``loss_fn`` is called four times, on every rank that computes losses, without gradients; its random numbers are
        not taken from the user's stream.

        Returns:
            bool: whether it is conclusive: equal values of all parts are not, nor is a single row.

        Raises:
            ValueError: if the loss is not a mean over rows, or cannot be checked.
        """
        if self.mesh.cp_size > 1:
            for output, y in self.seen:
                self._compare_tokens(output, y)
        if self.divisor.certain:
            return True
        pairs = [*self.kept, *self.seen]
        sizes = [n_rows(y) if tensors_of(y) else n_rows(output) for output, y in pairs]
        output, y = (concatenated(parts, sizes) for parts in zip(*pairs, strict=True))
        n = sum(sizes)
        if n == 0:  # of a loader of which this rank has got no rows
            return False
        edges = sorted({0, max(1, n // 4), 2 * n // 3, n})
        parts = [(first, end) for first, end in itertools.pairwise(edges)]
        parts += [(0, 0)] * (3 - len(parts))  # the same number of calls on each rank
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                whole = self.loss_fn(output, y)
                values = [
                    float(self.loss_fn(*(some_rows(of, slice(first, end or n), n) for of in (output, y))))
                    for first, end in parts
                ]
        except Exception as error:
            raise ValueError(
                f"loss_fn should be a mean over rows, but fails with a part of them ({str(error).splitlines()[0]}), so "
                f"what it divides by cannot be checked: {_DECLARE}"
            ) from error
        self.kept = pairs if n < 2 else []
        loss = float(whole)
        mean = sum(value * (end - first) / n for value, (first, end) in zip(values, parts, strict=True))
        tolerance = torch.finfo(whole.dtype).eps ** 0.5 * max(1e-3, abs(loss))
        if not math.isfinite(loss):
            return False
        if not abs(mean - loss) <= tolerance:  # False for NaN, too
            raise ValueError(
                f"loss_fn should be a mean over rows, but gives {loss:.6g} for {n} rows and {mean:.6g} for the "
                f"weighted mean of parts of them: {_DECLARE}. If the mean of the dp ranks' losses is what you want, "
                'pass loss_divisor="rows"'
            )
        return n > 1 and max(values) - min(values) > tolerance

    def _compare_tokens(self, output: Any, y: Any) -> None:
        """Over cp a rank's loss is that of its tokens: raises unless those of two halves of them add up to it."""
        halves = two_halves((output, y))
        if halves is None:  # prepare_batch has made rows of tokens
            return
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                whole, *parts = (self._times_divisor(*pair) for pair in ((output, y), *halves))
        except Exception as error:
            raise ValueError(
                f"loss_fn should be a mean over tokens on a mesh with cp, but fails with a part of them "
                f"({str(error).splitlines()[0]}): pass loss_divisor=, a function from targets to the number that counts"
            ) from error
        scale = 0.5 if self.divisor.kind == "rows" else 1.0
        if math.isfinite(whole) and not abs(scale * sum(parts) - whole) <= 1e-4 * max(1e-3, abs(whole)):
            raise ValueError(
                f"loss_fn should be a mean over tokens on a mesh with cp, but its values for two halves of the "
                f"tokens of each row add up to {scale * sum(parts):.6g} and not to {whole:.6g}, that of all (a sum, a "
                "mean over those that count, or targets that it shifts by one?): shift targets in the dataset, and "
                "pass loss_divisor=, a function from targets to the divisor"
            )

    def _times_divisor(self, output: Any, y: Any) -> float:
        counted = self.divisor.of(y) if callable(self.divisor.kind) else 1.0
        return float(self.loss_fn(output, y)) * counted if counted else 0.0

    def conclude(self, doubtful: float) -> None:
        """Takes the number of dp ranks whose comparison was inconclusive; the same on every rank."""
        if not self.looks or self.agreed:
            return
        self.agreed = doubtful < self.mesh.dp_cp_size
        self.inconclusive += not self.agreed
        if self.inconclusive == _PATIENCE and idist.get_rank() == 0:
            warnings.warn(
                f"what loss_fn divides by could not be checked in {_PATIENCE} steps, since it gave the same value for "
                f"all rows, or there was one row: it is taken for a mean over rows. To declare it, {_DECLARE}",
                stacklevel=2,
            )


def _reached(loss: torch.Tensor, output: Any, since: int) -> tuple[list[torch.Tensor], list[nn.Parameter], bool]:
    """What the graph of a loss reaches: tensors of the output, weights, and whether something older than the call."""
    tensors = tensors_of(output)
    ends = {tensor.grad_fn: tensor for tensor in tensors if tensor.grad_fn is not None}
    leaves = {id(tensor) for tensor in tensors}
    found, weights, older = [], [], False
    waiting, passed = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in passed:
            continue
        passed.add(node)
        variable = getattr(node, "variable", None)
        if node in ends:
            found.append(ends[node])
        elif variable is not None:
            if id(variable) in leaves:
                found.append(variable)
            elif isinstance(variable, nn.Parameter):
                weights.append(variable)
        elif node._sequence_nr() < since:
            older = True
        else:
            waiting += [following for following, _ in node.next_functions]
    return found, weights, older


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def key_of(loss_fn: Callable, declared: Any) -> Hashable:
    """The same for a lambda or a ``functools.partial`` that is made anew in each step."""
    if isinstance(loss_fn, functools.partial):
        return key_of(loss_fn.func, declared), tuple(sorted(loss_fn.keywords)), len(loss_fn.args)
    code = getattr(loss_fn, "__code__", None)
    if code is None:
        return id(loss_fn), key_of(declared, None) if callable(declared) else declared
    inside = [cell.cell_contents for cell in getattr(loss_fn, "__closure__", None) or ()]
    kept = tuple(id(value) if callable(value) else value for value in inside if callable(value) or type(value) is str)
    owner = id(getattr(loss_fn, "__self__", None))
    return code, owner, kept, key_of(declared, None) if callable(declared) else declared
