"""The figures of chapter 03: eager and lazy, compiling, and tensors cut over devices."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, INK, RANK

__all__ = ["compile_times", "device_tiles", "eager_and_lazy"]

ALT = {
    "eager_and_lazy": "Eager: Python launches nine operations and runs ahead, the device works them off one by one. "
    "Lazy: Python notes three operations, a compiler makes one program of them while the device waits, and the device "
    "runs that. The next two steps run the same program again.",
    "compile_times": "Bars for seven steps on a logarithmic axis: the first, with 16 rows, and the last, with 4, "
    "compile and take far longer than the five steps between them.",
    "device_tiles": "Four devices as a grid of 2 × 2. Each holds half of the rows of x, half of the columns of w, and "
    "the quarter of y where they meet. Devices 0 and 1 hold the same half of x, devices 0 and 2 the same half of w.",
}  # alternative texts of the chapter's figures


_COMPILE = ACTIVITY["data"]  # a compiler's time, which only this chapter shows, always with its name in it


def eager_and_lazy(operations: list[str], rows: list[int]) -> draw.Figure:
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
    title = "Lazy: note the operations, compile them once, launch them as one program"
    figure, axes = draw.new_drawing(title, width=7.6, height=3.0)
    launch, wide, note, compiling, n = 0.55, 1.75, 0.35, 5.2, len(operations)
    for place in range(n * len(rows)):
        draw.tile(axes, launch * place, 0, launch, 0.8, ACTIVITY["handlers"])
    end = launch  # of the device's work so far
    for step, n_rows in enumerate(rows):
        start = end
        for name in operations:
            draw.tile(axes, end, 0.9, wide, 0.8, ACTIVITY["compute"], name if step == 0 else "")
            end += wide
        _step_label(axes, start, end, 1.95, n_rows)
    python = done = 0.0
    for step, n_rows in enumerate(rows):
        for _ in operations:
            draw.tile(axes, python, 3.7, note, 0.8, ACTIVITY["handlers"])
            python += note
        if n_rows not in rows[:step]:
            draw.tile(axes, python, 3.7, compiling, 0.8, _COMPILE, "compile")
            python += compiling
        start, done = max(python, done), max(python, done) + 0.5 * wide * n
        python += 0.3
        draw.tile(axes, start, 4.6, done - start, 0.8, ACTIVITY["compute"], f"{n} as 1")
        _step_label(axes, start, done, 5.65, n_rows)
    for top, name, does in ((0, "Eager", "launches"), (3.7, "Lazy", "notes")):
        axes.text(-4.0, top - 0.55, name, weight="bold", va="center")
        axes.text(-0.3, top + 0.4, f"Python {does}", ha="right", va="center", size=9)
        axes.text(-0.3, top + 1.3, "device computes", ha="right", va="center", size=9)
    right = max(end, done)
    draw.arrow(axes, (0, 6.8), (right, 6.8), INK, linewidth=1)
    axes.text(right, 7.15, "time (a drawing, not measured)", ha="right", va="center", size=9)
    axes.set_xlim(-4.1, right + 0.2)
    axes.set_ylim(7.4, -0.9)
    return draw.on_any_page(figure)


def _step_label(axes: draw.Axes, start: float, end: float, height: float, n_rows: int) -> None:
    axes.plot([start + 0.05, end - 0.1], [height, height], color=INK, linewidth=1)
    axes.text((start + end) / 2, height + 0.35, f"{n_rows} rows", ha="center", va="center", size=9)


def compile_times(milliseconds: list[float], rows: list[int], compiled: list[bool], source: str) -> draw.Figure:
    """Each step's time on a logarithmic axis; steps that compiled stand out.

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
    title = f"Only a new shape compiles ({source})"
    figure, axes = draw.new_figure(title, width=7.4, height=2.8)
    steps = range(1, len(rows) + 1)
    axes.bar(steps, milliseconds, color=[_COMPILE if new else ACTIVITY["compute"] for new in compiled])
    axes.set_yscale("log")
    for step, time, new in zip(steps, milliseconds, compiled, strict=True):
        text = f"compiles\n{time:.0f} ms" if new else f"{time:.1f} ms"
        axes.text(step, time * 1.15, text, ha="center", va="bottom", size=9)
    axes.set_ylim(min(milliseconds) / 3, max(milliseconds) * 6)
    axes.set_xticks(list(steps), [f"step {step}\n{n} rows" for step, n in zip(steps, rows, strict=True)])
    axes.set_ylabel("ms, logarithmic")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    return draw.on_any_page(figure)


def device_tiles(tiles: dict[str, list], grid: tuple[int, int]) -> draw.Figure:
    """The devices of a grid, each with its piece of three matrices: x times w is y.

    Args:
        tiles: "x", "w" and "y" to, for each device, its ((row start, stop), (column start, stop)).
        grid: places on the axes ``data`` (downwards) and ``model`` (to the right).

    Returns:
        the figure: whole matrices as dotted outlines, a device's pieces in its colour.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch03 as figures

            halves = [[(0, 4), (0, 6)], [(0, 4), (0, 6)], [(4, 8), (0, 6)], [(4, 8), (0, 6)]]
            columns = [[(0, 6), (0, 4)], [(0, 6), (4, 8)], [(0, 6), (0, 4)], [(0, 6), (4, 8)]]
            y = [[x[0], w[1]] for x, w in zip(halves, columns)]
            figure = figures.device_tiles({"x": halves, "w": columns, "y": y}, grid=(2, 2))
    """
    title = "Each device multiplies its rows of x by its columns of w: its quarter of y"
    figure, axes = draw.new_drawing(title, width=7.4, height=3.5)
    axes.set_aspect("equal")
    shapes = {name: [max(part[dim][1] for part in parts) for dim in (0, 1)] for name, parts in tiles.items()}
    tallest = max(shape[0] for shape in shapes.values())
    gap, down = 2.4, tallest + 4.2
    across = sum(shape[1] for shape in shapes.values()) + 4 * gap
    for device in range(grid[0] * grid[1]):
        data, model = divmod(device, grid[1])
        left, top = across * model, down * data
        place = f"device {device}:  data {data}, model {model}"
        axes.text(left, top - 1.5, place, size=9.5, weight="bold", va="center")
        for name, sign in zip("xwy", "@=", strict=False):
            _piece(axes, name, left, top + (tallest - shapes[name][0]) / 2, shapes[name], tiles[name][device], device)
            left += shapes[name][1]
            axes.text(left + gap / 2, top + tallest / 2, sign, size=11, ha="center", va="center")
            left += gap
        _piece(axes, "y", left, top + (tallest - shapes["y"][0]) / 2, shapes["y"], tiles["y"][device], device)
    axes.set_xlim(-0.2, across * grid[1] - gap)
    axes.set_ylim(down * grid[0] - 4, -2.4)
    return draw.on_any_page(figure)


def _piece(axes: draw.Axes, name: str, left: float, top: float, shape: list, part: list, device: int) -> None:
    (first, last), (start, stop) = part
    draw.tile(axes, left, top, shape[1], shape[0], "none", edge=INK, linestyle=":")
    size = last - first, stop - start
    text = f"{name}: {size[0]} × {size[1]}" if size[1] > 4 else f"{name}:\n{size[0]} × {size[1]}"
    draw.tile(axes, left + start, top + first, size[1], size[0], RANK[device], text)
