"""Forward, loss and backward of one batch with the mesh's weighting, for any update function."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager as Context
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn

from ignite_ddl.audit import ROWS_CHECKED, TOKENS_CHECKED, Audit
from ignite_ddl.checks.loss_graph import models_before
from ignite_ddl.checks.mixing import CheckedTransform
from ignite_ddl.checks.optimizer_steps import watch_unreduced_gradients
from ignite_ddl.compat import UNREDUCED
from ignite_ddl.data_parallel import gradient_sync, local_round
from ignite_ddl.errors import explaining_errors
from ignite_ddl.experts.balance import router_loss_weight
from ignite_ddl.experts.routing import routers_of, update_biases
from ignite_ddl.loss_call import checked_loss
from ignite_ddl.loss_contract import ASKS_PEERS, BY_PASSES, LossContract, LossContracts
from ignite_ddl.mesh import get_mesh
from ignite_ddl.pipeline.local_stages import call, stages_of
from ignite_ddl.structure import local_tensor, n_rows, n_samples
from ignite_ddl.tensor.gradients import redistribute_gradient

Rows = tuple[int, int | None] | None  # the local and the global number of rows of a batch


class TrainingStep:
    """Forward, loss and backward of a model, and the reduction of its gradients before the optimizer step.

    The gradient of a batch is that of its loss on all rows: of the sum of the ranks' losses, each times its divisor,
    over the sum of these divisors. The gradient of several batches before an optimizer step (a window) is that of one
    batch with the rows of all of them.

    Args:
        model: what ``ddl.auto_model`` returned.
        transform: a function of the model's output, applied before the loss. Default: none.
        checks: whether steps check for errors that would otherwise be silent. Default: True.
        model_fn: takes the model and ``x``, returns the output. Default: calls the model.

    Attributes:
        open: whether gradients wait for another batch before the optimizer steps.
        models: the model, and others that the last loss depends on: their gradients are weighted by rows.
        optimizer: the one that steps where a window ends, if it is known.
        updates: the number of earlier batches after which this rank has stepped a model.
        order: a number that depends on the order in which the loader reads the rows of all ranks.
        ends_run: whether an engine's run ends with this step, as far as it is known.
    """

    def __init__(
        self,
        model: nn.Module,
        transform: Callable[[Any], Any] = lambda output: output,
        checks: bool = True,
        model_fn: Callable[[nn.Module, Any], Any] = call,
    ) -> None:
        self.model, self.transform, self.checks = model, transform, checks
        self.optimizer: torch.optim.Optimizer | None = None
        self.mesh, self.stages = get_mesh(), stages_of(model, model_fn)
        self.audit = Audit(model, self.stages, self.mesh) if checks and self.mesh.world_size > 1 else None
        if self.audit is not None and self.mesh.dp_cp_size * self.mesh.pp_size > 1:
            self.transform = CheckedTransform(transform)
        if not checks:
            for kind in (ROWS_CHECKED, TOKENS_CHECKED):
                setattr(model, kind, True)
        self.contracts = LossContracts(self.mesh, model)
        self.local, self.has_routers = local_round(model), bool(routers_of(model))
        meets = self.mesh.hybrid if self.local is not None else self.mesh.pp_size == 1 and self.mesh.dp_cp_size > 1
        self.leaves_gradients = meets or bool(self.stages.shared_names())  # to reduce, in a window's first batches
        if self.leaves_gradients:
            watch_unreduced_gradients()
        self.open, self.models, self.updates, self.order, self.ends_run = False, [model], 0, 0, False
        # Divisors of this window: the one by which gradients are divided, and the sum of those of its batches.
        self.expected = self.counted = 0.0
        self.replica_divisor = 0.0  # with dp_sync="local": of this batch, on the ranks that hold a replica

    def __call__(
        self,
        rows: Rows,
        x: Any,
        y: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        loss_divisor: str | Callable[[Any], Any] | None = None,
        scale: float = 1.0,
        last: bool = True,
        window: int | None = None,
        autocast: Context | None = None,
    ) -> tuple[Any, torch.Tensor]:
        """Runs one batch forward and backward.

        Args:
            rows: the local and the global number of rows of the batch, the latter None if ranks have to sum it up;
                None: the same number on each rank.
            x: this dp rank's rows, the same on its tp and pp peers.
            y: their targets.
            loss_fn: takes the output and the targets of some rows, returns their loss.
            loss_divisor: what it divides by, as in ``ddl.create_supervised_trainer``.
            scale: factor of the loss in the backward pass. Default: 1.
            last: whether the optimizer steps next, so that gradients are reduced. Default: True.
            window: the number of batches before an optimizer step; nothing else adds to the gradients then, so that
                they can be divided by what has been counted in the end. Default None: divided batch by batch.
            autocast: the context of forward passes and losses. Default: none.

        Returns:
            tuple: the transformed output (None on ranks without the last stage), and the loss of the global batch.
        """
        contract, autocast = self.contracts.of(loss_fn, loss_divisor), autocast or contextlib.nullcontext()
        if self.local is not None:
            self.local.check_loss(contract.divisor.kind == "sum")
        if rows is None and self.mesh.dp_cp_size == 1:  # a loader of another library
            rows = (n_samples(x, y),) * 2
        local_divisor = self._begin(contract, rows, x, y, window, autocast)
        weight, of_batch = self._weight(contract, rows, local_divisor, window)
        if self.leaves_gradients and not last:
            UNREDUCED.add(self.model)
        weight, of_batch = weight * scale / (window or 1), of_batch * scale / (window or 1)
        loss_of, share = checked_loss(contract, empty=n_rows(x) == 0), contract.divisor.share
        with (
            gradient_sync(self.stages.local_stages(), last),
            explaining_errors(rows),
            router_loss_weight(of_batch, rows is None or rows[0] > 0),
            contextlib.nullcontext() if self.audit is None else self.audit.watching(),
        ):
            output, loss = self.stages.forward(x, y, loss_of, self.transform, share, weight, autocast)
            if self.audit is not None and loss is not None:
                self.audit.loss_dtype = loss.dtype
            if self.checks:
                contract.check_rows(rows)  # of a loss that has shown only now that it sums over ranks
            detached = None if loss is None else loss.detach()
            with autocast:  # it overlaps the backward pass
                reduction = self._start_reduction(detached, local_divisor, rows, y, contract)
            self.stages.backward(loss, weight)
        if self.audit is not None:
            with autocast:
                self.audit.end(x, last)  # before the next collective, which would meet DDP's on a peer that waits
        with autocast:
            loss, total = self._end_reduction(*reduction, contract, x, y)
        if self.local is not None:
            total = self.replica_divisor
            self.local.counted, self.local.steps = self.local.counted + total, self.local.steps + last
        self.models = [self.model, *contract.others, *models_before(x)]
        self.open, self.counted = not last, self.counted + total
        if last:
            UNREDUCED.difference_update([self.model, *self.stages.local_stages()])
            self._finish(window, loss)
        return output, loss

    def _begin(
        self, contract: LossContract, rows: Rows, x: Any, y: Any, window: int | None, autocast: Context
    ) -> float | None:
        """Checks the batch; returns the divisor of this rank's part of it, None for a sum."""
        strict = self.audit is not None and self.mesh.dp_cp_size > 1 and not contract.n_steps
        local_divisor = contract.divisor.local(rows, x, y, strict)
        if self.audit is not None:
            with autocast, explaining_errors(rows):
                self.audit.begin(rows, x, y)
        if self.checks:
            contract.check_rows(rows)
            contract.begin(x, y, accumulates=(window or 1) > 1, last=self.ends_run)
        contract.counted, contract.n_rows = contract.count(y, local_divisor), None if rows is None else rows[0]
        contract.is_uneven = rows is not None and (rows[1] or 1) % self.mesh.dp_size > 0
        if not self.open:
            self.stages.begin_window()
        return local_divisor

    def _weight(
        self, contract: LossContract, rows: Rows, local_divisor: float | None, window: int | None
    ) -> tuple[float, float]:
        """The factor of this rank's loss by which the average over dp ranks is the loss of the global batch; and the
        factor of losses that are those of the global batch already (of routers).

        In a window, the divisors of later batches are not known yet: losses are divided by the expected divisor of the
        first batch, and :meth:`_finish` corrects the gradients.
        """
        dp = self.mesh.dp_cp_size
        if local_divisor is None:
            return (0.0 if rows is not None and rows[0] == 0 else float(dp)), 1.0
        if self.local is not None:
            return self._weight_in_round(local_divisor, contract.counted, window), 1.0
        n_global = None if rows is None else rows[1]
        by_rows = contract.divisor.kind == "rows" and n_global is not None and (window or contract.is_local)
        total = float(n_global * self.mesh.cp_size) if by_rows else None
        if total is None and (window is None or not contract.density):
            total = self._sum_over_dp(contract.counted)
            contract.density = total / n_global if n_global else total
        if window is not None:
            return self._weight_in_window(contract, n_global, local_divisor, total)
        return local_divisor * dp / (total or 1.0), 1.0

    def _weight_in_window(
        self, contract: LossContract, n_global: int | None, local_divisor: float, total: float | None
    ) -> tuple[float, float]:
        """The same in a window of gradient accumulation, whose divisor is expected to be that of its first batch."""
        if not self.open or not self.expected:
            self.counted = 0.0
            self.expected = (total if total is not None else contract.density * (n_global or 1)) or 1.0
        if total is None and self.has_routers:  # not for `expected`, which stages without routers have to have, too
            total = self._sum_over_dp(contract.counted)
        return local_divisor * self.mesh.dp_cp_size / self.expected, (total or 0.0) / self.expected

    def _weight_in_round(self, local_divisor: float, counted: float, window: int | None) -> float:
        """The same for the mean over a replica's rows: those of this rank, or of the dp_shard peers that share it."""
        self.replica_divisor, n_peers = counted, self.mesh.dp_shard_size if self.mesh.hybrid else 1
        if n_peers > 1:
            summed = torch.tensor(counted, dtype=torch.float64, device=idist.device())
            dist.all_reduce(summed, group=self.mesh.groups["dp_shard"])
            self.replica_divisor = float(summed)
        if not self.open or not self.expected:
            self.counted, self.expected = 0.0, self.replica_divisor or 1.0
        return local_divisor * n_peers / (self.replica_divisor or 1.0 if window is None else self.expected)

    def _sum_over_dp(self, local_divisor: float) -> float:
        summed = torch.tensor(local_divisor, dtype=torch.float64, device=idist.device())
        if self.mesh.dp_cp_size > 1:
            dist.all_reduce(summed, group=self.mesh.dp_cp_group)
        return float(summed)

    def _finish(self, window: int | None, loss: torch.Tensor) -> None:
        """Makes gradients ready for the optimizer: divided, and the same where weights are the same."""
        if window is not None and self.expected:
            factor = window * self.expected / (self.counted or 1.0)
            if factor != 1.0:
                weights = {id(p): p for model in self.models for p in model.parameters()}
                groups = [] if self.optimizer is None else self.optimizer.param_groups
                weights |= {id(p): p for group in groups for p in group["params"]}  # of the loss, too
                gradients = [local_tensor(p.grad) for p in weights.values() if p.grad is not None]
                if gradients:  # of conjugated numbers, which torch._foreach_mul_ refuses, those in memory
                    torch._foreach_mul_([g.conj() if g.is_conj() else g for g in gradients], factor)
        self.expected = self.counted = 0.0
        if self.has_routers:
            update_biases(self.model)
        self.stages.sum_shared_gradients()
        if self.mesh.tp_size > 1:
            for parameter in self.model.parameters():
                redistribute_gradient(parameter)
        if self.audit is not None:
            self.audit.before_optimizer(loss)

    def _start_reduction(
        self, loss: torch.Tensor | None, local_divisor: float | None, rows: Rows, y: Any, contract: LossContract
    ) -> tuple[torch.Tensor, float, dist.Work | None]:
        """Starts to reduce the loss times its divisor, the divisor, and what the checks compare between ranks."""
        counted = contract.counted
        empty, undecided, compared = rows is not None and rows[0] == 0, ASKS_PEERS * contract.asks_peers, []
        if loss is not None and contract.is_checking:
            undecided += contract.compare()
        if self.mesh.world_size == 1:
            contract.conclude(undecided)
            return loss, counted, None
        if self.audit is not None:
            targets = None if loss is None or empty else (y, contract)
            compared = self.audit.numbers_to_sum(targets, self.updates, self.order)
        parts = [0.0, 0.0 if loss is None else counted, undecided, *compared]
        on_gpu = idist.device().type == "cuda"  # which does not wait for what is copied from pinned memory
        summed = torch.tensor(parts, dtype=torch.float64, pin_memory=on_gpu).to(idist.device(), non_blocking=True)
        if loss is not None and not empty:
            summed[0] = loss.to(torch.float64) * (1.0 if local_divisor is None else local_divisor)
        return summed, counted, self.stages.reduce_loss(summed)

    def _end_reduction(
        self, summed: torch.Tensor, counted: float, work: dist.Work | None, contract: LossContract, x: Any, y: Any
    ) -> tuple[torch.Tensor, float]:
        """The loss of the global batch, on every rank, and its divisor; raises if ranks differ in what is compared."""
        is_known = callable(contract.divisor.kind) and not contract.divisor.declared  # a loss of torch
        if work is None:
            return (summed * math.nan if is_known and not counted else summed), counted
        work.wait()
        _, total, undecided, *compared = summed.tolist()
        asking, undecided = divmod(undecided, ASKS_PEERS)
        contract.check_total(total)
        if self.audit is not None:
            self.audit.compare(compared, contract)
            if undecided >= BY_PASSES:
                undecided = contract.compare_by_passes(self.stages, self.transform, x, y)
            if asking and self.stages.is_last:
                contract.compare_with_peers()
            contract.conclude(undecided)
        return summed[0] / total if total or is_known else summed[0], total  # NaN where nothing counts, as torch's
