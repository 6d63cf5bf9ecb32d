"""Every figure of the course, matplotlib only, in one code of colours that colour-blind readers can tell apart.

Each function takes the chapter's own data and returns a ``matplotlib.figure.Figure``; :func:`show` displays it
with its alternative text.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ACTIVITY", "RANK", "new_figure", "show"]

# What a rank is doing (Okabe and Ito's set).
ACTIVITY = {
    "forward": "#0072B2",
    "backward": "#E69F00",  # with respect to the input, or whole
    "backward_weight": "#D55E00",
    "communication": "#CC79A7",
    "optimizer": "#009E73",
    "idle": "#E4E4E4",
}
# Which rank it is (Paul Tol's "muted" set): a different family, so that the two codes are never confused.
RANK = ["#332288", "#CC6677", "#44AA99", "#DDCC77", "#88CCEE", "#882255", "#117733", "#999933"]

_STYLE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
}


def new_figure(title: str, width: float = 7.0, height: float = 3.0, columns: int = 1, **kwargs) -> tuple[Figure, Axes]:
    """An empty figure in the course's style.

    Args:
        title: what the figure shows, as a finding.
        width: inches, default 7.
        height: inches, default 3.
        columns: number of axes side by side, default 1.
        kwargs: for ``matplotlib.pyplot.subplots``.

    Returns:
        the figure and its axes (an array of axes where ``columns`` > 1).
    """
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained", **kwargs)
        if columns == 1:
            axes.set_title(title)
        else:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure, axes


def show(figure, alt: str) -> None:
    """Displays a matplotlib figure as a PNG with alternative text, and closes it.

    The text stands in the output's metadata, where nbconvert and the site find it, and as the output's
    ``text/plain``, which is what a front end without pictures shows and what nbval compares: when the text
    changes, the chapter's test says so.

    Args:
        figure: a ``matplotlib.figure.Figure``.
        alt: one or two sentences with what a reader should see, the same in every run of the chapter.

    Examples:
        .. code-block:: python

            show(plot.shards(indices), alt="Four rows of tiles, one a rank: each holds 25 of 100 samples.")
    """
    if not alt.strip():
        raise ValueError("alt is empty: say in a sentence what the figure shows.")
    # Imported here: lab is imported on ranks too, and they draw nothing.
    import matplotlib.pyplot as plt
    from IPython import get_ipython
    from IPython.display import display

    png = io.BytesIO()
    # A white ground also on dark pages; no Software entry, which holds matplotlib's version.
    figure.savefig(
        png, format="png", dpi=110, facecolor="white", bbox_inches="tight", metadata={"Software": None}
    )
    plt.close(figure)  # else the inline backend shows it again at the end of the cell
    if get_ipython() is None:
        print(alt)
        return
    data = {"image/png": png.getvalue(), "text/plain": alt}
    display(data, raw=True, metadata={"image/png": {"alt": alt}})
