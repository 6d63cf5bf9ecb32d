"""The figures of chapter 19: pipelines with and without a flush, stale weights, and bubble against memory."""

from __future__ import annotations

from ignite_ddl.course.figures.ch13 import accuracy_over_rates
from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, on_any_page
from ignite_ddl.lab.simulate import Pipeline

__all__ = ["accuracy_over_rates", "time_and_memory", "weight_versions", "with_and_without_flush"]

TITLE = {
    "rates": "Stale weights cost little at the best rate, and much above it",
    "halves": "The W fill what 1F1B leaves grey (simulated)",
    "two stages": "What 1F1B does in 66 time units takes 57, or 51 (simulated)",
}
ALT = {
    "flush": "Two simulated runs of four ranks over 12 microbatches. 1F1B drains after every 4 microbatches and takes "
    "63 time units, with grey triangles in between. PipeDream is grey only at its beginning and end and takes 45.",
    "versions": "A table of four ranks and 12 microbatches. Rank 3: no update between forward and backward pass. "
    "Rank 2: one. Rank 1: two. Rank 0: three, from the fourth microbatch on.",
    "rates": "Test accuracy after 200 turns against the learning rate for four ways to train. Fresh weights every "
    "turn reach the highest top. PipeDream is close behind up to that rate, a few points lower up to 0.2, and falls "
    "far below at 0.4. Without a bubble and 1F1B have lower tops, at larger rates, and are the highest two at 0.8.",
    "halves": "Two simulated steps of four ranks with 8 microbatches. 1F1B takes 33 time units. With the backward "
    "pass in two, the weight gradients stand at the end of the ranks where 1F1B is grey, and the step takes 27.",
    "two stages": "Two simulated schedules of four ranks and 8 microbatches on one axis of time. interleaved_1f1b "
    "takes 57 time units, with grey between its passes and at both ends, zbv 51, with grey at the outer corners only.",
    "memory": "Bubble against activations kept by the fullest of four ranks. gpipe: 27 percent and 8 microbatches. "
    "1f1b: 27 and 4. looped_bfs: 16 and 8. interleaved_1f1b: 16 and 5.5. interleaved_zero_bubble and zbv: 6 and 4. "
    "dualpipev: 11 and 4.5. PipeDream: almost no bubble, and 4.",
}  # alternative texts of the chapter's figures


def with_and_without_flush(
    step: Pipeline,
    n_steps: int,
    endless: Pipeline,
    title: str = "The same 12 microbatches take 63 time units, or 45 (simulated)",
) -> draw.Figure:
    """Steps of a schedule one after the other, and under them a run that never drains.

    Args:
        step: a simulated step.
        n_steps: how often it is drawn.
        endless: the run.
        title: the finding. Default: the chapter's.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch19 as figures
            from ignite_ddl.lab import simulate

            step, run = simulate.pipeline("1f1b", 2, 2), simulate.pipedream(2, 6).pipeline
            figure = figures.with_and_without_flush(step, 3, run, "18 units or 15")
    """
    count = 1 + max(span.microbatch for span in step.records if span.microbatch is not None)
    flushed = []
    for n in range(n_steps):
        late = n * step.seconds
        flushed += [
            span._replace(start=span.start + late, end=span.end + late, microbatch=count * n + span.microbatch)
            for span in step.records
            if span.microbatch is not None
        ]
    panels = {
        f"1F1B, an update after every {count} microbatches": flushed,
        "PipeDream, an update after each": endless.records,
    }
    return draw.schedules(panels, title, unit="time units")


def weight_versions(
    used: list[list[int]],
    newest: list[list[int]],
    title: str = "The earlier the stage, the more its weights change in between",
) -> draw.Figure:
    """With which version of its weights each stage runs a microbatch: a row a rank, a column a microbatch.

    A tile holds the version at the forward pass and the newest one at the backward pass; the more updates lie in
    between, the darker it is.

    Args:
        used: for each rank, the version at each microbatch's forward pass.
        newest: for each rank, the newest version at each microbatch's backward pass.
        title: the finding. Default: the chapter's.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch19 as figures

            figure = figures.weight_versions([[0, 0, 1], [0, 1, 2]], [[0, 1, 2], [0, 1, 2]], "Rank 0 is one behind")
    """
    n_ranks, count = len(used), len(used[0])
    figure, axes = draw.new_figure(title, width=7.4, height=1.1 + 0.42 * n_ranks)
    pairs = [list(zip(*of_rank, strict=True)) for of_rank in zip(used, newest, strict=True)]
    most = max(1, *(late - early for of_rank in pairs for early, late in of_rank))
    for rank, of_rank in enumerate(pairs):
        for m, (early, late) in enumerate(of_rank):
            colour = draw.pale(ACTIVITY["backward_weight"], 0.08 + 0.8 * (late - early) / most)
            draw.tile(axes, m, rank, 1, 0.92, colour, f"{early} → {late}")
    axes.set_xlim(0, count)
    axes.set_ylim(n_ranks, 0)
    axes.set_xticks([m + 0.5 for m in range(count)], range(count))
    axes.set_yticks([rank + 0.46 for rank in range(n_ranks)], [f"rank {rank}" for rank in range(n_ranks)])
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_xlabel("microbatch; in a tile: updates before its forward pass → before its backward pass")
    return on_any_page(figure)


def time_and_memory(
    schedules: dict[str, tuple[float, list[float]]],
    title: str = "Bubble and memory of eight schedules: down and left is better",
) -> draw.Figure:
    """The bubble of each schedule against the activations that its ranks keep: down and to the left is better.

    Args:
        schedules: name to its bubble, a share, and for each rank the microbatches that it keeps at most. A line leads
            from the rank that keeps least to the one that keeps most, where the mark and the name are.
        title: the finding. Default: the chapter's.

    Returns:
        the figure; schedules at one place share a mark.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch19 as figures

            figure = figures.time_and_memory({"gpipe": (0.27, [8, 8]), "1f1b": (0.27, [2, 1])}, "1F1B keeps less")
    """
    figure, axes = draw.new_figure(title, height=3.4)
    blue = ACTIVITY["forward"]
    places: dict[tuple[float, float], list[str]] = {}
    for name, (bubble, kept) in schedules.items():
        places.setdefault((max(kept), round(100 * bubble, 3)), []).append(name)
        axes.plot([min(kept), max(kept)], [100 * bubble] * 2, color=blue, linewidth=1.5, alpha=0.5)
    for (kept, percent), names in places.items():
        axes.plot(kept, percent, "o", color=blue, markersize=8)
        draw.note(axes, "\n".join(names), (kept, percent), (9, 0), fontsize=9)
    widest, highest = (max(values) for values in zip(*places, strict=True))
    axes.set_xlim(0, 1.22 * widest)
    axes.set_ylim(-0.1 * highest, 1.15 * highest)
    axes.set_xlabel("activations kept at most, in microbatches (mark: the fullest rank, line: to the emptiest)")
    axes.set_ylabel("bubble, % of a step")
    return on_any_page(figure)
