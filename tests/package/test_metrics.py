"""Ignite's metrics, unmodified, on a mesh: every rank has the numbers of one process."""

import contextlib
import copy
import functools
import math
import warnings
from unittest import mock

import ignite.distributed as idist
import ignite.distributed.utils as idist_utils
import pytest
import torch
import torch.distributed as dist
from beside_ignite import CLASSES, ROWS, Setting, data, loss_fn
from ignite.engine import Engine, Events
from ignite.exceptions import NotComputableError
from ignite.metrics import (
    HSIC,
    ROC_AUC,
    Accuracy,
    Average,
    Bleu,
    ConfusionMatrix,
    EpochMetric,
    Frequency,
    Loss,
    MaximumMeanDiscrepancy,
    MeanSquaredError,
    Metric,
    MetricGroup,
    MetricsLambda,
    Precision,
    Recall,
    RocCurve,
    Rouge,
    RunningAverage,
    VariableAccumulation,
)
from ignite.metrics.metric import reinit__is_reduced, sync_all_reduce
from ranks import in_float64, launch, on_each_rank, refused
from torch import nn
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.engine import MeshEngine
from ignite_ddl.idist_view import data_parallel_view
from ignite_ddl.metrics import over_data_parallel

MESHES = {
    "dp4": {"dp": 4},
    "dp2 × tp2": {"dp": 2, "tp": 2},
    "dp2 × pp2": {"dp": 2, "pp": 2},
    "dp2 × pp2 × tp2": {"dp": 2, "pp": 2, "tp": 2},
}
SECONDS = 0.5  # what Frequency's clock shows


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


def is_class_2(output):
    return output[0].softmax(1)[:, 2], (output[1] == 2).long()


def all_metrics():
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


@in_float64  # Ignite's Loss adds up in the default dtype: in single precision no two splits of the rows agree
def train_and_evaluate(local_rank, plain=False):
    """The series of every number that an engine shows, with Ignite alone or with ddl."""
    mock.patch("ignite.metrics.frequency.Timer", Clock).start()
    setting = Setting(plain)
    loader, (model, optimizer) = setting.loader(data(seed=3)), setting.model(lr=0.5)
    trainer = setting.trainer(model, optimizer, output_transform=lambda x, y, y_pred, loss: (y_pred, y, loss.item()))
    evaluator = setting.evaluator(model, metrics=all_metrics())
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
    return train_and_evaluate(0, plain=True)


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, id=name, marks=[pytest.mark.slow] * (len(mesh) == 3)) for name, mesh in MESHES.items()]
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


@in_float64
def rows_compared(local_rank, dealt):
    """Metrics that compare the rows of a batch with each other; the last batch has 5 rows."""
    rows = torch.linspace(-1, 1, 63).reshape(21, 3), torch.linspace(0, 1, 63).reshape(21, 3).square()
    data = torch.utils.data.TensorDataset(*rows)
    metrics = {"discrepancy": MaximumMeanDiscrepancy(), "independence": HSIC(), "error": MeanSquaredError()}
    evaluator = ddl.create_supervised_evaluator(torch.nn.Identity(), metrics)
    loader = ddl.auto_dataloader if dealt else torch.utils.data.DataLoader
    return evaluator.run(loader(data, batch_size=8)).metrics


@pytest.mark.parametrize("dealt", [True, False])
def test_metrics_that_compare_the_rows_of_a_batch(dealt):
    expected = rows_compared(0, dealt)
    assert 0 < expected["independence"] != expected["discrepancy"] > 0
    for mesh in ({"dp": 2}, {"dp": 2, "tp": 2})[: 1 + dealt]:
        for found in launch(mesh, rows_compared, dealt):
            assert found == pytest.approx(expected, abs=1e-12)


def test_without_a_launch():
    """ddl's engines in one process are Ignite's."""
    assert largest_difference(train_and_evaluate(0), train_and_evaluate(0, plain=True)) == 0


# --------------------------------------------------------------------------------------------- metrics by hand


def uneven_metrics():
    return {
        "precision": Precision(average=False),
        "weighted": Recall(average="weighted"),
        "epoch metric": EpochMetric(spread),
        "loss": Loss(loss_fn),
        "roc curve": RocCurve(output_transform=is_class_2),
        "running": RunningAverage(Precision(average=False)),
    }


@in_float64
def by_hand(local_rank):
    """Metrics that no engine updates. Rows: dp rank 0 has five, dp rank 1 two."""
    mesh, seen = ddl.get_mesh(), {}
    rows = torch.linspace(-1, 1, 21).reshape(7, 3), torch.tensor([2, 2, 0, 1, 2, 2, 1])
    mine = tuple(t[:5] if mesh.dp_rank == 0 else t[5:] for t in rows)

    accuracy = over_data_parallel(Accuracy())
    accuracy.reset()
    accuracy.update(mine)
    assert accuracy.compute() == accuracy.compute() == 4 / 7  # computing changes nothing; argmax is class 2
    assert over_data_parallel(accuracy) is accuracy
    assert type(accuracy) is Accuracy

    state = accuracy.state_dict()
    assert len(next(iter(state.values()))) == 2  # one per dp rank, not one per rank of the world
    restored = over_data_parallel(Accuracy())
    restored.load_state_dict(state)
    assert restored.compute() == 4 / 7
    if mesh.dp_rank == 1:
        restored.update(mine)
    assert restored.compute() == 5 / 9  # by one right row of two
    restored.reset()
    with pytest.raises(NotComputableError):
        restored.compute()

    error = over_data_parallel(1 - Accuracy())
    error.reset()
    error.update(mine)
    assert error.compute() == 1 - 4 / 7

    # Only dp rank 1 has rows: of the wrong metric the classes and the shapes are unknown on dp rank 0.
    for name, metric in uneven_metrics().items():
        over_data_parallel(metric)
        metric.reset()
        engine = Engine(lambda engine, batch: batch)
        engine.state.output = tuple(t[:0] for t in mine) if mesh.dp_rank == 0 else mine
        if isinstance(metric, RunningAverage):
            metric.src.iteration_completed(engine)
        metric.iteration_completed(engine)
        seen[name] = metric.compute()

    # An error of those that compute is everybody's error.
    failing = over_data_parallel(EpochMetric(lambda y_pred, y: y_pred.no_such_method(), check_compute_fn=False))
    failing.update(tuple(t[:0] for t in mine) if mesh.dp_rank == 0 else mine)
    with pytest.raises(AttributeError, match="no_such_method"):
        failing.compute()
    assert idist.get_world_size() == 4
    return seen


@in_float64
def test_metrics_by_hand():
    x, y = torch.linspace(-1, 1, 21).reshape(7, 3), torch.tensor([2, 2, 0, 1, 2, 2, 1])

    def value(metric, rows):
        metric.reset()
        metric.update(metric._output_transform(rows))
        return metric.compute()

    last = x[5:], y[5:]
    for seen in launch({"dp": 2, "tp": 2}, by_hand):
        for name, metric in uneven_metrics().items():
            metric = metric.src if isinstance(metric, RunningAverage) else metric
            assert largest_difference(seen[name], value(metric, last)) <= 1e-15, name


class Total(Metric):
    """A metric of one's own, which is reduced."""

    def reset(self):
        self.total = 0.0

    def update(self, output):
        self.total += float(len(output[1]))

    @sync_all_reduce("total")
    def compute(self):
        return self.total


def counts_by_hand(local_rank):
    """Five rows on the first dp rank and two on the second, or all on one; no engine knows these metrics."""
    early = ConfusionMatrix(3)
    ddl.auto_model(torch.nn.Sequential(torch.nn.Linear(3, 2)), {"0": ddl.Column()})
    of_all = EpochMetric(lambda y_pred, y: (len(y), {"sums": y_pred.sum(0)}, "any"), check_compute_fn=False)
    metrics = [
        early,
        of_all,
        Total(),
        VariableAccumulation(lambda total, x: total + x.sum()),
        MetricGroup({"n": Total()}),
    ]
    rows = torch.eye(3)[[2, 2, 0, 1, 2, 2, 1]], torch.tensor([2, 2, 0, 1, 2, 2, 1])
    dp, size = ddl.get_mesh().dp_rank, ddl.get_mesh().dp_size
    mine = tuple(t if size == 1 else t[:5] if dp == 0 else t[5:] for t in rows)
    for metric in metrics:
        metric.reset()
        metric.update(mine[1] * 0 + 1 if isinstance(metric, VariableAccumulation) else mine)
    matrix, n, total, accumulated, group = (metric.compute() for metric in metrics)
    again = copy.deepcopy(early)
    again.update(mine)
    if local_rank == 0:  # one that reduces nothing may be one rank's
        alone = RightAnswers()
        alone.update(mine)
        assert alone.compute() == len(mine[1])
    return (
        int(matrix.sum()),
        (n[0], n[1]["sums"].tolist(), n[2]),
        total,
        int(accumulated[0]),
        group["n"],
        int(again.compute().sum()),
        int(early.compute().sum()),
    )


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_metrics_by_hand_count_each_row_once(mesh):
    for seen in launch(mesh, counts_by_hand):
        assert seen == (7, (7, [1, 2, 4], "any"), 7.0, 7, 7.0, 14, 7)


class RightAnswers(Metric):
    """A metric of one's own that is not reduced."""

    def reset(self):
        self.right = 0

    def update(self, output):
        self.right += int((output[0].argmax(1) == output[1]).sum())

    def compute(self):
        return self.right


class ReducedAnswers(RightAnswers):
    @reinit__is_reduced
    def reset(self):
        super().reset()

    @sync_all_reduce("right")
    def compute(self):
        return self.right


def of_ones_own(local_rank, metric):
    data = torch.utils.data.TensorDataset(torch.eye(3).repeat(3, 1)[:8], torch.arange(8) % 3 * (torch.arange(8) < 5))
    evaluator = ddl.create_supervised_evaluator(torch.nn.Identity(), {"right": metric()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = evaluator.run(ddl.auto_dataloader(data, batch_size=8)).metrics["right"]
    return found, [w for w in map(str, (w.message for w in caught)) if "sync_all_reduce" in w]


def test_a_metric_of_ones_own_that_is_not_reduced_is_warned_of():
    with ddl.Parallel(backend="gloo", nproc_per_node=2, dp=2) as parallel:
        (first, said), (second, _) = parallel.run(of_ones_own, RightAnswers)
        assert first != second
        assert said[0].startswith("RightAnswers gives another value on each dp rank")
        assert parallel.run(of_ones_own, ReducedAnswers) == [(of_ones_own(0, RightAnswers)[0], [])] * 2


def mean_of_counted(y_pred, y):
    return torch.nn.functional.cross_entropy(y_pred, y, ignore_index=0)


def mean_over_rows(y_pred, y):
    return (y_pred.logsumexp(1) * (y != 0)).mean()


def n_counted(y):
    return int((y != 0).sum())


def one_at_least(y):
    return max(1, n_counted(y))


def mean_of_one_at_least(output, y):
    return sum_of_counted(output, y) / one_at_least(y)


def sum_of_counted(output, y):
    return torch.nn.functional.cross_entropy(output, y, ignore_index=0, reduction="sum")


@in_float64
def weighted_loss(local_rank, function, batch_size):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(11, 3), torch.tensor([0, 0, 0, 1, 2, 1, 2, 2, 1, 0, 2]))
    evaluator = ddl.create_supervised_evaluator(torch.nn.Identity(), {"loss": Loss(function, batch_size=batch_size)})
    return evaluator.run(ddl.auto_dataloader(data, batch_size=6)).metrics["loss"]


@in_float64
def loss_of_sorted_rows(local_rank, rows):
    torch.manual_seed(0)
    y, weights = torch.tensor([1, 1, 1, 0, 0, 0] * 2), torch.tensor([1.0, 5.0, 1.0])
    loss = Loss(lambda y_pred, y: torch.nn.functional.cross_entropy(y_pred, y, weight=weights))
    data = torch.utils.data.TensorDataset(torch.randn(12, 3), y)
    ddl.create_supervised_evaluator(torch.nn.Identity(), {"loss": loss}).run(ddl.auto_dataloader(data, batch_size=rows))


@pytest.mark.parametrize(("dp", "rows"), [(2, 6), (2, 2), (4, 2), (4, 6)])
def test_a_loss_of_rows_that_are_alike_on_a_rank_is_compared_with_targets_of_others(dp, rows):
    refused(functools.partial(loss_of_sorted_rows, rows=rows), "Ignite's Loss adds up means over rows", dp=dp)


def losses_of_uneven_ranks(local_rank):
    """Of the same 7 rows: in 4 batches on rank 0, and in 3 on rank 1; and as lists of 4 samples and of 3."""
    x, y = torch.arange(7.0)[:, None], torch.zeros(7, 1)
    engine = MeshEngine(lambda engine, batch: batch)
    Loss(torch.nn.functional.mse_loss).attach(engine, "loss")
    pairs = list(zip(x[:, None], y[:, None], strict=True))
    found = engine.run(pairs[:4] if local_rank == 0 else pairs[4:]).metrics["loss"]
    lists = ddl.create_supervised_evaluator(
        torch.nn.Identity(), output_transform=lambda x, y, y_pred: (list(y_pred), list(y))
    )
    MetricGroup({"loss": Loss(torch.nn.functional.mse_loss)}).attach(lists, "group")
    loader = ddl.auto_dataloader(torch.utils.data.TensorDataset(x, y), batch_size=7)
    return found, lists.run(loader).metrics["loss"]


def test_a_loss_of_ranks_with_other_numbers_of_batches_or_of_samples_in_lists():
    assert launch({"dp": 2}, losses_of_uneven_ranks) == [(13.0, 13.0)] * 2


def test_a_loss_may_say_by_batch_size_what_it_divides_by():
    with ddl.Parallel(backend="gloo", nproc_per_node=2, dp=2) as parallel:
        for function, batch_size in (
            (mean_of_counted, n_counted),
            (mean_over_rows, torch.numel),
            (mean_of_one_at_least, one_at_least),  # nothing counts on one rank, of three rows
            (sum_of_counted, lambda y: 1),
            (sum_of_counted, lambda y: 3),
        ):
            alone = weighted_loss(0, function, batch_size)
            assert all(abs(loss - alone) < 1e-12 for loss in parallel.run(weighted_loss, function, batch_size))
        with pytest.raises(ddl.RankError, match="or say it by batch_size=, a function from targets to the divisor"):
            parallel.run(weighted_loss, mean_over_rows, n_counted)
        with pytest.raises(ddl.RankError, match=r"gave 3 both for .* \(a clamp\?\): let it return the number n"):
            parallel.run(weighted_loss, torch.nn.CrossEntropyLoss(reduction="sum"), lambda y: max(3, 2 * n_counted(y)))


@in_float64
def loaded_losses(local_rank, known):
    """Loads a weighted mean, alone and inside another metric, after one of two batches; then all of them anew."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(11, 3), torch.tensor([0, 0, 0, 1, 2, 1, 2, 2, 1, 0, 2]))
    loss_fn, found = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1])), []
    for factor in (None, 2):
        saved, metric = (over_data_parallel(factor * Loss(loss_fn) if factor else Loss(loss_fn)) for _ in range(2))
        for epoch in range(2):
            for number, batch in enumerate(ddl.auto_dataloader(data, batch_size=6)):
                if (epoch, number) == (0, 1):
                    metric.load_state_dict(saved.state_dict() if known else type(saved).state_dict(Loss(loss_fn)))
                (metric if epoch or number else saved).update(batch)
            found += [metric.compute()]
            metric.reset()
    return found


def test_a_loaded_loss_goes_on_with_the_losses_of_batches_before():
    with ddl.Parallel(backend="gloo", nproc_per_node=2, dp=2) as parallel:
        alone = loaded_losses(0, True)
        assert parallel.run(loaded_losses, True) == [pytest.approx(alone, rel=1e-12)] * 2
        with pytest.raises(ddl.RankError, match="has no losses of batches"):  # of an earlier version
            parallel.run(loaded_losses, False)


def mean_of_time_major(y_pred, y):
    return torch.nn.functional.cross_entropy(y_pred.reshape(-1, 3), y.t().reshape(-1))


def mean_of_rows_first(y_pred, y):
    return torch.nn.functional.cross_entropy(y_pred.reshape(-1, 3), y.reshape(-1))


class TimeMajor(torch.nn.Module):
    def forward(self, x):
        return x.transpose(0, 1)


@in_float64
def time_major_loss(local_rank, function, transform):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(11, 5, 3), torch.randint(3, (11, 5)))
    loss = Loss(function, batch_size=len, output_transform=transform)
    evaluator = ddl.create_supervised_evaluator(TimeMajor(), {"loss": loss})
    return evaluator.run(ddl.auto_dataloader(data, batch_size=6)).metrics["loss"]


def as_it_is(output):
    return output


def rows_first(output):
    return output[0].transpose(0, 1), output[1]


def test_a_loss_of_time_major_outputs_is_refused_with_a_cure_that_works():
    alone = time_major_loss(0, mean_of_time_major, as_it_is)
    with ddl.Parallel(backend="gloo", nproc_per_node=2, dp=2) as parallel:
        found = parallel.run(time_major_loss, mean_of_rows_first, rows_first)
        assert all(abs(loss - alone) < 1e-12 for loss in found)
        with pytest.raises(ddl.RankError, match=r"in dim 1, .* by output_transform=lambda"):
            parallel.run(time_major_loss, mean_of_time_major, as_it_is)


@in_float64
def loss_with_options(local_rank, options):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(17, 3), torch.arange(17) % 3)
    loss = Loss(torch.nn.functional.cross_entropy, output_transform=lambda output: (*output, options))
    evaluator = ddl.create_supervised_evaluator(torch.nn.Identity(), {"loss": loss})
    return evaluator.run(ddl.auto_dataloader(data, batch_size=4)).metrics["loss"]


def test_a_loss_with_options_in_the_output_divides_by_what_they_say():
    with ddl.Parallel(backend="gloo", nproc_per_node=2, dp=2) as parallel:
        for options in ({"weight": torch.tensor([0.2, 1.0, 5.0]).double()}, {"reduction": "sum"}, {}):
            alone = loss_with_options(0, options)
            assert all(abs(loss - alone) < 1e-6 for loss in parallel.run(loss_with_options, options))


class OfOnesOwn(Loss):
    """Adds nothing to Ignite's."""


@in_float64
def weighs_batches(local_rank, metric, batch_size, rows=9):
    data = torch.utils.data.TensorDataset(torch.eye(3).repeat(3, 1)[:rows], torch.arange(rows) % 3)
    loss = metric(torch.nn.CrossEntropyLoss(reduction="sum"), batch_size=batch_size)
    evaluator = ddl.create_supervised_evaluator(torch.nn.Identity(), {"loss": loss})
    return evaluator.run(ddl.auto_dataloader(data, batch_size=4)).metrics["loss"]


def test_batches_of_a_loss_may_weigh_alike():
    """The last batch has one row, so that a rank has none: its weight counts once, as that of batches of all ranks."""
    with ddl.Parallel(backend="gloo", nproc_per_node=2, dp=2) as parallel:
        for metric in (Loss, OfOnesOwn):
            for batch_size in (lambda y: 1, len, torch.numel):
                alone = weighs_batches(0, metric, batch_size)
                assert parallel.run(weighs_batches, metric, batch_size) == pytest.approx([alone] * 2, rel=1e-6)
        with pytest.raises(ddl.RankError, match="gave 1.41421 for some targets and 2 for twice as many"):
            parallel.run(weighs_batches, Loss, lambda y: len(y) ** 0.5)


def text_metrics(local_rank):
    texts = [text.split() for text in ("the cat sat on", "a dog ran away", "we like to learn", "it is fine", "the end")]
    engine = ddl.MeshEngine(lambda _, rows: ([texts[i][:2] for i in rows], [[texts[i]] for i in rows]))
    Bleu(ngram=2).attach(engine, "bleu")
    Rouge(variants=["L", 1]).attach(engine, "rouge")
    return engine.run(ddl.auto_dataloader(torch.arange(5), batch_size=2)).metrics


def test_lists_of_words_on_a_rank_without_rows():
    alone = text_metrics(0)
    with ddl.Parallel(backend="gloo", nproc_per_node=2, dp=2) as parallel:
        for found in parallel.run(text_metrics):
            assert largest_difference(found, alone) < 1e-6


# ------------------------------------------------------------------------------------------------ the view


@on_each_rank(dp=2, tp=2)
def test_the_view(local_rank):
    mesh, outside, rank = ddl.get_mesh(), idist_utils._model, idist.get_rank()
    dp, peers = mesh.dp_rank, [mesh.tp_rank, 2 + mesh.tp_rank]
    with data_parallel_view(), mock.patch.object(dist, "new_group", wraps=dist.new_group) as groups:
        assert (idist.get_world_size(), idist.get_rank()) == (2, dp)
        assert idist.all_reduce(10**rank) == sum(10**peer for peer in peers)
        rows = idist.all_gather(torch.arange(dp, 3 * dp + 1))  # 1 row, and 3
        assert rows.tolist() == [0, 1, 2, 3]
        assert list(idist.all_gather(dp)) == [0, 1]
        assert idist.all_gather("ab" * (dp + 1)) == ["ab", "abab"]
        assert idist.all_gather({"dp": dp}) == [{"dp": 0}, {"dp": 1}]
        number = idist.broadcast(0.1 * (rank + 1), src=1)
        assert number == 0.1 * (peers[1] + 1)  # to the last bit: not in single precision
        assert idist.broadcast(torch.tensor([rank]), src=1).tolist() == peers[1:]
        missing = idist.broadcast(None if dp == 0 else torch.tensor([rank]), src=1, safe_mode=True)
        assert missing.tolist() == peers[1:]
        assert idist.broadcast(f"from {rank}", src=1) == f"from {peers[1]}"
        idist.barrier()
        with data_parallel_view():  # a metric inside a metric
            assert idist.get_world_size() == 2
        assert idist.get_world_size() == 2
        with pytest.raises(RuntimeError, match="cannot be finalized inside a metric's method"):
            idist.finalize()
        assert groups.call_count == 0
        assert idist.all_reduce(1, group=[0, 1, 2, 3]) == 4
    assert (idist.get_world_size(), idist.get_rank()) == (4, rank)
    assert idist_utils._model is outside
    with pytest.raises(ZeroDivisionError), data_parallel_view():
        1 / 0  # noqa: B018
    metric = over_data_parallel(Accuracy())
    with pytest.raises(ValueError, match="y must have shape"):
        metric.update((torch.zeros(2, 3), torch.zeros(2, 3, 4)))
    with pytest.raises(NotComputableError):
        metric.compute()
    assert idist_utils._model is outside


@on_each_rank(dp=2, tp=2)
def test_engine_of_the_user(local_rank):
    """A MeshEngine around an update function of the user; a metric is attached, detached and attached again."""
    engine = MeshEngine(lambda engine, batch: (torch.eye(3)[batch], batch))
    metric = LargestLogit()
    metric.attach(engine, "first")
    assert engine.run([torch.tensor([0, 1])]).metrics["first"]["rows"] == 4  # over the world: 8
    metric.detach(engine)
    metric.attach(engine, "once more")
    assert engine.run([torch.tensor([0])]).metrics["once more"]["rows"] == 2  # over the world: 4
    assert idist.get_world_size() == 4


def over_and_over(local_rank):
    """Evaluations in which other dp ranks have no rows."""
    evaluator = ddl.create_supervised_evaluator(nn.Identity(), {"accuracy": Accuracy(), "cm": ConfusionMatrix(3)})
    found = []
    for n in (2, 3, 1, 3):
        rows = torch.utils.data.TensorDataset(torch.eye(3)[:n], torch.arange(n) * 0)
        state = evaluator.run(ddl.auto_dataloader(rows, batch_size=4))
        found.append((state.metrics["accuracy"], state.metrics["cm"].tolist()))
    return found


def test_ranks_without_rows_may_be_others_in_each_evaluation():
    """A process group of some ranks is made at one place of their histories, which differ."""
    right = over_and_over(0)
    for found in launch({"dp": 4}, over_and_over):
        assert found == right


def failing_on_a_rank(local_rank):
    metric = over_data_parallel(EpochMetric(lambda y_pred, y: 1 / 0, check_compute_fn=False))
    if local_rank < 2:
        metric.update((torch.ones(2), torch.ones(2)))
    with pytest.raises(ZeroDivisionError):
        metric.compute()
    return idist.all_reduce(1)


def test_a_metric_that_fails_on_some_ranks_fails_on_all():
    assert launch({"dp": 3}, failing_on_a_rank) == [3, 3, 3]


@on_each_rank(dp=2)
def test_an_accumulation_of_rows_or_of_numbers_of_all_ranks_is_found(local_rank):
    rows, total = over_data_parallel(Average()), over_data_parallel(VariableAccumulation(lambda a, x: a + x))
    rows.update(torch.ones(2 + local_rank))
    with pytest.raises(
        ValueError, match=r"Average adds up tensors of one shape, but dp ranks have shapes \(2,\), \(3,\)"
    ):
        rows.compute()
    total.update(3.0)
    with pytest.warns(UserWarning, match="all have the same") if local_rank == 0 else contextlib.nullcontext():
        total.compute()


def loss_by_weights(local_rank):
    def transform(x, y, y_pred):
        return y_pred, y, {"w": y.double() + 1}

    def loss_fn(y_pred, y, w):
        return (nn.functional.cross_entropy(y_pred, y, reduction="none") * w).mean()

    torch.manual_seed(0)
    model = ddl.auto_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double())
    evaluator = ddl.create_supervised_evaluator(model, {"loss": Loss(loss_fn)}, output_transform=transform)
    rows = torch.utils.data.TensorDataset(torch.eye(3, dtype=torch.float64).repeat(8, 1), torch.arange(24) % 3)
    return evaluator.run(ddl.auto_dataloader(rows, batch_size=6)).metrics["loss"]


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_loss_by_weights_of_rows(axes):
    assert launch(axes, loss_by_weights) == [pytest.approx(loss_by_weights(0), abs=1e-6)] * math.prod(axes.values())


@pytest.mark.parametrize(("axes", "warned"), [({"dp": 4}, 0), ({"dp": 2, "tp": 2}, 1)], ids=str)
def test_a_sum_over_the_world_in_a_handler_warns_where_peers_have_the_same_rows(axes, warned):
    @on_each_rank(**axes)
    def summing(local_rank):
        mesh, sums = ddl.get_mesh(), []
        model = ddl.auto_model(nn.Sequential(nn.Linear(8, 4)), {"0": ddl.Column()} if mesh.tp_size > 1 else None)
        evaluator = ddl.create_supervised_evaluator(model, {"accuracy": Accuracy()})

        @evaluator.on(Events.ITERATION_COMPLETED)
        def add(engine):
            n = len(engine.state.output[1])
            groups = {} if mesh.tp_size == 1 else {"group": mesh.dp_cp_group}
            sums.extend([idist.all_reduce(n, **groups), idist.all_reduce(n, "MAX"), idist.all_reduce(n)])

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            evaluator.run(ddl.auto_dataloader(TensorDataset(torch.randn(12, 8), torch.arange(12) % 3), batch_size=8))
        assert sums == [8, 8 // mesh.dp_size, 8 * mesh.tp_size, 4, 4 // mesh.dp_size, 4 * mesh.tp_size]
        lines = [
            str(one.message) for one in caught if "idist.all_reduce adds what all 4 ranks have" in str(one.message)
        ]
        assert len(lines) == warned
        assert idist.all_reduce(1) == 4

    summing()
