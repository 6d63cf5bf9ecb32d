"""Whether ranks read the same samples: those of iterable datasets and of drawn rows are compared."""

from __future__ import annotations

import re
import zlib
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, Subset

from ignite_ddl.collectives import gathered_values, octets

_SAMPLED_ROWS = 64  # rows of a dataset that ranks compare


def fingerprint_of(samples: list[Any]) -> int:
    """A number that depends on the values of samples of any structure."""
    found = 0
    for leaf in tree_leaves(samples):
        found = zlib.crc32(_bytes_of(leaf), found)
    return found


def _bytes_of(value: Any) -> bytes:
    """What is the same for the same sample in other processes: no addresses, and no order of a set's words."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return b"".join(map(_bytes_of, value.unbind()))
        if value.layout != torch.strided:
            sparse = value.to_sparse_coo().coalesce()
            return _bytes_of(sparse.indices()) + _bytes_of(sparse.values())
        return octets(value.detach().cpu().resolve_conj().resolve_neg()).numpy().tobytes()
    if isinstance(value, set | frozenset):
        return repr(sorted(map(repr, value))).encode()
    if hasattr(value, "tobytes") and str(getattr(value, "dtype", "")) != "object":
        return value.tobytes()
    return re.sub(" at 0x[0-9a-fA-F]+", "", repr(value)).encode()


def check_same_samples(fingerprint: int) -> None:
    """Each rank reads a full iterable dataset: one that gives each rank another part would be divided twice."""
    if idist.get_world_size() > 1:
        found = idist.all_gather(fingerprint)
        if len(set(found)) > 1:
            raise ValueError(
                "dataset should give every rank the same samples, which auto_dataloader divides among them, but this "
                "iterable dataset gives different ones: remove what splits it by rank, and draw its random numbers "
                "from torch"
            )


def check_same_dataset(dataset: Any) -> None:
    """Each rank reads its rows of the same dataset; one that was divided before would be divided twice."""
    if idist.get_world_size() == 1 or not dist.is_initialized():
        return
    found = gathered_values(_sampled(dataset))
    if not all(_is_close(other, found[0]) for other in found):
        raise ValueError(
            "dataset should be the same on each rank, since auto_dataloader divides it among them, but ranks have "
            "different ones: give all of it to each, in one order (sort a list of files), and if it is made of random "
            "numbers, draw them from a generator with the same seed on each (torch.Generator().manual_seed(0))"
        )


def _sampled(dataset: Any) -> list[Any]:
    """The length of a dataset and first values of some rows that it keeps in memory, also those of datasets inside."""
    try:
        n = len(dataset)
    except Exception:  # a sampler knows its keys
        return []
    if isinstance(dataset, ConcatDataset):
        return [n, *map(_sampled, dataset.datasets)]
    inside = [_sampled(dataset.dataset)] if isinstance(dataset, Subset) else []
    kept = [dataset] if isinstance(dataset, list | tuple) else list(getattr(dataset, "__dict__", {}).values())
    for rows in kept + [t for value in kept if isinstance(value, list | tuple) and len(value) <= 16 for t in value]:
        kind = isinstance(rows, list | tuple | range | torch.Tensor) or type(rows).__module__ == "numpy"
        if kind and getattr(rows, "shape", (1,)) != () and n and len(rows) == n:
            inside.append([_first_values(rows[i]) for i in range(0, n, -(-n // _SAMPLED_ROWS))])
    return [n, *inside]


def _first_values(row: Any) -> list[Any]:
    """The first numbers and the words of a row."""
    found: list[Any] = []
    for leaf in tree_leaves(row):
        if isinstance(leaf, str):
            found.append(leaf.rpartition("/")[2])  # machines may keep files in different folders
        elif isinstance(leaf, bool | int | float):
            found.append(leaf)
        elif isinstance(leaf, torch.Tensor) or type(leaf).__module__ == "numpy":
            values = _dense(leaf.detach()).cpu() if isinstance(leaf, torch.Tensor) else leaf
            found.append([float(v) for v in values.reshape(-1)[:8].tolist() if isinstance(v, bool | int | float)])
    return found


def _dense(row: torch.Tensor) -> torch.Tensor:
    return row.to_padded_tensor(0) if row.is_nested else row if row.layout == torch.strided else row.to_dense()


def _is_close(one: Any, other: Any) -> bool:
    """Whether two such lists are the same; ranks on unlike machines may round differently."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or one != one and other != other or abs(one - other) <= 1e-3 * max(abs(one), 1e-2)
    return type(one) is type(other) and one == other
