"""Is the order of measured step times that of the planner? Six meshes of four gloo ranks on this machine:

    python benchmarks/plan_order.py

Measures what four ranks compute when all are at work, and how long their all-reduces take; predicts a step of a small
GPT on each mesh with these numbers (``lab.plan``); then runs each mesh, in turns. For all pairs of meshes whose
predicted times differ by at least ``RATIO``, the medians have to stand in the same order: else it ends with exit code
1. Nothing is repeated. For a quiet machine: it prints the load before and after.

Meshes with tp take twice what is predicted, others 1.5 to 1.9 times. It is not their messages, which are as many and as
large as predicted (18 all-reduces of 256 KiB in a step of 2 × 1 × 2), but DTensor, which dispatches each operation on a
cut weight, in layers and in Adam, in Python: 59 ms of processor time for a rank and step, against 27 ms on 4 × 1 × 1
(2026-11-24, two cores). No coefficient here stands for that; a GPU's kernels hide it while the model is large enough.
"""

import os
import statistics
import time
from itertools import combinations

import torch
import torch.distributed as dist

from ignite_ddl.course import GPT, measure_plan, on_ranks
from ignite_ddl.lab.cost import Link
from ignite_ddl.lab.plan import Cluster, Model, predict

RATIO, ROUNDS, ROWS = 1.5, 5, 16
MODEL = Model(4, 128, 4, 512, 64, True, False, 4, 4, 8, 4, 0)  # float32 and Adam, no dropout
MESHES = {
    "4 × 1 × 1": {"dp": 4, "microbatches": 1},
    "2 × 2 × 1": {"dp": 2, "pp": 2, "microbatches": 4},
    "2 × 1 × 2": {"dp": 2, "tp": 2, "microbatches": 1},
    "1 × 4 × 1": {"pp": 4, "microbatches": 16},
    "1 × 1 × 4": {"tp": 4, "microbatches": 1},
    "1 × 1 × 4, one row at a time": {"tp": 4, "microbatches": 16},
}


def coefficients(local_rank: int) -> tuple[float, float, float]:
    """Of a rank while all compute or send: operations, seconds a message, bytes per second."""
    model = GPT(MODEL.vocabulary, MODEL.sequence, MODEL.width, MODEL.heads, MODEL.layers)
    ids = torch.randint(MODEL.vocabulary, (ROWS // 4, MODEL.sequence))

    def compute():
        model(ids).logsumexp(-1).mean().backward()

    def median(call, n=15):
        times = []
        for _ in range(n + 2):
            dist.barrier()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    flops = 6 * MODEL.parameters * ids.numel() * (1 + MODEL.sequence / 6 / MODEL.width) / median(compute)
    small, large = torch.zeros(4), torch.zeros(2**20)  # 4 MiB
    short, long = (median(lambda one=one: dist.all_reduce(one)) for one in (small, large))
    # A ring of four: six messages, and a quarter of the bytes in each.
    return flops, short / 6, 1.5 * large.nbytes / (long - short)


def main() -> int:
    print(f"load before: {os.getloadavg()[0]:.1f}")
    flops, latency, bandwidth = map(statistics.median, zip(*on_ranks(4, coefficients), strict=True))
    print(f"a rank: {flops:.2g} operations/s, {1e6 * latency:.0f} us a message, {bandwidth:.2g} bytes/s")
    link = Link(latency, bandwidth)
    here = Cluster(4, memory=1e9, flops=flops, inside=link, between=link)
    plans = {name: predict(MODEL, here, ROWS, recompute="selective", **how) for name, how in MESHES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(ROUNDS):
        for name, one in plans.items():
            seconds[name].append(measure_plan(one)["seconds"])
    predicted = {name: sum(one.seconds.values()) for name, one in plans.items()}
    measured = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"{'dp × pp × tp':<30}{'predicted':>12}{'measured':>12}   ms; of {ROUNDS} rounds the least and the most")
    for name in sorted(predicted, key=predicted.get):
        low, high = 1000 * min(seconds[name]), 1000 * max(seconds[name])
        print(f"{name:<30}{1000 * predicted[name]:>12.1f}{1000 * measured[name]:>12.1f}   {low:.1f} to {high:.1f}")
    far = [
        (a, b) for a, b in combinations(sorted(predicted, key=predicted.get), 2) if predicted[b] >= RATIO * predicted[a]
    ]
    wrong = [(a, b) for a, b in far if measured[b] <= measured[a]]
    n_pairs = len(plans) * (len(plans) - 1) // 2
    print(f"{len(far)} of {n_pairs} pairs are predicted {RATIO} apart, {len(wrong)} in another order")
    for a, b in wrong:
        print(f"    {b} was faster than {a}")
    print(f"load after: {os.getloadavg()[0]:.1f}")
    return 1 if wrong or not far else 0


if __name__ == "__main__":
    raise SystemExit(main())
