"""The tensor plans that models of Hugging Face's transformers bring along."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel.style import ParallelStyle

from ignite_ddl.tensor.inside import SharedWeight
from ignite_ddl.tensor.linear import Column, Row

# The names that transformers 5 gives to styles. "replicate" needs none.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": Column,
    "rowwise": Row,
    "colwise_gather_output": lambda: Column(output_layouts=Replicate()),
    "rowwise_split_input": lambda: Row(input_layouts=Replicate()),
    "packed_colwise": lambda: Column(parts=2),
    "replicated_with_grad_allreduce": SharedWeight,
    "embedding_rowwise": Row,
    "embedding_colwise": lambda: Column(output_layouts=Replicate()),
}


def plan_of_model(model: nn.Module) -> dict[str, ParallelStyle]:
    """The plan that ``tensor_plan="auto"`` stands for: that of the model, with the styles of this package.

    It is the model's ``_tp_plan``, which transformers completes when it makes a model, or ``base_model_tp_plan`` of
    the model or its ``config``; also of a model inside another module. Keys that match nothing are left out, since
    transformers writes one plan for several models.

    Args:
        model: the full model.

    Returns:
        dict: globs of module names to styles.

    Raises:
        ValueError: if the model has no plan, or one with a style that has no counterpart.
    """
    kind = type(model).__name__
    names_of = model.named_modules, model.named_parameters
    held = [name for named in names_of for name, _ in named(remove_duplicate=False)]
    names = {key: style for key, style in _plans(model).items() if _matches_any(key, held)}
    if not names:
        raise ValueError(
            f'tensor_plan="auto" takes the plan of the model, its base_model_tp_plan, but {kind} has none: give a dict '
            "from globs of module names to styles"
        )
    unknown = {key: style for key, style in names.items() if style not in STYLES and style != "replicate"}
    if unknown:
        found = ", ".join(f"{style!r} for {key!r}" for key, style in unknown.items())
        raise ValueError(
            f'tensor_plan="auto" knows the styles {", ".join(STYLES)}, but the plan of {kind} has {found}: give a dict '
            "from globs of module names to styles, which leaves these modules out"
        )
    return {key: STYLES[style]() for key, style in names.items() if style != "replicate"}


def _plans(model: nn.Module) -> dict[str, Any]:
    """The plans of the outermost modules that have one, by names in ``model``."""
    found: dict[str, Any] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(prefix) for prefix in inside):
            continue
        prefix = f"{name}." if name else ""
        plan = dict(_plan(module))
        if plan:
            found |= {prefix + key: style for key, style in plan.items()}
            inside.append(prefix)
    return found


def _plan(module: nn.Module) -> Iterator[tuple[str, Any]]:
    attribute = "base_model_tp_plan"
    for plan in (getattr(module, "_tp_plan", None), getattr(module, attribute, None)):
        if isinstance(plan, Mapping) and plan:
            yield from plan.items()
            return
    plan, base = getattr(getattr(module, "config", None), attribute, None), getattr(module, "base_model_prefix", "")
    if isinstance(plan, Mapping):
        prefix = f"{base}." if base and isinstance(getattr(module, base, None), nn.Module) else ""
        yield from ((prefix + key, style) for key, style in plan.items())


def _matches_any(key: str, names: list[str]) -> bool:
    pattern = re.compile(re.escape(key).replace(r"\*", r"[^.]+"))
    return any(pattern.fullmatch(name) for name in names)
