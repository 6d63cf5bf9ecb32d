"""The styles of a tensor plan: how each cuts a module, and what the ranks send."""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ignite_ddl.arguments import COUNT, FLAG, TEXT, a, check_count, each, or_none, takes, whole
from ignite_ddl.tensor.random import draw_seed, random_stream

__all__ = [
    "ROW_ORDER",
    "Column",
    "InputChannels",
    "OutputChannels",
    "Row",
    "Sequence",
    "ShardedRandom",
    "SharedInput",
    "SharedWeight",
    "SplitSequence",
    "dim_of_outputs",
    "is_by_channel",
    "stays_cut",
]


_WHOLE = contextvars.ContextVar("whole tensors between cut layers", default=False)


@contextlib.contextmanager
def whole_between_layers() -> Iterator[None]:
    """Inside, code between cut layers sees all features and channels, in the model's order, as in one process."""
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def region_ends(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of ``root`` that take a cut input, with their names."""
    return ((name, m) for name, m in root.named_modules() if getattr(m, "_takes_cut_input", False))


def part_of_input(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """This rank's part of the input of a layer that takes a cut one, which is whole in ``whole_between_layers``."""
    if isinstance(x, DTensor):
        return x.to_local()
    return _part(module, x) if _WHOLE.get() else x


def _part(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mesh = module.weight.device_mesh["tp"]
    dim = x.ndim + 1 - module.weight.ndim if isinstance(module, _CONVOLUTIONS) else -1
    if x.shape[dim] == module.weight.to_local().shape[1 - dim_of_outputs(module)]:  # of a stage that begins here
        return x
    return x.chunk(mesh.size(), dim=dim)[mesh.get_local_rank()].contiguous()


_LAYOUT = or_none(a("a placement such as Replicate() or Shard(1)", Placement))
_FITS = {"input_layouts": _LAYOUT, "output_layouts": _LAYOUT, "use_local_output": FLAG, "dim": whole(-64, 64)}


class _Layouts(TypedDict, total=False):
    input_layouts: Placement | None
    output_layouts: Placement | None
    use_local_output: bool


class Column(ColwiseParallel):
    """Each tp rank computes some of the outputs of a linear layer: its weight is cut along dim 0.

    Forward: no communication (the output stays cut, unless ``output_layouts`` says otherwise). Backward: the
    gradient of the input is summed over tp. Shoeybi et al. 2019, "Megatron-LM", section 3. The weight of an
    ``nn.Embedding`` is cut along dim 1: each rank holds a part of every vector. A ``Conv1D`` of ``transformers`` is a
    linear layer, here and for :class:`Row`.

    The number of outputs may be uneven, such as 65 characters, if the output is not a local tensor:
    ``output_layouts=Replicate()`` gathers the logits, and ``use_local_output=False`` returns a DTensor, for
    :func:`cross_entropy`.

    Args:
        units: number of units of the output that are not divided, such as attention heads, or the name of an
            attribute of the parent module that holds this number. Default: each output is a unit. If one layer
            computes queries, keys and values, its outputs have to be ordered by head (head, q or k or v, width);
            otherwise use ``parts``.
        parts: for a layer that computes several things at once which code separates again (``chunk``, ``split``),
            such as q, k and v, or a gate and its values: their number, or the number of outputs of each. Each part is
            cut separately, so that a rank has its share of every part. The rows of the weight are reordered for that,
            on the ranks only: ``ddl.full_state_dict`` returns the model's own order. Default: 1.
        kwargs: ``input_layouts``, ``output_layouts``, ``use_local_output`` of torch's ``ColwiseParallel``.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import Column, Row

            plan = {"block*.attention.[qkv]": Column(units="n_heads"), "block*.attention.out": Row()}
    """

    @takes(_FITS, units=COUNT | TEXT, parts=COUNT | each(COUNT, "a sequence of them"))
    def __init__(
        self, *, units: int | str | None = None, parts: int | Iterable[int] = 1, **kwargs: Unpack[_Layouts]
    ) -> None:
        self.parts = parts if isinstance(parts, int) else tuple(parts)
        if parts != 1 and (units is not None or kwargs):
            raise ValueError(f"parts={parts!r} excludes units and layouts: the output stays cut, part by part")
        super().__init__(**kwargs)
        self.units = units

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` would cut a unit."""
        _check_is_layer(self, name, module)
        dim = dim_of_outputs(module)
        size = module.weight.shape[dim]
        units, what = size, f"{'columns' if dim else 'rows'} of the weight"
        if self.parts != 1:
            _check_heads(self._sizes(name, module, tp_size), name, parent, tp_size)
            return
        if isinstance(self.units, str):
            if not hasattr(parent, self.units):
                raise ValueError(
                    f"units={self.units!r} of {name!r} should be an attribute of its parent, but "
                    f"{type(parent).__name__} has none of that name"
                )
            units, what = getattr(parent, self.units), self.units
            check_count(f"units={self.units!r} of {name!r}", units)
        elif self.units is not None:
            units, what = self.units, "units"
        if self.units is None and stays_cut(self):
            _check_heads([size], name, parent, tp_size)
        if self.units is None and not stays_cut(self):
            _check_uneven(tp_size, size, what, name)
        elif units % tp_size:
            raise ValueError(f"tp={tp_size} should divide the {units} {what} of {name!r}, but does not")
        elif size % units:
            raise ValueError(f"the {units} {what} of {name!r} should divide its {size} outputs, but do not")

    def _sizes(self, name: str, module: nn.Module, tp_size: int) -> list[int]:
        """The number of outputs of each part."""
        if not isinstance(module, nn.Linear):
            raise ValueError(
                f"parts={self.parts!r} is for an nn.Linear, but {name!r} is a {type(module).__name__}: say "
                "Column(output_layouts=Replicate()), and Row(input_layouts=Replicate()) of the layer after it"
            )
        size = module.weight.shape[0]
        sizes = list(self.parts) if isinstance(self.parts, tuple) else [size // self.parts] * self.parts
        if sum(sizes) != size or any(n % tp_size for n in sizes):
            raise ValueError(
                f"parts={self.parts!r} of {name!r} should divide its {size} outputs into parts that tp={tp_size} "
                f"divides, but gives {sizes}"
            )
        return sizes

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, module, outputs, device_mesh):
        if _WHOLE.get() and use_local_output and not output_layouts[0].is_replicate():
            return _in_the_models_order(outputs.full_tensor(), module)
        return ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, module, outputs, device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.parts != 1:
            sizes = self._sizes(type(module).__name__, module, device_mesh.size())
            _put_rows_by_rank(module, sizes, device_mesh.size())
            return super()._apply(module, device_mesh)
        uneven = module.weight.shape[dim_of_outputs(module)] % device_mesh.size()
        if _is_transposed(module):
            module = _cut_transposed(self, module, device_mesh, Shard(1), Shard(0))
        else:
            module = super()._apply(module, device_mesh)
        if uneven and self.use_local_output:  # torch gathers with padding and returns a view
            module.register_forward_hook(_without_gaps)
        return module


_HEAD_WIDTHS = ("head_dim", "head_size", "attention_head_size", "d_head", "key_value_proj_dim")


def _check_heads(sizes: list[int], name: str, parent: nn.Module, tp_size: int) -> None:
    """Where attention says how wide its heads are, a layer inside of it is not cut through a head."""
    for attribute in _HEAD_WIDTHS:
        width = getattr(parent, attribute, None)
        if not isinstance(width, int) or width < 1 or any(size % width for size in sizes):
            continue
        heads = [size // width for size in sizes]
        if any(n % tp_size for n in heads):
            raise ValueError(
                f"tp={tp_size} should divide the {min(heads)} heads of {name!r} (its {type(parent).__name__} has "
                f"{attribute}={width}), but does not: use fewer tp ranks, or leave this attention out of the plan; if "
                f"these outputs are no heads, say Column(units={sum(sizes)})"
            )


ROW_ORDER = "_row_order"  # on a parameter: for each of its rows, the index of the row in the uncut model


def _put_rows_by_rank(module: nn.Module, sizes: list[int], tp_size: int) -> None:
    """Reorders the rows so that the contiguous shard of a tp rank holds its share of each part."""
    parts = torch.arange(sum(sizes)).split(sizes)
    order = torch.cat([part.chunk(tp_size)[rank] for rank in range(tp_size) for part in parts])
    setattr(module, ROW_ORDER, order)  # FSDP2 computes with other parameters
    for parameter in (module.weight, module.bias):
        if parameter is not None and not hasattr(parameter, ROW_ORDER):
            with torch.no_grad():
                parameter.copy_(parameter[order.to(parameter.device)])
            setattr(parameter, ROW_ORDER, order)


def _in_the_models_order(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    order = getattr(module, ROW_ORDER, None)
    return x if order is None else torch.empty_like(x).index_copy_(-1, order.to(x.device), x)


class Row(RowwiseParallel):
    """Each tp rank computes a partial sum of every output from its part of the inputs: the weight is cut along dim 1.

    Forward: the partial outputs are summed over tp. Backward: no communication. Shoeybi et al. 2019, "Megatron-LM",
    section 3. The weight of an ``nn.Embedding`` is cut along dim 0, the vocabulary, evenly or not: a rank looks up the
    tokens that it holds and returns zeros for the others. (Its gradient is whole on every rank, V × D, until the
    trainer cuts it.)

    Args:
        input_layouts: as in torch's ``RowwiseParallel``. By default, the input of a linear layer is cut along its last
            dim, and that of an embedding is whole.
        output_layouts: as in torch's ``RowwiseParallel``.
        use_local_output: as in torch's ``RowwiseParallel``. Default: True.

    Examples:
        .. code-block:: python

            from torch.distributed.tensor import Replicate
            from ignite_ddl.tensor import Column, Row

            plan = {"embed": Row(), "head": Column(output_layouts=Replicate())}      # both by vocabulary
    """

    @takes(_FITS)
    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.whole_input_of_embeddings = input_layouts is None

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` does not divide what is cut."""
        _check_is_layer(self, name, module)
        if isinstance(module, nn.Embedding):
            _check_uneven(tp_size, module.weight.shape[0], "entries of the vocabulary", name)
            return
        size = module.weight.shape[1 - dim_of_outputs(module)]
        if size % tp_size:
            what = "rows" if _is_transposed(module) else "columns"
            raise ValueError(f"tp={tp_size} should divide the {size} {what} of the weight of {name!r}, but does not")

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, module, inputs, device_mesh):
        if _WHOLE.get() and module._takes_cut_input and not isinstance(inputs[0], DTensor):
            inputs = (_part(module, inputs[0]), *inputs[1:])
        return RowwiseParallel._prepare_input_fn(input_layouts, desired_input_layouts, module, inputs, device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = copy.copy(self)  # torch's _apply changes the style, which other layers may share
        if isinstance(module, nn.Embedding) and self.whole_input_of_embeddings:
            style.input_layouts = (Replicate(),)
        module._takes_cut_input = not style.input_layouts[0].is_replicate()
        if _is_transposed(module):
            style.desired_input_layouts = (Shard(-1),)
            return _cut_transposed(style, module, device_mesh, Shard(0), Replicate())
        return super(Row, style)._apply(module, device_mesh)


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is a Conv1D of ``transformers``, as in GPT-2: a linear layer whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and module.weight.ndim == 2


def dim_of_outputs(module: nn.Module) -> int:
    """The dim of a layer's weight that counts its outputs."""
    return int(isinstance(module, nn.Embedding) or _is_transposed(module))


def _cut_transposed(
    style: Column | Row, module: nn.Module, mesh: DeviceMesh, weight: Placement, bias: Placement
) -> nn.Module:
    """What torch's styles do with an nn.Linear."""
    _distribute(module, mesh, {"weight": weight, "bias": bias})
    layouts = style.input_layouts, style.desired_input_layouts
    before = partial(style._prepare_input_fn, *layouts)
    after = partial(style._prepare_output_fn, style.output_layouts, style.use_local_output)
    return distribute_module(module, mesh, None, before, after)


class SharedInput(PrepareModuleInput):
    """Communicates the input of a module once for all :class:`Column` layers inside that use it.

    Forward: an input that is cut along the sequence is gathered; a whole input needs no communication. Backward: the
    gradients of these layers are added on each rank and then summed over tp once, instead of once per layer. It is for
    attention, which computes queries, keys and values from one input. It applies to the module's first positional
    argument; others, such as a mask, are unchanged.

    Args:
        input_layouts: the placement of the input: ``Replicate()``, the default, or ``Shard(1)`` at the end of a
            sequence-parallel region.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import Column, Row, SharedInput

            plan = {
                "block*.attention": SharedInput(),
                "block*.attention.[qkv]": Column(units="n_heads"),
                "block*.attention.out": Row(),
            }
    """

    @takes(_FITS)
    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__(input_layouts=input_layouts or Replicate(), desired_input_layouts=Replicate())

    def _prepare_input_fn(self, inputs: tuple, device_mesh: DeviceMesh) -> tuple:
        if not (inputs and isinstance(inputs[0], torch.Tensor)):
            raise ValueError(
                "SharedInput takes the first positional argument of its module, which should be a tensor, but given "
                f"{type(inputs[0]).__name__ if inputs else 'keyword arguments only'}"
            )
        return (*super()._prepare_input_fn(inputs[:1], device_mesh), *inputs[1:])


def _check_is_layer(style: ParallelStyle, name: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Linear | nn.Embedding) and not _is_transposed(module):
        kin = "OutputChannels" if isinstance(style, Column) else "InputChannels"
        hint = f"; ddl.{kin} is for convolutions" if isinstance(module, _CONVOLUTIONS) else ""
        raise ValueError(
            f"{type(style).__name__} cuts an nn.Linear or nn.Embedding, but {name!r} is a {type(module).__name__}{hint}"
        )
    for option in ("max_norm", "sparse"):
        if getattr(module, option, None):
            raise ValueError(
                f"{type(style).__name__} cuts an nn.Embedding without {option}, but {name!r} has "
                f"{option}={getattr(module, option)}: torch's DTensor cannot do that; leave it out of the plan"
            )


def _check_uneven(tp_size: int, size: int, what: str, name: str) -> None:
    """Refuses a rank without rows, whose peers would hang. torch cuts 65 rows on 4 ranks as 17, 17, 17, 14."""
    if -(-size // tp_size) * (tp_size - 1) >= size > 0 and tp_size > 1:
        raise ValueError(f"tp={tp_size} cuts the {size} {what} of {name!r} so that a rank has none; use fewer tp ranks")


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class OutputChannels(ParallelStyle):
    """Each tp rank computes some of the output channels of a convolution, as :class:`Column` for a linear layer.

    Forward: no communication; the output is this rank's channels. Backward: the gradient of the input is summed over
    tp. Weight and bias are DTensors cut along dim 0. The convolution runs on their local parts, because DTensor's
    ``conv2d`` (torch 2.11 to 2.13) returns one rank's channels as if they were all channels.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import InputChannels, OutputChannels

            plan = {"conv1": OutputChannels(), "conv2": InputChannels()}     # ReLU and pooling between them

    A BatchNorm, GroupNorm or ``nn.PReLU(C)`` between them has weights for all channels, and no style cuts it. This
    raises an error: in an ``nn.Sequential`` when the plan is checked, else in the first forward pass. ``nn.PReLU()``
    takes the style :class:`SharedWeight`.
    """

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` does not divide the output channels."""
        _check_is_convolution(self, name, module)
        _check_divides(tp_size, module.out_channels, "output channels", name)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut = {"weight": Shard(0), "bias": Shard(0)}
        return _on_local_parts(module, device_mesh, cut, _OutputChannels)


class InputChannels(ParallelStyle):
    """Each tp rank convolves some of the input channels, as :class:`Row` for a linear layer.

    Forward: the partial outputs are summed over tp, then the bias is added, once. Backward: no communication. The
    weight is a DTensor cut along dim 1, the bias is replicated.

    Args:
        whole_input: whether the input has all channels: each rank then selects its own, and the gradient of the input
            is gathered. Default False: the input is cut, for example by :class:`OutputChannels`.

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
        _check_divides(tp_size, module.in_channels, "input channels", name)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut = {"weight": Shard(1), "bias": Replicate()}
        module = _on_local_parts(module, device_mesh, cut, _InputChannels)
        module._takes_cut_input = not self.whole_input
        if self.whole_input:
            layouts = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1), "use_local_output": True}
            PrepareModuleInput(**layouts)._apply(module, device_mesh)
        return module


class _OutputChannels:
    """A mixin before the class of a convolution."""

    def _conv_forward(self, x: torch.Tensor, weight: DTensor, bias: DTensor | None) -> torch.Tensor:
        # The input is whole on each rank; the local gradient is a part of the sum over tp.
        x = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
        x = x.to_local(grad_placements=[Partial()])
        y = super()._conv_forward(x, weight.to_local(), None if bias is None else bias.to_local())
        if not _WHOLE.get():
            return y
        channels = y.ndim + 1 - weight.ndim
        return DTensor.from_local(y, weight.device_mesh, [Shard(channels)], run_check=False).full_tensor()


class _InputChannels:
    """A mixin before the class of a convolution."""

    def _conv_forward(self, x: torch.Tensor, weight: DTensor, bias: DTensor | None) -> torch.Tensor:
        mesh = weight.device_mesh
        x = part_of_input(self, x) if self._takes_cut_input else x
        part = super()._conv_forward(x, weight.to_local(), None)
        total = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        y = total.redistribute(placements=[Replicate()]).to_local()
        if bias is None:
            return y
        return y + bias.to_local().view(-1, *[1] * (weight.ndim - 2))  # once, not on each rank


def _on_local_parts(module: nn.Module, mesh: DeviceMesh, cut: Mapping[str, Placement], mixin: type) -> nn.Module:
    _distribute(module, mesh, cut)
    # As in FSDP2: the module stays the same object with its hooks, and only its class changes.
    module.__class__ = type(f"{mixin.__name__[1:]}{type(module).__name__}", (mixin, type(module)), {})
    return module


def _distribute(module: nn.Module, mesh: DeviceMesh, cut: Mapping[str, Placement]) -> None:
    for name, placement in cut.items():
        whole = getattr(module, name)
        if whole is not None:
            part = distribute_tensor(whole, mesh, [placement])
            module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _check_is_convolution(style: ParallelStyle, name: str, module: nn.Module) -> None:
    kind = type(style).__name__
    if not isinstance(module, _CONVOLUTIONS):
        raise ValueError(f"{kind} cuts an nn.Conv1d, 2d or 3d, but {name!r} is a {type(module).__name__}")
    if module.groups != 1:
        raise ValueError(
            f"{kind} cuts a convolution with groups=1, but {name!r} has groups={module.groups}: leave it out of "
            "the plan"
        )


def _check_divides(tp_size: int, size: int, what: str, name: str) -> None:
    if size % tp_size:
        raise ValueError(f"tp={tp_size} should divide the {size} {what} of {name!r}, but does not")


class SharedWeight(ParallelStyle):
    """A module inside a cut region whose weights all heads, features or channels share: ``nn.PReLU()``, a norm of
    each head, a learned scale.

    Each rank applies the whole weight to its own part, so its gradient is a part of a sum. Forward: no communication.
    Backward: the gradients of the weights are summed over tp before the optimizer steps. It applies to the parameters
    of the module itself; its submodules need entries of their own in the plan.

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
        whole = {name: Replicate() for name, _ in module.named_parameters(recurse=False)}
        return _on_local_parts(module, device_mesh, whole, _SharedWeight)


def is_by_channel(module: nn.Module) -> bool:
    """Whether a module has a weight for each channel, or groups of channels, so that it needs all channels."""
    if isinstance(module, nn.PReLU):
        return module.num_parameters > 1
    norm = isinstance(module, nn.modules.batchnorm._NormBase) and bool(module.state_dict())
    return norm or isinstance(module, nn.GroupNorm)  # its groups would change


class _SharedWeight:
    """A mixin before the class of a module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole = dict(self._parameters)
        try:
            for name, weight in whole.items():
                if weight is not None:  # a plain tensor; its gradient is a part of the sum over tp
                    self._parameters[name] = weight.to_local(grad_placements=[Partial()])
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(whole)


class SplitSequence(PrepareModuleOutput):
    """Begins a sequence-parallel region: each tp rank keeps its part of the sequence of a module's whole output.

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

    @takes(_FITS)
    def __init__(self, *, dim: int = 1) -> None:
        super().__init__(output_layouts=Replicate(), desired_output_layouts=Shard(dim))
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_check_sequence, self.dim, device_mesh.size()))
        super()._apply(module, device_mesh)
        module.register_forward_hook(_without_gaps)
        return module


def _without_gaps(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Copies a slice, which is not contiguous: a pipeline stage may end here, and torch 2.11 compares strides."""
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

    @takes(_FITS)
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


class ShardedRandom(ParallelStyle):
    """A module inside a cut region that draws random numbers from a stream of its tp rank.

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


def stays_cut(style: ParallelStyle) -> bool:
    return isinstance(style, Column) and style.use_local_output and not style.output_layouts[0].is_replicate()
