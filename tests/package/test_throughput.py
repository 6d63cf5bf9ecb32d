"""Samples and tokens of the whole mesh per second, by a clock of the test's own."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ranks import launch, trainer_of
from torch import nn
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl import throughput


def measured(local_rank):
    ids = torch.randint(10, (10, 8), generator=torch.Generator().manual_seed(0))
    loader = ddl.auto_dataloader(TensorDataset(ids, ids[:, 0]), batch_size=4)  # 4, 4 and 2 rows
    model = ddl.auto_model(nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(32, 10)))
    trainer = trainer_of(model, F.cross_entropy)
    clock = itertools.count(step=2.0)
    throughput.time = type("Clock", (), {"perf_counter": staticmethod(lambda: next(clock))})  # 2 s an iteration
    ddl.Throughput(flops=3e6, peak_flops=1e6, window=2).attach(trainer)
    seen = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(dict(trainer.state.metrics)))
    trainer.run(loader, max_epochs=2)
    return seen


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_rows_of_all_dp_ranks_count_once(axes):
    for seen in launch(axes, measured):
        assert seen[0] == {}  # one time is no duration
        assert [metrics["samples/s"] for metrics in seen[1:]] == [2.0, 1.5, 1.5, 2.0, 1.5]
        assert seen[1]["tokens/s"] == 16.0
        assert seen[1]["mfu"] == pytest.approx(6.0 / math.prod(axes.values()))


def refused_with_throughput(local_rank):
    """Whether steps by hand on uneven rows are refused beside a Throughput, which reads their numbers."""
    loader = ddl.auto_dataloader(TensorDataset(torch.ones(5, 3)), batch_size=4)  # 4 rows, and 1 for two ranks
    model = ddl.auto_model(nn.Linear(3, 1))
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def update(engine, batch):
        optimizer.zero_grad()
        model(batch[0]).sum().backward()
        optimizer.step()

    engine = Engine(update)
    ddl.Throughput().attach(engine)
    with pytest.raises(ValueError, match="counts each row once"):
        engine.run(loader)
    return True


def test_it_leaves_the_check_of_uneven_rows():
    assert launch({"dp": 2}, refused_with_throughput) == [True, True]


def test_wrong_arguments():
    with pytest.raises(ValueError, match="flops and peak_flops go together"):
        ddl.Throughput(flops=1e9)
    with pytest.raises(ValueError, match="window should be a positive integer, but given 0"):
        ddl.Throughput(window=0)
