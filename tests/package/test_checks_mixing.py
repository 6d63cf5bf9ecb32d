"""Rows that meet in prepare_batch, collate_fn, and transforms of outputs."""

import functools
import warnings

import ignite.distributed as idist
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Events
from ignite.metrics import Accuracy, Loss
from ranks import assert_right, in_float64, mesh_of, on, refused, trainer_of
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import ignite_ddl as ddl
from ignite_ddl.checks import mixing
from ignite_ddl.checks.mixing import CheckedCollate, CheckedTransform, rows_meet

SEEN = []


def normalised(batch, **_):
    x, y = batch
    return (x - x.mean(0)) / x.std(0), y


def by_the_largest(batch, **_):
    x, y = batch
    return x / x.max(), y


def in_groups(batch, **_):
    x, y = batch
    of_group = x.view(-1, 2, 3)
    return (of_group - of_group.mean(1, keepdim=True)).flatten(0, 1), y


def summed(batch, **_):
    x, y = batch
    return x - idist.all_reduce(x.sum(0)) / idist.all_reduce(len(x)), y


def mixed(batch, **_):
    x, y = batch
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))], y


def counting(batch, **_):
    SEEN.append(len(batch[0]))
    x, y = batch
    x.mul_(2)
    order = x[:, 0].argsort()
    return torch.cat([x[order], x[order] + torch.arange(3)]), torch.cat([y[order]] * 2)


def noisy(batch, **_):
    x, y = batch
    return x + torch.randn_like(x), y


NUMBERS = [iter(range(100))]


def reading(batch, **_):
    x, y = batch
    return (x - x.mean(0)) * next(NUMBERS[0]), y


@pytest.mark.parametrize(
    ("prepare", "meet"),
    [
        (normalised, True),
        (by_the_largest, True),
        (mixed, True),
        (in_groups, True),
        (counting, False),
        (noisy, False),
        (reading, False),
    ],
)
def test_rows_that_change_with_others_are_found_and_calls_leave_no_trace(prepare, meet):
    SEEN.clear()
    batch, state = (torch.randn(8, 3), torch.arange(8)), torch.get_rng_state()
    batch[0][:3, 0] += 9
    before = batch[0].clone()
    assert rows_meet(functools.partial(prepare), batch, 8)[0] is meet
    assert torch.equal(batch[0], before)
    assert torch.equal(torch.get_rng_state(), state)
    assert (len(SEEN), NUMBERS[0].__length_hint__()) == (0, 100)


def test_a_collate_fn_that_mixes_samples_warns_once():
    samples = [(torch.randn(3), torch.tensor(i)) for i in range(6)]
    rolled = CheckedCollate(lambda given: [t + t.roll(1, 0) for t in default_collate(given)])
    with pytest.warns(UserWarning, match="collate_fn makes rows of a batch from other rows"):
        rolled(samples)
    lists = CheckedCollate(lambda given: (torch.stack([x for x, _ in given]), torch.empty(6, 0), [i for _, i in given]))
    padded = CheckedCollate(lambda given: nn.utils.rnn.pad_sequence([x[: int(i) + 1] for x, i in given]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rolled(samples), padded(samples), lists(samples), CheckedCollate(default_collate)(samples)


@in_float64
def training(local_rank, prepare=None, trainer=None, batch_size=8):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(20, 3), torch.randint(4, (20,)))
    model = ddl.auto_model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)))
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    given = (trainer or {}) | ({} if prepare is None else {"prepare_batch": prepare})
    engine, losses = ddl.create_supervised_trainer(model, optimizer, F.cross_entropy, **given), []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    engine.run(ddl.auto_dataloader(data, batch_size=batch_size), max_epochs=2)
    return losses, torch.cat([p.flatten() for p in ddl.full_state_dict(model).values()])


def none(batch, **_):
    return batch[0][batch[0][:, 0] > 9], batch[1]


def test_a_batch_is_prepared_as_in_one_process_or_refused():
    refused(functools.partial(training, prepare=normalised), "prepare_batch makes rows of a batch from other", dp=2)
    refused(functools.partial(training, prepare=none), "prepare_batch leaves no row of this rank's", dp=2)
    assert_right(functools.partial(training, prepare=in_groups), dp=2)


def test_a_deviation_that_equal_rows_do_not_have_is_found():
    assert rows_meet(normalised, (torch.randn(2, 3), torch.arange(2)), 2)[0]


def _prepared(local_rank):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        training(local_rank, prepare=mixed)
    warned = [str(one.message) for one in found if "prepare_batch makes rows" in str(one.message)]
    return (
        warned,
        training(local_rank, prepare=summed),
        training(local_rank, prepare=normalised, trainer={"checks": False}),
    )


def test_what_a_rank_mixes_at_random_is_a_warning_and_sums_over_ranks_are_right():
    (losses, weights), ranks = training(0, prepare=summed), on(_prepared, dp=2)
    for _, (of_rank, weights_of_rank), _ in ranks:
        assert of_rank == pytest.approx(losses, abs=1e-12)
        assert (weights_of_rank - weights).abs().max() < 1e-12
    assert [len(warned) for warned, *_ in ranks] == [1, 0]


CENTRED = {"model_transform": lambda output: output - output.mean(0)}


def _centred(local_rank):
    return training(local_rank, trainer=CENTRED)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}])
def test_a_transform_by_the_mean_of_rows_is_refused(mesh):
    refused(_centred, "model_transform makes rows of a batch from other", **mesh)


def test_a_transform_of_microbatches_of_one_row_is_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(mixing, "get_mesh", lambda: mesh_of(pp=2))
    monkeypatch.setattr(mixing, "check_transform", lambda *given: tried.append(given[3]))
    transform = CheckedTransform(lambda output: 2 * output)
    for n in (1, 1, 3, 1, 3):
        transform(torch.ones(n, 2))
    assert tried == [1, 3]


def centred_in_place(output):
    output.sub_(output.mean(0))
    return output


def centred_entry(output):
    output["z"] = output["z"] - output["z"].mean(0)
    return output


def halved_in_place(output):
    return output.mul_(0.5)


def some_halved_in_place(output):
    for i in range(len(output)):
        if output[i].sum() < 0:  # in no row of some microbatches
            output[i].mul_(0.5)
    return output


def test_a_transform_that_changes_its_argument_is_tried():
    x = torch.randn(4, 3)
    for transform, output in ((centred_in_place, x.clone()), (centred_entry, {"z": x.clone()})):
        with pytest.raises(ValueError, match="model_transform makes rows of a batch from other rows"):
            CheckedTransform(transform)(output)
    assert torch.equal(CheckedTransform(halved_in_place)(x.clone()), 0.5 * x)


@in_float64
def with_halved_output(local_rank):
    torch.manual_seed(0)
    model = ddl.auto_model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
    trainer = ddl.create_supervised_trainer(
        model,
        ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1)),
        F.mse_loss,
        model_transform=some_halved_in_place,
        output_transform=lambda x, y, y_pred, loss: [loss.item(), y_pred.sum().item()],
    )
    trainer.run(ddl.auto_dataloader(TensorDataset(*torch.randn(2, 8, 3)), batch_size=4), max_epochs=1)
    return trainer.state.output, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


def test_a_transform_in_place_changes_the_output_of_a_pipeline_once():
    assert_right(with_halved_output, pp=2)


@in_float64
def evaluation(local_rank, transform):
    torch.manual_seed(0)
    data, model = TensorDataset(torch.randn(12, 3), torch.randint(4, (12,))), ddl.auto_model(nn.Linear(3, 4))
    engine = ddl.create_supervised_evaluator(model, {"loss": Loss(F.cross_entropy)}, output_transform=transform)
    return engine.run(ddl.auto_dataloader(data, batch_size=5)).metrics["loss"]


def _scaled(x, y, y_pred):
    return y_pred / y_pred.max(), y


def _chosen(x, y, y_pred):
    return y_pred[y > 0], y[y > 0]


def _confusion(x, y, y_pred):
    return F.one_hot(4 * y + y_pred.argmax(1), 16).sum(0).view(4, 4)


def confusions(local_rank):
    torch.manual_seed(0)
    data, model = TensorDataset(torch.randn(12, 3), torch.randint(4, (12,))), ddl.auto_model(nn.Linear(3, 4))
    engine = ddl.create_supervised_evaluator(model, output_transform=_confusion)
    counted = engine.run(ddl.auto_dataloader(data, batch_size=12)).output
    return idist.all_reduce(counted).tolist()


def test_an_evaluators_transform_may_count_rows_in_a_table():
    assert on(confusions, dp=2) == [confusions(0)] * 2


def test_an_evaluators_transform_by_the_largest_of_rows_is_refused():
    refused(functools.partial(evaluation, transform=_scaled), "output_transform makes rows", dp=2)
    assert on(evaluation, _chosen, dp=2) == pytest.approx([evaluation(0, _chosen)] * 2)


def running_mean(local_rank, over_ranks):
    """The warnings of a run that subtracts from rows the mean of those before, of its rank's or of all ranks'."""
    total, count = torch.zeros(3), 0

    def prepare(batch, **_):
        nonlocal total, count
        x, y = batch
        seen = x - total / max(1, count), y
        added, n = x.detach().sum(0), len(x)
        if over_ranks:
            added, n = idist.all_reduce(added), idist.all_reduce(n)
        total, count = total + added, count + n
        return seen

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        losses, _ = training(local_rank, prepare=prepare)
        evaluator = ddl.create_supervised_evaluator(nn.Identity(), prepare_batch=prepare)
        evaluator.run(ddl.auto_dataloader(TensorDataset(torch.ones(8, 3), torch.zeros(8)), batch_size=8))
    return losses, [str(one.message) for one in found if "prepare_batch makes something else" in str(one.message)]


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_statistics_of_a_ranks_rows_by_which_batches_are_prepared_are_warned_of(mesh):
    first, *others = on(functools.partial(running_mean, over_ranks=False), **mesh)
    assert len(first[1]) == 2  # of the trainer, and of the evaluator
    assert not any(warned for _, warned in others)


def test_statistics_of_all_ranks_rows_are_right():
    right, _ = running_mean(0, over_ranks=True)
    for losses, warned in on(functools.partial(running_mean, over_ranks=True), dp=2):
        assert (losses, warned) == (pytest.approx(right, abs=1e-12), [])


def listing(local_rank):
    evaluator = ddl.create_supervised_evaluator(
        nn.Identity(), {"accuracy": Accuracy()}, output_transform=lambda x, y, y_pred: (list(y_pred), list(y))
    )
    rows = TensorDataset(torch.eye(3).repeat(4, 1), torch.arange(12) % 2)
    return evaluator.run(ddl.auto_dataloader(rows, batch_size=6)).metrics["accuracy"]


def test_a_list_of_rows_as_long_as_a_row_has_classes():
    assert on(listing, dp=2) == [listing(0)] * 2


def half_scaled(batch, **_):
    x, y = batch
    n = len(x) // 2
    return torch.cat([x[:n], 0.5 * x[n:]]), y


def by_number(batch, **_):
    return batch[0] / len(batch[0]), batch[1]


def by_place(batch, **_):
    return *batch, torch.arange(len(batch[0])).double()


def with_indices(batch, **_):
    return batch[0], torch.arange(len(batch[0])), batch[1]


def padded_to_four(batch, **_):
    return torch.cat([batch[0], batch[0].new_zeros(-len(batch[0]) % 4, 3)]), batch[1]


@pytest.mark.parametrize(
    ("prepare", "depends"),
    [(half_scaled, True), (by_number, True), (by_place, True), (with_indices, False), (padded_to_four, False)],
)
def test_rows_that_depend_on_their_number_or_places_are_found(prepare, depends):
    for n in (2, 3, 8):
        assert rows_meet(prepare, (torch.randn(n, 3), torch.arange(n)), n) == (depends, False)


def test_a_batch_prepared_by_the_number_of_rows_is_refused():
    refused(functools.partial(training, prepare=half_scaled), "prepare_batch .* by their number or places", dp=2)
    assert_right(functools.partial(training, prepare=with_sorted_rows), dp=2)


def with_sorted_rows(batch, **_):
    order = batch[0][:, 0].argsort()
    return batch[0][order], batch[1][order]


class WithPenalty(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y, (y**2).mean()


@in_float64
def counted_calls(local_rank, evaluates=False):
    """What functions around a model make of numbers that their own calls change."""
    torch.manual_seed(0)
    data, calls = TensorDataset(torch.randn(12, 3), torch.randint(4, (12,))), dict.fromkeys(("fn", "of", "out"), 0)

    def count(name, value):
        calls[name] += 1
        return value * (1 + 0.01 * calls[name])

    def fn(model, x):
        output, penalty = model(x)
        return count("fn", output), penalty

    def of(output):
        return count("of", output[0]), output[1]

    def out(x, y, y_pred, *_):
        return count("out", y_pred[0]), y

    model, given = ddl.auto_model(WithPenalty(3, 4)), {"model_fn": fn, "model_transform": of}
    if evaluates:
        evaluator = ddl.create_supervised_evaluator(model, {"a": Loss(F.cross_entropy)}, output_transform=out, **given)
        return evaluator.run(ddl.auto_dataloader(data, batch_size=4)).metrics["a"], calls
    trainer = trainer_of(model, lambda output, y: F.cross_entropy(output[0], y) + output[1], **given)
    return trainer.run(ddl.auto_dataloader(data, batch_size=4), max_epochs=3).output, calls


@pytest.mark.parametrize("evaluates", [False, True])
def test_checks_leave_no_trace_in_functions_around_a_model(evaluates):
    right, calls = counted_calls(0, evaluates)
    found = on(functools.partial(counted_calls, evaluates=evaluates), dp=2)
    assert found == [(pytest.approx(right, abs=1e-12), calls)] * 2
