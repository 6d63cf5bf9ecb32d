"""The reader's own copy of the chapters: workbook/, without outputs, kept up to date.

    python tools/workbook.py                          make or refresh workbook/; `make lab` does it
    python tools/workbook.py --to build/colab         the chapters without outputs as Colab opens them
    python tools/workbook.py --to DIR --tag v0.1.0    the same, if the tag is that of pyproject.toml's version

What the reader has touched is never overwritten or removed. A chapter is touched when the types or sources of
its cells are not those that were copied; outputs and metadata do not count. workbook/.copied.json holds the
digest of each file as it was copied. Where the reader and the course have both changed a chapter, the course's
is written beside the reader's: 05_name.new.ipynb.

Standard library only: the workflow that writes Colab's branch installs nothing.
"""

import argparse
import hashlib
import itertools
import json
import os
import platform
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ".copied.json"
LAYOUT = ".lab"  # JupyterLab's layout of this folder: `make lab` names it as LabApp.workspaces_dir
COLAB = "https://colab.research.google.com/github"

# What the kernel of this Python writes into a notebook that it opens: without it JupyterLab would ask to save a chapter
# that was only looked at.
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
    "version": platform.python_version(),
}
WHOSE = """\
> **This copy is yours.** Write, run and save here. The course's own chapters stay in `notebooks/`, with outputs.
>
> `make lab` brings what is new in the course into the chapters that you have not changed. It never overwrites \
a chapter that you have: its new version is put beside yours. **To start a chapter over**, delete its file here \
and run `make lab` again."""


# --- what a copy is -------------------------------------------------------------------------------------


def load(path: Path) -> dict:
    """A chapter of the course.

    Raises:
        SystemExit: if the file is not a notebook, with what to do.
    """
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells(notebook)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"{path.parent.name}/{path.name} cannot be read ({error}). Nothing is copied. "
            f"`git checkout -- {path.parent.name}` brings the course's chapters back."
        ) from None
    return notebook


def cells(notebook: object) -> list[tuple[str, str]]:
    """Type and source of each cell, in order: what the digest of a chapter counts.

    Raises:
        ValueError: if it is not a notebook.
    """
    try:
        return [(str(cell["cell_type"]), "".join(cell["source"])) for cell in notebook["cells"]]
    except (TypeError, KeyError):
        raise ValueError("not a notebook of format 4") from None


def digest(notebook: object) -> str:
    return hashlib.sha256(json.dumps(cells(notebook)).encode()).hexdigest()


def digest_of(path: Path) -> str | None:
    try:
        return digest(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def strip(notebook: dict) -> dict:
    """The chapter without outputs, execution counts and what describes outputs. Works in place."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
            cell.get("metadata", {}).pop("mystnb", None)  # the text of a picture tells what the cell will show
    return notebook


def whose_copy() -> dict:
    """The cell on top of the first chapter."""
    return {"cell_type": "markdown", "id": "whose-copy", "metadata": {}, "source": WHOSE.splitlines(keepends=True)}


def dumps(notebook: dict) -> str:
    return json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def chapters(folder: Path) -> dict[str, dict]:
    """File name -> the chapter without outputs, in reading order."""
    paths = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not paths:
        raise SystemExit(f"there are no chapters in {folder.name}/: is this a whole checkout of the course?")
    return {path.name: strip(load(path)) for path in paths}


# --- the reader's workbook ------------------------------------------------------------------------------


class Workbook:
    """A folder with the reader's copies, and what was copied into it.

    Args:
        folder: the workbook; made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise SystemExit(f"{folder.name} is a file: rename it, the copies of the chapters go there")
        self.copied = self._read_copied()
        self.notes: list[str] = []
        self.renewed: list[str] = []

    def _read_copied(self) -> dict[str, str]:
        # Without a record each file counts as the reader's, which loses nothing.
        try:
            copied = json.loads((self.folder / COPIED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(copied, dict):
            return {}
        return {name: text for name, text in copied.items() if isinstance(text, str)}

    def refresh(self, course: dict[str, dict]) -> list[str]:
        """Brings the copies up to date.

        Args:
            course: file name -> chapter, as it is to be copied.

        Returns:
            what the reader should know, a line each.
        """
        for name, notebook in course.items():
            self._refresh(name, notebook)
        for name in [name for name in self.copied if chapter_of(name) not in course]:
            self._leave(name)
        if self.renewed:
            self.notes.insert(0, f"new in the course, in chapters that you had not changed: {', '.join(self.renewed)}")
        write(self.folder / COPIED, json.dumps(self.copied, indent=1, sort_keys=True) + "\n")
        return self.notes

    def _refresh(self, name: str, notebook: dict) -> None:
        wanted = digest(notebook)
        if not self._touched(name, wanted):
            self._put(name, notebook, wanted)
        elif self.copied.get(name) != wanted:
            self._beside(name, notebook, wanted)
            return
        for other in [other for other in self.copied if other != name and chapter_of(other) == name]:
            if not self._touched(other):  # nothing is new any more
                self._remove(other)

    def _beside(self, name: str, notebook: dict, wanted: str) -> None:
        """Writes the course's chapter under the first name that holds nothing of the reader's."""
        for other in names_beside(name):
            if self._touched(other, wanted):
                if self.copied.get(other) == wanted:  # the reader works in it
                    return
                continue
            if not os.path.lexists(self.folder / other) and self.copied.get(other) == wanted:
                return  # the reader has seen it, and deleted it
            self._put(other, notebook, wanted)
            self.notes.append(f"{name} has changed, and so has your copy, which stays. The new one: {other}")
            return

    def _leave(self, name: str) -> None:
        """A chapter that the course no longer has."""
        if self._touched(name):
            self.notes.append(f"{name} is no longer part of the course; your copy, which you changed, stays.")
            del self.copied[name]  # from now on a file of the reader's own
        else:
            self._remove(name)

    def _touched(self, name: str, wanted: str = "") -> bool:
        """Whether a file is there that holds neither what was copied nor what is to be copied."""
        path = self.folder / name
        if not os.path.lexists(path):
            return False
        ours = {text for other, text in self.copied.items() if chapter_of(other) == chapter_of(name)}
        return digest_of(path) not in {wanted, *ours}  # None, no notebook or not readable, is the reader's

    def _put(self, name: str, notebook: dict, wanted: str) -> None:
        """Copies a chapter over one that is not touched; the reader's outputs stay where no cell differs."""
        path = self.folder / name
        if not path.exists() or digest_of(path) != wanted:
            if path.exists() and name == chapter_of(name):
                self.renewed.append(name)
            write(path, dumps(notebook))
        self.copied[name] = wanted

    def _remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        self.copied.pop(name, None)


def names_beside(name: str) -> Iterator[str]:
    """05_name.new.ipynb, 05_name.new2.ipynb, ..."""
    stem = name.removesuffix(".ipynb")
    return (f"{stem}.new{number if number > 1 else ''}.ipynb" for number in itertools.count(1))


def chapter_of(name: str) -> str:
    """The chapter to which a file of the record belongs: 05_name.new2.ipynb -> 05_name.ipynb."""
    return re.sub(r"\.new\d*\.ipynb$", ".ipynb", name)


def refresh(root: Path = ROOT) -> list[str]:
    """Makes or refreshes workbook/ of a checkout.

    Args:
        root: the checkout.

    Returns:
        what the reader should know, a line each.
    """
    course = chapters(root / "notebooks")
    for notebook in course.values():
        notebook["metadata"]["language_info"] = LANGUAGE
    first = next(iter(course.values()))
    first["cells"].insert(0, whose_copy())
    notes = Workbook(root / "workbook").refresh(course)
    for seed in (root / "tools" / "jupyter").glob("*.jupyterlab-workspace"):
        layout = root / "workbook" / LAYOUT / seed.name
        if not layout.exists():  # from then on JupyterLab keeps the reader's own there
            write(layout, seed.read_text(encoding="utf-8"))
    return notes


# --- the copies that Colab opens ------------------------------------------------------------------------


def publish(root: Path, folder: Path, tag: str | None = None) -> None:
    """Writes the chapters without outputs for a branch of their own, to which the badges lead.

    Args:
        root: the checkout.
        folder: where to write them; new or empty.
        tag: the release's tag, if it is to be compared with pyproject.toml's version.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repo, release = project["urls"]["Repository"].rstrip("/"), f"v{project['version']}"
    if tag not in (None, release):
        raise SystemExit(f"the tag {tag} is not that of pyproject.toml's version, {release}")
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: give a new folder")
    for name, notebook in chapters(root / "notebooks").items():
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                text = colab_links("".join(cell["source"]), repo, release)
                cell["source"] = text.splitlines(keepends=True)
        write(folder / name, dumps(notebook))
    write(folder / "README.md", f"The chapters of {repo} at {release} without outputs, as Colab opens them.\n")


def colab_links(text: str, repo: str, release: str) -> str:
    """Colab resolves no relative link: chapters lead to their copies, what lies elsewhere to the release."""
    copies = f"{COLAB}/{repo.removeprefix('https://github.com/')}/blob/workbook-{release}"
    text = re.sub(r"\]\((\d\d_\w+\.ipynb(?:#[^)\s]*)?)\)", rf"]({copies}/\1)", text)
    text = re.sub(r"(!\[[^\]]*\])\(\.\./([^)\s]+)\)", rf"\1({repo}/raw/{release}/\2)", text)
    return re.sub(r"\]\(\.\./([^)\s]+)\)", rf"]({repo}/blob/{release}/\1)", text)


# --- the command line -----------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to work on")
    parser.add_argument("--to", type=Path, metavar="DIR", help="write Colab's copies there")
    parser.add_argument("--tag", help="with --to: the release, as v0.1.0")
    args = parser.parse_args(arguments)
    if args.tag and not args.to:
        parser.error("--tag is for --to")
    try:
        if args.to:
            publish(args.root, args.to, args.tag)
            return 0
        if not (args.root / "workbook").exists():
            print("workbook/: your own copy of the chapters; notebooks/ stays as it is")
        for note in refresh(args.root):
            print(note)
    except OSError as error:
        raise SystemExit(f"the copies could not be written: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
