"""The figures of chapter 08: how long each step took, and what each rank's time is made of."""

from __future__ import annotations

from statistics import quantiles

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, INK, SHADE

__all__ = ["shares", "step_times"]

ALT = {
    "timeline": "Four rows with time to the right. Ranks 0, 1 and 3 compute for a short while and then wait for "
    "rank 2, which computes three times as long. Then all four communicate.",
    "step_times": "A dot for each of 160 steps. The first five are the warm-up. "
    "Half of the others lie in a grey band, of which a narrower green one holds their median.",
    "shares": "A bar for each of four ranks, cut into compute, communication, idle and the rest, in percent of "
    "its time.",
}  # alternative texts of the chapter's figures


def step_times(seconds: list[float], warm_up: int, interval: tuple[float, float], title: str) -> draw.Figure:
    """A dot a step; of those after the warm-up the quartiles, and where their median is.

    The axis ends four times the distance of the quartiles away from them: what lies above
    is a triangle at the edge.

    Args:
        seconds: how long each step took, in order.
        warm_up: number of first steps that are left out.
        interval: in which the median lies, in seconds.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch08 as figures

            seconds = [0.03, 0.006, *[0.004, 0.005, 0.003] * 10]
            figure = figures.step_times(seconds, 2, (0.0039, 0.0042), "The first step is slow")
    """
    milliseconds = [1e3 * value for value in seconds]
    n, warm = len(seconds), milliseconds[warm_up:]
    quarter, middle, three_quarters = quantiles(warm, n=4)
    low, high = (1e3 * value for value in interval)
    spread = 4 * (three_quarters - quarter)
    bottom, top = max(min(warm), quarter - spread) - spread / 8, three_quarters + spread  # and a strip above
    figure, axes = draw.new_figure(title, width=7.4, height=3.0)
    axes.axhspan(quarter, three_quarters, color=SHADE, linewidth=0, zorder=0)
    axes.axhspan(low, high, color=ACTIVITY["optimizer"], alpha=0.5, linewidth=0, zorder=0)
    for first, values, colour, size in (
        (1, milliseconds[:warm_up], ACTIVITY["backward_weight"], 6),
        (warm_up + 1, warm, ACTIVITY["compute"], 3),
    ):
        dots = [(step, value) for step, value in enumerate(values, first) if value <= top]
        above = [step for step, value in enumerate(values, first) if value > top]
        axes.plot(*zip(*dots, strict=True) if dots else ((), ()), "o", color=colour, markersize=size)
        axes.plot(above, [top + spread / 4] * len(above), "^", color=colour, markersize=6)
    said = f"warm-up, its longest step {max(milliseconds[:warm_up]):.1f} ms"
    draw.note(axes, said, (warm_up, top), (6, 2), color=ACTIVITY["backward_weight"], size=9)
    if max(warm) > top:
        draw.note(
            axes, f"▲ to {max(warm):.1f} ms", (n + 0.5, top + spread / 4), (6, 0), color=ACTIVITY["compute"], size=9
        )
    at, style = (n + 0.5, middle), {"size": 9, "weight": "bold"}
    draw.note(axes, f"median {middle:.2f} ms,", at, (6, 30), color=ACTIVITY["optimizer"], **style)
    draw.note(axes, f"in {low:.2f} to {high:.2f}", at, (6, 18), color=ACTIVITY["optimizer"], **style)
    draw.note(axes, "half of the steps", at, (6, 4), color=INK, size=9)
    draw.note(axes, f"in {quarter:.2f} to {three_quarters:.2f}", at, (6, -8), color=INK, size=9)
    axes.set_xlim(-1.5, n + 0.5)
    axes.set_ylim(bottom, top + spread / 3)
    axes.set_xticks(range(20, n + 1, 20))
    axes.set_yticks([tick for tick in axes.get_yticks() if bottom <= tick <= top])
    axes.set_xlabel("step")
    axes.set_ylabel("milliseconds")
    return draw.on_any_page(figure)


def shares(totals: dict[int, dict[str, float]], title: str) -> draw.Figure:
    """What each rank's time is made of, in percent: a bar a rank.

    Args:
        totals: rank to seconds by kind, as of ``Timeline.totals()``.
        title: the finding.

    Returns:
        the figure; data and handlers are one part, "the rest".

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch08 as figures

            totals = {0: {"compute": 0.06, "communication": 0.01, "idle": 0.03, "data": 0.002}}
            figure = figures.shares(totals, "A third of the time is no computing")
    """
    colours = {kind: ACTIVITY[kind] for kind in ("compute", "communication")}
    colours |= {"idle": SHADE, "the rest": GREY}
    figure, axes = draw.new_figure(title, width=7.4, height=0.95 + 0.36 * len(totals))
    for row, seconds in enumerate(totals.values()):
        whole = sum(seconds.values())
        sizes = {kind: 100 * seconds.get(kind, 0.0) / whole for kind in colours}
        sizes["the rest"] = 100 - sum(sizes.values())
        end = 0.0
        for kind, size in sizes.items():
            draw.span(axes, row, end, end + size, colours[kind], height=0.74, edge="none")
            if size >= 5:
                colour = INK if kind == "idle" else draw.ink_on(colours[kind])
                style = {"size": 9, "ha": "center", "va": "center_baseline", "color": colour}
                axes.text(end + size / 2, row, f"{size:.0f} %" if size >= 8 else f"{size:.0f}", **style)
            end += size
    draw.name_rows(axes, [f"rank {rank}" for rank in totals], bare=True)
    axes.set_xlim(0, 100)
    axes.set_xlabel("percent of the rank's time")
    draw.key(figure, colours)
    return draw.on_any_page(figure)
