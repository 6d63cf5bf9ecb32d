"""Natural mistakes in chapter 13's exercises."""

from functools import partial


def by_version(log, since="pull", counted="push"):
    """What is counted since this worker's last pull, or last push."""
    found, count, last = [], 0, {}
    for worker, kind in log:
        if kind == "push":
            found.append(count - last.get(worker, 0))
        count += kind == counted
        if kind == since:
            last[worker] = count
    return found


def n_of(arrivals, needed, late=lambda pulled, version: pulled < version, absent=0, empty=True, rest=False):
    means, dropped, held = [], [], []
    for place, (pulled, gradient) in enumerate(arrivals):
        if late(pulled, len(means)):
            dropped.append(place)
            continue
        held.append(gradient)
        if len(held) % needed == 0:
            means.append(sum(held) / (len(held) + absent))
            held = [] if empty else held
    return means + ([sum(held) / len(held)] if rest and held else []), dropped


MISTAKES = {
    "staleness": {
        "return a list of 3 numbers": lambda log: by_version(log)[:1],
        "your staleness is 1, it is 0": lambda log: [1] * sum(kind == "push" for _, kind in log),
        "count from this worker's pull": partial(by_version, since="push"),
        "its own push is not in between": lambda log: [staleness + 1 for staleness in by_version(log)],
        "those are pulls": partial(by_version, counted="pull"),
        "subtract the version": lambda log: list(range(len(by_version(log)))),
    },
    "n_of_n_plus_b": {
        "return two lists": lambda arrivals, n: n_of(arrivals, n)[0],
        "1 too late, and you drop none": partial(n_of, late=lambda pulled, version: False),
        "3 + 1, 7 gradients: 1 too late": partial(n_of, late=lambda pulled, version: pulled < version - 1),
        "you make 1 updates, it is 2": partial(
            n_of, late=lambda pulled, version: pulled < version or pulled == 1
        ),
        "the last ones are fewer": partial(n_of, rest=True),
        "late are [3]": lambda arrivals, n: (n_of(arrivals, n)[0], [0]),
        "yours is their sum": partial(n_of, absent=-2),
        "not by all workers": partial(n_of, absent=1),
        "starts from an empty hand": partial(n_of, empty=False),
    },
}
