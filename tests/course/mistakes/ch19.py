"""Natural mistakes in chapter 19's exercises."""

from functools import partial


def stashed(actions, weights, gradient, update, newest=lambda old, now: now, stash=True, keep=False):
    used, kept = {}, []
    for action in actions:
        m = int(action[1:])
        if action[0] == "F":
            used[m] = weights
            continue
        kept += [weights] * keep
        old = used.pop(m) if stash else weights
        weights = update(newest(old, weights), gradient(old, m))
        del old
    return weights


def returns_the_first(actions, weights, gradient, update):
    stashed(actions, weights, gradient, update)
    return weights


def ordered(rank, n_ranks, n_microbatches, lag=None):
    """Forward passes, then one input gradient and one forward; weight gradients ``lag`` behind."""
    ahead, lag = min(n_microbatches, n_ranks - rank), rank if lag is None else lag(rank)
    order = [f"F{m}" for m in range(ahead)]
    for m in range(n_microbatches):
        order.append(f"I{m}")
        order += [f"W{m - lag}"] * (m >= lag)
        order += [f"F{ahead + m}"] * (ahead + m < n_microbatches)
    return order + [f"W{m}" for m in range(max(0, n_microbatches - lag), n_microbatches)]


RIGHT = {"fill_the_bubble": [lambda *args: iter(ordered(*args))]}
MISTAKES = {
    "run_stage": {
        "gradient(weights, m) with weights": lambda actions, weights, gradient, update: gradient(0, weights),
        "you take the gradient of microbatch 1 with version 1 of the weights": partial(stashed, stash=False),
        "of microbatch 5 you hold versions 1, 2, 3, 4, 5; 4 versions are needed": partial(stashed, keep=True),
        "call update(weights, gradient)": lambda actions, weights, gradient, update: update(weights, 0),
        "you add the gradient of microbatch 1 to version 0": partial(stashed, newest=lambda old, now: old),
        "updates after 12": lambda actions, *args: stashed(actions[: len(actions) // 2], *args),
        "return the newest weights, version 12": returns_the_first,
    },
    "fill_the_bubble": {
        "rank 0 has a pass 'B0'": lambda rank, p, m: ["F0", "B0"],
        "rank 0 leaves out W7": lambda rank, p, m: ordered(rank, p, m)[:-1],
        "nobody can go on, rank 0 stands before W7": lambda rank, p, m: ordered(rank, p, m)[::-1],
        "4 ranks, 8 microbatches: your step takes 30 time units, 27": partial(ordered, lag=lambda rank: 0),
        "27 time units, as it should, but rank 0": partial(ordered, lag=lambda rank: rank + 1),
    },
}
