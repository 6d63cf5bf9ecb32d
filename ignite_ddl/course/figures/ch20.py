"""The figures of chapter 20: a mesh on its machines, which ranks a sum goes over, and the bytes of each axis."""

from __future__ import annotations

from collections.abc import Mapping

from ignite_ddl.lab import draw
from ignite_ddl.lab.draw import INK

__all__ = ["bytes_by_axis", "mesh_on_machines", "rows_in_a_sum"]

ALT = {  # what the chapter's figures show, in words
    "mesh_on_machines": (
        "Eight ranks on two machines of four. Lines join tp pairs side by side and dp pairs above each other, both "
        "inside a machine. Arcs join pp pairs from one machine to the other."
    ),
    "rows_in_a_sum": (
        "Ranks 0, 1, 4 and 5 counted 18 rows, ranks 2, 3, 6 and 7 counted 19. Over the world all eight are added, "
        "148 rows. Over dp, rank 0 adds its own 18 and the 19 of rank 2: 37 rows."
    ),
    "bytes_by_axis": (
        "Bytes that rank 7 sends on rings. 8 by 1 by 1: dp 60,032. 4 by 1 by 2: dp 26,112, tp 14,336. 2 by 2 by 2: "
        "dp 8,704, pp 4,096, tp 16,384. 1 by 4 by 2: pp 8,192, tp 16,384. 2 by 4 by 1: dp 8,576, pp 4,096."
    ),
}

# Which axis it is (Tol's "vibrant" set): a third family, beside those of activities and ranks.
AXIS = {"pp": "#EE7733", "dp": "#009988", "tp": "#EE3377"}


def mesh_on_machines(sizes: Mapping[str, int], ranks_per_machine: int) -> draw.Figure:
    """Two machines full of ranks, each tile with its place, and the groups of each axis as lines between tiles.

    Args:
        sizes: of the axes "dp", "pp" and "tp", of which each is 2.
        ranks_per_machine: 4.

    Returns:
        the figure: a column for each place on tp, a row for each on dp, a machine for each on pp.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch20 as figures

            figure = figures.mesh_on_machines({"dp": 2, "pp": 2, "tp": 2}, ranks_per_machine=4)
    """
    title = "Ranks of one layer are neighbours; stages are a machine apart"
    figure, axes = draw.new_drawing(title, width=7, height=3)
    wide, tall, across, down, away = 2.3, 1.0, 3.2, 2.1, 7.6
    centres = {}
    for rank in range(2 * ranks_per_machine):
        pp, rest = divmod(rank, sizes["dp"] * sizes["tp"])
        dp, tp = divmod(rest, sizes["tp"])
        centres[pp, dp, tp] = away * pp + across * tp, down * dp
    for machine in (0, 1):
        left = away * machine
        draw.tile(axes, left - 1.4, -0.75, across + 2.8, down + 1.5, "none", edge=INK, linestyle=":")
        style = {"size": 10, "weight": "bold", "ha": "center", "va": "center", "color": INK}
        axes.text(left + across / 2, down / 2, f"machine {machine}", **style)
    for (pp, dp, tp), (x, y) in centres.items():
        side = tall / 2 if dp else -tall / 2
        starts = {"pp": (x, y + side), "dp": (x, y + tall / 2), "tp": (x + wide / 2, y)}
        ends = {"pp": (x + away, y + side), "dp": (x, y + down - tall / 2), "tp": (x + across - wide / 2, y)}
        for axis, place in (("pp", pp), ("dp", dp), ("tp", tp)):
            if place == 0:
                bend = (0.2 if dp else -0.2) if axis == "pp" else 0.0
                style = {"arrowstyle": "-", "linewidth": 3, "connectionstyle": f"arc3,rad={bend}"}
                draw.arrow(axes, starts[axis], ends[axis], AXIS[axis], shrinkA=0, shrinkB=0, **style)
        text = f"rank {(pp * sizes['dp'] + dp) * sizes['tp'] + tp}\ndp {dp}  pp {pp}  tp {tp}"
        draw.tile(axes, x - wide / 2, y - tall / 2, wide, tall, "#5B6B7B", text, edge="none")
    words = {"tp": "tp: parts of a layer", "dp": "dp: copies of weights", "pp": "pp: stages of the model"}
    for place, (axis, text) in enumerate(words.items()):
        style = {"size": 9, "weight": "bold", "ha": "center", "color": AXIS[axis]}
        axes.text((away + across) * (0.08 + 0.42 * place), down + 2.3, text, **style)
    axes.set_xlim(-1.5, away + across + 1.5)
    axes.set_ylim(down + 2.4, -1.9)
    return draw.on_any_page(figure)


def rows_in_a_sum(rows: list[int], sums: Mapping[str, tuple[list[int], int]]) -> draw.Figure:
    """The rows that each rank counted, once for each way to add them up: what is in the sum is coloured.

    Args:
        rows: counted by each rank, in rank order; at most 8 ranks.
        sums: heading of a panel to the ranks whose numbers are added, and their sum.

    Returns:
        the figure; ranks that are left out are empty.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch20 as figures

            sums = {"over the world": ([0, 1, 2, 3], 74), "over dp": ([0, 2], 37)}
            figure = figures.rows_in_a_sum([18, 18, 19, 19], sums)
    """
    title = "Every rank has a count, and only the dp ranks have different rows"
    figure, panels = draw.new_drawing(title, width=7, height=2.6, columns=len(sums))
    for axes, (name, (ranks, total)) in zip(panels, sums.items(), strict=True):
        draw.heading(axes, f"{name}: {total} rows", bold=True)
        for rank, n in enumerate(rows):
            left, top = 1.1 * (rank % 4), 1.1 * (rank // 4)
            taken = rank in ranks
            text = f"rank {rank}\n{n} rows"
            colour, edge, ink = (AXIS["dp"], "none", "white") if taken else ("none", INK, INK)
            look = {"edge": edge, "linestyle": "-" if taken else ":", "color": ink}
            draw.tile(axes, left, top, 1, 1, colour, text, **look)
        axes.set_xlim(-0.1, 4.5)
        axes.set_ylim(1.1 * -(-len(rows) // 4) + 0.05, -0.1)
    return draw.on_any_page(figure)


def bytes_by_axis(sent: Mapping[str, Mapping[str, int]], title: str) -> draw.Figure:
    """Bytes that a rank puts into each axis in a step, a bar a mesh.

    Args:
        sent: name of a mesh to bytes by axis, "dp", "pp" and "tp"; any other name is left out.
        title: the finding.

    Returns:
        the figure; the first mesh is at the top.

    Examples:
        .. code-block:: python

            from ignite_ddl.course.figures import ch20 as figures

            sent = {"8 × 1 × 1": {"dp": 34304, "pp": 0, "tp": 0}, "2 × 2 × 2": {"dp": 8704, "pp": 4096, "tp": 16384}}
            figure = figures.bytes_by_axis(sent, "Other meshes, other traffic")
    """
    figure, axes = draw.new_figure(title, height=0.42 * len(sent) + 1.1)
    widest = max(sum(sizes.get(axis, 0) for axis in AXIS) for sizes in sent.values())
    for place, sizes in enumerate(sent.values()):
        parts = [
            (n, AXIS[axis], f"{axis} {n:,}" if n > 0.13 * widest else axis if n > 0.03 * widest else "")
            for axis, n in sizes.items()
            if n and axis in AXIS
        ]
        draw.bar(axes, place, parts, 0.62, upright=False)
    draw.name_rows(axes, list(sent), bare=True)
    axes.set_xlim(0, 1.02 * widest)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("bytes that a rank sends on rings, a step (dp × pp × tp)")
    return draw.on_any_page(figure)
