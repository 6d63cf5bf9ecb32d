"""The exercises of chapter 04: what is right passes, and each natural mistake gets a hint that helps."""

import ignite.distributed as idist
import pytest
import torch
from checking import said, stub

from ignite_ddl.course.checks import ch04 as checks

# --- rows ----------------------------------------------------------------------------------------------


def batches_of(order, batch_size):
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def like_cards(order, batch_size, world_size, rank):
    return [batch[rank::world_size] for batch in batches_of(order, batch_size)]


def in_blocks(order, batch_size, world_size, rank):
    """The batch is cut into pieces of neighbours; also right."""
    dealt = []
    for batch in batches_of(order, batch_size):
        dealt.append([row for i, row in enumerate(batch) if i * world_size // len(batch) == rank])
    return dealt


def quarter_of_the_data(order, batch_size, world_size, rank):
    size = -(-len(order) // world_size)
    return batches_of(order[rank * size : (rank + 1) * size], batch_size // world_size)


def everything(order, batch_size, world_size, rank):
    return batches_of(order, batch_size)


def floor_of_the_share(order, batch_size, world_size, rank):
    share = batch_size // world_size
    return [batch[rank * share : (rank + 1) * share] for batch in batches_of(order, batch_size)]


def ceiling_of_the_share(order, batch_size, world_size, rank):
    share = -(-batch_size // world_size)
    return [batch[rank * share : (rank + 1) * share] for batch in batches_of(order, batch_size)]


def without_empty_steps(order, batch_size, world_size, rank):
    return [rows for rows in like_cards(order, batch_size, world_size, rank) if rows]


@pytest.mark.parametrize("function", [like_cards, in_blocks])
def test_rows_right(function, capsys):
    assert checks.deal_rows(function)
    assert said(capsys).startswith("right: at every step")


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (quarter_of_the_data, "at step 0 your ranks miss 12 rows of the batch of one process and see 12"),
        (everything, "is dealt more than once"),
        (floor_of_the_share, "at step 4 your ranks hold [2, 0, 0, 0] rows"),
        (ceiling_of_the_share, "deal as evenly as it goes"),
        (lambda order, *_: [order], "one process makes 4 steps, your rank 0 makes 1"),
        (lambda *_: 16, "return a list with one list of row numbers for each step"),
        (lambda *_: [[0]] * 4, "is dealt more than once"),
    ],
)
def test_rows_wrong(function, hint, capsys):
    assert not checks.deal_rows(function)
    line = said(capsys)
    assert line.startswith("not yet: ")
    assert any(part in line for part in hint.split("|")), line


def test_rows_steps_without_rows_count(capsys):
    """With 21 rows in batches of 8 on 4 ranks every rank has a row at every step; with 50 in 12 not."""
    assert not checks.deal_rows(without_empty_steps)
    assert "waiting in all-reduce" in said(capsys)


def test_rows_stub(capsys):
    assert not checks.deal_rows(stub)
    assert said(capsys) == "not yet: write the body of stub, then run this cell again"


# --- gradients -----------------------------------------------------------------------------------------


def weighted(model, n_rows):
    all_rows = idist.all_reduce(n_rows)
    for parameter in model.parameters():
        parameter.grad = idist.all_reduce(parameter.grad * n_rows / all_rows)


def weighted_at_once(model, n_rows):
    """One collective for everything, the count of rows included."""
    gradients = [parameter.grad for parameter in model.parameters()]
    message = torch.cat(
        [gradient.flatten() * n_rows for gradient in gradients] + [torch.tensor([float(n_rows)])]
    )
    *parts, rows = idist.all_reduce(message).split([gradient.numel() for gradient in gradients] + [1])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter) / rows


def plain_mean(model, n_rows):
    for parameter in model.parameters():
        parameter.grad = idist.all_reduce(parameter.grad) / idist.get_world_size()


def plain_sum(model, n_rows):
    for parameter in model.parameters():
        parameter.grad = idist.all_reduce(parameter.grad)


def nothing(model, n_rows):
    pass


def weighted_not_divided(model, n_rows):
    for parameter in model.parameters():
        parameter.grad = idist.all_reduce(parameter.grad * n_rows)


def weighted_after(model, n_rows):
    for parameter in model.parameters():
        parameter.grad = idist.all_reduce(parameter.grad) * n_rows / 16


def gathers(model, n_rows):
    rows = torch.tensor(idist.all_gather(n_rows), dtype=torch.float64)
    for parameter in model.parameters():
        everyone = idist.all_gather(parameter.grad[None])
        parameter.grad = torch.tensordot(rows / rows.sum(), everyone, dims=1)


def drops(model, n_rows):
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize("function", [weighted, weighted_at_once])
def test_gradients_right(function, capsys):
    assert checks.average_gradients(function)
    assert said(capsys) == "right: 4 ranks with unequal shares give the gradients of one process within 1e-12"


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (plain_mean, "ranks with 7, 5, 3 and 1 rows: your mean weighs each rank alike"),
        (plain_sum, "ranks with 4, 4, 4 and 4 rows: you added the gradients up"),
        (nothing, "still each rank's own"),
        (weighted_not_divided, "not those of one process"),
        (weighted_after, "the ranks end with different gradients|not those of one process"),
        (gathers, "right values, but a rank handles"),
        (drops, "without a gradient"),
        (lambda model, n_rows: 0, "still each rank's own"),
        (stub, "write the body of stub, then run this cell again"),
    ],
)
def test_gradients_wrong(function, hint, capsys):
    assert not checks.average_gradients(function)
    line = said(capsys)
    assert line.startswith("not yet: ")
    assert any(part in line for part in hint.split("|")), line
