"""The checks of chapter 05: an accuracy without copies, and a stream dealt to ranks without reading ahead."""

from itertools import count, islice

from torch.utils.data import DistributedSampler

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import counted_on_ranks

WAIT_SECONDS = 30  # ranks that add one number take a fraction of a second
NUMBER = 8  # bytes of the largest number that idist sends


@exercise(
    cases=(  # rows, ranks, the rows with a wrong answer
        (18, 4, {0, 5}),
        (16, 4, {3, 4, 7}),
        (9, 2, {8}),
        (2, 3, {1}),
    ),
    about=lambda n_rows, world_size, wrong: f"{n_rows} rows on {world_size} ranks, of which {len(wrong)} wrong",
    right="each row counts once, on every rank, for one number",
)
def fair_accuracy(function, n_rows, world_size, wrong):
    """The share of right rows, each counted once though DistributedSampler has padded, for one number sent."""
    reads = [
        [
            row not in wrong
            for row in DistributedSampler(range(n_rows), num_replicas=world_size, rank=rank, shuffle=False)
        ]
        for rank in range(world_size)
    ]
    ranks = counted_on_ranks(function, [(answers, n_rows) for answers in reads], WAIT_SECONDS)
    told, traffic = zip(*ranks, strict=True)
    if None in told:
        raise Hint("your function returns nothing: it should return the accuracy")
    true, every = 1 - len(wrong) / n_rows, [answer for mine in reads for answer in mine]
    if bad := [rank for rank, value in enumerate(told) if not _near(value, true)]:
        text = f"{true:.3f} are right, rank {bad[0]} returns {told[bad[0]]:.3f}"
        if _near(told[bad[0]], sum(every) / len(every)):
            text += ", the share of all reads: the copies still count"
        raise Hint(text)
    put_in, got = max(mine.put_in for mine in traffic), max(mine.got for mine in traffic)
    if put_in > NUMBER or got > NUMBER:
        raise Hint(
            f"right, but a rank hands in {put_in} bytes and is handed {got}; one number is enough ({NUMBER} bytes)"
        )


def _near(value, true):
    return abs(value - true) <= 1e-5


@exercise
def deal_stream(function):
    """Each row of a stream to one rank, as many steps on each rank, no more than a global batch read ahead."""
    sizes = (10, 4, 4), (8, 4, 4), (21, 8, 4), (3, 4, 2), (9, 4, 1), (0, 4, 2)
    for read, (n_rows, batch_size, world_size) in [*((iter, size) for size in sizes), (list, sizes[0])]:
        expected = -(-n_rows // batch_size)
        dealt = [
            # Not to its end, which may never come.
            [
                _rows(share)
                for share in islice(function(read(range(n_rows)), batch_size, world_size, rank), expected + 2)
            ]
            for rank in range(world_size)
        ]
        _check_dealt(dealt, n_rows, batch_size, expected, "list" if read is list else "stream")
    for batch_size, world_size in ((4, 2), (6, 4)):
        for rank in range(world_size):
            _check_ahead(function, batch_size, world_size, rank)
    return "every row has one rank, all ranks make the same steps, and an endless stream is read batch by batch"


def _rows(share):
    if not isinstance(share, list | tuple):
        raise Hint(f"yield a list of rows for each step, not a {type(share).__name__}")
    return list(share)


def _check_dealt(dealt, n_rows, batch_size, expected, what):
    case = f"a {what} of {n_rows} rows, batches of {batch_size}, {len(dealt)} rank{'s' * (len(dealt) > 1)}"
    steps = [len(shares) for shares in dealt]
    if min(steps) > expected + 1 and what == "list":
        raise Hint(
            f"{case}: your steps never end; whatever iterates over a list begins at its first row, so call iter once"
        )
    if min(steps) > expected + 1:
        raise Hint(f"{case}: your steps go on after the {expected} of one process; an empty batch is the end")
    if len(set(steps)) > 1:
        raise Hint(f"{case}: your ranks make {steps} steps, so some wait for ever; yield an empty list instead")
    if steps[0] != expected:
        raise Hint(f"{case}: one process makes {expected} steps, your ranks make {steps[0]}")
    for step in range(expected):
        batch = range(step * batch_size, min(n_rows, (step + 1) * batch_size))
        shares = [shares[step] for shares in dealt]
        together = [row for share in shares for row in share]
        if twice := sorted({row for row in together if together.count(row) > 1}):
            raise Hint(f"{case}: row {twice[0]} goes to {together.count(twice[0])} ranks")
        if set(together) != set(batch):
            raise Hint(f"{case}: step {step + 1} should deal rows {list(batch)}, yours deals {sorted(together)}")
        sizes = [len(share) for share in shares]
        if max(sizes) - min(sizes) > 1:
            raise Hint(f"{case}: in step {step + 1} your ranks hold {sizes} rows; deal as evenly as it goes")


def _check_ahead(function, batch_size, world_size, rank):
    taken = 0

    def endless():
        nonlocal taken
        for row in count():
            if row >= 10 * batch_size:
                raise Hint(f"an endless stream: you read {row} rows and gave no batch; take a batch at a time")
            taken += 1
            yield row

    shares = iter(function(endless(), batch_size, world_size, rank))
    for step in range(1, 4):
        next(shares)
        if taken > step * batch_size:
            raise Hint(
                f"batches of {batch_size}: after step {step} you have read {taken} rows of the stream, "
                f"{step * batch_size} are enough"
            )
