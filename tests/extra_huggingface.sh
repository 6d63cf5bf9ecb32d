#!/usr/bin/env bash
# Hugging Face's transformers on meshes: examples/train_llama.py, and its files of weights. Part of `make test-all`.
# transformers goes into build/huggingface, beside .venv and not into it. Exit 77: it could not be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="$PWD/build/huggingface"
if [ ! -e "$folder/transformers" ]; then
    python -m pip install -q --target "$folder" "transformers>=5,<6" || {
        echo "extra_huggingface: pip could not install transformers: is there a network?" >&2
        exit 77
    }
    rm -rf "$folder"/torch "$folder"/torch-* "$folder"/numpy "$folder"/numpy-* # those of .venv count
fi
PYTHONPATH="$PWD:$folder" python -m pytest -q tests/test_huggingface.py tests/lab/test_plan_model.py
