"""What parallel training would do, played out on a virtual clock: the same answer every time, on any machine.

Four parts, and each can be read alone:

- :func:`run`: ranks are generators that compute, send and receive; a heap of events moves the clock.
- Collectives and training steps, written for it as one would write them for real ranks; ``cost`` has the closed
  forms that they meet.
- :func:`pipeline`: any of torch's schedules as a table of actions, with times of your own; :func:`best_pipelines`;
  :func:`pipedream`, which never drains, and the versions of the weights that it uses.
- :func:`parameter_server`: workers of uneven speed, synchronous or not.

No wall clock, no random numbers but those of a seed. What comes back has ``ddl.Timeline``'s records, so that
``plot.timeline`` draws what was simulated as it draws what was measured.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

from ignite_ddl.cost import Link, above_0, at_least, when_full

__all__ = [
    "SCHEDULES",
    "Action",
    "Gradient",
    "Lognormal",
    "PipeDream",
    "Pipeline",
    "PipelinePlan",
    "Rank",
    "ServerRun",
    "Simulation",
    "Span",
    "all_reduce_naive",
    "all_reduce_ring",
    "all_reduce_tree",
    "best_pipelines",
    "chen_2016",
    "ddp_step",
    "master_step",
    "parameter_server",
    "parameter_server_step",
    "pipedream",
    "pipeline",
    "ring",
    "run",
    "schedule_actions",
    "stage_owners",
]


class Span(NamedTuple):
    """A rank did one thing from ``start`` to ``end``: the fields of a ``ddl.Timeline``'s records.

    Attributes:
        rank: which rank.
        kind: what a figure colours: "forward", "backward", "backward_weight", "communication", "idle", ...
        name: what it was.
        start: virtual seconds since the beginning.
        end: virtual seconds.
        waits_for: of "idle": the rank that it waits for, if that is one rank.
        stage: of a pipeline's passes.
        microbatch: of a pipeline's passes.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    waits_for: int | None = None
    stage: int | None = None
    microbatch: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Simulation(NamedTuple):
    """What a simulation says.

    Attributes:
        seconds: until the last rank was done: its programs, and what it computes. A message that nobody asks for
            may still be under way.
        messages: how many messages each rank sent, in rank order.
        bytes: how many bytes each rank sent, in rank order.
        records: what each rank did, by rank and time, without overlap; waiting and communication are what it
            stood still for.
        in_flight: every message from its start to its arrival, as a span of its sender.
        returned: what each rank's program returned.
    """

    seconds: float
    messages: list[int]
    bytes: list[float]
    records: list[Span]
    in_flight: list[Span]
    returned: list[Any]


# ------------------------------------------------------------------------------------- ranks and a clock


class _Event:
    """Something that a program can wait for; a message is one, and so is the end of a computation."""

    def __init__(self) -> None:
        self.happened = False
        self.value: Any = None
        self.waiting: list[_Program] = []
        self.between: tuple[int, int] | None = None  # of a message: sender and receiver
        self.began = math.inf  # of a message: when it left
        self.n_bytes = 0.0
        self.awaited = False  # the receiver is there
        self.program: _Program | None = None  # of a program's end


class _Program:
    def __init__(self, rank: int, body: Generator) -> None:
        self.rank, self.body = rank, body
        self.end = _Event()
        self.end.program = self
        self.since = 0.0  # waits since
        self.ended = 0.0
        self.waits_for: _Event | None = None
        self.records: list[Span] = []


class Rank:
    """What a program holds: its rank's clock, compute queue and network.

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

    def compute(self, seconds: float, name: str = "compute", kind: str = "compute", **of: int) -> _Event:
        """``yield`` it: the rank computes for so long, after what it computes now (``of`` a stage and microbatch)."""
        return self._world.compute(self.number, seconds, name, kind, of)

    def send(self, to: int, n_bytes: float, value: Any = None, tag: Any = None) -> _Event:
        """Queues a message and returns at once; ``yield`` what it returns to wait until it has arrived."""
        return self._world.send(self.number, to, n_bytes, value, tag)

    def recv(self, source: int, tag: Any = None) -> _Event:
        """``yield`` it: waits for the next message of that rank and tag, and gives its value."""
        return self._world.recv(self.number, source, tag)

    def event(self) -> _Event:
        """An event for two programs of one rank: one yields it, the other :meth:`fire`\\ s it."""
        return _Event()

    def fire(self, event: _Event) -> None:
        """Lets those go on who wait for ``event``."""
        self._world.fire(event)

    def background(self, body: Generator) -> _Event:
        """Starts a second program on this rank, such as its communication; ``yield`` the event to wait for its end."""
        return self._world.start(self.number, body).end


class _World:
    """The clock, the heap of what happens next, and one port a rank: one message out and one in at a time."""

    def __init__(self, n_ranks: int, link: Link, rendezvous: bool) -> None:
        self.n_ranks, self.link, self.rendezvous = n_ranks, link, rendezvous
        self.now = 0.0
        self.heap: list[tuple] = []  # (time, order of arrival, what to call, with what)
        self.order = 0
        self.programs: list[_Program] = []
        self.computed: list[Span] = []
        self.in_flight: list[Span] = []
        self.busy_until = [0.0] * n_ranks
        self.outbox: list[deque[_Event]] = [deque() for _ in range(n_ranks)]
        self.blocked: list[list[int]] = [[] for _ in range(n_ranks)]  # ranks that wait for this one's port
        self.sending, self.receiving = [False] * n_ranks, [False] * n_ranks
        self.messages, self.bytes = [0] * n_ranks, [0.0] * n_ranks
        self.matched: dict[tuple, _Event] = {}
        self.counted: dict[tuple, int] = defaultdict(int)

    def at(self, when: float, call: Callable, *args: Any) -> None:
        self.order += 1  # what was asked for first happens first, also at the same time
        heapq.heappush(self.heap, (when, self.order, call, args))

    def play(self) -> None:
        while self.heap:
            self.now, _, call, args = heapq.heappop(self.heap)
            call(*args)
        stuck = sorted({program.rank for program in self.programs if not program.end.happened})
        if stuck:
            raise RuntimeError(f"ranks {stuck} wait for a message or an event that never comes")
        for message in itertools.chain(*self.outbox):  # there are any with rendezvous only
            source, to = message.between
            raise RuntimeError(f"rank {source} sends rank {to} a message that is never received")

    # programs

    def start(self, rank: int, body: Generator) -> _Program:
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
        program.since, program.waits_for = self.now, event
        if event.happened:
            self.at(self.now, self.resume, program)
        else:
            event.waiting.append(program)

    def fire(self, event: _Event) -> None:
        event.happened = True
        for program in event.waiting:
            self.at(self.now, self.resume, program)
        event.waiting = []

    def resume(self, program: _Program) -> None:
        event = program.waits_for
        program.records += self.stood_still(program, event)
        self.advance(program, event.value)

    def stood_still(self, program: _Program, event: _Event) -> Iterable[Span]:
        since, now, rank = program.since, self.now, program.rank
        if now <= since:
            return
        if (
            event.program is not None
        ):  # it waited for its own background program: for whatever that waited for
            for span in event.program.records:
                if span.end > since:
                    yield span._replace(start=max(span.start, since))
        elif event.between is not None:
            left = min(max(since, event.began), now)
            peer = event.between[0] if event.between[1] == rank else event.between[1]
            if left > since:
                yield Span(rank, "idle", "waits", since, left, peer)
            if now > left:
                way = f"from {peer}" if event.between[1] == rank else f"to {peer}"
                yield Span(rank, "communication", way, left, now)

    # a rank's compute queue

    def compute(self, rank: int, seconds: float, name: str, kind: str, of: dict[str, int]) -> _Event:
        at_least(0, seconds=seconds)
        begin = max(self.now, self.busy_until[rank])
        end = self.busy_until[rank] = begin + seconds
        if seconds > 0:
            self.computed.append(Span(rank, kind, name, begin, end, **of))
        event = _Event()
        self.at(end, self.fire, event)
        return event

    # the network

    def match(self, side: str, source: int, to: int, tag: Any) -> _Event:
        """The n-th message of a sender, receiver and tag is the n-th that is asked for."""
        for name, rank in (("source", source), ("to", to)):
            if rank not in range(self.n_ranks):
                raise ValueError(f"{name} should be a rank from 0 to {self.n_ranks - 1}, but given {rank}")
        self.counted[side, source, to, tag] += 1
        key = (source, to, tag, self.counted[side, source, to, tag])
        if key in self.matched:
            return self.matched.pop(key)
        message = self.matched[key] = _Event()
        message.between = (source, to)
        return message

    def send(self, source: int, to: int, n_bytes: float, value: Any, tag: Any) -> _Event:
        at_least(0, n_bytes=n_bytes)
        message = self.match("sent", source, to, tag)
        message.n_bytes, message.value = n_bytes, value
        self.messages[source] += 1
        self.bytes[source] += n_bytes
        self.outbox[source].append(message)
        self.try_sending(source)
        return message

    def recv(self, to: int, source: int, tag: Any) -> _Event:
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

    def arrived(self, message: _Event) -> None:
        source, to = message.between
        self.sending[source] = self.receiving[to] = False
        self.in_flight.append(Span(source, "communication", f"to {to}", message.began, self.now))
        self.fire(message)
        blocked, self.blocked[to] = self.blocked[to], []
        for rank in [*blocked, source]:  # who waited longest is first
            self.try_sending(rank)


def run(
    program: Callable[[Rank], Generator], n_ranks: int, link: Link, rendezvous: bool = False
) -> Simulation:
    """Plays a program on every rank, and says who did what when.

    A program is a generator function: it ``yield``\\ s what takes time. ``rank.compute`` keeps its rank busy,
    ``rank.send`` goes into the rank's outbox, ``rank.recv`` waits for a message. A rank's port sends one
    message at a time, in the order of the outbox, and receives one meanwhile; a message takes
    ``link.seconds(n_bytes)``. Two things at the same time happen in the order in which they were asked for.

    Args:
        program: called with a :class:`Rank` on each rank.
        n_ranks: size of the world.
        link: the network between any two ranks.
        rendezvous: True: a message leaves only when its receiver waits for it. Default False: as soon as the
            ports are free.

    Returns:
        Simulation: seconds, messages, bytes, records, and what the programs returned.

    Raises:
        RuntimeError: if a rank waits for ever; with ``rendezvous``, also if nobody receives a message.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            def program(rank):
                yield rank.compute(1.0 + rank.number)
                rank.send((rank.number + 1) % rank.n_ranks, n_bytes=8, value=rank.number)
                return (yield rank.recv((rank.number - 1) % rank.n_ranks))

            two = ddl.simulate.run(program, 2, ddl.cost.Link(latency=0.5, bandwidth=16))
            assert two.returned == [1, 0]
            assert two.seconds == 2 + 0.5 + 0.5            # rank 0 computes 1 s, waits for rank 1, receives
    """
    at_least(1, n_ranks=n_ranks)
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


# -------------------------------------------------------------------- collectives, and steps of training


def ring(rank: Rank, chunks: list, n_bytes: float, tag: Any = None) -> Generator:
    """A ring all-reduce as a part of a program: ``yield from ring(rank, chunks, n_bytes)``.

    Args:
        rank: of the program.
        chunks: one a rank, anything that can be added; they become the sums.
        n_bytes: size of all chunks together.
        tag: keeps its messages apart from others. Default None.

    Returns:
        Generator: to ``yield from``.
    """
    n, right, left = rank.n_ranks, (rank.number + 1) % rank.n_ranks, (rank.number - 1) % rank.n_ranks
    for step in range(2 * (n - 1)):
        adds = step < n - 1  # first round: pass on the chunk that just grew; second: the one that is complete
        mine = (rank.number - step + (0 if adds else n)) % n
        rank.send(right, n_bytes / n, chunks[mine], tag)
        got = yield rank.recv(left, tag)
        chunks[mine - 1] = chunks[mine - 1] + got if adds else got


def all_reduce_naive(
    n_ranks: int, n_bytes: float, link: Link, enter: Sequence[float] | None = None
) -> Simulation:
    """Everybody sends its whole buffer to everybody; meets ``cost.all_reduce_naive``.

    Args:
        n_ranks: size of the world.
        n_bytes: size of one rank's buffer.
        link: the network.
        enter: when each rank comes to the collective, in seconds. Default: all at 0.

    Returns:
        Simulation: ``returned`` holds each rank's sum of 2 ** rank: whose buffers are in it, each once.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            four = ddl.simulate.all_reduce_naive(4, 48, ddl.cost.Link(latency=0, bandwidth=1))
            assert four.bytes == [144] * 4 and four.returned == [0b1111] * 4
    """

    at_least(1, n_ranks=n_ranks)
    at_least(0, n_bytes=n_bytes)
    entered = _each(n_ranks, enter=enter)

    def program(rank: Rank) -> Generator:
        yield rank.compute(entered[rank.number])
        mine = total = 1 << rank.number
        for step in range(1, rank.n_ranks):
            rank.send((rank.number + step) % rank.n_ranks, n_bytes, mine)
            total += yield rank.recv((rank.number - step) % rank.n_ranks)
        return total

    return run(program, n_ranks, link)


def all_reduce_tree(
    n_ranks: int, n_bytes: float, link: Link, enter: Sequence[float] | None = None
) -> Simulation:
    """Up a binomial tree adding, down again copying; meets ``cost.all_reduce_tree``.

    Args:
        n_ranks: size of the world.
        n_bytes: size of one rank's buffer.
        link: the network.
        enter: when each rank comes to the collective, in seconds. Default: all at 0.

    Returns:
        Simulation: ``returned`` holds each rank's sum of 2 ** rank: whose buffers are in it, each once.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            assert ddl.simulate.all_reduce_tree(8, 1, ddl.cost.Link(latency=1, bandwidth=1)).seconds == 2 * 3 * 2
    """

    at_least(1, n_ranks=n_ranks)
    at_least(0, n_bytes=n_bytes)
    entered = _each(n_ranks, enter=enter)

    def program(rank: Rank) -> Generator:
        yield rank.compute(entered[rank.number])
        total, bit = 1 << rank.number, 1
        while bit < n_ranks and not rank.number & bit:
            if rank.number + bit < n_ranks:
                total += yield rank.recv(rank.number + bit)
            bit *= 2
        if rank.number:
            parent = rank.number - bit  # bit is the lowest that this rank's number has
            rank.send(parent, n_bytes, total)
            total = yield rank.recv(parent)
        sent = []
        while bit > 1:
            bit //= 2
            if rank.number + bit < n_ranks:
                sent.append(rank.send(rank.number + bit, n_bytes, total))
        if sent:
            yield sent[-1]  # the others arrive before it
        return total

    return run(program, n_ranks, link)


def all_reduce_ring(
    n_ranks: int, n_bytes: float, link: Link, enter: Sequence[float] | None = None
) -> Simulation:
    """Twice round the ring, a chunk at a time; meets ``cost.all_reduce_ring``.

    Args:
        n_ranks: size of the world.
        n_bytes: size of one rank's buffer.
        link: the network.
        enter: when each rank comes to the collective, in seconds. Default: all at 0.

    Returns:
        Simulation: ``returned`` holds each rank's chunks, sums of 2 ** rank: who is in it, each once.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            four = ddl.simulate.all_reduce_ring(4, 48, ddl.cost.Link(latency=0, bandwidth=1))
            assert four.bytes == [72] * 4 and four.returned == [[0b1111] * 4] * 4
    """

    at_least(1, n_ranks=n_ranks)
    at_least(0, n_bytes=n_bytes)
    entered = _each(n_ranks, enter=enter)

    def program(rank: Rank) -> Generator:
        yield rank.compute(entered[rank.number])
        chunks = [1 << rank.number] * n_ranks
        yield from ring(rank, chunks, n_bytes)
        return chunks

    return run(program, n_ranks, link)


def master_step(
    n_ranks: int,
    weight_bytes: float,
    input_bytes: float,
    output_bytes: float,
    link: Link,
    forward_seconds: float = 0.0,
    backward_seconds: float = 0.0,
    loss_seconds: float = 0.0,
) -> Simulation:
    """A step of the master scheme; meets ``cost.master_step``, which explains it.

    The master does one thing after the other: a message leaves when its receiver is there for it (rendezvous).

    Args:
        n_ranks: size of the world, the master (rank 0) included.
        weight_bytes: all weights.
        input_bytes: the whole batch.
        output_bytes: the outputs of the whole batch.
        link: the network.
        forward_seconds: forward of the whole batch on one rank. Default: 0.
        backward_seconds: backward of the whole batch on one rank. Default: 0.
        loss_seconds: the loss, at the master. Default: 0.

    Returns:
        Simulation: its records show the master's rush and the others' wait.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            step = 4, 1000, 80, 40, ddl.cost.Link(latency=0, bandwidth=1)
            assert ddl.simulate.master_step(*step).seconds == ddl.cost.master_step(*step).seconds
    """
    at_least(1, n_ranks=n_ranks)
    at_least(0, weight_bytes=weight_bytes, input_bytes=input_bytes, output_bytes=output_bytes)
    at_least(0, forward_seconds=forward_seconds, backward_seconds=backward_seconds, loss_seconds=loss_seconds)
    share = 1 / n_ranks

    def master(rank: Rank) -> Generator:
        others = range(1, n_ranks)
        for size in (weight_bytes, input_bytes * share):
            for other in others:
                yield rank.send(other, size)
        yield rank.compute(forward_seconds * share, "forward", "forward")
        for other in others:
            yield rank.recv(other)
        yield rank.compute(loss_seconds, "loss", "forward")
        for other in others:
            yield rank.send(other, output_bytes * share)
        yield rank.compute(backward_seconds * share, "backward", "backward")
        for other in others:
            yield rank.recv(other)

    def worker(rank: Rank) -> Generator:
        yield rank.recv(0)
        yield rank.recv(0)
        yield rank.compute(forward_seconds * share, "forward", "forward")
        yield rank.send(0, output_bytes * share)
        yield rank.recv(0)
        yield rank.compute(backward_seconds * share, "backward", "backward")
        yield rank.send(0, weight_bytes)

    return run(lambda rank: worker(rank) if rank.number else master(rank), n_ranks, link, rendezvous=True)


def parameter_server_step(
    n_workers: int,
    weight_bytes: float,
    link: Link,
    n_servers: int = 1,
    compute_seconds: float | Sequence[float] = 0.0,
) -> Simulation:
    """A synchronous step with parameter servers; meets ``cost.parameter_server_step``, which explains it.

    Args:
        n_workers: how many workers: ranks 0 to n - 1.
        weight_bytes: all weights.
        link: the network.
        n_servers: how many servers share the weights: ranks n and up. Default: 1.
        compute_seconds: forward and backward, one number or one a worker. Default: 0.

    Returns:
        Simulation: workers first, then servers.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            link = ddl.cost.Link(latency=0, bandwidth=1)
            assert ddl.simulate.parameter_server_step(8, 100, link, n_servers=4).seconds == 400
    """
    at_least(1, n_workers=n_workers, n_servers=n_servers)
    at_least(0, weight_bytes=weight_bytes)
    computes = _each(n_workers, compute_seconds=compute_seconds)
    part = weight_bytes / n_servers
    pulled: list[int] = []
    all_pulled = _Event()

    # Each begins with another server or worker, so that no port has a queue while another has none.
    def worker(rank: Rank) -> Generator:
        for server in range(n_servers):
            yield rank.recv(n_workers + server)
        pulled.append(rank.number)
        if len(pulled) == n_workers:
            rank.fire(all_pulled)
        yield all_pulled  # the phases do not overlap, as in the closed form
        yield rank.compute(computes[rank.number])
        servers = [n_workers + (rank.number + turn) % n_servers for turn in range(n_servers)]
        yield [rank.send(server, part) for server in servers][-1]  # the others arrive before it

    def server(rank: Rank) -> Generator:
        for turn in range(n_workers):
            rank.send((rank.number - n_workers + turn) % n_workers, part)
        for number in range(n_workers):
            yield rank.recv(number)

    return run(
        lambda rank: worker(rank) if rank.number < n_workers else server(rank), n_workers + n_servers, link
    )


def ddp_step(
    n_ranks: int,
    bucket_bytes: Sequence[float],
    link: Link,
    forward_seconds: float = 0.0,
    backward_seconds: float = 0.0,
    ready: Sequence[float] | None = None,
    slowdown: Sequence[float] | None = None,
) -> Simulation:
    """A step of DDP: while backward fills a bucket, those before it go round the ring; meets ``cost.ddp_step``.

    Args:
        n_ranks: size of the world.
        bucket_bytes: the buckets in the order in which backward fills them.
        link: the network.
        forward_seconds: one rank's forward. Default: 0.
        backward_seconds: one rank's backward. Default: 0.
        ready: when each bucket is full, in seconds after backward's begin, none before the one in front of it.
            Default: in proportion to the bytes.
        slowdown: by which factor each rank computes slower, above 0. Default: 1 for all.

    Returns:
        Simulation: ``in_flight`` shows what hides behind backward, ``records`` what does not.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            step = 2, [4, 4], ddl.cost.Link(latency=0, bandwidth=1), 5, 10
            assert ddl.simulate.ddp_step(*step).seconds == ddl.cost.ddp_step(*step).seconds == 19
    """
    at_least(1, n_ranks=n_ranks)
    at_least(0, forward_seconds=forward_seconds)
    ready = when_full(bucket_bytes, backward_seconds, ready)
    slower = _each(n_ranks, slowdown=1.0 if slowdown is None else slowdown)
    above_0(slowdown=slower)

    def program(rank: Rank) -> Generator:
        slow = slower[rank.number]
        full = [rank.event() for _ in bucket_bytes]

        def communication() -> Generator:
            for bucket, size in enumerate(bucket_bytes):
                yield full[bucket]
                yield from ring(rank, [1 << rank.number] * n_ranks, size, tag=bucket)

        reduced = rank.background(communication())
        yield rank.compute(slow * forward_seconds, "forward", "forward")
        done = 0.0
        for bucket, at in enumerate(ready):
            yield rank.compute(slow * (at - done), f"bucket {bucket}", "backward")
            rank.fire(full[bucket])
            done = at
        yield rank.compute(slow * (backward_seconds - done), "backward", "backward")
        yield reduced

    return run(program, n_ranks, link)


def _of(seconds: float | Sequence[float], place: int) -> float:
    return seconds[place] if isinstance(seconds, Sequence) else seconds


def _each(n: int, **given: float | Sequence[float] | None) -> list[float]:
    """A number for each of n ranks or workers; one number holds for all, None is 0."""
    [(name, value)] = given.items()
    each = list(value) if isinstance(value, Sequence) else [value or 0.0] * n
    if len(each) != n:
        raise ValueError(f"{name} should have a number for each of {n}, but has {len(each)}")
    at_least(0, **{name: each})
    return each


# ------------------------------------------------------------------------------------------- pipelines

# name: torch's class, None where the order is written out below; stages on each rank
SCHEDULES = {
    "gpipe": (None, 1),
    "1f1b": (None, 1),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", 2),
    "looped_bfs": ("ScheduleLoopedBFS", 2),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
    "dualpipev": ("ScheduleDualPipeV", 2),
}
_KINDS = {"F": "forward", "I": "backward", "B": "backward", "W": "backward_weight"}


class Action(NamedTuple):
    """One entry of a schedule.

    Attributes:
        kind: "F" forward, "B" the whole backward, "I" its input part, "W" its weight part (torch's letters).
        stage: which stage.
        microbatch: which microbatch.
    """

    kind: str
    stage: int
    microbatch: int


class Pipeline(NamedTuple):
    """What a pipeline step would do. The first six fields are a :class:`Simulation`'s.

    Attributes:
        seconds: makespan.
        messages: how many messages each rank sent.
        bytes: not known here: zeros. A message is one microbatch's activation, or its gradient.
        records: what each rank did, gaps as "idle".
        in_flight: every transfer.
        returned: None for each rank.
        bubble: the share of all ranks' time, up to the makespan, in which they do not compute.
        idle: for each rank the seconds between its first and its last action in which it does not compute. Papers on
            zero bubbles count these: a rank may then begin its next step before others have ended theirs.
        peak_activations: for each rank the most (microbatch, stage) pairs that it kept for backward at once.
        actions: the schedule that was played, one list a rank.
    """

    seconds: float
    messages: list[int]
    bytes: list[float]
    records: list[Span]
    in_flight: list[Span]
    returned: list[Any]
    bubble: float
    idle: list[float]
    peak_activations: list[int]
    actions: list[list[Action]]


def stage_owners(schedule: str, n_ranks: int, n_chunks: int | None = None) -> list[int]:
    """Which rank holds each stage: round and round, or down and up again for zbv and dualpipev.

    Args:
        schedule: a name of ``SCHEDULES``.
        n_ranks: ranks of the pipeline.
        n_chunks: stages on each rank. Default: the schedule's own, 1 or 2.

    Returns:
        list: a rank for each stage.

    Raises:
        ValueError: for an unknown schedule, and for numbers that it cannot do.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            assert ddl.simulate.stage_owners("interleaved_1f1b", 2) == [0, 1, 0, 1]
            assert ddl.simulate.stage_owners("zbv", 2) == [0, 1, 1, 0]
    """
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        raise ValueError(f"schedule should be one of {', '.join(SCHEDULES)}, but given {schedule!r}")
    own = SCHEDULES[schedule][1]
    n_chunks = own if n_chunks is None else n_chunks
    at_least(1, n_ranks=n_ranks, n_chunks=n_chunks)
    ranks = list(range(n_ranks))
    if schedule in ("gpipe", "1f1b", "zbv", "dualpipev") and n_chunks != own:
        raise ValueError(
            f"schedule={schedule!r} has {own} stages on each rank, but given n_chunks={n_chunks}"
        )
    return ranks + ranks[::-1] if schedule in ("zbv", "dualpipev") else ranks * n_chunks


def schedule_actions(
    schedule: str, n_ranks: int, n_microbatches: int, n_chunks: int | None = None
) -> list[list[Action]]:
    """The order in which each rank works, as torch has it.

    gpipe and 1f1b are written out (they are loops in torch); the others are asked from torch's own classes, without
    their process groups. dualpipev's overlapped forward-and-backward is played one after the other, forward
    first, as torch runs it unless told otherwise.

    Args:
        schedule: a name of ``SCHEDULES``.
        n_ranks: ranks of the pipeline.
        n_microbatches: at least ``n_ranks`` for 1f1b, 2 ``n_ranks`` for dualpipev; for the two interleaved ones
            a multiple of ``max(1, n_microbatches // n_ranks)``.
        n_chunks: stages on each rank. Default: 1 for gpipe and 1f1b, 2 for the others.

    Returns:
        list: for each rank its actions.

    Raises:
        ValueError: for an unknown schedule, and for numbers that it cannot do.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            first, last = ddl.simulate.schedule_actions("1f1b", n_ranks=2, n_microbatches=2)
            assert [action.kind for action in first] == ["F", "F", "B", "B"]
            assert [action.kind for action in last] == ["F", "B", "F", "B"]
    """
    n_stages = len(stage_owners(schedule, n_ranks, n_chunks))
    least = {"1f1b": n_ranks, "dualpipev": n_stages}.get(schedule, 1)
    rounds = max(1, n_microbatches // n_ranks)
    if n_microbatches < least:
        raise ValueError(
            f"n_microbatches should be at least {least} for schedule={schedule!r} on {n_ranks} ranks, "
            f"but given {n_microbatches}"
        )
    if schedule.startswith("interleaved") and n_microbatches % rounds:
        raise ValueError(
            f"n_microbatches should be a multiple of {rounds} (n_microbatches // n_ranks), but given {n_microbatches}"
        )
    actions = []
    for rank in range(n_ranks):
        if SCHEDULES[schedule][0] is not None:
            entries = _torchs_entries(schedule, rank, n_ranks, n_microbatches, n_stages)
            actions.append([action for entry in entries for action in entry])
            continue
        warm_up = n_microbatches if schedule == "gpipe" else min(n_microbatches, n_ranks - rank)
        order = [Action("F", rank, m) for m in range(warm_up)]
        for microbatch in range(n_microbatches):
            order.append(Action("B", rank, microbatch))
            if warm_up + microbatch < n_microbatches:
                order.append(Action("F", rank, warm_up + microbatch))
        actions.append(order)
    return actions


def _torchs_entries(
    schedule: str, rank: int, n_ranks: int, n_microbatches: int, n_stages: int
) -> list[list[Action]]:
    """torch's own table for a rank: an entry is one action, or dualpipev's two that are meant to overlap."""
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, SCHEDULES[schedule][0])
    planner = object.__new__(kind)  # its constructor wants stages and process groups, its plan does not
    planner.pp_group_size, planner._n_microbatches = n_ranks, n_microbatches
    planner.num_stages = planner._num_stages = n_stages
    planner.n_local_stages = n_stages // n_ranks
    planner._stages = [None] * planner.n_local_stages
    planner.number_of_rounds = max(1, n_microbatches // n_ranks)
    planner.microbatches_per_round = n_microbatches // planner.number_of_rounds
    return [
        [
            Action(one.computation_type.value, one.stage_index, one.microbatch_index)
            for one in getattr(action, "sub_actions", None) or [action]
        ]
        for action in planner._calculate_single_rank_operations(rank)
        if action is not None
    ]


def pipeline(
    schedule: str,
    n_ranks: int,
    n_microbatches: int,
    forward: float | Sequence[float] = 1.0,
    backward_input: float | Sequence[float] = 1.0,
    backward_weight: float | Sequence[float] = 1.0,
    transfer: float = 0.0,
    overhead: float = 0.0,
    n_chunks: int | None = None,
) -> Pipeline:
    """Plays a schedule: each rank works through its actions in order, each as soon as what it needs has come.

    Equal stages and free transfers give the closed forms. gpipe, 1f1b, interleaved_1f1b and looped_bfs:
    ``cost.pipeline_bubble`` (Narayanan et al. 2021). interleaved_zero_bubble: (p - 1)(F + B - W) with a stage's
    times, where W is no longer than F; with one stage a rank that is ZB-H1 (Qi et al. 2023, table 2; its ZB-H2, of
    which torch has no schedule, is a formula only, in ``cost.zero_bubble_seconds``). zbv with F = B = W and at
    least 2p - 1 microbatches: no rank is idle between its first and its last action (Qi et al.); up to the makespan
    remain the (p - 1) F of filling. Where torch differs from the papers: its zbv keeps one
    fixed order, the paper's scheduler rearranges where F, B and W differ; its dualpipev overlaps forward with
    backward, which is not modelled: here one comes after the other, forward first, and what the two have to send
    leaves when both are done. That is how torch runs them.

    Args:
        schedule: a name of ``SCHEDULES``.
        n_ranks: ranks of the pipeline.
        n_microbatches: microbatches of a step.
        forward: seconds of one microbatch on one stage, a number or one for each stage (a list, an array or a
            tensor). Default: 1.
        backward_input: of its gradient with respect to the input. Default: 1. A whole backward is both parts.
        backward_weight: with respect to the weights. Default: 1.
        transfer: seconds of an activation or its gradient between two ranks. Default: 0.
        overhead: seconds that every action costs besides. Default: 0.
        n_chunks: stages on each rank. Default: 1 for gpipe and 1f1b, 2 for the others.

    Returns:
        Pipeline: seconds, bubble, peak activations, and records for ``plot.timeline``.

    Raises:
        ValueError: for an unknown schedule, numbers that it cannot do, negative times, or as many times as there are
            not stages.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            step = ddl.simulate.pipeline("1f1b", n_ranks=4, n_microbatches=8)
            assert abs(step.bubble - ddl.cost.pipeline_bubble(4, 8)) < 1e-9
            assert step.peak_activations == [4, 3, 2, 1]
    """
    owners = stage_owners(schedule, n_ranks, n_chunks)
    actions = schedule_actions(schedule, n_ranks, n_microbatches, n_chunks)
    at_least(0, transfer=transfer, overhead=overhead)
    times = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    for name, given in times.items():
        times[name] = given = _listed(**{name: given})
        if isinstance(given, list) and len(given) != len(owners):
            raise ValueError(
                f"{name} should be a number or have one for each of {len(owners)} stages, but given {len(given)}"
            )

    def seconds(action: Action) -> float:
        f, i, w = (_of(given, action.stage) for given in times.values())
        return overhead + {"F": f, "I": i, "W": w, "B": i + w}[action.kind]

    # Of a pair that torch overlaps, what the first gives is sent when the second is done.
    firsts = {
        entry[0]
        for rank in range(n_ranks if schedule == "dualpipev" else 0)
        for entry in _torchs_entries(schedule, rank, n_ranks, n_microbatches, len(owners))
        if len(entry) == 2
    }

    def program(rank: Rank) -> Generator:
        done, outgoing = set(), []
        for action in actions[rank.number]:
            kind, stage, microbatch = action
            # Forward needs the stage before it, backward the stage behind it, and both travel as messages.
            needs, gives = {"F": (stage - 1, stage + 1), "W": (-1, -1)}.get(kind, (stage + 1, stage - 1))
            tag = ("F" if kind == "F" else "B", microbatch)
            if 0 <= needs < len(owners):
                if owners[needs] != rank.number:
                    yield rank.recv(owners[needs], (*tag, stage))
                elif (tag[0], needs, microbatch) not in done:
                    raise RuntimeError(f"rank {rank.number}: {action} comes before what it needs")
            if kind != "F" and ("B" if kind == "W" else "F", stage, microbatch) not in done:
                raise RuntimeError(f"rank {rank.number}: {action} comes before what it needs")
            name = f"{stage}{kind}{microbatch}"  # as torch and ddl.Timeline call it
            yield rank.compute(seconds(action), name, _KINDS[kind], stage=stage, microbatch=microbatch)
            if kind != "W":
                done.add((tag[0], stage, microbatch))
                if 0 <= gives < len(owners) and owners[gives] != rank.number:
                    outgoing.append((owners[gives], (*tag, gives)))
            if action not in firsts:
                for to, its_tag in outgoing:
                    rank.send(to, 0, tag=its_tag)
                outgoing.clear()

    played = run(program, n_ranks, Link(latency=transfer, bandwidth=math.inf))
    busy = [sum(seconds(action) for action in order) for order in actions]
    computed = [
        [span for span in played.records if span.rank == rank and span.kind in _KINDS.values()]
        for rank in range(n_ranks)
    ]
    peaks = []
    for order in actions:
        kept = peak = 0
        for action in order:
            kept += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
            peak = max(peak, kept)
        peaks.append(peak)
    return Pipeline(
        *played._replace(records=_with_idle_ends(played.records, n_ranks, played.seconds)),
        bubble=1 - sum(busy) / (n_ranks * played.seconds) if played.seconds else 0.0,
        idle=[
            spans[-1].end - spans[0].start - work if spans else 0.0
            for spans, work in zip(computed, busy, strict=True)
        ],
        peak_activations=peaks,
        actions=actions,
    )


def _listed(**given: Any) -> float | list[float]:
    """A number as it is; a sequence, an array or a tensor of them as a list; none below 0."""
    [(name, value)] = given.items()
    if hasattr(value, "tolist"):  # of numpy or torch
        value = value.tolist()
    value = list(value) if isinstance(value, Sequence) else value
    at_least(0, **{name: value})
    return value


def _with_idle_ends(records: list[Span], n_ranks: int, end: float) -> list[Span]:
    """Every rank's row up to the end of the step: who is done early is idle."""
    last = dict.fromkeys(range(n_ranks), 0.0)
    for span in records:
        last[span.rank] = max(last[span.rank], span.end)
    ends = [Span(rank, "idle", "done", at, end) for rank, at in last.items() if at < end]
    return sorted([*records, *ends], key=lambda span: (span.rank, span.start, span.end))


class PipeDream(NamedTuple):
    """What an asynchronous pipeline would do. A version is the number of updates that a stage has made.

    Attributes:
        pipeline: the passes, times and activations of the whole run: one long 1F1B.
        forward_versions: for each stage, the version with which each microbatch's forward pass is made. With
            stashing its backward pass uses it again.
        backward_versions: for each stage, the newest version at each microbatch's backward pass, which is what that
            pass uses without stashing.
        stashed: for each stage the most versions that it holds at once with stashing, the newest among them.
    """

    pipeline: Pipeline
    forward_versions: list[list[int]]
    backward_versions: list[list[int]]
    stashed: list[int]


def pipedream(
    n_ranks: int,
    n_microbatches: int,
    forward: float | Sequence[float] = 1.0,
    backward_input: float | Sequence[float] = 1.0,
    backward_weight: float | Sequence[float] = 1.0,
    transfer: float = 0.0,
    overhead: float = 0.0,
) -> PipeDream:
    """Plays PipeDream: 1F1B without a flush, where every stage updates its weights after each of its backward passes.

    The order is that of one 1F1B over all microbatches of the run, so it fills once and drains once, and with equal
    stages and free transfers the bubble is (p - 1) / (m + p - 1) of the whole run. Stage s (from 0) runs microbatch k
    forward with version max(0, k - (p - 1 - s)) and comes to its backward pass with version k; it stashes p - s
    versions once m is at least 2 (p - s) - 1. Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism
    for DNN Training", SOSP 2019, sections 3.2 (1F1B) and 3.3 (weight stashing, with stages from 1).

    Args:
        n_ranks: p, ranks of the pipeline, one stage each.
        n_microbatches: m, all microbatches of the run (the paper's minibatches), at least ``n_ranks``.
        forward: seconds of one microbatch on one stage, a number or one for each stage. Default: 1.
        backward_input: of its gradient with respect to the input. Default: 1.
        backward_weight: with respect to the weights, and of the update. Default: 1.
        transfer: seconds of an activation or its gradient between two ranks. Default: 0.
        overhead: seconds that every pass costs besides. Default: 0.

    Returns:
        PipeDream: the run, and which version of the weights each pass uses.

    Raises:
        ValueError: for numbers that 1F1B cannot do.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            run = ddl.simulate.pipedream(n_ranks=4, n_microbatches=8)
            assert run.forward_versions[0] == [0, 0, 0, 0, 1, 2, 3, 4]
            assert run.forward_versions[3] == run.backward_versions[3] == list(range(8))
            assert run.stashed == [4, 3, 2, 1]
    """
    played = pipeline(
        "1f1b", n_ranks, n_microbatches, forward, backward_input, backward_weight, transfer, overhead
    )
    forward_versions, backward_versions, stashed = [], [], []
    for order in played.actions:
        version, most = 0, 1
        used, met, in_flight = [], [], {}
        for action in order:
            if action.kind == "F":
                used.append(version)
                in_flight[action.microbatch] = version
            else:
                met.append(version)
                del in_flight[action.microbatch]
                version += 1
            most = max(most, len({version, *in_flight.values()}))
        forward_versions.append(used)
        backward_versions.append(met)
        stashed.append(most)
    return PipeDream(played, forward_versions, backward_versions, stashed)


class PipelinePlan(NamedTuple):
    """One way to run a pipeline.

    Attributes:
        schedule: its name.
        n_microbatches: microbatches of a step.
        seconds: the step.
        bubble: the share of all ranks' time in which they do not compute.
        peak_samples: the most samples whose activations, on a whole rank's part of the model, one rank keeps.
    """

    schedule: str
    n_microbatches: int
    seconds: float
    bubble: float
    peak_samples: float


def best_pipelines(
    n_ranks: int,
    batch_size: int,
    forward: float | Sequence[float],
    backward_input: float | Sequence[float],
    backward_weight: float | Sequence[float],
    overhead: float = 0.0,
    activation_bytes: float = 0.0,
    link: Link | None = None,
    schedules: Iterable[str] = SCHEDULES,
    n_microbatches: Iterable[int] | None = None,
    max_peak_samples: float = math.inf,
) -> list[PipelinePlan]:
    """Tries schedules and numbers of microbatches, and puts the fastest first.

    More microbatches make the bubble smaller and pay ``overhead`` and the link's latency more often: in between is the
    best number. A stage's time is its seconds a sample times the samples of a microbatch, plus ``overhead``.

    Args:
        n_ranks: ranks of the pipeline.
        batch_size: samples of a step, on this pipeline.
        forward: seconds a sample, of the whole model, or measured: one for each of 2 ``n_ranks`` consecutive parts
            of it (a schedule with one stage a rank takes two parts as one).
        backward_input: the same for the gradients of the inputs.
        backward_weight: the same for the gradients of the weights.
        overhead: seconds that each action costs whatever its size. Default: 0.
        activation_bytes: of one sample between two stages. Default: 0.
        link: the network; with None (default) transfers are free.
        schedules: names to try. Default: all.
        n_microbatches: numbers to try, each a divisor of the batch; those that a schedule cannot do are left out.
            Default: all that divide the batch.
        max_peak_samples: leaves out what keeps more activations. Default: no limit.

    Returns:
        list: of :class:`PipelinePlan`, the fastest first; at the same time the one that keeps less.

    Raises:
        ValueError: for an unknown schedule, a number of microbatches that does not divide the batch (torch's pieces
            are equal), negative times, or other than 2 ``n_ranks`` measured ones.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            plans = ddl.simulate.best_pipelines(
                4, 32, forward=0.004, backward_input=0.004, backward_weight=0.004, overhead=0.001,
                schedules=["gpipe", "1f1b"],
            )
            assert plans[0].schedule == "1f1b" and plans[0].n_microbatches == 16
    """
    at_least(1, n_ranks=n_ranks, batch_size=batch_size)
    at_least(0, activation_bytes=activation_bytes)
    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    candidates = divisors if n_microbatches is None else list(n_microbatches)
    if uneven := [count for count in candidates if count not in divisors]:
        raise ValueError(f"n_microbatches should divide batch_size={batch_size}, but given {uneven[0]}")
    forward, backward_input, backward_weight = (
        _listed(forward=forward),
        _listed(backward_input=backward_input),
        _listed(backward_weight=backward_weight),
    )
    plans = []
    for schedule in schedules:
        n_chunks = len(stage_owners(schedule, n_ranks)) // n_ranks
        parts = [_parts(given, n_ranks, n_chunks) for given in (forward, backward_input, backward_weight)]
        for count in candidates:
            try:
                schedule_actions(schedule, n_ranks, count)
            except ValueError:
                continue
            size = batch_size / count
            times = [[size * seconds for seconds in part] for part in parts]
            transfer = link.seconds(size * activation_bytes) if link is not None else 0.0
            step = pipeline(schedule, n_ranks, count, *times, transfer=transfer, overhead=overhead)
            peak = max(step.peak_activations) * size / n_chunks
            if peak <= max_peak_samples:
                plans.append(PipelinePlan(schedule, count, step.seconds, step.bubble, peak))
    return sorted(plans, key=lambda plan: (plan.seconds, plan.peak_samples, plan.n_microbatches))


def _parts(given: float | Sequence[float], n_ranks: int, n_chunks: int) -> list[float]:
    """Seconds of each stage, from the whole model's or from those of 2 n_ranks parts."""
    if not isinstance(given, Sequence):
        return [given / (n_ranks * n_chunks)] * (n_ranks * n_chunks)
    if len(given) != 2 * n_ranks:
        raise ValueError(
            f"measured seconds should have 2 n_ranks = {2 * n_ranks} parts, but given {len(given)}"
        )
    return list(given) if n_chunks == 2 else [a + b for a, b in zip(given[::2], given[1::2], strict=True)]


# ---------------------------------------------------------------------- workers and a parameter server


class Gradient(NamedTuple):
    """What became of one gradient; the names are those of ``ddl.ParameterServer``'s records.

    Attributes:
        worker: who computed it.
        step: its number among this worker's, from 0.
        pulled: the version of the weights that it was computed with.
        version: how many updates there had been when it was applied, or when it came too late.
        pulled_at: virtual seconds.
        pushed_at: virtual seconds.
        applied_at: virtual seconds; of a dropped one, when it came.
        waited: seconds that the worker waited before it could pull.
    """

    worker: int
    step: int
    pulled: int
    version: int
    pulled_at: float
    pushed_at: float
    applied_at: float
    waited: float

    @property
    def staleness(self) -> int:
        """Updates between pull and apply."""
        return self.version - self.pulled


class ServerRun(NamedTuple):
    """A training with a parameter server.

    Attributes:
        seconds: when the last update was made.
        times: when each update was made.
        updates: every gradient that was applied, in the order in which they were.
        dropped: every gradient that came too late.
    """

    seconds: float
    times: list[float]
    updates: list[Gradient]
    dropped: list[Gradient]


class Lognormal:
    """Times of computation: median x exp(sigma x a normal number), drawn for each worker and step.

    The same worker and step get the same time in every simulation, whatever happened before: modes are compared
    on the same luck.

    Args:
        median: seconds.
        sigma: spread of the logarithm.
        seed: another seed, other luck. Default: 0.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            draw = ddl.simulate.Lognormal(median=1.0, sigma=0.1)
            assert draw(3, 7) == ddl.simulate.Lognormal(median=1.0, sigma=0.1)(3, 7) != draw(3, 8)
    """

    def __init__(self, median: float, sigma: float, seed: int = 0) -> None:
        self.median, self.sigma, self.seed = median, sigma, seed
        self._drawn: dict[int, tuple[random.Random, list[float]]] = {}

    def __call__(self, worker: int, step: int) -> float:
        if worker not in self._drawn:
            self._drawn[worker] = random.Random(f"{self.seed} {worker}"), []
        source, drawn = self._drawn[worker]
        while len(drawn) <= step:
            drawn.append(self.median * math.exp(self.sigma * source.gauss(0, 1)))
        return drawn[step]


def chen_2016(seed: int = 0) -> Lognormal:
    """Stragglers like those of Chen et al., "Revisiting Distributed Synchronous SGD" (arXiv 1604.00981, 2016).

    Of the paper (Inception, 100 workers; section 3.1 and its two figures of arrival times): most mean times to
    collect k of 100 gradients lie between 1.4 and 1.8 s; the 98th comes within 2 s in 80 % of the steps, the
    last in 30 %; of 100 machines, N = 96 with b = 4 backups trained fastest. These figures are quoted from memory of
    the paper, whose text could not be opened here. Public summaries confirm 96 + 4 and the shares of 80 and 30 %
    (one says "second last" where we have the 98th), and add that the number of iterations grows nearly in inverse
    proportion to N.

    A fit: one lognormal for all workers and steps, median 1.58 s and sigma 0.107. It gives means of 1.37 s (10th)
    and 1.81 s (90th), 83 % and 24 %. b was not used for the fit. The paper's own last gradients come later than
    these: real stragglers have a heavier tail, and are not independent.

    Args:
        seed: another seed, other luck. Default: 0.

    Returns:
        Lognormal: seconds of a worker's step.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            draw = ddl.simulate.chen_2016()
            steps = [sorted(draw(worker, step) for worker in range(100)) for step in range(200)]
            assert 0.7 < sum(times[97] < 2 for times in steps) / 200 < 0.95
    """
    return Lognormal(median=1.58, sigma=0.107, seed=seed)


def parameter_server(
    n_workers: int,
    seconds: float | Sequence[float] | Callable[[int, int], float],
    n_updates: int,
    mode: str = "sync",
    staleness: int | None = None,
    backup: int = 0,
    server_seconds: float = 0.0,
) -> ServerRun:
    """Workers pull, compute and push, and the server updates: by ``ddl.ParameterServer``'s rules.

    - "sync": an update when all workers' gradients of this version are in; they wait for it.
    - "async": every gradient is an update, at once; the worker pulls and goes on.
    - "bounded": as async, but a worker more than ``staleness`` steps ahead of the slowest waits.
    - "backup": an update when ``n_workers - backup`` gradients of this version are in. Who is late finishes, is
      dropped, and pulls the newest weights, as in Chen et al. 2016, section 3.

    Args:
        n_workers: all workers, backups included: N + b.
        seconds: what a gradient takes: one number, one a worker, or a function of worker and step, such as
            :class:`Lognormal`.
        n_updates: when to stop.
        mode: "sync" (default), "async", "bounded" or "backup".
        staleness: s, for "bounded".
        backup: b, for "backup". Default: 0.
        server_seconds: pull, push and update of one gradient; the server takes one at a time. Default: 0.

    Returns:
        ServerRun: the time of each update, and what became of every gradient.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            two = dict(n_workers=2, seconds=[1.0, 3.0], n_updates=4)
            assert ddl.simulate.parameter_server(**two).times == [3, 6, 9, 12]
            stale = ddl.simulate.parameter_server(**two, mode="async")
            assert stale.times == [1, 2, 3, 3] and [g.staleness for g in stale.updates] == [0, 0, 0, 3]
    """
    at_least(1, n_workers=n_workers)
    if mode not in ("sync", "async", "bounded", "backup"):
        raise ValueError(f"mode should be 'sync', 'async', 'bounded' or 'backup', but given {mode!r}")
    if (mode == "bounded") != (staleness is not None) or (staleness is not None and staleness < 0):
        raise ValueError(
            f"staleness={staleness} does not suit mode={mode!r}: 'bounded' needs 0 or more, others None"
        )
    if not 0 <= backup < n_workers or (backup and mode != "backup"):
        raise ValueError(f"backup={backup} does not suit mode={mode!r} with {n_workers} workers")
    at_least(0, n_updates=n_updates, server_seconds=server_seconds)
    fixed = [] if callable(seconds) else _each(n_workers, seconds=seconds)
    take = seconds if callable(seconds) else lambda worker, step: fixed[worker]
    together = mode in ("sync", "backup")
    needed = n_workers - backup
    version, server_free = 0, 0.0
    steps = [0] * n_workers  # pushes of each worker
    pulls: list[tuple] = [()] * n_workers  # (version, when, seconds waited)
    heap: list[tuple[float, int]] = []  # (when a gradient comes in, of whom)
    waiting: dict[int, float] = {}  # who would pull, since when
    pending: list[tuple] = []
    times, updates, dropped = [], [], []

    def pull(worker: int, now: float, since: float) -> None:
        pulls[worker] = (version, now, now - since)
        heapq.heappush(heap, (now + take(worker, steps[worker]), worker))

    for worker in range(n_workers):
        pull(worker, 0.0, 0.0)
    while len(times) < n_updates:
        pushed, worker = heapq.heappop(heap)
        now = server_free = max(pushed, server_free) + server_seconds
        pulled, pulled_at, waited = pulls[worker]
        step = steps[worker]
        steps[worker] += 1
        if together and pulled < version:
            dropped.append(Gradient(worker, step, pulled, version, pulled_at, pushed, now, waited))
            pull(worker, now, now)
            continue
        pending.append((worker, step, pulled, pulled_at, pushed, waited))
        waiting[worker] = now
        if together and len(pending) < needed:
            continue
        for one, its_step, its_pull, its_pull_at, its_push, its_wait in pending:
            updates.append(Gradient(one, its_step, its_pull, version, its_pull_at, its_push, now, its_wait))
        pending.clear()
        times.append(now)
        version += 1
        slowest = min(steps) if mode == "bounded" else 0
        for one in [one for one in waiting if mode != "bounded" or steps[one] - slowest <= staleness]:
            pull(one, now, waiting.pop(one))
    return ServerRun(times[-1] if times else 0.0, times, updates, dropped)
