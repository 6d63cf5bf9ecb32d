"""The checks of chapter 19: weight stashing on one stage, and an order that fills the bubble."""

import weakref

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.orders import most_kept, play, read
from ignite_ddl.lab.orders import schedule_actions


class _Weights:
    """Stands for a stage's weights: a version that a learner can hold on to and hand on, and nothing else."""

    def __init__(self, version, alive):
        self.version = version
        if version:  # the first one is the caller's too: it may stay
            alive.add(self)


@exercise
def run_stage(function):
    for n_ranks, n_microbatches in ((4, 12), (2, 6), (3, 8)):
        for stage in range(n_ranks):
            _one_stage(function, stage, n_ranks, n_microbatches)
    return "each gradient is of the weights that its forward pass used, and no backward pass finds one too many kept"


def _one_stage(function, stage, n_ranks, n_microbatches):
    case = f"stage {stage} of {n_ranks}"
    actions = [f"{kind}{m}" for kind, _, m in schedule_actions("1f1b", n_ranks, n_microbatches)[stage]]
    used, newest = {}, 0
    for action in actions:
        if action[0] == "F":
            used[int(action[1:])] = newest
        else:
            newest += 1
    alive, asked, updates = weakref.WeakSet(), [], []

    def gradient(weights, m):
        if not isinstance(weights, _Weights) or m not in used:
            raise Hint("call gradient(weights, m) with weights and the number of a microbatch")
        if weights.version != used[m]:
            raise Hint(
                f"{case}: you take the gradient of microbatch {m} with version {weights.version} of the weights, "
                f"its forward pass used version {used[m]}"
            )
        if len(alive) > n_ranks - stage:
            held = ", ".join(str(version) for version in sorted(one.version for one in alive))
            raise Hint(
                f"{case}: before the backward pass of microbatch {m} you hold versions {held}; "
                f"{n_ranks - stage} versions are needed"
            )
        asked.append(m)
        return ("gradient", m)

    def update(weights, found):
        if not isinstance(weights, _Weights) or not isinstance(found, tuple):
            raise Hint("call update(weights, gradient) with weights and what gradient(...) returned")
        if weights.version != len(updates):
            raise Hint(
                f"{case}: you add the gradient of microbatch {found[1]} to version {weights.version}; the newest is "
                f"{len(updates)}, and the updates after {weights.version} are lost"
            )
        updates.append(found[1])
        return _Weights(len(updates), alive)

    last = function(list(actions), _Weights(0, alive), gradient, update)
    if updates != list(range(n_microbatches)) or asked != updates:
        raise Hint(f"{case}: {len(updates)} updates after {n_microbatches} backward passes")
    if not isinstance(last, _Weights) or last.version != n_microbatches:
        raise Hint(f"{case}: return the newest weights, version {n_microbatches}")


@exercise(
    cases=((4, 8), (2, 5), (3, 3), (4, 12), (1, 3)),
    about="{n_ranks} ranks, {n_microbatches} microbatches",
    right="a third of 1F1B's bubble, and no rank keeps more than 1F1B's first",
)
def fill_the_bubble(function, n_ranks, n_microbatches):
    orders = [read(function(rank, n_ranks, n_microbatches), "FIW", rank, n_microbatches) for rank in range(n_ranks)]
    seconds, least = play(orders), 3 * n_microbatches + n_ranks - 1
    kept = [most_kept(order) for order in orders]
    fullest = max(range(n_ranks), key=lambda rank: kept[rank])
    if seconds > least:
        raise Hint(f"your step takes {seconds} time units, {least} can be had")
    if kept[fullest] > n_ranks:
        raise Hint(
            f"your step takes {seconds} time units, as it should, but rank {fullest} keeps the activations "
            f"of {kept[fullest]} microbatches at once; {n_ranks} are enough"
        )
