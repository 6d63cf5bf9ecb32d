"""The figures of chapter 14: what they draw, and that their text is large enough to read."""

import inspect
import re
import textwrap

import pytest
from checking import text_sizes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

import ignite_ddl as ddl
from ignite_ddl import plot
from ignite_ddl.lab import cost

pytestmark = pytest.mark.usefixtures("no_window")


STATES = [cost.zero_memory(1, 4, stage, 4, 4, 8) for stage in range(4)]
PEAKS = [[16.3] * 4, [10.3] * 4, [7.3] * 4, [4.9, 4.9, 4.8, 4.9]]
FIGURES = {
    "zero_stages": lambda: plot.zero_stages([cost.zero_memory(1, 4, stage) for stage in range(4)]),
    "zero_peaks": lambda: plot.zero_peaks(STATES, [0.25, 0.25, 0.25, 1.0], PEAKS),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


@pytest.mark.parametrize("name", FIGURES)
def test_examples_of_the_docstrings_run(name):
    doc = inspect.getdoc(getattr(plot, name))
    [example] = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n?|\n)+)", doc)
    exec(textwrap.dedent(example), {"plot": plot, "ddl": ddl})


def test_a_rank_holds_its_slices_and_what_is_whole():
    [axes] = FIGURES["zero_stages"]().axes
    tiles = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(tiles) == 4 * 4 * 3 * 4, "stages, ranks, things, slices"
    filled = [to_hex(tile.get_facecolor()).upper() != plot.ACTIVITY["idle"] for tile in tiles]
    per_stage = [filled[48 * stage :][:48] for stage in range(4)]
    assert [sum(stage) for stage in per_stage] == [48, 36, 24, 12]
    # Under ZeRO-3 rank 2 holds the third slice of weights, gradients and optimizer, and nothing else.
    assert per_stage[3][24:36] == [False, False, True, False] * 3


def test_bars_are_predicted_and_dots_are_measured():
    [axes] = FIGURES["zero_peaks"]().axes
    tops = {}
    for bar in axes.patches:
        place = round(bar.get_x() + bar.get_width() / 2)
        tops[place] = max(tops.get(place, 0), bar.get_y() + bar.get_height())
    assert tops == {0: 16.25, 1: 10.25, 2: 7.25, 3: 5.0}
    assert [list(line.get_ydata()) for line in axes.lines] == PEAKS
