"""The figures of chapter 25: what a character GPT reads and says, a plan's ranks and layers, a learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, RANK
from ignite_ddl.lab.plan import Plan

__all__ = ["curve", "overfitting", "placement", "shifted"]

ALT = {  # what the chapter's figures show, in words
    "shifted": (
        "Two rows of letter tiles. The upper row reads Captain Wentworth; below each letter stands the one that "
        "follows it."
    ),
    "placement": (
        "Eight rows, one a rank, and four columns, one a layer. Ranks 0 to 3 have embed and block 0, ranks 4 to 7 "
        "block 1 and head. Of each layer a rank computes with one half, outlined, and keeps one quarter, filled."
    ),
    "curve": (
        "Bits per character over 120 steps. They start above 6, fall fast, and then slowly pass the mark of letters "
        "only. The dots of eight ranks and the line of the process that took over lie on one curve."
    ),
    "overfitting": (
        "Two panels, bits per character by epochs. Left, with all of the text, both lines fall together, and the "
        "one that is trained on is lower at last. Right, with 1,024 characters of it, the line of what is trained "
        "on falls and the line of what was never seen rises."
    ),
}


def shifted(text: str) -> draw.Figure:
    """A text as tiles, and below each the character that follows it.

    Args:
        text: some characters.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch25 as figures

            figure = figures.shifted("Captain")
    """
    figure, axes = draw.new_drawing("Read the upper row, say the lower one", width=7.0, height=1.4)
    for row, (name, part) in enumerate({"reads": text[:-1], "says": text[1:]}.items()):
        axes.text(-0.3, row, name, size=10, ha="right", va="center")
        for place, character in enumerate(part):
            colour = ACTIVITY["forward"] if row == 0 else ACTIVITY["backward"]
            draw.tile(axes, place, row - 0.4, 0.94, 0.8, colour, character.replace(" ", "␣"))
    axes.set_xlim(-1.8, len(text) - 1)
    axes.set_ylim(1.6, -0.6)
    return draw.on_any_page(figure)


def placement(plan: Plan, layers: Sequence[str], split: Sequence[int]) -> draw.Figure:
    """Which rank holds which layers, and which part of each.

    Args:
        plan: with one stage on each pp rank.
        layers: their names.
        split: number of layers of each stage.

    Returns:
        the figure; a rank's tiles have its colour, and the height of the share of a layer that it keeps. With ZeRO an
        outline is what it computes with.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch25 as figures
            from ignite_ddl.lab.plan import A100, Cluster, Model, predict

            model = Model(layers=2, width=4096, heads=32, vocabulary=51200, sequence=2048)
            one = predict(model, Cluster(8, **A100), 8, dp=2, pp=2, tp=2)
            figure = figures.placement(one, ["embed", "block 0", "block 1", "head"], [2, 2])
    """
    n_ranks = plan.dp * plan.pp * plan.tp
    kept = 1 / plan.tp / (plan.dp if plan.zero else 1)
    figure, axes = draw.new_drawing(
        f"{plan.dp} × {plan.pp} × {plan.tp}: a rank computes with {max(split)} of {len(layers)} layers, 1/{plan.tp} of "
        f"each, and keeps 1/{1 / kept:.0f}",
        width=7.0,
        height=0.3 * n_ranks + 0.8,
    )
    ends = list(accumulate(split))
    for rank in range(n_ranks):
        stage, dp, tp = rank // (plan.dp * plan.tp), rank // plan.tp % plan.dp, rank % plan.tp
        draw.label_rank(axes, -0.95, rank, rank)
        axes.text(-0.08, rank, f"dp {dp} pp {stage} tp {tp}", size=9, ha="right", va="center")
        for layer in range(ends[stage] - split[stage], ends[stage]):
            top = rank - 0.42
            draw.tile(axes, layer, top, 0.96, 0.84, draw.SHADE, edge="none")
            part = top + 0.84 * tp / plan.tp
            draw.tile(axes, layer, part, 0.96, 0.84 / plan.tp, "none", edge=RANK[rank])
            draw.tile(
                axes, layer, part + 0.84 * kept * dp * bool(plan.zero), 0.96, 0.84 * kept, RANK[rank], edge="none"
            )
    for layer, name in enumerate(layers):
        axes.text(layer + 0.48, -0.65, name, size=9, ha="center", va="bottom")
    axes.set_xlim(-1.5, len(layers))
    axes.set_ylim(n_ranks - 0.5, -1.2)
    return draw.on_any_page(figure)


def curve(first: Sequence[float], whole: Sequence[float], saved: int, marks: dict[str, float]) -> draw.Figure:
    """The bits of a run that was saved and resumed elsewhere, a point a step.

    Args:
        first: of the run that saved, from step 1.
        whole: of the run that went on, from step 1.
        saved: the step after which the first was saved.
        marks: names to numbers of bits, drawn as horizontal lines.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch25 as figures

            figure = figures.curve([6.3, 5.0, 4.2], [6.3, 5.0, 4.2, 4.0, 3.9], 2, {"letters only": 4.3})
    """
    figure, axes = draw.new_figure("Eight ranks began, one process went on: one curve", height=3.2)
    steps = range(1, len(whole) + 1)
    axes.plot(steps[saved:], whole[saved:], color=ACTIVITY["compute"], linewidth=1.8)
    axes.plot(steps[: len(first)], first, "o", color=ACTIVITY["backward_weight"], markersize=3.5)
    for name, bits in marks.items():
        axes.axhline(bits, color=GREY, linewidth=1, linestyle="--")
        draw.note(axes, name, (len(whole), bits), (0, 7), GREY, ha="right")
    axes.axvline(saved + 0.5, color=GREY, linewidth=1)
    draw.note(axes, "saved", (saved + 0.5, min(whole) - 0.4), (6, 10), GREY)
    draw.note(axes, "eight ranks", (len(first), first[-1]), (12, 4), ACTIVITY["backward_weight"])
    late = (2 * len(whole)) // 3
    draw.note(
        axes, "one process", (late + 1, min(whole[late - 9 : late + 9])), (0, -14), ACTIVITY["compute"], ha="center"
    )
    axes.set(xlabel="step", ylabel="bits per character", ylim=(min(whole) - 0.4, None))
    return draw.on_any_page(figure)


def overfitting(runs: dict[str, dict[str, list[tuple[float, float]]]], marks: dict[str, float]) -> draw.Figure:
    """Bits of the text that is trained on and of one that is not, a panel for each run.

    Args:
        runs: for each run its lines, "trained on" and "never seen", each a list of (epoch, bits).
        marks: names to numbers of bits, drawn as horizontal lines.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch25 as figures

            lines = {"trained on": [(1, 4.0), (2, 3.0)], "never seen": [(1, 4.1), (2, 3.6)]}
            figure = figures.overfitting({"little text": lines, "much text": lines}, {"letters only": 4.4})
    """
    figure, panels = draw.new_figure(
        "1,024 characters are learned by heart, 420,168 hardly", height=3.2, columns=len(runs), sharey=True
    )
    colours = {"trained on": ACTIVITY["forward"], "never seen": ACTIVITY["backward_weight"]}
    for axes, (name, lines) in zip(panels, runs.items(), strict=True):
        for line, points in lines.items():
            axes.plot(*zip(*points, strict=True), "o-", color=colours[line], markersize=3, linewidth=1.6)
            above = points[-1][1] >= max(each[-1][1] for each in lines.values())
            draw.note(axes, line, points[-1], (0, 8 if above else -14), colours[line], ha="right")
        for mark, bits in marks.items():
            axes.axhline(bits, color=GREY, linewidth=1, linestyle="--")
            draw.note(axes, mark, (max(point[0] for point in points), bits), (0, 5), GREY, ha="right")
        axes.set(title=name, xlabel="epochs")
    low, high = (
        pick(point[1] for lines in runs.values() for line in lines.values() for point in line) for pick in (min, max)
    )
    panels[0].set(ylabel="bits per character", ylim=(low - 0.9, high + 0.7))
    return draw.on_any_page(figure)
