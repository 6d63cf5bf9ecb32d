"""The figures of chapter 05: which rank reads which row."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import INK, RANK

__all__ = ["dealt_rows", "owners_over_epochs"]

ALT = {
    "sixteen": "Four ranks, two steps, two rows a rank and step. Step 1 deals rows 0 to 3, one to each rank, then "
    "rows 4 to 7; step 2 deals rows 8 to 15 in the same way.",
    "eighteen": "Three steps. In step 3 ranks 0 and 1 read rows 16 and 17; ranks 2 and 3 read rows 0 and 1 again.",
    "exact": "Two panels, three steps each. idist gives rank 0 rows 0 and 4, ddl gives it rows 0 and 1. In step 3 of "
    "ddl, rank 1 reads row 16 and rank 3 row 17; ranks 0 and 2 have empty slots.",
    "owners_over_epochs": "Two grids, 16 rows across and 4 epochs down, coloured by rank. Forgotten: every column has "
    "one colour. Called: the colours change from epoch to epoch.",
    "mesh": "Two panels, four ranks each. With idist the tp peers, ranks 0 and 1, read different rows; with ddl ranks "
    "0 and 1 both read rows 0 to 3 in step 1, and ranks 2 and 3 both read rows 4 to 7.",
}  # alternative texts of the chapter's figures


def dealt_rows(panels: dict[str, list], title: str, tp: int = 1) -> draw.Figure:
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
    for panel, (name, seen), width in zip(axes if len(panels) > 1 else [axes], panels.items(), widths, strict=True):
        if name:
            draw.heading(panel, name, bold=True)
        kinds |= _draw_steps(panel, seen, slots[name], tp)
        panel.set(xlim=(-1.4, width), ylim=(len(seen) + 0.15, -0.65))
    words = ["hatched: read before in this epoch"] * ("again" in kinds)
    words += ["dashed: no row at this step"] * ("empty" in kinds)
    if words:
        figure.supxlabel(", ".join(words), fontsize=9, x=0.01, ha="left")
    return draw.on_any_page(figure)


def _draw_steps(axes: draw.Axes, seen: list, slots: list[int], tp: int) -> set[str]:
    """Draws one panel of :func:`dealt_rows`; returns which of "again" and "empty" occur."""
    kinds, known, left = set(), set(), 0.0
    for rank in range(len(seen)):
        axes.text(-0.2, rank + 0.5, f"rank {rank}", color=INK, fontsize=9, ha="right", va="center")
    for step, n_slots in enumerate(slots):
        style = {"color": INK, "fontsize": 9, "ha": "center", "va": "bottom"}
        axes.text(left + n_slots / 2, -0.12, f"step {step + 1}", **style)
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
        axes.plot(*bracket, color=INK, linewidth=1.4)
        text = f"tp peers:\n{'the same' if same else 'different'}\nrows"
        style = {"color": INK, "fontsize": 9, "va": "center", "linespacing": 1.2}
        axes.text(left + 0.4, first + tp / 2, text, **style)
    return kinds


def _row_tile(axes: draw.Axes, left: float, top: float, colour: str, row: int | None, kind: str) -> None:
    from matplotlib.patches import Rectangle

    if kind == "row":
        draw.tile(axes, left + 0.04, top + 0.06, 0.92, 0.88, colour, row, edge="none")
        return
    look = {"edgecolor": INK, "linestyle": (0, (3, 2))}
    if kind == "again":
        look = {"edgecolor": INK, "hatch": "////"}
        ground = {"facecolor": "#D9D9D9", "edgecolor": "none", "pad": 1.2}
        style = {"color": "#222222", "fontsize": 9, "ha": "center", "va": "center"}
        axes.text(left + 0.5, top + 0.5, str(row), bbox=ground, **style)
    axes.add_patch(Rectangle((left + 0.06, top + 0.12), 0.88, 0.76, facecolor="none", linewidth=1.4, **look))


def owners_over_epochs(panels: dict[str, list]) -> draw.Figure:
    """Which of four ranks reads which row in which epoch: a column a row, a line an epoch, the colour is the rank.

    Args:
        panels: name of a panel to what was read, two panels or more: ``seen[rank][epoch]`` is a list of row numbers,
            and each row is read once in an epoch.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch05 as figures

            seen = {"forgotten": [[[0, 1]] * 2, [[2, 3]] * 2], "called": [[[0, 1], [2, 0]], [[2, 3], [1, 3]]]}
            figure = figures.owners_over_epochs(seen)
    """
    title = "Without set_epoch a row stays with its rank for ever"
    epochs = max(len(of_rank) for seen in panels.values() for of_rank in seen)
    figure, axes = draw.new_drawing(title, width=7.4, height=0.3 * epochs + 1.4, columns=len(panels))
    small = {"color": INK, "fontsize": 9}
    n_ranks = max(map(len, panels.values()))
    for panel, (name, seen) in zip(axes, panels.items(), strict=True):
        draw.heading(panel, name, bold=True)
        for epoch in range(epochs):
            panel.text(-0.3, epoch + 0.5, f"epoch {epoch}", ha="right", va="center", **small)
        n_rows = len({row for of_rank in seen for read in of_rank for row in read})
        for rank, of_rank in enumerate(seen):
            for epoch, read in enumerate(of_rank):
                for row in read:
                    draw.tile(panel, row + 0.04, epoch + 0.05, 0.92, 0.9, RANK[rank], edge="none")
        for row in range(0, n_rows, 5):
            panel.text(row + 0.5, epochs + 0.1, str(row), ha="center", va="top", **small)
        panel.text(-0.3, epochs + 0.1, "row", ha="right", va="top", **small)
        panel.set(xlim=(-3.6, n_rows), ylim=(epochs + 0.9, -0.1))
    draw.key(figure, {f"read by rank {rank}": RANK[rank] for rank in range(n_ranks)})
    return draw.on_any_page(figure)
