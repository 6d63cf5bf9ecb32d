"""Plans and styles: which modules a plan names, what it may cut, and that tied weights stay tied."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

import ignite_ddl as ddl
from ignite_ddl.tensor import apply_plan, check_plan, lay_out_gradient

TIMEOUT = 60


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


def run(func, nproc, *args):
    return ddl.Parallel("gloo", nproc, timeout=TIMEOUT, tp=nproc).run(func, *args)


# ------------------------------------------------------------------------------------------------------ globs


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("head", ["head"]),
        ("block*.attention.k", ["block0.attention.k", "block1.attention.k"]),
        ("block0.attention.[qkv]", ["block0.attention.q", "block0.attention.k", "block0.attention.v"]),
        ("*.attention.out", ["block0.attention.out", "block1.attention.out"]),
        ("block?.*.q", ["block0.attention.q", "block1.attention.q"]),
    ],
)
def test_a_glob_names_modules_part_by_part(glob, names):
    style = ddl.Row()
    assert check_plan(model(), {glob: style}, tp_size=2) == dict.fromkeys(names, style)


@pytest.mark.parametrize(
    "glob", ["block*.q", "*q", "block0.Attention.q", "block0.attention.q.weight", "attention.q"]
)
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
    assert list(check_plan(nn.Sequential(nn.Linear(4, 4)), {"*": ddl.Column()}, tp_size=2)) == ["0"]


def test_an_empty_plan_names_nothing():
    assert check_plan(model(), {}, tp_size=3) == {}


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("plan", "tp_size", "message"),
    [
        ({"haed": ddl.Row()}, 2, "tensor_plan has the key 'haed', which matches no module; those with weights: embed"),
        ({"head": "column"}, 2, r"tensor_plan\['head'\] should be a style such as ddl.Column\(\), but given 'column'"),
        ({"head": ddl.Column}, 2, r"tensor_plan\['head'\] should be a style"),
        ({"block0.attention.q": ddl.Column()}, 3, "tp=3 should divide the 8 rows of its weight of 'block0"),
        ({"block*.attention.q": ddl.Column(units="n_heads")}, 8, "tp=8 should divide the 4 n_heads of 'block0.attent"),
        ({"head": ddl.Column(units=5)}, 2, "tp=2 should divide the 5 units of 'head'"),
        ({"block*.attention.out": ddl.Row()}, 3, "tp=3 should divide the 8 columns of the weight of 'block0"),
        ({"block*.norm": ddl.Row()}, 2, "Row cuts an nn.Linear or nn.Embedding, but 'block0.norm' is a LayerNorm"),
        ({"block*.attention": ddl.Column()}, 1, "Column cuts an nn.Linear .* but 'block0.attention' is a Attention"),
        ({"head": ddl.Column(units="heads")}, 2, "units='heads' of 'head' should be an attribute of its parent"),
        ({"embed": ddl.Row()}, 4, "tp=4 should divide the 10 entries of the vocabulary of 'embed'"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit(plan, tp_size, message):
    with pytest.raises(ValueError, match=message):
        check_plan(model(), plan, tp_size)


def test_heads_are_counted_where_the_layer_is():
    plan = {"block*.attention.q": ddl.Column(units="n_heads")}
    assert len(check_plan(model(n_heads=2), plan, tp_size=2)) == 2
    with pytest.raises(ValueError, match="tp=4 should divide the 2 n_heads"):
        check_plan(model(n_heads=2), plan, tp_size=4)


def test_one_rank_divides_everything():
    plan = {"block*.attention.*": ddl.Column(units=7), "embed": ddl.Row()}
    assert len(check_plan(model(), plan, tp_size=1)) == 9


# -------------------------------------------------------------------------------------------------- on the axis

WHOLE = Replicate()


def cut(local_rank, plan):
    mesh, layers = ddl.get_mesh(), model()
    numbers = layers["embed"].weight.detach().clone()
    apply_plan(layers, check_plan(layers, plan, mesh.tp_size), mesh.device_mesh["tp"])
    embed, head = layers["embed"].weight, layers["head"].weight
    assert torch.equal(embed.full_tensor() if isinstance(embed, DTensor) else embed, numbers)
    kinds = {name: str(p.placements) for name, p in layers.named_parameters() if isinstance(p, DTensor)}
    shapes = {
        name: tuple(p.to_local().shape) for name, p in layers.named_parameters() if isinstance(p, DTensor)
    }
    return embed is head, kinds, shapes, len(list(layers.parameters()))


def test_weights_are_cut_as_named_and_the_tie_stays():
    plan = {
        "block0.attention.[qkv]": ddl.Column(units="n_heads"),
        "block0.attention.out": ddl.Row(),
        "embed": ddl.Row(input_layouts=WHOLE),
        "head": ddl.Column(output_layouts=WHOLE),
    }
    for tied, kinds, shapes, count in run(cut, 2, plan):
        assert tied
        assert count == len(list(model().parameters()))
        assert set(kinds) == {"embed.weight"} | {
            f"block0.attention.{x}.{y}" for x in ("q", "k", "v", "out") for y in ("weight", "bias")
        }  # what the plan leaves out is whole
        assert shapes["embed.weight"] == (5, 8)
        assert shapes["block0.attention.q.weight"] == (4, 8)
        assert shapes["block0.attention.q.bias"] == (4,)
        assert shapes["block0.attention.out.weight"] == (8, 4)
        assert shapes["block0.attention.out.bias"] == (8,)
        assert kinds["block0.attention.out.bias"] == "(Replicate(),)"


CONFLICTS = [
    {"embed": ddl.Row(input_layouts=WHOLE)},  # the head stays whole
    {"head": ddl.Column(output_layouts=WHOLE)},
    {"embed": ddl.Column(output_layouts=WHOLE), "head": ddl.Column(output_layouts=WHOLE)},  # columns and rows
]


def conflicts(local_rank):
    said = []
    for plan in CONFLICTS:
        with pytest.raises(ValueError, match="cuts the shared weight 'embed.weight' in two ways") as raised:
            cut(local_rank, plan)
        said.append(str(raised.value))
    return said


def test_a_tied_weight_cut_in_two_ways_is_refused():
    for said in run(conflicts, 2):
        assert "replicated" in said[0]
        assert "replicated" in said[1]
        assert "Shard(dim=1)" in said[2]
        assert "Shard(dim=0)" in said[2]


def one_module_two_names(local_rank):
    def twice():
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, layer)

    whole, x = twice(), torch.randn(3, 4)
    mesh = ddl.get_mesh().device_mesh["tp"]
    found = []
    for plan in ({"*": ddl.Column(output_layouts=WHOLE)}, {"1": ddl.Column(output_layouts=WHOLE)}):
        layers = twice()
        apply_plan(layers, check_plan(layers, plan, 2), mesh)
        found.append(
            (layers[0] is layers[1], layers[0].weight.to_local().shape[0], (layers(x) - whole(x)).abs().max())
        )
    layers = twice()
    styles = check_plan(layers, {"0": ddl.Column(), "1": ddl.Row()}, 2)
    with pytest.raises(ValueError, match="cuts '1' otherwise than '0', but they are one module"):
        apply_plan(layers, styles, mesh)
    return found


def test_a_module_with_two_names_is_cut_once():
    for found in run(one_module_two_names, 2):
        for same, rows, error in found:
            assert same
            assert rows == 2
            assert error < 1e-6


def gradients(local_rank):
    """Column then Row equal the whole layers, forward and backward; gradients are cut as their weights."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    plan = {
        "0": ddl.Column(output_layouts=Shard(1), use_local_output=False),
        "1": SequenceParallel(use_local_output=False),
        "2": ddl.Row(input_layouts=Shard(1)),
    }
    apply_plan(layers, check_plan(layers, plan, 2), ddl.get_mesh().device_mesh["tp"])
    x = torch.randn(2, 6, 4)
    out = layers(x)
    error = (out - whole(x)).abs().max().item()
    out.square().sum().backward()
    whole(x).square().sum().backward()
    before = [str(p.grad.placements) for p in layers.parameters()]
    for p, q in zip(layers.parameters(), whole.parameters(), strict=True):
        lay_out_gradient(p)
        assert p.grad.placements == p.placements
        error = max(error, (p.grad.full_tensor() - q.grad).abs().max().item())
    return error, before


def test_a_gradient_that_is_a_sum_yet_to_be_made_is_laid_out_as_its_weight():
    for error, before in run(gradients, 2):
        assert error < 1e-4
        assert any("Partial" in placement for placement in before)  # else this shows nothing
