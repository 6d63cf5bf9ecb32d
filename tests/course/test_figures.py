"""The chapters' figures: no picture says what its data do not. That each example can be shown, test_docstrings sees."""

import matplotlib.pyplot as plt
import pytest
from loading import ROOT
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from ignite_ddl.course.figures import (
    ch00,
    ch01,
    ch02,
    ch03,
    ch05,
    ch06,
    ch07,
    ch08,
    ch09,
    ch10,
    ch11,
    ch13,
    ch14,
    ch15,
    ch16,
    ch17,
    ch19,
    ch20,
    ch28,
    show,
)
from ignite_ddl.lab import cost, draw, simulate
from ignite_ddl.lab.draw import ACTIVITY, GREY, INK, RANK
from ignite_ddl.lab.record import Record

pytestmark = pytest.mark.usefixtures("no_window")

ALT = "Five words or more here."


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def boxes(axes):
    """Colour, left, top, width and height of each rectangle, in the order in which they were drawn."""
    found = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [
        (colour(p), *(round(number, 3) for number in (p.get_x(), p.get_y(), p.get_width(), p.get_height())))
        for p in found
    ]


def colour(patch):
    return to_hex(patch.get_facecolor()).upper() if patch.get_facecolor()[3] else "none"


def colours(axes):
    return [box[0] for box in boxes(axes) if box[0] != "none"]


def points(line):
    return [(round(float(x), 6), round(float(y), 6)) for x, y in zip(*line.get_data(), strict=True)]


# ------------------------------------------------------------------------------------------ show


@pytest.fixture
def figure():
    figure, axes = draw.new_figure("A title")
    axes.plot([1, 2])
    return figure


def test_outside_a_notebook_the_text_is_printed_and_the_figure_closed(figure, capsys):
    assert show(figure, alt="A line that rises from 1 to 2.") is None
    assert capsys.readouterr().out == "A line that rises from 1 to 2.\n"
    assert not plt.fignum_exists(figure.number)


@pytest.mark.parametrize("alt", ["", "  ", "Four words are given"])
def test_a_text_of_less_than_five_words_is_refused(alt, figure):
    with pytest.raises(ValueError, match="alt should say in five words or more what the figure shows, but given"):
        show(figure, alt=alt)


@pytest.mark.parametrize("place", ["text", "tick"])
def test_small_text_is_refused_by_name_and_size(place, figure):
    [axes] = figure.axes
    if place == "text":
        axes.text(1, 1, "tiny", fontsize=8.5)
    else:
        axes.set_xticks([0], ["tiny"], fontsize=8.5)
    with pytest.raises(ValueError, match="text should be at least 9 points high, but 'tiny' has 8.5"):
        show(figure, alt=ALT)


# ------------------------------------------------------------------------------------------ who holds what


def test_00_data_parallel_cuts_the_batch_and_model_parallel_the_model():
    data, layers, inside = (colours(axes) for axes in ch00.data_and_model_parallel(8).axes)
    for rank in range(4):
        assert data.count(RANK[rank]) == 2 + 4, "its rows and 4 layers"
        assert layers.count(RANK[rank]) == 1, "one layer"
        assert inside.count(RANK[rank]) == 4, "a piece of each layer"
    assert layers.count(ACTIVITY["idle"]) == inside.count(ACTIVITY["idle"]) == 8, "the whole batch"


def test_00_the_crossing_of_two_lines_is_marked_where_they_cross():
    sizes = [2, 6, 10]
    [axes] = ch00.numbers_sent(sizes, {"batch": [30, 30, 30], "model": [6, 18, 30]}).axes
    assert texts(axes) == ["batch", "model", "10 rows: the same"]
    [apart] = ch00.numbers_sent(sizes, {"batch": [31, 31, 31], "model": [6, 18, 30]}).axes
    assert texts(apart) == ["batch", "model"]


def test_00_the_map_has_every_chapter_once():
    [axes] = ch00.course_map(route=[0, 20]).axes
    numbers = sorted(text[:2] for text in texts(axes) if text[:2].isdigit())
    assert numbers == sorted(path.name[:2] for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
    assert len(colours(axes)) == 2, "the route is filled"


def test_01_colours_are_read_from_the_numbers_also_from_wrong_ones():
    before = [1, 2, 4, 8]
    panels = {"all_reduce": (before, [15] * 4), "all_gather": (before, [before] * 4), "wrong": (before, [7, 7, 7, 8])}
    for axes, wanted in zip(
        ch01.collectives(panels).axes, (RANK[:4] * 4, RANK[:4] * 4, [*RANK[:3] * 3, RANK[3]]), strict=True
    ):
        drawn = [box for box in boxes(axes) if box[0] != "none"]
        assert [box[0] for box in drawn if box[1] == 0] == RANK[:4], "before: everyone's own"
        assert [box[0] for box in drawn if box[1] > 1] == wanted


def test_02_a_job_works_only_with_one_rank_on_each_gpu():
    cases = {"its own": [0, 1], "nothing set": [0, 0], "four ranks": [0, 1, 2, 3]}
    panels = ch02.ranks_on_gpus(cases, n_gpus=2).axes
    assert [texts(panel)[-1] for panel in panels] == ["works", "fails", "fails"]
    assert texts(panels[2]).count("no GPU") == 2


def test_03_each_device_holds_its_pieces_in_its_colour():
    halves = [[(0, 4), (0, 6)]] * 2 + [[(4, 8), (0, 6)]] * 2
    columns = [[(0, 6), (0, 4)], [(0, 6), (4, 8)]] * 2
    quarters = [[x[0], w[1]] for x, w in zip(halves, columns, strict=True)]
    [axes] = ch03.device_tiles({"x": halves, "w": columns, "y": quarters}, grid=(2, 2)).axes
    for device in range(4):
        drawn = [box for box in boxes(axes) if box[0] == RANK[device]]
        assert sum(width * height for *_, width, height in drawn) == 4 * 6 + 6 * 4 + 4 * 4
    assert "device 3:  data 1, model 1" in texts(axes)


def test_03_lazy_compiles_each_new_shape_once():
    [axes] = ch03.eager_and_lazy(["matmul", "add"], [64, 64, 48]).axes
    assert [text for text in texts(axes) if "compile" in text] == ["compile", "compile"]
    assert texts(axes).count("2 as 1") == 3


PADDED = [[[0], [4], [8]], [[1], [5], [9]], [[2], [6], [0]], [[3], [7], [1]]]
EXACT = [[[0], [4], []], [[1], [5], [8]], [[2], [6], []], [[3], [7], [9]]]
PEERS = [[[0, 1], [4, 5]], [[0, 1], [4, 5]], [[2, 3], [6, 7]], [[2, 3], [6, 7]]]


def test_05_a_second_read_is_hatched_and_an_empty_slot_dashed():
    padded, exact = ch05.dealt_rows({"": PADDED}, "padded"), ch05.dealt_rows({"": EXACT}, "exact")
    tiles = padded.axes[0].patches
    assert [tile.get_hatch() is not None for tile in tiles].count(True) == 2
    assert [[colour(tile) for tile in tiles].count(RANK[rank]) for rank in range(4)] == [3, 3, 2, 2]
    assert padded.get_supxlabel() == "hatched: read before in this epoch"
    assert sum(tile.get_linestyle() not in ("-", "solid") for tile in exact.axes[0].patches) == 2
    assert exact.get_supxlabel() == "dashed: no row at this step"
    with pytest.raises(ValueError, match="zip"):
        ch05.dealt_rows({"": [[[0], [1]], [[2]]]}, "ranks with different numbers of steps")


def test_05_peers_share_rows_and_the_figure_says_whether():
    first, second = ch05.dealt_rows({"idist": EXACT, "ddl": PEERS}, "two loaders", tp=2).axes
    assert texts(first).count("tp peers:\ndifferent\nrows") == 2
    assert texts(second).count("tp peers:\nthe same\nrows") == 2
    assert not any(tile.get_hatch() for tile in second.patches)


def test_05_a_column_has_one_colour_where_its_rank_stays():
    stays = [[[0, 1]] * 2, [[2, 3]] * 2]
    panels = ch05.owners_over_epochs({"stays": stays, "moves": [[[0, 1], [3, 2]], [[2, 3], [0, 1]]]}).axes
    for axes, of_row_0 in zip(panels, (RANK[:1] * 2, RANK[:2]), strict=True):
        assert [box[0] for box in boxes(axes) if box[1] < 1] == of_row_0


def test_06_each_kind_of_job_has_its_ranks():
    [axes] = ch06.who_does_what({"download": "one", "seed": "each", "metric": "together"}).axes
    assert colours(axes) == [RANK[0], *RANK[:4], INK]
    assert boxes(axes)[-1][3] > 3.5, "one tile for all together"


def test_06_the_matrix_stands_in_the_tiles_and_the_worst_mistake_in_a_frame():
    [axes] = ch06.confusion_matrix([[8, 2, 0], [1, 9, 0], [0, 5, 5]], ["shirt", "coat", "bag"], n_ranks=2).axes
    assert texts(axes) == ["8", "2", "1", "9", "5", "5"]
    assert boxes(axes)[-1] == ("none", 1, 2, 1, 1), "predicted coat, true bag"
    assert axes.get_title(loc="left") == "30 images from 2 ranks: bag is taken for coat most often"


def test_09_a_chunk_has_a_stripe_for_each_rank_in_it_and_a_frame_when_it_has_come():
    [axes] = ch09.ring_steps([[[1, 1], [2, 2]], [[1, 3], [3, 2]], [[3, 3], [3, 3]]]).axes
    zero, one = RANK[:2]
    assert colours(axes) == [zero, zero, one, one, zero, zero, one, zero, one, one, *[zero, one] * 4]
    assert [box[0] for box in boxes(axes)].count("none") == 4, "one chunk a rank and step"


def test_14_a_rank_holds_its_slices_and_what_is_whole():
    [axes] = ch14.zero_stages([cost.zero_memory(1, 4, stage) for stage in range(4)]).axes
    filled = [fill != GREY for fill in colours(axes)]
    assert len(filled) == 4 * 4 * 3 * 4, "stages, ranks, things, slices"
    assert [sum(filled[48 * stage :][:48]) for stage in range(4)] == [48, 36, 24, 12]
    # Under ZeRO-3 rank 2 holds the third slice of weights, gradients and optimizer, and nothing else.
    assert filled[3 * 48 :][24:36] == [False, False, True, False] * 3


def test_15_a_layer_is_on_all_ranks_on_one_or_in_pieces():
    [axes] = ch15.cuts_of_a_model(4, 2).axes
    assert colours(axes) == [RANK[0]] * 2 + [RANK[1]] * 2 + RANK[:2] * 4
    assert [text for text in texts(axes) if "holds" in text] == ["a rank holds 100%"] + ["a rank holds 50%"] * 2


def test_16_by_rows_a_rank_has_a_block_of_x_and_w_and_a_whole_term_of_y():
    [axes] = ch16.cut_products(rows=6, inputs=8, outputs=32, n_ranks=4).axes
    for rank in range(4):
        sizes = sorted(tuple(map(round, box[3:])) for box in boxes(axes) if box[0] == RANK[rank])
        assert sizes == [(2, 6), (8, 6), (8, 8), (32, 2), (32, 6)], "X by rows; Y, W by columns; W, Y by rows"
    assert [tuple(map(round, box[3:])) for box in boxes(axes) if box[0] == ACTIVITY["idle"]] == [(8, 6)]


def test_16_what_all_hold_is_drawn_once_in_grey():
    by_rank = [[(0, 4), (0, 3)], [(4, 8), (0, 3)]]
    [axes] = ch16.held_blocks({"weight": ((8, 3), by_rank), "bias": ((8,), [[(0, 8)]] * 2)}, "whole").axes
    found = [(fill, top, round(height), round(width)) for fill, _, top, width, height in boxes(axes)]
    assert found == [(RANK[0], 0, 4, 3), (RANK[1], 4, 4, 3), (ACTIVITY["idle"], 0, 8, 2)]
    assert texts(axes) == ["0", "1", "weight\n8 × 3", "all", "bias\n8"]


def test_17_features_are_cut_upright_tokens_across_terms_are_sheets_and_what_is_whole_is_grey():
    steps = [("x", 8, "whole", []), ("up", 32, "features", ["all_gather"])]
    steps += [("down", 8, "terms", []), ("+", 8, "tokens", ["reduce_scatter"])]
    [axes] = ch17.along_a_block(steps, n_ranks=4, title="A block").axes
    rectangles = [(fill, height, width) for fill, _, _, width, height in boxes(axes)]
    behind = RANK[3::-1]  # rank 0 is drawn last, in front
    assert rectangles == [
        (ACTIVITY["idle"], 1.0, 1.0),
        *((fill, 1.0, 1.0) for fill in behind),
        *((fill, 0.8, 0.8) for fill in behind),
        *((fill, 0.25, 1.0) for fill in behind),
    ]
    assert [top for _, _, top, *_ in boxes(axes)][-4:] == [0, 0.25, 0.5, 0.75], "rank 0 at the top"
    places = {text.get_text(): text.get_position()[0] for text in axes.texts}
    assert places["x"] < places["all-\ngather"] < places["up"] < places["down:\n4 terms"]
    assert places["down:\n4 terms"] < places["reduce-\nscatter"] < places["+"]
    residuals = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert [(line.get_xdata()[0], line.get_xdata()[-1]) for line in residuals] == [(places["x"], places["+"])]


def test_17_a_kept_feature_is_filled_and_a_dropped_one_is_not():
    masks = [[True, False], [False, True]], [[True], [False]]
    axes = ch17.dropout_masks({"alike": masks, "the rule": masks}, "Masks").axes[0]
    filled = [to_hex(tile.get_facecolor()).upper() for tile in axes.patches if tile.get_facecolor()[3]]
    assert filled == [RANK[0], GREY, RANK[1]]
    assert len(axes.patches) == 6


def test_17_what_is_predicted_is_stacked_and_what_is_measured_marked():
    [axes] = ch17.kept_by_block({"one": (6000, 2000, 0, 8100), "cut": (1500, 500, 400, 2450)}, "Less").axes
    assert [(left, width) for _, left, _, width, _ in boxes(axes)][3:] == [(0, 1.5), (1.5, 0.5), (2.0, 0.4)]
    assert [tuple(line.get_xydata()[0]) for line in axes.lines] == [(8.1, 0), (2.45, 1)]
    assert texts(axes) == ["8", "2"]


def test_19_a_tile_says_its_two_versions_and_is_darker_the_more_lies_between():
    run = simulate.pipedream(3, 6)
    [axes] = ch19.weight_versions(run.forward_versions, run.backward_versions, "Behind").axes
    assert texts(axes)[:4] == ["0 → 0", "0 → 1", "0 → 2", "1 → 3"]
    light = [sum(patch.get_facecolor()[:3]) for patch in axes.patches]
    assert light[0] > light[1] > light[2] == light[3]  # none, one, two updates
    assert len(set(light[12:])) == 1, "the last rank is never behind"


def test_20_ranks_that_are_left_out_of_a_sum_are_empty():
    figure = ch20.rows_in_a_sum([5, 5, 3, 3], {"all": ([0, 1, 2, 3], 16), "over dp": ([0, 2], 8)})
    everyone, dp = figure.axes
    assert [box[0] != "none" for box in boxes(everyone)] == [True] * 4
    assert [box[0] != "none" for box in boxes(dp)] == [True, False, True, False]
    assert texts(dp) == ["rank 0\n5 rows", "rank 1\n5 rows", "rank 2\n3 rows", "rank 3\n3 rows"]
    assert dp.get_title("left") == "over dp: 8 rows"


def test_20_a_bar_holds_the_axes_and_nothing_else():
    sent = {"8 × 1 × 1": {"dp": 100, "pp": 0, "tp": 0, "rest": 900}, "2 × 2 × 2": {"dp": 25, "pp": 10, "tp": 40}}
    figure = ch20.bytes_by_axis(sent, "A title")
    assert [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches] == [(0, 100), (0, 25), (25, 10), (35, 40)]
    assert labels(figure.axes[0].yaxis) == list(sent)


def test_20_a_figure_without_a_ground_keeps_none(monkeypatch):
    figure = ch20.mesh_on_machines({"dp": 2, "pp": 2, "tp": 2}, 4)
    saved = {}
    monkeypatch.setattr(figure, "savefig", lambda *_, **look: saved.update(look))
    show(figure, alt=ALT)
    assert saved["facecolor"] == "none"


# ------------------------------------------------------------------------------------------ times


def test_03_steps_that_compile_say_so():
    [axes] = ch03.compile_times([60.0, 0.5, 0.4, 20.0], [8, 8, 8, 4], [True, False, False, True], "recorded").axes
    assert [text.startswith("compiles") for text in texts(axes)] == [True, False, False, True]


def test_09_an_arrow_goes_from_sender_to_receiver_in_its_time():
    ways, link = {"naive": simulate.all_reduce_naive, "ring": simulate.all_reduce_ring}, cost.Link(0, 48)
    naive, ring = ch09.messages({name: way(4, 48, link).in_flight for name, way in ways.items()}, "Two").axes
    assert [axes.get_title(loc="left") for axes in (naive, ring)] == ["naive: 3 s", "ring: 1.5 s"]
    assert [len(axes.texts) for axes in (naive, ring)] == [12, 24]
    arrow = min(ring.texts, key=lambda text: (text.xyann[0], text.xyann[1]))
    assert (arrow.xyann, arrow.xy) == ((0, 0), (0.25, 1))  # rank 0 to rank 1 in the first quarter of a second


def test_13_a_box_leads_from_pull_to_push_and_holds_its_staleness():
    rules = {"async": {"mode": "async"}, "3 + 1": {"mode": "backup", "backup": 1}}
    runs = {name: simulate.parameter_server(4, [1.0, 1.2, 1.4, 4.0], 20, **rule) for name, rule in rules.items()}
    panels = {name: (run.updates, run.dropped) for name, run in runs.items()}
    asynchronous, backup = ch13.server_rows(panels, "One is slow", end=6, unit="time units").axes
    seen = [gradient for gradient in runs["async"].updates if gradient.pulled_at < 6]
    drawn = {(left, width) for fill, left, _, width, _ in boxes(asynchronous) if fill == ACTIVITY["compute"]}
    assert drawn >= {(round(g.pulled_at, 3), round(min(g.pushed_at, 6) - g.pulled_at, 3)) for g in seen}
    assert set(texts(asynchronous)) == {str(gradient.staleness) for gradient in seen}
    assert texts(backup).count("dropped") == 2
    marks = sorted(line.get_xdata()[0] for line in backup.lines)
    assert marks == sorted(g.applied_at for g in runs["3 + 1"].updates if g.applied_at <= 6)


# ------------------------------------------------------------------------------------------ bars


def tops(axes):
    """The height of each pile of bars."""
    found = {}
    for _, left, bottom, width, height in boxes(axes):
        place = round(left + width / 2)
        found[place] = max(found.get(place, 0), bottom + height)
    return [found[place] for place in sorted(found)]


def test_01_a_bar_is_the_sort_and_what_comes_after_it():
    [axes] = ch01.sort_times({1: (0.2, 0.0), 4: (0.1, 0.05)}).axes
    assert [(left, width) for _, left, _, width, _ in boxes(axes)] == [(0, 200), (200, 0), (0, 100), (100, 50)]
    assert [text for text in texts(axes) if text.endswith("ms")] == ["200 ms", "150 ms"]


def test_02_stages_stack_to_their_sum_without_crumbs():
    crumb = {"parameters": 8.0, "activations": 4.0, "gradients": 4e-6}
    [axes] = ch02.memory_stages({"forward": crumb, "backward": {"parameters": 8.0, "gradients": 8.0}}).axes
    assert [box[2:] for box in boxes(axes)] == [(0, 0.86, 8), (8, 0.86, 4), (0, 0.86, 8), (8, 0.86, 8)]
    assert {"12", "16", "parameters 8", "activations 4", "gradients 8"} <= set(texts(axes))


def test_02_scales_that_overflow_are_a_field_and_no_point():
    zeros, errors = {0: 0.3, 2: 0.1, 4: 0.0, 6: 0.0}, {0: 0.2, 2: 0.0, 4: float("inf"), 6: float("nan")}
    [axes] = ch02.loss_scales(zeros, errors, start=2).axes
    assert [line.get_xydata().tolist() for line in axes.lines[:2]] == [[[0, 0.3], [2, 0.1]], [[0, 0.2], [2, 0.0]]]
    [(_, left, _, width, _)] = boxes(axes)
    assert (left, left + width) == (3, 7)
    assert {"no scale", "overflow"} < set(texts(axes))


def test_07_an_epoch_has_a_row_a_part_with_its_sum():
    kinds = [("data", 0, 0.03), ("compute", 0.03, 0.05), ("handlers", 0.05, 0.051), ("data", 0.051, 0.081)]
    axes = ch07.epoch([Record(0, kind, "", start, end) for kind, start, end in kinds], "One").axes[0]
    assert labels(axes.yaxis) == ["data", "step", "handlers"]
    assert texts(axes) == ["30", "30", "60 ms", "20", "20 ms", "1 ms"]


def test_07_profiles_stack_their_parts():
    table = {"data": 0.03, "step": 0.012, "handlers": 0.005}
    _, second = ch07.rank_profiles({"one": [table] * 2, "two": [table, table | {"step": 0.04}]}, "Two").axes
    assert [(left, width) for _, left, _, width, _ in boxes(second)[3:]] == [(0, 30), (30, 40), (70, 5)]
    assert texts(second) == ["30", "30", "40"]


def test_08_shares_make_up_a_whole_rank():
    seconds = {"compute": 0.06, "communication": 0.01, "idle": 0.02, "data": 0.006, "handlers": 0.004}
    [axes] = ch08.shares({0: seconds}, "One").axes
    assert [round(width) for *_, width, _ in boxes(axes)] == [60, 10, 20, 10]
    assert texts(axes) == ["60 %", "10 %", "20 %", "10 %"]


def test_10_three_of_four_buckets_are_in_flight_while_backward_goes_on():
    link = cost.Link(latency=0, bandwidth=3)
    ddp = simulate.ddp_step(4, [2] * 4, link, forward_seconds=1, backward_seconds=8)
    _, axes = ch10.master_and_ddp(simulate.master_step(4, 8, 4, 1, link), ddp, "Two").axes
    assert labels(axes.yaxis) == [*(f"rank {rank}" for rank in range(4)), "in flight"]
    passes = [box for box in boxes(axes) if box[0] == ACTIVITY["backward"]]
    trips = [box[1::2] for box in boxes(axes) if box[0] == ACTIVITY["communication"]]
    assert trips == [(start, 1000) for start in (3000, 5000, 7000, 9000)], "after each bucket's backward"
    assert max(left + width for _, left, _, width, _ in passes) == 9000


def test_10_a_bar_is_as_high_as_its_step():
    shares = {n: {"compute": 0.3 / n, "communication": 0.1 * (n - 1)} for n in (1, 2, 4)}
    for axes in ch10.step_shares({"master": shares, "DDP": shares}, "It grows").axes:
        assert tops(axes) == [300, 250, 375]
        assert [text for text in texts(axes) if text.isdigit()] == ["300", "250", "375"]
        assert [box[4] for box in boxes(axes) if box[0] == ACTIVITY["communication"]] == [0, 100, 300]


def test_11_bars_add_up_to_the_step_and_say_the_share():
    steps = [cost.data_parallel_step(n, **cost.RESNET50_P100) for n in (8, 256, 1024)]
    [axes] = ch11.communication_share(steps, "More messages").axes
    widths = [box.get_width() for box in axes.patches]
    assert [a + b for a, b in zip(widths[::2], widths[1::2], strict=True)] == pytest.approx(
        [1e3 * step.seconds for step in steps]
    )
    assert widths[1::2] == pytest.approx([1e3 * step.communication_seconds for step in steps])
    assert [text for text in texts(axes) if "%" in text] == ["14%", "17%", "23%"]


def test_16_the_saved_model_stands_beside_its_run():
    losses, saved = {"with": [2.0, 1.0, 0.5], "without": [2.0, 1.1, 0.6]}, {"with": 0.5, "without": 1.5}
    [axes] = ch16.reported_and_saved(losses, saved, "It falls").axes
    found = [(line.get_color(), list(line.get_ydata())) for line in axes.lines]
    blue, red = ACTIVITY["forward"], ACTIVITY["backward_weight"]
    assert found == [(blue, [2.0, 1.0, 0.5]), (blue, [0.5]), (red, [2.0, 1.1, 0.6]), (red, [1.5])]
    assert texts(axes) == ["0.50", "1.50"]


# ------------------------------------------------------------------------------------------ lines and marks


def test_11_bars_are_two_standard_errors_and_an_error_of_0_has_none():
    [axes] = ch11.over_batch_sizes({"one": {24: (0.81, 0.01), 600: (0.74, 0.02)}}, "It falls", "accuracy").axes
    assert axes.collections[0].get_segments()[1][:, 1] == pytest.approx([0.70, 0.78])
    [axes] = ch11.over_batch_sizes({"p": {8: (0.1, 0), 64: (0.5, 0)}}, "It climbs", "p").axes
    assert not axes.collections


def test_13_a_dot_marks_the_best_rate_and_the_best_b():
    lines = {"1 worker": [(0.5, 0.02), (0.7, 0.02), (0.6, 0.03)], "4 workers": [(0.5, 0), (0.4, 0), (0.3, 0)]}
    [axes] = ch13.accuracy_over_rates(lines, [0.025, 0.1, 0.4], "More workers").axes
    assert [points(line) for line in axes.lines if line.get_marker() == "o"] == [[(0.1, 0.7)], [(0.025, 0.5)]]
    assert texts(axes) == ["1 worker: best 70%", "4 workers: best 50%"]
    [axes] = ch13.backup_workers({"10 %": {0: 0.0, 4: 0.05, 12: 0.01}}, "Four").axes
    assert points(next(line for line in axes.lines if line.get_marker() == "o")) == [(4, 0.05)]
    assert texts(axes) == ["10 %: b = 4"]


def test_13_a_row_of_dots_is_a_rule_and_a_line_its_mean():
    took = {"sync": [4.0, 5.0], "async": [2.0, 2.0]}
    [axes] = ch13.seconds_of_rules(took, {"sync": (0.71, 0.02), "async": (0.7, 0.03)}, "Sooner").axes
    assert [points(line) for line in axes.lines if line.get_marker() == "o"] == [[(4, 0), (5, 0)], [(2, 1), (2, 1)]]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() != "o"] == [4.5, 2]
    assert texts(axes) == ["71% ± 2%", "70% ± 3%", "accuracy"]


def test_13_a_slow_worker_has_a_colour_of_its_own():
    runs = {"equal": [{"worker": w, "staleness": 1} for w in (0, 1)], "slow": [{"worker": 1, "staleness": 2}]}
    equal, slow = ch13.staleness_histogram(runs, "Two", slow=1).axes
    blue, red = ACTIVITY["forward"], ACTIVITY["backward_weight"]
    assert [(fill, bottom, height) for fill, _, bottom, _, height in boxes(equal) if height] == [
        (blue, 0, 1),
        (red, 1, 1),
    ]
    assert slow.get_title(loc="left") == "slow: mean 2.0"


def test_19_schedules_at_one_place_share_a_mark_and_lines_lead_to_the_emptiest_rank():
    schedules = {"gpipe": (0.27, [8, 8]), "1f1b": (0.27, [2, 1]), "zbv": (0.05, [2, 2]), "other": (0.05, [2, 1])}
    [axes] = ch19.time_and_memory(schedules, "Down and left").axes
    marks = [points(line)[0] for line in axes.lines if line.get_marker() == "o"]
    assert marks == [(8, 27), (2, 27), (2, 5)]
    assert texts(axes) == ["gpipe", "1f1b", "zbv\nother"]
    lines = [list(line.get_xdata()) for line in axes.lines if line.get_marker() != "o"]
    assert lines == [[8, 8], [1, 2], [2, 2], [1, 2]]


def test_28_a_line_follows_each_token_to_its_expert_and_home():
    [axes] = ch28.exchange([[0, 1], [0, 0]]).axes
    there, back = axes.lines[:4], axes.lines[4:]
    rows = [[line.get_ydata()[0] for line in there], [line.get_ydata()[1] for line in there]]
    assert rows[1] == [0.5, 4.75, 1.5, 2.5], "token 1 is alone at expert 1"
    assert [list(line.get_ydata()) for line in back] == [[end, start] for start, end in zip(*rows, strict=True)]
    assert colours(axes)[4:8] == [RANK[0], RANK[1], RANK[1], RANK[0]], "in the colour of its home"


def test_28_what_is_above_the_places_is_dropped_and_what_is_below_empty():
    [axes] = ch28.queues([5, 3], places=4).axes
    assert [(bottom, height) for _, _, bottom, _, height in boxes(axes)] == [(0, 4), (4, 1), (0, 3), (3, 1)]
    assert colours(axes)[:2] == [ACTIVITY["forward"], ACTIVITY["backward_weight"]]


def test_28_a_dot_is_a_seed_and_a_line_their_mean():
    [axes] = ch28.differences({"dense": [40, 60], "wide": [0, 10]}, "Higher").axes
    assert [dots.get_offsets().tolist() for dots in axes.collections] == [[[40, 0], [60, 0]], [[0, 1], [10, 1]]]
    assert [line.get_xdata()[0] for line in axes.lines] == [50, 5, 0]
