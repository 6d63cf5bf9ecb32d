"""The checks of chapter 14: who owns which slice, a clipped ZeRO-1 step, and the smallest stage that fits."""

import re

import torch

import ignite_ddl as ddl
from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab import cost
from ignite_ddl.lab.bytes import count_bytes

WAIT_SECONDS = 20  # what is right takes well under one


@exercise
def my_slice(function):
    """Equal shards, as small as possible, with the padding at the end."""
    for n_parameters, n_ranks in ((12, 4), (10, 4), (5, 4), (3, 4), (12_704, 3), (1, 1)):
        case, size = f"{n_parameters} parameters on {n_ranks} ranks", -(-n_parameters // n_ranks)
        slices = [function(n_parameters, n_ranks, rank) for rank in range(n_ranks)]
        for rank, found in enumerate(slices):
            if not isinstance(found, tuple) or [type(end) for end in found] != [int, int]:
                raise Hint(f"{case}: return (start, stop), two whole numbers, not {found!r}")
            if found[0] > found[1] or not 0 <= found[0] <= found[1] <= n_parameters:
                raise Hint(
                    f"{case}: rank {rank} gets {found}; start and stop should lie between 0 and {n_parameters}, in "
                    "order"
                )
        if lost := n_parameters - sum(stop - start for start, stop in slices):
            what = f"{lost} have no owner" if lost > 0 else f"{-lost} have two owners"
            raise Hint(f"{case}: of the parameters {what}: round the shards up, and cut at the end")
        for rank, found in enumerate(slices):
            right = min(rank * size, n_parameters), min((rank + 1) * size, n_parameters)
            if found != right and (right[0] < right[1] or found[0] < found[1]):
                raise Hint(
                    f"{case}: shards of {size}, so rank {rank} owns {right}, but yours {found}: the padding lies at "
                    "the end of the vector only"
                )
    return "equal shards, padding at the end"


@exercise
def clipped_step(function):
    """SGD with the clipped mean gradient, the weights right on every rank, for a ring's bytes and one number."""
    for world_size, length, max_norm in ((4, 12, 1.0), (3, 6, 0.25), (4, 8, 1e6)):
        case = f"{world_size} ranks, {length} weights, max_norm {max_norm:g}"
        ranks = _run(_clipped_on_a_rank, world_size, function, length, max_norm)
        gradients = [_vector(length, 1 + rank) for rank in range(world_size)]
        mean = sum(gradients) / world_size
        start = _vector(length, 0)
        right = start - 0.5 * _clip(mean, max_norm)
        torchs = start - 0.5 * _clip(mean, max_norm, mean.norm() + 1e-6)  # as clip_grad_norm_ has it
        found = [weights for weights, _ in ranks]
        for rank, weights in enumerate(found):
            if weights.shape != right.shape:
                raise Hint(f"{case}: rank {rank}'s weights should keep their shape, ({length},)")
            if not (_near(weights, right) or _near(weights, torchs)):
                raise Hint(f"{case}: {_what_went_wrong(rank, weights, start, gradients, max_norm)}")
        whole = [op for op, put_in, _, _ in ranks[0][1] if op == "all_reduce" and put_in >= 8 * length]
        if whole:
            raise Hint(
                f"{case}: right, but an all-reduce leaves the whole mean gradient on every rank; let each get and "
                "update its shard"
            )
        enough = 2 * (world_size - 1) * 8 * length // world_size + 2 * (world_size - 1) * 8 // world_size
        for rank, (_, calls) in enumerate(ranks):
            sent = sum(_sent_in_a_ring(*call) for call in calls)
            if (
                sent > enough + 8 * world_size
            ):  # a number as an all-gather, or in another precision, is as well
                raise Hint(
                    f"{case}: right, but your rank {rank} sends {sent} bytes round the ring, a reduce-scatter, an "
                    f"all-gather and one number are {enough}"
                )
    return "clipped by the norm of all shards, for a ring's bytes and one number"


def _vector(length, seed):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _clip(gradient, max_norm, norm=None):
    norm = gradient.norm() if norm is None else norm
    return gradient * min(1.0, max_norm / float(norm))


def _near(found, other):
    return bool(((found - other).abs() <= 1e-12 * max(1.0, float(other.abs().max()))).all())


def _what_went_wrong(rank, found, start, gradients, max_norm):
    n = len(gradients)
    mean, own = sum(gradients) / n, slice(rank * len(start) // n, (rank + 1) * len(start) // n)
    shards = torch.cat([_clip(shard, max_norm) for shard in mean.chunk(n)])
    variants = {
        "the weights of rank {rank} are as they were: update in place": start,
        "rank {rank} divides the sum of gradients by nothing: take the mean over ranks": start
        - 0.5 * _clip(mean * n, max_norm),
        "the gradient is not clipped": start - 0.5 * mean,
        "rank {rank} clips by the norm of its shard; the norm is that of all shards together": start
        - 0.5 * shards,
        "rank {rank} adds up the norms of the shards; add up their squares, and take the root": start
        - 0.5 * _clip(mean, max_norm, sum(shard.norm() for shard in mean.chunk(n))),
        "each rank clips its own gradient before the mean; the mean is to be clipped": start
        - 0.5 * sum(_clip(gradient, max_norm) for gradient in gradients) / n,
        "rank {rank} scales the gradient up; it should only ever be scaled down": start
        - 0.5 * mean * max_norm / mean.norm(),
    }
    for says, weights in variants.items():
        if _near(found, weights):
            return says.format(rank=rank)
    right = start - 0.5 * _clip(mean, max_norm)
    if _near(found[own], right[own]):
        return f"rank {rank}'s own shard is right, the others' are not: gather the weights"
    for says, weights in variants.items():
        if not _near(weights, start) and _near(found[own], weights[own]):
            return says.format(rank=rank)
    return f"the largest error on rank {rank} is {float((found - right).abs().max()):.1e}"


def _sent_in_a_ring(op, put_in, got, n_ranks):
    return (2 if op == "all_reduce" else 1) * max(put_in, got) * (n_ranks - 1) // n_ranks


def _clipped_on_a_rank(local_rank, function, length, max_norm):
    weights, gradient = _vector(length, 0), _vector(length, 1 + local_rank)
    with count_bytes() as traffic:
        function(weights, gradient, 0.5, max_norm)
    return weights, [(call.op, call.put_in, call.got, len(call.ranks)) for call in traffic.calls]


@exercise
def smallest_stage(function):
    """The smallest stage of ZeRO that leaves the room free."""
    for n_parameters, n_ranks, memory, room in (
        (7.5e9, 64, 32, 0),
        (7.5e9, 64, 32, 4),
        (7.5e9, 64, 128, 4),
        (7.5e9, 64, 8, 2),
        (7.5e9, 4, 16, 2),
        (1e9, 1, 16, 0),
        (1e9, 8, 10, 6),
        (70e9, 64, 80, 30),
    ):
        totals = [cost.zero_memory(n_parameters, n_ranks, stage).total / 1e9 for stage in range(4)]
        right = next((stage for stage, total in enumerate(totals) if total + room <= memory), None)
        found = function(n_parameters, n_ranks, memory, room)
        case = f"{n_parameters / 1e9:g} billion parameters, {n_ranks} ranks of {memory} GB, {room} GB of room"
        if found is not None and (isinstance(found, bool) or found not in range(4)):
            raise Hint(f"{case}: return a stage from 0 to 3, or None, not {found!r}")
        if found == right:
            continue
        if found is None:
            raise Hint(f"{case}: stage {right} takes {totals[right]:.1f} GB, which fits")
        if right is None or found < right:
            raise Hint(f"{case}: stage {found} takes {totals[found]:.1f} GB and the room, which does not fit")
        raise Hint(f"{case}: stage {found} fits, but so does stage {right}, with {totals[right]:.1f} GB")
    return "no stage more than the model needs"


def _run(on_a_rank, world_size, *args):
    try:
        return on_ranks(world_size, on_a_rank, *args, timeout=WAIT_SECONDS)
    except ddl.RankError as error:
        if re.search("did not finish within|[Tt]imed out", str(error)):  # the launcher's words, or gloo's
            raise Hint(
                "your ranks wait for each other: every rank should make the same calls in the same order"
            ) from None
        raise
