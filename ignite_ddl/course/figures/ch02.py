"""The figures of chapter 02: host and device, memory, float16, and which rank takes which GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, RANK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["device_timelines", "gradient_sizes", "host_and_device", "memory_stages", "ranks_on_gpus"]


def host_and_device() -> Figure:
    """What chapter 02 is about in one picture: the host, the device, the queue and the bus between them.

    Returns:
        the figure; nothing in it is measured.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch02 as figures

            figure = figures.host_and_device()
    """
    title = "Two memories, two workers: Python writes orders, the GPU works them off"
    figure, axes = draw.new_drawing(title, width=7.0, height=3.0)
    for left, name, worker, memory in (
        (0, "host", "Python, one rank", "host memory:\ndatasets, batches"),
        (7.4, "device", "GPU, thousands of cores", "device memory:\nweights, gradients"),
    ):
        draw.tile(axes, left, 0, 3.6, 4.2, "#F4F4F4", edge="none")
        axes.text(left + 0.15, 3.85, name, size=10, weight="bold", va="center")
        draw.tile(axes, left + 0.2, 2.2, 3.2, 1.2, ACTIVITY["compute"], worker, edge="none")
        draw.tile(axes, left + 0.2, 0.3, 3.2, 1.2, "#DDDDDD", memory, edge="none")
    for place in range(4):
        draw.tile(axes, 4.55 + 0.52 * place, 2.5, 0.46, 0.6, ACTIVITY["compute"], edge="none")
    for (start, end), height in (((3.65, 4.5), 2.8), ((6.65, 7.35), 2.8), ((3.65, 7.35), 0.9)):
        draw.arrow(axes, (start, height), (end, height))
    axes.text(5.5, 3.25, "a queue of launches", size=9, ha="center", va="bottom")
    axes.text(5.5, 1.05, "copies over the bus", size=9, ha="center", va="bottom")
    axes.set(xlim=(-0.1, 11.1), ylim=(-0.1, 4.4))
    return figure


def device_timelines(panels: dict[str, dict[str, list]], title: str) -> Figure:
    """Who worked when, the host or a queue of the device: a panel a program, a row a worker, one scale of time.

    Args:
        panels: name of a program to its rows; a row is the name of a worker ("host", "copies" or "kernels") and
            a list of (text, start, end) in seconds.
        title: the finding; say where the times come from.

    Returns:
        the figure. Time begins in each panel with its first record.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch02 as figures

            rows = {"host": [("1", 0.0, 0.1)], "kernels": [("1", 0.1, 0.3)]}
            figure = figures.device_timelines({"one step": rows}, title="The device works after the host")
            assert figure.axes[0].get_xlim()[1] >= 300
    """
    colours = {
        "host": ACTIVITY["handlers"], "copies": ACTIVITY["communication"], "kernels": ACTIVITY["compute"],
    }  # fmt: skip
    n_rows = [len(rows) for rows in panels.values()]
    figure, axes = draw.stack(title, 7.4, 0.9 + 0.42 * sum(n_rows) + 0.35 * len(panels), n_rows)
    longest = 0.0
    for panel, (name, rows) in zip(axes, panels.items(), strict=True):
        first = min(start for row in rows.values() for _, start, _ in row)
        whole = 1e3 * (max(end for row in rows.values() for _, _, end in row) - first)
        longest = max(longest, whole)
        for place, (worker, row) in enumerate(rows.items()):
            for text, start, end in row:
                times = 1e3 * (start - first), 1e3 * (end - first)
                draw.span(panel, place, *times, colours[worker], text, 0.78, 0.8, va="center")
        draw.name_rows(panel, list(rows))
        panel.set_ylim(len(rows) - 0.45, -0.55)
        draw.heading(panel, f"{name}: {whole:.0f} ms")
    axes[-1].set_xlim(0, 1.02 * longest)
    axes[-1].set_xlabel("milliseconds")
    return figure


def memory_stages(stages: dict[str, dict[str, float]], peak: float) -> Figure:
    """What lies in memory at each moment of a training step: a bar a moment, cut by what it holds.

    Args:
        stages: name of a moment to MiB of "parameters", "optimizer", "gradients", "activations", "input" (those
            that are there).
        peak: MiB of the peak, drawn as a line.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch02 as figures

            stages = {"built": {"parameters": 8.0}, "forward": {"parameters": 8.0, "activations": 4.0}}
            figure = figures.memory_stages(stages, peak=14.0)
            assert figure.axes[0].get_ylabel() == "MiB"
    """
    colours = {
        "parameters": ACTIVITY["forward"],
        "input": ACTIVITY["idle"],
        "optimizer": ACTIVITY["optimizer"],
        "activations": ACTIVITY["data"],
        "gradients": ACTIVITY["backward"],
    }
    figure, axes = draw.new_figure(
        "Weights stay, activations and gradients take turns", width=7.4, height=3.4
    )
    for place, sizes in enumerate(stages.values()):
        held = {name: sizes[name] for name in colours if sizes.get(name, 0) >= 0.5}  # no loss of four bytes
        parts = [(size, colours[name], f"{name} {size:.0f}") for name, size in held.items()]
        top = draw.bar(axes, place, parts, 0.82, edgecolor="white")
        axes.text(place, top + 0.6, f"{top:.0f}", size=9, weight="bold", ha="center", va="bottom")
    axes.axhline(peak, color="#444444", linewidth=1.2, linestyle="--")
    axes.text(-0.4, peak + 0.6, f"peak {peak:.0f}, in the middle of backward", size=9, va="bottom")
    axes.set_xticks(range(len(stages)), stages)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 1.13 * peak)
    axes.set_ylabel("MiB")
    return figure


def gradient_sizes(gradient, scale: float) -> Figure:
    """How large gradients are, and which of them float16 can hold, as they are and times a scale.

    Args:
        gradient: a tensor of any shape, float32 or float64.
        scale: the loss scale, such as 2**16.

    Returns:
        the figure: two histograms over powers of two; what lies left of 2**-25 rounds to zero in float16.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl.course.figures import ch02 as figures

            figure = figures.gradient_sizes(torch.logspace(-9, -4, 100), scale=2.0**16)
            assert "zero in float16" in figure.axes[0].texts[0].get_text()
    """
    from numpy import histogram

    sizes = gradient.detach().flatten().abs()
    sizes = sizes[sizes > 0].double().log2().numpy()
    title = "Scaling the loss moves the gradients to where float16 has numbers"
    figure, panels = draw.new_figure(title, width=7.4, height=2.9, columns=2, sharex=True, sharey=True)
    lowest, border = -50, -25  # float16 rounds half of its smallest number, 2**-24, to zero
    for panel, factor, name in zip(panels, (1.0, scale), ("as they are", f"times {scale:,.0f}"), strict=True):
        powers = (sizes + math.log2(factor)).clip(lowest, 17)
        lost = float((powers <= border).mean())
        counts, edges = histogram(powers, bins=range(lowest, 19))
        left = edges[:-1]
        colours = [ACTIVITY["backward_weight"] if edge < border else ACTIVITY["compute"] for edge in left]
        panel.bar(left, 100 * counts / len(powers), width=0.9, align="edge", color=colours)
        panel.axvspan(border, 16, color=ACTIVITY["idle"], zorder=0)
        share = f"{lost:.0%}" if round(lost, 2) else "almost none"
        style = {"size": 9, "va": "top", "transform": panel.get_xaxis_transform()}
        panel.text(lowest + 1, 0.96, f"{share} are\nzero in float16", **style)
        panel.text(-4.5, 0.96, "float16 holds these", ha="center", **style)
        panel.set_ylim(0, 130 * counts.max() / len(powers))
        draw.heading(panel, name)
        panel.set_xlabel("size of a gradient")
    ticks = [-48, -36, -25, -14, 0, 16]
    panels[0].set_xticks(ticks, [f"2$^{{{tick}}}$" for tick in ticks])
    panels[0].set_xlim(lowest, 18)
    panels[0].set_ylabel("percent")
    return figure


def ranks_on_gpus(cases: dict[str, list[int]], n_gpus: int) -> Figure:
    """Which GPU each rank of a machine takes: a panel a rule, a tile a rank; where two meet, NCCL refuses.

    Args:
        cases: name of a rule to the GPU that each rank takes, two rules or more; a ": " in a name starts a line.
        n_gpus: GPUs that the machine has.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch02 as figures

            figure = figures.ranks_on_gpus({"its own": [0, 1], "all the first": [0, 0]}, n_gpus=2)
            assert len(figure.axes) == 2
    """
    fullest = max(max(gpus.count(gpu) for gpu in range(n_gpus)) for gpus in cases.values())
    widths = [max(n_gpus, max(gpus) + 1) for gpus in cases.values()]
    figure, panels = draw.new_drawing(
        "NCCL wants one rank on each GPU", width=7.4, height=1.7 + 0.35 * fullest, columns=len(cases), sharey=True,
        width_ratios=widths,
    )  # fmt: skip
    for panel, (name, gpus), width in zip(panels, cases.items(), widths, strict=True):
        draw.heading(panel, name.replace(": ", ":\n"))
        for rank, gpu in enumerate(gpus):
            place = gpus[:rank].count(gpu)
            draw.tile(panel, 1.15 * gpu, fullest - 1 - place, 1, 1, RANK[rank], f"rank {rank}")
        for gpu in range(width):
            text, colour = (f"GPU {gpu}", "#444444") if gpu < n_gpus else ("no GPU", "white")
            draw.tile(panel, 1.15 * gpu, fullest + 0.1, 1, 0.75, colour, text)
        wrong = max(gpus) >= n_gpus or len(set(gpus)) < len(gpus)
        colour = ACTIVITY["backward_weight"] if wrong else "#117733"
        panel.text(0, fullest + 1.35, "fails" if wrong else "works", size=9, weight="bold", color=colour)
        panel.set(xlim=(-0.05, 1.15 * width + 0.2), ylim=(fullest + 1.5, -0.1))
    return figure
