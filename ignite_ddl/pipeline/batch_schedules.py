"""torch's schedules for the batches of a pipeline: each is for one shape, so one is set up for each shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager as Context
from typing import Any

import ignite.distributed as idist
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ignite_ddl.checks.backward import ROW_GRADIENTS_DEPEND, nudged, row_gradients_depend
from ignite_ddl.checks.kept_state import cloned
from ignite_ddl.checks.rows_alone import MAX_ROWS, ROWS_DEPEND, rows_depend_on_each_other
from ignite_ddl.checks.traceless import not_settled, state_that_grows, weights_kept, without_trace
from ignite_ddl.collectives import gathered, gathered_values, on_any_rank
from ignite_ddl.data_parallel import local_round, reshard
from ignite_ddl.experts.routing import routers_of
from ignite_ddl.experts.style import experts_of
from ignite_ddl.mesh import Mesh
from ignite_ddl.pipeline.cut import Cut, check_trains, trains
from ignite_ddl.pipeline.schedules import SCHEDULES, check_same_microbatches, microbatches_for
from ignite_ddl.pipeline.transfer import Transfer
from ignite_ddl.structure import Structure, detached, joined, rows_of

_KEPT = 16  # schedules of a pipeline; each holds receive buffers


class MicrobatchLoss:
    """The loss of the current batch: torch needs a loss when a schedule is made, but its weights differ by batch.

    torch cuts targets that are one tensor: it gets row numbers.
    """

    def __init__(self, autocast: Context, structure: Structure, stages: list[Any]) -> None:
        self.loss_fn: Callable | None = None
        self.y: Any = None
        self.autocast, self.structure, self.stages = autocast, structure, stages

    def __call__(self, output: tuple[torch.Tensor, ...], rows: torch.Tensor) -> torch.Tensor:
        with self.autocast:
            return self.loss_fn(self.structure.unflatten(output), rows_of(self.y, int(rows[0]), int(rows[-1]) + 1))


class BatchSchedules:
    """The schedules of a pipeline by shape of the batch, the same on all pp ranks.

    Args:
        cut: the stages.
        mesh: the mesh.
        stages: those of this rank, by number.
        transfer: the messages between stages.
        communicates: whether dp ranks communicate in forward passes: FSDP2, experts, routers.
        gathers: whether they do so in that of each microbatch, so that all of them need as many.
        checks: whether to refuse layers that keep a state from one forward pass to the next, and rows that depend on
            each other.
    """

    def __init__(
        self,
        cut: Cut,
        mesh: Mesh,
        stages: dict[int, nn.Module],
        transfer: Transfer,
        communicates: bool,
        gathers: bool,
        checks: bool,
    ) -> None:
        self.cut, self.mesh, self.stages, self.transfer = cut, mesh, stages, transfer
        self.communicates, self.gathers, self.checks = communicates, gathers, checks
        self.unknown = checks  # whether layers keep a state
        self.n_steps = 0
        self.made: dict[tuple, tuple[Any, MicrobatchLoss]] = {}  # the one used last comes last
        self.trained: dict[int, bool] = {}  # whether a stage had trainable weights when schedules were set up

    def forget(self) -> None:
        """Makes the next step set up its schedule again."""
        self.made.clear()
        self.trained = {}

    def get(self, key: tuple, x: Any, rows: int, autocast: Context) -> tuple[Any, MicrobatchLoss, bool]:
        """The schedule for batches like ``x``, of ``rows`` rows, its loss, and whether they have been set up now.

        To set one up runs the stages, so where dp peers communicate in them, all of them have to do it.
        """
        self.n_steps += 1
        is_check_step = self.n_steps & (self.n_steps - 1) == 0
        if self.unknown and is_check_step:  # nothing was found, or not yet
            self.made.clear()
        divided = rows  # by the number of microbatches
        if self.gathers:
            divided = math.gcd(*map(int, gathered(torch.tensor(rows, device=idist.device()), self.mesh.dp_cp_group)))
            key = (*key, divided)
        new = key not in self.made
        if self.communicates:
            # A last batch may have 32 rows on one dp rank, a known shape, and 31 on another.
            new = on_any_rank(new, self.mesh.dp_cp_group)
        self._check_as_set_up()
        made = self.made.pop(key, None)
        if new:
            self._check_gradients()
            self.trained = {s: trains(stage) for s, stage in self.stages.items()}
            made = self._make(x, rows, divided, autocast)
            if len(self.made) == _KEPT:
                del self.made[next(iter(self.made))]
        self.made[key] = made
        if self.checks and is_check_step and self.n_steps not in (2, 4):  # as without pp
            self._compare_rows(x, rows, divided, autocast)
        return *made, new

    def _check_as_set_up(self) -> None:
        for s, trained in self.trained.items():
            if trains(self.stages[s]) != trained:
                self._check_gradients()
                raise ValueError(
                    f"{self.cut.describe(s)} had {'' if trained else 'no '}weights to train when its schedule was set "
                    "up: after freezing or unfreezing a stage, call the model's forget_schedules() on every rank"
                )

    def _check_gradients(self) -> None:
        for s, stage in self.stages.items():
            check_trains(self.cut, s, stage)
            averaged = isinstance(stage, FSDPModule) or local_round(stage) is not None
            if self.mesh.dp_cp_size > 1 and not averaged and trains(stage):
                raise ValueError(
                    f"{self.cut.describe(s)} was frozen when the model was cut, so that nothing averages its gradients "
                    "over dp: freeze it after ddl.auto_model, and call the model's forget_schedules() on every rank "
                    "after each such change"
                )

    def _make(self, x: Any, rows: int, divided: int, autocast: Context) -> tuple[Any, MicrobatchLoss]:
        # Imported now, since importing torch's schedules takes a second.
        from torch.distributed.pipelining import schedules

        from ignite_ddl.pipeline.stage import Stage

        n, name = microbatches_for(divided, self.cut.n_microbatches, self.cut.schedule, self.mesh.pp_size)
        known, n_stages = SCHEDULES[name], len(self.cut.owners)
        self._check_same_number(n)
        interfaces = self._interfaces([rows_of(x, 0, rows // n), rows_of(x, rows - rows // n, rows)], autocast)
        place = n_stages, idist.device(), self.mesh.pp_group
        stages = [
            Stage(module, self.cut.describe(s), s, *place, *interfaces[s], autocast, known.split_backward)
            for s, module in self.stages.items()
        ]
        loss = MicrobatchLoss(autocast, interfaces[max(interfaces)][1].structure, stages)
        make = getattr(schedules, known.torch_class)
        return make(stages if known.stages_per_rank > 1 else stages[0], n, loss_fn=loss, scale_grads=False), loss

    def _check_same_number(self, n: int) -> None:
        """Where layers communicate over dp, each rank needs the same number of microbatches."""
        exchanges = any(routers_of(stage) or any(True for _ in experts_of(stage)) for stage in self.stages.values())
        if exchanges and self.mesh.dp_cp_size > 1:
            check_same_microbatches(gathered_values(n, self.mesh.dp_cp_group))

    def _compare_rows(self, x: Any, rows: int, divided: int, autocast: Context) -> None:
        """Raises on all stages what one of them refuses, in the end: the next one waits for a stage's output."""
        n, _ = microbatches_for(divided, self.cut.n_microbatches, self.cut.schedule, self.mesh.pp_size)
        few = rows // n if rows // n > 1 else min(rows, MAX_ROWS)  # of one row alone nothing is known
        refused = []

        def run(s: int, value: Any) -> Any:
            value, stage = detached(value), self.stages[s]
            refused.extend([ROWS_DEPEND] * rows_depend_on_each_other(stage, value, [stage]))
            reshard(stage)  # as a backward pass leaves it
            depend = self._on_any_peer(row_gradients_depend(stage, value, [stage]))
            if depend:
                with nudged([stage]):
                    depend = row_gradients_depend(stage, value, [stage])
            refused.extend([ROW_GRADIENTS_DEPEND] * depend)
            return stage(value)

        stages = list(self.stages.values())
        with without_trace(stages), torch.enable_grad(), autocast:
            self.transfer.pass_through([cloned(rows_of(x, 0, few))], run)
            for stage in stages:
                reshard(stage)
        self._agree(refused, self.unknown)

    def _interfaces(self, microbatches: list[Any], autocast: Context) -> dict[int, tuple[Any, Any]]:
        """What each stage takes and returns, which torch has to know before it sends: by a microbatch's forward."""
        from ignite_ddl.pipeline.stage import Interface

        found = {}

        def run(s: int, value: Any) -> Any:
            value = detached(value)
            output = self.stages[s](value)
            if s in found:  # by the first microbatch
                return output
            name = self.cut.describe(s)
            found[s] = Interface.of(value, name), Interface.of(output, name)
            if s + 1 == len(self.cut.owners):
                joined([output])  # refuses what has no rows, before anything is computed in vain
            return output

        stages, grown = list(self.stages.values()), []

        def passed(rows: Any) -> None:
            self.transfer.pass_through([cloned(rows)], run)
            for stage in stages:
                reshard(stage)

        with without_trace(stages), torch.enable_grad(), autocast, weights_kept(stages) as first:
            passed(microbatches[0])
            if self.unknown:  # a cache is made in the first pass, a state changes in each
                with state_that_grows(stages, grown), weights_kept(stages) as again:
                    passed(microbatches[0])
                with state_that_grows(stages, grown, attributes=False):  # such as the least and largest of other rows
                    passed(microbatches[1])
        if self.unknown:
            with without_trace(stages), torch.enable_grad(), autocast, weights_kept(stages) as of_other_rows:
                passed(microbatches[1])
            weights, unknown = not_settled(first, again, of_other_rows)
            changes = [
                f"forward changes {name!r}, but under pp it runs once for each microbatch, not once for a batch: keep "
                "such state out of forward, use tp only, or pass checks=False to ddl.auto_model if no number "
                "depends on it"
                for name in (*grown, *weights)
            ]
            self._agree(changes, unknown)
        return found

    def _on_any_peer(self, found: bool) -> bool:
        """Whether a rank found something, of those with which the layers of this rank's stages communicate."""
        for group in (self.mesh.tp_group, *([self.mesh.dp_cp_group] if self.communicates else [])):
            found = on_any_rank(found, group)
        return found

    def _agree(self, refused: list[str], unknown: bool) -> None:
        """Raises on all stages what one of them refuses; what one does not know yet is checked in steps 2, 4, 8, …"""
        of_stages = gathered_values((refused, unknown), self.mesh.pp_group)
        if refused := [sentence for of_stage, _ in of_stages for sentence in of_stage]:
            raise ValueError(refused[0])
        unknown = any(unknown for _, unknown in of_stages)
        self.unknown = self._on_any_peer(unknown)
