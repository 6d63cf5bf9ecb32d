"""Lays a model into one vector; writes down what FSDP2 does in a step, and plays it again with stated times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ignite_ddl.lab.bytes import count_bytes
from ignite_ddl.lab.record import Record

__all__ = ["flatten_parameters", "overlapped", "sharded_step"]

_NAMES = {"all_gather": "gather", "reduce_scatter": "scatter"}


def flatten_parameters(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Lays all weights of a model into one vector and all gradients into another, and makes the parameters views.

    Args:
        model: all of its parameters have the same dtype.

    Returns:
        tuple: the weights, and the gradients, which are zero.

    Example:
        >>> import torch
        >>> from ignite_ddl.course import flatten_parameters
        >>> model = torch.nn.Linear(2, 3)
        >>> weights, gradient = flatten_parameters(model)
        >>> model(torch.ones(2)).sum().backward()
        >>> gradient.tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    parameters = list(model.parameters())
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    gradient = torch.zeros_like(weights)
    end = 0
    for parameter in parameters:
        here = slice(end, end := end + parameter.numel())
        parameter.data, parameter.grad = weights[here].view_as(parameter), gradient[here].view_as(parameter)
    return weights, gradient


def sharded_step(layers: Sequence[nn.Linear], step: Callable[[], Any]) -> list[tuple[str, int]]:
    """Runs a step of layers that ``fully_shard`` has cut, each by itself, and writes down what happens to each layer.

    Args:
        layers: no two with equally many weights, since a collective is told by its bytes; no biases, all of one dtype.
        step: forward and backward.

    Returns:
        list: in order, what and to which layer: "gather" and "scatter" when the collective is called, "forward" and
        "backward" when the layer begins to compute, "free" when its weight is a shard again.

    Example:
        >>> import torch
        >>> from ignite_ddl.course import on_ranks, sharded_step
        >>> from torch.distributed.fsdp import fully_shard
        >>> def step(local_rank):
        ...     layer = fully_shard(torch.nn.Linear(4, 2, bias=False), reshard_after_forward=False)
        ...     return sharded_step([layer], lambda: layer(torch.ones(1, 4)).sum().backward())
        >>> [what for what, layer in on_ranks(2, step)[0]]
        ['gather', 'forward', 'backward', 'free', 'scatter']
    """
    events: list[tuple[str, int]] = []
    sizes = [layer.weight.numel() * layer.weight.element_size() for layer in layers]
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"layers should differ in bytes, but have {sizes}")
    whole: set[int] = set()

    def look() -> None:
        here = {place for place, layer in enumerate(layers) if not isinstance(layer.weight, DTensor)}
        events.extend(("free", place) for place in sorted(whole - here))
        whole.clear()
        whole.update(here)
        for call in traffic.calls:
            events.append((_NAMES[call.op], sizes.index(max(call.put_in, call.got))))
        traffic.calls.clear()

    def begins(kind: str, place: int) -> None:
        look()
        events.append((kind, place))

    def after_forward(place: int, y: torch.Tensor) -> None:
        look()
        y.register_hook(lambda gradient: begins("backward", place))

    handles = []
    for place, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(lambda *_, place=place: begins("forward", place)))
        handles.append(layer.register_forward_hook(lambda _, x, y, place=place: after_forward(place, y)))
    with count_bytes() as traffic:
        step()
        look()
    for handle in handles:
        handle.remove()
    return events


def overlapped(
    events: Sequence[tuple[str, int]], seconds: dict[str, float], ahead: bool = True
) -> dict[str, list[Record]]:
    """Plays a step again with stated times: how long it takes, and what the network does meanwhile.

    Our assumptions: calls return at once, as on a GPU; one queue computes, one sends, each in the order of the calls;
    a product waits for its layer's gather, a scatter for its layer's backward; a gather starts no earlier than the
    last product that was called before it, so that no rank holds more whole layers than in the log. Nothing waits for
    a free: a layer that is freed and gathered again at once has two copies while its product lasts. (Nor does a gather
    of FSDP2 wait for a product, but for the buffer of the gather before it: ``wait_for_unshard`` in torch 2.13.)

    Args:
        events: from :func:`sharded_step`.
        seconds: of one "gather", "forward", "backward" and "scatter", the same for all layers.
        ahead: False for calls that return when they have ended, as gloo's do on a CPU: one thing at a time.

    Returns:
        dict: the records of "network" and "computes", for ``draw.step_rows``.

    Example:
        >>> from ignite_ddl.course import overlapped
        >>> log = [("gather", 0), ("forward", 0), ("gather", 1), ("forward", 1)]
        >>> [overlapped(log, {"gather": 2, "forward": 3}, ahead)["computes"][-1].end for ahead in (True, False)]
        [8.0, 10.0]
    """
    rows: dict[str, list[Record]] = {"network": [], "computes": []}
    free_at, ended, last_start = {"network": 0.0, "computes": 0.0}, {}, 0.0
    for what, layer in events:
        if what == "free":
            continue
        row = "computes" if what in ("forward", "backward") else "network"
        earliest = ended.get(("backward" if what == "scatter" else "gather", layer), 0.0)
        if what == "gather":
            earliest = last_start
        start = max(earliest, free_at[row] if ahead else max(free_at.values()))
        end = free_at[row] = ended[what, layer] = start + seconds[what]
        if row == "computes":
            last_start = start
            rows[row].append(Record(0, what, str(layer), start, end))
        else:
            rows[row].append(Record(0, "communication", f"{what[0]}{layer}", start, end))
    return rows
