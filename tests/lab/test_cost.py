"""Closed forms against the papers' own tables, against torch, and against counting by hand."""

import collections
import contextlib
import functools
import itertools
import logging
import math
import random
import statistics

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events

import ignite_ddl as ddl
from ignite_ddl.lab import cost
from ignite_ddl.lab.bytes import count_bytes

LINK = cost.Link(latency=3e-5, bandwidth=2e8)


def test_all_reduces_by_hand():
    """For other numbers of ranks tests/lab/test_simulate.py plays them."""
    link = cost.Link(1, 12)
    naive, tree, ring = (
        way(4, 48, link) for way in (cost.all_reduce_naive, cost.all_reduce_tree, cost.all_reduce_ring)
    )
    assert (sum(naive.messages), sum(tree.messages), ring.messages) == (4 * 3, 2 * 3, [2 * 3] * 4)
    assert (sum(tree.bytes), ring.bytes) == (2 * 3 * 48, [2 * 3 * 12] * 4)
    assert (tree.seconds, ring.seconds) == (2 * 2 * (1 + 4), 2 * 3 * (1 + 1))
    half = cost.ring_pass(4, 48, link)
    assert (half.bytes, half.seconds) == ([3 * 12] * 4, ring.seconds / 2)


def test_master_carries_everything():
    step = cost.master_step(4, 1000, 80, 40, cost.Link(0, 1), forward_seconds=8, backward_seconds=16, loss_seconds=1)
    assert (step.sent, step.received, step.messages) == (3 * 1030, 3 * 1010, 15)
    assert step.communication_seconds == step.sent + step.received
    assert step.seconds == pytest.approx(step.communication_seconds + 2 + 4 + 1)
    assert list(step.phases) == [
        "send weights", "scatter inputs", "forward", "gather outputs", "loss",
        "scatter output gradients", "backward", "gather gradients",
    ]  # fmt: skip
    alone = cost.master_step(1, 1000, 80, 40, cost.Link(0, 1), forward_seconds=8, backward_seconds=16)
    assert alone.seconds == 24
    assert alone.messages == 0


def test_parameter_servers_share_the_load():
    one = cost.parameter_server_step(8, 1000, LINK)
    four = cost.parameter_server_step(8, 1000, LINK, n_servers=4)
    assert one.server_bytes == 16_000
    assert four.server_bytes == 4_000
    assert one.worker_bytes == four.worker_bytes == 2_000
    # With as many servers as workers, a worker's port is as busy as a server's; more do not help.
    fast = cost.Link(0, 1)
    times = [cost.parameter_server_step(8, 1000, fast, n_servers=k).seconds for k in (1, 2, 4, 8, 16)]
    assert times == pytest.approx([16_000, 8_000, 4_000, 2_000, 2_000])


def test_ddp_hides_what_backward_covers():
    link = cost.Link(0, 1)
    # Two ranks: a bucket of x bytes takes x seconds.
    assert cost.ddp_step(2, [10], link, 5, 10) == (25, 10, 10)  # one bucket: nothing to hide behind
    assert cost.ddp_step(2, [5, 5], link, 5, 10) == (20, 10, 5)
    assert cost.ddp_step(2, [1] * 10, link, 5, 10) == (16, 10, 1)
    assert cost.ddp_step(2, [50, 50], link, 0, 10).seconds == 5 + 100  # bound by the network
    assert cost.ddp_step(2, [4, 4], link, 0, 10, ready=[10, 10]).seconds == 18
    assert cost.ddp_step(1, [4, 4], link, 1, 10).seconds == 11


@pytest.mark.parametrize(("cap_mb", "given"), [(None, {}), (3, {"bucket_bytes": 3 * 2**20})])
def test_caps_of_buckets_are_ddp_s(cap_mb, given, monkeypatch):
    """With the caps for which DDP asks torch, without one of the user's and with one."""
    asked, assign = [], dist._compute_bucket_assignment_by_size
    watched = lambda tensors, caps, *others: asked.append(list(caps)) or assign(tensors, caps, *others)  # noqa: E731
    monkeypatch.setattr(dist, "_compute_bucket_assignment_by_size", watched)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # A DDP that looks for unused parameters has its real caps from the beginning.
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), bucket_cap_mb=cap_mb, find_unused_parameters=True)
    dist.destroy_process_group()
    sizes = [400_000] * 200
    indices, _ = assign([torch.zeros(100_000, device="meta") for _ in sizes], asked[-1])
    assert cost.ddp_buckets(sizes, **given) == [400_000 * len(bucket) for bucket in indices]


def test_ddp_buckets_are_torch_s():
    rng = random.Random(1)
    for _ in range(50):
        parameters = [torch.zeros(rng.randint(1, 400), device="meta") for _ in range(rng.randint(1, 30))]
        sizes = [4 * p.numel() for p in parameters]
        reverse = list(reversed(parameters))
        indices, _ = dist._compute_bucket_assignment_by_size(reverse, [600, 2400])
        torchs = [sum(4 * reverse[i].numel() for i in bucket) for bucket in indices]
        assert cost.ddp_buckets(sizes, bucket_bytes=2400, first_bucket_bytes=600) == torchs


def test_seed_001_figures():
    steps = {n: cost.data_parallel_step(n, **cost.RESNET50_P100) for n in (1, 8, 64, 256, 1024)}
    assert steps[256].batch_size == 8 * 1024
    assert steps[1024].batch_size == 32 * 1024
    assert steps[1].share == 0
    assert steps[1].efficiency == 1
    shares = [step.share for step in steps.values()]
    assert shares == sorted(shares)
    assert 0.20 < steps[1024].share < 0.25
    assert steps[256].share < 0.20
    # Goyal et al. 2017, section 4.3: at least 12.8 Gbit/s so that 200 MB pass within backward's 125 ms.
    link = cost.Link(0, 12.8e9 / 8)
    goyal = cost.data_parallel_step(10**6, 100e6, link, 0.06, 0.125, overlap=1)
    assert goyal.communication_seconds == pytest.approx(0, abs=1e-6)


def test_noise_scale_is_the_noise_of_a_step():
    """Of all batches that there are: the variance of what a step moves, around the whole set's gradient."""
    gradients, rate, size = [3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0], 0.1, 3
    moves = [-rate * statistics.mean(batch) for batch in itertools.combinations(gradients, size)]
    one_sample = statistics.variance(gradients)
    g = cost.noise_scale(rate, size, len(gradients))
    assert statistics.pvariance(moves) == pytest.approx(rate / len(gradients) * g * one_sample, rel=1e-12)


def test_noise_scale():
    assert cost.noise_scale(0.1, 1000, 1000) == 0  # the whole set: no noise
    assert cost.noise_scale(0.1, 10, 1000, momentum=0.9) == pytest.approx(99)
    rng = random.Random(2)
    for _ in range(100):
        n, b = rng.randint(2_000, 10**6), rng.randint(1, 1_000)
        old, new, m = rng.uniform(1e-3, 1), rng.uniform(1e-3, 1), rng.uniform(0, 0.99)
        wanted = cost.batch_size_of_same_noise(b, old, new, n)
        noise = new / (1 - m) * (n / wanted - 1)
        assert noise == pytest.approx(cost.noise_scale(old, b, n, m), rel=1e-9)


def test_zero():
    """The paper's table 1 is compared in tests/lab/test_plan.py."""
    assert cost.zero_memory(100, 4, 2) == (200, 50, 300, 550)


def test_pipelines():
    assert cost.pipeline_bubble(1, 8) == 0
    assert cost.pipeline_bubble(4, 1) == 3 / 4
    # Narayanan et al. 2021: (p - 1) / (v m) of the busy time.
    share = cost.pipeline_bubble(8, 16, n_chunks=4)
    assert share / (1 - share) == pytest.approx(7 / 64)
    # Korthikanti et al. 2022, section 4.2.3: 1 + (p - 1) / (p v) times the layers.
    peak = cost.pipeline_peak_activations("interleaved_1f1b", 8, 64, n_chunks=3)
    assert peak / (8 * 3) == pytest.approx(1 + 7 / 24)
    # Qi et al. 2023, table 2.
    assert cost.zero_bubble_seconds(8, 2.0, 2.0, 1.0, "1f1b") == 7 * 5
    assert cost.zero_bubble_seconds(8, 2.0, 2.0, 1.0) == 7 * 3
    assert cost.zero_bubble_seconds(8, 2.0, 2.0, 1.0, "zb-h2") == 7 * 2
    assert cost.zero_bubble_seconds(8, 1.0, 1.0, 1.0, "zb-v") == 0
    with pytest.raises(ValueError, match="zb-v"):
        cost.zero_bubble_seconds(8, 1.0, 1.0, 0.5, "zb-v")


def test_transformer_counts_match_a_real_one():
    h, layers, vocabulary, sequence = 32, 2, 50, 16
    block = torch.nn.TransformerEncoderLayer(h, 4, 4 * h, norm_first=True)
    parameters = layers * sum(p.numel() for p in block.parameters()) + (vocabulary + sequence) * h
    assert cost.transformer_parameters(h, layers, vocabulary, sequence) == parameters

    # Narayanan et al. 2021, table 1: the 1-trillion model.
    assert cost.transformer_parameters(25600, 128, 51200, 2048) / 1e9 == pytest.approx(1008, abs=0.5)
    b, s, h, l, v = 3, 16, 32, 2, 50  # noqa: E741
    eq3 = 96 * b * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    assert cost.transformer_flops(b, s, h, l, v, recompute=True) == pytest.approx(eq3, rel=1e-12)
    kept = 72 * b * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
    assert cost.transformer_flops(b, s, h, l, v) == pytest.approx(kept, rel=1e-12)


def test_transformer_flops_match_torch_s_counter():
    from torch.utils.flop_counter import FlopCounterMode

    b, s, h, v = 2, 8, 16, 40

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(h, 3 * h), torch.nn.Linear(h, h)
            self.up, self.down, self.head = (
                torch.nn.Linear(h, 4 * h), torch.nn.Linear(4 * h, h), torch.nn.Linear(h, v),
            )  # fmt: skip

        def forward(self, x):
            q, k, w = self.qkv(x).chunk(3, -1)
            x = x + self.out((q @ k.mT).softmax(-1) @ w)
            return self.head(x + self.down(self.up(x).relu()))

    x = torch.randn(b, s, h, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        Block()(x).sum().backward()
    assert cost.transformer_flops(b, s, h, 1, v) == counter.get_total_flops()


def test_activation_table_of_korthikanti():
    # Table 2, as factors of s b h, at t = 8 and 5 a s / h = 80 (GPT-3: a 96, s 2048, h 12288).
    shape = {"batch_size": 1, "sequence": 2048, "hidden": 12288, "heads": 96}
    sbh = 2048 * 12288
    parallel = dict(shape, n_ranks=8)
    assert cost.activation_bytes(**shape) / sbh == 34 + 80
    assert cost.activation_bytes(**parallel) / sbh == 10 + 3 + 10
    assert cost.activation_bytes(**parallel, sequence_parallel=True) / sbh == 34 / 8 + 10
    assert cost.activation_bytes(**parallel, recompute="selective") / sbh == 13
    assert cost.activation_bytes(**parallel, sequence_parallel=True, recompute="selective") / sbh == 34 / 8
    assert cost.activation_bytes(**parallel, recompute="full") / sbh == 2
    assert cost.activation_bytes(**parallel, sequence_parallel=True, recompute="full") / sbh == 2 / 8


@pytest.mark.parametrize(("dropout", "recompute"), [(0.0, "selective"), (0.1, "none")])
def test_activations_of_a_block_are_what_autograd_keeps(dropout, recompute):
    from ignite_ddl.course import GPT
    from ignite_ddl.lab import SavedBytes

    block = GPT(8, length=32, width=64, n_heads=4, n_blocks=1, dropout=dropout).block0
    x = torch.randn(2, 32, 64, requires_grad=True)
    with SavedBytes(block) as saved:
        _ = block(x)  # alive, and what it keeps with it
        kept = saved.now
    shape = {"batch_size": 2, "sequence": 32, "hidden": 64, "heads": 4, "recompute": recompute}
    # Without dropout on a CPU attention keeps no s x s matrices; with it, all of them, and masks as numbers.
    predicted = cost.activation_bytes(**shape, value_bytes=4, mask_bytes=4 if dropout else 0)
    assert kept == pytest.approx(predicted, rel=0.01)


def kept_by_recomputed_blocks(local_rank, sequence_parallel):
    """Bytes on this rank, of two blocks less those of one."""
    from torch.utils.checkpoint import checkpoint

    from ignite_ddl.course import GPT
    from ignite_ddl.lab import SavedBytes

    kept = []
    for n_blocks in (1, 2):
        model = GPT(8, length=32, width=64, n_heads=4, n_blocks=n_blocks)
        for n in range(n_blocks):
            block = getattr(model, f"block{n}")
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        model = ddl.auto_model(model, GPT.sequence_plan if sequence_parallel else GPT.tensor_plan)
        with SavedBytes(model) as saved:
            _ = model(torch.arange(64).view(2, 32) % 8)  # alive, and what it keeps with it
            kept.append(saved.now)
    return kept[1] - kept[0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_recomputed_block_keeps_this_ranks_part_of_its_input(sequence_parallel):
    predicted = cost.activation_bytes(2, 32, 64, 4, 2, sequence_parallel, "full", value_bytes=4)
    with ddl.Parallel("gloo", nproc_per_node=2, threads_per_rank=1, timeout=60, tp=2) as parallel:
        assert parallel.run(kept_by_recomputed_blocks, sequence_parallel) == [predicted] * 2


def test_attention_over_a_shared_sequence_sends_what_the_formulas_of_chapter_27_say():
    ranks, (batch, length, heads, of_keys), size = 4, (2, 64, 32, 16), 2
    link = cost.Link(1, 100)
    ring = cost.ring_attention(ranks, batch, length, of_keys, link, size, size)
    ulysses = cost.ulysses_attention(ranks, batch, length, heads, of_keys, link, size)
    message = 2 * batch * length // ranks * of_keys * size
    assert ring.forward == (3 * (1 + message / 100), [3] * 4, [3 * message] * 4)
    assert ring.backward == (7 * (1 + message / 100), [7] * 4, [7 * message] * 4)
    sent = (ranks - 1) / ranks**2 * batch * length * (2 * heads + 2 * of_keys) * size
    assert ulysses.forward == ulysses.backward == (12 + sent / 100, [12] * 4, [sent] * 4)
    wide = cost.ring_attention(ranks, batch, length, of_keys, link, size)  # gradients of float32
    assert wide.backward.bytes[0] == (3 + 4 * 2) * message
    of_floats = cost.ring_attention(ranks, batch, length, of_keys, link, 4)
    as_wide = cost.ulysses_attention(ranks, batch, length, of_keys, of_keys, link, 4)
    totals = [sum(one.bytes[0] for one in passes) for passes in (of_floats, as_wide)]
    forward = of_floats.forward.bytes[0] / as_wide.forward.bytes[0]
    assert totals[0] / totals[1] / forward == pytest.approx(5 / 3)
    assert sum(part.seconds + part.bytes[0] for part in cost.ring_attention(1, 2, 8, 4, link)) == 0


def test_tensor_parallel_is_four_all_reduces():
    ring = cost.all_reduce_ring(4, 2 * 3 * 8 * 16, LINK)
    assert cost.tensor_parallel_bytes(3, 8, 16, n_ranks=4) == 4 * ring.bytes[0]
    assert cost.tensor_parallel_bytes(3, 8, 16, n_ranks=1) == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: cost.pipeline_bubble(2.5, 8), "n_ranks should be a positive integer, but given 2.5"),
        (lambda: cost.zero_memory(-5, 4, 1), "n_parameters should be a number of at least 0, but given -5"),
        (lambda: cost.all_reduce_tree(2, math.nan, LINK), "n_bytes should be a number of at least 0, but given nan"),
        (lambda: cost.ddp_buckets([8, -8]), r"parameter_bytes should be a sequence of numbers.*\[8, -8\]"),
        (lambda: cost.Link(0, 0), "bandwidth should be a positive number, but given 0"),
        (lambda: cost.Link(math.nan, 1), "latency should be a number of at least 0, but given nan"),
        (lambda: cost.ddp_step(2, [1, 2], LINK, ready=[1]), "ready should have a time for each"),
        (lambda: cost.ddp_step(2, [1, 2], LINK, 1, 5, ready=[1, 6]), "backward_seconds=5 at most"),
        (lambda: cost.ddp_step(2, [1, 2], LINK, 1, 5, ready=[2, 1]), "ready should rise"),
        (lambda: cost.data_parallel_step(2, 8, LINK, 1, 1, overlap=2), "overlap"),
        (lambda: cost.noise_scale(0.1, 64, 32), "n_samples should be a number of at least 64"),
        (lambda: cost.noise_scale(0.1, 8, 32, momentum=1), "momentum"),
        (lambda: cost.zero_memory(8, 2, 4), "stage should be one of 0, 1, 2, 3, but given 4"),
        (lambda: cost.zero_bubble_seconds(4, 1, 1, 1, "zb"), "schedule"),
        (lambda: cost.zero_bubble_seconds(4, 1, 2, 1.5, "zb-h2"), "backward_weight should be at most"),
        (lambda: cost.pipeline_peak_activations("1f1b", 4, 8, rank=9), "rank should be from 0 to 3"),
        (lambda: cost.pipeline_peak_activations("zb", 4, 8), "schedule"),
        (lambda: cost.pipeline_peak_activations("zbv", 4, 6), "n_microbatches should be at least 7 for zbv"),
        (lambda: cost.pipeline_peak_activations("interleaved_1f1b", 4, 6, n_chunks=2), "multiple of n_ranks"),
        (lambda: cost.activation_bytes(1, 1, 1, 1, recompute="some"), "recompute"),
    ],
)
def test_bad_input_says_which(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def sharded(local_rank, reshard, accumulation):
    """Bytes of an optimizer step after the checked steps, by collective and size of group, and of weights between."""
    logging.disable(logging.INFO)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(3)))
    n_bytes = sum(weight.nbytes for weight in model.parameters())
    model = ddl.auto_model(model, shard=True, reshard_after_forward=reshard)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    options = {"gradient_accumulation_steps": accumulation}
    trainer = ddl.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss, **options)
    data = torch.utils.data.TensorDataset(*2 * [torch.randn(8 * 16, 16)])
    held, counting = [], contextlib.ExitStack()

    @trainer.on(Events.ITERATION_STARTED(once=9))
    def start(engine):
        engine.state.traffic = counting.enter_context(count_bytes())
        model[1].register_forward_pre_hook(lambda *_: held.append(sum(map(local_bytes, model[0].parameters()))))

    @trainer.on(Events.ITERATION_COMPLETED(once=8 + accumulation))
    def stop(engine):
        counting.close()
        engine.terminate()

    trainer.run(ddl.auto_dataloader(data, batch_size=8))
    sent = collections.Counter()
    for call in trainer.state.traffic.calls:
        if max(call.put_in, call.got) > 256:  # a loss, not weights
            sent[call.op, len(call.ranks)] += call.on_a_ring
    return n_bytes, sent, held[0] / (n_bytes / 3)


def local_bytes(weight):
    return (weight.to_local() if hasattr(weight, "to_local") else weight).nbytes


@pytest.mark.parametrize(
    "axes", [{"dp": 2}, pytest.param({"dp": 4}, marks=pytest.mark.slow), {"dp_replicate": 2, "dp_shard": 2}], ids=str
)
def test_a_sharded_step_is_counted(axes):
    shards, replicas = axes.get("dp_shard", axes.get("dp")), axes.get("dp_replicate", 1)
    with ddl.Parallel("gloo", nproc_per_node=shards * replicas, threads_per_rank=1, timeout=60, **axes) as parallel:
        for reshard, accumulation in ((True, 1), (True, 4), (False, 1), (False, 4)):
            for n_bytes, sent, held in parallel.run(sharded, reshard, accumulation):
                step = cost.sharded_step(n_bytes, shards, replicas, accumulation, reshard)
                assert sent["all_gather", shards] == step.gathered
                assert sent["reduce_scatter", shards] == step.scattered
                assert sent["all_reduce", replicas] == step.reduced
                assert held * n_bytes == step.between
