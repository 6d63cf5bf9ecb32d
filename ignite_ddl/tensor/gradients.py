"""Gradients on the tensor-parallel axis: sharded as their weights are, and compared where weights are replicated."""

from __future__ import annotations

import ignite.distributed as idist
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ignite_ddl.collectives import gathered
from ignite_ddl.mesh import Mesh
from ignite_ddl.structure import local_tensor


class ReplicatedWeights:
    """Checks once for each replicated weight that all tp peers have the same gradient.

    Gradients differ if the ranks' parts of features, heads, channels or tokens share the weight, or if the ranks saw
    different rows or drew different random numbers; the copies of the weight would then diverge without an error. The
    trainer checks in the first step, by one all-gather of 16 numbers per weight; weights that have no gradient yet are
    checked in up to nine further steps.

    Args:
        mesh: the mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.steps_left, self.agreed = mesh, 10, set()

    def check(self, model: nn.Module) -> None:
        """Runs the check; all tp peers call it after the backward pass.

        Args:
            model: what ``ddl.auto_model`` returned.

        Raises:
            ValueError: on all tp peers, if they have different gradients of a replicated weight.
        """
        if self.steps_left == 0:
            return
        self.steps_left -= 1
        unchecked = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in self.agreed and not is_cut(parameter, "tp")
        }
        if not unchecked:
            return
        digests = torch.stack([_digest(parameter.grad) for parameter in unchecked.values()])
        peers = torch.stack(gathered(digests, self.mesh.tp_group)).cpu()  # (tp, weights, 16)
        sizes = peers[..., 8:].norm(dim=2).amax(dim=0)
        differences = (peers - peers[0]).norm(dim=2).amax(dim=0)
        # A gradient far below the others is what rounding left of zero.
        rounding = sizes.max() * max(torch.finfo(parameter.dtype).eps for parameter in unchecked.values()) ** 0.5
        for name, size, difference in zip(unchecked, sizes, differences, strict=True):
            if size > rounding:
                self.agreed.add(name)
                if difference > 0.01 * size:
                    raise ValueError(
                        f"tp ranks have different gradients of {name!r}, which tensor_plan leaves whole on each of "
                        "them. If it works on a part of the heads, features, channels or tokens, name its module in "
                        "the plan: ddl.SharedWeight(), or ddl.Sequence() for tokens. Else the ranks saw different rows "
                        "or drew different random numbers"
                    )


def is_cut(tensor: torch.Tensor, axis: str) -> bool:
    """Whether ranks on this axis, or for dp on any that dp consists of, hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    axes = ("dp", "dp_shard", "edp", "ep") if axis == "dp" else (axis,)
    return any(name in axes and not p.is_replicate() for name, p in zip(names, tensor.placements, strict=True))


def _digest(gradient: torch.Tensor | None) -> torch.Tensor:
    """16 numbers: the sum and the norm of each eighth, scaled so that they differ by no more than the gradients."""
    if gradient is None:
        return torch.zeros(16, dtype=torch.float64, device=idist.device())
    held = local_tensor(gradient).detach().resolve_conj()
    held = torch.view_as_real(held) if held.is_complex() else held
    parts = held.to(idist.device(), torch.float64).flatten().tensor_split(8)
    sums = [part.sum() / max(len(part), 1) ** 0.5 for part in parts]
    return torch.stack(sums + [part.norm() for part in parts])


def redistribute_gradient(parameter: nn.Parameter) -> None:
    """Gives a gradient the placements of its parameter; all tp peers call it.

    DTensor may return other placements: ``Replicate()`` for an embedding, ``Partial()`` for a LayerNorm between
    sequence-parallel layers.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def layout_of(parameter: nn.Parameter) -> str:
    return str(parameter.placements) if isinstance(parameter, DTensor) else "replicated"
