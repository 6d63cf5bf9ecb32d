"""Ignite's metrics, unmodified, on a mesh: every rank has the numbers of one process."""

from unittest import mock

import ignite.distributed as idist
import ignite.distributed.utils as idist_utils
import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.exceptions import NotComputableError
from ignite.metrics import (
    ROC_AUC,
    Accuracy,
    ConfusionMatrix,
    EpochMetric,
    Frequency,
    Loss,
    Metric,
    MetricGroup,
    MetricsLambda,
    Precision,
    Recall,
    RocCurve,
    RunningAverage,
)
from ranks import launch
from torch import nn
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.engine import MeshEngine
from ignite_ddl.metrics import data_parallel_view, over_data_parallel

MESHES = {
    "dp4": {"dp": 4},
    "dp2 × tp2": {"dp": 2, "tp": 2},
    "dp2 × pp2": {"dp": 2, "pp": 2},
    "dp2 × pp2 × tp2": {"dp": 2, "pp": 2, "tp": 2},
}
ROWS, CLASSES = 15, 4  # in global batches of 7, 7, and 1: unlike numbers of rows on the dp ranks, then none
SECONDS = 0.5  # what Frequency's clock shows


@pytest.fixture(autouse=True)
def double():
    """Ignite's Loss adds up in the default dtype: in single precision no two splits of the rows agree."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Clock:
    """In place of the timer in Frequency."""

    def value(self):
        return SECONDS


def spread(y_pred, y):
    """A function for EpochMetric in which every row and its target matter."""
    weights = torch.arange(1, y_pred.shape[1] + 1, dtype=y_pred.dtype)
    return float(((y_pred @ weights) * (y + 1)).square().mean() / 3)


class LargestLogit(Metric):
    """A metric of a user: reduces by hand, with idist, as Ignite's guide shows."""

    def reset(self):
        self.largest, self.rows = torch.tensor(-torch.inf), 0

    def update(self, output):
        self.largest = torch.maximum(self.largest, output[0].max())
        self.rows += len(output[0])

    def compute(self):
        largest = idist.all_reduce(self.largest.clone(), op="MAX")
        return {"largest": float(largest), "rows": idist.all_reduce(self.rows)}


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (ROWS,), generator=generator))


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, CLASSES))


PLAN = {"0": ddl.Column(), "2": ddl.Row()}


def is_class_2(output):
    return output[0].softmax(1)[:, 2], (output[1] == 2).long()


def all_metrics(loss_fn):
    precision, recall = Precision(average=False), Recall(average=False)
    accuracy = Accuracy()
    return {
        "accuracy": accuracy,
        "loss": Loss(loss_fn),
        "precision": precision,
        "recall": recall,
        "macro precision": Precision(average="macro"),
        "weighted recall": Recall(average="weighted"),
        "confusion": ConfusionMatrix(num_classes=CLASSES),
        "normalised confusion": ConfusionMatrix(num_classes=CLASSES, average="recall"),
        "roc auc": ROC_AUC(output_transform=is_class_2),
        "roc curve": RocCurve(output_transform=is_class_2),
        "epoch metric": EpochMetric(spread, check_compute_fn=False),
        "f1": 2 * precision * recall / (precision + recall + 1e-20),
        "error": 1 - accuracy,
        "lambda": MetricsLambda(lambda p, a: float(p.mean()) + a, precision, accuracy),
        "users": LargestLogit(),
        "group": MetricGroup({"in group": Accuracy(), "loss in group": Loss(loss_fn)}),
    }


def train_and_evaluate(local_rank, plain=False):
    """The series of every number that an engine shows, with Ignite alone or with ddl."""
    torch.set_default_dtype(torch.float64)
    mock.patch("ignite.metrics.frequency.Timer", Clock).start()
    loss_fn = nn.functional.cross_entropy
    if plain:
        loader, model = torch.utils.data.DataLoader(data(), batch_size=7), classifier()
        make_trainer, make_evaluator = create_supervised_trainer, create_supervised_evaluator
    else:
        loader = ddl.auto_dataloader(data(), batch_size=7)
        model = ddl.auto_model(classifier(), tensor_plan=PLAN)
        make_trainer, make_evaluator = ddl.create_supervised_trainer, ddl.create_supervised_evaluator
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    trainer = make_trainer(
        model,
        optimizer,
        loss_fn,
        output_transform=lambda x, y, y_pred, loss: (y_pred, y, loss.item()),
    )
    evaluator = make_evaluator(model, metrics=all_metrics(loss_fn))
    rows = {"output_transform": lambda output: output[:2]}
    trained = {
        "running loss": RunningAverage(output_transform=lambda output: output[2]),
        "running accuracy": RunningAverage(Accuracy(**rows), alpha=0.7),
        "running precision": RunningAverage(Precision(average="macro", **rows), alpha=0.7),
        "train accuracy": Accuracy(**rows),
        "train loss": Loss(loss_fn, **rows),
        "train precision": Precision(average=False, **rows),
    }
    for name, metric in trained.items():
        metric.attach(trainer, name)
    Loss(loss_fn, **rows).attach(trainer, "batch loss", usage="batch_wise")
    Frequency(output_transform=lambda output: len(output[1])).attach(trainer, "rows per second")
    by_iteration, by_epoch = [], []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        names = ["running loss", "running accuracy", "running precision", "batch loss", "rows per second"]
        by_iteration.append([trainer.state.output[2]] + [trainer.state.metrics[name] for name in names])

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        evaluator.run(loader)
        by_epoch.append({**trainer.state.metrics, **evaluator.state.metrics})

    trainer.run(loader, max_epochs=2)
    mock.patch.stopall()
    return by_iteration, by_epoch


def leaves(value):
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [torch.as_tensor(value, dtype=torch.double)]


def largest_difference(value, reference):
    pairs = list(zip(leaves(value), leaves(reference), strict=True))
    worst = 0.0
    for a, b in pairs:
        assert a.shape == b.shape
        same = a == b  # infinities, as in the thresholds of a ROC curve
        worst = max(worst, float((a - b)[~same].abs().max()) if not bool(same.all()) else 0.0)
        assert not bool((a - b)[~same].isnan().any()), (value, reference)
    return worst


@pytest.fixture(scope="module")
def reference():
    torch.set_default_dtype(torch.float64)
    return train_and_evaluate(0, plain=True)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, id=name, marks=[pytest.mark.slow] * (len(mesh) == 3))
        for name, mesh in MESHES.items()
    ],
)
def test_every_metric_is_that_of_one_process(mesh, reference):
    results = launch(mesh, train_and_evaluate)
    by_iteration, by_epoch = reference
    assert len(by_iteration) == 6
    assert by_iteration[2][-1] == ROWS / SECONDS
    assert 0 < by_epoch[1]["accuracy"] < 1
    assert by_epoch[0]["loss"] != by_epoch[1]["loss"]
    for rank, (iterations, epochs) in enumerate(results):
        for mine, theirs in zip(epochs, by_epoch, strict=True):
            assert set(mine) == set(theirs)
            differences = {name: largest_difference(mine[name], theirs[name]) for name in theirs}
            assert max(differences.values()) <= 1e-12, (rank, differences)
        assert largest_difference(iterations, by_iteration) <= 1e-12, rank
        # Handlers decide on these: not nearly the same on all ranks, but the same.
        assert largest_difference((iterations, epochs), results[0]) == 0, rank


def test_without_a_launch():
    """ddl's engines in one process are Ignite's."""
    assert largest_difference(train_and_evaluate(0), train_and_evaluate(0, plain=True)) == 0


# --------------------------------------------------------------------------------------------- metrics by hand


def by_hand(local_rank):
    """Metrics that no engine updates. Rows: dp rank 0 has five, dp rank 1 two."""
    torch.set_default_dtype(torch.float64)
    mesh, seen = ddl.get_mesh(), {}
    rows = torch.linspace(-1, 1, 21).reshape(7, 3), torch.tensor([2, 2, 0, 1, 2, 2, 1])
    mine = tuple(t[:5] if mesh.dp_rank == 0 else t[5:] for t in rows)

    accuracy = over_data_parallel(Accuracy(), mesh)
    accuracy.reset()
    accuracy.update(mine)
    seen["accuracy"] = accuracy.compute()
    seen["again"] = accuracy.compute()  # computing changes nothing
    seen["same object"] = over_data_parallel(accuracy) is accuracy
    seen["class"] = type(accuracy) is Accuracy

    state = accuracy.state_dict()
    seen["states"] = len(next(iter(state.values())))
    restored = over_data_parallel(Accuracy())
    restored.load_state_dict(state)
    seen["restored"] = restored.compute()
    if mesh.dp_rank == 1:
        restored.update(mine)
    seen["and updated"] = restored.compute()
    restored.reset()
    with pytest.raises(NotComputableError):
        restored.compute()

    error = over_data_parallel(1 - Accuracy())
    error.reset()
    error.update(mine)
    seen["error"] = error.compute()

    # Only dp rank 1 has rows: of the wrong metric the classes and the shapes are unknown on dp rank 0.
    for name, metric in {
        "precision": Precision(average=False),
        "weighted": Recall(average="weighted"),
        "epoch metric": EpochMetric(spread),
        "loss": Loss(nn.functional.cross_entropy),
        "roc curve": RocCurve(output_transform=is_class_2),
        "running": RunningAverage(Precision(average=False)),
    }.items():
        over_data_parallel(metric)
        metric.reset()
        engine = Engine(lambda engine, batch: batch)
        engine.state.output = tuple(t[:0] for t in mine) if mesh.dp_rank == 0 else mine
        if isinstance(metric, RunningAverage):
            metric.src.iteration_completed(engine)
        metric.iteration_completed(engine)
        seen[f"{name} of some"] = metric.compute()

    # An error of those that compute is everybody's error.
    failing = over_data_parallel(
        EpochMetric(lambda y_pred, y: y_pred.no_such_method(), check_compute_fn=False)
    )
    failing.update(tuple(t[:0] for t in mine) if mesh.dp_rank == 0 else mine)
    with pytest.raises(AttributeError, match="no_such_method"):
        failing.compute()
    seen["world after an error"] = idist.get_world_size()
    return seen


def test_metrics_by_hand():
    x, y = torch.linspace(-1, 1, 21).reshape(7, 3), torch.tensor([2, 2, 0, 1, 2, 2, 1])

    def value(metric, rows):
        metric.reset()
        metric.update(metric._output_transform(rows))
        return metric.compute()

    last = x[5:], y[5:]
    for seen in launch({"dp": 2, "tp": 2}, by_hand):
        assert seen["accuracy"] == seen["again"] == seen["restored"] == 4 / 7  # argmax is always class 2
        assert seen["and updated"] == 5 / 9  # on dp rank 1 only, by one right row of two
        assert seen["error"] == 1 - 4 / 7
        assert seen["same object"]
        assert seen["class"]
        assert seen["states"] == 2  # one per dp rank, not one per rank of the world
        assert seen["world after an error"] == 4
        for name, metric in {
            "precision": Precision(average=False),
            "running": Precision(average=False),
            "weighted": Recall(average="weighted"),
            "epoch metric": EpochMetric(spread),
            "loss": Loss(nn.functional.cross_entropy),
            "roc curve": RocCurve(output_transform=is_class_2),
        }.items():
            assert largest_difference(seen[f"{name} of some"], value(metric, last)) <= 1e-15, name


# ------------------------------------------------------------------------------------------------ the view


def collectives_in_the_view(local_rank):
    mesh, seen = ddl.get_mesh(), {}
    outside = idist_utils._model
    rank, dp = idist.get_rank(), mesh.dp_rank
    with data_parallel_view():
        seen["sizes"] = idist.get_world_size(), idist.get_rank() == dp
        seen["sum"] = idist.all_reduce(10**rank)
        seen["rows"] = idist.all_gather(torch.arange(dp, 3 * dp + 1))  # 1 row, and 3
        seen["scalars"] = idist.all_gather(dp)
        seen["strings"] = idist.all_gather("ab" * (dp + 1))
        seen["objects"] = idist.all_gather({"dp": dp})
        seen["world"] = idist.all_reduce(1, group=[0, 1, 2, 3])
        seen["number"] = idist.broadcast(0.1 * (rank + 1), src=1)
        seen["tensor"] = idist.broadcast(torch.tensor([rank]), src=1)
        seen["missing"] = idist.broadcast(None if dp == 0 else torch.tensor([rank]), src=1, safe_mode=True)
        seen["text"] = idist.broadcast(f"from {rank}", src=1)
        idist.barrier()
        with data_parallel_view():  # a metric inside a metric
            seen["nested"] = idist.get_world_size()
        seen["after nested"] = idist.get_world_size()
        with pytest.raises(RuntimeError, match="cannot be finalized inside a metric's method"):
            idist.finalize()
    seen["outside"] = idist.get_world_size(), idist.get_rank() == rank, idist_utils._model is outside
    with pytest.raises(ZeroDivisionError), data_parallel_view():
        1 / 0  # noqa: B018
    metric = over_data_parallel(Accuracy())
    with pytest.raises(ValueError, match="y must have shape"):
        metric.update((torch.zeros(2, 3), torch.zeros(2, 3, 4)))
    with pytest.raises(NotComputableError):
        metric.compute()
    seen["restored"] = idist_utils._model is outside
    return seen


def test_the_view():
    for rank, seen in enumerate(launch({"dp": 2, "tp": 2}, collectives_in_the_view)):
        peers = (0, 2) if rank in (0, 2) else (1, 3)
        assert seen["sizes"] == (2, True)
        assert seen["sum"] == sum(10**peer for peer in peers)
        assert seen["rows"].tolist() == [0, 1, 2, 3]
        assert list(seen["scalars"]) == [0, 1]
        assert seen["strings"] == ["ab", "abab"]
        assert seen["objects"] == [{"dp": 0}, {"dp": 1}]
        assert seen["world"] == 4
        assert seen["number"] == 0.1 * (peers[1] + 1)  # to the last bit: not in single precision
        assert seen["tensor"].tolist() == seen["missing"].tolist() == [peers[1]]
        assert seen["text"] == f"from {peers[1]}"
        assert seen["nested"] == seen["after nested"] == 2
        assert seen["outside"] == (4, True, True)
        assert seen["restored"]


def users_engine(local_rank):
    """A MeshEngine around an update function of the user; a metric is attached, detached and attached again."""
    engine = MeshEngine(lambda engine, batch: (torch.eye(3)[batch], batch))
    metric = LargestLogit()
    metric.attach(engine, "first")
    rows = [engine.run([torch.tensor([0, 1])]).metrics["first"]["rows"]]
    metric.detach(engine)
    metric.attach(engine, "once more")
    rows.append(engine.run([torch.tensor([0])]).metrics["once more"]["rows"])
    return rows, idist.get_world_size()


def test_engine_of_the_user():
    assert launch({"dp": 2, "tp": 2}, users_engine) == [([4, 2], 4)] * 4  # over the world: 8 and 4
