"""What pages say about guesses, the scripts that they show, and how they start and time ranks."""

import time

import ignite.distributed as idist
import pytest
import torch
from ignite.handlers import PiecewiseLinear
from torch.distributed.fsdp import fully_shard

from ignite_ddl.course import (
    Delay,
    StepMemory,
    all_gather_by_messages,
    all_reduce_by_messages,
    compare_cut,
    describe_machine,
    median_seconds,
    on_ranks,
    overlapped,
    reduce_scatter_by_messages,
    sharded_step,
    steps_to_target,
    time_pipeline,
    time_steps,
    train_copies,
)
from ignite_ddl.course.exercises import Hint
from ignite_ddl.course.ranks import try_on_ranks
from ignite_ddl.lab import count_bytes
from ignite_ddl.launch import parent


def test_functions_are_timed_in_turns_after_a_call_to_warm_up():
    calls = []
    found = median_seconds(lambda: calls.append("a"), lambda: calls.append("b") or time.sleep(0.01), rounds=3)
    assert calls == ["a", "b"] * 4
    assert found[1] >= 0.01


def test_memory_is_told_by_kind_and_the_peak_lies_in_backward():
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(2)])
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.zeros(1024, 256)  # 1 MiB; the weights are half a MiB
    with StepMemory(model, optimizer, x) as memory:
        for _ in memory.steps(2):
            loss = model(x).mean()
            memory.look("after forward")
            loss.backward()
            memory.look("after backward")
            optimizer.step()
            optimizer.zero_grad()
    forward, backward, peak = *memory.mib.values(), memory.peak()
    for found in (forward, backward, peak):
        assert [round(found[kind], 2) for kind in ("parameters", "optimizer", "input")] == [0.5, 1, 1]
    assert (round(forward["activations"], 2), forward["gradients"]) == (1, 0)
    assert (round(backward["activations"], 2), backward["gradients"]) == (0, 0.5)
    assert round(peak["activations"] + peak["on the way"], 2) == 3.25


def test_times_are_of_each_step_in_order_and_the_fastest_try_is_the_first():
    tries = time_steps(2, lambda rank: 0.02 * rank, lambda s: time.sleep(s) or 0.05, time.sleep, tries=2)
    assert [len(seconds) for seconds in tries] == [2, 2]
    assert all(first >= 0.02 and second >= 0.05 for first, second in tries)
    assert sum(tries[0]) <= sum(tries[1])


def test_steps_of_a_pipeline_are_timed_without_its_set_up_and_the_shortest_is_the_first():
    def layer():
        return torch.nn.Sequential(torch.nn.Linear(4, 4), Delay(0.01, 0.02))

    steps = time_pipeline(2, [("gpipe", 2), ("1f1b", 2)], layer, n_layers=2, x=torch.ones(4, 4), n_steps=2)
    for (_, n), two in steps.items():
        assert two[0].seconds <= two[1].seconds
        assert all(step.seconds >= 0.09 for step in two)  # m + p - 1 turns
        assert all(0 < step.bubble < 1 for step in two)
        passes = [record for record in two[0].records if record.kind in ("forward", "backward")]
        assert {record.microbatch for record in passes} == set(range(n))
        assert len(passes) == 2 * 2 * n


def test_the_machine_is_described_in_a_line_for_each_thing(capsys):
    assert "gloo" in describe_machine()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "cores",
        "memory",
        "GPUs",
        "TPU",
        "backends",
    ]


def by_messages(local_rank):
    x = torch.arange(24.0).reshape(8, 3) * 10**local_rank
    with count_bytes() as reduced:
        total = all_reduce_by_messages(x)
    with count_bytes() as gathered:
        everything = all_gather_by_messages(x)
    with count_bytes() as scattered:
        mine = reduce_scatter_by_messages(x)
    equal = torch.equal(everything, idist.all_gather(x)), torch.equal(total, idist.all_reduce(x))
    equal += (torch.equal(mine, total.chunk(4)[local_rank]),)
    return *equal, reduced.put_in // 4, gathered.put_in // 4, scattered.put_in // 4


def test_collectives_made_of_messages_give_the_same_for_the_bytes_of_a_ring():
    assert on_ranks(4, by_messages) == [(True, True, True, 2 * 3 * 24 // 4, 3 * 24, 3 * 24 // 4)] * 4


def two_layers(local_rank, reshard_after_forward):
    layers = [torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 6, bias=False)]
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    return sharded_step(layers, lambda: layers[1](layers[0](torch.ones(1, 4))).sum().backward())


def test_a_sharded_step_is_written_down_and_played_again():
    kept, freed = (on_ranks(2, two_layers, again)[1] for again in (False, True))
    assert kept == [
        *[("gather", 0), ("forward", 0), ("gather", 1), ("forward", 1), ("backward", 1), ("free", 1)],
        *[("scatter", 1), ("backward", 0), ("free", 0), ("scatter", 0)],
    ]
    assert [freed.count((what, 0)) for what in ("gather", "free", "scatter")] == [2, 2, 1]
    seconds = {"gather": 1, "forward": 2, "backward": 4, "scatter": 3}
    ends = [overlapped(kept, seconds, ahead)["network"][-1].end for ahead in (False, True)]
    assert ends == [2 * (1 + 2 + 4 + 3), 1 + 2 * 2 + 2 * 4 + 3], "all in turn; the network hidden but for its ends"
    with pytest.raises(ValueError, match="layers should differ"):
        sharded_step([torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)], int)


def test_a_cut_is_compared_part_by_part_with_what_is_sent_each_way(capsys):
    inputs = {"x": torch.randn(2, 4).double(), "weight": torch.randn(4, 6).double()}
    dims = {"x": 1, "weight": 0, "y": None}

    def summed(x, weight):  # forward only: its backward is a copy
        y = x @ weight
        return y + (idist.all_reduce(y.detach().clone()) - y.detach())

    found = compare_cut(summed, lambda x, weight: x @ weight, inputs, dims, n_ranks=2)
    assert found.right == ["y", "dx", "dweight"]
    assert (found.forward, found.backward) == ([("all_reduce", 96)], [])
    assert [rank["dweight"].shape for rank in found.ranks] == [(2, 6)] * 2
    assert "forward   all_reduce of 96 bytes\nbackward  nothing sent" in capsys.readouterr().out


def test_seeds_side_by_side_are_trained_as_each_alone_and_a_flood_shuts_units():
    def at(rate):
        return lambda optimizer, length: PiecewiseLinear(optimizer, "lr", [(0, rate)])

    three, two = (train_copies([(2, 3000, at(0.05))], (16,), n_seeds) for n_seeds in (3, 2))
    assert three.accuracies.shape == (2, 3)
    assert two.accuracies.shape == (2, 2)
    torch.testing.assert_close(three.accuracies[:, 0], two.accuracies[:, 0], atol=0.2, rtol=0)
    assert train_copies([(2, 3000, at(9.0))], (16, 16), 2).shut > three.shut
    few = train_copies([(3, 24, at(0.05))], (16,), 2, labels=torch.zeros(48).long(), epoch_length=1)
    assert len(few.accuracies) == 3


@pytest.mark.parametrize("adam", [False, True])
def test_the_race_is_won_by_the_rate_that_is_first_and_ends(adam):
    rate = 0.01 if adam else 0.1
    steps, first = steps_to_target(120, [1e-7, rate], target=0.5, adam=adam, n_seeds=2)
    assert first == rate
    assert steps_to_target(120, [rate], target=0.5, adam=adam, n_seeds=2) == (steps, rate)  # a rate races alone
    assert steps_to_target(120, [rate], target=0.2, adam=adam, n_seeds=2)[0] < steps
    firsts = [steps_to_target(120, [rate], target=0.5, adam=adam, n_seeds=1, first_seed=seed)[0] for seed in range(4)]
    assert len(set(firsts)) > 1  # other weights and batches, another number of steps
    with pytest.raises(RuntimeError, match="after 3 steps no rate has reached 99%"):
        steps_to_target(24, [rate], target=0.99, adam=adam, n_seeds=1, at_most=3)


def test_one_process_computes_where_ranks_do(monkeypatch):
    """On a Mac idist's serial runs take its GPU, which has no float64; ranks are on the CPU."""
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert idist.device().type == "cpu"


def without_rank_1(local_rank):
    return None if local_rank == 1 else idist.all_reduce(1)


def in_a_circle(local_rank):  # each pair is rank r and its successor, and all begin with their own
    pairs = [torch.distributed.new_group(sorted((rank, (rank + 1) % 3))) for rank in range(3)]
    for pair in (pairs[local_rank], pairs[local_rank - 1]):
        torch.distributed.all_reduce(torch.ones(1), group=pair)


@pytest.mark.parametrize("timeout", [2, 60])  # ended by the limit, and by the launcher, which sees an endless wait
@pytest.mark.parametrize("work", [without_rank_1, in_a_circle])
def test_ranks_of_an_exercise_that_wait_for_each_other_get_a_hint(work, timeout, monkeypatch):
    monkeypatch.setattr(parent, "LOOK_SECONDS", (0.5, 0.5) if timeout == 60 else (60, 60))
    monkeypatch.setattr(parent, "LOOK_AGAIN_SECONDS", 0.3)
    with pytest.raises(Hint, match="your ranks wait for each other: call it on all"):
        try_on_ranks(3, work, timeout=timeout, cure="call it on all")
