"""The checks of chapter 09: a ring's first round, where two ways cost the same, and moments over all ranks."""

import torch

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import counted_on_ranks
from ignite_ddl.lab import cost

WAIT_SECONDS = 20  # what is right takes well under one
_CURE = "start sending before you receive, and let every rank make as many calls as its peers expect"
FEATURES = 5


@exercise(
    cases=((4, 12), (3, 6)),
    about="{world_size} ranks, {length} numbers",
    right="rank r ends with chunk r of the sum, for half a ring's bytes",
)
def reduce_scatter(function, world_size, length):
    """Chunk r of the sum on rank r, by n - 1 messages of one chunk each, from neighbour to neighbour."""
    numbers = torch.arange(1, length + 1, dtype=torch.float64)
    given = [(numbers * 2**rank,) for rank in range(world_size)]
    ranks = counted_on_ranks(function, given, WAIT_SECONDS, cure=_CURE)
    size = length // world_size
    chunks = (numbers * (2**world_size - 1)).split(size)
    for rank, (found, _) in enumerate(ranks):
        if not isinstance(found, torch.Tensor) or found.shape != (size,) or found.dtype != torch.float64:
            raise Hint(f"rank {rank} should return a float64 tensor of shape ({size},)")
    for rank, (found, _) in enumerate(ranks):
        if not torch.equal(found, chunks[rank]):
            raise Hint(_which_chunk(rank, found, chunks, world_size))
    for rank, (_, traffic) in enumerate(ranks):
        enough = 8 * size * (world_size - 1)
        if traffic.put_in > enough:
            raise Hint(f"right, but your rank {rank} sent {traffic.put_in} bytes, a ring's first round sends {enough}")
        if others := {call.peer for call in traffic.calls if call.put_in} - {(rank + 1) % world_size}:
            raise Hint(
                f"right, but rank {rank} sent to rank {min(others)}; in the ring it sends to rank "
                f"{(rank + 1) % world_size} only"
            )


def _which_chunk(rank, found, chunks, world_size):
    if wrong := [place for place, chunk in enumerate(chunks) if torch.equal(found, chunk)]:
        return f"rank {rank} returns chunk {wrong[0]} of the sum, not chunk {rank}: which chunk goes off first?"
    return (
        f"rank {rank} should return {[int(value) for value in chunks[rank]]}, the sum of all {world_size} ranks' "
        f"chunk {rank}, but returns {[round(value, 3) for value in found.tolist()]}"
    )


@exercise(
    cases=((8, 0.02, 1e6), (4, 1e-5, 1e9), (1024, 5e-6, 1.25e10), (3, 1e-5, 1e9), (5, 1e-5, 1e9)),
    about="{n_ranks} ranks, {latency:g} s, {bandwidth:g} bytes/s",
    right="below it take the tree, above it the ring",
)
def crossover_bytes(function, n_ranks, latency, bandwidth):
    """The buffer for which tree and ring take equally long."""
    link = cost.Link(latency, bandwidth)
    found = function(n_ranks, latency, bandwidth)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise Hint(f"return a number of bytes, not {type(found).__name__}")
    if n_ranks == 3:
        if not abs(found) <= 1e-6:
            raise Hint(
                f"here tree and ring send the same number of messages, the ring shorter ones: it is "
                f"never slower, so the answer is 0, not {found:.4g}. Does your tree round log2(3) up?"
            )
        return
    if not found > 0:
        raise Hint("for a buffer of a few bytes the tree is faster, so the answer is above 0")
    tree, ring = (way(n_ranks, found, link).seconds for way in (cost.all_reduce_tree, cost.all_reduce_ring))
    if not abs(tree - ring) <= 1e-9 * ring:
        raise Hint(
            f"with your {found:.4g} bytes the tree takes {tree / ring:.3g} times as long as the ring"
            + ("; 5 ranks need 3 rounds up, and 3 down" if n_ranks == 5 else "")
        )


@exercise(
    cases=(((4, 4, 4, 4), 0.0), ((7, 5, 3, 1), 0.0), ((2, 0, 5, 2), 0.0), ((7, 5, 3, 1), 1e3)),
    about=lambda rows, centre: f"{', '.join(map(str, rows))} rows of {FEATURES} features with mean {centre:g}",
    right="the whole batch's moments, in one round",
)
def moments(function, rows, centre):
    """Mean and variance over all ranks' rows, in one collective of two numbers a feature and one more."""
    x = _rows(sum(rows), centre)  # (rows, features)
    right = x.double().mean(dim=0), x.double().var(dim=0, correction=0)
    ranks = counted_on_ranks(function, [(part,) for part in x.split(rows)], WAIT_SECONDS, cure=_CURE)
    for rank, (found, _) in enumerate(ranks):
        kinds = [_kind(part) for part in found] if isinstance(found, tuple | list) else None
        if kinds != [(torch.float32, (FEATURES,))] * 2:
            raise Hint(f"rank {rank} should return two float32 tensors of shape ({FEATURES},)")
        if not all(_close(part, whole) for part, whole in zip(found, right, strict=True)):
            raise Hint(_which_moments(rank, found, x.split(rows), right, centre))
    for _, traffic in ranks:
        enough, calls = 4 * (2 * FEATURES + 1), [call for call in traffic.calls if call.put_in]
        if traffic.put_in > enough:
            raise Hint(
                f"right, but a rank puts in {traffic.put_in} bytes; two numbers a feature and its number of rows "
                f"are {enough}"
            )
        if len(calls) > 1:
            raise Hint(f"right, but in {len(calls)} collectives: everybody waits for each of them")


def _rows(n_rows, centre):
    generator = torch.Generator().manual_seed(n_rows)
    return centre + 0.1 * torch.randn(n_rows, FEATURES, generator=generator)


def _kind(part):
    return (part.dtype, tuple(part.shape)) if isinstance(part, torch.Tensor) else None


def _close(found, right):
    return bool(torch.allclose(found.double(), right, rtol=1e-2, atol=1e-6))


def _which_moments(rank, found, parts, right, centre):
    """What the natural mistakes give: a rank's own rows, the mean of means, the variance inside ranks only."""
    n_rows = torch.tensor([[float(len(part))] for part in parts], dtype=torch.float64)
    means, variances = (
        torch.stack([moment(part.double()) for part in parts if len(part)])
        for moment in (lambda x: x.mean(dim=0), lambda x: x.var(dim=0, correction=0))
    )
    mean, variance = found
    if centre:
        return (
            "with mean 0 it is right, and here the variance has drowned in float32's rounding; add up squared "
            "distances from a mean"
        )
    if len(parts[rank]) and _close(variance, parts[rank].double().var(dim=0, correction=0)):
        return f"rank {rank} takes the moments of its own rows"
    if not _close(mean, right[0]):
        equal = _close(mean, means.mean(dim=0))
        return "the mean of means; the ranks have unequal rows" if equal else f"rank {rank}'s mean is off"
    inside = (n_rows[n_rows > 0][:, None] * variances).sum(dim=0) / n_rows.sum()
    if _close(variance, inside):
        return "the mean is right; the ranks' means differ, and that is variance, too"
    return f"the mean is right, rank {rank}'s variance is off"
