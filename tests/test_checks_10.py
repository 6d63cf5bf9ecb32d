"""The exercises of chapter 10: what is right passes, and each natural mistake gets a hint that helps."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checking import said, stub

import ignite_ddl as ddl
from ignite_ddl import course
from ignite_ddl.course.checks import ch10 as checks
from ignite_ddl.lab import cost

# --- buckets --------------------------------------------------------------------------------------------


def test_the_right_buckets_pass(capsys):
    assert checks.buckets(checks._buckets)
    assert said(capsys).startswith("right: ")


@pytest.mark.parametrize("sizes", [[40, 12, 40, 12, 40, 12], [200, 12, 32, 12], [8] * 7, [4]])
@pytest.mark.parametrize(("cap", "first_cap"), [(50, 50), (60, 10), (20, 8), (1000, 1000)])
def test_the_checks_buckets_are_torchs(sizes, cap, first_cap):
    tensors = [torch.zeros(size // 4) for size in reversed(sizes)]
    torchs, _ = dist._compute_bucket_assignment_by_size(tensors, [first_cap, cap])
    ours = checks._buckets(sizes, cap, first_cap)
    assert ours == [[len(sizes) - 1 - index for index in bucket] for bucket in torchs]
    assert [sum(sizes[i] for i in bucket) for bucket in ours] == cost.ddp_buckets(sizes, cap, first_cap)


WRONG_BUCKETS = {
    "write the body": stub,
    "list of lists": lambda sizes, cap, first_cap: [0],
    "backward goes from the last": lambda sizes, cap, first_cap: [list(range(len(sizes)))],
    "is in no bucket": lambda sizes, cap, first_cap: checks._buckets(sizes, cap, first_cap)[:-1],
    "a cap of its own": lambda sizes, cap, first_cap: checks._buckets(sizes, cap, cap),
    "its cap or more": checks._never_above,
    "is empty": lambda sizes, cap, first_cap: [*checks._buckets(sizes, cap, first_cap), []],
    "your buckets hold": lambda sizes, cap, first_cap: 2 * checks._buckets(sizes, cap, first_cap),
    "bucket by bucket": lambda sizes, cap, first_cap: [
        b[::-1] for b in checks._buckets(sizes, cap, first_cap)
    ],
    "should hold": lambda sizes, cap, first_cap: [[i] for i in reversed(range(len(sizes)))],
}


@pytest.mark.parametrize("hint", WRONG_BUCKETS)
def test_wrong_buckets_get_a_hint(hint, capsys):
    assert not checks.buckets(WRONG_BUCKETS[hint])
    message = said(capsys)
    assert message.startswith("not yet: ")
    assert hint in message


# --- accumulation ---------------------------------------------------------------------------------------


def accumulate(replica, micro_batches, weigh="rows", last_inside=False, forward_outside=False):
    n_rows = sum(len(x) for x, _ in micro_batches)
    for place, (x, y) in enumerate(micro_batches):
        share = {"rows": len(x) / n_rows, "alike": 1 / len(micro_batches), "added": 1}[weigh]
        inside = last_inside or place + 1 < len(micro_batches)
        with contextlib.ExitStack() as stack:
            loss = F.cross_entropy(replica(x), y) * share if forward_outside else None
            if inside:
                stack.enter_context(replica.no_sync())
            loss = F.cross_entropy(replica(x), y) * share if loss is None else loss
            loss.backward()


def test_the_right_accumulation_passes(capsys):
    assert checks.accumulate(accumulate)
    assert said(capsys).startswith("right: ")


WRONG_SUMS = {
    "write the body": stub,
    "has no gradient": lambda replica, micro_batches: None,
    "sends nothing": lambda r, m: accumulate(r, m, last_inside=True),
    "add up": lambda r, m: accumulate(r, m, weigh="added"),
    "weight by rows": lambda r, m: accumulate(r, m, weigh="alike"),
    "right, but 3 all-reduces": lambda r, m: accumulate(r, m, forward_outside=True),
    "right, but a forward pass of 12 rows; the largest micro-batch has 4": lambda r, m: accumulate(
        r, [tuple(torch.cat(parts) for parts in zip(*m, strict=True))]
    ),
    "off that of the big batch": lambda r, m: accumulate(r, m[-1:]),
}


@pytest.mark.parametrize("hint", WRONG_SUMS)
def test_wrong_accumulation_gets_a_hint(hint, capsys):
    assert not checks.accumulate(WRONG_SUMS[hint])
    message = said(capsys)
    assert message.startswith("not yet: ")
    assert hint in message


# --- the slow line --------------------------------------------------------------------------------------


def two_steps(local_rank, latency):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
    replica = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=256 / 2**20)
    line = course.SlowLine(cost.Link(latency, 1e9))
    replica.register_comm_hook(line, course.SlowLine.average)
    for _ in range(2):
        line.records.clear()
        replica.zero_grad()
        replica(torch.full((1, 8), 1.0 + local_rank)).sum().backward()
    own = [torch.full((1, 8), 1.0 + rank) for rank in range(2)]
    model.zero_grad()
    (sum(model(x).sum() for x in own) / 2).backward()
    right = torch.cat([parameter.grad for parameter in model.parameters()])
    replica.zero_grad()
    replica(own[local_rank]).sum().backward()
    found = torch.cat([parameter.grad for parameter in model.parameters()])
    return float((found - right).abs().max()), line.records


def test_a_slow_line_averages_and_carries_one_bucket_after_the_other():
    with ddl.Parallel(backend="gloo", nproc_per_node=2, threads_per_rank=1, timeout=30) as parallel:
        ranks = parallel.run(two_steps, 0.02)
    for error, records in ranks:
        assert error < 1e-6
        assert [record.name for record in records] == ["bucket 0", "bucket 1"] * 2
        assert all(record.seconds >= 0.04 for record in records), "two messages of a ring of two"
        assert all(a.end <= b.start for a, b in zip(records, records[1:], strict=False))
