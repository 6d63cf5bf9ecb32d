"""A checkpoint's folder: each rank's shards through torch's DCP, the rest as JSON, a digest of each part.

::

    checkpoint_40/
        __0_0.distcp  __1_0.distcp …   the shards that each rank wrote
        .metadata                      DCP's: where which part of which tensor is
        state.json                     what is no tensor, and a CRC-32 of each part of the shards' files
        SHA256SUMS                     digests of the two files above, as ``sha256sum -c`` reads them; written last

The folder is written under a hidden name and renamed when it is complete, so whoever finds it finds all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import pickle
import secrets
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ignite_ddl.state import Shard

__all__ = ["DamagedCheckpoint", "Folder", "agree", "gathered", "on_rank_0", "remove", "whole_checkpoints", "write"]

SAVING, REPLACED, REMOVED = ".saving", ".replaced", ".removed"  # endings of names that are on their way
SUMS, STATE, METADATA = "SHA256SUMS", "state.json", ".metadata"
_RUN = secrets.token_hex(4)  # handlers of one run may write into one folder at the same time
_BLOCK = 1 << 20


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete, or whose bytes are not those that were written."""


# --------------------------------------------------------------------------------------------- writing


def write(
    folder: Path,
    shards: Mapping[str, Shard],
    content: Callable[[list[Any]], dict[str, Any]],
    own: Any,
    group: dist.ProcessGroup | None,
    digests: bool = True,
    outdated: Sequence[str] = (),
) -> None:
    """Writes a checkpoint; every rank calls it. Interrupted at any moment, it leaves what was there before.

    Args:
        folder: where, on a file system that all ranks see. One of that name is replaced.
        shards: what this rank holds of each tensor, by name. Of parts that several ranks hold one is written.
        content: makes what goes into ``state.json`` of what all ranks have in ``own``; called on rank 0.
        own: what rank 0 has to know of this rank.
        group: a group of all ranks, for objects; None on a serial run.
        digests: whether to take a CRC-32 of each part that is written.
        outdated: names of checkpoints beside it, which are removed once this one is complete.

    Raises:
        OSError: on every rank, if any rank cannot write; what was written is removed.
        ValueError: if a rank does not see the folder, or ``content`` refuses what ranks have.
    """
    parts, state = gathered(own, group), {}
    saving = on_rank_0(lambda: state.update(content(parts)) or _begin(folder), group)
    seen = saving.is_dir()
    agree(None if seen else ValueError(f"{folder.parent} should be a folder that all ranks see"), group)
    try:
        writer = _Writer(saving, digests)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process is one process
            dcp.save(
                {}, storage_writer=writer, planner=_SavePlanner(shards), process_group=group, no_dist=group is None
            )
        state["digests"] = writer.digests
        on_rank_0(lambda: _complete(folder, saving, state, outdated), group)
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        if group is None or dist.get_rank() == 0:
            shutil.rmtree(saving, ignore_errors=True)
        if not isinstance(error, CheckpointException | OSError):
            raise
        rank, cause = 0, error
        if isinstance(error, CheckpointException):
            rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(
            f"{folder} could not be written (rank {rank}: {cause}); the checkpoints before it are whole"
        ) from error


def remove(folder: Path) -> None:
    """Removes a checkpoint; interrupted, it leaves the whole of it or none that :func:`whole_checkpoints` finds."""
    gone = folder.with_name(f".{folder.name}{REMOVED}")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone)


def _begin(folder: Path) -> Path:
    """Makes the hidden folder for what is written, and removes what runs that were killed have left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = f".{_RUN}{SAVING}"
    for left in folder.parent.glob(".*"):
        if left.name.endswith((SAVING, REMOVED)) and not left.name.endswith(own):
            shutil.rmtree(left, ignore_errors=True)
    saving = folder.with_name(f".{folder.name}{own}")
    shutil.rmtree(saving, ignore_errors=True)
    saving.mkdir()
    return saving


def _complete(folder: Path, saving: Path, state: dict[str, Any], outdated: Sequence[str]) -> None:
    _write_synced(saving / STATE, json.dumps(state, ensure_ascii=False).encode())
    sums = "".join(f"{_digest_of(saving / name)}  {name}\n" for name in (STATE, METADATA))
    _write_synced(saving / SUMS, sums.encode())
    _sync_folder(saving)
    replaced = folder.with_name(f"{folder.name}{REPLACED}")  # no hidden name: it counts until the new one is there
    if folder.exists():
        if replaced.exists():
            remove(replaced)
        folder.rename(replaced)
    saving.rename(folder)
    _sync_folder(folder.parent)
    remove(replaced)
    for name in outdated:
        if name != folder.name:
            remove(folder.with_name(name))


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _crc_of(path: Path, offset: int, length: int) -> str:
    """A CRC-32 finds damage in many megabytes at memory speed; a SHA-256 would take longer than writing them."""
    found = 0
    with open(path, "rb") as file:
        file.seek(offset)
        while length > 0 and (block := file.read(min(length, _BLOCK))):
            found = zlib.crc32(block, found)
            length -= len(block)
    return f"{found:08x}"


@dataclasses.dataclass(frozen=True)
class _Result(WriteResult):
    digest: str = ""


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, which takes a digest of each part that it has written."""

    def __init__(self, path: Path, with_digests: bool) -> None:
        super().__init__(path)
        self.with_digests = with_digests
        self.digests: dict[str, list[tuple[int, int, str]]] = {}  # by file; known on rank 0 in the end

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result([self._with_digest(result) for result in results])
        return done

    def _with_digest(self, result: WriteResult) -> _Result:
        at = result.storage_data
        digest = _crc_of(Path(self.path) / at.relative_path, at.offset, at.length) if self.with_digests else ""
        return _Result(result.index, result.size_in_bytes, at, digest)

    def finish(self, metadata: Metadata, results: list[list[_Result]]) -> None:
        for result in (result for of_rank in results for result in of_rank):
            at = result.storage_data
            self.digests.setdefault(at.relative_path, []).append((at.offset, at.length, result.digest))
        super().finish(metadata, results)

    def storage_meta(self) -> None:
        """Nothing: torch would note the path on this machine."""


class _SavePlanner(DefaultSavePlanner):
    """What each rank has to write, from its :class:`Shard` of each tensor."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = shards

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, torch.Size(at)),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(torch.Size(at), piece.size()),
                        properties=TensorProperties.create_from_tensor(piece),
                        size=torch.Size(shard.size),
                    ),
                )
                for name, shard in self.shards.items()
                for at, piece in shard.pieces
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return dict(self.shards[index.fqn].pieces)[tuple(index.offset)]


# --------------------------------------------------------------------------------------------- reading


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder that were written to their end, the newest first. Their bytes are not checked."""
    if not folder.is_dir():
        return []
    complete = [path for path in folder.iterdir() if not path.name.startswith(".") and (path / SUMS).is_file()]
    return sorted(complete, key=saved_ns, reverse=True)


def saved_ns(path: Path) -> float:
    """When a checkpoint was saved; of one whose ``state.json`` is damaged the future, so that it is tried and named."""
    try:
        if _digest_of(path / STATE) in (path / SUMS).read_text():
            return json.loads((path / STATE).read_bytes())["saved_ns"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return math.inf


class Folder:
    """A checkpoint that was written: nothing in it is executed, and nothing is believed before its digest is.

    Args:
        path: the checkpoint's folder.

    Raises:
        ValueError: if there is no checkpoint.
        DamagedCheckpoint: if ``state.json`` or ``.metadata`` is not what was written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / SUMS).is_file():
            there = "has no file SHA256SUMS" if self.path.is_dir() else "does not exist"
            raise ValueError(f"checkpoint should be a folder that ddl.Checkpoint wrote, but {self.path} {there}")
        with self._damages():
            sums = dict(line.split("  ")[::-1] for line in (self.path / SUMS).read_text().splitlines())
            for name in (STATE, METADATA):
                if _digest_of(self.path / name) != sums[name]:
                    raise DamagedCheckpoint(f"{self.path} is damaged: {name} is not what was written")
            self.content = json.loads((self.path / STATE).read_bytes())
            self.metadata = _read_metadata(self.path / METADATA)

    @contextlib.contextmanager
    def _damages(self) -> Iterator[None]:
        try:
            yield
        except DamagedCheckpoint:
            raise
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{self.path} is damaged: {Path(error.filename).name} is missing") from None
        except (Exception, CheckpointException) as error:
            if isinstance(error, CheckpointException):  # of all ranks' errors one
                error, _ = next(iter(error.failures.values()))
            raise DamagedCheckpoint(f"{self.path} is damaged: {error}") from error

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Size and dtype of each tensor, by name."""
        return self.metadata.state_dict_metadata

    def check(self, targets: Mapping[str, tuple[str, Shard]]) -> None:
        """Compares the digests of what is going to be read.

        Args:
            targets: as in :meth:`read`.

        Raises:
            DamagedCheckpoint: naming the file and the tensor whose bytes differ, are missing, or end too early.
        """
        known = {
            (file, offset): (length, digest)
            for file, parts in self.content["digests"].items()
            for offset, length, digest in parts
        }
        with self._damages():
            needed = {
                (at.relative_path, at.offset): name
                for name, at in ((i.storage_index.fqn, self.metadata.storage_data[i.storage_index]) for i in
                                 _LoadPlanner(targets).items(self.metadata))
            }  # fmt: skip
            for (file, offset), name in sorted(needed.items()):
                length, digest = known[file, offset]
                if Path(file).name != file:
                    raise DamagedCheckpoint(f"{self.path} is damaged: it names the file {file!r} outside of it")
                if (self.path / file).stat().st_size < offset + length:
                    raise DamagedCheckpoint(f"{self.path} is damaged: {file} ends before {name!r} does")
                if digest and _crc_of(self.path / file, offset, length) != digest:
                    raise DamagedCheckpoint(f"{self.path} is damaged: {name!r} in {file} is not what was written")

    def read(self, targets: Mapping[str, tuple[str, Shard]]) -> None:
        """Reads tensors in place; every rank of the job calls it.

        Args:
            targets: what this rank reads: any key to the name of a tensor of the checkpoint and the shard of it that
                is filled.
        """
        with warnings.catch_warnings(), self._damages():
            warnings.simplefilter("ignore")  # that one process is one process, and that ranks have other names
            reader = _Reader(self.path, self.metadata)
            alone = not dist.is_initialized()
            dcp.load({}, storage_reader=reader, planner=_LoadPlanner(targets), no_dist=alone)


class _Reader(dcp.FileSystemReader):
    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What :class:`Folder` has read: torch would execute what is in the file."""
        return self.metadata


class _LoadPlanner(DefaultLoadPlanner):
    """What each rank has to read. A tensor may be read into several places, by keys of their own."""

    def __init__(self, targets: Mapping[str, tuple[str, Shard]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.targets = targets

    def items(self, metadata: Metadata) -> list[ReadItem]:
        found = []
        for key, (name, shard) in self.targets.items():
            chunks = [ChunkStorageMetadata(torch.Size(at), piece.size()) for at, piece in shard.pieces]
            for item in create_read_items_for_chunk_list(name, metadata.state_dict_metadata[name], chunks):
                found.append(dataclasses.replace(item, dest_index=dataclasses.replace(item.dest_index, fqn=key)))
        return found

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self.items(self.metadata))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return dict(self.targets[index.fqn][1].pieces)[tuple(index.offset)]


# What a ``.metadata`` of tensors consists of; pickle would call anything that a file names.
_IN_METADATA = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
                 "StorageMeta", "_MEM_FORMAT_ENCODING")
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
     ("torch.serialization", "_get_layout")}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _IN_METADATA or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise DamagedCheckpoint(f"{METADATA} holds {module}.{name}, which is not loaded: it could run any code")


def _read_metadata(path: Path) -> Metadata:
    metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
    metadata.storage_meta = None
    return metadata


# --------------------------------------------------------------------------------------------- together


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank has, in rank order."""
    if not dist.is_initialized():
        return [value]
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, value, group=group)
    return parts


def agree(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raises on every rank what any rank has found.

    Args:
        error: what this rank has found; None: nothing.
        group: a group of all ranks. Default: the world.
    """
    for rank, found in enumerate(gathered(error, group)):
        if found is not None:
            if error is None:
                found.add_note(f"This was found on rank {rank}.")
            raise found


def on_rank_0(function: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """What a function returns or raises on rank 0, on every rank."""
    result, error = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            result = function()
        except Exception as raised:
            error = raised
    if dist.is_initialized():
        box = [result, error]
        dist.broadcast_object_list(box, src=0, group=group)
        result, error = box
    if error is not None:
        raise error
    return result
