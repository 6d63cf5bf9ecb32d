"""Every figure of the course, matplotlib only, in one code of colours that colour-blind readers can tell apart.

Each function takes the chapter's own data and returns a ``matplotlib.figure.Figure``; :func:`show` displays it
with its alternative text.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "ACTIVITY",
    "RANK",
    "cluster",
    "collectives",
    "confusion_matrix",
    "course_map",
    "data_and_model_parallel",
    "dealt_batch",
    "dealt_rows",
    "learning_curves",
    "logged_scalars",
    "new_figure",
    "numbers_sent",
    "owners_over_epochs",
    "parity_errors",
    "rank_profiles",
    "resumed_losses",
    "rows_read",
    "show",
    "sort_times",
    "step_times",
    "timeline",
    "who_does_what",
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
        records: a ``ddl.Timeline``, or ``Record``s with rank, kind, name, start and end in seconds (and waits_for).
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
