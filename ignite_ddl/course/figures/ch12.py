"""The figures of chapter 12: the parameter server's step, its bytes and times."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, INK, RANK, on_any_page

__all__ = ["by_workers", "server_scheme"]

ALT = {
    "server_scheme": "A parameter server above, four workers in the middle, the data's node below. Arrows: "
    "parameters go down from the server to each worker, rows go up from the data's node to each worker, gradients"
    " go up to the server.",
    "step_rows": "Two panels. With one server its row holds four messages, to one worker after the other, a long gap "
    "while all four compute, and four messages from them. With two servers both rows hold messages that are mostly "
    "half as long, and the step is shorter.",
    "by_workers": "Milliseconds of a step against 1 to 64 workers, both axes logarithmic. One server falls to its"
    " lowest at 4, then rises steeply. Two servers are lower and rise later. The ring falls to 16, below both, "
    "then rises slowly.",
}  # alternative texts of the chapter's figures


def server_scheme(n_workers: int, weight_bytes: int, row_bytes: int) -> draw.Figure:
    """The parameter server's step: the server above, the workers, the data's own node below, numbered arrows.

    Args:
        n_workers: number of workers, at most 8.
        weight_bytes: bytes of the parameters; a gradient has as many.
        row_bytes: bytes of the rows that one worker gets.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch12 as figures

            figure = figures.server_scheme(4, weight_bytes=63_680, row_bytes=25_120)
    """
    title = "One step: all parameters pass through one machine"
    figure, axes = draw.new_drawing(title, width=7.6, height=3.3)
    down, up, rows = (draw.ink(ACTIVITY[kind]) for kind in ("communication", "backward", "data"))
    left, right = 3.4, 10.0
    text = "parameter server: holds the parameters"
    draw.tile(axes, left, 0, right - left, 0.8, ACTIVITY["optimizer"], text, edge="none")
    draw.tile(axes, left, 4.3, right - left, 0.8, ACTIVITY["data"], "the data's node: holds all rows", edge="none")
    step = (right - left) / n_workers
    style = {"arrowstyle": "-|>", "linewidth": 2, "mutation_scale": 13, "shrinkA": 0, "shrinkB": 0}
    for worker in range(n_workers):
        middle = left + (worker + 0.5) * step
        draw.tile(axes, middle - 0.42 * step, 2.3, 0.84 * step, 0.8, RANK[worker], f"worker {worker}", edge="none")
        for x, start, end, colour in (
            (middle - 0.14 * step, 0.8, 2.3, down),
            (middle + 0.14 * step, 2.3, 0.8, up),
            (middle, 4.3, 3.1, rows),
        ):
            draw.arrow(axes, (x, start), (x, end), colour, **style)
    for height, text, colour in (
        (0.4, "4  average, update", draw.ink(ACTIVITY["optimizer"])),
        (1.22, f"1  parameters down, {weight_bytes:,} bytes each", down),
        (1.88, f"3  gradients up, {weight_bytes:,} bytes each", up),
        (2.7, "2  forward, backward", INK),
        (3.7, f"1  rows up, {row_bytes:,} bytes each", rows),
    ):
        axes.text(left - 0.15, height, text, ha="right", va="center", size=9, weight="bold", color=colour)
    axes.set_xlim(-1.0, right + 0.05)
    axes.set_ylim(5.15, -0.05)
    return on_any_page(figure)


def by_workers(
    predicted: dict[str, dict[int, float]], measured: dict[str, dict[int, float]], title: str, ylabel: str, note: str
) -> draw.Figure:
    """Anything against the number of workers, both axes logarithmic: lines predicted, marks measured.

    Args:
        predicted: name of a scheme, of three at most, to number of workers to value; the line is named where it ends.
        measured: name of a scheme to number of workers to value.
        title: the finding.
        ylabel: what the values are, with their unit.
        note: what lines and marks are.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch12 as figures

            lines = {"one server": {1: 2, 4: 8, 64: 128}, "ring": {2: 2, 4: 3, 64: 3.94}}
            figure = figures.by_workers(lines, {"one server": {4: 8}}, "It grows", "bytes", "lines: predicted")
    """
    figure, axes = draw.new_figure(title, height=3.1)
    axes.set_yscale("log")
    colours = [ACTIVITY[kind] for kind in ("backward_weight", "forward", "communication")]
    draw.lines_and_marks(axes, predicted, measured, colours)
    workers = sorted({n for values in predicted.values() for n in values})
    draw.log_axis(axes, workers)
    everything = [value for values in predicted.values() for value in values.values()]
    draw.log_ticks(axes, min(everything) / 1.3, 1.3 * max(everything))
    axes.set_xlabel("workers")
    axes.set_ylabel(ylabel)
    axes.text(0.02, 0.97, note, transform=axes.transAxes, fontsize=9, va="top")
    return on_any_page(figure)
