"""The figures of chapter 10: what passes through a master, and where a step's time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["bytes_through_a_rank", "step_shares"]


def bytes_through_a_rank(
    predicted: dict[str, dict[int, float]], counted: dict[str, dict[int, int]]
) -> Figure:
    """Bytes in and out of one rank in a step, against the size of the world: lines predicted, marks counted.

    Args:
        predicted: name of a scheme, of two, to world size to bytes.
        counted: name of a scheme to world size to bytes.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch10 as figures

            predicted = {"master": {2: 2e6, 8: 14e6}, "rank of DDP": {2: 2e6, 8: 3.5e6}}
            figure = figures.bytes_through_a_rank(predicted, {"master": {2: 2_000_000}})
    """
    figure, axes = draw.new_figure(
        "The master's bytes grow with the world, a DDP rank's level off", height=2.9
    )
    draw.lines_and_marks(
        axes, predicted, counted, [ACTIVITY["backward_weight"], ACTIVITY["forward"]], "sv", 1e-6
    )
    axes.set_xticks(sorted({n for of_world in predicted.values() for n in of_world}))
    axes.set_ylim(0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("MB in and out, a step")
    axes.text(0.02, 0.97, "lines: predicted\nmarks: counted", transform=axes.transAxes, fontsize=9, va="top")
    return figure


def step_shares(schemes: dict[str, dict[int, dict[str, float]]], title: str) -> Figure:
    """Where a step's time goes, against the size of the world: a panel a scheme, a bar a world, stacked.

    Args:
        schemes: name of a scheme, of two or more, to world size to seconds by kind ("compute", "communication"),
            bottom first.
        title: the finding.

    Returns:
        the figure; the panels share the axis of time, and each bar has its milliseconds above it.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch10 as figures

            alone = {"compute": 0.3, "communication": 0.0}
            figure = figures.step_shares({"master": {1: alone}, "DDP": {1: alone}}, "Alone they are the same")
    """
    figure, axes = draw.new_figure(title, height=2.9, columns=len(schemes), sharey=True)
    for panel, (name, worlds) in zip(axes, schemes.items(), strict=True):
        for place, parts in enumerate(worlds.values()):
            seconds = [(1e3 * value, ACTIVITY[kind], "") for kind, value in parts.items()]
            top = draw.bar(panel, place, seconds, 0.74)
            draw.note(panel, f"{top:.0f}", (place, top), (0, 2), ha="center", va="baseline", fontsize=9)
        draw.heading(panel, name, pad=9)
        panel.set_xticks(range(len(worlds)), [str(n) for n in worlds])
        panel.set_xlabel("ranks")
    axes[0].set_ylabel("milliseconds a step")
    axes[0].set_ylim(0, 1.12 * axes[0].get_ylim()[1])
    bars = list(next(iter(schemes.values())).values())
    large = [kind for kind, seconds in bars[-1].items() if seconds > 0.2 * sum(bars[-1].values())]
    for place, named in ((0, ["compute"]), (len(bars) - 1, large)):
        below = 0.0
        for kind, seconds in bars[place].items():
            if kind in named:
                style = {"ha": "center", "va": "center", "rotation": 90, "size": 9}
                axes[0].text(place, below + 5e2 * seconds, kind, color=draw.ink_on(ACTIVITY[kind]), **style)
            below += 1e3 * seconds
    return figure
