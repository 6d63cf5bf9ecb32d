#!/usr/bin/env bash
# Type checkers on a user's script, tests/typed.py: mypy and pyright report its wrong lines, and no other.
# They go into build/types, beside .venv and not into it. Exit 77: pip or npm could not install them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="$PWD/build/types" python=$(command -v python)
skip() { echo "types: SKIPPED: $1"; exit 77; }
command -v npm >/dev/null || skip "needs npm; on Debian: apt-get install npm"
[ -d "$folder/mypy/mypy" ] || "$python" -m pip install -q --target "$folder/mypy" mypy || skip "pip could not install mypy"
[ -d "$folder/node_modules/pyright" ] || npm install --silent --prefix "$folder" pyright || skip "npm could not install pyright"

cp tests/typed.py "$folder"
cd "$folder" # so that they find ignite_ddl where it is installed, and not here
grep -n '# wrong' typed.py | cut -d: -f1 >wrong
failed=0
check() { # a checker's report
    grep -E 'typed\.py:[0-9]+.*\berror\b' "$1" | grep -oE 'typed\.py:[0-9]+' | cut -d: -f2 | sort -nu >found || true
    if ! diff wrong found >lines; then
        echo "types: $1: lines of tests/typed.py that it misses (<), or that are right (>):"
        cat lines "$1"
        failed=1
    fi
}
PYTHONPATH="$folder/mypy" "$python" -m mypy --python-executable "$python" --cache-dir cache typed.py >mypy.txt || true
check mypy.txt
node_modules/.bin/pyright --pythonpath "$python" typed.py >pyright.txt || true
check pyright.txt
exit $failed
