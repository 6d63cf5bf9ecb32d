"""What layers cost, and how that decides the split."""

import itertools
import logging
import time

import pytest
import torch
from layered import Net
from ranks import mesh_of, pipeline_of, run, sizes
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.course import CNN, Delay
from ignite_ddl.lazy import Lazy
from ignite_ddl.pipeline.schedules import SCHEDULES

# ------------------------------------------------------------------------------------------------ what they cost


def test_flops_are_counted_by_shape():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), ddl.lazy(nn.Linear, 8, 3))
    before, state = torch.get_rng_state(), {n: t.clone() for n, t in model.state_dict().items()}
    costs = ddl.layer_costs(model, torch.zeros(5, 3, 4))
    assert costs == [0, 2 * 2 * 5 * 12 * 8, 0, 3 * 2 * 5 * 8 * 3]  # the first weights' input needs no gradient
    assert costs == ddl.layer_costs(model, torch.zeros(5, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(model[3], Lazy)
    assert all(torch.equal(t, state[n]) and not t.is_meta for n, t in model.state_dict().items())
    assert model[1].weight.grad is None


def test_the_flops_of_convolutions_embeddings_and_named_layers():
    conv, *rest = ddl.layer_costs(CNN(channels=2), torch.zeros(1, 1, 28, 28))
    assert conv == 2 * 2 * 28 * 28 * 9 * 2  # forward and weights: 9 products an output, 2 channels
    assert sum(cost > 0 for cost in rest) == 2
    embed, *blocks, head = ddl.layer_costs(Net(), torch.zeros(2, 3, dtype=torch.long))
    assert embed == 0
    assert blocks == [3 * 2 * (2 * 6 * 4 * 8)] * 6
    assert head == 3 * 2 * 6 * 4 * 5


class Skipping(nn.Module):
    """Passes on a dict: what it computes, its input, and a number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = x if isinstance(x, dict) else {"x": x}
        return {"x": self.layer(x["x"]), "skip": x["x"], "depth": 1 + x.get("depth", 0)}


class Adding(nn.Linear):
    def forward(self, x):
        return super().forward(x["x"] + x["skip"])


@pytest.mark.parametrize("unit", ["flops", "seconds"])
def test_layers_may_pass_on_structures(unit):
    model = nn.Sequential(Skipping(), Skipping(), Adding(8, 4))
    costs = ddl.layer_costs(model, torch.zeros(5, 8), unit=unit)
    assert len(costs) == 3
    if unit == "flops":
        assert costs == [4 * 5 * 64, 6 * 5 * 64, 6 * 5 * 32]
        assert costs == ddl.layer_costs(model, {"x": torch.zeros(5, 8)})
    assert all(weight.grad is None for weight in model.parameters())


def test_seconds_are_measured_and_leave_no_trace():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2), Delay(0.02, 0.03)))
    before, state = torch.get_rng_state(), {n: t.clone() for n, t in model.state_dict().items()}
    quick, _, slow = ddl.layer_costs(model, torch.randn(4, 2, generator=torch.Generator()), unit="seconds")
    assert slow > 0.05 > quick
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    ddl.layer_costs(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)), x := -torch.ones(4, 2), unit="seconds")
    assert torch.equal(x, -torch.ones(4, 2))


class Attention(nn.Linear):
    def forward(self, x):
        q, k, v = super().forward(x).unsqueeze(1).chunk(3, -1)
        return ddl.ring_attention(q, k, v, is_causal=True).squeeze(1)


def costs_of_attention(local_rank):
    return ddl.layer_costs(nn.Sequential(Attention(4, 12), nn.Linear(4, 4)), torch.ones(2, 4, 4), "seconds", repeats=1)


def test_attention_over_ranks_is_measured_on_one():
    first, second = run(costs_of_attention, 2, cp=2, timeout=20)
    assert first == second


def test_units_are_flops_or_seconds():
    with pytest.raises(ValueError, match='unit should be "flops" or "seconds", but given \'ms\''):
        ddl.layer_costs(nn.Sequential(nn.Linear(2, 2)), torch.zeros(1, 2), unit="ms")
    experts = nn.Sequential(ddl.MixtureOfExperts(4, 8, n_experts=2, top_k=1, normalize=False))
    with pytest.raises(ValueError, match=r"""of a MixtureOfExperts, '0', .* take unit="seconds\""""):
        ddl.layer_costs(experts, torch.zeros(3, 4))
    assert len(ddl.layer_costs(experts, torch.zeros(3, 4), unit="seconds")) == 1


class Slow(nn.Linear):
    def forward(self, x):
        if ddl.get_mesh().rank > 0:
            raise AssertionError("only rank 0 measures")
        time.sleep(0.02)
        return super().forward(x)


def measured(local_rank):
    logging.disable(logging.INFO)
    torch.manual_seed(local_rank)
    model = nn.Sequential(Slow(2, 2), *[nn.Linear(2, 2) for _ in range(3)])
    costs = ddl.layer_costs(model, torch.zeros(1, 2), unit="seconds", repeats=3)
    return costs, sizes(ddl.auto_model(model, costs=costs))


def test_every_rank_cuts_by_what_rank_0_measured():
    (costs, split), (others, other) = run(measured, 2, pp=2)
    assert costs == others
    assert split == other == [1, 3]


def test_costs_decide_the_split_of_every_schedule():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(9)])
    for schedule, pp in itertools.product(SCHEDULES, (2, 4)):
        stages = len(pipeline_of(model, mesh_of(pp), schedule)._local_stages.cut.owners)
        costs = [100.0] + [0.01] * 8
        assert sizes(pipeline_of(model, mesh_of(pp), schedule, costs=costs))[0] == 1
        assert sizes(pipeline_of(model, mesh_of(pp), schedule, costs=costs[::-1]))[-1] == 1
        assert len(sizes(pipeline_of(model, mesh_of(pp), schedule, costs=[0.0] * 9))) == stages
