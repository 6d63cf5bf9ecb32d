"""Everything that is done to the notebooks: write, run, tidy, stamp and look at them.

    python tools/notebooks.py new 26 my_chapter "My chapter"    a skeleton that obeys the form
    python tools/notebooks.py to-text 26                        -> build/text/26_my_chapter.py, to edit
    python tools/notebooks.py from-text 26                      -> the notebook, without outputs
    python tools/notebooks.py execute 26                        run it in place and store its outputs
    python tools/notebooks.py figures 26                        its pictures as files
    python tools/notebooks.py run 26                            run it, write build/26_my_chapter.html
    python tools/notebooks.py normalise                         one form for every notebook
    python tools/notebooks.py stamp [--check]                   address and release, from pyproject.toml

The form of a chapter is described in docs/WRITING_A_CHAPTER.md and enforced by tests/test_chapters.py.
"""

import argparse
import base64
import os
import re
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NAME = "ignite-ddl"
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
COLAB = "https://colab.research.google.com"
BADGE = "[![Open in Colab]("
FOLDED = {"solution", "imports", "score"}  # tags of cells whose source is folded
# What only a front end needs; everything else in a cell's metadata stays.
TRANSIENT = ("execution", "ExecuteTime", "collapsed", "scrolled", "trusted", "colab", "id", "outputId", "vscode")
# A folder that names a machine or its user, and the place where pip puts packages.
MACHINE_PATH = re.compile(
    r"(?<![\w.~-])/(?:home|root|work|tmp|opt|Users|private|content|var/folders)(?:/|\b)"
    r"|\b[A-Za-z]:\\+(?:\w|\\)|\bUsers\\|\bsite-packages\b"
)


# --- the fixed parts of a chapter -----------------------------------------------------------------------


class Repository(NamedTuple):
    """Where the course is published: its address, and the release that badges and set-up cells name."""

    url: str
    release: str  # the tag: v0.1.0

    @property
    def name(self) -> str:
        """Owner and name, as GitHub and Colab have them."""
        return self.url.removeprefix("https://github.com/")


def repository(root: Path = ROOT) -> Repository:
    """pyproject.toml is the one place that holds the address and the version."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return Repository(project["urls"]["Repository"].rstrip("/"), f"v{project['version']}")


def badge(repo: Repository, name: str) -> str:
    """The Colab badge of a notebook, the line below its title.

    It opens the release's copy without outputs, on the branch that .github/workflows/workbook.yml writes.
    """
    target = f"{COLAB}/github/{repo.name}/blob/workbook-{repo.release}/{name}"
    return f"{BADGE}{COLAB}/assets/colab-badge.svg)]({target})"


def setup_source(repo: Repository) -> str:
    """The set-up cell, the same in every chapter."""
    return (
        "# Set-up: on Colab this installs the course; elsewhere it does nothing.\n"
        "import sys\n"
        "\n"
        'if "google.colab" in sys.modules:\n'
        f'    %pip install -q "{NAME}[course] @ git+{repo.url}@{repo.release}"'
    )


def chapters(root: Path = ROOT, wanted: list[str] | None = None) -> list[Path]:
    """The chapters in reading order, or those of the given numbers (``4``, ``04``) or file names."""
    every = sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if not wanted:
        return every
    found = []
    for text in wanted:
        stem = Path(text).stem
        matches = [p for p in every if p.stem == stem or (stem.isdigit() and int(p.name[:2]) == int(stem))]
        if not matches:
            raise SystemExit(f"no chapter {text!r}; there are: {', '.join(p.stem for p in every) or 'none'}")
        found += matches
    return found


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def write(notebook: NotebookNode, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(notebook), encoding="utf-8")


def dumps(notebook: NotebookNode) -> str:
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


# --- normalise ------------------------------------------------------------------------------------------


def normalise(notebook: NotebookNode) -> NotebookNode:
    """One form for every notebook, so that a diff shows only what an author changed. Works in place."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    # Widget state goes with the rest of the notebook's metadata.
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    seen = set()
    for index, cell in enumerate(notebook.cells):
        _normalise_id(cell, index, seen)
        for key in TRANSIENT:
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            _fold(cell)
            cell.outputs = [output for output in map(_normalise_output, cell.outputs) if output]
            _alt_for_the_site(cell)
    return notebook


def _normalise_id(cell: NotebookNode, index: int, seen: set[str]) -> None:
    """Keeps a cell's own id; a missing, repeated or malformed one is derived from the cell's position."""
    wanted = cell.get("id", "")
    if not re.fullmatch(r"[\w-]{1,64}", wanted, re.ASCII) or wanted in seen:
        wanted = f"cell-{index:02d}"
        while wanted in seen:
            wanted += "-b"
    seen.add(wanted)
    cell["id"] = wanted


def _fold(cell: NotebookNode) -> None:
    """A cell of one of these tags is folded in Jupyter, Colab and the site: the author writes one tag."""
    if FOLDED & set(tags(cell)):
        cell.metadata.tags = [*tags(cell), *({"hide-input"} - set(tags(cell)))]
        cell.metadata.jupyter = {"source_hidden": True}
        cell.metadata.cellView = "form"


def fold_title(cell: NotebookNode) -> str:
    """What stands on the fold of a cell: its first line, in Colab's form, ``# @title Imports``."""
    return cell.source.split("\n")[0].removeprefix("# @title ")


def _normalise_output(output: NotebookNode) -> NotebookNode | None:
    if output.output_type == "error":
        # IPython's traceback is full of paths; nbval compares the name and the message only.
        output.traceback = [f"{output.ename}: {output.evalue}"]
    if "data" in output:
        for kind in ("image/svg+xml", "application/vnd.jupyter.widget-view+json"):
            output.data.pop(kind, None)
        if not output.data:
            return None
    if "metadata" in output:
        output.metadata = {k: v for k, v in output.metadata.items() if k in output.data and v}
    return output


def _alt_for_the_site(cell: NotebookNode) -> None:
    """myst-nb reads a picture's alternative text from the cell, not from the output, where `show` puts it."""
    cell.metadata.pop("mystnb", None)
    alts = [output.metadata["image/png"]["alt"] for output in images(cell) if alt_text(output)]
    if alts:
        cell.metadata["mystnb"] = {"image": {"alt": " ".join(alts)}}


def images(cell: NotebookNode) -> list[NotebookNode]:
    return [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]


def alt_text(output: NotebookNode) -> str:
    return output.metadata.get("image/png", {}).get("alt", "")


def machine_paths(notebook: NotebookNode) -> list[str]:
    """Where a notebook names a path of the machine that wrote it: ``cell 3 (output): /home/ada/x``."""
    problems = []
    for index, cell in enumerate(notebook.cells):
        texts = [("source", cell.source)]
        for output in cell.get("outputs", []):
            data = [v for k, v in output.get("data", {}).items() if not k.startswith("image/")]
            lines = [output.get("text", ""), output.get("ename", ""), output.get("evalue", ""), *map(str, data)]
            texts += [("output", text) for text in lines + output.get("traceback", [])]
        for where, text in texts:
            for line in text.splitlines():
                if MACHINE_PATH.search(line):
                    problems.append(f"cell {index} ({where}): {line.strip()[:100]}")
    return problems


# --- execute and run ------------------------------------------------------------------------------------


def run_cells(notebook: NotebookNode, folder: Path, timeout: int = 120) -> str | None:
    """Runs a notebook in a fresh kernel of this very Python, one line a cell on stderr.

    Returns:
        None, or the cell that failed with its error.
    """
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_core.utils import run_sync
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, CellExecutionError, CellTimeoutError, DeadKernelError

    class ThisPython(KernelSpecManager):
        """A kernel named python3 may be installed elsewhere and start another Python."""

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())

    codes = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    headings = _headings(notebook)
    started = 0.0
    running = None

    def on_start(cell, cell_index):
        nonlocal started, running
        if cell_index in codes:
            started, running = time.perf_counter(), cell
            label = f"cell {codes.index(cell_index) + 1:2}/{len(codes)}"
            print(f"  {label}  {headings[cell_index]:<50.50} ", end="", file=sys.stderr, flush=True)

    def on_end(cell, cell_index, execute_reply):
        print(f"{time.perf_counter() - started:5.1f} s", file=sys.stderr, flush=True)

    for index in codes:
        notebook.cells[index].outputs, notebook.cells[index].execution_count = [], None
    manager = AsyncKernelManager(kernel_spec_manager=ThisPython())
    client = NotebookClient(
        notebook,
        km=manager,
        resources={"metadata": {"path": str(folder)}},
        timeout=timeout,
        extra_arguments=["--log-level=CRITICAL"],  # else a warning at each start, a traceback at each Ctrl-C
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        on_cell_execute=on_start,
        on_cell_executed=on_end,
    )
    try:
        client.execute()  # Ctrl-C ends the kernel, which arrives here as a DeadKernelError
    except CellTimeoutError:
        return f"{running.source}\n\nthis cell took longer than {timeout} s"
    except DeadKernelError:
        print(file=sys.stderr)
        return f"{running.source}\n\nthe kernel ended in this cell: Ctrl-C, or it crashed"
    except (CellExecutionError, CellControlSignal) as error:
        return re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
        if manager.has_kernel:  # asked first, killed after 5 s: ranks that it started end with it
            run_sync(manager.shutdown_kernel)()
    return None


def _headings(notebook: NotebookNode) -> list[str]:
    """For each cell the heading under which it stands."""
    current, headings = "", []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (match := re.search(r"^#+ (.+)$", cell.source, re.MULTILINE)):
            current = match[1]
        headings.append(current)
    return headings


def execute(paths: list[Path], timeout: int = 120) -> int:
    """Runs chapters in place. A chapter with an error is left as it was."""
    failed = 0
    for path in paths:
        print(path.stem, file=sys.stderr)
        started = time.perf_counter()
        notebook = read(path)
        problem = run_cells(notebook, path.parent, timeout)
        if problem is None:
            normalise(notebook)
            if found := machine_paths(notebook):
                problem = "\n".join(["paths of this machine:", *found])
        if problem is not None:
            print(f"\n{path.name} is not written.\n\n{problem}", file=sys.stderr)
            failed += 1
            continue
        write(notebook, path)
        size = path.stat().st_size / 1000
        print(f"  written: {time.perf_counter() - started:.1f} s, {size:.0f} kB", file=sys.stderr)
    return 1 if failed else 0


def run(path: Path, build: Path, timeout: int = 600) -> int:
    """Runs a chapter, leaves the notebook alone and writes a page to read, also when a cell fails."""
    print(path.stem, file=sys.stderr)
    notebook = read(path)
    problem = run_cells(notebook, path.parent, timeout)
    page = build / f"{path.stem}.html"
    build.mkdir(parents=True, exist_ok=True)
    page.write_text(to_html(notebook, path.stem), encoding="utf-8")
    if problem is not None:
        print(f"\n{problem}", file=sys.stderr)
    print(f"{'stopped at an error' if problem else 'done'}; the page to read: {os.path.relpath(page)}")
    return 0 if problem is None else 1


def to_html(notebook: NotebookNode, title: str) -> str:
    from bs4 import BeautifulSoup
    from jinja2 import pass_context
    from nbconvert import HTMLExporter

    normalise(notebook)
    exporter = HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True)
    exporter.register_filter("markdown2html", pass_context(markdown_to_html))
    exporter.log.disabled = True  # it would warn of the alternative text that is filled in below
    html, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": title}})
    page = BeautifulSoup(html, features="html.parser")
    # The page asks nothing of the network: no MathJax, Mermaid or require.js, and Colab's badge as words.
    for script in page.head.select("script"):
        script.decompose()
    for image in page.select("img[src^='http']"):
        image.replace_with(image.get("alt", ""))
    # nbconvert's lab template does not read the alternative text, so it is put where it belongs here.
    alts = [alt_text(output) for cell in notebook.cells for output in images(cell)]
    for image, alt in zip(page.select(".jp-OutputArea-output img[src^='data:image/png']"), alts, strict=True):
        image["alt"] = alt
    titles = [fold_title(cell) for cell in notebook.cells if "hide-input" in tags(cell)]
    for source, text in zip(page.select(".celltag_hide-input > .jp-Cell-inputWrapper"), titles, strict=True):
        details = source.wrap(page.new_tag("details"))
        details.insert(0, page.new_tag("summary"))
        details.summary.string = text
    return str(page)


def markdown_to_html(context: Mapping, source: str) -> str:
    """A Markdown cell as nbconvert writes it, with its formulas in MathML, which needs no network.

    Args:
        context: nbconvert's names where the cell is drawn, of which ``cell`` is used.
        source: the cell's text.

    Returns:
        HTML.
    """
    from latex2mathml.converter import convert
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        def inline_math(self, body: str) -> str:
            return formula(body, "inline") or super().inline_math(body)

        def block_math(self, body: str) -> str:
            return formula(body, "block") or super().block_math(body)

        def latex_environment(self, name: str, body: str) -> str:
            text = f"\\begin{{{name}}}{body}\\end{{{name}}}"
            return formula(text, "block") or super().latex_environment(name, body)

    def formula(text: str, display: str) -> str:
        # What it cannot read, or a command that it does not know, is shown as it was written.
        try:
            mathml = convert(text, display=display)
        except Exception:
            return ""
        return "" if "\\" in mathml else mathml

    attachments = context.get("cell", {}).get("attachments", {})
    return MarkdownWithMath(renderer=Renderer(escape=False, attachments=attachments)).render(source)


# --- the repository's address and release ---------------------------------------------------------------


def stamp(root: Path = ROOT, check: bool = False) -> int:
    """Writes address and release into badges, set-up cells and pages, or lists the files that differ."""
    repo = repository(root)
    pages = [root / "README.md", root / "environment.yml", *sorted((root / "docs").glob("*.md"))]
    changes = {path: stamp_notebook(path, repo) for path in chapters(root)}
    changes |= {path: stamp_text(path.read_text(encoding="utf-8"), repo) for path in pages if path.exists()}
    differ = [path for path, text in changes.items() if path.read_text(encoding="utf-8") != text]
    for path in differ:
        print(f"{'differs' if check else 'stamped'}: {path.relative_to(root)}")
        if not check:
            path.write_text(changes[path], encoding="utf-8")
    return 1 if check and differ else 0


def stamp_text(text: str, repo: Repository) -> str:
    """Any address of a repository of this project's name becomes ours; what pip installs is the release."""
    names = "|".join(sorted({NAME, repo.name.split("/")[1]}))
    address = rf"[\w.-]+/(?:{names})(?![\w-])"
    text = re.sub(
        rf"(https://(?:github\.com|colab\.research\.google\.com/github)/){address}", rf"\g<1>{repo.name}", text
    )
    return re.sub(rf"(git\+{re.escape(repo.url)})(?:@[\w.-]+)?", rf"\g<1>@{repo.release}", text)


def stamp_notebook(path: Path, repo: Repository) -> str:
    notebook = read(path)
    for cell in notebook.cells:
        if "setup" in tags(cell):
            cell.source = setup_source(repo)
        elif cell.cell_type == "markdown":
            lines = [badge(repo, path.name) if line.startswith(BADGE) else line for line in cell.source.split("\n")]
            cell.source = stamp_text("\n".join(lines), repo)
    return dumps(notebook)


# --- pictures, text form, skeleton ----------------------------------------------------------------------


def figures(path: Path, out: Path) -> list[Path]:
    """Writes every stored PNG of a chapter to a file, and prints its alternative text beside its name."""
    files = []
    out.mkdir(parents=True, exist_ok=True)
    for index, cell in enumerate(read(path).cells):
        for number, output in enumerate(images(cell)):
            file = out / f"{path.stem}_cell{index:02d}_{number}.png"
            file.write_bytes(base64.b64decode(output.data["image/png"]))
            print(f"{os.path.relpath(file)}  {alt_text(output)}")
            files.append(file)
    return files


def to_text(path: Path, text: Path) -> None:
    """The notebook as a py:percent script, with tags and without what ``normalise`` adds again."""
    import jupytext

    notebook = normalise(read(path))
    for cell in notebook.cells:
        cell.metadata.pop("mystnb", None)
        if FOLDED & set(tags(cell)):
            cell.metadata = nbformat.from_dict({"tags": [tag for tag in tags(cell) if tag != "hide-input"]})
    notebook.metadata["jupytext"] = {"cell_metadata_filter": "all", "notebook_metadata_filter": "-all"}
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(jupytext.writes(notebook, fmt="py:percent"), encoding="utf-8")


def from_text(text: Path, path: Path) -> None:
    """The notebook of a py:percent script; outputs come from ``execute``."""
    import jupytext

    notebook = jupytext.reads(text.read_text(encoding="utf-8"), fmt="py:percent")
    for cell in notebook.cells:
        cell.pop("id", None)  # jupytext draws them at random
    write(normalise(notebook), path)


def new(number: str, name: str, title: str, root: Path = ROOT) -> Path:
    """Writes the skeleton of a chapter, and of its checks if it has none."""
    if not re.fullmatch(r"\d\d", number) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise SystemExit(f"a chapter is named 26 my_chapter, not {number} {name}")
    path = root / "notebooks" / f"{number}_{name}.ipynb"
    if taken := list(path.parent.glob(f"{number}_*.ipynb")):
        raise SystemExit(f"{taken[0].name} exists")
    before = [chapter for chapter in chapters(root) if chapter.name < path.name]
    needs = "PyTorch, nothing else."
    if before:
        needs = f"[{read(before[-1]).cells[0].source.splitlines()[0].removeprefix('# ')}]({before[-1].name})"
    write(skeleton(path.name, title, repository(root), needs), path)
    checks = root / "ignite_ddl" / "course" / "checks" / f"ch{number}.py"
    if not checks.exists():
        checks.parent.mkdir(parents=True, exist_ok=True)
        checks.write_text(CHECKS.replace("NN", number), encoding="utf-8")
    return path


def skeleton(name: str, title: str, repo: str, needs: str) -> NotebookNode:
    number = name[:2]
    opening = OPENING.format(number=number, title=title, badge=badge(repo, name), needs=needs)
    cells = [_markdown(opening), _code(setup_source(repo), "setup")]
    for block in SKELETON.replace("NN", number).strip().split("\n---\n"):
        tag, _, source = block.partition("\n")
        cells.append(_markdown(source) if tag == "markdown" else _code(source, *tag.split()[1:]))
    notebook = nbformat.v4.new_notebook(cells=cells)
    for cell in notebook.cells:
        del cell["id"]
    return normalise(notebook)


def _markdown(source: str) -> NotebookNode:
    return nbformat.v4.new_markdown_cell(source.strip())


def _code(source: str, *names: str) -> NotebookNode:
    cell = nbformat.v4.new_code_cell(source.strip("\n"))
    if names:
        cell.metadata.tags = list(names)
    return cell


OPENING = """\
# {number} · {title}

{badge}

Which question has a person who opens this chapter?

**The promise:** you find the answer here in one run.

**5 minutes** · Before this: {needs}

You will be able to:

- say what happens;
- say why it matters.
"""

# Cells are separated by ---; the first line says the kind of a cell and its tags.
SKELETON = '''
markdown
## The picture

What is where, before any code.
---
code imports
# @title Imports
from ignite_ddl.course import score, tally
from ignite_ddl.course.checks import chNN as checks
from ignite_ddl.course.figures import show
from ignite_ddl.lab import draw
---
code
rows = [3, 3, 2, 2]  # what each of four ranks holds
figure, axes = draw.new_figure("Ten rows do not fill four ranks evenly", height=2)
axes.barh(range(4), rows)
axes.set(yticks=range(4), ylabel="rank", xlabel="rows")
axes.invert_yaxis()
show(figure, alt="Four bars, one a rank: ranks 0 and 1 hold three rows, ranks 2 and 3 hold two.")
---
markdown
## The first idea

A question with a number as its answer: how many rows does rank 3 hold?
---
code
guess_rows = None  # your guess, in rows

print(f"a batch of {sum(rows)} rows on {len(rows)} ranks")
---
code score
# @title Your guess
score(guess_rows, rows[3], " rows", mistakes={sum(rows): "That is what all four hold together."})
assert rows[3] == 2
---
markdown
Explain what the run has shown.

### Exercise 1 · Double it · 5 minutes · ●○○

What to build, and what it may cost.
---
code exercise
def double(n_rows: int) -> int:
    """Twice the rows.

    Args:
        n_rows: rows on one rank.

    Returns:
        twice as many rows.
    """
    raise NotImplementedError
---
code check
checks.double(double)
---
code solution
# @title Solution: double it
def double_solution(n_rows: int) -> int:
    return 2 * n_rows


assert checks.double(double_solution)
---
markdown
## The second idea

Break it: the same cell with the one change that goes wrong.
---
code
guess_total = None  # your guess: rows on all ranks together

total = sum(rows)
---
code score
# @title Your guess
score(guess_total, total, " rows", mistakes={4 * rows[0]: "Do all ranks hold as much as rank 0?"})
assert total == 10
---
code
without_rank_3 = sum(rows[:3])
print(f"without rank 3: {without_rank_3} rows")
assert without_rank_3 != total
---
markdown
Explain the symptom.

### Exercise 2 · The largest shard · 10 minutes · ●●○

What to build, and what it may cost.
---
code exercise
def largest_shard(n_rows: int, world_size: int) -> int:
    """The rows of the rank that holds most, if the rows are split as evenly as they go.

    Args:
        n_rows: rows in all.
        world_size: number of ranks.

    Returns:
        rows on the fullest rank.
    """
    raise NotImplementedError
---
code check
checks.largest_shard(largest_shard)
---
code solution
# @title Solution: the largest shard
def largest_shard_solution(n_rows: int, world_size: int) -> int:
    return -(-n_rows // world_size)


assert checks.largest_shard(largest_shard_solution)
---
code
tally()
---
markdown
## What to remember

- The first thing.
- The second thing.
- The third thing.

## Sources

- Whose idea it is, with a link to the paper.

**Next:** what comes after this.
'''

CHECKS = '''"""The checks of chapter NN's exercises."""

from ignite_ddl.course.exercises import Hint, exercise


@exercise
def double(function):
    for n_rows in (0, 1, 7):
        if (got := function(n_rows)) != 2 * n_rows:
            raise Hint(f"{n_rows} rows doubled are {2 * n_rows}, yours are {got}")
    return "twice the rows"


@exercise
def largest_shard(function):
    for n_rows, world_size, expected in ((10, 4, 3), (8, 4, 2), (1, 4, 1)):
        if (got := function(n_rows, world_size)) != expected:
            raise Hint(f"{n_rows} rows on {world_size} ranks: the fullest holds {expected}, yours {got}")
    return "no rank holds more than it must"
'''


# --- the command line -----------------------------------------------------------------------------------


def normalise_files(paths: list[Path]) -> int:
    failed = 0
    for path in paths:
        notebook = normalise(read(path))
        if found := machine_paths(notebook):
            print(f"{path.name} is not written, it names paths of a machine:", *found, sep="\n  ")
            failed += 1
            continue
        if (text := dumps(notebook)) != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"normalised: {path.name}")
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to work on")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, text in (("execute", "run in place and store the outputs"), ("normalise", "one form for all")):
        sub = commands.add_parser(command, help=text)
        sub.add_argument("chapters", nargs="*", metavar="NN", help="all chapters if none is given")
    for command, text in (
        ("run", "run a chapter and write a page to read"),
        ("figures", "write its pictures to files"),
        ("to-text", "write it as a script to edit"),
        ("from-text", "read that script back"),
    ):
        sub = commands.add_parser(command, help=text)
        sub.add_argument("chapter", metavar="NN")
        if command == "figures":
            sub.add_argument("--out", type=Path, help="a folder; build/figures if none is given")
        if command == "run":
            sub.add_argument("--timeout", type=int, default=600, help="seconds for one cell")
    sub = commands.add_parser("stamp", help="write address and release where they are needed")
    sub.add_argument("--check", action="store_true", help="only list the files that differ")
    sub = commands.add_parser("new", help="write the skeleton of a chapter")
    sub.add_argument("number", metavar="NN")
    sub.add_argument("name")
    sub.add_argument("title")

    args = parser.parse_args(arguments)
    root, build = args.root, args.root / "build"
    if args.command == "execute":
        return execute(chapters(root, args.chapters))
    if args.command == "normalise":
        return normalise_files(chapters(root, args.chapters))
    if args.command == "stamp":
        return stamp(root, args.check)
    if args.command == "new":
        print(os.path.relpath(new(args.number, args.name, args.title, root)))
        return 0
    if args.command == "from-text":
        number, stem = args.chapter.zfill(2), Path(args.chapter).stem
        texts = [p for p in sorted((build / "text").glob("*.py")) if p.stem == stem or p.name[:3] == f"{number}_"]
        if len(texts) != 1:
            raise SystemExit(f"build/text holds {len(texts)} scripts of chapter {args.chapter}, not one")
        path = root / "notebooks" / f"{texts[0].stem}.ipynb"
        from_text(texts[0], path)
        print(os.path.relpath(path))
        return 0
    [path] = chapters(root, [args.chapter])
    if args.command == "run":
        return run(path, build, args.timeout)
    if args.command == "figures":
        figures(path, args.out or build / "figures")
    else:
        text = build / "text" / f"{path.stem}.py"
        to_text(path, text)
        print(os.path.relpath(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
