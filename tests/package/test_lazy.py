"""Layers that are made one at a time, or without weights."""

import gc
import logging
import math
import time
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from layered import Block
from ranks import on_each_rank, run, trainer_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import ignite_ddl as ddl
from ignite_ddl.lazy import Lazy

# ------------------------------------------------------------------------------------------- made one at a time


def test_lazy_layers_on_a_serial_run_are_made_as_one_process_makes_them():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(Block(4), nn.Linear(4, 2)), nn.Linear(2, 1))
    after = torch.rand(1)
    torch.manual_seed(0)
    inner = nn.Sequential(ddl.lazy(Block, 4), ddl.lazy(nn.Linear, 4, 2))
    late = ddl.auto_model(nn.Sequential(ddl.lazy(nn.Linear, 3, 4), nn.Tanh(), inner, ddl.lazy(nn.Linear, 2, 1)))
    assert torch.equal(torch.rand(1), after)
    assert list(late.state_dict()) == list(eager.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(late.state_dict().values(), eager.state_dict().values()))  # noqa: B905
    assert not any(isinstance(module, Lazy) for module in late.modules())
    late(torch.ones(2, 3)).sum().backward()


def test_one_lazy_layer_at_two_places_is_made_once():
    again = ddl.lazy(nn.Linear, 4, 4)
    model = ddl.auto_model(nn.Sequential(again, nn.Tanh(), again))
    assert model[0] is model[2]


def test_what_is_done_to_a_lazy_layer_is_done_to_what_it_becomes():
    layers = nn.Sequential(ddl.lazy(nn.Linear, 2, 2), ddl.lazy(nn.Linear, 2, 2)).double().eval()
    layers[0].requires_grad_(False)
    first, second = ddl.auto_model(layers)
    assert first.weight.dtype == second.weight.dtype == torch.float64
    assert (first.weight.requires_grad, second.weight.requires_grad) == (False, True)
    assert not first.training


def test_a_lazy_layer_says_what_it_is_and_what_it_cannot():
    layer = ddl.lazy(nn.Linear, 2, 3, bias=False)
    assert repr(layer) == "Lazy(Linear, 2, 3, bias=False)"
    with pytest.raises(RuntimeError, match="has not been made yet: pass the model to ddl.auto_model first"):
        layer(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="no weights yet: apply the function in its factory"):
        nn.Sequential(layer).apply(lambda module: None)
    for given in (nn.Linear(2, 2), 3):
        with pytest.raises(ValueError, match="factory should be a class of layers or a function"):
            ddl.lazy(given)
    with pytest.raises(ValueError, match="factory should return a layer, but .* returned int"):
        ddl.auto_model(nn.Sequential(ddl.lazy(int)))


def reads_a_value():
    """Cannot be made on the meta device: a number of layers that depends on a value."""
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(int(torch.ones(3).sum().item()))])


def test_a_layer_on_meta_has_shapes_and_draws_nothing():
    before = torch.get_rng_state()
    for factory, args, n in ((Block, (4,), 76), (reads_a_value, (), 18)):
        layer = ddl.lazy(factory, *args).double().on_meta()
        assert sum(p.numel() for p in layer.parameters()) == n
        assert all(p.is_meta and p.dtype == torch.float64 for p in layer.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_refusal_leaves_the_lazy_layers_as_they_were():
    model = nn.Sequential(ddl.lazy(nn.Linear, 2, 2), nn.Tanh())
    with pytest.raises(ValueError, match="tensor_plan has the key 'nothing', which matches no module"):
        ddl.auto_model(model, {"nothing": ddl.Column()})
    assert isinstance(model[0], Lazy)
    assert ddl.auto_model(model, {"0": ddl.Column()})(torch.ones(1, 2)).shape == (1, 2)


def model_of(wrap):
    """Lazy or eager layers by name; ``wrap`` is ddl.lazy, or calls at once."""
    layers = OrderedDict(embed=wrap(nn.Linear, 6, 8))
    layers |= {f"block{i}": wrap(Block, 8, scale=1.0 + i) for i in range(6)}
    return nn.Sequential(layers | OrderedDict(act=nn.Tanh(), head=wrap(nn.Linear, 8, 4)))


PLAN = {"block*.up": ddl.Column(), "block*.down": ddl.Row(), "head": ddl.Column(output_layouts=Replicate())}
MESHES = [
    ({"dp": 2}, {"shard": True}),
    ({"tp": 2}, {"tensor_plan": PLAN}),
    ({"pp": 2}, {}),
    pytest.param({"dp": 2, "pp": 2}, {"schedule": "zbv", "shard": True}, marks=pytest.mark.slow),
    ({"pp": 2, "tp": 2}, {"schedule": "interleaved_1f1b", "tensor_plan": PLAN}),
    pytest.param({"dp": 2, "tp": 2}, {"shard": True, "tensor_plan": PLAN}, marks=pytest.mark.slow),
    pytest.param({"dp": 2, "pp": 2, "tp": 2}, {"shard": True, "tensor_plan": PLAN}, marks=pytest.mark.slow),
]


def local(tensor):
    return (tensor.to_local(), str(tensor.placements)) if isinstance(tensor, DTensor) else (tensor, "")


@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=lambda value: str(value)[:45])
@on_each_rank()
def test_lazy_layers_have_the_weights_of_eager_ones_on_every_mesh(local_rank, options):
    """Both have the same parts of the same weights on this rank, draw alike afterwards and train alike."""
    found, drawn, losses = [], [], []
    for wrap in (lambda make, *args, **kwargs: make(*args, **kwargs), ddl.lazy):
        torch.manual_seed(0)
        model = ddl.auto_model(model_of(wrap), **options)
        drawn.append(torch.rand(1).item())
        parts = {n: local(t) for n, t in model.state_dict().items()}
        found.append({n: (t.clone(), how) for n, (t, how) in parts.items()})
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(ddl.get_mesh().dp_rank))
        losses.append(trainer_of(model, max_norm=1.0).run([(x, x[:, :4])] * 3).output)
    eager, late = found
    assert list(eager) == list(late)
    assert len(eager) > 5
    for name, (weight, how) in eager.items():
        assert torch.equal(weight, late[name][0]), name
        assert how == late[name][1], name
    assert drawn[0] == drawn[1]
    assert losses[0] == losses[1]  # a number


@on_each_rank(dp=2)
def test_the_weights_are_those_of_rank_0_however_ranks_are_seeded(local_rank):
    """Rank 1 has another seed: it gets rank 0's weights and keeps its own stream."""
    torch.manual_seed(0)
    one = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    before = torch.random.manual_seed(local_rank).get_state()
    model = ddl.auto_model(nn.Sequential(*[ddl.lazy(nn.Linear, 2, 2) for _ in range(3)]), shard=True)
    assert local_rank == 0 or torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(ddl.full_state_dict(model), dict(one.state_dict()), rtol=0, atol=0)


def live_numbers():
    """float32 numbers that this process holds in tensors made since gc.freeze(), views counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        plain = issubclass(type(thing), torch.Tensor) and not issubclass(type(thing), DTensor)
        if plain and thing.dtype == torch.float32 and not thing.is_meta:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes() // 4
    return sum(storages.values())


def numbers_that_stay():
    """A thread of gloo lets go of what it has sent some milliseconds after the collective has returned."""
    looks = []
    for _ in range(5):
        time.sleep(0.02)
        looks.append(live_numbers())
    return min(looks)


WIDTH, N_LAYERS = 64, 8
ONE = WIDTH * WIDTH


def memory(local_rank, options):
    """The most numbers that are alive when a layer has just been made, and in the end, beyond those before."""
    logging.disable(logging.INFO)
    gc.collect()
    gc.freeze()
    before, seen = numbers_that_stay(), []

    def make():
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        if layer.weight.device.type != "meta":
            seen.append(numbers_that_stay() - before)
        return layer

    model = ddl.auto_model(nn.Sequential(*[ddl.lazy(make) for _ in range(N_LAYERS)]), **options)
    held = sum(local(p)[0].numel() for p in model.parameters())
    return len(seen), max(seen), numbers_that_stay() - before, held


@pytest.mark.parametrize(
    ("nproc", "axes", "options", "share"),
    [
        (4, {"pp": 4}, {"schedule": "interleaved_zero_bubble"}, 4),
        (4, {"dp": 2, "pp": 2}, {"shard": True}, 4),
        (4, {"pp": 2, "tp": 2}, {"tensor_plan": {"*": ddl.Column(output_layouts=Replicate())}}, 4),
    ],
    ids=lambda value: str(value)[:40],
)
def test_memory_holds_a_shard_and_one_layer_at_most(nproc, axes, options, share):
    for n_made, peak, after, held in run(memory, nproc, options, **axes):
        assert n_made == N_LAYERS  # every rank draws every layer
        assert held == N_LAYERS * ONE // share
        assert held <= after <= held + 64  # a few small buffers
        assert ONE <= peak <= held + ONE + 64


# ------------------------------------------------------------------------------------------------ without weights


def new_net():
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(N_LAYERS)])
    net[7].weight = net[0].weight
    net[2].register_buffer("scale", torch.ones(3), persistent=False)  # in a layer, as a pipeline needs it
    return net


def loading(local_rank, folder, options):
    """The most numbers alive while weights are loaded, those held in the end, the loss, and the weights."""
    logging.disable(logging.INFO)
    from ignite_ddl.checkpoint import export

    gc.collect()
    gc.freeze()
    with ddl.empty_weights():
        model = new_net()
    assert all(p.is_meta for p in model.parameters())
    assert model[7].weight is model[0].weight
    assert model[2].scale.tolist() == [1, 1, 1]
    model = ddl.auto_model(model, **options)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    before, seen, read = numbers_that_stay(), [], export._Files.__getitem__

    def watched(files, name):
        tensor = read(files, name)
        seen.append(numbers_that_stay() - before)
        return tensor

    export._Files.__getitem__ = watched
    ddl.import_weights(model, folder)
    export._Files.__getitem__ = read
    held = sum(local(p)[0].numel() for p in model.parameters())
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    loss = trainer.run([(x, x)] * 2).output
    return max(seen), held, loss, ddl.full_state_dict(model)["3.weight"]


@pytest.mark.parametrize(
    ("nproc", "axes", "options", "share"),
    [
        (1, {}, {}, 1),
        pytest.param(4, {"dp": 2, "pp": 2}, {"shard": True}, 4, marks=pytest.mark.slow),
        (4, {"dp": 2, "tp": 2}, {"tensor_plan": {"[1-6]": ddl.Column(output_layouts=Replicate())}}, 2),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_of_weights_is_loaded_straight_onto_a_mesh(tmp_path, nproc, axes, options, share):
    net = new_net()
    ddl.export_weights(net, tmp_path, max_shard_size=2 * 4 * ONE)
    assert (tmp_path / "model.safetensors.index.json").exists()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    for _ in range(2):
        optimizer.zero_grad()
        right = F.mse_loss(net(x), x)
        right.backward()
        optimizer.step()
    for peak, held, loss, weight in run(loading, nproc, str(tmp_path), options, **axes):
        assert held <= 7 * ONE / share + 2 * ONE  # the tied weight is whole under tp, and on both stages under pp
        assert peak <= held + ONE + 64  # its part, which may be made before, and one tensor
        assert loss == pytest.approx(right.item(), rel=1e-5)
        assert (weight - net[3].weight).abs().max() < 1e-6


def forgetting(local_rank, options):
    with ddl.empty_weights():
        model = new_net()
    model = ddl.auto_model(model, **options)
    x = torch.ones(4, WIDTH)
    return trainer_of(model).run([(x, x)]).output


@on_each_rank(dp=2)
def test_a_rank_without_rows_of_a_weight_has_loaded_it(local_rank):
    with ddl.empty_weights():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model = ddl.auto_model(model, shard=True)
    ddl.load_full_state_dict(model, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).state_dict())
    trainer_of(model).run([(torch.ones(4, 3), torch.ones(4, 1))])


def test_weights_that_were_not_loaded_are_noticed():
    for options in ({"shard": True}, {}):
        with pytest.raises(ddl.RankError, match="has no values yet, since the model was made in ddl.empty_weights"):
            run(forgetting, 2, options, dp=2)
    assert math.isnan(forgetting(0, {}))
    with torch.device("meta"):
        model = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="model should have values in its buffers, but 'running_mean' is on the meta"):
        ddl.auto_model(model)


def test_a_weight_that_a_script_holds_stays_tied_and_keeps_its_hooks():
    with ddl.empty_weights():
        weight = nn.Parameter(torch.ones(3, 3))
        weight.register_hook(torch.zeros_like)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        for layer in model:
            layer.weight = weight
        model[1].bias.register_hook(torch.zeros_like)
        shape = nn.Parameter(torch.ones(2))
        kept = weakref.ref(shape)
        with pytest.raises(ValueError, match="'shape' of a Sequential should be registered before anything computes"):
            model.shape = shape
        del model.shape
        assert kept() is shape
    model = ddl.auto_model(model)
    ddl.load_full_state_dict(model, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict())
    assert model[0].weight is model[1].weight is weight
    model(torch.ones(1, 3)).sum().backward()
    assert not weight.grad.any()
    assert not model[1].bias.grad.any()


def test_a_recurrent_layer_is_made_without_weights():
    with ddl.empty_weights():
        model = nn.LSTM(2, 3)
    model, plain, x = ddl.auto_model(model), nn.LSTM(2, 3), torch.randn(4, 1, 2)
    ddl.load_full_state_dict(model, plain.state_dict())
    assert torch.equal(model(x)[0], plain(x)[0])
