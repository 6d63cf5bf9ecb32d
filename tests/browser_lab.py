"""Opens chapters in a real JupyterLab in headless Chromium, runs all their cells and looks at the result. Then, in
chapter 00, types the solution of an exercise, and interrupts a launch.

    python tests/browser_lab.py notebooks/00_start_here.ipynb

Run by tests/extra_browser.sh, in an environment that has selenium. JupyterLab is started by `make lab`, as a
reader does, but in a checkout of its own under build/browser, so that nobody's workbook/ is touched. Pictures
of the first page and of each chapter lie there too.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from loading import ROOT, load
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

CHECKOUT = ROOT / "build" / "browser"
workbook = load("tools/workbook.py")


def make_checkout() -> None:
    """What `make lab` needs of a checkout, with this one's .venv."""
    shutil.rmtree(CHECKOUT, ignore_errors=True)
    shutil.copytree(ROOT / "tools", CHECKOUT / "tools")
    shutil.copy(ROOT / "Makefile", CHECKOUT)
    for name in ("notebooks", ".venv"):
        (CHECKOUT / name).symlink_to(ROOT / name)


def start_lab() -> tuple[subprocess.Popen, str]:
    """JupyterLab as `make lab` starts it, and the address with its token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = f"--no-browser --ServerApp.port={port} --ServerApp.port_retries=0"
    lab = subprocess.Popen(
        ["make", "-o", "setup", "lab", f"LAB_ARGS={arguments}"],  # the .venv is another checkout's
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    for line in lab.stdout:
        if found := re.search(r"http://(127\.0\.0\.1|localhost):\d+/\S*token=\w+", line):
            threading.Thread(target=lab.stdout.read, daemon=True).start()  # a full pipe would stop the server
            return lab, found[0]
    raise SystemExit("JupyterLab did not start")


def run_all(browser: webdriver.Chrome, address: str, name: str, seconds: float) -> float:
    """Opens the notebook, chooses Run All Cells from the menu and waits until the kernel is idle again."""
    base, token = re.match(r"(http://[^/]+)/\S*(token=\w+)", address).groups()
    browser.get(f"{base}/lab/tree/{name}?{token}")
    wait = WebDriverWait(browser, 30)
    wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, ".jp-Notebook .jp-CodeCell"))
    wait.until(kernel_is_ready)
    started = time.monotonic()
    click_menu(browser, wait, "Run", "Run All Cells")
    quiet, limit = 0, started + seconds
    while quiet < 10:  # between two cells the kernel is idle for a moment
        if time.monotonic() > limit:
            raise SystemExit(f"{name} was still running after {seconds:.0f} s")
        time.sleep(0.3)
        quiet = 0 if busy(browser) else quiet + 1
    return time.monotonic() - started


def problems_of_first_page(browser: webdriver.Chrome, address: str) -> list[str]:
    """What is wrong with the page that `make lab` opens, in a small window."""
    browser.set_window_size(800, 700)
    browser.get(address)
    wait = WebDriverWait(browser, 60)
    wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, ".jp-Notebook .jp-CodeCell"))
    wait.until(kernel_is_ready)
    time.sleep(2)  # notifications come last
    browser.save_screenshot(str(CHECKOUT / "first_page.png"))
    page = browser.find_element(By.CSS_SELECTOR, ".jp-NotebookPanel")
    shown = {
        "another chapter is open": not browser.current_url.endswith("/lab/tree/workbook/00_start_here.ipynb"),
        "the page does not say whose copy it is": "This copy is yours" not in page.text,
        "something pops up": bool(browser.find_elements(By.CSS_SELECTOR, ".Toastify__toast, .jp-Dialog")),
        "the chapter has not the window's width": page.size["width"] < 650,
    }
    browser.set_window_size(1200, 1600)
    return [problem for problem, wrong in shown.items() if wrong]


def kernel_is_ready(browser: webdriver.Chrome) -> bool:
    """On a slow machine JupyterLab may ask for the kernel before it has the list: take what it offers."""
    for button in browser.find_elements(By.CSS_SELECTOR, ".jp-Dialog .jp-mod-accept"):
        button.click()
    named = browser.find_elements(By.CSS_SELECTOR, ".jp-KernelName")
    idle = browser.find_elements(By.CSS_SELECTOR, ".jp-Notebook-ExecutionIndicator[data-status='idle']")
    return bool(idle) and any("Python" in name.text for name in named)


def click_menu(browser: webdriver.Chrome, wait: WebDriverWait, menu: str, entry: str) -> None:
    def named(selector: str, text: str):
        return next((e for e in browser.find_elements(By.CSS_SELECTOR, selector) if e.text.strip() == text), None)

    wait.until(lambda b: named(".lm-MenuBar-item", menu)).click()
    wait.until(lambda b: named(".lm-Menu-item .lm-Menu-itemLabel", entry)).click()


def busy(browser: webdriver.Chrome) -> bool:
    return bool(browser.find_elements(By.CSS_SELECTOR, ".jp-Notebook-ExecutionIndicator[data-status='busy']"))


def type_into(browser: webdriver.Chrome, cell: WebElement, text: str) -> None:
    """Replaces a cell's text by a line, typed key by key, and runs the cell."""
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell)
    cell.find_element(By.CSS_SELECTOR, ".cm-content").click()
    keys = ActionChains(browser)
    keys.key_down(Keys.CONTROL).send_keys("a").key_up(Keys.CONTROL).send_keys(Keys.DELETE).perform()
    ActionChains(browser).send_keys(text).perform()
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()


def cell_with(browser: webdriver.Chrome, text: str) -> WebElement:
    cells = browser.find_elements(By.CSS_SELECTOR, ".jp-Notebook .jp-CodeCell")
    return next(cell for cell in cells if text in cell.get_attribute("textContent"))


def output_of(cell: WebElement) -> str:
    return "\n".join(area.text for area in cell.find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output"))


def problems_of_an_exercise(browser: webdriver.Chrome) -> list[str]:
    """Solves the first exercise of chapter 00, which is open and has run, as a reader does."""
    wait, exercise = WebDriverWait(browser, 60), "def mean_of_all("
    check = cell_with(browser, "checks.mean_of_all(mean_of_all)")
    found = [] if "not yet" in output_of(check) else [f"before: {output_of(check)!r}"]
    body = "return idist.all_reduce(local_mean * n_rows) / idist.all_reduce(n_rows)"
    type_into(browser, cell_with(browser, exercise), f"{exercise}local_mean, n_rows): {body}")
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    with contextlib.suppress(TimeoutException):
        wait.until(lambda _: "right" in output_of(check))
    return found + ([] if "right" in output_of(check) else [f"solved: {output_of(check)!r}"])


def problems_of_an_interrupt(browser: webdriver.Chrome) -> list[str]:
    """Stops ranks that sleep, by the menu, and looks for what the cell says and for ranks that are left."""
    wait = WebDriverWait(browser, 60)
    cell = cell_with(browser, "checks.mean_of_all(mean_of_all)")
    work = "lambda local_rank: __import__('time').sleep(1234)"
    type_into(browser, cell, f"__import__('ignite_ddl').Parallel('gloo', 3).run({work})")
    wait.until(busy)
    time.sleep(5)  # in mid-launch or later: both have to stop
    started = time.monotonic()
    click_menu(browser, wait, "Kernel", "Interrupt Kernel")
    with contextlib.suppress(TimeoutException):
        wait.until(lambda b: not busy(b) and "KeyboardInterrupt" in output_of(cell))
    said, took = output_of(cell), time.monotonic() - started
    shown = {f"it says {said!r}": "rank 0 was at" not in said or "launch/" in said, f"it took {took:.0f} s": took > 20}
    return [problem for problem, wrong in shown.items() if wrong]


def errors_in(path: Path) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    missing = [c for c in cells if c["cell_type"] == "code" and c["execution_count"] is None]
    return [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"] + [
        f"a cell did not run: {''.join(cell['source'])[:60]}" for cell in missing
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path, help="chapter 00 last: the reader's part is done there")
    parser.add_argument("--seconds", type=float, default=180, help="limit for one chapter")
    args = parser.parse_args()
    subprocess.run(["make", "setup"], cwd=ROOT, check=True)
    make_checkout()
    folder = CHECKOUT / "workbook"
    lab, address = start_lab()
    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "window-size=1200,1600", "disable-sync"):
        options.add_argument(f"--{flag}")
    for flag in ("disable-background-networking", "disable-component-update", "no-first-run", "disable-quic"):
        options.add_argument(f"--{flag}")
    # Both named, else selenium looks for downloads.
    options.binary_location = shutil.which("chromium")
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    failed = 0
    try:
        first = problems_of_first_page(browser, address)
        failed += bool(first)
        print(f"make lab: {'; '.join(first) or 'chapter 00 of the workbook is open'}")
        for notebook in args.notebooks:
            before = (folder / notebook.name).stat().st_mtime
            as_copied = workbook.digest_of(folder / notebook.name)
            took = run_all(browser, address, f"workbook/{notebook.name}", args.seconds)
            wait = WebDriverWait(browser, 60)
            click_menu(browser, wait, "File", "Save Notebook")
            wait.until(lambda _, n=notebook, t=before: (folder / n.name).stat().st_mtime > t)
            time.sleep(1)
            problems = errors_in(folder / notebook.name)
            if workbook.digest_of(folder / notebook.name) != as_copied:
                problems.append("to run and save it counts as a change of the reader's")
            browser.save_screenshot(str(CHECKOUT / f"{notebook.stem}.png"))
            failed += bool(problems)
            print(f"{notebook.name}: {took:.1f} s, {'; '.join(problems) or 'every cell ran without an error'}")
        for problems_of in (problems_of_an_exercise, problems_of_an_interrupt):
            problems = problems_of(browser)
            browser.save_screenshot(str(CHECKOUT / f"{problems_of.__name__}.png"))
            failed += bool(problems)
            print(f"{problems_of.__name__.removeprefix('problems_of_')}: {'; '.join(problems) or 'right'}")
    except Exception:
        browser.save_screenshot(str(CHECKOUT / "failed.png"))
        raise
    finally:
        browser.quit()
        os.killpg(lab.pid, signal.SIGTERM)
        lab.wait(20)
    print(f"browser: {len(args.notebooks) + 3 - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
