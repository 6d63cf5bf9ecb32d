"""The figures of chapter 18: what they draw, and that their text is large enough to read."""

import matplotlib.pyplot as plt
import pytest
from checking import text_sizes

from ignite_ddl import plot

pytestmark = pytest.mark.usefixtures("no_window")


KEPT = {"gpipe": [8000, 8000], "1f1b": [2000, 1000]}
SIMULATED, MEASURED = {1: 0.3, 4: 0.17, 24: 0.25}, {1: 0.31, 4: 0.18, 24: 0.27}
FIGURES = {
    "activations_by_rank": lambda: plot.activations_by_rank(KEPT, {"1f1b": [2000, 1500]}, "It keeps less"),
    "step_by_microbatches": lambda: plot.step_by_microbatches(SIMULATED, MEASURED, "In between"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


def test_a_bar_is_a_rank_and_a_line_its_prediction():
    gpipe, one_f_one_b = FIGURES["activations_by_rank"]().axes
    assert [axes.get_title(loc="left") for axes in (gpipe, one_f_one_b)] == list(KEPT)
    assert [bar.get_height() for bar in gpipe.patches] == [8, 8]
    assert [bar.get_height() for bar in one_f_one_b.patches] == [2, 1]
    assert not gpipe.lines
    assert [line.get_ydata()[0] for line in one_f_one_b.lines] == [2, 1.5]
    assert gpipe.get_ylim() == one_f_one_b.get_ylim()
    assert [label.get_text() for label in gpipe.get_xticklabels()] == ["rank 0", "rank 1"]


def test_the_line_is_simulated_the_marks_measured_and_the_best_has_its_time():
    [axes] = FIGURES["step_by_microbatches"]().axes
    line, marks = axes.lines
    assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == {
        m: 1e3 * s for m, s in SIMULATED.items()
    }
    assert dict(zip(marks.get_xdata(), marks.get_ydata(), strict=True)) == {
        m: 1e3 * s for m, s in MEASURED.items()
    }
    assert marks.get_linestyle() == "None"
    assert "4 microbatches\n180 ms" in [text.get_text() for text in axes.texts]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4", "24"]


@pytest.mark.parametrize("name", FIGURES)
def test_its_example_runs(name):
    example = getattr(plot, name).__doc__.split(".. code-block:: python\n")[1]
    exec("\n".join(line.removeprefix(" " * 12) for line in example.splitlines()), {"plot": plot})
    assert plt.get_fignums()
