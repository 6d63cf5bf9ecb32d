"""Attention over a sequence that several ranks share, beside torch's attention over the whole sequence."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import launch

from ignite_ddl.context.api import ring_attention, ulysses_attention
from ignite_ddl.context.layout import local_positions, natural_order, shard_sequence
from ignite_ddl.context.visible import Mask
from ignite_ddl.lab.bytes import count_bytes

BATCH, HEADS, WIDTH = 2, 8, 4


def tensors(length, key_heads, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(BATCH, heads, length, WIDTH) for heads in (HEADS, key_heads, key_heads, HEADS)]
    documents = torch.randint(0, 3, (BATCH, length)).sort(1).values
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes], documents


def on_one(length, key_heads, causal, window, by_document):
    """Output and gradients of query, key and value of torch's own attention, in float64."""
    (*leaves, gradient), documents = tensors(length, key_heads)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    positions = torch.arange(length)
    visible = Mask(causal, window, by_document).visible(positions, positions, documents, documents)
    output = F.scaled_dot_product_attention(*leaves, attn_mask=visible, enable_gqa=True)
    output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def shared(function, length, key_heads, causal, window, by_document, dtype=torch.float64):
    """The same, of this rank's tokens."""
    group = dist.group.WORLD
    (*leaves, gradient), documents = tensors(length, key_heads, dtype)

    def part(tensor, dim):
        return shard_sequence(tensor, dim, group.rank(), group.size())

    leaves = [part(leaf, 2).requires_grad_() for leaf in leaves]
    documents = part(documents, 1) if by_document else None
    output = function(
        *leaves, is_causal=causal, window=window, documents=documents, enable_gqa=key_heads != HEADS, group=group
    )
    output.backward(part(gradient, 2))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def differences(_, key_heads, functions):
    group, found = dist.group.WORLD, []
    length = 4 * group.size()
    for case in itertools.product((True, False), (None, 3), (True, False)):
        expected = [shard_sequence(t, 2, group.rank(), group.size()) for t in on_one(length, key_heads, *case)]
        for function in functions:
            given = shared(function, length, key_heads, *case)
            found.append(max((a - b).abs().max().item() for a, b in zip(given, expected, strict=True)))
    return found


@pytest.mark.parametrize(
    ("ranks", "key_heads", "functions"),
    [
        (2, 2, (ring_attention, ulysses_attention)),
        pytest.param(4, 4, (ring_attention, ulysses_attention), marks=pytest.mark.slow),
        pytest.param(3, 2, (ring_attention,), marks=pytest.mark.slow),
        pytest.param(8, 8, (ring_attention, ulysses_attention), marks=pytest.mark.slow),
    ],
)
def test_it_is_the_attention_of_one_process(ranks, key_heads, functions):
    for found in launch({"dp": ranks}, differences, key_heads, functions):
        assert max(found) < 1e-12


def close_to_one(_, dtype, atol):
    group = dist.group.WORLD
    expected = on_one(16, HEADS, True, None, False)
    given = shared(ring_attention, 16, HEADS, True, None, False, dtype)
    assert all(tensor.dtype == dtype for tensor in given)
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a.double(), shard_sequence(b, 2, group.rank(), group.size()), atol=atol, rtol=0)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_other_dtypes(dtype, atol):
    launch({"dp": 2}, close_to_one, dtype, atol)


def sent(_, function, key_heads, length):
    with count_bytes() as counted:
        shared(function, length, key_heads, True, None, False)
    return counted.sent


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_chunks_from_both_ends_are_even_work(ranks):
    length = 8 * ranks
    pairs = [sum(p + 1 for p in local_positions(length, r, ranks).tolist()) for r in range(ranks)]
    assert len(set(pairs)) == 1
    side_by_side = torch.cat([local_positions(length, r, ranks) for r in range(ranks)])
    assert side_by_side[natural_order(length, ranks)].tolist() == list(range(length))


def one(**changes):
    given = {name: torch.randn(2, 4, 6, 8) for name in ("query", "key", "value")} | changes
    return ring_attention(**given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_mask": torch.ones(6, 6)}, "attn_mask should be None"),
        ({"dropout_p": 0.1}, "dropout_p should be 0"),
        ({"key": torch.randn(2, 2, 6, 8), "value": torch.randn(2, 2, 6, 8)}, "enable_gqa=True"),
        ({"key": torch.randn(2, 3, 6, 8), "value": torch.randn(2, 3, 6, 8), "enable_gqa": True}, "should divide"),
        ({"key": torch.randn(2, 4, 6, 8).double()}, "one dtype"),
        ({"key": torch.randn(2, 4, 6, 9), "value": torch.randn(2, 4, 6, 9)}, "one width"),
        ({"documents": torch.zeros(2, 5)}, "documents should be"),
        ({"window": 0}, "window"),
        ({"value": torch.randn(2, 4, 5, 8)}, "one shape"),
    ],
)
def test_what_it_refuses(changes, words):
    with pytest.raises(ValueError, match=words):
        one(**changes)


def test_a_sequence_that_cannot_be_cut():
    with pytest.raises(ValueError, match="multiple of 2 × cp = 4 tokens, but has 6: pad it to 8"):
        local_positions(6, 0, 2)
