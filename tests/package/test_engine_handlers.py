"""Ignite's handlers, unmodified, on a mesh: they decide the same on every rank, and what they do on one process."""

import copy
import functools
import time
import warnings
from pathlib import Path

import ignite.distributed as idist
import pytest
import torch
from beside_ignite import BATCH, PLAN, Setting, classifier, data, loss_fn
from ignite.engine import Events
from ignite.handlers import (
    Checkpoint,
    CosineAnnealingScheduler,
    EarlyStopping,
    EMAHandler,
    PiecewiseLinear,
    ProgressBar,
    ReduceLROnPlateauScheduler,
    TerminateOnNan,
    TimeLimit,
    create_lr_scheduler_with_warmup,
)
from ignite.handlers.tensorboard_logger import GradsScalarHandler, TensorboardLogger
from ignite.metrics import Loss
from ranks import in_float64, launch, on, on_each_rank, run, trainer_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl import engine as engine_module
from ignite_ddl.epoch_plan import part

MESHES = [
    pytest.param(mesh, id=" × ".join(f"{axis}{size}" for axis, size in mesh.items()), marks=marks)
    for mesh, marks in (({"dp": 4}, ()), ({"dp": 2, "tp": 2}, ()), ({"dp": 2, "pp": 2}, ()),
                        ({"dp": 2, "pp": 2, "tp": 2}, pytest.mark.slow))
]  # fmt: skip


@in_float64  # in which Ignite's Loss adds up
def all_of_them(local_rank, plain=False):
    return {function.__name__: function(Setting(plain)) for function in (decisions, training, outputs)}


LAUNCHED = {}


def launched(function, mesh):
    """What the function gave on each rank, from one launch of a mesh for all of them, and on one process."""
    key = tuple(mesh.items())
    if key not in LAUNCHED:
        LAUNCHED[key] = launch(mesh, all_of_them)
    if "plain" not in LAUNCHED:
        LAUNCHED["plain"] = all_of_them(0, plain=True)
    return [seen[function.__name__] for seen in LAUNCHED[key]], LAUNCHED["plain"][function.__name__]


# ------------------------------------------------------------------------------------------------ decisions


def decisions(setting):
    """EarlyStopping and ReduceLROnPlateau on a run that gets worse, TerminateOnNan on one with a NaN."""
    seen = {}
    model, optimizer = setting.model(lr=2.0)
    trainer, evaluator = setting.trainer(model, optimizer), setting.evaluator(model)
    stopping = EarlyStopping(patience=3, score_function=lambda e: -e.state.metrics["loss"], trainer=trainer)
    plateau = ReduceLROnPlateauScheduler(
        optimizer, metric_name="loss", trainer=trainer, factor=0.5, patience=0, cooldown=1
    )
    evaluator.add_event_handler(Events.COMPLETED, stopping)
    evaluator.add_event_handler(Events.COMPLETED, plateau)
    series, valid = [], setting.loader(data(seed=1))

    @trainer.on(Events.ITERATION_COMPLETED)
    def evaluate():
        evaluator.run(valid)
        series.append((trainer.state.output, evaluator.state.metrics["loss"], optimizer.param_groups[0]["lr"]))

    trainer.run(setting.loader(data(seed=0)), max_epochs=10)
    seen["stopped at"], seen["series"] = trainer.state.iteration, series
    seen["stopping"] = stopping.state_dict()["counter"]

    model, optimizer = setting.model(lr=0.1)
    trainer = setting.trainer(model, optimizer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    trainer.run(setting.loader(data(seed=0, nan_at=13)), max_epochs=2)  # the second batch's last row
    seen["NaN at"] = trainer.state.iteration
    seen["NaN"] = trainer.state.output != trainer.state.output
    return seen


@pytest.mark.parametrize("mesh", MESHES)
def test_decisions_are_those_of_one_process(mesh):
    results, decided = launched(decisions, mesh)
    assert 4 <= decided["stopped at"] < 30
    rates = {lr for _, _, lr in decided["series"]}
    assert len(rates) >= 3, rates
    assert decided["NaN at"] == 2
    for seen in results:
        for name in ("stopped at", "stopping", "NaN at", "NaN"):
            assert seen[name] == decided[name], name
        errors = torch.tensor(seen["series"], dtype=torch.double) - torch.tensor(decided["series"], dtype=torch.double)
        assert errors[:, :2].abs().max() <= 1e-12
        assert errors[:, 2].abs().max() == 0
        assert seen["series"] == results[0]["series"]  # to the last bit


# ------------------------------------------------------------------------------------------------- training


def training(setting):
    """Schedulers, accumulation and clipping: every number on the way and the weights at the end."""
    seen, train = {}, data(seed=0)

    model, optimizer = setting.model(lr=0.1, momentum=0.5)
    trainer = setting.trainer(model, optimizer)
    points = PiecewiseLinear(optimizer, "lr", milestones_values=[(2, 0.3), (5, 0.1)])
    trainer.add_event_handler(
        Events.ITERATION_STARTED, create_lr_scheduler_with_warmup(points, warmup_start_value=0.01, warmup_duration=2)
    )
    trainer.add_event_handler(
        Events.ITERATION_STARTED, CosineAnnealingScheduler(optimizer, "momentum", 0.9, 0.1, cycle_size=4)
    )
    series = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        group = optimizer.param_groups[0]
        series.append((trainer.state.output, group["lr"], group["momentum"]))

    trainer.run(setting.loader(train), max_epochs=2)
    seen["schedulers"] = series, setting.weights(model)

    for name, options in {
        "accumulation of 2": {"steps": 2},  # a step is 7 + 7, 1 + 7, or 7 + 1 rows
        "accumulation of 4": {"steps": 4},  # the last two iterations are of no step
        "clipping": {"max_norm": 0.2},
        "clipping of 3": {"max_norm": 0.2, "steps": 3},
        "no clipping": {"max_norm": 1e9},
    }.items():
        model, optimizer = setting.model(lr=1.0)
        trainer = setting.trainer(model, optimizer, **options)
        series = []

        @trainer.on(Events.ITERATION_COMPLETED)
        def note_norm(engine, series=series):
            series.append((engine.state.output, getattr(engine.state, "grad_norm", 0.0)))

        trainer.run(setting.loader(train), max_epochs=2)
        seen[name] = series, setting.weights(model)
    return seen


@pytest.mark.parametrize("mesh", MESHES)
def test_training_is_that_of_one_process(mesh):
    results, trained = launched(training, mesh)
    assert len({lr for _, lr, _ in trained["schedulers"][0]}) >= 4
    norms = [norm for _, norm in trained["clipping"][0]]
    assert min(norms) > 0.2  # all six steps clip
    for rank, seen in enumerate(results):
        for name, (series, weights) in trained.items():
            assert largest(seen[name][0], series) <= 1e-12, (name, rank)
            assert seen[name][0] == results[0][name][0], (name, rank)
            assert list(seen[name][1]) == list(weights)
            errors = {key: float((seen[name][1][key] - weights[key]).abs().max()) for key in weights}
            assert max(errors.values()) <= 1e-12, (name, rank, errors)


def largest(series, reference):
    assert len(series) == len(reference)
    mine, theirs = (torch.tensor(values, dtype=torch.double) for values in (series, reference))
    return float((mine - theirs).abs().max())


# ------------------------------------------------------------------------------------- outputs and evaluation


def outputs(setting):
    seen = {}
    model, optimizer = setting.model(lr=0.5)
    modes, kept = [], []

    def of_training(x, y, y_pred, loss):
        modes.append(model.training)
        return {"x": x, "y": y, "y_pred": y_pred.detach(), "loss": float(loss)}

    trainer = setting.trainer(model, optimizer, output_transform=of_training)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: kept.append(engine.state.output))
    trainer.run(setting.loader(data(seed=0)), max_epochs=1)
    seen["training"] = kept

    # Evaluation: neither weights nor gradients that are there change, no gradient arises.
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    evaluated = []

    def of_evaluation(x, y, y_pred):
        modes.append(model.training)
        return {"y_pred": y_pred["logits"], "y": y}

    evaluator = setting.evaluator(
        model,
        metrics={},
        output_transform=of_evaluation,
        model_transform=lambda output: {"logits": output},  # a rank without rows gets a dict too
    )
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda e: evaluated.append(e.state.output))
    evaluator.run(setting.loader(data(seed=1)))
    seen["evaluation"] = list(evaluated)
    assert any(gradient is not None for gradient in gradients)
    for p, before in zip(model.parameters(), gradients, strict=True):
        assert (p.grad is None) == (before is None)
        assert before is None or torch.equal(_local(p.grad), _local(before))
    optimizer.zero_grad(set_to_none=True)
    evaluator.run(setting.loader(data(seed=1)))
    assert all(p.grad is None for p in model.parameters())
    for p, before in zip(model.parameters(), weights, strict=True):
        assert torch.equal(_local(p), _local(before))
    assert not any(output["y_pred"].requires_grad for output in evaluated)
    assert not modes or (modes[0] is True and modes[-1] is False)
    seen["modes"] = modes

    # An optimizer that is made after an evaluation still moves the weights.
    late = torch.optim.SGD(model.parameters(), lr=0.5)
    setting.trainer(model, late).run(setting.loader(data(seed=0)), max_epochs=1)
    seen["late weights"] = setting.weights(model)
    return seen


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("mesh", MESHES)
def test_outputs_and_evaluation(mesh):
    results, put_out = launched(outputs, mesh)
    assert any(seen["modes"] for seen in results)  # where the last stage is
    per_stage = len(results) // mesh.get("pp", 1)
    for rank, seen in enumerate(results):
        dp_rank = rank % per_stage // mesh.get("tp", 1)
        for kind in ("training", "evaluation"):
            assert [len(whole["y"]) for whole in put_out[kind]] == [7, 7, 1]
            for mine, whole in zip(seen[kind], put_out[kind], strict=True):
                rows = slice(*part(len(whole["y"]), dp_rank, mesh.get("dp", 1)))
                assert set(mine) == set(whole)
                for name, value in whole.items():
                    if name == "loss":
                        assert abs(mine[name] - value) <= 1e-12
                        continue
                    assert mine[name].shape == value[rows].shape, (rank, kind, name)
                    assert torch.allclose(mine[name], value[rows], rtol=0, atol=1e-12), (rank, kind, name)
        for name, weight in put_out["late weights"].items():
            assert torch.allclose(seen["late weights"][name], weight, rtol=0, atol=1e-12), (rank, name)


# ----------------------------------------------------------------------------------------------------- the bar


@on_each_rank(dp=2)
def test_a_handler_that_is_given_the_bar_runs_on_every_rank(local_rank):
    setting = Setting(plain=False)
    model, optimizer = setting.model(lr=0.1)
    trainer, evaluator = setting.trainer(model, optimizer), setting.evaluator(model)
    bar = ProgressBar()

    def validate(engine, bar):
        evaluator.run(setting.loader(data(seed=1)))  # has collectives: every rank must come

    trainer.add_event_handler(Events.EPOCH_COMPLETED, validate, bar)
    trainer.run(setting.loader(data(seed=0)), max_epochs=1)
    assert evaluator.state.iteration == 3


def with_bars(local_rank, everywhere):
    setting = Setting(plain=False)
    model, optimizer = setting.model(lr=0.1)
    trainer = setting.trainer(model, optimizer)
    evaluator = setting.evaluator(model)
    if everywhere or idist.get_rank() == 0:
        ProgressBar(persist=True, desc="training", ascii=True).attach(trainer, output_transform=lambda o: {"loss": o})
        ProgressBar(persist=True, desc="validation", ascii=True).attach(evaluator, metric_names="all")
    trainer.run(setting.loader(data(seed=0)), max_epochs=1)
    evaluator.run(setting.loader(data(seed=1)))


@pytest.mark.parametrize("everywhere", [True, False], ids=["attached on all ranks", "attached on rank 0"])
def test_one_bar(everywhere, capfd):
    launch({"dp": 2, "pp": 2}, with_bars, everywhere)
    lines = "".join(capfd.readouterr()).replace("\r", "\n").splitlines()
    for name in ("training", "validation"):
        bars = [line for line in lines if name in line]
        assert any("[3/3] 100%" in bar for bar in bars), lines
        assert all(bar.startswith(f"[rank 0] {name}") for bar in bars), lines
    assert any("loss=" in line for line in lines)


# --- what users put around a model: moving averages, recomputation, compilation, loggers of weights


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def surrounded(local_rank, how, options):
    """The weights of three steps, or their moving average."""
    layers = list(classifier())
    plan = {"0": ddl.Column(), "2": ddl.Row()} if "tensor_plan" in options else None
    if how == "recomputation":
        layers = [Recomputed(*layers[:2]), Recomputed(*layers[2:4]), layers[4]]
        plan = plan and {"0.0": ddl.Column(), "1.0": ddl.Row()}
    if how == "compiled layers":
        layers = [torch.compile(layer, backend="eager") for layer in layers]
        plan = plan and {"0._orig_mod": ddl.Column(), "2._orig_mod": ddl.Row()}
    options = options | ({"tensor_plan": plan} if plan else {})
    model = nn.Sequential(*layers)
    average = ddl.auto_model(copy.deepcopy(model), **options) if how == "average by hand" else None
    model = ddl.auto_model(model, **options)
    if how == "compiled":
        model = torch.compile(model, backend="eager")
    trainer = trainer_of(model, loss_fn, lr=0.5)
    if how == "EMAHandler":
        handler = EMAHandler(model, momentum=0.25)
        handler.attach(trainer, event=Events.ITERATION_COMPLETED)
        average = handler.ema_model
    elif how == "average by hand":

        @trainer.on(Events.ITERATION_COMPLETED)
        def update():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.data.lerp_(p.data, 0.25)

    trainer.run(ddl.auto_dataloader(data(1), batch_size=BATCH), max_epochs=1)
    return torch.cat([w.flatten() for w in ddl.full_state_dict(model if average is None else average).values()])


AROUND = {
    "dp2": ({"dp": 2}, {}),
    "dp2 shard": ({"dp": 2}, {"shard": True}),
    "tp2": ({"tp": 2}, {"tensor_plan": PLAN}),
    "pp2": ({"pp": 2}, {}),
    "dp2 × pp2 × tp2 shard": ({"dp": 2, "pp": 2, "tp": 2}, {"tensor_plan": PLAN, "shard": True}),
}
HOW = ("EMAHandler", "average by hand", "recomputation", "compiled", "compiled layers")
COPIED = "cannot be copied. For a moving average, copy the model before ddl.auto_model"
COMPILED = "a pipeline cannot be compiled: compile its layers before ddl.auto_model"


@functools.cache
def right():
    return surrounded_each_way(0, {})


def surrounded_each_way(local_rank, options):
    """The weights, or why not."""
    found = {}
    for how in HOW:
        torch._dynamo.reset()
        try:
            found[how] = surrounded(local_rank, how, options)
        except ValueError as error:
            found[how] = str(error)
    return found


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[pytest.mark.slow] * (mesh not in ("dp2", "pp2"))) for mesh in AROUND]
)
def test_what_stands_around_a_model(mesh):
    axes, options = AROUND[mesh]
    cannot = {"EMAHandler": COPIED} if "shard" in options else {}
    cannot |= {"compiled": COMPILED} if "pp" in axes else {}
    for found in launch(axes, surrounded_each_way, options):
        for how in HOW:
            if how in cannot:
                assert cannot[how] in found[how]
            else:
                assert (found[how] - right()[how]).abs().max() < 1e-12, how


def logging_weights(local_rank, options):
    model = ddl.auto_model(classifier(), **options)
    trainer, logged = trainer_of(model, loss_fn, lr=0.5), {}

    class Logger(TensorboardLogger):
        def __init__(self):
            self.writer = self

        def add_scalar(self, tag, value, step):
            logged[tag] = float(value)

    Logger().attach(trainer, GradsScalarHandler(model), Events.ITERATION_COMPLETED)
    trainer.run(ddl.auto_dataloader(data(1), batch_size=BATCH), max_epochs=1)
    return logged


def test_ignites_loggers_of_weights_log_whole_weights_or_say_why_not():
    right = logging_weights(0, {})
    first, second = launch({"pp": 2}, logging_weights, {})
    assert first | second == pytest.approx(right)
    for axes, options in ({"dp": 2}, {"shard": True}), ({"tp": 2}, {"tensor_plan": PLAN}):
        with pytest.raises(ddl.RankError, match="GradsScalarHandler would log this rank's part of '0.weight'"):
            launch(axes, logging_weights, options)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_the_clock_of_one_rank_ends_the_run_of_all(axes):
    def limited(local_rank):
        limit = TimeLimit(60)
        limit.start_time = time.time() - 61 * (local_rank == 1)
        trainer = trainer_of(ddl.auto_model(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), limit)
        rows = torch.utils.data.TensorDataset(torch.randn(12, 8), torch.randn(12, 3))
        trainer.run(ddl.auto_dataloader(rows, batch_size=4), max_epochs=3)
        return trainer.state.iteration

    assert launch(axes, limited) == [2, 2]


def test_a_limit_can_be_removed():
    engine = ddl.MeshEngine(lambda engine, batch: None)
    for event in Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED(every=2):
        limit = TimeLimit(60)
        handle = engine.add_event_handler(event, limit)
        assert engine.has_event_handler(limit)
        engine.remove_event_handler(limit, event)
        assert not engine.has_event_handler(limit)
        handle.remove()


def test_limits_of_one_rank_ask_no_other():
    def limited(local_rank):
        trainer = trainer_of(ddl.auto_model(nn.Linear(8, 3)))
        for limit in (TimeLimit(600), TerminateOnNan()) if local_rank == 0 else ():
            trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), limit)
        trainer.run(ddl.auto_dataloader(TensorDataset(torch.randn(12, 8), torch.randn(12, 3)), batch_size=4))
        return trainer.state.iteration

    assert run(limited, 2, timeout=20) == [3, 3]

    def limited_otherwise(local_rank):
        """In an update function of one's own, in an evaluator, and from an epoch on."""
        model, batches = ddl.auto_model(nn.Linear(8, 3)), TensorDataset(torch.randn(12, 8), torch.randn(12, 3))
        loader = ddl.auto_dataloader(batches, batch_size=4)
        engine = ddl.MeshEngine(
            lambda engine, batch: ddl.forward_backward(engine, model, *batch, nn.functional.mse_loss)[1].item()
        )
        evaluator = ddl.create_supervised_evaluator(model)

        def limit(of):
            if local_rank == 0:
                of.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())

        limit(engine)
        limit(evaluator)
        engine.add_event_handler(Events.EPOCH_COMPLETED(once=1), limit)
        return engine.run(loader, max_epochs=2).iteration, evaluator.run(loader).iteration

    assert run(limited_otherwise, 2, timeout=20) == [(6, 3)] * 2


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_nan_in_the_outputs_of_one_rank_ends_the_run_of_all(axes):
    def ending(local_rank):
        rows = torch.ones(12, 8)
        rows[7] = torch.nan  # of the second batch, on the last dp rank
        model = ddl.auto_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
        evaluator = ddl.create_supervised_evaluator(model)
        evaluator.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        evaluator.run(ddl.auto_dataloader(torch.utils.data.TensorDataset(rows, rows), batch_size=4))
        return evaluator.state.iteration

    assert set(launch(axes, ending)) == {ending(0)} == {2}


def test_a_run_that_one_rank_alone_ends_is_refused_and_one_that_all_end_saves(tmp_path):
    def ending(local_rank, by):
        engine_module.WAIT_SECONDS = 1
        model = ddl.auto_model(nn.Linear(8, 3))
        trainer = trainer_of(model)
        if local_rank in by:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.terminate())
        trainer.add_event_handler(Events.TERMINATE, ddl.Checkpoint({"model": model}, tmp_path))
        trainer.run(ddl.auto_dataloader(TensorDataset(torch.randn(12, 8), torch.randn(12, 3)), batch_size=4))
        return trainer.state.iteration

    for mesh in {"dp": 2}, {"pp": 1, "tp": 2}:
        with pytest.raises(ddl.RankError, match=r"terminate\(\) of a trainer should be called on every rank, but some"):
            launch(mesh, ending, [1])
    assert launch({"dp": 2}, ending, [0, 1]) == [2, 2]
    assert len(list(tmp_path.glob("model_*"))) == 1


@on_each_rank(dp=2)
def test_a_vector_of_losses_stays_on_a_rank_without_rows(local_rank):
    """Its length is not the number of rows."""
    trainer, seen = (
        trainer_of(ddl.auto_model(nn.Linear(8, 3)), output_transform=lambda x, y, y_pred, loss: loss + torch.ones(2)),
        [],
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(len(engine.state.output)))
    rows = torch.utils.data.TensorDataset(torch.randn(5, 8), torch.randn(5, 3))
    trainer.run(ddl.auto_dataloader(rows, batch_size=4))
    assert seen == [2, 2]


def test_ignites_checkpoint_may_save_full_weights(tmp_path):
    class Full:
        def __init__(self, model):
            self.model = model

        def state_dict(self):
            return ddl.full_state_dict(self.model)

        def load_state_dict(self, state):
            pass

    def saved(local_rank, folder):
        torch.manual_seed(0)
        plain = nn.Linear(8, 3)
        model = ddl.auto_model(copy.deepcopy(plain), shard=True)
        trainer = trainer_of(model)
        trainer.add_event_handler(Events.COMPLETED, Checkpoint({"full": Full(model)}, folder))
        rows = torch.utils.data.TensorDataset(torch.randn(4, 8), torch.randn(4, 3))
        trainer.run(ddl.auto_dataloader(rows, batch_size=4))
        idist.barrier()
        (file,) = Path(folder).glob("*.pt")
        with pytest.raises(ValueError, match="give the model's to ddl.load_full_state_dict"):
            Checkpoint.load_objects({"model": model}, {"model": plain.state_dict()})
        state = torch.load(file)
        return all(torch.equal(state[name], weight) for name, weight in ddl.full_state_dict(model).items())

    assert launch({"dp": 2}, saved, str(tmp_path)) == [True, True]


@on_each_rank(dp=2)
def test_only_what_does_not_count_rows_once_is_warned_of(local_rank):
    """An iterator over the loader, whose rows the step counts; and a sampler that pads."""
    rows = torch.utils.data.TensorDataset(torch.randn(5, 8), torch.randn(5, 8))
    trainer = trainer_of(ddl.auto_model(nn.Linear(8, 8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.run((batch for batch in ddl.auto_dataloader(rows, batch_size=5)), max_epochs=1, epoch_length=1)
    with pytest.warns(UserWarning, match="a DistributedSampler makes 6 rows of 5, so that some count twice"):
        trainer.run(torch.utils.data.DataLoader(rows, sampler=torch.utils.data.DistributedSampler(rows)), max_epochs=1)


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


@in_float64
def average_evaluated(local_rank, make, updates):
    """The loss of a moving average on the mesh, and of what is exported of it, by one process."""
    torch.manual_seed(1)
    rows = TensorDataset(torch.randn(22, 6), torch.randint(4, (22,)))
    loader = ddl.auto_dataloader(rows, batch_size=6)
    model = ddl.auto_model(make())
    average = torch.optim.swa_utils.AveragedModel(
        getattr(model, "module", model), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    trainer = trainer_of(model, loss_fn, lr=0.5)

    @trainer.on(Events.ITERATION_COMPLETED)
    def update():
        if updates or idist.get_rank() == 0:
            average.update_parameters(model)
        for mean, buffer in zip(average.module.buffers(), model.buffers(), strict=True):
            mean.copy_(buffer)  # as EMAHandler does

    trainer.run(loader, max_epochs=2)
    evaluator = ddl.create_supervised_evaluator(average, {"loss": Loss(loss_fn)})
    on_mesh = [evaluator.run(loader).metrics["loss"] for _ in range(3)]
    alone = make()
    alone.load_state_dict(ddl.full_state_dict(average.module))
    return on_mesh, loss_fn(alone.eval()(rows.tensors[0]), rows.tensors[1]).item()


def test_an_average_is_evaluated_with_the_statistics_of_dp_rank_0():
    """Each rank's own, which DDP does not see, would make the evaluation one of several models."""
    for on_mesh, alone in launch({"dp": 2}, average_evaluated, normed, True):
        assert max(abs(loss - alone) for loss in on_mesh) < 1e-12


def test_a_model_that_differs_between_ranks_is_not_evaluated():
    with pytest.raises(ValueError, match="on all dp ranks, but differs.*a moving average that one rank alone updates"):
        on(average_evaluated, functools.partial(nn.Linear, 6, 4), False, dp=2)
