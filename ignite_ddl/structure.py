"""The structure of a batch or an activation: tuples, lists and dicts around its tensors, and other values."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

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


def check_graphs(x: Any, y: Any) -> None:
    """Checks that no gradient should pass from a pipeline on to what has computed its batch.

    Raises:
        ValueError: if a tensor of ``x`` or ``y`` has a graph, or is a parameter.
    """
    for name, part in (("x", x), ("y", y)):
        if any(tensor.grad_fn is not None or isinstance(tensor, nn.Parameter) for tensor in flatten(part, name)[0]):
            raise ValueError(
                f"{name} was computed with gradients (by an encoder, from a prompt?), which a pipeline does not pass "
                "on: make what is trained there a layer of this model, compute what is not under torch.no_grad, or "
                "take a mesh without pp"
            )


def check_rows(**parts: Any) -> int:
    """Checks that each tensor of a batch has a row for each sample, so that it can be cut into microbatches.

    Args:
        parts: the input and the targets, by name: tensors and plain values in any structure.

    Returns:
        int: the number of rows.

    Raises:
        ValueError: if one has no tensor, or tensors have different numbers of rows or none.
    """
    shapes = {name: [tuple(tensor.shape) for tensor in tensors_of(part)] for name, part in parts.items()}
    for name, found in shapes.items():
        if not found:
            raise ValueError(
                f"{name} should hold a tensor with a row for each sample, by which a pipeline cuts microbatches, but "
                f"given a {type(parts[name]).__name__} without tensors"
            )
    rows = {shape[0] if shape else None for found in shapes.values() for shape in found}
    if len(rows) > 1 or not rows.isdisjoint({0, None}):
        given = " and ".join("; ".join(map(str, found)) for found in shapes.values())
        raise ValueError(
            f"{' and '.join(parts)} should have a row for each sample, but given shapes {given}: under pp each "
            "tensor is cut into microbatches by its first dim; make what all samples share a buffer of the model, "
            "or give it to each sample, table.expand(len(x), *table.shape)"
        )
    return rows.pop()


def check_no_lists(x: Any, n: int) -> None:
    """Checks that no list has an entry for each of ``n`` samples: a schedule sends plain values once for a batch.

    Raises:
        ValueError: if there is one.
    """
    leaves = tree_leaves(x, is_leaf=lambda leaf: _is_list_of_rows(leaf, n))
    found = next((leaf for leaf in leaves if _is_list_of_rows(leaf, n)), None)
    if found is not None:
        raise ValueError(
            f"x should hold tensors with a row for each sample, but holds a {type(found).__name__} of {n} values, such "
            f"as {found[0]!r}: under pp tensors alone are cut into microbatches in training; give such values as a "
            "tensor (numbers in place of words), and what all samples share as a tuple of numbers"
        )


def rows_of(tree: Any, first: int, end: int) -> Any:
    """The rows ``first`` to ``end`` of each tensor, and of lists with a plain value for each; others as they are."""
    if isinstance(tree, torch.Tensor):
        return tree[first:end]
    n = n_rows(tree)

    def has_rows(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) or _is_list_of_rows(leaf, n)

    return map_leaves(lambda leaf: leaf[first:end] if has_rows(leaf) else leaf, tree, is_leaf=has_rows)


def _is_list_of_rows(leaf: Any, n: int) -> bool:
    """Whether this is a list of ``n`` values, or strings in a tuple, as torch's collate function makes; no tensors."""
    if type(leaf) not in (list, tuple) or len(leaf) != n or tensors_of(leaf):
        return False
    return type(leaf) is list or all(isinstance(item, str | bytes) for item in leaf)


def joined(parts: Sequence[Any]) -> Any:
    """Tensors of several microbatches joined by rows; plain values are those of the first.

    Raises:
        ValueError: if a tensor has no rows.
    """
    if any(not tensor.ndim for tensor in tensors_of(parts[0])):
        raise ValueError(
            "the model's output should have a row for each sample in each tensor under pp, where microbatches are "
            "joined, but holds a single number: return it for each sample, or compute it in loss_fn"
        )
    return map_leaves(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], torch.Tensor) else leaves[0], *parts)


def check_joins(parts: Sequence[Any]) -> None:
    """Checks that :func:`joined` may join the outputs of microbatches, which have different numbers of rows.

    Raises:
        ValueError: if rows are in another dim than 0, or in none, or plain values are not the same.
    """
    for first, *others in zip(*map(_plain_values_of, parts), strict=False):
        other = next((one for one in others if one != first and (one == one or first == first)), first)
        if other is not first:
            raise ValueError(
                "the model's output should have the same plain values for each microbatch under pp, where microbatches "
                f"are joined, but has {first!r} and {other!r}: return it as a tensor with a row for each sample, such "
                "as y.new_full((len(y),), n), or compute it in loss_fn and metrics from tensors of the output, such as "
                "by len(y)"
            )
    for tensors in zip(*map(tensors_of, parts), strict=False):
        first, *others = map(local_tensor, tensors)
        is_table = first.is_floating_point() and first.numel() and all(torch.equal(first, one) for one in others)
        if others and (is_table or any(first.shape[1:] != one.shape[1:] for one in others)):
            raise ValueError(
                "the model's output should have its rows in dim 0 of each tensor under pp, where microbatches are "
                f"joined, but has shapes {', '.join(str(tuple(one.shape)) for one in tensors)} for microbatches with "
                "different numbers of rows: return rows in dim 0 (output.transpose(0, 1) of a time-major one), padded "
                "to one length, leave out what is the same for all rows, or use a mesh without pp"
            )


def _plain_values_of(tree: Any) -> list[Any]:
    """Numbers, strings and the like of an output of any structure, in order."""
    return [leaf for leaf in _leaves_of(tree) if isinstance(leaf, _PLAIN)]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def address_of(tensor: torch.Tensor) -> int:
    """Where the memory of this rank's part of a tensor begins; 0 if it has none."""
    local = local_tensor(tensor)
    plain = type(local) in (torch.Tensor, nn.Parameter) and local.layout is torch.strided
    return local.untyped_storage().data_ptr() if plain else 0


def full_tensors(tree: Any) -> Any:
    """The same values with each DTensor gathered; its ranks call it together."""
    return tree_map_only(DTensor, DTensor.full_tensor, tree)


# ------------------------------------------------------------------------------- batches that are only looked at


def _is_record(value: Any) -> bool:
    """Whether torch's pytree takes it for a leaf, though it holds values: a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping)


def _names_in(record: Any) -> list[str]:
    """Those of its fields, and of attributes that it has besides, such as ``__post_init__`` makes."""
    names = dict.fromkeys([*(field.name for field in dataclasses.fields(record)), *getattr(record, "__dict__", ())])
    return [name for name in names if hasattr(record, name)]


def map_leaves(function: Callable[..., Any], *trees: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """torch's ``tree_map``, which goes into dataclasses, too, whose ``__post_init__`` it does not run again."""

    def inside(*leaves: Any) -> Any:
        if not _is_record(leaves[0]):
            return function(*leaves)
        record = copy.copy(leaves[0])
        for name in _names_in(leaves[0]):
            # also of a frozen one
            of_name = (getattr(leaf, name) for leaf in leaves)
            object.__setattr__(record, name, map_leaves(function, *of_name, is_leaf=is_leaf))
        return record

    return tree_map(inside, *trees, is_leaf=lambda one: _is_record(one) or is_leaf(one))


def _leaves_of(tree: Any) -> Iterator[Any]:
    """torch's ``tree_leaves``, which goes into dataclasses, too."""
    for leaf in tree_leaves(tree, is_leaf=_is_record):
        if _is_record(leaf):
            yield from _leaves_of([getattr(leaf, name) for name in _names_in(leaf)])
        else:
            yield leaf


def detached(tree: Any) -> Any:
    """The same values without their graphs; what requires a gradient still does."""
    return map_leaves(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def pickled(tree: Any) -> bytes | None:
    """The same tree with detached tensors in the CPU's memory, to be sent; None if pickle cannot (a lambda in it)."""
    with contextlib.suppress(Exception):
        return pickle.dumps(map_leaves(lambda t: t.detach().cpu() if isinstance(t, torch.Tensor) else t, tree))
    return None


def unpickled(own: Any, sent: bytes) -> Any:
    """A tree that was sent, with tensors on the devices of those of another tree, of which it has the structure."""

    def placed(leaf: Any, other: Any) -> Any:
        return other.to(leaf.device) if isinstance(leaf, torch.Tensor) else other

    try:
        return map_leaves(placed, own, pickle.loads(sent))
    except ValueError as error:
        raise ValueError("a tree of another structure was sent") from error


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a batch or an output of any structure, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in _leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def n_rows(tree: Any) -> int:
    """The number of rows of a batch of any structure: the length of its first tensor; 1 if it has none."""
    return next((len(tensor) for tensor in tensors_of(tree) if tensor.ndim), 1)


def tensors_of_rows(tree: Any, n: int) -> list[torch.Tensor]:
    """The tensors of a batch of ``n`` rows, but those in lists of ``n`` samples, which have lengths of their own."""
    return [t for leaf in _lists(tree, n) if not are_samples(leaf, n) for t in tensors_of(leaf)]


def have_rows(n: int, *trees: Any) -> bool:
    """Whether each tensor has a row for each of ``n`` samples, or is in a list of these."""
    return all(len(tensor) == n for tree in trees for tensor in tensors_of_rows(tree, n) if tensor.ndim)


def n_samples(x: Any, y: Any, n: int | None = None) -> int:
    """The number of rows of targets: of their first tensor; of a list of samples that of x, or ``n`` if it is known."""
    for given in (n_rows(x), n):
        if given and any(are_samples(leaf, given) for leaf in _lists(y, given)):
            return given
    return n_rows(y if tensors_of(y) else x)


def are_samples(tree: Any, n: int) -> bool:
    """Whether this is a list of ``n`` samples, and not of tensors with ``n`` rows."""
    if type(tree) not in (list, tuple) or len(tree) != n:
        return False
    kinds = {(item.dtype, item.shape[1:]) if isinstance(item, torch.Tensor) and item.ndim else None for item in tree}
    have_length = [_has_length(item, n) for item in tree]
    return not any(have_length) or len(kinds) == 1 and None not in kinds and not all(have_length)


def may_be_a_sample(tree: Any) -> bool:
    """Whether a batch of one row has a list of one tensor: that of a sample with a length of its own, or of a row?"""

    def of_one(tree: Any) -> bool:
        return type(tree) in (list, tuple) and len(tree) == 1 and isinstance(tree[0], torch.Tensor)

    return any(map(of_one, tree_leaves(tree, is_leaf=of_one)))


def _lists(tree: Any, n: int) -> list[Any]:
    return tree_leaves(tree, is_leaf=lambda one: are_samples(one, n))


def some_rows(tree: Any, rows: slice, n: int, part_of: Callable[[Any, slice], Any] = operator.getitem) -> Any:
    """Some of the ``n`` rows: of each tensor with ``n`` rows, and of each list of ``n`` samples."""
    if are_samples(tree, n):
        return tree[rows]
    if type(tree) in (list, tuple):
        return type(tree)(some_rows(item, rows, n, part_of) for item in tree)
    if type(tree) is dict:
        return {key: some_rows(value, rows, n, part_of) for key, value in tree.items()}
    return map_leaves(lambda leaf: part_of(leaf, rows) if _has_length(leaf, n) else leaf, tree)


class SomeRows:
    """Takes some of the ``n`` rows of batches, without their graphs. Of one tensor it returns the same part each time:
    what a model gets and what a loss captures, such as to take a gradient by it, stays one tensor.
    """

    def __init__(self, rows: slice, n: int) -> None:
        self.rows, self.n = rows, n
        self.parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tree: Any) -> Any:
        """These rows of each tensor with ``n`` rows, and of each list of ``n`` samples."""
        return some_rows(tree, self.rows, self.n, self._part)

    def _part(self, tensor: torch.Tensor, rows: slice) -> torch.Tensor:
        if id(tensor) not in self.parts:
            part = tensor.detach()[rows].requires_grad_(tensor.requires_grad)
            self.parts[id(tensor)] = tensor, part  # the tensor, too, so that no other has its id
        return self.parts[id(tensor)][1]


def _has_length(leaf: Any, n: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == n


def concatenated(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Batches joined by rows: of tensors and lists of samples; what has other lengths is the first batch's.

    One tensor in two places of the first batch, such as ``x`` in ``(x, (y, x))``, stays one.
    """
    return _concatenated(parts, sizes, {})


def _concatenated(parts: Sequence[Any], sizes: Sequence[int], made: dict[int, torch.Tensor]) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if type(first) in (list, tuple):
        if all(map(are_samples, parts, sizes)):
            return type(first)(item for part in parts for item in part)
        return type(first)(_concatenated(items, sizes, made) for items in zip(*parts, strict=True))
    if type(first) is dict:
        return {key: _concatenated([part[key] for part in parts], sizes, made) for key in first}

    def join(*leaves: Any) -> Any:
        if not all(map(_has_length, leaves, sizes)):
            return leaves[0]
        if id(leaves[0]) not in made:
            made[id(leaves[0])] = torch.cat(leaves)
        return made[id(leaves[0])]

    return map_leaves(join, *parts)
