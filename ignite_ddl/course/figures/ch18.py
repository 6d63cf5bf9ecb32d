"""The figures of chapter 18: what pipelines keep for backward, the number of microbatches, and an unequal cut."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, INK, RANK, on_any_page

__all__ = ["kept_by_rank", "step_by_microbatches", "unequal_stages"]


def kept_by_rank(kept: dict[str, list[float]], title: str) -> draw.Figure:
    """What the ranks of a pipeline keep for backward at most: a panel a schedule, a bar a rank.

    Args:
        kept: name of a schedule, of two or more, to a number for each rank.
        title: the finding.

    Returns:
        the figure; its panels share the upright axis, and each bar has its number above it.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch18 as figures

            figure = figures.kept_by_rank({"gpipe": [40, 40], "1f1b": [10, 5]}, "1F1B keeps less")
    """
    figure, axes = draw.new_figure(title, width=7.4, height=2.5, columns=len(kept), sharey=True)
    highest = max(map(max, kept.values()))
    for panel, (name, bars) in zip(axes, kept.items(), strict=True):
        for rank, value in enumerate(bars):
            draw.bar(panel, rank, [(value, RANK[rank], "")], edgecolor=INK, linewidth=0.6)
            draw.note(panel, f"{value:g}", (rank, value), (0, 3), ha="center", va="baseline", fontsize=9)
        draw.heading(panel, name)
        panel.set_xticks(range(len(bars)), map(str, range(len(bars))))
        panel.set_xlabel("rank")
        panel.set_ylim(0, 1.15 * highest)
    axes[0].set_ylabel("tensors kept at most")
    return on_any_page(figure)


def step_by_microbatches(predicted: dict[int, float], measured: dict[int, list[float]], title: str) -> draw.Figure:
    """How long a pipeline step takes, against its number of microbatches: a predicted line, measured marks.

    Args:
        predicted: number of microbatches to seconds.
        measured: number of microbatches to the seconds of each step.
        title: the finding.

    Returns:
        the figure; the axis of microbatches is logarithmic, and the fastest is named.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch18 as figures

            predicted, measured = {1: 0.3, 4: 0.17, 12: 0.2}, {1: [0.31], 4: [0.18], 12: [0.21]}
            figure = figures.step_by_microbatches(predicted, measured, "In between is best")
    """
    figure, axes = draw.new_figure(title, height=2.9)
    counts = sorted(predicted)
    blue, red = ACTIVITY["forward"], ACTIVITY["backward_weight"]
    axes.plot(counts, [1e3 * predicted[m] for m in counts], color=blue, linewidth=2)
    for m, steps in measured.items():
        axes.plot([m] * len(steps), [1e3 * seconds for seconds in steps], "o", color=red, alpha=0.35)
        axes.plot(m, 1e3 * min(steps), "o", color=red, markersize=7)
    last = counts[-1]
    style = {"size": 9.5, "color": draw.ink(red)}
    draw.note(axes, "measured", (last, 1e3 * min(measured[last])), (9, 0), red, size=9.5)
    draw.note(axes, "formula", (last, 1e3 * predicted[last]), (9, 0), blue, size=9.5)
    best = min(measured, key=lambda m: min(measured[m]))
    at = (best, 1e3 * min(measured[best]))
    draw.note(axes, f"{best} are fastest", at, (0, -30), ha="center", va="top", **style)
    draw.log_axis(axes, counts, base=2)
    axes.set_xlim(0.9, 1.6 * last)
    axes.set_ylim(0, 1.08e3 * max(map(max, measured.values())))
    axes.set_xlabel("microbatches")
    axes.set_ylabel("milliseconds a step")
    return on_any_page(figure)


def unequal_stages(panels: dict[str, list], title: str, unit: str, empty: str) -> draw.Figure:
    """``draw.schedules`` with a word in the first panel's row of rank 0, which has next to nothing to do.

    Args:
        panels: as for ``draw.schedules``.
        title: the finding.
        unit: under the axis.
        empty: the word.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch18 as figures
            from ignite_ddl.lab import simulate

            step = simulate.pipeline("1f1b", 2, 4, [0.01, 1], [0.01, 1], [0.01, 1])
            figure = figures.unequal_stages({"cut badly": step.records}, "Rank 1 sets the pace", "units", "idle")
    """
    figure = draw.schedules(panels, title, unit)
    first = figure.axes[0]
    middle = sum(first.get_xlim()) / 2
    box = {"facecolor": "white", "edgecolor": INK, "boxstyle": "round,pad=0.25", "linewidth": 0.6}
    style = {"ha": "center", "va": "center", "fontsize": 9, "color": "#222222"}
    first.text(middle, 0, empty, bbox=box, **style)
    return figure
