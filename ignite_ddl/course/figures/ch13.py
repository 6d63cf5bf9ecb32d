"""The figures of chapter 13: gradients that come late, what they cost, and backup workers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, RANK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "backup_workers",
    "over_staleness",
    "server_rows",
    "stale_descent",
    "staleness_histogram",
    "time_to_accuracy",
]


def server_rows(panels: dict[str, tuple[list, list]], title: str, end: float, unit: str) -> Figure:
    """Workers and their gradients: a panel a mode, a row a worker, a box from each pull to its push.

    A box holds its gradient's staleness. Grey is waiting for a pull, a dashed box a gradient that came too late, a
    green line the update that a gradient went into.

    Args:
        panels: name of a mode to its applied and its dropped gradients: records of ``simulate.parameter_server``.
        title: the finding.
        end: the last moment that is drawn.
        unit: what the records' numbers are, written under the axis.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch13 as figures
            from ignite_ddl.lab import simulate

            run = simulate.parameter_server(2, [1.0, 3.0], 6, mode="async")
            panels = {"async": (run.updates, run.dropped)}
            figure = figures.server_rows(panels, "One is slow", end=4, unit="time units")
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [1 + max(record.worker for records in lists for record in records) for lists in panels.values()]
    figure, axes = draw.stack(title, 7.4, 1.0 + sum(0.27 * n + 0.33 for n in rows), rows)
    red = ACTIVITY["backward_weight"]
    for panel, (name, (updates, dropped)), n_rows in zip(axes, panels.items(), rows, strict=True):
        for record, late in [(record, False) for record in updates] + [(record, True) for record in dropped]:
            row, since = record.worker, min(record.pulled_at - record.waited, end)
            left, right = min(record.pulled_at, end), min(record.pushed_at, end)
            wide = right - left > 0.03 * end
            draw.span(panel, row, since, left, ACTIVITY["idle"], height=0.72, edge="none")
            if late:
                text = "dropped" if right - left > 0.1 * end else "×" * wide
                look = {"edge": red, "linestyle": "--", "color": draw.ink(red)}
                draw.span(panel, row, left, right, "white", text, 0.72, 0.8, **look)
                continue
            draw.span(
                panel, row, left, right, ACTIVITY["compute"], record.staleness if wide else "", 0.72, 0.8
            )
            if record.applied_at <= end:
                look = {"color": ACTIVITY["optimizer"], "linewidth": 2.2}
                panel.plot([record.applied_at] * 2, [row - 0.44, row + 0.44], **look)
        draw.heading(panel, name, pad=3)
        draw.name_rows(panel, [f"worker {worker}" for worker in range(n_rows)], bare=True)
    axes[-1].set_xlim(0, end)
    axes[-1].set_xlabel(unit)
    handles = [
        Patch(color=ACTIVITY["compute"], label="a gradient, its staleness"),
        Patch(color=ACTIVITY["idle"], label="waits"),
        Line2D([], [], color=ACTIVITY["optimizer"], label="update"),
    ]
    if any(dropped for _, dropped in panels.values()):
        dashed = {"facecolor": "white", "edgecolor": red, "linestyle": "--"}
        handles.insert(2, Patch(label="too late, dropped", **dashed))
    draw.key(figure, handles)
    return figure


def stale_descent(paths: dict[int, list[float]], found: dict[int, float]) -> Figure:
    """Left a weight on its way down a bowl, for some stalenesses; right the largest rate that is stable.

    Args:
        paths: staleness, three at most, to the weight after each step, at one rate.
        found: staleness to the largest stable rate that was found, 1 among them. The line is
            2 sin(π / (4 · staleness + 2)), from S. Levin and R. May, A note on difference-delay equations, 1976.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch13 as figures

            figure = figures.stale_descent({0: [1.0, 0.2, 0.04], 1: [1.0, 1.0, 0.2]}, {0: 2.0, 1: 1.0})
    """
    from matplotlib.ticker import MaxNLocator

    title = "The older the gradient, the smaller the rate it bears"
    figure, (left, right) = draw.new_figure(title, width=7.6, columns=2, width_ratios=[1.35, 1])
    colours = [ACTIVITY[kind] for kind in ("optimizer", "forward", "backward_weight")]
    left.axhline(0, color="#BBBBBB", linewidth=0.8)
    for (staleness, path), colour in zip(paths.items(), colours, strict=False):
        left.plot(path, color=colour, linewidth=1.7)
        end = (len(path) - 1, path[-1])
        draw.note(left, f"staleness {staleness}", end, (5, 0), colour, weight="normal", size=9.5)
    left.set_xlim(0, 1.36 * (max(map(len, paths.values())) - 1))
    left.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    left.set_xlabel("step")
    left.set_ylabel("weight (best: 0)")
    line = range(max(found) + 1)
    right.plot(line, [2 * math.sin(math.pi / (4 * s + 2)) for s in line], color=GREY, linewidth=1.4)
    text = "line: 2 sin(π / (4s + 2)),\ns the staleness"
    style = {"ha": "right", "va": "bottom", "size": 9.5, "color": "#666666"}
    right.text(0.97, 0.52, text, transform=right.transAxes, **style)
    right.plot(list(found), list(found.values()), "o", color=ACTIVITY["forward"], markersize=6)
    draw.note(right, "found", (1, found[1]), (10, 8), va="baseline", size=9.5)
    right.set_ylim(0)
    right.set_xlabel("staleness (updates)")
    right.set_ylabel("largest stable rate")
    return figure


def staleness_histogram(runs: dict[str, list[dict]], title: str) -> Figure:
    """How many gradients of each staleness, a panel a run, stacked by worker; a dashed line marks the mean.

    Args:
        runs: name of a run, of two or more, to its records, each with "worker" and "staleness", as
            ``ParameterServer.statistics()`` gives them.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch13 as figures

            records = [{"worker": 0, "staleness": 1}, {"worker": 1, "staleness": 1}, {"worker": 0, "staleness": 0}]
            figure = figures.staleness_histogram({"equal": records, "one is slow": records[:2]}, "Mostly one")
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = draw.new_figure(title, width=7.6, height=3.1, columns=len(runs), sharex=True)
    workers = sorted({record["worker"] for records in runs.values() for record in records})
    for panel, (name, records) in zip(axes, runs.items(), strict=True):
        stalenesses = range(max(record["staleness"] for record in records) + 1)
        bottom = [0] * len(stalenesses)
        for worker in workers:
            of_worker = [record["staleness"] for record in records if record["worker"] == worker]
            counts = [of_worker.count(staleness) for staleness in stalenesses]
            look = {"color": RANK[worker], "label": f"worker {worker}"}
            panel.bar(stalenesses, counts, 0.86, bottom=bottom, **look)
            bottom = [below + count for below, count in zip(bottom, counts, strict=True)]
        mean = sum(record["staleness"] for record in records) / len(records)
        panel.axvline(mean, color="#222222", linewidth=1.2, linestyle="--")
        panel.set_ylim(0, 1.18 * max(bottom))
        draw.note(panel, f"mean {mean:.1f}", (mean, 1.17 * max(bottom)), (5, 0), va="top", size=9.5)
        panel.set_title(name, fontsize=10, fontweight="normal")
        panel.set_xlabel("staleness (updates)")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("gradients")
    axes[-1].legend(loc="upper right", frameon=False, fontsize=9)
    return figure


def over_staleness(
    curves: dict[str, dict[int, tuple[float, float]]], title: str, xlabel: str, ylabel: str
) -> Figure:
    """What becomes of a share as staleness, or the bound on it, grows: a labelled line a curve.

    Args:
        curves: name to whole number to (mean, standard error), four curves at most; bars are two standard errors,
            errors of 0 draw none. The numbers stand at equal distances.
        title: the finding.
        xlabel: what the whole number is.
        ylabel: what the share is; its axis is in percent, from 0.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch13 as figures

            curve = {1: (0.73, 0.01), 16: (0.5, 0.02)}
            figure = figures.over_staleness({"rate 0.1": curve}, "It falls", "workers", "test accuracy")
    """
    figure, axes = draw.new_figure(title, width=7.2, height=3.1)
    places = sorted({number for points in curves.values() for number in points})
    colours = [ACTIVITY[kind] for kind in ("forward", "backward_weight", "optimizer", "communication")]
    for (name, points), colour in zip(curves.items(), colours, strict=False):
        at = [places.index(number) for number in points]
        means = draw.error_line(axes, at, points, colour, linewidth=1.7)
        draw.note(axes, name, (at[-1], means[-1]), (9, 0), colour, weight="normal", size=9.5)
    axes.set_xticks(range(len(places)), [str(number) for number in places])
    axes.set_xlim(-0.3, 1.36 * (len(places) - 1))
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel(xlabel, x=0.37)
    axes.set_ylabel(ylabel)
    return figure


def time_to_accuracy(
    curves: dict[str, list[tuple[float, float]]], reached: dict[str, float], target: float, title: str
) -> Figure:
    """Accuracy against seconds, a line a mode, and when each has reached the target.

    Args:
        curves: name of a mode to its points (seconds, accuracy), in order of time.
        reached: name of a mode to the seconds when it had the target.
        target: accuracy, from 0 to 1.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch13 as figures

            curves = {"sync": [(0, 0.1), (2, 0.7)], "async": [(0, 0.1), (1, 0.7)]}
            figure = figures.time_to_accuracy(curves, {"sync": 1.9, "async": 0.9}, 0.65, "Nobody waits for the slow")
    """
    figure, axes = draw.new_figure(title, width=7.4, height=3.6)
    kinds = {"sync": "forward", "async": "backward_weight", "bounded": "communication"}
    axes.axhline(target, color=GREY, linewidth=1, linestyle="--")
    order = sorted(reached, key=reached.get)
    for name, points in curves.items():
        colour, seconds = ACTIVITY[kinds.get(name.split()[0], "optimizer")], reached[name]
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6)
        axes.plot([seconds] * 2, [0, target], color=colour, linewidth=1, linestyle=":")
        axes.plot(seconds, target, "o", color=colour, markersize=6)
        at = (seconds, 0.3 - 0.075 * order.index(name))
        draw.note(
            axes, f"{name}  {seconds:.1f} s", at, (5, 0), colour, size=9.5, bbox={"color": "white", "pad": 1}
        )
    draw.note(axes, f"{target:.0%}", (0, target), (4, 3), va="baseline", size=9.5)
    axes.set_xlim(0)
    axes.set_ylim(0, 1.25 * max(value for points in curves.values() for _, value in points))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("seconds")
    axes.set_ylabel("test accuracy")
    return figure


def backup_workers(
    arrivals: dict[int, float], paper_arrivals: dict[int, float], rates: dict[int, float], paper_b: int
) -> Figure:
    """Left the share of steps in which each gradient is in in time; right what backups gain in gradients a second.

    Args:
        arrivals: k to the share of steps in which the k-th gradient came in time, simulated.
        paper_arrivals: the same, of the paper.
        rates: b to gradients that count in a second, simulated; drawn in percent of those with the smallest b.
        paper_b: the paper's best b.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch13 as figures

            rates = {0: 48.0, 4: 50.3, 8: 49.7}
            figure = figures.backup_workers({98: 0.8, 99: 0.6, 100: 0.3}, {98: 0.8}, rates, paper_b=4)
    """
    best = max(rates, key=rates.get)
    title = f"100 workers: with {best} backups the most gradients count"
    figure, (left, right) = draw.new_figure(title, width=7.6, height=3.2, columns=2)
    blue, red = ACTIVITY["forward"], ACTIVITY["backward_weight"]
    plain = {"weight": "normal", "size": 9.5}
    left.plot(list(arrivals), list(arrivals.values()), color=blue, linewidth=1.8)
    left.plot(list(paper_arrivals), list(paper_arrivals.values()), "D", color=red, markersize=7)
    first = min(arrivals)
    draw.note(left, "simulated", (first, arrivals[first]), (2, -14), blue, va="baseline", **plain)
    for k, share in paper_arrivals.items():
        draw.note(left, f"paper: {share:.0%}", (k, share), (-8, -3), red, ha="right", va="top", **plain)
    left.set_ylim(0, 1.05)
    left.yaxis.set_major_formatter("{x:.0%}")
    left.set_xlabel("k-th of 100 gradients")
    left.set_ylabel("steps in which it is in by 2 s")
    gains = {b: 100 * (rate / rates[min(rates)] - 1) for b, rate in rates.items()}
    low, high = min(gains.values()), max(gains.values())
    right.plot(list(gains), list(gains.values()), color=blue, marker="o", markersize=5, linewidth=1.8)
    right.plot(best, gains[best], "o", color=ACTIVITY["optimizer"], markersize=10)
    right.axvline(paper_b, color=red, linewidth=1.2, linestyle="--")
    draw.note(right, f"paper: b = {paper_b}", (paper_b, low), (5, 2), red, va="baseline", **plain)
    right.set_ylim(low - 0.1 * (high - low), high + 0.15 * (high - low))
    right.yaxis.set_major_formatter("{x:+g} %")
    right.set_xlabel("backups b, of 100 workers")
    right.set_ylabel(f"gradients that count, a second,\nbeyond those with b = {min(rates)}")
    return figure
