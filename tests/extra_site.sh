#!/usr/bin/env bash
# Builds the site and looks at it in headless Chromium: tests/browser_site.py.
# Needs Chromium and its driver (Debian: chromium, chromium-driver) and npm; installs selenium and axe beside .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
for program in chromium chromedriver; do
    command -v $program >/dev/null || { echo "site: needs $program; on Debian: apt-get install chromium chromium-driver"; exit 77; }
done
[ -x build/selenium/bin/python ] || { python3 -m venv build/selenium && build/selenium/bin/pip install -q 'selenium>=4.20'; }
[ -e build/axe/package/axe.min.js ] || (mkdir -p build/axe && cd build/axe && tar -xzf "$(npm pack --silent axe-core@4.10.3)")
[ -d build/site-static/pyodide ] || make site-setup
make site
build/selenium/bin/python tests/browser_site.py
