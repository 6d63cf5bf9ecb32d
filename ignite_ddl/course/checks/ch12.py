"""The checks of chapter 12: a model cut for several servers by bytes, and a step in which every worker is a server."""

import torch

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab.bytes import count_bytes

WAIT_SECONDS = 20  # what is right takes well under one
RATE = 0.5


@exercise
def ranges(function):
    """Every number at one server, no server with more than it must hold, in few pieces."""
    for sizes, n_servers in (
        ((7840, 10, 100, 10), 2),
        ((12, 12, 12, 12), 4),
        ((5, 1, 5), 3),
        ((3, 40, 2, 2), 5),
        ((6,), 4),
        ((2, 9, 4), 1),
    ):
        case = f"parameters of {list(sizes)} numbers, {n_servers} server{'s' * (n_servers > 1)}"
        shares = function(list(sizes), n_servers)
        if not isinstance(shares, list) or len(shares) != n_servers:
            raise Hint(f"{case}: return a list with one list for each server")
        pieces = [piece for share in shares for piece in share]
        for piece in pieces:
            if not isinstance(piece, tuple) or len(piece) != 3:
                raise Hint(f"{case}: a piece is a tuple (parameter, start, stop), not {piece!r}")
            parameter, start, stop = piece
            if not (0 <= parameter < len(sizes) and 0 <= start < stop <= sizes[parameter]):
                raise Hint(f"{case}: {piece} is no piece of a parameter, or is empty")
        for parameter, size in enumerate(sizes):
            held = sorted((start, stop) for index, start, stop in pieces if index == parameter)
            ends = [0] + [stop for _, stop in held]
            for end, start in zip(ends, [start for start, _ in held] + [size], strict=True):
                if start > end:
                    raise Hint(
                        f"{case}: no server holds numbers {end} to {start - 1} of parameter {parameter}"
                    )
                if start < end:
                    raise Hint(f"{case}: two pieces hold number {start} of parameter {parameter}")
        loads = [sum(stop - start for _, start, stop in share) for share in shares]
        least = -(-sum(sizes) // n_servers)
        if max(loads) > least:
            raise Hint(
                f"{case}: your servers hold {loads} numbers; none has to hold more than {least}, if you cut "
                "inside a parameter"
            )
        if len(pieces) > (most := len(sizes) + n_servers - 1):
            raise Hint(
                f"{case}: even, but in {len(pieces)} pieces; {n_servers - 1} cut{'s' * (n_servers != 2)} of "
                f"{len(sizes)} parameters leave {most} at most"
            )
    return "no server holds more than its share, and you cut less often than there are servers"


@exercise
def everyone_a_server(function):
    """One process's step, for as many bytes as a ring's."""
    for n_workers, length in ((4, 12), (3, 6)):
        ranks = on_ranks(n_workers, _step_on_a_rank, function, length, timeout=WAIT_SECONDS)
        case = f"{n_workers} workers, {length} weights"
        weights, gradients = _start(length), [_gradient(rank, length) for rank in range(n_workers)]
        right = weights - RATE * sum(gradients) / n_workers
        summed = weights - RATE * sum(gradients)
        for rank, (found, _) in enumerate(ranks):
            if (
                not isinstance(found, torch.Tensor)
                or found.shape != (length,)
                or found.dtype != torch.float64
            ):
                raise Hint(f"{case}: worker {rank} should return all weights, float64, of shape ({length},)")
        for rank, (found, _) in enumerate(ranks):
            if _near(found, right):
                continue
            if _near(found, summed):
                raise Hint(f"{case}: you add gradients up, and the step is {n_workers} times too long")
            if _near(found, weights - RATE * gradients[rank]):
                raise Hint(f"{case}: worker {rank} knows only its own gradient: nobody pushed to it")
            chunks = [
                _near(a, b) for a, b in zip(found.chunk(n_workers), right.chunk(n_workers), strict=True)
            ]
            wrong = chunks.index(False)
            if wrong != rank and chunks[rank]:
                raise Hint(
                    f"{case}: worker {rank} has updated its own chunk, but its chunk {wrong} is not what worker "
                    f"{wrong} made of it: pull it"
                )
            numbers = [
                [round(value, 3) for value in weights.chunk(n_workers)[wrong].tolist()]
                for weights in (right, found)
            ]
            raise Hint(f"{case}: chunk {wrong} of worker {rank} should be {numbers[0]}, but is {numbers[1]}")
        for rank, (found, _) in enumerate(ranks):
            if not torch.equal(found, ranks[0][0]):
                raise Hint(
                    f"{case}: workers 0 and {rank} differ in the last bits: sum a chunk at one worker only"
                )
        for rank, (_, sent) in enumerate(ranks):
            if others := {op for op, _ in sent} - {"send"}:
                raise Hint(f"{case}: right, but by {min(others)}; build it from single messages")
            n_bytes, enough = sum(size for _, size in sent), 2 * 8 * length * (n_workers - 1) // n_workers
            if n_bytes > enough:
                raise Hint(
                    f"{case}: right, but worker {rank} sent {n_bytes} bytes; {n_workers - 1} chunks of gradient and "
                    f"as many of weights are {enough}"
                )
    return "one process's step, and every worker sent what a ring's rank sends"


def _start(length):
    return torch.arange(length, dtype=torch.float64) - 3


def _gradient(rank, length):
    generator = torch.Generator().manual_seed(rank)
    return 100 * torch.randn(length, generator=generator, dtype=torch.float64)  # no bits lost in the weights


def _step_on_a_rank(local_rank, function, length):
    with count_bytes() as traffic:
        found = function(_start(length), _gradient(local_rank, length), RATE)
    return found, [(call.op, call.put_in) for call in traffic.calls if call.put_in]


def _near(found, right):
    return bool((found - right).abs().max() <= 1e-12)
