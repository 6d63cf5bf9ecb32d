"""Styles of modules between two sharded layers: a weight that all heads or features share, and random numbers."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel.style import ParallelStyle

from ignite_ddl.tensor.layers import on_local_shards
from ignite_ddl.tensor.random import draw_seed, random_stream


class SharedWeight(ParallelStyle):
    """A module inside a sharded region whose weights all heads, features or channels share: ``nn.PReLU()``, a norm of
    each head, a learned scale.

    Each rank applies the full weight to its own part, so its gradient is a part of a sum. Forward: no communication.
    Backward: the gradients of the weights are summed over tp before the optimizer steps. It applies to the parameters
    of the module itself; its submodules need entries in the plan.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import Column, Row, SharedWeight

            plan = {"up": Column(), "act": SharedWeight(), "down": Row()}      # act is nn.PReLU()
            plan |= {"block*.attention.[qk]_norm": SharedWeight()}             # norms of each head
    """

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if the module has no weights, or a weight for each channel."""
        kind = type(module).__name__
        if not any(True for _ in module.parameters(recurse=False)):
            raise ValueError(f"SharedWeight is for a module that holds weights, but {name!r} is a {kind}")
        if is_by_channel(module):
            raise ValueError(
                f"SharedWeight is for weights that all channels share, but {name!r} is a {kind} with some for each "
                "channel: keep it outside the sharded region"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicated = {name: Replicate() for name, _ in module.named_parameters(recurse=False)}
        return on_local_shards(module, device_mesh, replicated, _SharedWeight)


def is_by_channel(module: nn.Module) -> bool:
    """Whether a module has a weight for each channel, or groups of channels, so that it needs all channels."""
    if isinstance(module, nn.PReLU):
        return module.num_parameters > 1
    norm = isinstance(module, nn.modules.batchnorm._NormBase) and bool(module.state_dict())
    return norm or isinstance(module, nn.GroupNorm)  # its groups would change


class _SharedWeight:
    """A mixin before the class of a module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        replicated = dict(self._parameters)
        try:
            for name, weight in replicated.items():
                if weight is not None:  # a plain tensor; its gradient is a part of the sum over tp
                    self._parameters[name] = weight.to_local(grad_placements=[Partial()])
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(replicated)


class ShardedRandom(ParallelStyle):
    """A module inside a sharded region that draws random numbers from a stream of its tp rank.

    It is for dropout between :class:`Column` and :class:`Row`, also that of attention: without it, all tp ranks would
    draw the same mask for their different features or heads. No communication. In evaluation, the module uses the
    default stream. :mod:`ignite_ddl.tensor.random` has the rule.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import Column, Row, ShardedRandom

            plan = {"up": Column(), "dropout": ShardedRandom(), "down": Row()}
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp_rank, entered = device_mesh.get_local_rank(), []

        def enter(module: nn.Module, inputs: Any) -> None:
            stream = contextlib.ExitStack()
            if module.training:
                stream.enter_context(random_stream(draw_seed() + tp_rank))
            entered.append(stream)

        def leave(*_: Any) -> None:
            entered.pop().close()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module
