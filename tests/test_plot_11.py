"""The figures of chapter 11: hard negatives, accuracy over batch sizes, batch or rate, share of communication."""

import pytest
import torch
from matplotlib.text import Text

from ignite_ddl import plot
from ignite_ddl.lab import cost

CURVES = {
    "the same rate": {24: (0.81, 0.01), 120: (0.80, 0.01), 600: (0.74, 0.01), 3000: (0.5, 0.03)},
    "scaled rate": {24: (0.81, 0.01), 120: (0.80, 0.01), 600: (0.5, 0.1), 3000: (0.1, 0.0)},
    "warmed up": {24: (0.81, 0.01), 120: (0.80, 0.01), 600: (0.79, 0.01), 3000: (0.1, 0.0)},
}
STEPS = [cost.data_parallel_step(n, **cost.RESNET50_P100) for n in (8, 256, 1024)]


pytestmark = pytest.mark.usefixtures("no_window")


def negatives():
    images = torch.rand(2, 1, 28, 28)
    return plot.hardest_negatives(
        images, {8: [(images[1], 0.4), (images[0], 0.3)], 64: [(images[1], 0.6)] * 2}
    )


def trade():
    noise = {"decay": [4.0, 4.0, 1.0], "grow": [4.0, 4.0, 1.0], "neither": [4.0] * 3}
    return plot.batch_or_rate(noise, {name: ([0.6, 0.7, 0.8], [0.01, 0.02, 0.03]) for name in noise})


FIGURES = {
    "negatives": negatives,
    "batch sizes": lambda: plot.over_batch_sizes(CURVES, "It falls", "test accuracy"),
    "trade": trade,
    "communication": lambda: plot.communication_share(STEPS, "More messages"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    figure = FIGURES[name]()
    figure.canvas.draw()
    sizes = {text.get_text(): text.get_size() for text in figure.findobj(Text) if text.get_text().strip()}
    assert sizes
    assert min(sizes.values()) >= 9, sizes


def test_a_column_for_each_batch_size_with_its_similarities():
    [axes] = negatives().axes
    assert len(axes.images) == 6
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if text[0] == "0"] == ["0.40", "0.30", "0.60", "0.60"]
    assert [text for text in texts if text.startswith("in a")] == ["in a batch of 8", "in a batch of 64"]


def test_each_curve_has_a_label_where_it_stands_alone():
    [axes] = FIGURES["batch sizes"]().axes
    places = {text.get_text(): text.xy for text in axes.texts}
    assert places == {"the same rate": (3000, 0.5), "scaled rate": (600, 0.5), "warmed up": (600, 0.79)}


def test_bars_show_two_standard_errors_and_an_error_of_0_shows_none():
    [axes] = FIGURES["batch sizes"]().axes
    low, high = axes.collections[0].get_segments()[2][:, 1]
    assert (low, high) == pytest.approx((0.72, 0.76))
    exact = plot.over_batch_sizes({"p": {8: (0.1, 0), 64: (0.5, 0)}}, "It climbs", "p").axes[0]
    assert not exact.collections


def test_noise_left_and_accuracy_right_with_whole_epochs():
    left, right = trade().axes
    assert [list(line.get_ydata()) for line in left.lines] == [[4, 4, 1], [4, 4, 1], [4, 4, 4]]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["decay", "grow", "neither"]
    assert len(right.collections) == 3
    band = right.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.58, 0.86))
    assert all(tick == int(tick) for tick in left.get_xticks())
    assert right.get_ylabel() == "test accuracy ± 2 standard errors"


def test_bars_add_up_to_the_step_and_say_the_share():
    [axes] = FIGURES["communication"]().axes
    widths = [bar.get_width() for bar in axes.patches]
    for step, compute, communication in zip(STEPS, widths[::2], widths[1::2], strict=True):
        assert compute + communication == pytest.approx(1e3 * step.seconds)
        assert communication == pytest.approx(1e3 * step.communication_seconds)
    assert [text.get_text() for text in axes.texts if "%" in text.get_text()] == ["14%", "17%", "23%"]
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == "1024 GPUs, batch 32,768"
