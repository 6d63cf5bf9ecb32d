"""The checks of chapter 09: a ring's first round, where two ways cost the same, and a backward over all ranks."""

import re

import torch

import ignite_ddl as ddl
from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab import cost
from ignite_ddl.lab.bytes import count_bytes

WAIT_SECONDS = 20  # what is right takes well under one


@exercise
def reduce_scatter(function):
    """Chunk r of the sum on rank r, by n - 1 messages of one chunk each, from neighbour to neighbour."""
    for world_size, length in ((4, 12), (3, 6)):
        ranks = _run(_reduce_scatter_on_a_rank, world_size, function, length)
        case = f"{world_size} ranks, {length} numbers"
        size = length // world_size
        chunks = (torch.arange(1, length + 1, dtype=torch.float64) * (2**world_size - 1)).split(size)
        for rank, (found, _) in enumerate(ranks):
            if not isinstance(found, torch.Tensor) or found.shape != (size,) or found.dtype != torch.float64:
                raise Hint(f"{case}: rank {rank} should return a float64 tensor of shape ({size},)")
        for rank, (found, _) in enumerate(ranks):
            if not torch.equal(found, chunks[rank]):
                raise Hint(f"{case}: {_which_chunk(rank, found, chunks, world_size)}")
        for rank, (_, sent) in enumerate(ranks):
            n_bytes, enough = sum(put_in for put_in, _ in sent), 8 * size * (world_size - 1)
            if n_bytes > enough:
                raise Hint(
                    f"{case}: right, but your rank {rank} sent {n_bytes} bytes, a ring's first round sends {enough}"
                )
            if others := {peer for _, peer in sent} - {(rank + 1) % world_size}:
                raise Hint(
                    f"{case}: right, but rank {rank} sent to rank {min(others)}; in the ring it sends to rank "
                    f"{(rank + 1) % world_size} only"
                )
    return "rank r ends with chunk r of the sum, for half a ring's bytes"


def _which_chunk(rank, found, chunks, world_size):
    if wrong := [place for place, chunk in enumerate(chunks) if torch.equal(found, chunk)]:
        return (
            f"rank {rank} returns chunk {wrong[0]} of the sum, not chunk {rank}: which chunk goes off first?"
        )
    return (
        f"rank {rank} should return {[int(value) for value in chunks[rank]]}, the sum of all {world_size} ranks' "
        f"chunk {rank}, but returns {[round(value, 3) for value in found.tolist()]}"
    )


def _reduce_scatter_on_a_rank(local_rank, function, length):
    gradient = torch.arange(1, length + 1, dtype=torch.float64) * 2**local_rank
    with count_bytes() as traffic:
        found = function(gradient)
    return found, [(call.put_in, call.peer) for call in traffic.calls if call.put_in]


@exercise
def crossover_bytes(function):
    """The buffer for which tree and ring take equally long."""
    for n_ranks, latency, bandwidth in (
        (8, 0.02, 1e6),
        (4, 1e-5, 1e9),
        (1024, 5e-6, 1.25e10),
        (3, 1e-5, 1e9),
        (5, 1e-5, 1e9),
    ):
        link = cost.Link(latency, bandwidth)
        found = function(n_ranks, latency, bandwidth)
        case = f"{n_ranks} ranks, {latency:g} s, {bandwidth:g} bytes/s"
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise Hint(f"{case}: return a number of bytes, not {type(found).__name__}")
        if n_ranks == 3:
            if abs(found) > 1e-6:
                raise Hint(
                    f"{case}: here tree and ring send the same number of messages, the ring shorter ones: it is "
                    f"never slower, so the answer is 0, not {found:.4g}. Does your tree round log2(3) up?"
                )
            continue
        if found <= 0:
            raise Hint(f"{case}: for a buffer of a few bytes the tree is faster, so the answer is above 0")
        tree, ring = (
            way(n_ranks, found, link).seconds for way in (cost.all_reduce_tree, cost.all_reduce_ring)
        )
        if abs(tree - ring) > 1e-9 * ring:
            raise Hint(
                f"{case}: with your {found:.4g} bytes the tree takes {tree / ring:.3g} times as long as the ring"
                + ("; 5 ranks need 3 rounds up, and 3 down" if n_ranks == 5 else "")
            )
    return "below it take the tree, above it the ring"


@exercise
def normalise_backward(function):
    """The gradient with respect to x through moments over all ranks' rows, for two sums a feature."""
    for rows, n_features in (((4, 4, 4, 4), 3), ((7, 5, 3, 1), 6), ((2, 0, 5, 2), 2)):
        gradient, normalised, std, right = _normalised(sum(rows), n_features)
        parts = [tensor.split(rows) for tensor in (gradient, normalised)]
        ranks = _run(_backward_on_a_rank, len(rows), function, *parts, std)
        case = f"{', '.join(map(str, rows))} rows of {n_features} features"
        right, own, even = (
            right.split(rows),
            _with_means_of(parts, std, "own"),
            _with_means_of(parts, std, "even"),
        )
        for rank, (found, _) in enumerate(ranks):
            if not isinstance(found, torch.Tensor) or found.shape != right[rank].shape:
                raise Hint(f"{case}: rank {rank} should return a tensor of shape {tuple(right[rank].shape)}")
            if not rows[rank] or _near(found, right[rank]):
                continue
            if _near(found, parts[0][rank] / std):
                raise Hint(f"{case}: mean and std depend on x, too: gradient / std is only a part of it")
            if _near(found, own[rank]):
                raise Hint(
                    f"{case}: rank {rank} takes the means over its own rows; x was normalised over all ranks'"
                )
            if _near(found, even[rank]):
                raise Hint(
                    f"{case}: rank {rank} takes the mean of the ranks' means, but they have unequal rows"
                )
            error = float((found - right[rank]).abs().max())
            raise Hint(f"{case}: the largest error on rank {rank} is {error:.1e}")
        most, enough = max(put_in for _, put_in in ranks), 8 * (2 * n_features + 1)
        if most > enough:
            raise Hint(
                f"{case}: right, but a rank puts in {most} bytes; two sums a feature and its number of rows are "
                f"{enough}"
            )
    return "one process's gradient to 1e-12, for two sums a feature"


def _normalised(n_rows, n_features):
    generator = torch.Generator().manual_seed(n_rows)
    x = torch.randn(n_rows, n_features, generator=generator, dtype=torch.float64).requires_grad_()
    std = (x.var(dim=0, unbiased=False) + 1e-5).sqrt()
    normalised = (x - x.mean(dim=0)) / std
    gradient = torch.randn(n_rows, n_features, generator=generator, dtype=torch.float64) + 1
    normalised.backward(gradient)
    return gradient, normalised.detach(), std.detach(), x.grad


def _with_means_of(parts, std, whose):
    """What the two natural mistakes give: means over a rank's own rows, or the plain mean of the ranks' means."""
    pairs = list(zip(*parts, strict=True))
    means = [torch.stack([g.mean(dim=0), (g * x).mean(dim=0)]) if len(g) else None for g, x in pairs]
    held = [mean if mean is not None else torch.zeros(2, len(std), dtype=std.dtype) for mean in means]
    average = sum(held) / len(held)
    used = held if whose == "own" else [average] * len(held)
    return [(g - m[0] - x * m[1]) / std for (g, x), m in zip(pairs, used, strict=True)]


def _near(found, other):
    return found.shape == other.shape and bool(((found - other).abs() <= 1e-12).all())


def _backward_on_a_rank(local_rank, function, gradients, normalised, std):
    with count_bytes() as traffic:
        found = function(gradients[local_rank].clone(), normalised[local_rank].clone(), std.clone())
    return found, traffic.put_in


def _run(on_a_rank, world_size, *args):
    try:
        return on_ranks(world_size, on_a_rank, *args, timeout=WAIT_SECONDS)
    except ddl.RankError as error:
        if re.search("did not finish within|[Tt]imed out", str(error)):  # the launcher's words, or gloo's
            raise Hint(
                "your ranks wait for each other: start sending before you receive, and let every rank make as "
                "many calls as its peers expect"
            ) from None
        if "SIGABRT" in str(error):
            raise Hint("gloo gave up: a message had another size than its receiver expected") from None
        raise
