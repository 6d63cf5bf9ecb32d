"""The figures of chapter 06: who does what, a confusion matrix, resumed runs, and what a log holds."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, INK, RANK

__all__ = ["confusion_matrix", "logged_losses", "resumed_losses", "who_does_what"]

ALT = {
    "who_does_what": "Ten jobs in three groups: four for rank 0 alone, three for each rank, three for all ranks "
    "together.",
    "confusion_matrix": "True against predicted classes: most mistakes lie among the tops, and among the kinds of "
    "shoes.",
    "resumed_losses": "Difference to the run without a break in four cases: zero in the first, swinging in the others.",
    "logged_losses": "Losses by step: rank 0's own jumps, the mean of both ranks a little less, the smoothed mean "
    "falls evenly.",
}  # alternative texts of the chapter's figures


# What there is to do in a training, and who does it: rank 0 alone, each rank its own, or all ranks together.
JOBS = {
    **dict.fromkeys(["download", "progress bar", "write the log", "write the checkpoint"], "one"),
    **dict.fromkeys(["draw random numbers", "set the learning rate", "read the checkpoint"], "each"),
    **dict.fromkeys(["average gradients", "compute a metric", "decide to stop"], "together"),
}


def who_does_what(jobs: dict[str, str]) -> draw.Figure:
    """Which of four ranks do a job: rank 0 alone, each rank its own, or all ranks together.

    Args:
        jobs: the name of a job to its kind: "one", "each" or "together".

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch06 as figures

            figure = figures.who_does_what({"download": "one", "seed": "each", "metric": "together"})
    """
    title = "One rank, each rank, or all together: every job is of one kind"
    figure, axes = draw.new_drawing(title, width=7.0, height=0.27 * len(jobs) + 1.0)
    words = {"color": INK, "fontsize": 9}
    for rank in range(4):
        axes.text(rank + 0.5, -0.25, f"rank {rank}", ha="center", va="bottom", **words)
    meaning = {"one": "rank 0; the others wait or go on", "each": "each its own", "together": "all at once, one answer"}
    top, before = 0.0, None
    for name, kind in jobs.items():
        if before != kind:
            top += 0.4 * (before is not None)
            axes.text(4.15, top + 0.5, meaning[kind], va="center", **words)
        axes.text(-0.15, top + 0.5, name, ha="right", va="center", **words)
        if kind == "together":
            draw.tile(axes, 0.04, top, 3.92, 0.9, INK, edge="none")
        for rank in range(4) if kind != "together" else ():
            works = kind == "each" or rank == 0
            look = {"edge": "none"} if works else {"edge": INK, "linestyle": ":"}
            draw.tile(axes, rank + 0.04, top, 0.92, 0.9, RANK[rank] if works else "none", **look)
        top, before = top + 1, kind
    axes.set(xlim=(-2.6, 7.0), ylim=(top, -0.9))
    return draw.on_any_page(figure)


def confusion_matrix(matrix, classes: list[str], n_ranks: int) -> draw.Figure:
    """How often each class was taken for each class; more images, more colour.

    Args:
        matrix: counts, ``matrix[true][predicted]``, a tensor or a list of lists.
        classes: the names of the classes.
        n_ranks: number of ranks that counted, for the title.

    Returns:
        the figure; the most frequent mistake has a frame.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch06 as figures

            figure = figures.confusion_matrix([[8, 2, 0], [1, 9, 0], [0, 5, 5]], ["shirt", "coat", "bag"], n_ranks=2)
    """
    counts = [[int(count) for count in row] for row in matrix]
    total, largest = sum(map(sum, counts)), max(map(sum, counts))
    size = len(classes)
    mistakes = {(t, p): counts[t][p] for t in range(size) for p in range(size) if t != p}
    true, taken = max(mistakes, key=mistakes.get)
    title = f"{total:,} images from {n_ranks} ranks: {classes[true]} is taken for {classes[taken]} most often"
    figure, axes = draw.new_figure(title, width=6.6, height=4.6)
    for row in range(size):
        for column in range(size):
            count = counts[row][column]
            colour = ACTIVITY["forward"] if row == column else ACTIVITY["backward_weight"]
            much = count > 0.3 * largest  # little is a tint of the page, whatever its ground
            words = {"color": "white" if much else INK, "weight": "bold"}
            fill = (colour, 1 if much else 0.6 * (count / largest) ** 0.6)
            draw.tile(axes, column, row, 1, 1, fill, count or "", edge="none", **words)
    draw.tile(axes, taken, true, 1, 1, "none", edge=INK, linewidth=2)
    axes.set(xlim=(0, size), ylim=(size, 0), xlabel="predicted class", ylabel="true class")
    places = [place + 0.5 for place in range(size)]
    axes.set_yticks(places, classes)
    axes.set_xticks(places, classes, rotation=40, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    return draw.on_any_page(figure)


def resumed_losses(apart: dict[str, dict[int, float]], title: str) -> draw.Figure:
    """How far the losses of resumed runs are from those of runs without a break: a panel a run, on one scale.

    Args:
        apart: name of a resumed run to its steps, each with its loss minus that of the run without a break.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch06 as figures

            apart = {"with everything": {3: 0.0, 4: 0.0}, "without the optimizer": {3: 0.0, 4: 0.25}}
            figure = figures.resumed_losses(apart, "Momentum is a part of the run")
    """
    figure, panels = draw.stack(title, 7.0, 0.72 * len(apart) + 0.7, [1] * len(apart))
    widest = max(abs(gap) for gaps in apart.values() for gap in gaps.values()) or 1.0
    for axes, (name, gaps) in zip(panels, apart.items(), strict=True):
        same = max(map(abs, gaps.values())) <= 1e-12
        colour = ACTIVITY["optimizer"] if same else ACTIVITY["backward_weight"]
        axes.axhline(0, color=INK, linewidth=0.8, linestyle=":")
        axes.plot(list(gaps), list(gaps.values()), color=colour, linewidth=2)
        draw.heading(axes, f"{name}: {'the same losses' if same else 'other losses'}", pad=2)
        axes.set_ylim(-1.1 * widest, 1.1 * widest)
        axes.spines["bottom"].set_visible(axes is panels[-1])
        axes.tick_params(bottom=axes is panels[-1])
    panels[-1].set_xlabel("steps")
    figure.supylabel("loss, minus that of the run without a break", fontsize=9)
    return draw.on_any_page(figure)


def logged_losses(losses: dict[str, list[float]]) -> draw.Figure:
    """Losses by step, as a log holds them.

    Args:
        losses: name of a line to its values from step 1, three lines at most; the last is the thickest.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch06 as figures

            losses = {"one rank's": [3, 1], "all ranks'": [2, 2], "smoothed": [2, 2]}
            figure = figures.logged_losses(losses)
    """
    title = "The mean over ranks calms the loss a little, the smoothing makes the line"
    figure, axes = draw.new_figure(title, height=2.9)
    looks = ((INK, 1.0), (ACTIVITY["backward"], 1.4), (ACTIVITY["forward"], 2.6))
    for (name, values), (colour, width) in zip(losses.items(), looks, strict=False):
        axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=width, label=name)
    axes.set(xlabel="steps", ylabel="loss")
    axes.set_ylim(0)
    axes.legend(loc="upper right", frameon=False)
    return draw.on_any_page(figure)
