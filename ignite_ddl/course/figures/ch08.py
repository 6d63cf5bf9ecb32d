"""The figure of chapter 08: how long each step took."""

from __future__ import annotations

from statistics import quantiles
from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["step_times"]


def step_times(seconds: list[float], warm_up: int, title: str) -> Figure:
    """A dot a step on a logarithmic axis; median and quartiles of those after the warm-up.

    Args:
        seconds: how long each step took, in order.
        warm_up: number of first steps that the median leaves out.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch08 as figures

            seconds = [0.03, 0.006, *[0.004, 0.005, 0.003] * 10]
            figure = figures.step_times(seconds, warm_up=2, title="The first step is slow")
    """
    milliseconds = [1e3 * value for value in seconds]
    n = len(seconds)
    low, median, high = quantiles(milliseconds[warm_up:], n=4)
    figure, axes = draw.new_figure(title, height=2.8)
    axes.axhspan(low, high, color=ACTIVITY["idle"], zorder=0)
    axes.axhline(median, color="#444444", linewidth=1.2)
    first, after = range(1, warm_up + 1), range(warm_up + 1, n + 1)
    axes.plot(first, milliseconds[:warm_up], "o", color=ACTIVITY["backward_weight"])
    axes.plot(after, milliseconds[warm_up:], "o", color=ACTIVITY["compute"], markersize=4)
    draw.note(axes, "warm-up", (1, milliseconds[0]), (8, 0), size=9)
    label = f"median {median:.1f} ms;\nhalf of the steps\nare {low:.1f} to {high:.1f}"
    draw.note(axes, label, (n + 0.5, median), (4, 0), size=9)
    axes.set_yscale("log")
    axes.set_xlim(0.5, n + 0.5)
    axes.set_ylim(min(milliseconds) / 1.5, max(milliseconds) * 1.6)
    draw.log_ticks(axes, min(milliseconds) / 2, max(milliseconds) * 2)
    axes.set_xlabel("step")
    axes.set_ylabel("milliseconds")
    return figure
