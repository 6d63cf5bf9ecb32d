#!/usr/bin/env bash
# ignite_ddl/course/tpu.py and chapter 03 on XLA's CPU device, in an environment of their own: torch_xla 2.9 wants torch 2.9.
# Builds build/tpu-env once (7 GB, 3 minutes), adds its kernel "ignite-ddl on XLA" to .venv, then runs the tests for
# real and compares each number that chapter 03 shows with the recorded one.
#     tests/extra_tpu.sh            the tests; exits 77 where it skips them: no disk for it, or no wheels
#     tests/extra_tpu.sh --record   runs chapter 03 and writes ignite_ddl/course/recorded_xla.json anew
set -euo pipefail
cd "$(dirname "$0")/.."
env=build/tpu-env
python=$env/bin/python
needed=9 # GB, with pip's downloads
constraints=build/tpu-constraints.txt
wanted="torch==2.9.0 torch_xla==2.9.0 pytorch-ignite cloudpickle numpy matplotlib ipykernel nbval pytest"
mkdir -p build
grep -vE '^(torch|torchvision)==' constraints.txt >$constraints

stamp="$PWD $wanted $(cksum <$constraints)"
if [ "$(cat $env/stamp 2>/dev/null)" != "$stamp" ]; then
    free=$(df -Pk build | awk 'NR == 2 {print int($4 / 1000000)}')
    if [ ! -e $env ] && [ "$free" -lt $needed ]; then
        echo "tpu: SKIPPED: torch_xla's environment needs $needed GB, $free GB are free here"
        exit 77
    fi
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || { echo "tpu: SKIPPED: torch_xla has no wheels for $(uname -sm)"; exit 77; }
    echo "tpu: making $env: about 7 GB, 3 minutes"
    [ -x $python ] || python3 -m venv $env
    $python -m pip install -q -c $constraints $wanted
    # Not pip install -e: pyproject.toml asks for a newer torch.
    echo "$PWD" >"$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ignite_ddl.pth"
    echo "$stamp" >$env/stamp
fi
if [ -d .venv ]; then
    $python -m ipykernel install --prefix .venv --name ignite-ddl-xla --display-name "ignite-ddl on XLA" \
        --env PJRT_DEVICE CPU >build/tpu-kernel.log 2>&1
fi

# Else torch_xla says in each process which device it takes, and a CUDA build of torch that it finds no GPU.
export PJRT_DEVICE=CPU TORCH_LOGS=-torch.utils.cpp_extension
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Two commands: tests/conftest.py would hold a cell to 120 s, which two compilations may take on a busy machine.
chapter="$python -m pytest -q -p no:cacheprovider notebooks/03_tpu_basics.ipynb --nbval-current-env --nbval-cell-timeout=600"
if [ "${1:-}" = --record ]; then
    rm -f ignite_ddl/course/recorded_xla.json
    IGNITE_DDL_RECORD=1 $chapter --nbval-lax
else
    $python -m pytest -q -p no:cacheprovider tests/package/test_tpu.py tests/course/test_xla.py
    $python -m pytest -q -p no:cacheprovider tests/course/test_checks.py -k ch03
    $chapter --nbval --nbval-sanitize-with tests/tpu_sanitize.cfg
fi
