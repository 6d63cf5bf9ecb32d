"""The figures of chapter 15: what they draw, and that their text is large enough to read."""

import pytest
from checking import text_sizes
from matplotlib.colors import to_hex

from ignite_ddl import plot

pytestmark = pytest.mark.usefixtures("no_window")


PREDICTED = {"data parallel": {4: 1000, 64: 1000}, "inside layers": {4: 100, 64: 1600}}
FIGURES = {
    "cuts_of_a_model": lambda: plot.cuts_of_a_model(4, 4),
    "bytes_over_rows": lambda: plot.bytes_over_rows(PREDICTED, PREDICTED, "They cross"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


def test_a_layer_is_on_all_ranks_on_one_or_in_pieces():
    [axes] = plot.cuts_of_a_model(4, 2).axes
    boxes = [patch for patch in axes.patches if patch.get_width() > 0]
    colours = [to_hex(box.get_facecolor()).upper() for box in boxes]
    assert len(boxes) == 4 + 4 + 4 * 2
    assert colours[:4] == [plot.ACTIVITY["idle"]] * 4
    assert colours[4:8] == [plot.RANK[0]] * 2 + [plot.RANK[1]] * 2
    assert colours[8:] == plot.RANK[:2] * 4
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if "holds" in text] == ["a rank holds 100%"] + ["a rank holds 50%"] * 2
    with pytest.raises(ValueError, match="n_layers should be a multiple of n_ranks=4, but given 6"):
        plot.cuts_of_a_model(6, 4)


def test_lines_are_predicted_and_marks_counted():
    [axes] = FIGURES["bytes_over_rows"]().axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 1], [1, 1], [0.1, 1.6], [0.1, 1.6]]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "None"] * 2
    assert {"data parallel", "inside layers"} <= {text.get_text() for text in axes.texts}
