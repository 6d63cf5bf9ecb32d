"""Attention over a sequence that several ranks share, and training on it, beside one process with torch's attention."""

import itertools
import random
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Events
from ignite.metrics import Accuracy, EpochMetric, Loss, MeanSquaredError
from ranks import in_float64, launch, trainer_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.context import blocks, kernels, ring, sequence
from ignite_ddl.context.api import ring_attention, ulysses_attention
from ignite_ddl.context.blocks import block_backward, block_forward, merge
from ignite_ddl.context.kernels import Pairs, attention_backward
from ignite_ddl.context.layout import local_positions, natural_order, shard_sequence, visible_pairs
from ignite_ddl.course.gpt import GPT, Embedding
from ignite_ddl.divisor import divisor_of
from ignite_ddl.lab import cost
from ignite_ddl.lab.bytes import count_bytes
from ignite_ddl.lab.memory import SavedBytes
from ignite_ddl.loss_contract import LossContract
from ignite_ddl.mesh import Mesh
from ignite_ddl.pipeline.stage import SENDS_ANY_DTYPE
from ignite_ddl.state import full_tensor

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
    visible = visible_pairs(positions, positions, causal, window, (documents, documents) if by_document else None)
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


@pytest.mark.parametrize("function", [ring_attention, ulysses_attention])
def test_under_autocast_it_takes_the_dtypes_that_torchs_attention_takes(function):
    leaves = [torch.randn(2, 4, 8, 8).requires_grad_() for _ in range(3)]
    found = []
    for attention in (function, F.scaled_dot_product_attention):
        with torch.autocast("cpu", torch.bfloat16):
            output = attention(*leaves[:2], leaves[2].bfloat16(), is_causal=True)
        gradients = torch.autograd.grad(output.sum(), leaves)
        assert output.dtype == torch.bfloat16
        assert all(gradient.dtype == torch.float32 for gradient in gradients)
        found.append([output, *gradients])
    for given, expected in zip(*found, strict=True):
        torch.testing.assert_close(given, expected, atol=0.02, rtol=0.02)


def counts(_, function, key_heads, length, dtype=torch.float64):
    """Bytes that this rank sends forward and backward, and bytes that it keeps between them."""
    group = dist.group.WORLD
    (*leaves, gradient), _ = tensors(length, key_heads, dtype)
    parts = (shard_sequence(leaf, 2, group.rank(), group.size()) for leaf in leaves)
    leaves = [part.requires_grad_() for part in parts]
    with SavedBytes() as saved, count_bytes() as forward:
        output = function(*leaves, is_causal=True, enable_gqa=True, group=group)
    with count_bytes() as backward:
        output.backward(shard_sequence(gradient, 2, group.rank(), group.size()))
    exchanged = (group.size() - 1) / group.size()  # of an all-to-all, a rank keeps its own part
    sent = [c.of("send").put_in + exchanged * c.of("all_to_all").put_in for c in (forward, backward)]
    assert all(set(c.ops) <= {"send", "recv", "all_to_all"} for c in (forward, backward))
    return *sent, saved.peak


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_and_memory_are_those_of_the_formulas(ranks):
    length, key_heads = 16, 4
    heads, of_keys = HEADS * WIDTH, key_heads * WIDTH  # h and h_kv
    row = BATCH * length * torch.float64.itemsize  # T s
    logsumexp = BATCH * HEADS * length * torch.float64.itemsize
    forward = 2 * (ranks - 1) / ranks * row * of_keys
    home = 2 * row * of_keys / ranks  # one hop
    kept = (row * (2 * heads + 2 * of_keys) + logsumexp) / ranks
    assert set(launch({"dp": ranks}, counts, ring_attention, key_heads, length)) == {
        (forward, 2 * forward + home, kept)
    }
    both = (ranks - 1) / ranks**2 * row * (2 * heads + 2 * of_keys)
    ulysses = launch({"dp": ranks}, counts, ulysses_attention, key_heads, length)
    assert {found[:2] for found in ulysses} == {(both, both)}
    sizes = BATCH, length, heads, of_keys, cost.Link(0, 1), 8
    on_paper = cost.ring_attention(ranks, *sizes[:2], *sizes[3:], 8), cost.ulysses_attention(ranks, *sizes)
    sent = [(one.forward.bytes[0], one.backward.bytes[0]) for one in on_paper]
    assert sent == [(forward, 2 * forward + home), (both, both)]


def test_of_bfloat16_the_gradients_of_keys_and_values_travel_in_float32():
    ranks, length, key_heads = 2, 16, 4
    numbers = 2 * BATCH * length * key_heads * WIDTH  # keys and values of a row
    keys = (ranks - 1) / ranks * numbers * torch.bfloat16.itemsize
    gradients = numbers * torch.float32.itemsize  # P hops of a P-th
    ring = launch({"dp": ranks}, counts, ring_attention, key_heads, length, torch.bfloat16)
    assert {found[:2] for found in ring} == {(keys, keys + gradients)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_chunks_from_both_ends_are_even_work(ranks):
    length = 8 * ranks
    pairs = [sum(p + 1 for p in local_positions(length, r, ranks).tolist()) for r in range(ranks)]
    assert len(set(pairs)) == 1
    side_by_side = torch.cat([local_positions(length, r, ranks) for r in range(ranks)])
    assert side_by_side[natural_order(length, ranks)].tolist() == list(range(length))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_order_is_that_of_torchs_balancer(ranks):
    torchs = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    expected = torchs._HeadTailLoadBalancer(32, ranks, "cpu")
    ours = torch.cat([local_positions(32, rank, ranks) for rank in range(ranks)])
    assert ours.tolist() == expected._generate_indices()[0].tolist()
    assert natural_order(32, ranks).tolist() == expected._generate_indices(restore=True)[0].tolist()


def test_blocks_are_merged_as_by_torchs_merger():
    torchs = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    expected, ours = torchs._SDPAMerger(False, 2), None
    query, *pairs = torch.randn(7, 2, 3, 8, 4, dtype=torch.float64)
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        block = block_forward(Pairs(query, key, value, False, None, 0.5))
        expected.step(*block, False)
        ours = block if ours is None else merge(ours, block)
    torch.testing.assert_close(ours, expected.results(), atol=1e-14, rtol=0)


def test_a_row_that_sees_nothing_of_a_block():
    query, key, value = torch.randn(3, 1, 2, 4, 4, dtype=torch.float64)
    visible = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(-1)  # row 0 sees nothing
    empty = torch.zeros_like(visible)
    output, logsumexp = block_forward(Pairs(query, key, value, False, visible, 0.5))
    assert logsumexp[:, :, 0].eq(float("-inf")).all()
    assert not output[:, :, 0].any()
    nothing = block_forward(Pairs(query, key, value, False, empty, 0.5))
    for merged in (merge(nothing, (output, logsumexp)), merge((output, logsumexp), nothing)):
        torch.testing.assert_close(merged, (output, logsumexp), atol=0, rtol=0)
    both = merge(nothing, nothing)
    assert not both[0].any()
    assert both[1].eq(float("-inf")).all()


def of_rows(width, rows=slice(None), device="meta", dtype=torch.bfloat16):
    """Queries, of which a rank may have cut some rows, and keys; logarithms are cut like queries."""
    query, key = (torch.empty(2, 4, 8, width, dtype=dtype, device=device) for _ in range(2))
    logsumexp = torch.empty(2, 4, 8, device=device)
    return Pairs(query[:, :, rows], key, key, False, None, 1.0), logsumexp[:, :, rows]


def test_the_flash_kernel_gets_logarithms_in_contiguous_memory(monkeypatch):
    """CUDA's reads them by their address alone: those of a later half of the rows were others' (seen on an H200)."""
    given, kernel = [], torch.ops.aten._scaled_dot_product_flash_attention_backward
    spied = SimpleNamespace(
        _scaled_dot_product_flash_attention_backward=lambda *a, **kw: given.append(a) or kernel(*a, **kw)
    )
    monkeypatch.setattr(kernels, "_aten", spied)
    pairs, logsumexp = of_rows(8, slice(4, None))
    assert not logsumexp.is_contiguous()
    attention_backward(torch.empty_like(pairs.query), pairs, torch.empty_like(pairs.query), logsumexp)
    assert all(tensor.is_contiguous() for tensor in given[0][5:6])
    assert given[0][5].shape == logsumexp.shape


def test_the_flash_kernel_gets_queries_whose_numbers_of_a_head_are_side_by_side(monkeypatch):
    monkeypatch.setattr(ring._RingAttention, "apply", lambda query, *_: query)
    shared = ring.Ring(None, False, None, None, 1.0)
    as_usual, transposed = torch.randn(1, 8, 2, 4).transpose(1, 2), torch.randn(1, 2, 4, 8).mT
    assert ring.ring(as_usual, as_usual, as_usual, shared) is as_usual
    found = ring.ring(transposed, as_usual, as_usual, shared)
    assert found.stride(-1) == 1
    assert torch.equal(found, transposed)


def test_positions_are_made_on_the_device():
    """A list in the place of an index would be copied there in each call, and waited for."""

    class NoIndex(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "index" not in func.__name__
            return func(*args, **(kwargs or {}))

    with NoIndex():
        assert local_positions(8, 1, 2).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("width", "dtype", "capability", "can"),
    [
        (64, torch.bfloat16, (9, 0), True),
        (64, torch.float16, (8, 0), True),
        (64, torch.float16, (7, 5), False),  # a T4
        (64, torch.float32, (9, 0), False),
        (12, torch.float16, (9, 0), False),
        (264, torch.float16, (9, 0), False),
    ],
)
def test_the_flash_kernel_is_taken_where_it_can_compute(width, dtype, capability, can, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    pairs, _ = of_rows(width, dtype=dtype)
    on_cuda = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=pairs.query.shape)
    assert kernels.has_kernel(pairs._replace(query=on_cuda)) == can


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_without_a_kernel_are_those_of_the_kernel(causal, monkeypatch):
    """As on a GPU with a mask, or in float32; fewer key heads than query heads."""
    torch.manual_seed(0)
    query, gradient = torch.randn(2, 2, 6, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 3, 4, 8, dtype=torch.float64)
    some = torch.eye(4, dtype=torch.bool) | (torch.rand(2, 1, 4, 4) < 0.5)
    for visible in (None,) if causal else (None, some):
        pairs, found = Pairs(query, key, value, causal, visible, 0.5), []
        for has_kernel in (True, False):
            monkeypatch.setattr(blocks, "has_kernel", lambda pairs, has_kernel=has_kernel: has_kernel)
            block = block_forward(pairs)
            found.append([*block, *block_backward(gradient, pairs, block)])
        torch.testing.assert_close(*found, atol=1e-14, rtol=0)


def one(**changes):
    given = {name: torch.randn(2, 4, 6, 8) for name in ("query", "key", "value")} | changes
    return ring_attention(**given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_mask": torch.ones(6, 6)}, "attn_mask should be None"),
        ({"dropout_p": 0.1}, "dropout_p should be 0"),
        ({"key": torch.randn(2, 2, 6, 8), "value": torch.randn(2, 2, 6, 8)}, "where enable_gqa=True says so"),
        ({"key": torch.randn(2, 3, 6, 8), "value": torch.randn(2, 3, 6, 8), "enable_gqa": True}, "divide query's"),
        ({"key": torch.randn(2, 4, 6, 8).double()}, "one dtype"),
        ({"key": torch.randn(2, 4, 6, 9), "value": torch.randn(2, 4, 6, 9)}, "of one shape"),
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


# --------------------------------------------------------------------------------------------------- training

WORDS, LENGTH, ROWS = 20, 16, 13  # batches of 8 and 5 rows
PLAN = {name: style for name, style in GPT.tensor_plan.items() if not name.endswith(".mix")}


class Placed(Embedding):
    def forward(self, ids):
        return self.token(ids) + self.position[ddl.sequence_positions(ids.shape[1])]


class Mix(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, k, v):
        return self.function(q, k, v, is_causal=True)


def text_model(function=ring_attention, dropout=0.0):
    model = GPT(WORDS, LENGTH, 16, 4, n_blocks=2, dropout=dropout)
    model.embed.__class__ = Placed
    for index in range(2):
        getattr(model, f"block{index}").attention.mix = Mix(function)
    return model


def masks(local_rank):
    """What the dropout of the first block let through in the last step; every rank has the same seed."""
    torch.manual_seed(3)
    ids = torch.randint(WORDS, (8, LENGTH + 1))
    loader = ddl.auto_dataloader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=4)
    model = ddl.auto_model(text_model(dropout=0.5), PLAN)
    trainer, found = trainer_of(model, F.cross_entropy, model_transform=lambda logits: logits.transpose(1, 2)), []
    dropout = next(module for name, module in model.named_modules() if name.endswith("block0.dropout"))
    dropout.register_forward_hook(lambda module, given, output: found.append(output != 0))
    trainer.run(loader)
    return found[-1], torch.initial_seed()


@pytest.mark.parametrize("axes", [{"cp": 2}, pytest.param({"dp": 2, "cp": 2}, marks=pytest.mark.slow),
                                  pytest.param({"cp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str)  # fmt: skip
def test_dropout_differs_over_tokens_and_not_over_tp(axes):
    ranks = launch(axes, masks)
    tp = axes.get("tp", 1)
    for index, (mask, _) in enumerate(ranks):
        first, _ = ranks[index // tp * tp]  # its first tp peer
        assert mask.equal(first)
        assert 0.3 < mask.double().mean() < 0.7
    assert not any(ranks[index][0].equal(ranks[index + tp][0]) for index in range(0, len(ranks), 2 * tp))
    assert ranks[0][1] == 3  # rank 0's seed, by which loaders shuffle, is the user's


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)

    def forward(self, batch):
        return {"x": self.word(batch["ids"]) + self.place(batch["places"]), "documents": batch["documents"]}


class Documents(nn.Module):
    """Documents side by side in a row, grouped-query heads, a window."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.q, self.k, self.v, self.out = (nn.Linear(16, width) for width in (16, 8, 8, 16))

    def forward(self, batch):
        q, k, v = (part(batch["x"]).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.function is F.scaled_dot_product_attention:
            positions, documents = torch.arange(LENGTH), batch["documents"]
            mask = visible_pairs(positions, positions, True, 5, (documents, documents))
            mixed = self.function(q, k, v, mask, enable_gqa=True)
        else:
            mixed = self.function(q, k, v, is_causal=True, window=5, documents=batch["documents"], enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def packed_model(function):
    layers = {"embed": Places(), "attention": Documents(function), "head": nn.Linear(16, WORDS)}
    return nn.Sequential(OrderedDict(layers))


PACKED_PLAN = {"attention.[qkv]": ddl.Column(), "attention.out": ddl.Row()}


class Rows(torch.utils.data.Dataset):
    """Dicts with a label for each row beside the tokens."""

    def __init__(self, packed):
        draw = torch.Generator().manual_seed(1)
        self.ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=draw)
        self.documents = torch.randint(3, (ROWS, LENGTH), generator=draw).sort(1).values if packed else None

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        ids = self.ids[index]
        x = {"ids": ids[:-1], "label": index}
        if self.documents is not None:
            documents = self.documents[index]
            begins = torch.searchsorted(documents, documents)
            x |= {"documents": documents, "places": torch.arange(LENGTH) - begins}
        return x, ids[1:]


def in_blocks(function):
    """Besides, attention inside blocks of four tokens: a rank of two has chunks of four."""
    model = text_model(function)
    model.block0.also = Blocks(4)
    plain = model.block0.forward
    model.block0.forward = lambda x: model.block0.also(plain(x))
    return model


def hide(y):
    """Targets that do not count: of an odd row all in the middle, which is all that rank 1 of 2 has."""
    y = y.clone()
    y[1::2, LENGTH // 4 : 3 * LENGTH // 4] = -100
    y[0, :3] = -100
    return y


def token_loss(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def counted(y):
    return (y != -100).sum()


def texts(length=LENGTH, rows=ROWS, transform=lambda y: y):
    ids = torch.randint(WORDS, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(ids[:, :-1].contiguous(), transform(ids[:, 1:].clone()))


class Sentences(torch.utils.data.Dataset):
    """Tokens alone, one more than the model reads; ``prepare_batch`` makes the rest."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        x, y = texts()[index]
        return torch.cat([x, y[-1:]])


def shifted(batch, device, non_blocking):
    return batch[:, :-1], batch[:, 1:]


def rolled(batch, device, non_blocking):
    """Targets, a row for each token; positions from 0; and the weight of a row, by the tokens that it has in all."""
    x = batch[0]
    places = (x + torch.arange(x.shape[1])) % WORDS
    return (places, (x % 2).sum(1).double()), x.roll(-1, 1).flatten()


def weighted_model(function):
    model = text_model(function)
    model.register_forward_hook(lambda model, args, output: output * weight_of[0] / LENGTH)
    model.register_forward_pre_hook(take_weight)
    return model


weight_of: list = []


def take_weight(model, args):
    ids, weight_of[:] = args[0][0], [args[0][1][:, None, None]]
    return ids


KINDS = {
    "text": (text_model, texts, {"max_norm": 0.1}),
    "blocks": (in_blocks, texts, {}),
    "packed": (packed_model, lambda: Rows(packed=True), {"max_norm": 0.1}),
    "ignored": (text_model, lambda: texts(transform=hide), {"loss_divisor": counted}),
    "accumulated": (text_model, lambda: texts(transform=hide),
                    {"loss_divisor": counted, "gradient_accumulation_steps": 3}),
    "known loss": (text_model, lambda: texts(transform=hide),
                   {"loss_fn": nn.CrossEntropyLoss(), "model_transform": lambda output: output.transpose(1, 2)}),
    "shifted": (text_model, Sentences, {"prepare_batch": shifted}),
    "rolled": (weighted_model, texts, {"prepare_batch": rolled, "loss_divisor": len}),
}  # fmt: skip


def flat(output):
    y_pred, y = output
    return y_pred.flatten(0, 1), y.flatten()


def right_classes(_, classes):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4, 8, classes), torch.randint(classes, (4, 8)))
    metrics = {"accuracy": Accuracy(flat), "loss": Loss(F.cross_entropy, flat)}
    evaluator = ddl.create_supervised_evaluator(ddl.auto_model(nn.Identity()), metrics)
    return evaluator.run(ddl.auto_dataloader(data, batch_size=2)).metrics


def test_as_many_classes_as_a_rank_has_tokens():
    assert launch({"cp": 2}, right_classes, 4) == [pytest.approx(right_classes(0, 4))] * 2


@in_float64
def trained(_, kind, function=ring_attention, plan=None, shard=None, epochs=3, **options):
    """Losses and norms, first gradients, weights and metrics."""
    make, data, given = KINDS[kind]
    torch.manual_seed(0)
    model, loader = make(function), ddl.auto_dataloader(data(), batch_size=8, shuffle=True)
    model = ddl.auto_model(model, plan, shard=shard)
    trainer = trainer_of(model, **({"loss_fn": token_loss, "lr": 0.5} | given | options))
    numbers, gradients = [], {}

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine):
        numbers.append(torch.tensor([engine.state.output, getattr(engine.state, "grad_norm", 0.0)]))
        if engine.state.iteration == 1 and "gradient_accumulation_steps" not in given:
            gradients.update(
                {name: full_tensor(p.grad, p).clone() for name, p in model.named_parameters(remove_duplicate=False)}
            )

    trainer.run(loader, max_epochs=epochs)
    metrics = {"accuracy": Accuracy(flat), "loss": Loss(F.cross_entropy, flat)}
    metrics["rows"] = EpochMetric(lambda y_pred, y: float((y_pred.argmax(-1) * y).double().mean()), flat, False)
    prepared = {name: given[name] for name in given if name == "prepare_batch"}
    evaluator = ddl.create_supervised_evaluator(model, metrics, **prepared)
    state = evaluator.run(loader).metrics
    found = {f"number {n}": pair for n, pair in enumerate(numbers)} | gradients
    found |= {f"weight {name}": value for name, value in ddl.full_state_dict(model).items()}
    return found | {name: torch.tensor(value) for name, value in state.items()}


def error_on(mesh, kind, within=1e-12, **options):
    expected = trained(0, kind, F.scaled_dot_product_attention, **{k: v for k, v in options.items() if k == "amp_mode"})
    worst = 0.0
    for found in launch(mesh, trained_on, kind, options):
        assert found.keys() - {"rows"} <= expected.keys()
        worst = max(worst, *((value - expected[name]).abs().max().item() for name, value in found.items()))
    assert worst <= within
    return worst


def trained_on(_, kind, options):
    return trained(_, kind, **options)


TRAININGS = {
    "cp2 packed": ({"cp": 2}, "packed", {}),
    "cp2 blocks": ({"cp": 2}, "blocks", {}),
    "dp2 x cp2 shard ignored": ({"dp": 2, "cp": 2}, "ignored", {"shard": True}),
    "cp2 x tp2": ({"cp": 2, "tp": 2}, "text", {"plan": PLAN}),
    "cp2 shifted": ({"cp": 2}, "shifted", {}),
    "dp2 x cp2 rolled": ({"dp": 2, "cp": 2}, "rolled", {}),
}
SLOW = {
    "cp4": ({"cp": 4}, "text", {}),
    "cp4 packed shard": ({"cp": 4}, "packed", {"shard": True}),
    "cp2 x tp2 packed": ({"cp": 2, "tp": 2}, "packed", {"plan": PACKED_PLAN}),
    "dp2 x cp2": ({"dp": 2, "cp": 2}, "text", {}),
    "dp2 x cp2 packed shard": ({"dp": 2, "cp": 2}, "packed", {"shard": True}),
    "pp2 x cp2 packed": ({"pp": 2, "cp": 2}, "packed", {}),
    "dp2 x cp2 x tp2 packed": ({"dp": 2, "cp": 2, "tp": 2}, "packed", {"plan": PACKED_PLAN}),
    "ulysses": ({"cp": 2}, "text", {"function": ulysses_attention}),
    "ulysses packed": ({"cp": 2}, "packed", {"function": ulysses_attention}),
    "ulysses dp2 x cp2 x tp2": ({"dp": 2, "cp": 2, "tp": 2}, "text", {"function": ulysses_attention, "plan": PLAN}),
    "known loss": ({"cp": 2}, "known loss", {}),
    "accumulated": ({"cp": 2}, "accumulated", {}),
    "accumulated shard": ({"dp": 2, "cp": 2}, "accumulated", {"shard": True}),
    "pp2 x cp2": ({"pp": 2, "cp": 2}, "text", {}),
    "pp2 x cp2 accumulated": ({"pp": 2, "cp": 2}, "accumulated", {}),
    "dp2 x cp2 x tp2": ({"dp": 2, "cp": 2, "tp": 2}, "ignored", {"plan": PLAN}),
    "dp4 x cp2": ({"dp": 4, "cp": 2}, "ignored", {}),
    "dp_replicate2 x dp_shard2 x cp2": ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, "text", {}),
    "dp_replicate2 x cp2": ({"dp_replicate": 2, "dp_shard": 1, "cp": 2}, "packed", {}),
}


@pytest.mark.parametrize("name", [*TRAININGS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_training_gives_the_numbers_of_one_process(name):
    mesh, kind, options = (TRAININGS | SLOW)[name]
    if name == "pp2 x cp2 packed" and not SENDS_ANY_DTYPE:
        pytest.skip("torch 2.11 sends floating-point tensors only")
    expected = trained(0, kind, F.scaled_dot_product_attention)
    for found in launch(mesh, trained_on, kind, options):
        assert {"accuracy", "loss", "rows"} < found.keys() <= expected.keys()
        for key, value in found.items():
            torch.testing.assert_close(
                value, expected[key], atol=1e-12, rtol=0, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.mark.slow
def test_autocast_is_as_close_as_bfloat16():
    expected = trained(0, "packed", F.scaled_dot_product_attention)
    for found in launch({"dp": 2, "cp": 2}, trained_on, "packed", {"amp_mode": "bfloat16"}):
        assert 0 < max((value - expected[key]).abs().max().item() for key, value in found.items()) < 0.05


# ------------------------------------------------------------------------------------- what cannot be right


class Also(nn.Module):
    """Something else at the end of each block."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


def with_(function, **modules):
    def make(attention=ring_attention):
        model = text_model(attention)
        model.block0.also = Also(function, **modules)
        plain = model.block0.forward
        model.block0.forward = lambda x: model.block0.also(plain(x))
        return model

    return make


def one_head():
    model = GPT(WORDS, LENGTH, 16, 1, n_blocks=1)
    model.embed.__class__, model.block0.attention.mix = Placed, Mix(ulysses_attention)
    return model


def zeros():
    conv = nn.Conv1d(16, 16, 3, padding=1)
    nn.init.zeros_(conv.weight)
    return conv


def counting():
    model = text_model()
    model.embed.__class__ = Embedding  # position[:T]
    return model


def ended():
    """Texts whose first row has no end."""
    data = texts()
    data.tensors[0][0].clamp_(min=1)
    return data


def counts_ends():
    model = text_model()
    for index in range(2):
        getattr(model, f"block{index}").attention.mix.function = in_document
    model.register_forward_pre_hook(note_ends)
    return model


def note_ends(model, args):
    _document[:] = [args[0].eq(0).long().cumsum(1)]


_document: list = []


def in_document(q, k, v, is_causal):
    return ring_attention(q, k, v, is_causal=is_causal, documents=_document[0])


class Blocks(nn.Module):
    """Attention inside blocks of some tokens, which ranks have as a whole if they are no longer than a chunk."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        blocks = x.unflatten(1, (-1, self.size))
        return x + F.scaled_dot_product_attention(blocks, blocks, blocks).flatten(1, 2)


def shifting(output, y):
    return token_loss(output[:, :-1], y[:, 1:])


def pair_masks():
    return TensorDataset(*texts().tensors, torch.ones(ROWS, 1, LENGTH, LENGTH))


class Drawn(torch.utils.data.Dataset):
    """Draws other random numbers on each rank."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        ids = torch.tensor([random.SystemRandom().randrange(WORDS) for _ in range(LENGTH + 1)])
        return ids[:-1], ids[1:]


def by_x(batch, device, non_blocking):
    return (batch[0], batch[2]), batch[1]


def targets_after_one(batch, device, non_blocking):
    return batch[0], batch[0][:, 1:]


def features():
    y = texts().tensors[1]
    return TensorDataset(F.one_hot(y % 6, 6).float(), y)


def flattened(batch, device, non_blocking):
    return batch[0].flatten(0, 1), batch[1].flatten()


TOKENS = "gives other outputs for a cp rank's tokens than for the full sequence"
REFUSALS = {
    "torch's attention": ({"make": lambda: text_model(F.scaled_dot_product_attention)},
                          f"'block0.attention.mix' {TOKENS}"),
    "positions": ({"make": counting}, f"'embed' {TOKENS}"),
    "convolution": ({"make": with_(lambda self, x: x + self.conv(x.mT).mT, conv=nn.Conv1d(16, 16, 3, padding=1))},
                    f"'block0.also.conv' {TOKENS}"),
    "long reach": ({"make": with_(lambda self, x: x + self.conv(x.mT).mT,
                                  conv=nn.Conv1d(16, 16, 3, padding=8, dilation=8))}, f"'block0.also.conv' {TOKENS}"),
    "convolution of zeros": ({"make": with_(lambda self, x: x + self.conv(x.mT).mT, conv=zeros())},
                             f"'block0.also.conv' {TOKENS}"),
    "mean": ({"make": with_(lambda self, x: x + x.mean(1, keepdim=True))}, f"'block0.also' {TOKENS}"),
    "BatchNorm": ({"make": with_(lambda self, x: self.norm(x.mT).mT, norm=nn.BatchNorm1d(16))},
                  f"'block0.also.norm' {TOKENS}"),
    "InstanceNorm": ({"make": with_(lambda self, x: self.norm(x.mT).mT, norm=nn.InstanceNorm1d(16))},
                     f"'block0.also.norm' {TOKENS}"),
    "recurrence": ({"make": with_(lambda self, x: x + self.rnn(x)[0], rnn=nn.RNN(16, 16, batch_first=True))},
                   f"'block0.also.rnn' {TOKENS}"),
    "documents counted from words": ({"make": counts_ends, "data": ended}, TOKENS),
    "blocks of more than a chunk": ({"make": with_(lambda self, x: self.blocks(x), blocks=Blocks(8))},
                                    f"'block0.also.blocks' {TOKENS}"),
    "a layer over tokens": ({"make": with_(lambda self, x: x + self.over(x.mT).mT, over=nn.Linear(LENGTH, LENGTH))},
                            "a model that gets a cp rank's part of the tokens of a sequence"),
    "a branch on their number": ({"make": with_(lambda self, x: x * (2.0 if x.shape[1] > LENGTH // 2 else 1.0))},
                                 f"'block0.also' {TOKENS}"),
    "one token": ({"make": with_(lambda self, x: x + x[:, :1])}, f"'block0.also' {TOKENS}"),
    "more ranks than key heads": ({"make": one_head}, "cp = 2 should divide the 1 heads of key and value"),
    "other loader": ({"loader": lambda: torch.utils.data.DataLoader(texts(), batch_size=8)},
                     "batches should come from ddl.auto_dataloader"),
    "odd length": ({"data": lambda: texts(6)}, "8, with targets that the loss ignores; if dim 1 counts features"),
    "masks of pairs": ({"data": pair_masks, "prepare_batch": by_x}, "a mask of pairs of tokens is said by documents="),
    "labels of rows": ({"data": lambda: TensorDataset(texts().tensors[0], torch.ones(ROWS, 3))}, "in dim 1, as many"),
    "other rows": ({"data": Drawn}, "cp peers should get the same rows"),
    "evaluation": ({"make": lambda: text_model(F.scaled_dot_product_attention), "evaluates": True}, TOKENS),
    "counting rows": ({"evaluates": True, "metrics": lambda: {"mse": MeanSquaredError(of_logits)}},
                      "MeanSquaredError counts rows"),
    "rows in EpochMetric": ({"evaluates": True, "metrics": lambda: {"rows": EpochMetric(by_row, of_logits, False)}},
                            "EpochMetric counts rows"),
    "the last token": ({"evaluates": True, "metrics": lambda: {"last": Accuracy(of_the_last)}},
                       "output_transform of Accuracy makes something of a token from other tokens"),
    "targets of the next token": ({"evaluates": True, "metrics": lambda: {"next": Accuracy(of_the_next)}},
                                  "output_transform of Accuracy makes something of a token from other tokens"),
    "targets of the next token, after batches of another length": (
        {"evaluates": True, "metrics": dict, "beside": lambda: texts(LENGTH // 2)},
        "output_transform of Accuracy makes something of a token from other tokens"),
    "a mean in a transform": ({"model_transform": lambda output: output - output.mean(1, keepdim=True)},
                              "model_transform makes something of a token from other tokens"),
    "positions in a transform": ({"model_transform": lambda output: output * torch.arange(output.shape[1])[:, None]},
                                 "model_transform makes something of a token from other tokens, or by its place"),
    "tokens left out": ({"model_transform": lambda output: output[:, :-1].mT, "prepare_batch": targets_after_one,
                         "loss_fn": F.cross_entropy}, "as many in each tensor that has one"),
    "a row for each token": ({"make": lambda: nn.Linear(6, WORDS), "data": features, "prepare_batch": flattened,
                              "loss_fn": F.cross_entropy, "loss_divisor": len},
                             "x should count the tokens of its sequences in dim 1"),
    "a sum over tokens": ({"loss_fn": lambda output, y: summed_over_tokens(output, y)},
                          "divide its sum over tokens and rows by a constant (the batch size), with loss_divisor"),
    "all tokens": ({"evaluates": True, "metrics": lambda: {"all": Accuracy(of_all)}}, "nothing"),
}  # fmt: skip


def of_logits(output):
    return output[0].argmax(-1), output[1]


def of_the_last(output):
    return output[0][:, -1], output[1][:, -1]


def of_the_next(output):
    return output[0].flatten(0, 1), output[1].roll(-1, 1).flatten()


def of_all(output):
    return output[0].flatten(0, 1), output[1].flatten()


def by_row(y_pred, y):
    return float((y_pred == y).sum(1).double().mean())


def attempts(local_rank, names):
    random.seed(local_rank)
    return [attempt(**REFUSALS[name][0]) for name in names]


def attempt(make=text_model, data=texts, loader=None, evaluates=False, metrics=dict, beside=None, **options):
    """What the step says, at most of one kind."""
    torch.manual_seed(0)
    with torch.random.fork_rng():
        model = ddl.auto_model(make())
    loader = ddl.auto_dataloader(data(), batch_size=8) if loader is None else loader()
    if evaluates:
        engine = ddl.create_supervised_evaluator(model, metrics())
    else:
        engine = trainer_of(model, **({"loss_fn": token_loss} | options))
    engine.logger.disabled = True
    if beside is not None:
        others, within = ddl.auto_dataloader(beside(), batch_size=8), ddl.create_supervised_evaluator(model)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: within.run(others))
        Accuracy(of_the_next).attach(engine, "next")
    try:
        engine.run(loader)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def said():
    found = launch({"cp": 2}, attempts, list(REFUSALS))
    return {name: {rank[n] for rank in found} for n, name in enumerate(REFUSALS)}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_would_be_another_number_is_refused(name, said):
    assert all(REFUSALS[name][1] in text for text in said[name]), said[name]


def summed_over_tokens(output, y):
    return F.cross_entropy(output.mT, y.abs() % WORDS, reduction="sum") / len(y)


LOSSES = {
    "sum": (lambda output, y: 1.0 * F.cross_entropy(output.mT, y, reduction="sum"), None, "a mean over tokens"),
    "shift": (shifting, None, "targets that it shifts by one"),
    "declared shift": (shifting, counted, "targets that it shifts by one"),
    "rows declared of a sum": (lambda output, y: token_loss(output, y) * y.shape[1], "rows", "a mean over tokens"),
    "uneven mean": (token_loss, None, "a mean over those that count"),
    "padding that counts": (token_loss, lambda y: y.numel(), "a mean over those that count"),
    "a sum over tokens, by rows": (summed_over_tokens, len, "a mean over tokens"),
    "a mean, by rows": (lambda output, y: F.cross_entropy(output.mT, y.abs() % WORDS), len, ""),
    "fails": (lambda output, y: token_loss(output, y.reshape(8, LENGTH)), None, "fails with a part of them"),
    "fails, declared": (lambda output, y: token_loss(output, y.reshape(8, LENGTH)), counted, ""),
    "mean": (lambda output, y: F.cross_entropy(output.mT, y.abs() % WORDS), None, ""),
    "counted": (token_loss, counted, ""),
    "declared sum": (lambda output, y: 1.0 * F.cross_entropy(output.mT, y, reduction="sum"), "sum", ""),
    "mask": (lambda output, y: (output.mean(-1) * (y > 3)).sum() / (y > 3).sum(), lambda y: (y > 3).sum(), ""),
}


def test_rows_of_tokens_have_their_tokens_in_dim_0_though_there_are_as_many_classes(monkeypatch):
    monkeypatch.setattr(sequence, "_tokens", WORDS)
    mesh = Mesh({"pp": 1, "dp": 1, "tp": 1, "cp": 2}, 0, None, {})
    contract = LossContract(F.cross_entropy, divisor_of(F.cross_entropy, len), mesh, None)
    contract.n_rows, contract.pairs = 8, [(torch.randn(8 * WORDS, WORDS), torch.arange(WORDS).repeat(8))]
    contract.compare()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_a_part_of_the_tokens_has_to_add_up(name, monkeypatch):
    loss_fn, declared, words = LOSSES[name]
    monkeypatch.setattr(sequence, "_tokens", LENGTH)
    mesh = Mesh({"pp": 1, "dp": 1, "tp": 1, "cp": 2}, 0, None, {})
    contract = LossContract(loss_fn, divisor_of(loss_fn, declared), mesh, None)
    draw = torch.Generator().manual_seed(1)
    output, y = torch.randn(8, LENGTH, WORDS, generator=draw), hide(torch.randint(WORDS, (8, LENGTH), generator=draw))
    contract.pairs = [(output, y)]
    if words:
        with pytest.raises(ValueError, match=words):
            contract.compare()
    else:
        contract.compare()


def outputs_outside_of_an_engine(local_rank):
    """What a model says of full sequences, after a rank's part of some, also of some that repeat."""
    torch.manual_seed(0)
    ids, repeated = torch.randint(WORDS, (4, LENGTH)), torch.arange(LENGTH).remainder(2).expand(4, -1)
    model, plain = text_model(), nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, 2))
    model.embed.position = nn.Parameter(torch.randn(4 * LENGTH, 16))  # there is a row for each wrong position
    model, plain = ddl.auto_model(model), ddl.auto_model(plain)
    plain(ids)  # which does not ask who has the other tokens
    model(repeated[:, ddl.sequence_positions(LENGTH // 2)])  # the same on each rank
    model(ids[:, ddl.sequence_positions(LENGTH // 2)])
    said = []
    for _ in range(3):
        model(ids[:, ddl.sequence_positions(LENGTH // 2)])
    for rows in (ids, ids[:2], ids):  # the first calls with as many tokens, of which the third is not looked at
        try:
            model(rows)
        except ValueError as error:
            said.append(str(error))
    return said


def test_full_sequences_outside_of_an_engine_are_refused():
    for said in launch({"cp": 2}, outputs_outside_of_an_engine):
        assert len(said) == 2
        assert all("cp ranks should have different tokens of a sequence, but all 2 got the same" in one for one in said)


def test_a_loss_that_shifts_is_refused_in_the_first_step():
    with pytest.raises(ddl.RankError, match="targets that it shifts by one"):
        launch({"cp": 2}, trained_on, "text", {"loss_fn": shifting, "loss_divisor": counted})


# ------------------------------------------------------------------------------ beside training: what else there is


@in_float64
def saved_and_resumed(_, folder, first, last):
    """Losses of the iterations after ``first``, of a run that is saved there if it begins at 0."""
    torch.manual_seed(0)
    loader = ddl.auto_dataloader(texts(), batch_size=4, shuffle=True)
    model = ddl.auto_model(text_model())
    trainer, losses = trainer_of(model, token_loss, lr=0.5), []
    parts = {"model": model, "trainer": trainer, "loader": loader}
    if first:
        ddl.Checkpoint.load_objects(parts, folder / f"checkpoint_{first}")
    else:
        checkpoint = ddl.Checkpoint(parts, folder, n_saved=None)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), checkpoint)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    trainer.run(loader, max_epochs=last)
    return losses


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cp": 2}, {}),
        pytest.param({"cp": 2}, {"dp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, {"cp": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, {"cp": 4}, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "dp": 2}, {"cp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_with_another_number_of_cp_ranks(first, second, tmp_path):
    before = launch(first, saved_and_resumed, tmp_path, 0, 2)[0]
    after = launch(second, saved_and_resumed, tmp_path, 3, 2) if second else [saved_and_resumed(0, tmp_path, 3, 2)]
    for losses in after:
        assert losses == pytest.approx(before[3:], abs=1e-12)


def looks(_):
    mesh = ddl.get_mesh()
    model = ddl.auto_model(text_model(dropout=0.1))
    trainer = trainer_of(model, token_loss)
    ddl.Throughput().attach(trainer)
    metrics = trainer.run(ddl.auto_dataloader(texts(), batch_size=8)).metrics
    return str(mesh), repr(mesh), metrics["tokens/s"] / metrics["samples/s"], list(ddl.full_state_dict(model))


def test_what_is_said_of_a_mesh_with_cp():
    shown, short, length, names = launch({"cp": 2}, looks)[0]
    assert shown == "mesh dp=1 × pp=1 × cp=2 × tp=1, 2 ranks\n  pp 0  dp 0  cp 0: [0]\n  pp 0  dp 0  cp 1:  1 "
    assert short == "Mesh(dp=1, pp=1, cp=2, tp=1, rank=0)"
    assert length == pytest.approx(LENGTH)
    assert names == list(text_model().state_dict())


def test_parity_is_checked_on_cp(capsys):
    batch = tuple(texts(8, 8).tensors)
    report = ddl.check_parity(text_model, None, batch, token_loss, cp=2, steps=2)
    assert report.equal
    assert report.worst.error < 1e-12
    assert report.text.startswith("dp=1 pp=1 cp=2 tp=1")
    with pytest.raises(ValueError, match=f"'block0.attention.mix' {TOKENS}"):
        ddl.check_parity(lambda: text_model(F.scaled_dot_product_attention), None, batch, token_loss, cp=2)
    with pytest.raises(ValueError, match="cp should be a positive integer"):
        ddl.check_model(text_model(), cp=0)
    assert ddl.check_model(text_model(), PLAN, tp=2, cp=2) is None


def test_without_cp_a_sequence_may_have_any_length():
    query = torch.randn(1, 2, 7, 4)
    assert ddl.sequence_positions(7).tolist() == list(range(7))
    for attention in (ddl.ring_attention, ddl.ulysses_attention):
        expected = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        assert torch.allclose(attention(query, query, query, is_causal=True), expected)
