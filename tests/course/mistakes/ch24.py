"""Natural mistakes in chapter 24's exercises."""

import math


def parts(stage):
    """Bytes a parameter that each rank holds whole, and that are shared out."""
    shared = [0, 12, 14, 16][stage]
    return 16 - shared, shared


def fewest(parameters, stage, memory):
    whole, shared = parts(stage)
    room = memory - whole * parameters
    if room <= 0:
        return 1 if room == 0 and not shared else None
    n = max(1, math.ceil(shared * parameters / room))
    return n if shared or room >= 0 else None


def by_trying(parameters, stage, memory):
    whole, shared = parts(stage)
    return next((n for n in range(1, 1000) if (whole + shared / n) * parameters <= memory), None)


def bubble(stages, m):
    return (m - 1) * max(stages) + sum(stages)


RIGHT = {"fewest_ranks": [fewest, by_trying], "unequal_stages": [bubble]}
MISTAKES = {
    "fewest_ranks": {
        "return a whole number of ranks or None, not": lambda *given: float(by_trying(*given) or 1),
        "7B parameters, stage 1, 80 GB: 2 ranks are enough": lambda *given: (
            found if (found := by_trying(*given)) == 1 else None
        ),
        "what no rank shares is already too much": lambda *given: by_trying(*given) or 1000,
        "on 1 ranks each holds 112.0 GB": lambda *given: 1,
        "fewer than 2 ranks are enough": lambda *given: (found := by_trying(*given)) and found + 1,
    },
    "unequal_stages": {
        "return seconds, a number, not None": lambda stages, m: None,
        "every microbatch waits for the slowest stage": lambda stages, m: (
            (m + len(stages) - 1) * sum(stages) / len(stages)
        ),
        "filling and draining pass each stage once, and the others": lambda stages, m: (
            (m + len(stages) - 1) * max(stages)
        ),
        "after the last, ranks wait": lambda stages, m: m * max(stages),
        "stages of [1.0, 1.0, 1.0, 1.0] s, 4 microbatches: 8.0 s": lambda stages, m: bubble(stages, m + 1),
    },
}
