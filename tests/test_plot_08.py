"""The figure of chapter 08: a dot a step, the median of those after the warm-up."""

import pytest
from matplotlib.text import Text

from ignite_ddl import plot

SECONDS = [0.03, 0.006, *[0.004, 0.005, 0.003] * 10]


pytestmark = pytest.mark.usefixtures("no_window")


def figure():
    return plot.step_times(SECONDS, warm_up=2, title="The first step is slow")


def test_text_is_at_least_9_points():
    drawn = figure()
    drawn.canvas.draw()
    sizes = {text.get_text(): text.get_size() for text in drawn.findobj(Text) if text.get_text()}
    assert min(sizes.values()) >= 9, sizes


def test_every_step_has_a_dot_and_the_warm_up_another_colour():
    [axes] = figure().axes
    median, warm_up, others = axes.lines
    assert list(warm_up.get_ydata()) == [30.0, 6.0]
    assert len(others.get_ydata()) == 30
    assert warm_up.get_color() != others.get_color()
    assert set(median.get_ydata()) == {4.0}  # without the warm-up
    assert "median 4.0 ms" in [text.get_text() for text in axes.texts][-1]


def test_no_dot_lies_outside():
    [axes] = figure().axes
    low, high = axes.get_ylim()
    assert low < 3 < 30 < high
