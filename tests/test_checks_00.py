"""Chapter 00's checks: what is right passes, and each way to go wrong gets its own hint."""

import ignite.distributed as idist
import pytest

from ignite_ddl.course.checks import ch00 as checks


def cut(n_rows, world_size, rank):
    small, more = divmod(n_rows, world_size)
    first = rank * small + min(rank, more)
    return range(first, first + small + (rank < more))


def last_ranks_first(n_rows, world_size, rank):
    return range(rank * n_rows // world_size, (rank + 1) * n_rows // world_size)


@pytest.mark.parametrize("function", [cut, lambda *a: list(cut(*a)), last_ranks_first])
def test_rows_right(function, capsys):
    assert checks.rows_of_rank(function)
    assert capsys.readouterr().out.startswith("right: every row has one rank")


WRONG_ROWS = {
    "dropped": (
        lambda n, w, r: range(r * (n // w), (r + 1) * (n // w)),
        "no rank has row 8; your ranks hold 2, 2",
    ),
    "padded": (
        lambda n, w, r: range(r * -(-n // w), (r + 1) * -(-n // w)),
        "10 rows on 4 ranks: there is no row 10",
    ),
    "chunks": (lambda n, w, r: range(r * -(-n // w), min(n, (r + 1) * -(-n // w))), "3, 3, 3 and 1 rows"),
    "strided": (lambda n, w, r: range(r, n, w), "not in order"),
    "all": (lambda n, w, r: range(n), "row 0 is held twice, by ranks 0, 1, 2 and 3"),
    "rest to last": (
        lambda n, w, r: range(r * (n // w), n if r == w - 1 else (r + 1) * (n // w)),
        "2 and 4 rows",
    ),
    "constant": (lambda n, w, r: [2, 3], "no rank has row 0"),
    "nothing": (lambda n, w, r: None, "TypeError"),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_rows_wrong(name, capsys):
    function, hint = WRONG_ROWS[name]
    assert not checks.rows_of_rank(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1


def as_two_numbers(local_mean, n_rows):
    return idist.all_reduce(local_mean * n_rows) / idist.all_reduce(n_rows)


def as_a_pair(local_mean, n_rows):
    import torch

    total, rows = idist.all_reduce(torch.tensor([local_mean * n_rows, n_rows]))  # float32
    return total / rows


@pytest.mark.parametrize("function", [as_two_numbers, as_a_pair])
def test_mean_right(function, capsys):
    assert checks.mean_of_all(function)
    assert capsys.readouterr().out == "right: the true mean on every rank, and a rank sends two numbers\n"


def stub(local_mean, n_rows):
    raise NotImplementedError


def naive(local_mean, n_rows):
    return idist.all_reduce(local_mean) / idist.get_world_size()


def alone(local_mean, n_rows):
    return local_mean


def only_on_rank_0(local_mean, n_rows):
    mean = as_two_numbers(local_mean, n_rows)
    return mean if idist.get_rank() == 0 else 0.0


def gathered(local_mean, n_rows):
    return sum(idist.all_gather(local_mean * n_rows)) / idist.all_reduce(n_rows)


def wasteful(local_mean, n_rows):
    idist.all_reduce(0.0)
    return as_two_numbers(local_mean, n_rows)


def constant(local_mean, n_rows):
    return 5.5


def nothing(local_mean, n_rows):
    idist.all_reduce(local_mean)


WRONG_MEANS = [
    (stub, "write the body of stub"),
    (
        naive,
        "with 3, 3, 2 and 2 rows the mean is 5.5, yours is 6: the mean of the four means gives every rank",
    ),
    (alone, "with 3, 3, 2 and 2 rows the mean is 5.5, yours is 2\n"),
    (only_on_rank_0, "rank 0 returns 5.5, rank 1 returns 0: all need the mean"),
    (gathered, "you used all_gather; idist.all_reduce is enough"),
    (wasteful, "right, but a rank sends 3 numbers; two are enough"),
    (constant, "with 1, 2, 3 and 4 rows the mean is 4, yours is 5.5"),
    (nothing, "your function returns nothing"),
]


@pytest.mark.parametrize(("function", "hint"), WRONG_MEANS, ids=lambda value: getattr(value, "__name__", ""))
def test_mean_wrong(function, hint, capsys):
    assert not checks.mean_of_all(function)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ")
    assert hint in out
    assert out.count("\n") == 1


def test_mean_that_waits(capsys, monkeypatch):
    def only_rank_0_calls(local_mean, n_rows):
        return idist.all_reduce(local_mean) if idist.get_rank() == 0 else local_mean

    monkeypatch.setattr(checks, "WAIT_SECONDS", 2)
    assert not checks.mean_of_all(only_rank_0_calls)
    assert "your ranks wait for each other" in capsys.readouterr().out
