"""The figures of chapter 04: a batch dealt to ranks, and errors against one process."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, INK, RANK, on_any_page

__all__ = ["dealt_batch", "parity_errors"]

ALT = {
    "dealt_batch": "A batch of 32 images of clothes is dealt to four ranks, 8 each. Every rank does forward, backward "
    "and update on its own; between backward and update one all-reduce averages the four gradients.",
    "parity_errors": "Errors against one process on a logarithmic axis. Averaged by DDP or by hand, loss, gradients "
    "and weights lie far left of the bound 1e-12; with each of the three mistakes all three lie far right of it.",
}  # alternative texts of the chapter's figures


def dealt_batch(images, world_size: int = 4) -> draw.Figure:
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
    figure, axes = draw.new_drawing(f"{world_size} ranks, one training: only the gradients meet", width=7.6, height=3.5)
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
    boxes = ((0, 3.5, "forward", "forward"), (3.7, 3.5, "backward", "backward"), (11.2, 3.0, "optimizer", "update"))
    for rank in range(world_size):
        middle = height - (rank + 0.5) * row_height
        style = {"size": 10, "weight": "bold", "ha": "right", "va": "center", "color": INK}
        axes.text(rows_x - 0.3, middle, f"rank {rank}", **style)
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
    return on_any_page(figure)


def parity_errors(errors: dict[str, dict[str, float]]) -> draw.Figure:
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
    figure, axes = draw.new_figure(title, height=0.46 * len(errors) + 1.3)
    marks = {
        "loss": ("o", ACTIVITY["compute"]),
        "gradients": ("D", ACTIVITY["communication"]),
        "weights": ("s", ACTIVITY["optimizer"]),
    }
    for row, found in enumerate(errors.values()):
        axes.axhline(row, color=GREY, linewidth=0.6, alpha=0.5, zorder=0)
        for place, (quantity, (marker, colour)) in enumerate(marks.items()):
            # An error of exactly 0 has no place on this axis: it stands at the left end.
            at = max(found[quantity], 1e-18), row + 0.2 * (place - 1)
            label = quantity if row == 0 else None
            axes.plot(*at, marker, color=colour, markersize=8, linestyle="none", label=label)
    axes.set_xscale("log")
    axes.set_xlim(5e-19, 100)
    axes.set_xticks([1e-18, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1])
    axes.axvline(1e-12, color=ACTIVITY["backward_weight"], linestyle="--", linewidth=1.3)
    draw.note(axes, "the bound, 1e-12", (2e-12, len(errors) - 0.5), (0, 0), ACTIVITY["backward_weight"], size=9)
    draw.name_rows(axes, list(errors))
    axes.set_ylim(len(errors) - 0.2, -0.5)
    axes.set_xlabel("largest error against one process (float64)")
    draw.key(figure, axes.get_legend_handles_labels()[0])
    return on_any_page(figure)
