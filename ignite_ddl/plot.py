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
    "course_map",
    "data_and_model_parallel",
    "dealt_batch",
    "learning_curves",
    "new_figure",
    "numbers_sent",
    "parity_errors",
    "show",
]

# What a rank is doing (Okabe and Ito's set).
ACTIVITY = {
    "forward": "#0072B2",
    "backward": "#E69F00",  # with respect to the input, or whole
    "backward_weight": "#D55E00",
    "communication": "#CC79A7",
    "optimizer": "#009E73",
    "idle": "#E4E4E4",
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
