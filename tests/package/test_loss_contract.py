"""What a loss divides by: known, declared, or checked until it is certain, for each loss and each model."""

import itertools
import math
import random
import warnings
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ranks import assert_right, in_float64, launch, on, on_each_rank, refused, trainer_of
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import ignite_ddl as ddl
from ignite_ddl.checks.rows_alone import several_rows
from ignite_ddl.divisor import divisor_of
from ignite_ddl.loss_contract import LossContract
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.structure import full_tensors

generator = torch.Generator().manual_seed(2)
X = torch.randn(22, 6, generator=generator, dtype=torch.float64)
Y = torch.randn(22, 7, generator=generator, dtype=torch.float64)
TOKENS = torch.randint(1, 7, (22, 5), generator=generator)
TARGETS = torch.randint(1, 7, (22, 5), generator=generator)
LENGTHS = torch.tensor([5, 2, 4, 1, 3, 5, 5, 2, 1, 4, 3, 5, 2, 2, 5, 1, 4, 3, 1, 5, 2, 4])
PADDED = torch.where(torch.arange(5) < LENGTHS[:, None], TARGETS, 0)  # 0 is padding
LATE = torch.where(torch.arange(22)[:, None] < 12, TARGETS, PADDED)  # no padding in the first two batches of 6


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7)).double()


class Tagger(nn.Module):
    """Scores of 7 words for each of 5 tokens."""

    def __init__(self, zeros=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7)
        if zeros:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(self.embed(x).tanh())


def trained(
    local_rank,
    make=mlp,
    loss_fn=F.mse_loss,
    data=(X, Y),
    divisor=None,
    rows=6,
    epochs=1,
    loader=None,
    run=None,
    **options,
):
    """Losses, and the weights after the steps."""
    torch.manual_seed(0)
    model = ddl.auto_model(make().double())
    trainer, losses = trainer_of(model, loss_fn, loss_divisor=divisor, **options), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    loader = loader() if loader else ddl.auto_dataloader(TensorDataset(*data), batch_size=rows)
    trainer.run(loader, **(run or {"max_epochs": epochs}))
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


def gradient_by_x(local_rank, **options):
    """A term of the loss is the derivative of the output, as in physics-informed networks."""

    def prepare(batch, device, non_blocking):
        x = batch[0].clone().requires_grad_()
        return x, (x, batch[1])

    def loss_fn(output, y):
        (slope,) = torch.autograd.grad(output.sum(), y[0], create_graph=True)
        return F.mse_loss(output, y[1]) + slope.square().mean()

    return trained(local_rank, loss_fn=loss_fn, prepare_batch=prepare, **options)


@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_a_gradient_of_the_output_by_x_is_refused_under_pp(axes):
    refused(gradient_by_x, "loss_fn takes a gradient of the output by a tensor before it .*a mesh without pp", **axes)


def test_a_gradient_of_the_output_by_x_is_right_on_dp():
    assert_right(partial(gradient_by_x, divisor="rows"), dp=2)
    assert_right(partial(gradient_by_x, rows=2), dp=2)  # single rows, compared with those of peers


def regularised(local_rank, keep=lambda output: output):
    """A term of the loss is of what a hook keeps of a layer that tp cuts."""
    torch.manual_seed(0)
    model, kept = mlp().double(), []
    model[0].register_forward_hook(lambda module, inputs, output: kept.append(keep(output)))
    model = ddl.auto_model(model, {"0": ddl.Column(), "2": ddl.Row()})
    trainer, losses = trainer_of(model, lambda o, y: F.mse_loss(o, y) + kept[-1].square().mean()), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=6))
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


def test_what_a_hook_keeps_of_a_cut_layer_is_gathered_for_the_loss():
    refused(regularised, r"a layer that tensor_plan cuts: let the hook keep output.full_tensor\(\)", tp=2)
    assert_right(partial(regularised, keep=full_tensors), tp=2)


def views_in_the_model(local_rank, checks):
    class Views(nn.Module):
        def forward(self, x):
            return torch.cat([x, x.sin()])

    def loss_fn(output, y):
        one, other = output.chunk(2)
        return F.mse_loss(one, other.detach()) + F.mse_loss(other, y)

    torch.manual_seed(0)
    model = ddl.auto_model(nn.Sequential(Views(), mlp()).double(), checks=checks)
    trainer = trainer_of(model, loss_fn, loss_divisor="rows", checks=checks)
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=6))
    return [trainer.state.output], torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


def test_two_views_that_the_model_makes_are_right_without_checks():
    refused(partial(views_in_the_model, checks=True), "or if x has two views .*pass checks=False", dp=2)
    assert_right(partial(views_in_the_model, checks=False), dp=2)


def by_tokens(scores, y):
    """A mean over tokens that are no padding, as many write it."""
    losses = F.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="none")
    counts = (y.flatten() != 0).double()
    return (losses * counts).sum() / counts.sum()


def summed(output, y):
    return (output - y).square().sum()


NO_MEAN = "should be a mean over rows, but gives"


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_padding_that_comes_later_is_found_and_declared_padding_is_right(axes):
    def make():
        return nn.Sequential(Tagger(), nn.Identity())

    late = partial(trained, make=make, loss_fn=by_tokens, data=(TOKENS, LATE))
    refused(late, NO_MEAN, **axes)  # in step 4
    assert_right(partial(late, divisor=lambda y: (y != 0).sum()), **axes)


def test_ignored_targets_are_looked_at_in_whatever_step_they_come():
    classes = torch.randint(7, (22,), generator=torch.Generator().manual_seed(1))
    classes[12:14] = -100  # in step 3, on one rank
    wrapped = {"loss_fn": lambda o, y: F.cross_entropy(o, y), "data": (X, classes)}
    refused(partial(trained, **wrapped), NO_MEAN, dp=2)
    assert_right(partial(trained, **wrapped, divisor=lambda y: (y != -100).sum()), dp=2)
    assert_right(partial(trained, loss_fn=F.cross_entropy, data=(X, classes)), dp=2)


def test_one_row_a_rank_is_joined_with_the_next():
    refused(partial(trained, loss_fn=summed, rows=2), NO_MEAN, dp=2)
    assert_right(partial(trained, rows=2), dp=2)


def of_three_rows(output, y):
    if len(y) != 3:
        raise AssertionError  # without words, as a bare assert
    return F.mse_loss(output, y)


def test_a_loss_that_asserts_the_number_of_rows_has_to_be_declared():
    refused(partial(trained, loss_fn=of_three_rows), r"fails with a part of them \(AssertionError\(\)\)", dp=2)


def test_equal_values_of_all_parts_say_nothing():
    zeros = partial(trained, make=partial(Tagger, zeros=True), loss_fn=by_tokens, data=(TOKENS, PADDED))
    refused(partial(zeros, rows=8), NO_MEAN, dp=2)  # log 7 in step 1


def test_a_second_call_for_a_model_has_its_own_divisor():
    def both(local_rank, second):
        torch.manual_seed(0)
        model = ddl.auto_model(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def update(engine, batch):
            optimizer.zero_grad()
            ddl.forward_backward(engine, model, *batch, F.l1_loss, last=False)
            _, loss = ddl.forward_backward(engine, model, *batch, summed, loss_divisor=second)
            optimizer.step()
            return loss.item()

        loss = ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5)).output
        return [loss], torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])

    assert_right(partial(both, second="sum"), dp=2)
    refused(partial(both, second=None), NO_MEAN, dp=2)


class Balanced(nn.Sequential):
    """Keeps a term of the loss, as mixtures of experts do."""

    def forward(self, x):
        hidden = self[0](x)
        self.extra = hidden.mean(0).square().sum()
        return self[2](self[1](hidden))


class Judged(Tagger):
    """Returns its own loss, as transformers do."""

    def forward(self, xy):
        x, y = xy
        scores = super().forward(x)
        return {"loss": F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=0), "logits": scores}


def test_what_the_model_computes_of_a_loss_has_to_be_declared():
    def with_extra(local_rank):
        model = ddl.auto_model(Balanced(*mlp()))
        trainer_of(model, lambda o, y: F.mse_loss(o, y) + 0.1 * model.module.extra).run(
            ddl.auto_dataloader(TensorDataset(X, Y), batch_size=6)
        )

    refused(with_extra, "something that the model has kept besides its output .* loss_divisor=", dp=2)

    def judged(local_rank, divisor):
        options = {"prepare_batch": lambda batch, device, non_blocking: (tuple(batch), batch[1])}
        return trained(0, Judged, lambda o, y: o["loss"], (TOKENS, PADDED), divisor, **options)

    refused(partial(judged, divisor=None), "uses a number without rows", dp=2)
    assert_right(partial(judged, divisor=lambda y: (y != 0).sum()), dp=2)


class Masking(nn.Linear):
    def forward(self, x):
        return super().forward(x).masked_fill(torch.arange(7) > 4, -math.inf)


def masking():
    return nn.Sequential(nn.Linear(6, 8), Masking(8, 7))


def test_a_mask_in_the_output_where_nothing_counts():
    ignoring = torch.where(torch.arange(22) % 6 < 3, -100, Y[:, :4].argmax(1))
    assert_right(partial(trained, make=masking, loss_fn=F.cross_entropy, data=(X, ignoring)), dp=2)


def test_a_rank_whose_targets_all_are_padding():
    empty = PADDED.clone()
    empty[6:9] = 0  # rank 0's rows of the second batch: its mean over nothing is NaN

    def judged(local_rank):
        options = {"prepare_batch": lambda batch, device, non_blocking: (tuple(batch), batch[1])}
        divisor = lambda y: (y != 0).sum()  # noqa: E731
        return trained(0, Judged, lambda o, y: o["loss"], (TOKENS, empty), divisor, **options)

    assert_right(judged, dp=2)


@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_where_nothing_counts_on_any_rank_the_loss_is_that_of_torch(axes):
    nothing = PADDED[:, 0].clone()
    nothing[6:12] = 0
    loss_fn = nn.CrossEntropyLoss(ignore_index=0)
    of = partial(trained, loss_fn=loss_fn, data=(X, nothing))
    model = mlp()
    assert loss_fn(model(X[6:12]), nothing[6:12]).isnan()
    right = of(0)[1]
    for losses, weights in on(of, **axes) if axes else [of(0)]:
        assert [loss != loss for loss in losses] == [False, True, False, False]
        assert (weights - right).abs().max() <= 1e-12


class ReturningAWeight(nn.Module):
    def __init__(self, copies=True):
        super().__init__()
        self.layer, self.copies = nn.Linear(6, 3), copies

    def forward(self, x):
        return self.layer(x), self.layer.weight.clone() if self.copies else self.layer.weight


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("divisor", [None, "rows"])
def test_what_all_rows_share_may_have_as_many_rows_as_a_rank(divisor, copies):
    def mean(output, y):
        return F.mse_loss(output[0], y[:, :3]) + output[1].square().sum()

    of = partial(trained, make=partial(ReturningAWeight, copies), divisor=divisor)  # of 3 rows each
    assert_right(partial(of, loss_fn=mean), dp=2)

    def total(output, y):
        return (output[0] - y[:, :3]).square().sum() + output[1].square().sum()

    words = "loss_fn should be a mean over rows, but" if divisor is None else "loss_divisor should be what"
    refused(partial(of, loss_fn=total), words, dp=2)


def test_two_targets_of_a_microbatch_are_no_list_of_two_samples():
    """Where a rank has two rows, and a microbatch one of them."""

    def with_inputs(batch, device, non_blocking):
        return batch[0], (batch[0], batch[1])

    def loss_fn(output, y):
        return F.mse_loss(output, y[1]) + (output[:, :6] - y[0]).square().mean()

    of = partial(trained, loss_fn=loss_fn, prepare_batch=with_inputs, rows=4)
    assert_right(of, dp=2, pp=2)


@dataclass
class Answer:
    logits: torch.Tensor
    name: str = "answer"


class Answering(nn.Sequential):
    def forward(self, x):
        return Answer(super().forward(x))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 7), nn.Linear(8, 3)

    def forward(self, h):
        return self.first(h), self.second(h)


def of_first_head(output, y):
    return F.cross_entropy(output[0], y)


def two_heads(local_rank, n_ignored, **options):
    """The loss uses one of two heads, and a part has no target that counts; weight decay moves what has a gradient."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), Heads())
    model = ddl.auto_model(layers.double(), **options)
    y = TARGETS[:12, 0].clone()
    y[:n_ignored] = -100
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
    trainer = ddl.create_supervised_trainer(model, optimizer, of_first_head, loss_divisor=lambda y: (y != -100).sum())
    trainer.run(ddl.auto_dataloader(TensorDataset(X[:12], y), batch_size=6))
    return [], torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {"find_unused_parameters": True}),
        ({"dp": 2}, {"shard": True}),
        ({"pp": 2}, {}),
        ({"dp": 2, "pp": 2}, {}),
    ],
    ids=str,
)
def test_weights_that_a_loss_does_not_use_have_no_gradient_where_nothing_counts_either(axes, options):
    right = two_heads(0, 3)[1]
    for _, weights in on(partial(two_heads, n_ignored=3, **options), **axes):
        assert (weights - right).abs().max() <= 1e-12


def test_an_output_may_be_a_dataclass():
    answering = {"make": lambda: Answering(*mlp()), "loss_fn": lambda o, y: F.mse_loss(o.logits, y)}
    assert_right(partial(trained, **answering), dp=2)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, output, y):
        return F.mse_loss(output * self.scale, y)


def test_a_loss_with_weights_of_its_own_needs_somebody_to_average_them():
    refused(lambda local_rank: trained(0, loss_fn=Scaled()), "loss_fn has weights of its own", dp=2)
    assert_right(lambda local_rank: trained(0, loss_fn=ddl.auto_model(Scaled())), dp=2)


def with_its_loss(local_rank, called=False, by_hand=False, checks=True, **options):
    """The loss has weights, which the same optimizer steps; dp ranks have unlike numbers of rows."""
    torch.manual_seed(0)
    model, scaled = ddl.auto_model(mlp(), **options), ddl.auto_model(Scaled(), **options)
    optimizer = ddl.auto_optim(torch.optim.SGD([*model.parameters(), *scaled.parameters()], lr=0.1))
    loss_fn = (lambda output, y: scaled(output, y)) if called else scaled

    def update(engine, batch):
        optimizer.zero_grad()
        ddl.forward_backward(engine, model, *batch, loss_fn)
        optimizer.step()

    trainer = ddl.create_supervised_trainer(model, optimizer, loss_fn, checks=checks)
    trainer = ddl.MeshEngine(update) if by_hand else trainer
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5), max_epochs=2)
    weights = torch.cat([weight.flatten() for weight in ddl.full_state_dict(model).values()])
    return [ddl.full_state_dict(scaled)["scale"].item()], weights


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=str)
def test_the_weights_of_a_loss_are_stepped_beside_the_models(options):
    def all_of_them(local_rank, **options):
        each = [with_its_loss(0, called, by_hand, **options) for called in (False, True) for by_hand in (False, True)]
        each.append(with_its_loss(0, checks=False, **options))
        return [scale for (scale,), _ in each], torch.cat([weights for _, weights in each])

    assert_right(partial(all_of_them, **options), dp=2)


def test_an_optimizer_of_a_model_whose_gradients_nobody_weighted_is_refused():
    def gan(local_rank):
        torch.manual_seed(0)
        one, other = ddl.auto_model(mlp()), ddl.auto_model(mlp())
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]

        def update(engine, batch):
            for optimizer in optimizers:
                optimizer.zero_grad()
            ddl.forward_backward(engine, one, *batch, F.mse_loss)
            optimizers[0].step()
            F.mse_loss(other(batch[0]), batch[1]).backward()
            optimizers[1].step()

        ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5))

    refused(gan, "this rank has . of the batch's 5 rows", dp=2)


# --- what is declared is compared, too


def negatives_of_the_batch(output, y):
    return F.cross_entropy(output @ y.T, torch.arange(len(y)))


def negatives_of_all_ranks(output, y):
    y = y.contiguous()
    parts = [torch.empty_like(y) for _ in range(idist.get_world_size())]
    if len(parts) == 1:
        return negatives_of_the_batch(output, y)
    dist.all_gather(parts, y)
    return F.cross_entropy(output @ torch.cat(parts).T, torch.arange(len(y)) + idist.get_rank() * len(y))


def at_least_one(output, y):
    counts = (y > 1.5).double()
    return ((output - y).square() * (1 + counts)).sum() / counts.sum().clamp(min=1)


def over_features(output, y, reduction):
    return (output - y).square().sum(1).mean()


WRONGLY = "loss_divisor should be what the loss divides by"


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize(
    ("loss_fn", "divisor"),
    [(negatives_of_the_batch, "rows"), (F.mse_loss, "sum"), (partial(over_features, reduction="sum"), None)],
    ids=["negatives", "a mean as a sum", "a mean that calls itself a sum"],
)
def test_a_declared_divisor_that_does_not_hold_is_refused(loss_fn, divisor, axes):
    refused(partial(trained, loss_fn=loss_fn, divisor=divisor), WRONGLY, **axes)
    assert len(on(partial(trained, loss_fn=loss_fn, divisor="local"), **axes)) == 2


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_a_part_of_which_nothing_counts_and_whose_loss_is_no_zero(axes):
    of = partial(trained, loss_fn=at_least_one, divisor=lambda y: (y > 1.5).sum())
    some = torch.cat([torch.full((22, 1), 2.0, dtype=torch.float64), Y[:, 1:]], 1)
    assert_right(partial(of, data=(X, some)), **axes)
    none = torch.cat([Y[:3].clamp(max=1.0), some[3:]])  # of a rank, or of a microbatch
    refused(partial(of, data=(X, none)), "loss_divisor is 0 for the targets of a rank or microbatch", **axes)


def test_declared_losses_of_which_parts_cannot_be_compared_are_taken():
    assert_right(partial(trained, loss_fn=negatives_of_all_ranks, divisor="rows", rows=2), dp=2)  # 22 rows
    assert_right(partial(trained, loss_fn=negatives_of_the_batch, divisor="rows"), tp=2)
    noisy = partial(trained, loss_fn=lambda o, y: F.mse_loss(o, y) * (1 + torch.rand(())), divisor="rows")
    assert len(on(noisy, dp=2)) == 2


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}, {"dp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("first", [3, 6, 14, 22])
def test_a_divisor_of_one_at_least_counts_nothing_where_nothing_counts(first, axes):
    """On a rank or microbatch, in the first batch, in the first two, or in all."""
    some = torch.cat([torch.where(torch.arange(22)[:, None] % 4 == 0, 2.0, Y[:, :1]), Y[:, 1:]], 1)
    data = X, torch.cat([Y[:first].clamp(max=1.0), some[first:]])
    of = partial(trained, loss_fn=at_least_one, divisor=lambda y: (y > 1.5).sum().clamp(min=1), data=data)
    assert_right(of, **axes)
    _, right = trained(0, loss_fn=at_least_one, data=data, rows=22, epochs=2)
    accumulated = partial(of, epochs=2, gradient_accumulation_steps=4)
    for _, weights in [accumulated(0), *on(accumulated, **axes)]:
        assert (weights - right).abs().max() <= 1e-12


def test_a_divisor_that_does_not_add_up_is_refused():
    none = torch.cat([Y[:3].clamp(max=1.0), Y[3:]])  # of a rank, or of a microbatch
    of = partial(trained, loss_fn=at_least_one, data=(X, none))
    refused(
        partial(of, divisor=lambda y: (y > 1.5).sum().clamp(min=2)), "should add up over parts .* but gives 2", dp=2
    )

    def weight(y):
        return ((y > 1.5) * 0.3).sum().clamp(min=1)

    weighted = {"loss_fn": lambda o, y: (o - y).square().sum() / weight(y), "divisor": weight}
    refused(partial(of, **weighted), "should add up .*, but gives 1 for", dp=2)  # 2 times 0.6 in step 1
    none = torch.cat([torch.zeros(3, 7).double(), torch.full((19, 7), 2.0).double()])
    refused(partial(of, **weighted, data=(X, none)), "adds up to 6.3 over ranks, which is no whole number", dp=2)
    some = torch.cat([torch.full((22, 1), 2.0).double(), Y[:, 1:]], 1)
    assert_right(partial(of, data=(X, some), divisor=lambda y: (y > 1.5).sum().clamp(min=1)), dp=2)


def boxes(batch):
    """From none to three boxes of a row, in a list, as of a detector: some ranks have none of a batch."""
    return torch.stack([x for x, _, _ in batch]), [y[: max(0, i % 8 - 4)] for _, y, i in batch]


def of_boxes(output, y):
    found = [(output[i, : len(of)] - of).abs().sum() for i, of in enumerate(y)]
    return (sum(found) + 0.0 * output.sum()) / max(1, sum(map(len, y)))


@pytest.mark.parametrize("divisor", [lambda y: max(1, sum(map(len, y))), lambda y: sum(map(len, y))])
def test_boxes_are_counted_over_ranks(divisor):
    rows = [(x, y, i) for i, (x, y) in enumerate(zip(X, Y, strict=True))]

    def detected(local_rank):
        loader = ddl.auto_dataloader(rows, batch_size=4, collate_fn=boxes)
        return trained(0, loss_fn=of_boxes, loader=lambda: loader, divisor=divisor)

    assert_right(detected, dp=2)


@on_each_rank(dp=2)
def test_divisors_of_targets_without_rows_are_taken(local_rank):
    contract = LossContract(F.mse_loss, divisor_of(F.mse_loss, lambda y: len(y[1])), ddl.get_mesh(), nn.Linear(1, 1))
    contract.is_checking = True
    assert contract.count((torch.ones(3), torch.ones(5)), 5.0) == 5  # of which the second has no row for each sample


def test_a_divisor_is_asked_once_in_a_step_and_anew_in_the_next():
    """What it counts is read off a GPU; targets may be the memory of the step before, filled anew."""
    asked, y, losses = [], torch.zeros(6, 7, dtype=torch.float64), []

    def divisor(y):
        asked.append(len(y))
        return (y > 0).sum()

    def update(engine, batch):
        y.copy_(batch[1])
        losses.append(ddl.forward_backward(engine, model, batch[0], y, counted_loss, loss_divisor=divisor)[1].item())

    def counted_loss(output, y):
        return (output[y > 0] - y[y > 0]).square().sum() / (y > 0).sum()

    model = mlp()
    ddl.MeshEngine(update).run([(X[:6], Y[:6]), (X[6:12], Y[6:12])])
    assert asked == [6, 6]
    right = [counted_loss(model(X[i : i + 6]), Y[i : i + 6]).item() for i in (0, 6)]
    assert losses == pytest.approx(right, rel=1e-12)


class Annealed(nn.Module):
    """Counts its calls, in a buffer or in a number, and computes by the count; and keeps its last result for a log."""

    def __init__(self, in_buffer):
        super().__init__()
        self.last = None
        if in_buffer:
            self.register_buffer("n", torch.zeros(()))
        else:
            self.n = 0

    def forward(self, output, y):
        self.n += 1
        loss = F.mse_loss(output, y) * (self.n / (self.n + 2))
        self.last = loss.item()
        return loss


class Centred(nn.Module):
    """Keeps a moving average of targets: of this rank's rows, or of those of all ranks."""

    def __init__(self, of_all):
        super().__init__()
        self.of_all = of_all
        self.register_buffer("centre", torch.zeros(7, dtype=torch.float64))

    def forward(self, output, y):
        loss = F.mse_loss(output, y - self.centre)
        summed = torch.cat([y.sum(0), torch.tensor([len(y)])])
        if self.of_all and dist.is_initialized():
            dist.all_reduce(summed, group=ddl.get_mesh().dp_group)
        self.centre = 0.9 * self.centre + 0.1 * summed[:-1] / summed[-1]
        return loss


class Averaging(nn.Module):
    """Weights two losses by averages that it keeps in a list."""

    def __init__(self):
        super().__init__()
        self.averages = [1.0, 1.0]

    def forward(self, output, y):
        losses = F.mse_loss(output, y), F.l1_loss(output, y)
        total = sum(mean * loss for mean, loss in zip(self.averages, losses, strict=True))
        self.averages = [0.8 * mean + loss.item() for mean, loss in zip(self.averages, losses, strict=True)]
        return total


class Plain:
    """An object that is called, with a method that may be the loss as well."""

    def __init__(self):
        self.seen = []

    def __call__(self, output, y):
        self.seen.append(None)
        return F.mse_loss(output, y) / len(self.seen)


def closure():
    inner = Annealed(in_buffer=True)
    return lambda output, y: inner(output, y)


def with_state(local_rank, make_loss, divisor):
    return trained(local_rank, loss_fn=make_loss(), divisor=divisor, epochs=2)


@pytest.mark.parametrize("divisor", [None, "rows"])
@pytest.mark.parametrize(
    "make_loss",
    [partial(Annealed, False), partial(Annealed, True), Plain, lambda: Plain().__call__, closure],
    ids=["number", "buffer", "object", "method", "closure"],
)
def test_the_state_of_a_loss_changes_once_a_step_or_is_refused(make_loss, divisor):
    of = partial(with_state, make_loss=make_loss, divisor=divisor)
    assert_right(of, dp=2)
    refused(of, "loss_fn changes .*(n|seen).*, on which its result depends, but under pp", pp=2)


COUNTS = {"n": 0, "all": [[0]]}


def annealed(output, y, n):
    return F.mse_loss(output, y) * n / (n + 2)


def in_a_dict():
    state = {"n": 0}

    def loss_fn(output, y):
        state["n"] += 1
        return annealed(output, y, state["n"])

    return loss_fn


def rebound():
    n = 0

    def loss_fn(output, y):
        nonlocal n
        n += 1
        return annealed(output, y, n)

    return loss_fn


def in_a_default():
    def loss_fn(output, y, seen=[]):  # noqa: B006
        seen.append(None)
        return annealed(output, y, len(seen))

    loss_fn.__defaults__[0].clear()
    return loss_fn


def in_a_global():
    COUNTS.update(n=0, all=[[0]])

    def loss_fn(output, y):
        def inside():
            COUNTS["n"] += 1
            COUNTS["all"][0].append(1)
            return COUNTS["n"] + len(COUNTS["all"][0])

        return annealed(output, y, inside())

    return loss_fn


def in_an_argument():
    return partial(lambda seen, output, y: seen.append(1) or annealed(output, y, len(seen)), [])


class Schedule:
    n = 0

    def __call__(self):
        Schedule.n += 1
        return Schedule.n


def in_a_class():
    Schedule.n, schedule = 0, Schedule()
    return lambda output, y: annealed(output, y, schedule())


def in_a_function():
    def loss_fn(output, y):
        loss_fn.n += 1
        return annealed(output, y, loss_fn.n)

    loss_fn.n = 0
    return loss_fn


def in_weights():
    """A teacher that follows by its own moving average, in the loss."""
    teacher = nn.Linear(7, 7).double().requires_grad_(False)

    def loss_fn(output, y):
        teacher.weight.mul_(0.9)
        return F.mse_loss(output, teacher(y))

    return loss_fn


def by_a_generator():
    drawn = torch.Generator().manual_seed(0)
    return lambda output, y: annealed(output, y, float(torch.rand((), generator=drawn)))


def by_python():
    random.seed(0)
    return lambda output, y: annealed(output, y, random.random())


STATES = [in_a_dict, rebound, in_a_default, in_a_global, in_an_argument, in_a_class, in_a_function, in_weights]


def test_the_state_that_a_loss_function_reaches_changes_once_a_step():
    def all_of(local_rank, makes, divisor):
        losses, weights = zip(*(with_state(0, make, divisor) for make in makes), strict=True)
        return [loss for each in losses for loss in each], torch.cat(weights)

    assert_right(partial(all_of, makes=STATES, divisor=None), dp=2)
    assert_right(partial(all_of, makes=[*STATES, by_a_generator, by_python], divisor="rows"), dp=2)


def test_the_state_of_a_loss_changes_on_ranks_without_rows():
    def by_nine(local_rank):  # batches of 8 and 1
        return trained(0, loss_fn=in_a_dict(), data=(X[:9], Y[:9]), rows=8, epochs=3, divisor="rows")

    assert_right(by_nine, dp=2)


@pytest.mark.parametrize(("make", "name"), [(in_a_dict, "state"), (rebound, "n")])
def test_under_pp_a_state_that_a_closure_reaches_is_named(make, name):
    refused(partial(with_state, make_loss=make, divisor="rows"), f"loss_fn changes {name}, on which its", pp=2)


@pytest.mark.parametrize("shard", [False, True])
def test_a_loss_by_a_model_with_a_state_leaves_it_as_it_is(shard):
    def adversarial(local_rank):
        torch.manual_seed(0)
        critic = ddl.auto_model(nn.utils.parametrizations.spectral_norm(nn.Linear(7, 3)).double(), shard=shard)
        model, losses = ddl.auto_model(mlp(), shard=shard), []
        trainer = trainer_of(model, lambda output, y: -critic(output).mean())
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
        trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=6))
        return losses, torch.cat([w.flatten() for m in (model, critic) for w in ddl.full_state_dict(m).values()])

    assert_right(adversarial, dp=2)


@pytest.mark.parametrize("divisor", [None, "rows"])
def test_a_state_of_a_loss_that_ranks_compute_from_their_own_rows_is_refused(divisor):
    of = partial(with_state, divisor=divisor)
    for own in partial(Centred, False), Averaging:
        refused(partial(of, make_loss=own), "loss_fn keeps a state from call to call", dp=2)
    assert_right(partial(of, make_loss=partial(Centred, True)), dp=2)


def with_features(local_rank, divisor):
    """A forward hook puts features into a dict, from which the loss takes them."""
    torch.manual_seed(0)
    plain, features = mlp(), {}

    def keep(layer, inputs, output):
        features["hidden"] = output
        features["taught"] = output.detach().sign()

    plain[1].register_forward_hook(keep)
    model = ddl.auto_model(plain)

    def loss_fn(output, y):
        return F.mse_loss(output, y) + F.mse_loss(features["hidden"], features["taught"])

    trainer, losses = trainer_of(model, loss_fn, loss_divisor=divisor), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=6))
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


@pytest.mark.parametrize("divisor", [None, "rows"])
def test_features_of_a_hook_are_no_state_of_the_loss(divisor):
    assert_right(partial(with_features, divisor=divisor), dp=2)


class Keeping(nn.Module):
    """Keeps a term of its loss: of each row, or of how all rows meet, as a balance of experts."""

    def __init__(self, meets):
        super().__init__()
        self.body, self.meets = mlp(), meets

    def forward(self, x):
        output = self.body(x)
        p = output.softmax(1)
        balance = 7 * (p.mean(0) * F.one_hot(p.argmax(1), 7).double().mean(0)).sum()
        self.kept = balance if self.meets else p.square().sum(1).mean()
        return output


def with_a_kept_term(local_rank, meets, shard=False, **axes):
    torch.manual_seed(0)
    plain = Keeping(meets).double()
    model = ddl.auto_model(plain, shard=shard)
    trainer, losses = trainer_of(model, lambda o, y: F.mse_loss(o, y) + plain.kept, loss_divisor="rows"), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=6))
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


@pytest.mark.parametrize("shard", [False, True])
def test_a_declared_loss_of_what_the_model_keeps_is_compared_by_forward_passes(shard):
    refused(partial(with_a_kept_term, meets=True, shard=shard), WRONGLY, dp=2)
    assert_right(partial(with_a_kept_term, meets=False, shard=shard), dp=2)


@pytest.mark.parametrize(("axes", "words"), [({"dp": 2}, " to nan. Parts have no loss"), ({"pp": 2}, "")], ids=str)
def test_a_declared_loss_of_terms_with_other_divisors_is_refused(axes, words):
    """Every other target is ignored by one term, so that a part of two rows has none."""
    classes, masked = Y.argmax(1), torch.where(torch.arange(22) % 2 == 0, Y.argmax(1), -100)

    def of_both(output, y):
        return F.cross_entropy(output, y[:, 0]) + F.cross_entropy(output, y[:, 1])

    of = partial(trained, loss_fn=of_both, data=(X, torch.stack([classes, masked], 1)), divisor="rows", rows=4)
    refused(of, f"{WRONGLY}.*{words}", **axes)


def test_declared_losses_of_one_row_a_rank_are_compared_with_the_next():
    refused(partial(trained, loss_fn=negatives_of_the_batch, divisor="rows", rows=2), WRONGLY, dp=2)


def capturing(local_rank, divisor, penalised=False, by_weights=False):
    """A loss that captures the inputs; with a second call of the model, and with gradients."""
    torch.manual_seed(0)
    model = ddl.auto_model(mlp())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []

    def update(engine, batch):
        x, y = batch

        def loss_fn(output, y):
            loss = F.mse_loss(output, y) + (output - torch.cat([x, y[:, :1]], 1)).square().mean()
            if penalised:
                mixed = (0.5 * x).requires_grad_()
                (gradient,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
                loss = loss + (gradient.norm(dim=1) - 1).square().mean()
            if by_weights:
                weight = getattr(model, "module", model)[0].weight
                (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
                loss = loss / gradient.norm().detach()
            return loss

        optimizer.zero_grad()
        _, loss = ddl.forward_backward(engine, model, x, y, loss_fn, loss_divisor=divisor)
        optimizer.step()
        losses.append(loss.item())

    ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=6))
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


@pytest.mark.parametrize("divisor", [None, "rows"])
def test_losses_that_capture_rows_and_take_gradients(divisor):
    assert_right(partial(capturing, divisor=divisor), dp=2)
    assert_right(partial(capturing, divisor=divisor, penalised=True), dp=2)
    refused(partial(capturing, divisor=divisor, by_weights=True), "takes gradients by weights", dp=2)


class Held:
    """An object of a script that keeps the batch."""


def where_x_is(engine, batch, x):
    """Functions by which a loss comes to the inputs, by name."""
    held = Held()
    held.x = x
    return {
        "closure": lambda y: x,
        "tuple": lambda y: batch[0],
        "engine": lambda y: engine.state.batch[0],
        "object": lambda y: held.x,
        "default": lambda y, x=x: x,
        "targets": lambda y: y[1],
    }


def derived(local_rank, holder, divisor, linear=False, meets=False, pinn=False):
    """A loss with derivatives of the output by inputs, which it finds in several places."""
    torch.manual_seed(0)
    model = ddl.auto_model(nn.Linear(6, 7).double() if linear else mlp())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []

    def update(engine, batch):
        x, y = batch
        x.requires_grad_()
        x_of = where_x_is(engine, batch, x)[holder]

        def loss_fn(output, y):
            z = x_of(y)
            y = y[0] if holder == "targets" else y
            (slope,) = torch.autograd.grad(output.sum(), z, create_graph=True)
            if pinn:
                (curvature,) = torch.autograd.grad(slope[:, 1].sum(), z, create_graph=True)
                slope = slope - 0.1 * curvature
            loss = F.mse_loss(output, y) + slope.square().sum(1).mean()
            return loss + 9 * output.mean(0).square().mean() if meets else loss

        optimizer.zero_grad()
        y = (y, x) if holder == "targets" else y
        _, loss = ddl.forward_backward(engine, model, x, y, loss_fn, loss_divisor=divisor)
        optimizer.step()
        losses.append(loss.item())

    ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X[:14], Y[:14]), batch_size=5))
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


HOLDERS = ["closure", "tuple", "engine", "object", "default", "targets"]


@pytest.mark.parametrize("divisor", [None, "rows"])
def test_derivatives_by_inputs_are_compared_wherever_the_loss_finds_these(divisor):
    def all_of_them(local_rank, **options):
        each = [derived(0, holder, divisor, **options) for holder in HOLDERS]
        return [loss for losses, _ in each for loss in losses], torch.cat([weights for _, weights in each])

    for options in {}, {"linear": True}, {"pinn": True}:
        assert_right(partial(all_of_them, **options), dp=2)


@pytest.mark.parametrize("divisor", [None, "rows"])
def test_derivatives_beside_a_term_in_which_rows_meet_are_refused(divisor):
    words = WRONGLY if divisor else "should be a mean over rows, but uses .*, and gives"

    def refusals(local_rank):
        for holder, linear in itertools.product(HOLDERS, (False, True)):
            with pytest.raises(ValueError, match=words):  # on each rank, so that the next one is not met
                derived(0, holder, divisor, linear, meets=True)

    on(refusals, dp=2)


class Judging(nn.Module):
    """A critic of pairs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(13, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, xy):
        return self.net(torch.cat(xy, 1))


def lazily(local_rank, divisor, own_call, of_all_weights=True):
    """A gradient penalty in each second step, in a call of its own or as a term."""
    torch.manual_seed(0)
    model = ddl.auto_model(Judging().double())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []

    def penalty(output, x):
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return 5 * slope.square().sum(1).mean() + (0 * output.sum() if of_all_weights else 0)

    def update(engine, batch):
        x, y = batch[0].clone().requires_grad_(), batch[1]
        second = engine.state.iteration % 2 == 0

        def loss_fn(output, y):
            loss = F.softplus(-output).mean()
            return loss + penalty(output, x) if second and not own_call else loss

        optimizer.zero_grad()
        _, loss = ddl.forward_backward(
            engine, model, (x, y), y, loss_fn, loss_divisor=divisor, last=not (second and own_call)
        )
        if second and own_call:
            x = x.detach().requires_grad_()
            _, more = ddl.forward_backward(engine, model, (x, y), x, penalty, loss_divisor=divisor)
            loss = loss + more
        optimizer.step()
        losses.append(loss.item())

    ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X[:11], Y[:11]), batch_size=4), max_epochs=2)
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


def test_a_penalty_in_each_second_step_is_right():
    def all_of_them(local_rank):
        each = [lazily(0, divisor, own_call) for divisor in (None, "rows") for own_call in (False, True)]
        return [loss for losses, _ in each for loss in losses], torch.cat([weights for _, weights in each])

    assert_right(all_of_them, dp=2)
    words = r"its loss gives some weights none .*: add 0 \* output.sum\(\) to the loss"
    refused(partial(lazily, divisor="rows", own_call=True, of_all_weights=False), words, dp=2)


def kept_beside_captured(local_rank, divisor, of_terms, shard=False):
    torch.manual_seed(0)
    plain = Keeping(meets=False).double()
    model = ddl.auto_model(plain, shard=shard)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        loss_fn = lambda o, y: of_terms(F.mse_loss(o, y) + plain.kept, x)  # noqa: E731
        _, loss = ddl.forward_backward(engine, model, x, y, loss_fn, loss_divisor=divisor)
        optimizer.step()
        losses.append(loss.item())

    ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5))
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("divisor", [None, "rows"])
def test_a_kept_term_beside_captured_rows_is_compared(divisor, shard):
    of = partial(kept_beside_captured, divisor=divisor, shard=shard)
    assert_right(partial(of, of_terms=lambda loss, x: loss + x.square().sum() / len(x)), dp=2)
    words = "add up to .* A loss in which rows meet" if divisor else "kept besides .*, and gives .* loss_divisor="
    refused(partial(of, of_terms=lambda loss, x: loss + x.mean(0).square().sum()), words, dp=2)


@pytest.mark.parametrize("divisor", [None, "rows"])
def test_rows_that_meet_beside_captured_ones_are_refused(divisor):
    """Without the rows of what it captures, the loss fails."""

    def of_both(local_rank):
        torch.manual_seed(0)
        model = ddl.auto_model(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def update(engine, batch):
            x, y = batch
            optimizer.zero_grad()
            loss_fn = lambda o, y: (o[:, :6] - x).square().mean() + o.mean(0).square().sum()  # noqa: E731
            ddl.forward_backward(engine, model, x, y, loss_fn, loss_divisor=divisor)

        ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=6))

    refused(of_both, WRONGLY if divisor else NO_MEAN, dp=2)


@pytest.mark.parametrize("divisor", [None, "rows"])
def test_captured_rows_are_refused_where_microbatches_of_one_row_are_broadcast_to_them(divisor):
    def weighted(local_rank):
        model = ddl.auto_model(mlp(), n_microbatches=4)

        def update(engine, batch):
            x, y, weights = batch
            loss_fn = lambda o, y: ((o - y).square() * weights).mean()  # noqa: E731
            ddl.forward_backward(engine, model, x, y, loss_fn, loss_divisor=divisor)

        ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y, X[:, :1].abs()), batch_size=4))

    refused(weighted, "loss_fn should compute with rows of a microbatch alone .* with the targets, as y=", pp=2)


class Penalised(nn.CrossEntropyLoss):
    def forward(self, output, y):
        return super().forward(output, y) + output.square().mean()


def test_a_subclass_of_a_loss_of_torch_is_not_that_loss():
    weight = torch.arange(1.0, 8.0, dtype=torch.float64)
    of = partial(trained, loss_fn=Penalised(weight), data=(X, Y.argmax(1)))
    refused(of, NO_MEAN, dp=2)
    assert_right(partial(trained, loss_fn=Penalised(), data=(X, Y.argmax(1))), dp=2)


def penalty(loss_fn, given, loss):
    return loss + given[0].square().mean()


def test_a_loss_of_torch_with_a_hook_is_compared_and_old_names_of_sums_are_known():
    hooked = nn.CrossEntropyLoss(torch.arange(1.0, 8.0, dtype=torch.float64))
    hooked.register_forward_hook(penalty)
    refused(partial(trained, loss_fn=hooked, data=(X, Y.argmax(1))), WRONGLY, dp=2)
    summed = partial(F.cross_entropy, size_average=False)
    assert_right(partial(trained, loss_fn=summed, data=(X, Y.argmax(1))), dp=2)


# --- batches whose rows are not those that the loader dealt


def loader_of(collate, rows=6):
    return ddl.auto_dataloader(list(zip(X, Y, strict=True)), batch_size=rows, collate_fn=collate)


def dropping(batch):
    kept = [(x, y) for x, y in batch if x[0] < 0.8] or batch[:1]
    return tuple(map(torch.stack, zip(*kept, strict=True)))


def two_views(batch):
    x, y = map(torch.stack, zip(*batch, strict=True))
    return torch.cat([x, 0.5 * x]), torch.cat([y, y])


def packed(batch):
    """From one to three tokens of each row, one after the other."""
    xs = [x.repeat(1 + int(abs(x[0]) * 2) % 3, 1) for x, _ in batch]
    ys = [y.repeat(len(x), 1) for x, (_, y) in zip(xs, batch, strict=True)]
    return torch.cat(xs), torch.cat(ys)


def turned(batch, times=4):
    """Rows in dim 1, as recurrent networks take them."""
    x, y = map(torch.stack, zip(*batch, strict=True))
    return x.repeat(times, 1, 1), y.repeat(times, 1, 1)


@pytest.mark.parametrize(
    ("collate", "divisor"), [(dropping, None), (dropping, "rows"), (two_views, None), (packed, None)]
)
def test_a_mean_over_what_collate_fn_makes_of_rows(collate, divisor):
    assert_right(partial(trained, loader=partial(loader_of, collate), divisor=divisor), dp=2)


def test_rows_in_dim_1_are_declared():
    refused(partial(trained, loader=partial(loader_of, turned)), "if rows are in dim 1, pass loss_divisor=", dp=2)
    assert_right(partial(trained, loader=partial(loader_of, turned, 5), divisor="rows"), dp=2)
    refused(
        lambda r: trained(0, loader=partial(loader_of, turned), divisor="rows"), "should have its 6 rows in dim 0", pp=2
    )


def to_longest(batch):
    """Padded by each rank to its own longest row, with a target of 0 that counts."""
    n = max(int(length) for _, _, length in batch)
    return torch.stack([x[:n] for x, _, _ in batch]), torch.stack([y[:n] for _, y, _ in batch])


def two_views(rows):
    x, y = default_collate(rows)
    return torch.cat([x, -x]), torch.cat([y, y]).argmax(1)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_two_views_of_rows_as_many_as_their_features(axes):
    assert_right(partial(trained, loss_fn=F.cross_entropy, loader=partial(loader_of, two_views)), **axes)


@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_padding_to_each_ranks_own_length(ignore_index):
    rows = sorted(zip(TOKENS, PADDED, LENGTHS, strict=True), key=lambda row: int(row[2]))

    def tagged(local_rank):
        loss_fn = nn.CrossEntropyLoss(ignore_index=ignore_index)
        loader = ddl.auto_dataloader(rows[3:20], batch_size=6, collate_fn=to_longest)
        how = {"loader": lambda: loader, "model_transform": lambda o: o.transpose(1, 2)}
        return trained(0, Tagger, loss_fn, **how)

    if ignore_index == 0:
        assert_right(tagged, dp=2)
    else:
        refused(tagged, r"targets of dp ranks should have the same shape.* \(y.numel\(\) would count padding\)", dp=2)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("kind", ["rows", "tokens"])
def test_accumulated_batches_are_one_large_batch(kind, axes):
    """Windows of batches of 6, 6, 6 and 4 rows with other numbers of tokens: not a mean of means."""
    tokens = {
        "make": lambda: nn.Sequential(Tagger(), nn.Flatten(0, 1)),
        "loss_fn": lambda o, y: F.cross_entropy(o, y.flatten(), ignore_index=0),
        "data": (TOKENS, PADDED),
        "divisor": lambda y: (y != 0).sum(),
    }
    of = tokens if kind == "tokens" else {}
    if "pp" in axes and kind == "tokens":
        pytest.skip("its output has a row for each token")
    _, right = trained(0, **of, rows=22, epochs=3)
    for _, weights in on(partial(trained, **of, epochs=3, gradient_accumulation_steps=4), **axes):
        assert (weights - right).abs().max() <= 1e-12


@pytest.mark.parametrize("shard", [False, True])
def test_an_encoder_outside_of_the_step_gets_gradients_that_are_weighted_by_rows(shard):
    def encoded(local_rank, shard):
        torch.manual_seed(0)
        encoder, head = (ddl.auto_model(nn.Linear(*of).double(), shard=shard) for of in ((6, 6), (6, 7)))
        optimizer = ddl.auto_optim(torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1))

        def update(engine, batch):
            x, y = batch
            optimizer.zero_grad()
            _, loss = ddl.forward_backward(engine, head, encoder(x), y, F.mse_loss)
            optimizer.step()

        ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X[:13], Y[:13]), batch_size=6))
        return torch.cat([w.flatten() for model in (encoder, head) for w in ddl.full_state_dict(model).values()])

    right = encoded(0, None)
    assert all((weights - right).abs().max() < 1e-12 for weights in on(partial(encoded, shard=shard), dp=2))


def over_words(output, y):
    """A mean over the words that are no padding, which are other numbers in each batch of a window."""
    return (F.cross_entropy(output, y, reduction="none") * (y != 0)).sum() / (y != 0).sum()


@pytest.mark.parametrize("axes", [{}, {"tp": 2}], ids=str)
def test_what_an_accumulated_loss_divides_by_is_checked_where_a_rank_has_all_rows_too(axes):
    how = {"make": Tagger, "data": (TOKENS, PADDED), "model_transform": lambda o: o.transpose(1, 2)}
    of = partial(trained, loss_fn=over_words, gradient_accumulation_steps=4, **how)
    if axes:
        refused(of, "loss_fn should be a mean over rows", **axes)
    else:
        with pytest.raises(ValueError, match="loss_fn should be a mean over rows"):
            of(0)
    _, right = trained(0, rows=22, **(how | {"loss_fn": over_words}))
    counted = partial(of, divisor=lambda y: (y != 0).sum())
    for _, weights in on(counted, **axes) if axes else [counted(0)]:
        assert (weights - right).abs().max() <= 1e-12
    trained(0, make=lambda: nn.Sequential(nn.Linear(6, 7)), gradient_accumulation_steps=2)  # a mean over rows


class Switched:
    """A mean over rows until its third call for a step, and half of the rows after it."""

    def __init__(self, last):
        self.last = last

    def __call__(self, output, y):
        losses = (output - y).square().mean(1)
        return losses.mean() if self.last.state.iteration < 3 else losses.topk((len(losses) + 1) // 2).values.mean()


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_a_loss_that_changes_between_powers_of_two_is_compared_in_the_same_step(axes):
    steps = []

    def switched(local_rank):
        torch.manual_seed(0)
        model = ddl.auto_model(mlp())
        loss = Switched(None)
        loss.last = trainer = trainer_of(model, loss)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: steps.append(trainer.state.iteration))
        try:
            trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=6))
        finally:
            assert steps == [1, 2]

    refused(switched, "loss_fn should be a mean over rows", **axes)


def with_epsilon(y):
    return (y > 0).sum() + 1e-3


def test_a_divisor_with_an_epsilon_which_each_rank_would_add_is_refused():
    epsilon = partial(
        trained, loss_fn=lambda o, y: ((o - y).square() * (y > 0)).sum() / with_epsilon(y), divisor=with_epsilon
    )
    refused(epsilon, "should add up over parts of a batch", dp=2)


def with_another_loader(local_rank, rows, others, divisor, n=14):
    """A step on a batch, and on one of a second loader, which ranks share otherwise."""
    torch.manual_seed(0)
    model = ddl.auto_model(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second = ddl.auto_dataloader(TensorDataset(X[7:], Y[7:]), batch_size=others)
    batches, losses = itertools.chain.from_iterable(itertools.repeat(second)), []  # epoch after epoch

    def update(engine, batch):
        x, y = next(batches)
        optimizer.zero_grad()
        ddl.forward_backward(engine, model, *batch, F.l1_loss, loss_divisor=divisor, last=False)
        _, loss = ddl.forward_backward(engine, model, x, y, F.mse_loss, loss_divisor=divisor)
        optimizer.step()
        losses.append(loss.item())

    ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X[:n], Y[:n]), batch_size=rows), max_epochs=2)
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


@pytest.mark.parametrize("divisor", [None, "rows"])
@pytest.mark.parametrize(
    ("rows", "others"), [(6, 3), (5, 4), (4, 1), (13, 1), (13, 4)], ids=str
)  # 15 rows by 4: 1 in the end, which one rank does not have; 14 by 13: the same of the engine's
def test_a_batch_of_another_loader_is_weighted_by_its_own_rows(rows, others, divisor):
    assert_right(partial(with_another_loader, rows=rows, others=others, divisor=divisor), dp=2)


def with_boxes(rows):
    """As for detection: targets are a list, with a few boxes for each row."""
    return torch.stack([x for x, _ in rows]), [{"boxes": y.expand(1 + i % 3, 7)} for i, (_, y) in enumerate(rows)]


def as_it_is(batch, **_):
    return batch


def mean_over_rows_of_boxes(output, y):
    return sum((row - of_row["boxes"]).square().mean() for row, of_row in zip(output, y, strict=True)) / len(y)


def mean_over_boxes(output, y):
    total = sum((row - of_row["boxes"]).square().sum() for row, of_row in zip(output, y, strict=True))
    return total / sum(len(of_row["boxes"]) for of_row in y)


def trained_on_boxes(local_rank, loss_fn, divisor=None):
    loader = partial(loader_of, with_boxes, rows=4)
    return trained(local_rank, loss_fn=loss_fn, divisor=divisor, loader=loader, prepare_batch=as_it_is)


def test_targets_in_a_list_are_rows_of_which_losses_are_compared():
    assert_right(partial(trained_on_boxes, loss_fn=mean_over_rows_of_boxes), dp=2)
    refused(partial(trained_on_boxes, loss_fn=mean_over_boxes, divisor="rows"), "loss_divisor should be what", dp=2)
    refused(partial(trained_on_boxes, loss_fn=mean_over_boxes), "should be a mean over rows, but gives", dp=2)


MANY = torch.randn(88, 6, generator=generator, dtype=torch.float64)
LATEST = torch.randint(4, (88,), generator=generator)


def masked_by_hand(output, y):
    return F.cross_entropy(output[y >= 0], y[y >= 0])


class Rooted:
    """A mean over rows in 20 steps, and its root then."""

    steps = 0

    def __call__(self, output, y):
        loss = F.cross_entropy(output, y)
        return loss if self.steps <= 20 else loss.sqrt()


def rooted(local_rank, **run):
    loss_fn = Rooted()

    def prepare(batch, **_):
        loss_fn.steps += 1
        return batch

    return trained(local_rank, loss_fn=loss_fn, data=(MANY, LATEST), rows=4, run=run, prepare_batch=prepare)


def test_what_differs_in_later_steps_alone_is_found_by_targets_or_in_the_last_step():
    late = torch.where(torch.arange(88) == 81, -1, LATEST)  # in step 21 of 22
    refused(partial(trained, loss_fn=masked_by_hand, data=(MANY, late), rows=4, epochs=1), "a mean over rows", dp=2)
    refused(rooted, "should be a mean over rows", dp=2)
    if hasattr(Engine(print).state, "max_iters"):  # Ignite 0.5.5 and newer
        refused(partial(rooted, max_iters=21), "should be a mean over rows", dp=2)


def gathering(output, y):
    counted = dist_sum(len(y))
    return F.mse_loss(output, y, reduction="sum") / y[0].numel() / counted * 2


def dist_sum(value):
    return idist.all_reduce(value)


def test_a_local_loss_that_sums_over_ranks_needs_as_many_rows_on_each():
    for n in (11, 3):  # in the last step, or in the first
        local = partial(trained, loss_fn=gathering, divisor="local", rows=4, data=(X[:n], Y[:n]))
        refused(local, "as many rows on", dp=2)


class Balancing(nn.Module):
    """Returns a balance of what rows choose beside its outputs, as experts by hand do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 7)

    def forward(self, x):
        output = self.layer(x)
        return output, output.softmax(1).mean(0).square().sum()


def with_balance(output, y):
    return F.mse_loss(output[0], y) + 0.01 * output[1]


def test_a_number_that_the_model_returns_beside_rows_is_compared():
    refused(partial(trained, make=Balancing, loss_fn=with_balance), "uses a number without rows .* and gives", dp=2)


def in_one_row(rows):
    """Samples of other lengths one after the other, in a single row, as for attention without padding."""
    lengths = [1 + int((x > 0).sum()) for x, _ in rows]
    x, y = (
        torch.cat([row.expand(n, -1) for row, n in zip(of, lengths, strict=True)]) for of in zip(*rows, strict=True)
    )
    return x[None], y[None]


def test_samples_in_a_single_row_of_any_length():
    loader = partial(loader_of, in_one_row, rows=4)
    assert_right(partial(trained, loader=loader, divisor=torch.numel), dp=2)


def in_groups(output, y):
    of_group = y.view(-1, 2, 7).mean(1, keepdim=True)
    return (output.view(-1, 2, 7) - of_group).square().mean()


def test_a_loss_of_groups_of_rows_says_that_a_rank_has_some_rows():
    with pytest.raises(RuntimeError, match="is invalid for input of size") as found:
        on(partial(trained, loss_fn=in_groups), dp=2)  # 3 rows on each rank
    assert any("take a batch_size by which each rank has whole groups" in note for note in found.value.__notes__)
    assert_right(partial(trained, loss_fn=in_groups, rows=4, divisor="local", data=(X[:20], Y[:20])), dp=2)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.float8_e5m2, torch.uint16, torch.int32, torch.bool]
)
def test_new_values_of_targets_are_seen_in_any_dtype(dtype):
    contract = LossContract(F.mse_loss, divisor_of(F.mse_loss), ddl.get_mesh(), nn.Linear(1, 1))

    def is_new(y):
        return any(new for new, _ in contract._values(None, y))

    seen = [is_new(torch.tensor(y).to(dtype)) for y in ([0, 1], [1, 0], [0, 2], [2, 1])]
    assert seen == [True, False, dtype is not torch.bool, False]
    assert not is_new(torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged))
    if dtype.is_floating_point:
        missing = torch.tensor([torch.nan, 1.0]).to(dtype)
        assert [is_new(missing) for _ in range(2)] == [True, False]


def weighted(output, y):
    weights = torch.where(y == 1, 5.0, 1.0).double()
    return (F.cross_entropy(output, y, reduction="none") * weights).sum() / weights.sum()


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 1, 1, 1, 1, 1], dtype=torch.float64)


def by_class_weights(output, y):
    return F.cross_entropy(output, y, weight=CLASS_WEIGHTS)


ALIKE_ON_A_RANK = torch.tensor([1, 1, 1, 0, 0, 0] * 3 + [1, 1, 0, 0])
SORTED = torch.arange(22) // 15  # in batch 3, one rank has class 0 and the other one class 1


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("loss_fn", [weighted, by_class_weights])
def test_rows_that_are_alike_on_a_rank_are_compared_with_targets_of_other_ranks(loss_fn, axes):
    refused(partial(trained, loss_fn=loss_fn, data=(X, ALIKE_ON_A_RANK)), "loss_fn should be a mean over rows", **axes)


def test_a_class_that_comes_late_on_one_rank_is_compared_then():
    refused(partial(trained, loss_fn=weighted, data=(X, SORTED)), "loss_fn should be a mean over rows", dp=2)


def test_means_over_rows_are_taken_whatever_targets_other_ranks_have():
    assert_right(partial(trained, loss_fn=lambda o, y: F.cross_entropy(o, y), data=(X, ALIKE_ON_A_RANK)), dp=2)
    assert_right(partial(trained, loss_fn=lambda o, y: (o - y).abs().mean(), rows=3), dp=4)  # ranks without rows
    assert_right(partial(trained, loss_fn=scaled_error, prepare_batch=with_a_scale, rows=3), dp=2)


def with_a_scale(batch, device, non_blocking):
    return batch[0], {"y": batch[1], "scale": lambda error: 2 * error}  # which pickle cannot send


def scaled_error(output, y):
    return y["scale"]((output - y["y"]).abs().mean())


def to_centers(output, boxes):
    return sum((row - of_row.mean(0)).square().mean() for row, of_row in zip(output, boxes, strict=True)) / len(boxes)


def test_a_list_of_one_sample_is_not_taken_for_a_tensor_with_a_row():
    contract = LossContract(
        to_centers, divisor_of(to_centers), Mesh({"pp": 1, "dp": 2, "tp": 1, "cp": 1}, 0, None, {}), None
    )
    for _ in range(3):
        contract.pairs = [(torch.randn(1, 4), [torch.randn(1, 4)])]
        assert contract.compare() == 1  # inconclusive
    assert on(rows_of_several, dp=2) == [(1, 2)] * 2


def rows_of_several(local_rank):
    (sample,), rows = several_rows([torch.ones(1, 4)]), several_rows(torch.ones(1, 4))
    return len(sample), len(rows)


def reads_what_is_kept(local_rank, how):
    """The warnings of a run whose loss reads what an update function or a handler keeps."""
    torch.manual_seed(0)
    rows = torch.randn(24, 6)
    model = ddl.auto_model(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)))
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    weighted = nn.CrossEntropyLoss(weight=torch.ones(4))
    queue, bank, own, constant = [torch.eye(4).repeat(3, 1)], torch.zeros(24, 4), {}, torch.arange(4.0)
    rank = local_rank

    def update(engine, batch):
        x, index = batch
        optimizer.zero_grad()
        keys = F.normalize(x[:, :4], dim=1)
        own["teacher"] = x[:, :4].softmax(1)

        def loss_fn(z, y):
            z = z + constant
            if how == "a queue":
                return (z @ queue[0].T).logsumexp(1).mean()
            if how == "a bank":
                return F.mse_loss(z, bank[y])
            if how == "noise":
                return F.mse_loss(z + torch.randn_like(z), constant.expand_as(z))
            if how == "features of its rows":
                return F.mse_loss(z, own["teacher"][: len(z)])
            if how == "a loss that sums over ranks":
                mean = z.mean(0)
                dist.all_reduce(mean)
                return (z - mean / idist.get_world_size() + queue[0].sum()).square().mean()
            return z.square().mean() + 0 * rank

        kind = {"a loss that sums over ranks": "local", "noise": "rows"}.get(how)
        of = weighted if how == "weights of classes" else loss_fn
        _, loss = ddl.forward_backward(engine, model, x, index % 4 if of is weighted else index, of, loss_divisor=kind)
        weighted.weight[index % 4] += 1
        optimizer.step()
        queue[0], bank[index] = torch.cat([queue[0][len(keys) :], keys]), keys
        return loss.item()

    loader = ddl.auto_dataloader(TensorDataset(rows, torch.arange(24)), batch_size=6, shuffle=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddl.MeshEngine(update).run(loader, max_epochs=3)
    return [str(one.message) for one in caught if "different values for the same rows" in str(one.message)]


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("how", ["a queue", "a bank", "weights of classes"])
def test_what_a_script_keeps_of_a_ranks_rows_for_a_loss_is_warned_of(how, axes):
    assert sum(map(len, launch(axes, reads_what_is_kept, how))) == 1


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize(
    "how", ["features of its rows", "a number that does not matter", "noise", "a loss that sums over ranks"]
)
def test_what_belongs_to_a_batch_or_does_not_matter_is_no_reason_to_warn(how, axes):
    if "pp" not in axes or how in ("a number that does not matter", "noise"):
        assert not any(launch(axes, reads_what_is_kept, how))


class DropsAndReturnsItsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, batch):
        x, y = batch
        return F.mse_loss(self.last(F.dropout(self.first(x), 0.2, self.training)), y)


@pytest.mark.parametrize("divisor", [None, "rows"])
def test_a_model_that_draws_random_numbers_and_returns_its_loss_has_to_declare_it(divisor):
    """Its parts draw others, by which a mean over rows looked like none."""

    @on_each_rank(dp=2)
    def training(local_rank):
        model = ddl.auto_model(DropsAndReturnsItsLoss())
        options = {"prepare_batch": lambda batch, device, non_blocking: (tuple(batch), batch[1])}
        optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
        trainer = ddl.create_supervised_trainer(
            model, optimizer, lambda output, y: output, loss_divisor=divisor, **options
        )
        trainer.run(ddl.auto_dataloader(TensorDataset(torch.randn(20, 4), torch.randn(20, 2)), batch_size=8))

    if divisor is None:
        with pytest.raises(ddl.RankError, match=r"for parts of them here \(the model draws random numbers\)"):
            training()
    else:
        training()


def halved(output, y):
    output.mul_(0.5)
    return (output - y["t"]).abs().mean()


def less(output, y):
    y["t"].sub_(1)
    return F.cross_entropy(output, y["class"].sub_(1)) + (output - y["t"]).square().mean()


def popped(output, y):
    weight = y.pop("w")
    return (weight * (output - y["t"])).square().mean()


@in_float64
def changing(local_rank):
    """Losses, outputs and weights, where loss functions change their arguments."""
    found, weights = [], []
    for loss_fn in (halved, less, popped):
        torch.manual_seed(0)
        rows = [(x[:3], {"t": x[3:], "w": x[:3].abs(), "class": torch.tensor(1 + i % 3)}) for i, x in enumerate(X)]
        model = ddl.auto_model(nn.Linear(3, 3))
        trainer = trainer_of(
            model,
            loss_fn,
            prepare_batch=lambda batch, **_: batch,
            output_transform=lambda x, y, y_pred, loss: (loss.item(), y_pred.sum().item(), y["t"].sum().item()),
        )

        @trainer.on(Events.ITERATION_COMPLETED)
        def _(engine):
            loss, *sums = engine.state.output
            found.extend([loss, *(idist.all_reduce(number) for number in sums)])

        trainer.run(ddl.auto_dataloader(rows, batch_size=6), max_epochs=1)
        weights += ddl.full_state_dict(model).values()
    return found, torch.cat([weight.flatten() for weight in weights])


def test_losses_that_change_their_arguments_change_them_once():
    assert_right(changing, dp=2)


class KeepsAverages:
    """A task whose loss is one of its methods, with averages of weights that are cut."""

    def __init__(self, model):
        self.averages = [p.detach().clone() for p in model.parameters()]

    def loss_fn(self, output, y):
        return F.mse_loss(output, y)


def with_averages(local_rank):
    torch.manual_seed(0)
    model = ddl.auto_model(mlp(), shard=True)
    task = KeepsAverages(model)
    trainer = trainer_of(model, task.loss_fn)

    @trainer.on(Events.ITERATION_COMPLETED)
    def _():
        for average, p in zip(task.averages, model.parameters(), strict=True):
            average.lerp_(p.detach(), 0.1)

    trainer.run(ddl.auto_dataloader(TensorDataset(X[:14], Y[:14]), batch_size=7), max_epochs=2)  # 7: as the weights
    return [trainer.state.output], torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


def test_a_loss_may_belong_to_what_keeps_cut_weights():
    assert_right(with_averages, dp=2)


def test_a_loss_made_anew_in_each_step_keeps_no_batch():
    contract = LossContract(lambda output, y: (output - y).mean(), divisor_of(F.mse_loss, "rows"), get_mesh(), None)
    contract.pairs = [(X, X)]
    contract.state.pair = contract.pairs[0]
    contract.conclude(0.0)
    assert (contract.pairs, contract.state.pair) == ([], None)


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=str)
def test_a_loss_may_call_a_model_with_batchnorm_which_takes_the_rows_of_a_rank(options):
    """As in a DCGAN's step of the generator; twice, real and generated rows, in one loss."""

    def adversary(local_rank, divisor=None):
        torch.manual_seed(0)
        layers = nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 1)
        critic = ddl.auto_model(nn.Sequential(*layers).double(), **options)
        generator = ddl.auto_model(nn.Linear(6, 7).double(), **options)
        optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
        loss_fn = lambda fake, real: F.softplus(critic(fake)).mean() + F.softplus(-critic(real)).mean()  # noqa: E731
        trainer = ddl.create_supervised_trainer(generator, optimizer, loss_fn, loss_divisor=divisor)
        trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=2)
        statistics = {k: v for k, v in ddl.full_state_dict(critic).items() if "running" in k}
        return trainer.state.output, ddl.full_state_dict(generator)["weight"], statistics

    for found, right in zip(on(adversary, dp=2), on(partial(adversary, divisor="local"), dp=2), strict=True):
        torch.testing.assert_close(found, right)


class InNamespace(nn.Linear):
    def forward(self, x):
        return SimpleNamespace(of=super().forward(x))


def trained_by_namespaces(local_rank):
    torch.manual_seed(0)
    model, y = ddl.auto_model(InNamespace(6, 8).double()), TARGETS[:12, 0].clone()
    y[:3] = -100
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(
        model, optimizer, lambda o, y: F.cross_entropy(o.of, y), loss_divisor=lambda y: (y != -100).sum()
    )
    trainer.run(ddl.auto_dataloader(TensorDataset(X[:12], y), batch_size=6))
    return [], torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


def test_an_output_may_be_an_object_where_nothing_counts():
    assert_right(trained_by_namespaces, dp=2)


# --- calls of a loss that other ranks answer: as many on each


def distilled(local_rank, late):
    """A loss calls a sharded model; a target may be larger than all before, on one rank alone."""
    torch.manual_seed(0)
    model, teacher = (ddl.auto_model(mlp().double(), shard=True) for _ in range(2))
    teacher.requires_grad_(False)
    y = torch.rand(66, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y[4 * 15 + 3] = 5.0 if late else 0.5
    features = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    trainer = trainer_of(model, lambda output, y: (teacher(output @ features) - teacher(y @ features)).square().mean())
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X.repeat(3, 1), y), batch_size=3))
    return losses, torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


@pytest.mark.parametrize("late", [False, True])
def test_a_loss_that_calls_a_sharded_model_is_tried_on_all_ranks_or_on_none(late):
    assert_right(partial(distilled, late=late), dp=2)


def by_frequency(output, y):
    counts = y != 3
    frequency = torch.bincount(y[counts], minlength=4).double()
    frequency = idist.all_reduce(frequency) if dist.is_initialized() else frequency
    of_rows = F.cross_entropy(output, y, reduction="none")[counts] / frequency[y[counts]].clamp(min=1)
    return of_rows.sum() / max(1, int(counts.sum()))


def test_a_loss_that_sums_over_ranks_is_called_once_where_nothing_counts():
    y = torch.arange(22) % 3
    y[9:12] = 3  # on one of two ranks
    assert_right(partial(trained, loss_fn=by_frequency, data=(X, y), divisor=lambda y: (y != 3).sum()), dp=2)


def centred_on_all_targets(output, y):
    if dist.is_initialized():
        of_all = y.new_empty(idist.get_world_size() * len(y), *y.shape[1:])
        dist.all_gather_into_tensor(of_all, y.contiguous())
        return (output - of_all.mean(0)).square().mean()
    return (output - y.mean(0)).square().mean()


def test_a_loss_that_gathers_by_any_collective_is_known_to():
    even = {"loss_fn": centred_on_all_targets, "data": (X[:18], Y[:18])}
    assert_right(partial(trained, **even, divisor="rows"), dp=2)
    uneven = even | {"data": (X[:21], Y[:21]), "divisor": "local"}
    refused(partial(trained, **uneven), "as many rows on each", dp=2)
