"""Chapter 06's checks: what is right passes, and each way to go wrong gets its own hint."""

import ignite.distributed as idist
import pytest
import torch

from ignite_ddl.course.checks import ch06 as checks


def by_distances(errors):
    n = idist.all_reduce(len(errors))
    mean = idist.all_reduce(errors.sum().item()) / n
    return (idist.all_reduce((errors - mean).square().sum().item()) / n) ** 0.5


def by_squares(errors):
    mine = torch.stack(
        [torch.tensor(float(len(errors)), dtype=errors.dtype), errors.sum(), errors.square().sum()]
    )
    n, total, squares = idist.all_reduce(mine).tolist()
    return max(0.0, squares / n - (total / n) ** 2) ** 0.5


@pytest.mark.parametrize("function", [by_distances, by_squares])
def test_std_right(function, capsys):
    assert checks.std_of_all(function)
    assert capsys.readouterr().out.startswith("right: the standard deviation over all rows")


def std_stub(errors):
    raise NotImplementedError


def own(errors):
    return errors.std(correction=0).item() if len(errors) else 0.0


def mean_of_own(errors):
    return idist.all_reduce(own(errors)) / idist.get_world_size()


def one_less(errors):
    n = idist.all_reduce(len(errors))
    mean = idist.all_reduce(errors.sum().item()) / n
    return (idist.all_reduce((errors - mean).square().sum().item()) / (n - 1)) ** 0.5


def only_rank_0(errors):
    value = by_distances(errors)
    return value if idist.get_rank() == 0 else 0.0


def gathers_everything(errors):
    padded = torch.full((16,), float("nan"), dtype=errors.dtype)
    padded[: len(errors)] = errors
    everything = idist.all_gather(padded)
    return everything[~everything.isnan()].std(correction=0).item()


def gathers_sums(errors):
    mine = torch.stack(
        [torch.tensor(float(len(errors)), dtype=errors.dtype), errors.sum(), errors.square().sum()]
    )
    n, total, squares = idist.all_gather(mine).view(-1, 3).sum(0).tolist()
    return max(0.0, squares / n - (total / n) ** 2) ** 0.5


def std_constant(errors):
    return 10**0.5


def std_nothing(errors):
    by_distances(errors)


WRONG_STD = [
    (std_stub, "write the body of std_stub"),
    (
        own,
        "errors [1, 3] and [7, 9]: the standard deviation is 3.162, rank 0 returns 1.000, the mean of the ranks'",
    ),
    (mean_of_own, "how far their means lie apart is lost there"),
    (one_less, "divide by the number of errors, not by one less"),
    (only_rank_0, "rank 1 returns 0.000"),
    (
        gathers_everything,
        "right, but a rank hands 128 bytes to its collectives; three numbers are enough (24 bytes)",
    ),
    (gathers_sums, "right, but a rank is handed 48 bytes, the numbers of every rank"),
    (std_constant, "errors [4] and [0, 0, 0, 8, 8, 4]"),
    (std_nothing, "your function returns nothing"),
]


def named(value):
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("function", "hint"), WRONG_STD, ids=named)
def test_std_wrong(function, hint, capsys):
    assert not checks.std_of_all(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1


def together(right, patience):
    best, waited = -1, 0
    for epoch, mine in enumerate(right, start=1):
        score = idist.all_reduce(mine)
        best, waited = (score, 0) if score > best else (best, waited + 1)
        if waited == patience:
            return epoch
    return len(right)


def test_stop_right(capsys):
    assert checks.stop_epoch(together)
    assert (
        capsys.readouterr().out
        == "right: all ranks stop after the same epoch, and send one number an epoch\n"
    )


def stop_stub(right, patience):
    raise NotImplementedError


def alone(right, patience):
    return checks._stops_after(right, patience)


def first_who_wants(right, patience):
    for epoch in range(1, len(right) + 1):
        wants = checks._stops_after(right[:epoch], patience) == epoch < len(right)
        if idist.all_reduce(int(wants)):
            return epoch
    return len(right)


def rank_0_decides(right, patience):
    mine = checks._stops_after(right, patience) if idist.get_rank() == 0 else 0
    return idist.all_reduce(mine)


def equal_is_better(right, patience):
    best, waited = -1, 0
    for epoch, mine in enumerate(right, start=1):
        score = idist.all_reduce(mine)
        best, waited = (score, 0) if score >= best else (best, waited + 1)
        if waited == patience:
            return epoch
    return len(right)


def sends_the_future(right, patience):
    return checks._stops_after(idist.all_reduce(torch.tensor(right)).tolist(), patience)


def two_numbers(right, patience):
    best, waited = -1, 0
    for epoch, mine in enumerate(right, start=1):
        score = idist.all_reduce(mine) / idist.all_reduce(10)
        best, waited = (score, 0) if score > best else (best, waited + 1)
        if waited == patience:
            return epoch
    return len(right)


def stop_constant(right, patience):
    return 5


def stop_nothing(right, patience):
    together(right, patience)


WRONG_STOPS = [
    (stop_stub, "write the body of stop_stub"),
    (alone, "your ranks stop after epochs [5, 4]; the later ones wait for ever"),
    (first_who_wants, "and stop after epoch"),
    (rank_0_decides, "rank 0 alone would do that"),
    (equal_is_better, "and stop after epoch 5, yours after 6"),
    (sends_the_future, "until epoch 5 one number an epoch is enough (40 bytes)"),
    (two_numbers, "right, but a rank hands 80 bytes to its collectives"),
    (stop_constant, "yours after 5"),
    (stop_nothing, "your function returns nothing"),
]


@pytest.mark.parametrize(("function", "hint"), WRONG_STOPS, ids=named)
def test_stop_wrong(function, hint, capsys):
    assert not checks.stop_epoch(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1


def test_ranks_that_wait_for_each_other(capsys, monkeypatch):
    def leaves_at_its_own_time(right, patience):
        for epoch, mine in enumerate(right, start=1):
            idist.all_reduce(mine)
            if checks._stops_after(right, patience) == epoch:
                return epoch
        return len(right)

    monkeypatch.setattr(checks, "WAIT_SECONDS", 3)
    assert not checks.stop_epoch(leaves_at_its_own_time)
    assert "your ranks wait for each other" in capsys.readouterr().out
