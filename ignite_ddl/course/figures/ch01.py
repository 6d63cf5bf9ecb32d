"""The figures of chapter 01: nodes and ranks, collectives, and the time of a sort."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, RANK

__all__ = ["cluster", "collectives", "sort_times"]

ALT = {
    "cluster": "A world of eight ranks on two nodes. Ranks 0 to 3 are local ranks 0 to 3 of node 0, ranks 4 to 7 are "
    "local ranks 0 to 3 of node 1.",
    "sort_times": "A bar each for 1, 2, 4 and 8 processes, in two parts: the sort, and gathering and merging, which "
    "one process hardly has.",
    "collectives": "Four ranks hold 1, 2, 4 and 8. After all_reduce each holds 15, in all four colours; after "
    "all_gather each holds 1, 2, 4, 8; after broadcast each holds 1, in the colour of rank 0.",
}  # alternative texts of the chapter's figures


def cluster(n_nodes: int = 2, ranks_per_node: int = 4) -> draw.Figure:
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

    def frame(x: float, y: float, width: float, height: float, line: str) -> None:
        look = {"facecolor": "none", "edgecolor": draw.INK, "linewidth": 1.3, "linestyle": line}
        style = "round,pad=0,rounding_size=0.12"
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, **look))

    frame(0, 0, whole, 2.75, "-")
    axes.text(0.3, 0.28, f"the world: {n_nodes * ranks_per_node} ranks", fontsize=10, va="center")
    for node in range(n_nodes):
        left = 0.3 + node * (node_width + 0.3)
        frame(left, 0.5, node_width, 2.0, ":")
        axes.text(left + 0.18, 0.75, f"node {node}", fontsize=10, weight="bold", va="center")
        for local_rank in range(ranks_per_node):
            rank = node * ranks_per_node + local_rank
            draw.tile(axes, left + 0.15 + 1.05 * local_rank, 1.0, 1.0, 0.75, RANK[rank], f"rank {rank}", draw.INK)
            centre = left + 0.65 + 1.05 * local_rank
            axes.text(centre, 2.1, f"local\nrank {local_rank}", fontsize=9, ha="center", va="center")
    axes.set_xlim(-0.05, whole + 0.05)
    axes.set_ylim(2.8, -0.05)
    return draw.on_any_page(figure)


def collectives(panels: dict[str, tuple[list, list]]) -> draw.Figure:
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
            draw.arrow(axes, (0.9, rank + 0.45), (1.55, rank + 0.45), draw.INK)
            if left == lefts[0]:
                axes.text(-0.2, rank + 0.45, f"rank {rank}", fontsize=9, ha="right", va="center")
        axes.set_xlim(left, right)
        axes.set_ylim(n_ranks, -0.5)
    return draw.on_any_page(figure)


def _listed(values) -> list:
    return values if isinstance(values, list) else [values]


def _number(axes: draw.Axes, left: float, top: float, width: float, height: float, value: int) -> None:
    """A tile with the number, in the colour of its rank, or in stripes if several ranks are in it."""
    colours = [RANK[rank % len(RANK)] for rank in draw.ranks_in(value)]
    if len(colours) == 1:
        draw.tile(axes, left, top, width, height, colours[0], value, draw.INK)
        return
    draw.stripes(axes, left, top, width, height, colours)
    ground = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    draw.tile(axes, left, top, width, height, "none", value, draw.INK, color="#222222", bbox=ground)


def sort_times(times: dict[int, tuple[float, float]]) -> draw.Figure:
    """Seconds of one sort on several numbers of processes, in two parts, a bar each.

    Args:
        times: number of processes to the seconds of the sort, and of gathering and merging. Measured.

    Returns:
        the figure; at the end of each bar stands its length.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch01 as figures

            figure = figures.sort_times({1: (0.26, 0.0), 4: (0.13, 0.09), 8: (0.14, 0.13)})
    """
    title = "Sorting is shared; gathering and merging come on top"
    figure, axes = draw.new_figure(title, height=0.42 * len(times) + 1.4)
    colours = {"sort": ACTIVITY["compute"], "gather and merge": ACTIVITY["communication"]}
    longest = max(map(sum, times.values()))
    for place, seconds in enumerate(times.values()):
        parts = [
            (1000 * part, colour, f"{1000 * part:.0f}" if part > 0.06 * longest else "")
            for part, colour in zip(seconds, colours.values(), strict=True)
        ]
        end = draw.bar(axes, place, parts, 0.66, upright=False)
        draw.note(axes, f"{end:.0f} ms", (end, place), (5, 0), weight="bold")
    draw.name_rows(axes, [f"{n} process{'es' * (n > 1)}" for n in times], bare=True)
    axes.set_xlim(0, 1120 * longest)
    axes.set_xlabel("milliseconds that you wait, measured (fastest of three)")
    draw.key(figure, colours)
    return draw.on_any_page(figure)
