"""auto_dataloader deals one process's batches, auto_model keeps one process's weights, and what both refuse."""

import copy
import logging
import re
from collections import OrderedDict

import ignite.distributed as idist
import pytest
import torch
from hypothesis import given, strategies as st
from ignite.engine import Engine, Events
from parity import each_alone
from ranks import mesh_of, on_each_rank, run, trainer_of
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import default_collate
from torch.utils.data.distributed import DistributedSampler

import ignite_ddl as ddl
from ignite_ddl import data as module
from ignite_ddl.lab.bytes import count_bytes


def as_rank(rank, size, make, monkeypatch):
    """A loader as dp rank ``rank`` of ``size`` would have it, made in this process."""
    mesh = mesh_of(rank=rank, dp=size)
    with monkeypatch.context() as patch:
        patch.setattr(module, "get_mesh", lambda: mesh)
        patch.setattr(module, "_common_seed", lambda mesh: 7)
        return make()


def dealt(loader):
    """The loader's batches, and (here, in all) of each."""
    pairs = [(batch.tolist(), loader.rows) for batch in loader]
    return [rows for rows, _ in pairs], [sizes for _, sizes in pairs]


def check_dealing(make, size, monkeypatch, passes=2):
    """Every rank's parts, put together in rank order, are one process's batches. Returns those of one process."""
    whole = as_rank(0, 1, make, monkeypatch)
    ranks = [as_rank(rank, size, make, monkeypatch) for rank in range(size)]
    seen = []
    for _ in range(passes):
        batches, sizes = dealt(whole)
        assert sizes == [(len(batch), len(batch)) for batch in batches]
        parts = [dealt(loader) for loader in ranks]
        assert all(len(rows) == len(batches) for rows, _ in parts)
        for i, batch in enumerate(batches):
            assert sum((rows[i] for rows, _ in parts), []) == batch
            here = [sizes[i][0] for _, sizes in parts]
            assert here == [len(rows[i]) for rows, _ in parts]
            assert max(here) - min(here) <= 1  # as evenly as it goes
            assert {sizes[i][1] for _, sizes in parts} == {len(batch)}
        assert all(len(loader) == len(whole) for loader in ranks)
        seen.append(batches)
    return seen


# -------------------------------------------------------------------------------------- dealing, in this process


@given(n=st.integers(0, 50), size=st.integers(1, 9))
def test_part_covers_all_rows_once_and_evenly(n, size):
    parts = [module.part(n, rank, size) for rank in range(size)]
    assert [row for start, end in parts for row in range(start, end)] == list(range(n))
    lengths = [end - start for start, end in parts]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [12, 13, 9, 1])  # the last batch: full, of 5, of 1, and the only one
@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_in_order(size, rows, drop_last, monkeypatch):
    def make():
        return ddl.auto_dataloader(torch.arange(rows), batch_size=4, drop_last=drop_last)

    batches = check_dealing(make, size, monkeypatch)[0]
    assert len(make()) == len(batches)
    assert batches == [b.tolist() for b in DataLoader(torch.arange(rows), batch_size=4, drop_last=drop_last)]


def test_workers_change_nothing(monkeypatch):
    def make(workers):
        return lambda: ddl.auto_dataloader(
            torch.arange(13), batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )

    with_workers = check_dealing(make(2), 3, monkeypatch)
    assert with_workers == check_dealing(make(0), 3, monkeypatch)


SAMPLERS = {
    "shuffled": lambda: {"shuffle": True, "batch_size": 4},
    "weighted": lambda: {"sampler": WeightedRandomSampler(torch.arange(13.0), 11), "batch_size": 4},
    "subset": lambda: {"sampler": SubsetRandomSampler([1, 3, 5, 7, 9]), "batch_size": 2},
    "batches": lambda: {"batch_sampler": BatchSampler(SubsetRandomSampler(range(13)), 5, drop_last=True)},
    "unequal batches": lambda: {"batch_sampler": [[3], [0, 1, 2, 4, 5], [6, 7]]},
    "a list": lambda: {"sampler": [5, 4, 3, 2, 1], "batch_size": 2},
    "own generator": lambda: SAMPLERS["shuffled"]() | {"generator": torch.Generator().manual_seed(3)},
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers(sampler, size, monkeypatch):
    seen = check_dealing(lambda: ddl.auto_dataloader(torch.arange(13), **SAMPLERS[sampler]()), size, monkeypatch)
    if sampler in ("shuffled", "weighted", "subset", "batches"):
        assert seen[0] != seen[1]  # epochs differ without set_epoch
    if sampler in ("shuffled", "own generator"):
        for batches in seen:
            assert sorted(sum(batches, [])) == list(range(13)) != sum(batches, [])
    if sampler == "subset":
        assert sorted(sum(seen[0], [])) == [1, 3, 5, 7, 9]
    if sampler == "unequal batches":
        assert seen[0] == [[3], [0, 1, 2, 4, 5], [6, 7]]


class Stream(IterableDataset):
    """Numbers 0, 1, ...; with workers each has every second one, as torch's documentation tells users to do."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.n)) if info is None else iter(range(info.id, self.n, info.num_workers))

    def __len__(self):
        return self.n


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_streams(workers, drop_last, monkeypatch):
    options = {"batch_size": 4, "num_workers": workers, "drop_last": drop_last}
    for size in (1, 2) if workers else (1, 2, 3, 4):
        seen = check_dealing(lambda: ddl.auto_dataloader(Stream(14), **options), size, monkeypatch, passes=1)
        assert len(ddl.auto_dataloader(Stream(14), **options)) == len(DataLoader(Stream(14), **options))
        assert seen[0] == [batch.tolist() for batch in DataLoader(Stream(14), **options)]


class Shuffled(IterableDataset):
    def __iter__(self):
        yield from torch.randperm(9).tolist()


def drawn(local_rank, workers):
    torch.manual_seed(local_rank)
    loader = ddl.auto_dataloader(Shuffled(), batch_size=4, num_workers=workers, collate_fn=None)
    return [torch.cat([*loader]).tolist() for _ in range(2)]


@pytest.mark.parametrize(("workers", "axes"), [(2, {"dp": 2}), (0, {"dp": 2, "tp": 2})])
def test_a_stream_that_draws_gives_each_row_once(workers, axes):
    """Every dp rank reads the whole stream, so all have to draw alike for their parts to fit together."""
    ranks = run(drawn, 2 * len(axes), workers, **axes)
    for first, second in zip(ranks[0], ranks[-1], strict=True):  # of dp rank 0, of dp rank 1
        assert sorted(first + second) == list(range(9))
    assert ranks[0][0] != ranks[0][1]
    assert ranks == [ranks[0]] * len(axes) + [ranks[-1]] * len(axes)


def test_what_a_rank_without_rows_keeps_of_a_batch(monkeypatch):
    """No rows of tensors and lists of strings; a number of the whole batch stays."""
    rows = [{"x": torch.ones(2), "file": "a.png"}]

    def collate(samples):
        return default_collate(samples) | {"scale": torch.tensor(0.5)}

    make = lambda: ddl.auto_dataloader(rows, batch_size=2, collate_fn=collate)  # noqa: E731
    [batch] = as_rank(0, 2, make, monkeypatch)
    assert batch["x"].shape == (0, 2)
    assert batch["file"] == []
    assert batch["scale"] == 0.5


def test_a_rank_without_rows_gets_an_empty_batch_and_a_row_to_compute(monkeypatch):
    data = TensorDataset(torch.arange(10).reshape(5, 2), torch.arange(5))
    for make in (lambda: ddl.auto_dataloader(data, batch_size=4), lambda: stream_of(data)):
        batches = list(_with_filler(as_rank(0, 2, make, monkeypatch)))
        (x, y), rows, filler = batches[-1]
        assert rows == (0, 1)
        assert x.shape == (0, 2)
        assert y.shape == (0,)
        assert filler[0].tolist() == [[8, 9]]
        assert batches[0][2] is None


def stream_of(data):
    class Rows(IterableDataset):
        def __iter__(self):
            return iter(data)

    return ddl.auto_dataloader(Rows(), batch_size=4)


def _with_filler(loader):
    for batch in loader:
        yield batch, loader.rows, loader.filler


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_is_left_early_is_no_epoch(workers, monkeypatch):
    """So a rank may look at a batch alone; an engine that stops at the last batch has had the whole epoch."""
    options = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    make = lambda: as_rank(1, 2, lambda: ddl.auto_dataloader(torch.arange(13), **options), monkeypatch)  # noqa: E731
    untouched, loader = make(), make()
    epochs = [dealt(untouched) for _ in range(3)]
    assert epochs[0][0] != epochs[1][0] != epochs[2][0]
    next(iter(loader))
    for batch, _ in zip(loader, range(2), strict=False):
        assert len(batch) == 2
    assert dealt(loader) == epochs[0]
    batches = iter(loader)
    again = [(next(batches).tolist(), loader.rows) for _ in range(2)]
    next(iter(loader))  # a peek inside the pass
    again += [(next(batches).tolist(), loader.rows) for _ in range(2)]
    assert ([rows for rows, _ in again], [sizes for _, sizes in again]) == epochs[1]
    assert dealt(loader) == epochs[2]
    loader.set_epoch(1)
    next(iter(loader))
    assert [dealt(loader), dealt(loader)] == epochs[1:]


def test_runs_of_an_engine_are_epochs_of_their_own():
    """An engine asks for no batch after its last one, and goes on in the same pass where its epochs are shorter."""
    loader = ddl.auto_dataloader(torch.arange(12), batch_size=4, shuffle=True)
    seen = []
    step = lambda engine, batch: seen.append(batch.tolist())  # noqa: E731
    for _ in range(2):
        Engine(step).run(loader, max_epochs=1)
    assert seen[:3] != seen[3:]
    assert sorted(sum(seen[:3], [])) == sorted(sum(seen[3:], [])) == list(range(12))
    seen.clear()
    Engine(step).run(loader, max_epochs=3, epoch_length=2)
    assert sorted(sum(seen[:3], [])) == sorted(sum(seen[3:], [])) == list(range(12))
    assert seen[:3] != seen[3:]


def peek_by_rank_0(local_rank, workers):
    torch.manual_seed(local_rank)
    loader = ddl.auto_dataloader(Noisy(), batch_size=4, shuffle=True, num_workers=workers)
    if idist.get_rank() == 0:
        next(iter(loader))
    return [torch.cat([*loader]) for _ in range(2)]


@pytest.mark.parametrize(("workers", "tp"), [(0, 2), (4, 1)])
def test_one_rank_may_look_at_a_batch(workers, tp):
    for epoch in zip(*run(peek_by_rank_0, 4, workers, tp=tp), strict=True):
        assert sorted(torch.cat(epoch[::tp])[:, 0].tolist()) == list(range(10))
        if tp == 2:  # peers have the same rows, with the same noise
            assert torch.equal(epoch[0], epoch[1])
            assert torch.equal(epoch[2], epoch[3])


def test_shuffling_leaves_the_random_stream_of_the_user_alone():
    def draws(**options):
        torch.manual_seed(5)
        for _ in ddl.auto_dataloader(torch.arange(9), batch_size=2, **options):
            pass
        return torch.rand(3).tolist()

    assert draws() == draws(shuffle=True) == draws(sampler=SubsetRandomSampler(range(9)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size should be the global batch size, a positive integer, but given 0"),
        ({"batch_size": None}, "batch_size .* but given None"),
        ({"batch_size": 2.0}, "batch_size .* but given 2.0"),
        ({"sampler": DistributedSampler(range(4), 2, 0)}, "sampler should be the sampler of one process"),
        (
            {"batch_sampler": BatchSampler(DistributedSampler(range(4), 2, 0), 2, False)},
            "batch_sampler should be the sampler of one process.*DistributedSampler",
        ),
        ({"sampler": [0, 1], "shuffle": True}, "sampler and shuffle=True exclude each other"),
        ({"batch_sampler": [[0]], "batch_size": 2}, "batch_sampler excludes batch_size"),
    ],
)
def test_loader_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        ddl.auto_dataloader(torch.arange(4), **options)


# -------------------------------------------------------------------------------------------- dealing, on ranks


class Noisy(Dataset):
    """Rows with noise drawn when they are read, as by a random crop."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.tensor([float(i), torch.rand(()).item()])


def load(local_rank, epochs=2):
    torch.manual_seed(100 + idist.get_rank())  # differently on each rank, as idist's users do
    loader = ddl.auto_dataloader(torch.arange(13), batch_size=4, shuffle=True)
    rows = [[dealt(loader)[0] for _ in range(epochs)]]
    torch.manual_seed(100 + idist.get_rank())
    sampler = WeightedRandomSampler(torch.ones(13), 7)
    loader = ddl.auto_dataloader(torch.arange(13), batch_size=4, sampler=sampler, num_workers=2)
    rows.append([dealt(loader)[0]])
    noise = [torch.cat([*ddl.auto_dataloader(Noisy(), batch_size=4, num_workers=workers)]) for workers in (0, 1)]
    return rows, loader.num_workers, noise


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_peers_see_the_same_rows_and_ranks_together_the_rows_of_one_process(axis):
    [(alone, workers, _)] = ddl.Parallel().run(load)  # seeded with 100, as rank 0
    assert workers == 2
    results = run(load, 4, **{"dp": 2, axis: 2})
    second = 2 if axis == "tp" else 1  # the first rank of the second dp place
    assert results[0][1] == 1  # two workers for this machine's ranks, at least one each
    for rank, (rows, _, noise) in enumerate(results):
        first_of_its_dp = rank // 2 * 2 if axis == "tp" else rank % 2
        assert rows == results[first_of_its_dp][0], "tp and pp peers differ"
        for mine, theirs in zip(noise, results[first_of_its_dp][2], strict=True):
            assert torch.equal(mine, theirs), "tp and pp peers draw differently while they read rows"
    for mine, other in zip(results[0][2], results[second][2], strict=True):
        assert not set(mine[:, 1].tolist()) & set(other[:, 1].tolist())  # dp ranks draw numbers of their own
    (left, _, _), (right, _, _) = results[0], results[second]
    for kind, kind_left, kind_right in zip(alone, left, right, strict=True):
        for epoch, epoch_left, epoch_right in zip(kind, kind_left, kind_right, strict=True):
            assert [a + b for a, b in zip(epoch_left, epoch_right, strict=True)] == epoch


# ------------------------------------------------------------------------------------------- models and weights


class Listed(nn.Module):
    """Layers in a ModuleList and a ModuleDict, which are never called themselves, and one weight twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 6)})
        self.heads["a"].weight = self.blocks[0].weight
        self.more = nn.ModuleList([nn.Linear(8, 8)])  # no weight of it is elsewhere
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x):
        x = self.first(x)
        for block in [*self.blocks, *self.more]:
            x = torch.tanh(block(x))
        return self.heads["b"](torch.tanh(self.heads["a"](x))) * self.scale


def layers():
    return nn.Sequential(
        OrderedDict(
            up=nn.Linear(6, 8), norm=nn.BatchNorm1d(8), relu=nn.ReLU(), down=nn.Linear(8, 8), end=nn.Linear(8, 4)
        )
    )


PLAN = {"up": ddl.Column(output_layouts=Replicate()), "down": ddl.Row(input_layouts=Replicate())}
MODELS = {"layers": layers, "listed": Listed}


def build(kind, seed):
    torch.manual_seed(seed)
    model = MODELS[kind]()
    for buffer in model.buffers():
        buffer.add_(torch.rand(()).to(buffer.dtype))
    return model


def same(one, other):
    assert list(one) == list(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(
    ("kind", "shard", "mesh"),
    [
        ("layers", False, {"dp": 2}),
        ("layers", True, {"dp": 2}),
        ("listed", True, {"dp": 2}),
        ("layers", False, {"pp": 2}),
        ("layers", True, {"dp": 2, "tp": 2}),
        pytest.param("layers", True, {"dp": 2, "pp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_each_rank()
def test_weights_are_those_of_rank_0_and_travel_both_ways(local_rank, kind, shard):
    mesh = ddl.get_mesh()
    model = ddl.auto_model(build(kind, mesh.rank), PLAN if kind == "layers" else None, shard=shard)
    same(ddl.full_state_dict(model), build(kind, 0).state_dict())  # though each rank built it from another seed
    loaded = {name: tensor + 1 for name, tensor in build(kind, 99).state_dict().items()}
    ddl.load_full_state_dict(model, loaded)
    for wrong, said in (
        (dict(list(loaded.items())[1:]), r"state should have the model's names, but lacks \["),
        (loaded | {"more": torch.ones(())}, r"has \['more'\] besides"),
        (loaded | {list(loaded)[-1]: torch.ones(99, 99)}, r"should have shape .*but has \(99, 99\)"),  # of any stage
    ):
        with pytest.raises(ValueError, match=said):
            ddl.load_full_state_dict(model, wrong)
    after = ddl.full_state_dict(model)  # which the refused ones have not changed
    if kind == "listed":
        loaded["heads.a.weight"] = loaded["blocks.0.weight"]
    same(after, loaded)
    assert all(type(t) is torch.Tensor and t.device.type == "cpu" for t in after.values())
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    whole = sum(p.numel() for p in build(kind, 0).parameters())
    if mesh.world_size == 2:
        in_all = whole if shard or mesh.pp_size == 2 else 2 * whole
        assert idist.all_reduce(held) == in_all
        assert mesh.pp_size == 2 or held == in_all // 2


@on_each_rank(dp=2)
def test_models_that_once_failed(local_rank):
    """Weights that are not contiguous, a child named module, a model on its own, a list of layers."""
    torch.manual_seed(0)
    weight = nn.Conv2d(2, 3, 3).weight.detach()
    torch.manual_seed(local_rank)
    model = nn.Sequential(nn.Conv2d(2, 3, 3)).to(memory_format=torch.channels_last)
    assert torch.equal(ddl.full_state_dict(ddl.auto_model(model, shard=True))["0.weight"], weight)
    model = ddl.auto_model(nn.Sequential(OrderedDict(module=nn.Linear(2, 2))))
    assert list(ddl.full_state_dict(model)) == ["module.weight", "module.bias"]
    assert ddl.auto_model(nn.Linear(2, 2), shard=True)(torch.ones(1, 2)).shape == (1, 2)
    model = ddl.auto_model(Listed(), shard=True)
    model(torch.ones(2, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_serial_calls_return_their_argument():
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert ddl.auto_model(model, PLAN, schedule="zbv", n_microbatches=3, shard=True) is model
    assert ddl.auto_optim(optimizer) is optimizer
    state = ddl.full_state_dict(model)
    same(state, model.state_dict())
    assert all(state[n].data_ptr() != t.data_ptr() for n, t in model.state_dict().items())
    ddl.load_full_state_dict(model, {n: t * 0 for n, t in state.items()})
    assert not any(t.any() for t in model.state_dict().values())


def test_a_plan_is_checked_on_every_mesh_also_on_one_process():
    with pytest.raises(ValueError, match="tensor_plan has the key 'upp', which matches no module"):
        ddl.auto_model(layers(), {"upp": ddl.Column()})


# ------------------------------------------------------------------------------------------------- refused models

REFUSED = [
    ({"tensor_plan": {"upp": ddl.Column()}}, "tensor_plan has the key 'upp'.*up, norm, down, end"),
    ({"tensor_plan": {"end": ddl.Row(), "up": ddl.Column(units=3)}}, "tp=2 should divide the 3 units of 'up'"),
    ({"n_microbatches": 3, "schedule": "dualpipev"}, "n_microbatches=3 does not suit schedule='dualpipev'"),
    ({"split": [2, 2]}, "split should name the layers of each of 2 stages, at least one each, 5 in all"),
    ({"find_unused_parameters": True}, "find_unused_parameters are for DDP, but the mesh is"),
    ({"model": "listed"}, "model should be an nn.Sequential under pp, but given Listed"),
    ({"schedule": "zbv", "split": [2, 1, 1, 1]}, "cannot run stage 1 \\(relu\\): it has no trainable parameter"),
]


@on_each_rank(pp=2, tp=2)
def test_models_that_do_not_fit_are_refused_on_each_rank_alone(local_rank):
    for options, expected in REFUSED:
        model = MODELS[options.pop("model", "layers")]()
        message = each_alone(ddl.auto_model, model, **options)
        assert re.search(expected, message), f"{options}: {message or 'not refused'}"


def test_copies_of_a_loader_do_not_share_their_sizes():
    loader = ddl.auto_dataloader(torch.arange(6), batch_size=4)
    twin = copy.deepcopy(loader)
    assert dealt(loader) == dealt(twin) == ([[0, 1, 2, 3], [4, 5]], [(4, 4), (2, 2)])


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


def rows_for_norms():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 3, generator=generator, dtype=torch.double) + torch.arange(24.0)[:, None]
    return TensorDataset(x, torch.randn(24, 1, generator=generator, dtype=torch.double))


@pytest.mark.parametrize(
    ("mesh", "plan", "shard"),
    [
        ({"dp": 2}, None, False),
        ({"dp": 2, "tp": 2}, {"0": ddl.Column(output_layouts=Replicate())}, True),
        ({"dp": 2, "pp": 2}, None, False),
    ],
    ids=["dp2", "dp2 tp2 shard", "dp2 pp2"],
)
@on_each_rank()
def test_batchnorm_keeps_the_statistics_of_dp_rank_0(local_rank, plan, shard):
    one = normed()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for start in range(0, 24, 8):
        x, y = (tensor[start : start + 8] for tensor in rows_for_norms().tensors)
        optimizer.zero_grad()
        before = copy.deepcopy(one.state_dict())
        for here in (slice(4, 8), slice(0, 4)):  # dp rank 0's rows last: its statistics stay
            one.load_state_dict(before)
            (nn.functional.mse_loss(one(x[here]), y[here]) / 2).backward()
        optimizer.step()
    model = ddl.auto_model(normed(), plan, shard=shard, n_microbatches=1, schedule="gpipe")
    trainer_of(model).run(ddl.auto_dataloader(rows_for_norms(), batch_size=8))
    state = ddl.full_state_dict(model)
    for name, tensor in one.state_dict().items():
        assert torch.allclose(state[name], tensor, rtol=0, atol=1e-12), name
    evaluator = ddl.create_supervised_evaluator(model, output_transform=lambda x, y, y_pred: y_pred)
    seen = []
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.output))
    evaluator.run([rows_for_norms().tensors])
    assert torch.allclose(seen[0], one.eval()(rows_for_norms().tensors[0]), rtol=0, atol=1e-12)


@on_each_rank(dp=2, tp=2)
def test_an_optimizer_made_after_a_forward_pass_trains(local_rank):
    """Where weights are sharded, which the pass gathers; other models are in test_handlers.py."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model = ddl.auto_model(model, {"0": ddl.Column(), "2": ddl.Row()}, shard=True)
    before = ddl.full_state_dict(model)
    with torch.no_grad():
        model(torch.ones(4, 4))
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 4))
    trainer_of(model).run(ddl.auto_dataloader(data, batch_size=8))  # of what the pass has left
    after = ddl.full_state_dict(model)
    assert not any(torch.equal(before[name], after[name]) for name in before)


# ------------------------------------------------------------------------------------------- what FSDP2 gathers


SIZE, LAYERS = 64, 16


class Residual(nn.Module):
    """A block as transformers have them: with a Sequential of its own, and gathered as one."""

    def __init__(self, width=SIZE):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width // 2), nn.Tanh(), nn.Linear(width // 2, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Around(nn.Module):
    """Something with layers, and a head beside it."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        for part in self.children():
            for layer in part if isinstance(part, nn.ModuleList) else [part]:
                x = layer(x)
        return x


def linears(n=LAYERS):
    return [layer for _ in range(n) for layer in (nn.Linear(SIZE, SIZE, bias=False), nn.Tanh())]


def tied():
    """The head is the first layer's matrix, two floors below; the model's own parameter is tied to a third's."""
    model = Around(transformer=Around(layers=nn.Sequential(*linears(4))), head=nn.Linear(SIZE, SIZE, bias=False))
    model.head.weight = model.transformer.layers[0].weight
    model.register_parameter("scale", model.transformer.layers[2].weight)
    return model


SHAPES = {  # the model, and the largest number of weights that one gather has to bring
    "a list": (lambda: Around(layers=nn.ModuleList(linears())), SIZE**2),
    "a Sequential below the model": (lambda: Around(body=nn.Sequential(*linears())), SIZE**2),
    "a list two floors below": (
        lambda: Around(transformer=Around(layers=nn.ModuleList(linears())), head=nn.Linear(SIZE, SIZE, bias=False)),
        SIZE**2,
    ),
    "a Sequential of Sequentials": (
        lambda: nn.Sequential(nn.Sequential(*linears(8)), nn.Sequential(*linears(8))), SIZE**2
    ),
    "blocks": (
        lambda: Around(body=nn.Sequential(*[Residual() for _ in range(4)])), SIZE**2 + SIZE * 3 + SIZE // 2
    ),
    "tied": (tied, 2 * SIZE**2),
    "torch's encoder": (
        lambda: Around(
            encoder=nn.TransformerEncoder(
                nn.TransformerEncoderLayer(SIZE, 4, SIZE, 0.0, batch_first=True), 3, enable_nested_tensor=False
            ),
            head=nn.Linear(SIZE, SIZE),
        ),
        6 * SIZE**2 + 10 * SIZE,
    ),
}  # fmt: skip


@on_each_rank(dp=2)
def test_sharded_layers_are_gathered_one_at_a_time_wherever_they_are(local_rank):
    logging.disable(logging.INFO)
    for name, (make, largest) in SHAPES.items():
        torch.manual_seed(0)
        one = make().double()
        model = ddl.auto_model(copy.deepcopy(one), shard=True)
        x = torch.randn(8, 1, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (one, model)]
        for _ in range(2):
            one(x).square().mean().backward()
            with count_bytes() as traffic:
                loss = model(x.chunk(idist.get_world_size())[idist.get_rank()]).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        whole = ddl.full_state_dict(model)
        error = max(float((whole[n] - w).abs().max()) for n, w in one.state_dict().items())
        model.eval()(x)  # torch's fast path looks at weights on its way
        assert max(call.got // 8 for call in traffic.calls) == largest, (name, traffic.calls)
        assert error <= 1e-12, (name, error)
        assert len(list(model.parameters())) == len(list(one.parameters())), name
        assert name != "blocks" or len(traffic.calls) == 4  # a block is one, with the Sequential in it
