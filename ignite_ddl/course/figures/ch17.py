"""The figures of chapter 17: a transformer block on ranks, dropout's masks, and what a block keeps."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, INK, RANK, on_any_page

__all__ = ["along_a_block", "dropout_masks", "kept_by_block"]

TITLE = {
    "tensor_plan": "Four ranks in a block: cut inside its two halves, whole around them",
    "sequence_plan": "Sequence parallel: where nothing was cut, each rank has its tokens",
}
ALT = {
    "tensor_plan": "What four ranks hold along a block. x, norm1: whole. q, k, v and mix: a quarter of the features "
    "each. out: four terms. After an all-reduce and the residual: whole, and norm2. up: a quarter each. down: four "
    "terms.",
    "sequence_plan": "The same block. x, norm1, the residual sums, norm2: each rank a quarter of the tokens. "
    "All-gathers before q k v and before up, reduce-scatters of the terms of out and of down.",
    "masks": "What four ranks keep of one token, inside the pair and behind it. All draw alike: the same mask four "
    "times, inside too. Each draws its own: different masks, behind too. ddl's rule: different inside, the same "
    "behind.",
    "kept": "Predicted and measured kB of a block's activations. One rank 528. By tensor_plan 232, more than half of "
    "it around the halves. By sequence_plan 181, of which gathered tokens are a quarter.",
}  # alternative texts of the chapter's figures


def along_a_block(steps: list[tuple], n_ranks: int, title: str) -> draw.Figure:
    """What the ranks hold at each place of a transformer block: tokens down, features across.

    Args:
        steps: in order; each (name, features, how, calls): features of the whole, ``how`` "whole" on every rank, cut by
            "features" or by "tokens", or the "terms" of a sum, and the collectives just before, such as
            ["all_reduce"]. A name of several words is several tensors that are cut alike. One that starts with "+"
            ends a residual, which began at the first step or at the last such name.
        n_ranks: how many.
        title: the finding.

    Returns:
        the figure; a part has its rank's colour and number, grey is whole on every rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch17 as figures

            steps = [("x", 8, "whole", []), ("up", 32, "features", [])]
            steps += [("down", 8, "terms", []), ("+", 8, "whole", ["all_reduce"])]
            figure = figures.along_a_block(steps, n_ranks=4, title="One all-reduce")
    """
    figure, axes = draw.new_drawing(title, width=7.9, height=2.0)
    narrow, left, part, began = min(features for _, features, *_ in steps), 0.0, 1 / n_ranks, None
    for name, features, how, calls in steps:
        if left:
            left += 0.62
            colour = ACTIVITY["communication"] if calls else GREY
            style = {"arrowstyle": "-|>", "linewidth": 2.5 if calls else 1}
            draw.arrow(axes, (left - 0.56, 0.5), (left - 0.06, 0.5), colour, **style)
            for call in calls:
                text = call.replace("_", "-").replace("-", "-\n", 1)
                place = {"ha": "center", "va": "bottom", "weight": "bold", "color": colour}
                axes.text(left - 0.31, 1.3, text, size=9, **place)
                axes.plot([left - 0.31] * 2, [0.6, 1.26], color=colour, linewidth=1.2)
        name, *twins = [name] if name.startswith("+") else name.split()
        wide, began_at = features / narrow, left
        boxes = {
            "whole": [],
            "features": [(left + rank * part * wide, 0, part * wide, 1) for rank in range(n_ranks)],
            "tokens": [(left, 1 - (rank + 1) * part, wide, part) for rank in range(n_ranks)],
            "terms": [
                (left + 0.3 * part * r * wide, 0.3 * part * r, 0.8 * wide, 0.8) for r in range(n_ranks)
            ],  # sheets
        }[how]
        if how == "whole":
            draw.tile(axes, left, 0, wide, 1, ACTIVITY["idle"], "all", edge="none")
        for rank, box in reversed(list(enumerate(boxes))):
            draw.tile(axes, *box, RANK[rank], "" if how == "terms" and rank else rank, edge="none")
        label = f"{name}:\n{n_ranks} terms" if how == "terms" else name
        axes.text(left + wide / 2, -0.1, label, size=9, ha="center", va="top")
        for other in twins:  # as large and cut alike, of the same input
            left += wide + 0.12
            for rank, (x, y, width, height) in enumerate(boxes):
                draw.tile(axes, x + left - began_at, y, width, height, RANK[rank], rank, edge="none")
            axes.text(left + wide / 2, -0.1, other, size=9, ha="center", va="top")
        middle = left + wide / 2
        if name.startswith("+"):
            axes.plot([began, began, middle], [1.03, 2.35, 2.35], color=GREY, linewidth=1.2)
            style = {"arrowstyle": "-|>", "linewidth": 1.2, "shrinkA": 0}
            draw.arrow(axes, (middle, 2.37), (middle, 1.0), GREY, **style)
        if began is None or name.startswith("+"):
            began = middle + (0.3 if name.startswith("+") else 0)
        left += wide
    axes.set_xlim(-0.15, left + 0.15)
    axes.set_ylim(-0.75, 2.45)
    return on_any_page(figure)


def dropout_masks(
    panels: dict[str, tuple[list, list]],
    title: str = "Apart inside, where features are cut; alike behind, where they are whole",
) -> draw.Figure:
    """What each rank drops of one token: inside, of its own features, and behind, of those that all ranks hold.

    Args:
        panels: name of a way to draw random numbers, of two or more, to two lists by rank, of the features inside
            and of those behind: True is kept.
        title: the finding. Default: the chapter's.

    Returns:
        the figure; a filled tile is kept, an empty one dropped.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch17 as figures

            apart, alike = [[True, False], [False, True]], [[True, True], [True, True]]
            panels = {"all draw alike": (alike, alike), "the rule": (apart, alike)}
            figure = figures.dropout_masks(panels, "Apart inside, alike behind")
    """
    from matplotlib.patches import Patch

    figure, all_axes = draw.new_drawing(title, width=7.6, height=2.4, columns=len(panels))
    for axes, (name, (inside, behind)) in zip(all_axes, panels.items(), strict=True):
        for rank in range(len(inside)):
            left = 0.0
            for mask, colour in ((inside[rank], RANK[rank]), (behind[rank], GREY)):
                for kept in mask:
                    fill = colour if kept else "none"
                    draw.tile(axes, left + 0.08, rank + 0.12, 0.84, 0.76, fill, edge=colour, linewidth=1)
                    left += 1
                left += 1
            axes.text(-0.3, rank + 0.5, str(rank), size=9, ha="right", va="center")
        n_inside, n_behind = len(inside[0]), len(behind[0])
        axes.text(-0.3, -0.12, "rank", size=9, ha="right", va="bottom")
        axes.text(n_inside / 2, -0.12, "inside", size=9, ha="center", va="bottom")
        axes.text(n_inside + 1 + n_behind / 2, -0.12, "behind", size=9, ha="center", va="bottom")
        draw.heading(axes, name)
        axes.set_xlim(-2.6, n_inside + n_behind + 1.2)
        axes.set_ylim(len(inside) + 0.1, -0.9)
    kept = [
        Patch(color=colour, label=label)
        for colour, label in ((RANK[0], "kept, a rank's own"), (GREY, "kept, on all ranks"))
    ]
    draw.key(figure, [*kept, Patch(facecolor="none", edgecolor=INK, label="dropped")])
    return on_any_page(figure)


def kept_by_block(
    cases: dict[str, tuple[float, float, float, float]],
    title: str = "A rank of four keeps 44 %, with sequence parallel 34 %, not 25 %",
) -> draw.Figure:
    """Activations that a block keeps on each rank: bars predicted, marks measured.

    Args:
        cases: name to bytes: predicted of what is cut by features, of what norms and residuals keep, and of gathered
            tokens; then measured.
        title: the finding. Default: the chapter's.

    Returns:
        the figure, in kB; the first case is at the top.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch17 as figures

            cases = {"one rank": (6000, 2000, 0, 8100), "sequence": (1500, 500, 400, 2450)}
            figure = figures.kept_by_block(cases, "Not a quarter")
    """
    figure, axes = draw.new_figure(title, width=7.4, height=0.45 * len(cases) + 1.3)
    widest = max(max(sum(parts), measured) for *parts, measured in cases.values()) / 1e3
    colours = {"inside the halves": "forward", "around them": "optimizer", "gathered tokens": "communication"}
    for place, (*parts, measured) in enumerate(cases.values()):
        bars = [(n / 1e3, ACTIVITY[kind], "") for n, kind in zip(parts, colours.values(), strict=True)]
        end = draw.bar(axes, place, bars, 0.62, upright=False)
        axes.plot(measured / 1e3, place, "D", color=INK, markersize=8)
        right = max(end, measured / 1e3) + 0.025 * widest
        axes.text(right, place, f"{measured / 1e3:.0f}", size=9, weight="bold", va="center")
    draw.name_rows(axes, list(cases), bare=True)
    axes.set_xlim(0, 1.1 * widest)
    axes.set_xlabel("kB that a block keeps on a rank: bars predicted, diamonds measured")
    draw.key(figure, {name: ACTIVITY[kind] for name, kind in colours.items()})
    return on_any_page(figure)
