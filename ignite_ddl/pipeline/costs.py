"""The cost of each layer of a model: counted operations, or measured seconds."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ignite_ddl.arguments import MODULE, Fits, first_line, one_of, shown, takes, whole
from ignite_ddl.context.sequence import full_sequences
from ignite_ddl.lazy import Lazy, LazyLayers, replace_module
from ignite_ddl.pipeline.cut import named_layers
from ignite_ddl.structure import detached, map_leaves, tensors_of

UNIT = Fits('"flops" or "seconds"', one_of("flops", "seconds").read)


@takes(model=MODULE, unit=UNIT, repeats=whole(most=10**6))
def layer_costs(model: nn.Module, x: Any, unit: str = "flops", repeats: int = 5) -> list[float]:
    """The cost of a forward and a backward pass of each layer, for ``ddl.auto_model(..., costs=)``.

    "flops" counts the operations of matrix products, convolutions and attention from their shapes
    (``torch.utils.flop_counter``) without computing them. The counts are the same on every machine, and 0 for
    embeddings, norms and activations. "seconds" measures each layer on rank 0's device; the other ranks wait and
    return rank 0's numbers, because all ranks have to cut the model in the same way.

    Args:
        model: an ``nn.Sequential``, or a model that names its layers in ``pipeline_layers``; not cut yet. It is not
            changed; lazy layers are made temporarily.
        x: a microbatch, as the model's input: tensors, in any structure.
        unit: "flops" or "seconds". Default: "flops".
        repeats: for "seconds": number of measurements after one to warm up; the median is returned.
            Default: 5.

    Returns:
        list: a number for each layer.

    Raises:
        ValueError: if the model does not name its layers, ``x`` holds no tensor, or ``unit`` is unknown.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            wide, narrow = torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)
            first, second = ddl.layer_costs(torch.nn.Sequential(wide, narrow), torch.zeros(10, 64))
            assert first == 2 * (2 * 10 * 64 * 64)          # forward, and the weights' gradient: the input needs none
            assert second == 3 * (2 * 10 * 64 * 2)
    """
    layers = named_layers(model)
    if not tensors_of(x):
        raise ValueError(f"x should hold a microbatch's tensors, but given {shown(x)}")
    box: list[Any] = [None]
    if unit == "flops" or idist.get_rank() == 0:
        device = torch.device("meta") if unit == "flops" else idist.device()
        hidden, box = (
            map_leaves(lambda leaf: leaf.detach().to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, x),
            [[]],
        )
        for name, layer in layers:
            # Of cp peers, which would share the sequences, perhaps no other measures.
            with torch.random.fork_rng(), torch.enable_grad(), full_sequences():
                layer = _copy_on(layer, device)
                cost = _flops if unit == "flops" else _seconds
                hidden, found = cost(name, layer, hidden, repeats)
            box[0].append(found)
    if unit == "seconds" and idist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _copy_on(layer: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the layer on a device."""
    if isinstance(layer, Lazy):
        return layer.on_meta() if device.type == "meta" else layer.build().to(device)
    layer = copy.deepcopy(layer)
    for lazy in LazyLayers(layer).lazies:
        replace_module(layer, lazy, lazy.on_meta() if device.type == "meta" else lazy.build())
    return layer.to(device)


def _forward_backward(layer: nn.Module, hidden: Any) -> Any:
    """Forward and backward; returns the input of the next layer."""
    output = layer(hidden)
    reached = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    if reached:
        torch.autograd.backward(reached, [torch.ones_like(tensor) for tensor in reached])
    layer.zero_grad()
    for tensor in tensors_of(hidden):
        tensor.grad = None
    return detached(output)


def _flops(name: str, layer: nn.Module, hidden: Any, _: int) -> tuple[Any, float]:
    with FlopCounterMode(display=False) as counter:
        try:
            output = _forward_backward(layer, hidden)
        except Exception as error:
            raise ValueError(
                f'unit="flops" computes the shapes of a {type(layer).__name__}, {name!r}, but no numbers, on torch\'s '
                f'meta device, which failed ({first_line(error)}): if the layer needs numbers, take unit="seconds"'
            ) from error
    return output, float(counter.get_total_flops())


def _seconds(_: str, layer: nn.Module, hidden: Any, repeats: int) -> tuple[Any, float]:
    output, seconds = _forward_backward(layer, hidden), []
    for _ in range(repeats):
        start = time.perf_counter()
        _forward_backward(layer, hidden)
        if any(tensor.device.type != "cpu" for tensor in tensors_of(hidden)):
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return output, statistics.median(seconds)
