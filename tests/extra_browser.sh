#!/usr/bin/env bash
# The page that `make lab` opens and five chapters of the workbook in a real JupyterLab, in headless Chromium: "Run All
# Cells" as a reader clicks it; then an exercise solved by typing, and a launch that is interrupted.
# Needs Chromium and its driver (Debian: chromium, chromium-driver); installs selenium beside .venv, not in it.
set -euo pipefail
cd "$(dirname "$0")/.."
for program in chromium chromedriver; do
    command -v $program >/dev/null || { echo "browser: needs $program; on Debian: apt-get install chromium chromium-driver"; exit 77; }
done
[ -x build/selenium/bin/python ] || { python3 -m venv build/selenium && build/selenium/bin/pip install -q 'selenium>=4.20'; }
build/selenium/bin/python tests/browser_lab.py ${@:-notebooks/05_*.ipynb notebooks/12_*.ipynb notebooks/18_*.ipynb notebooks/24_*.ipynb notebooks/00_*.ipynb}
