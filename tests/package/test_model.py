"""auto_model keeps one process's weights, on every mesh, and what it refuses."""

import copy
import inspect
import logging
import re
import warnings
from collections import OrderedDict
from functools import partial

import ignite.distributed as idist
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Events
from parity import each_alone
from ranks import on, on_each_rank, trainer_of
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.collectives import octets
from ignite_ddl.lab.bytes import count_bytes

# ------------------------------------------------------------------------------------------- models and weights


class Listed(nn.Module):
    """Layers in a ModuleList and a ModuleDict, which are never called themselves, and one weight twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 6)})
        self.heads["a"].weight = self.blocks[0].weight
        self.more = nn.ModuleList([nn.Linear(8, 8)])  # no weight of it is elsewhere
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x):
        x = self.first(x)
        for block in [*self.blocks, *self.more]:
            x = torch.tanh(block(x))
        return self.heads["b"](torch.tanh(self.heads["a"](x))) * self.scale


def layers():
    return nn.Sequential(
        OrderedDict(
            up=nn.Linear(6, 8), norm=nn.BatchNorm1d(8), relu=nn.ReLU(), down=nn.Linear(8, 8), end=nn.Linear(8, 4)
        )
    )


PLAN = {"up": ddl.Column(output_layouts=Replicate()), "down": ddl.Row(input_layouts=Replicate())}
MODELS = {"layers": layers, "listed": Listed}


def build(kind, seed):
    torch.manual_seed(seed)
    model = MODELS[kind]()
    for buffer in model.buffers():
        buffer.add_(torch.rand(()).to(buffer.dtype))
    return model


def same(one, other):
    assert list(one) == list(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(
    ("kind", "shard", "mesh"),
    [
        ("layers", False, {"dp": 2}),
        ("layers", True, {"dp": 2}),
        ("listed", True, {"dp": 2}),
        ("layers", False, {"pp": 2}),
        ("layers", True, {"dp": 2, "tp": 2}),
        pytest.param("layers", True, {"dp": 2, "pp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_each_rank()
def test_weights_are_those_of_rank_0_and_travel_both_ways(local_rank, kind, shard):
    mesh = ddl.get_mesh()
    model = ddl.auto_model(build(kind, mesh.rank), PLAN if kind == "layers" else None, shard=shard)
    same(ddl.full_state_dict(model), build(kind, 0).state_dict())  # though each rank built it from another seed
    loaded = {name: tensor + 1 for name, tensor in build(kind, 99).state_dict().items()}
    ddl.load_full_state_dict(model, loaded)
    for wrong, said in (
        (dict(list(loaded.items())[1:]), r"state should have the model's names, but lacks \["),
        (loaded | {"more": torch.ones(())}, r"has \['more'\] besides"),
        (loaded | {list(loaded)[-1]: torch.ones(99, 99)}, r"should have shape .*but has \(99, 99\)"),  # of any stage
    ):
        with pytest.raises(ValueError, match=said):
            ddl.load_full_state_dict(model, wrong)
    after = ddl.full_state_dict(model)  # which the refused ones have not changed
    if kind == "listed":
        loaded["heads.a.weight"] = loaded["blocks.0.weight"]
    same(after, loaded)
    assert all(type(t) is torch.Tensor and t.device.type == "cpu" for t in after.values())
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    whole = sum(p.numel() for p in build(kind, 0).parameters())
    if mesh.world_size == 2:
        in_all = whole if shard or mesh.pp_size == 2 else 2 * whole
        assert idist.all_reduce(held) == in_all
        assert mesh.pp_size == 2 or held == in_all // 2


class Typed(nn.Linear):
    """With buffers that gloo does not send by themselves, or in which nothing is."""

    def __init__(self, number):
        super().__init__(4, 4)
        for dtype in (torch.int16, torch.complex64, torch.float8_e4m3fn, torch.bool):
            self.register_buffer(str(dtype)[6:], torch.arange(number, number + 3).to(torch.float32).to(dtype))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def get_extra_state(self):
        return float(self.weight.sum())

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("on_rank", [None, 3])
@on_each_rank(pp=2, dp=2)
def test_tensors_of_any_type_travel_between_dp_and_pp_ranks(local_rank, on_rank):
    mesh = ddl.get_mesh()
    torch.manual_seed(0)
    one_process = nn.Sequential(*map(Typed, range(4))).state_dict()
    torch.manual_seed(mesh.rank)
    model = ddl.auto_model(nn.Sequential(*(Typed(i + mesh.rank) for i in range(4))))
    found = ddl.full_state_dict(model, on_rank)
    if on_rank in (None, mesh.rank):
        assert list(found) == list(one_process)
        extra = [name for name in found if name.endswith("_extra_state")]
        assert [found.pop(name) for name in extra] == [one_process.pop(name) for name in extra]
        bits = ({name: (t.dtype, t.shape, octets(t).tolist()) for name, t in of.items()} for of in (found, one_process))
        assert next(bits) == next(bits)
    else:
        assert found == {}


class Scaled(Typed):
    """With a layer whose only weight is a frozen one of a type that gloo does not send."""

    def __init__(self, number):
        super().__init__(number)
        self.scale = nn.PReLU()
        self.scale.weight = nn.Parameter(torch.tensor([1.5 + number]).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale.forward = lambda x: x * self.scale.weight.to(x.dtype)

    def forward(self, x):
        return self.scale(super().forward(x))


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=str)
@on_each_rank(dp=2)
def test_tensors_of_any_type_are_those_of_rank_0_over_dp(local_rank, options):
    model = ddl.auto_model(Scaled(local_rank), **options)
    held = dict(model.named_buffers()) | dict(model.named_parameters())
    for number in range(3):  # what a forward pass has left on rank 0 is there before the next
        for name, of_rank_0 in Typed(number).named_buffers():
            assert octets(held[name]).tolist() == octets(of_rank_0).tolist()
        for name, changed in Typed(number + 1 + local_rank).named_buffers():
            held[name].copy_(changed)
        model(torch.ones(1, 4)).sum().backward()
    assert held["scale.weight"].to(torch.float32).tolist() == [1.5]


@on_each_rank(dp=2)
def test_models_that_once_failed(local_rank):
    """Weights that are not contiguous, a child named module, a model on its own, a list, an expanded buffer."""
    torch.manual_seed(0)
    weight = nn.Conv2d(2, 3, 3).weight.detach()
    torch.manual_seed(local_rank)
    model = nn.Sequential(nn.Conv2d(2, 3, 3)).to(memory_format=torch.channels_last)
    assert torch.equal(ddl.full_state_dict(ddl.auto_model(model, shard=True))["0.weight"], weight)
    model = ddl.auto_model(nn.Sequential(OrderedDict(module=nn.Linear(2, 2))))
    assert list(ddl.full_state_dict(model)) == ["module.weight", "module.bias"]
    assert ddl.auto_model(nn.Linear(2, 2), shard=True)(torch.ones(1, 2)).shape == (1, 2)
    model = ddl.auto_model(Listed(), shard=True)
    model(torch.ones(2, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model = nn.Linear(2, 2)
    model.register_buffer("shared", torch.tensor([0.5 + local_rank]).expand(4))
    assert ddl.full_state_dict(ddl.auto_model(model))["shared"].tolist() == [0.5] * 4


def test_serial_calls_return_their_argument():
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert ddl.auto_model(model, PLAN, schedule="zbv", n_microbatches=3, shard=True) is model
    assert ddl.auto_optim(optimizer) is optimizer
    state = ddl.full_state_dict(model)
    same(state, model.state_dict())
    assert all(state[n].data_ptr() != t.data_ptr() for n, t in model.state_dict().items())
    ddl.load_full_state_dict(model, {n: t * 0 for n, t in state.items()})
    assert not any(t.any() for t in model.state_dict().values())


def test_a_plan_is_checked_on_every_mesh_also_on_one_process():
    with pytest.raises(ValueError, match="tensor_plan has the key 'upp', which matches no module"):
        ddl.auto_model(layers(), {"upp": ddl.Column()})


# ------------------------------------------------------------------------------------------------- refused models

REFUSED = [
    ({"tensor_plan": {"upp": ddl.Column()}}, "tensor_plan has the key 'upp'.*up, norm, down, end"),
    ({"tensor_plan": {"end": ddl.Row(), "up": ddl.Column(units=3)}}, "tp=2 should divide the 3 units of 'up'"),
    ({"n_microbatches": 3, "schedule": "dualpipev"}, "n_microbatches=3 does not suit schedule='dualpipev'"),
    ({"split": [2, 2]}, "split should name the layers of each of 2 stages, at least one each, 5 in all"),
    ({"find_unused_parameters": True}, "find_unused_parameters are for DDP, but the mesh is"),
    ({"model": "listed"}, "model should be an nn.Sequential under pp, but given Listed"),
    ({"schedule": "zbv", "split": [2, 1, 1, 1]}, "cannot run stage 1 \\(relu\\): it has no trainable parameter"),
]


@on_each_rank(pp=2, tp=2)
def test_models_that_do_not_fit_are_refused_on_each_rank_alone(local_rank):
    for options, expected in REFUSED:
        model = MODELS[options.pop("model", "layers")]()
        message = each_alone(ddl.auto_model, model, **options)
        assert re.search(expected, message), f"{options}: {message or 'not refused'}"


@on_each_rank(tp=2)
def test_a_tp_axis_without_a_plan_warns_once_and_not_where_it_is_meant(local_rank):
    caught = []
    for plan in (None, {}):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ddl.auto_model(layers(), plan)
        caught.append([one.filename for one in said if "tensor_plan is None" in str(one.message)])
    assert caught == [[__file__] if idist.get_rank() == 0 else [], []]


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


def rows_for_norms():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 3, generator=generator, dtype=torch.double) + torch.arange(24.0)[:, None]
    return TensorDataset(x, torch.randn(24, 1, generator=generator, dtype=torch.double))


@pytest.mark.parametrize(
    ("mesh", "plan", "shard"),
    [
        ({"dp": 2}, None, False),
        ({"dp": 2, "tp": 2}, {"0": ddl.Column(output_layouts=Replicate())}, True),
        ({"dp": 2, "pp": 2}, None, False),
    ],
    ids=["dp2", "dp2 tp2 shard", "dp2 pp2"],
)
@on_each_rank()
def test_batchnorm_keeps_the_statistics_of_dp_rank_0(local_rank, plan, shard):
    one = normed()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for start in range(0, 24, 8):
        x, y = (tensor[start : start + 8] for tensor in rows_for_norms().tensors)
        optimizer.zero_grad()
        before = copy.deepcopy(one.state_dict())
        for here in (slice(4, 8), slice(0, 4)):  # dp rank 0's rows last: its statistics stay
            one.load_state_dict(before)
            (nn.functional.mse_loss(one(x[here]), y[here]) / 2).backward()
        optimizer.step()
    model = ddl.auto_model(normed(), plan, shard=shard, n_microbatches=1, schedule="gpipe")
    trainer_of(model).run(ddl.auto_dataloader(rows_for_norms(), batch_size=8))
    state = ddl.full_state_dict(model)
    for name, tensor in one.state_dict().items():
        assert torch.allclose(state[name], tensor, rtol=0, atol=1e-12), name
    evaluator = ddl.create_supervised_evaluator(model, output_transform=lambda x, y, y_pred: y_pred)
    seen = []
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.output))
    evaluator.run([rows_for_norms().tensors])
    assert torch.allclose(seen[0], one.eval()(rows_for_norms().tensors[0]), rtol=0, atol=1e-12)


@on_each_rank(dp=2, tp=2)
def test_an_optimizer_made_after_a_forward_pass_trains(local_rank):
    """Where weights are sharded, which the pass gathers; other models are in test_engine_handlers.py."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model = ddl.auto_model(model, {"0": ddl.Column(), "2": ddl.Row()}, shard=True)
    before = ddl.full_state_dict(model)
    with torch.no_grad():
        model(torch.ones(4, 4))
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 4))
    trainer_of(model).run(ddl.auto_dataloader(data, batch_size=8))  # of what the pass has left
    after = ddl.full_state_dict(model)
    assert not any(torch.equal(before[name], after[name]) for name in before)


# ------------------------------------------------------------------------------------------- what FSDP2 gathers


SIZE, LAYERS = 64, 16


class Residual(nn.Module):
    """A block as transformers have them: with a Sequential of its own, and gathered as one."""

    def __init__(self, width=SIZE):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width // 2), nn.Tanh(), nn.Linear(width // 2, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Around(nn.Module):
    """Something with layers, and a head beside it."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        for part in self.children():
            for layer in part if isinstance(part, nn.ModuleList) else [part]:
                x = layer(x)
        return x


class Read(nn.Module):
    """Weights in lists, and layers in a module without a forward: none of these is ever called."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(SIZE, SIZE) / SIZE) for _ in range(2))
        self.vectors = nn.ParameterDict({"a": nn.Parameter(torch.randn(SIZE))})
        self.held = nn.Module()
        self.held.layer = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x):
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix) + self.vectors["a"]
        return self.held.layer(x)


class ReadOff(nn.Module):
    """It reads a weight off a layer that it does not call."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.first(x), self.last.weight)


def linears(n=LAYERS):
    return [layer for _ in range(n) for layer in (nn.Linear(SIZE, SIZE, bias=False), nn.Tanh())]


def tied():
    """The head is the first layer's matrix, two floors below; the model's own parameter is tied to a third's."""
    model = Around(transformer=Around(layers=nn.Sequential(*linears(4))), head=nn.Linear(SIZE, SIZE, bias=False))
    model.head.weight = model.transformer.layers[0].weight
    model.register_parameter("scale", model.transformer.layers[2].weight)
    return model


SHAPES = {  # the model, and the largest number of weights that one gather has to bring
    "a list": (lambda: Around(layers=nn.ModuleList(linears())), SIZE**2),
    "a Sequential below the model": (lambda: Around(body=nn.Sequential(*linears())), SIZE**2),
    "a list two floors below": (
        lambda: Around(transformer=Around(layers=nn.ModuleList(linears())), head=nn.Linear(SIZE, SIZE, bias=False)),
        SIZE**2,
    ),
    "a Sequential of Sequentials": (
        lambda: nn.Sequential(nn.Sequential(*linears(8)), nn.Sequential(*linears(8))), SIZE**2
    ),
    "blocks": (
        lambda: Around(body=nn.Sequential(*[Residual() for _ in range(4)])), SIZE**2 + SIZE * 3 + SIZE // 2
    ),
    "tied": (tied, 2 * SIZE**2),
    "weights in lists": (Read, 2 * SIZE**2 + SIZE),
    "torch's encoder": (
        lambda: Around(
            encoder=nn.TransformerEncoder(
                nn.TransformerEncoderLayer(SIZE, 4, SIZE, 0.0, batch_first=True), 3, enable_nested_tensor=False
            ),
            head=nn.Linear(SIZE, SIZE),
        ),
        6 * SIZE**2 + 10 * SIZE,
    ),
}  # fmt: skip


@on_each_rank(dp=2)
def test_sharded_layers_are_gathered_one_at_a_time_wherever_they_are(local_rank):
    logging.disable(logging.INFO)
    for name, (make, largest) in SHAPES.items():
        torch.manual_seed(0)
        one = make().double()
        model = ddl.auto_model(copy.deepcopy(one), shard=True)
        x = torch.randn(8, 1, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (one, model)]
        for _ in range(2):
            one(x).square().mean().backward()
            with count_bytes() as traffic:
                loss = model(x.chunk(idist.get_world_size())[idist.get_rank()]).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        whole = ddl.full_state_dict(model)
        error = max(float((whole[n] - w).abs().max()) for n, w in one.state_dict().items())
        model.eval()(x)  # torch's fast path looks at weights on its way
        assert max(call.got // 8 for call in traffic.calls) == largest, (name, traffic.calls)
        assert error <= 1e-12, (name, error)
        assert len(list(model.parameters())) == len(list(one.parameters())), name
        assert name != "blocks" or len(traffic.calls) == 4  # a block is one, with the Sequential in it


@on_each_rank(dp=2)
def test_a_weight_that_is_read_off_a_sharded_layer_is_refused(local_rank):
    logging.disable(logging.CRITICAL)
    model = ddl.auto_model(ReadOff(), shard=True)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
    with pytest.raises(ValueError, match="a weight that is cut over ranks, or .*: call the layer that holds"):
        trainer.run([(torch.ones(4, 4), torch.ones(4, 4))])


class InComplex(nn.Linear):
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype)).abs()


def of_two_dtypes():
    torch.manual_seed(0)
    middle = InComplex(4, 4, dtype=torch.complex128)
    block = Around(first=nn.Linear(4, 4).double(), last=InComplex(4, 4, dtype=torch.complex128))
    return nn.Sequential(nn.Linear(4, 4).double(), middle, block, nn.Linear(4, 2).double())


def trained_in_two_dtypes(local_rank, **options):
    model = ddl.auto_model(of_two_dtypes(), **options)
    trainer = trainer_of(model, F.mse_loss)
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer.run(ddl.auto_dataloader(TensorDataset(rows, rows[:, :2]), batch_size=5), max_epochs=2)
    return ddl.full_state_dict(model)


@pytest.mark.parametrize(
    ("axes", "options"),
    [({"dp": 2}, {"shard": True}), ({"dp": 2, "tp": 2}, {"tensor_plan": {}}),
     pytest.param({"dp": 2, "tp": 2}, {"tensor_plan": {}, "shard": True}, marks=pytest.mark.slow)],
    ids=str,
)  # fmt: skip
def test_weights_of_two_dtypes(axes, options):
    expected = trained_in_two_dtypes(0)
    for found in on(partial(trained_in_two_dtypes, **options), **axes):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, atol=1e-12, rtol=0)


def side_by_side(local_rank):
    model = nn.Linear(4, 4).double()
    model.bias = nn.Parameter(model.bias.detach().float())
    with pytest.raises(ValueError, match="a Linear has weights of torch.float32 and torch.float64 side by side"):
        ddl.auto_model(model, shard=True)


def test_two_dtypes_in_one_module_are_refused():
    on(side_by_side, dp=2)


FLAGS_OF_DDP = {
    *("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "batched_grad_copy"),
    *("skip_all_reduce_unused_params", "lazy_bucket_allocation"),
} & inspect.signature(nn.parallel.DistributedDataParallel).parameters.keys()


def trained_with_each_flag(local_rank, flags, window):
    found = {}
    for flag in sorted(flags):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2)).double()
        model = ddl.auto_model(net, bucket_cap_mb=1e-3, **{flag: True})
        trainer = trainer_of(model, F.mse_loss, gradient_accumulation_steps=window)
        rows = torch.randn(18, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        trainer.run(ddl.auto_dataloader(TensorDataset(rows, rows[:, :2]), batch_size=5), max_epochs=2)
        found[flag] = torch.cat([weight.flatten() for weight in ddl.full_state_dict(model).values()])
    return found


def test_each_flag_of_ddp_gives_the_numbers_of_one_process():
    for flags, window in ((FLAGS_OF_DDP, 1), (FLAGS_OF_DDP - {"static_graph"}, 2)):
        expected = trained_with_each_flag(0, flags, window)
        for found in on(trained_with_each_flag, flags, window, dp=2):
            for flag in flags:
                torch.testing.assert_close(found[flag], expected[flag], atol=1e-12, rtol=0, msg=flag)
    with pytest.raises(ValueError, match="static_graph=True needs a first step of one batch"):
        on(trained_with_each_flag, {"static_graph"}, 2, dp=2)


def test_the_state_of_an_optimizer_is_saved_with_its_model():
    with pytest.raises(ValueError, match=r"model should be an nn.Module \(with its optimizer: ddl.Checkpoint\)"):
        ddl.full_state_dict(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


class OfVersion2(nn.Module):
    """Its weight had another name in version 0, and was transposed in version 1."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.BatchNorm1d(4), nn.Parameter(torch.arange(16.0).view(4, 4))

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if f"{prefix}w" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}w").neg()
        elif metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *args)


@on_each_rank(dp=2)
def test_modules_that_change_what_they_load(local_rank):
    model = ddl.auto_model(nn.Sequential(OfVersion2()), shard=True)
    state = ddl.full_state_dict(model)
    ddl.load_full_state_dict(model, state)
    assert torch.equal(ddl.full_state_dict(model)["0.weight"], state["0.weight"])
    with pytest.raises(ValueError, match="but '0.weight' is this rank's part of one: save by ddl.full_state_dict"):
        ddl.load_full_state_dict(model, model.state_dict())
    plain = dict(state)  # without versions
    with pytest.raises(ValueError, match="'0' is a OfVersion2 whose own code changes what it loads"):
        ddl.load_full_state_dict(model, plain)
    plain["0.w"] = plain.pop("0.weight")
    del plain["0.norm.num_batches_tracked"]
    ddl.load_full_state_dict(model, plain)
    assert torch.equal(ddl.full_state_dict(model)["0.weight"], -state["0.weight"])
