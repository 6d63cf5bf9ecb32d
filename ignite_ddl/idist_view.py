"""idist over a group of ranks in place of the world: its ranks, sizes and collectives.

On a mesh, tp and pp peers have the same rows, so a sum over the world counts each row more than once.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ignite.distributed.utils as idist_utils
import torch
import torch.distributed as dist
from ignite.distributed.comp_models.native import _NativeDistModel
from torch.utils._pytree import tree_map

from ignite_ddl.collectives import gathered, gathered_values, value_of
from ignite_ddl.mesh import Mesh, get_mesh


class _DataParallelModel(_NativeDistModel):
    """idist's model of the world, with the data-parallel group as the world."""

    def __init__(self, mesh: Mesh, world: _NativeDistModel) -> None:
        # Without the parent's constructor, which would join a process group.
        self.__dict__.update(world.__dict__)
        self.__dict__.pop("all_reduce", None)  # the warning's
        self.world = world
        self.ranks, self.group = mesh.dp_cp_ranks, mesh.dp_cp_group  # global ranks

    def get_rank(self) -> int:
        return self.ranks.index(dist.get_rank())

    def get_world_size(self) -> int:
        return len(self.ranks)

    def finalize(self) -> None:
        raise RuntimeError("the job cannot be finalized inside a metric's method")

    def _do_all_reduce(self, tensor: torch.Tensor, op: str = "SUM", group: Any | None = None) -> torch.Tensor:
        return super()._do_all_reduce(tensor, op, group=self._setup_group(self.group if group is None else group))

    def _do_all_gather(self, tensor: torch.Tensor, group: Any | None = None) -> torch.Tensor:
        """Gathers different numbers of rows, because batches are not padded."""
        group = self._setup_group(self.group if group is None else group)
        tensor = tensor.unsqueeze(0) if tensor.ndim == 0 else tensor.contiguous()
        rows = [int(n) for n in gathered(torch.tensor(len(tensor), device=tensor.device), group)]
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        return torch.cat([part[:n] for part, n in zip(gathered(padded, group), rows, strict=True)])

    def _do_all_gather_object(self, tensor: Any, group: Any | None = None) -> list[Any]:
        return super()._do_all_gather_object(tensor, group=self.group if group is None else group)

    def broadcast(self, tensor: Any, src: int = 0, safe_mode: bool = False) -> Any:
        """Sends any value: Ignite's EpochMetric has what its function returned on ``src``, and 0.0 elsewhere."""
        sent = value_of(self.ranks[src], tensor, self.group)
        return tree_map(lambda leaf: leaf.to(self.device()) if isinstance(leaf, torch.Tensor) else leaf, sent)

    def barrier(self) -> None:
        dist.barrier(group=self.group)


class _SomeRanksModel(_DataParallelModel):
    """The same of some ranks, which compute while the others wait in :meth:`finish`: all of the group gather what these
    tell each other. A process group of theirs would have to be made at the same place of each rank's history of groups.
    """

    def __init__(self, mesh: Mesh, world: _NativeDistModel, ranks: Sequence[int]) -> None:
        super().__init__(mesh, world)
        self.places = [self.ranks.index(rank) for rank in ranks]  # in the group
        self.ranks = list(ranks)

    def _all(self, value: Any) -> list[Any]:
        """The values of these ranks."""
        if len(self.ranks) == 1:
            return [value]
        peers = gathered_values((False, value), self.group)
        if any(peers[place][0] for place in self.places):
            raise PeerError("a metric cannot be computed on another rank")
        return [peers[place][1] for place in self.places]

    def finish(self, result: Any = None) -> list[Any]:
        """Waits until these ranks have computed; returns their results. All ranks of the group call it."""
        while True:
            peers = gathered_values((True, result), self.group)
            if all(peers[place][0] for place in self.places):
                return [peers[place][1] for place in self.places]

    def _do_all_reduce(self, tensor: torch.Tensor, op: str = "SUM", group: Any | None = None) -> torch.Tensor:
        if group is not None:
            return super()._do_all_reduce(tensor, op, group)
        return tensor.copy_(functools.reduce(_REDUCED[op], self._all(tensor)))

    def _do_all_gather(self, tensor: torch.Tensor, group: Any | None = None) -> torch.Tensor:
        if group is not None:
            return super()._do_all_gather(tensor, group)
        return torch.cat(self._all(tensor.unsqueeze(0) if tensor.ndim == 0 else tensor))

    def _do_all_gather_object(self, tensor: Any, group: Any | None = None) -> list[Any]:
        return self._all(tensor) if group is None else super()._do_all_gather_object(tensor, group)

    def broadcast(self, tensor: Any, src: int = 0, safe_mode: bool = False) -> Any:
        return self._all(tensor)[src]

    def barrier(self) -> None:
        self._all(None)


class PeerError(RuntimeError):
    """Another rank has failed."""


_REDUCED = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AND": torch.bitwise_and,
    "OR": torch.bitwise_or,
}


@contextlib.contextmanager
def data_parallel_view(ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Context manager: ``idist``'s ranks, sizes and collectives are those of the data-parallel group.

    Args:
        ranks: some ranks of that group, in its place; they enter it together. Default: all of it.

    Examples:
        .. code-block:: python

            import ignite.distributed as idist
            import ignite_ddl as ddl
            from ignite_ddl.idist_view import data_parallel_view

            def count_rows(local_rank, rows):
                with data_parallel_view():
                    return idist.all_reduce(rows)

            with ddl.Parallel(backend="gloo", nproc_per_node=4, dp=2, tp=2) as parallel:
                assert parallel.run(count_rows, 10) == [20] * 4     # over the world it would be 40
    """
    mesh, before = get_mesh(), idist_utils._model
    if mesh.world_size == 1 or (ranks is None and is_in_view()):
        yield
        return
    world = getattr(before, "world", before)
    if not isinstance(world, _NativeDistModel):  # idist did not create the group and does not know it yet
        idist_utils.sync()
        before = world = idist_utils._model
    idist_utils._model = _DataParallelModel(mesh, world) if ranks is None else _SomeRanksModel(mesh, world, ranks)
    try:
        yield
    finally:
        idist_utils._model = before


def is_in_view() -> bool:
    """Whether this code runs inside of :func:`data_parallel_view`."""
    return isinstance(idist_utils._model, _DataParallelModel)


@contextlib.contextmanager
def warning_of_sums_over_peers(in_step: Callable[[], bool]) -> Iterator[None]:
    """Inside, a user's sum over the world warns, once, if peers of tp and pp have the same rows; not in a step."""
    world = idist_utils._model
    has_peers = get_mesh().dp_cp_size < get_mesh().world_size
    if not has_peers or type(world) is not _NativeDistModel or "all_reduce" in vars(world):
        yield
        return
    world.all_reduce = functools.partial(_sum_of_all, world.all_reduce, in_step)
    try:
        yield
    finally:
        vars(world).pop("all_reduce", None)


def _sum_of_all(all_reduce: Callable, in_step: Callable, tensor: Any, op: str = "SUM", group: Any = None) -> Any:
    caller = sys._getframe(2).f_globals.get("__name__", "")  # of idist.all_reduce
    if op == "SUM" and group is None and not in_step() and caller.partition(".")[0] not in ("ignite", "ignite_ddl"):
        vars(idist_utils._model).pop("all_reduce", None)
        warnings.warn(
            f"idist.all_reduce adds what all {get_mesh().world_size} ranks have, and those that share a layer or the "
            "model (tp, pp) have the same rows: to count each row once, pass group=ddl.get_mesh().dp_cp_group",
            stacklevel=3,
        )
    return all_reduce(tensor, op, group=group)


def on_this_rank(owner: Any, handler: Callable) -> Callable:
    """Wraps a method of Ignite that sums over the world what is the same on all ranks: its world is one rank."""

    @functools.wraps(handler)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with data_parallel_view([get_mesh().rank]):
            return handler(*args, **kwargs)

    setattr(owner, handler.__name__, alone)
    return alone
