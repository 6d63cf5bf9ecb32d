"""The figures of chapter 16: a product cut for ranks, copies that part, and what each rank holds."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, RANK, on_any_page

__all__ = ["cut_products", "held_blocks", "place", "reported_and_saved"]

ALT = {
    "products": "Two products X times W is Y, cut for four ranks. By columns: X whole on every rank, W and Y in four "
    "upright blocks, one a rank. By rows: X in four upright blocks, W in four flat ones, Y as four sheets to add.",
    "losses": "Loss over 100 steps: with and without the sum it falls alike. The saved model has the same loss with "
    "the sum, and a far higher one without it.",
    "blocks": "Two weights and two biases in blocks, by rank. linear1.weight, 16 by 8, and its bias are cut across, "
    "four rows a rank. linear2.weight, 8 by 16, is cut upright, four columns a rank. linear2.bias is whole everywhere.",
}  # alternative texts of the chapter's figures


def cut_products(rows: int, inputs: int, outputs: int, n_ranks: int) -> draw.Figure:
    """X times W is Y, cut for ranks: above by columns of W, below by its rows. Drawn to scale.

    Args:
        rows: of X and Y.
        inputs: columns of X, rows of W; a multiple of ``n_ranks``.
        outputs: columns of W and Y; a multiple of ``n_ranks``.
        n_ranks: how many, at most 8.

    Returns:
        the figure; a block has its rank's colour and number, grey is whole on every rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch16 as figures

            figure = figures.cut_products(rows=6, inputs=8, outputs=32, n_ranks=4)
    """
    title = "By columns, Y comes in blocks; by rows, it comes in terms that have to be added"
    figure, axes = draw.new_drawing(title, width=7.4, height=2.7)
    axes.set_aspect("equal")
    starts = (0, inputs + 4, inputs + outputs + 8)  # left edges of X, W and Y
    for top, by in ((0, "columns"), (inputs + 6, "rows")):
        middle = top + inputs / 2
        x_and_y = middle - rows / 2, rows
        shapes = {"X": (*x_and_y, inputs), "W": (top, inputs, outputs), "Y": (*x_and_y, outputs)}
        axes.text(-1, middle, f"by {by}", size=10, weight="bold", ha="right", va="center")
        for left, sign in ((starts[1], "×"), (starts[2], "=")):
            axes.text(left - 2, middle, sign, size=13, ha="center", va="center")
        for left, (name, (y, height, width)) in zip(starts, shapes.items(), strict=True):
            label = f"{name}  {height} × {width}"
            axes.text(left + width / 2, top + inputs + 1.7, label, size=9, ha="center")
            if name == "X" and by == "columns":
                draw.tile(axes, left, y, width, height, ACTIVITY["idle"], "whole", edge="none")
                continue
            wide, tall = width / n_ranks, height / n_ranks
            for rank in reversed(range(n_ranks)):
                if name == "Y" and by == "rows":  # sheets, one before the other
                    text = " + ".join(map(str, range(n_ranks))) if rank == 0 else ""
                    away = 0.8 * rank
                    draw.tile(axes, left + away, y + 1 - away, width, height, RANK[rank], text)
                elif name == "W" and by == "rows":
                    draw.tile(axes, left, y + rank * tall, width, tall - 0.15, RANK[rank], rank, edge="none")
                else:
                    draw.tile(axes, left + rank * wide, y, wide - 0.15, height, RANK[rank], rank, edge="none")
    axes.set_xlim(-13, starts[2] + outputs + 3)
    axes.set_ylim(2 * inputs + 8.2, -0.5)
    return on_any_page(figure)


def place(part, whole) -> list[tuple[int, int]]:
    """Where a part of a tensor lies in the whole, by its numbers.

    Args:
        part: a tensor of some of the numbers of ``whole``, no two of which are equal.
        whole: a tensor.

    Returns:
        (start, stop) along each dim.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl.course.figures import ch16 as figures

            whole = torch.arange(12).view(4, 3)
            assert figures.place(whole[2:], whole) == [(2, 4), (0, 3)]
    """
    import torch  # here: most figures do without

    return [(int(found.min()), int(found.max()) + 1) for found in torch.isin(whole, part).nonzero().T]


def held_blocks(
    tensors: dict[str, tuple[tuple, list]],
    title: str = "A rank's columns of W are rows of .weight; one bias is whole on every rank",
) -> draw.Figure:
    """Weights and biases as they are stored, each block in the colour and with the number of the rank that holds it.

    Args:
        tensors: name of a tensor of one or two dims to its shape and, for each rank, the (start, stop) of what it
            holds along each dim.
        title: the finding. Default: the chapter's.

    Returns:
        the figure; grey is whole on every rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch16 as figures

            by_rank = [[(0, 4), (0, 3)], [(4, 8), (0, 3)]]
            tensors = {"weight": ((8, 3), by_rank), "bias": ((8,), [[(0, 8)]] * 2)}
            figure = figures.held_blocks(tensors, "The bias is whole")
    """
    figure, axes = draw.new_drawing(title, width=7.4, height=2.6)
    axes.set_aspect("equal")
    left, tallest = 0.0, max(shape[0] for shape, _ in tensors.values())
    for name, (shape, blocks) in tensors.items():
        wide = shape[1] if len(shape) == 2 else 2
        everywhere = all(block == blocks[0] for block in blocks)
        for rank, (rows, *columns) in enumerate(blocks[:1] if everywhere else blocks):
            start, stop = columns[0] if columns else (0, wide)
            colour, text = (ACTIVITY["idle"], "all") if everywhere else (RANK[rank], rank)
            size = stop - start - 0.15, rows[1] - rows[0] - 0.15
            draw.tile(axes, left + start, rows[0], *size, colour, text, edge="none")
        label = f"{name}\n{' × '.join(map(str, shape))}"
        axes.text(left + wide / 2, -0.6, label, size=9, ha="center", va="bottom")
        left += wide + 8
    axes.set_xlim(-4, left - 4)
    axes.set_ylim(tallest + 0.2, -4.2)
    return on_any_page(figure)


def reported_and_saved(
    losses: dict[str, list[float]],
    saved: dict[str, float],
    title: str = "Without the sum the loss falls as well, but the saved model is worse",
) -> draw.Figure:
    """Losses that ranks reported in training, and beside the last the loss of the model that rank 0 would save.

    Args:
        losses: name of a run, of two, to its loss in each step.
        saved: name of a run to the loss of the saved model.
        title: the finding. Default: the chapter's.

    Returns:
        the figure: a line a run, with a diamond of its colour for what is saved.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch16 as figures

            losses = {"with the sum": [2.0, 1.0, 0.7], "without": [2.0, 1.1, 0.8]}
            figure = figures.reported_and_saved(losses, {"with the sum": 0.7, "without": 1.4}, "It falls")
    """
    figure, axes = draw.new_figure(title, width=7.4, height=2.8)
    colours = ACTIVITY["forward"], ACTIVITY["backward_weight"]
    last = max(map(len, losses.values()))
    for (name, values), colour, style in zip(losses.items(), colours, ("-", "--"), strict=True):
        axes.plot(values, color=colour, linewidth=2, linestyle=style, label=f"{name}: reported in training")
        look = {"color": colour, "markersize": 8, "linestyle": "none"}
        axes.plot(1.04 * last, saved[name], "D", label=f"{name}: the saved model", **look)
        axes.text(1.07 * last, saved[name], f"{saved[name]:.2f}", size=10, color=colour, va="center")
    axes.set_xlim(0, 1.13 * last)
    axes.set_ylim(0)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(ncols=2, loc="upper right", frameon=False, fontsize=9)
    return on_any_page(figure)
