"""The checks of chapter 17: which heads a rank needs, and a smoothed loss of logits that are cut."""

import torch
import torch.nn.functional as F

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab.bytes import count_bytes

WAIT_SECONDS = 60  # what is right takes well under one; a loaded machine may start slowly
BOUND = 1e-10  # float64; what is wrong here is wrong by far more


@exercise
def heads_of_rank(function):
    """Blocks of query heads, and the fewest key heads that they read."""
    for n_heads, n_kv_heads, tp_size in ((8, 8, 4), (8, 4, 2), (8, 2, 4), (6, 2, 3), (32, 8, 16)):
        case = f"{n_heads} query heads, {n_kv_heads} key heads, tp {tp_size}"
        group, each = n_heads // n_kv_heads, n_heads // tp_size
        found = [function(n_heads, n_kv_heads, tp_size, rank) for rank in range(tp_size)]
        for rank, answer in enumerate(found):
            two = isinstance(answer, tuple | list) and len(answer) == 2
            if not two or any(isinstance(part, int) for part in answer):
                raise Hint(f"{case}: rank {rank} should return two lists, of query heads and of key heads")
            queries, keys = map(list, answer)
            needed = sorted({query // group for query in queries})
            right = list(range(rank * each, (rank + 1) * each))
            if queries == list(range(rank, n_heads, tp_size)) != right:
                raise Hint(
                    f"{case}: you deal the query heads out one by one; Column cuts the weight into blocks of rows, "
                    "so a rank's heads are neighbours"
                )
            if queries != right:
                raise Hint(f"{case}: rank {rank} computes {each} query heads, {right}; yours are {queries}")
            if not keys:
                raise Hint(
                    f"{case}: rank {rank} has no key head; where there are fewer than ranks, some have to share"
                )
            if missing := [head for head in needed if head not in keys]:
                raise Hint(
                    f"{case}: query heads {queries} of rank {rank} read key heads {needed}; {missing} are missing"
                )
            if keys != needed:
                raise Hint(
                    f"{case}: right, but rank {rank} keeps key heads {keys}; its queries read only {needed}"
                )
    return "every query head has one rank, and every rank the key heads that it reads, no more"


@exercise
def smoothed_loss(function):
    """Four numbers a row may travel: F.cross_entropy's value and gradient, with label smoothing."""
    for n_ranks, rows, n_classes, smoothing, shift in ((4, 6, 65, 0.1, 0.0), (2, 3, 10, 0.3, 1000.0)):
        case = f"{n_ranks} ranks, {rows} rows, {n_classes} classes, smoothing {smoothing:g}"
        numbers = torch.Generator().manual_seed(n_ranks)
        logits = 3 * torch.randn(rows, n_classes, generator=numbers, dtype=torch.float64) + shift
        target = torch.randint(n_classes, (rows,), generator=numbers)
        target[:2] = torch.tensor([0, n_classes - 1])  # of the first rank and of the last
        parts = logits.chunk(n_ranks, 1)
        firsts = [sum(part.shape[1] for part in parts[:rank]) for rank in range(n_ranks)]
        args = [
            (part, target, first, n_classes, smoothing) for part, first in zip(parts, firsts, strict=True)
        ]
        ranks = on_ranks(n_ranks, _on_a_rank, function, args, timeout=WAIT_SECONDS)
        whole = logits.clone().requires_grad_()
        right = F.cross_entropy(whole, target, label_smoothing=smoothing)
        right.backward()
        for rank, (answer, _) in enumerate(ranks):
            if not isinstance(answer, tuple | list) or len(answer) != 2:
                raise Hint(f"{case}: rank {rank} should return the loss and the gradient of its logits")
            loss, gradient = answer
            if not isinstance(loss, torch.Tensor) or loss.shape != () or loss.dtype != torch.float64:
                raise Hint(
                    f"{case}: the loss of rank {rank} should be one float64 number, the mean over rows"
                )
            if not isinstance(gradient, torch.Tensor) or gradient.shape != parts[rank].shape:
                raise Hint(
                    f"{case}: the gradient of rank {rank} should have the shape of its logits, "
                    f"{tuple(parts[rank].shape)}"
                )
            if not bool(loss.isfinite()):
                raise Hint(
                    f"{case}: logits near {shift:g}, and the loss of rank {rank} is {loss.item()}: subtract the "
                    "largest of the whole row before you exponentiate"
                )
            own_mean = _smoothed(logits, target, smoothing, parts[rank].mean(1))
            own_share = _smoothed(logits, target, smoothing, parts[rank].sum(1) / n_classes)
            if _same(loss, F.cross_entropy(logits, target)):
                raise Hint(f"{case}: rank {rank} returns the loss without smoothing")
            if _same(loss, own_mean) or _same(loss, own_share):
                raise Hint(
                    f"{case}: rank {rank} smooths over its own {parts[rank].shape[1]} classes; the mean is over all "
                    f"{n_classes}"
                )
            if not _same(loss, right.detach()):
                raise Hint(f"{case}: the loss of rank {rank} is not that of F.cross_entropy")
        for rank, ((_, gradient), expected) in enumerate(
            zip([answer for answer, _ in ranks], whole.grad.chunk(n_ranks, 1), strict=True)
        ):
            if _same(gradient, rows * expected):
                raise Hint(
                    f"{case}: the gradient of rank {rank} is {rows} times too large: the loss is a mean over rows"
                )
            unsmoothed = _gradient_without_smoothing(logits, target).chunk(n_ranks, 1)[rank]
            if _same(gradient, unsmoothed):
                raise Hint(
                    f"{case}: the loss is right, but the gradient of rank {rank} is that without smoothing"
                )
            if not _same(gradient, expected):
                raise Hint(
                    f"{case}: the loss is right, but the gradient of rank {rank} is not that of F.cross_entropy"
                )
        for rank, (_, put_in) in enumerate(ranks):
            if put_in > 4 * rows * 8:
                raise Hint(
                    f"{case}: right, but rank {rank} puts in {put_in} bytes; four numbers a row are {4 * rows * 8}"
                )
    return "value and gradient of F.cross_entropy with smoothing, for four numbers a row"


def _on_a_rank(local_rank, function, args):
    with count_bytes() as traffic:
        answer = function(*args[local_rank])
    return answer, traffic.put_in


def _smoothed(logits, target, smoothing, mean):
    score = logits.gather(1, target[:, None])[:, 0]
    return (logits.logsumexp(1) - (1 - smoothing) * score - smoothing * mean).mean()


def _gradient_without_smoothing(logits, target):
    logits = logits.clone().requires_grad_()
    F.cross_entropy(logits, target).backward()
    return logits.grad


def _same(found, right):
    return found.shape == right.shape and bool((found - right).abs().max() <= BOUND * (1 + right.abs().max()))
