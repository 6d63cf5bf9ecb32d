"""The cases of the parity table that are tests (`make parity` prints the whole table), one launch per mesh."""

import dataclasses
import subprocess
import sys

import parity
import pytest
import torch

OUTCOMES = {
    slow: parity.Outcomes([case for case in parity.test_cases() if case.slow == slow]) for slow in (False, True)
}
CASES = [*OUTCOMES[False].cases, *(pytest.param(case, marks=pytest.mark.slow) for case in OUTCOMES[True].cases)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.line.strip())
def test_case_is_as_promised(case):
    outcome = OUTCOMES[case.slow].take(case)
    assert outcome.passed, str(outcome)


def test_the_table_is_all_that_is_printed():
    command = [sys.executable, parity.__file__, "dp2 ", "powersgd:1000", "full rank"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr == ""


def test_words_that_no_case_has_are_refused(capsys):
    assert parity.main(["nonsense", "dp2"]) == 2
    said = capsys.readouterr()
    assert said.err == "no case has nonsense and dp2 in its line; all lines: make parity\n"
    assert said.out == ""


# --------------------------------------------------------------------------------- the comparison itself can fail


def test_the_comparison_sees_a_missing_a_wrong_and_an_infinite_value():
    one = torch.zeros(2)
    assert parity.largest([(one, one.clone())]) == 0
    assert parity.largest([(one, one + 1e-3)]) == pytest.approx(1e-3)
    assert parity.largest([(None, None)]) == 0
    for other in (None, torch.zeros(3), torch.tensor([0.0, float("nan")])):
        assert parity.largest([(other, one)]) == float("inf")
    assert parity.largest([([1.0, 2.0], [1.0])]) == float("inf")  # an iteration is missing


@pytest.mark.parametrize("change", ["losses", "norms", "gradients", "weights"])
def test_a_rank_that_is_off_fails_its_case(change):
    case = parity.Case("", max_norm=0.1)
    right = parity.reference(case)
    assert parity.judge(case, [right]).passed
    value = getattr(right, change)
    off = [v + 1e-9 for v in value] if isinstance(value, list) else {n: v + 1e-9 for n, v in value.items()}
    assert not parity.judge(case, [dataclasses.replace(right, **{change: off})]).passed
