"""The figures of chapter 22: how a job fails, who waits in which call, and what failures cost at scale."""

from __future__ import annotations

from ignite_ddl import HangReport
from ignite_ddl.lab import cost, draw
from ignite_ddl.lab.draw import ACTIVITY

__all__ = ["hanging", "lost_at_scale", "three_ways"]

ALT = {  # what the chapter's figures show, in words
    "three_ways": (
        "Three ranks and five steps, three times. It ends: rank 1 dies after step 2, and all stop. It hangs: rank "
        "1 does something else, ranks 0 and 2 wait in step 3. It goes on, wrong: rank 1's steps differ, and nobody "
        "says so."
    ),
    "hanging": (
        "Rows of calls. Ranks 0 and 1 have finished four calls and wait in the fifth, all_reduce. Rank 2 has "
        "finished four and has returned."
    ),
    "lost_at_scale": (
        "Lost time by the minutes between saves, for saves of 10, 60 and 300 seconds: three valleys. Their floors "
        "are at 7, 12 and 24 percent, and the dots of the simulation lie on the curves."
    ),
}

RIGHT, WRONG, WAITS = ACTIVITY["compute"], ACTIVITY["backward_weight"], ACTIVITY["idle"]


def three_ways() -> draw.Figure:
    """A job of three ranks and five steps that ends, one that hangs, and one that goes on with wrong numbers.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch22 as figures

            figure = figures.three_ways()
    """
    figure, panels = draw.new_drawing(
        "A job ends with an error, hangs, or goes on with wrong numbers", width=7.0, height=2.1, columns=3
    )
    for axes, name in zip(panels, ("it ends", "it hangs", "it goes on, wrong"), strict=True):
        draw.heading(axes, name)
        for rank in range(3):
            axes.text(-0.15, rank + 0.5, f"rank {rank}", size=9, ha="right", va="center")
            for step in range(5):
                colour, text, width = RIGHT, step + 1, 1
                if name == "it ends" and step > 1:
                    continue
                if name == "it hangs" and step > 1:
                    if step > 2:
                        continue
                    width = 3
                    colour, text = (WRONG, "elsewhere") if rank == 1 else (WAITS, "waits in 3")
                if name == "it goes on, wrong" and rank == 1:
                    colour = WRONG
                draw.tile(axes, step, rank + 0.08, width, 0.84, colour, text)
        if name == "it ends":
            draw.note(axes, "killed", (2, 1.5), (5, 0), WRONG)
        axes.set_xlim(-1.5, 5.1)
        axes.set_ylim(3, 0)
    return draw.on_any_page(figure)


def hanging(report: HangReport, title: str) -> draw.Figure:
    """The calls of each rank on the group in which a job hangs.

    Args:
        report: of the job.
        title: the finding.

    Returns:
        the figure: calls that are done, the one in which ranks wait, and where those are that never came.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl
            from ignite_ddl.course.figures import ch22 as figures
            from ignite_ddl.diagnose import Call

            calls = Call(0, "barrier", 2, (0, 1), "", ("a.py", 1, "f")), Call(1, None, 1, (0, 1), "", None)
            figure = figures.hanging(ddl.HangReport(calls, (1,), ()), "Rank 1 has returned")
    """
    figure, axes = draw.new_drawing(title, width=7.0, height=0.45 * len(report.calls) + 0.7)
    last = max(call.number for call in report.calls if call.number is not None)
    for row, call in enumerate(report.calls):
        axes.text(0.9, row, f"rank {call.rank}", size=10, ha="right", va="center")
        done = call.number - (call.operation is not None)
        for number in range(1, done + 1):
            draw.tile(axes, number, row - 0.4, 0.96, 0.8, RIGHT, f"call {number}")
        if call.operation is not None:
            draw.tile(axes, done + 1, row - 0.4, 1.96, 0.8, WAITS, f"waits in {call.operation}")
        else:
            draw.note(axes, call.where, (done + 1, row), (4, 0), WRONG)
    axes.set_xlim(0, last + 2)
    axes.set_ylim(len(report.calls) - 0.4, -0.6)
    return draw.on_any_page(figure)


def lost_at_scale(curves: dict[int, dict[float, tuple[float, float]]], mean_time: float) -> draw.Figure:
    """The share of time that is lost, by the minutes between saves, for saves of several lengths.

    Args:
        curves: seconds of a save, to a dict from minutes between saves to (percent by formula, percent simulated).
        mean_time: minutes between two failures.

    Returns:
        the figure; lines are the formula, with five minutes for a restart, dots the simulation.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch22 as figures

            figure = figures.lost_at_scale({60: {10.0: (14, 14.2), 20.0: (12, 12.1), 40.0: (14, 13.8)}}, 186)
    """
    figure, axes = draw.new_figure(
        f"A failure every {mean_time / 60:.1f} hours: the shorter the save, the less is lost"
    )
    colours = [ACTIVITY["optimizer"], RIGHT, WRONG]
    for (seconds, points), colour in zip(curves.items(), colours, strict=False):
        low, high = min(points), max(points)
        at = [low * (high / low) ** (i / 40) for i in range(41)]
        lost = [100 * (1 - cost.goodput(x, seconds / 60, 5, mean_time)) for x in at]
        axes.plot(at, lost, color=colour, linewidth=2)
        axes.plot(list(points), [played for _, played in points.values()], "o", color=colour, markersize=6)
        draw.note(axes, f"save {seconds} s", (at[0], lost[0]), (-2, 10), colour, ha="left")
    draw.log_axis(axes, [2, 5, 10, 20, 50, 100, 200])
    axes.set_ylim(0, 48)
    axes.set_xlabel("minutes of training between two saves")
    axes.set_ylabel("percent of the time lost")
    return draw.on_any_page(figure)
