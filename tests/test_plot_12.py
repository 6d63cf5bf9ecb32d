"""The figures of chapter 12: what they draw, and that their text is large enough to read."""

import inspect
import re
import textwrap

import pytest
from checking import text_sizes

from ignite_ddl import plot

pytestmark = pytest.mark.usefixtures("no_window")


SERVER, RING = {1: 2.0, 4: 8.0, 64: 128.0}, {2: 2.0, 4: 3.0, 64: 3.9375}
FIGURES = {
    "server_scheme": lambda: plot.server_scheme(4, 63_680, 25_120),
    "by_workers": lambda: plot.by_workers(
        {"one server": SERVER, "ring": RING},
        {"one server": {4: 8.0}},
        "It grows",
        "bytes",
        "lines: predicted",
    ),
    "server_shares": lambda: plot.server_shares(
        {"even": [{"a": 6, "b": 4}, {"c": 10}], "uneven": [{"a": 18}, {"b": 1, "c": 1}]}, "One has it all"
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


@pytest.mark.parametrize("name", FIGURES)
def test_examples_of_the_docstrings_run(name):
    doc = inspect.getdoc(getattr(plot, name))
    [example] = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n?|\n)+)", doc)
    exec(textwrap.dedent(example), {"plot": plot})


def test_every_worker_has_three_arrows():
    axes = FIGURES["server_scheme"]()
    arrows = [text for text in axes.axes[0].texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == 3 * 4
    words = " ".join(text.get_text() for text in axes.axes[0].texts)
    assert words.count("63,680 bytes") == 2, "parameters and gradients"
    assert words.count("25,120 bytes") == 1


def test_lines_are_predicted_and_marks_are_measured():
    axis = FIGURES["by_workers"]().axes[0]
    lines = [dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axis.lines]
    assert lines == [SERVER, {4: 8.0}, RING, {}]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")


def test_a_bar_is_as_long_as_its_share():
    even, uneven = FIGURES["server_shares"]().axes
    assert [text.get_text() for text in even.texts if "%" in text.get_text()] == ["50.0 %", "50.0 %"]
    assert [text.get_text() for text in uneven.texts if "%" in text.get_text()] == ["90.0 %", "10.0 %"]
    assert [box.get_width() for box in even.patches] == pytest.approx([30, 20, 50])
