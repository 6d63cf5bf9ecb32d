"""A part of a cut model never passes for the full model: torch's functions that would take it so are refused."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ignite_ddl.arguments import first_line

PART_OF_A_MODEL = "_part_of_a_model"  # on a parameter of a model that pp or tp has cut
_COPIES = ("dp", "edp")  # axes whose ranks compute with the same weight, each with its own rows
_MESHES: set[DeviceMesh] = set()  # of the weights that auto_model has cut
MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # from ddl.auto_model, on a mesh


def guard_cut_model(model: nn.Module, part_of_each: bool) -> None:
    """Makes torch raise an error where it would take this rank's part of a cut model for the full model.

    Refused are pickling a DTensor that is cut, reading a number off one (torch gives this rank's part), and
    ``torch.nn.utils``'s norm of gradients of a part of the model, whose ``clip_grad_value_`` is right. Random numbers
    for a DTensor are a part of those of the full tensor, and where torch cannot compute with a DTensor, the error says
    what to do instead.

    Args:
        model: a cut model.
        part_of_each: whether this rank holds a part of each weight, as FSDP2's ranks do, so that torch's norm is right.
    """
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            _MESHES.update(_meshes_of(parameter.device_mesh))
        if not part_of_each:
            setattr(parameter, PART_OF_A_MODEL, True)
    if "__reduce_ex__" not in vars(DTensor):
        _guard_dtensors()
        _guard_lists()


def _meshes_of(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """A weight's mesh, and the one it has while FSDP2 or replicate has made it full over dp."""
    yield mesh
    rest = tuple(name for name in mesh.mesh_dim_names or () if not name.startswith(_COPIES))
    if rest and len(rest) < mesh.ndim:
        yield mesh[rest]


def _guard_dtensors() -> None:
    for name in ("numpy", "__array__", "tolist"):
        setattr(DTensor, name, _refuse_parts(getattr(torch.Tensor, name)))
    DTensor.__reduce_ex__ = _reduce_ex
    # What a layer that is cut over tp returns may not have arrived; torch pickles its memory as it is (private, 2.13).
    AsyncCollectiveTensor.__reduce_ex__ = lambda tensor, protocol: tensor.trigger_wait().__reduce_ex__(protocol)
    AsyncCollectiveTensor.__deepcopy__ = lambda tensor, memo: tensor.trigger_wait().__deepcopy__(memo)
    for name in ("full_tensor", "to_local"):
        setattr(DTensor, name, _with_gradient_of_all(getattr(DTensor, name)))
    for name in filter(_BY_SCRIPTS.fullmatch, dir(torch.Tensor)):
        setattr(DTensor, name, _explain_refusals(getattr(DTensor, name)))
    DTensor.storage = _refuse_safetensors
    DTensor.data = property(_noting_aliases(torch.Tensor.data.__get__), _set_data)
    DTensor.detach = _noting_aliases(torch.Tensor.detach)
    torch.utils.swap_tensors = _keeping_attributes(torch.utils.swap_tensors)
    dispatcher, aten = DTensor._op_dispatcher, torch.ops.aten
    for guard, names in _GUARDED.items():
        for name in names & set(dir(dispatcher)):
            setattr(dispatcher, name, guard(getattr(dispatcher, name)))
    dispatcher._custom_op_handlers[aten._is_any_true.default] = _any_of_part
    dispatcher._custom_op_handlers[aten._local_scalar_dense.default] = _number_of
    strided = aten.as_strided.default
    dispatcher._custom_op_handlers[strided] = _explain_refusals(dispatcher._custom_op_handlers[strided])
    drawn = [getattr(aten, name).default for name in _DRAWN]
    drawn += [aten.bernoulli_.float, aten.randint_like.low_dtype, aten.eye.m_out, aten.eye.out, *_BY_VALUES]
    for operator in drawn:
        known = dispatcher._custom_op_handlers.get(operator)
        dispatcher._custom_op_handlers[operator] = functools.partial(_draw_full, known)


def _guard_lists() -> None:
    """Guards torch's functions of lists, such as the norm of gradients and an optimizer's foreach and fused steps.

    Also those that a script has imported before: they look up how to group a list when they are called.
    """
    from torch.nn.utils import clip_grad
    from torch.optim import optimizer, swa_utils

    group = clip_grad._group_tensors_by_device_and_dtype

    def guarded(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "_get_total_norm":
            if any(_are_a_part(tensors[0], model) for model in MODELS):
                raise ValueError(
                    "torch.nn.utils computes the norm of this rank's part of a model that is cut over ranks: call "
                    "ddl.clip_grad_norm_(model, max_norm), with parameters=group['params'] for a parameter group "
                    "alone, or pass max_norm to ddl.create_supervised_trainer"
                )
            return group(tensors, *args, **kwargs)
        return _group_each_kind(group, tensors, *args, **kwargs)

    clip_grad._group_tensors_by_device_and_dtype = guarded
    for user in (optimizer, swa_utils):
        user._group_tensors_by_device_and_dtype = functools.partial(_group_each_kind, group)


def _are_a_part(tensors: Sequence[torch.Tensor], model: nn.Module) -> bool:
    """Whether these are this rank's part of several weights of a model; under pp, perhaps the only one of a stage."""
    parts = [p for p in model.parameters() if hasattr(p, PART_OF_A_MODEL)]
    held = {id(tensor) for p in parts for tensor in (p, p.grad)}
    of_stage = [p for p in parts if p.grad is not None] if hasattr(model, "_local_stages") else []
    return (len(tensors) > 1 or len(of_stage) == 1) and any(id(tensor) in held for tensor in tensors)


def _group_each_kind(group: Callable, tensors: Sequence[Sequence[Any]], *args: Any, **kwargs: Any) -> Any:
    """Groups DTensors of each mesh, and other tensors, separately: torch's foreach operators take no list of both."""
    kinds: dict[DeviceMesh | None, list[int]] = {}
    for i, tensor in enumerate(tensors[0]):
        kinds.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(i)
    if len(kinds) < 2:
        return group(tensors, *args, **kwargs)
    found: dict[Any, Any] = {}
    for kind, chosen in kinds.items():
        groups = group([[of[i] for i in chosen] if of else of for of in tensors], *args, **kwargs)
        for (device, dtype), (lists, indices) in groups.items():
            found[device, (dtype, kind)] = lists, [chosen[i] for i in indices]
    return found


# Methods by which scripts set weights, of which torch refuses plain tensors where nothing can be put before.
_BY_SCRIPTS = re.compile(r"(?!requires_grad_)[a-z]\w*_|__(iadd|isub|imul|itruediv|setitem)__")
ROW_ORDER = "_row_order"  # on a parameter: for each of its rows, the index of the row in the uncut model
_GATHERED: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # memory of what slices of parts have gathered


class PartError(ValueError):
    """torch cannot compute something with a weight or gradient that is cut over ranks."""

    def __init__(self, error: Exception) -> None:
        self.reason = first_line(error, 400)
        if "loading state_dict" in str(error):
            super().__init__(
                "an uncut model got the state_dict of one that is cut over ranks, whose weights are DTensors: "
                "give it ddl.full_state_dict(model), of which every rank gets all; a cut model takes such a state by "
                "ddl.load_full_state_dict(model, state)"
            )
            return
        super().__init__(
            "torch cannot compute this with a weight or gradient that is cut over ranks, a DTensor ("
            f"{self.reason.rstrip('!')}): compute with full ones, p.full_tensor() and p.grad.full_tensor() "
            "on every rank, and cut the result by torch.distributed.tensor.distribute_tensor(value, p.device_mesh, "
            "p.placements), under torch.no_grad, a mask or noise for the uncut weight by ddl.distribute_like(value, "
            "p); or change weights before ddl.auto_model, or in the state of ddl.full_state_dict(model), given to "
            "ddl.load_full_state_dict on every rank"
        )

    def __reduce__(self) -> Any:
        return ValueError, self.args


def _explain_refusals(method: Callable) -> Callable:
    """Raises a :class:`PartError` in place of torch's error, where a weight of ``ddl.auto_model`` is involved."""

    @functools.wraps(method)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if isinstance(error, PartError) or not any(_is_from_auto_model(leaf) for leaf in tree_leaves(args)):
                raise
            raise PartError(error) from error

    return explained


def _mark_copies_of_parts(method: Callable) -> Callable:
    """Marks slices that are no views, as they are in one process, since they cross ranks."""

    @functools.wraps(method)
    def marked(operator: Any, args: tuple, *rest: Any) -> Any:
        found = method(operator, args, *rest)
        if operator.is_view and is_part(args[0]) and not torch.compiler.is_compiling():
            held = args[0]._local_tensor.untyped_storage()._cdata
            memory = [piece.untyped_storage() for piece in tree_leaves(found)]
            _GATHERED.update(one for one in memory if one._cdata != held)
        return found

    return marked


def _refuse_copies_of_parts(method: Callable) -> Callable:
    """Refuses to change a slice that is no view, or a view of it: the weight would stay as it is."""

    @functools.wraps(method)
    def guarded(operator: Any, args: tuple, kwargs: Mapping[str, Any], *rest: Any) -> Any:
        if _GATHERED:
            schema = operator._schema.arguments
            given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
            written = tree_leaves([given.get(a.name) for a in schema if a.alias_info and a.alias_info.is_write])
            if any(isinstance(one, DTensor) and one._local_tensor.untyped_storage() in _GATHERED for one in written):
                raise PartError(
                    RuntimeError("a slice that crosses ranks is a copy, whose change the weight does not see")
                )
        return method(operator, args, kwargs, *rest)

    return guarded


# Methods of DTensors' dispatcher (private, torch 2.13): those that refuse operators, that runs one on what it has
# gathered, and that ends one that changes a tensor.
_GUARDED = {
    _explain_refusals: {"_propagate_op_sharding_dispatch_slow_path", "unwrap_to_op_info"},
    _mark_copies_of_parts: {"_dispatch_get_local_results_slow_path"},
    _refuse_copies_of_parts: {"_dispatch_fast_path_python_tail"},
}


def _with_gradient_of_all(method: Callable) -> Callable:
    """Averages the gradient of what a rank gathers of a sharded weight: it is that of its own rows, where torch takes
    it to be the same on all ranks.
    """

    @functools.wraps(method)
    def gathered(tensor: DTensor, **kwargs: Any) -> torch.Tensor:
        found = method(tensor, **kwargs)
        if not (found.requires_grad and _is_from_auto_model(tensor)) or kwargs.get("grad_placements") is not None:
            return found
        mesh, is_full = tensor.device_mesh, method.__name__ == "full_tensor"
        for i, name in enumerate(mesh.mesh_dim_names or ()):
            if (
                name.startswith((*_COPIES, "ep"))
                and mesh.size(i) > 1
                and (is_full or tensor.placements[i].is_replicate())
            ):
                found = _AveragedGradient.apply(found, mesh.get_group(i))
        return found

    return gathered


class _AveragedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return full.view_as(full)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient / ctx.group.size(), None


_ALIAS_OF = WeakIdKeyDictionary()  # of each p.data and p.detach() that is in use to its weight


def _noting_aliases(method: Callable) -> Callable:
    @functools.wraps(method, ("__name__", "__doc__"), ())
    def noting(tensor: DTensor, *args: Any) -> Any:
        found = method(tensor, *args)
        made = torch.compiler.is_compiling() or sys._getframe(1).f_code is nn.Parameter.__new__.__code__
        if not made and isinstance(tensor, nn.Parameter) and _is_from_auto_model(tensor):
            _ALIAS_OF[found] = tensor  # torch swaps no weights of which there are weak references, as when types change
        return found

    return noting


def _keeping_attributes(swap: Callable) -> Callable:
    """Lets a weight keep its attributes, such as the order of its rows, where a module changes its type or device."""

    @functools.wraps(swap)
    def swapped(one: torch.Tensor, other: torch.Tensor) -> None:
        swap(one, other)
        if isinstance(one, nn.Parameter) and _is_from_auto_model(one):
            vars(one).update({name: value for name, value in vars(other).items() if name not in vars(one)})

    return swapped


def _set_data(tensor: DTensor, value: torch.Tensor) -> None:
    """``p.data = value``, of which torch would keep the shape alone: this rank's part stays where it was.

    As in one process, what ``p.data`` gave before keeps its values, and ``value`` shares memory with the weight.
    """
    if not _is_from_auto_model(tensor):
        torch.Tensor.data.__set__(tensor, value)
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ValueError(
            f"p.data = value should keep the shape and the dtype of p, which is cut over ranks, {tuple(tensor.shape)} "
            f"and {tensor.dtype}, but given {tuple(value.shape)} and {value.dtype}: change shapes and dtypes before "
            "ddl.auto_model"
        )
    is_weight = isinstance(value, nn.Parameter) and _is_from_auto_model(value)
    owner = value if is_weight else _ALIAS_OF.get(value)
    if owner is tensor:
        return
    if owner is not None:
        raise ValueError(
            "p.data = q.data lets two weights share memory in one process, which weights that are cut over ranks "
            "cannot: copy it, p.data.copy_(q.data)"
        )
    with torch.no_grad():
        for alias in [alias for alias, weight in _ALIAS_OF.items() if weight is tensor]:
            alias._local_tensor = alias._local_tensor.clone()
            del _ALIAS_OF[alias]
        if not isinstance(value, DTensor):
            order = getattr(tensor, ROW_ORDER, None)
            if order is not None and not torch.equal(value, value[order.to(value.device)]):
                raise ValueError(
                    "p.data = value does not say in which order value has the rows, which Column(parts=) has "
                    "reordered on the ranks: assign ddl.distribute_like(value, p) if it is the order of the uncut "
                    "weight, or torch.distributed.tensor.distribute_tensor(value, p.device_mesh, p.placements), under "
                    "torch.no_grad, if value was computed from p.full_tensor(), which has the ranks' order"
                )
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(value)
        if value.placements == tensor.placements:
            value._local_tensor = tensor._local_tensor.detach()
            _ALIAS_OF[value] = tensor


def _is_from_auto_model(value: Any) -> bool:
    mesh = value if isinstance(value, DeviceMesh) else value.device_mesh if isinstance(value, DTensor) else None
    return mesh is not None and mesh in _MESHES


_DRAWN = ("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_")
_DRAWN = (*_DRAWN, "rand_like", "randn_like", "randint_like")
_BY_VALUES = {torch.ops.aten.bernoulli.default, torch.ops.aten.multinomial.default}


def _draw_full(known: Callable | None, operator: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Makes a full tensor, of which each rank keeps its part: the numbers of one process with the same seed."""
    tensor = kwargs.get("out", args[0])
    handlers = DTensor._op_dispatcher._custom_op_handlers
    if tensor.device_mesh not in _MESHES or operator in _BY_VALUES and not is_part(tensor):
        ours = handlers.pop(operator)
        try:
            return operator(*args, **kwargs) if known is None else known(operator, args, kwargs)
        finally:
            handlers[operator] = ours
    if operator in _BY_VALUES:
        raise PartError(RuntimeError(f"{operator} draws for each element, by its value"))
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    kwargs = {name: empty if value is tensor else value for name, value in kwargs.items()}
    full = operator(*(empty if value is tensor else value for value in args), **kwargs)
    order = getattr(_ALIAS_OF.get(tensor, tensor), ROW_ORDER, None)
    full = full if order is None else full[order.to(full.device)]
    part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return tensor.copy_(part) if operator._schema.is_mutable else part


def _number_of(operator: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Refuses to read a number off a part, such as torch does for item(), bool(), or as an argument of a function."""
    _refuse_parts(lambda tensor: None)(args[0])
    return operator(args[0]._local_tensor)


def _any_of_part(operator: Any, args: tuple, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Whether this rank's part has such an element, by which anomaly mode looks for NaN."""
    return operator(args[0]._local_tensor)


def is_part(tensor: torch.Tensor) -> bool:
    """Whether this rank holds, or has computed, only a part of a DTensor of a model that auto_model has cut."""
    return (
        isinstance(tensor, DTensor)
        and tensor.device_mesh in _MESHES
        and any(
            size > 1 and not placement.is_replicate()
            for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        )
    )


def _reduce_ex(tensor: DTensor, protocol: Any) -> Any:
    if is_part(tensor):
        refuse_pickling()
    return torch.Tensor.__reduce_ex__(tensor, protocol)


def _refuse_safetensors(tensor: DTensor) -> Any:
    """safetensors, as in ``save_pretrained``, asks for the memory of each tensor that it writes."""
    if _is_from_auto_model(tensor) and str(sys._getframe(1).f_globals.get("__name__")).startswith("safetensors"):
        refuse_pickling()
    return torch.Tensor.storage(tensor)


def _refuse_parts(read: Callable) -> Callable:
    @functools.wraps(read)
    def guarded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_part(tensor):
            raise ValueError(
                "this number is computed from this rank's part of a weight or gradient that is cut over ranks: call "
                "full_tensor() before, on every rank (and initialise weights before ddl.auto_model)"
            )
        return read(tensor, *args, **kwargs)

    return guarded


_COPIERS = ("copy", "torch.distributed.checkpoint._state_dict_stager")  # the latter for DCP's async_save
_pickling_allowed = 0  # how many `with pickle_shards()` are open


def refuse_pickling() -> bool:
    """Called by ``__reduce_ex__``: raises an error, or returns whether this is for a copy, which stays on this rank."""
    copying = sys._getframe(2).f_globals.get("__name__") in _COPIERS
    if not _pickling_allowed and not copying:
        raise ValueError(
            "pickling (torch.save) would save this rank's part of a model that is cut over ranks, without the others': "
            "save ddl.full_state_dict(model), which every rank calls (save_pretrained takes it as state_dict=), or use "
            "ddl.Checkpoint for the model and its optimizer; to save one file a rank, do so in `with "
            "ddl.pickle_shards():`"
        )
    return copying


@contextlib.contextmanager
def pickle_shards() -> Iterator[None]:
    """Allows to pickle what this rank holds of a model that is cut over ranks, such as for one file a rank.

    Such a file can be loaded on the same rank of the same mesh only. :class:`Checkpoint` loads on any mesh.

    Examples:
        .. code-block:: python

            import tempfile
            import torch
            import ignite_ddl as ddl

            def saving(local_rank, folder):
                model = ddl.auto_model(torch.nn.Linear(4, 2), shard=True)
                try:
                    torch.save(model.state_dict(), f"{folder}/model.pt")
                except ValueError as error:
                    assert "this rank's part of a model" in str(error)
                with ddl.pickle_shards():
                    torch.save(model.state_dict(), f"{folder}/{local_rank}.pt")
                model.load_state_dict(torch.load(f"{folder}/{local_rank}.pt"))

            with tempfile.TemporaryDirectory() as folder, ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                parallel.run(saving, folder)
    """
    global _pickling_allowed
    _pickling_allowed += 1
    try:
        yield
    finally:
        _pickling_allowed -= 1
