"""Pipeline parallelism: a model's layers cut into stages, run by one of torch's schedules.

The schedules are ``torch.distributed.pipelining``'s. This file cuts the model, gives every batch a number of
microbatches that divides it, and refuses what a schedule would get wrong before anything is sent.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ignite_ddl.layers import named_layers, put
from ignite_ddl.mesh import Mesh
from ignite_ddl.simulate import stage_owners
from ignite_ddl.tensor import draw_seed, lay_out_gradient, random_stream

__all__ = ["SCHEDULES", "Pipeline", "balance", "microbatches_for"]

# name: torch's class, stages per rank
SCHEDULES: dict[str, tuple[str, int]] = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", 2),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
    "looped_bfs": ("ScheduleLoopedBFS", 2),
    "dualpipev": ("ScheduleDualPipeV", 2),
}
_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
           torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]  # fmt: skip
_V_SHAPED = ("zbv", "dualpipev")  # rank r holds stages r and 2·pp − 1 − r
# These split the backward pass in two; on a stage without trainable weights torch leaves gradients out.
_SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")
_SCHEDULES_KEPT = 16  # of a pipeline, one for each shape of a batch: each holds its stages' receive buffers


def balance(costs: Sequence[float], n_stages: int) -> list[int]:
    """Cuts a row of layers into stages so that the costliest stage is as cheap as can be.

    Of several such cuts it takes the one whose stages are most alike (the least sum of squares).

    Args:
        costs: cost of each layer, in any unit.
        n_stages: number of stages.

    Returns:
        list: how many layers each stage gets, at least one.

    Raises:
        ValueError: if there are more stages than layers or none, or a cost is negative or not finite.

    Examples:
        .. code-block:: python

            from ignite_ddl.pipeline import balance

            assert balance([1, 1, 1, 9], 2) == [3, 1]
            assert balance([9, 1, 1, 1, 1], 3) == [1, 2, 2]
    """
    n = len(costs)
    if n_stages < 1:
        raise ValueError(f"n_stages should be at least 1, but given {n_stages}")
    if not _are_costs(costs):
        raise ValueError(f"costs should be numbers of at least 0, but given {list(costs)}")
    if n_stages > n:
        raise ValueError(
            f"a model of {n} layers cannot be cut into {n_stages} stages; use fewer pp ranks or stages"
        )
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    least, _ = _best_cut(total, n_stages, max)
    _, sizes = _best_cut(
        total, n_stages, lambda before, cost: before + cost**2 if cost <= least else float("inf")
    )
    return sizes


def _are_costs(costs: Sequence[float]) -> bool:
    try:
        return all(0 <= cost < float("inf") for cost in costs)  # nor is it NaN
    except TypeError:
        return False


def _best_cut(
    total: list[float], n_stages: int, add: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least worth that a cut can have, and its sizes; ``add`` takes what was before and a stage's cost."""
    n = len(total) - 1
    # best[k][i]: the least worth of the first i layers as k stages; cut[k][i]: where the last of these begins
    best = [[float("inf")] * (n + 1) for _ in range(n_stages + 1)]
    cut = [[0] * (n + 1) for _ in range(n_stages + 1)]
    best[0][0] = 0.0
    for k in range(1, n_stages + 1):
        for i in range(k, n + 1):
            for j in range(k - 1, i):
                worth = add(best[k - 1][j], total[i] - total[j])
                if worth < best[k][i]:
                    best[k][i], cut[k][i] = worth, j
    sizes, end = [], n
    for k in range(n_stages, 0, -1):
        sizes.append(end - cut[k][end])
        end = cut[k][end]
    return best[n_stages][n], sizes[::-1]


def microbatches_for(rows: int, wanted: int, schedule: str, pp_size: int) -> tuple[int, str]:
    """Into how many equal microbatches a batch is cut, and by which schedule it runs.

    torch's schedules need equal microbatches. A batch that ``wanted`` does not divide (a last batch) takes the
    nearest number that divides it and suits the schedule; where there is none, the rows go as one microbatch
    each through the plain schedule (gpipe, or looped_bfs on several stages a rank), whose gradients are the same.

    Args:
        rows: rows of this rank's batch, at least 1.
        wanted: the number of microbatches asked for.
        schedule: a name of ``SCHEDULES``.
        pp_size: number of pp ranks.

    Returns:
        tuple: number of microbatches, name of the schedule.

    Raises:
        ValueError: if there is no such schedule, ``rows`` or ``wanted`` is less than 1, or a V-shaped schedule
            ("zbv", "dualpipev"), which no plain one can stand in for, cannot do any number that divides the rows.

    Examples:
        .. code-block:: python

            from ignite_ddl.pipeline import microbatches_for

            assert microbatches_for(16, 4, "1f1b", pp_size=2) == (4, "1f1b")
            assert microbatches_for(14, 4, "1f1b", pp_size=2) == (2, "1f1b")
            assert microbatches_for(1, 4, "1f1b", pp_size=2) == (1, "gpipe")
    """
    stage_owners(schedule, pp_size)  # which refuses an unknown schedule
    for name, given in {"rows": rows, "wanted": wanted}.items():
        if given < 1:
            raise ValueError(f"{name} should be at least 1, but given {given}")
    fitting = [m for m in range(1, rows + 1) if rows % m == 0 and _suits(schedule, m, pp_size)]
    if fitting:
        return min(fitting, key=lambda m: (abs(m - wanted), m)), schedule
    plain = "gpipe" if SCHEDULES[schedule][1] == 1 else "looped_bfs"
    if schedule in _V_SHAPED:
        raise ValueError(
            f"a batch of {rows} rows cannot be cut into microbatches for schedule={schedule!r} on pp={pp_size}; "
            "use drop_last=True, another batch_size, or another schedule"
        )
    return min((m for m in range(1, rows + 1) if rows % m == 0), key=lambda m: (abs(m - wanted), m)), plain


def _suits(schedule: str, n_microbatches: int, pp_size: int) -> bool:
    if schedule == "1f1b":
        return n_microbatches >= pp_size
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        return n_microbatches % max(1, n_microbatches // pp_size) == 0
    if schedule == "dualpipev":
        return n_microbatches >= 2 * pp_size
    return True


class Pipeline(nn.Module):
    """This rank's stages of a model, and the schedule that runs them. Made by ``ddl.auto_model``.

    Parameters keep the names that they have in the whole model. Between two stages one tensor travels, of any shape
    and dtype: a layer at a border takes one and returns one, and works in place only if its ``inplace`` says so.
    Targets are one tensor too, cut by rows as the input is.

    A schedule is set up by a batch of its own for each shape of the input, and the last 16 are kept: pads of many
    lengths cost time. It is set up for the stages that have weights to train; whoever freezes or thaws a stage later
    calls :meth:`forget_schedules` on every rank, or is refused.

    "interleaved_zero_bubble", "zbv" and "dualpipev" take the gradients of a weight apart from those of the stage's
    input. They refuse a stage without trainable weights, and fail on a weight that is used both on the way of the
    stage's input and beside it, such as ``w`` in ``tanh(linear(x * w)) + w``: take another schedule for those.

    Args:
        model: the whole model: an ``nn.Sequential``, or one that names its layers in ``pipeline_layers``.
        mesh: the mesh; its pp axis has more than one rank.
        schedule: a name of ``SCHEDULES``.
        n_microbatches: how many microbatches a batch is cut into; default the number of stages.
        split: number of layers of each stage; default balanced by ``costs``.
        costs: what each layer costs, in any unit, such as of ``ddl.layer_costs``; default its number of parameters.

    Raises:
        ValueError: if the model does not say what its layers are, has fewer layers than stages, or has a stage
            that the schedule would get wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        schedule: str = "1f1b",
        n_microbatches: int | None = None,
        split: Sequence[int] | None = None,
        costs: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        layers = named_layers(model)
        # The names of these may be those of layers too: see _hold and get_submodule.
        self.mesh = mesh
        self.schedule = schedule
        self.owners = stage_owners(schedule, mesh.pp_size)
        if n_microbatches is not None and (
            isinstance(n_microbatches, bool) or not isinstance(n_microbatches, int) or n_microbatches < 1
        ):
            raise ValueError(f"n_microbatches should be a positive integer, but given {n_microbatches!r}")
        self.n_microbatches = n_microbatches or len(self.owners)
        if not _suits(schedule, self.n_microbatches, mesh.pp_size):
            least = len(self.owners) if schedule == "dualpipev" else mesh.pp_size
            raise ValueError(
                f"n_microbatches={self.n_microbatches} does not suit schedule={schedule!r} on pp={mesh.pp_size}; "
                f"use a multiple of {least}"
            )
        if costs is None:
            costs = [1.0 + sum(p.numel() for p in layer.parameters()) for _, layer in layers]
        elif not hasattr(costs, "__len__") or len(costs) != len(layers) or not _are_costs(costs):
            raise ValueError(
                f"costs should hold a number of at least 0 for each of {len(layers)} layers, but given {costs!r}"
            )
        try:
            sizes = balance(costs, len(self.owners)) if split is None else [operator.index(n) for n in split]
        except TypeError:  # not whole numbers, or no numbers
            sizes = []
        if len(sizes) != len(self.owners) or sum(sizes) != len(layers) or min(sizes) < 1:
            raise ValueError(
                f"split should name the layers of each of {len(self.owners)} stages, at least one each, "
                f"{len(layers)} in all, but given {split!r}"
            )
        self.split = sizes
        stages, start = [], 0
        self._layers: list[list[str]] = []  # names, by stage
        for size in self.split:
            own = layers[start : start + size]
            self._layers.append([name for name, _ in own])
            stages.append(_in_a_row(own))
            if start and any(getattr(module, "inplace", False) for module in stages[-1].modules()):
                stages[-1].register_forward_pre_hook(_copied)
            if schedule in _SPLIT_BACKWARD:
                stages[-1].register_forward_hook(_no_view)
            start += size
        self._refuse_bare_stages(dict(enumerate(stages)))
        self.shared = _shared_between(stages)
        self.stage_of = {name: s for s, stage in enumerate(stages) for name, _ in stage.named_parameters()}
        self.shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}  # of the whole model
        self.local = {s: stage for s, stage in enumerate(stages) if self.owners[s] == mesh.pp_rank}
        for s, stage in self.local.items():
            for name in self._layers[s]:
                self._hold(name, stage.get_submodule(name))
        self._no_weights = [nn.Parameter(torch.empty(0), requires_grad=False)]  # in a list: not registered
        self._schedules: dict[tuple, tuple[Any, _Loss]] = {}  # by shape and dtype of a batch
        self._trained: dict[int, bool] = {}  # whether a stage had weights to train when they were made

    def _hold(self, name: str, layer: nn.Module) -> None:
        """As ``add_module``, which refuses a name that this class has an attribute of, say "split" or "mesh"."""
        first, _, rest = name.partition(".")
        if rest:
            put(self._modules.setdefault(first, nn.ModuleDict()), rest, layer)
        else:
            self._modules[first] = layer

    def get_submodule(self, target: str) -> nn.Module:
        """As any module's; a layer whose name is an attribute here is found too."""
        first, _, rest = target.partition(".")
        if first not in self._modules:
            return super().get_submodule(target)
        return self._modules[first].get_submodule(rest)

    def _refuse_bare_stages(self, stages: dict[int, nn.Module]) -> None:
        if self.schedule not in _SPLIT_BACKWARD:
            return
        for index, stage in stages.items():
            if not any(p.requires_grad for p in stage.parameters()):
                raise ValueError(
                    f"schedule={self.schedule!r} cannot run stage {index} ({', '.join(self._layers[index])}): "
                    "it has no trainable parameter, and gradients would be lost; use '1f1b' or 'interleaved_1f1b', "
                    "or another split"
                )

    def copy_shared_layers(self) -> None:
        """Gives each of this rank's stages its own copy of a layer that they share: FSDP2 takes a module once.

        Their gradients are added up, as those of any weight that stages share, so the copies stay the same.
        """
        seen: set[int] = set()
        for s, stage in self.local.items():
            memo: dict = {}  # one for the stage: what it has twice stays one
            for name in self._layers[s]:
                layer = stage.get_submodule(name)
                if any(id(module) in seen for module in layer.modules()):
                    layer = copy.deepcopy(layer, memo)
                    put(stage, name, layer)
                    self._hold(name, layer)
            seen |= {id(module) for module in stage.modules()}

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of this rank's stages; of stages without any, an empty one, since optimizers refuse no parameters."""
        mine = list(super().parameters(recurse))
        return iter(mine or self._no_weights)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, where outputs and losses arise."""
        return self.owners[-1] == self.mesh.pp_rank

    def train_step(
        self, x: torch.Tensor, y: torch.Tensor, loss_fn: Callable[[Any, Any], torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """One batch forward and backward through the schedule; gradients add up as after ``loss.backward()``.

        Args:
            x: this data-parallel rank's rows, the same on each of its pp ranks.
            y: their targets, a row for each.
            loss_fn: takes a microbatch's output and targets and returns its part of what is differentiated: the
                parts are added.

        Returns:
            tuple: the output for all rows and the sum of the microbatches' losses, on the rank that holds the
            last stage; (None, None) on the others.

        Raises:
            ValueError: if ``x`` or ``y`` is not a tensor, they have different numbers of rows or none, or a
                stage was frozen or thawed since the first step (see :meth:`forget_schedules`).
        """
        _check_is_tensor("x", x)
        _check_is_tensor("y", y)
        if not x.ndim or not y.ndim or len(x) != len(y) or not len(x):
            raise ValueError(
                f"x and y should have a row for each sample, but have shapes {tuple(x.shape)} and {tuple(y.shape)}"
            )
        fresh = _kind(x) not in self._schedules
        schedule, losing = self._schedule_for(x)
        for stage in self.local.values():
            share_buffers(stage, self.mesh)
        losing.loss_fn = loss_fn
        losses: list[torch.Tensor] | None = [] if self.is_last else None
        # A schedule's first step probes its stages with real passes and clears gradients: keep those that the
        # iterations before (gradient accumulation) have left.
        kept = [(p, p.grad) for p in self.parameters() if p.grad is not None] if fresh else []
        for parameter, _ in kept:
            parameter.grad = None
        # All ranks take one number from their common stream, however much their stages draw: it stays common.
        with random_stream(draw_seed()), self._explained():
            output = schedule.step(
                *((x,) if 0 in self.local else ()), target=y if self.is_last else None, losses=losses
            )
        for parameter, grad in kept:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return (output, torch.stack(losses).sum().detach()) if self.is_last else (None, None)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.schedule in _SPLIT_BACKWARD and "backward through the graph a second time" in str(error):
                raise RuntimeError(
                    f"schedule={self.schedule!r} takes the gradients of weights apart from those of a stage's input, "
                    "and torch cannot do that here: a stage of this rank uses some weight both on the way of its "
                    "input and beside it, as w in tanh(linear(x * w)) + w; use '1f1b' or 'interleaved_1f1b'"
                ) from error
            raise

    def forget_schedules(self) -> None:
        """Lets the next step set up its schedule anew: call it on every rank after freezing or thawing a stage.

        The pipeline's own ``requires_grad_`` does. A stage that was frozen whole when ``ddl.auto_model`` cut the
        model stays so where the mesh has a dp axis: nothing averages its gradients.
        """
        self._schedules.clear()
        self._trained = {}

    def requires_grad_(self, requires_grad: bool = True) -> Pipeline:
        """As any module's, on every rank; what schedules were set up for is forgotten."""
        self.forget_schedules()
        return super().requires_grad_(requires_grad)

    def forward_only(self, x: torch.Tensor) -> torch.Tensor | None:
        """The output for all rows where the last stage is, None elsewhere; without gradients.

        torch's schedules run their backward plan in evaluation too (zbv fails there), so this goes stage by
        stage, microbatch by microbatch.
        """
        _check_is_tensor("x", x)
        me, outputs, sent = self.mesh.pp_rank, [], []
        for stage in self.local.values():
            share_buffers(stage, self.mesh)
        with torch.no_grad():
            for hidden in x.tensor_split(min(self.n_microbatches, max(1, len(x)))):
                for s, stage in self.local.items():
                    if s > 0 and self.owners[s - 1] != me:
                        hidden = self._receive(self.owners[s - 1])
                    hidden = stage(hidden)
                    if s + 1 == len(self.owners):
                        outputs.append(hidden)
                    elif self.owners[s + 1] != me:
                        sent += self._send(hidden, self.owners[s + 1])
            for work, _ in sent:
                work.wait()
        for stage in self.local.values():
            reshard(stage)
        return torch.cat(outputs) if outputs else None

    def forward(self, x: torch.Tensor) -> Any:
        """The output for all rows, on every pp rank, without gradients."""
        return self.from_last_stage(self.forward_only(x))

    def _peer(self, pp_rank: int) -> int:
        return self.mesh.rank_at(**(self.mesh.coordinates(self.mesh.rank) | {"pp": pp_rank}))

    def _send(self, tensor: torch.Tensor, pp_rank: int) -> list[tuple[dist.Work, torch.Tensor]]:
        header = torch.zeros(10, dtype=torch.long, device=tensor.device)
        header[: tensor.ndim + 2] = torch.tensor([_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape])
        tensors = [header, tensor.contiguous()]
        return [(dist.isend(t, self._peer(pp_rank), group=self.mesh.pp_group), t) for t in tensors]

    def _receive(self, pp_rank: int) -> torch.Tensor:
        header = torch.zeros(10, dtype=torch.long, device=idist.device())
        dist.recv(header, self._peer(pp_rank), group=self.mesh.pp_group)
        dtype, ndim, *shape = header.tolist()
        tensor = torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=idist.device())
        dist.recv(tensor, self._peer(pp_rank), group=self.mesh.pp_group)
        return tensor

    def from_last_stage(self, value: Any) -> Any:
        """What the rank with the last stage holds, on each of its pp peers."""
        box = [value]
        dist.broadcast_object_list(box, src=self._peer(self.owners[-1]), group=self.mesh.pp_group)
        return box[0]

    def sum_shared_gradients(self) -> None:
        """Adds up the gradients of weights that several stages share, so that the copies stay the same."""
        mine = dict(self.named_parameters())
        for names in self.shared:
            ranks = sorted({self.owners[self.stage_of[name]] for name in names})
            if self.mesh.pp_rank not in ranks:
                continue
            held = [mine[name] for name in names if name in mine]
            if not held[0].requires_grad:
                continue
            for p in held:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                lay_out_gradient(p)
            total = sum(_local(p.grad) for p in held)
            if len(ranks) > 1:
                parts = {r: torch.empty_like(total) for r in ranks} | {self.mesh.pp_rank: total}
                peers = [(self._peer(r), parts[r]) for r in ranks if r != self.mesh.pp_rank]
                operations = [dist.P2POp(dist.isend, total, peer) for peer, _ in peers]
                operations += [dist.P2POp(dist.irecv, part, peer) for peer, part in peers]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
                total = sum(parts[r] for r in ranks)  # in one order on all of them: equal to the last bit
            for p in held:
                _local(p.grad).copy_(total)

    def counted_here(self) -> set[str]:
        """The parameters of this rank, without those whose first copy is another stage's: for norms."""
        later = {name for names in self.shared for name in names[1:]}
        return {name for name, _ in self.named_parameters()} - later

    def _schedule_for(self, x: torch.Tensor) -> tuple[Any, _Loss]:
        """torch's stages and schedules serve one shape: one set for each, of which all ranks keep the same few."""
        for s, was in self._trained.items():
            if any(p.requires_grad for p in self.local[s].parameters()) != was:
                raise ValueError(
                    f"stage {s} ({', '.join(self._layers[s])}) had {'' if was else 'no '}weights to train when its "
                    "schedule was set up: after freezing or thawing a stage, call forget_schedules() of the model on "
                    "every rank"
                )
        kind_ = _kind(x)
        if kind_ in self._schedules:
            self._schedules[kind_] = self._schedules.pop(kind_)  # now the last that was used
        else:
            n, name = microbatches_for(len(x), self.n_microbatches, self.schedule, self.mesh.pp_size)
            self._refuse_bare_stages(self.local)
            for s, stage in self.local.items():
                alone = self.mesh.dp_size > 1 and not isinstance(stage, FSDPModule)
                if alone and any(p.requires_grad for p in stage.parameters()):
                    raise ValueError(
                        f"stage {s} ({', '.join(self._layers[s])}) was frozen when the model was cut, so that nothing "
                        "averages its gradients over dp: leave one weight trainable until then"
                    )
            self._trained = {
                s: any(p.requires_grad for p in stage.parameters()) for s, stage in self.local.items()
            }
            if len(self._schedules) == _SCHEDULES_KEPT:
                del self._schedules[next(iter(self._schedules))]
            from ignite_ddl.stage import Stage, schedules  # here: torch's engine takes a second to import

            stages = [
                Stage(module, s, len(self.owners), idist.device(), group=self.mesh.pp_group)
                for s, module in self.local.items()
            ]
            losing = _Loss()
            kind, per_rank = SCHEDULES[name]
            make = getattr(schedules, kind)
            schedule = make(stages if per_rank > 1 else stages[0], n, loss_fn=losing, scale_grads=False)
            self._schedules[kind_] = schedule, losing
        return self._schedules[kind_]


class _Row(nn.Module):
    """Layers one after the other, each under its name in the whole model, dots and all."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._order = [name for name, _ in layers]
        for name, layer in layers:
            put(self, name, layer)

    def forward(self, x: Any) -> Any:
        for name in self._order:
            x = self.get_submodule(name)(x)
        return x


def _in_a_row(layers: Sequence[tuple[str, nn.Module]]) -> nn.Module:
    if any("." in name for name, _ in layers):
        return _Row(layers)
    return nn.Sequential(OrderedDict(layers))


def reshard(root: nn.Module) -> None:
    """Frees the working copies of FSDP2 where no backward pass will."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _Loss:
    """The loss of the batch that is running: torch wants it when a schedule is made, the weights change later."""

    loss_fn: Callable | None = None

    def __call__(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        return self.loss_fn(output, target)


def _check_is_tensor(name: str, given: Any) -> None:
    if not isinstance(given, torch.Tensor):
        raise ValueError(
            f"{name} should be one tensor where the mesh has a pp axis, but given a {type(given).__name__}: it is cut "
            "into microbatches; put a mask or the like into the first layer"
        )


def _kind(x: torch.Tensor) -> tuple:
    return tuple(x.shape), x.dtype


def _copied(stage: nn.Module, inputs: tuple) -> tuple:
    """What a stage receives is a leaf, or its neighbour's own output: a layer that works in place needs a copy."""
    return tuple(x.clone() for x in inputs)


def _no_view(stage: nn.Module, inputs: Any, output: Any) -> Any:
    """A Linear's output on 3-D input is a view, which torch's split backward pass cannot detach in place."""
    if not isinstance(output, torch.Tensor) or not output._is_view():
        return output
    return output.clone(memory_format=torch.contiguous_format)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shared_between(stages: list[nn.Module]) -> list[list[str]]:
    owners: dict[int, list[str]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            owners.setdefault(id(parameter), []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def share_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Gives dp rank 0's buffers, say BatchNorm's running statistics, to the dp axis, as DDP does before a forward."""
    if mesh.dp_size == 1:
        return
    buffers = [b for b in module.buffers() if not isinstance(b, DTensor)]
    first = dist.get_global_rank(mesh.dp_group, 0)
    for dtype in dict.fromkeys(b.dtype for b in buffers):  # one message for each
        alike = [b for b in buffers if b.dtype == dtype]
        flat = torch.cat([b.detach().reshape(-1) for b in alike])
        dist.broadcast(flat, src=first, group=mesh.dp_group)
        if mesh.dp_rank > 0:
            with torch.no_grad():
                for buffer, values in zip(alike, flat.split([b.numel() for b in alike]), strict=True):
                    buffer.copy_(values.view_as(buffer))
