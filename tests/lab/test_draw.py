"""The instruments' figures and the kit that they and the chapters' figures are made of."""

import pytest
from matplotlib.colors import to_hex, to_rgb

from ignite_ddl.lab import cost, draw, simulate
from ignite_ddl.lab.draw import ACTIVITY, GREY, RANK
from ignite_ddl.lab.record import KINDS, Record

pytestmark = pytest.mark.usefixtures("no_window")


def bars(axes):
    """(row, left, width, colour) of each box, in the axis' own numbers."""
    return [
        (
            round(box.get_y() + box.get_height() / 2),
            round(box.get_x(), 3),
            round(box.get_width(), 3),
            to_hex(box.get_facecolor()).upper(),
        )
        for box in axes.patches
    ]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def contrast(one, other):
    """The contrast ratio of the web's accessibility guidelines, from 1 to 21."""

    def luminance(colour):
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colour", sorted({*ACTIVITY.values(), *RANK}))
def test_text_can_be_read_on_every_colour_and_in_it(colour):
    assert contrast(draw.ink_on(colour), colour) >= 3
    assert contrast(draw.ink(colour), "#FFFFFF") >= 3
    assert contrast(draw.ink(colour), "#111111") >= 3


def test_without_a_ground_what_has_no_colour_is_grey_and_the_rest_stays():
    figure, axes = draw.new_figure("A title")
    draw.tile(axes, 0, 0, 1, 1, draw.ACTIVITY["idle"], "on a tile")
    draw.note(axes, "beside a point", (1, 1))
    draw.note(axes, "in a colour", (0, 1), color=RANK[1])
    assert draw.on_any_page(figure) is figure
    assert (figure.patch.get_alpha(), axes.patch.get_alpha()) == (0, 0)
    assert [text.get_color() for text in axes.texts] == ["#222222", draw.INK, RANK[1]]
    assert {axes.get_title(loc="left"), axes._left_title.get_color()} == {"A title", draw.INK}
    assert min(contrast(draw.INK, page) for page in ("#FFFFFF", "#111111")) >= 3


def test_every_kind_of_a_record_has_a_colour():
    assert set(KINDS) <= set(ACTIVITY)


RECORDS = [
    Record(0, "compute", "step 1", 5.0, 5.1),
    Record(0, "idle", "waits for rank 3", 5.1, 5.3, 3),
    Record(0, "communication", "allreduce", 5.3, 5.31),
    Record(3, "handlers", "run", 5.0, 5.05),
    Record(3, "compute", "step 1", 5.05, 5.3),
]


def test_a_timeline_has_a_row_a_rank_in_milliseconds_from_the_first_record():
    [axes] = draw.timeline(RECORDS).axes
    assert bars(axes) == [
        (0, 0, 100, ACTIVITY["compute"]),
        (0, 100, 200, ACTIVITY["idle"]),
        (0, 300, 10, ACTIVITY["communication"]),
        (1, 0, 50, ACTIVITY["handlers"]),
        (1, 50, 250, ACTIVITY["compute"]),
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 3"]
    assert axes.yaxis_inverted(), "rank 0 at the top"
    assert texts(axes) == ["step 1", "waits for rank 3", "handlers", "step 1"], "where there is room"
    narrow = [Record(0, "compute", "step 1", 0, 9), Record(0, "idle", "waits", 9, 10, 2)]
    assert texts(draw.timeline(narrow).axes[0]) == ["step 1", "for 2"]


def test_records_without_length_are_drawn():
    step = [Record(0, "forward", "0F0", 1.0, 1.0, None, 0, 0)]
    for figure in (
        draw.timeline(step), draw.schedules({"at once": step}, "A finding"),
        draw.step_rows({"at once": {"rank 0": step}}, "A finding"),
    ):  # fmt: skip
        assert bars(figure.axes[0])[-1][:3] == (0, 0, 0)


def test_a_timeline_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing was recorded"):
        draw.timeline([])


STEP = [
    Record(0, "forward", "0F0", 1.0, 2.0, None, 0, 0), Record(1, "forward", "1F0", 2.0, 3.0, None, 1, 0),
    Record(1, "communication", "send", 3.0, 3.5), Record(1, "idle", "", 1.0, 2.0),
    Record(1, "backward", "1I0", 3.5, 4.5, None, 1, 0), Record(1, "backward_weight", "1W0", 4.5, 5.0, None, 1, 0),
    Record(0, "backward", "0B0", 4.5, 6.0, None, 0, 0), Record(2, "communication", "elsewhere", 1.0, 2.0),
]  # fmt: skip


def test_a_pass_of_a_schedule_is_a_box_in_its_colour_with_its_microbatch():
    figure = draw.schedules({"measured": STEP}, "A finding")
    [axes] = figure.axes
    assert bars(axes)[:2] == [(0, 0, 5000, GREY), (1, 0, 5000, GREY)]
    assert sorted(bars(axes)[2:]) == [
        (0, 0, 1000, ACTIVITY["forward"]),
        (0, 3500, 1500, ACTIVITY["backward"]),
        (1, 1000, 1000, ACTIVITY["forward"]),
        (1, 2000, 500, ACTIVITY["communication"]),
        (1, 2500, 1000, ACTIVITY["backward"]),
        (1, 3500, 500, ACTIVITY["backward_weight"]),
    ]
    assert texts(axes) == ["0"] * 5
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "forward", "backward (input, or whole)", "backward (weights)", "communication", "idle"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"panels\['1F1B'\] should hold forward or backward passes, but holds none"):
        draw.schedules({"gpipe": STEP, "1F1B": STEP[2:3]}, "")


def test_schedules_share_an_axis_and_later_stages_are_paler():
    panels = {name: simulate.pipeline(name, 2, 4).records for name in ("gpipe", "zbv")}
    gpipe, zbv = draw.schedules(panels, "A finding", unit="units").axes
    assert gpipe.get_xlim() == zbv.get_xlim()
    assert zbv.get_xlabel() == "units"
    plain = {GREY, *(ACTIVITY[kind] for kind in ("forward", "backward", "backward_weight"))}
    assert {bar[3] for bar in bars(gpipe)} <= plain
    assert len({bar[3] for bar in bars(zbv)} - plain) == 3


def test_where_boxes_are_too_narrow_or_rows_too_low_none_has_a_number():
    step = [Record(0, "forward", "", n, n + (2.0 if n == 4 else 0.5), None, 0, n) for n in range(6)]
    step += [Record(0, "backward", "", 10 + 3 * n, 12.9 + 3 * n, None, 0, n) for n in range(29)]
    [axes] = draw.schedules({"measured": step}, "A finding", unit="units").axes
    assert texts(axes) == [str(n) for n in range(29)]
    assert not texts(draw.schedules({"measured": step}, "A finding", unit="units", row=0.14).axes[0])


def test_a_step_begins_at_its_first_record_and_says_how_long_it_takes():
    step = simulate.ddp_step(2, [4, 4], cost.Link(0, 1), forward_seconds=5, backward_seconds=10)
    of_ranks = {
        f"rank {n}": [r._replace(start=r.start + 7, end=r.end + 7) for r in step.records if r.rank == n]
        for n in range(2)
    }
    [axes] = draw.step_rows({"late": of_ranks}, "Late").axes
    assert [len(draw.step_rows({"late": of_ranks}, "Late", marked).axes[0].lines) for marked in (True, False)] == [1, 0]
    wanted = [(r.rank, round(1e3 * r.start, 3), round(1e3 * r.seconds, 3), ACTIVITY[r.kind]) for r in step.records]
    assert sorted(bars(axes)) == sorted(wanted)
    assert f"{1e3 * step.seconds:.0f} ms" in texts(axes)


def test_lines_are_predicted_and_marks_are_measured():
    _, axes = draw.new_figure("It grows")
    server, ring = {1: 2.0, 4: 8.0}, {2: 2.0, 4: 3.0}
    draw.lines_and_marks(axes, {"one server": server, "ring": ring}, {"one server": {4: 8.0}}, RANK, scale=2)
    found = [dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]
    assert found == [{1: 4.0, 4: 16.0}, {4: 16.0}, {2: 4.0, 4: 6.0}, {}]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "None"] * 2
    assert texts(axes) == ["one server", "ring"]
    _, axes = draw.new_figure("It grows")
    draw.lines_and_marks(axes, dict.fromkeys("abcde", server), {"e": {1: 2.0}}, RANK[:2])
    assert texts(axes) == list("abcde")
    assert [len(line.get_xdata()) for line in axes.lines] == [2, 0] * 4 + [2, 1]


def test_a_sum_has_the_ranks_that_put_in():
    assert [draw.ranks_in(value) for value in (0, 5, 2**9 + 1, 6.0)] == [[], [0, 2], [0, 9], [1, 2]]
