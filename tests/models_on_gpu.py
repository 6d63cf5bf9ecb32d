"""That a step's checks refuse no right model on CUDA: GPTs, ResNets and others in each precision, on one GPU by NCCL.

    python tests/models_on_gpu.py                       all of them, about four minutes
    python tests/models_on_gpu.py dp2 gpt               those whose line has all these words
    python tests/models_on_gpu.py --backend gloo dp2    without a GPU: tries this program, not CUDA

Kernels of a GPU round by the number of rows, TF32 and 16 bits round more: what compares parts of a batch with the
batch has to allow for that. Losses are held beside one process on the same device and in the same precision.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Events
from one_gpu import gpu_or_exit, run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.course import GPT

LENGTH, VOCABULARY, BATCH, ROWS = 64, 96, 16, 16 * 3 + 6
LIMIT = 300  # seconds of a mesh
MESHES = {
    "dp2": {"dp": 2},
    "dp2 shard": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "pp2 × tp2": {"pp": 2, "tp": 2},
}
# The precision of weights and of autocast, torch's float32_matmul_precision, and by how much losses may differ.
PRECISIONS = {
    "float32": (torch.float32, None, "highest", 1e-3),
    "TF32": (torch.float32, None, "high", 1e-2),
    "autocast bfloat16": (torch.float32, "bfloat16", "highest", 3e-2),
    "autocast float16": (torch.float32, "float16", "highest", 3e-2),
    "bfloat16": (torch.bfloat16, None, "highest", 6e-2),
}


class RingBlock(nn.Module):
    """A block whose attention sees all tokens over cp."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.norm1, self.norm2 = n_heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (N, T, D)
        heads = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attend = ddl.ring_attention if idist.get_world_size() > 1 else F.scaled_dot_product_attention
        x = x + self.out(attend(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class RingGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, 256), nn.Embedding(LENGTH, 256)
        self.blocks = nn.Sequential(*(RingBlock(256, 8) for _ in range(12)))
        self.head = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, VOCABULARY))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # (N, T)
        n = ids.shape[1]
        places = ddl.sequence_positions(n) if idist.get_world_size() > 1 else torch.arange(n)
        return self.head(self.blocks(self.token(ids) + self.place(places.to(ids.device))))


def of_transformers(kind: str) -> nn.Module:
    import transformers

    name = {"gpt2": "GPT2", "llama": "Llama", "bert": "Bert"}[kind]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8}
    no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    no_dropout |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = getattr(transformers, f"{name}Config")(**sizes, **no_dropout, use_cache=False)
    head = {"gpt2": "LMHeadModel", "llama": "ForCausalLM", "bert": "ForMaskedLM"}[kind]
    return getattr(transformers, name + head)(config)


def of_torchvision(kind: str) -> nn.Module:
    import torchvision.models as made

    if kind == "vit":
        return made.VisionTransformer(64, 16, 6, 8, 256, 512, num_classes=10)
    if kind == "resnet18":  # BatchNorm's statistics would be those of a rank
        return made.resnet18(num_classes=10, norm_layer=lambda n: nn.GroupNorm(8, n))
    return made.convnext_tiny(num_classes=10, stochastic_depth_prob=0.0)


TEXT = {"gpt": lambda: GPT(VOCABULARY, LENGTH, width=256, n_heads=8, n_blocks=12), "ring gpt": RingGPT}
TEXT |= {kind: functools.partial(of_transformers, kind) for kind in ("gpt2", "llama", "bert")}
IMAGES = {kind: functools.partial(of_torchvision, kind) for kind in ("resnet18", "vit", "convnext")}
OF_MESH = {
    "dp2": ["gpt", "gpt2", "llama", "bert", *IMAGES],
    "dp2 shard": ["gpt", "llama", "resnet18"],
    "tp2": ["gpt"],
    "pp2": ["gpt", "vit"],
    "cp2": ["ring gpt"],
    "pp2 × tp2": ["gpt"],
}


def data_of(model: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    if model in TEXT:
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    images = torch.randn(ROWS, 3, 64, 64, generator=generator)
    return TensorDataset(images, torch.randint(10, (ROWS,), generator=generator))


def classes_second(output: torch.Tensor) -> torch.Tensor:
    output = getattr(output, "logits", output)
    return output.transpose(1, 2) if output.ndim == 3 else output


def checked_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Not one of torch's, so that it is checked in steps 1, 2, 4, …"""
    return F.cross_entropy(output, y) / 0.7


def losses_of(local_rank: int, model: str, precision: str, shard: bool) -> list[float]:
    dtype, amp_mode, products, _ = PRECISIONS[precision]
    mesh, device = ddl.get_mesh(), idist.device()
    torch.set_float32_matmul_precision(products)
    torch.manual_seed(0)
    plan = GPT.tensor_plan if mesh.tp_size > 1 else None
    net = ddl.auto_model(
        (TEXT | IMAGES)[model]().to(device, dtype), plan, n_microbatches=mesh.pp_size, shard=shard or None
    )
    fused = device.type == "cuda" and precision != "TF32"  # else foreach
    optimizer = ddl.auto_optim(torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused or None))

    def prepare(batch, device, non_blocking):
        x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
        return (x.to(dtype) if x.is_floating_point() else x), y

    options = {"prepare_batch": prepare, "model_transform": classes_second, "amp_mode": amp_mode, "max_norm": 1.0}
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0) if amp_mode == "float16" else False
    trainer = ddl.create_supervised_trainer(net, optimizer, checked_loss, device, scaler=scaler, **options)
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(data_of(model), batch_size=BATCH), max_epochs=1)
    return losses


def cases_of(words: list[str]) -> list[tuple[str, str, str]]:
    has_transformers = importlib.util.find_spec("transformers") is not None
    return [
        (mesh, model, precision)
        for mesh, models in OF_MESH.items()
        for model in models
        for precision in PRECISIONS
        if (has_transformers or model not in ("gpt2", "llama", "bert"))
        and all(word in f"{mesh}, {model}, {precision}" for word in words)
    ]


def as_rank(folder: Path, backend: str, cases: list[tuple[str, str, str]]) -> None:
    """Trains the cases of one mesh, or of one process; rank 0 writes what came out of each."""
    alone = "RANK" not in os.environ
    axes = {} if alone else MESHES[cases[0][0]]

    def every(local_rank: int) -> None:
        for mesh, model, precision in cases:
            try:
                result = losses_of(local_rank, model, precision, not alone and mesh == "dp2 shard")
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            if idist.get_rank() == 0:
                with (folder / ("alone" if alone else "ranks")).open("a") as file:
                    file.write(json.dumps([model, precision, result]) + "\n")

    if alone:
        with ddl.Parallel(None) as parallel:
            parallel.run(every)
        return
    with ddl.Parallel(backend, timeout=LIMIT, **axes) as parallel:
        parallel.run(every)


def results(folder: Path) -> dict[tuple[str, str], list[float] | str]:
    lines = folder.read_text().splitlines() if folder.exists() else []
    return {(model, precision): result for model, precision, result in map(json.loads, lines)}


def outcome(precision: str, alone: list[float] | str | None, ranks: list[float] | str | None) -> tuple[bool, str]:
    """Whether the ranks trained as one process does, and a word about it."""
    if not isinstance(alone, list) or not isinstance(ranks, list):
        return False, f"FAILED: one process: {alone if isinstance(alone, str) else 'trained'}; ranks: {ranks}"
    errors = [abs(a - b) / abs(a) for a, b in zip(alone, ranks, strict=True)]
    allowed = PRECISIONS[precision][-1]
    return max(errors) <= allowed, f"losses of {len(errors)} steps within {max(errors):.1e} (allowed {allowed:.0e})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="*", help="run the cases whose line has all these words")
    parser.add_argument("--backend", default="nccl", choices=["nccl", "gloo"])
    parser.add_argument("--as-rank", nargs=2, metavar=("FOLDER", "MESH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = cases_of(options.word)
    if options.as_rank:
        folder, mesh = options.as_rank
        as_rank(Path(folder), options.backend, [case for case in cases if case[0] == mesh])
        return 0
    where, failed = gpu_or_exit(options.backend), 0
    for mesh in dict.fromkeys(mesh for mesh, *_ in cases):
        with tempfile.TemporaryDirectory() as name:
            folder, command = (
                Path(name),
                [__file__, "--backend", options.backend, "--as-rank", name, mesh, *options.word],
            )
            alone = run_alone(command)
            world = 4 if mesh == "pp2 × tp2" else 2
            said = alone or run_ranks(world, command, folder, LIMIT)
            by_ranks, by_one = results(folder / "ranks"), results(folder / "alone")
            for _, model, precision in (case for case in cases if case[0] == mesh):
                key = model, precision
                passed, words = outcome(precision, by_one.get(key), by_ranks.get(key))
                failed += not passed
                print(f"{mesh}, {model}, {precision}: {words}", flush=True)
            print(said, end="")
    print(f"{len(cases)} cases on {where}, {options.backend}, torch {torch.__version__}; {failed} not as expected")
    return 1 if failed or not cases else 0


def run_alone(command: list[str]) -> str:
    """Runs one process with all of the device; "" or what it said, if it failed."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=LIMIT)
    return done.stderr[-2000:] if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
