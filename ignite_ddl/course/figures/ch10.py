"""The figures of chapter 10: who works and what travels in a step, and where a step's time goes."""

from __future__ import annotations

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import ACTIVITY, INK
from ignite_ddl.lab.record import Record
from ignite_ddl.lab.simulate import Simulation

__all__ = ["buckets", "master_and_ddp", "step_shares"]

ALT = {
    "master_and_ddp": "Two panels. With a master, rank 0 sends and receives for a long time around its short "
    "forward and backward, and three other ranks wait. With DDP four ranks compute forward and backward, and a "
    "row below shows four pieces in flight, three of them while backward goes on. The step is little more than "
    "half as long.",
    "buckets": "Four panels with two rows each, what rank 0 computes and what its line carries. With one bucket "
    "the line is empty until backward ends, then carries for as long again. With four buckets the line works "
    "during backward, and only the last bucket sticks out.",
    "step_shares": "Bars of a step's time for 1, 2, 4, 8 and 16 ranks. With a master computing shrinks and "
    "communication grows, and 16 ranks take longer than one. With DDP the bars shrink throughout, with a growing "
    "share of communication.",
}  # alternative texts of the chapter's figures


def master_and_ddp(master: Simulation, ddp: Simulation, title: str) -> draw.Figure:
    """A step of each scheme, a row a rank; below DDP's ranks what travels meanwhile, bucket by bucket.

    Args:
        master: of ``simulate.master_step``.
        ddp: of ``simulate.ddp_step``, with as many ranks.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch10 as figures
            from ignite_ddl.lab import cost, simulate

            link = cost.Link(latency=0, bandwidth=1)
            ddp = simulate.ddp_step(2, [4, 4], link, forward_seconds=5, backward_seconds=10)
            figure = figures.master_and_ddp(simulate.master_step(2, 8, 4, 1, link, 10, 20), ddp, "Two schemes")
    """
    ranks = range(len(master.messages))
    panels = {
        "master: rank 0": {f"rank {n}": [record for record in master.records if record.rank == n] for n in ranks},
        "DDP": {f"rank {n}": _passes(ddp, n) for n in ranks} | {"in flight": _carried(ddp)},
    }
    figure = draw.step_rows(panels, title)
    # What is sent beside these records, in boxes that are too narrow for a word.
    too_narrow = {"forward": "inputs", "loss": "logits, loss"}
    for record in master.records:
        if record.rank == 0 and record.name in too_narrow:
            style = {"ha": "center", "va": "baseline", "fontsize": 9, "color": INK}
            draw.note(figure.axes[0], too_narrow[record.name], (1e3 * record.start, -0.5), (0, 5), **style)
    return figure


def buckets(simulated: dict[str, Simulation], measured: dict[str, dict[str, list]], title: str) -> draw.Figure:
    """What rank 0 computes and what its line carries, simulated and measured, under each other.

    Args:
        simulated: name of a step to its simulation by ``simulate.ddp_step``.
        measured: the same names to rows, name of a row to its records.
        title: the finding.

    Returns:
        the figure.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch10 as figures
            from ignite_ddl.lab import cost, simulate
            from ignite_ddl.lab.record import Record

            step = simulate.ddp_step(2, [4, 4], cost.Link(0, 1), forward_seconds=5, backward_seconds=10)
            measured = {"rank 0": [Record(0, "backward", "backward", 5, 15)], "its line": []}
            figure = figures.buckets({"two buckets": step}, {"two buckets": measured}, "One hides")
    """
    panels = {}
    for name, simulation in simulated.items():
        passes = [record._replace(name=record.kind) for record in _passes(simulation, 0)]
        panels[f"{name}, simulated"] = {"rank 0": passes, "its line": _carried(simulation)}
        panels[f"{name}, measured"] = measured[name]
    return draw.step_rows(panels, title)


def _passes(simulation: Simulation, rank: int) -> list[Record]:
    return [r for r in simulation.records if r.rank == rank and r.kind in ("forward", "backward")]


def _carried(simulation: Simulation) -> list[Record]:
    """What rank 0 sends, the messages of a bucket as one record: a ring of n ranks makes 2 (n - 1) of it."""
    sent = [message for message in simulation.in_flight if message.rank == 0]
    n = 2 * (len(simulation.messages) - 1)
    parts = [sent[start : start + n] for start in range(0, len(sent), n)]
    return [Record(0, "communication", f"bucket {i}", part[0].start, part[-1].end) for i, part in enumerate(parts)]


def step_shares(schemes: dict[str, dict[int, dict[str, float]]], title: str) -> draw.Figure:
    """Where a step's time goes, against the size of the world: a panel a scheme, a bar a world, stacked.

    Args:
        schemes: name of a scheme, of two or more, to world size to seconds by kind ("compute", "communication"),
            bottom first.
        title: the finding.

    Returns:
        the figure; the panels share the axis of time, and each bar has its milliseconds above it.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch10 as figures

            alone = {"compute": 0.3, "communication": 0.0}
            figure = figures.step_shares({"master": {1: alone}, "DDP": {1: alone}}, "Alone they are the same")
    """
    figure, axes = draw.new_figure(title, height=2.9, columns=len(schemes), sharey=True)
    for panel, (name, worlds) in zip(axes, schemes.items(), strict=True):
        for place, parts in enumerate(worlds.values()):
            seconds = [(1e3 * value, ACTIVITY[kind], "") for kind, value in parts.items()]
            top = draw.bar(panel, place, seconds, 0.74)
            draw.note(panel, f"{top:.0f}", (place, top), (0, 2), ha="center", va="baseline", fontsize=9, color=INK)
        draw.heading(panel, name, pad=9)
        panel.set_xticks(range(len(worlds)), [str(n) for n in worlds])
        panel.set_xlabel("ranks")
    axes[0].set_ylabel("milliseconds a step")
    axes[0].set_ylim(0, 1.12 * axes[0].get_ylim()[1])
    bars = list(next(iter(schemes.values())).values())
    large = [kind for kind, seconds in bars[-1].items() if seconds > 0.2 * sum(bars[-1].values())]
    for place, named in ((0, ["compute"]), (len(bars) - 1, large)):
        below = 0.0
        for kind, seconds in bars[place].items():
            if kind in named:
                style = {"ha": "center", "va": "center", "rotation": 90, "size": 9}
                axes[0].text(place, below + 5e2 * seconds, kind, color=draw.ink_on(ACTIVITY[kind]), **style)
            below += 1e3 * seconds
    return draw.on_any_page(figure)
