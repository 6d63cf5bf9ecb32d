"""Every form of parallelism against one process, in float64: ``make parity`` prints the whole table.

A case trains 5 optimizer steps with SGD on ranks, and in this process with a loop of plain torch. Compared are
the loss of every iteration, every gradient of the first step and the weights after the last, on every rank; the
largest difference may be 1e-12. Cases that a schedule cannot do right must be refused on each rank by itself,
before anything is sent, and deliberately wrong variants must be off by more than 1e-3.

Where a model drops, the reference replays the split and the rule for random numbers of ignite_ddl/tensor/random.py, in
code of its own. BatchNorm is not in here: its statistics are those of a rank's rows.

    python tests/parity.py            the whole table
    python tests/parity.py tied zbv   the cases whose line has all these words
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import logging
import math
import os
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from experts_by_hand import ByHand
from ignite.engine import Events
from ranks import in_float64
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl import collectives, model as ddl_model
from ignite_ddl.compat import quiet_redistribution
from ignite_ddl.context import ring
from ignite_ddl.course import CNN, GPT, MLP
from ignite_ddl.course.gpt import Attention, Embedding, Head
from ignite_ddl.epoch_plan import part
from ignite_ddl.experts import balance, routing
from ignite_ddl.pipeline.local_stages import stages_of

TOLERANCE = 1e-12  # never loosened
CLEARLY_WRONG = 1e-3  # what a wrong variant must exceed, so that the comparison is seen to be able to fail
STEPS = 5
ALONE, EACH = 40, 3  # seconds that a launch may take, and more for each of its cases: a hang is a failure too

# ------------------------------------------------------------------------------------------------------ models

WIDTH, WORDS, LENGTH, HEADS = 16, 20, 6, 4


def gpt(blocks=2, tied=False):
    """``blocks + 2`` layers; tied: the embedding is also the last matrix."""
    return GPT(WORDS, LENGTH, WIDTH, HEADS, blocks, tied)


def shared_layers():
    """One activation and one linear layer, each used twice: the same object at two places."""
    act, again = nn.Tanh(), nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(6, 8), act, again, act, again, nn.Linear(8, 4))


class NormedAttention(Attention):
    """The norms of queries and keys are one for all heads."""

    def __init__(self):
        super().__init__(WIDTH, HEADS, dropout=0.0)
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // HEADS), nn.LayerNorm(WIDTH // HEADS)

    def forward(self, x):
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))  # (N, heads, T, D / heads)
        return self.out(self.mix(self.q_norm(q), self.k_norm(k), v).transpose(1, 2).flatten(2))


def shared_weights():
    """Weights that heads share, then one that features share."""
    pair = [("up", nn.Linear(WIDTH, 2 * WIDTH)), ("act", nn.PReLU()), ("down", nn.Linear(2 * WIDTH, WIDTH))]
    return nn.Sequential(OrderedDict(embed=Embedding(WORDS, LENGTH, WIDTH), attention=NormedAttention(),
                                     pair=nn.Sequential(OrderedDict(pair)), head=Head(WORDS, WIDTH)))  # fmt: skip


SHARED_WEIGHTS_PLAN = {
    "attention": ddl.SharedInput(),
    "attention.[qkv]": ddl.Column(units="n_heads"),
    "attention.[qk]_norm": ddl.SharedWeight(),
    "attention.out": ddl.Row(),
    "pair.up": ddl.Column(),
    "pair.act": ddl.SharedWeight(),
    "pair.down": ddl.Row(),
}
GPT_PLAN = {name: style for name, style in GPT.tensor_plan.items() if name != "block*.attention"}  # may be left out
MLP_PLAN = MLP(6, 8, 4, layers=4).tensor_plan


def words(rows, generator):
    draw = (torch.randint(WORDS, (rows, LENGTH), generator=generator) for _ in range(2))
    return TensorDataset(*draw)


def points(*shape, classes=4):
    def make(rows, generator):
        x = torch.randn(rows, *shape, generator=generator)
        return TensorDataset(x, torch.randint(classes, (rows,), generator=generator))

    return make


UNEVEN_WORDS, EVEN_LENGTH = 65, 8  # a vocabulary that no tp axis divides, a length that 2 and 4 do


def lines(rows, generator):
    ids = torch.randint(UNEVEN_WORDS, (rows, EVEN_LENGTH + 1), generator=generator)
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def lab_gpt(dropout=0.0):
    return GPT(UNEVEN_WORDS, EVEN_LENGTH, WIDTH, HEADS, n_blocks=2, dropout=dropout)


class Placed(Embedding):
    def forward(self, ids):
        return self.token(ids) + self.position[ddl.sequence_positions(ids.shape[1])]


class CpHeads(nn.Module):
    """torch's attention in one process, and ring attention on a mesh."""

    def forward(self, q, k, v):
        alone = ddl.get_mesh().world_size == 1
        return (F.scaled_dot_product_attention if alone else ddl.ring_attention)(q, k, v, is_causal=True)


def cp_gpt():
    model = lab_gpt()
    model.embed.__class__ = Placed
    model.block0.attention.mix, model.block1.attention.mix = CpHeads(), CpHeads()
    return model


class ExpertBlock(nn.Module):
    def __init__(self, **options):
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH, HEADS, dropout=0.0)
        self.moe = ddl.MixtureOfExperts(WIDTH, 8, n_experts=4, top_k=2, shared=shared, **options)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


def experts(**options):
    def make():
        options_of_all = {"balance_weight": 0.5, "z_weight": 0.05} | options
        blocks = {f"block{i}": ExpertBlock(**options_of_all) for i in range(2)}
        return nn.Sequential(OrderedDict(embed=Embedding(WORDS, LENGTH, WIDTH), **blocks, head=Head(WORDS, WIDTH)))

    return make


def cp_experts():
    model = experts(bias_rate=0.02)()
    model.embed, model.head = Placed(UNEVEN_WORDS, EVEN_LENGTH, WIDTH), Head(UNEVEN_WORDS, WIDTH)
    model.block0.attention.mix, model.block1.attention.mix = CpHeads(), CpHeads()
    return model


EXPERTS_PLAN = {"block*.moe.experts": ddl.Experts()}
CUT_EXPERTS_PLAN = {"block*.moe.experts": ddl.Experts(tp={"gate": 1, "up": 1, "down": 2})}


def sequences(rows, generator):
    return TensorDataset(torch.randn(rows, 4, 6, generator=generator), torch.randn(rows, 4, 6, generator=generator))


def sequence_parallel():
    """A LayerNorm that sees a part of each sequence, so that its gradients are sums over tp."""
    return nn.Sequential(OrderedDict(up=nn.Linear(6, 8), norm=nn.LayerNorm(8), down=nn.Linear(8, 6)))


CNN_OUT_PLAN = {"conv2": ddl.OutputChannels(), "linear": ddl.Row()}  # a channel's features are neighbours
CNN_IN_PLAN = {"conv2": ddl.InputChannels(whole_input=True)}
SHARED_PLAN = {"[24]": ddl.Column(output_layouts=Replicate())}  # two names of one module
SEQUENCE_PLAN = {
    "up": ddl.Column(output_layouts=Shard(1), use_local_output=False),
    "norm": SequenceParallel(use_local_output=False),
    "down": ddl.Row(input_layouts=Shard(1)),
}


def word_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def cut_loss(output, target):
    return ddl.cross_entropy(output.flatten(0, 1), target.flatten())


# name: model, data, loss, tensor plan
MODELS = {
    "mlp": (lambda: MLP(6, 8, 4, layers=4), points(2, 3), F.cross_entropy, MLP_PLAN),  # begins with a Flatten
    "cnn": (lambda: CNN(channels=4, out_features=4), points(1, 28, 28), F.cross_entropy, CNN.tensor_plan),
    "cnn out": (lambda: CNN(channels=4, out_features=4), points(1, 28, 28), F.cross_entropy, CNN_OUT_PLAN),
    "cnn in": (lambda: CNN(channels=4, out_features=4), points(1, 28, 28), F.cross_entropy, CNN_IN_PLAN),
    "gpt": (gpt, words, word_loss, GPT_PLAN),
    "gpt tied": (lambda: gpt(tied=True), words, word_loss, GPT_PLAN),
    "gpt8": (lambda: gpt(blocks=6), words, word_loss, GPT_PLAN),
    "gpt8 tied": (lambda: gpt(blocks=6, tied=True), words, word_loss, GPT_PLAN),
    # Stages that are a bare Linear on 3-D input: torch's split backward cannot detach views of them in place.
    "linears": (lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), sequences, F.mse_loss, {}),
    "sequence": (sequence_parallel, sequences, F.mse_loss, SEQUENCE_PLAN),
    "shared layers": (shared_layers, points(6), F.cross_entropy, SHARED_PLAN),
    "shared weights": (shared_weights, words, word_loss, SHARED_WEIGHTS_PLAN),
    # The lab's GPT: tied, 65 words.
    "lab gpt": (lab_gpt, lines, word_loss, GPT.tensor_plan),
    "lab gpt cut": (lab_gpt, lines, cut_loss, GPT.cut_logits_plan),
    "lab gpt seq": (lab_gpt, lines, cut_loss, GPT.sequence_plan),
    "cp gpt": (cp_gpt, lines, word_loss, {name: style for name, style in GPT.tensor_plan.items() if "mix" not in name}),
    "cp gpt cut": (
        cp_gpt,
        lines,
        cut_loss,
        {name: style for name, style in GPT.cut_logits_plan.items() if "mix" not in name},
    ),
    "experts": (experts(), words, word_loss, EXPERTS_PLAN),
    "experts cut": (experts(), words, word_loss, CUT_EXPERTS_PLAN),
    "experts bias": (experts(bias_rate=0.02), words, word_loss, EXPERTS_PLAN),
    "experts cp": (cp_experts, lines, word_loss, EXPERTS_PLAN),
    "experts drop": (experts(capacity_factor=0.8, normalize=False), words, word_loss, EXPERTS_PLAN),
    "dropout": (lambda: lab_gpt(dropout=0.3), lines, word_loss, GPT.tensor_plan),
    "dropout seq": (lambda: lab_gpt(dropout=0.3), lines, cut_loss, GPT.sequence_plan),
}
DROPPING = ("dropout", "dropout seq")

# ------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One line of the table. ``refused`` is a part of the expected ValueError, ``wrong`` a wrong variant."""

    trap: str
    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1  # of the ranks of dp × cp
    model: str = "gpt"
    schedule: str = "1f1b"
    n_microbatches: int | None = None
    split: tuple[int, ...] | None = None
    shard: bool = False
    replicas: int = 1  # with more than one, dp is dp_replicate × dp_shard
    reshard: bool | None = None
    offload: bool = False
    rounds: int = 0  # steps of a round, in which each dp rank trains alone
    hook: str | None = None  # how DDP compresses gradients
    rows: int = 16
    batch_size: int = 8
    shuffle: bool = True
    accumulation: int = 1
    max_norm: float | None = None
    frozen: tuple[str, ...] = ()  # globs of parameter names
    refused: str = ""
    refused_batch: bool = False  # the model is in order, its last batch is not
    wrong: str = ""
    slow: bool = False  # of the cases that are tests: not in `make test`, but in `make test-all`

    @property
    def mesh(self) -> tuple[int, int, int, int, int, int]:
        return self.dp, self.pp, self.tp, self.replicas, self.cp, self.ep

    @property
    def line(self) -> str:
        mesh = " × ".join(
            f"{axis}{getattr(self, axis)}" for axis in ("dp", "pp", "cp", "tp", "ep") if getattr(self, axis) > 1
        )
        how = [self.schedule] * (self.pp > 1) + ["shard"] * self.shard + ["offload"] * self.offload
        how += [f"{self.replicas} replicas"] * (self.replicas > 1)
        how += [f"H = {self.rounds}"] * (self.rounds > 0) + [str(self.hook)] * (self.hook is not None)
        how += ["reshard" if self.reshard else "no reshard"] * (self.reshard is not None)
        return f"{mesh or 'serial':15} {self.model:13} {' '.join(how):29} {self.trap}"


UNEVEN = {"rows": 13}  # batches of 8 and 5 rows: dp ranks and microbatches of different sizes
NO_ROWS = {"rows": 9}  # a last batch of 1 row: all but one dp rank have none
FIRST_LAYER = ("embed.*",)
PLAIN = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")  # schedules with one backward pass
SPLIT = ("zbv", "interleaved_zero_bubble")  # those that compute gradients of inputs and of weights apart
ALL = (*PLAIN, *SPLIT, "dualpipev")
PROMISED = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
BARE = "it has no trainable parameter"


def test_cases():
    """Every axis, schedule family and trap in few launches; what others cover, or many ranks need, is slow."""
    slow, halves = {"slow": True}, {"n_microbatches": 2, "split": (2, 2)}
    return [
        Case("uneven, last batch without rows on a rank", dp=2, model="mlp", **NO_ROWS),
        Case("uneven, max_norm", dp=2, model="cnn", max_norm=0.1, **UNEVEN),
        Case("uneven, tied, accumulation, first layer frozen", dp=2, model="gpt tied", shard=True,
             accumulation=2, frozen=("embed.position",), **UNEVEN),
        Case("uneven", dp=2, wrong="unweighted mean", **UNEVEN),
        Case("tied, max_norm, uneven", tp=2, model="gpt tied", max_norm=0.1, **UNEVEN),
        Case("tied, by torch's parallelize_module", tp=2, model="gpt tied", wrong="untied over tp"),
        Case("parameterless first stage, uneven", pp=2, model="mlp", split=(1, 7), **UNEVEN),
        Case("uneven, max_norm", pp=2, model="cnn", schedule="gpipe", max_norm=0.1, **UNEVEN),
        Case("tied, accumulation, uneven", pp=2, model="gpt tied", schedule="zbv", accumulation=2, **UNEVEN),
        Case("tied, summed by nobody", pp=2, model="gpt tied", wrong="untied over pp"),
        Case("tied, uneven, max_norm, ranks without rows", dp=2, pp=2, tp=2, model="gpt tied", max_norm=0.1,
             **NO_ROWS),
        Case("convolution by output and input channels, uneven", tp=2, model="cnn", max_norm=0.1, **UNEVEN),
        Case("norms of heads and PReLU, uneven", tp=2, model="shared weights", max_norm=0.1, **UNEVEN),
        Case("a column and a row frozen", tp=2, frozen=("block0.up.*", "block1.down.*", "block1.attention.q.*")),
        Case("dropout, one mask for all heads", tp=2, model="dropout", wrong="no ShardedRandom"),
        Case("65 words, tied, logits never whole, uneven", tp=2, model="lab gpt cut", max_norm=0.1, **UNEVEN),
        Case("65 words, tied, logits never whole, uneven", tp=4, model="lab gpt cut", max_norm=0.1, **slow, **UNEVEN),
        Case("dropout, sequence parallel, first layer frozen", tp=4, model="dropout seq", frozen=FIRST_LAYER),
        Case("dropout, sequence parallel, uneven", dp=2, tp=2, model="dropout seq", max_norm=0.1, **slow, **UNEVEN),
        Case("dropout by stage and microbatch", dp=2, pp=2, model="dropout", **halves),
        Case("dropout by stage and microbatch", dp=2, pp=2, tp=2, model="dropout", **halves, **slow),
        Case("tied, uneven, accumulation", dp=2, pp=2, tp=2, model="gpt tied", schedule="interleaved_1f1b",
             shard=True, accumulation=2, **slow, **UNEVEN),
        Case("one row fewer in the last batch", dp=2, pp=2, schedule="1f1b", shard=True, rows=15),
        Case("tied, ranks without rows, accumulation", dp=4, replicas=2, model="gpt tied", max_norm=0.1,
             accumulation=2, **NO_ROWS),
        Case("uneven, accumulation", dp=2, model="gpt tied", shard=True, reshard=False, accumulation=2, **UNEVEN),
        Case("uneven, accumulation, max_norm", dp=2, shard=True, offload=True, accumulation=2, max_norm=0.1, **UNEVEN),
        *expert_cases(),
        *schedule_cases(),
    ]  # fmt: skip


def expert_cases():
    """Three meshes of experts, the rest slow; wrong variants of what others got wrong without an error."""
    slow, two = {"slow": True}, {"dp": 2, "ep": 2}
    yield Case("bias, accumulation, max_norm, ranks without rows", model="experts bias", accumulation=2, max_norm=0.1,
               **two, **NO_ROWS)  # fmt: skip
    yield Case("capacity, uneven, ranks without rows", model="experts drop", **two, **NO_ROWS)
    for wrong in ("loss of routers over dp", "each rank's own tokens", "experts divided by their copies"):
        yield Case("uneven", model="experts", wrong=wrong, **two, **UNEVEN)
    yield Case("capacity by rank", model="experts drop", wrong="capacity of each rank", **two)
    yield Case("over ranks that share sequences, uneven", cp=2, ep=2, model="experts cp", max_norm=0.1, **UNEVEN)
    for ep in (2, 4):
        yield Case("over ranks that share sequences, uneven", dp=2, cp=2, ep=ep, model="experts cp", shard=ep == 2,
                   max_norm=0.1, **slow, **UNEVEN)  # fmt: skip
    yield Case("max_norm, uneven", dp=4, ep=2, model="experts", shard=True, max_norm=0.1, **UNEVEN)
    yield Case("bias, losses of microbatches", pp=2, model="experts bias", n_microbatches=2, **two)
    yield Case("capacity, accumulation", pp=2, model="experts drop", n_microbatches=2, accumulation=2, **slow, **two)
    yield Case("max_norm, uneven", dp=4, ep=2, model="experts bias", max_norm=0.1, **slow, **UNEVEN)
    yield Case("uneven, ranks without rows", dp=4, ep=4, model="experts drop", **slow, **NO_ROWS)
    yield Case("max_norm, uneven", tp=2, model="experts cut", max_norm=0.1, **slow, **two, **UNEVEN)
    yield Case("uneven", tp=2, model="experts", **slow, **two, **UNEVEN)
    yield Case("uneven", tp=2, model="experts cut", max_norm=0.1, **slow, **UNEVEN)
    yield Case("uneven", tp=2, model="experts cut", shard=True, max_norm=0.1, **slow, **two, **UNEVEN)
    yield Case("accumulation, uneven", model="experts bias", shard=True, accumulation=2, **slow, **two, **UNEVEN)
    yield Case("max_norm", pp=2, model="experts", shard=True, max_norm=0.1, n_microbatches=2, **slow, **two)
    yield Case("uneven", dp=2, model="experts drop", **slow, **UNEVEN)  # routers over dp alone, by DDP


def schedule_cases():
    """The edge cases of each schedule: equal to one process, or refused on every rank by itself."""
    for schedule in PROMISED:
        tied = {"schedule": schedule, **UNEVEN}
        yield Case("tied, uneven, max_norm", pp=2, model="gpt tied", max_norm=0.1, **tied)
        yield Case("8 layers, tied, uneven", pp=4, model="gpt8 tied", slow=schedule != "zbv", **tied)
        yield Case("tied, uneven, accumulation", dp=2, pp=2, model="gpt tied", accumulation=2,
                   slow=schedule != "interleaved_zero_bubble", **tied)  # fmt: skip
    for schedule in ALL:
        two, dual = schedule in ("gpipe", "1f1b"), schedule == "dualpipev"
        split = (1, 3) if two else (1, 1, 1, 1)
        bare = {} if schedule in PLAIN else {"refused": BARE}
        on_two = {"pp": 2, "schedule": schedule}
        like_another = {"slow": schedule in ("gpipe", "looped_bfs", "interleaved_zero_bubble")} | on_two
        yield Case("whole first stage frozen", split=split, frozen=FIRST_LAYER, **(on_two if bare else like_another),
                   **bare)  # fmt: skip
        yield Case("parameterless first stage", model="mlp", split=(1, 7) if two else (1, 3, 2, 2),
                   **(on_two if bare else like_another), **bare)  # fmt: skip
        yield Case("part of the first stage frozen", split=split, frozen=("embed.position",), **like_another)
        yield Case("bare Linear stages on 3-D input", model="linears", **like_another)
        last = {"refused_batch": True, "refused": "a batch of 2 rows cannot be cut"} if dual else {}
        yield Case("14 rows in 4 microbatches", model="linears", batch_size=14, rows=16 if dual else 17,
                   n_microbatches=4, **like_another, **last)  # fmt: skip
    eight = {"pp": 4, "model": "gpt8", "schedule": "dualpipev"}
    yield Case("dualpipev wants 8", n_microbatches=4, **eight,
               refused="n_microbatches=4 does not suit schedule='dualpipev' on pp=4; use 8 or more")  # fmt: skip
    yield Case("dualpipev gets 8", n_microbatches=8, rows=16, batch_size=16, **eight)


def all_cases():
    cases = test_cases()

    def add(trap, **kwargs):
        cases.append(Case(trap, **kwargs))

    for axes in ({}, {"tp": 2}, {"pp": 2}):
        add("tied, uneven, accumulation", cp=2, model="cp gpt", max_norm=0.1, accumulation=2, **axes, **UNEVEN)
        add("tied, ranks without rows", dp=2, cp=2, model="cp gpt", shard=True, **axes, **NO_ROWS)
        for reshard in (False, True):
            both = {"dp": 4, "replicas": 2, "reshard": reshard, **axes}
            add("tied, uneven, max_norm", model="gpt tied", max_norm=0.1, **both, **UNEVEN)
            add("ranks without rows, accumulation", accumulation=2, **both, **NO_ROWS)
            add("first layer frozen, uneven", frozen=FIRST_LAYER, **both, **UNEVEN)
            add("tied, accumulation", dp=2, model="gpt tied", shard=True, reshard=reshard, accumulation=4, **axes)
            add("uneven, max_norm", dp=2, shard=True, reshard=reshard, offload=True, max_norm=0.1, **axes, **UNEVEN)
    add("tied, uneven, max_norm", cp=4, model="cp gpt", max_norm=0.1, **UNEVEN)
    for wrong in ("stale keys in the backward", "positions of the part", "a target lost at each cut"):
        add("what only a comparison shows", cp=2, model="cp gpt", wrong=wrong)
    add("tied, uneven, max_norm", dp=4, cp=2, replicas=2, model="cp gpt", max_norm=0.1, **UNEVEN)
    add("tied, uneven, logits never whole", dp=2, cp=2, tp=2, model="cp gpt cut", max_norm=0.1, **UNEVEN)
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv"):
        add("tied, uneven", pp=2, cp=2, model="cp gpt", schedule=schedule, **UNEVEN)
        add("tied, uneven", dp=4, replicas=2, pp=2, model="gpt tied", schedule=schedule, **UNEVEN)
    for model in ("cnn", "lab gpt seq", "dropout seq", "shared weights"):
        add("uneven, max_norm", dp=4, replicas=2, tp=2, model=model, max_norm=0.1, **UNEVEN)
    add("uneven, max_norm, accumulation", model="gpt tied", max_norm=0.1, accumulation=2, **UNEVEN)
    for shard in (False, True):
        for dp in (2, 4):
            add("uneven", dp=dp, model="mlp", shard=shard, **UNEVEN)
            add("ranks without rows, max_norm", dp=dp, model="cnn", shard=shard, max_norm=0.1, **NO_ROWS)
            add("tied, uneven, accumulation", dp=dp, model="gpt tied", shard=shard, accumulation=2, **UNEVEN)
            add("first layer frozen, max_norm", dp=dp, shard=shard, max_norm=0.1, frozen=FIRST_LAYER)
            add("shared layers", dp=dp, model="shared layers", shard=shard)
        add("sequence parallel, max_norm", dp=2, tp=2, model="sequence", shard=shard, max_norm=0.01)
        for dp, tp in ((2, 2), (2, 4), (4, 2)):
            add("uneven, tied, max_norm", dp=dp, tp=tp, model="gpt tied", shard=shard, max_norm=0.1, **UNEVEN)
            add("ranks without rows, accumulation", dp=dp, tp=tp, shard=shard, accumulation=2, **NO_ROWS)
        add("first layer frozen, uneven", dp=2, tp=2, shard=shard, frozen=FIRST_LAYER, **UNEVEN)
        add("uneven", dp=2, tp=2, model="mlp", shard=shard, **UNEVEN)
    for tp in (2, 4):
        add("sequence parallel, max_norm", tp=tp, model="sequence", max_norm=0.01)
        add("shared layers", tp=tp, model="shared layers")
        add("uneven", tp=tp, model="mlp", **UNEVEN)
        add("untied, accumulation", tp=tp, accumulation=2)
        add("tied, max_norm", tp=tp, model="gpt tied", max_norm=0.1)
        add("first layer frozen", tp=tp, frozen=FIRST_LAYER)
        add("tied embedding frozen", tp=tp, model="gpt tied", frozen=FIRST_LAYER)
    for axes in ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "shard": True}):
        for model in ("cnn", "cnn out", "cnn in"):
            add("uneven, max_norm", model=model, max_norm=0.1, **axes, **UNEVEN)
            add("first convolution frozen, accumulation", model=model, frozen=("conv1.*",), accumulation=2, **axes)
        for model in ("lab gpt", "lab gpt cut", "lab gpt seq"):
            add("65 words, tied, uneven", model=model, **axes, **UNEVEN)
            add("65 words, tied, max_norm, accumulation", model=model, max_norm=0.1, accumulation=2, **axes)
            add("65 words, norms and position frozen", model=model, frozen=("*.norm*", "embed.position"), **axes)
        for model in DROPPING:
            add("dropout, uneven, max_norm ", model=model, max_norm=0.1, **axes, **UNEVEN)
        add("norms of heads and PReLU, uneven, accumulation", model="shared weights", accumulation=2, **axes, **UNEVEN)
        add("a column, its norm and a row frozen", model="shared weights",
            frozen=("attention.[qk].*", "attention.q_norm.*", "pair.down.*"), **axes)  # fmt: skip
        add("a column and a row frozen", frozen=("block0.up.*", "block1.down.*"), max_norm=0.1, **axes)
    for schedule in ("1f1b", "zbv"):
        add("norms of heads and PReLU", pp=2, tp=2, model="shared weights", schedule=schedule)
    add("ranks without rows", dp=2, tp=2, model="lab gpt seq", **NO_ROWS)
    add("ranks without rows, max_norm", dp=2, tp=2, model="cnn", max_norm=0.1, **NO_ROWS)  # else it diverges
    add("65 words, tied, uneven", pp=2, tp=2, model="lab gpt", **UNEVEN)
    add("65 words, tied, uneven", pp=2, tp=2, model="lab gpt cut", schedule="zbv", **UNEVEN)
    add("65 words, tied, uneven", pp=2, tp=2, model="lab gpt seq", schedule="zbv", max_norm=0.1, **UNEVEN)
    add("dropout, a stream for each rank", tp=2, model="dropout", wrong="streams not shared")
    add("dropout, one mask for all tokens", tp=2, model="dropout seq", wrong="no ShardedRandom")
    add("convolution by input channels", tp=2, model="cnn in", wrong="bias once a rank")
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zbv", "interleaved_zero_bubble"):
        stages = (2, 2) if schedule in ("gpipe", "1f1b") else (1, 1, 1, 1)
        halves = {"schedule": schedule, "split": stages, "n_microbatches": 4}
        add("dropout by stage and microbatch", pp=2, model="dropout", **halves)
        add("dropout by stage and microbatch", pp=2, tp=2, model="dropout seq", **halves)
    for axes in ({"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 4, "replicas": 2},
                 {"dp": 4, "replicas": 2, "tp": 2}):  # fmt: skip
        for model in ("mlp", "gpt tied"):
            add("uneven, accumulation", model=model, rounds=1, accumulation=2, **axes, **UNEVEN)
            add("ranks without rows", model=model, rounds=1, **axes, **NO_ROWS)
        add("two steps a round", rounds=2, wrong="two steps a round", **axes)
        if axes.keys() == {"dp"}:  # torch takes no higher rank than a matrix can have
            add("uneven", model="mlp", hook="all-reduce", **axes, **UNEVEN)
            add("full rank, uneven", model="mlp", hook="powersgd:1000", **axes, **UNEVEN)
            add("rank 1", model="mlp", hook="powersgd:1", wrong="rank 1", **axes)
        else:
            add("by DDP alone", hook="powersgd:1000", refused="comm_hook compresses what DDP sends", **axes)
    add("over the same axis", dp=2, shard=True, rounds=1, refused='dp_sync="local" needs all weights')
    add("local norm", tp=2, wrong="clipped by the local norm", max_norm=0.1)
    add("gradients summed over dp", dp=2, wrong="sum over dp")
    for schedule in ALL:
        # dualpipev needs as many microbatches as stages and has no plain schedule to fall back on: 4 and 8.
        dual = schedule == "dualpipev"
        stages = 2 if schedule in ("gpipe", "1f1b") else 4
        conv = {} if schedule in PLAIN else {"refused": BARE}  # two of the CNN's layers hold 9 in 10 weights
        shared = (3, 3) if stages == 2 else (1, 2, 2, 1)
        last = {"rows": 12} if dual else UNEVEN
        add("uneven", pp=2, model="mlp", schedule=schedule, **last)
        if schedule not in PROMISED:
            add("tied, uneven, max_norm", pp=2, model="gpt tied", schedule=schedule, max_norm=0.1, **last)
        add("accumulation, uneven", pp=2, schedule=schedule, accumulation=2, **last)
        add("shared layers", pp=2, model="shared layers", schedule=schedule, split=shared)
        bare = {"refused": BARE} if schedule not in PLAIN else {}
        if stages == 4:
            add("parameterless middle stage", pp=2, model="mlp", schedule=schedule, split=(2, 1, 3, 2), **bare)
        first = (1, 3) if stages == 2 else (1, 1, 1, 1)
        add("first two stages frozen", pp=2, schedule=schedule, split=first if stages == 4 else (3, 1),
            frozen=("embed.*", "block*"), **bare)  # fmt: skip
        add("last stage frozen", pp=2, schedule=schedule, split=(3, 1) if stages == 2 else first,
            frozen=("head.*",), **bare)  # fmt: skip
        if stages == 2:
            add("part of the first stage frozen", pp=2, schedule=schedule, frozen=("embed.position",))
        add("first layer of the first stage frozen", pp=2, model="gpt8", schedule=schedule, frozen=FIRST_LAYER)
        add("tied embedding frozen in its stages", pp=2, model="gpt8 tied", schedule=schedule,
            frozen=("embed.token.weight",))  # fmt: skip
        if schedule not in PROMISED:
            add("8 layers, tied, uneven", pp=4, model="gpt8 tied", schedule=schedule,
                **({"batch_size": 16, "rows": 24} if dual else UNEVEN))  # fmt: skip
        add("uneven, n_microbatches=6", pp=2, model="cnn", schedule=schedule, n_microbatches=6, **conv,
            **({"batch_size": 12, "rows": 24} if dual else {"batch_size": 12, "rows": 19}))  # fmt: skip
        for shard in (False, True):
            both = {"batch_size": 16, "rows": 24} if dual else UNEVEN
            add("tied, uneven, max_norm", dp=2, pp=2, model="gpt tied", schedule=schedule, shard=shard,
                max_norm=0.1, **both)  # fmt: skip
            add("accumulation, uneven", dp=2, pp=2, schedule=schedule, shard=shard, accumulation=2, **both)
            add("part of the first stage frozen", dp=2, pp=2, schedule=schedule, shard=shard,
                frozen=("embed.token.*",), **({"batch_size": 16, "rows": 32} if dual else {}))  # fmt: skip
            if not dual:
                add("ranks without rows", dp=2, pp=2, schedule=schedule, shard=shard, **NO_ROWS)
            if not bare:
                add("whole first stage frozen", dp=2, pp=2, schedule=schedule, shard=shard, split=first,
                    frozen=FIRST_LAYER, **UNEVEN)  # fmt: skip
        add("shared layers", dp=2, pp=2, model="shared layers", schedule=schedule, split=shared,
            shard=True, **({"batch_size": 16} if dual else {}))  # fmt: skip
        add("shared layers", pp=2, tp=2, model="shared layers", schedule=schedule, split=shared)
        add("tied, uneven, max_norm", pp=2, tp=2, model="gpt tied", schedule=schedule, max_norm=0.1, **last)
        for shard in (False, True):
            add("tied, uneven, max_norm, accumulation", dp=2, pp=2, tp=2, model="gpt tied", schedule=schedule,
                shard=shard, max_norm=0.1, accumulation=2, **both)  # fmt: skip
    add("rows that fit no number of microbatches", pp=2, schedule="dualpipev", rows=11,
        refused="a batch of 3 rows cannot be cut",
        refused_batch=True)  # fmt: skip
    return cases


# -------------------------------------------------------------------------------------------- one process, plain


@dataclass
class Trained:
    """What one process, or one rank, can say after training. Tied weights are in under each of their names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor | None]
    weights: dict[str, torch.Tensor]


def build_model(case):
    torch.manual_seed(0)
    model = MODELS[case.model][0]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatch.fnmatchcase(name, glob) for glob in case.frozen):
            parameter.requires_grad_(False)
    return model


def build_loader(case):
    dataset = MODELS[case.model][1](case.rows, torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    return ddl.auto_dataloader(dataset, batch_size=case.batch_size, shuffle=case.shuffle)


@in_float64
def reference(case):
    """The same training in this process: plain torch but for the loader, which decides the order of rows."""
    model, loader, loss_fn = build_model(case), build_loader(case), MODELS[case.model][2]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    names = dict(model.named_parameters(remove_duplicate=False))
    losses, norms, gradients, done, counts, by_hand = [], [], {}, 0, [], ByHand()
    # What the ranks of a replica draw from: its first rank's stream, see `train`.
    streams = [_seeded(FIRST_SEED + replica * case.tp) for replica in range(case.dp)]
    if case.model in DROPPING and case.tp > 1:
        _draw_by_tp_rank(case, model)
    while done < STEPS:
        if case.tp * case.pp > 1:
            streams[:] = map(_after_a_draw, streams)  # by the loader, when a pass begins
        seen = []
        for x, y in loader:
            seen.append(len(x))
            drops, added = case.model in DROPPING, 0.0
            if case.model.startswith("experts"):
                loss, added = _loss_with_experts(case, model, by_hand, x, y)
            else:
                loss = _loss_by_the_rule(case, model, x, y, streams) if drops else loss_fn(model(x), y)
            counts.append(len(x))  # of a window the mean over all its rows
            ((loss + added) * counts[-1]).backward()
            losses.append(loss.item())
            if len(losses) % case.accumulation == 0:
                torch._foreach_mul_(
                    [p.grad for p in model.parameters() if p.grad is not None], 1 / sum(counts[-case.accumulation :])
                )
                if case.max_norm is not None:
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.max_norm).item())
                if done == 0:
                    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in names.items()}
                optimizer.step()
                optimizer.zero_grad()
                by_hand.end_step()
                done += 1
                if done == STEPS:
                    break
        else:
            assert sum(seen) == case.rows  # the loader drops nothing in one process either
    return Trained(losses, norms, gradients, {n: p.detach().clone() for n, p in names.items()})


# ------------------------------------------------------------------------------- one process, replaying the rule

FIRST_SEED = 7  # every rank seeds itself with this and its rank: auto_model has to make a replica's ranks alike


def _after_a_draw(state):
    generator = torch.Generator()
    generator.set_state(state)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator.get_state()


def _seeded(seed):
    return torch.Generator().manual_seed(seed).get_state()


def _loss_by_the_rule(case, model, x, y, streams):
    """The mean loss of a batch; each replica has its stream, and so has each microbatch of each stage."""
    loss_fn, total = MODELS[case.model][2], 0.0
    layers = list(model.children())
    stages, start = [], 0
    for size in case.split or [len(layers)]:
        stages.append(nn.Sequential(*layers[start : start + size]))
        start += size
    for replica in range(case.dp):
        rows = slice(*part(len(x), replica, case.dp))
        torch.set_rng_state(streams[replica])
        if case.pp == 1:
            total += loss_fn(model(x[rows]), y[rows]) * len(x[rows]) / len(x)
        else:
            number = int(torch.randint(2**62, ()))
            after = torch.get_rng_state()
            parts = zip(x[rows].chunk(case.n_microbatches), y[rows].chunk(case.n_microbatches), strict=True)
            for microbatch, (hidden, target) in enumerate(parts):
                for index, stage in enumerate(stages):
                    torch.manual_seed(number + 2**20 * index + microbatch)
                    hidden = stage(hidden)
                total += loss_fn(hidden, target) * len(target) / len(x)
            torch.set_rng_state(after)
        streams[replica] = torch.get_rng_state()
    return total


def _loss_with_experts(case, model, by_hand, x, y):
    """The mean loss of a batch, and the mean of routers' losses over microbatches, each of which is of all dp ranks."""
    n, loss, added = 1 if case.pp == 1 else case.n_microbatches, 0.0, 0.0
    of_ranks = [torch.arange(*part(len(x), rank, case.dp)).chunk(n) for rank in range(case.dp)]
    with by_hand.used():
        for parts in zip(*of_ranks, strict=True) if n > 1 else [[torch.arange(len(x))]]:
            rows = torch.cat(list(parts))
            loss += MODELS[case.model][2](model(x[rows]), y[rows]) * len(rows) / len(x)
            added += by_hand.take() / n
    return loss, added


class _ByTpRank(nn.Module):
    """What the tp ranks make of a module in a sharded region, one after the other."""

    def __init__(self, module, dim, tp):
        super().__init__()
        self.module, self.dim, self.tp = module, dim, tp

    def forward(self, *inputs):
        number, outputs = int(torch.randint(2**62, ())), []
        after = torch.get_rng_state()
        for tp_rank, parts in enumerate(zip(*(t.chunk(self.tp, self.dim) for t in inputs), strict=True)):
            torch.manual_seed(number + tp_rank)
            outputs.append(self.module(*parts))
        torch.set_rng_state(after)
        return torch.cat(outputs, self.dim)


def _draw_by_tp_rank(case, model):
    for name, block in model.named_children():
        if name.startswith("block"):
            block.attention.mix = _ByTpRank(block.attention.mix, 1, case.tp)  # (N, H, T, D / n_heads), by heads
            if case.model == "dropout seq":
                block.dropout = _ByTpRank(block.dropout, 1, case.tp)  # (N, T, D), by tokens


# ---------------------------------------------------------------------------------------------------- on ranks


def whole(tensor):
    if isinstance(tensor, DTensor):
        tensor = tensor.to(tensor.device_mesh.device_type)  # offloaded ones are on the CPU, where NCCL sends nothing
        with quiet_redistribution():  # a line for each rank and weight would drown the table
            tensor = tensor.full_tensor()
    return None if tensor is None else tensor.detach().clone()


def plain(name):
    return name.removeprefix("module.")


def _own_tokens(own, each):
    return own.unsqueeze(0), 0


def _by_copies(x, sent, got, group, factor):
    return _EXCHANGE(x, sent, got, group, 1.0)


_ADD_LOSS, _EXCHANGE = balance.add_loss, collectives._Exchange.apply
OF_EXPERTS = {  # wrong variants: what they replace
    "loss of routers over dp": (routing, "add_loss", lambda x, loss, then: _ADD_LOSS(x, loss / 2, then)),
    "each rank's own tokens": (routing, "_counts_of_ranks", _own_tokens),
    "capacity of each rank": (routing, "_counts_of_ranks", _own_tokens),
    "experts divided by their copies": (collectives._Exchange, "apply", _by_copies),
}


def train(case):
    """This rank's part, through ddl's public names. Wrong variants replace one thing each."""
    with mock.patch.object(*OF_EXPERTS[case.wrong]) if case.wrong in OF_EXPERTS else contextlib.nullcontext():
        return _train(case)


def _train(case):
    model, loader, loss_fn = build_model(case), build_loader(case), MODELS[case.model][2]
    names = list(model.state_dict())
    if case.model in DROPPING:
        torch.manual_seed(FIRST_SEED + ddl.get_mesh().rank)
    before = ddl_model.apply_plan, ddl_model.share_random_stream
    if case.wrong == "untied over tp":
        ddl_model.apply_plan = _cut_without_tying
    if case.wrong == "streams not shared":
        ddl_model.share_random_stream = lambda mesh: None
    try:
        model = _cut(case, model)
    finally:
        ddl_model.apply_plan, ddl_model.share_random_stream = before
    if case.wrong == "positions of the part":
        model.module.embed.__class__ = Embedding
    if case.wrong == "bias once a rank":
        type(model.conv2)._conv_forward = _add_bias_on_each_rank
    if case.wrong == "untied over pp":
        stages = stages_of(model)
        stages.cut = dataclasses.replace(stages.cut, shared=[])
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=1.0))
    wrong_losses = {
        "sum over dp": lambda output, y: 2 * loss_fn(output, y),
        "a target lost at each cut": lambda output, y: loss_fn(output[:, :-1], y[:, :-1]),
    }
    trainer = ddl.create_supervised_trainer(
        model,
        optimizer,
        wrong_losses.get(case.wrong, loss_fn),
        checks=not (case.wrong and case.cp * case.tp > 1),  # which would refuse it
        gradient_accumulation_steps=case.accumulation,
        max_norm=None if case.wrong == "clipped by the local norm" else case.max_norm,
    )
    if case.rounds:
        ddl.LocalSGD(H=case.rounds).attach(trainer, model, optimizer)
    if case.wrong == "clipped by the local norm":
        optimizer.register_step_pre_hook(lambda *_: _clip_locally(model, case.max_norm))
    losses, norms, gradients = [], [], {}

    @trainer.on(Events.ITERATION_COMPLETED)
    def record(engine):
        losses.append(engine.state.output / (2 if case.wrong == "sum over dp" else 1))
        steps, rest = divmod(engine.state.iteration, case.accumulation)
        if rest == 0:
            if case.max_norm is not None and not case.wrong:
                norms.append(engine.state.grad_norm)
            if steps == 1 and not case.rounds:  # in a round they are a rank's own
                gradients.update({plain(n): whole(p.grad) for n, p in model.named_parameters()})
            if steps == STEPS:
                engine.terminate()

    unasked = contextlib.nullcontext()
    if case.wrong == "stale keys in the backward":
        unasked = mock.patch.object(ring._RingAttention, "backward", _with_stale_keys(ring._RingAttention.backward))
    with unasked:  # a loader that ddl does not know has no rows to weight by
        trainer.run(list(loader) if case.wrong == "unweighted mean" else loader, max_epochs=10**6)
    weights = {plain(n): whole(p) for n, p in model.named_parameters()}
    if not case.wrong:
        assert list(ddl.full_state_dict(model)) == names
    if case.hook and case.hook.startswith("powersgd"):
        assert model.comm_state.power.total_numel_after_compression > 0
    return Trained(losses, norms, gradients, weights)


def _cut_without_tying(model, styles, tp_mesh):
    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), tp_mesh, style)


def _with_stale_keys(backward):
    """In each step the keys and values that this rank began with."""

    def wrong(ctx, gradient):
        def stale(pair, shared):
            return (((shared.rank - step) % shared.size, pair) for step in range(shared.size))

        with mock.patch.object(ring, "_circulate", stale):
            return backward(ctx, gradient)

    return staticmethod(wrong)


def _add_bias_on_each_rank(self, x, weight, bias):
    part = F.conv2d(x, weight.to_local(), bias.to_local(), padding=1)
    total = DTensor.from_local(part, weight.device_mesh, [Partial()], run_check=False)
    return total.redistribute(placements=[Replicate()]).to_local()


def _clip_locally(model, max_norm):
    local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    norm = torch.stack([g.square().sum() for g in local]).sum().sqrt()
    for gradient in local:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


def refusal(case):
    """This rank's ValueError. Each rank tries alone, in its turn: one that sends or waits would never return."""
    if not case.refused_batch:
        return each_alone(_cut, case, build_model(case))
    model, rows = _cut(case, build_model(case)), case.rows % case.batch_size
    x, y = MODELS[case.model][1](rows, torch.Generator().manual_seed(1)).tensors
    return each_alone(model.train_step, x, y, MODELS[case.model][2])


def _cut(case, model):
    options = {"schedule": case.schedule, "n_microbatches": case.n_microbatches, "split": case.split}
    plan = MODELS[case.model][3]
    if case.wrong == "no ShardedRandom":
        plan = {name: style for name, style in plan.items() if not name.endswith((".mix", ".dropout"))}
    options |= {"shard": case.shard or None, "reshard_after_forward": case.reshard, "offload": case.offload}
    options |= {"dp_sync": "local"} if case.rounds else {}
    options |= {"comm_hook": default_hooks.allreduce_hook if case.hook == "all-reduce" else case.hook}
    return ddl.auto_model(model, plan, **options)


def each_alone(attempt, *args, **kwargs):
    message, mesh = "", ddl.get_mesh()
    for rank in range(mesh.world_size):
        if rank == mesh.rank:
            try:
                attempt(*args, **kwargs)
            except ValueError as error:
                message = str(error)
        dist.barrier()
    return message


@in_float64
def run_on_rank(local_rank, cases):
    logging.getLogger("ignite.distributed.auto.auto_model").setLevel(logging.WARNING)
    return [refusal(case) if case.refused else train(case) for case in cases]


# -------------------------------------------------------------------------------------------------- comparison


@dataclass
class Outcome:
    """What the table says of a case."""

    case: Case
    errors: dict[str, float] | None = None  # of loss, gradients, weights, norm
    text: str = ""
    passed: bool = False

    def __str__(self) -> str:
        mark = "   " if self.passed else "!! "
        if self.errors is None:
            return f"{mark}{self.case.line:108} {self.text}"
        numbers = "  ".join(f"{self.errors[k]:8.1e}" for k in COLUMNS)
        return f"{mark}{self.case.line:108} {numbers}  {self.text}"


COLUMNS = ("loss", "gradients", "weights", "norm")


def largest(pairs):
    """The largest absolute difference; missing on one side, of another length or not finite: infinitely wrong."""
    worst = 0.0
    for one, other in pairs:
        if (one is None) != (other is None):
            return float("inf")
        if one is not None:
            one, other = (torch.as_tensor(v, dtype=torch.float64) for v in (one, other))
            if one.shape != other.shape or not torch.isfinite(one).all():
                return float("inf")
            worst = max(worst, (one - other).abs().max().item() if one.numel() else 0.0)
    return worst


def compare(case, ranks):
    """Errors of the worst rank against one process. Every parameter must be on some rank."""
    one = reference(case)
    errors = dict.fromkeys(COLUMNS, 0.0)
    for rank in ranks:
        pairs = {
            "loss": [(rank.losses, one.losses)],
            "norm": [(rank.norms, [] if case.wrong else one.norms)],
            "gradients": [(rank.gradients[n], one.gradients[n]) for n in rank.gradients],
            "weights": [(rank.weights[n], one.weights[n]) for n in rank.weights],
        }
        errors = {key: max(errors[key], largest(pairs[key])) for key in COLUMNS}
    # Where weights are tied, a rank lists them under their first name; the second is on it, or on another stage.
    of_stage = case.dp * case.cp * case.tp
    for replica in range(of_stage):
        held = set().union(*(ranks[replica + stage * of_stage].weights for stage in range(case.pp)))
        missing = {n for n, p in build_model(case).named_parameters()} - held
        assert not missing, f"no rank of replica {replica} holds {missing}"
    return errors


def judge(case, results):
    if case.refused:
        said = [message if case.refused in message else f"?? {message!r}" for message in results]
        passed = all(case.refused in message for message in results)
        return Outcome(case, None, f"refused: {case.refused}" if passed else f"not refused: {said}", passed)
    errors = compare(case, results)
    worst = max(errors.values())
    if case.wrong:
        return Outcome(case, errors, f"wrong on purpose: {case.wrong}", worst > CLEARLY_WRONG)
    return Outcome(case, errors, "", worst <= TOLERANCE)


def launch(mesh, cases):
    dp, pp, tp, replicas, cp, ep = mesh
    if dp * pp * tp * cp == 1:
        return [[result] for result in ddl.Parallel().run(run_on_rank, cases)[0]]
    parallel = ddl.Parallel(
        "gloo",
        dp * pp * tp * cp,
        cp=cp,
        ep=ep,
        dp=dp,
        pp=pp,
        tp=tp,
        dp_replicate=replicas if replicas > 1 else None,
        timeout=ALONE + EACH * len(cases),
    )
    return list(zip(*parallel.run(run_on_rank, cases), strict=True))


def run(mesh, cases):
    """All cases of a mesh in one launch. Where one fails, each has a launch of its own, to find the culprit."""
    try:
        by_case = launch(mesh, cases)
    except (ddl.RankError, ValueError, RuntimeError) as error:
        if len(cases) == 1:
            yield Outcome(cases[0], None, f"FAILED: {str(error).strip()[-600:]}")
            return
        for case in cases:
            yield from run(mesh, [case])
        return
    for case, results in zip(cases, by_case, strict=True):
        yield judge(case, results)


def by_mesh(cases):
    groups: dict[tuple[int, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(case.mesh, []).append(case)
    return dict(sorted(groups.items(), key=lambda item: (math.prod(item[0][:5]) // item[0][3], item[0])))


class Outcomes:
    """Outcomes by case; a mesh is launched when the first of its cases is asked for.

    Each is given once: a test that runs again (``--count``) launches again.
    """

    def __init__(self, cases):
        self.groups = by_mesh(cases)
        self.cases = [case for group in self.groups.values() for case in group]
        self.known = {}

    def take(self, case):
        if case not in self.known:
            group = self.groups[case.mesh]
            self.known.update(zip(group, run(case.mesh, group), strict=True))
        return self.known.pop(case)


def main(words_of_lines):
    torch.set_num_threads(1)
    cases = [case for case in all_cases() if all(word in case.line for word in words_of_lines)]
    if not cases:
        print(f"no case has {' and '.join(words_of_lines)} in its line; all lines: make parity", file=sys.stderr)
        return 2
    print(f"   {'mesh':15} {'model':13} {'schedule':29} {'trap':47}  {'  '.join(f'{c:>8.8}' for c in COLUMNS)}")
    start, outcomes = time.perf_counter(), []
    for mesh, group in by_mesh(cases).items():
        for outcome in run(mesh, group):
            outcomes.append(outcome)
            print(outcome, flush=True)
    compared = [o for o in outcomes if o.errors is not None and not o.case.wrong]
    worst = max((max(o.errors.values()) for o in compared), default=0.0)
    wrong = [max(o.errors.values()) for o in outcomes if o.errors and o.case.wrong]
    off = f"wrong variants off by at least {min(wrong):.1e}; " if wrong else ""
    failed = [o for o in outcomes if not o.passed]
    print(
        f"{len(outcomes)} cases in {time.perf_counter() - start:.0f} s: {len(compared)} compared, worst error "
        f"{worst:.1e} (allowed {TOLERANCE:.0e}); {sum(bool(o.case.refused) for o in outcomes)} refused; {off}"
        f"{len(failed)} not as expected"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP would warn on each rank of what powersgd needs
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("word", nargs="*", help="run the cases whose line has all these words")
    sys.exit(main(parser.parse_args().word))
