"""Tensor parallelism: a plan of styles, by module name, applied on the tp axis; and its random numbers.

A plan is a dict from globs of module names to styles: those of this file, which check that nothing is cut that must
stay whole, or torch's own. What the plan leaves out stays replicated on every tp rank. `docs/tensor_styles.md`
lists what each style moves, counted.

**Cut and whole.** The input and the output of a styled module are plain tensors, as the module's code expects:
whole, or this rank's part. :class:`Column` and :class:`OutputChannels` leave their output cut, :class:`Row` and
:class:`InputChannels` take it cut and give the whole again. Between the two, code sees fewer heads, features or
channels than it asked for. What works on each by itself and has no weights (ReLU, pooling, attention of a head) needs
no style. A weight that all of them share (``nn.PReLU``, a norm of each head) gets a part of its gradient on each rank:
:class:`SharedWeight` sums it, and the trainer raises an error where a plan forgets it. Weights of single channels
(BatchNorm, GroupNorm, ``nn.PReLU(C)``) have no style, and what mixes features, such as a softmax over them, has no
place there.

**Random numbers.** The rule, which is the same on every device:

1. Each model replica has one random stream, that of torch's default generator. ``ddl.auto_model`` gives every rank
   of a replica (its tp and pp peers) the state of the replica's first rank. From then on they stay alike if all of
   them draw alike: one ``torch.rand(1)`` on one rank alone, and replicated dropout drops other values on each.
2. *Replicated regions*, which are all modules but those of 3, draw from it: the same on all tp peers, and just what
   one process draws.
3. *Sharded regions*, which are the modules that :class:`ShardedRandom` and :class:`Sequence` name, draw from a stream
   of each tp rank: at each call in training a number n is drawn from the replica's stream, and on tp rank r the
   module draws from a stream seeded with n + r.
4. Under pp, each batch takes one number n from the replica's stream; the forward pass of microbatch m on stage s is
   a draw from a stream seeded with n + 2²⁰·s + m, to which 2 and 3 apply.
5. dp ranks keep the streams that you seeded, as in idist: seeded alike they draw alike masks for their different
   rows; for masks of their own call ``torch.manual_seed(seed + ddl.get_mesh().dp_rank)`` before ``auto_model``.

So the replica's stream is all the state there is: torch's own ``get_rng_state`` is enough to resume, and activation
checkpointing, which restores it, draws the same masks again.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ignite_ddl.mesh import Mesh

__all__ = [
    "Column",
    "InputChannels",
    "OutputChannels",
    "Row",
    "Sequence",
    "ShardedRandom",
    "SharedInput",
    "SharedWeight",
    "SplitSequence",
    "WholeWeights",
    "apply_plan",
    "check_plan",
    "cross_entropy",
    "lay_out_gradient",
    "random_stream",
    "share_random_stream",
]

# -------------------------------------------------------------------------------------- linear layers, embeddings


class Column(ColwiseParallel):
    """Each tp rank computes some of the outputs of a linear layer: its weight is cut by rows of ``out_features``.

    Forward: no communication (the output stays cut, unless ``output_layouts`` says otherwise). Backward: the
    gradient of the input is summed over tp. Shoeybi et al. 2019, "Megatron-LM", section 3. For an ``nn.Embedding``
    the columns of its weight are cut: each rank knows a part of every vector.

    A layer whose output does not stay cut by equal parts may be uneven, such as a head for 65 characters:
    ``output_layouts=Replicate()`` gathers the logits, ``use_local_output=False`` leaves them cut, as a DTensor for
    :func:`cross_entropy`.

    Args:
        units: how many parts of the output must stay whole, such as attention heads: a number, or the name of
            an attribute of the module that contains the layer. Default: single outputs. Of a layer that computes
            queries, keys and values in one, the output has to be in the order of heads: (head, q or k or v, width).
        kwargs: ``input_layouts``, ``output_layouts``, ``use_local_output`` of torch's ``ColwiseParallel``.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import Column, Row

            plan = {"block*.attention.[qkv]": Column(units="n_heads"), "block*.attention.out": Row()}
    """

    def __init__(self, *, units: int | str | None = None, **kwargs: Any) -> None:
        if units is not None and not isinstance(units, str):
            _check_units(units, f"units={units!r}")
        for argument in ("input_layouts", "output_layouts"):
            _check_layout(self, argument, kwargs.get(argument))
        super().__init__(**kwargs)
        self.units = units

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` would cut a unit."""
        _check_is_layer(self, name, module)
        dim = 1 if isinstance(module, nn.Embedding) else 0
        size = module.weight.shape[dim]
        units, what = size, f"{'columns' if dim else 'rows'} of the weight"
        if isinstance(self.units, str):
            if not hasattr(parent, self.units):
                raise ValueError(
                    f"units={self.units!r} of {name!r} should be an attribute of its parent, but "
                    f"{type(parent).__name__} has none of that name"
                )
            units, what = getattr(parent, self.units), self.units
            _check_units(units, f"units={self.units!r} of {name!r}")
        elif self.units is not None:
            units, what = self.units, "units"
        if self.units is None and not _stays_cut(self):
            _check_uneven(tp_size, size, what, name)
        elif units % tp_size:
            raise ValueError(f"tp={tp_size} should divide the {units} {what} of {name!r}, but does not")
        elif size % units:
            raise ValueError(f"the {units} {what} of {name!r} should divide its {size} outputs, but do not")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        uneven = module.weight.shape[isinstance(module, nn.Embedding)] % device_mesh.size()
        module = super()._apply(module, device_mesh)
        if uneven and self.use_local_output:  # torch gathers with padding and leaves it out
            module.register_forward_hook(_without_gaps)
        return module


class Row(RowwiseParallel):
    """Each tp rank computes a part of every output from its part of the inputs: the weight is cut by columns.

    Forward: the partial outputs are summed over tp. Backward: no communication. Shoeybi et al. 2019, "Megatron-LM",
    section 3. For an ``nn.Embedding`` it is the vocabulary that is cut, evenly or not: a rank looks up the tokens
    that it knows, and the sum knows all. (Its gradient is whole on every rank, V × D, until the trainer cuts it.)

    Args:
        kwargs: ``input_layouts``, ``output_layouts``, ``use_local_output`` of torch's ``RowwiseParallel``. The
            input of a linear layer is cut along its last dim by default, that of an embedding is whole.

    Examples:
        .. code-block:: python

            from torch.distributed.tensor import Replicate
            from ignite_ddl.tensor import Column, Row

            plan = {"embed": Row(), "head": Column(output_layouts=Replicate())}      # both by vocabulary
    """

    def __init__(self, *, input_layouts: Placement | None = None, **kwargs: Any) -> None:
        _check_layout(self, "input_layouts", input_layouts)
        _check_layout(self, "output_layouts", kwargs.get("output_layouts"))
        super().__init__(input_layouts=input_layouts, **kwargs)
        self.whole_input_of_embeddings = input_layouts is None

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` does not divide what is cut."""
        _check_is_layer(self, name, module)
        if isinstance(module, nn.Embedding):
            _check_uneven(tp_size, module.weight.shape[0], "entries of the vocabulary", name)
        elif module.weight.shape[1] % tp_size:
            size = module.weight.shape[1]
            raise ValueError(
                f"tp={tp_size} should divide the {size} columns of the weight of {name!r}, but does not"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = copy.copy(self)  # torch's, too, writes into the style, which may be that of other layers
        if isinstance(module, nn.Embedding) and self.whole_input_of_embeddings:
            style.input_layouts = (Replicate(),)
        return super(Row, style)._apply(module, device_mesh)


class SharedInput(PrepareModuleInput):
    """The input of a module is made ready once for all :class:`Column` layers inside that read it.

    Forward: an input that is cut along the sequence is gathered; a whole one moves nothing. Backward: the gradients
    of all those layers are added on each rank and then summed over tp once, not once a layer. For attention, whose
    queries, keys and values are computed from one input, the module's first positional argument; others, such as a
    mask, come through as they are.

    Args:
        input_layouts: how the input arrives: ``Replicate()``, the default, or ``Shard(1)`` where a sequence-parallel
            region ends.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import Column, Row, SharedInput

            plan = {
                "block*.attention": SharedInput(),
                "block*.attention.[qkv]": Column(units="n_heads"),
                "block*.attention.out": Row(),
            }
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        _check_layout(self, "input_layouts", input_layouts)
        super().__init__(input_layouts=input_layouts or Replicate(), desired_input_layouts=Replicate())

    def _prepare_input_fn(self, inputs: tuple, device_mesh: DeviceMesh) -> tuple:
        if not (inputs and isinstance(inputs[0], torch.Tensor)):
            raise ValueError(
                "SharedInput takes the first positional argument of its module, which should be a tensor, but given "
                f"{type(inputs[0]).__name__ if inputs else 'keyword arguments only'}"
            )
        return (*super()._prepare_input_fn(inputs[:1], device_mesh), *inputs[1:])


def _check_units(units: Any, what: str) -> None:
    if isinstance(units, bool) or not isinstance(units, int) or units < 1:
        raise ValueError(f"{what} should be a positive whole number, but is {units!r}")


def _check_layout(style: ParallelStyle, argument: str, layout: Any) -> None:
    if layout is not None and not isinstance(layout, Placement):
        raise ValueError(
            f"{argument} of {type(style).__name__} should be a placement such as Replicate() or Shard(1), but given "
            f"{layout!r}"
        )


def _check_is_layer(style: ParallelStyle, name: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Linear | nn.Embedding):
        kin = "OutputChannels" if isinstance(style, Column) else "InputChannels"
        hint = f"; ddl.{kin} is for convolutions" if isinstance(module, _CONVOLUTIONS) else ""
        raise ValueError(
            f"{type(style).__name__} cuts an nn.Linear or nn.Embedding, but {name!r} is a "
            f"{type(module).__name__}{hint}"
        )
    for option in ("max_norm", "sparse"):
        if getattr(module, option, None):
            raise ValueError(
                f"{type(style).__name__} cuts an nn.Embedding without {option}, but {name!r} has "
                f"{option}={getattr(module, option)}: torch's DTensor cannot do that; leave it out of the plan"
            )


def _check_uneven(tp_size: int, size: int, what: str, name: str) -> None:
    """torch cuts 65 rows on 4 ranks as 17, 17, 17, 14; a rank with none would leave its peers waiting."""
    if -(-size // tp_size) * (tp_size - 1) >= size > 0 and tp_size > 1:
        raise ValueError(
            f"tp={tp_size} cuts the {size} {what} of {name!r} so that a rank has none; use fewer tp ranks"
        )


# ------------------------------------------------------------------------------------------------ convolutions

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class OutputChannels(ParallelStyle):
    """Each tp rank computes some of the output channels of a convolution: :class:`Column` for images.

    Forward: no communication, the output is this rank's channels. Backward: the gradient of the input is summed over
    tp. Weight and bias are DTensors cut along dim 0; the convolution runs on their local parts, since DTensor's own
    ``conv2d`` is wrong there: from torch 2.11 to 2.13 it computes a rank's channels and calls them all of them.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import InputChannels, OutputChannels

            plan = {"conv1": OutputChannels(), "conv2": InputChannels()}     # ReLU and pooling between them

    A BatchNorm, GroupNorm or ``nn.PReLU(C)`` between them would see fewer channels than its weights are made for, and
    no style cuts it: an error, at once in an ``nn.Sequential``, else in the first forward pass. ``nn.PReLU()`` is a
    :class:`SharedWeight`.
    """

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` does not divide the output channels."""
        _check_is_convolution(self, name, module)
        _check_divides(tp_size, module.out_channels, "output channels", name)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut = {"weight": Shard(0), "bias": Shard(0)}
        return _on_local_parts(module, device_mesh, cut, _OutputChannels)


class InputChannels(ParallelStyle):
    """Each tp rank convolves some of the input channels: :class:`Row` for images.

    Forward: the partial outputs are summed over tp, then the bias is added, once. Backward: no communication. The
    weight is a DTensor cut along dim 1, the bias is whole.

    Args:
        whole_input: whether the input arrives with all its channels, of which each rank takes its own; the gradient
            of the input is gathered then. Default False: it arrives cut, say from :class:`OutputChannels`.

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

    def __init__(self, *, whole_input: bool = False) -> None:
        super().__init__()
        self.whole_input = whole_input

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` does not divide the input channels."""
        _check_is_convolution(self, name, module)
        _check_divides(tp_size, module.in_channels, "input channels", name)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut = {"weight": Shard(1), "bias": Replicate()}
        module = _on_local_parts(module, device_mesh, cut, _InputChannels)
        if self.whole_input:
            layouts = {
                "input_layouts": Replicate(),
                "desired_input_layouts": Shard(1),
                "use_local_output": True,
            }
            PrepareModuleInput(**layouts)._apply(module, device_mesh)
        return module


class _OutputChannels:
    """Mixed into the class of a convolution, before it."""

    def _conv_forward(self, x: torch.Tensor, weight: DTensor, bias: DTensor | None) -> torch.Tensor:
        # Whole on each rank; its gradient is a part of the sum over tp.
        x = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
        x = x.to_local(grad_placements=[Partial()])
        return super()._conv_forward(x, weight.to_local(), None if bias is None else bias.to_local())


class _InputChannels:
    """Mixed into the class of a convolution, before it."""

    def _conv_forward(self, x: torch.Tensor, weight: DTensor, bias: DTensor | None) -> torch.Tensor:
        mesh = weight.device_mesh
        part = super()._conv_forward(x, weight.to_local(), None)
        total = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        y = total.redistribute(placements=[Replicate()]).to_local()
        if bias is None:
            return y
        return y + bias.to_local().view(-1, *[1] * (weight.ndim - 2))  # once, not once a rank


def _on_local_parts(
    module: nn.Module, mesh: DeviceMesh, cut: Mapping[str, Placement], mixin: type
) -> nn.Module:
    for name, placement in cut.items():
        whole = getattr(module, name)
        if whole is not None:
            part = distribute_tensor(whole, mesh, [placement])
            module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
    # As FSDP2 does it: the module keeps its identity, its hooks and its place, and gets another forward pass.
    module.__class__ = type(f"{mixin.__name__[1:]}{type(module).__name__}", (mixin, type(module)), {})
    return module


def _check_is_convolution(style: ParallelStyle, name: str, module: nn.Module) -> None:
    kind = type(style).__name__
    if not isinstance(module, _CONVOLUTIONS):
        raise ValueError(f"{kind} cuts an nn.Conv1d, 2d or 3d, but {name!r} is a {type(module).__name__}")
    if module.groups != 1:
        raise ValueError(
            f"{kind} cuts a convolution with groups=1, but {name!r} has groups={module.groups}: its channels do not "
            "all meet; leave it out of the plan"
        )


def _check_divides(tp_size: int, size: int, what: str, name: str) -> None:
    if size % tp_size:
        raise ValueError(f"tp={tp_size} should divide the {size} {what} of {name!r}, but does not")


# -------------------------------------------------------------------------------------------------- shared weights


class SharedWeight(ParallelStyle):
    """A module inside a sharded region whose weights all heads, features or channels share: ``nn.PReLU()``, a norm of
    each head, a learned scale.

    Each rank computes with the whole weight on its own part, so its gradient is a part of a sum. Forward: no
    communication. Backward: the gradients of the weights are summed over tp before the optimizer steps. It is for the
    weights that the module itself holds; modules inside it have names and styles of their own.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import Column, Row, SharedWeight

            plan = {"up": Column(), "act": SharedWeight(), "down": Row()}      # act is nn.PReLU()
            plan |= {"block*.attention.[qk]_norm": SharedWeight()}             # norms of each head
    """

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if the module holds no weights, or some of single channels."""
        kind = type(module).__name__
        if not any(True for _ in module.parameters(recurse=False)):
            raise ValueError(f"SharedWeight is for a module that holds weights, but {name!r} is a {kind}")
        if _is_by_channel(module):
            raise ValueError(
                f"SharedWeight is for weights that all channels share, but {name!r} is a {kind} with some for each "
                "channel: keep it outside the sharded region"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = {name: Replicate() for name, _ in module.named_parameters(recurse=False)}
        return _on_local_parts(module, device_mesh, whole, _SharedWeight)


def _is_by_channel(module: nn.Module) -> bool:
    """Whether a part of the channels is not what it is made for."""
    if isinstance(module, nn.PReLU):
        return module.num_parameters > 1
    norm = isinstance(module, nn.modules.batchnorm._NormBase) and bool(module.state_dict())
    return norm or isinstance(module, nn.GroupNorm)  # whose groups would be others


class _SharedWeight:
    """Mixed into the class of a module, before it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole = dict(self._parameters)
        try:
            for name, weight in whole.items():
                if weight is not None:  # a plain tensor, whose gradient is a part of the sum over tp
                    self._parameters[name] = weight.to_local(grad_placements=[Partial()])
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(whole)


class WholeWeights:
    """Asks once of each weight that a plan leaves whole whether all tp peers have the same gradient of it.

    They have not where their parts of features, heads, channels or tokens share the weight, or where they saw different
    rows or drew different numbers; the copies would drift apart, without an error. The trainer asks in the first step,
    by one all-gather of 16 numbers a weight, and, of weights that have no gradient yet, in up to nine more.

    Args:
        mesh: whose tp ranks are compared.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.steps_left, self.agreed = mesh, 10, set()

    def check(self, model: nn.Module) -> None:
        """All tp peers call it, after the backward pass.

        Args:
            model: what ``ddl.auto_model`` returned.

        Raises:
            ValueError: on all tp peers, if they have different gradients of a weight that each holds whole.
        """
        if self.steps_left == 0:
            return
        self.steps_left -= 1
        asked = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in self.agreed and not _is_on_tp(parameter)
        }
        if not asked:
            return
        here = torch.stack([_digest(parameter.grad) for parameter in asked.values()])
        peers = [torch.empty_like(here) for _ in range(self.mesh.tp_size)]
        dist.all_gather(peers, here, group=self.mesh.tp_group)
        peers = torch.stack(peers).cpu()  # (tp, weights, 16)
        sizes = peers[..., 8:].norm(dim=2).amax(dim=0)
        differences = (peers - peers[0]).norm(dim=2).amax(dim=0)
        # Far below the others it is what rounding left of a gradient that should be zero.
        rounding = sizes.max() * max(torch.finfo(parameter.dtype).eps for parameter in asked.values()) ** 0.5
        for name, size, difference in zip(asked, sizes, differences, strict=True):
            if size > rounding:
                self.agreed.add(name)
                if difference > 0.01 * size:
                    raise ValueError(
                        f"tp ranks have different gradients of {name!r}, which tensor_plan leaves whole on each of "
                        "them. If it works on a part of the heads, features, channels or tokens, name its module in "
                        "the plan: ddl.SharedWeight(), or ddl.Sequence() for tokens. Else the ranks saw different rows "
                        "or drew different random numbers"
                    )


def _is_on_tp(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())


def _digest(gradient: torch.Tensor | None) -> torch.Tensor:
    """16 numbers: of each eighth its sum and its norm, scaled so that they differ by no more than gradients do."""
    if gradient is None:
        return torch.zeros(16, dtype=torch.float64, device=idist.device())
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    parts = local.detach().to(idist.device(), torch.float64).flatten().tensor_split(8)
    sums = [part.sum() / max(len(part), 1) ** 0.5 for part in parts]
    return torch.stack(sums + [part.norm() for part in parts])


# ------------------------------------------------------------------------------------------- sequence parallelism


class SplitSequence(PrepareModuleOutput):
    """A sequence-parallel region begins: of a module's whole output, each tp rank keeps its part of the sequence.

    Forward: no communication. Backward: the gradient is gathered. Between here and a layer with
    ``input_layouts=Shard(1)``, a tensor holds ``T / tp`` of the T tokens; every module there that has weights is in
    the plan as :class:`Sequence`, and so is every module that draws. Korthikanti et al. 2022, "Reducing Activation
    Recomputation in Large Transformer Models", section 4.2.2.

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

    def __init__(self, *, dim: int = 1) -> None:
        super().__init__(output_layouts=Replicate(), desired_output_layouts=Shard(dim))
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_check_sequence, self.dim, device_mesh.size()))
        super()._apply(module, device_mesh)
        module.register_forward_hook(_without_gaps)
        return module


def _without_gaps(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A part of a tensor is a view with gaps. A pipeline stage may end here, and torch 2.11 compares strides."""
    return output.clone(memory_format=torch.contiguous_format)


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

    Forward: no communication. Backward: the gradients of the weights, which every rank holds whole, are summed over
    tp before the optimizer steps. What it draws follows the rule for sharded regions, so ``nn.Dropout`` between
    sequence-parallel layers is a ``Sequence`` too. For a norm of each head, which also sees a part, it is
    :class:`SharedWeight`. Korthikanti et al. 2022, section 4.2.2.

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

    def __init__(self, *, dim: int = 1) -> None:
        super().__init__(sequence_dim=dim, use_local_output=True)

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if the module has weights and is no norm over the last dims."""
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
        for parameter in frozen:  # torch lets them train
            module.get_parameter(parameter).requires_grad_(False)


# -------------------------------------------------------------------------------------------------- random numbers


class ShardedRandom(ParallelStyle):
    """A module inside a sharded region draws from a stream of its tp rank, by the rule at the top of this file.

    For dropout between :class:`Column` and :class:`Row`, and for attention's own: without it, all tp ranks would
    draw one mask for their different features or heads. It moves nothing. In evaluation nothing is drawn.

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


def draw_seed() -> int:
    """A number from the CPU's stream, to seed others with."""
    return int(torch.randint(2**62, ()))


@contextlib.contextmanager
def random_stream(seed: int) -> Iterator[None]:
    """Inside, torch draws from a stream of its own, on the CPU and on this rank's device; after it, as before.

    Args:
        seed: where the stream starts.
    """
    generators = [torch.default_generator]
    if idist.device().type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    before = [(generator, generator.get_state()) for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def share_random_stream(mesh: Mesh) -> None:
    """Gives tp and pp peers the random state of their replica's first rank; all ranks call it."""
    for group, first in ((mesh.tp_group, {"tp": 0}), (mesh.pp_group, {"pp": 0})):
        source = mesh.rank_at(**(mesh.coordinates(mesh.rank) | first))
        state = torch.get_rng_state().to(idist.device())
        dist.broadcast(state, src=source, group=group)
        torch.set_rng_state(state.cpu())
        if idist.device().type == "cuda":
            state = torch.cuda.get_rng_state().to(idist.device())
            dist.broadcast(state, src=source, group=group)
            torch.cuda.set_rng_state(state.cpu())


# ------------------------------------------------------------------------------------------------------- the loss


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy``, also of logits that tp ranks hold by vocabulary, and that are never gathered.

    Cut logits come from a head with ``Column(use_local_output=False)``. Three numbers a row are reduced over tp:
    its largest logit, its sum of exponentials, the logit of its target (Shoeybi et al. 2019, "Megatron-LM",
    section 3). The gradient takes no communication. It is torch's ``loss_parallel``, with the gradient computed on
    the spot, so that ``backward()`` may be called anywhere, once: it has no second derivative. Half-precision logits
    are computed with in float32. Whole logits go to ``F.cross_entropy`` as they are.

    Args:
        logits: scores of shape (N, C) or (N, C, ...); a DTensor cut along the classes, or a plain tensor.
        target: class indices of shape (N,) or (N, ...), the same on all tp peers.
        ignore_index: a target that does not count, default -100.
        reduction: "mean" (default), "sum" or "none".
        weight: of each class. For whole logits only.
        label_smoothing: default 0.0. For whole logits only.

    Returns:
        Tensor: the loss, a plain tensor that is the same on all tp peers; float32 for cut logits in half precision.

    Raises:
        ValueError: if logits are cut, but not along the classes, or ``target``, ``weight`` or ``label_smoothing``
            is something that cut logits do not support, or ``target`` has another shape; nothing has been sent then.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def losses(local_rank):
                torch.manual_seed(0)
                head = ddl.auto_model(torch.nn.Linear(4, 65), {"": ddl.Column(use_local_output=False)})
                x, target = torch.randn(8, 4), torch.randint(65, (8,))
                return ddl.cross_entropy(head(x), target).item()

            with ddl.Parallel(backend="gloo", nproc_per_node=2, tp=2) as parallel:
                assert all(abs(loss - losses(0)) < 1e-6 for loss in parallel.run(losses))
    """
    if not isinstance(logits, DTensor) or all(placement.is_replicate() for placement in logits.placements):
        logits = logits.to_local() if isinstance(logits, DTensor) else logits
        options = {"ignore_index": ignore_index, "reduction": reduction, "weight": weight}
        return F.cross_entropy(logits, target, **options, label_smoothing=label_smoothing)
    classes = 1 if logits.ndim > 1 else 0
    if logits.device_mesh.ndim > 1 or not logits.placements[0].is_shard(classes):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} should be cut along dim {classes}, the classes, but are cut "
            f"as {logits.placements}; of (N, T, C) take logits.flatten(0, 1) and target.flatten()"
        )
    if label_smoothing:
        raise ValueError(
            f"label_smoothing should be 0 for logits that are cut by vocabulary, but given {label_smoothing}; "
            "it needs the sum of all logits: gather them, by Column(output_layouts=Replicate())"
        )
    if weight is not None:
        raise ValueError(
            "weight should be None for logits that are cut by vocabulary: gather them, by "
            "Column(output_layouts=Replicate())"
        )
    if target.is_floating_point():
        raise ValueError(
            f"target should be class indices for logits that are cut by vocabulary, but given {target.dtype} "
            "probabilities: gather the logits, by Column(output_layouts=Replicate())"
        )
    if reduction not in ("mean", "sum", "none"):  # torch would say it too late to put its own handlers back
        raise ValueError(f'reduction should be "mean", "sum" or "none", but given {reduction!r}')
    rows = logits.shape[:classes] + logits.shape[classes + 1 :]
    if target.shape != rows:
        raise ValueError(
            f"target should be of shape {tuple(rows)} for logits of shape {tuple(logits.shape)}, but is of "
            f"{tuple(target.shape)}"
        )
    if target.device.type == "cpu":  # elsewhere it would wait for the device
        outside = target[((target < 0) | (target >= logits.shape[classes])) & (target != ignore_index)]
        if len(outside):
            raise ValueError(
                f"target should be below the {logits.shape[classes]} classes, but has {int(outside[0])}"
            )
    options = {"ignore_index": ignore_index, "reduction": reduction}
    return _CutCrossEntropy.apply(logits.to_local(), logits._spec, target, options)


class _CutCrossEntropy(torch.autograd.Function):
    """torch's ``loss_parallel`` wants the backward pass under it as well, which is then somebody else's."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, spec: Any, target: torch.Tensor, options: dict
    ) -> torch.Tensor:
        # A scaled loss saves small gradients from half precision only if they are not rounded before it is applied.
        precise = local.detach().to(torch.promote_types(local.dtype, torch.float32))
        logits = DTensor.from_local(
            *(precise, spec.device_mesh, spec.placements),
            run_check=False,
            shape=spec.shape,
            stride=spec.stride,
        )
        logits.requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad(), loss_parallel():
            loss = F.cross_entropy(logits, target, **options)
            if ctx.needs_input_grad[0]:
                # A row's gradient holds none of another row, so the gradient of the sum serves "none" too.
                ctx.save_for_backward(torch.autograd.grad(loss.sum(), logits)[0].to_local())
        ctx.dtype = local.dtype
        return loss.detach().to_local()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,), (grad_output,) = ctx.saved_tensors, grad_outputs
        if grad_output.ndim:
            grad_output = grad_output.unsqueeze(1)
        return (gradient * grad_output).to(ctx.dtype), None, None, None


# ------------------------------------------------------------------------------------------------------- the plan


def check_plan(model: nn.Module, plan: Mapping[str, ParallelStyle], tp_size: int) -> dict[str, ParallelStyle]:
    """The style of each module that the plan names.

    Args:
        model: the whole model.
        plan: globs of module names to styles; ``*`` and ``[...]`` as in ``fnmatch``, matched part by part
            between the dots. Where two keys match a module, the later one holds.
        tp_size: number of tp ranks.

    Returns:
        dict: full module names to styles.

    Raises:
        ValueError: if ``plan`` is no dict of styles by name, a key matches no module, a style cannot cut a module
            ``tp_size`` times, or a module or weight that has several names is to be cut in two ways.
    """
    if not isinstance(plan, Mapping) or not all(isinstance(key, str) for key in plan):
        raise ValueError(
            f"tensor_plan should be a dict from globs of module names to styles, but given {plan!r}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    styles: dict[str, ParallelStyle] = {}
    for key, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ValueError(
                f"tensor_plan[{key!r}] should be a style such as ddl.Column(), but given {style!r}"
            )
        names = [name for name in modules if _matches(name, key)]
        if not names:
            known = ", ".join(
                name for name, module in modules.items() if list(module.parameters(recurse=False))
            )
            raise ValueError(
                f"tensor_plan has the key {key!r}, which matches no module; those with weights: {known}"
            )
        styles |= dict.fromkeys(names, style)
    for name, style in styles.items():
        if hasattr(style, "check"):
            style.check(name, modules[name], modules[name.rpartition(".")[0]], tp_size)
    if tp_size > 1:
        _check_channels(modules, styles)
    _check_agreement(model, modules, styles)
    return styles


def _check_channels(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]) -> None:
    """What stands between a layer that cuts and the next with a style, where the order of layers can be seen."""
    for name, module in modules.items():
        if type(module).forward is not nn.Sequential.forward:
            continue
        cut_by = ""
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            style = styles.get(full_name)
            if style is not None and not isinstance(style, ShardedRandom | SharedWeight):
                cut_by = full_name if isinstance(style, OutputChannels) or _stays_cut(style) else ""
            elif cut_by and _is_by_channel(child):
                raise ValueError(
                    f"{full_name!r} is a {type(child).__name__} of all channels, but {cut_by!r} before it leaves each "
                    "rank some of them, and no style cuts it: leave its neighbours out of tensor_plan"
                )


def _stays_cut(style: ParallelStyle) -> bool:
    return isinstance(style, Column) and style.use_local_output and not style.output_layouts[0].is_replicate()


def _check_agreement(
    model: nn.Module, modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]
) -> None:
    """What has several names, a module or a weight, is cut in one way."""
    of_module: dict[int, tuple[str, ParallelStyle]] = {}
    for name, style in styles.items():
        first, before = of_module.setdefault(id(modules[name]), (name, style))
        if type(before) is not type(style) or vars(before) != vars(style):
            raise ValueError(
                f"tensor_plan cuts {name!r} otherwise than {first!r}, but they are one module; give both one style"
            )
    for names in _shared_parameters(model):
        owners = [name.rpartition(".") for name in names]
        cuts = []
        for owner, _, attribute in owners:
            _, style = of_module.get(id(modules[owner]), (owner, None))
            cuts.append(_cut_of(style, modules[owner], attribute))
        _check_same(names, cuts)


def _cut_of(style: ParallelStyle | None, module: nn.Module, attribute: str) -> str | None:
    """How a style is going to cut a parameter; None for a style that this file does not know."""
    is_weight, embedding = attribute == "weight", isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel | OutputChannels):
        dim = 1 if embedding else 0
    elif isinstance(style, RowwiseParallel | InputChannels):
        dim = 0 if embedding else 1 if is_weight else None
    elif style is None or type(style).__module__ in (__name__, ColwiseParallel.__module__):
        dim = None
    else:
        return None
    return "replicated" if dim is None else f"(Shard(dim={dim}),)"


def _check_same(names: list[str], cuts: list[str | None]) -> None:
    for cut in cuts[1:]:
        if None not in (cut, cuts[0]) and cut != cuts[0]:
            raise ValueError(
                f"tensor_plan cuts the shared weight {names[0]!r} in two ways: {cuts[0]} and {cut}; give its "
                "modules styles that agree"
            )


def _matches(name: str, key: str) -> bool:
    parts, globs = name.split("."), key.split(".")
    if not name:  # the model itself, which "*" does not mean
        return not key
    return len(parts) == len(globs) and all(
        fnmatch.fnmatchcase(p, g) for p, g in zip(parts, globs, strict=True)
    )


def apply_plan(model: nn.Module, styles: Mapping[str, ParallelStyle], tp_mesh: DeviceMesh) -> None:
    """Cuts the modules of ``model`` that ``styles`` names, in place, and keeps tied weights tied.

    Args:
        model: the model, or the stages of it that this rank holds; names that it lacks are left alone.
        styles: full module names to styles, from :func:`check_plan`.
        tp_mesh: the tp axis of the ``DeviceMesh``.

    Raises:
        ValueError: if two modules share a weight that their styles cut differently, where :func:`check_plan` does
            not know the styles.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    shared = _shared_parameters(model)
    cut = set()  # a module may have several names: it is cut once
    for name, style in styles.items():
        if name in modules and id(modules[name]) not in cut:
            cut.add(id(modules[name]))
            parallelize_module(modules[name], tp_mesh, style)
    for names in shared:  # torch makes a new parameter in each module that it cuts: tie them again
        owners = [(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names]
        first = getattr(*owners[0])
        for owner, attribute in owners[1:]:
            _check_same(names, [_layout(first), _layout(getattr(owner, attribute))])
            setattr(owner, attribute, first)


def lay_out_gradient(parameter: nn.Parameter) -> None:
    """Cuts a gradient as its parameter is cut; all tp peers call it.

    A DTensor's gradient may come back otherwise: an embedding's whole, that of a LayerNorm between sequence-parallel
    layers as a sum that is yet to be made.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _layout(parameter: nn.Parameter) -> str:
    return str(parameter.placements) if isinstance(parameter, DTensor) else "replicated"


def _shared_parameters(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
