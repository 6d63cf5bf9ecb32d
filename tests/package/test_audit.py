"""Changes after ddl.auto_model, replicas that drift, and forward passes of our own: found, or without a trace."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Events
from ranks import on, on_each_rank, trainer_of
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

import ignite_ddl as ddl

generator = torch.Generator().manual_seed(3)
X = torch.randn(14, 8, generator=generator, dtype=torch.float64)
Y = torch.randn(14, 4, generator=generator, dtype=torch.float64)
PLAN = {"0": ddl.Column(), "2": ddl.Row()}


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def whole(model):
    return torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


def trained(local_rank, change=None, make=mlp, data=(X, Y), rows=8, epochs=2, model_fn=None, **options):
    """Losses and weights of a few steps of a model that was changed after auto_model."""
    torch.manual_seed(0)
    model = ddl.auto_model(make().double(), **options)
    if change is not None:
        change(getattr(model, "module", model))
    how = {} if model_fn is None else {"model_fn": model_fn}
    trainer, losses = trainer_of(model, F.mse_loss, **how), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(*data), batch_size=rows), max_epochs=epochs)
    return losses, whole(model)


def refused(function, words, **axes):
    with pytest.raises(ValueError, match=words):
        on(function, **axes)


def assert_right(function, **axes):
    right = function(0)
    for losses, weights in on(function, **axes):
        assert losses == pytest.approx(right[0], abs=1e-12)
        assert (weights - right[1]).abs().max() <= 1e-12


# --- the model as it was


def new_head(model):
    model[2] = nn.Linear(16, 4).double()


def adapter(model):
    model[1] = nn.Sequential(nn.Tanh(), nn.Linear(16, 16).double())


def in_float32(model):
    model[0].half()


def hooked(model):
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


def slightly_hooked(model):
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def hooked_in_place(model):
    def clip(gradient):
        gradient.clamp_(-10, 10)

    model[0].weight.register_hook(clip)


def accumulating(model):
    model[0].weight.register_post_accumulate_grad_hook(halved)


def halved(parameter):
    parameter.grad.mul_(0.5)


def frozen(model):
    model[0].requires_grad_(False)


def seeded(model):
    torch.manual_seed(ddl.get_mesh().dp_rank)
    model.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)


NO_MODEL = "optimizer holds a weight of shape .* of no model from ddl.auto_model"


@pytest.mark.parametrize(
    ("change", "words", "options"),
    [
        (new_head, NO_MODEL, {}),
        (new_head, NO_MODEL, {"shard": True}),
        (adapter, NO_MODEL, {}),
        (adapter, NO_MODEL, {"shard": True}),
        (in_float32, "'0.weight' was torch.float64 .* and is torch.float16", {}),
        (hooked, "'0.weight' has a hook", {}),
        (slightly_hooked, "'0.weight' has a hook", {}),
        (hooked_in_place, "'0.weight' has a hook", {}),
        (accumulating, "'0.weight' has a hook", {}),
        (frozen, "'0.weight' was trained when ddl.auto_model wrapped the model in DDP", {}),
        (seeded, "'0.weight' should be the same on all dp ranks", {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_change_that_would_not_reach_other_ranks_is_refused(change, words, options):
    refused(partial(trained, change=change, **options), words, dp=2)


def late(local_rank, **options):
    """A change that the optimizer does not know, after the first step."""
    torch.manual_seed(0)
    model = ddl.auto_model(mlp(), **options)
    trainer = trainer_of(model)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: new_head(getattr(model, "module", model)))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8))


def test_changes_between_steps_are_refused():
    refused(late, "something added or replaced '2.weight' after ddl.auto_model", dp=2)
    refused(partial(late, tensor_plan=PLAN), "something added or replaced '2.weight'", dp=2, tp=2)
    refused(partial(late, shard=True), "something added or replaced '2.weight'", dp=2)


def activation(model):
    model[1] = nn.GELU()


def frozen_in_place(model):
    frozen(model)


def doubled(model):
    model[0].weight.register_hook(lambda gradient: 2 * gradient)


def test_changes_that_change_no_gradient_are_right():
    assert_right(partial(trained, change=activation), dp=2)
    assert_right(partial(trained, change=doubled), dp=2)  # linear, so it commutes with the average
    assert_right(partial(trained, change=accumulating, shard=True), dp=2)
    assert_right(partial(trained, change=frozen_in_place, shard=True), dp=2)


class Encoder(nn.Sequential):
    def encode(self, x):
        return self(x)


def test_a_method_past_the_wrapper_is_refused():
    past = partial(trained, make=lambda: Encoder(*mlp()), model_fn=lambda model, x: model.module.encode(x))
    refused(past, "the model should be called as a whole", dp=2)


# --- replicas


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8, max_norm=0.5), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


class Tracking(nn.Sequential):
    """A buffer that follows the rows that a rank has seen."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean)


def test_replicas_that_drift_are_named():
    words = torch.randint(9, (14, 3), generator=torch.Generator().manual_seed(0))
    for options in ({}, {"shard": True}):  # FSDP2 would lose what forward changes
        refused(partial(trained, make=Words, data=(words, Y), **options), "'embed' has max_norm=0.5", dp=2)
    refused(partial(trained, make=lambda: Tracking(*mlp())), "'mean' should be the same on all dp ranks", dp=2)


def test_options_of_an_optimizer_that_differ_by_rank():
    def drifting(local_rank, **options):
        torch.manual_seed(0)
        model = ddl.auto_model(mlp(), **options)
        trainer = trainer_of(model, lr=0.1 * (1 + local_rank))
        trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8))

    refused(drifting, "'0.weight' should be the same on all dp ranks", dp=2)
    refused(partial(drifting, tensor_plan=PLAN), "'2.bias' should be the same on all tp ranks", tp=2)


class Tied(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self[2].weight = self[0].weight


def test_a_tied_weight_with_two_decays():
    def decayed(local_rank):
        torch.manual_seed(0)
        model = ddl.auto_model(Tied().double(), split=[2, 3])
        named = dict(model.named_parameters())
        groups = [{"params": [p], "weight_decay": 0.5 * (name == "0.weight")} for name, p in named.items()]
        optimizer = ddl.auto_optim(torch.optim.SGD(groups, lr=0.1))
        trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
        trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=2)

    refused(decayed, "'0.weight'", pp=2)


# --- forward passes of our own


class Mixing(nn.Module):
    """Mixes features between two cut layers, or not; counts its calls, and fills a cache that it is given."""

    def __init__(self, mixes):
        super().__init__()
        self.up, self.down, self.mixes, self.calls = nn.Linear(8, 16), nn.Linear(16, 4), mixes, 0

    def forward(self, x, cache=None):
        self.calls += 1
        if cache is not None:
            cache.append(x)
        hidden = self.up(x)
        if self.mixes:
            first, second = hidden.chunk(2, dim=-1)
            hidden = torch.cat([second, first], dim=-1)
        return self.down(hidden)


CUT = {"up": ddl.Column(), "down": ddl.Row()}


@on_each_rank(tp=2)
def test_a_forward_without_a_trainer_is_checked_too(local_rank):
    torch.manual_seed(0)
    with torch.no_grad(), pytest.raises(ValueError, match="the code before 'down' mixes features"):
        ddl.auto_model(Mixing(True).double(), CUT)(X)
    unchecked = ddl.auto_model(Mixing(True).double(), CUT, checks=False)
    assert unchecked(X).shape == (14, 4)


@on_each_rank(tp=2)
def test_checks_leave_no_trace(local_rank):
    torch.manual_seed(0)
    plain = Mixing(False).double()
    torch.manual_seed(0)
    model = ddl.auto_model(Mixing(False).double(), CUT)
    cache, before = [], torch.get_rng_state()
    with torch.no_grad():
        assert (model(X, cache=cache) - plain(X)).abs().max() < 1e-12
    assert (model.calls, len(cache)) == (1, 1)
    assert torch.equal(torch.get_rng_state(), before)


@on_each_rank(tp=2)
def test_regions_are_checked_under_the_autocast_of_the_step(local_rank):
    model = ddl.auto_model(Mixing(False), CUT)
    trainer = trainer_of(model, lambda o, y: F.mse_loss(o.float(), y.float()), amp_mode="bfloat16")
    trainer.run(ddl.auto_dataloader(TensorDataset(X.bfloat16(), Y), batch_size=8))


class Recurrent(nn.Module):
    """Carries its state on to the next batch."""

    def __init__(self):
        super().__init__()
        self.gru, self.state = nn.GRU(8, 8, batch_first=True), None

    def forward(self, x):
        output, state = self.gru(x[:, None])
        self.state = state[:, -1:].detach() if self.state is None else 0.9 * self.state + state[:, -1:].detach()
        return output[:, 0] + self.state[0]


class Cached(nn.Linear):
    """Makes a mask once, in its first forward pass."""

    mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(8, dtype=torch.float64)
        return super().forward(x * self.mask)


def test_state_in_forward_is_refused_under_pp():
    def of(make):
        return partial(trained, make=lambda: nn.Sequential(make(), nn.Tanh(), nn.Linear(8, 4)))

    def spectral():
        return parametrizations.spectral_norm(nn.Linear(8, 8))

    refused(of(Recurrent), "forward changes '0.state'", pp=2)
    refused(of(spectral), "forward changes '0.parametrizations.weight", pp=2)
    assert_right(of(partial(Cached, 8, 8)), pp=2)
    assert_right(of(spectral), dp=2)
