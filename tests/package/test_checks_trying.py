"""What a check tries may fail in a user's code; where it fails in ours, that is said."""

import warnings

import pytest
import torch
from torch import nn

from ignite_ddl.checks import trying
from ignite_ddl.checks.rows_alone import rows_depend_on_each_other
from ignite_ddl.checks.trying import may_fail
from ignite_ddl.structure import concatenated, unpickled


def of_a_user(error):
    raise error


FAILURES_OF_OTHERS = {
    "a function": lambda: of_a_user(TypeError("no float")),
    "its operation": lambda: torch.zeros(2)[5],
    "a layer that is given too few rows": lambda: nn.BatchNorm1d(2)(torch.zeros(1, 2)),
    "a layer that is given too large an index": lambda: nn.Sequential(nn.Embedding(2, 2))(torch.tensor([5])),
    "torch, by a shape": lambda: concatenated([torch.zeros(2, 2), torch.zeros(2, 3)], [2, 2]),
    "what we refuse": lambda: unpickled([1], b"\x80\x04]\x94(K\x01K\x02e."),
}


@pytest.mark.parametrize("of", FAILURES_OF_OTHERS)
def test_a_check_ends_where_others_code_fails(of):
    with pytest.raises((TypeError, IndexError, ValueError, RuntimeError)):
        FAILURES_OF_OTHERS[of]()
    with warnings.catch_warnings(action="error"), may_fail("faults"):
        FAILURES_OF_OTHERS[of]()


def test_a_check_that_fails_by_itself_says_so_once(monkeypatch):
    monkeypatch.delenv(trying.RAISES)
    monkeypatch.setattr(trying, "_said", set())
    monkeypatch.setattr("ignite_ddl.checks.rows_alone.as_real", len)
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=r"rows that depend on each other are not looked for here.*\.py, line \d+: "):
        assert not rows_depend_on_each_other(model, torch.zeros(4, 2), [model])
    with warnings.catch_warnings(action="error"):
        assert not rows_depend_on_each_other(model, torch.zeros(4, 2), [model])


def test_tests_see_a_check_that_fails_by_itself():
    with pytest.raises(TypeError), may_fail("faults"):
        concatenated([[torch.zeros(2)], [torch.zeros(2)]], 5)
