"""The figures of chapter 23: ranks on machines, and what the cable between them carries."""

from __future__ import annotations

from collections.abc import Mapping

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, INK, RANK

__all__ = ["on_the_cable", "ranks_on_machines"]

ALT = {  # what the chapter's figures show, in words
    "ranks_on_machines": (
        "Two machines joined by a cable. Machine 0 has ranks 0 and 1, machine 1 has ranks 2 and 3. On each machine "
        "the local ranks are 0 and 1."
    ),
    "on_the_cable": (
        "Two pairs of bars. With tp across the machines a step puts many times as many megabytes on the cable as "
        "with tp inside, and takes many times as long."
    ),
}


def ranks_on_machines(n_machines: int, ranks_per_machine: int) -> draw.Figure:
    """Machines side by side, joined by a cable, each with its ranks and their three numbers.

    Args:
        n_machines: at most 3.
        ranks_per_machine: at most 4.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch23 as figures

            figure = figures.ranks_on_machines(2, 2)
    """
    figure, axes = draw.new_drawing("A rank has a number in the world and one on its machine", width=7, height=1.9)
    wide, away = 2.6, 2.6 * ranks_per_machine + 2.4
    for node in range(n_machines):
        left = away * node
        if node:
            cable = {"arrowstyle": "-", "linewidth": 4, "shrinkA": 0, "shrinkB": 0}
            draw.arrow(axes, (left - 2.0, 1.0), (left - 0.2, 1.0), ACTIVITY["communication"], **cable)
            style = {"size": 9, "ha": "center", "color": INK, "weight": "bold"}
            axes.text(left - 1.1, 0.8, "cable", **style)
        box = wide * ranks_per_machine + 0.2
        draw.tile(axes, left - 0.2, -0.2, box + 0.2, 2.9, "none", edge=INK, linestyle=":")
        style = {"size": 10, "weight": "bold", "ha": "center", "va": "center", "color": INK}
        axes.text(left + box / 2 - 0.1, 2.35, f"machine with node rank {node}", **style)
        for local in range(ranks_per_machine):
            rank = node * ranks_per_machine + local
            text = f"rank {rank}\nlocal rank {local}"
            draw.tile(axes, left + wide * local, 0, wide - 0.2, 2.0, RANK[rank], text, edge="none")
    axes.set_xlim(-0.4, away * n_machines - 1.9)
    axes.set_ylim(2.8, -0.3)
    return draw.on_any_page(figure)


def on_the_cable(placements: Mapping[str, tuple[float, float]], link: str) -> draw.Figure:
    """Megabytes and seconds of a step, for each way to place the same ranks.

    Args:
        placements: name to megabytes on the cable and seconds, of a step.
        link: what the cable can carry, for the title.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch23 as figures

            figure = figures.on_the_cable({"tp inside": (2, 0.5), "tp across": (30, 3)}, "50 Mbit/s")
    """
    title = f"The same eight ranks on a cable of {link}, placed in two ways"
    figure, panels = draw.new_figure(title, width=7, height=1.9, columns=2)
    for column, (axes, unit) in enumerate(zip(panels, ("MB on the cable, a step", "seconds a step"), strict=True)):
        values = {name: pair[column] for name, pair in placements.items()}
        for place, value in enumerate(values.values()):
            draw.bar(axes, place, [(value, ACTIVITY["communication"], "")], 0.6, upright=False)
            draw.note(axes, f"{value:.2g}", (value, place), colour=ACTIVITY["communication"])
        draw.name_rows(axes, list(values), bare=True)
        axes.set_xlim(0, 1.25 * max(values.values()))
        axes.set_xlabel(unit)
    return draw.on_any_page(figure)
