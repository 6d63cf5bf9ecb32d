"""Ring attention on CUDA, over 2 NCCL ranks on one GPU (tests/one_gpu.py), beside torch's attention in float64.

    python tests/ring_on_gpu.py                  on a machine with a GPU
    python tests/ring_on_gpu.py --backend gloo   without one: tries this program, not CUDA

float16 and bfloat16 take the flash kernels from compute capability 8.0 on, the others this package's own formulas.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from one_gpu import gpu_or_exit, run_ranks

import ignite_ddl as ddl
from ignite_ddl.context.kernels import Pairs, has_kernel

RANKS, LENGTH, HEADS = 2, 64, 4
# Of the largest value; without a kernel the same sums as in one process, in another order.
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 3e-6, torch.float64: 1e-14}


def compare(local_rank: int) -> None:
    device = idist.device()
    mine = ddl.sequence_positions(LENGTH // RANKS).to(device)
    for dtype, causal, key_heads, width in itertools.product(TOLERANCE, (False, True), (HEADS, 2), (32, 12)):
        torch.manual_seed(0)
        shapes = [(2, heads, LENGTH, width) for heads in (HEADS, key_heads, key_heads, HEADS)]
        *inputs, gradient = (torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes)
        how = {"is_causal": causal, "enable_gqa": key_heads != HEADS}
        parts = [tensor[:, :, mine].requires_grad_() for tensor in inputs]
        output = ddl.ring_attention(*parts, **how)
        output.backward(gradient[:, :, mine])
        full = [tensor.double().requires_grad_() for tensor in inputs]
        expected = F.scaled_dot_product_attention(*full, **how)
        expected.backward(gradient.double())
        pairs = [(output, expected), *((part.grad, one.grad) for part, one in zip(parts, full, strict=True))]
        errors = [float((a.double() - b[:, :, mine]).abs().max() / b.abs().max()) for a, b in pairs]
        kernel = "kernel" if has_kernel(Pairs(*(part.detach() for part in parts), causal, None, 1.0)) else "formulas"
        line = f"{dtype}, width {width}, causal {causal}, {key_heads} key heads, {kernel}: {max(errors):.1e}"
        print(line, flush=True)
        assert max(errors) <= TOLERANCE[dtype], f"output, query, key, value: {errors}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="nccl", choices=["nccl", "gloo"])
    backend = parser.parse_args().backend
    if "RANK" in os.environ:
        with ddl.Parallel(backend, cp=RANKS, timeout=60) as parallel:
            parallel.run(compare)
        return 0
    where = gpu_or_exit(backend)
    with tempfile.TemporaryDirectory() as folder:
        said = run_ranks(RANKS, [__file__, "--backend", backend], Path(folder), 120)
        print(said or (Path(folder) / "0.log").read_text(), end="")
    print(f"ring attention on {where}, torch {torch.__version__}: {'FAILED' if said else 'equal'}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
