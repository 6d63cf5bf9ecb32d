"""What a loss depends on: outputs, weights, models before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ignite_ddl.compat import unsharded_parameters
from ignite_ddl.parts import MODELS
from ignite_ddl.structure import tensors_of


def parameter_ids(model: nn.Module) -> set[int]:
    return {id(p) for p in [*model.parameters(), *unsharded_parameters(model)]}


def models_before(x: Any) -> list[nn.Module]:
    """Models of ``ddl.auto_model`` that have computed tensors of ``x`` and get gradients through them."""
    pending, visited, leaves = [tensor.grad_fn for tensor in tensors_of(x)], {None}, set()
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            leaves.add(id(getattr(node, "variable", None)))
            pending += [following for following, _ in node.next_functions]
    return [model for model in MODELS if not leaves.isdisjoint(parameter_ids(model))] if len(visited) > 1 else []


def dependencies(loss: torch.Tensor, output: Any, since: int) -> tuple[list[torch.Tensor], list[nn.Parameter], bool]:
    """What a loss depends on: tensors of the output, weights, and whether anything else older than the call."""
    tensors = tensors_of(output)
    by_edge = {(tensor.grad_fn, tensor.output_nr): tensor for tensor in tensors if tensor.grad_fn is not None}
    leaves = {id(tensor) for tensor in tensors}
    outputs, weights, uses_older = [], [], False
    pending, visited = [(loss.grad_fn, loss.output_nr)], set()
    while pending:
        edge = node, _ = pending.pop()
        if node is None or edge in visited:
            continue
        visited.add(edge)
        variable = getattr(node, "variable", None)
        if edge in by_edge:
            outputs.append(by_edge[edge])
        elif variable is not None:
            if id(variable) in leaves:
                outputs.append(variable)
            elif isinstance(variable, nn.Parameter):
                weights.append(variable)
        elif node._sequence_nr() < since:
            uses_older = True
        else:
            pending += node.next_functions
    return outputs, weights, uses_older
