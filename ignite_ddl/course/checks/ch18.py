"""The checks of chapter 18: the order of 1F1B, a model cut by cost, and the number of microbatches."""

import operator

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.orders import SECONDS, most_kept, play, read
from ignite_ddl.pipeline.cut import balance


@exercise
def one_f_one_b(function):
    for n_ranks, n_microbatches in ((4, 8), (2, 5), (3, 3), (4, 6), (1, 3)):
        case = f"{n_ranks} ranks, {n_microbatches} microbatches"
        orders = [read(function(rank, n_ranks, n_microbatches), "FB", rank, n_microbatches, case)
                  for rank in range(n_ranks)]  # fmt: skip
        seconds = play(orders, case)
        least = (n_microbatches + n_ranks - 1) * (SECONDS["F"] + SECONDS["B"])
        if seconds > least:
            raise Hint(f"{case}: your step takes {seconds} time units, 1F1B takes {least}")
        for rank, order in enumerate(orders):
            kept, fewest = most_kept(order), min(n_microbatches, n_ranks - rank)
            if kept > fewest:
                raise Hint(
                    f"{case}: your step takes {seconds} time units, as it should, but rank {rank} keeps the "
                    f"activations of {kept} microbatches at once; 1F1B keeps {fewest}"
                )
    return "the time of GPipe, and rank r keeps no more than p - r microbatches"


@exercise
def cut_layers(function):
    for costs, n_stages in (
        ([1, 1, 1, 9], 2),
        ([4, 1, 1, 1, 1, 4, 4, 4], 4),
        ([3, 1, 2, 2, 5, 1, 1, 3], 3),
        ([5, 5, 5], 3),
        ([1] * 7 + [7], 2),
        ([(7 * i) % 10 + 1 for i in range(24)], 5),
    ):
        case = f"layers of cost {costs} in {n_stages} stages"
        sizes = function(list(costs), n_stages)
        sizes = list(sizes) if hasattr(sizes, "__iter__") else [None]
        if not all(hasattr(size, "__index__") for size in sizes):  # numpy's integers have one
            raise Hint("return a list with the number of layers of each stage")
        sizes = [operator.index(size) for size in sizes]
        if len(sizes) != n_stages or sum(sizes) != len(costs):
            raise Hint(
                f"{case}: you return {list(sizes)}; that should be {n_stages} numbers, {len(costs)} in all"
            )
        if min(sizes) < 1:
            raise Hint(f"{case}: you return {list(sizes)}; a stage needs a layer")
        mine, best = _slowest(costs, sizes), _slowest(costs, balance(costs, n_stages))
        if mine > best:
            raise Hint(f"{case}: your cut {list(sizes)} has a stage of cost {mine}, {best} can be had")
    return "no cut has a faster slowest stage"


def _slowest(costs, sizes):
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return max(sum(costs[start : start + size]) for start, size in zip(starts, sizes, strict=True))


@exercise
def choose_microbatches(function):
    for rows, n_ranks, row_seconds, overhead, max_rows in (
        (64, 4, 0.001, 0.002, 64),
        (64, 4, 0.001, 0.0001, 64),
        (64, 4, 0.001, 0.02, 64),
        (64, 4, 0.001, 0.02, 16),
        (60, 8, 0.003, 0.01, 60),
        (60, 8, 0.003, 0.01, 30),
        (48, 4, 0.003, 0.2, 48),  # 2 is best, fewer than ranks, though 1 is nearer to the formula's 1.47
        (48, 2, 0.002, 0.005, 24),
        (48, 1, 0.002, 0.005, 48),
    ):
        case = (
            f"{rows} rows on {n_ranks} ranks, {1e3 * row_seconds:g} ms a row, "
            f"{1e3 * overhead:g} ms a microbatch, room for {max_rows} rows"
        )
        m = function(rows, n_ranks, row_seconds, overhead, max_rows)
        if not hasattr(m, "__index__") or m < 1 or rows % m:
            raise Hint(f"{case}: you return {m!r}, which does not cut {rows} rows into equal microbatches")
        m = operator.index(m)
        if (alive := _alive(rows, n_ranks, m)) > max_rows:
            raise Hint(f"{case}: with your {m} microbatches rank 0 keeps {alive} rows")

        def seconds(m, rows=rows, n_ranks=n_ranks, row_seconds=row_seconds, overhead=overhead):
            return (m + n_ranks - 1) * (rows / m * row_seconds + overhead)

        fitting = [m for m in range(1, rows + 1) if rows % m == 0 and _alive(rows, n_ranks, m) <= max_rows]
        best = min(fitting, key=seconds)
        if seconds(m) > seconds(best) * (1 + 1e-9):
            raise Hint(
                f"{case}: with your {m} microbatches a step takes {1e3 * seconds(m):.1f} ms, "
                f"{1e3 * seconds(best):.1f} can be had"
            )
    return "the fastest number of microbatches that fits"


def _alive(rows, n_ranks, m):
    """Rows whose activations rank 0 keeps at most, under 1F1B."""
    return min(m, n_ranks) * rows // m
