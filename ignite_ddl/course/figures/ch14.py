"""The figures of chapter 14: what each ZeRO stage keeps on a rank, and how much memory that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["zero_peaks", "zero_stages"]


_PARTS = {
    "weights": ACTIVITY["forward"],
    "gradients": ACTIVITY["backward"],
    "optimizer": ACTIVITY["optimizer"],
}
_STAGES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def zero_stages(memories: list) -> Figure:
    """Who holds what of the model's states under ZeRO: a panel a stage, a row a rank, filled where it holds a slice.

    Args:
        memories: ``cost.zero_memory(1, 4, stage)`` for the stages 0 to 3: bytes a parameter on four ranks.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch14 as figures
            from ignite_ddl.lab import cost

            figure = figures.zero_stages([cost.zero_memory(1, 4, stage) for stage in range(4)])
            assert figure.axes[0].texts[0].get_text() == "data parallel: 16 bytes a parameter"
    """
    title, n_ranks = "From stage to stage, a rank keeps only its shard of one thing more", 4
    figure, axes = draw.new_drawing(title, 7.4, 3.9)
    for place, (name, memory) in enumerate(zip(_STAGES, memories, strict=True)):
        left, top = 19.5 * (place % 2), 6.6 * (place // 2)
        axes.text(left, top - 0.5, f"{name}: {memory.total:.3g} bytes a parameter", size=10, weight="bold")
        for rank in range(n_ranks):
            if left == 0:
                axes.text(-0.4, top + rank + 0.42, f"rank {rank}", size=9, ha="right", va="center")
            x = left
            for part, colour in _PARTS.items():
                size, mine = getattr(memories[0], part), getattr(memory, part)
                step = size / n_ranks
                for owner in range(n_ranks):
                    filled = mine == size or owner == rank
                    fill = colour if filled else ACTIVITY["idle"]
                    draw.tile(axes, x, top + rank, step - 0.06, 0.84, fill, edge="none")
                    x += step
                x += 0.3
    of_optimizer = "optimizer: copy, momentum, variance"
    for x, down, label in ((1.0, 0.0, "weights"), (3.5, 0.75, "gradients"), (10.6, 0.0, of_optimizer)):
        colour = draw.ink(_PARTS[label.split(":")[0]])
        for left in (0, 19.5):
            axes.text(left + x, 10.75 + down, label, size=9, ha="center", va="top", color=colour)
    axes.set(xlim=(-2.8, 36.3), ylim=(12.3, -1.4))
    return figure


def zero_peaks(memories: list, room: list[float], peaks: list[list[float]]) -> Figure:
    """Predicted memory of a step under ZeRO as stacked bars, and the peaks measured on each rank as dots.

    Args:
        memories: ``cost.zero_memory`` of the stages 0 to 3, in MiB.
        room: MiB that each stage needs besides, for gathered layers and gradients on their way.
        peaks: for each stage, MiB measured on each rank.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch14 as figures
            from ignite_ddl.lab import cost

            memories = [cost.zero_memory(1, 4, stage, 4, 4, 8) for stage in range(4)]
            measured = [[16.3] * 4, [10.3] * 4, [7.3] * 4, [4.9] * 4]
            figure = figures.zero_peaks(memories, [0.25, 0.25, 0.25, 1.0], measured)
            assert figure.axes[0].get_ylabel() == "MiB on a rank"
    """
    title = "States shrink with every stage, the room to work in does not"
    figure, axes = draw.new_figure(title, width=7.2, height=3.4)
    for place, (memory, working, measured) in enumerate(zip(memories, room, peaks, strict=True)):
        sizes = [(name, getattr(memory, name), colour) for name, colour in _PARTS.items()]
        sizes.append(("room", working, ACTIVITY["data"]))
        parts = [(size, colour, f"{name} {size:g}" if size >= 0.9 else "") for name, size, colour in sizes]
        top = draw.bar(axes, place, parts, 0.62, edgecolor="white")
        beside = [place + 0.36 + 0.05 * rank for rank in range(len(measured))]
        axes.plot(beside, measured, "o", color="#222222", markersize=4)
        axes.text(place, top + 0.5, f"{top:g}", size=9, weight="bold", ha="center", va="bottom")
    highest = max(peaks[0])
    text, line = "dots: measured, a rank each", {"arrowstyle": "-", "color": GREY}
    axes.annotate(text, (0.56, highest), (0.8, highest), size=9, va="center", arrowprops=line)
    axes.set_xticks(range(len(_STAGES)), _STAGES)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 1.15 * highest)
    axes.set_ylabel("MiB on a rank")
    return figure
