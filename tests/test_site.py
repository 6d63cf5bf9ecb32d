"""The site's pages, without Sphinx and without a browser: tests/extra_site.sh has both."""

import importlib.util
import re
import sys
from pathlib import Path

import nbformat
import pytest

import ignite_ddl as ddl

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("site_tool", ROOT / "tools" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
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
        r"^\[\d\d · .*\]\(notebooks/(.*)\) \*\d+ minutes, (?:after \d\d|needs PyTorch).*\*\n: You .*",
        page,
        re.M,
    )
    assert entries == names
    assert sorted(path.name for path in (gathered / "notebooks").iterdir()) == names


def test_answers_and_solutions_are_folded(gathered):
    for path in (gathered / "notebooks").iterdir():
        cells = nbformat.read(path, as_version=4).cells
        assert "[![" not in cells[0].source
        for cell in cells[1:]:
            tags = cell.metadata.get("tags", [])
            shown = "".join(out.get("text", "") for out in cell.get("outputs", []))
            assert "hide-output" in tags or "not guessed" not in shown, path.name
            assert "hide-input" in tags or "# @title Solution" not in cell.source


def test_every_public_name_has_its_page(gathered):
    pages = "".join(path.read_text() for path in (gathered / "docs/api").glob("*.rst"))
    documented = re.findall(
        r"^\.\. auto(?:class|function|exception|module):: (?:ignite_ddl\.)?(\w+)$", pages, re.M
    )
    assert set(ddl.__all__) <= set(documented)


def test_the_glossary_is_sorted_and_leads_to_chapters():
    page = (ROOT / "docs/glossary.md").read_text()
    terms = re.findall(r"^([^\s#`].*)\n  (.*)", page, re.M)
    assert len(terms) > 30
    assert [term.lower() for term, _ in terms] == sorted(term.lower() for term, _ in terms)
    for term, meaning in terms:
        links = re.findall(r"\]\(\.\./(notebooks/.*?)\)", meaning)
        assert links, term
        assert all((ROOT / link).exists() for link in links), term
