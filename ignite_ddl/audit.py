"""The checks of training steps: what would train wrongly without an error raises one.

====================  ==================================================================  ============================
check                 what it finds                                                       when
====================  ==================================================================  ============================
model unchanged       parameters added, replaced, re-typed or hooked, and under DDP       before each step
                      frozen or unfrozen, since ``ddl.auto_model``; modules added; under
                      pp layers added, replaced or removed
weights loaded        weights of ``ddl.empty_weights`` that were not loaded               steps 1, 2, 4, 8, …
same rows             tp, cp or pp peers with different rows                              steps 1, 2, 4, 8, …
same order            dp ranks whose samplers give them different batches                 each step
same modules          dp ranks that call different modules                                each step
same weights          with FSDP2, dp ranks that get gradients of different weights        each step, in the next or
                                                                                          when a run ends
same calls            with shard=True, dp ranks that do not call a layer equally often    steps 1, 2, 4, 8, …
same steps            ranks that skip a step of the optimizer                             each step
numbers of rows       buffers, and attributes on which outputs depend, in which forward   steps 1, 8, 16, 32, 64
                      counts the rows of a dp rank
same target shapes    targets padded to other lengths on other ranks                      each step
model called          a step that calls a method of the model instead of the model, past  each step
                      the wrapper that reduces gradients
unused weights        weights that a rank did not use, for whose gradients DDP waits      each step
independent rows      a model, or a stage, whose output for a row depends on other rows,  steps 1, 8, 16, 32, …;
                      in training or in evaluation, or the gradient of that output        after 64 in training
                                                                                          alone; an evaluator's first
rows that meet        a ``prepare_batch``, a ``model_transform``, or an evaluator's       first batch
                      ``output_transform`` that makes a row from others (``checks/mixing.py``);
                      a warning where it is random, or of a ``collate_fn``
tokens that meet      over cp, a ``model_transform``, or an ``output_transform`` of an    first batch
                      evaluator or a metric, that looks at other tokens or numbers them
loss of parts         a loss that is not the weighted sum of those of parts of the rows   steps 1 to 16, every
                                                                                          17th and the last; by
                                                                                          passes 1, 2, 4, 8, …
stored values         plain attributes that dp ranks computed from their own rows, and    steps 1, 2, 4, 8, …
                      on which outputs depend
padding               rows padded to other lengths on other dp ranks, on which outputs    steps 1, 2, 4, 8, …;
                      depend                                                              a warning
independent tokens    over cp, a module that looks at other tokens, or counts positions   steps 1, 2, 4, 8, …;
                                                                                          an evaluator's first
same loss             tp peers that compute different losses                              steps 1, 2, 4, 8, …
same gradients        tp peers with different gradients of a replicated weight            until each weight had one
replicas              weights and buffers that should be equal on ranks, but differ       steps 1, 2, 4, 8, …;
                                                                                          when a run ends
linear gradients      backward hooks and an ``autograd.Function`` that clamp, normalise   steps 1, 2, 4, 8, …
                      or add to gradients
same options          optimizers with other options on other ranks, shard=True and pp     when a run ends
lost changes          weights that forward changes where they are gathered for it alone   steps 1, 2, 4, 8, …
state of a loss       what a loss function keeps from call to call, computed from a       steps 1, 2, 4, 8, …
                      rank's own rows or for each microbatch, and by which it computes
unlike results        a loss or a ``prepare_batch`` that gives dp ranks other results     steps 1, 2, 4, 8, …;
                      for the same rows, by what a script has computed of its rank's      a warning
                      rows: a queue, a bank, running statistics (``checks/unlike_results.py``)
====================  ==================================================================  ============================

The code between cut layers is checked in a model's first forward pass (``checks/regions.py``), losses by
``loss_contract.py``.

What is not found, and differs from one process without an error:

- rows that an update function of your own mixes, or over cp tokens (a shift, positions from 0); what functions of an
  evaluator, a trainer or a loader mix in another way than in their first batch; rows that a ``DistributedSampler``
  adds: give global batches to ``ddl.auto_dataloader``;
- random numbers that each dp rank draws for its own rows (:mod:`ignite_ddl.tensor.random` has the rules), and weights
  that ``shard=True`` cuts if each rank initialises them with a different seed;
- lists of rows that a handler makes by ``idist.all_gather`` without ``group=ddl.get_mesh().dp_group``: tp and pp peers
  have the same rows (of a sum, which may be a part of a ratio, there is a warning);
- a number that a script computes from one rank's part as if it were everything: the loss or output of its rows in an
  engine of its own, a metric such as ``Average`` of them, a maximum that a hook logs; under pp sums, norms, names and
  pairs (``zip``) of ``model.parameters()`` and ``model.state_dict()``, which are those of its stages, and torch's norm
  of a parameter group of which a stage has one weight (``ddl.clip_grad_norm_`` is right);
- the gradient of a leaf in the input, ``x.grad``, which is that of the loss times the number of dp ranks, by which
  those of weights are divided later, and which under pp the rank with the first stage has alone;
- a backward hook that computes something of all rows (keeps the largest gradients), but is linear in their size; with
  ``shard=True``, gradients of rows that depend on the other rows (scaled by ``x.numel()``); an ``autograd.Function``
  that calls modules or a backward pass itself, which would leave traces if it was tried; over tp, a hook or a
  Function between cut layers that mixes features in the backward pass alone (a norm of a row's gradient), and over cp
  one that mixes tokens there; a hook or a Function that is used first in a step that does not look for it;
- what a script keeps of its rank's rows (a running mean of inputs), and an update function of your own, a
  ``model_transform``, an ``output_transform``, or a loss with ``loss_divisor="local"`` reads later;
- gradients of an open window (``last=False``) that a script sets to None or to zeros by itself: with ``shard=True`` and
  on meshes of dp with tp or pp torch keeps them elsewhere, where ``zero_grad`` of optimizers and modules reaches them;
- a state that forward carries from batch to batch and drops where the number of rows changes, if batches are uneven;
- a number of rows that a loss function counts from call to call, where all dp ranks have as many;
- under pp, a ``collate_fn`` that pads to the longest of a rank's rows, before a model whose output depends on it;
- random numbers that a script draws for weights or gradients under pp, where each stage draws different ones;
- with ``loss_divisor="rows"``, a batch of a second loader that was read in another step than the one that trains on it;
- what a check's own calls change and do not put back, so that one process would have counted less: a ``ContextVar``,
  shared memory (``multiprocessing.Value``), attributes of a tensor, a sparse or quantized tensor that is changed in
  place, and files;
- rows of an earlier batch on which an update function trains a rank that has none of this one: they have no weight, as
  what it makes of the row that it is lent (``drop_last=True`` leaves no rank without rows);
- what a check finds by calling the model or a function again with fewer rows, where it fails with fewer rows;
- a loss that is a mean over rows in the steps where it is checked, but not in those between;
- targets with rows in dim 1 whose dim 0 has the same length;
- a term of a loss in which rows meet, or targets that do not count, if it changes the loss by less than the tolerance
  of this comparison, 3.5e-4 of it in float32 and 1.5e-8 in float64 (transformers' balance of experts, which
  ``balance_weight`` of ``ddl.Router`` replaces), or an eighth of it where the loss computes products of bfloat16:
  compare once in float64;
- initial values that a pipeline's stages draw after ``ddl.auto_model``, and an optimizer that steps after a loop of
  your own whose last batch gave ranks different numbers of rows: these two give a warning (in the loop it is refused).
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import ignite.distributed as idist
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ignite_ddl.checks.backward import (
    ROW_GRADIENTS_DEPEND,
    check_backward_hooks,
    checking_functions,
    checking_tensor_hooks,
    may_depend_in_training,
    nudged,
    row_gradients_depend,
)
from ignite_ddl.checks.fingerprint import check_unchanged, fingerprint_of, warn_of_random_values
from ignite_ddl.checks.modules_in_use import ModulesInUse, finds_unused
from ignite_ddl.checks.regions import check_regions_once
from ignite_ddl.checks.replicas import check_replicas, digest, lost_changes
from ignite_ddl.checks.rows_alone import ROWS_DEPEND, rows_depend_on_each_other, several_rows
from ignite_ddl.checks.traceless import UNLIKE_MODULES, outputs_depend_on, outputs_depend_on_padding, stored_values
from ignite_ddl.collectives import gathered, gathered_values, on_any_rank, value_of
from ignite_ddl.context.sequence import check_tokens, length_matters
from ignite_ddl.data_parallel import local_round
from ignite_ddl.experts.style import experts_of
from ignite_ddl.lazy import without_values
from ignite_ddl.loss_contract import ROUNDINGS, LossContract
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.optim import check_same_options
from ignite_ddl.pipeline.cut import check_root_hooks
from ignite_ddl.structure import are_samples, n_rows, tensors_of, tensors_of_rows
from ignite_ddl.tensor.gradients import ReplicatedWeights

TOKENS_CHECKED = "_tokens_checked"  # on a model whose tokens have been checked, or are not to be
ROWS_CHECKED = "_rows_checked"  # the same of its rows
MOST_IN_FULL = 4096  # tokens of a rank's part of a sequence, up to which a model that mixes tokens is tried in full
_MANY = 64  # steps, after which rows are checked in three passes, and by all others if these show something


class Audit:
    """The checks of one model's steps; every rank calls each method at the same place of a step.

    Args:
        model: what ``ddl.auto_model`` returned.
        stages: the model as stages.
        mesh: the mesh.
    """

    def __init__(self, model: nn.Module, stages: Any, mesh: Mesh) -> None:
        self.model, self.stages, self.mesh = model, stages, mesh
        self.step, self.is_check_step = 0, True  # steps 1, 2, 4, 8, …
        self.lost: list[str] = []  # weights that a forward pass has changed in vain
        fingerprint = fingerprint_of(model)
        unprepared = fingerprint is None and not isinstance(model, DistributedDataParallel | FSDPModule)
        if unprepared and mesh.dp_cp_size * mesh.pp_size > 1 and any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                "model should be what ddl.auto_model returned, which cuts it into stages, or averages its gradients "
                f"over ranks, but this {type(model).__name__} is not: model = ddl.auto_model(model)"
            )
        self.modules = ModulesInUse(stages.local_stages(), mesh)
        # FSDP2 reduces what gradients a rank has: which of these weights have one is compared in the next step.
        reduced = mesh.dp_cp_size > 1 and local_round(model) is None and not isinstance(model, DistributedDataParallel)
        experts = {id(p) for module in experts_of(model) for p in module.parameters()}
        self.weights = [p for p in model.parameters() if reduced and id(p) not in experts]
        self.had_gradients, self.loss_dtype = 0, torch.float64
        self.replicated_weights = ReplicatedWeights(mesh)
        self.model_called: _CallFlag | None = None
        if fingerprint is not None and not fingerprint.sharded and mesh.dp_cp_size > 1 and mesh.pp_size == 1:
            self.model_called = _CallFlag()
            model.register_forward_pre_hook(self.model_called)

    def begin(self, rows: tuple[int, int] | None, x: Any, y: Any) -> None:
        """Before the forward pass."""
        self.step += 1
        self.is_check_step = self.step & (self.step - 1) == 0
        check_unchanged(self.model, self.is_check_step)
        if self.is_check_step:
            if self.mesh.dp_cp_size * self.mesh.pp_size > 1:
                _check_layouts(x)
            self._check_before_forward(x, y)
        if rows is not None and self.mesh.pp_size > 1:
            _check_rows_are_in_dim_0(rows[0] or 1, x, y)
        if self.is_check_step:
            check_tokens_are_independent(self.model, self.stages, x)
            if self.step > 4 and self.mesh.pp_size == 1:  # hooks that users gave see the step last
                self._check_rows_alone(x)
            self._look_at_next_passes()
        if self.model_called is not None:
            self.model_called.value = False
        self.modules.begin(self.is_check_step)

    def watching(self) -> contextlib.ExitStack:
        """The context of a step's passes; in steps that check, of hooks of tensors, functions, and lost changes."""
        stack = contextlib.ExitStack()
        if self.is_check_step and self.mesh.dp_cp_size * self.mesh.pp_size > 1:
            stack.enter_context(checking_tensor_hooks())
            stack.enter_context(checking_functions(by_row=self.mesh.dp_cp_size == 1))
            stack.enter_context(lost_changes(self.stages.local_stages(), self.lost))
        return stack

    def _check_before_forward(self, x: Any, y: Any) -> None:
        _check_weights_are_loaded(self.model)
        warn_of_random_values(self.model)
        if self.mesh.pp_size > 1:
            _check_hooks_of_pipeline(self.model, self.stages)
        check_same_rows(self.mesh, x, y)

    def _look_at_next_passes(self) -> None:
        """Lets the step's own passes be looked at, not those of a check, which may have few rows."""
        stages = self.stages.local_stages() if self.mesh.tp_size > 1 else []
        for stage in stages:
            check_regions_once(stage, trains=self.stages.is_last and stage is stages[-1])
        if self.mesh.dp_cp_size * self.mesh.pp_size > 1:
            for module in self.model.modules():
                check_backward_hooks(module)

    def numbers_to_sum(self, targets: tuple[Any, LossContract] | None, updates: int, order: int) -> list[float]:
        """After the forward pass, what :meth:`compare` gets summed over dp. Numbers of ranks that differ are found by
        the sums of 1, of the number, and of its square.

        Args:
            targets: the targets, and what is known of their loss; None without rows, or without the last stage.
            updates: after how many earlier batches this rank has stepped the model.
            order: a number that depends on the order of rows.
        """
        shapes = [0.0] * 6 if targets is None else _shapes_of(*targets)
        digests = [0.0] * (2 * self.mesh.pp_size)
        digest = hash((self.modules.digest(), self.had_gradients)) % 2**20
        digests[2 * self.mesh.pp_rank : 2 * self.mesh.pp_rank + 2] = float(digest), float(digest**2)
        steps = float(updates > 0), float(updates % 2**20), float((updates % 2**20) ** 2)
        return [*shapes, *steps, 1.0, float(order), float(order**2), *digests]

    def end(self, x: Any, last: bool) -> None:
        """After the backward pass, before anything else is sent."""
        if self.lost:
            raise ValueError(
                f"forward changes {self.lost[0]!r}, a weight that is gathered for this pass alone, so that the change "
                "is lost: change weights after the optimizer's step (a handler of ITERATION_COMPLETED) or before "
                "ddl.auto_model, keep a state in a buffer, or leave out shard=True, and dp beside tp or pp"
            )
        if self.model_called is not None and not self.model_called.value:
            raise ValueError(
                "the model should be called as a whole, model(x), but this step called only a method or a part of it, "
                "past the wrapper that averages gradients over dp: let forward do it, perhaps chosen by an argument"
            )
        if last:
            self.modules.check_gradients()
            self.had_gradients = hash(tuple(p.grad is None for p in self.weights)) % 2**20
        if self.mesh.pp_size == 1:  # a pipeline has checked its stages when it set up their schedule
            self._check_rows(x)

    def _check_rows(self, x: Any) -> None:
        """After the backward pass, when all ranks are known to have called the same modules."""
        mesh, stages = self.mesh, self.stages
        if self.is_check_step and mesh.dp_size > 1:
            _compare_with_dp_peers(stages, x, mesh)
        # Weights may be left out, perhaps by what all rows are: other ones than in the first step.
        branches = any(map(finds_unused, stages.local_stages()))
        if self.step == 1 or branches and self.is_check_step:
            self._check_rows_alone(x)

    def _check_rows_alone(self, x: Any) -> None:
        mesh, stages = self.mesh, self.stages
        setattr(self.model, ROWS_CHECKED, True)
        if mesh.dp_size > 1:
            x = several_rows(x)
        if mesh.dp_cp_size > 1:
            plain = stages.plain_module()  # DDP counts passes that have gradients
            run = type(stages)(plain, stages.model_fn).forward_only
            if self.step > _MANY and not on_any_rank(may_depend_in_training(run, x, [plain])):
                return
            counted: dict[str, Any] | None = {} if mesh.dp_size > 1 else None
            depends = rows_depend_on_each_other(stages.forward_only, x, stages.local_stages(), counted)
            if on_any_rank(depends):
                raise ValueError(ROWS_DEPEND)
            if counted is not None and on_any_rank(bool(counted)):
                _check_counted(stages, x, mesh, counted)
            if on_any_rank(row_gradients_depend(run, x, [plain])):
                with nudged([plain]):
                    depend = on_any_rank(row_gradients_depend(run, x, [plain]))
                if depend:
                    raise ValueError(ROW_GRADIENTS_DEPEND)

    def compare(self, summed: list[float], contract: LossContract) -> None:
        """Compares what was summed with the loss, see :meth:`numbers_to_sum`.

        Raises:
            ValueError: on every rank, if dp ranks called different modules, or have targets of different lengths, or
                some ranks have skipped a step of the optimizer.
        """
        n, shapes, squares, pads, states, states_squared, *others = summed
        stepping, updates, squared, n_orders, orders, orders_squared, *digests = others
        if not _are_equal(n_orders, orders, orders_squared):
            raise ValueError(
                "ranks should list the same batches of an epoch, of which auto_dataloader gives each its rows, but do "
                "not: draw a sampler's random numbers from torch (Python's and NumPy's differ from rank to "
                "rank), and let it depend on nothing that does"
            )
        if not _are_equal(stepping, updates, squared):
            raise ValueError(
                "all ranks should step the model equally often, but some have skipped a step that others have made: "
                "decide by a number that is the same on all ranks, such as the loss of ddl.forward_backward or what "
                "ddl.clip_grad_norm_ returns, and not by this rank's part of the model, of its gradients or of the rows"
            )
        of_stages = zip(digests[::2], digests[1::2], strict=True)
        if not all(_are_equal(self.mesh.dp_cp_size, *of_stage) for of_stage in of_stages):
            raise ValueError(UNLIKE_MODULES)
        if not _are_equal(n, states, states_squared) and contract.state.depends_on_unlike_states():
            raise ValueError(
                "loss_fn keeps a state from call to call, on which its result depends, and which differs between dp "
                "ranks, since it is computed from a rank's own rows: compute it from those of all ranks "
                '(ddl.gather_rows in loss_fn, with loss_divisor="local"), or use a mesh of tp alone'
            )
        contract.padded = contract.padded or pads > 0
        if not _are_equal(n, shapes, squares) and not contract.padded:
            raise ValueError(
                "the targets of dp ranks should have the same shape, but for the number of rows, as in one process; "
                "they differ (padded by each rank to another length?), so the number of targets that count is not "
                "known: pass loss_divisor=, a function from targets to that number (y.numel() would count padding), "
                "or, if padding counts in the loss, pad all to one length"
            )

    def at_the_end(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """When a run ends: compares weights, buffers and options, which may differ since they were compared last, and
        which weights have got a gradient in the last step.
        """
        check_replicas(self.model)
        if not isinstance(self.model, DistributedDataParallel) and local_round(self.model) is None:
            check_same_options(optimizers)
            peers = gathered_values(self.had_gradients, self.mesh.dp_cp_group) if self.mesh.dp_cp_size > 1 else []
            if len(set(peers)) > 1:
                raise ValueError(UNLIKE_MODULES)

    def before_optimizer(self, loss: torch.Tensor) -> None:
        """When gradients are ready for the optimizer."""
        if self.mesh.tp_size > 1:
            if self.is_check_step:
                _check_same_loss(loss, self.loss_dtype, self.mesh)
            self.replicated_weights.check(self.model)
        if self.is_check_step:
            check_replicas(self.model)


def _are_equal(n: float, total: float, squares: float) -> bool:
    """Whether n integers are equal, of which these are the sum and that of their squares."""
    return int(n) * int(squares) == int(total) ** 2  # which floats may not hold


class _CallFlag:
    """A forward hook that notes that the model was called; it can be copied and pickled with the model."""

    value = False

    def __call__(self, *_: Any) -> None:
        self.value = True


def _shapes_of(y: Any, contract: LossContract) -> list[float]:
    """Of the shapes of targets: 1, a digest, its square, and whether there may be padding; of the state of their loss:
    a digest, and its square. Lists of samples have none, nor what may be one: zeros.
    """
    n, states = contract.n_rows or n_rows(y), (contract.state.digest, contract.state.digest**2)
    if isinstance(y, list | tuple) and len(y) == n and not are_samples(y, n):
        return [0.0, 0.0, 0.0, float(contract.may_pad), *states]
    digest = float(zlib.crc32(repr([tuple(t.shape[1:]) for t in tensors_of_rows(y, n)]).encode()) % 2**20)
    return [1.0, digest, digest**2, float(contract.may_pad), *states]


def _check_weights_are_loaded(model: nn.Module) -> None:
    unloaded = without_values(model)
    if unloaded is not None:
        raise ValueError(
            f"{unloaded!r} has no values yet, since the model was made in ddl.empty_weights: call ddl.import_weights "
            "or ddl.load_full_state_dict first"
        )


def _check_same_loss(loss: torch.Tensor, dtype: torch.dtype, mesh: Mesh) -> None:
    """Raises a ValueError if tp peers have other losses, beyond what kernels round in the type of the loss."""
    peers = gathered(loss, mesh.tp_group)
    share = 1e-3  # other kernels may round; those of a GPU also add up in any order, in 16 bits
    if loss.device.type != "cpu":
        share = max(share, ROUNDINGS * torch.finfo(dtype).eps)
    if any(abs(float(peer - peers[0])) > share * abs(float(peers[0])) for peer in peers):
        raise ValueError(
            f"tp peers should compute the same loss, but get {', '.join(f'{float(peer):.6g}' for peer in peers)}: it "
            "uses what is sharded over tp, such as features between layers that tensor_plan cuts; compute it from full "
            "outputs, or leave these layers out of the plan"
        )


def _check_hooks_of_pipeline(model: nn.Module, stages: Any) -> None:
    """Refuses hooks given after ``ddl.auto_model`` to a pipeline, or to a module that only holds its layers."""
    called = {module for stage in stages.local_stages() for module in stage.modules()}
    for name, module in model.named_modules():
        if module not in called:
            check_root_hooks(module, name)
    for holder in stages.holders:
        if (module := holder.module()) is not None:
            check_root_hooks(module, holder.name)


def _check_layouts(x: Any) -> None:
    found = next((t for t in tensors_of(x) if t.is_nested or t.layout is not torch.strided), None)
    if found is not None:
        raise ValueError(
            "x should hold dense tensors, of which checks and microbatches take some rows, but holds a "
            f"{'nested' if found.is_nested else found.layout} one: let forward make it, of a dense one (x.to_sparse()) "
            "or of padded rows and their lengths; or, without pp, train with checks=False"
        )


def _compare_with_dp_peers(stages: Any, x: Any, mesh: Mesh) -> None:
    """Compares what modules store, and to which lengths rows are padded, in one exchange."""
    local = stored_values([stages.plain_module()], n_rows(x))
    lengths = [t.shape[1:] if len(t.shape) > 1 and len(t) == n_rows(x) else torch.Size() for t in tensors_of(x)]
    peers = gathered_values(({name: _comparable(value) for name, value in local.items()}, lengths))
    _check_stored_values(stages, x, mesh, local, [values for values, _ in peers])
    dp_peers = [mesh.rank_at(**(mesh.coordinates(mesh.rank) | {"dp": i})) for i in range(mesh.dp_size)]
    _warn_of_padding(stages, x, mesh, lengths, [peers[rank][1] for rank in dp_peers])


def _check_counted(stages: Any, x: Any, mesh: Mesh, counted: dict[str, Any]) -> None:
    """Raises a ValueError if a buffer, or an attribute on which outputs depend, has counted a dp rank's rows alone.

    Args:
        counted: what changes if there are fewer rows, on ranks that have several.
    """
    rows = gathered_values([digest(tensor) for tensor in tensors_of(x)], mesh.dp_group)
    if not on_any_rank(any(of_rank != rows[0] for of_rank in rows)):  # each rank has the rows of the batch
        return
    plain = stages.plain_module()
    buffers = [name for name, _ in plain.named_buffers() if name in counted]
    attributes = {name: value for name, value in counted.items() if name not in buffers}
    depends = outputs_depend_on(stages.forward_only, x, [plain], attributes)
    of_ranks = gathered_values([*buffers, *(attributes if depends else ())][:1])
    if any(of_ranks):
        raise ValueError(
            f"forward keeps {next(filter(None, of_ranks))[0]!r}, which depends on how many rows it gets, and a dp rank "
            "gets a part of a batch: change it in a handler of ITERATION_COMPLETED instead, where engine.rows[1] is "
            "the number of rows of all ranks"
        )


def _check_stored_values(stages: Any, x: Any, mesh: Mesh, local: dict[str, Any], peers: list[dict[str, Any]]) -> None:
    """Raises a ValueError if modules store different values on dp ranks, in plain attributes on which outputs depend.

    Buffers are compared by :func:`check_replicas`; what is stored only to be looked at, such as the last loss, may
    differ.
    """
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    expected = [peers[mesh.rank_at(**(of_rank | {"dp": 0}))] for of_rank in coordinates]
    pairs = list(zip(peers, expected, strict=True))
    different = sorted({name for peer, of in pairs for name in peer if name in of and peer[name] != of[name]})
    if not different:
        return
    own = [local.get(name) for name in different]
    of_dp_rank_0 = value_of(dist.get_global_rank(mesh.dp_group, 0), own, mesh.dp_group)
    others = {name: value for name, value in zip(different, of_dp_rank_0, strict=True) if name in local}
    if on_any_rank(outputs_depend_on(stages.forward_only, x, [stages.plain_module()], others)):
        raise ValueError(
            f"forward keeps {different[0]!r}, which differs between dp ranks, since it is computed from a rank's own "
            "rows, and the model's outputs depend on it: sum over ranks what it is computed from "
            "(torch.distributed.all_reduce in forward), or compute it outside of forward"
        )


def _warn_of_padding(stages: Any, x: Any, mesh: Mesh, lengths: list[torch.Size], peers: list[list[torch.Size]]) -> None:
    """Warns if dp ranks have padded their rows to different lengths, and outputs depend on it."""
    same_dims = all([*map(len, peer)] == [*map(len, lengths)] for peer in peers)  # else rows are of different kinds
    if not same_dims or all(peer == lengths for peer in peers) or mesh.cp_size > 1:
        return
    longest = [torch.Size(map(max, zip(*of_ranks, strict=True))) for of_ranks in zip(*peers, strict=True)]
    longest = [most or tensor.shape[1:] for most, tensor in zip(longest, tensors_of(x), strict=True)]
    depends = outputs_depend_on_padding(stages.forward_only, x, longest, [stages.plain_module()])
    if on_any_rank(depends) and mesh.rank == 0:
        warnings.warn(
            "each dp rank has padded its rows to its own longest one, and the model's outputs change if zeros are "
            "appended: one process would pad all rows to the longest of the batch. Pad to one length in collate_fn, or "
            "let the model leave padding out (a mask). A model that leaves out another value than zero is right",
            stacklevel=2,
        )


def _comparable(value: Any) -> Any:
    """A value of any structure with digests in place of tensors and arrays."""

    def comparable(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.shape, zlib.crc32(leaf.tobytes())
        return (tuple(leaf.shape), digest(leaf)) if isinstance(leaf, torch.Tensor) else leaf

    return list(map(comparable, tree_leaves(value)))


def check_evaluated_rows(model: nn.Module, stages: Any, x: Any) -> None:
    """Raises a ValueError on every rank if rows depend on each other in evaluation; once, of a model without a step.

    Args:
        model: the model.
        stages: the model as stages.
        x: its inputs.
    """
    mesh = get_mesh()
    if mesh.dp_size * mesh.pp_size == 1:
        return
    _check_layouts(x)
    if hasattr(model, ROWS_CHECKED):
        return
    setattr(model, ROWS_CHECKED, True)
    if mesh.dp_size > 1:
        x = several_rows(x)
    if on_any_rank(stages.rows_depend(x)):
        raise ValueError(ROWS_DEPEND)


def check_tokens_are_independent(model: nn.Module, stages: Any, x: Any, repeat: bool = True) -> None:
    """Over cp, raises a ValueError on every rank if a module looks at other tokens than its rank's own.

    Args:
        model: the model.
        stages: the model as stages.
        x: its inputs.
        repeat: whether to check also where this was done before. Default: True.
    """
    mesh = get_mesh()
    if mesh.cp_size == 1 or (not repeat and hasattr(model, TOKENS_CHECKED)):
        return
    is_first = not hasattr(model, TOKENS_CHECKED)
    setattr(model, TOKENS_CHECKED, True)

    def mixes(in_full: bool) -> tuple[int, int, str] | None:
        """Of the first module that mixes tokens its stage, its place among the calls, and its name."""
        found = gathered_values(check_tokens(stages.forward_only, x, stages.local_stages(), mesh, in_full))
        return min(((mesh.coordinates(rank)["pp"], *name) for rank, name in enumerate(found) if name), default=None)

    first, length = mixes(in_full=False), max((t.shape[1] for t in tensors_of(x) if t.ndim > 1), default=0)
    differs = first is None and is_first and mesh.pp_size == 1 and not on_any_rank(length * mesh.cp_size > MOST_IN_FULL)
    if differs:
        differs = on_any_rank(length_matters(stages.forward_only, x, stages.local_stages(), mesh))
    if differs or (first is not None and length <= MOST_IN_FULL):
        # Perhaps in blocks, which a rank's part of a sequence has as a whole.
        first = mixes(in_full=True) or ((0, 0, "") if differs else None)
    if first is not None:
        name = "" if first[2] == "module" else first[2].removeprefix("module.")  # DDP's name for the model
        raise ValueError(
            f"{repr(name) if name else 'the model'} gives other outputs for a cp rank's tokens than for the full "
            "sequence: attention should be ddl.ring_attention or ddl.ulysses_attention, and positions those of "
            "ddl.sequence_positions; what else looks at other tokens (a convolution, pooling, BatchNorm), branches on "
            "how many there are, adds some (a class token: let the dataset do that), or returns one number of all (a "
            "loss by labels=: let loss_fn compute it, of targets shifted before) cannot run on a mesh with cp"
        )


def _check_rows_are_in_dim_0(loader_rows: int, x: Any, y: Any) -> None:
    first = next((tensor for tensor in tensors_of(x) if tensor.ndim), None)
    of_y = next(iter(tensors_of(y)), None)
    if first is not None and of_y is not None and of_y.shape == first.shape[:1]:  # a class for each: two views of a row
        return
    if first is not None and first.ndim > 1 and len(first) != loader_rows and first.shape[1] == loader_rows:
        raise ValueError(
            f"x should have its {loader_rows} rows in dim 0 under pp, which cuts microbatches there, but has shape "
            f"{tuple(first.shape)}: let collate_fn put rows first, and transpose in the model's first layer"
        )


# ------------------------------------------------------------------------------------------- the model is unchanged


# ------------------------------------------------------------------------------------------- rows and modules


def warn_of_same_batch(mesh: Mesh, batch: Any) -> None:
    """Warns if dp ranks have the same batch: metrics would count its rows once for each of them."""
    digests = [digest(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    peers = gathered(torch.tensor([hash(tuple(digests))], device=idist.device()), mesh.groups["dp"])
    if len(peers) > 1 and any(digests) and all(torch.equal(peer, peers[0]) for peer in peers) and mesh.rank == 0:
        warnings.warn(
            f"each dp rank has the same batch, so that metrics which sum over ranks count its rows {len(peers)} times: "
            "run the engine on a loader of ddl.auto_dataloader, which divides rows among ranks",
            stacklevel=2,
        )


def check_same_rows(mesh: Mesh, *parts: Any, axes: tuple[str, ...] = ("tp", "pp")) -> None:
    """Checks that peers on these axes have the same rows.

    Raises:
        ValueError: on all peers, if they have different rows.
    """
    for axis in axes:
        if mesh.sizes[axis] == 1:
            continue
        digests = [hash(tuple(digest(t) for t in tree_leaves(part) if isinstance(t, torch.Tensor))) for part in parts]
        local = torch.tensor(digests, device=idist.device())
        peers = gathered(local, mesh.groups[axis])
        if all(torch.equal(peer, local) for peer in peers):
            continue
        if any(bool((peer == hash(())).any()) for peer in peers):
            raise ValueError(
                f"{axis} peers should get the same rows, but some have none: a model returns None where its last stage "
                "is elsewhere, so what it returns cannot be the targets of another one; compute them with a module "
                "that each rank holds (without ddl.auto_model), or take a mesh without pp"
            )
        raise ValueError(
            f"{axis} peers should get the same rows, but got different ones: use ddl.auto_dataloader, and if the "
            "dataset draws random numbers, give its generator the same seed on all ranks"
        )
