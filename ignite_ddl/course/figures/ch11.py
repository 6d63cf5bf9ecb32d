"""The figures of chapter 11: steps of an epoch, batch sizes, and the share of communication."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, INK, on_any_page

__all__ = ["batch_or_rate", "communication_share", "over_batch_sizes", "steps_of_an_epoch", "steps_to_target"]

ALT = {
    "steps_of_an_epoch": "Three bars of 6000 images, one a batch size. Batches of 120 cut it into 50 steps, of "
    "600 into 10, of 3000 into 2.",
    "over_batch_sizes": "Test accuracy after 12 epochs against batch size, three curves. At the same rate it "
    "falls. Scaled, it holds at 120 and collapses at 600. Scaled and warmed up it comes nearest at 600.",
    "steps_to_target": "Steps to 76 % against batch size, both logarithmic, beside a line of perfect scaling. SGD's "
    "point at 120 lies a little above that line, those at 600 and 3000 far above it. A curve through two of SGD's "
    "points passes by the others. Adam's points, at 24, 600 and 3000, lie below SGD's.",
    "batch_or_rate": "Left: the noise scale falls to a fifth after epoch 7 for the decayed rate and the grown "
    "batch alike. Right: their accuracies rise together and stay together; the run that changes neither stays "
    "below.",
    "communication_share": "Five bars, the milliseconds of a step on 8 to 1024 GPUs: compute is the same in each,"
    " communication grows slowly up to 256 and faster beyond.",
}  # alternative texts of the chapter's figures


def steps_of_an_epoch(n_images: int, batch_sizes: tuple[int, ...]) -> draw.Figure:
    """One pass through the data, cut into steps: a row a batch size, a tile a step.

    Args:
        n_images: of the training set.
        batch_sizes: smallest first.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch11 as figures

            figure = figures.steps_of_an_epoch(6000, (120, 600, 3000))
    """
    title = "The same images, fewer steps"
    figure, axes = draw.new_drawing(title, width=7.4, height=0.5 * len(batch_sizes) + 0.6)
    for row, size in enumerate(batch_sizes):
        steps = -(-n_images // size)
        for step in range(steps):
            look = {"linewidth": 1.0, "edge": INK}
            draw.tile(axes, step / steps, row - 0.3, 1 / steps, 0.6, ACTIVITY["forward"], **look)
        draw.note(axes, f"batch {size:,}", (0, row), (-8, 0), INK, ha="right", size=10)
        draw.note(axes, f"{steps} steps", (1, row), (8, 0), INK, size=10)
    axes.set_xlim(-0.17, 1.15)
    axes.set_ylim(len(batch_sizes) - 0.5, -0.5)
    return on_any_page(figure)


def over_batch_sizes(
    curves: dict[str, dict[int, tuple[float, float]]], title: str, ylabel: str, lowest: float = 0.0
) -> draw.Figure:
    """What becomes of a number as the batch grows: a labelled line a curve, with bars of two standard errors.

    Args:
        curves: name to batch size to (mean, standard error of the mean), four curves at most. Errors of 0 draw no
            bars.
        title: what the figure shows.
        ylabel: what the number is, with its unit.
        lowest: where the vertical axis starts. Default: 0.

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
        means, errors = [mean for mean, _ in points.values()], [2 * error for _, error in points.values()]
        look = {"color": colour, "marker": "o", "markersize": 5, "linewidth": 1.6, "capsize": 3}
        axes.errorbar(list(points), means, yerr=errors if any(errors) else None, **look)
        where = max(list(points)[1:], key=lambda size, name=name: room(name, size))
        highest = points[where][0] >= max(other[where][0] for other in curves.values() if where in other)
        if where == sizes[-1]:
            offset, ha, va = (9, 0), "left", "center"
        elif highest:
            offset, ha, va = (0, 8), "center", "bottom"
        else:
            offset, ha, va = (-9, -2), "right", "top"
        draw.note(axes, name, (where, points[where][0]), offset, colour, weight="normal", size=9.5, ha=ha, va=va)
    draw.log_axis(axes, sizes)
    axes.set_xlim(sizes[0] * 0.8, sizes[-1] * (sizes[-1] / sizes[0]) ** 0.45)
    axes.set_ylim(lowest, 1)
    axes.set_xlabel("batch size")
    axes.set_ylabel(ylabel)
    return on_any_page(figure)


def batch_or_rate(noise: dict[str, list[float]], curves: dict[str, tuple[list, list]]) -> draw.Figure:
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

    title = "From epoch 10 on a larger batch does what a smaller rate does"
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
    return on_any_page(figure)


def communication_share(steps: list, title: str) -> draw.Figure:
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
        compute, communication = (1e3 * (step.seconds - step.communication_seconds), 1e3 * step.communication_seconds)
        parts = [(compute, ACTIVITY["compute"], ""), (communication, ACTIVITY["communication"], "")]
        end = draw.bar(axes, row, parts, 0.7, upright=False)
        axes.text(end + 3, row, f"{step.share:.0%}", va="center", size=9.5)
        for x, kind in ((compute / 2, "compute"), (end - communication / 2, "communication")) if row == 0 else ():
            axes.text(x, -0.5, kind, ha="center", va="bottom", size=9.5, color=draw.ink(ACTIVITY[kind]))
    draw.name_rows(axes, [f"{step.n_ranks} GPUs, batch {step.batch_size:,}" for step in steps], bare=True)
    axes.set_ylim(len(steps) - 0.4, -1.1)
    axes.set_xlim(0, 1.15e3 * max(step.seconds for step in steps))
    axes.set_xlabel("milliseconds of a step (model)")
    return on_any_page(figure)


def steps_to_target(
    needed: dict[str, dict[int, float]], predicted: dict[int, float], title: str, target: float
) -> draw.Figure:
    """Steps to an accuracy against batch size, both logarithmic, beside perfect scaling and a formula's curve.

    Args:
        needed: name of an optimizer, of two at most, to batch size to steps.
        predicted: batch size to steps by the formula, for a smooth curve; perfect scaling begins at its first point.
        title: the finding.
        target: the accuracy.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch11 as figures

            figure = figures.steps_to_target({"SGD": {24: 400, 600: 50}}, {24: 400, 600: 50}, "It bends", 0.76)
    """
    figure, axes = draw.new_figure(title, width=7.2, height=3.4)
    sizes = sorted(predicted)
    perfect = [predicted[sizes[0]] * sizes[0] / size for size in sizes]
    axes.plot(sizes, perfect, color=GREY, linewidth=1.4, linestyle=":")
    axes.plot(sizes, [predicted[size] for size in sizes], color=INK, linewidth=1.2)
    looks = (("o", ACTIVITY["forward"], 9, (0, 11)), ("D", ACTIVITY["backward_weight"], 6, (0, -12)))
    for (name, points), (marker, colour, size, offset) in zip(needed.items(), looks, strict=False):
        axes.plot(list(points), list(points.values()), marker, color=colour, markersize=size)
        last = max(points)
        draw.note(axes, f"{name}: {points[last]:.0f}", (last, points[last]), offset, colour, ha="center", size=9.5)
    draw.note(
        axes, "perfect scaling", (sizes[0] * 3.2, perfect[0] / 3.2), (-8, -4), GREY, ha="right", va="top", size=9.5
    )
    middle = sizes[len(sizes) // 3]
    draw.note(axes, "formula", (middle, predicted[middle]), (6, 5), INK, ha="left", size=9.5)
    draw.log_axis(axes, sorted({size for points in needed.values() for size in points}))
    axes.set_yscale("log")
    ticks = [10, 20, 50, 100, 200, 500, 1000]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0.7 * min(min(points.values()) for points in needed.values()), 1.3 * max(perfect))
    axes.set_xlim(sizes[0] * 0.8, sizes[-1] * 1.6)
    axes.set_xlabel("batch size")
    axes.set_ylabel(f"steps to {100 * target:.0f} %")
    return on_any_page(figure)
