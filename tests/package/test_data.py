"""auto_dataloader deals one process's batches, whatever the sampler, and what it refuses."""

import copy
import dataclasses
import itertools
import random
from collections import UserDict

import ignite.distributed as idist
import pytest
import torch
from hypothesis import given, strategies as st
from ignite.engine import Engine, Events
from ranks import launch, mesh_of, run
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import default_collate
from torch.utils.data.distributed import DistributedSampler

import ignite_ddl as ddl
from ignite_ddl import data as module
from ignite_ddl.epoch_plan import part


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
    parts = [part(n, rank, size) for rank in range(size)]
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


class Words:
    def __init__(self, word):
        self.word = word


class StreamOf(IterableDataset):
    epoch = 0

    def __init__(self, samples):
        self.samples = samples

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.samples)

    def __iter__(self):
        return iter(self.samples)


def odd_samples(local_rank):
    words = [{f"{letter}{i}" for letter in "abcdef"} for i in range(5)]  # of which each process has an order of its own
    kinds = (
        [Words(word) for word in "abcde"],
        words,
        list(torch.arange(5.0).bfloat16()),
        list((1j * torch.arange(5.0)).conj()),
    )
    counts = []
    for samples in kinds:
        loader = ddl.auto_dataloader(StreamOf(samples), batch_size=2, collate_fn=len)
        loader.dataset.set_epoch(3)
        assert (loader.dataset.epoch, len(loader.dataset), len(loader), loader.batch_size) == (3, 5, 3, 2)
        counts.append(list(loader))
    sampler = torch.utils.data.SubsetRandomSampler([1, 3, 4])
    assert ddl.auto_dataloader(torch.arange(9), sampler=sampler, batch_size=2).sampler is sampler
    return counts


def test_samples_without_a_representation_and_a_loaders_attributes():
    assert run(odd_samples, 2, dp=2) == [[[1, 1, 1]] * 4] * 2


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


def streamed(local_rank):
    return [batch.tolist() for batch in ddl.auto_dataloader(Stream(14), batch_size=4, num_workers=2)]


def test_workers_of_a_stream_make_the_batches_of_one_process():
    first, second = run(streamed, 2, dp=2)
    assert [a + b for a, b in zip(first, second, strict=True)] == streamed(0)


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
        assert sorted(first + second) == sorted([*range(9)] * max(1, workers))  # each worker reads all, as in torch
    assert ranks[0][0] != ranks[0][1]
    assert ranks == [ranks[0]] * len(axes) + [ranks[-1]] * len(axes)


class Epochs(IterableDataset):
    """Rows, or batches of them, in an order that an attribute says; a class for a dataset, and for a batch sampler."""

    def __init__(self, batch_size=1):
        self.seed, self.rank, self.dataset, self.batch_size = 0, 0, 6, batch_size  # names of attributes of ours, too

    def set_seed(self, seed):
        self.seed = seed

    def __len__(self):
        return self.dataset // self.batch_size

    def __iter__(self):
        order = torch.randperm(self.dataset, generator=torch.Generator().manual_seed(self.seed)) + self.rank
        return iter(order.tolist() if self.batch_size == 1 else order.reshape(-1, self.batch_size).tolist())


class Scaling:
    scale = 1

    def __call__(self, samples):
        return self.scale * torch.tensor(samples)


def by_worker(number):
    get_worker_info().dataset.rank += 10 * number


def attributes_are_set(local_rank, make):
    kinds = (Epochs(), {}), ([*range(20)], {"batch_sampler": Epochs(2)}), (Epochs(), {"num_workers": 2})
    found = []
    for dataset, options in kinds:
        sizes = {} if "batch_sampler" in options else {"batch_size": 2}
        loader = make(dataset, **options, **sizes, collate_fn=Scaling(), worker_init_fn=by_worker)
        holder = getattr(loader, "batch_sampler" if "batch_sampler" in options else "dataset")
        holder.set_seed(3)
        found += [*loader]
        holder.seed, holder.rank, loader.collate_fn.scale = 5, 2, 3
        found += [*loader]
        loader.collate_fn = torch.tensor
        found += [*loader]
        assert (holder.seed, len(holder), copy.deepcopy(holder).seed) == (5, 6 // holder.batch_size, 5)
    return [batch.tolist() for batch in found]


def test_attributes_of_what_was_given_are_set_by_the_loader():
    alone = attributes_are_set(0, DataLoader)
    assert attributes_are_set(0, ddl.auto_dataloader) == alone
    ranks = run(attributes_are_set, 2, ddl.auto_dataloader, dp=2)
    assert [first + second for first, second in zip(*ranks, strict=True)] == alone


def test_what_a_rank_without_rows_keeps_of_a_batch(monkeypatch):
    """No rows of tensors, of lists of strings and of other lists; a number of the whole batch stays."""
    rows = [{"x": torch.ones(2), "file": "a.png"}]

    def collate(samples):
        others = {"scale": torch.tensor(0.5), "words": [["a", "cat"]], "references": [[["the", "cat"]]], "sizes": [3]}
        return default_collate(samples) | others | {"sparse": torch.ones(1, 2).to_sparse()}

    make = lambda: ddl.auto_dataloader(rows, batch_size=2, collate_fn=collate)  # noqa: E731
    [batch] = as_rank(0, 2, make, monkeypatch)
    assert batch["x"].shape == batch["sparse"].shape == (0, 2)
    assert batch["file"] == []
    assert batch["scale"] == 0.5
    assert batch["words"] == batch["references"] == batch["sizes"] == []


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


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_an_epoch_that_an_engine_ends_is_over(options):
    """The next one has another order, also of workers that have read ahead; with a generator, torch's own."""
    orders = {}
    for name, make, seed in (
        ("ours", ddl.auto_dataloader, None),
        ("by seed", ddl.auto_dataloader, 1),
        ("torch", DataLoader, 1),
    ):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader = make(torch.arange(12), batch_size=2, shuffle=True, generator=generator, **options)
        engine, seen = ddl.MeshEngine(lambda _, batch: seen.append(batch.tolist())), []  # noqa: B023
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), engine.terminate_epoch)
        engine.run(loader, max_epochs=2)
        orders[name] = seen
    assert len(orders["ours"]) == 9
    assert orders["ours"][:3] != orders["ours"][3:6]
    assert orders["by seed"] == orders["torch"]


def test_the_loader_says_what_it_was_asked_for():
    loader = ddl.auto_dataloader(torch.arange(13), batch_size=4, drop_last=True)
    assert (loader.batch_size, loader.drop_last, len(loader)) == (4, True, 3)
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (4, True)
    assert ddl.auto_dataloader(torch.arange(13)).batch_size == 1
    assert ddl.auto_dataloader(torch.arange(13), batch_sampler=[[1, 2], [3]]).batch_size is None


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


class Endless(Sampler):
    def __iter__(self):
        return itertools.cycle(range(4))


class EndlessWithLength(Endless):
    def __len__(self):
        return 4


@pytest.mark.parametrize("sampler", [Endless(), EndlessWithLength()])
def test_a_sampler_without_an_end_is_refused(sampler):
    loader = ddl.auto_dataloader(torch.arange(4), batch_size=2, sampler=sampler)
    with pytest.raises(ValueError, match="sampler should end with an epoch"):
        next(iter(loader))
    repeats = iter(list(range(4)) * 10)  # an iterable that says no length may read rows several times
    assert len(dealt(ddl.auto_dataloader(torch.arange(4), batch_size=2, sampler=repeats))[0]) == 20


def collate_of_even(rows):
    return default_collate([row for row in rows if row % 2 == 0])


def test_a_rank_whose_rows_a_collate_function_drops(monkeypatch):
    loader = lambda: ddl.auto_dataloader([0, 1], batch_size=2, collate_fn=collate_of_even)  # noqa: E731
    with pytest.raises(IndexError) as error:
        list(as_rank(1, 2, loader, monkeypatch))
    assert "leave them out of the dataset" in error.value.__notes__[0]


def test_the_order_of_rows_leaves_the_streams_of_gpus_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a pass seeds the GPUs"))
    assert len(list(ddl.auto_dataloader(range(8), batch_size=4, shuffle=True))) == 2


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
        ({"batch_size": None}, "batch_size .* but given None; a dataset of whole batches has to return single rows"),
        ({"batch_size": 2.0}, "batch_size .* but given 2.0"),
        ({"sampler": DistributedSampler(range(4), 2, 0)}, "sampler should be the sampler of one process"),
        (
            {"batch_sampler": BatchSampler(DistributedSampler(range(4), 2, 0), 2, False)},
            "batch_sampler should be the sampler of one process.*DistributedSampler",
        ),
        ({"sampler": [0, 1], "shuffle": True}, "sampler option is mutually exclusive with shuffle"),
        ({"batch_sampler": [[0]], "batch_size": 2}, "batch_sampler option is mutually exclusive with batch_size"),
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


def test_copies_of_a_loader_do_not_share_their_sizes():
    loader = ddl.auto_dataloader(torch.arange(6), batch_size=4)
    twin = copy.deepcopy(loader)
    assert dealt(loader) == dealt(twin) == ([[0, 1, 2, 3], [4, 5]], [(4, 4), (2, 2)])


# --- ranks that do not have the same dataset, or do not list the same batches


class Files(torch.utils.data.Dataset):
    """Rows by a list of names."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return torch.full((3,), float(self.names[index])), torch.zeros(1)


def of_dp_rank(kind):
    rank, names = idist.get_rank(), [str(n) for n in range(8)]
    data = TensorDataset(torch.arange(8.0).repeat(3, 1).T, torch.zeros(8, 1))
    if kind == "divided":
        return torch.utils.data.Subset(data, range(rank, 8, 2))
    if kind == "divided unevenly":
        return torch.utils.data.Subset(data, range(rank, 7, 2))
    if kind == "files in another order":
        return Files(names[rank:] + names[:rank])
    if kind == "other numbers":
        return TensorDataset(torch.full((8, 3), float(rank)), torch.zeros(8, 1))
    if kind == "a list":
        return [(torch.full((3,), float(n + rank)), torch.zeros(1)) for n in range(8)]
    return {"the same files": Files(names), "the same": data}[kind]


class Drawn(torch.utils.data.Sampler):
    """Batches of an order that a rank draws for itself."""

    def __init__(self, differ):
        self.differ = differ

    def __iter__(self):
        order = list(range(8))
        random.Random(idist.get_rank() if self.differ else 0).shuffle(order)
        return iter([order[:4], order[4:]])

    def __len__(self):
        return 2


def train_on(local_rank, kind, sampler=None):
    given = {"batch_size": 4} if sampler is None else {"batch_sampler": sampler}
    loader = ddl.auto_dataloader(of_dp_rank(kind), **given)
    model = ddl.auto_model(torch.nn.Linear(3, 1))
    trainer = ddl.create_supervised_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss
    )
    return trainer.run(loader).output


@pytest.mark.parametrize("kind", ["divided", "divided unevenly", "files in another order", "other numbers", "a list"])
def test_a_dataset_that_differs_between_ranks_is_refused(kind):
    with pytest.raises(ddl.RankError, match="dataset should be the same on each rank"):
        launch({"dp": 2}, train_on, kind)


@pytest.mark.parametrize("kind", ["the same files", "the same"])
def test_batches_that_differ_between_ranks_are_refused(kind):
    with pytest.raises(ddl.RankError, match="ranks should list the same batches of an epoch"):
        launch({"dp": 2}, train_on, kind, Drawn(True))
    first, second = launch({"dp": 2}, train_on, kind, Drawn(False))
    assert first == second


@dataclasses.dataclass
class Rows:
    x: torch.Tensor


class Opaque:
    def __init__(self, x):
        self.x = x


def rows_by_hand(local_rank, kind):
    """What a loop of one's own reads; a rank may have no rows of the last batch."""
    kinds = {"user dict": lambda x: UserDict(x=x), "dataclass": Rows, "dict": lambda x: {"x": x}, "opaque": Opaque}
    collate = lambda samples: kinds[kind](torch.stack([x for (x,) in samples]))  # noqa: E731
    data = TensorDataset(torch.arange(7.0))
    loader = ddl.auto_dataloader(data, batch_size=5, collate_fn=collate)
    return [len(batch["x"] if "dict" in kind else batch.x) for batch in loader]


@pytest.mark.parametrize("kind", ["dict", "user dict", "dataclass"])
def test_a_rank_without_rows_gets_none_in_a_loop_by_hand(kind):
    assert [sum(of_batch) for of_batch in zip(*launch({"dp": 3}, rows_by_hand, kind), strict=True)] == [5, 2]


def test_rows_that_cannot_be_removed_are_refused_in_a_loop_by_hand():
    with pytest.raises(ddl.RankError, match="they cannot be removed from a Opaque: let collate_fn return"):
        launch({"dp": 3}, rows_by_hand, "opaque")
