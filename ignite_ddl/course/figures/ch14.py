"""The figures of chapter 14: what each ZeRO stage keeps on a rank, and how much memory that takes."""

from __future__ import annotations

from ignite_ddl.lab import cost, draw
from ignite_ddl.lab.draw import ACTIVITY, GREY, SHADE

__all__ = ["queues", "split_peaks", "zero_peaks", "zero_stages"]

ALT = {
    "stages": "Four ranks, each with weights, gradients and a wide block of optimizer state. Data parallel: all are "
    "full. ZeRO-1: each rank keeps a quarter of the optimizer state. ZeRO-2: of the gradients, too. ZeRO-3: of all "
    "three.",
    "queues": "Two timelines of a step, each with a row for the network and one for products. One after the other: "
    "the rows take turns, 384 ms. Two queues: gathers and scatters lie under products, but for the first and the "
    "last, 224 ms.",
    "peaks": "Eight stacked bars in MiB. The states fall from 16 for data parallel to 4 for ZeRO-3, with little room "
    "on top. Three of states, but far more room: weights not freed, all layers as one unit, and 512 rows.",
}  # alternative texts of the chapter's figures

_PARTS = {"weights": ACTIVITY["forward"], "gradients": ACTIVITY["backward"], "optimizer": ACTIVITY["optimizer"]}
_STAGES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def zero_stages(memories: list) -> draw.Figure:
    """Who holds what of the model's states under ZeRO: a panel a stage, a row a rank, filled where it holds a slice.

    Args:
        memories: ``cost.zero_memory(1, 4, stage)`` for the stages 0 to 3: bytes a parameter on four ranks.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch14 as figures
            from ignite_ddl.lab import cost

            figure = figures.zero_stages([cost.zero_memory(1, 4, stage) for stage in range(4)])
            assert figure.axes[0].texts[0].get_text() == "data parallel: 16 bytes a parameter"
    """
    title, n_ranks = "From stage to stage, a rank keeps only its shard of one thing more", 4
    figure, axes = draw.new_drawing(title, 7.4, 3.9)
    for place, (name, memory) in enumerate(zip(_STAGES, memories, strict=True)):
        left, top = 19.5 * (place % 2), 6.6 * (place // 2)
        axes.text(left, top - 0.5, f"{name}: {memory.total:.3g} bytes a parameter", size=10, weight="bold")
        for rank in range(n_ranks):
            if left == 0:
                axes.text(-0.4, top + rank + 0.42, f"rank {rank}", size=9, ha="right", va="center")
            x = left
            for part, colour in _PARTS.items():
                size, mine = getattr(memories[0], part), getattr(memory, part)
                step = size / n_ranks
                for owner in range(n_ranks):
                    filled = mine == size or owner == rank
                    fill = colour if filled else SHADE
                    draw.tile(axes, x, top + rank, step - 0.06, 0.84, fill, edge="none")
                    x += step
                x += 0.3
    of_optimizer = "optimizer: copy, momentum, variance"
    for x, down, label in ((1.0, 0.0, "weights"), (3.5, 0.75, "gradients"), (10.6, 0.0, of_optimizer)):
        colour = _PARTS[label.split(":")[0]]
        for left in (0, 19.5):
            axes.text(left + x, 10.75 + down, label, size=9, ha="center", va="top", color=colour)
    axes.set(xlim=(-2.8, 36.3), ylim=(12.3, -1.4))
    return draw.on_any_page(figure)


def queues(in_turn: dict, in_queues: dict) -> draw.Figure:
    """An FSDP step, one thing after the other and in two queues: a row for the network and one for products each.

    Args:
        in_turn: what ``course.overlapped(log, seconds, ahead=False)`` returns.
        in_queues: what ``course.overlapped(log, seconds)`` returns.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course import overlapped
            from ignite_ddl.course.figures import ch14 as figures

            log = [("gather", 0), ("forward", 0), ("gather", 1), ("forward", 1)]
            seconds = {"gather": 0.016, "forward": 0.016}
            figure = figures.queues(overlapped(log, seconds, ahead=False), overlapped(log, seconds))
            assert len(figure.axes) == 2
    """
    title = "Gathers (g) and scatters (s) hide behind products (FSDP2's order, stated times)"
    return draw.step_rows({"one thing after the other": in_turn, "two queues": in_queues}, title)


def split_peaks(of_run: dict[str, tuple[int, dict[str, float]]]) -> tuple[dict, dict, dict]:
    """Splits the peaks of the chapter's runs into the states that lie there and the room to work in.

    Args:
        of_run: name of a run, on four ranks with 2**20 parameters in float32 and Adam, to its stage and what
            ``StepMemory.peak`` has found, in MiB by kind.

    Returns:
        three dicts by name: the states predicted, those of them that lie there at the peak, both
        ``cost.ZeroMemory`` in MiB, and the MiB that remain.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch14 as figures

            peak = {"parameters": 1.0, "optimizer": 2.0, "gradients": 0.75, "on the way": 1.0}
            states, there, room = figures.split_peaks({"ZeRO-3": (3, peak)})
            assert (states["ZeRO-3"].total, there["ZeRO-3"].total, room["ZeRO-3"]) == (4, 3.75, 1)
    """
    states, there, room = {}, {}, {}
    for name, (stage, peak) in of_run.items():
        states[name] = there[name] = cost.zero_memory(1, 4, stage, 4, 4, 8)
        if stage == 3:  # a gradient's shard is made when its layer is done
            missing = states[name].gradients - peak["gradients"]
            there[name] = states[name]._replace(gradients=peak["gradients"], total=states[name].total - missing)
        room[name] = sum(peak.values()) - there[name].total
    return states, there, room


def zero_peaks(states: dict, room: dict[str, float]) -> draw.Figure:
    """Memory of a step under ZeRO as stacked bars: the states, which are predicted, and what else the peak holds.

    Args:
        states: name of a bar to ``cost.zero_memory``, in MiB.
        room: name of a bar to the MiB at the peak besides the states.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch14 as figures
            from ignite_ddl.lab import cost

            states = {f"ZeRO-{stage}": cost.zero_memory(1, 4, stage, 4, 4, 8) for stage in (1, 3)}
            figure = figures.zero_peaks(states, {"ZeRO-1": 0.27, "ZeRO-3": 0.94})
            assert figure.axes[0].get_ylabel() == "MiB on a rank"
    """
    title = "Sharding divides the states; the room to work in is up to you"
    figure, axes = draw.new_figure(title, width=7.4, height=3.5)
    room_colour = GREY
    for place, (name, memory) in enumerate(states.items()):
        sizes = [(getattr(memory, part), colour) for part, colour in _PARTS.items()] + [(room[name], room_colour)]
        parts = [(size, colour, f"{round(size, 1):g}" if size >= 1.8 else "") for size, colour in sizes]
        top = draw.bar(axes, place, parts, 0.66)
        axes.text(place, top + 0.4, f"{top:.1f}", size=9, weight="bold", ha="center", va="bottom")
    axes.set_xticks(range(len(states)), [name.replace("data ", "data\n") for name in states])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 1.12 * max(memory.total + room[name] for name, memory in states.items()))
    axes.set_ylabel("MiB on a rank")
    draw.key(figure, _PARTS | {"room to work in (measured)": room_colour})
    return draw.on_any_page(figure)
