"""Finds what each tp rank holds of the tensors inside a GPT block, by running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

import ignite_ddl as ddl
from ignite_ddl.course.gpt import GPT
from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab.bytes import Traffic, count_bytes

__all__ = ["held_along_a_block"]

WAIT_SECONDS = 60


def held_along_a_block(make: Callable[[], GPT], plan: Mapping[str, Any], n_ranks: int) -> list[tuple]:
    """Runs a forward pass on ranks, and finds for each tensor along block0 which part of it rank 0 holds.

    Args:
        make: builds the model.
        plan: its tensor plan.
        n_ranks: number of ranks.

    Returns:
        list: for ``figures.along_a_block`` of chapter 17, in order: the tensor's name, the number of features of the
        whole, whether a rank holds it "whole", sharded by "features" or "tokens", or as one of the "terms" of a sum,
        and the collectives on the way to it. "x" is the block's input, and "+ x" what it is added to.

    Example:
        >>> from ignite_ddl.course import GPT
        >>> from ignite_ddl.course.along import held_along_a_block
        >>> held_along_a_block(lambda: GPT(65, 8, 16, 4, n_blocks=1), GPT.tensor_plan, n_ranks=2)[3:6]
        [('mix', 16, 'features', []), ('out', 16, 'terms', []), ('+ x', 16, 'whole', ['all_reduce'])]
    """
    ranks = on_ranks(n_ranks, _tensors, make, plan, timeout=WAIT_SECONDS, tp=n_ranks)
    steps, later = [], []
    for (name, whole, _), (_, here, events) in zip(_tensors(0, make, {}), ranks[0], strict=True):
        how = "whole" if here == whole else "tokens" if here[-2] < whole[-2] else "features"
        features = whole.numel() // (whole[0] * whole[-2])  # of (N, T, D) or (N, H, T, D / H)
        # A collective behind the last product makes the product a term, and belongs to what comes next.
        behind = events[::-1].index("product") if "product" in events else 0
        calls = later + [event for event in events[: len(events) - behind] if event != "product"]
        later = events[len(events) - behind :]
        steps.append((name, features, "terms" if later else how, calls))
    return steps


def _tensors(local_rank: int, make: Callable[[], GPT], plan: Mapping[str, Any]) -> list[tuple]:
    """Name and shape of each tensor here, and the events since the one before: "product", or a collective."""
    model, found = ddl.auto_model(make(), plan, checks=False), []
    names = {"q": "q k v", "block0": "+"}

    def note(name: str, tensor: torch.Tensor) -> None:
        here = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # a plan's own hooks may come first
        found.append((name, here.shape, order.taken()))

    def after(name: str, module: nn.Module, inputs: tuple, y: torch.Tensor) -> None:
        note(names.get(name, name), y)

    def before(module: nn.Module, inputs: tuple) -> None:
        note("+ x" if found else "x", inputs[0])

    layers = ("norm1", "attention.q", "attention.mix", "attention.out", "norm2", "up", "down")
    model.block0.norm1.register_forward_pre_hook(before)
    model.block0.norm2.register_forward_pre_hook(before)
    for path in (*(f"block0.{layer}" for layer in layers), "block0"):
        model.get_submodule(path).register_forward_hook(partial(after, path.split(".")[-1]))
    with count_bytes() as traffic, _Order(traffic) as order:
        model(torch.zeros(2, model.length, dtype=torch.long))
    return [(name, shape, [] if name == "x" else events) for name, shape, events in found]


class _Order(TorchFunctionMode):
    """Notes the products of linear layers, and the collectives that a counter finds, in order."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic, self.events = traffic, []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.events = [*self.taken(), "product"]
        return result

    def taken(self) -> list[str]:
        """The events so far, which begin anew."""
        events, self.events = self.events + self.traffic.ops, []
        self.traffic.calls.clear()
        return events
