"""The checks of chapter 00's exercises."""

import torch.distributed as dist

import ignite_ddl as ddl
from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import on_ranks

WAIT_SECONDS = 10  # four ranks that only add two numbers take a fraction of a second
OTHER_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "scatter", "send", "recv"),
)


@exercise
def rows_of_rank(function):
    """Every row has one rank, in order, and no rank has two rows more than another."""
    for n_rows, world_size in ((10, 4), (8, 4), (3, 4), (7, 2), (9, 1), (0, 3), (23, 5)):
        parts = [[int(row) for row in function(n_rows, world_size, rank)] for rank in range(world_size)]
        case = f"{n_rows} rows on {world_size} rank{'s' * (world_size > 1)}"
        held = [row for part in parts for row in part]
        if strangers := sorted(set(held) - set(range(n_rows))):
            raise Hint(f"{case}: there is no row {strangers[0]}")
        if lost := sorted(set(range(n_rows)) - set(held)):
            raise Hint(f"{case}: no rank has row {lost[0]}; your ranks hold {_sizes(parts)} rows")
        if twice := sorted({row for row in held if held.count(row) > 1}):
            owners = [rank for rank, part in enumerate(parts) for row in part if row == twice[0]]
            raise Hint(f"{case}: row {twice[0]} is held twice, by ranks {_sizes(owners)}")
        if max(map(len, parts)) - min(map(len, parts)) > 1:
            raise Hint(f"{case}: your ranks hold {_sizes(parts)} rows; make the sizes differ by at most one")
        if held != list(range(n_rows)):
            raise Hint(f"{case}: every row has a rank, but not in order: rank 0 starts with row 0, and so on")
    return "every row has one rank, in order, and the sizes differ by at most one"


@exercise
def mean_of_all(function):
    """The mean over all rows, on every rank, for one or two numbers sent."""
    cases = [  # the losses of the rows that each of 4 ranks holds
        [[1, 2, 3], [4, 5, 6], [7, 8], [9, 10]],
        [[8], [1, 3], [2, 2, 5], [4, 4, 4, 7]],
        [[1, 2], [3, 4], [5, 6], [7, 8]],
    ]
    for losses, ranks in zip(cases, _run(function, cases), strict=True):
        values = [value for value, _, _ in ranks]
        rows = _sizes(losses)
        true = sum(map(sum, losses)) / sum(map(len, losses))
        naive = sum(sum(part) / len(part) for part in losses) / len(losses)
        if others := sorted({name for _, _, names in ranks for name in names}):
            raise Hint(f"you used {others[0]}; idist.all_reduce is enough")
        if not _near(values[0], true):
            told = f"with {rows} rows the mean is {true:g}, yours is {values[0]:g}"
            if _near(values[0], naive):
                told += ": the mean of the four means gives every rank the same weight, however few its rows"
            raise Hint(told)
        if wrong := [rank for rank, value in enumerate(values) if not _near(value, true)]:
            raise Hint(
                f"rank 0 returns {values[0]:g}, rank {wrong[0]} returns {values[wrong[0]]:g}: all need the mean"
            )
        if (sent := max(numbers for _, numbers, _ in ranks)) > 2:
            raise Hint(f"right, but a rank sends {sent} numbers; two are enough")
    return "the true mean on every rank, and a rank sends two numbers"


def _run(function, cases):
    """For each case, what each of 4 ranks returned, how many numbers it gave to all_reduce, and what else it called."""
    try:
        results = on_ranks(4, _on_rank, function, cases, timeout=WAIT_SECONDS)
    except ddl.RankError as error:
        if f"did not finish within {WAIT_SECONDS} s" in str(error):
            raise Hint(
                "your ranks wait for each other: every rank has to call all_reduce equally often"
            ) from None
        raise
    return list(zip(*results, strict=True))


def _on_rank(local_rank, function, cases):
    report = []
    for losses in cases:
        mine = [float(loss) for loss in losses[local_rank]]
        with _Count() as count:
            value = function(sum(mine) / len(mine), len(mine))
        if value is None:
            raise Hint("your function returns nothing: it should return the mean")
        report.append((float(value), count.numbers, count.others))
    return report


class _Count:
    """Counts what passes through torch.distributed in this rank, whoever calls it."""

    def __enter__(self):
        self.numbers, self.others = 0, []
        self.originals = {name: getattr(dist, name) for name in ("all_reduce", *OTHER_COLLECTIVES)}
        for name in self.originals:
            setattr(dist, name, self._counted(name))
        return self

    def __exit__(self, *exc_info):
        for name, original in self.originals.items():
            setattr(dist, name, original)

    def _counted(self, name):
        def call(*args, **kwargs):
            if name == "all_reduce":
                self.numbers += (args[0] if args else kwargs["tensor"]).numel()
            else:
                self.others.append(name)
            return self.originals[name](*args, **kwargs)

        return call


def _near(value, true):
    return abs(value - true) <= 1e-5


def _sizes(parts):
    """ "3, 3, 2 and 2" of four lists, or of four numbers."""
    words = [str(len(part) if isinstance(part, list) else part) for part in parts]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
