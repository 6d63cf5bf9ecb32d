"""The parity of tests/parity.py on CUDA, with NCCL: several ranks on one GPU (tests/one_gpu.py).

    python tests/parity_on_gpu.py                  the cases of `make test` on up to 4 ranks
    python tests/parity_on_gpu.py tp2 dropout      those whose line has all these words
    python tests/parity_on_gpu.py --backend gloo   without a GPU: tries this program, not CUDA

Compared is with one process on the
CPU, in float64, as in tests/parity.py. Dropout draws from another generator on CUDA: its cases are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import parity
import torch
from one_gpu import gpu_or_exit, run_ranks
from torch.utils import _pytree as tree

import ignite_ddl as ddl

ALONE, EACH = 60, 15  # seconds that a launch may take, and more for each of its cases
LIMIT = 30  # seconds that a rank waits for another


def cases_of(words: list[str], most: int, everything: bool) -> list[parity.Case]:
    """Those that need no more than ``most`` ranks, and are not about random numbers."""
    cases = parity.all_cases() if everything else [case for case in parity.test_cases() if not case.slow]
    return [
        case
        for case in cases
        if 1 < case.dp * case.pp * case.tp * case.cp <= most
        and "dropout" not in case.model
        and all(word in case.line for word in words)
    ]


def as_rank(folder: Path, backend: str, names: list[str]) -> None:
    """Runs the named cases; the result of each is a file."""
    cases = [next(case for case in parity.all_cases() if repr(case) == name) for name in names]
    dp, pp, tp, replicas, cp, ep = cases[0].mesh
    axes = {"dp": dp, "pp": pp, "tp": tp, "cp": cp, "ep": ep, "dp_replicate": replicas if replicas > 1 else None}
    with ddl.Parallel(backend, timeout=LIMIT, **axes) as parallel:
        parallel.run(run_and_save, folder, cases)


def run_and_save(local_rank: int, folder: Path, cases: list[parity.Case]) -> None:
    for number, case in enumerate(cases):
        [result] = parity.run_on_rank(local_rank, [case])
        if not isinstance(result, str):
            result = tree.tree_map_only(torch.Tensor, torch.Tensor.cpu, vars(result))
        partial = folder / f"{number}.{os.environ['RANK']}.partial"
        torch.save(result, partial)
        partial.rename(partial.with_suffix(".pt"))


def launch(cases: list[parity.Case], backend: str) -> tuple[list[list], str]:
    """The results of the first cases, by case and rank, and what a rank said that failed before the last one."""
    world = cases[0].dp * cases[0].pp * cases[0].tp * cases[0].cp
    with tempfile.TemporaryDirectory() as name:
        folder, done = Path(name), []
        command = [__file__, "--backend", backend, "--as-rank", name, *map(repr, cases)]
        said = run_ranks(world, command, folder, ALONE + EACH * len(cases))
        for number in range(len(cases)):
            files = [folder / f"{number}.{rank}.pt" for rank in range(world)]
            if not all(file.exists() for file in files):
                break
            results = [torch.load(file, weights_only=False) for file in files]
            done.append([result if isinstance(result, str) else parity.Trained(**result) for result in results])
        return done, said


def run(cases: list[parity.Case], backend: str):
    """Outcomes of one mesh; where a case fails, those after it have a new launch."""
    while cases:
        done, said = launch(cases, backend)
        for case, results in zip(cases, done, strict=False):
            yield parity.judge(case, results)
        cases = cases[len(done) :]
        if cases:
            yield parity.Outcome(cases[0], None, f"FAILED: {said}")
            cases = cases[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="*", help="run the cases whose line has all these words")
    parser.add_argument("--backend", default="nccl", choices=["nccl", "gloo"])
    parser.add_argument("--most", type=int, default=4, help="ranks of a case, default 4")
    parser.add_argument("--all", action="store_true", help="the whole table, not only the cases of `make test`")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.as_rank:
        as_rank(options.as_rank, options.backend, options.word)
        return 0
    where = gpu_or_exit(options.backend)
    start, outcomes = time.perf_counter(), []
    for cases in parity.by_mesh(cases_of(options.word, options.most, options.all)).values():
        for outcome in run(cases, options.backend):
            outcomes.append(outcome)
            print(outcome, flush=True)
    compared = [o for o in outcomes if o.errors is not None and not o.case.wrong]
    worst = max((max(o.errors.values()) for o in compared), default=0.0)
    failed = [o for o in outcomes if not o.passed]
    print(
        f"{len(outcomes)} cases on {where}, {options.backend}, torch {torch.__version__}, in "
        f"{time.perf_counter() - start:.0f} s: {len(compared)} compared, worst error {worst:.1e} (allowed "
        f"{parity.TOLERANCE:.0e}); {len(failed)} not as expected"
    )
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
