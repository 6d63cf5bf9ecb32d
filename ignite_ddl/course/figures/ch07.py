"""The figures of chapter 07: the parts of an epoch, and what each rank's profiler says."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY
from ignite_ddl.lab.record import Record

__all__ = ["epoch", "rank_profiles"]

ALT = {
    "epoch": "Three rows with time to the right. In turns: a long piece of data, a shorter step, a short piece of"
    " handlers; at the end of the epoch handlers take a longer piece.",
    "rank_profiles": "Three panels with a bar for each rank. With a slow loader on rank 2, rank 2 has much data "
    "and a short step, the others the reverse. With a slow handler on rank 0 likewise for rank 0. In the third "
    "panel rank 1 has the shortest step, though the others wait for rank 2, whose bar looks like those of ranks 0"
    " and 3.",
}  # alternative texts of the chapter's figures

PARTS = {"data": ACTIVITY["data"], "step": ACTIVITY["compute"], "handlers": ACTIVITY["handlers"]}


def epoch(records: list[Record], title: str) -> draw.Figure:
    """A row each for data, step and handlers, time to the right: when the engine did it, and the row's sum.

    Args:
        records: of an engine in one process, as of a ``Timeline``.
        title: the finding.

    Returns:
        the figure; a piece that is long enough has its milliseconds in it.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch07 as figures
            from ignite_ddl.lab.record import Record

            records = [Record(0, "data", "", 0, 0.03), Record(0, "compute", "", 0.03, 0.05)]
            figure = figures.epoch(records, "Data, then a step")
    """
    rows = {part: [r for r in records if r.kind == ("compute" if part == "step" else part)] for part in PARTS}
    start, end = min(record.start for record in records), max(record.end for record in records)
    whole = 1e3 * (end - start)
    figure, axes = draw.new_figure(title, width=7.4, height=2.1)
    for row, (part, pieces) in enumerate(rows.items()):
        for piece in pieces:
            left, right = 1e3 * (piece.start - start), 1e3 * (piece.end - start)
            text = f"{right - left:.0f}" if right - left > 0.035 * whole else ""
            draw.span(axes, row, left, right, PARTS[part], text, linewidth=0)
        total = f"{1e3 * sum(piece.seconds for piece in pieces):.0f} ms"
        draw.note(axes, total, (whole, row), (6, 0), size=10, weight="bold")
    draw.name_rows(axes, list(rows), bare=True)
    axes.set_xlim(0, whole)
    axes.set_xlabel("milliseconds")
    return draw.on_any_page(figure)


def rank_profiles(cases: dict[str, list[dict[str, float]]], title: str) -> draw.Figure:
    """What each rank's profiler says of an iteration: a panel a case, a bar a rank, cut into data, step, handlers.

    Args:
        cases: name of a case, of two or more, to a list with a dict a rank: seconds of "data", "step" and "handlers".
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch07 as figures

            fast, slow = ({"data": data, "step": 0.05, "handlers": 0.005} for data in (0.03, 0.09))
            figure = figures.rank_profiles({"equal": [fast, fast], "rank 1 is slow": [fast, slow]}, "One is slow")
    """
    figure, panels = draw.new_figure(title, width=7.6, height=2.7, columns=len(cases), sharex=True, sharey=True)
    for panel, (name, ranks) in zip(panels, cases.items(), strict=True):
        draw.heading(panel, name)
        for rank, seconds in enumerate(ranks):
            sizes = {colour: 1e3 * seconds[part] for part, colour in PARTS.items()}
            parts = [(size, colour, f"{size:.0f}" if size >= 25 else "") for colour, size in sizes.items()]
            draw.bar(panel, rank, parts, 0.75, upright=False, edgecolor="white", linewidth=0.6)
        panel.set_xlabel("ms an iteration")
    draw.name_rows(panels[0], [f"rank {rank}" for rank in range(len(ranks))])
    draw.key(figure, PARTS)
    return draw.on_any_page(figure)
