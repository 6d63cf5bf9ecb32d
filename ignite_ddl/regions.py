"""Finds code between cut layers that mixes features of different tp ranks, such as a softmax over them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ignite_ddl.mesh import Mesh
from ignite_ddl.pipeline.pipeline import reshard
from ignite_ddl.tensor.styles import keep_dtensors, region_ends

__all__ = ["check_cut_regions"]


def check_cut_regions(stages: Any, mesh: Mesh, x: Any) -> None:
    """Compares the input of each :class:`Row` with that computed on DTensors; all ranks call it.

    Between a Column and a Row, code sees this rank's features as a plain tensor, so a softmax, a mean or a norm over
    features is computed from these alone. DTensors compute it from all features. Therefore the stages are run once as
    they are and once with DTensors between the cut layers, without gradients and in evaluation mode.

    Args:
        stages: the model as stages.
        mesh: the mesh.
        x: the input of a batch.

    Raises:
        ValueError: if inputs of a Row differ, with its name.
    """
    if mesh.tp_size == 1:
        return
    from torch.distributed.tensor.experimental import implicit_replication  # here: slow to import

    modules = stages.local_stages()
    if not any(True for stage in modules for _ in region_ends(stage)) and mesh.pp_size == 1:
        return
    inputs: dict[int, Any] = {}
    with _evaluating(modules), torch.no_grad(), torch.random.fork_rng(devices=[]):
        handles = [
            stage.register_forward_pre_hook(lambda module, args, s=s: inputs.setdefault(s, args))
            for s, stage in enumerate(modules)
        ]
        with _recorded(modules) as plain:
            stages.forward_only(x)
        for handle in handles:
            handle.remove()
        # Stage by stage, from the recorded inputs: nothing is sent between stages.
        # Attention's fused kernels do not take DTensors, its plain form does; a mask is the same on all ranks.
        attention = sdpa_kernel(SDPBackend.MATH)
        with _recorded(modules) as known, keep_dtensors(), implicit_replication(), attention:
            try:
                for s, stage in enumerate(modules):
                    if any(True for _ in region_ends(stage)):
                        stage(*inputs[s])
                        reshard(stage)
            except Exception as error:
                warnings.warn(
                    "the code between the layers that tensor_plan cuts could not be checked, since it does not run on "
                    f"DTensors ({str(error).splitlines()[0]}): run ddl.check_parity on a small copy of the model",
                    stacklevel=2,
                )
    for name, first in known.items():
        before = plain[name]
        scale = max(float(first.abs().max()), 1e-6) if first.numel() else 1.0
        same = before.shape == first.shape
        if not same or float((before - first).abs().max() if first.numel() else 0.0) > 1e-2 * scale:
            raise ValueError(
                f"the code before {name!r} mixes features that tensor_plan has cut over tp ranks (a softmax, mean, "
                "norm or chunk over them): leave the layers around it out of the plan, or, if one layer computes q, k "
                "and v, use ddl.Column(parts=3)"
            )


@contextlib.contextmanager
def _recorded(modules: list[nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Inside, records the first input of each Row, as this rank's part."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple) -> None:
            if args and isinstance(args[0], torch.Tensor):
                part = args[0].to_local() if isinstance(args[0], DTensor) else args[0]
                found.setdefault(name, part.clone())

        return hook

    handles = [end.register_forward_pre_hook(note(name)) for m in modules for name, end in region_ends(m)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _evaluating(modules: list[nn.Module]) -> Iterator[None]:
    was = [(m, m.training) for stage in modules for m in stage.modules()]
    for stage in modules:
        stage.eval()
    try:
        yield
    finally:
        for module, training in was:
            module.training = training
