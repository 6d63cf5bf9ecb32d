"""Natural mistakes in chapter 18's exercises."""

from functools import partial

import numpy

from ignite_ddl.pipeline import balance


def ordered(rank, n_ranks, n_microbatches, ahead=lambda rank, n_ranks: n_ranks - rank - 1):
    ahead = min(ahead(rank, n_ranks), n_microbatches)
    order = [f"F{m}" for m in range(ahead)]
    for m in range(n_microbatches - ahead):
        order += [f"F{m + ahead}", f"B{m}"]
    return order + [f"B{m}" for m in range(n_microbatches - ahead, n_microbatches)]


def gpipe(rank, n_ranks, n_microbatches):
    return [f"{kind}{m}" for kind in "FB" for m in range(n_microbatches)]


def equal_counts(costs, n_stages):
    n = len(costs)
    return [n * (s + 1) // n_stages - n * s // n_stages for s in range(n_stages)]


def chosen(rows, n_ranks, row_seconds, overhead, max_rows, divides=True, fits=True, bubble=True):
    counts = [m for m in range(1, rows + 1) if rows % m == 0 or not divides]
    fitting = [m for m in counts if min(m, n_ranks) * rows // m <= max_rows or not fits]
    return min(fitting, key=lambda m: (m + (n_ranks - 1) * bubble) * (rows / m * row_seconds + overhead))


RIGHT = {
    "one_f_one_b": [lambda *args: iter(ordered(*args))],
    "cut_layers": [lambda *args: numpy.array(balance(*args)), lambda *args: iter(balance(*args))],
    "choose_microbatches": [lambda *args: numpy.int64(chosen(*args))],
}
MISTAKES = {
    "one_f_one_b": {
        # The first four hints are of reading an order, and chapter 19's as well.
        "return a list of names": lambda rank, p, m: [0, 1],
        "rank 0 has a pass 'F8'": lambda rank, p, m: [*gpipe(rank, p, m), f"F{m}"],
        "rank 0 leaves out B7": lambda rank, p, m: gpipe(rank, p, m)[:-1],
        "rank 0 has 17 passes, 16 are there to do": lambda rank, p, m: [*gpipe(rank, p, m), "B0"],
        "nobody can go on, rank 0 stands before B7": lambda rank, p, m: ordered(rank, p, m)[::-1],
        "your step takes 96 time units, 1F1B takes 33": partial(ordered, ahead=lambda rank, n_ranks: 0),
        "33 time units, as it should, but rank 0 keeps the activations of 8 microbatches at once; 1F1B keeps 4": gpipe,
    },
    "cut_layers": {
        "return a list with the number of layers of": lambda costs, n: n,
        "that should be 2 numbers, 4 in all": lambda costs, n: [1] * n,
        "a stage needs a layer": lambda costs, n: [len(costs)] + [0] * (n - 1),
        "your cut [2, 2] has a stage of cost 10, 9 can be had": equal_counts,
    },
    "choose_microbatches": {
        "which does not cut 64 rows into equal microbatches": partial(chosen, divides=False),
        "your 4 microbatches rank 0 keeps 64 rows": partial(chosen, fits=False),
        "your 1 microbatches a step takes": partial(chosen, bubble=False),
    },
}
