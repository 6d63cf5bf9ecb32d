"""The figures of chapter 05: which rank reads which row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import RANK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["dealt_rows", "owners_over_epochs", "rows_read"]


def dealt_rows(panels: dict[str, list], title: str, tp: int = 1) -> Figure:
    """What each rank reads in an epoch, step after step: a tile for each row, in the rank's colour.

    A row that was read before in the epoch, in an earlier step or by a rank further up, is hatched. A slot that
    stays empty while another rank reads a row is dashed.

    Args:
        panels: name of a panel ("" for none) to what was read: ``seen[rank][step]`` is a list of row numbers.
        title: what the figure shows, as a finding.
        tp: number of neighbouring ranks that share the model's layers, default 1. Beyond 1 the figure says of
            each such group whether its ranks read the same rows, and hatches no row that they share.

    Returns:
        the figure.

    Raises:
        ValueError: if the ranks make different numbers of steps.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch05 as figures

            seen = [[[0], [4]], [[1], [5]], [[2], [0]], [[3], [1]]]
            figure = figures.dealt_rows({"": seen}, "Rows 0 and 1 are read twice")
    """
    slots = {  # for each step the most rows that a rank reads in it
        name: [max(1, *map(len, step)) for step in zip(*seen, strict=True)] for name, seen in panels.items()
    }
    widths = [sum(of) + 0.4 * (len(of) - 1) + (2.6 if tp > 1 else 0.3) for of in slots.values()]
    figure, axes = draw.new_drawing(
        title, width=min(7.4, max(4.2, 0.9 + 0.46 * sum(width + 1.4 for width in widths))),
        height=0.4 * max(map(len, panels.values())) + 1.3, columns=len(panels),
        width_ratios=[width + 1.4 for width in widths],
    )  # fmt: skip
    kinds = set()
    for panel, (name, seen), width in zip(
        axes if len(panels) > 1 else [axes], panels.items(), widths, strict=True
    ):
        if name:
            draw.heading(panel, name, bold=True)
        kinds |= _draw_steps(panel, seen, slots[name], tp)
        panel.set(xlim=(-1.4, width), ylim=(len(seen) + 0.15, -0.65))
    words = ["hatched: read before in this epoch"] * ("again" in kinds)
    words += ["dashed: no row at this step"] * ("empty" in kinds)
    if words:
        figure.supxlabel(", ".join(words), fontsize=9, x=0.01, ha="left")
    return figure


def _draw_steps(axes: Axes, seen: list, slots: list[int], tp: int) -> set[str]:
    """Draws one panel of :func:`dealt_rows`; returns which of "again" and "empty" occur."""
    kinds, known, left = set(), set(), 0.0
    for rank in range(len(seen)):
        draw.label_rank(axes, -0.2, rank + 0.5, rank)
    for step, n_slots in enumerate(slots):
        axes.text(left + n_slots / 2, -0.12, f"step {step + 1}", fontsize=9, ha="center", va="bottom")
        for first in range(0, len(seen), tp):
            group = range(first, first + tp)
            for rank in group:
                rows = seen[rank][step]
                for place in range(n_slots):
                    row = rows[place] if place < len(rows) else None
                    kind = "empty" if row is None else "again" if row in known else "row"
                    kinds.add(kind)
                    _row_tile(axes, left + place, rank, RANK[rank], row, kind)
            known.update(row for rank in group for row in seen[rank][step])
        left += n_slots + 0.4
    for first in range(0, len(seen), tp) if tp > 1 else ():
        same = all(steps == seen[first] for steps in seen[first : first + tp])
        top, bottom = first + 0.15, first + tp - 0.15
        bracket = [left, left + 0.2, left + 0.2, left], [top, top, bottom, bottom]
        axes.plot(*bracket, color="#555555", linewidth=1.4)
        text = f"tp peers:\n{'the same' if same else 'different'}\nrows"
        axes.text(left + 0.4, first + tp / 2, text, fontsize=9, va="center", linespacing=1.2)
    return kinds


def _row_tile(axes: Axes, left: float, top: float, colour: str, row: int | None, kind: str) -> None:
    from matplotlib.patches import Rectangle

    if kind == "row":
        draw.tile(axes, left, top + 0.06, 1, 0.88, colour, row)
        return
    look = {"edgecolor": "#999999", "linestyle": (0, (3, 2))}
    if kind == "again":
        look = {"edgecolor": draw.ink(colour), "hatch": "////"}
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
        axes.text(left + 0.5, top + 0.5, str(row), fontsize=9, ha="center", va="center", bbox=ground)
    axes.add_patch(Rectangle((left + 0.06, top + 0.12), 0.88, 0.76, facecolor="white", linewidth=1.4, **look))


def owners_over_epochs(panels: dict[str, list]) -> Figure:
    """Which of four ranks reads which row in which epoch: a column a row, a line an epoch, the colour is the rank.

    Args:
        panels: name of a panel to its epochs, two panels or more; an epoch is a list with the rank that reads each
            row.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch05 as figures

            epochs = {"forgotten": [[0, 1, 2, 3]] * 2, "remembered": [[0, 1, 2, 3], [3, 2, 1, 0]]}
            figure = figures.owners_over_epochs(epochs)
    """
    from matplotlib.patches import Patch

    title = "Without set_epoch a row stays with its rank for ever"
    epochs = max(map(len, panels.values()))
    figure, axes = draw.new_drawing(title, width=7.4, height=0.36 * epochs + 1.5, columns=len(panels))
    for panel, (name, owners) in zip(axes, panels.items(), strict=True):
        draw.heading(panel, name, bold=True)
        for epoch, ranks in enumerate(owners):
            panel.text(-0.3, epoch + 0.5, f"epoch {epoch + 1}", fontsize=9, ha="right", va="center")
            for row, rank in enumerate(ranks):
                draw.tile(panel, row, epoch, 1, 1, RANK[rank])
        for row in range(len(owners[0])):
            panel.text(row + 0.5, len(owners) + 0.1, str(row), fontsize=9, ha="center", va="top")
        panel.text(-0.3, len(owners) + 0.1, "row", fontsize=9, ha="right", va="top")
        panel.set(xlim=(-2.9, len(owners[0])), ylim=(len(owners) + 0.8, -0.1))
    handles = [Patch(facecolor=RANK[rank], label=f"rank {rank}") for rank in range(4)]
    style = {"frameon": False, "fontsize": 9, "handlelength": 1, "handleheight": 1}
    figure.legend(handles=handles, loc="outside lower left", ncols=4, **style)
    return figure


def rows_read(reads: dict[str, list[int]]) -> Figure:
    """How many rows all ranks read together in an epoch, against how many there are: a line for each loader.

    Args:
        reads: name of a loader to its counts, three at most; the first count is for a dataset of one row, the second
            for two rows, ...

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch05 as figures

            figure = figures.rows_read({"pads": [4, 4, 4, 4, 8], "exact": [1, 2, 3, 4, 5], "drops": [0, 0, 0, 4, 4]})
    """
    figure, axes = draw.new_figure("Padding reads some rows twice, dropping leaves some out", height=2.9)
    looks = (("^--", "#D55E00"), ("o-", "#222222"), ("v:", "#0072B2"))
    for (name, counts), (look, colour) in zip(reads.items(), looks, strict=False):
        rows = range(1, len(counts) + 1)
        axes.plot(rows, counts, look, color=colour, linewidth=1.6, markersize=5, label=name)
    axes.set_xlabel("rows in the dataset")
    axes.set_ylabel("rows read by\nall ranks together")
    axes.set_xticks(list(rows))
    axes.set_yticks(range(0, max(map(max, reads.values())) + 1, 4))
    axes.legend(loc="upper left", frameon=False)
    return figure
