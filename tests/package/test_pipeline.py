"""Stages, microbatches and what a schedule is refused; that training is right is parity's to show."""

import contextlib
import copy
import dataclasses
import itertools
import math
import re
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings, strategies as st
from ignite.engine import Events
from ignite.metrics import MeanSquaredError
from ranks import launch, mesh_of, on_each_rank, pipeline_of, run, sizes, trainer_of
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.pipeline.cut import balance
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.pipeline.schedules import SCHEDULES, microbatches_for, stage_owners, suits
from ignite_ddl.pipeline.stage import _NO_GRADIENT, SENDS_ANY_DTYPE

names = st.sampled_from(list(SCHEDULES))
any_dtype = pytest.mark.skipif(not SENDS_ANY_DTYPE, reason="torch 2.11 sends floating-point tensors only")


def layers(n=8, width=4):
    torch.manual_seed(0)
    modules = OrderedDict()
    for i in range(n):
        modules[f"layer{i}"] = nn.Sequential(nn.Linear(width, width + i), nn.Tanh(), nn.Linear(width + i, width))
    return nn.Sequential(modules)


# ------------------------------------------------------------------------------------------------------- balance


@settings(max_examples=200)
@given(costs=st.lists(st.one_of(st.integers(0, 20), st.floats(0, 10)), min_size=1, max_size=9), data=st.data())
def test_balance_is_optimal(costs, data):
    n_stages = data.draw(st.integers(1, len(costs)))
    sizes = balance(costs, n_stages)
    assert len(sizes) == n_stages
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1

    def costliest(ends):
        starts = [0, *ends]
        return max(sum(costs[a:b]) for a, b in zip(starts, [*ends, len(costs)], strict=True))

    best = min(costliest(cuts) for cuts in itertools.combinations(range(1, len(costs)), n_stages - 1))
    assert costliest(list(itertools.accumulate(sizes))[:-1]) == pytest.approx(best)


def test_of_cuts_with_the_same_costliest_stage_the_most_even_is_taken():
    assert balance([9, 1, 1, 1, 1, 1, 1], 4) == [1, 2, 2, 2]
    assert balance([0, 9, 0, 2, 0, 2, 0, 2], 4) == [2, 2, 2, 2]  # a first layer that only flattens


def test_more_stages_than_layers():
    with pytest.raises(ValueError, match="a model of 3 layers cannot be cut into 4 stages"):
        balance([1, 1, 1], 4)


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0, "a", None])
def test_costs_that_are_none(cost):
    with pytest.raises(ValueError, match="costs should be a sequence of numbers of at least 0"):
        balance([1, cost, 1], 2)
    with pytest.raises(ValueError, match="n_stages should be a positive integer, but given 0"):
        balance([1, 1], 0)


# --------------------------------------------------------------------------------------------------- stage_owners


@given(schedule=names, pp=st.integers(1, 8))
def test_each_rank_owns_as_many_stages_as_its_schedule_says(schedule, pp):
    down = list(range(pp))
    again = [] if schedule in ("gpipe", "1f1b") else down
    if schedule in ("zbv", "dualpipev"):
        again = again[::-1]
    assert stage_owners(schedule, pp) == down + again


# ----------------------------------------------------------------------------------------------- microbatches_for


@settings(max_examples=100)
@given(schedule=names, rows=st.integers(1, 30), wanted=st.integers(1, 12), pp=st.integers(2, 4))
def test_microbatches_divide_the_rows_and_suit_the_schedule(schedule, rows, wanted, pp):
    fitting = [m for m in range(1, rows + 1) if rows % m == 0 and suits(schedule, m, pp)]
    if schedule == "dualpipev" and not fitting:  # needs many and has no plain schedule with its stages
        with pytest.raises(ValueError, match=f"a batch of {rows} rows cannot be cut"):
            microbatches_for(rows, wanted, schedule, pp)
        return
    n, name = microbatches_for(rows, wanted, schedule, pp)
    assert rows % n == 0
    assert suits(name, n, pp)
    if fitting:
        assert name == schedule
        assert abs(n - wanted) == min(abs(m - wanted) for m in fitting)
    else:
        assert name in ("gpipe", "looped_bfs")
        assert stage_owners(name, pp) == stage_owners(schedule, pp)  # the stages stay where they are


def test_a_plain_schedule_where_no_number_fits_and_fewer_microbatches_where_two_are_as_near():
    assert microbatches_for(2, 4, "1f1b", 4) == (2, "gpipe")
    assert microbatches_for(3, 2, "zbv", 2) == (1, "zbv")


# ------------------------------------------------------------------------------------------ the pipeline's refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": nn.ModuleList([nn.Linear(2, 2)] * 2)}, "model should be an nn.Sequential under pp, but given Mod"),
        ({"model": layers(1)}, "a model of 1 layers cannot be cut into 2 stages"),
        ({"model": layers(3), "schedule": "interleaved_1f1b"}, "a model of 3 layers cannot be cut into 4"),
        ({"schedule": "1F1B"}, "schedule should be one of .* but given '1F1B'"),
        ({"n_microbatches": 1}, "n_microbatches=1 does not suit schedule='1f1b' on pp=2; use 2 or more"),
        ({"n_microbatches": 0}, "n_microbatches should be a positive integer, but given 0"),
        ({"n_microbatches": -4, "schedule": "gpipe"}, "n_microbatches should be a positive integer, but given"),
        ({"split": [8]}, r"split should name the layers of each of 2 stages, .* but given \[8\]"),
        ({"split": [4, 5]}, "at least one each, 8 in all, but given"),
        ({"split": [8, 0]}, "split should be a number of layers for each stage, but given .8, 0."),
        ({"split": []}, "at least one each"),
        ({"split": 4}, "split should be a number of layers for each stage, but given 4"),
        ({"split": [4.0, 4.0]}, r"split should be a number of layers for each stage, but given \[4.0, 4.0\]"),
        ({"costs": 3}, "costs should be a sequence of numbers of at least 0, but given 3"),
        ({"costs": ["a"] * 8}, "costs should be a sequence of numbers of at least 0"),
        ({"costs": [1.0] * 7}, "costs should hold a number of at least 0 for each of 8 layers, but given"),
        ({"costs": [1.0] * 7 + [-1.0]}, "costs should be a sequence of numbers of at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    options = {"model": layers(), **options}
    with pytest.raises(ValueError, match=message):
        pipeline_of(mesh=mesh_of(2), **options)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble", "dualpipev"])
def test_stages_without_trainable_weights_are_refused_where_the_backward_pass_is_split(schedule):
    frozen = layers()
    frozen.layer0.requires_grad_(False)
    for rank in range(2):  # every rank, not only the one that holds it
        with pytest.raises(ValueError, match=r"cannot run stage 0 \(layer0\): it has no trainable parameter"):
            pipeline_of(frozen, mesh_of(2, rank), schedule, split=[1, 3, 2, 2])
    pipeline_of(frozen, mesh_of(2), schedule, split=[2, 2, 2, 2])
    pipeline_of(frozen, mesh_of(2), "interleaved_1f1b", split=[1, 3, 2, 2])


# --------------------------------------------------------------------------------------- what a rank holds, names


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_each_rank_holds_its_stages_only_under_the_names_of_the_whole_model(schedule, pp):
    whole = layers()
    ranks = [pipeline_of(layers(), mesh_of(pp, rank), schedule) for rank in range(pp)]
    owners = stage_owners(schedule, pp)
    held = [dict(rank.named_parameters()) for rank in ranks]
    assert sorted(name for part in held for name in part) == sorted(n for n, _ in whole.named_parameters())
    for rank, part in enumerate(held):
        for name, parameter in part.items():
            assert torch.equal(parameter, whole.get_parameter(name))
            assert owners[ranks[rank]._local_stages.cut.stage_of[name]] == rank
        assert list(stages_of(ranks[rank]).full_shapes()) == list(whole.state_dict())
        assert ranks[rank].is_last == (rank == owners[-1])
    starts = list(itertools.accumulate([0, *sizes(ranks[0])]))
    for stage, owner in enumerate(owners):
        for i in range(starts[stage], starts[stage + 1]):
            assert f"layer{i}.0.weight" in held[owner]


@pytest.mark.parametrize("rank", [0, 1])
def test_layers_may_be_called_as_a_pipeline_calls_its_own_things(rank):
    names = ["mesh", "local", "owners", "schedule", "shared", "shapes", "stages", "module", "split", "stage_of",
             "_order", "order", "step", "counts", "local_stages", "shared_names", "plain_module"]  # fmt: skip
    odd = nn.Sequential(OrderedDict([(name, nn.Linear(2, 2)) for name in names]))
    odd.add_module("layers", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))  # as Llama's
    pipeline = pipeline_of(odd, mesh_of(2, rank))
    held = dict(pipeline.named_parameters())
    assert held
    assert list(pipeline.state_dict()) == list(held)
    for name, parameter in held.items():
        assert parameter is odd.get_parameter(name) is pipeline.get_parameter(name)
    assert pipeline._local_stages.mesh.pp_rank == rank
    assert sum(sizes(pipeline)) == len(odd)
    with pytest.raises(AttributeError, match="nothing"):
        pipeline.get_submodule("nothing.0")


def test_numbers_are_balanced_by_cost():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 100))
    assert sizes(pipeline_of(model, mesh_of(2))) == [3, 1]
    counts = [sum(p.numel() for p in pipeline_of(model, mesh_of(2, r)).parameters()) for r in range(2)]
    assert counts == [12, 300]
    assert sizes(pipeline_of(model, mesh_of(2), split=[1, 3])) == [1, 3]


def test_an_optimizer_can_be_made_where_a_rank_has_no_weights():
    pipeline = pipeline_of(nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), mesh_of(2), split=[1, 1])
    assert dict(pipeline.named_parameters()) == {}
    assert dict(pipeline.state_dict()) == {}
    assert sum(p.numel() for p in pipeline.parameters()) == 0
    torch.optim.AdamW(pipeline.parameters(), lr=1.0).step()


def test_a_layer_that_is_there_twice_is_run_twice():
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act)
    assert sum(sizes(pipeline_of(model, mesh_of(2)))) == 4
    pipeline = pipeline_of(model, mesh_of(2, 1), split=[1, 3])
    assert len(stages_of(pipeline).stages[1]) == 3


def test_weights_that_stages_share_are_found_by_name():
    model = layers()
    model.layer7[2].bias = model.layer0[2].bias
    for rank in range(2):
        pipeline = pipeline_of(model, mesh_of(2, rank))
        assert pipeline._local_stages.cut.shared == [["layer0.2.bias", "layer7.2.bias"]]
        assert [stages_of(pipeline).counts(f"layer{i}.2.bias") for i in (0, 7)] == [True, False]
    assert pipeline_of(layers(), mesh_of(2))._local_stages.cut.shared == []


# ---------------------------------------------------------------------------------------------------- on ranks


@pytest.mark.parametrize("mesh", [{"pp": 2}, pytest.param({"pp": 4}, marks=pytest.mark.slow)], ids=str)
@on_each_rank()
def test_forward_only_equals_the_whole_model_on_every_schedule(local_rank):
    """And forward; for several numbers of rows."""
    whole = layers().double()
    for schedule in SCHEDULES:
        pipeline = ddl.auto_model(layers().double(), schedule=schedule)
        for rows in (1, 9):  # fewer than microbatches, and uneven
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
            expected = whole(x).detach()
            output = pipeline.forward_only(x)
            assert (output is not None) == pipeline.is_last
            assert output is None or (output - expected).abs().max() < 1e-14
            output = pipeline.eval()(x)  # this one is on every rank
            assert not output.requires_grad
            with pytest.raises(ValueError, match="use ddl.create_supervised_trainer, or ddl.forward_backward"):
                pipeline.train()(x).sum().backward()
            assert (output - expected).abs().max() < 1e-14
        assert stages_of(pipeline).from_last_stage(ddl.get_mesh().pp_rank) == pipeline._local_stages.cut.owners[-1]


@on_each_rank(pp=2)
def test_what_travels_between_stages(local_rank):
    """Activations of other types, more dims and other shapes travel between stages."""
    torch.manual_seed(0)
    stages = [nn.Embedding(5, 4), nn.Conv1d(3, 2, 1), nn.Flatten(), nn.Linear(8, 2)]
    whole = nn.Sequential(*stages)
    tokens = torch.tensor([[1, 2, 3], [3, 4, 0], [0, 0, 1]])
    expected = whole(tokens).detach()
    pipeline = ddl.auto_model(nn.Sequential(*stages), schedule="interleaved_1f1b")
    half = ddl.auto_model(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).bfloat16(), split=[1, 1])
    output = half(torch.ones(3, 2, 2, dtype=torch.bfloat16))
    torch.testing.assert_close(pipeline(tokens), expected)
    assert (output.dtype, output.shape) == (torch.bfloat16, (3, 2))


@pytest.mark.parametrize(
    ("schedule", "name", "n"),
    [
        ("1f1b", "Schedule1F1B", 3),
        ("interleaved_1f1b", "ScheduleInterleaved1F1B", 1),
        ("zbv", "ScheduleZBVZeroBubble", 1),
    ],
)
@on_each_rank(pp=2)
def test_train_step(local_rank, schedule, name, n):
    """It leaves outputs and losses on the last stage, adds gradients up, and makes schedules once."""
    whole = layers().double()
    pipeline = ddl.auto_model(layers().double(), schedule=schedule, n_microbatches=2)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    output, loss = pipeline.train_step(x, x, summed)
    assert (output is not None) == (loss is not None) == pipeline.is_last
    right = summed(whole(x), x)
    assert loss is None or (loss - right).abs() < 1e-11
    right.backward()
    for times, parts in ((1, []), (3, [x, x[:3], x[3:]])):  # a new batch size, then a known one
        for part in parts:
            pipeline.train_step(part, part, summed)
        for parameter, p in pipeline.named_parameters():
            assert (p.grad - times * whole.get_parameter(parameter).grad).abs().max() < 1e-11
    made = {
        rows: (type(s).__name__, s._n_microbatches) for (rows, *_), (s, _) in stages_of(pipeline).schedules.made.items()
    }
    assert made == {6: (name, 2), 3: (name, n)}


def gap(pipeline, whole, x, y, loss_fn=None):
    """The largest error of a gradient of the batch, after one step."""
    loss_fn = loss_fn or summed
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.train_step(x.clone(), y, loss_fn)
    whole.zero_grad()
    loss_fn(whole(x.clone()), y).backward()
    right = {name: p.grad for name, p in whole.named_parameters()}
    errors = [0.0]
    for name, p in pipeline.named_parameters():
        assert (p.grad is None) == (right[name] is None), name
        errors += [] if p.grad is None else [(p.grad - right[name]).abs().max().item()]
    return max(errors)


def summed(output, target):
    return (output - target).square().sum()


class Pooled(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean(1)


def words():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Tanh(), Pooled(4, 4)).double()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@on_each_rank(pp=2)
def test_rows_may_be_of_another_length_in_each_batch(local_rank, schedule):
    ddl.pipeline.batch_schedules._KEPT = 2
    pipeline = ddl.auto_model(words(), schedule=schedule, n_microbatches=4)
    for length in (6, 4, 6, 5, 4):
        x = torch.randint(9, (8, length), generator=torch.Generator().manual_seed(length))
        assert gap(pipeline, words(), x, torch.zeros(8, 4, dtype=torch.double)) < 1e-12
    kept = [re.search(r"\(8, (\d)\)", shapes)[1] for _, shapes, _ in stages_of(pipeline).schedules.made]
    assert kept == ["5", "4"]


def half_frozen(frozen):
    model = layers(4).double()
    for layer in model[:2]:
        layer.requires_grad_(not frozen)
    return model


def thawed(local_rank, frozen, way):
    pipeline = ddl.auto_model(half_frozen(frozen), schedule="1f1b", n_microbatches=4)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    errors = [gap(pipeline, half_frozen(frozen), x, x)]
    if way == "all":
        pipeline.requires_grad_()
    else:
        for name, parameter in pipeline.named_parameters():
            parameter.requires_grad_(frozen if name[:6] in ("layer0", "layer1") else parameter.requires_grad)
    if way == "told":
        pipeline.forget_schedules()
    return max(*errors, gap(pipeline, half_frozen(not frozen), x, x))


@pytest.mark.parametrize(("frozen", "way"), [(True, "told"), (False, "told"), (True, "all")])
def test_a_stage_may_be_frozen_or_thawed_between_steps(frozen, way):
    assert max(run(thawed, 2, frozen, way, pp=2)) < 1e-12


def test_a_stage_that_is_frozen_or_thawed_unsaid_is_refused():
    with pytest.raises(ddl.RankError, match=r"stage 0 \(layer0, layer1\) had no weights to train .*every rank"):
        run(thawed, 2, True, "unsaid", pp=2)
    for way in ("told", "unsaid"):
        with pytest.raises(ddl.RankError, match="stage 0 .* was frozen when the model was cut"):
            run(thawed, 4, True, way, pp=2, dp=2)


@on_each_rank(pp=2)
def test_a_batch_that_was_computed_with_gradients_is_refused(local_rank):
    """A pipeline passes no gradient on to an encoder before it."""
    pipeline, encoder = ddl.auto_model(layers(4).double(), n_microbatches=2), nn.Linear(4, 4).double()
    rows = torch.randn(4, 4, dtype=torch.double)
    for name, x, y in (("x", {"x": encoder(rows)}, rows), ("x", nn.Parameter(rows), rows), ("y", rows, encoder(rows))):
        with pytest.raises(ValueError, match=f"{name} was computed with gradients .* a layer of this model"):
            pipeline.train_step(x, y, nn.functional.mse_loss)
    with torch.no_grad():
        x = encoder(rows)
    pipeline.train_step(x, rows, nn.functional.mse_loss)


def in_place():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), nn.ReLU(inplace=True), nn.Linear(4, 4),
        nn.ReLU(inplace=True), nn.Linear(4, 4),
    ).double()  # fmt: skip


@on_each_rank(pp=2)
def test_a_stage_may_begin_with_a_layer_that_works_in_place(local_rank):
    x = torch.randn(8, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    for schedule in SCHEDULES:
        split = [1, 5] if SCHEDULES[schedule].stages_per_rank == 1 else [1, 1, 2, 2]
        pipeline = ddl.auto_model(in_place(), schedule=schedule, split=split, n_microbatches=4)
        assert gap(pipeline, in_place(), x, x) < 1e-12, schedule


@any_dtype
@on_each_rank(pp=2)
def test_whole_numbers_between_stages(local_rank):
    """A stage is tried with rows of the batch, which an embedding has, and not with any numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Embedding(5, 4), nn.Linear(4, 4)).double()
    x = torch.randint(1, 5, (8, 3), generator=torch.Generator().manual_seed(1))
    for schedule in ("gpipe", "1f1b"):
        pipeline = ddl.auto_model(copy.deepcopy(model), schedule=schedule, split=[1, 2], n_microbatches=4)
        assert gap(pipeline, model, x, torch.zeros(8, 3, 4, dtype=torch.double)) < 1e-12


class Embedded(nn.Embedding):
    """Takes a dict of words and a mask; what follows gets a dict, a tuple, and a number that is no tensor."""

    def forward(self, batch):
        hidden = super().forward(batch["words"])
        return {"hidden": hidden, "rest": (batch["mask"], [hidden.tanh(), batch["words"]]), "heads": 2}


class Block(nn.Linear):
    def forward(self, given):
        mask, skips = given["rest"]
        hidden = super().forward(given["hidden"]).tanh() * mask.unsqueeze(-1) / given["heads"]
        return {**given, "hidden": hidden, "rest": (mask, [*skips, hidden])}


class Read(nn.Linear):
    """Reads every skip connection that the blocks left."""

    def forward(self, given):
        mask, (first, words, *skips) = given["rest"]
        seen = (words > 0).to(first.dtype).unsqueeze(-1)
        logits = super().forward(given["hidden"] + first * seen + sum(skips))
        return {"logits": logits, "kept": mask.sum(1)}


def structured():
    torch.manual_seed(0)
    return nn.Sequential(Embedded(9, 4), *[Block(4, 4) for _ in range(4)], Read(4, 3)).double()


def of_both(output, y):
    error = (output["logits"] - y["target"]).square().sum((1, 2)) * y["of"][0] * output["kept"]
    return error.mean()


def batch_of(rows):
    draw = torch.Generator().manual_seed(rows)
    words = torch.randint(9, (rows, 5), generator=draw)
    x = {"words": words, "mask": words > 2, "note": "as it is"}
    target = torch.randn(rows, 5, 3, generator=draw, dtype=torch.double)
    return x, {"target": target, "of": (torch.rand(rows, generator=draw, dtype=torch.double),)}


@any_dtype
@on_each_rank(pp=2)
def test_dicts_tuples_masks_and_skip_connections_between_stages(local_rank):
    """Gradients of batches of unlike sizes, and evaluation, under every schedule, with all that a layer may pass on."""
    whole = structured()
    for schedule in SCHEDULES:
        pipeline = ddl.auto_model(structured(), schedule=schedule, n_microbatches=4)
        engine = ddl.MeshEngine(lambda engine, batch: None)
        for rows in (8, 4):
            x, y = batch_of(rows)
            pipeline.zero_grad(), whole.zero_grad()
            output, loss = ddl.forward_backward(engine, pipeline, x, y, of_both)
            expected = whole(x)
            of_both(expected, y).backward()
            right = {name: p.grad for name, p in whole.named_parameters()}
            found = [(p.grad - right[name]).abs().max() for name, p in pipeline.named_parameters()]
            found.append((loss - of_both(expected, y)).abs())
            for seen in (output, pipeline(x)):
                assert (seen is None) == (seen is output and not pipeline.is_last)
                found += [] if seen is None else [(seen[k] - expected[k]).abs().max() for k in expected]
            assert max(found) < 1e-12, (schedule, rows, found)


class Counts(nn.Linear):
    """Passes on a number that depends on the rows, or a tensor whose shape does."""

    def forward(self, given):
        x = given[0] if isinstance(given, tuple) else given
        hidden = super().forward(x)
        positive = x[:, 0] > 0
        return hidden, x[positive] if self.bias is None else int(positive.sum())


class Holder:
    def __init__(self, hidden):
        self.hidden = hidden


class Holds(nn.Linear):
    def forward(self, x):
        return Holder(super().forward(x))


class First(nn.Module):
    def forward(self, given):
        return given[0]


class Alone(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()


class Aside(nn.Linear):
    """Passes on a second tensor: of its own, or that of the first layer, which cuts off the others."""

    def __init__(self, own):
        super().__init__(4, 4)
        self.aside, self.own = nn.Linear(4, 4), own

    def forward(self, x):
        first = isinstance(x, torch.Tensor)
        h = super().forward(x if first else x[0]).tanh()
        return h if self.own or not first else h.detach(), self.aside(h) if self.own or first else x[1]


class Apart(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach())


def first_of(output, y):
    return summed(output[0], y)


def both_of(output, y):
    return summed(output[0], y) + 2 * summed(output[1], y)


class Scaled(nn.Linear):
    """Its input gets a gradient whose last bits are those of the mark of a missing one."""

    def forward(self, x):
        return super().forward(x.detach()) + x * torch.tensor(2**62 + _NO_GRADIENT).view(torch.double)


def total(output, y):
    return output.sum()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"])
@on_each_rank(pp=2)
def test_weights_get_no_gradient_where_they_get_none_in_one_process(local_rank, schedule):
    """Of a tensor that the next stage does not use, or of all before it; and where an input needs none."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.double)
    cases = [([Aside(own) for _ in range(4)], loss) for own, loss in ((True, first_of), (False, both_of))]
    cases += [([nn.Linear(4, 4), nn.Linear(4, 4), Apart(4, 4), nn.Linear(4, 4)], summed)] * ("1f1b" in schedule)
    cases += [([*(nn.Linear(4, 4) for _ in range(3)), Scaled(4, 4)], total)]
    for parts, loss_fn in cases:
        whole = nn.Sequential(*parts).double()
        pipeline = ddl.auto_model(copy.deepcopy(whole), schedule=schedule, n_microbatches=4)
        for _ in range(2):
            assert gap(pipeline, whole, x, x, loss_fn) < 1e-12


def cutting_off(local_rank, schedule):
    parts = [nn.Linear(4, 4), nn.Linear(4, 4), Apart(4, 4), nn.Linear(4, 4)]
    ddl.auto_model(nn.Sequential(*parts), schedule=schedule).train_step(torch.ones(8, 4), torch.ones(8, 4), summed)


@pytest.mark.skipif(not SENDS_ANY_DTYPE, reason="torch 2.11 raises an error of its own")
def test_a_stage_that_cuts_off_all_others_is_refused_where_the_backward_pass_is_split():
    for schedule in ("zbv", "interleaved_zero_bubble"):
        with pytest.raises(ddl.RankError, match=r"stage 2 \(2\) computes its output, or the loss, without its input"):
            run(cutting_off, 2, schedule, pp=2)


class Turned(nn.Linear):
    def forward(self, x):
        return super().forward(x.transpose(1, 2))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv"])
@on_each_rank(pp=2)
def test_gradients_that_are_sent_need_not_be_contiguous(local_rank, schedule):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 4), Turned(3, 3), Turned(4, 4), Turned(3, 3)).double()
    pipeline = ddl.auto_model(copy.deepcopy(whole), schedule=schedule, n_microbatches=4)
    x = torch.randn(8, 3, 4, dtype=torch.double)
    assert gap(pipeline, whole, x, x.transpose(1, 2)) < 1e-12


def decaying(local_rank, layers, loss_fn, options):
    """Weights after steps with weight decay, which moves those with a gradient of zero."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    model = ddl.auto_model(nn.Sequential(*layers).double(), **options)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, loss_fn, gradient_accumulation_steps=2)
    trainer.run(ddl.auto_dataloader(torch.utils.data.TensorDataset(x, x.tanh()), batch_size=8), max_epochs=2)
    return ddl.full_state_dict(model)


@pytest.mark.parametrize(("mesh", "options"), [({"dp": 2, "pp": 2}, {}), ({"dp": 2}, {"shard": True})], ids=str)
def test_weights_without_a_gradient_are_not_moved_where_dp_ranks_average_others(mesh, options):
    torch.manual_seed(0)
    parts = [nn.Sequential(Aside(True)) for _ in range(4)]
    for layers, loss in ((parts, first_mse), ([nn.Linear(4, 4), Apart(4, 4)], nn.functional.mse_loss)):
        expected = decaying(0, copy.deepcopy(layers), loss, {})
        found, *_ = launch(mesh, decaying, layers, loss, options)
        for name, right in expected.items():
            assert (found[name] - right).abs().max() < 1e-12, name


class Holding(nn.Linear):
    """Has a weight that no step uses."""

    def __init__(self, held):
        super().__init__(4, 4)
        self.held = held


def test_a_weight_that_stages_share_and_no_step_uses_is_not_moved():
    held = nn.Parameter(torch.ones(4, dtype=torch.double))
    found, *_ = run(decaying, 2, [Holding(held), Holding(held)], nn.functional.mse_loss, {}, pp=2)
    assert torch.equal(found["0.held"], held)
    assert torch.equal(found["1.held"], held)


def frozen_by(local_rank, names):
    held = nn.Parameter(torch.ones(4))
    model = ddl.auto_model(nn.Sequential(Holding(held), Holding(held)))
    trainer = trainer_of(model, nn.functional.mse_loss)

    @trainer.on(Events.ITERATION_STARTED(once=2))
    def freeze():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in names)

    x = torch.ones(4, 4)
    trainer.run([(x, x)] * 3)


def test_a_weight_that_stages_share_is_frozen_by_all_its_names():
    run(frozen_by, 2, ["0.held", "1.held"], pp=2)
    with pytest.raises(ddl.RankError, match="'0.held', '1.held' are names of one weight, .* freeze it by all its"):
        run(frozen_by, 2, ["0.held"], pp=2)


def first_mse(output, y):
    return nn.functional.mse_loss(output[0], y)


class Conjugated(nn.Module):
    """A filter: torch conjugates its buffer, what it returns and so a gradient of it when it is read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("filter", torch.fft.fft(torch.arange(4, dtype=torch.double)).conj())

    def forward(self, x):
        return (torch.fft.fft(x) * self.filter).conj()


class Real(nn.Linear):
    def forward(self, x):
        return super().forward(torch.fft.ifft(x).real)


@any_dtype
@on_each_rank(pp=2)
def test_conjugated_numbers_in_a_buffer_and_between_stages(local_rank):
    torch.manual_seed(0)
    whole, x = nn.Sequential(nn.Linear(4, 4), Conjugated(), Real(4, 4)).double(), torch.randn(8, 4, dtype=torch.double)
    pipeline = ddl.auto_model(copy.deepcopy(whole), split=[2, 1], n_microbatches=4)
    assert gap(pipeline, whole, x, x) < 1e-12
    assert torch.allclose(pipeline(x), whole(x))


class InFloat8(nn.Linear):
    """Returns numbers of 8 bits, with a gradient if it has a bias."""

    def forward(self, x):
        small = super().forward(x).to(torch.float8_e4m3fn)
        return x, small if self.bias is not None else small.detach()


def cannot_be_sent(local_rank, layers):
    x = torch.linspace(-1, 1, 8).repeat(4, 1).T.contiguous()
    ddl.auto_model(nn.Sequential(*layers), split=[1, len(layers) - 1], n_microbatches=4).train_step(x, x, summed)


@any_dtype
@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([Counts(4, 4), First()], r"same shapes, dtypes and plain values .* and \[2\] after .* and \[0\]"),
        ([Counts(4, 4, bias=False), First()], r"same shapes, .*\(2, 4\), .* after .*\(0, 4\)"),
        ([Holds(4, 4), First()], "stage 0 .* should be made of tensors, .* but holds a Holder"),
        ([InFloat8(4, 4), First()], "stage 0 .* returns float8 numbers that require a gradient, .* or detached"),
        ([nn.Linear(4, 4), Alone(4, 4)], "output should have a row for each sample .* a single number"),
    ],
    ids=["number", "shape", "object", "float8", "mean"],
)
def test_what_cannot_travel_is_refused(layers, said):
    with pytest.raises(ddl.RankError, match=said):
        run(cannot_be_sent, 2, layers, pp=2)


@any_dtype
def test_numbers_of_8_bits_travel_without_a_gradient():
    run(cannot_be_sent, 2, [InFloat8(4, 4, bias=False), First(), nn.Linear(4, 4)], pp=2)


class Widens(nn.Linear):
    """Returns more in evaluation mode, or with a flag."""

    flag = False

    def forward(self, x):
        y = super().forward(x)
        return torch.cat([y, y], 1) if self.flag or not self.training else y


class Narrows(nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :4]).double()


def changing(local_rank, by_a_flag):
    torch.manual_seed(0)
    whole, x = nn.Sequential(Widens(4, 4), Narrows(4, 4)).double(), torch.randn(8, 4, dtype=torch.double)
    pipeline = ddl.auto_model(copy.deepcopy(whole), n_microbatches=4)
    assert gap(pipeline, whole, x, x) < 1e-12
    if by_a_flag:
        Widens.flag = True
        try:
            assert gap(pipeline, whole, x, x) < 1e-12
        finally:
            Widens.flag = False
    assert gap(pipeline.eval(), whole, x, x) < 1e-12
    pipeline.float().train()
    for around in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext()):
        with around:
            pipeline.train_step(x.float(), x, nn.functional.mse_loss)
    off, on = (torch.autocast("cpu", torch.bfloat16, enabled=enabled) for enabled in (False, True))
    losses = [pipeline.train_step(x.float(), x, nn.functional.mse_loss, context)[1] for context in (off, on, off)]
    assert losses == [None] * 3 or losses[0] == losses[2] != losses[1]


@any_dtype
def test_what_a_stage_returns_may_change_with_the_mode_and_with_autocast_and_by_a_flag_if_it_is_said():
    run(changing, 2, False, pp=2)
    with pytest.raises(ddl.RankError, match=r"same shapes, .* call its forget_schedules\(\) on every rank"):
        run(changing, 2, True, pp=2)


class Transposed(nn.Linear):
    def forward(self, x):
        return super().forward(x).transpose(0, 1)


class Tabled(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight


@on_each_rank(pp=2)
def test_a_weight_that_the_last_stage_returns_is_trained_on_also_where_x_requires_a_gradient(local_rank):
    torch.manual_seed(0)
    whole, x = nn.Sequential(nn.Tanh(), Tabled(4, 4)).double(), torch.randn(8, 4, dtype=torch.double)
    pipeline = ddl.auto_model(copy.deepcopy(whole), n_microbatches=2)
    for requires_grad in (False, True, False):
        assert gap(pipeline, whole, x, x, lambda output, y: summed(output[0], y)) < 1e-12
        assert all(p.requires_grad for p in pipeline.parameters())
        pipeline.train_step(x.detach().requires_grad_(requires_grad), x, lambda output, y: summed(output[0], y))


class Packed(nn.Linear):
    def forward(self, x):
        return super().forward(x).flatten(0, 1)


def predicted(local_rank, last, length, rows):
    """The output by a call, by the evaluator and of the uncut model."""
    torch.manual_seed(0)
    x, whole = torch.randn(rows, length, 4), nn.Sequential(nn.Linear(4, 4), last(4, 4))
    model = ddl.auto_model(copy.deepcopy(whole), n_microbatches=4)
    evaluator = ddl.create_supervised_evaluator(model)
    return model(x), evaluator.run([(x, x)]).output[0], whole(x).detach()


@pytest.mark.parametrize("last", [Transposed, Tabled])
@pytest.mark.parametrize(("length", "rows"), [(5, 8), (4, 16), (2, 8), (3, 4)])  # as many in dim 0, or some for each
def test_outputs_whose_rows_are_not_in_dim_0_are_not_joined(last, length, rows):
    with pytest.raises(ddl.RankError, match=r"should have its rows in dim 0 .*return rows in dim 0"):
        run(predicted, 2, last, length, rows, pp=2)


class Counting(nn.Linear):
    """Says how many rows it has seen, too."""

    def forward(self, x):
        y = super().forward(x)
        return {"y": y, "width": y.shape[1], "n": len(y)} if self.training else (y, y.shape[1], math.nan)


def counted(local_rank, training):
    model = ddl.auto_model(nn.Sequential(nn.Linear(4, 4), Counting(4, 4)), n_microbatches=4)
    return model.train(training)(torch.ones(8, 4))


def test_numbers_beside_the_rows_are_the_same_for_all_of_them():
    y, *others = run(counted, 2, False, pp=2)[0]
    assert y.shape == (8, 4)
    assert str(others) == "[4, nan]"
    with pytest.raises(ddl.RankError, match=r"same plain values .* 1 and 2: .* y.new_full\(\(len\(y\),\), n\)"):
        run(counted, 2, True, pp=2)


@dataclasses.dataclass(frozen=True)
class Rows:
    y: torch.Tensor
    width: int
    twice: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "y", self.y + 1)
        object.__setattr__(self, "twice", self.y * 2)


class InARecord(nn.Linear):
    def forward(self, x):
        return Rows(super().forward(x), 4)


@on_each_rank(pp=2)
def test_rows_in_a_dataclass_are_joined(local_rank):
    torch.manual_seed(0)
    whole, x = nn.Sequential(nn.Linear(4, 4), InARecord(4, 4)), torch.randn(8, 4)
    found = ddl.auto_model(copy.deepcopy(whole), n_microbatches=4)(x)
    assert found.width == 4
    assert torch.allclose(found.y, whole(x).y)
    assert torch.allclose(found.twice, 2 * found.y)


def test_packed_rows_and_a_single_microbatch_are_joined():
    for last, rows in ((Packed, 8), (Packed, 5), (Transposed, 1)):
        for called, evaluated, expected in run(predicted, 2, last, 4, rows, pp=2):
            assert torch.allclose(called, expected)
            assert torch.allclose(evaluated, expected)


class Beside(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return super().forward(x * self.scale).tanh() + self.scale


def beside(local_rank, schedule):
    model = ddl.auto_model(nn.Sequential(*[Beside() for _ in range(4)]), schedule=schedule, n_microbatches=4)
    model.train_step(torch.ones(8, 4), torch.ones(8, 4), summed)


def test_a_weight_that_a_split_backward_pass_cannot_do_is_explained():
    run(beside, 2, "1f1b", pp=2)
    for schedule in ("zbv", "interleaved_zero_bubble"):
        with pytest.raises(ddl.RankError, match=f"schedule='{schedule}' computes .* uses some weight .*; use '1f1b'"):
            run(beside, 2, schedule, pp=2)


@on_each_rank(pp=2)
def test_what_is_no_batch_is_refused_on_every_rank(local_rank):
    pipeline, x = ddl.auto_model(layers()), torch.ones(8, 4)
    shapes = "x and y should have a row for each sample, but given shapes "
    no_tensor = "should hold a tensor with a row for each sample, by which .* but given a"
    for batch, said in (
        ((x, None), f"^y {no_tensor} NoneType without tensors"),
        ((x, x[:5]), shapes + r"\(8, 4\) and \(5, 4\)"),
        ((x[:0], x[:0]), shapes + r"\(0, 4\) and \(0, 4\)"),
        (((x, x[0, 0]), x), shapes + r"\(8, 4\); \(\) and \(8, 4\)"),
        (({"a": x, "rows": {8}}, x), "^x should be made of tensors, .* since under pp .* but holds a set"),
        ((8, x), f"^x {no_tensor} int without tensors"),
        (((x, tuple("abcdefgh")), x), "^x should hold .* but holds a tuple of 8 values, such as 'a': .* as a tensor"),
    ):
        with pytest.raises(ValueError, match=said):
            pipeline.train_step(*batch, summed)
    for other in (x[:5], x[0, 0]):  # each of which a microbatch would get as a whole
        with pytest.raises(ValueError, match=r"^x should .* given shapes \(8, 4\); .*give it to each sample"):
            pipeline((x, other))


@on_each_rank(pp=2)
def test_a_loss_is_reported_that_has_no_weight(local_rank):
    model, x = ddl.auto_model(layers()), torch.randn(4, 4)

    def update(engine, batch):
        return ddl.forward_backward(engine, model, batch, batch, nn.functional.mse_loss, scale=0.0)[1].item()

    loss = ddl.MeshEngine(update).run(ddl.auto_dataloader(list(x), batch_size=4)).output
    assert loss == pytest.approx(nn.functional.mse_loss(layers()(x), x).item())


class ByWords(nn.Linear):
    def forward(self, given):
        x, words, n = given
        assert len(x) == len(words)
        return super().forward(x) * torch.tensor([[len(word)] for word in words]) * n


def of_lengths(output, given):
    y, lengths, (of_each, _) = given
    return sum((row[:n] - other[:n]).square().sum() for row, other, n in zip(output, y, lengths, strict=True)) / of_each


@on_each_rank(pp=2)
def test_lists_with_a_value_for_each_row_are_cut(local_rank):
    """In targets, and in the input without training; a tuple of numbers is what all rows share."""
    whole, x = layers().double(), torch.randn(4, 4, dtype=torch.float64)
    pipeline = ddl.auto_model(copy.deepcopy(whole), n_microbatches=2)
    assert gap(pipeline, whole, x, (x.tanh(), [1, 4, 2, 3], (2.0, 3.0)), of_lengths) < 1e-12
    assert gap(pipeline, whole, x[:2], (x[:2].tanh(), [1, 4], (2.0, 3.0)), of_lengths) < 1e-12
    whole = nn.Sequential(ByWords(4, 4), nn.Linear(4, 4)).double()
    given = x, ("a", "bc", "def", "g"), 3
    assert (ddl.auto_model(copy.deepcopy(whole))(given) - whole(given)).abs().max() < 1e-14


def copies(local_rank):
    """A weight of four stages, after the same updates on each."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    for layer in model[1:]:
        layer[0].weight = model[0][0].weight
    pipeline = ddl.auto_model(model)
    [weight] = [p for name, p in pipeline.named_parameters() if name.endswith("weight")]
    for n in range(20):
        weight.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(4 * n + local_rank))
        stages_of(pipeline).sum_shared_gradients()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
    return weight.detach()


def test_copies_of_a_weight_stay_equal_to_the_last_bit():
    first, *others = run(copies, 4, pp=4)
    assert all(torch.equal(first, other) for other in others)


def teaching(local_rank, where=None):
    """A pipeline teaches another one."""
    torch.manual_seed(0)
    student, teacher = ddl.auto_model(layers(4).double()), ddl.auto_model(layers(4).double().requires_grad_(False))
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    optimizer = ddl.auto_optim(torch.optim.SGD(student.parameters(), lr=0.1))

    def loss_fn(output, y):
        return nn.functional.mse_loss(output, teacher(y) if where == "loss_fn" else y)

    def prepare_batch(batch, **_):
        with torch.no_grad():
            return batch, batch if where == "loss_fn" else teacher(batch)

    def output_transform(x, y, y_pred, loss):
        return (teacher(x) if where == "output_transform" else loss).sum().item()

    trainer = ddl.create_supervised_trainer(
        student, optimizer, loss_fn, prepare_batch=prepare_batch, output_transform=output_transform
    )
    return trainer.run(ddl.auto_dataloader(x, batch_size=4), max_epochs=2).output


@pytest.mark.parametrize("where", ["loss_fn", "output_transform"])
def test_a_pipeline_is_not_called_where_only_some_ranks_are(where):
    with pytest.raises(ddl.RankError, match="a pipeline cannot be called in loss_fn, in output_transform"):
        run(teaching, 2, where, pp=2)


def test_a_pipeline_teaches_another_one_in_prepare_batch():
    assert max(abs(found - teaching(0)) for found in run(teaching, 2, pp=2)) < 1e-12


@on_each_rank(pp=2)
def test_a_gradient_of_the_input_is_refused(local_rank):
    pipeline, x = ddl.auto_model(layers(4).double()), torch.ones(4, 4, dtype=torch.double, requires_grad=True)
    for mode in (True, False):
        with pytest.raises(ValueError, match="a pipeline's output has no gradient"):
            torch.autograd.grad(pipeline.train(mode)(x).sum(), x)
    assert not pipeline(x.detach()).requires_grad


def training_of_shards(local_rank):
    torch.manual_seed(0)
    x = torch.randn(22, 4, dtype=torch.double)
    loader = ddl.auto_dataloader(torch.utils.data.TensorDataset(x, x.tanh()), batch_size=11)
    options = {"shard": True, "reshard_after_forward": True} if ddl.get_mesh().world_size > 1 else {}
    model = ddl.auto_model(layers(4).double(), n_microbatches=2, **options)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5))
    trainer = ddl.create_supervised_trainer(model, optimizer, nn.functional.mse_loss)
    trainer.run(loader, max_epochs=2)
    metrics = {"error": MeanSquaredError()}
    evaluator = ddl.create_supervised_evaluator(model, metrics=metrics)
    return trainer.state.output, evaluator.run(loader).metrics["error"]


def test_dp_peers_that_gather_weights_for_each_microbatch_have_as_many():
    """Of 11 rows one has 5, which 2 microbatches do not divide, and its peer 6."""
    expected = training_of_shards(0)
    for found in run(training_of_shards, 4, dp=2, pp=2):
        assert found == pytest.approx(expected, abs=1e-12)
