"""The figures of chapter 15: where a model is cut, and what each cut sends."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, INK, RANK

__all__ = ["bytes_over_rows", "cuts_of_a_model"]

TITLE = {"passes": "Between layers one rank works, inside all do (measured, stated delays)"}
ALT = {
    "cuts": "A model of four layers, three times. Data parallel: each layer is whole on all ranks. Cut between "
    "layers: layer 0 is on rank 0, layer 1 on rank 1, and so on. Cut inside layers: each layer has a quarter on each "
    "rank.",
    "passes": "Measured passes of four ranks. Cut between layers: a staircase down and up, one rank at a time works. "
    "Cut inside layers: all four ranks work together, with communication after each layer, in a fraction of the time.",
    "bytes": "Kilobytes that a rank sends in a step against the rows of the batch. Data parallel is flat at 197 kB. "
    "The two cuts of the model grow with the rows; inside layers crosses data parallel near 51 rows.",
}  # alternative texts of the chapter's figures


def cuts_of_a_model(n_layers: int, n_ranks: int) -> draw.Figure:
    """A model three times: whole on every rank, cut between its layers, and cut inside them. A colour is a rank.

    Args:
        n_layers: number of layers, a multiple of ``n_ranks``.
        n_ranks: number of ranks.

    Returns:
        the figure; under each drawing stands how much of the model a rank holds.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch15 as figures

            figure = figures.cuts_of_a_model(n_layers=4, n_ranks=4)
    """
    figure, axes = draw.new_drawing("Three ways to put a model on ranks", width=7.4, height=2.9)
    names = ("data parallel:\nwhole on every rank", "cut between layers", "cut inside layers")
    for place, name in enumerate(names):
        left = 11 * place
        axes.text(left + 4, -0.25, name, ha="center", va="bottom", size=10, weight="bold")
        for layer in range(n_layers):
            owner = layer * n_ranks // n_layers
            pieces = (
                [("none", "all ranks")],
                [(RANK[owner], f"rank {owner}")],
                [(RANK[rank], rank) for rank in range(n_ranks)],
            )[place]
            wide = 8 / len(pieces)
            for piece, (colour, text) in enumerate(pieces):
                look = {"edge": INK, "color": INK} if colour == "none" else {"edge": "none"}
                draw.tile(axes, left + piece * wide, layer, wide - 0.1, 0.82, colour, text, **look)
        share = 1 if place == 0 else 1 / n_ranks
        axes.text(left + 4, n_layers + 0.1, f"a rank holds {share:.0%}", ha="center", va="top", size=10)
    for layer in range(n_layers):
        axes.text(-0.4, layer + 0.41, f"layer {layer}", ha="right", va="center", size=9)
    axes.set_xlim(-3.2, 30.2)
    axes.set_ylim(n_layers + 0.8, -1.5)
    return draw.on_any_page(figure)


def bytes_over_rows(
    predicted: dict[str, dict[int, float]],
    counted: dict[str, dict[int, int]],
    title: str = "Data parallelism sends weights, model parallelism sends rows",
) -> draw.Figure:
    """Bytes that a rank sends in a step against the rows of the batch: lines predicted, marks counted.

    Args:
        predicted: name of a cut, of three at most, to rows to bytes.
        counted: name of a cut to rows to bytes.
        title: the finding. Default: the chapter's.

    Returns:
        the figure, in kB; both axes are logarithmic.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch15 as figures

            predicted, counted = {"data parallel": {1: 8000, 64: 8000}}, {"data parallel": {8: 8000}}
            figure = figures.bytes_over_rows(predicted, counted, "It is flat")
    """
    figure, axes = draw.new_figure(title, width=7.4, height=2.9)
    colours = [ACTIVITY[kind] for kind in ("compute", "backward_weight", "optimizer")]
    draw.lines_and_marks(axes, predicted, counted, colours, scale=1e-3, offset=(8, 0))
    axes.set_yscale("log")
    draw.log_axis(axes, sorted({n for line in counted.values() for n in line}), base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("rows of the batch")
    axes.set_ylabel("kB a rank sends in a step")
    text = "lines: predicted\nmarks: counted"
    axes.text(0.98, 0.04, text, transform=axes.transAxes, fontsize=9, ha="right")
    return draw.on_any_page(figure)
