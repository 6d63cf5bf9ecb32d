"""The checks of chapter 13: staleness read off a log, and the server of N + b."""

import random

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.lab import simulate

BY_HAND = [(0, "pull"), (1, "pull"), (1, "push"), (1, "pull"), (0, "push"), (1, "push")]


def _log(n_workers, seed):
    """What a server hears of asynchronous workers: a push, then, perhaps after others, the next pull."""
    source = random.Random(seed)
    log, held = [], set()
    for _ in range(40):
        worker = source.randrange(n_workers)
        log.append((worker, "push" if worker in held else "pull"))
        held ^= {worker}
    return log


def _count(log, start, of_others=False, what="push"):
    """For each push: what the log holds since ``start``, "pull" or "push", of its worker."""
    counts, since = [], {}
    for place, (worker, kind) in enumerate(log):
        if kind == "push":
            between = log[since.get(worker, -1) + 1 : place]
            counts.append(sum(k == what and (not of_others or w != worker) for w, k in between))
        if kind == start:
            since[worker] = place
    return counts


@exercise
def staleness(function):
    for log in (BY_HAND, *(_log(n, seed) for n, seed in ((2, 0), (3, 1), (5, 2)))):
        found, right = function(list(log)), _count(log, "pull")
        n_workers = 1 + max(worker for worker, _ in log)
        if not isinstance(found, list | tuple) or len(found) != len(right):
            raise Hint(f"{len(right)} gradients were pushed: return a list of {len(right)} numbers")
        if list(found) == right:
            continue
        place = next(i for i, pair in enumerate(zip(found, right, strict=True)) if pair[0] != pair[1])
        worker = [w for w, kind in log if kind == "push"][place]
        text = (
            f"{n_workers} workers, gradient {place} (of worker {worker}): your staleness is {found[place]}, "
            f"it is {right[place]}"
        )
        if list(found) == _count(log, "push", of_others=True):
            text += "; count from this worker's pull, not from its last push: it has seen what came between"
        elif list(found) == [count + 1 for count in right]:
            text += "; its own push is not in between"
        elif list(found) in (_count(log, "pull", what="pull"), _count(log, "pull", True, "pull")):
            text += "; those are pulls, and only a push changes the weights"
        elif list(found) == list(range(len(right))):
            text += "; that is the version that it meets, subtract the version that it was computed with"
        raise Hint(text)
    return "the updates between a pull and its push, for each gradient"


def _n_of(arrivals, needed):
    """As the rule says: the means and the places of the dropped."""
    means, dropped, held = [], [], []
    for place, (pulled, gradient) in enumerate(arrivals):
        if pulled < len(means):
            dropped.append(place)
            continue
        held.append(gradient)
        if len(held) == needed:
            means.append(sum(held) / needed)
            held = []
    return means, dropped


def _arrivals(n_workers, backup, seed):
    """(version pulled, gradient) in order of arrival, of a simulated run; the last group stays open."""
    draw = simulate.Lognormal(1.0, 0.6, seed)
    run = simulate.parameter_server(n_workers, draw, 7, mode="backup", backup=backup)
    gradients = [(g.pushed_at, g.worker, g.pulled) for g in [*run.updates, *run.dropped]]
    order = sorted(gradients)
    open_group = [(order[-1][0] + 1, 0, 7)]  # one more gradient, of the newest version
    return [(pulled, float(2**worker + place)) for place, (_, worker, pulled) in enumerate(order + open_group)]


@exercise
def n_of_n_plus_b(function):
    cases = [("3 + 1", 3, [(0, 1.0), (0, 2.0), (0, 6.0), (0, 100.0), (1, 4.0), (1, 4.0), (1, 1.0)])]
    cases += [(f"{n - b} + {b}", n - b, _arrivals(n, b, seed)) for n, b, seed in ((4, 1, 0), (6, 2, 1), (5, 3, 2))]
    for name, needed, arrivals in cases:
        answer = function(list(arrivals), needed)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise Hint("return two lists: the updates, and the places of the gradients that were dropped")
        means, dropped = (list(part) for part in answer)
        right, late = _n_of(arrivals, needed)
        where = f"{name}, {len(arrivals)} gradients"
        if not dropped and late:
            raise Hint(f"{where}: {len(late)} too late, and you drop none")
        if len(means) != len(right):
            text = f"{where}: you make {len(means)} updates, it is {len(right)}"
            if len(means) == len(right) + 1:
                text += f"; an update needs {needed} gradients, and the last ones are fewer"
            raise Hint(text)
        if dropped != late:
            raise Hint(
                f"{where}: you drop those at the places {dropped}, late are {late}: "
                "a gradient is late when its version is no longer the newest"
            )
        for version, (mean, value) in enumerate(zip(means, right, strict=True)):
            if not abs(mean - value) <= 1e-9 * abs(value):
                text = f"{where}: update {version} is {mean:g}, the mean of its {needed} gradients is {value:g}"
                if abs(mean - value * needed) <= 1e-9 * abs(mean):
                    text += "; yours is their sum"
                elif mean < value and version == 0:
                    text += "; divide by those that came, not by all workers"
                elif version:
                    text += "; each update starts from an empty hand"
                raise Hint(text)
    return f"{needed} of each version make an update, and whoever comes later is dropped"
