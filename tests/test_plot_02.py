"""The figures of chapter 02: nothing is lost between the data and the picture, and the text can be read."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.text import Text

from ignite_ddl import plot

ROWS = {"host": [("1", 5.0, 5.1), ("2", 5.1, 5.2)], "kernels": [("1", 5.1, 5.4)]}
STAGES = {
    "after forward": {"parameters": 8.0, "activations": 4.0, "gradients": 4e-6},
    "after backward": {"parameters": 8.0, "gradients": 8.0},
}
CASES = {"2 ranks: local_rank": [0, 1], "2 ranks: nothing set": [0, 0], "4 ranks: local_rank": [0, 1, 2, 3]}


pytestmark = pytest.mark.usefixtures("no_window")


def gradient():
    return torch.cat([torch.full((30,), 2.0**-30), torch.full((70,), 2.0**-20), torch.zeros(5)])


FIGURES = {
    "host_and_device": plot.host_and_device,
    "device_timelines": lambda: plot.device_timelines({"one": ROWS, "other": ROWS}, "Two programs"),
    "memory_stages": lambda: plot.memory_stages(STAGES, peak=20.0),
    "gradient_sizes": lambda: plot.gradient_sizes(gradient(), scale=2.0**16),
    "ranks_on_gpus": lambda: plot.ranks_on_gpus(CASES, n_gpus=2),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    drawn = FIGURES[name]()
    drawn.canvas.draw()
    sizes = {text.get_text(): text.get_size() for text in drawn.findobj(Text) if text.get_text()}
    assert min(sizes.values()) >= 9, sizes


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_timelines_begin_at_zero_and_name_their_length():
    first, second = FIGURES["device_timelines"]().axes
    assert [bar.get_x() for bar in first.patches] == pytest.approx([0, 100, 100])
    assert [bar.get_width() for bar in first.patches] == pytest.approx([100, 100, 300])
    assert first.get_title(loc="left") == "one: 400 ms"
    assert first.get_xlim() == second.get_xlim()
    assert [label.get_text() for label in first.get_yticklabels()] == ["host", "kernels"]
    assert first.get_ylim()[0] > first.get_ylim()[1]  # the host at the top


def test_stages_stack_to_their_sum_without_crumbs():
    [axes] = FIGURES["memory_stages"]().axes
    assert [bar.get_height() for bar in axes.patches] == [8.0, 4.0, 8.0, 8.0]
    assert [bar.get_y() for bar in axes.patches] == [0.0, 8.0, 0.0, 8.0]
    assert {"12", "16", "parameters 8", "activations 4", "gradients 8"} <= set(texts(axes))
    assert axes.get_ylim()[1] > 20 == axes.lines[0].get_ydata()[0]


def test_what_float16_loses_is_told_and_coloured():
    left, right = FIGURES["gradient_sizes"]().axes
    assert texts(left)[0].startswith("30% are")
    assert texts(right)[0].startswith("almost none are")
    by_colour = {}
    for bar in left.patches[:-1] if left.patches[-1].get_width() > 1 else left.patches:
        if bar.get_height() and bar.get_width() < 1:
            by_colour[plt.matplotlib.colors.to_hex(bar.get_facecolor()).upper()] = bar.get_height()
    assert by_colour == pytest.approx({plot.ACTIVITY["backward_weight"]: 30, plot.ACTIVITY["compute"]: 70})
    assert sum(bar.get_height() for bar in right.patches if bar.get_width() < 1) == pytest.approx(100)


def test_float16_agrees_with_the_share_that_is_drawn():
    torch.manual_seed(0)
    some = torch.randn(10_000).exp() * 2.0**-25
    share = (some.half() == 0).float().mean()
    assert texts(plot.gradient_sizes(some, scale=1.0).axes[0])[0].startswith(f"{share:.0%}")


def test_a_job_works_only_with_one_rank_on_each_gpu():
    panels = FIGURES["ranks_on_gpus"]().axes
    assert [texts(panel)[-1] for panel in panels] == ["works", "fails", "fails"]
    assert texts(panels[2]).count("no GPU") == 2
    assert {"rank 0", "rank 1", "GPU 0", "GPU 1"} <= set(texts(panels[1]))
