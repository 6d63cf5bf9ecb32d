"""The checks of chapter 22: the rank with the NaN, in one sum; and the rank for which the others wait."""

import math

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import counted_on_ranks


@exercise(
    cases=(
        ([1.0, 2.0, 6.0], 3.0, []),
        ([1.0, 2.0, math.nan], 1.5, [2]),
        ([math.inf, 4.0, -math.inf], 4.0, [0, 2]),
        ([math.nan, math.nan], math.nan, [0, 1]),
    ),
    about=lambda losses, mean, bad: f"losses {', '.join(map(str, losses))}",
    right="one sum, and everybody knows the mean and the culprit",
)
def mean_and_bad_ranks(function, losses, mean, bad):
    """Every rank knows both, after one sum of few numbers."""
    ranks = counted_on_ranks(function, [(loss,) for loss in losses], timeout=10)
    for rank, (found, traffic) in enumerate(ranks):
        if not isinstance(found, tuple) or len(found) != 2:
            raise Hint(f"return the mean and a list of ranks, not {found!r:.40}")
        if list(found[1]) != bad:
            raise Hint(f"rank {rank} says that {found[1]!r:.40} are not finite; it is {bad}")
        if not (abs(found[0] - mean) <= 1e-5 or math.isnan(found[0]) and math.isnan(mean)):
            raise Hint(f"rank {rank} has {found[0]:.3g} as the mean of the finite ones, not {mean}")
        if traffic.ops != ["all_reduce"]:
            raise Hint(f"one all_reduce is allowed; rank {rank} called {', '.join(traffic.ops) or 'nothing'}")
        if traffic.numbers > len(losses) + 2:
            raise Hint(f"you summed {traffic.numbers} numbers, {len(losses) + 2} are allowed")


WORLD, PAIR = (0, 1, 2, 3), ((0, 1), (2, 3), (0, 2), (1, 3))  # and the tp and dp groups of 2 x 2
CASES = {
    "nobody waits": ([[(WORLD, True)]] * 4, set()),
    "rank 3 has made one call fewer": ([[(WORLD, True), (WORLD, False)]] * 3 + [[(WORLD, True)]], {3}),
    "rank 0 waits for 1, 1 for 3": (
        [[(PAIR[0], False)], [(PAIR[3], False)], [(PAIR[1], True)], [(PAIR[1], True)]],
        {3},
    ),
    "ranks 1 and 2 have not come": ([[(WORLD, False)], [], [], [(WORLD, False)]], {1, 2}),
    "ranks 0 and 1 wait for each other": ([[(PAIR[0], False)], [((0, 1, 2), False)], [((0, 1, 2), False)], []], set()),
    "rank 1 has broadcast and gone on, rank 2 has not come": (
        [[(PAIR[0], True), ((0, 1, 2), False)], [(PAIR[0], True), ((0, 1, 2), True)], []],
        {2},
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
