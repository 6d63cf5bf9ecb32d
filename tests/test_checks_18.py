"""The exercises of chapter 18: what is right passes, and each natural mistake gets a hint that helps."""

import numpy
import pytest
from checking import said, stub, wrong

from ignite_ddl.course.checks import ch18 as checks
from ignite_ddl.pipeline.cut import balance
from ignite_ddl.pipeline.schedules import schedule_actions

# --- 1F1B -----------------------------------------------------------------------------------------------


def torchs(rank, n_ranks, n_microbatches):
    """The order of torch's own schedule."""
    return [f"{kind}{m}" for kind, _, m in schedule_actions("1f1b", n_ranks, n_microbatches)[rank]]


def started_with(rank, n_ranks, n_microbatches, ahead):
    ahead = min(ahead, n_microbatches)
    order = [f"F{m}" for m in range(ahead)]
    for m in range(n_microbatches - ahead):
        order += [f"F{m + ahead}", f"B{m}"]
    return order + [f"B{m}" for m in range(n_microbatches - ahead, n_microbatches)]


def gpipe(rank, n_ranks, n_microbatches):
    return [f"{kind}{m}" for kind in "FB" for m in range(n_microbatches)]


def one_by_one(rank, n_ranks, n_microbatches):
    return [f"{kind}{m}" for m in range(n_microbatches) for kind in "FB"]


def backward_first(rank, n_ranks, n_microbatches):
    return one_by_one(rank, n_ranks, n_microbatches)[::-1]


def one_at_a_time(rank, n_ranks, n_microbatches):
    yield from torchs(rank, n_ranks, n_microbatches)


@pytest.mark.parametrize(
    "function",
    [torchs, lambda rank, p, m: started_with(rank, p, m, p - rank - 1), one_at_a_time],
    ids=["torch's", "by hand", "a generator"],
)
def test_the_order_of_1f1b(function, capsys):
    assert checks.one_f_one_b(function)
    assert said(capsys).startswith("right: ")


WRONG_ORDERS = {
    "write the body": stub,
    "return a list of names": lambda rank, p, m: [0, 1],
    "rank 0 has a pass 'F8'": lambda rank, p, m: [*gpipe(rank, p, m), f"F{m}"],
    "rank 0 leaves out B7": lambda rank, p, m: gpipe(rank, p, m)[:-1],
    "rank 0 has 17 passes, 16 are there to do": lambda rank, p, m: [*gpipe(rank, p, m), "B0"],
    "nobody can go on, rank 0 stands before B7": backward_first,
    "33 time units, as it should, but rank 0 keeps the activations of 8 microbatches at once; 1F1B keeps 4": gpipe,
    "your step takes 96 time units, 1F1B takes 33": one_by_one,
    "rank 0 keeps the activations of 5 microbatches": lambda rank, p, m: started_with(rank, p, m, p - rank),
    "nobody can go on, rank 0 stands before B0": lambda rank, p, m: started_with(rank, p, m, rank),
}


@pytest.mark.parametrize("hint", WRONG_ORDERS)
def test_a_wrong_order_gets_its_hint(hint, capsys):
    wrong(checks.one_f_one_b, WRONG_ORDERS[hint], hint, capsys)


# --- the cut --------------------------------------------------------------------------------------------


def equal_counts(costs, n_stages):
    n = len(costs)
    return [n * (s + 1) // n_stages - n * s // n_stages for s in range(n_stages)]


def up_to_the_average(costs, n_stages):
    average, sizes, filled = sum(costs) / n_stages, [0] * n_stages, 0.0
    stage = 0
    for place, cost in enumerate(costs):
        must_move = len(costs) - place <= n_stages - stage - 1
        if sizes[stage] and stage < n_stages - 1 and (filled + cost > average or must_move):
            stage, filled = stage + 1, 0.0
        sizes[stage] += 1
        filled += cost
    return sizes


@pytest.mark.parametrize("made", [list, tuple, iter, numpy.array])
def test_the_best_cut(made, capsys):
    assert checks.cut_layers(lambda costs, n: made(balance(costs, n)))
    assert said(capsys) == "right: no cut has a faster slowest stage"


WRONG_CUTS = {
    "write the body": stub,
    "return a list with the number of layers of": lambda costs, n: n,
    "TypeError: unsupported operand": lambda costs, n: costs + n,
    "return a list with the number of layers": lambda costs, n: [1.0] * n,
    "that should be 2 numbers, 4 in all": lambda costs, n: [1] * n,
    "a stage needs a layer": lambda costs, n: [len(costs)] + [0] * (n - 1),
    "your cut [2, 2] has a stage of cost 10, 9 can be had": equal_counts,
    "can be had": up_to_the_average,
}


@pytest.mark.parametrize("hint", WRONG_CUTS)
def test_a_wrong_cut_gets_its_hint(hint, capsys):
    wrong(checks.cut_layers, WRONG_CUTS[hint], hint, capsys)


# --- the number of microbatches -------------------------------------------------------------------------


def chosen(rows, n_ranks, row_seconds, overhead, max_rows, divides=True, fits=True, bubble=True):
    counts = [m for m in range(1, rows + 1) if rows % m == 0 or not divides]
    fitting = [m for m in counts if min(m, n_ranks) * rows // m <= max_rows or not fits]
    turns = n_ranks - 1 if bubble else 0
    return min(fitting, key=lambda m: (m + turns) * (rows / m * row_seconds + overhead))


@pytest.mark.parametrize("made", [int, numpy.int64])
def test_the_best_number(made, capsys):
    assert checks.choose_microbatches(lambda *args: made(chosen(*args)))
    assert said(capsys) == "right: the fastest number of microbatches that fits"


def by_the_root(rows, n_ranks, row_seconds, overhead, max_rows):
    root = ((n_ranks - 1) * rows * row_seconds / overhead) ** 0.5
    fitting = [m for m in range(1, rows + 1) if rows % m == 0 and min(m, n_ranks) * rows // m <= max_rows]
    return min(fitting, key=lambda m: abs(m - root))


def never_fewer_than_ranks(rows, n_ranks, row_seconds, overhead, max_rows):
    fitting = [m for m in range(1, rows + 1) if rows % m == 0 and n_ranks * rows // m <= max_rows]
    return min(fitting, key=lambda m: (m + n_ranks - 1) * (rows / m * row_seconds + overhead))


WRONG_NUMBERS = {
    "your 1 microbatches a step takes 1376.0 ms, 1360.0 can be had": by_the_root,
    "your 4 microbatches a step takes 1652.0 ms, 1360.0 can be had": never_fewer_than_ranks,
    "write the body": stub,
    "which does not cut 64 rows into equal microbatches": lambda *args: chosen(*args, divides=False),
    "your 4 microbatches rank 0 keeps 64 rows": lambda *args: chosen(*args, fits=False),
    "your 1 microbatches a step takes": lambda *args: chosen(*args, bubble=False),
    "your 64 microbatches a step takes": lambda rows, *args: rows,
    "you return 8.0": lambda *args: 8.0,
    "can be had": lambda rows, n_ranks, *args: n_ranks,
}


@pytest.mark.parametrize("hint", WRONG_NUMBERS)
def test_a_wrong_number_gets_its_hint(hint, capsys):
    wrong(checks.choose_microbatches, WRONG_NUMBERS[hint], hint, capsys)
