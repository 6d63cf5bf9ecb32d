"""The data loader on a mesh: each global batch is split among the data-parallel ranks."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypedDict, Unpack
from weakref import WeakKeyDictionary

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_convert
from torch.utils.data.dataloader import default_collate
from torch.utils.data.distributed import DistributedSampler

from ignite_ddl.arguments import (
    AMOUNT,
    COUNT,
    ENGINE,
    FLAG,
    FUNCTION,
    PROCESSES,
    Detail,
    Fits,
    a,
    check,
    or_none,
    takes,
    whole,
)
from ignite_ddl.checks.mixing import CheckedCollate
from ignite_ddl.checks.same_samples import check_same_dataset
from ignite_ddl.epoch_plan import DatasetInPlaceOf, Drawn, LocalBatches, LocalStream, SamplerInPlaceOf
from ignite_ddl.loader_pass import Pass
from ignite_ddl.mesh import Mesh, get_mesh


def _is_sampler(value: Any) -> bool:
    other = isinstance(value, str | bytes | Mapping | type) or getattr(value, "ndim", 1) == 0
    return hasattr(value, "__iter__") and not other


def _is_state(value: Any) -> bool:
    numbers = value["next"], value["epoch"], value["batches"], value["rows"]
    stream, drawn = value["stream"], (value["generator"], value["generator_now"])
    counts = all(isinstance(number, int) and number >= 0 for number in numbers)
    known = all(isinstance(states, Mapping | torch.Tensor | None) for states in drawn)  # a tensor: of earlier versions
    known = known and (stream is None or isinstance(stream, torch.Tensor) and stream.dtype == torch.uint8)
    return isinstance(value["seed"], int | None) and counts and known


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


class _Rows(Protocol):
    """A list, a tensor, or anything else that has rows."""

    def __getitem__(self, index: Any, /) -> Any: ...
    def __len__(self) -> int: ...


class LoaderOptions(TypedDict, total=False):
    """The keyword arguments of torch's ``DataLoader``."""

    batch_size: int
    shuffle: bool | None
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Any] | None
    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool


def _batch_size(value: Any) -> int:
    if value is None:
        raise Detail("; a dataset of whole batches has to return single rows, which the ranks divide among them")
    return COUNT.read(value)


BATCH_SIZE = Fits("the global batch size, a positive integer", _batch_size)


@takes(FITS)
def auto_dataloader(dataset: Dataset[Any] | _Rows, **kwargs: Unpack[LoaderOptions]) -> ShardedDataLoader:
    """A ``DataLoader`` with the global batches of one process, split evenly over the dp axis; every rank calls it.

    Each dp rank gets a contiguous part of every global batch; tp and pp peers get the same rows. No rows are padded or
    dropped: of the last global batch a rank may get fewer rows, or none. ``ddl.create_supervised_trainer`` weights
    losses and gradients by rows, so results do not change.

    On a mesh with cp, cp peers get the same rows; a tensor with a dim 1 is cut there, and each rank gets its part of
    the tokens; see :func:`sequence_positions`. A trainer or an evaluator with a ``prepare_batch`` of your own gets full
    sequences, and cuts what that makes.

    Shuffling is the same on every rank and differs by epoch without ``set_epoch``. An epoch ends when an iterator
    returns its last batch, or by an engine's ``terminate_epoch``; if iteration stops before, the next iterator has the
    same order. So a single rank may look at the first batch, provided that an epoch has more than one. Random samplers
    and transforms should use torch's random numbers, so that tp and pp peers get the same rows. On a mesh with tp or
    pp, transforms draw from a separate random stream of the loader: other numbers than in one process, but the same
    ones with ``num_workers``. An iterable dataset, and a sampler or a ``generator`` with a separate random state,
    change state with every iterator: create iterators of these on all ranks. A checkpoint has the states of generators
    (torch's, Python's, NumPy's ``default_rng``) that are attributes of a sampler or of an iterable dataset, and those
    of their numbers that have changed, such as a count of epochs.

    Args:
        dataset: a map-style or an iterable dataset. An iterable one is read entirely on each rank, with the same
            random numbers on all, which are not those that one process draws.
        kwargs: those of ``torch.utils.data.DataLoader``. ``batch_size`` is the global one, ``num_workers`` is
            divided among the ranks of a machine (not for an iterable dataset, where each worker makes separate
            batches), ``sampler`` and ``batch_sampler`` are those of one process and must be finite: an epoch's batches
            are listed when it begins.

    Returns:
        ShardedDataLoader: the loader; its ``rows`` are the local and the global number of rows of the current batch.

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
    iterable = isinstance(dataset, IterableDataset)  # read by each dp rank, with the same random numbers
    if mesh.dp_size < mesh.world_size or (iterable and mesh.world_size > 1):
        seed = _common_seed(mesh) + 1 + (0 if iterable else mesh.dp_rank)
        loader.stream = torch.Generator().manual_seed(seed)
        loader.loops = _Consumer(loader)
    return loader


_BATCHES = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")  # by which torch makes its batches


def _make_loader(dataset: Dataset, mesh: Mesh, **kwargs: Any) -> ShardedDataLoader:
    iterable = isinstance(dataset, IterableDataset)
    if kwargs.get("batch_sampler") is None:
        kwargs["batch_size"] = check("batch_size", kwargs.get("batch_size", 1), BATCH_SIZE)
        if kwargs.get("sampler") is None and not iterable:
            check("dataset", dataset, a(DATASET.says, lambda value: len(value) >= 0))
    workers = kwargs.get("num_workers", 0)
    if workers and idist.get_world_size() > 1 and not iterable:
        kwargs["num_workers"] = -(-workers // idist.get_nproc_per_node())
    kwargs.setdefault("pin_memory", idist.device().type == "cuda")
    kwargs["collate_fn"] = kwargs.get("collate_fn") or default_collate
    if iterable:
        batch_size, drop_last = kwargs.pop("batch_size", 1), kwargs.pop("drop_last", False)
        parts = LocalStream(dataset, batch_size, drop_last, mesh)
        loader = ShardedDataLoader(DatasetInPlaceOf(dataset, parts), batch_size=None, **kwargs)
        loader.parts = parts
        loader.__dict__.update(batch_size=batch_size, drop_last=drop_last)  # as asked for: len(loader) counts by them
        loader.drawn = Drawn(kwargs.get("generator"), dataset)
        return loader
    generator, workers = kwargs.get("generator"), kwargs.get("num_workers", 0)
    given = {name: kwargs.pop(name) for name in _BATCHES if name in kwargs}
    of_one_process = DataLoader(dataset, generator=generator, **given).batch_sampler
    _check_undivided(of_one_process, "sampler" if given.get("batch_sampler") is None else "batch_sampler")
    check_same_dataset(dataset)
    drawn = Drawn(generator, of_one_process, getattr(of_one_process, "sampler", None))
    batches = LocalBatches(of_one_process, _common_seed(mesh), mesh.dp_rank, mesh.dp_size, drawn, workers)
    batches.most = _most_batches(of_one_process, dataset)
    loader = ShardedDataLoader(dataset, batch_sampler=SamplerInPlaceOf(of_one_process, batches), **kwargs)
    loader.drawn, loader.parts = drawn, batches
    as_asked_for = {name: given[name] for name in ("batch_size", "drop_last") if name in given}
    if hasattr(of_one_process, "sampler"):
        as_asked_for["sampler"] = of_one_process.sampler
    loader.__dict__.update(as_asked_for)  # torch's __setattr__ refuses it
    return loader


def _most_batches(batches: Any, dataset: Any) -> float:
    """More batches than an epoch can have."""
    with contextlib.suppress(Exception):
        return 2 * len(batches) + 1000
    with contextlib.suppress(Exception):
        return 4 * len(dataset) / getattr(batches, "batch_size", 1) + 1e5
    return math.inf


def _check_undivided(batches: Any, argument: str) -> None:
    for sampler in (batches, getattr(batches, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                f"{argument} should be the sampler of one process, which auto_dataloader divides among the ranks, "
                f"but given a {type(sampler).__name__}"
            )


class ShardedDataLoader(DataLoader):
    """Loads this rank's part of every global batch. Made by :func:`auto_dataloader`.

    Each ``iter(loader)`` is a :class:`Pass`. Each ``ddl.MeshEngine`` has its own count of epochs; ``for`` loops and
    Ignite's plain engines share one.

    Attributes:
        rows: ``(local, global)``: number of rows of the last batch, on this rank and on all dp ranks.
        filler: if ``rows[0]`` is 0, a batch with one row of the global batch, which a rank without rows computes with
            weight 0 so that its peers do not wait; else None.
    """

    filler: Any = None
    drawn: Drawn
    parts: LocalBatches | LocalStream
    stream: torch.Generator | None = None  # the random stream of transforms, of which each consumer gets a copy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first_epoch = 0  # of each consumer
        self.loops = _Consumer(self)  # for loops and plain engines
        self.consumers: WeakKeyDictionary[Any, _Consumer] = WeakKeyDictionary()  # by engine
        self._workers_pass: weakref.ref[Pass] | None = None  # the pass that has the persistent workers
        self._checked: CheckedCollate | None = None  # collate_fn, on a rank that tries it
        self._rows, self._rows_are_used = (0, 0), False  # whether a script has read `rows`, perhaps to weight by them

    @property
    def rows(self) -> tuple[int, int]:
        self._rows_are_used = True
        return self._rows

    def __iter__(self) -> Pass:
        return Pass(self, self.loops)

    def pass_of(self, engine: Any) -> Pass:
        """A new pass of an engine that counts its own epochs."""
        return Pass(self, self._consumer(engine), getattr(engine, "reads_full_sequences", False))

    def _consumer(self, engine: Any) -> _Consumer:
        return self.loops if engine is None else self.consumers.setdefault(engine, _Consumer(self))

    def torch_iterator(self, new: Pass) -> Iterator[Any]:
        """torch's iterator for a pass. Persistent workers serve one pass at a time; another one gets new workers."""
        busy, given = self._workers_pass and self._workers_pass(), self.collate_fn
        try:
            self.collate_fn = self._collate_for_torch(given)
            if busy is not None and not busy.ended and busy.iterator is self._iterator:
                return self._get_iterator()
            self._workers_pass = weakref.ref(new)
            return super().__iter__()
        finally:
            self.collate_fn = given
            if self._checked is not None and self.num_workers:
                self._checked.is_checked = True  # by workers, which have copies

    def _collate_for_torch(self, given: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
        mesh, collate = get_mesh(), given
        if mesh.dp_size > 1 and mesh.rank == 0 and given is not default_collate:
            if self._checked is None or self._checked.collate_fn is not given:
                self._checked = CheckedCollate(given)
            collate = self._checked
        if isinstance(self.parts, LocalBatches):
            return collate
        self.parts.collate = collate
        return default_convert  # of what that has made

    @takes(epoch=whole(0))
    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass's shuffling, of loops and engines, which otherwise advances by itself."""
        self.first_epoch = epoch
        for consumer in (self.loops, *self.consumers.values()):
            consumer.epoch = epoch
        if self.loops.resumed is not None and self.loops.resumed["epoch"] != epoch:
            self.loops.resumed = None

    @takes(engine=ENGINE, new_pass=FLAG)
    def state_dict(self, engine: Any = None, new_pass: bool = False) -> dict[str, Any] | None:
        """Where a pass is: what another loader needs to go on from there.

        Args:
            engine: the engine whose pass it is. Default: none; of the loops that have begun and not ended, the one that
                has returned most batches. A loop that was left by ``break`` has ended: save inside it.
            new_pass: whether the next batch begins a new pass. Default: False.

        Returns:
            dict: the epoch, the batches and rows of it that have been returned, and the random states on which the
            order of the rows and the transforms depend; None if the engine has not read this loader.
        """
        current = getattr(engine, "_dataloader_iter", None)
        if isinstance(current, Pass) and current.loader is self:
            consumer = current.consumer
        else:
            current, consumer = None, self.loops if engine is None else self.consumers.get(engine)
        if consumer is None:
            return None
        now = self.drawn.states()
        state = {"generator": now, "generator_now": now, "seed": getattr(self.parts, "seed", None)}
        state |= consumer.state_dict(current, new_pass)
        return state | {name: self.drawn.kept(state[name]) for name in ("generator", "generator_now")}

    @takes(state=a("of state_dict of a loader of ddl.auto_dataloader", _is_state), engine=ENGINE)
    def load_state_dict(self, state: Mapping[str, Any], engine: Any = None) -> None:
        """Continues a pass at the position of :meth:`state_dict`, perhaps on another mesh: the next pass begins there.

        It raises a ValueError if batch size, dataset or sampler give another order of rows.

        Args:
            state: from :meth:`state_dict`.
            engine: the ``ddl.MeshEngine`` whose pass is continued. Default: none, the next loop.
        """
        state, consumer = dict(state), self._consumer(engine)
        for name in ("generator", "generator_now"):
            if not isinstance(state[name], Mapping):  # of earlier versions
                state[name] = {} if state[name] is None else {"0.generator": state[name]}
        consumer.passes, consumer.resumed = [], state if state["batches"] else None
        consumer.epoch = state["next"]
        if consumer.stream is not None and state["stream"] is not None:
            consumer.stream.set_state(state["stream"])
        if isinstance(self.parts, LocalBatches):
            self.parts.seed = state["seed"]
        self.drawn.set(state["generator_now"])

    def reseed(self, engine: Any = None) -> None:
        """Gives transforms another random stream, on a dp rank that the saved run did not have."""
        stream = self._consumer(engine).stream
        if stream is not None:
            stream.manual_seed(stream.initial_seed() + get_mesh().dp_rank + 1)


class _Consumer:
    """The epoch and random stream of the next pass of one consumer of a loader: an engine, or all loops together."""

    def __init__(self, loader: ShardedDataLoader) -> None:
        self.epoch, self.stream = loader.first_epoch, loader.stream and loader.stream.clone_state()
        self.resumed: dict[str, Any] | None = None  # where the next pass begins, if not at the beginning
        self.passes: list[weakref.ref[Pass]] = []  # that have begun, and perhaps ended or been left

    def state_dict(self, current: Pass | None, new_pass: bool) -> dict[str, Any]:
        state = {"epoch": self.epoch, "batches": 0, "rows": 0}
        alive = [found for ref in self.passes if (found := ref()) is not None and found.consumer is self]
        unfinished = [found for found in (alive if current is None else [current]) if found.batches and not found.ended]
        if self.resumed is not None:  # loaded, and nothing read since
            state = self.resumed
        elif unfinished and not new_pass:
            state = max(unfinished, key=lambda found: found.batches).position()
        stream = self.stream if state is self.resumed else state.get("stream", self.stream)
        return state | {"next": self.epoch, "stream": stream and stream.get_state()}


def _common_seed(mesh: Mesh) -> int:
    """Rank 0's seed, so that all ranks shuffle in the same order, however the user seeded them."""
    seed = torch.tensor([torch.initial_seed() % 2**62], device=idist.device())
    if mesh.world_size > 1:
        dist.broadcast(seed, src=0)
    return int(seed)
