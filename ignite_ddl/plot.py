"""Every figure of the course, matplotlib only, in one code of colours that colour-blind readers can tell apart.

Each function takes the chapter's own data and returns a ``matplotlib.figure.Figure``; :func:`show` displays it
with its alternative text.
"""

from __future__ import annotations

import io
import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "ACTIVITY",
    "RANK",
    "activations_by_rank",
    "all_reduce_times",
    "along_a_block",
    "backup_workers",
    "batch_or_rate",
    "by_workers",
    "bytes_by_plan",
    "bytes_by_world",
    "bytes_over_rows",
    "bytes_through_a_rank",
    "cluster",
    "collectives",
    "communication_share",
    "compile_times",
    "confusion_matrix",
    "course_map",
    "cut_products",
    "cuts_of_a_model",
    "data_and_model_parallel",
    "dealt_batch",
    "dealt_rows",
    "device_tiles",
    "device_timelines",
    "dropout_masks",
    "eager_and_lazy",
    "gradient_sizes",
    "hardest_negatives",
    "held_blocks",
    "host_and_device",
    "kept_by_block",
    "learning_curves",
    "logged_scalars",
    "loss_by_iteration",
    "loss_gaps",
    "loss_over_time",
    "memory_stages",
    "messages",
    "new_figure",
    "normalised_by",
    "numbers_sent",
    "over_batch_sizes",
    "over_staleness",
    "owners_over_epochs",
    "parity_errors",
    "rank_profiles",
    "ranks_on_gpus",
    "resumed_losses",
    "ring_steps",
    "rows_read",
    "sample_predictions",
    "schedules",
    "server_rows",
    "server_scheme",
    "server_shares",
    "show",
    "sort_times",
    "stale_descent",
    "staleness_histogram",
    "step_by_microbatches",
    "step_rows",
    "step_shares",
    "step_times",
    "time_and_memory",
    "time_to_accuracy",
    "timeline",
    "weight_versions",
    "who_does_what",
    "zero_peaks",
    "zero_stages",
]

# What a rank is doing (Okabe and Ito's set).
ACTIVITY = {
    "forward": "#0072B2",
    "backward": "#E69F00",  # with respect to the input, or whole
    "backward_weight": "#D55E00",
    "communication": "#CC79A7",
    "optimizer": "#009E73",
    "idle": "#E4E4E4",
    "compute": "#0072B2",  # where forward and backward are not told apart
    "data": "#F0E442",
    "handlers": "#8C8C8C",  # what an engine does between its steps
}
# Which rank it is (Paul Tol's "muted" set): a different family, so that the two codes are never confused.
RANK = ["#332288", "#CC6677", "#44AA99", "#DDCC77", "#88CCEE", "#882255", "#117733", "#999933"]

_STYLE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
}


def new_figure(
    title: str, width: float = 7.0, height: float = 3.0, columns: int = 1, **kwargs
) -> tuple[Figure, Axes]:
    """An empty figure in the course's style.

    Args:
        title: what the figure shows, as a finding.
        width: inches, default 7.
        height: inches, default 3.
        columns: number of axes side by side, default 1.
        kwargs: for ``matplotlib.pyplot.subplots``.

    Returns:
        the figure and its axes (an array of axes where ``columns`` > 1).
    """
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained", **kwargs)
        if columns == 1:
            axes.set_title(title)
        else:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure, axes


def show(figure, alt: str) -> None:
    """Displays a matplotlib figure as a PNG with alternative text, and closes it.

    The text stands in the output's metadata, where nbconvert and the site find it, and as the output's
    ``text/plain``, which is what a front end without pictures shows and what nbval compares: when the text
    changes, the chapter's test says so.

    Args:
        figure: a ``matplotlib.figure.Figure``.
        alt: one or two sentences with what a reader should see, the same in every run of the chapter.

    Examples:
        .. code-block:: python

            show(plot.shards(indices), alt="Four rows of tiles, one a rank: each holds 25 of 100 samples.")
    """
    if not alt.strip():
        raise ValueError("alt is empty: say in a sentence what the figure shows.")
    # Imported here: lab is imported on ranks too, and they draw nothing.
    import matplotlib.pyplot as plt
    from IPython import get_ipython
    from IPython.display import display

    png = io.BytesIO()
    # A white ground also on dark pages; no Software entry, which holds matplotlib's version.
    figure.savefig(
        png, format="png", dpi=110, facecolor="white", bbox_inches="tight", metadata={"Software": None}
    )
    plt.close(figure)  # else the inline backend shows it again at the end of the cell
    if get_ipython() is None:
        print(alt)
        return
    data = {"image/png": png.getvalue(), "text/plain": alt}
    display(data, raw=True, metadata={"image/png": {"alt": alt}})


def data_and_model_parallel(n_rows: int = 8) -> Figure:
    """The two ways to cut one training step over four ranks, side by side; one colour a rank.

    Left: the batch is cut, each rank has a whole model. Middle and right: the model is cut, by layers and
    inside each layer, and the batch is whole.

    Args:
        n_rows: rows in the batch, a multiple of 4. Default: 8.

    Returns:
        the figure: three panels with the same model of 4 layers.
    """
    if n_rows < 4 or n_rows % 4:
        raise ValueError(f"n_rows is {n_rows}; four ranks get the same number each, so give a multiple of 4")
    title = "Four ranks share one training step: cut the batch, or cut the model"
    figure, panels = new_figure(title, width=7.4, height=3.4, columns=3)
    each = n_rows // 4
    captions = {
        "Data parallel": f"each holds {each} rows, the whole model\nand sends gradients",
        "Model parallel, by layers": f"each holds {n_rows} rows, 1 of 4 layers\nand sends its layer's output",
        "Model parallel, inside layers": f"each holds {n_rows} rows, ¼ of each layer\nand sends part of each output",
    }
    for panel, (name, caption) in zip(panels, captions.items(), strict=True):
        panel.set_title(name, fontsize=10, fontweight="bold", loc="left")
        panel.text(0, 10.4, caption, fontsize=9, va="center", linespacing=1.4)
        panel.set(xlim=(0, 10), ylim=(11.3, 0))
        panel.axis("off")
    _heads(panels[0], batch=3.45, model=7.9)
    for rank in range(4):
        top = 1.1 + 2.1 * rank
        panels[0].text(0, top + 0.8, f"rank {rank}", fontsize=9, va="center")
        for place in range(each):
            text = str(rank * each + place) if each <= 3 else ""
            _tile(panels[0], 2.3 + 2.3 / each * place, top, 2.3 / each, 1.6, RANK[rank], text)
        _arrow(panels[0], 4.8, 5.7, top + 0.8)
        for layer in range(4):
            _tile(panels[0], 5.9 + layer, top, 1, 1.6, RANK[rank])
    for panel in panels[1:]:
        _heads(panel, batch=1.15, model=5.9)
        for row in range(n_rows):
            text = str(row) if n_rows <= 12 else ""
            _tile(panel, 0.3, 1.1 + 7.9 / n_rows * row, 1.7, 7.9 / n_rows, ACTIVITY["idle"], text)
        _arrow(panel, 2.3, 3.5, 5.05)
    for rank in range(4):
        _tile(panels[1], 3.9 + rank, 1.1, 1, 7.9, RANK[rank], f"rank {rank}", rotation=90)
        top, height = 1.1 + 7.9 / 4 * rank, 7.9 / 4
        for layer in range(4):
            _tile(panels[2], 3.9 + layer, top, 1, height, RANK[rank])
        panels[2].text(8.1, top + height / 2, f"rank {rank}", fontsize=9, va="center")
    return figure


def numbers_sent(n_rows: list[int], sent: dict[str, list[int]]) -> Figure:
    """What a rank sends in a step, against the size of the batch: one labelled line for each way to cut.

    Args:
        n_rows: the sizes of the batch that were run.
        sent: for each way, by its name, the numbers that one rank handed over, one for each size.

    Returns:
        the figure.
    """
    figure, axes = new_figure(
        "A bigger batch: cutting the model sends more, cutting the batch does not", height=2.8
    )
    for (name, counts), line in zip(sent.items(), ("o-", "s--"), strict=True):
        axes.plot(n_rows, counts, line, color=ACTIVITY["communication"], linewidth=2)
        end = (n_rows[-1], counts[-1])
        axes.annotate(name, end, (10, 0), textcoords="offset points", va="center", annotation_clip=False)
    axes.set_xlabel("rows in the batch")
    axes.set_ylabel("numbers that a rank sends")
    axes.set_xticks(n_rows)
    axes.set_ylim(0)
    return figure


def course_map(lanes: dict[str, dict[int, str]], route: list[int]) -> Figure:
    """The chapters of the course, one lane a subject; a short route through them stands out.

    Args:
        lanes: for each subject its chapters, as number and a title of at most 12 characters.
        route: the numbers of the chapters to highlight.

    Returns:
        the figure.
    """
    title = "Twenty-six chapters; short of time, take the dark ones in order"
    figure, axes = new_figure(title, width=7.4, height=0.58 * len(lanes) + 0.4)
    for lane, (subject, chapters) in enumerate(lanes.items()):
        axes.text(0, lane + 0.45, subject, fontsize=10, fontweight="bold", va="center")
        for place, (number, name) in enumerate(chapters.items()):
            colour = "#444444" if number in route else "#EDEDED"
            _tile(axes, 1.45 + place, lane, 0.97, 0.9, colour, f"{number:02d}\n{name}")
    axes.set_xlim(0, 1.45 + max(map(len, lanes.values())))
    axes.set_ylim(len(lanes), -0.05)
    axes.axis("off")
    return figure


def _heads(axes: Axes, batch: float, model: float) -> None:
    axes.text(batch, 0.7, "batch", fontsize=9, ha="center")
    axes.text(model, 0.7, "model of 4 layers", fontsize=9, ha="center")


def _tile(
    axes: Axes, left: float, top: float, width: float, height: float, colour: str, text="", rotation=0
) -> None:
    """A filled box with a white edge and, in the ink that can be read on it, its text."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((left, top), width, height, facecolor=colour, edgecolor="white", linewidth=1.2))
    red, green, blue = to_rgb(colour)
    ink = "white" if 0.30 * red + 0.59 * green + 0.11 * blue < 0.5 else "#222222"
    centre = (left + width / 2, top + height / 2)
    style = {"fontsize": 9, "ha": "center", "va": "center", "linespacing": 1.2}
    axes.text(*centre, text, color=ink, rotation=rotation, **style)


def _arrow(axes: Axes, start: float, end: float, height: float) -> None:
    style = {"arrowstyle": "->", "color": "#555555", "linewidth": 1.4}
    axes.annotate("", (end, height), (start, height), arrowprops=style)


def dealt_batch(images, world_size: int = 4) -> Figure:
    """One global batch on the left, each rank's share of it with its training step on the right.

    Image ``i`` goes to rank ``i % world_size``, as ``DistributedSampler`` deals.

    Args:
        images: the global batch, a tensor of shape (N, 1, height, width) or (N, height, width); N is a multiple
            of ``world_size``.
        world_size: number of ranks, default 4.

    Raises:
        ValueError: if the images cannot be dealt evenly.
    """
    if len(images) % world_size or not len(images):
        raise ValueError(f"images should be a multiple of world_size={world_size}, but given {len(images)}")
    pixels = [image.squeeze().numpy() for image in images]
    side = next(n for n in range(1, len(pixels) + 1) if n * n >= len(pixels))  # of the mosaic
    share = len(pixels) // world_size
    columns = -(-share // 2)  # a rank's images stand in two rows
    figure, axes = new_figure(
        f"{world_size} ranks, one training: only the gradients meet", width=7.6, height=3.5
    )
    axes.axis("off")
    axes.set_aspect("equal")

    def tile(index: int, x: float, y: float, size: float) -> None:
        edge = RANK[index % world_size]
        _box(axes, x, y, 0.96 * size, 0.96 * size, edge)
        inner = 0.13 * size
        axes.imshow(
            pixels[index], cmap="gray", extent=(x + inner, x + 0.96 * size - inner, y + inner, y + 0.96 * size - inner),
            zorder=2, interpolation="nearest",
        )  # fmt: skip

    row_height, height = 2.5, 2.5 * world_size
    size = min(1.05, (height - 0.4) / side)
    for index in range(len(pixels)):
        tile(index, index % side * size, height - 0.2 - (index // side + 1) * size, size)
    rows_x, width = side * size + 2.9, columns * 1.05
    boxes_x = rows_x + width + 0.7
    for rank in range(world_size):
        top = height - rank * row_height
        middle = top - row_height / 2
        axes.text(
            rows_x - 0.3, middle, f"rank {rank}", color=_ink(RANK[rank]), ha="right", va="center", weight="bold"
        )  # fmt: skip
        for place, index in enumerate(range(rank, len(pixels), world_size)):
            tile(index, rows_x + place % columns * 1.05, middle - place // columns * 1.05, 1.05)
        for x, wide, name in ((boxes_x, 3.5, "forward"), (boxes_x + 3.7, 3.5, "backward")):
            _box(axes, x, middle - 0.85, wide, 1.7, ACTIVITY[name], name)
        _box(axes, boxes_x + 11.2, middle - 0.85, 3.0, 1.7, ACTIVITY["optimizer"], "update")
    meet = f"all-reduce:\naverage\nthe {world_size}\ngradients"
    _box(axes, boxes_x + 7.4, 0.4, 3.6, height - 0.8, ACTIVITY["communication"], meet)
    above = height + 0.25
    axes.text(0, above, f"a global batch: {len(pixels)} images", va="bottom", size=9.5)
    axes.text(rows_x, above, f"{share} images each", va="bottom", size=9.5)
    axes.text(boxes_x, above, "the same weights before", va="bottom", size=9.5)
    axes.text(boxes_x + 14.2, above, "and after", va="bottom", ha="right", size=9.5)
    axes.set_xlim(-0.2, boxes_x + 14.4)
    axes.set_ylim(0, height + 1.2)
    return figure


def learning_curves(runs: dict, error: float) -> Figure:
    """Test accuracy over the steps: a line for each run, a look for each number of ranks.

    Args:
        runs: number of ranks to a list of histories, one a seed; a history is a list of dicts with "step" and
            "accuracy" (0 to 1).
        error: standard error of one measured accuracy, shown as a bar of two of them each way.
    """
    from matplotlib.ticker import PercentFormatter

    figure, axes = new_figure("One process or four ranks: the curves lie within each other's noise")
    looks = (("#222222", "-", "o"), ("#D55E00", "--", "s"), ("#0072B2", ":", "^"))
    for (n_ranks, histories), (colour, line, marker) in zip(runs.items(), looks, strict=False):
        who = "1 process" if n_ranks == 1 else f"{n_ranks} ranks"
        for number, history in enumerate(histories):
            axes.plot(
                [point["step"] for point in history], [point["accuracy"] for point in history],
                color=colour, linestyle=line, marker=marker, markersize=5, linewidth=1.4,
                label=None if number else f"{who}, {len(histories)} seed" + "s" * (len(histories) > 1),
            )  # fmt: skip
    steps = [point["step"] for histories in runs.values() for history in histories for point in history]
    first, last = min(steps), max(steps)
    x, low = first + 0.5 * (last - first), 0.5
    axes.errorbar([x], [low + 0.06], yerr=[2 * error], color="#555555", capsize=4, linewidth=1.4)
    axes.annotate(
        "± 2 standard errors of\none measured accuracy", (x, low + 0.06), (10, 0),
        textcoords="offset points", va="center", size=9, color="#444444",
    )  # fmt: skip
    axes.set_xticks(sorted(set(steps)))
    axes.set_xlabel("steps")
    axes.set_ylabel("test accuracy")
    axes.set_ylim(low, 0.9)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(loc="upper left", frameon=False)
    return figure


def parity_errors(errors: dict, bound: float = 1e-12) -> Figure:
    """Largest errors against one process on a logarithmic axis, one row a variant, with the bound.

    Args:
        errors: name of a variant to a dict of quantity ("loss", "gradients", "weights") to error.
        bound: what counts as equal, default 1e-12.
    """
    figure, axes = new_figure(
        "Equal, or plainly not: nothing lies near the bound", height=0.55 * len(errors) + 1.3
    )
    marks = {
        "loss": ("o", "#222222"),
        "gradients": ("D", ACTIVITY["communication"]),
        "weights": ("s", ACTIVITY["optimizer"]),
    }
    for row, found in enumerate(errors.values()):
        axes.axhline(row, color="#E4E4E4", linewidth=1, zorder=0)
        for place, (quantity, (marker, colour)) in enumerate(marks.items()):
            # An error of exactly 0 has no place on this axis: it stands at the left end.
            axes.plot(
                max(found[quantity], 1e-18), row + 0.2 * (place - 1), marker, color=colour, markersize=8,
                markeredgecolor="white", linestyle="none", label=quantity if row == 0 else None,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(5e-19, 100)
    axes.set_xticks([1e-18, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1])
    axes.axvline(bound, color="#D55E00", linestyle="--", linewidth=1.3)
    axes.text(bound * 2, len(errors) - 0.45, f"the bound, {bound:.0e}", color="#B34A00", size=9, va="center")
    axes.set_yticks(range(len(errors)), list(errors))
    axes.set_ylim(len(errors) - 0.2, -0.5)
    axes.set_xlabel("largest error against one process (float64)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.6, 1.0), frameon=False, handletextpad=0.2)
    return figure


def cluster(n_nodes: int = 2, ranks_per_node: int = 4) -> Figure:
    """Nodes side by side, the ranks of each with both their numbers, and the world around them.

    Args:
        n_nodes: number of machines, default 2.
        ranks_per_node: ranks on each, default 4.

    Returns:
        the figure: one tile a rank, rank 0 at the top left.

    Raises:
        ValueError: if there are more than 8 ranks, the number of rank colours.
    """
    if n_nodes * ranks_per_node > len(RANK):
        raise ValueError(f"at most {len(RANK)} ranks have a colour, but given {n_nodes} x {ranks_per_node}")
    from matplotlib.patches import FancyBboxPatch

    figure, axes = new_figure(
        "A rank has two numbers: one in the world, one on its node", width=7.4, height=2.3
    )
    axes.axis("off")
    node_width = ranks_per_node * 1.05 + 0.25
    whole = n_nodes * (node_width + 0.3) + 0.3

    def frame(x: float, y: float, width: float, height: float, face: str, line: str) -> None:
        style = "round,pad=0,rounding_size=0.12"
        box = FancyBboxPatch(
            (x, y), width, height, boxstyle=style, facecolor=face, edgecolor=line, linewidth=1.3
        )
        axes.add_patch(box)

    frame(0, 0, whole, 2.75, "white", "#888888")
    axes.text(0.3, 0.28, f"the world: {n_nodes * ranks_per_node} ranks", fontsize=10, va="center")
    for node in range(n_nodes):
        left = 0.3 + node * (node_width + 0.3)
        frame(left, 0.5, node_width, 2.0, "#F1F1F1", "#BBBBBB")
        axes.text(left + 0.18, 0.75, f"node {node}", fontsize=10, weight="bold", va="center")
        for local_rank in range(ranks_per_node):
            rank = node * ranks_per_node + local_rank
            _tile(axes, left + 0.15 + 1.05 * local_rank, 1.0, 1.0, 0.75, RANK[rank], f"rank {rank}")
            centre = left + 0.65 + 1.05 * local_rank
            axes.text(centre, 2.1, f"local\nrank {local_rank}", fontsize=9, ha="center", va="center")
    axes.set_xlim(-0.05, whole + 0.05)
    axes.set_ylim(2.8, -0.05)
    return figure


def collectives(panels: dict[str, tuple[list, list]]) -> Figure:
    """What each rank holds before and after collectives, one row a rank, coloured by the rank it comes from.

    Rank r puts in 2 ** r, so that a number says who is in it: 5 is 1 + 4, of ranks 0 and 2. The colours are read
    from the numbers, so that the picture shows what was computed, right or wrong.

    Args:
        panels: for each collective, by its name, what the ranks hold before and after: two lists with one entry a
            rank, a number or a list of numbers.

    Returns:
        the figure, one panel a collective; a tile that holds a sum is striped in the colours of its parts.
    """
    n_ranks = max(len(before) for before, _ in panels.values())
    side, after_at = 0.75, 1.7  # width of a tile, and where the second column starts
    lefts = [-1.2] + [-0.2] * (len(panels) - 1)
    rights = [after_at + side * max(map(len, map(_listed, after))) + 0.5 for _, after in panels.values()]
    widths = [right - left for left, right in zip(lefts, rights, strict=True)]
    figure, all_axes = new_figure(
        "The colours say which ranks a number comes from",
        width=0.62 * sum(widths), height=0.42 * n_ranks + 1.0, columns=len(panels), width_ratios=widths,
    )  # fmt: skip
    if len(panels) == 1:
        all_axes = [all_axes]
    for axes, left, right, (name, states) in zip(all_axes, lefts, rights, panels.items(), strict=True):
        axes.set_title(name, fontsize=10, fontweight="bold", loc="left")
        axes.axis("off")
        for start, head, held in zip((0, after_at), ("before", "after"), states, strict=True):
            axes.text(start, -0.25, head, fontsize=9, va="center")
            for rank, values in enumerate(map(_listed, held)):
                for index, value in enumerate(values):
                    _striped(axes, start + side * index, rank, side, 0.9, value)
        for rank in range(n_ranks):
            _arrow(axes, 0.9, 1.55, rank + 0.45)
            if left == lefts[0]:
                axes.text(-0.2, rank + 0.45, f"rank {rank}", fontsize=9, ha="right", va="center")
        axes.set_xlim(left, right)
        axes.set_ylim(n_ranks, -0.5)
    return figure


def _listed(values) -> list:
    return values if isinstance(values, list) else [values]


def _striped(axes: Axes, left: float, top: float, width: float, height: float, value: int) -> None:
    """A tile with a stripe for each rank whose 2 ** rank is in the value, and the value on top."""
    origins = [rank for rank in range(len(RANK)) if value >> rank & 1]
    if len(origins) == 1:
        _tile(axes, left, top, width, height, RANK[origins[0]], str(value))
        return
    from matplotlib.patches import Rectangle

    stripe = height / max(1, len(origins))
    for index, rank in enumerate(origins):
        place = (left, top + index * stripe)
        axes.add_patch(Rectangle(place, width, stripe, facecolor=RANK[rank], edgecolor="none"))
    outline = {"facecolor": "none", "edgecolor": "white", "linewidth": 1.2}
    axes.add_patch(Rectangle((left, top), width, height, **outline))
    ground = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    centre = (left + width / 2, top + height / 2)
    axes.text(*centre, str(value), fontsize=9, ha="center", va="center", color="#222222", bbox=ground)


def sort_times(times: dict[int, tuple[float, float]], cores: int) -> Figure:
    """Seconds of one sort against the number of processes: what a rank computes, and how long you wait.

    Args:
        times: number of processes to the pair of seconds that a rank computes (its processor time) and that all of
            them together take (by the clock on the wall). Measured.
        cores: number of cores of the machine, marked.

    Returns:
        the figure; both axes are logarithmic, so that twice as fast is the same step everywhere.
    """
    from matplotlib.ticker import NullLocator

    n_processes = sorted(times)
    taking_turns = n_processes[-1] > cores
    title = (
        "More ranks than cores take turns"
        if taking_turns
        else "A core for every rank: all of them run at once"
    )
    figure, axes = new_figure(title, height=3.0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    rows = ("you wait", 1, "o-", ACTIVITY["optimizer"]), ("a rank computes", 0, "s--", ACTIVITY["forward"])
    for name, which, look, colour in rows:
        seconds = [1000 * times[n][which] for n in n_processes]
        axes.plot(n_processes, seconds, look, color=colour, linewidth=2, markersize=7)
        axes.annotate(
            name, (n_processes[-1], seconds[-1]), (10, 0), textcoords="offset points", va="center",
            color=colour, weight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.set_xticks(n_processes, [str(n) for n in n_processes])
    low, high = min(min(pair) for pair in times.values()), max(max(pair) for pair in times.values())
    steps = [
        step
        for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
        if 500 * low < step < 2000 * high
    ]
    axes.set_yticks(steps, [str(step) for step in steps])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(n_processes[0] * 0.85, n_processes[-1] * 1.15)
    if taking_turns:
        axes.axvspan(cores, n_processes[-1] * 1.15, color="#F1F1F1", zorder=0)
        axes.axvline(cores, color="#888888", linewidth=1)
        note = f"more ranks than\nthe {cores} core{'s' * (cores > 1)} here"
        axes.text(cores * 1.04, 0.04, note, transform=axes.get_xaxis_transform(), fontsize=9, va="bottom")
    axes.set_xlabel("processes")
    axes.set_ylabel("milliseconds")
    return figure


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, text: str = "") -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="none", zorder=1))
    if text:
        axes.text(
            x + width / 2, y + height / 2, text, ha="center", va="center", size=9, zorder=3, color=_on(colour)
        )


def _on(colour: str) -> str:
    """Black or white: what reads better on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _ink(colour: str) -> str:
    """A colour dark enough for text on white."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    light = (0.299 * red + 0.587 * green + 0.114 * blue) / 255
    scale = min(1.0, 0.5 / light) if light else 1.0
    return "#" + "".join(f"{int(part * scale):02X}" for part in (red, green, blue))


def dealt_rows(panels: dict, title: str, tp: int = 1) -> Figure:
    """What each rank reads in an epoch, step after step: a tile for each row, in the rank's colour.

    A row that was read before in the epoch, in an earlier step or by a rank further up, is hatched. A slot that
    stays empty while another rank reads a row is dashed.

    Args:
        panels: name of a panel ("" for none) to what was read: ``seen[rank][step]`` is a list of row numbers.
        title: what the figure shows, as a finding.
        tp: number of neighbouring ranks that share the model's layers, default 1. Beyond 1 the figure says of
            each such group whether its ranks read the same rows, and hatches no row that they share.

    Raises:
        ValueError: if the ranks make different numbers of steps, or ``tp`` does not divide the ranks.
    """
    for name, seen in panels.items():
        if len({len(steps) for steps in seen}) > 1:
            raise ValueError(
                f"panels[{name!r}]: ranks make {[len(steps) for steps in seen]} steps, not the same"
            )
        if len(seen) % tp:
            raise ValueError(f"tp should divide the ranks, but given tp={tp} and {len(seen)} ranks")
    widths = [_width_of_steps(seen) + (2.6 if tp > 1 else 0.3) for seen in panels.values()]
    ranks = max(map(len, panels.values()))
    figure, axes = new_figure(
        title, width=min(7.4, max(4.2, 0.9 + 0.46 * sum(w + 1.4 for w in widths))), height=0.4 * ranks + 1.3,
        columns=len(panels), **({"width_ratios": [w + 1.4 for w in widths]} if len(panels) > 1 else {}),
    )  # fmt: skip
    again = empty = False
    for panel, (name, seen), width in zip(
        axes if len(panels) > 1 else [axes], panels.items(), widths, strict=True
    ):
        if name:
            panel.set_title(name, fontsize=10, fontweight="bold", loc="left")
        kinds = _draw_steps(panel, seen, tp)
        again, empty = again or "again" in kinds, empty or "empty" in kinds
        panel.set(xlim=(-1.4, width), ylim=(len(seen) + 0.15, -0.65))
        panel.axis("off")
    words = ["hatched: read before in this epoch"] * again + ["dashed: no row at this step"] * empty
    if words:
        figure.supxlabel(", ".join(words), fontsize=9, x=0.01, ha="left")
    return figure


def _slots(seen: list) -> list[int]:
    """For each step the most rows that a rank reads in it, at least one."""
    return [max(1, *(len(steps[step]) for steps in seen)) for step in range(len(seen[0]))]


def _width_of_steps(seen: list) -> float:
    return sum(_slots(seen)) + 0.4 * (len(seen[0]) - 1)


def _draw_steps(axes: Axes, seen: list, tp: int) -> set[str]:
    """Draws one panel of :func:`dealt_rows`; returns which of "again" and "empty" occur."""
    kinds, known, left = set(), set(), 0.0
    for rank in range(len(seen)):
        style = {"color": _ink(RANK[rank]), "fontweight": "bold", "fontsize": 9}
        axes.text(-0.2, rank + 0.5, f"rank {rank}", ha="right", va="center", **style)
    for step, slots in enumerate(_slots(seen)):
        axes.text(left + slots / 2, -0.12, f"step {step + 1}", fontsize=9, ha="center", va="bottom")
        for first in range(0, len(seen), tp):
            of_group = set()
            for rank in range(first, first + tp):
                rows = seen[rank][step]
                for place in range(slots):
                    kind = "empty" if place >= len(rows) else "again" if rows[place] in known else "row"
                    kinds.add(kind)
                    _row_tile(
                        axes, left + place, rank, RANK[rank], rows[place] if place < len(rows) else "", kind
                    )
                    if place < len(rows):
                        of_group.add(rows[place])
                        if tp == 1:
                            known.add(rows[place])
            known |= of_group
        left += slots + 0.4
    if tp > 1:
        for first in range(0, len(seen), tp):
            same = all(steps == seen[first] for steps in seen[first : first + tp])
            ends = [first + 0.15, first + tp - 0.15]
            bracket = [left, left + 0.2, left + 0.2, left], [ends[0], *ends, ends[1]]
            axes.plot(*bracket, color="#555555", linewidth=1.4)
            text = f"tp peers:\n{'the same' if same else 'different'}\nrows"
            axes.text(left + 0.4, first + tp / 2, text, fontsize=9, va="center", linespacing=1.2)
    return kinds


def _row_tile(axes: Axes, left: float, top: float, colour: str, text, kind: str) -> None:
    from matplotlib.patches import Rectangle

    if kind == "row":
        _tile(axes, left, top + 0.06, 1, 0.88, colour, str(text))
        return
    again = kind == "again"
    axes.add_patch(
        Rectangle(
            (left + 0.06, top + 0.12),
            0.88,
            0.76,
            facecolor="white",
            edgecolor=_ink(colour) if again else "#999999",
            hatch="////" if again else None,
            linestyle="-" if again else (0, (3, 2)),
            linewidth=1.4,
        )  # fmt: skip
    )
    if again:
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
        axes.text(left + 0.5, top + 0.5, str(text), fontsize=9, ha="center", va="center", bbox=ground)


def owners_over_epochs(panels: dict, world_size: int = 4) -> Figure:
    """Which rank reads which row in which epoch: a column a row, a line an epoch, the colour is the rank.

    Args:
        panels: name of a panel to its epochs; an epoch is a list with the rank that reads each row.
        world_size: number of ranks in the legend, default 4.
    """
    from matplotlib.patches import Patch

    title = "Without set_epoch a row stays with its rank for ever"
    epochs = max(map(len, panels.values()))
    figure, axes = new_figure(
        title, width=7.4, height=0.36 * epochs + 1.5, columns=len(panels), squeeze=False
    )
    for panel, (name, owners) in zip(axes.flat, panels.items(), strict=True):
        panel.set_title(name, fontsize=10, fontweight="bold", loc="left")
        for epoch, ranks in enumerate(owners):
            panel.text(-0.3, epoch + 0.5, f"epoch {epoch + 1}", fontsize=9, ha="right", va="center")
            for row, rank in enumerate(ranks):
                _tile(panel, row, epoch, 1, 1, RANK[rank])
        for row in range(len(owners[0])):
            panel.text(row + 0.5, len(owners) + 0.1, str(row), fontsize=9, ha="center", va="top")
        panel.text(-0.3, len(owners) + 0.1, "row", fontsize=9, ha="right", va="top")
        panel.set(xlim=(-2.9, len(owners[0])), ylim=(len(owners) + 0.8, -0.1))
        panel.axis("off")
    handles = [Patch(facecolor=RANK[rank], label=f"rank {rank}") for rank in range(world_size)]
    style = {"frameon": False, "fontsize": 9, "handlelength": 1, "handleheight": 1}
    figure.legend(handles=handles, loc="outside lower left", ncols=world_size, **style)
    return figure


def rows_read(reads: dict) -> Figure:
    """How many rows all ranks read together in an epoch, against how many there are: a line for each loader.

    Args:
        reads: name of a loader to its counts, the first for a dataset of one row, the second for two rows, ...
    """
    figure, axes = new_figure("Padding reads some rows twice, dropping leaves some out", height=2.9)
    looks = (("^--", "#D55E00"), ("o-", "#222222"), ("v:", "#0072B2"))
    for (name, counts), (look, colour) in zip(reads.items(), looks, strict=False):
        rows = range(1, len(counts) + 1)
        axes.plot(rows, counts, look, color=colour, linewidth=1.6, markersize=5, label=name)
    axes.set_xlabel("rows in the dataset")
    axes.set_ylabel("rows read by\nall ranks together")
    axes.set_xticks(list(rows))
    axes.set_yticks(range(0, max(map(max, reads.values())) + 1, 4))
    axes.legend(loc="upper left", frameon=False)
    return figure


def who_does_what(jobs: dict, world_size: int = 4) -> Figure:
    """Which ranks do a job: rank 0 alone, each rank its own, or all ranks together.

    Args:
        jobs: the name of a job to its kind: "one", "each" or "together".
        world_size: number of ranks, default 4.

    Raises:
        ValueError: if a kind is another word.
    """
    if wrong := [kind for kind in jobs.values() if kind not in ("one", "each", "together")]:
        raise ValueError(f"a kind should be 'one', 'each' or 'together', but given {wrong[0]!r}")
    title = "One rank, each rank, or all together: every job is of one kind"
    figure, axes = new_figure(title, width=7.0, height=0.27 * len(jobs) + 1.0)
    for rank in range(world_size):
        style = {"color": _ink(RANK[rank]), "fontweight": "bold", "fontsize": 9}
        axes.text(rank + 0.5, -0.25, f"rank {rank}", ha="center", va="bottom", **style)
    meaning = {
        "one": "rank 0; the others wait or go on",
        "each": "each its own",
        "together": "all at once, one answer",
    }
    top, before = 0.0, None
    for name, kind in jobs.items():
        if before not in (None, kind):
            top += 0.4
        axes.text(-0.15, top + 0.5, name, fontsize=9, ha="right", va="center")
        if kind == "together":
            _tile(axes, 0, top, world_size, 0.9, "#555555")
        for rank in range(world_size) if kind != "together" else ():
            mine = kind == "each" or rank == 0
            _tile(axes, rank, top, 1, 0.9, RANK[rank] if mine else ACTIVITY["idle"])
        if before != kind:
            axes.text(world_size + 0.15, top + 0.5, meaning[kind], fontsize=9, va="center")
        top, before = top + 1, kind
    axes.set(xlim=(-2.6, world_size + 2.6), ylim=(top, -0.9))
    axes.axis("off")
    return figure


def confusion_matrix(matrix, classes: list[str], n_ranks: int) -> Figure:
    """How often each class was taken for each class; a darker tile is more images.

    Args:
        matrix: counts, ``matrix[true][predicted]``, a tensor or a list of lists.
        classes: the names of the classes.
        n_ranks: number of ranks that counted, for the title.
    """
    counts = [[int(count) for count in row] for row in matrix]
    total = sum(map(sum, counts))
    size = len(classes)
    mistakes = {(t, p): counts[t][p] for t in range(size) for p in range(size) if t != p}
    true, taken = max(mistakes, key=mistakes.get)
    figure, axes = new_figure(
        f"{total:,} images from {n_ranks} ranks: {classes[true]} is taken for {classes[taken]} most often",
        width=6.6, height=4.6,
    )  # fmt: skip
    largest = max(map(sum, counts))
    for row in range(size):
        for column in range(size):
            count = counts[row][column]
            right = row == column
            strength = (count / largest) ** 0.6 if count else 0.0
            colour = _blend(ACTIVITY["forward"] if right else ACTIVITY["backward_weight"], strength)
            _tile(axes, column, row, 1, 1, colour, str(count) if count else "")
    edge = {"fill": False, "edgecolor": "#222222", "linewidth": 1.8, "zorder": 3}
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((taken, true), 1, 1, **edge))
    axes.set(xlim=(0, size), ylim=(size, 0), xlabel="predicted class", ylabel="true class")
    places = [place + 0.5 for place in range(size)]
    axes.set_yticks(places, classes)
    axes.set_xticks(places, classes, rotation=40, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def sample_predictions(images, true, predicted, classes: list[str]) -> Figure:
    """A row of images, each with its true class above and the predicted class below, red and bold if that is wrong.

    Args:
        images: a tensor of shape (N, 1, height, width) or (N, height, width).
        true: the true class of each image, N numbers.
        predicted: the class that the model gives it, N numbers.
        classes: the names of the classes; one with a space or a slash is broken there.
    """
    true, predicted = [int(number) for number in true], [int(number) for number in predicted]
    n_right = sum(one == other for one, other in zip(true, predicted, strict=True))
    figure, axes = new_figure(
        f"The model names {n_right} of these {len(true)} images right", width=7.6, height=1.7
    )
    axes.axis("off")
    names = [name.replace(" ", "\n").replace("/", "/\n") for name in classes]
    for place, (image, label, guess) in enumerate(zip(images, true, predicted, strict=True)):
        extent = (place + 0.03, place + 0.97, 0.97, 0.03)
        axes.imshow(image.squeeze().numpy(), cmap="gray", extent=extent, interpolation="nearest")
        axes.text(place + 0.5, -0.05, names[label], ha="center", va="bottom", fontsize=9)
        look = {} if guess == label else {"color": ACTIVITY["backward_weight"], "fontweight": "bold"}
        axes.text(place + 0.5, 1.05, names[guess], ha="center", va="top", fontsize=9, **look)
    for height, head, side in ((-0.05, "true", "bottom"), (1.05, "predicted", "top")):
        axes.text(-0.1, height, head, ha="right", va=side, fontsize=9, style="italic")
    axes.set(xlim=(-1.0, len(true)), ylim=(1.55, -0.55))
    return figure


def _blend(colour: str, strength: float) -> str:
    """A colour on white: strength 0 is nearly white, 1 the colour itself."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(247 + (part - 247) * strength):02X}" for part in parts)


def resumed_losses(straight: list[float], resumed: dict, step: int, window: int = 32) -> Figure:
    """How far the loss of a resumed run is from that of a run that was never interrupted.

    Args:
        straight: the losses of the whole run, the first for step 1.
        resumed: name of a resumed run to its losses; the first belongs to the step after ``step``.
        step: the step of the checkpoint.
        window: steps that are drawn after the checkpoint, default 32.
    """
    title = "Resumed with everything, no step differs from the run without a break"
    figure, axes = new_figure(title, height=2.7)
    looks = (("-", "#222222", 2.4), ("--", "#D55E00", 1.8))
    for (name, losses), (line, colour, width) in zip(resumed.items(), looks, strict=False):
        end = min(len(straight), step + window, step + len(losses))
        steps = range(step + 1, end + 1)
        apart = [losses[at - step - 1] - straight[at - 1] for at in steps]
        axes.plot(steps, apart, line, color=colour, linewidth=width, label=name)
    axes.set_xlabel(f"steps (the checkpoint was written after step {step})")
    axes.set_ylabel("loss, minus that of\nthe run without a break")
    figure.legend(loc="outside lower right", ncols=len(resumed), frameon=False, fontsize=9)
    return figure


def logged_scalars(losses: dict, rate: tuple) -> Figure:
    """What a TensorBoard log holds: losses on the left, the learning rate on the right.

    Args:
        losses: name of a loss to its ``(steps, values)``.
        rate: ``(steps, values)`` of the learning rate.
    """
    title = "Read back from the log: one rank's loss, all ranks' loss, and the learning rate"
    figure, (left, right) = new_figure(title, height=2.9, columns=2)
    looks = (("#BBBBBB", 1.3), ("#222222", 2.0))
    for (name, (steps, values)), (colour, width) in zip(losses.items(), looks, strict=False):
        left.plot(steps, values, color=colour, linewidth=width, label=name)
    left.set(xlabel="steps", ylabel="loss")
    left.set_ylim(0)
    left.legend(loc="upper right", frameon=False)
    right.plot(*rate, color=ACTIVITY["optimizer"], linewidth=2)
    right.set(xlabel="steps", ylabel="learning rate")
    right.set_ylim(0)
    return figure


def timeline(
    records,
    title: str = "What each rank did, measured",
    start: float | None = None,
    end: float | None = None,
) -> Figure:
    """A row a rank, rank 0 at the top, time to the right: what it did when.

    Where times come from (measured, simulated, with delays put in) belongs into the title or beside the figure.

    Args:
        records: a ``Timeline``, or ``Record``s with rank, kind, name, start and end in seconds (and waits_for).
        title: the finding.
        start: draws from this second on, default from the first record.
        end: draws up to this second, default up to the last record.

    Returns:
        the figure; its legend names the kinds that are drawn.
    """
    from matplotlib.patches import Patch

    records = list(getattr(records, "records", records))
    if not records:
        raise ValueError("records is empty: nothing was recorded")
    start = min(record.start for record in records) if start is None else start
    end = max(record.end for record in records) if end is None else end
    shown = [record for record in records if record.end > start and record.start < end]
    ranks = sorted({record.rank for record in shown})
    row = {rank: place for place, rank in enumerate(ranks)}
    figure, axes = new_figure(title, width=7.4, height=1.15 + 0.42 * len(ranks))
    for record in shown:
        left, right = max(record.start, start), min(record.end, end)
        axes.barh(
            row[record.rank], 1e3 * (right - left), left=1e3 * (left - start), height=0.78,
            color=ACTIVITY[record.kind], edgecolor="white", linewidth=0.4,
        )  # fmt: skip
        texts = [record.kind if record.kind in ("data", "handlers") else record.name]
        if (waits_for := getattr(record, "waits_for", None)) is not None:
            texts = [f"waits for {waits_for}", f"for {waits_for}", str(waits_for)]
        share = (right - left) / (end - start)
        if text := next((text for text in texts if share > 0.011 * (len(text) + 1)), ""):
            axes.text(
                1e3 * ((left + right) / 2 - start), row[record.rank], text, ha="center", va="center",
                size=9, color=_on(ACTIVITY[record.kind]),
            )  # fmt: skip
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * (end - start))
    axes.set_xlabel("milliseconds")
    kinds = [kind for kind in ACTIVITY if any(record.kind == kind for record in shown)]
    handles = [Patch(color=ACTIVITY[kind], label=kind) for kind in kinds]
    figure.legend(
        handles=handles, loc="outside lower right", ncols=len(kinds), handlelength=1.2, frameon=False, fontsize=9
    )  # fmt: skip
    return figure


def rank_profiles(cases: dict[str, list[dict[str, float]]], title: str) -> Figure:
    """What each rank's profiler says of a step: a panel a case, a bar a rank, cut into data, processing, handlers.

    Args:
        cases: name of a case to a list with a dict a rank: seconds of "data", "processing" and "handlers".
        title: the finding.

    Returns:
        the figure.
    """
    colours = {
        "data": ACTIVITY["data"], "processing": ACTIVITY["compute"], "handlers": ACTIVITY["handlers"],
    }  # fmt: skip
    figure, panels = new_figure(
        title, width=7.6, height=2.7, columns=max(2, len(cases)), sharex=True, sharey=True
    )
    for panel, (name, ranks) in zip(panels, cases.items(), strict=False):
        panel.set_title(name, fontsize=10, fontweight="normal", loc="left")
        for rank, seconds in enumerate(ranks):
            left = 0.0
            for part, colour in colours.items():
                width = 1e3 * seconds[part]
                panel.barh(
                    rank, width, left=left, height=0.75, color=colour, edgecolor="white", linewidth=0.6
                )
                if width >= 25:
                    panel.text(
                        left + width / 2,
                        rank,
                        f"{width:.0f}",
                        ha="center",
                        va="center",
                        size=9,
                        color=_on(colour),
                    )
                left += width
        panel.set_xlabel("ms a step")
    panels[0].set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    panels[0].set_ylim(len(ranks) - 0.5, -0.5)
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=part) for part, colour in colours.items()]
    figure.legend(
        handles=handles, loc="outside lower right", ncols=3, handlelength=1.2, frameon=False, fontsize=9
    )
    return figure


def step_times(seconds: list[float], warm_up: int, title: str) -> Figure:
    """A dot a step on a logarithmic axis; median and quartiles of those after the warm-up.

    Args:
        seconds: how long each step took, in order.
        warm_up: number of first steps that the median leaves out.
        title: the finding.

    Returns:
        the figure.
    """
    from statistics import quantiles

    milliseconds = [1e3 * value for value in seconds]
    low, median, high = quantiles(milliseconds[warm_up:], n=4)
    figure, axes = new_figure(title, height=2.8)
    steps = range(1, len(seconds) + 1)
    axes.axhspan(low, high, color=ACTIVITY["idle"], zorder=0)
    axes.axhline(median, color="#444444", linewidth=1.2)
    axes.plot(steps[:warm_up], milliseconds[:warm_up], "o", color=ACTIVITY["backward_weight"])
    axes.plot(steps[warm_up:], milliseconds[warm_up:], "o", color=ACTIVITY["compute"], markersize=4)
    axes.annotate("warm-up", (1, milliseconds[0]), (8, 0), textcoords="offset points", va="center", size=9)
    label = f"median {median:.1f} ms;\nhalf of the steps\nare {low:.1f} to {high:.1f}"
    axes.annotate(
        label, (len(seconds) + 0.5, median), (4, 0), textcoords="offset points", va="center", size=9
    )
    axes.set_yscale("log")
    axes.set_xlim(0.5, len(seconds) + 0.5)
    axes.set_ylim(min(milliseconds) / 1.5, max(milliseconds) * 1.6)
    ticks = [
        tick
        for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500)
        if min(milliseconds) / 2 < tick < max(milliseconds) * 2
    ]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("step")
    axes.set_ylabel("milliseconds")
    return figure


def ring_steps(states: list) -> Figure:
    """A ring all-reduce, step by step: what each rank holds of each chunk, in the colours of the ranks in it.

    Rank r puts in 2 ** r, so that a number says who is in it, and the stripes are read from the numbers. The
    chunk that a rank has just received has a dark frame.

    Args:
        states: ``states[step][rank][chunk]`` is the number that stands in a chunk: first before the ring starts,
            then after each of its 2 (n - 1) steps.

    Returns:
        the figure: the first round, which adds, above the second, which copies.

    Raises:
        ValueError: if there are not 2 n - 1 states.

    Examples:
        .. code-block:: python

            before = [[1, 1], [2, 2]]
            plot.ring_steps([before, [[1, 3], [3, 2]], [[3, 3], [3, 3]]])
    """
    n_ranks = len(states[0])
    if len(states) != 2 * n_ranks - 1:
        raise ValueError(
            f"states should hold 2 n - 1 = {2 * n_ranks - 1} of them, one before the ring and one after each of "
            f"its 2 (n - 1) steps, but given {len(states)}"
        )
    from matplotlib.patches import Rectangle

    title = f"Round one adds, round two copies: {len(states) - 1} steps, one chunk of {n_ranks} a step"
    width, height = n_ranks + 0.9, n_ranks + 1.5
    figure, axes = new_figure(title, width=7.4, height=0.62 * n_ranks + 1.7)
    for place in range(n_ranks):
        axes.text(place + 0.5, n_ranks + 0.05, str(place), fontsize=9, ha="center", va="top")
    axes.text(-0.2, n_ranks + 0.05, "chunk", fontsize=9, ha="right", va="top")
    for step, state in enumerate(states):
        row, column = (0, step) if step < n_ranks else (1, step - n_ranks + 1)
        left, top = column * width, row * height
        head = f"after step {step}" if step else "before"
        axes.text(left, top - 0.3, head, fontsize=9, fontweight="bold", va="center")
        for rank, chunks in enumerate(state):
            for place, value in enumerate(chunks):
                _stripes(axes, left + place, top + rank, value)
                if step and value != states[step - 1][rank][place]:
                    frame = {"fill": False, "edgecolor": "#111111", "linewidth": 2.2, "zorder": 3}
                    axes.add_patch(Rectangle((left + place + 0.05, top + rank + 0.05), 0.9, 0.9, **frame))
        if column == (0 if row == 0 else 1):
            for rank in range(n_ranks):
                style = {"color": _ink(RANK[rank]), "fontweight": "bold", "fontsize": 9}
                axes.text(left - 0.2, top + rank + 0.5, f"rank {rank}", ha="right", va="center", **style)
    words = f"Each rank sends to the\nnext, rank {n_ranks - 1} to rank 0.\nFramed: just received.\n"
    words += f"All {n_ranks} colours: the sum."
    axes.text(-1.7, height + n_ranks / 2, words, fontsize=9, va="center", linespacing=1.5)
    axes.set(xlim=(-1.75, n_ranks * width - 0.8), ylim=(2 * height - 1.4, -0.7))
    axes.axis("off")
    return figure


def _stripes(axes: Axes, left: float, top: float, value: int) -> None:
    """A tile of 1 × 1 with a stripe for each rank whose 2 ** rank is in the value; white if there is none."""
    from matplotlib.patches import Rectangle

    origins = [rank for rank in range(len(RANK)) if int(value) >> rank & 1]
    for index, rank in enumerate(origins):
        stripe = 0.9 / len(origins)
        place = (left + 0.05, top + 0.05 + index * stripe)
        axes.add_patch(Rectangle(place, 0.9, stripe, facecolor=RANK[rank], edgecolor="none"))


# Naive, tree and ring, as lines: the last is what the chapter is about.
_ALGORITHMS = (("o--", "#8C8C8C"), ("s-", "#444444"), ("D-", ACTIVITY["communication"]))


def bytes_by_world(sent: dict[str, dict[int, int]], n_bytes: int) -> Figure:
    """The most that one rank sends in an all-reduce, against the size of the world: a line for each way to do it.

    Args:
        sent: name of an algorithm to world size to bytes, those of the rank that sends most.
        n_bytes: size of one rank's buffer; twice of it is marked.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            plot.bytes_by_world({"naive": {2: 48, 4: 144}, "ring": {2: 48, 4: 72}}, n_bytes=48)
    """
    figure, axes = new_figure("A larger world: a ring's rank sends hardly more", height=2.9)
    for (name, of_world), (look, colour) in zip(sent.items(), _ALGORITHMS, strict=False):
        axes.plot(list(of_world), list(of_world.values()), look, color=colour, linewidth=2, markersize=7)
        end = (max(of_world), of_world[max(of_world)])
        axes.annotate(
            f"{name}: {end[1]} bytes", end, (9, 0), textcoords="offset points", va="center",
            color=_ink(colour), weight="bold", annotation_clip=False,
        )  # fmt: skip
    worlds = sorted({n for of_world in sent.values() for n in of_world})
    axes.axhline(2 * n_bytes, color="#888888", linewidth=1.2, linestyle=":")
    axes.annotate(
        f"twice the buffer: {2 * n_bytes} bytes", (worlds[-1], 2 * n_bytes), (-12, -2),
        textcoords="offset points", ha="right", va="top", fontsize=9, color="#555555",
    )  # fmt: skip
    axes.set_xticks(worlds)
    axes.set_ylim(0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("bytes that the busiest\nrank sends")
    return figure


def all_reduce_times(
    sizes: list[float],
    predicted: dict[str, list[float]],
    measured: dict[str, dict[float, float]],
    n_ranks: int,
) -> Figure:
    """Seconds of an all-reduce against the size of its buffer: lines predicted, marks measured.

    Args:
        sizes: sizes of the buffer in bytes, in order.
        predicted: name of an algorithm to seconds, one for each size.
        measured: name of an algorithm to size in bytes to seconds.
        n_ranks: size of the world, for the title.

    Returns:
        the figure; both axes are logarithmic.

    Examples:
        .. code-block:: python

            plot.all_reduce_times([1, 1000], {"ring": [0.1, 0.3]}, {"ring": {1000: 0.31}}, n_ranks=8)
    """
    title = f"{n_ranks} ranks: a tree for small buffers, a ring for large ones"
    figure, axes = new_figure(title, height=3.1)
    axes.set(xscale="log", yscale="log")
    ends = []
    for (name, seconds), (look, colour) in zip(predicted.items(), _ALGORITHMS, strict=False):
        milliseconds = [1e3 * value for value in seconds]
        axes.plot(sizes, milliseconds, look[1:], color=colour, linewidth=2)
        found = measured.get(name, {})
        axes.plot(
            list(found), [1e3 * value for value in found.values()], look[0], color=colour, markersize=9,
            markeredgecolor="white", linestyle="none",
        )  # fmt: skip
        ends.append((milliseconds[-1], name, colour))
    for place, (height, name, colour) in enumerate(sorted(ends)):  # two that end close by: one up, one down
        above = place and height < 1.4 * sorted(ends)[place - 1][0]
        axes.annotate(
            name, (sizes[-1], height), (7, 5 if above else -3), textcoords="offset points", va="center",
            color=_ink(colour), weight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(sizes[0], sizes[-1])
    highest = 1e3 * max(max(seconds) for seconds in predicted.values())
    lowest = 1e3 * min(min(seconds) for seconds in predicted.values())
    steps = [tick for power in range(7) for tick in (10**power, 2 * 10**power, 5 * 10**power)]
    axes.set_yticks([tick for tick in steps if lowest / 1.6 < tick < highest * 1.6])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("bytes in the buffer")
    axes.set_ylabel("milliseconds")
    axes.text(
        0.02, 0.96, "lines: predicted\nmarks: measured, with delays put in", transform=axes.transAxes,
        fontsize=9, va="top",
    )  # fmt: skip
    return figure


def loss_by_iteration(runs: dict[str, list[list[tuple[int, float]]]], title: str) -> Figure:
    """Loss against iterations: a line for each run, a look for each way to train, named where it ends.

    Args:
        runs: name of a way to its runs, one a seed; a run is a list of (iteration, loss).
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            plot.loss_by_iteration({"1 rank": [[(0, 2.3), (200, 0.7)]]}, "The loss falls")
    """
    figure, axes = new_figure(title, height=3.0)
    looks = (("-", "#222222"), ("--", ACTIVITY["backward_weight"]), ("-", ACTIVITY["optimizer"]))
    offsets = ((9, 0), (9, 10), (9, -10))  # away from the lines that go on to the right
    for (name, lines), (line, colour), offset in zip(runs.items(), looks, offsets, strict=False):
        for points in lines:
            axes.plot(*zip(*points, strict=True), line, color=colour, linewidth=1.6, alpha=0.75)
        ends = [points[-1] for points in lines]
        end = (ends[0][0], sum(loss for _, loss in ends) / len(ends))
        axes.plot(*end, "o", color=colour, markersize=6)
        axes.annotate(
            name, end, offset, textcoords="offset points", va="center", color=_ink(colour), weight="bold",
            annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(0)
    axes.margins(y=0.12)
    axes.set_xlabel("iterations")
    axes.set_ylabel("training loss")
    return figure


def normalised_by(means: list[list[float]], together: list[float]) -> Figure:
    """The mean that each rank normalises a feature by, and that of the whole batch.

    Args:
        means: for each rank, a mean for each feature.
        together: for each feature the mean over the rows of all ranks.

    Returns:
        the figure: a column a feature, a dot a rank, a bar for the whole batch.

    Examples:
        .. code-block:: python

            plot.normalised_by([[0.0, 1.0], [0.4, 0.8]], together=[0.2, 0.9])
    """
    figure, axes = new_figure("Every rank normalises by a mean of its own", height=2.9)
    n_ranks = len(means)
    for rank, of_features in enumerate(means):
        places = [feature + 0.09 * (rank - (n_ranks - 1) / 2) for feature in range(len(of_features))]
        axes.plot(places, of_features, "o", color=RANK[rank], markersize=8, label=f"rank {rank}")
    for feature, mean in enumerate(together):
        label = "whole batch" if feature == 0 else None
        axes.plot([feature - 0.32, feature + 0.32], [mean, mean], color="#111111", linewidth=2.2, label=label)
    axes.set_xticks(range(len(together)))
    axes.set_xlabel("feature of the hidden layer")
    axes.set_ylabel("mean over rows")
    figure.legend(loc="outside right center", handletextpad=0.5, frameon=False, fontsize=9)
    return figure


def messages(panels: dict[str, list], title: str) -> Figure:
    """Who sends to whom and when: a panel an algorithm, a row a rank, an arrow a message; time to the right.

    Args:
        panels: name of an algorithm to its messages, such as ``in_flight`` of a ``simulate.Simulation``: each
            has ``rank``, ``name`` ("to 1"), ``start`` and ``end`` in seconds. An arrow is the thicker the longer
            its message takes.
        title: the finding.

    Returns:
        the figure; the panels share one scale of time.

    Examples:
        .. code-block:: python

            link = ddl.cost.Link(latency=0, bandwidth=48)
            ring = ddl.simulate.all_reduce_ring(4, 48, link)
            plot.messages({"ring": ring.in_flight}, "Round a ring, a quarter at a time")
    """
    arrows = {
        name: [(m.rank, int(m.name.removeprefix("to ")), m.start, m.end) for m in sent]
        for name, sent in panels.items()
    }
    everything = [arrow for of_panel in arrows.values() for arrow in of_panel]
    n_ranks = 1 + max(max(source, target) for source, target, _, _ in everything)
    longest = max(end - start for _, _, start, end in everything)
    last = max(end for _, _, _, end in everything)
    figure, axes = new_figure(title, width=7.6, height=0.42 * n_ranks + 1.3, columns=max(2, len(panels)))
    for panel, (name, of_panel) in zip(axes, arrows.items(), strict=False):
        done = max(end for _, _, _, end in of_panel)
        panel.set_title(f"{name}: {done:g} s", fontsize=10, fontweight="bold", loc="left")
        for rank in range(n_ranks):
            line = {"color": ACTIVITY["idle"], "linewidth": 7, "solid_capstyle": "butt", "zorder": 0}
            panel.plot([0, done], [rank, rank], **line)
        for source, target, start, end in of_panel:
            style = {
                "arrowstyle": "-|>",
                "color": RANK[source],
                "shrinkA": 0,
                "shrinkB": 1,
                "mutation_scale": 9,
            }
            width = 0.6 + 1.9 * (end - start) / longest
            panel.annotate("", (end, target), (start, source), arrowprops=style | {"linewidth": width})
        panel.axvline(done, color="#222222", linewidth=1)
        panel.set_xlim(-0.03 * last, 1.05 * last)
        panel.set_ylim(n_ranks - 0.6, -0.6)
        panel.set_xlabel("seconds")
        panel.set_yticks([])
        panel.spines["left"].set_visible(False)
    for panel in axes[len(panels) :]:
        panel.axis("off")
    axes[0].set_yticks(range(n_ranks), [f"rank {rank}" for rank in range(n_ranks)])
    axes[0].tick_params(axis="y", length=0)
    return figure


def host_and_device() -> Figure:
    """What chapter 02 is about in one picture: the host, the device, the queue and the bus between them.

    Returns:
        the figure; nothing in it is measured.

    Examples:
        .. code-block:: python

            figure = plot.host_and_device()
            assert len(figure.axes) == 1
    """
    figure, axes = new_figure("Two memories, two workers: Python writes orders, the GPU works them off")
    for left, name, worker, memory in (
        (0, "host", "Python, one rank", "host memory:\ndatasets, batches"),
        (7.4, "device", "GPU, thousands of cores", "device memory:\nweights, gradients"),
    ):
        _box(axes, left, 0, 3.6, 4.2, "#F4F4F4")
        axes.text(left + 0.15, 3.85, name, size=10, weight="bold", va="center")
        _box(axes, left + 0.2, 2.2, 3.2, 1.2, ACTIVITY["compute"], worker)
        _box(axes, left + 0.2, 0.3, 3.2, 1.2, "#DDDDDD", memory)
    for place in range(4):
        _box(axes, 4.55 + 0.52 * place, 2.5, 0.46, 0.6, ACTIVITY["compute"])
    for (start, end), height in (((3.65, 4.5), 2.8), ((6.65, 7.35), 2.8), ((3.65, 7.35), 0.9)):
        _arrow(axes, start, end, height)
    axes.text(5.5, 3.25, "a queue of launches", size=9, ha="center", va="bottom")
    axes.text(5.5, 1.05, "copies over the bus", size=9, ha="center", va="bottom")
    axes.set(xlim=(-0.1, 11.1), ylim=(-0.1, 4.4))
    axes.axis("off")
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

            rows = {"host": [("1", 0.0, 0.1)], "kernels": [("1", 0.1, 0.3)]}
            figure = plot.device_timelines({"one step": rows}, title="The device works after the host")
            assert figure.axes[0].get_xlim()[1] >= 300
    """
    colours = {
        "host": ACTIVITY["handlers"], "copies": ACTIVITY["communication"], "kernels": ACTIVITY["compute"],
    }  # fmt: skip
    n_rows = sum(map(len, panels.values()))
    ratios = [len(rows) for rows in panels.values()]
    figure, axes = new_figure(title, width=7.4, height=0.9 + 0.42 * n_rows + 0.35 * len(panels))
    axes.remove()
    axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    longest = 0.0
    for panel, (name, rows) in zip(axes, panels.items(), strict=True):
        records = [record for row in rows.values() for record in row]
        first = min(start for _, start, _ in records)
        whole = 1e3 * (max(end for _, _, end in records) - first)
        longest = max(longest, whole)
        for place, (worker, row) in enumerate(rows.items()):
            for text, start, end in row:
                left, width = 1e3 * (start - first), 1e3 * (end - start)
                panel.barh(
                    place,
                    width,
                    left=left,
                    height=0.78,
                    color=colours[worker],
                    edgecolor="white",
                    linewidth=0.8,
                )
                ink = _on(colours[worker])
                panel.text(left + width / 2, place, text, size=9, ha="center", va="center", color=ink)
        panel.set_yticks(range(len(rows)), rows, fontsize=9)
        panel.set_ylim(len(rows) - 0.45, -0.55)
        panel.set_title(f"{name}: {whole:.0f} ms", fontsize=10, fontweight="normal", loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="x", labelsize=9)
    axes[-1].set_xlim(0, 1.02 * longest)
    axes[-1].set_xlabel("milliseconds", fontsize=10)
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

            stages = {"built": {"parameters": 8.0}, "forward": {"parameters": 8.0, "activations": 4.0}}
            figure = plot.memory_stages(stages, peak=14.0)
            assert figure.axes[0].get_ylabel() == "MiB"
    """
    colours = {
        "parameters": ACTIVITY["forward"],
        "input": ACTIVITY["idle"],
        "optimizer": ACTIVITY["optimizer"],
        "activations": ACTIVITY["data"],
        "gradients": ACTIVITY["backward"],
    }
    figure, axes = new_figure("Weights stay, activations and gradients take turns", width=7.4, height=3.4)
    for place, parts in enumerate(stages.values()):
        bottom = 0.0
        for name, colour in colours.items():
            size = parts.get(name, 0.0)
            if size < 0.5:  # a loss of four bytes
                continue
            axes.bar(place, size, bottom=bottom, width=0.82, color=colour, edgecolor="white")
            text = f"{name} {size:.0f}"
            axes.text(
                place, bottom + size / 2, text, size=9, ha="center", va="center", color=_on(colour)
            )  # fmt: skip
            bottom += size
        axes.text(place, bottom + 0.6, f"{bottom:.0f}", size=9, weight="bold", ha="center", va="bottom")
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

            figure = plot.gradient_sizes(torch.logspace(-9, -4, 100), scale=2.0**16)
            assert "zero in float16" in figure.axes[0].texts[0].get_text()
    """
    from math import log2

    from numpy import histogram

    sizes = gradient.detach().flatten().abs()
    sizes = sizes[sizes > 0].double().log2().numpy()
    title = "Scaling the loss moves the gradients to where float16 has numbers"
    figure, panels = new_figure(title, width=7.4, height=2.9, columns=2, sharex=True, sharey=True)
    lowest, border = -50, -25  # float16 rounds half of its smallest number, 2**-24, to zero
    for panel, factor, name in zip(panels, (1.0, scale), ("as they are", f"times {scale:,.0f}"), strict=True):
        powers = (sizes + log2(factor)).clip(lowest, 17)
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
        panel.set_title(name, fontsize=10, fontweight="normal", loc="left")
        panel.set_xlabel("size of a gradient")
    ticks = [-48, -36, -25, -14, 0, 16]
    panels[0].set_xticks(ticks, [f"2$^{{{tick}}}$" for tick in ticks])
    panels[0].set_xlim(lowest, 18)
    panels[0].set_ylabel("percent")
    return figure


def ranks_on_gpus(cases: dict[str, list[int]], n_gpus: int) -> Figure:
    """Which GPU each rank of a machine takes: a panel a rule, a tile a rank; where two meet, NCCL refuses.

    Args:
        cases: name of a rule, a ": " in it starts a line, to the GPU that each rank takes.
        n_gpus: GPUs that the machine has.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            figure = plot.ranks_on_gpus({"its own": [0, 1], "all the first": [0, 0]}, n_gpus=2)
            assert len(figure.axes) == 2
    """
    title = "NCCL wants one rank on each GPU"
    highest = max(max(gpus.count(gpu) for gpu in range(n_gpus)) for gpus in cases.values())  # the fullest GPU
    figure, panels = new_figure(
        title, width=7.4, height=1.7 + 0.35 * highest, columns=len(cases), sharey=True, squeeze=False,
        width_ratios=[max(n_gpus, max(gpus) + 1) for gpus in cases.values()],
    )  # fmt: skip
    for panel, (name, gpus) in zip(panels.flat, cases.items(), strict=True):
        panel.set_title(name.replace(": ", ":\n"), fontsize=10, fontweight="normal", loc="left")
        waiting: dict[int, int] = {}
        for rank, gpu in enumerate(gpus):
            place = waiting.get(gpu, 0)
            waiting[gpu] = place + 1
            _tile(panel, 1.15 * gpu, highest - 1 - place, 1, 1, RANK[rank], f"rank {rank}")
        for gpu in range(max(n_gpus, max(gpus) + 1)):
            there = gpu < n_gpus
            text = f"GPU {gpu}" if there else "no GPU"
            colour = "#444444" if there else "white"
            _tile(panel, 1.15 * gpu, highest + 0.1, 1, 0.75, colour, text)
        wrong = max(gpus) >= n_gpus or len(set(gpus)) < len(gpus)
        panel.text(
            0, highest + 1.35, "fails" if wrong else "works", size=9, weight="bold",
            color=ACTIVITY["backward_weight"] if wrong else "#117733",
        )  # fmt: skip
        panel.set(xlim=(-0.05, 1.15 * max(n_gpus, max(gpus) + 1) + 0.2), ylim=(highest + 1.5, -0.1))
        panel.axis("off")
    return figure


def _has_room(record: tuple, scale: float) -> bool:
    """Whether a box of :func:`schedules` is as wide as its number; ``scale`` makes seconds shares of the axis."""
    return scale * (record.end - record.start) > 0.0135 * len(str(record.microbatch))


def schedules(panels: dict, title: str, unit: str = "ms", row: float = 0.3) -> Figure:
    """Pipeline schedules under each other on one axis of time: a row a rank, a box a pass, its microbatch inside.

    Measured and simulated ones are drawn alike. Boxes with no room for the number stay without, and where that is most
    of a kind in a panel, all of it. What a rank leaves empty between the first pass of the panel and the last is grey:
    the bubble. Where a rank holds several stages, the passes of the later ones are paler.

    Args:
        panels: name of a schedule to records with rank, kind, start, end, microbatch and, where a rank holds
            several stages, stage: a step of ``timeline.actions()``, or simulated.
        title: the finding.
        unit: "ms" for records in seconds; any other word is written under the axis as it is, with the records' own
            numbers. Default: "ms".
        row: height of a rank's row in inches, smaller where there are many panels; below 0.2 without numbers.
            Default: 0.3.

    Returns:
        the figure.

    Raises:
        ValueError: if a panel holds no passes.

    Examples:
        .. code-block:: python

            from ignite_ddl import plot
            from ignite_ddl.lab.record import Record

            step = [Record(0, "forward", "0F0", 0, 1, None, 0, 0), Record(1, "forward", "1F0", 1, 2, None, 1, 0)]
            step += [Record(1, "backward", "1B0", 2, 4, None, 1, 0), Record(0, "backward", "0B0", 4, 6, None, 0, 0)]
            figure = plot.schedules({"no microbatches": step}, "Half of the time nobody works", unit="time units")
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    passes = ("forward", "backward", "backward_weight")
    scale = 1e3 if unit == "ms" else 1.0
    steps = {}
    for name, records in panels.items():
        taken = [record for record in records if record.kind in passes]
        if not taken:
            raise ValueError(f"panels[{name!r}] should hold forward or backward passes, but holds none")
        start, end = min(record.start for record in taken), max(record.end for record in taken)
        ranks = sorted({record.rank for record in taken})
        other = [record for record in records if record.kind == "communication"]
        steps[name] = start, end, ranks, [*other, *taken]
    rows = [len(ranks) for *_, ranks, _ in steps.values()]
    longest = scale * max(end - start for start, end, *_ in steps.values())
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            len(steps), figsize=(7.6, 1.05 + sum(row * n + 0.32 for n in rows)), layout="constrained",
            sharex=True, squeeze=False, height_ratios=[n + 0.5 for n in rows],
        )  # fmt: skip
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    kinds = set()
    for panel, (name, (start, end, ranks, records)) in zip(axes[:, 0], steps.items(), strict=True):
        row_of = {rank: place for place, rank in enumerate(ranks)}
        lowest = {}  # stage of each rank
        for record in records:
            if record.kind in passes:
                stage = getattr(record, "stage", None) or 0
                lowest[record.rank] = min(stage, lowest.get(record.rank, stage))
        rooms = {kind: [_has_room(r, scale / longest) for r in records if r.kind == kind] for kind in passes}
        numbered = [kind for kind, rooms_ in rooms.items() if row >= 0.2 and 2 * sum(rooms_) > len(rooms_)]
        for place in row_of.values():
            ground = (0, place - 0.42), scale * (end - start), 0.84
            panel.add_patch(Rectangle(*ground, facecolor=ACTIVITY["idle"], edgecolor="none", zorder=0))
        for record in records:
            left, right = max(record.start, start), min(record.end, end)
            if record.rank not in row_of or right <= left:
                continue
            later = record.kind in passes and (getattr(record, "stage", None) or 0) > lowest[record.rank]
            colour = _blend(ACTIVITY[record.kind], 0.45) if later else ACTIVITY[record.kind]
            width, middle = scale * (right - left), scale * ((left + right) / 2 - start)
            box = (scale * (left - start), row_of[record.rank] - 0.42), width, 0.84
            panel.add_patch(Rectangle(*box, facecolor=colour, edgecolor="white", linewidth=0.5))
            if record.kind in numbered and _has_room(record, scale / longest):
                panel.text(
                    middle,
                    row_of[record.rank],
                    str(record.microbatch),
                    ha="center",
                    va="center_baseline",
                    size=9,
                    color=_on(colour),
                )
            kinds.add(record.kind)
        panel.set_title(name, fontsize=10, fontweight="normal", loc="left", pad=3)
        panel.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        panel.set_ylim(len(ranks) - 0.5, -0.5)
        panel.spines["left"].set_visible(False)
        panel.tick_params(left=False)
    axes[-1, 0].set_xlim(0, longest)
    axes[-1, 0].set_xlabel("milliseconds" if unit == "ms" else unit)
    kinds = [kind for kind in ACTIVITY if kind in kinds | {"idle"}]
    split = "backward_weight" in kinds
    names = (
        {"backward": "backward (input, or whole)", "backward_weight": "backward (weights)"} if split else {}
    )
    handles = [Patch(color=ACTIVITY[kind], label=names.get(kind, kind)) for kind in kinds]
    figure.legend(
        handles=handles, loc="outside lower right", ncols=len(kinds), handlelength=1.2, frameon=False, fontsize=9
    )  # fmt: skip
    return figure


# --------------------------------------------------------------------------------------- chapter 03: XLA

_COMPILE = ACTIVITY["data"]  # a compiler's time, which only chapter 03 shows, always with its name in it


def eager_and_lazy(operations: list[str], rows: list[int]) -> Figure:
    """A drawing, not a measurement: who works when, step after step, run eagerly and run lazily.

    Args:
        operations: the operations of a step, in order.
        rows: the number of rows in each step's batch; a number not seen before is a new graph.

    Returns:
        the figure: above eager, below lazy, each with Python's row and the device's.

    Examples:
        .. code-block:: python

            eager_and_lazy(["matmul", "add", "relu"], [64, 64, 48])
    """
    title = "Lazy: note the operations down, compile each new shape once, run them as one"
    figure, axes = new_figure(title, width=7.6, height=3.1)
    axes.axis("off")
    narrow, wide, compiling = 0.5, 1.75, 6.0
    time = 0.0
    for step, n_rows in enumerate(rows):
        start = time
        for name in operations:
            _tile(axes, time, 0, narrow, 0.8, ACTIVITY["handlers"])
            _tile(axes, time + narrow, 0.9, wide, 0.8, ACTIVITY["compute"], name if step == 0 else "")
            time += narrow + wide
        _step_label(axes, start, time, -0.15, n_rows)
    axes.text(-0.3, 0.4, "Python asks", ha="right", va="center", size=9)
    axes.text(-0.3, 1.3, "device computes", ha="right", va="center", size=9)
    axes.text(-3.7, -0.5, "Eager", weight="bold", va="center")

    end, time = time, 0.0
    for step, n_rows in enumerate(rows):
        start = time
        for place in range(len(operations)):
            _tile(axes, time + 0.3 * place, 3.4, 0.3, 0.8, ACTIVITY["handlers"])
        time += 0.3 * len(operations)
        if n_rows not in rows[:step]:
            _tile(axes, time, 3.4, compiling, 0.8, _COMPILE, f"compile for {n_rows}")
            time += compiling
        width = 0.33 * wide * len(operations)
        _tile(axes, time, 4.3, width, 0.8, ACTIVITY["compute"], f"{len(operations)} as 1")
        time += width
        _step_label(axes, start, time, 3.25, n_rows)
    axes.text(-0.3, 3.8, "Python notes", ha="right", va="center", size=9)
    axes.text(-0.3, 4.7, "device computes", ha="right", va="center", size=9)
    axes.text(-3.7, 2.9, "Lazy", weight="bold", va="center")
    right = max(end, time)
    axes.annotate("", (right, 5.5), (0, 5.5), arrowprops={"arrowstyle": "->", "color": "#555555"})
    axes.text(right, 5.85, "time", ha="right", va="center", size=9)
    axes.set_xlim(-3.8, right + 0.2)
    axes.set_ylim(6.1, -0.9)
    return figure


def _step_label(axes: Axes, start: float, end: float, height: float, n_rows: int) -> None:
    axes.plot([start + 0.05, end - 0.1], [height, height], color="#999999", linewidth=1)
    axes.text((start + end) / 2, height - 0.3, f"{n_rows} rows", ha="center", va="center", size=9)


def compile_times(milliseconds: list[float], rows: list[int], compiled: list[bool], source: str) -> Figure:
    """Each step's time on a logarithmic axis; steps that compiled stand out.

    The title compares the medians of those that did, without the first of all, and of those that did not.

    Args:
        milliseconds: time of each step.
        rows: rows in each step's batch.
        compiled: whether a graph was compiled in that step.
        source: where the times come from, such as "recorded".

    Returns:
        the figure.
    """
    slow, fast = (
        [t for t, new in zip(milliseconds, compiled, strict=True) if new == kind] for kind in (True, False)
    )
    if compiled[0] and len(slow) > 1:
        slow = slow[1:]  # the first step of all also takes what a start takes
    ratio = statistics.median(slow) / statistics.median(fast)
    title = f"A step with a new shape takes some {float(f'{ratio:.2g}'):.0f} × as long ({source})"
    figure, axes = new_figure(title, height=2.8)
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
    """
    from matplotlib.patches import Rectangle

    figure, axes = new_figure(title, width=7.4, height=2.9)
    axes.axis("off")
    axes.set_aspect("equal")
    left = 0.0
    tallest = max(shape[0] for shape, _ in tensors.values())
    for name, (shape, tiles) in tensors.items():
        top = (tallest - shape[0]) / 2
        holders: dict[tuple, list[int]] = {}
        for device, tile in enumerate(tiles):
            holders.setdefault(tuple(map(tuple, tile)), []).append(device)
        for (rows, columns), devices in holders.items():
            x, y = left + columns[0], top + rows[0]
            width, height = columns[1] - columns[0], rows[1] - rows[0]
            for place in range(n_stripes := 1 if len(devices) == 1 else 4 * len(devices)):
                colour = RANK[devices[place % len(devices)]]
                stripe = (x + width * place / n_stripes, y), width / n_stripes, height
                axes.add_patch(Rectangle(*stripe, facecolor=colour, linewidth=0))
            axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="white", linewidth=3))
            ground = {"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.25"}
            named = " and ".join(map(str, devices))
            axes.text(x + width / 2, y + height / 2, named, size=9.5, ha="center", va="center", bbox=ground)
        axes.text(
            left + shape[1] / 2, top - 0.3, f"{name}\n{shape[0]} × {shape[1]}", ha="center", va="bottom", size=9.5
        )  # fmt: skip
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
    """
    from itertools import accumulate

    figure, axes = new_figure(title, width=7.4, height=3.2)
    floor, apart = 1e-17, 1.6  # labels stand at least so many powers of ten apart
    lowest = math.log10(floor)
    ends = sorted(gaps.items(), key=lambda item: max(item[1]))
    for place, (name, values) in enumerate(ends):
        colour = _ink(RANK[place % len(RANK)])
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


def hardest_negatives(anchors, found: dict[int, list]) -> Figure:
    """Images, and beside each the most similar image of another class that a batch holds: a column a batch size.

    Args:
        anchors: images, a tensor of shape (n, 1, height, width).
        found: batch size to n pairs (image of shape (1, height, width), cosine similarity).

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl import plot

            images = torch.rand(2, 1, 28, 28)
            figure = plot.hardest_negatives(images, {8: [(images[1], 0.4), (images[0], 0.4)]})
    """
    n = len(anchors)
    figure, axes = new_figure("The larger the batch, the closer its hardest negative", width=6.4, height=4.2)
    axes.axis("off")
    axes.set_aspect("equal")
    columns = [("the image", [(image, None) for image in anchors])]
    columns += [(f"in a batch of {size}", pairs) for size, pairs in found.items()]
    for column, (name, pairs) in enumerate(columns):
        left = 1.9 * column + (0.5 if column else 0)
        axes.text(left + 0.5, -0.12, name, ha="center", va="bottom", size=9.5)
        for row, (image, similarity) in enumerate(pairs):
            top = 1.08 * row
            axes.imshow(
                -image[0].numpy(), cmap="gray", extent=(left, left + 1, top + 1, top), interpolation="nearest"
            )
            if similarity is not None:
                axes.text(left + 1.06, top + 0.5, f"{similarity:.2f}", va="center", size=9.5)
    axes.set_xlim(-0.1, 1.9 * len(found) + 2)
    axes.set_ylim(1.08 * n, -0.5)
    return figure


def over_batch_sizes(curves: dict[str, dict[int, tuple[float, float]]], title: str, ylabel: str) -> Figure:
    """What becomes of a number as the batch grows: a labelled line a curve, with bars of two standard errors.

    Args:
        curves: name to batch size to (mean, standard error of the mean). An error of 0 draws no bar.
        title: what the figure shows.
        ylabel: what the number is, with its unit.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl import plot

            figure = plot.over_batch_sizes(
                {"same rate": {24: (0.8, 0.01), 600: (0.7, 0.02)}}, "It falls", "test accuracy"
            )
    """
    figure, axes = new_figure(title, width=7.2, height=3.3)
    sizes = sorted({size for points in curves.values() for size in points})
    colours = [ACTIVITY[name] for name in ("forward", "backward_weight", "optimizer", "communication")]

    def room(name, size):  # how far the nearest other curve is
        others = [points[size][0] for other, points in curves.items() if other != name and size in points]
        return min((abs(curves[name][size][0] - mean) for mean in others), default=1.0)

    for (name, points), colour in zip(curves.items(), colours, strict=False):
        means, errors = [mean for mean, _ in points.values()], [2 * error for _, error in points.values()]
        axes.errorbar(
            list(points), means, yerr=errors if any(errors) else None, color=colour, marker="o", markersize=5,
            linewidth=1.6, capsize=3,
        )  # fmt: skip
        where = max(list(points)[1:], key=lambda size, name=name: room(name, size))
        highest = points[where][0] >= max(other[where][0] for other in curves.values() if where in other)
        if where == sizes[-1]:
            offset, alignment = (9, 0), {"ha": "left", "va": "center"}
        elif highest:
            offset, alignment = (0, 8), {"ha": "center", "va": "bottom"}
        else:
            offset, alignment = (-9, -2), {"ha": "right", "va": "top"}
        axes.annotate(
            name, (where, points[where][0]), offset, textcoords="offset points", size=9.5, color=_ink(colour),
            **alignment,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] * 0.8, sizes[-1] * (sizes[-1] / sizes[0]) ** 0.45)
    axes.set_ylim(0, 1)
    axes.set_xlabel("batch size")
    axes.set_ylabel(ylabel)
    return figure


def batch_or_rate(noise: dict[str, list[float]], curves: dict[str, tuple[list, list]]) -> Figure:
    """Left the noise scale in each epoch, right the accuracy after it, with a band of two standard errors.

    Args:
        noise: name of a run to its noise scale in each epoch, in units of the learning rate.
        curves: name of a run to the means and the standard errors of its accuracy after each epoch, from epoch 1.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl import plot

            figure = plot.batch_or_rate({"decay": [2.0, 1.0]}, {"decay": ([0.6, 0.7], [0.01, 0.01])})
    """
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = new_figure(
        "A larger batch does what a smaller rate does",
        width=7.6,
        height=3.3,
        columns=2,
        width_ratios=[1, 1.5],
    )
    looks = [("communication", "-", 4.5), ("forward", "--", 1.8), ("backward_weight", "-", 1.8)]
    for (name, values), (activity, line, width) in zip(noise.items(), looks, strict=False):
        epochs = range(1, len(values) + 1)
        colour = ACTIVITY[activity]
        left.plot(epochs, values, drawstyle="steps-mid", color=colour, linestyle=line, linewidth=width)
        means, errors = curves[name]
        right.plot(epochs, means, color=colour, linestyle=line, linewidth=width, label=name)
        low = [mean - 2 * error for mean, error in zip(means, errors, strict=True)]
        high = [mean + 2 * error for mean, error in zip(means, errors, strict=True)]
        right.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
    left.set_ylim(0)
    left.set_ylabel("noise scale g (a learning rate)")
    right.set_ylabel("test accuracy ± 2 standard errors")
    right.legend(loc="lower right", frameon=False)
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def communication_share(steps: list, title: str) -> Figure:
    """A bar for each size of the world: seconds of compute, then of communication, with its share.

    Args:
        steps: what ``cost.data_parallel_step`` returns, one for each size.
        title: what the figure shows.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl import plot
            from ignite_ddl.lab import cost

            steps = [cost.data_parallel_step(n, **cost.RESNET50_P100) for n in (256, 1024)]
            figure = plot.communication_share(steps, "More ranks, more messages")
    """
    figure, axes = new_figure(title, width=7.0, height=0.42 * len(steps) + 1.2)
    for row, step in enumerate(steps):
        compute = 1e3 * (step.seconds - step.communication_seconds)
        communication = 1e3 * step.communication_seconds
        axes.barh(row, compute, color=ACTIVITY["compute"], height=0.7)
        axes.barh(row, communication, left=compute, color=ACTIVITY["communication"], height=0.7)
        axes.text(compute + communication + 3, row, f"{step.share:.0%}", va="center", size=9.5)
        if row == 0:
            for x, name, colour in (
                (compute / 2, "compute", ACTIVITY["compute"]),
                (compute + communication / 2, "communication", ACTIVITY["communication"]),
            ):
                axes.text(x, -0.5, name, ha="center", va="bottom", size=9.5, color=_ink(colour))
    axes.set_yticks(range(len(steps)), [f"{step.n_ranks} GPUs, batch {step.batch_size:,}" for step in steps])
    axes.set_ylim(len(steps) - 0.4, -1.1)
    axes.set_xlim(0, 1.15e3 * max(step.seconds for step in steps))
    axes.set_xlabel("milliseconds of a step (model)")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    return figure


# ------------------------------------------------------------------- chapter 10: the master and DDP


def step_rows(panels: dict[str, dict[str, list]], title: str) -> Figure:
    """Steps under each other on one axis of time: a panel a step, a row of boxes for whoever works in it.

    Args:
        panels: name of a step to its rows, name of a row to its records (kind, name, start and end in seconds),
            such as the records of one rank of a ``Timeline`` or a simulation. Every panel begins at its first
            record. Idle time is drawn only where a record says so.
        title: the finding.

    Returns:
        the figure; a dashed line marks each step's end, with its milliseconds.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost, simulate

            step = simulate.ddp_step(2, [4, 4], cost.Link(0, 1), forward_seconds=5, backward_seconds=10)
            figure = plot.step_rows({"DDP": {"rank 0": [r for r in step.records if r.rank == 0]}}, "It overlaps")
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch
    from matplotlib.textpath import TextPath

    begins = {n: min(r.start for row in rows.values() for r in row) for n, rows in panels.items()}
    ends = {n: max(r.end for row in rows.values() for r in row) for n, rows in panels.items()}
    longest = 1e3 * max(ends[name] - begins[name] for name in panels)
    counts = [len(rows) for rows in panels.values()]
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            len(panels), figsize=(7.6, 1.0 + sum(0.29 * n + 0.36 for n in counts)), layout="constrained",
            sharex=True, squeeze=False, height_ratios=[n + 0.5 for n in counts],
        )  # fmt: skip
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    kinds = set()
    for axis, (name, rows) in zip(axes[:, 0], panels.items(), strict=True):
        for place, records in enumerate(rows.values()):
            for record in records:
                left, width = 1e3 * (record.start - begins[name]), 1e3 * (record.end - record.start)
                colour = ACTIVITY[record.kind]
                style = {"color": colour, "edgecolor": "white", "linewidth": 0.5}
                axis.barh(place, width, left=left, height=0.84, **style)
                kinds.add(record.kind)
                points = 500 * width / (1.08 * longest)  # the axis is about 500 points wide
                names = [record.name] + [record.name[7:]] * record.name.startswith("bucket ")
                fits = (n for n in names if TextPath((0, 0), n, size=9).get_extents().width + 8 < points)
                if record.kind != "idle" and (name_that_fits := next(fits, "")):
                    axis.text(
                        left + width / 2, place, name_that_fits, ha="center", va="center_baseline", size=9,
                        color=_on(colour),
                    )  # fmt: skip
        end = 1e3 * (ends[name] - begins[name])
        axis.axvline(end, color="#222222", linewidth=1.2, linestyle="--")
        axis.annotate(
            f"{end:.0f} ms", (end, -0.5), (4, 0), textcoords="offset points", va="bottom", weight="bold",
            fontsize=9, annotation_clip=False,
        )  # fmt: skip
        axis.set_title(name, fontsize=10, fontweight="normal", loc="left", pad=3)
        axis.set_yticks(range(len(rows)), list(rows))
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.spines["left"].set_visible(False)
        axis.tick_params(left=False)
    axes[-1, 0].set_xlim(0, 1.08 * longest)
    axes[-1, 0].set_xlabel("milliseconds")
    handles = [Patch(color=ACTIVITY[kind], label=kind) for kind in ACTIVITY if kind in kinds]
    figure.legend(
        handles=handles, loc="outside lower right", ncols=len(handles), handlelength=1.2, frameon=False, fontsize=9
    )  # fmt: skip
    return figure


def bytes_through_a_rank(
    predicted: dict[str, dict[int, float]], counted: dict[str, dict[int, int]]
) -> Figure:
    """Bytes in and out of one rank in a step, against the size of the world: lines predicted, marks counted.

    Args:
        predicted: name of a scheme to world size to bytes.
        counted: name of a scheme to world size to bytes.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            plot.bytes_through_a_rank(
                {"master": {2: 2e6, 8: 14e6}, "rank of DDP": {2: 2e6, 8: 3.5e6}}, {"master": {2: 2_000_000}}
            )
    """
    figure, axes = new_figure("The master's bytes grow with the world, a DDP rank's level off", height=2.9)
    colours = (ACTIVITY["backward_weight"], ACTIVITY["forward"])
    for (name, of_world), colour, mark in zip(predicted.items(), colours, "sv", strict=False):
        worlds = list(of_world)
        axes.plot(worlds, [1e-6 * value for value in of_world.values()], color=colour, linewidth=2)
        found = counted.get(name, {})
        axes.plot(
            list(found), [1e-6 * value for value in found.values()], mark, color=colour, markersize=8,
            markeredgecolor="white",
        )  # fmt: skip
        axes.annotate(
            name, (worlds[-1], 1e-6 * of_world[worlds[-1]]), (7, 0), textcoords="offset points", va="center",
            color=colour, weight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.set_xticks(sorted({n for of_world in predicted.values() for n in of_world}))
    axes.set_ylim(0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("MB in and out, a step")
    axes.text(0.02, 0.97, "lines: predicted\nmarks: counted", transform=axes.transAxes, fontsize=9, va="top")
    return figure


def step_shares(schemes: dict[str, dict[int, dict[str, float]]], title: str) -> Figure:
    """Where a step's time goes, against the size of the world: a panel a scheme, a bar a world, stacked.

    Args:
        schemes: name of a scheme to world size to seconds by kind ("compute", "communication"), bottom first.
        title: the finding.

    Returns:
        the figure; the panels share the axis of time, and each bar has its milliseconds above it.

    Examples:
        .. code-block:: python

            alone = {"compute": 0.3, "communication": 0.0}
            plot.step_shares({"master": {1: alone}, "DDP": {1: alone}}, "Alone they are the same")
    """
    figure, axes = new_figure(title, height=2.9, columns=max(2, len(schemes)), sharey=True)
    for panel, (name, worlds) in zip(axes, schemes.items(), strict=False):
        for place, parts in enumerate(worlds.values()):
            below = 0.0
            for kind, seconds in parts.items():
                panel.bar(place, 1e3 * seconds, bottom=below, width=0.74, color=ACTIVITY[kind])
                below += 1e3 * seconds
            panel.annotate(
                f"{below:.0f}", (place, below), (0, 2), textcoords="offset points", ha="center", fontsize=9
            )
        panel.set_title(name, fontsize=10, fontweight="normal", loc="left", pad=9)
        panel.set_xticks(range(len(worlds)), [str(n) for n in worlds])
        panel.set_xlabel("ranks")
    for panel in axes[len(schemes) :]:
        panel.axis("off")
    axes[0].set_ylabel("milliseconds a step")
    axes[0].set_ylim(0, 1.12 * axes[0].get_ylim()[1])
    largest = next(iter(schemes.values()))
    place, parts = len(largest) - 1, largest[max(largest)]
    below = 0.0
    for kind, seconds in parts.items():
        if seconds > 0.2 * sum(parts.values()):
            axes[0].text(
                place, below + 5e2 * seconds, kind, ha="center", va="center", rotation=90, size=9,
                color=_on(ACTIVITY[kind]),
            )  # fmt: skip
        below += 1e3 * seconds
    first = largest[min(largest)]
    axes[0].text(
        0, 5e2 * first["compute"], "compute", ha="center", va="center", rotation=90, size=9,
        color=_on(ACTIVITY["compute"]),
    )  # fmt: skip
    return figure


def zero_stages(memories: list) -> Figure:
    """Who holds what of the model's states under ZeRO: a panel a stage, a row a rank, filled where it holds a slice.

    Args:
        memories: ``cost.zero_memory(1, 4, stage)`` for the stages 0 to 3: bytes a parameter on four ranks.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            figure = plot.zero_stages([ddl.cost.zero_memory(1, 4, stage) for stage in range(4)])
            assert figure.axes[0].texts[0].get_text() == "data parallel: 16 bytes a parameter"
    """
    names, n_ranks = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"), 4
    figure, axes = new_figure("From stage to stage, a rank keeps only its shard of one thing more", 7.4, 3.9)
    for place, (name, memory) in enumerate(zip(names, memories, strict=True)):
        left, top = 19.5 * (place % 2), 6.6 * (place // 2)
        axes.text(left, top - 0.5, f"{name}: {memory.total:.3g} bytes a parameter", size=10, weight="bold")
        for rank in range(n_ranks):
            if left == 0:
                axes.text(-0.4, top + rank + 0.42, f"rank {rank}", size=9, ha="right", va="center")
            x = left
            for part, colour in _ZERO_PARTS.items():
                size, mine = getattr(memories[0], part), getattr(memory, part)
                for owner in range(n_ranks):
                    filled = mine == size or owner == rank
                    step = size / n_ranks
                    _box(axes, x, top + rank, step - 0.06, 0.84, colour if filled else ACTIVITY["idle"])
                    x += step
                x += 0.3
    of_optimizer = "optimizer: copy, momentum, variance"
    for x, down, label in ((1.0, 0.0, "weights"), (3.5, 0.75, "gradients"), (10.6, 0.0, of_optimizer)):
        colour = _ink(_ZERO_PARTS[label.split(":")[0]])
        for left in (0, 19.5):
            axes.text(left + x, 10.75 + down, label, size=9, ha="center", va="top", color=colour)
    axes.set(xlim=(-2.8, 36.3), ylim=(12.3, -1.4))
    axes.axis("off")
    return figure


_ZERO_PARTS = {
    "weights": ACTIVITY["forward"],
    "gradients": ACTIVITY["backward"],
    "optimizer": ACTIVITY["optimizer"],
}


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

            memories = [ddl.cost.zero_memory(1, 4, stage, 4, 4, 8) for stage in range(4)]
            measured = [[16.3] * 4, [10.3] * 4, [7.3] * 4, [4.9] * 4]
            figure = plot.zero_peaks(memories, [0.25, 0.25, 0.25, 1.0], measured)
            assert figure.axes[0].get_ylabel() == "MiB on a rank"
    """
    title = "States shrink with every stage, the room to work in does not"
    figure, axes = new_figure(title, width=7.2, height=3.4)
    bars = zip(memories, room, peaks, strict=True)
    for place, (memory, working, measured) in enumerate(bars):
        parts = [(name, getattr(memory, name), colour) for name, colour in _ZERO_PARTS.items()]
        bottom = 0.0
        for name, size, colour in [*parts, ("room", working, ACTIVITY["data"])]:
            axes.bar(place, size, bottom=bottom, width=0.62, color=colour, edgecolor="white")
            if size >= 0.9:
                text, middle = f"{name} {size:g}", bottom + size / 2
                axes.text(place, middle, text, size=9, ha="center", va="center", color=_on(colour))
            bottom += size
        beside = [place + 0.36 + 0.05 * rank for rank in range(len(measured))]
        axes.plot(beside, measured, "o", color="#222222", markersize=4)
        axes.text(place, bottom + 0.5, f"{bottom:g}", size=9, weight="bold", ha="center", va="bottom")
    highest = max(peaks[0])
    axes.annotate(
        "dots: measured, a rank each", (0.56, highest), (0.8, highest), size=9, va="center",
        arrowprops={"arrowstyle": "-", "color": "#8C8C8C"},
    )  # fmt: skip
    axes.set_xticks(range(len(memories)), ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"][: len(memories)])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 1.15 * highest)
    axes.set_ylabel("MiB on a rank")
    return figure


# --------------------------------------------------------------------------------------- chapter 18: pipelines


def activations_by_rank(
    measured: dict[str, list[float]], predicted: dict[str, list[float]], title: str
) -> Figure:
    """What the ranks of a pipeline keep for backward at most: a panel a schedule, a bar a rank, a line where predicted.

    Args:
        measured: name of a schedule to bytes, one for each rank.
        predicted: the same.
        title: the finding.

    Returns:
        the figure; its panels share the axis of bytes.

    Examples:
        .. code-block:: python

            plot.activations_by_rank({"gpipe": [8e3, 8e3], "1f1b": [2e3, 1e3]}, {"1f1b": [2e3, 1e3]}, "1F1B keeps less")
    """
    figure, axes = new_figure(title, height=2.7, columns=max(2, len(measured)), sharey=True)
    for panel, (name, bars) in zip(axes, measured.items(), strict=False):
        for rank, value in enumerate(bars):
            panel.bar(rank, 1e-3 * value, width=0.7, color=RANK[rank])
        for rank, value in enumerate(predicted.get(name, [])):
            panel.plot([rank - 0.45, rank + 0.45], [1e-3 * value] * 2, color="#222222", linewidth=2)
        panel.set_title(name, fontsize=10, fontweight="normal", loc="left")
        panel.set_xticks(range(len(bars)), [f"rank {rank}" for rank in range(len(bars))])
        panel.set_ylim(0, 1.15e-3 * max(value for values in measured.values() for value in values))
    axes[0].set_ylabel("kB of activations, at most")
    last = axes[len(measured) - 1]
    last.text(
        0.97, 0.95, "bars: measured\nblack lines: predicted", transform=last.transAxes, fontsize=9, ha="right",
        va="top",
    )  # fmt: skip
    return figure


def step_by_microbatches(simulated: dict[int, float], measured: dict[int, float], title: str) -> Figure:
    """How long a pipeline step takes, against its number of microbatches: a simulated line, measured marks.

    Args:
        simulated: number of microbatches to seconds.
        measured: number of microbatches to seconds.
        title: the finding.

    Returns:
        the figure; the axis of microbatches is logarithmic, and what is fastest has its time above it.

    Examples:
        .. code-block:: python

            plot.step_by_microbatches({1: 0.3, 4: 0.17, 12: 0.2}, {1: 0.31, 4: 0.18, 12: 0.21}, "In between is best")
    """
    figure, axes = new_figure(title, height=2.9)
    counts = sorted(simulated)
    axes.plot(counts, [1e3 * simulated[m] for m in counts], color=ACTIVITY["forward"], linewidth=2)
    axes.plot(
        list(measured), [1e3 * value for value in measured.values()], "o", color=ACTIVITY["backward_weight"],
        markersize=8, markeredgecolor="white",
    )  # fmt: skip
    best = min(measured, key=measured.get)
    axes.annotate(
        f"{best} microbatches\n{1e3 * measured[best]:.0f} ms", (best, 1e3 * measured[best]), (0, 12),
        textcoords="offset points", ha="center", fontsize=9,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({*counts, *measured}), [str(m) for m in sorted({*counts, *measured})])
    axes.minorticks_off()
    axes.set_ylim(0)
    axes.set_xlabel("microbatches")
    axes.set_ylabel("milliseconds a step")
    axes.text(0.5, 0.1, "line: simulated, marks: measured", transform=axes.transAxes, fontsize=9, ha="center")
    return figure


def server_scheme(n_workers: int, weight_bytes: int, row_bytes: int) -> Figure:
    """The parameter server's step: the server above, the workers, the data's own node below, numbered arrows.

    Args:
        n_workers: number of workers, at most 8.
        weight_bytes: bytes of the parameters; a gradient has as many.
        row_bytes: bytes of the rows that one worker gets.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            plot.server_scheme(4, weight_bytes=63_680, row_bytes=25_120)
    """
    figure, axes = new_figure("One step: all parameters pass through one machine", width=7.6, height=3.3)
    axes.axis("off")
    down, up, rows = (_ink(ACTIVITY[kind]) for kind in ("communication", "backward", "data"))
    left, right = 3.4, 10.0
    _box(axes, left, 0, right - left, 0.8, ACTIVITY["optimizer"], "parameter server: holds the parameters")
    _box(axes, left, 4.3, right - left, 0.8, ACTIVITY["data"], "the data's node: holds all rows")
    step = (right - left) / n_workers
    for worker in range(n_workers):
        middle = left + (worker + 0.5) * step
        _box(axes, middle - 0.42 * step, 2.3, 0.84 * step, 0.8, RANK[worker], f"worker {worker}")
        for x, start, end, colour in (
            (middle - 0.14 * step, 0.8, 2.3, down),
            (middle + 0.14 * step, 2.3, 0.8, up),
            (middle, 4.3, 3.1, rows),
        ):
            style = {"arrowstyle": "-|>", "color": colour, "linewidth": 2, "mutation_scale": 13}
            axes.annotate("", (x, end), (x, start), arrowprops=style | {"shrinkA": 0, "shrinkB": 0})
    for height, text, colour in (
        (0.4, "4  average, update", _ink(ACTIVITY["optimizer"])),
        (1.22, f"1  parameters down, {weight_bytes:,} bytes each", down),
        (1.88, f"3  gradients up, {weight_bytes:,} bytes each", up),
        (2.7, "2  forward, backward", "#222222"),
        (3.7, f"1  rows up, {row_bytes:,} bytes each", rows),
    ):
        axes.text(left - 0.15, height, text, ha="right", va="center", size=9, weight="bold", color=colour)
    axes.set_xlim(-1.0, right + 0.05)
    axes.set_ylim(5.15, -0.05)
    return figure


def by_workers(
    predicted: dict[str, dict[int, float]],
    measured: dict[str, dict[int, float]],
    title: str,
    ylabel: str,
    note: str,
) -> Figure:
    """Anything against the number of workers, both axes logarithmic: lines predicted, marks measured.

    Args:
        predicted: name of a scheme to number of workers to value; the line is named where it ends.
        measured: name of a scheme to number of workers to value.
        title: the finding.
        ylabel: what the values are, with their unit.
        note: what lines and marks are.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            lines = {"one server": {1: 2, 4: 8, 64: 128}, "ring": {2: 2, 4: 3, 64: 3.94}}
            plot.by_workers(lines, {"one server": {4: 8}}, "It grows", "bytes", "lines: predicted")
    """
    figure, axes = new_figure(title, height=3.1)
    axes.set(xscale="log", yscale="log")
    colours = ACTIVITY["backward_weight"], ACTIVITY["forward"], ACTIVITY["communication"]
    for (name, values), colour, mark in zip(predicted.items(), colours, "sov", strict=False):
        axes.plot(list(values), list(values.values()), color=colour, linewidth=2)
        found = measured.get(name, {})
        axes.plot(
            list(found), list(found.values()), mark, color=colour, markersize=8, markeredgecolor="white",
        )  # fmt: skip
        axes.annotate(
            name, (max(values), values[max(values)]), (7, 0), textcoords="offset points", va="center",
            color=_ink(colour), weight="bold", annotation_clip=False,
        )  # fmt: skip
    workers = sorted({n for values in predicted.values() for n in values})
    axes.set_xticks(workers, [str(n) for n in workers])
    everything = [value for values in predicted.values() for value in values.values()]
    steps = [tick * 10**power for power in range(-3, 7) for tick in (1, 2, 5)]
    axes.set_yticks([tick for tick in steps if min(everything) / 1.3 <= tick <= 1.3 * max(everything)])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("workers")
    axes.set_ylabel(ylabel)
    axes.text(0.02, 0.97, note, transform=axes.transAxes, fontsize=9, va="top")
    return figure


def server_shares(panels: dict[str, list[dict[str, int]]], title: str) -> Figure:
    """What each server holds: a panel a model, a bar a server, cut into parameters, with its share of all bytes.

    Args:
        panels: name of a model to a list with a dict a server: parameter to bytes.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            plot.server_shares({"a net": [{"0.weight": 62_720}, {"0.bias": 80, "2.weight": 880}]}, "One has it all")
    """
    n_servers = max(len(servers) for servers in panels.values())
    figure, axes = new_figure(title, width=7.4, height=1.2 + 0.42 * n_servers, columns=max(2, len(panels)))
    shades = ACTIVITY["forward"], _blend(ACTIVITY["forward"], 0.62)
    for panel, (name, servers) in zip(axes, panels.items(), strict=False):
        total = sum(sum(share.values()) for share in servers)
        for place, share in enumerate(servers):
            left = 0.0
            for index, (parameter, size) in enumerate(share.items()):
                width, colour = 100 * size / total, shades[index % 2]
                _box(panel, left, place - 0.39, width, 0.78, colour, parameter if width >= 20 else "")
                left += width
            panel.text(left + 2, place, f"{left:.1f} %", va="center", fontsize=9, weight="bold")
        panel.set_title(name, fontsize=10, fontweight="normal", loc="left")
        panel.set_yticks(range(len(servers)), [f"server {i}" for i in range(len(servers))])
        panel.set_xlim(0, 122)
        panel.set_ylim(n_servers - 0.5, -0.5)
        panel.set_xticks([0, 50, 100])
        panel.set_xlabel("% of the model's bytes")
        panel.spines["left"].set_visible(False)
        panel.tick_params(axis="y", left=False)
    for panel in axes[len(panels) :]:
        panel.axis("off")
    return figure


# ------------------------------------------------------------------- chapter 13: asynchronous updates


def server_rows(panels: dict[str, tuple[list, list]], title: str, end: float, unit: str = "ms") -> Figure:
    """Workers and their gradients: a panel a mode, a row a worker, a box from each pull to its push.

    A box holds its gradient's staleness. Grey is waiting for a pull, a dashed box a gradient that came too late, a
    green line the update that a gradient went into.

    Args:
        panels: name of a mode to its applied and its dropped gradients: records of ``simulate.parameter_server``, or
            those of ``ParameterServer.statistics()``.
        title: the finding.
        end: draws up to this second.
        unit: "ms" for records in seconds; any other word stands under the axis, with the records' own numbers.
            Default: "ms".

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import simulate

            run = simulate.parameter_server(2, [1.0, 3.0], 6, mode="async")
            figure = plot.server_rows({"async": (run.updates, run.dropped)}, "One is slow", end=4, unit="time units")
    """
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    scale = 1e3 if unit == "ms" else 1.0
    runs = {
        name: [[_fields(record) for record in records] for records in lists] for name, lists in panels.items()
    }
    rows = [1 + max(r["worker"] for records in lists for r in records) for lists in runs.values()]
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            len(runs), figsize=(7.4, 1.0 + sum(0.27 * n + 0.33 for n in rows)), layout="constrained",
            sharex=True, squeeze=False, height_ratios=rows,
        )  # fmt: skip
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axis, (name, (updates, dropped)), n_rows in zip(axes[:, 0], runs.items(), rows, strict=True):
        for record, late in [(r, False) for r in updates] + [(r, True) for r in dropped]:
            left, right = min(record["pulled_at"], end), min(record["pushed_at"], end)
            row, since = record["worker"], min(record["pulled_at"] - record["waited"], end)
            axis.barh(row, scale * (left - since), left=scale * since, height=0.72, color=ACTIVITY["idle"])
            look = {"color": "white" if late else ACTIVITY["compute"], "edgecolor": "white", "linewidth": 0.8}
            if late:
                look |= {"edgecolor": ACTIVITY["backward_weight"], "linestyle": "--"}
            axis.barh(row, scale * (right - left), left=scale * left, height=0.72, **look)
            if right - left > 0.03 * end:
                text = str(record["staleness"]) if not late else "dropped" * (right - left > 0.1 * end) or "×"
                axis.text(
                    scale * (left + right) / 2, row, text, ha="center", va="center_baseline", size=9,
                    color=_ink(ACTIVITY["backward_weight"]) if late else "white",
                )  # fmt: skip
            if not late and record["applied_at"] <= end:
                at = [scale * record["applied_at"]] * 2
                axis.plot(at, [row - 0.44, row + 0.44], color=ACTIVITY["optimizer"], linewidth=2.2)
        axis.set_title(name, fontsize=10, fontweight="normal", loc="left", pad=3)
        axis.set_yticks(range(n_rows), [f"worker {worker}" for worker in range(n_rows)])
        axis.set_ylim(n_rows - 0.5, -0.5)
        axis.spines["left"].set_visible(False)
        axis.tick_params(left=False)
    axes[-1, 0].set_xlim(0, scale * end)
    axes[-1, 0].set_xlabel("milliseconds" if unit == "ms" else unit)
    handles = [
        Patch(color=ACTIVITY["compute"], label="a gradient, its staleness"),
        Patch(color=ACTIVITY["idle"], label="waits"),
        Line2D([], [], color=ACTIVITY["optimizer"], label="update"),
    ]
    if any(lists[1] for lists in runs.values()):
        edge = ACTIVITY["backward_weight"]
        handles.insert(2, Patch(facecolor="white", edgecolor=edge, linestyle="--", label="too late, dropped"))
    figure.legend(
        handles=handles, loc="outside lower right", ncols=len(handles), handlelength=1.2, frameon=False, fontsize=9
    )  # fmt: skip
    return figure


def _fields(record) -> dict:
    return record if isinstance(record, dict) else {**record._asdict(), "staleness": record.staleness}


def stale_descent(paths: dict[int, list[float]], found: dict[int, float]) -> Figure:
    """Left a weight on its way down a bowl, for some stalenesses; right the largest rate that is stable.

    Args:
        paths: staleness to the weight after each step, at one rate.
        found: staleness to the largest stable rate that was found. The line is 2 sin(π / (4 · staleness + 2)), from
            S. Levin and R. May, A note on difference-delay equations, 1976.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            figure = plot.stale_descent({0: [1.0, 0.2, 0.04], 1: [1.0, 1.0, 0.2]}, {0: 2.0, 1: 1.0})
    """
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = new_figure(
        "The older the gradient, the smaller the rate it bears", width=7.6, columns=2, width_ratios=[1.35, 1]
    )
    colours = [ACTIVITY[kind] for kind in ("optimizer", "forward", "backward_weight")]
    left.axhline(0, color="#BBBBBB", linewidth=0.8)
    for (staleness, path), colour in zip(paths.items(), colours, strict=False):
        left.plot(path, color=colour, linewidth=1.7)
        left.annotate(
            f"staleness {staleness}", (len(path) - 1, path[-1]), (5, 0), textcoords="offset points", va="center",
            color=_ink(colour), size=9.5, annotation_clip=False,
        )  # fmt: skip
    left.set_xlim(0, 1.36 * (max(map(len, paths.values())) - 1))
    left.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    left.set_xlabel("step")
    left.set_ylabel("weight (best: 0)")
    line = range(max(found) + 1)
    right.plot(line, [2 * math.sin(math.pi / (4 * s + 2)) for s in line], color="#8C8C8C", linewidth=1.4)
    right.text(
        0.97, 0.52, "line: 2 sin(π / (4s + 2)),\ns the staleness", transform=right.transAxes, ha="right", va="bottom",
        size=9.5, color="#666666",
    )  # fmt: skip
    right.plot(list(found), list(found.values()), "o", color=ACTIVITY["forward"], markersize=6)
    right.annotate("found", (1, found.get(1, 1.0)), (10, 8), textcoords="offset points", size=9.5)
    right.set_ylim(0)
    right.set_xlabel("staleness (updates)")
    right.set_ylabel("largest stable rate")
    return figure


def staleness_histogram(runs: dict[str, list[dict]], title: str) -> Figure:
    """How many gradients of each staleness, a panel a run, stacked by worker; a dashed line marks the mean.

    Args:
        runs: name of a run to its records, each with "worker" and "staleness", as ``ParameterServer.statistics()``
            gives them.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            records = [{"worker": 0, "staleness": 1}, {"worker": 1, "staleness": 1}, {"worker": 0, "staleness": 0}]
            figure = plot.staleness_histogram({"two workers": records}, "Mostly one")
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(title, width=7.6, height=3.1, columns=len(runs), sharex=True)
    axes = [axes] if len(runs) == 1 else axes
    workers = sorted({record["worker"] for records in runs.values() for record in records})
    for place, (axis, (name, records)) in enumerate(zip(axes, runs.items(), strict=True)):
        bottom = [0] * (max(record["staleness"] for record in records) + 1)
        for worker in workers:
            counts = [0] * len(bottom)
            for record in records:
                counts[record["staleness"]] += record["worker"] == worker
            axis.bar(
                range(len(bottom)), counts, 0.86, bottom=bottom, color=RANK[worker], label=f"worker {worker}"
            )
            bottom = [below + count for below, count in zip(bottom, counts, strict=True)]
        mean = sum(record["staleness"] for record in records) / len(records)
        axis.axvline(mean, color="#222222", linewidth=1.2, linestyle="--")
        axis.set_ylim(0, 1.18 * max(bottom))
        axis.annotate(
            f"mean {mean:.1f}",
            (mean, 1.17 * max(bottom)),
            (5, 0),
            textcoords="offset points",
            va="top",
            size=9.5,
        )
        if len(runs) > 1:
            axis.set_title(name, fontsize=10, fontweight="normal")
        axis.set_xlabel("staleness (updates)")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if place == 0:
            axis.set_ylabel("gradients")
    axes[-1].legend(loc="upper right", frameon=False, fontsize=9)
    return figure


def over_staleness(
    curves: dict[str, dict[int, tuple[float, float]]], title: str, xlabel: str, ylabel: str
) -> Figure:
    """What becomes of a share as staleness, or the bound on it, grows: a labelled line a curve.

    Args:
        curves: name to whole number to (mean, standard error); bars are two standard errors, an error of 0 draws none.
            The numbers stand at equal distances.
        title: the finding.
        xlabel: what the whole number is.
        ylabel: what the share is; its axis is in percent, from 0.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            curve = {1: (0.73, 0.01), 16: (0.5, 0.02)}
            figure = plot.over_staleness({"rate 0.1": curve}, "It falls", "workers", "test accuracy")
    """
    from matplotlib.ticker import PercentFormatter

    figure, axes = new_figure(title, width=7.2, height=3.1)
    places = sorted({number for points in curves.values() for number in points})
    colours = [ACTIVITY[kind] for kind in ("forward", "backward_weight", "optimizer", "communication")]
    for (name, points), colour in zip(curves.items(), colours, strict=False):
        at = [places.index(number) for number in points]
        means, errors = [mean for mean, _ in points.values()], [2 * error for _, error in points.values()]
        axes.errorbar(
            at, means, yerr=errors if any(errors) else None, color=colour, marker="o", markersize=5,
            linewidth=1.7, capsize=3,
        )  # fmt: skip
        axes.annotate(
            name,
            (at[-1], means[-1]),
            (9, 0),
            textcoords="offset points",
            va="center",
            color=_ink(colour),
            size=9.5,
        )
    axes.set_xticks(range(len(places)), [str(number) for number in places])
    axes.set_xlim(-0.3, 1.36 * (len(places) - 1))
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel(xlabel, x=0.37)
    axes.set_ylabel(ylabel)
    return figure


def time_to_accuracy(
    curves: dict[str, list[tuple[float, float]]], reached: dict[str, float], target: float, title: str
) -> Figure:
    """Accuracy against seconds, a line a mode, and when each has reached the target.

    Args:
        curves: name of a mode to its points (seconds, accuracy), in order of time.
        reached: name of a mode to the seconds when it had the target.
        target: accuracy, from 0 to 1.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            curves = {"sync": [(0, 0.1), (2, 0.7)], "async": [(0, 0.1), (1, 0.7)]}
            figure = plot.time_to_accuracy(curves, {"sync": 1.9, "async": 0.9}, 0.65, "Nobody waits for the slow")
    """
    from matplotlib.ticker import PercentFormatter

    figure, axes = new_figure(title, width=7.4, height=3.6)
    kinds = {"sync": "forward", "async": "backward_weight", "bounded": "communication"}
    axes.axhline(target, color="#8C8C8C", linewidth=1, linestyle="--")
    order = sorted(reached, key=reached.get)
    for name, points in curves.items():
        colour = ACTIVITY[kinds.get(name.split()[0], "optimizer")]
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=name)
        axes.plot([reached[name]] * 2, [0, target], color=colour, linewidth=1, linestyle=":")
        axes.plot(reached[name], target, "o", color=colour, markersize=6)
        axes.annotate(
            f"{name}  {reached[name]:.1f} s", (reached[name], 0.3 - 0.075 * order.index(name)), (5, 0),
            textcoords="offset points", va="center", color=_ink(colour), size=9.5, weight="bold",
            bbox={"color": "white", "pad": 1},
        )  # fmt: skip
    axes.annotate(f"{target:.0%}", (0, target), (4, 3), textcoords="offset points", size=9.5)
    axes.set_xlim(0)
    axes.set_ylim(0, 1.25 * max(value for points in curves.values() for _, value in points))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("seconds")
    axes.set_ylabel("test accuracy")
    return figure


def backup_workers(
    arrivals: dict[int, float], paper_arrivals: dict[int, float], rates: dict[int, float], paper_b: int
) -> Figure:
    """Left how often the last gradients are in in time; right how many more gradients a second count, by backups.

    Args:
        arrivals: k to the share of steps in which the k-th gradient came in time, simulated.
        paper_arrivals: the same, of the paper.
        rates: b to gradients that count in a second, simulated; drawn in percent of those with the smallest b.
        paper_b: the paper's best b.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            figure = plot.backup_workers({98: 0.8, 99: 0.6, 100: 0.3}, {98: 0.8}, {0: 48.0, 4: 50.3, 8: 49.7}, 4)
    """
    from matplotlib.ticker import PercentFormatter

    best = max(rates, key=rates.get)
    figure, (left, right) = new_figure(
        f"100 workers: with {best} backups the most gradients count", width=7.6, height=3.2, columns=2
    )
    left.plot(list(arrivals), list(arrivals.values()), color=ACTIVITY["forward"], linewidth=1.8)
    left.plot(
        list(paper_arrivals),
        list(paper_arrivals.values()),
        "D",
        color=ACTIVITY["backward_weight"],
        markersize=7,
    )
    first = min(arrivals)
    left.annotate(
        "simulated", (first, arrivals[first]), (2, -14), textcoords="offset points", size=9.5,
        color=_ink(ACTIVITY["forward"]),
    )  # fmt: skip
    for k, share in paper_arrivals.items():
        left.annotate(
            f"paper: {share:.0%}", (k, share), (-8, -3), textcoords="offset points", size=9.5, ha="right",
            va="top", color=_ink(ACTIVITY["backward_weight"]),
        )  # fmt: skip
    left.set_ylim(0, 1.05)
    left.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    left.set_xlabel("k-th of 100 gradients")
    left.set_ylabel("steps in which it is in by 2 s")
    gains = {b: 100 * (rate / rates[min(rates)] - 1) for b, rate in rates.items()}
    right.plot(
        list(gains), list(gains.values()), color=ACTIVITY["forward"], marker="o", markersize=5, linewidth=1.8
    )
    right.plot(best, gains[best], "o", color=ACTIVITY["optimizer"], markersize=10)
    right.axvline(paper_b, color=ACTIVITY["backward_weight"], linewidth=1.2, linestyle="--")
    right.annotate(
        f"paper: b = {paper_b}", (paper_b, min(gains.values())), (5, 2), textcoords="offset points", size=9.5,
        color=_ink(ACTIVITY["backward_weight"]),
    )  # fmt: skip
    low, high = min(gains.values()), max(gains.values())
    right.set_ylim(low - 0.1 * (high - low), high + 0.15 * (high - low))
    right.yaxis.set_major_formatter("{x:+g} %")
    right.set_xlabel("backups b, of 100 workers")
    right.set_ylabel(f"gradients that count, a second,\nbeyond those with b = {min(rates)}")
    return figure


# ------------------------------------------------------------------- chapter 19: pipeline schedules


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

            plot.weight_versions([[0, 0, 1], [0, 1, 2]], [[0, 1, 2], [0, 1, 2]], "Rank 0 is one update behind")
    """
    n_ranks, count = len(used), len(used[0])
    figure, axes = new_figure(title, width=7.4, height=1.1 + 0.42 * n_ranks)
    behind = [
        [late - early for early, late in zip(*pair, strict=True)] for pair in zip(used, newest, strict=True)
    ]
    most = max(1, *(max(row) for row in behind))
    for rank in range(n_ranks):
        for m in range(count):
            colour = _blend(ACTIVITY["backward_weight"], 0.08 + 0.8 * behind[rank][m] / most)
            _tile(axes, m, rank, 1, 0.92, colour, f"{used[rank][m]} → {newest[rank][m]}")
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
        panels: name of a setting to ways to train (three at most), each with its runs; a run is a list of
            (time, loss).
        title: the finding.
        time: what the axis of time counts.

    Returns:
        the figure; its panels share the axis of losses.

    Examples:
        .. code-block:: python

            runs = {"1F1B": [[(7, 2.3), (14, 2.0)]], "PipeDream": [[(4, 2.3), (14, 1.6)]]}
            plot.loss_over_time({"learning rate 0.01": runs}, "PipeDream is ahead", "turns")
    """
    figure, axes = new_figure(title, height=3.2, columns=max(2, len(panels)), sharey=True)
    looks = (("-", "#222222"), ("-", ACTIVITY["backward_weight"]), ("--", ACTIVITY["forward"]))
    for panel, (name, ways) in zip(axes, panels.items(), strict=False):
        for (way, lines), (line, colour) in zip(ways.items(), looks, strict=False):
            for seed, points in enumerate(lines):
                panel.plot(
                    *zip(*points, strict=True), line, color=colour, linewidth=1.4, alpha=0.8,
                    label=way if seed == 0 else None,
                )  # fmt: skip
        panel.set_title(name, fontsize=10, fontweight="normal", loc="left")
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

            plot.time_and_memory({"gpipe": (0.27, [8, 8]), "1f1b": (0.27, [2, 1])}, "1F1B keeps less")
    """
    figure, axes = new_figure(title, height=3.4)
    places: dict[tuple[float, float], list[str]] = {}
    for name, (bubble, kept) in schedules.items():
        places.setdefault((max(kept), round(100 * bubble, 3)), []).append(name)
        axes.plot(
            [min(kept), max(kept)], [100 * bubble] * 2, color=ACTIVITY["forward"], linewidth=1.5, alpha=0.5
        )
    for (kept, percent), names in places.items():
        axes.plot(kept, percent, "o", color=ACTIVITY["forward"], markersize=8)
        axes.annotate(
            "\n".join(names), (kept, percent), (9, 0), textcoords="offset points", va="center", fontsize=9
        )
    widest = max(kept for kept, _ in places)
    axes.set_xlim(0, 1.22 * widest)
    highest = max(percent for _, percent in places)
    axes.set_ylim(-0.1 * highest, 1.15 * highest)
    axes.set_xlabel(
        "activations kept at most, in microbatches (mark: the fullest rank, line: to the emptiest)"
    )
    axes.set_ylabel("bubble, % of a step")
    return figure


# ---------------------------------------------------------------------------------- chapter 16: tensor parallel


def cut_products(rows: int, inputs: int, outputs: int, n_ranks: int) -> Figure:
    """X times W is Y, cut for ranks: above by columns of W, below by its rows. Drawn to scale.

    Args:
        rows: of X and Y.
        inputs: columns of X, rows of W; a multiple of ``n_ranks``.
        outputs: columns of W and Y; a multiple of ``n_ranks``.
        n_ranks: how many, at most 8.

    Returns:
        the figure; a block has its rank's colour and number, grey is whole on every rank.

    Examples:
        .. code-block:: python

            plot.cut_products(rows=6, inputs=8, outputs=32, n_ranks=4)
    """
    title = "By columns, Y comes in blocks; by rows, it comes in terms that have to be added"
    figure, axes = new_figure(title, width=7.4, height=2.7)
    axes.set_aspect("equal")
    axes.axis("off")
    starts = (0, inputs + 4, inputs + outputs + 8)  # left edges of X, W and Y
    for top, by in ((0, "columns"), (inputs + 6, "rows")):
        middle = top + inputs / 2
        x_and_y = middle - rows / 2, rows
        shapes = {"X": (*x_and_y, inputs), "W": (top, inputs, outputs), "Y": (*x_and_y, outputs)}
        axes.text(-1, middle, f"by {by}", size=10, weight="bold", ha="right", va="center")
        for left, sign in ((starts[1], "×"), (starts[2], "=")):
            axes.text(left - 2, middle, sign, size=13, ha="center", va="center")
        for left, (name, (y, height, width)) in zip(starts, shapes.items(), strict=True):
            label = f"{name}  {height} × {width}"
            axes.text(left + width / 2, top + inputs + 1.7, label, size=9, ha="center")
            if name == "X" and by == "columns":
                _box(axes, left, y, width, height, ACTIVITY["idle"], "whole")
                continue
            for rank in reversed(range(n_ranks)):
                if name == "Y" and by == "rows":  # sheets, one before the other
                    away = 0.8 * rank
                    _sheet(axes, left + away, y + 1 - away, width, height, RANK[rank])
                elif name == "W" and by == "rows":
                    tall = height / n_ranks
                    _box(axes, left, y + rank * tall, width, tall - 0.15, RANK[rank], str(rank))
                else:
                    wide = width / n_ranks
                    _box(axes, left + rank * wide, y, wide - 0.15, height, RANK[rank], str(rank))
            if name == "Y" and by == "rows":
                text = " + ".join(map(str, range(n_ranks)))
                place = {"ha": "center", "va": "center", "color": _on(RANK[0]), "zorder": 3}
                axes.text(left + width / 2, y + 1 + height / 2, text, size=9, **place)
    axes.set_xlim(-13, starts[2] + outputs + 3)
    axes.set_ylim(2 * inputs + 8.2, -0.5)
    return figure


def held_blocks(tensors: dict[str, tuple[tuple, list]], title: str) -> Figure:
    """Weights and biases as they are stored, each block in the colour and with the number of the rank that holds it.

    Args:
        tensors: name of a tensor of one or two dims to its shape and, for each rank, the (start, stop) of what it
            holds along each dim.
        title: the finding.

    Returns:
        the figure; grey is whole on every rank.

    Examples:
        .. code-block:: python

            by_rank = [[(0, 4), (0, 3)], [(4, 8), (0, 3)]]
            plot.held_blocks({"weight": ((8, 3), by_rank), "bias": ((8,), [[(0, 8)]] * 2)}, "The bias is whole")
    """
    figure, axes = new_figure(title, width=7.4, height=2.6)
    axes.set_aspect("equal")
    axes.axis("off")
    left, tallest = 0.0, max(shape[0] for shape, _ in tensors.values())
    for name, (shape, blocks) in tensors.items():
        wide = shape[1] if len(shape) == 2 else 2
        for rank, (rows, *columns) in enumerate(blocks):
            start, stop = columns[0] if columns else (0, wide)
            everywhere = len(blocks) > 1 and all(block == blocks[0] for block in blocks)
            colour, text = (ACTIVITY["idle"], "all") if everywhere else (RANK[rank], str(rank))
            if not everywhere or rank == 0:
                size = stop - start - 0.15, rows[1] - rows[0] - 0.15
                _box(axes, left + start, rows[0], *size, colour, text)
        label = f"{name}\n{' × '.join(map(str, shape))}"
        axes.text(left + wide / 2, -0.6, label, size=9, ha="center", va="bottom")
        left += wide + 8
    axes.set_xlim(-4, left - 4)
    axes.set_ylim(tallest + 0.2, -4.2)
    return figure


def _sheet(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.2))


def bytes_by_plan(counted: dict[str, tuple[int, int]], title: str) -> Figure:
    """Bytes that collectives hand a rank in a step, a bar a plan: forward, then backward.

    Args:
        counted: name of a plan to its bytes forward and backward.
        title: the finding.

    Returns:
        the figure; the first plan is at the top.

    Examples:
        .. code-block:: python

            plot.bytes_by_plan({"column, row": (384, 384), "row, column": (1920, 1920)}, "Five times the bytes")
    """
    figure, axes = new_figure(title, height=0.45 * len(counted) + 1.1)
    widest = max(map(sum, counted.values()))
    for place, (forward, backward) in enumerate(counted.values()):
        for kind, left, size in (("forward", 0, forward), ("backward", forward, backward)):
            axes.barh(place, size, left=left, height=0.62, color=ACTIVITY[kind], edgecolor="white")
            if size > 0.18 * widest:
                text = f"{kind} {size:,}"
                colour = _on(ACTIVITY[kind])
                axes.text(left + size / 2, place, text, size=9, ha="center", va="center", color=colour)
        total = f"{forward + backward:,}"
        axes.text(forward + backward + 0.01 * widest, place, total, size=9, weight="bold", va="center")
    axes.set_yticks(range(len(counted)), list(counted), fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(counted) - 0.5, -0.5)
    axes.set_xlim(0, 1.1 * widest)
    axes.set_xlabel("bytes handed to a rank in a step")
    return figure


# ----------------------------------------------------------------------------- chapter 15: where to cut a model


def cuts_of_a_model(n_layers: int, n_ranks: int) -> Figure:
    """A model three times: whole on every rank, cut between its layers, and cut inside them. A colour is a rank.

    Args:
        n_layers: number of layers, a multiple of ``n_ranks``.
        n_ranks: number of ranks.

    Returns:
        the figure; under each drawing stands how much of the model a rank holds.

    Examples:
        .. code-block:: python

            plot.cuts_of_a_model(n_layers=4, n_ranks=4)
    """
    if n_layers % n_ranks:
        raise ValueError(f"n_layers should be a multiple of n_ranks={n_ranks}, but given {n_layers}")
    figure, axes = new_figure("Three ways to put a model on ranks", width=7.4, height=2.9)
    axes.axis("off")
    for place, name in enumerate(
        ("data parallel:\nwhole on every rank", "cut between layers", "cut inside layers")
    ):
        left = 11 * place
        axes.text(left + 4, -0.25, name, ha="center", va="bottom", size=10, weight="bold")
        for layer in range(n_layers):
            if place == 0:
                pieces = [(0, 8, ACTIVITY["idle"], "all ranks")]
            elif place == 1:
                rank = layer * n_ranks // n_layers
                pieces = [(0, 8, RANK[rank], f"rank {rank}")]
            else:
                wide = 8 / n_ranks
                pieces = [(rank * wide, wide, RANK[rank], str(rank)) for rank in range(n_ranks)]
            for start, wide, colour, text in pieces:
                _box(axes, left + start, layer, wide - 0.1, 0.82, colour, text)
        share = 1 if place == 0 else 1 / n_ranks
        axes.text(left + 4, n_layers + 0.1, f"a rank holds {share:.0%}", ha="center", va="top", size=10)
    for layer in range(n_layers):
        axes.text(-0.4, layer + 0.41, f"layer {layer}", ha="right", va="center", size=9)
    axes.set_xlim(-3.2, 30.2)
    axes.set_ylim(n_layers + 0.8, -1.5)
    return figure


def bytes_over_rows(
    predicted: dict[str, dict[int, float]], counted: dict[str, dict[int, int]], title: str
) -> Figure:
    """Bytes that a rank gets in a step against the rows of the batch: lines predicted, marks counted.

    Args:
        predicted: name of a cut to rows to bytes.
        counted: name of a cut to rows to bytes.
        title: the finding.

    Returns:
        the figure, in kB; both axes are logarithmic.

    Examples:
        .. code-block:: python

            plot.bytes_over_rows({"data parallel": {1: 8000, 64: 8000}}, {"data parallel": {8: 8000}}, "It is flat")
    """
    figure, axes = new_figure(title, width=7.4, height=2.9)
    colours = (ACTIVITY["compute"], ACTIVITY["backward_weight"], ACTIVITY["optimizer"])
    for (name, line), colour, mark in zip(predicted.items(), colours, "sov", strict=False):
        rows = list(line)
        axes.plot(rows, [value / 1e3 for value in line.values()], color=colour, linewidth=2)
        axes.plot(
            list(counted[name]), [value / 1e3 for value in counted[name].values()], mark, color=colour, markersize=8,
            markeredgecolor="white",
        )  # fmt: skip
        axes.annotate(
            name, (rows[-1], line[rows[-1]] / 1e3), (8, 0), textcoords="offset points", va="center", color=colour,
            weight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({n for line in counted.values() for n in line})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("rows of the batch")
    axes.set_ylabel("kB a rank gets in a step")
    axes.text(
        0.98, 0.04, "lines: predicted\nmarks: counted", transform=axes.transAxes, fontsize=9, ha="right"
    )
    return figure


# ------------------------------------------------------------------- chapter 17: tensor parallel in a transformer


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

            steps = [("norm", 8, "whole", []), ("up", 32, "features", []), ("down", 8, "whole", ["all_reduce"])]
            plot.along_a_block(steps, n_ranks=4, title="One all-reduce")
    """
    figure, axes = new_figure(title, width=7.6, height=1.95)
    axes.axis("off")
    narrow, left = min(features for _, features, *_ in steps), 0.0
    for name, features, how, calls in steps:
        if left:
            left += 0.62
            colour = ACTIVITY["communication"] if calls else "#8C8C8C"
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.5 if calls else 1}
            axes.annotate("", (left - 0.06, 0.5), (left - 0.56, 0.5), arrowprops=arrow)
            for call in calls:
                text = call.replace("_", "-").replace("-", "-\n", 1)
                place = {"ha": "center", "va": "bottom", "weight": "bold", "color": "#A2457A"}
                axes.text(left - 0.31, 1.28, text, size=9, **place)
                axes.plot([left - 0.31] * 2, [0.6, 1.24], color=colour, linewidth=1.2)
        wide = features / narrow
        if how == "whole":
            _box(axes, left, 0, wide, 1, ACTIVITY["idle"], "all")
        for rank in range(n_ranks) if how != "whole" else ():
            part = 1 / n_ranks
            if how == "features":
                _box(axes, left + rank * part * wide, 0, part * wide, 1, RANK[rank], str(rank))
            else:
                _box(axes, left, 1 - (rank + 1) * part, wide, part, RANK[rank], str(rank))
        axes.text(left + wide / 2, -0.1, name, size=9, ha="center", va="top")
        left += wide
    axes.set_xlim(-0.15, left + 0.15)
    axes.set_ylim(-0.62, 2.05)
    return figure


def dropout_masks(panels: dict[str, tuple[list, list]], title: str) -> Figure:
    """What each rank drops of one token: of its own features, and of those that all ranks hold.

    Args:
        panels: name of a way to draw to two lists by rank, of the cut and of the whole features: True is kept.
        title: the finding.

    Returns:
        the figure; a filled tile is kept, an empty one dropped.

    Examples:
        .. code-block:: python

            own, whole = [[True, False], [False, True]], [[True, True], [True, True]]
            plot.dropout_masks({"the rule": (own, whole)}, "Apart where it is cut, alike where it is whole")
    """
    from matplotlib.patches import Rectangle

    figure, all_axes = new_figure(title, width=7.6, height=2.2, columns=max(2, len(panels)))
    for axes in all_axes:
        axes.axis("off")
    for axes, (name, (cut, whole)) in zip(all_axes, panels.items(), strict=False):
        for rank in range(len(cut)):
            left = 0.0
            for mask, colour in ((cut[rank], RANK[rank]), (whole[rank], "#8C8C8C")):
                for kept in mask:
                    fill = colour if kept else "white"
                    tile = (left + 0.08, rank + 0.12), 0.84, 0.76
                    axes.add_patch(Rectangle(*tile, facecolor=fill, edgecolor=colour, linewidth=1))
                    left += 1
                left += 1
            axes.text(-0.3, rank + 0.5, str(rank), size=9, ha="right", va="center")
        n_cut, n_whole = len(cut[0]), len(whole[0])
        axes.text(-0.3, -0.12, "rank", size=9, ha="right", va="bottom")
        axes.text(n_cut / 2, -0.12, "cut", size=9, ha="center", va="bottom")
        axes.text(n_cut + 1 + n_whole / 2, -0.12, "whole", size=9, ha="center", va="bottom")
        axes.set_title(name, fontsize=10, fontweight="normal", loc="left")
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

            plot.kept_by_block({"one rank": (8000, 0, 8100), "sequence": (2000, 400, 2450)}, "Not a quarter")
    """
    figure, axes = new_figure(title, width=7.4, height=0.38 * len(cases) + 1.1)
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
    axes.set_yticks(range(len(cases)), list(cases), fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xlim(0, 1.1 * widest)
    axes.set_xlabel("kB that a block keeps on a rank")
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    return figure
