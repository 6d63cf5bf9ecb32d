"""The figures of chapter 24: what fills a rank, and predictions beside published runs."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, INK, RANK

__all__ = ["memory", "published"]

PARTS = {
    "weights": ACTIVITY["forward"],
    "gradients": ACTIVITY["backward"],
    "optimizer": ACTIVITY["optimizer"],
    "activations": ACTIVITY["communication"],
    "buffers": ACTIVITY["idle"],
}


def memory(bars: dict[str, dict[str, float]], limit: float) -> draw.Figure:
    """What fills a device, a bar for each way to train.

    Args:
        bars: name to bytes by part, as ``Plan.memory``.
        limit: bytes of a device.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch24 as figures

            bars = {"whole": {"weights": 15e9, "gradients": 15e9, "optimizer": 90e9}, "cut": {"weights": 2e9}}
            figure = figures.memory(bars, limit=80e9)
    """
    figure, axes = draw.new_figure("Each cure shrinks another part", height=0.9 + 0.42 * len(bars))
    for place, parts in enumerate(bars.values()):
        draw.bar(axes, place, [(size / 1e9, PARTS[part], "") for part, size in parts.items()], upright=False)
        total = sum(parts.values()) / 1e9
        axes.annotate(f"{total:.0f}", (total, place), (4, 0), textcoords="offset points", va="center", size=9)
    axes.axvline(limit / 1e9, color=INK, linewidth=1.4, linestyle="--")
    axes.annotate("a device", (limit / 1e9, -0.45), (4, 2), textcoords="offset points", size=9, va="bottom")
    draw.name_rows(axes, list(bars))
    axes.set(xlabel="GB on the fullest device", ylim=(len(bars) - 0.5, -0.9))
    draw.key(figure, PARTS)
    return draw.on_any_page(figure)


def published(errors: dict[str, float], fitted: tuple[str, ...]) -> draw.Figure:
    """How far each published run is predicted from what was measured, a row of dots for each table.

    Args:
        errors: "table: row" to predicted seconds over published ones, less 1.
        fitted: names of rows that were used for fitting.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch24 as figures

            figure = figures.published({"Narayanan 1: 1.7B": 0.0, "Narayanan 1: 3.6B": -0.02}, fitted=("1.7B",))
    """
    groups: dict[str, list] = {}
    for name, error in errors.items():
        table, row = name.split(": ", 1)
        groups.setdefault(table, []).append((row, error))
    title = "Most runs are within a tenth of a prediction that had seen them"
    figure, axes = draw.new_figure(title, height=1.1 + 0.27 * len(groups))
    for place, rows in enumerate(groups.values()):
        for row, error in sorted(rows, key=lambda one: one[0] in fitted):
            colour = GREY if row in fitted else RANK[1] if "ZeRO" in row else RANK[2]
            axes.plot(100 * error, place, "o", color=colour, markersize=6, markeredgewidth=0, alpha=0.75)
    axes.axvline(0, color=INK, linewidth=1)
    draw.name_rows(axes, [f"{table} ({len(rows)})" for table, rows in groups.items()])
    axes.set(xlabel="predicted against published, %", xlim=(-45, 45), ylim=(len(groups) - 0.4, -0.6))
    draw.key(figure, {"fitted": GREY, "predicted": RANK[2], "predicted, ZeRO-3 alone in 2021": RANK[1]})
    return draw.on_any_page(figure)
