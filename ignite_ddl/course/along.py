"""Finds what each tp rank holds of the outputs inside a GPT block, by running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import ignite_ddl as ddl
from ignite_ddl.course.gpt import GPT
from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab.bytes import count_bytes

__all__ = ["held_along_a_block"]

LAYERS = ("norm1", "attention.q", "attention.mix", "attention.out", "dropout", "norm2", "up", "down")
WAIT_SECONDS = 60


def held_along_a_block(make: Callable[[], GPT], plan: Mapping[str, Any], n_ranks: int) -> list[tuple]:
    """Runs a forward pass on ranks, and finds for each layer of block0 which part of its output rank 0 holds.

    Args:
        make: builds the model.
        plan: its tensor plan.
        n_ranks: number of ranks.

    Returns:
        list: for ``figures.along_a_block`` of chapter 17, in order: the layer's name, the number of features of its
        whole output, whether a rank holds it "whole" or sharded by "features" or "tokens", and the collectives since
        the previous layer.

    Example:
        >>> from ignite_ddl.course import GPT
        >>> from ignite_ddl.course.along import held_along_a_block
        >>> held_along_a_block(lambda: GPT(65, 8, 16, 4, n_blocks=1), GPT.tensor_plan, n_ranks=2)[2:4]
        [('mix', 16, 'features', []), ('out', 16, 'whole', ['all_reduce'])]
    """
    ranks = on_ranks(n_ranks, _outputs, make, plan, timeout=WAIT_SECONDS, tp=n_ranks)
    steps = []
    for (name, whole, _), (_, here, calls) in zip(_outputs(0, make, {}), ranks[0], strict=True):
        how = "whole" if here == whole else "tokens" if here[-2] < whole[-2] else "features"
        features = whole.numel() // (whole[0] * whole[-2])  # of (N, T, D) or (N, H, T, D / H)
        steps.append(("q k v" if name == "q" else name, features, how, calls))
    return steps


def _outputs(local_rank: int, make: Callable[[], GPT], plan: Mapping[str, Any]) -> list[tuple]:
    model, found = ddl.auto_model(make(), plan), []
    for name in ("embed", *(f"block0.{layer}" for layer in LAYERS)):

        def note(module: Any, inputs: Any, y: torch.Tensor, name: str = name) -> None:
            found.append((name.split(".")[-1], y.shape, traffic.ops))
            traffic.calls.clear()

        model.get_submodule(name).register_forward_hook(note)
    with count_bytes() as traffic:
        model(torch.zeros(2, model.length, dtype=torch.long))
    return found[1:]
