"""How long a warm second launch of 4 ranks takes, from ``run`` to results, beside other ways to start ranks.

Each way launches the same function, in turns. Launches through ddl and notebook_launcher keep what they have
imported; ``idist.spawn`` starts Python anew each time, which is its default outside IPython. "heavy" ranks also
cut a layer with DTensor and make a pipeline schedule, as a chapter does.

    python benchmarks/launch.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ignite.distributed as idist
import torch

import ignite_ddl as ddl

RANKS, TARGET_SECONDS, TARGET_TIMES = 4, 0.15, 25


def light(local_rank):
    return idist.all_reduce(idist.get_rank())


def heavy(local_rank):
    """What is imported and set up by a rank that uses DTensor and pipelining; the sum proves that ranks met."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    total = idist.all_reduce(idist.get_rank())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    layer = parallelize_module(torch.nn.Linear(8, 8), mesh["tp"], ColwiseParallel())
    assert layer.weight.to_local().shape == (4, 8)
    pp = mesh.get_group("pp")
    stage = PipelineStage(torch.nn.Linear(8, 8), mesh.get_local_rank("pp"), 2, torch.device("cpu"), group=pp)
    ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    return total


def through_ddl(func):
    return ddl.Parallel("gloo", RANKS, timeout=60).run(func)


def through_spawn(func):
    port = 2300 + int(time.monotonic() * 10) % 20000
    idist.spawn("gloo", func, args=(), nproc_per_node=RANKS, start_method="spawn", master_port=port)


def timed(way, func, rounds):
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        way(func)
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1:]


def notebook_launcher(rounds):
    """In a process of its own that has computed nothing: it forks, which is safe only there."""
    script = textwrap.dedent(
        f"""
        import json, sys, time
        sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
        from accelerate import notebook_launcher
        import launch
        found = {{}}
        for func in (launch.light, launch.heavy):
            seconds = []
            for index in range({rounds + 1}):
                start = time.perf_counter()
                notebook_launcher(launch.join, (func.__name__,), num_processes={RANKS}, use_port=str(29600 + index))
                seconds.append(time.perf_counter() - start)
            found[func.__name__] = seconds
        print("\\nRESULT " + json.dumps(found))
        """
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, timeout=600
        )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    raise RuntimeError(done.stderr[-2000:])


def join(name):
    """A rank of notebook_launcher, which sets the environment and leaves the process group to its function."""
    torch.distributed.init_process_group("gloo")
    idist.sync()
    return globals()[name](0)


def measure(rounds):
    found = {}
    for func in (light, heavy):
        assert through_ddl(func) == [6] * RANKS
        found["ddl.Parallel", func.__name__] = timed(through_ddl, func, rounds)
        found["idist.spawn", func.__name__] = timed(through_spawn, func, max(1, rounds // 3))
    if importlib.util.find_spec("accelerate") is None:
        print("skipped: accelerate's notebook_launcher (accelerate is not installed)")
    else:
        for name, seconds in notebook_launcher(rounds).items():
            found["notebook_launcher", name] = seconds[0], seconds[1:]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    found = measure(parser.parse_args().rounds)
    own = {name: statistics.median(found["ddl.Parallel", name][1]) for name in ("light", "heavy")}
    print(
        f"{RANKS} ranks, from call to results {'ranks':>8} {'repeat':>10} {'fastest':>10} {'times ddl':>10}"
    )
    lines = []
    for (way, name), (_, repeats) in found.items():
        median, times = statistics.median(repeats), statistics.median(repeats) / own[name]
        print(f"{way:30} {name:>8} {median:8.3f} s {min(repeats):8.3f} s {times:10.1f}")
        lines.append(
            {"benchmark": "launch", "way": way, "ranks": RANKS, "kind": name, "seconds": median,
             "fastest": min(repeats), "times_ddl": times, "repeats": len(repeats), "torch": torch.__version__}
        )  # fmt: skip
    ratio = next(
        line["times_ddl"] for line in lines if (line["way"], line["kind"]) == ("idist.spawn", "light")
    )
    print(
        f"target: {TARGET_SECONDS} s and {TARGET_TIMES} times faster than idist.spawn; here {own['light']:.3f} s "
        f"({own['heavy']:.3f} s heavy) and {ratio:.0f} times"
    )
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
