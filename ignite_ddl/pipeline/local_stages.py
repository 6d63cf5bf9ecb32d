"""How engines, state and checks use a model, partitioned over pp or not: as the stages that this rank holds."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager as Context
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ignite_ddl.checks.kept_state import reached, states_kept, streams_kept, versions
from ignite_ddl.checks.rows_alone import MAX_ROWS, evaluated_rows_depend
from ignite_ddl.checks.traceless import without_trace
from ignite_ddl.compat import BELONGS_TO_A_MODEL
from ignite_ddl.data_parallel import local_round, reshard, share_buffers
from ignite_ddl.experts.balance import router_loss_weight
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.pipeline.batch_schedules import BatchSchedules
from ignite_ddl.pipeline.cut import Cut, Holder
from ignite_ddl.pipeline.schedules import SCHEDULES
from ignite_ddl.pipeline.transfer import Transfer
from ignite_ddl.structure import (
    check_graphs,
    check_joins,
    check_no_lists,
    check_rows,
    detached,
    flatten,
    joined,
    n_rows,
    rows_of,
    tensors_of,
)
from ignite_ddl.tensor.random import draw_seed, random_stream

_on_some_ranks_only = False


@contextlib.contextmanager
def on_some_ranks() -> Iterator[None]:
    """Context of code that not all pp ranks run: a pipeline that it calls would wait for the others."""
    global _on_some_ranks_only
    before, _on_some_ranks_only = _on_some_ranks_only, True
    try:
        yield
    finally:
        _on_some_ranks_only = before


def _check_on_all_ranks() -> None:
    if _on_some_ranks_only:
        raise ValueError(
            "a pipeline cannot be called in loss_fn, in output_transform or in a layer of another pipeline, which not "
            "all pp ranks run: call it before, such as under torch.no_grad in prepare_batch, and pass its output on "
            "with the targets; if gradients have to go through it, use a mesh without pp"
        )


def call(model: nn.Module, x: Any) -> Any:
    """Ignite's default ``model_fn``."""
    return model(x)


class OneStage:
    """A model that is not partitioned over pp, as one stage; the methods are those of :class:`PipelineStages`, too.

    Args:
        model: any module.
        model_fn: takes the model and ``x``, returns the output. Default: calls the model.

    Attributes:
        is_last: whether this rank holds the last stage, which computes outputs and losses.
    """

    is_last = True

    def __init__(self, model: nn.Module, model_fn: Callable[[nn.Module, Any], Any] = call) -> None:
        self.model, self.model_fn = model, model_fn

    def forward(
        self, x: Any, y: Any, loss_fn: Callable, transform: Callable, share: Callable, weight: float, autocast: Context
    ) -> tuple[Any, torch.Tensor | None]:
        """Forward and loss of one batch; a pipeline, whose schedule mixes the passes, runs backward, too.

        Args:
            x: this dp rank's rows.
            y: their targets.
            loss_fn: takes transformed outputs and targets of some rows, returns their loss.
            transform: a function of the model's output, applied before ``loss_fn``.
            share: takes the targets of a microbatch and of the batch, returns the weight of the microbatch's loss.
            weight: factor of the loss in the backward pass.
            autocast: the context of forward passes and losses.

        Returns:
            tuple: the transformed output and the loss of all rows, without ``weight``, for :meth:`backward`; None and
            None on a rank without the last stage.
        """
        with autocast:
            output = transform(self.model_fn(self.model, x))
            return output, loss_fn(output, y)

    def backward(self, loss: torch.Tensor | None, weight: float) -> None:
        """The backward pass, if :meth:`forward` has not run it."""
        (loss * weight).backward()

    def forward_only(self, x: Any, checks: bool = False) -> Any:
        """The output for all rows on the rank with the last stage, None elsewhere.

        Args:
            x: this dp rank's rows.
            checks: whether to check that outputs of microbatches can be joined. Default: False, in a check, which
                leaves no trace in ``model_fn`` either.
        """
        owners = [] if checks else reached(self.model_fn)
        with states_kept(owners), streams_kept(owners):
            return self.model_fn(self.model, x)

    def rows_depend(self, x: Any) -> bool:
        """Whether rows depend on each other in evaluation; all ranks call it."""
        return evaluated_rows_depend(self.forward_only, x, self.local_stages())

    def from_last_stage(self, value: Any) -> Any:
        """Sends a value from the rank with the last stage to its pp peers."""
        return value

    def reduce_loss(self, parts: torch.Tensor) -> dist.Work:
        """Starts to sum ``parts`` over the ranks that have losses of different rows."""
        return dist.all_reduce(parts, group=get_mesh().dp_cp_group, async_op=True)

    def begin_window(self) -> None:
        """Before the first batch of a window: gradients that it adds to, of weights that stages share, are sums over
        these stages already, and are kept on one of them.
        """

    def sum_shared_gradients(self) -> None:
        """Sums the gradients of weights that several stages share."""

    def counts(self, name: str) -> bool:
        """Whether a parameter of this rank counts in a norm: not if an earlier stage has it too."""
        return True

    def local_stages(self) -> list[nn.Module]:
        """This rank's stages."""
        return [self.model]

    def plain_module(self) -> nn.Module:
        """The module whose names are those of the uncut model."""
        module = self.model
        while isinstance(module, DistributedDataParallel) or hasattr(module, "_orig_mod"):  # torch.compile's
            module = module._orig_mod if hasattr(module, "_orig_mod") else module.module
        return module

    def state_dict(self) -> dict[str, Any]:
        """What this rank has of the uncut model's state dict, with parameters themselves."""
        return self._by_uncut_names(self.plain_module().state_dict(keep_vars=True))

    def registered(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers by the names of the uncut model, which modules may save otherwise."""
        return self._by_uncut_names(_registered(self.plain_module()))

    def _by_uncut_names(self, state: dict[str, Any]) -> dict[str, Any]:
        for name, module in self.plain_module().named_modules():
            if isinstance(module, DistributedDataParallel):  # such as in an AveragedModel, which names it, too
                start, ddp = f"{name}.", f"{name}.module."
                state = {start + k.removeprefix(ddp) if k.startswith(ddp) else k: value for k, value in state.items()}
        return state

    def full_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes in the uncut model's state dict."""
        state = self.state_dict()
        return {name: tuple(t.shape) if isinstance(t, torch.Tensor) else () for name, t in state.items()}

    def shared_names(self) -> list[list[str]]:
        """Groups of names of one weight that several stages hold."""
        return []

    def gather_stages(self, entries: dict[str, Any]) -> dict[str, Any]:
        """The entries of all stages, in the order of the uncut model's state dict."""
        return entries


class PipelineStages:
    """This rank's stages of a pipeline; :class:`OneStage` describes the methods.

    Args:
        module: the :class:`~ignite_ddl.pipeline.pipeline.Pipeline`.
        cut: all stages.
        mesh: the mesh.
        stages: those of this rank, by number.
        communicates: whether dp ranks communicate in forward passes.
        gathers: whether they do so in that of each microbatch.
        checks: whether to refuse layers that keep a state from one forward pass to the next.
    """

    def __init__(
        self,
        module: nn.Module,
        cut: Cut,
        mesh: Mesh,
        stages: dict[int, nn.Module],
        communicates: bool,
        gathers: bool,
        checks: bool,
    ) -> None:
        self.module, self.cut, self.mesh, self.stages = module, cut, mesh, stages
        self.is_last = cut.owners[-1] == mesh.pp_rank
        self.holders: list[Holder] = []  # of layers: in the model that was cut, and in the pipeline
        self.transfer = Transfer(cut, mesh)
        self.schedules = BatchSchedules(cut, mesh, stages, self.transfer, communicates, gathers, checks)
        self.from_last_stage, self.gather_stages = self.transfer.from_last_stage, self.transfer.gather

    def train_step(
        self, x: Any, y: Any, loss_fn: Callable, autocast: Context | None = None
    ) -> tuple[Any, torch.Tensor | None]:
        """See :meth:`ignite_ddl.pipeline.pipeline.Pipeline.train_step`."""
        self._check_call()
        check_graphs(x, y)
        rows = check_rows(x=x, y=y)
        check_no_lists(x, rows)
        tensors, structure = flatten(tree_map_only(torch.Tensor, torch.Tensor.contiguous, x), "x")
        shapes = repr((structure, [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]))
        device, autocast = idist.device().type, autocast or contextlib.nullcontext()
        with autocast:
            computes_in = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = rows, shapes, (computes_in, self.module.training)
        schedule, loss, new = self.schedules.get(key, x, rows, autocast)
        for part in (loss, *loss.stages):
            part.autocast = autocast  # of this step
        self._share_buffers()
        loss.loss_fn, loss.y = loss_fn, y
        losses: list[torch.Tensor] | None = [] if self.is_last else None
        # torch clears gradients in the first step of a schedule: keep those of gradient accumulation.
        kept = [(p, p.grad) for p in self.module.parameters() if p.grad is not None] if new else []
        for parameter, _ in kept:
            parameter.grad = None
        # All ranks draw one number from their common stream: it stays common whatever the stages draw.
        n = schedule._n_microbatches
        explaining, of_microbatch = _explaining_errors(self.cut.schedule), router_loss_weight(1 / n)
        with random_stream(draw_seed()), explaining, of_microbatch, on_some_ranks():
            output = schedule.step(
                *(tensors if 0 in self.stages else ()),
                target=torch.arange(rows) if self.is_last else None,
                losses=losses,
            )
        for parameter, grad in kept:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        if not self.is_last:
            return None, None
        return loss.structure.unflatten(output), torch.stack(losses).sum().detach()

    def forward(
        self, x: Any, y: Any, loss_fn: Callable, transform: Callable, share: Callable, weight: float, autocast: Context
    ) -> tuple[Any, torch.Tensor | None]:
        # By microbatch: whether a transform changes its argument in place, and what it makes then, or the argument.
        parts: list[tuple[bool, Any]] = []
        losses: list[torch.Tensor] = []  # without the weight, which may be 0

        def weighted_loss(output: Any, target: Any) -> torch.Tensor:
            before, result = versions(output), transform(output)
            is_changed = versions(output) != before
            parts.append((is_changed, detached(result if is_changed else output)))
            loss, of_batch = loss_fn(result, target), share(target, y)
            losses.append(loss.detach() * of_batch)
            return loss * (of_batch * weight)

        output, loss = self.train_step(x, y, weighted_loss, autocast)
        if loss is None:
            return None, None
        if any(is_changed for is_changed, _ in parts):
            output = joined([part if is_changed else transform(part) for is_changed, part in parts])
        else:
            output = transform(output)
        return output, torch.stack(losses).sum()

    def backward(self, loss: torch.Tensor | None, weight: float) -> None:
        """Does nothing: the schedule has run it."""

    def forward_only(self, x: Any, checks: bool = False) -> Any:
        self._check_call()
        self._share_buffers()
        with torch.no_grad(), on_some_ranks():
            rows = n_rows(x)
            if checks and rows and tensors_of(x):
                check_rows(x=x)
            fewer = int(checks)  # in the first microbatch, so that check_joins sees different numbers of rows
            n = self._common_count(min(self.cut.n_microbatches, max(1, rows - fewer)))
            ends = [0, *((rows * i - fewer) // n for i in range(1, n)), rows]
            microbatches = [rows_of(x, *of_one) for of_one in itertools.pairwise(ends)]
            outputs = self.transfer.pass_through(microbatches, lambda s, value: self.stages[s](value))
        for stage in self.local_stages():
            reshard(stage)
        if checks:
            check_joins(outputs)
        return joined(outputs) if outputs else None

    def rows_depend(self, x: Any) -> bool:
        found = []

        def check(s: int, value: Any) -> Any:
            found.append(evaluated_rows_depend(self.stages[s], value, [self.stages[s]]))
            return self.stages[s](value)

        with torch.no_grad(), on_some_ranks(), without_trace(self.local_stages()):
            self.transfer.pass_through([rows_of(x, 0, min(n_rows(x), MAX_ROWS))], check)
        for stage in self.local_stages():
            reshard(stage)
        return any(found)

    def _check_call(self) -> None:
        _check_on_all_ranks()
        for holder in self.holders:
            holder.check_unchanged()

    def _common_count(self, n: int) -> int:
        """The least number of microbatches of dp peers, where they communicate in each."""
        if self.mesh.ep_size > 1 or self.schedules.gathers:
            least = torch.tensor(n, device=idist.device())
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.mesh.dp_cp_group)
            n = int(least)
        return n

    def _share_buffers(self) -> None:
        for stage in self.local_stages():
            if local_round(stage) is None:
                share_buffers(stage, self.mesh)

    def reduce_loss(self, parts: torch.Tensor) -> dist.Work:
        """Over the world; of tp peers, which have the same values, only the first counts."""
        if self.mesh.tp_rank != 0:
            parts.zero_()
        return dist.all_reduce(parts, async_op=True)

    def begin_window(self) -> None:
        parameters = dict(self.module.named_parameters()) if self.cut.shared else {}
        for name in (name for names in self.cut.shared for name in names[1:] if name in parameters):
            parameters[name].grad = None

    def sum_shared_gradients(self) -> None:
        if self.cut.shared:
            self.transfer.sum_shared_gradients(dict(self.module.named_parameters()))

    def counts(self, name: str) -> bool:
        return not any(name in names[1:] for names in self.cut.shared)

    def local_stages(self) -> list[nn.Module]:
        return list(self.stages.values())

    def plain_module(self) -> nn.Module:
        return self.module

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict(keep_vars=True)

    def registered(self) -> dict[str, torch.Tensor]:
        return _registered(self.module)

    def full_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.cut.shapes

    def shared_names(self) -> list[list[str]]:
        return self.cut.shared


def _registered(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return parameters | dict(module.named_buffers(remove_duplicate=False))


Stages = OneStage | PipelineStages


def stages_of(model: nn.Module, model_fn: Callable[[nn.Module, Any], Any] = call) -> Stages:
    """The stages that ``ddl.auto_model`` has made of a model under pp; any other model is one stage.

    Raises:
        ValueError: if a ``model_fn`` is given for a pipeline, whose schedule calls the stages, a pipeline has been
            compiled, or the model is that of which ``ddl.auto_model`` has made one, or holds layers of it.
    """
    stages = getattr(model, "_local_stages", None)
    if not isinstance(stages, PipelineStages):
        if get_mesh().pp_size > 1 and any(hasattr(p, BELONGS_TO_A_MODEL) for p in model.parameters()):
            raise ValueError(
                f"model should be what ddl.auto_model returned, but this {type(model).__name__} only holds layers of "
                "that model, of which each pp rank trains its own stages: model = ddl.auto_model(model)"
            )
        return OneStage(model, model_fn)
    if stages.module is not model:  # of torch.compile
        raise ValueError(
            "a pipeline cannot be compiled: compile its layers before ddl.auto_model, for example "
            "nn.Sequential(*(torch.compile(layer) for layer in model))"
        )
    if model_fn is not call:
        raise ValueError("model_fn cannot be given under pp, where the schedule calls the stages: leave it out")
    return stages


@contextlib.contextmanager
def _explaining_errors(schedule: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "failed to run forward" in str(error) and error.__cause__ is not None:
            raise error.__cause__ from None  # a layer's error, in place of which torch's has the shapes of its input
        if "Failed to run stage backward" in str(error) and isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None  # of a hook
        if "grad can be implicitly created only for scalar outputs" in str(error.__cause__):
            raise RuntimeError(
                "a stage's output requires a gradient, but did not when its schedule was set up, so the next stage "
                "sends none: when forward begins to compute with gradients what it computed under torch.no_grad() "
                "before, call the model's forget_schedules() on every rank, as after unfreezing a stage"
            ) from None
        if SCHEDULES[schedule].split_backward and "backward through the graph a second time" in str(error):
            raise RuntimeError(
                f"schedule={schedule!r} computes the gradients of weights separately from those of a stage's input, "
                "and torch cannot do that here: a stage of this rank uses some weight both with its input and "
                "without it, as w in tanh(linear(x * w)) + w; use '1f1b' or 'interleaved_1f1b'"
            ) from error
        raise
