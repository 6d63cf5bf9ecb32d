"""The checks of chapter 24: how many ranks a model's states need, and the seconds of a pipeline of unequal stages."""

from ignite_ddl.arguments import is_count
from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.lab import cost, simulate


@exercise
def fewest_ranks(function):
    """The least number of ranks, for each stage of ZeRO, and None where no number is enough."""
    for parameters, stage, memory in (
        (1e9, 0, 80e9), (7e9, 1, 80e9), (7e9, 1, 32e9), (7e9, 2, 32e9), (7e9, 3, 32e9), (7e9, 0, 80e9), (7e9, 2, 14e9),
        (175e9, 3, 80e9), (1e9, 1, 5e9),
    ):  # fmt: skip
        case = f"{parameters / 1e9:g}B parameters, ZeRO-{stage}, {memory / 1e9:g} GB"
        got = function(parameters, stage, memory)
        fits = lambda n: cost.zero_memory(parameters, n, stage).total <= memory  # noqa: E731, B023
        best = next((n for n in range(1, 200) if fits(n)), None)
        if got is not None and not is_count(got):
            raise Hint(f"{case}: return a whole number of ranks or None, not {got!r:.40}")
        if got is None and best is not None:
            raise Hint(f"{case}: {best} ranks are enough")
        if got is not None and best is None:
            raise Hint(f"{case}: what no rank shares is already too much, so no number is enough, not {got}")
        if got is not None and not fits(got):
            each = cost.zero_memory(parameters, got, stage).total / 1e9
            raise Hint(f"{case}: on {got} ranks each holds {each:.1f} GB")
        if got != best:
            raise Hint(f"{case}: fewer than {got} ranks are enough")
    return "not one rank too many"


@exercise
def unequal_stages(function):
    """The time of the simulator's 1F1B, at all numbers of microbatches."""
    for stages in ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 2.0], [0.5, 1.0, 3.0], [1.0, 1.5, 2.0], [2.0]):
        for m in (len(stages), 2 * len(stages), 16):
            thirds = [seconds / 3 for seconds in stages]
            right = simulate.pipeline("1f1b", len(stages), m, thirds, thirds, thirds).seconds
            got = function(list(stages), m)
            case = f"stages of {stages} s, {m} microbatches"
            if isinstance(got, bool) or not isinstance(got, int | float):
                raise Hint(f"{case}: return seconds, a number, not {got!r:.40}")
            if not abs(got - right) <= 0.02 * right:
                mean, slow, turns = sum(stages) / len(stages), max(stages), m + len(stages) - 1
                for what, wrong in (
                    ("every microbatch waits for the slowest stage, not for the mean one", turns * mean),
                    ("filling and draining pass each stage once, and the others are shorter", turns * slow),
                    ("before the first microbatch has come through, and after the last, ranks wait", m * slow),
                ):
                    if abs(got - wrong) < 1e-6 * wrong:
                        raise Hint(f"{case}: {got:.1f} s, the simulator takes {right:.1f}: {what}")
                raise Hint(f"{case}: {got:.1f} s, the simulator takes {right:.1f}")
    return "the slowest stage sets the pace, all stages the first pass"
