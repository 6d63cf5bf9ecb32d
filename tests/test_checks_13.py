"""The checks of chapter 13: right answers pass, each tempting wrong one gets the hint that helps."""

import pytest
from checking import stub

from ignite_ddl.course.checks import ch13 as checks


def by_version(log):
    version, pulled, found = 0, {}, []
    for worker, kind in log:
        if kind == "pull":
            pulled[worker] = version
        else:
            found.append(version - pulled[worker])
            version += 1
    return found


def since_own_push(log):
    found, version, last = [], 0, {}
    for worker, kind in log:
        if kind == "push":
            found.append(version - last.get(worker, 0))
            version += 1
            last[worker] = version
    return found


def pulls_of_others(log):
    found, since = [], {}
    for place, (worker, kind) in enumerate(log):
        if kind == "pull":
            since[worker] = place
        else:
            found.append(sum(k == "pull" for _, k in log[since[worker] + 1 : place]))
    return found


def test_staleness_right(capsys):
    assert checks.staleness(by_version)
    assert capsys.readouterr().out.startswith("right: the updates between a pull and its push")


WRONG_STALENESS = {
    "stub": (stub, "write the body of stub"),
    "constant": (lambda log: [1] * sum(kind == "push" for _, kind in log), "your staleness is 1, it is 0"),
    "one for all": (lambda log: by_version(log)[:1], "return a list of 3 numbers"),
    "last push": (since_own_push, "count from this worker's pull"),
    "its own": (lambda log: [s + 1 for s in by_version(log)], "its own push is not in between"),
    "pulls": (pulls_of_others, "those are pulls"),
    "version": (lambda log: list(range(len(by_version(log)))), "subtract the version"),
}


@pytest.mark.parametrize("name", WRONG_STALENESS)
def test_staleness_wrong(name, capsys):
    function, hint = WRONG_STALENESS[name]
    assert not checks.staleness(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1


def n_of(
    arrivals, needed, drop=True, divide_by=None, empty=True, rest=False, late=lambda pulled, v: pulled < v
):
    means, dropped, held = [], [], []
    for place, (pulled, gradient) in enumerate(arrivals):
        if drop and late(pulled, len(means)):
            dropped.append(place)
            continue
        held.append(gradient)
        if len(held) % needed == 0:
            means.append(sum(held) / (divide_by or (lambda n: n))(len(held)))
            if empty:
                held = []
    if rest and held:
        means.append(sum(held) / len(held))
    return means, dropped


def test_n_of_n_plus_b_right(capsys):
    assert checks.n_of_n_plus_b(n_of)
    assert capsys.readouterr().out.startswith("right: 2 of each version make an update")


WRONG_N_OF = {
    "stub": (stub, "write the body of stub"),
    "means only": (lambda a, n: n_of(a, n)[0], "return two lists"),
    "never drops": (lambda a, n: n_of(a, n, drop=False), "1 too late, and you drop none"),
    "sum": (lambda a, n: n_of(a, n, divide_by=lambda n: 1), "yours is their sum"),
    "all workers": (lambda a, n: n_of(a, n, divide_by=lambda n: n + 1), "not by all workers"),
    "keeps old ones": (lambda a, n: n_of(a, n, empty=False), "starts from an empty hand"),
    "the rest": (lambda a, n: n_of(a, n, rest=True), "the last ones are fewer"),
    "a version of grace": (
        lambda a, n: n_of(a, n, late=lambda pulled, v: pulled < v - 1),
        "3 + 1, 7 gradients: 1 too late, and you drop none",
    ),
    "too strict": (
        lambda a, n: n_of(a, n, late=lambda pulled, v: pulled < v or pulled == 1),
        "you make 1 updates, it is 2",
    ),
    "wrong places": (lambda a, n: (n_of(a, n)[0], [0]), "late are [3]"),
}


@pytest.mark.parametrize("name", WRONG_N_OF)
def test_n_of_n_plus_b_wrong(name, capsys):
    function, hint = WRONG_N_OF[name]
    assert not checks.n_of_n_plus_b(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1


def test_the_cases_hold_late_gradients_and_an_open_group():
    for n, b, seed in ((4, 1, 0), (6, 2, 1), (5, 3, 2)):
        arrivals = checks._arrivals(n, b, seed)
        means, dropped = checks._n_of(arrivals, n - b)
        assert len(means) == 7
        assert dropped
        assert arrivals[-1][0] == 7
