"""Compares a model on a mesh with the same model in one process, and finds the first number that differs.

As a command, ``python -m ignite_ddl.lab.parity module:factory --dp 2 --tp 2``: ``factory()`` returns the first four
arguments of :func:`check_parity`, ``(model, plan, batch, loss_fn)``, or a dict of its arguments by name. The exit
code is 0 if all numbers are equal, 1 if a number differs or the loss does not move, 2 if the model or an argument is
refused, 3 if a run fails.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import logging
import math
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, create_supervised_trainer as create_plain_trainer
from torch import nn
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.optim import SGD
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

import ignite_ddl.arguments as fits
from ignite_ddl.arguments import AMOUNT, FLAG, FUNCTION, MAPPING, MODULE, SECONDS, WORLD, or_none, shown, takes
from ignite_ddl.checks.rows_alone import rows_may_depend
from ignite_ddl.clipping import MAX_NORM
from ignite_ddl.data import auto_dataloader
from ignite_ddl.divisor import divisor_of
from ignite_ddl.experts.balance import router_loss_weight
from ignite_ddl.experts.routing import routers_of, update_biases
from ignite_ddl.launch import Parallel, RankError, pickling
from ignite_ddl.launch.parallel import _pack_function
from ignite_ddl.lazy import LazyLayers, replace_module
from ignite_ddl.mesh import DP_AXES, get_mesh, sizes_without_world
from ignite_ddl.model import FITS, auto_model, auto_optim, check_model, warn_without_plan
from ignite_ddl.pipeline.schedules import SCHEDULES, microbatches_for
from ignite_ddl.state import full_tensor
from ignite_ddl.structure import n_rows
from ignite_ddl.supervised import create_supervised_trainer

__all__ = ["Number", "ParityReport", "Step", "check_parity"]

KINDS = ("loss", "norm", "gradient", "weight")  # in the order in which a step makes them
DEAD = 1e-14  # relative size of what rounding leaves of a gradient that should be zero


class Number(NamedTuple):
    """A tensor on one rank, compared with that of one process.

    Attributes:
        error: the largest difference, relative to the largest number of this kind in this step.
        name: the parameter's name; "loss"; or "norm" for the norm of all gradients before clipping.
        rank: the global rank; -1 for a weight that no rank has.
        kind: "loss", "norm", "gradient" or "weight".
        step: from 1.
        factor: f, where the full tensor is f times that of one process; else None.
    """

    error: float
    name: str
    rank: int
    kind: str
    step: int
    factor: float | None = None

    def __str__(self) -> str:
        what = self.kind if self.kind == self.name else f"{self.kind} of {self.name!r}"
        return f"the {what} in step {self.step}"


class Step(NamedTuple):
    """One step in the report.

    Attributes:
        rows: number of rows of the global batch.
        loss: the loss in one process.
        loss_error: the largest error of a rank's loss, as in :class:`Number`.
        gradient_error: the largest error of a gradient; NaN if the optimizer does not step.
    """

    rows: int
    loss: float
    loss_error: float
    gradient_error: float


@dataclass
class ParityReport:
    """The result of :func:`check_parity`; ``print`` it.

    Attributes:
        equal: whether every number is that of one process, and the training moves the loss.
        worst: the :class:`Number` with the largest error: ``worst.error``, ``worst.name``, ``worst.rank``.
        first: the first :class:`Number` that differs, or None. The order: the loss of step 1, its gradients in the
            model's order, the next step, and last the weights.
        steps: a :class:`Step` for each step.
        dead: names of weights whose gradients are zero in every step of one process, or at most ``atol`` of the
            largest, so that agreement says nothing about them. It ends with "loss" if all gradients are zero, or
            ``lr`` moves no weight, so that training does not move the loss.
        text: the report in words, with what a difference usually means.
    """

    equal: bool
    worst: Number
    first: Number | None
    steps: list[Step]
    dead: list[str]
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


@takes(
    FITS, model=MODULE | FUNCTION, plan=or_none(FITS["tensor_plan"]), loss_fn=FUNCTION, steps=WORLD,
    **dict.fromkeys(("shard", "reshard_after_forward", "offload"), FLAG),
    lr=fits.POSITIVE, max_norm=MAX_NORM, atol=AMOUNT, timeout=SECONDS, smaller=MAPPING, trainer=MAPPING,
)  # fmt: skip
def check_parity(
    model: nn.Module | Callable[..., nn.Module],
    plan: Mapping[str, ParallelStyle] | None,
    batch: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    dp: int | None = None,
    pp: int = 1,
    tp: int = 1,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    cp: int = 1,
    ep: int = 1,
    schedule: str = "1f1b",
    n_microbatches: int | None = None,
    split: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    shard: bool | None = None,
    reshard_after_forward: bool | None = None,
    offload: bool = False,
    steps: int = 3,
    lr: float | None = None,
    max_norm: float | None = None,
    atol: float = 1e-10,
    timeout: float = 120,
    smaller: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> ParityReport:
    """Trains a model on a mesh and in one process, and names the first number that differs.

    Both run the same few steps of SGD in float64: this process with Ignite's own trainer, and the mesh's ranks (gloo,
    one thread each) with ``ddl.create_supervised_trainer`` on the loader of ``ddl.auto_dataloader``. Every second step
    has fewer rows, if possible a number that dp does not divide. The loss of each step, every gradient as the optimizer
    gets it, and the weights after the last step are compared as full tensors.

    Dropout and BatchNorm's batch statistics, which parity does not cover, are off on both sides, and the report says
    so. BatchNorm uses its running statistics; without these it stays as it is, and differs if a rank or a microbatch
    has only a part of the rows. Casts to float32 become casts to float64. Other random numbers are not made equal.

    Args:
        model: the model, which is not changed, or a function that makes it; layers may be ``ddl.lazy``.
        plan: the tensor plan, as in ``ddl.auto_model``, or None.
        batch: the global batch, ``(x, y)`` or what the trainer's ``prepare_batch`` takes: tensors in tuples, lists
            and dicts, with a row for each sample.
        loss_fn: a function from the output and the targets of some rows to their mean loss.
        dp: size of the mesh's data-parallel axis. Default: dp_replicate × dp_shard.
        pp: number of pipeline ranks. Default: 1.
        tp: number of ranks that share each layer. Default: 1.
        dp_replicate: as in ``ddl.Parallel``. Default: 1, or what dp_shard leaves of dp.
        dp_shard: as in ``ddl.Parallel``. Default: 1, or what dp_replicate leaves of dp.
        cp: number of ranks that share each sequence; tensors count tokens in dim 1 then. Default: 1.
        ep: number of ranks of dp × cp that share experts. Default: 1.
        schedule: as in ``ddl.auto_model``, like the next four arguments. Default: "1f1b".
        n_microbatches: microbatches per batch. Default: the number of stages.
        split: layers per stage. Default: balanced by ``costs``.
        costs: what each layer costs, in any unit. Default: its number of parameters.
        shard: as in ``ddl.auto_model``, like the next two arguments. Default: whether dp_shard is more than 1.
        reshard_after_forward: whether full weights are freed between the passes. Default: True, under pp False.
        offload: whether sharded weights are in the CPU's memory. Default: False.
        steps: number of steps. Default: 3.
        lr: the learning rate. Default: the first step changes the weights by 1 % of their norm.
        max_norm: clips the gradients by their global norm. Default: no clipping.
        atol: the largest error that counts as equal, relative to the largest number of its kind. Default: 1e-10.
        timeout: seconds that the ranks may take. Default: 120.
        smaller: keyword arguments for the function ``model``, such as ``{"n_layers": 2}``, that make a model which one
            process can hold.
        trainer: further arguments for both trainers, such as ``prepare_batch`` or ``model_transform``. Not
            ``output_transform``: what is compared is the loss itself.

    Returns:
        ParityReport: print it; ``report.equal`` is for an ``assert``.

    Raises:
        ValueError: if an argument is invalid, a number of one process is not finite, or ``ignite_ddl`` refuses the
            model, plan or batch on this mesh, with its message.
        RankError: if a rank fails in another way.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
            plan = {"0": ddl.Column(), "2": ddl.Row()}
            batch = torch.randn(8, 4), torch.randn(8, 2)
            loss_fn = torch.nn.functional.mse_loss
            report = ddl.check_parity(layers, plan, batch, loss_fn, tp=2)
            assert report.equal and report.worst.error < 1e-14

            class Centred(torch.nn.Module):                             # a row's output depends on the other rows
                def forward(self, x):
                    return x - x.mean(0)

            report = ddl.check_parity(torch.nn.Sequential(layers, Centred()), None, batch, loss_fn, dp=2)
            assert not report.equal and report.first.name == "loss"
            print(report)
    """
    sizes = sizes_without_world(dp, pp, tp, dp_replicate, dp_shard, cp)
    mesh = {name: sizes[name] for name in ("dp", "pp", "cp", "tp", *DP_AXES) if name in sizes}
    mesh |= {"ep": ep} if ep > 1 else {}
    if smaller and isinstance(model, nn.Module):
        raise ValueError(f"smaller is for a function that makes the model, but given a {type(model).__name__}")
    cut = {"schedule": schedule, "n_microbatches": n_microbatches, "split": split, "costs": costs}
    shard = {"shard": shard, "reshard_after_forward": reshard_after_forward, "offload": offload}
    if trainer:
        _check_trainer(trainer)
    batch = _as_doubles(batch)
    warn_without_plan(plan, tp, stacklevel=4)
    plan = {} if plan is None else plan  # which neither check_model nor the ranks warn of again
    job = _Job(model, plan, batch, loss_fn, mesh, cut, shard, steps, max_norm, smaller or {}, trainer or {})
    packed = _pack_function(_on_a_rank, (job, ""), {})
    _, (alone, _), _ = pickling.loads_apart(packed)  # the ranks get it as it is now
    with tempfile.TemporaryDirectory(prefix="ignite_ddl_parity_", ignore_cleanup_errors=True) as folder:
        reference = _in_one_process(alone, lr, atol)
        job.rows = alone.rows
        torch.save(reference, Path(folder) / "reference.pt")
        parallel = Parallel("gloo", sizes["dp"] * pp * cp * tp, **mesh, timeout=timeout, threads_per_rank=1)
        try:
            found = parallel.run(_on_a_rank, job, folder)
        except RankError as error:
            files = re.findall(r'File "([^"]+)", line', error.traceback)  # the last one raised it
            from_package = files and Path(files[-1]).is_relative_to(Path(__file__).parents[1])
            if from_package and isinstance(error.exception, ValueError):
                raise error.exception from None
            raise
    report = _report(job, reference, [Number(*values) for numbers, _ in found for values in numbers], atol)
    refusals = [refusal for _, refusal in found if refusal]
    if report.first is None and refusals:  # else the report says the same, and where it begins
        raise ValueError(refusals[0])
    return report


def _check_trainer(trainer: Mapping[str, Any]) -> None:
    own = {"model", "optimizer", "loss_fn", "device", "output_transform", "max_norm"}  # which check_parity sets
    others = [name for name in inspect.signature(create_supervised_trainer).parameters if name not in own]
    for name in trainer:
        if name not in others:
            also = ": give it to check_parity itself" if name == "max_norm" else ""
            raise ValueError(f"trainer should hold some of {', '.join(others)}, but given {name!r}{also}")


def _as_doubles(batch: Any) -> Any:
    """A copy of the batch in float64 on the CPU; raises a ValueError unless its tensors have a row for each sample."""
    leaves = tree_leaves(batch)
    if not all(isinstance(t, torch.Tensor) and t.ndim for t in leaves) or len({len(t) for t in leaves}) != 1:
        shapes = shown(tree_map(lambda t: tuple(t.shape) if isinstance(t, torch.Tensor) else t, batch))
        raise ValueError(f"batch should hold tensors with a row for each sample, but given {shapes}")
    return tree_map(lambda t: _in_double(t.detach().cpu()), batch)


def _in_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_DOUBLES.get(tensor.dtype, tensor.dtype))


def _part_in_double(part: Any) -> Any:
    """A loss, a transform, or what it is made of (a module, functools.partial, tensors), in float64: a copy."""
    if isinstance(part, torch.Tensor):
        return _in_double(part)
    if isinstance(part, nn.Module):
        return copy.deepcopy(part)._apply(_in_double)
    if isinstance(part, functools.partial):
        function, args, kwargs = tree_map(_part_in_double, (part.func, part.args, part.keywords))
        return functools.partial(function, *args, **kwargs)
    return part


@dataclass
class _Job:
    """What is trained, and how: the same in one process and on the ranks."""

    model: Any
    plan: Mapping[str, ParallelStyle]
    batch: Any
    loss_fn: Callable
    mesh: dict[str, int]
    cut: dict[str, Any]
    shard: dict[str, Any]
    steps: int
    max_norm: float | None
    smaller: Mapping[str, Any]
    trainer: Mapping[str, Any]
    rows: tuple[int, ...] = ()  # of the global batches, in turn
    loops: bool = False  # whether experts that would not run in float64 were changed
    refusal: str = ""  # of the end of the run

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        made = self.model if isinstance(self.model, nn.Module) else self.model(**self.smaller)
        with contextlib.suppress(Exception):  # a function may return a model that it has returned before
            made = copy.deepcopy(made)
        self.loops = _loop_over_experts(made)
        made._apply(_in_double)
        self.loss_fn = _part_in_double(self.loss_fn)
        self.trainer = {name: _part_in_double(value) for name, value in self.trainer.items()}
        return made

    def samples(self) -> list[Any]:
        """The rows of the batch, then its first rows again, for a smaller batch."""
        return [tree_map(lambda t, i=i: t[i], self.batch) for n in self.rows for i in range(n)]

    def train(self, model: nn.Module, trainer: Engine, loader: Any, optimizer: Any, record: Callable) -> None:
        """Runs the steps and gives each number to ``record(step, kind, name, tensor)``."""
        state = trainer.state

        def record_gradients(*_: Any) -> None:
            for name, parameter in _named(model):
                if parameter.requires_grad:
                    grad = parameter.grad
                    grad = torch.zeros_like(parameter) if grad is None else grad
                    record(state.iteration, "gradient", name, _as_real(full_tensor(grad, parameter)))

        def record_loss(_: Engine) -> None:
            record(state.iteration, "loss", "loss", torch.tensor(state.output))
            if hasattr(state, "grad_norm"):
                record(state.iteration, "norm", "norm", torch.tensor(state.grad_norm))
            if state.iteration == self.steps:
                trainer.terminate()

        optimizer.register_step_pre_hook(record_gradients)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, record_loss)
        try:
            trainer.run(loader, max_epochs=self.steps)
        except ValueError as error:
            if not trainer.should_terminate:  # what the end of a run finds is compared here, and named with its rank
                raise
            self.refusal = str(error)
        for name, parameter in _named(model):
            record(self.steps, "weight", name, _as_real(full_tensor(parameter)))


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All parameters, a tied one under each of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return [(name.removeprefix("module."), parameter) for name, parameter in named]


_LOOPED = "transformers' experts ran one after another (experts_implementation='eager'): grouped_mm has no float64"


def _loop_over_experts(model: nn.Module) -> bool:
    """Lets transformers' models compute experts by a loop; whether there are any that did not."""
    found = [m for m in model.modules() if getattr(getattr(m, "config", None), "_experts_implementation", None)]
    found = [m for m in found if m.config._experts_implementation != "eager"]
    copies = {id(module.config): copy.copy(module.config) for module in found}  # the user may have given it to others
    for module in found:
        module.config = copies[id(module.config)]
        module.config._experts_implementation = "eager"
    return bool(found)


class _Comparable(TorchFunctionMode):
    """Inside, torch computes in float64, without dropout, and with BatchNorm's running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = [_double(v) for v in args], {name: _double(v) for name, v in (kwargs or {}).items()}
        func = _CASTS.get(func, func)
        if func in _DROPOUTS and kwargs.get("training", True):
            kwargs["training"] = False
            if kwargs.get("p", 0.5):
                self.notes.add("dropout was off")
        elif func is F.batch_norm and kwargs.get("training"):
            kwargs["training"] = args[1] is None
            alone = "has no running statistics: its output depends on the rows that a rank has"
            self.notes.add(f"BatchNorm {'took its running statistics, as in eval()' if args[1] is not None else alone}")
        elif func in _TORCHS_DROPOUTS:
            args, kwargs = [], dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
            if kwargs["train"] and kwargs["p"]:
                self.notes.add("dropout was off")
            kwargs["train"] = False
        elif func in _RECURRENT:
            place = next(place for place, value in enumerate(args) if isinstance(value, float))  # only dropout is one
            if args[place]:
                self.notes.add("dropout was off")
            args[place] = 0.0
        elif func in _DROPOUT_AT:
            place = _DROPOUT_AT[func]
            if kwargs.pop("dropout_p", 0.0) or (len(args) > place and args[place]):
                self.notes.add("dropout was off")
            args[place : place + 1] = [0.0] * (len(args) > place)
        return func(*args, **kwargs)


_DOUBLES = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
_DOUBLES |= dict.fromkeys((torch.complex64, torch.complex32), torch.complex128)
_CASTS = dict.fromkeys((torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16), torch.Tensor.double)
_CASTS |= dict.fromkeys((torch.Tensor.cfloat, torch.Tensor.chalf), torch.Tensor.cdouble)
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_TORCHS_DROPOUTS = (
    torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_, torch.alpha_dropout,
    torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_, torch.native_dropout,
)  # fmt: skip
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
# The position of their argument dropout_p.
_DROPOUT_AT = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


def _double(value: Any) -> Any:
    return _DOUBLES.get(value, value) if isinstance(value, torch.dtype) else value


@contextlib.contextmanager
def _comparable() -> Iterator[_Comparable]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]), _Comparable() as mode:
            yield mode
    finally:
        torch.set_default_dtype(default)


# --------------------------------------------------------------------------------------- one process, and a rank


def _in_one_process(job: _Job, lr: float | None, atol: float) -> dict[str, Any]:
    """The numbers of one process by (step, kind, name), and what the ranks and the report need besides."""
    values: dict[tuple[int, str, str], torch.Tensor] = {}
    sizes: dict[tuple[int, str], float] = {}

    def record(step: int, kind: str, name: str, value: torch.Tensor) -> None:
        if not value.isfinite().all():
            number = Number(math.inf, name, 0, kind, step)
            raise ValueError(
                f"{number} should be finite, but in one process is not: use a smaller lr, or another batch"
            )
        values[step, kind, name] = value
        sizes[step, kind] = max(sizes.get((step, kind), 0.0), _largest(value))

    with _comparable() as mode, contextlib.ExitStack() as of_routers:
        model = job.make_model()
        job.rows = _rows(job, model)
        for lazy in LazyLayers(model).lazies:
            replace_module(model, lazy, lazy.build())
        trainer, optimizer = _plain_trainer(job, model, lr, of_routers)
        job.train(model, trainer, DataLoader(job.samples(), batch_size=job.rows[0]), optimizer, record)
    lr = optimizer.param_groups[0]["lr"]
    return {"values": values, "sizes": sizes, "lr": lr, "dead": _dead_weights(model, values, sizes, lr, atol),
            "notes": sorted(mode.notes | ({_LOOPED} if job.loops else set()))}  # fmt: skip


def _plain_trainer(
    job: _Job, model: nn.Module, lr: float | None, of_routers: contextlib.ExitStack
) -> tuple[Engine, SGD]:
    """Ignite's own trainer and its optimizer, which do in one process what the mesh does."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("model should have weights to train, but has none")
    n, counts = job.trainer.get("gradient_accumulation_steps", 1), []
    divisor = divisor_of(job.loss_fn, job.trainer.get("loss_divisor"))
    joins = n > 1 and divisor.kind != "sum"  # Ignite's is a mean of means, ddl's that of the window's rows
    plain = {name: value for name, value in job.trainer.items() if name not in ("checks", "loss_divisor", "max_norm")}
    microbatches = 1

    def loss_fn(output: Any, y: Any) -> torch.Tensor:
        counts.append(divisor.of(y) if joins else 1.0)
        of_routers.close()
        of_routers.enter_context(router_loss_weight(counts[-1] / n / microbatches))
        return job.loss_fn(output, y) * counts[-1]

    def model_fn(model: nn.Module, x: Any) -> Any:
        nonlocal microbatches
        parts = _microbatches(job, n_rows(x)) if routers_of(model) else [slice(None)]
        microbatches = len(parts)
        if microbatches == 1:
            return model(x)
        outputs = [model(tree_map(lambda t, rows=rows: t[rows], x)) for rows in parts]
        order = torch.cat(parts).argsort()
        return tree_map(lambda *parts: torch.cat(parts)[order], *outputs)

    def before_step(*_: Any) -> None:
        update_biases(model)
        for parameter in parameters if joins else ():
            if parameter.grad is not None:
                parameter.grad.mul_(n / sum(counts[-n:]))
        if job.max_norm is not None:
            trainer.state.grad_norm = float(nn.utils.clip_grad_norm_(parameters, job.max_norm))
        if not optimizer.param_groups[0]["lr"]:
            weights = nn.utils.get_total_norm(parameters).item()
            gradients = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
            optimizer.param_groups[0]["lr"] = 0.01 * (weights or 1.0) / (gradients or 1.0)

    if job.mesh["pp"] > 1:
        plain |= {"model_fn": model_fn}
    if joins:
        plain |= {"output_transform": lambda x, y, output, loss: loss.item() / counts[-1]}
    optimizer = SGD(parameters, lr=lr or 0.0)
    optimizer.register_step_pre_hook(before_step)
    trainer = create_plain_trainer(model, optimizer, loss_fn, device="cpu", **plain)
    return trainer, optimizer


def _dead_weights(
    model: nn.Module, values: Mapping[tuple, torch.Tensor], sizes: Mapping[tuple, float], lr: float, atol: float
) -> list[str]:
    """Names of weights whose gradients are too small to compare in every step; "loss" if nothing moves."""
    gradients = {name: 0.0 for name, p in _named(model) if p.requires_grad}
    for (_, kind, name), value in values.items():
        if kind == "gradient":
            gradients[name] = max(gradients[name], _largest(value))
    largest = max(gradients.values())
    dead = [name for name, size in gradients.items() if size <= max(DEAD, atol) * largest]
    loss, weight = (max(size for (_, each), size in sizes.items() if each == kind) for kind in ("loss", "weight"))
    if largest <= DEAD * loss or lr * largest <= DEAD * weight:
        dead.append("loss")
    return dead


def _microbatches(job: _Job, rows: int) -> list[torch.Tensor]:
    """The rows of each microbatch of all dp ranks, in which routers count tokens."""
    dp = job.mesh["dp"]
    schedule, pp = job.cut["schedule"], job.mesh["pp"]
    starts = [rows * rank // dp for rank in range(dp + 1)]
    wanted = job.cut["n_microbatches"] or SCHEDULES[schedule].stages_per_rank * pp
    n = microbatches_for(max(1, starts[1]), wanted, schedule, pp)[0]
    of_ranks = [torch.arange(first, end).chunk(n) for first, end in itertools.pairwise(starts)]
    return [torch.cat(parts) for parts in zip(*of_ranks, strict=True)]


def _largest(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _rows(job: _Job, model: nn.Module) -> tuple[int, ...]:
    """Of the global batches: all rows, then fewer, which dp ranks cannot share evenly, if the schedule allows it."""
    rows, dp = len(tree_leaves(job.batch)[0]), job.mesh["dp"]
    check_model(model, job.plan, **job.mesh, **job.cut, batches=[rows])
    for fewer in sorted(range(1, rows), key=lambda n: (dp > 1 and n % dp == 0, -n)):
        with contextlib.suppress(ValueError):
            check_model(model, job.plan, **job.mesh, **job.cut, batches=[fewer])
            return rows, fewer
    return (rows,)


def _on_a_rank(local_rank: int, job: _Job, folder: str) -> tuple[list[tuple], str]:
    """Trains on this rank, and compares its numbers with those of one process."""
    logging.getLogger("ignite.distributed.auto.auto_model").setLevel(logging.WARNING)
    reference = torch.load(Path(folder) / "reference.pt", mmap=True)
    rank, found = get_mesh().rank, []

    def record(step: int, kind: str, name: str, value: torch.Tensor) -> None:
        expected = reference["values"].get((step, kind, name))
        size = reference["sizes"].get((step, kind)) or 1.0
        error, factor = math.inf, None
        if expected is not None and expected.shape == value.shape and value.isfinite().all():
            error = _largest(value - expected) / size
            if error and value.numel() > 1:  # one number is a multiple of any other
                multiple = float((value * expected).sum() / expected.square().sum())
                if torch.allclose(value, multiple * expected, rtol=1e-9, atol=1e-9 * size):
                    factor = multiple
        found.append((error, name, rank, kind, step, factor))  # sent by value, Number would be another class

    with _comparable(), rows_may_depend():
        model = auto_model(job.make_model(), job.plan, **job.cut, **job.shard)
        optimizer = auto_optim(SGD(model.parameters(), lr=reference["lr"]))
        trainer = create_supervised_trainer(model, optimizer, job.loss_fn, max_norm=job.max_norm, **job.trainer)
        trainer.logger.setLevel(logging.CRITICAL)  # an error is raised
        job.train(model, trainer, auto_dataloader(job.samples(), batch_size=job.rows[0]), optimizer, record)
    return found, job.refusal


# ------------------------------------------------------------------------------------------------- the report


def _report(job: _Job, reference: dict[str, Any], numbers: list[Number], atol: float) -> ParityReport:
    order = {name: index for index, (_, _, name) in enumerate(reference["values"])}
    held = {number.name for number in numbers}
    numbers += [Number(math.inf, name, -1, "weight", job.steps) for name in order if name not in held]
    numbers.sort(key=lambda n: (n.kind == "weight", n.step, KINDS.index(n.kind), order.get(n.name, -1), n.rank))
    different = [number for number in numbers if not number.error <= atol]
    first, worst, dead = next(iter(different), None), max(numbers), reference["dead"]
    cut = {name: value for name, value in job.cut.items() if value and job.mesh["pp"] > 1}
    settings = job.mesh | {name: value for name, value in job.shard.items() if value} | cut
    lines = [
        f"{' '.join(f'{k}={v}' for k, v in settings.items())} compared with one process, SGD in float64, "
        f"lr={reference['lr']:.3g}",
        "step  rows  loss in one process  error of loss  of gradients",
    ]
    steps, errors = [], {(n.kind, n.step): n.error for n in sorted(numbers)}  # the largest one comes last
    for index in range(1, job.steps + 1):
        rows, loss = job.rows[(index - 1) % len(job.rows)], float(reference["values"][index, "loss", "loss"])
        step = Step(rows, loss, *(errors.get((kind, index), math.nan) for kind in ("loss", "gradient")))
        steps.append(step)
        lines.append(f"{index:>4}  {rows:>4}  {loss:>19.6g}  {step.loss_error:>13.1e}  {step.gradient_error:>12.1e}")
    if first is None:
        where = f", in {worst} on rank {worst.rank}" if worst.error else ""
        verdict = "no verdict, though equal" if "loss" in dead else "equal"
        lines.append(f"{verdict}: the largest error is {worst.error:.0e}{where}")
    else:
        ranks = [str(n.rank) for n in different if str(n) == str(first)]
        times = f"{first.factor:.6g} times that of one process, " if first.factor is not None else ""
        lines += [
            f"differs: first {first} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}, {times}off by "
            f"{first.error:.1e} of the largest {first.kind} ({atol:.0e} counts as equal)",
            f"this usually means: {_hint(job, different)}",
        ]
    if names := [name for name in dead if name != "loss"]:
        lines.append(
            f"says nothing about weights whose gradients are zero in one process, or at most {atol:.0e} of the largest"
            f": {', '.join(names)}"
        )
    if "loss" in dead:
        cure = "use a batch from which the model learns, or a larger lr"
        lines.append(f"says nothing: the loss does not move in one process; {cure}")
    lines += reference["notes"]
    return ParityReport(first is None and "loss" not in dead, worst, first, steps, dead, "\n".join(lines))


def _hint(job: _Job, different: list[Number]) -> str:
    """What a difference usually means, by the first number that has it."""
    first, (dp, pp, tp) = different[0], (job.mesh[axis] for axis in ("dp", "pp", "tp"))
    if first.rank < 0:
        return "no rank holds this weight"
    if math.isinf(first.error):
        return "it is not finite, or one process has no number of this name and shape"
    if 1e-9 < first.error < 1e-6:
        return "an error of this size comes from float32: something outside torch's functions computes in it"
    if first.kind == "weight":
        return "the gradients agree: other code changes the weight, or the optimizer does not have it"
    if first.kind != "gradient" and first.step > 1:
        cause = "the steps before agree, so it is state that they leave: a buffer, or random numbers"
        return f"{cause}; or the number of rows, {job.rows[1]}" if first.step == len(job.rows) == 2 else cause
    causes = []
    if first.kind != "gradient":
        if dp * pp > 1:
            causes.append("in the model, the rows of a batch depend on each other, and each rank has some of them")
        return "; or ".join([*causes, "the forward pass differs, or draws random numbers other than dropout's"])
    for axis, size in (("tp", tp), ("dp", dp), ("cp", job.mesh.get("cp", 1))):
        if size > 1 and first.factor and min(abs(first.factor - size), abs(first.factor - 1 / size)) < 1e-9:
            causes.append(f"the factor is {axis}={size} or its inverse: summed over {axis} twice, or not at all")
    if pp > 1:
        causes.append("a layer keeps state from one microbatch to the next, or changes its input")
    wrong = [n.name for n in different if (n.kind, n.step, n.rank) == ("gradient", first.step, first.rank)]
    where = (
        f"the loss agrees, but the backward pass does not, at {wrong[-1]!r} (the last in the model's order of the "
        f"{len(wrong)} gradients that differ) or between there and the loss"
    )
    return f"{where}: {'; or '.join([*causes, 'a backward pass that does not match its forward pass'])}"


# ------------------------------------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``python -m ignite_ddl.lab.parity``; returns its exit code."""
    parser = argparse.ArgumentParser("python -m ignite_ddl.lab.parity", description=__doc__.split("\n\n")[1])
    parser.add_argument("factory", help="module:function")
    axes = ("dp", "pp", "cp", "tp", "dp-replicate", "dp-shard", "ep")
    numbers = (*axes, "n-microbatches", "steps", "lr", "max-norm", "atol", "timeout")
    for name in (*numbers, "schedule", "split"):
        parser.add_argument(f"--{name}", type=_value, metavar="2,2" if name == "split" else None)
    for name in ("shard", "offload"):
        parser.add_argument(f"--{name}", action="store_true", default=None)
    parser.add_argument("--reshard-after-forward", action=argparse.BooleanOptionalAction)
    parser.add_argument("--smaller", nargs="+", metavar="NAME=VALUE", help="for the model's own factory")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        module, _, function = given.pop("factory").partition(":")
        made = getattr(importlib.import_module(module), function)()
        if not isinstance(made, Mapping):
            made = dict(zip(("model", "plan", "batch", "loss_fn"), made, strict=True))
        if "smaller" in given:
            pairs = [pair.partition("=") for pair in given["smaller"]]
            given["smaller"] = {name: _value(text) for name, _, text in pairs}
        report = check_parity(**{"plan": None, **made, **given})
    except ValueError as error:
        print(f"refused: {error}")
        return 2
    except Exception:
        traceback.print_exc()
        return 3
    print(report)
    return 0 if report.equal else 1


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    from ignite_ddl.lab.parity import main as command  # ranks import this name, not __main__

    sys.exit(command())
