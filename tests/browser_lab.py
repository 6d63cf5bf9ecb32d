"""Opens a chapter in a real JupyterLab in headless Chromium, runs all its cells and looks at the result.

    python tests/browser_lab.py notebooks/00_start_here.ipynb [--picture build/lab_00.png]

Run by tests/extra_browser.sh, in an environment that has selenium; JupyterLab is started by `make lab`, as a
reader does. The chapter itself is left as it was: JupyterLab opens a copy of notebooks/ under build/.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).resolve().parent.parent


def start_lab(folder: Path) -> tuple[subprocess.Popen, str]:
    """JupyterLab as `make lab` starts it, and the address with its token."""
    arguments = f"--no-browser --ServerApp.root_dir={folder} --ServerApp.port=0"
    lab = subprocess.Popen(
        ["make", "lab", f"LAB_ARGS={arguments}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    for line in lab.stdout:
        if found := re.search(r"http://(127\.0\.0\.1|localhost):\d+/\S*token=\w+", line):
            return lab, found[0]
    raise SystemExit("JupyterLab did not start")


def run_all(browser: webdriver.Chrome, address: str, name: str, seconds: float) -> float:
    """Opens the notebook, chooses Run All Cells from the menu and waits until the kernel is idle again."""
    base, token = re.match(r"(http://[^/]+)/\S*(token=\w+)", address).groups()
    browser.get(f"{base}/lab/tree/{name}?{token}")
    wait = WebDriverWait(browser, 60)
    wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, ".jp-Notebook .jp-CodeCell"))
    wait.until(
        lambda b: b.find_elements(By.CSS_SELECTOR, ".jp-Notebook-ExecutionIndicator[data-status='idle']")
    )
    started = time.monotonic()
    click_menu(browser, wait, "Run", "Run All Cells")
    # Every code cell has a number once the last one has run, whether it printed anything or not.
    WebDriverWait(browser, seconds).until(lambda b: not pending(b))
    return time.monotonic() - started


def click_menu(browser: webdriver.Chrome, wait: WebDriverWait, menu: str, entry: str) -> None:
    def named(selector: str, text: str):
        return next(
            (e for e in browser.find_elements(By.CSS_SELECTOR, selector) if e.text.strip() == text), None
        )

    wait.until(lambda b: named(".lm-MenuBar-item", menu)).click()
    wait.until(lambda b: named(".lm-Menu-item .lm-Menu-itemLabel", entry)).click()


def pending(browser: webdriver.Chrome) -> bool:
    busy = browser.find_elements(By.CSS_SELECTOR, ".jp-Notebook-ExecutionIndicator[data-status='busy']")
    return bool(busy)


def errors_in(path: Path) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    missing = [c for c in cells if c["cell_type"] == "code" and c["execution_count"] is None]
    return [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"] + [
        f"a cell did not run: {''.join(cell['source'])[:60]}" for cell in missing
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=180, help="limit for one chapter")
    args = parser.parse_args()
    folder = ROOT / "build" / "browser"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    lab, address = start_lab(folder)
    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "window-size=1200,1600", "disable-sync"):
        options.add_argument(f"--{flag}")
    for flag in ("disable-background-networking", "disable-component-update", "no-first-run", "disable-quic"):
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options=options)
    failed = 0
    try:
        for notebook in args.notebooks:
            before = (folder / notebook.name).stat().st_mtime
            took = run_all(browser, address, notebook.name, args.seconds)
            wait = WebDriverWait(browser, 60)
            click_menu(browser, wait, "File", "Save Notebook")
            wait.until(lambda _, n=notebook, t=before: (folder / n.name).stat().st_mtime > t)
            time.sleep(1)
            problems = errors_in(folder / notebook.name)
            browser.save_screenshot(str(folder / f"{notebook.stem}.png"))
            failed += bool(problems)
            print(
                f"{notebook.name}: {took:.1f} s, {'; '.join(problems) or 'every cell ran without an error'}"
            )
    finally:
        browser.quit()
        os.killpg(lab.pid, signal.SIGTERM)
        lab.wait(20)
    print(f"browser: {len(args.notebooks) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
