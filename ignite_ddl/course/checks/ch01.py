"""The checks of chapter 01: a sum in two steps over nodes, and parts of different lengths gathered."""

import torch

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import counted_on_ranks, try_on_ranks
from ignite_ddl.lab.bytes import count_bytes

WAIT_SECONDS = 20  # what is right takes well under one
_CURE = (
    "all ranks of a group must make the same calls on it, and all ranks of the world must make the same groups, in "
    "the same order"
)


@exercise
def two_level_sum(function):
    """The sum on every rank, while a node's ranks together put one tensor into what leaves the node."""
    # In one launch: who makes other groups than its peers is caught by the next case.
    cases, world_size = (3, 2, 6), 6  # ranks per node
    results = try_on_ranks(world_size, _sums_on_a_rank, function, cases, timeout=WAIT_SECONDS, cure=_CURE)
    for ranks_per_node, *ranks in zip(cases, *results, strict=True):
        n_nodes = world_size // ranks_per_node
        case = f"{n_nodes} node{'s' * (n_nodes > 1)} of {ranks_per_node} ranks"
        size, sums = 8 * ranks_per_node, [total for total, _ in ranks]
        true = sum(_numbers(rank, ranks_per_node) for rank in range(world_size))
        for rank, total in enumerate(sums):
            if not isinstance(total, torch.Tensor) or total.shape != true.shape or total.dtype != true.dtype:
                raise Hint(f"{case}: rank {rank} should return a float64 tensor of shape {tuple(true.shape)}")
        if wrong := [rank for rank, total in enumerate(sums) if not torch.equal(total, true)]:
            raise Hint(_which_sum(case, wrong[0], sums[wrong[0]], true, ranks_per_node))
        for node in range(n_nodes):
            mine = ranks[node * ranks_per_node : (node + 1) * ranks_per_node]
            leaving = sum(left for _, left in mine)
            if leaving > size:
                raise Hint(
                    f"{case}: right, but the ranks of node {node} together put {leaving} bytes into collectives "
                    f"that leave the node; {size}, one rank's share, are enough"
                )
    return "the sum on every rank, and each node sends its own sum out once"


def _which_sum(case, rank, total, true, ranks_per_node):
    place = int((total != true).nonzero()[0])
    told = f"{case}: number {place} on rank {rank} should be {true[place]:g}, it is {total[place]:g}"
    node = rank // ranks_per_node
    own = range(node * ranks_per_node, (node + 1) * ranks_per_node)
    if torch.equal(total, _numbers(rank, ranks_per_node)):
        return f"{told}: what it put in"
    if torch.equal(total, sum(_numbers(other, ranks_per_node) for other in own)):
        return f"{told}: the sum of its own node"
    if torch.equal(total, ranks_per_node * true):
        return f"{told}: every node's sum is in it {ranks_per_node} times"
    return told


def _sums_on_a_rank(rank, function, cases):
    return [_sum_on_a_rank(rank, function, ranks_per_node) for ranks_per_node in cases]


def _sum_on_a_rank(rank, function, ranks_per_node):
    with count_bytes() as traffic:
        total = function(_numbers(rank, ranks_per_node), ranks_per_node)

    def leaves(call):
        ranks = call.ranks if call.peer is None else (rank, call.peer)
        return len({other // ranks_per_node for other in ranks}) > 1

    return total, sum(call.put_in for call in traffic.calls if leaves(call))


def _numbers(rank, ranks_per_node):
    """What a rank puts in: other numbers, and another length, in each case."""
    return (10.0**rank) * torch.arange(1, ranks_per_node + 1, dtype=torch.float64)


@exercise(
    cases=((3, 3, 2, 2), (1, 0, 6, 2), (4, 4, 4, 4), (0, 0, 0, 1)),
    about=lambda *lengths: f"parts of {', '.join(map(str, lengths[:-1]))} and {lengths[-1]} numbers",
    right="every rank has every part, and puts in its length and one padded part",
)
def gather_parts(function, *lengths):
    """All parts on every rank, for a length and one padded part handed in."""
    parts = [_part(rank, length) for rank, length in enumerate(lengths)]
    ranks = counted_on_ranks(function, [(part,) for part in parts], WAIT_SECONDS, cure=_CURE)
    for rank, (found, _) in enumerate(ranks):
        lists = isinstance(found, list | tuple) and all(isinstance(part, torch.Tensor) for part in found)
        if not lists or len(found) != len(parts):
            raise Hint(f"rank {rank} should return a list of {len(parts)} tensors, one a rank")
        for source, (mine, part) in enumerate(zip(found, parts, strict=True)):
            where = f"on rank {rank} the part of rank {source}"
            if mine.shape != part.shape:
                raise Hint(f"{where} has shape {tuple(mine.shape)} instead of {tuple(part.shape)}")
            if mine.dtype != part.dtype:
                raise Hint(f"{where} has type {mine.dtype} instead of {part.dtype}")
            if not torch.equal(mine, part):
                raise Hint(f"{where} holds other numbers than rank {source} put in")
    most, enough = max(traffic.put_in for _, traffic in ranks), 8 + 4 * max(lengths)
    if most > enough:
        raise Hint(
            f"right, but a rank puts in {most} bytes; its length (8 bytes) and a part padded to the "
            f"longest (4 bytes a number) are {enough}"
        )


def _part(rank, length):
    """Whole numbers with a zero at the end, which must not be taken for padding."""
    numbers = torch.arange(length, 0, -1, dtype=torch.float32) + 10 * rank
    if length > 1:
        numbers[-1] = 0
    return numbers
