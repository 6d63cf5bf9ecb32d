"""What a batch or an activation is besides its tensors: tuples, lists, dicts, and numbers that are no tensors."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["Structure", "check_rows", "flatten", "joined", "rows_of", "whole"]

_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class Structure:
    """What :func:`flatten` leaves besides the tensors; the same on two ranks if it compares equal.

    Attributes:
        spec: the tuples, lists and dicts.
        plain: the values that are no tensors, with ``...`` in the place of each tensor.
    """

    spec: TreeSpec
    plain: tuple[Any, ...]

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Puts tensors in their places."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if value is ... else value for value in self.plain], self.spec)

    def __reduce__(self) -> tuple:  # to be sent: torch's TreeSpec warns when it is read
        return _structure_of, (tree_unflatten(self.plain, self.spec),)


def _structure_of(tree: Any) -> Structure:
    leaves, spec = tree_flatten(tree)
    return Structure(spec, tuple(leaves))


def flatten(tree: Any, what: str) -> tuple[list[torch.Tensor], Structure]:
    """The tensors of a batch or an activation, and its structure.

    Args:
        tree: a tensor, or tensors and plain values in tuples, lists and dicts, or in a class that torch or its owner
            has registered as a pytree (such as transformers' ``ModelOutput``).
        what: its name in the error message.

    Returns:
        tuple: the tensors in order, and the :class:`Structure`.

    Raises:
        ValueError: if it holds another object, whose tensors could not be found.
    """
    leaves, spec = tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    plain = tuple(... if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    for value in plain:
        if value is not ... and not isinstance(value, _PLAIN):
            raise ValueError(
                f"{what} should be made of tensors, numbers and strings in tuples, lists and dicts, since under pp "
                f"tensors are sent one by one, but holds a {type(value).__name__}: return its tensors instead"
            )
    return tensors, Structure(spec, plain)


def check_rows(x: Any, y: Any) -> int:
    """Checks that each tensor of a batch has a row for each sample, so that it can be cut into microbatches.

    Args:
        x: the input: tensors and plain values in any structure.
        y: the targets, likewise.

    Returns:
        int: the number of rows.

    Raises:
        ValueError: if ``x`` or ``y`` has no tensor, or tensors have different numbers of rows or none.
    """
    shapes = {name: _shapes(flatten(part, name)[0]) for name, part in (("x", x), ("y", y))}
    for name, found in shapes.items():
        if not found:
            raise ValueError(
                f"{name} should hold a tensor with a row for each sample, by which a pipeline cuts microbatches, but "
                f"given a {type(x if name == 'x' else y).__name__} without tensors"
            )
    rows = {shape[0] if shape else None for found in shapes.values() for shape in found}
    if len(rows) > 1 or not rows.isdisjoint({0, None}):
        said = ["; ".join(map(str, found)) for found in shapes.values()]
        raise ValueError(
            f"x and y should have a row for each sample, but have shapes {said[0]} and {said[1]}: under pp each tensor "
            "is cut into microbatches by its first dim; make what all samples share a buffer of the model"
        )
    return rows.pop()


def _shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def rows_of(tree: Any, first: int, end: int) -> Any:
    """The rows ``first`` to ``end`` of each tensor; plain values as they are."""
    return tree_map(lambda leaf: leaf[first:end] if isinstance(leaf, torch.Tensor) else leaf, tree)


def joined(parts: Sequence[Any]) -> Any:
    """Tensors of several microbatches joined by rows; plain values are those of the first.

    Raises:
        ValueError: if a tensor has no rows.
    """
    if any(isinstance(leaf, torch.Tensor) and not leaf.ndim for leaf in tree_leaves(parts[0])):
        raise ValueError(
            "the model's output should have a row for each sample in each tensor under pp, where microbatches are "
            "joined, but holds a single number: return it for each sample, or compute it in loss_fn"
        )
    return tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], torch.Tensor) else leaves[0], *parts)


def whole(tree: Any) -> Any:
    """The same values with each DTensor gathered; its ranks call it together."""
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)
