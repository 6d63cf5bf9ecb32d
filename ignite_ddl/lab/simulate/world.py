"""The event simulation: ranks are generators that compute, send and receive on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

from ignite_ddl.arguments import AMOUNT, AMOUNTS, FLAG, FUNCTION, a, check, is_count, shown, takes
from ignite_ddl.lab.cost import FITS, Link
from ignite_ddl.lab.record import Record

__all__ = ["Rank", "Simulation", "run"]

ONE_OR_EACH = AMOUNT | AMOUNTS
_GENERATOR = a("a function with a yield, which returns a generator", Generator)


class Simulation(NamedTuple):
    """The result of a simulation.

    Attributes:
        seconds: when all programs and computations have ended. A message without a receiver may still be in flight.
        messages: number of messages that each rank sent, in rank order.
        bytes: number of bytes that each rank sent, in rank order.
        records: what each rank did, by rank and time, without overlap; "idle" and "communication" are the times in
            which it was blocked.
        in_flight: every message from its start to its arrival, as a record of its sender.
        returned: what each rank's program returned.
    """

    seconds: float
    messages: list[int]
    bytes: list[float]
    records: list[Record]
    in_flight: list[Record]
    returned: list[Any]


class Event:
    """What a program can wait for: a message, or the end of a computation or of a program."""

    def __init__(self) -> None:
        self.happened = False
        self.value: Any = None
        self.waiting: list[_Program] = []
        self.between: tuple[int, int] | None = None  # of a message: sender and receiver
        self.began = math.inf  # of a message: when it was sent
        self.n_bytes = 0.0
        self.awaited = False  # of a message: whether its receiver waits for it
        self.program: _Program | None = None  # of a program's end


class _Program:
    def __init__(self, rank: int, body: Generator) -> None:
        self.rank, self.body = rank, body
        self.end = Event()
        self.end.program = self
        self.since = 0.0  # when the current wait began
        self.ended = 0.0
        self.waits_for: Event | None = None
        self.records: list[Record] = []


class Rank:
    """The clock, the compute queue and the network of one rank, for its program.

    Attributes:
        number: this rank.
        n_ranks: size of the world.
    """

    def __init__(self, world: _World, number: int) -> None:
        self._world = world
        self.number, self.n_ranks = number, world.n_ranks

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._world.now

    def compute(self, seconds: float, name: str = "compute", kind: str = "compute", **of: int) -> Event:
        """``yield`` it: computes after the computations queued before (``of``: a pass's stage and microbatch)."""
        return self._world.compute(self.number, seconds, name, kind, of)

    def send(self, to: int, n_bytes: float, value: Any = None, tag: Any = None) -> Event:
        """Queues a message and returns at once; ``yield`` what it returns to wait until it has arrived."""
        return self._world.send(self.number, to, n_bytes, value, tag)

    def recv(self, source: int, tag: Any = None) -> Event:
        """``yield`` it: waits for the next message with this source and tag, and returns its value."""
        return self._world.recv(self.number, source, tag)

    def event(self) -> Event:
        """An event that one program of a rank yields, and another one passes to :meth:`fire`."""
        return Event()

    def fire(self, event: Event) -> None:
        """Resumes the programs that wait for ``event``."""
        self._world.fire(check("event", event, a("an event of this rank", Event)))

    def background(self, body: Generator) -> Event:
        """Starts another program on this rank, such as its communication; ``yield`` the event to wait for its end."""
        return self._world.start(self.number, check("body", body, _GENERATOR)).end


class _World:
    """The clock, the event heap, and one port per rank, which sends one message and receives one at a time."""

    def __init__(self, n_ranks: int, link: Link, rendezvous: bool) -> None:
        self.n_ranks, self.link, self.rendezvous = n_ranks, link, rendezvous
        self.now = 0.0
        self.heap: list[tuple] = []  # (time, order of insertion, function, arguments)
        self.order = 0
        self.programs: list[_Program] = []
        self.computed: list[Record] = []
        self.in_flight: list[Record] = []
        self.busy_until = [0.0] * n_ranks
        self.outbox: list[deque[Event]] = [deque() for _ in range(n_ranks)]
        self.blocked: list[list[int]] = [[] for _ in range(n_ranks)]  # ranks that wait to send to this one
        self.sending, self.receiving = [False] * n_ranks, [False] * n_ranks
        self.messages, self.bytes = [0] * n_ranks, [0.0] * n_ranks
        self.matched: dict[tuple, Event] = {}
        self.counted: dict[tuple, int] = defaultdict(int)

    def at(self, when: float, call: Callable, *args: Any) -> None:
        self.order += 1  # events at the same time are handled in order of insertion
        heapq.heappush(self.heap, (when, self.order, call, args))

    def play(self) -> None:
        while self.heap:
            self.now, _, call, args = heapq.heappop(self.heap)
            call(*args)
        stuck = sorted({program.rank for program in self.programs if not program.end.happened})
        if stuck:
            raise RuntimeError(f"ranks {stuck} wait for a message or an event that never comes")
        for message in itertools.chain(*self.outbox):  # only with rendezvous
            source, to = message.between
            raise RuntimeError(f"rank {source} sends rank {to} a message that is never received")

    # programs

    def start(self, rank: int, body: Generator) -> _Program:
        check("program", body, _GENERATOR)
        program = _Program(rank, body)
        self.programs.append(program)
        self.at(self.now, self.advance, program, None)
        return program

    def advance(self, program: _Program, value: Any) -> None:
        try:
            event = program.body.send(value)
        except StopIteration as stop:
            program.ended = self.now
            program.end.value = stop.value
            self.fire(program.end)
            return
        if not isinstance(event, Event):
            raise ValueError(f"program should yield what a method of its rank returns, but yielded {shown(event)}")
        program.since, program.waits_for = self.now, event
        if event.happened:
            self.at(self.now, self.resume, program)
        else:
            event.waiting.append(program)

    def fire(self, event: Event) -> None:
        event.happened = True
        for program in event.waiting:
            self.at(self.now, self.resume, program)
        event.waiting = []

    def resume(self, program: _Program) -> None:
        event = program.waits_for
        program.records += self.blocked_records(program, event)
        self.advance(program, event.value)

    def blocked_records(self, program: _Program, event: Event) -> Iterable[Record]:
        since, now, rank = program.since, self.now, program.rank
        if now <= since:
            return
        if event.program is not None:  # its own background program: blocked by what that program waited for
            for span in event.program.records:
                if span.end > since:
                    yield span._replace(start=max(span.start, since))
        elif event.between is not None:
            left = min(max(since, event.began), now)
            peer = event.between[0] if event.between[1] == rank else event.between[1]
            if left > since:
                yield Record(rank, "idle", "waits", since, left, peer)
            if now > left:
                way = f"from {peer}" if event.between[1] == rank else f"to {peer}"
                yield Record(rank, "communication", way, left, now)

    # a rank's compute queue

    def compute(self, rank: int, seconds: float, name: str, kind: str, of: dict[str, int]) -> Event:
        seconds = check("seconds", seconds, AMOUNT)
        begin = max(self.now, self.busy_until[rank])
        end = self.busy_until[rank] = begin + seconds
        if seconds > 0:
            self.computed.append(Record(rank, kind, name, begin, end, **of))
        event = Event()
        self.at(end, self.fire, event)
        return event

    # the network

    def match(self, side: str, source: int, to: int, tag: Any) -> Event:
        """The message of the n-th send, or of the n-th receive, with this source, receiver and tag."""
        for name, rank in (("source", source), ("to", to)):
            if not is_count(rank, 0) or rank >= self.n_ranks:
                raise ValueError(f"{name} should be a rank from 0 to {self.n_ranks - 1}, but given {shown(rank)}")
        self.counted[side, source, to, tag] += 1
        key = (source, to, tag, self.counted[side, source, to, tag])
        if key in self.matched:
            return self.matched.pop(key)
        message = self.matched[key] = Event()
        message.between = (source, to)
        return message

    def send(self, source: int, to: int, n_bytes: float, value: Any, tag: Any) -> Event:
        n_bytes = check("n_bytes", n_bytes, AMOUNT)
        message = self.match("sent", source, to, tag)
        message.n_bytes, message.value = n_bytes, value
        self.messages[source] += 1
        self.bytes[source] += n_bytes
        self.outbox[source].append(message)
        self.try_sending(source)
        return message

    def recv(self, to: int, source: int, tag: Any) -> Event:
        message = self.match("received", source, to, tag)
        message.awaited = True
        self.try_sending(source)
        return message

    def try_sending(self, source: int) -> None:
        if self.sending[source] or not self.outbox[source]:
            return
        message = self.outbox[source][0]
        to = message.between[1]
        if self.receiving[to] or (self.rendezvous and not message.awaited):
            if source not in self.blocked[to]:
                self.blocked[to].append(source)
            return
        self.outbox[source].popleft()
        self.sending[source] = self.receiving[to] = True
        message.began = self.now
        self.at(self.now + self.link.seconds(message.n_bytes), self.arrived, message)

    def arrived(self, message: Event) -> None:
        source, to = message.between
        self.sending[source] = self.receiving[to] = False
        self.in_flight.append(Record(source, "communication", f"to {to}", message.began, self.now))
        self.fire(message)
        blocked, self.blocked[to] = self.blocked[to], []
        for rank in [*blocked, source]:  # in the order in which they began to wait
            self.try_sending(rank)


@takes(FITS, program=FUNCTION, rendezvous=FLAG)
def run(program: Callable[[Rank], Generator], n_ranks: int, link: Link, rendezvous: bool = False) -> Simulation:
    """Simulates a program on every rank.

    A program is a generator function that yields what takes time. ``rank.compute`` keeps its rank busy,
    ``rank.send`` queues a message, ``rank.recv`` waits for one. A rank sends one message at a time, in order, and
    can receive one at the same time; a message takes ``link.seconds(n_bytes)``. Events at the same time are handled
    in the order in which they were requested.

    Args:
        program: called with a :class:`Rank` on each rank.
        n_ranks: size of the world.
        link: the network between any two ranks.
        rendezvous: whether a message is sent only once its receiver waits for it. Default False: as soon as the
            ports are free.

    Returns:
        Simulation: seconds, messages, bytes, records, and what the programs returned.

    Raises:
        RuntimeError: if a rank waits forever; with ``rendezvous``, also if a message is never received.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost, simulate

            def program(rank):
                yield rank.compute(1.0 + rank.number)
                rank.send((rank.number + 1) % rank.n_ranks, n_bytes=8, value=rank.number)
                return (yield rank.recv((rank.number - 1) % rank.n_ranks))

            two = simulate.run(program, 2, cost.Link(latency=0.5, bandwidth=16))
            assert two.returned == [1, 0]
            assert two.seconds == 2 + 0.5 + 0.5            # rank 0 computes 1 s, waits for rank 1, receives
    """
    world = _World(n_ranks, link, rendezvous)
    programs = [world.start(rank, program(Rank(world, rank))) for rank in range(n_ranks)]
    world.play()
    records = world.computed + [span for one in programs for span in one.records]
    return Simulation(
        seconds=max([one.ended for one in world.programs] + world.busy_until),
        messages=world.messages,
        bytes=world.bytes,
        records=sorted(records, key=lambda span: (span.rank, span.start, span.end)),
        in_flight=world.in_flight,
        returned=[one.end.value for one in programs],
    )


def number_for_each(n: int, **given: float | Sequence[float] | None) -> list[float]:
    """A number for each of n ranks or workers, from a sequence, one number for all, or None for 0."""
    [(name, value)] = given.items()
    each = list(value) if isinstance(value, Sequence) else [value or 0.0] * n
    if len(each) != n:
        raise ValueError(f"{name} should have a number for each of {n}, but has {len(each)}")
    return each
