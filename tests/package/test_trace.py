"""Models that are not sequential, cut by torch's tracing front end; each of its traps is right here, or refused."""

import copy

import pytest
import torch
from ranks import on_each_rank, trainer_of
from torch import nn
from torch.utils.data import TensorDataset

import ignite_ddl as ddl

BEFORE = ["down2", "middle", "up"]


class UNet(nn.Module):
    """Skip connections, a dict as input and output, a constant, a tied weight, a parameter without use.

    With dropout it has BatchNorm too, whose statistics are those of a microbatch.
    """

    def __init__(self, dropout=0.0):
        super().__init__()
        self.down1 = nn.Conv2d(1, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        norm = nn.BatchNorm2d(8) if dropout else nn.GroupNorm(2, 8)
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm, nn.ReLU(inplace=True))
        self.drop = nn.Dropout(dropout)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.again = nn.Conv2d(4, 4, 1, bias=False)
        self.head = nn.Conv2d(4, 4, 1, bias=False)
        self.head.weight = self.again.weight
        self.unused = nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0]), persistent=False)

    def forward(self, x):
        first = self.again(self.down1(x["image"]).tanh())
        second = self.down2(first).tanh()
        up = self.up(second + self.drop(self.middle(second)))
        out = self.head(up + first) * self.scale[1] * torch.tensor(0.5)
        return {"out": out, "weighted": out.mean((1, 2, 3)) * x["weight"]}


def unet(dropout=0.0):
    torch.manual_seed(0)
    return UNet(dropout).double()


def rows(n):
    draw = torch.Generator().manual_seed(n)
    image = torch.randn(n, 8, 8, 1, dtype=torch.double, generator=draw).permute(0, 3, 1, 2)  # not contiguous
    return {"image": image, "weight": torch.rand(n, dtype=torch.double, generator=draw)}


def loss_of(output, y):
    return (output["out"] - y).square().mean() + output["weighted"].square().mean()


@pytest.mark.parametrize(
    ("schedule", "mesh", "options"),
    [
        ("zbv", {"pp": 2}, {}),
        pytest.param("1f1b", {"pp": 2, "dp": 2}, {"shard": True}, marks=pytest.mark.slow),
        pytest.param("1f1b", {"pp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("interleaved_1f1b", {"pp": 2, "dp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("gpipe", {"pp": 4}, {}, marks=pytest.mark.slow),
        pytest.param("1f1b", {"dp": 2}, {"find_unused_parameters": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_each_rank()
def test_a_unet_trains_as_on_one_process(local_rank, schedule, options):
    """Three steps, the last of 5 rows, and an evaluation."""
    one, x = unet(), rows(21)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
    for first in range(0, 21, 8):
        optimizer.zero_grad()
        loss = loss_of(one({k: v[first : first + 8] for k, v in x.items()}), 1.0)
        loss.backward()
        optimizer.step()

    layers = ddl.trace_layers(unet(), rows(4), before=BEFORE if schedule != "1f1b" else ["middle"])
    pipeline = ddl.auto_model(layers, schedule=schedule, n_microbatches=4, **options)

    def prepare(batch, device, non_blocking):
        return {"image": batch[0], "weight": batch[1]}, batch[2]

    trainer = trainer_of(pipeline, loss_of, lr=0.5, prepare_batch=prepare)
    data = TensorDataset(x["image"], x["weight"], torch.ones(21, 4, 8, 8, dtype=torch.double))
    trainer.run(ddl.auto_dataloader(data, batch_size=8))
    assert abs(trainer.state.output - loss.item()) < 1e-12
    weights = {name.partition(".")[2]: t for name, t in ddl.full_state_dict(pipeline).items()}
    state = one.state_dict()
    assert set(weights) | {"head.weight", "again.weight"} == set(state)
    assert max((t - state[name]).abs().max() for name, t in weights.items()) < 1e-12
    pipeline.eval()
    assert (pipeline(rows(3))["out"] - one.eval()(rows(3))["out"]).abs().max() < 1e-12


def test_traced_layers_are_the_model_in_both_modes():
    model = unet(dropout=0.5)
    layers, x = ddl.trace_layers(model, rows(4), before=BEFORE), rows(6)
    assert {id(p) for p in layers.parameters()} == {id(p) for p in model.parameters()}
    for training in (True, False):
        model.train(training), layers.train(training)
        reference = copy.deepcopy(model)
        torch.manual_seed(1)
        expected = reference(x)
        torch.manual_seed(1)
        found = layers(x)
        assert torch.equal(found["out"], expected["out"])
        loss_of(expected, 0.0).backward()
        loss_of(found, 0.0).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == name.startswith("unused")
            assert p.grad is None or torch.equal(p.grad, q.grad), name
        for (name, b), c in zip(model.named_buffers(), reference.named_buffers(), strict=True):
            assert torch.equal(b, c[1]), name
        model.zero_grad()


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        return self.b(x) if x.sum() > 0 else x


class Twice(Chooses):
    def forward(self, x):
        return self.b(self.a(self.b(x)))


class OfFour(Chooses):
    def forward(self, x):
        return self.b(self.a(x).view(4, 4))


X = torch.ones(4, 4)


class InFullPrecision(nn.Module):
    """Computes an angle outside of autocast, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            angle = torch.arange(4.0).cos()
            first = self.a(x * angle)
        return self.b(first)


@pytest.mark.parametrize(
    ("model", "x", "before", "said"),
    [
        (Chooses(), X, ["b"], "torch.export cannot trace Chooses, .* depends on values of tensors"),
        (InFullPrecision(), X, ["b"], "torch cannot cut what torch.export has traced of InFullPrecision .*autocast"),
        (OfFour(), X, ["b"], "torch.export cannot trace OfFour, .* the number of rows"),
        (Twice(), X, ["b"], r"calls once each, .* but of \['b'\] it called \['b', 'b'\]"),
        (Twice(), X, ["b", "a"], r"calls once each"),
        (unet(), rows(4), ["up", "middle"], r"in their order, .* it called \['middle', 'up'\]"),
        (Twice(), X, ["c"], r"before should name modules of the model, but names \['c'\]; it has a, b"),
        (Twice(), X, "a", 'before should be a list of names of modules, or "auto", but given .a.'),
        (Twice(), X[:1], ["a"], r"at least two samples, but given shapes \[\(1, 4\)\]"),
        (Twice(), (X, X[:3]), ["a"], "x should hold tensors with a row for each"),
    ],
    ids=["choice", "autocast", "rows", "twice", "twice in order", "order", "name", "string", "one row", "two lengths"],
)
def test_what_cannot_be_traced_is_refused(model, x, before, said):
    with pytest.raises(ValueError, match=said):
        ddl.trace_layers(model, x, before)
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_another_length_and_tp_are_refused():
    layers = ddl.trace_layers(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 3, 4), ["1"])
    with pytest.raises(ValueError, match=r"rows of \[\(\(3, 4\), torch.float32\)\], .* but given \[\(\(5, 4\),"):
        layers(torch.ones(2, 5, 4))
    with pytest.raises(ValueError, match="from ddl.trace_layers cannot be cut over tp"):
        ddl.check_model(layers, pp=2, tp=2)


class WithoutGradient(nn.Module):
    """Its second part is computed under no_grad: gradients of weights reach the loss by the first alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        first = self.a(x)
        with torch.no_grad():
            target = self.b(first).tanh()
        return first * target


def test_operations_under_no_grad_stay_without_gradient():
    torch.manual_seed(0)
    model, x = WithoutGradient().double(), torch.randn(4, 4, dtype=torch.float64)
    layers = ddl.trace_layers(model, x, ["b"])
    model(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    layers(x).square().sum().backward()
    assert expected["b.weight"] is None
    for name, p in model.named_parameters():
        assert (p.grad is None) == (expected[name] is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[name], rtol=0, atol=1e-12)
