"""The figures of chapter 03: eager and lazy, compiling, tensors cut over devices, and rounding."""

from __future__ import annotations

import math
import statistics
from itertools import accumulate
from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, RANK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["compile_times", "device_tiles", "eager_and_lazy", "loss_gaps"]


_COMPILE = ACTIVITY["data"]  # a compiler's time, which only this chapter shows, always with its name in it


def eager_and_lazy(operations: list[str], rows: list[int]) -> Figure:
    """A drawing, not a measurement: who works when, step after step, run eagerly and run lazily.

    Args:
        operations: the operations of a step, in order.
        rows: the number of rows in each step's batch; a number not seen before is a new graph.

    Returns:
        the figure: above eager, below lazy, each with Python's row and the device's.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch03 as figures

            figure = figures.eager_and_lazy(["matmul", "add", "relu"], [64, 64, 48])
    """
    title = "Lazy: note the operations down, compile each new shape once, run them as one"
    figure, axes = draw.new_drawing(title, width=7.6, height=3.1)
    narrow, wide, compiling, n = 0.5, 1.75, 6.0, len(operations)
    time = 0.0
    for step, n_rows in enumerate(rows):
        start = time
        for name in operations:
            draw.tile(axes, time, 0, narrow, 0.8, ACTIVITY["handlers"])
            draw.tile(axes, time + narrow, 0.9, wide, 0.8, ACTIVITY["compute"], name if step == 0 else "")
            time += narrow + wide
        _step_label(axes, start, time, -0.15, n_rows)
    end, time = time, 0.0
    for step, n_rows in enumerate(rows):
        start = time
        for place in range(n):
            draw.tile(axes, time + 0.3 * place, 3.4, 0.3, 0.8, ACTIVITY["handlers"])
        time += 0.3 * n
        if n_rows not in rows[:step]:
            draw.tile(axes, time, 3.4, compiling, 0.8, _COMPILE, f"compile for {n_rows}")
            time += compiling
        width = 0.33 * wide * n
        draw.tile(axes, time, 4.3, width, 0.8, ACTIVITY["compute"], f"{n} as 1")
        time += width
        _step_label(axes, start, time, 3.25, n_rows)
    for top, name, does in ((0, "Eager", "asks"), (3.4, "Lazy", "notes")):
        axes.text(-3.7, top - 0.5, name, weight="bold", va="center")
        axes.text(-0.3, top + 0.4, f"Python {does}", ha="right", va="center", size=9)
        axes.text(-0.3, top + 1.3, "device computes", ha="right", va="center", size=9)
    right = max(end, time)
    draw.arrow(axes, (0, 5.5), (right, 5.5), linewidth=1)
    axes.text(right, 5.85, "time", ha="right", va="center", size=9)
    axes.set_xlim(-3.8, right + 0.2)
    axes.set_ylim(6.1, -0.9)
    return figure


def _step_label(axes: Axes, start: float, end: float, height: float, n_rows: int) -> None:
    axes.plot([start + 0.05, end - 0.1], [height, height], color="#999999", linewidth=1)
    axes.text((start + end) / 2, height - 0.3, f"{n_rows} rows", ha="center", va="center", size=9)


def compile_times(milliseconds: list[float], rows: list[int], compiled: list[bool], source: str) -> Figure:
    """Each step's time on a logarithmic axis; steps that compiled stand out.

    The title compares the medians of those that compiled, without the first of all, and of those that did not.

    Args:
        milliseconds: time of each step.
        rows: rows in each step's batch.
        compiled: whether a graph was compiled in that step.
        source: where the times come from, such as "recorded".

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch03 as figures

            times, compiled = [60.0, 0.5, 0.4, 20.0], [True, False, False, True]
            figure = figures.compile_times(times, [16, 16, 16, 4], compiled, "recorded")
    """
    slow, fast = (
        [t for t, new in zip(milliseconds, compiled, strict=True) if new == kind] for kind in (True, False)
    )
    if compiled[0] and len(slow) > 1:
        slow = slow[1:]  # the first step of all also takes what a start takes
    ratio = statistics.median(slow) / statistics.median(fast)
    title = f"A step with a new shape takes some {float(f'{ratio:.2g}'):.0f} × as long ({source})"
    figure, axes = draw.new_figure(title, height=2.8)
    colours = [_COMPILE if new else ACTIVITY["compute"] for new in compiled]
    steps = range(1, len(rows) + 1)
    axes.bar(steps, milliseconds, color=colours, edgecolor="#444444", linewidth=0.6)
    axes.set_yscale("log")
    for step, time, new in zip(steps, milliseconds, compiled, strict=True):
        text = f"compiles\n{time:.0f} ms" if new else f"{time:.1f} ms"
        axes.text(step, time * 1.15, text, ha="center", va="bottom", size=9)
    axes.set_ylim(min(milliseconds) / 3, max(milliseconds) * 6)
    axes.set_xticks(list(steps), [f"{n} rows" for n in rows])
    axes.set_ylabel("milliseconds, logarithmic")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    return figure


def device_tiles(tensors: dict[str, tuple[tuple[int, int], list]], title: str) -> Figure:
    """Matrices cut over devices: each tile striped in the colours of the devices that hold it, with their numbers.

    Args:
        tensors: name of a matrix to its shape and, for each device, its ((row start, stop), (column start, stop)).
        title: what the figure shows.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch03 as figures

            halves = [[(0, 4), (0, 6)], [(4, 8), (0, 6)]]
            figure = figures.device_tiles({"x": ((8, 6), halves)}, "x is cut by rows")
    """
    figure, axes = draw.new_drawing(title, width=7.4, height=2.9)
    axes.set_aspect("equal")
    left = 0.0
    tallest = max(shape[0] for shape, _ in tensors.values())
    ground = {"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.25"}
    for name, (shape, tiles) in tensors.items():
        top = (tallest - shape[0]) / 2
        holders: dict[tuple, list[int]] = {}
        for device, part in enumerate(tiles):
            holders.setdefault(tuple(map(tuple, part)), []).append(device)
        for (rows, columns), devices in holders.items():
            place = left + columns[0], top + rows[0], columns[1] - columns[0], rows[1] - rows[0]
            colours = [RANK[device] for device in devices]
            draw.stripes(axes, *place, colours if len(devices) == 1 else 4 * colours, upright=True)
            named = " and ".join(map(str, devices))
            draw.tile(axes, *place, "none", named, linewidth=3, color="black", fontsize=9.5, bbox=ground)
        label = f"{name}\n{shape[0]} × {shape[1]}"
        axes.text(left + shape[1] / 2, top - 0.3, label, ha="center", va="bottom", size=9.5)
        left += shape[1] + 2.2
    axes.set_xlim(-0.2, left - 2)
    axes.set_ylim(tallest + 0.2, -2.2)
    return figure


def loss_gaps(gaps: dict[str, list[float]], title: str) -> Figure:
    """How far the losses of two runs have been apart, up to each step, on a logarithmic axis; a labelled line a pair.

    Args:
        gaps: what is compared, to the absolute differences, step by step; 0 is drawn at the lower edge.
        title: what the figure shows.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch03 as figures

            figure = figures.loss_gaps({"float32": [1e-7, 1e-3], "float64": [0.0, 1e-15]}, "float32 rounds more")
    """
    figure, axes = draw.new_figure(title, width=7.4, height=3.2)
    floor, apart = 1e-17, 1.6  # labels stand at least so many powers of ten apart
    lowest = math.log10(floor)
    ends = sorted(gaps.items(), key=lambda item: max(item[1]))
    for place, (name, values) in enumerate(ends):
        colour = draw.ink(RANK[place])
        drawn = [max(value, floor) for value in accumulate(values, max)]
        axes.plot(range(1, len(values) + 1), drawn, color=colour, linewidth=2)
        height = lowest = max(math.log10(drawn[-1]), lowest + apart if place else lowest)
        at = {"xycoords": ("axes fraction", "data"), "va": "center", "size": 9, "annotation_clip": False}
        axes.annotate(name, (1.01, 10**height), color=colour, **at)
    axes.set_yscale("log")
    axes.set_ylim(floor, 1)
    axes.set_yticks([1e-16, 1e-12, 1e-8, 1e-4, 1])
    axes.minorticks_off()
    axes.set_xlabel("step")
    axes.set_ylabel("largest difference so far")
    return figure
