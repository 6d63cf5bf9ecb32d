"""The figures of chapter 03: what they draw, and that their text is large enough to read."""

import pytest
from checking import text_sizes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from ignite_ddl import plot

pytestmark = pytest.mark.usefixtures("no_window")


HALVES = [[(0, 4), (0, 6)]] * 2 + [[(4, 8), (0, 6)]] * 2
QUARTERS = [[(0, 4), (0, 4)], [(0, 4), (4, 8)], [(4, 8), (0, 4)], [(4, 8), (4, 8)]]
FIGURES = {
    "eager_and_lazy": lambda: plot.eager_and_lazy(["matmul", "add", "relu"], [64, 64, 48]),
    "compile_times": lambda: plot.compile_times(
        [60.0, 0.5, 0.4, 20.0], [16, 16, 16, 4], [1, 0, 0, 1], "recorded"
    ),
    "device_tiles": lambda: plot.device_tiles({"x": ((8, 6), HALVES), "y": ((8, 8), QUARTERS)}, "cut"),
    "loss_gaps": lambda: plot.loss_gaps({"float32": [1e-7, 1e-3], "float64": [0.0, 1e-15]}, "gaps"),
}


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


@pytest.mark.parametrize(("rows", "compiled"), [([64, 64, 48], 2), ([8, 8, 8], 1), ([1, 2, 3, 1], 3)])
def test_a_new_number_of_rows_compiles_once(rows, compiled):
    drawn = texts(plot.eager_and_lazy(["matmul", "relu"], rows))
    assert sum(text.startswith("compile for") for text in drawn) == compiled
    assert drawn.count("2 as 1") == len(rows)


def test_bars_that_compiled_say_so_and_the_title_has_the_ratio():
    figure = FIGURES["compile_times"]()
    drawn = texts(figure)
    assert sum(text.startswith("compiles") for text in drawn) == 2
    assert "some 44 ×" in figure.axes[0].get_title(loc="left")  # 20 / 0.45: not the first step


@pytest.mark.parametrize(
    ("milliseconds", "compiled", "ratio"),
    [
        ([60.0, 2.0, 4.0], [1, 0, 0], 20),
        ([1.0, 9.0, 31.0, 1.0], [0, 1, 1, 0], 20),
        ([60, 10, 30, 1], [1, 1, 1, 0], 20),
    ],
)
def test_the_ratio_is_that_of_medians(milliseconds, compiled, ratio):
    figure = plot.compile_times(milliseconds, [8] * len(compiled), compiled, "recorded")
    assert f"some {ratio} ×" in figure.axes[0].get_title(loc="left")


def test_the_axis_of_the_times_has_ticks_and_a_unit():
    [axes] = FIGURES["compile_times"]().axes
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    assert ticks == [1, 10, 100]
    assert axes.get_ylabel().startswith("milliseconds")


def test_each_tile_names_its_devices_and_the_tiles_fill_the_matrices():
    [axes] = FIGURES["device_tiles"]().axes
    names = [text.get_text() for text in axes.texts]
    assert names == ["0 and 1", "2 and 3", "x\n8 × 6", "0", "1", "2", "3", "y\n8 × 8"]
    filled = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_fill()]
    assert sum(p.get_width() * p.get_height() for p in filled) == 8 * 6 + 8 * 8
    area = dict.fromkeys(plot.RANK[:4], 0)
    for patch in filled:
        area[to_hex(patch.get_facecolor()).upper()] += patch.get_width() * patch.get_height()
    assert list(area.values()) == [8 * 6 / 4 + 8 * 8 / 4] * 4


def test_the_largest_difference_so_far_is_drawn_and_labels_stand_apart():
    [axes] = plot.loss_gaps({"a": [1e-7, 0.0, 1e-3], "b": [0.0, 1e-15, 1e-16], "c": [1e-3] * 3}, "gaps").axes
    lines = {line.get_color(): list(line.get_ydata()) for line in axes.lines}
    assert list(lines.values()) == [[1e-17, 1e-15, 1e-15], [1e-7, 1e-7, 1e-3], [1e-3] * 3]
    heights = {text.get_text(): text.xy[1] for text in axes.texts}
    assert heights["b"] == pytest.approx(1e-15)
    assert heights["a"] == pytest.approx(1e-3)
    assert heights["c"] > 10 * heights["a"]
