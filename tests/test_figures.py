"""show: a PNG with alternative text. That a kernel stores both is tested in test_notebook_tools.py."""

import matplotlib.pyplot as plt
import pytest

from ignite_ddl.plot import show


@pytest.fixture
def figure():
    plt.switch_backend("agg")
    figure, axes = plt.subplots()
    axes.plot([1, 2])
    yield figure
    plt.close(figure)


def test_outside_a_notebook_the_text_is_printed_and_the_figure_closed(figure, capsys):
    assert show(figure, alt="A line that rises from 1 to 2.") is None
    assert capsys.readouterr().out == "A line that rises from 1 to 2.\n"
    assert not plt.fignum_exists(figure.number)


@pytest.mark.parametrize("alt", ["", "  "])
def test_empty_text_is_refused(alt, figure):
    with pytest.raises(ValueError, match="alt is empty"):
        show(figure, alt=alt)
