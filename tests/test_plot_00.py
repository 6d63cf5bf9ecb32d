"""Chapter 00's figures: they show what they are given, in letters that can be read."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from ignite_ddl import plot


@pytest.fixture(autouse=True)
def close():
    plt.switch_backend("agg")
    yield
    plt.close("all")


def texts(figure):
    return [text for axes in figure.axes for text in axes.texts if text.get_text()]


def colours(axes):
    return [to_hex(patch.get_facecolor()).upper() for patch in axes.patches if isinstance(patch, Rectangle)]


FIGURES = {
    "two ways": lambda: plot.data_and_model_parallel(8),
    "sent": lambda: plot.numbers_sent([4, 8], {"cut the batch": [40, 40], "cut the model": [8, 16]}),
    "map": lambda: plot.course_map({"Start": {0: "start here", 1: "CPU"}, "Then": {2: "GPU"}}, route=[1]),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text.get_fontsize() for text in texts(FIGURES[name]())) >= 9


@pytest.mark.parametrize("name", ["two ways", "map"])
def test_text_can_be_read_on_its_tile(name):
    for text in texts(FIGURES[name]()):
        x, y = text.get_position()
        for patch in text.axes.patches:
            (left, top), right, bottom = patch.get_xy(), patch.get_xy()[0] + patch.get_width(), 0
            bottom = top + patch.get_height()
            if left < x < right and top < y < bottom and text.get_ha() == "center":
                assert contrast(patch.get_facecolor(), text.get_color()) >= 4


def contrast(one, other):
    """The contrast ratio of the web's accessibility guidelines, from 1 to 21."""
    from matplotlib.colors import to_rgb

    def luminance(colour):
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("n_rows", [4, 8, 12])
def test_what_each_rank_holds(n_rows):
    data, layers, inside = (colours(axes) for axes in plot.data_and_model_parallel(n_rows).axes)
    for rank in range(4):
        mine = plot.RANK[rank].upper()
        assert data.count(mine) == n_rows // 4 + 4, "its rows and 4 layers"
        assert layers.count(mine) == 1, "one layer"
        assert inside.count(mine) == 4, "a piece of each layer"
    for panel in (layers, inside):
        assert panel.count(plot.ACTIVITY["idle"]) == n_rows, "the whole batch"


@pytest.mark.parametrize("n_rows", [0, 6, -4])
def test_a_batch_that_four_ranks_cannot_share_is_refused(n_rows):
    with pytest.raises(ValueError, match=f"n_rows is {n_rows}"):
        plot.data_and_model_parallel(n_rows)


def test_lines_are_the_numbers():
    [axes] = FIGURES["sent"]().axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[40, 40], [8, 16]]
    assert [text.get_text() for text in axes.texts] == ["cut the batch", "cut the model"]


def test_the_route_is_dark():
    [axes] = FIGURES["map"]().axes
    assert [colour == "#444444" for colour in colours(axes)] == [False, True, False]
