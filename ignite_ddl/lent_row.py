"""What remains of a batch of one row, which a rank without rows was lent, when this row is removed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def without_rows(batch: Any) -> Any:
    """A batch of one row, or the model's output for it, with the row removed."""
    return tree_map(_leaf_without_rows, batch, is_leaf=_is_rows)


def _is_rows(leaf: Any) -> bool:
    """Whether this is a batch of strings, as made by the default collate function, or a list of the one row."""
    if not isinstance(leaf, list | tuple) or not leaf:
        return False
    one = isinstance(leaf, list) and len(leaf) == 1 and not any(isinstance(t, torch.Tensor) for t in tree_leaves(leaf))
    return one or all(isinstance(item, str | bytes) for item in leaf)


def _leaf_without_rows(leaf: Any) -> Any:
    if _is_unusual(leaf):  # which an engine gets with its lent row, and a loop not at all
        return leaf.index_select(0, torch.arange(0, device=leaf.device)) if leaf.layout is torch.sparse_coo else leaf
    if getattr(leaf, "ndim", 0) > 0 or _is_rows(leaf):  # a scalar of the batch is kept
        return leaf[:0]
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        values = {
            field.name: without_rows(getattr(leaf, field.name)) for field in dataclasses.fields(leaf) if field.init
        }
        return dataclasses.replace(leaf, **values)
    if isinstance(leaf, MutableMapping):  # that torch's pytree does not know, as transformers' BatchEncoding
        emptied = copy.copy(leaf)
        for key, value in leaf.items():
            emptied[key] = without_rows(value)
        return emptied
    return leaf


def _is_unusual(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout is not torch.strided)


def of_unknown_type(batch: Any) -> type | None:
    """The type of something in a batch, of which rows cannot be removed, such as a nested tensor."""
    plain = (torch.Tensor, str, bytes, bool, int, float, complex, type(None), Mapping)
    leaves = tree_leaves(batch)
    odd = (leaf for leaf in leaves if _is_unusual(leaf) and leaf.layout is not torch.sparse_coo)
    unknown = (*odd, *(leaf for leaf in leaves if not isinstance(leaf, plain) and not hasattr(leaf, "ndim")))
    return next((type(leaf) for leaf in unknown if not dataclasses.is_dataclass(leaf)), None)
