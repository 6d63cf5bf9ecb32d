"""Forward, loss and backward of one batch with the mesh's weighting, for any update function."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from ignite_ddl.divisor import IGNORED, Divisor, divisor_of, n_rows
from ignite_ddl.guards import UNLIKE_MODULES, ModulesInUse, advice_of, check_same_rows
from ignite_ddl.mesh import get_mesh
from ignite_ddl.pipeline.one_stage import as_stages, call, gradient_sync
from ignite_ddl.regions import check_cut_regions
from ignite_ddl.tensor.gradients import WholeWeights, redistribute_gradient

__all__ = ["TrainingStep"]


class TrainingStep:
    """Forward, loss and backward of a model, and the reduction of its gradients before the optimizer step.

    Args:
        model: what ``ddl.auto_model`` returned.
        loss_divisor: the divisor of the loss, as in ``ddl.create_supervised_trainer``.
        transform: a function of the model's output, applied before the loss. Default: none.
        checks: whether the first step checks for errors that would otherwise be silent. Default: True.
        model_fn: takes the model and ``x``, returns the output. Default: calls the model.
        autocast: the context of forward passes and losses. Default: none.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_divisor: str | Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] = lambda output: output,
        checks: bool = True,
        model_fn: Callable[[nn.Module, Any], Any] = call,
        autocast: contextlib.AbstractContextManager | None = None,
    ) -> None:
        self.model, self.loss_divisor, self.transform, self.checks = model, loss_divisor, transform, checks
        self.mesh, self.stages = get_mesh(), as_stages(model, model_fn)
        self.autocast = autocast or contextlib.nullcontext()
        self.whole_weights = WholeWeights(self.mesh)
        self.modules = ModulesInUse(self.stages.local_stages(), self.mesh) if checks else None
        self.divisors: dict[Any, Divisor] = {}  # by loss function
        self.first = checks and self.mesh.world_size > 1
        self.open = False  # whether gradients wait for a later batch
        self.frozen = [
            (name.removeprefix("module."), parameter)
            for name, parameter in model.named_parameters()
            if isinstance(model, DistributedDataParallel) and not parameter.requires_grad
        ]

    def __call__(
        self,
        rows: tuple[int, int] | None,
        x: Any,
        y: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        scale: float = 1.0,
        last: bool = True,
    ) -> tuple[Any, torch.Tensor]:
        """Runs one batch forward and backward.

        Args:
            rows: the numbers of rows of the batch here and on all dp ranks; None: the same number on each rank.
            x: this dp rank's rows, the same on its tp and pp peers.
            y: their targets.
            loss_fn: takes the output and the targets of some rows, returns their loss.
            scale: factor of the loss in the backward pass. Default: 1.
            last: whether the optimizer steps next, so that gradients are reduced. Default: True.

        Returns:
            tuple: the transformed output (None on ranks without the last stage), and the loss of the global batch.
        """
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"{name!r} was frozen when ddl.auto_model wrapped the model in DDP, which does not average its "
                    "gradient: freeze it after that, or call ddl.auto_model again"
                )
        checking = self.first
        if checking:
            empty = next((name for name, p in self.model.named_parameters() if p.is_meta), None)
            if empty is not None:
                raise ValueError(
                    f"{empty!r} has no values yet, since the model was made in ddl.empty_weights: call "
                    "ddl.import_weights or ddl.load_full_state_dict first"
                )
            check_same_rows(x, y, self.mesh)
            with _explained():
                check_cut_regions(self.stages, self.mesh, x)
        divisor = self._divisor(loss_fn, y)
        weight = self._weight(divisor, rows, y)
        if self.modules is not None:
            self.modules.begin()

        seen: list[tuple[Any, Any]] = []  # in the first step: outputs and targets, until there are two rows

        def loss_of(y_pred: Any, target: Any) -> torch.Tensor:
            nonlocal checking
            loss = _loss(loss_fn, y_pred, target, divisor)
            if checking:
                if not seen and self.mesh.pp_size > 1:
                    _check_no_weights(loss_fn, y_pred, target)
                seen.append(tree_map(_detached, (y_pred, target)))
                checking = divisor.known or sum(n_rows(y) for _, y in seen) < 2
                if not checking and self.mesh.dp_size * self.mesh.pp_size > 1:
                    _check_mean(loss_fn, *tree_map(_joined, *seen))
            return loss

        reduction: tuple[torch.Tensor, dist.Work | None]

        def reduce(loss: torch.Tensor | None) -> None:
            nonlocal reduction
            reduction = self._start_reduction(loss, weight, divisor, y)

        with gradient_sync(self.stages.local_stages(), last), _explained():
            y_pred = self.stages.step(
                x, y, loss_of, self.transform, divisor.share, weight * scale, self.autocast, reduce
            )
        if last and self.modules is not None:
            self.modules.check_gradients()  # before the next collective, which would meet DDP's on a peer that waits
        loss = self._end_reduction(*reduction)
        self.first = False
        if last:
            self.stages.sum_shared_gradients()
            if self.mesh.tp_size > 1:
                for parameter in self.model.parameters():
                    redistribute_gradient(parameter)
                self.whole_weights.check(self.model)
        self.open = not last
        return y_pred, loss

    def _divisor(self, loss_fn: Callable, y: Any) -> Divisor:
        key = getattr(loss_fn, "__code__", loss_fn)  # the same for a lambda that is made in each step
        if key not in self.divisors:
            divisor = divisor_of(loss_fn, self.loss_divisor)
            if divisor.ignored and self.mesh.world_size > 1:
                found = torch.tensor(float(_ignores(y)), device=idist.device())
                if self.mesh.dp_size > 1:
                    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.mesh.dp_group)
                if found:  # then they may be in any batch
                    divisor = Divisor(lambda y: (y != IGNORED).sum())
            self.divisors[key] = divisor
        return self.divisors[key]

    def _weight(self, divisor: Divisor, rows: tuple[int, int] | None, y: Any) -> float:
        """The factor of the loss with which the average over dp ranks is the loss of the global batch."""
        dp = self.mesh.dp_size
        if divisor.kind == "sum":
            return 0.0 if rows is not None and rows[0] == 0 else float(dp)
        if not divisor.counts:
            return 1.0 if rows is None else rows[0] * dp / rows[1]
        here = 0.0 if rows is not None and rows[0] == 0 else divisor.of(y)
        total = torch.tensor(here, dtype=torch.float64, device=idist.device())
        if dp > 1:
            dist.all_reduce(total, group=self.mesh.dp_group)
        return here * dp / float(total) if total else 0.0

    def _start_reduction(
        self, loss: torch.Tensor | None, weight: float, divisor: Divisor, y: Any
    ) -> tuple[torch.Tensor, dist.Work | None]:
        """Starts to reduce the loss of the global batch, and checks of values that are reduced together with it."""
        mesh = self.mesh
        if mesh.world_size == 1:
            return loss, None
        # The loss; whether there are unexpected ignored targets; for each pp rank, sums over dp of digests and squares.
        parts = torch.zeros(2 + 2 * mesh.pp_size, dtype=torch.float64, device=idist.device())
        if loss is not None:
            parts[0] = loss.to(torch.float64) * (weight / mesh.dp_size)
        parts[1] = float(divisor.ignored and _ignores(y))
        if self.modules is not None:
            digest = self.modules.digest()
            parts[2 + 2 * mesh.pp_rank], parts[3 + 2 * mesh.pp_rank] = digest, digest**2
        return parts, self.stages.reduce_loss(parts)

    def _end_reduction(self, parts: torch.Tensor, work: dist.Work | None) -> torch.Tensor:
        """The loss of the global batch, on every rank, once the checks have passed."""
        if work is None:
            return parts
        work.wait()
        if parts[2:].any():
            sums, squares = parts[2::2], parts[3::2]
            if (self.mesh.dp_size * squares != sums**2).any():
                raise ValueError(UNLIKE_MODULES)
        if parts[1]:
            raise ValueError(
                f"targets of {IGNORED} do not count in this loss, but the first batch had none: pass "
                f"loss_divisor=lambda y: (y != {IGNORED}).sum(), or ignore_index={IGNORED} by name"
            )
        return parts[0]


# What torch and Python say where code gets a part of a tensor and counts on all of it.
_ABOUT_SHAPES = re.compile(r"shape|size|dim|DTensor|to unpack|channels")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        advice = advice_of(error)
        if advice and _ABOUT_SHAPES.search(str(error)):
            first = str(error).splitlines()[0].rstrip(".")
            raise ValueError(" ".join([f"{first}.", *advice])) from error
        if "Expected to have finished reduction" in str(error):
            raise ValueError(
                "model has weights that the previous step did not use, and DDP waits for their gradients: pass "
                "find_unused_parameters=True, or shard=True, to ddl.auto_model"
            ) from error
        raise


def _ignores(y: Any) -> bool:
    return isinstance(y, torch.Tensor) and not y.is_floating_point() and bool((y == IGNORED).any())


def _loss(loss_fn: Callable, y_pred: Any, y: Any, divisor: Divisor) -> torch.Tensor:
    """Calls the loss function; torch's own losses fail on cut logits, or return a DTensor."""
    if divisor.counts and divisor.of(y) == 0:  # a mean of nothing is NaN
        return sum(leaf.sum() * 0.0 for leaf in tree_leaves(y_pred) if isinstance(leaf, torch.Tensor))
    advice = "for logits that are cut by vocabulary, use ddl.cross_entropy as loss_fn"
    try:
        loss = loss_fn(y_pred, y)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            raise ValueError(f"loss_fn should take what the model returns, but fails on a DTensor: {advice}") from error
        raise
    if isinstance(loss, DTensor):
        raise ValueError(f"loss_fn should return a plain tensor, but gave a DTensor, {loss.placements}: {advice}")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn should return one number, but gave {given}")
    return loss


def _check_no_weights(loss_fn: Callable, y_pred: Any, y: Any) -> None:
    """Refuses weights in the loss under pp: only the rank with the last stage computes it, without other stages."""
    leaves = tree_map(_leaf, y_pred)
    given = {id(leaf) for leaf in tree_leaves(leaves)}
    with torch.enable_grad():
        others = [variable for variable in _variables(loss_fn(leaves, y)) if id(variable) not in given]
    if others:
        raise ValueError(
            "loss_fn uses weights besides the model's output (a regulariser?), but under pp it runs only on the rank "
            "with the last stage: use weight_decay, or compute the term in a layer"
        )


def _check_mean(loss_fn: Callable, y_pred: Any, y: Any) -> None:
    """Refuses a loss that is not a mean over rows, by which ranks and microbatches could not be weighted."""
    rows = n_rows(y)
    cut = max(1, rows // 3)
    with torch.no_grad():
        whole = loss_fn(y_pred, y)
        first, second = (
            loss_fn(*tree_map(lambda leaf, part=part: _rows(leaf, part, rows), (y_pred, y)))
            for part in (slice(cut), slice(cut, None))
        )
    loss, mean = float(whole), float(first * (cut / rows) + second * (1 - cut / rows))
    tolerance = torch.finfo(whole.dtype).eps ** 0.5 * max(1e-3, abs(loss))
    if math.isfinite(loss) and not abs(mean - loss) <= tolerance:  # False for NaN, too
        raise ValueError(
            f"loss_fn should be a mean over rows, but gives {loss:.6g} for {rows} rows and {mean:.6g} for the weighted "
            'mean of two parts of them: pass loss_divisor="sum", or a function from targets to the divisor of the '
            "loss, such as lambda y: (y != 0).sum(). If the mean of the dp ranks' losses is what you want, pass "
            'loss_divisor="rows"'
        )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _joined(*leaves: Any) -> Any:
    tensors = all(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in leaves)
    return torch.cat(leaves) if tensors and len(leaves) > 1 else leaves[0]


def _leaf(leaf: Any) -> Any:
    floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if floating else leaf


def _rows(leaf: Any, rows: slice, n: int) -> Any:
    return leaf[rows] if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == n else leaf


def _variables(loss: torch.Tensor) -> list[torch.Tensor]:
    """The leaves of a loss's graph, which would get gradients."""
    found, waiting, seen = [], [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found
