"""A model's weights as safetensors files, which plain torch and Hugging Face read, and back."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ignite_ddl.arguments import COUNT, FOLDER, MODULE, PATH, Fits, takes
from ignite_ddl.checkpoint.form import read
from ignite_ddl.checkpoint.storage import agree, on_rank_0
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.state import full_tensors, is_extra_state, load_full_state_dict

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


@takes(model=MODULE, folder=FOLDER, max_shard_size=Fits("a positive number of bytes", COUNT.read))
def export_weights(model: nn.Module, folder: str | Path, max_shard_size: int | None = None) -> list[Path]:
    """Writes the weights of the uncut model as safetensors; every rank calls it.

    Tensors are gathered one by one, and on rank 0 only; it holds those of one file at a time. Names are those of the
    uncut model's state dict; a tied weight is there under each of its names. What ``get_extra_state`` returns is left
    out. Optimizer and the rest of a run are for :class:`Checkpoint`.

    Args:
        model: what ``ddl.auto_model`` returned.
        folder: where ``model.safetensors`` is written, or ``model-00001-of-00003.safetensors`` … and
            ``model.safetensors.index.json``. It is made if need be; files of these names are replaced.
        max_shard_size: bytes of tensors in a file; one larger tensor makes a larger file. Default None: one file.

    Returns:
        list: the paths of the files with weights, on every rank.

    Raises:
        ValueError: if ``max_shard_size`` is not positive, the model has no tensors, or safetensors not their type.
        OSError: on every rank, if rank 0 cannot write.

    Examples:
        .. code-block:: python

            import tempfile
            import torch
            import ignite_ddl as ddl

            def exporting(local_rank, folder):
                torch.manual_seed(0)
                model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
                ddl.export_weights(ddl.auto_model(model, shard=True), folder)

            with tempfile.TemporaryDirectory() as folder:
                with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                    parallel.run(exporting, folder)
                torch.manual_seed(1)
                plain = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
                ddl.import_weights(plain, folder)
                torch.manual_seed(0)
                assert torch.equal(plain[0].weight, torch.nn.Linear(3, 8).weight)
    """
    # Not by torch's HuggingFaceStorageWriter: it stores the rows of Column(parts=) in the order of ranks.
    folder, parts, weight_map, total = Path(folder), [], {}, 0
    if all(map(is_extra_state, stages_of(model).full_shapes())):
        raise ValueError("model should have parameters or buffers, of which files are made, but has none")
    error: Exception | None = None
    tensors = ((name, tensor) for name, tensor in full_tensors(model) if tensor is not None)  # on rank 0
    for batch in _batches(tensors, math.inf if max_shard_size is None else max_shard_size):
        path = folder / f".part-{len(parts) + 1}.safetensors"
        if error is None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                save_file(batch, path, metadata={"format": "pt"})
            except Exception as raised:  # the other ranks go on giving tensors
                error = raised if isinstance(raised, OSError) else OSError(f"{path} could not be written: {raised}")
                unknown = [name for name, tensor in batch.items() if tensor.dtype in raised.args]
                if isinstance(raised, KeyError) and unknown:
                    error = ValueError(
                        f"model has {unknown[0]!r} of the type {raised}, which safetensors does not know: save it by "
                        "ddl.Checkpoint, or torch.save on one rank what ddl.full_state_dict(model) gives to all"
                    )
        parts.append(path)
        weight_map |= dict.fromkeys(batch, len(parts))
        total += sum(tensor.nbytes for tensor in batch.values())
        batch.clear()  # before those of the next file are gathered
    for path in parts if error is not None else ():
        with contextlib.suppress(OSError):
            path.unlink()
    agree(error)
    return on_rank_0(lambda: _rename_files(folder, parts, weight_map, total), None)


def _batches(tensors: Iterable[tuple[str, torch.Tensor]], most: float) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors together up to so many bytes."""
    batch: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if batch and held + tensor.nbytes > most:
            yield batch
            batch, held = {}, 0
        batch[name] = tensor.contiguous()  # not channels_last
        held += tensor.nbytes
    if batch:
        yield batch


def _rename_files(folder: Path, parts: list[Path], weight_map: Mapping[str, int], total: int) -> list[Path]:
    """Gives files their final names, the index last; removes what an export before this one has left."""
    names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    before = set()
    with contextlib.suppress(Exception):  # there is no index that names the files of an export before
        before = set(json.loads(read(folder / INDEX, 1 << 28))["weight_map"].values())
    (folder / INDEX).unlink(missing_ok=True)
    for path, name in zip(parts, names if len(parts) > 1 else [ONE], strict=True):
        os.replace(path, folder / name)
    for old in folder.glob("model-*-of-*.safetensors"):
        if old.name in before and (len(parts) == 1 or old.name not in names):
            old.unlink()
    if len(parts) == 1:
        return [folder / ONE]
    (folder / ONE).unlink(missing_ok=True)
    index = {"metadata": {"total_size": total}, "weight_map": {k: names[i - 1] for k, i in weight_map.items()}}
    (folder / f".{INDEX}").write_text(json.dumps(index, indent=2))
    os.replace(folder / f".{INDEX}", folder / INDEX)
    return [folder / name for name in names]


@takes(model=MODULE, folder=PATH)
def import_weights(model: nn.Module, folder: str | Path) -> None:
    """Loads safetensors files into a model on any mesh, in place; every rank calls it and reads them tensor by tensor.

    Args:
        model: what ``ddl.auto_model`` returned, or a plain module. If it was made in ``ddl.empty_weights``, no rank
            holds more than its part and one tensor.
        folder: with ``model.safetensors``, or with shards and their index; or the path of one such file.

    Raises:
        ValueError: if a name is missing or unknown, a shape differs, or there is no such file.
    """
    load_full_state_dict(model, _Files(Path(folder)))


class _Files(Mapping):
    """A state dict that reads a tensor when it is asked for."""

    def __init__(self, path: Path) -> None:
        if (path / INDEX).is_file():
            weight_map = json.loads((path / INDEX).read_text())["weight_map"]
            self.files = {name: path / Path(file).name for name, file in weight_map.items()}
            missing = sorted({file.name for file in self.files.values() if not file.is_file()})
            if missing:
                raise ValueError(f"{path} should have the files that {INDEX} names, but lacks {', '.join(missing)}")
            return
        file = path / ONE if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"folder should have {ONE} or {INDEX}, but {path} has neither")
        with safe_open(file, "pt") as weights:
            self.files = dict.fromkeys(weights.keys(), file)

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], "pt") as weights:
            return weights.get_tensor(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        with safe_open(self.files[name], "pt") as weights:
            return tuple(weights.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)
