"""The figures of chapter 17: what they draw, and that their text is large enough to read."""

import textwrap

import matplotlib.pyplot as plt
import pytest
from checking import text_sizes
from matplotlib.colors import to_hex

from ignite_ddl import plot

pytestmark = pytest.mark.usefixtures("no_window")


STEPS = [
    ("norm", 8, "whole", []),
    ("up", 32, "features", ["all_gather"]),
    ("down", 8, "tokens", ["reduce_scatter"]),
]
OWN, WHOLE = [[True, False, True], [False, True, True]], [[True, True], [True, False]]
KEPT = {"one rank": (8000, 0, 8100), "sequence": (2000, 400, 2450)}
FIGURES = {
    "along_a_block": lambda: plot.along_a_block(STEPS, n_ranks=4, title="A block"),
    "dropout_masks": lambda: plot.dropout_masks({"alike": (OWN, WHOLE), "the rule": (OWN, WHOLE)}, "Masks"),
    "kept_by_block": lambda: plot.kept_by_block(KEPT, "Not a quarter"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


@pytest.mark.parametrize("name", FIGURES)
def test_its_example_runs(name):
    example = getattr(plot, name).__doc__.split(".. code-block:: python\n")[1]
    exec(textwrap.dedent(example), {"plot": plot})
    assert plt.get_fignums()


def boxes(axes):
    return [
        (to_hex(box.get_facecolor()).upper(), round(box.get_width(), 2), round(box.get_height(), 2))
        for box in axes.patches
        if hasattr(box, "get_width")
    ]


def test_features_are_cut_upright_tokens_across_and_what_is_whole_is_grey():
    [axes] = FIGURES["along_a_block"]().axes
    up = [(colour, 1.0, 1.0) for colour in plot.RANK[:4]]  # four times as wide as the norm
    down = [(colour, 1.0, 0.25) for colour in plot.RANK[:4]]
    assert boxes(axes) == [(plot.ACTIVITY["idle"], 1.0, 1.0), *up, *down]
    tops = [box.get_y() for box in axes.patches[-4:]]
    assert tops == sorted(tops, reverse=True)  # rank 0 at the top


def test_a_collective_stands_between_the_steps_where_it_was_called():
    [axes] = FIGURES["along_a_block"]().axes
    names = {text.get_text(): text.get_position()[0] for text in axes.texts if text.get_text()}
    assert names["norm"] < names["all-\ngather"] < names["up"] < names["reduce-\nscatter"] < names["down"]


def test_a_kept_feature_is_filled_and_a_dropped_one_is_not():
    axes, *_ = FIGURES["dropout_masks"]().axes
    grey = "#8C8C8C"
    filled = [colour for colour, *_ in boxes(axes)]
    first = [plot.RANK[0], "#FFFFFF", plot.RANK[0], grey, grey]
    second = ["#FFFFFF", plot.RANK[1], plot.RANK[1], grey, "#FFFFFF"]
    assert filled == first + second
    edges = [to_hex(box.get_edgecolor()).upper() for box in axes.patches]
    assert edges == [plot.RANK[0]] * 3 + [grey] * 2 + [plot.RANK[1]] * 3 + [grey] * 2


def test_a_bar_is_the_formula_then_what_was_gathered_and_a_mark_is_measured():
    [axes] = FIGURES["kept_by_block"]().axes
    blue, pink = plot.ACTIVITY["forward"], plot.ACTIVITY["communication"]
    bars = [
        (round(bar.get_x(), 2), round(bar.get_width(), 2), to_hex(bar.get_facecolor()).upper())
        for bar in axes.patches
    ]
    assert bars == [(0, 8, blue), (8, 0, pink), (0, 2, blue), (2, 0.4, pink)]
    assert [line.get_xdata()[0] for line in axes.lines] == [8.1, 2.45]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(KEPT)
    assert axes.yaxis_inverted()
