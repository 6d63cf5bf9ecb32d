"""A model that is not cut into stages, with the methods of a Pipeline that the engines and the state use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.mesh import get_mesh
from ignite_ddl.pipeline.pipeline import Pipeline

__all__ = ["OneStage", "as_stages", "call", "gradient_sync"]


def call(model: nn.Module, x: Any) -> Any:
    """Ignite's default ``model_fn``."""
    return model(x)


def as_stages(model: nn.Module, model_fn: Callable[[nn.Module, Any], Any] = call) -> Pipeline | OneStage:
    """The result of ``ddl.auto_model`` as this rank's stages: a Pipeline, or the whole model as one stage.

    Raises:
        ValueError: if a ``model_fn`` is given for a pipeline, whose schedule calls the stages, or a pipeline has been
            compiled.
    """
    if isinstance(getattr(model, "_orig_mod", None), Pipeline):  # of torch.compile
        raise ValueError(
            "a pipeline cannot be compiled as a whole: compile its layers before ddl.auto_model, for example "
            "nn.Sequential(*(torch.compile(layer) for layer in model))"
        )
    if isinstance(model, Pipeline):
        if model_fn is not call:
            raise ValueError("model_fn cannot be given under pp, where the schedule calls the stages: leave it out")
        return model
    return OneStage(model, model_fn)


class OneStage:
    """The whole model as one stage; the methods are those of :class:`Pipeline`."""

    is_last = True

    def __init__(self, model: nn.Module, model_fn: Callable[[nn.Module, Any], Any]) -> None:
        self.model, self.model_fn = model, model_fn

    def step(
        self,
        x: Any,
        y: Any,
        loss_fn: Callable,
        transform: Callable,
        share: Callable,
        weight: float,
        autocast: contextlib.AbstractContextManager,
        on_loss: Callable[[torch.Tensor], None],
    ) -> Any:
        with autocast:
            y_pred = transform(self.model_fn(self.model, x))
            loss = loss_fn(y_pred, y)
        on_loss(loss.detach())  # its reduction overlaps the backward pass
        (loss * weight).backward()
        return y_pred

    def forward_only(self, x: Any) -> Any:
        return self.model_fn(self.model, x)

    def from_last_stage(self, value: Any) -> Any:
        return value

    def reduce_loss(self, parts: torch.Tensor) -> dist.Work:
        return dist.all_reduce(parts, group=get_mesh().dp_group, async_op=True)

    def sum_shared_gradients(self) -> None:
        """Does nothing: a shared weight has one gradient here."""

    def counts(self, name: str) -> bool:
        return True

    def local_stages(self) -> list[nn.Module]:
        return [self.model]

    def plain_module(self) -> nn.Module:
        """The module whose names are those of the uncut model."""
        module = self.model
        while isinstance(module, DistributedDataParallel) or hasattr(module, "_orig_mod"):  # torch.compile's
            module = module._orig_mod if hasattr(module, "_orig_mod") else module.module
        return module

    def full_shapes(self) -> dict[str, tuple[int, ...]]:
        state = self.plain_module().state_dict()
        return {name: tuple(t.shape) if isinstance(t, torch.Tensor) else () for name, t in state.items()}

    def shared_names(self) -> list[list[str]]:
        return []

    def gather_stages(self, mine: dict[str, Any]) -> dict[str, Any]:
        return mine


@contextlib.contextmanager
def gradient_sync(stages: list[nn.Module], sync: bool) -> Iterator[None]:
    """Reduces gradients over dp only if an optimizer step follows."""
    with contextlib.ExitStack() as stack:
        for stage in stages:
            if isinstance(stage, DistributedDataParallel) and not sync:
                stack.enter_context(stage.no_sync())
            elif isinstance(stage, FSDPModule):
                stage.set_requires_gradient_sync(sync)
                if getattr(stage, "_keeps_weights", False):  # until the optimizer steps
                    stage.set_reshard_after_backward(sync)
                    stage._holds_weights = not sync
        yield
