"""The figures of chapter 09: all-reduce as a ring, its bytes and its time, and SGD on several ranks."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, INK, RANK, on_any_page

__all__ = ["all_reduce_times", "bytes_by_world", "loss_by_iteration", "messages", "ring_steps"]

ALT = {
    "messages": "Messages between four ranks over time. Naive: three thick arrows from each rank, done after 3 "
    "seconds. Tree: two arrows up at once, one up, one down, two down, 4 seconds. Ring: thin arrows to the next "
    "rank, 1.5 seconds.",
    "ring_steps": "Four ranks with four chunks each, before the ring and after each of six steps. In the first "
    "three steps one chunk of every rank gains a colour; then each rank has one chunk with all four. Three more "
    "steps spread those.",
    "bytes_by_world": "Bytes that the busiest of 2, 3, 4 and 6 ranks sends for a buffer of 48: naive 48 to 240 in"
    " a straight line, tree 48 to 144 in steps, ring 48 to 80, always below a dotted line at 96.",
    "all_reduce_times": "Time of an all-reduce on eight ranks against the size of the buffer, both logarithmic. "
    "Tree is lowest for small buffers, naive close above; ring is flat and highest there, and lowest beyond some "
    "150,000 bytes.",
    "loss_by_iteration": "Training loss against iterations, three seeds each. One rank and two ranks with 30 rows"
    " together lie on one curve of 200 iterations. With 60 rows and the same rate it stops half way, with twice "
    "the rate it ends as low.",
}  # alternative texts of the chapter's figures


_FRAME = "#E8590C"  # no rank's colour
_PALE = "#8C8C8C44"  # half transparent: fainter than the words on light and on dark pages


def ring_steps(states: list[list[list[int]]]) -> draw.Figure:
    """A ring all-reduce, step by step: what each rank holds of each chunk, in the colours of the ranks in it.

    Rank r puts in 2 ** r, so that a number says who is in it, and the stripes are read from the numbers. The
    chunk that a rank has just received has a frame.

    Args:
        states: ``states[step][rank][chunk]`` is the number that stands in a chunk: first before the ring starts,
            then after each of its 2 (n - 1) steps.

    Returns:
        the figure: the first round, which adds, above the second, which copies.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch09 as figures

            before = [[1, 1], [2, 2]]
            figure = figures.ring_steps([before, [[1, 3], [3, 2]], [[3, 3], [3, 3]]])
    """
    n_ranks = len(states[0])
    title = f"Round one adds, round two copies: {len(states) - 1} steps, one chunk of {n_ranks} a step"
    width, height = n_ranks + 0.9, n_ranks + 1.5
    figure, axes = draw.new_drawing(title, width=7.4, height=0.62 * n_ranks + 1.7)
    for place in range(n_ranks):
        axes.text(place + 0.5, n_ranks + 0.05, str(place), fontsize=9, ha="center", va="top", color=INK)
    axes.text(-0.2, n_ranks + 0.05, "chunk", fontsize=9, ha="right", va="top", color=INK)
    for step, state in enumerate(states):
        row, column = (0, step) if step < n_ranks else (1, step - n_ranks + 1)
        left, top = column * width, row * height
        head = f"after step {step}" if step else "before"
        axes.text(left, top - 0.3, head, fontsize=9, fontweight="bold", va="center", color=INK)
        for rank, chunks in enumerate(state):
            if column == row:
                draw.label_rank(axes, left - 0.2, top + rank + 0.5, rank, color=INK)
            for place, value in enumerate(chunks):
                inside = left + place + 0.1, top + rank + 0.1, 0.8, 0.8
                draw.stripes(axes, *inside, [RANK[origin % len(RANK)] for origin in draw.ranks_in(value)])
                if step and value != states[step - 1][rank][place]:
                    frame = left + place + 0.03, top + rank + 0.03, 0.94, 0.94
                    draw.tile(axes, *frame, "none", edge=_FRAME, linewidth=2)
    words = f"Each rank sends to the\nnext, rank {n_ranks - 1} to rank 0.\nFramed: just received.\n"
    words += f"All {n_ranks} colours: the sum."
    axes.text(-1.7, height + n_ranks / 2, words, fontsize=9, va="center", linespacing=1.5, color=INK)
    axes.set(xlim=(-1.75, n_ranks * width - 0.8), ylim=(2 * height - 1.4, -0.7))
    return on_any_page(figure)


def messages(panels: dict[str, list], title: str) -> draw.Figure:
    """Who sends to whom and when: a panel an algorithm, a row a rank, an arrow a message; time to the right.

    Args:
        panels: name of an algorithm, of two or more, to its messages, such as ``in_flight`` of a simulation: each
            has ``rank``, ``name`` ("to 1"), ``start`` and ``end`` in seconds. An arrow is the thicker the longer
            its message takes.
        title: the finding.

    Returns:
        the figure; the panels share one scale of time.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch09 as figures
            from ignite_ddl.lab import cost, simulate

            link = cost.Link(latency=0, bandwidth=48)
            ways = {"naive": simulate.all_reduce_naive, "ring": simulate.all_reduce_ring}
            panels = {name: way(4, 48, link).in_flight for name, way in ways.items()}
            figure = figures.messages(panels, "Round a ring, a quarter at a time")
    """
    everything = [message for sent in panels.values() for message in sent]
    n_ranks = 1 + max(message.rank for message in everything)  # in an all-reduce every rank sends
    longest = max(message.end - message.start for message in everything)
    last = max(message.end for message in everything)
    figure, axes = draw.new_figure(title, width=7.6, height=0.42 * n_ranks + 1.3, columns=len(panels))
    for panel, (name, sent) in zip(axes, panels.items(), strict=True):
        done = max(message.end for message in sent)
        draw.heading(panel, f"{name}: {done:g} s", bold=True)
        for rank in range(n_ranks):
            line = {"color": _PALE, "linewidth": 7, "solid_capstyle": "butt", "zorder": 0}
            panel.plot([0, done], [rank, rank], **line)
        for message in sent:
            ends = (message.start, message.rank), (message.end, int(message.name.removeprefix("to ")))
            style = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 1, "mutation_scale": 9}
            style["linewidth"] = 0.6 + 1.9 * (message.end - message.start) / longest
            draw.arrow(panel, *ends, ACTIVITY["communication"], **style)
        panel.axvline(done, color=INK, linewidth=1.4)
        panel.set_xlim(-0.03 * last, 1.05 * last)
        panel.set_ylim(n_ranks - 0.6, -0.6)
        panel.set_xlabel("seconds")
        panel.set_yticks([])
        panel.spines["left"].set_visible(False)
    axes[0].set_yticks(range(n_ranks), [f"rank {rank}" for rank in range(n_ranks)])
    axes[0].tick_params(axis="y", length=0)
    return on_any_page(figure)


# Naive, tree and ring, as lines: the last is what the chapter is about.
_ALGORITHMS = (("o--", GREY), ("s-", ACTIVITY["forward"]), ("D-", ACTIVITY["communication"]))


def bytes_by_world(sent: dict[str, dict[int, int]], n_bytes: int) -> draw.Figure:
    """The most that one rank sends in an all-reduce, against the size of the world: a line for each way to do it.

    Args:
        sent: name of an algorithm, of three at most, to world size to bytes, those of the rank that sends most.
        n_bytes: size of one rank's buffer; twice of it is marked.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch09 as figures

            figure = figures.bytes_by_world({"naive": {2: 48, 4: 144}, "ring": {2: 48, 4: 72}}, n_bytes=48)
    """
    figure, axes = draw.new_figure("A larger world: a ring's rank never sends two buffers", height=2.9)
    for (name, of_world), (look, colour) in zip(sent.items(), _ALGORITHMS, strict=False):
        axes.plot(list(of_world), list(of_world.values()), look, color=colour, linewidth=2, markersize=7)
        last = max(of_world)
        draw.note(axes, f"{name}: {of_world[last]} bytes", (last, of_world[last]), (9, 0), colour)
    worlds = sorted({n for of_world in sent.values() for n in of_world})
    axes.axhline(2 * n_bytes, color=INK, linewidth=1.2, linestyle=":")
    draw.note(axes, f"twice the buffer: {2 * n_bytes}", (worlds[-1], 2 * n_bytes), (9, 5), color=INK, fontsize=9)
    axes.set_xticks(worlds)
    axes.set_ylim(0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("bytes that the busiest\nrank sends")
    return on_any_page(figure)


def all_reduce_times(
    sizes: list[float], predicted: dict[str, list[float]], measured: dict[str, dict[float, float]], n_ranks: int
) -> draw.Figure:
    """Seconds of an all-reduce against the size of its buffer: lines predicted, marks measured.

    Args:
        sizes: sizes of the buffer in bytes, in order.
        predicted: name of an algorithm, of three at most, to seconds, one for each size.
        measured: name of an algorithm to size in bytes to seconds.
        n_ranks: size of the world, for the title.

    Returns:
        the figure; both axes are logarithmic.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch09 as figures

            figure = figures.all_reduce_times([1, 1000], {"ring": [0.1, 0.3]}, {"ring": {1000: 0.31}}, n_ranks=8)
    """
    title = f"{n_ranks} ranks: a tree for small buffers, a ring for large ones"
    figure, axes = draw.new_figure(title, height=3.1)
    axes.set(xscale="log", yscale="log")
    ends = []
    for (name, seconds), (look, colour) in zip(predicted.items(), _ALGORITHMS, strict=False):
        milliseconds = [1e3 * value for value in seconds]
        axes.plot(sizes, milliseconds, look[1:], color=colour, linewidth=2)
        found = {size: 1e3 * value for size, value in measured.get(name, {}).items()}
        style = {"color": colour, "markersize": 9, "markeredgecolor": "white", "linestyle": "none"}
        axes.plot(list(found), list(found.values()), look[0], **style)
        ends.append((milliseconds[-1], name, colour))
    below = 0.0
    for height, name, colour in sorted(ends):  # of two that end close by, one name goes up and one down
        draw.note(axes, name, (sizes[-1], height), (7, 5 if height < 1.4 * below else -3), colour)
        below = height
    axes.set_xlim(sizes[0], sizes[-1])
    draw.log_ticks(axes, 1e3 * min(map(min, predicted.values())) / 1.6, 1e3 * max(map(max, predicted.values())) * 1.6)
    axes.set_xlabel("bytes in the buffer")
    axes.set_ylabel("milliseconds")
    text = "lines: predicted\nmarks: measured, with delays put in"
    axes.text(0.02, 0.96, text, transform=axes.transAxes, fontsize=9, va="top", color=INK)
    return on_any_page(figure)


def loss_by_iteration(runs: dict[str, list[list[tuple[int, float]]]], title: str) -> draw.Figure:
    """Loss against iterations: a line for each run, a look for each way to train, named where it ends.

    The second way is drawn as dots, so that the first shows beneath them.

    Args:
        runs: name of a way, of four at most, to its runs, one a seed; a run is a list of (iteration, loss).
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch09 as figures

            figure = figures.loss_by_iteration({"1 rank": [[(0, 2.3), (200, 0.7)]]}, "The loss falls")
    """
    figure, axes = draw.new_figure(title, height=3.2)
    looks = (("-", GREY), ("o", ACTIVITY["forward"]), ("-", ACTIVITY["backward_weight"]), ("-", ACTIVITY["optimizer"]))
    offsets = ((9, 7), (9, -7), (9, 12), (9, -10))  # away from each other, and from lines that go on
    for (name, lines), (line, colour), offset in zip(runs.items(), looks, offsets, strict=False):
        for points in lines:
            axes.plot(*zip(*points, strict=True), line, color=colour, linewidth=1.6, markersize=4)
        end = (lines[0][-1][0], sum(points[-1][1] for points in lines) / len(lines))
        axes.plot(*end, "o", color=colour, markersize=6)
        draw.note(axes, name, end, offset, colour)
    axes.set_xlim(0)
    axes.margins(y=0.12)
    axes.set_xlabel("iterations")
    axes.set_ylabel("training loss")
    return on_any_page(figure)
