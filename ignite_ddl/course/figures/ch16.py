"""The figures of chapter 16: a product cut for ranks, what each rank holds, and the bytes of each plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, RANK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["bytes_by_plan", "cut_products", "held_blocks"]


def cut_products(rows: int, inputs: int, outputs: int, n_ranks: int) -> Figure:
    """X times W is Y, cut for ranks: above by columns of W, below by its rows. Drawn to scale.

    Args:
        rows: of X and Y.
        inputs: columns of X, rows of W; a multiple of ``n_ranks``.
        outputs: columns of W and Y; a multiple of ``n_ranks``.
        n_ranks: how many, at most 8.

    Returns:
        the figure; a block has its rank's colour and number, grey is whole on every rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch16 as figures

            figure = figures.cut_products(rows=6, inputs=8, outputs=32, n_ranks=4)
    """
    title = "By columns, Y comes in blocks; by rows, it comes in terms that have to be added"
    figure, axes = draw.new_drawing(title, width=7.4, height=2.7)
    axes.set_aspect("equal")
    starts = (0, inputs + 4, inputs + outputs + 8)  # left edges of X, W and Y
    for top, by in ((0, "columns"), (inputs + 6, "rows")):
        middle = top + inputs / 2
        x_and_y = middle - rows / 2, rows
        shapes = {"X": (*x_and_y, inputs), "W": (top, inputs, outputs), "Y": (*x_and_y, outputs)}
        axes.text(-1, middle, f"by {by}", size=10, weight="bold", ha="right", va="center")
        for left, sign in ((starts[1], "×"), (starts[2], "=")):
            axes.text(left - 2, middle, sign, size=13, ha="center", va="center")
        for left, (name, (y, height, width)) in zip(starts, shapes.items(), strict=True):
            label = f"{name}  {height} × {width}"
            axes.text(left + width / 2, top + inputs + 1.7, label, size=9, ha="center")
            if name == "X" and by == "columns":
                draw.tile(axes, left, y, width, height, ACTIVITY["idle"], "whole", edge="none")
                continue
            wide, tall = width / n_ranks, height / n_ranks
            for rank in reversed(range(n_ranks)):
                if name == "Y" and by == "rows":  # sheets, one before the other
                    text = " + ".join(map(str, range(n_ranks))) if rank == 0 else ""
                    away = 0.8 * rank
                    draw.tile(axes, left + away, y + 1 - away, width, height, RANK[rank], text)
                elif name == "W" and by == "rows":
                    draw.tile(axes, left, y + rank * tall, width, tall - 0.15, RANK[rank], rank, edge="none")
                else:
                    draw.tile(axes, left + rank * wide, y, wide - 0.15, height, RANK[rank], rank, edge="none")
    axes.set_xlim(-13, starts[2] + outputs + 3)
    axes.set_ylim(2 * inputs + 8.2, -0.5)
    return figure


def held_blocks(tensors: dict[str, tuple[tuple, list]], title: str) -> Figure:
    """Weights and biases as they are stored, each block in the colour and with the number of the rank that holds it.

    Args:
        tensors: name of a tensor of one or two dims to its shape and, for each rank, the (start, stop) of what it
            holds along each dim.
        title: the finding.

    Returns:
        the figure; grey is whole on every rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch16 as figures

            by_rank = [[(0, 4), (0, 3)], [(4, 8), (0, 3)]]
            tensors = {"weight": ((8, 3), by_rank), "bias": ((8,), [[(0, 8)]] * 2)}
            figure = figures.held_blocks(tensors, "The bias is whole")
    """
    figure, axes = draw.new_drawing(title, width=7.4, height=2.6)
    axes.set_aspect("equal")
    left, tallest = 0.0, max(shape[0] for shape, _ in tensors.values())
    for name, (shape, blocks) in tensors.items():
        wide = shape[1] if len(shape) == 2 else 2
        everywhere = all(block == blocks[0] for block in blocks)
        for rank, (rows, *columns) in enumerate(blocks[:1] if everywhere else blocks):
            start, stop = columns[0] if columns else (0, wide)
            colour, text = (ACTIVITY["idle"], "all") if everywhere else (RANK[rank], rank)
            size = stop - start - 0.15, rows[1] - rows[0] - 0.15
            draw.tile(axes, left + start, rows[0], *size, colour, text, edge="none")
        label = f"{name}\n{' × '.join(map(str, shape))}"
        axes.text(left + wide / 2, -0.6, label, size=9, ha="center", va="bottom")
        left += wide + 8
    axes.set_xlim(-4, left - 4)
    axes.set_ylim(tallest + 0.2, -4.2)
    return figure


def bytes_by_plan(counted: dict[str, tuple[int, int]], title: str) -> Figure:
    """Bytes that collectives hand a rank in a step, a bar a plan: forward, then backward.

    Args:
        counted: name of a plan to its bytes forward and backward.
        title: the finding.

    Returns:
        the figure; the first plan is at the top.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch16 as figures

            counted = {"column, row": (384, 384), "row, column": (1920, 1920)}
            figure = figures.bytes_by_plan(counted, "Five times the bytes")
    """
    figure, axes = draw.new_figure(title, height=0.45 * len(counted) + 1.1)
    widest = max(map(sum, counted.values()))
    for place, sizes in enumerate(counted.values()):
        kinds = zip(("forward", "backward"), sizes, strict=True)
        parts = [(n, ACTIVITY[kind], f"{kind} {n:,}" if n > 0.18 * widest else "") for kind, n in kinds]
        end = draw.bar(axes, place, parts, 0.62, upright=False, edgecolor="white")
        axes.text(end + 0.01 * widest, place, f"{end:,.0f}", size=9, weight="bold", va="center")
    axes.set_yticks(range(len(counted)), list(counted), fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(counted) - 0.5, -0.5)
    axes.set_xlim(0, 1.1 * widest)
    axes.set_xlabel("bytes handed to a rank in a step")
    return figure
