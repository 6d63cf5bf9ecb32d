"""Layers and lines that take the time they are told to."""

import time

import pytest
import torch

import ignite_ddl as ddl
from ignite_ddl.course.delay import Delay
from ignite_ddl.course.line import SlowLine
from ignite_ddl.lab import cost


def seconds_of(act):
    start = time.perf_counter()
    result = act()
    return time.perf_counter() - start, result


def test_a_delay_takes_its_time_forward_and_backward_and_changes_nothing():
    delay = Delay(forward=0.02, backward=0.03, backward_weight=0.04)
    x, gradient = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)
    forward, y = seconds_of(lambda: delay(x))
    backward, _ = seconds_of(lambda: y.backward(gradient))
    assert forward >= 0.02
    assert backward >= 0.03 + 0.04
    assert torch.equal(y, x)
    assert torch.equal(x.grad, gradient)
    assert delay.weight.grad.item() == 0
    parts = [seconds_of(lambda t=t: torch.autograd.grad(delay(x).sum(), t))[0] for t in (x, delay.weight)]
    assert parts[0] >= 0.02 + 0.03
    assert parts[1] >= 0.02 + 0.04
    with torch.no_grad():
        assert delay(x) is x


def test_a_delay_may_be_per_row_and_has_a_weight_only_where_that_takes_time():
    delay = Delay(forward=0.01, per_row=True)
    start = time.perf_counter()
    delay(torch.zeros(4, 2))
    assert time.perf_counter() - start >= 0.04
    assert list(delay.parameters()) == []
    assert repr(delay) == "Delay(forward=0.01, backward=0, backward_weight=0, per_row=True)"
    with pytest.raises(ValueError, match="backward is -1; it has to be a time of at least 0 seconds"):
        Delay(backward=-1)


def two_steps(local_rank, latency):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
    replica = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=256 / 2**20)
    line = SlowLine(cost.Link(latency, 1e9))
    replica.register_comm_hook(line, SlowLine.average)
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
