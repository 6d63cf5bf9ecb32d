"""Chapter 05's figures: they show what was dealt, in letters that can be read."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from ignite_ddl import plot

PADDED = [[[0], [4], [8]], [[1], [5], [9]], [[2], [6], [0]], [[3], [7], [1]]]
EXACT = [[[0], [4], []], [[1], [5], [8]], [[2], [6], []], [[3], [7], [9]]]
PEERS = [[[0, 1], [4, 5]], [[0, 1], [4, 5]], [[2, 3], [6, 7]], [[2, 3], [6, 7]]]


@pytest.fixture(autouse=True)
def close():
    plt.switch_backend("agg")
    yield
    plt.close("all")


def tiles(axes):
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def words(axes):
    return [text.get_text() for text in axes.texts]


FIGURES = {
    "dealt": lambda: plot.dealt_rows({"": PADDED}, "padded"),
    "panels": lambda: plot.dealt_rows({"idist": EXACT, "ddl": PEERS}, "two loaders", tp=2),
    "owners": lambda: plot.owners_over_epochs(
        {"forgotten": [[0, 1, 2, 3]] * 2, "remembered": [[3, 2, 1, 0]] * 2}
    ),
    "reads": lambda: plot.rows_read(
        {"pads": [4, 4, 4, 4, 8], "exact": [1, 2, 3, 4, 5], "drops": [0, 0, 0, 4, 4]}
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    texts = [text for axes in FIGURES[name]().axes for text in axes.texts if text.get_text()]
    assert min([text.get_fontsize() for text in texts], default=9) >= 9


def test_a_row_has_its_ranks_colour_and_a_second_read_is_hatched():
    [axes] = plot.dealt_rows({"": PADDED}, "padded").axes
    plain = [tile for tile in tiles(axes) if tile.get_hatch() is None]
    for rank, count in enumerate((3, 3, 2, 2)):
        assert [to_hex(tile.get_facecolor()).upper() for tile in plain].count(plot.RANK[rank]) == count
    assert len(tiles(axes)) - len(plain) == 2
    assert [word for word in words(axes) if word.startswith("step")] == ["step 1", "step 2", "step 3"]


def test_an_empty_slot_is_dashed_and_said_so():
    figure = plot.dealt_rows({"": EXACT}, "exact")
    [axes] = figure.axes
    assert sum(tile.get_linestyle() not in ("-", "solid") for tile in tiles(axes)) == 2
    assert figure.get_supxlabel() == "dashed: no row at this step"
    assert plot.dealt_rows({"": PADDED}, "padded").get_supxlabel() == "hatched: read before in this epoch"


def test_peers_share_rows_and_the_figure_says_whether():
    first, second = plot.dealt_rows({"idist": EXACT, "ddl": PEERS}, "two loaders", tp=2).axes
    assert words(first).count("tp peers:\ndifferent\nrows") == 2
    assert words(second).count("tp peers:\nthe same\nrows") == 2
    assert not any(tile.get_hatch() for tile in tiles(second))


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="ranks make"):
        plot.dealt_rows({"": [[[0], [1]], [[2]]]}, "uneven")
    with pytest.raises(ValueError, match="tp=3"):
        plot.dealt_rows({"": PADDED}, "three peers", tp=3)


def test_owners_are_the_colours():
    first, second = FIGURES["owners"]().axes
    colours = [to_hex(tile.get_facecolor()).upper() for tile in tiles(first)]
    assert colours == plot.RANK[:4] * 2
    assert [to_hex(tile.get_facecolor()).upper() for tile in tiles(second)] == plot.RANK[3::-1] * 2


def test_lines_are_the_counts():
    [axes] = FIGURES["reads"]().axes
    assert [list(line.get_ydata()) for line in axes.lines] == [
        [4, 4, 4, 4, 8],
        [1, 2, 3, 4, 5],
        [0, 0, 0, 4, 4],
    ]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 2, 3, 4, 5]] * 3
