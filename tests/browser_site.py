"""Looks at build/site in headless Chromium, as a reader does, and follows every link of its pages.

    python tests/browser_site.py

Run by tests/extra_site.sh, in an environment that has selenium. Pictures of some pages, narrow and wide, light and
dark, lie in build/site-pictures.
"""

import functools
import http.server
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
PICTURES = ROOT / "build" / "site-pictures"
AXE = ROOT / "build" / "axe" / "package" / "axe.min.js"
CHAPTER = "notebooks/13_asynchronous_updates.html"
PAGES = ["index.html", CHAPTER, "notebooks/18_pipeline_parallel.html", "docs/tensor_styles.html", "docs/glossary.html"]
PAGES += ["docs/api/training.html", "docs/planner.html"]


class Page(HTMLParser):
    """What a page names (ids), and where it leads (hrefs and sources)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids, self.leads, self.without_alt = set(), [], 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list) -> None:
        given = dict(attributes)
        self.ids |= {given[key] for key in ("id", "name") if given.get(key)}
        self.leads += [given[key] for key in ("href", "src") if given.get(key)]
        self.without_alt += tag == "img" and not given.get("alt")


def dead_links() -> list[str]:
    """Links between the site's files that lead nowhere, and pictures that say nothing."""
    pages, dead = {path: Page(path) for path in SITE.rglob("*.html")}, []
    for path, page in pages.items():
        dead += [f"{path.relative_to(SITE)}: {page.without_alt} pictures without words"] * (page.without_alt > 0)
        for lead in page.leads:
            parts = urllib.parse.urlsplit(lead)
            if parts.scheme in ("http", "https", "data", "mailto"):
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
                dead.append(f"{path.relative_to(SITE)}: {lead}")
    return dead


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments) -> None:
        pass


def start_browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking", "no-first-run"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Both named, else selenium looks for downloads.
    options.binary_location = shutil.which("chromium")
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def resize(browser: webdriver.Chrome, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def wrong_in_logs(browser: webdriver.Chrome, home: str) -> list[str]:
    """What the console complained of, and requests that left the machine, since the last call."""
    wrong = [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            if not url.startswith((home, "data:", "blob:")):
                wrong.append(f"asked for {url}")
    return wrong


def look(browser: webdriver.Chrome, home: str) -> list[str]:
    """Each page of PAGES at two widths in both themes."""
    wrong = []
    for theme in ("light", "dark"):
        browser.get(home)
        browser.execute_script("localStorage.setItem('theme', arguments[0])", theme)
        for width in (390, 1400):
            resize(browser, width)
            for page in PAGES:
                browser.get(home + page)
                name = f"{page.removesuffix('.html').replace('/', '_')}_{width}_{theme}"
                if browser.find_element(By.TAG_NAME, "body").get_attribute("data-theme") != theme:
                    wrong.append(f"{name}: not {theme}")
                wide = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
                wrong += [f"{name}: {wide} px too wide"] * (wide > 0)
                wrong += [f"{name}: {line}" for line in wrong_in_logs(browser, home)]
                PICTURES.mkdir(exist_ok=True)
                browser.save_screenshot(str(PICTURES / f"{name}.png"))
    return wrong


def search(browser: webdriver.Chrome, home: str) -> list[str]:
    """Types a word into the search field of the first page."""
    browser.get(home + "index.html")
    field = browser.find_element(By.CSS_SELECTOR, "input.sidebar-search")
    field.send_keys("staleness\n")
    wait = WebDriverWait(browser, 20)
    found = wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, "ul.search li a[href*='13_asynchronous_updates']"))
    found[0].click()
    return [] if "13_asynchronous" in browser.current_url else ["the search's first result leads elsewhere"]


def seen(browser: webdriver.Chrome, element) -> bool:
    """Selenium itself takes what lies in a closed fold for displayed."""
    return browser.execute_script("return arguments[0].checkVisibility()", element)


def unfold(browser: webdriver.Chrome, home: str) -> list[str]:
    """A solution and the answer to a guess are folded, and unfold on a click."""
    browser.get(home + CHAPTER)
    answers = [a for a in browser.find_elements(By.CSS_SELECTOR, ".cell_output pre")
               if "no guess yet" in a.get_attribute("textContent")]  # fmt: skip
    wrong = [f"an answer is not folded: {a.text}" for a in answers if seen(browser, a)]
    wrong += ["no answers"] * (len(answers) < 5)
    for words in ("Solution: ", "Guess first, then look"):
        folds = browser.find_elements(By.CSS_SELECTOR, "details.hide")
        fold = next(f for f in folds if words in f.get_attribute("textContent"))
        content = fold.find_element(By.CSS_SELECTOR, "pre")
        before = seen(browser, content)
        browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", fold)
        fold.find_element(By.TAG_NAME, "summary").click()
        if before or not seen(browser, content):
            wrong.append(f"{words!r} does not unfold")
    return wrong


def accessible(browser: webdriver.Chrome, home: str) -> list[str]:
    """What axe finds serious or critical, in both themes, on PAGES and the search's page."""
    wrong = []
    for theme in ("light", "dark"):
        browser.get(home)
        browser.execute_script("localStorage.setItem('theme', arguments[0])", theme)
        for page in [*PAGES, "search.html?q=staleness"]:
            browser.get(home + page)
            browser.execute_script(AXE.read_text(encoding="utf-8"))
            found = browser.execute_async_script("const done = arguments[0]; axe.run().then(done)")
            for rule in found["violations"]:
                if rule["impact"] in ("serious", "critical"):
                    where = " ".join(rule["nodes"][0]["target"])
                    wrong.append(f"{page}, {theme}: {rule['id']}, {len(rule['nodes'])} times, first {where}")
    return wrong


# The same answers from the package in CPython: the page's own file, and by hand what it should have asked for.
EXPECTED = """
import json, sys, planner
from ignite_ddl.lab.plan import A100, Cluster, predict
moves = json.loads(sys.argv[1])
said = [planner.show(planner.START | move) for move in moves]
how = dict(dp=2, pp=4, tp=8, microbatches=8, zero=1, recompute="full")
one = predict(planner.MODELS["39 billion"], Cluster(64, **A100), 16, **how)
assert said[0]["values"]["seconds"] == sum(one.seconds.values())
print(json.dumps([one.get("values", {"refused": one.get("refused")}) for one in said]))
"""


def equal(one: dict, other: dict) -> bool:
    """Since Python 3.12 ``sum`` rounds otherwise: the browser's Python may differ in the last digit."""
    if "refused" in other:
        return one == other
    return one.keys() == other.keys() and all(math.isclose(one[key], other[key], rel_tol=1e-12) for key in other)


def planner(browser: webdriver.Chrome, home: str) -> list[str]:
    """Its numbers are the package's, whatever is moved; its picture moves; it refuses in the package's words."""
    moves = [{}, {"pp": 2}, {"pp": 2, "schedule": "zbv"}, {"pp": 2, "schedule": "zbv", "dp": 8}]
    folders = f"{ROOT}:{ROOT / 'docs/site'}"
    command = ["python", "-c", EXPECTED, json.dumps(moves)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": folders}, capture_output=True, text=True, check=True)
    expected = json.loads(done.stdout)

    browser.get(home + "docs/planner.html")
    form = browser.find_element(By.ID, "planner")
    pictures = [form.find_element(By.ID, "planner-picture").get_attribute("innerHTML")]
    wrong = ["no picture before Python is there"] * ("<rect" not in pictures[0])
    started = time.monotonic()
    browser.find_element(By.ID, "planner-start").click()

    def right(values: dict) -> bool:
        """Waited for: a number that is not the package's, and a page that hangs, both run out of time."""
        try:
            WebDriverWait(browser, 120).until(
                lambda _: equal(json.loads(form.get_attribute("data-values") or "{}"), values)
            )
        except TimeoutException:
            said = browser.find_element(By.ID, "planner-said").text
            wrong.append(f"the page has {form.get_attribute('data-values')} {said}, the package {values}")
            return False
        pictures.append(form.find_element(By.ID, "planner-picture").get_attribute("innerHTML"))
        return True

    def slide(name: str, key: str, times: int = 1) -> None:
        form.find_element(By.NAME, name).send_keys(key * times)

    steps = [
        lambda: None,
        lambda: slide("pp", Keys.ARROW_LEFT),
        lambda: Select(form.find_element(By.NAME, "schedule")).select_by_visible_text("zbv"),
        lambda: slide("dp", Keys.ARROW_RIGHT, 2),
    ]
    for step, values in zip(steps, expected, strict=True):
        step()
        if not right(values):
            return wrong
    print(f"the planner's first answer came after {time.monotonic() - started:.1f} s at most")
    wrong += ["the picture does not move"] * (len(set(pictures[1:4])) < 3)
    wrong += ["a refusal is not shown"] * (
        expected[3]["refused"] not in browser.find_element(By.ID, "planner-refused").text
    )
    grey = browser.find_element(By.ID, "planner-picture").get_attribute("class")
    wrong += ["an old answer stands at full strength under a refusal"] * ("old" not in (grey or ""))
    form.find_element(By.CSS_SELECTOR, "fieldset button").click()
    WebDriverWait(browser, 120).until(lambda _: "MFU" in browser.find_element(By.ID, "planner-best").text)
    browser.save_screenshot(str(PICTURES / "planner_at_work.png"))
    return wrong


def main() -> None:
    wrong = dead_links()
    loaded = {urllib.parse.urlsplit(lead).path for lead in Page(SITE / "index.html").leads}
    loaded = [SITE / "index.html", *(SITE / path for path in loaded if path.startswith("_static/"))]
    size = sum(path.stat().st_size for path in loaded)
    print(f"the first page, with its styles and scripts, before figures: {size / 1000:.0f} kB")
    wrong += ["the first page is above 500 kB"] * (size > 500_000)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}/"
    browser = start_browser()
    try:
        for check in (look, search, unfold, accessible, planner):
            resize(browser, 1400)
            found = check(browser, home) + wrong_in_logs(browser, home)
            print(f"{check.__name__}: {'; '.join(found) or 'right'}")
            wrong += found
    finally:
        browser.quit()
        server.shutdown()
    print("\n".join(wrong) or "site: every link leads somewhere, nothing left this machine")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
