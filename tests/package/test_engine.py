"""What the trainer and the clipping refuse, before anything is sent."""

import warnings
from functools import partial

import ignite.distributed as idist
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.metrics import ConfusionMatrix, MeanSquaredError
from ranks import assert_right, in_float64, launch, on, refused
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ignite_ddl as ddl

ROWS = TensorDataset(torch.ones(9, 3), torch.ones(9, 1))


def trainer(model=None, **options):
    model = nn.Linear(3, 1) if model is None else model
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return ddl.create_supervised_trainer(model, optimizer, nn.functional.mse_loss, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps should be a positive integer, .* given 0"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps should be .* given 1.5"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps should be .* given True"),
        ({"max_norm": 0}, "max_norm should be a positive number, but given 0"),
        ({"max_norm": float("nan")}, "max_norm should be a positive number, but given nan"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        trainer(**options)


def test_an_optimizer_of_another_model():
    with pytest.raises(ValueError, match="holds none of them: make it after ddl.auto_model"):
        trainer(optimizer=torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1))
    model = nn.Linear(3, 1)
    trainer(model, optimizer=torch.optim.SGD([model.bias], lr=0.1))  # a part is enough
    trainer(nn.Linear(3, 1).requires_grad_(False), optimizer=torch.optim.SGD(nn.Linear(3, 1).parameters()))


@pytest.mark.parametrize("max_norm", [-1.0, 0.0, float("nan")])
def test_a_norm_to_clip_at(max_norm):
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="max_norm should be a positive number"):
        ddl.clip_grad_norm_(model, max_norm)
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0))


def test_data_of_an_iterable_may_be_set_before_the_run():
    engine, loader = ddl.MeshEngine(lambda engine, batch: batch.sum().item()), DataLoader(Numbers(), batch_size=4)
    engine.set_data(loader)
    assert engine.run(max_epochs=2, epoch_length=3).output == 17


def made_of_a_loader(local_rank):
    loader = ddl.auto_dataloader(ROWS, batch_size=4)
    trainer(ddl.auto_model(nn.Linear(3, 1))).run((batch for batch in loader), epoch_length=len(loader))


def test_a_batch_without_rows_that_is_not_the_loaders():
    with pytest.raises(ValueError, match="this rank's batch has no rows: run the engine on the loader of"):
        on(made_of_a_loader, dp=2)


def evaluated(local_rank, dealt_to_all):
    """By Ignite's loader, which deals rows to all ranks, or by torch's, which gives each rank all of them."""
    model = ddl.auto_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), {})
    evaluator = ddl.create_supervised_evaluator(model, {"error": MeanSquaredError()})
    rows = TensorDataset(torch.arange(24.0).view(8, 3), torch.arange(8.0)[:, None])
    loader = idist.auto_dataloader(rows, batch_size=4) if dealt_to_all else DataLoader(rows, batch_size=4)
    return evaluator.run(loader).metrics["error"]


def reads_no_rows(local_rank):
    evaluator = ddl.create_supervised_evaluator(torch.nn.Identity())
    evaluator.logger.disabled = True
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: evaluator.state.output[0].max())
    evaluator.run(ddl.auto_dataloader(TensorDataset(torch.ones(3, 2), torch.ones(3)), batch_size=2))


def test_an_error_says_that_a_rank_had_no_rows():
    with pytest.raises(ddl.RankError, match="This rank had none of the 1 rows of this batch"):
        launch({"dp": 2}, reads_no_rows)


@pytest.mark.parametrize("axis", ["tp", pytest.param("pp", marks=pytest.mark.slow)])
def test_an_evaluator_whose_tp_or_pp_peers_get_other_rows(axis):
    with pytest.raises(ValueError, match=f"{axis} peers should get the same rows"):
        on(evaluated, True, **{axis: 2})
    first, second = on(evaluated, False, **{axis: 2})
    assert first == second


def taught_by_a_pipeline(local_rank):
    teacher, student = (ddl.auto_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))) for _ in range(2))
    mse = torch.nn.functional.mse_loss

    def update(engine, batch):
        output, _ = ddl.forward_backward(engine, teacher, *batch, mse)
        ddl.forward_backward(engine, student, batch[0], None if output is None else output.detach(), mse)

    rows = TensorDataset(torch.arange(24.0).view(8, 3), torch.arange(8.0)[:, None])
    ddl.MeshEngine(update).run(ddl.auto_dataloader(rows, batch_size=4))


def test_targets_that_a_stage_has_not():
    with pytest.raises(ValueError, match="some have none: a model returns None where its last stage is elsewhere"):
        on(taught_by_a_pipeline, pp=2)


def with_a_loss_of_weights(local_rank, **options):
    """Norms and weights where the optimizer steps the weights of a loss, too."""
    torch.manual_seed(0)
    model, head = (ddl.auto_model(nn.Linear(3, 3).double(), **options) for _ in range(2))
    optimizer = ddl.auto_optim(torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.5))
    rows = torch.randn(9, 3, dtype=torch.float64)
    trainer = ddl.create_supervised_trainer(
        model, optimizer, lambda output, y: (head(output) - y).square().mean(), max_norm=0.1
    )
    trainer.run(ddl.auto_dataloader(TensorDataset(rows, rows.flip(1)), batch_size=5), max_epochs=2)
    found = [torch.tensor([trainer.state.grad_norm], dtype=torch.float64)]
    return torch.cat(found + [w.flatten() for m in (model, head) for w in ddl.full_state_dict(m).values()])


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=str)
def test_the_norm_counts_all_that_the_optimizer_steps(options):
    torch.manual_seed(0)
    model, head = (nn.Linear(3, 3).double() for _ in range(2))
    weights = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    rows = torch.randn(9, 3, dtype=torch.float64)
    for x in (*rows.split(5), *rows.split(5)):
        optimizer.zero_grad()
        (head(model(x)) - x.flip(1)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(weights, 0.1)
        optimizer.step()
    expected = torch.cat([norm.reshape(1), *(w.detach().flatten() for w in weights)])
    for found in (with_a_loss_of_weights(0, **options), *on(partial(with_a_loss_of_weights, **options), dp=2)):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_it_runs_on_an_ignite_whose_run_has_no_max_iters(monkeypatch):
    """That of 0.5.4, the oldest one that is supported."""
    run = Engine.run

    def of_0_5_4(engine, data=None, max_epochs=None, epoch_length=None):
        return run(engine, data, max_epochs, epoch_length=epoch_length)

    monkeypatch.setattr(Engine, "run", of_0_5_4)
    assert ddl.MeshEngine(lambda engine, batch: batch).run([1, 2, 3], 2, epoch_length=2).iteration == 4
    with pytest.raises(ValueError, match="max_iters is new in Ignite 0.5.5, but given 3 with Ignite .*: update Ignite"):
        ddl.MeshEngine(lambda engine, batch: batch).run([1, 2, 3], max_iters=3)


def test_each_step_sets_all_modules_to_training_as_ignites_does():
    seen = []
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), nn.Linear(2, 1))
    model[0][1].register_forward_hook(lambda module, *_: seen.append(module.training))
    trainer = ddl.create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: model[0][1].eval())
    trainer.run([(torch.ones(2, 2), torch.ones(2, 1))] * 3)
    assert seen == [True] * 3


def counted_by_transforms(local_rank):
    """The rows and the right ones that output_transform counts in batches of 4, 4 and 1 rows; and means of rows."""
    loader, found = ddl.auto_dataloader(TensorDataset(torch.eye(3).repeat(3, 1), torch.arange(9) % 3), batch_size=4), []
    model = ddl.auto_model(nn.Linear(3, 3))
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def count(x, y, y_pred, *loss):
        return {"rows": len(y), "zeros": int((y == 0).sum())}

    def mean(x, y, y_pred, *loss):
        return y.double().mean().item()

    for transform in (count, mean, lambda x, y, y_pred, *_: y[0].item(), lambda x, y, y_pred, *_: (y_pred, y)):
        options = {"output_transform": transform}
        evaluator = ddl.create_supervised_evaluator(model, **options)
        trainer = ddl.create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, **options)
        for engine in (evaluator, trainer):
            outputs = []
            engine.add_event_handler(
                Events.ITERATION_COMPLETED, lambda e, outputs=outputs: outputs.append(e.state.output)
            )
            engine.run(loader)
            found.append(outputs)
    counts = [{name: idist.all_reduce(sum(o[name] for o in outputs)) for name in outputs[0]} for outputs in found[:2]]
    return counts, [outputs[-1] for outputs in found[2:6]], [len(outputs[-1][0]) for outputs in found[6:]]


def test_a_transform_counts_no_row_that_was_lent():
    for local_rank, (counts, of_the_lent, rows) in enumerate(launch({"dp": 2}, counted_by_transforms)):
        assert counts == [{"rows": 9, "zeros": 3}] * 2
        assert of_the_lent == [2.0] * 4  # what has no value of no rows: a mean, an error
        assert rows == [local_rank] * 2  # of one row the second dp rank's part is all


def counts_of_undealt_rows(local_rank, how):
    x, y = torch.eye(3).repeat(3, 1), torch.arange(9) % 3
    mine = slice(local_rank, None, 2)
    data = {"a list": [(x, y)], "torch's": DataLoader(TensorDataset(x, y), batch_size=4), "dealt": [(x[mine], y[mine])]}
    evaluator = ddl.create_supervised_evaluator(ddl.auto_model(nn.Linear(3, 3)), {"cm": ConfusionMatrix(3)})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        evaluator.run(data[how])
    return [str(w.message) for w in warned if "same batch" in str(w.message)]


@pytest.mark.parametrize("how", ["a list", "torch's", "dealt"])
def test_rows_that_nobody_dealt_warn(how):
    of_rank_0, of_rank_1 = launch({"dp": 2}, counts_of_undealt_rows, how)
    assert len(of_rank_0) == (how != "dealt")
    assert not of_rank_0 or "count its rows 2 times: run the engine on a loader of ddl.auto_dataloader" in of_rank_0[0]
    assert of_rank_1 == []


class FrozenNorm(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def run_with_a_frozen_norm(local_rank):
    net = FrozenNorm(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    trainer(ddl.auto_model(net, {})).run(ddl.auto_dataloader(ROWS, batch_size=4))
    return net[1].running_mean.tolist(), net.training, net[1].training


@pytest.mark.parametrize("dp", [1, 2])
def test_train_of_the_models_own_is_called_as_by_ignite(dp):
    mean, outer, norm = on(run_with_a_frozen_norm, dp=dp)[0]
    assert mean == [0.0] * 3
    assert outer
    assert not norm


class Factor(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return -self.log.exp() * x


def with_a_factor(local_rank, in_a_module):
    """A factor of the loss that is stepped by its own loss, as in soft actor-critic."""
    torch.manual_seed(0)
    rows, model, factor = torch.randn(22, 3).double(), ddl.auto_model(nn.Linear(3, 1).double()), Factor()
    if in_a_module:
        factor = ddl.auto_model(factor)
    log = next(factor.parameters())
    optimizers = [ddl.auto_optim(torch.optim.SGD(of, lr=0.1)) for of in (model.parameters(), [log])]

    def update(engine, batch):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_fn = lambda output, y: (log.exp().detach() * (output - y).square()).mean()  # noqa: E731
        output, _ = ddl.forward_backward(engine, model, batch, batch[:, :1], loss_fn)
        if in_a_module:
            ddl.forward_backward(engine, factor, output.detach(), batch, lambda output, _: output.mean())
        else:
            factor(output.detach()).mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    ddl.MeshEngine(update).run(ddl.auto_dataloader(rows, batch_size=8), max_epochs=2)
    return [log.item()], torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_weight_of_no_model_that_ranks_step_unlike():
    refused(partial(with_a_factor, in_a_module=False), r"a weight of shape \(\) of no model", dp=2)
    assert_right(partial(with_a_factor, in_a_module=True), dp=2)


def test_a_run_that_an_error_has_ended_does_not_go_on_elsewhere():
    """In the middle of an epoch it cannot; in the first step it begins anew; between epochs it goes on."""
    rows = TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
    fails_at, seen = [4], []

    def made():
        model = ddl.auto_model(nn.Linear(3, 1))
        trainer = ddl.create_supervised_trainer(
            model, ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1)), nn.functional.mse_loss
        )

        @trainer.on(Events.ITERATION_COMPLETED)
        def fail():
            seen.append((trainer.state.epoch, trainer.state.iteration))
            if trainer.state.iteration in fails_at:
                raise KeyError("a handler's")

        return trainer, ddl.auto_dataloader(rows, batch_size=4)

    trainer, loader = made()
    with pytest.raises(KeyError):
        trainer.run(loader, max_epochs=3)
    with pytest.raises(ValueError, match="ended with an error in iteration 4, in the middle of epoch 2"):
        trainer.run(loader, max_epochs=3)
    fails_at.clear()
    trainer.state.max_epochs = None
    seen.clear()
    trainer.run(loader, max_epochs=2)
    assert seen == [(1 + i // 3, 1 + i) for i in range(6)]

    trainer, loader = made()
    with pytest.raises(AttributeError):
        trainer.run([(torch.ones(4, 3), "no targets")], max_epochs=1)
    seen.clear()
    trainer.run(loader, max_epochs=2)
    assert seen == [(1 + i // 3, 1 + i) for i in range(6)]


@in_float64
def with_gradients_by_hand(local_rank, sums, n=24):
    torch.manual_seed(0)
    model = ddl.auto_model(nn.Linear(4, 2))
    inner = getattr(model, "module", model)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def update(engine, batch):
        x, y = batch
        gradients = torch.autograd.grad(F.mse_loss(inner(x), y, reduction="sum"), list(inner.parameters()))
        for parameter, gradient in zip(inner.parameters(), gradients, strict=True):
            parameter.grad = (idist.all_reduce(gradient) if sums else gradient) / 16
        optimizer.step()

    ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(torch.randn(n, 4), torch.randn(n, 2)), batch_size=8))
    return inner.weight.detach().clone()


def test_gradients_written_by_hand_are_refused_where_ranks_drift_apart():
    words = "steps a weight .* of a model from ddl.auto_model, which differs"
    refused(partial(with_gradients_by_hand, sums=False), words, dp=2)
    alone = with_gradients_by_hand(0, False)
    for weight in launch({"dp": 2}, with_gradients_by_hand, True):
        torch.testing.assert_close(weight, alone, rtol=1e-12, atol=1e-14)


@in_float64
def without_auto_model(local_rank):
    model = nn.Linear(4, 2)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(engine, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        data = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
        ddl.MeshEngine(update).run(ddl.auto_dataloader(data, batch_size=8))
    return [str(each.message) for each in found if "of no model from ddl.auto_model" in str(each.message)]


def test_weights_of_no_model_that_drift_apart_are_warned_of():
    first, second = launch({"dp": 2}, without_auto_model)
    assert len(set(first)) == 1
    assert "give that to ddl.auto_model" in first[0]
    assert not second
    assert without_auto_model(0) == []


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_a_trainer_without_auto_model_is_refused(axes):
    def training(local_rank):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
        trainer.run(ddl.auto_dataloader(TensorDataset(torch.randn(8, 4), torch.randn(8, 2)), batch_size=8))

    refused(training, r"model should be what ddl.auto_model returned, .*: model = ddl.auto_model\(model\)", **axes)


@in_float64
def with_left_windows(local_rank, make=ddl.create_supervised_trainer, **options):
    """Weights after two runs that each end in a window, and after steps in which a gradient is left out."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
    left, dropped = (ddl.auto_model(nn.Linear(3, 1), **options) for _ in range(2))
    optimizers = [ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1)) for model in (left, dropped)]
    trainer = make(left, optimizers[0], F.mse_loss, gradient_accumulation_steps=2)
    loader = ddl.auto_dataloader(data, batch_size=4)
    for _ in range(2):
        trainer.run(loader, max_epochs=1)

    def update(engine, batch):
        clears = dropped.zero_grad if engine.state.iteration == 2 else optimizers[1].zero_grad
        if local_rank is not None:
            ddl.forward_backward(engine, dropped, *batch, F.l1_loss, last=False)
        clears(set_to_none=engine.state.iteration < 4)
        ddl.forward_backward(engine, dropped, *batch, F.mse_loss)
        optimizers[1].step()

    ddl.MeshEngine(update).run(loader)
    return torch.cat([p.flatten() for model in (left, dropped) for p in ddl.full_state_dict(model).values()])


def test_gradients_that_no_step_has_used_are_left_out():
    right = with_left_windows(None, create_supervised_trainer)
    for found in (with_left_windows(0), *on(partial(with_left_windows, shard=True), dp=2)):
        torch.testing.assert_close(found, right, atol=1e-12, rtol=0)


class ScaledLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 3))

    def forward(self, output, y):
        counts = y[:, :1] > 1
        return (((output * self.scale - y) ** 2) * counts).sum() / counts.sum()


@in_float64
def with_weights_of_the_loss(local_rank, plain=False, **options):
    torch.manual_seed(0)
    rows, model, loss_fn = torch.randn(14, 3), nn.Linear(3, 3), ScaledLoss()
    if not plain:
        model, loss_fn = ddl.auto_model(model, **options), ddl.auto_model(loss_fn, **options)
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1)
    for window in rows.split(8) if plain else ():
        optimizer.zero_grad()
        loss_fn(model(window), window.exp()).backward()
        optimizer.step()
    if not plain:
        trainer = ddl.create_supervised_trainer(
            model,
            ddl.auto_optim(optimizer),
            loss_fn,
            prepare_batch=lambda batch, **_: (batch, batch.exp()),
            gradient_accumulation_steps=2,
            loss_divisor=lambda y: (y[:, 0] > 1).sum(),
        )
        trainer.run(ddl.auto_dataloader(rows, batch_size=4))
    return torch.cat([p.flatten() for m in (model, loss_fn) for p in ddl.full_state_dict(m).values()])


class Conjugated(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 1, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(self.w.dtype) @ self.w.conj()).imag


def test_conjugated_gradients_are_those_of_a_window():
    """Its second batch has fewer rows."""
    x, found = torch.randn(6, 3, dtype=torch.float64), []
    for rows, n in ((6, 1), (4, 2)):
        model = Conjugated()
        optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
        trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss, gradient_accumulation_steps=n)
        trainer.run(ddl.auto_dataloader(TensorDataset(x, x[:, :1]), batch_size=rows))
        found.append(model.w.detach())
    torch.testing.assert_close(*found)


def test_weights_of_the_loss_are_those_of_one_batch_in_place_of_a_window():
    right = with_weights_of_the_loss(0, plain=True)
    for found in (with_weights_of_the_loss(0), *on(partial(with_weights_of_the_loss, shard=True), dp=2)):
        torch.testing.assert_close(found, right, atol=1e-12, rtol=0)


@in_float64
def with_a_flush(local_rank, handler=True, epoch_length=None, **options):
    """The last window is not complete, and a script steps with it."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
    model = ddl.auto_model(nn.Linear(3, 1), **options)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss, gradient_accumulation_steps=2)
    if handler:
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: optimizer.step())
    trainer.run(ddl.auto_dataloader(data, batch_size=4), epoch_length=epoch_length)
    if not handler:
        optimizer.step()
    return [trainer.state.output], torch.cat([p.flatten() for p in ddl.full_state_dict(model).values()])


def test_a_step_in_the_middle_of_a_window_is_refused():
    words = r"steps in the middle of a window, .* \(epoch_length of its run\)"
    refused(partial(with_a_flush, shard=True), words, dp=2)
    refused(partial(with_a_flush, handler=False), words, dp=2)
    assert_right(partial(with_a_flush, shard=True, epoch_length=4), dp=2)
    assert_right(partial(with_a_flush, tensor_plan={}), tp=2)


def test_a_plain_backward_after_a_weighted_one_is_refused_where_batches_are_uneven():
    def adversaries(local_rank, n_rows, zero=True):
        torch.manual_seed(0)
        generator, critic = ddl.auto_model(nn.Linear(3, 2)), ddl.auto_model(nn.Linear(2, 1))
        of_both = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]

        def update(engine, batch):
            x, y = batch
            of_both[0].zero_grad()
            ddl.forward_backward(engine, generator, x, y, lambda output, y: (critic(output) - 1).square().mean())
            of_both[0].step()
            if zero:
                of_both[1].zero_grad()
                critic(y).square().mean().backward()
            else:  # a term of weights alone, the same on all ranks
                sum(p.square().sum() for p in critic.parameters()).backward()
            of_both[1].step()

        rows = TensorDataset(torch.randn(n_rows, 3), torch.randn(n_rows, 2))
        ddl.MeshEngine(update).run(ddl.auto_dataloader(rows, batch_size=5))
        return [p.detach() for p in critic.parameters()]

    refused(partial(adversaries, n_rows=5), "call ddl.forward_backward, which weights by rows", dp=2)
    of_weights = in_float64(partial(adversaries, n_rows=5, zero=False))
    for weights in on(of_weights, dp=2):
        torch.testing.assert_close(weights, of_weights(0))
