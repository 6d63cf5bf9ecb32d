"""Natural mistakes in chapter 23's exercises."""

import re
from itertools import product
from math import prod


def who(environ, torchrun_first=True, number=int, first=None):
    slurm = "SLURM_PROCID" in environ
    if "RANK" in environ and (torchrun_first or not slurm):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        return *(number(environ[name]) for name in names), environ["MASTER_ADDR"]
    if slurm:
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
        hosts = environ["SLURM_JOB_NODELIST"]
        return *(number(environ[name]) for name in names), (first or first_host)(hosts)
    return 0, 0, 1, "127.0.0.1"


def first_host(hosts):
    return re.sub(r"\[(\w+).*", r"\1", hosts).split(",")[0]


def nobody(environ):
    return who({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"} | environ)


def local_is_rank(environ):
    rank, _, *rest = who(environ)
    return rank, rank, *rest


def on_the_cable(sizes, volume, per_machine, passes=2, closed=True, inside=False):
    total, axes = 0, list(sizes)
    places = list(product(*map(range, sizes.values())))
    for axis, (index, place) in product(range(len(axes)), enumerate(places)):
        n = sizes[axes[axis]]
        if place[axis] == n - 1 and not closed:
            continue
        peer = places.index((*place[:axis], (place[axis] + 1) % n, *place[axis + 1 :]))
        if inside or index // per_machine != peer // per_machine:
            total += passes * (n - 1) / n * volume[axes[axis]]
    return total


def one_group(sizes, volume, per_machine):
    return on_the_cable(sizes, volume, per_machine) / prod(sizes.values())


RIGHT = {"who_am_i": [who], "cable_bytes": [on_the_cable]}
MISTAKES = {
    "who_am_i": {
        "no launcher: return (rank, local rank, world size, address), not 0": lambda environ: 0,
        "torchrun: variables are text, and ranks are whole numbers": lambda environ: who(environ, number=str),
        "torchrun started by srun: (6, 2, 12), but srun": lambda environ: who(environ, torchrun_first=False),
        "torchrun: rank, local rank and world size are (5, 1, 8), not (5, 5, 8)": local_is_rank,
        "no launcher: the address is 127.0.0.1, not 'localhost'": nobody,
        "the first machine of gpu[07-09,12],login1 is gpu07, not 'gpu7'": lambda environ: who(
            environ, first=lambda hosts: re.sub("0", "", first_host(hosts))
        ),
    },
    "cable_bytes": {
        "dp 3 × tp 2, 2 ranks a machine: return a number of bytes, not None": lambda *args: None,
        "bytes are all that is sent; a hop inside": lambda *args: on_the_cable(*args, inside=True),
        "a ring is closed, its last rank sends": lambda *args: on_the_cable(*args, closed=False),
        "an all-reduce goes round twice": lambda *args: on_the_cable(*args, passes=1),
        "count the hops of every group between two machines": one_group,
    },
}
