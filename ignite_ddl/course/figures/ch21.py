"""The figures of chapter 21: a run that is killed, wrong losses, old and new shards, how often to save, who waits."""

from __future__ import annotations

from ignite_ddl.lab import Timeline, draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, RANK
from ignite_ddl.lab.record import Record

__all__ = ["departures", "lost_by_interval", "one_run", "saves", "shards"]

ALT = {  # what the chapter's figures show, in words
    "one_run": (
        "Two rows of steps. The uninterrupted run does steps 1 to 12. The other one saves after step 7, is killed "
        "after step 10, and goes on with step 8: three steps are done twice."
    ),
    "departures": (
        "Rows of five steps. With all five parts each loss is right. Without weights, position or random state the "
        "first loss is wrong; without the optimizer the second, without the scheduler the fourth."
    ),
    "shards": (
        "A matrix of 10 rows and 64 columns, twice. Left, four old shards of 5 rows and 32 columns, of ranks 4 to 7. "
        "Right, eight new shards with 3, 3, 3 and 1 rows; those of ranks 2 and 3 lie across the border of two old "
        "ones."
    ),
    "interval": (
        "Lost time by the minutes between two saves. Saving costs much at 5 minutes, work done twice costs much at "
        "160; their sum and the simulation are lowest near 20."
    ),
    "saves": (
        "Steps of two runs, measured. Blocking: a gap after step 3, as long as the save. Asynchronous: a short gap, "
        "and the checkpoint is written while step 4 runs."
    ),
}

RIGHT, WRONG = ACTIVITY["compute"], ACTIVITY["backward_weight"]


def one_run(steps: int, saved: int, killed: int) -> draw.Figure:
    """Steps of an uninterrupted run, and of one that is saved, killed and resumed.

    Args:
        steps: of the whole run.
        saved: the step after which it is saved.
        killed: the step after which it is killed.

    Returns:
        the figure; grey steps are lost and done again.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch21 as figures

            figure = figures.one_run(steps=12, saved=7, killed=10)
    """
    title = f"Killed after step {killed}, resumed after step {saved}: {killed - saved} steps are done twice"
    figure, axes = draw.new_drawing(title, width=7.0, height=1.9)
    rows = (("uninterrupted", 1, steps), ("killed", 1, killed), ("resumed", saved + 1, steps))
    for row, (name, first, last) in enumerate(rows):
        axes.text(0.7, row, name, size=10, ha="right", va="center")
        for step in range(first, last + 1):
            colour = ACTIVITY["idle"] if name == "killed" and step > saved else RIGHT
            draw.tile(axes, step - 0.1, row - 0.36, 0.94, 0.72, colour, step)
    axes.plot([saved + 0.87] * 2, [0.52, 1.48], color=ACTIVITY["optimizer"], linewidth=4)
    draw.note(axes, "killed", (killed + 0.9, 1), (6, 0), WRONG)
    style = {"ha": "right"}
    draw.note(axes, "saved here", (saved + 0.8, 2), (-6, 0), ACTIVITY["optimizer"], **style)
    axes.set_xlim(-1.2, steps + 1)
    axes.set_ylim(2.5, -0.5)
    return draw.on_any_page(figure)


def departures(same: dict[str, list[bool]], first_step: int) -> draw.Figure:
    """Which losses of resumed runs are those of the uninterrupted one, a row a run.

    Args:
        same: what a run has left out, to whether each of its losses is right.
        first_step: the step of the first loss.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch21 as figures

            figure = figures.departures({"nothing": [True, True], "optimizer": [True, False]}, first_step=8)
    """
    title = "Leave one part out, and the losses go wrong: three at once, two later"
    figure, axes = draw.new_drawing(title, width=7.0, height=0.4 * len(same) + 0.8)
    for row, (name, losses) in enumerate(same.items()):
        axes.text(
            -0.1, row, "all five parts" if name == "nothing" else f"without {name}", size=10, ha="right", va="center"
        )
        for step, right in enumerate(losses):
            draw.tile(axes, step, row - 0.42, 0.96, 0.84, RIGHT if right else WRONG, "right" if right else "wrong")
    n_steps = len(next(iter(same.values())))
    for step in range(n_steps):
        axes.text(step + 0.48, -0.6, f"step {first_step + step}", size=9, ha="center", va="bottom")
    axes.set_xlim(-1.9, n_steps)
    axes.set_ylim(len(same) - 0.5, -1.1)
    return draw.on_any_page(figure)


def shards(size: tuple[int, int], old: list[tuple], new: list[tuple], title: str) -> draw.Figure:
    """A matrix in its old shards, and in its new ones; a colour is the old rank from whose file the numbers come.

    Args:
        size: rows and columns.
        old: (rank, first row and column, rows and columns) of each old shard.
        new: the same of each new shard.
        title: the finding.

    Returns:
        the figure; numbers are ranks.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch21 as figures

            old = [(0, (0, 0), (5, 4)), (1, (5, 0), (5, 4))]
            new = [(0, (0, 0), (7, 4)), (1, (7, 0), (3, 4))]
            figure = figures.shards((10, 4), old, new, "New rank 0 reads from both old ones")
    """
    figure, panels = draw.new_drawing(title, width=7.0, height=3.2, columns=2)
    from matplotlib.patches import Rectangle

    for axes, pieces, name in zip(panels, (old, new), ("old shards", "new shards"), strict=True):
        for rank, (top, left), (height, width) in old:
            draw.tile(axes, left, top, width, height, RANK[rank % len(RANK)], edge="none")
        for rank, (top, left), (height, width) in pieces:
            axes.add_patch(Rectangle((left, top), width, height, fill=False, edgecolor="white", linewidth=3))
            under = next(r for r, at, n in old if _inside((top + height / 2, left + width / 2), at, n))
            style = {"size": 10, "weight": "bold", "ha": "center", "va": "center"}
            colour = draw.ink_on(RANK[under % len(RANK)])
            axes.text(left + width / 2, top + height / 2, f"rank {rank}", color=colour, **style)
        axes.set_xlim(-0.09 * size[1], size[1])
        axes.set_ylim(size[0] + 0.2, -0.2)
        for row in range(size[0]):
            axes.text(-0.02 * size[1], row + 0.5, row, size=9, ha="right", va="center")
        draw.heading(axes, f"{name}, row by row")
    return draw.on_any_page(figure)


def _inside(point: tuple, first: tuple, size: tuple) -> bool:
    return all(a <= x < a + n for x, a, n in zip(point, first, size, strict=True))


def lost_by_interval(simulated: dict[float, float], save: float, mean_time: float) -> draw.Figure:
    """The share of time that is lost, by the minutes between saves: simulated, and the two terms of the formula.

    Args:
        simulated: minutes of training between two saves, to the share that is lost.
        save: minutes that a save takes.
        mean_time: minutes between two failures, on average.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch21 as figures

            figure = figures.lost_by_interval({5: 0.2, 20: 0.1, 80: 0.2}, save=1, mean_time=186)
    """
    best = (2 * save * mean_time) ** 0.5
    title = f"A save of {save:g} min, a failure each {mean_time:g} min: save every {best:.0f} min"
    figure, axes = draw.new_figure(title)
    low, high = min(simulated), max(simulated)
    at = [low * (high / low) ** (i / 60) for i in range(61)]
    waits, repeats = [100 * save / x for x in at], [50 * x / mean_time for x in at]
    axes.plot(at, waits, color=ACTIVITY["backward"], linewidth=2)
    axes.plot(at, repeats, color=WRONG, linewidth=2)
    axes.plot(at, [a + b for a, b in zip(waits, repeats, strict=True)], color=GREY, linewidth=2, linestyle="--")
    axes.plot(list(simulated), [100 * y for y in simulated.values()], "o", color=RIGHT, markersize=7)
    draw.note(axes, "saving", (at[42], waits[42]), (0, 9), ACTIVITY["backward"])
    draw.note(axes, "work done twice", (at[-3], repeats[-3]), (-8, 4), WRONG, ha="right")
    draw.note(axes, "formula", (at[46], waits[46] + repeats[46]), (-8, 8), GREY, ha="right")
    middle = min(simulated, key=lambda x: abs(x - best))
    draw.note(axes, "simulated", (middle, 100 * simulated[middle]), (-28, 16), RIGHT)
    draw.log_axis(axes, simulated)
    axes.set_ylim(0, 1.05 * (waits[-1] + repeats[-1]))
    axes.set_xlabel("minutes of training between two saves")
    axes.set_ylabel("percent of the time lost")
    return draw.on_any_page(figure)


def saves(timelines: dict[str, Timeline], step: int) -> draw.Figure:
    """Steps of rank 0 and the checkpoint after one of them, in runs that save in different ways.

    Args:
        timelines: by the way of saving; what other threads did has a row of its own.
        step: the step after which the checkpoint is taken; the figure shows this one and the next two.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch21 as figures
            from ignite_ddl.lab.record import Record

            class Run:
                records = [Record(0, "compute", f"step {n}", n, n + 0.5) for n in range(1, 5)]
                background = [Record(0, "handlers", "ddl.Checkpoint", 3.6, 4.2)]

            figure = figures.saves({"asynchronous": Run()}, step=3)
    """
    panels = {}
    for name, timeline in timelines.items():
        steps = []
        for n in range(step, step + 3):
            spans = [r for r in timeline.records if (r.rank, r.name) == (0, f"step {n}")]
            if spans:
                ends = min(r.start for r in spans), max(r.end for r in spans)
                steps.append(Record(0, "compute", f"step {n}", *ends))
        first, then = (next(r for r in steps if r.name == f"step {n}") for n in (step, step + 1))
        save = Record(0, "handlers", "save", first.end, then.start)
        panels[name] = {"training": [*steps, save]}
        own = [r._replace(name="write") for r in timeline.background if r.rank == 0]
        if own:
            panels[name]["background"] = own
    title = "Blocking, rank 0 waits for the whole save; asynchronous, for a copy"
    return draw.on_any_page(draw.step_rows(panels, title, ends_marked=False))
