"""What used to train wrongly without a word, on models and habits that we did not write: right, or refused by name.

Each case trains a few float64 steps of SGD on ranks with different rows, a smaller last batch among them.
"""

import copy
import io
import math
import random
from collections import OrderedDict
from functools import partial

import ignite.distributed as idist
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint
from ignite.metrics import Average
from packaging.version import Version
from ranks import in_float64, mesh_of, on, on_each_rank, trainer_of
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Replicate
from torch.func import grad, vmap
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import ignite_ddl as ddl
from ignite_ddl import state
from ignite_ddl.checks.guards import check_layers, check_parameter_hooks

PLAN = {"0": ddl.Column(), "2": ddl.Row()}
generator = torch.Generator().manual_seed(1)
X = torch.randn(14, 8, generator=generator, dtype=torch.float64)
Y = torch.randn(14, 4, generator=generator, dtype=torch.float64)
CLASSES = torch.randint(4, (14,), generator=generator)
HALF_IGNORED = CLASSES.clone()
HALF_IGNORED[[0, 2, 3, 8, 9, 10, 11]] = -100


def mlp(*more):
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), *more).double()


def trained(local_rank, make=mlp, loss_fn=F.mse_loss, y=Y, divisor=None, loader=None, **options):
    """Losses of a few steps, and the weights after them."""
    torch.manual_seed(0)
    model = ddl.auto_model(make().double(), **options)
    trainer, losses = trainer_of(model, loss_fn, loss_divisor=divisor), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    loader = loader() if loader else ddl.auto_dataloader(TensorDataset(X, y), batch_size=8)
    trainer.run(loader, max_epochs=2)
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


def assert_equal(found, right):
    for losses, weights in found:
        assert losses == pytest.approx(right[0], abs=1e-12, rel=1e-12)
        assert (weights - right[1]).abs().max() <= 1e-12


# --- losses whose mean is not over rows

LOSSES = {
    "targets of -100": (F.cross_entropy, HALF_IGNORED, None),
    "ignore_index": (partial(F.cross_entropy, ignore_index=0), CLASSES, None),
    "weights of classes": (nn.CrossEntropyLoss(weight=torch.arange(1.0, 5, dtype=torch.float64)), CLASSES, None),
    "nll": (lambda o, y: F.nll_loss(o.log_softmax(1), y, ignore_index=1), CLASSES, lambda y: (y != 1).sum()),
    "sum": (nn.MSELoss(reduction="sum"), Y, None),
    "a sum, said": (lambda o, y: (o - y).square().sum() / 50, Y, "sum"),
    "ddl.cross_entropy": (ddl.cross_entropy, HALF_IGNORED, None),
    "ignored in a later batch": (F.cross_entropy, torch.where(torch.arange(14) > 10, -100, CLASSES), None),
}


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_losses_divide_by_what_they_count(axes):
    def all_of_them(local_rank):
        return [trained(0, mlp, loss_fn, y, divisor) for loss_fn, y, divisor in LOSSES.values()]

    for ranks, right in zip(zip(*on(all_of_them, **axes), strict=True), all_of_them(0), strict=True):
        assert_equal(ranks, right)


def regularised(local_rank, **options):
    torch.manual_seed(0)
    model = ddl.auto_model(mlp(), **options)

    def loss_fn(output, y):
        return F.mse_loss(output, y) + sum(p.square().sum() for p in model.parameters())

    return trainer_of(model, loss_fn).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8)).output


def test_a_regulariser_in_the_loss_is_right_over_dp():
    assert on(regularised, dp=2) == pytest.approx([regularised(0)] * 2, abs=1e-12)


class Regularised(nn.Sequential):
    """Returns its regulariser, too, as the sentence that refuses one in the loss says."""

    def forward(self, x):
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]
        return super().forward(x), sum(p.square().sum() for p in full).expand(len(x))


def regularised_by_forward(local_rank, shard=False, plan=False):
    torch.manual_seed(0)
    plan = {"0": ddl.Column(), "2": ddl.Row()} if plan else None
    model = Regularised(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    trainer, losses = (
        trainer_of(
            ddl.auto_model(model, plan, shard=shard), lambda output, y: F.mse_loss(output[0], y) + output[1].mean()
        ),
        [],
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=2)
    return losses


@pytest.mark.parametrize(("axes", "options"), [({"dp": 2}, {"shard": True}), ({"dp": 2, "tp": 2}, {"plan": True})])
def test_a_regulariser_that_forward_returns_is_right(axes, options):
    losses = on(partial(regularised_by_forward, **options), **axes)
    assert losses == [pytest.approx(regularised_by_forward(0), abs=1e-12)] * math.prod(axes.values())


def four(kind=nn.Linear):
    return nn.Sequential(*(kind(*sizes) for sizes in ((8, 8), (8, 16), (16, 8), (8, 4))))


def by_five():
    return ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5)  # 3 and 2 rows twice, then 2 and 2


def test_a_shape_that_is_new_to_one_dp_rank_only():
    """It sets up its schedule, in which FSDP2 gathers: that its peers did not know ended in a hang."""
    options = {"shard": True, "schedule": "zbv", "loader": by_five, "make": four}
    assert_equal(on(partial(trained, **options), dp=2, pp=2), trained(0, four, loader=by_five))


class Turned(nn.Linear):
    """Its output's dims stand in another order in memory, as after attention."""

    def forward(self, x):
        return super().forward(x).t().contiguous().t()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_an_output_with_dims_in_another_order_in_memory_is_sent(schedule):
    layers = partial(four, Turned)
    assert_equal(on(partial(trained, make=layers, schedule=schedule), pp=2), trained(0, layers))


# --- forwards


class More(nn.Module):
    pipeline_layers = ("a", "b")

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


class InPlace(More):
    def forward(self, x):
        return self.b(self.a(x).relu_())


class After(More):
    def forward(self, x):
        return self.b(self.a(x)) * 2


class Skip(More):
    def forward(self, x):
        return self.b(x + self.a(x))


class Straight(More):
    def forward(self, x):
        assert x.shape[1] < 100
        for layer in (self.a, self.b):
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [More, InPlace, After, Skip])
def test_a_forward_that_does_more_than_call_its_layers_is_refused(kind):
    with pytest.raises(ValueError, match=rf"{kind.__name__}.forward should call the layers .* it does something else"):
        ddl.check_model(kind(), pp=2)


def test_a_forward_that_calls_its_layers_is_taken():
    ddl.check_model(Straight(), pp=2)


class Mixed(nn.Module):
    """What stands between a Column and a Row mixes features."""

    def __init__(self, mix, inner=16):
        super().__init__()
        self.mix, self.up, self.down = mix, nn.Linear(8, 16), nn.Linear(inner, 4)

    def forward(self, x):
        return self.down(self.mix(self.up(x)))


def glu(x):
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


MIXING = {
    "softmax": (lambda x: x.softmax(-1), 16),
    "mean": (lambda x: x - x.mean(-1, keepdim=True), 16),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), 16),
    "glu": (glu, 8),
}


class Fused(nn.Module):
    """q, k and v in one layer, a gate and its values in another."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.gated, self.down = nn.Linear(8, 16), nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.down(glu(self.gated(self.out(q * k.tanh() + v))))


FUSED = {"qkv": ddl.Column(parts=(8, 8, 8)), "gated": ddl.Column(parts=2), "out": ddl.Row(), "down": ddl.Row()}


def test_fused_layers_are_cut_part_by_part():
    fused = partial(trained, make=Fused, tensor_plan=FUSED, shard=True)
    assert_equal(on(fused, dp=2, tp=2), trained(0, Fused))


def test_parts_that_tp_does_not_divide_are_refused():
    with pytest.raises(
        ValueError, match=r"parts=\(9, 7, 8\) of 'qkv' should divide its 24 outputs into parts that tp=2"
    ):
        ddl.check_model(Fused(), {"qkv": ddl.Column(parts=(9, 7, 8))}, tp=2)


class Grouped(nn.Module):
    """Attention with fewer heads of keys than of queries, whose width it says, perhaps."""

    def __init__(self, says_width, keys=2):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 2 * keys), nn.Linear(8, 4)
        if says_width:
            self.head_dim = 2

    def forward(self, x):
        q, k = (layer(x).view(len(x), -1, 2) for layer in (self.q, self.k))
        return self.out((q * k.tanh().repeat_interleave(q.shape[1] // k.shape[1], 1)).flatten(1))


class Split(nn.Module):
    """Takes q, k and v apart by their sizes in the uncut model."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = self.qkv(x).split(8, -1)
        return self.out(q * k.tanh() + v)


GROUPED = {"[qk]": ddl.Column(), "out": ddl.Row()}


def test_a_cut_through_a_head_is_refused():
    ddl.check_model(Grouped(True), GROUPED, tp=2)
    with pytest.raises(ValueError, match=r"tp=2 should divide the 1 heads of 'k' \(its Grouped has head_dim=2\)"):
        ddl.check_model(Grouped(True, keys=1), GROUPED, tp=2)
    ddl.check_model(Grouped(True, keys=1), GROUPED | {"k": ddl.Column(units=2)}, tp=2)  # no heads, they say


def test_the_cure_for_code_that_counts_on_whole_outputs():
    plan = {"qkv": ddl.Column(output_layouts=Replicate()), "out": ddl.Row(input_layouts=Replicate())}
    assert_equal(on(partial(trained, make=Split, tensor_plan=plan), tp=2), trained(0, Split))


class Conv1D(nn.Module):
    """As in transformers: a linear layer whose weight is (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class OfGPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.out = Conv1D(12, 4), Conv1D(4, 4)
        self.up, self.down = Conv1D(16, 8), Conv1D(4, 16)

    def forward(self, x):
        q, k, v = self.c_attn(x.view(len(x), 2, 4)).split(4, -1)
        return self.down((self.up(self.out(q * k.tanh() + v).flatten(1)) / 9).tanh())


def test_linear_layers_whose_weight_is_transposed():
    whole = {"c_attn": ddl.Column(output_layouts=Replicate()), "out": ddl.Row(input_layouts=Replicate())}
    plan = whole | {"up": ddl.Column(), "down": ddl.Row()}
    options = {"make": OfGPT2, "tensor_plan": plan, "shard": True}
    assert_equal(on(partial(trained, **options), dp=2, tp=2), trained(0, OfGPT2))
    for cut, message in (
        (ddl.Column(parts=3), "parts=3 is for an nn.Linear, but 'c_attn' is a Conv1D: say Column"),
        (ddl.Column(units=5), "tp=2 should divide the 5 units of 'c_attn'"),
        (ddl.Row(), "tp=2 should divide the 3 rows of the weight of 'down'"),
    ):
        model = OfGPT2()
        model.down = Conv1D(4, 3)
        with pytest.raises(ValueError, match=message):
            ddl.check_model(model, {"c_attn": cut, "down": ddl.Row()}, tp=2)


def refreshed(local_rank, state_of):
    whole, model = nn.Linear(4, 4), ddl.auto_model(nn.Linear(4, 4), {"": ddl.Column(output_layouts=Replicate())})
    ddl.MeshEngine(lambda engine, batch: whole.load_state_dict(state_of(model)) and None).run([0])
    return torch.equal(whole.weight, model.weight.full_tensor())


def test_the_state_of_a_cut_model_for_an_uncut_one_is_refused_with_a_cure_that_works():
    with pytest.raises(ValueError, match=r"an uncut model got .*give it ddl.full_state_dict\(model\)"):
        on(refreshed, nn.Module.state_dict, tp=2)
    assert on(refreshed, ddl.full_state_dict, tp=2) == [True, True]


class Code(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        code = self.enc(x).relu()
        return self.dec(code), code


def encoded(local_rank):
    model = ddl.auto_model(Code(), {"enc": ddl.Column(), "dec": ddl.Row()})
    ddl.forward_backward(ddl.MeshEngine(print), model, torch.ones(4, 6), torch.ones(4, 6), lambda o, y: o[1].sum())


def test_what_is_said_of_outputs_that_are_parts_is_a_whole_sentence():
    with pytest.raises(ValueError, match=r"Column\(use_local_output=False\) and ddl.cross_entropy\. This was in"):
        on(encoded, tp=2)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv2(self.norm(self.conv1(x)))


def explained(local_rank):
    """What torch raises in cut modules, with what is added to it."""
    told, image = [], torch.zeros(2, 1, 2, 2)
    row = ddl.auto_model(nn.Sequential(nn.Linear(8, 8)), {"0": ddl.Row()})
    channels = ddl.auto_model(Convolutions(), {"conv1": ddl.OutputChannels(), "conv2": ddl.InputChannels()})
    for model, x in ((row, torch.zeros(2, 8)), (channels, image)):
        try:
            model(x)
        except Exception as error:
            told.append(" ".join(error.__notes__))
    return told


def test_an_error_inside_a_cut_module_says_which_and_what_to_do():
    for row, norm in on(explained, tp=2):
        assert (
            "in '0', which tensor_plan cuts with Row: its input and output should be one tensor, the input this" in row
        )
        assert "cut the layer before it by ddl.Column(), or give this one input_layouts=Replicate()" in row
        assert "in 'norm', a BatchNorm2d of all channels" in norm


class Branch(nn.Module):
    """dp ranks use different weights, of ``inner`` features."""

    def __init__(self, inner):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(8, n), nn.Linear(n, 8)) for n in (8, inner))
        self.c = nn.Linear(8, 4)

    def forward(self, x):
        return self.c((self.a if ddl.get_mesh().dp_rank == 0 else self.b)(x))


class Chosen(nn.Module):
    """dp ranks call the same modules, but do not use what the same ones return."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.c((self.a(x), self.b(x))[ddl.get_mesh().dp_rank])


def choosing():
    return nn.Sequential(Chosen(), nn.Linear(4, 4))


def choosing_once(local_rank):
    model = ddl.auto_model(choosing().double(), shard=True)
    trainer_of(model).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=14))


class LaterBranch(Branch):
    def forward(self, x):
        self.n_calls = getattr(self, "n_calls", 0) + 1
        return super().forward(x) if self.n_calls == 4 else self.c(self.a(x) + self.b(x))


class LaterDrop(Branch):
    """Rank 0 leaves a layer out, rank 1 none: under DDP, rank 1 would wait for its gradient."""

    def forward(self, x):
        self.n_calls = getattr(self, "n_calls", 0) + 1
        dropped = self.n_calls == 4 and ddl.get_mesh().dp_rank == 0
        return self.c(self.a(x) if dropped else self.a(x) + self.b(x))


class FixedPoint(nn.Module):
    """A layer that is called until its output stays, which is soon or late by a rank's rows."""

    def __init__(self, agrees=False, grad=True):
        super().__init__()
        self.inject, self.layer, self.head = nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.agrees, self.grad = agrees, grad

    def forward(self, x):
        inject = self.inject(x)
        z, residual = torch.zeros_like(inject), 1.0
        with torch.set_grad_enabled(self.grad):
            while residual > 1e-3:
                before, z = z, torch.tanh(self.layer(z) + inject)
                residual = float((z - before).detach().abs().max())
                residual = idist.all_reduce(residual, "MAX") if self.agrees else residual
        return self.head(torch.tanh(self.layer(z) + inject))


def test_a_loop_that_ranks_end_together_is_right_with_sharded_weights():
    for grad_too in (True, False):
        make = partial(FixedPoint, True, grad_too)
        assert_equal(on(partial(trained, make=make, shard=True), dp=2), trained(0, make))


# --- optimizers, parameters, clipping


def early(local_rank, through):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = ddl.auto_model(model, PLAN)
    if through == "auto_optim":
        ddl.auto_optim(optimizer)
    else:
        ddl.create_supervised_trainer(model, optimizer, F.mse_loss)


def one_weight_a_stage():
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)).double()


def clipped(local_rank, make=mlp):
    model = ddl.auto_model(make())
    model.train_step(X[:4], Y[:4], lambda output, y: F.mse_loss(output, y) / 2)
    clip_grad_norm_(model.parameters(), 1.0)


def thawed(local_rank):
    model = mlp()
    model[0].weight.requires_grad_(False)
    model = ddl.auto_model(model)
    trainer = trainer_of(model)
    model.module[0].weight.requires_grad_(True)
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8))


def hooked(local_rank):
    model = mlp()
    model[0].bias.register_hook(lambda gradient: gradient)
    ddl.auto_model(model, PLAN)


@pytest.mark.parametrize(("mesh", "options"), [({"tp": 2}, {"tensor_plan": PLAN}), ({"dp": 2}, {"shard": True})])
@on_each_rank()
def test_attributes_of_parameters_stay(local_rank, options):
    model = mlp()
    model[0].bias.no_weight_decay = True
    model = ddl.auto_model(model, **options)
    assert [n for n, p in model.named_parameters() if hasattr(p, "no_weight_decay")] == ["0.bias"]


def with_batch_norm(local_rank, rows, **options):
    model = ddl.auto_model(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double(), **options)
    trainer = ddl.create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
    trainer.run(
        ddl.auto_dataloader(TensorDataset(torch.ones(4, 8).double(), torch.ones(4, 1).double()), batch_size=rows)
    )


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_a_single_row_for_a_batch_norm_is_refused(axes):
    with pytest.raises(ValueError, match="a BatchNorm in training got one value for each channel.*drop_last"):
        on(with_batch_norm, 2, **axes)
    on(with_batch_norm, 4, **axes)


# --- update functions of one's own


def penalised(local_rank, **options):
    torch.manual_seed(0)
    model = ddl.auto_model(mlp(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(engine, batch):
        x, y = batch
        x.requires_grad_()
        optimizer.zero_grad()

        def loss_fn(output, y):
            (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            return F.mse_loss(output, y) + gradient.square().sum(1).mean()

        _, loss = ddl.forward_backward(engine, model, x, y, loss_fn, loss_divisor="rows")
        optimizer.step()
        return loss.item()

    return ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5)).output


def test_a_gradient_penalty_is_right_over_dp():
    assert on(penalised, dp=2) == pytest.approx([penalised(0)] * 2, abs=1e-12)


class Slope(nn.Module):
    """Adds to its output the slope of it, which create_graph=True gives; of the second kind, torch.func does."""

    def __init__(self, func=False, detached=False):
        super().__init__()
        self.net, self.func, self.detached = mlp(), func, detached

    def forward(self, x):
        if self.func:
            slope = vmap(grad(lambda row: self.net(row).sum()))(x)
        else:
            with torch.enable_grad():
                z = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.net(z).sum(), z, create_graph=True)
        return self.net(x) + (slope.detach() if self.detached else slope)[:, :4]


OLD = pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="refused there")


@pytest.mark.parametrize("func", [False, pytest.param(True, marks=OLD)])
def test_a_first_derivative_in_forward_is_right_with_sharded_weights(func):
    slope = partial(Slope, func, True)
    assert_equal(on(partial(trained, make=slope, shard=True), dp=2), trained(0, slope))
    assert_equal(on(partial(trained, make=partial(Slope, func)), dp=2), trained(0, partial(Slope, func)))


class Sensitive(nn.Module):
    """Returns how the output changes with the input, by a derivative in forward mode."""

    def __init__(self, how):
        super().__init__()
        self.net, self.how = mlp(), how

    def forward(self, x):
        return self.net(x) + self.how(self.net, x)


def by_dual(net, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def by_dual_of_constants(net, x):
    with torch.no_grad():
        return by_dual(net, x)


def by_jvp(net, x):
    return torch.func.jvp(net, (x,), (torch.ones_like(x),))[1]


def by_jvp_of_gradient(net, x):
    return torch.func.jvp(grad(lambda z: net(z).sum()), (x,), (torch.ones_like(x),))[1][:, :4]


@pytest.mark.parametrize("how", [pytest.param(by_jvp, marks=OLD), by_dual_of_constants])
def test_a_derivative_in_forward_mode_is_right_with_sharded_weights(how):
    make = partial(Sensitive, how)
    assert_equal(on(partial(trained, make=make, shard=True), dp=2), trained(0, make))


class OfSequences(nn.Module):
    """A recurrent network of padded sequences, each as long as its row says."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.GRU(1, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        lengths = (x[:, 0] > 0) * 3 + 5
        packed = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(2), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.recurrent(packed)[1][0])


def test_packed_sequences_reach_sharded_layers():
    assert_equal(on(partial(trained, make=OfSequences, shard=True), dp=2), trained(0, OfSequences))


def gan(local_rank, axes):
    torch.manual_seed(0)
    plan = PLAN if "tp" in axes else None
    make = ddl.auto_model(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double(), plan)
    judge = ddl.auto_model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(), plan)
    makers, judges = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (make, judge))
    loss_fn = F.binary_cross_entropy_with_logits

    def update(engine, batch):
        noise, real = batch
        ones = torch.ones(len(noise), 1, dtype=torch.float64)
        judges.zero_grad()
        ddl.forward_backward(engine, judge, real, ones, loss_fn, last=False)
        _, of_judge = ddl.forward_backward(engine, judge, make(noise).detach(), 0 * ones, loss_fn)
        judges.step()
        makers.zero_grad()
        _, of_maker = ddl.forward_backward(engine, make, noise, ones, lambda made, y: loss_fn(judge(made), y))
        makers.step()
        return of_judge.item(), of_maker.item()

    return ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5), 2).output


@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_two_models_and_two_optimizers(axes):
    """5 rows on 4 ranks, and a last batch of 4: a rank without rows takes part."""
    for found in on(gan, axes, **axes):
        assert found == pytest.approx(gan(0, {}), abs=1e-12)


def by_hand(local_rank):
    model = ddl.auto_model(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(engine, batch):
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=7))


# --- data, metrics, state


class Rows(Dataset):
    def __init__(self, draws):
        self.draws = draws

    def __len__(self):
        return 14

    def __getitem__(self, row):
        return X[row] + (random.random() if self.draws else 0), Y[row]


def seeded(loader):
    random.seed(idist.get_rank())
    return loader()


LOADERS = (
    lambda: idist.auto_dataloader(Rows(False), batch_size=8),
    partial(seeded, lambda: ddl.auto_dataloader(Rows(True), batch_size=8)),
)


class ByRank(IterableDataset):
    def __iter__(self):
        return iter(range(idist.get_rank(), 20, 2))


def read(local_rank):
    return [batch.tolist() for batch in ddl.auto_dataloader(ByRank(), batch_size=6)]


@on_each_rank(tp=2)
def test_metrics_on_a_plain_engine_count_rows_once(local_rank):
    ddl.auto_model(mlp(), PLAN)
    metric = Average()
    metric.attach(Engine(lambda engine, batch: batch), "mean")
    metric.reset()
    metric.update(1.0)
    metric.compute()
    assert metric.num_examples == 1  # after the reduction over ranks, which is over dp, of one rank


def saved(local_rank, folder="not made", **options):
    model = ddl.auto_model(mlp(), **options)
    trainer = trainer_of(model)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"model": model}, folder))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8))


def test_ignites_checkpoint_of_a_whole_model_is_saved(tmp_path):
    on(saved, tmp_path, dp=2)
    assert list(tmp_path.glob("*.pt"))


@on_each_rank(dp=2)
def test_the_state_of_a_compiled_model_has_plain_names(local_rank):
    compiled = torch.compile(ddl.auto_model(mlp()), backend="eager")
    assert list(ddl.full_state_dict(compiled)) == list(mlp().state_dict())


def on_one_rank(local_rank, caller):
    state.WAIT_SECONDS = 1
    model = ddl.auto_model(mlp())
    if local_rank == caller:
        ddl.full_state_dict(model)
    idist.barrier()


@pytest.mark.parametrize("caller", [0, 1])
def test_the_state_asked_for_on_one_rank_only_is_an_error_and_no_hang(caller):
    with pytest.raises(
        (ValueError, RuntimeError), match="full_state_dict should be called on every rank|onnection|barrier"
    ):
        on(partial(on_one_rank, caller=caller), pp=2)


# --- refused, with what to say instead


class Tied(nn.Module):
    """Reads the weight of a layer."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 4)

    def forward(self, x):
        return F.linear(self.up(x), self.up.weight.t())[:, :4]


class Centred(nn.Conv2d):
    """Reads its own weight."""

    def forward(self, x):
        return F.conv2d(x, self.weight - self.weight.mean(), self.bias)


def centred():
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), Centred(2, 4, 1), nn.Conv2d(4, 1, 1), nn.Flatten())


UP_DOWN = {"up": ddl.Column(), "down": ddl.Row()}
SUM = partial(trained, loss_fn=lambda o, y: (o - y).square().sum())
OF_FEWER_ROWS = partial(trained, loss_fn=lambda o, y: (o[1:] - y[1:]).square().mean())
NO_MEAN = "loss_fn should be a mean over rows, but gives .* pass loss_divisor="
MIXES = "the code before 'down' mixes features that tensor_plan has cut"
COUNTS = r"This was in 'block', which .* give ddl.Column\(units=<number of heads>\)"
UNLIKE = "dp ranks should call the same modules in a step"
EARLY = "holds '0.weight' as it was before ddl.auto_model cut it: make it after"
PART = r"Ignite's Checkpoint would save or load rank 0's part .* ddl.full_state_dict"
FORWARD = {f"net.{name}": style for name, style in PLAN.items()}
TWICE = "second derivatives .* are not supported through"


def of_block(make, plan):
    cut = {f"block.{name}": style for name, style in plan.items()}
    return partial(trained, make=lambda: nn.Sequential(OrderedDict(block=make())), tensor_plan=cut)


def branching(make=Branch, inner=8, **options):
    return partial(trained, make=partial(make, inner), **options)


@pytest.mark.parametrize(
    ("function", "axes", "words"),
    [
        (SUM, {"dp": 2}, NO_MEAN),
        (SUM, {"pp": 2}, NO_MEAN),
        (OF_FEWER_ROWS, {"dp": 2}, NO_MEAN),
        (OF_FEWER_ROWS, {"pp": 2}, NO_MEAN),
        (regularised, {"pp": 2}, "loss_fn uses weights besides the model's output"),
        *(
            (partial(trained, make=partial(Mixed, *mix), tensor_plan=UP_DOWN), {"tp": 2}, MIXES)
            for mix in MIXING.values()
        ),
        (
            partial(trained, make=Fused, tensor_plan=FUSED | {"qkv": ddl.Column(), "gated": ddl.Column()}),
            {"tp": 2},
            "the code before 'out' mixes features",
        ),
        (of_block(partial(Grouped, False, keys=1), GROUPED), {"tp": 2}, COUNTS),
        (of_block(Split, {"qkv": ddl.Column(), "out": ddl.Row()}), {"tp": 2}, COUNTS),
        (of_block(Split, {"qkv": ddl.Column(parts=3), "out": ddl.Row()}), {"tp": 2}, COUNTS),
        (branching(shard=True), {"dp": 2}, UNLIKE),
        (branching(shard=True, inner=30), {"dp": 2}, UNLIKE),
        (partial(trained, make=FixedPoint, shard=True), {"dp": 2}, UNLIKE),
        (partial(trained, make=partial(FixedPoint, grad=False), shard=True), {"dp": 2}, UNLIKE),
        (branching(), {"dp": 2}, UNLIKE),
        (partial(trained, make=choosing, shard=True), {"dp": 2}, UNLIKE),
        (choosing_once, {"dp": 2}, UNLIKE),
        (partial(trained, make=choosing), {"dp": 2, "pp": 2}, UNLIKE),
        (branching(inner=30, tensor_plan={"a.0": ddl.Column(), "a.1": ddl.Row()}), {"dp": 2, "tp": 2}, UNLIKE),
        (branching(LaterBranch), {"dp": 2}, "this rank did not use '[ab].0.weight'"),
        (branching(LaterDrop), {"dp": 2}, "this rank did not use 'b.0.weight'"),
        (branching(LaterBranch, shard=True), {"dp": 2}, UNLIKE),
        (branching(LaterDrop, shard=True), {"dp": 2}, UNLIKE),
        (partial(early, through="auto_optim"), {"tp": 2}, EARLY),
        (partial(early, through="trainer"), {"tp": 2}, EARLY),
        (partial(regularised, shard=True), {"dp": 2}, "this is a weight that is cut over ranks, .* let forward return"),
        (partial(regularised, tensor_plan=PLAN), {"tp": 2}, "this is a weight that is cut over ranks, .* let forward"),
        (partial(trained, make=Tied, tensor_plan={"up": ddl.Column()}), {"tp": 2}, "call the layer that holds the"),
        (
            partial(trained, make=centred, tensor_plan={"1": ddl.OutputChannels(), "2": ddl.InputChannels()}),
            {"tp": 2},
            "leave '1', whose forward reads its weight, out of tensor_plan",
        ),
        *(
            (partial(clipped, make=make), {"pp": 2}, r"computes the norm of this rank's part .* ddl.clip_grad_norm_")
            for make in (mlp, one_weight_a_stage)
        ),
        (thawed, {"dp": 2}, "'0.weight' was frozen when ddl.auto_model wrapped the model in DDP"),
        (hooked, {"tp": 2}, "'0.bias' has a hook, which would get this rank's gradient"),
        (partial(penalised, shard=True), {"dp": 2}, TWICE),
        (partial(penalised, tensor_plan=PLAN), {"tp": 2}, TWICE),
        (partial(trained, make=Slope, shard=True), {"dp": 2}, TWICE),
        (partial(trained, make=partial(Sensitive, by_dual), shard=True), {"dp": 2}, "This was .* torch.func.jvp"),
        (partial(trained, make=partial(Sensitive, by_dual), tensor_plan=FORWARD), {"tp": 2}, "take a mesh of dp alone"),
        (partial(trained, make=partial(Sensitive, by_jvp), tensor_plan=FORWARD), {"tp": 2}, "take a mesh of dp alone"),
        (
            partial(trained, make=partial(Sensitive, by_jvp_of_gradient), shard=True),
            {"dp": 2},
            "(without|leave out) shard=True",
        ),
        (partial(trained, make=partial(Slope, True), shard=True), {"dp": 2}, f"{TWICE}|leave out shard=True"),
        (by_hand, {"dp": 2}, "this rank has . of the batch's 7 rows.*call ddl.forward_backward"),
        *(
            (partial(trained, loader=loader, tensor_plan=PLAN), {axis: 2}, f"{axis} peers should get the same rows")
            for loader in LOADERS
            for axis in ("pp", "tp")
        ),
        (read, {"dp": 2}, "dataset should give every rank the same samples"),
        (saved, {"pp": 2}, PART),
        (partial(saved, tensor_plan=PLAN), {"tp": 2}, PART),
        (partial(saved, shard=True), {"dp": 2}, PART),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_with_what_to_do(function, axes, words):
    with pytest.raises(ValueError, match=words):
        on(function, **axes)


def dropping_loop(local_rank):
    """Of one's own, whose steps nothing checks."""
    model = ddl.auto_model(LaterDrop(8).double(), shard=True)
    for _ in range(4):
        F.mse_loss(model(X), Y).backward()


def test_sharded_dp_ranks_that_stop_using_the_same_weights_fail():
    with pytest.raises(ddl.RankError, match="ranks called different collectives.*how often a loop in forward"):
        on(dropping_loop, dp=2)


@on_each_rank(dp=2)
def test_a_plain_state_dict_is_not_loaded_into_ddp_by_its_names(local_rank):
    model, plain = ddl.auto_model(mlp()), mlp()
    for strict in (True, False):
        with pytest.raises(ValueError, match="state has the names of the plain model, .* call ddl.load_full"):
            model.load_state_dict(plain.state_dict(), strict=strict)
    ddl.load_full_state_dict(model, plain.state_dict())
    assert torch.equal(model.module[0].weight, plain[0].weight)
    model.load_state_dict(copy.deepcopy(model).state_dict())
    nested = ddl.auto_model(nn.Sequential(OrderedDict(module=nn.Linear(2, 2))))
    with pytest.raises(ValueError, match="state has the names of the plain model"):
        nested.load_state_dict(nested.module.state_dict(), strict=False)


@on_each_rank(tp=2)
def test_a_model_is_cut_in_inference_mode(local_rank):
    with torch.inference_mode():
        net = mlp()
        right = net(X)
        assert torch.allclose(ddl.auto_model(net, PLAN)(X), right)


class Autoencoder(nn.Module):
    """Its decoder uses the encoder's weight, transposed."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.dec, self.how = nn.Linear(3, 4), nn.Linear(4, 3), how
        if how == "view":
            self.dec.weight = nn.Parameter(self.enc.weight.t())
        if how == "buffer":
            self.dec.register_buffer("w", self.enc.weight.detach())
        if how == "attribute":
            self.dec.w = self.enc.weight.detach()
        if how == "list":
            self.dec.w = [self.enc.weight]
        if how in ("buffer", "attribute", "list", "parameter"):
            del self.dec.weight
        self.dec = Decoder(self.dec, self.enc.weight) if how == "parameter" else self.dec

    def forward(self, x):
        h = self.enc(x).tanh()
        if self.how in ("view", "parameter"):
            return self.dec(h)
        w = self.dec.w[0] if self.how == "list" else self.dec.w
        return h @ w + self.dec.bias


class Decoder(nn.Module):
    def __init__(self, layer, weight):
        super().__init__()
        self.weight, self.bias = weight, layer.bias

    def forward(self, h):
        return F.linear(h, self.weight.t(), self.bias)


@in_float64
def losses_of_autoencoder(local_rank, how, shard):
    x, losses = torch.randn(10, 3, generator=torch.Generator().manual_seed(1)), []
    plan = {} if ddl.get_mesh().tp_size > 1 else None
    trainer = trainer_of(ddl.auto_model(Autoencoder(how), plan, shard=shard))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(x, x**2), batch_size=4), max_epochs=2)
    return losses


@pytest.mark.parametrize("how", ["view", "buffer", "attribute", "list"])
def test_weights_that_share_memory_unseen_are_refused_where_they_would_not_stay_so(how):
    words = "as it was before ddl.auto_model" if how == "list" else "has the memory of 'enc.weight', as a view of it"
    with pytest.raises(ValueError, match=words):
        on(losses_of_autoencoder, how, True, dp=2)
    alone = losses_of_autoencoder(0, how, False)
    assert on(losses_of_autoencoder, how, False, dp=2) == [pytest.approx(alone, abs=1e-12)] * 2


class Holder:
    """An object that a model uses."""


def with_a_view(place):
    model = mlp()
    first, holder, view = model[0], Holder(), model[0].weight.detach()
    if place == "frozen":
        model[2] = nn.Linear(8, 16)
        model[2].weight = nn.Parameter(view, requires_grad=False)
    elif place == "closure":
        first.view = lambda: view
    elif place == "object":
        first.view, holder.view = holder, view
    else:
        first.view = {"dict": {"view": view}, "nested": [[view[2:]]], "array": view.numpy()[::2]}[place]
    return model


@pytest.mark.parametrize("place", ["frozen", "closure", "object", "dict", "nested", "array"])
def test_memory_of_weights_is_seen_wherever_a_model_has_it(place):
    with pytest.raises(ValueError, match="has the memory of '0.weight', as a view of it"):
        check_layers(with_a_view(place), mesh_of(dp=2), plain=False)


def test_frozen_weights_that_share_memory_are_refused():
    model = mlp()
    model.a, model.b = nn.Linear(8, 8), nn.Linear(8, 8)
    model.b.weight = nn.Parameter(model.a.weight.detach().t())
    for layer in (model.a, model.b):
        layer.requires_grad_(False)
    with pytest.raises(ValueError, match="'b.weight' has the memory of 'a.weight', as a view of it"):
        check_layers(model, mesh_of(dp=2), plain=False)
    model.b = nn.Linear(8, 8)
    model.cached = model.a.weight.t()  # of a frozen one
    check_layers(model, mesh_of(dp=2), plain=False)


def test_memory_that_weights_do_not_share():
    model, fused = mlp(), torch.randn(16, 16)
    model.a, model.b = (nn.Linear(8, 16) for _ in range(2))
    model.a.weight, model.b.weight = map(nn.Parameter, fused.chunk(2, 1))  # columns of one matrix
    model.c = nn.utils.spectral_norm(nn.Linear(8, 16))
    model.sizes = {"self": model, "weights": [*model.parameters()]}
    model.sizes["own"] = model.sizes
    check_layers(model, mesh_of(dp=2), plain=False)
    array = np.ones((6, 4), np.float32)
    model.d = nn.Linear(4, 3)
    model.d.weight = nn.Parameter(torch.from_numpy(array[:3]))
    model.register_buffer("rest", torch.from_numpy(array)[3:])
    check_layers(model, mesh_of(dp=2), plain=False)
    model.rest = torch.from_numpy(array)  # of a longer memory than the weight has
    with pytest.raises(ValueError, match="'rest' has the memory of 'd.weight'"):
        check_layers(model, mesh_of(dp=2), plain=False)
    del model.rest
    model.a.fused = fused
    with pytest.raises(ValueError, match="'a.fused' has the memory of 'a.weight'"):
        check_layers(model, mesh_of(dp=2), plain=False)


@pytest.mark.parametrize(("shard", "axes"), [(True, {"dp": 2}), (False, {"dp": 2, "tp": 2})], ids=str)
def test_a_parameter_of_two_modules_is_the_cure(shard, axes):
    alone = losses_of_autoencoder(0, "parameter", False)
    assert all(
        of_rank == pytest.approx(alone, abs=1e-12) for of_rank in on(losses_of_autoencoder, "parameter", shard, **axes)
    )


@on_each_rank(dp=2)
def test_a_parameter_that_was_taken_before_the_model_was_cut_is_refused(local_rank):
    model = mlp()
    kept = list(model.parameters())
    model = ddl.auto_model(model, shard=True)
    assert sum(p.numel() for p in kept) == sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(list(model.parameters())[:1], lr=0.1)
    for use in (
        lambda: kept[0].requires_grad_(False),
        lambda: optimizer.add_param_group({"params": kept[1:]}),
        lambda: clip_grad_norm_(kept, 1.0),
    ):
        with pytest.raises(ValueError, match="as it was before ddl.auto_model, .* take parameters from the returned"):
            use()


@on_each_rank(pp=2)
def test_values_of_the_given_net_are_refused_once_a_stage_has_been_trained(local_rank):
    x, net = X[:2], mlp()
    right = net(x)
    model = ddl.auto_model(net)
    with torch.no_grad():
        assert net(x).equal(right)
        assert copy.deepcopy(net)(x).equal(right)
    views = [p.detach() for p in net.parameters()] + [p.data[:1] for p in net.parameters()]
    assert sum(float(view.norm()) for view in views) > 0
    copies = [view.clone() for view in views]
    optimizer = ddl.auto_optim(torch.optim.SGD([p for k, p in model.named_parameters() if "bias" in k], lr=0.5))
    ddl.create_supervised_trainer(model, optimizer, F.mse_loss).run([(X, Y)])
    assert sum(float(one.norm()) for one in copies) > 0
    other = next(p for k, p in net.named_parameters() if k not in model.state_dict())
    assert "as it was before ddl.auto_model" in repr(other)
    for use in (
        lambda: net(x),
        lambda: [torch.zeros_like(p).lerp_(p, 0.5) for p in net.parameters()],
        lambda: [p.data.norm() for p in net.parameters()],
        lambda: torch.save(net.state_dict(), io.BytesIO()),
        lambda: copy.deepcopy(net),
        lambda: [view.norm() for view in views],
        lambda: other.flatten()[0].item(),
        lambda: other[0].sum().item(),
        lambda: 1 - other,
        lambda: f"{other}",
        lambda: np.asarray(other.detach()),
    ):
        with pytest.raises(ValueError, match="as it was before .* ddl.full_state_dict"), torch.no_grad():
            use()
    for p in net.parameters():  # each rank writes to its own
        p.data.fill_(9)
        p.data[:] = local_rank
    assert {name: float(value.max()) for name, value in ddl.full_state_dict(model).items()} == {
        f"{i}.{kind}": i / 2 for i in (0, 2) for kind in ("weight", "bias")
    }


@on_each_rank(pp=2)
def test_a_net_with_a_frozen_stage_is_copied_before_training(local_rank):
    net = mlp()
    net[2].requires_grad_(False)
    right = net(X)
    ddl.auto_model(net)
    assert copy.deepcopy(net)(X).equal(right)


class Odd(nn.Linear):
    def __init__(self, what):
        super().__init__(3, 2)
        if what == "sparse":
            self.register_buffer("odd", torch.eye(3).to_sparse())
        else:
            self.odd = nn.Parameter(torch.empty(0, 3))


@on_each_rank(dp=2)
def test_tensors_that_torch_does_not_send_are_refused(local_rank):
    for what, words in (
        ("sparse", r"'odd' is sparse .*its indices and"),
        ("empty", r"'odd' has no elements, \(0, 3\)"),
    ):
        with pytest.raises(ValueError, match=words):
            ddl.auto_model(Odd(what), shard=True)
    frozen = Odd("empty")
    frozen.odd.requires_grad_(False)
    assert ddl.auto_model(frozen, shard=True)(torch.ones(2, 3)).shape == (2, 2)


def test_a_hook_that_only_logs_sees_no_gradient_of_a_check():
    weight, seen = nn.Parameter(torch.ones(3)), []

    def log(gradient):
        seen.append(gradient.norm())

    weight.register_hook(log)
    for _ in range(3):  # steps
        check_parameter_hooks([("weight", weight)], mesh_of(dp=2), by_ddp=True)
    assert not seen


def test_a_hook_is_tried_with_nan_in_its_dtype_and_anew(capsys):
    def check(hook, dtype=torch.float32):
        weight = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        weight.register_hook(hook)
        for later in (False, True):
            step["later"] = later
            check_parameter_hooks([("weight", weight)], mesh_of(dp=2), by_ddp=True)

    def says(gradient):
        if gradient.isnan().any():
            print("NaN")
            raise ValueError("NaN")
        return gradient * 3

    step = {}
    for hook in (torch.nan_to_num, lambda gradient: gradient.clamp(-1, 1) if step["later"] else gradient * 2):
        with pytest.raises(ValueError, match="'weight' has a hook"):
            check(hook)
    check(says)
    check(lambda gradient: gradient * 0.1, torch.bfloat16)
    assert not capsys.readouterr().out
