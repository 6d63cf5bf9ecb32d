"""Published runs to which nothing was fitted: added after ``lab.plan``'s formulas and constants had been committed.

Each was read at its source in November 2026, in the stored copy of the repository that is named (commit, path):

- MosaicML: mosaicml/llm-foundry 8c8dd48, scripts/train/benchmarking/README.md, the tables of H100 80GB BF16 (both) and
  of A100 80GB, all rows; models by scripts/train/yamls/pretrain/mpt-*.yaml. FSDP, FULL_SHARD.
- torchtitan: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (31a17bf), table 3; docs/performance.md
  (0413364) on 64 A100; docs/performance.md as of July 2024 for 405B on 128 H100.
- PyTorch and IBM: pytorch/pytorch.github.io, _posts/2024-03-13-maximizing-training.md (2ad1005), table 1;
  _posts/2024-05-21-maximizing-training-throughput.md (d3e59b8), tables 1 and 2, the compiled column, by nanoGPT's
  convention, 6 N + 12 l h s operations a token; foundation-model-stack/fms-fsdp, README.md (0d31998). Models by
  fms_fsdp/utils/config_utils.py (08d8ae7).
- Megatron-core: NVIDIA/Megatron-LM, images/model_table.png (06d70a1) of its README; 131,072 words, 4,096 tokens.
- OLMo-core: allenai/OLMo-core, README.md of its first releases; src/scripts/train/OLMo-7B.py (0164b60), OLMo-13B.py.
- NeMo AutoModel: NVIDIA-NeMo/Automodel, docs/performance-summary.md (01926a5), Qwen3 MoE 30B. Recomputation and the
  loss's dtype: examples/benchmark/configs/qwen3_moe_30b_te_deepep.yaml (092af93), read after the row was predicted; as
  assumed before, without recomputation, it was 1 % off, in 199 GB, which its GPUs do not have.
- Llama 3: table 4 of the paper, the row with context parallelism, as glennklockwood.com/garden/llama-3.1 reprints it.

What they leave open, ASSUMED before any was predicted: eager kernels where compilation is not mentioned; attention that
is never kept ("selective"); PyTorch's "selective" recomputation as full recomputation of every second layer; gradients
reduced in 4 bytes; all that FSDP sends beside the passes; where only a node's network is given, a ring between nodes
has all of it, since it leaves each node once; Megatron-core: distributed optimizer, no recomputation but attention's,
rows of a microbatch and chunks as they predict fastest; OLMo-core: one node, as its scripts have it.

The first round, blind: with the constants of 714737b (A100 from two rows of 2021, H100 from Llama 3's first) the
median |error| was 31 % of 175 rows, 30 % of them within 20 %: MosaicML on A100 70 %, on H100 25 %, torchtitan 30 %,
PyTorch 17 and 23 %, fms-fsdp 30 %, Megatron-core 8 %, OLMo-core 9 %, NeMo AutoModel 7 %, Llama 3 2 %. The second, not
blind: a ring has the ports of all its members in a node, logits have the loss's dtype, and constants are fitted to the
rows of ``published.FITTED``, five of them from here.

Read and not counted, since the model cannot say them: all rows in FP8 (torchtitan's tables 2, 4, 5 and 6, NeMo's and
Megatron Bridge's summaries, MosaicML's FP8), DeepSeek-V3, Kimi K2 (latent attention), GPT-OSS (windows, sinks), B200
and GB200 (no constants), async TP. MosaicML's table of A100 40GB: the same chip, the same code.

All of these ran, and two do not fit by our count, buffers of messages apart (torch's, which Megatron-LM does not have).
530B on 640 with ZeRO-3: DeepSpeed gathers a part of a layer at a time; counted is a layer. Qwen3 30B-A3B, 4.5 GB short:
not understood. (405B on 128 H100 was 16 GB short until November 2026: with sequence parallel a rank keeps its tokens of
the input of a layer that is recomputed; counted were all.)
"""

from __future__ import annotations

from dataclasses import replace

from ignite_ddl.course.published import H100_96GB, LLAMA_8B, LLAMA_405B, Row
from ignite_ddl.lab.cost import Link
from ignite_ddl.lab.plan import A100, H100, Model

__all__ = ["ROWS"]

# Sharded weights of 4 bytes, gathered in 2, gradients reduced in 4; losses of float32.
_FSDP = {"gradient_bytes": 4, "optimizer_bytes": 10, "mask_bytes": 0, "loss_bytes": 4}
_MPT = {  # width, heads, layers
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip
_MOSAIC = {  # model, tokens of a row, GPUs, rows of a microbatch, microbatches, tokens a second of all, recomputation
    "H100": """
70b 2048 64 8 4 66523 full, 70b 2048 32 2 16 28242 full, 30b 8192 8 1 21 11072 full, 30b 4096 8 1 21 14419 full,
30b 2048 32 14 3 73860 full, 30b 2048 16 10 3 36209 full, 30b 2048 8 3 21 16022 full, 30b 1024 8 6 21 16672 full,
13b 32768 8 1 3 15812 full, 13b 16384 8 3 3 23881 full, 13b 4096 8 10 3 37740 full, 13b 2048 64 2 1 307209 selective,
13b 2048 32 2 1 153960 selective, 13b 2048 16 2 1 76280 selective, 13b 2048 8 2 1 38336 selective,
13b 1024 8 40 3 44019 full, 7b 65536 8 1 2 15654 full, 7b 32768 8 2 2 26550 full, 7b 8192 8 8 2 55481 full,
7b 4096 8 16 2 68893 full, 7b 2048 8 6 1 85144 selective, 7b 1024 8 64 2 81628 full, 3b 65536 8 1 2 26099 full,
3b 32768 8 3 6 46984 full, 3b 16384 8 1 6 89223 selective, 3b 8192 8 3 6 132626 selective,
3b 4096 8 5 6 167712 selective, 3b 2048 64 6 3 1441663 selective, 3b 2048 32 6 3 736701 selective,
3b 2048 16 10 3 386285 selective, 3b 1024 8 20 6 216369 selective, 3b 512 8 40 6 223721 selective,
1b 65536 8 1 2 44050 full, 1b 32768 8 1 4 96203 selective, 1b 16384 8 2 4 157194 selective,
1b 8192 8 3 4 233256 selective, 1b 4096 8 7 4 308282 selective, 1b 2048 64 20 1 2841754 selective,
1b 2048 32 20 1 1444183 selective, 1b 2048 16 20 1 736596 selective, 1b 2048 8 14 1 363645 selective,
1b 1024 8 18 4 391287 selective, 1b 512 8 56 4 418201 selective, 760m 32768 8 1 2 130333 selective,
760m 16384 8 3 2 222521 selective, 760m 8192 8 6 2 334602 selective, 760m 4096 8 12 2 443674 selective,
760m 2048 32 24 1 2175091 selective, 760m 2048 16 24 1 1096819 selective, 760m 2048 8 24 2 505177 selective,
760m 1024 8 48 2 628648 selective, 760m 512 8 96 2 669998 selective,
70b 2048 512 8 1 515636 full, 70b 2048 256 8 1 265149 full, 70b 2048 128 8 1 135490 full,
30b 2048 512 8 1 1083366 full, 30b 2048 256 8 1 550022 full, 30b 2048 128 8 1 281491 full,
13b 2048 512 16 1 2535811 full, 13b 2048 256 16 1 1277214 full, 13b 2048 128 16 1 650264 full,
7b 2048 512 6 1 4951479 selective, 7b 2048 256 6 1 2590548 selective, 7b 2048 128 6 1 1340830 selective,
3b 2048 512 8 1 11092218 selective, 3b 2048 256 8 1 5829686 selective, 3b 2048 128 8 1 2998098 selective,
1b 2048 512 12 1 20396905 selective, 1b 2048 256 12 1 10894207 selective, 1b 2048 128 12 1 5647854 selective
""",
    "A100": """
70b 2048 64 8 4 26274 full, 70b 2048 32 2 16 11962 full, 30b 8192 8 1 21 4594 full, 30b 4096 8 1 21 6513 full,
30b 2048 8 3 21 7330 full, 30b 1024 8 6 21 7571 full, 30b 512 8 12 21 7739 full, 13b 32768 8 1 3 8134 full,
13b 16384 8 3 3 11454 full, 13b 8192 8 5 3 14362 full, 13b 4096 8 10 3 16482 full, 13b 2048 8 2 3 18097 selective,
13b 1024 8 40 3 18647 full, 7b 65536 8 1 2 8108 full, 7b 32768 8 2 2 13382 full, 7b 16384 8 4 2 19629 full,
7b 8192 8 8 2 25655 full, 7b 4096 8 16 2 29472 full, 7b 2048 8 6 2 37130 selective, 7b 1024 8 64 2 34857 full,
3b 65536 8 1 2 14137 full, 3b 32768 8 3 6 24235 full, 3b 16384 8 1 6 44233 selective, 3b 8192 8 3 6 61567 selective,
3b 4096 8 5 6 75658 selective, 3b 2048 8 10 2 86491 selective, 3b 1024 8 20 6 92643 selective,
3b 512 8 40 6 97019 selective, 1b 65536 8 1 2 24353 full, 1b 32768 8 1 4 50207 selective,
1b 16384 8 2 4 79650 selective, 1b 8192 8 3 4 110516 selective, 1b 4096 8 7 4 142457 selective,
1b 2048 8 14 4 164109 selective, 1b 1024 8 18 4 176898 selective, 1b 512 8 56 4 185186 selective,
760m 65536 8 1 2 33150 full, 760m 32768 8 1 2 70417 selective, 760m 16384 8 3 2 114198 selective,
760m 8192 8 6 2 167471 selective, 760m 4096 8 12 2 218808 selective, 760m 2048 8 24 2 259472 selective,
760m 1024 8 48 2 238122 selective, 760m 512 8 96 2 235571 selective, 350m 65536 8 1 2 60195 selective,
350m 32768 8 2 2 109222 selective, 350m 16384 8 4 2 188478 selective, 350m 8192 8 8 2 292559 selective,
350m 4096 8 16 2 396442 selective, 350m 2048 8 32 2 470263 selective, 350m 1024 8 64 2 518504 selective,
350m 512 8 128 2 554643 selective, 125m 65536 8 1 2 162946 selective, 125m 32768 8 2 2 291256 selective,
125m 16384 8 4 2 480322 selective, 125m 8192 8 8 2 723142 selective, 125m 4096 8 16 2 947172 selective,
125m 2048 8 40 2 1142641 selective, 125m 2048 8 32 2 1133901 selective, 125m 1024 8 64 2 1251751 selective,
125m 512 8 128 2 1325455 selective
""",
}
_LLAMA_2 = {  # width, heads, layers, heads of keys and values, width of the MLP
    "7B": (4096, 32, 32, 32, 11008), "13B": (5120, 40, 40, 40, 13824), "34B": (8192, 64, 48, 8, 22016),
    "70B": (8192, 64, 80, 8, 28672),
}  # fmt: skip


def _mosaic() -> list[Row]:
    rows = []
    for device, lines in _MOSAIC.items():
        for line in lines.replace("\n", " ").split(","):
            name, sequence, n, size, count, tokens, again = line.split()
            sequence, n, size, count = int(sequence), int(n), int(size), int(count)
            width, heads, layers = _MPT[name]
            model = Model(layers, width, heads, 50368, sequence, kernels="eager", **(_FSDP | {"loss_bytes": 0}))
            how = {"rows": [size], "recompute": again, "zero": 3}
            batch = n * size * count
            rows.append(
                Row(
                    "MosaicML", f"{name} on {n} {device}, {batch} × {sequence:,}", model,
                    {"A100": A100, "H100": H100}[device], batch, (n, 1, 1), how, batch * sequence / int(tokens),
                )
            )  # fmt: skip
    return rows


def _llama_2(name: str, kernels: str = "eager", vocabulary: int = 32000) -> Model:
    width, heads, layers, kv_heads, mlp = _LLAMA_2[name]
    return Model(
        layers, width, heads, vocabulary, 4096, False, kv_heads=kv_heads, mlp_width=mlp, gated=True, bias=False,
        positions=0, kernels=kernels, **_FSDP,
    )  # fmt: skip


def _sharded(table: str, name: str, model: Model, cluster: dict, n: int, rows: int, half: str, seconds: float) -> Row:
    """FSDP alone, one microbatch; ``half``: "none", "half" or "full" recomputation of layers, or "HSDP", none of it."""
    how = {"rows": [rows], "zero": 3, "recompute": "selective" if half in ("none", "HSDP") else "full"}
    how |= {"full_layers": model.layers // 2} if half == "half" else {}
    how |= {"dp_shard": 8} if half == "HSDP" else {}
    return Row(table, name, model, cluster, n * rows, (n, 1, 1), how, seconds)


def _torchtitan() -> list[Row]:
    rows = []
    for kernels, tokens in (("eager", 5605), ("compiled", 6514)):
        model = replace(LLAMA_8B, kernels=kernels)
        name = f"8B on 128 H100, {kernels}"
        rows.append(_sharded("torchtitan", name, model, H100_96GB, 128, 2, "half", 2 * 8192 / tokens))
    eight, large = (replace(model, kernels="eager", **_FSDP) for model in (LLAMA_8B, LLAMA_405B))
    seventy = replace(eight, layers=80, width=8192, heads=64, mlp_width=28672)
    for name, model, size, half, tokens in (
        ("8B, selective layer", eight, 1, "half", 2904), ("8B, selective op", eight, 1, "half", 2973),
        ("70B, full", seventy, 1, "full", 331), ("Llama 2 13B, none", _llama_2("13B"), 2, "none", 2162),
        ("Llama 2 13B, selective layer", _llama_2("13B"), 2, "half", 1914),
        ("Llama 2 13B, selective op", _llama_2("13B"), 2, "half", 1904),
        ("Llama 2 70B, selective op", _llama_2("70B"), 1, "half", 355),
        ("Llama 2 70B, full", _llama_2("70B"), 2, "full", 353),
    ):  # fmt: skip
        seconds = size * model.sequence / tokens
        rows.append(_sharded("torchtitan", f"{name}, on 64 A100", model, A100, 64, size, half, seconds))
    how = {"rows": [2], "zero": 3, "recompute": "full"}
    rows.append(Row("torchtitan", "405B on 128 H100, full", large, H100_96GB, 32, (16, 1, 8), how, 2 * 8192 / 109 / 8))
    return rows


def _ibm() -> list[Row]:
    rows = []
    half = {"7B": "HSDP", "13B": "half", "34B": "full", "70B": "full"}
    a100 = A100 | {"between": Link(10e-6, 6.25e9)}  # 400 Gbit/s of a node
    h100 = H100 | {"between": Link(10e-6, 12.5e9)}  # 800
    for name, of_a100, of_h100 in (("7B", 3700, 7500), ("13B", 1800, 3800), ("34B", 700, 1550), ("70B", 370, 800)):
        for n, kind, cluster, tokens in ((128, "A100", a100, of_a100), (96, "H100", h100, of_h100)):
            model, seconds = _llama_2(name), 2 * 4096 / tokens
            rows.append(_sharded("PyTorch 2024-03", f"{name} on {n} {kind}", model, cluster, n, 2, half[name], seconds))
    for name, of_a100, of_h100 in (
        ("7B", 0.68, 0.45), ("13B", 0.60, 0.43), ("34B", 0.54, 0.38), ("70B", 0.55, 0.38),
    ):  # fmt: skip
        for n, kind, cluster, mfu in ((128, "A100", a100, of_a100), (464, "H100", H100, of_h100)):
            model = _llama_2(name, "compiled")
            work = 6 * model.parameters + 12 * model.layers * model.width * model.sequence
            seconds = 2 * 4096 * work / mfu / cluster["flops"]
            rows.append(_sharded("PyTorch 2024-05", f"{name} on {n} {kind}", model, cluster, n, 2, half[name], seconds))
    for name, size, how, tokens in (
        ("7B", 2, "HSDP", 3760), ("13B", 1, "HSDP", 1700), ("34B", 8, "full", 772), ("70B", 6, "full", 380),
    ):  # fmt: skip
        model, seconds = _llama_2(name), size * 4096 / tokens
        rows.append(_sharded("fms-fsdp", f"{name} on 128 A100", model, a100, 128, size, how, seconds))
    return rows


def _megatron() -> list[Row]:
    rows = []
    for billions, heads, width, layers, tp, pp, batch, rate in (
        (1.7, 16, 2048, 24, 1, 1, 192, 408.8), (7.1, 32, 4096, 30, 2, 1, 192, 465.9),
        (16, 48, 6144, 32, 4, 1, 192, 489.1), (32, 56, 7168, 48, 8, 1, 192, 459.6),
        (70, 64, 8192, 84, 8, 2, 384, 419.7), (119, 80, 10240, 92, 8, 4, 768, 420.5),
        (177, 96, 12288, 96, 8, 6, 1152, 432.8), (314, 128, 16384, 96, 8, 8, 1536, 474.4),
        (462, 144, 18432, 112, 8, 16, 3072, 459.9),
    ):  # fmt: skip
        model = Model(layers, width, heads, 131072, 4096)
        n = 48 * tp * pp
        how = {"recompute": "selective", "zero": 1}
        seconds = model.flops(batch) / (n * rate * 1e12)
        rows.append(
            Row("Megatron-core", f"{billions:g}B on {n:,} H100", model, H100, batch, (48, pp, tp), how, seconds)
        )
    return rows


def _others() -> list[Row]:
    rows = []
    for name, size, batch, tokens in (("7B", 2, 1024, 10000), ("13B", 1, 2048, 4600)):
        model = _llama_2(name, "compiled", vocabulary=100352)
        how = {"rows": [size], "zero": 3, "recompute": "selective"}
        rows.append(
            Row("OLMo-core", f"{name} on 8 H100", model, H100, batch, (8, 1, 1), how, batch * 4096 / 8 / tokens)
        )
    mixture = Model(
        48, 2048, 32, 151936, 4096, False, kv_heads=4, head_width=128, gated=True, bias=False, positions=0, experts=128,
        chosen=8, expert_width=768, **(_FSDP | {"loss_bytes": 2}),
    )  # fmt: skip
    how = {"rows": [4], "zero": 3, "recompute": "full", "ep": 8}
    rows.append(Row("NeMo AutoModel", "Qwen3 30B-A3B on 8 H100", mixture, H100, 512, (8, 1, 1), how, 21.773))
    long = replace(LLAMA_405B, sequence=131072)
    how = {"rows": [1], "recompute": "pointwise", "zero": 1, "cp": 16}
    seconds = long.flops(128) / (16384 * 380e12)
    rows.append(Row("Llama 3, 4", "405B on 16,384, 131,072 tokens", long, H100, 128, (8, 16, 8), how, seconds))
    return rows


ROWS = [*_mosaic(), *_torchtitan(), *_ibm(), *_megatron(), *_others()]
