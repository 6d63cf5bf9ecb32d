"""Optimizers and gradients of a model that is cut over ranks, and what saves it: right, or refused by name.

Each case trains a few float64 steps on ranks with different rows and is compared with one process.
"""

import copy
import io
import pickle
import re
import tempfile
from functools import partial

import ignite.distributed as idist
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ignite.engine import Events
from packaging.version import Version
from ranks import on, on_each_rank
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import clip_grad_value_, get_total_norm
from torch.utils.data import TensorDataset

import ignite_ddl as ddl

generator = torch.Generator().manual_seed(1)
X = torch.randn(14, 8, generator=generator, dtype=torch.float64)
Y = torch.randn(14, 4, generator=generator, dtype=torch.float64)
PLAN = {"0": ddl.Column(), "2": ddl.Row()}
MESHES = {
    "dp2": ({"dp": 2}, {}),
    "dp2 shard": ({"dp": 2}, {"shard": True}),
    "tp2": ({"tp": 2}, {"tensor_plan": PLAN}),
    "pp2": ({"pp": 2}, {}),
    "dp2 x tp2": ({"dp": 2, "tp": 2}, {"tensor_plan": PLAN}),
}


def on_meshes(*quick, slow=()):
    given = [
        pytest.param(*MESHES[name], id=name, marks=[pytest.mark.slow] * (name in slow)) for name in (*quick, *slow)
    ]
    return pytest.mark.parametrize(("axes", "options"), given)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.LayerNorm(4), nn.Linear(4, 4, dtype=torch.float64)
    ).double()


def loader():
    return ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8)


def weights_of(model):
    return torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, foreach=None):
        super().__init__(params, {"lr": lr, "foreach": None})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            given = [p for p in group["params"] if p.grad is not None]
            for p in given:
                p.add_(p.grad * self.factor(p, given), alpha=-group["lr"] / group["steps"])


class Layerwise(Own):
    """As LAMB: by norms of a whole weight."""

    def factor(self, p, given):
        return p.norm() / (p.grad.norm() + 1)


class ReadsNumbers(Own):
    def factor(self, p, given):
        return p.norm().item() / (p.grad.norm().item() + 1)


class ReadsParts(Own):
    def factor(self, p, given):
        p = p.to_local() if hasattr(p, "to_local") else p
        return float(p.norm())


class Coupled(Own):
    """By the norm of all gradients."""

    def factor(self, p, given):
        return 1 / (1 + sum(float(q.grad.square().sum()) for q in given))


class SAM(torch.optim.Optimizer):
    """As it is copied from its paper's repository: two steps, by the norm of all gradients."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)

    def step(self, closure=None):
        raise NotImplementedError


class Lookahead(torch.optim.Optimizer):
    """A wrapper that does not call ``Optimizer.__init__``, as in several packages."""

    def __init__(self, base):
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def step(self, closure=None):
        self.base.step(closure)
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, q in zip(group["params"], slow, strict=True):
                p.data.copy_(q.lerp_(p.data, 0.5))


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=1e-6)


class HoldsNothing(Lookahead):
    def __init__(self, params):
        self.param_groups = [{"params": params}]


O = torch.optim  # noqa: E741
RIGHT = {
    "SGD": partial(O.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": partial(O.SGD, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": partial(O.AdamW, lr=0.01),
    "AdamW foreach": partial(O.AdamW, lr=0.01, foreach=True),
    "AdamW fused": partial(O.AdamW, lr=0.01, fused=True),
    "Adagrad": partial(O.Adagrad, lr=0.1),
    "ASGD foreach": partial(O.ASGD, lr=0.1, foreach=True),
    "Layerwise": Layerwise,
    "Lookahead": lambda ps: Lookahead(O.SGD(ps, lr=0.1)),
    "one group a weight": lambda ps: O.AdamW([{"params": [p], "lr": 0.01} for p in ps], foreach=True),
}
WRONG_WHERE_CUT = {
    "holds nothing": (HoldsNothing, r"HoldsNothing should call torch.optim.Optimizer.__init__\("),
    "Rprop": (partial(O.Rprop, lr=0.01), "Rprop cannot step weights that are cut over ranks .*index_put"),
    "Adafactor": (partial(O.Adafactor, lr=0.01), "Adafactor cannot step weights that are cut over ranks"),
    "Adagrad fused": (partial(O.Adagrad, fused=True), "Adagrad cannot step .*_fused_adagrad_"),
    "reads numbers": (ReadsNumbers, r"ReadsNumbers cannot step .*full_tensor\(\)"),
    "reads parts": (ReadsParts, "ReadsParts should do the same to a weight that is cut over ranks"),
}
if Version(torch.__version__) >= Version("2.15"):
    del WRONG_WHERE_CUT["Rprop"]  # which has its index_put, and is right
UNKNOWN = {
    "SAM": (lambda ps: SAM(ps, O.SGD, lr=0.1), "SAM cannot be tried out on small weights .*checks=False"),
    "ZeRO": (lambda ps: ZeroRedundancyOptimizer(ps, O.SGD, lr=0.1), "ZeroRedundancyOptimizer cannot be tried out"),
}
RIGHT_WHERE_CUT = {
    "Muon": (lambda ps: O.Muon([p for p in ps if p.ndim == 2]), "nothing"),  # but for bfloat16's rounding
    "Noisy": (partial(Noisy, lr=0.1), "nothing"),
}
COUPLED = {"Coupled": (Coupled, "Coupled should do the same"), "LBFGS": (O.LBFGS, "LBFGS should do the same")}


def stepped(make, options, checks=True):
    model = ddl.auto_model(mlp(), **options)
    optimizer = ddl.auto_optim(make(list(model.parameters())), checks=checks)
    schedule = O.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
    before = [list(group["params"]) for group in optimizer.param_groups]
    trainer.run(loader())
    schedule.step()
    trainer.run(loader())
    after = [list(group["params"]) for group in optimizer.param_groups]
    assert [list(map(id, group)) for group in after] == [list(map(id, group)) for group in before]
    return weights_of(model)


def step_all(local_rank, options):
    return [stepped(make, options) for make in RIGHT.values()]


@on_meshes("dp2 shard", "tp2", slow=("dp2", "pp2", "dp2 x tp2"))
def test_optimizers_that_are_right(axes, options):
    alone = step_all(0, {})
    for found in on(step_all, options, **axes):
        errors = {name: float((a - b).abs().max()) for name, a, b in zip(RIGHT, found, alone, strict=True)}
        assert max(errors.values()) <= 1e-12, errors


def refusals(local_rank, cases, options):
    said = {}
    for name, (make, _) in cases.items():
        model = ddl.auto_model(mlp(), **options)
        stream = torch.get_rng_state()
        try:
            ddl.auto_optim(make(list(model.parameters())))
            said[name] = "nothing" if torch.equal(stream, torch.get_rng_state()) else "it has drawn"
        except ValueError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        ("dp2 shard", WRONG_WHERE_CUT | UNKNOWN | RIGHT_WHERE_CUT),
        (
            "tp2",
            WRONG_WHERE_CUT
            | UNKNOWN
            | RIGHT_WHERE_CUT
            | {"LBFGS": (O.LBFGS, "LBFGS cannot step .*(mixed torch|flatten multiple)")},
        ),
        ("pp2", COUPLED | UNKNOWN | RIGHT_WHERE_CUT),
    ],
)
def test_optimizers_that_are_not_are_refused(mesh, cases):
    axes, options = MESHES[mesh]
    for said in on(refusals, cases, options, **axes):
        for name, (_, words) in cases.items():
            with pytest.raises(ValueError, match=words):
                raise ValueError(said[name])


def of_second_order(local_rank, options):
    """It computes with all weights as one vector, which DTensor gets right where all are cut alike."""
    model = ddl.auto_model(mlp(), **options)
    optimizer = ddl.auto_optim(O.LBFGS(model.parameters(), lr=0.1, max_iter=5))

    def update(engine, batch):
        def closure():
            optimizer.zero_grad()
            return ddl.forward_backward(engine, model, *batch, F.mse_loss)[1]

        optimizer.step(closure)

    batches = ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5)  # unlike numbers of rows on dp ranks
    ddl.MeshEngine(update).run(batches, max_epochs=2)
    return weights_of(model)


def of_uneven_weights(local_rank):
    model = ddl.auto_model(nn.Linear(8, 3).double(), shard=True)
    with pytest.raises(ValueError, match="LBFGS cannot step weights that are cut over ranks .*unevenly"):
        ddl.auto_optim(O.LBFGS(model.parameters()))
    ddl.auto_optim(O.NAdam(model.parameters()))


def test_lbfgs_is_refused_where_weights_are_cut_unevenly():
    on(of_uneven_weights, dp=2)


def by_hand_in_a_closure(local_rank):
    model = ddl.auto_model(mlp())
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def update(engine, batch):
        def closure():
            optimizer.zero_grad()
            F.mse_loss(model(batch[0]), batch[1]).backward()

        optimizer.step(closure=closure)

    ddl.MeshEngine(update).run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5))


def test_gradients_of_a_closure_that_are_not_weighted_are_refused():
    with pytest.raises(ValueError, match="call ddl.forward_backward, which weights by rows"):
        on(by_hand_in_a_closure, dp=2)


@on_each_rank(dp=2)
def test_gradients_of_a_sharded_model_that_are_taken_by_other_ways_are_refused(local_rank):
    def update(engine, batch):
        torch.autograd.grad(F.mse_loss(model(batch[0]), batch[1]), list(model.parameters()))

    def past(engine, batch):
        F.mse_loss(model(batch[0]), batch[1]).backward(inputs=list(model.parameters()))
        optimizer.step()

    model = ddl.auto_model(mlp(), shard=True)
    with pytest.raises(ValueError, match="torch.autograd.grad gives no gradients by weights that are sharded"):
        ddl.MeshEngine(update).run(loader())
    model = ddl.auto_model(mlp(), shard=True)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match="none of its weights has a gradient: if the update function calls"):
        ddl.MeshEngine(past).run(loader(), epoch_length=1)
    model = ddl.auto_model(mlp(), shard=True)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in optimizers:
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    whole = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    data = ddl.auto_dataloader(TensorDataset(X, Y), batch_size=5)
    with pytest.raises(ValueError, match="an optimizer steps in the backward pass"):
        ddl.create_supervised_trainer(model, whole, F.mse_loss).run(data)


@on_meshes("dp2", slow=["dp2 shard"])
def test_lbfgs_where_all_weights_are_alike(axes, options):
    for found in on(of_second_order, options, **axes):
        assert (found - of_second_order(0, {})).abs().max() <= 1e-12


def test_what_is_right_on_whole_weights_is_taken():
    cases = WRONG_WHERE_CUT | COUPLED | {"SAM": UNKNOWN["SAM"]}
    assert on(refusals, cases, {}, dp=2) == [dict.fromkeys(cases, "nothing")] * 2


# --- gradients: their norm, their overflow, and whose they are


def head_alone(local_rank, options, by_hand=False):
    """Only the last layers are stepped, though all have gradients."""
    model = ddl.auto_model(mlp(), **options)
    head = [p for name, p in model.named_parameters() if name.removeprefix("module.")[0] in "34"]
    optimizer = ddl.auto_optim(torch.optim.SGD([{"params": head}], lr=0.5))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss, max_norm=None if by_hand else 0.1)
    norms = []
    if by_hand:  # in one process
        step = optimizer.step
        optimizer.step = lambda: (norms.append(float(nn.utils.clip_grad_norm_(head, 0.1))), step())
    trainer.run(loader(), max_epochs=2)
    return weights_of(model), norms[-1] if by_hand else trainer.state.grad_norm


@on_meshes("tp2", "pp2", slow=("dp2", "dp2 shard", "dp2 x tp2"))
def test_an_optimizer_of_the_head_alone_clips_its_own_gradients(axes, options):
    right, norm = head_alone(0, {}, by_hand=True)
    for weights, found in [head_alone(0, {}), *on(head_alone, options, **axes)]:
        assert (weights - right).abs().max() <= 1e-12
        assert found == pytest.approx(norm, rel=1e-12)


def test_the_norm_of_complex_gradients():
    layer = nn.Linear(1, 1, bias=False, dtype=torch.complex128)
    layer.weight.grad = torch.full_like(layer.weight, 3 + 4j)
    assert float(ddl.clip_grad_norm_(layer, 1.0)) == 5
    assert layer.weight.grad.abs().item() == pytest.approx(1, abs=1e-6)


def with_gradients(options):
    model = ddl.auto_model(mlp(), **options)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    ddl.create_supervised_trainer(model, optimizer, F.mse_loss).run(loader(), max_epochs=1)
    return model, optimizer


def total_norm(local_rank, options):
    model, _ = with_gradients(options)
    return float(get_total_norm([p.grad for p in model.parameters()]))


@on_meshes("tp2", "pp2")
def test_torchs_norm_of_a_part_of_the_gradients_is_refused(axes, options):
    with pytest.raises(ValueError, match=r"computes the norm of this rank's part .* call ddl.clip_grad_norm_"):
        on(total_norm, options, **axes)


def clipped_by_group(local_rank, options):
    """Gradients of a group, and then of each weight, in torch's anomaly mode, which looks for NaN in them."""
    model = ddl.auto_model(mlp(), **options)
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == large]} for large in (True, False)]
    optimizer = ddl.auto_optim(torch.optim.SGD(groups, lr=0.1))

    def update(engine, batch):
        optimizer.zero_grad()
        _, loss = ddl.forward_backward(engine, model, *batch, F.mse_loss)
        for group in optimizer.param_groups:
            ddl.clip_grad_norm_(model, 0.1, parameters=group["params"])
        for p in model.parameters():
            torch.nn.utils.clip_grad_norm_([p], 0.05)
        optimizer.step()

    with torch.autograd.detect_anomaly():
        ddl.MeshEngine(update).run(loader())
    return weights_of(model)


@on_meshes("tp2", slow=("dp2 shard", "pp2", "dp2 x tp2"))
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_gradients_are_clipped_by_group_and_by_weight(axes, options):
    right = clipped_by_group(0, {})
    for found in on(clipped_by_group, options, **axes):
        assert (found - right).abs().max() <= 1e-12


def value_clipped(local_rank, options):
    """Right on each part, and must stay so."""
    model = ddl.auto_model(mlp(), **options)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    parameters = [p for p in model.parameters() if not hasattr(p, "device_mesh")] if "tensor_plan" in options else []

    def update(engine, batch):
        optimizer.zero_grad()
        ddl.forward_backward(engine, model, *batch, F.mse_loss)
        clip_grad_value_(parameters or model.parameters(), 0.01)
        optimizer.step()

    ddl.MeshEngine(update).run(loader())
    return weights_of(model)


@on_meshes(slow=("dp2 shard", "pp2"))
def test_clipping_values_is_right_everywhere(axes, options):
    for found in on(value_clipped, options, **axes):
        assert (found - value_clipped(0, {})).abs().max() <= 1e-12


READS = {
    "item": lambda p: p.grad.norm().item(),
    "float": lambda p: float(p.abs().max()),
    "int": lambda p: int((p > 0).sum()),
    "bool": lambda p: bool((p > 9).any()),
    "list": lambda p: p.detach().tolist(),
}


def reading(local_rank, options):
    model, _ = with_gradients(options)
    weight, said = model[0].weight, []
    for read in READS.values():
        try:
            said.append(str(read(weight)))
        except ValueError as error:
            said.append(str(error))
    norm = weight.grad.norm()
    whole = norm.full_tensor().item() if options else norm.item()
    return said, [whole, weight[3, 1].item(), norm.add(1).item()]


@on_meshes("tp2", slow=["dp2 shard"])
def test_a_number_read_off_a_part_is_refused(axes, options):
    for said, whole in on(reading, options, **axes):
        if Version(torch.__version__) >= Version("2.15"):  # whose `any` asks all ranks
            assert said.pop() == "False"
        assert all("call full_tensor() before, on every rank" in words for words in said), said
        assert whole == pytest.approx(reading(0, {})[1], rel=1e-12)


def assigned(local_rank, options):
    """Weights that a script sets by ``data``: from themselves, a whole one, and those of an average for a while."""
    model, _ = with_gradients(options)
    weight = model[0].weight
    weight.data = weight.data / weight.data.norm(dim=1, keepdim=True)
    weight.data[torch.tensor([2])].mul_(2.0)  # of a copy, in one process, too
    backup, weight.data = weight.data, weight.data * 2  # of a moving average, for a validation
    weight.data = backup
    model[0].bias.data = torch.arange(16.0, dtype=torch.float64)
    means = {name: 0.5 * p.data for name, p in model.named_parameters()}
    kept = {name: p.data for name, p in model.named_parameters()}
    also = [p.detach() for p in model.parameters()]
    for name, p in model.named_parameters():
        p.data = means[name]
        means[name] *= 3  # it is the weight now
    found = [weights_of(model)]
    for name, p in model.named_parameters():
        p.data, means[name] = kept[name], p.data
    with torch.no_grad():
        for p, mean, before in zip(model.parameters(), means.values(), also, strict=True):
            p += mean + before
    return torch.stack([*found, weights_of(model)])


def shared(local_rank, options):
    weight = with_gradients(options)[0][2].weight
    for other in (weight, weight.data):
        with pytest.raises(ValueError, match=r"p.data.copy_\(q.data\)"):
            with_gradients(options)[0][2].weight.data = other
    weight.data = weight.data


@on_meshes("tp2", slow=["dp2 shard", "dp2 x tp2"])
def test_weights_that_a_script_assigns(axes, options):
    right = assigned(0, {})
    for found in on(assigned, options, **axes):
        assert (found - right).abs().max() <= 1e-12
    on(shared, options, **axes)


def fused(parts=2, **options):
    torch.manual_seed(0)
    return ddl.auto_model(nn.Sequential(nn.Linear(8, 16)).double(), {"0": ddl.Column(parts=parts)}, **options)


def assigned_in_parts(local_rank, value):
    """Weights of a fused layer that a script assigns: to twice what they are, and to one of its own."""
    weight = (model := fused())[0].weight
    twice = 2 * weight.detach().full_tensor()  # in the ranks' order, which is not known of a plain tensor
    with pytest.raises(ValueError, match="does not say in which order value has the rows"):
        weight.data = twice
    model[0].bias.data = torch.zeros(16, dtype=torch.float64)  # in any order
    weight.data = distribute_tensor(twice, weight.device_mesh, weight.placements)
    doubled = ddl.full_state_dict(model)["0.weight"]
    weight.data = ddl.distribute_like(value, weight)
    return doubled, ddl.full_state_dict(model)["0.weight"]


def test_a_whole_weight_that_a_script_assigns_to_a_fused_layer():
    value = torch.randn(16, 8, dtype=torch.float64)
    for doubled, found in on(assigned_in_parts, value, tp=2):
        assert torch.equal(doubled, 2 * fused()[0].weight)
        assert torch.equal(found, value)


def masked(local_rank, options):
    """Weights times a mask for the uncut ones, and what else is refused."""
    model, drawn = fused(**options), torch.Generator().manual_seed(1)
    weight = model[0].weight if hasattr(model, "__getitem__") else model.module[0].weight
    mask = torch.rand(weight.shape, generator=drawn, dtype=torch.float64).round()
    for wrong in (mask[:3], weight.detach()[:3]):
        with pytest.raises(ValueError, match=r"value should be a plain tensor of shape \(16, 8\)"):
            ddl.distribute_like(wrong, weight)
    if ddl.get_mesh().tp_size > 1:
        with pytest.raises(ValueError, match=r"one of model.parameters\(\).*the order of its rows"):
            ddl.distribute_like(mask, nn.Parameter(weight.detach()))
    with torch.no_grad():
        weight.mul_(ddl.distribute_like(mask, weight))
    return ddl.full_state_dict(model)["0.weight"]


@pytest.mark.parametrize(
    "axes", [{"dp": 2}, {"tp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"shard": True, "parts": (4, 12)}], ids=str)
def test_a_mask_for_the_uncut_weights(axes, options):
    right = masked(0, options)
    for found in on(masked, options, **axes):
        assert torch.equal(found, right)


def with_a_plain_tensor(local_rank, options):
    """A gradient and a weight after a plain tensor was added, cut as the message says; and what it says."""
    model, _ = with_gradients(options)
    weight, value, said = model[0].weight, torch.arange(128.0, dtype=torch.float64).view(16, 8), []
    refused = (lambda: weight.grad.add_(value), lambda: weight.detach().norm().clamp_(min=0.5))
    for change in refused if options else ():
        try:
            change()
        except ValueError as error:
            said.append(str(error))
    part = distribute_tensor(value, weight.device_mesh, weight.placements) if options else value
    weight.grad.add_(part)
    weight.data.mul_(part)
    return said, weights_of(model), weight.grad.full_tensor() if options else weight.grad


@on_meshes("tp2", slow=["dp2 shard", "dp2 x tp2"])
def test_the_cure_for_plain_tensors_beside_cut_ones(axes, options):
    _, weights, gradient = with_a_plain_tensor(0, {})
    for said, found, of_weight in on(with_a_plain_tensor, options, **axes):
        assert all("distribute_tensor(value, p.device_mesh, p.placements)" in words for words in said), said
        assert "the out-of-place version of" in said[1], said
        assert (found - weights).abs().max() <= 1e-12
        assert (of_weight - gradient).abs().max() <= 1e-12


SLICES = {
    "row": lambda p: p[1].zero_(),
    "rows": lambda p: p.data[1:9].mul_(2),
    "narrow": lambda p: p.narrow(0, 4, 8).fill_(0.0),
    "half": lambda p: nn.init.uniform_(p.chunk(2)[1]),
    "whole lists": lambda p: torch.cat([p.grad.flatten(), torch.ones(3, dtype=torch.float64)]),
}


def sliced(local_rank, options):
    model, _ = with_gradients(options)
    said = []

    def change(change):
        with torch.no_grad():
            change(model[0].weight)

    for name, one in SLICES.items():
        trainer = ddl.MeshEngine(lambda engine, batch, one=one: change(one))
        try:
            trainer.run([0])
            said.append(name)
        except ValueError as error:
            said.append(str(error))
    return said


@on_meshes("tp2", slow=["dp2 shard"])
def test_what_would_change_a_copy_of_a_part_is_refused(axes, options):
    assert sliced(0, {}) == list(SLICES)
    for said in on(sliced, options, **axes):
        assert all("with a weight or gradient that is cut over ranks" in words for words in said), said


class Returning(nn.Module):
    """Returns a weight of its own, as a learned balance of two losses."""

    def __init__(self, copies):
        super().__init__()
        self.body, self.balance, self.copies = nn.Linear(8, 4), nn.Parameter(torch.ones(1)), copies

    def forward(self, x):
        return self.body(x), self.balance.clone() if self.copies else self.balance


def balanced(local_rank, copies, options):
    torch.manual_seed(0)
    model = ddl.auto_model(Returning(copies).double(), **options)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_fn(output, y):
        return (-output[1]).exp().sum() * F.mse_loss(output[0], y) + output[1].sum()

    trainer = ddl.create_supervised_trainer(model, optimizer, loss_fn)
    trainer.run(loader())
    return weights_of(model)


@pytest.mark.parametrize("copies", [False, True])
def test_a_model_that_returns_a_weight(copies):
    for found in on(balanced, copies, {"shard": True}, dp=2):
        assert (found - balanced(0, copies, {})).abs().max() <= 1e-12


class Tied(nn.Module):
    pipeline_layers = ("embed", "inner", "head")

    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Linear(8, 4, bias=False), nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        for layer in (self.embed, self.inner, self.head):
            x = layer(x)
        return x


def tied(local_rank, kind, options):
    torch.manual_seed(0)
    model = ddl.auto_model(Tied().double(), **options)
    named = dict(model.named_parameters())
    if kind == "decay":
        decayed = [p for name, p in named.items() if "head" not in name]
        rest = [p for name, p in named.items() if "head" in name]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    elif kind == "missing":
        groups = [p for name, p in named.items() if "head" not in name] or model.parameters()
    else:
        groups = model.parameters()
    optimizer = ddl.auto_optim(torch.optim.SGD(groups, lr=0.1))
    ddl.create_supervised_trainer(model, optimizer, F.mse_loss).run(loader(), max_epochs=3)
    return weights_of(model)


def each_tied(local_rank, options):
    """What is refused for two kinds of groups, and the weights with one group."""
    said = []
    for kind in ("decay", "missing"):
        try:
            tied(0, kind, options)
        except ValueError as error:
            said.append(str(error))
    return said, tied(0, "same", options)


@pytest.mark.parametrize("axes", [{"pp": 2}, pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.slow)], ids=str)
def test_tied_weights_whose_groups_differ_are_refused(axes):
    for said, weights in on(each_tied, {"shard": "dp" in axes}, **axes):
        assert len(said) == 2
        for words in said:
            assert re.search("'embed.weight' .*one weight on several stages.* same options", words)
        assert (weights - tied(0, "same", {})).abs().max() <= 1e-12


def in_the_loss(local_rank):
    model = ddl.auto_model(mlp())
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = ddl.auto_optim(torch.optim.SGD([*model.parameters(), scale], lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, lambda o, y: F.mse_loss(o * scale, y))
    trainer.run(loader())
    return scale.item()


def beside_a_model(local_rank):
    """A number that is no nn.Parameter, such as a temperature, in an update function of one's own."""
    model = ddl.auto_model(mlp())
    scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = ddl.auto_optim(torch.optim.SGD([{"params": list(model.parameters())}, {"params": [scale]}], lr=0.1))

    def update(engine, batch):
        optimizer.zero_grad()
        _, loss = ddl.forward_backward(engine, model, *batch, lambda output, y: F.mse_loss(output * scale.exp(), y))
        optimizer.step()
        return loss.item()

    x = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)  # rows, tokens, features
    trainer = ddl.MeshEngine(update)
    trainer.run(ddl.auto_dataloader(TensorDataset(x, x[..., :4].sin()), batch_size=4), max_epochs=1)
    return trainer.state.output


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"cp": 2}, r"weight of shape \(\) of no model .* differs between dp or cp ranks now, .* put it into a module"),
        (
            {"pp": 2},
            r"weight of shape \(\) of no model .* differs between stages now, .* parameter of the model's last",
        ),
    ],
    ids=str,
)
def test_a_number_beside_a_model_that_ranks_step_unlike_is_refused(axes, words):
    with pytest.raises(ValueError, match=words):
        on(beside_a_model, **axes)
    assert on(beside_a_model, tp=2) == [pytest.approx(beside_a_model(0), abs=1e-12)] * 2


def test_a_weight_of_no_model_is_refused():
    with pytest.raises(ValueError, match=r"optimizer holds a weight of shape \(\) of no model from ddl.auto_model"):
        on(in_the_loss, dp=2)
    in_the_loss(0)


# --- states: a part never passes for the whole

PART = r"this rank's part of a model .* save ddl.full_state_dict\(model\).* ddl.Checkpoint .*ddl.pickle_shards"
SAVES = {
    "state": lambda model, optimizer: model.state_dict(),
    "in a dict": lambda model, optimizer: {"model": model.state_dict(), "epoch": 3},
    "model": lambda model, optimizer: model,
    "optimizer": lambda model, optimizer: optimizer.state_dict(),
}


def written(local_rank, options):
    from safetensors.torch import save_file

    state = dict(saving(options, SAVES["state"]))  # as save_pretrained of transformers does
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError, match=PART):
        save_file(state, f"{folder}/model.safetensors")


@on_meshes("tp2", slow=["dp2 shard"])
def test_writing_a_part_by_safetensors_is_refused(axes, options):
    on(written, options, **axes)


def saving(options, make):
    model = ddl.auto_model(mlp(), **options)
    optimizer = ddl.auto_optim(torch.optim.Adam(model.parameters(), lr=0.1))
    ddl.create_supervised_trainer(model, optimizer, F.mse_loss).run(loader())
    return make(model, optimizer)


def saved(local_rank, options):
    said = []
    for make in SAVES.values():
        for save in (lambda thing: torch.save(thing, io.BytesIO()), pickle.dumps):
            try:
                save(saving(options, make))
                said.append("nothing")
            except ValueError as error:
                said.append(str(error))
    return said


@on_meshes("tp2", "pp2", slow=("dp2 shard", "dp2 x tp2"))
def test_pickling_a_part_is_refused(axes, options):
    for said in on(saved, options, **axes):
        for words in said:
            with pytest.raises(ValueError, match=PART):
                raise ValueError(words)


def returned(local_rank, options):
    return saving(options, SAVES["in a dict"])


@on_meshes("pp2", slow=["tp2"])
def test_returning_a_part_is_refused(axes, options):
    with pytest.raises(
        ValueError, match=f"(?s)the result .dict, whose part 'model' is .*. cannot be sent back: .*{PART}"
    ):
        on(returned, options, **axes)


@on_meshes("dp2")
def test_a_whole_model_is_saved(axes, options):
    assert on(saved, options, **axes) == [["nothing"] * 8] * 2
    assert set(on(returned, options, **axes)[0]["model"]) == {f"module.{name}" for name in mlp().state_dict()}


def kept(local_rank, options, folder):
    """The best weights so far, each rank's own file, and DCP: all as before."""
    model, optimizer = with_gradients(options)
    best, names, optimizers = copy.deepcopy(model.state_dict()), copy.copy(model.state_dict()), optimizer.state_dict()
    copy.deepcopy(optimizers)
    before = weights_of(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder / "background").result()
    file = folder / f"{idist.get_rank()}.pt"
    with ddl.pickle_shards():
        torch.save({"model": model.state_dict(), "optimizer": optimizers}, file)
    found = []
    for load in (lambda: best, lambda: names | best, lambda: torch.load(file)["model"]):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        model.load_state_dict(load())
        optimizer.load_state_dict(optimizers)
        found.append(float((weights_of(model) - before).abs().max()))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    for name in ("dcp", "background"):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder / name)
        model.load_state_dict(state["model"])
        found.append(float((weights_of(model) - before).abs().max()))
    with pytest.raises(ValueError, match=PART):
        pickle.dumps(model.state_dict())
    return found


@on_meshes("tp2", "pp2", slow=("dp2 shard", "dp2 x tp2"))
def test_copies_and_each_ranks_own_shards_are_kept(axes, options, tmp_path):
    for found in on(kept, options, tmp_path, **axes):
        assert found == [0.0] * 5


def load_whole(local_rank, options):
    state = mlp().state_dict()
    model = ddl.auto_model(mlp(), **options)
    said = []
    plain = torch.optim.Adam(mlp().parameters())
    for p in plain.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    plain.step()
    optimizer = ddl.auto_optim(torch.optim.Adam(model.parameters()))
    for load in (lambda: model.load_state_dict(state), lambda: optimizer.load_state_dict(plain.state_dict())):
        try:
            load()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    ddl.load_full_state_dict(model, state)
    if ddl.get_mesh().pp_size > 1:
        model.load_state_dict(state, strict=False)  # right, and as before
    return said


@on_meshes("tp2", "pp2", slow=("dp2 shard", "dp2 x tp2"))
def test_loading_a_whole_state_names_what_can(axes, options):
    for model, optimizer in on(load_whole, options, **axes):
        assert "of the full model, but this rank holds a part of it: call ddl.load_full_state_dict(model, " in model
        assert "is that of one process or of another mesh: save it there by ddl.Checkpoint" in optimizer


class Counts(nn.Module):
    def __init__(self, as_tensor=False):
        super().__init__()
        self.n, self.as_tensor = 0, as_tensor

    def forward(self, x):
        return x

    def get_extra_state(self):
        return torch.tensor(self.n) if self.as_tensor else {"n": self.n}

    def set_extra_state(self, state):
        self.n = int(state) if self.as_tensor else state["n"]


def extra(local_rank, options, folder):
    model = ddl.auto_model(nn.Sequential(*mlp(), Counts(), Counts(True)), **options)
    counters = [module for module in model.modules() if isinstance(module, Counts)]
    for counter in counters:
        counter.n = 7
    state = ddl.full_state_dict(model)
    assert list(state) == [*mlp().state_dict(), "5._extra_state", "6._extra_state"]
    for counter in counters:
        counter.n = 0
    ddl.load_full_state_dict(model, state)
    ddl.export_weights(model, folder)
    ddl.import_weights(model, folder)
    return [counter.n for counter in counters]


@on_meshes("pp2", slow=("dp2", "tp2"))
def test_extra_states(axes, options, tmp_path):
    assert {n for found in on(extra, options, tmp_path, **axes) for n in found} == {7}


# --- models that other words refused, or none


def channels_last(local_rank, folder):
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    ddl.export_weights(ddl.auto_model(model), folder)
    again = nn.Conv2d(3, 4, 3)
    ddl.import_weights(again, folder)
    return torch.equal(again.weight, model.weight)


@pytest.mark.parametrize("axes", [{}, pytest.param({"dp": 2}, marks=pytest.mark.slow)], ids=str)
def test_channels_last_is_exported(axes, tmp_path):
    assert all(on(channels_last, tmp_path, **axes) if axes else [channels_last(0, tmp_path)])


def teacher(local_rank, options):
    torch.manual_seed(local_rank)  # rank 0's weights count
    model = ddl.auto_model(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)).double().requires_grad_(False), **options)
    return model(X)


@on_meshes("dp2", slow=("dp2 shard", "pp2"))
def test_a_frozen_teacher(axes, options):
    for found in on(teacher, options, **axes):
        assert (found - teacher(0, {})).abs().max() <= 1e-12


def followed(local_rank, options):
    """A frozen teacher that is the moving average of its student, as docs/coming_from.md updates it."""
    model, mean = ddl.auto_model(mlp(), **options), ddl.auto_model(mlp().requires_grad_(False), **options)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def update(engine, batch):
        with torch.no_grad():
            target = mean(batch[0])
        optimizer.zero_grad()
        ddl.forward_backward(engine, model, batch[0], (batch[1], target), both)
        optimizer.step()
        for weight, new in zip(mean.parameters(), model.parameters(), strict=True):
            weight.data.lerp_(new.data, 0.1)

    ddl.MeshEngine(update).run(loader(), max_epochs=2)
    return torch.cat([weights_of(model), weights_of(mean)])


def both(output, y):
    return F.mse_loss(output, y[0]) + F.mse_loss(output, y[1])


@on_meshes("dp2 shard", slow=["dp2 x tp2"])
def test_a_frozen_teacher_that_follows_its_student(axes, options):
    for found in on(followed, options, **axes):
        assert (found - followed(0, {})).abs().max() <= 1e-12


def thawed(local_rank, options):
    model = ddl.auto_model(mlp().requires_grad_(False), **options)
    ddl.auto_optim(torch.optim.SGD(model.requires_grad_().parameters(), lr=0.1))


def frozen_stage(local_rank, axes):
    model = mlp()
    model[0].requires_grad_(False)
    model = ddl.auto_model(model, **({"split": (2, 3)} if axes else {}))
    optimizer = ddl.auto_optim(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    ddl.create_supervised_trainer(model, optimizer, F.mse_loss, max_norm=0.1).run(loader(), max_epochs=2)
    return weights_of(model)


def test_what_requires_grad_on_a_frozen_stage():
    for found in on(frozen_stage, True, pp=2):
        assert (found - frozen_stage(0, False)).abs().max() <= 1e-12


def twice(local_rank, options):
    ddl.auto_model(ddl.auto_model(mlp(), **options), **options)


class Scaled(nn.Sequential):
    def __init__(self):
        super().__init__(*mlp())
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))


def scaled(local_rank, options):
    ddl.auto_model(nn.Sequential(nn.Linear(8, 8), Scaled()), **options)


def sparse(local_rank, options):
    model = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 4))
    ddl.auto_model(model, **options)


FROZEN = "was frozen when ddl.auto_model took its model"
AGAIN = "model has been given to ddl.auto_model before"
NO_DIM = "'1.scale' has no dimensions, which torch's .* do not support: give it the shape \\(1,\\)"
SPARSE = r"'0' has sparse=True, .*: sparse=False"


SHARDED = {"shard": True}
REFUSED = {
    "dp2": [(twice, {}, AGAIN), (twice, SHARDED, AGAIN), (thawed, {}, FROZEN), (thawed, SHARDED, FROZEN),
            (scaled, SHARDED, NO_DIM), (sparse, SHARDED, SPARSE)],
    "tp2": [(twice, {"tensor_plan": PLAN}, AGAIN), (sparse, {}, SPARSE)],
    "pp2": [(twice, {}, AGAIN)],
    "dp2 x pp2": [(scaled, {}, NO_DIM)],
}  # fmt: skip


def each_refused(local_rank, cases):
    said = []
    for function, options, _ in cases:
        try:
            function(0, options)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("mesh", [pytest.param(name, marks=[pytest.mark.slow] * ("x" in name)) for name in REFUSED])
def test_models_that_are_refused(mesh):
    axes = {"dp": 2, "pp": 2} if "x" in mesh else MESHES[mesh][0]
    for said in on(each_refused, REFUSED[mesh], **axes):
        for words, (_, _, expected) in zip(said, REFUSED[mesh], strict=True):
            assert re.search(expected, words)
    assert each_refused(0, REFUSED[mesh]) == ["nothing"] * len(REFUSED[mesh])


class Factors(nn.Module):
    """Scores of pairs, with a bias: the gradient of a bias is that of the score, in the same memory."""

    def __init__(self):
        super().__init__()
        self.users, self.biases = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 1, sparse=True)

    def forward(self, x):
        return (self.users(x) * self.users(x + 1)).sum(1) + self.biases(x).squeeze(1)


def sparse_rows(local_rank):
    found = []
    for model, y, kind in ((nn.Embedding(9, 4, sparse=True), Y, "SparseAdam"), (Factors(), Y[:, 0], "SGD")):
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p)
        model = ddl.auto_model(model.double())
        optimizer = ddl.auto_optim(getattr(torch.optim, kind)(model.parameters(), lr=0.1))
        trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
        trainer.run(ddl.auto_dataloader(TensorDataset(torch.arange(14) % 8, y), batch_size=8))
        found.append(weights_of(model))
    return torch.cat(found)


def test_sparse_embeddings_are_right_over_dp():
    for found in on(sparse_rows, dp=2):
        assert (found - sparse_rows(0)).abs().max() <= 1e-12


def weights_by_name(local_rank, chosen="2"):
    torch.manual_seed(0)
    model = ddl.auto_model(mlp())
    own = [p for name, p in model.named_parameters() if name.startswith(chosen)]
    optimizer = ddl.auto_optim(torch.optim.AdamW(own, lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss, max_norm=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: schedule.step())
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: ddl.clip_grad_norm_(model, 0.1, parameters=own))
    data = torch.utils.data.TensorDataset(X, Y)
    trainer.run(ddl.auto_dataloader(data, batch_size=5))
    return torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()])


def test_an_optimizer_of_no_weight_of_this_stage():
    for found in on(weights_by_name, pp=2):
        assert (found - weights_by_name(0)).abs().max() <= 1e-12
    with pytest.raises(ValueError, match="holds none on any stage"):
        on(partial(weights_by_name, chosen="module.2"), pp=2)


# ------------------------------------------------------------------------------- options that differ by rank


def with_a_schedule(local_rank, everywhere, shard):
    model = ddl.auto_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), shard=shard)
    by_layer = [{"params": p, "lr": 0.01 * (1 + int(name[0]))} for name, p in model.named_parameters()]
    optimizer = ddl.auto_optim(torch.optim.SGD(by_layer if everywhere else model.parameters(), lr=0.01))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
    if everywhere or local_rank == 0:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: scheduler.step())
    trainer.run(ddl.auto_dataloader(TensorDataset(torch.ones(4, 4), torch.ones(4, 4)), batch_size=4), max_epochs=3)


@pytest.mark.parametrize(("axes", "shard"), [({"dp": 2}, True), ({"pp": 2}, None)], ids=str)
def test_a_schedule_of_one_rank_is_refused(axes, shard):
    on(partial(with_a_schedule, everywhere=True, shard=shard), **axes)  # a stage may have rates of its own
    with pytest.raises(ValueError, match="the same options on all ranks, but 'lr' of parameter group 0 is"):
        on(partial(with_a_schedule, everywhere=False, shard=shard), **axes)


def slower_at_first(local_rank):
    model = ddl.auto_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    by_weight = [{"params": p} for p in model.parameters()]
    trainer = ddl.create_supervised_trainer(model, optimizer := torch.optim.SGD(by_weight, lr=0.01), F.mse_loss)
    ddl.auto_optim(optimizer)
    for (name, _), group in zip(model.named_parameters(), optimizer.param_groups, strict=True):
        group["lr"] *= 0.1 if name.startswith("0") else 1
    trainer.run(ddl.auto_dataloader(TensorDataset(torch.ones(4, 4), torch.ones(4, 4)), batch_size=4))


def test_groups_of_each_weight_have_rates_of_their_own_on_each_stage():
    on(slower_at_first, pp=2)
