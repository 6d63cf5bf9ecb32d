"""Models that are not sequential, cut by torch's tracing front end; each of its traps is right here, or refused."""

import copy
import logging
import pickle

import pytest
import torch
import torch.utils.checkpoint
from ignite.handlers import EMAHandler
from ranks import on, on_each_rank, trainer_of
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.parametrizations import spectral_norm
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


class OfItsLength(Chooses):
    def forward(self, x):
        return self.b(self.a(x)) + self.a.weight.sum().expand(len(x), 1)


class Nearest(Chooses):
    def forward(self, x):
        return self.b(torch.cdist(self.a(x), self.b.weight))


class NearestByProducts(Chooses):
    def forward(self, x):
        return self.b(torch.cdist(self.a(x), self.b.weight, compute_mode="use_mm_for_euclid_dist"))


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
        (
            Chooses(),
            X,
            ["b"],
            r'torch.export cannot trace Chooses, .* values of tensors .* at "return .* if x.sum\(\) > 0 else x"',
        ),
        (InFullPrecision(), X, ["b"], "torch cannot cut what torch.export has traced of InFullPrecision .*autocast"),
        (
            OfFour(),
            X,
            ["b"],
            r'OfFour, since its forward takes the number of rows .* at "return .*view\(4, 4\)\)" .*-1 in',
        ),
        (
            OfItsLength(),
            X,
            ["b"],
            r"takes the number of rows .*len\(x\), 1.* \(test_trace.py:\d+\): write x.shape\[0\] in",
        ),
        (Nearest(), X, ["b"], r'otherwise for other numbers of rows at "return .*cdist.*: pass compute_mode='),
        (Twice(), X, ["b"], r"calls once each, .* but of \['b'\] it called \['b', 'b'\]"),
        (Twice(), X, ["b", "a"], r"calls once each"),
        (unet(), rows(4), ["up", "middle"], r"in their order, .* it called \['middle', 'up'\]"),
        (Twice(), X, ["c"], r"before should name modules of the model, but names \['c'\]; it has a, b"),
        (Twice(), X, "a", 'before should be a list of names of modules, or "auto", but given .a.'),
        (Twice(), X[:1], ["a"], r"at least two samples, but given shapes \[\(1, 4\)\]"),
        (Twice(), (X, X[:3]), ["a"], "x should hold tensors with a row for each"),
    ],
    ids=[
        "choice",
        "autocast",
        "rows",
        "len",
        "cdist",
        "twice",
        "twice in order",
        "order",
        "name",
        "string",
        "one row",
        "two lengths",
    ],
)
def test_what_cannot_be_traced_is_refused(model, x, before, said):
    with pytest.raises(ValueError, match=said):
        ddl.trace_layers(model, x, before)
    assert all(not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("before", [["0"], ["1", "1.0"], ["1", "2"]])
def test_layers_that_would_compute_nothing_are_refused(before):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Identity())
    with pytest.raises(
        ValueError, match=r"each of its . layers something to compute, but with .* 1 would have nothing"
    ):
        ddl.trace_layers(model, X, before)


@pytest.mark.parametrize("silent", ["all of logging", "torch's logger"])
@pytest.mark.parametrize("model", [OfFour(), OfItsLength(), Nearest()], ids=["rows", "len", "cdist"])
def test_the_line_is_named_where_nothing_is_logged(model, silent, monkeypatch):
    told = ShapeEnv._log_guard
    if silent == "all of logging":
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
    else:  # as logging.config.dictConfig leaves it
        monkeypatch.setattr(logging.getLogger("torch.fx.experimental.symbolic_shapes"), "disabled", True)
    try:
        with pytest.raises(ValueError, match=r'rows.* at "return .*" \(test_trace.py:\d+\): '):
            ddl.trace_layers(model, X, ["b"])
    finally:
        if silent == "all of logging":
            logging.disable(before)
    assert ShapeEnv._log_guard is told


def test_distances_by_products_are_traced_for_any_number_of_rows():
    model = NearestByProducts().double()
    layers, x = ddl.trace_layers(model, ROWS, ["b"]), torch.randn(40, 4, dtype=torch.float64)
    assert torch.equal(layers(x), model(x))


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


class CallsAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x).tanh() + self.a(x))


def test_a_module_that_is_called_again_has_the_weights_that_replace_its_own():
    """As data parallelism of a stage does; export gives the module another name for its second call."""
    model, x = CallsAgain().double(), torch.randn(4, 4, dtype=torch.float64)
    layers, other = ddl.trace_layers(model, x, ["b"]), CallsAgain().double()
    for name, p in other.named_parameters():
        place, _, last = f"{'01'[name.startswith('b')]}.{name}".rpartition(".")
        setattr(layers.get_submodule(place), last, p)
    torch.testing.assert_close(layers(x), other(x), rtol=0, atol=1e-12)


def test_a_weight_that_is_normed_by_an_iteration_on_buffers_is_traced():
    torch.manual_seed(0)
    model, x = WithoutGradient().double(), torch.randn(4, 4, dtype=torch.float64)
    spectral_norm(model.a)
    weight = model.a.parametrizations.weight.original
    layers, same = ddl.trace_layers(model, x, ["b"]), copy.deepcopy(model)
    for module in (same, layers):
        for _ in range(3):
            module(x).square().sum().backward()
    assert weight.grad.any()
    torch.testing.assert_close(weight.grad, same.a.parametrizations.weight.original.grad, rtol=0, atol=1e-12)
    for one, other in zip(model.buffers(), same.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_hook_that_keeps_a_weight_with_as_many_rows_as_the_input():
    model = WithoutGradient()
    torch.nn.utils.spectral_norm(model.a)
    with pytest.raises(
        ValueError, match=r"as many rows as x \(4\), such as a weight, give an x with another number of rows"
    ):
        ddl.trace_layers(model, torch.randn(4, 4), ["b"])
    x = torch.randn(6, 4)
    assert ddl.trace_layers(model.eval(), x, ["b"])(x).equal(model(x))


class OddNames(nn.Module):
    """Its modules are called as what a traced layer holds, and a weight has no elements."""

    def __init__(self):
        super().__init__()
        self.uses, self.takes, self.parts = (nn.Linear(4, 4) for _ in range(3))
        self.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, x):
        return torch.cat([self.parts(self.takes(self.uses(x))), x @ self.none.T], 1)


def test_names_of_a_traced_layer_and_a_weight_without_elements():
    model = OddNames()
    layers = ddl.trace_layers(model, torch.randn(2, 4), before=["takes"])
    assert sum(p is model.uses.weight for p in layers[0].parameters()) == 1
    assert len(list(layers.parameters())) == 7


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Clipped(Reversed):
    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.5, 0.5)


class Swish(torch.autograd.Function):
    """Its backward pass is the derivative: it only saves memory."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.sigmoid() * (1 + x * (1 - x.sigmoid())))


@torch.library.custom_op("ignite_ddl_tests::reversed", mutates_args=())
def reversed_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


reversed_gradient.register_fake(torch.empty_like)
reversed_gradient.register_autograd(lambda ctx, grad: -grad)


class Between(nn.Module):
    """Does something between two layers, the second of which may begin with zeros."""

    def __init__(self, between, zeros=False):
        super().__init__()
        self.a, self.b, self.between = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), between
        if zeros:
            nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.b(self.between(self, self.a(x)))


def hooked(model, h):
    if h.requires_grad:
        h.register_hook(lambda grad: grad / 2)
    return h


def packed(model, h):
    """What is saved for backward is kept with few digits."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()):
        return h.sin() * h


def saved_on_cpu(model, h):
    with torch.autograd.graph.save_on_cpu():
        return h.sin() * h


def in_a_checkpoint(function, **options):
    return lambda model, h: torch.utils.checkpoint.checkpoint(function, h, **options)


def straight_through(model, h):
    return h + (h.sign() - h).detach()


ROWS = torch.linspace(-2, 3, 16, dtype=torch.float64).view(4, 4)


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (lambda model, h: Reversed.apply(h), "Reversed"),
        (lambda model, h: Clipped.apply(h), "Clipped"),
        (lambda model, h: Reversed.apply(h) if model.training else h, "Reversed"),
        (lambda model, h: h if model.training else Reversed.apply(h), "Reversed"),
        (in_a_checkpoint(lambda h: Reversed.apply(h.sin()), use_reentrant=False), "Reversed"),
        (in_a_checkpoint(lambda h: Reversed.apply(h.sin()), use_reentrant=True), "torch.utils.checkpoint with use_r"),
        (packed, "a backward pass of its own"),
        (hooked, "a hook of a tensor"),
    ],
    ids=["function", "clip", "in training", "in evaluation", "checkpoint", "reentrant", "saved in few digits", "hook"],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_what_acts_in_backward_only_is_refused(between, said, zeros):
    model = Between(between, zeros)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"Between does in backward what torch.export .* \({said}.*with detach\(\)"):
        ddl.trace_layers(model, ROWS, ["b"])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_forward_hook_is_recorded_or_refused_if_it_keeps_what_it_sees():
    model, kept = Between(lambda model, h: h), {}
    handle = model.a.register_forward_hook(lambda module, given, output: kept.update(out=output.detach()))
    with pytest.raises(ValueError, match="a forward hook of Between keeps what it sees, but .*: let forward return"):
        ddl.trace_layers(model, ROWS, ["b"])
    handle.remove()
    model.kept = {"out": None}  # what a pass of trace_layers keeps there is put back
    handle = model.a.register_forward_hook(lambda module, given, output: model.kept.update(out=output.detach()))
    with pytest.raises(ValueError, match="a forward hook of Between keeps what it sees"):
        ddl.trace_layers(model, ROWS, ["b"])
    handle.remove()
    model.a.register_forward_hook(lambda module, given, output: output.tanh())
    assert torch.equal(ddl.trace_layers(model, ROWS, ["b"])(ROWS), model(ROWS))


class Aside(Between):
    """Keeps a term of a loss as an attribute, of which layers know nothing."""

    def forward(self, x):
        self.term = self.a.weight.square().mean()
        return super().forward(x)


def test_a_trace_leaves_no_attribute_behind():
    model = Aside(lambda model, h: h)
    assert torch.equal(ddl.trace_layers(model, ROWS, ["b"])(ROWS), model.b(model.a(ROWS)))
    assert not hasattr(model, "term")


def test_a_sparse_gradient_is_compared_too():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    assert ddl.trace_layers(model, torch.tensor([1, 3]), ["1"])(torch.tensor([2])).shape == (1, 4)


def test_traced_layers_are_not_pickled():
    with pytest.raises(ValueError, match="cannot be pickled, .*: call ddl.trace_layers in the function that ranks run"):
        pickle.dumps(ddl.trace_layers(Between(lambda model, h: h), ROWS, ["b"]))


def test_a_backward_hook_of_a_module_is_refused():
    model = Between(lambda model, h: h)
    model.b.register_full_backward_hook(lambda module, given, got: None)
    with pytest.raises(ValueError, match=r"does in backward what .* \(a backward hook of 'b'\)"):
        ddl.trace_layers(model, ROWS, ["b"])


@pytest.mark.parametrize(
    "between",
    [
        lambda model, h: Swish.apply(h),
        lambda model, h: reversed_gradient(h),
        in_a_checkpoint(torch.sin, use_reentrant=False),
        saved_on_cpu,
        straight_through,
    ],
    ids=["derivative", "operator", "checkpoint", "saved on the CPU", "detach"],
)
def test_a_backward_pass_that_is_recorded_passes(between):
    model = Between(between)
    layers = ddl.trace_layers(model, ROWS, ["b"])
    model(ROWS).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    layers(ROWS).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=0, atol=1e-12)


class WithItsScale(Between):
    """Returns weights beside what it computes, the first of them as it is."""

    def __init__(self):
        super().__init__(lambda model, h: h.tanh())
        self.scale, self.shift = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
        self.register_buffer("constant", torch.ones(3))

    def forward(self, x):
        return {"out": super().forward(x), "weights": (self.scale, self.shift.exp()), "b": self.constant, "x": x}


def test_a_weight_that_a_model_returns_is_the_last_layers():
    model = WithItsScale()
    layers = ddl.trace_layers(model, ROWS, ["b"])
    one, other = model(ROWS), layers(ROWS)
    assert torch.equal(one["weights"][0], other["weights"][0])
    assert torch.equal(one["b"], other["b"])
    assert torch.equal(other["x"], ROWS)
    assert "scale" in dict(layers[1].named_parameters())
    (other["out"].square().sum() * other["weights"][0].sum() / other["weights"][1].sum()).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    (one["out"].square().sum() * one["weights"][0].sum() / one["weights"][1].sum()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, found[name], rtol=0, atol=1e-12)


@on_each_rank(pp=2)
def test_a_traced_model_and_a_pipeline_of_it_can_be_copied(local_rank):
    model = Between(lambda model, h: h * torch.tensor(0.5))
    layers = ddl.trace_layers(model, ROWS, ["b"])
    copied = copy.deepcopy(layers)
    with torch.no_grad():
        layers[0].a.weight.zero_()
    assert copied[0].a.weight.any()
    pipeline = ddl.auto_model(copied, n_microbatches=2)
    average = EMAHandler(pipeline, momentum=0.5)
    trainer = trainer_of(pipeline, lr=0.5)
    average.attach(trainer)
    before = ddl.full_state_dict(pipeline)
    trainer.run([(ROWS, ROWS.cos())])
    after, mean = ddl.full_state_dict(pipeline), ddl.full_state_dict(average.ema_model)
    for name, value in mean.items():
        torch.testing.assert_close(value, (before[name] + after[name]) / 2, rtol=0, atol=1e-12)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x):
        return self.body(x)


def test_batchnorm_of_traced_layers_is_that_of_a_sequence_of_layers():
    def trained(local_rank, traces):
        torch.manual_seed(0)
        model, x = Normed().double(), torch.randn(16, 4).double()
        layers = ddl.trace_layers(model, x, before=["body.3"]) if traces else model.body
        model = ddl.auto_model(layers, **({} if traces else {"split": [3, 1]}))
        trainer = trainer_of(model)
        trainer.run(ddl.auto_dataloader(TensorDataset(x, x[:, :2]), batch_size=8), max_epochs=2)
        return trainer.state.output, list(ddl.full_state_dict(model).values())

    torch.testing.assert_close(on(trained, True, pp=2)[0], on(trained, False, pp=2)[0])
