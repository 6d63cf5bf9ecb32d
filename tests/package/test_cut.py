"""The layers of a model that a pipeline partitions: their names."""

import pytest
import torch
import torch.nn.functional as F
from layered import Net
from ranks import mesh_of, pipeline_of
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.course import CNN
from ignite_ddl.pipeline.cut import holders_of, named_layers
from ignite_ddl.pipeline.local_stages import stages_of

# ----------------------------------------------------------------------------------------------------- their names


def test_the_layers_of_a_sequential_and_of_a_model_that_names_them():
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(2, 2), act, act)
    assert named_layers(model) == [("0", model[0]), ("1", act), ("2", act)]
    net = Net(n=2)
    assert named_layers(net) == [
        ("embed", net.embed), ("blocks.0", net.blocks[0]), ("blocks.1", net.blocks[1]), ("head", net.head)
    ]  # fmt: skip
    assert [name for name, _ in named_layers(CNN())][:2] == ["conv1", "relu1"]


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: nn.ModuleList([nn.Tanh()]), "model should be an nn.Sequential under pp, but given ModuleList: .*"
         "or give it an attribute pipeline_layers"),
        (lambda: Residual(nn.Linear(2, 2), nn.Tanh()), "model is a Residual, an nn.Sequential with a forward of its"),
        (lambda: names(["embed", "block.0"]), r"Net.pipeline_layers should name modules .* but names \['block.0'\]"),
        (lambda: names([]), "Net.pipeline_layers should name modules of the model, but names none"),
        (lambda: names(["embed", "blocks.0"]), "leaves out blocks.1.scale, .*head.bias: no stage would hold them"),
        (lambda: names(["embed", "blocks.0", "blocks.1", "head"], extra=True), "leaves out extra: no stage"),
        (lambda: CallsAgain("acbc"), "pipeline_layers names 'c', or a module in it, in two stages.*a second one"),
        (lambda: with_more(scale=nn.Parameter(torch.ones(1))), "Sequential has scale besides its layers"),
        (lambda: hooked("register_forward_hook"), "the model has a forward hook, which would not run under pp"),
        (lambda: hooked("register_full_backward_pre_hook"), "the model has a backward pre hook"),
        (lambda: Frozen(nn.Linear(2, 2), nn.BatchNorm1d(2)), r"a train\(\) of its own, which leaves '1' in evaluation"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_say_what_its_layers_are_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        pipeline_of(change(), mesh_of(2))


def with_more(**parts):
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def hooked(register):
    model = with_more()
    getattr(model, register)(lambda *_: None)
    return model


class Frozen(nn.Sequential):
    """Leaves its BatchNorm in evaluation mode, as fine-tuning does."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


class TalksOfTraining(nn.Sequential):
    def train(self, mode=True):
        self.said = mode
        return super().train(mode)


def test_a_train_of_its_own_that_changes_nothing_is_right():
    model = TalksOfTraining(nn.Linear(2, 2), Frozen(nn.Tanh(), nn.BatchNorm1d(2)))  # the layer takes its own along
    assert pipeline_of(model, mesh_of(2)) is not None
    assert all(module.training for module in model.modules())


class WithNone(nn.Module):
    pipeline_layers = "blocks.0", "blocks.2"

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), None, nn.Linear(2, 2)])

    def forward(self, x):
        return self.blocks[2](self.blocks[0](x))


def test_a_list_may_hold_none_beside_its_layers():
    holders = holders_of(net := WithNone(), net.pipeline_layers)
    for holder in holders:
        holder.check_unchanged()
    net.blocks[1] = nn.Tanh()
    with pytest.raises(ValueError, match=r"'blocks.1' was added"):
        holders[1].check_unchanged()


def names(layers, extra=False):
    net = Net(n=2)
    net.pipeline_layers = layers
    if extra:
        net.register_buffer("extra", torch.zeros(2))
    return net


def test_how_a_model_calls_its_layers_is_found_out_without_their_hooks():
    net, seen = Net(n=2), []
    net.head.register_forward_hook(lambda layer, inputs, output: seen.append(output))
    net.head.register_forward_hook(lambda layer, inputs, output: 2 * output)  # goes with the layer into its stage
    net.embed.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs))
    x = torch.tensor([[0, 3], [4, 1]])
    expected = net(x)
    seen.clear()
    ranks = [pipeline_of(net, mesh_of(2, rank)) for rank in range(2)]
    assert not seen
    assert torch.equal(stages_of(ranks[1]).stages[1](stages_of(ranks[0]).stages[0](x)), expected)
    assert len(seen) == 2


def test_the_stages_of_a_model_with_dots_in_its_names():
    torch.manual_seed(0)
    net = Net()
    ranks = [pipeline_of(net, mesh_of(2, rank), "interleaved_1f1b") for rank in range(2)]
    held = [dict(rank.named_parameters()) for rank in ranks]
    assert sorted(n for part in held for n in part) == sorted(n for n, _ in net.named_parameters())
    assert all(part[n] is net.get_parameter(n) for part in held for n in part)
    assert list(stages_of(ranks[0]).full_shapes()) == list(net.state_dict())
    ids = torch.tensor([[0, 3], [4, 1]])
    x = ids
    for s in range(4):
        x = stages_of(ranks[s % 2]).stages[s](x)
    assert torch.equal(x, net(ids))


class Odd(nn.Module):
    """Its layers are called as methods of dicts and lists are."""

    def __init__(self, *names):
        super().__init__()
        self.pipeline_layers = ["attn.keys", "attn.pop", "insert", *names]
        self.attn, self.insert = nn.Module(), nn.Linear(2, 2)
        self.attn.keys, self.attn.pop = nn.Linear(2, 2), nn.Linear(2, 2)
        for name in names:
            setattr(self, name, nn.Linear(2, 2))

    def forward(self, x):
        for name in self.pipeline_layers:
            x = self.get_submodule(name)(x)
        return x


def test_layers_may_be_called_as_methods_of_dicts_and_lists_and_not_as_those_of_a_pipeline():
    net = Odd("append")
    for rank in range(2):
        pipeline = pipeline_of(net, mesh_of(2, rank))
        held = dict(pipeline.named_parameters())
        assert len(held) == 4
        assert all(parameter is net.get_parameter(name) for name, parameter in held.items())
        with pytest.raises(ValueError, match="the layer 'generate' should have another name under pp"):
            pipeline_of(Odd("generate"), mesh_of(2, rank))


class CallsAgain(nn.Module):
    """Calls layers more than once; one has a second name."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)
        self.pipeline_layers = list(names)
        if "again" in names:
            self.again = self.c

    def forward(self, x):
        for name in self.pipeline_layers:
            x = self.get_submodule(name)(x)
        return x


def test_a_layer_that_is_called_again_is_known_by_two_names_or_is_in_one_stage_or_without_weights():
    batch = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1)).unbind()
    model = CallsAgain(["c", "b", "c", "b", "a", "b", "again"])
    report = ddl.check_parity(model, None, batch, F.mse_loss, atol=1e-12, pp=2, split=[4, 3])
    assert report.equal, report


@pytest.mark.parametrize(
    "options", [{"pp": 2, "schedule": "1f1b"}, {"dp": 2, "pp": 2, "schedule": "zbv", "shard": True}], ids=str
)
def test_a_model_that_names_its_layers_trains_as_on_one_process(options):
    ids = torch.randint(5, (16, 3), generator=torch.Generator().manual_seed(1))

    def loss_fn(output, y):
        return F.cross_entropy(output.flatten(0, 1), y.flatten())

    batch = ids, (ids + 1) % 5
    report = ddl.check_parity(Net(), None, batch, loss_fn, max_norm=1.0, atol=1e-12, **options)
    assert report.equal, report
