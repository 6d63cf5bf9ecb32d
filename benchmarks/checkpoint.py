"""What ddl.Checkpoint costs over torch's DCP by hand and over torch.save, in time and in memory.

All ways save the same model and AdamW's state, sharded over dp by FSDP2, into fresh folders with the same fsync, in
turns in one launch. "in the background" is the time until training goes on. Peaks are of a launch of their own each:
the growth of a rank's resident memory while it saves, and the shards themselves.

    python benchmarks/checkpoint.py [--only peak] [--quick]
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import tempfile
import threading
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import sides
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ignite_ddl as ddl

TARGET = 1.1  # without digests
HAND, GATHERED = "DCP by hand", "torch.save on rank 0"
OURS = {
    "ddl.Checkpoint, no digests": {"digests": False},
    "ddl.Checkpoint": {},
    "ddl.Checkpoint, in the background": {"asynchronous": True},
}


def build(width):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)])
    model = ddl.auto_model(model, shard=True)
    optimizer = ddl.auto_optim(torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def ways(model, optimizer, folder):
    """Each way to save."""
    things = {"model": model, "optimizer": optimizer}

    def by_hand(path):
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, storage_writer=dcp.FileSystemWriter(path))

    def gathered(path):
        state = ddl.full_state_dict(model, on_rank=0)
        moments = [
            {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in s.items()}
            for s in optimizer.state.values()
        ]
        if dist.get_rank() == 0:
            path.mkdir()
            with open(path / "all.pt", "wb") as file:
                torch.save({"model": state, "optimizer": moments}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def by_ddl(how):
        checkpoint = ddl.Checkpoint(things, folder, **how)

        def save(path):
            checkpoint._write(path.name, {}, [])  # not save(), which has no end in the background

        save.wait = checkpoint.wait
        return save

    return {HAND: by_hand, "again": by_hand, GATHERED: gathered} | {name: by_ddl(how) for name, how in OURS.items()}


def saving(local_rank, names, rounds, width, folder):
    """Seconds of each way to save, and to load."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)  # what auto_model tells
    folder = Path(folder)
    model, optimizer = build(width)
    table = {name: save for name, save in ways(model, optimizer, folder).items() if name in names}
    paths = {name: folder / name for name in table}

    def removed(name):
        getattr(table[name], "wait", lambda: None)()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(paths[name])

    saves = {name: functools.partial(save, paths[name]) for name, save in table.items()}
    found = {"save": sides.in_turns(saves, rounds, meet=dist.barrier, after=removed)[0]}

    def load_by_hand():
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states}
        dcp.load(state, storage_reader=dcp.FileSystemReader(paths[HAND]))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    loads = {"ddl.Checkpoint": None, HAND: load_by_hand, "again": load_by_hand}
    if loads.keys() <= table.keys():
        for name in ("ddl.Checkpoint", HAND):
            saves[name]()
        load = ddl.Checkpoint.load_objects
        loads["ddl.Checkpoint"] = lambda: load({"model": model, "optimizer": optimizer}, paths["ddl.Checkpoint"])
        found["load"] = sides.in_turns(loads, rounds, meet=dist.barrier)[0]
    return found


def compare(ranks, width, names, quick):
    names, rounds = (HAND, "again", *names), 2 if quick else 9
    with tempfile.TemporaryDirectory() as folder:
        launch = ddl.Parallel("gloo", ranks, timeout=300, dp=ranks)
        found = launch.run(saving, names, rounds, width, folder)[0]
    rows, of = [], f"dp{ranks}, width {width}"
    for what, seconds in found.items():
        for name in seconds:
            if name in OURS:
                target = TARGET if (what, name) == ("save", "ddl.Checkpoint, no digests") else None
                control = {"again": seconds["again"], "target": target}
                rows.append(sides.row(f"{what}, {name}, {of}", HAND, seconds[name], seconds[HAND], **control))
    if GATHERED in names:
        saves = found["save"]
        rows.append(sides.row(f"save, ddl.Checkpoint, {of}", GATHERED, saves["ddl.Checkpoint"], saves[GATHERED]))
    return rows


def peak(local_rank, name, width, folder):
    """Bytes of a rank's shards and of what it grows by while it saves."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)  # what auto_model tells
    folder = Path(folder)
    model, optimizer = build(width)
    save = ways(model, optimizer, folder)[name]
    nothing = nn.Linear(2, 2)
    ddl.Checkpoint({"model": ddl.auto_model(nothing)}, folder).save("small")  # imports are no part of it
    ctypes.CDLL(None).malloc_trim(0)  # what building has freed would be used again, unseen
    process, highest, done = psutil.Process(), [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            highest[0] = max(highest[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    before = process.memory_info().rss
    thread.start()
    save(folder / "peak")
    getattr(save, "wait", lambda: None)()
    done.set()
    thread.join()
    shards = sum(p.to_local().numel() * p.element_size() for p in model.parameters()) * 3
    return shards + max(0, highest[0] - before)


def peaks(width, quick):
    found = {}
    for name in (HAND, "ddl.Checkpoint", "ddl.Checkpoint, in the background"):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = max(ddl.Parallel("gloo", 2, timeout=300, dp=2).run(peak, name, width, folder))
    what = "peak memory of a rank that saves"
    return [sides.row(f"{what}, {name}, dp2", HAND, [found[name]], [found[HAND]]) for name in OURS if name in found]


def parts():
    some = ("ddl.Checkpoint, no digests", "ddl.Checkpoint")
    found = {"dp2, width 1024": functools.partial(compare, 2, 1024, (GATHERED, *OURS))}
    for ranks, width in ((2, 256), (1, 512), (2, 512), (4, 512), (8, 512)):
        found[f"dp{ranks}, width {width}"] = functools.partial(compare, ranks, width, some[:1])
    return found | {"peak": functools.partial(peaks, 1024)}


if __name__ == "__main__":
    sides.main(__doc__, parts())
