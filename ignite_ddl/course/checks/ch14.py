"""The checks of chapter 14: a clipped ZeRO-1 step, and a forward pass of stage 3 that gathers ahead."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import counted_on_ranks, try_on_ranks

WAIT_SECONDS = 20  # what is right takes well under one


@exercise(
    cases=((4, 12, 1.0), (3, 6, 0.25), (4, 8, 1e6)),
    about="{world_size} ranks, {length} weights, max_norm {max_norm:g}",
    right="clipped by the norm of all shards, for a ring's bytes and one number",
)
def clipped_step(function, world_size, length, max_norm):
    """SGD with the clipped mean gradient, the weights right on every rank, for a ring's bytes and one number."""
    start, gradients = _vector(length, 0), [_vector(length, 1 + rank) for rank in range(world_size)]
    given = [(function, start, gradient, max_norm) for gradient in gradients]
    ranks = counted_on_ranks(_updated, given, WAIT_SECONDS)
    mean = sum(gradients) / world_size
    right = start - 0.5 * _clip(mean, max_norm)
    torchs = start - 0.5 * _clip(mean, max_norm, mean.norm() + 1e-6)  # as clip_grad_norm_ has it
    for rank, (weights, _) in enumerate(ranks):
        if weights.shape != right.shape:
            raise Hint(f"rank {rank}'s weights should keep their shape, ({length},)")
        if not (_near(weights, right) or _near(weights, torchs)):
            raise Hint(_what_went_wrong(rank, weights, start, gradients, max_norm))
    if any(call.put_in >= 8 * length for call in ranks[0][1].of("all_reduce").calls):
        raise Hint(
            "right, but an all-reduce leaves the whole mean gradient on every rank; let each get and update its shard"
        )
    enough = 2 * (world_size - 1) * 8 * length // world_size + 2 * (world_size - 1) * 8 // world_size
    for rank, (_, traffic) in enumerate(ranks):
        sent = sum(map(_sent_in_a_ring, traffic.calls))
        if sent > enough + 8 * world_size:  # a number as an all-gather, or in another precision, is as well
            raise Hint(
                f"right, but your rank {rank} sends {sent} bytes round the ring, a reduce-scatter, an "
                f"all-gather and one number are {enough}"
            )


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
        "rank {rank} clips by the norm of its shard; the norm is that of all shards together": start - 0.5 * shards,
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


def _sent_in_a_ring(call):
    n_ranks = len(call.ranks)
    return (2 if call.op == "all_reduce" else 1) * max(call.put_in, call.got) * (n_ranks - 1) // n_ranks


def _updated(function, weights, gradient, max_norm):
    function(weights, gradient, 0.5, max_norm)
    return weights


@exercise(
    cases=((2, 3, 4), (4, 5, 8), (2, 1, 2)),
    about=lambda world_size, n_layers, width: (
        f"{world_size} ranks, {n_layers} layers" if n_layers > 1 else f"{world_size} ranks, one layer"
    ),
    right="each layer arrives while the one before it multiplies",
)
def forward_ahead(function, world_size, n_layers, width):
    """The outputs of whole layers, each gathered while the one before it multiplies, and never two ahead."""
    right = _vector(3 * width, 0).reshape(3, width)
    for layer in range(n_layers):
        right = (right @ _whole(layer, width).T).tanh()
    ranks = try_on_ranks(world_size, _ahead_on_a_rank, function, n_layers, width, timeout=WAIT_SECONDS)
    for rank, (y, events) in enumerate(ranks):
        if y.shape != right.shape:
            raise Hint(f"return all {width} features of the 3 rows, not {tuple(y.shape)}")
        if not _near(y, right):
            raise Hint(f"the outputs of rank {rank} are wrong; gather rows in rank order, and wait")
        if events.count("all_gather") != n_layers:
            raise Hint(f"one gather a layer is enough, rank {rank} calls {events.count('all_gather')}")
        called = outputs = 0
        for event in events:
            multiplied = outputs // right.numel()  # layers: one may take several products, part by part
            called += event == "all_gather"
            if called > multiplied + 2:
                raise Hint(
                    f"the gather of layer {called - 1} is called before layer {multiplied} has multiplied: "
                    "three whole layers at once"
                )
            if event != "all_gather":
                if called < min(multiplied + 2, n_layers):
                    raise Hint(
                        f"right, but while layer {multiplied} multiplies, the gather of layer {called} "
                        "has not been called"
                    )
                outputs += event


def _whole(layer, width):
    return _vector(width * width, 1 + layer).reshape(width, width)


_PRODUCTS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")}


class _Events(TorchDispatchMode):
    """The gathers of this rank, and of each product the number of outputs, in order."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.events.append("all_gather")
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS:
            self.events.append(result.numel())
        return result


def _ahead_on_a_rank(local_rank, function, n_layers, width):
    x, n = _vector(3 * width, 0).reshape(3, width), dist.get_world_size()
    shards = [_whole(layer, width).chunk(n)[local_rank] for layer in range(n_layers)]
    with _Events() as log:
        y = function(x, shards)
    return y, log.events
