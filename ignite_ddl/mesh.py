"""The world as a grid of four axes: dp (rows) × pp (pipeline stages) × cp (tokens of a sequence) × tp (tensors).

Ranks are numbered along tp first, then cp, dp and pp: tp peers, which communicate most, have neighbouring ranks, and
share a machine if machines are filled in rank order. dp may be a grid of its own, dp_replicate × dp_shard (HSDP): the
dp_shard peers, which are neighbours, share the weights of one replica of the model.

Two words: *dp* shares rows; *dp_cp*, which is dp × cp, shares tokens and everything that is summed over them: losses
and what they divide by, gradients, metrics, and FSDP2's weights. cp peers have the same rows.

With ep, dp_cp is read a second time, as edp × ep: ep neighbours share the experts of a layer, each with some of them
(:class:`ddl.Experts <ignite_ddl.experts.style.Experts>`); the edp ranks hold copies, or with ``shard=True`` parts, of
the same experts. ep is no axis of the grid: it adds no ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ignite.distributed as idist
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ignite_ddl.arguments import COUNT, Fits, check, one_of, takes, whole
from ignite_ddl.compat import flattened, quiet_warnings, use_world_timeout

AXES = ("pp", "dp", "tp")  # outermost first
GRID = ("pp", "dp", "cp", "tp")  # as ranks are numbered
DP_AXES = ("dp_replicate", "dp_shard")  # what dp consists of, if they are given
AXIS = Fits("a positive integer, or -1 for what is left", (COUNT | one_of(-1)).read)


def check_mesh(
    world_size: int,
    dp: int | None = None,
    pp: int = 1,
    tp: int = 1,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    cp: int = 1,
) -> dict[str, int]:
    """Fills in what is not given or -1 and checks that the axes fill the world.

    Args:
        world_size: number of ranks.
        dp: size of the data-parallel axis. Default: dp_replicate × dp_shard, or whatever pp and tp leave.
        pp: number of pipeline ranks, default 1.
        tp: number of ranks that share each layer, default 1.
        dp_replicate: number of replicas of the model over dp. Default: what dp_shard leaves of dp.
        dp_shard: number of dp ranks that share the weights of a replica. Default: what dp_replicate leaves of dp.
        cp: number of ranks that share each sequence, default 1.

    Returns:
        dict: the sizes of pp, dp and tp; of dp_replicate and dp_shard, if one of them is given; of cp, if it is not 1.

    Raises:
        ValueError: if a size is not a positive integer, more than one is -1, or they do not fill the world.

    Examples:
        .. code-block:: python

            from ignite_ddl.mesh import check_mesh

            assert check_mesh(8, pp=2, tp=2) == {"pp": 2, "dp": 2, "tp": 2}
            sizes = {"pp": 1, "dp": 4, "tp": 2, "dp_replicate": 2, "dp_shard": 2}
            assert check_mesh(8, tp=2, dp_replicate=2) == check_mesh(8, tp=2, dp_replicate=2, dp_shard=2) == sizes
    """
    given = {"pp": pp, "dp": dp, "tp": tp, "dp_replicate": dp_replicate, "dp_shard": dp_shard}
    may_be_left_out = ("dp", *DP_AXES)
    given = {
        name: check(name, size, AXIS) for name, size in given.items() if size is not None or name not in may_be_left_out
    }
    other = 1 if -1 in (dp_replicate, dp_shard) else -1
    parts = {name: given.get(name, other) for name in DP_AXES if not given.keys().isdisjoint(DP_AXES)}
    cp = check("cp", cp, AXIS)
    of_sequence = {"cp": cp} if cp != 1 else {}
    if not parts or "dp" in given:
        wanted = {axis: given.get(axis, -1) for axis in AXES} | of_sequence
        sizes = _filled(wanted, world_size, "the number of ranks")
        return sizes | (_filled(parts, sizes["dp"], "dp") if parts else {})
    sizes = _filled({"pp": pp, **parts, "tp": tp} | of_sequence, world_size, "the number of ranks")
    return {"pp": sizes["pp"], "dp": sizes["dp_replicate"] * sizes["dp_shard"]} | sizes


def _filled(sizes: dict[str, int], total: int, name: str) -> dict[str, int]:
    """The sizes, whose product should be ``total``, with the one that is -1 filled in."""
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"{' and '.join(free)} are -1, but only one axis can take what is left")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    given = ", ".join(f"{axis}={sizes[axis]}" for axis in sorted(sizes))
    alone = "; nproc_per_node says how many ranks to start" if total == 1 and name != "dp" else ""
    if free and total % fixed:
        raise ValueError(
            f"{free[0]}=-1 should take what is left of {f'{total} ranks' if name != 'dp' else f'dp={total}'}, but "
            f"given {given}: {fixed} does not divide {total}{alone}"
        )
    if not free and fixed != total:
        product = " × ".join(sorted(sizes))
        raise ValueError(f"{product} should be {name}, {total}, but given {given}: {fixed}{alone}")
    return sizes | dict.fromkeys(free, total // fixed)


def check_experts(sizes: Mapping[str, int], ep: int) -> int:
    """Checks that ep neighbours can share experts on a mesh of these sizes, and returns ep.

    Raises:
        ValueError: if ep is not a positive divisor of dp × cp, or dp is dp_replicate × dp_shard.
    """
    tokens, hybrid = sizes["dp"] * sizes.get("cp", 1), sizes.get("dp_shard", 1) not in (1, sizes["dp"])
    if tokens % check("ep", ep, COUNT):
        raise ValueError(f"ep should divide dp × cp, {tokens}, whose ranks share the experts, but given {ep}")
    if ep > 1 and hybrid:
        raise ValueError("ep cannot be combined with dp_replicate × dp_shard: leave these out, and say shard=True")
    return ep


def sizes_without_world(
    dp: int | None, pp: int, tp: int, dp_replicate: int | None = None, dp_shard: int | None = None, cp: int = 1
) -> dict[str, int]:
    """:func:`check_mesh` without a world, whose size is the product of the axes."""
    dp = dp or (dp_replicate or 1) * (dp_shard or 1)
    return check_mesh(dp * pp * cp * tp, dp, pp, tp, dp_replicate, dp_shard, cp)


class _fact(functools.cached_property):
    """A property that is computed once: each step asks for some of them many times."""

    def __init__(self, function: Callable[[Mesh], Any], doc: str) -> None:
        super().__init__(function)
        self.__doc__ = doc


@dataclass(frozen=True, eq=False, repr=False)
class Mesh:
    """The position of this rank in the grid, and the process group of each axis.

    Made by :func:`initialize_mesh` or ``ddl.Parallel(..., dp=, pp=, tp=)`` and read by :func:`get_mesh`.

    Attributes:
        sizes: the sizes of pp, dp and tp, by name, and of cp, if it is not 1.
        rank: this process's global rank.
        device_mesh: torch's ``DeviceMesh`` with the axes "pp", "dp", "tp"; None on a serial run. With HSDP, it has
            "dp_replicate" and "dp_shard" instead of "dp", which torch then knows as these two flattened. Its "dp" is
            dp × cp, and its "dp_shard" is dp_shard × cp.
        groups: the process group of each axis through this rank; None on a serial run.
        dp_shard_size: number of dp ranks that share the weights of a replica; None where neither dp_replicate nor
            dp_shard was given, so that ``shard`` of :func:`auto_model` decides.
        ep_size: number of neighbours on dp × cp that share the experts of a layer.
        expert_mesh: torch's ``DeviceMesh`` with the axes "pp", "edp", "ep", "tp"; None where ep is 1.
    """

    sizes: Mapping[str, int]
    rank: int
    device_mesh: DeviceMesh | None
    groups: Mapping[str, dist.ProcessGroup | None]
    dp_shard_size: int | None = None
    ep_size: int = 1
    expert_mesh: DeviceMesh | None = None

    dp_size = _fact(lambda self: self.sizes["dp"], doc="Number of ranks that share the rows of a batch.")
    cp_size = _fact(lambda self: self.sizes.get("cp", 1), doc="Number of ranks that share each sequence.")
    dp_cp_size = _fact(lambda self: self.dp_size * self.cp_size, doc="Number of ranks that share a batch's tokens.")
    pp_size = _fact(lambda self: self.sizes["pp"], doc="Number of pipeline ranks.")
    tp_size = _fact(lambda self: self.sizes["tp"], doc="Number of ranks that share each layer.")
    world_size = _fact(lambda self: math.prod(self.sizes.values()), doc="Number of ranks.")
    dp_rank = _fact(lambda self: self.coordinates(self.rank)["dp"], doc="This rank's position on dp.")
    cp_rank = _fact(lambda self: self.coordinates(self.rank).get("cp", 0), doc="This rank's position on cp.")
    dp_cp_rank = _fact(lambda self: self.dp_rank * self.cp_size + self.cp_rank, doc="Its position on dp × cp.")
    pp_rank = _fact(lambda self: self.coordinates(self.rank)["pp"], doc="This rank's position on pp.")
    tp_rank = _fact(lambda self: self.coordinates(self.rank)["tp"], doc="This rank's position on tp.")
    dp_group = _fact(lambda self: self.groups["dp"], doc="Process group of dp peers; None on a serial run.")
    cp_group = _fact(lambda self: self.groups.get("cp"), doc="Process group of cp peers; None without a cp axis.")
    dp_cp_group = _fact(lambda self: self.groups.get("dp_cp", self.groups["dp"]), doc="Process group of dp × cp.")
    pp_group = _fact(lambda self: self.groups["pp"], doc="Process group of pp peers; None on a serial run.")
    tp_group = _fact(lambda self: self.groups["tp"], doc="Process group of tp peers; None on a serial run.")
    ep_rank = _fact(lambda self: self.dp_cp_rank % self.ep_size, doc="This rank's position among its ep peers.")
    ep_group = _fact(lambda self: self.groups.get("ep"), doc="Process group of ep peers; None where ep is 1.")

    @property
    def hybrid(self) -> bool:
        """Whether weights are both replicated and sharded over dp (HSDP)."""
        return self.dp_shard_size not in (None, 1, self.dp_size)

    @property
    def round_axis(self) -> str:
        """The axis over which rounds of local steps average weights: dp_replicate where FSDP2 shards inside it."""
        return "dp_replicate" if self.hybrid else "dp"

    @property
    def replica(self) -> int:
        """This rank's position on :attr:`round_axis`."""
        return self.dp_rank // self.dp_shard_size if self.hybrid else self.dp_rank

    @property
    def dp_cp_ranks(self) -> list[int]:
        """The global ranks of :attr:`dp_cp_group`, in its order."""
        position = self.coordinates(self.rank)
        places = itertools.product(range(self.dp_size), range(self.cp_size))
        return [self.rank_at(position["pp"], dp, position["tp"], cp) for dp, cp in places]

    @property
    def dp_mesh(self) -> DeviceMesh:
        """torch's mesh for FSDP2: dp × cp, or dp_replicate × (dp_shard × cp)."""
        return self.device_mesh[DP_AXES if self.hybrid else "dp"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a global rank on each axis."""
        rank = check("rank", rank, whole(0, self.world_size - 1))
        rest, tp = divmod(rank, self.tp_size)
        rest, cp = divmod(rest, self.cp_size)
        pp, dp = divmod(rest, self.dp_size)
        return {"pp": pp, "dp": dp, "tp": tp} | ({"cp": cp} if self.cp_size > 1 else {})

    def rank_at(self, pp: int = 0, dp: int = 0, tp: int = 0, cp: int = 0) -> int:
        """The global rank at a position of the grid."""
        at = {"pp": pp, "dp": dp, "tp": tp, "cp": cp}
        pp, dp, tp, cp = (check(axis, i, whole(0, self.sizes.get(axis, 1) - 1)) for axis, i in at.items())
        return ((pp * self.dp_size + dp) * self.cp_size + cp) * self.tp_size + tp

    def __repr__(self) -> str:
        shard = "" if self.dp_shard_size is None else f", dp_shard={self.dp_shard_size}"
        cp = "" if self.cp_size == 1 else f", cp={self.cp_size}"
        ep = "" if self.ep_size == 1 else f", ep={self.ep_size}"
        return f"Mesh(dp={self.dp_size}{shard}, pp={self.pp_size}{cp}, tp={self.tp_size}{ep}, rank={self.rank})"

    def __str__(self) -> str:
        """The grid: a row for each position on pp, dp and cp, with tp peers side by side and this rank in brackets."""
        shard = self.dp_shard_size
        of_dp = f" (dp_replicate={self.dp_size // shard} × dp_shard={shard})" if self.hybrid else ""
        of_cp = "" if self.cp_size == 1 else f" × cp={self.cp_size}"
        of_ep = "" if self.ep_size == 1 else f", experts over ep={self.ep_size} of dp{' × cp' * bool(of_cp)}"
        axes = f"mesh dp={self.dp_size}{of_dp} × pp={self.pp_size}{of_cp} × tp={self.tp_size}"
        lines = [f"{axes}, {self.world_size} ranks{of_ep}"]
        sizes = (self.pp_size, self.dp_size, self.cp_size)
        for pp, dp, cp in itertools.product(*map(range, sizes)):
            ranks = [self.rank_at(pp, dp, tp, cp) for tp in range(self.tp_size)]
            cells = [f"[{rank}]" if rank == self.rank else f" {rank} " for rank in ranks]
            at = f"  pp {pp}  dp {dp}" + (f"  cp {cp}" if self.cp_size > 1 else "")
            tp = f"  tp 0…{self.tp_size - 1}" if self.tp_size > 1 else ""
            lines.append(f"{at}{tp}: {' '.join(cells)}")
        return "\n".join(lines)


_mesh: Mesh | None = None
_made_for: dist.ProcessGroup | None = None  # the mesh's world: a new job needs a new mesh
_said = False  # whether its axes were given: only a mesh that is data parallel by default is replaced in its job


@takes()
def initialize_mesh(
    dp: int | None = None,
    pp: int = 1,
    tp: int = 1,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    cp: int = 1,
    ep: int = 1,
) -> Mesh:
    """Makes the mesh dp × pp × cp × tp of the running job; every rank calls it once, with the same numbers.

    ``ddl.Parallel(..., dp=, pp=, tp=)`` calls it. Call it yourself if something else started the job
    (``idist.initialize``, Lightning, a cluster's own launcher).

    Args:
        dp: size of the data-parallel axis. Default: dp_replicate × dp_shard, or whatever pp and tp leave.
        pp: number of pipeline ranks, default 1.
        tp: number of ranks that share each layer, default 1.
        dp_replicate: number of replicas of the model over dp, as in ``ddl.Parallel``.
        dp_shard: number of dp ranks that share the weights of a replica, as in ``ddl.Parallel``.
        cp: number of ranks that share each sequence, default 1.
        ep: number of ranks that share the experts of a layer, a divisor of dp × cp, default 1.

    Returns:
        Mesh: the mesh, which :func:`get_mesh` returns from now on.

    Raises:
        ValueError: if the axes do not fill the world, ep does not divide dp × cp, or the job has a mesh of other axes.

    Examples:
        .. code-block:: python

            import ignite.distributed as idist
            import ignite_ddl as ddl

            def who(local_rank):
                mesh = ddl.initialize_mesh(dp=2, tp=2)
                return mesh.dp_rank, mesh.tp_rank

            with ddl.Parallel(backend="gloo", nproc_per_node=4) as parallel:
                assert parallel.run(who) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    global _mesh, _made_for, _said
    sizes = check_mesh(idist.get_world_size(), dp, pp, tp, dp_replicate, dp_shard, cp)
    check_experts(sizes, ep)
    said = (dp, pp, tp, dp_replicate, dp_shard, cp, ep) != (None, 1, 1, None, None, 1, 1)
    shard = sizes.pop("dp_shard", None)
    replicas = sizes.pop("dp_replicate", 1)
    if not dist.is_initialized():
        _mesh, _made_for = Mesh(sizes, 0, None, dict.fromkeys(AXES), shard), None
        return _mesh
    if _said and _mesh is not None and _made_for is dist.group.WORLD:
        return _same_mesh(_mesh, (sizes, shard, ep))
    quiet_warnings()
    hybrid = shard not in (None, 1, sizes["dp"])
    cp_size = sizes.get("cp", 1)
    dp = {"dp_replicate": replicas, "dp_shard": shard * cp_size} if hybrid else {"dp": sizes["dp"] * cp_size}
    axes = {"pp": sizes["pp"], **dp, "tp": sizes["tp"]}
    device_mesh = init_device_mesh(idist.device().type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    meshes = {axis: device_mesh[axis] for axis in axes}
    if hybrid:
        meshes["dp"] = flattened(device_mesh[DP_AXES], "dp")
    if cp_size > 1:  # beside torch's mesh, in which dp × cp is one axis
        meshes["dp_cp"] = meshes["dp"]
        rows_mesh = init_device_mesh(device_mesh.device_type, tuple(sizes[axis] for axis in GRID), mesh_dim_names=GRID)
        meshes |= {"dp": rows_mesh["dp"], "cp": rows_mesh["cp"]}
    expert_mesh = None
    if ep > 1:  # beside it, too
        grid = (sizes["pp"], sizes["dp"] * cp_size // ep, ep, sizes["tp"])
        expert_mesh = init_device_mesh(device_mesh.device_type, grid, mesh_dim_names=("pp", "edp", "ep", "tp"))
        meshes |= {"edp": expert_mesh["edp"], "ep": expert_mesh["ep"]}
    groups = {axis: use_world_timeout(mesh.get_group()) for axis, mesh in meshes.items()}
    _mesh = Mesh(sizes, dist.get_rank(), device_mesh, groups, shard, ep, expert_mesh)
    _made_for, _said = dist.group.WORLD, said
    return _mesh


def _same_mesh(mesh: Mesh, given: tuple) -> Mesh:
    if (dict(mesh.sizes), mesh.dp_shard_size, mesh.ep_size) != given:
        raise ValueError(
            f"initialize_mesh should be called once, but this job has {mesh!r}, on whose groups models and loaders may "
            f"be, and is now given {given[0]}: say the axes once, in ddl.Parallel or here"
        )
    return mesh


def get_mesh() -> Mesh:
    """The mesh of the running job; in a plain idist job, or without a job, the mesh is data parallel only.

    Returns:
        Mesh: sizes and ranks on each axis, groups, and torch's ``DeviceMesh``.

    Note:
        In a plain idist job, the first call makes the mesh, so every rank has to call it.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if _mesh is None or _made_for is not world:
        return initialize_mesh()
    return _mesh
