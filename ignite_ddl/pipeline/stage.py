"""A stage of a pipeline as torch's schedules run it. Imported with the first batch, since the import takes a second."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from ignite_ddl.structure import Structure, flatten
from ignite_ddl.tensor.random import random_stream

SENDS_ANY_DTYPE = hasattr(PipelineStage, "_forward_metadata_inference")  # torch 2.12 and newer
_NO_GRADIENT = 0x7FF5  # repeated, the bits of a NaN of any float type that no computation returns


@dataclass(frozen=True)
class Interface:
    """What a stage takes or returns: its structure, and its tensors on the meta device."""

    structure: Structure
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tree: Any, what: str) -> Interface:
        """The interface of a value."""
        tensors, structure = flatten(tree, what)
        empty = [torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad) for t in tensors]
        return cls(structure, tuple(empty))


class Stage(PipelineStage):
    """torch's stage: with a random stream for each microbatch of each stage, whatever the schedule's order, and with
    tuples, lists and dicts between stages, of which torch sends the tensors.

    Args:
        module: the layers.
        name: the stage in error messages.
        index: its number.
        n_stages: the number of stages.
        device: where it runs.
        group: the pp group.
        takes: what it takes.
        returns: what it returns; torch runs no batch of its own to find out.
        autocast: the context of forward passes.
        split_backward: whether the schedule computes the gradients of weights separately.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        index: int,
        n_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        takes: Interface,
        returns: Interface,
        autocast: contextlib.AbstractContextManager,
        split_backward: bool,
    ) -> None:
        floats = all(t.dtype.is_floating_point for t in returns.tensors)
        if index + 1 < n_stages and not floats and not SENDS_ANY_DTYPE:
            raise ValueError(
                f"{name} returns integers or a mask, which torch {torch.__version__} cannot send to the next "
                "stage: install torch 2.12 or newer, or return them as floating-point numbers"
            )
        if index + 1 < n_stages and any(t.requires_grad and t.dtype.itemsize == 1 for t in returns.tensors):
            raise ValueError(
                f"{name} returns float8 numbers that require a gradient, which would be sent back in 8 bits: return "
                "them as bfloat16, or detached"
            )
        super().__init__(
            module, index, n_stages, device, input_args=takes.tensors, output_args=returns.tensors, group=group
        )
        self.name, self.takes, self.returns = name, takes, returns
        self.autocast, self.split_backward = autocast, split_backward

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        seed = torch.initial_seed() + 2**20 * self.stage_index + fwd_chunk_id  # of the batch
        with random_stream(seed), self.autocast:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for tensor in inputs:  # torch receives those of each step in the same leaves, which would keep their hooks
            if tensor._backward_hooks and tensor.is_leaf:
                tensor._backward_hooks = None
        if self.is_first:  # views of one tensor, which layers may change in place: let autograd not take them for one
            inputs = tuple(tensor if tensor.requires_grad else tensor.data for tensor in inputs)
        output = self.submod(self.takes.structure.unflatten(inputs))
        tensors, structure = flatten(output, self.name)
        shapes, expected = (tuple((t.shape, t.dtype) for t in of) for of in (tensors, self.returns.tensors))
        if structure != self.returns.structure or shapes != expected:
            raise ValueError(
                f"{self.name} should return the same shapes, dtypes and plain values for each microbatch of a batch, "
                f"since its neighbour expects them, but returned {_describe(structure, shapes)} after "
                f"{_describe(self.returns.structure, expected)}: pad, or return what varies as a tensor; if a change "
                "of the model is the cause, call its forget_schedules() on every rank after each such change"
            )
        return tuple(self._sendable(tensor, inputs) for tensor in tensors)

    def _sendable(self, tensor: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Makes a tensor contiguous (attention's is not) and, for torch's backward pass, which detaches it in place, no
        input, no view and no weight.
        """
        tensor = tensor.resolve_conj().resolve_neg()  # itself if there is nothing to do
        passed_on = any(tensor is one for one in inputs) or (tensor.is_leaf and tensor.requires_grad)
        if passed_on or (self.split_backward and tensor._is_view()):  # such as a Linear's output for 3-D input
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor.contiguous()

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """As torch's, but an output that the next stage has not used gets no gradient, in place of zeros."""
        if not self.is_last:
            outputs, inputs = self.fwd_cache[bwd_chunk_id]
            pairs = zip(outputs, self._retrieve_recv_grads(bwd_chunk_id), strict=True)
            self.fwd_cache[bwd_chunk_id] = tuple(t.detach() if _is_marked(grad) else t for t, grad in pairs), inputs
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_first:
            pairs = zip(self.bwd_cache[bwd_chunk_id], self.takes.tensors, strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(_sent_back(grad, of, self.device) for grad, of in pairs)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        """As torch's. To compute gradients of weights later, torch follows paths from one input to one output: a stage
        that has more of them computes all gradients at once.
        """
        call = super().backward_maybe_with_nosync
        if backward_type != "input":
            return call(backward_type, bwd_kwargs, last_backward)
        outputs, inputs = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
        one_input = (SENDS_ANY_DTYPE or len(inputs) == 1) and any(t.requires_grad for t in inputs)
        if not one_input or sum(t.requires_grad for t in outputs) != 1:
            outputs = outputs[0] if self.is_last else outputs
            return call("full", bwd_kwargs | {"stage_output": outputs}, last_backward)[0], []
        grads, groups = call(backward_type, bwd_kwargs, last_backward)
        if all(grad is None for grad in grads):
            raise ValueError(
                f"{self.name} computes its output, or the loss, without its input, so that gradients would be lost in "
                "a schedule that computes those of weights separately: use '1f1b' or 'interleaved_1f1b'"
            )
        return grads, groups

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # Before its first step, torch 2.11 sends a message to the rank of each neighbour stage, which gloo refuses if
        # this rank holds that stage too.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def _sent_back(grad: torch.Tensor | None, of: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """What a stage sends for the gradient of an input: contiguous, or marked if there is none but one is expected."""
    if grad is not None:
        return grad.resolve_conj().resolve_neg().contiguous()
    if SENDS_ANY_DTYPE and not of.requires_grad:
        return None
    marked = torch.empty(of.numel(), dtype=of.dtype, device=device)
    marked.view(torch.int16).fill_(_NO_GRADIENT)
    return marked.view(of.shape)


def _is_marked(grad: torch.Tensor | None) -> bool:
    if grad is None or not grad.numel():
        return False
    first = grad.flatten()[:1].view(torch.int16)  # all its bits: some of them any number may have
    return bool((first == _NO_GRADIENT).all())


def _describe(structure: Structure, shapes: tuple) -> str:
    plain = [value for value in structure.plain if value is not ...]
    return f"{[(tuple(shape), dtype) for shape, dtype in shapes]}" + (f" and {plain}" if plain else "")
