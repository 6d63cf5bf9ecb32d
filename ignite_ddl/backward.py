"""What a user's code does to gradients in a backward pass, which has to be linear: hooks, and ``autograd.Function``.

On a mesh such code gets the gradients of a rank's rows, or of a microbatch's, times another factor than in one process.
In steps that are checked it is called with twice these gradients, too, and has to return twice as much.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ignite_ddl.compat import without_transforms
from ignite_ddl.pipeline.structure import local_tensor


def check_backward_hooks(module: nn.Module) -> None:
    """Lets a module's backward hooks be checked when they are next called; see :func:`_call_linear`."""
    for hooks in (module._backward_hooks, module._backward_pre_hooks):
        for key, hook in list(hooks.items()):

            def checked(module: nn.Module, *grads: Any, hooks=hooks, key=key, hook=hook) -> Any:
                hooks[key] = hook
                return _call_linear(functools.partial(hook, module), grads, f"a {type(module).__name__}")

            hooks[key] = checked


def _call_linear(hook: Any, grads: tuple, owner: str) -> Any:
    """Calls a backward hook, which has to be linear: for gradients twice as large it has to return twice as much."""
    kept = _times(1, grads)  # it may change them in place
    result = hook(*grads)
    if result is not None or not _alike(grads, kept):
        larger = _times(2, kept)
        twice = hook(*larger)
        changed, twice = (grads, larger) if result is None else (result, twice)
        if not _alike(_times(2, changed), twice):
            raise ValueError(
                f"a backward hook of {owner} should be linear in gradients (not clamp or normalise them), since on "
                "this mesh it gets those of a rank's rows or of a microbatch, times another factor: change p.grad "
                "between ddl.forward_backward and the optimizer's step"
            )
    return result


def _times(factor: int, grads: Any) -> Any:
    """New gradients, of which a DTensor keeps its placements: ``clone()`` would add up a Partial one."""

    def times(g: torch.Tensor) -> torch.Tensor:
        if not isinstance(g, DTensor):
            return factor * g
        local, size = factor * g.to_local(), {"shape": g.shape, "stride": g.stride()}
        return DTensor.from_local(local, g.device_mesh, g.placements, run_check=False, **size)

    return tree_map_only(torch.Tensor, times, grads)


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    return without_transforms(local_tensor(gradient))


@contextlib.contextmanager
def checking_tensor_hooks() -> Iterator[None]:
    """Inside, hooks that a forward pass registers on tensors are checked; those of parameters were checked before."""
    register = torch.Tensor.register_hook

    def register_checked(tensor: torch.Tensor, hook: Any) -> Any:
        if isinstance(tensor, nn.Parameter) or not callable(hook):
            return register(tensor, hook)
        owner = f"a tensor of shape {tuple(tensor.shape)}"  # not the tensor: its graph would never be freed
        return register(tensor, lambda grad: _call_linear(hook, (grad,), owner))

    # torch.compile would trace it, and call it for the method that it stands for, without end
    torch.Tensor.register_hook = (
        torch.compiler.disable(register_checked) if "torch._dynamo" in sys.modules else register_checked
    )
    try:
        yield
    finally:
        torch.Tensor.register_hook = register


# ------------------------------------------------------------------------------------------- autograd.Function


@contextlib.contextmanager
def checking_functions(by_row: bool) -> Iterator[None]:
    """Inside, the backward pass of an ``autograd.Function`` that is not torch's or ours is checked.

    It is tried first, with copies of what it may change in place. If it calls modules or runs a backward pass of its
    own, as activation checkpointing does, that would leave traces: then it is not tried.

    Args:
        by_row: whether it may do with each row what it likes, as in a pipeline alone, which leaves rows' gradients as
            they are.
    """
    apply = BackwardCFunction.apply

    def apply_checked(node: Any, *grads: Any) -> Any:
        function = node._forward_cls
        if function.__module__.partition(".")[0] in ("torch", "ignite_ddl"):
            return apply(node, *grads)
        saved = node.saved_tensors  # once: activation checkpointing computes them again
        twice = _tried(apply, node, saved, lambda: _times(2, grads))
        half = _tried(apply, node, saved, lambda: map(_first_half, grads)) if by_row else None
        result = apply(_Context(vars(node) | {"saved_tensors": saved}, node), *grads)
        with torch.no_grad():
            wrong = twice is not None and not _alike(_times(2, result), twice)
            if wrong and (half is None or not _is_by_row(grads, result, half)):
                raise ValueError(
                    f"the backward pass of {function.__name__}, an autograd.Function, should be linear in gradients "
                    "(not clamp, normalise or ignore them, nor add to them), since on this mesh it gets those of a "
                    "rank's rows or of a microbatch, times another factor: change p.grad between ddl.forward_backward "
                    "and the optimizer's step, and let the model return what else adds to the loss"
                )
        return result

    BackwardCFunction.apply = apply_checked
    try:
        yield
    finally:
        BackwardCFunction.apply = apply


class _Context:
    """The ``ctx`` of a backward pass, which has these attributes and else those of a node."""

    def __init__(self, attributes: dict[str, Any], node: Any) -> None:
        vars(self).update(attributes, _node=node)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def _tried(apply: Any, node: Any, saved: tuple, changed: Any) -> Any:
    """What a backward pass returns for changed gradients; None if that cannot be tried without a trace."""

    def stop(*_: Any, **__: Any) -> None:
        raise RuntimeError("not on trial")

    places = (torch.autograd, "backward"), (torch.autograd, "grad"), (nn.Module, "__call__")
    before = [getattr(*place) for place in places]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with contextlib.suppress(Exception), torch.random.fork_rng(devices), torch.no_grad():
        try:
            for place in places:
                setattr(*place, stop)
            return apply(_Context(_copied(vars(node) | {"saved_tensors": saved}), node), *changed())
        finally:
            for place, kept in zip(places, before, strict=True):
                setattr(*place, kept)
    return None


def _copied(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: _times(1, t) if t.is_floating_point() else t.clone(), tree)


def _first_half(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of the first half of rows, and 0 for the others."""
    n = len(gradient) // 2
    return torch.cat([gradient[:n], torch.zeros_like(gradient[n:])])


def _is_by_row(grads: Any, result: Any, half: Any) -> bool:
    """Whether the first half of rows came out the same without the gradients of the others."""
    tensors = [t for t in tree_leaves((grads, result)) if isinstance(t, torch.Tensor)]
    lengths = {len(t) if t.ndim else 0 for t in tensors}
    n = max(lengths) // 2
    return len(lengths) == 1 and n > 0 and _alike(*tree_map_only(torch.Tensor, lambda t: t[:n], (result, half)))


def _alike(one: Any, other: Any) -> bool:
    """Whether gradients are equal but for rounding, as kernels may add in another order, or cannot be compared."""
    for pair in zip(tree_leaves(one), tree_leaves(other), strict=False):
        a, b = (_plain(g) if isinstance(g, torch.Tensor) and g.layout is torch.strided else None for g in pair)
        if a is not None and b is not None and a.numel() and (a.is_floating_point() or a.is_complex()):
            gap, most = float((a - b).abs().max()), float(b.abs().max())
            if math.isfinite(gap) and gap > most * torch.finfo(a.dtype).eps ** 0.75:
                return False
    return True
