"""Natural mistakes in chapter 05's exercises."""

from functools import partial
from itertools import islice


def only_the_last(n_rows, world_size, rank):
    copied = n_rows % world_size and rank >= n_rows % world_size
    return (False,) * (-(-n_rows // world_size) - 1) + (bool(copied),)


def dealt(
    stream, batch_size, world_size, rank, share=lambda batch, n, rank: batch[rank::n], full=False, ahead=False
):
    rows, held = iter(stream), []
    while batch := list(islice(rows, batch_size)):
        if full and len(batch) < batch_size:
            return
        if not ahead:
            yield share(batch, world_size, rank)
            continue
        if held:
            yield share(held, world_size, rank)
        held = batch
    if held:
        yield share(held, world_size, rank)


def each_reads_its_rows(stream, batch_size, world_size, rank):
    mine = islice(stream, rank, None, world_size)
    while batch := list(islice(mine, batch_size // world_size)):
        yield batch


def other_rows(stream, batch_size, world_size, rank):
    for batch in dealt(stream, batch_size, world_size, rank):
        yield [row + 1 for row in batch]


RIGHT = {
    "is_padding": [only_the_last],
    "deal_stream": [partial(dealt, share=lambda b, n, r: b[r * len(b) // n : (r + 1) * len(b) // n])],
}
MISTAKES = {
    "is_padding": {
        "rank 0 reads 3 rows, you return no list": lambda n, w, r: None,
        "8 rows on 4 ranks: rank 0 reads 2 rows, you return 3": lambda n, w, r: [False, False, r > 1],
        "10 rows on 4 ranks: row 0 still counts 2 times": lambda n, w, r: [False] * -(-n // w),
        "8 rows on 4 ranks: row 4 counts no more": lambda n, w, r: [False] * (-(-n // w) - 1) + [r >= n % w],
        "you kept a copy": lambda n, w, r: [k * w + r < -(-n // w) * w - n for k in range(-(-n // w))],
    },
    "deal_stream": {
        "yield a list of rows for each step, not a int": lambda stream, *_: stream,
        "your ranks make [3, 3, 2, 2] steps, so some wait for ever": each_reads_its_rows,
        "one process makes 3 steps, your ranks make 2": partial(dealt, full=True),
        "stream of 10 rows, batches of 4, 4 ranks: row 0 goes to 4": partial(dealt, share=lambda b, n, r: b),
        "step 1 should deal rows [0, 1, 2, 3], yours deals [1, 2, 3, 4]": other_rows,
        "in step 3 your ranks hold [0, 0, 0, 2] rows": partial(
            dealt, share=lambda b, n, r: b[r * (len(b) // n) : (r + 1) * (len(b) // n) if r < n - 1 else None]
        ),
        "you read 40 rows and gave no batch": lambda stream, *args: dealt(list(stream), *args),
        "batches of 4: after step 1 you have read 8 rows of the stream, 4": partial(dealt, ahead=True),
    },
}
