"""Ranks that should hold the same: in sync after training on every mesh; one number changed on one rank is found. And
those that should make the same calls.
"""

import math
import os
import pickle
import subprocess
import sys

import ignite
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from ranks import failing, launch, on_each_rank, time_to_start, trainer_of
from torch import nn
from torch.distributed.tensor import DTensor

import ignite_ddl as ddl
from ignite_ddl.checks.replicas import check_replicas
from ignite_ddl.diagnose.calls import calls_counted, recorded_calls
from ignite_ddl.diagnose.report import unlike_calls

PLAN = {"0": ddl.Column(), "2": ddl.Row()}


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6)]
    layers[5].weight = layers[4].weight
    return nn.Sequential(*layers)


def trained_then_changed(local_rank, options, where):
    """What is found after two steps, and after rank 1 has added to one of its numbers, for each name of ``where``."""
    model = ddl.auto_model(net(), **options)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(ddl.get_mesh().dp_rank))
    trainer_of(model).run([(x, x)] * 2)
    found = [ddl.check_in_sync(model)]
    for name in where:
        state = dict((getattr(model, "module", model)).named_parameters())
        if ddl.get_mesh().rank == 1 and name in state:
            local = state[name].data
            (local.to_local() if isinstance(local, DTensor) else local).view(-1)[-1] += 0.25
        found.append(ddl.check_in_sync(model))
    return [[(one.name, one.ranks, round(one.difference, 6)) for one in each] for each in found]


@pytest.mark.parametrize(
    ("axes", "options", "changes"),
    [
        ({"pp": 2}, {}, {}),
        pytest.param({"dp": 2, "pp": 2, "tp": 2}, {"tensor_plan": PLAN}, {}, marks=pytest.mark.slow),
        ({"dp": 2}, {}, {"0.weight": ((0,), (1,))}),
        ({"dp": 2}, {"shard": True}, {"0.weight": None}),  # each rank holds another part
        ({"tp": 2}, {"tensor_plan": PLAN}, {"0.weight": None, "3.weight": ((0,), (1,))}),  # 3 is whole on each
        # The other copy of rank 1's part of 0.weight is on rank 3.
        ({"dp": 2, "tp": 2}, {"tensor_plan": PLAN}, {"0.weight": ((1,), (3,)), "2.bias": ((0, 2, 3), (1,))}),
    ],
    ids=["pp2", "dp2 x pp2 x tp2", "dp2", "dp2 shard", "tp2", "dp2 x tp2"],
)
def test_what_has_been_trained_is_in_sync_and_a_changed_number_is_found(axes, options, changes):
    expected = [[]]
    for name, ranks in changes.items():
        expected.append(expected[-1] + [(name, ranks, 0.25)] * (ranks is not None))
    assert launch(axes, trained_then_changed, options, list(changes)) == [expected] * math.prod(axes.values())


@on_each_rank(pp=2)
def test_a_weight_that_stages_share_is_compared(local_rank):
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Tanh(), nn.Linear(6, 6)]
    layers[3].weight = layers[0].weight
    model = ddl.auto_model(nn.Sequential(*layers), split=[2, 2])
    assert ddl.check_in_sync(model) == []
    if local_rank == 1:
        next(p for p in model.parameters() if p.ndim == 2).data[0, 0] = torch.nan
    assert ddl.check_in_sync(model) == [ddl.OutOfSync("0.weight", ((0,), (1,)), torch.inf)]


@on_each_rank(pp=2, dp=2)
def test_a_difference_on_one_stage_is_told_to_all(local_rank):
    """Ranks that have found none would wait for the others, where stages share a weight."""
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    layers[4].weight = layers[0].weight
    model = ddl.auto_model(nn.Sequential(*layers), split=[2, 3])
    check_replicas(model)
    if local_rank == 1:
        next(p for p in model.parameters() if p.ndim == 1).data[0] += 1
    with pytest.raises(ValueError, match=r"'0.bias' should be the same on all dp ranks"):
        check_replicas(model)


@on_each_rank(dp=2)
def test_numbers_that_have_changed_places_are_found_with_and_without_a_trainer(local_rank):
    """Their sum, and that of their absolute values, is what it was."""
    model = ddl.auto_model(net())
    check_replicas(model)
    if local_rank == 1:
        weight = model.module[0].weight.data
        weight.copy_(weight.flip(0))
    assert [one.name for one in ddl.check_in_sync(model)] == ["0.weight"]
    with pytest.raises(ValueError, match=r"'0.weight' should be the same on all dp ranks"):
        check_replicas(model)


@on_each_rank(dp=2)
def test_a_buffer_that_is_longer_on_a_rank_is_found(local_rank):
    model = ddl.auto_model(net())
    model.module.register_buffer("seen", torch.zeros(3 + local_rank))
    assert ddl.check_in_sync(model) == [ddl.OutOfSync("seen", ((0,), (1,)), torch.inf)]


def test_one_process_is_in_sync_with_itself():
    assert ddl.check_in_sync(net()) == []


def order_of_calls(local_rank, swap, sizes):
    dist.all_reduce(torch.ones(1))
    if swap and local_rank == 1:
        dist.all_reduce(torch.ones(sizes[1]))
        dist.all_reduce(torch.ones(sizes[0]))
    else:
        dist.all_reduce(torch.ones(sizes[0]))
        dist.all_reduce(torch.ones(sizes[1]))
    alone = dist.new_group([0])
    if local_rank == 0:
        dist.all_reduce(torch.ones(1), group=alone)
    return ddl.check_same_calls()


@pytest.mark.parametrize(("swap", "sizes", "differ_in"), [(True, (1, 1), ["line"] * 2), (False, (1, 2), [])])
def test_calls_in_another_order_are_found(swap, sizes, differ_in):
    found, same = launch({"dp": 2}, order_of_calls, swap, sizes)
    assert found == same
    assert [one.differ_in for one in found] == differ_in
    if found:
        first = found[0]
        lines = [call.frame[1] for call in first.calls]
        assert [call.rank for call in first.calls] == [0, 1]
        assert lines[0] == lines[1] + 3
        assert f"rank 0: all_reduce Float[1] at test_diagnose.py:{lines[0]} in order_of_calls" in str(first)


def test_what_differs_between_ranks_is_said():
    """By hand: gloo ends a rank that gets other sizes than it expects."""
    call = {"group": "0", "ranks": [0, 1], "number": 3, "operation": "all_reduce", "sizes": "Float[1]"}
    call |= {"done": True, "frames": [("train.py", 1, "step")]}
    for change, differ_in in (
        ({"sizes": "Float[2]"}, "sizes"),
        ({"operation": "barrier", "sizes": ""}, "operation"),
        ({"frames": [("train.py", 2, "step")]}, "line"),
        ({"group": "1"}, None),
        ({"number": 4}, None),
    ):
        found = [one.differ_in for one in unlike_calls({0: [call], 1: [call | change]})]
        assert found == [differ_in] * (differ_in is not None)
    uneven = call | {"operation": "gather"}
    assert unlike_calls({0: [uneven], 1: [uneven | {"sizes": "Float[2]"}]}) == []


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x)


def buffers_changed(local_rank, options):
    """What is found after a step on other rows on each dp rank, and as the last rank changes buffer after buffer."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), Buffered(), nn.BatchNorm1d(6)]
    model = ddl.auto_model(nn.Sequential(*layers), **options)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(ddl.get_mesh().dp_rank))
    trainer_of(model).run([(x, x)])
    found = [ddl.check_in_sync(model)]
    for name in ("table", "mask", "running_mean", "num_batches_tracked"):
        for own, buffer in model.named_buffers():
            if ddl.get_mesh().rank == ddl.get_mesh().world_size - 1 and own.endswith(name):
                buffer.view(-1)[-1] += 1
        found.append(ddl.check_in_sync(model))
    return [[(one.name.rpartition(".")[2], one.ranks) for one in each] for each in found]


@pytest.mark.parametrize(
    ("axes", "options", "statistics"),
    [
        ({"dp": 2}, {}, False),
        ({"dp": 2}, {"shard": True}, False),
        ({"tp": 2}, {"tensor_plan": PLAN}, True),
        ({"dp": 2, "pp": 2}, {"split": [1, 4]}, False),
    ],
    ids=["dp2", "dp2 shard", "tp2", "dp2 x pp2"],
)
def test_buffers_that_should_be_equal_are_compared(axes, options, statistics):
    expected, known, n = [[]], [], math.prod(axes.values())
    for name in ("table", "mask", "running_mean", "num_batches_tracked"):
        if name in ("table", "mask") or statistics:
            known = [*known, (name, ((n - 2,), (n - 1,)))]
        expected.append(sorted(known))
    found = launch(axes, buffers_changed, options)
    assert [[sorted(each) for each in rank] for rank in found] == [expected] * math.prod(axes.values())


def on_rank_0_only(rank, folder, made):
    trainer = ddl.MeshEngine(lambda *_: dist.barrier())
    model = ddl.auto_model(nn.Linear(1, 1))
    handler = ddl.Checkpoint({"model": model}, folder) if rank == 0 or made == "everywhere" else None
    if rank == 0:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, handler)
    if made != "and returned":
        trainer.run(range(2))


@pytest.mark.parametrize("made", ["on rank 0", "everywhere", "and returned"])
def test_what_one_rank_alone_makes_or_attaches_is_named(made, tmp_path):
    error = failing(on_rank_0_only, tmp_path, made, timeout=time_to_start(2) + 3, within=60)
    assert "Only rank 0 came to ddl.Checkpoint: make, attach and call it on every rank, not under `if" in str(error)


ELSEWHERE = """
import ignite
from ignite_ddl.diagnose.stacks import user_frame
print(ignite.__file__)
print(user_frame([(ignite.__file__, 1, "all_reduce"), ("train.py", 7, "step")]))
"""


def test_ignite_is_no_code_of_the_user_wherever_it_is_installed(tmp_path):
    """Such as by pip install --target, by which it was on a machine with a GPU."""
    (tmp_path / "ignite").symlink_to(os.path.dirname(ignite.__file__))
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, env=environ, timeout=120)
    assert done.stdout.splitlines() == [str(tmp_path / "ignite/__init__.py"), "('train.py', 7, 'step')"], done.stderr


def test_calls_of_nccl_are_in_a_recorder_of_its_own(monkeypatch):
    def dump(name, created):
        entry = {"process_group": ("0", "default_pg"), "profiling_name": name, "is_p2p": False, "retired": False}
        entry |= {"collective_seq_id": 1, "time_created_ns": created, "frames": []}
        return pickle.dumps({"entries": [entry | {"input_dtypes": ["Float"], "input_sizes": [[3]]}]})

    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_fr_trace", lambda: dump("gloo:barrier", 2))
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: dump("nccl:all_reduce", 1), raising=False)
    counted = b"1"
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda includeCollectives: counted, raising=False)
    assert [call["operation"] for call in recorded_calls()] == ["all_reduce", "barrier"]
    before, counted = calls_counted(), b"2"
    assert calls_counted() != before
