"""The site's pages, without Sphinx and without a browser: tests/extra_site.sh has both."""

import re
import runpy
import shutil
import subprocess
import sys
import types

import nbformat
import pytest
import yaml
from loading import ROOT, load

import ignite_ddl as ddl
from ignite_ddl.lab.plan import A100, Cluster, Model, predict


@pytest.fixture(scope="module")
def site():
    yield load("tools/site.py")
    sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def gathered(site, tmp_path_factory):
    source = tmp_path_factory.mktemp("site") / "source"
    site.gather(source)
    return source


def test_the_first_page_names_every_chapter_in_order_with_minutes_and_needs(gathered):
    page = (gathered / "index.md").read_text()
    names = sorted(path.name for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
    entries = re.findall(
        r"^\[\d\d · .*\]\(notebooks/(.*)\) \*\d+ minutes, (?:after \d\d|needs PyTorch).*\*\n: You .*", page, re.M
    )
    assert entries == names
    assert sorted(path.name for path in (gathered / "notebooks").iterdir()) == names


def test_answers_and_solutions_are_folded(gathered):
    for path in (gathered / "notebooks").iterdir():
        cells = nbformat.read(path, as_version=4).cells
        assert "[![" not in cells[0].source
        for cell in cells[1:]:
            tags = cell.metadata.get("tags", [])
            texts = [out.get("data", {}).get("text/plain", "") for out in cell.get("outputs", [])]
            hidden = {"hide-output", "hide-cell"} & set(tags)
            assert hidden or not any(text.startswith("no guess yet") for text in texts), path.name
            assert "hide-input" in tags or "# @title Imports" not in cell.source
            assert "hide-input" in tags or "# @title Solution" not in cell.source


def test_links_between_pages_lead_somewhere(gathered):
    pages = {path: path.read_text() for path in gathered.rglob("*.md")}
    for path in (gathered / "notebooks").iterdir():
        cells = nbformat.read(path, as_version=4).cells
        pages[path] = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert len(pages) > 30
    for path, text in pages.items():
        links = re.findall(r"\]\((?!https?:|mailto:|#|attachment:)([^)#\s]+)", re.sub(r"`[^`\n]*`", "", text))
        assert [link for link in links if not (path.parent / link).exists()] == [], path.name
    headings = {}  # as Sphinx names them
    for path, text in pages.items():
        found = re.findall(r"^#{1,3} (.*)$", text, re.M)
        headings[path.name] = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in found}
    for path, text in pages.items():
        if path.suffix == ".ipynb":
            places = re.findall(r"\]\((\w+\.ipynb)?#([\w-]+)\)", text)
            assert [at for page, at in places if at not in headings[page or path.name]] == [], path.name


def test_every_public_name_has_its_page(gathered):
    pages = "".join(path.read_text() for path in (gathered / "docs/api").glob("*.rst"))
    documented = re.findall(r"^\.\. auto(?:class|function|exception|module):: (?:ignite_ddl\.)?(\w+)$", pages, re.M)
    assert set(ddl.__all__) <= set(documented)


def test_the_planner_needs_nothing_but_its_archive(site, gathered, tmp_path):
    page = (gathered / "docs/planner.md").read_text()
    assert "<rect" in page
    assert "PICTURE" not in page
    assert "OPTIONS" not in page
    assert page.count("<option selected>39 billion</option>") == 1
    assert "<noscript>" in page
    site.package_for_the_page(tmp_path / "package.zip")
    code = """
import sys
sys.path[:] = [sys.argv[1], *(p for p in sys.path if p and "site-packages" not in p)]
sys.modules.update(dict.fromkeys(("torch", "ignite", "numpy", "matplotlib")))
import json, planner
for schedule in planner.SCHEDULES:
    said = planner.show(planner.START | {"schedule": schedule})
    assert said["values"]["step"] > 0, said
print(json.loads(planner.answer(json.dumps(planner.START)))["values"]["seconds"])
print(json.loads(planner.answer(json.dumps(planner.START | {"dp": 64})))["refused"])
print(planner.best(planner.START)["values"]["plans"] > 100)
for name in planner.MODELS:
    said = planner.show(planner.START | {"model": name, "dp": 8, "pp": 1, "tp": 2, "microbatches": 1, "zero": 3})
    assert name in said["html"] and "No pipeline" in said["html"], said
    assert "e+" not in said["html"] and "-0.0" not in said["html"], said
    assert 'tensor_plan="auto"' in said["html"].replace("&quot;", '"'), said
    assert f"{name} on 1 A100" in planner.best(planner.START | {"model": name, "devices": 1, "dp": 1})["html"]
found = planner.plans.plan(planner.MODELS["Mixtral 8x7B"], planner.Cluster(8, **planner.H100), 8)
assert any(one.ep > 1 and not one.lacks for one in found)
lines = {(how, cp): planner.show(planner.START | {"cp": cp, "tp": 4, "recompute": how})["html"]
         for how in ("none", "selective", "pointwise", "full") for cp in (1, 2)}
for (how, cp), html in lines.items():
    assert ("recomputation" in html) == (how in ("selective", "pointwise")), (how, html)
    assert ("model.gradient_checkpointing_enable()" in html) == (how == "full"), (how, html)
    assert ("register_attention()" in html and "ddl_ring" in html) == (cp == 2), (cp, html)
    assert ("sdpa" in html) == (how == "selective" and cp == 1), (how, cp, html)
none = planner.best(planner.START | {"model": "Llama 3.1 405B", "devices": 1, "dp": 1})["html"]
assert "0 of them fit. Those that lack the least memory first" in none, none
"""
    command = [sys.executable, "-c", code, str(tmp_path / "package.zip")]
    seconds, refused, found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    model = Model(layers=48, width=8192, heads=64, vocabulary=51200, sequence=2048)
    how = {"dp": 2, "pp": 4, "tp": 8, "microbatches": 8, "zero": 1, "recompute": "full"}
    assert float(seconds) == sum(predict(model, Cluster(64, **A100), 16, **how).seconds.values())
    assert refused.startswith("dp, pp and tp should be 64 devices at most")
    assert found == "True"


@pytest.mark.skipif(not shutil.which("node"), reason="node")
def test_the_pages_scripts():
    done = subprocess.run(["node", ROOT / "tests/site_scripts.js"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_folds_and_headings_are_named(monkeypatch):
    """What furo and myst-nb leave out: tests/extra_site.sh asks axe, which takes a fold without a title for right."""
    for name in ("docutils", "docutils.nodes", "latex2mathml", "latex2mathml.converter"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(nodes=types.SimpleNamespace(Node=0), convert=0))
    monkeypatch.setattr(sys, "path", list(sys.path))
    conf = runpy.run_path(str(ROOT / "docs/site/conf.py"))
    fold = '<summary aria-label="Toggle hidden content"><span>Solution: the loss</span></summary>'
    context = {"furo_navigation_tree": '<p class="caption" role="heading">', "body": fold}
    conf["make_accessible"](None, "page", "page.html", context, None)
    assert context["body"] == "<summary><span>Solution: the loss</span></summary>"
    assert 'role="heading" aria-level="2"' in context["furo_navigation_tree"]
    assert "<h1>Search</h1>" in (ROOT / "docs/site/templates/search.html").read_text()


def test_the_glossary_is_sorted_and_leads_to_chapters():
    page = (ROOT / "docs/glossary.md").read_text()
    terms = re.findall(r"^([^\s#`].*)\n  (.*)", page, re.M)
    assert len(terms) > 30
    assert [term.lower() for term, _ in terms] == sorted(term.lower() for term, _ in terms)
    for term, meaning in terms:
        links = re.findall(r"\]\(\.\./(notebooks/.*?)\)", meaning)
        assert links, term
        assert all((ROOT / link).exists() for link in links), term


# Terms of the four documents that chapters name otherwise.
SAID = {
    "accuracy, loss of": "accurac",
    "communication cost": "bytes",
    "local gradients": "gradient",
    "bottleneck": "through",
}
SAID |= {"column-wise": "columns", "row-wise": "rows", "mini-batch": "batch", "stochastic gradient descent": "sgd"}
SAID |= {"idle time": "idle", "pipeline bubble": "bubble"}


def test_the_glossary_leads_to_chapters_that_say_the_word(site):
    page = (ROOT / "docs/glossary.md").read_text()
    anchors = {term: anchor for anchor, term in site.terms_of(page).items()}
    pages = {path.name: nbformat.read(path, 4).cells for path in ROOT.glob("notebooks/*.ipynb")}
    pages = {name: "\n".join(cell.source for cell in cells).lower() for name, cells in pages.items()}
    for term, meaning in re.findall(r"^([^\s#`].*)\n  (.*)", page, re.M):
        word = re.sub(r"[ -]", r"[\\s*_-]+", SAID.get(term, term.lower().removesuffix("ism")))
        listed = re.findall(r"\]\(\.\./notebooks/(.*?)\)", meaning)
        assert [name for name in listed if not re.search(word, pages[name])] == [], term
        linked = {name for name, text in pages.items() if f"glossary.md#{anchors[term]})".lower() in text}
        assert linked <= set(listed), f"{term} is explained where it is linked first"


def test_chapters_lead_to_terms_of_the_glossary(site, gathered):
    terms = site.terms_of((ROOT / "docs/glossary.md").read_text())
    links = re.findall(
        r"\.\./docs/glossary\.md#([\w-]+)", "".join(p.read_text() for p in ROOT.glob("notebooks/*.ipynb"))
    )
    assert len(set(links)) > 25
    assert set(links) <= terms.keys()
    assert len(links) == len(set(links)), "a term is linked where it first appears"
    for path in (gathered / "notebooks").iterdir():
        assert "glossary.md#" not in path.read_text(), path.name


def test_citation_and_change_log_name_this_version(site):
    repo = site.repository(ROOT)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (f"v{citation['version']}", citation["repository-code"]) == (repo.release, repo.url)
    assert f"\n## {citation['version']}" in (ROOT / "CHANGELOG.md").read_text()
