"""The figures of chapter 04: what they draw, and that their text is large enough to read."""

import pytest
import torch
from checking import text_sizes

from ignite_ddl import plot

pytestmark = pytest.mark.usefixtures("no_window")


def history(*accuracies):
    return [{"step": 47 * (i + 1), "accuracy": accuracy} for i, accuracy in enumerate(accuracies)]


RIGHT = {"loss": 0.0, "gradients": 7e-17, "weights": 3e-17}
WRONG = {"loss": 6.9, "gradients": 0.5, "weights": 0.06}
FIGURES = {
    "dealt_batch": lambda: plot.dealt_batch(torch.rand(64, 1, 28, 28)),
    "learning_curves": lambda: plot.learning_curves(
        {1: [history(0.7, 0.8)] * 3, 4: [history(0.7, 0.8)]}, 0.012
    ),
    "parity_errors": lambda: plot.parity_errors({"averaged by DDP": RIGHT, "summed": WRONG}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


@pytest.mark.parametrize(("n_images", "world_size"), [(64, 4), (6, 2), (3, 3)])
def test_each_image_stands_in_the_batch_and_on_its_rank(n_images, world_size):
    [axes] = plot.dealt_batch(torch.rand(n_images, 28, 28), world_size).axes
    assert len(axes.images) == 2 * n_images
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if text.startswith("rank")] == [
        f"rank {rank}" for rank in range(world_size)
    ]
    assert texts.count("forward") == texts.count("backward") == texts.count("update") == world_size
    assert f"{n_images // world_size} images each" in texts


@pytest.mark.parametrize("n_images", [0, 6])
def test_a_batch_that_cannot_be_dealt_evenly_is_refused(n_images):
    with pytest.raises(ValueError, match=f"multiple of world_size=4, but given {n_images}"):
        plot.dealt_batch(torch.rand(n_images, 28, 28), 4)


def test_each_kind_of_run_has_one_entry_in_the_legend():
    [axes] = FIGURES["learning_curves"]().axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "1 process, 3 seeds",
        "4 ranks, 1 seed",
    ]


def test_an_error_of_zero_is_drawn_at_the_left_end():
    [axes] = FIGURES["parity_errors"]().axes
    drawn = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "None"]
    assert drawn == [1e-18, 7e-17, 3e-17, 6.9, 0.5, 0.06]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["averaged by DDP", "summed"]
