"""Where a model is cut into pipeline stages: its layers, and the cut that balances their costs."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ignite_ddl.arguments import AMOUNTS, COUNT, WORLD, each, first_line, takes
from ignite_ddl.checks.traceless import evaluating
from ignite_ddl.pipeline.schedules import NAME, SCHEDULES, check_microbatches, stage_owners

CUT_FITS = {
    "schedule": NAME,
    "n_microbatches": WORLD,
    "split": each(COUNT, "a number of layers for each stage"),
    "costs": AMOUNTS,
}


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers between which a pipeline may cut, in the order in which the model calls them.

    These are the children of an ``nn.Sequential``. Any other model names them in an attribute ``pipeline_layers`` (a
    list, or a method that returns one); its ``forward`` has to call them one after the other and do nothing else.

    Args:
        model: the model.

    Returns:
        list: pairs of name and layer. The same layer may occur twice; in two stages, a layer with weights needs
            two names.

    Raises:
        ValueError: if the model does not name its layers, or they do not contain all weights and buffers.

    Examples:
        .. code-block:: python

            from torch import nn
            from ignite_ddl.pipeline.cut import named_layers

            class Net(nn.Module):
                pipeline_layers = ["embed", "blocks.0", "blocks.1"]

                def __init__(self):
                    super().__init__()
                    self.embed = nn.Linear(2, 4)
                    self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

                def forward(self, x):
                    x = self.embed(x)
                    for block in self.blocks:
                        x = block(x)
                    return x

            assert [name for name, _ in named_layers(Net())] == Net.pipeline_layers
    """
    kind, names = type(model).__name__, getattr(model, "pipeline_layers", None)
    if names is None:
        if not isinstance(model, nn.Sequential):
            raise ValueError(
                f"model should be an nn.Sequential under pp, but given {kind}: stages are cut between its layers; "
                "or give it an attribute pipeline_layers with the names of its layers, in order, or cut it by "
                "ddl.trace_layers"
            )
        if type(model).forward is not nn.Sequential.forward:
            raise ValueError(
                f"model is a {kind}, an nn.Sequential with a forward of its own: say what its layers are, in order, "
                "in an attribute pipeline_layers"
            )
        left_over = [name for name, t in (*model._parameters.items(), *model._buffers.items()) if t is not None]
        if left_over:
            raise ValueError(
                f"{kind} has {', '.join(left_over)} besides its layers, which no stage would hold under pp: put them "
                "into layers"
            )
        _check_root(model, list(model._modules))
        return list(model._modules.items())  # named_children would skip a layer that occurs again
    names = list(names() if callable(names) else names)
    layers = modules_of(model, names, f"{kind}.pipeline_layers")
    inside = tuple(f"{name}." for name in names)
    left_out = [name for name in model.state_dict() if not name.startswith(inside)]
    if left_out:
        raise ValueError(
            f"{kind}.pipeline_layers leaves out {', '.join(left_out)}: no stage would hold them; put them into layers"
        )
    _check_root(model, names)
    _check_sequential(model, layers)
    return layers


def modules_of(model: nn.Module, names: Sequence[str], what: str) -> list[tuple[str, nn.Module]]:
    """The modules of these names; raises a ValueError about ``what`` if there are none or a name has no module."""
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in names if not name or name not in modules]
    if unknown or not names:
        raise ValueError(
            f"{what} should name modules of the model, but names {unknown or 'none'}; it has "
            f"{', '.join(name for name in modules if name)}"
        )
    return [(name, modules[name]) for name in names]


_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


def check_root_hooks(model: nn.Module, name: str = "") -> None:
    """Refuses a user's hooks of a module that holds layers, which a pipeline calls in its place."""
    found = next((k for k in _HOOKS if not all(hasattr(hook, "is_ours") for hook in getattr(model, k).values())), None)
    if found is not None:
        raise ValueError(
            f"{repr(name) if name else 'the model'} has a {found.strip('_').removesuffix('s').replace('_', ' ')}, "
            "which would not run under pp, where stages call the layers: register it on the first or the last layer"
        )


class Holder:
    """A model, or a module between it and its layers, and the layers and modules in it; it keeps none of them alive."""

    def __init__(self, name: str, module: nn.Module, keys: Sequence[str]) -> None:
        self.name, self.module = name, weakref.ref(module)
        self.is_list = isinstance(module, nn.Sequential | nn.ModuleList)  # of which forward calls what is added, too
        held = {key: module._modules[key] for key in (module._modules if self.is_list else keys)}
        self.held = {key: (lambda: None) if layer is None else weakref.ref(layer) for key, layer in held.items()}

    def check_unchanged(self) -> None:
        """Raises a ValueError if a layer was added, replaced or removed, which stages do not follow."""
        now = getattr(self.module(), "_modules", None)
        for key in () if now is None else {**self.held, **now} if self.is_list else self.held:
            if key not in self.held or now.get(key, "removed") is not self.held[key]():
                raise ValueError(
                    f"{f'{self.name}.{key}'.lstrip('.')!r} was added, replaced or removed after ddl.auto_model, but "
                    "under pp the stages call the layers that the model had then: change it before ddl.auto_model, or "
                    "change what a layer holds inside (layer.activation = ...)"
                )


def holders_of(model: nn.Module, names: Sequence[str]) -> list[Holder]:
    """Holders of the model and of each module between it and its layers, which have these names."""
    keys: dict[str, list[str]] = {}
    for parts in (name.split(".") for name in names):
        for i, key in enumerate(parts):
            keys.setdefault(".".join(parts[:i]), []).append(key)
    return [Holder(name, model.get_submodule(name), of_holder) for name, of_holder in keys.items()]


def _check_root(model: nn.Module, names: Sequence[str]) -> None:
    """Refuses what the model, and modules between it and its layers, do besides holding layers: hooks, and a
    ``train`` that leaves some in evaluation mode.
    """
    holders = {"", *(".".join(name.split(".")[:i]) for name in names for i in range(1, name.count(".") + 1))} - {*names}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in sorted(holders):
        check_root_hooks(modules[name], name)
    if all("train" not in vars(modules[n]) and type(modules[n]).train is nn.Module.train for n in holders):
        return
    with evaluating([model]):
        for name in names:
            modules[name].train()
        alone = {name: module.training for name, module in modules.items()}
        model.train()
        left = next((name for name in modules if name not in holders and modules[name].training < alone[name]), None)
    if left is not None:
        raise ValueError(
            f"{type(model).__name__} has a train() of its own, which leaves {left!r} in evaluation mode, and which "
            "would not be called under pp, where stages hold the layers: give such a train() to the layer"
        )


def _check_sequential(model: nn.Module, layers: list[tuple[str, nn.Module]]) -> None:
    """Refuses a ``forward`` that does more than call its layers: a pipeline would leave that out."""
    for dtype, ndim in itertools.product((torch.float32, torch.long), (2, 3, 4)):
        try:
            problem = _find_other_work(model, layers, torch.zeros([2] * ndim, dtype=dtype))
        except Exception as error:  # perhaps because of this shape
            problem = f"it could not be tried ({first_line(error)})"
            continue
        if problem is None:
            return
        break
    raise ValueError(
        f"{type(model).__name__}.forward should call the layers of pipeline_layers one after the other and nothing "
        f"else, but {problem}: under pp that would be left out; put it into a layer"
    )


_CALLABLES = "forward", "_forward_pre_hooks", "_forward_hooks"  # of a module


def _find_other_work(model: nn.Module, layers: list[tuple[str, nn.Module]], x: torch.Tensor) -> str | None:
    """Calls ``forward`` with stand-ins for the layers: each expects the unchanged output of the one before.

    Hooks of layers go with them into their stages, so they are not called here: one that keeps what it sees would keep
    a stand-in's output on ranks that do not hold its layer.
    """
    passed, problems = [x], []

    def stand_in(layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        number = len(passed) - 1
        name, expected = layers[number] if number < len(layers) else ("the end", None)
        unchanged = len(args) == 1 and args[0] is passed[-1] and not passed[-1]._version
        if layer is not expected or not unchanged or kwargs:
            problems.append(f"it does something else before {name!r}")
        passed.append(torch.zeros_like(passed[-1]))
        return passed[-1]

    was = {layer: {name: vars(layer)[name] for name in _CALLABLES if name in vars(layer)} for _, layer in layers}
    try:
        for layer in was:
            vars(layer).update(
                {name: OrderedDict() for name in _CALLABLES[1:]}, forward=functools.partial(stand_in, layer)
            )
        with torch.no_grad():
            output = model.forward(x)
    finally:
        for layer, kept in was.items():
            del layer.forward
            vars(layer).update(kept)
    if not problems and (len(passed) <= len(layers) or output is not passed[-1] or output._version):
        problems.append(f"it does something else after {layers[min(len(passed), len(layers)) - 1][0]!r}")
    return problems[0] if problems else None


@dataclass(frozen=True)
class Cut:
    """How a model is cut into stages, the same on every rank.

    Attributes:
        schedule: a name of ``SCHEDULES``.
        n_microbatches: number of microbatches per batch.
        owners: for each stage, its rank on the pp axis.
        layers: for each stage, the names of its layers.
        shared: for each parameter that several stages hold, its names; the first one is in the earliest stage.
        stage_of: the stage of each parameter, by name.
        shapes: the shapes in the full model's state dict, in its order.
    """

    schedule: str
    n_microbatches: int
    owners: list[int]
    layers: list[list[str]]
    shared: list[list[str]]
    stage_of: dict[str, int]
    shapes: dict[str, tuple[int, ...]]

    def stages_of(self, pp_rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [stage for stage, owner in enumerate(self.owners) if owner == pp_rank]

    def owners_of(self, name: str) -> list[int]:
        """The ranks that hold layers of that name, or inside of it."""
        stages = (s for s, layers in enumerate(self.layers) if any(layer.split(".")[0] == name for layer in layers))
        return sorted({self.owners[s] for s in stages})

    def describe(self, stage: int) -> str:
        """A stage for error messages: its number and its layers."""
        return f"stage {stage} ({', '.join(self.layers[stage])})"


@takes(CUT_FITS)
def cut_into_stages(
    model: nn.Module,
    pp_size: int,
    schedule: str = "1f1b",
    n_microbatches: int | None = None,
    split: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
) -> Cut:
    """Decides where a model is cut, and refuses a model that cannot be cut or that the schedule cannot run.

    Args:
        model: an ``nn.Sequential``, or a model that names its layers in ``pipeline_layers``; its layers may be on the
            meta device.
        pp_size: number of pp ranks.
        schedule: a name of ``SCHEDULES``. Default: "1f1b".
        n_microbatches: number of microbatches per batch. Default: the number of stages.
        split: number of layers of each stage. Default: balanced by ``costs``.
        costs: the cost of each layer, in any unit. Default: its number of parameters.

    Returns:
        Cut: the stages.

    Raises:
        ValueError: if the model does not name its layers, has fewer layers than stages, or has a stage that the
            schedule cannot run correctly, or stages have weights of one name.
    """
    layers = named_layers(model)
    owners = stage_owners(schedule, pp_size)
    if n_microbatches is None:
        n_microbatches = len(owners)
    check_microbatches(schedule, n_microbatches, pp_size)
    sizes = _stage_sizes(layers, len(owners), split, costs)
    ends = list(itertools.accumulate(sizes))
    stages = [layers[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    # For each parameter and each stage that has it: the first name there, and the stage.
    names: dict[int, dict[str, int]] = {}
    for s, stage in enumerate(stages):
        _check_names(stage, [layer for earlier in stages[:s] for layer in earlier])
        for name, parameter in sequential(stage).named_parameters():
            names.setdefault(id(parameter), {})[name] = s
    cut = Cut(
        schedule,
        n_microbatches,
        owners,
        layers=[[name for name, _ in stage] for stage in stages],
        shared=[list(group) for group in names.values() if len(group) > 1],
        stage_of={name: s for group in names.values() for name, s in group.items()},
        shapes={name: tuple(getattr(t, "shape", ())) for name, t in model.state_dict().items()},
    )
    for s, stage in enumerate(stages):
        check_trains(cut, s, sequential(stage))
    return cut


def _check_names(stage: list[tuple[str, nn.Module]], earlier: list[tuple[str, nn.Module]]) -> None:
    """Refuses weights and buffers of a stage that an earlier one has under the same names, by which they are known."""
    before = {f"{name}.{key}" for name, layer in earlier for key in layer.state_dict()}
    twice = next((name for name, of in stage if any(f"{name}.{key}" in before for key in of.state_dict())), None)
    if twice is not None:
        raise ValueError(
            f"pipeline_layers names {twice!r}, or a module in it, in two stages, whose weights would have the same "
            f"names: give it a second one (self.again = self.get_submodule({twice!r}) at the end of __init__), and "
            "name 'again' in the place where forward calls it again"
        )


def _stage_sizes(
    layers: list[tuple[str, nn.Module]], n_stages: int, split: Sequence[int] | None, costs: Sequence[float] | None
) -> list[int]:
    """The number of layers of each stage: as given by ``split``, or balanced by ``costs``."""
    if costs is None:
        costs = [1.0 + sum(p.numel() for p in layer.parameters()) for _, layer in layers]
    elif len(costs) != len(layers):
        raise ValueError(
            f"costs should hold a number of at least 0 for each of {len(layers)} layers, but given {costs!r}"
        )
    sizes = balance(costs, n_stages) if split is None else split
    if len(sizes) != n_stages or sum(sizes) != len(layers) or min(sizes) < 1:
        raise ValueError(
            f"split should name the layers of each of {n_stages} stages, at least one each, "
            f"{len(layers)} in all, but given {split!r}"
        )
    return sizes


def trains(module: nn.Module) -> bool:
    """Whether a module has trainable weights."""
    return any(p.requires_grad for p in module.parameters())


def check_trains(cut: Cut, stage: int, module: nn.Module) -> None:
    """Refuses a stage without trainable weights if the schedule splits the backward pass: torch loses gradients."""
    if SCHEDULES[cut.schedule].split_backward and not trains(module):
        raise ValueError(
            f"schedule={cut.schedule!r} cannot run {cut.describe(stage)}: it has no trainable parameter, and gradients "
            "would be lost; use '1f1b' or 'interleaved_1f1b', or another split"
        )


def sequential(layers: Sequence[tuple[str, nn.Module]]) -> nn.Module:
    """The layers of a stage, called one after the other, each under its name in the full model."""
    names = [name for name, _ in layers]
    if len({*names}) < len(names) or any("." in name or hasattr(nn.Sequential, name) for name in names):
        return NamedSequential(layers)
    return nn.Sequential(OrderedDict(layers))


class NamedSequential(nn.Module):
    """An ``nn.Sequential`` whose layers have names with dots, such as "blocks.0", or of its own, or twice."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._order = [name for name, _ in layers]
        for name, layer in layers:
            add_submodule(self, name, layer)

    def forward(self, x: Any) -> Any:
        for name in self._order:
            x = self.get_submodule(name)(x)
        return x


def add_submodule(root: nn.Module, name: str, layer: nn.Module) -> None:
    """Makes ``layer`` the submodule ``name`` of ``root``, with a module for each part before a dot."""
    *parts, last = name.split(".")
    for part in parts:
        if part not in root._modules:
            root.add_module(part, nn.Module())  # which has fewer names of its own than a ModuleDict
        root = root._modules[part]
    root.add_module(last, layer)


@takes(costs=AMOUNTS, n_stages=COUNT)
def balance(costs: Sequence[float], n_stages: int) -> list[int]:
    """Cuts a sequence of layers into stages so that the cost of the most expensive stage is minimal.

    Among several such cuts, it returns the one with the most equal stages (the least sum of squares).

    Args:
        costs: cost of each layer, in any unit.
        n_stages: number of stages.

    Returns:
        list: number of layers of each stage, at least one.

    Raises:
        ValueError: if there are more stages than layers or none, or a cost is negative or not finite.

    Examples:
        .. code-block:: python

            from ignite_ddl.pipeline.cut import balance

            assert balance([1, 1, 1, 9], 2) == [3, 1]
            assert balance([9, 1, 1, 1, 1], 3) == [1, 2, 2]
    """
    if n_stages > len(costs):
        raise ValueError(
            f"a model of {len(costs)} layers cannot be cut into {n_stages} stages; use fewer pp ranks or stages"
        )
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    least, _ = _best_cut(total, n_stages, max)
    _, sizes = _best_cut(total, n_stages, lambda before, cost: before + cost**2 if cost <= least else float("inf"))
    return sizes


def _best_cut(total: list[float], n_stages: int, add: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """The minimal total of a cut, and its sizes; ``add`` combines the total so far and the cost of a stage."""
    n = len(total) - 1
    # best[k][i]: the minimal total of the first i layers in k stages; cut[k][i]: where the last of these stages begins
    best = [[float("inf")] * (n + 1) for _ in range(n_stages + 1)]
    cut = [[0] * (n + 1) for _ in range(n_stages + 1)]
    best[0][0] = 0.0
    for k in range(1, n_stages + 1):
        for i in range(k, n + 1):
            for j in range(k - 1, i):
                worth = add(best[k - 1][j], total[i] - total[j])
                if worth < best[k][i]:
                    best[k][i], cut[k][i] = worth, j
    sizes, end = [], n
    for k in range(n_stages, 0, -1):
        sizes.append(end - cut[k][end])
        end = cut[k][end]
    return best[n_stages][n], sizes[::-1]
