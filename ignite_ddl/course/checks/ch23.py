"""The checks of chapter 23: a rank's place from its launcher's variables, and the bytes between machines."""

from math import isclose, prod

from ignite_ddl.course.exercises import Hint, exercise

_TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
_SRUN = {"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NTASKS": "12", "SLURM_NODEID": "1"}


@exercise
def who_am_i(function):
    """No launcher, torchrun, srun with several forms of a list of machines, and torchrun that srun started."""
    cases = {
        "no launcher": ({"HOME": "here"}, (0, 0, 1, "127.0.0.1")),
        "torchrun": (_TORCHRUN, (5, 1, 8, "10.0.0.7")),
        "srun": (_SRUN | {"SLURM_JOB_NODELIST": "node[1-2]"}, (6, 2, 12, "node1")),
        "srun on three racks": (_SRUN | {"SLURM_JOB_NODELIST": "gpu[07-09,12],login1"}, (6, 2, 12, "gpu07")),
        "srun on two names": (_SRUN | {"SLURM_JOB_NODELIST": "anna,otto[3,5]"}, (6, 2, 12, "anna")),
        "srun on names with a hyphen": (_SRUN | {"SLURM_JOB_NODELIST": "gpu-a[1-2]"}, (6, 2, 12, "gpu-a1")),
        "srun on one machine": (_SRUN | {"SLURM_JOB_NODELIST": "otto[3]"}, (6, 2, 12, "otto3")),
        "torchrun started by srun": (_SRUN | {"SLURM_JOB_NODELIST": "node[1-2]"} | _TORCHRUN, (5, 1, 8, "10.0.0.7")),
    }
    for case, (environ, right) in cases.items():
        found = function(dict(environ))
        if not isinstance(found, tuple) or len(found) != 4:
            raise Hint(f"{case}: return (rank, local rank, world size, address), not {found!r}")
        if any(not isinstance(number, int) for number in found[:3]):
            raise Hint(f"{case}: variables are text, and ranks are whole numbers: {found!r}")
        if case == "torchrun started by srun" and found[:3] != right[:3]:
            raise Hint(
                f"{case}: {found[:3]}, but srun started one torchrun a machine, and that several ranks: torchrun's "
                "variables say who this rank is"
            )
        if found[:3] != right[:3]:
            raise Hint(f"{case}: rank, local rank and world size are {right[:3]}, not {found[:3]}")
        if found[3] != right[3]:
            given = environ.get("SLURM_JOB_NODELIST") if "RANK" not in environ else None
            where = f"the first machine of {given}" if given else "the address"
            raise Hint(f"{case}: {where} is {right[3]}, not {found[3]!r}")
    return "each launcher's ranks, and the machine where rank 0 is"


@exercise(
    cases=(
        ({"dp": 3, "tp": 2}, {"dp": 600, "tp": 1000}, 2),
        ({"dp": 2, "tp": 4}, {"dp": 600, "tp": 1000}, 4),
        ({"tp": 4, "dp": 2}, {"dp": 600, "tp": 1000}, 4),
        ({"dp": 1, "tp": 8}, {"dp": 600, "tp": 800}, 4),
        ({"pp": 2, "dp": 2, "tp": 2}, {"pp": 100, "dp": 600, "tp": 1000}, 2),
        ({"dp": 2, "tp": 2}, {"dp": 600, "tp": 1000}, 4),
    ),
    about=lambda sizes, volume, per_machine: (
        " × ".join(f"{axis} {size}" for axis, size in sizes.items()) + f", {per_machine} ranks a machine"
    ),
    right="every hop of every ring between two machines",
)
def cable_bytes(function, sizes, volume, per_machine):
    """Groups inside, across and partly across machines; several machines; groups of one."""
    found = function(dict(sizes), dict(volume), per_machine)
    right = _cable_bytes(sizes, volume, per_machine)
    if not isinstance(found, int | float):
        raise Hint(f"return a number of bytes, not {found!r}")
    if isclose(found, right):
        return
    if isclose(found, _cable_bytes(sizes, volume, 1)):
        raise Hint(f"{found:g} bytes are all that is sent; a hop inside a machine is not on the cable")
    if isclose(found, _cable_bytes(sizes, volume, per_machine, closed=False)):
        raise Hint(f"{found:g}; a ring is closed, its last rank sends to the first")
    if isclose(2 * found, right):
        raise Hint(f"{found:g}, half of {right:g}: an all-reduce goes round twice")
    raise Hint(f"{right:g} bytes, not {found:g}; count the hops of every group between two machines")


def _cable_bytes(sizes, volume, per_machine, closed=True):
    total, stride = 0.0, prod(sizes.values())
    for axis, n in sizes.items():
        stride //= n
        for rank in range(prod(sizes.values())):
            place = rank // stride % n
            if not closed and place == n - 1:
                continue
            following = rank + ((place + 1) % n - place) * stride
            total += 2 * (n - 1) / n * volume[axis] * (rank // per_machine != following // per_machine)
    return total
