"""The figures of chapter 04: a batch dealt to ranks, curves of runs, and errors against one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, RANK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["dealt_batch", "learning_curves", "parity_errors"]


def dealt_batch(images, world_size: int = 4) -> Figure:
    """One global batch on the left, each rank's share of it with its training step on the right.

    Image ``i`` goes to rank ``i % world_size``, as ``DistributedSampler`` deals.

    Args:
        images: the global batch, a tensor of shape (N, 1, height, width) or (N, height, width); N is a multiple
            of ``world_size``.
        world_size: number of ranks, default 4.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl.course.figures import ch04 as figures

            figure = figures.dealt_batch(torch.rand(64, 1, 28, 28), world_size=4)
    """
    pixels = [image.squeeze().numpy() for image in images]
    side = next(n for n in range(1, len(pixels) + 1) if n * n >= len(pixels))  # of the mosaic
    share = len(pixels) // world_size
    columns = -(-share // 2)  # a rank's images stand in two rows
    figure, axes = draw.new_drawing(
        f"{world_size} ranks, one training: only the gradients meet", width=7.6, height=3.5
    )
    axes.set_aspect("equal")

    def picture(index: int, x: float, y: float, size: float) -> None:
        draw.tile(axes, x, y, 0.96 * size, 0.96 * size, RANK[index % world_size], edge="none")
        near, far = 0.13 * size, 0.83 * size
        extent = (x + near, x + far, y + near, y + far)
        axes.imshow(pixels[index], cmap="gray", extent=extent, zorder=2, interpolation="nearest")

    row_height, height = 2.5, 2.5 * world_size
    size = min(1.05, (height - 0.4) / side)
    for index in range(len(pixels)):
        picture(index, index % side * size, height - 0.2 - (index // side + 1) * size, size)
    rows_x, width = side * size + 2.9, columns * 1.05
    boxes_x = rows_x + width + 0.7
    boxes = (
        (0, 3.5, "forward", "forward"),
        (3.7, 3.5, "backward", "backward"),
        (11.2, 3.0, "optimizer", "update"),
    )
    for rank in range(world_size):
        middle = height - (rank + 0.5) * row_height
        draw.label_rank(axes, rows_x - 0.3, middle, rank, fontsize=10)
        for place, index in enumerate(range(rank, len(pixels), world_size)):
            picture(index, rows_x + place % columns * 1.05, middle - place // columns * 1.05, 1.05)
        for x, wide, kind, text in boxes:
            draw.tile(axes, boxes_x + x, middle - 0.85, wide, 1.7, ACTIVITY[kind], text, edge="none")
    meet = f"all-reduce:\naverage\nthe {world_size}\ngradients"
    draw.tile(axes, boxes_x + 7.4, 0.4, 3.6, height - 0.8, ACTIVITY["communication"], meet, edge="none")
    style = {"va": "bottom", "size": 9.5}
    axes.text(0, height + 0.25, f"a global batch: {len(pixels)} images", **style)
    axes.text(rows_x, height + 0.25, f"{share} images each", **style)
    axes.text(boxes_x, height + 0.25, "the same weights before", **style)
    axes.text(boxes_x + 14.2, height + 0.25, "and after", ha="right", **style)
    axes.set_xlim(-0.2, boxes_x + 14.4)
    axes.set_ylim(0, height + 1.2)
    return figure


def learning_curves(runs: dict[int, list], error: float) -> Figure:
    """Test accuracy over the steps: a line for each run, a look for each number of ranks.

    Args:
        runs: number of ranks to a list of histories, one a seed; a history is a list of dicts with "step" and
            "accuracy" (0 to 1).
        error: standard error of one measured accuracy, shown as a bar of two of them each way.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch04 as figures

            history = [{"step": 47, "accuracy": 0.7}, {"step": 94, "accuracy": 0.8}]
            figure = figures.learning_curves({1: [history] * 3, 4: [history]}, error=0.012)
    """
    figure, axes = draw.new_figure("One process or four ranks: the curves lie within each other's noise")
    looks = (("#222222", "-", "o"), ("#D55E00", "--", "s"))
    for (n_ranks, histories), (colour, line, marker) in zip(runs.items(), looks, strict=False):
        who = "1 process" if n_ranks == 1 else f"{n_ranks} ranks"
        for number, history in enumerate(histories):
            axes.plot(
                [point["step"] for point in history], [point["accuracy"] for point in history],
                color=colour, linestyle=line, marker=marker, markersize=5, linewidth=1.4,
                label=None if number else f"{who}, {len(histories)} seed" + "s" * (len(histories) > 1),
            )  # fmt: skip
    steps = sorted(
        {point["step"] for histories in runs.values() for history in histories for point in history}
    )
    x, low = steps[0] + 0.5 * (steps[-1] - steps[0]), 0.5
    axes.errorbar([x], [low + 0.06], yerr=[2 * error], color="#555555", capsize=4, linewidth=1.4)
    text = "± 2 standard errors of\none measured accuracy"
    draw.note(axes, text, (x, low + 0.06), (10, 0), size=9, color="#444444")
    axes.set_xticks(steps)
    axes.set_xlabel("steps")
    axes.set_ylabel("test accuracy")
    axes.set_ylim(low, 0.9)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(loc="upper left", frameon=False)
    return figure


def parity_errors(errors: dict[str, dict[str, float]]) -> Figure:
    """Largest errors against one process on a logarithmic axis, one row a variant, with the bound 1e-12.

    Args:
        errors: name of a variant to a dict of quantity ("loss", "gradients", "weights") to error.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch04 as figures

            right = {"loss": 0.0, "gradients": 7e-17, "weights": 3e-17}
            wrong = {"loss": 6.9, "gradients": 0.5, "weights": 0.06}
            figure = figures.parity_errors({"averaged by DDP": right, "summed": wrong})
    """
    title = "Equal, or plainly not: nothing lies near the bound"
    figure, axes = draw.new_figure(title, height=0.55 * len(errors) + 1.3)
    marks = {
        "loss": ("o", "#222222"),
        "gradients": ("D", ACTIVITY["communication"]),
        "weights": ("s", ACTIVITY["optimizer"]),
    }
    for row, found in enumerate(errors.values()):
        axes.axhline(row, color="#E4E4E4", linewidth=1, zorder=0)
        for place, (quantity, (marker, colour)) in enumerate(marks.items()):
            # An error of exactly 0 has no place on this axis: it stands at the left end.
            axes.plot(
                max(found[quantity], 1e-18), row + 0.2 * (place - 1), marker, color=colour, markersize=8,
                markeredgecolor="white", linestyle="none", label=quantity if row == 0 else None,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(5e-19, 100)
    axes.set_xticks([1e-18, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1])
    axes.axvline(1e-12, color="#D55E00", linestyle="--", linewidth=1.3)
    axes.text(2e-12, len(errors) - 0.45, "the bound, 1e-12", color="#B34A00", size=9, va="center")
    axes.set_yticks(range(len(errors)), list(errors))
    axes.set_ylim(len(errors) - 0.2, -0.5)
    axes.set_xlabel("largest error against one process (float64)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.6, 1.0), frameon=False, handletextpad=0.2)
    return figure
