"""Natural mistakes in chapter 13's exercises."""

MISTAKES = {
    "staleness": {
        "return a list of 3 numbers": {"return answer": "return answer[:1]"},
        "your staleness is 1, it is 0": lambda log: [1] * sum(kind == "push" for _, kind in log),
        "count from this worker's pull": {
            "pulled[worker] = version": "pass",
            "pulled[worker])": "pulled.get(worker, 0))",
            "version += 1": "pulled[worker] = version = version + 1",
        },
        "its own push is not in between": {"version - pulled": "version + 1 - pulled"},
        "those are pulls": {"            version += 1\n": "", "[worker] = version": "[worker] = version = version + 1"},
        "subtract the version": {" - pulled[worker]": ""},
    },
    "n_of_n_plus_b": {
        "return two lists": {"return updates, dropped": "return updates"},
        "1 too late, and you drop none": {"version < len(updates)": "False"},
        "3 + 1, 7 gradients: 1 too late": {"version < len(updates)": "version < len(updates) - 1"},
        "you make 1 updates, it is 2": {"version < len(updates)": "version < len(updates) or version == 1"},
        "the last ones are fewer": {"return updates": "return updates + ([mean(hand)] if hand else [])"},
        "late are [3]": {"return updates, dropped": "return updates, [0]"},
        "update 0 is nan, the mean of its 3 gradients is 3": {"mean(": "float('nan') * mean("},
        "yours is their sum": {"mean(": "sum("},
        "not by all workers": {"mean(hand)": "sum(hand) / (len(hand) + 1)"},
        "starts from an empty hand": {"            hand = []\n": "", "== needed": "% needed == 0"},
    },
}
