"""Natural mistakes in chapter 24's exercises."""


def by_trying(parameters, stage, memory):
    shared = [0, 12, 14, 16][stage]
    return next((n for n in range(1, 1000) if (16 - shared + shared / n) * parameters <= memory), None)


RIGHT = {"fewest_ranks": [by_trying]}
MISTAKES = {
    "fewest_ranks": {
        "return a whole number of ranks or None, not": lambda *given: float(by_trying(*given) or 1),
        "7B parameters, ZeRO-1, 80 GB: 2 ranks are enough": lambda *given: 1 if by_trying(*given) == 1 else None,
        "what no rank shares is already too much": lambda *given: by_trying(*given) or 1000,
        "on 1 ranks each holds 112.0 GB": lambda *given: 1,
        "fewer than 2 ranks are enough": lambda *given: (found := by_trying(*given)) and found + 1,
    },
    "unequal_stages": {
        "return seconds, a number, not None": lambda stages, m: None,
        "4 microbatches: nan s, the simulator takes 7.0": lambda stages, m: float("nan"),
        "every microbatch waits for the slowest stage": lambda stages, m: (
            (m + len(stages) - 1) * sum(stages) / len(stages)
        ),
        "filling and draining pass each stage once, and the others": lambda stages, m: (
            (m + len(stages) - 1) * max(stages)
        ),
        "after the last, ranks wait": lambda stages, m: m * max(stages),
        "stages of [1.0, 1.0, 1.0, 1.0] s, 4 microbatches: 8.0 s": {"(m - 1)": "m"},
    },
}
