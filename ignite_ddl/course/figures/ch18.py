"""The figures of chapter 18: what pipelines keep for backward, the number of microbatches, and an unequal cut."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, INK, RANK, on_any_page

__all__ = ["kept_by_rank", "step_by_microbatches", "two_steps", "unequal_stages"]

TITLE = {"stages": "Four ranks, a stage each: forward goes down, backward comes up (simulated)"}
ALT = {
    "stages": "A simulated step of four ranks with one batch. Forward passes go down the rows, one after the other, "
    "backward passes come up, and each rank is grey for three quarters of the step.",
    "by hand": "Measured passes of four ranks. In one piece: a staircase down and up, mostly grey. GPipe with 8 "
    "microbatches: the ranks overlap, grey remains at the corners and in the middle, and the step is less than half "
    "as long.",
    "orders": "Measured passes of four ranks with 8 microbatches. GPipe: all forward passes, then all backward "
    "passes. 1F1B: after a short start each rank alternates one forward and one backward pass. Both steps are about "
    "equally long.",
    "kept": "Tensors that four ranks keep at most. GPipe: 40 on every rank. 1F1B: 20, 15, 10 and 5. GPipe, "
    "recomputed: 8 on every rank. 1F1B, recomputed: 4, 3, 2 and 1. Recomputed, four more hatched on top.",
    "microbatches": "Step time against the number of microbatches, a line by the formula and measured marks above "
    "it: long at 1, shortest in the middle, longer again at 24.",
    "unequal": "Two simulated 1F1B steps of four ranks. Balanced by parameters, rank 3 is busy almost all the time, "
    "ranks 1 and 2 wait for it, and rank 0 is idle. By cost, ranks 1 to 3 are equally busy and the step is shorter.",
}  # alternative texts of the chapter's figures

_STEPS = {  # a title, and the names of the two panels
    "by hand": (
        "Overlap fills most of the grey (measured, stated delays)",
        ("in one piece", "GPipe by hand, 8 microbatches"),
    ),
    "orders": ("Another order, about the same length (measured)", ("GPipe", "1F1B")),
}


def two_steps(which: str, above: list, below: list) -> draw.Figure:
    """Two steps of a pipeline, one above the other.

    Args:
        which: "by hand" or "orders": of which section.
        above: records of the first step.
        below: records of the second.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch18 as figures
            from ignite_ddl.lab import simulate

            gpipe, other = (simulate.pipeline(name, 4, 8, 1, 1, 1).records for name in ("gpipe", "1f1b"))
            figure = figures.two_steps("orders", gpipe, other)
    """
    title, names = _STEPS[which]
    return draw.schedules(dict(zip(names, (above, below), strict=True)), title)


def kept_by_rank(
    kept: dict[str, list[float]],
    title: str = "1F1B keeps fewer microbatches, recomputation less of each",
    back: dict[str, float] | None = None,
) -> draw.Figure:
    """What the ranks of a pipeline keep for backward at most: a panel a schedule, a bar a rank.

    Args:
        kept: name of a schedule, of two or more, to a number for each rank.
        title: the finding. Default: the chapter's.
        back: name of a schedule to what comes back for the one microbatch that runs backward; hatched, on top.
            Default: none.

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
            more = (back or {}).get(name, 0)
            if more:
                panel.bar(rank, more, bottom=value, width=0.8, fill=False, hatch="///", edgecolor=RANK[rank])
            text = f"{value:g}+{more:g}" if more else f"{value:g}"
            draw.note(panel, text, (rank, value + more), (0, 3), ha="center", va="baseline", fontsize=9)
        draw.heading(panel, name)
        panel.set_xticks(range(len(bars)), map(str, range(len(bars))))
        panel.set_xlabel("rank")
        panel.set_ylim(0, 1.15 * highest)
    axes[0].set_ylabel("tensors kept at most")
    return on_any_page(figure)


def step_by_microbatches(
    predicted: dict[int, float],
    measured: dict[int, list[float]],
    title: str = "Too few microbatches wait, too many pay for every pass",
) -> draw.Figure:
    """How long a pipeline step takes, against its number of microbatches: a predicted line, measured marks.

    Args:
        predicted: number of microbatches to seconds.
        measured: number of microbatches to the seconds of each step.
        title: the finding. Default: the chapter's.

    Returns:
        the figure; the axis of microbatches is logarithmic, and those within 4 % of the fastest are named.

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
    draw.note(axes, "measured", (last, 1e3 * min(measured[last])), (9, 4), red, size=9.5)
    draw.note(axes, "formula", (last, 1e3 * predicted[last]), (9, -5), blue, size=9.5)
    best = min(measured, key=lambda m: min(measured[m]))
    at = (best, 1e3 * min(measured[best]))
    alike = [str(m) for m in counts if min(measured[m]) <= 1.04 * min(measured[best])]
    draw.note(axes, f"{' or '.join(alike)} are fastest", at, (0, -30), ha="center", va="top", **style)
    draw.log_axis(axes, counts, base=2)
    axes.set_xlim(0.9, 1.6 * last)
    axes.set_ylim(0, 1.08e3 * max(map(max, measured.values())))
    axes.set_xlabel("microbatches")
    axes.set_ylabel("milliseconds a step")
    return on_any_page(figure)


def unequal_stages(
    panels: dict[str, list],
    title: str = "The slowest stage sets the pace (simulated)",
    unit: str = "time of a block, forward and backward",
    empty: str = "rank 0 has the embedding alone: a look-up, no matrix product",
) -> draw.Figure:
    """``draw.schedules`` with a word in the first panel's row of rank 0, which has next to nothing to do.

    Args:
        panels: as for ``draw.schedules``.
        title: the finding. Default: the chapter's.
        unit: under the axis. Default: the chapter's.
        empty: the word. Default: the chapter's.

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
