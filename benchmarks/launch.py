"""How long launches take, from the call to the results, through ddl and in other ways: 1 to 32 ranks.

Each way launches the same function. Launches through ddl, which are second ones, and notebook_launcher keep what they
have imported; ``idist.spawn`` (outside IPython), torchrun and ipyparallel's engines start Python anew. An ipyparallel
cluster that is already up runs the function again without starting anything: a row of its own. "heavy" ranks also cut
a layer with DTensor and make a pipeline schedule, as a chapter does. The other ways are measured at 1, 4 and 32 ranks:
of 32 Python starts on two cores, each takes more than a minute.

    python benchmarks/launch.py [--only "4 ranks"] [--quick]
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ignite.distributed as idist
import sides
import torch
import torch.distributed as dist

import ignite_ddl as ddl

TARGET = 1 / 25  # of idist.spawn, 4 ranks


def light(local_rank):
    return idist.all_reduce(idist.get_rank())


def heavy(local_rank):
    """What is imported and set up by a rank that uses DTensor and pipelining; the sum proves that ranks met."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    total = idist.all_reduce(idist.get_rank())
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    layer = parallelize_module(torch.nn.Linear(8, 8), mesh["tp"], ColwiseParallel())
    assert layer.weight.to_local().shape == (4, 8)
    pp = mesh.get_group("pp")
    stage = PipelineStage(torch.nn.Linear(8, 8), mesh.get_local_rank("pp"), 2, torch.device("cpu"), group=pp)
    ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    return total


def a_port():
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


# ------------------------------------------------------------------------------------------------------- the ways


def through_ddl(func, ranks):
    ddl.Parallel("gloo", ranks, timeout=120).run(func)


def through_spawn(func, ranks):
    idist.spawn("gloo", func, args=(), nproc_per_node=ranks, start_method="spawn", master_port=a_port())


def through_torchrun(func, ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [__file__, "--join", func.__name__]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def through_notebook_launcher(func, ranks):
    """In a process of its own that has computed nothing: it forks, which is safe only there."""
    process = _forking()
    # Forks of processes with threads can hang.
    limit = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    print(func.__name__, ranks, file=process.stdin, flush=True)
    done = "done\n" in iter(process.stdout.readline, "")
    limit.cancel()
    if not done:
        _forking.cache_clear()
        raise RuntimeError("accelerate's notebook_launcher failed, or did not end within 60 s")


@functools.cache
def _forking():
    command = [sys.executable, __file__, "--fork"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, start_new_session=True)


def _fork():
    from accelerate import notebook_launcher

    for line in sys.stdin:
        name, ranks = line.split()
        notebook_launcher(_join, (name,), num_processes=int(ranks), use_port=str(a_port()))
        print("done", flush=True)


def _join(name):
    """A rank that finds torchrun's environment, which torchrun and notebook_launcher set."""
    dist.init_process_group("gloo")
    idist.sync()
    globals()[name](0)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------ measuring


def compare(way, ranks, func, quick):
    """ddl and another way in turns; what starts Python anew has fewer rounds, and nothing to warm up."""
    forks = way is through_notebook_launcher
    ways = {"ddl": through_ddl, "other": way} | ({"again": way} if forks else {})
    calls = {name: functools.partial(each, func, ranks) for name, each in ways.items()}
    calls["ddl"]()
    rounds = 1 if quick else 5 if forks else 3 if ranks <= 4 else 1
    seconds, _ = sides.in_turns(calls, rounds, warm_up=forks)
    target = TARGET if (way, ranks, func) == (through_spawn, 4, light) else None
    again = seconds.get("again", ())
    return [sides.row(name(ranks, func), WAYS[way], seconds["ddl"], seconds["other"], again=again, target=target)]


def against_ipyparallel(ranks, quick):
    """A cluster from nothing to the results, and a second call while it is up; its end is not counted."""
    import ipyparallel

    def light_on_engine(rank, ranks, path):
        import ignite.distributed as idist
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{path}")
            idist.sync()
        return idist.all_reduce(idist.get_rank())

    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = folder
        arguments = range(ranks), [ranks] * ranks, [f"{folder}/store"] * ranks
        through_ddl(light, ranks)
        start = time.perf_counter()
        cluster = ipyparallel.Cluster(n=ranks, log_level=40)
        try:
            client = cluster.start_and_connect_sync(activate=False)

            def call():
                assert client[:].map_sync(light_on_engine, *arguments) == [sum(range(ranks))] * ranks

            call()
            first = time.perf_counter() - start
            own = functools.partial(through_ddl, light, ranks)
            seconds, _ = sides.in_turns({"ddl": own, "up": call, "again": call}, 1 if quick else 5)
            client.close()
        finally:
            cluster.stop_cluster_sync()
    up = "ipyparallel's engines, already up: no process starts"
    return [
        sides.row(name(ranks, light), "ipyparallel", seconds["ddl"][:1], [first]),
        sides.row(name(ranks, light), up, seconds["ddl"], seconds["up"], again=seconds["again"]),
    ]


def growth(quick):
    """ddl's launches of all sizes in turns."""
    calls = {ranks: functools.partial(through_ddl, light, ranks) for ranks in RANKS}
    seconds, _ = sides.in_turns(calls, 1 if quick else 5)
    return [sides.row(name(ranks, light), name(1, light), seconds[ranks], seconds[1]) for ranks in RANKS[1:]]


def name(ranks, func):
    return f"ddl.Parallel, {ranks} rank{'s' * (ranks > 1)}" + ", heavy" * (func is heavy)


RANKS = (1, 2, 4, 8, 16, 32)
COMPARED = (1, 4, 32)
WAYS = {
    through_notebook_launcher: "accelerate's notebook_launcher",
    through_spawn: "idist.spawn",
    through_torchrun: "torchrun",
}


def parts():
    found = {"growth": growth}
    for ranks in COMPARED:
        for way, words in WAYS.items():
            if ranks > 1 or way is not through_notebook_launcher:  # which starts no process for one rank
                found[f"{ranks} ranks, {words}"] = functools.partial(compare, way, ranks, light)
        found[f"{ranks} ranks, ipyparallel"] = functools.partial(against_ipyparallel, ranks)
    for way in (through_notebook_launcher, through_spawn):
        found[f"4 ranks, heavy, {WAYS[way]}"] = functools.partial(compare, way, 4, heavy)
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--fork"]:
        _fork()
    elif sys.argv[1:2] == ["--join"]:
        _join(sys.argv[2])
    else:
        sides.main(__doc__, parts())
