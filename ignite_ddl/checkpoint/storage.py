"""A checkpoint's folder: each rank's shards through torch's DCP, the rest as JSON, a digest of each part.

::

    checkpoint_40/
        __0_0.distcp  __1_0.distcp …   the shards that each rank wrote
        .metadata                      DCP's, for dcp.load; not read here
        state.json                     what is no tensor; where each part of each tensor is, and its CRC-32
        SHA256SUMS                     digests of the two files above, as ``sha256sum -c`` reads them; written last

The folder is written under a hidden name and renamed when it is complete, so a folder that is found is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
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
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config

from ignite_ddl.checkpoint.form import (
    METADATA,
    STATE,
    SUMS,
    VERSION,
    DamagedCheckpoint,
    NoCheckpoint,
    check_state,
    described,
    digest_line,
    dump_state,
    metadata_of,
    open_regular_file,
    read_state,
)
from ignite_ddl.checkpoint.owners import make_temporary_folder, publish, remove, sync_folder
from ignite_ddl.collectives import gathered_values
from ignite_ddl.state import Shard

try:  # the same CRC-32, several times as fast
    from isal.isal_zlib import crc32
except ImportError:  # a processor for which it is not built
    from zlib import crc32

_BLOCK = 1 << 20


# --------------------------------------------------------------------------------------------- writing


def write(
    folder: Path,
    shards: Mapping[str, Shard],
    state: Any,
    content: Callable[[list[Any]], dict[str, Any]],
    group: dist.ProcessGroup | None,
    digests: bool = True,
    outdated: Sequence[str] = (),
) -> None:
    """Writes a checkpoint; every rank calls it. Interrupted at any moment, it leaves what was there before.

    Args:
        folder: where, on a file system that all ranks see. One of that name is replaced.
        shards: what this rank holds of each tensor, by name. Of parts that several ranks hold one is written.
        state: what rank 0 gets from this rank.
        content: makes of the states of all ranks what goes into ``state.json``; called on rank 0.
        group: a group of all ranks, for objects; None on a serial run.
        digests: whether to take a CRC-32 of each part that is written.
        outdated: names of checkpoints beside it, which are removed once this one is complete.

    Raises:
        OSError: on every rank, if any rank cannot write; what was written is removed.
        ValueError: if a rank does not see the folder, or ``content`` refuses what ranks have.
    """
    is_single_process(group)  # raises if the group was destroyed: torch would take it for one
    writer, planner = _Writer(folder, content, digests, outdated), _SavePlanner(shards, state)
    try:
        with _naming_errors(folder), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a single process
            dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except BaseException:
        for _ in range(20 if writer.made is not None else 0):
            try:
                remove(writer.made)
                break
            except OSError:  # perhaps a peer, to which nothing can be sent now, has just begun a file in it
                time.sleep(0.1)
        raise


@contextlib.contextmanager
def _naming_errors(folder: Path) -> Iterator[None]:
    """Raises the cause of a failed write, with the rank that has it."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        rank, cause = 0, error
        if isinstance(error, CheckpointException):
            rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(error, CheckpointException | OSError):
            raise
        if isinstance(cause, ValueError) or not isinstance(cause, Exception):
            raise cause from error
        raise OSError(
            f"{folder} could not be written (rank {rank}: {cause}); the checkpoints before it are complete"
        ) from error


def _complete(folder: Path, saving: Path, state: dict[str, Any], outdated: Sequence[str]) -> None:
    raw = dump_state(state)
    _write_synced(saving / STATE, raw)
    sums = digest_line(STATE, raw) + digest_line(METADATA, (saving / METADATA).read_bytes())
    _write_synced(saving / SUMS, sums.encode())
    sync_folder(saving)
    publish(saving, folder, outdated)


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _crc_of(file: BinaryIO, offset: int, length: int) -> str:
    """A CRC-32 finds damage in many megabytes at memory speed; a SHA-256 would take longer than writing them."""
    found = 0
    file.seek(offset)
    while length > 0 and (block := file.read(min(length, _BLOCK))):
        found = crc32(block, found)
        length -= len(block)
    return f"{found:08x}"


@dataclasses.dataclass(frozen=True)
class _Result(WriteResult):
    digest: str = ""


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, which takes a digest of each part that it has written. Rank 0's makes the folder and completes it:
    what ranks tell each other of it goes with DCP's own messages.
    """

    def __init__(
        self, folder: Path, content: Callable[[list[Any]], dict[str, Any]], digests: bool, outdated: Sequence[str]
    ) -> None:
        super().__init__(folder)
        self.folder, self.content, self.with_digests, self.outdated = folder, content, digests, outdated
        self.made: Path | None = None  # on rank 0, where it writes until it is complete

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is: torch would make the folder, also where a rank does not see that of the others."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, with what all ranks have; gives them the folder."""
        self.state = self.content([plan.planner_data for plan in plans])
        self.made = make_temporary_folder(self.folder)
        plans = super().prepare_global_plan(plans)
        return [dataclasses.replace(plan, planner_data=self.made) for plan in plans]

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        self.path = plan.planner_data
        if not self.path.is_dir():
            raise ValueError(f"{self.folder.parent} should be a folder that all ranks see")
        with config.patch("save.compute_crc32", not self.with_digests):  # not two of the same bytes
            results = super().write_data(plan, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._with_digests(results))
        return done

    def _with_digests(self, results: list[WriteResult]) -> list[_Result]:
        found = []
        for path, of_file in itertools.groupby(results, key=lambda result: result.storage_data.relative_path):
            with open(Path(self.path) / path, "rb") as file:
                for result in of_file:
                    at = result.storage_data
                    digest = _crc_of(file, at.offset, at.length) if self.with_digests else ""
                    found.append(_Result(result.index, result.size_in_bytes, at, digest))
        return found

    def finish(self, metadata: Metadata, results: list[list[_Result]]) -> None:
        super().finish(metadata, results)
        written = {result.index: result for of_rank in results for result in of_rank}
        _complete(self.folder, self.path, self.state | {"tensors": described(metadata, written)}, self.outdated)
        metadata.state_dict_metadata, metadata.storage_data = {}, None  # torch sends it to all ranks: nobody reads it

    def storage_meta(self) -> None:
        """Nothing: torch would note the path on this machine."""


class _SavePlanner(DefaultSavePlanner):
    """What each rank has to write, from its :class:`Shard` of each tensor."""

    def __init__(self, shards: Mapping[str, Shard], state: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards, self.state = shards, state

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
            ],
            planner_data=self.state,
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return dict(self.shards[index.fqn].pieces)[tuple(index.offset)]


# --------------------------------------------------------------------------------------------- reading


def complete_checkpoints(folder: Path) -> dict[Path, float]:
    """The checkpoints in a folder that were written to their end, the newest first, and when each was saved.

    Their bytes are not checked.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # another run has just removed it
            if path.is_dir() and not path.name.startswith(".") and not os.listdir(path):
                warnings.warn(f"{path} is empty: if it was a checkpoint, what was in it is lost", stacklevel=2)
    return dict(sorted(times_saved(folder).items(), key=lambda item: item[1], reverse=True))


def times_saved(folder: Path) -> dict[Path, float]:
    """When each was saved; one with a damaged ``state.json`` counts as newest, so that it is tried and named."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.startswith(".") and (os.path.lexists(path / SUMS) or os.path.lexists(path / STATE)):
            found[path] = math.inf
            with contextlib.suppress(Exception):
                if type(at := read_state(path)["saved_ns"]) is int and at in range(1 << 63):
                    found[path] = at
    return found


class Folder:
    """A checkpoint that was written: nothing in it is executed, or used before its digest is checked.

    Args:
        path: the checkpoint's folder.

    Raises:
        ValueError: if there is no checkpoint, or one of a later format than this.
        DamagedCheckpoint: if ``state.json`` is not what was written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not os.path.lexists(self.path / SUMS) and not os.path.lexists(self.path / STATE):
            why = "has no file SHA256SUMS" if self.path.is_dir() else "is a file"
            why = why if self.path.exists() else "does not exist"
            raise NoCheckpoint(f"checkpoint should be a folder that ddl.Checkpoint wrote, but {self.path} {why}")
        with self._damages():
            self.content = read_state(self.path)
            version = self.content["version"]
        if type(version) is int and version > VERSION:
            raise ValueError(
                f"{self.path} was saved in the format {version}, but this ignite_ddl knows formats up to {VERSION}: "
                "load it with a newer one"
            )
        with self._damages():
            check_state(self.content)
            self.metadata, self.digests = metadata_of(self.content)

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

    def check(self, reads: Mapping[str, tuple[str, Shard]]) -> _LoadPlanner:
        """Compares the digests of what is going to be read.

        Args:
            reads: any key to the name of a tensor of the checkpoint and the shard of it that is filled.

        Returns:
            what :meth:`read` takes.

        Raises:
            DamagedCheckpoint: naming the file and the tensor whose bytes differ, are missing, or end too early.
        """
        with self._damages():
            planner = _LoadPlanner(reads, self.metadata)
            found = ((item.storage_index, self.metadata.storage_data[item.storage_index]) for item in planner.items)
            parts = {(at.relative_path, at.offset, at.length): index for index, at in found}
            for file_name, of_file in itertools.groupby(sorted(parts), key=lambda part: part[0]):
                if Path(file_name).name != file_name:
                    raise DamagedCheckpoint(f"{self.path} is damaged: it names the file {file_name!r} outside of it")
                with open_regular_file(self.path / file_name) as file:
                    for part in of_file:
                        self._check_part(file, part, parts[part])
        return planner

    def _check_part(self, file: BinaryIO, part: tuple[str, int, int], index: MetadataIndex) -> None:
        (file_name, offset, length), digest = part, self.digests[index]
        if os.fstat(file.fileno()).st_size < offset + length:
            raise DamagedCheckpoint(f"{self.path} is damaged: {file_name} ends before {index.fqn!r} does")
        if digest and _crc_of(file, offset, length) != digest:
            raise DamagedCheckpoint(f"{self.path} is damaged: {index.fqn!r} in {file_name} is not what was written")

    def read(self, planner: _LoadPlanner) -> None:
        """Reads in place what :meth:`check` has checked on this rank, without communication."""
        with warnings.catch_warnings(), self._damages():
            warnings.simplefilter("ignore")  # about a single process
            dcp.load({}, storage_reader=_Reader(self.path, self.metadata), planner=planner, no_dist=True)


class _Reader(dcp.FileSystemReader):
    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What :class:`Folder` has read: torch would execute what is in ``.metadata``."""
        return self.metadata


class _LoadPlanner(DefaultLoadPlanner):
    """What this rank has to read. A tensor may be read into several places, which have different keys."""

    def __init__(self, reads: Mapping[str, tuple[str, Shard]], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.reads, self.items = reads, []
        for key, (name, shard) in reads.items():
            chunks = [ChunkStorageMetadata(torch.Size(at), piece.size()) for at, piece in shard.pieces]
            for item in create_read_items_for_chunk_list(name, metadata.state_dict_metadata[name], chunks):
                self.items.append(dataclasses.replace(item, dest_index=dataclasses.replace(item.dest_index, fqn=key)))

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self.items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return dict(self.reads[index.fqn][1].pieces)[tuple(index.offset)]


# --------------------------------------------------------------------------------------------- agreement of ranks


def agree(error: Exception | None, group: dist.ProcessGroup | None = None, value: Any = None, **same: Any) -> list[Any]:
    """Raises on every rank the error that any rank has.

    Args:
        error: this rank's error; None if it has none.
        group: a group of all ranks. Default: the world.
        value: what this rank sends to all.
        same: what has to be the same on all ranks, by the name of the argument that it comes from.

    Returns:
        list: each rank's ``value``, in rank order.

    Raises:
        ValueError: if that differs.
    """
    from_this_rank = _pickled(error), same, value
    found = [from_this_rank] if is_single_process(group) else gathered_values(from_this_rank, group)
    for rank, (carried, *_) in enumerate(found):
        if carried is None:
            continue
        if dist.is_initialized() and rank != dist.get_rank():
            error = pickle.loads(carried)
            error.add_note(f"This was found on rank {rank}.")
        raise error
    for name, first in found[0][1].items():
        for rank, (_, given, _) in enumerate(found):
            if given[name] != first:
                raise ValueError(
                    f"{name} should be the same on every rank, but is {first!r} on rank 0 and {given[name]!r} on rank "
                    f"{rank}"
                )
    return [value for *_, value in found]


def attempt(function: Callable, *args: Any) -> tuple[Any, Exception | None]:
    """What a function returns, and what it raises, for :func:`agree`."""
    try:
        return function(*args), None
    except Exception as error:
        return None, error


def on_rank_0(function: Callable[[], Any], group: dist.ProcessGroup | None, error: Exception | None = None) -> Any:
    """What a function returns or raises on rank 0, on every rank; or raises the error that any rank has already."""
    if is_single_process(group) and error is None:
        return function()
    result = None
    if error is None and dist.get_rank() == 0:
        result, error = attempt(lambda: pickle.dumps(function()))
    return pickle.loads(agree(error, group, result)[0])


def is_single_process(group: dist.ProcessGroup | None) -> bool:
    """Whether this is a serial run; raises on a rank whose group was destroyed, which would look like one."""
    if group is not None and not dist.is_initialized():
        raise OSError(
            "the process group has been destroyed, and without it ranks cannot complete a checkpoint: call "
            "Checkpoint.wait() before idist.finalize(), or before the end of idist.Parallel"
        )
    return not dist.is_initialized()


def _pickled(error: Exception | None) -> bytes | None:
    """An exception for other ranks; of one that cannot be pickled, its kind and message."""
    if error is None:
        return None
    text = "".join(traceback.format_exception_only(error)).strip()
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error)
        if "".join(traceback.format_exception_only(pickle.loads(pickled))).strip() == text:
            return pickled
    kinds = (DamagedCheckpoint, OSError, ValueError)
    return pickle.dumps(next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)(text))
