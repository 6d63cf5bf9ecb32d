"""The figures of chapter 28: where tokens go, which experts have room, who is busy, and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, INK, RANK, SHADE

__all__ = ["ALT", "differences", "exchange", "loads", "queues"]

ALT = {
    "exchange": "Sixteen tokens in three columns: at home on four ranks, at the experts, and at home again. A line "
    "follows each token. The rank of expert 1 receives six tokens, that of expert 3 two.",
    "queues": "Eight bars, one an expert, and a line at 16 places. Three experts are asked more often: what stands "
    "above the line is dropped. The others have empty places.",
    "nothing": "Each of eight experts' part of the tokens over 120 steps, as bands. At the end some bands are "
    "wide, and others have nearly vanished.",
    "balanced": "The same bands for three ways to balance: with the counts of each rank, with those of all, and with a "
    "bias. In all three, eight bands, none of which vanishes; their widths swing.",
    "dense": "A row of three dots for each of three dense layers: how far their test loss is above that of experts. At "
    "the first rate all are above zero; at three times the rate they are nearer to it.",
}


def exchange(choices: Sequence[Sequence[int]]) -> draw.Figure:
    """Each token's way to the rank of its expert and back: a tile a token in its home's colour, rank 0 at the top.

    Args:
        choices: for each rank, the expert of each of its tokens; rank r holds expert r.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch28 as figures

            figure = figures.exchange([[0, 1], [1, 1]])
            assert [text.get_text() for text in figure.axes[0].texts[:3]] == ["at home", "at its expert", "home again"]
    """
    n_ranks = len(choices)
    tokens = [(rank, expert) for rank, row in enumerate(choices) for expert in row]
    by_expert = sorted(range(len(tokens)), key=lambda token: tokens[token][1])
    orders = [list(range(len(tokens))), by_expert, list(range(len(tokens)))]
    groups = [[rank for rank, _ in tokens], [tokens[token][1] for token in by_expert], [rank for rank, _ in tokens]]
    figure, axes = draw.new_drawing("Two all-to-alls: each token goes to its expert's rank, and home", 7.2, 4.3)
    columns, widths, gap = (1.6, 7.6, 14.4), (1.5, 2.6, 1.5), 1.25
    for left, width, name in zip(columns, widths, ("at home", "at its expert", "home again"), strict=True):
        axes.text(left + width / 2, -1.5, name, size=10, weight="bold", ha="center", va="center")
    place = []  # of each token, column by column
    for order, of_rank in zip(orders, groups, strict=True):
        place.append({token: row + gap * rank for row, (token, rank) in enumerate(zip(order, of_rank, strict=True))})
    for column, (left, width, order, of_rank) in enumerate(zip(columns, widths, orders, groups, strict=True)):
        for token in order:
            home = tokens[token][0]
            draw.tile(axes, left, place[column][token] + 0.06, width, 0.88, RANK[home], token, edge="none")
        for rank in range(n_ranks):
            tops = [place[column][token] for token, here in zip(order, of_rank, strict=True) if here == rank]
            if column == 0:
                draw.label_rank(axes, left - 0.25, min(tops) + len(tops) / 2, rank)
            elif column == 1:
                label = f"rank {rank}: expert {rank}"
                axes.text(left + width / 2, min(tops) - 0.42, label, size=9, ha="center", va="center")
    for column in (0, 1):
        ends = columns[column] + widths[column] + 0.05, columns[column + 1] - 0.05
        for token, (home, _) in enumerate(tokens):
            heights = [place[column + step][token] + 0.5 for step in (0, 1)]
            axes.plot(ends, heights, color=draw.ink(RANK[home]), linewidth=1.3)
    axes.set(xlim=(-0.6, 16.0), ylim=(len(tokens) + gap * (n_ranks - 1) + 0.3, -2.1))
    return draw.on_any_page(figure)


def queues(counts: Sequence[int], places: int) -> draw.Figure:
    """How often each expert is chosen, and how many places it has: kept, dropped and empty.

    Args:
        counts: choices of each expert.
        places: of each expert.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch28 as figures

            figure = figures.queues([5, 3], places=4)
            assert figure.axes[0].get_title(loc="left") == "4 places an expert: 1 choice dropped, 1 place empty"
    """
    dropped, empty = (sum(max(sign * (n - places), 0) for n in counts) for sign in (1, -1))
    words = [f"{n} {noun}{'' if n == 1 else 's'}" for n, noun in ((dropped, "choice"), (empty, "place"))]
    title = f"{places} places an expert: {words[0]} dropped, {words[1]} empty"
    figure, axes = draw.new_figure(title, width=7.2, height=2.9)
    colours = {"kept": ACTIVITY["forward"], "dropped": ACTIVITY["backward_weight"], "empty": SHADE}
    for expert, n in enumerate(counts):
        parts = {"kept": min(n, places), "dropped": max(n - places, 0), "empty": max(places - n, 0)}
        labels = {name: f"{size}" if size > 1 else "" for name, size in parts.items()}  # a 1 would lie on the line
        draw.bar(axes, expert, [(size, colours[name], labels[name]) for name, size in parts.items() if size], 0.7)
    axes.axhline(places, color=INK, linewidth=1.2, linestyle="--")
    axes.set_xticks(range(len(counts)), [f"expert {expert}" for expert in range(len(counts))])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("choices")
    draw.key(figure, colours)
    return draw.on_any_page(figure)


def loads(panels: dict[str, torch.Tensor], title: str) -> draw.Figure:
    """Each expert's part of all tokens over the steps of a run, as bands on top of each other: a panel a run.

    Args:
        panels: name of a run to the parts, (steps, experts), of which each row sums to 1.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl.course.figures import ch28 as figures

            figure = figures.loads({"no balance": torch.full((40, 8), 1 / 8)}, "All are busy")
            assert len(figure.axes[0].collections) == 8
    """
    figure, axes = draw.new_figure(title, 7.2, 2.9, columns=len(panels), sharey=True)
    axes = list(axes) if len(panels) > 1 else [axes]
    for panel, (name, parts) in zip(axes, panels.items(), strict=True):
        smooth = torch.nn.functional.avg_pool1d(parts.T.float(), 11, stride=1).T  # else noise hides the bands
        steps = range(5, 5 + len(smooth))
        panel.stackplot(steps, 100 * smooth.T.numpy(), colors=RANK[: parts.shape[1]], edgecolor="white", linewidth=0.4)
        for part in range(1, parts.shape[1]):
            panel.axhline(100 * part / parts.shape[1], color="white", linewidth=0.9, linestyle=":")
        if len(panels) > 1:
            draw.heading(panel, name)
        panel.set(xlabel="step", ylim=(0, 100), xlim=(steps[0], steps[-1]))
    axes[0].set_ylabel("% of all tokens, mean of 11 steps")
    return draw.on_any_page(figure)


def differences(rows: dict[str, Sequence[float]], title: str) -> draw.Figure:
    """A row a model: for each seed a dot, by how much its test loss is above that of experts, and a line at the mean.

    Args:
        rows: name to differences, in thousandths, one a seed.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch28 as figures

            figure = figures.differences({"dense": [44, 63], "dense, 8 × the compute": [17, 0]}, "Dense is higher")
            assert figure.axes[0].get_yticklabels()[0].get_text() == "dense"
    """
    figure, axes = draw.new_figure(title, width=7.2, height=1.1 + 0.33 * len(rows))
    colour = ACTIVITY["backward_weight"]
    for row, found in enumerate(rows.values()):
        axes.scatter(found, [row] * len(found), color=colour, s=30, alpha=0.75, linewidth=0)
        mean = sum(found) / len(found)
        axes.plot([mean, mean], [row - 0.36, row + 0.36], color=colour, linewidth=2)
    axes.axvline(0, color=ACTIVITY["forward"], linewidth=2)
    draw.name_rows(axes, list(rows), bare=True)
    draw.note(axes, "experts", (0, 0), colour=ACTIVITY["forward"], size=9)
    axes.grid(axis="x", color=SHADE, linewidth=0.7)
    axes.set_xlabel("test loss above that of experts with the same seed, in thousandths")
    return draw.on_any_page(figure)
