"""The checks of chapter 17: a smoothed loss of logits that are cut, and dropout as one process draws it."""

import torch
import torch.nn.functional as F

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import counted_on_ranks

WAIT_SECONDS = 60  # what is right takes well under one; a loaded machine may start slowly
BOUND = 1e-10  # float64; what is wrong here is wrong by far more


@exercise(
    cases=((4, 6, 65, 0.1, 0.0), (2, 3, 10, 0.3, 1000.0)),
    about="{n_ranks} ranks, {rows} rows, {n_classes} classes, smoothing {smoothing:g}",
    right="value and gradient of F.cross_entropy with smoothing, for four numbers a row",
)
def smoothed_loss(function, n_ranks, rows, n_classes, smoothing, shift):
    """Four numbers a row may travel: F.cross_entropy's value and gradient, with label smoothing."""
    numbers = torch.Generator().manual_seed(n_ranks)
    logits = 3 * torch.randn(rows, n_classes, generator=numbers, dtype=torch.float64) + shift
    target = torch.randint(n_classes, (rows,), generator=numbers)
    parts = logits.chunk(n_ranks, 1)
    firsts = [sum(part.shape[1] for part in parts[:rank]) for rank in range(n_ranks)]
    target[:3] = torch.tensor([0, n_classes - 1, firsts[1]])  # the first one, the last one, and where ranks meet
    args = [(part, target, first, n_classes, smoothing) for part, first in zip(parts, firsts, strict=True)]
    ranks = counted_on_ranks(function, args, WAIT_SECONDS)
    whole = logits.clone().requires_grad_()
    right = F.cross_entropy(whole, target, label_smoothing=smoothing)
    right.backward()
    for rank, (answer, _) in enumerate(ranks):
        loss, _ = _loss_and_gradient(rank, answer, parts[rank], shift)
        own_mean = _smoothed(logits, target, smoothing, parts[rank].mean(1))
        own_share = _smoothed(logits, target, smoothing, parts[rank].sum(1) / n_classes)
        if _same(loss, F.cross_entropy(logits, target)):
            raise Hint(f"rank {rank} returns the loss without smoothing")
        if _same(loss, own_mean) or _same(loss, own_share):
            raise Hint(
                f"rank {rank} smooths over its own {parts[rank].shape[1]} classes; the mean is over all {n_classes}"
            )
        if not _same(loss, right.detach()):
            raise Hint(f"the loss of rank {rank} is not that of F.cross_entropy")
    for rank, expected in enumerate(whole.grad.chunk(n_ranks, 1)):
        _, gradient = ranks[rank][0]
        if _same(gradient, rows * expected):
            raise Hint(f"the gradient of rank {rank} is {rows} times too large: the loss is a mean over rows")
        unsmoothed = _gradient_without_smoothing(logits, target).chunk(n_ranks, 1)[rank]
        if _same(gradient, unsmoothed):
            raise Hint(f"the loss is right, but the gradient of rank {rank} is that without smoothing")
        if not _same(gradient, expected):
            raise Hint(f"the loss is right, but the gradient of rank {rank} is not that of F.cross_entropy")
    for rank, (_, traffic) in enumerate(ranks):
        if traffic.put_in > 4 * rows * 8:
            raise Hint(f"right, but rank {rank} puts in {traffic.put_in} bytes; four numbers a row are {4 * rows * 8}")


@exercise(
    cases=((4, 5, 8, 0.25), (2, 3, 6, 0.5)),
    about="{n_ranks} ranks, x of {tokens} × {n_features}, p {p:g}",
    right="each rank keeps what one process keeps, and nothing is sent",
)
def cut_dropout(function, n_ranks, tokens, n_features, p):
    """The mask of F.dropout in one process, and its stream afterwards, without a byte sent."""
    numbers = torch.Generator().manual_seed(n_ranks)
    x = torch.randn(tokens, n_features, generator=numbers, dtype=torch.float64)
    parts = x.chunk(n_ranks, 1)
    right, following = _drawn(F.dropout, x, p)
    args = [(function, part, p, n_features) for part in parts]
    for rank, ((y, after), traffic) in enumerate(counted_on_ranks(_drawn, args, WAIT_SECONDS)):
        part, expected = parts[rank], right.chunk(n_ranks, 1)[rank]
        if not isinstance(y, torch.Tensor) or y.shape != part.shape or y.dtype != torch.float64:
            raise Hint(f"rank {rank} should return a float64 tensor of shape {tuple(part.shape)}")
        if _same(y, _drawn(F.dropout, part, p)[0]) and not _same(y, expected):
            raise Hint(f"rank {rank} draws for its own features alone, so all ranks drop at the same places")
        if _same(y, (right.chunk(n_ranks, 1)[rank] != 0) * part):
            raise Hint("the mask is right, but what is kept is not divided by 1 − p")
        if not _same(y, expected):
            raise Hint(f"rank {rank} does not keep what one process keeps of its features")
        if after != following:
            raise Hint(
                f"right, but the next number of rank {rank} is not that of one process: leave the stream "
                "as it leaves it"
            )
        if traffic.put_in:
            raise Hint(f"right, but rank {rank} puts in {traffic.put_in} bytes; nothing has to be sent")


def _loss_and_gradient(rank, answer, part, shift):
    """What a rank has returned, if these are a finite number and a gradient of the shape of its logits."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Hint(f"rank {rank} should return the loss and the gradient of its logits")
    loss, gradient = answer
    if not isinstance(loss, torch.Tensor) or loss.shape != () or loss.dtype != torch.float64:
        raise Hint(f"the loss of rank {rank} should be one float64 number, the mean over rows")
    if not isinstance(gradient, torch.Tensor) or gradient.shape != part.shape:
        raise Hint(f"the gradient of rank {rank} should have the shape of its logits, {tuple(part.shape)}")
    if not bool(loss.isfinite()):
        raise Hint(
            f"logits near {shift:g}, and the loss of rank {rank} is {loss.item()}: subtract the "
            "largest of the whole row before you exponentiate"
        )
    return loss, gradient


def _drawn(function, x, *args):
    """What a function makes of x from a stream with a certain seed, and the stream's next number."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return function(x, *args), torch.rand(()).item()


def _smoothed(logits, target, smoothing, mean):
    score = logits.gather(1, target[:, None])[:, 0]
    return (logits.logsumexp(1) - (1 - smoothing) * score - smoothing * mean).mean()


def _gradient_without_smoothing(logits, target):
    logits = logits.clone().requires_grad_()
    F.cross_entropy(logits, target).backward()
    return logits.grad


def _same(found, right):
    return found.shape == right.shape and bool((found - right).abs().max() <= BOUND * (1 + right.abs().max()))
