"""ddl.Checkpoint: nothing is lost between a save and a load, on any two meshes, whatever happens in between."""

import json
import math
import random
import warnings
from collections import Counter, OrderedDict, defaultdict

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import EarlyStopping, ReduceLROnPlateauScheduler
from ignite.metrics import Average, Loss, RunningAverage
from ignite.metrics.metric import RunningBatchWise
from ranks import launch, on_each_rank, trainer_of
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset, WeightedRandomSampler

import ignite_ddl as ddl
from ignite_ddl.checkpoint.values import decoded, encoded
from ignite_ddl.lab.bytes import count_bytes

MESHES = {
    "one process": ({}, False),
    "dp2": ({"dp": 2}, False),
    "dp2 shard": ({"dp": 2}, True),
    "dp3 shard": ({"dp": 3}, True),
    "tp2": ({"tp": 2}, False),
    "pp2": ({"pp": 2}, False),
    "dp2 tp2": ({"dp": 2, "tp": 2}, False),
    "dp2 tp2 shard": ({"dp": 2, "tp": 2}, True),
    "pp2 tp2": ({"pp": 2, "tp": 2}, False),
    "dp2 pp2 shard": ({"dp": 2, "pp": 2}, True),
    "dp2 pp2 tp2": ({"dp": 2, "pp": 2, "tp": 2}, False),
    "dp2 pp2 tp2 shard": ({"dp": 2, "pp": 2, "tp": 2}, True),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, None),
    "hsdp tp2": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, None),
}


class Gated(nn.Module):
    """Two things in one weight, which a tensor plan cuts part by part."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.fused, self.down, self.dropout = nn.Linear(8, 24), nn.Linear(12, 8), nn.Dropout(dropout)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x):
        values, gates = self.fused(x).chunk(2, -1)
        return x * self.scale + self.dropout(self.down(values * torch.sigmoid(gates)))


PLAN = {
    "embed": ddl.Row(),
    "head": ddl.Column(output_layouts=Replicate()),
    "gated*.fused": ddl.Column(parts=2),
    "gated*.down": ddl.Row(),
}


def net(dropout=0.0, tied=True, width=8, words=10):
    """With a tied weight, a frozen one, a layer made late, and a buffer."""
    layers = [("embed", nn.Embedding(words, width)), ("gated0", Gated(dropout)), ("gated1", ddl.lazy(Gated, dropout)),
              ("norm", nn.LayerNorm(8)), ("head", nn.Linear(width, words, bias=False))]  # fmt: skip
    model = nn.Sequential()
    for name, layer in layers:
        model.add_module(name, layer)
    model.norm.weight.requires_grad_(False)
    if tied:
        model.head.weight = model.embed.weight
    return model.double()


class Rows(torch.utils.data.Dataset):
    """Rows with noise that is drawn when they are read."""

    def __init__(self, n=23, noise=False):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randint(10, (n, 3), generator=generator)
        self.y = torch.randn(n, 3, 10, generator=generator, dtype=torch.float64)
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.randn(3, 10, dtype=torch.float64) + random.random() if self.noise else 0.0
        return self.x[i], self.y[i] + noise


def optimizer_of(model, kind):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    inside = [p for name, p in named if "gated" in name]
    outside = [p for name, p in named if "gated" not in name]
    groups = [{"params": inside, "lr": 0.01}, {"params": outside}]
    if kind == "adam":
        return torch.optim.Adam(groups, lr=0.02)
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True)


class Run:
    """All that belongs to a training run."""

    def __init__(self, shard=False, optimizer="adam", schedule="1f1b", dropout=0.0, noise=False, workers=0, seed=0):
        torch.manual_seed(seed)
        random.seed(seed)
        model = net(dropout)
        self.loader = ddl.auto_dataloader(Rows(noise=noise), batch_size=4, shuffle=True, num_workers=workers)
        self.model = ddl.auto_model(model, PLAN, shard=shard, schedule=schedule)
        self.optimizer = ddl.auto_optim(optimizer_of(self.model, optimizer))
        self.trainer = ddl.create_supervised_trainer(self.model, self.optimizer, F.mse_loss)
        self.losses = []
        self.trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: self.losses.append(engine.state.output)
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10)

    def things(self):
        return {"model": self.model, "optimizer": self.optimizer, "trainer": self.trainer, "loader": self.loader,
                "scheduler": self.scheduler}  # fmt: skip

    def save_every(self, folder, every, **kwargs):
        checkpoint = ddl.Checkpoint(self.things(), folder, n_saved=None, **kwargs)
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=every), checkpoint)
        # Attached after it and yet before it in time: what it does is in the checkpoint.
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: self.scheduler.step())
        return checkpoint

    def go(self, epochs=2):
        self.trainer.run(self.loader, max_epochs=epochs)
        return self.losses


def uninterrupted(rank, folder, every, options):
    run = Run(**options)
    run.save_every(folder, every)
    return run.go()


def resumed(rank, folder, again, options):
    """Loads, saves at once under another name, and goes on."""
    run = Run(seed=1, **options)
    ddl.Checkpoint.load_objects(run.things(), folder)
    ddl.Checkpoint(run.things(), again).save("again")
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: run.scheduler.step())
    return run.go()


def loaded(folder, options):
    run = Run(seed=2, **options)
    ddl.Checkpoint.load_objects(run.things(), folder)
    return run


def on(mesh, function, *args):
    axes, shard = MESHES[mesh]
    *rest, options = args
    options = options | {"shard": shard}
    return launch(axes, function, *rest, options)[0] if axes else function(0, *rest, options)


def assert_same_bits(run, other):
    a, b = run.model.state_dict(), other.model.state_dict()
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name
    a, b = run.optimizer.state_dict(), other.optimizer.state_dict()
    assert a["param_groups"] == b["param_groups"]
    torch.testing.assert_close(a["state"], b["state"], rtol=0, atol=0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run of one process, with a checkpoint after iteration 4 of 6 in the first epoch."""
    folder = tmp_path_factory.mktemp("reference")
    runs = {}
    for kind in ("adam", "sgd"):
        runs[kind] = uninterrupted(0, folder / kind, 4, {"optimizer": kind}), folder / kind / "checkpoint_4"
    return runs


FEW = ("one process", "dp2 shard", "tp2", "pp2")
SLOW = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES if mesh not in FEW]


@pytest.mark.parametrize("mesh", [*FEW, *SLOW])
def test_from_one_process_to_a_mesh_and_back(mesh, reference, tmp_path):
    kind = "sgd" if mesh in ("tp2", "dp2 pp2 shard") else "adam"
    losses, folder = reference[kind]
    there = on(mesh, resumed, folder, tmp_path, {"optimizer": kind})
    assert len(there) == 8
    assert max(abs(a - b) for a, b in zip(losses[4:], there, strict=True)) <= 1e-12
    back, before = loaded(tmp_path / "again", {"optimizer": kind}), loaded(folder, {"optimizer": kind})
    assert_same_bits(back, before)
    assert max(abs(a - b) for a, b in zip(losses[4:], _go_on(back), strict=True)) <= 1e-12


def _go_on(run):
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: run.scheduler.step())
    return run.go()


QUICK = ("dp2 tp2 shard", "pp2")  # chapter 21 goes on from pp and dropout on other meshes
PAIRS = [(a, b) for a in MESHES for b in MESHES if "one" not in a + b and "hsdp" not in a + b and (a, b) != QUICK]
PAIRS += [("hsdp", "dp2 tp2 shard"), ("dp3 shard", "hsdp"), ("hsdp", "pp2"), ("dp2 pp2 tp2 shard", "hsdp tp2")]
SCHEDULES = {("pp2 tp2", "dp3 shard"): "zbv", ("dp2 pp2 shard", "tp2"): "interleaved_1f1b"}


@pytest.mark.parametrize(("first", "second"), [QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS)])
def test_from_mesh_to_mesh(first, second, reference, tmp_path):
    losses, _ = reference["adam"]
    on(first, uninterrupted, tmp_path, 4, {"schedule": SCHEDULES.get((first, second), "1f1b")})
    there = on(second, resumed, tmp_path / "checkpoint_4", tmp_path / "second", {})
    assert max(abs(a - b) for a, b in zip(losses[4:], there, strict=True)) <= 1e-12
    saved, again = (loaded(path, {}) for path in (tmp_path / "checkpoint_4", tmp_path / "second" / "again"))
    assert_same_bits(saved, again)


RANDOM = {"dropout": 0.3, "noise": True}


@pytest.mark.parametrize(("mesh", "options"), [
    ("one process", RANDOM), ("dp2", RANDOM | {"workers": 2}), ("pp2", RANDOM),
    *(pytest.param(mesh, RANDOM, marks=pytest.mark.slow) for mesh in ("tp2", "dp2 shard", "dp2 pp2 tp2")),
])  # fmt: skip
def test_a_resumed_run_draws_the_same_random_numbers(mesh, options, tmp_path):
    losses = on(mesh, uninterrupted, tmp_path, 4, options)
    there = on(mesh, resumed, tmp_path / "checkpoint_4", tmp_path / "again", options)
    assert max(abs(a - b) for a, b in zip(losses[4:], there, strict=True)) <= 1e-12
    assert there != losses[: len(there)]


# ------------------------------------------------------------------------------------------ handlers


def with_handlers(rank, folder, load, options):
    """Early stopping, a running average and ReduceLROnPlateau, whose states decide what comes next."""
    run = Run(**options)
    average = RunningAverage(alpha=0.5, output_transform=lambda loss: loss)
    average.attach(run.trainer, "average")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, factor=0.5, patience=1)
    stopper = EarlyStopping(2, lambda engine: -max(6.0, engine.state.metrics["average"]), run.trainer)
    stopper.logger.disabled = True
    by_epoch = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.7)
    run.trainer.add_event_handler(Events.EPOCH_STARTED, lambda: by_epoch.step())
    scaler = torch.amp.GradScaler("cpu")
    things = run.things() | {"average": average, "plateau": plateau, "stopper": stopper, "by_epoch": by_epoch}
    things |= {"scaler": scaler}
    checkpoint = ddl.Checkpoint(things, folder, n_saved=None, include_self=True)
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED, checkpoint)
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda e: plateau.step(e.state.metrics["average"]))
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED, stopper)
    if load:
        ddl.Checkpoint.load_objects(things | {"checkpointer": checkpoint}, load)
    run.go(3)
    return run.losses, run.trainer.state.iteration, plateau.state_dict(), checkpoint.last_checkpoint.name


@pytest.mark.parametrize("mesh", ["dp2", pytest.param("dp2 pp2 tp2", marks=pytest.mark.slow)])
def test_states_of_handlers_go_on(mesh, tmp_path):
    losses, *end = on(mesh, with_handlers, tmp_path, None, {})
    again, *same_end = on(mesh, with_handlers, tmp_path, tmp_path / "checkpoint_4", {})
    assert end == same_end
    assert 5 < end[0] < 18, "early stopping acts"
    assert max(abs(a - b) for a, b in zip(losses[4:], again, strict=True)) <= 1e-12


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = ddl.Checkpoint({"model": nn.Linear(2, 1)}, "saves")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert checkpoint.save("x") == tmp_path / "saves" / "x"
    assert (tmp_path / "saves" / "x").is_dir()


def test_best_and_last_are_kept(tmp_path):
    """n_saved, score_function, score_name, prefix, pattern and last_checkpoint, as in Ignite."""
    run = Run()
    scores = iter([3, 1, 4, 1, 5, 9, 2, 6])
    best = ddl.Checkpoint({"model": run.model}, tmp_path / "best", "best", lambda engine: next(scores), "score", 2,
                          global_step_transform=lambda engine, event: engine.state.iteration)  # fmt: skip
    last = ddl.Checkpoint(run.things(), tmp_path / "last", n_saved=3)
    named = ddl.Checkpoint(run.things(), tmp_path / "named", filename_pattern="{name}-of-{global_step}")
    for checkpoint in (best, last, named):
        run.trainer.add_event_handler(Events.ITERATION_COMPLETED, checkpoint)
    run.go(1)
    assert sorted(path.name for path in (tmp_path / "best").glob("[!.]*")) == [
        "best_model_5_score=5", "best_model_6_score=9",
    ]  # fmt: skip
    assert best.last_checkpoint == tmp_path / "best" / "best_model_6_score=9"
    assert sorted(path.name for path in (tmp_path / "last").glob("[!.]*")) == [f"checkpoint_{i}" for i in (4, 5, 6)]
    assert [path.name for path in (tmp_path / "named").glob("[!.]*")] == ["checkpoint-of-6"]
    other = Run(seed=1)
    best.reload_objects({"model": other.model}, score=9, global_step=6)
    assert torch.equal(other.model.head.weight, run.model.head.weight)
    last.reload_objects({"model": other.model}, global_step=4)
    assert not torch.equal(other.model.head.weight, run.model.head.weight)


def scores_by_rank(rank, folder):
    run = Run()
    checkpoint = ddl.Checkpoint(run.things(), folder, score_function=lambda engine: float(ddl.get_mesh().rank))
    checkpoint(run.trainer)
    checkpoint(run.trainer)  # were each rank to decide by its own score, rank 1 would wait here
    return [path.name for path in folder.glob("[!.]*")]


def test_rank_0_decides(tmp_path):
    assert launch({"dp": 2}, scores_by_rank, tmp_path)[0] == ["checkpoint_0.0000"]


@on_each_rank(dp=2)
def test_a_score_may_be_evaluated_and_its_error_is_that_of_all(rank, tmp_path):
    run = Run()
    evaluator = ddl.create_supervised_evaluator(run.model, metrics={"loss": Loss(F.mse_loss)})
    score = ddl.Checkpoint(
        run.things(), tmp_path, score_function=lambda engine: evaluator.run(run.loader).metrics["loss"]
    )
    score(run.trainer)
    assert score.last_checkpoint.name == f"checkpoint_{evaluator.state.metrics['loss']:.4f}"

    def one_over_what_is_left(engine):
        return 1 / (1 - ddl.get_mesh().rank)

    with pytest.raises(ZeroDivisionError):  # on rank 0, too
        ddl.Checkpoint(run.things(), tmp_path, score_function=one_over_what_is_left)(run.trainer)


# -------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    uninterrupted(0, folder, 4, {})
    return folder / "checkpoint_4"


def other_net(change):
    model = {"words": lambda: net(words=11), "dtype": lambda: net().float(), "untied": lambda: net(tied=False),
             "names": lambda: nn.Sequential(net().embed)}[change]()  # fmt: skip
    return ddl.auto_model(model)


@pytest.mark.parametrize(("change", "message"), [
    ("words", "'embed.weight' has the shape (11, 8), but in .* it has (10, 8)"),
    ("dtype", "'embed.weight' has the dtype torch.float32, but in .* it has torch.float64"),
    ("names", "lacks 0.weight and has embed.weight, .* besides"),
])  # fmt: skip
def test_another_model_is_refused(change, message, saved):
    model = other_net(change)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        ddl.Checkpoint.load_objects({"model": model}, saved)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_ties_less_or_more(saved, tmp_path):
    untied = other_net("untied")
    ddl.Checkpoint.load_objects({"model": untied}, saved)
    assert torch.equal(untied.head.weight, untied.embed.weight)
    untied.head.weight.data += 1
    ddl.Checkpoint({"model": untied}, tmp_path).save("untied")
    with pytest.raises(ValueError, match="ties 'head.weight' to another weight"):
        ddl.Checkpoint.load_objects({"model": ddl.auto_model(net())}, tmp_path / "untied")


class Number:
    """An object with a state."""

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def with_numbers(rank, folder):
    model = ddl.auto_model(net())
    ddl.Checkpoint({"model": model, "number": Number(rank)}, folder).save("x")


def test_a_state_by_rank_is_refused_on_another_mesh_before_anything_changes(tmp_path):
    launch({"dp": 2}, with_numbers, tmp_path)
    model = ddl.auto_model(net())
    before = model.norm.bias.data.fill_(7.0).clone()
    with pytest.raises(ValueError, match="'number'. had another state on each rank"):
        ddl.Checkpoint.load_objects({"model": model, "number": Number(2)}, tmp_path / "x")
    assert torch.equal(model.norm.bias, before)


def with_numbers_that_are_none(rank, folder):
    """A best loss that there is not yet, in an object and among the options of an optimizer."""
    model = ddl.auto_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    optimizer = ddl.auto_optim(torch.optim.SGD([{"params": [*model.parameters()], "best": float("nan")}], lr=0.1))
    ddl.Checkpoint({"model": model, "optimizer": optimizer, "number": Number(float("nan"))}, folder).save("x")
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
    trainer.run(ddl.auto_dataloader(TensorDataset(torch.ones(4, 8), torch.ones(4, 2)), batch_size=4))


def test_numbers_that_are_none_are_the_same_on_all_ranks(tmp_path):
    launch({"pp": 2}, with_numbers_that_are_none, tmp_path)
    number = Number(0)
    ddl.Checkpoint.load_objects({"number": number}, tmp_path / "x")
    assert math.isnan(number.number)


def with_an_average(rank, folder):
    model = torch.optim.swa_utils.AveragedModel(ddl.auto_model(net()))
    ddl.Checkpoint({"average": model, "model": model.module}, folder).save("x")
    full = ddl.full_state_dict(model)
    ddl.load_full_state_dict(model, full)
    return full["module.norm.bias"], ddl.full_state_dict(model.module)["norm.bias"]


def test_the_copy_of_a_model_in_another_one_has_the_names_of_every_mesh(tmp_path):
    saved, of_the_inner_one = launch({"dp": 2}, with_an_average, tmp_path)[0]
    assert torch.equal(saved, of_the_inner_one)
    average = torch.optim.swa_utils.AveragedModel(ddl.auto_model(net()))
    average.module.norm.bias.data.fill_(7.0)
    ddl.Checkpoint.load_objects({"average": average}, tmp_path / "x")
    assert torch.equal(average.module.norm.bias, saved)
    with pytest.raises(ValueError, match=r"lacks weight and has .* besides; it has none of them"):
        ddl.Checkpoint.load_objects({"average": nn.Linear(2, 2, bias=False)}, tmp_path / "x", strict=False)


def with_a_metric(rank, folder):
    model = ddl.auto_model(net())
    metric = Average()
    metric.attach(ddl.MeshEngine(lambda engine, batch: batch), "average")
    metric.update(torch.tensor([1.0 + rank]))
    ddl.Checkpoint({"model": model, "metric": metric}, folder).save("x")


def load_a_metric(rank, folder):
    """Into a metric that no engine updates."""
    model, metric = ddl.auto_model(net(), PLAN), Average()
    before = model.norm.bias.data.fill_(7.0).clone()
    try:
        ddl.Checkpoint.load_objects({"model": model, "metric": metric}, folder / "x")
    except ValueError as error:
        return str(error), torch.equal(model.norm.bias, before)
    return float(metric.compute())


def test_a_metric_is_loaded_where_as_many_dp_ranks_are_and_refused_elsewhere(tmp_path):
    launch({"dp": 2}, with_a_metric, tmp_path)
    assert launch({"dp": 2, "tp": 2}, load_a_metric, tmp_path) == [1.5] * 4
    for message, unchanged in [load_a_metric(0, tmp_path), *launch({"tp": 2}, load_a_metric, tmp_path)]:
        assert "to_load['metric'] is a metric with the counts of 2 dp ranks" in message
        assert unchanged


def test_other_optimizers_are_refused(saved):
    run = Run()
    one_group = torch.optim.Adam([p for p in run.model.parameters() if p.requires_grad])
    with pytest.raises(ValueError, match="should have 2 parameter groups"):
        ddl.Checkpoint.load_objects({"model": run.model, "optimizer": one_group}, saved)
    swapped = optimizer_of(run.model, "adam")
    swapped.param_groups.reverse()
    with pytest.raises(ValueError, match="in parameter group 0, but in .* that group has"):
        ddl.Checkpoint.load_objects({"model": run.model, "optimizer": swapped}, saved)
    with pytest.raises(ValueError, match="of no model in to_load"):
        ddl.Checkpoint.load_objects({"optimizer": run.optimizer}, saved)
    del run.optimizer.param_groups[1]["params"][-1]
    with pytest.raises(ValueError, match="to_load..optimizer... but lacks none and has model.norm.bias besides"):
        ddl.Checkpoint.load_objects({"model": run.model, "optimizer": run.optimizer}, saved)


def test_an_optimizer_beside_a_model_with_a_new_layer(tmp_path):
    def things(*layers):
        model = nn.Sequential(*layers)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    ddl.Checkpoint(things(nn.Linear(2, 2)), tmp_path).save("x")
    new = things(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="has 'model.1.weight' in parameter group 0, .* leave it out of to_load"):
        ddl.Checkpoint.load_objects(new, tmp_path / "x", strict=False)
    with pytest.raises(ValueError, match="names of to_load.'model'., but lacks 1.bias, 1.weight and has none besides"):
        ddl.Checkpoint.load_objects(new, tmp_path / "x")
    del new["optimizer"]
    ddl.Checkpoint.load_objects(new, tmp_path / "x", strict=False)


class Derived(torch.optim.Adam):
    """What Adam has saved fits it."""


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path):
    model = nn.Linear(3, 2)
    kinds = {"SGD": lambda p: torch.optim.SGD(p, 0.1, 0.9), "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}

    def things(make):
        optimizer = make(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    for saved, make in kinds.items():
        ddl.Checkpoint(things(make), tmp_path).save(saved)
    for saved, given in (("SGD", "Adam"), ("Adam", "SGD"), ("AdamW", "Adam"), ("SGD", "AdamW")):
        refused = things(kinds[given])
        words = rf"'optimizer'\] is of the class {given}, but .* make it {saved}, or leave it"
        with pytest.raises(ValueError, match=words):
            ddl.Checkpoint.load_objects(refused, tmp_path / saved)
        ddl.Checkpoint.load_objects({"model": model}, tmp_path / saved)
    for make in (Derived, torch.optim.AdamW):  # torch takes Adam's for AdamW, which decays as before
        loaded = things(make)
        ddl.Checkpoint.load_objects(loaded, tmp_path / "Adam")
        assert loaded["optimizer"].param_groups[0]["decoupled_weight_decay"] == (make is torch.optim.AdamW)


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


class CountingByItself(Counting):
    def state_dict(self):
        return super().state_dict() | {"n": 1}


def test_what_an_optimizer_keeps_of_no_parameter(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = Counting(model.parameters())
    optimizer.step()
    ddl.Checkpoint({"model": model, "optimizer": optimizer}, tmp_path).save("x")
    loaded = Counting(model.parameters())
    ddl.Checkpoint.load_objects({"model": model, "optimizer": loaded}, tmp_path / "x")
    assert loaded.state == optimizer.state
    own = CountingByItself(model.parameters())
    with pytest.raises(ValueError, match=r"own state_dict\(\) has 'n' besides, which would be lost"):
        ddl.Checkpoint({"model": model, "optimizer": own}, tmp_path).save("y")


@on_each_rank(dp=2)
def test_what_an_optimizer_keeps_of_no_parameter_is_the_same_on_all_ranks(rank, tmp_path):
    model = ddl.auto_model(nn.Linear(3, 2))
    optimizer = ddl.auto_optim(Counting(model.parameters()))
    optimizer.state["steps"] = rank
    with pytest.raises(ValueError, match="should have the same on every rank in its state of no parameter"):
        ddl.Checkpoint({"model": model, "optimizer": optimizer}, tmp_path).save("x")


def test_the_newest_that_has_what_is_asked_for_is_loaded(tmp_path):
    run = Run()
    for name, things in (("last", run.things()), ("best", {"model": run.model})):
        ddl.Checkpoint(things, tmp_path, name).save(name)
    with pytest.warns(UserWarning, match="best has none .*'model': leave it .*; loaded .*last instead"):
        assert ddl.Checkpoint.load_newest(run.things(), tmp_path) == tmp_path / "last"
    assert ddl.Checkpoint.load_newest({"model": run.model}, tmp_path) == tmp_path / "best"
    with pytest.raises(ValueError, match="no checkpoint in .* has all of to_load: to_load..net.. is .*; to_load"):
        ddl.Checkpoint.load_newest({"net": run.model}, tmp_path)


@pytest.mark.parametrize("engine", [ddl.MeshEngine, Engine])
@pytest.mark.parametrize("event", [Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED(every=3)])
def test_a_run_goes_on_with_more_rows_or_fewer(event, engine, tmp_path):
    def run(rows, epochs, save=False, more=None):
        loader, read = ddl.auto_dataloader(torch.arange(rows), batch_size=8), []
        trainer = engine(lambda engine, batch: read.append((engine.state.epoch, len(batch))))
        things = {"trainer": trainer, "loader": loader}
        if save:
            trainer.add_event_handler(event, ddl.Checkpoint(things, tmp_path))
        else:
            ddl.Checkpoint.load_newest(things, tmp_path)
        trainer.run(loader, max_epochs=epochs)
        if more:
            trainer.run(loader, max_epochs=more)
        return read, trainer.state.iteration

    assert run(21, 2, save=True)[1] == 6
    for rows, sizes in ((40, [8] * 5), (9, [8, 1])):
        batches = len(sizes)
        with pytest.warns(UserWarning, match=f"has {batches} batches, but had 3 .* at iteration {2 * batches} "):
            read, iteration = run(rows, 3, more=4)
        assert read == [(epoch, size) for epoch in (3, 4) for size in sizes]
        assert iteration == 4 * batches
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert run(22, 3) == ([(3, 8), (3, 8), (3, 6)], 9)


def test_what_cannot_be_saved_is_refused(tmp_path):
    run = Run()
    run.trainer.state.dataloader = run.loader
    with pytest.raises(ValueError, match="to_save should have the loader of 'trainer', too"):
        ddl.Checkpoint({"model": run.model, "trainer": run.trainer}, tmp_path).save("x")

    class Odd:
        def state_dict(self):
            return {"history": [1, {2: object()}]}

    with pytest.raises(ValueError, match=r"odd.history\[1\].2 should be numbers.*but is a object"):
        ddl.Checkpoint({"odd": Odd()}, tmp_path).save("x")
    with pytest.raises(ValueError, match="of no model in to_save"):
        ddl.Checkpoint({"optimizer": run.optimizer}, tmp_path).save("x")
    for to_save in ({}, [run.model], {"model.a": run.model}, {1: run.model}, {"number": 1}):
        with pytest.raises(ValueError, match="to_save"):
            ddl.Checkpoint(to_save, tmp_path)
    with pytest.raises(ValueError, match="save_handler should be a folder"):
        ddl.Checkpoint({"model": run.model}, print)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_loaded_is_refused(saved, tmp_path):
    run = Run()
    with pytest.raises(ValueError, match="has none of that name; it has 'model', 'optimizer', 'trainer'"):
        ddl.Checkpoint.load_objects({"net": run.model}, saved)
    with pytest.raises(ValueError, match="to_load should have the loader, too, as 'loader'"):
        ddl.Checkpoint.load_objects({"trainer": run.trainer}, saved)
    with pytest.raises(ValueError, match="nowhere does not exist"):
        ddl.Checkpoint.load_objects(run.things(), tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no file SHA256SUMS"):
        ddl.Checkpoint.load_objects(run.things(), tmp_path)
    assert ddl.Checkpoint.load_newest(run.things(), tmp_path) is None
    assert ddl.Checkpoint.load_newest(run.things(), tmp_path / "nowhere") is None


@on_each_rank(dp=2)
def test_all_ranks_refuse_what_one_refuses(rank, tmp_path):
    """The optimizer of rank 1 alone holds a stranger: both ranks say so, and neither waits."""
    run = Run()
    if rank == 1:
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="of no model in to_save"):
        ddl.Checkpoint(run.things(), tmp_path).save("x")


@on_each_rank(dp=2)
def test_a_save_exchanges_two_small_messages_beside_those_of_dcp(rank, tmp_path):
    """What else ranks have to know of each other goes with DCP's own."""
    model = ddl.auto_model(nn.Linear(4, 4), shard=True)
    checkpoint = ddl.Checkpoint({"model": model}, tmp_path)
    with count_bytes() as ours:
        checkpoint.save("one")
    with count_bytes() as by_hand:
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "by hand")
    assert len(ours) == len(by_hand) + 2 > 2
    assert ours.of("all_gather").put_in < 10_000


# ------------------------------------------------------------------------- as if it had not been interrupted


class Journal:
    """A run over 10 batches an epoch, the last of one row, that writes down what it does and saves on the way."""

    def __init__(
        self, folder, accumulate=1, shard=None, dropout=0.0, plan=None, script=None, data=None, reshard=None, **options
    ):
        torch.manual_seed(3)
        if options.get("generator"):
            options = options | {"generator": torch.Generator().manual_seed(9)}
        plan = {"0": ddl.Column(), "3": ddl.Row()} if plan else None
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 2)).double()
        self.data = data or TensorDataset(torch.randn(28, 4).double(), torch.randn(28, 2).double())
        self.loader = ddl.auto_dataloader(self.data, **({"batch_size": 3, "shuffle": True} | options))
        self.model = ddl.auto_model(model, plan, shard=shard, reshard_after_forward=reshard)
        self.optimizer = ddl.auto_optim(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        self.trainer = ddl.create_supervised_trainer(
            self.model, self.optimizer, F.mse_loss, gradient_accumulation_steps=accumulate
        )
        self.evaluator = ddl.create_supervised_evaluator(self.model, {"loss": Loss(F.mse_loss)})
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.optimizer._opt_called = True  # torch warns where a scheduler steps first, as after a resume
        self.average = Average(lambda loss: loss)
        self.average.attach(self.trainer, "average", RunningBatchWise())
        self.folder, self.lines, self.marks, self.max = folder, [], {}, {"max_epochs": 2}
        on = self.trainer.on
        on(Events.STARTED)(lambda: self.optimizer.param_groups[0].update(lr=0.2))
        on(Events.EPOCH_STARTED)(lambda engine: torch.manual_seed(engine.state.epoch))
        on(Events.ITERATION_COMPLETED)(self.step)
        on(Events.EPOCH_COMPLETED)(self.epoch)
        self.things = {name: getattr(self, name) for name in ("model", "optimizer", "trainer", "loader", "scheduler")}
        self.things["average"] = self.average
        if script is not None:
            script(self)
        self.checkpoint = ddl.Checkpoint(self.things, folder)

    def step(self, engine):
        self.lines.append(("step", engine.state.iteration, engine.state.epoch, engine.state.output))

    def epoch(self, engine):
        self.scheduler.step()
        loss = self.evaluator.run(self.loader).metrics["loss"]  # of the trainer's loader, in an order of its own
        others = round(loss, 5), self.optimizer.param_groups[0]["lr"]
        self.lines.append(("epoch", engine.state.iteration, engine.state.epoch, engine.state.output, *others))

    def save(self, engine):
        name = f"{engine.last_event_name.name} {engine.state.iteration}"
        if name not in self.marks:  # in a resumed run EPOCH_STARTED comes twice
            self.marks[name] = len(self.lines)
            self.checkpoint.save(name)

    def go(self, load=None):
        if load:
            ddl.Checkpoint.load_objects(self.things, self.folder / load)
            self.checkpoint.save("again")
        self.trainer.run(self.trainer.state.dataloader or self.loader, **self.max)
        self.lines.append(("end", self.trainer.state.iteration, self.trainer.state.metrics["average"]))
        return self.lines


class Last:
    """A handler that comes after the others, as a Checkpoint."""

    runs_last = 2

    def __init__(self, function):
        self.function = function

    def __call__(self, engine):
        self.function(engine)


def assert_like(lines, expected, tolerance=0.0):
    assert [line[:2] for line in lines] == [line[:2] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        assert line[2:] == pytest.approx(other[2:], rel=0, abs=tolerance), (line, other)


def goes_on(rank, folder, points, options):
    """Saves at some points of an uninterrupted run, and goes on from each, and from what is saved before that."""
    whole = Journal(folder, **options)
    for event in points:
        whole.trainer.add_event_handler(event, Last(whole.save))
    lines = whole.go()
    for number, (name, mark) in enumerate(whole.marks.items()):
        for path in (name, "again") if number % 3 == 0 else (name,):
            tolerance = 1e-14 if ddl.get_mesh().pp_size > 1 else 0.0
            assert_like(Journal(folder, **options).go(path), lines[mark:], tolerance)
    return lines, whole.marks


def at(*iterations, event=Events.ITERATION_COMPLETED):
    return event(event_filter=lambda engine, _: engine.state.iteration in iterations)


POINTS = (at(6, 10, 20), Events.EPOCH_COMPLETED)


@pytest.mark.parametrize(("mesh", "options"), [
    ({}, {"accumulate": 4, "dropout": 0.3}), ({}, {"generator": True}), ({"dp": 2}, {"accumulate": 4, "shard": True}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ({}, {}), ({}, {"num_workers": 1, "persistent_workers": True}), ({"dp": 2}, {"accumulate": 4}),
        ({"tp": 2}, {"accumulate": 4, "plan": True}), ({"pp": 2}, {"accumulate": 4}),
        ({"dp": 2, "tp": 2}, {"accumulate": 4, "plan": True, "dropout": 0.3}),
        ({"dp": 2, "tp": 2}, {"accumulate": 4, "plan": True, "shard": True}),
        ({"dp": 2, "pp": 2}, {"accumulate": 4, "shard": True}), ({"dp": 2, "pp": 2}, {"accumulate": 4}),
        ({"dp": 2}, {"accumulate": 4, "shard": True, "reshard": False}),
        ({"dp_replicate": 2, "dp_shard": 2}, {"accumulate": 4, "reshard": False}),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"accumulate": 4, "plan": True}),
    ))
])  # fmt: skip
def test_a_run_goes_on(mesh, options, tmp_path):
    on_mesh(mesh, goes_on, tmp_path, POINTS, options)


def changed_by_hand(rank, folder):
    """The same changes between load and run as in an uninterrupted run after the sixth iteration."""

    def change(journal):
        journal.optimizer.param_groups[0].update(lr=0.05)
        journal.scheduler.gamma = 0.25
        journal.trainer.state.metrics["best"] = 7
        with torch.no_grad():
            journal.model.get_parameter(next(iter(dict(journal.model.named_parameters())))).zero_()

    whole = Journal(folder, dropout=0.3)
    whole.trainer.add_event_handler(at(6), Last(lambda engine: (whole.save(engine), change(whole))))
    lines = whole.go()
    again = Journal(folder, dropout=0.3)
    again.trainer.on(Events.STARTED)(lambda engine: engine.state.metrics.update(best=0))
    ddl.Checkpoint.load_objects(again.things, folder / "ITERATION_COMPLETED 6")
    change(again)
    torch.rand(3)  # another model, say
    assert_like(again.go(), lines[6:])
    assert again.trainer.state.metrics["best"] == 7


@pytest.mark.parametrize("mesh", [{}, pytest.param({"dp": 2}, marks=pytest.mark.slow)])
def test_what_is_changed_between_load_and_run_stays(mesh, tmp_path):
    on_mesh(mesh, changed_by_hand, tmp_path)


def on_mesh(mesh, function, *args):
    return launch(mesh, function, *args)[0] if mesh else function(0, *args)


def test_an_open_window_goes_on_where_it_was(tmp_path):
    """Each rank has gradients of its own; at the window's end there are none, and any mesh will do."""
    lines, marks = on_mesh({"dp": 2}, goes_on, tmp_path, [at(8, 9)], {"accumulate": 4})
    closed = Journal(tmp_path, accumulate=4)
    del closed.things["average"]  # Ignite's metrics are not for another number of ranks
    assert_like(closed.go("ITERATION_COMPLETED 8")[:-1], lines[marks["ITERATION_COMPLETED 8"] : -1], 1e-12)
    journal = Journal(tmp_path, accumulate=4)
    before = [p.tolist() for p in journal.model.parameters()]
    del journal.things["average"]
    with pytest.raises(ValueError, match=r"between two optimizer steps .*dp=2.* load it on that mesh, take a checkpoi"):
        journal.go("ITERATION_COMPLETED 9")
    assert [p.tolist() for p in journal.model.parameters()] == before
    del journal.things["trainer"]
    ddl.Checkpoint.load_objects(journal.things, tmp_path / "ITERATION_COMPLETED 9")


def in_a_window(folder, load=False, **options):
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
    model, loader = ddl.auto_model(nn.Linear(4, 2), **options), ddl.auto_dataloader(rows, batch_size=8)
    trainer = trainer_of(model, gradient_accumulation_steps=2)
    things = {"model": model, "trainer": trainer, "loader": loader}
    if load:
        ddl.Checkpoint.load_objects(things, folder / "checkpoint_1")
    else:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), ddl.Checkpoint(things, folder))
    trainer.run(loader, max_epochs=1)
    return ddl.full_state_dict(model)["weight"]


@on_each_rank(dp=2)
def test_an_open_window_is_refused_where_weights_are_cut_otherwise(rank, tmp_path):
    cut, whole = {"shard": True}, {}
    for saved, other in (cut, whole), (whole, cut):
        folder = tmp_path / str(saved)
        right = in_a_window(folder, **saved)
        with pytest.raises(ValueError, match="gradients of its part .* 'weight' of to_load.'model'. is cut, placed or"):
            in_a_window(folder, load=True, **other)
        torch.testing.assert_close(in_a_window(folder, load=True, **saved), right)


def look(loader, batches=1):
    for _ in zip(range(batches), loader, strict=False):
        pass


def peeks(journal):
    """Others read the trainer's loader: a batch, some, all; one rank alone; at any time."""
    on, loader = journal.trainer.on, journal.loader
    look(loader)
    on(Events.STARTED)(lambda: look(loader, 2))
    on(Events.EPOCH_STARTED)(lambda: journal.evaluator.run(loader))
    on(Events.GET_BATCH_COMPLETED(every=3))(lambda: look(loader))
    on(Events.ITERATION_STARTED(every=2))(lambda: look(loader, 2) if ddl.get_mesh().rank == 0 else None)
    on(Events.ITERATION_STARTED(once=7))(lambda: look(loader, 11))
    on(Events.ITERATION_COMPLETED(every=5))(lambda: journal.evaluator.run(loader))
    on(Events.ITERATION_COMPLETED)(lambda: journal.kept.append(iter(loader)) or next(journal.kept[-1]))
    journal.kept = []


@pytest.mark.parametrize(("mesh", "options"), [
    ({}, {}), ({"dp": 2}, {}),
    pytest.param({}, {"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow),
    pytest.param({"dp": 2, "tp": 2}, {"plan": True}, marks=pytest.mark.slow),
])  # fmt: skip
def test_whoever_reads_the_loader_changes_nothing(mesh, options, tmp_path):
    lines, _ = on_mesh(mesh, goes_on, tmp_path / "untouched", [], options)
    read, _ = on_mesh(mesh, goes_on, tmp_path, [at(6, 10)], options | {"script": peeks})
    assert_like(read, lines)


def ends_epochs(journal):
    journal.trainer.on(at(4))(journal.trainer.terminate_epoch)
    journal.trainer.on(at(8))(lambda: journal.trainer.terminate_epoch(skip_epoch_completed=True))
    journal.max = {"max_epochs": 4}


def changes_data(journal):
    other = journal.things["other"] = ddl.auto_dataloader(journal.data, batch_size=4, shuffle=True)
    journal.trainer.on(at(4))(lambda: journal.trainer.set_data(other))
    journal.trainer.on(at(9))(lambda: journal.trainer.set_data(other))  # once more, from its beginning


def goes_by(**arguments):
    def script(journal):
        journal.max = arguments

    return script


def sets_epochs(journal):
    journal.trainer.on(Events.EPOCH_STARTED)(lambda engine: journal.loader.set_epoch(7 * engine.state.epoch))
    journal.max = {"max_epochs": 3, "epoch_length": 8}


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i in torch.randperm(28):
            yield torch.full((4,), i / 28).double(), torch.rand(2).double()


SOME = (at(3, 4, 8, 10, 12), Events.EPOCH_STARTED, Events.EPOCH_COMPLETED, Events.COMPLETED)


@pytest.mark.parametrize("options", [
    {"script": ends_epochs}, {"script": goes_by(max_epochs=3, epoch_length=4)}, {"script": sets_epochs},
    {"script": goes_by(max_epochs=2, epoch_length=13)},
    pytest.param({"script": goes_by(max_iters=13)}, marks=pytest.mark.skipif(
        not hasattr(Engine(print).state, "max_iters"), reason="Ignite 0.5.5 and newer")),
    {"data": Numbers(), "shuffle": None},
], ids=["terminate_epoch", "short epochs", "set_epoch", "long epochs", "max_iters", "stream"])  # fmt: skip
def test_epochs_of_all_kinds_go_on(options, tmp_path):
    goes_on(0, tmp_path, SOME, options)


def test_another_loader_after_set_data(tmp_path):
    whole = Journal(tmp_path, script=changes_data)
    whole.trainer.add_event_handler(at(3, 7, 9, 12), Last(whole.save))
    lines = whole.go()
    for name, mark in whole.marks.items():
        again = Journal(tmp_path, script=changes_data)
        if not name.endswith(" 3"):
            with pytest.raises(ValueError, match="run should get the loader that .* was reading, 'other'"):
                again.go(name)
            again = Journal(tmp_path, script=changes_data)
            again.trainer.state.dataloader = again.things["other"]
        assert_like(again.go(name), lines[mark:])


@pytest.mark.parametrize("late", [False, True], ids=["in a handler", "after the run"])
def test_a_run_that_was_ended_in_mid_epoch_goes_on(late, tmp_path):
    lines, job = Journal(tmp_path).go(), Journal(tmp_path)
    job.trainer.on(at(13))(job.trainer.terminate)
    job.trainer.add_event_handler(Events.TERMINATE, Last(job.save))
    mark = len(job.go()) - 1
    if late:
        look(job.loader, 2)
        job.checkpoint.save("TERMINATE 13")
    assert_like(Journal(tmp_path).go("TERMINATE 13"), lines[mark:])


def test_an_evaluator_beside_the_trainer_evaluates_again(tmp_path):
    def script(journal):
        journal.things = {"evaluator": journal.evaluator} | journal.things

    lines, job = Journal(tmp_path).go(), Journal(tmp_path, script=script)
    job.max = {"max_epochs": 1}
    mark = len(job.go()) - 1
    job.checkpoint.save("one epoch")  # when none of them runs
    assert_like(Journal(tmp_path, script=script).go("one epoch"), lines[mark:])


def test_a_run_on_an_iterator_is_not_saved(tmp_path):
    journal = Journal(tmp_path)
    journal.trainer.add_event_handler(at(3), Last(journal.save))
    journal.trainer.state.dataloader = iter(journal.loader)
    with pytest.raises(ValueError, match="'trainer' should run on the loader itself"):
        journal.go()


def test_a_running_trainer_is_not_loaded(tmp_path):
    journal = Journal(tmp_path)
    journal.checkpoint.save("x")
    journal.trainer.on(at(3))(lambda: ddl.Checkpoint.load_objects(journal.things, tmp_path / "x"))
    with pytest.raises(ValueError, match=r"to_load\['trainer'\] is running: load it before the run"):
        journal.go()


def test_a_loop_goes_on_where_it_is(tmp_path):
    """Looks at batches beside it, before, while and after, change nothing; a loop that was left counts as none."""
    make = lambda: ddl.auto_dataloader(torch.arange(11), batch_size=3, shuffle=True)  # noqa: E731
    torch.manual_seed(0)
    epochs = [[batch.tolist() for batch in loader] for loader in [make()] for _ in range(2)]
    loader = make()
    look(loader, 3)
    for number, _ in enumerate(loader):
        look(loader, 2)
        kept = iter(loader)
        next(kept)
        if number == 2:
            state = loader.state_dict()
    del kept
    look(loader, 2)
    for at_save, rest in ((state, epochs[0][3:]), (loader.state_dict(), epochs[1])):
        again = make()
        again.load_state_dict(at_save)
        assert [batch.tolist() for batch in again] == rest


def test_a_run_that_is_complete_has_nothing_left_to_do(tmp_path):
    journal = Journal(tmp_path)
    journal.go()
    journal.checkpoint.save("end")
    weights = [p.tolist() for p in journal.model.parameters()]
    again = Journal(tmp_path)
    with pytest.warns(UserWarning, match="complete after 2 epochs and 20 iterations: nothing is left to do"):
        assert [line[:2] for line in again.go("end")] == [("end", 20)]
    assert [p.tolist() for p in again.model.parameters()] == weights
    again.trainer.run(again.loader, max_epochs=3)
    assert again.trainer.state.iteration == 30
    anew = Journal(tmp_path)
    ddl.Checkpoint.load_objects(anew.things, tmp_path / "end")
    anew.trainer.state.max_epochs = None  # as Ignite says
    anew.trainer.run(anew.loader, max_epochs=1)
    assert [line[1] for line in anew.lines] == [*range(1, 11), 10]


@pytest.mark.parametrize("event", [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.EXCEPTION_RAISED])
@pytest.mark.parametrize("engine", [ddl.MeshEngine, Engine])
def test_a_step_that_is_not_complete_is_not_saved(event, engine, tmp_path):
    def update(engine, batch):
        if event == Events.EXCEPTION_RAISED:
            raise RuntimeError("of the update function")

    loader, trainer = ddl.auto_dataloader(torch.arange(4)), engine(update)
    checkpoint = ddl.Checkpoint({"trainer": trainer, "loader": loader}, tmp_path)
    trainer.add_event_handler(event, checkpoint)
    with pytest.raises(ValueError, match="the step of iteration . has begun and is not complete: save in a handler of"):
        trainer.run(loader)


def test_the_next_run_after_an_exception_runs():
    steps = []

    def update(engine, batch):
        steps.append(batch)
        if len(steps) == 1:
            raise KeyboardInterrupt

    trainer, loader = ddl.MeshEngine(update), ddl.auto_dataloader(torch.arange(3))
    with pytest.raises(KeyboardInterrupt):
        trainer.run(loader, max_epochs=2)
    trainer.run(loader, max_epochs=2)
    assert len(steps) == 1 + 2 * 3  # from the beginning: nothing was done


def test_ignites_own_engine_sets_again_what_its_first_handlers_reset(tmp_path):
    number, loader, found = Number(1), ddl.auto_dataloader(torch.arange(3)), []
    trainer = Engine(lambda *_: found.append(number.number))
    trainer.on(Events.STARTED)(lambda: setattr(number, "number", 5))
    things = {"trainer": trainer, "loader": loader, "number": number}
    ddl.Checkpoint(things, tmp_path).save("x")
    number.number = 3
    ddl.Checkpoint.load_objects(things, tmp_path / "x")
    assert number.number == 1
    number.number += 1
    trainer.run(loader)
    assert found == [2, 2, 2]


def test_ignites_own_engine_goes_on(tmp_path):
    def run(load=None):
        loader, rows = ddl.auto_dataloader(torch.arange(11), batch_size=3, shuffle=True), []
        trainer = Engine(lambda engine, batch: rows.append(batch.tolist()))
        things = {"trainer": trainer, "loader": loader}
        checkpoint = ddl.Checkpoint(things, tmp_path)
        trainer.on(Events.ITERATION_COMPLETED)(lambda: rows.append(Engine(lambda *_: None).run(loader).iteration))
        trainer.on(Events.EPOCH_COMPLETED)(lambda: rows.append("epoch"))
        if load:
            ddl.Checkpoint.load_objects(things, tmp_path / load)
        else:
            trainer.on(at(2, 4, 6))(lambda engine: checkpoint.save(str(engine.state.iteration)))
        trainer.run(loader, max_epochs=2)
        return rows, checkpoint

    torch.manual_seed(0)
    rows, checkpoint = run()
    assert run("2")[0] == rows[4:]
    assert run("4")[0] == rows[8:]
    assert run("6")[0] == rows[13:]
    trainer = checkpoint.to_save["trainer"]
    trainer.on(at(10))(trainer.terminate)
    trainer.run(checkpoint.to_save["loader"], max_epochs=3)
    with pytest.raises(ValueError, match="left in mid-epoch has lost its position"):
        checkpoint.save("late")


def test_two_trainers_on_a_loader_each_go_on(tmp_path):
    """In turn, as in alternating training; the second is asked for its place while the first one runs."""

    def run(load=None):
        loader, rows = ddl.auto_dataloader(torch.arange(11), batch_size=3, shuffle=True), []
        first, second = (ddl.MeshEngine(lambda engine, batch: rows.append(batch.tolist())) for _ in range(2))
        things = {"first": first, "second": second, "loader": loader}
        second.on(Events.ITERATION_COMPLETED(once=2))(lambda: second.interrupt())
        if load:
            ddl.Checkpoint.load_objects(things, tmp_path / "4")
        else:
            second.run(loader, max_epochs=2)
            first.on(at(2))(lambda: ddl.Checkpoint(things, tmp_path).save("4"))
        first.run(loader, max_epochs=1)
        second.run(loader, max_epochs=2)
        return rows

    torch.manual_seed(0)
    rows = run()
    assert run("4") == rows[4:]


# ------------------------------------------------------------------------------- the loader's position


class Words(torch.utils.data.IterableDataset):
    def __init__(self, seeded=True):
        self.seeded = seeded

    def __iter__(self):
        for i in range(11):
            yield torch.tensor([i]) if self.seeded else torch.tensor([random.random()])


class Shuffled:
    """Orders of 11 rows from a state of its own: a generator, or a count of epochs."""

    def __init__(self, generator=None):
        self.generator, self.epochs = generator, 0

    def __iter__(self):
        self.epochs += 1
        if isinstance(self.generator, random.Random):
            yield from self.generator.sample(range(11), 11)
        elif isinstance(self.generator, numpy.random.Generator):
            yield from self.generator.permutation(11).tolist()
        else:
            yield from torch.randperm(11, generator=torch.Generator().manual_seed(self.epochs)).tolist()

    def __len__(self):
        return 11


class ShuffledWords(torch.utils.data.IterableDataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(9)

    def __iter__(self):
        yield from torch.randperm(11, generator=self.generator)


def by_sampler(make):
    return lambda: ddl.auto_dataloader(torch.arange(11), batch_size=3, sampler=make())


@pytest.mark.parametrize("make", [
    lambda: ddl.auto_dataloader(torch.arange(11), batch_size=3, shuffle=True),
    by_sampler(lambda: RandomSampler(range(11), generator=torch.Generator().manual_seed(9))),
    by_sampler(lambda: WeightedRandomSampler(torch.ones(11), 11, generator=torch.Generator().manual_seed(9))),
    by_sampler(lambda: Shuffled(random.Random(9))), by_sampler(lambda: Shuffled(numpy.random.default_rng(9))),
    by_sampler(Shuffled), lambda: ddl.auto_dataloader(ShuffledWords(), batch_size=3),
    lambda: ddl.auto_dataloader(
        torch.arange(11), batch_sampler=BatchSampler(RandomSampler(range(11), generator=torch.Generator()), 3, False)
    ),
    lambda: ddl.auto_dataloader(torch.arange(11), batch_size=3, shuffle=True, num_workers=2),
    lambda: ddl.auto_dataloader(
        torch.arange(11), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(9)
    ),
    lambda: ddl.auto_dataloader(Words(), batch_size=3),
], ids=[
    "plain", "sampler's generator", "weighted", "Python", "NumPy", "count", "own stream", "batches", "workers",
    "generator", "stream",
])  # fmt: skip
@pytest.mark.parametrize("batches", [1, 3, 4, 6])
def test_a_loader_goes_on(make, batches):
    loader = make()
    through = [batch.tolist() for _ in range(3) for batch in loader]
    loader = make()
    for number in range(batches):
        if number % 4 == 0:
            begun = iter(loader)  # in a variable: a pass that nobody holds has been left, and does not count
        next(begun)
    torch.manual_seed(8)
    again = make()
    again.load_state_dict(decoded(encoded(loader.state_dict(), "loader")))
    assert again.state_dict()["rows"] == loader.state_dict()["rows"]
    before = torch.get_rng_state()
    rest = [batch.tolist() for batch in again] or [batch.tolist() for batch in again]
    assert rest == through[batches : batches + len(rest)]
    assert len(rest) == 4 - batches % 4
    if batches % 4 and again.num_workers == 0:
        assert torch.equal(torch.get_rng_state(), before), "the run's random numbers are its own"


def test_a_loader_of_other_rows_is_refused():
    loader = ddl.auto_dataloader(torch.arange(11), batch_size=3, shuffle=True)
    begun = iter(loader)
    next(begun)
    state = loader.state_dict()
    for other in (
        ddl.auto_dataloader(torch.arange(11), batch_size=4, shuffle=True),
        ddl.auto_dataloader(torch.arange(12), batch_size=3, shuffle=True),
        ddl.auto_dataloader(torch.arange(11), batch_size=3),
    ):
        other.load_state_dict(state)
        with pytest.raises(ValueError, match="should continue with the rows of the interrupted run"):
            next(iter(other))
    stream = ddl.auto_dataloader(Words(seeded=False), batch_size=3)
    begun = iter(stream)
    next(begun)
    other = ddl.auto_dataloader(Words(seeded=False), batch_size=3)
    other.load_state_dict(stream.state_dict())
    with pytest.raises(ValueError, match="should give the samples of the interrupted run again"):
        next(iter(other))


def test_workers_draw_by_batch():
    """As many workers as one likes: a batch's noise is the same."""
    torch.manual_seed(3)
    drawn = []
    for workers in (1, 2):
        torch.manual_seed(3)
        loader = ddl.auto_dataloader(Rows(noise=True), batch_size=4, shuffle=True, num_workers=workers)
        drawn.append(torch.cat([y for _, y in loader]))
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], torch.cat([y for _, y in loader])), "another epoch, other noise"


@pytest.mark.parametrize("value", [
    None, True, 3, -0.1, float("inf"), "a", [1, [2]], (1, (2,)), {"a": 1}, {1: 2, (3, 4): [5]}, {"tuple": [1]}, {},
    torch.tensor(2.5), torch.tensor([[1, 2]], dtype=torch.int16), torch.tensor([1.5], dtype=torch.bfloat16),
    torch.empty(0, 3), torch.tensor(True), torch.tensor([1 + 2j]).conj(), torch.tensor([2j]).conj().imag,
    Counter("aab"), OrderedDict(a=1), defaultdict(list, {"a": [1]}),
], ids=str)  # fmt: skip
def test_json_keeps_values_and_kinds(value):
    found = decoded(json.loads(json.dumps(encoded(value, "x"))))
    assert type(found) is type(value)
    assert getattr(found, "default_factory", None) is getattr(value, "default_factory", None)
    if isinstance(value, torch.Tensor):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found, value)
    else:
        assert found == value


# ------------------------------------------------------------------------------------ files for others


def exported(rank, folder, size, options):
    run = Run(**options)
    names = [path.name for path in ddl.export_weights(run.model, folder, size)]
    on_one = ddl.full_state_dict(run.model, on_rank=1)
    assert bool(on_one) == (rank == 1)
    other = Run(seed=1, **options)
    ddl.import_weights(other.model, folder)
    mine, theirs = ddl.full_state_dict(run.model), ddl.full_state_dict(other.model)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert rank != 1 or all(torch.equal(mine[name], on_one[name]) for name in mine)
    return names


@pytest.mark.parametrize(("mesh", "size"), [("dp2 shard", None), ("pp2 tp2", 2000)])
def test_safetensors_of_any_mesh(mesh, size, tmp_path):
    names = on(mesh, exported, tmp_path, size, {})
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir() if "index" not in path.name)
    expected = Run().model.state_dict()
    read = {}
    for name in names:
        read |= load_file(tmp_path / name)
    assert all(torch.equal(read[name], value) for name, value in expected.items())
    plain = Run(seed=1).model
    ddl.import_weights(plain, tmp_path)
    assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())
    if size is not None:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert len(names) > 1
        assert set(index["weight_map"].values()) == set(names)
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in read.values())
        (tmp_path / names[0]).unlink()
        with pytest.raises(ValueError, match=f"lacks {names[0]}"):
            ddl.import_weights(plain, tmp_path)
    ddl.export_weights(plain, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"], "an older export is replaced"


class Copying(nn.Linear):
    """Saves a copy of its weight by a hook, and what depends on the weight is computed anew when it is loaded."""

    def __init__(self, name="weight"):
        super().__init__(2, 2)
        self.name, self.norm = name, -1.0
        self.register_state_dict_post_hook(Copying.copy)
        self.register_load_state_dict_post_hook(Copying.load)

    def copy(self, state, prefix, _):
        state[prefix + self.name] = self.weight.detach().clone()

    def load(self, _):
        self.norm = float(self.weight.norm())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x * self.scale


def scaled(local_rank, folder, steps):
    """Goes on from a checkpoint, if there is one; returns the losses."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 1))
    tp = ddl.get_mesh().tp_size > 1
    model = ddl.auto_model(net, {"0": ddl.Column(), "1": ddl.SharedWeight(), "2": ddl.Row()} if tp else None)
    optimizer = ddl.auto_optim(torch.optim.NAdam(model.parameters(), lr=0.1))
    things, losses = {"model": model, "optimizer": optimizer}, []
    ddl.Checkpoint.load_newest(things, folder)
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    x = torch.linspace(-1, 1, 16).view(4, 4)
    trainer.run([(x, x[:, :1])] * steps)
    ddl.Checkpoint(things, folder).save("it")
    return losses


def test_a_parameter_that_is_one_number_and_its_state_under_tp(tmp_path):
    expected = scaled(0, tmp_path / "in one go", 4)
    with ddl.Parallel(backend="gloo", nproc_per_node=2, tp=2) as parallel:
        for before in (lambda folder: parallel.run(scaled, folder, 2), lambda folder: scaled(0, folder, 2)):
            folder = tmp_path / str(before)
            before(folder)
            assert parallel.run(scaled, folder, 2)[1] == pytest.approx(expected[2:], rel=1e-5)
    assert scaled(0, folder, 1)[0] < expected[-1]


@on_each_rank(pp=2)
def test_modules_that_save_copies_and_hooks_of_loading(local_rank, tmp_path):
    """The copies are on one stage, where an optimizer has the parameter itself."""
    saved, loaded = (ddl.auto_model(nn.Sequential(nn.Linear(2, 2), Copying())) for _ in range(2))
    things, called = [], []
    for model in (saved, loaded):
        optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        things.append({"model": model, "optimizer": optimizer})
    optimizer.register_load_state_dict_post_hook(lambda _: called.append(True))
    ddl.Checkpoint(things[0], tmp_path).save("it")
    ddl.Checkpoint.load_newest(things[1], tmp_path)
    assert [*map(torch.equal, saved.parameters(), loaded.parameters())] == [True, True]
    assert called == [True]
    full = ddl.full_state_dict(saved)
    assert local_rank == 0 or loaded.get_submodule("1").norm == float(full["1.weight"].norm())
    with pytest.raises(ValueError, match="saves '1.weight' by its own code.* of the plain model, before ddl.auto_mod"):
        ddl.load_full_state_dict(loaded, full)
    plain = nn.Sequential(nn.Linear(2, 2), Copying())
    plain.load_state_dict(full)
    assert torch.equal(ddl.full_state_dict(ddl.auto_model(plain))["1.weight"], full["1.weight"])
    hooked = ddl.auto_model(nn.Sequential(nn.Linear(2, 2), Copying()))
    for layer in hooked.modules():
        layer._state_dict_hooks.clear()
    ddl.load_full_state_dict(hooked, full)
    assert local_rank == 0 or hooked.get_submodule("1").norm == float(full["1.weight"].norm())
    odd = ddl.auto_model(nn.Sequential(nn.Linear(2, 2), Copying("other")))
    with pytest.raises(ValueError, match="'1.other', which is no parameter .* register_buffer it, or save it by get_"):
        ddl.Checkpoint({"model": odd}, tmp_path).save("odd")


def test_one_name_of_a_tied_weight_is_enough(tmp_path):
    """As Hugging Face's files have it."""
    model = Run().model
    save_file({k: v for k, v in model.state_dict().items() if k != "head.weight"}, tmp_path / "model.safetensors")
    other = Run(seed=1).model
    ddl.import_weights(other, tmp_path / "model.safetensors")
    assert torch.equal(other.head.weight, model.head.weight)
    with pytest.raises(ValueError, match=r"lacks \['head.weight'\]"):
        ddl.import_weights(ddl.auto_model(net(tied=False)), tmp_path)
    with pytest.raises(ValueError, match="has neither"):
        ddl.import_weights(other, tmp_path / "nothing")
    with pytest.raises(ValueError, match="model should have parameters or buffers"):
        ddl.export_weights(nn.ReLU(), tmp_path)
    with pytest.raises(ValueError, match="'weight' of the type torch.complex128, which safetensors does not know"):
        ddl.export_weights(nn.Linear(2, 2, dtype=torch.complex128), tmp_path)
    for size in (0, 1.5):
        with pytest.raises(ValueError, match="max_shard_size should be"):
            ddl.export_weights(other, tmp_path, size)


def without_rows_of_a_fused_weight(rank, folder):
    """Two rows a tp rank, for three dp ranks."""
    models = [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)) for _ in range(2)]
    wanted = [p.detach().clone() for p in models[0].parameters()]
    saved, other = (ddl.auto_model(m, {"0": ddl.Column(parts=2), "2": ddl.Row()}, shard=True) for m in models)
    assert rank < 4 or not saved.get_parameter("0.weight").to_local().numel()
    ddl.Checkpoint({"model": saved}, folder).save("saved")
    ddl.Checkpoint.load_objects({"model": other}, folder / "saved")
    read = list(ddl.full_state_dict(other).values())
    ddl.load_full_state_dict(other, {name: tensor + 1 for name, tensor in ddl.full_state_dict(other).items()})
    again = list(ddl.full_state_dict(other).values())
    return all(torch.equal(a, b) and torch.equal(a + 1, c) for a, b, c in zip(wanted, read, again, strict=True))


def test_a_rank_without_rows_of_a_fused_weight(tmp_path):
    assert launch({"dp": 3, "tp": 2}, without_rows_of_a_fused_weight, tmp_path) == [True] * 6


def test_ignites_scheduler_of_plateaus_is_resumed(tmp_path):
    """Its state has a method of its own, which is left out."""

    def training(local_rank, epochs, resume):
        torch.manual_seed(0)
        loader = ddl.auto_dataloader(TensorDataset(torch.randn(16, 4), torch.randn(16, 3)), batch_size=8)
        model = ddl.auto_model(nn.Linear(4, 3))
        optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
        trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
        plateau = ReduceLROnPlateauScheduler(optimizer, "rising", trainer, factor=0.5, patience=1)
        parts = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader, "plateau": plateau}
        if resume:
            ddl.Checkpoint.load_newest(parts, tmp_path)
        validation = Engine(lambda engine, batch: engine.state.metrics.update(rising=1.0))
        validation.add_event_handler(Events.COMPLETED, plateau)
        rates = []

        @trainer.on(Events.EPOCH_COMPLETED)
        def validate():
            validation.run([0])
            rates.append(optimizer.param_groups[0]["lr"])

        trainer.add_event_handler(Events.EPOCH_COMPLETED, ddl.Checkpoint(parts, tmp_path))
        trainer.run(loader, max_epochs=epochs)
        return rates

    assert launch({"dp": 2}, training, 3, False) == [[0.1, 0.1, 0.05]] * 2
    assert launch({"dp": 2}, training, 6, True) == [[0.05, 0.025, 0.025]] * 2
    assert training(0, 8, True) == [0.0125, 0.0125]


def groups_of_layers(local_rank, folder, keeps_empty):
    """A group for the first layer and one for the others, as a script writes it that leaves out empty ones."""
    torch.manual_seed(0)
    model = ddl.auto_model(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    named = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
    first, others = ([p for name, p in named if name.startswith("0.") is is_first] for is_first in (True, False))
    groups = [{"params": ps, "lr": lr} for ps, lr in ((first, 0.5), (others, 0.01)) if ps or keeps_empty]
    optimizer = ddl.auto_optim(torch.optim.SGD(groups, lr=0.1))
    ddl.Checkpoint({"model": model, "optimizer": optimizer}, folder).save("all")
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    ddl.Checkpoint.load_newest({"model": model, "optimizer": optimizer}, folder)
    return {group["lr"] for group in optimizer.param_groups if group["params"]}


def test_groups_of_stages_keep_their_options_or_are_refused(tmp_path):
    assert launch({"pp": 2}, groups_of_layers, tmp_path / "kept", True) == [{0.5}, {0.01}]
    with pytest.raises(ddl.RankError, match="options of group 0 differ between stages: .* an empty one where"):
        launch({"pp": 2}, groups_of_layers, tmp_path / "left out", False)
    assert not list((tmp_path / "left out").glob("*/state.json"))
