"""ignite_ddl.course.gpt: the model on one process, its plans, its samples. Trained on meshes it is in parity.py."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.course.gpt import GPT, generate
from ignite_ddl.tensor.plan import check_plan

SIZES = {"vocabulary_size": 24, "length": 6, "width": 16, "n_heads": 4, "n_blocks": 2}


def ids(n_rows, length=6, seed=1):
    return torch.randint(24, (n_rows, length), generator=torch.Generator().manual_seed(seed))


def test_tied_weights_are_one_and_copies_of_it_stay_so():
    tied, untied = GPT(**SIZES), GPT(**SIZES, tied=False)
    assert tied.head.out.weight is tied.embed.token.weight
    assert untied.head.out.weight is not untied.embed.token.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 24 * 16


def test_no_token_sees_a_later_one():
    torch.manual_seed(0)
    model, x = GPT(**SIZES), ids(3)
    changed = x.clone()
    changed[:, 4] = (x[:, 4] + 1) % 24
    before, after = model(x), model(changed)
    assert before.shape == (3, 6, 24)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert (before[:, 4:] - after[:, 4:]).abs().amax((0, 2)).min() > 1e-6
    torch.testing.assert_close(model(x[:, :2]), before[:, :2])  # shorter rows are fine


def test_an_untrained_model_knows_nothing():
    torch.manual_seed(0)
    loss = F.cross_entropy(GPT(80)(ids(8, 64)).transpose(1, 2), ids(8, 64, seed=3))
    assert abs(loss - math.log(80)) < 0.1


def test_the_plan_reaches_all_linear_layers_and_refuses_to_cut_heads():
    model = GPT(**SIZES)
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for plan in (GPT.tensor_plan, GPT.cut_logits_plan, GPT.sequence_plan):
        assert set(check_plan(model, plan, 4)) > layers
    with pytest.raises(ValueError, match="tp=8 should divide the 4 n_heads of 'block0.attention.q'"):
        check_plan(model, GPT.tensor_plan, 8)
    check_plan(GPT(**SIZES | {"vocabulary_size": 65}), GPT.tensor_plan, 4)  # the vocabulary may be uneven


def test_dropout_is_off_unless_asked_for():
    torch.manual_seed(0)
    plain, dropping, x = GPT(**SIZES), GPT(**SIZES, dropout=0.5), ids(2)
    assert plain(x).equal(plain(x))
    assert not dropping(x).equal(dropping(x))
    dropping.eval()
    assert dropping(x).equal(dropping(x))


def test_generate_draws_by_seed_and_leaves_the_rest_alone():
    torch.manual_seed(0)
    model = GPT(**SIZES, dropout=0.5)
    state = torch.get_rng_state()
    drawn = generate(model, [1, 2], 10, seed=5)
    assert torch.get_rng_state().equal(state)
    assert model.training
    assert drawn[:2].tolist() == [1, 2]
    assert drawn.shape == (12,)  # longer than the model's rows
    assert drawn.equal(generate(model, torch.tensor([1, 2]), 10, seed=5))
    assert not drawn.equal(generate(model, [1, 2], 10, seed=6))
    assert generate(model, [3], 0).tolist() == [3]

    greedy, row = generate(model, [1], 5, temperature=1e-6), [1]
    model.eval()
    for _ in range(5):
        row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    assert greedy.tolist() == row


def drawn_on(local_rank, shard):
    torch.manual_seed(0)
    length = None if ddl.get_mesh().pp_size == 1 and (shard or ddl.get_mesh().tp_size > 1) else SIZES["length"]
    model = ddl.auto_model(GPT(**SIZES, dropout=0.5), GPT.tensor_plan, shard=shard)
    return generate(model, [1, 2], 10, seed=5, length=length)


@pytest.mark.parametrize(
    ("mesh", "shard"), [({"dp": 2}, False), ({"dp": 2}, True), ({"tp": 2}, False), ({"pp": 2, "tp": 2}, False)]
)
def test_a_cut_model_draws_what_the_whole_one_draws(mesh, shard):
    torch.manual_seed(0)
    expected = generate(GPT(**SIZES, dropout=0.5), [1, 2], 10, seed=5)
    parallel = ddl.Parallel("gloo", math.prod(mesh.values()), timeout=100, **mesh)
    assert all(drawn.equal(expected) for drawn in parallel.run(drawn_on, shard))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GPT(0), "vocabulary_size should be a positive integer, but given 0"),
        (lambda: GPT(80, n_blocks=True), "n_blocks should be a positive integer, but given True"),
        (lambda: GPT(80, width=30), "n_heads is 4; it has to divide the width, 30"),
        (lambda: GPT(80, dropout=1), "dropout is 1; it has to be at least 0 and below 1"),
        (lambda: GPT(**SIZES)(ids(1, 7)), "ids has rows of 7 tokens; the model's length is 6"),
        (lambda: generate(nn.Linear(2, 2), [0], 1), "length is None, and a Linear has none: give"),
        (lambda: generate(GPT(**SIZES), [], 1), "ids has the shape (0,); it has to be a row"),
        (lambda: generate(GPT(**SIZES), [0], -1), "n should be an integer of at least 0, but given -1"),
        (lambda: generate(GPT(**SIZES), [0], 1, temperature=0), "temperature is 0; it has to be positive"),
    ],
)
def test_bad_input_says_what_fits(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
