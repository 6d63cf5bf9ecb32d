#!/usr/bin/env bash
# What needs a GPU: parity by NCCL ranks that share one, ring attention with CUDA's kernels, and models in 16 bits and
# TF32, which no check may refuse. Exit 77: there is none.
#     tests/extra_gpu.sh            about ten minutes
#     tests/extra_gpu.sh --record   and writes ignite_ddl/course/recorded_gpu.json, which chapter 02 shows
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
if [ "${1:-}" = --record ]; then
    python benchmarks/gpu.py
fi
python tests/ring_on_gpu.py
python tests/models_on_gpu.py
python tests/parity_on_gpu.py
