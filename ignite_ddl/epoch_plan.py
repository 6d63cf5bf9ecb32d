"""Which rows of an epoch a rank reads, drawn as one process draws them."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from ignite_ddl.checks.same_samples import fingerprint_of
from ignite_ddl.mesh import Mesh
from ignite_ddl.tensor.random import state_of


@contextlib.contextmanager
def shared_random_stream(stream: torch.Generator | None) -> Iterator[None]:
    """Draws from a random stream that tp and pp peers share, so that they read the same rows."""
    if stream is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(stream.get_state())
        yield
        stream.set_state(torch.get_rng_state())


class _InPlaceOf:
    """What torch iterates over in place of an object of the user's, whose attributes are read and set by it."""

    def __init__(self, given: Any, local: Any) -> None:
        vars(self).update(_given=given, _local=local)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._local)

    def __len__(self) -> int:
        return len(self._given)

    def __getattr__(self, name: str) -> Any:
        if name in ("_given", "_local") or name.startswith("__"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._given, name, value)


class SamplerInPlaceOf(_InPlaceOf, Sampler[list[int]]):
    """``loader.batch_sampler``, with :class:`LocalBatches`."""


class DatasetInPlaceOf(_InPlaceOf, IterableDataset):
    """``loader.dataset`` of an iterable dataset, with a :class:`LocalStream`."""


class LocalBatches:
    """This rank's parts of one process's batches, by the plan of the pass that begins."""

    def __init__(self, batches: Any, seed: int, rank: int, size: int, drawn: Drawn, workers: int) -> None:
        self.batches, self.seed, self.rank, self.size = batches, seed, rank, size
        self.drawn, self.workers = drawn, workers
        self.most = math.inf  # batches of an epoch; a sampler that gives more has no end
        self.plan: EpochPlan | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return (self.plan or EpochPlan(self, 0)).batches()


class EpochPlan:
    """Which rows of an epoch this rank reads; drawn when :meth:`batches` is first iterated over.

    Attributes:
        sizes: the number of rows of each global batch.
        rows: this rank's rows of all batches, one after the other; of a batch without any, one row of another rank.
        digest: a number that depends on the order of the rows of all ranks.
        drawn: the states of the user's generators from which that order was drawn.
    """

    def __init__(self, sampler: LocalBatches, epoch: int, resumed: Mapping[str, Any] | None = None) -> None:
        self.sampler, self.epoch, self.resumed = sampler, epoch, resumed
        self.sizes, self.rows, self.digest = array("q"), array("q"), 0
        self.drawn: dict[str, Any] = {}

    def rows_of(self, number: int) -> tuple[int, int]:
        """A batch's local and global number of rows."""
        start, end = part(self.sizes[number], self.sampler.rank, self.sampler.size)
        return end - start, self.sizes[number]

    def batches(self) -> Iterator[list[int]]:
        """This rank's rows of each remaining batch."""
        self._draw()
        sampler, start, done = self.sampler, 0, self.resumed["batches"] if self.resumed else 0
        for number in range(len(self.sizes)):
            n_local, n_global = self.rows_of(number)
            end = start + max(n_local, min(n_global, 1))
            if number >= done:
                rows = list(self.rows[start:end])
                yield _SeededRows(rows, sampler.seed, self.epoch, number, sampler.rank) if sampler.workers else rows
            start = end

    def _draw(self) -> None:
        sampler, resumed = self.sampler, self.resumed or {}
        sampler.drawn.set(resumed.get("generator", {}))
        self.drawn = sampler.drawn.states()
        with torch.random.fork_rng(devices=[]):  # leaves the user's random stream unchanged
            torch.default_generator.manual_seed(sampler.seed + self.epoch)  # that of the CPU alone
            for batch in map(list, sampler.batches):
                self._add(batch)
                if len(self.sizes) > sampler.most:
                    raise ValueError(
                        f"sampler should end with an epoch, whose batches are listed when it begins, but gave "
                        f"{len(self.sizes)} batches and no end: stop it after the rows of an epoch, and give "
                        "trainer.run the number of epochs"
                    )
        sampler.drawn.set(resumed.get("generator_now", {}))
        if self.digest != resumed.get("digest", self.digest):
            raise ValueError(
                "loader should continue with the rows of the interrupted run, but batch_size, dataset or sampler give "
                "another order: make them the same, and let a sampler draw its random numbers from torch, or from a "
                "generator that is its attribute"
            )

    def draw_only(self, batches: int) -> None:
        """Leaves the user's generators as in one process that has read these batches alone."""
        drawn = self.sampler.drawn
        drawn.states()  # by which it knows what has changed
        if states := drawn.kept(self.drawn):
            drawn.set(states)
            with torch.random.fork_rng(devices=[]):
                for _ in islice(self.sampler.batches, batches):
                    pass

    def _add(self, batch: list[int]) -> None:
        self.sizes.append(len(batch))
        start, end = part(len(batch), self.sampler.rank, self.sampler.size)
        try:
            values = array("q", batch).tobytes()
        except (TypeError, OverflowError):  # keys that are not integers
            values = repr(batch).encode()
            if isinstance(self.rows, array):
                self.rows = list(self.rows)
        self.digest = zlib.crc32(values, zlib.crc32(self.sizes[-1:].tobytes(), self.digest))
        self.rows.extend(batch[start:end] or batch[:1])


class Drawn:
    """The states from which an order of rows is drawn: of generators, and numbers such as a count of epochs, that are
    attributes of samplers or of an iterable dataset.

    Args:
        generator: the loader's.
        holders: the samplers, or the dataset; those that are attributes of these are found.
    """

    def __init__(self, generator: torch.Generator | None, *holders: Any) -> None:
        self.holders = [SimpleNamespace(generator=generator), *(each for each in holders if hasattr(each, "__dict__"))]
        for holder in self.holders:  # the list grows meanwhile
            inside = [each for each in vars(holder).values() if isinstance(each, Sampler | IterableDataset)]
            self.holders += [each for each in inside if not any(each is known for known in self.holders)]
        self.first: dict[str, float] = {}  # numbers as they were at first
        self.saved: set[str] = set()  # generators, and numbers that have changed
        self.states()

    def _parts(self) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
        """Of each part its name, its state, and a function that sets it."""
        for place, holder in enumerate(self.holders):
            for name, value in list(vars(holder).items()):
                found = (value, partial(setattr, holder, name)) if type(value) in (int, float) else state_of(value)
                if found and (not isinstance(found[0], dict) or found[0]["bit_generator"] == "PCG64"):  # else of arrays
                    yield f"{place}.{name}", *found

    def states(self) -> dict[str, Any]:
        """All states by name; notes which numbers have changed."""
        states = {key: state for key, state, _ in self._parts()}
        for key, state in states.items():
            if type(state) not in (int, float) or self.first.setdefault(key, state) != state:
                self.saved.add(key)
        return states

    def kept(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Those of these states that a checkpoint has: of generators, and of numbers that have changed."""
        return {key: state for key, state in states.items() if key in self.saved}

    def set(self, states: Mapping[str, Any]) -> None:
        """Sets those that are given."""
        for key, _, set_state in self._parts():
            if key in states:
                self.saved.add(key)
                set_state(states[key])


class _SeededRows(list):
    """The rows of a batch, with seeds for the random numbers of the worker that receives them.

    So transforms draw the same for a batch, however many workers there are and wherever a run was resumed.
    """

    def __init__(self, rows: list[int], *seeds: int) -> None:
        super().__init__(rows)
        self.seeds = seeds

    def __reduce__(self) -> tuple:
        return _seed_worker, (list(self), self.seeds)


def _seed_worker(rows: list[int], seeds: tuple[int, ...]) -> list[int]:
    if get_worker_info() is not None:
        seed = zlib.crc32(repr(seeds).encode())
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
    return rows


class LocalStream:
    """This rank's part of each ``batch_size`` samples of an iterable dataset; ``collate`` is set before each pass."""

    collate: Callable[[list[Any]], Any]

    def __init__(self, dataset: IterableDataset, batch_size: int, drop_last: bool, mesh: Mesh) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.rank, self.size = mesh.dp_rank, mesh.dp_size

    def __iter__(self) -> Iterator[tuple[Any, int, int, int]]:
        stream, first = iter(self.dataset), True
        while batch := list(islice(stream, self.batch_size)):
            if self.drop_last and len(batch) < self.batch_size:
                return
            start, end = part(len(batch), self.rank, self.size)
            fingerprint = fingerprint_of(batch if first else batch[:1])
            first = False
            yield self.collate(batch[start:end] or batch[:1]), end - start, len(batch), fingerprint


def part(n: int, rank: int, size: int) -> tuple[int, int]:
    """Start and end of a rank's contiguous part of ``n`` rows; sizes differ by one at most."""
    return n * rank // size, n * (rank + 1) // size
