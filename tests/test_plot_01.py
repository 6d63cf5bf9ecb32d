"""The figures of chapter 01: what they draw, and that their text is large enough to read."""

import pytest
from checking import text_sizes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle

from ignite_ddl import plot

BEFORE = [1, 2, 4, 8]


pytestmark = pytest.mark.usefixtures("no_window")


FIGURES = {
    "cluster": lambda: plot.cluster(2, 4),
    "collectives": lambda: plot.collectives(
        {
            "all_reduce": (BEFORE, [[15]] * 4),
            "all_gather": (BEFORE, [BEFORE] * 4),
            "broadcast": (BEFORE, [1] * 4),
        }
    ),
    "groups": lambda: plot.collectives({"in two groups": (BEFORE, [5, 10, 5, 10])}),
    "times": lambda: plot.sort_times(
        {1: (0.4, 0.41), 2: (0.2, 0.21), 4: (0.1, 0.2), 8: (0.05, 0.2)}, cores=2
    ),
    "times with many cores": lambda: plot.sort_times({1: (0.4, 0.41), 2: (0.2, 0.21)}, cores=2),
}


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def tiles(axes):
    """Colour and place of each filled rectangle, in the order in which they were drawn."""
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_facecolor()[3]]
    return [(to_hex(patch.get_facecolor()).upper(), patch.get_xy()) for patch in patches]


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


@pytest.mark.parametrize("name", ["cluster", "collectives", "groups"])
def test_text_can_be_read_on_its_tile(name):
    for axes in FIGURES[name]().axes:
        for text in axes.texts:
            if text.get_bbox_patch() is not None:  # a number on its own white ground
                continue
            x, y = text.get_position()
            for patch in axes.patches:
                if not isinstance(patch, Rectangle) or not patch.get_facecolor()[3]:
                    continue
                (left, top), width, height = patch.get_xy(), patch.get_width(), patch.get_height()
                if left < x < left + width and top < y < top + height:
                    assert contrast(patch.get_facecolor(), text.get_color()) >= 4


def contrast(one, other):
    """The contrast ratio of the web's accessibility guidelines, from 1 to 21."""

    def luminance(colour):
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("n_nodes", "ranks_per_node"), [(2, 4), (1, 3), (4, 2)])
def test_each_rank_stands_on_its_node(n_nodes, ranks_per_node):
    [axes] = plot.cluster(n_nodes, ranks_per_node).axes
    n_ranks = n_nodes * ranks_per_node
    found = texts(axes)
    assert f"the world: {n_ranks} ranks" in found
    assert [text for text in found if text.startswith("node")] == [f"node {node}" for node in range(n_nodes)]
    assert [text for text in found if text.startswith("rank")] == [f"rank {rank}" for rank in range(n_ranks)]
    locals_ = [text.split()[-1] for text in found if text.startswith("local")]
    assert locals_ == [str(local_rank) for _ in range(n_nodes) for local_rank in range(ranks_per_node)]
    assert [colour for colour, _ in tiles(axes)] == [colour.upper() for colour in plot.RANK[:n_ranks]]


def test_more_ranks_than_colours_are_refused():
    with pytest.raises(ValueError, match="at most 8 ranks have a colour, but given 3 x 4"):
        plot.cluster(3, 4)


def test_colours_are_read_from_the_numbers():
    reduced, gathered, broadcast = FIGURES["collectives"]().axes
    four = [colour.upper() for colour in plot.RANK[:4]]
    after = {
        axes: [colour for colour, (x, _) in tiles(axes) if x > 1] for axes in (reduced, gathered, broadcast)
    }
    assert after[reduced] == four * 4, "a stripe for each rank in the sum"
    assert after[gathered] == four * 4, "a tile for each rank"
    assert after[broadcast] == four[:1] * 4
    for axes in after:
        assert [colour for colour, (x, _) in tiles(axes) if x == 0] == four, "before: everyone's own"
    assert reduced.get_title(loc="left") == "all_reduce"


def test_a_wrong_result_is_drawn_as_it_is():
    [axes] = plot.collectives({"without rank 3": (BEFORE, [7, 7, 7, 8])}).axes
    assert [colour for colour, (x, _) in tiles(axes) if x > 1] == [
        plot.RANK[rank].upper() for rank in (0, 1, 2, 0, 1, 2, 0, 1, 2, 3)
    ]
    assert texts(axes).count("7") == 3


def test_times_are_the_measured_ones():
    [axes] = FIGURES["times"]().axes
    waited, computed, *_ = axes.lines
    assert list(waited.get_ydata()) == [410, 210, 200, 200]
    assert list(computed.get_ydata()) == [400, 200, 100, 50]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "4", "8"]
    assert texts(axes) == ["you wait", "a rank computes", "more ranks than\nthe 2 cores here"]


def test_with_a_core_for_every_rank_none_take_turns():
    [axes] = FIGURES["times with many cores"]().axes
    assert texts(axes) == ["you wait", "a rank computes"]
    assert "A core for every rank" in axes.get_title(loc="left")
