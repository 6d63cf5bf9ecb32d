"""Collectives and steps of data-parallel training, simulated message by message; ``cost`` has their closed forms."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from ignite_ddl.arguments import a, takes
from ignite_ddl.lab.cost import FITS, Link, when_full
from ignite_ddl.lab.simulate.world import ONE_OR_EACH, Event, Rank, Simulation, number_for_each, run

__all__ = [
    "all_reduce_naive",
    "all_reduce_ring",
    "all_reduce_tree",
    "ddp_step",
    "master_step",
    "parameter_server_step",
    "ring",
]


_FITS = FITS | dict.fromkeys(("enter", "slowdown", "compute_seconds"), ONE_OR_EACH)


@takes(FITS, rank=a("a simulate.Rank", Rank), chunks=a("a list", list))
def ring(rank: Rank, chunks: list, n_bytes: float, tag: Any = None) -> Generator:
    """A ring all-reduce inside a program: ``yield from ring(rank, chunks, n_bytes)``.

    Args:
        rank: the program's rank.
        chunks: one per rank, of any type that can be added; replaced by the sums.
        n_bytes: size of all chunks together.
        tag: distinguishes its messages from others. Default None.

    Returns:
        Generator: to ``yield from``.
    """
    n, right, left = rank.n_ranks, (rank.number + 1) % rank.n_ranks, (rank.number - 1) % rank.n_ranks
    if len(chunks) != n:
        raise ValueError(f"chunks should have one for each of {n} ranks, but has {len(chunks)}")
    for step in range(2 * (n - 1)):
        adds = step < n - 1  # reduce-scatter: send the partial sum; all-gather: send the complete chunk
        mine = (rank.number - step + (0 if adds else n)) % n
        rank.send(right, n_bytes / n, chunks[mine], tag)
        got = yield rank.recv(left, tag)
        chunks[mine - 1] = chunks[mine - 1] + got if adds else got


def _entered(
    program: Callable[[Rank], Generator], n_ranks: int, link: Link, enter: Sequence[float] | None
) -> Simulation:
    """Runs a program that each rank enters at its own time."""
    entered = number_for_each(n_ranks, enter=enter)

    def late(rank: Rank) -> Generator:
        yield rank.compute(entered[rank.number])
        return (yield from program(rank))

    return run(late, n_ranks, link)


@takes(_FITS)
def all_reduce_naive(n_ranks: int, n_bytes: float, link: Link, enter: Sequence[float] | None = None) -> Simulation:
    """Each rank sends its whole buffer to every other rank; see ``cost.all_reduce_naive``.

    Args:
        n_ranks: size of the world.
        n_bytes: size of one rank's buffer.
        link: the network.
        enter: when each rank comes to the collective, in seconds. Default: all at 0.

    Returns:
        Simulation: ``returned`` holds each rank's sum of 2 ** rank: whose buffers are in it, each once.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost, simulate

            four = simulate.all_reduce_naive(4, 48, cost.Link(latency=0, bandwidth=1))
            assert four.bytes == [144] * 4 and four.returned == [0b1111] * 4
    """

    def program(rank: Rank) -> Generator:
        mine = total = 1 << rank.number
        for step in range(1, rank.n_ranks):
            rank.send((rank.number + step) % rank.n_ranks, n_bytes, mine)
            total += yield rank.recv((rank.number - step) % rank.n_ranks)
        return total

    return _entered(program, n_ranks, link, enter)


@takes(_FITS)
def all_reduce_tree(n_ranks: int, n_bytes: float, link: Link, enter: Sequence[float] | None = None) -> Simulation:
    """A reduction up a binomial tree and a broadcast down it; see ``cost.all_reduce_tree``.

    Args:
        n_ranks: size of the world.
        n_bytes: size of one rank's buffer.
        link: the network.
        enter: when each rank comes to the collective, in seconds. Default: all at 0.

    Returns:
        Simulation: ``returned`` holds each rank's sum of 2 ** rank: whose buffers are in it, each once.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost, simulate

            assert simulate.all_reduce_tree(8, 1, cost.Link(latency=1, bandwidth=1)).seconds == 2 * 3 * 2
    """

    def program(rank: Rank) -> Generator:
        total, bit = 1 << rank.number, 1
        while bit < n_ranks and not rank.number & bit:
            if rank.number + bit < n_ranks:
                total += yield rank.recv(rank.number + bit)
            bit *= 2
        if rank.number:
            parent = rank.number - bit  # bit is the lowest set bit of rank.number
            rank.send(parent, n_bytes, total)
            total = yield rank.recv(parent)
        sent = []
        while bit > 1:
            bit //= 2
            if rank.number + bit < n_ranks:
                sent.append(rank.send(rank.number + bit, n_bytes, total))
        if sent:
            yield sent[-1]  # messages arrive in order
        return total

    return _entered(program, n_ranks, link, enter)


@takes(_FITS)
def all_reduce_ring(n_ranks: int, n_bytes: float, link: Link, enter: Sequence[float] | None = None) -> Simulation:
    """A ring reduce-scatter and a ring all-gather; see ``cost.all_reduce_ring``.

    Args:
        n_ranks: size of the world.
        n_bytes: size of one rank's buffer.
        link: the network.
        enter: when each rank comes to the collective, in seconds. Default: all at 0.

    Returns:
        Simulation: ``returned`` holds each rank's chunks, each the sum of 2 ** rank over the ranks.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost, simulate

            four = simulate.all_reduce_ring(4, 48, cost.Link(latency=0, bandwidth=1))
            assert four.bytes == [72] * 4 and four.returned == [[0b1111] * 4] * 4
    """

    def program(rank: Rank) -> Generator:
        chunks = [1 << rank.number] * n_ranks
        yield from ring(rank, chunks, n_bytes)
        return chunks

    return _entered(program, n_ranks, link, enter)


@takes(_FITS)
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
    """A step of the master scheme; see ``cost.master_step``.

    A message is sent only once its receiver waits for it (rendezvous).

    Args:
        n_ranks: size of the world, the master (rank 0) included.
        weight_bytes: size of all weights.
        input_bytes: size of the whole batch.
        output_bytes: size of the outputs of the whole batch.
        link: the network.
        forward_seconds: forward of the whole batch on one rank. Default: 0.
        backward_seconds: backward of the whole batch on one rank. Default: 0.
        loss_seconds: the loss, at the master. Default: 0.

    Returns:
        Simulation: rank 0 is the master.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost, simulate

            step = 4, 1000, 80, 40, cost.Link(latency=0, bandwidth=1)
            assert simulate.master_step(*step).seconds == cost.master_step(*step).seconds
    """
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


@takes(_FITS)
def parameter_server_step(
    n_workers: int, weight_bytes: float, link: Link, n_servers: int = 1, compute_seconds: float | Sequence[float] = 0.0
) -> Simulation:
    """A synchronous step with parameter servers; see ``cost.parameter_server_step``.

    Args:
        n_workers: number of workers, ranks 0 to n - 1.
        weight_bytes: size of all weights.
        link: the network.
        n_servers: number of servers that share the weights, ranks n and up. Default: 1.
        compute_seconds: forward and backward, one number or one per worker. Default: 0.

    Returns:
        Simulation: workers first, then servers.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost, simulate

            link = cost.Link(latency=0, bandwidth=1)
            assert simulate.parameter_server_step(8, 100, link, n_servers=4).seconds == 400
    """
    computes = number_for_each(n_workers, compute_seconds=compute_seconds)
    part = weight_bytes / n_servers
    pulled: list[int] = []
    all_pulled = Event()

    # Each begins with a different server or worker, so that no port is idle while another has a queue.
    def worker(rank: Rank) -> Generator:
        for server in range(n_servers):
            yield rank.recv(n_workers + server)
        pulled.append(rank.number)
        if len(pulled) == n_workers:
            rank.fire(all_pulled)
        yield all_pulled  # the closed form has no overlap of pull and compute
        yield rank.compute(computes[rank.number])
        servers = [n_workers + (rank.number + turn) % n_servers for turn in range(n_servers)]
        yield [rank.send(server, part) for server in servers][-1]  # messages arrive in order

    def server(rank: Rank) -> Generator:
        for turn in range(n_workers):
            rank.send((rank.number - n_workers + turn) % n_workers, part)
        for number in range(n_workers):
            yield rank.recv(number)

    return run(lambda rank: worker(rank) if rank.number < n_workers else server(rank), n_workers + n_servers, link)


@takes(_FITS)
def ddp_step(
    n_ranks: int,
    bucket_bytes: Sequence[float],
    link: Link,
    forward_seconds: float = 0.0,
    backward_seconds: float = 0.0,
    ready: Sequence[float] | None = None,
    slowdown: Sequence[float] | None = None,
) -> Simulation:
    """A step of DDP, with ring all-reduces of the buckets during backward; see ``cost.ddp_step``.

    Args:
        n_ranks: size of the world.
        bucket_bytes: the buckets in the order in which backward fills them.
        link: the network.
        forward_seconds: one rank's forward. Default: 0.
        backward_seconds: one rank's backward. Default: 0.
        ready: when each bucket is full, in seconds from the start of backward, in ascending order.
            Default: in proportion to the bytes.
        slowdown: factors by which each rank's compute takes longer. Default: 1 for all.

    Returns:
        Simulation: ``in_flight`` shows all communication, ``records`` the part that does not overlap with backward.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost, simulate

            step = 2, [4, 4], cost.Link(latency=0, bandwidth=1), 5, 10
            assert simulate.ddp_step(*step).seconds == cost.ddp_step(*step).seconds == 19
    """
    ready = when_full(bucket_bytes, backward_seconds, ready)
    slower = number_for_each(n_ranks, slowdown=1.0 if slowdown is None else slowdown)

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
