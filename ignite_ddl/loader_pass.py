"""One pass over a loader: which batch of which epoch is next, and where a resumed run goes on."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import default_collate

from ignite_ddl.checks.same_samples import check_same_samples
from ignite_ddl.context.sequence import shard_batch
from ignite_ddl.epoch_plan import EpochPlan, shared_random_stream
from ignite_ddl.lent_row import of_unknown_type, without_rows
from ignite_ddl.mesh import get_mesh
from ignite_ddl.structure import n_rows, tensors_of
from ignite_ddl.uneven_rows import watch_optimizer_steps


class Pass:
    """One pass over a loader: an iterator of this rank's part of each global batch, from its first ``next`` on.

    Args:
        loader: the ``ShardedDataLoader``.
        consumer: who reads it: an engine, or all loops together.
        in_full: whether sequences stay full over cp, since ``prepare_batch`` gets them so. Default: False.

    Attributes:
        rows: ``(local, global)`` number of rows of its last batch.
        filler: as the loader's, of that batch.
        epoch: the epoch of its shuffling.
        batches: number of batches that it has returned, those before it was resumed included.
        ended: whether it has returned its last batch.
        was_left: whether it has said so, by StopIteration.
        full_batch: over cp, of batches 1, 2, 4, 8, …: the batch before its tokens were divided among cp peers.
    """

    def __init__(self, loader: Any, consumer: Any, in_full: bool = False) -> None:
        self.loader, self.consumer, self.epoch, self.in_full = loader, consumer, consumer.epoch, in_full
        self.rows, self.filler, self.batches, self.n_rows, self.ended = (0, 0), None, 0, 0, False
        self.was_left = False
        self.plan: EpochPlan | None = None  # not of an iterable dataset
        self.full_batch: Any = None
        self.stream: torch.Generator | None = None
        self._digest: int | None = None  # of an iterable dataset: a number for the samples of the last batch
        self._start_state: torch.Tensor | None = None  # of an iterable dataset: the random state at its beginning
        self._start_drawn: dict[str, Any] = {}  # and that of its own generators
        self.iterator: Iterator[Any] | None = None

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self.ended:  # torch's iterator may be another pass's by now
            self.was_left = True
            raise StopIteration
        if self.iterator is None:
            self._begin()
        batch, n_local, n_global = self._read()
        self.rows, self.filler = (n_local, n_global), None
        if self.rows[0] == 0:
            self.filler, batch = batch, without_rows(batch)
        self.loader._rows, self.loader.filler = self.rows, self.filler
        self.begin_step()
        if self.consumer is self.loader.loops:
            if n_local == 0 and (unknown := of_unknown_type(batch)) is not None:
                raise ValueError(
                    f"this rank has none of the batch's {n_global} rows, but they cannot be removed from a "
                    f"{unknown.__name__}: let collate_fn return dense tensors in tuples, lists, dicts or dataclasses, "
                    "take drop_last=True, or run the loop as a ddl.MeshEngine, in which a lent row has weight 0"
                )
            watch_optimizer_steps(self)
        return batch

    def begin_step(self) -> None:
        """Records that a step begins with this pass's batch."""
        global _latest_pass
        _latest_pass = weakref.ref(self)

    def rows_in(self, x: Any) -> tuple[int, int | None]:
        """The local and the global number of rows of a step's input ``x``.

        Those of this pass's batch; if the step has read another loader since, ``x`` may be of that: its rows are
        counted, and the global number is None, since ranks have to sum it up.
        """
        latest = _latest_pass and _latest_pass()
        if latest is self:
            return self.rows
        n_local = n_rows(x)
        if self.rows[0] == 0 and n_local == n_rows(self.filler):  # x may be the row that fills this pass's batch
            pairs = zip(tensors_of(x), tensors_of(self.filler), strict=False)
            if latest is None or latest.rows[0] != n_local or all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs):
                n_local = 0
        return n_local, None

    def position(self) -> dict[str, Any]:
        """Its position, for the loader's ``state_dict``."""
        plan = self.plan
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "rows": self.n_rows,
            "digest": self._digest if plan is None else plan.digest,
            "begun": self._start_state,
            "generator": self._start_drawn if plan is None else plan.drawn,
            "stream": self.stream,
        }

    def end(self) -> None:
        """Makes the next pass that of the next epoch, if this one has begun."""
        if not self.ended and self.plan is not None:
            self.plan.draw_only(self.batches)
        self.ended = self.batches > 0
        if self.ended and self.consumer.epoch == self.epoch:
            self.consumer.epoch, self.consumer.stream = self.epoch + 1, self.stream

    def close(self) -> None:
        """Ends its workers, and keeps its position."""
        self.iterator = iter(())

    def _begin(self) -> None:
        loader, consumer = self.loader, self.consumer
        resumed, consumer.resumed = consumer.resumed, None
        self.epoch = consumer.epoch if resumed is None else resumed["epoch"]
        consumer.passes = [ref for ref in consumer.passes if ref() is not None] + [weakref.ref(self)]
        if loader.batch_sampler is None:
            self._begin_stream(resumed)
            return
        if resumed is not None:
            self.batches, self.n_rows = resumed["batches"], resumed["rows"]
        self.plan = loader.parts.plan = EpochPlan(loader.parts, self.epoch, resumed)
        stream = self.stream = consumer.stream and consumer.stream.clone_state()
        drawn = stream and stream.get_state()
        # torch's new iterator draws a random number; that of a resumed pass was drawn in the interrupted run.
        with torch.random.fork_rng(devices=[], enabled=resumed is not None), shared_random_stream(stream):
            self.iterator = loader.torch_iterator(self)
        loader.parts.plan = None
        if stream is not None and resumed is None and consumer is not loader.loops and loader.generator is None:
            torch.empty((), dtype=torch.int64).random_()  # as in one process; a rank may run a loop alone
        if resumed is not None and stream is not None:
            stream.set_state(drawn)

    def _begin_stream(self, resumed: dict[str, Any] | None) -> None:
        """Begins a pass over an iterable dataset; a resumed one reads it again, with the same random numbers."""
        self.stream = self.consumer.stream
        source = self.stream or torch.default_generator
        self._start_state = before = source.get_state()
        if resumed is not None:
            self._start_state = resumed["begun"]
            source.set_state(self._start_state)
            self.loader.drawn.set(resumed["generator"])
        self._start_drawn = self.loader.drawn.states()
        with shared_random_stream(self.stream):
            self.iterator = self.loader.torch_iterator(self)
        if resumed is None:
            return
        with contextlib.suppress(StopIteration):
            while self.batches < resumed["batches"]:
                self._read()
        if (self.n_rows, self._digest) != (resumed["rows"], resumed["digest"]):
            raise ValueError(
                "dataset should give the samples of the interrupted run again, but gives different ones: take the same "
                "batch_size, and draw its random numbers from torch"
            )
        if self.stream is None:
            source.set_state(before)

    def _read(self) -> tuple[Any, int, int]:
        """The next batch, and its local and global number of rows."""
        try:
            with shared_random_stream(self.stream):
                batch = next(self.iterator, self)
        except Exception as error:
            loader = self.loader
            if self.plan is not None and loader.parts.size > 1 and loader.collate_fn is not default_collate:
                error.add_note(
                    "collate_fn gets this rank's rows of a batch, of which there may be one alone: if it leaves rows "
                    "out, it may have none to collate; leave them out of the dataset instead (torch's Subset)"
                )
            raise
        if batch is self:
            self.ended = self.was_left = True
            raise StopIteration
        if self.plan is None:
            batch, n_local, n_global, self._digest = batch
            if self.batches == 0:
                check_same_samples(self._digest)
        else:
            n_local, n_global = self.plan.rows_of(self.batches)
            self.ended = self.batches + 1 == len(self.plan.sizes)
        self.batches, self.n_rows = self.batches + 1, self.n_rows + n_global
        # Advanced with the last batch: one rank alone may begin an epoch, and Ignite does not exhaust iterators.
        if self.ended:
            self.end()
        self.full_batch = batch if self.batches & (self.batches - 1) == 0 and get_mesh().cp_size > 1 else None
        return batch if self.in_full else shard_batch(batch), n_local, n_global


_latest_pass: weakref.ref[Pass] | None = None  # the one of the last batch
