"""A call of a loss function: with rows, with none, and with tensors that are cut over ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ignite_ddl.checks.loss_graph import dependencies
from ignite_ddl.checks.traceless import as_real
from ignite_ddl.compat import newest_node
from ignite_ddl.gather import giving_no_rows, inside_a_loss
from ignite_ddl.loss_contract import LossContract
from ignite_ddl.mesh import get_mesh
from ignite_ddl.structure import tensors_of

_IN_A_PIPELINE = (
    "Under pp, loss_fn runs where the last stage is, with the output and the targets of a microbatch: what layers or "
    "hooks of other stages keep is on other ranks, and the output does not depend on x there. Let the model return it, "
    "give what prepare_batch makes for each row with the targets, y=(y, w), or use a mesh without pp"
)
_OVER_DP = (
    "Over dp, loss_fn gets the rows of a rank, of which there may be any number: let what belongs together, such as a "
    "group of answers, be one row (a dim of it), or take a batch_size by which each rank has whole groups, with "
    'drop_last=True and loss_divisor="local"'
)


def checked_loss(contract: LossContract, empty: bool) -> Callable[[Any, Any], torch.Tensor]:
    """The loss function of a contract, whose calls are checked in steps that check.

    Args:
        contract: what is known of the loss.
        empty: whether this rank has no rows of the batch.
    """

    def loss_of(output: Any, y: Any) -> torch.Tensor:
        since = newest_node()
        if contract.is_checking:
            contract.before_call(output, y)
        watch = contract.watch() if contract.is_checking and contract.is_local else contextlib.nullcontext()
        with watch, inside_a_loss():
            loss = _loss(contract, output, y, empty)
        contract.communicates = contract.communicates or getattr(watch, "found_others", False)
        if contract.is_checking:
            contract.inspect(loss, since)
        elif contract.is_uneven:  # by which an optimizer's step knows which models this loss has weighted
            contract.find_others(dependencies(loss, output, since)[1])
        return loss

    return loss_of


def _loss(contract: LossContract, output: Any, y: Any, empty: bool) -> torch.Tensor:
    """Calls the loss function; torch's losses fail on cut logits, or return a DTensor."""
    kind = contract.divisor.kind
    if empty and kind != "sum" or callable(kind) and contract.divisor.of(y) == 0:
        return _loss_where_nothing_counts(contract, output, y, empty)
    try:
        with giving_no_rows() if contract.n_rows == 0 else contextlib.nullcontext():  # but a row that it was lent
            loss = contract.loss_fn(output, y)
    except Exception as error:
        _explain(error, output)
        raise
    if isinstance(loss, DTensor):
        advice = _cure_of_cut_tensors(output)
        raise ValueError(f"loss_fn should return a plain tensor, but gave a DTensor, {loss.placements}: {advice}")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn should return one number, but gave {given}")
    return loss


def _loss_where_nothing_counts(contract: LossContract, output: Any, y: Any, empty: bool) -> torch.Tensor:
    value, used = math.nan, list[torch.Tensor]()  # what the loss does not use gets no gradient, as on other ranks
    without_rows = giving_no_rows() if empty else contextlib.nullcontext([])
    with contextlib.suppress(Exception), without_rows as gathered, contract.watch() as watch:
        since = newest_node()
        loss = contract.loss_fn(output, y)  # once, as on other ranks: it may sum over ranks, or call a sharded model
        if gathered:  # the loss of others' rows, whose backward pass all ranks need
            return loss
        value = math.nan if empty or watch.found else float(loss.detach())
        used = dependencies(loss, output, since)[0]  # the call changes its state, too
    contract.check_that_nothing_counts(value)
    return _loss_of_nothing(used if any(tensor.ndim for tensor in used) else output)


def _explain(error: Exception, output: Any) -> None:
    """Raises a ValueError, or adds a note, if an error of ``loss_fn`` comes of the mesh."""
    mesh, words = get_mesh(), str(error)
    if "mixed torch.Tensor and DTensor" in words:
        advice = _cure_of_cut_tensors(output)
        raise ValueError(f"loss_fn should compute with plain tensors, but fails on a DTensor: {advice}") from error
    if mesh.pp_size > 1 and "not have been used in the graph" in words:
        raise ValueError(
            "loss_fn takes a gradient of the output by a tensor before it (x?), but under pp it sees the output of "
            "the last stage alone, whose graph begins there: use a mesh without pp, or a model with a layer that "
            "computes such gradients by itself and returns them"
        ) from error
    if mesh.pp_size > 1 and "a pipeline cannot be called" not in words:
        error.add_note(_IN_A_PIPELINE)
    elif mesh.dp_size > 1 and "is invalid for input of size" in words:
        error.add_note(_OVER_DP)


def _cure_of_cut_tensors(output: Any) -> str:
    if any(isinstance(tensor, DTensor) for tensor in tensors_of(output)):
        return (
            "for logits that are cut by vocabulary, use ddl.cross_entropy as loss_fn; what forward returns of weights "
            "that are cut over ranks it should compute of weight.full_tensor()"
        )
    return (
        "the model returns plain ones, so this is a weight that is cut over ranks, or its gradient: let forward return "
        "what the loss takes of weights (computed of weight.full_tensor(); to return a full weight, its clone) and "
        "pass loss_divisor=, use weight_decay, or leave the weight uncut, by shard=False or a tensor_plan without its "
        "layer; or it is what a hook keeps of a layer that tensor_plan cuts: let the hook keep output.full_tensor()"
    )


def _loss_of_nothing(output: Any) -> torch.Tensor:
    """A loss of 0, by which gradients are zeros: the mean of no rows would be NaN."""
    if not tensors_of(output):  # an object, such as a SimpleNamespace
        output = getattr(output, "__dict__", output)
    if not tensors_of(output):
        raise ValueError(
            "the model's output should be made of tensors in tuples, lists, dicts or dataclasses where none of a "
            f"rank's targets count, but is a {type(output).__name__} without any: let forward return its tensors"
        )
    tensors = [tensor for tensor in tensors_of(output) if tensor.ndim and tensor.is_floating_point()]
    if not tensors and any(not tensor.isfinite().all() for tensor in tensors_of(output)):
        raise ValueError(
            "the model returns a loss that is not finite where none of a rank's targets count: let it return its "
            "output, and compute the loss in loss_fn"
        )
    # masks of -inf, or of the least number, whose sum is -inf, would make it NaN
    return sum((as_real(tensor).nan_to_num(0.0, 0.0, 0.0) * 0.0).sum() for tensor in tensors or tensors_of(output))
