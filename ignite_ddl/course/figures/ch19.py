"""The figures of chapter 19: stale weights, losses over time, and time against memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["loss_over_time", "time_and_memory", "weight_versions"]


def weight_versions(used: list[list[int]], newest: list[list[int]], title: str) -> Figure:
    """With which version of its weights each stage runs a microbatch: a row a rank, a column a microbatch.

    A tile holds the version at the forward pass and the newest one at the backward pass; the more updates lie in
    between, the darker it is.

    Args:
        used: for each rank, the version at each microbatch's forward pass.
        newest: for each rank, the newest version at each microbatch's backward pass.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch19 as figures

            figure = figures.weight_versions([[0, 0, 1], [0, 1, 2]], [[0, 1, 2], [0, 1, 2]], "Rank 0 is one behind")
    """
    n_ranks, count = len(used), len(used[0])
    figure, axes = draw.new_figure(title, width=7.4, height=1.1 + 0.42 * n_ranks)
    pairs = [list(zip(*of_rank, strict=True)) for of_rank in zip(used, newest, strict=True)]
    most = max(1, *(late - early for of_rank in pairs for early, late in of_rank))
    for rank, of_rank in enumerate(pairs):
        for m, (early, late) in enumerate(of_rank):
            colour = draw.pale(ACTIVITY["backward_weight"], 0.08 + 0.8 * (late - early) / most)
            draw.tile(axes, m, rank, 1, 0.92, colour, f"{early} → {late}")
    axes.set_xlim(0, count)
    axes.set_ylim(n_ranks, 0)
    axes.set_xticks([m + 0.5 for m in range(count)], range(count))
    axes.set_yticks([rank + 0.46 for rank in range(n_ranks)], [f"rank {rank}" for rank in range(n_ranks)])
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_xlabel("microbatch; in a tile: updates before its forward pass → before its backward pass")
    return figure


def loss_over_time(
    panels: dict[str, dict[str, list[list[tuple[float, float]]]]], title: str, time: str
) -> Figure:
    """Training loss against time, a panel a setting: a colour a way to train, a line a seed.

    Args:
        panels: name of a setting, of two or more, to ways to train (three at most), each with its runs; a run is a
            list of (time, loss).
        title: the finding.
        time: what the axis of time counts.

    Returns:
        the figure; its panels share the axis of losses.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch19 as figures

            runs = {"1F1B": [[(7, 2.3), (14, 2.0)]], "PipeDream": [[(4, 2.3), (14, 1.6)]]}
            panels = {"learning rate 0.01": runs, "learning rate 0.02": runs}
            figure = figures.loss_over_time(panels, "PipeDream is ahead", "turns")
    """
    figure, axes = draw.new_figure(title, height=3.2, columns=len(panels), sharey=True)
    looks = (("-", "#222222"), ("-", ACTIVITY["backward_weight"]), ("--", ACTIVITY["forward"]))
    for panel, (name, ways) in zip(axes, panels.items(), strict=True):
        for (way, lines), (line, colour) in zip(ways.items(), looks, strict=False):
            for seed, points in enumerate(lines):
                look = {"color": colour, "linewidth": 1.4, "alpha": 0.8, "label": None if seed else way}
                panel.plot(*zip(*points, strict=True), line, **look)
        draw.heading(panel, name)
        panel.set_xlabel(time)
        panel.set_xlim(0)
    axes[0].set_ylim(0)
    axes[0].set_ylabel("training loss")
    axes[0].legend(loc="lower left", frameon=False, fontsize=9)
    return figure


def time_and_memory(schedules: dict[str, tuple[float, list[float]]], title: str) -> Figure:
    """The bubble of each schedule against the activations that its ranks keep: down and to the left is better.

    Args:
        schedules: name to its bubble, a share, and for each rank the microbatches that it keeps at most. A line leads
            from the rank that keeps least to the one that keeps most, where the mark and the name are.
        title: the finding.

    Returns:
        the figure; schedules at one place share a mark.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch19 as figures

            figure = figures.time_and_memory({"gpipe": (0.27, [8, 8]), "1f1b": (0.27, [2, 1])}, "1F1B keeps less")
    """
    figure, axes = draw.new_figure(title, height=3.4)
    blue = ACTIVITY["forward"]
    places: dict[tuple[float, float], list[str]] = {}
    for name, (bubble, kept) in schedules.items():
        places.setdefault((max(kept), round(100 * bubble, 3)), []).append(name)
        axes.plot([min(kept), max(kept)], [100 * bubble] * 2, color=blue, linewidth=1.5, alpha=0.5)
    for (kept, percent), names in places.items():
        axes.plot(kept, percent, "o", color=blue, markersize=8)
        draw.note(axes, "\n".join(names), (kept, percent), (9, 0), fontsize=9)
    widest, highest = (max(values) for values in zip(*places, strict=True))
    axes.set_xlim(0, 1.22 * widest)
    axes.set_ylim(-0.1 * highest, 1.15 * highest)
    axes.set_xlabel(
        "activations kept at most, in microbatches (mark: the fullest rank, line: to the emptiest)"
    )
    axes.set_ylabel("bubble, % of a step")
    return figure
