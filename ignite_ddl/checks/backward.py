"""What a user's code does to gradients in a backward pass, which has to be linear, and the same for any other rows.

On a mesh such code gets the gradients of a rank's rows, or of a microbatch's, times another factor than in one process.
In steps that are checked, hooks and each ``autograd.Function`` are called with twice these gradients, too, and have to
return twice as much. In steps 1, 8, 16, …, gradients of some rows are compared with those without the others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ignite_ddl.checks.kept_state import cloned, reached, saved_states, states_kept
from ignite_ddl.checks.rows_alone import MAY_DEPEND, few_rows, norm_over_rows, opened
from ignite_ddl.checks.traceless import Kept, WatchForSums, as_real, differ, evaluating, put, rows_kept, without_trace
from ignite_ddl.checks.trying import may_fail
from ignite_ddl.compat import gathers, without_transforms
from ignite_ddl.experts.balance import router_loss_weight
from ignite_ddl.structure import local_tensor, n_rows, some_rows, tensors_of


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
    owners = reached(hook)
    before, kept = saved_states(owners), _times(1, grads)  # it may change them in place
    result = hook(*grads)
    if result is not None or not _alike(grads, kept):
        larger = _times(2, kept)
        with states_kept(owners):
            for state in before:
                state.restore()
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
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    traces = (torch.autograd, "backward"), (torch.autograd, "grad"), (nn.Module, "__call__")
    states = states_kept(reached(node._forward_cls, *vars(node).values()))
    with (
        may_fail("backward passes that depend on other rows"),
        torch.random.fork_rng(devices),
        torch.no_grad(),
        _failing(*traces),
        states,
    ):
        return apply(_Context(_copied(vars(node) | {"saved_tensors": saved}), node), *changed())
    return None


@contextlib.contextmanager
def _failing(*places: tuple[Any, str]) -> Iterator[None]:
    """Inside, calls of these functions, which would leave a trace, raise an error."""

    def stop(*_: Any, **__: Any) -> None:
        raise RuntimeError("not on trial")

    before = [getattr(*place) for place in places]
    try:
        for place in places:
            setattr(*place, stop)
        yield
    finally:
        for place, kept in zip(places, before, strict=True):
            setattr(*place, kept)


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


# ------------------------------------------------------------------------------------------- gradients of rows

ROW_GRADIENTS_DEPEND = (
    "the gradient of a row's output should depend on that row alone, but the model scales it by the rows that it gets "
    "(by x.numel(), or by a norm of gradients), and a rank or a microbatch gets only some of a batch: use the numbers "
    "of one row (x[0].numel()) times a constant, such as the batch size; if gradients of each rank's rows are meant, "
    "pass checks=False to ddl.auto_model and ddl.create_supervised_trainer"
)


def row_gradients_depend(run: Callable[[Any], Any], x: Any, stages: Sequence[nn.Module]) -> bool:
    """Whether gradients of some rows' outputs change if these rows are computed without the others.

    False where it cannot be known (see :func:`~ignite_ddl.checks.rows_alone.rows_depend_on_each_other`), where FSDP2
    gathers weights in a backward pass, since ranks would wait for each other there, where code runs a backward pass
    of its own, which adds to ``p.grad``, or where outputs change, too, such as by an inner loop of gradients. Every
    rank makes four passes, as peers may wait in them.
    """
    if MAY_DEPEND.get() or any(gathers(module) for stage in stages for module in stage.modules()):
        return False
    run, x = opened(run, x)
    few, part = few_rows(x)
    n = part.stop
    whole, rest = slice(0, n), slice(0, part.start)

    def gradients(rows: slice, seed: int = 0, first: Iterable[Kept] = ()) -> _Gradients:
        return _Gradients(run, few, stages, seed, rows, n, first)

    with may_fail("gradients of rows that depend on other rows"):
        with _backward_tried(stages) as watch:
            together = gradients(whole)
            again = gradients(whole, 1, together.left)  # unlike by random numbers, or by what was kept of each row
            unlike = together.outputs_differ(again, watch.coarsest)
            unlike = unlike or not _add_up(watch.coarsest, together.found, again.found)
            others, alone = gradients(rest), gradients(part)
            by_rows = norm_over_rows(stages)
        unknown = watch.found or by_rows or unlike or part.start < 1
        unknown = unknown or not together.lengths == others.lengths == alone.lengths  # some outputs have no rows
        if unknown or together.outputs_differ(alone, watch.coarsest):
            return False
        return not _add_up(watch.coarsest, together.found, others.found, alone.found)
    return False


def may_depend_in_training(run: Callable[[Any], Any], x: Any, stages: Sequence[nn.Module]) -> bool:
    """Whether outputs or gradients of some rows change in training without the others, for whatever reason: random
    numbers, too, or since it cannot be tried. Every rank makes three passes, where the checks that say why make 13.
    """
    if MAY_DEPEND.get() or any(gathers(module) for stage in stages for module in stage.modules()):
        return True
    run, x = opened(run, x)
    few, part = few_rows(x)
    with may_fail("rows that depend on each other"):
        with _backward_tried(stages) as watch:
            of = slice(0, part.stop), slice(0, part.start), part
            together, others, alone = (_Gradients(run, few, stages, 0, rows, part.stop) for rows in of)
        if together.outputs and together.lengths == alone.lengths:
            differs = together.outputs_differ(alone, watch.coarsest)
            return differs or not _add_up(watch.coarsest, together.found, others.found, alone.found)
    return True


@contextlib.contextmanager
def _backward_tried(stages: Sequence[nn.Module]) -> Iterator[WatchForSums]:
    """The context of backward passes that are no step's."""
    with (
        evaluating(stages, all_of_them=False),
        _without_hooks(stages),
        _failing((torch.autograd, "backward")),
        WatchForSums() as watch,
    ):
        yield watch


@contextlib.contextmanager
def nudged(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, weights are slightly different, so that what was 0 but for rounding before a ReLU is not 0 any more.

    There, a row alone may have another gradient than among others, since a kernel adds up in another order.
    """
    parts = [local_tensor(p.detach()) for stage in stages for p in stage.parameters() if p.is_floating_point()]
    kept = [(part, part.clone()) for part in {part.data_ptr(): part for part in parts if part.numel()}.values()]
    try:
        for part, before in kept:
            steps = torch.arange(part.numel(), device=part.device).cos().view(part.shape)
            part.copy_(before + 1e-2 * before.abs().mean().clamp(min=1e-4) * steps)
        yield
    finally:
        for part, before in kept:
            part.copy_(before)


class _Gradients:
    """Gradients of a weighted sum of some rows' outputs: of weights by module and name, of inputs by number.

    Args:
        run: takes rows, returns their outputs.
        x: n rows.
        stages: the modules that run.
        seed: of random numbers.
        part: which rows are computed; if none, all of them are, times 0, as peers may wait for this rank.
        n: the number of rows.
        first: what an earlier pass has kept of each row, with which this one goes on.

    Attributes:
        outputs: the outputs.
        found: the gradients.
        lengths: of the outputs, for each row.
        left: what modules keep of each row.
    """

    def __init__(
        self,
        run: Callable,
        x: Any,
        stages: Sequence[nn.Module],
        seed: int,
        part: slice,
        n: int,
        first: Iterable[Kept] = (),
    ) -> None:
        factor, part = (1.0, part) if part.stop else (0.0, slice(0, n))
        rows = cloned(some_rows(x, part, n))
        by: dict[Any, torch.Tensor] = {i: t for i, t in enumerate(tensors_of(rows)) if t.requires_grad}

        def note(module: nn.Module, *_: Any) -> None:  # after FSDP2's hook, which gathers them
            held = {(module, k): p for k, p in module._parameters.items() if isinstance(p, nn.Parameter)}
            by.update({key: p for key, p in held.items() if p.requires_grad})  # not what functional_call has put there

        handles = [m.register_forward_pre_hook(note) for m in {m for stage in stages for m in stage.modules()}]
        try:
            with without_trace(stages, seed) as kept, torch.enable_grad(), router_loss_weight(0.0):
                put(first)
                outputs = [o.to_local() if isinstance(o, DTensor) else o for o in tensors_of(run(rows))]
                outputs = [as_real(o) for o in outputs if o.requires_grad and o.ndim and len(o)]
                total = factor * sum(_weighted(output, part, n) for output in outputs)
                has_graph = bool(by and outputs)
                grads = torch.autograd.grad(total, list(by.values()), allow_unused=True) if has_graph else ()
                self.left = rows_kept(kept, n_rows(rows))
        finally:
            for handle in handles:
                handle.remove()
        pairs = zip(by, map(_local_gradient, grads), strict=has_graph)
        self.outputs = [o.detach() for o in outputs]
        self.lengths = [len(o) / (part.stop - part.start) for o in outputs]
        self.found = {key: _padded(g, key, part, n) for key, g in pairs if g is not None}

    def outputs_differ(self, of_last: _Gradients, coarsest: float) -> bool:
        """Whether the last rows have other outputs when they are computed without the others."""
        pairs = zip(self.outputs, of_last.outputs, strict=False)
        return any(differ(one[len(one) - len(last) :], last, coarsest) for one, last in pairs)


def _weighted(output: torch.Tensor, part: slice, n: int) -> torch.Tensor:
    """The sum of the outputs of a part of n rows, of which each has a factor that it has among other rows, too."""
    each, more = divmod(len(output), part.stop - part.start)  # such as a row for each token
    if more:
        return output.sum() * 0.0
    flat = output.flatten(1) if output.ndim > 1 else output[:, None]
    of_rows, of_numbers = (
        torch.arange(*ends, device=output.device).cos().to(output.dtype)
        for ends in ((part.start * each, part.stop * each), (flat.shape[1],))
    )
    with torch.autocast(output.device.type, enabled=False):
        return of_rows @ (flat @ of_numbers)  # without a tensor of the output's size, which may be large


def _padded(gradient: torch.Tensor, key: Any, part: slice, n: int) -> torch.Tensor:
    """A gradient of rows with 0 for the others of n rows; one of a weight as it is."""
    if not isinstance(key, int) or len(gradient) == n:
        return gradient
    padded = gradient.new_zeros(n, *gradient.shape[1:])
    padded[part] = gradient
    return padded


def _local_gradient(gradient: torch.Tensor | None) -> torch.Tensor | None:
    local = None if gradient is None else local_tensor(gradient).detach()
    return local if local is not None and local.layout is torch.strided else None


def _add_up(coarsest: float, gradients: dict[Any, torch.Tensor], *parts: dict[Any, torch.Tensor]) -> bool:
    """Whether gradients are the sums of those of parts, where a weight that is not used has 0.

    But for rounding, which is relative to the largest: some should add up to 0.

    Args:
        coarsest: as :class:`WatchForSums <ignite_ddl.checks.traceless.WatchForSums>` has noted it.
        gradients: those of all rows.
        parts: those of some of them.
    """
    largest = {key: _largest(g) if g.numel() else 0.0 for key, g in gradients.items()}
    most = max(largest.values(), default=0.0)
    for key in dict.fromkeys(itertools.chain(gradients, *parts)):
        left = sum((-part[key] for part in parts if key in part), gradients.get(key, 0.0))
        device = left.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else left.dtype
        eps = max(torch.finfo(dtype).eps, coarsest)
        tolerance = min(0.05, 1e5 * eps) * largest.get(key, 0.0) + 10 * eps**0.5 * most
        if left.numel() and _largest(left) > tolerance:
            return False
    return True


def _largest(gradient: torch.Tensor) -> float:
    """The largest number of a gradient; NaN counts as 0."""
    if gradient.is_complex():
        return float(gradient.abs().nan_to_num().max())
    least, most = map(float, gradient.aminmax())  # which is much faster than a tensor of absolute values
    return float(gradient.abs().nan_to_num().max()) if not math.isfinite(most - least) else max(-least, most)


@contextlib.contextmanager
def _without_hooks(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, backward hooks that a user gave to modules and weights are not called: a check is not a step."""
    modules = {module for stage in stages for module in stage.modules()}
    dicts = [hooks for module in modules for hooks in (module._backward_hooks, module._backward_pre_hooks)]
    dicts += [p._backward_hooks for module in modules for p in module.parameters(recurse=False) if p._backward_hooks]
    kept = [(hooks, dict(hooks)) for hooks in dicts]
    for hooks in dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)
