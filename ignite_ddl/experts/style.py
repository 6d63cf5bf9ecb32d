"""The style of a plan for a module that holds experts: each ep rank has some of them, and tokens go to them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle

from ignite_ddl.arguments import MAPPING, takes
from ignite_ddl.experts.dispatch import Dispatch
from ignite_ddl.experts.layer import combined
from ignite_ddl.mesh import Mesh, get_mesh

__all__ = ["Experts", "apply_experts", "check_experts_of", "check_shards", "dim_to_shard", "experts_of"]

_HELD = "_experts_over_ranks"  # on a module: its style was applied


@takes(tp=MAPPING)
class Experts(ParallelStyle):
    """A module with a weight for all experts, (experts, ...), of which each ep rank keeps an equal part in dim 0.

    The module's forward takes tokens (tokens, width), the experts of each of them (tokens, top_k), and their weights
    (tokens, top_k), and returns the weighted sum of what the experts make of a token: the experts of
    ``ddl.MixtureOfExperts``, and those of Hugging Face's transformers 5. On a mesh with ep, an all-to-all of uneven
    sizes sends tokens to the ranks of their experts, and a second one back, where the weights are applied (GShard,
    Lepikhin et al. 2020, arXiv:2006.16668, section 3; there with padding). Nothing is padded, and nothing is dropped
    but what the router has dropped. Without ep, the plan's key has no effect.

    With tp, each tp peer does the same for the same tokens, with all of an expert's weights, or with a part of them.

    Args:
        tp: names of weights and the dim in which they are cut over tp, such that the sum over tp of what the parts
            return is what the whole returns: ``{"gate": 1, "up": 1, "down": 2}`` for ``ddl.MixtureOfExperts``.
            A weight that holds two of these, as transformers' ``gate_up_proj``, is refused. Default: none.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            layer = ddl.MixtureOfExperts(8, 16, n_experts=4, top_k=2)
            plan = {"1.experts": ddl.Experts()}
            batch = torch.randn(6, 8), torch.randn(6, 8)
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), layer)
            report = ddl.check_parity(model, plan, batch, torch.nn.functional.mse_loss, dp=2, ep=2)
            assert report.equal
    """

    def __init__(self, *, tp: Mapping[str, int] | None = None) -> None:
        self.tp = dict(tp or {})

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if the module does not hold experts, or tp does not divide a weight."""
        weights = dict(module.named_parameters(recurse=False))
        sizes = {len(weight) if weight.ndim else 0 for weight in weights.values()}
        inside = any(True for child in module.children() for _ in child.parameters())
        if inside or len(sizes) != 1 or not any(weight.ndim > 2 for weight in weights.values()):
            shapes = ", ".join(f"{n} {tuple(w.shape)}" for n, w in module.named_parameters())
            raise ValueError(
                f"Experts is for a module whose own weights are (experts, ...) in dim 0, but {name!r} is a "
                f"{type(module).__name__} with {shapes or 'no weights'}: name the module that holds the experts, or "
                "stack the weights of a list of experts"
            )
        if any(True for _ in module.buffers()):
            raise ValueError(f"Experts cuts weights, but {name!r} has buffers, too: keep them outside of the experts")
        given = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
        if len(given) != 3:
            raise ValueError(
                f"Experts is for a module whose forward takes (tokens, experts of each, their weights), but that of "
                f"{name!r} takes ({', '.join(p.name for p in given)})"
            )
        if self.tp and self.tp.keys() != weights.keys():
            raise ValueError(
                f"Experts(tp=) should cut each weight of {name!r}, {', '.join(weights)}, or none, but given {self.tp}"
            )
        for weight, dim in self.tp.items():
            if not isinstance(dim, int) or not 0 < dim < weights[weight].ndim or weights[weight].shape[dim] % tp_size:
                has = ", ".join(f"{n} {tuple(w.shape)}" for n, w in weights.items())
                raise ValueError(
                    f"Experts(tp=) should give names of weights a dim from 1 that tp={tp_size} divides, but given "
                    f"{weight!r}: {dim} for {name!r}, which has {has}"
                )
        cut = {weight: weights[weight].shape[dim] for weight, dim in self.tp.items()}
        if len(set(cut.values())) > 1:
            said = ", ".join(f"{weight} in {size}" for weight, size in cut.items())
            raise ValueError(
                f"Experts(tp=) should cut all weights of {name!r} between the same features, but given {said}: a "
                "weight that holds gates and values is not cut right; leave tp= out, and tp peers compute whole experts"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = device_mesh.mesh_dim_names
        n_experts = len(next(module.parameters()))
        for name, weight in list(module.named_parameters(recurse=False)):
            dims = {"ep": 0} | ({"tp": self.tp[name]} if name in self.tp else {})
            placements = [Shard(dims[axis]) if axis in dims else Replicate() for axis in names]
            cut = distribute_tensor(weight.detach(), device_mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=weight.requires_grad))
        over_ep = "ep" in names
        if over_ep and isinstance(getattr(module, "num_experts", None), int):
            module.num_experts = n_experts // get_mesh().ep_size  # read by transformers' forward
        setattr(module, _HELD, over_ep)
        module.forward = _OverRanks(module, n_experts, over_ep, "tp" in names and bool(self.tp))
        return module


class _OverRanks:
    """The forward of a module whose experts are on ep ranks."""

    def __init__(self, module: nn.Module, n_experts: int, over_ep: bool, over_tp: bool) -> None:
        self.module, self.forward, self.n_experts = module, module.forward, n_experts
        self.over_ep, self.over_tp = over_ep, over_tp

    def __call__(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if any(isinstance(tensor, DTensor) for tensor in (x, index, weights)):
            raise ValueError(
                "experts should get whole tokens as plain tensors, but get a DTensor: let the layers before them in "
                "tensor_plan return whole outputs (not ddl.Sequence's parts)"
            )
        if not self.over_ep:
            return self.own(x, index, weights)
        dispatch = Dispatch(index, self.n_experts, get_mesh())
        got = dispatch.to_experts(x)
        local = dispatch.local.unsqueeze(1)
        made = dispatch.to_tokens(self.own(got, local, got.new_ones(local.shape)))
        return combined(made, dispatch.order, weights, x)

    def own(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What this rank's experts, or its parts of them, make of rows."""
        kept = dict(self.module._parameters)
        local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in kept.items()}
        tp_group = get_mesh().tp_group
        if self.over_tp:
            x, weights = _SumOfGradients.apply(x, tp_group), _SumOfGradients.apply(weights, tp_group)
        self.module._parameters.update(local)  # DTensor knows no sums over the tokens of other ranks
        try:
            made = self.forward(x, index, weights).to(x.dtype) if len(x) else torch.zeros_like(x)
        finally:
            self.module._parameters.update(kept)
        if not len(x):  # a rank without tokens takes part in backward passes, too
            made = _WithoutTokens.apply(made, x, *local.values())
        return _Sum.apply(made, tp_group) if self.over_tp else made


class _WithoutTokens(torch.autograd.Function):
    """No rows, with a gradient of zero for tensors on which rows would depend."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return made.view_as(made)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return None, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


class _Sum(torch.autograd.Function):
    """The sum over a group, of which each rank's part has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad, None


class _SumOfGradients(torch.autograd.Function):
    """The same on each rank of a group, each of which computes a part of what comes of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        summed = grad.clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def dim_to_shard(shape: Sequence[int], copies: int) -> int | None:
    """The dim in which FSDP2 can cut a rank's part of a weight of experts: dim 0 is that of experts."""
    whole = copies == 1 and len(shape) == 1
    return 0 if whole else next((dim for dim in range(1, len(shape)) if shape[dim] % copies == 0), None)


def check_shards(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], mesh: Mesh) -> None:
    """Refuses experts that ``shard=True`` cannot cut once more."""
    copies = mesh.dp_cp_size // mesh.ep_size
    held = {name: style for name, style in styles.items() if isinstance(style, Experts) and mesh.ep_size > 1}
    for name, style in held.items():
        for weight_name, weight in modules[name].named_parameters():
            shape = list(weight.shape)
            if weight_name in style.tp:
                shape[style.tp[weight_name]] //= mesh.tp_size
            if dim_to_shard(shape, copies) is None:
                raise ValueError(
                    f"shard=True cuts what an ep rank holds of '{name}.{weight_name}', (experts, ...) "
                    f"{tuple(shape)}, over its {copies} copies in a dim from 1, but {copies} divides none: use another "
                    "width, or a larger ep"
                )


def check_experts_of(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], ep: int) -> None:
    """Refuses experts that ep does not divide, and a mesh with ep whose plan names no experts."""
    held = {name: style for name, style in styles.items() if isinstance(style, Experts)}
    if ep > 1 and not held:
        raise ValueError(
            f'ep={ep} should share experts, but tensor_plan names none: {{"blocks.*.moe.experts": ddl.Experts()}}'
        )
    for name in held:
        n = len(next(modules[name].parameters()))
        if n % ep:
            raise ValueError(f"ep={ep} should divide the experts of {name!r}, but there are {n}")


def apply_experts(model: nn.Module, styles: Mapping[str, ParallelStyle], mesh: Mesh) -> None:
    """Cuts the experts that ``styles`` names; names that the model, or this rank's stages, do not have are ignored."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, style in styles.items():
        if name not in modules or not isinstance(style, Experts) or hasattr(modules[name], _HELD):
            continue
        if mesh.ep_size > 1:
            whole_on_tp = mesh.tp_size == 1
            style._apply(modules[name], mesh.expert_mesh["ep"] if whole_on_tp else mesh.expert_mesh["ep", "tp"])
        elif mesh.tp_size > 1 and style.tp:
            style._apply(modules[name], mesh.device_mesh["tp"])


def experts_of(module: nn.Module) -> Iterable[nn.Module]:
    """The modules inside whose experts are on several ranks."""
    return (m for m in module.modules() if getattr(m, _HELD, False))
