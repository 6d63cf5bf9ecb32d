"""The figures of chapter 26: rounds over a slow cable, what a long round costs, and what compression leaves out."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, INK, on_any_page
from ignite_ddl.lab.simulate import Simulation

__all__ = ["left_out", "losses_of_rounds", "rounds"]

_BLUE, _RED, _GREEN = (ACTIVITY[kind] for kind in ("forward", "backward_weight", "optimizer"))
_COLOURS = [_BLUE, _RED, _GREEN]


def rounds(panels: dict[str, Simulation], title: str) -> draw.Figure:
    """Two cities and the cable between them: a panel a way to train, a row a city, and a row for the cable.

    Args:
        panels: name of a way to its run, of ``simulate.local_rounds`` on two ranks.
        title: the finding.

    Returns:
        the figure; a blue box is a step, a pink one an exchange.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch26 as figures
            from ignite_ddl.lab import cost, simulate

            run = simulate.local_rounds(2, 4, 1.0, 2.0, cost.Link(latency=0, bandwidth=1))
            figure = figures.rounds({"every 4 steps": run}, "Four steps, then the cable")
    """
    figure, axes = draw.stack(title, width=7.4, height=1.35 * len(panels) + 0.7, ratios=[1.0] * len(panels))
    for panel, (name, run) in zip(axes, panels.items(), strict=True):
        for record in run.records:
            if record.kind == "compute":
                draw.span(panel, 0 if record.rank == 0 else 2, record.start, record.end, ACTIVITY["compute"])
        busy = sorted({(message.start, message.end) for message in run.in_flight})
        for start, end in _joined(busy):
            draw.span(panel, 1, start, end, ACTIVITY["communication"])
        draw.name_rows(panel, ["city A", "cable", "city B"], bare=True)
        draw.heading(panel, name)
    axes[-1].set_xlim(0, max(run.seconds for run in panels.values()))
    axes[-1].set_xlabel("time, in steps (simulated; an exchange takes as long as two steps)")
    draw.key(figure, {"a step": ACTIVITY["compute"], "weights or gradients": ACTIVITY["communication"]})
    return on_any_page(figure)


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The two messages of an exchange as one span: a message that begins where the last ended, once a pair."""
    return [(first[0], second[1]) for first, second in zip(spans[::2], spans[1::2], strict=True)]


def losses_of_rounds(panels: dict[str, dict[str, dict[int, tuple[float, float]]]], title: str) -> draw.Figure:
    """Losses against the steps of a round, side by side: a line a way to train, a band for the seeds.

    Args:
        panels: name of a panel to lines, three at most, each H to the loss and its spread.
        title: the finding.

    Returns:
        the figure; a dot marks the least loss of each line in the last panel.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch26 as figures

            lines = {"alike": {1: (0.66, 0.02), 4: (0.66, 0.02)}}
            figure = figures.losses_of_rounds({"256 steps": lines, "256 s": lines}, "No difference")
    """
    figure, axes = draw.new_figure(title, width=7.6, height=3.4, columns=len(panels), sharex=True, sharey=True)
    for panel, (heading, lines) in zip(axes, panels.items(), strict=True):
        for points, colour in zip(lines.values(), _COLOURS, strict=False):
            at, means = list(points), [mean for mean, *_ in points.values()]
            low, high = ([mean + sign * spread for mean, spread, *_ in points.values()] for sign in (-1, 1))
            panel.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
            panel.plot(at, means, "o-", color=colour, linewidth=2, markersize=4)
            if panel is axes[-1]:
                best = min(points, key=lambda H: points[H][0])  # noqa: B023
                panel.plot(best, points[best][0], "o", color=colour, markersize=10)
        draw.log_axis(panel, sorted({H for points in lines.values() for H in points}), base=2)
        draw.heading(panel, heading)
        panel.set_xlabel("H, steps of a round, or batches of a step")
    axes[0].set_ylabel("test loss")
    draw.key(figure, dict(zip(max(panels.values(), key=len), _COLOURS, strict=False)))
    return on_any_page(figure)


def left_out(
    losses: dict[str, tuple[tuple[float, float], tuple[float, float]]], whole: float, title: str
) -> draw.Figure:
    """Two dots a way to compress: the loss without error feedback and with it; a line for what is not compressed.

    Args:
        losses: name of a way to loss and spread without error feedback, and with it.
        whole: the loss without compression.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch26 as figures

            figure = figures.left_out({"1 bit": ((0.7, 0.02), (0.66, 0.02))}, 0.66, "What is left out comes back")
    """
    figure, axes = draw.new_figure(title, width=7.2, height=2.5)
    axes.axvline(whole, color=INK, linewidth=1.2, linestyle="--")
    for row, (without, with_feedback) in enumerate(losses.values()):
        for (mean, spread, *_), colour in ((without, _RED), (with_feedback, _GREEN)):
            axes.plot([mean - spread, mean + spread], [row, row], color=colour, linewidth=3, alpha=0.4)
            axes.plot(mean, row, "o", color=colour, markersize=9)
    draw.name_rows(axes, list(losses), bare=True)
    draw.note(axes, "not compressed", (whole, -0.42), (5, 0), INK, size=9.5)
    axes.set_xlabel("test loss after 128 steps (bar: standard deviation of the seeds)")
    draw.key(figure, {"what is left out is lost": _RED, "error feedback": _GREEN})
    return on_any_page(figure)
