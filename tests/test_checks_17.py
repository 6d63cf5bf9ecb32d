"""The exercises of chapter 17: a stub does not pass, the solution does, each tempting wrong answer gets its hint."""

import ignite.distributed as idist
import pytest
import torch
from checking import said, stub, wrong

from ignite_ddl.course.checks import ch17 as checks

# --- heads ----------------------------------------------------------------------------------------------


def heads(n_heads, n_kv_heads, tp_size, rank):
    each, group = n_heads // tp_size, n_heads // n_kv_heads
    queries = list(range(rank * each, (rank + 1) * each))
    return queries, sorted({query // group for query in queries})


def dealt_out(n_heads, n_kv_heads, tp_size, rank):
    return list(range(rank, n_heads, tp_size)), list(range(rank, n_kv_heads, tp_size))


def cut_alike(n_heads, n_kv_heads, tp_size, rank):
    each = n_kv_heads // tp_size
    return heads(n_heads, n_kv_heads, tp_size, rank)[0], list(range(rank * each, (rank + 1) * each))


def one_key_head(n_heads, n_kv_heads, tp_size, rank):
    queries, keys = heads(n_heads, n_kv_heads, tp_size, rank)
    return queries, keys[:1]


def all_key_heads(n_heads, n_kv_heads, tp_size, rank):
    return heads(n_heads, n_kv_heads, tp_size, rank)[0], list(range(n_kv_heads))


def blocks_of_one(n_heads, n_kv_heads, tp_size, rank):
    return [rank], [rank * n_kv_heads // n_heads]


def test_heads_of_a_rank(capsys):
    assert checks.heads_of_rank(heads)
    assert (
        said(capsys)
        == "right: every query head has one rank, and every rank the key heads that it reads, no more"
    )


def test_ranges_will_do(capsys):
    def as_ranges(*args):
        queries, keys = heads(*args)
        return range(queries[0], queries[-1] + 1), range(keys[0], keys[-1] + 1)

    assert checks.heads_of_rank(as_ranges)


WRONG_HEADS = {
    "write the body": stub,
    "should return two lists": lambda *args: heads(*args)[0],
    "you deal the query heads out one by one": dealt_out,
    "rank 0 computes 2 query heads, [0, 1]; yours are [0]": blocks_of_one,
    "rank 0 has no key head; where there are fewer than ranks, some have to share": cut_alike,
    "query heads [0, 1] of rank 0 read key heads [0, 1]; [1] are missing": one_key_head,
    "rank 0 keeps key heads [0, 1, 2, 3, 4, 5, 6, 7]; its queries read only [0, 1]": all_key_heads,
}


@pytest.mark.parametrize("hint", WRONG_HEADS)
def test_wrong_heads_get_their_hint(hint, capsys):
    wrong(checks.heads_of_rank, WRONG_HEADS[hint], hint, capsys)


# --- a smoothed loss ------------------------------------------------------------------------------------


def loss_by(loss_smoothing=None, gradient_smoothing=None, mean=None, shared=True, rows=None):
    """The solution, with what can go wrong in it as arguments; None is right."""

    def smoothed_loss(logits, target, first, n_words, smoothing):
        largest = logits.max(dim=1).values
        largest = idist.all_reduce(largest, op="MAX") if shared else torch.zeros_like(largest)
        exponentials = (logits - largest[:, None]).exp()
        total = idist.all_reduce(exponentials.sum(dim=1))
        here = ((target >= first) & (target < first + logits.shape[1]))[:, None].double()
        place = torch.where(here[:, 0] > 0, target - first, 0)[:, None]
        score = idist.all_reduce(logits.gather(1, place)[:, 0] * here[:, 0])
        share = logits.sum(dim=1) / n_words
        average = idist.all_reduce(share) if mean is None else mean(logits, n_words)
        s = smoothing if loss_smoothing is None else loss_smoothing
        loss = (total.log() + largest - (1 - s) * score - s * average).mean()
        s = smoothing if gradient_smoothing is None else gradient_smoothing
        gradient = exponentials / total[:, None] - s / n_words
        gradient.scatter_add_(1, place, -(1 - s) * here)
        return loss, gradient / (rows or len(target))

    return smoothed_loss


def gathers(logits, target, first, n_words, smoothing):
    found = loss_by()(logits, target, first, n_words, smoothing)
    padded = torch.zeros(len(target), n_words, dtype=torch.float64)
    padded[:, first : first + logits.shape[1]] = logits
    idist.all_reduce(padded)
    return found


def without_one_at_the_target(*args):
    loss, gradient = loss_by()(*args)
    return loss, gradient.abs()


def test_lists_will_do(capsys):
    assert checks.heads_of_rank(lambda *args: list(heads(*args)))
    said(capsys)
    assert checks.smoothed_loss(lambda *args: list(loss_by()(*args)))
    assert said(capsys).startswith("right: ")


def test_a_smoothed_loss(capsys):
    assert checks.smoothed_loss(loss_by())
    assert (
        said(capsys) == "right: value and gradient of F.cross_entropy with smoothing, for four numbers a row"
    )


WRONG_LOSSES = {
    "write the body": stub,
    "rank 0 should return the loss and the gradient": lambda *args: loss_by()(*args)[0],
    "the loss of rank 0 should be one float64 number": lambda *args: (loss_by()(*args)[0].item(), args[0]),
    "the gradient of rank 0 should have the shape of its logits, (6, 17)": lambda *args: (
        loss_by()(*args)[0],
        args[0][:, 1:],
    ),
    "logits near 1000, and the loss of rank 0 is inf: subtract the largest": loss_by(shared=False),
    "rank 0 returns the loss without smoothing": loss_by(loss_smoothing=0.0),
    "rank 0 smooths over its own 17 classes; the mean is over all 65": loss_by(mean=lambda z, n: z.mean(1)),
    "smooths over its own 17 classes": loss_by(mean=lambda z, n: z.sum(1) / n),
    "the loss of rank 0 is not that of F.cross_entropy": loss_by(loss_smoothing=0.2),
    "the gradient of rank 0 is 6 times too large: the loss is a mean over rows": loss_by(rows=1),
    "the loss is right, but the gradient of rank 0 is that without smoothing": loss_by(
        gradient_smoothing=0.0
    ),
    "the loss is right, but the gradient of rank 0 is not that of F.cross_entropy": without_one_at_the_target,
    "right, but rank 0 puts in 3312 bytes; four numbers a row are 192": gathers,
}


@pytest.mark.parametrize("hint", WRONG_LOSSES)
def test_a_wrong_loss_gets_its_hint(hint, capsys):
    wrong(checks.smoothed_loss, WRONG_LOSSES[hint], hint, capsys)
