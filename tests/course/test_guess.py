"""What a reader hears about a guess."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ignite_ddl.course import guess as module, score, tally
from ignite_ddl.course.guess import judge


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(module, "_results", {})


@pytest.mark.parametrize(
    ("guess", "answer", "within", "verdict", "says"),
    [
        (72, 72, None, "right", "right: it is 72 bytes"),
        (144, 72, None, "off", "off: it is 72 bytes, and you said 144 bytes, twice as much"),
        (70, 72, None, "close", "close: it is 72 bytes, and you said 70 bytes, 3 % too little"),
        (11, 10, None, "close", "1 too much"),
        (5, 6, None, "off", "1 too little"),
        (340, 352.7, None, "right", "right: it is 353 bytes, and you said 340 bytes"),
        (400, 352.7, None, "close", "13 % too much"),
        (0.112, 112, None, "off", "a thousandth as much (another unit?)"),
        (112e3, 112.0, None, "off", "1,000 times as much (another unit?)"),
        (5.5, 6.0, 0, "close", "8 % too little"),
        (0.7, 1.4, 1, "right", "right"),
        (7, 1.4, 1, "off", "5 times as much"),
        ("353 ms", 352.7, None, "right", "right"),
        ("1,500 rows", 1500, None, "right", "right"),
        (0, 3, None, "off", "3 too little"),
        (3, 0, None, "off", "3 too much"),
        (-3, 3.0, None, "off", "6 too little"),
        (0.0, 0, None, "right", "right"),
        (math.nan, 3, None, "off", "off"),
        (math.inf, 3.0, None, "off", "off"),
        (3, math.inf, None, "off", "off"),
        (True, True, None, "right", "right"),
        (1, True, None, "off", "off"),
        ("true", True, None, "right", "right"),
        ("Hang ", "hang", None, "right", "right"),
        ("2 x 2x2", "2 × 2 × 2", None, "right", "right"),
        ("error", "hang", None, "off", "off: it is hang bytes, and you said error bytes"),
        (6, "hang", None, "off", "off"),
        ("never", 2, None, "off", "off"),
        (torch.float32, torch.float16, None, "off", "it is float16"),
        ("float16", torch.float16, None, "right", "right"),
        (torch.tensor(3), np.float64(3), None, "right", "right"),
        ([3, 3, 3], (3, 3, 3), None, "right", "right: it is [3, 3, 3]"),
        ([1, 2, 3], [3, 3, 3], None, "off", "1 of 3 entries right"),
        ([1.0, 2.5], [1.0, 2.0], None, "close", "1 of 2 entries right"),
        ([3, 3], [3, 3, 3], None, "off", "2 entries for 3"),
        (3, [3, 3], None, "off", "1 entry for 2"),
        (["b", "a"], {"a", "b"}, None, "right", "right"),
        (["a"], {"a", "b"}, None, "off", "1 missing"),
        (["a", "b", "c"], {"a", "b"}, None, "off", "1 too many"),
    ],
)  # fmt: skip
def test_a_guess_is_right_close_or_off_and_by_what(guess, answer, within, verdict, says):
    found, said = judge(guess, answer, " bytes", within)
    assert found == verdict, said
    assert says in said


@pytest.mark.parametrize("empty", [None, ..., "", " ", [None, 3]])
def test_no_guess_costs_nothing_and_only_an_exact_answer_is_told(empty):
    assert judge(empty, 72, " bytes") == ("none", f"no guess yet: {module.HOW}; it is 72 bytes")
    assert judge(empty, 0.3517) == ("none", f"no guess yet: {module.HOW}")
    assert judge(empty, 72, within=0.1) == ("none", f"no guess yet: {module.HOW}")
    assert judge(empty, 0.25, within=0)[1].endswith("it is 0.25")


def test_the_nearest_mistake_has_its_hint_unless_the_guess_is_right():
    mistakes = {144: "Both directions?", 150: "Which?", "hang": "Who waits?", (3, 1): "Swapped?"}
    assert judge(144, 72, mistakes=mistakes)[1].endswith("twice as much. Both directions?")
    assert judge(149, 72, mistakes=mistakes)[1].endswith("Which?")
    assert judge("hang", 72, mistakes=mistakes)[1].endswith("Who waits?")
    assert judge([3, 1], [1, 3], mistakes=mistakes)[1].endswith("0 of 2 entries right. Swapped?")
    assert "Both" not in judge(144, 144, mistakes=mistakes)[1]
    assert "Both" not in judge(77, 72, mistakes=mistakes)[1]


class Odd:
    def __repr__(self):
        raise RuntimeError

    __eq__ = __str__ = __repr__
    __hash__ = None


@pytest.mark.parametrize("answer", [72, 0.5, "hang", [1, 2], {"a"}, True, None, torch.eye(2)])
@pytest.mark.parametrize(
    "guess", [Odd(), [Odd()], {}, object, torch.eye(3), lambda: 1, b"72", 10**400, 1j, "one - two", -math.inf, [[1], 2]]
)
def test_nothing_raises(guess, answer, capsys):
    score(guess, answer, mistakes={"a": "A?", 3: "Three?"})
    assert capsys.readouterr().out.count("\n") == 1


def test_a_guess_counts_once_and_the_first_one_counts(capsys):
    for guess_bytes in (None, 70, 72, None):
        score(guess_bytes, 72)
    guess_ms = 10
    score(guess_ms, 10.2)
    guess_rank = "rank 3"
    score(guess_rank, "rank 2")
    guess_last = ...
    score(guess_last, 2)
    capsys.readouterr()
    tally()
    assert capsys.readouterr().out == "2 of 4, 1 close\nno guess yet: guess_last\noff: guess_rank\n"


def test_a_chapter_without_guesses_says_how_to_guess(capsys):
    score(None, 2, name="rows")
    capsys.readouterr()
    tally()
    assert capsys.readouterr().out == f"0 of 1\nno guesses yet: {module.HOW}\n"


def test_a_statement_of_a_cell_names_its_guess():
    here = {"score": score, "guess_a": 3, "guess_b": 3}
    for statement in ("score(guess_a, 3)", "score(\n    guess_b,\n    4,\n)", "score(guess_a, 5)"):
        exec(compile(statement, "cell", "exec"), here)
    assert module._results == {"guess_a": "right", "guess_b": "off"}


def test_a_notebook_stores_what_tests_need(monkeypatch):
    shown = []
    shell = SimpleNamespace(
        get_ipython=lambda: 1, display=SimpleNamespace(display=lambda *a, **k: shown.append((a, k)))
    )
    monkeypatch.setitem(module.sys.modules, "IPython", shell)
    score(None, torch.tensor([1, 2]), mistakes={(2, 1): "Swapped?"}, name="rows")
    [(data,), options] = shown[0]
    assert data["text/plain"].endswith("it is [1, 2]")
    record = {"name": "rows", "answer": [1, 2], "unit": "", "within": None, "mistakes": [[[2, 1], "Swapped?"]]}
    assert options["metadata"]["text/plain"]["score"] == record | {"any_order": False}


def test_what_a_notebook_stores_is_json_whatever_came_out(monkeypatch):
    shown = []
    display = SimpleNamespace(display=lambda *_, metadata, **__: shown.append(metadata["text/plain"]["score"]))
    monkeypatch.setitem(module.sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: 1, display=display))
    for number in (math.nan, math.inf, torch.tensor([1.0, -math.inf])):
        score(3, number, within=math.inf, mistakes={math.inf: "Divided by zero?"}, name="ratio")
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert [record["answer"] for record in shown] == ["nan", "inf", [1.0, "-inf"]]
    assert shown[0]["mistakes"] == [["inf", "Divided by zero?"]]
