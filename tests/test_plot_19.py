"""The figures of chapter 19: what they draw, and that their text is large enough to read."""

import matplotlib.pyplot as plt
import pytest
from checking import text_sizes
from matplotlib.colors import to_rgb

from ignite_ddl import plot
from ignite_ddl.lab import simulate

pytestmark = pytest.mark.usefixtures("no_window")


RUN = simulate.pipedream(3, 6)
FRESH, STALE = [[(7, 2.3), (14, 2.0)]], [[(4, 2.3), (14, 1.6)], [(4, 2.2), (14, 1.5)]]
LOSSES = {
    "learning rate 0.01": {"1F1B": FRESH, "PipeDream": STALE},
    "learning rate 0.05": {"1F1B": FRESH, "PipeDream": [[(4, 2.3), (14, 4.5)], STALE[1]]},
}
POINTS = {"gpipe": (0.27, [8, 8]), "1f1b": (0.27, [2, 1]), "zbv": (0.05, [2, 2]), "other": (0.05, [2, 1])}
FIGURES = {
    "weight_versions": lambda: plot.weight_versions(RUN.forward_versions, RUN.backward_versions, "Behind"),
    "loss_over_time": lambda: plot.loss_over_time(LOSSES, "Ahead, and not", "turns"),
    "time_and_memory": lambda: plot.time_and_memory(POINTS, "Down and left"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


def test_a_tile_says_its_two_versions_and_is_darker_the_more_lies_between():
    [axes] = FIGURES["weight_versions"]().axes
    texts = [text.get_text() for text in axes.texts]
    assert texts[:6] == ["0 → 0", "0 → 1", "0 → 2", "1 → 3", "2 → 4", "3 → 5"]
    assert texts[12:] == [f"{m} → {m}" for m in range(6)]
    light = [sum(to_rgb(tile.get_facecolor()[:3])) for tile in axes.patches]
    assert light[0] > light[1] > light[2] == light[3]  # rank 0: none, one, two updates
    assert len(set(light[12:])) == 1
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]


def test_every_seed_has_its_line_and_no_loss_is_cut_off():
    small, large = FIGURES["loss_over_time"]().axes
    assert [len(axes.lines) for axes in (small, large)] == [3, 3]
    assert [text.get_text() for text in small.get_legend().get_texts()] == ["1F1B", "PipeDream"]
    assert small.lines[1].get_color() == small.lines[2].get_color() != small.lines[0].get_color()
    assert small.get_ylim() == large.get_ylim()
    low, high = large.get_ylim()
    assert low == 0
    assert high > 4.5


def test_schedules_at_one_place_share_a_mark_and_lines_lead_to_the_emptiest_rank():
    [axes] = FIGURES["time_and_memory"]().axes
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    assert sorted((float(m.get_xdata()[0]), float(m.get_ydata()[0])) for m in marks) == [
        (2, 5),
        (2, 27),
        (8, 27),
    ]
    assert [text.get_text() for text in axes.texts] == ["gpipe", "1f1b", "zbv\nother"]
    lines = [list(line.get_xdata()) for line in axes.lines if line.get_marker() != "o"]
    assert lines == [[8, 8], [1, 2], [2, 2], [1, 2]]


def test_low_rows_have_boxes_without_numbers():
    records = simulate.pipeline("1f1b", 2, 2).records
    high, low = (plot.schedules({"": records}, "", unit="units", row=row) for row in (0.3, 0.14))
    assert len(high.axes[0].texts) == 8
    assert not low.axes[0].texts
    assert len(low.axes[0].patches) == len(high.axes[0].patches)
    assert low.get_size_inches()[1] < high.get_size_inches()[1]


@pytest.mark.parametrize("name", FIGURES)
def test_its_example_runs(name):
    example = getattr(plot, name).__doc__.split(".. code-block:: python\n")[1]
    exec("\n".join(line.removeprefix(" " * 12) for line in example.splitlines()), {"plot": plot})
    assert plt.get_fignums()
