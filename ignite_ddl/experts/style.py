"""The style of a plan for a module that holds experts: each ep rank has some of them, and tokens go to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle

from ignite_ddl.arguments import MAPPING, takes
from ignite_ddl.experts.dispatch import Dispatch
from ignite_ddl.experts.layer import combined
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.structure import local_tensor, tensors_of
from ignite_ddl.tensor.layers import summed, with_summed_gradient


@takes(tp=MAPPING)
class Experts(ParallelStyle):
    """A module that holds experts: on a mesh with ep, each ep rank keeps as many of them as the others.

    Its weights are (experts, ...), one for all experts. Its forward takes tokens (tokens, width), the experts of each
    token (tokens, top_k) and the weights of these (tokens, top_k), and returns for each token the weighted sum of its
    experts' outputs: so do the experts of ``ddl.MixtureOfExperts``, and those of Hugging Face's transformers 5. If it
    counts the experts by an attribute, this is ``num_experts`` or ``n_experts``; it takes no other tensors. An
    all-to-all of uneven sizes sends each token to the ranks of its experts, and a second one brings the outputs back
    to the token's rank, which weights and sums them (GShard, Lepikhin et al. 2020, arXiv:2006.16668, section 3, where
    they are padded). Nothing is padded, and only choices that the router has dropped are left out. On a mesh without
    ep, experts stay where they are.

    With tp besides, tp peers have the same tokens and exchange the same ones with other ep ranks. Without ``tp=`` each
    of them holds its experts in full, and all compute the same. With it each holds a part of every expert, and their
    outputs are summed.

    Args:
        tp: for each weight, the dim in which tp cuts it: ``{"gate": 1, "up": 1, "down": 2}`` for
            ``ddl.MixtureOfExperts``. The outputs of the parts have to sum to that of the full expert. A weight that
            is two in one, as transformers' ``gate_up_proj``, is refused. Default: none is cut.

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
        every, weights = dict(module.named_parameters()), dict(module.named_parameters(recurse=False))
        shapes = ", ".join(f"{weight} {tuple(p.shape)}" for weight, p in every.items()) or "no weights"
        n_experts = {tuple(p.shape[:1]) for p in weights.values()}
        if every.keys() != weights.keys() or len(n_experts) != 1 or not any(p.ndim > 2 for p in weights.values()):
            raise ValueError(
                f"Experts is for a module whose own weights are (experts, ...) in dim 0, but {name!r} is a "
                f"{type(module).__name__} with {shapes}: name the module that holds the experts, or "
                "stack the weights of a list of experts"
            )
        if any(True for _ in module.buffers()):
            raise ValueError(f"Experts cuts weights, but {name!r} has buffers, too: keep them outside of the experts")
        needed = _needed(module.forward)
        if len(needed) != 3:
            raise ValueError(
                f"Experts is for a module whose forward takes (tokens, experts of each, their weights), but that of "
                f"{name!r} takes ({', '.join(needed)})"
            )
        cut = {
            weight: weights[weight].shape[dim]
            for weight, dim in self.tp.items()
            if weight in weights and isinstance(dim, int) and 0 < dim < weights[weight].ndim
        }
        known = self.tp.keys() == cut.keys() == weights.keys()
        if self.tp and not (known and all(size % tp_size == 0 for size in cut.values())):
            raise ValueError(
                f"Experts(tp=) should cut each weight of {name!r}, {shapes}, in a dim from 1 that tp={tp_size} "
                f"divides, or none, but given {self.tp}"
            )
        if len(set(cut.values())) > 1:
            sizes = ", ".join(f"{weight} in {size}" for weight, size in cut.items())
            raise ValueError(
                f"Experts(tp=) should cut all weights of {name!r} between the same features, but given {sizes}: a "
                "weight that holds gates and values is not cut right; leave tp= out, and tp peers compute full experts"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axes, n_experts = device_mesh.mesh_dim_names, len(next(module.parameters()))
        for name, weight in list(module.named_parameters(recurse=False)):
            dims = {"ep": 0} | ({"tp": self.tp[name]} if name in self.tp else {})
            placements = [Shard(dims[axis]) if axis in dims else Replicate() for axis in axes]
            part = distribute_tensor(weight.detach(), device_mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))
        over_ep = "ep" in axes
        for count in ("num_experts", "n_experts") if over_ep else ():  # read by transformers' forward, and by others
            if vars(module).get(count) == n_experts:
                setattr(module, count, n_experts // get_mesh().ep_size)
        tp_mesh = get_mesh().device_mesh["tp"] if "tp" in axes and self.tp else None
        module.forward = _OverRanks(module, n_experts, over_ep, tp_mesh)
        return module


class _OverRanks:
    """The forward of a module whose experts, or parts of them, are on several ranks.

    Args:
        module: it holds this rank's part of the weights.
        n_experts: on all ep ranks together.
        over_ep: whether other ep ranks hold other experts.
        tp_mesh: the tp peers that hold other parts of the same experts; None if there are none.
    """

    def __init__(self, module: nn.Module, n_experts: int, over_ep: bool, tp_mesh: DeviceMesh | None) -> None:
        self.module, self.forward, self.n_experts = module, module.forward, n_experts
        self.over_ep, self.tp_mesh = over_ep, tp_mesh
        self.signature, self.names = inspect.signature(module.forward), _needed(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self.signature.bind(*args, **kwargs)
        x, index, weights = (given.arguments[name] for name in self.names)
        if any(isinstance(tensor, DTensor) for tensor in (x, index, weights)):
            raise ValueError(
                "experts should get full tokens as plain tensors, but get a DTensor: let the layers before them in "
                "tensor_plan return full outputs (not ddl.Sequence's parts)"
            )
        others = [value for name, value in given.arguments.items() if name not in self.names]
        if any(tensor.ndim or self.tp_mesh is not None for tensor in tensors_of(others)):
            raise ValueError(
                "experts on several ranks should get no tensors besides tokens, their experts and the weights of "
                "these, since each rank has other experts, tokens in another order, or a part of a sum, but get "
                f"{', '.join(str(tuple(tensor.shape)) for tensor in tensors_of(others))}: make what experts have a "
                "weight (experts, ...) of the module that holds them, multiply x or the weights by what tokens have"
            )
        if not self.over_ep:
            return self.on_this_rank(x, index, weights, given)
        dispatch = Dispatch(index, self.n_experts, get_mesh())
        rows, local_index = dispatch.to_experts(x), dispatch.local.unsqueeze(1)
        outputs = self.on_this_rank(rows, local_index, rows.new_ones(local_index.shape), given)
        return combined(dispatch.to_tokens(outputs), dispatch.order, weights, x)

    def on_this_rank(
        self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, given: inspect.BoundArguments
    ) -> torch.Tensor:
        """What this rank's experts make of tokens that it has, the sum of all parts of an expert."""

        def made_of(*tokens: torch.Tensor) -> torch.Tensor:
            given.arguments.update(zip(self.names, tokens, strict=True))
            return self.forward(*given.args, **given.kwargs)

        uncut = dict(self.module._parameters)
        local = {name: local_tensor(p) for name, p in uncut.items()}
        self.module._parameters.update(local)  # DTensor knows no sums over the tokens of other ranks
        try:
            if not len(x):
                with torch.no_grad():  # of one token, for the shape
                    made = made_of(*(t.new_zeros(1, *t.shape[1:]) for t in (x, index, weights)))
                # so that backward passes, which communicate, reach this rank's weights, too
                return x.new_zeros(0, *made.shape[1:]) + sum(t.flatten()[:0].sum() for t in (x, *local.values()))
            if self.tp_mesh is not None:
                x, weights = (with_summed_gradient(tensor, self.tp_mesh) for tensor in (x, weights))
            outputs = made_of(x, index, weights).to(x.dtype)
        finally:
            self.module._parameters.update(uncut)
        return outputs if self.tp_mesh is None else summed(outputs, self.tp_mesh)


def _needed(forward: Callable) -> list[str]:
    parameters = inspect.signature(forward).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def dim_to_shard(shape: Sequence[int], copies: int) -> int | None:
    """The dim in which FSDP2 cuts an ep rank's part of a weight over the ranks that have the same experts, if any.

    Not in dim 0, which ep has cut already, unless it is the only one and there is a single copy.
    """
    if copies == 1 and len(shape) == 1:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % copies == 0), None)


def check_experts_of(
    modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], ep: int, tp_size: int, copies: int | None
) -> None:
    """Refuses a mesh with ep whose plan names no experts, and experts that cannot be cut.

    Args:
        modules: those of the full model, by name.
        styles: the styles of the plan, by names of modules.
        ep: number of ranks that share experts.
        tp_size: number of tp ranks.
        copies: number of ranks over which ``shard=True`` cuts once more what an ep rank holds; None: it does not.
    """
    of_experts = _styles_of_experts(styles)
    if ep > 1 and not of_experts:
        raise ValueError(
            f'ep={ep} should share experts, but tensor_plan names none: {{"blocks.*.moe.experts": ddl.Experts()}}'
        )
    for name, style in of_experts.items():
        n_experts = len(next(modules[name].parameters()))
        own = {key: value for key, value in vars(modules[name]).items() if key not in ("_parameters", "_modules")}
        for attribute, value in own.items() if ep > 1 else ():
            if any(tensor.shape[:1] == (n_experts,) for tensor in tensors_of(value)):
                raise ValueError(
                    f"ep={ep} should cut what {name!r} has of each of its {n_experts} experts, but {attribute!r} holds "
                    "a tensor of that length, which is no weight: make it an nn.Parameter (experts, ...), with "
                    "requires_grad=False if it is not trained, or compute it in forward"
                )
        for weight_name, weight in modules[name].named_parameters():
            if len(weight) % ep:
                raise ValueError(f"ep={ep} should divide the experts of {name!r}, but there are {len(weight)}")
            shape = [n // tp_size if dim == style.tp.get(weight_name) else n for dim, n in enumerate(weight.shape)]
            if copies is not None and ep > 1 and dim_to_shard(shape, copies) is None:
                raise ValueError(
                    f"shard=True cuts what an ep rank holds of '{name}.{weight_name}', (experts, ...) {tuple(shape)}, "
                    f"over its {copies} copies in a dim from 1, but {copies} divides none: use another width, or a "
                    "larger ep"
                )


def _styles_of_experts(styles: Mapping[str, ParallelStyle]) -> dict[str, Experts]:
    return {name: style for name, style in styles.items() if isinstance(style, Experts)}


def apply_experts(model: nn.Module, styles: Mapping[str, ParallelStyle], mesh: Mesh) -> None:
    """Cuts the experts that ``styles`` names; names that the model, or this rank's stages, do not have are ignored."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, style in _styles_of_experts(styles).items():
        if name not in modules or isinstance(modules[name].forward, _OverRanks):  # of a lazy layer: cut already
            continue
        if mesh.ep_size > 1:
            style._apply(modules[name], mesh.expert_mesh["ep", "tp"] if mesh.tp_size > 1 else mesh.expert_mesh["ep"])
        elif mesh.tp_size > 1 and style.tp:
            style._apply(modules[name], mesh.device_mesh["tp"])


def experts_of(module: nn.Module) -> Iterable[nn.Module]:
    """The modules inside whose experts are on several ep ranks."""
    return (m for m in module.modules() if isinstance(m.forward, _OverRanks) and m.forward.over_ep)
