"""The checks of training steps, by which nothing trains wrongly without an error.

====================  ==================================================================  ============================
check                 what it finds                                                       when
====================  ==================================================================  ============================
the model as it was   parameters added, replaced, re-typed or hooked, and under DDP       before each step
                      frozen or unfrozen, since ``ddl.auto_model``; modules added
values                weights that were not loaded                                        steps 1, 2, 4, 8, …
same rows             tp, cp or pp peers with different rows                              steps 1, 2, 4, 8, …
same modules          dp ranks that call different modules                                each step
same steps            ranks that leave out a step of the optimizer                        each step
same lengths          targets padded to other lengths on other ranks                      each step
the whole model ran   a method called past the wrapper that reduces gradients             each step
weights left out      DDP waits for gradients of weights that a rank did not use          each step
rows alone            a model, or a stage, whose output for a row depends on other rows,   step 1
                      in training or in evaluation
numbers kept          plain attributes that dp ranks computed from their own rows, and     steps 1, 2, 4, 8, …
                      on which outputs depend
padding               rows padded to other lengths on other dp ranks, on which outputs    steps 1, 2, 4, 8, …;
                      depend                                                              a warning
tokens alone          over cp, a module that looks at other tokens, or counts positions   steps 1, 2, 4, 8, …;
                                                                                          evaluators' step 1
same loss             tp peers that compute different losses                              steps 1, 2, 4, 8, …
whole gradients       tp peers with other gradients of a replicated weight                until each weight had one
replicas              weights and buffers that should be equal on ranks, and are not      steps 1, 2, 4, 8, …
====================  ==================================================================  ============================

The code between cut layers is checked in a model's first forward pass (``regions.py``), losses by ``loss_contract.py``.

What cannot be seen, and differs from one process without an error:

- rows that are mixed before the model, as in mixup over the whole batch, a norm by statistics of the batch, or padding
  that a ``DistributedSampler`` adds: give whole batches to ``ddl.auto_dataloader``, mix in the dataset;
- random numbers for rows that dp ranks draw each for its own (:mod:`ignite_ddl.tensor.random` has the rules), and seeds
  of each rank for an initialisation of weights that ``shard=True`` cuts;
- a number that a script computes from what a rank has, as if it were everything: the loss or output of its rows in an
  engine of its own, a metric such as ``Average`` of them, a maximum that a hook logs; under pp sums, norms and names of
  ``model.parameters()`` and ``model.state_dict()``, which are those of its stages;
- an ``autograd.Function`` whose backward is not linear (a clamped gradient), since a rank's gradients are those of its
  rows times the number of dp ranks; backward hooks of modules and of tensors are asked;
- under pp, a ``collate_fn`` that pads to the longest of a rank's rows, before a model whose output depends on it;
- numbers that a script draws for weights or gradients under pp, where each stage draws its own;
- with ``loss_divisor="rows"``, a batch of a second loader that was read in another step than the one that trains on it;
- a loss that is a mean over rows in steps 1, 2, 4, 8, … and another thing only between them;
- a sequence as long as the batch, in targets with rows in dim 1;
- initial values that a pipeline's stages draw after ``ddl.auto_model``, and a loop of your own whose ranks have unlike
  numbers of rows: both are warned of.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from ignite_ddl.context.sequence import check_tokens
from ignite_ddl.data_parallel import reshard
from ignite_ddl.guards import check_parameter_hooks
from ignite_ddl.loss_contract import Divisor, LossContract
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.pipeline.cut import check_root_hooks
from ignite_ddl.pipeline.structure import map_leaves, n_rows, tensors_of
from ignite_ddl.regions import check_regions_once
from ignite_ddl.replicas import check_replicas, digest
from ignite_ddl.state import AS_MADE
from ignite_ddl.tensor.gradients import ReplicatedWeights
from ignite_ddl.traceless import ROWS_DEPEND, numbers_kept, numbers_matter, padding_matters, rows_depend_on_each_other

__all__ = [
    "N_SHAPES",
    "TOKENS_ALONE",
    "Audit",
    "check_same_rows",
    "check_tokens_are_alone",
    "check_unchanged",
    "remember",
    "shapes_of",
]

TOKENS_ALONE = "_tokens_alone"  # of a model that was asked, or should not be
MOST_IN_FULL = 4096  # tokens of a rank's part of a sequence, up to which a model that mixes tokens is tried in full
N_SHAPES = 4  # numbers of :func:`shapes_of`


class Audit:
    """The checks of one model's steps; every rank calls each method at the same place of a step.

    Args:
        model: what ``ddl.auto_model`` returned.
        stages: it as stages.
        mesh: the mesh.
    """

    def __init__(self, model: nn.Module, stages: Any, mesh: Mesh) -> None:
        self.model, self.stages, self.mesh = model, stages, mesh
        self.step, self.again, self.first_x, self.x, self.inputs = 0, True, None, None, None
        self.hooks = contextlib.ExitStack()  # in steps that check hooks of tensors
        known = _remembered(model)
        foreign = known is None and not isinstance(model, DistributedDataParallel | FSDPModule)
        if foreign and mesh.dp_cp_size > 1 and any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                "model should be what ddl.auto_model returned, whose gradients are averaged over ranks, but this "
                f"{type(model).__name__} is not: model = ddl.auto_model(model)"
            )
        self.modules = ModulesInUse(stages.local_stages(), mesh)
        self.whole_weights = ReplicatedWeights(mesh)
        self.ran = None if known is None or known.sharded or mesh.dp_cp_size == 1 or mesh.pp_size > 1 else _Ran()
        if self.ran is not None:
            model.register_forward_pre_hook(self.ran)

    def begin(self, rows: tuple[int, int] | None, x: Any, y: Any) -> None:
        """Before the forward pass."""
        self.step += 1
        self.again = self.step & (self.step - 1) == 0
        check_unchanged(self.model)
        if self.again:
            _check_values(self.model)
            _warn_of_draws(self.model)
            if self.mesh.pp_size > 1:
                _check_hooks_of_holders(self.model, self.stages)
            check_same_rows(self.mesh, x, y)
            stages = self.stages.local_stages() if self.mesh.tp_size > 1 else []
            for stage in stages:
                check_regions_once(stage, trains=self.stages.is_last and stage is stages[-1])
            if self.mesh.dp_cp_size * self.mesh.pp_size > 1:
                for module in self.model.modules():
                    _try_backward_hooks(module)
        if rows is not None and self.mesh.pp_size > 1:
            _check_rows_are_in_dim_0(rows[0] or 1, x)
        self.first_x = x if self.step == 1 and self.mesh.dp_cp_size > 1 and self.mesh.pp_size == 1 else None
        self.x = x if self.again and self.mesh.dp_size > 1 and self.mesh.pp_size == 1 else None
        self.inputs = _note_inputs(self.stages) if self.step == 1 and self.mesh.pp_size > 1 else None
        if self.again and self.mesh.dp_cp_size * self.mesh.pp_size > 1:
            self.hooks.enter_context(_trying_tensor_hooks())
        if self.ran is not None:
            self.ran.said = False
        if self.again:
            check_tokens_are_alone(self.model, self.stages, x)
        self.modules.begin()

    def told(self, updates: int) -> list[float]:
        """After the forward pass: whether this rank has stepped the model before, how often, and the square of that;
        and for each pp rank the digest of its modules and its square, to be summed over dp.
        """
        digests = [0.0] * (2 * self.mesh.pp_size)
        digest = self.modules.digest()
        digests[2 * self.mesh.pp_rank : 2 * self.mesh.pp_rank + 2] = float(digest), float(digest**2)
        return [float(updates > 0), float(updates), float(updates**2), *digests]

    def end(self, last: bool) -> None:
        """After the backward pass, before anything else is sent."""
        self.hooks.close()
        if self.ran is not None and not self.ran.said:
            raise ValueError(
                "the model should be called as a whole, model(x), but this step called only a method or a part of it, "
                "past the wrapper that averages gradients over dp: let forward do it, perhaps chosen by an argument"
            )
        if last:
            self.modules.check_gradients()
        if self.x is not None:  # here, since all ranks have called the same modules
            x, self.x = self.x, None
            _compare_with_dp_peers(self.stages, x, self.mesh)
        if self.first_x is not None:
            x, self.first_x = self.first_x, None
            _check_rows_are_alone([(self.stages.forward_only, x, self.stages.local_stages())])
        if self.inputs is not None:
            inputs, self.inputs = self.inputs, None
            for _, _, handle in inputs:
                handle.remove()
            _check_rows_are_alone([(lambda rows, s=stage: s(*rows), of[0], [stage]) for stage, of, _ in inputs if of])
            for stage, _, _ in inputs:
                reshard(stage)

    def compare(self, summed: list[float], contract: LossContract) -> None:
        """What was summed with the loss: :func:`shapes_of` and :meth:`told`.

        Raises:
            ValueError: on every rank, if dp ranks called different modules, or have targets of different lengths, or
                some ranks have stepped less often than others.
        """
        n, shapes, squares, pads, stepping, updates, squared = summed[: N_SHAPES + 3]
        digests = summed[N_SHAPES + 3 :]
        if stepping * squared != updates**2:
            raise ValueError(
                "ranks should step the model alike, but some have left out a step that others have made: decide by a "
                "number that all ranks have, such as the loss of ddl.forward_backward or what ddl.clip_grad_norm_ "
                "returns, and not by this rank's own part of the model, of its gradients or of the rows"
            )
        if any(
            self.mesh.dp_cp_size * square != digest**2
            for digest, square in zip(digests[::2], digests[1::2], strict=True)
        ):
            raise ValueError(UNLIKE_MODULES)
        contract.padded = contract.padded or pads > 0
        if n * squares != shapes**2 and not contract.padded:
            raise ValueError(
                "the targets of dp ranks should have the same shape, but for the number of rows, as in one process; "
                "they differ (padded by each rank to its own length?), so that it is not known what counts: pad all "
                "to one length, or pass loss_divisor=, a function from targets to the number of those that count"
            )

    def before_optimizer(self, loss: torch.Tensor) -> None:
        """After gradients are what the optimizer takes."""
        if self.mesh.tp_size > 1:
            if self.again:
                _check_same_loss(loss, self.mesh)
            self.whole_weights.check(self.model)
        if self.again:
            check_replicas(self.model)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _try_backward_hooks(module: nn.Module) -> None:
    """Asks, in this step, whether a module's backward hooks are linear: they get gradients of a part of the rows."""
    for hooks in (module._backward_hooks, module._backward_pre_hooks):
        for key, hook in list(hooks.items()):

            def tried(module: nn.Module, *grads: Any, hooks=hooks, key=key, hook=hook) -> Any:
                hooks[key] = hook
                return _linear(functools.partial(hook, module), grads, f"a {type(module).__name__}")

            hooks[key] = tried


def _linear(hook: Any, grads: tuple, of: str) -> Any:
    """What a backward hook makes of gradients, which has to be twice as much of gradients that are twice as large."""
    kept = tree_map(lambda g: g.clone() if isinstance(g, torch.Tensor) else g, grads)  # it may change them in place
    made = hook(*grads)
    if made is not None or not _alike(grads, kept):
        larger = tree_map(lambda g: 2 * g if isinstance(g, torch.Tensor) else g, kept)
        finite = all(bool(_local(g).isfinite().all()) for g in tree_leaves(larger) if g is not None)
        twice = hook(*larger)
        changed, twice = (grads, larger) if made is None else (made, twice)
        doubled = tree_map(lambda g: 2 * g if isinstance(g, torch.Tensor) else g, changed)
        if finite and not _alike(doubled, twice, rtol=1e-5, atol=1e-8):
            raise ValueError(
                f"a backward hook of {of} should be linear in gradients (not clamp or normalise them), since on this "
                "mesh it gets those of a rank's rows or of a microbatch, times another factor: change p.grad between "
                "ddl.forward_backward and the optimizer's step"
            )
    return made


def _alike(one: Any, other: Any, rtol: float = 0.0, atol: float = 0.0) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.allclose(_local(a), _local(b), rtol, atol, equal_nan=True) for a, b in pairs if a is not None)


@contextlib.contextmanager
def _trying_tensor_hooks() -> Iterator[None]:
    """Inside, hooks that a forward pass gives to tensors are asked, too, but those of parameters, which were asked."""
    register = torch.Tensor.register_hook

    def tried(tensor: torch.Tensor, hook: Any) -> Any:
        if isinstance(tensor, nn.Parameter) or not callable(hook):
            return register(tensor, hook)
        of = f"a tensor of shape {tuple(tensor.shape)}"  # not the tensor: its graph would never be freed
        return register(tensor, lambda grad: _linear(hook, (grad,), of))

    # torch.compile would trace it, and call it for the method that it stands for, without end
    torch.Tensor.register_hook = torch.compiler.disable(tried) if "torch._dynamo" in sys.modules else tried
    try:
        yield
    finally:
        torch.Tensor.register_hook = register


class _Ran:
    """A hook that notes that the model was called as a whole; it can be copied and pickled with the model."""

    said = False

    def __call__(self, *_: Any) -> None:
        self.said = True


def shapes_of(y: Any, divisor: Divisor) -> list[float]:
    """What is summed over dp to compare shapes of targets: 1, a digest, its square, and whether there is padding."""
    digest = float(zlib.crc32(repr([tuple(t.shape[1:]) for t in tensors_of(y)]).encode()) % 2**20)
    return [1.0, digest, digest**2, float(divisor.may_pad(y))]


def _check_values(model: nn.Module) -> None:
    empty = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise ValueError(
            f"{empty!r} has no values yet, since the model was made in ddl.empty_weights: call ddl.import_weights or "
            "ddl.load_full_state_dict first"
        )


def _check_same_loss(loss: torch.Tensor, mesh: Mesh) -> None:
    peers = [torch.empty_like(loss) for _ in range(mesh.tp_size)]
    dist.all_gather(peers, loss, group=mesh.tp_group)
    if any(abs(float(peer - peers[0])) > 1e-3 * abs(float(peers[0])) for peer in peers):  # other kernels may round
        raise ValueError(
            f"tp peers should compute the same loss, but get {', '.join(f'{float(peer):.6g}' for peer in peers)}: it "
            "uses a rank's part of something, such as features between layers that tensor_plan cuts; compute it from "
            "outputs that are whole, or leave these layers out of the plan"
        )


def _check_hooks_of_holders(model: nn.Module, stages: Any) -> None:
    """Refuses hooks given after ``ddl.auto_model`` to a pipeline, or to a module that only holds its layers."""
    called = {module for stage in stages.local_stages() for module in stage.modules()}
    for name, module in model.named_modules():
        if module not in called:
            check_root_hooks(module, name)


def _note_inputs(stages: Any) -> list[tuple[nn.Module, list[Any], Any]]:
    """Keeps what each stage of this rank is given last: a microbatch, after those by which its schedule is set up."""

    def note(stage: nn.Module) -> tuple[nn.Module, list[Any], Any]:
        given: list[Any] = []

        def hook(_: nn.Module, args: tuple) -> None:
            given[:] = [map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, args)]

        return stage, given, stage.register_forward_pre_hook(hook)

    return [note(stage) for stage in stages.local_stages()]


def _check_rows_are_alone(calls: list[tuple[Any, Any, list[nn.Module]]]) -> None:
    depends = [rows_depend_on_each_other(*call) for call in calls]
    if _on_any_rank(any(depends)):
        raise ValueError(ROWS_DEPEND)


def _compare_with_dp_peers(stages: Any, x: Any, mesh: Mesh) -> None:
    """Compares what forward passes keep, and to which lengths rows are padded, in one exchange."""
    numbers = numbers_kept([stages.plain_module()], n_rows(x))
    lengths = [t.shape[1:] if len(t.shape) > 1 and len(t) == n_rows(x) else torch.Size() for t in tensors_of(x)]
    peers: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(peers, ({name: _told(value) for name, value in numbers.items()}, lengths))
    _check_numbers_kept(stages, x, mesh, numbers, [kept for kept, _ in peers])
    dp_peers = [mesh.rank_at(**(mesh.coordinates(mesh.rank) | {"dp": i})) for i in range(mesh.dp_size)]
    _warn_of_padding(stages, x, mesh, lengths, [peers[rank][1] for rank in dp_peers])


def _check_numbers_kept(stages: Any, x: Any, mesh: Mesh, numbers: dict[str, Any], peers: list[dict[str, Any]]) -> None:
    """Raises a ValueError if modules keep other numbers on dp ranks, in plain attributes that their outputs depend on.

    Buffers are compared by :func:`check_replicas`; what is only kept for a look, such as the last loss, may differ.
    """
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    alike = [peers[mesh.rank_at(**(place | {"dp": 0}))] for place in places]
    unlike = sorted({n for peer, of in zip(peers, alike, strict=True) for n in peer if n in of and peer[n] != of[n]})
    if not unlike:
        return
    given = [[numbers.get(name) for name in unlike]]
    dist.broadcast_object_list(given, src=dist.get_global_rank(mesh.dp_group, 0), group=mesh.dp_group)
    of_others = {name: value for name, value in zip(unlike, given[0], strict=True) if name in numbers}
    matters = numbers_matter(stages.forward_only, x, [stages.plain_module()], of_others)
    if _on_any_rank(matters):
        raise ValueError(
            f"forward keeps {unlike[0]!r}, which differs between dp ranks, and its outputs depend on it: it is "
            "computed from a rank's own rows; sum what it is computed from over ranks (torch.distributed.all_reduce in "
            "forward), or keep it out of forward"
        )


def _warn_of_padding(stages: Any, x: Any, mesh: Mesh, lengths: list[torch.Size], peers: list[list[torch.Size]]) -> None:
    """Warns if dp ranks have padded their rows to unlike lengths, and outputs depend on it."""
    alike = all([*map(len, peer)] == [*map(len, lengths)] for peer in peers)  # else ranks have unlike kinds of rows
    if not alike or all(peer == lengths for peer in peers) or mesh.cp_size > 1:
        return
    longest = [torch.Size(map(max, zip(*of_ranks, strict=True))) for of_ranks in zip(*peers, strict=True)]
    longest = [most or tensor.shape[1:] for most, tensor in zip(longest, tensors_of(x), strict=True)]
    matters = padding_matters(stages.forward_only, x, longest, [stages.plain_module()])
    if _on_any_rank(matters) and mesh.rank == 0:
        warnings.warn(
            "each dp rank has padded its rows to its own longest one, and the model's outputs change if zeros are "
            "appended: one process would pad all rows to the longest of the batch. Pad to one length in collate_fn, or "
            "let the model leave padding out (a mask). A model that leaves out another value than zero is right",
            stacklevel=2,
        )


def _on_any_rank(found: bool) -> bool:
    flag = torch.tensor(float(found), device=idist.device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _told(value: Any) -> Any:
    leaves = tree_leaves(value)
    return [(tuple(leaf.shape), digest(leaf)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def check_tokens_are_alone(model: nn.Module, stages: Any, x: Any, again: bool = True) -> None:
    """Over cp, raises a ValueError if a module looks at other tokens than it gets; on every rank."""
    mesh = get_mesh()
    if mesh.cp_size == 1 or (not again and hasattr(model, TOKENS_ALONE)):
        return
    setattr(model, TOKENS_ALONE, True)

    def mixes(in_full: bool) -> tuple[int, int, str] | None:
        """Of the first module that mixes tokens its stage, its place among the calls, and its name."""
        found: list[tuple[int, str] | None] = [None] * mesh.world_size
        dist.all_gather_object(found, check_tokens(stages.forward_only, x, stages.local_stages(), mesh, in_full))
        return min(((mesh.coordinates(rank)["pp"], *one) for rank, one in enumerate(found) if one), default=None)

    first = mixes(in_full=False)
    if first is not None and max((t.shape[1] for t in tensors_of(x) if t.ndim > 1), default=0) <= MOST_IN_FULL:
        first = mixes(in_full=True)  # perhaps in blocks, which a rank's part of a sequence has as a whole
    if first is not None:
        name = "" if first[2] == "module" else first[2].removeprefix("module.")  # DDP's name for the model
        raise ValueError(
            f"{repr(name) if name else 'the model'} gives other outputs for a cp rank's tokens than for the full "
            "sequence: attention should be ddl.ring_attention or ddl.ulysses_attention, and positions those of "
            "ddl.sequence_positions; what else looks at other tokens (a convolution, pooling, BatchNorm) cannot run on "
            "a mesh with cp"
        )


def _check_rows_are_in_dim_0(dealt: int, x: Any) -> None:
    first = next((tensor for tensor in tensors_of(x) if tensor.ndim), None)
    if first is not None and first.ndim > 1 and len(first) != dealt and first.shape[1] == dealt:
        raise ValueError(
            f"x should count its {dealt} rows in dim 0 under pp, where microbatches are cut, but has shape "
            f"{tuple(first.shape)}: let collate_fn put rows first, and transpose in the model's first layer"
        )


# ------------------------------------------------------------------------------------------- the model as it was


class _Fingerprint:
    """A model as ``ddl.auto_model`` has returned it; copies of the model have none."""

    def __init__(self, model: nn.Module, sharded: bool) -> None:
        self.by_ddp, self.sharded = isinstance(model, DistributedDataParallel), sharded
        self.finds_unused = self.by_ddp and (model.find_unused_parameters or model.static_graph)
        self.note(model)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()

    def note(self, model: nn.Module) -> None:
        dicts = [d for module in model.modules() for d in (module._parameters, module._modules)]
        self.sizes = [(d, len(d)) for d in dicts]
        self.places = [(d, name, value) for d in dicts for name, value in d.items()]
        self.attributes = len(vars(model))
        self.parameters = [(name, p, p.dtype, p.requires_grad, _has_hooks(p)) for name, p in model.named_parameters()]
        self.strides = [(name, p, p.stride()) for name, p in model.named_parameters() if p.ndim > 3]

    def same_places(self) -> bool:
        """Looks in the modules' own dicts: walking through the model takes 20 times as long."""
        return all(d.get(name) is value for d, name, value in self.places) and all(len(d) == n for d, n in self.sizes)


def remember(model: nn.Module, sharded: bool) -> None:
    """Notes a model as it is, for :func:`check_unchanged`."""
    model._fingerprint = _Fingerprint(model, sharded)
    if get_mesh().pp_size > 1:
        own = [(p, digest(p)) for p in model.parameters() if not p.is_meta]
        setattr(model, AS_MADE, (torch.get_rng_state(), own))
        model.register_load_state_dict_post_hook(_was_loaded)


def _was_loaded(model: nn.Module, *_: Any) -> None:
    vars(model).pop(AS_MADE, None)


def _warn_of_draws(model: nn.Module) -> None:
    """Stages that draw initial values each for themselves draw others than one process, which nothing else shows."""
    before, own = vars(model).pop(AS_MADE, (None, ()))
    if before is None or torch.equal(before, torch.get_rng_state()):
        return
    for p, known in own:
        if digest(p) != known and len(_local(p.detach()).unique()) > 2:  # one or two: a constant
            name = next(name for name, other in model.named_parameters() if other is p)
            warnings.warn(
                f"{name!r} was changed after ddl.auto_model. If it was initialised with random numbers, each stage of "
                "the pipeline has drawn its own, and not those of one process: initialise before ddl.auto_model. If "
                "it was loaded or computed, this is as it should be",
                stacklevel=2,
            )
            return


def _remembered(model: nn.Module) -> _Fingerprint | None:
    return getattr(getattr(model, "_orig_mod", model), "_fingerprint", None)


def check_unchanged(model: nn.Module) -> None:
    """Raises a ValueError if a model was changed since ``ddl.auto_model``, so that gradients would not be reduced."""
    known, mesh = _remembered(model), get_mesh()
    if (
        known is None or mesh.dp_cp_size * mesh.pp_size == 1
    ):  # over tp alone, torch reduces what is cut in its own layers
        return
    if getattr(model, "_holds_weights", False):  # FSDP2's whole ones, until the optimizer steps
        return
    if not known.same_places():
        reshard(model)  # FSDP2 puts unsharded parameters in the places of others
        if not known.same_places():
            _check_new_places(model, known)
            known.note(model)
    if known.by_ddp and len(vars(model)) != known.attributes:
        misplaced = next((k for k in list(vars(model))[known.attributes :] if hasattr(model.module, k)), None)
        if misplaced is not None:
            raise ValueError(
                f"{misplaced!r} was set on DDP's wrapper, where the model does not see it: set it on model.module"
            )
    for name, parameter, stride in known.strides:
        if parameter.stride() != stride:
            raise ValueError(
                f"{name!r} has got another memory format since ddl.auto_model, whose buffers of gradients keep the one "
                "it had: leave out model.to(memory_format=...), and give it to inputs alone"
            )
    for name, parameter, dtype, trained, hooked in known.parameters:  # hooked by a style of the plan
        name = name.removeprefix("module.") if known.by_ddp else name
        if known.by_ddp and parameter.dtype is not dtype:
            raise ValueError(
                f"{name!r} was {dtype} when ddl.auto_model wrapped the model in DDP, whose buffers keep that, and is "
                f"{parameter.dtype}: change the dtype before"
            )
        if known.by_ddp and parameter.requires_grad is not trained and not (trained and known.finds_unused):
            raise ValueError(
                f"{name!r} was {'' if trained else 'not '}trained when ddl.auto_model wrapped the model in DDP, which "
                f"{'waits for' if trained else 'does not average'} its gradient: pass shard=True to ddl.auto_model, "
                "which follows such changes, or call ddl.auto_model on model.module again, and make the optimizer and "
                "the trainer anew"
            )
        if not hooked and _has_hooks(parameter):
            check_parameter_hooks([(name, parameter)], mesh, known.by_ddp)


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _check_new_places(model: nn.Module, known: _Fingerprint) -> None:
    before = {id(p): name for name, p, _, trained, _ in known.parameters if trained}
    after = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    new, gone = ([names[i] for i in names if i not in others] for names, others in ((after, before), (before, after)))
    if new or gone and known.by_ddp and not known.finds_unused:
        name = (new or gone)[0].removeprefix("module." if known.by_ddp else "")
        what = f"added or replaced {name!r}" if new else f"took away {name!r}"
        raise ValueError(
            f"something {what} after ddl.auto_model had made the model ready for its ranks, which share gradients of "
            "the parameters it had then: add heads, adapters and parametrizations before ddl.auto_model, and load "
            "weights in place (ddl.load_full_state_dict)"
        )


# ------------------------------------------------------------------------------------------- rows and modules

END = -1  # instead of a module's number: the end of a stage's first forward pass in a step


class ModulesInUse:
    """Checks that all dp ranks call the same modules with weights in a step.

    Otherwise, gradients of different weights would be added where they are reduced in one flat tensor, or torch would
    abort if sizes differ. In the first step, the ranks compare their calls at each gather of FSDP2 and at the end of
    the forward pass, before anything is reduced; later steps reduce a digest together with the loss. DDP needs all
    weights to be used, which each rank checks alone by their gradients: the hooks are removed after the first step,
    since they take a third of a millisecond per step in a small GPT.

    Args:
        stages: this rank's stages.
        mesh: the mesh.
    """

    def __init__(self, stages: list[nn.Module], mesh: Mesh) -> None:
        self.mesh, self.strict = mesh, True
        # In order, each module once, since dp ranks may have different numbers of microbatches.
        self.calls: dict[int, None] = {}
        self.names: list[str] = []
        self.handles: list[Any] = []
        self.once = False  # whether the hooks are for the first step only: under DDP
        self.weights: list[tuple[str, nn.Parameter]] = []  # whose gradients DDP waits for
        if mesh.dp_cp_size == 1 or any(_finds_unused(stage) for stage in stages):
            return
        ddp = [stage for stage in stages if isinstance(stage, DistributedDataParallel)]
        self.once = bool(ddp)
        for stage in ddp:
            if not stage.static_graph:  # static_graph allows unused weights
                named = stage.module.named_parameters()
                self.weights += [(name, p) for name, p in named if name not in stage.parameters_to_ignore]
        for stage in stages:
            for name, module in stage.named_modules():
                if any(True for _ in module.parameters(recurse=False)) or isinstance(module, FSDPModule):
                    hook = self._called(len(self.names), module)
                    self.handles.append(module.register_forward_pre_hook(hook, prepend=True))
                    self.names.append(name.removeprefix("module.") or type(module).__name__)
            self.handles.append(stage.register_forward_hook(self._called(END, stage)))

    def begin(self) -> None:
        """Starts a step."""
        self.calls.clear()

    def digest(self) -> int:
        """A number below 2 ** 20 for the modules called in this step, in order."""
        self.strict = False
        if self.once:
            while self.handles:
                self.handles.pop().remove()
        return hash(tuple(self.calls)) % 2**20

    def check_gradients(self) -> None:
        """Raises a ValueError if DDP has waited for the gradient of a weight that this rank did not use.

        Its peers may be waiting still: the launcher ends them.
        """
        for name, parameter in self.weights:
            if parameter.requires_grad and parameter.grad is None:
                raise ValueError(
                    f"DDP waits for the gradients of all weights, but this rank did not use {name!r} in this step: "
                    "make the same choice on all ranks and pass shard=True, or pass find_unused_parameters=True, to "
                    "ddl.auto_model"
                )

    def _called(self, number: int, module: nn.Module) -> Any:
        meets = number == END or isinstance(module, FSDPModule)

        def hook(*_: Any) -> None:
            if torch.is_grad_enabled() and number not in self.calls:
                self.calls[number] = None
                if meets:
                    self._compare(number)

        return hook

    def _compare(self, number: int) -> None:
        """In the first step, raises a ValueError unless all dp ranks have called the same modules."""
        if not self.strict:
            return
        here = torch.tensor([number, hash(tuple(self.calls)) % 2**20], device=idist.device())
        peers = [torch.empty_like(here) for _ in range(self.mesh.dp_cp_size)]
        dist.all_gather(peers, here, group=self.mesh.dp_cp_group)
        if any(not torch.equal(peer, here) for peer in peers):
            last = self.names[[called for called in self.calls if called != END][-1]]
            raise ValueError(f"{UNLIKE_MODULES} This rank was at {last!r}")


UNLIKE_MODULES = (
    "dp ranks should call the same modules in a step, but call different ones, so that gradients of different weights "
    "would be added. Make the same choice on all ranks (a random one with the same seed), or train with DDP alone and "
    "find_unused_parameters=True."
)


def _finds_unused(stage: nn.Module) -> bool:
    return isinstance(stage, DistributedDataParallel) and stage.find_unused_parameters


def check_same_rows(mesh: Mesh, *parts: Any, axes: tuple[str, ...] = ("tp", "pp")) -> None:
    """Checks that peers on these axes have the same rows.

    Raises:
        ValueError: on all peers, if they have different rows.
    """
    for axis in axes:
        if mesh.sizes[axis] == 1:
            continue
        here = torch.stack([_checksum(part) for part in parts])
        peers = [torch.empty_like(here) for _ in range(mesh.sizes[axis])]
        dist.all_gather(peers, here, group=mesh.groups[axis])
        if any(not torch.equal(peer, here) for peer in peers):
            raise ValueError(
                f"{axis} peers should get the same rows, but got different ones: use ddl.auto_dataloader, and let what "
                "draws random numbers in a dataset draw from torch's (Python's and NumPy's differ from rank to rank)"
            )


def _checksum(batch: Any) -> torch.Tensor:
    """64 bits that depend on each value and its position, of a batch of any structure."""
    total = torch.zeros((), dtype=torch.int64, device=idist.device())
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            values = leaf.detach().contiguous().view(-1).view(torch.uint8).to(total.device, torch.int64)
            places = torch.arange(1, len(values) + 1, device=total.device)
            total = total * 31 + (values * (places * 2654435761 % 2**31)).sum()
    return total
