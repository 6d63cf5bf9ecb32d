"""The figures of chapter 11: hard negatives, batch sizes, and the share of communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["batch_or_rate", "communication_share", "hardest_negatives", "over_batch_sizes"]


def hardest_negatives(anchors, found: dict[int, list]) -> Figure:
    """Images, and beside each the most similar image of another class that a batch holds: a column a batch size.

    Args:
        anchors: images, a tensor of shape (n, 1, height, width).
        found: batch size to n pairs (image of shape (1, height, width), cosine similarity).

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl.course.figures import ch11 as figures

            images = torch.rand(2, 1, 28, 28)
            figure = figures.hardest_negatives(images, {8: [(images[1], 0.4), (images[0], 0.4)]})
    """
    n = len(anchors)
    title = "The larger the batch, the closer its hardest negative"
    figure, axes = draw.new_drawing(title, width=6.4, height=4.2)
    axes.set_aspect("equal")
    columns = [("the image", [(image, None) for image in anchors])]
    columns += [(f"in a batch of {size}", pairs) for size, pairs in found.items()]
    for column, (name, pairs) in enumerate(columns):
        left = 1.9 * column + (0.5 if column else 0)
        axes.text(left + 0.5, -0.12, name, ha="center", va="bottom", size=9.5)
        for row, (image, similarity) in enumerate(pairs):
            top = 1.08 * row
            extent = (left, left + 1, top + 1, top)
            axes.imshow(-image[0].numpy(), cmap="gray", extent=extent, interpolation="nearest")
            if similarity is not None:
                axes.text(left + 1.06, top + 0.5, f"{similarity:.2f}", va="center", size=9.5)
    axes.set_xlim(-0.1, 1.9 * len(found) + 2)
    axes.set_ylim(1.08 * n, -0.5)
    return figure


def over_batch_sizes(curves: dict[str, dict[int, tuple[float, float]]], title: str, ylabel: str) -> Figure:
    """What becomes of a number as the batch grows: a labelled line a curve, with bars of two standard errors.

    Args:
        curves: name to batch size to (mean, standard error of the mean), four curves at most. Errors of 0 draw no
            bars.
        title: what the figure shows.
        ylabel: what the number is, with its unit.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch11 as figures

            curves = {"same rate": {24: (0.8, 0.01), 600: (0.7, 0.02)}}
            figure = figures.over_batch_sizes(curves, "It falls", "test accuracy")
    """
    figure, axes = draw.new_figure(title, width=7.2, height=3.3)
    sizes = sorted({size for points in curves.values() for size in points})
    colours = [ACTIVITY[name] for name in ("forward", "backward_weight", "optimizer", "communication")]

    def room(name, size):  # how far the nearest other curve is
        others = [points[size][0] for other, points in curves.items() if other != name and size in points]
        return min((abs(curves[name][size][0] - mean) for mean in others), default=1.0)

    for (name, points), colour in zip(curves.items(), colours, strict=False):
        draw.error_line(axes, list(points), points, colour, linewidth=1.6)
        where = max(list(points)[1:], key=lambda size, name=name: room(name, size))
        highest = points[where][0] >= max(other[where][0] for other in curves.values() if where in other)
        if where == sizes[-1]:
            offset, ha, va = (9, 0), "left", "center"
        elif highest:
            offset, ha, va = (0, 8), "center", "bottom"
        else:
            offset, ha, va = (-9, -2), "right", "top"
        draw.note(
            axes, name, (where, points[where][0]), offset, colour, weight="normal", size=9.5, ha=ha, va=va
        )
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] * 0.8, sizes[-1] * (sizes[-1] / sizes[0]) ** 0.45)
    axes.set_ylim(0, 1)
    axes.set_xlabel("batch size")
    axes.set_ylabel(ylabel)
    return figure


def batch_or_rate(noise: dict[str, list[float]], curves: dict[str, tuple[list, list]]) -> Figure:
    """Left the noise scale in each epoch, right the accuracy after it, with a band of two standard errors.

    Args:
        noise: name of a run, of three at most, to its noise scale in each epoch, in units of the learning rate.
        curves: name of a run to the means and the standard errors of its accuracy after each epoch, from epoch 1.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch11 as figures

            figure = figures.batch_or_rate({"decay": [2.0, 1.0]}, {"decay": ([0.6, 0.7], [0.01, 0.01])})
    """
    from matplotlib.ticker import MaxNLocator

    title = "A larger batch does what a smaller rate does"
    figure, (left, right) = draw.new_figure(title, width=7.6, height=3.3, columns=2, width_ratios=[1, 1.5])
    looks = [("communication", "-", 4.5), ("forward", "--", 1.8), ("backward_weight", "-", 1.8)]
    for (name, values), (activity, line, width) in zip(noise.items(), looks, strict=False):
        epochs = range(1, len(values) + 1)
        look = {"color": ACTIVITY[activity], "linestyle": line, "linewidth": width}
        left.plot(epochs, values, drawstyle="steps-mid", **look)
        means, errors = curves[name]
        right.plot(epochs, means, label=name, **look)
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-2, 2))
        right.fill_between(epochs, low, high, color=ACTIVITY[activity], alpha=0.15, linewidth=0)
    left.set_ylim(0)
    left.set_ylabel("noise scale g (a learning rate)")
    right.set_ylabel("test accuracy ± 2 standard errors")
    right.legend(loc="lower right", frameon=False)
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def communication_share(steps: list, title: str) -> Figure:
    """A bar for each size of the world: seconds of compute, then of communication, with its share.

    Args:
        steps: what ``cost.data_parallel_step`` returns, one for each size.
        title: what the figure shows.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch11 as figures
            from ignite_ddl.lab import cost

            steps = [cost.data_parallel_step(n, **cost.RESNET50_P100) for n in (256, 1024)]
            figure = figures.communication_share(steps, "More ranks, more messages")
    """
    figure, axes = draw.new_figure(title, width=7.0, height=0.42 * len(steps) + 1.2)
    for row, step in enumerate(steps):
        compute, communication = (
            1e3 * (step.seconds - step.communication_seconds),
            1e3 * step.communication_seconds,
        )
        parts = [(compute, ACTIVITY["compute"], ""), (communication, ACTIVITY["communication"], "")]
        end = draw.bar(axes, row, parts, 0.7, upright=False)
        axes.text(end + 3, row, f"{step.share:.0%}", va="center", size=9.5)
        for x, kind in (
            ((compute / 2, "compute"), (end - communication / 2, "communication")) if row == 0 else ()
        ):
            axes.text(x, -0.5, kind, ha="center", va="bottom", size=9.5, color=draw.ink(ACTIVITY[kind]))
    draw.name_rows(axes, [f"{step.n_ranks} GPUs, batch {step.batch_size:,}" for step in steps], bare=True)
    axes.set_ylim(len(steps) - 0.4, -1.1)
    axes.set_xlim(0, 1.15e3 * max(step.seconds for step in steps))
    axes.set_xlabel("milliseconds of a step (model)")
    return figure
