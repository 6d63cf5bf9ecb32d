"""Plans against the simulator, against measured runs, against published tables, and their own rules."""

import dataclasses
import itertools
import statistics
import time

import pytest
import torch
from packaging.version import Version

from ignite_ddl.course import GPT, measure_plan, published, published_since
from ignite_ddl.lab import cost, simulate
from ignite_ddl.lab.cost import Link
from ignite_ddl.lab.draw import GREY
from ignite_ddl.lab.plan import A100, CLOSE_RATIO, H100, Cluster, Model, figure, plan, predict, table

SEVEN = Model(layers=36, width=4096, heads=32, vocabulary=51200, sequence=2048)
SMALL = Model(4, 128, 4, 512, 64, True, False, 4, 4, 8, 4, 0)  # float32, Adam, no dropout
HERE = Cluster(8, memory=1e9, flops=2e10, inside=Link(2e-4, 1e9), between=Link(2e-4, 1e9))


def close(value, rel=1e-9):
    return pytest.approx(value, rel=rel, abs=1e-12)


# ------------------------------------------------------------------------------------------- simulator


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("interleaved_zero_bubble", 2)],
)
def test_a_step_is_the_simulator_s(schedule, chunks, recompute):
    """Equal stages: no output layer to speak of. The message is short against a pass, as the closed form asks."""
    model = Model(48, 4096, 32, 1, 2048)  # a vocabulary of 1: nearly nothing
    for pp, rounds, tp in itertools.product((2, 4, 8), (2, 4), (1, 4)):
        one = predict(
            model, Cluster(64, **A100), 2 * pp * rounds, pp=pp, tp=tp, schedule=schedule, n_chunks=chunks,
            microbatches=pp * rounds, recompute=recompute,
        )  # fmt: skip
        layers, rows = model.layers / pp / chunks, 2
        rate = 312e12 * Cluster(64, **A100).efficiency(4096) * tp
        scores, product = 4 * rows * 2048**2 * 4096 / rate, 24 * rows * 2048 * 4096**2 / rate
        again = {"none": 0, "selective": scores, "full": scores + product}[recompute]
        ring = cost.all_reduce_ring(tp, 2 * rows * 2048 * 4096, A100["inside"]).seconds
        forward = layers * (product + scores + 2 * ring)
        inputs = layers * (product + 2 * scores + again + (4 if recompute == "full" else 2) * ring)
        message = Cluster(64, **A100).link(pp, tp).seconds(2 * rows * 2048 * 4096 / tp)
        played = simulate.pipeline(
            schedule, pp, pp * rounds, forward, inputs, layers * product, transfer=message, n_chunks=chunks
        )
        # Where the three passes differ, a split backward hides some of the last p - 1 messages.
        hidden = (pp - 1) * message if schedule == "interleaved_zero_bubble" else 0
        seconds = sum(one.seconds.values())
        assert played.seconds * (1 - 1e-5) <= seconds <= (played.seconds + hidden) * (1 + 1e-5)
        output = 2 * rows * 2048 * 4096 / tp  # of a stage
        kept = cost.activation_bytes(rows, 2048, 4096, 32, tp, True, recompute) * layers + output
        ends = 2 * output  # what the last norm and the output layer read
        first, *_, last = played.peak_activations
        assert one.memory["activations"] == close(max(first * kept, last * kept + ends), rel=1e-5)


def test_unequal_stages_are_near_the_simulator_s():
    """The output layer makes the last stage slower: the slowest stage sets the pace."""
    one = predict(SEVEN, Cluster(4, **A100), 32, pp=4)
    layer, head = 72 * 2048 * 4096**2 + 12 * 2048**2 * 4096, 6 * 2048 * 4096 * 51200
    thirds = [
        (9 * layer + (stage == 3) * head) / 312e12 / Cluster(4, **A100).efficiency(4096) / 3 for stage in range(4)
    ]
    played = simulate.pipeline("1f1b", 4, 32, thirds, thirds, thirds)
    assert sum(one.seconds.values()) - one.seconds["pp"] == close(played.seconds, rel=0.01)


# ------------------------------------------------------------------------------------------- measured here


QUICK = [{"pp": 2, "microbatches": 4, "schedule": "interleaved_1f1b"}, {"dp": 2, "pp": 2, "microbatches": 4, "zero": 1}]
SLOW = [  # chapter 24 measures plans like these
    {"dp": 4, "microbatches": 1},
    {"dp": 4, "zero": 3, "microbatches": 1},
    {"tp": 4, "microbatches": 2},
    {"dp": 2, "tp": 2, "microbatches": 2},
    {"pp": 4, "microbatches": 8},
    {"dp": 2, "pp": 2, "microbatches": 4},
]


@pytest.mark.parametrize("how", [*QUICK, *(pytest.param(how, marks=pytest.mark.slow) for how in SLOW)], ids=str)
def test_bytes_are_exact_and_memory_is_within_five_percent(how):
    one = predict(SMALL, HERE, 16, recompute="selective", **how)
    measured = measure_plan(one, rounds=1)
    assert measured["sent"] == one.sent
    memory, predicted = (sum(each.values()) for each in (measured["memory"], one.memory))
    assert memory <= 1.05 * predicted
    # torch 2.15 releases an activation that it has sent, which 2.13 keeps: up to 7 % less than predicted.
    assert memory >= 0.95 * predicted or (one.pp > 1 and Version(torch.__version__) >= Version("2.15"))


# ------------------------------------------------------------------------------------------- published tables


def unfitted(rows):
    return {name: one for name, one in published.errors(rows).items() if name.split(": ")[1] not in published.FITTED}


def test_fitted_rows_take_their_published_times():
    errors = published.errors([*published.ROWS, *published_since.ROWS])
    fitted = [error for name, error in errors.items() if name.split(": ")[1] in published.FITTED]
    assert len(fitted) == len(published.FITTED) == 9
    assert max(map(abs, fitted)) < 0.005  # constants are rounded


def test_published_step_times_that_were_not_fitted():
    errors = unfitted(published.ROWS)
    assert len(errors) == 39
    assert statistics.median(map(abs, errors.values())) < 0.10
    assert max(map(abs, errors.values())) < 0.40
    # The worst are ZeRO-3 without model parallelism, all predicted too fast.
    assert all(error < -0.2 for name, error in errors.items() if "ZeRO-3" in name)
    assert max(abs(error) for name, error in errors.items() if "ZeRO-3" not in name) < 0.20


def test_published_step_times_of_today():
    errors = unfitted(published_since.ROWS)
    assert len(errors) == 170
    assert statistics.median(map(abs, errors.values())) < 0.08
    assert sum(abs(error) < 0.2 for error in errors.values()) > 0.9 * len(errors)
    assert max(map(abs, errors.values())) < 0.3


def test_published_memory_is_within_a_tenth():
    """torchtitan's, in GiB: benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3."""
    rows = {row.name: row for row in [*published.ROWS, *published_since.ROWS]}
    printed = {
        "8B on 8, eager": 82.4, "8B on 8, compiled": 77.0, "8B on 128 H100, eager": 67.0,
        "8B on 128 H100, compiled": 62.0,
    }  # fmt: skip
    for name, gib in printed.items():
        assert sum(rows[name].predicted().memory.values()) / 2**30 == pytest.approx(gib, rel=0.1), name
    # What Meta trained on 16,384 GPUs of 80 GB fits.
    assert rows["405B on 16,384"].predicted().fits


def test_published_runs_that_do_not_fit_by_our_count_are_known():
    """Each is explained, or not, in published_since. With a pipeline, torch's buffers of messages are not counted."""
    rows = [*published.ROWS, *published_since.ROWS]
    plans = [(row.name, row.predicted()) for row in rows]
    assert {name for name, one in plans if one.short > (one.memory["buffers"] if one.pp > 1 else 0)} == {
        "530B on 640, ZeRO-3", "Qwen3 30B-A3B on 8 H100",
    }  # fmt: skip


def test_plans_that_cannot_be_told_apart_are_marked():
    found = published.ratios([*published.ROWS, *published_since.ROWS])
    assert len(found) == 167
    assert statistics.quantiles(found, n=3)[1] == pytest.approx(CLOSE_RATIO, abs=0.01)  # two of three are below
    one, other, third = (predict(SEVEN, Cluster(16, **A100), 128, dp=dp, tp=16 // dp, zero=1) for dp in (16, 8, 1))
    seconds = [line.split()[-2] for line in table([one, other, third]).split("\n")[1:]]
    assert [each.startswith("~") for each in seconds] == [False, True, False]


def test_long_steps_are_printed_without_an_exponent():
    one = predict(SEVEN, Cluster(1, **A100), 4096)
    assert sum(one.seconds.values()) > 1000
    assert "e+" not in table([one])


def test_what_readers_found_missing_is_found():
    """Data parallel with ZeRO-1 wins for 7 billion on 16 A100; 405 billion on 16,384 are as fast as Meta's."""
    best = next(one for one in plan(SEVEN, Cluster(16, **A100), batch=128) if not one.lacks)
    assert (best.dp, best.pp, best.tp, best.zero) == (16, 1, 1, 1)
    start = time.perf_counter()
    plans = plan(published.LLAMA_405B, Cluster(16384, **H100), batch=2048)
    assert time.perf_counter() - start < 20  # 1 s alone on the machine; the room is for a busy one
    best = next(one for one in plans if not one.lacks)
    assert best.fits
    assert sum(best.seconds.values()) < 6.8  # published: 400 teraFLOP/s a GPU


def test_hsdp_keeps_what_is_sharded_in_the_node():
    cluster = Cluster(64, **(A100 | {"overlap": 0.0}))
    whole, hybrid = (predict(SEVEN, cluster, 64, dp=64, zero=3, dp_shard=n) for n in (64, 8))
    held = SEVEN.parameters_on(1, 1, 36)
    assert hybrid.memory["optimizer"] == close(8 * whole.memory["optimizer"])
    assert whole.sent["dp"] == close(63 / 64 * held * 6)
    assert hybrid.sent["dp"] == close(7 / 8 * held * 6 + 2 * 7 / 8 * held * 2 / 8)
    given = predict(SEVEN, cluster, 64, dp=64, zero=3, dp_shard=8).arguments()["Parallel"]
    assert given == {"dp_replicate": 8, "dp_shard": 8, "pp": 1, "tp": 1}


def test_context_parallel_shares_tokens_and_weights():
    long = dataclasses.replace(SEVEN, sequence=32768, kv_heads=8)
    cluster = Cluster(8, **A100)
    one, cut = (predict(long, cluster, 8 // cp, dp=8 // cp, cp=cp, zero=3, recompute="selective") for cp in (1, 4))
    assert cut.memory["activations"] == close(one.memory["activations"] / 4)
    assert cut.memory["optimizer"] == close(one.memory["optimizer"])
    assert cut.seconds["compute"] == close(one.seconds["compute"] / 4)
    slow = dataclasses.replace(cluster, inside=Link(0, 1e9))
    sent = 3 * 2 * 8192 * 1024 * 2 * 3  # keys and values of 8,192 tokens, three turns; twice as many in backward
    asked = predict(long, slow, 2, dp=2, cp=4, recompute="selective")
    scores = 4 * 8192 * 32768 * 4096 / cluster.flops / cluster.efficiency(4096)
    assert asked.seconds["cp"] == close(36 * (sent / 1e9 - 3 * scores))


def test_experts_are_exchanged_and_shared_out():
    mixed = dataclasses.replace(SEVEN, experts=8, chosen=2)
    one, cut = (predict(mixed, Cluster(8, **A100), 8, dp=8, zero=1, ep=ep) for ep in (1, 8))
    value = 2048 * 4096 * 2
    assert cut.seconds["ep"] == close(36 * 4 * (7 * 5e-6 + 2 * value * 7 / 8 / 300e9))
    assert cut.memory["optimizer"] == close(one.memory["optimizer"])  # dp has shared them out anyway
    assert cut.memory["weights"] < 0.3 * one.memory["weights"]
    dense, experts = mixed._held(1, 1, 36, 1)
    assert one.sent["dp"] == close(7 / 8 * (dense + experts) * 4)
    assert cut.sent["dp"] == close(7 / 8 * dense * 4)  # no other rank has the same experts
    half = predict(mixed, Cluster(8, **A100), 8, dp=8, ep=4, dp_shard=8, zero=3, microbatches=1)
    assert half.sent["dp"] == close(7 / 8 * dense * 6 + 1 / 2 * experts / 4 * 6)


def test_plans_with_experts_lack_what_ddl_refuses_and_nothing_else():
    import ignite_ddl as ddl

    mixed = dataclasses.replace(SMALL, experts=4, chosen=2, sequence=8)
    plans = [one for one in plan(mixed, HERE, batch=32) if one.ep > 1]
    assert {one.lacks != () for one in plans} == {True, False}
    blocks = [ddl.MixtureOfExperts(128, 256, n_experts=4, top_k=2) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), *blocks, torch.nn.Linear(128, 8))
    cut = {"*.experts": ddl.Experts(tp={"gate": 1, "up": 1, "down": 2})}
    able = {(p.dp, p.pp, p.tp, p.cp, p.ep, p.zero, p.dp_shard, p.schedule): p for p in plans if not p.lacks}
    for one in able.values():
        mesh, _, how, _ = one.arguments().values()
        how = {name: how[name] for name in ("schedule", "n_microbatches", "split") if name in how}
        ddl.check_model(model, cut, **mesh, **how)
    hybrid = predict(mixed, HERE, 32, dp=8, ep=2, zero=3, dp_shard=4, microbatches=1)
    assert hybrid.lacks == ("dp_shard should be dp=8 beside ep=2 for ddl, but is 4",)
    with pytest.raises(ValueError, match="ep cannot be combined with dp_replicate"):
        ddl.check_model(model, cut, dp_replicate=2, dp_shard=4, ep=2)
    split = predict(mixed, HERE, 32, dp=4, pp=2, ep=2, schedule="interleaved_zero_bubble", n_chunks=2, microbatches=4)
    assert "schedule should not split backward passes beside ep=2 for ddl" in split.lacks[-1]
    with pytest.raises(ValueError, match="interleaved_zero_bubble"):
        ddl.check_model(model, cut, dp=4, pp=2, ep=2, schedule="interleaved_zero_bubble", n_microbatches=4)


def test_recomputation_of_some_layers_lies_between():
    cluster = Cluster(8, **A100)
    how = {"dp": 8, "zero": 3, "microbatches": 1}
    some = [predict(SEVEN, cluster, 64, recompute="full", full_layers=n, **how) for n in (0, 12, 36)]
    assert some[0].memory["activations"] > some[1].memory["activations"] > some[2].memory["activations"]
    assert some[0].seconds["compute"] < some[1].seconds["compute"] < some[2].seconds["compute"]
    searched = [one for one in plan(SEVEN, dataclasses.replace(cluster, memory=40e9), 64) if 0 < one.full_layers < 36]
    assert any(one.fits for one in searched)


def test_devices_know_dtypes_kernels_and_ports():
    cluster = Cluster(16, **A100)
    single = cluster.at("tf32")
    one, slow = (predict(SEVEN, each, 16, dp=16, zero=3, microbatches=1) for each in (cluster, single))
    assert slow.seconds["compute"] == close(2 * one.seconds["compute"])
    with pytest.raises(ValueError, match="dtype should be one of bfloat16, float16, tf32, float32, but given fp8"):
        cluster.at("fp8")
    assert cluster.efficiency(4096, "eager") < cluster.efficiency(4096, "compiled") == cluster.efficiency(4096)
    rings = [(cluster.link(n, apart).bandwidth) for n, apart in ((8, 1), (16, 1), (8, 2), (2, 8))]
    assert rings == [300e9, 200e9, 100e9, 25e9]  # inside, eight ports, four, one
    assert dataclasses.replace(cluster, spread=False).link(16, 1).bandwidth == 25e9


def test_groups_that_straddle_nodes_have_the_network_between_them():
    cluster = Cluster(24, **A100)
    rings = [cluster.link(n, apart).bandwidth for n, apart in ((4, 1), (3, 1), (6, 1), (12, 1), (3, 4), (2, 3))]
    assert rings == [300e9, 25e9, 50e9, 100e9, 25e9, 25e9]  # of six ranks two may be alone on a node, of twelve four
    narrow = Model(layers=12, width=1536, heads=12, vocabulary=51200, sequence=2048)
    many, alone = (predict(narrow, cluster, 4 * dp, dp=dp, tp=6).seconds["tp"] for dp in (4, 1))
    one_node = predict(narrow, Cluster(6, **A100), 4, tp=6).seconds["tp"]
    assert alone == one_node < many / 3  # six ranks of the first node


def test_balanced_stages_count_the_output_layer():
    uneven = dataclasses.replace(SEVEN, vocabulary=512000)  # as much work as ten layers
    one = predict(uneven, Cluster(4, **A100), 32, pp=4)
    assert sum(one.stages) == 36
    assert one.stages[-1] < min(one.stages[:-1])
    assert one.arguments()["auto_model"]["split"] == [one.stages[0] + 1, *one.stages[1:3], one.stages[3] + 1]


def test_zero_s_table_of_memory():
    for parameters, lines in published.ZERO_GB.items():
        for ranks, gigabytes in lines.items():
            for stage, printed in enumerate(gigabytes, 1):
                assert cost.zero_memory(parameters, ranks, stage).total / 1e9 == pytest.approx(
                    printed, rel=0.03, abs=0.01
                )


# ------------------------------------------------------------------------------------------- the planner


def test_plans_are_sorted_complete_and_quick():
    plans = plan(SEVEN, Cluster(16, **A100), batch=128)
    fit = [one for one in plans if one.fits]
    assert plans[: len(fit)] == fit
    seconds = [sum(one.seconds.values()) for one in fit]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-8)
    short = [one.short for one in plans[len(fit) :]]
    assert min(short) > 0
    assert short == pytest.approx(sorted(short), rel=1e-8), "what lacks the least comes first"
    meshes = {(one.dp, one.pp, one.tp) for one in plans}
    assert all(one.dp * one.pp * one.tp * one.cp == 16 for one in plans)
    assert {(16, 1, 1), (1, 16, 1), (1, 1, 16), (2, 4, 2)} <= meshes
    for one in plans:
        assert all(value >= 0 for value in [*one.memory.values(), *one.seconds.values(), *one.sent.values()])
        assert one.tokens_per_second == close(128 * 2048 / sum(one.seconds.values()))
        assert 0 < one.mfu < 1
        if not one.lacks:
            one.arguments()
    assert any(one.lacks for one in fit)
    start = time.perf_counter()
    plan(Model(126, 16384, 128, 128256, 8192), Cluster(16384, **H100), batch=2048)
    assert time.perf_counter() - start < 20  # 3 s alone on the machine; the room is for a busy one


def test_arguments_are_those_of_ddl():
    import ignite_ddl as ddl

    plans = [one for one in plan(SMALL, HERE, batch=32) if not one.lacks]
    assert {one.zero for one in plans} == {0, 1, 2, 3}
    for one in plans:
        mesh, loader, cut, trainer = one.arguments().values()
        # Rows of a microbatch on a dp rank, as they were priced.
        pieces = cut.get("n_microbatches", 1) * trainer["gradient_accumulation_steps"]
        assert pieces == one.microbatches
        assert loader["batch_size"] * trainer["gradient_accumulation_steps"] == 32
        shard = cut.pop("shard")
        assert shard == (one.zero > 0)
        assert cut.pop("reshard_after_forward", True) == (one.zero not in (1, 2) or one.pp > 1)
        assert cut.pop("gradient_as_bucket_view", False) == ((one.dp, one.zero) == (8, 0))
        model = GPT(512, length=64, width=128, n_heads=4, n_blocks=4)
        ddl.check_model(model, GPT.tensor_plan if one.tp > 1 else None, **mesh, **cut)


def test_a_model_is_read_from_a_module():
    for tied in (True, False):
        with torch.device("meta"):
            module = GPT(512, length=64, width=128, n_heads=4, n_blocks=4, tied=tied)
        model = Model.of(module, sequence=64)
        assert model == dataclasses.replace(SMALL, tied=tied, sequence_parallel=True)
        # All but the last norm, which the paper's formula leaves out.
        assert model.parameters == sum(p.numel() for p in module.parameters()) - 2 * 128
        assert model.parameters_on(1, 1, 4) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("rows", [8, 24, 48])
def test_at_equal_times_nothing_is_cut_into_microbatches(rows):
    """Without latency they cost nothing: rounding and memory would choose many."""
    free = Cluster(1, memory=1e12, flops=3e9, inside=Link(0, 1e9), between=Link(0, 1e9))
    assert plan(SMALL, free, batch=rows)[0].microbatches == 1


def test_it_prints_and_draws():
    plans = plan(SEVEN, Cluster(16, **A100), batch=128)
    assert str(plans[0]) == table(plans, 1)
    assert len(table(plans, 7).split("\n")) == 8
    [axes] = figure(plans).axes
    assert axes.get_xlabel() == "memory of a device, GB"
    fitting = sorted((one for one in plans if one.fits), key=lambda one: sum(one.seconds.values()))
    named = [f"{one.dp} × {one.pp} × {one.tp}" for one in (fitting[0], fitting[-1])]
    assert [text.get_text() for text in axes.texts] == named
    one = plans[0]
    many = figure([one._replace(tp=2**n, short=-1.0) for n in range(12)], colour="tp")  # more than RANK has colours
    colours = [line.get_color() for line in many.axes[0].lines if line.get_marker() == "o"]
    assert len(set(colours)) == 12
    assert GREY not in colours
    assert [text.get_text() for text in many.legends[0].get_texts()] == [f"tp {2**n}" for n in range(12)]
    small = predict(SMALL, dataclasses.replace(HERE, memory=1e5), 16, dp=4)
    heading, line = str(small).split("\n")
    assert heading.split()[-4:] == ["MB", "short", "seconds", "MFU"]
    size = sum(small.memory.values()) / 1e6
    assert line.split()[-4:-2] == [f"{size:.1f}", f"{size - 0.1:.1f}"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: predict(SEVEN, HERE, 8, tp=3), "tp should divide 32 heads, but given 3"),
        (lambda: predict(SEVEN, HERE, 8, dp=4, dp_shard=3, zero=3), "dp_shard should divide dp=4, and have zero=1"),
        (lambda: predict(SEVEN, HERE, 8, dp=4, dp_shard=2), "have zero=1, 2 or 3, but given 2 with zero=0"),
        (lambda: predict(SEVEN, HERE, 8, cp=3), "cp should divide sequence=2048, but given 3"),
        (lambda: predict(SEVEN, HERE, 8, dp=2, ep=2), "ep should divide dp=2 and experts=0, but given 2"),
        (lambda: predict(SEVEN, HERE, 8, full_layers=3), "full_layers is for recompute=.full., but given 3 with none"),
        (lambda: predict(dataclasses.replace(SEVEN, kv_heads=4), HERE, 8, tp=8), "tp should divide 4 heads of keys"),
        (lambda: predict(SEVEN, HERE, 8, dp=16), "should be 8 devices at most, but given 16, 1 and 1"),
        (lambda: predict(SEVEN, HERE, 9, dp=2), "dp should divide batch=9, but given 2"),
        (lambda: predict(SEVEN, HERE, 8, microbatches=3), "microbatches should divide the 8 rows"),
        (lambda: predict(SEVEN, HERE, 8, pp=4, microbatches=2), "microbatches should be at least pp=4"),
        (lambda: predict(SMALL, HERE, 8, pp=8), "pp should be at most 4, one layer a stage, but given 8"),
        (lambda: predict(SEVEN, HERE, 8, pp=2, schedule="zbv"), "schedule should be one of 1f1b, interleaved_1f1b"),
        (lambda: predict(SEVEN, HERE, 8, pp=2, n_chunks=2), "n_chunks should be 1 for 1f1b"),
        (lambda: predict(SEVEN, HERE, 8, zero=4), "zero should be one of 0, 1, 2, 3, but given 4"),
        (lambda: predict(SEVEN, HERE, 8, recompute="some"), "one of none, selective, pointwise, full"),
        (
            lambda: predict(SEVEN, HERE, 8, dp=2, zero=1, microbatches=1).arguments(),
            "zero should be 0, 2 or 3 under pp=1 with micro",
        ),
        (
            lambda: predict(SEVEN, HERE, 8, dp=2, zero=3, microbatches=2).arguments(),
            "zero should be 0 or 1 under pp=1 with microbatches=2 for ddl, but is 3",
        ),
        (
            lambda: plan(SMALL, dataclasses.replace(HERE, devices=7), 3),
            "batch should be divisible by the dp of a mesh of 7 devices",
        ),
        (lambda: Model(2, 30, 4, 10, 10), "heads should divide width=30, but given 4"),
        (lambda: Model(0, 32, 4, 10, 10), "layers should be a positive integer, but given 0"),
        (lambda: dataclasses.replace(HERE, overlap=2), "overlap should be a number from 0 to 1, but given 2"),
        (lambda: dataclasses.replace(HERE, flops=0), "flops should be a positive number"),
        (
            lambda: Model.of(torch.nn.Linear(2, 2), 4),
            "module should have an nn.Embedding and equal blocks and a number of heads",
        ),
        (
            lambda: Model.of(torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)), 4, heads=2),
            "module should be a GPT",
        ),
    ],
)
def test_bad_input_says_which(call, says):
    with pytest.raises(ValueError, match=says):
        call()
