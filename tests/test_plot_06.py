"""Chapter 06's figures: they show what they are given, in letters that can be read."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from ignite_ddl import plot

JOBS = {"download": "one", "seed": "each", "metric": "together"}
MATRIX = [[8, 2, 0], [1, 9, 0], [0, 5, 5]]
SHADES = torch.arange(3.0).reshape(3, 1, 1, 1) + torch.eye(2)  # three images of 2 x 2


@pytest.fixture(autouse=True)
def close():
    plt.switch_backend("agg")
    yield
    plt.close("all")


FIGURES = {
    "jobs": lambda: plot.who_does_what(JOBS),
    "confusion": lambda: plot.confusion_matrix(MATRIX, ["shirt", "coat", "bag"], n_ranks=2),
    "samples": lambda: plot.sample_predictions(
        SHADES, [0, 1, 2], torch.tensor([0, 2, 2]), ["A/b", "c d", "e"]
    ),
    "resumed": lambda: plot.resumed_losses(
        [3.0, 2.0, 1.5, 1.0], {"whole": [1.5, 1.0], "part": [1.5, 1.25]}, step=2
    ),
    "logged": lambda: plot.logged_scalars(
        {"own": ([1, 2], [3, 1]), "all": ([1, 2], [2, 2])}, ([1, 2], [0.1, 0.0])
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    texts = [text for axes in FIGURES[name]().axes for text in axes.texts if text.get_text()]
    assert min([text.get_fontsize() for text in texts], default=9) >= 9


def test_each_kind_of_job_has_its_ranks():
    [axes] = FIGURES["jobs"]().axes
    colours = [to_hex(tile.get_facecolor()).upper() for tile in axes.patches]
    assert colours[:4] == [plot.RANK[0], *[plot.ACTIVITY["idle"]] * 3], "rank 0 alone"
    assert colours[4:8] == plot.RANK[:4], "each rank"
    assert len(colours) == 9, "one tile for all together"
    assert axes.patches[-1].get_width() == 4


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'twice'"):
        plot.who_does_what({"download": "twice"})


def test_the_matrix_stands_in_the_tiles_and_the_worst_mistake_in_a_frame():
    figure = FIGURES["confusion"]()
    [axes] = figure.axes
    shown = [text.get_text() for text in axes.texts if text.get_text()]
    assert shown == ["8", "2", "1", "9", "5", "5"]
    frame = next(patch for patch in axes.patches if isinstance(patch, Rectangle) and not patch.get_fill())
    assert frame.get_xy() == (1, 2), "predicted coat, true bag"
    assert axes.get_title(loc="left") == "30 images from 2 ranks: bag is taken for coat most often"


def test_each_sample_stands_between_its_class_and_the_answer():
    [axes] = FIGURES["samples"]().axes
    assert [image.get_array().tolist() for image in axes.images] == SHADES.squeeze().tolist()
    spoken = {(text.get_position()[0], text.get_position()[1] < 0.5): text for text in axes.texts}
    for place, (true, predicted) in enumerate([("A/\nb", "A/\nb"), ("c\nd", "e"), ("e", "e")]):
        left, right, *_ = axes.images[place].get_extent()
        assert left < place + 0.5 < right
        assert spoken[place + 0.5, True].get_text() == true
        below = spoken[place + 0.5, False]
        assert below.get_text() == predicted
        marked = to_hex(below.get_color()).upper() == plot.ACTIVITY["backward_weight"]
        assert marked == (true != predicted) == (below.get_fontweight() == "bold")
    assert axes.get_title(loc="left") == "The model names 2 of these 3 images right"


def test_resumed_losses_are_differences():
    [axes] = FIGURES["resumed"]().axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0, 0], [0, 0.25]]
    assert [list(line.get_xdata()) for line in axes.lines] == [[3, 4]] * 2


def test_logged_values_are_the_lines():
    left, right = FIGURES["logged"]().axes
    assert [list(line.get_ydata()) for line in left.lines] == [[3, 1], [2, 2]]
    assert list(right.lines[0].get_ydata()) == [0.1, 0.0]
