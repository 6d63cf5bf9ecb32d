"""tools/workbook.py: the reader's copies under every combination of changes, and the copies for Colab."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from loading import ROOT, load

tool = load("tools/workbook.py")

NAME = "05_rows.ipynb"
NEW, NEW2 = "05_rows.new.ipynb", "05_rows.new2.ipynb"
REPO = "https://github.com/ada/ignite-ddl"


def notebook(*sources):
    """A chapter with outputs: Markdown first, then code."""
    cells = [{"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# 05 · Rows\n", "\n", "Text."]}]
    for number, source in enumerate(sources, 1):
        output = {"name": "stdout", "output_type": "stream", "text": ["7\n"]}
        cells.append(
            {
                "cell_type": "code",
                "execution_count": number,
                "id": f"c{number}",
                "metadata": {"tags": ["x"], "mystnb": {"image": {"alt": "seven"}}},
                "outputs": [output],
                "source": [source],
            }
        )
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


OLD, CHANGED, NEWEST = notebook("old"), notebook("changed"), notebook("newest")


class Checkout:
    """A course of one chapter beside another that nobody changes, and its workbook."""

    def __init__(self, root):
        self.root, self.workbook = root, root / "workbook"
        (root / "notebooks").mkdir()
        (root / "pyproject.toml").write_text(f'[project]\nversion = "0.1.0"\n[project.urls]\nRepository = "{REPO}"\n')
        self.course(notebook("first"), "00_start.ipynb")

    def course(self, content, name=NAME):
        path = self.root / "notebooks" / name
        if content is None:
            path.unlink()
        else:
            path.write_text(json.dumps(content))

    def refresh(self):
        return tool.refresh(self.root)

    def both_changed(self):
        self.edit(NAME)
        self.course(CHANGED)
        self.refresh()

    def write(self, name, content):
        (self.workbook / name).write_text(json.dumps(content) if isinstance(content, dict) else content)

    def edit(self, name, source="mine"):
        """What JupyterLab does: the cells change, the file is written in its own form."""
        path = self.workbook / name
        content = json.loads(path.read_text())
        content["cells"][-1]["source"] = source
        path.write_text(json.dumps(content, indent=2))

    def run_all(self, name):
        path = self.workbook / name
        content = json.loads(path.read_text())
        content["metadata"]["kernelspec"] = {"name": "python3"}
        content["cells"][-1] |= {
            "execution_count": 3,
            "outputs": [{"output_type": "stream", "name": "stdout", "text": "ran\n"}],
        }
        path.write_text(json.dumps(content, indent=2))

    def files(self):
        return {path.name: path.read_bytes() for path in self.workbook.glob("*.ipynb")}

    def source(self, name):
        """The last cell's source: old, changed, newest or mine; None if there is no such file."""
        path = self.workbook / name
        if not path.exists():
            return None
        try:
            return "".join(json.loads(path.read_text())["cells"][-1]["source"])
        except ValueError:
            return "broken"


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture
def copied(checkout):
    """A checkout whose chapter the reader has a copy of."""
    checkout.course(OLD)
    checkout.refresh()
    return checkout


# --- every combination --------------------------------------------------------------------------------

# What the reader has done to a chapter that was copied as "old". Then, for a course that is the same as when it was
# copied last, has changed, or has removed the chapter: the sources of the chapter, of .new and of .new2 after a
# refresh; * the file is as the reader left it, outputs too, - there is none.
TABLE = {
    "untouched": (lambda c: None, "old* - -", "newest - -", "- - -"),
    "outputs only": (lambda c: c.run_all(NAME), "old* - -", "newest - -", "- - -"),
    "touched": (lambda c: c.edit(NAME), "mine* - -", "mine* newest -", "mine* - -"),
    "deleted": (lambda c: (c.workbook / NAME).unlink(), "old - -", "newest - -", "- - -"),
    "broken": (lambda c: c.write(NAME, "{ <<<<<<<"), "broken* - -", "broken* newest -", "broken* - -"),
    ".new of the reader's": (lambda c: (c.edit(NAME), c.write(NEW, notebook("mine2"))),
                             "mine* mine2* -", "mine* mine2* newest", "mine* mine2* -"),
    # From here on the chapter is touched, and the course has changed once: .new holds "changed".
    ".new untouched": (lambda c: c.both_changed(), "mine* changed* -", "mine* newest -", "mine* - -"),
    ".new outputs only": (lambda c: (c.both_changed(), c.run_all(NEW)),
                          "mine* changed* -", "mine* newest -", "mine* - -"),
    ".new touched": (lambda c: (c.both_changed(), c.edit(NEW, "mine2")),
                     "mine* mine2* -", "mine* mine2* newest", "mine* mine2* -"),
    ".new broken": (lambda c: (c.both_changed(), c.write(NEW, "{ <<<<<<<")),
                    "mine* broken* -", "mine* broken* newest", "mine* broken* -"),
    ".new deleted": (lambda c: (c.both_changed(), (c.workbook / NEW).unlink()),
                     "mine* - -", "mine* newest -", "mine* - -"),
    ".new instead": (lambda c: (c.both_changed(), os.replace(c.workbook / NEW, c.workbook / NAME)),
                     "changed* - -", "newest - -", "- - -"),
    "touched, and back": (lambda c: (c.both_changed(), c.edit(NAME, "old")), "changed - -", "newest - -", "- - -"),
    "deleted, .new untouched": (lambda c: (c.both_changed(), (c.workbook / NAME).unlink()),
                                "changed - -", "newest - -", "- - -"),
    "deleted, .new touched": (lambda c: (c.both_changed(), c.edit(NEW, "mine2"), (c.workbook / NAME).unlink()),
                              "changed mine2* -", "newest mine2* -", "- mine2* -"),
}  # fmt: skip


@pytest.mark.parametrize("upstream", ["same", "changed", "removed"])
@pytest.mark.parametrize("learner", TABLE)
def test_refresh(learner, upstream, copied):
    change, *expected = TABLE[learner]
    expected = expected[["same", "changed", "removed"].index(upstream)].split()
    change(copied)
    if upstream != "same":
        copied.course(NEWEST if upstream == "changed" else None)
    before = copied.files()
    notes = copied.refresh()
    after = copied.files()

    for name, wanted in zip((NAME, NEW, NEW2), expected, strict=True):
        assert copied.source(name) == (None if wanted == "-" else wanted.rstrip("*")), name
        if wanted.endswith("*"):
            assert after[name] == before[name], f"{name} is as it was, its outputs too"
        elif wanted != "-":
            assert json.loads(after[name])["cells"][-1]["outputs"] == []
    assert set(after) <= {"00_start.ipynb", NAME, NEW, NEW2}
    assert any("The new one:" in note for note in notes) >= ("newest" in expected[1:])

    # A second refresh changes nothing, whatever the first has found.
    copied.refresh()
    assert copied.files() == after


@pytest.mark.parametrize("there", [None, "the same", "other", "broken"])
def test_a_chapter_that_is_new_in_the_course(there, checkout):
    checkout.refresh()
    content = {"the same": OLD, "other": notebook("mine"), "broken": "{"}.get(there)
    if content:
        checkout.write(NAME, content)
    before = checkout.files().get(NAME)
    checkout.course(OLD)
    checkout.refresh()
    if there is not None:
        assert checkout.files()[NAME] == before
    assert checkout.source(NAME) == {"other": "mine", "broken": "broken"}.get(there, "old")
    assert checkout.source(NEW) == ("old" if there in ("other", "broken") else None)
    checkout.course(CHANGED)
    checkout.refresh()
    assert checkout.source(NAME) == {"other": "mine", "broken": "broken"}.get(there, "changed")
    assert checkout.source(NEW) == ("changed" if there in ("other", "broken") else None)


@pytest.mark.parametrize("record", [None, "{", "[]", '{"05_rows.ipynb": 3}'])
def test_a_lost_record_makes_no_file_ours(record, copied):
    copied.edit(NAME)
    path = copied.workbook / tool.COPIED
    path.unlink() if record is None else path.write_text(record)
    copied.course(CHANGED)
    copied.refresh()
    assert (copied.source(NAME), copied.source(NEW)) == ("mine", "changed")


def test_what_the_reader_made_or_renamed_stays(copied):
    os.replace(copied.workbook / NAME, copied.workbook / "05_mine.ipynb")
    (copied.workbook / "data.csv").write_text("1")
    copied.course(CHANGED)
    copied.refresh()
    assert (copied.source("05_mine.ipynb"), copied.source(NAME)) == ("old", "changed")
    assert (copied.workbook / "data.csv").read_text() == "1"


@pytest.mark.parametrize(
    "change",
    [
        lambda cells: cells.reverse(),
        lambda cells: cells.pop(),
        lambda cells: cells.append(copy.deepcopy(cells[-1])),
        lambda cells: cells[0].update(source="other"),
        lambda cells: cells[0].update(cell_type="raw"),
    ],
)
def test_types_sources_and_order_count(change):
    content = notebook("1", "2")
    change(content["cells"])
    assert tool.digest(content) != tool.digest(notebook("1", "2"))


def test_nothing_else_counts():
    content = tool.strip(notebook("1\n2"))
    content["metadata"] = {"kernelspec": {}}
    for cell in content["cells"]:
        cell["id"], cell["metadata"] = "other", {"collapsed": True}
        cell["source"] = "".join(cell["source"])
    assert tool.digest(content) == tool.digest(notebook("1\n2"))


# --- what is copied -----------------------------------------------------------------------------------


def test_copies_have_no_outputs_and_say_whose_they_are(copied):
    first, rows = (json.loads((copied.workbook / n).read_text()) for n in ("00_start.ipynb", NAME))
    assert "This copy is yours" in "".join(first["cells"][0]["source"])
    code = rows["cells"][1]
    assert (code["outputs"], code["execution_count"], code["metadata"]) == ([], None, {"tags": ["x"]})
    assert rows["cells"][0] == OLD["cells"][0], "no line above the other chapters"


def test_every_chapter_of_the_course_can_be_copied(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    shutil.copytree(ROOT / "tools" / "jupyter", tmp_path / "tools" / "jupyter")
    assert tool.refresh(tmp_path) == []
    names = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {path.name for path in (tmp_path / "workbook").glob("*.ipynb")} == names
    for path in (tmp_path / "workbook").glob("*.ipynb"):
        nbformat.validate(nbformat.read(path, as_version=4))


def test_the_reader_s_layout_of_jupyterlab_is_kept(checkout):
    seeds = checkout.root / "tools" / "jupyter"
    shutil.copytree(ROOT / "tools" / "jupyter", seeds)
    checkout.refresh()
    [layout] = (checkout.workbook / tool.LAYOUT).iterdir()
    layout.write_text("{}")
    checkout.refresh()
    assert layout.read_text() == "{}"


def test_jupyterlab_reads_the_layout_and_the_settings(monkeypatch):
    handler = pytest.importorskip("jupyterlab_server.workspaces_handler")
    from jupyterlab_server.settings_utils import _get_overrides

    layout = handler.WorkspacesManager(str(ROOT / "tools" / "jupyter")).load("default")["data"]
    assert layout["layout-restorer:data"]["left"]["collapsed"]
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(ROOT / "tools" / "jupyter"))
    overrides, error = _get_overrides("")
    assert not error
    assert overrides["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{ <<<<<<<", "[]", '{"cells": [{}]}', '{"worksheets": []}'])
def test_a_broken_chapter_of_the_course_stops_before_anything_is_written(text, copied):
    before = copied.files()
    (copied.root / "notebooks" / "01_broken.ipynb").write_text(text)
    copied.course(CHANGED)
    with pytest.raises(SystemExit, match=r"notebooks/01_broken.ipynb cannot be read .*git checkout"):
        copied.refresh()
    assert copied.files() == before


def test_a_failed_write_leaves_the_old_file_and_no_other(copied, monkeypatch, capsys):
    files = lambda: {path.name: path.read_bytes() for path in copied.workbook.iterdir() if path.is_file()}  # noqa: E731
    before = files()
    copied.course(CHANGED)

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tool.os, "replace", full)
    with pytest.raises(SystemExit, match="could not be written: .*No space left"):
        tool.main(["--root", str(copied.root)])
    assert files() == before


def test_no_chapters_and_a_file_in_the_way(checkout):
    checkout.workbook.write_text("")
    with pytest.raises(SystemExit, match="workbook is a file"):
        checkout.refresh()
    checkout.course(None, "00_start.ipynb")
    with pytest.raises(SystemExit, match="no chapters in notebooks/"):
        checkout.refresh()


def test_the_command_prints_what_the_reader_should_know(checkout, capsys):
    checkout.course(OLD)
    assert tool.main(["--root", str(checkout.root)]) == 0
    assert "your own copy" in capsys.readouterr().out
    checkout.edit(NAME)
    checkout.course(CHANGED)
    tool.main(["--root", str(checkout.root)])
    assert capsys.readouterr().out == (f"{NAME} has changed, and so has your copy, which stays. The new one: {NEW}\n")
    checkout.course(None)
    tool.main(["--root", str(checkout.root)])
    assert f"{NAME} is no longer part of the course; your copy" in capsys.readouterr().out
    tool.main(["--root", str(checkout.root)])
    assert capsys.readouterr().out == ""


# --- Colab --------------------------------------------------------------------------------------------


def test_colab_s_links():
    text = "[05](05_rows.ipynb), [b](05_rows.ipynb#b), [t](../docs/t.md), ![p](../docs/p.png), [w](https://x.org)"
    copies = "https://colab.research.google.com/github/ada/ignite-ddl/blob/workbook-v0.1.0"
    assert tool.colab_links(text, REPO, "v0.1.0") == (
        f"[05]({copies}/05_rows.ipynb), [b]({copies}/05_rows.ipynb#b), [t]({REPO}/blob/v0.1.0/docs/t.md), "
        f"![p]({REPO}/raw/v0.1.0/docs/p.png), [w](https://x.org)"
    )


def test_copies_for_colab(checkout):
    checkout.course(OLD)
    folder = checkout.root / "colab"
    assert tool.main(["--root", str(checkout.root), "--to", str(folder), "--tag", "v0.1.0"]) == 0
    assert {path.name for path in folder.iterdir()} == {"00_start.ipynb", NAME, "README.md"}
    assert json.loads((folder / NAME).read_text()) == tool.strip(copy.deepcopy(OLD))
    assert not checkout.workbook.exists()
    with pytest.raises(SystemExit, match="is not empty"):
        tool.publish(checkout.root, folder)
    with pytest.raises(SystemExit, match=r"the tag v0.2.0 is not that of pyproject.toml's version, v0.1.0"):
        tool.publish(checkout.root, checkout.root / "other", "v0.2.0")
    assert not (checkout.root / "other").exists()


@pytest.mark.skipif(sys.platform == "win32" or not shutil.which("git"), reason="bash and git")
def test_the_workflow_writes_the_branch(checkout):
    """Its commands, in a checkout whose origin is a folder: twice, because a release may be repeated."""
    root = checkout.root
    workflow = yaml.safe_load((ROOT / ".github/workflows/workbook.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    checkout.course(OLD)
    (root / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "workbook.py", root / "tools")
    (root / ".gitignore").write_text("*.ipynb\nbuild/\n")
    env = os.environ | {"GITHUB_REF_NAME": "v0.1.0", "GIT_CONFIG_GLOBAL": os.devnull}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"

    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=root, env=env, capture_output=True, text=True, check=True)
        return done.stdout

    git("init", "-q", "--bare", "origin.git")
    git("init", "-q")
    git("remote", "add", "origin", str(root / "origin.git"))
    for _ in range(2):
        shutil.rmtree(root / "build", ignore_errors=True)
        for step in workflow["jobs"]["workbook"]["steps"]:
            if "run" in step:
                names = {
                    key: value.replace("${{ github.workspace }}", str(root))
                    for key, value in step.get("env", {}).items()
                }
                subprocess.run(["bash", "-e", "-c", step["run"]], cwd=root, env=env | names, check=True)
        git("fetch", "-q", "--force", "origin", "workbook-v0.1.0:copies")
        assert git("ls-tree", "--name-only", "copies").split() == ["00_start.ipynb", NAME, "README.md"]
        assert git("rev-list", "--count", "copies").strip() == "1"


# --- what the reader is told and asked


def test_chapters_that_are_renewed_are_named_once(checkout):
    checkout.course(OLD)
    assert checkout.refresh() == []
    checkout.course(CHANGED)
    assert checkout.refresh() == [f"new in the course, in chapters that you had not changed: {NAME}"]
    assert checkout.refresh() == []


def test_a_copy_says_of_its_language_what_the_kernel_says(checkout):
    """Else JupyterLab writes it, and asks whether to save a chapter that was only looked at."""
    kernel = pytest.importorskip("ipykernel.ipkernel")
    checkout.course(OLD)
    checkout.refresh()
    copied = json.loads((checkout.workbook / NAME).read_text())
    assert copied["metadata"]["language_info"] == kernel.IPythonKernel.language_info


def test_make_lab_says_once_what_workbook_is_and_then_only_what_is_new(checkout, capsys):
    said = []
    for content in (OLD, OLD, CHANGED):
        checkout.course(content)
        assert tool.main(["--root", str(checkout.root)]) == 0
        said.append(capsys.readouterr().out.splitlines())
    assert said[0] == ["workbook/: your own copy of the chapters; notebooks/ stays as it is"]
    assert said[1:] == [[], [f"new in the course, in chapters that you had not changed: {NAME}"]]
