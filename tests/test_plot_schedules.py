"""The figure of schedules: a row a rank, a box a pass, the same for measured and simulated ones."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from ignite_ddl import plot
from ignite_ddl.lab import simulate
from ignite_ddl.lab.record import Record
from ignite_ddl.plot import ACTIVITY

pytestmark = pytest.mark.usefixtures("no_window")


STEP = [
    Record(0, "forward", "0F0", 1.0, 2.0, None, 0, 0), Record(1, "forward", "1F0", 2.0, 3.0, None, 1, 0),
    Record(1, "communication", "send", 3.0, 3.5), Record(1, "idle", "", 1.0, 2.0),
    Record(1, "backward", "1I0", 3.5, 4.5, None, 1, 0), Record(1, "backward_weight", "1W0", 4.5, 5.0, None, 1, 0),
    Record(0, "backward", "0B0", 4.5, 6.0, None, 0, 0), Record(2, "communication", "elsewhere", 1.0, 2.0),
]  # fmt: skip


def test_every_pass_is_a_box_in_its_colour_with_its_microbatch():
    figure = plot.schedules({"measured": STEP}, "A finding")
    [axes] = figure.axes
    boxes = [(p.get_x(), round(p.get_width()), to_hex(p.get_facecolor()).upper()) for p in axes.patches]
    assert boxes[:2] == [(0, 5000, ACTIVITY["idle"])] * 2
    assert sorted(boxes[2:]) == sorted(
        [
            (0, 1000, ACTIVITY["forward"]), (1000, 1000, ACTIVITY["forward"]), (2000, 500, ACTIVITY["communication"]),
            (2500, 1000, ACTIVITY["backward"]), (3500, 500, ACTIVITY["backward_weight"]),
            (3500, 1500, ACTIVITY["backward"]),
        ]
    )  # fmt: skip
    assert [text.get_text() for text in axes.texts].count("0") == 5
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_xlim() == (0, 5000)
    assert axes.get_xlabel() == "milliseconds"
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward", "backward (input, or whole)", "backward (weights)", "communication", "idle"
    ]  # fmt: skip


def test_simulated_schedules_share_an_axis_and_later_stages_are_paler():
    panels = {name: simulate.pipeline(name, 2, 4).records for name in ("gpipe", "1f1b", "zbv")}
    figure = plot.schedules(panels, "A finding", unit="units")
    gpipe, f1b1, zbv = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(panels)
    assert gpipe.get_xlim() == f1b1.get_xlim() == zbv.get_xlim()
    assert zbv.get_xlabel() == "units"

    def colours(axes):
        return {to_hex(p.get_facecolor()).upper() for p in axes.patches}

    plain = {ACTIVITY[kind] for kind in ("forward", "backward", "backward_weight", "idle")}
    assert colours(gpipe) <= plain
    assert len(colours(zbv) - plain) == 3
    assert "backward (weights)" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_where_most_boxes_of_a_kind_are_too_narrow_none_has_a_number():
    step = [Record(0, "forward", "", n, n + (2.0 if n == 4 else 0.5), None, 0, n) for n in range(6)]
    step += [Record(0, "backward", "", 10 + 3 * n, 12.9 + 3 * n, None, 0, n) for n in range(29)]
    [axes] = plot.schedules({"measured": step}, "A finding", unit="units").axes
    assert [text.get_text() for text in axes.texts] == [str(n) for n in range(29)]


def test_text_is_at_least_9_points():
    figure = plot.schedules({"": STEP, "again": STEP[:2]}, "A finding")
    figure.canvas.draw()
    sizes = {text.get_text(): text.get_size() for text in figure.findobj(Text) if text.get_text()}
    assert min(sizes.values()) >= 9, sizes


def test_a_panel_without_passes_is_refused():
    with pytest.raises(
        ValueError, match=r"panels\['1F1B'\] should hold forward or backward passes, but holds none"
    ):
        plot.schedules({"gpipe": STEP, "1F1B": STEP[2:3]}, "")


def test_its_example_runs():
    example = plot.schedules.__doc__.split(".. code-block:: python\n")[1]
    space = {}
    exec("\n".join(line.removeprefix(" " * 12) for line in example.splitlines()), space)
    assert space["figure"].axes
