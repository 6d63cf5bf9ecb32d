"""Builds the site: the executed chapters as a book, the package's pages from its docstrings, a planner.

    python tools/site.py            build/site/, by Sphinx, without the network

`make site-setup` fetches what this needs, once; `make site` runs it. Sources are gathered in build/site-source, laid
out as in the repository, so that every link between pages holds; chapters are changed only in how they are folded.
Settings and styles lie in docs/site.
"""

import re
import shutil
import sys
import time
import zipfile
from pathlib import Path

from nbformat import NotebookNode

sys.path.insert(0, str(Path(__file__).parent))  # not so where another file imports this one
from notebooks import BADGE, FOLDED, ROOT, chapters, dumps, fold_title, read, repository, stamp_text, tags

SITE = ROOT / "docs" / "site"
BUILD = ROOT / "build"
GLOSSARY = re.compile(r"\[([^\]]+)\]\(\.\./docs/glossary\.md#([\w-]+)\)")


# --- chapters -------------------------------------------------------------------------------------------


def for_the_site(notebook: NotebookNode, terms: dict[str, str]) -> NotebookNode:
    """Folds what a reader should ask for, and drops what only a front end needs. Works in place.

    Folded are solutions, imports, and what comes out from a guess to its score. The set-up cell goes; Colab's badge, a
    picture of another host, becomes a link, and a link to the glossary a term of Sphinx. A link to a heading is
    written as Jupyter wants it, with its capitals, and Sphinx's has none.
    """
    open_guesses = set()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(rf"^{re.escape(BADGE)}.*?\)\]", "[Open in Colab]", cell.source, flags=re.M)
            cell.source = re.sub(r"\]\([\w.]*#[\w-]+\)", lambda link: link[0].lower(), cell.source)
            cell.source = GLOSSARY.sub(lambda link: f"{{term}}`{link[1]} <{terms[link[2]]}>`", cell.source)
            continue
        scored = "score(" in cell.source
        for names in re.findall(r"^(guess\w*.*?) = ", cell.source, re.M):
            open_guesses |= set(names.split(", "))
        if "setup" in tags(cell):
            cell.metadata.tags = [*tags(cell), "remove-cell"]
        elif "score" in tags(cell):
            cell.metadata.tags = ["hide-cell"]
            _prompt(cell, "Guess first, then look")
        elif FOLDED & set(tags(cell)):
            _prompt(cell, fold_title(cell))
        elif (scored or open_guesses) and cell.outputs:
            cell.metadata.tags = [*tags(cell), "hide-output"]
            _prompt(cell, "Guess first, then look")
        if scored:
            open_guesses -= set(re.findall(r"\bguess\w*", cell.source))
    return notebook


def terms_of(glossary: str) -> dict[str, str]:
    """The terms of docs/glossary.md by their anchors, as Sphinx makes them."""
    terms = re.findall(r"^([^\s#`{].*)\n  ", glossary, re.M)
    return {"term-" + re.sub(r"\W+", "-", term): term for term in terms}


def _prompt(cell: NotebookNode, words: str) -> None:
    """What stands on a fold."""
    prompts = {"code_prompt_show": words, "code_prompt_hide": "Fold again"}
    cell.metadata["mystnb"] = cell.metadata.get("mystnb", {}) | prompts


def opening(path: Path) -> dict[str, str]:
    """Title, promise, minutes and needs of a chapter, from its first cell."""
    text = read(path).cells[0].source
    needs = re.search(r"Before this: (.*)", text)[1]
    return {
        "title": re.match(r"# (.*)", text)[1],
        "promise": re.search(r"\*\*The promise:\*\* (.*)", text)[1],
        "minutes": re.search(r"\*\*(\d+) minutes\*\*", text)[1],
        "needs": ", ".join(re.findall(r"\[(\d\d) · ", needs)) or needs.split(".")[0],
    }


def contents(paths: list[Path]) -> str:
    """The list of chapters on the first page, in order."""
    entries = []
    for path in paths:
        one = opening(path)
        after = f"after {one['needs']}" if one["needs"][0].isdigit() else f"needs {one['needs']}"
        link = f"[{one['title']}](notebooks/{path.name})"
        entries.append(f"{link} *{one['minutes']} minutes, {after}*\n: {one['promise'].capitalize()}\n")
    return "\n".join(entries)


# --- pages ----------------------------------------------------------------------------------------------


def sections(text: str) -> dict[str, str]:
    """The second-level sections of a Markdown page by heading."""
    parts = re.split(r"^## (.*)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def planner_page(root: Path) -> str:
    """docs/planner.md with the picture that stands there until a reader starts Python."""
    sys.path.insert(0, str(root / "docs/site"))
    import planner

    picture = planner.show(planner.START)["html"]
    options = "".join(
        f"<option{' selected' * (name == planner.START['model'])}>{name}</option>" for name in planner.MODELS
    )
    page = (root / "docs/planner.md").read_text(encoding="utf-8")
    return page.replace("PICTURE", picture).replace("OPTIONS", options)


def package_for_the_page(target: Path, root: Path = ROOT) -> None:
    """What the planner imports, as it is, under empty ``__init__`` files, in one archive."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(root / "docs/site/planner.py", "planner.py")
        for folder in ("", "lab/", "pipeline/"):
            archive.writestr(f"ignite_ddl/{folder}__init__.py", "")
        files = "arguments lab/cost lab/model lab/orders lab/plan lab/record lab/simulate/* pipeline/schedules"
        for pattern in files.split():
            for path in sorted((root / "ignite_ddl").glob(f"{pattern}.py")):
                archive.write(path, str(path.relative_to(root)))


def gather(source: Path, root: Path = ROOT) -> None:
    """Writes all pages of the site as Sphinx reads them."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(root / "docs", source / "docs", ignore=shutil.ignore_patterns("site", "WRITING_*"))
    paths, terms = chapters(root), terms_of((root / "docs/glossary.md").read_text(encoding="utf-8"))
    for path in paths:
        (source / "notebooks").mkdir(exist_ok=True)
        (source / "notebooks" / path.name).write_text(dumps(for_the_site(read(path), terms)), encoding="utf-8")
    shutil.copy(root / "SECURITY.md", source)
    readme = sections((root / "README.md").read_text(encoding="utf-8"))
    wanted = {"using": "Using `ignite_ddl` in your own code", "troubleshooting": "Troubleshooting"}
    for name, heading in wanted.items():
        page = f"# {heading}\n{readme[heading]}".replace("\n### ", "\n## ")
        (source / f"{name}.md").write_text(page, encoding="utf-8")
    (source / "docs/planner.md").write_text(planner_page(root), encoding="utf-8")
    index = (root / "docs/site/index.md").read_text(encoding="utf-8")
    index = stamp_text(index.replace("CHAPTERS", contents(paths)), repository(root))
    (source / "index.md").write_text(index, encoding="utf-8")


def main() -> int:
    try:
        from sphinx.cmd.build import main as sphinx
    except ImportError:
        print("the site needs Sphinx in build/site-tools: make site-setup", file=sys.stderr)
        return 1
    if not (BUILD / "site-static/pyodide").exists():
        print("the site's planner needs Pyodide in build/site-static: make site-setup", file=sys.stderr)
        return 1
    started = time.perf_counter()
    gather(BUILD / "site-source")
    package_for_the_page(BUILD / "site-static/package.zip")
    shutil.rmtree(BUILD / "site", ignore_errors=True)
    options = ["-q", "-W", "--keep-going", "-E", "-d", str(BUILD / "site-doctrees"), "-c", str(SITE)]
    failed = sphinx([*options, str(BUILD / "site-source"), str(BUILD / "site")])
    if not failed:
        print(f"build/site/index.html: {time.perf_counter() - started:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
