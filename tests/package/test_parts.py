"""What torch would do with a part of a weight as if it were the full one: right, or refused."""

import pytest
import torch
import torch.nn.functional as F
from ranks import on_each_rank
from torch import nn

import ignite_ddl as ddl

ON = pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str)


def cut():
    """A weight whose rows are cut over ranks: by shard=True, or by a plan, in two parts."""
    torch.manual_seed(0)
    over_tp = ddl.get_mesh().tp_size > 1
    plan = {"": ddl.Column(parts=2)} if over_tp else None
    return ddl.auto_model(nn.Linear(4, 4), tensor_plan=plan, shard=not over_tp)


@torch.no_grad()
def not_refused(functions, weight, words):
    """The numbers of functions that raise no ValueError in these words."""
    found = []
    for i, function in enumerate(functions):
        try:
            function(weight)
            found.append(i)
        except ValueError as error:
            found += [] if words in str(error) else [i]
    return found


COPIES = [
    lambda w: w[0].abs_(),
    lambda w: w[0][1].fill_(5),
    lambda w: w[0].detach().zero_(),
    lambda w: w[0].data.zero_(),
    lambda w: w[:2].T.zero_(),
    lambda w: w.view(-1)[:3].zero_(),
    lambda w: w.diagonal().zero_(),
    lambda w: w.__setitem__(0, 1.0),
    lambda w: torch.chunk(w, 2)[0].mul_(2),
    lambda w: torch.narrow(w, 0, 0, 2).mul_(2),
    lambda w: torch.vsplit(w, 2)[0].mul_(2),
    lambda w: torch.add(w[0], 1, out=w[0]),
    lambda w: torch._foreach_mul_([w[0], w[1]], 2.0),
    lambda w: F.relu(w[0], inplace=True),
    lambda w: nn.init.eye_(w[:2]),
]


@ON
@on_each_rank()
def test_a_slice_that_is_a_copy_is_not_changed(local_rank):
    weight = cut().weight
    assert not_refused(COPIES, weight, "cut over ranks, a DTensor") == []
    with torch.no_grad():
        weight.mul_(2).view(4, 4).t().add_(1)  # views, and a slice that is computed with
        assert float((weight[0] * 2).abs_().full_tensor().min()) >= 0


NUMBERS = [
    lambda w: w.sum().item(),
    lambda w: bool((w > 0).any()),
    lambda w: w.sum().is_nonzero(),
    lambda w: torch.full((2,), w.sum()),
    lambda w: torch.ones(2).add(torch.ones(2), alpha=w.sum()),
    lambda w: w.add(w, alpha=w.sum()),
]


@ON
@on_each_rank()
def test_a_number_of_a_part_is_not_read(local_rank):
    weight = cut().weight
    assert not_refused(NUMBERS, weight, "this number is computed from this rank's part") == []


FILLED = [
    nn.init.eye_,
    nn.init.kaiming_uniform_,
    lambda w: w.data.cauchy_(),
    lambda w: w.data.log_normal_(),
    lambda w: w.data.geometric_(0.5),
    lambda w: w.data.copy_(torch.randn_like(w)),
]


@ON
@on_each_rank()
def test_a_part_is_filled_as_in_one_process(local_rank):
    model, plain = cut(), nn.Linear(4, 4)
    for fill in FILLED:
        for weight in (model.weight, plain.weight):
            torch.manual_seed(1)
            fill(weight)
        assert torch.equal(ddl.full_state_dict(model)["weight"], plain.weight)
    for draw in (torch.bernoulli, lambda w: torch.multinomial(w, 2)):
        with pytest.raises(ValueError, match="draws for each element"):
            draw(torch.rand_like(model.weight))


@ON
@on_each_rank()
def test_dtypes_of_a_weight_whose_data_was_looked_at(local_rank):
    model = cut()
    kept = [p.data for p in model.parameters()]
    with pytest.raises(ValueError, match="should keep the shape and the dtype of p"):
        model.weight.data = model.weight.data.double()
    values = ddl.full_state_dict(model)["weight"].double()
    assert torch.equal(ddl.full_state_dict(model.to("cpu").double())["weight"], values)
    assert kept[0].dtype == torch.float32
