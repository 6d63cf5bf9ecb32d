"""The state of a model on a mesh: as the plain state dict of one process, or as this rank's shards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.arguments import MAPPING, TENSOR, Fits, a, check, takes, whole
from ignite_ddl.checks.kept_state import versions
from ignite_ddl.collectives import gathered_values, meet, octets
from ignite_ddl.compat import quiet_redistribution
from ignite_ddl.data_parallel import refuse_in_a_round, share_buffers
from ignite_ddl.lazy import materialize
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.parts import PART_OF_A_MODEL, ROW_ORDER
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.structure import local_tensor

INITIAL_VALUES = "_initial_values"  # on a pipeline, until weights are loaded: their digests; see audit.py
WAIT_SECONDS = 60  # until every rank has called
MODEL = a("an nn.Module (with its optimizer: ddl.Checkpoint)", nn.Module)


@takes(model=MODEL)
def full_state_dict(model: nn.Module, on_rank: int | None = None) -> dict[str, torch.Tensor]:
    """The state dict of the uncut model, on the CPU; every rank calls it.

    Args:
        model: what :func:`auto_model` returned.
        on_rank: the only rank that gets it, tensor by tensor, so that the others never hold the full model.
            Default None: all ranks get it.

    Returns:
        dict: names as in the model that was given to :func:`auto_model`, to plain tensors, and to what its modules'
        ``get_extra_state`` returns; empty on ranks other than ``on_rank``.

    Raises:
        ValueError: if ``on_rank`` is no rank, or some rank does not call it within 60 s.
    """
    stages, mesh = stages_of(model), get_mesh()
    if on_rank is not None:
        rank = Fits(f"a rank below {mesh.world_size}", whole(0, mesh.world_size - 1).read)
        on_rank = check("on_rank", on_rank, rank)
    found: dict[str, Any] = {name: tensor for name, tensor in full_tensors(model, on_rank) if tensor is not None}
    known = stages.full_shapes()
    if any(map(is_extra_state, known)):
        found |= stages.gather_stages(_tensors_and_extra_state(stages)[1])
    full = OrderedDict((name, found[name]) for name in known if on_rank in (None, mesh.rank))
    of_stage = dict(getattr(stages.state_dict(), "_metadata", {}))  # versions of modules
    of_stages = gathered_values(of_stage, mesh.pp_group) if mesh.pp_size > 1 else [of_stage]
    full._metadata = {name: of for each in of_stages for name, of in each.items()}
    return full


def is_extra_state(name: str) -> bool:
    """Whether torch gives this name to what a module's ``get_extra_state`` returns."""
    return name.rpartition(".")[2] == "_extra_state"


def full_tensors(model: nn.Module, on_rank: int | None = 0) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Gathers the tensors of the uncut model's state dict one by one; every rank iterates to the end.

    Args:
        model: what :func:`auto_model` returned.
        on_rank: the rank that gets them; None: all. Default: 0.

    Yields:
        tuple: a name of the uncut model, and the tensor on the CPU of ``on_rank``; None on the other ranks.
    """
    stages, mesh = stages_of(model), get_mesh()
    tensors = _shared_state(model, mesh)
    local = {name: tensor.dtype for name, tensor in tensors.items()}
    dtypes = gathered_values(local, mesh.pp_group) if mesh.pp_size > 1 else [local]
    _check_names(stages.full_shapes(), dtypes)
    position = mesh.coordinates(mesh.rank)
    among_peers = on_rank is None or mesh.coordinates(on_rank) | {"pp": mesh.pp_rank} == position
    for name, shape in stages.full_shapes().items():
        if is_extra_state(name):
            continue
        owner = next(pp for pp, names in enumerate(dtypes) if name in names)
        full = full_tensor(tensors[name]) if mesh.pp_rank == owner else torch.empty(shape, dtype=dtypes[owner][name])
        if mesh.pp_size > 1 and among_peers:
            full = full.to(idist.device()).contiguous()
            dist.broadcast(octets(full), mesh.rank_at(**(position | {"pp": owner})), group=mesh.pp_group)
        yield name, full.cpu() if on_rank in (None, mesh.rank) else None


def _check_names(known: Mapping[str, Any], of_stages: list[dict[str, Any]]) -> None:
    """Raises a ValueError if stages lack tensors of the model that they were cut from."""
    held = {name for of_stage in of_stages for name in of_stage}
    gone = [name for name in known if name not in held and not is_extra_state(name)]
    if gone:
        raise ValueError(
            f"under pp the stages should hold the tensors of the model that was given to ddl.auto_model, but "
            f"{gone[0]!r} was removed or renamed since then (new: "
            f"{', '.join(sorted(held - known.keys())) or 'nothing'}): prune and parametrize before ddl.auto_model, or "
            "undo it before weights are gathered or loaded "
            '(torch.nn.utils.prune.remove(layer, "weight"))'
        )


def _shared_state(model: nn.Module, mesh: Mesh) -> dict[str, torch.Tensor]:
    """This rank's tensors, once all ranks have called; with the buffers of dp rank 0."""
    refuse_in_a_round(model, "the weights are gathered")
    if mesh.world_size > 1:
        meet("full_state_dict", WAIT_SECONDS, "call it on all and use the result on one")
    stages = stages_of(model)
    for stage in stages.local_stages():
        share_buffers(stage, mesh)  # DDP did so before the last forward pass, which has changed them
    return _tensors_and_extra_state(stages)[0]


def _tensors_and_extra_state(stages: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """This rank's state dict: tensors, and what modules' ``get_extra_state`` returns."""
    state = stages.state_dict()
    tensors = {name: value for name, value in state.items() if not is_extra_state(name)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


@takes(model=MODEL, state=MAPPING)
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Loads a plain state dict into a cut model, in place; every rank calls it with the full dict.

    Args:
        model: what :func:`auto_model` returned, also of a model made in :func:`empty_weights`.
        state: a state dict of the uncut model; of a tied weight one name is enough.

    Raises:
        ValueError: if a name is missing, unknown, or has another shape.
    """
    stages, mesh = stages_of(model), get_mesh()
    materialize(model)
    targets, saved_as, extra = local_state(model)
    shapes = stages.full_shapes()  # of every stage, so that all ranks refuse alike
    of_files = hasattr(state, "shape_of")  # which have tensors only
    if cut := next((name for name in (() if of_files else state) if isinstance(state[name], DTensor)), None):
        raise ValueError(
            f"state should have the full tensors of the uncut model, but {cut!r} is this rank's part of one: save by "
            "ddl.full_state_dict(model), not by model.state_dict()"
        )
    state, refusal = _as_modules_load_it(stages.plain_module(), state, mesh)
    mine = saved_as, cannot_load(model, saved_otherwise=True) or refusal
    of_stages, refusals = zip(*(gathered_values(mine, mesh.pp_group) if mesh.pp_size > 1 else [mine]), strict=True)
    if any(refusals):
        raise ValueError(next(filter(None, refusals)))
    _check_names(shapes, of_stages)
    first_names = {name: first for part in of_stages for name, first in part.items()}
    names = _names_in(state, shapes, first_names, of_files)
    shape_of = getattr(state, "shape_of", lambda name: tuple(state[name].shape))
    for name, in_state in names.items():
        if shapes[name] != (given := shape_of(in_state)):
            raise ValueError(f"state[{name!r}] should have shape {shapes[name]}, but has {given}")
    with torch.no_grad():
        for name, target in targets.items():
            _assign(target, state[names[name]])  # a function, so that one full tensor is alive at a time
    for name in set(extra) & set(state):
        set_extra_state(model, name, state[name])
    call_load_hooks(model)


@takes(value=TENSOR, parameter=a("a parameter", nn.Parameter))
def distribute_like(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Cuts a tensor that every rank has in full, such as a mask or noise, as a parameter of a cut model.

    torch's ``distribute_tensor`` does the same, except for layers that the plan cuts by ``Column(parts=)``, whose rows
    lie in another order on the ranks.

    Args:
        value: a plain tensor of the shape of the uncut parameter, in its order of rows, the same on every rank.
        parameter: one of ``model.parameters()`` of what :func:`auto_model` returned.

    Returns:
        torch.Tensor: a DTensor with the mesh and the placements of ``parameter``; where that is a plain tensor,
        ``value`` on its device.

    Raises:
        ValueError: if the shapes differ, or ``parameter`` is another one, such as that with which FSDP2 computes.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def pruned(local_rank, mask):
                model = ddl.auto_model(torch.nn.Linear(2, 4), {"": ddl.Column(parts=2)})
                with torch.no_grad():
                    model.weight.fill_(1).mul_(ddl.distribute_like(mask, model.weight))
                return ddl.full_state_dict(model)["weight"]

            mask = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
            with ddl.Parallel(backend="gloo", nproc_per_node=2, tp=2) as parallel:
                assert torch.equal(parallel.run(pruned, mask)[0], mask)
    """
    if isinstance(value, DTensor) or value.shape != parameter.shape:
        raise ValueError(
            f"value should be a plain tensor of shape {tuple(parameter.shape)}, as the uncut parameter is, but given a "
            f"{type(value).__name__} of shape {tuple(value.shape)}"
        )
    value = value.detach().to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    if get_mesh().tp_size > 1 and not hasattr(parameter, PART_OF_A_MODEL):
        raise ValueError(
            "parameter should be one of model.parameters() of what ddl.auto_model returned, but given another, which "
            "does not know the order of its rows: call it outside of forward"
        )
    order = getattr(parameter, ROW_ORDER, None)
    value = value if order is None else value[order.to(value.device)]
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _as_modules_load_it(root: nn.Module, state: Mapping[str, Any], mesh: Mesh) -> tuple[Mapping[str, Any], str | None]:
    """What modules' own code in ``load_state_dict`` makes of a state dict before it is copied, such as the new names of
    what an earlier version has saved, and why it cannot be loaded; None: it can be.
    """
    versions_saved, refusal, load = getattr(state, "_metadata", {}), None, nn.Module._load_from_state_dict

    def hooks_of(module: nn.Module) -> list[Any]:  # without FSDP2's, and those that refuse parts of this state
        hooks = [(hook, getattr(hook, "hook", hook)) for hook in module._load_state_dict_pre_hooks.values()]  # wrapped
        return [hook for hook, given in hooks if not given.__module__.startswith(("torch.distributed.", "ignite_ddl."))]

    def calls_hooks(module: nn.Module, *args: Any) -> None:
        for hook in hooks_of(module):
            hook(*args)

    nn.Module._load_from_state_dict = calls_hooks  # which modules with code of their own call
    try:
        for name, module in root.named_modules(remove_duplicate=False):
            if type(module)._load_from_state_dict is calls_hooks and not hooks_of(module):
                continue
            prefix, errors = f"{name}." if name else "", list[str]()
            given = {key: state[key] for key in state if key.startswith(prefix)}
            made, before = dict(given), versions(given)
            module._load_from_state_dict(made, prefix, dict(versions_saved.get(name, {})), True, [], [], errors)
            changed = [key for key in made.keys() & given.keys() if made[key] is not given[key]]
            renamed = made.keys() != given.keys()
            if changed or versions(given) != before or errors or (renamed and mesh.pp_size > 1):
                kind = type(module).__name__.removeprefix("FSDP")
                refusal = (
                    f"{name or 'the model'!r} is a {kind} whose own code changes what it loads "
                    f"({next(iter(errors), 'of an earlier version?')}): give this state to load_state_dict of the "
                    "plain model, before ddl.auto_model"
                )
            elif renamed:
                state = {key: state[key] for key in state if key not in given} | made
    finally:
        nn.Module._load_from_state_dict = load
    return state, refusal


def _names_in(
    state: Mapping[str, Any], shapes: Mapping[str, Any], first_names: Mapping[str, str], of_files: bool
) -> dict[str, str]:
    """The name in ``state`` of each tensor of the uncut model: of a tied weight any of its names.

    Raises:
        ValueError: if names are missing or unmatched.
    """
    tensors = [name for name in shapes if not is_extra_state(name)]
    tied: dict[str, str] = {}  # a weight's first name to one of its names in state
    for name in filter(state.__contains__, tensors):
        tied.setdefault(first_names.get(name, name), name)
    found = {name: name if name in state else tied.get(first_names.get(name, name)) for name in tensors}
    missing = sorted(name for name, in_state in found.items() if in_state is None)
    if not of_files:
        missing += sorted(shapes.keys() - set(tensors) - set(state))
    unmatched = sorted(set(state) - set(shapes))
    if missing or unmatched:
        raise ValueError(f"state should have the model's names, but lacks {missing} and has {unmatched} besides")
    return found


def set_extra_state(model: nn.Module, name: str, value: Any) -> None:
    """Gives a module of the model what its ``get_extra_state`` has returned under ``name``."""
    module = stages_of(model).plain_module().get_submodule(name.rpartition(".")[0])
    (module.module if isinstance(module, DistributedDataParallel) else module).set_extra_state(value)


def call_load_hooks(model: nn.Module) -> None:
    """Calls the hooks that modules' ``load_state_dict`` calls at its end, such as those that compute a cache anew."""

    def call(module: nn.Module) -> None:
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, _IncompatibleKeys([], []))

    model.apply(call)  # a module's after those inside it, as in torch


def cannot_load(model: nn.Module, saved_otherwise: bool = False) -> str | None:
    """Why nothing can be loaded into tensors of this rank's state dict: modules made copies; None: it can be.

    Args:
        model: what ``ddl.auto_model`` returned, or any module.
        saved_otherwise: whether the state is one of :func:`full_state_dict`, which may have something else under the
            name of a parameter. Default: False, one of :func:`local_state`, which has the parameter itself.
    """
    stages = stages_of(model)
    registered, again = stages.registered(), stages.state_dict()
    for name, tensor in _tensors_and_extra_state(stages)[0].items():
        held = registered.get(name, again[name])
        if held is tensor or (name in registered and not saved_otherwise) or _memory(held) == _memory(tensor):
            continue
        if name in registered:
            return (
                f"state cannot be loaded, since a module of the model saves {name!r} by its own code, which makes a "
                "copy of it: give the state to load_state_dict of the plain model, before ddl.auto_model"
            )
        return (
            f"the model's state dict has {name!r}, which is no parameter or buffer, but a copy that its module makes "
            "when it is saved, so that nothing can be loaded into it: register_buffer it, or save it by get_extra_state"
        )
    return None


def _memory(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()


def _assign(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies this rank's part of a full tensor."""
    for at, piece in shard_of(target).pieces:
        piece.copy_(value[tuple(slice(start, start + n) for start, n in zip(at, piece.shape, strict=True))])


def full_tensor(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of the full tensor on the CPU, in the uncut model's order of rows; its ranks call it together.

    Args:
        tensor: a parameter or a buffer, or the gradient of a parameter.
        like: the parameter that ``tensor`` is the gradient of. Default: ``tensor`` itself.
    """
    with quiet_redistribution():
        full = tensor
        if isinstance(tensor, DTensor):
            full = tensor.to(tensor.device_mesh.device_type).full_tensor()  # of offloaded weights, too
    full = full.detach().cpu()
    order = getattr(tensor if like is None else like, ROW_ORDER, None)
    return full.clone() if order is None else torch.empty_like(full).index_copy_(0, order, full)


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor, by its place in the tensor of one process.

    Attributes:
        size: of the full tensor.
        dtype: of the tensor.
        pieces: pairs of offsets in the full tensor and a view of this rank's values. Usually one; none where this
            rank holds nothing; several where ``Column(parts=)`` has reordered the rows.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[tuple[int, ...], torch.Tensor]]

    @classmethod
    def full(cls, tensor: torch.Tensor) -> Shard:
        """The shard of a tensor that only this rank holds."""
        return cls(tuple(tensor.shape), tensor.dtype, [((0,) * tensor.ndim, tensor)])

    def copy(self) -> Shard:
        """The same values in new CPU memory."""
        return Shard(self.size, self.dtype, [(at, piece.to("cpu", copy=True)) for at, piece in self.pieces])


def shard_of(tensor: torch.Tensor, like: torch.Tensor | None = None) -> Shard:
    """This rank's part of a parameter, a buffer, or an optimizer's state of a parameter.

    Args:
        tensor: a plain tensor, which this rank holds in full, or a DTensor.
        like: the parameter that ``tensor`` is the state of. Default: ``tensor`` itself.

    Returns:
        Shard: with views of ``tensor``'s memory: writing into them changes it.
    """
    order = getattr(tensor if like is None else like, ROW_ORDER, None)
    offsets: tuple[int, ...] = (0,) * tensor.ndim
    local = tensor.detach()
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()
        offsets, local = tuple(chunk.offsets), local.to_local()
    size = tuple(tensor.shape)
    if order is None or not local.ndim or not len(local) or size[0] != len(order):
        return Shard(size, tensor.dtype, [(offsets, local)] if local.numel() or not tensor.numel() else [])
    rows = order[offsets[0] : offsets[0] + len(local)].tolist()  # of the model, in the order of this rank
    starts = [i for i in range(len(rows)) if i == 0 or rows[i] != rows[i - 1] + 1]
    ends = [*starts[1:], len(rows)]
    pieces = [((rows[a], *offsets[1:]), local[a:b]) for a, b in zip(starts, ends, strict=True)]
    return Shard(size, tensor.dtype, pieces)


def local_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """What this rank holds of a model's state dict.

    Args:
        model: what ``ddl.auto_model`` returned, or any module.

    Returns:
        tuple: names in the uncut model to tensors, DTensors where they are cut; the name under which each of them is
        saved, which is the first one of a tied weight; and names to what is no tensor (``get_extra_state``).
    """
    stages = stages_of(model)
    tensors, extra = _tensors_and_extra_state(stages)
    registered = stages.registered()
    tensors = {name: registered.get(name, tensor) for name, tensor in tensors.items()}  # not what modules make of them
    over_stages = {name: names[0] for names in stages.shared_names() for name in names}
    first: dict[int, str] = {}
    saved_as = {}
    for name, tensor in tensors.items():
        local = first.setdefault(id(tensor), name)
        saved_as[name] = over_stages.get(name, over_stages.get(local, local))
    return tensors, saved_as, extra
