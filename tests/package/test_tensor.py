"""Plans and styles: what a plan names and may cut, what styles compute and move, and who draws which random numbers.

Whole models under plans, trained on meshes, are in parity.py.
"""

import contextlib
import copy
import itertools
import random
import re
import warnings
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from ignite.metrics import Accuracy, Loss
from packaging.version import Version
from ranks import in_float64, launch, on_each_rank, trainer_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.collectives import gathered
from ignite_ddl.course import GPT, MLP
from ignite_ddl.lab.bytes import count_bytes
from ignite_ddl.tensor.plan import apply_plan, check_plan
from ignite_ddl.tensor.random import draw_seed, random_stream, state_of

PP_TP = pytest.param({"pp": 2, "tp": 2}, marks=pytest.mark.slow)
BOUND = 1e-12  # float64


class Attention(nn.Module):
    def __init__(self, n_heads=4, width=8):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))


class Block(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.attention, self.norm = Attention(**kwargs), nn.LayerNorm(8)


def model(**kwargs):
    torch.manual_seed(0)
    blocks = {f"block{i}": Block(**kwargs) for i in range(2)}
    layers = nn.ModuleDict({"embed": nn.Embedding(10, 8), **blocks, "head": nn.Linear(8, 10, bias=False)})
    layers["head"].weight = layers["embed"].weight
    return layers


# ------------------------------------------------------------------------------------------------------ globs


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("block0.attention.[qkv]", ["block0.attention.q", "block0.attention.k", "block0.attention.v"]),
        ("block?.*.q", ["block0.attention.q", "block1.attention.q"]),
    ],
)
def test_a_glob_names_modules_part_by_part(glob, names):
    style = ddl.Row()
    assert check_plan(model(), {glob: style}, tp_size=2) == dict.fromkeys(names, style)


@pytest.mark.parametrize("glob", ["block*.q", "block0.Attention.q", "block0.attention.q.weight", "attention.q"])
def test_a_star_does_not_cross_a_dot(glob):
    with pytest.raises(ValueError, match="matches no module"):
        check_plan(model(), {glob: ddl.Row()}, tp_size=2)


def test_the_later_key_holds():
    column, row, special = ddl.Column(), ddl.Row(), ddl.Column(units=8)
    plan = {"block*.attention.*": column, "block*.attention.out": row, "block1.attention.q": special}
    styles = check_plan(model(), plan, tp_size=2)
    assert styles["block0.attention.q"] is styles["block1.attention.k"] is column
    assert styles["block0.attention.out"] is styles["block1.attention.out"] is row
    assert styles["block1.attention.q"] is special
    with pytest.raises(ValueError, match="'block1.attention.q'"):  # what it held before is not checked
        check_plan(model(), {"block1.attention.q": column, "block*.attention.q": ddl.Column(units=3)} | {
            "block0.attention.q": column}, tp_size=2)  # fmt: skip
    check_plan(model(), {"block0.attention.q": ddl.Column(units=3), "block*.attention.q": column}, tp_size=2)


def test_a_model_that_is_one_layer_has_the_empty_name():
    assert list(check_plan(nn.Linear(4, 4), {"": ddl.Column()}, tp_size=2)) == [""]


# ---------------------------------------------------------------------------------------------------- refusals


def test_a_computed_weight_is_refused_and_not_looked_at_in_one_process():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    before = copy.deepcopy(layer.state_dict())
    check_plan(nn.ModuleDict({"fc": layer}), {"fc": ddl.Column()}, tp_size=1)
    with pytest.raises(ValueError, match="'fc' computes its weight from other parameters"):
        check_plan(nn.ModuleDict({"fc": layer}), {"fc": ddl.Column()}, tp_size=2)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize(
    ("plan", "tp_size", "message"),
    [
        ({"haed": ddl.Row()}, 2, "tensor_plan has the key 'haed', which matches no module; those with weights: embed"),
        ({"head": "column"}, 2, r"tensor_plan\['head'\] should be a style such as ddl.Column\(\), but given 'column'"),
        ({"block0.attention.q": ddl.Column()}, 3, "tp=3 should divide the 8 rows of the weight of 'block0"),
        ({"block*.attention.q": ddl.Column(units="n_heads")}, 8, "tp=8 should divide the 4 n_heads of 'block0.attent"),
        ({"block*.attention.q": ddl.Column(units="scale")}, 2, "units='scale' of 'block0.attention.q' should be"),
        ({"block0": ddl.SharedWeight()}, 2, "SharedWeight is for a module that holds weights, but 'block0' is a"),
        ([("head", ddl.Row())], 2, "tensor_plan should be a dict from globs of module names to styles"),
        ({0: ddl.Row()}, 2, "tensor_plan should be a dict from globs"),
        ({"head": ddl.Column(units=5)}, 2, "tp=2 should divide the 5 units of 'head'"),
        ({"block*.attention.out": ddl.Row()}, 3, "tp=3 should divide the 8 columns of the weight of 'block0"),
        ({"block*.norm": ddl.Row()}, 2, "Row cuts an nn.Linear or nn.Embedding, but 'block0.norm' is a LayerNorm"),
        ({"block*.attention": ddl.Column()}, 1, "Column cuts an nn.Linear .* but 'block0.attention' is a Attention"),
        ({"head": ddl.Column(units="heads")}, 2, "units='heads' of 'head' should be an attribute of its parent"),
        ({"head": ddl.Column(units=4)}, 2, "the 4 units of 'head' should divide its 10 outputs, but do not"),
        ({"embed": ddl.Row()}, 8, "tp=8 cuts the 10 entries of the vocabulary of 'embed' so that a rank has none"),
        ({"head": ddl.Column(use_local_output=False)}, 8, "tp=8 cuts the 10 rows of the weight of 'head' so that"),
        ({"head": ddl.Column()}, 4, "tp=4 should divide the 10 rows of the weight of 'head'"),  # it would stay cut
        ({"block*.attention.q": ddl.OutputChannels()}, 2, "OutputChannels cuts an nn.Conv1d, 2d or 3d, but 'block0"),
        ({"head": ddl.Sequence()}, 2, "Sequence is for nn.LayerNorm, nn.RMSNorm and modules without weights, but"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit(plan, tp_size, message):
    layers = model()
    layers["block0"].attention.scale = 0.5
    with pytest.raises(ValueError, match=message):
        check_plan(layers, plan, tp_size)


FULL = {"output_layouts": Replicate()}


@pytest.mark.parametrize(
    ("plan", "cure"),
    [
        ({"0": ddl.Column(), "2": ddl.Row()}, None),
        ({"0": ddl.Column(**FULL), "2": ddl.Column(**FULL), "4": ddl.Column()}, None),
        ({"0": ddl.Column(use_local_output=False), "2": ddl.Row()}, None),
        ({"2": ddl.Row(input_layouts=Replicate())}, None),
        ({"0": ddl.Column(), "2": ddl.Column(**FULL)}, r"make '2' a ddl.Row\(\), or give '0' output_layouts=Replicate"),
        ({"0": ddl.Column()}, r"make '2' a ddl.Row\(\)"),
        ({"2": ddl.Row()}, r"make '0' a ddl.Column\(\), or leave '2' out"),
        ({"0": ddl.Column(), "2": ddl.Row(), "4": ddl.Row()}, r"make '2' a ddl.Column\(\), or leave '4' out"),
    ],
)
def test_neighbours_of_a_sequential_fit_each_other(plan, cure):
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    if cure is None:
        check_plan(layers, plan, 2)
    else:
        with pytest.raises(ValueError, match=cure):
            check_plan(layers, plan, 2)


class Config:
    base_model_tp_plan = {
        "block*.attention.q": "colwise",
        "block*.attention.k": "colwise_gather_output",
        "block*.attention.out": "rowwise",
        "block*.mlp.experts": "moe_tp_experts",  # of another model: this one has none
    }


class OfTransformers(nn.Module):
    """As a model of transformers: a base model and a head, and a plan of strings."""

    base_model_prefix = "model"

    def __init__(self):
        super().__init__()
        self.config, self.model, self.head = Config(), model(), nn.Linear(8, 10)


def test_auto_is_the_plan_of_the_model():
    whole = OfTransformers()
    styles = check_plan(whole, "auto", 2)
    kinds = {name: type(style) for name, style in styles.items()}
    assert kinds == {
        f"model.block{i}.attention.{name}": kind
        for i in range(2) for name, kind in (("q", ddl.Column), ("k", ddl.Column), ("out", ddl.Row))
    }  # fmt: skip
    assert styles["model.block1.attention.k"].output_layouts == (Replicate(),)
    whole._tp_plan = {"head": "packed_colwise", "model.block*.norm": "replicate"}
    styles = check_plan(whole, "auto", 1)
    assert (styles["head"].parts, list(styles)) == (2, ["head"])
    assert list(check_plan(nn.Sequential(whole), "auto", 1)) == ["0.head"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, 'tensor_plan="auto" takes the plan of the model, its base_model_tp_plan, but ModuleDict has none'),
        (
            {"block0": "mla_kv_a_proj", "head": "all_reduce"},
            "has 'mla_kv_a_proj' for 'block0', 'all_reduce' for 'head'",
        ),
        ({"head.weight": "packed_colwise"}, "'head.weight', which matches no module"),  # a parameter
    ],
)
def test_a_plan_of_a_model_that_is_refused(plan, message):
    layers = model()
    layers.base_model_tp_plan = plan
    with pytest.raises(ValueError, match=message):
        ddl.check_model(layers, "auto", tp=2)


def test_a_tp_axis_without_a_plan_warns():
    with pytest.warns(UserWarning, match="the mesh has tp=2, but tensor_plan is None") as caught:
        ddl.check_model(model(), tp=2)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddl.check_model(model(), {}, tp=2)
        ddl.check_model(model())


@pytest.mark.parametrize(
    ("style", "arguments", "message"),
    [
        (ddl.Column, {"units": 0}, "units should be a positive integer, or a string, but given 0"),
        (ddl.Column, {"units": 2.0}, "units should be a positive integer, or a string, but given 2.0"),
        (ddl.Column, {"output_layouts": "replicate"}, "output_layouts should be a placement"),
        (ddl.Row, {"input_layouts": 1}, "input_layouts should be a placement .* but given 1"),
        (ddl.SharedInput, {"input_layouts": "whole"}, "input_layouts should be a placement"),
    ],
)
def test_arguments_of_a_style_that_do_not_fit(style, arguments, message):
    with pytest.raises(ValueError, match=message):
        style(**arguments)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}])
@pytest.mark.parametrize("style", [ddl.Row(), ddl.Column()])
def test_an_embedding_that_dtensor_cannot_cut(option, style):
    with pytest.raises(ValueError, match=f"cuts an nn.Embedding without {next(iter(option))}, but 'e' has"):
        check_plan(nn.ModuleDict({"e": nn.Embedding(8, 4, **option)}), {"e": style}, 2)


CONVOLVED = {"0": ddl.OutputChannels(), "3": ddl.InputChannels()}


@pytest.mark.parametrize(
    "between", [nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.PReLU(8), nn.InstanceNorm2d(8, affine=True)]
)
def test_weights_of_single_channels_have_no_style(between):
    layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), between, nn.Conv2d(8, 4, 3))
    kind = type(between).__name__
    with pytest.raises(ValueError, match=f"'2' is a {kind} of all channels, but '0' before it leaves each rank"):
        check_plan(layers, CONVOLVED, 2)
    with pytest.raises(ValueError, match=f"for weights that all channels share, but '2' is a {kind}"):
        check_plan(layers, CONVOLVED | {"2": ddl.SharedWeight()}, 2)
    assert check_plan(layers, CONVOLVED, 1)  # nothing is cut
    for harmless in (nn.PReLU(), nn.InstanceNorm2d(8), nn.BatchNorm2d(8, affine=False, track_running_stats=False)):
        assert check_plan(nn.Sequential(*layers[:2], harmless, layers[3], nn.BatchNorm2d(4)), CONVOLVED, 2)


class Standardised(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)


@pytest.mark.parametrize(
    ("convolution", "style", "message"),
    [
        (nn.Conv2d(6, 4, 3), ddl.OutputChannels(), "tp=3 should divide the 4 output channels of '0'"),
        (nn.Conv2d(4, 6, 3), ddl.InputChannels(), "tp=3 should divide the 4 input channels of '0'"),
        (nn.Conv2d(6, 6, 3, groups=2), ddl.OutputChannels(), "with groups=1, but '0' has groups=2: leave it out"),
        (nn.Conv2d(6, 6, 3, groups=6), ddl.InputChannels(), "with groups=1, but '0' has groups=6"),
        (Standardised(6, 6, 3), ddl.InputChannels(), "'0', a Standardised, has a _conv_forward of its own"),
        (nn.ConvTranspose2d(6, 6, 3), ddl.OutputChannels(), "but '0' is a ConvTranspose2d"),
        (nn.Conv2d(6, 6, 3), ddl.Column(), "but '0' is a Conv2d; ddl.OutputChannels is for convolutions"),
        (nn.Conv1d(6, 6, 3), ddl.Row(), "but '0' is a Conv1d; ddl.InputChannels is for convolutions"),
    ],
)
def test_a_convolution_that_cannot_be_cut(convolution, style, message):
    with pytest.raises(ValueError, match=message):
        check_plan(nn.Sequential(convolution), {"0": style}, tp_size=3)


def test_uneven_vocabularies_are_cut_where_nothing_stays_cut_by_equal_parts():
    for tp_size in (3, 4):
        for style in (ddl.Column(output_layouts=WHOLE), ddl.Column(use_local_output=False)):
            assert check_plan(model(), {"embed": ddl.Row(), "head": style}, tp_size)


# -------------------------------------------------------------------------------------------------- on the axis

WHOLE = Replicate()


def cut(layers, plan):
    mesh = ddl.get_mesh()
    apply_plan(layers, check_plan(layers, plan, mesh.tp_size), mesh.device_mesh["tp"])
    return layers


def outputs_sent_away(local_rank):
    torch.manual_seed(0)
    layers = ddl.auto_model(nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 1)), {"0": ddl.Column(), "1": ddl.Row()})
    x = torch.linspace(-1, 1, 8000).view(2000, 4)
    with torch.no_grad():
        return [layers(x).squeeze(-1) for _ in range(5)], copy.deepcopy(layers(x)).squeeze(-1)


def test_an_output_that_is_returned_has_arrived():
    expected = outputs_sent_away(0)[1]
    for outputs, copied in launch({"tp": 2}, outputs_sent_away):
        for output in (*outputs, copied):  # torch pickles the memory of what it is still summing over tp
            assert type(output) is torch.Tensor
            assert torch.allclose(output, expected, atol=1e-5)


@on_each_rank(tp=2)
def test_weights_are_cut_as_named_and_the_tie_stays(local_rank):
    plan = {
        "block0.attention.[qkv]": ddl.Column(units="n_heads"),
        "block0.attention.out": ddl.Row(),
        "embed": ddl.Row(input_layouts=WHOLE),
        "head": ddl.Column(output_layouts=WHOLE),
    }
    layers = cut(model(), plan)
    assert layers["embed"].weight is layers["head"].weight
    assert torch.equal(layers["embed"].weight.full_tensor(), model()["embed"].weight)
    assert len(list(layers.parameters())) == len(list(model().parameters()))
    parts = {name: p for name, p in layers.named_parameters() if isinstance(p, DTensor)}
    assert {name: tuple(p.to_local().shape) for name, p in parts.items()} == {
        "embed.weight": (5, 8),
        **{f"block0.attention.{x}.weight": (4, 8) for x in "qkv"},
        **{f"block0.attention.{x}.bias": (4,) for x in "qkv"},
        "block0.attention.out.weight": (8, 4),
        "block0.attention.out.bias": (8,),
    }  # what the plan leaves out is whole
    assert parts["block0.attention.out.bias"].placements == (WHOLE,)


class OwnRow(ParallelStyle):
    """A style that check_plan does not know."""

    def _apply(self, module, device_mesh):
        return ddl.Row()._apply(module, device_mesh)


@on_each_rank(tp=2)
def test_a_tied_weight_cut_in_two_ways_is_refused(local_rank):
    row, column = ddl.Row(input_layouts=WHOLE), ddl.Column(output_layouts=WHOLE)
    for plan, ways in (
        ({"embed": row}, ["replicated"]),  # the head stays whole
        ({"head": column}, ["replicated"]),
        ({"embed": column, "head": column}, [r"Shard\(dim=1\)", r"Shard\(dim=0\)"]),  # columns and rows
        ({"embed": OwnRow()}, []),
    ):
        in_two_ways = pytest.raises(ValueError, match="cuts the shared weight 'embed.weight' in two ways")
        with in_two_ways as raised, count_bytes() as sent:
            cut(model(), plan)
        assert all(re.search(way, str(raised.value)) for way in ways)
        assert not sent.calls or not ways  # an unknown style is found out once it is applied


@on_each_rank(tp=2)
def test_a_module_with_two_names_is_cut_once(local_rank):
    def twice():
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, layer)

    x = torch.randn(3, 4)
    for plan in ({"*": ddl.Column(output_layouts=WHOLE)}, {"1": ddl.Column(output_layouts=WHOLE)}):
        layers = cut(twice(), plan)
        assert layers[0] is layers[1]
        assert layers[0].weight.to_local().shape[0] == 2
        torch.testing.assert_close(layers(x), twice()(x))
    with pytest.raises(ValueError, match="cuts '1' otherwise than '0', but they are one module"):
        check_plan(twice(), {"0": ddl.Column(), "1": ddl.Row()}, 2)


@on_each_rank(tp=2)
def test_a_style_serves_several_layers_and_models(local_rank):
    torch.manual_seed(0)
    row = ddl.Row()
    for plan in ({"0": row, "1": ddl.Column(), "2": row}, {"1": ddl.Column(), "2": row}):  # and once more
        whole = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.Linear(16, 8))
        x = torch.randint(10, (2, 3))
        expected = whole(x)
        torch.testing.assert_close(ddl.auto_model(whole, plan)(x), expected)


# ---------------------------------------------------------------------------------- what styles compute and move


def mine(tensor, dim):
    mesh = ddl.get_mesh()
    return tensor.chunk(mesh.tp_size, dim)[mesh.tp_rank]


CONVOLUTIONS = [
    (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1), (2, 4, 7, 7)),
    (lambda: nn.Conv2d(4, 8, (1, 3), padding=(0, 1), padding_mode="circular", bias=False), (2, 4, 5, 5)),
    (lambda: nn.Conv1d(8, 4, 3, dilation=2), (2, 8, 9)),
    (lambda: nn.Conv3d(4, 4, 2), (1, 4, 3, 3, 3)),
]


@pytest.mark.parametrize("mesh", [{"tp": 2}, pytest.param({"tp": 4}, marks=pytest.mark.slow)], ids=str)
@on_each_rank()
@in_float64
def test_convolutions_by_channels_equal_the_whole_one(local_rank):
    """Output, and gradients of input and weights. What they move is counted by tools/styles_table.py."""
    cases = ddl.OutputChannels(), ddl.InputChannels(), ddl.InputChannels(whole_input=True)
    for (make, shape), style in itertools.product(CONVOLUTIONS, cases):
        torch.manual_seed(1)
        whole, ours, x = make(), make(), torch.randn(shape, requires_grad=True)
        ours.load_state_dict(whole.state_dict())
        ours = ddl.auto_model(ours, {"": style})
        takes = (lambda t: mine(t, 1)) if style is cases[1] else torch.clone
        gives = (lambda t: mine(t, 1)) if style is cases[0] else torch.clone
        x_here = takes(x).detach().requires_grad_()
        expected, output = whole(x), ours(x_here)
        assert output.shape == gives(expected).shape
        assert (output - gives(expected)).abs().max() < BOUND
        upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
        expected.backward(upstream)
        output.backward(gives(upstream))
        assert (x_here.grad - takes(x.grad)).abs().max() < BOUND
        for ours_, whole_ in zip(ours.parameters(), whole.parameters(), strict=True):
            assert isinstance(ours_, DTensor)
            assert ours_.grad.placements == ours_.placements
            assert (ours_.grad.full_tensor() - whole_.grad).abs().max() < BOUND
        full = ddl.full_state_dict(ours)
        assert {name: value.shape for name, value in full.items()} == {
            name: value.shape for name, value in whole.state_dict().items()
        }


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, mask=None, scale=1):
        y = self.q(x).relu() * scale
        return self.out(y if mask is None else y * mask)


@on_each_rank(tp=2)
def test_a_shared_input_is_the_first_argument_and_others_come_through(local_rank):
    torch.manual_seed(0)
    plan = {"": ddl.SharedInput(), "q": ddl.Column(), "out": ddl.Row()}
    whole, x, mask = Masked(), torch.randn(2, 8), torch.tensor([[1.0], [0.0]])
    calls = [((x, mask), {}), ((x,), {"mask": mask, "scale": 3}), ((x,), {})]
    expected = [whole(*args, **kwargs) for args, kwargs in calls]
    masked = ddl.auto_model(whole, plan)
    for (args, kwargs), right in zip(calls, expected, strict=True):
        torch.testing.assert_close(masked(*args, **kwargs), right)
    shared = "SharedInput", (lambda: masked(x=x), lambda: masked(None))
    for style, calls in (shared, ("Column", [lambda: masked.q(input=x)]), ("Row", [lambda: masked.out(input=x)])):
        for wrong in calls:
            with pytest.raises(ValueError, match=f"{style} takes the first positional argument"):
                wrong()


@on_each_rank(tp=4)
def test_the_labs_plans_fit_their_models(local_rank):
    torch.set_default_dtype(torch.float64)
    for layers in (1, 3, 4):
        torch.manual_seed(layers)
        whole = MLP(6, 8, 4, layers=layers)
        x = torch.randn(3, 6)
        expected = whole(x)
        cut = ddl.auto_model(whole, whole.tensor_plan)
        assert (cut(x) - expected).abs().max() < BOUND
        n_cut = sum(isinstance(p, DTensor) for p in cut.parameters())
        assert n_cut == 2 * (layers - layers % 2)  # weights and biases of layers in pairs
    gpt = ddl.auto_model(GPT(65, 8, 16, 4, 1), GPT.tensor_plan)
    logits = gpt(torch.zeros(2, 8, dtype=torch.long))
    assert logits.stride() == (8 * 65, 65, 1)  # gathered from uneven parts, and without their padding


# --------------------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("mesh", [{"tp": 2}, pytest.param({"tp": 4}, marks=pytest.mark.slow)], ids=str)
@on_each_rank()
@in_float64
def test_cross_entropy_of_cut_logits_is_that_of_whole_ones_and_gathers_none(local_rank):
    for words in (8, 65):
        torch.manual_seed(0)
        whole, head = nn.Linear(5, words), nn.Linear(5, words)
        head.load_state_dict(whole.state_dict())
        cut(head, {"": ddl.Column(use_local_output=False)})
        x, y = torch.randn(6, 3, 5), torch.randint(words, (6, 3))
        y[0, 0] = 1
        for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 1}):
            for shape in ("rows", "images"):  # (N · T, V) and (N, V, T)
                losses = []
                for layer, loss_fn in ((head, ddl.cross_entropy), (whole, F.cross_entropy)):
                    layer.zero_grad()
                    logits = layer(x)
                    args = (logits.flatten(0, 1), y.flatten())
                    if shape == "images":
                        args = (logits.transpose(1, 2), y)
                    with count_bytes() as traffic:
                        loss = loss_fn(*args, **options)
                        (loss * torch.linspace(1, 2, loss.numel()).view_as(loss)).sum().backward()
                    losses.append(loss.detach())
                    # a number for each row; a rank's part of the logits has 4 × as much and more
                    assert all(call.put_in <= 6 * 3 * 8 for call in traffic.calls)
                assert type(losses[0]) is torch.Tensor
                assert (losses[0] - losses[1]).abs().max() < BOUND
                for p, q in zip(head.parameters(), whole.parameters(), strict=True):
                    assert (p.grad.full_tensor() - q.grad).abs().max() < BOUND
        with torch.no_grad():
            loss = ddl.cross_entropy(head(x).flatten(0, 1), y.flatten())
            assert (loss - F.cross_entropy(whole(x).flatten(0, 1), y.flatten())).abs() < BOUND


@on_each_rank(tp=2)
def test_what_cut_logits_do_not_support_is_said_before_anything_is_sent(local_rank):
    mesh = ddl.get_mesh().device_mesh["tp"]
    logits = DTensor.from_local(torch.randn(3, 4), mesh, [Shard(1)])
    by_rows = DTensor.from_local(torch.randn(3, 4), mesh, [Shard(0)])
    deep = DTensor.from_local(torch.randn(3, 5, 4), mesh, [Shard(2)])
    y = torch.tensor([1, 2, 7])
    with count_bytes() as traffic:
        for args, options, said in (
            ((logits, y), {"label_smoothing": 0.1}, "label_smoothing should be .* given 0.1"),
            ((logits, y), {"weight": torch.ones(8)}, "weight should be"),
            ((logits, torch.rand(3, 8)), {}, "target should be"),
            ((logits, y + 1), {}, "target should be .*below the 8 classes, but has 8"),
            (
                (logits, torch.zeros(4, dtype=torch.long)),
                {},
                r"target should be .*of shape \(3,\) for logits of shape \(3, 8\), but is of \(4,\)$",
            ),
            ((logits, y), {"reduction": "avg"}, "reduction should be"),
            ((by_rows, y), {}, r"logits of shape \(6, 4\) should be"),
            (
                (deep, y),
                {},
                r"logits of shape \(3, 5, 8\) should be .*take logits.flatten\(0, 1\) and target.flatten\(\)",
            ),
        ):
            with pytest.raises(ValueError, match=said):
                ddl.cross_entropy(*args, **options)
    assert not traffic.calls
    assert 0 < ddl.cross_entropy(logits, y) < 10  # torch's own handlers were put back each time


@on_each_rank(tp=2)
def test_a_scaled_loss_of_half_precision_logits_keeps_small_gradients(local_rank):
    """Of whole and of cut logits, against float32."""
    torch.manual_seed(0)
    logits, y = torch.randn(2048, 2000).half(), torch.randint(2000, (2048,))
    right = logits.float().requires_grad_()
    F.cross_entropy(right, y).backward()
    whole, here = logits.clone().requires_grad_(), mine(logits, 1).clone().requires_grad_()
    (F.cross_entropy(whole.float(), y) * 2**14).backward()
    cut = DTensor.from_local(here, ddl.get_mesh().device_mesh["tp"], [Shard(1)])
    (ddl.cross_entropy(cut, y) * 2**14).backward()
    assert here.grad.dtype == torch.float16
    errors = []
    for found, expected in ((whole.grad, right.grad), (here.grad, mine(right.grad, 1))):
        errors.append(((found.float() / 2**14 - expected).norm() / expected.norm()).item())
    assert errors[1] < 1.5 * errors[0] < 1e-3


@on_each_rank(tp=2)
def test_a_gradient_of_the_gradient_of_cut_logits_is_refused(local_rank):
    cut = DTensor.from_local(torch.randn(3, 4, requires_grad=True), ddl.get_mesh().device_mesh["tp"], [Shard(1)])
    weight = torch.ones((), requires_grad=True)
    loss = ddl.cross_entropy(cut, torch.tensor([1, 2, 7])) * weight
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, cut, create_graph=True)


def trained_on_torchs_loss(local_rank, loss_fn):
    ids = torch.randint(65, (4, 9), generator=torch.Generator().manual_seed(3))
    gpt = ddl.auto_model(GPT(65, 8, 16, 4, 2), GPT.cut_logits_plan)
    trainer_of(gpt, loss_fn).run(ddl.auto_dataloader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=4))


@pytest.mark.parametrize("mesh", [{"tp": 2}, PP_TP])
@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()), "fails on a DTensor"),
        (lambda logits, y: logits.square().mean(), "gave a DTensor"),
    ],
)
def test_torchs_loss_of_cut_logits_is_refused_by_the_trainer(mesh, loss_fn, message):
    with pytest.raises(ddl.RankError, match=f"loss_fn should .*{message}.* use ddl\\.cross_entropy"):
        launch(mesh, trained_on_torchs_loss, loss_fn)


def test_whole_logits_take_all_that_torch_takes():
    torch.manual_seed(0)
    logits, y, weight = torch.randn(4, 3), torch.tensor([0, 1, 2, 1]), torch.rand(3)
    for target, options in ((y, {"weight": weight, "label_smoothing": 0.1}), (logits.softmax(1), {})):
        assert ddl.cross_entropy(logits, target, **options) == F.cross_entropy(logits, target, **options)


def evaluation(local_rank):
    torch.set_default_dtype(torch.float64)
    ids = torch.randint(65, (10, 9), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    loader = ddl.auto_dataloader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=4)
    gpt = ddl.auto_model(GPT(65, 8, 16, 4, 2), GPT.cut_logits_plan)
    by_class = {"model_transform": lambda logits: logits.transpose(1, 2)}  # (N, V, T), as Ignite's metrics want them
    evaluator = ddl.create_supervised_evaluator(
        gpt, {"accuracy": Accuracy(), "loss": Loss(ddl.cross_entropy)}, **by_class
    )
    trainer = trainer_of(gpt, ddl.cross_entropy, **by_class, output_transform=lambda x, y, y_pred, loss: y_pred)
    trainer.run(loader)
    return evaluator.run(loader).metrics, type(trainer.state.output), tuple(trainer.state.output.shape)


@pytest.mark.parametrize("mesh", [{"tp": 2}, PP_TP])
def test_ignites_metrics_get_whole_logits(mesh):
    expected, _, _ = evaluation(0)
    torch.set_default_dtype(torch.float32)
    for metrics, kind, shape in launch(mesh, evaluation):
        assert abs(metrics["loss"] - expected["loss"]) < BOUND
        assert metrics["accuracy"] == expected["accuracy"]
        assert kind is torch.Tensor
        assert shape == (2, 65, 8)


# ------------------------------------------------------------------------------------------- sequence parallelism


class Two(nn.Module):
    def forward(self, x):
        return x, x


@on_each_rank(tp=2)
def test_one_tensor_is_split_evenly_and_a_frozen_norm_stays_frozen(local_rank):
    layers = nn.Sequential(nn.Identity(), nn.LayerNorm(4))
    layers[1].weight.requires_grad_(False)
    cut(layers, {"0": ddl.SplitSequence(), "1": ddl.Sequence()})
    x = torch.randn(2, 6, 4)
    torch.testing.assert_close(layers(x), F.layer_norm(mine(x, 1), (4,)))
    with pytest.raises(
        ValueError, match="tp=2 should divide the sequence, but dim 1 of Identity's output has 5 places"
    ):
        layers(torch.randn(2, 5, 4))
    assert [p.requires_grad for p in layers.parameters()] == [False, True]
    with pytest.raises(ValueError, match="SplitSequence is for a module whose output is one tensor, but Two's is a t"):
        ddl.auto_model(Two(), {"": ddl.SplitSequence()})(torch.randn(2, 4, 8))


@on_each_rank(tp=2)
def test_gradients_are_summed_before_the_optimizer_which_uses_them_more_than_once(local_rank):
    ids = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(0))
    loader = ddl.auto_dataloader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=4)
    gpt = ddl.auto_model(GPT(20, 8, 8, 2, 2), GPT.sequence_plan)
    optimizer = ddl.auto_optim(torch.optim.AdamW(gpt.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(
        gpt, optimizer, ddl.cross_entropy, model_transform=lambda logits: logits.transpose(1, 2)
    )
    with contextlib.ExitStack() as counting:
        traffic = []
        optimizer.register_step_pre_hook(lambda *_: traffic.append(counting.enter_context(count_bytes())))
        optimizer.register_step_post_hook(lambda *_: counting.pop_all().close())
        trainer.run(loader)
    assert traffic[0].ops == []


# ------------------------------------------------------------------------------------------------ shared weights


no_prelu = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="torch 2.11 computes prelu wrongly on DTensors"
)


class Activated(nn.Module):
    """A column and a row, and one weight between them; the row may start at zero, as GPTs' often do."""

    def __init__(self, zero=False):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down, self.norm = (nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 3), nn.LayerNorm(3))
        if zero:
            nn.init.zeros_(self.down.weight)

    def forward(self, x):
        return self.norm(self.down(self.act(self.up(x))) + x[:, :3])


PAIR = {"up": ddl.Column(), "down": ddl.Row()}
POINTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
KINDS = torch.randint(3, (12,), generator=torch.Generator().manual_seed(2))


def stepping(layers, plan):
    layers = ddl.auto_model(layers, plan)
    trainer = trainer_of(layers, F.cross_entropy, lr=0.5)
    return trainer, ddl.auto_dataloader(TensorDataset(POINTS, KINDS), batch_size=4)


@no_prelu
@on_each_rank(tp=2)
def test_a_weight_that_parts_share_and_the_plan_forgets_is_found_out_on_every_rank(local_rank):
    without_norm = {k: v for k, v in GPT.sequence_plan.items() if k != "head.norm"}
    for layers, plan, iteration, name in (
        (Activated(), PAIR, 1, "act.weight"),
        (Activated(zero=True), PAIR, 2, "act.weight"),  # its first gradient is zero
        (GPT(20, 8, 8, 2, 1), without_norm, 1, "head.norm.weight"),
    ):
        trainer, loader = stepping(layers, plan)
        if plan is without_norm:
            loader = [(torch.arange(8)[None], torch.arange(8)[None] + 1)]
            trainer = trainer_of(layers, ddl.cross_entropy, model_transform=lambda logits: logits.transpose(1, 2))
        with pytest.raises(ValueError, match=f"tp ranks have different gradients of '{name}'"):
            trainer.run(loader)
        assert trainer.state.iteration == iteration
    trainer, loader = stepping(Activated(zero=True), PAIR | {"act": ddl.SharedWeight()})
    assert trainer.run(loader, max_epochs=4).iteration == 12


@no_prelu
@on_each_rank(tp=2)
def test_peers_are_asked_once_and_in_few_bytes(local_rank):
    trainer, loader = stepping(Activated(), PAIR | {"act": ddl.SharedWeight()})
    per_step = []
    with count_bytes() as traffic:
        trainer.add_event_handler("ITERATION_COMPLETED", lambda: per_step.append(len(traffic.calls)))
        trainer.run(loader)
    # the number of handlers that may end the run
    # checksums of x and y; weights and biases of the norm, and the biases that Row and Column leave whole: their
    # gradients, once, their values and the loss in steps 1 and 2; their values and the optimizer's options at the end
    asked = [call.put_in for call in traffic.calls if call.op == "all_gather"]
    assert asked == [8, 2 * 8, 8, 4 * 16 * 8, 4 * 2 * 8, 2 * 8, 8, 4 * 2 * 8, 4 * 2 * 8, 4096]
    first, second, third = per_step
    assert third - second == second - first - 3 == first - 5


# ------------------------------------------------------------------------------------------------- random numbers


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.inner, self.down, self.outer = (nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 4), nn.Dropout())

    def forward(self, x):
        return self.outer(self.down(self.inner(self.up(x))))


DROPPING_PLAN = {"up": ddl.Column(), "inner": ddl.ShardedRandom(), "down": ddl.Row()}


@on_each_rank(tp=2)
def test_activation_checkpointing_draws_the_same_masks_again(local_rank):
    torch.manual_seed(0)
    dropping = ddl.auto_model(Dropping(), DROPPING_PLAN, checks=False)
    outputs = []
    dropping.inner.register_forward_hook(lambda m, i, o: outputs.append(o.detach()))
    checkpoint(dropping, torch.randn(8, 4, requires_grad=True), use_reentrant=False).sum().backward()
    first, again = outputs
    assert first.equal(again)
    before = torch.get_rng_state()
    dropping.eval()(torch.ones(8, 4))
    assert torch.get_rng_state().equal(before)  # evaluation draws nothing


@on_each_rank(tp=2)
def test_tp_ranks_share_the_streams_of_python_and_numpy(local_rank):
    """By which a model may leave out layers, whose ranks would wait for each other."""
    random.seed(local_rank)
    numpy.random.seed(local_rank)  # noqa: NPY002
    ddl.auto_model(nn.Sequential(nn.Linear(4, 4)), {"0": ddl.Column()})
    drawn = torch.tensor([random.random(), numpy.random.rand()], dtype=torch.float64)  # noqa: NPY002
    assert torch.equal(*gathered(drawn, None))


class Fails(nn.Module):
    def forward(self, x):
        torch.rand(3)
        raise RuntimeError("no")


@on_each_rank(tp=2)
def test_a_module_that_fails_leaves_the_stream_as_it_was(local_rank):
    layers = cut(nn.Sequential(Fails()), {"0": ddl.ShardedRandom()})
    torch.manual_seed(0)
    with contextlib.suppress(RuntimeError):
        layers(torch.ones(1))
    after = torch.get_rng_state()
    torch.manual_seed(0)
    draw_seed()
    assert after.equal(torch.get_rng_state())
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with contextlib.suppress(KeyError), random_stream(5):
        assert torch.initial_seed() == 5
        raise KeyError
    assert torch.get_rng_state().equal(state)


def streams_after_training(local_rank):
    mesh = ddl.get_mesh()
    torch.manual_seed(mesh.rank)
    ids = torch.randint(20, (12, 9), generator=torch.Generator().manual_seed(0))
    loader = ddl.auto_dataloader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=4)
    gpt = ddl.auto_model(GPT(20, 8, 8, 2, 2, dropout=0.5), GPT.sequence_plan, schedule="zbv")
    trainer = trainer_of(gpt, ddl.cross_entropy, model_transform=lambda logits: logits.transpose(1, 2))
    before = torch.get_rng_state()
    trainer.run(loader)
    return before, torch.get_rng_state()


def test_ranks_of_a_replica_stay_alike_however_much_their_stages_draw():
    ranks = launch({"pp": 2, "tp": 2}, streams_after_training)
    for before, after in ranks:
        assert before.equal(ranks[0][0])
        assert after.equal(ranks[0][1])
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(ranks[0][0])
        torch.empty((), dtype=torch.int64).random_()  # the loader, as in one process
        for _ in range(3):  # batches: one number each
            draw_seed()
        assert torch.get_rng_state().equal(ranks[0][1])


# --------------------------------------------------------------------------------------------------- the page


def test_the_table_of_styles_is_what_is_counted(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    import styles_table

    assert styles_table.page() == styles_table.PAGE.read_text(), "out of date: python tools/styles_table.py"


@on_each_rank(tp=2)
def test_an_encoder_of_torch_with_padding_in_evaluation(local_rank):
    """In evaluation torch makes nested tensors of padded sequences, with which DTensors cannot compute."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2)
    x, padding = torch.randn(3, 4, 8), torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]).bool()
    cut = ddl.auto_model(
        copy.deepcopy(plain), {"layers.*.linear1": ddl.Column(), "layers.*.linear2": ddl.Row()}, checks=False
    )
    with torch.no_grad():
        expected, found = (m.eval()(x, src_key_padding_mask=padding) for m in (plain, cut))
    assert torch.allclose(expected[~padding], found[~padding], atol=1e-5)


def test_the_state_of_a_generator_is_read_and_set():
    made = random.Random(1), numpy.random.default_rng(1), numpy.random.RandomState(1), torch.Generator()
    for generator in made:
        state, set_state = state_of(generator)
        draw = generator.random if hasattr(generator, "random") else lambda: torch.rand(1, generator=made[-1]).item()
        first = draw()
        set_state(state)
        assert draw() == first
    assert [state_of(one) for one in (random.SystemRandom(), numpy.random.SeedSequence(1), 1)] == [None] * 3
