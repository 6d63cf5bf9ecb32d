"""Whether a model is still what ddl.auto_model returned: its parameters, modules and hooks."""

from __future__ import annotations

import itertools
import operator
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.checks.guards import check_parameter_hooks
from ignite_ddl.checks.replicas import digest
from ignite_ddl.compat import forget_forward_pass
from ignite_ddl.data_parallel import reshard
from ignite_ddl.mesh import get_mesh
from ignite_ddl.state import INITIAL_VALUES
from ignite_ddl.structure import local_tensor


class _Fingerprint:
    """What ``ddl.auto_model`` has returned, to find later changes; a copy of the model has none.

    Attributes:
        by_ddp: whether DDP wraps the model.
        sharded: whether weights are sharded over dp or averaged by rounds, so that no wrapper has to be called.
        finds_unused: whether DDP allows weights to be left out of a step.
    """

    def __init__(self, model: nn.Module, sharded: bool) -> None:
        self.by_ddp, self.sharded = isinstance(model, DistributedDataParallel), sharded
        self.finds_unused = self.by_ddp and (model.find_unused_parameters or model.static_graph)
        plain = model.module if self.by_ddp else model
        self.names, named = set(vars(model)), list(plain.named_parameters())
        self.parameters = [(name, p, p.dtype, p.requires_grad, _hooks(p, self.by_ddp)) for name, p in named]
        self.strides = [(name, p, p.stride()) for name, p in named if p.ndim > 3]
        self.children = {k: m for k, m in plain._modules.items() if vars(model).get(k) is m}  # also DDP's attributes
        self.take(model)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()

    def take(self, model: nn.Module) -> None:
        modules, plain = list(model.modules()), model.module if self.by_ddp else model
        self.attributes = list(map(vars, modules))
        self.trains_as_written = all(
            type(m).train is nn.Module.train for m in plain.modules()
        )  # others may freeze layers
        self.dicts = [d for module in modules for d in (module._parameters, module._modules)]
        self.entries = self._entries()
        self.children = {k: m for k, m in plain._modules.items() if k in self.children}
        vars(model).update(self.children)
        now, before = {id(p): p for p in plain.parameters()}, {id(p) for _, p, *_ in self.parameters}
        self.added = [
            p for i, p in now.items() if i not in before
        ]  # frozen, or _check_new_parameters would refuse them
        self.parameters = [each for each in self.parameters if id(each[1]) in now]

    def _entries(self) -> list[Any]:
        return list(itertools.chain.from_iterable(map(dict.values, self.dicts)))

    def has_same_entries(self) -> bool:
        """Looks in the modules' own dicts, without a line of Python for each: walking through the model takes long."""
        now = self._entries()
        return len(now) == len(self.entries) and all(map(operator.is_, now, self.entries))

    def is_training(self) -> bool:
        """Whether ``model.train()`` would change nothing, which sets an attribute of each module."""
        all_train = all(each.get("training") and "train" not in each for each in self.attributes)
        return all_train and self.trains_as_written and self.has_same_entries()


def take_fingerprint(model: nn.Module, sharded: bool) -> None:
    """Records a model as it is now, for :func:`check_unchanged`."""
    model._fingerprint = _Fingerprint(model, sharded)
    if get_mesh().pp_size > 1:
        digests = [(p, digest(p)) for p in model.parameters() if not p.is_meta]
        setattr(model, INITIAL_VALUES, (torch.get_rng_state(), digests))
        model.register_load_state_dict_post_hook(_forget_initial_values)


def _forget_initial_values(model: nn.Module, *_: Any) -> None:
    vars(model).pop(INITIAL_VALUES, None)


def warn_of_random_values(model: nn.Module) -> None:
    """Stages that draw initial values draw others than one process, each for itself; nothing else shows that."""
    before, digests = vars(model).pop(INITIAL_VALUES, (None, ()))
    if before is None or torch.equal(before, torch.get_rng_state()):
        return
    for p, initial in digests:
        if digest(p) != initial and len(local_tensor(p.detach()).unique()) > 2:  # one or two: a constant
            name = next(name for name, other in model.named_parameters() if other is p)
            warnings.warn(
                f"{name!r} was changed after ddl.auto_model. If it was initialised with random numbers, each stage of "
                "the pipeline has drawn its own, and not those of one process: initialise before ddl.auto_model. If "
                "it was loaded or computed, nothing is wrong",
                stacklevel=2,
            )
            return


def fingerprint_of(model: nn.Module) -> _Fingerprint | None:
    return getattr(model, "_fingerprint", None)  # also of what torch.compile has wrapped


def check_unchanged(model: nn.Module, again: bool = True) -> None:
    """Raises a ValueError if a model was changed since ``ddl.auto_model``, so that gradients would not be reduced.

    Args:
        model: the model.
        again: whether to try hooks that have been tried before. Default: True.
    """
    fingerprint, mesh, model = fingerprint_of(model), get_mesh(), getattr(model, "_orig_mod", model)
    if fingerprint is None or mesh.dp_cp_size * mesh.pp_size == 1:  # over tp alone, torch's layers reduce what is cut
        return
    if mesh.pp_size == 1 and getattr(model, "_holds_weights", False):  # FSDP2's full ones, until the optimizer steps
        return
    if not fingerprint.has_same_entries():
        forget_forward_pass(model)  # perhaps an error has ended it, which the script has caught
        reshard(model)  # FSDP2 puts unsharded parameters in the places of others
    for name, parameter, stride in fingerprint.strides:
        if parameter.stride() != stride:
            raise ValueError(
                f"{name!r} has another memory format than when ddl.auto_model made its buffers of gradients, which "
                "keep the old one: leave out model.to(memory_format=...), and give it to inputs alone"
            )
    if fingerprint.by_ddp:
        _check_unchanged_under_ddp(model, fingerprint)
    for name, parameter, _, _, hooks in fingerprint.parameters:
        if (found := _hooks(parameter)) and found != hooks:
            check_parameter_hooks([(name, parameter)], mesh, fingerprint.by_ddp, but=hooks, again=again)
    has_same_entries = fingerprint.has_same_entries()
    if not has_same_entries or any(p.requires_grad for p in fingerprint.added):
        _check_new_parameters(model, fingerprint)
    if not has_same_entries:
        fingerprint.take(model)  # after all else was compared with what was before


def _check_unchanged_under_ddp(model: DistributedDataParallel, fingerprint: _Fingerprint) -> None:
    own = vars(model)
    set_on_it = [
        *(own.keys() - fingerprint.names),
        *model._parameters,
        *model._buffers,
        *model._modules.keys() - {"module"},
    ]
    set_on_it = [name for name in set_on_it if hasattr(model.module, name)]
    set_on_it += [name for name, child in fingerprint.children.items() if own.get(name) is not child]
    if set_on_it:
        raise ValueError(
            f"{set_on_it[0]!r} was set on DDP's wrapper, where the model does not see it: set it on model.module"
        )
    for name, parameter, dtype, trained, _ in fingerprint.parameters:
        if parameter.dtype is not dtype:
            raise ValueError(
                f"{name!r} was {dtype} when ddl.auto_model wrapped the model in DDP, whose buffers keep that, and is "
                f"{parameter.dtype}: change the dtype before"
            )
        if parameter.requires_grad is not trained and not (trained and fingerprint.finds_unused):
            raise ValueError(
                f"{name!r} was {'unfrozen' if trained else 'frozen'} when ddl.auto_model wrapped the model in DDP, "
                f"which {'waits for' if trained else 'does not average'} its gradient: pass shard=True to "
                "ddl.auto_model, which follows such changes, or call ddl.auto_model on model.module again, and make "
                "the optimizer and the trainer anew"
            )


def _hooks(parameter: nn.Parameter, after_alone: bool = False) -> tuple[int, ...]:
    """The numbers of a parameter's hooks, of which none is given twice; or of those that run after its gradient."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return (*(() if after_alone else before or ()), *(after or ())) if before or after else ()


def _check_new_parameters(model: nn.Module, fingerprint: _Fingerprint) -> None:
    before = {id(p): (name, trained) for name, p, _, trained, _ in fingerprint.parameters}
    plain = model.module if fingerprint.by_ddp else model
    after = {id(p): (name, p.requires_grad) for name, p in plain.named_parameters()}
    new = [name for i, (name, trained) in after.items() if trained and i not in before]
    removed = [name for i, (name, trained) in before.items() if trained and i not in after]
    if new or removed and fingerprint.by_ddp and not fingerprint.finds_unused:
        name, change = (new or removed)[0], "added or replaced" if new else "removed"
        raise ValueError(
            f"{name!r} was {change} after ddl.auto_model, but ranks average the "
            "gradients of the parameters that the model had then: add heads, adapters and parametrizations before "
            "ddl.auto_model, and load weights in place (ddl.load_full_state_dict)"
        )
