"""The cases of the parity table that are tests (`make parity` prints the whole table), one launch per mesh."""

import dataclasses

import parity
import pytest
import torch

OUTCOMES = {
    slow: parity.Outcomes([case for case in parity.test_cases() if case.slow == slow])
    for slow in (False, True)
}
CASES = [
    *OUTCOMES[False].cases,
    *(pytest.param(case, marks=pytest.mark.slow) for case in OUTCOMES[True].cases),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.line.strip())
def test_case_is_as_promised(case):
    outcome = OUTCOMES[case.slow].take(case)
    assert outcome.passed, str(outcome)


def test_every_trap_mesh_and_schedule_is_in_the_whole_table():
    cases = parity.all_cases()
    meshes = {case.mesh for case in cases}
    assert {(2, 1, 1), (4, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 1), (1, 4, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2),
            (2, 2, 2)} <= meshes  # fmt: skip
    assert {case.schedule for case in cases if case.pp > 1} == set(parity.ALL)
    assert {case.shard for case in cases} == {True, False}
    for trap in ("uneven", "tied", "parameterless", "frozen", "without rows", "max_norm", "accumulation"):
        assert sum(trap in case.trap for case in cases) > 5, trap
    assert all(case.shuffle for case in cases)
    assert {case.wrong for case in cases} > {""}
    assert len({case.line for case in cases if not case.test}) == sum(not case.test for case in cases)


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


def test_a_refusal_must_come_from_every_rank():
    case = parity.Case("", pp=2, refused="no trainable parameter")
    assert parity.judge(case, ["it has no trainable parameter"] * 2).passed
    assert not parity.judge(case, ["it has no trainable parameter", ""]).passed


def test_a_wrong_variant_must_be_clearly_wrong():
    case = parity.Case("", wrong="say")
    assert not parity.judge(case, [parity.reference(case)]).passed
