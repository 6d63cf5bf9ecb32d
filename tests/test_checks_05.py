"""Chapter 05's checks: what is right passes, and each way to go wrong gets its own hint."""

from itertools import islice

import pytest

from ignite_ddl.course.checks import ch05 as checks


def places(n_rows, world_size, rank):
    return [k * world_size + rank >= n_rows for k in range(-(-n_rows // world_size))]


def only_the_last(n_rows, world_size, rank):
    reads = -(-n_rows // world_size)
    copied = n_rows % world_size and rank >= n_rows % world_size
    return (False,) * (reads - 1) + (bool(copied),)


@pytest.mark.parametrize("function", [places, only_the_last])
def test_padding_right(function, capsys):
    assert checks.is_padding(function)
    assert capsys.readouterr().out.startswith("right: without the padding each row counts once")


def stub(n_rows, world_size, rank):
    raise NotImplementedError


WRONG_PADDING = {
    "stub": (stub, "write the body of stub"),
    "constant": (lambda n, w, r: [False] * -(-n // w), "10 rows on 4 ranks: row 0 still counts 2 times"),
    "all": (lambda n, w, r: [True] * -(-n // w), "10 rows on 4 ranks: row 0 counts no more"),
    "for one case": (
        lambda n, w, r: [False, False, r > 1],
        "8 rows on 4 ranks: rank 0 reads 2 rows, you return 3",
    ),
    "even sizes too": (
        lambda n, w, r: [False] * (-(-n // w) - 1) + [r >= n % w],
        "8 rows on 4 ranks: row 4 counts no more",
    ),
    "originals": (
        lambda n, w, r: [k * w + r < -(-n // w) * w - n for k in range(-(-n // w))],
        "on rank 0 you kept a copy for its original",
    ),
    "nothing": (lambda n, w, r: None, "rank 0 reads 3 rows, you return no list"),
}


@pytest.mark.parametrize("name", WRONG_PADDING)
def test_padding_wrong(name, capsys):
    function, hint = WRONG_PADDING[name]
    assert not checks.is_padding(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1


def strided(stream, batch_size, world_size, rank):
    rows = iter(stream)
    while batch := list(islice(rows, batch_size)):
        yield batch[rank::world_size]


def cut(stream, batch_size, world_size, rank):
    batch = []
    for row in stream:
        batch.append(row)
        if len(batch) == batch_size:
            yield batch[rank * batch_size // world_size : (rank + 1) * batch_size // world_size]
            batch = []
    if batch:
        yield batch[rank * len(batch) // world_size : (rank + 1) * len(batch) // world_size]


@pytest.mark.parametrize("function", [strided, cut])
def test_stream_right(function, capsys):
    assert checks.deal_stream(function)
    assert capsys.readouterr().out.startswith("right: every row has one rank")


def deal_stub(stream, batch_size, world_size, rank):
    raise NotImplementedError


def whole(stream, batch_size, world_size, rank):
    rows = iter(stream)
    while batch := list(islice(rows, batch_size)):
        yield batch


def quick_repair(stream, batch_size, world_size, rank):
    mine = islice(stream, rank, None, world_size)
    while batch := list(islice(mine, batch_size // world_size)):
        yield batch


def drops(stream, batch_size, world_size, rank):
    rows = iter(stream)
    while len(batch := list(islice(rows, batch_size))) == batch_size:
        yield batch[rank::world_size]


def pads(stream, batch_size, world_size, rank):
    rows = iter(stream)
    while batch := list(islice(rows, batch_size)):
        batch += batch[: -len(batch) % world_size]
        yield batch[rank::world_size]


def rest_to_the_last(stream, batch_size, world_size, rank):
    rows = iter(stream)
    while batch := list(islice(rows, batch_size)):
        share = len(batch) // world_size
        yield batch[rank * share : (rank + 1) * share if rank < world_size - 1 else None]


def reads_all(stream, batch_size, world_size, rank):
    rows = list(stream)
    for start in range(0, len(rows), batch_size):
        yield rows[start : start + batch_size][rank::world_size]


def one_ahead(stream, batch_size, world_size, rank):
    rows = iter(stream)
    batch = list(islice(rows, batch_size))
    while batch:
        following = list(islice(rows, batch_size))
        yield batch[rank::world_size]
        batch = following


def rows_one_by_one(stream, batch_size, world_size, rank):
    yield from stream


def nothing(stream, batch_size, world_size, rank):
    return None


WRONG_STREAMS = [
    (deal_stub, "write the body of deal_stub"),
    (whole, "a stream of 10 rows, batches of 4, 4 ranks: row 0 goes to 4 ranks"),
    (quick_repair, "your ranks make [3, 3, 2, 2] steps, so some wait for ever"),
    (drops, "one process makes 3 steps, your ranks make 2"),
    (pads, "row 8 goes to 2 ranks"),
    (rest_to_the_last, "in step 3 your ranks hold [0, 0, 0, 2] rows"),
    (reads_all, "an endless stream: you read 40 rows and gave no batch"),
    (one_ahead, "batches of 4: after step 1 you have read 8 rows of the stream, 4 are enough"),
    (rows_one_by_one, "yield a list of rows for each step, not a int"),
    (nothing, "TypeError"),
]


@pytest.mark.parametrize(
    ("function", "hint"), WRONG_STREAMS, ids=lambda value: getattr(value, "__name__", "")
)
def test_stream_wrong(function, hint, capsys):
    assert not checks.deal_stream(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1
