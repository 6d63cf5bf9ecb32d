"""The data loader on a mesh: each global batch is split among the data-parallel ranks."""

from __future__ import annotations

import contextlib
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import default_collate
from torch.utils.data.distributed import DistributedSampler

from ignite_ddl.arguments import AMOUNT, COUNT, FLAG, FUNCTION, PROCESSES, Fits, a, check, or_none, takes, whole
from ignite_ddl.mesh import Mesh, get_mesh

__all__ = ["ShardedDataLoader", "auto_dataloader", "part", "without_rows"]


def _is_sampler(value: Any) -> bool:
    no_row = isinstance(value, str | bytes | Mapping | type) or getattr(value, "ndim", 1) == 0
    return hasattr(value, "__iter__") and not no_row


def _is_dataset(value: Any) -> bool:
    by_rows = hasattr(value, "__getitem__") or hasattr(value, "__getitems__")
    return isinstance(value, IterableDataset) or (by_rows and not isinstance(value, type))


DATASET = a("a dataset, with __getitem__ and __len__, or an IterableDataset", _is_dataset)
FITS = {
    "dataset": DATASET,
    "num_workers": whole(0, PROCESSES),
    "shuffle": or_none(FLAG),
    "timeout": AMOUNT,
    "generator": or_none(a("a torch.Generator", torch.Generator)),
    "prefetch_factor": or_none(COUNT),
    **dict.fromkeys(("sampler", "batch_sampler"), or_none(a("a sampler", _is_sampler))),
    **dict.fromkeys(("collate_fn", "worker_init_fn"), or_none(FUNCTION)),
    **dict.fromkeys(("drop_last", "pin_memory", "persistent_workers", "in_order"), FLAG),
}
BATCH_SIZE = Fits("the global batch size, a positive integer", COUNT.read)


@takes(FITS)
def auto_dataloader(dataset: Dataset, **kwargs: Any) -> ShardedDataLoader:
    """A ``DataLoader`` with the global batches of one process, split evenly over the dp axis; every rank calls it.

    Each dp rank gets a contiguous part of every global batch; tp and pp peers get the same rows. No rows are padded or
    dropped: of the last global batch a rank may get fewer rows, or none. ``ddl.create_supervised_trainer`` weights
    losses and gradients by rows, so results do not change.

    Shuffling is the same on every rank and differs by epoch without ``set_epoch``. An epoch ends when an iterator
    returns its last batch; if iteration stops before, the next iterator has the same order. So a single rank may look
    at the first batch, provided that an epoch has more than one. Random samplers and transforms should use torch's
    random stream, so that tp and pp peers get the same rows. An iterable dataset, and a sampler or a ``generator``
    with a random state of its own, change state with every iterator: create iterators of these on all ranks.

    Args:
        dataset: a map-style or an iterable dataset. An iterable one is read entirely on each rank, with the same
            random numbers on all.
        kwargs: those of ``torch.utils.data.DataLoader``. ``batch_size`` is the global one, ``num_workers`` is
            divided among the ranks of a machine, ``sampler`` and ``batch_sampler`` are those of one process and must
            be finite: an epoch's batches are listed when it begins.

    Returns:
        ShardedDataLoader: the loader; its ``rows`` are the numbers of rows of the current batch, here and in all.

    Raises:
        ValueError: if a sampler is given that already divides the data among ranks.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def rows_seen(local_rank):
                loader = ddl.auto_dataloader(torch.arange(10), batch_size=4)
                return [batch.tolist() for batch in loader]

            with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                first, second = parallel.run(rows_seen)

            assert first == [[0, 1], [4, 5], [8]]
            assert second == [[2, 3], [6, 7], [9]]
    """
    mesh = get_mesh()
    loader = _make_loader(dataset, mesh, **kwargs)
    streamed = isinstance(dataset, IterableDataset)  # read by each dp rank, with the same random numbers
    if mesh.dp_size < mesh.world_size or (streamed and mesh.world_size > 1):
        seed = _common_seed(mesh) + 1 + (0 if streamed else mesh.dp_rank)
        loader.stream = torch.Generator().manual_seed(seed)
    return loader


def _make_loader(dataset: Dataset, mesh: Mesh, **kwargs: Any) -> ShardedDataLoader:
    for name in ("sampler", "batch_sampler"):
        given = kwargs.get(name)
        inner = getattr(given, "sampler", None)  # of a BatchSampler
        divided = next((s for s in (given, inner) if isinstance(s, DistributedSampler)), None)
        if divided is not None:
            raise ValueError(
                f"{name} should be the sampler of one process, which auto_dataloader divides among the ranks, "
                f"but given a {type(divided).__name__}"
            )
    if kwargs.get("batch_sampler") is not None and ({"batch_size", "drop_last"} & set(kwargs)):
        raise ValueError("batch_sampler excludes batch_size and drop_last: it decides the batches")
    batch_size = kwargs.pop("batch_size", 1)
    if kwargs.get("batch_sampler") is None:
        batch_size = check("batch_size", batch_size, BATCH_SIZE)
        if kwargs.get("sampler") is None and not isinstance(dataset, IterableDataset):
            check("dataset", dataset, a(DATASET.says, lambda value: len(value) >= 0))
    workers = kwargs.get("num_workers", 0)
    if workers and idist.get_world_size() > 1:
        kwargs["num_workers"] = -(-workers // idist.get_nproc_per_node())
    kwargs.setdefault("pin_memory", idist.device().type == "cuda")
    drop_last = kwargs.pop("drop_last", False)
    if isinstance(dataset, IterableDataset):
        shares = _IterableShares(
            dataset, batch_size, drop_last, mesh, kwargs.pop("collate_fn", None) or default_collate
        )
        return ShardedDataLoader(shares, batch_size=None, **kwargs)
    batches = kwargs.pop("batch_sampler", None)
    if batches is None:
        sampler = kwargs.pop("sampler", None)
        if kwargs.pop("shuffle", False):
            if sampler is not None:
                raise ValueError("sampler and shuffle=True exclude each other: the sampler decides the order")
            sampler = RandomSampler(dataset, generator=kwargs.get("generator"))
        batches = BatchSampler(sampler if sampler is not None else SequentialSampler(dataset), batch_size, drop_last)
    generator, workers = kwargs.get("generator"), kwargs.get("num_workers", 0)
    shares = _Shares(batches, _common_seed(mesh), mesh.dp_rank, mesh.dp_size, generator, workers)
    return ShardedDataLoader(dataset, batch_sampler=shares, **kwargs)


class ShardedDataLoader(DataLoader):
    """Loads this rank's part of every global batch. Made by :func:`auto_dataloader`.

    Attributes:
        rows: ``(here, in all)``: number of rows of the current batch on this rank and on the whole dp axis.
        filler: if ``rows[0]`` is 0, a batch with one row of the global batch, which a rank without rows computes with
            weight 0 so that its peers do not wait; else None.
    """

    rows: tuple[int, int] = (0, 0)
    filler: Any = None
    stream: torch.Generator | None = None  # the random stream of transforms, shared by tp and pp peers
    position: _Position | None = None  # of the iterator that gave the last batch
    resumed: dict[str, Any] | None = None  # where the next iterator begins, if not at the beginning

    def __iter__(self) -> Iterator[Any]:
        if self.batch_sampler is None:
            yield from self._iterate_stream()
            return
        # Each iterator has its own sizes, filled with its first batch, and its own random stream until it ends.
        shares, sizes = self.batch_sampler, deque()
        epoch, stream = shares.epoch, self.stream and self.stream.clone_state()
        shares.sizes, shares.resumed = sizes, self.resumed
        first, self.resumed = self.resumed, None
        position = _Position(epoch, first["batches"] if first else 0, first["rows"] if first else 0, stream)
        for batch in self._batches(stream, unnoticed=first is not None):
            here, in_all = sizes.popleft()
            # Advanced with the last batch: one rank alone may begin an epoch, and Ignite does not exhaust iterators.
            if not sizes and shares.epoch == epoch:
                shares.epoch, self.stream = epoch + 1, stream
            position.advance(in_all, is_last=not sizes)
            position.order, position.generator = shares.order, shares.generator_state
            self.position = position
            yield self._present(batch, here, in_all)

    def _iterate_stream(self) -> Iterator[Any]:
        """An iterable dataset: its batches carry their sizes, and a resumed iterator reads from its beginning."""
        first, self.resumed = self.resumed, None
        begun = self.stream.get_state() if self.stream is not None else torch.get_rng_state()
        position = _Position(first["epoch"] if first else 0, 0, 0, self.stream)
        before = None
        if first is not None:
            begun, before = first["begun"], torch.get_rng_state()
            self.stream.set_state(begun) if self.stream is not None else torch.set_rng_state(begun)
        skip = first["batches"] if first else 0
        for batch, here, in_all, fingerprint in self._batches(self.stream):
            if position.batches == 0:
                _check_same_samples(fingerprint)
            position.advance(in_all)
            position.begun, position.order = begun, fingerprint
            self.position = position
            if position.batches < skip:
                continue
            if position.batches == skip:
                if (position.rows, fingerprint) != (first["rows"], first["order"]):
                    raise ValueError(
                        "dataset should give the samples of the interrupted run once more, but gives others: take the "
                        "same batch_size, and let it draw random numbers from torch"
                    )
                if self.stream is None:
                    torch.set_rng_state(before)
                continue
            yield self._present(batch, here, in_all)

    def _batches(self, stream: torch.Generator | None, unnoticed: bool = False) -> Iterator[Any]:
        # A new iterator draws a number; where a run is resumed, the interrupted one has drawn it before.
        with torch.random.fork_rng(devices=[], enabled=unnoticed), _shared_random_stream(stream):
            drawn = stream.get_state() if unnoticed and stream is not None else None
            batches = super().__iter__()
        if drawn is not None:
            stream.set_state(drawn)
        while True:
            with _shared_random_stream(stream):
                batch = next(batches, self)
            if batch is self:
                return
            yield batch

    def _present(self, batch: Any, here: int, in_all: int) -> Any:
        self.rows = here, in_all
        self.filler = None
        if here == 0:
            self.filler = batch
            return without_rows(batch)
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iterator's shuffling, which otherwise advances by itself."""
        if isinstance(self.batch_sampler, _Shares):
            self.batch_sampler.epoch = epoch
            if self.resumed is not None and self.resumed["epoch"] != epoch:
                self.resumed = None

    def state_dict(self) -> dict[str, Any]:
        """Where the iterator that gave the last batch is: what another loader needs to go on from there.

        Returns:
            dict: the epoch, the batches and rows of it that have been given, and what the order of the rows and the
            random numbers of transforms depend on.
        """
        shares, at = self.batch_sampler, self.position
        state: dict[str, Any] = {"epoch": 0 if shares is None else shares.epoch, "batches": 0, "rows": 0}
        stream = self.stream
        if self.resumed is not None:  # loaded, and nothing read since
            state |= self.resumed
        elif at is not None and not at.ended:
            stream = at.stream
            state |= {"epoch": at.epoch, "batches": at.batches, "rows": at.rows, "order": at.order}
            state |= {"begun": at.begun, "generator": at.generator}
        elif self.generator is not None:
            state["generator"] = self.generator.get_state()
        state["seed"] = None if shares is None else shares.seed
        state["stream"] = None if stream is None else stream.get_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iterator go on where the one of :meth:`state_dict` was. The mesh may be another one.

        The next iterator raises a ValueError if batch size, dataset or sampler give another order of rows.

        Args:
            state: from :meth:`state_dict`.
        """
        self.position, self.resumed = None, dict(state) if state["batches"] else None
        if self.stream is not None and state["stream"] is not None:
            self.stream.set_state(state["stream"])
        if isinstance(self.batch_sampler, _Shares):
            self.batch_sampler.epoch, self.batch_sampler.seed = state["epoch"], state["seed"]
        if self.generator is not None and state.get("generator") is not None:
            self.generator.set_state(state["generator"])

    def reseed(self) -> None:
        """Another random stream of transforms: on a dp rank that the saved run did not have."""
        if self.stream is not None:
            self.stream.manual_seed(self.stream.initial_seed() + get_mesh().dp_rank + 1)


@dataclass
class _Position:
    """How far an iterator of a loader is."""

    epoch: int
    batches: int
    rows: int
    stream: torch.Generator | None
    ended: bool = False
    order: int | None = None  # a number for the order of the epoch's rows, or for the samples of the last batch
    generator: torch.Tensor | None = None  # the state from which the order was drawn
    begun: torch.Tensor | None = None  # the random state in which an iterable dataset was begun

    def advance(self, rows: int, is_last: bool = False) -> None:
        self.batches, self.rows, self.ended = self.batches + 1, self.rows + rows, is_last


def without_rows(batch: Any) -> Any:
    """A batch, or the model's output for it, with all rows removed."""
    return tree_map(_no_rows, batch, is_leaf=_is_strings)


def _is_strings(leaf: Any) -> bool:
    """Whether this is a batch of strings, as made by the default collate function."""
    return isinstance(leaf, list | tuple) and len(leaf) > 0 and all(isinstance(w, str | bytes) for w in leaf)


def _no_rows(leaf: Any) -> Any:
    rows = isinstance(leaf, torch.Tensor) and leaf.ndim > 0  # a scalar of the whole batch is kept
    return leaf[:0] if rows or _is_strings(leaf) else leaf


@contextlib.contextmanager
def _shared_random_stream(stream: torch.Generator | None) -> Iterator[None]:
    """Draws from a random stream that tp and pp peers share, so that they read the same rows."""
    if stream is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(stream.get_state())
        yield
        stream.set_state(torch.get_rng_state())


class _Shares(Sampler[list[int]]):
    """This rank's part of each batch of one process's batch sampler, in the same order on every rank."""

    def __init__(
        self, batches: Any, seed: int, rank: int, size: int, generator: torch.Generator | None, workers: int
    ) -> None:
        self.batches, self.seed, self.rank, self.size = batches, seed, rank, size
        self.generator, self.workers = generator, workers
        self.epoch = 0  # of the next iterator; advanced by the loader
        self.sizes: deque[tuple[int, int]] = deque()  # (here, in all) of the remaining batches
        self.resumed: dict[str, Any] | None = None  # where the next iterator begins
        self.order: int | None = None  # a number for the order of the epoch's rows
        self.generator_state: torch.Tensor | None = None  # before that order was drawn

    def __iter__(self) -> Iterator[Any]:
        resumed, self.resumed = self.resumed, None
        if self.generator is not None:
            if resumed is not None and resumed["generator"] is not None:
                self.generator.set_state(resumed["generator"])
            self.generator_state = self.generator.get_state()
        with torch.random.fork_rng(devices=[]):  # leaves the user's random stream unchanged
            torch.manual_seed(self.seed + self.epoch)
            batches = [list(batch) for batch in self.batches]
        self.order = zlib.crc32(repr(batches).encode())
        if resumed is not None and resumed["order"] != self.order:
            raise ValueError(
                "loader should go on with the rows of the interrupted run, but batch_size, dataset or sampler give "
                "another order: make them the same; a sampler with random numbers of its own should draw from torch's"
            )
        done = 0 if resumed is None else resumed["batches"]
        parts = [part(len(batch), self.rank, self.size) for batch in batches]
        rest = list(enumerate(zip(parts, batches, strict=True)))[done:]
        self.sizes.extend((end - start, len(batch)) for _, ((start, end), batch) in rest)
        epoch = self.epoch
        for number, ((start, end), batch) in rest:
            rows = batch[start:end] or batch[:1]
            yield _SeededRows(rows, self.seed, epoch, number, self.rank) if self.workers else rows

    def __len__(self) -> int:
        return len(self.batches)


class _SeededRows(list):
    """The rows of a batch for a worker, which seeds its random numbers by them when it receives them.

    So transforms draw the same for a batch, however many workers there are and wherever a run was resumed.
    """

    def __init__(self, rows: list[int], *seeds: int) -> None:
        super().__init__(rows)
        self.seeds = seeds

    def __reduce__(self) -> tuple:
        return _received, (list(self), self.seeds)


def _received(rows: list[int], seeds: tuple[int, ...]) -> list[int]:
    if get_worker_info() is not None:
        seed = zlib.crc32(repr(seeds).encode())
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
    return rows


class _IterableShares(IterableDataset):
    """This rank's part of each ``batch_size`` samples of a stream."""

    def __init__(self, dataset: IterableDataset, batch_size: int, drop_last: bool, mesh: Mesh, collate: Any) -> None:
        self.dataset, self.batch_size, self.drop_last, self.collate = dataset, batch_size, drop_last, collate
        self.rank, self.size = mesh.dp_rank, mesh.dp_size

    def __iter__(self) -> Iterator[tuple[Any, int, int, int]]:
        stream, first = iter(self.dataset), True
        while batch := list(islice(stream, self.batch_size)):
            if self.drop_last and len(batch) < self.batch_size:
                return
            start, end = part(len(batch), self.rank, self.size)
            fingerprint = _fingerprint(batch if first else batch[:1])
            first = False
            yield self.collate(batch[start:end] or batch[:1]), end - start, len(batch), fingerprint

    def __len__(self) -> int:
        n = len(self.dataset)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)


def _fingerprint(samples: list[Any]) -> int:
    """A number for the values of samples of any structure."""
    found = 0
    for leaf in tree_leaves(samples):
        array = leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf
        found = zlib.crc32(array.tobytes() if hasattr(array, "tobytes") else repr(array).encode(), found)
    return found


def _check_same_samples(fingerprint: int) -> None:
    """All ranks read an iterable dataset whole: one that gives each rank a part of its own would be divided twice."""
    if idist.get_world_size() > 1:
        found = idist.all_gather(fingerprint)
        if len(set(found)) > 1:
            raise ValueError(
                "dataset should give every rank the same samples, which auto_dataloader divides among them, but this "
                "iterable dataset gives others on other ranks: take out what splits it by rank, or draw random numbers "
                "from torch"
            )


def part(n: int, rank: int, size: int) -> tuple[int, int]:
    """Start and end of a rank's contiguous part of ``n`` rows; sizes differ by one at most."""
    return n * rank // size, n * (rank + 1) // size


def _common_seed(mesh: Mesh) -> int:
    """Rank 0's seed, so that all ranks shuffle in the same order, however the user seeded them."""
    seed = torch.tensor([torch.initial_seed() % 2**62], device=idist.device())
    if mesh.world_size > 1:
        dist.broadcast(seed, src=0)
    return int(seed)
