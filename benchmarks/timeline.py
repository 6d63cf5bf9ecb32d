"""What ``ddl.Timeline`` itself costs: a data-parallel step of about 5 ms, with and without it.

    python benchmarks/timeline.py [--ranks 2] [--rounds 24] [--steps 25]

Rounds with and without a timeline alternate on the same ranks, so that both meet the same machine; compared are
medians over all steps. The bound, 2 % of a 5 ms step, is on processor time of all threads of a rank, which other
programs on the machine disturb least; wall time stands beside it. What a run pays once, to start and to end
recording, is given apart.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from ignite.engine import Events
from torch.nn.parallel import DistributedDataParallel

import ignite_ddl as ddl

STEP = 5e-3  # seconds
BOUND = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=25, help="steps in a round")
    options = parser.parse_args()
    with ddl.Parallel(backend="gloo", nproc_per_node=options.ranks, threads_per_rank=1) as parallel:
        results = parallel.run(measure, options.rounds, options.steps)
    shares = []
    print("       median step, wall      median step, processor   a timeline adds")
    print("rank   without       with     without         with     µs      of 5 ms     once a run")
    for rank, (without, with_it, once) in enumerate(results):
        (wall, processor), (wall_with, processor_with) = (
            [statistics.median(step[part] for step in steps) for part in (0, 1)]
            for steps in (without, with_it)
        )
        added = processor_with - processor
        shares.append(added / STEP)
        print(
            f"{rank:4}{wall * 1e3:7.2f} ms{wall_with * 1e3:8.2f} ms{processor * 1e3:9.2f} ms"
            f"{processor_with * 1e3:10.2f} ms{added * 1e6:7.0f}{shares[-1]:13.2%}{once * 1e3:12.1f} ms"
        )
    share = statistics.mean(shares)
    print(f"overhead {share:.2%} of a 5 ms step; bound {BOUND:.0%}: {'kept' if share <= BOUND else 'MISSED'}")
    return share > BOUND


def measure(local_rank: int, rounds: int, steps: int) -> tuple[list, list, float]:
    """Seconds of each step, (wall, processor), without and with a timeline; and of starting and ending."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(192, 256), torch.randn(192, 256)
    timeline, once, found = ddl.Timeline(), [], ([], [])
    trainers = [ddl.create_supervised_trainer(model, optimizer, F.mse_loss) for _ in found]
    timeline.attach(trainers[1])
    for number, trainer in enumerate(trainers):
        trainer.add_event_handler(
            Events.ITERATION_STARTED,
            lambda number=number: clock.append((time.perf_counter(), time.process_time())),
        )
    for turn in range(rounds):
        for trainer, steps_found in zip(trainers, found, strict=True):
            clock = []
            trainer.run([batch] * steps)
            if turn:  # the first round warms up
                steps_found += [
                    (after[0] - before[0], after[1] - before[1])
                    for before, after in zip(clock, clock[1:], strict=False)
                ]
        timeline.clear()
        start = time.process_time()
        with timeline:
            pass
        once.append(time.process_time() - start)
    return *found, statistics.median(once)


if __name__ == "__main__":
    sys.exit(main())
