"""The rows of all dp ranks, for a loss in which rows meet: negatives of the batch, statistics over rows."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ignite_ddl.arguments import TENSOR, takes
from ignite_ddl.checks.traceless import GATHERS_ROWS
from ignite_ddl.collectives import gathered, gathered_values
from ignite_ddl.mesh import get_mesh

# Of a rank without rows, which was lent one: what has been gathered.
_without_rows: contextvars.ContextVar[list | None] = contextvars.ContextVar("gathered without rows", default=None)
# Not empty until a loss function has returned.
_loss_runs: contextvars.ContextVar[list] = contextvars.ContextVar("a loss function runs", default=[])  # noqa: B039


@takes(rows=TENSOR)
def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all dp ranks, those of dp rank 0 first, with a gradient that goes back to the rank of each row.

    For a loss in which rows meet, such as that of SimCLR or CLIP: each rank then computes the loss of the global batch.
    Ranks may have different numbers of rows; inside of a loss function, a rank without rows gives none. All dp ranks
    call it, as often and in the same order. On a mesh without dp, and in one process, it returns ``rows``.

    Args:
        rows: (n, ...), this rank's features, or their labels.

    Returns:
        torch.Tensor: (N, ...), N the sum of n over dp ranks.

    Raises:
        ValueError: if it is no tensor with rows, ranks give rows of different shapes, or the mesh has pp.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def loss_fn(features, others):                               # (n, D) each: two views of n images
                features, others = ddl.gather_rows(features), ddl.gather_rows(others)
                return torch.nn.functional.cross_entropy(features @ others.T, torch.arange(len(features)))

            def training(local_rank):
                torch.manual_seed(0)
                data = torch.utils.data.TensorDataset(torch.randn(10, 4), torch.randn(10, 2))
                model = ddl.auto_model(torch.nn.Linear(4, 2))
                optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
                trainer = ddl.create_supervised_trainer(model, optimizer, loss_fn, loss_divisor="local")
                trainer.run(ddl.auto_dataloader(data, batch_size=5))
                return trainer.state.output

            with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                assert abs(parallel.run(training)[0] - training(0)) < 1e-6
    """
    if not rows.ndim:
        raise ValueError("rows should be a tensor with a row for each sample, but given one without dimensions")
    mesh = get_mesh()
    if mesh.pp_size > 1:
        raise ValueError(
            "under pp loss_fn gets the rows of a microbatch, not of a batch: gather rows on a mesh without pp"
        )
    if mesh.dp_size == 1:
        return rows
    if (given_none := _without_rows.get()) is not None:
        given_none.append(rows)
        rows = rows[:0]
    token = GATHERS_ROWS.set(True)
    try:
        shapes = gathered_values((tuple(rows.shape), rows.dtype), mesh.dp_group)
        if len({(shape[1:], dtype) for shape, dtype in shapes}) > 1:
            raise ValueError(f"rows should have the same shape and type on all dp ranks, but given {shapes}")
        return _Gathered.apply(rows, [shape[0] for shape, _ in shapes], mesh.dp_rank, mesh.dp_group)
    finally:
        GATHERS_ROWS.reset(token)


@contextlib.contextmanager
def giving_no_rows() -> Iterator[list]:
    """Inside, this rank gives no rows; yields a list, which is not empty if it has gathered some."""
    token = _without_rows.set([])
    try:
        yield _without_rows.get()
    finally:
        _without_rows.reset(token)


@contextlib.contextmanager
def inside_a_loss() -> Iterator[None]:
    """Inside, a gradient is none of the step's backward pass."""
    runs = [True]
    token = _loss_runs.set(runs)
    try:
        yield
    finally:
        _loss_runs.reset(token)
        runs.clear()


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        starts = list(itertools.accumulate(sizes, initial=0))
        ctx.group, ctx.own = group, slice(starts[rank], starts[rank + 1])
        ctx.loss_runs = _loss_runs.get()
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        return torch.cat([part[:n] for part, n in zip(gathered(padded, group), sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        if ctx.loss_runs or torch.is_grad_enabled():
            raise ValueError(
                "a loss function takes a gradient through ddl.gather_rows (torch.autograd.grad), where each rank would "
                "get the sum over ranks: take it by what ddl.gather_rows returned, of which every rank has all rows, "
                "or use a mesh without dp"
            )
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)  # each rank has a loss of all rows
        return gradient[ctx.own], None, None, None
