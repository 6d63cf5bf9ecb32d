"""Checks that ``ddl.auto_model`` adds to a model, so that nothing trains wrongly without an error."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from ignite.handlers.base_logger import BaseWeightsHandler
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ignite_ddl.checks.kept_state import LARGE, OF_EACH_MODULE, beside, kept_beside, reached, states_kept
from ignite_ddl.compat import BELONGS_TO_A_MODEL, called_by_ignites_checkpoint, without_transforms
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.parts import PART_OF_A_MODEL, guard_cut_model, refuse_pickling
from ignite_ddl.structure import local_tensor, tensors_of

_REPLACED = "_replaced_by_auto_model"  # on a parameter that another has replaced: its name


# ------------------------------------------------------------------------------------------- parameters


def check_layers(model: nn.Module, mesh: Mesh, plain: bool) -> None:
    """Refuses, before anything is sent, what torch would cut or replicate wrongly or with an error without a cure.

    Args:
        model: the full model.
        mesh: the mesh.
        plain: whether each rank keeps the weights as they are: under DDP, or rounds of local steps over dp alone.
    """
    cut = (module for module in model.modules() if isinstance(module, DistributedDataParallel | FSDPModule))
    parts = (p for p in model.parameters() if isinstance(p, DTensor) or hasattr(p, PART_OF_A_MODEL))
    if next(cut, next(parts, None)) is not None:
        raise ValueError(
            "model has been given to ddl.auto_model before, which cuts it in place, or has been cut or wrapped by "
            "other means: make it anew"
        )
    for name, module in model.named_modules():
        embeds = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if mesh.dp_cp_size > 1 and embeds and module.max_norm is not None:
            raise ValueError(
                f"{name!r} has max_norm={module.max_norm}, by which each rank would rescale the vectors of its own "
                "words in place: rescale all of them after the optimizer's step, on every rank"
            )
        if mesh.dp_cp_size * mesh.pp_size > 1 and getattr(module, "scale_grad_by_freq", False):
            raise ValueError(
                f"{name!r} has scale_grad_by_freq=True, which divides gradients by how often a word is in the batch, "
                "of which each rank or microbatch counts its own rows only: leave it out"
            )
        if not plain and embeds and module.sparse:
            raise ValueError(
                f"{name!r} has sparse=True, but sparse gradients work only where the mesh is data parallel without "
                "shard=True: sparse=False has the same gradients"
            )
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{name!r} is sparse ({tensor.layout}), which torch does not send to other ranks: register what it is "
                "made of instead (its indices and its values), and let forward make it, torch.sparse_coo_tensor("
                "self.indices, self.values, size)"
            )
    for name, parameter in model.named_parameters():  # under pp, torch would refuse it on the ranks of one stage only
        if not plain and mesh.dp_cp_size > 1 and not parameter.ndim and parameter.requires_grad:
            raise ValueError(
                f"{name!r} has no dimensions, which torch's FSDP2 and replicate do not support: give it the shape (1,)"
            )
        if not plain and mesh.dp_cp_size > 1 and not parameter.numel() and parameter.requires_grad:
            raise ValueError(
                f"{name!r} has no elements, {tuple(parameter.shape)}, whose gradient torch's FSDP2 and replicate do "
                "not reduce: leave it out, or freeze it"
            )
    if not plain:
        _check_memory(model)


def _check_memory(model: nn.Module) -> None:
    """Refuses a weight whose memory another tensor has, too, of the model or of objects that it uses: it would not
    change with the weight. Of a frozen weight, which a script may load or unfreeze, other weights alone.
    """
    trained_first = sorted(model.named_parameters(), key=lambda named: not named[1].requires_grad)
    weights = {id(p): (name, p) for name, p in trained_first}
    others = [*model.named_buffers(), *model.named_parameters()]
    for at, module in model.named_modules():
        kept = [(k, v) for k, v in vars(module).items() if k not in OF_EACH_MODULE]
        kept = [(k, v) for k, v in kept if f"{k}_orig" not in module._parameters]  # of spectral_norm, made in each pass
        others += [(f"{at}.{k}".lstrip("."), found) for k, v in kept for found in _memories(v)]
    used = kept_beside(beside([model])).items()  # but for globals, whose names may be those of attributes in its code
    used = [(name, held[key]) for name, (held, key) in used if "__builtins__" not in held]
    others += [(name, found) for name, value in used for found in _memories(value)]
    taken: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, one in [*weights.values(), *(other for other in others if id(other[1]) not in weights)]:
        if isinstance(one, np.ndarray):
            places = [weight for of_storage in taken.values() for weight in of_storage]
        elif one.is_meta or one.layout != torch.strided or not one.numel():
            continue
        else:
            places = taken.setdefault(one.untyped_storage().data_ptr(), [])
        places_here = [at for at in places if at[1].requires_grad or id(one) in weights]
        with_weight = next((weight for weight, tensor in places_here if _overlap(tensor, one)), None)
        if with_weight is not None:
            raise ValueError(
                f"{name!r} has the memory of {with_weight!r}, as a view of it, which ranks that cut, gather or copy "
                "weights would not keep: let forward compute it from the parameter (F.linear(x, self.weight.t())), or "
                "give both modules the same nn.Parameter (b.weight = a.weight)"
            )
        if id(one) in weights:
            places.append((name, one))


def _memories(value: Any) -> list[Any]:
    """Tensors and numpy's arrays in a variable."""
    pending, seen = [value], {}
    while pending and len(seen) < LARGE:
        one = pending.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            pending += one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
    return [one for one in seen.values() if type(one) in (torch.Tensor, nn.Parameter, np.ndarray)]


def _overlap(weight: torch.Tensor, other: Any) -> bool:
    """Whether a tensor or an array has an element of a weight's memory."""
    (a, b), (start, end) = map(_span, (weight, other))
    if start >= b or a >= end:
        return False
    if isinstance(other, np.ndarray) or weight.dtype.itemsize != other.dtype.itemsize:
        return True
    size = max(tensor.untyped_storage().nbytes() for tensor in (weight, other))  # of two views of NumPy's memory
    elements = torch.zeros(size // weight.dtype.itemsize, dtype=torch.bool)
    for tensor in (weight, other):  # such as columns of one matrix, one between the others
        once = [n if stride else 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        view = elements.as_strided(once, tensor.stride(), tensor.storage_offset())
        if view.any():
            return True
        view.fill_(True)
    return False


def _span(one: Any) -> tuple[int, int]:
    """The addresses between which the memory of a tensor or an array is."""
    if isinstance(one, np.ndarray):
        start, size, strides = one.__array_interface__["data"][0], one.itemsize, one.strides
    else:
        start, size = one.data_ptr(), one.element_size()
        strides = [size * stride for stride in one.stride()]
    steps = [(n - 1) * stride for n, stride in zip(one.shape, strides, strict=True)]
    return start + sum(min(step, 0) for step in steps), start + size + sum(max(step, 0) for step in steps)


def check_parameter_hooks(
    parameters: Iterable[tuple[str, nn.Parameter]],
    mesh: Mesh,
    by_ddp: bool,
    before: bool = False,
    but: Container[int] = (),
    again: bool = True,
) -> None:
    """Refuses hooks of parameters that would get another gradient than in one process, or none.

    DDP and a pipeline call a hook with the gradient of this rank's rows or of a microbatch, so it has to be linear;
    FSDP2 and ``replicate`` do not call it, or, if it runs after the gradient was accumulated, with the average.

    Args:
        parameters: names to parameters.
        mesh: the mesh.
        by_ddp: whether DDP averages gradients.
        before: whether the model is going to be cut, which would lose hooks. Default: False.
        but: the numbers of hooks that are ours.
        again: whether to try hooks that have been tried before, since what they do may depend on a state. Default:
            True.
    """
    for name, parameter in parameters:
        hooks = {k: hook for k, hook in (parameter._backward_hooks or {}).items() if k not in but}
        tried = _TRIED.setdefault(parameter, set()) if hooks else set()
        after = any(k not in but for k in getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
        if by_ddp or (mesh.pp_size > 1 and mesh.dp_cp_size == 1):
            untried = [hook for k, hook in hooks.items() if again or k not in tried]
            refused = after or not all(_is_linear(hook, parameter) for hook in untried)
            tried.update(() if refused else hooks)
        else:
            refused = bool(hooks) and mesh.dp_cp_size > 1
        if refused or before and not by_ddp and (hooks or after):
            raise ValueError(
                f"{name!r} has a hook, which would get this rank's gradient instead of the average over ranks, or not "
                "run on shards: change p.grad between ddl.forward_backward and the optimizer's step, or in "
                "optimizer.register_step_pre_hook"
            )


_TRIED = WeakTensorKeyDictionary()  # the numbers of a parameter's hooks that were called by a check


def _is_linear(hook: Callable, parameter: nn.Parameter) -> bool:
    """Whether the average of what a hook makes of gradients is what it makes of their average."""
    local = local_tensor(parameter)
    tolerance = max(1e-3, 4 * torch.finfo(local.dtype).eps)

    def hooked(gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone()  # perhaps in place
        return changed if (found := hook(changed)) is None else found

    with torch.no_grad(), torch.random.fork_rng(devices=[]), states_kept(reached(hook)), _silence():
        for scale in (1e-3, 1, 1e3, None):  # of small gradients and of large ones, which a hook may clip; and of NaN
            one, other = (scale or 1) * torch.randn_like(local), 3 * (scale or 1) * torch.randn_like(local)
            if scale is None and one.numel():
                one[(0,) * one.ndim] = torch.nan
            try:
                both = hooked(together := one + other)
                if torch.equal(both, together):  # such as one that only logs
                    continue
                share = tolerance * float(both.nan_to_num().abs().max())
                if not torch.allclose(hooked(one) + hooked(other), both, rtol=tolerance, atol=share, equal_nan=True):
                    return False
            except Exception:
                if scale is not None:  # a hook may refuse NaN
                    return False
    return True


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What a hook says of the numbers of a check is not said."""
    with contextlib.redirect_stdout(nowhere := io.StringIO()), contextlib.redirect_stderr(nowhere):
        level = logging.root.manager.disable
        logging.disable()
        try:
            with warnings.catch_warnings(action="ignore"):
                yield
        finally:
            logging.disable(level)


def copy_parameter_attributes(before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Copies attributes of replaced parameters to their replacements, and marks the replaced ones.

    Args:
        before: the parameters of the full model before it was cut, by name.
        model: the cut model.
    """
    after = dict(model.named_parameters(remove_duplicate=False))
    mesh = get_mesh()
    if mesh.world_size > 1:
        guard_cut_model(model, part_of_each=mesh.tp_size * mesh.pp_size == 1)
    still = {id(parameter) for parameter in after.values()}
    replaced = {name: old for name, old in before.items() if id(old) not in still}
    live, steps = [(p, _version(p)) for p in after.values()], _steps
    for name, old in replaced.items():
        if name in after:
            for attribute, value in vars(old).items():
                if not hasattr(after[name], attribute):
                    setattr(after[name], attribute, value)
    for name, old in replaced.items():  # in a second loop: a tied weight has two names
        setattr(old, _REPLACED, name)
        if type(old) is nn.Parameter:
            old._elsewhere = name not in after  # on another stage, whose rank does what a script does by the given net
            old._live = live, steps
            old.__class__ = _Replaced


_steps = 0  # of all optimizers


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


def _version(parameter: nn.Parameter) -> int:
    return 0 if parameter.is_inference() else parameter._version  # of torch.inference_mode, none is counted


class _Replaced(nn.Parameter):
    """A parameter of the uncut model that a script has kept: nothing that is done with it reaches the model.

    Of another stage, it may be written to, and its views, too; read only until a weight has changed.
    """

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = next(leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls)
        name = function.__name__
        views, writes = name in ("__get__", "detach", "__getitem__"), name in ("__set__", "__setitem__")
        writes = writes or (name in _IN_PLACE if name.endswith("__") else name.endswith("_"))
        writes = writes and any(type(leaf) is cls for leaf in tree_leaves(args[:1]))
        stays = old._elsewhere and not old._is_stale()
        with torch._C.DisableTorchFunctionSubclass():
            reads = views or not (torch.is_grad_enabled() and old.requires_grad)
            if not (function in _LOOKS or old._elsewhere and (views or writes) or stays and reads):
                raise old.error()
            result = function(*args, **(kwargs or {}))
            kept = views and isinstance(result, torch.Tensor)
            if kept and (not stays or result.untyped_storage()._cdata == old.untyped_storage()._cdata):
                result = result.as_subclass(cls)  # perhaps it is read when weights have changed
                vars(result).update(vars(old))
        return result

    def __repr__(self) -> str:
        if not self._elsewhere or self._is_stale():
            return f"<{self.error()}>"
        with torch._C.DisableTorchFunctionSubclass():
            return super().__repr__()

    def _is_stale(self) -> bool:
        live, steps = self._live
        return steps != _steps or any(_version(p) != version for p, version in live)

    def _copied(self) -> nn.Parameter:
        """As in a copy of the given net for a teacher, before the model has been trained."""
        if self._is_stale():
            raise self.error()
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter(self.detach().clone(), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copied = self._copied()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied().__reduce_ex__(protocol)

    def error(self) -> ValueError:
        return ValueError(
            f"this is {getattr(self, _REPLACED)!r} as it was before ddl.auto_model, which has put another parameter in "
            "its place, perhaps on another rank: take parameters from the returned model, their values from "
            "ddl.full_state_dict(model), called on every rank, copy a net before it is given to ddl.auto_model, and "
            "for a weight that two modules use, give both the same nn.Parameter before (b.weight = a.weight), not in a "
            "list or a function"
        )


_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_LOOKS = {  # what a parameter is, which stays true
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_meta")),
    *(
        getattr(torch.Tensor, name)
        for name in ("numel", "nelement", "size", "dim", "stride", "element_size", "__len__")
    ),
    *(getattr(torch.Tensor, name) for name in ("__hash__", "is_floating_point", "is_complex")),
    torch.Tensor.requires_grad.__get__,
}


def mark_trained(parameters: Iterable[nn.Parameter], frozen_too: bool = True) -> None:
    """Marks parameters by whether their gradients are going to be those of the global batch."""
    for parameter in parameters:
        setattr(parameter, BELONGS_TO_A_MODEL, frozen_too or parameter.requires_grad)


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> None:
    """Refuses an optimizer that has replaced parameters, none of the model's parameters, or some of no model.

    Raises:
        ValueError: if so, with the name of such a parameter.
    """
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [getattr(p, _REPLACED) for p in stepped if hasattr(p, _REPLACED)]
    of_model = [] if model is None else list(model.parameters())
    trained = {id(p) for p in of_model if p.requires_grad}
    stepped_ids = set(map(id, stepped))  # none where a stage has nothing to train
    if stale or (trained and stepped_ids and trained.isdisjoint(stepped_ids)):
        what = f"{stale[0]!r} as it was before ddl.auto_model cut it" if stale else "none of them"
        raise ValueError(
            f"optimizer should hold parameters of the model, but holds {what}: make it after ddl.auto_model, of the "
            "returned model's parameters"
        )
    if any(p.requires_grad and not getattr(p, BELONGS_TO_A_MODEL, True) for p in stepped):
        raise ValueError(
            "optimizer holds a weight that was frozen when ddl.auto_model took its model, so that nothing averages its "
            "gradient over ranks: unfreeze it before ddl.auto_model"
        )
    if any(hasattr(p, BELONGS_TO_A_MODEL) for p in of_model) and get_mesh().dp_cp_size * get_mesh().pp_size > 1:
        alone = next((p for p in stepped if p.requires_grad and not hasattr(p, BELONGS_TO_A_MODEL)), None)
        if alone is not None:
            raise ValueError(
                f"optimizer holds a weight of shape {tuple(alone.shape)} of no model from ddl.auto_model, so that "
                "nothing averages its gradient over ranks: make it part of the model before ddl.auto_model (heads, "
                "adapters and dtypes are changed there), or, without pp, of one that goes through ddl.auto_model as "
                "well"
            )


# ------------------------------------------------------------------------------------------- the cut model


def refuse_ignites_checkpoint(owner: nn.Module | torch.optim.Optimizer) -> None:
    """Ignite's Checkpoint would save this rank's shard and load it into every rank."""

    def refuse_to_save(*_: Any) -> None:
        if called_by_ignites_checkpoint():
            raise ValueError(
                "Ignite's Checkpoint would save or load rank 0's part of a model that is cut over ranks: take "
                "ddl.Checkpoint(to_save, folder) with the trainer and its loader in to_save, and its load_objects; or "
                "save ddl.full_state_dict(model), gathered on every rank"
            )

    def refuse_to_load(*_: Any) -> None:
        if called_by_ignites_checkpoint():
            raise ValueError(
                "Ignite's Checkpoint would load full weights or states into those of a model that is cut over ranks: "
                "give the model's to ddl.load_full_state_dict(model, state) on every rank; what ddl.Checkpoint has "
                "saved is loaded by ddl.Checkpoint.load_objects, an optimizer's state, too"
            )

    owner.register_state_dict_pre_hook(Hook(refuse_to_save))
    owner.register_load_state_dict_pre_hook(Hook(refuse_to_load))


def full_state_error(name: str) -> ValueError:
    """The error for a full state dict where this rank holds a part of the model."""
    return ValueError(
        f"state has {name!r} of the full model, but this rank holds a part of it: call "
        "ddl.load_full_state_dict(model, state) on every rank"
    )


class LocalStateDict(OrderedDict):
    """A state dict of what this rank holds; pickling it is refused, copying it is not."""

    def items(self) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("safetensors"):
            refuse_pickling()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        copying = refuse_pickling()
        plain = self if copying else OrderedDict(self)  # which torch.load knows
        vars(plain).update(vars(self))
        return OrderedDict.__reduce_ex__(plain, protocol)


def refuse_full_states(owner: nn.Module | torch.optim.Optimizer) -> None:
    """Refuses to load the state of one process into this rank's part, where torch's message names no cure."""

    def check_model(model: nn.Module, state: Mapping[str, Any], *_: Any) -> None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if isinstance(parameter, DTensor) and not isinstance(state.get(name, parameter), DTensor):
                raise full_state_error(name)

    def check_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        saved = [p for group in state["param_groups"] for p in group["params"]]
        matches = len(parameters) == len(saved)
        for parameter, key in zip(parameters, saved, strict=False):
            values = [v for v in state["state"].get(key, {}).values() if isinstance(v, torch.Tensor)]
            values = [v for v in values if tuple(v.shape) == tuple(parameter.shape) and v.ndim]
            matches = matches and all(isinstance(v, DTensor) == isinstance(parameter, DTensor) for v in values)
        if not matches:
            raise ValueError(
                "state should be that of this rank's part of the optimizer, but is that of one process or of another "
                "mesh: save it there by ddl.Checkpoint, which loads an optimizer on any mesh"
            )

    if isinstance(owner, nn.Module):
        owner.register_load_state_dict_pre_hook(Hook(check_model))
    else:
        owner.register_load_state_dict_pre_hook(Hook(check_optimizer))


def refuse_plain_names(
    model: nn.Module, state: Mapping[str, Any], prefix: str, _: Any, strict: bool, *__: Any
) -> None:  # a hook of DistributedDataParallel, which may be pickled
    """Refuses a state dict of the plain model, of which ``strict=False`` would load nothing, silently."""
    names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    plain = model.module.state_dict().keys()
    own = {f"module.{name}" for name in plain}
    if any(name in plain and name not in own for name in names) and not own.issubset(names):
        raise ValueError(
            f"state has the names of the plain model, such as {names[0]!r}, but those of DDP's state dict begin with "
            "'module.': call ddl.load_full_state_dict(model, state) on every rank, which is right on any mesh"
        )


def strip_ddp_prefix(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Lets a frozen model (a target network), which DDP does not wrap, load the state of the one that DDP wraps."""
    wrapped = f"{prefix}module."
    if not hasattr(model, "module"):
        for name in [name for name in state if name.startswith(wrapped)]:
            state[prefix + name.removeprefix(wrapped)] = state.pop(name)


def refuse_copies(module: nn.Module) -> None:
    """torch's FSDP2 cannot be copied, as Ignite's EMAHandler does, and pickling it fails with torch's message."""

    def refuse(*_: Any) -> None:
        raise ValueError(
            "a model that torch shards or replicates over dp cannot be copied. For a moving average, copy the model "
            "before ddl.auto_model, cut the copy in the same way, and update its parameters from the model's: "
            "for mean, p in zip(copied.parameters(), model.parameters()): mean.data.lerp_(p.data, momentum)"
        )

    for part in module.modules():
        if isinstance(part, FSDPModule):
            type(part).__deepcopy__ = refuse  # of a class that torch makes for FSDP2
            type(part).__reduce_ex__ = _reduce_ex


def _reduce_ex(owner: Any, protocol: Any) -> Any:
    refuse_pickling()
    return object.__reduce_ex__(owner, protocol)


class Hook:
    """A hook on a cut model: pickling it is pickling the model."""

    is_ours = True

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        self.function(*args)

    __reduce_ex__ = _reduce_ex


def check_handler(handler: Any) -> None:
    """Refuses Ignite's loggers of weights and gradients on cut weights: they would log a rank's part as if it were all.

    Raises:
        ValueError: if so.
    """
    if isinstance(handler, BaseWeightsHandler):
        cut = next((name for name, p in handler.weights if isinstance(p, DTensor)), None)
        instead = (
            "log what ddl.full_state_dict(model, on_rank=0) gives, called on every rank, or engine.state.grad_norm, "
            "the norm of all gradients, which max_norm of ddl.create_supervised_trainer computes"
        )
        name = type(handler).__name__
        if cut is not None:
            raise ValueError(f"{name} would log this rank's part of {cut!r}, which is cut over ranks: {instead}")
        if get_mesh().pp_size > 1 and any(hasattr(p, BELONGS_TO_A_MODEL) for p in handler.model.parameters()):
            warnings.warn(
                f"{name} logs what is on this rank, the weights of its stages: attach it on each pp rank, with a log "
                f"for each, or {instead}",
                stacklevel=3,
            )


def refuse_second_derivatives(module: nn.Module, name: str, gathered: bool = False) -> None:
    """Refuses second derivatives through a module whose weights are cut: DTensor and FSDP2 lose them.

    Args:
        module: the module.
        name: how the error names it.
        gathered: whether FSDP2 gathers its weights for each pass: then create_graph=True is right as long as no
            backward pass goes through what it has given. Default: False.
    """

    def refuse(_: torch.Tensor) -> None:
        raise ValueError(
            f"second derivatives (create_graph=True) are not supported through {name!r}, which is cut over ranks: use "
            "a mesh of dp alone without shard=True, or of tp alone with a tensor_plan that leaves out modules with a "
            "gradient penalty"
        )

    def check(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # in a backward pass: with create_graph=True
            gradient = without_transforms(gradient)
            if not gathered:
                refuse(gradient)
            elif gradient.requires_grad:
                gradient.register_hook(refuse)

    def watch(module: nn.Module, *given: Any) -> None:
        if not torch.compiler.is_compiling():  # which has no second derivatives of its own
            for leaf in tensors_of(given if gathered else given[-1]):
                if leaf.requires_grad:
                    leaf.register_hook(check)

    if gathered:  # the module's inputs, of which FSDP2 makes tensors of this call
        module.register_forward_pre_hook(watch, with_kwargs=True)
    else:
        module.register_forward_hook(watch)
