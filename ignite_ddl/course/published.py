"""Published step times of large models, what ``lab.plan`` predicts for them, and the constants fitted to three rows.

Sources, with the tables' numbers as printed:

- Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021 (arXiv
  2104.04473), table 1 (ten models) and table 2 (ZeRO-3 without, and "PTD" with, model parallelism).
- Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023 (arXiv 2205.05198),
  tables 3 and 5, and section 6.3 for 530 billion parameters on 2,240 GPUs.
- Jiang et al., "MegaScale", NSDI 2024 (arXiv 2402.15627), tables 1 and 2, the rows of Megatron-LM. (MegaScale's own
  change the model: parallel blocks, sliding windows.)
- Llama Team, "The Llama 3 Herd of Models", 2024 (arXiv 2407.21783), table 4, the rows without context parallelism.
- torchtitan, docs/performance.md as of its first publication: Llama 3.1 8B on 8 GPUs, FSDP, 2 rows of 8,192 tokens a
  GPU, selective recomputation: 5,762 tokens a second and GPU, 6,667 compiled (as this project's field notes have them).
- Rajbhandari et al., "ZeRO", SC 2020 (arXiv 1910.02054), table 1: memory.

What a table leaves open is chosen by the prediction itself, the fastest that fits: the rows of a microbatch in
Narayanan's table 1, and the chunks of its, table 2's and Llama's interleaved schedules. ASSUMED: gradients are sent in
2 bytes; the Megatron-LM of the MegaScale paper recomputes selectively, with sequence parallel, and shards its
optimizer; ZeRO-3 hides what it sends behind compute, the other runs of 2021 to 2024 on A100 nothing; Llama 3's FLOP/s
count attention in full; its stages free what "pointwise" recomputation makes again, in a way that costs no more than
that. torchtitan's selective recomputation, of every second product, costs and keeps what full recomputation of every
second layer does. That a ring between nodes has one port's bandwidth was settled
after a look at the ZeRO-3 rows, which would be three times too fast with all eight ports of a node.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from ignite_ddl.lab import cost
from ignite_ddl.lab.plan import A100, H100, Cluster, Model, Plan, predict

__all__ = ["FITTED", "ROWS", "ZERO_GB", "Row", "errors", "ratios"]


# Their own config.json; weights of 4 bytes sharded, gathered in 2, gradients reduced in 4 (torchtitan's defaults).
_LLAMA = {"kv_heads": 8, "gated": True, "bias": False, "positions": 0, "mask_bytes": 0, "tied": False}
LLAMA_8B = Model(
    32, 4096, 32, 128256, 8192, mlp_width=14336, gradient_bytes=4, optimizer_bytes=10, loss_bytes=4, **_LLAMA
)
LLAMA_405B = Model(126, 16384, 128, 128256, 8192, mlp_width=53248, **_LLAMA)
# Megatron-LM and DeepSpeed until 2023: attention's matrices in memory, one port of a node for a ring.
A100_2021 = A100 | {"best": 0.641, "half_width": 815.0, "spread": False}
# torchtitan's machine: H100 with 96 GB of HBM2e, 500 W. Its peak is not said: an H100's, with an efficiency of its own.
H100_96GB = H100 | {"memory": 96e9, "best": 0.560, "half_width": 815.0, "eager": 1587.0}


class Row(NamedTuple):
    """A line of a published table.

    Attributes:
        table: where it stands.
        name: of the row.
        model: what was trained.
        cluster: where, with the fields of A100 or H100.
        batch: rows of a step.
        mesh: dp, pp and tp.
        how: other arguments of ``predict``.
        seconds: of a step, as published, or from the published FLOP/s.
    """

    table: str
    name: str
    model: Model
    cluster: dict
    batch: int
    mesh: tuple[int, int, int]
    how: dict
    seconds: float

    def predicted(self, **constants: float) -> Plan:
        """The plan of this row; of what the table leaves open, the fastest that fits."""
        dp, pp, tp = self.mesh
        more = {name: self.how[name] for name in ("cp", "ep", "dp_shard", "full_layers") if name in self.how}
        cluster = Cluster(dp * pp * tp * more.get("cp", 1), **(self.cluster | constants))
        each, plans = self.batch // dp, []
        for rows in self.how.get("rows", (1, 2, 4, 8)):
            for chunks in self.how.get("chunks", range(1, 9)) if pp > 1 else [1]:
                if (
                    each % rows
                    or each // rows < pp
                    or self.model.layers < pp * chunks
                    or (chunks > 1 and each // rows % pp)
                ):
                    continue
                plans.append(
                    predict(
                        self.model, cluster, self.batch, dp=dp, pp=pp, tp=tp, microbatches=each // rows,
                        schedule="1f1b" if chunks == 1 else "interleaved_1f1b", n_chunks=chunks,
                        zero=self.how.get("zero", 0), recompute=self.how.get("recompute", "full"), **more,
                    )
                )  # fmt: skip
        # Buffers do not count: those of messages are torch's, and these runs had Megatron-LM's.
        return min(plans, key=lambda one: (one.short > one.memory["buffers"], sum(one.seconds.values())))


ALONE = A100_2021 | {"overlap": 0.0}  # nothing is hidden behind compute
GPT = Model(96, 12288, 96, 51200, 2048, sequence_parallel=False)
BIG = dataclasses.replace(GPT, layers=105, width=20480, heads=128)


def _narayanan() -> Iterable[Row]:
    table_1 = [  # billions of parameters, heads, width, layers, tp, pp, GPUs, batch, teraFLOP/s of a GPU
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
        (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
        (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
        (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
        (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
        (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
        (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
        (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
    ]
    for billions, heads, width, layers, tp, pp, n, batch, rate in table_1:
        model = dataclasses.replace(GPT, layers=layers, width=width, heads=heads)
        seconds = _from_rate(model, batch, n, rate, recompute=True)
        name = f"{billions:g}B on {n}"
        yield Row("Narayanan 1", name, model, ALONE, batch, (n // tp // pp, pp, tp), {}, seconds)
    table_2 = [  # model, tp × pp, batch, GPUs, rows of a microbatch, teraFLOP/s of a GPU
        (GPT, 1, 1536, 384, 4, 144), (GPT, 1, 1536, 768, 2, 88), (GPT, 1, 1536, 1536, 1, 44),
        (BIG, 1, 2560, 640, 4, 138), (BIG, 1, 2240, 1120, 2, 98), (BIG, 1, 2240, 2240, 1, 48),
        (GPT, 96, 1536, 384, 1, 153), (GPT, 96, 1536, 768, 1, 149), (GPT, 96, 1536, 1536, 1, 141),
        (BIG, 280, 2240, 560, 1, 171), (BIG, 280, 2240, 1120, 1, 167), (BIG, 280, 2240, 2240, 1, 159),
    ]  # fmt: skip
    for model, cut, batch, n, size, rate in table_2:
        name = f"{'175B' if model is GPT else '530B'} on {n:,}, {'ZeRO-3' if cut == 1 else 'PTD'}"
        mesh = (n // cut, max(1, cut // 8), min(8, cut))
        how = {"rows": [size], "zero": 3 if cut == 1 else 0}
        cluster = A100_2021 if cut == 1 else ALONE
        seconds = _from_rate(model, batch, n, rate, recompute=True)
        yield Row("Narayanan 2", name, model, cluster, batch, mesh, how, seconds)


def _korthikanti() -> Iterable[Row]:
    table_5 = [  # name, layers, width, heads, pp, chunks, batch, rows of a microbatch, seconds in full and selective
        ("22B on 8", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
        ("175B on 64", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
        ("530B on 280", 105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83),
        ("1T on 512", 128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
    ]
    for name, layers, width, heads, pp, chunks, batch, size, *seconds in table_5:
        model = dataclasses.replace(GPT, layers=layers, width=width, heads=heads)
        how = {"rows": [size], "chunks": [chunks]}
        yield Row("Korthikanti 5", f"{name}, full", model, ALONE, batch, (1, pp, 8), how, seconds[0])
        model, how = dataclasses.replace(model, sequence_parallel=True), how | {"recompute": "selective"}
        yield Row("Korthikanti 5", f"{name}, selective", model, ALONE, batch, (1, pp, 8), how, seconds[1])
        if pp == 35:
            yield Row("Korthikanti 6.3", "530B on 2,240", model, ALONE, 8 * batch, (8, pp, 8), how, 39.15)


def _since_2024() -> Iterable[Row]:
    megatron = Model(96, 12288, 128, 64000, 2048)
    table_2 = {256: 40.0, 512: 21.2, 768: 15.2, 1024: 11.9, 3072: 29.02, 6144: 14.78, 8192: 12.24, 12288: 8.57}
    how = {"rows": [1], "chunks": [6], "recompute": "selective", "zero": 1}
    for n, seconds in table_2.items():
        batch = 768 if n <= 1024 else 6144
        yield Row("MegaScale 2", f"175B on {n:,}", megatron, ALONE, batch, (n // 64, 8, 8), how, seconds)
    for dp, rate in ((64, 430), (128, 400)):
        how = {"rows": [1], "recompute": "pointwise", "zero": 1}
        seconds = LLAMA_405B.flops(2048) / (128 * dp * rate * 1e12)
        yield Row("Llama 3, 4", f"405B on {128 * dp:,}", LLAMA_405B, H100, 2048, (dp, 16, 8), how, seconds)
    for kernels, tokens in (("eager", 5762), ("compiled", 6667)):
        model = dataclasses.replace(LLAMA_8B, kernels=kernels)
        how = {"rows": [2], "recompute": "full", "full_layers": 16, "zero": 3}
        yield Row("torchtitan", f"8B on 8, {kernels}", model, H100_96GB, 16, (8, 1, 1), how, 2 * 8192 / tokens)


def _from_rate(model: Model, batch: int, n: int, rate: float, recompute: bool) -> float:
    """Seconds of a step, from teraFLOP/s of a GPU; Narayanan et al. count recomputation as work, Llama 3 does not."""
    shape = (batch, model.sequence, model.width, model.layers, model.vocabulary)
    return cost.transformer_flops(*shape, recompute=recompute) / (n * rate * 1e12)


ROWS = [*_narayanan(), *_korthikanti(), *_since_2024()]
# Fitted in two rounds. First, before any row of published_since was read: "best" and "half_width" of A100_2021 are the
# two numbers with which the smallest and the largest model of Narayanan's first table take their published times;
# "best" and "eager" of torchtitan's H100 the same for its two rows; H100's "best" was then that of Llama 3 on 8,192.
# The rows of published_since showed these to be wrong for the software of today (median error 31 % of 175 rows). So,
# second, with those errors seen: A100 has "best" and "eager" from two rows of MosaicML (and "half_width" smaller than
# "eager" by torchtitan's ratio), H100 "best" and "half_width" from two of Megatron-core, "eager" from one of MosaicML.
FITTED = (
    "1.7B on 32", "1008B on 3072", "8B on 8, compiled", "8B on 8, eager", "7b on 8 A100, 96 × 2,048",
    "1b on 8 A100, 448 × 2,048", "462B on 6,144 H100", "1.7B on 48 H100", "7b on 8 H100, 48 × 2,048",
)  # fmt: skip

# Rajbhandari et al. 2020, table 1: GB of a device with stages 1, 2 and 3, by parameters and data-parallel ranks. (The
# first two lines of its "1T" column count 16,000 GB for 1T parameters.)
ZERO_GB = {
    7.5e9: {
        1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32),
        256: (518, 263, 8), 1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
        256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6),
    },
}  # fmt: skip


def errors(rows: Iterable[Row] = ROWS) -> dict[str, float]:
    """How far each row is predicted from what was published: seconds over seconds, less 1, by table and name."""
    return {f"{row.table}: {row.name}": sum(row.predicted().seconds.values()) / row.seconds - 1 for row in rows}


def ratios(rows: Iterable[Row]) -> list[float]:
    """How far ratios of two runs are predicted, for all pairs of one table, model and kind of device; sorted.

    Returns:
        list: the predicted ratio over the published one, or its inverse, whichever is more than 1.
    """
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        model = dataclasses.replace(row.model, kernels="fused", sequence_parallel=True)
        kind = (row.table, model, row.cluster["memory"], row.cluster["flops"], row.cluster["best"])
        groups.setdefault(kind, []).append(sum(row.predicted().seconds.values()) / row.seconds)
    pairs = [pair for group in groups.values() for pair in itertools.combinations(group, 2)]
    return sorted(max(one / other, other / one) for one, other in pairs)
