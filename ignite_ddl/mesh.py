"""The world as a grid of three axes: pp (pipeline stages) × dp (data) × tp (tensors).

Ranks are numbered along tp first, then dp, then pp: tp peers, which communicate most, have neighbouring ranks, so they
share a machine if machines are filled in rank order. dp may be a grid of its own, dp_replicate × dp_shard (HSDP): the
dp_shard peers, which are neighbours, share the weights of one replica of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import ignite.distributed as idist
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ignite_ddl.arguments import COUNT, Fits, check, one_of, takes, whole
from ignite_ddl.compat import flattened, quiet_warnings, wait_as_the_world

__all__ = ["Mesh", "check_mesh", "get_mesh", "initialize_mesh", "sizes_alone"]

AXES = ("pp", "dp", "tp")  # outermost first
DP_AXES = ("dp_replicate", "dp_shard")  # what dp consists of, if they are given
AXIS = Fits("a positive integer, or -1 for what is left", (COUNT | one_of(-1)).read)


def check_mesh(
    world_size: int,
    dp: int | None = None,
    pp: int = 1,
    tp: int = 1,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
) -> dict[str, int]:
    """Fills in what is not given or -1 and checks that the axes fill the world.

    Args:
        world_size: number of ranks.
        dp: size of the data-parallel axis. Default: dp_replicate × dp_shard, or whatever pp and tp leave.
        pp: number of pipeline ranks, default 1.
        tp: number of ranks that share each layer, default 1.
        dp_replicate: number of replicas of the model over dp. Default: what dp_shard leaves of dp.
        dp_shard: number of dp ranks that share the weights of a replica. Default: what dp_replicate leaves of dp.

    Returns:
        dict: the sizes of pp, dp and tp; also of dp_replicate and dp_shard, if one of them is given.

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
    given = {name: check(name, size, AXIS) for name, size in given.items() if size is not None}
    other = 1 if -1 in (dp_replicate, dp_shard) else -1
    parts = {name: given.get(name, other) for name in DP_AXES if not given.keys().isdisjoint(DP_AXES)}
    if not parts or "dp" in given:
        sizes = _filled({axis: given.get(axis, -1) for axis in AXES}, world_size, "the number of ranks")
        return sizes | (_filled(parts, sizes["dp"], "dp") if parts else {})
    sizes = _filled({"pp": pp, **parts, "tp": tp}, world_size, "the number of ranks")
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


def sizes_alone(
    dp: int | None, pp: int, tp: int, dp_replicate: int | None = None, dp_shard: int | None = None
) -> dict[str, int]:
    """:func:`check_mesh` where the axes say how many ranks there are."""
    dp = dp or (dp_replicate or 1) * (dp_shard or 1)
    return check_mesh(dp * pp * tp, dp, pp, tp, dp_replicate, dp_shard)


@dataclass(frozen=True, eq=False, repr=False)
class Mesh:
    """The position of this rank in the grid, and the process group of each axis.

    Made by :func:`initialize_mesh` or ``ddl.Parallel(..., dp=, pp=, tp=)`` and read by :func:`get_mesh`.

    Attributes:
        sizes: the sizes of pp, dp and tp, by name.
        rank: this process's global rank.
        device_mesh: torch's ``DeviceMesh`` with the axes "pp", "dp", "tp"; None on a serial run. With HSDP, it has
            "dp_replicate" and "dp_shard" instead of "dp", which torch then knows as these two flattened.
        groups: the process group of each axis through this rank; None on a serial run.
        dp_shard_size: number of dp ranks that share the weights of a replica; None where neither dp_replicate nor
            dp_shard was given, so that ``shard`` of :func:`auto_model` decides.
    """

    sizes: Mapping[str, int]
    rank: int
    device_mesh: DeviceMesh | None
    groups: Mapping[str, dist.ProcessGroup | None]
    dp_shard_size: int | None = None

    dp_size = property(lambda self: self.sizes["dp"], doc="Size of the data-parallel axis.")
    pp_size = property(lambda self: self.sizes["pp"], doc="Number of pipeline ranks.")
    tp_size = property(lambda self: self.sizes["tp"], doc="Number of ranks that share each layer.")
    world_size = property(lambda self: math.prod(self.sizes.values()), doc="Number of ranks.")
    dp_rank = property(lambda self: self.coordinates(self.rank)["dp"], doc="This rank's position on dp.")
    pp_rank = property(lambda self: self.coordinates(self.rank)["pp"], doc="This rank's position on pp.")
    tp_rank = property(lambda self: self.coordinates(self.rank)["tp"], doc="This rank's position on tp.")
    dp_group = property(lambda self: self.groups["dp"], doc="Process group of dp peers; None on a serial run.")
    pp_group = property(lambda self: self.groups["pp"], doc="Process group of pp peers; None on a serial run.")
    tp_group = property(lambda self: self.groups["tp"], doc="Process group of tp peers; None on a serial run.")

    @property
    def hybrid(self) -> bool:
        """Whether weights are both replicated and sharded over dp (HSDP)."""
        return self.dp_shard_size not in (None, 1, self.dp_size)

    @property
    def dp_mesh(self) -> DeviceMesh:
        """torch's mesh for FSDP2: dp, or dp_replicate × dp_shard."""
        return self.device_mesh[DP_AXES if self.hybrid else "dp"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a global rank on each axis."""
        rank = check("rank", rank, whole(0, self.world_size - 1))
        pp, rest = divmod(rank, self.dp_size * self.tp_size)
        dp, tp = divmod(rest, self.tp_size)
        return {"pp": pp, "dp": dp, "tp": tp}

    def rank_at(self, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        """The global rank at a position of the grid."""
        at = {"pp": pp, "dp": dp, "tp": tp}
        pp, dp, tp = (check(axis, place, whole(0, self.sizes[axis] - 1)) for axis, place in at.items())
        return (pp * self.dp_size + dp) * self.tp_size + tp

    def __repr__(self) -> str:
        shard = "" if self.dp_shard_size is None else f", dp_shard={self.dp_shard_size}"
        return f"Mesh(dp={self.dp_size}{shard}, pp={self.pp_size}, tp={self.tp_size}, rank={self.rank})"

    def __str__(self) -> str:
        """The grid: a row for each position on pp and dp, with the tp peers side by side and this rank in brackets."""
        shard = self.dp_shard_size
        of_dp = f" (dp_replicate={self.dp_size // shard} × dp_shard={shard})" if self.hybrid else ""
        lines = [f"mesh dp={self.dp_size}{of_dp} × pp={self.pp_size} × tp={self.tp_size}, {self.world_size} ranks"]
        for pp in range(self.pp_size):
            for dp in range(self.dp_size):
                ranks = [self.rank_at(pp, dp, tp) for tp in range(self.tp_size)]
                cells = [f"[{rank}]" if rank == self.rank else f" {rank} " for rank in ranks]
                tp = f"  tp 0…{self.tp_size - 1}" if self.tp_size > 1 else ""
                lines.append(f"  pp {pp}  dp {dp}{tp}: {' '.join(cells)}")
        return "\n".join(lines)


_mesh: Mesh | None = None
_made_for: dist.ProcessGroup | None = None  # the mesh's world: a new job needs a new mesh


@takes()
def initialize_mesh(
    dp: int | None = None, pp: int = 1, tp: int = 1, dp_replicate: int | None = None, dp_shard: int | None = None
) -> Mesh:
    """Makes the mesh dp × pp × tp of the running job; every rank calls it once, with the same numbers.

    ``ddl.Parallel(..., dp=, pp=, tp=)`` calls it. Call it yourself if something else started the job
    (``idist.initialize``, Lightning, a cluster's own launcher).

    Args:
        dp: size of the data-parallel axis. Default: dp_replicate × dp_shard, or whatever pp and tp leave.
        pp: number of pipeline ranks, default 1.
        tp: number of ranks that share each layer, default 1.
        dp_replicate: number of replicas of the model over dp, as in ``ddl.Parallel``.
        dp_shard: number of dp ranks that share the weights of a replica, as in ``ddl.Parallel``.

    Returns:
        Mesh: the mesh, which :func:`get_mesh` returns from now on.

    Raises:
        ValueError: if the axes do not fill the world.

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
    global _mesh, _made_for
    sizes = check_mesh(idist.get_world_size(), dp, pp, tp, dp_replicate, dp_shard)
    shard = sizes.pop("dp_shard", None)
    replicas = sizes.pop("dp_replicate", 1)
    if not dist.is_initialized():
        _mesh, _made_for = Mesh(sizes, 0, None, dict.fromkeys(AXES), shard), None
        return _mesh
    quiet_warnings()
    hybrid = shard not in (None, 1, sizes["dp"])
    dp = {"dp_replicate": replicas, "dp_shard": shard} if hybrid else {"dp": sizes["dp"]}
    axes = {"pp": sizes["pp"], **dp, "tp": sizes["tp"]}
    device_mesh = init_device_mesh(idist.device().type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    meshes = {axis: device_mesh[axis] for axis in axes}
    if hybrid:
        meshes["dp"] = flattened(device_mesh[DP_AXES], "dp")
    groups = {axis: wait_as_the_world(mesh.get_group()) for axis, mesh in meshes.items()}
    _mesh, _made_for = Mesh(sizes, dist.get_rank(), device_mesh, groups, shard), dist.group.WORLD
    return _mesh


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
