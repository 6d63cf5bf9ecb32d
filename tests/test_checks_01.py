"""The exercises of chapter 01: what is right passes, and each natural mistake gets a hint that helps."""

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist

from ignite_ddl.course.checks import ch01 as checks


def said(capsys) -> str:
    out, err = capsys.readouterr()
    assert err == "" or "gloo" in err, "only gloo's own last words"
    assert out.count("\n") == 1, "one line"
    return out[:-1]


# --- a sum in two steps --------------------------------------------------------------------------------


def groups(ranks_per_node):
    firsts = list(range(0, idist.get_world_size(), ranks_per_node))
    nodes = [idist.new_group(list(range(first, first + ranks_per_node))) for first in firsts]
    return *divmod(idist.get_rank(), ranks_per_node), firsts, nodes, idist.new_group(firsts)


def with_broadcast(x, ranks_per_node):
    node, local_rank, firsts, nodes, leaders = groups(ranks_per_node)
    total = idist.all_reduce(x.clone(), group=nodes[node])
    if local_rank == 0:
        total = idist.all_reduce(total, group=leaders)
    dist.broadcast(total, src=firsts[node], group=nodes[node])
    return total


def with_zeros(x, ranks_per_node):
    """idist alone: a broadcast is a sum to which the others add zeros. It overwrites x, which is no harm."""
    node, local_rank, _, nodes, leaders = groups(ranks_per_node)
    total = idist.all_reduce(x, group=nodes[node])
    total = idist.all_reduce(total, group=leaders) if local_rank == 0 else torch.zeros_like(x)
    return idist.all_reduce(total, group=nodes[node])


@pytest.mark.parametrize("function", [with_broadcast, with_zeros])
def test_sum_right(function, capsys):
    assert checks.two_level_sum(function)
    assert said(capsys).startswith("right: the sum on every rank")


def flat(x, ranks_per_node):
    return idist.all_reduce(x)


def own_node_only(x, ranks_per_node):
    node, _, _, nodes, _ = groups(ranks_per_node)
    return idist.all_reduce(x, group=nodes[node])


def leaders_only(x, ranks_per_node):
    node, local_rank, _, nodes, leaders = groups(ranks_per_node)
    total = idist.all_reduce(x, group=nodes[node])
    return idist.all_reduce(total, group=leaders) if local_rank == 0 else total


def everybody_crosses(x, ranks_per_node):
    """Right numbers: each local rank sums with its like on the other nodes."""
    node, local_rank, firsts, nodes, _ = groups(ranks_per_node)
    total = idist.all_reduce(x, group=nodes[node])
    rails = [idist.new_group([first + local for first in firsts]) for local in range(ranks_per_node)]
    return idist.all_reduce(total, group=rails[local_rank])


def counted_again(x, ranks_per_node):
    node, _, _, nodes, _ = groups(ranks_per_node)
    return idist.all_reduce(idist.all_reduce(x, group=nodes[node]))  # every rank brings its node's sum


def stub(x, ranks_per_node):
    raise NotImplementedError


WRONG_SUMS = [
    (stub, "write the body of stub"),
    (
        flat,
        "2 nodes of 3 ranks: right, but the ranks of node 0 together put 72 bytes into collectives that leave the "
        "node; 24, one rank's share, are enough",
    ),
    (everybody_crosses, "put 72 bytes into collectives that leave the node"),
    (own_node_only, "number 0 on rank 0 should be 111111, it is 111: the sum of its own node"),
    (leaders_only, "number 0 on rank 1 should be 111111, it is 111: the sum of its own node"),
    (lambda x, ranks_per_node: x, "number 0 on rank 0 should be 111111, it is 1: what it put in"),
    (counted_again, "it is 333333: every node's sum is in it 3 times"),
    (
        lambda x, ranks_per_node: torch.full_like(x, 111111),
        "number 1 on rank 0 should be 222222, it is 111111",
    ),
    (lambda x, ranks_per_node: x.sum(), "rank 0 should return a float64 tensor of shape (3,)"),
    (
        lambda x, ranks_per_node: with_zeros(x, ranks_per_node).float(),
        "rank 0 should return a float64 tensor",
    ),
    (lambda x, ranks_per_node: None, "rank 0 should return a float64 tensor of shape (3,)"),
]


@pytest.mark.parametrize(("function", "hint"), WRONG_SUMS, ids=lambda value: getattr(value, "__name__", ""))
def test_sum_wrong(function, hint, capsys):
    assert not checks.two_level_sum(function)
    line = said(capsys)
    assert line.startswith("not yet: ")
    assert hint.rstrip("\n") in line


def test_groups_of_ones_own_make_the_ranks_wait(capsys, monkeypatch):
    def own_group_only(x, ranks_per_node):
        node, local_rank = divmod(idist.get_rank(), ranks_per_node)
        if local_rank == 0:
            idist.new_group([0, ranks_per_node])
        return idist.all_reduce(x)

    monkeypatch.setattr(checks, "WAIT_SECONDS", 3)
    assert not checks.two_level_sum(own_group_only)
    assert "all ranks of the world must make the same groups, in the same order" in said(capsys)


# --- parts of different lengths ------------------------------------------------------------------------


def padded(part):
    lengths = idist.all_gather(len(part))
    room = torch.zeros(max(lengths), dtype=part.dtype)
    room[: len(part)] = part
    rows = idist.all_gather(room).reshape(len(lengths), -1)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def broadcasts(part):
    """Each rank broadcasts its part to receivers that know its length: fewer bytes still."""
    lengths = idist.all_gather(len(part))
    rooms = [torch.zeros(length, dtype=part.dtype) for length in lengths]
    rooms[idist.get_rank()].copy_(part)
    for source, room in enumerate(rooms):
        dist.broadcast(room, src=source)
    return tuple(rooms)


@pytest.mark.parametrize("function", [padded, broadcasts])
def test_gather_right(function, capsys):
    assert checks.gather_parts(function)
    assert said(capsys).startswith("right: every rank has every part")


def with_padding(part):
    lengths = idist.all_gather(len(part))
    room = torch.zeros(max(lengths), dtype=part.dtype)
    room[: len(part)] = part
    return list(idist.all_gather(room).reshape(len(lengths), -1))


def without_zeros(part):
    return [row[row != 0] for row in with_padding(part)]


def in_one_piece(part):
    return torch.cat(padded(part))


def roomy(part):
    lengths = idist.all_gather(len(part))
    room = torch.zeros(100, dtype=part.dtype)
    room[: len(part)] = part
    rows = idist.all_gather(room).reshape(len(lengths), -1)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def by_object(part):
    return [found[0] for found in idist.all_gather([part])]


WRONG_PARTS = [
    (lambda part: [part] * 4, "on rank 0 the part of rank 1 holds other numbers than rank 1 put in"),
    (lambda part: None, "rank 0 should return a list of 4 tensors, one a rank"),
    (in_one_piece, "rank 0 should return a list of 4 tensors, one a rank"),
    (with_padding, "on rank 0 the part of rank 2 has shape (3,) instead of (2,)"),
    (without_zeros, "on rank 0 the part of rank 0 has shape (2,) instead of (3,)"),
    (lambda part: [row.double() for row in padded(part)], "has type torch.float64 instead of torch.float32"),
    (roomy, "right, but a rank puts in 408 bytes; its length (8 bytes) and a part padded to the longest"),
    (by_object, "(4 bytes a number) are 20"),
    (lambda part: [torch.zeros(length) for length in (3, 3, 2, 2)], "the part of rank 0 holds other numbers"),
]


@pytest.mark.parametrize(("function", "hint"), WRONG_PARTS, ids=lambda value: getattr(value, "__name__", ""))
def test_gather_wrong(function, hint, capsys):
    assert not checks.gather_parts(function)
    line = said(capsys)
    assert line.startswith("not yet: ")
    assert hint in line


def test_unequal_tensors_in_one_collective(capsys):
    assert not checks.gather_parts(lambda part: list(idist.all_gather(part)))
    assert "not yet: gloo gave up: the ranks handed tensors of different sizes" in capsys.readouterr().out
