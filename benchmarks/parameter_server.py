"""The parameter server beside the same pulls and pushes written by hand on RPC, and beside all-reduce DDP.

All run in the same workers of the same launch, in turns. By hand means plain torch.distributed.rpc to a server of its
own, without checks, records or faults (parameter_server_by_hand.py). Two kinds of rows:

- what a pull and a push cost, through ddl and by hand, with nothing computed in between;
- a training step (batch of 8 rows, SGD): through the server, synchronous, and by DDP, with the bytes that went into
  and out of the server and those that each rank handed to all-reduce, both counted, not calculated. Of what it is
  handed, a rank of a ring sends 2 (n - 1) / n.

    python benchmarks/parameter_server.py [--only "1 M"] [--quick]
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import parameter_server_by_hand as hand
import psutil
import sides
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

import ignite_ddl as ddl
from ignite_ddl.lab.bytes import count_bytes

TARGET = 1.11  # as fast as hand-written RPC, or 0.9 times
LAYERS, ROWS = 4, 8


def build(millions):
    torch.manual_seed(0)
    width = round((millions * 1e6 / LAYERS) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


# ------------------------------------------------------------------------------------------------- the contestants


def through_ddl(model, mode, gradients, steps):
    server = ddl.ParameterServer(model, sgd, mode=mode)
    parameters = list(model.parameters())

    def run():
        for _ in range(steps):
            server.pull()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            server.push()

    return run


def by_hand(model, mode, gradients, steps):
    parameters = list(model.parameters())
    if dist.get_rank() == 0:
        rpc.rpc_sync("server0", hand.create, ([p.detach() for p in parameters], dist.get_world_size(), mode == "sync"))
    dist.barrier()
    done = 0

    def run():
        nonlocal done
        for _ in range(steps):
            tensors = rpc.rpc_sync("server0", hand.pull, (done if mode == "sync" else 0,))
            with torch.no_grad():
                for parameter, tensor in zip(parameters, tensors, strict=True):
                    parameter.copy_(tensor)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            rpc.rpc_sync("server0", hand.push, ([parameter.grad for parameter in parameters],))
            done += 1

    return run


def training_by_server(model, x, steps):
    server = ddl.ParameterServer(model, sgd, mode="sync")

    def run():
        for _ in range(steps):
            server.pull()
            model(x).square().mean().backward()
            server.push()

    return run, server


def training_by_ddp(model, x, steps):
    model = DistributedDataParallel(model)
    optimizer = sgd(model.parameters())

    def run():
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return run


# ------------------------------------------------------------------------------------------------------ measuring


def cpu_clock():
    """A function that says, on worker 0, the CPU seconds of all workers and servers: children of one process."""
    children = psutil.Process().parent().children() if dist.get_rank() == 0 else []
    clocks = [(~child.pid << 3) | 2 for child in children]  # as Linux numbers the clock of a process
    return lambda: sum(map(time.clock_gettime, clocks))


def compete(local_rank, address, millions, rounds, steps):
    logging.disable(logging.INFO)
    hand.join(local_rank, dist.get_world_size(), address)
    found = {}
    for mode in ("sync", "async"):
        model = build(millions)
        gradients = [torch.full_like(p, 1e-6) for p in model.parameters()]
        runs = {"ddl": through_ddl(model, mode, gradients, steps), "hand": by_hand(model, mode, gradients, steps)}
        runs["again"] = runs["hand"]
        found[mode] = sides.in_turns(runs, rounds, meet=dist.barrier, busy=cpu_clock())
    dist.barrier()
    rpc.shutdown(graceful=False)
    return found


def train(local_rank, millions, rounds, steps):
    logging.disable(logging.INFO)
    x = torch.randn(ROWS, build(millions)[0].in_features)
    by_server, server = training_by_server(build(millions), x, steps)
    by_ddp = training_by_ddp(build(millions), x, steps)
    by_ddp()  # it makes its buckets anew after the first step
    dist.barrier()
    before = server.statistics()["servers"][0]
    dist.barrier()
    with count_bytes() as traffic:
        by_server()
        assert not traffic.calls
        by_ddp()
    dist.barrier()
    after = server.statistics()["servers"][0]
    moved = [(after[name] - before[name]) / steps for name in ("bytes_in", "bytes_out")]
    dist.barrier()
    runs = {"server": by_server, "ddp": by_ddp, "again": by_ddp}
    times = sides.in_turns(runs, rounds, meet=dist.barrier, busy=cpu_clock())
    return times, [*moved, traffic.of("all_reduce").put_in / steps]


def measure(millions, workers, quick):
    steps = 2 if quick else {0.1: 20, 1: 10}.get(millions, 3)
    rounds = 2 if quick else 11
    size = f"{millions:g} M parameters, {workers} worker{'s' * (workers > 1)}"

    def line(what, against, times, first, second, **more):
        seconds, cpu = times
        by_step = {name: [each / steps for each in found] for name, found in seconds.items()}
        more |= {"again": by_step["again"], "cpu": (cpu[first], cpu[second])}
        return sides.row(f"{what}, {size}", against, by_step[first], by_step[second], **more)

    def launched(*what):
        return ddl.Parallel("gloo", workers, servers=1, timeout=300).run(*what, millions, rounds, steps)

    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/rpc"
        server = multiprocessing.get_context("forkserver").Process(target=hand.serve, args=(workers, address))
        server.start()
        try:
            competed, rows = launched(compete, address), []
        finally:
            server.kill()
            server.join()
    for mode in competed[0]:
        times = sides.of_all_ranks([found[mode] for found in competed])
        rows.append(line(f"pull and push, {mode}", "RPC by hand", times, "ddl", "hand", target=TARGET))
    trained = launched(train)
    moved = [number / 1e6 for number in trained[0][1]]
    note = "{:.1f} MB a step into the server, {:.1f} out; {:.1f} handed to all-reduce".format(*moved)
    times = sides.of_all_ranks([times for times, _ in trained])
    return [*rows, line("a step through the server", "DDP", times, "server", "ddp", note=note)]


PARTS = {
    f"{millions:g} M × {workers}": functools.partial(measure, millions, workers)
    for millions, workers in ((0.1, 2), (1, 1), (1, 2), (1, 4), (10, 2))
}

if __name__ == "__main__":
    sides.main(__doc__, PARTS)
