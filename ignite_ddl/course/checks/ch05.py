"""The checks of chapter 05: which reads are padding, and a stream dealt to ranks without reading ahead."""

from itertools import count

from torch.utils.data import DistributedSampler

from ignite_ddl.course.exercises import Hint, exercise


@exercise
def is_padding(function):
    """True where a rank reads a row that is a copy, for DistributedSampler's padding."""
    for n_rows, world_size in ((10, 4), (8, 4), (5, 4), (7, 2), (1, 4), (23, 5), (3, 1)):
        case = f"{n_rows} row{'s' * (n_rows > 1)} on {world_size} rank{'s' * (world_size > 1)}"
        order = _orders(n_rows, world_size)
        kept = []
        for rank, rows in enumerate(order):
            marks = function(n_rows, world_size, rank)
            if not isinstance(marks, list | tuple) or len(marks) != len(rows):
                told = f"you return {len(marks)}" if isinstance(marks, list | tuple) else "you return no list"
                raise Hint(
                    f"{case}: rank {rank} reads {len(rows)} rows, {told}; one entry a row is asked for"
                )
            kept += [row for row, mark in zip(rows, marks, strict=True) if not mark]
        if twice := sorted({row for row in kept if kept.count(row) > 1}):
            raise Hint(f"{case}: row {twice[0]} still counts {kept.count(twice[0])} times")
        if lost := sorted(set(range(n_rows)) - set(kept)):
            raise Hint(f"{case}: row {lost[0]} counts no more: you took its only read for padding")
        for rank, rows in enumerate(order):
            first = [position * world_size + rank < n_rows for position in range(len(rows))]
            if [not mark for mark in function(n_rows, world_size, rank)] != first:
                raise Hint(
                    f"{case}: each row counts once, but on rank {rank} you kept a copy for its original"
                )
    return "without the padding each row counts once, whatever the sizes"


def _orders(n_rows, world_size):
    """For each rank the rows that it reads, from the sampler itself; unshuffled, so that row and position agree."""
    return [
        list(DistributedSampler(range(n_rows), num_replicas=world_size, rank=rank, shuffle=False))
        for rank in range(world_size)
    ]


@exercise
def deal_stream(function):
    """Each row of a stream to one rank, as many steps on each rank, no more than a global batch read ahead."""
    for n_rows, batch_size, world_size in (
        (10, 4, 4),
        (8, 4, 4),
        (21, 8, 4),
        (3, 4, 2),
        (9, 4, 1),
        (0, 4, 2),
    ):
        dealt = [
            [_rows(share) for share in function(iter(range(n_rows)), batch_size, world_size, rank)]
            for rank in range(world_size)
        ]
        _check_dealt(dealt, n_rows, batch_size)
    for batch_size, world_size in ((4, 2), (6, 4)):
        for rank in range(world_size):
            _check_ahead(function, batch_size, world_size, rank)
    return (
        "every row has one rank, all ranks make the same steps, and an endless stream is read batch by batch"
    )


def _rows(share):
    if not isinstance(share, list | tuple):
        raise Hint(f"yield a list of rows for each step, not a {type(share).__name__}")
    return list(share)


def _check_dealt(dealt, n_rows, batch_size):
    case = f"a stream of {n_rows} rows, batches of {batch_size}, {len(dealt)} rank{'s' * (len(dealt) > 1)}"
    steps = [len(shares) for shares in dealt]
    expected = -(-n_rows // batch_size)
    if len(set(steps)) > 1:
        raise Hint(
            f"{case}: your ranks make {steps} steps, so some wait for ever; yield an empty list instead"
        )
    if steps[0] != expected:
        raise Hint(f"{case}: one process makes {expected} steps, your ranks make {steps[0]}")
    for step in range(expected):
        batch = range(step * batch_size, min(n_rows, (step + 1) * batch_size))
        shares = [shares[step] for shares in dealt]
        together = [row for share in shares for row in share]
        if twice := sorted({row for row in together if together.count(row) > 1}):
            raise Hint(f"{case}: row {twice[0]} goes to {together.count(twice[0])} ranks")
        if set(together) != set(batch):
            raise Hint(
                f"{case}: step {step + 1} should deal rows {list(batch)}, yours deals {sorted(together)}"
            )
        sizes = [len(share) for share in shares]
        if max(sizes) - min(sizes) > 1:
            raise Hint(f"{case}: in step {step + 1} your ranks hold {sizes} rows; deal as evenly as it goes")


def _check_ahead(function, batch_size, world_size, rank):
    taken = 0

    def endless():
        nonlocal taken
        for row in count():
            if row >= 10 * batch_size:
                raise Hint(
                    f"an endless stream: you read {row} rows and gave no batch; take a batch at a time"
                )
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
