"""The figures of chapter 17: a transformer block on ranks, dropout's masks, and what a block keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, RANK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["along_a_block", "dropout_masks", "kept_by_block"]


def along_a_block(steps: list[tuple], n_ranks: int, title: str) -> Figure:
    """What the ranks hold at each place of a transformer block: tokens down, features across.

    Args:
        steps: in order; each (name, features, how, calls): features of the whole, ``how`` "whole" on every rank, cut by
            "features" or by "tokens", and the collectives just before, such as ["all_reduce"].
        n_ranks: how many.
        title: the finding.

    Returns:
        the figure; a part has its rank's colour and number, grey is whole on every rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch17 as figures

            steps = [("norm", 8, "whole", []), ("up", 32, "features", []), ("down", 8, "whole", ["all_reduce"])]
            figure = figures.along_a_block(steps, n_ranks=4, title="One all-reduce")
    """
    figure, axes = draw.new_drawing(title, width=7.6, height=1.95)
    narrow, left, part = min(features for _, features, *_ in steps), 0.0, 1 / n_ranks
    for name, features, how, calls in steps:
        if left:
            left += 0.62
            colour = ACTIVITY["communication"] if calls else GREY
            style = {"arrowstyle": "-|>", "linewidth": 2.5 if calls else 1}
            draw.arrow(axes, (left - 0.56, 0.5), (left - 0.06, 0.5), colour, **style)
            for call in calls:
                text = call.replace("_", "-").replace("-", "-\n", 1)
                place = {"ha": "center", "va": "bottom", "weight": "bold", "color": "#A2457A"}
                axes.text(left - 0.31, 1.28, text, size=9, **place)
                axes.plot([left - 0.31] * 2, [0.6, 1.24], color=colour, linewidth=1.2)
        wide = features / narrow
        if how == "whole":
            draw.tile(axes, left, 0, wide, 1, ACTIVITY["idle"], "all", edge="none")
        for rank in range(n_ranks) if how != "whole" else ():
            if how == "features":
                box = left + rank * part * wide, 0, part * wide, 1
            else:
                box = left, 1 - (rank + 1) * part, wide, part
            draw.tile(axes, *box, RANK[rank], rank, edge="none")
        axes.text(left + wide / 2, -0.1, name, size=9, ha="center", va="top")
        left += wide
    axes.set_xlim(-0.15, left + 0.15)
    axes.set_ylim(-0.62, 2.05)
    return figure


def dropout_masks(panels: dict[str, tuple[list, list]], title: str) -> Figure:
    """What each rank drops of one token: of its own features, and of those that all ranks hold.

    Args:
        panels: name of a way to draw random numbers, of two or more, to two lists by rank, of the cut and of the whole
            features: True is kept.
        title: the finding.

    Returns:
        the figure; a filled tile is kept, an empty one dropped.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch17 as figures

            own, whole = [[True, False], [False, True]], [[True, True], [True, True]]
            panels = {"all draw alike": (whole, whole), "the rule": (own, whole)}
            figure = figures.dropout_masks(panels, "Apart where it is cut, alike where it is whole")
    """
    figure, all_axes = draw.new_drawing(title, width=7.6, height=2.2, columns=len(panels))
    for axes, (name, (cut, whole)) in zip(all_axes, panels.items(), strict=True):
        for rank in range(len(cut)):
            left = 0.0
            for mask, colour in ((cut[rank], RANK[rank]), (whole[rank], GREY)):
                for kept in mask:
                    fill = colour if kept else "white"
                    draw.tile(axes, left + 0.08, rank + 0.12, 0.84, 0.76, fill, edge=colour, linewidth=1)
                    left += 1
                left += 1
            axes.text(-0.3, rank + 0.5, str(rank), size=9, ha="right", va="center")
        n_cut, n_whole = len(cut[0]), len(whole[0])
        axes.text(-0.3, -0.12, "rank", size=9, ha="right", va="bottom")
        axes.text(n_cut / 2, -0.12, "cut", size=9, ha="center", va="bottom")
        axes.text(n_cut + 1 + n_whole / 2, -0.12, "whole", size=9, ha="center", va="bottom")
        draw.heading(axes, name)
        axes.set_xlim(-2.6, n_cut + n_whole + 1.2)
        axes.set_ylim(len(cut) + 0.1, -0.9)
    return figure


def kept_by_block(cases: dict[str, tuple[float, float, float]], title: str) -> Figure:
    """Activations that a block keeps on each rank: bars predicted, marks measured.

    Args:
        cases: name to bytes: what the formula says, what gathered tokens add to it, and measured.
        title: the finding.

    Returns:
        the figure, in kB; the first case is at the top.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch17 as figures

            cases = {"one rank": (8000, 0, 8100), "sequence": (2000, 400, 2450)}
            figure = figures.kept_by_block(cases, "Not a quarter")
    """
    figure, axes = draw.new_figure(title, width=7.4, height=0.38 * len(cases) + 1.1)
    widest = max(max(formula + more, measured) for formula, more, measured in cases.values()) / 1e3
    parts = (("predicted", ACTIVITY["forward"]), ("+ gathered tokens", ACTIVITY["communication"]))
    for place, (formula, more, measured) in enumerate(cases.values()):
        for left, size, (label, colour) in zip((0, formula), (formula, more), parts, strict=True):
            look = {"height": 0.62, "color": colour, "edgecolor": "white", "label": None if place else label}
            axes.barh(place, size / 1e3, left=left / 1e3, **look)
        label = None if place else "measured"
        axes.plot(measured / 1e3, place, "D", color=ACTIVITY["backward_weight"], markersize=7, label=label)
        right = max(formula + more, measured) / 1e3 + 0.025 * widest
        axes.text(right, place, f"{measured / 1e3:.0f}", size=9, weight="bold", va="center")
    draw.name_rows(axes, list(cases))
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.1 * widest)
    axes.set_xlabel("kB that a block keeps on a rank")
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    return figure
