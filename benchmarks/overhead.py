"""What a training step through ddl and Ignite's Engine costs over the same step written by hand in torch.

All sides run in the same ranks of the same launch, in turns. They read batches from a DataLoader, reduce their loss
over the ranks and read it on the host each step. Over dp2, Accelerate and plain Ignite train beside them, the latter
also as it is used most: with its rank's own loss. CPU is the ratio of the CPU seconds of all ranks, which other
programs hardly touch.

    python benchmarks/overhead.py [--only "dp2 × pp2 × tp2"] [--quick]
"""

from __future__ import annotations

import functools
import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ignite.distributed as idist
import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import create_supervised_trainer
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ignite_ddl as ddl
from ignite_ddl.course import GPT
from ignite_ddl.pipeline.cut import cut_into_stages

TARGET = 1.03
WORDS, LENGTH, BATCH, MICROBATCHES = 80, 64, 16, 4
LIMIT = 900  # seconds of one case
# What is measured: mesh, width of the model, rounds, the steps of a turn, and whether the target holds there. A turn is
# a run, and begins and ends with what a long run has once.
CASES = {
    "one process": ({"dp": 1}, 128, 5, 32, False),
    "dp2 (DDP)": ({"dp": 2}, 128, 7, 64, True),
    "dp2 (FSDP2)": ({"dp": 2}, 128, 7, 64, True),
    "tp2": ({"tp": 2}, 128, 7, 32, True),
    "pp2 (1f1b)": ({"pp": 2}, 128, 7, 64, True),
    "dp2 × pp2 × tp2": ({"dp": 2, "pp": 2, "tp": 2}, 128, 3, 16, True),
    "dp4 (DDP)": ({"dp": 4}, 128, 5, 64, True),
    "dp8 (DDP)": ({"dp": 8}, 128, 4, 32, True),
    "dp2 (DDP), width 32": ({"dp": 2}, 32, 9, 256, False),
    "dp2 (DDP), width 384": ({"dp": 2}, 384, 3, 16, True),
}
RIVALS = {
    "Accelerate": "Accelerate",
    "Ignite": "plain Ignite, loss reduced",
    "Ignite, own loss": "plain Ignite, its rank's own loss",
}


def build(width):
    torch.manual_seed(0)
    return GPT(vocabulary_size=WORDS, length=LENGTH, width=width, n_heads=4, n_blocks=4, tied=False)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def data(steps):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (steps * BATCH, LENGTH + 1), generator=generator)
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


# ----------------------------------------------------------------------------------------------------- the sides
# Each returns a function that runs a turn's steps and returns their losses.


def through_ddl(width, steps, shard):
    loader = ddl.auto_dataloader(data(steps), batch_size=BATCH)
    model = ddl.auto_model(build(width), GPT.tensor_plan, n_microbatches=MICROBATCHES, shard=shard)
    optimizer = ddl.auto_optim(sgd(model))
    return _trained(ddl.create_supervised_trainer(model, optimizer, loss_fn), loader)


def through_ignite(width, steps, reduced):
    loader = idist.auto_dataloader(data(steps), batch_size=BATCH, shuffle=False)
    model = idist.auto_model(build(width))
    optimizer = idist.auto_optim(sgd(model))

    def reduce(x, y, y_pred, loss):
        return idist.all_reduce(loss.detach()).item() / idist.get_world_size()

    output = {"output_transform": reduce} if reduced else {}
    return _trained(create_supervised_trainer(model, optimizer, loss_fn, **output), loader)


def _trained(trainer, loader):
    losses = []
    trainer.add_event_handler("ITERATION_COMPLETED", lambda engine: losses.append(engine.state.output))

    def run():
        losses.clear()
        trainer.run(loader, max_epochs=1)
        return list(losses)

    return run


def through_accelerate(width, steps):
    from accelerate import Accelerator

    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for keys, value in zip(names, (dist.get_rank(), dist.get_world_size()), strict=True):
        os.environ |= dict.fromkeys(keys, str(value))  # where it looks first
    accelerator, model = Accelerator(cpu=True), build(width)
    loader = DataLoader(data(steps), batch_size=BATCH // dist.get_world_size())
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    assert accelerator.num_processes == dist.get_world_size()

    def run():
        losses = []
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses

    return run


def by_hand(width, steps, shard):
    """As a torch user writes it: torch's styles, and nothing of ddl but the mesh and the model."""
    mesh, model = ddl.get_mesh(), build(width)
    dataset = data(steps)
    sampler = DistributedSampler(dataset, mesh.dp_size, mesh.dp_rank, shuffle=False)
    loader = DataLoader(dataset, batch_size=BATCH // mesh.dp_size, sampler=sampler)
    if mesh.tp_size > 1:
        _cut_by_hand(model, mesh.device_mesh["tp"])
    if mesh.pp_size == 1:
        return _plain_by_hand(mesh, model, loader, shard)
    return _pipeline_by_hand(mesh, model, loader)


def _cut_by_hand(model, tp_mesh):
    """What GPT.tensor_plan says, in torch's own styles: the same cuts, the same collectives. Nothing drops here."""
    whole = Replicate()
    plan = {"embed.token": RowwiseParallel(input_layouts=whole), "head.out": ColwiseParallel(output_layouts=whole)}
    for name in (name for name, _ in model.named_children() if name.startswith("block")):
        plan |= {
            f"{name}.attention": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
            **{f"{name}.attention.{layer}": ColwiseParallel() for layer in "qkv"},
            f"{name}.attention.out": RowwiseParallel(),
            f"{name}.up": ColwiseParallel(),
            f"{name}.down": RowwiseParallel(),
        }
    parallelize_module(model, tp_mesh, plan)


def _plain_by_hand(mesh, model, loader, shard):
    if shard:
        for layer in model.children():
            fully_shard(layer, mesh=mesh.device_mesh["dp"])
        fully_shard(model, mesh=mesh.device_mesh["dp"])
    elif mesh.dp_size > 1:
        model = DistributedDataParallel(model)
    optimizer = sgd(model)

    def run():
        losses = []
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            loss = loss.detach()
            if mesh.dp_size > 1:
                dist.all_reduce(loss, group=mesh.dp_group)
                loss /= mesh.dp_size
            losses.append(loss.item())
        return losses

    return run


def _pipeline_by_hand(mesh, model, loader):
    layers = list(model.children())
    cut = len(layers) // 2  # as balance does
    assert [len(s) for s in cut_into_stages(build(32), mesh.pp_size).layers] == [cut, len(layers) - cut]
    stage = nn.Sequential(*(layers[:cut] if mesh.pp_rank == 0 else layers[cut:]))
    if mesh.dp_size > 1:
        replicate(stage, mesh=mesh.device_mesh["dp"])
    optimizer = sgd(stage)
    device = torch.device("cpu")
    schedule = Schedule1F1B(
        PipelineStage(stage, mesh.pp_rank, mesh.pp_size, device, group=mesh.pp_group), MICROBATCHES, loss_fn=loss_fn
    )

    def run():
        losses = []
        stage.train()
        for x, y in loader:
            optimizer.zero_grad()
            total = torch.zeros(())
            if mesh.pp_rank == 0:
                schedule.step(x)
            else:
                of_microbatches = []
                schedule.step(target=y, losses=of_microbatches)
                total = torch.stack(of_microbatches).mean().detach() / (mesh.dp_size * mesh.tp_size)
            optimizer.step()
            dist.all_reduce(total)  # to every rank, so that all know the loss
            losses.append(total.item())
        return losses

    return run


# ------------------------------------------------------------------------------------------------------ measuring


def compete(local_rank, case, rounds, steps, rivals):
    logging.disable(logging.INFO)  # what auto_model tells
    shard, width = "FSDP2" in case, CASES[case][1]
    runs = {"ddl": through_ddl(width, steps, shard)}
    runs |= {name: by_hand(width, steps, shard) for name in ("hand", "again")}
    makers = {
        "Accelerate": through_accelerate,
        "Ignite": functools.partial(through_ignite, reduced=True),
        "Ignite, own loss": functools.partial(through_ignite, reduced=False),
    }
    runs |= {name: makers[name](width, steps) for name in rivals}
    losses = {name: run() for name, run in runs.items()}
    losses.pop("Ignite, own loss", None)
    for name, found in losses.items():
        assert max(abs(a - b) for a, b in zip(found, losses["hand"], strict=True)) < 1e-4, (name, losses)
    return sides.in_turns(runs, rounds, meet=dist.barrier)


def measure(case, quick):
    axes, _, rounds, steps, decides = CASES[case]
    rounds, steps = (2, 3) if quick else (rounds, steps)
    ranks = torch.tensor([axes.get(axis, 1) for axis in ("dp", "pp", "tp")]).prod().item()
    rivals = RIVALS if case == "dp2 (DDP)" else ()
    results = ddl.Parallel("gloo", ranks, timeout=LIMIT, threads_per_rank=1, **axes).run(
        compete, case, rounds, steps, tuple(rivals)
    )
    seconds, cpu = sides.of_all_ranks(results)
    seconds = {name: [each / steps for each in found] for name, found in seconds.items()}

    def line(name, against, **more):
        used = cpu["ddl"], cpu[name]
        return sides.row(f"a step, {case}", against, seconds["ddl"], seconds[name], cpu=used, **more)

    rows = [line("hand", "by hand", again=seconds["again"], target=TARGET if decides else None)]
    return rows + [line(name, RIVALS[name]) for name in rivals]


if __name__ == "__main__":
    sides.main(__doc__, {case: functools.partial(measure, case) for case in CASES})
