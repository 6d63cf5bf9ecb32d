"""The format of a checkpoint's files. Nothing in them is executed, or used before it is checked."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
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
VERSION = 1  # of the format; also that of a state.json without a version
# The names under which these are saved beside the objects.
RANDOM, RUNS, GRADIENTS = "random states", "runs of engines", "gradients that wait"
_MAX_BYTES, _MAX_VALUES = 1 << 28, 1 << 24  # bytes of state.json, and values in it


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete, or whose bytes are not those that were written."""


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


# ---------------------------------------------------------------------------------------- state.json


# A type, a function that raises, a list of one form for all items or a tuple of one for each; of a dict the keys that
# it has to have, or str for all.
_OPTIMIZER = {"groups": [{"names": [str], "options": decoded}],
              "states": {str: {"tensors": [str], "values": {str: decoded}}}}  # fmt: skip
_FORM = {
    "saved_ns": int,
    "mesh": {"pp": int, "dp": int, "tp": int},
    "models": {str: {"names": [str], "saved_as": {str: str}, "extra": {str: decoded}}},
    "optimizers": {str: _OPTIMIZER},
    "objects": {str: {str: decoded}},
    "loaders": [str],
    "digests": {str: [(int, int, str)]},
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


def read_state(folder: Path) -> tuple[str, dict[str, Any]]:
    """``SHA256SUMS``, and ``state.json`` if it is what was written."""
    sums, raw = read(folder / SUMS, 1 << 16).decode(), read(folder / STATE, _MAX_BYTES)
    if digest_line(STATE, raw) not in sums:
        raise DamagedCheckpoint(f"{folder} is damaged: {STATE} is not what was written")
    state = json.loads(raw) if _is_within_limits(raw) else None
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder} is damaged: {STATE} holds {len(raw):,} bytes of something else")
    return sums, state


# ----------------------------------------------------------------------------------------- .metadata


class _Instance:
    """Stands for an instance of a class of torch, none of whose code runs."""

    def __new__(cls, *args: Any) -> _Instance:
        instance = super().__new__(cls)
        instance.values = args
        return instance

    def __setstate__(self, state: Any) -> None:
        self.values = state

    def __getitem__(self, name: str) -> Any:
        return next(value for key, value in self.values if key == name)

    def size(self) -> torch.Size:
        size = torch.Size(*self.values)
        if len(size) > 64 or any(n < 0 for n in size):
            raise ValueError(f"{METADATA} has a size that no tensor has")
        return size


class _Pairs(list):
    """A dict as a list of pairs: hashing a key of nested tuples may take years."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.append((key, value))


class _Unpickler(pickle._Unpickler):
    """Reads only what a ``.metadata`` needs: C's unpickler would call and allocate whatever the file names."""

    # PROTO, FRAME, STOP, MEMOIZE, BINGET, LONG_BINGET, MARK, NONE, NEWTRUE, NEWFALSE, BININT, BININT1, BININT2, LONG1,
    # SHORT_BINUNICODE, BINUNICODE, tuples, EMPTY_LIST, APPEND(S), SETITEM(S), NEWOBJ, REDUCE, BUILD, STACK_GLOBAL
    dispatch = {
        code: pickle._Unpickler.dispatch[code]
        for code in b"\x80\x95.\x94hj(N\x88\x89JKM\x8a\x8cX)\x85\x86\x87t]aesu\x81Rb\x93"
    } | {pickle.EMPTY_DICT[0]: lambda self: self.append(_Pairs())}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith("torch.distributed.checkpoint.") or name in ("Size", "_get_layout"):
            return _Instance
        raise ValueError(f"{METADATA} holds {module}.{name}, which is not loaded: it could run any code")


def read_metadata(folder: Path, sums: str, state: Mapping[str, Any]) -> Metadata:
    """Where each part of each tensor is stored, if the file has its digest and agrees with ``state.json``."""
    lengths = {(file, at): length for file, parts in state["digests"].items() for at, length, _ in parts}
    raw = read(folder / METADATA, (1 << 16) + 2048 * len(lengths))
    if not sums.endswith(digest_line(METADATA, raw)):
        raise DamagedCheckpoint(f"{folder} is damaged: {METADATA} is not what was written")
    root, stored, tensors = _Unpickler(io.BytesIO(raw)).load(), {}, {}
    for index, info in root["storage_data"]:
        place = {key: info[key] for key in ("relative_path", "offset", "length")}
        _check([index["fqn"], *place.values()], (str, str, int, int), METADATA)
        stored[MetadataIndex(index["fqn"], index["offset"].size())] = _StorageInfo(**place)
    for name, saved in root["state_dict_metadata"]:
        tensors[name] = _tensor(name, saved)
        for chunk in tensors[name].chunks:
            at = stored[MetadataIndex(name, chunk.offsets)]
            n_bytes = math.prod(chunk.sizes) * tensors[name].properties.dtype.itemsize
            if lengths[at.relative_path, at.offset] != at.length or at.length < n_bytes or at.offset < 0:
                raise ValueError(f"{METADATA} and {STATE} have other places for {name!r}")
    if lacking := sorted(_names(state) - set(tensors)):
        raise ValueError(f"{METADATA} lacks {lacking[0]!r}, which {STATE} names")
    return Metadata(tensors, storage_data=stored)


def _tensor(name: str, saved: _Instance) -> TensorStorageMetadata:
    """The metadata of a tensor, whose chunks have to fill it without overlap."""
    dtype, size = saved["properties"].values[0], saved["size"].size()
    _check([name, dtype], (str, torch.dtype), METADATA)
    chunks = [ChunkStorageMetadata(chunk["offsets"].size(), chunk["sizes"].size()) for chunk in saved["chunks"]]
    inside = all(o + n <= full for c in chunks for o, n, full in zip(c.offsets, c.sizes, size, strict=True))
    numel = sum(math.prod(chunk.sizes) for chunk in chunks)
    if not inside or numel != math.prod(size) or len({c.offsets for c in chunks}) < len(chunks):
        raise ValueError(f"{METADATA} does not say where all of {name!r} is")
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
