"""Finds code between cut layers that mixes features of different tp ranks, such as a softmax over them."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ignite_ddl.arguments import first_line
from ignite_ddl.checks.traceless import LAYERS, WatchForSums, evaluating, without_trace
from ignite_ddl.collectives import on_any_rank
from ignite_ddl.compat import without_dispatch_modes
from ignite_ddl.data_parallel import reshard
from ignite_ddl.mesh import get_mesh
from ignite_ddl.structure import map_leaves, some_rows, tensors_of
from ignite_ddl.tensor.layers import full_between_layers, local_input, region_ends

_ROWS = 2  # of a batch that the check runs on: plain attention takes memory


def check_regions_once(stage: nn.Module, trains: bool = False) -> None:
    """Lets the next forward pass of a stage, in training or not, compare what its layers get and what it returns.

    Between a Column and a Row, code sees this rank's features as a plain tensor, so a softmax, a mean or a norm over
    features is computed from these alone. In one process it sees all features. Therefore the stage is run once as it
    is and once with all features gathered between its cut layers, with the same arguments, without gradients, on two
    rows where that is possible. This is done in evaluation mode, and, if it is in training, again with all modules in
    training but torch's, up to where random numbers are drawn. What changes is restored; forward hooks of the user see
    it.

    Args:
        stage: a model, or a stage of a pipeline, that is cut over tp.
        trains: whether a loss is computed from the output, which is then compared, too. Default: False.
    """

    def check(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        skip_region_check(module)
        for evaluates in (True, False):
            with without_dispatch_modes(), evaluating([module], evaluates):
                if evaluates or any(part.training for part in module.modules()):
                    _check(module, args, kwargs, trains)

    if hasattr(stage, "_orig_mod"):  # of torch.compile, whose graph would be made anew for the check
        return
    skip_region_check(stage)
    if any(isinstance(parameter, DTensor) for parameter in stage.parameters()):
        stage._region_check = stage.register_forward_pre_hook(check, prepend=True, with_kwargs=True)


def skip_region_check(stage: nn.Module) -> None:
    """Removes the check."""
    handle = vars(stage).pop("_region_check", None)
    if handle is not None:
        handle.remove()


def _check(stage: nn.Module, args: tuple, kwargs: dict[str, Any], trains: bool) -> None:
    with WatchForSums() as watch:
        actual, other, expected = _run_both_ways(stage, args, kwargs)
    share = max(1e-2, LAYERS * watch.coarsest)
    drawn = {*_differing(actual, other, share), *_differing(other, actual, share)}
    compared = itertools.takewhile(lambda name: name not in drawn, expected)
    wrong = _differing(actual, {name: expected[name] for name in compared if trains or name not in _OUTPUTS}, share)
    on_any = on_any_rank(bool(wrong), get_mesh().tp_group)  # tp peers raise together
    if on_any and wrong and wrong[0] in _OUTPUTS and actual[wrong[0]].shape != expected[wrong[0]].shape:
        raise ValueError(
            f"the model's output has shape {tuple(actual[wrong[0]].shape)} on two rows, a part of "
            f"{tuple(expected[wrong[0]].shape)}, since tensor_plan leaves the outputs of its last layer cut: use "
            "ddl.Column(output_layouts=Replicate()), or Column(use_local_output=False) and ddl.cross_entropy"
        )
    if on_any:
        where = f"before {wrong[0]!r}" if wrong and wrong[0] not in _OUTPUTS else "between cut layers"
        raise ValueError(
            f"the code {where} mixes features that tensor_plan has cut over tp ranks (a softmax, mean, norm or chunk "
            "over them): leave the layers around it out of the plan, or, if one layer computes q, k and v, use "
            "ddl.Column(parts=3)"
        )


def _run_both_ways(stage: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[dict, dict, dict]:
    """What :func:`_run` finds with this rank's features, with these and other random numbers (in training), and with
    all features; empty, with a warning, if the stage does not run with all.
    """
    rows = {len(tensor) for tensor in tensors_of((args, kwargs)) if tensor.ndim}
    few_rows = [some_rows(given, slice(_ROWS), max(rows)) for given in (args, kwargs)] if len(rows) == 1 else None
    for given in filter(None, (few_rows, [args, kwargs])):  # all rows if code does not run with fewer
        try:
            actual = _run(stage, *given)
            other = _run(stage, *given, seed=1) if any(module.training for module in stage.modules()) else actual
            with full_between_layers():
                return actual, other, _run(stage, *given)
        except Exception as raised:
            error = raised
    warnings.warn(
        "the code between the layers that tensor_plan cuts could not be checked, since it does not run with all "
        f"features ({first_line(error)}): run ddl.check_parity on a small copy of the model",
        stacklevel=3,
    )
    return {}, {}, {}


_OUTPUTS = [f"output {i}" for i in range(16)]


def _run(stage: nn.Module, args: tuple, kwargs: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """This rank's part of the first input of each layer that takes a cut one, and the outputs."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, given: tuple) -> None:
            if given and isinstance(given[0], torch.Tensor):
                found.setdefault(name, local_input(module, given[0]).clone())

        return hook

    handles = [end.register_forward_pre_hook(note(name)) for name, end in region_ends(stage)]
    try:
        args, kwargs = map_leaves(_copied, (args, kwargs))  # such as a cache of keys that forward fills
        with torch.no_grad(), without_trace([stage], seed):
            outputs = tensors_of(stage(*args, **kwargs))
            reshard(stage)
    finally:
        for handle in handles:
            handle.remove()
    plain = [output for output in outputs if not isinstance(output, DTensor)]
    return found | dict(zip(_OUTPUTS, plain, strict=False))


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _differing(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float) -> list[str]:
    return [name for name, part in expected.items() if name not in actual or _differ(actual[name], part, share)]


def _differ(plain: torch.Tensor, known: torch.Tensor, share: float) -> bool:
    if plain.shape != known.shape or not known.numel():
        return plain.shape != known.shape
    if known.dtype is torch.bool:  # such as a mask that layers pass on
        return not torch.equal(plain, known)
    return float((plain - known).abs().max()) > share * max(float(known.abs().max()), 1e-6)
