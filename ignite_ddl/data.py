"""The data loader on a mesh: each global batch is split among the data-parallel ranks."""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Iterator
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
)
from torch.utils.data.dataloader import default_collate
from torch.utils.data.distributed import DistributedSampler

from ignite_ddl.mesh import Mesh, get_mesh

__all__ = ["ShardedDataLoader", "auto_dataloader", "part", "without_rows"]


def auto_dataloader(dataset: Dataset, **kwargs: Any) -> ShardedDataLoader:
    """A ``DataLoader`` with the global batches of one process, split evenly over the dp axis.

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
    if kwargs.get("batch_sampler") is None and (not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(
            f"batch_size should be the global batch size, a positive integer, but given {batch_size!r}"
        )
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
        batches = BatchSampler(
            sampler if sampler is not None else SequentialSampler(dataset), batch_size, drop_last
        )
    shares = _Shares(batches, _common_seed(mesh), mesh.dp_rank, mesh.dp_size)
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

    def __iter__(self) -> Iterator[Any]:
        shares = self.batch_sampler
        if shares is None:  # an iterable dataset, whose batches carry their sizes
            for batch, here, in_all, fingerprint in self._batches(self.stream):
                if fingerprint is not None:
                    _check_same_samples(fingerprint)
                yield self._present(batch, here, in_all)
            return
        # Each iterator has its own sizes, filled with its first batch, and its own random stream until it ends.
        epoch, sizes = shares.epoch, deque()
        shares.sizes, stream = sizes, self.stream and self.stream.clone_state()
        for batch in self._batches(stream):
            here, in_all = sizes.popleft()
            # Advanced with the last batch: one rank alone may begin an epoch, and Ignite does not exhaust iterators.
            if not sizes and shares.epoch == epoch:
                shares.epoch, self.stream = epoch + 1, stream
            yield self._present(batch, here, in_all)

    def _batches(self, stream: torch.Generator | None) -> Iterator[Any]:
        with _shared_random_stream(stream):
            batches = super().__iter__()
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
        """Sets the epoch of the next iterator's shuffling, for example after a resume; advances by itself otherwise."""
        if isinstance(self.batch_sampler, _Shares):
            self.batch_sampler.epoch = epoch


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

    def __init__(self, batches: Any, seed: int, rank: int, size: int) -> None:
        self.batches, self.seed, self.rank, self.size = batches, seed, rank, size
        self.epoch = 0  # of the next iterator; advanced by the loader
        self.sizes: deque[tuple[int, int]] = deque()  # (here, in all) of the remaining batches

    def __iter__(self) -> Iterator[list[int]]:
        with torch.random.fork_rng(devices=[]):  # leaves the user's random stream unchanged
            torch.manual_seed(self.seed + self.epoch)
            batches = [list(batch) for batch in self.batches]
        parts = [part(len(batch), self.rank, self.size) for batch in batches]
        self.sizes.extend(
            (end - start, len(batch)) for (start, end), batch in zip(parts, batches, strict=True)
        )
        for (start, end), batch in zip(parts, batches, strict=True):
            yield batch[start:end] or batch[:1]

    def __len__(self) -> int:
        return len(self.batches)


class _IterableShares(IterableDataset):
    """This rank's part of each ``batch_size`` samples of a stream."""

    def __init__(
        self, dataset: IterableDataset, batch_size: int, drop_last: bool, mesh: Mesh, collate: Any
    ) -> None:
        self.dataset, self.batch_size, self.drop_last, self.collate = dataset, batch_size, drop_last, collate
        self.rank, self.size = mesh.dp_rank, mesh.dp_size

    def __iter__(self) -> Iterator[tuple[Any, int, int, int | None]]:
        stream, first = iter(self.dataset), True
        while batch := list(islice(stream, self.batch_size)):
            if self.drop_last and len(batch) < self.batch_size:
                return
            start, end = part(len(batch), self.rank, self.size)
            fingerprint, first = _fingerprint(batch) if first else None, False
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
