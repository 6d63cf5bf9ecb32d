"""The figures of chapter 16: what they draw, and that their text is large enough to read."""

import textwrap

import matplotlib.pyplot as plt
import pytest
from checking import text_sizes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from ignite_ddl import plot

pytestmark = pytest.mark.usefixtures("no_window")


COUNTED = {"column, row": (384, 384), "row, column": (1920, 960)}
BY_RANK = [[(0, 4), (0, 3)], [(4, 8), (0, 3)]]
HELD = {"weight": ((8, 3), BY_RANK), "bias": ((8,), [[(0, 8)], [(0, 8)]])}
FIGURES = {
    "held_blocks": lambda: plot.held_blocks(HELD, "The bias is whole on every rank"),
    "cut_products": lambda: plot.cut_products(rows=6, inputs=8, outputs=32, n_ranks=4),
    "bytes_by_plan": lambda: plot.bytes_by_plan(COUNTED, "The wide layer stays at home"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


@pytest.mark.parametrize("name", FIGURES)
def test_its_example_runs(name):
    example = getattr(plot, name).__doc__.split(".. code-block:: python\n")[1]
    exec(textwrap.dedent(example), {"plot": plot})
    assert plt.get_fignums()


def tiles(colour):
    """(height, width) of the blocks of a colour, from the top left."""
    [axes] = FIGURES["cut_products"]().axes
    boxes = [
        p
        for p in axes.patches
        if isinstance(p, Rectangle) and to_hex(p.get_facecolor()).upper() == colour.upper()
    ]
    boxes.sort(key=lambda box: (round(box.get_y() / 15), box.get_x()))
    return [(round(box.get_height()), round(box.get_width())) for box in boxes]


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_has_a_block_of_w_and_y_and_by_rows_one_of_x_and_a_whole_term(rank):
    assert tiles(plot.RANK[rank]) == [(8, 8), (6, 8), (6, 2), (2, 32), (6, 32)]


def test_only_the_input_of_the_cut_by_columns_is_whole_on_every_rank():
    assert tiles(plot.ACTIVITY["idle"]) == [(6, 8)]


def test_a_bar_is_a_plan_forward_then_backward_and_ends_in_its_sum():
    [axes] = FIGURES["bytes_by_plan"]().axes
    bars = [(bar.get_x(), bar.get_width(), to_hex(bar.get_facecolor()).upper()) for bar in axes.patches]
    forward, backward = plot.ACTIVITY["forward"], plot.ACTIVITY["backward"]
    assert bars == [(0, 384, forward), (384, 384, backward), (0, 1920, forward), (1920, 960, backward)]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(COUNTED)
    assert {"768", "2,880"} <= {text.get_text() for text in axes.texts}
    assert axes.yaxis_inverted()


def test_a_block_is_a_rank_and_what_all_hold_is_drawn_once_in_grey():
    [axes] = FIGURES["held_blocks"]().axes
    boxes = [
        (
            to_hex(box.get_facecolor()).upper(),
            round(box.get_y()),
            round(box.get_height()),
            round(box.get_width()),
        )
        for box in axes.patches
    ]
    grey = plot.ACTIVITY["idle"].upper()
    assert boxes == [(plot.RANK[0], 0, 4, 3), (plot.RANK[1], 4, 4, 3), (grey, 0, 8, 2)]
    assert [text.get_text() for text in axes.texts] == ["0", "1", "weight\n8 × 3", "all", "bias\n8"]
