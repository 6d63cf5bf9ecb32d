"""Styles of sequence parallelism: each tp rank has some of the tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleOutput, SequenceParallel

from ignite_ddl.arguments import takes
from ignite_ddl.tensor.inside import ShardedRandom
from ignite_ddl.tensor.layers import FITS, contiguous_output


class SplitSequence(PrepareModuleOutput):
    """Begins a sequence-parallel region: each tp rank keeps its part of the sequence of a module's full output.

    Forward: no communication. Backward: the gradient is gathered. Up to a layer with ``input_layouts=Shard(1)``, a
    tensor holds ``T / tp`` of the T tokens; every module in this region that has weights or draws random numbers
    should have the style :class:`Sequence`. Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    Transformer Models", section 4.2.2.

    Args:
        dim: the dim of the sequence, default 1. Its size has to be a multiple of the tp size.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def tokens_here(local_rank):
                layer = ddl.auto_model(torch.nn.Embedding(10, 4), {"": ddl.SplitSequence()})
                return tuple(layer(torch.zeros(2, 6, dtype=torch.long)).shape)

            with ddl.Parallel(backend="gloo", nproc_per_node=2, tp=2) as parallel:
                assert parallel.run(tokens_here) == [(2, 3, 4)] * 2
    """

    @takes(FITS)
    def __init__(self, *, dim: int = 1) -> None:
        super().__init__(output_layouts=Replicate(), desired_output_layouts=Shard(dim))
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_check_sequence, self.dim, device_mesh.size()))
        super()._apply(module, device_mesh)
        module.register_forward_hook(contiguous_output)
        return module


def _check_sequence(dim: int, tp_size: int, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    if not isinstance(output, torch.Tensor):
        raise ValueError(
            f"SplitSequence is for a module whose output is one tensor, but {type(module).__name__}'s is a "
            f"{type(output).__name__}"
        )
    if output.shape[dim] % tp_size:
        raise ValueError(
            f"tp={tp_size} should divide the sequence, but dim {dim} of {type(module).__name__}'s output has "
            f"{output.shape[dim]} places"
        )


class Sequence(SequenceParallel):
    """A norm, or a module without weights, that works on this rank's part of the sequence.

    Forward: no communication. Backward: the gradients of the weights, which are replicated, are summed over tp before
    the optimizer steps. Random numbers follow the rule for sharded regions, so ``nn.Dropout`` between
    sequence-parallel layers needs this style too. A norm of each head needs :class:`SharedWeight` instead.
    Korthikanti et al. 2022, section 4.2.2.

    Args:
        dim: the dim of the sequence, default 1.

    Examples:
        .. code-block:: python

            from torch.distributed.tensor import Shard
            from ignite_ddl.tensor import Column, Row, Sequence, SharedInput, SplitSequence

            plan = {
                "embed": SplitSequence(),                                     # T tokens -> T / tp
                "block*.norm[12]": Sequence(),
                "block*.attention": SharedInput(input_layouts=Shard(1)),      # T / tp -> T
                "block*.attention.[qkv]": Column(units="n_heads"),
                "block*.attention.out": Row(output_layouts=Shard(1)),         # T -> T / tp
                "block*.dropout": Sequence(),
            }
    """

    @takes(FITS)
    def __init__(self, *, dim: int = 1) -> None:
        super().__init__(sequence_dim=dim, use_local_output=True)

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if the module has weights and is not a norm over the last dims."""
        if any(True for _ in module.parameters()) and not isinstance(module, nn.LayerNorm | nn.RMSNorm):
            raise ValueError(
                f"Sequence is for nn.LayerNorm, nn.RMSNorm and modules without weights, but {name!r} is a "
                f"{type(module).__name__}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not any(True for _ in module.parameters()):
            return ShardedRandom()._apply(module, device_mesh)
        return super()._apply(module, device_mesh)

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
        super()._replicate_module_fn(name, module, device_mesh)
        for parameter in frozen:  # torch makes them trainable
            module.get_parameter(parameter).requires_grad_(False)
