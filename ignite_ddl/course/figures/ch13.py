"""The figures of chapter 13: gradients that come late, what they cost, and backup workers."""

from __future__ import annotations

import math

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, INK, on_any_page

__all__ = [
    "accuracy_over_rates",
    "backup_workers",
    "bounds",
    "seconds_of_rules",
    "server_rows",
    "stale_descent",
    "staleness_histogram",
]

ALT = {
    "server_rows": "Four panels with four workers each. Sync: three workers wait for the slow one. Async: no "
    "gaps, staleness up to 11. Bounded: a few steps, then waiting. 3 + 1: three workers keep going, the slow "
    "one's gradients are dropped.",
    "stale_descent": "Left: at rate 0.8 the weight goes to 0 with staleness 0, swings with 1 and grows with 2. "
    "Right: the largest stable rate falls from 2 at staleness 0 to 1 at staleness 1 and a tenth at 16, on the "
    "line of the formula.",
    "staleness_histogram": "Two histograms of staleness, measured. Four equal workers: most at 3. With a slow "
    "worker: the others' at 3 and below, its own far to the right. Both means lie below 3.",
    "accuracy_over_rates": "Test accuracy after 256 gradients against the learning rate: one worker, four "
    "asynchronous ones, and 32, synchronous and asynchronous. One and four are highest at large rates. Both lines"
    " of 32 have their top at a small rate, far lower, and lie close together.",
    "bounds": "Share of the asynchronous speed against a bound of 0 to 16 steps, simulated. Where any worker is "
    "slow now and then it climbs from three fifths to all of it; where one is always slow it stays below a third.",
    "seconds_of_rules": "Four rows of four dots: seconds for 240 gradients under each rule. Sync is slowest, then"
    " bounded by 2, 3 + 1 and async, and all end at nearly the same accuracy.",
    "backup_workers": "Gain in gradients used a second against the number of backups, of 100 workers. At a spread"
    " of 5 % the best is 2, at 10 % it is 4, at 20 % it is 9.",
}  # alternative texts of the chapter's figures

_BLUE, _RED, _GREEN = (ACTIVITY[kind] for kind in ("forward", "backward_weight", "optimizer"))
_COLOURS = [_BLUE, ACTIVITY["backward"], _GREEN, _RED]
_WAITS = "#8C8C8C55"  # half transparent: a grey that is fainter than the page's words on light and on dark


def server_rows(panels: dict[str, tuple[list, list]], title: str, end: float, unit: str) -> draw.Figure:
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
    for panel, (name, (updates, dropped)), n_rows in zip(axes, panels.items(), rows, strict=True):
        for record, late in [(record, False) for record in updates] + [(record, True) for record in dropped]:
            row, since = record.worker, min(record.pulled_at - record.waited, end)
            left, right = min(record.pulled_at, end), min(record.pushed_at, end)
            wide = right - left > 0.03 * end
            draw.span(panel, row, since, left, _WAITS, height=0.72, edge="none")
            if late:
                text = "dropped" if right - left > 0.1 * end else "×" * wide
                look = {"edge": _RED, "linestyle": "--", "color": _RED}
                draw.span(panel, row, left, right, "none", text, 0.72, 1.0, **look)
                continue
            text = record.staleness if wide else ""
            draw.span(panel, row, left, right, _BLUE, text, 0.72, 0.8, edge=INK)
            if record.applied_at <= end:
                look = {"color": _GREEN, "linewidth": 2.4}
                panel.plot([record.applied_at] * 2, [row - 0.44, row + 0.44], **look)
        draw.heading(panel, name, pad=3)
        draw.name_rows(panel, [f"worker {worker}" for worker in range(n_rows)], bare=True)
    axes[-1].set_xlim(0, end)
    axes[-1].set_xlabel(unit)
    handles = [
        Patch(color=_BLUE, label="a gradient, its staleness"),
        Patch(color=_WAITS, label="waits"),
        Line2D([], [], color=_GREEN, label="update"),
    ]
    if any(dropped for _, dropped in panels.values()):
        dashed = {"facecolor": "none", "edgecolor": _RED, "linestyle": "--"}
        handles.insert(2, Patch(label="too late, dropped", **dashed))
    draw.key(figure, handles)
    return on_any_page(figure)


def stale_descent(paths: dict[int, list[float]], found: dict[int, float]) -> draw.Figure:
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
    left.plot([0, max(map(len, paths.values())) - 1], [0, 0], color=GREY, linewidth=0.8)
    for (staleness, path), colour in zip(paths.items(), (_GREEN, _BLUE, _RED), strict=False):
        left.plot(path, color=colour, linewidth=2)
        end = (len(path) - 1, path[-1])
        draw.note(left, f"staleness {staleness}", end, (5, 0), colour, size=9.5)
    left.set_xlim(0, 1.36 * (max(map(len, paths.values())) - 1))
    left.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    left.set_xlabel("step")
    left.set_ylabel("weight (best: 0)")
    line = range(max(found) + 1)
    right.plot(line, [2 * math.sin(math.pi / (4 * s + 2)) for s in line], color=GREY, linewidth=1.4)
    text = "line: 2 sin(π / (4s + 2)),\ns the staleness"
    style = {"ha": "right", "va": "bottom", "size": 9.5, "color": INK}
    right.text(0.97, 0.52, text, transform=right.transAxes, **style)
    right.plot(list(found), list(found.values()), "o", color=_BLUE, markersize=7)
    draw.note(right, "found", (1, found[1]), (10, 8), _BLUE, va="baseline", size=9.5)
    right.set_ylim(0)
    right.set_xlabel("staleness (updates)")
    right.set_ylabel("largest stable rate")
    return on_any_page(figure)


def staleness_histogram(runs: dict[str, list[dict]], title: str, slow: int) -> draw.Figure:
    """How many gradients of each staleness, a panel a run; a dashed line marks the mean.

    Args:
        runs: name of a run, of two or more, to its records, each with "worker" and "staleness", as
            ``ParameterServer.statistics()`` gives them.
        title: the finding.
        slow: the worker that has a colour of its own.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch13 as figures

            records = [{"worker": 0, "staleness": 1}, {"worker": 1, "staleness": 1}, {"worker": 0, "staleness": 0}]
            runs = {"equal": records, "one is slow": records[:2]}
            figure = figures.staleness_histogram(runs, "Mostly one", slow=1)
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = draw.new_figure(title, width=7.4, height=2.9, columns=len(runs), sharex=True, sharey=True)
    for panel, (name, records) in zip(axes, runs.items(), strict=True):
        stalenesses = range(max(record["staleness"] for record in records) + 1)
        bottom = [0] * len(stalenesses)
        for colour, of_slow in ((_BLUE, False), (_RED, True)):
            found = [record["staleness"] for record in records if (record["worker"] == slow) == of_slow]
            counts = [found.count(staleness) for staleness in stalenesses]
            panel.bar(stalenesses, counts, 0.86, bottom=bottom, color=colour)
            bottom = [below + count for below, count in zip(bottom, counts, strict=True)]
        mean = sum(record["staleness"] for record in records) / len(records)
        panel.axvline(mean, color=INK, linewidth=1.4, linestyle="--")
        panel.margins(y=0.25)
        draw.heading(panel, f"{name}: mean {mean:.1f}")
        panel.set_xlabel("staleness (updates)")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("gradients")
    draw.key(figure, {"workers 0 to 2": _BLUE, f"worker {slow}": _RED})
    return on_any_page(figure)


def accuracy_over_rates(curves: dict[str, list[tuple[float, float]]], rates: list[float], title: str) -> draw.Figure:
    """What each learning rate reaches, a line a way to train; a dot marks the best, a band the spread.

    Args:
        curves: name of a line to (mean, standard deviation) at each rate; four lines at most, of which each
            has its name at its end.
        rates: of the points, rising; their axis is logarithmic.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch13 as figures

            curves = {"1 worker": [(0.5, 0.02), (0.7, 0.02), (0.6, 0.03)]}
            figure = figures.accuracy_over_rates(curves, [0.025, 0.1, 0.4], "One worker")
    """
    figure, axes = draw.new_figure(title, width=7.2, height=3.6)
    lowest_first = sorted(curves, key=lambda name: curves[name][-1][0])
    ends: dict[str, float] = {}  # where the names stand: at the ends of the lines, 0.06 apart at least
    for below, name in zip([None, *lowest_first], lowest_first, strict=False):
        ends[name] = max(curves[name][-1][0], ends[below] + 0.06 if below else 0.0)
    for (name, points), colour in zip(curves.items(), _COLOURS, strict=False):
        means = [mean for mean, _ in points]
        low, high = ([mean + sign * spread for mean, spread in points] for sign in (-1, 1))
        axes.fill_between(rates, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(rates, means, color=colour, linewidth=2)
        best = max(range(len(rates)), key=means.__getitem__)
        axes.plot(rates[best], means[best], "o", color=colour, markersize=9)
        text = f"{name}: best {means[best]:.0%}"
        draw.note(axes, text, (rates[-1], ends[name]), (8, 0), colour, size=9.5)
    draw.log_axis(axes, rates, base=2)
    axes.set_xlim(rates[0] / 1.2, rates[-1] * (rates[-1] / rates[0]) ** 0.34)
    axes.set_ylim(0, 0.8)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("learning rate", x=0.37)
    axes.set_ylabel("test accuracy")
    return on_any_page(figure)


def bounds(curves: dict[str, dict[int, float]], title: str) -> draw.Figure:
    """What share of the asynchronous speed is left with a bound: a labelled line a cluster.

    Args:
        curves: name to bound to share, two curves at most. The bounds stand at equal distances.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch13 as figures

            figure = figures.bounds({"pauses": {0: 0.6, 2: 0.9}, "slow": {0: 0.3, 2: 0.3}}, "It helps one")
    """
    figure, axes = draw.new_figure(title, width=7, height=2.8)
    for (name, points), colour in zip(curves.items(), (_BLUE, _RED), strict=False):
        axes.plot(range(len(points)), list(points.values()), "o-", color=colour, linewidth=2)
        draw.note(axes, name, (len(points) - 1, list(points.values())[-1]), (10, 0), colour, size=9.5)
        axes.set_xticks(range(len(points)), [str(bound) for bound in points])
    axes.set_xlim(-0.3, 1.42 * (len(points) - 1))
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("bound s (steps ahead of the slowest; 0 is sync's pace)", x=0.37)
    axes.set_ylabel("share of async's speed")
    return on_any_page(figure)


def seconds_of_rules(took: dict[str, list[float]], reached: dict[str, tuple[float, float]], title: str) -> draw.Figure:
    """A row of dots for each rule: how long its runs took, and in words what they reached.

    Args:
        took: name of a rule to the seconds of its runs; four rules at most, the first at the top.
        reached: name of a rule to its accuracy and the accuracy's spread.
        title: the finding.

    Returns:
        the figure; an upright line marks the mean of a row.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch13 as figures

            reached = {"sync": (0.71, 0.02), "async": (0.7, 0.02)}
            figure = figures.seconds_of_rules({"sync": [4, 5], "async": [2, 2]}, reached, "As good, and sooner")
    """
    figure, axes = draw.new_figure(title, width=7.2, height=2.6)
    end = 1.28 * max(max(seconds) for seconds in took.values())
    for row, ((name, seconds), colour) in enumerate(zip(took.items(), _COLOURS, strict=False)):
        axes.plot(seconds, [row] * len(seconds), "o", color=colour, markersize=8, alpha=0.7, markeredgewidth=0)
        axes.plot([sum(seconds) / len(seconds)] * 2, [row - 0.36, row + 0.36], color=colour, linewidth=3)
        text = "{:.0%} ± {:.0%}".format(*reached[name])
        draw.note(axes, text, (end, row), (0, 0), colour, ha="right", size=10)
    draw.name_rows(axes, list(took), bare=True)
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds for 240 gradients, simulated (line: mean)")
    draw.note(axes, "accuracy", (end, -0.75), (0, 0), color=INK, ha="right", size=9.5)
    return on_any_page(figure)


def backup_workers(gains: dict[str, dict[int, float]], title: str) -> draw.Figure:
    """What backups gain in gradients that count, a second: a line a spread of the steps' times.

    Args:
        gains: name of a line to b to the gain over b = 0, as a share; four lines at most.
        title: the finding.

    Returns:
        the figure; a dot marks the best b of each line.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch13 as figures

            figure = figures.backup_workers({"10 %": {0: 0.0, 4: 0.05, 12: 0.01}}, "Four of a hundred")
    """
    figure, axes = draw.new_figure(title, width=7, height=3.1)
    axes.axhline(0, color=GREY, linewidth=0.8)
    for (name, points), colour in zip(gains.items(), (_GREEN, _BLUE, _RED), strict=False):
        axes.plot(list(points), list(points.values()), color=colour, linewidth=2)
        best, last = max(points, key=points.get), max(points)
        axes.plot(best, points[best], "o", color=colour, markersize=9)
        draw.note(axes, f"{name}: b = {best}", (last, points[last]), (7, 0), colour, size=9.5)
    axes.set_xlim(-0.5, 1.42 * last)
    axes.set_ylim(top=1.15 * max(max(points.values()) for points in gains.values()))
    axes.set_xticks(range(0, last + 1, 4))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:+.0%}" if share else "0")
    axes.set_xlabel("backups b, of 100 workers", x=0.38)
    axes.set_ylabel("gradients used a second,\nagainst b = 0")
    return on_any_page(figure)
