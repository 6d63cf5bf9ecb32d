"""The figures of chapter 27: one sequence on four ranks, a ring of keys, pairs of a causal mask, plausible losses."""

from __future__ import annotations

from collections.abc import Sequence

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import INK, RANK, on_any_page

__all__ = ["causal_pairs", "losses", "ring_steps", "rows_and_tokens"]

HIDDEN = "#8C8C8C30"  # a pair that the mask hides


def rows_and_tokens(n_ranks: int = 4, n_tokens: int = 16) -> draw.Figure:
    """A batch of rows shared by dp, beside one long row shared by cp.

    Args:
        n_ranks: how many, at most 8.
        n_tokens: tokens of a row on the left; the row on the right has ``n_ranks`` times as many.

    Returns:
        the figure; a colour and a number are a rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch27 as figures

            figure = figures.rows_and_tokens()
    """
    figure, axes = draw.new_drawing("A batch of one row keeps more ranks busy only if they share its tokens", 7.4, 2.3)
    axes.text(0, -0.5, "data parallel: a rank has some rows", size=9, weight="bold")
    for rank in range(n_ranks):
        draw.tile(axes, 0, rank, n_tokens, 0.86, RANK[rank], f"row {rank}: rank {rank}", edge="none")
    top = n_ranks + 1.3
    axes.text(0, top - 0.5, "context parallel: a rank has some tokens of each row", size=9, weight="bold")
    for rank in range(n_ranks):
        text = f"rank {rank}"
        draw.tile(axes, rank * n_tokens, top, n_tokens - 0.3, 0.86, RANK[rank], text, edge="none")
    query = 2.5 * n_tokens
    for rank in range(n_ranks):
        key = (rank + 0.5) * n_tokens
        if rank != 2:
            bend = f"arc3,rad={0.2 if rank < 2 else -0.2}"
            draw.arrow(axes, (key, top + 0.9), (query, top + 0.95), INK, connectionstyle=bend)
    draw.note(axes, "its queries read all keys and values", (query, top + 2.4), (9, 0))
    axes.set_xlim(-1, n_ranks * n_tokens + 1)
    axes.set_ylim(top + 3.0, -1.1)
    return on_any_page(figure)


def ring_steps(n_ranks: int = 4) -> draw.Figure:
    """Whose keys and values each rank has in each step of a ring.

    Args:
        n_ranks: how many, at most 8.

    Returns:
        the figure: a row a rank, a column a step; a tile has the colour and the number of the rank whose keys it is.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch27 as figures

            figure = figures.ring_steps()
    """
    figure, axes = draw.new_drawing("Queries stay; keys and values go round once", width=7.0, height=2.5)
    for rank in range(n_ranks):
        draw.label_rank(axes, -0.1, rank + 0.4, rank)
        draw.tile(axes, 0, rank, 0.8, 0.8, RANK[rank], f"q {rank}", edge="none")
        for step in range(n_ranks):
            source = (rank - step) % n_ranks
            draw.tile(axes, 1.2 + 1.25 * step, rank, 1.0, 0.8, RANK[source], f"k, v {source}", edge="none")
            if step:
                above = (rank - 1) % n_ranks
                start = 1.2 + 1.25 * (step - 1) + 1.02
                if above < rank:
                    draw.arrow(axes, (start, above + 0.5), (start + 0.2, rank + 0.3), INK)
    for step in range(n_ranks):
        axes.text(1.7 + 1.25 * step, -0.15, f"step {step}", size=9, ha="center")
    axes.text(0.4, -0.15, "stays", size=9, ha="center")
    axes.text(
        1.2 + 1.25 * n_ranks, n_ranks / 2 - 0.1, "(the last rank\nsends to rank 0)", size=9, color=INK, va="center"
    )
    axes.set_xlim(-0.8, 1.25 * n_ranks + 2.4)
    axes.set_ylim(n_ranks, -0.5)
    return on_any_page(figure)


def causal_pairs(cuts: dict[str, Sequence[Sequence[int]]]) -> draw.Figure:
    """The pairs of tokens that a causal mask leaves, in the colour of the rank that computes them.

    Args:
        cuts: name of a cut to the tokens of each rank, at most 8 ranks; the last cut is even.

    Returns:
        the figure: a square a cut, a row a query, a column a key; beside it the pairs of each rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch27 as figures

            figure = figures.causal_pairs({"in a row": [[0, 1], [2, 3]], "zigzag": [[0, 3], [1, 2]]})
    """
    even = sum(int(token) + 1 for token in list(cuts.values())[-1][0])
    title = f"Folded, the triangle gives each rank {even} pairs"
    figure, panels = draw.new_drawing(title, width=7.2, height=3.2, columns=len(cuts))
    for axes, (name, places) in zip(panels if len(cuts) > 1 else [panels], cuts.items(), strict=True):
        n_tokens = sum(map(len, places))
        draw.heading(axes, name)
        draw.tile(axes, 0, 0, n_tokens, n_tokens, HIDDEN, edge="none")
        for rank, tokens in enumerate(places):
            for token in map(int, tokens):
                draw.tile(axes, 0, token, token + 1, 1, RANK[rank], edge="none")
            draw.label_rank(axes, n_tokens * 1.32, n_tokens * (0.13 + 0.24 * rank), rank)
            pairs = sum(int(token) + 1 for token in tokens)
            axes.text(n_tokens * 1.32, n_tokens * (0.22 + 0.24 * rank), f"{pairs} pairs", size=9, ha="right")
        axes.text(n_tokens / 2, n_tokens * 1.03, "keys", size=9, ha="center", va="top")
        axes.text(-0.6, n_tokens / 2, "queries", size=9, ha="right", va="center", rotation=90)
        axes.set_aspect("equal")
        axes.set_xlim(-2, n_tokens * 1.36)
        axes.set_ylim(n_tokens * 1.1, 0)
    return on_any_page(figure)


def losses(runs: dict[str, list[float]], title: str, every: int = 2) -> draw.Figure:
    """Losses of several runs, smoothed, each with its name.

    Args:
        runs: name of a run to its loss in each step.
        title: the finding.
        every: steps whose mean is one point. Default: 2.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch27 as figures

            figure = figures.losses({"right": [4.0, 3.0, 2.5, 2.2], "wrong": [4.0, 3.1, 2.4, 2.3]}, "Plausible")
    """
    figure, axes = draw.new_figure(title, width=7.0, height=2.8)
    styles = ("-", "--", "-.", ":")
    for index, (name, run) in enumerate(runs.items()):
        steps = range(0, len(run) - every + 1, every)
        means = [sum(run[step : step + every]) / every for step in steps]
        look = {"linewidth": 2.4 if index == 0 else 1.8, "linestyle": styles[index % len(styles)]}
        axes.plot([step + every / 2 for step in steps], means, color=RANK[index], label=name, **look)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(fontsize=9)
    return on_any_page(figure)
