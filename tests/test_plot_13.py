"""The figures of chapter 13: rows of workers, stale descent, histograms, accuracy, the race, and backup workers."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from ignite_ddl import plot
from ignite_ddl.lab import simulate

RULES = {"async": {"mode": "async"}, "3 + 1": {"mode": "backup", "backup": 1}}
RECORDS = [{"worker": 0, "staleness": 1}, {"worker": 1, "staleness": 1}, {"worker": 0, "staleness": 3}]
CURVES = {"rate 0.1": {1: (0.73, 0.01), 4: (0.7, 0.02)}, "the best": {1: (0.73, 0.01), 4: (0.72, 0.0)}}
RACE = {"sync": [(0, 0.1), (2, 0.7)], "async": [(0, 0.1), (1, 0.7)]}


pytestmark = pytest.mark.usefixtures("no_window")


def rows(as_dicts=False, **kwargs):
    panels = {}
    for name, rule in RULES.items():
        run = simulate.parameter_server(4, [1.0, 1.2, 1.4, 4.0], 20, **rule)
        panels[name] = run.updates, run.dropped
        if as_dicts:
            panels[name] = [
                [gradient._asdict() | {"staleness": gradient.staleness} for gradient in gradients]
                for gradients in panels[name]
            ]
    return plot.server_rows(panels, "One is slow", end=6, **kwargs)


FIGURES = {
    "rows": lambda: rows(unit="time units"),
    "descent": lambda: plot.stale_descent({0: [1, 0.2], 1: [1, 1.0]}, {0: 2.0, 1: 1.0, 4: 0.35}),
    "histogram": lambda: plot.staleness_histogram({"equal": RECORDS, "one slow": RECORDS[:2]}, "Mostly one"),
    "accuracy": lambda: plot.over_staleness(CURVES, "It falls", "workers", "test accuracy"),
    "race": lambda: plot.time_to_accuracy(RACE, {"sync": 1.9, "async": 0.9}, 0.65, "Sync is last"),
    "backup": lambda: plot.backup_workers({98: 0.8, 100: 0.3}, {98: 0.82}, {0: 48.0, 4: 50.3, 8: 49.7}, 5),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    figure = FIGURES[name]()
    figure.canvas.draw()
    sizes = {text.get_text(): text.get_size() for text in figure.findobj(Text) if text.get_text().strip()}
    assert sizes
    assert min(sizes.values()) >= 9, sizes


def boxes(axes, kind):
    return [
        box for box in axes.patches if to_hex(box.get_facecolor()) == kind.lower() and box.get_width() > 0
    ]


def test_rows_hold_a_box_from_pull_to_push_with_its_staleness():
    asynchronous, backup = rows(unit="time units").axes
    run = simulate.parameter_server(4, [1.0, 1.2, 1.4, 4.0], 20, mode="async")
    in_sight = [g for g in run.updates if g.pulled_at < 6]
    assert len(boxes(asynchronous, plot.ACTIVITY["compute"])) == len(in_sight)
    assert {text.get_text() for text in asynchronous.texts} == {str(g.staleness) for g in in_sight}
    assert [text.get_text() for text in backup.texts].count("dropped") == 2
    assert boxes(backup, plot.ACTIVITY["idle"])
    assert not boxes(asynchronous, plot.ACTIVITY["idle"])
    assert [label.get_text() for label in backup.get_yticklabels()] == [f"worker {i}" for i in range(4)]


def test_rows_mark_the_update_of_each_gradient_that_was_applied():
    _, backup = rows(unit="time units").axes
    marks = [line.get_xdata()[0] for line in backup.lines]
    run = simulate.parameter_server(4, [1.0, 1.2, 1.4, 4.0], 20, **RULES["3 + 1"])
    assert sorted(marks) == sorted(g.applied_at for g in run.updates if g.applied_at <= 6)


def test_rows_of_a_servers_own_records_in_milliseconds():
    simulated, measured = rows(unit="time units").axes[0], rows(as_dicts=True).axes[0]
    widths = [[box.get_width() for box in axes.patches] for axes in (simulated, measured)]
    assert widths[1] == pytest.approx([1e3 * width for width in widths[0]])
    assert measured.figure.axes[-1].get_xlabel() == "milliseconds"


def test_the_line_is_the_formula():
    left, right = FIGURES["descent"]().axes
    formula, found = right.lines
    assert list(formula.get_ydata())[:2] == pytest.approx([2.0, 1.0])
    assert len(formula.get_ydata()) == 5
    assert list(found.get_xdata()) == [0, 1, 4]
    assert [text.get_text() for text in left.texts] == ["staleness 0", "staleness 1"]
    assert any("2 sin(π / (4s + 2))" in text.get_text() for text in right.texts)


def test_histogram_stacks_workers_and_marks_the_mean():
    equal, slow = FIGURES["histogram"]().axes
    assert sum(bar.get_height() for bar in equal.patches) == 3
    colours = {to_hex(bar.get_facecolor()) for bar in equal.patches if bar.get_height()}
    assert colours == {plot.RANK[0].lower(), plot.RANK[1].lower()}
    assert equal.lines[0].get_xdata()[0] == pytest.approx(5 / 3)
    assert [text.get_text() for text in equal.texts + slow.texts] == ["mean 1.7", "mean 1.0"]


def test_a_lone_histogram_keeps_the_title():
    [axes] = plot.staleness_histogram({"equal": RECORDS}, "Mostly one").axes
    assert axes.get_title(loc="left") == "Mostly one"


def test_numbers_stand_at_equal_distances_with_two_standard_errors():
    [axes] = FIGURES["accuracy"]().axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4"]
    low, high = axes.collections[0].get_segments()[1][:, 1]
    assert (low, high) == pytest.approx((0.66, 0.74))
    assert axes.get_ylim()[0] == 0


def test_the_race_marks_when_each_has_the_target():
    [axes] = FIGURES["race"]().axes
    assert {text.get_text() for text in axes.texts} == {"sync  1.9 s", "async  0.9 s", "65%"}
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [(1.9, 0.65), (0.9, 0.65)]


def test_the_best_b_is_in_the_title_and_the_papers_beside_it():
    figure = FIGURES["backup"]()
    left, right = figure.axes
    assert figure.get_suptitle() == "100 workers: with 4 backups the most gradients count"
    assert "paper: b = 5" in [text.get_text() for text in right.texts]
    assert list(right.lines[0].get_ydata()) == pytest.approx([0, 100 * 2.3 / 48, 100 * 1.7 / 48])
    assert [text.get_text() for text in left.texts] == ["simulated", "paper: 82%"]
