"""Tensor parallelism: a plan of styles, by module name, applied on the tp axis.

A plan is a dict from globs of module names to styles: torch's own, or the two of this file, which check that
nothing is cut that must stay whole. What the plan leaves out stays replicated on every tp rank.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

__all__ = ["Column", "Row", "apply_plan", "check_plan", "lay_out_gradient"]


class Column(ColwiseParallel):
    """Each tp rank computes some of the outputs of a linear layer: its weight is cut by rows of ``out_features``.

    Forward: no communication (the output stays cut, unless ``output_layouts`` says otherwise). Backward: the
    gradient of the input is summed over tp. Shoeybi et al. 2019, "Megatron-LM", section 3.

    Args:
        units: how many parts of the output must stay whole, such as attention heads: a number, or the name of
            an attribute of the module that contains the layer. Default: single outputs.
        kwargs: ``input_layouts``, ``output_layouts``, ``use_local_output`` of torch's ``ColwiseParallel``.

    Examples:
        .. code-block:: python

            from ignite_ddl.tensor import Column, Row

            plan = {"block*.attention.[qkv]": Column(units="n_heads"), "block*.attention.out": Row()}
    """

    def __init__(self, *, units: int | str | None = None, **kwargs) -> None:
        super().__init__(**kwargs)
        self.units = units

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` would cut a unit."""
        _check_is_layer(self, name, module)
        units, what = module.weight.shape[0], "rows of its weight"
        if isinstance(self.units, str):
            if not hasattr(parent, self.units):
                raise ValueError(
                    f"units={self.units!r} of {name!r} should be an attribute of its parent, but "
                    f"{type(parent).__name__} has none of that name"
                )
            units, what = getattr(parent, self.units), self.units
        elif self.units is not None:
            units, what = self.units, "units"
        if units % tp_size:
            raise ValueError(f"tp={tp_size} should divide the {units} {what} of {name!r}, but does not")


class Row(RowwiseParallel):
    """Each tp rank computes a part of every output from its part of the inputs: the weight is cut by columns.

    Forward: the partial outputs are summed over tp. Backward: no communication. For an ``nn.Embedding`` it is
    the vocabulary that is cut. Shoeybi et al. 2019, "Megatron-LM", section 3.

    Args:
        kwargs: ``input_layouts``, ``output_layouts``, ``use_local_output`` of torch's ``RowwiseParallel``.
    """

    def check(self, name: str, module: nn.Module, parent: nn.Module, tp_size: int) -> None:
        """Raises a ValueError if ``tp_size`` does not divide what is cut."""
        _check_is_layer(self, name, module)
        dim = 0 if isinstance(module, nn.Embedding) else 1
        size = module.weight.shape[dim]
        if size % tp_size:
            what = "entries of the vocabulary" if dim == 0 else "columns of the weight"
            raise ValueError(f"tp={tp_size} should divide the {size} {what} of {name!r}, but does not")


def _check_is_layer(style: ParallelStyle, name: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ValueError(
            f"{type(style).__name__} cuts an nn.Linear or nn.Embedding, but {name!r} is a {type(module).__name__}"
        )


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
        ValueError: if a key matches no module, or a style cannot cut a module ``tp_size`` times.
    """
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
    return styles


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
        ValueError: if two modules share a weight that their styles cut differently.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    shared = _shared_parameters(model)
    cut: dict[int, tuple[str, ParallelStyle]] = {}  # a module may have several names: it is cut once
    for name, style in styles.items():
        if name not in modules:
            continue
        first, before = cut.setdefault(id(modules[name]), (name, style))
        if first == name:
            parallelize_module(modules[name], tp_mesh, style)
        elif type(before) is not type(style) or vars(before) != vars(style):
            raise ValueError(
                f"tensor_plan cuts {name!r} otherwise than {first!r}, but they are one module; give both one style"
            )
    for names in shared:  # torch makes a new parameter in each module that it cuts: tie them again
        owners = [(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names]
        first = getattr(*owners[0])
        for owner, attribute in owners[1:]:
            other = getattr(owner, attribute)
            if _layout(first) != _layout(other):
                raise ValueError(
                    f"tensor_plan cuts the shared weight {names[0]!r} in two ways: {_layout(first)} and "
                    f"{_layout(other)}; give its modules styles that agree"
                )
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
