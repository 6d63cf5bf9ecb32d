"""The figures of chapter 07: timelines and profiles show what they are given, in letters that can be read."""

import pytest
from checking import text_sizes
from matplotlib.colors import to_hex

from ignite_ddl import plot
from ignite_ddl.lab import Timeline
from ignite_ddl.lab.record import KINDS, Record

pytestmark = pytest.mark.usefixtures("no_window")


RECORDS = [
    Record(0, "compute", "step 1", 5.0, 5.1),
    Record(0, "idle", "waits for rank 3", 5.1, 5.3, 3),
    Record(0, "communication", "allreduce", 5.3, 5.31),
    Record(3, "handlers", "run", 5.0, 5.05),
    Record(3, "compute", "step 1", 5.05, 5.3),
    Record(3, "communication", "allreduce", 5.3, 5.4),
]
TABLE = {"data": 0.03, "processing": 0.012, "handlers": 0.005}
FIGURES = {
    "timeline": lambda: plot.timeline(RECORDS, "Rank 0 waits"),
    "profiles": lambda: plot.rank_profiles(
        {"one": [TABLE] * 4, "two": [TABLE] * 4, "three": [TABLE] * 4}, "All"
    ),
}


def bars(axes):
    """(row, left, width, colour) of each, in whole milliseconds."""
    return [
        (
            round(bar.get_y() + bar.get_height() / 2),
            round(bar.get_x()),
            round(bar.get_width()),
            to_hex(bar.get_facecolor()).upper(),
        )
        for bar in axes.patches
    ]


def labels(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_at_least_9_points(name):
    assert min(text_sizes(FIGURES[name]()).values()) >= 9


def test_every_kind_of_a_timeline_has_a_colour():
    assert set(KINDS) <= set(plot.ACTIVITY)


def test_a_row_a_rank_in_milliseconds_from_the_first_record():
    [axes] = FIGURES["timeline"]().axes
    assert bars(axes) == [
        (0, 0, 100, plot.ACTIVITY["compute"]),
        (0, 100, 200, plot.ACTIVITY["idle"]),
        (0, 300, 10, plot.ACTIVITY["communication"]),
        (1, 0, 50, plot.ACTIVITY["handlers"]),
        (1, 50, 250, plot.ACTIVITY["compute"]),
        (1, 300, 100, plot.ACTIVITY["communication"]),
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 3"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # rank 0 at the top


def test_labels_say_who_is_waited_for_where_there_is_room():
    [axes] = FIGURES["timeline"]().axes
    assert labels(axes) == ["step 1", "waits for 3", "handlers", "step 1", "allreduce"]
    narrow = [Record(0, "compute", "step 1", 0, 9), Record(0, "idle", "waits", 9, 10, 2)]
    assert labels(plot.timeline(narrow).axes[0]) == ["step 1", "for 2"]


def test_a_part_of_the_time_is_cut_at_its_borders():
    [axes] = plot.timeline(RECORDS, start=5.2, end=5.35).axes
    assert bars(axes)[:2] == [
        (0, 0, 100, plot.ACTIVITY["idle"]),
        (0, 100, 10, plot.ACTIVITY["communication"]),
    ]
    assert max(left + width for _, left, width, _ in bars(axes)) == 150


def test_it_takes_a_timeline_too():
    timeline = Timeline()
    with timeline, timeline.span("work"):
        pass
    [axes] = plot.timeline(timeline).axes
    assert len(axes.patches) == 1


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="nothing was recorded"):
        plot.timeline([])


def test_profiles_stack_their_parts():
    figure = plot.rank_profiles({"one": [TABLE, TABLE], "two": [TABLE, TABLE | {"processing": 0.04}]}, "Two")
    first, second = figure.axes
    assert [bar[:3] for bar in bars(first)[:3]] == [(0, 0, 30), (0, 30, 12), (0, 42, 5)]
    assert [bar[:3] for bar in bars(second)[3:]] == [(1, 0, 30), (1, 30, 40), (1, 70, 5)]
    assert labels(second) == ["30", "30", "40"]
