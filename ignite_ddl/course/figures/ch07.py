"""The figure of chapter 07: what each rank's profiler says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["rank_profiles"]


def rank_profiles(cases: dict[str, list[dict[str, float]]], title: str) -> Figure:
    """What each rank's profiler says of a step: a panel a case, a bar a rank, cut into data, processing, handlers.

    Args:
        cases: name of a case, of two or more, to a list with a dict a rank: seconds of "data", "processing" and
            "handlers".
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch07 as figures

            fast, slow = ({"data": data, "processing": 0.05, "handlers": 0.005} for data in (0.03, 0.09))
            figure = figures.rank_profiles({"equal": [fast, fast], "rank 1 is slow": [fast, slow]}, "One is slow")
    """
    colours = {"data": ACTIVITY["data"], "processing": ACTIVITY["compute"], "handlers": ACTIVITY["handlers"]}
    figure, panels = draw.new_figure(
        title, width=7.6, height=2.7, columns=len(cases), sharex=True, sharey=True
    )
    for panel, (name, ranks) in zip(panels, cases.items(), strict=True):
        draw.heading(panel, name)
        for rank, seconds in enumerate(ranks):
            sizes = {colour: 1e3 * seconds[part] for part, colour in colours.items()}
            parts = [(size, colour, f"{size:.0f}" if size >= 25 else "") for colour, size in sizes.items()]
            draw.bar(panel, rank, parts, 0.75, upright=False, edgecolor="white", linewidth=0.6)
        panel.set_xlabel("ms a step")
    draw.name_rows(panels[0], [f"rank {rank}" for rank in range(len(ranks))])
    draw.key(figure, colours)
    return figure
