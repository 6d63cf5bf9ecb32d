"""The model that a user gets under pp: this rank's stages, under the names of the uncut model."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ignite_ddl.checks.guards import LocalStateDict, full_state_error, refuse_pickling
from ignite_ddl.compat import allow_empty_parameter_lists
from ignite_ddl.mesh import Mesh
from ignite_ddl.pipeline.cut import Cut, add_submodule, holders_of, named_layers, sequential
from ignite_ddl.pipeline.local_stages import PipelineStages
from ignite_ddl.structure import full_tensors, map_leaves, tensors_of

SHARED = "_shared_with"  # on a parameter that several stages hold: its first name, and the pp ranks


class Pipeline(nn.Module):
    """This rank's stages of a model, and the schedule that runs them. Made by ``ddl.auto_model``.

    Parameters keep their names in the full model. A layer takes one value and returns one: a tensor, or tensors and
    plain values in tuples, lists and dicts, so that a mask or a skip connection travels along. Each tensor of the input
    and of the targets has a row for each sample; lists of plain values that have one for each are cut in targets. A
    layer that works in place needs an attribute ``inplace``.

    A schedule is set up for each shape of the input, by an extra forward pass of a microbatch, and the last 16 are
    kept: padding to many lengths takes time. The set-up depends on which stages have trainable weights: after freezing
    or unfreezing a stage, call :meth:`forget_schedules` on every rank; otherwise the next step raises an error.

    "interleaved_zero_bubble", "zbv" and "dualpipev" compute the gradients of weights separately from those of the
    stage's input, but for a stage that returns several tensors with gradients, which computes them at once. They refuse
    a stage without trainable weights, and fail if the stage's output depends on a weight in
    two ways, through an operation on the stage's input and without it, such as ``w`` in ``tanh(linear(x * w)) + w``:
    use another schedule for such stages.

    Args:
        model: the full model, in which the layers of this rank's stages have been made.
        cut: the stages, from :func:`~ignite_ddl.pipeline.cut.cut_into_stages`.
        mesh: the mesh; its pp axis has more than one rank.
        communicates: whether dp ranks communicate in forward passes: FSDP2, experts, routers. Default: False.
        gathers: whether they do so in that of each microbatch, since FSDP2 frees weights after it. Default: False.
        checks: whether to refuse layers that keep a state from one forward pass to the next. Default: True.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        mesh: Mesh,
        communicates: bool = False,
        gathers: bool = False,
        checks: bool = True,
    ) -> None:
        super().__init__()
        allow_empty_parameter_lists()
        layers = dict(named_layers(model))
        taken = next((name for name in layers if hasattr(self, name.split(".")[0])), None)
        if taken is not None:
            raise ValueError(
                f"the layer {taken!r} should have another name under pp, where {taken.split('.')[0]!r} is an attribute "
                "of the pipeline: give it one in the model"
            )
        stages: dict[int, nn.Module] = {}  # in a dict: modules are registered layer by layer, below
        for s in cut.stages_of(mesh.pp_rank):
            of_stage = [(name, layers[name]) for name in cut.layers[s]]
            if mesh.dp_cp_size > 1:
                of_stage = _copies_of_shared_layers(of_stage, stages.values())
            stages[s] = stage = sequential(of_stage)
            for name, layer in of_stage:
                add_submodule(self, name, layer)
            if s > 0 and any(getattr(module, "inplace", False) for module in stage.modules()):
                stage.register_forward_pre_hook(_copied)
        held = dict(self.named_parameters(remove_duplicate=False))
        for names in cut.shared:
            ranks = {cut.owners[cut.stage_of[name]] for name in names}
            for name in names:
                if name in held:
                    setattr(held[name], SHARED, (names[0], frozenset(ranks)))
        # A private name, since layers are registered under the user's names.
        meets = (communicates and mesh.dp_cp_size > 1, gathers and mesh.dp_cp_size > 1)
        self._local_stages = PipelineStages(self, cut, mesh, stages, *meets, checks)
        held_here = [name for s in stages for name in cut.layers[s]]
        self._local_stages.holders = [*holders_of(model, list(layers)), *holders_of(self, held_here)]

    def __deepcopy__(self, memo: dict) -> Pipeline:
        """The same stages with separate weights, as Ignite's EMAHandler makes them; on the same mesh."""
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        held = self._local_stages  # its schedules, cut and mesh are not copied
        vars(copied).update(copy.deepcopy({k: v for k, v in vars(self).items() if v is not held}, memo))
        of, stages = held.schedules, copy.deepcopy(held.stages, memo)
        copied._local_stages = PipelineStages(
            copied, held.cut, held.mesh, stages, of.communicates, of.gathers, of.checks
        )
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickling()
        return super().__reduce_ex__(protocol)

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> dict[str, Any]:
        """As ``nn.Module.state_dict``, of this rank's stages: it cannot be pickled outside of ``ddl.pickle_shards``."""
        if destination is None:
            destination = LocalStateDict()
            destination._metadata = OrderedDict()  # as nn.Module makes it
        return super().state_dict(*args, destination=destination, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``, of this rank's stages; that of the full model only with strict=False."""
        held = super().state_dict(keep_vars=True).keys() if strict else ()
        others = [name for name in state_dict if strict and name in self._local_stages.cut.shapes and name not in held]
        if others:
            raise full_state_error(others[0])
        return super().load_state_dict(state_dict, strict, assign)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, which computes outputs and losses."""
        return self._local_stages.is_last

    def train_step(
        self,
        x: Any,
        y: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        autocast: contextlib.AbstractContextManager | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        """One batch forward and backward through the schedule; gradients add up as after ``loss.backward()``.

        Args:
            x: this data-parallel rank's rows, the same on each of its pp ranks: tensors in any structure.
            y: their targets, a row for each: tensors in any structure.
            loss_fn: takes a microbatch's output and targets and returns a term of the loss; the terms are added.
            autocast: the context of forward passes and losses, such as ``torch.autocast``. Default: none.

        Returns:
            tuple: the output for all rows and the sum of the microbatches' losses, on the rank that holds the
            last stage; (None, None) on the others.

        Raises:
            ValueError: if a tensor of ``x`` or ``y`` has no rows or another number of them, a stage returns what
                cannot be sent, or a stage was frozen or unfrozen since the first step (see :meth:`forget_schedules`).
        """
        return self._local_stages.train_step(x, y, loss_fn, autocast)

    def forget_schedules(self) -> None:
        """Makes the next step set up its schedule again: call it on every rank after freezing or unfreezing a stage.

        The pipeline's ``requires_grad_`` calls it. If the mesh has a dp axis, a stage without trainable weights in
        ``ddl.auto_model`` cannot be unfrozen: nothing averages its gradients.
        """
        self._local_stages.schedules.forget()

    def requires_grad_(self, requires_grad: bool = True) -> Pipeline:
        """As ``nn.Module.requires_grad_``, on every rank; calls :meth:`forget_schedules`."""
        self.forget_schedules()
        return super().requires_grad_(requires_grad)

    def forward_only(self, x: Any) -> Any:
        """The output for all rows on the rank with the last stage, None elsewhere; without gradients.

        It runs the stages itself, because torch's schedules run their backward passes in evaluation too (zbv fails).
        """
        return self._local_stages.forward_only(x, checks=True)

    def forward(self, x: Any) -> Any:
        """The output for all rows, on every pp rank, without gradients: computing one raises an error."""
        output = self._local_stages.from_last_stage(full_tensors(self.forward_only(x)))
        if not torch.is_grad_enabled():
            return output
        requiring_grad = [tensor for tensor in tensors_of(x) if tensor.requires_grad]  # as for a gradient penalty
        requiring_grad += [torch.zeros((), requires_grad=True)] if self.training else []
        return map_leaves(lambda leaf: _without_gradient(leaf, requiring_grad), output) if requiring_grad else output

    def __getitem__(self, index: Any) -> Any:
        """Refused, unlike indexing an ``nn.Sequential``: a rank has only some of the layers.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a pipeline cannot be indexed, since each rank has its own stages only: choose parameters from "
            "model.named_parameters(), whose names are those of the uncut model, and replace layers before "
            "ddl.auto_model"
        )

    def __setitem__(self, index: Any, layer: Any) -> None:
        """Refused, as indexing is."""
        self[index]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            held = vars(self).get("_local_stages")
            ranks = held.cut.owners_of(name) if held is not None else []
            if not ranks or held.mesh.pp_rank in ranks:
                raise
            raise ValueError(
                f"{name!r} is on pp rank {', '.join(map(str, ranks))}, and this is pp rank {held.mesh.pp_rank}: "
                "under pp each rank has its own stages only; change the model before ddl.auto_model"
            ) from None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's ``generate`` needs the full model and its cache in each step.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a pipeline cannot run Hugging Face's generate, which calls the full model with a cache of keys and "
            "values: load ddl.full_state_dict(model) into an uncut model, use dp and tp only, or call the model on the "
            "last tokens in a loop, as ignite_ddl.course.generate does"
        )


def _copies_of_shared_layers(
    layers: list[tuple[str, nn.Module]], earlier: Iterable[nn.Module]
) -> list[tuple[str, nn.Module]]:
    """The layers of a stage, copied if an earlier stage of this rank has them too: FSDP2 shards a module only once.

    The gradients of the copies are summed, as those of any weight that stages share, so the copies stay equal.
    """
    taken = {id(module) for stage in earlier for module in stage.modules()}
    memo: dict = {}  # shared, so that a layer that occurs twice in the stage is copied once
    return [
        (name, copy.deepcopy(layer, memo) if any(id(m) in taken for m in layer.modules()) else layer)
        for name, layer in layers
    ]


def _copied(stage: nn.Module, inputs: tuple) -> tuple:
    """A layer that works in place needs a copy: the stage's input is a leaf, or the output of its neighbour."""
    return tree_map_only(torch.Tensor, torch.Tensor.clone, inputs)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *requiring_grad: torch.Tensor) -> torch.Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ValueError(
            "a pipeline's output has no gradient, since its schedule runs the backward pass: use "
            "ddl.create_supervised_trainer, or ddl.forward_backward in the update function of a ddl.MeshEngine; for "
            "gradients of the input (adversarial examples, saliency), take a mesh without pp"
        )


def _without_gradient(leaf: Any, requiring_grad: list[torch.Tensor]) -> Any:
    floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return _NoGradient.apply(leaf, *requiring_grad) if floating else leaf
