"""Measures what each rank does over time: compute, communication, waiting for other ranks, data.

One rank alone cannot distinguish a slow network from a slow peer: both make its collectives longer. All ranks
together can: no collective ends before its last rank has entered. Up to that time a rank is *idle*, waiting for the
last rank; the rest is *communication*.

Data, steps and handlers come from Ignite's events; collectives, messages and a pipeline's passes from the hooks in
``watch.py``, which are installed only while a timeline records.

Not recorded: pulls and pushes, RPC, a process group's store, and a wait on a ``torch.futures.Future``. Use
:meth:`Timeline.span` there.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import platform
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ignite.engine import Engine, Events

from ignite_ddl.arguments import FLAG, PATH, TEXT, a, check, each, one_of, takes
from ignite_ddl.lab.record import KINDS, PASSES, Record
from ignite_ddl.lab.timeline.watch import Call, Recorder, now, unwatch, watch

__all__ = ["Timeline", "bubble"]

RECORDS = each(a("a Record", Record), "records")
_JOIN_SECONDS = 1e-4  # a wait within this time after its call is merged with the call


class _Span(NamedTuple):
    """A record before nested records are flattened and waits are split into idle and communication."""

    record: Record
    call: int | None = None  # for a wait: the index of its collective among the calls


class Timeline:
    """Records what this rank does; a handler for Ignite's engines, or a context manager.

    Return it from the function that runs on the ranks, and :meth:`merge` the results, which separates waiting from
    communication. It costs a few percent of a data-parallel step of 10 ms (``benchmarks/README.md``). Records grow
    by about 1 kB per step; :meth:`clear` discards them.

    On an accelerator work is asynchronous, and times are those of launching it, unless ``synchronize`` is True.

    Args:
        synchronize: whether to wait for the device before and after steps, spans and collectives, so that times are
            those of the device. This prevents overlap and slows training down. Default False; no effect without an
            accelerator.

    Examples:
        .. code-block:: python

            import ignite.distributed as idist
            import ignite_ddl as ddl
            from ignite_ddl.lab import Timeline
            import time
            from ignite.engine import Engine

            def training(local_rank):
                def step(engine, batch):
                    time.sleep(0.15 if local_rank == 1 else 0.01)   # rank 1 is slow
                    idist.all_reduce(1.0)

                trainer = Engine(step)
                timeline = Timeline().attach(trainer)
                trainer.run([0, 1, 2])
                return timeline

            with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                timeline = Timeline.merge(parallel.run(training))

            assert timeline.waits()[0, 1] > 0.1         # seconds that rank 0 waits for rank 1
            assert timeline.totals()[1]["compute"] > 0.4
    """

    @takes(synchronize=FLAG)
    def __init__(self, synchronize: bool = False) -> None:
        self.synchronize = synchronize and torch.accelerator.is_available()
        self.rank: int | None = 0  # None: merged
        self._recorder = Recorder(self.synchronize)
        self._machine = _machine()
        self._marks: list[tuple] = []  # (what, when, engine, iteration) from events
        self._users: set[Any] = set()  # the engines that are running, and "with"
        self._stopped: set[Any] = set()  # engines not recorded until their next run
        self._names: dict[int, str] = {}
        # The records of a merged timeline, or of one from another process:
        self._loaded: tuple[list[_Span], list[Call]] | None = None

    # ------------------------------------------------------------------------------------------- recording

    @takes(engine=a("an ignite.engine.Engine", Engine), name=TEXT)
    def attach(self, engine: Engine, name: str = "step") -> Timeline:
        """Records an engine's runs: its data, its steps, its handlers, and collectives in any of them.

        Called during a run, for example by a handler of ``Events.EPOCH_STARTED(once=2)``, it records the rest of it.
        Attach it also to the evaluator to record the parts of an evaluation inside a handler.

        Args:
            engine: the engine, of Ignite or of ``ddl.create_supervised_trainer``.
            name: the name of its iterations, default "step": "step 1", "step 2" and so on.

        Returns:
            Timeline: itself.
        """
        number = len(self._names)
        self._names[number] = name
        append_mark, synchronize = self._marks.append, self.synchronize

        def mark(what: str) -> Callable[[], None]:
            def handler() -> None:
                if number not in self._users:  # attached while the engine runs, or stopped
                    if number in self._stopped:
                        return
                    self._begin(number)
                if synchronize:
                    torch.accelerator.synchronize()
                append_mark((what, now(), number, engine.state.iteration))

            return handler

        def reorder() -> None:
            for event, (handler, first) in handlers.items():
                self._reorder(engine, event, handler, first)

        def run_begins() -> None:
            reorder()  # again: handlers may have been added since
            self._begin(number)
            mark("run")()

        def run_ends() -> None:
            mark("end")()
            self._end(number)

        # With True the handler is made the first of its event, else the last, so that data and steps exclude the
        # other handlers.
        handlers = {
            Events.GET_BATCH_STARTED: (mark("data"), False),
            Events.GET_BATCH_COMPLETED: (mark("handlers"), True),
            Events.ITERATION_STARTED: (mark("step"), False),
            Events.ITERATION_COMPLETED: (mark("handlers"), True),
            Events.COMPLETED: (run_ends, False),
        }

        def run_ends_here() -> None:
            if engine.should_terminate == "skip_completed":
                run_ends()

        engine.add_event_handler(Events.TERMINATE, run_ends_here)
        engine.add_event_handler(Events.STARTED, run_begins)
        self._reorder(engine, Events.STARTED, run_begins, first=True)
        for event, (handler, _) in handlers.items():
            engine.add_event_handler(event, handler)
        reorder()
        return self

    @staticmethod
    def _reorder(engine: Engine, event: Events, handler: Any, first: bool) -> None:
        # As in Ignite's own profilers: there is no public way to order handlers.
        handlers = engine._event_handlers[event]
        for place, entry in enumerate(handlers):
            if inspect.unwrap(entry[0]) is handler:  # HandlersTimeProfiler wraps
                others = handlers[:place] + handlers[place + 1 :]
                # A new list: the engine may be iterating over this one.
                engine._event_handlers[event] = [entry, *others] if first else [*others, entry]
                return

    @takes(name=TEXT, kind=one_of(*KINDS))
    @contextlib.contextmanager
    def span(self, name: str, kind: str = "compute") -> Iterator[None]:
        """Records the ``with`` block, inside a step or anywhere.

        Collectives are recorded inside ``with timeline`` and runs of engines; elsewhere their time is the span's.

        Args:
            name: the name of the span.
            kind: one of ``KINDS``, default "compute". A collective recorded inside it keeps its own kind.

        Raises:
            ValueError: if ``kind`` is unknown.

        Examples:
            .. code-block:: python

                with timeline.span("tokenise", kind="data"):
                    ...
        """
        if not self._users:
            self._start_recorder()
        if self.synchronize:
            torch.accelerator.synchronize()
        start = now()
        try:
            yield
        finally:
            if self.synchronize:
                torch.accelerator.synchronize()
            self._recorder.spans.append((kind, name, start, now(), None))

    def __enter__(self) -> Timeline:
        self._marks.append(("run", now(), None, 0))
        self._begin("with")
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._end("with")

    def stop(self) -> None:
        """Stops recording until the next run or ``with``, also after a run ended by an exception."""
        self._stopped |= self._users
        for user in list(self._users):
            if user != "with":
                self._marks.append(("stop", now(), user, 0))
            self._end(user)

    def clear(self) -> None:
        """Discards all records, such as those of the warm-up; call it at the same step on every rank.

        The n-th recorded collective of a group is matched across ranks, so recording must *begin* at the same
        collective on every rank: with a barrier before ``with timeline``, or by ``attach``. If a rank begins one
        collective earlier, its waits are matched with the wrong ones; :meth:`merge` warns if the numbers differ.
        """
        self._marks.clear()
        self._recorder.spans.clear()
        self._recorder.calls.clear()
        self._loaded = None

    def _start_recorder(self) -> None:
        self._loaded = None
        self.rank = self._recorder.rank = _rank()

    def _begin(self, user: Any) -> None:
        self._start_recorder()
        self._users.add(user)
        self._stopped.discard(user)
        if dist.is_available():
            watch(self._recorder)

    def _end(self, user: Any) -> None:
        self._users.discard(user)
        if not self._users and dist.is_available():
            unwatch(self._recorder)

    # ------------------------------------------------------------------------------------------- reading

    @property
    def records(self) -> list[Record]:
        """What each rank did, without overlap: nested spans are cut out of the outer ones."""
        spans, _ = self._spans_and_calls()
        by_rank = defaultdict(list)
        for span in spans:
            by_rank[span.record.rank].append(span.record)
        return [record for rank in sorted(by_rank) for record in _flatten(by_rank[rank])]

    @property
    def in_flight(self) -> list[Record]:
        """Collectives and messages from their call to their end, whether or not the rank was blocked.

        They may overlap with compute and with each other. Their end is that of the rank's wait; the communication
        itself may have ended before.
        """
        _, calls = self._spans_and_calls()
        return [
            Record(call.rank, "communication", call.name, call.launched, call.done)
            for call in calls
            if call.done is not None
        ]

    @property
    def background(self) -> list[Record]:
        """Other threads of Python that call collectives, such as an asynchronous checkpoint's.

        Each is one record, from its first call to the end of its last; its waits are not in :attr:`records`, since
        they do not block the rank.
        """
        _, calls = self._spans_and_calls()
        threads: dict[tuple, list[Call]] = defaultdict(list)
        for call in calls:
            if call.thread is not None and call.done is not None:
                threads[call.rank, call.thread].append(call)
        return [
            Record(rank, "handlers", name, min(c.launched for c in of_thread), max(c.done for c in of_thread))
            for (rank, (name, _)), of_thread in threads.items()
        ]

    def totals(self) -> dict[int, dict[str, float]]:
        """Seconds by rank and kind.

        Returns:
            dict: for each rank a dict with every kind in this timeline; 0.0 if the rank has none.
        """
        records = self.records
        kinds = [kind for kind in KINDS if any(record.kind == kind for record in records)]
        totals = {rank: dict.fromkeys(kinds, 0.0) for rank in sorted({record.rank for record in records})}
        for record in records:
            totals[record.rank][record.kind] += record.seconds
        return totals

    def actions(self) -> list[list[Record]]:
        """The records of each training step of a pipeline.

        A pass has the name of its action in torch's schedules: stage, letter, microbatch. "2F0" is the forward pass
        of stage 2 with microbatch 0, "2B0" its backward pass; in a schedule that splits backward, "2I0" computes the
        gradients of the inputs and "2W0" those of the weights (on stage 0, whose inputs need no gradients, W computes
        everything). Communication inside a pass, by tp or FSDP, is part of the pass.

        Returns:
            list: for each step its records: the passes of all ranks (with ``stage`` and ``microbatch``), and, from
            the first pass to the last, the communication and, once merged, the waiting between them. The first step
            with a new batch size includes the time in which torch sets up its stages.

        Examples:
            .. code-block:: python

                import ignite_ddl as ddl
                from ignite_ddl.lab import Timeline
                import torch

                def training(local_rank):
                    layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)]
                    model = ddl.auto_model(torch.nn.Sequential(*layers), schedule="gpipe", n_microbatches=2)
                    x = torch.randn(8, 4)
                    with Timeline() as timeline:
                        model.train_step(x, x, torch.nn.functional.mse_loss)
                    return timeline

                with ddl.Parallel(backend="gloo", nproc_per_node=2, pp=2) as parallel:
                    timeline = Timeline.merge(parallel.run(training))

                (step,) = timeline.actions()
                passes = [record.name for record in step if record.rank == 1 and record.microbatch is not None]
                assert passes == ["1F0", "1F1", "1B0", "1B1"]
        """
        spans, _ = self._spans_and_calls()
        steps: list[list[Record]] = []
        first: dict[int, str] = {}  # for each rank, the pass that begins each of its steps
        begun: dict[int, int] = defaultdict(int)
        for record in sorted((span.record for span in spans), key=lambda record: record.start):
            if record.microbatch is not None:
                if record.name == first.setdefault(record.rank, record.name):
                    begun[record.rank] += 1
                    if begun[record.rank] > len(steps):
                        steps.append([])
                steps[begun[record.rank] - 1].append(record)
        between = [record for record in self.records if record.kind in ("communication", "idle")]
        return [sorted(step + _between(step, between), key=lambda record: record.start) for step in steps]

    def waits(self) -> dict[tuple[int, int], float]:
        """Seconds by (waiting rank, rank that entered last), after :meth:`merge`."""
        waits: dict[tuple[int, int], float] = defaultdict(float)
        for record in self.records:
            if record.waits_for is not None:
                waits[record.rank, record.waits_for] += record.seconds
        return dict(waits)

    @classmethod
    def merge(cls, timelines: Iterable[Timeline]) -> Timeline:
        """Merges the timelines of several ranks, separating waiting from communication; time starts at 0.

        A rank blocked in a collective is idle until the last rank that it depends on has entered, and communicates
        from then on. This needs the records of all ranks of the collective; without them the whole wait counts as
        communication. With more ranks than cores, "communication" includes the time until a rank gets a core again.

        Ranks of one machine share a clock. The times of every other machine are shifted so that, in the median,
        collectives end at the same time on all machines: accurate to about the duration of a collective.

        Args:
            timelines: one per rank, as returned by ``ddl.Parallel.run``.

        Returns:
            Timeline: a new one, for reading.

        Raises:
            ValueError: if ``timelines`` are not timelines of different ranks.

        Warns:
            UserWarning: if ranks recorded different numbers of collectives of a group, see :meth:`clear`.
        """
        of_a_rank = a("", lambda timeline: isinstance(timeline, Timeline) and timeline.rank is not None)
        timelines = check("timelines", timelines, each(of_a_rank, "one Timeline per rank, in a list"))
        ranks = [timeline.rank for timeline in timelines]
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"timelines should be of different ranks, but given ranks {ranks}")
        parts = [timeline._spans_and_calls() for timeline in timelines]
        _warn_if_counts_differ(ranks, [calls for _, calls in parts])
        for part, shift in zip(parts, _clock_shifts(timelines, parts), strict=True):
            _move(part, shift)
        origin = min((span.record.start for spans, _ in parts for span in spans), default=0.0)
        spans, calls = [], []
        for part in parts:
            _move(part, -origin)
            spans += [span._replace(call=span.call + len(calls)) if span.call is not None else span for span in part[0]]
            calls += part[1]
        merged = cls()
        merged.rank = None
        merged._loaded = _split_waits(spans, calls), calls
        return merged

    @takes(path=PATH)
    def to_chrome(self, path: str | os.PathLike) -> Path:
        """Writes the timeline as a trace for https://ui.perfetto.dev or chrome://tracing.

        Each rank is a process; nested spans are on its thread "rank", collectives in flight are asynchronous tracks.
        The format is Chrome's "Trace Event Format", JSON object form. Rank r has the pid r + 1, because Perfetto
        treats pid 0 and tid 0 specially.

        Args:
            path: the file to write, such as "timeline.json".

        Returns:
            Path: the file.
        """
        spans, calls = self._spans_and_calls()
        events: list[dict[str, Any]] = []
        for rank in sorted({span.record.rank for span in spans}):
            common = {"ph": "M", "pid": rank + 1, "tid": 1}
            events.append(common | {"name": "process_name", "args": {"name": f"rank {rank}"}})
            events.append(common | {"name": "process_sort_index", "args": {"sort_index": rank}})
            events.append(common | {"name": "thread_name", "args": {"name": "rank"}})
        origin = min((span.record.start for span in spans), default=0.0)
        # Rounded to nanoseconds and written in microseconds, so that a child that ends with its parent ends exactly
        # at the same time.
        for span in sorted(spans, key=lambda span: (span.record.start, -span.record.end)):
            rank, kind, name, start, end, waits_for, *_ = span.record
            begin, stop = round((start - origin) * 1e9), round((end - origin) * 1e9)
            event = {"ph": "X", "pid": rank + 1, "tid": 1, "name": name, "cat": kind}
            event |= {"ts": begin / 1e3, "dur": (stop - begin) / 1e3}
            events.append(event | {"args": {"kind": kind} | ({} if waits_for is None else {"waits for": waits_for})})
        # Calls that block their rank from the start are spans already.
        blocking = {
            span.call for span in spans if span.call is not None and span.record.start == calls[span.call].launched
        }
        for number, call in enumerate(calls):
            if call.done is not None and number not in blocking:
                event = {"pid": call.rank + 1, "tid": 1, "name": call.name, "cat": "in flight", "id": hex(number)}
                for phase, when in (("b", call.launched), ("e", call.done)):
                    events.append(event | {"ph": phase, "ts": max(0, round((when - origin) * 1e9)) / 1e3})
        path = Path(path)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        return path

    def _spans_and_calls(self) -> tuple[list[_Span], list[Call]]:
        if self._loaded is not None:
            spans, calls = self._loaded
            return list(spans), list(calls)
        place = {id(call): number for number, call in enumerate(self._recorder.calls)}
        spans = [_Span(record) for record in self._records_of_marks()]
        last: dict[int, int] = {}  # for each call, the index of its span
        for what, name, start, end, call, *stage_and_microbatch in list(self._recorder.spans):
            number = place.get(id(call))
            kind = "communication" if what in ("launch", "wait") else what
            record = Record(self.rank, kind, name, start, end, None, *stage_and_microbatch)
            if what == "wait" and number in last and start - spans[last[number]].record.end < _JOIN_SECONDS:
                record = record._replace(start=spans[last[number]].record.start)
                spans[last[number]] = _Span(record, number)
            else:
                if what == "launch" and number is not None:
                    last[number] = len(spans)
                spans.append(_Span(record, number if what == "wait" else None))
        return spans, list(self._recorder.calls)

    def _records_of_marks(self) -> Iterator[Record]:
        """Engines' runs with their data and steps.

        What an exception leaves open ends with the last record before another run, or where :meth:`stop` was called.
        """
        marks = list(self._marks)
        begun: dict[int, float] = {}  # runs of engines
        inside: dict[int, tuple[str, str, float]] = {}  # the current data or step of an engine
        seen: dict[int, float] = {}

        def end(number: int, when: float) -> Iterator[Record]:
            if number in inside:
                kind, name, start = inside.pop(number)
                yield Record(self.rank, kind, name, start, when)

        def end_run(number: int, when: float) -> Iterator[Record]:
            yield from end(number, when)
            if number in begun:
                yield Record(self.rank, "handlers", "run", begun.pop(number), when)

        times = [when for _, when, *_ in marks] + [span[3] for span in list(self._recorder.spans)]

        def left_open(number: int, when: float) -> float:
            """The end of a run without one: the last record before another engine's run, else ``when``."""
            others = [begin for what, begin, other, _ in marks if what == "run" and other != number]
            if not (after := [begin for begin in others if seen[number] < begin < when]):
                return when
            return max((time for time in times if time < min(after)), default=seen[number])

        for what, when, number, iteration in marks:
            if what == "stop" and number in begun:
                yield from end_run(number, left_open(number, when))
            if what == "stop" or number is None:  # "with"
                continue
            if what == "run":
                yield from end_run(number, seen.get(number, when))
            begun.setdefault(number, when)
            seen[number] = when
            yield from end(number, when)
            if what == "data":
                inside[number] = ("data", "data", when)
            elif what == "step":
                inside[number] = ("compute", f"{self._names[number]} {iteration}", when)
            elif what == "end":
                yield from end_run(number, when)
        for number in list(begun):
            yield from end_run(number, left_open(number, max(times)))

    def __getstate__(self) -> dict[str, Any]:
        # Only the records, without the engines' handlers and torch's objects.
        if self._loaded is None and not self._marks and not self._recorder.spans:
            self.rank = _rank()  # of a rank that has recorded nothing
        kept = {name: getattr(self, name) for name in ("rank", "synchronize", "_machine")}
        return kept | {"_loaded": self._spans_and_calls()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()
        self.__dict__.update(state)

    def __repr__(self) -> str:
        spans, _ = self._spans_and_calls()
        ranks = sorted({span.record.rank for span in spans})
        return f"Timeline({len(spans)} spans of rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks)) or 'none'})"


@takes(records=RECORDS)
def bubble(records: Iterable[Record]) -> dict[int, float]:
    """The share of a pipeline step in which each rank does not compute.

    1 − (time of its passes) / (time of the step), the step being from the first pass of any rank to the end of the
    last; sending, receiving and waiting belong to the bubble. For GPipe and 1F1B on p ranks with m microbatches of
    equal time and free transfers, it is (p − 1) / (m + p − 1): Huang et al. 2019, "GPipe", section 2.3; Narayanan et
    al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", section 2.2.

    Args:
        records: of one step, from ``timeline.actions()`` or simulated.

    Returns:
        dict: rank to share, between 0 and 1.

    Raises:
        ValueError: if the records contain no pass, or take no time.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import bubble
            from ignite_ddl.lab.record import Record

            step = [Record(0, "forward", "0F0", 0.0, 1.0), Record(1, "forward", "1F0", 1.0, 2.0)]
            step += [Record(1, "backward", "1B0", 2.0, 4.0), Record(0, "backward", "0B0", 4.0, 6.0)]
            assert bubble(step) == {0: 0.5, 1: 0.5}                    # p = 2, m = 1: (p − 1) / (m + p − 1)
    """
    passes = [record for record in records if record.kind in PASSES]
    if not passes:
        raise ValueError("records should contain forward or backward passes of a pipeline, but contain none")
    start, end = min(record.start for record in passes), max(record.end for record in passes)
    length = end - start
    if not length > 0:
        raise ValueError(f"records should last longer than 0, but the passes are from {start} to {end}")
    busy: dict[int, float] = defaultdict(float)
    for record in passes:
        busy[record.rank] += record.end - record.start
    return {rank: 1 - busy[rank] / length for rank in sorted(busy)}


def _between(passes: list[Record], records: list[Record]) -> list[Record]:
    """The records during the passes, except those inside a pass of the same rank."""
    start, end = min(record.start for record in passes), max(record.end for record in passes)
    between = []
    for record in records:
        inside = (p for p in passes if p.rank == record.rank)
        if (
            record.end > start
            and record.start < end
            and not any(p.start <= record.start and record.end <= p.end for p in inside)
        ):
            between.append(record._replace(start=max(start, record.start), end=min(end, record.end)))
    return between


def _flatten(records: list[Record]) -> Iterator[Record]:
    """Flattens nested records of one rank into a sequence without overlap; the innermost record wins."""
    stack: list[Record] = []
    cursor = float("-inf")
    ending = Record(0, "", "", float("inf"), float("inf"))
    for record in [*sorted(records, key=lambda record: (record.start, -record.end)), ending]:
        while stack and stack[-1].end <= record.start:
            done = stack.pop()
            if done.end > cursor:
                yield done._replace(start=max(cursor, done.start))
                cursor = done.end
        if stack and record.start > max(cursor, stack[-1].start):
            yield stack[-1]._replace(start=max(cursor, stack[-1].start), end=record.start)
        cursor = max(cursor, record.start)
        stack.append(record._replace(end=min(record.end, stack[-1].end)) if stack else record)


def _split_waits(spans: list[_Span], calls: list[Call]) -> list[_Span]:
    """Splits each wait for a collective when its last rank enters: idle before, communication after."""
    calls_by_key: dict[tuple, dict[int, Call]] = defaultdict(dict)
    for call in calls:
        if call.key is not None:
            calls_by_key[call.key][call.rank] = call
    split = []
    for span in spans:
        record, call = span.record, None if span.call is None else calls[span.call]
        peers = {} if call is None or call.key is None else calls_by_key[call.key]
        if call is None or not all(rank in peers and _same(peers[rank], call) for rank in call.needs):
            split.append(span)
            continue
        # This rank did not wait for a rank that entered after this one had left.
        entered = {rank: peers[rank].launched for rank in call.needs if peers[rank].launched <= record.end}
        last = max(entered, key=entered.get, default=call.rank)
        arrival = min(max(record.start, entered.get(last, record.start)), record.end)
        if last != call.rank and arrival > record.start:
            name = f"waits for rank {last}"
            split.append(_Span(Record(call.rank, "idle", name, record.start, arrival, last), span.call))
        split.append(_Span(record._replace(start=arrival), span.call))
    return split


def _warn_if_counts_differ(ranks: list[int], calls: list[list[Call]]) -> None:
    numbers: dict[tuple, dict[int, int]] = defaultdict(dict)  # of collectives, by group and rank
    for rank, of_rank in zip(ranks, calls, strict=True):
        for call in of_rank:
            if call.key is not None and call.key[1] != "message":
                *group, members, number = call.key
                counted = numbers[*group, members]
                counted.update({member: counted.get(member, 0) for member in members if member in ranks})
                counted[rank] = max(counted[rank], number)
    for (group, *_), counted in numbers.items():
        if len(set(counted.values())) > 1:
            counts = ", ".join(f"{number} by rank {rank}" for rank, number in sorted(counted.items()))
            warnings.warn(
                f"the ranks of group {group!r} recorded different numbers of collectives: {counts}. The n-th "
                "collective of one rank is matched with the n-th of another, so waits may be wrong: begin recording at "
                "the same collective on every rank",
                stacklevel=3,
            )


def _same(one: Call, other: Call) -> bool:
    return one.name == other.name or {one.name, other.name} == {"send", "recv"}


def _clock_shifts(timelines: list[Timeline], parts: list[tuple[list[_Span], list[Call]]]) -> list[float]:
    """Seconds to add to each rank's times; the same for all ranks of a machine, which share a clock."""
    left: dict[str, dict[tuple, list[float]]] = defaultdict(lambda: defaultdict(list))
    for timeline, (spans, calls) in zip(timelines, parts, strict=True):
        for span in spans:
            if span.call is not None and (call := calls[span.call]).key is not None and len(call.needs) > 1:
                left[timeline._machine][call.key].append(span.record.end)
    reference = timelines[0]._machine if timelines else ""
    shifts = {reference: 0.0}
    for machine, ends in left.items():
        common = ends.keys() & left[reference].keys()
        if machine != reference and common:
            shifts[machine] = statistics.median(
                statistics.median(left[reference][key]) - statistics.median(ends[key]) for key in common
            )
    starts = [min((span.record.start for span in spans), default=0.0) for spans, _ in parts]
    for timeline, start in zip(timelines, starts, strict=True):
        shifts.setdefault(timeline._machine, starts[0] - start)  # no common collective: align the starts
    return [shifts[timeline._machine] for timeline in timelines]


def _move(part: tuple[list[_Span], list[Call]], seconds: float) -> None:
    spans, calls = part
    for place, span in enumerate(spans):
        record = span.record
        spans[place] = span._replace(record=record._replace(start=record.start + seconds, end=record.end + seconds))
    for place, call in enumerate(calls):
        calls[place] = call.moved(seconds)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _machine() -> str:
    """An id of the clock, which all processes of a running system share, also across containers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return boot.read_text().strip()
    return platform.node()
