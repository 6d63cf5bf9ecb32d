"""Styles of linear layers and embeddings: Column and Row, and the input that several Columns share."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import TypedDict, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ignite_ddl.arguments import COUNT, TEXT, check, each, takes
from ignite_ddl.parts import ROW_ORDER
from ignite_ddl.tensor.layers import (
    CONVOLUTIONS,
    FITS,
    check_divides,
    contiguous_output,
    dim_of_outputs,
    distribute,
    is_full_between_layers,
    is_transposed,
    local_input,
)


class _Layouts(TypedDict, total=False):
    input_layouts: Placement | None
    output_layouts: Placement | None
    use_local_output: bool


class Column(ColwiseParallel):
    """Each tp rank computes some of the outputs of a linear layer: its weight is sharded along dim 0.

    Forward: no communication (the output stays sharded, unless ``output_layouts`` says otherwise). Backward: the
    gradient of the input is summed over tp. Shoeybi et al. 2019, "Megatron-LM", section 3. The weight of an
    ``nn.Embedding`` is sharded along dim 1: each rank holds a part of every vector. A ``Conv1D`` of ``transformers`` is
    a linear layer, also for :class:`Row`.

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
            sharded separately, so that a rank has its share of every part. The rows of the weight are reordered for
            that, on the ranks only: ``ddl.full_state_dict`` returns the original order, and :func:`distribute_like`
            cuts a mask or noise that is in it. ``full_tensor()`` of the weight and of its gradient, and torch's
            ``distribute_tensor``, go by the ranks' order: a mask of the original order that is cut by the latter meets
            other rows without an error. Default: 1.
        kwargs: ``input_layouts``, ``output_layouts``, ``use_local_output`` of torch's ``ColwiseParallel``.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import Column, Row

            plan = {"block*.attention.[qkv]": Column(units="n_heads"), "block*.attention.out": Row()}
    """

    @takes(FITS, units=COUNT | TEXT, parts=COUNT | each(COUNT, "a sequence of them"))
    def __init__(
        self, *, units: int | str | None = None, parts: int | Iterable[int] = 1, **kwargs: Unpack[_Layouts]
    ) -> None:
        self.parts = parts if isinstance(parts, int) else tuple(parts)
        if parts != 1 and (units is not None or kwargs):
            raise ValueError(f"parts={parts!r} excludes units and layouts: the output stays cut, part by part")
        super().__init__(**kwargs)
        self.units = units

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` would divide a unit."""
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
            check(f"units={self.units!r} of {name!r}", units, COUNT)
        elif self.units is not None:
            units, what = self.units, "units"
        if self.units is None and leaves_output_sharded(self):
            _check_heads([size], name, parent, tp_size)
        if self.units is None and not leaves_output_sharded(self):
            _check_no_rank_is_empty(tp_size, size, what, name)
            return
        check_divides(tp_size, units, what, name)
        if size % units:
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
    def _prepare_input_fn(input_layouts, desired_input_layouts, module, inputs, device_mesh):
        _check_positional(Column, module, inputs)
        return ColwiseParallel._prepare_input_fn(input_layouts, desired_input_layouts, module, inputs, device_mesh)

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, module, outputs, device_mesh):
        if is_full_between_layers() and use_local_output and not output_layouts[0].is_replicate():
            return _in_original_order(outputs.full_tensor(), module)
        return ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, module, outputs, device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.parts != 1:
            sizes = self._sizes(type(module).__name__, module, device_mesh.size())
            _order_rows_by_rank(module, sizes, device_mesh.size())
            return super()._apply(module, device_mesh)
        uneven = module.weight.shape[dim_of_outputs(module)] % device_mesh.size()
        if is_transposed(module):
            module = _shard_transposed(self, module, device_mesh, Shard(1), Shard(0))
        else:
            module = super()._apply(module, device_mesh)
        if uneven and self.use_local_output:  # torch gathers with padding and returns a view
            module.register_forward_hook(contiguous_output)
        return module


_HEAD_WIDTHS = ("head_dim", "head_size", "attention_head_size", "d_head", "key_value_proj_dim")


def _check_heads(sizes: list[int], name: str, parent: nn.Module, tp_size: int) -> None:
    """Where attention says how wide its heads are, a layer inside of it is not divided within a head."""
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


def _order_rows_by_rank(module: nn.Module, sizes: list[int], tp_size: int) -> None:
    """Reorders the rows so that the contiguous shard of a tp rank holds its share of each part."""
    parts = torch.arange(sum(sizes)).split(sizes)
    order = torch.cat([part.chunk(tp_size)[rank] for rank in range(tp_size) for part in parts])
    setattr(module, ROW_ORDER, order)  # FSDP2 computes with other parameters
    for parameter in (module.weight, module.bias):
        if parameter is not None and not hasattr(parameter, ROW_ORDER):
            with torch.no_grad():
                parameter.copy_(parameter[order.to(parameter.device)])
            setattr(parameter, ROW_ORDER, order)


def _in_original_order(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    order = getattr(module, ROW_ORDER, None)
    return x if order is None else torch.empty_like(x).index_copy_(-1, order.to(x.device), x)


class Row(RowwiseParallel):
    """Each tp rank computes a partial sum of each output from some of the inputs: its weight is sharded along dim 1.

    Forward: the partial outputs are summed over tp. Backward: no communication. Shoeybi et al. 2019, "Megatron-LM",
    section 3. The weight of an ``nn.Embedding`` is sharded along dim 0, the vocabulary, evenly or not: a rank looks up
    the tokens that it holds and returns zeros for the others. (Its gradient is full on every rank, V × D, until the
    trainer shards it.)

    Args:
        input_layouts: as in torch's ``RowwiseParallel``. By default, the input of a linear layer is sharded along its
            last dim, and that of an embedding is full.
        output_layouts: as in torch's ``RowwiseParallel``.
        use_local_output: as in torch's ``RowwiseParallel``. Default: True.

    Examples:
        .. code-block:: python

            from torch.distributed.tensor import Replicate
            from ignite_ddl.tensor import Column, Row

            plan = {"embed": Row(), "head": Column(output_layouts=Replicate())}      # both by vocabulary
    """

    @takes(FITS)
    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.full_input_of_embeddings = input_layouts is None

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` does not divide what is sharded."""
        _check_is_layer(self, name, module)
        if isinstance(module, nn.Embedding):
            _check_no_rank_is_empty(tp_size, module.weight.shape[0], "entries of the vocabulary", name)
            return
        what = "rows of the weight" if is_transposed(module) else "columns of the weight"
        check_divides(tp_size, module.weight.shape[1 - dim_of_outputs(module)], what, name)

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, module, inputs, device_mesh):
        _check_positional(Row, module, inputs)
        if module._takes_sharded_input and not isinstance(inputs[0], DTensor):
            inputs = (local_input(module, inputs[0]), *inputs[1:])
        return RowwiseParallel._prepare_input_fn(input_layouts, desired_input_layouts, module, inputs, device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = copy.copy(self)  # torch's _apply changes the style, which other layers may share
        if isinstance(module, nn.Embedding) and self.full_input_of_embeddings:
            style.input_layouts = (Replicate(),)
        module._takes_sharded_input = not style.input_layouts[0].is_replicate()
        if is_transposed(module):
            style.desired_input_layouts = (Shard(-1),)
            return _shard_transposed(style, module, device_mesh, Shard(0), Replicate())
        return super(Row, style)._apply(module, device_mesh)


def _check_positional(style: type[ParallelStyle], module: nn.Module, inputs: tuple) -> None:
    if not inputs:
        raise ValueError(
            f"{style.__name__} takes the first positional argument of its {type(module).__name__}, but given keyword "
            "arguments only: call it by layer(x), not by layer(input=x)"
        )


def _shard_transposed(
    style: Column | Row, module: nn.Module, mesh: DeviceMesh, weight: Placement, bias: Placement
) -> nn.Module:
    """What torch's styles do with an nn.Linear."""
    distribute(module, mesh, {"weight": weight, "bias": bias})
    layouts = style.input_layouts, style.desired_input_layouts
    before = partial(style._prepare_input_fn, *layouts)
    after = partial(style._prepare_output_fn, style.output_layouts, style.use_local_output)
    return distribute_module(module, mesh, None, before, after)


class SharedInput(PrepareModuleInput):
    """Communicates the input of a module once for all :class:`Column` layers inside that use it.

    Forward: an input that is sharded along the sequence is gathered; a full input needs no communication. Backward: the
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

    @takes(FITS)
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
    if not isinstance(module, nn.Linear | nn.Embedding) and not is_transposed(module):
        kin = "OutputChannels" if isinstance(style, Column) else "InputChannels"
        hint = f"; ddl.{kin} is for convolutions" if isinstance(module, CONVOLUTIONS) else ""
        if isinstance(getattr(module, "base_layer", None), nn.Linear):  # of peft
            inner = "lora_B" if isinstance(style, Column) else "lora_A"
            hint = f" that wraps one: name '{name}.base_layer' and '{name}.{inner}.*' instead"
        raise ValueError(
            f"{type(style).__name__} cuts an nn.Linear or nn.Embedding, but {name!r} is a {type(module).__name__}{hint}"
        )
    for option in ("max_norm", "sparse"):
        if getattr(module, option, None):
            raise ValueError(
                f"{type(style).__name__} cuts an nn.Embedding without {option}, but {name!r} has "
                f"{option}={getattr(module, option)}: torch's DTensor cannot do that; leave it out of the plan"
            )


def _check_no_rank_is_empty(tp_size: int, size: int, what: str, name: str) -> None:
    """Refuses a rank without rows, whose peers would hang. torch shards 65 rows on 4 ranks as 17, 17, 17, 14."""
    if -(-size // tp_size) * (tp_size - 1) >= size > 0 and tp_size > 1:
        raise ValueError(f"tp={tp_size} cuts the {size} {what} of {name!r} so that a rank has none; use fewer tp ranks")


def leaves_output_sharded(style: ParallelStyle) -> bool:
    return isinstance(style, Column) and style.use_local_output and not style.output_layouts[0].is_replicate()
