"""Natural mistakes in chapter 18's exercises."""

from functools import partial

import numpy

from ignite_ddl.pipeline.cut import balance


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


def up_to_the_average(costs, n_stages):
    sizes, filled = [0], 0.0
    for place, cost in enumerate(costs):
        must_move = len(costs) - place <= n_stages - len(sizes)
        if sizes[-1] and len(sizes) < n_stages and (filled + cost > sum(costs) / n_stages or must_move):
            sizes, filled = [*sizes, 0], 0.0
        sizes[-1] += 1
        filled += cost
    return sizes


def chosen(
    rows, n_ranks, row_seconds, overhead, max_rows, divides=True, fits=True, bubble=1, at_once=min, root=False
):
    counts = [m for m in range(1, rows + 1) if rows % m == 0 or not divides]
    fitting = [m for m in counts if at_once(m, n_ranks) * rows // m <= max_rows or not fits]
    nearest = ((n_ranks - 1) * rows * row_seconds / overhead) ** 0.5

    def seconds(m):
        return (m + (n_ranks - 1) * bubble) * (rows / m * row_seconds + overhead)

    return min(fitting, key=lambda m: abs(m - nearest) if root else seconds(m))


RIGHT = {
    "one_f_one_b": [lambda *args: iter(ordered(*args))],
    "cut_layers": [lambda *args: numpy.array(balance(*args)), lambda *args: iter(balance(*args))],
    "choose_microbatches": [lambda *args: numpy.int64(chosen(*args))],
}
MISTAKES = {
    "one_f_one_b": {
        # Four hints of reading an order, which chapter 19 uses as well.
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
        "can be had": up_to_the_average,
    },
    "choose_microbatches": {
        "which does not cut 64 rows into equal microbatches": partial(chosen, divides=False),
        "your 4 microbatches rank 0 keeps 64 rows": partial(chosen, fits=False),
        "your 1 microbatches a step takes 1376.0 ms, 1360.0 can be had": partial(chosen, root=True),
        "your 4 microbatches a step takes 1652.0 ms, 1360.0 can be had": partial(
            chosen, at_once=lambda m, n_ranks: n_ranks
        ),
        "your 1 microbatches a step takes": partial(chosen, bubble=0),
    },
}
