"""Pipeline parallelism: a rank's stages of a model, run by one of torch's schedules."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from ignite_ddl.guards import PartOfAState, of_the_whole, refuse_pickling
from ignite_ddl.mesh import Mesh
from ignite_ddl.pipeline.cut import Cut, add_submodule, check_trains, named_layers, sequential
from ignite_ddl.pipeline.schedules import SCHEDULES, microbatches_for
from ignite_ddl.pipeline.structure import Structure, check_rows, flatten, joined, map_leaves, n_rows, rows_of, whole
from ignite_ddl.tensor.gradients import redistribute_gradient
from ignite_ddl.tensor.random import draw_seed, random_stream
from ignite_ddl.traceless import ROWS_DEPEND, rows_depend_on_each_other, state_that_grows, without_trace

__all__ = ["SHARED", "Pipeline", "reshard", "share_buffers"]
SHARED = "_shared_with"  # on a parameter that several stages hold: its first name, and the pp ranks
_SCHEDULES_KEPT = 16  # per pipeline, one for each shape of a batch; each holds receive buffers


class Pipeline(nn.Module):
    """This rank's stages of a model, and the schedule that runs them. Made by ``ddl.auto_model``.

    Parameters keep their names in the whole model. A layer takes one value and returns one: a tensor, or tensors and
    plain values in tuples, lists and dicts, so that a mask or a skip connection travels along. Each tensor of the input
    and of the targets has a row for each sample. A layer that works in place needs an attribute ``inplace``.

    A schedule is set up for each shape of the input, by an extra forward pass of a microbatch, and the last 16 are
    kept: padding to many lengths takes time. The set-up depends on which stages have trainable weights: after freezing
    or unfreezing a stage, call :meth:`forget_schedules` on every rank; otherwise the next step raises an error.

    "interleaved_zero_bubble", "zbv" and "dualpipev" compute the gradients of weights separately from those of the
    stage's input. They refuse a stage without trainable weights, and fail if the stage's output depends on a weight in
    two ways, through an operation on the stage's input and without it, such as ``w`` in ``tanh(linear(x * w)) + w``:
    use another schedule for such stages.

    Args:
        model: the whole model, in which the layers of this rank's stages have been made.
        cut: the stages, from :func:`~ignite_ddl.pipeline.cut.cut_into_stages`.
        mesh: the mesh; its pp axis has more than one rank.
        shard: whether the stages are going to be sharded over dp. Default: False.
        checks: whether to refuse layers that keep a state from one forward pass to the next. Default: True.
    """

    def __init__(self, model: nn.Module, cut: Cut, mesh: Mesh, shard: bool = False, checks: bool = True) -> None:
        super().__init__()
        self._gathers = shard and mesh.dp_size > 1
        # Private names, since layers are registered under names of the user's.
        self._cut, self._mesh = cut, mesh
        layers = dict(named_layers(model))
        self._stages: dict[int, nn.Module] = {}  # in a dict: modules are registered layer by layer, below
        for s in cut.stages_of(mesh.pp_rank):
            own = [(name, layers[name]) for name in cut.layers[s]]
            if mesh.dp_size > 1:
                own = _copies_of_shared_layers(own, self._stages.values())
            self._stages[s] = stage = sequential(own)
            for name, layer in own:
                add_submodule(self, name, layer)
            if s > 0 and any(getattr(module, "inplace", False) for module in stage.modules()):
                stage.register_forward_pre_hook(_copied)
        self._no_weights = [nn.Parameter(torch.empty(0))]  # in a list: not registered
        held = dict(self.named_parameters(remove_duplicate=False))
        for names in cut.shared:
            ranks = {cut.owners[cut.stage_of[name]] for name in names}
            for name in names:
                if name in held:
                    setattr(held[name], SHARED, (names[0], frozenset(ranks)))
        self._schedules: dict[tuple, tuple[Any, _Loss]] = {}  # by shape and dtype of a batch
        # Whether a stage had trainable weights when schedules were set up.
        self._trained: dict[int, bool] = {}
        self._stateless = not checks  # whether it is known that forward keeps no state

    def __deepcopy__(self, memo: dict) -> Pipeline:
        """The same stages with weights of their own, as Ignite's EMAHandler makes them; on the same mesh."""
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        shared = {"_mesh": self._mesh, "_cut": self._cut, "_schedules": {}, "_trained": {}}
        rest = {name: value for name, value in vars(self).items() if name not in shared}
        vars(copied).update(shared | copy.deepcopy(rest, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickling()
        return super().__reduce_ex__(protocol)

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> dict[str, Any]:
        """As ``nn.Module.state_dict``, of this rank's stages: it cannot be pickled outside of ``ddl.pickle_shards``."""
        if destination is None:
            destination = PartOfAState()
            destination._metadata = OrderedDict()  # as nn.Module makes it
        return super().state_dict(*args, destination=destination, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``, of this rank's stages; that of the whole model only with strict=False."""
        own = super().state_dict(keep_vars=True).keys() if strict else ()
        others = [name for name in state_dict if strict and name in self._cut.shapes and name not in own]
        if others:
            raise of_the_whole(others[0])
        return super().load_state_dict(state_dict, strict, assign)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages; if none is trained, an empty one, too: optimizers need a parameter."""
        mine = list(super().parameters(recurse))
        return iter(mine if any(p.requires_grad for p in mine) else [*mine, *self._no_weights])

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, which computes outputs and losses."""
        return self._cut.owners[-1] == self._mesh.pp_rank

    def train_step(
        self,
        x: Any,
        y: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        autocast: contextlib.AbstractContextManager | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        """One batch forward and backward through the schedule; gradients add up as after ``loss.backward()``.

        Args:
            x: this data-parallel rank's rows, the same on each of its pp ranks: tensors in any structure.
            y: their targets, a row for each: tensors in any structure.
            loss_fn: takes a microbatch's output and targets and returns a term of the loss; the terms are added.
            autocast: the context of forward passes and losses, such as ``torch.autocast``. Default: none.

        Returns:
            tuple: the output for all rows and the sum of the microbatches' losses, on the rank that holds the
            last stage; (None, None) on the others.

        Raises:
            ValueError: if a tensor of ``x`` or ``y`` has no rows or another number of them, a stage returns what
                cannot be sent, or a stage was frozen or unfrozen since the first step (see :meth:`forget_schedules`).
        """
        rows = check_rows(x, y)
        tensors, structure = flatten(tree_map(_contiguous, x), "x")
        known = repr((structure, [(tuple(t.shape), t.dtype) for t in tensors]))
        key = rows, known, getattr(autocast, "fast_dtype", None)
        fresh = self._is_fresh(key)
        schedule, loss = self._schedule_for(x, rows, key, fresh, autocast or contextlib.nullcontext())
        for stage in self._stages.values():
            share_buffers(stage, self._mesh)
        loss.loss_fn, loss.y = loss_fn, y
        losses: list[torch.Tensor] | None = [] if self.is_last else None
        # torch clears gradients in the first step of a schedule: keep those of gradient accumulation.
        kept = [(p, p.grad) for p in self.parameters() if p.grad is not None] if fresh else []
        for parameter, _ in kept:
            parameter.grad = None
        # All ranks draw one number from their common stream: it stays common whatever the stages draw.
        with random_stream(draw_seed()), self._explained():
            output = schedule.step(
                *(tensors if 0 in self._stages else ()),
                target=torch.arange(rows) if self.is_last else None,
                losses=losses,
            )
        for parameter, grad in kept:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        if not self.is_last:
            return None, None
        return loss.structure.unflatten(output), torch.stack(losses).sum().detach()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "failed to run forward" in str(error) and error.__cause__ is not None:
                raise error.__cause__ from None  # torch hides what a layer has raised behind the shapes of its input
            name = self._cut.schedule
            if SCHEDULES[name].split_backward and "backward through the graph a second time" in str(error):
                raise RuntimeError(
                    f"schedule={name!r} computes the gradients of weights separately from those of a stage's input, "
                    "and torch cannot do that here: a stage of this rank uses some weight both with its input and "
                    "without it, as w in tanh(linear(x * w)) + w; use '1f1b' or 'interleaved_1f1b'"
                ) from error
            raise

    def forget_schedules(self) -> None:
        """Makes the next step set up its schedule again: call it on every rank after freezing or unfreezing a stage.

        The pipeline's ``requires_grad_`` calls it. If the mesh has a dp axis, a stage without trainable weights in
        ``ddl.auto_model`` cannot be unfrozen: nothing averages its gradients.
        """
        self._schedules.clear()
        self._trained = {}

    def requires_grad_(self, requires_grad: bool = True) -> Pipeline:
        """As ``nn.Module.requires_grad_``, on every rank; calls :meth:`forget_schedules`."""
        self.forget_schedules()
        super().requires_grad_(requires_grad)
        self._no_weights[0].requires_grad_()
        return self

    def forward_only(self, x: Any) -> Any:
        """The output for all rows on the rank with the last stage, None elsewhere; without gradients.

        It runs the stages itself, because torch's schedules run their backward passes in evaluation too (zbv fails).
        """
        for stage in self._stages.values():
            share_buffers(stage, self._mesh)
        with torch.no_grad():
            rows = n_rows(x)
            n = min(self._cut.n_microbatches, max(1, rows))
            ends = [rows * i // n for i in range(n + 1)]
            microbatches = [rows_of(x, first, end) for first, end in itertools.pairwise(ends)]
            outputs = self._pass(microbatches, lambda s, given: self._stages[s](given))
        for stage in self._stages.values():
            reshard(stage)
        return joined(outputs) if outputs else None

    def forward(self, x: Any) -> Any:
        """The output for all rows, on every pp rank, without gradients: what asks for them gets an error."""
        output = self.from_last_stage(whole(self.forward_only(x)))
        asks = self.training and torch.is_grad_enabled()
        return map_leaves(_without_gradient, output) if asks else output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            own = vars(self).get("_cut")
            ranks = own.owners_of(name) if own is not None else []
            if not ranks or self._mesh.pp_rank in ranks:
                raise
            raise ValueError(
                f"{name!r} is on pp rank {', '.join(map(str, ranks))}, and this is pp rank {self._mesh.pp_rank}: "
                "under pp each rank has its own stages only; change the model before ddl.auto_model"
            ) from None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's ``generate`` needs the whole model and its cache in each step.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a pipeline cannot run Hugging Face's generate, which calls the whole model with a cache of keys and "
            "values: load ddl.full_state_dict(model) into a whole model, use dp and tp only, or call the model on the "
            "last tokens in a loop, as ignite_ddl.course.generate does"
        )

    def _pass(self, microbatches: list[Any], run: Callable[[int, Any], Any]) -> list[Any]:
        """Passes microbatches through the stages in order: what the last stage returns, on its rank."""
        me, owners, outputs, sent = self._mesh.pp_rank, self._cut.owners, [], []
        for value in microbatches:
            for s in self._stages:
                if s > 0 and owners[s - 1] != me:
                    value = self._receive(owners[s - 1])
                value = run(s, value)
                if s + 1 == len(owners):
                    outputs.append(value)
                elif owners[s + 1] != me:
                    sent += self._send(value, owners[s + 1], self._cut.describe(s))
        for work, _ in sent:
            work.wait()
        return outputs

    def _peer(self, pp_rank: int) -> int:
        return self._mesh.rank_at(**(self._mesh.coordinates(self._mesh.rank) | {"pp": pp_rank}))

    def _send(self, value: Any, pp_rank: int, stage: str) -> list[tuple[dist.Work, torch.Tensor]]:
        tensors, structure = flatten(value, stage)
        header = pickle.dumps((structure, [(t.shape, t.dtype, t.requires_grad) for t in tensors]))
        device = idist.device()
        first = [torch.tensor([len(header)], device=device), torch.frombuffer(bytearray(header), dtype=torch.uint8)]
        parts = [*(part.to(device) for part in first), *(t.detach().contiguous() for t in tensors)]
        return [(dist.isend(t, self._peer(pp_rank), group=self._mesh.pp_group), t) for t in parts]

    def _receive(self, pp_rank: int) -> Any:
        def received(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=idist.device())
            dist.recv(tensor, self._peer(pp_rank), group=self._mesh.pp_group)
            return tensor

        header = received([int(received([1], torch.long))], torch.uint8)
        structure, known = pickle.loads(bytes(header.tolist()))
        return structure.unflatten(
            [received(shape, dtype).requires_grad_(needs_grad) for shape, dtype, needs_grad in known]
        )

    def from_last_stage(self, value: Any) -> Any:
        """Sends a value from the rank with the last stage to its pp peers."""
        box = [value]
        dist.broadcast_object_list(box, src=self._peer(self._cut.owners[-1]), group=self._mesh.pp_group)
        return box[0]

    def step(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        loss_fn: Callable,
        transform: Callable,
        share: Callable,
        weight: float,
        autocast: contextlib.AbstractContextManager,
        on_loss: Callable[[torch.Tensor | None], None],
    ) -> Any:
        """Forward, loss and backward of one batch.

        Args:
            x: this data-parallel rank's rows.
            y: their targets.
            loss_fn: takes transformed outputs and targets of some rows, returns their loss.
            transform: a function of the model's output, applied before ``loss_fn``.
            share: takes the targets of a microbatch and of the batch, returns the weight of the microbatch's loss.
            weight: factor of the loss in the backward pass.
            autocast: the context of forward passes and losses.
            on_loss: called once with the loss of all rows, None on ranks without the last stage, when it is known:
                here at the end of the schedule.

        Returns:
            The transformed output on the rank with the last stage, None elsewhere.
        """

        def part(output: Any, target: Any) -> torch.Tensor:
            return loss_fn(transform(output), target) * (share(target, y) * weight)

        output, loss = self.train_step(x, y, part, autocast)
        on_loss(loss / weight if loss is not None and weight else loss)
        return None if loss is None else transform(output)

    def reduce_loss(self, parts: torch.Tensor) -> dist.Work:
        """Starts to sum ``parts`` over the world; of tp peers, which have the same values, only the first counts."""
        if self._mesh.tp_rank != 0:
            parts.zero_()
        return dist.all_reduce(parts, async_op=True)

    def sum_shared_gradients(self) -> None:
        """Sums the gradients of weights that several stages share, so that the copies stay equal."""
        mine = dict(self.named_parameters())
        for names in self._cut.shared:
            ranks = sorted({self._cut.owners[self._cut.stage_of[name]] for name in names})
            if self._mesh.pp_rank not in ranks:
                continue
            held = [mine[name] for name in names if name in mine]
            if not held[0].requires_grad:
                continue
            for p in held:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                redistribute_gradient(p)
            total = sum(_local(p.grad) for p in held)
            if len(ranks) > 1:
                parts = {r: torch.empty_like(total) for r in ranks} | {self._mesh.pp_rank: total}
                peers = [(self._peer(r), parts[r]) for r in ranks if r != self._mesh.pp_rank]
                operations = [dist.P2POp(dist.isend, total, peer) for peer, _ in peers]
                operations += [dist.P2POp(dist.irecv, part, peer) for peer, part in peers]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
                total = sum(parts[r] for r in ranks)  # in the same order on all ranks: equal to the last bit
            for p in held:
                _local(p.grad).copy_(total)

    def counts(self, name: str) -> bool:
        """Whether a parameter of this rank counts in a norm: not if an earlier stage has it too."""
        return not any(name in names[1:] for names in self._cut.shared)

    def local_stages(self) -> list[nn.Module]:
        """This rank's stages."""
        return list(self._stages.values())

    def plain_module(self) -> nn.Module:
        """The module whose names are those of the uncut model: this one."""
        return self

    def full_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes in the uncut model's state dict."""
        return self._cut.shapes

    def shared_names(self) -> list[list[str]]:
        """Groups of names of one weight that several stages hold."""
        return self._cut.shared

    def gather_stages(self, mine: dict[str, Any]) -> dict[str, Any]:
        """The entries of all stages, in the order of the uncut model's state dict."""
        parts: list[dict] = [{} for _ in range(self._mesh.pp_size)]
        dist.all_gather_object(parts, mine, group=self._mesh.pp_group)
        merged = {name: tensor for part in parts for name, tensor in part.items()}
        return {name: merged[name] for name in self._cut.shapes if name in merged}

    def _is_fresh(self, key: tuple) -> bool:
        """Whether to set up a schedule. That runs the stages, so where FSDP2 gathers, all dp peers have to do it."""
        fresh = key not in self._schedules
        if self._gathers:
            # A last batch may have 32 rows on one dp rank, a known shape, and 31 on another.
            on_any = torch.tensor(float(fresh), device=idist.device())
            dist.all_reduce(on_any, op=dist.ReduceOp.MAX, group=self._mesh.dp_group)
            if on_any and not fresh:
                del self._schedules[key]
            fresh = bool(on_any)
        return fresh

    def _schedule_for(
        self, x: Any, rows: int, key: tuple, fresh: bool, autocast: contextlib.AbstractContextManager
    ) -> tuple[Any, _Loss]:
        """torch's stages and schedules are for one shape: one set for each shape, kept alike on all ranks."""
        for s, was in self._trained.items():
            if any(p.requires_grad for p in self._stages[s].parameters()) != was:
                raise ValueError(
                    f"{self._cut.describe(s)} had {'' if was else 'no '}weights to train when its "
                    "schedule was set up: after freezing or unfreezing a stage, call the model's forget_schedules() on "
                    "every rank"
                )
        if not fresh:
            self._schedules[key] = self._schedules.pop(key)  # moved to the end: used last
            return self._schedules[key]
        n, name = microbatches_for(rows, self._cut.n_microbatches, self._cut.schedule, self._mesh.pp_size)
        for s, stage in self._stages.items():
            check_trains(self._cut, s, stage)
            alone = self._mesh.dp_size > 1 and not isinstance(stage, FSDPModule)
            if alone and any(p.requires_grad for p in stage.parameters()):
                raise ValueError(
                    f"{self._cut.describe(s)} was frozen when the model was cut, so that nothing "
                    "averages its gradients over dp: freeze it after ddl.auto_model"
                )
        self._trained = {s: any(p.requires_grad for p in stage.parameters()) for s, stage in self._stages.items()}
        if len(self._schedules) == _SCHEDULES_KEPT:
            del self._schedules[next(iter(self._schedules))]
        # Here, since importing torch's schedules takes a second.
        from torch.distributed.pipelining import schedules

        from ignite_ddl.pipeline.stage import Stage

        known = SCHEDULES[name]
        interfaces = self._interfaces(rows_of(x, 0, rows // n), autocast)
        stages = [
            Stage(
                module,
                self._cut.describe(s),
                s,
                len(self._cut.owners),
                idist.device(),
                self._mesh.pp_group,
                *interfaces[s],
                autocast,
                known.split_backward,
            )
            for s, module in self._stages.items()
        ]
        loss = _Loss(autocast, interfaces[max(interfaces)][1].structure)
        given = stages if known.stages_per_rank > 1 else stages[0]
        make = getattr(schedules, known.torch_class)
        self._schedules[key] = make(given, n, loss_fn=loss, scale_grads=False), loss
        return self._schedules[key]

    def _interfaces(self, x: Any, autocast: contextlib.AbstractContextManager) -> dict[int, tuple[Any, Any]]:
        """What each stage takes and returns, which torch has to know before it sends: by a microbatch, forward."""
        from ignite_ddl.pipeline.stage import Interface

        found = {}

        def run(s: int, given: Any) -> Any:
            given = tree_map(_leaf, given)
            output = self._stages[s](given)
            if not self._stateless and rows_depend_on_each_other(self._stages[s], given, [self._stages[s]]):
                raise ValueError(ROWS_DEPEND)
            what = self._cut.describe(s)
            found[s] = Interface.of(given, what), Interface.of(output, what)
            if s + 1 == len(self._cut.owners):
                joined([output])  # refuses what has no rows, before anything is computed in vain
            return output

        stages, grown = list(self._stages.values()), []
        with without_trace(stages), torch.enable_grad(), autocast:
            self._pass([x], run)
            if not self._stateless:  # a cache is made in the first pass, a state changes in each
                with state_that_grows(stages, grown):
                    self._pass([x], run)
        if grown:
            raise ValueError(
                f"forward changes {grown[0]!r}, but under pp it runs once for each microbatch, not once for a batch: "
                "keep such state out of forward, use dp and tp only, or pass checks=False to ddl.auto_model if no "
                "number depends on it"
            )
        self._stateless = True
        for stage in self._stages.values():
            reshard(stage)
        return found


def reshard(root: nn.Module) -> None:
    """Frees the unsharded parameters of FSDP2, which otherwise a backward pass frees."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _Loss:
    """The loss of the current batch: torch needs a loss when a schedule is made, but its weights differ by batch.

    torch cuts targets that are one tensor: it gets row numbers.
    """

    def __init__(self, autocast: contextlib.AbstractContextManager, structure: Structure) -> None:
        self.loss_fn: Callable | None = None
        self.y: Any = None
        self.autocast, self.structure = autocast, structure

    def __call__(self, output: tuple[torch.Tensor, ...], rows: torch.Tensor) -> torch.Tensor:
        with self.autocast:
            return self.loss_fn(self.structure.unflatten(output), rows_of(self.y, int(rows[0]), int(rows[-1]) + 1))


def _copies_of_shared_layers(
    layers: list[tuple[str, nn.Module]], earlier: Iterable[nn.Module]
) -> list[tuple[str, nn.Module]]:
    """The layers of a stage, copied if an earlier stage of this rank has them too: FSDP2 shards a module only once.

    The gradients of the copies are summed, as those of any weight that stages share, so the copies stay equal.
    """
    taken = {id(module) for stage in earlier for module in stage.modules()}
    memo: dict = {}  # shared, so that a layer that occurs twice in the stage is copied once
    return [
        (name, copy.deepcopy(layer, memo) if any(id(m) in taken for m in layer.modules()) else layer)
        for name, layer in layers
    ]


def _copied(stage: nn.Module, inputs: tuple) -> tuple:
    """A layer that works in place needs a copy: the stage's input is a leaf, or the output of its neighbour."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, inputs)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, ask: torch.Tensor) -> torch.Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ValueError(
            "a pipeline's output has no gradient, since its schedule runs the backward pass: use "
            "ddl.create_supervised_trainer, or ddl.forward_backward in the update function of a ddl.MeshEngine"
        )


def _without_gradient(leaf: Any) -> Any:
    floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return _NoGradient.apply(leaf, torch.zeros((), requires_grad=True)) if floating else leaf


def _contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf


def _leaf(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Broadcasts dp rank 0's buffers (BatchNorm's running statistics) over dp, as DDP does before a forward pass."""
    if mesh.dp_size == 1:
        return
    buffers = [b for b in module.buffers() if not isinstance(b, DTensor)]
    first = dist.get_global_rank(mesh.dp_group, 0)
    for dtype in dict.fromkeys(b.dtype for b in buffers):  # one message per dtype
        alike = [b for b in buffers if b.dtype == dtype]
        flat = torch.cat([b.detach().reshape(-1) for b in alike])
        dist.broadcast(flat, src=first, group=mesh.dp_group)
        if mesh.dp_rank > 0:
            with torch.no_grad():
                for buffer, values in zip(alike, flat.split([b.numel() for b in alike]), strict=True):
                    buffer.copy_(values.view_as(buffer))
