"""Draws what the instruments find, and holds what the course's figures are made of; needs nothing but matplotlib.

One code of colours for all figures, :data:`ACTIVITY` for what a rank does and :data:`RANK` for which rank it is.
matplotlib is imported when the first figure is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import ignite_ddl.arguments as fits
from ignite_ddl.arguments import NUMBER, POSITIVE, Fits, a, each, having, number, takes, whole

if TYPE_CHECKING:  # the course's figures name these types by this module
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "ACTIVITY",
    "GREY",
    "INK",
    "RANK",
    "SHADE",
    "arrow",
    "bar",
    "heading",
    "ink",
    "ink_on",
    "key",
    "label_rank",
    "lines_and_marks",
    "log_axis",
    "log_ticks",
    "name_rows",
    "new_drawing",
    "new_figure",
    "note",
    "on_any_page",
    "pale",
    "ranks_in",
    "schedules",
    "span",
    "stack",
    "step_rows",
    "stripes",
    "tile",
    "timeline",
]

# What a rank is doing (Okabe and Ito's set, safe for colour-blind readers).
ACTIVITY = {
    "forward": "#0072B2",
    "backward": "#E69F00",  # with respect to the input, or both parts
    "backward_weight": "#D55E00",
    "communication": "#CC79A7",
    "optimizer": "#009E73",
    "idle": "#B0B0B0",  # dark words read on it; faint on white, and it does not glare on black
    "compute": "#0072B2",  # where forward and backward are not separated
    "data": "#F0E442",
    "handlers": "#8C8C8C",  # what an engine does between its steps
}
# Which rank it is (Paul Tol's "muted" set): a different family, so that the two codes are never confused.
RANK = ["#332288", "#CC6677", "#44AA99", "#DDCC77", "#88CCEE", "#882255", "#117733", "#999933"]
GREY = "#8C8C8C"  # lines and tiles that are no rank's
SHADE = "#8C8C8C50"  # idle ranks: half transparent, so that it is fainter than words on white and on black
INK = "#767676"  # words and lines without a colour of their own; 4.5 to 1 on white, and reads on black

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


# ------------------------------------------------------------------------------------------ what fits


def _is_colour(value: Any) -> bool:
    from matplotlib.colors import is_color_like

    return is_color_like(value)


def _by_name(says: str, one: Fits, least: int = 1) -> Fits:
    """Dicts from names to what fits."""

    def read(value: Any) -> dict:
        if not isinstance(value, Mapping) or len(value) < least:
            raise TypeError
        return {name: one.read(inside) for name, inside in value.items()}

    return Fits(says, read)


_RECORD = having("a record", "rank", "kind", "name", "start", "end")
_RECORDS = each(_RECORD, "records")
_COLOUR, _LABEL = a("a colour of matplotlib", _is_colour), fits.TEXT | NUMBER
_TICKS = Fits("numbers", lambda value: each(NUMBER, "").read(value if isinstance(value, str | bytes) else list(value)))
_PART = a("", lambda value: len(value) == 3 and NUMBER.read(value[0]) is not None and _is_colour(value[1]))
_POINT = each(NUMBER, "two numbers", 2, 2)
_NUMBERS = "width height left top start end low high x y place size scale row pad"  # mostly
FITS = {
    **dict.fromkeys(_NUMBERS.split(), NUMBER),
    **dict.fromkeys(("bold", "bare", "upright", "ends_marked"), fits.FLAG),
    **dict.fromkeys(("at", "offset"), _POINT),
    **dict.fromkeys(("colour", "edge"), _COLOUR),
    **dict.fromkeys(("title", "unit"), fits.TEXT),
    "axes": having("matplotlib's Axes", "add_patch", "set_xlim"),
    "figure": having("a Figure of matplotlib", "legend", "findobj", "axes"),
    "records": Fits("records, or what has them", lambda value: _RECORDS.read(getattr(value, "records", value))),
    "colours": each(_COLOUR, "colours of matplotlib", 1),
    "text": _LABEL,
    "names": each(_LABEL, "names"),
    "strength": fits.SHARE,
    "linewidth": fits.AMOUNT,
    "linestyle": fits.one_of("-", "--", "-.", ":", "solid", "dashed", "dashdot", "dotted", "none", ""),
}
_OF_A_FIGURE = FITS | dict.fromkeys(("width", "height"), POSITIVE) | {"columns": whole(most=100)}


# ------------------------------------------------------------------------------------------ figures and axes


@takes(_OF_A_FIGURE)
def new_figure(title: str, width: float = 7.0, height: float = 3.0, columns: int = 1, **kwargs) -> tuple[Figure, Axes]:
    """An empty figure in the course's style.

    Args:
        title: what the figure shows, as a finding.
        width: inches, default 7.
        height: inches, default 3.
        columns: number of axes side by side, default 1.
        kwargs: for ``matplotlib.pyplot.subplots``.

    Returns:
        the figure and its axes (an array of axes where ``columns`` > 1).

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import draw

            figure, axes = draw.new_figure("Ten rows do not fill four ranks evenly", height=2)
            draw.bar(axes, 0, [(3, draw.RANK[0], "rank 0")], upright=False)
    """
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained", **kwargs)
        if columns == 1:
            axes.set_title(title)
        else:
            _title(figure, title)
    return figure, axes


@takes(_OF_A_FIGURE)
def new_drawing(title: str, width: float, height: float, columns: int = 1, **kwargs) -> tuple[Figure, Axes]:
    """:func:`new_figure` for a drawing: its axes show neither lines nor ticks."""
    figure, axes = new_figure(title, width, height, columns, **kwargs)
    for panel in [axes] if columns == 1 else axes.flat:
        panel.axis("off")
    return figure, axes


@takes(_OF_A_FIGURE, ratios=each(POSITIVE, "positive numbers", 1))
def stack(title: str, width: float, height: float, ratios: list[float]) -> tuple[Figure, list[Axes]]:
    """A figure with panels under each other that share their horizontal axis.

    Args:
        title: what the figure shows, as a finding.
        width: inches.
        height: inches.
        ratios: the panels' heights in proportion, one for each.

    Returns:
        the figure and its axes, from the top.
    """
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            len(ratios), figsize=(width, height), layout="constrained",
            sharex=True, squeeze=False, height_ratios=ratios,
        )  # fmt: skip
    _title(figure, title)
    return figure, list(axes[:, 0])


def _title(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")


@takes(FITS)
def heading(axes: Axes, text: str, bold: bool = False, pad: float | None = None) -> None:
    """A panel's title, smaller than the figure's."""
    axes.set_title(text, fontsize=10, fontweight="bold" if bold else "normal", loc="left", pad=pad)


@takes(FITS)
def name_rows(axes: Axes, names: list[str], bare: bool = False) -> None:
    """Names rows of height 1 on the vertical axis, the first at the top.

    Args:
        axes: where.
        names: the rows' names.
        bare: whether to leave out the axis' line and ticks. Default: False.
    """
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    if bare:
        axes.spines["left"].set_visible(False)
        axes.tick_params(left=False)


@takes(FITS, at=_TICKS, base=number(above=1))
def log_axis(axes: Axes, at: Collection[float], base: int = 10) -> None:
    """A logarithmic horizontal axis with ticks at the given numbers alone, written in full."""
    axes.set_xscale("log", base=base)
    axes.set_xticks(list(at), [f"{number:g}" for number in at])
    axes.minorticks_off()


@takes(FITS)
def log_ticks(axes: Axes, low: float, high: float) -> None:
    """Ticks at 1, 2 and 5 times powers of ten between two numbers, written in full, on the vertical axis."""
    steps = (tick * 10**power for power in range(-3, 7) for tick in (1, 2, 5))
    axes.set_yticks([tick for tick in steps if low < tick < high])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


@takes(
    FITS,
    entries=_by_name("a dict from names to colours, or a list of handles", _COLOUR, 0)
    | each(having("", "get_label"), ""),
)
def key(figure: Figure, entries: dict | list) -> None:
    """The legend below the figure, eight entries a line.

    Args:
        figure: where.
        entries: names to colours, or matplotlib's handles.
    """
    from matplotlib.patches import Patch

    if isinstance(entries, dict):
        entries = [Patch(color=colour, label=name) for name, colour in entries.items()]
    figure.legend(
        handles=entries, loc="outside lower right", ncols=min(len(entries), 8), handlelength=1.2, frameon=False,
        fontsize=9,
    )  # fmt: skip


@takes(FITS)
def on_any_page(figure: Figure) -> Figure:
    """Removes the background, and draws in grey what has no colour: readable on light and on dark pages.

    Call it last. Text on tiles, or with a colour of its own, stays as it is.

    Args:
        figure: of :func:`new_figure`, :func:`new_drawing` or :func:`stack`.

    Returns:
        the same figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import draw

            figure, axes = draw.new_figure("Ten rows do not fill four ranks evenly", height=2)
            draw.bar(axes, 0, [(3, draw.RANK[0], "rank 0")], upright=False)
            figure = draw.on_any_page(figure)
    """
    from matplotlib.text import Text

    figure.patch.set_alpha(0)
    coloured = {text for axes in figure.axes for text in axes.texts if text.get_color() != "black"}
    for text in set(figure.findobj(Text)) - coloured:
        text.set_color(INK)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
        axes.tick_params(color=INK, labelcolor=INK)
        for spine in axes.spines.values():
            spine.set_color(INK)
    return figure


# ------------------------------------------------------------------------------------------ colours


@takes(FITS)
def ink_on(colour: str) -> str:
    """Black or white: what reads better on a colour."""
    return "#222222" if _lightness(colour) > 0.5 else "white"


@takes(FITS)
def ink(colour: str) -> str:
    """The colour as text that reads on white and on black: neither too light nor too dark."""
    light, parts = _lightness(colour), _parts(colour)
    if light > 0.5:
        parts = [part * 0.5 / light for part in parts]
    elif light < 0.4:
        parts = [part + (255 - part) * (0.4 - light) / (1 - light) for part in parts]
    return "#" + "".join(f"{int(part):02X}" for part in parts)


@takes(FITS)
def pale(colour: str, strength: float) -> str:
    """The colour on white: nearly white with a strength of 0, the colour itself with 1."""
    return "#" + "".join(f"{round(247 + (part - 247) * strength):02X}" for part in _parts(colour))


def _parts(colour: str) -> list[int]:
    from matplotlib.colors import to_rgb

    return [round(255 * part) for part in to_rgb(colour)]


def _lightness(colour: str) -> float:
    red, green, blue = _parts(colour)
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


# ------------------------------------------------------------------------------------------ shapes and words


@takes(FITS)
def tile(
    axes: Axes, left: float, top: float, width: float, height: float, colour: str, text="",
    edge: str = "white", linewidth: float = 1.2, linestyle: str = "-", **style,
) -> None:  # fmt: skip
    """A filled rectangle with a text in its middle, in the ink that reads on its colour.

    Args:
        axes: where.
        left: place in the axes' numbers, as are top, width and height.
        top: the end with the smaller number.
        width: of the rectangle.
        height: of the rectangle.
        colour: of the rectangle.
        text: default none.
        edge: colour of the edge, "none" for no edge. Default: "white".
        linewidth: of the edge, in points. Default: 1.2.
        linestyle: of the edge. Default: "-".
        style: of the text, for ``axes.text``.
    """
    from matplotlib.patches import Rectangle

    look = {"facecolor": colour, "edgecolor": edge, "linewidth": linewidth, "linestyle": linestyle}
    axes.add_patch(Rectangle((left, top), width, height, **look))
    if str(text):
        style = {"fontsize": 9, "ha": "center", "va": "center", "color": ink_on(colour)} | style
        axes.text(left + width / 2, top + height / 2, str(text), **style)


@takes(FITS)
def span(
    axes: Axes, row: int, start: float, end: float, colour: str, text="", height: float = 0.84,
    linewidth: float = 0.5, **style,
) -> None:  # fmt: skip
    """A tile in a row of :func:`name_rows`, from ``start`` to ``end``; its text is on the rows' common line."""
    style = {"va": "center_baseline"} | style
    tile(axes, start, row - height / 2, end - start, height, colour, text, linewidth=linewidth, **style)


@takes(FITS, parts=each(_PART, "a length, a colour and a text for each part"), size=POSITIVE)
def bar(axes: Axes, place: float, parts: list[tuple], size: float = 0.8, upright: bool = True, **look) -> float:
    """One bar, stacked from parts that start at 0.

    Args:
        axes: where.
        place: the middle of the bar on the other axis.
        parts: a length, a colour and a text ("" for none) for each part.
        size: thickness. Default: 0.8.
        upright: whether the bar is vertical. Default: True.
        look: for ``axes.bar`` or ``axes.barh``.

    Returns:
        the length of the whole bar.
    """
    end = 0.0
    for length, colour, text in parts:
        if upright:
            axes.bar(place, length, bottom=end, width=size, color=colour, **look)
        else:
            axes.barh(place, length, left=end, height=size, color=colour, **look)
        middle = (place, end + length / 2) if upright else (end + length / 2, place)
        if text:
            axes.text(*middle, text, size=9, ha="center", va="center", color=ink_on(colour))
        end += length
    return end


@takes(FITS)
def stripes(
    axes: Axes, left: float, top: float, width: float, height: float, colours: list[str], upright: bool = False
) -> None:
    """A rectangle cut into stripes of equal size, one for each colour, from the top or from the left."""
    n = len(colours)
    for place, colour in enumerate(colours):
        if upright:
            tile(axes, left + width * place / n, top, width / n, height, colour, edge="none")
        else:
            tile(axes, left, top + height * place / n, width, height / n, colour, edge="none")


@takes(value=whole(0, floats=True))
def ranks_in(value: int) -> list[int]:
    """The ranks whose number is in a sum, if rank r has put in 2 ** r."""
    return [rank for rank in range(value.bit_length()) if value >> rank & 1]


@takes(FITS, start=_POINT, end=_POINT)
def arrow(axes: Axes, start: tuple, end: tuple, colour: str = "#555555", **style) -> None:
    """An arrow between two points; ``style`` is for matplotlib's ``arrowprops``."""
    style = {"arrowstyle": "->", "color": colour, "linewidth": 1.4} | style
    axes.annotate("", end, start, arrowprops=style)


@takes(FITS)
def note(axes: Axes, text: str, at: tuple, offset: tuple = (7, 0), colour: str | None = None, **style) -> None:
    """A text beside a point, such as the name of a line at its end: bold and in the line's colour, if one is given.

    Args:
        axes: where.
        text: what to write.
        at: the point.
        offset: from there to the text, in points. Default: (7, 0), to the right.
        colour: the line's. Default: black, and not bold.
        style: of the text, for ``axes.annotate``.
    """
    if colour:
        style = {"color": ink(colour), "weight": "bold"} | style
    style = {"va": "center", "annotation_clip": False} | style
    axes.annotate(text, at, offset, textcoords="offset points", **style)


@takes(FITS, rank=whole(0, len(RANK) - 1))
def label_rank(axes: Axes, x: float, y: float, rank: int, **style) -> None:
    """Writes the name of a rank in bold letters, by default of its colour and with ``x`` as the text's right end."""
    style = {"fontsize": 9, "ha": "right", "va": "center", "color": ink(RANK[rank])} | style
    axes.text(x, y, f"rank {rank}", fontweight="bold", **style)


@takes(
    FITS,
    predicted=_by_name("a dict from names to dicts of numbers", fits.MAPPING),
    measured=_by_name("a dict from names to dicts of numbers", fits.MAPPING, 0),
)
def lines_and_marks(
    axes: Axes, predicted: dict[str, dict], measured: dict[str, dict], colours: list[str],
    scale: float = 1.0, offset: tuple = (7, 0),
) -> None:  # fmt: skip
    """Lines, each with its name at its end, and marks of the same colour: what was predicted and what was measured.

    Args:
        axes: where.
        predicted: name of a line to x to y.
        measured: name of a line to x to y; a name may be missing.
        colours: of the lines, in turn.
        scale: number by which y is multiplied. Default: 1.
        offset: from a line's end to its name, in points. Default: (7, 0).

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import draw

            figure, axes = draw.new_figure("The server's bytes double with the workers")
            lines = {"one server": {1: 2, 4: 8, 64: 128}, "ring": {2: 2, 4: 3, 64: 3.94}}
            draw.lines_and_marks(axes, lines, {"one server": {4: 8}}, ["#D55E00", "#0072B2"])
    """
    looks = zip(itertools.cycle(colours), itertools.cycle("sov"), strict=True)  # and from the first again
    for (name, line), (colour, mark) in zip(predicted.items(), looks, strict=False):
        axes.plot(list(line), [scale * y for y in line.values()], color=colour, linewidth=2)
        found = measured.get(name, {})
        look = {"color": colour, "markersize": 8, "markeredgecolor": "white"}
        axes.plot(list(found), [scale * y for y in found.values()], mark, **look)
        last = max(line)
        note(axes, name, (last, scale * line[last]), offset, colour)


# ------------------------------------------------------------------------------------------ rows of spans


@takes(FITS)
def timeline(records, title: str = "What each rank did, measured") -> Figure:
    """A row for each rank, rank 0 at the top, time to the right: what it did when.

    Where the times come from (measured, simulated, with delays put in) belongs into the title or beside the figure.

    Args:
        records: a ``Timeline``, a simulation, or records with rank, kind, name, start and end in seconds, and
            waits_for.
        title: the finding.

    Returns:
        the figure; its legend names the kinds that are long enough to be seen.

    Raises:
        ValueError: if there are no records.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import draw, simulate

            figure = draw.timeline(simulate.pipeline("1f1b", 3, 4), "1F1B, simulated")
    """
    records = list(getattr(records, "records", records))
    if not records:
        raise ValueError("records is empty: nothing was recorded")
    start, end = min(record.start for record in records), max(record.end for record in records)
    ranks = sorted({record.rank for record in records})
    length = end - start or 1.0
    figure, axes = new_figure(title, width=7.4, height=1.15 + 0.42 * len(ranks))
    for record in records:
        texts = [record.kind if record.kind in ("data", "handlers") else record.name]
        if record.waits_for is not None:
            texts = [f"waits for rank {record.waits_for}", f"waits for {record.waits_for}", f"for {record.waits_for}"]
        share = (record.end - record.start) / length
        text = next((text for text in texts if share > 0.011 * (len(text) + 1)), "")
        left, right = 1e3 * (record.start - start), 1e3 * (record.end - start)
        colour = ACTIVITY[record.kind]
        span(axes, ranks.index(record.rank), left, right, colour, text, 0.78, 0.4, edge="none", va="center")
    name_rows(axes, [f"rank {rank}" for rank in ranks], bare=True)
    axes.set_xlim(0, 1e3 * length)
    axes.set_xlabel("milliseconds")
    seen = {record.kind for record in records if record.end - record.start > 0.01 * length}
    key(figure, _colours_of(seen))
    return on_any_page(figure)


@takes(FITS, panels=_by_name("a dict from names to records", _RECORDS), row=POSITIVE)
def schedules(panels: dict[str, list], title: str, unit: str = "ms", row: float = 0.3) -> Figure:
    """Pipeline schedules under each other on one axis of time: a row a rank, a box a pass, its microbatch inside.

    Measured and simulated ones are drawn alike. A box without room for its number is drawn without it; if most boxes
    of a kind in a panel have no room, all boxes of that kind are. Grey is the bubble: what a rank leaves empty between
    the first pass of the panel and the last. Where a rank holds several stages, the passes of the later ones are paler.

    Args:
        panels: name of a schedule to records with rank, kind, start, end, microbatch and stage (None is 0): a step of
            ``Timeline.actions()``, or simulated.
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

            from ignite_ddl.lab import draw
            from ignite_ddl.lab.record import Record

            step = [Record(0, "forward", "0F0", 0, 1, None, 0, 0), Record(1, "forward", "1F0", 1, 2, None, 1, 0)]
            step += [Record(1, "backward", "1B0", 2, 4, None, 1, 0), Record(0, "backward", "0B0", 4, 6, None, 0, 0)]
            figure = draw.schedules({"no microbatches": step}, "Half of the time nobody works", unit="time units")
    """
    names = {"forward": "forward", "backward": "backward", "backward_weight": "backward (weights)"}
    scale = 1e3 if unit == "ms" else 1.0
    steps = {}
    for name, records in panels.items():
        taken = [record for record in records if record.kind in names]
        if not taken:
            raise ValueError(f"panels[{name!r}] should hold forward or backward passes, but holds none")
        start, end = min(record.start for record in taken), max(record.end for record in taken)
        ranks = sorted({record.rank for record in taken})
        sent = [r for r in records if r.kind == "communication" and r.rank in ranks]
        other = [r for r in sent if r.end > start and r.start < end]
        steps[name] = start, end, ranks, other + taken
    rows = [len(ranks) for _, _, ranks, _ in steps.values()]
    longest = max(end - start for start, end, *_ in steps.values()) or 1.0
    height = 1.05 + sum(row * n + 0.32 for n in rows)
    figure, axes = stack(title, 7.6, height, [n + 0.5 for n in rows])

    def has_room(record):
        return (record.end - record.start) / longest > 0.0135 * len(str(record.microbatch))

    kinds = {"idle"}
    for panel, (name, (start, end, ranks, records)) in zip(axes, steps.items(), strict=True):
        first = {rank: min(r.stage or 0 for r in records if r.rank == rank and r.kind in names) for rank in ranks}
        rooms = {kind: [has_room(record) for record in records if record.kind == kind] for kind in names}
        numbered = [kind for kind, found in rooms.items() if row >= 0.2 and 2 * sum(found) > len(found)]
        for place in range(len(ranks)):
            span(panel, place, 0, scale * (end - start), SHADE, edge="none")
        for record in records:
            later = record.kind in names and (record.stage or 0) > first[record.rank]
            colour = pale(ACTIVITY[record.kind], 0.45) if later else ACTIVITY[record.kind]
            text = record.microbatch if record.kind in numbered and has_room(record) else ""
            left, right = scale * (max(record.start, start) - start), scale * (min(record.end, end) - start)
            span(panel, ranks.index(record.rank), left, right, colour, text)
            kinds.add(record.kind)
        heading(panel, name, pad=3)
        name_rows(panel, [f"rank {rank}" for rank in ranks], bare=True)
    axes[-1].set_xlim(0, scale * longest)
    axes[-1].set_xlabel("milliseconds" if unit == "ms" else unit)
    if "backward_weight" in kinds:
        names["backward"] = "backward (input, or whole)"
    colours = _colours_of(kinds) | {"idle": SHADE}
    key(figure, {names.get(kind, kind): colour for kind, colour in colours.items()})
    return on_any_page(figure)


@takes(FITS, panels=_by_name("a dict from names to dicts of records", _by_name("", _RECORDS)))
def step_rows(panels: dict[str, dict[str, list]], title: str, ends_marked: bool = True) -> Figure:
    """Steps under each other on one axis of time: a panel a step, a row of boxes for whoever works in it.

    Args:
        panels: name of a step to its rows, name of a row to its records (kind, name, start and end in seconds),
            such as the records of one rank of a ``Timeline`` or a simulation. Every panel begins at its first
            record. Idle time is drawn only where a record says so. A box that is too narrow for its record's name
            has the last word of it, without an arrow.
        title: the finding.
        ends_marked: whether a dashed line marks each step's end, with its milliseconds.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost, draw, simulate

            step = simulate.ddp_step(2, [4, 4], cost.Link(0, 1), forward_seconds=5, backward_seconds=10)
            of_rank_0 = [record for record in step.records if record.rank == 0]
            figure = draw.step_rows({"DDP": {"rank 0": of_rank_0}}, "It overlaps")
    """
    from matplotlib.textpath import TextPath

    colours = ACTIVITY | {"idle": SHADE}
    everything = {name: [r for row in rows.values() for r in row] for name, rows in panels.items()}
    begins = {name: min(record.start for record in records) for name, records in everything.items()}
    ends = {name: 1e3 * (max(r.end for r in rs) - begins[name]) for name, rs in everything.items()}
    longest = max(ends.values()) or 1.0
    counts = [len(rows) for rows in panels.values()]
    figure, axes = stack(title, 7.6, 1.0 + sum(0.29 * n + 0.36 for n in counts), [n + 0.5 for n in counts])

    def fits(text, record):  # the axis is about 500 points wide
        points = 500 * 1e3 * (record.end - record.start) / (1.08 * longest)
        return TextPath((0, 0), text, size=9).get_extents().width + 7 < points

    for panel, (name, rows) in zip(axes, panels.items(), strict=True):
        for place, records in enumerate(rows.values()):
            for record in records:
                texts = [] if record.kind == "idle" else [record.name, record.name.rpartition(" ")[2].strip("↓↑")]
                text = next((text for text in texts if fits(text, record)), "")
                left, right = 1e3 * (record.start - begins[name]), 1e3 * (record.end - begins[name])
                span(panel, place, left, right, colours[record.kind], text)
        if ends_marked:
            panel.axvline(ends[name], color=INK, linewidth=1.2, linestyle="--")
            style = {"va": "bottom", "weight": "bold", "fontsize": 9}
            note(panel, f"{ends[name]:.0f} ms", (ends[name], -0.5), (4, 0), **style)
        heading(panel, name, pad=3)
        name_rows(panel, list(rows), bare=True)
    axes[-1].set_xlim(0, 1.08 * longest)
    axes[-1].set_xlabel("milliseconds")
    kinds = {record.kind for records in everything.values() for record in records}
    key(figure, {kind: colour for kind, colour in colours.items() if kind in kinds})
    return on_any_page(figure)


def _colours_of(kinds: set[str]) -> dict[str, str]:
    return {kind: colour for kind, colour in ACTIVITY.items() if kind in kinds}
