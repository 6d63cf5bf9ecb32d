"""benchmarks/: the READMEs quote the committed numbers, and a part that fails becomes a row."""

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import run

    yield run
    for name in ("run", "sides"):
        del sys.modules[name]


def test_the_readmes_quote_the_committed_numbers(run):
    results = json.loads(run.RESULTS.read_text())
    assert run.MARKS[0] + run.quoted(results) + run.MARKS[1] in run.README.read_text()
    assert run.PAGE.read_text() == run.page(results)
    measured = {(row["what"], row.get("against")) for row in run.all_rows(results)}
    assert measured >= set(run.QUOTED)  # none is misspelt


def test_what_fails_or_takes_too_long_is_a_row_and_the_rest_goes_on(run, tmp_path):
    (tmp_path / "bad.py").write_text(
        "import sides, os\n"
        "row = lambda quick: [sides.row('a', 'b', [1.0], [2.0])]\n"
        "sides.main('', {'first': row, 'second': lambda quick: 1 / 0, 'third': row, 'last': lambda q: os._exit(3)})"
    )
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    (tmp_path / "sides.py").symlink_to(FOLDER / "sides.py")
    rows = run.rows_of("bad", 30, False, tmp_path) + run.rows_of("slow", 0.5, False, tmp_path)
    assert [row.get("ratio", row.get("error", "").partition(" … ")[0]) for row in rows] == [
        0.5,
        "ZeroDivisionError: division by zero",
        0.5,
        "ended with 3",
        "took more than 0.5 s",
    ]
    table = run.sides.table(rows).splitlines()
    assert len(table) == 2 + 5
    assert len({line.count("|") for line in table}) == 1


def test_a_target_that_noise_decides_is_neither_kept_nor_missed(run):
    def verdict(ratio, control, spread=0.0):
        ours = [ratio - spread, ratio, ratio + spread]
        return run.sides.row("", "", ours, [1.0] * 3, again=[control] * 3, target=1.02)["verdict"]

    assert verdict(1.0234, 1.0242) == "within noise, ± 0.024"
    assert verdict(1.0234, 0.99) == "within noise, ± 0.010"
    assert verdict(1.064, 0.993, spread=0.1) == "within noise, ± 0.115"
    assert verdict(1.10, 1.0242) == "missed"
    assert verdict(1.001, 1.0042) == "kept"


def test_sides_take_turns(run):
    calls = []
    sides = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds, cpu = run.sides.in_turns(sides, 6)
    assert (
        {name: len(found) for name, found in seconds.items()}
        == dict.fromkeys("abc", 6)
        == {name: len(found) for name, found in cpu.items()}
    )
    rounds = {"".join(calls[start : start + 3]) for start in range(3, 21, 3)}
    assert rounds == {"abc", "bca", "cab", "cba", "acb", "bac"}
