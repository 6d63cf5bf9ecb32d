"""Styles of convolutions: their output channels or their input channels are sharded over tp."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.parallel.style import ParallelStyle

from ignite_ddl.arguments import FLAG, takes
from ignite_ddl.tensor.layers import (
    CONVOLUTIONS,
    check_divides,
    is_full_between_layers,
    local_input,
    on_local_shards,
    summed,
    with_summed_gradient,
)


class OutputChannels(ParallelStyle):
    """Each tp rank computes some of the output channels of a convolution, as :class:`Column` for a linear layer.

    Forward: no communication; the output is this rank's channels. Backward: the gradient of the input is summed over
    tp. Weight and bias are DTensors sharded along dim 0. The convolution runs on their local parts, because DTensor's
    ``conv2d`` (torch 2.11 to 2.13) returns one rank's channels as if they were all channels.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import InputChannels, OutputChannels

            plan = {"conv1": OutputChannels(), "conv2": InputChannels()}     # ReLU and pooling between them

    A BatchNorm, GroupNorm or ``nn.PReLU(C)`` between them has weights for all channels, and no style shards it. This
    raises an error: in an ``nn.Sequential`` when the plan is checked, else in the first forward pass. ``nn.PReLU()``
    takes the style :class:`SharedWeight`.
    """

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` does not divide the output channels."""
        _check_is_convolution(self, name, module)
        check_divides(tp_size, module.out_channels, "output channels", name)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = {"weight": Shard(0), "bias": Shard(0)}
        return on_local_shards(module, device_mesh, placements, _OutputChannels)


class InputChannels(ParallelStyle):
    """Each tp rank convolves some of the input channels, as :class:`Row` for a linear layer.

    Forward: the partial outputs are summed over tp, then the bias is added, once. Backward: no communication. The
    weight is a DTensor sharded along dim 1, the bias is replicated.

    Args:
        whole_input: whether the input has all channels: each rank then selects its own, and the gradient of the input
            is gathered. Default False: the input is sharded, for example by :class:`OutputChannels`.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def convolved(local_rank):
                torch.manual_seed(0)
                layer = ddl.auto_model(torch.nn.Conv2d(4, 8, 3), {"": ddl.InputChannels(whole_input=True)})
                return tuple(layer.weight.to_local().shape), layer(torch.ones(1, 4, 5, 5)).sum().item()

            with ddl.Parallel(backend="gloo", nproc_per_node=2, tp=2) as parallel:
                (shape, total), _ = parallel.run(convolved)
            assert shape == (8, 2, 3, 3)                        # 2 of the 4 input channels
            torch.manual_seed(0)
            assert abs(total - torch.nn.Conv2d(4, 8, 3)(torch.ones(1, 4, 5, 5)).sum().item()) < 1e-4
    """

    @takes(whole_input=FLAG)
    def __init__(self, *, whole_input: bool = False) -> None:
        super().__init__()
        self.whole_input = whole_input

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` does not divide the input channels."""
        _check_is_convolution(self, name, module)
        check_divides(tp_size, module.in_channels, "input channels", name)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = {"weight": Shard(1), "bias": Replicate()}
        module = on_local_shards(module, device_mesh, placements, _InputChannels)
        module._takes_sharded_input = not self.whole_input
        if self.whole_input:
            layouts = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1), "use_local_output": True}
            PrepareModuleInput(**layouts)._apply(module, device_mesh)
        return module


class _OutputChannels:
    """A mixin before the class of a convolution."""

    def _conv_forward(self, x: torch.Tensor, weight: DTensor, bias: DTensor | None) -> torch.Tensor:
        x = with_summed_gradient(x, weight.device_mesh)
        y = super()._conv_forward(x, weight.to_local(), None if bias is None else bias.to_local())
        if not is_full_between_layers():
            return y
        channels = y.ndim + 1 - weight.ndim
        return DTensor.from_local(y, weight.device_mesh, [Shard(channels)], run_check=False).full_tensor()


class _InputChannels:
    """A mixin before the class of a convolution."""

    def _conv_forward(self, x: torch.Tensor, weight: DTensor, bias: DTensor | None) -> torch.Tensor:
        x = local_input(self, x) if self._takes_sharded_input else x
        y = summed(super()._conv_forward(x, weight.to_local(), None), weight.device_mesh)
        if bias is None:
            return y
        return y + bias.to_local().view(-1, *[1] * (weight.ndim - 2))  # once, not on each rank


def _check_is_convolution(style: ParallelStyle, name: str, module: nn.Module) -> None:
    kind = type(style).__name__
    if not isinstance(module, CONVOLUTIONS):
        raise ValueError(f"{kind} cuts an nn.Conv1d, 2d or 3d, but {name!r} is a {type(module).__name__}")
    torchs = next(of_torch for of_torch in CONVOLUTIONS if isinstance(module, of_torch))
    if getattr(module._conv_forward, "__func__", None) is not torchs._conv_forward:
        raise ValueError(
            f"{kind} cuts a convolution as torch computes it, but {name!r}, a {type(module).__name__}, has a "
            "_conv_forward of its own, which would compute with a part of the weight: leave it out of the plan"
        )
    if module.groups != 1:
        raise ValueError(
            f"{kind} cuts a convolution with groups=1, but {name!r} has groups={module.groups}: leave it out of "
            "the plan"
        )
