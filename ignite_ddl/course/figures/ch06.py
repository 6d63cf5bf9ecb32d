"""The figures of chapter 06: who does what, predictions, resumed runs, and what a log holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, RANK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["confusion_matrix", "logged_scalars", "resumed_losses", "sample_predictions", "who_does_what"]


def who_does_what(jobs: dict[str, str]) -> Figure:
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
    for rank in range(4):
        draw.label_rank(axes, rank + 0.5, -0.25, rank, ha="center", va="bottom")
    meaning = {
        "one": "rank 0; the others wait or go on",
        "each": "each its own",
        "together": "all at once, one answer",
    }
    top, before = 0.0, None
    for name, kind in jobs.items():
        if before != kind:
            top += 0.4 * (before is not None)
            axes.text(4.15, top + 0.5, meaning[kind], fontsize=9, va="center")
        axes.text(-0.15, top + 0.5, name, fontsize=9, ha="right", va="center")
        if kind == "together":
            draw.tile(axes, 0, top, 4, 0.9, "#555555")
        else:
            for rank in range(4):
                draw.tile(
                    axes, rank, top, 1, 0.9, RANK[rank] if kind == "each" or rank == 0 else ACTIVITY["idle"]
                )
        top, before = top + 1, kind
    axes.set(xlim=(-2.6, 6.6), ylim=(top, -0.9))
    return figure


def confusion_matrix(matrix, classes: list[str], n_ranks: int) -> Figure:
    """How often each class was taken for each class; a darker tile is more images.

    Args:
        matrix: counts, ``matrix[true][predicted]``, a tensor or a list of lists.
        classes: the names of the classes.
        n_ranks: number of ranks that counted, for the title.

    Returns:
        the figure; the most frequent mistake has a dark frame.

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
            draw.tile(axes, column, row, 1, 1, draw.pale(colour, (count / largest) ** 0.6), count or "")
    draw.tile(axes, taken, true, 1, 1, "none", edge="#222222", linewidth=1.8)
    axes.set(xlim=(0, size), ylim=(size, 0), xlabel="predicted class", ylabel="true class")
    places = [place + 0.5 for place in range(size)]
    axes.set_yticks(places, classes)
    axes.set_xticks(places, classes, rotation=40, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def sample_predictions(images, true, predicted, classes: list[str]) -> Figure:
    """A row of images, each with its true class above and the predicted class below, red and bold if that is wrong.

    Args:
        images: a tensor of shape (N, 1, height, width) or (N, height, width).
        true: the true class of each image, N numbers.
        predicted: the class that the model gives it, N numbers.
        classes: the names of the classes; one with a space or a slash is broken there.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl.course.figures import ch06 as figures

            images = torch.rand(3, 1, 28, 28)
            figure = figures.sample_predictions(images, [0, 1, 2], [0, 2, 2], ["T-shirt/top", "coat", "bag"])
    """
    true, predicted = [int(number) for number in true], [int(number) for number in predicted]
    n_right = sum(one == other for one, other in zip(true, predicted, strict=True))
    title = f"The model names {n_right} of these {len(true)} images right"
    figure, axes = draw.new_drawing(title, width=7.6, height=1.7)
    names = [name.replace(" ", "\n").replace("/", "/\n") for name in classes]
    for place, (image, label, guess) in enumerate(zip(images, true, predicted, strict=True)):
        extent = (place + 0.03, place + 0.97, 0.97, 0.03)
        axes.imshow(image.squeeze().numpy(), cmap="gray", extent=extent, interpolation="nearest")
        axes.text(place + 0.5, -0.05, names[label], ha="center", va="bottom", fontsize=9)
        look = {} if guess == label else {"color": ACTIVITY["backward_weight"], "fontweight": "bold"}
        axes.text(place + 0.5, 1.05, names[guess], ha="center", va="top", fontsize=9, **look)
    for height, head, side in ((-0.05, "true", "bottom"), (1.05, "predicted", "top")):
        axes.text(-0.1, height, head, ha="right", va=side, fontsize=9, style="italic")
    axes.set(xlim=(-1.0, len(true)), ylim=(1.55, -0.55))
    return figure


def resumed_losses(straight: list[float], resumed: dict[str, list[float]], step: int) -> Figure:
    """How far the loss of a resumed run is from that of a run that was never interrupted, over 32 steps.

    Args:
        straight: the losses of the whole run, the first for step 1.
        resumed: name of a resumed run to its losses, two runs at most; the first loss belongs to the step after
            ``step``.
        step: the step of the checkpoint.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch06 as figures

            resumed = {"with everything": [1.5, 1.0], "without the optimizer": [1.5, 1.25]}
            figure = figures.resumed_losses([3.0, 2.0, 1.5, 1.0], resumed, step=2)
    """
    title = "Resumed with everything, no step differs from the run without a break"
    figure, axes = draw.new_figure(title, height=2.7)
    looks = (("-", "#222222", 2.4), ("--", "#D55E00", 1.8))
    for (name, losses), (line, colour, width) in zip(resumed.items(), looks, strict=False):
        pairs = list(zip(losses, straight[step:], strict=False))[:32]
        apart = [loss - uninterrupted for loss, uninterrupted in pairs]
        steps = range(step + 1, step + 1 + len(apart))
        axes.plot(steps, apart, line, color=colour, linewidth=width, label=name)
    axes.set_xlabel(f"steps (the checkpoint was written after step {step})")
    axes.set_ylabel("loss, minus that of\nthe run without a break")
    figure.legend(loc="outside lower right", ncols=len(resumed), frameon=False, fontsize=9)
    return figure


def logged_scalars(losses: dict[str, tuple], rate: tuple) -> Figure:
    """What a TensorBoard log holds: losses on the left, the learning rate on the right.

    Args:
        losses: name of a loss to its ``(steps, values)``, two losses at most.
        rate: ``(steps, values)`` of the learning rate.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch06 as figures

            losses = {"one rank's": ([1, 2], [3, 1]), "all ranks'": ([1, 2], [2, 2])}
            figure = figures.logged_scalars(losses, ([1, 2], [0.1, 0.0]))
    """
    title = "Read back from the log: one rank's loss, all ranks' loss, and the learning rate"
    figure, (left, right) = draw.new_figure(title, height=2.9, columns=2)
    looks = (("#BBBBBB", 1.3), ("#222222", 2.0))
    for (name, (steps, values)), (colour, width) in zip(losses.items(), looks, strict=False):
        left.plot(steps, values, color=colour, linewidth=width, label=name)
    left.set(xlabel="steps", ylabel="loss")
    left.set_ylim(0)
    left.legend(loc="upper right", frameon=False)
    right.plot(*rate, color=ACTIVITY["optimizer"], linewidth=2)
    right.set(xlabel="steps", ylabel="learning rate")
    right.set_ylim(0)
    return figure
