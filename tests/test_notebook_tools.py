"""tools/notebooks.py on small notebooks in a temporary checkout."""

import base64
import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from loading import ROOT, load
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

tools = load("tools/notebooks.py")

REPO = tools.Repository("https://github.com/ada/ignite-ddl", "v1.2.3")
PNG = b"\x89PNG bytes"


@pytest.fixture
def checkout(tmp_path):
    """A folder with what the tools need of a checkout."""
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nversion = "1.2.3"\n[project.urls]\nRepository = "{REPO.url}"\n'
    )
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def chapter(checkout, *cells, name="01_small.ipynb"):
    path = checkout / "notebooks" / name
    tools.write(tools.normalise(new_notebook(cells=list(cells))), path)
    return path


def command(checkout, *arguments):
    return tools.main(["--root", str(checkout), *arguments])


def picture(alt="Two bars of three rows."):
    data = {"image/png": base64.b64encode(PNG).decode(), "text/plain": alt}
    return new_output("display_data", data=data, metadata={"image/png": {"alt": alt}})


# --- normalise ----------------------------------------------------------------------------------------


def untidy():
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "4f"}}
    svg = {"image/svg+xml": "<svg/>", **picture().data}
    cells = [
        new_markdown_cell("# 01 · Small", id="same"),
        new_code_cell("1", metadata={"execution": {"iopub.busy": "12:00"}, "collapsed": True}),
        new_code_cell("2", id="mine", metadata={"tags": ["check"], "scrolled": False}),
        new_code_cell("3", outputs=[new_output("display_data", data=widget)]),
        new_code_cell("4", outputs=[nbformat.from_dict(picture() | {"data": svg})]),
    ]
    notebook = new_notebook(cells=cells)
    notebook.cells[1].id = "same"  # here, because nbformat draws another id where it sees a second one
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"name": "ml", "display_name": "mine", "language": "python"},
            "language_info": {"name": "python", "version": "3.11.2"},
            "widgets": {"application/vnd.jupyter.widget-state+json": {}},
        }
    )
    return notebook


def test_normalise_drops_what_differs_between_machines():
    notebook = tools.normalise(untidy())
    assert notebook.metadata == {"kernelspec": tools.KERNELSPEC, "language_info": {"name": "python"}}
    assert [cell.metadata for cell in notebook.cells[:4]] == [{}, {}, {"tags": ["check"]}, {}]
    assert notebook.cells[3].outputs == []
    assert set(notebook.cells[4].outputs[0].data) == {"image/png", "text/plain"}
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)


def test_normalise_keeps_unique_ids_and_repairs_others():
    ids = [cell.id for cell in tools.normalise(untidy()).cells]
    assert ids[:3] == ["same", "cell-01", "mine"]
    assert len(set(ids)) == 5


@pytest.mark.parametrize("tag", ["solution", "imports", "score"])
def test_normalise_folds_a_cell_from_its_tag(tag):
    cell = tools.normalise(new_notebook(cells=[new_code_cell("# @title X: x", metadata={"tags": [tag]})])).cells[0]
    assert cell.metadata == {"tags": [tag, "hide-input"], "jupyter": {"source_hidden": True}, "cellView": "form"}
    assert tools.fold_title(cell) == "X: x"


def test_normalise_gives_the_site_the_alternative_text():
    cell = tools.normalise(new_notebook(cells=[new_code_cell("draw()", outputs=[picture()])])).cells[0]
    assert cell.metadata["mystnb"] == {"image": {"alt": "Two bars of three rows."}}
    cell.outputs = []
    assert "mystnb" not in tools.normalise(new_notebook(cells=[cell])).cells[0].metadata


def test_normalise_shortens_a_traceback():
    error = new_output("error", ename="ValueError", evalue="7", traceback=["File /home/ada/x.py", "ValueError: 7"])
    notebook = tools.normalise(new_notebook(cells=[new_code_cell("f()", outputs=[error])]))
    assert notebook.cells[0].outputs[0].traceback == ["ValueError: 7"]
    assert tools.machine_paths(notebook) == []


def test_machine_paths_are_found():
    paths = ["/home/ada/x", "file:///opt/x", "'/tmp/x'", "C:\\Users\\ada", "/Users/ada", "lib/site-packages/torch"]
    for text in paths + [f"in /{folder}/course." for folder in ("root", "work", "private", "content")]:
        output = new_output("stream", text=f"read {text}\n")
        for cell in (new_code_cell("x", outputs=[output]), new_markdown_cell(f"read {text}")):
            assert len(tools.machine_paths(new_notebook(cells=[cell]))) == 1, text
    for text in ["https://example.org/home/x", "3/work", "a homework", "$x/tmp$", "~/data"]:
        assert tools.machine_paths(new_notebook(cells=[new_markdown_cell(text)])) == [], text


def test_normalise_command_does_not_write_machine_paths(checkout, capsys):
    path = chapter(checkout, new_code_cell("open('/opt/x')", metadata={"scrolled": True}))
    before = path.read_text()
    assert command(checkout, "normalise") == 1
    assert path.read_text() == before
    assert "cell 0 (source): open('/opt/x')" in capsys.readouterr().out


# --- execute, run -------------------------------------------------------------------------------------


def test_execute_stores_outputs_with_counts_and_an_error_that_the_chapter_shows(checkout, capsys):
    error = new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]})
    cells = [new_markdown_cell("# 01 · Small"), new_code_cell("x = 3\nprint(x)"), error, new_code_cell("x + 1")]
    path = chapter(checkout, *cells)
    assert command(checkout, "execute", "1") == 0
    _, first, error, last = tools.read(path).cells
    assert (first.execution_count, first.outputs[0].text) == (1, "3\n")
    assert error.outputs[0].traceback == ["ZeroDivisionError: division by zero"]
    assert (last.execution_count, last.outputs[0].data) == (3, {"text/plain": "4"})
    assert tools.dumps(tools.normalise(tools.read(path))) == path.read_text()
    progress = capsys.readouterr().err
    assert "cell  3/3  01 · Small" in progress


def test_execute_leaves_chapters_that_go_wrong_alone_and_runs_the_others(checkout, capsys):
    wrong = ["rows = 0\n1 / rows", "print('/' + 'opt/x')", "import os\nos._exit(3)"]
    paths = [chapter(checkout, new_code_cell(s), name=f"0{n}_wrong.ipynb") for n, s in enumerate(wrong)]
    good = chapter(checkout, new_code_cell("print(2)"), name="04_good.ipynb")
    before = [path.read_text() for path in paths]
    assert command(checkout, "execute") == 1
    assert [path.read_text() for path in paths] == before
    assert tools.read(good).cells[0].outputs[0].text == "2\n"
    shown = capsys.readouterr().err
    assert "1 / rows" in shown
    assert "ZeroDivisionError: division by zero" in shown


def test_execute_stops_a_cell_that_takes_too_long(checkout, capsys):
    path = chapter(checkout, new_code_cell("while True:\n    pass"))
    assert tools.execute([path], timeout=1) == 1
    assert "longer than 1 s" in capsys.readouterr().err


def draw(alt, png):
    """A cell that displays a picture as `show` does."""
    metadata = {"image/png": {"alt": alt}}
    return (
        "from IPython.display import display\n"
        f"display({{'image/png': {png!r}, 'text/plain': {alt!r}}}, raw=True, metadata={metadata!r})"
    )


def test_run_writes_a_page_and_leaves_the_notebook(checkout, capsys):
    solution = new_code_cell("# @title Solution: x\nprint('right')", metadata={"tags": ["solution"]})
    path = chapter(checkout, new_markdown_cell("# 01 · Small"), new_code_cell(draw("Two <bars>.", PNG)), solution)
    before = path.read_text()
    assert command(checkout, "run", "01") == 0
    assert path.read_text() == before
    assert "01_small.html" in capsys.readouterr().out
    page = (checkout / "build" / "01_small.html").read_text()
    assert 'alt="Two &lt;bars&gt;."' in page
    assert page.count("<summary>Solution: x</summary>") == 1


def test_a_page_asks_nothing_of_the_network(checkout):
    attached = {"a.png": {"image/png": base64.b64encode(PNG).decode()}}
    text = "Mean $\\frac{a}{b} < 1$ of `$x$`:\n\n$$\\sum_i x_i$$\n\n![a](attachment:a.png)\n\n$\\unheard$ $a_1_2$"
    path = chapter(
        checkout,
        new_markdown_cell(f"# 01 · Small\n\n{tools.badge(REPO, '01_small.ipynb')}"),
        new_markdown_cell(text, attachments=attached),
    )
    page = tools.to_html(tools.read(path), "01_small")
    assert page.count("<math") == 2
    assert page.count("<mfrac>") == 1
    assert 'display="block"' in page
    assert "<code>$x$</code>" in page
    assert "$\\unheard$ $a_1_2$" in page, "what is no formula is shown as it was written"
    assert "<script" not in page
    assert not re.search(r"(src=|url\(|@import )[\"']?https?:", page)
    assert ">Open in Colab</a>" in page


@pytest.mark.parametrize("path", tools.chapters(), ids=lambda path: path.stem)
def test_every_formula_of_a_chapter_is_read(path):
    for cell in tools.read(path).cells:
        if cell.cell_type == "markdown":
            page = tools.markdown_to_html({}, cell.source)
            assert "$" not in re.sub(r"<(code|pre)\b.*?</\1>", "", page, flags=re.DOTALL), cell.source


def test_run_writes_the_page_of_a_failing_chapter(checkout, capsys):
    chapter(checkout, new_code_cell("print('before')"), new_code_cell("1 / 0"), new_code_cell("print('after')"))
    assert command(checkout, "run", "1") == 1
    page = (checkout / "build" / "01_small.html").read_text()
    assert "before" in page
    assert "ZeroDivisionError" in page
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_the_kernel(checkout):
    note = checkout / "kernel"
    source = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()) + ' ')\ntime.sleep(60)"
    chapter(checkout, new_code_cell(source))
    script = [sys.executable, str(ROOT / "tools" / "notebooks.py"), "--root", str(checkout), "run", "1"]
    process = subprocess.Popen(script, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        wait_for(lambda: note.exists() and note.read_text().endswith(" "))
        process.send_signal(2)
        _, error = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "Ctrl-C" in error
    wait_for(lambda: not alive(int(note.read_text())))
    assert (checkout / "build" / "01_small.html").exists()


def wait_for(condition, seconds=20):
    import time

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- nbval, with the settings of tests/conftest.py ---------------------------------------------------------


def test_kernels_take_no_ports_that_ranks_may_take_first():
    from nbval.kernel import RunningKernel

    kernel = RunningKernel(":nbval-parent-env")
    try:
        assert {url.partition(":")[0] for url in map(kernel.km._make_url, ("shell", "iopub", "hb"))} == {"ipc"}
    finally:
        kernel.stop()


@pytest.mark.slow
def test_nbval_compares_strictly_and_lists_seconds(checkout):
    """Text and alternative text are compared, a picture's bytes are not; seconds come through xdist."""
    cells = [new_code_cell("print(3)"), new_code_cell(draw("Two bars of three rows.", PNG))]
    for name in ("01_same.ipynb", "02_text.ipynb", "03_alt.ipynb", "04_bytes.ipynb"):
        chapter(checkout, *cells, name=name)
    assert command(checkout, "execute") == 0
    for name, change in (
        ("02_text.ipynb", lambda text, shown: text.update(text="4\n")),
        ("03_alt.ipynb", lambda text, shown: shown.data.update({"text/plain": "Ten bars of three rows."})),
        ("04_bytes.ipynb", lambda text, shown: shown.data.update({"image/png": base64.b64encode(b"other").decode()})),
    ):
        path = checkout / "notebooks" / name
        notebook = tools.read(path)
        change(notebook.cells[0].outputs[0], notebook.cells[1].outputs[0])
        tools.write(notebook, path)
    (checkout / "tests").mkdir()
    limit = (ROOT / "tests" / "conftest.py").read_text().replace("CHAPTER_LIMIT = 60", "CHAPTER_LIMIT = 0.001")
    (checkout / "tests" / "conftest.py").write_text(limit)
    options = ["--nbval", "-q", "-n", "2", "--dist", "loadfile", "--rootdir", ".", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests", "notebooks", *options, "--color", "no"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    failed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert failed == {"notebooks/02_text.ipynb::Cell", "notebooks/03_alt.ipynb::Cell"}, done.stdout
    summary = done.stdout.partition("seconds per chapter")[2]
    assert summary.count("over the limit") == 4
    assert "notebooks/04_bytes.ipynb" in summary


# --- stamp --------------------------------------------------------------------------------------------


def test_stamp_writes_the_address_everywhere(checkout, capsys):
    old = "https://github.com/somebody/ignite-ddl"
    cells = [
        new_markdown_cell(
            "# 01 · Small\n\n"
            + tools.badge(tools.Repository(old, "v0.0.1"), "99_wrong.ipynb")
            + f"\n\nSee [it]({old}/issues)."
        ),
        new_code_cell("old set-up", metadata={"tags": ["setup"]}),
        new_code_cell(f"print('{old}')"),
    ]
    path = chapter(checkout, *cells)
    readme = checkout / "README.md"
    readme.write_text(
        f"`git clone {old}.git` {old}-tools https://github.com/pytorch/ignite 'ignite-ddl @ git+{old}@v0.0.1'"
    )
    assert command(checkout, "stamp", "--check") == 1
    assert capsys.readouterr().out.split() == ["differs:", "notebooks/01_small.ipynb", "differs:", "README.md"]
    assert command(checkout, "stamp") == 0
    assert command(checkout, "stamp", "--check") == 0

    text, setup, code = tools.read(path).cells
    assert tools.badge(REPO, "01_small.ipynb") in text.source
    assert f"[it]({REPO.url}/issues)" in text.source
    assert setup.source == tools.setup_source(REPO)
    assert old in code.source, "code other than the set-up is the author's"
    assert readme.read_text() == (
        f"`git clone {REPO.url}.git` {old}-tools https://github.com/pytorch/ignite 'ignite-ddl @ git+{REPO.url}@v1.2.3'"
    )


def test_the_badge_opens_the_release_s_copy_without_outputs():
    copies = "https://colab.research.google.com/github/ada/ignite-ddl/blob/workbook-v1.2.3"
    assert tools.badge(REPO, "01_small.ipynb").endswith(f"]({copies}/01_small.ipynb)")


# --- figures, text, new -------------------------------------------------------------------------------


def test_figures_writes_every_picture(checkout, capsys):
    chapter(checkout, new_code_cell("a", outputs=[picture(), picture()]), new_code_cell("b"))
    assert command(checkout, "figures", "1", "--out", str(checkout / "look")) == 0
    files = sorted((checkout / "look").iterdir())
    assert [file.name for file in files] == ["01_small_cell00_0.png", "01_small_cell00_1.png"]
    assert files[0].read_bytes() == PNG
    assert "Two bars of three rows." in capsys.readouterr().out


def test_text_and_back_keeps_all_but_outputs(checkout):
    path = command(checkout, "new", "01", "small", "Small") or checkout / "notebooks" / "01_small.ipynb"
    before = tools.read(path)
    notebook = tools.read(path)
    notebook.cells[4].outputs = [picture()]
    tools.write(tools.normalise(notebook), path)
    assert command(checkout, "to-text", "1") == 0
    text = checkout / "build" / "text" / "01_small.py"
    assert '# %% tags=["solution"]\n# @title Solution: double it' in text.read_text()
    assert "mystnb" not in text.read_text()
    path.unlink()
    assert command(checkout, "from-text", "1") == 0
    assert tools.read(path) == before


@pytest.mark.slow
def test_new_chapter_runs_and_its_exercises_work(checkout):
    """The skeleton is an executable example: stubs are "not yet", solutions pass, the figure has its text."""
    assert command(checkout, "new", "00", "start", "Start") == 0
    assert command(checkout, "new", "01", "small", "Small") == 0
    first = tools.read(checkout / "notebooks" / "01_small.ipynb").cells[0].source
    assert "Before this: [00 · Start](00_start.ipynb)" in first
    # The kernel imports this checkout's checks, in a copy of the package without those of its chapters.
    copied, mine = ROOT / "ignite_ddl", checkout / "ignite_ddl"
    shutil.copytree(copied, mine, ignore=shutil.ignore_patterns("checks", "__pycache__"), dirs_exist_ok=True)
    shutil.copy(copied / "course" / "checks" / "__init__.py", mine / "course" / "checks")
    script = [sys.executable, str(ROOT / "tools" / "notebooks.py"), "--root", str(checkout), "execute", "01"]
    done = subprocess.run(
        script, env=os.environ | {"PYTHONPATH": str(checkout)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    cells = tools.read(checkout / "notebooks" / "01_small.ipynb").cells
    said = {tag: [c.outputs[0].text[:5] for c in cells if tag in tools.tags(c)] for tag in ("check", "solution")}
    assert said == {"check": ["not y"] * 2, "solution": ["the s"] * 2}
    [drawn] = [output for cell in cells for output in tools.images(cell)]
    assert drawn.data["text/plain"] == tools.alt_text(drawn) != ""
    assert base64.b64decode(drawn.data["image/png"]).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("new 1 small Title", "a chapter is named"),
        ("new 01 Small Title", "a chapter is named"),
        ("new 01 a-b Title", "a chapter is named"),
        ("new 01 other Other", "01_small.ipynb exists"),
        ("run 7", "no chapter '7'; there are: 01_small"),
    ],
)
def test_what_cannot_be_done_is_told(arguments, says, checkout):
    chapter(checkout, new_code_cell("1"))
    with pytest.raises(SystemExit, match=says):
        command(checkout, *arguments.split())
