"""Weights that FSDP2 gathers: outside of a step, nobody gets or changes the gathered copies, or reads freed ones."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Events
from ranks import assert_right, in_float64, launch, run
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import ignite_ddl as ddl

PLAN = {"0": ddl.Column(), "2": ddl.Row()}
ON_TWO_AXES = {"dp": 2, "tp": 2}, {}
GATHERED = {"dp": 2}, {"shard": True, "reshard_after_forward": False}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rows():
    torch.manual_seed(1)
    x = torch.randn(20, 4)
    return TensorDataset(x, x[:, :2].sin())


def plan():
    return PLAN if ddl.get_mesh().tp_size > 1 else None


@in_float64
def losses(local_rank, model=None, after=None, options=None, look=False, cut=None, **trained):
    options = {"tensor_plan": cut or plan()} | (options or {})
    model = ddl.auto_model(net() if model is None else model(), **options)
    if look:
        model(rows().tensors[0][:4])
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, trained.pop("loss_fn", F.mse_loss), **trained)
    found = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: found.append(trainer.state.output))
    if after is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: after(model))
    trainer.run(ddl.auto_dataloader(rows(), batch_size=8), max_epochs=2)
    return found


def clamps_after_a_pass(model):
    model(rows().tensors[0][:2]).mean().item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


@pytest.mark.parametrize(("axes", "options"), [ON_TWO_AXES, GATHERED], ids=str)
@pytest.mark.parametrize("habit", [{"after": clamps_after_a_pass}, {"look": True}], ids=["clamped", "looked at"])
def test_weights_are_sharded_again_after_a_pass_without_backward(axes, options, habit):
    alone = losses(0, **habit)
    for found in launch(axes, lambda local_rank: losses(local_rank, options=options, **habit)):
        assert found == pytest.approx(alone, rel=1e-12)


@in_float64
def of_a_teacher(local_rank):
    teacher = ddl.auto_model(net(), plan())
    teacher.requires_grad_(False)

    def prepare(batch, device, non_blocking):
        with torch.no_grad():
            return batch[0], teacher(batch[0].flip(1))

    def follow(model):
        for mean, weight in zip(teacher.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(weight.data, 0.05)

    return losses(local_rank, after=follow, prepare_batch=prepare)


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_teacher_that_prepares_batches_follows_its_student(axes):
    """Checks try the function that calls it."""
    alone = of_a_teacher(0)
    for found in launch(axes, of_a_teacher):
        assert found == pytest.approx(alone, rel=1e-12)


def of_a_sharded_teacher(local_rank, place):
    """Losses and outputs of uneven batches, whose last one has no row for a rank."""
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()  # noqa: E731
    model, teacher = (ddl.auto_model(make(), shard=True) for _ in range(2))
    teacher.requires_grad_(False)
    rows = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = ddl.auto_dataloader(TensorDataset(rows, rows.flip(1)), batch_size=3)
    optimizer, found = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1)), []
    if place == "output_transform":
        distance = lambda x, y, output: (teacher(output) - teacher(x)).square().mean()  # noqa: E731
        engine = ddl.create_supervised_evaluator(model, output_transform=distance)
    else:
        options = {
            "prepare_batch": lambda batch, *_, **__: (batch[0], teacher(batch[1])),
            "model_transform": lambda output: teacher(output),
        }
        given = {place: options[place]}
        engine = ddl.create_supervised_trainer(model, optimizer, nn.functional.mse_loss, **given)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: found.append(engine.state.output))
    engine.run(loader)
    return found or int(engine.state.iteration)


@pytest.mark.parametrize("place", ["prepare_batch", "model_transform", "output_transform"])
def test_a_sharded_teacher_is_called_equally_often_by_ranks_with_unlike_rows(place):
    alone = of_a_sharded_teacher(0, place)
    for found in launch({"dp": 2}, of_a_sharded_teacher, place):
        assert found == pytest.approx(alone, rel=1e-12)


class ReturnsItsWeight(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight


class ReturnsAWeight(nn.Module):
    """One of its own, such as a learned variance, expanded; and one of a layer that FSDP2 gathers by itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.log_variance = nn.Linear(4, 8), ReturnsItsWeight(8, 2), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        y, weight = self.b(self.a(x).tanh())
        return y, self.log_variance.expand(len(x)), weight.square().sum().expand(len(x))


def of_a_weight(output, y):
    y_hat, log_variance, squares = output
    return ((y_hat - y).square().sum(1) * (-log_variance).exp() + log_variance + 0.1 * squares).mean()


@pytest.mark.parametrize(("axes", "shard"), [({"dp": 2}, True), ({"dp": 2, "tp": 2}, False)], ids=str)
def test_a_weight_that_a_model_returns_is_read_after_its_memory_is_freed(axes, shard):
    """That ended the process where checks or a pass without a step had freed it."""
    options = {"shard": shard, "tensor_plan": {}}
    train = partial(losses, model=ReturnsAWeight, look=True, loss_fn=of_a_weight)
    alone = train(0)
    for found in launch(axes, partial(train, options=options)):
        assert found == pytest.approx(alone, rel=1e-12)


class Tied(nn.Module):
    """Gathers a weight of another unit by hand, once for a regulariser and once for what it computes of rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        full = self.a.weight.full_tensor() if isinstance(self.a.weight, DTensor) else self.a.weight
        squares = self.b.weight.square().sum()
        squares = squares.full_tensor() if isinstance(squares, DTensor) else squares
        return F.linear(self.b(self.a(x).tanh()), full)[:, :2], squares.expand(len(x))


OF_TIED = {"a": ddl.Column(), "b": ddl.Row()}


def of_tied(output, y):
    return F.mse_loss(output[0], y) + 0.1 * output[1].mean()


@pytest.mark.parametrize(
    ("mesh", "shard"),
    [
        ({"dp": 2}, True),
        ({"dp": 4, "dp_replicate": 2}, True),
        ({"dp": 3}, True),
        ({"dp": 2, "tp": 2}, False),
        ({"dp": 2, "tp": 2}, True),
    ],
    ids=str,
)
def test_a_gathered_weight_has_the_gradient_of_all_rows(mesh, shard):
    """full_tensor() takes the gradient to be the same on all ranks, but each has that of its own rows."""
    right = losses(0, Tied, loss_fn=of_tied)
    train = partial(
        losses, model=Tied, options={"shard": shard}, loss_fn=of_tied, cut=OF_TIED if "tp" in mesh else None
    )
    found = run(train, mesh["dp"] * mesh.get("tp", 1), **mesh)
    assert all(of_rank == pytest.approx(right, abs=1e-12) for of_rank in found)


class ScaledByAWeight(Tied):
    def forward(self, x):
        return self.b(self.a(x).tanh())[:, :2] * self.a.weight.detach().abs().sum().item()


@pytest.mark.parametrize("shard", [False, True])
def test_a_number_of_a_part_is_refused_after_the_layer_has_run(shard):
    """The weight is gathered over dp then, and its mesh is that of tp alone."""

    def evaluated(local_rank):
        model = ddl.auto_model(ScaledByAWeight(), OF_TIED, shard=shard, checks=False)
        return model(torch.ones(2, 4))

    with pytest.raises(ddl.RankError, match="this number is computed from this rank's part of a weight"):
        launch({"dp": 2, "tp": 2}, evaluated)


class Limited(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if x.abs().max() > 9:
            raise FloatingPointError
        return x + self.layer(x).tanh()


@in_float64
def with_errors_that_are_caught(local_rank, **options):
    torch.manual_seed(0)
    model = ddl.auto_model(nn.Sequential(Limited(), Limited()), **options)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []

    def update(engine, batch):
        optimizer.zero_grad()
        losses.append(ddl.forward_backward(engine, model, batch, batch**2, F.mse_loss)[1].item())
        with pytest.raises(FloatingPointError):  # of the second block
            model(torch.full_like(batch, 8.9))
        optimizer.step()

    ddl.MeshEngine(update).run(ddl.auto_dataloader(torch.randn(12, 4), batch_size=4))
    return losses, torch.cat([p.flatten() for p in ddl.full_state_dict(model).values()])


def test_a_forward_pass_whose_error_a_script_catches():
    assert_right(partial(with_errors_that_are_caught, tensor_plan={}), dp=2, tp=2)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise FloatingPointError


class Failing(nn.Module):
    place = None

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.layers[1](self.layers[0](x).tanh()).tanh()
        if self.place == "forward":
            raise FloatingPointError
        return self.layers[2](FailsInBackward.apply(x) if self.place == "backward" else x)


@in_float64
def without_batches_that_fail(local_rank, **options):
    torch.manual_seed(0)
    model = ddl.auto_model(Failing(), **options)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5))
    losses, places = [], iter([None, "forward", "backward", "loss", None, None])

    def loss_fn(output, target):
        if Failing.place == "loss":
            raise FloatingPointError
        return F.mse_loss(output, target)

    def update(engine, batch):
        Failing.place = next(places)
        try:
            losses.append(ddl.forward_backward(engine, model, batch, batch**2, loss_fn)[1].item())
            optimizer.step()
        except FloatingPointError:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
        optimizer.zero_grad()

    ddl.MeshEngine(update).run(ddl.auto_dataloader(torch.randn(24, 4), batch_size=4))
    Failing.place = "forward"
    with torch.no_grad(), pytest.raises(FloatingPointError):
        model(torch.ones(2, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return losses, torch.cat([p.flatten() for p in ddl.full_state_dict(model).values()])


@pytest.mark.parametrize("shard", [False, True])
def test_batches_that_fail_and_that_a_script_leaves_out(shard):
    assert_right(partial(without_batches_that_fail, shard=shard), dp=2)
