"""Natural mistakes in chapter 19's exercises."""

LAST = "n_microbatches)]"
RIGHT = {"fill_the_bubble": [{"return order": "return iter(order", LAST: f"{LAST})"}]}
MISTAKES = {
    "run_stage": {
        "gradient(weights, m) with weights": lambda actions, weights, gradient, update: gradient(0, weights),
        "you take the gradient of microbatch 1 with version 1 of the weights": {"used.pop(m)": "weights"},
        "of microbatch 5 you hold versions 1, 2, 3, 4, 5; 4 versions are needed": {"used.pop(m)": "used[m]"},
        "call update(weights, gradient)": lambda actions, weights, gradient, update: update(weights, 0),
        "you add the gradient of microbatch 1 to version 0": {"update(weights": "update(used[m]"},
        "updates after 12": {"in actions": "in actions[: len(actions) // 2]"},
        "return the newest weights, version 12": {
            "used =": "first = weights\n    used =",
            "return weights": "return first",
        },
    },
    "fill_the_bubble": {
        "rank 0 has a pass 'B0'": lambda rank, p, m: ["F0", "B0"],
        "rank 0 leaves out W7": {"return order": "return order[:-1]"},
        "nobody can go on, rank 0 stands before W7": {"return order": "return (order", LAST: f"{LAST})[::-1]"},
        "4 ranks, 8 microbatches: your step takes 30 time units, 27": {
            "m >= rank": "m >= 0",
            "{m - rank}": "{m}",
            "n_microbatches - rank": "n_microbatches",
        },
        "27 time units, as it should, but rank 0": {
            "m >= rank": "m > rank",
            "{m - rank}": "{m - rank - 1}",
            "n_microbatches - rank": "n_microbatches - rank - 1",
        },
    },
}
