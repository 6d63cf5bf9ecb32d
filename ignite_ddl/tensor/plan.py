"""A tensor plan: globs of module names to styles, checked against a model and applied to it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.utils.parametrize import is_parametrized

from ignite_ddl.checks.guards import refuse_second_derivatives
from ignite_ddl.compat import quiet_shape_errors
from ignite_ddl.errors import explain_errors
from ignite_ddl.tensor.convolution import InputChannels, OutputChannels
from ignite_ddl.tensor.gradients import layout_of
from ignite_ddl.tensor.inside import ShardedRandom, SharedWeight, is_by_channel
from ignite_ddl.tensor.layers import dim_of_outputs
from ignite_ddl.tensor.linear import leaves_output_sharded
from ignite_ddl.tensor.model_plans import plan_of_model

_ELEMENTWISE = (nn.Identity, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU)


def check_plan(
    model: nn.Module, plan: Mapping[str, ParallelStyle] | Literal["auto"], tp_size: int
) -> dict[str, ParallelStyle]:
    """Checks a plan, and returns the style of each module that it names.

    Args:
        model: the full model.
        plan: globs of module names to styles; ``*`` and ``[...]`` as in ``fnmatch``, matched separately between the
            dots. If two keys match a module, the later one is used. "auto": :func:`plan_of_model`.
        tp_size: number of tp ranks.

    Returns:
        dict: full module names to styles.

    Raises:
        ValueError: if ``plan`` is not a dict from names to styles, a key matches no module, a style cannot divide a
            module into ``tp_size`` parts, or a module or weight with several names would be sharded in two ways.
    """
    if plan == "auto":
        plan = plan_of_model(model)
    if not isinstance(plan, Mapping) or not all(isinstance(key, str) for key in plan):
        raise ValueError(f"tensor_plan should be a dict from globs of module names to styles, but given {plan!r}")
    modules = dict(model.named_modules(remove_duplicate=False))
    styles: dict[str, ParallelStyle] = {}
    for key, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ValueError(f"tensor_plan[{key!r}] should be a style such as ddl.Column(), but given {style!r}")
        names = [name for name in modules if _matches(name, key)]
        if not names:
            known = ", ".join(name for name, module in modules.items() if list(module.parameters(recurse=False)))
            raise ValueError(f"tensor_plan has the key {key!r}, which matches no module; those with weights: {known}")
        styles |= dict.fromkeys(names, style)
    for name, style in styles.items():
        if _is_parametrized(modules[name]):
            if tp_size == 1:  # a look at its weight computes it, which spectral_norm does otherwise each time
                continue
            raise ValueError(
                f"{name!r} computes its weight from other parameters (weight_norm, spectral_norm, pruning or another "
                "parametrization), which no style cuts: leave it out of tensor_plan"
            )
        if hasattr(style, "check"):
            style.check(name, modules[name], modules[name.rpartition(".")[0]], tp_size)
    if tp_size > 1:
        _check_channels(modules, styles)
        _check_order(modules, styles)
    _check_agreement(model, modules, styles)
    return styles


def _is_parametrized(module: nn.Module) -> bool:
    """By torch's parametrizations, or by the older hooks that compute a weight before each forward pass."""
    return is_parametrized(module) or "weight" in vars(module)


def _check_channels(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]) -> None:
    """Refuses weights of each channel in a sharded region of an ``nn.Sequential``, whose order is known."""
    for name, module in modules.items():
        if type(module).forward is not nn.Sequential.forward:
            continue
        sharded_by = ""
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            style = styles.get(full_name)
            if style is not None and not isinstance(style, ShardedRandom | SharedWeight):
                sharded_by = full_name if isinstance(style, OutputChannels) or leaves_output_sharded(style) else ""
            elif sharded_by and is_by_channel(child):
                raise ValueError(
                    f"{full_name!r} is a {type(child).__name__} of all channels, but {sharded_by!r} before it leaves "
                    "each rank some of them, and no style cuts it: leave its neighbours out of tensor_plan"
                )


def _check_order(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]) -> None:
    """Refuses two linear layers of an ``nn.Sequential``, with nothing but activations between, that do not fit."""
    for name, module in modules.items():
        if type(module).forward is not nn.Sequential.forward:
            continue
        before, leaves_part = "", False
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            style = styles.get(full_name)
            if type(child) is nn.Linear and isinstance(style, ColwiseParallel | RowwiseParallel | None):
                takes_part = isinstance(style, RowwiseParallel) and not style.input_layouts[0].is_replicate()
                takes_part = takes_part or style is not None and style.input_layouts[0].is_shard()
                if before and takes_part != leaves_part:
                    cure = (
                        f"make {full_name!r} a ddl.Row(), or give {before!r} output_layouts=Replicate()"
                        if leaves_part
                        else f"make {before!r} a ddl.Column(), or leave {full_name!r} out"
                    )
                    part, all_of_them = "this rank's part of its outputs", "all of its outputs"
                    raise ValueError(
                        f"tensor_plan lets {before!r} return {part if leaves_part else all_of_them}, but {full_name!r} "
                        f"after it takes {'a part' if takes_part else 'all'} of them: {cure}"
                    )
                before, leaves_part = full_name, style is not None and leaves_output_sharded(style)
                if style is not None and not style.use_local_output:  # a DTensor says itself which part it is
                    before = ""
            elif style is not None or not isinstance(child, _ELEMENTWISE):
                before = ""


def _check_agreement(model: nn.Module, modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]) -> None:
    """Refuses a plan that shards a module or a weight with several names in two ways."""
    of_module: dict[int, tuple[str, ParallelStyle]] = {}
    for name, style in styles.items():
        first, before = of_module.setdefault(id(modules[name]), (name, style))
        if type(before) is not type(style) or vars(before) != vars(style):
            raise ValueError(
                f"tensor_plan cuts {name!r} otherwise than {first!r}, but they are one module; give both one style"
            )
    for names in _shared_parameters(model):
        owners = [name.rpartition(".") for name in names]
        layouts = []
        for owner, _, attribute in owners:
            _, style = of_module.get(id(modules[owner]), (owner, None))
            layouts.append(_planned_layout(style, modules[owner], attribute))
        _check_same(names, layouts)


def _planned_layout(style: ParallelStyle | None, module: nn.Module, attribute: str) -> str | None:
    """The layout that a style gives to a parameter; None if the style is unknown."""
    is_weight = attribute == "weight"
    outputs = dim_of_outputs(module) if is_weight else 0
    if isinstance(style, ColwiseParallel | OutputChannels):
        dim = outputs
    elif isinstance(style, RowwiseParallel | InputChannels):
        dim = 1 - outputs if is_weight else None
    elif style is None or type(style).__module__.startswith((f"{__package__}.", ColwiseParallel.__module__)):
        dim = None
    else:
        return None
    return "replicated" if dim is None else f"(Shard(dim={dim}),)"


def _check_same(names: list[str], layouts: list[str | None]) -> None:
    for layout in layouts[1:]:
        if None not in (layout, layouts[0]) and layout != layouts[0]:
            raise ValueError(
                f"tensor_plan cuts the shared weight {names[0]!r} in two ways: {layouts[0]} and {layout}; give its "
                "modules styles that agree"
            )


def _wanted_input(style: ParallelStyle) -> str:
    sharded = isinstance(style, RowwiseParallel | InputChannels) and not getattr(style, "whole_input", False)
    return "this rank's part of the features or channels" if sharded else "full, as in the uncut model"


def _cure(style: ParallelStyle) -> str:
    if isinstance(style, RowwiseParallel | InputChannels):
        return "cut the layer before it by ddl.Column(), or give this one input_layouts=Replicate()"
    return "after a ddl.Column() comes a ddl.Row(), or that layer gets output_layouts=Replicate()"


def _matches(name: str, key: str) -> bool:
    parts, globs = name.split("."), key.split(".")
    if not name:  # the model itself, which "*" does not match
        return not key
    return len(parts) == len(globs) and all(fnmatch.fnmatchcase(p, g) for p, g in zip(parts, globs, strict=True))


def apply_plan(model: nn.Module, styles: Mapping[str, ParallelStyle], tp_mesh: DeviceMesh) -> None:
    """Cuts the modules of ``model`` that ``styles`` names, in place, and keeps tied weights tied.

    Args:
        model: the model, or this rank's stages of it; names that it does not have are ignored.
        styles: full module names to styles, from :func:`check_plan`.
        tp_mesh: the tp axis of the ``DeviceMesh``.

    Raises:
        ValueError: if two modules share a weight, and styles unknown to :func:`check_plan` shard it differently.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    shared = _shared_parameters(model)
    quiet_shape_errors()
    applied = set()  # a module with several names is sharded once
    for name, style in styles.items():
        if name in modules and id(modules[name]) not in applied:
            applied.add(id(modules[name]))
            parallelize_module(modules[name], tp_mesh, style)
            refuse_second_derivatives(modules[name], name)
            explain_errors(
                modules[name],
                f"This was in {name!r}, which tensor_plan cuts with {type(style).__name__}: its input and output "
                f"should be one tensor, the input {_wanted_input(style)}; {_cure(style)}; or leave both out.",
            )
    for module in modules.values():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # in evaluation: DTensors cannot be computed with nested ones
    for parent, inside in _consumers_of_shards(modules, styles).items():
        explain_errors(
            modules[parent],
            f"This was in {parent or 'the model'!r}, which gets a rank's part of the outputs of {', '.join(inside)}, "
            "cut by tensor_plan: where they are heads give ddl.Column(units=<number of heads>), of fused layers "
            "ddl.Column(parts=<how many>); where the code takes them apart by the sizes of the uncut model, "
            "ddl.Column(output_layouts=Replicate()) and ddl.Row(input_layouts=Replicate()), or leave them out.",
        )
    if any(isinstance(style, OutputChannels) for style in styles.values()):
        for name, module in modules.items():
            if name not in styles and is_by_channel(module):
                explain_errors(
                    module,
                    f"This was in {name!r}, a {type(module).__name__} of all channels, which sees some of them where "
                    "the convolution before it is cut: leave its neighbours out of tensor_plan.",
                )
    for names in shared:  # torch makes a new parameter in each sharded module: tie them again
        owners = [(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names]
        first = getattr(*owners[0])
        for owner, attribute in owners[1:]:
            _check_same(names, [layout_of(first), layout_of(getattr(owner, attribute))])
            setattr(owner, attribute, first)


def _consumers_of_shards(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]) -> dict[str, list[str]]:
    """The modules whose code sees a Column's sharded output, and the names of these Columns inside."""
    found: dict[str, list[str]] = {}
    for name, style in styles.items():
        parent, _, child = name.rpartition(".")
        known = name and name in modules and parent in modules
        if known and leaves_output_sharded(style) and type(modules[parent]).forward is not nn.Sequential.forward:
            found.setdefault(parent, []).append(child)
    return found


def _shared_parameters(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
