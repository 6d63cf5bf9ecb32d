"""The figures of chapter 02: host and device, a roofline, memory, the loss scale, and which rank takes which GPU."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, INK, RANK, on_any_page

__all__ = ["device_timelines", "host_and_device", "loss_scales", "memory_stages", "ranks_on_gpus", "roofline"]

ALT = {
    "host_and_device": "Left the host with Python and host memory, right the device with the GPU and device memory. "
    "Between them a queue of launches, and copies over the bus.",
    "roofline": "Speed against FLOP per byte, both logarithmic: a slope up to a corner at 25 FLOP per byte, then a "
    "flat line at 8.1 TFLOP/s. The sum of two matrices stands far left on the slope at 0.03 TFLOP/s, a product of 64 "
    "rows near the corner, products of 1024 and 4096 rows on the flat part.",
    "reading": "Two panels, each with a row for the host and one for the kernels. Above, host and device take turns "
    "and one is always idle. Below, the host prepares the next batch while the device works.",
    "pinned": "Three panels with rows for host, copies and kernels. Above, the host waits for each copy before it "
    "prepares the next batch. In the middle it does not, and copies and kernels take turns. Below, copies run beside "
    "kernels.",
    "memory": "Four stacked bars of 40, 60, 40 and 32 MiB. Parameters, Adam's state and input are in each; after "
    "forward come activations, in backward gradients on the way, after backward the weights' gradients.",
    "loss_scales": "Over loss scales from 2 to the -12 to 2 to the 28: the share of gradients that are zero falls "
    "from nine tenths to nothing, the error of the weights' gradient falls to near zero, and the largest scales "
    "overflow.",
    "ranks_on_gpus": "Four panels with two GPUs each. Two ranks on a GPU of their own work. Two ranks on GPU 0, four "
    "ranks of which two find no GPU, and four ranks in pairs on two GPUs fail.",
}  # alternative texts of the chapter's figures


def host_and_device() -> draw.Figure:
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
        draw.tile(axes, left, 0, 3.6, 4.2, "none", edge=INK)
        axes.text(left + 0.15, 3.85, name, size=10, weight="bold", va="center")
        draw.tile(axes, left + 0.2, 2.2, 3.2, 1.2, ACTIVITY["compute"], worker, edge="none")
        draw.tile(axes, left + 0.2, 0.3, 3.2, 1.2, GREY, memory, edge="none")
    for place in range(4):
        draw.tile(axes, 4.55 + 0.52 * place, 2.5, 0.46, 0.6, ACTIVITY["compute"], edge="none")
    for (start, end), height in (((3.65, 4.5), 2.8), ((6.65, 7.35), 2.8), ((3.65, 7.35), 0.9)):
        draw.arrow(axes, (start, height), (end, height), INK)
    axes.text(5.5, 3.25, "a queue of launches", size=9, ha="center", va="bottom")
    axes.text(5.5, 1.05, "copies over the bus", size=9, ha="center", va="bottom")
    axes.set(xlim=(-0.1, 11.1), ylim=(-0.1, 4.4))
    return on_any_page(figure)


def roofline(kernels: dict[str, float], peak: float, bandwidth: float) -> draw.Figure:
    """How fast a kernel can be at best: memory's slope, then the flat peak of the arithmetic, and where kernels stand.

    Args:
        kernels: name of a kernel to its FLOP per byte.
        peak: FLOP a second that the device does at best.
        bandwidth: bytes a second that its memory moves at best.

    Returns:
        the figure; both axes are logarithmic.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch02 as figures

            figure = figures.roofline({"sum": 1 / 12, "product": 100.0}, peak=8.1e12, bandwidth=320e9)
            assert figure.axes[0].get_xlabel() == "FLOP per byte"
    """
    slope, flat = ACTIVITY["data"], ACTIVITY["compute"]
    figure, axes = draw.new_figure("Left of the corner memory sets the pace, right of it the arithmetic", height=3.1)
    low, high, corner = min(kernels.values()) / 2, max(kernels.values()) * 8, peak / bandwidth
    middle = (low * corner) ** 0.5
    axes.plot([low, corner], [low * bandwidth / 1e12, peak / 1e12], color=slope, linewidth=3)
    axes.plot([corner, high], [peak / 1e12] * 2, color=flat, linewidth=3)
    fastest = max(kernels.values())
    for name, intensity in kernels.items():
        height = min(peak, intensity * bandwidth) / 1e12
        axes.plot(
            intensity, height, "o", color=flat if intensity >= corner else slope, markersize=8, markeredgecolor=INK
        )
        if intensity >= corner:  # below the point, most of it on the side where no other point stands
            offset, ha = ((-8, -14), "left") if intensity == fastest else ((24, -14), "right")
        else:  # beside the slope, where there is more room
            offset, ha = ((-10, 6), "right") if intensity > middle else ((10, -5), "left")
        draw.note(axes, name, (intensity, height), offset, INK, weight="normal", ha=ha)
    draw.note(axes, f"memory: {bandwidth / 1e9:.0f} GB/s", (middle, middle * bandwidth / 1e12), (14, -6), INK)
    draw.note(axes, f"arithmetic: {peak / 1e12:.1f} TFLOP/s", (corner, peak / 1e12), (8, 10), INK)
    draw.note(axes, f"{corner:.0f}", (corner, low * bandwidth / 1e12), (4, 8), INK, weight="normal")
    axes.axvline(corner, color=INK, linewidth=1.2, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s, at best")
    axes.set(xlim=(low, high), ylim=(low * bandwidth / 1e12, 3 * peak / 1e12))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    return on_any_page(figure)


def device_timelines(panels: dict[str, dict[str, list]], title: str) -> draw.Figure:
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
    return on_any_page(figure)


def memory_stages(stages: dict[str, dict[str, float]]) -> draw.Figure:
    """What lies in memory at each moment of a training step: a bar a moment, cut by what it holds.

    Args:
        stages: name of a moment to MiB of "parameters", "optimizer", "gradients", "activations", "input" and
            "on the way", which is drawn as the gradients that backward makes (those that are there).

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch02 as figures

            stages = {"built": {"parameters": 8.0}, "forward": {"parameters": 8.0, "activations": 4.0}}
            figure = figures.memory_stages(stages)
            assert figure.axes[0].get_ylabel() == "MiB"
    """
    colours = {
        "parameters": ACTIVITY["forward"],
        "optimizer": ACTIVITY["optimizer"],
        "input": GREY,
        "activations": ACTIVITY["data"],
        "gradients": ACTIVITY["backward"],
        "on the way": ACTIVITY["backward_weight"],
    }
    figure, axes = draw.new_figure("The peak lies in backward", width=7.4, height=3.4)
    tops = []
    for place, sizes in enumerate(stages.values()):
        held = {name: sizes[name] for name in colours if sizes.get(name, 0) >= 0.5}  # no loss of four bytes
        words = {"on the way": "gradients\non the way"}
        parts = [(size, colours[name], f"{words.get(name, name)} {size:.0f}") for name, size in held.items()]
        tops.append(draw.bar(axes, place, parts, 0.86))
        draw.note(axes, f"{tops[-1]:.0f}", (place, tops[-1]), (0, 7), INK, ha="center")
    axes.set_xticks(range(len(stages)), stages)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 1.13 * max(tops))
    axes.set_ylabel("MiB")
    return on_any_page(figure)


def loss_scales(zeros: dict[int, float], errors: dict[int, float], start: int) -> draw.Figure:
    """How float16 treats gradients at each loss scale: too small a scale lets them vanish, too large a one overflows.

    Args:
        zeros: power of two to the share of the gradients of activations that are zero in float16.
        errors: power of two to the relative error of a weight's gradient; inf or NaN where it overflows.
        start: the power of two that GradScaler starts with; 0 stands for no scale.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch02 as figures

            zeros, errors = {-4: 0.5, 0: 0.1, 16: 0.0}, {-4: 0.1, 0: 0.0, 16: float("inf")}
            figure = figures.loss_scales(zeros, errors, start=16)
    """
    red, blue = ACTIVITY["backward_weight"], ACTIVITY["compute"]
    figure, axes = draw.new_figure(
        "Too small a loss scale loses gradients, too large a one overflows", width=7.4, height=3.2
    )
    finite = {power: error for power, error in errors.items() if error < float("inf")}
    for line, colour in ((zeros, red), (errors, blue)):
        axes.plot([*finite], [line[power] for power in finite], "o-", color=colour, linewidth=2, markersize=4)
    low, last, end = min(zeros), max(finite), max(errors) + 1
    axes.axvspan(last + 1, end, color=red, alpha=0.35, linewidth=0)
    draw.note(axes, "overflow", ((last + 1 + end) / 2, 0.5), (0, 0), INK, rotation=90, ha="center")
    for power, text in ((0, "no scale"), (start, "GradScaler\nstarts here")):
        axes.axvline(power, color=INK, linewidth=1.2, linestyle="--")
        draw.note(axes, text, (power, 0.78), (6, 0), INK)
    ticks = range(low - low % 4, end + 1, 4)
    axes.set_xticks(ticks, [f"2$^{{{tick}}}$" for tick in ticks])
    axes.set_xlim(low - 0.5, end)
    axes.set_ylim(-0.03, 1)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("loss scale")
    draw.key(figure, {"gradients of activations that became zero": red, "error of the weights' gradient": blue})
    return on_any_page(figure)


def ranks_on_gpus(cases: dict[str, list[int]], n_gpus: int) -> draw.Figure:
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
            draw.tile(panel, 1.15 * gpu, fullest - 0.95 - place, 1, 0.95, RANK[rank], f"rank {rank}", edge="none")
        for gpu in range(width):
            text, colour = (f"GPU {gpu}", GREY) if gpu < n_gpus else ("no GPU", "none")
            style = {} if gpu < n_gpus else {"color": INK}
            draw.tile(panel, 1.15 * gpu, fullest + 0.1, 1, 0.75, colour, text, edge="none", **style)
        wrong = max(gpus) >= n_gpus or len(set(gpus)) < len(gpus)
        colour = ACTIVITY["backward_weight" if wrong else "optimizer"]
        panel.text(0, fullest + 1.35, "fails" if wrong else "works", size=9, weight="bold", color=colour)
        panel.set(xlim=(-0.05, 1.15 * width + 0.2), ylim=(fullest + 1.5, -0.1))
    return on_any_page(figure)
