"""The figures of chapter 10: what they draw, and that their text is large enough to read."""

import pytest
from checking import text_sizes
from matplotlib.colors import to_hex

from ignite_ddl import plot
from ignite_ddl.lab import cost, simulate

pytestmark = pytest.mark.usefixtures("no_window")


STEP = simulate.ddp_step(2, [4, 4], cost.Link(0, 1), forward_seconds=5, backward_seconds=10)
OF_RANKS = {f"rank {n}": [record for record in STEP.records if record.rank == n] for n in range(2)}
SHARES = {n: {"compute": 0.3 / n, "communication": 0.1 * (n - 1)} for n in (1, 2, 4)}
FIGURES = {
    "step_rows": lambda: plot.step_rows(
        {"whole": OF_RANKS, "first rank": {"rank 0": OF_RANKS["rank 0"]}}, "It is"
    ),
    "bytes_through_a_rank": lambda: plot.bytes_through_a_rank(
        {"master": {2: 2e6, 8: 14e6}, "rank of DDP": {2: 2e6, 8: 3.5e6}}, {"master": {2: 2_000_000}}
    ),
    "step_shares": lambda: plot.step_shares({"master": SHARES, "DDP": SHARES}, "It grows"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


def test_a_box_stands_where_its_record_says():
    axis = FIGURES["step_rows"]().axes[0]
    boxes = {
        (box.get_x(), box.get_width(), round(box.get_y() + box.get_height() / 2)) for box in axis.patches
    }
    wanted = {
        (1e3 * record.start, 1e3 * (record.end - record.start), place)
        for place, records in enumerate(OF_RANKS.values())
        for record in records
    }
    assert {tuple(round(value, 6) for value in box) for box in boxes} == {
        tuple(round(value, 6) for value in box) for box in wanted
    }


def test_a_step_begins_at_its_first_record_and_says_how_long_it_takes():
    late = [record._replace(start=record.start + 7, end=record.end + 7) for record in OF_RANKS["rank 0"]]
    axis = plot.step_rows({"late": {"rank 0": late}}, "Late").axes[0]
    assert min(box.get_x() for box in axis.patches) == 0
    assert f"{1e3 * STEP.seconds:.0f} ms" in [text.get_text() for text in axis.texts]


def test_bytes_lie_where_they_were_counted():
    axis = FIGURES["bytes_through_a_rank"]().axes[0]
    lines = [(list(line.get_xdata()), [float(y) for y in line.get_ydata()]) for line in axis.lines]
    assert ([2, 8], pytest.approx([2.0, 14.0])) in lines
    assert ([2], [2.0]) in lines


def test_a_bar_is_as_high_as_its_step():
    for axis in FIGURES["step_shares"]().axes:
        tops = [text.get_text() for text in axis.texts if text.get_text().isdigit()]
        assert tops == ["300", "250", "375"]
        heights = [box.get_height() for box in axis.patches if to_hex(box.get_facecolor()) == "#cc79a7"]
        assert heights == pytest.approx([0, 100, 300])
