"""The figures of chapter 09: what they draw, and that their text is large enough to read."""

import inspect
import re
import textwrap

import pytest
from checking import text_sizes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

import ignite_ddl as ddl
from ignite_ddl import plot
from ignite_ddl.lab import cost, simulate

pytestmark = pytest.mark.usefixtures("no_window")


TWO_RANKS = [[[1, 1], [2, 2]], [[1, 3], [3, 2]], [[3, 3], [3, 3]]]
LINE = cost.Link(latency=0.0, bandwidth=48)
PLAY = {
    "naive": simulate.all_reduce_naive,
    "tree": simulate.all_reduce_tree,
    "ring": simulate.all_reduce_ring,
}
FIGURES = {
    "ring_steps": lambda: plot.ring_steps(TWO_RANKS),
    "messages": lambda: plot.messages({name: way(4, 48, LINE).in_flight for name, way in PLAY.items()}, "Three"),
    "bytes_by_world": lambda: plot.bytes_by_world(
        {"naive": {2: 48, 4: 144}, "tree": {2: 48, 4: 96}, "ring": {2: 48, 4: 72}}, n_bytes=48
    ),
    "all_reduce_times": lambda: plot.all_reduce_times(
        [1, 1000], {"naive": [0.2, 0.9], "tree": [0.1, 0.8], "ring": [0.3, 0.4]}, {"ring": {1000: 0.41}}, n_ranks=8
    ),
    "loss_by_iteration": lambda: plot.loss_by_iteration(
        {"1 rank": [[(100, 1.0), (200, 0.75)]], "2 ranks": [[(50, 1.2), (100, 0.9)], [(50, 1.3), (100, 1.1)]]},
        "It falls",
    ),
    "normalised_by": lambda: plot.normalised_by([[0.0, 1.0], [0.4, 0.8]], together=[0.2, 0.9]),
}  # fmt: skip


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


@pytest.mark.parametrize("name", FIGURES)
def test_examples_of_the_docstrings_run(name):
    doc = inspect.getdoc(getattr(plot, name))
    [example] = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n?|\n)+)", doc)
    exec(textwrap.dedent(example), {"plot": plot, "ddl": ddl})


def test_a_chunk_has_a_stripe_for_each_rank_in_it_and_a_frame_when_it_has_come():
    [axes] = plot.ring_steps(TWO_RANKS).axes
    filled = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    frames = [patch for patch in axes.patches if isinstance(patch, Rectangle) and not patch.get_fill()]
    colours = [to_hex(patch.get_facecolor()).upper() for patch in filled]
    zero, one = plot.RANK[0].upper(), plot.RANK[1].upper()
    # Before: own colours. After step 1 each rank has one sum; after step 2 all four tiles are sums.
    assert colours == [zero, zero, one, one, zero, zero, one, zero, one, one, *[zero, one] * 4]
    assert len(frames) == 4, "one chunk a rank and step"
    assert [text for text in texts(axes) if text.startswith(("before", "after"))] == [
        "before", "after step 1", "after step 2",
    ]  # fmt: skip


def test_a_ring_that_stopped_early_is_refused():
    with pytest.raises(ValueError, match=r"2 n - 1 = 3 of them, .* but given 2"):
        plot.ring_steps(TWO_RANKS[:2])


def test_an_arrow_goes_from_sender_to_receiver_in_its_time():
    naive, tree, ring = FIGURES["messages"]().axes
    assert [axes.get_title(loc="left") for axes in (naive, tree, ring)] == [
        "naive: 3 s",
        "tree: 4 s",
        "ring: 1.5 s",
    ]
    assert [len(axes.texts) for axes in (naive, tree, ring)] == [12, 6, 24]
    arrow = min(ring.texts, key=lambda text: (text.xyann[0], text.xyann[1]))
    assert (arrow.xyann, arrow.xy) == ((0, 0), (0.25, 1))  # rank 0 to rank 1 in the first quarter of a second
    thick, thin = naive.texts[0].arrow_patch, ring.texts[0].arrow_patch
    assert thick.get_linewidth() > 2 * thin.get_linewidth()
    assert to_hex(arrow.arrow_patch.get_edgecolor()).upper() == plot.RANK[0].upper()


def test_bytes_are_those_given():
    [axes] = FIGURES["bytes_by_world"]().axes
    lines = [list(line.get_ydata()) for line in axes.lines[:3]]
    assert lines == [[48, 144], [48, 96], [48, 72]]
    assert texts(axes) == [
        "naive: 144 bytes",
        "tree: 96 bytes",
        "ring: 72 bytes",
        "twice the buffer: 96 bytes",
    ]


def test_lines_are_predicted_and_marks_measured():
    [axes] = FIGURES["all_reduce_times"]().axes
    lines = [(line.get_linestyle(), [round(y) for y in line.get_ydata()]) for line in axes.lines]
    assert [points for style, points in lines if style != "None"] == [[200, 900], [100, 800], [300, 400]]
    assert [points for style, points in lines if style == "None"] == [[], [], [410]]
    assert "measured, with delays put in" in texts(axes)[-1]


def test_every_seed_has_its_line_and_every_way_its_name():
    [axes] = FIGURES["loss_by_iteration"]().axes
    runs = [list(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) > 1]
    assert runs == [[1.0, 0.75], [1.2, 0.9], [1.3, 1.1]]
    ends = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if len(line.get_ydata()) == 1]
    assert ends == [(200, 0.75), (100, 1.0)]
    assert texts(axes) == ["1 rank", "2 ranks"]


def test_a_dot_for_every_rank_and_a_bar_for_all():
    [axes] = FIGURES["normalised_by"]().axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0, 1], [0.4, 0.8], [0.2, 0.2], [0.9, 0.9]]
    assert [to_hex(line.get_color()).upper() for line in axes.lines[:2]] == [c.upper() for c in plot.RANK[:2]]
