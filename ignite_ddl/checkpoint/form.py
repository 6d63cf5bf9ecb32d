"""The format of a checkpoint's files. Nothing in them is executed, or used before it is checked."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ignite_ddl.checkpoint.values import decoded

SUMS, STATE, METADATA = "SHA256SUMS", "state.json", ".metadata"
VERSION = 1  # of the format
# The names under which these are saved beside the objects.
RESERVED = RANDOM, RUNS, GRADIENTS = "random states", "runs of engines", "gradients of open windows"
_MAX_BYTES, _MAX_VALUES = 1 << 28, 1 << 24  # bytes of state.json, and values in it


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete, or whose bytes are not those that were written."""


class NoCheckpoint(ValueError):
    """There is none in this place."""


class LacksObject(ValueError):
    """A checkpoint that has no object of a name, such as the best model alone."""


def open_regular_file(path: Path) -> BinaryIO:
    """A file, which has to be a regular one: reading of a pipe or a device might never end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DamagedCheckpoint(f"{path.parent} is damaged: {path.name} is no regular file")
    return file


def read(path: Path, longest: int) -> bytes:
    with open_regular_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > longest:
            raise DamagedCheckpoint(f"{path.parent} is damaged: {path.name} has {size:,} bytes")
        return file.read(longest)


def digest_line(name: str, content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()}  {name}\n"


# A type, a function that raises, a list of one form for all items or a tuple of one for each; of a dict the keys that
# it has to have, or str for all.
_OPTIMIZER = {"groups": [{"names": [str], "options": decoded}],
              "states": {str: {"tensors": [str], "values": {str: decoded}}}}  # fmt: skip
_FORM = {
    "version": int,
    "saved_ns": int,
    "mesh": {"pp": int, "dp": int, "tp": int},
    "models": {str: {"names": [str], "saved_as": {str: str}, "extra": {str: decoded}}},
    "optimizers": {str: _OPTIMIZER},
    "objects": {str: {str: decoded}},
    "loaders": [str],
    # Of a part: its place and its size in the tensor; a file, its place and length there; a CRC-32, or nothing.
    "tensors": {str: {"dtype": str, "size": [int], "parts": [([int], [int], str, int, int, str)]}},
}


def _check(value: Any, form: Any, where: str) -> None:
    kind = dict if isinstance(form, dict) else list if isinstance(form, list | tuple) else form
    if not isinstance(kind, type):
        kind(value)
    elif type(value) is not kind:
        raise ValueError(f"{where} in {STATE} should be a {kind.__name__}, but is a {type(value).__name__}")
    if kind is dict:
        for key in value if str in form else form:
            if key not in value:
                raise ValueError(f"{where} in {STATE} lacks {key!r}")
            _check(value[key], form.get(str, form.get(key)), key)
    elif kind is list:
        for item, of_item in zip(value, form if isinstance(form, tuple) else form * len(value), strict=True):
            _check(item, of_item, where)


def check_state(state: Any) -> None:
    """Raises an exception unless this is what ``state.json`` has to be."""
    _check(state, _FORM, "all")
    ranks = math.prod(state["mesh"].values())
    by_rank = [value["by_rank"] for value in state["objects"].values() if "all" not in value]
    if min(state["mesh"].values()) < 1 or any(type(each) is not list or len(each) != ranks for each in by_rank):
        raise ValueError(f"mesh in {STATE} is not that of its states")
    if not 1 <= state["version"] <= VERSION:
        raise ValueError(f"{STATE} has the version {state['version']}")
    if state["saved_ns"] not in range(1 << 63) or not {RANDOM, RUNS, *state["loaders"]} <= set(state["objects"]):
        raise ValueError(f"{STATE} lacks its time, {RANDOM}, {RUNS} or loaders")


def dump_state(state: Mapping[str, Any]) -> bytes:
    """The bytes of ``state.json``.

    Raises:
        ValueError: if :func:`read_state` could not read them.
    """
    try:
        raw = json.dumps(state, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"to_save should have names and texts that UTF-8 can hold, but {error}") from error
    if not _is_within_limits(raw):
        raise ValueError(f"to_save should have less state beside weights: it makes a {STATE} of {len(raw):,} bytes")
    check_state(state)
    return raw


def _is_within_limits(raw: bytes) -> bool:
    return len(raw) <= _MAX_BYTES and sum(map(raw.count, (b",", b"[", b"{"))) <= _MAX_VALUES


def read_state(folder: Path) -> dict[str, Any]:
    """``state.json``, if it is what was written."""
    sums, raw = read(folder / SUMS, 1 << 16).decode(), read(folder / STATE, _MAX_BYTES)
    if digest_line(STATE, raw) not in sums:
        raise DamagedCheckpoint(f"{folder} is damaged: {STATE} is not what was written")
    state = json.loads(raw) if _is_within_limits(raw) else None
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder} is damaged: {STATE} holds {len(raw):,} bytes of something else")
    return state


def described(metadata: Metadata, written: Mapping[MetadataIndex, Any]) -> dict[str, Any]:
    """What ``state.json`` holds of tensors, and :func:`metadata_of` reads: where each part is, and its digest.

    Args:
        metadata: sizes, dtypes and chunks.
        written: of each chunk DCP's result, with a digest; torch 2.11 does not put the places into ``metadata``.
    """
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        parts = []
        for chunk in tensor.chunks:
            result = written[MetadataIndex(name, chunk.offsets)]
            at = result.storage_data
            place = [at.relative_path, at.offset, at.length, result.digest]
            parts.append([list(chunk.offsets), list(chunk.sizes), *place])
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(tensor.size), "parts": parts}
    return tensors


def metadata_of(state: Mapping[str, Any]) -> tuple[Metadata, dict[MetadataIndex, str]]:
    """Where each part of each tensor is stored, in the words of torch's DCP, and its digest."""
    metadata, digests = Metadata({}, storage_data={}), {}
    for name, saved in state["tensors"].items():
        tensor = metadata.state_dict_metadata[name] = _tensor(name, saved)
        for chunk, (_, _, file, start, length, digest) in zip(tensor.chunks, saved["parts"], strict=True):
            if start < 0 or length < math.prod(chunk.sizes) * tensor.properties.dtype.itemsize:
                raise ValueError(f"{STATE} has too few bytes for {name!r}")
            index = MetadataIndex(name, chunk.offsets)
            metadata.storage_data[index], digests[index] = _StorageInfo(file, start, length), digest
    if lacking := sorted(_names(state) - set(state["tensors"])):
        raise ValueError(f"{STATE} does not say where {lacking[0]!r} is")
    return metadata, digests


def _tensor(name: str, saved: Mapping[str, Any]) -> TensorStorageMetadata:
    """The metadata of a tensor, whose chunks have to fill it without overlap."""
    dtype, size = getattr(torch, saved["dtype"]), torch.Size(saved["size"])
    _check(dtype, torch.dtype, name)
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes, *_ in saved["parts"]]
    is_size = len(size) <= 64 and min(size, default=0) >= 0
    inside = all(0 <= o <= o + n <= full for c in chunks for o, n, full in zip(c.offsets, c.sizes, size, strict=True))
    numel = sum(math.prod(chunk.sizes) for chunk in chunks)
    if not (is_size and inside) or numel != math.prod(size) or len({c.offsets for c in chunks}) < len(chunks):
        raise ValueError(f"{STATE} does not say where all of {name!r} is")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _names(state: Mapping[str, Any]) -> set[str]:
    """The names of all tensors that ``state.json`` lists."""
    names = {f"{key}.{of['saved_as'].get(n, n)}" for key, of in state["models"].items() for n in of["names"]}
    for key, optimizer in state["optimizers"].items():
        in_groups = {name for group in optimizer["groups"] for name in group["names"]}
        if not in_groups <= set(optimizer["states"]):
            raise ValueError(f"{STATE} lacks states of {key!r}")
        names |= {f"{key}.{name}.{part}" for name, of in optimizer["states"].items() for part in of["tensors"]}
    return names
