"""The checks of chapter 00's exercises: the true mean, and a layer cut by its inputs."""

import torch
import torch.distributed as dist

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import try_on_ranks
from ignite_ddl.lab.bytes import count_bytes

WAIT_SECONDS = 10  # four ranks that only add two numbers take a fraction of a second
OTHER_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "scatter", "send", "recv"),
)


@exercise
def mean_of_all(function):
    """The mean over all rows, on every rank, for one or two numbers sent."""
    cases = [  # the losses of the rows that each of 4 ranks holds
        [[1, 2, 3], [4, 5, 6], [7, 8], [9, 10]],
        [[8], [1, 3], [2, 2, 5], [4, 4, 4, 7]],
        [[1, 2], [3, 4], [5, 6], [7, 8]],
    ]
    for losses, ranks in zip(cases, _by_case(_on_rank, function, cases), strict=True):
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


@exercise
def cut_by_inputs(function):
    """The whole output on every rank, from one sum over the ranks."""
    cases = [(8, 12, (2, 1, 1, 1)), (3, 2, (1, 4, 2, 3))]  # rows, outputs, inputs of each rank
    for (n_rows, n_outputs, held), ranks in zip(cases, _by_case(_cut_on_rank, function, cases), strict=True):
        case = f"ranks with {_sizes(list(held))} inputs"
        rows, weight = _layer(n_rows, n_outputs, sum(held))
        true = rows @ weight.T
        for rank, (outputs, ops) in enumerate(ranks):
            if not isinstance(outputs, torch.Tensor) or outputs.shape != true.shape:
                raise Hint(f"{case}: rank {rank} should return a tensor of shape {tuple(true.shape)}")
            if others := [op for op in ops if op != "all_reduce"]:
                raise Hint(f"{case}: you used {others[0]}; one idist.all_reduce is enough")
            if not _near((outputs - true).abs().max(), 0):
                told = f"{case}: output 0 of row 0 should be {true[0, 0]:g}, on rank {rank} it is {outputs[0, 0]:g}"
                if not ops:
                    told += ": it has only its own inputs' part, and an output is a sum over all inputs"
                elif _near((4 * outputs - true).abs().max(), 0):
                    told += ": the ranks' parts make a sum, not a mean"
                raise Hint(told)
            if len(ops) > 1:
                raise Hint(f"{case}: right, but you called all_reduce {len(ops)} times; once is enough")
    return "the whole output on every rank, from one sum"


def _layer(n_rows, n_outputs, n_inputs):
    """The batch and the whole weight, in whole numbers."""
    rows = torch.arange(n_rows * n_inputs, dtype=torch.float64).reshape(n_rows, n_inputs) % 7 + 1
    return rows, torch.arange(n_outputs * n_inputs, dtype=torch.float64).reshape(n_outputs, n_inputs) % 11 + 1


def _cut_on_rank(local_rank, function, cases):
    report = []
    for n_rows, n_outputs, held in cases:
        rows, weight = _layer(n_rows, n_outputs, sum(held))
        first = sum(held[:local_rank])
        with count_bytes() as traffic:
            outputs = function(rows, weight[:, first : first + held[local_rank]], first)
        report.append((outputs, traffic.ops))
    return report


def _by_case(on_rank, function, cases):
    """For each case, what ``on_rank`` reported of each of 4 ranks."""
    return list(zip(*try_on_ranks(4, on_rank, function, cases, timeout=WAIT_SECONDS), strict=True))


def _on_rank(local_rank, function, cases):
    """For each case, what this rank returned, how many numbers it gave to all_reduce, and what else it called."""
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
