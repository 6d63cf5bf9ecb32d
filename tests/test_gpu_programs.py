"""The programs that tests/extra_gpu.sh runs on a GPU, with gloo on the CPU: that they run, not what CUDA does."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        (("ring_on_gpu.py",), "equal"),
        (("parity_on_gpu.py", "tp2", "PReLU"), "0 not as expected"),
        (("models_on_gpu.py", "cp2", "gpt, float32"), "0 not as expected"),
    ],
)
def test_runs_on_the_cpu(arguments, last):
    command = [sys.executable, TESTS / arguments[0], "--backend", "gloo", *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith(last)
