#!/usr/bin/env bash
# The package as a release publishes it: sdist and wheel in dist/, checked by twine, and the wheel in an empty
# environment, where the README's first example runs on its ranks. Exit 77: pip could not install what it takes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
skip() { echo "release: SKIPPED: $1: is there a network?"; exit 77; }
tools=build/release-tools/bin
[ -x $tools/twine ] || { python3 -m venv build/release-tools && $tools/pip install -q build twine 'setuptools>=77'; } || skip "no twine"
rm -rf dist
$tools/python -m build --quiet --no-isolation --outdir dist .
$tools/twine check --strict dist/*

empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
python3 -m venv "$empty/venv"
"$empty/venv/bin/pip" install -q -c constraints.txt dist/*.whl || skip "no torch"
cat >"$empty/check.py" <<'END'
import re
import sys
from importlib.metadata import metadata
from importlib.resources import files

about, readme = metadata("ignite-ddl"), open(sys.argv[1], encoding="utf-8").read()
links = re.findall(r"\]\(([^)\s]+)\)", about.get_payload() or about["Description"])
assert links and all(link.startswith(("https://", "#")) for link in links), links
assert files("ignite_ddl").joinpath("py.typed").is_file()
assert "site-packages" in str(files("ignite_ddl")), files("ignite_ddl")
exec(re.search(r"```python\n(.*?)```", readme, re.S)[1], {"__name__": "__main__"})
END
readme=$PWD/README.md
(cd "$empty" && env -u PYTHONPATH venv/bin/python check.py "$readme")
