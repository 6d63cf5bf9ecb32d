"""What the styles share: how a layer's weights lie, how they are sharded, and what code between layers sees."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ignite_ddl.arguments import FLAG, a, or_none, whole

_LAYOUT = or_none(a("a placement such as Replicate() or Shard(1)", Placement))
FITS = {"input_layouts": _LAYOUT, "output_layouts": _LAYOUT, "use_local_output": FLAG, "dim": whole(-64, 64)}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is a Conv1D of ``transformers``, as in GPT-2: a linear layer whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and module.weight.ndim == 2


def dim_of_outputs(module: nn.Module) -> int:
    """The dim of a layer's weight that counts its outputs."""
    return int(isinstance(module, nn.Embedding) or is_transposed(module))


def on_local_shards(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], mixin: type) -> nn.Module:
    """Distributes the weights of a module, whose methods those of ``mixin`` then replace."""
    distribute(module, mesh, placements)
    # As in FSDP2: the module stays the same object with its hooks, and only its class changes.
    module.__class__ = type(f"{mixin.__name__[1:]}{type(module).__name__}", (mixin, type(module)), {})
    return module


def distribute(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Makes DTensors of the parameters that ``placements`` names."""
    for name, placement in placements.items():
        full = getattr(module, name)
        if full is not None:
            shard = distribute_tensor(full, mesh, [placement])
            module.register_parameter(name, nn.Parameter(shard, requires_grad=full.requires_grad))


def with_summed_gradient(x: torch.Tensor, tp_mesh: DeviceMesh) -> torch.Tensor:
    """The same tensor on each tp rank; its gradient is the sum of what comes back on each of them."""
    return DTensor.from_local(x, tp_mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def summed(x: torch.Tensor, tp_mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the tp ranks' tensors; each of them gets the full gradient of the sum."""
    return DTensor.from_local(x, tp_mesh, [Partial()], run_check=False).full_tensor()


def check_divides(tp_size: int, size: int, what: str, name: str) -> None:
    """Raises a ValueError unless every tp rank gets as many."""
    if size % tp_size:
        raise ValueError(f"tp={tp_size} should divide the {size} {what} of {name!r}, but does not")


def contiguous_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Copies a slice, which is not contiguous: a pipeline stage may end here, and torch 2.11 compares strides."""
    return output.clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------- what code between sharded layers sees

_FULL = contextvars.ContextVar("full tensors between sharded layers", default=False)


@contextlib.contextmanager
def full_between_layers() -> Iterator[None]:
    """Inside, code between sharded layers sees all features and channels, in the model's order, as in one process."""
    token = _FULL.set(True)
    try:
        yield
    finally:
        _FULL.reset(token)


def is_full_between_layers() -> bool:
    """Whether it is inside :func:`full_between_layers`."""
    return _FULL.get()


def region_ends(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of ``root`` that take a sharded input, with their names."""
    return ((name, m) for name, m in root.named_modules() if getattr(m, "_takes_sharded_input", False))


def local_input(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """This rank's part of the input of a layer that takes a sharded one, which is full in ``full_between_layers``."""
    if isinstance(x, DTensor):
        return x.to_local()
    if not _FULL.get():
        return x
    mesh = module.weight.device_mesh["tp"]
    dim = x.ndim + 1 - module.weight.ndim if isinstance(module, CONVOLUTIONS) else -1
    if x.shape[dim] == module.weight.to_local().shape[1 - dim_of_outputs(module)]:  # of a stage that begins here
        return x
    return x.chunk(mesh.size(), dim=dim)[mesh.get_local_rank()].contiguous()
