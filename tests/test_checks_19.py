"""The exercises of chapter 19: what is right passes, and each natural mistake gets a hint that helps."""

import pytest
from checking import said, stub, wrong

from ignite_ddl.course import orders
from ignite_ddl.course.checks import ch19 as checks
from ignite_ddl.pipeline.schedules import schedule_actions

# --- weight stashing ------------------------------------------------------------------------------------


def stashed(actions, weights, gradient, update):
    used = {}
    for action in actions:
        m = int(action[1:])
        if action[0] == "F":
            used[m] = weights
        else:
            weights = update(weights, gradient(used.pop(m), m))
    return weights


def step_by_step(actions, weights, gradient, update):
    used = {}
    for action in actions:
        kind, m = action[0], int(action[1:])
        if kind == "F":
            used[m] = weights
            continue
        old = used[m]
        del used[m]
        found = gradient(old, m)
        weights = update(weights, found)
    return weights


def without(actions, weights, gradient, update):
    for action in actions:
        if action[0] == "B":
            weights = update(weights, gradient(weights, int(action[1:])))
    return weights


def all_kept(actions, weights, gradient, update):
    used, versions = {}, [weights]
    for action in actions:
        m = int(action[1:])
        if action[0] == "F":
            used[m] = len(versions) - 1
        else:
            versions.append(update(versions[-1], gradient(versions[used[m]], m)))
    return versions[-1]


def old_updated(actions, weights, gradient, update):
    used = {}
    for action in actions:
        m = int(action[1:])
        if action[0] == "F":
            used[m] = weights
        else:
            old = used.pop(m)
            weights = update(old, gradient(old, m))
    return weights


def half(actions, weights, gradient, update):
    return stashed(actions[: len(actions) // 2], weights, gradient, update)


def returns_the_first(actions, weights, gradient, update):
    stashed(actions, weights, gradient, update)
    return weights


@pytest.mark.parametrize("function", [stashed, step_by_step])
def test_weight_stashing(function, capsys):
    assert checks.run_stage(function)
    assert said(capsys).startswith("right: ")


WRONG_STASHES = {
    "write the body": stub,
    "stage 0 of 4: you take the gradient of microbatch 1 with version 1 of the weights, its forward pass used "
    "version 0": without,
    "before the backward pass of microbatch 5 you hold versions 1, 2, 3, 4, 5; 4 versions are needed": all_kept,
    "you add the gradient of microbatch 1 to version 0; the newest is 1": old_updated,
    "updates after 12 backward passes": half,
    "return the newest weights, version 12": returns_the_first,
    "call gradient(weights, m) with weights": lambda actions, weights, gradient, update: gradient(0, weights),
    "call update(weights, gradient) with weights": lambda actions, weights, gradient, update: update(
        weights, 0
    ),
}


@pytest.mark.parametrize("hint", WRONG_STASHES)
def test_a_wrong_stash_gets_its_hint(hint, capsys):
    wrong(checks.run_stage, WRONG_STASHES[hint], hint, capsys)


# --- the order ------------------------------------------------------------------------------------------


def ordered(rank, n_ranks, n_microbatches, lag, ahead=None):
    """As many forward passes as ``ahead``, then one input gradient and one forward; weights ``lag`` behind."""
    ahead = min(n_microbatches, n_ranks - rank if ahead is None else ahead)
    order = [f"F{m}" for m in range(ahead)]
    for m in range(n_microbatches):
        order.append(f"I{m}")
        order += [f"W{m - lag}"] * (m >= lag)
        order += [f"F{ahead + m}"] * (ahead + m < n_microbatches)
    return order + [f"W{m}" for m in range(max(0, n_microbatches - lag), n_microbatches)]


def torchs(rank, n_ranks, n_microbatches):
    actions = schedule_actions("interleaved_zero_bubble", n_ranks, n_microbatches, n_chunks=1)
    return [f"{kind}{m}" for kind, _, m in actions[rank]]


@pytest.mark.parametrize("made", [list, iter])
def test_the_order_that_fills_the_bubble(made, capsys):
    assert checks.fill_the_bubble(lambda rank, p, m: made(ordered(rank, p, m, lag=rank)))
    assert said(capsys).startswith("right: ")


def test_torchs_order_is_one_that_fills_the_bubble(capsys):
    """Where torch can do the numbers of the check: m a multiple of m // p."""
    for p, m in ((4, 8), (4, 12), (3, 3)):
        ranks = [orders.read(torchs(rank, p, m), "FIW", rank, m, "") for rank in range(p)]
        assert orders.play(ranks, "") == 3 * m + p - 1
        assert max(map(orders.most_kept, ranks)) <= p


WRONG_ORDERS = {
    "write the body": stub,
    "return a list of names": lambda rank, p, m: [0],
    "rank 0 has a pass 'B0'": lambda rank, p, m: ["F0", "B0"],
    "rank 0 leaves out W7": lambda rank, p, m: ordered(rank, p, m, lag=rank)[:-1],
    "rank 0 has 25 passes, 24 are there to do": lambda rank, p, m: [*ordered(rank, p, m, lag=rank), "W0"],
    "nobody can go on, rank 0 stands before W7": lambda rank, p, m: ordered(rank, p, m, lag=rank)[::-1],
    "4 ranks, 8 microbatches: your step takes 30 time units, 27 can be had": lambda rank, p, m: ordered(
        rank, p, m, lag=0
    ),
    "27 time units, as it should, but rank 0 keeps the activations of 5 microbatches at once; 4": lambda rank, p, m: (
        ordered(rank, p, m, lag=rank + 1)
    ),
    "your step takes 30 time units": lambda rank, p, m: ordered(rank, p, m, lag=m),
    "can be had": lambda rank, p, m: ordered(rank, p, m, lag=rank, ahead=1),
}


@pytest.mark.parametrize("hint", WRONG_ORDERS)
def test_a_wrong_order_gets_its_hint(hint, capsys):
    wrong(checks.fill_the_bubble, WRONG_ORDERS[hint], hint, capsys)
