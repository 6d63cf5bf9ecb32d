"""What torch's errors mean on a mesh, and what to do about them."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ignite_ddl.arguments import first_line
from ignite_ddl.checks.guards import Hook
from ignite_ddl.mesh import get_mesh
from ignite_ddl.parts import MODELS, PartError

THIS_WAS_IN = "This was in "
# Words of torch's and Python's errors where code gets a part of a tensor and expects all of it.
_ABOUT_SHAPES = re.compile(r"shape|size|dim|DTensor|to unpack|channels|elements|no attribute '(device|placements)'")


def explain_errors(module: nn.Module, advice: str, about: re.Pattern[str] = _ABOUT_SHAPES) -> None:
    """Adds a note to exceptions of the module's call whose text has words of ``about``. Default: shapes, DTensors."""

    def explain(module: nn.Module, args: Any, output: Any) -> None:
        error = sys.exc_info()[1] if output is None else None  # else it is one that the script handles meanwhile
        if error is not None and about.search(str(error)) and advice not in advice_of(error):
            if isinstance(error, PartError) and about is _ABOUT_SHAPES:
                error.args = (error.reason,)  # it is the layer's input, and nothing that a script computes
            error.add_note(advice)

    module.register_forward_hook(Hook(explain), always_call=True)


def explain_transforms(module: nn.Module, over_tp: bool) -> None:
    """Says what to do where torch's derivatives in forward mode, or transforms, fail on a model that is cut."""
    cure = (
        "take a mesh of dp alone"
        if over_tp
        else "leave out shard=True, or take torch.func.jvp(model, (x,), (tangent,)), whose backward pass works since "
        "torch 2.13, or dual tensors under torch.no_grad()"
    )
    advice = f"{THIS_WAS_IN}a model that is cut over ranks, of which torch does not compute derivatives in this way"
    explain_errors(module, f"{advice}: {cure}", re.compile("jvp|forward AD|functorch transforms|TensorWrapper"))


def advice_of(error: BaseException) -> list[str]:
    """The lines that :func:`explain_errors` added."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith(THIS_WAS_IN)]


# Words of torch's errors; whether a mesh gives this reason for them; the reason, and what to do.
_REASONS = (
    (
        "setStorage: sizes",
        lambda mesh: mesh.dp_size > 1,
        "a backward pass goes through derivatives that forward or the loss computes (torch.func, create_graph=True), "
        "but shard=True, or dp beside tp or pp, has freed the weights that these need: take a mesh of dp alone or of "
        "tp alone, without shard=True; or a layer keeps a view of a weight besides its output, for the loss: let it "
        "keep view.clone()",
    ),
    (
        "Expected more than 1 value per channel when training",
        lambda mesh: True,
        "a BatchNorm in training got one value for each channel, since this rank or microbatch has one row of the "
        "batch: take a larger batch_size, drop_last=True or fewer microbatches, or nn.GroupNorm, whose numbers are "
        "those of one process",
    ),
    (
        "is a view and is being modified inplace",
        lambda mesh: mesh.tp_size > 1,
        "a layer works in place (inplace=True) on what a layer that is cut over ranks has returned, which torch "
        "refuses: give it inplace=False",
    ),
    (
        "appears to not have been used in the graph",
        lambda mesh: mesh.world_size > mesh.pp_size,
        "torch.autograd.grad got weights that the graph does not have, since layers compute with others, which are "
        "gathered for a pass: for gradients by weights, take a mesh of dp alone, without shard=True",
    ),
    (
        "Expected to have finished reduction",
        lambda mesh: True,
        "model has weights that the previous step did not use, and DDP waits for their gradients: pass "
        "find_unused_parameters=True, or shard=True, to ddl.auto_model",
    ),
    (
        "element 0 of tensors does not require grad",
        lambda mesh: mesh.world_size > 1,
        "the loss has no gradient: what idist.all_gather and torch.distributed.all_gather return has none, so gather "
        'rows with ddl.gather_rows (with loss_divisor="local"), and leave out detach() and '
        "torch.no_grad() elsewhere",
    ),
    (
        "(torch.nn.Parameter or None expected)",
        lambda mesh: mesh.world_size > 1,
        "a layer computes a weight that was its parameter before (pruning, weight_norm, a parametrization), which "
        "torch cannot follow where it gathers weights: change the layer before ddl.auto_model, and leave it out of "
        "tensor_plan",
    ),
    (
        "Expected variable to have sparse gradient",
        lambda mesh: mesh.dp_cp_size > 1,
        "an nn.Embedding with sparse=True shares its weight with something that gives it a dense gradient (a tied "
        "head), and DDP waits for a sparse one: sparse=False has the same gradients",
    ),
    (
        "expect_autograd_hooks_",
        lambda mesh: True,
        "static_graph=True needs a first step of one batch, after whose backward pass DDP knows the graph, but it "
        "accumulates over several: pass find_unused_parameters=True to ddl.auto_model instead",
    ),
)


@contextlib.contextmanager
def explaining_errors(rows: tuple[int, int | None] | None = None) -> Iterator[None]:
    """Raises torch's errors about parts of tensors as ValueErrors with a cure, or adds a note.

    Args:
        rows: this rank's number of rows and that of the batch. Default: not known.
    """
    try:
        yield
    except Exception as error:
        advice, mesh = advice_of(error), get_mesh()
        if found := re.search(r"(?:aten\.(\w+)\S* )?got mixed torch\.Tensor and DTensor", str(error)):
            what = f"the model computes ({found[1] or 'an operation'}) with a plain tensor and a weight"
            raise ValueError(_of_a_cut_weight(what, advice)) from error
        if found := re.search(r"Sharding propagation failed for aten\.(\w+)", str(error)):
            what = f"torch does not compute {found[1]} of a weight"
            raise ValueError(_of_a_cut_weight(what, advice)) from error
        if isinstance(error, PartError) and not advice:
            cure = "if it is a layer's forward that does so, leave it uncut: no shard=True, no style in tensor_plan"
            raise ValueError(f"{error}; {cure}") from error
        if advice and not _is_of_a_script(error):
            raise ValueError(" ".join([f"{first_line(error, 1000)}.", *advice])) from error
        for words, holds, reason in _REASONS:
            if words in str(error) and holds(mesh):
                raise ValueError(reason) from error
        is_split = rows is not None and rows[0] < (rows[1] or 0) and mesh.pp_size == 1
        if is_split and not getattr(error, "__notes__", ()) and _is_about(rows[0], str(error)):
            error.add_note(
                f"This rank has {rows[0]} of the batch's {rows[1]} rows: if these are parts of one thing, such as the "
                "nodes of a graph, let it be one row (a dataset of x[None], of which forward takes x[0] and returns "
                "output[None]), or take a mesh of tp alone"
            )
        raise


def _is_about(n: int, words: str) -> bool:
    """Whether an error is about shapes, and one of them has this number."""
    return bool(re.search(r"shape|size|out of bounds", words) and re.search(rf"(?<!\d){n}(?!\d)", words))


def _is_of_a_script(error: Exception) -> bool:
    """Whether a script, which may catch its own exceptions, or another library has made the error's type."""
    return type(error).__module__.partition(".")[0] not in ("builtins", "torch", "ignite_ddl")


def _of_a_cut_weight(what: str, advice: list[str]) -> str:
    cut = (line.partition(",")[0].removeprefix(THIS_WAS_IN) for line in advice if "tensor_plan cuts" in line)
    named = next(cut, None)
    cure = (
        f"leave {named}, whose forward reads its weight, out of tensor_plan"
        if named
        else "call the layer that holds the weight instead of reading the weight off it, so that it is gathered in "
        "time, and a part of a module by the module's own forward, not past it (self.encoder(x), not "
        "self.encoder.features(x)); cut a mask, as of a hook, by ddl.distribute_like(mask, p); or leave the weight "
        "uncut, by shard=False or a tensor_plan without this layer"
    )
    return f"{what} that is cut over ranks, or the output of a layer with use_local_output=False: {cure}"


def reason_in_a_run(error: BaseException) -> str | None:
    """What an error of torch means in an update function of one's own; None if it is not known."""
    if "appears to not have been used in the graph" in str(error) and any(map(_is_gathered_or_staged, MODELS)):
        return (
            "torch.autograd.grad gives no gradients by weights that are sharded or those of a pipeline: call "
            "ddl.forward_backward for each loss instead, and read p.grad after each (optimizer.zero_grad() before it)"
        )
    return None


def _is_gathered_or_staged(model: nn.Module) -> bool:
    return get_mesh().pp_size > 1 or any(isinstance(module, FSDPModule) for module in model.modules())
