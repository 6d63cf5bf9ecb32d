"""The figures of chapter 01: nodes and ranks, collectives, and the time of a sort."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, RANK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["cluster", "collectives", "sort_times"]


def cluster(n_nodes: int = 2, ranks_per_node: int = 4) -> Figure:
    """Nodes side by side, the ranks of each with both their numbers, and the world around them.

    Args:
        n_nodes: number of machines, default 2.
        ranks_per_node: ranks on each, default 4; there are colours for 8 ranks in all.

    Returns:
        the figure: one tile a rank, rank 0 at the top left.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch01 as figures

            figure = figures.cluster(n_nodes=2, ranks_per_node=4)
    """
    from matplotlib.patches import FancyBboxPatch

    title = "A rank has two numbers: one in the world, one on its node"
    figure, axes = draw.new_drawing(title, width=7.4, height=2.3)
    node_width = ranks_per_node * 1.05 + 0.25
    whole = n_nodes * (node_width + 0.3) + 0.3

    def frame(x: float, y: float, width: float, height: float, face: str, line: str) -> None:
        look = {"facecolor": face, "edgecolor": line, "linewidth": 1.3}
        style = "round,pad=0,rounding_size=0.12"
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, **look))

    frame(0, 0, whole, 2.75, "white", "#888888")
    axes.text(0.3, 0.28, f"the world: {n_nodes * ranks_per_node} ranks", fontsize=10, va="center")
    for node in range(n_nodes):
        left = 0.3 + node * (node_width + 0.3)
        frame(left, 0.5, node_width, 2.0, "#F1F1F1", "#BBBBBB")
        axes.text(left + 0.18, 0.75, f"node {node}", fontsize=10, weight="bold", va="center")
        for local_rank in range(ranks_per_node):
            rank = node * ranks_per_node + local_rank
            draw.tile(axes, left + 0.15 + 1.05 * local_rank, 1.0, 1.0, 0.75, RANK[rank], f"rank {rank}")
            centre = left + 0.65 + 1.05 * local_rank
            axes.text(centre, 2.1, f"local\nrank {local_rank}", fontsize=9, ha="center", va="center")
    axes.set_xlim(-0.05, whole + 0.05)
    axes.set_ylim(2.8, -0.05)
    return figure


def collectives(panels: dict[str, tuple[list, list]]) -> Figure:
    """What each rank holds before and after collectives, one row a rank, coloured by the rank it comes from.

    Rank r puts in 2 ** r, so that a number says who is in it: 5 is 1 + 4, of ranks 0 and 2. The colours are read
    from the numbers, so that the picture shows what was computed, right or wrong.

    Args:
        panels: for each of two or more collectives, by its name, what the ranks hold before and after: two lists
            with one entry a rank, a number or a list of numbers.

    Returns:
        the figure, one panel a collective; a tile that holds a sum is striped in the colours of its parts.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch01 as figures

            panels = {"all_reduce": ([1, 2], [3, 3]), "all_gather": ([1, 2], [[1, 2], [1, 2]])}
            figure = figures.collectives(panels)
    """
    n_ranks = max(len(before) for before, _ in panels.values())
    side, after_at = 0.75, 1.7  # width of a tile, and where the second column starts
    lefts = [-1.2] + [-0.2] * (len(panels) - 1)
    rights = [after_at + side * max(map(len, map(_listed, after))) + 0.5 for _, after in panels.values()]
    widths = [right - left for left, right in zip(lefts, rights, strict=True)]
    figure, all_axes = draw.new_drawing(
        "The colours say which ranks a number comes from",
        width=0.62 * sum(widths), height=0.42 * n_ranks + 1.0, columns=len(panels), width_ratios=widths,
    )  # fmt: skip
    for axes, left, right, (name, states) in zip(all_axes, lefts, rights, panels.items(), strict=True):
        draw.heading(axes, name, bold=True)
        for start, head, held in zip((0, after_at), ("before", "after"), states, strict=True):
            axes.text(start, -0.25, head, fontsize=9, va="center")
            for rank, values in enumerate(map(_listed, held)):
                for index, value in enumerate(values):
                    _number(axes, start + side * index, rank, side, 0.9, value)
        for rank in range(n_ranks):
            draw.arrow(axes, (0.9, rank + 0.45), (1.55, rank + 0.45))
            if left == lefts[0]:
                axes.text(-0.2, rank + 0.45, f"rank {rank}", fontsize=9, ha="right", va="center")
        axes.set_xlim(left, right)
        axes.set_ylim(n_ranks, -0.5)
    return figure


def _listed(values) -> list:
    return values if isinstance(values, list) else [values]


def _number(axes: Axes, left: float, top: float, width: float, height: float, value: int) -> None:
    """A tile with the number, in the colour of its rank, or in stripes if several ranks are in it."""
    origins = draw.ranks_in(value)
    if len(origins) == 1:
        draw.tile(axes, left, top, width, height, RANK[origins[0]], value)
        return
    draw.stripes(axes, left, top, width, height, [RANK[rank] for rank in origins])
    ground = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    draw.tile(axes, left, top, width, height, "none", value, color="#222222", bbox=ground)


def sort_times(times: dict[int, tuple[float, float]], cores: int) -> Figure:
    """Seconds of one sort against the number of processes: what a rank computes, and how long you wait.

    Args:
        times: number of processes to the pair of seconds that a rank computes (its processor time) and that all of
            them together take (by the clock on the wall). Measured.
        cores: number of cores of the machine, marked.

    Returns:
        the figure; both axes are logarithmic, so that twice as fast is the same step everywhere.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch01 as figures

            figure = figures.sort_times({1: (0.4, 0.41), 2: (0.2, 0.21), 4: (0.1, 0.2)}, cores=2)
    """
    n_processes = sorted(times)
    last = n_processes[-1]
    few, many = "A core for every rank: all of them run at once", "More ranks than cores take turns"
    figure, axes = draw.new_figure(many if last > cores else few)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    rows = ("you wait", 1, "o-", ACTIVITY["optimizer"]), ("a rank computes", 0, "s--", ACTIVITY["forward"])
    for name, which, look, colour in rows:
        milliseconds = [1000 * times[n][which] for n in n_processes]
        axes.plot(n_processes, milliseconds, look, color=colour, linewidth=2, markersize=7)
        draw.note(axes, name, (last, milliseconds[-1]), (10, 0), colour)
    axes.set_xticks(n_processes, [str(n) for n in n_processes])
    draw.log_ticks(axes, 500 * min(map(min, times.values())), 2000 * max(map(max, times.values())))
    axes.set_xlim(n_processes[0] * 0.85, last * 1.15)
    if last > cores:
        axes.axvspan(cores, last * 1.15, color="#F1F1F1", zorder=0)
        axes.axvline(cores, color="#888888", linewidth=1)
        text = f"more ranks than\nthe {cores} core{'s' * (cores > 1)} here"
        axes.text(cores * 1.04, 0.04, text, transform=axes.get_xaxis_transform(), fontsize=9, va="bottom")
    axes.set_xlabel("processes")
    axes.set_ylabel("milliseconds")
    return figure
