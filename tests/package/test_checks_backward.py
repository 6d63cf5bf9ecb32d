"""What a user's code does to gradients in a backward pass: an autograd.Function that is not linear is refused."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Events
from ranks import assert_right, launch, on, run, trainer_of
from torch import nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.checks.backward import checking_functions, nudged, row_gradients_depend

generator = torch.Generator().manual_seed(3)
X = torch.randn(14, 8, generator=generator, dtype=torch.float64)
Y = torch.randn(14, 4, generator=generator, dtype=torch.float64)


class Identity(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


class Normalised(Identity):
    @staticmethod
    def backward(ctx, g):
        return g / (g.norm() + 1e-8)


class Clamped(Identity):
    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1e-4, 1e-4)


class ClampedInPlace(Identity):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g.clamp_(-1e-4, 1e-4)


class Penalised(Identity):
    """Adds the gradient of a penalty, as each rank or microbatch would in full."""

    @staticmethod
    def backward(ctx, g):
        return g + 0.1


class SquaredError(Function):
    """A loss of which the backward pass forgets the gradient that it gets."""

    @staticmethod
    def forward(ctx, output, target):
        ctx.save_for_backward(output - target)
        return (output - target).square().mean()

    @staticmethod
    def backward(ctx, g):
        (error,) = ctx.saved_tensors
        return 2 * error / error.numel(), None


class Reversed(Function):
    @staticmethod
    def forward(ctx, x, strength=0.5):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.strength * g, None


class Rounded(Function):
    """Straight through, in the newer style."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.round(8 * x) / 8

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        return g * (1 + ctx.saved_tensors[0].square())


class Scaled(Function):
    @staticmethod
    def forward(ctx, x, weight, unused=None):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return (
            g * weight if ctx.needs_input_grad[0] else None,
            (g * x).sum(0) if ctx.needs_input_grad[1] else None,
            None,
        )


class Exponential(Function):
    """Computes in what it has saved, as fused losses do, and drops it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        ctx.halves = [torch.full_like(x, 0.5)]
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        y.mul_(g).mul_(ctx.halves.pop().mul_(2))
        del ctx.halves
        return y


class Recomputed(Function):
    """Activation checkpointing by hand."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, g)
        return x.grad, None


class Dithered(Identity):
    @staticmethod
    def backward(ctx, g):
        return g * torch.rand_like(g)


class Through(nn.Module):
    def __init__(self, function, *args):
        super().__init__()
        self.call, self.args = function.apply, args  # as it is before a step begins

    def forward(self, x):
        return self.call(x, *self.args)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x):
        return checkpoint(Scaled.apply, Scaled.apply(x, self.weight), self.weight, use_reentrant=False)


class Recomputing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=0.5))

    def forward(self, x):
        return Recomputed.apply(x, self.layer)


def net(*layers):
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *layers, nn.Linear(16, 4)).double()


def trained(local_rank, make, loss_fn=F.mse_loss, rows=8, **options):
    torch.manual_seed(0)
    trainer, losses = trainer_of(model := ddl.auto_model(make(), **options), loss_fn), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=rows), max_epochs=2)
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


def refused(function, name, **axes):
    with pytest.raises(
        ValueError, match=f"backward pass of {name}, an autograd.Function, should be linear in gradients"
    ):
        on(function, **axes)


@pytest.mark.parametrize("function", [Normalised, Clamped, ClampedInPlace, Penalised])
def test_a_function_whose_backward_pass_is_not_linear_is_refused(function):
    refused(partial(trained, make=partial(net, Through(function))), function.__name__, dp=2)


def test_a_function_that_is_not_linear_is_refused_on_other_meshes():
    refused(partial(trained, make=partial(net, Through(Clamped)), shard=True), "Clamped", dp=2)
    refused(partial(trained, make=partial(net, Through(Normalised))), "Normalised", pp=2)
    refused(partial(trained, make=net, loss_fn=SquaredError.apply), "SquaredError", dp=2)


def many():
    return net(Through(Reversed, 0.5), Weighted(), Through(Rounded), Through(Exponential))


def test_functions_that_are_linear_or_that_a_pipeline_leaves_as_they_are_are_right():
    assert_right(partial(trained, make=many), dp=2)
    assert_right(partial(trained, make=many), pp=2)
    assert_right(partial(trained, make=partial(net, Through(Clamped), Through(Penalised))), pp=2)


def failing_step(local_rank):
    before = torch.Tensor.register_hook, BackwardCFunction.apply

    def fails(output, y):
        assert (torch.Tensor.register_hook, BackwardCFunction.apply) != before
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        trained(local_rank, net, fails)
    return before == (torch.Tensor.register_hook, BackwardCFunction.apply)


def test_a_step_that_fails_leaves_torch_as_it_was():
    assert all(on(failing_step, dp=2))


def gradients(layer, x=X, checked=None):
    """Those of the layer's input and weights, and what is random next, with a check or without."""
    torch.manual_seed(0)
    x, layer = x.clone().requires_grad_(), layer()
    with checking_functions(by_row=checked == "by row") if checked else torch.enable_grad():
        layer(x).square().sum().backward()
    state = [p.grad for p in layer.parameters()] + list(layer.buffers())
    return [x.grad, torch.rand(1), *state]


@pytest.mark.parametrize("checked", ["in scale", "by row"])
@pytest.mark.parametrize(
    "layer",
    [
        Recomputing, partial(Through, Dithered), partial(Through, Exponential), many,
        partial(nn.Sequential, nn.Linear(8, 16), Weighted()),
    ],
    ids=["recomputing", "dithered", "in place", "many", "saved"],
)  # fmt: skip
def test_a_check_leaves_no_trace(layer, checked):
    x = X if layer is not Recomputing else X.repeat(1, 2)
    make = lambda: (torch.manual_seed(0), layer().double())[1]  # noqa: E731
    for plain, other in zip(gradients(make, x), gradients(make, x, checked), strict=True):
        assert torch.equal(plain, other)


def test_second_derivatives_and_transforms_while_functions_are_checked():
    def slopes(x):
        (slope,) = torch.autograd.grad(Rounded.apply(Scaled.apply(x, X[0])).square().sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.square().sum(), x)
        each = torch.func.vmap(torch.func.grad(lambda row: Rounded.apply(row).square().sum()))(x.detach())
        return slope.detach(), curvature, each

    expected = slopes(X.clone().requires_grad_())
    with checking_functions(by_row=False):
        found = slopes(X.clone().requires_grad_())
    assert all(map(torch.equal, found, expected))


# --- gradients of rows, where no function is at fault


class StepSize(nn.Module):
    """A quantiser that learns its step (LSQ), whose gradient is scaled by the numbers of a batch or of a row."""

    def __init__(self, by_batch):
        super().__init__()
        self.by_batch, self.step = by_batch, nn.Parameter(torch.tensor([0.1]))

    def forward(self, x):
        factor = ((x.numel() if self.by_batch else 6 * x[0].numel()) * 7) ** -0.5
        step = (self.step - self.step * factor).detach() + self.step * factor
        levels = (x / step).clamp(-8, 7)
        return ((levels.round() - levels).detach() + levels) * step


class ByLargest(Identity):
    """Twice the gradient gives twice the result, but that of a row depends on the other rows."""

    @staticmethod
    def backward(ctx, g):
        return g * g.abs() / g.abs().max()


def quantised(by_batch):
    return net(StepSize(by_batch))


@pytest.mark.parametrize(("mesh", "options"), [({"dp": 2}, {}), ({"pp": 2}, {}), ({"dp": 2, "pp": 2}, {})], ids=str)
def test_gradients_of_rows_that_depend_on_other_rows_are_refused(mesh, options):
    assert_right(partial(trained, make=partial(quantised, by_batch=False), **options), **mesh)
    for make in (partial(quantised, by_batch=True), partial(net, Through(ByLargest))):
        with pytest.raises(ValueError, match="the gradient of a row's output should depend on that row alone"):
            on(partial(trained, make=make, **options), **mesh)


def test_a_kept_output_and_complex_numbers_hide_no_gradients_of_rows_that_depend_on_others():
    for by_batch, turns in itertools.product((True, False), repeat=2):
        kept, model = [], quantised(by_batch)
        model.register_forward_hook(lambda module, x, y: kept.__setitem__(slice(None), [y]))  # noqa: B023
        run = lambda x: torch.polar(model(x).exp(), model(x)) if turns else model(x)  # noqa: B023, E731
        assert row_gradients_depend(run, X, [model]) is by_batch


class Chosen(nn.Module):
    """The first layer is one of two, by a random number."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x):
        return self.layers[int(torch.rand(1) < 0.5)](x)


class Centred(nn.Module):
    """By the mean of all ranks' rows."""

    def forward(self, x):
        total = torch.cat([x.sum(0), x.new_tensor([len(x)])])
        if dist.is_initialized():
            total = dist.nn.functional.all_reduce(total)
        return x - total[:-1] / total[-1]


class RecomputingTanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x):
        return Recomputed.apply(x, self.layer)


def chosen():
    return nn.Sequential(Chosen()).double()


def centred():
    return net(Centred())


def recomputing():
    return net(RecomputingTanh())


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}], ids=str)
def test_gradients_stay_where_a_backward_pass_runs_another_one(mesh):
    assert_right(partial(trained, make=recomputing), **mesh)


def test_gradients_of_rows_that_cannot_be_compared():
    assert_right(partial(trained, make=chosen, find_unused_parameters=True), dp=2)
    assert_right(partial(trained, make=centred, rows=3), dp=2)


def experts():
    layer = ddl.MixtureOfExperts(6, 8, n_experts=4, top_k=2)
    return nn.Sequential(nn.Linear(8, 6), layer, nn.Linear(6, 4)).double()


def test_ranks_that_share_experts_make_as_many_passes_with_one_row_as_with_two():
    function = partial(trained, make=experts, rows=3, tensor_plan={"1.experts": ddl.Experts()})
    expected, expected_weights = function(0)
    for losses, weights in run(function, 2, dp=2, ep=2):
        assert losses == pytest.approx(expected, abs=1e-12)
        assert (weights - expected_weights).abs().max() <= 1e-12


class OnTheEdge(nn.Module):
    """A ReLU whose input is 0, above it for several rows and below it for some alone, as by a kernel's rounding."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.first.bias)

    def forward(self, x):
        h = self.first(x)
        return self.last((h + (1e-12 if len(x) > 3 else -1e-12)).relu())


def gradients_on_the_edge(local_rank):
    model = OnTheEdge().double()
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = [row_gradients_depend(model, x, [model])]
    before = [p.detach().clone() for p in model.parameters()]
    with nudged([model]):
        found.append(row_gradients_depend(model, x, [model]))
    assert all(map(torch.equal, before, model.parameters()))
    return found


def test_of_a_relu_whose_input_is_0_but_for_rounding_gradients_are_compared_beside_it():
    assert launch({"dp": 2}, gradients_on_the_edge) == [[True, False]] * 2


class AdaptsToEachRow(nn.Module):
    """MAML (Finn et al. 2017): a row is a task, to which forward adapts weights by gradients of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x):
        weights = dict(self.layer.named_parameters())

        def of_task(row):
            loss = torch.func.functional_call(self.layer, weights, (row[:, None],)).square().mean()
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            adapted = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
            return torch.func.functional_call(self.layer, adapted, (row[:1],))

        return torch.stack([of_task(row) for row in x])


def test_gradients_of_rows_whose_weights_forward_has_adapted_are_those_of_each_row():
    model, x = AdaptsToEachRow(), torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert not row_gradients_depend(model, x, [model])


class Fading(Identity):
    """Is linear in each call, but by a number that its calls change."""

    calls = 0

    @staticmethod
    def backward(ctx, g):
        Fading.calls += 1
        return g / (1 + 0.01 * Fading.calls)


class WithFading(nn.Linear):
    calls = 0

    def forward(self, x):
        h = super().forward(x)
        if h.requires_grad:
            h.register_hook(self.fade)
        return Fading.apply(h)

    def fade(self, g):
        self.calls += 1
        return g / (1 + 0.01 * self.calls)


def fading(local_rank):
    torch.manual_seed(0)
    Fading.calls, calls = 0, [0]
    net = nn.Sequential(WithFading(8, 4), nn.Linear(4, 4)).double()

    def fade(module, _, grads):
        calls[0] += 1
        return tuple(g / (1 + 0.01 * calls[0]) for g in grads)

    net[1].register_full_backward_hook(fade)
    trainer = trainer_of(ddl.auto_model(net))
    output = trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=4), max_epochs=2).output
    return output, Fading.calls, net[0].calls, calls[0]


def test_checks_leave_no_trace_in_hooks_and_functions():
    right, *calls = fading(0)
    assert on(fading, dp=2) == [(pytest.approx(right, abs=1e-12), *calls)] * 2
