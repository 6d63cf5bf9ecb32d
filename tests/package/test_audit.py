"""Changes after ddl.auto_model, replicas that drift, and forward passes of our own: found, or without a trace."""

import contextlib
import copy
import itertools
import math
import random
import re
import types
import warnings
import weakref
from collections import OrderedDict, UserDict
from functools import partial

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import FastaiLRFinder
from ignite.metrics import Accuracy, Loss
from packaging.version import Version
from ranks import assert_right, in_float64, launch, on, on_each_rank, refused, trainer_of
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.audit import Audit
from ignite_ddl.checks import backward, modules_in_use
from ignite_ddl.checks.backward import ROW_GRADIENTS_DEPEND, may_depend_in_training
from ignite_ddl.checks.rows_alone import ROWS_DEPEND, rows_depend_on_each_other

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


def activation(model):
    model[1] = nn.GELU()


def together(change):
    """A change in one step with another, after which the model is looked at anew."""

    def both(model):
        activation(model)
        change(model)

    return both


def doubled(model):
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    return model


def on_the_wrapper(local_rank, child):
    model = ddl.auto_model(nn.Sequential(OrderedDict(zip("abc", mlp(), strict=True))))
    model.c = child
    trainer_of(model).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8))


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
        (frozen, "'0.weight' was unfrozen when ddl.auto_model wrapped the model in DDP", {}),
        (seeded, "'0.weight' should be the same on all dp ranks", {}),
        (together(hooked), "'0.weight' has a hook", {}),
        (together(hooked), "'0.weight' has a hook", {"shard": True}),
        (together(frozen), "'0.weight' was unfrozen when", {}),
        (hooked, "'0.weight' has a hook", {"make": lambda: doubled(mlp())}),
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
    refused(late, "'2.weight' was added or replaced after ddl.auto_model", dp=2)
    refused(partial(late, tensor_plan=PLAN), "'2.weight' was added or replaced", dp=2, tp=2)
    refused(partial(late, shard=True), "'2.weight' was added or replaced", dp=2)


@pytest.mark.parametrize("child", [nn.Linear(16, 4).double(), nn.Identity(), None], ids=repr)
def test_a_child_that_is_set_on_the_wrapper_is_refused(child):
    refused(partial(on_the_wrapper, child=child), "'c' was set on DDP's wrapper", dp=2)


def test_changes_that_change_no_gradient_are_right():
    assert_right(partial(trained, change=activation), dp=2)
    assert_right(partial(trained, change=doubled), dp=2)  # linear, so it commutes with the average
    assert_right(partial(trained, change=accumulating, shard=True), dp=2)
    assert_right(partial(trained, change=together(frozen), shard=True), dp=2)


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
    """A buffer that follows the rows that a rank has seen, before this pass or with it."""

    def __init__(self, *layers, first=False):
        super().__init__(*layers)
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.first = first

    def forward(self, x):
        before = self.mean.clone()
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - (self.mean if self.first else before))


class Sums(nn.Linear):
    """Of the rows of nested tensors."""

    def forward(self, x):
        return torch.nested.to_padded_tensor(super().forward(x).tanh(), 0.0).sum(1)


def to_nested(rows):
    x, y = zip(*rows, strict=True)
    nested = [one[: 2 + (one[0, 0] > 0) + (one[0, 1] > 0)] for one in x]
    return torch.nested.nested_tensor(nested, layout=torch.jagged), torch.stack(y)


def trained_on_nested(local_rank, evaluates=False, **options):
    torch.manual_seed(0)
    model, losses = ddl.auto_model(Sums(2, 4).double()), []
    data = ddl.auto_dataloader(list(zip(X[:9].view(9, 4, 2), Y, strict=False)), batch_size=4, collate_fn=to_nested)
    if evaluates:
        ddl.create_supervised_evaluator(model).run(data)
    trainer = trainer_of(model, F.mse_loss, **options)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(data)
    return losses, whole(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_rows_are_right_where_nothing_is_checked():
    """Of the last row a rank has none."""
    for evaluates in (False, True):
        refused(partial(trained_on_nested, evaluates=evaluates), "^x should hold dense tensors, .* a nested one", dp=2)
    assert_right(partial(trained_on_nested, checks=False), dp=2)


def test_replicas_that_drift_are_named():
    words = torch.randint(9, (14, 3), generator=torch.Generator().manual_seed(0))
    for options in ({}, {"shard": True}):  # FSDP2 would lose what forward changes
        refused(partial(trained, make=Words, data=(words, Y), **options), "'embed' has max_norm=0.5", dp=2)
    refused(partial(trained, make=lambda: Tracking(*mlp())), "'mean' should be the same on all dp ranks", dp=2)
    refused(partial(trained, make=lambda: Tracking(*mlp(), first=True)), "depends on other rows of the batch", dp=2)


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


def test_a_tied_weight_whose_decays_differ_after_the_last_step_that_compares_is_named_when_the_run_ends():
    def decayed(local_rank):
        torch.manual_seed(0)
        model = ddl.auto_model(Tied().double(), split=[2, 3])
        groups = {name: {"params": [p]} for name, p in model.named_parameters()}
        optimizer = ddl.auto_optim(torch.optim.SGD(groups.values(), lr=0.1))
        trainer, steps = ddl.create_supervised_trainer(model, optimizer, F.mse_loss), []
        if "0.weight" in groups:
            at = list(groups).index("0.weight")
            change = lambda: optimizer.param_groups[at].update(weight_decay=0.5)  # noqa: E731
            trainer.add_event_handler(Events.ITERATION_STARTED(once=3), change)
        trainer.add_event_handler(Events.COMPLETED, lambda: steps.append(trainer.state.iteration))
        try:
            trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5))
        finally:
            assert steps == [3]

    refused(decayed, "'0.weight' should be the same on all pp ranks", pp=2)


def test_a_stage_that_is_all_frozen_has_full_weights_beside_one_that_has_shards():
    def frozen(local_rank, **options):
        torch.manual_seed(0)
        model = Tied().double()
        model[0].requires_grad_(False)
        model = ddl.auto_model(model, split=[2, 3] if ddl.get_mesh().pp_size > 1 else None, **options)
        trainer = trainer_of(model, F.mse_loss)
        trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8))
        return whole(model)

    right = frozen(0)
    assert all((w - right).abs().max() < 1e-12 for w in on(partial(frozen, shard=True), dp=2, pp=2))


def test_gradients_of_a_tied_weight_that_a_step_finds_count_once():
    """Accumulation by hand without last=False."""

    def accumulated(local_rank):
        torch.manual_seed(0)
        model = ddl.auto_model(Tied().double(), split=[2, 3] if ddl.get_mesh().pp_size > 1 else None)
        optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

        def update(engine, batch):
            ddl.forward_backward(engine, model, *batch, F.mse_loss)
            if engine.state.iteration % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

        ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X[:12], Y[:12]), batch_size=4), max_epochs=2)
        return whole(model)

    right = accumulated(0)
    for axes in ({"pp": 2}, {"dp": 2, "pp": 2}):
        assert all((weights - right).abs().max() < 1e-12 for weights in on(accumulated, **axes))


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


class InTraining(nn.Module):
    """Does something to features between two cut layers, or to its inputs, in training alone."""

    def __init__(self, to_features=None, to_inputs=None):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.to_features, self.to_inputs, self.seen = to_features or nn.Identity(), to_inputs or nn.Identity(), 0
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        if not self.training:
            return self.down(self.up(x).tanh())
        self.seen += len(x)
        self.largest = self.largest.maximum(x.detach().max())
        return self.down(self.to_features(self.up(self.to_inputs(x)).tanh())) / (1 + self.seen / 20)


class Normed(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)


class OfNumpy(nn.Module):
    """Noise for each feature; what is drawn after it in one process is drawn with fewer features."""

    def forward(self, x):
        return F.dropout(x + torch.from_numpy(numpy.random.standard_normal(x.shape)), 0.5, self.training)  # noqa: NPY002


class OfOwnStreams(nn.Module):
    """Noise of each kind of generator that a module may hold, and of Python's."""

    def __init__(self):
        super().__init__()
        random.seed(0)
        self.streams = torch.Generator().manual_seed(0), random.Random(0), numpy.random.default_rng(0)
        self.torch, self.python, self.numpy = self.streams

    def forward(self, x):
        x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=self.torch)
        x = x * (1 + self.python.random() + random.random())
        return x + 0.1 * torch.from_numpy(self.numpy.standard_normal(x.shape))


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_code_between_cut_layers_that_mixes_features_in_training_alone_is_refused(axes):
    make, plan = lambda: InTraining(Normed()), {"up": ddl.Column(), "down": ddl.Row()}
    if "pp" in axes:
        make, plan = lambda: nn.Sequential(nn.Linear(8, 8), InTraining(Normed())), {f"1.{k}": plan[k] for k in plan}
    refused(partial(trained, make=make, tensor_plan=plan), "down' mixes features", **axes)


def test_code_between_cut_layers_that_draws_in_training_is_taken():
    on(partial(trained, make=lambda: InTraining(OfNumpy()), tensor_plan=CUT), tp=2)


def test_the_check_of_what_a_training_step_computes_leaves_no_trace():
    assert_right(partial(trained, make=lambda: InTraining(to_inputs=OfOwnStreams()), tensor_plan=CUT), tp=2)


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


class Observing(nn.Linear):
    """Scales by the largest number so far, in a buffer that its first pass makes longer: settled for the same rows."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("most", torch.empty(0))

    def forward(self, x):
        most = x.detach().abs().max(0).values
        self.most.resize_(8).copy_(torch.maximum(self.most, most) if self.most.numel() else most)
        return super().forward(x / self.most)


def test_state_in_forward_is_refused_under_pp():
    def of(make):
        return partial(trained, make=lambda: nn.Sequential(make(), nn.Tanh(), nn.Linear(8, 4)))

    def spectral():
        return parametrizations.spectral_norm(nn.Linear(8, 8))

    refused(of(Recurrent), "forward changes '0.state'", pp=2)
    refused(of(spectral), "forward changes '0.parametrizations.weight", pp=2)
    refused(of(partial(Observing, 8, 8)), "forward changes '0.most'", pp=2)
    assert_right(of(partial(Cached, 8, 8)), pp=2)
    assert_right(of(spectral), dp=2)


class Scaling(nn.Linear):
    """Initialised by its first rows; through .data or not."""

    def __init__(self, by_data):
        super().__init__(8, 8)
        self.by_data, self.done = by_data, False

    def forward(self, x):
        if not self.done:
            with torch.no_grad():
                (self.bias.data if self.by_data else self.bias).copy_(-x.mean(0))
            self.done = True
        return super().forward(x)


class Clamped(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(min=0)
        return super().forward(x)


class Hooked(nn.Sequential):
    """A hook, given before FSDP2's, changes a weight."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8))
        self[0].register_forward_pre_hook(self.clamp)

    @staticmethod
    def clamp(layer, _):
        layer.weight.data.clamp_(min=0)


class Followed(nn.Module):
    """A copy of a layer, which each forward pass moves towards it: in place, or by new data."""

    def __init__(self, in_place):
        super().__init__()
        self.layer, self.in_place = nn.Linear(8, 8), in_place
        self.copied = copy.deepcopy(self.layer).requires_grad_(False)

    def forward(self, x):
        for mean, p in zip(self.copied.parameters(), self.layer.parameters(), strict=True):
            if self.in_place:
                mean.data.lerp_(p.data, 0.1)
            else:
                mean.data = 0.9 * mean.data + 0.1 * p.data
        return self.layer(x) - self.copied(x.flip(1))


class Changed(nn.Linear):
    """Changes its weight by a function."""

    def __init__(self, change):
        super().__init__(8, 8)
        self.change = change

    def forward(self, x):
        self.change(self.weight)
        return super().forward(x)


def normalised(weight):
    weight.data = F.normalize(weight.data)


def clamped_late(weight):
    with torch.no_grad():
        weight.clamp_(-0.36, 0.36)  # initial values are below


def halved_weight(weight):
    weight.data.mul_(0.5)


def then_linear(make):
    return nn.Sequential(make(), nn.Tanh(), nn.Linear(8, 4))


BY_CALLS = [partial(Scaling, False), partial(Scaling, True), partial(Changed, halved_weight)]
ONCE = [partial(Clamped, 8, 8), Hooked, partial(Changed, normalised), partial(Changed, clamped_late)]


@pytest.mark.parametrize("make", [*BY_CALLS[:2], *ONCE[:2]])
def test_weights_that_forward_changes_in_vain_are_refused(make):
    of = partial(trained, make=partial(then_linear, make))
    in_vain = "forward changes '(0.)*(weight|bias)', a weight that is gathered"
    refused(partial(of, shard=True), in_vain, dp=2)
    if make in ONCE:  # torch's replicate gathers, too
        refused(of, in_vain, dp=2, pp=2)


@pytest.mark.parametrize("make", [*BY_CALLS, partial(Followed, True), partial(Followed, False)])
def test_weights_that_forward_changes_by_each_microbatch_are_refused(make):
    """A copy that follows a layer, by lerp_, is its equal in the first step."""
    refused(partial(trained, make=partial(then_linear, make)), "forward changes '0.[a-z.]+', but under pp", pp=2)


@pytest.mark.parametrize("make", ONCE)
def test_weights_that_forward_clamps_or_normalises_are_right_under_pp(make):
    assert_right(partial(trained, make=partial(then_linear, make)), pp=2)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}], ids=str)
def test_our_forward_passes_leave_no_trace_in_weights(axes, in_place):
    def make():
        return nn.Sequential(Followed(in_place), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    assert_right(partial(trained, make=make, tensor_plan={"1": ddl.Column(), "3": ddl.Row()}), **axes)


# --- what scripts do with weights after auto_model, and beside the trainer


def initialised(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            nn.init.uniform_(module.bias)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


@pytest.mark.parametrize(
    ("axes", "options"), [({"dp": 2}, {"shard": True}), ({"tp": 2}, {"tensor_plan": PLAN})], ids=["shard", "tp2"]
)
def test_random_numbers_for_cut_weights_are_those_of_one_process(axes, options):
    assert_right(partial(trained, change=initialised, **options), **axes)


def said(local_rank, function, *args, **kwargs):
    """Whether this rank has warned of something in the words of this package."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(local_rank, *args, **kwargs)
    return [str(warning.message)[:60] for warning in caught if "ddl." in str(warning.message)]


def filled(model):
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    torch.rand(1)


def loaded(model):
    ddl.load_full_state_dict(model, mlp().state_dict())


def draws_of_stages(local_rank):
    return [len(said(local_rank, trained, change)) for change in (initialised, filled, loaded)]


def test_stages_that_draw_their_own_numbers_are_warned_of():
    assert on(draws_of_stages, pp=2) == [[1, 0, 0]] * 2


def write(model, how):
    with torch.no_grad():
        how(model[0].weight)


@on_each_rank(dp=2)
def test_what_torch_cannot_do_with_cut_weights_is_said_in_our_words(local_rank):
    model = ddl.auto_model(mlp(), shard=True)
    for how in (
        lambda w: w.fill_diagonal_(1.0),
        lambda w: w.mul_(torch.ones(16, 8, dtype=torch.float64)),
        lambda w: w.__setitem__(1, 0.0),
        lambda w: w.renorm(2, 0, 1.0),
        nn.init.trunc_normal_,
    ):
        refused = pytest.raises(ValueError, match="cut over ranks")
        can = how is nn.init.trunc_normal_ and Version(torch.__version__).minor != 13  # and then it is right
        with contextlib.nullcontext() if can else refused:
            write(model, how)
    write(model, lambda w: w.clamp_(-0.1, 0.1))


@on_each_rank(pp=2)
def test_a_layer_of_another_stage(local_rank):
    model = ddl.auto_model(mlp())
    there, here = ("2", "0") if local_rank == 0 else ("0", "2")
    assert isinstance(getattr(model, here), nn.Linear)
    assert not hasattr(model, "nothing")
    with pytest.raises(ValueError, match=f"'{there}' is on pp rank {1 - local_rank}"):
        getattr(model, there)
    with pytest.raises(ValueError, match="choose parameters from model.named_parameters"):
        model[0].parameters()


def ahead(loader):
    batches = iter(loader)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        yield batch
        batch = following


def plain_loop(local_rank, rows, how="", **options):
    """A loop of one's own; what it does with rows that are uneven, or before an even batch."""
    model = ddl.auto_model(mlp(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ddl.auto_dataloader(TensorDataset(X[:12], Y[:12]), batch_size=rows)
    if how == "ignite":
        create_supervised_trainer(model, optimizer, F.mse_loss).run(loader)
    if how == "lists":
        kept = iter(ddl.auto_dataloader(X[:9], batch_size=4))
        list(kept)
    if how == "looks":
        next(iter(loader))
        loader = [(X[:2], Y[:2])]
    for x, y in ahead(loader) if how == "ahead" else loader:
        weight = 2 * loader.rows[0] / loader.rows[1] if how == "weighs" else 1.0
        (weight * F.mse_loss(model(x), y)).backward()
        if how == "reads":
            loader.rows  # noqa: B018
        if how not in ("after", "evaluates"):
            optimizer.step()
    if how != "evaluates":
        optimizer.step()


def loops(local_rank):
    return [
        len(said(local_rank, plain_loop, *args))
        for args in ((4,), (4, "lists"), (7, "weighs"), (7, "reads"), (7, "evaluates"), (7, "looks"), (7, "after"))
    ]


def test_a_step_after_a_loop_on_uneven_rows_is_warned_of_once():
    assert on(loops, dp=2) == [[0, 0, 0, 0, 0, 0, 1]] * 2


@pytest.mark.parametrize(
    ("how", "options"), [("", {}), ("", {"shard": True}), ("ignite", {"shard": True}), ("ahead", {})]
)
def test_a_step_in_a_loop_on_uneven_rows_is_refused(how, options):
    refused(partial(plain_loop, rows=5, how=how, **options), "counts each row once: let ddl.create_supervised", dp=2)


def two_loaders(local_rank, first, second, reads=0, grad=True, every=1):
    """A loop over two loaders, and whose rows weight its losses."""
    model = ddl.auto_model(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [ddl.auto_dataloader(TensorDataset(X[:n], Y[:n]), batch_size=b) for n, b in (first, second)]
    passes = [iter(loader) for loader in loaders]
    for number in range(3):
        with torch.set_grad_enabled(grad):
            batches = [next(one) for one in passes]
        used = batches if grad else batches[1:]
        weight = 2 * loaders[reads - 1].rows[0] / loaders[reads - 1].rows[1] if reads else 1.0
        sum(weight * F.mse_loss(model(x), y) for x, y in used).backward()
        if number % every == every - 1:
            optimizer.step()


EVEN, UNEVEN = (12, 4), (9, 3)


@pytest.mark.parametrize(
    "how", [(EVEN, UNEVEN), (UNEVEN, EVEN), (UNEVEN, EVEN, 2), ((8, 3), EVEN, 0, True, 3)], ids=str
)
def test_a_step_in_a_loop_over_two_loaders_is_refused_where_one_of_them_is_uneven(how):
    refused(
        partial(two_loaders, first=how[0], **dict(zip(("second", "reads", "grad", "every"), how[1:], strict=False))),
        "counts each row once: let ddl.create_supervised",
        dp=2,
    )


@on_each_rank(dp=2)
def test_a_step_in_a_loop_over_two_loaders_is_right(local_rank):
    """Where both are even, one is weighted and the other gives as many rows, or one is looked at only."""
    for how in ((EVEN, EVEN), (UNEVEN, EVEN, 1), (UNEVEN, UNEVEN, 1), (UNEVEN, UNEVEN, 2), (UNEVEN, EVEN, 0, False)):
        two_loaders(local_rank, *how)


def looks_at_another(local_rank):
    """A trainer whose handler reads an uneven batch of another loader."""
    torch.manual_seed(0)
    model = ddl.auto_model(mlp())
    others = iter(ddl.auto_dataloader(TensorDataset(X[:9], Y[:9]), batch_size=3))
    trainer = trainer_of(model, F.mse_loss)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: next(others))
    return trainer.run(ddl.auto_dataloader(TensorDataset(X[:12], Y[:12]), batch_size=4)).output


def test_a_trainer_beside_an_uneven_loop_is_right():
    assert on(looks_at_another, dp=2) == [pytest.approx(looks_at_another(0))] * 2


def backward_hook(model, clamps=False):
    model[1].register_full_backward_hook(lambda _, g, __: (g[0].clamp(-0.001, 0.001) if clamps else 2 * g[0],))


def test_a_backward_hook_that_is_not_linear_is_refused():
    assert_right(partial(trained, change=backward_hook), dp=2)
    refused(
        partial(trained, change=partial(backward_hook, clamps=True)), "backward hook of a Tanh should be linear", dp=2
    )


class Carries(nn.Module):
    """A hidden state for each row, which the next batch goes on with."""

    def __init__(self):
        super().__init__()
        self.gru, self.h = nn.GRUCell(8, 4), None

    def forward(self, x):
        if self.h is not None and len(self.h) != len(x):
            self.h = None
        h = self.gru(x, self.h)
        self.h = h.detach()
        return h


class CarriesInLSTM(nn.Module):
    """Fails where a check has fewer rows; a list of its weights is an attribute of the LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm, self.state = nn.LSTM(8, 4, batch_first=True), None

    def forward(self, x):
        h, state = self.lstm(x[:, None], self.state)
        self.state = tuple(t.detach() for t in state)
        return h[:, 0]


def test_a_state_that_rows_carry_is_right():
    assert_right(partial(trained, make=Carries, data=(X[:12], Y[:12]), rows=6), dp=2)
    sharded = partial(trained, make=CarriesInLSTM, data=(X[:12], Y[:12]), rows=6, epochs=5, shard=True)
    assert_right(sharded, dp=2)


class CarriesByTime(nn.Module):
    """Its state has rows in dim 1, and as many layers as one rank has rows: there a check fails in the second layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Linear(8, 8), nn.LSTM(8, 4, 2, batch_first=True), nn.Linear(4, 4)

    def forward(self, given):
        x, state = given
        return self.head(self.lstm(self.embed(x)[:, None], state)[0][:, 0])


def with_a_state(local_rank):
    torch.manual_seed(0)
    model = ddl.auto_model(CarriesByTime().double(), shard=True)
    optimizer, losses = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1)), []

    def update(engine, batch):
        x, y = batch
        state = tuple(torch.full((2, len(x), 4), 0.5, dtype=torch.float64) for _ in range(2))
        optimizer.zero_grad()
        _, loss = ddl.forward_backward(engine, model, (x, state), y, F.mse_loss, loss_divisor="rows")
        optimizer.step()
        losses.append(loss.item())

    ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X[:15], Y[:15]), batch_size=5), max_epochs=2)
    return losses, whole(model)


def test_fsdp2_reduces_gradients_after_a_check_that_has_failed_inside_of_a_unit():
    assert_right(with_a_state, dp=2)


def accumulated(local_rank, **options):
    torch.manual_seed(0)
    model = ddl.auto_model(mlp().double(), **options)
    trainer, losses = trainer_of(model, F.mse_loss, gradient_accumulation_steps=4), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X[:20], Y[:20]), batch_size=5), max_epochs=3)
    return losses, whole(model)


def test_rows_are_looked_at_in_step_8_inside_of_a_window_that_keeps_weights_gathered():
    plan = {"0": ddl.Column(), "2": ddl.Row()}
    for options, axes in (({"tensor_plan": plan}, {"dp": 2, "tp": 2}), ({}, {"dp": 2})):
        assert_right(partial(accumulated, shard=True, reshard_after_forward=False, **options), **axes)


class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.first(x)
        return self.last(h - 0.5 * h.mean(0, keepdim=True))


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["ddp", "shard"])
def test_of_a_single_row_a_rank_those_of_others_show_that_rows_depend(options):
    refused(partial(trained, make=Centres, rows=2, **options), "a row of the model's output should depend", dp=2)
    assert_right(partial(trained, rows=2, **options), dp=2)


def evaluated(local_rank, make=mlp, rows=6):
    torch.manual_seed(0)
    model = ddl.auto_model(make().double())
    accuracy = Accuracy(lambda output: (output[0], output[1].argmax(1)))
    return (
        ddl.create_supervised_evaluator(model, {"accuracy": accuracy})
        .run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=rows))
        .metrics["accuracy"]
    )


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_rows_that_depend_on_each_other_are_found_by_an_evaluator_alone(axes):
    def centred():
        return nn.Sequential(nn.Linear(8, 16), Centred(), nn.Linear(16, 4), nn.Tanh())

    refused(partial(evaluated, make=centred), "a row of the model's output should depend", **axes)
    assert on(evaluated, **axes) == [pytest.approx(evaluated(0))] * math.prod(axes.values())


class Passes(nn.Module):
    """Passes a mask on, beside what it computes."""

    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, given):
        x, mask = given if isinstance(given, tuple) else (given, given > 0)
        return x + self.down(self.up(x).tanh()) * mask, mask


class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, given):
        return self.head(given[0])


@pytest.mark.skipif(Version(torch.__version__) < Version("2.12"), reason="whose stages send no masks")
def test_layers_between_cut_ones_pass_masks_on_under_pp_and_tp():
    plan = {"*.up": ddl.Column(), "*.down": ddl.Row()}
    assert_right(
        partial(trained, make=lambda: nn.Sequential(Passes(), Passes(), Passes(), Ends()), tensor_plan=plan), pp=2, tp=2
    )


class Placed(nn.Module):
    """The table of positions of torch's tutorials, of shape (tokens, 1, width) by a transposition."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(9, 8, dtype=torch.float64).unsqueeze(0).transpose(0, 1))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x + self.table[3, 0])


def test_a_transposed_buffer_is_right_under_ddp():
    assert_right(partial(trained, make=Placed), dp=2)


def metrics_of(local_rank):
    torch.manual_seed(0)
    y = torch.randint(4, (14,), generator=torch.Generator().manual_seed(1))
    y[[0, 1, 9]] = -100
    evaluator = ddl.create_supervised_evaluator(ddl.auto_model(mlp()))
    for name, loss in (("weights", nn.CrossEntropyLoss(X[0, :4].exp())), ("sum", nn.CrossEntropyLoss(reduction="sum"))):
        Loss(loss).attach(evaluator, name)
    return evaluator.run(ddl.auto_dataloader(TensorDataset(X, y), batch_size=5)).metrics


def unknown_metric(local_rank):
    evaluator = ddl.create_supervised_evaluator(ddl.auto_model(mlp()))
    Loss(lambda o, y: ((o - y) ** 2).mean().sqrt()).attach(evaluator, "root")
    evaluator.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5))


def test_ignites_loss_of_what_is_no_mean_over_rows():
    right = metrics_of(0)
    for found in on(metrics_of, dp=3):
        assert found == pytest.approx(right, rel=1e-6)  # Ignite adds up in float32
    refused(unknown_metric, "Ignite's Loss adds up means over rows", dp=2)


def found_lr(local_rank):
    torch.manual_seed(0)
    model = ddl.auto_model(mlp())
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.01))
    trainer, finder = ddl.create_supervised_trainer(model, optimizer, F.mse_loss), FastaiLRFinder()
    with finder.attach(trainer, {"model": model, "optimizer": optimizer}, num_iter=4) as there:
        there.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=4))
    assert not trainer.has_event_handler(finder._log_lr_and_loss)
    return finder.get_results()["loss"]


@pytest.mark.filterwarnings("ignore:Run completed")
def test_ignites_lr_finder_sees_the_loss_of_one_process():
    right = found_lr(0)
    assert on(found_lr, dp=2) == [pytest.approx(right, rel=1e-12)] * 2


def clipped_and_averaged(local_rank, **options):
    torch.manual_seed(0)
    model = ddl.auto_model(mlp(), **options)
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    trainer = trainer_of(model, F.mse_loss)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: mean.update_parameters(model))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8))
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    largest = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().abs().max() for p in model.parameters()]
    return [float(max(largest))], whole(mean.module)


def test_clip_grad_value_and_averaged_models_over_tp():
    assert_right(partial(clipped_and_averaged, tensor_plan=PLAN), tp=2)


def compiled(local_rank, **options):
    torch.manual_seed(0)
    model = ddl.auto_model(mlp(), **options)
    with torch.no_grad():
        model(X)  # eager, before
    trainer, losses = trainer_of(torch.compile(model, backend="eager"), F.mse_loss), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=2)
    return losses, whole(model)


@pytest.mark.slow
def test_a_model_that_is_compiled_after_an_eager_call():
    assert_right(partial(compiled, tensor_plan=PLAN), tp=2)


def each_compiled():
    model = mlp()
    for layer in model:
        layer.compile(backend="eager")
    return model


@pytest.mark.slow
def test_layers_that_are_compiled_while_hooks_of_tensors_are_asked():
    assert_right(partial(trained, make=each_compiled, tensor_plan=PLAN), dp=2, tp=2)


def looked_at(local_rank, **options):
    torch.manual_seed(0)
    model = ddl.auto_model(mlp().append(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()), **options)
    with torch.inference_mode():
        before = model(X)
    trainer = trainer_of(model, F.mse_loss)
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=2)
    with torch.inference_mode():
        after = model(X)
    return torch.cat([before, after]), whole(model)


@pytest.mark.parametrize(
    ("axes", "options"),
    [({"dp": 2}, {"shard": True}), pytest.param({"dp": 2, "tp": 2}, {"tensor_plan": PLAN}, marks=pytest.mark.slow)],
    ids=str,
)
def test_inference_mode_before_a_step(axes, options):
    assert_right(partial(looked_at, **options), **axes)


def convolution():
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.Flatten())


def channels_last(model):
    model.to(memory_format=torch.channels_last)


def lazy():
    return nn.Sequential(nn.LazyLinear(4))


def test_another_memory_format_and_lazy_layers_are_refused():
    refused(partial(trained, change=channels_last, make=convolution), "another memory format", dp=2)
    with pytest.raises(RuntimeError, match="Run a dummy forward pass to correctly initialize"):  # torch's words
        on(partial(trained, make=lazy), dp=2)


def two_heads(o, y):
    return F.cross_entropy(o[:, :3], y[:, 0].long()) + F.mse_loss(o[:, 3:], y[:, 1:])


def test_targets_that_are_ignored_late_among_real_numbers():
    y = torch.cat([torch.zeros(14, 1), Y[:, :1]], 1)
    y[8, 0] = -100  # in the third batch
    refused(partial(_with_two_heads, y), "loss_fn should be a mean over rows", dp=2)


def _with_two_heads(y, local_rank):
    torch.manual_seed(0)
    trainer = trainer_of(ddl.auto_model(mlp()), two_heads)
    trainer.run(ddl.auto_dataloader(TensorDataset(X, y), batch_size=4))


class Hooking(nn.Module):
    """Gives its input's gradient a hook, as forward passes that clip gradients do."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(self.hook)
        return x * 1.0


def with_hook(hook):
    return nn.Sequential(nn.Linear(8, 16), Hooking(hook), nn.Tanh(), nn.Linear(16, 4))


def clamped_in_place(gradient):
    gradient.clamp_(-1e-3, 1e-3)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_a_hook_of_a_tensor_that_is_not_linear_is_refused(axes):
    assert_right(partial(trained, make=partial(with_hook, lambda g: 0.5 * g)), **axes)
    assert_right(partial(trained, make=partial(with_hook, lambda g: None)), **axes)
    for hook in (lambda g: g.clamp(-1e-3, 1e-3), lambda g: g / g.norm(), clamped_in_place):
        refused(
            partial(trained, make=partial(with_hook, hook)), "hook of a tensor of shape .* should be linear", **axes
        )


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class AboveMedian(nn.Module):
    def forward(self, x):
        return x * (x > x.median())


class Mixed(nn.Module):
    """Mixup, which evaluation leaves out."""

    def forward(self, x):
        return 0.7 * x + 0.3 * x.flip(0) if self.training else x


class OfUnitDeviation(nn.Module):
    """One row alone has no deviation."""

    def forward(self, x):
        return x / x.std(0)


class CentredOverRanks(nn.Module):
    """A mean of the rows of all ranks."""

    def forward(self, x):
        if not self.training:
            return x
        summed = torch.cat([x.detach().sum(0), x.new_tensor([len(x)])])
        if dist.is_initialized():
            dist.all_reduce(summed)
        return x - summed[:-1] / summed[-1]


class Tossed(nn.Module):
    """A coin of Python's, which all ranks toss alike."""

    def forward(self, x):
        return x * (2 if self.training and random.random() < 0.5 else 1)


def centred(how=Centred):
    random.seed(1)
    return nn.Sequential(nn.Linear(8, 16), how(), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_rows_that_depend_on_each_other_are_refused(axes):
    for how in (Centred, AboveMedian, Mixed, OfUnitDeviation):
        refused(partial(trained, make=partial(centred, how)), "depends on other rows of the batch", **axes)


class OfTheLargest(nn.Module):
    def forward(self, x):
        return x / x.max()


@pytest.mark.parametrize("at", range(8))
def test_the_largest_of_rows_is_found_whichever_row_has_it(at):
    x, model = torch.rand(8, 3), OfTheLargest()
    x[at] += 9
    assert rows_depend_on_each_other(model, x, [model])


class KeepsOutputs(nn.Module):
    """A layer of which the last outputs are kept, in one of several ways."""

    def __init__(self, layer, how):
        super().__init__()
        self.layer, self.how, self.last, self.seen = layer, how, None, {}
        if how == "hook":
            layer.register_forward_hook(lambda module, x, y: self.seen.update(last=y.detach()))

    def forward(self, x):
        y = self.layer(x)
        if self.how != "hook":
            self.last = {"attribute": y, "list": [y.detach()]}[self.how]
        return y


class CentredLate(nn.Module):
    """Takes a mean over rows, or scales gradients by their number, from a step on."""

    def __init__(self, how=""):
        super().__init__()
        self.layer, self.how, self.late = nn.Linear(8, 4), how, True

    def forward(self, x):
        y = self.layer(x)
        if self.late and self.how == "mean":
            y = y - y.mean(0)
        return y.detach() + (y - y.detach()) / len(x) if self.late and self.how == "gradient" else y


@pytest.mark.parametrize("how", ["", "mean", "gradient"])
def test_three_passes_show_what_thirteen_do(how):
    model = CentredLate(how)
    assert may_depend_in_training(model, X[:8].float(), [model]) is bool(how)
    dropping = nn.Sequential(model, DropsByItself())
    assert may_depend_in_training(dropping, X[:8].float(), [dropping])


class DropsByItself(nn.Module):
    def forward(self, x):
        return x * torch.rand(len(x), 1)


@pytest.mark.parametrize(
    ("how", "says", "options"),
    [("mean", ROWS_DEPEND, {}), ("mean", ROWS_DEPEND, {"shard": True}), ("gradient", ROW_GRADIENTS_DEPEND, {})],
)
def test_rows_that_depend_on_each_other_late_are_refused(how, says, options):
    def late(local_rank):
        model = ddl.auto_model(CentredLate(how).double(), **options)
        trainer = trainer_of(model, F.mse_loss)

        @trainer.on(Events.ITERATION_STARTED)
        def _():
            getattr(model, "module", model).late = trainer.state.iteration > 100

        trainer.run([(X[:4], Y[:4])] * 140)

    refused(late, re.escape(says[:60]), dp=2)


@pytest.mark.parametrize("how", ["attribute", "list", "hook"])
def test_a_kept_output_hides_no_rows_that_depend_on_each_other(how):
    x = X[:8].float()
    for layer, depend in ((Centred(), True), (nn.Linear(8, 4), False)):
        model = KeepsOutputs(layer, how)
        model(x)  # a batch before
        assert rows_depend_on_each_other(model, x, [model]) is depend
    carries = Carries()
    carries(x)
    assert not rows_depend_on_each_other(carries, x, [carries])


def test_complex_outputs_are_compared():
    for layer, depend in ((Centred(), True), (nn.Tanh(), False)):
        model = nn.Sequential(layer, Turned())
        assert rows_depend_on_each_other(model, X[:8], [model]) is depend


class Holder:
    def __init__(self, x):
        self.x, self.itself, self.length = x, nn.Identity(), len(x)


class Items(dict):
    """Which torch's pytree takes for a leaf."""


def test_rows_in_containers_of_other_kinds_are_seen():
    kinds = (
        lambda x: Items(x=x),
        lambda x: UserDict(x=x),
        lambda x: types.SimpleNamespace(x=x),
        Holder,
        lambda x: Holder([UserDict(x=x)]),
    )
    given = X[:8].clone()

    def x_of(batch):
        x = batch["x"] if hasattr(batch, "keys") else batch.x
        return x[0]["x"] if isinstance(x, list) else x

    for make, (layer, depend) in itertools.product(kinds, ((Centred(), True), (nn.Tanh(), False))):
        batch = make(given)
        assert rows_depend_on_each_other(lambda b: layer(x_of(b)), batch, [layer]) is depend  # noqa: B023
        assert x_of(batch) is given
    knot = Holder(given)
    knot.itself = knot  # not known, and no error
    assert not rows_depend_on_each_other(lambda b: layer(b.x), knot, [layer])


class Turned(nn.Module):
    def forward(self, x):
        return torch.complex(x, x)


class CentredLater(nn.Module):
    centres = False

    def forward(self, x):
        return x - x.mean(0) if self.centres else x


def centred_from_epoch_4(local_rank):
    torch.manual_seed(0)
    model = ddl.auto_model(nn.Sequential(nn.Linear(8, 4), later := CentredLater(), nn.Linear(4, 4)).double())
    trainer = trainer_of(model, F.mse_loss)
    trainer.add_event_handler(Events.EPOCH_STARTED(once=4), lambda: setattr(later, "centres", True))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=4)  # of two steps each


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}], ids=str)
def test_rows_that_begin_to_depend_on_each_other_are_refused(mesh):
    refused(centred_from_epoch_4, "depends on other rows of the batch", **mesh)


class CountsRows(nn.Linear):
    """A module with weights, of which FSDP2 makes a class of its own."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        return super().forward(x) / (1 + self.seen / 20)


@pytest.mark.parametrize("make", [centred, lambda: nn.Sequential(CountsRows(8, 8), nn.Linear(8, 4))])
def test_rows_that_depend_on_each_other_are_refused_of_a_sharded_model(make):
    refused(partial(trained, make=make, shard=True), "depends on other rows of the batch", dp=2)


def test_what_one_stage_refuses_is_raised_by_all_stages():
    """So that none waits for the output of another, where a program goes on."""

    def refusals(local_rank):
        found = []
        for how, is_first in itertools.product((Centred, Recurrent), (True, False)):
            layers = [how(), nn.Linear(8, 4)] if is_first else [nn.Linear(8, 8), nn.Sequential(how(), nn.Linear(8, 4))]
            with pytest.raises(ValueError, match="depends on other rows of the batch|forward changes") as caught:
                trained(0, make=partial(nn.Sequential, *layers))
            found.append(str(caught.value))
        return found

    first, second = on(refusals, pp=2)
    assert first == second


class KeepsHidden(nn.Sequential):
    def forward(self, x):
        self.hidden = self[1](self[0](x))
        return self[2](self.hidden)


def with_hidden(local_rank):
    torch.manual_seed(0)
    model = ddl.auto_model(KeepsHidden(*mlp()), PLAN)
    trainer = trainer_of(model, lambda output, y: F.mse_loss(output, y) + model.hidden.mean())
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8))


def test_a_loss_of_features_that_tp_ranks_share_is_refused():
    refused(with_hidden, "tp peers should compute the same loss", tp=2)


class WithCounts(nn.Linear):
    """Beside its output, how many rows are largest in each of 8 features."""

    def forward(self, x):
        return super().forward(x), torch.bincount(x.argmax(1), minlength=8).to(x.dtype)


def with_counts(local_rank):
    torch.manual_seed(0)
    model = ddl.auto_model(WithCounts(8, 4).double())
    trainer = trainer_of(model, F.mse_loss, model_transform=lambda output: output[0])
    data = TensorDataset(X.repeat(2, 1), Y.repeat(2, 1))
    return [trainer.run(ddl.auto_dataloader(data, batch_size=20)).output], whole(model)


def test_a_table_as_long_as_the_rows_that_are_tried_is_right():
    assert_right(with_counts, dp=2)


def test_rows_of_all_ranks_and_coins_that_all_toss_alike_are_right():
    for how in (CentredOverRanks, Tossed):
        assert_right(partial(trained, make=partial(centred, how)), dp=2)


class Keeps(nn.Module):
    """Keeps a mean in an attribute: for the output, or only to be looked at."""

    def __init__(self, start, reads=True):
        super().__init__()
        self.mean, self.reads, self.rows = start, reads, None

    def forward(self, x):
        if self.training:
            new = x.detach().mean() if isinstance(self.mean, torch.Tensor) else x.mean().item()
            self.mean, self.rows = 0.9 * self.mean + 0.1 * new, x.detach()
        return x - self.mean if self.reads else x * 1.0


def keeping(start, reads=True):
    return nn.Sequential(nn.Linear(8, 16), Keeps(start, reads), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_numbers_that_forward_keeps_of_a_ranks_own_rows(axes):
    options = {"tensor_plan": {}} if "tp" in axes else {}
    for start in (0.0, torch.zeros(())):
        unlike = partial(trained, make=partial(keeping, start), **options)
        refused(unlike, "forward keeps '1.mean', which differs between dp ranks", **axes)
        assert_right(partial(trained, make=partial(keeping, start, reads=False), **options), **axes)


class InPlace(nn.Module):
    def forward(self, x):
        return x.sub_(0.3).mul_(0.5)


def test_an_input_that_forward_changes_in_place_is_changed_once():
    train = partial(trained, make=lambda: nn.Sequential(InPlace(), *mlp()), rows=4, epochs=2)  # 8 steps
    assert_right(train, dp=2)
    assert_right(train, pp=2)


class InObject(nn.Module):
    """Keeps a mean, or a number of calls or rows, in an object."""

    def __init__(self, what):
        super().__init__()
        self.kept, self.what = types.SimpleNamespace(mean=torch.zeros(()), n=0), what

    def forward(self, x):
        y = x - (self.kept.mean if self.what == "mean" else self.kept.n / 20)
        if self.training:
            self.kept.mean = 0.9 * self.kept.mean + 0.1 * x.detach().mean()
            self.kept.n += len(x) if self.what == "rows" else 1
        return y


def in_object(what):
    return nn.Sequential(nn.Linear(8, 16), InObject(what), nn.Tanh(), nn.Linear(16, 4))


def test_numbers_that_forward_keeps_in_an_object():
    refused(partial(trained, make=partial(in_object, "mean")), "forward keeps 'SimpleNamespace.mean', which diff", dp=2)
    refused(partial(trained, make=partial(in_object, "rows")), "keeps 'SimpleNamespace.n', which depends on how", dp=2)
    refused(partial(trained, make=partial(in_object, "calls")), "forward changes 'SimpleNamespace.", pp=2)
    assert_right(partial(trained, make=partial(in_object, "calls"), shard=True), dp=2)


class Counts(nn.Module):
    """Counts rows: for later outputs, or only to be looked at; in a buffer or an attribute, in forward or in none."""

    def __init__(self, seen, reads=True, counts=True):
        super().__init__()
        self.reads, self.counts = reads, counts
        if isinstance(seen, torch.Tensor):
            self.register_buffer("seen", seen)
        else:
            self.seen = seen

    def forward(self, x):
        factor = 1 / (1 + self.seen / 20) if self.reads else 1.0
        if self.training and self.counts:
            self.seen += len(x)
        return x * factor


def counting(local_rank, seen, reads=True, counts=True, **options):
    torch.manual_seed(0)
    counts = Counts(seen, reads, counts)
    model = ddl.auto_model(nn.Sequential(nn.Linear(8, 16), counts, nn.Tanh(), nn.Linear(16, 4)).double(), **options)
    trainer, losses = trainer_of(model, F.mse_loss), []

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(engine):
        losses.append(engine.state.output)
        if not counts.counts:
            counts.seen += engine.rows[1]

    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=6), max_epochs=3)
    return losses, whole(model)


def test_numbers_of_rows_that_forward_keeps():
    words = "forward keeps '1.seen', which depends on how many rows it gets"
    refused(partial(counting, seen=torch.zeros(()), reads=False), words, dp=2)
    refused(partial(counting, seen=0, shard=True), words, dp=2)
    assert_right(partial(counting, seen=torch.zeros(()), counts=False), dp=2)  # the cure


def through_functional_call(model, x):
    return torch.func.functional_call(model, {name: 1.5 * p for name, p in model.named_parameters()}, (x,))


def test_functional_call_takes_the_names_of_the_uncut_model():
    assert_right(partial(trained, model_fn=through_functional_call), dp=2)


class Replacing(nn.Module):
    """Runs a part of it twice with weights that are replaced for the call, by several ways, or are its own."""

    def __init__(self, way):
        super().__init__()
        self.way, self.inner, self.scale = way, mlp(), nn.Parameter(torch.ones(8))
        self.outer = nn.Linear(4, 4)

    def forward(self, x):
        once = self.way(self.inner, dict(self.inner.named_parameters()), x)
        return self.outer(once + self.way(self.inner, dict(self.inner.named_parameters()), x * self.scale))


def by_functional_call(module, weights, x, factor=1.5):
    return torch.func.functional_call(module, {name: p * factor for name, p in weights.items()}, (x,))


def by_wrapped_weights(module, weights, x):
    """Those that torch.func.grad gives have the values of the module's own."""
    given = torch.func.grad(lambda w: torch.func.functional_call(module, w, (x,)).square().mean())
    return module(x) - sum(slope.sum() for slope in given(weights).values())


def by_assignment(module, weights, x):
    own, module[0].bias = module[0].bias, None
    try:
        return module(x)
    finally:
        module[0].bias = own


def own_weights(module, weights, x):
    return torch.func.functional_call(module, weights, (x,))


def plain_call(module, weights, x):
    return module(x)


def checkpointed(module, weights, x):
    return checkpoint(module, x, use_reentrant=False)


def layers_checkpointed(module, weights, x):
    return checkpoint_sequential(module, 3, x, use_reentrant=False)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("way", [by_functional_call, by_wrapped_weights, by_assignment])
def test_weights_that_are_replaced_where_fsdp2_takes_its_own_are_refused(way, axes):
    options = {"tensor_plan": {}} if "tp" in axes else {}
    words = "was replaced for this pass .* leave out shard=True, and dp beside tp or pp"
    refused(partial(trained, make=partial(Replacing, way), shard=True, **options), words, **axes)


@pytest.mark.parametrize("options", [{"shard": True}, {"shard": True, "tensor_plan": {}}, {"tensor_plan": {}}], ids=str)
def test_weights_of_the_whole_model_that_are_replaced_are_refused(options):
    axes = {"dp": 2, "tp": 2} if "tensor_plan" in options else {"dp": 2}
    refused(partial(trained, model_fn=through_functional_call, **options), "was replaced for this pass", **axes)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        (own_weights, {}),
        (own_weights, {"offload": True}),
        *((way, {"reshard_after_forward": False}) for way in (plain_call, checkpointed, layers_checkpointed)),
        *((way, {}) for way in (checkpointed, layers_checkpointed)),
    ],
)
def test_calls_with_a_sharded_models_own_weights_are_right(way, options):
    def train(local_rank):
        sharded = {"shard": True} | options if dist.is_initialized() else {}
        return trained(local_rank, make=partial(Replacing, way), **sharded)

    assert_right(train, dp=2)


@on_each_rank(dp=2)
def test_weights_that_are_assigned_anew_are_those_of_a_sharded_model(local_rank):
    model = ddl.auto_model(mlp(), shard=True)
    state = {name: 2 * p.detach() for name, p in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    x = torch.ones(2, 8, dtype=torch.float64)
    plain = mlp()
    plain.load_state_dict({name: p.full_tensor() for name, p in state.items()})
    assert (model(x) - plain(x)).abs().max() < 1e-12
    assert ddl.auto_model(mlp(), shard=True).float()(x.float()).dtype is torch.float32


def per_sample_gradients(local_rank, **options):
    model = ddl.auto_model(mlp(), **options)

    def loss_of(weights, x, y):
        return F.mse_loss(torch.func.functional_call(model, weights, (x[None],)), y[None])

    def update(engine, batch):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(weights, *batch)

    ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8))


def test_gradients_of_each_sample_by_cut_weights_are_refused():
    said = r"torch.func \(vmap, grad\) cannot compute with weights that are cut over ranks: take a mesh of dp alone"
    refused(partial(per_sample_gradients, tensor_plan=PLAN), said, tp=2)
    refused(partial(per_sample_gradients, shard=True), "was replaced for this pass .* or leave out shard=True", dp=2)


def adapted(model, x):
    """MAML: an inner step by the rows of this call, through which the outer one differentiates."""
    rows, y, weights = x[:, :8], x[:, 8:], dict(model.named_parameters())
    inner = F.mse_loss(torch.func.functional_call(model, weights, (rows,)), y)
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    weights = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
    return torch.func.functional_call(model, weights, (rows,))


TASKS = torch.cat([X, Y], 1)[:12], Y[:12]


def test_an_inner_loop_by_each_ranks_rows_is_that_of_ddp():
    torch.manual_seed(0)
    plain, expected = mlp(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        parts = zip(*(part.chunk(2) for part in TASKS), strict=True)
        loss = sum(F.mse_loss(adapted(plain, x), y) for x, y in parts) / 2
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    train = partial(trained, model_fn=adapted, data=TASKS, rows=12, epochs=3)
    for losses, weights in on(train, dp=2):
        assert losses == pytest.approx(expected, abs=1e-12)
        assert (weights - whole(plain)).abs().max() <= 1e-12
    refused(partial(train, shard=True), "for gradients by weights, take a mesh of dp alone, without shard=True", dp=2)
    refused(partial(train, tensor_plan=PLAN), r"second derivatives \(create_graph=True\) are not supported", tp=2)
    refused(train, "model_fn cannot be given under pp", pp=2)


@on_each_rank(dp=2)
def test_a_frozen_model_takes_the_state_of_the_one_that_it_follows(local_rank):
    torch.manual_seed(0)
    model, target = ddl.auto_model(mlp()), ddl.auto_model(mlp().requires_grad_(False))
    assert not torch.equal(whole(model), whole(target))
    target.load_state_dict(model.state_dict())  # its names begin with "module."
    assert torch.equal(whole(model), whole(target))
    target.load_state_dict(ddl.full_state_dict(target))


def stepping_by(local_rank, whole_norm):
    """Leaves out steps with large gradients, by their norm or by that of this rank's part."""
    torch.manual_seed(0)
    model = ddl.auto_model(mlp())
    optimizer, losses = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1)), []

    def update(engine, batch):
        optimizer.zero_grad()
        losses.append(ddl.forward_backward(engine, model, *batch, F.mse_loss)[1].item())
        own = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
        norm = float(ddl.clip_grad_norm_(model, 1e6)) if whole_norm else own
        if norm < 1.2:
            optimizer.step()

    ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=4), max_epochs=3)
    return losses, whole(model)


def test_a_step_that_some_ranks_leave_out_is_refused():
    assert_right(partial(stepping_by, whole_norm=True), pp=2)
    refused(partial(stepping_by, whole_norm=False), "all ranks should step the model equally often", pp=2)


def unfreezing(local_rank):
    """The optimizer gets the first layer after an epoch; another one holds the bias of the last, in every second step.

    Under pp, each has nothing on one of the stages, the first one for an epoch.
    """
    torch.manual_seed(0)
    model = ddl.auto_model(mlp(), split=[2, 1] if ddl.get_mesh().pp_size > 1 else None)
    of = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    chosen = [
        [of[name] for name in names if name in of] for names in (["2.weight"], ["0.weight", "0.bias"], ["2.bias"])
    ]
    optimizer, other = (ddl.auto_optim(torch.optim.SGD([{"params": chosen[i]}], lr=0.1)) for i in (0, 2))
    losses = []

    def update(engine, batch):
        optimizer.zero_grad(), other.zero_grad()
        losses.append(ddl.forward_backward(engine, model, *batch, F.mse_loss)[1].item())
        optimizer.step()
        if engine.state.iteration % 2:
            other.step()

    engine = ddl.MeshEngine(update)
    engine.add_event_handler(
        Events.EPOCH_STARTED(once=2), lambda: optimizer.add_param_group({"params": chosen[1], "lr": 0.05})
    )
    engine.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=4), max_epochs=3)
    return losses, whole(model)


@pytest.mark.parametrize("axes", [{"pp": 2}, {"dp": 2}], ids=str)
def test_an_optimizer_that_holds_nothing_of_a_stage_steps_it_too(axes):
    assert_right(unfreezing, **axes)


def test_a_hook_on_trial_does_not_keep_its_tensor():
    with backward.checking_tensor_hooks():
        y = 2 * torch.ones(3, requires_grad=True)
        y.register_hook(lambda grad: grad)
        kept = weakref.ref(y)
        del y  # and with it the graph, without the garbage collector
    assert kept() is None


class Pooled(nn.Module):
    """The mean over the tokens of a row: of all, or but for padding."""

    def __init__(self, masked):
        super().__init__()
        self.masked, self.embed, self.out = masked, nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, ids):
        counts = (ids != 0).to(torch.float64) if self.masked else torch.ones_like(ids, dtype=torch.float64)
        return self.out((self.embed(ids) * counts[..., None]).sum(1) / counts.sum(1, keepdim=True))


SENTENCES = [(torch.arange(n) % 9 + 1, Y[i]) for i, n in enumerate([3, 5, 2, 4, 7, 9, 8, 6])]


def padded(rows):
    ids, targets = zip(*rows, strict=True)
    return nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.stack(targets)


def trained_on_sentences(local_rank, masked, collate=padded, **options):
    torch.manual_seed(0)
    model = ddl.auto_model(Pooled(masked).double(), **options)
    trainer, losses = trainer_of(model, F.mse_loss), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run(ddl.auto_dataloader(SENTENCES, batch_size=8, collate_fn=collate), max_epochs=2)
    return losses, whole(model), [str(w.message) for w in caught if "its own longest one" in str(w.message)]


def to_nine(rows):
    ids, targets = padded(rows)
    return F.pad(ids, (0, 9 - ids.shape[1])), targets


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_padding_on_which_outputs_depend_is_warned_of(axes):
    options = {"tensor_plan": {}} if "tp" in axes else {"shard": True}
    for masked, collate, warned in ((False, padded, True), (True, padded, False), (False, to_nine, False)):
        alone = trained_on_sentences(0, masked, collate)
        ranks = on(partial(trained_on_sentences, masked=masked, collate=collate, **options), **axes)
        assert [bool(found) for *_, found in ranks] == [warned] + [False] * (len(ranks) - 1)
        unlike = max((weights - alone[1]).abs().max() for _, weights, _ in ranks)
        assert unlike > 1e-3 if warned else unlike < 1e-12


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.pipeline_layers = [f"layers.{i}" for i in range(3)]

    def forward(self, x):
        return self.layers(x)


def hooked_root(model):
    model.register_forward_hook(lambda *_: None)


def hooked_holder(model):
    model.layers.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize(("change", "name"), [(hooked_root, "the model"), (hooked_holder, "'layers'")])
def test_hooks_that_a_pipeline_would_not_call(change, name):
    refused(partial(trained, change=change, make=Held), f"{name} has a forward .*hook, which would not run", pp=2)


def replaced_late(net):
    net[1] = nn.Softplus()


def removed_late(net):
    del net[-1]


def added_late(net):
    net.append(nn.Softplus())


def hooked_late(net):
    net.register_forward_hook(lambda *_: None)


def replaced_in_a_list(net):
    net.layers[1] = nn.Softplus()


def harmless(net):
    net.loss, net.note = nn.MSELoss(), "trained"
    net.layers[0].weight.data.mul_(1.0)


def changed_later(local_rank, change, make=mlp, evaluates=False):
    """The net that was given to ddl.auto_model changes after a step."""
    torch.manual_seed(0)
    net = make().double()
    model = ddl.auto_model(net)
    loader = ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8)
    trainer = trainer_of(model, F.mse_loss)
    trainer.run(loader)
    change(net)
    run = ddl.create_supervised_evaluator(model).run if evaluates else trainer.run
    run(loader, 1 if evaluates else 2)
    return [trainer.state.output], whole(model)


@pytest.mark.parametrize(
    ("change", "make", "words"),
    [
        (replaced_late, mlp, "'1' was added, replaced or removed after ddl.auto_model"),
        (removed_late, mlp, "'2' was added, replaced or removed"),
        (added_late, mlp, "'3' was added, replaced or removed"),
        (replaced_in_a_list, Held, "'layers.1' was added, replaced or removed"),
        (hooked_late, mlp, "the model has a forward hook, which would not run"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_changes_of_the_given_net_that_stages_would_not_follow(change, make, words):
    refused(partial(changed_later, change=change, make=make), words, pp=2)


def test_changes_of_the_given_net_before_an_evaluation_or_without_effect():
    refused(partial(changed_later, change=replaced_late, evaluates=True), "'1' was added, replaced or removed", pp=2)
    assert_right(partial(changed_later, change=harmless, make=Held), pp=2)


@on_each_rank(pp=2)
def test_the_given_net_in_place_of_its_pipeline(local_rank):
    net = mlp()
    model = ddl.auto_model(net)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.MeshEngine(lambda engine, batch: ddl.forward_backward(engine, net, *batch, F.mse_loss))
    uses = (
        lambda: trainer.run([(X, Y)]),
        lambda: ddl.create_supervised_trainer(net, optimizer, F.mse_loss),
        lambda: ddl.create_supervised_evaluator(nn.Sequential(*net)),
        lambda: ddl.full_state_dict(net),
        lambda: ddl.clip_grad_norm_(net, 1.0),
    )
    for use in uses:
        with pytest.raises(ValueError, match="model should be what ddl.auto_model returned"):
            use()
    ddl.create_supervised_evaluator(copy.deepcopy(net))  # each rank's own
    trained = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
    trained.run([(X, Y)])
    with pytest.raises(ValueError, match="as it was before ddl.auto_model, .* copy a net before it is given"):
        copy.deepcopy(net)  # layers of the other stage are as before


class Finetuned(nn.Linear):
    """Without gradients until it is told to train."""

    on = False

    def forward(self, x):
        with torch.set_grad_enabled(self.on and torch.is_grad_enabled()):
            return super().forward(x)


def finetuned(local_rank, forgets):
    torch.manual_seed(0)
    layer = Finetuned(8, 16)
    model = ddl.auto_model(nn.Sequential(layer, nn.Tanh(), nn.Linear(16, 4)).double())
    trainer, losses = trainer_of(model, F.mse_loss), []

    def begin():
        layer.on = True
        if forgets and hasattr(model, "forget_schedules"):
            model.forget_schedules()

    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), begin)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=2)
    return losses, whole(model)


def test_a_stage_that_begins_to_compute_with_gradients():
    if Version(torch.__version__) < Version("2.12"):  # which sends gradients in any case
        assert_right(partial(finetuned, forgets=False), pp=2)
    else:
        with pytest.raises(RuntimeError, match="when its schedule was set up.* call the model's forget_schedules()"):
            on(partial(finetuned, forgets=False), pp=2)
    assert_right(partial(finetuned, forgets=True), pp=2)


@on_each_rank(pp=2)
def test_pruning_after_auto_model_under_pp(local_rank):
    model = ddl.auto_model(mlp())
    state = ddl.full_state_dict(model)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            prune.l1_unstructured(layer, "weight", amount=0.3)
    for use in (lambda: ddl.full_state_dict(model), lambda: ddl.load_full_state_dict(model, state)):
        with pytest.raises(
            ValueError, match=r"'0.weight' was removed or renamed .*new: 0.weight_mask, .*2.weight_orig"
        ):
            use()
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            prune.remove(layer, "weight")
    assert ddl.full_state_dict(model).keys() == state.keys()


class OfSign(nn.Module):
    """Two layers, each for the rows of one sign: a few rows may need one of them alone."""

    def __init__(self, inner):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, n), nn.Linear(n, 2)) for n in (4, inner))

    def forward(self, x):
        output, first = torch.zeros_like(x), x.flatten(1)[:, 0]
        for layer, rows in zip(self.layers, (first > 0, first <= 0), strict=True):
            if rows.any():
                output[rows] = layer(x[rows])
        return output


class FailsOnFew(nn.Module):
    """Cannot be called with a few rows of one sign, as a graph's nodes without its edges."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x):
        output = self.layers[0](x)
        if len(x) < 8 and bool((x[:, 0] > 0).all()):
            raise IndexError("too few rows")
        return self.layers[1](output)


@in_float64
def trained_by_sign(local_rank, make, negative=(0, 3, 8, 11, 14, 15), shape=(2,), shard=True, **options):
    """By default, the first rows of each rank are of both signs, its last two rows of one."""
    torch.manual_seed(0)
    x = torch.rand(16, *shape) + 0.1
    x[list(negative)] *= -1
    model = ddl.auto_model(make(), shard=shard, **options)
    trainer = trainer_of(model, nn.functional.mse_loss)
    trainer.run(ddl.auto_dataloader(TensorDataset(x, x.flip(1)), batch_size=16), max_epochs=3)
    return trainer.state.output


class FailsAndSends(FailsOnFew):
    """The same with a buffer, which DDP sends before a forward pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("zero", torch.zeros(()))


BY_SIGN = partial(OfSign, 4), partial(OfSign, 6)
OF_REGIONS = {"negative": (0, 1, 8, 10), "tensor_plan": {"layers.*.0": ddl.Column(), "layers.*.1": ddl.Row()}}
OF_TOKENS = {"negative": (0, 1, 2, 3, 8, 10), "shape": (4, 2)}


@pytest.mark.parametrize(
    ("make", "options", "mesh"),
    [
        *((make, {}, {"dp": 2}) for make in (*BY_SIGN, FailsOnFew)),
        (FailsAndSends, {"shard": False, "negative": (0, 3, 8, 15)}, {"dp": 2}),
        *((make, OF_REGIONS, {"dp": 2, "tp": 2}) for make in BY_SIGN),
        *((make, OF_TOKENS, {"dp": 2, "cp": 2}) for make in BY_SIGN),
    ],
    ids=[
        "alike",
        "unlike",
        "fails",
        "fails and sends",
        "regions alike",
        "regions unlike",
        "tokens alike",
        "tokens unlike",
    ],
)
def test_a_check_whose_few_rows_lead_ranks_to_other_layers_finds_nothing(make, options, mesh):
    train = partial(trained_by_sign, make=make, **options)
    assert all(abs(loss - train(0)) < 1e-12 for loss in launch(mesh, train))


class OfPadding(nn.Module):
    """A layer for rows that are padded, and one for the others."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x):
        output = torch.zeros_like(x[:, :2])
        for layer, rows in zip(self.layers, (x[:, -1] == 0, x[:, -1] != 0), strict=True):
            if rows.any():
                output[rows] = layer(x[rows, :2])
        return output


@on_each_rank(dp=2)
def test_a_check_of_padding_that_leads_ranks_to_other_layers_finds_nothing(local_rank):
    """With zeros appended, as many as on the other rank, all rows of the first are padded."""
    rows = [(torch.ones(n), torch.ones(2)) for n in (4, 3, 4, 3, 6, 5, 6, 5)]
    trainer = trainer_of(ddl.auto_model(OfPadding(), shard=True))
    trainer.run(ddl.auto_dataloader(rows, batch_size=8, collate_fn=padded), max_epochs=2)


def evaluates_after_a_step(local_rank):
    model = ddl.auto_model(mlp(), shard=True)
    trainer_of(model, F.mse_loss).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), epoch_length=1)
    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.delattr(modules_in_use, "peers_are_elsewhere")
        return model(X).shape


def test_ranks_compare_their_calls_in_a_step_and_not_after_it():
    assert on(evaluates_after_a_step, dp=2) == [(14, 4)] * 2


class EarlyExits(nn.Module):
    """Leaves where its least sure row is sure: each row by itself, or all rows of a rank together."""

    def __init__(self, each_row):
        super().__init__()
        self.each_row = each_row
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x):
        done, found = torch.zeros(len(x), 1, dtype=torch.bool), torch.zeros(len(x), 2)
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x).tanh()
            z = leave(x)
            found = torch.where(done, found, z)
            sure = z.softmax(1).amax(1, keepdim=True) > 0.51
            done = done | (sure if self.each_row else sure.all())
            if done.all():
                break
        return found


@pytest.mark.parametrize("each_row", [True, False])
def test_exits_that_all_rows_choose_together_are_refused(each_row):
    """find_unused_parameters=True is right where each row chooses by itself."""

    def training(local_rank):
        torch.manual_seed(0)
        model = EarlyExits(each_row).double()
        model = ddl.auto_model(model, **({"find_unused_parameters": True} if ddl.get_mesh().dp_size > 1 else {}))
        optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
        trainer, losses = ddl.create_supervised_trainer(model, optimizer, F.mse_loss), []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
        x = torch.randn(24, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
        trainer.run(ddl.auto_dataloader(TensorDataset(x, x[:, :2].sin()), batch_size=8), max_epochs=4)
        return losses

    if each_row:
        assert launch({"dp": 2}, training)[0] == pytest.approx(training(0), rel=1e-5)
    else:
        with pytest.raises(ddl.RankError, match="a row of the model's output should depend on that row of the input"):
            launch({"dp": 2}, training)


class PartlyFloat32(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.c(self.b(self.a(x).float().tanh()).double())


def partly_float32(local_rank):
    torch.manual_seed(0)
    model = PartlyFloat32().double()
    model.b.float()
    trainer = trainer_of(ddl.auto_model(model), F.mse_loss)
    return trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=7), max_epochs=4).output


def test_a_float32_part_of_a_float64_model_rounds_as_float32():
    alone = partly_float32(0)
    assert on(partly_float32, dp=2) == [pytest.approx(alone, rel=1e-5)] * 2


@pytest.mark.parametrize("n", [127, 776])
def test_a_thousand_ranks_that_agree_are_known_to(n):
    audit = types.SimpleNamespace(mesh=types.SimpleNamespace(dp_cp_size=n))
    contract = types.SimpleNamespace(padded=False)
    for number in map(float, range(2**20 - 64, 2**20)):
        same = number, number**2
        of_one = [1.0, *same, 0.0, 0.0, 0.0, 1.0, *same, 1.0, *same, *same]
        Audit.compare(audit, [n * value for value in of_one], contract)
    with pytest.raises(ValueError, match="ranks should list the same batches"):
        Audit.compare(audit, [n * value + (i == 10) for i, value in enumerate(of_one)], contract)
