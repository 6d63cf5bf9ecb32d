"""Any Ignite metric, reduced over the ranks that saw different data.

Ignite's metrics reduce over the world. On a mesh, tp and pp peers saw the same rows, so the world counts each
row more than once. While a metric works, idist is shown the data-parallel group as if it were the world; the
metric's class stays Ignite's own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from numbers import Number
from typing import Any

import ignite.distributed.utils as idist_utils
import torch
import torch.distributed as dist
from ignite.distributed.comp_models.native import _NativeDistModel
from ignite.metrics import Metric

from ignite_ddl.mesh import Mesh, get_mesh

__all__ = ["data_parallel_view", "over_data_parallel"]


class _DataParallelModel(_NativeDistModel):
    """idist's model of the world, told that the data-parallel group is the world."""

    def __init__(self, mesh: Mesh, world: _NativeDistModel) -> None:
        # Not the parent's constructor, which would join a process group: everything is known.
        self.__dict__.update(world.__dict__)
        self.mesh = mesh

    def get_rank(self) -> int:
        return self.mesh.dp_rank

    def get_world_size(self) -> int:
        return self.mesh.dp_size

    def finalize(self) -> None:
        raise RuntimeError("the job cannot be finalized while a metric works")

    def _do_all_reduce(self, tensor: torch.Tensor, op: str = "SUM", group: Any | None = None) -> torch.Tensor:
        return super()._do_all_reduce(tensor, op, group=group or self.mesh.dp_group)

    def _do_all_gather(self, tensor: torch.Tensor, group: Any | None = None) -> torch.Tensor:
        """Ranks may hold different numbers of rows: nothing was padded."""
        group = group or self.mesh.dp_group
        tensor = tensor.unsqueeze(0) if tensor.ndim == 0 else tensor.contiguous()
        rows = [torch.zeros(1, dtype=torch.long, device=tensor.device) for _ in range(group.size())]
        dist.all_gather(rows, torch.tensor([len(tensor)], device=tensor.device), group=group)
        most = max(int(n) for n in rows)
        padded = tensor.new_zeros(most, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.zeros_like(padded) for _ in rows]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[: int(n)] for part, n in zip(parts, rows, strict=True)])

    def _do_all_gather_object(self, tensor: Any, group: Any | None = None) -> list[Any]:
        return super()._do_all_gather_object(tensor, group=group or self.mesh.dp_group)

    def broadcast(self, tensor: Any, src: int = 0, safe_mode: bool = False) -> Any:
        if isinstance(tensor, Number) and not safe_mode:  # Ignite sends numbers in single precision
            box = torch.tensor([float(tensor)], dtype=torch.double, device=self.device())
            return self._do_broadcast(box, src).item()
        return super().broadcast(tensor, src=src, safe_mode=safe_mode)

    def _do_broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        at = self.mesh.coordinates(self.mesh.rank) | {"dp": src}
        dist.broadcast(tensor, src=self.mesh.rank_at(**at), group=self.mesh.dp_group)
        return tensor

    def barrier(self) -> None:
        dist.barrier(group=self.mesh.dp_group)


@contextlib.contextmanager
def data_parallel_view(mesh: Mesh | None = None) -> Iterator[None]:
    """While open, ``idist``'s ranks, sizes and collectives are those of the data-parallel group.

    Args:
        mesh: the mesh; default :func:`ddl.get_mesh`.

    Examples:
        .. code-block:: python

            import ignite.distributed as idist
            import ignite_ddl as ddl
            from ignite_ddl.metrics import data_parallel_view

            def count_rows(local_rank, rows):
                with data_parallel_view():
                    return idist.all_reduce(rows)

            with ddl.Parallel(backend="gloo", nproc_per_node=4, dp=2, tp=2) as parallel:
                assert parallel.run(count_rows, 10) == [20] * 4     # over the world it would be 40
    """
    mesh = mesh or get_mesh()
    if mesh.dp_size == mesh.world_size and mesh.world_size == 1:
        yield
        return
    world = idist_utils._model
    if isinstance(world, _DataParallelModel):
        yield
        return
    if not isinstance(
        world, _NativeDistModel
    ):  # the group was made elsewhere: idist has not looked at it yet
        idist_utils.sync()
        world = idist_utils._model
    idist_utils._model = _DataParallelModel(mesh, world)
    try:
        yield
    finally:
        idist_utils._model = world


_WORKING = ("reset", "update", "compute", "state_dict", "load_state_dict")


def over_data_parallel(metric: Metric, mesh: Mesh | None = None) -> Metric:
    """Makes this metric object reduce over the data-parallel group, in place, and returns it.

    The engines of ``ddl`` do this with every metric that is attached to them. Call it for a metric that you
    update and compute yourself.

    Args:
        metric: any Ignite metric; metrics inside it (``RunningAverage``, ``MetricsLambda``) are included.
        mesh: the mesh; default :func:`ddl.get_mesh` when the metric works.

    Returns:
        Metric: the same object.
    """
    if getattr(metric, "_over_data_parallel", False):
        return metric
    metric._over_data_parallel = True
    for name in _WORKING:
        method = getattr(metric, name)

        @functools.wraps(method)
        def in_view(*args: Any, _method=method, **kwargs: Any) -> Any:
            with data_parallel_view(mesh):
                return _method(*args, **kwargs)

        setattr(metric, name, in_view)
    for inner in (
        getattr(metric, "src", None),
        *getattr(metric, "args", ()),
        *getattr(metric, "kwargs", {}).values(),
    ):
        if isinstance(inner, Metric):
            over_data_parallel(inner, mesh)
    return metric
