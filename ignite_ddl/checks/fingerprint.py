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
        self.n_attributes = len(vars(model))
        named = list(plain.named_parameters())
        self.parameters = [(name, p, p.dtype, p.requires_grad, _has_hooks(p)) for name, p in named]
        self.strides = [(name, p, p.stride()) for name, p in named if p.ndim > 3]

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


def check_unchanged(model: nn.Module) -> None:
    """Raises a ValueError if a model was changed since ``ddl.auto_model``, so that gradients would not be reduced."""
    fingerprint, mesh = fingerprint_of(model), get_mesh()
    if fingerprint is None or mesh.dp_cp_size * mesh.pp_size == 1:  # over tp alone, torch's layers reduce what is cut
        return
    if mesh.pp_size == 1 and getattr(model, "_holds_weights", False):  # FSDP2's full ones, until the optimizer steps
        return
    if not fingerprint.has_same_entries():
        forget_forward_pass(model)  # perhaps an error has ended it, which the script has caught
        reshard(model)  # FSDP2 puts unsharded parameters in the places of others
        if not fingerprint.has_same_entries():
            _check_new_parameters(model, fingerprint)
            fingerprint.take(model)
    for name, parameter, stride in fingerprint.strides:
        if parameter.stride() != stride:
            raise ValueError(
                f"{name!r} has another memory format than when ddl.auto_model made its buffers of gradients, which "
                "keep the old one: leave out model.to(memory_format=...), and give it to inputs alone"
            )
    if fingerprint.by_ddp:
        _check_unchanged_under_ddp(model, fingerprint)
    for name, parameter, _, _, hooked in fingerprint.parameters:  # hooked by a style of the plan
        if not hooked and _has_hooks(parameter):
            check_parameter_hooks([(name, parameter)], mesh, fingerprint.by_ddp)


def _check_unchanged_under_ddp(model: DistributedDataParallel, fingerprint: _Fingerprint) -> None:
    if len(vars(model)) != fingerprint.n_attributes:
        misplaced = next((k for k in list(vars(model))[fingerprint.n_attributes :] if hasattr(model.module, k)), None)
        if misplaced is not None:
            raise ValueError(
                f"{misplaced!r} was set on DDP's wrapper, where the model does not see it: set it on model.module"
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


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _check_new_parameters(model: nn.Module, fingerprint: _Fingerprint) -> None:
    before = {id(p): name for name, p, _, trained, _ in fingerprint.parameters if trained}
    plain = model.module if fingerprint.by_ddp else model
    after = {id(p): name for name, p in plain.named_parameters() if p.requires_grad}
    new = [name for i, name in after.items() if i not in before]
    removed = [name for i, name in before.items() if i not in after]
    if new or removed and fingerprint.by_ddp and not fingerprint.finds_unused:
        name, change = (new or removed)[0], "added or replaced" if new else "removed"
        raise ValueError(
            f"{name!r} was {change} after ddl.auto_model, but ranks average the "
            "gradients of the parameters that the model had then: add heads, adapters and parametrizations before "
            "ddl.auto_model, and load weights in place (ddl.load_full_state_dict)"
        )
