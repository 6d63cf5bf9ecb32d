"""Finds weights, and calls of collectives, that should be the same on several ranks, and are not."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ignite_ddl.arguments import MODULE, takes
from ignite_ddl.checks.replicas import digest, dp_local_statistics
from ignite_ddl.collectives import gathered_values, value_of
from ignite_ddl.data_parallel import local_round
from ignite_ddl.diagnose.calls import recorded_calls
from ignite_ddl.diagnose.report import UnlikeCalls, unlike_calls
from ignite_ddl.mesh import get_mesh
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.state import local_state, shard_of


@dataclass(frozen=True)
class OutOfSync:
    """A weight or buffer that differs between ranks that should hold the same.

    Attributes:
        name: in the uncut model.
        ranks: the ranks that hold it, those with equal values together, the group of the lowest rank first.
        difference: the largest absolute difference from the value of the lowest rank; inf where one of the two is NaN.
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]
    difference: float

    def __str__(self) -> str:
        groups = " | ".join(", ".join(map(str, group)) for group in self.ranks)
        return f"{self.name}: ranks {groups} differ by up to {self.difference:.3g}"


@takes(model=MODULE)
def check_in_sync(model: nn.Module) -> list[OutOfSync]:
    """Which weights or buffers differ between ranks that should hold the same, to the last bit; every rank calls it.

    Compared are weights and buffers: copies over dp, those that are replicated over tp, and weights that several
    stages share; of a weight that is sharded, the same parts. What may differ over dp is compared between the tp peers
    of a dp rank alone: parameters that DDP was told to ignore, and the running statistics of BatchNorm and InstanceNorm
    layers, which are those of each dp rank's own rows from one forward pass to the next, for which all take dp rank 0's
    (as DDP does). Any other buffer that a forward pass changes by this rank's rows is reported, since dp rank 0's then
    replaces it. Ranks exchange a number for each tensor, and tensors only where these differ.

    Args:
        model: what ``ddl.auto_model`` returned, or a plain module that each rank has.

    Returns:
        list: one :class:`OutOfSync` for each name, the same list on every rank; empty if all are in sync.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def drifting(local_rank):
                torch.manual_seed(0)
                model = ddl.auto_model(torch.nn.Linear(3, 2))
                before = ddl.check_in_sync(model)
                if local_rank == 1:
                    with torch.no_grad():
                        model.module.bias[0] += 0.5
                return before, ddl.check_in_sync(model)

            with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                (before, after), _ = parallel.run(drifting)
            assert before == []
            assert str(after[0]) == "bias: ranks 0 | 1 differ by up to 0.5"
    """
    mesh = get_mesh()
    if mesh.world_size == 1:
        return []
    held: dict[tuple, tuple[str, torch.Tensor]] = {}
    tensors, saved_as, _ = local_state(model)
    left_out = dp_local_statistics(model)
    local = local_round(model)
    in_a_round = local is not None and local.steps > 0  # where each dp rank has weights of its own
    saved = {id(tensor) for tensor in tensors.values()}
    everything = [(saved_as[name], None, tensor) for name, tensor in tensors.items()]
    for name, buffer in stages_of(model).plain_module().named_buffers():
        if id(buffer) not in saved:  # under pp, these names are this stage's
            everything.append((name, mesh.pp_rank, buffer))
    for name, stage, tensor in everything:
        alone = mesh.dp_cp_rank if in_a_round or id(tensor) in left_out else None
        for offsets, piece in shard_of(tensor).pieces:
            held[name, stage, alone, tuple(tensor.shape), offsets, tuple(piece.shape)] = name, piece
    everyone = gathered_values({key: digest(piece) for key, (_, piece) in held.items()})
    by_value: dict[tuple, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    by_shape: dict[tuple, dict[tuple, set[int]]] = defaultdict(lambda: defaultdict(set))  # of the full tensor
    for rank, digests in enumerate(everyone):
        for key, number in digests.items():
            by_value[key][number].append(rank)
            by_shape[key[:3]][key[3]].add(rank)
    found: dict[str, list[tuple[tuple, float]]] = defaultdict(list)
    for (name, stage, _), shapes in by_shape.items():
        if len(shapes) > 1 and stage is None:  # a cache that is not saved may be longer on a rank
            found[name].append((tuple(sorted(tuple(sorted(ranks)) for ranks in shapes.values())), math.inf))
    for key in sorted((key for key, groups in by_value.items() if len(groups) > 1), key=repr):
        groups = sorted(tuple(ranks) for ranks in by_value[key].values())
        found[key[0]].append((tuple(groups), _difference(held[key][1] if key in held else None, groups[0][0])))
    return [OutOfSync(name, parts[0][0], max(difference for _, difference in parts)) for name, parts in found.items()]


def check_same_calls() -> list[UnlikeCalls]:
    """Which collectives were not the same call on each rank of their group; every rank calls it.

    Two collectives in swapped order on one rank raise no error if their sizes fit: each rank gets sums of different
    things. Compared are the newest calls (2,000 with torch's default of ``TORCH_FR_BUFFER_SIZE``; 0 switches the record
    off), by their number on their group: operation, type and sizes, and the line of the user's code. Sends and
    receives are not compared, since gloo records none.

    Returns:
        list: one :class:`UnlikeCalls` for each number, the same list on every rank; empty if all agree. Those that
        differ only in their line come last: look whether both lines mean the same.

    Examples:
        .. code-block:: python

            import ignite.distributed as idist
            import ignite_ddl as ddl

            def swapped(local_rank):
                loss, rows = 0.5, 8.0
                if local_rank == 0:
                    loss = idist.all_reduce(loss)
                    rows = idist.all_reduce(rows)
                else:
                    rows = idist.all_reduce(rows)
                    loss = idist.all_reduce(loss)
                return loss, [call.differ_in for call in ddl.check_same_calls()]

            with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                (loss, differ_in), _ = parallel.run(swapped)
            assert loss == 8.5 and differ_in == ["line", "line"]     # not 1.0
    """
    if not dist.is_initialized():
        return []
    return unlike_calls(dict(enumerate(gathered_values(recorded_calls()))))


def _difference(mine: torch.Tensor | None, root: int) -> float:
    """The largest difference of any rank's values from those of one rank."""
    of_root = value_of(root, mine.detach().cpu() if mine is not None and dist.get_rank() == root else None)
    largest = 0.0
    if mine is not None:
        difference = (mine.detach().cpu().to(torch.complex128) - of_root.to(torch.complex128)).abs()
        largest = float(difference.nan_to_num(nan=torch.inf).max())
    return max(gathered_values(largest))
