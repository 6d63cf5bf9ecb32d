"""The collectives that this rank has called, as torch's flight recorder has them."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import torch


def recorded_calls(newest: int | None = None) -> list[dict[str, Any]]:
    """The collectives that this rank has called, oldest first, as torch's flight recorder has them.

    With ``newest`` only so many, those that are not done, and the last one of each group.
    It records gloo's and NCCL's; of gloo's it has no sends and receives, its states and times are not set, and only
    ``retired`` says whether a call is done. The recorder is on by default (``TORCH_FR_BUFFER_SIZE``, 0: off).
    """
    from torch.distributed.distributed_c10d import _world

    entries = _entries()
    last = {entry["process_group"][0]: entry for entry in entries}
    if newest is not None:
        old = [e for e in entries[:-newest] if not e["retired"] or last[e["process_group"][0]] is e]
        entries = old + entries[-newest:]
    members = {
        group.group_name: sorted(ranks)
        for group, ranks in dict(_world.pg_group_ranks).items()
        if isinstance(group, torch.distributed.ProcessGroup)
    }
    return [
        {
            "group": entry["process_group"][0],
            "ranks": members.get(entry["process_group"][0], []),
            "number": entry["collective_seq_id"],
            "operation": entry["profiling_name"].partition(":")[2],
            "sizes": ", ".join(
                f"{dtype}{sizes}" for dtype, sizes in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
            ),
            "done": entry["retired"],
            "frames": [(frame["filename"], frame["line"], frame["name"]) for frame in entry["frames"]],
        }
        for entry in entries
        if not entry["is_p2p"]
    ]


_RECORDERS = "_dump_fr_trace", "_dump_nccl_trace"  # torch's: NCCL has one of its own


def _entries() -> list[dict[str, Any]]:
    """What all recorders have, the oldest first; nothing of another build or version: a report has the stacks alone."""
    found: dict[tuple, dict[str, Any]] = {}
    for recorder in _RECORDERS:
        with contextlib.suppress(Exception):
            for entry in pickle.loads(getattr(torch._C._distributed_c10d, recorder)()).get("entries", []):
                names = entry["process_group"][0], entry["profiling_name"], entry["is_p2p"]
                found[*names, entry["collective_seq_id"], entry["time_created_ns"]] = entry
    return sorted(found.values(), key=lambda entry: entry["time_created_ns"])


def calls_counted() -> bytes:
    """Changes with each collective that this rank calls or completes; cheap, unlike :func:`recorded_calls`."""
    found = b""
    for recorder in _RECORDERS:
        with contextlib.suppress(Exception):
            found += getattr(torch._C._distributed_c10d, f"{recorder}_json")(includeCollectives=False)
    return found


def job_store() -> torch.distributed.Store:
    """The store by which the ranks of the job have met, by a connection of its own, for another thread."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store().clone()
