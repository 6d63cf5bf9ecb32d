"""The checks of chapter 22: the rank with the NaN, in one sum; and the rank for which the others wait."""

import math

from ignite_ddl.compat import recorded_calls
from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import on_ranks


def _run(local_rank, function, losses):
    before = len(recorded_calls())
    found = function(losses[local_rank])
    return found, [(call["operation"], call["sizes"]) for call in recorded_calls()[before:]]


@exercise
def mean_and_bad_ranks(function):
    """Every rank knows both, after one sum of few numbers."""
    for losses, mean, bad in (
        ([1.0, 2.0, 6.0], 3.0, []),
        ([1.0, 2.0, math.nan], 1.5, [2]),
        ([math.inf, 4.0, -math.inf], 4.0, [0, 2]),
        ([math.nan, math.nan], math.nan, [0, 1]),
    ):
        results = on_ranks(len(losses), _run, function, losses, timeout=10)
        case = f"losses {', '.join(map(str, losses))}"
        for rank, (found, calls) in enumerate(results):
            if not isinstance(found, tuple) or len(found) != 2:
                raise Hint(f"{case}: return the mean and a list of ranks, not {found!r:.40}")
            if list(found[1]) != bad:
                raise Hint(f"{case}: rank {rank} says that {found[1]!r:.40} are not finite; it is {bad}")
            if not (abs(found[0] - mean) <= 1e-5 or math.isnan(found[0]) and math.isnan(mean)):
                raise Hint(
                    f"{case}: rank {rank} has {found[0]:.3g} as the mean of the finite ones, not {mean}"
                )
            if [operation for operation, _ in calls] != ["all_reduce"]:
                said = ", ".join(operation for operation, _ in calls) or "nothing"
                raise Hint(f"{case}: one all_reduce is allowed; rank {rank} called {said}")
            numbers = math.prod(
                int(size) for size in calls[0][1].partition("[")[2].rstrip("]").split(",") if size
            )
            if numbers > len(losses) + 2:
                raise Hint(f"{case}: you summed {numbers} numbers, {len(losses) + 2} are allowed")
    return "one sum, and everybody knows the mean and the culprit"


WORLD, PAIR = (0, 1, 2, 3), ((0, 1), (2, 3), (0, 2), (1, 3))  # and the tp and dp groups of 2 x 2
CASES = {
    "nobody waits": ([[(WORLD, True)]] * 4, set()),
    "rank 3 has made one call fewer": ([[(WORLD, True), (WORLD, False)]] * 3 + [[(WORLD, True)]], {3}),
    "rank 0 waits for 1, 1 for 3": (
        [[(PAIR[0], False)], [(PAIR[3], False)], [(PAIR[1], True)], [(PAIR[1], True)]],
        {3},
    ),
    "ranks 1 and 2 have not come": ([[(WORLD, False)], [], [], [(WORLD, False)]], {1, 2}),
    "ranks 0 and 1 wait for each other": (
        [[(PAIR[0], False)], [((0, 1, 2), False)], [((0, 1, 2), False)], []],
        set(),
    ),
    "rank 3 has made three calls on other groups": (
        [
            [(WORLD, False)],
            [(PAIR[3], True), (WORLD, False)],
            [(PAIR[1], True), (PAIR[1], True), (WORLD, False)],
            [(PAIR[1], True), (PAIR[1], True), (PAIR[3], True)],
        ],
        {3},
    ),
}


@exercise
def to_blame(function):
    """Those for whom others wait, without those that wait themselves."""
    for case, (records, blamed) in CASES.items():
        found = function([list(calls) for calls in records])
        if not isinstance(found, set):
            raise Hint(f"return a set of ranks, not {found!r:.40}")
        if found != blamed:
            raise Hint(f"{case}: you blame {sorted(found) or 'nobody'}, it is {sorted(blamed) or 'nobody'}")
    return "the ranks for which the others wait"
