"""The checks of chapter 20: the peers of a rank on an axis, and a count that is known on the last stage."""

from itertools import product

import torch

import ignite_ddl as ddl
from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import try_on_ranks
from ignite_ddl.lab.bytes import count_bytes

WAIT_SECONDS = 60  # what is right takes well under one; a loaded machine may start slowly
ENOUGH = 32  # bytes: two numbers, twice


@exercise
def peers(function):
    """Every rank of several meshes, on every axis, in another order of axes too."""
    meshes = ({"pp": 2, "dp": 2, "tp": 2}, {"tp": 2, "pp": 3, "dp": 4}, {"dp": 3, "tp": 1, "pp": 2})
    for sizes in meshes:
        places = list(product(*map(range, sizes.values())))  # in rank order
        given = " × ".join(f"{axis}{size}" for axis, size in sizes.items())
        for rank, axis in product(range(len(places)), sizes):
            index = list(sizes).index(axis)
            rest = _without(places[rank], index)
            right = [peer for peer, place in enumerate(places) if _without(place, index) == rest]
            found = function(rank, axis, dict(sizes))
            case = f"{given}, rank {rank} on {axis}"
            if not isinstance(found, list | tuple) or sorted(found) != list(found):
                raise Hint(f"{case}: return a list of ranks in ascending order, not {found!r}")
            found = list(found)
            if rank not in found:
                raise Hint(f"{case}: a rank is in its own group, and {found} lacks it")
            if len(found) != sizes[axis]:
                raise Hint(f"{case}: a group has {sizes[axis]} ranks, and {found} has {len(found)}")
            if found != right:
                other = next((p for p in found if not 0 <= p < len(places) or p not in right), rank)
                raise Hint(
                    f"{case}: not {found}; peers differ on {axis} alone, and rank {other} is elsewhere on "
                    "another axis. The last axis of sizes runs fastest"
                )
    return "each group of each axis, in any order of axes"


def _without(place, index):
    return place[:index] + place[index + 1 :]


@exercise(
    cases=(({"dp": 2, "pp": 2, "tp": 2}, [5, 3]), ({"dp": 3, "pp": 2, "tp": 1}, [4, 0, 7])),
    about=lambda axes, rows: "dp{dp} × pp{pp} × tp{tp}".format(**axes),
    right="every row counts once, and every rank knows",
)
def count_once(function, axes, rows):
    """Every rank knows the totals, no row counts twice, and two numbers travel."""
    n_ranks = axes["dp"] * axes["pp"] * axes["tp"]
    right = (sum(n - n // 3 for n in rows), sum(rows))
    ranks = try_on_ranks(n_ranks, _on_a_rank, function, rows, **axes, timeout=WAIT_SECONDS)
    for rank, (found, stage, sent) in enumerate(ranks):
        where = f"rank {rank}, stage {stage} of {axes['pp']}"
        if not isinstance(found, tuple) or len(found) != 2 or None in found:
            raise Hint(f"{where}: return two numbers, correct and rows, not {found!r}")
        if found == (0, 0):
            raise Hint(f"{where}: still nothing; the last stage knows, who tells the others?")
        times = found[1] / right[1]
        if found != right and found == tuple(times * number for number in right) and times == int(times):
            raise Hint(f"{where}: {found} where {right} is right: each row counts {times:.0f} times")
        if found != right:
            raise Hint(f"{where}: {found}, but all rows together are {right[1]}, {right[0]} of them correct")
        if sent > ENOUGH:
            raise Hint(f"{where}: right, but puts in {sent} bytes; two numbers, twice, are {ENOUGH}")


def _on_a_rank(local_rank, function, rows):
    mesh = ddl.get_mesh()
    n = rows[mesh.dp_rank]
    known = (n - n // 3, n) if mesh.pp_rank == mesh.pp_size - 1 else (None, None)
    with count_bytes() as traffic:
        found = function(*known)
    if isinstance(found, torch.Tensor):
        found = found.tolist()
    if isinstance(found, list):
        found = tuple(found)
    if isinstance(found, tuple):
        found = tuple(number.item() if isinstance(number, torch.Tensor) else number for number in found)
    return found, mesh.pp_rank, traffic.put_in
