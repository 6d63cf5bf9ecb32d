"""What ``Timeline`` itself costs: a data-parallel step of about 5 ms, with and without it.

    python benchmarks/timeline.py [--ranks 2] [--rounds 24] [--steps 25]

Rounds without a timeline, without it once more, and with it alternate on the same ranks, so that all meet the same
machine; compared are medians over all steps. The bound, 2 % of a 5 ms step, is on processor time of all threads of
a rank, which other programs on the machine disturb least; wall time stands beside it. The second "without" is the
control: what it differs from the first is noise. What a run pays once, to start and to end recording, is apart.
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
from ignite_ddl.lab import Timeline

STEP = 5e-3  # seconds
BOUND = 0.02
ARMS = ("without", "control", "with")


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
    print(
        "median ms of a step   wall: "
        + "  ".join(ARMS)
        + "   processor: "
        + "  ".join(ARMS)
        + "   once a run"
    )
    for rank, (wall, processor, once) in enumerate(results):
        columns = "".join(f"{1e3 * wall[arm]:9.2f}" for arm in ARMS) + " " * 11
        columns += "".join(f"{1e3 * processor[arm]:9.2f}" for arm in ARMS)
        print(f"rank {rank}{' ' * 18}{columns}{1e3 * once:13.2f}")
    share = {
        arm: statistics.mean(processor[arm] - processor["without"] for _, processor, _ in results) / STEP
        for arm in ("with", "control")
    }
    verdict = "kept" if share["with"] <= BOUND else "MISSED"
    print(
        f"a timeline adds {share['with']:.2%} of a 5 ms step (the control {share['control']:+.2%}); ", end=""
    )
    print(f"bound {BOUND:.0%}: {verdict}")
    return share["with"] > BOUND


def measure(local_rank: int, rounds: int, steps: int) -> tuple[dict, dict, float]:
    """Median seconds of a step for each arm, by the wall and by the processor; and of starting and ending."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(192, 256), torch.randn(192, 256)
    trainers = {arm: ddl.create_supervised_trainer(model, optimizer, F.mse_loss) for arm in ARMS}
    timeline, clock = Timeline().attach(trainers["with"]), []
    for trainer in trainers.values():
        trainer.add_event_handler(
            Events.ITERATION_STARTED, lambda: clock.append((time.perf_counter(), time.process_time()))
        )
    wall, processor, once = ({arm: [] for arm in ARMS} for _ in range(3))
    for turn in range(rounds):
        for arm in ARMS[turn % 3 :] + ARMS[: turn % 3]:
            clock.clear()
            trainers[arm].run([batch] * steps)
            if turn:  # the first round warms up
                wall[arm] += [after[0] - before[0] for before, after in zip(clock, clock[1:], strict=False)]
                processor[arm] += [
                    after[1] - before[1] for before, after in zip(clock, clock[1:], strict=False)
                ]
        timeline.clear()
        start = time.process_time()
        with timeline:
            pass
        once["with"].append(time.process_time() - start)
    medians = ({arm: statistics.median(found) for arm, found in each.items()} for each in (wall, processor))
    return *medians, statistics.median(once["with"])


if __name__ == "__main__":
    sys.exit(main())
