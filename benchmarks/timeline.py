"""What ``Timeline`` itself costs: data-parallel steps of about 10 ms, with and without it.

The bound, 2 %, is on processor time of all threads of the ranks, which other programs on the machine disturb least;
wall time stands in a row of its own. Starting and ending a recording are part of it, once every 50 steps.

    python benchmarks/timeline.py [--quick]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import ignite_ddl as ddl
from ignite_ddl.lab import Timeline

BOUND = 1.02


def cost(quick):
    rounds, steps = (2, 10) if quick else (24, 50)
    results = ddl.Parallel("gloo", 2, threads_per_rank=1, timeout=300).run(compete, rounds, steps)
    wall, cpu = sides.of_all_ranks(results)
    names = "a step with a Timeline, dp2", "without"

    def line(found, kind, **more):
        by_step = {name: [each / steps for each in seconds] for name, seconds in found.items()}
        ours, theirs, again = by_step["with"], by_step["without"], by_step["again"]
        return sides.row(f"{names[0]}, {kind}", names[1], ours, theirs, again=again, **more)

    return [line(cpu, "CPU seconds of both ranks", target=BOUND), line(wall, "wall")]


def compete(local_rank, rounds, steps):
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [(torch.randn(192, 256), torch.randn(192, 256))] * steps
    trainers = {
        name: ddl.create_supervised_trainer(model, optimizer, F.mse_loss) for name in ("with", "without", "again")
    }
    timeline = Timeline().attach(trainers["with"])
    runs = {name: lambda trainer=trainer: trainer.run(batches) for name, trainer in trainers.items()}
    return sides.in_turns(runs, rounds, meet=dist.barrier, after=lambda name: timeline.clear())


if __name__ == "__main__":
    sides.main(__doc__, {"timeline": cost})
