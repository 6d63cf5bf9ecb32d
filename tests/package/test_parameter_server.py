"""The parameter server: its four modes against one process, the bounds they promise, and every fault."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta

import cloudpickle
import ignite.distributed as idist
import psutil
import pytest
import ranks
import torch
from hypothesis import given, settings, strategies as st
from ignite.engine import Engine, Events
from ignite.metrics import Average
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.parameter_server import wire
from ignite_ddl.parameter_server.server import Shard, WaitTimeout
from ignite_ddl.parameter_server.worker import _assign_parameters

TIMEOUT = 60  # seconds; a run that works takes about one
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest and hypothesis
posix = pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")


def served(**options):
    """A small model and its ParameterServer."""
    model = nn.Linear(3, 1)
    return model, ddl.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=0.1), **options)


def take_step(model, server):
    server.pull()
    model(torch.ones(1, 3)).sum().backward()
    return server.push()


def parallel(workers=2, servers=1, **kwargs):
    return ranks.parallel(workers, servers=servers, **({"timeout": TIMEOUT} | kwargs))


def process_of(server):
    """A server of this rank's run."""
    folder = os.environ["IGNITE_DDL_RUN"]
    for process in psutil.Process().parent().children():
        with contextlib.suppress(psutil.Error):
            if any(file.path == os.path.join(folder, f"{server}.stdout") for file in process.open_files()):
                return process
    return None


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    of_mine = psutil.Process().children()  # the forkserver, whose children launches have started
    deeper = [child.pid for child in psutil.Process().children(recursive=True) if child not in of_mine]
    assert ranks.gone(deeper)


# ---------------------------------------------------------------------------------------- equal to one process


class Model(nn.Module):
    """With what gets in the way: a tied weight, a frozen layer, and a parameter that never has a gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 5, bias=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.last.weight = nn.Parameter(self.first.weight.detach().T.clone())
        self.tied = self.last

    def forward(self, x):
        return self.tied(torch.tanh(self.frozen(self.last(torch.tanh(self.first(x))).repeat(1, 2)[:, :7])))


def rows(n=30):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x.flip(1) * 0.5)


def build(seed=0):
    torch.manual_seed(seed)
    return Model().double()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),  # it looks at a parameter's whole shape
}


def one_process(optimizer, batch_size, n_rows, epochs=3):
    model = build()
    optimizer = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    for _ in range(epochs):
        for x, y in torch.utils.data.DataLoader(rows(n_rows), batch_size):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


def train(local_rank, optimizer, batch_size, n_rows, epochs=3, **options):
    """An ordinary Ignite trainer. Ranks start from different weights: worker 0's count."""
    model = build(seed=local_rank)
    server = ddl.ParameterServer(model, OPTIMIZERS[optimizer], **options)

    def step(engine, batch):
        x, y = batch
        server.pull()
        if len(x):
            nn.functional.mse_loss(model(x), y).backward()
        server.push(rows=len(x))
        return len(x)

    trainer = Engine(step)
    trainer.run(ddl.auto_dataloader(rows(n_rows), batch_size=batch_size), max_epochs=epochs)
    server.pull()
    return model.state_dict(), server.statistics()


def distance(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


BOUNDED = {"mode": "bounded", "staleness": 0}


@pytest.mark.parametrize(
    ("workers", "servers", "optimizer", "batch_size", "n_rows", "options"),
    [
        (2, 1, "sgd", 6, 30, {"mode": "sync"}),
        (4, 2, "sgd", 8, 30, {"mode": "sync"}),  # the last batch: 6 rows, 2 2 1 1
        (3, 3, "adam", 9, 20, {"mode": "sync"}),  # the last batch: 2 rows, one worker has none
        (1, 2, "adam", 8, 30, {"mode": "sync"}),
        (2, 2, "adafactor", 8, 30, {"mode": "sync"}),
        (1, 2, "adam", 8, 30, {"mode": "async"}),
        (1, 2, "adam", 8, 30, BOUNDED),
        *(
            (None, 0, "sgd", 8, 30, options)
            for options in ({"mode": "sync"}, {"mode": "async"}, BOUNDED, {"mode": "backup", "backup": 1})
        ),
    ],
    ids=str,
)
def test_equal_to_one_process(workers, servers, optimizer, batch_size, n_rows, options):
    """In sync, with one worker, and in a serial run."""
    expected = one_process(optimizer, batch_size, n_rows)
    assert distance(expected, build().state_dict()) > 1e-2  # it moves
    job = parallel(workers, servers) if workers else ddl.Parallel()
    results = job.run(train, optimizer, batch_size, n_rows, **options)
    for weights, _ in results:
        assert distance(expected, weights) <= 1e-12
    updates = results[0][1]["updates"]
    assert {record["staleness"] for record in updates} == {0}
    of_one = [record for record in updates if record["server"] == 0]
    assert sum(record["rows"] for record in of_one) == 3 * n_rows
    assert sorted({record["version"] for record in of_one}) == list(range(3 * math.ceil(n_rows / batch_size)))


def forgetting(local_rank, says, batch_size):
    server = ddl.ParameterServer(build(), OPTIMIZERS["sgd"])

    def step(engine, batch):
        server.pull()
        gradients = {name: torch.ones_like(p) for name, p in server._parameters.items()}
        server.push(gradients, rows=len(batch[0])) if says else server.push(gradients)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Engine(step).run(ddl.auto_dataloader(rows(6), batch_size=batch_size))
    return [str(w.message) for w in caught if "pass rows=len(x) to push" in str(w.message)]


@pytest.mark.parametrize(("says", "batch_size", "warned"), [(False, 5, 1), (True, 5, 0), (False, 6, 0), (True, 3, 0)])
def test_a_push_that_does_not_say_how_many_rows_is_warned_of(says, batch_size, warned):
    with parallel() as launcher:
        assert [len(words) for words in launcher.run(forgetting, says, batch_size)] == [warned] * 2


def test_sync_repeats_to_the_bit():
    """Gradients are added in the order of workers, not in that of their arrival."""

    def work(local_rank, seed):
        torch.manual_seed(0)
        model = nn.Linear(50, 50)
        server = ddl.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=0.1))
        x = torch.randn(4, 8, 50)[local_rank]
        delays = torch.rand(6, 4, generator=torch.Generator().manual_seed(seed))[:, local_rank]
        for delay in delays.tolist():
            server.pull()
            model(x).square().mean().backward()
            time.sleep(delay * 0.01)
            server.push()
        server.pull()
        return model.weight.detach()

    one, other = (parallel(4).run(work, seed)[0] for seed in (1, 2))
    assert torch.equal(one, other)


def test_a_scheduler_on_the_server():
    def with_schedule(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    model = nn.Linear(1, 1, bias=False)
    server = ddl.ParameterServer(model, with_schedule)
    server.pull()
    start = model.weight.item()
    for _ in range(3):
        server.push({"weight": torch.ones(1, 1)})
        server.pull()
    assert start - model.weight.item() == pytest.approx(0.1 * (1 + 0.5 + 0.25), abs=1e-6)


# ------------------------------------------------------------------------------------------------ the rules alone


SIZES = 3, 4


def shard_of(workers, mode, staleness=None, backup=0):
    shard = Shard()
    agreed = {"mode": mode, "staleness": staleness, "backup": backup, "workers": workers, "servers": 1}
    # Each update adds one to every number: a tensor is its version.
    make = cloudpickle.dumps(lambda p: torch.optim.SGD(p, lr=1.0))
    shard.create(agreed, make, [torch.zeros(size) for size in SIZES], [])
    return shard


def pull(shard, worker):
    """What a pull gets at this moment, or None if it waits."""
    with contextlib.suppress(WaitTimeout):
        return shard.pull(worker, 0, limit=0)


def gradients():
    return [torch.full((size,), -1.0) for size in SIZES]


modes = st.one_of(
    st.tuples(st.just("sync"), st.none(), st.just(0)),
    st.tuples(st.just("async"), st.none(), st.just(0)),
    st.tuples(st.just("bounded"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("backup"), st.none(), st.integers(1, 2)),
)


@settings(max_examples=80)
@given(modes, st.integers(2, 4), st.data())
def test_rules_hold_in_any_order_of_events(mode, workers, data):
    mode, staleness, backup = mode
    backup = min(backup, workers - 1)
    shard = shard_of(workers, mode, staleness, backup)
    batches = [data.draw(st.integers(0, 4)) for _ in range(workers)]  # in each of two epochs
    dies = data.draw(st.integers(0, workers - 1)) if mode in ("async", "bounded") and data.draw(st.booleans()) else None
    left = {worker: list(batches[worker : worker + 1] * 2) for worker in range(workers)}
    held = {}  # a pull that was answered, or is waiting
    lead = []
    while left:
        # Whoever can move: not those whose pull waits. If nobody could, the rules would hang.
        held = {worker: pulled or pull(shard, worker) for worker, pulled in held.items()}
        able = [worker for worker in left if worker not in held or held[worker]]
        assert able, (shard.clock, shard.pending.keys(), shard.ended)
        worker = data.draw(st.sampled_from(able))
        if worker == dies and data.draw(st.booleans()):
            held.pop(worker, None)
            del left[worker]
            assert shard.end(worker, "was killed")
        elif worker in held:
            version, tensors = held.pop(worker)
            assert all((tensor == version).all() for tensor in tensors)  # nobody has touched what it read
            shard.push(worker, version, gradients(), rows=1)
            left[worker][0] -= 1
        elif left[worker][0] == 0:
            shard.end_epoch(worker)
            left[worker].pop(0)
            if not left[worker]:
                del left[worker]
                shard.end(worker, None)
        else:
            held[worker] = pull(shard, worker)
            if mode == "bounded":
                for other in (w for w in held if held[w]):
                    lead.append(shard.clock[other] - min(shard.clock[w] for w in shard._active() | {other}))
    if mode == "bounded" and lead:
        assert max(lead) <= staleness
        limit = (workers - 1) * (2 * staleness + 1)
        assert all(record["staleness"] <= limit for record in shard.updates)
    if mode == "sync":
        assert not shard.dropped
    pushed = sum(shard.pushes.values())
    assert len(shard.updates) + len(shard.dropped) == pushed
    if dies is None:
        assert pushed == 2 * sum(batches)


def test_bounded_waits_exactly_beyond_s():
    shard = shard_of(2, "bounded", staleness=2)
    for _ in range(3):  # steps 0, 1, 2: ahead by 0, 1, 2
        version, _ = pull(shard, 0)
        shard.push(0, version, gradients(), 1)
    with pytest.raises(WaitTimeout) as waits:  # ahead by 3
        shard.pull(0, 0, limit=0)
    assert waits.value.args == ([1],) == (shard.waits_for(),)
    version, _ = pull(shard, 1)
    shard.push(1, version, gradients(), 1)
    assert pull(shard, 0)
    assert shard.updates[-1]["staleness"] == 0  # it pulled version 3 and was applied to it


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 5))
def test_servers_share_by_bytes(sizes, servers):
    named = {f"p{i}": nn.Parameter(torch.empty(size)) for i, size in enumerate(sizes)}
    if len(named) < servers:
        with pytest.raises(ValueError, match=f"{len(named)} for {servers} servers"):
            _assign_parameters(named, servers)
        return
    shares = _assign_parameters(named, servers)
    assert sorted(name for share in shares for name in share) == sorted(named)
    held = [sum(named[name].nbytes for name in share) for share in shares]
    assert max(held) - min(held) <= 4 * max(sizes)


# --------------------------------------------------------------------------------------------------------- staleness


def leads(updates, workers):
    """How far each worker was ahead of the slowest when it pulled, from the records alone."""
    done = [record["worker"] for record in updates]
    for record in updates:
        clocks = [done[: record["pulled"]].count(worker) for worker in range(workers)]
        yield clocks[record["worker"]] - min(clocks)


def test_async_is_stale_where_bounded_is_not():
    """Between processes; the rules alone are above. What the bound prevents does happen without it."""

    def work(local_rank, **options):
        model, server = served(**options)
        for _ in range(3 if local_rank else 30):
            server.pull()
            time.sleep(0.1 if local_rank else 0)
            model(torch.ones(1, 3)).sum().backward()
            server.push()
        server.end_epoch()  # worker 1, in the barrier, holds nobody
        idist.barrier()
        return server.statistics()["updates"]

    def worst(updates):
        return max(leads([r for r in updates if r["server"] == 0], 2))

    assert worst(parallel(2, 2).run(work, mode="async")[0]) > 5
    bounded = parallel(2, 2).run(work, mode="bounded", staleness=1)[0]
    # After its 3 steps worker 1 holds nobody any more: look at what came before.
    last = max(i for i, r in enumerate(bounded) if r["worker"] == 1 and r["server"] == 0)
    assert worst(bounded[: last + 1]) == 1
    assert len(bounded) == 2 * 33


# -------------------------------------------------------------------------------------------------- backup workers


@pytest.mark.parametrize("servers", [1, 2])
def test_backup_averages_those_that_arrived(servers):
    steps = 8

    def work(local_rank):
        model = nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(3)}).double()
        server = ddl.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=1.0), mode="backup", backup=1, timeout=20)
        idist.barrier()
        seen, pushed = {}, 0
        while server.pull()[0] < steps:
            seen[server.versions[0]] = model["a"][0].item(), model["b"][0].item()
            time.sleep(0.06 if local_rank == 2 else 0.01)  # worker 2 is slow
            mine = float(10**local_rank)
            pushed += server.push({"a": torch.full_like(model["a"], -mine), "b": torch.full_like(model["b"], -mine)})
        idist.barrier()
        return seen, pushed, server.statistics()

    results = parallel(4, servers).run(work)
    statistics = results[0][2]
    for index, name in enumerate(server["parameters"][0] for server in statistics["servers"]):
        updates = [r for r in statistics["updates"] if r["server"] == index]
        expected = 0.0
        for version in range(steps):
            arrived = [r["worker"] for r in updates if r["version"] == version]
            assert len(arrived) == len(set(arrived)) == 3  # N of N + 1
            expected += sum(10.0**worker for worker in arrived) / 3
            for seen, _, _ in results:
                if version + 1 in seen:
                    assert abs(seen[version + 1]["ab".index(name)] - expected) <= 1e-12 * expected
        assert {r["staleness"] for r in updates} == {0}
    accepted = sum(r["server"] == 0 for r in statistics["updates"])
    assert accepted == sum(pushed for _, pushed, _ in results) == 3 * steps
    late = statistics["dropped"]
    assert 2 in {r["worker"] for r in late}
    assert all(r["staleness"] > 0 and r["server"] == 0 for r in late)  # the first server tells what is late


def test_a_pull_from_several_servers_in_backup_is_one_version():
    """An update between their answers makes them differ: then it is pulled again."""

    def work(local_rank):
        model = nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(100_000)})
        options = {"mode": "backup", "backup": 2, "timeout": 20}
        server = ddl.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=1.0), **options)
        minus_one = {name: -torch.ones_like(p) for name, p in model.items()}
        idist.barrier()
        torn = 0
        while (versions := server.pull())[0] < 300:
            torn += len({*versions, model["a"][0].item(), model["b"][0].item()}) > 1
            server.push(minus_one)
        return torn

    assert parallel(4, 2).run(work) == [0] * 4


# ------------------------------------------------------------------------------------------------ epochs and Ignite


def test_idist_sees_the_workers_alone():
    def work(local_rank):
        model, server = served()

        def step(engine, batch):
            server.pull()
            model(batch[0]).sum().backward()
            server.push()
            return float(batch[0].sum())

        trainer = Engine(step)
        Average().attach(trainer, "mean")
        data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(8, 3))
        trainer.run(ddl.auto_dataloader(data, batch_size=4), max_epochs=1)
        return idist.get_world_size(), idist.get_rank(), trainer.state.metrics["mean"]

    # The mean of the four batches' sums (two workers, two steps) is the same on both.
    assert parallel(2, 2).run(work) == [(2, 0, 69.0), (2, 1, 69.0)]


def test_a_worker_that_ends_its_epoch_holds_nobody():
    def work(local_rank):
        model, server = served(timeout=20)

        def step(engine, batch):
            server.pull()
            model(batch).sum().backward()
            server.push()

        trainer = Engine(step)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, server.end_epoch)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: idist.barrier())  # as an evaluator would
        trainer.run([torch.ones(2, 3)] * (3 if local_rank else 5), max_epochs=2)
        return server.statistics()["updates"]

    updates = parallel(2).run(work)[0]
    per_version = [[r["worker"] for r in updates if r["version"] == v] for v in range(10)]
    assert per_version == [[0, 1], [0, 1], [0, 1], [0], [0]] * 2


def test_buffers_and_frozen_parameters_start_as_worker_0s_and_stay_with_the_worker():
    def work(local_rank):
        torch.manual_seed(local_rank)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
        model[0].weight.requires_grad = True
        model[1](torch.randn(4, 2))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        server = ddl.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=0.1))
        server.pull()
        after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model(torch.randn(4, 2)).sum().backward()
        server.push()
        server.pull()
        return before, after, model[1].running_mean.clone(), server.statistics()["servers"][0]["parameters"]

    (before, first, mean_0, names), (_, second, mean_1, _) = parallel(2).run(work)
    for after in (first, second):
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert not torch.equal(mean_0, mean_1)
    assert names == ["0.weight"]


def test_two_servers_objects_in_one_run_and_plain_statistics():
    def work(local_rank):
        found = []
        for mode in ("async", "sync"):
            model, server = served(mode=mode)
            for _ in range(2):
                take_step(model, server)
            idist.barrier()
            found.append(server.statistics())
        return found

    for mode, statistics in zip(("async", "sync"), parallel(2, 2).run(work)[0], strict=True):
        assert json.loads(json.dumps(statistics)) == statistics
        assert statistics["mode"] == mode
        weight, bias = statistics["servers"]
        assert (weight["parameters"], weight["bytes"]) == (["weight"], 12)
        assert (bias["parameters"], bias["bytes"]) == (["bias"], 4)
        for server in (weight, bias):  # 2 workers, 2 pulls and pushes each
            assert server["bytes_in"] == server["bytes_out"] == 4 * server["bytes"]
            assert server["version"] == (4 if mode == "async" else 2)
        for record in statistics["updates"]:
            assert record["staleness"] == record["version"] - record["pulled"] >= 0
            assert 0 <= record["pulled_at"] <= record["pushed_at"] <= record["applied_at"]


# ------------------------------------------------------------------------------------------------------ failures


def train_and_fail(local_rank, how, steps=40, until_lost=False, **options):
    model, server = served(timeout=20, **options)
    for step in range(steps):
        server.pull()
        if local_rank == 1 and step == 3:
            if how == "raise":
                raise KeyError("lost")
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(1, 3)).sum().backward()
        server.push()
        time.sleep(0.005)
    while until_lost and not server.statistics()["lost"]:
        time.sleep(0.01)
    return server.statistics()


@posix
@pytest.mark.parametrize(
    ("on_failure", "servers", "options"),
    [
        ("raise", 1, {"mode": "sync"}),
        ("raise", 1, {"mode": "async"}),
        ("continue", 1, {"mode": "sync"}),
        ("continue", 2, {"mode": "backup", "backup": 1}),
    ],
    ids=str,
)
def test_a_killed_worker_ends_the_run_where_others_may_not_or_cannot_go_on(on_failure, servers, options, capfd):
    start = time.monotonic()
    with pytest.raises(ddl.RankError, match="rank 1 was killed by SIGKILL") as caught:
        parallel(3, servers, on_failure=on_failure).run(train_and_fail, "kill", steps=2000, **options)
    assert time.monotonic() - start < 15
    assert (caught.value.rank, caught.value.exitcode) == (1, -9)
    assert "go on" not in capfd.readouterr().err
    if on_failure == "continue":
        needs = "mode='sync' needs every worker" if servers == 1 else "mode='backup' with 2 servers needs"
        assert f"on_failure='continue' cannot continue: {needs}" in str(caught.value)
        assert "mode='async' and mode='bounded' continue without lost workers" in str(caught.value)


@posix
@pytest.mark.parametrize(
    ("how", "servers", "options"),
    [
        ("kill", 2, {"mode": "async"}),
        ("kill", 1, {"mode": "bounded", "staleness": 1}),
        ("kill", 1, {"mode": "backup", "backup": 1}),
        ("raise", 1, {"mode": "async"}),
    ],
    ids=str,
)
def test_others_go_on_without_a_lost_worker(how, servers, options, capfd):
    results = parallel(3, servers, on_failure="continue").run(train_and_fail, how, **options)
    assert isinstance(results[1], ddl.RankError)
    assert results[1].rank == 1
    what = "was killed by SIGKILL" if how == "kill" else "raised KeyError"
    assert f"rank 1 {what}" in str(results[1])
    error = capfd.readouterr().err
    assert f"rank 1 {what}" in error
    assert "the others go on" in error
    for worker in (0, 2):
        statistics = results[worker]
        assert what in statistics["lost"][1]
        own = [r for r in statistics["updates"] + statistics["dropped"] if r["worker"] == worker and r["server"] == 0]
        assert len(own) in (39, 40)  # the last may still wait for another worker's gradient
        assert sum(r["worker"] == 1 for r in statistics["updates"]) <= 3 * servers


def test_continue_raises_where_all_workers_fail_or_none_has_begun():
    def all_fail(local_rank):
        served(mode="async")[1].pull()
        raise KeyError(f"of {local_rank}")

    def early(local_rank):
        if local_rank == 1:
            raise KeyError("early")
        time.sleep(30)  # a long preparation
        served(mode="async")

    with pytest.raises(ddl.RankError, match="KeyError: 'of"):
        parallel(2, on_failure="continue").run(all_fail)
    with pytest.raises(ddl.RankError, match="rank 1 raised KeyError: 'early'"):
        parallel(2, on_failure="continue").run(early)


@posix
def test_a_collective_after_a_loss_fails_at_once_and_the_error_names_the_first_lost(capfd):
    def work(local_rank):
        train_and_fail(local_rank, "kill", steps=5, until_lost=True, mode="async")
        time.sleep(0.5)  # the launcher hears of it, and says so, before the others fail
        idist.barrier()

    start = time.monotonic()
    with pytest.raises(ddl.RankError) as caught:
        parallel(3, on_failure="continue").run(work)
    assert time.monotonic() - start < 15
    assert str(caught.value).startswith("rank 1 was killed by SIGKILL")
    assert "Also lost: rank " in str(caught.value)
    assert "A collective needs all ranks: do not call one after a worker is lost." in str(caught.value)
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err


def makes_another(local_rank, dies, how):
    """A ParameterServer, then one of the workers ends, then the others make one more."""
    _, first = served(mode="async")
    first.pull()
    idist.barrier()
    if local_rank == dies:
        if how == "fails":
            raise KeyError("lost")
        return "early"
    while how == "fails" and not first.statistics()["lost"]:
        time.sleep(0.01)
    time.sleep(0.3)  # an end in peace is in no statistics
    model, second = served(mode="bounded", staleness=0, timeout=5)
    for _ in range(3):
        take_step(model, second)
    return second.statistics()["lost"]


@pytest.mark.parametrize("how", ["fails", "returns"])
def test_a_parameter_server_made_later_waits_for_the_living_alone(how):
    results = parallel(3, on_failure="continue").run(makes_another, 1, how)
    lost = {1: "raised KeyError: 'lost'"} if how == "fails" else {}
    assert (results[0], results[2]) == (lost, lost)


@pytest.mark.parametrize("how", ["fails", "returns"])
def test_none_is_made_later_without_worker_0(how):
    start = time.monotonic()
    with pytest.raises(ddl.RankError) as caught:
        parallel(3, on_failure="continue").run(makes_another, 0, how)
    assert time.monotonic() - start < 15
    assert "starts with the weights of worker 0, and worker 0 has ended" in str(caught.value)


def test_the_limit_of_making_one_is_said():
    def work(local_rank):
        wire._JOIN_SECONDS = 0.5
        if local_rank == 0:
            time.sleep(30)
        served(timeout=20)

    message = r"TimeoutError: join took more than 0.5 s: server0 \(mode 'sync'\) waits for workers \[0\]"
    with pytest.raises(ddl.RankError, match=message):
        parallel(2).run(work)


@posix
@pytest.mark.parametrize("on_failure", ["raise", "continue"])
def test_killed_server_ends_all_workers(on_failure, tmp_path):
    folder = str(tmp_path)

    def work(local_rank):
        model, server = served(mode="async", timeout=60)
        for step in range(100_000):
            if local_rank == 0 and step == 5:
                open(os.path.join(folder, f"{time.time()}.killed"), "w").close()
                os.kill(process_of("server1").pid, signal.SIGKILL)
            try:
                take_step(model, server)
            except ConnectionError as error:
                with open(os.path.join(folder, f"{local_rank}.error"), "w") as file:
                    file.write(str(error))
                raise

    with pytest.raises(ddl.RankError, match="server1 was killed by SIGKILL") as caught:
        parallel(3, 2, on_failure=on_failure).run(work)
    killed = float(next(tmp_path.glob("*.killed")).stem)
    assert time.time() - killed <= 5
    assert caught.value.rank == "server1"
    errors = [path.read_text() for path in tmp_path.glob("*.error")]
    assert all(error.startswith("server1 is gone, at p") for error in errors)


def test_a_worker_that_is_late_is_named():
    def work(local_rank):
        model, server = served(timeout=0.5)
        server.pull()
        if local_rank == 0:
            model(torch.ones(1, 3)).sum().backward()
            server.push()
            server.pull()
        time.sleep(30)

    message = r"TimeoutError: pull took more than 0.5 s: server0 \(mode 'sync'\) waits for workers \[1\]"
    with pytest.raises(ddl.RankError, match=message):
        parallel(2).run(work)


def test_after_a_late_worker_the_others_can_go_on():
    """The time-out is the server's answer: nothing of it is left between them."""

    def work(local_rank):
        model, server = served(timeout=0.3)
        server.pull()
        if local_rank:
            idist.barrier()
        server.push({"weight": torch.ones(1, 3)})
        if local_rank == 0:
            with pytest.raises(TimeoutError, match="waits for workers"):
                server.pull()
            assert server.statistics()["updates"] == []
            idist.barrier()
        return server.pull()

    assert parallel(2).run(work) == [[1], [1]]


@posix
def test_a_server_that_stands_is_named():
    def work(local_rank):
        model, server = served(timeout=0.2)
        process = process_of("server0")
        process.suspend()
        assert ranks.comes_true(lambda: process.status() == psutil.STATUS_STOPPED)
        try:
            with pytest.raises(TimeoutError, match="pull took more than 0.2 s: server0 does not answer"):
                server.pull()
        finally:
            process.resume()
        with pytest.raises(ConnectionError, match="server0 is gone, at pull"):
            server.pull()

    parallel(1).run(work)


def test_an_error_on_the_server_reaches_the_worker():
    class Breaks(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError("this optimizer breaks")

    def work(local_rank):
        model = nn.Linear(3, 1)
        server = ddl.ParameterServer(model, lambda p: Breaks(p, lr=0.1), mode="async")
        take_step(model, server)

    with pytest.raises(ddl.RankError, match="ArithmeticError") as caught:
        parallel(1).run(work)
    assert "this optimizer breaks" in str(caught.value)
    assert "on server0:\nTraceback (most recent call last)" in str(caught.value)
    with pytest.raises(ddl.RankError, match="Invalid learning rate"):
        parallel(1).run(lambda rank: ddl.ParameterServer(nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=-1.0)))


def test_any_error_on_the_server_reaches_the_worker():
    class CannotBeUnpickled(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} {two}")

    def raises(error):
        raise error

    def work(local_rank):
        for make, kind in (
            (lambda: CannotBeUnpickled("two", "words"), RuntimeError),
            (lambda: Exception("two words", socket.socket()), RuntimeError),
            (lambda: SystemExit("two words"), SystemExit),
            (lambda: ValueError("two words"), ValueError),
        ):
            with pytest.raises(kind, match="two words"):
                ddl.ParameterServer(nn.Linear(1, 1), lambda p, make=make: raises(make()))
        assert take_step(*served())

    parallel(1).run(work)


# ------------------------------------------------------------------------------------------------------ bad input


def of_its_own_model(parameters):
    return torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)


BAD_OPTIMIZERS = [
    (of_its_own_model([]), "optimizer should be a function .* but given SGD"),
    (None, "optimizer should be a function .* but given NoneType"),
    (lambda p: None, "optimizer should return an optimizer, but it returned None"),
    (of_its_own_model, "it leaves out 2 and has 2 others"),
    (lambda p: torch.optim.SGD(p[:1], lr=0.1), "it leaves out 1 and has 0 others"),
    (lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))], lr=0.1), "out 0 and has 1 others"),
]


def two_groups(parameters):
    return torch.optim.SGD([{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:]}], lr=0.1)


def bad_optimizers(local_rank):
    for optimizer, message in BAD_OPTIMIZERS:
        with pytest.raises(ValueError, match=message):
            ddl.ParameterServer(nn.Linear(3, 1), optimizer)
    ddl.ParameterServer(nn.Linear(3, 1), two_groups).pull()


@pytest.mark.parametrize("servers", [0, 1])
def test_an_optimizer_of_other_parameters_is_refused(servers):
    """It would take its steps over copies: the version counts up and nothing is learned."""
    bad_optimizers(0) if servers == 0 else parallel(1, servers).run(bad_optimizers)


def test_a_batch_with_a_bad_gradient_can_be_left_out():
    model, server = served(mode="async")
    server.pull()
    model(torch.full((1, 3), float("nan"))).sum().backward()
    with pytest.raises(ValueError, match=r"finite, .*; push\(rows=0\) leaves this batch out"):
        server.push()
    assert model.weight.grad.isnan().all()  # as it was: whoever would rather repair it can
    server.push(rows=0)
    assert take_step(model, server)
    assert server.pull() == [1]


def full(value, size=3):
    return torch.full((1, size), float(value))


BAD_PUSHES = [
    ({"weight": full("nan")}, {}, "'weight' should be finite, but 3 of its 3 numbers are not"),
    ({"weight": torch.tensor([[1.0, float("inf"), -float("inf")]])}, {}, "but 2 of its 3"),
    ({"weight": full(1), "bias": full("nan", 1)[0]}, {}, "'bias' should be finite"),
    ({"weight": full(1, 4)}, {}, r"'weight' should be \(1, 3\), torch.float32, but given \(1, 4\)"),
    ({"weight": full(1).double()}, {}, r"but given \(1, 3\), torch.float64"),
    ({"weight": full(1).to_sparse()}, {}, "'weight' should be dense"),
    ({"wieght": full(1)}, {}, "should be of trainable parameters, but 'wieght' is unknown"),
    ({"frozen": full(1)}, {}, "but 'frozen' requires no gradient"),
    ({}, {}, r"no parameter has a gradient: call loss.backward\(\)"),
    (None, {}, "no parameter has a gradient"),
    ({"weight": full(1), "bias": None}, {}, "'bias' should be a tensor, but given NoneType"),
    ([full(1)], {}, "gradients should be a dict, parameter names to gradients, but given list"),
    ({"weight": full(1)}, {"rows": -1}, "rows should be an integer of at least 0, but given -1"),
    ({"weight": full(1)}, {"rows": 1.5}, "rows should be an integer of at least 0"),
]


def bad_pushes(local_rank):
    """Every bad push, and what the servers say before and after it."""
    model = nn.Linear(3, 1)
    model.frozen = nn.Parameter(torch.ones(1, 3), requires_grad=False)
    server = ddl.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), mode="async")

    def state():
        statistics = server.statistics()
        return [(s["version"], s["bytes_in"]) for s in statistics["servers"]], len(statistics["updates"])

    def refused(words, *args, **kwargs):
        before = state()
        with pytest.raises((ValueError, RuntimeError), match=words):
            server.push(*args, **kwargs)
        assert state() == before

    refused("^push needs a pull before it", {"weight": full(1)})
    server.pull()
    weights = model.weight.detach().clone()
    for given_, kwargs, words in BAD_PUSHES:
        refused(words, given_, **kwargs)
    server.push({"weight": full(1)})  # after all of them a good one still goes, once
    refused("^push needs a pull before it", {"weight": full(1)})
    server.pull()
    torch.testing.assert_close(weights - model.weight, full(1), rtol=0, atol=1e-6)
    server.push({"weight": full(3e38)})  # finite, though its sum is not


@pytest.mark.parametrize("servers", [0, 2])
def test_bad_pushes_are_refused_and_leave_the_server_as_it_was(servers):
    bad_pushes(0) if servers == 0 else parallel(1, servers).run(bad_pushes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "eager"}, "mode should be one of .* but given 'eager'"),
        ({"mode": "bounded"}, "staleness should be a number of steps, 0 or more, .* but given None"),
        ({"mode": "bounded", "staleness": -1}, "but given -1"),
        ({"staleness": 2}, "staleness=2 needs mode='bounded', but given mode='sync'"),
        ({"mode": "backup"}, "backup should be between 1 and"),
        ({"mode": "async", "backup": 1}, "backup=1 needs mode='backup'"),
        ({"timeout": 0}, "timeout should be a positive number of seconds, but given 0"),
        ({"timeout": None}, "timeout should be a positive number of seconds, but given None"),
        ({"timeout": True}, "but given True"),
        ({"timeout": float("nan")}, "but given nan"),
        ({"timeout": float("inf")}, r"but given inf; the longest is 1e\+09"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        served(**options)


def test_any_other_timeout_is_taken():
    def work(local_rank, timeout):
        model, server = served(timeout=timeout)
        take_step(model, server)
        return server.timeout

    assert parallel(1).run(lambda rank: [work(rank, t) for t in (timedelta(minutes=1), 1e9)]) == [[60, 1e9]]


def test_bad_models():
    def refused(local_rank, what):
        model = nn.Linear(3, 1)
        mode = "async"
        if what == "other shape" and local_rank == 1:
            model = nn.Linear(4, 1)
        elif what == "other mode" and local_rank == 1:
            mode = "sync"
        elif what == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif what == "sharded":
            model = ddl.auto_model(model, shard=True)
        elif what == "small":
            model = nn.Linear(3, 1, bias=False)
        try:
            options = {"mode": "backup", "backup": 2} if what == "backup" else {"mode": mode}
            ddl.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=0.1), **options)
        except ValueError as error:
            return str(error)
        return "accepted"

    run = parallel(2, 2).run
    different = "should be the same on all workers, but given"
    shapes = "((1, 4), 'torch.float32') on worker 1 and ((1, 3), 'torch.float32') on worker 0"
    assert run(refused, "other shape") == ["accepted", f"'weight' {different} {shapes}"]
    assert run(refused, "other mode") == ["accepted", f"mode {different} sync on worker 1 and async on worker 0"]
    for what in ("ddp", "sharded"):
        assert all(text.startswith("model should be the plain module") for text in run(refused, what))
    assert all(text.endswith("given 1 for 2 servers") for text in run(refused, "small"))
    assert all("between 1 and 1 of 2 workers" in text for text in run(refused, "backup"))
    no_server = parallel(2, 0).run(refused, "no server")
    assert all("start the workers by ddl.Parallel(..., servers=1)" in text for text in no_server)
    tensor_parallel = parallel(2, 1, tp=2).run(refused, "")
    assert all("but given Mesh(dp=1, pp=1, tp=2" in text for text in tensor_parallel)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"servers": -1}, "servers should be an integer of at least 0, but given -1"),
        ({"servers": True}, "servers should be an integer"),
        ({"on_failure": "ignore"}, "on_failure should be one of raise, continue, but given 'ignore'"),
        ({"servers": 0, "on_failure": "continue"}, "on_failure='continue' needs parameter servers"),
        ({"nnodes": 2, "node_rank": 0}, "servers=1 needs ranks that are started on one machine, but given nnodes=2"),
    ],
)
def test_bad_launches(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ddl.Parallel(**({"backend": "gloo", "nproc_per_node": 2, "servers": 1} | kwargs))


def test_servers_do_not_join_a_job(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="but given a job to join; set nproc_per_node"):
        ddl.Parallel("gloo", servers=1)


# ------------------------------------------------------------------------------------------------------ the network


STRANGER = """
import os, pickle, socket, struct, sys

class Runs:
    def __reduce__(self):
        return os.mkdir, (sys.argv[1],)

def knock(port, data):
    with socket.create_connection(("127.0.0.1", port), 5) as to:
        to.sendall(data)
        to.settimeout(0.02)
        try:
            to.recv(99)
        except OSError:
            pass

body = pickle.dumps(Runs())
heads = b"", struct.pack("!i", len(body)), struct.pack("<q", len(body)), struct.pack("!QQ", len(body), 0)
for again in range(int(sys.argv[2])):
    for port in map(int, sys.argv[3:]):
        for data in [head + body for head in heads] + [b"\\0" * 64, b"\\xff" * 64, os.urandom(50), os.urandom(50_000)]:
            knock(port, data)
"""


def named(server):
    """What strangers can find of a process: TCP ports on which it listens, and Unix sockets with a name."""
    for c in (process_of(server) if server else psutil.Process()).net_connections("all"):
        if c.status == psutil.CONN_LISTEN or (isinstance(c.laddr, str) and c.laddr):
            yield c.laddr


def among_strangers(local_rank, folder, rounds):
    """Steps before and after another process has sent to each port of the run what would run code, and nonsense."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    server = ddl.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=1.0))
    for step in range(6):
        if step == 3:
            ports = idist.all_gather(torch.tensor([address.port for address in named(None)])).tolist()
            if local_rank == 0:
                assert list(named("server0")) == []
                arguments = [os.path.join(folder, "code of a stranger has run"), str(rounds), *map(str, ports)]
                subprocess.run([sys.executable, "-c", STRANGER, *arguments], check=True, timeout=TIMEOUT)
        server.pull()
        server.push({"weight": -torch.ones(1, 3)})
    server.pull()
    return model.weight.tolist(), [address.ip for address in named(None)]


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_strangers_find_no_server_and_change_nothing(rounds, tmp_path):
    results = parallel(2, 1).run(among_strangers, str(tmp_path), rounds)
    assert [weight for weight, _ in results] == [[[6.0] * 3]] * 2
    assert {ip for _, ips in results for ip in ips} == {"127.0.0.1"}  # gloo's
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_all_types_travel():
    here, there = socket.socketpair()
    types = [torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.bool, torch.complex64, torch.complex128]
    sent = [torch.rand(shape).add(0.5).to(dtype) for dtype in types for shape in [(), (0,), (3,), (2, 3), (4, 0)]]
    sent += [None, sent[-3].conj(), torch.rand(4, 5).T, torch.eye(3).to_sparse()]
    with here, there, here.makefile("wb") as to, there.makefile("rb") as source:
        wire._send(to, sent)
        received = wire._receive(source)
        assert received.pop(-4) is sent.pop(-4) is None
        for one, other in zip(sent, received, strict=True):
            assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
            assert torch.equal(one.to_dense().to(torch.complex128), other.to_dense().to(torch.complex128))


def test_waiting_costs_nothing():
    def busy(local_rank):
        idist.barrier()
        start = time.process_time()
        time.sleep(1)
        return time.process_time() - start

    assert max(parallel(2, 1).run(busy)) < 0.03
