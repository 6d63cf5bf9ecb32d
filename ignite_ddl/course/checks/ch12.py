"""The checks of chapter 12: a server with momentum, and a step in which every worker is a server."""

import torch
import torch.distributed as dist

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import counted_on_ranks, try_on_ranks

WAIT_SECONDS = 20  # what is right takes well under one
RATE = 0.5
_CURE = "in each step the server sends the weights to every worker once, and receives an answer from each"
N_STEPS, LENGTH = 3, 4


@exercise(
    cases=(([1, 5, 2], 0.5), ([4, 0], 0.9), ([3, 3, 1], 0.0)),
    about="workers with {n_rows} rows, momentum {momentum}",
    right="one process's weights, whatever rows the workers have",
)
def serve_with_momentum(function, n_rows, momentum):
    """One process's weights, from workers with unequal rows."""
    ranks = try_on_ranks(1 + len(n_rows), _serve_or_work, function, n_rows, momentum, timeout=WAIT_SECONDS, cure=_CURE)
    found = ranks[0]
    if not isinstance(found, torch.Tensor) or found.shape != (LENGTH,) or found.dtype != torch.float64:
        raise Hint(f"return the weights, float64, of shape ({LENGTH},)")
    right = _of_one_process(n_rows, momentum)
    for worker, weights in enumerate(ranks[1:], 1):
        for step in range(N_STEPS):
            if not torch.equal(weights[step], ranks[1][step]):
                raise Hint(
                    f"in step {step} workers 1 and {worker} got different weights; update when all answers are in"
                )
    if _near(found, right):
        return
    for hint, wrong in (
        ("you return the weights before the last update", _of_one_process(n_rows, momentum, N_STEPS - 1)),
        ("each gradient weighs alike; it should weigh as many rows as it is the mean of", "mean"),
        ("you add gradients up and do not divide by the number of rows", "sum"),
        ("the velocity is forgotten after each step", "forget"),
    ):
        wrong = _of_one_process(n_rows, momentum, way=wrong) if isinstance(wrong, str) else wrong
        if _near(found, wrong):
            raise Hint(hint)
    numbers = [[round(value, 3) for value in weights.tolist()] for weights in (right, found)]
    raise Hint(f"the weights should be {numbers[0]}, but are {numbers[1]}")


def _serve_or_work(local_rank, function, n_rows, momentum):
    workers, weights, got = list(range(1, 1 + len(n_rows))), _start(LENGTH), []
    if local_rank == 0:
        return function(weights.clone(), workers, N_STEPS, RATE, momentum)
    mine = n_rows[local_rank - 1]
    for _ in range(N_STEPS):
        dist.recv(weights, 0)
        got.append(weights.clone())
        gradient = _gradient_at(weights, local_rank) if mine else torch.zeros_like(weights)
        dist.send(torch.cat([gradient, torch.tensor([mine], dtype=torch.float64)]), 0)
    return got


def _gradient_at(weights, worker):
    return 0.1 * weights + _gradient(worker, LENGTH)


def _of_one_process(n_rows, momentum, n_steps=None, way="right"):
    weights, velocity = _start(LENGTH), torch.zeros(LENGTH, dtype=torch.float64)
    shares = torch.tensor(n_rows, dtype=torch.float64)
    if way != "sum":
        shares = (shares > 0).double() / len(n_rows) if way == "mean" else shares / shares.sum()
    for _ in range(N_STEPS if n_steps is None else n_steps):
        gradient = sum(share * _gradient_at(weights, 1 + w) for w, share in enumerate(shares))
        velocity = (0 if way == "forget" else momentum) * velocity + gradient
        weights = weights - RATE * velocity
    return weights


@exercise(
    cases=((4, 12), (3, 6)),
    about="{n_workers} workers, {length} weights",
    right="one process's step, and every worker sent what a ring's rank sends",
)
def everyone_a_server(function, n_workers, length):
    """One process's step, for as many bytes as a ring's."""
    weights, gradients = _start(length), [_gradient(rank, length) for rank in range(n_workers)]
    ranks = counted_on_ranks(function, [(weights, gradient, RATE) for gradient in gradients], WAIT_SECONDS)
    right = weights - RATE * sum(gradients) / n_workers
    summed = weights - RATE * sum(gradients)
    for rank, (found, _) in enumerate(ranks):
        if not isinstance(found, torch.Tensor) or found.shape != (length,) or found.dtype != torch.float64:
            raise Hint(f"worker {rank} should return all weights, float64, of shape ({length},)")
    for rank, (found, _) in enumerate(ranks):
        if _near(found, right):
            continue
        if _near(found, summed):
            raise Hint(f"you add gradients up, and the step is {n_workers} times too long")
        if _near(found, weights - RATE * gradients[rank]):
            raise Hint(f"worker {rank} knows only its own gradient: nobody pushed to it")
        chunks = [_near(a, b) for a, b in zip(found.chunk(n_workers), right.chunk(n_workers), strict=True)]
        wrong = chunks.index(False)
        if wrong != rank and chunks[rank]:
            raise Hint(
                f"worker {rank} has updated its own chunk, but its chunk {wrong} is not what worker "
                f"{wrong} made of it: pull it"
            )
        numbers = [
            [round(value, 3) for value in weights.chunk(n_workers)[wrong].tolist()] for weights in (right, found)
        ]
        raise Hint(f"chunk {wrong} of worker {rank} should be {numbers[0]}, but is {numbers[1]}")
    for rank, (found, _) in enumerate(ranks):
        if not torch.equal(found, ranks[0][0]):
            raise Hint(f"workers 0 and {rank} differ in the last bits: sum a chunk at one worker only")
    for rank, (_, traffic) in enumerate(ranks):
        if others := {call.op for call in traffic.calls if call.put_in} - {"send"}:
            raise Hint(f"right, but by {min(others)}; build it from single messages")
        enough = 2 * 8 * length * (n_workers - 1) // n_workers
        if traffic.put_in > enough:
            raise Hint(
                f"right, but worker {rank} sent {traffic.put_in} bytes; {n_workers - 1} chunks of gradient and "
                f"as many of weights are {enough}"
            )


def _start(length):
    return torch.arange(length, dtype=torch.float64) - 3


def _gradient(rank, length):
    generator = torch.Generator().manual_seed(rank)
    return 100 * torch.randn(length, generator=generator, dtype=torch.float64)  # no bits lost in the weights


def _near(found, right):
    return bool((found - right).abs().max() <= 1e-12)
