"""Runs a layer in parts on ranks, and compares it with the whole layer in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ignite_ddl.course.ranks import try_on_ranks
from ignite_ddl.lab.bytes import count_bytes

__all__ = ["ComparedCut", "compare_cut", "derivatives", "part_of", "run_cut"]

BOUND = 1e-12  # of float64; what is wrong in a chapter is wrong by far more


@dataclass
class ComparedCut:
    """What :func:`compare_cut` found.

    Attributes:
        whole: the output "y" and every derivative ("dx" for the input "x"), in one process.
        ranks: the same on each rank, of its part.
        right: names of those that are right on every rank.
        forward: (op, bytes put in) of each collective of rank 0 in forward.
        backward: the same in backward.
    """

    whole: dict[str, torch.Tensor]
    ranks: list[dict[str, torch.Tensor]]
    right: list[str]
    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]


def compare_cut(
    layer: Callable[..., torch.Tensor],
    whole_layer: Callable[..., torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    dims: Mapping[str, int | None],
    n_ranks: int = 4,
) -> ComparedCut:
    """Gives each rank its part of the inputs, and compares output and derivatives with those of the whole layer.

    It prints what is right, and what is sent forward and backward.

    Args:
        layer: what a rank computes of its parts; called with ``inputs`` by name.
        whole_layer: what one process computes of the whole.
        inputs: float64 tensors; a derivative is taken with respect to each.
        dims: for each input, and for the output "y", the dim along which it is cut; None where every rank has all.
        n_ranks: default 4.

    Returns:
        ComparedCut: what was compared.

    Example:
        >>> import torch
        >>> from ignite_ddl.course import compare_cut
        >>> inputs = {"x": torch.ones(2, 3).double(), "weight": torch.ones(3, 4).double()}
        >>> product = lambda x, weight: x @ weight
        >>> found = compare_cut(product, product, inputs, {"x": None, "weight": 1, "y": 1}, n_ranks=2)
        y right   dx WRONG   dweight right
        forward   nothing sent
        backward  nothing sent
    """
    upstream = torch.randn_like(whole_layer(**inputs))
    whole = derivatives(whole_layer, upstream, **inputs)
    ran = run_cut(n_ranks, layer, {**inputs, "upstream": upstream}, {**dims, "upstream": dims["y"]})
    ranks = [found for found, _ in ran]
    right = []
    for name, value in whole.items():
        parts = [part_of(value, dims[name.removeprefix("d")], rank, n_ranks) for rank in range(n_ranks)]
        gaps = [(found[name] - part).abs().max() for found, part in zip(ranks, parts, strict=True)]
        right += [name] * bool(max(gaps) <= BOUND)
    print("   ".join(f"{name} {'right' if name in right else 'WRONG'}" for name in whole))
    sent = ran[0][1]
    for way, calls in sent.items():
        print(f"{way:9} " + (", ".join(f"{op} of {size} bytes" for op, size in calls) or "nothing sent"))
    return ComparedCut(whole, ranks, right, **sent)


def part_of(value: torch.Tensor, dim: int | None, rank: int, n_ranks: int) -> torch.Tensor:
    """A rank's part of a tensor that is cut along ``dim``, or all of it where that is None."""
    return value if dim is None else value.chunk(n_ranks, dim)[rank]


def derivatives(function: Callable[..., Any], upstream: torch.Tensor, **inputs: torch.Tensor) -> dict[str, Any]:
    """The output "y" and the derivatives ("dx" for the input "x"), where ``upstream`` comes back to the output.

    Where y is no tensor of the shape of ``upstream``, or has no backward, there is y alone.
    """
    inputs = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    y = function(**inputs)
    if not isinstance(y, torch.Tensor) or y.shape != upstream.shape or not y.requires_grad:
        return {"y": y.detach() if isinstance(y, torch.Tensor) else y}
    y.backward(upstream)
    return {"y": y.detach()} | {f"d{name}": value.grad for name, value in inputs.items()}


def run_cut(
    n_ranks: int,
    layer: Callable[..., torch.Tensor],
    given: Mapping[str, torch.Tensor],
    dims: Mapping[str, int | None],
    timeout: float = 120,
) -> list[tuple[dict, dict]]:
    """:func:`derivatives` on ranks, each with its part.

    Args:
        n_ranks: number of ranks.
        layer: called with what is in ``given`` by name, but for "upstream".
        given: the inputs, and "upstream".
        dims: for each of ``given``, the dim along which it is cut; None where every rank has all.
        timeout: seconds that the run may take. Default: 120.

    Returns:
        list: for each rank what it found, and its collectives: (op, bytes put in) of each, "forward" and "backward".
    """
    return try_on_ranks(n_ranks, _on_a_rank, n_ranks, layer, dict(given), dict(dims), timeout=timeout)


def _on_a_rank(rank: int, n_ranks: int, layer: Callable, given: dict, dims: dict) -> tuple[dict, dict]:
    mine = {name: part_of(value, dims[name], rank, n_ranks) for name, value in given.items()}
    sent = {}

    def counted(**inputs: torch.Tensor) -> Any:
        with count_bytes() as traffic:
            y = layer(**inputs)
        sent["forward"] = [(call.op, call.put_in) for call in traffic.calls]
        return y

    with count_bytes() as traffic:
        found = derivatives(counted, **mine)
    sent["backward"] = [(call.op, call.put_in) for call in traffic.calls][len(sent["forward"]) :]
    return found, sent
