"""Experts: who gets which token, what is counted once, what a checkpoint and the checks know of ep, what is refused.

That training equals one process is in the parity table (tests/parity.py, ``expert_cases``), beside a reference by hand.
"""

import copy
import functools
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Events
from ignite.metrics import Loss
from ranks import in_float64, run, trainer_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.experts import style
from ignite_ddl.experts.dispatch import Dispatch, sorted_by_expert
from ignite_ddl.experts.layer import FeedForwardExperts
from ignite_ddl.experts.routing import update_biases
from ignite_ddl.lab.bytes import count_bytes

PLAN = {"*.experts": ddl.Experts()}
CUT = {"*.experts": ddl.Experts(tp={"gate": 1, "up": 1, "down": 2})}
generator = torch.Generator().manual_seed(3)
X = torch.randn(16, 5, 6, generator=generator, dtype=torch.float64)
Y = torch.randn(16, 5, 6, generator=generator, dtype=torch.float64)


def net(recompute=None, **options):
    torch.manual_seed(0)
    options = {"n_experts": 4, "top_k": 2, "balance_weight": 0.1} | options
    layer = ddl.MixtureOfExperts(6, 8, **options)
    if recompute is not None:
        forward = layer.forward
        layer.forward = lambda x: checkpoint(forward, x, use_reentrant=recompute)
    return nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 6)).double()


def step_of(model, x=X, y=Y, rows=8, **options):
    """Two steps; the trainer."""
    trainer = trainer_of(model, F.mse_loss, **options)
    trainer.run(ddl.auto_dataloader(TensorDataset(x, y), batch_size=rows), max_epochs=1)
    return trainer


# --- tokens to experts and back


def exchanged(local_rank):
    """Each rank has other numbers of tokens for each expert; rank 1 has none at all; expert 3 gets none."""
    index = torch.tensor([[[2, 0], [0, 4], [1, 0]], [], [[1, 2]], [[4, 4]]][local_rank], dtype=torch.int64).view(-1, 2)
    x = (torch.arange(len(index), dtype=torch.float64) + 10 * local_rank).unsqueeze(1).requires_grad_()
    dispatch = Dispatch(index, 4, ddl.get_mesh())
    got = dispatch.to_experts(x)
    back = dispatch.to_tokens(got * 2)
    assert back.flatten().tolist() == (2 * x[dispatch.order // 2]).flatten().tolist()
    back.sum().backward()
    return got.flatten().tolist(), dispatch.local.tolist(), x.grad.flatten().tolist()


def test_tokens_arrive_by_rank_and_expert_and_come_back_in_order():
    for_two, local, grads = zip(*run(exchanged, 4, dp=4, ep=2), strict=True)
    assert for_two[:2] == ([0, 1, 2, 2], [0])  # experts 0 and 1 on rank 0, 2 and 3 on rank 1
    assert local[:2] == ([0, 0, 0, 1], [0])
    assert for_two[2:] == ([20], [20])
    assert grads[0] == [4.0, 2.0, 4.0]  # a choice that was dropped sends no gradient
    assert grads[3] == [0.0]


def test_equal_probabilities_choose_the_first_experts():
    router = ddl.Router(4, n_experts=6, top_k=3)
    nn.init.zeros_(router.weight)
    index, weights = router(torch.randn(5, 4))
    assert index.tolist() == [[0, 1, 2]] * 5
    assert torch.equal(weights, torch.full((5, 3), 1 / 3))


def bytes_of_a_layer(local_rank):
    layer = net()[1]
    router = copy.deepcopy(layer.router)
    parallel = ddl.auto_model(nn.Sequential(layer), {"0.experts": ddl.Experts()})
    x = X[4 * local_rank :][:4]
    with count_bytes() as traffic:
        parallel(x)
    sent = [(call.put_in, call.got) for call in traffic.of("all_to_all").calls]
    order, counts = sorted_by_expert(router(x.flatten(0, 1))[0], 4)
    return sent, counts.tolist(), traffic.of("all_reduce").put_in


def test_bytes_are_those_of_the_tokens_that_visit_an_expert():
    results = run(bytes_of_a_layer, 2, dp=2, ep=2)
    width = 6 * 8
    for rank, (sent, counts, _) in enumerate(results):
        here = sum(sum(of_rank[1][2 * rank : 2 * rank + 2]) for of_rank in results)
        assert sent == [(32, 32), (sum(counts) * width, here * width), (here * width, sum(counts) * width)]
    assert [reduced for *_, reduced in results] == [32, 32]  # E counts, once


# --- counted once


def counted(local_rank, options, recompute=None, n_steps=2, **trained):
    model = net(recompute=recompute, bias_rate=0.01)
    router = model[1].router
    cut = ddl.auto_model(model, PLAN, **options)
    load = []
    trainer = trainer_of(cut, F.mse_loss, **trained)
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=1)
    load.append(router.load.tolist())
    assert int(router.counts.sum()) == 0
    cut.eval()
    with torch.no_grad():
        cut(X)
    cut.train()
    with torch.no_grad():
        cut(X)
    assert int(router.counts.sum()) == 0
    return load, router.raised.tolist()


@pytest.mark.parametrize(
    ("how", "tokens"), [({}, 8), ({"gradient_accumulation_steps": 2}, 16)], ids=["a step", "two batches a step"]
)
def test_loads_are_those_of_all_tokens_once(how, tokens):
    load, raised = counted(0, {}, **how)
    assert sum(load[0]) == tokens * 5 * 2
    assert any(raised)
    for recompute in (None, False, True):
        for found in run(functools.partial(counted, recompute=recompute, **how), 2, {}, dp=2, ep=2):
            assert found == (load, raised)


def losses_in_a_loop(local_rank):
    """Without the trainer: a loop that calls update_biases itself."""
    model = ddl.auto_model(net(bias_rate=0.01), PLAN)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    part = slice(8 * local_rank, 8 * local_rank + 8) if dist.is_initialized() else slice(None)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(X[part]), Y[part]).backward()
        optimizer.step()
        update_biases(model)
    return {name: value.clone() for name, value in ddl.full_state_dict(model).items()}


def test_a_loop_of_ones_own_has_the_same_gradients():
    expected = losses_in_a_loop(0)
    for found in run(losses_in_a_loop, 2, dp=2, ep=2):
        assert found.keys() == expected.keys()
        assert all((found[name] - expected[name]).abs().max() <= 1e-12 for name in expected)


class Classes(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


@pytest.mark.parametrize("n", [1, 2])
def test_stages_without_routers_weight_padded_targets_alike(n):
    """What a window divides by is estimated from the first batch: by every stage from the same numbers."""
    targets = torch.randint(0, 3, (10, 5), generator=torch.Generator().manual_seed(1))
    targets[:4, 1:], targets[7] = 0, 0
    model = nn.Sequential(*net(z_weight=0.1), nn.Linear(6, 3), Classes())
    report = ddl.check_parity(
        model, None, (X[:10], targets), nn.CrossEntropyLoss(ignore_index=0), pp=2, split=[2, 3], n_microbatches=2,
        steps=4, trainer={"gradient_accumulation_steps": n},
    )  # fmt: skip
    assert report.equal, str(report)


# --- uses that are not the usual one


def unusual(local_rank, change):
    """Losses of two steps and the whole weights, of experts or tokens out of the ordinary."""
    model = net(**({"top_k": 1, "normalize": False} if change == "one expert for all" else {}))
    if change == "one expert for all":  # the other rank gets no token
        nn.init.zeros_(model[1].router.weight)
    if change == "frozen experts":
        model[1].experts.requires_grad_(False)
    if change == "frozen below":
        model[0].requires_grad_(False)
    model = ddl.auto_model(model, PLAN)
    losses = []
    trainer = trainer_of(model, F.mse_loss)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=2)
    return losses, {name: value.clone() for name, value in ddl.full_state_dict(model).items()}


@pytest.mark.parametrize("change", ["one expert for all", "frozen experts", "frozen below"])
def test_ranks_without_tokens_and_frozen_parts_train_as_in_one_process(change):
    losses, weights = unusual(0, change)
    for mesh in ({"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}):
        for found, of_rank in run(unusual, mesh["dp"], change, **mesh):
            assert found == pytest.approx(losses, abs=1e-12)
            assert all((of_rank[name] - weights[name]).abs().max() <= 1e-12 for name in weights)


class Wider(nn.Module):
    """Experts of a script's own, which are called by keywords, and whose outputs are wider than their tokens."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 9, 6))

    def forward(self, tokens, choice, gates, sign=1.0):
        outputs = tokens.new_zeros(len(tokens), 9)
        for i, k in ((i, k) for i in range(len(self.w)) for k in range(choice.shape[1])):
            at = (choice[:, k] == i).nonzero()[:, 0]
            outputs = outputs.index_add(0, at, sign * (tokens[at] @ self.w[i].t()) * gates[at, k, None])
        return outputs


class OfWider(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts, self.head = ddl.Router(6, 4, 2), Wider(), nn.Linear(9, 6)
        nn.init.zeros_(self.router.weight).requires_grad_(False)  # all choose experts 0 and 1

    def forward(self, x):
        index, weights = self.router(x.flatten(0, 1))
        made = self.experts(x.flatten(0, 1), choice=index, gates=weights, sign=-1.0)
        return self.head(made).view_as(x)


@in_float64
def losses_of_wider(local_rank):
    model, losses = ddl.auto_model(OfWider(), {"experts": ddl.Experts()}), []
    trainer = trainer_of(model, F.mse_loss)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=1)
    return losses


def test_experts_with_keywords_and_another_width_where_one_rank_gets_no_token():
    assert run(losses_of_wider, 2, dp=2, ep=2) == [pytest.approx(losses_of_wider(0), abs=1e-12)] * 2


class Scaled(nn.Module):
    """Experts with a scale for each: an argument, an attribute or a weight. They count themselves."""

    def __init__(self, scale=None):
        super().__init__()
        self.w, self.n_experts, self.scale = nn.Parameter(torch.randn(4, 6, 6)), 4, scale

    def forward(self, x, /, index, *, weights, scale=None, **of_tokens):
        outputs, scale = torch.zeros_like(x), self.scale if scale is None else scale
        for i, k in ((i, k) for i in range(self.n_experts) for k in range(index.shape[1])):
            at = (index[:, k] == i).nonzero()[:, 0]
            outputs = outputs.index_add(0, at, scale[i] * (x[at] @ self.w[i]) * weights[at, k, None])
        return outputs * of_tokens.get("gate", 1.0)


SCALE = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)


class OfScaled(OfWider):
    def __init__(self, what):
        super().__init__()
        self.what, self.router, self.head = what, ddl.Router(6, 4, 2), nn.Linear(6, 6)
        self.experts = Scaled({"attribute": SCALE, "weight": nn.Parameter(SCALE)}.get(what))

    def forward(self, x):
        index, weights = self.router(x.flatten(0, 1))
        given = {"scale": SCALE, "gate": x.flatten(0, 1)[:, :1]} if self.what == "argument" else {}
        return self.head(self.experts(x.flatten(0, 1), index, weights=weights, **given)).view_as(x)


@in_float64
def losses_of_scaled(local_rank, what):
    losses = []
    trainer = trainer_of(ddl.auto_model(OfScaled(what), {"experts": ddl.Experts()}), F.mse_loss)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=1)
    return losses


def test_what_each_expert_has_is_a_weight():
    assert run(losses_of_scaled, 2, "weight", dp=2, ep=2) == [pytest.approx(losses_of_scaled(0, "weight"))] * 2
    words = r"no tensors besides tokens, .* but get \(4,\), \(20, 1\): make what .*, multiply x"
    with pytest.raises(ddl.RankError, match=words):
        run(losses_of_scaled, 2, "argument", dp=2, ep=2)


class Regularised(nn.Module):
    """Gathers a weight of the experts by hand, for a regulariser and for what it computes of rows."""

    def __init__(self):
        super().__init__()
        self.net = net(balance_weight=0.0)

    def forward(self, x):
        output, gate = self.net(x), self.net[1].experts.gate
        gate = gate.full_tensor() if isinstance(gate, DTensor) else gate
        return output + 0.1 * gate.square().mean() + x[:, :1] * gate.mean()


@in_float64
def weights_of_regularised(local_rank, shard):
    plan = {"net.1.experts": ddl.Experts()} if ddl.get_mesh().world_size > 1 else None
    model = ddl.auto_model(Regularised(), plan, shard=shard)
    trainer = trainer_of(model, F.mse_loss)
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=6), max_epochs=1)  # the last batch has 4 rows
    return ddl.full_state_dict(model)


@pytest.mark.parametrize("mesh", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}], ids=str)
@pytest.mark.parametrize("shard", [False, True])
def test_a_gathered_weight_of_experts_has_the_gradient_of_all_rows(mesh, shard):
    right = weights_of_regularised(0, False)
    for found in run(weights_of_regularised, mesh["dp"], shard, **mesh):
        assert all((found[name] - right[name]).abs().max() <= 1e-12 for name in right)


def evaluated(local_rank):
    model = ddl.auto_model(net().float(), PLAN)
    evaluator = ddl.create_supervised_evaluator(model, {"loss": Loss(F.mse_loss)})
    data = TensorDataset(X[:7].float(), Y[:7].float())
    loss = evaluator.run(ddl.auto_dataloader(data, batch_size=3)).metrics["loss"]  # a last batch of one row
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.zeros(local_rank * 2, 5, 6) if dist.is_initialized() else torch.zeros(2, 5, 6))
        output.float().sum().backward()  # a rank without rows, in bfloat16
    return loss


def test_evaluation_autocast_and_a_rank_without_rows():
    assert run(evaluated, 2, dp=2, ep=2) == pytest.approx([evaluated(0)] * 2, abs=1e-6)


# --- what knows that experts differ between ep ranks


def drifted(local_rank, who, what, steps):
    model = ddl.auto_model(net(), PLAN)
    step_of(model)
    assert ddl.check_in_sync(model) == []
    weight = model[1].experts.gate if what == "experts" else model[1].router.weight
    if local_rank in who:
        with torch.no_grad():
            weight.to_local()[0] += 1.0
    out = [(one.name, one.ranks) for one in ddl.check_in_sync(model)]
    if steps:
        step_of(model)
    return out


def test_a_copy_of_an_expert_that_drifts_is_found_and_other_ranks_experts_are_not_copies():
    mesh = {"dp": 4, "ep": 2}
    assert run(drifted, 4, [2], "experts", False, **mesh) == [[("1.experts.gate", ((0,), (2,)))]] * 4
    assert run(drifted, 4, [1, 3], "experts", True, **mesh) == [[]] * 4
    assert run(drifted, 4, [1, 3], "router", False, **mesh) == [[("1.router.weight", ((0, 2), (1, 3)))]] * 4
    for what, axis in (("experts.gate", "edp"), ("router.weight", "dp")):
        with pytest.raises(ddl.RankError, match=f"'1.{what}' should be the same on all {axis} ranks"):
            run(drifted, 4, [2], what.partition(".")[0], True, **mesh)


def without_sum(local_rank):
    with mock.patch.object(style, "with_summed_gradient", lambda x, tp_mesh: x):
        step_of(ddl.auto_model(net(), CUT))


def test_a_router_whose_gradients_lack_their_sum_over_tp_is_found():
    with pytest.raises(ddl.RankError, match="tp ranks have different gradients of '0.weight'"):
        run(without_sum, 2, tp=2)


# --- checkpoints

MESHES = {
    "one process": ({}, False),
    "ep2": ({"dp": 2, "ep": 2}, False),
    "dp2": ({"dp": 2}, False),
    "dp4 ep2 shard": ({"dp": 4, "ep": 2}, True),
    "dp4 ep4": ({"dp": 4, "ep": 4}, False),
    "ep2 tp2": ({"dp": 2, "ep": 2, "tp": 2}, False),
    "ep2 pp2 shard": ({"dp": 2, "ep": 2, "pp": 2}, True),
}


def saved_or_loaded(local_rank, folder, shard, load):
    model = net(bias_rate=0.01, balance_weight=0.0)  # a loss that a pipeline has for each microbatch
    if load:
        with torch.no_grad():
            for p in [*model.parameters(), model[1].router.raised]:
                p.zero_()
    model = ddl.auto_model(model, CUT, shard=shard)
    optimizer = ddl.auto_optim(torch.optim.Adam(model.parameters(), lr=0.01))
    things = {"model": model, "optimizer": optimizer}
    if load:
        ddl.Checkpoint.load_newest(things, folder)
    else:
        trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
        trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=1)
        ddl.Checkpoint(things, folder)(trainer)
    found = ddl.full_state_dict(model)
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=8), max_epochs=1)
    return found, ddl.full_state_dict(model)


SLOW = [pytest.param(source, marks=pytest.mark.slow) for source in ("ep2", "ep2 pp2 shard")]


@pytest.mark.parametrize("source", ["dp4 ep2 shard", *SLOW])
def test_a_checkpoint_is_loaded_with_another_ep(tmp_path, source):
    def on(name, load):
        axes, shard = MESHES[name]
        ranks = axes.get("dp", 1) * axes.get("pp", 1) * axes.get("tp", 1)
        if ranks == 1:
            return saved_or_loaded(0, tmp_path, shard, load)
        return run(saved_or_loaded, ranks, tmp_path, shard, load, **axes)[0]

    saved, later = on(source, False)
    assert any(saved["1.router.raised"])
    for name in MESHES if source == "ep2" else ("one process", "ep2 tp2"):
        loaded, after = on(name, True)
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)
        off = {key: float((after[key] - later[key]).abs().max()) for key in saved}
        assert max(off.values()) <= 1e-10, (name, off)


def in_a_window(local_rank, folder, load):
    model = ddl.auto_model(net(), PLAN)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss, gradient_accumulation_steps=3)
    loader = ddl.auto_dataloader(TensorDataset(X, Y), batch_size=4)
    things = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader}
    if load:
        ddl.Checkpoint.load_newest(things, folder)
    else:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), ddl.Checkpoint(things, folder))
    trainer.run(loader, max_epochs=3)
    return ddl.full_state_dict(model)


def test_a_checkpoint_inside_a_window_of_accumulation_is_of_its_ep(tmp_path):
    first = run(in_a_window, 4, tmp_path, False, dp=4, ep=2)[0]
    again = run(in_a_window, 4, tmp_path, True, dp=4, ep=2)[0]
    assert all(torch.equal(first[name], again[name]) for name in first)
    with pytest.raises(ddl.RankError, match="between two optimizer steps of gradient accumulation.*ep=2"):
        run(in_a_window, 4, tmp_path, True, dp=4, ep=4)


# --- refused


class Fused(nn.Module):
    """Experts as transformers has them: a contiguous cut of ``gate_up_proj`` leaves a rank gates without values."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 6))
        self.down_proj = nn.Parameter(torch.randn(4, 6, 8))

    def forward(self, x, index, weights):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("words", "make", "plan", "mesh"),
    [
        ("ep should divide dp × cp, 2, .* but given 4", net, PLAN, {"dp": 2, "ep": 4}),
        ("ep=3 should divide the experts of '1.experts', but there are 4", net, PLAN, {"dp": 3, "ep": 3}),
        ("ep=2 should share experts, but tensor_plan names none", net, None, {"dp": 2, "ep": 2}),
        ("'1' is a MixtureOfExperts with", net, {"1": ddl.Experts()}, {"dp": 2, "ep": 2}),
        ("'0' is a Linear with weight", net, {"0": ddl.Experts()}, {"dp": 2, "ep": 2}),
        (r"should cut each weight of '1.experts', gate \(4, ", net, {"*.experts": ddl.Experts(tp={"up": 1})},
         {"tp": 2}),
        ("that tp=3 divides, or none, but given {'gate': 1", net, CUT, {"tp": 3}),
        (
            "'1' between the same features, but given gate_up_proj in 16, down_proj in 8: .* leave tp= out",
            lambda: nn.Sequential(nn.Linear(6, 6), Fused()),
            {"1": ddl.Experts(tp={"gate_up_proj": 1, "down_proj": 2})},
            {"tp": 2},
        ),
        ("each of its 4 experts, but 'scale' holds", functools.partial(OfScaled, "attribute"),
         {"experts": ddl.Experts()}, {"dp": 2, "ep": 2}),
        ("capacity_factor drops .* leave one of them out", lambda: net(capacity_factor=1.0), PLAN, {"cp": 2}),
        ("ep cannot be combined with dp_replicate", net, PLAN, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_ranks_start(words, make, plan, mesh):
    with pytest.raises(ValueError, match=words):
        ddl.check_model(make(), plan, **mesh)


def test_split_backward_passes_and_unlike_numbers_of_microbatches_are_refused():
    four = nn.Sequential(*(layer for _ in range(2) for layer in net()))
    with pytest.raises(ValueError, match="schedule='zbv' runs backward passes in parts"):
        ddl.check_model(four, PLAN, dp=2, ep=2, pp=2, schedule="zbv")
    with pytest.raises(ValueError, match="but have 1 and 2: use a batch_size"):
        ddl.check_model(net(), PLAN, dp=2, ep=2, pp=2, n_microbatches=2, batches=[8, 3])


def refused_on_ranks(local_rank, what):
    if what == "local":
        ddl.auto_model(net(), None, dp_sync="local")
    if what == "unlike":
        step_of(ddl.auto_model(net(), PLAN, n_microbatches=2), rows=3)


@pytest.mark.parametrize(
    ("what", "words", "mesh"),
    [
        ("local", 'dp_sync="local" leaves dp ranks alone', {"dp": 2}),
        ("unlike", "equal numbers of microbatches", {"dp": 2, "ep": 2, "pp": 2}),
    ],
)
def test_what_does_not_fit_is_refused_on_ranks(what, words, mesh):
    with pytest.raises(ddl.RankError, match=words):
        run(refused_on_ranks, mesh["dp"] * mesh.get("pp", 1), what, **mesh)


def test_arguments_of_layers():
    with pytest.raises(ValueError, match="top_k should be at most n_experts, 2, but given 3"):
        ddl.Router(4, n_experts=2, top_k=3)
    with pytest.raises(ValueError, match="bias_rate"):
        ddl.Router(4, 2, 1, bias_rate=-1.0)


@in_float64
def test_a_cast_of_the_model_leaves_bias_and_counts_whole_numbers():
    model = net(bias_rate=0.01).bfloat16()
    assert model[1].router.raised.dtype is torch.int64
    assert FeedForwardExperts(2, 4, 4)(
        torch.zeros(0, 4), torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 1)
    ).shape == (0, 4)


def test_one_choice_with_a_weight_of_one_is_warned_about():
    with pytest.warns(UserWarning, match=r"normalize=True makes each weight 1, .* normalize=False trains it"):
        router = ddl.Router(4, 3, top_k=1)
    _, weights = router(torch.randn(5, 4))
    weights.square().sum().backward()
    assert router.weight.grad.abs().max() < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddl.Router(4, 3, top_k=1, normalize=False)
