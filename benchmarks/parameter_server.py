"""The parameter server beside the same pulls and pushes written by hand on RPC, and beside all-reduce DDP.

All contestants run in the same workers of the same launch, in turns, the order swapped each round, so that a busy
machine slows all; each ratio is the median of the rounds' ratios, and that of the CPU seconds of all processes, which
other programs hardly touch, stands beside it. By hand means plain torch.distributed.rpc on the same transport,
without checks, records or faults (parameter_server_by_hand.py). Two tables:

- what a pull and a push cost, by hand and through ddl, with nothing computed in between;
- a training step (batch of 8 rows, SGD): through the server, synchronous, and by DDP, with the bytes that went into
  and out of the server and those that each rank handed to all-reduce, both counted, not calculated. Of what it is
  handed, a rank of a ring sends 2 (n - 1) / n.

    python benchmarks/parameter_server.py [--rounds 11] [--sizes 0.1 1 10] [--workers 1 2 3 4] [--servers 1]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

import ignite_ddl as ddl
from ignite_ddl.lab.bytes import count_bytes

TARGET = 0.90
LAYERS, ROWS = 4, 8


def build(millions):
    torch.manual_seed(0)
    width = round((millions * 1e6 / LAYERS) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


# ------------------------------------------------------------------------------------------------- the contestants


def through_ddl(model, mode, gradients):
    server = ddl.ParameterServer(model, sgd, mode=mode)
    parameters = list(model.parameters())

    def run(steps):
        for _ in range(steps):
            server.pull()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            server.push()

    return run


def by_hand(model, mode, gradients):
    import parameter_server_by_hand as hand

    parameters = list(model.parameters())
    if dist.get_rank() == 0:
        rpc.rpc_sync(
            "server0", hand.create, ([p.detach() for p in parameters], dist.get_world_size(), mode == "sync")
        )
    dist.barrier()
    done = 0

    def run(steps):
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


def training_by_server(model, x):
    server = ddl.ParameterServer(model, sgd, mode="sync")

    def run(steps):
        for _ in range(steps):
            server.pull()
            model(x).square().mean().backward()
            server.push()

    return run, server


def training_by_ddp(model, x):
    model = DistributedDataParallel(model)
    optimizer = sgd(model.parameters())

    def run(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return run


# ------------------------------------------------------------------------------------------------------ measuring


def busy():
    """CPU seconds of this worker, and on worker 0 of the first server too."""
    here = time.process_time()
    return here + rpc.rpc_sync("server0", time.process_time) if dist.get_rank() == 0 else here


def in_turns(runs, rounds, steps):
    """Seconds and CPU seconds per step of each, by round."""
    seconds, cpu = {name: [] for name in runs}, {name: [] for name in runs}
    for index in range(-1, rounds):  # the first warms up
        for name in sorted(runs, reverse=index % 2 == 1):
            dist.barrier()
            before = busy()
            dist.barrier()
            start = time.perf_counter()
            runs[name](steps)
            dist.barrier()
            if index >= 0:
                seconds[name].append((time.perf_counter() - start) / steps)
                cpu[name].append((busy() - before) / steps)
    return seconds, cpu


def compete(local_rank, millions, rounds, steps):
    logging.disable(logging.INFO)
    found = {}
    for mode in ("sync", "async"):
        model = build(millions)
        gradients = [torch.full_like(p, 1e-6) for p in model.parameters()]
        runs = {"ddl": through_ddl(model, mode, gradients), "hand": by_hand(model, mode, gradients)}
        found[mode] = in_turns(runs, rounds, steps)
    return found


def train(local_rank, millions, rounds, steps):
    logging.disable(logging.INFO)
    x = torch.randn(ROWS, build(millions)[0].in_features)
    by_server, server = training_by_server(build(millions), x)
    by_ddp = training_by_ddp(build(millions), x)
    by_server(1), by_ddp(1)  # DDP makes its buckets anew after the first step
    dist.barrier()
    before = server.statistics()["servers"]
    dist.barrier()
    with count_bytes() as traffic:
        by_server(steps)
        assert not traffic.calls
        by_ddp(steps)
    dist.barrier()
    after = server.statistics()["servers"]
    bytes_of = {
        "server in": max(b["bytes_in"] - a["bytes_in"] for a, b in zip(before, after, strict=True)) / steps,
        "server out": max(b["bytes_out"] - a["bytes_out"] for a, b in zip(before, after, strict=True))
        / steps,
        "all-reduce": traffic.of("all_reduce").put_in / steps,
    }
    dist.barrier()
    return in_turns({"server": by_server, "ddp": by_ddp}, rounds, steps), bytes_of


def ratio(above, below):
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    return statistics.median(ratios), [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]


def ms(seconds):
    return statistics.median(seconds) * 1e3


def measure(millions, workers, servers, rounds):
    steps = {0.1: 20, 1: 10}.get(millions, 3)
    where = {
        "millions": millions,
        "workers": workers,
        "cores": len(os.sched_getaffinity(0)),
        "rounds": rounds,
    }
    lines = []
    competed = ddl.Parallel("gloo", workers, servers=1, timeout=600).run(compete, millions, rounds, steps)
    for mode, (seconds, _) in competed[0].items():
        middle, quarters = ratio(seconds["hand"], seconds["ddl"])
        of_all = {
            who: [
                sum(by_round) for by_round in zip(*(found[mode][1][who] for found in competed), strict=True)
            ]
            for who in seconds
        }
        line = {"benchmark": "pull and push", "mode": mode, "ratio": middle, "quarters": quarters}
        line |= {"cpu_ratio": ratio(of_all["hand"], of_all["ddl"])[0]}
        lines.append(line | {"ddl_ms": ms(seconds["ddl"]), "hand_ms": ms(seconds["hand"])} | where)
    launch = ddl.Parallel("gloo", workers, servers=servers, timeout=600)
    (seconds, _), bytes_of = launch.run(train, millions, rounds, steps)[0]
    middle, quarters = ratio(seconds["server"], seconds["ddp"])
    line = {"benchmark": "training step", "servers": servers, "ratio": middle, "quarters": quarters}
    line |= {"server_ms": ms(seconds["server"]), "ddp_ms": ms(seconds["ddp"]), "bytes": bytes_of}
    return [*lines, line | where]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.1, 1, 10], help="millions of parameters")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--servers", type=int, default=1, help="of the training step")
    options = parser.parse_args()
    lines = []
    for millions in options.sizes:
        for workers in options.workers:
            lines += measure(millions, workers, options.servers, options.rounds)
    print(
        f"{'pull and push':14} {'mode':6} {'ddl':>10} {'by hand':>10}   hand/ddl  middle half     CPU  target {TARGET}"
    )
    for line in (line for line in lines if line["benchmark"] == "pull and push"):
        verdict = "" if line["ratio"] >= TARGET else "  under"
        low, high = line["quarters"]
        print(
            f"{line['millions']:4g} M × {line['workers']}     {line['mode']:6} {line['ddl_ms']:7.2f} ms "
            f"{line['hand_ms']:7.2f} ms   {line['ratio']:8.2f}  {low:.2f} – {high:.2f}  {line['cpu_ratio']:6.2f}"
            f"{verdict}"
        )
    servers = f"{options.servers} server" + "s" * (options.servers > 1)
    print(
        f"\n{'training step':14} {servers:>10} {'DDP':>10}   ratio   MB a step: server in, out   handed to all-reduce"
    )
    for line in (line for line in lines if line["benchmark"] == "training step"):
        mb = {name: number / 1e6 for name, number in line["bytes"].items()}
        print(
            f"{line['millions']:4g} M × {line['workers']}   {line['server_ms']:7.2f} ms {line['ddp_ms']:7.2f} ms "
            f"{line['ratio']:7.2f}   {mb['server in']:14.2f} {mb['server out']:10.2f} {mb['all-reduce']:22.2f}"
        )
    for line in lines:
        print(json.dumps(line | {"torch": torch.__version__}))


if __name__ == "__main__":
    main()
