"""The figures of chapter 00: where training is cut, what each cut sends, and the map of the course."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, RANK

CUT = ("#009988", "#EE3377")  # the batch, the model: chapter 20's colours of dp and tp

__all__ = ["course_map", "data_and_model_parallel", "numbers_sent"]

ALT = {
    "data_and_model_parallel": "Three panels. Data parallel: each of four ranks holds 2 of 8 rows and the whole "
    "model. Model parallel, by layers: each holds all 8 rows and 1 of 4 layers. Inside layers: each holds a quarter "
    "of every layer.",
    "numbers_sent": "Numbers sent against rows in the batch: cutting the batch stays at 90, cutting the model rises "
    "from 18 at 2 rows to 162 at 18 rows; at 10 rows both send 90.",
    "course_map": "The 29 chapters in seven lanes: start, Ignite's tools, data parallel, parameter server, model "
    "parallel, all together, further. Chapters 00, 04, 09, 15, 16, 18 and 20 are filled: the short route.",
}  # alternative texts of the chapter's figures


def data_and_model_parallel(n_rows: int = 8) -> draw.Figure:
    """The two ways to cut one training step over four ranks, side by side; one colour a rank.

    Left: the batch is cut, each rank has a whole model. Middle and right: the model is cut, by layers and
    inside each layer, and the batch is whole.

    Args:
        n_rows: rows in the batch, a multiple of 4 and at most 12. Default: 8.

    Returns:
        the figure: three panels with the same model of 4 layers.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch00 as figures

            figure = figures.data_and_model_parallel(n_rows=8)
    """
    title = "Four ranks share one training step: cut the batch, or cut the model"
    figure, panels = draw.new_drawing(title, width=7.4, height=3.4, columns=3)
    each = n_rows // 4
    captions = {
        "Data parallel": f"each holds {each} rows, the whole model\nand sends gradients",
        "Model parallel, by layers": f"each holds {n_rows} rows, 1 of 4 layers\nand sends its layer's output",
        "Model parallel, inside layers": f"each holds {n_rows} rows, ¼ of each layer\nand sends part of each output",
    }
    for panel, (name, caption) in zip(panels, captions.items(), strict=True):
        draw.heading(panel, name, bold=True)
        panel.text(0, 10.4, caption, fontsize=9, va="center", linespacing=1.4)
        panel.set(xlim=(0, 10), ylim=(11.3, 0))
    _heads(panels[0], batch=3.45, model=7.9)
    for rank in range(4):
        top = 1.1 + 2.1 * rank
        panels[0].text(0, top + 0.8, f"rank {rank}", fontsize=9, va="center")
        for place in range(each):
            draw.tile(
                panels[0], 2.3 + 2.3 / each * place, top, 2.3 / each, 1.6, RANK[rank], rank * each + place,
                edge=draw.INK,
            )  # fmt: skip
        draw.arrow(panels[0], (4.8, top + 0.8), (5.7, top + 0.8), draw.INK)
        for layer in range(4):
            draw.tile(panels[0], 5.9 + layer, top, 1, 1.6, RANK[rank], edge=draw.INK)
    height = 7.9 / n_rows
    for panel in panels[1:]:
        _heads(panel, batch=1.15, model=5.9)
        for row in range(n_rows):
            draw.tile(panel, 0.3, 1.1 + height * row, 1.7, height, ACTIVITY["idle"], row, edge=draw.INK)
        draw.arrow(panel, (2.3, 5.05), (3.5, 5.05), draw.INK)
    height = 7.9 / 4
    for rank in range(4):
        look = {"edge": draw.INK, "rotation": 90}
        draw.tile(panels[1], 3.9 + rank, 1.1, 1, 7.9, RANK[rank], f"rank {rank}", **look)
        top = 1.1 + height * rank
        for layer in range(4):
            draw.tile(panels[2], 3.9 + layer, top, 1, height, RANK[rank], edge=draw.INK)
        panels[2].text(8.1, top + height / 2, f"rank {rank}", fontsize=9, va="center")
    return draw.on_any_page(figure)


def _heads(axes: draw.Axes, batch: float, model: float) -> None:
    axes.text(batch, 0.7, "batch", fontsize=9, ha="center")
    axes.text(model, 0.7, "model of 4 layers", fontsize=9, ha="center")


def numbers_sent(n_rows: list[int], sent: dict[str, list[int]]) -> draw.Figure:
    """What a rank sends in a step, against the size of the batch: one labelled line for each way to cut.

    Args:
        n_rows: sizes of the batch.
        sent: for each of two ways, by its name, the numbers that one rank sends, one for each size; a size at which
            both send the same is marked.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch00 as figures

            figure = figures.numbers_sent([4, 8], {"cut the batch": [60, 60], "cut the model": [30, 60]})
    """
    title = "A bigger batch: cutting the model sends more, cutting the batch does not"
    figure, axes = draw.new_figure(title, height=2.8)
    for (name, counts), colour in zip(sent.items(), CUT, strict=True):
        axes.plot(n_rows, counts, "o-", color=colour, linewidth=2)
        draw.note(axes, name, (n_rows[-1], counts[-1]), (10, 0), color=colour, weight="bold")
    for rows, batch, model in zip(n_rows, *sent.values(), strict=True):
        if batch == model:
            axes.plot(rows, batch, "o", markersize=13, markerfacecolor="none", markeredgecolor=draw.INK)
            draw.note(axes, f"{rows} rows: the same", (rows, batch), (10, -14))
    axes.set_xlabel("rows in the batch")
    axes.set_ylabel("numbers that a rank sends")
    axes.set_xticks(n_rows)
    axes.set_ylim(0)
    return draw.on_any_page(figure)


LANES = {
    "Start": {0: "start here", 1: "collectives", 2: "GPU", 3: "TPU", 4: "training"},
    "Ignite's tools": {5: "data loaders", 6: "toolbox", 7: "profiler", 8: "timer"},
    "Data parallel": {9: "all-reduce", 10: "DDP", 11: "big batches", 14: "sharded"},
    "Parameter server": {12: "server", 13: "staleness"},
    "Model parallel": {15: "splitting", 16: "tensor", 17: "transformer", 18: "pipeline", 19: "schedules"},
    "All together": {20: "hybrid", 21: "checkpoints", 22: "failures", 23: "machines", 24: "planning", 25: "capstone"},
    "Further": {26: "talking less", 27: "context", 28: "experts"},
}


def course_map(route: list[int]) -> draw.Figure:
    """The chapters of the course, one lane a subject, with a short route through them filled.

    Args:
        route: the numbers of the chapters to highlight.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch00 as figures

            figure = figures.course_map(route=[0, 4, 9])
    """
    title = "Short of time? Take the filled ones in order."
    figure, axes = draw.new_drawing(title, width=7.4, height=0.58 * len(LANES) + 0.4)
    for lane, (subject, chapters) in enumerate(LANES.items()):
        axes.text(0, lane + 0.45, subject, fontsize=10, fontweight="bold", va="center")
        for place, (number, name) in enumerate(chapters.items()):
            filled = {"colour": "#4477AA", "edge": "none", "color": "white"}
            outlined = {"colour": "none", "edge": draw.INK, "color": draw.INK}
            look = filled if number in route else outlined
            draw.tile(axes, 1.48 + place, lane, 0.92, 0.86, text=f"{number:02d}\n{name}", **look)
    axes.set_xlim(0, 1.45 + max(map(len, LANES.values())))
    axes.set_ylim(len(LANES), -0.05)
    return draw.on_any_page(figure)
