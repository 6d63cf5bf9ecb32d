"""The figures of chapter 18: what pipelines keep for backward, and the best number of microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, RANK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["activations_by_rank", "step_by_microbatches"]


def activations_by_rank(
    measured: dict[str, list[float]], predicted: dict[str, list[float]], title: str
) -> Figure:
    """What the ranks of a pipeline keep for backward at most: a panel a schedule, a bar a rank, a line where predicted.

    Args:
        measured: name of a schedule, of two or more, to bytes, one for each rank.
        predicted: the same.
        title: the finding.

    Returns:
        the figure; its panels share the axis of bytes.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch18 as figures

            kept = {"gpipe": [8e3, 8e3], "1f1b": [2e3, 1e3]}
            figure = figures.activations_by_rank(kept, kept, "1F1B keeps less")
    """
    figure, axes = draw.new_figure(title, height=2.7, columns=len(measured), sharey=True)
    for panel, (name, bars) in zip(axes, measured.items(), strict=True):
        for rank, (value, expected) in enumerate(zip(bars, predicted[name], strict=True)):
            panel.bar(rank, 1e-3 * value, width=0.7, color=RANK[rank])
            panel.plot([rank - 0.45, rank + 0.45], [1e-3 * expected] * 2, color="#222222", linewidth=2)
        draw.heading(panel, name)
        panel.set_xticks(range(len(bars)), [f"rank {rank}" for rank in range(len(bars))])
        panel.set_ylim(0, 1.15e-3 * max(map(max, measured.values())))
    axes[0].set_ylabel("kB of activations, at most")
    text = "bars: measured\nblack lines: predicted"
    axes[-1].text(0.97, 0.95, text, transform=axes[-1].transAxes, fontsize=9, ha="right", va="top")
    return figure


def step_by_microbatches(simulated: dict[int, float], measured: dict[int, float], title: str) -> Figure:
    """How long a pipeline step takes, against its number of microbatches: a simulated line, measured marks.

    Args:
        simulated: number of microbatches to seconds.
        measured: number of microbatches to seconds.
        title: the finding.

    Returns:
        the figure; the axis of microbatches is logarithmic, and what is fastest has its time above it.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch18 as figures

            simulated, measured = {1: 0.3, 4: 0.17, 12: 0.2}, {1: 0.31, 4: 0.18, 12: 0.21}
            figure = figures.step_by_microbatches(simulated, measured, "In between is best")
    """
    figure, axes = draw.new_figure(title, height=2.9)
    counts = sorted(simulated)
    axes.plot(counts, [1e3 * simulated[m] for m in counts], color=ACTIVITY["forward"], linewidth=2)
    look = {"color": ACTIVITY["backward_weight"], "markersize": 8, "markeredgecolor": "white"}
    axes.plot(list(measured), [1e3 * value for value in measured.values()], "o", **look)
    best = min(measured, key=measured.get)
    shortest = 1e3 * measured[best]
    text = f"{best} microbatches\n{shortest:.0f} ms"
    draw.note(axes, text, (best, shortest), (0, 12), ha="center", va="baseline", fontsize=9)
    axes.set_xscale("log", base=2)
    ticks = sorted({*counts, *measured})
    axes.set_xticks(ticks, [str(m) for m in ticks])
    axes.minorticks_off()
    axes.set_ylim(0)
    axes.set_xlabel("microbatches")
    axes.set_ylabel("milliseconds a step")
    axes.text(0.5, 0.1, "line: simulated, marks: measured", transform=axes.transAxes, fontsize=9, ha="center")
    return figure
