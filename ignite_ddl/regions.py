"""Finds code between cut layers that mixes features of different tp ranks, such as a softmax over them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ignite_ddl.compat import unobserved
from ignite_ddl.mesh import get_mesh
from ignite_ddl.pipeline.pipeline import reshard
from ignite_ddl.pipeline.structure import map_leaves, some_rows, tensors_of
from ignite_ddl.tensor.styles import keep_dtensors, region_ends
from ignite_ddl.traceless import evaluating, without_trace

__all__ = ["check_regions_once", "skip_region_check"]

_ROWS = 2  # that the check takes of a batch: plain attention takes memory


def check_regions_once(stage: nn.Module) -> None:
    """Lets the first forward pass of a stage, in training or not, compare the input of each :class:`Row` before.

    Between a Column and a Row, code sees this rank's features as a plain tensor, so a softmax, a mean or a norm over
    features is computed from these alone. DTensors compute it from all features. Therefore the stage is run once as it
    is and once with DTensors between the cut layers, with the same arguments, without gradients, in evaluation mode,
    on two rows where that is possible. What this changes is put back; only forward hooks of one's own see it.

    Args:
        stage: a model, or a stage of a pipeline, that is cut over tp.
    """
    if not any(True for _ in region_ends(stage)):
        return

    def check(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        skip_region_check(module)
        with unobserved():
            _check(module, args, kwargs)

    stage._region_check = stage.register_forward_pre_hook(check, prepend=True, with_kwargs=True)


def skip_region_check(stage: nn.Module) -> None:
    """Takes the check away."""
    handle = vars(stage).pop("_region_check", None)
    if handle is not None:
        handle.remove()


def _check(stage: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    rows = {len(tensor) for tensor in tensors_of((args, kwargs)) if tensor.ndim}
    few = [some_rows(given, slice(_ROWS), max(rows)) for given in (args, kwargs)] if len(rows) == 1 else None
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None
    for given in filter(None, (few, [args, kwargs])):  # all rows where code counts on their number
        try:
            found = _inputs_of_rows(stage, *given)
            break
        except Exception as raised:
            error = raised
    if found is None:
        warnings.warn(
            "the code between the layers that tensor_plan cuts could not be checked, since it does not run on "
            f"DTensors ({(str(error) or repr(error)).splitlines()[0]}): run ddl.check_parity on a small copy of the "
            "model",
            stacklevel=2,
        )
        return
    wrong = [name for name, (plain, known) in found.items() if _differ(plain, known)]
    on_any = torch.tensor(float(bool(wrong)), device=idist.device())
    dist.all_reduce(on_any, op=dist.ReduceOp.MAX, group=get_mesh().tp_group)  # tp peers raise together
    if on_any:
        where = f"before {wrong[0]!r}" if wrong else "between cut layers"
        raise ValueError(
            f"the code {where} mixes features that tensor_plan has cut over tp ranks (a softmax, mean, norm or chunk "
            "over them): leave the layers around it out of the plan, or, if one layer computes q, k and v, use "
            "ddl.Column(parts=3)"
        )


def _inputs_of_rows(stage: nn.Module, args: tuple, kwargs: dict) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of the first input of each Row: as the model is, and with DTensors between cut layers."""
    from torch.distributed.tensor.experimental import implicit_replication  # here: slow to import

    with evaluating([stage]), torch.no_grad():
        plain = _recorded(stage, args, kwargs)
        # Attention's fused kernels do not take DTensors, its plain form does; a mask is the same on all ranks.
        with keep_dtensors(), implicit_replication(), sdpa_kernel(SDPBackend.MATH):
            known = _recorded(stage, args, kwargs)
    return {name: (plain[name], part) for name, part in known.items()}


def _recorded(stage: nn.Module, args: tuple, kwargs: dict) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, given: tuple) -> None:
            if given and isinstance(given[0], torch.Tensor):
                part = given[0].to_local() if isinstance(given[0], DTensor) else given[0]
                found.setdefault(name, part.clone())

        return hook

    handles = [end.register_forward_pre_hook(note(name)) for name, end in region_ends(stage)]
    try:
        args, kwargs = map_leaves(_copied, (args, kwargs))  # such as a cache of keys that forward fills
        with without_trace([stage]):
            stage(*args, **kwargs)
            reshard(stage)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _differ(plain: torch.Tensor, known: torch.Tensor) -> bool:
    if plain.shape != known.shape or not known.numel():
        return plain.shape != known.shape
    return float((plain - known).abs().max()) > 1e-2 * max(float(known.abs().max()), 1e-6)
