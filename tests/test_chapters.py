"""The rules of a chapter, as far as a program can check them. docs/WRITING_A_CHAPTER.md is for authors.

Each rule is a function ``rule_*(notebook, path, all_paths)`` that returns what is wrong, in words. The first
test applies every rule to every chapter. The others prove that the rules work: a good chapter passes them
all, and a copy that breaks one rule fails it.

The exact forms of the first cell, after the title and each with an empty line between:

    # 04 · First distributed training
    [![Open in Colab](...)](...)                          the line that tools/notebooks.py stamp writes
    Four processes, one machine: why is ...?              a question
    **The promise:** you train ... .                      one sentence
    **20 minutes** · Before this: [00 · ...](00_x.ipynb)  links to earlier chapters; chapter 00 needs none
    You will be able to:                                  then a list of 2 to 5 points

of the heading above an exercise:

    ### Exercise 1 · Cut an uneven batch · 10 minutes · ●○○

and of the last cell: ``## What to remember`` (3 to 5 points), ``## Sources`` and a line
``**Next:** [05 · ...](...)``.
"""

import ast
import base64
import copy
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("notebook_tools", ROOT / "tools" / "notebooks.py")
tools = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tools)

TAGS = {
    *("setup", "exercise", "check", "solution", "hide-input", "parameters"),
    *("raises-exception", "nbval-ignore-output", "nbval-skip"),
}
DIFFICULTY = "●○○|●●○|●●●"
EXERCISE_HEADING = re.compile(
    rf"^#{{2,4}} Exercise (\d+) · \S.* · \d+ minutes · (?:{DIFFICULTY})$", re.MULTILINE
)
LINK = re.compile(r"\[[^\]]+\]\(([\w./-]+\.ipynb)(?:#[^)]*)?\)")


# --- helpers -------------------------------------------------------------------------------------------


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def markdown(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def tagged(notebook, tag):
    return [index for index, cell in enumerate(notebook.cells) if tag in tools.tags(cell)]


def tree(cell):
    """The cell as Python, without its magics."""
    if cell.source.startswith("%%"):
        return ast.Module(body=[], type_ignores=[])
    lines = [re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in cell.source.split("\n")]
    return ast.parse("\n".join(lines))


def functions(cell):
    return [node for node in tree(cell).body if isinstance(node, ast.FunctionDef)]


def check_calls(node):
    """The pairs (check, function given to it) of every ``checks.check(function)`` below a node."""
    return [
        (call.func.attr, call.args[0].id)
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "checks"
        and call.args
        and isinstance(call.args[0], ast.Name)
    ]


def prose(text):
    """Markdown without code, formulas, comments, pictures and the targets of links."""
    for pattern in (
        r"```.*?```",
        r"<!--.*?-->",
        r"\$\$.*?\$\$",
        r"`[^`]*`",
        r"\$[^$\n]+\$",
        r"!\[[^\]]*\]\([^)]*\)",
    ):
        text = re.sub(pattern, " ", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def paragraphs(notebook):
    return notebook.cells[0].source.split("\n\n")


def at(notebook, index):
    """The cell at an index, or an empty one past the end."""
    return notebook.cells[index] if 0 <= index < len(notebook.cells) else nbformat.v4.new_raw_cell()


# --- the first two cells -------------------------------------------------------------------------------


def rule_title(notebook, path, all_paths):
    line = notebook.cells[0].source.split("\n")[0]
    if notebook.cells[0].cell_type != "markdown" or not re.fullmatch(rf"# {path.name[:2]} · \S.*", line):
        return [f"the first line is {line!r}, not '# {path.name[:2]} · Title'"]
    return []


def rule_badge(notebook, path, all_paths):
    expected = tools.badge(tools.repository(), path.name)
    if notebook.cells[0].source.split("\n")[1:3] != ["", expected]:
        return ["below the title stands another badge than `tools/notebooks.py stamp` writes"]
    return []


def rule_promise(notebook, path, all_paths):
    parts = paragraphs(notebook)
    problems = []
    if len(parts) < 3 or "?" not in parts[2]:
        problems.append("below the badge stands no question that a person has")
    promise = parts[3] if len(parts) > 3 else ""
    one_sentence = promise.endswith(".") and not re.search(r"[.?]\s", promise)
    if not promise.startswith("**The promise:** ") or not one_sentence:
        problems.append("after the question stands no '**The promise:** ...' of one sentence")
    return problems


def rule_minutes(notebook, path, all_paths):
    line = paragraphs(notebook)[4] if len(paragraphs(notebook)) > 4 else ""
    if not (match := re.fullmatch(r"\*\*\d{1,3} minutes\*\* · Before this: (.+)", line)):
        return [f"after the promise stands {line[:60]!r}, not '**20 minutes** · Before this: ...'"]
    links = LINK.findall(match[1])
    problems = [f"{link} does not come before this chapter" for link in links if link >= path.name]
    if not links and path != all_paths[0]:
        problems.append("the prerequisites link to no chapter")
    return problems


def rule_objectives(notebook, path, all_paths):
    match = re.search(
        r"^You will be able to:\n\n((?:- .+\n?(?:  .+\n?)*)+)", notebook.cells[0].source, re.MULTILINE
    )
    points = len(re.findall(r"^- ", match[1], re.MULTILINE)) if match else 0
    return [] if 2 <= points <= 5 else [f"'You will be able to:' is followed by {points} points, not 2 to 5"]


def rule_setup(notebook, path, all_paths):
    cell = at(notebook, 1)
    if tagged(notebook, "setup") != [1] or cell.cell_type != "code":
        return ["the second cell, and only it, has the tag setup"]
    if cell.source != tools.setup_source(tools.repository()):
        return ["the set-up cell is not the one that `tools/notebooks.py stamp` writes"]
    return []


# --- the course of the chapter -------------------------------------------------------------------------


def rule_guess(notebook, path, all_paths):
    if not any(re.search(r"^guess\w* = ", cell.source, re.MULTILINE) for cell in code_cells(notebook)):
        return ["no cell stores the reader's guess (a name that starts with guess)"]
    return []


def rule_asserts(notebook, path, all_paths):
    """Asserts of the chapter's own claims; those in solutions do not count."""
    cells = [cell for cell in code_cells(notebook) if "solution" not in tools.tags(cell)]
    count = sum(any(isinstance(node, ast.Assert) for node in ast.walk(tree(cell))) for cell in cells)
    return [] if count >= 3 else [f"{count} cells assert a claim, 3 are the least"]


def rule_number_of_cells(notebook, path, all_paths):
    count = len(code_cells(notebook))
    return [] if 12 <= count <= 35 else [f"{count} code cells, not 12 to 35"]


def rule_words(notebook, path, all_paths):
    words = len(re.findall(r"\w[\w'’-]*", prose("\n\n".join(markdown(notebook)))))
    return [] if words <= 2500 else [f"{words} words, 2500 are the most"]


def rule_length_of_cells(notebook, path, all_paths):
    lines = [cell.source.count("\n") + 1 for cell in code_cells(notebook)]
    problems = [f"a cell has {count} lines, 30 are the most" for count in lines if count > 30]
    if sum(lines) > 14 * len(lines):
        problems.append(f"code cells have {sum(lines) / len(lines):.1f} lines on average, 14 are the most")
    return problems


def rule_voice(notebook, path, all_paths):
    return [
        f"in prose: ...{text[max(0, match.start() - 30) : match.end() + 10]!r}"
        for text in map(prose, markdown(notebook))
        for match in re.finditer(r"\bsimply\b|\bpowerful\b|!", text, re.IGNORECASE)
    ]


def rule_ending(notebook, path, all_paths):
    text = notebook.cells[-1].source if notebook.cells[-1].cell_type == "markdown" else ""
    problems = [
        f"the last cell has no {part!r}"
        for part in ("## What to remember\n", "## Sources\n", "**Next:** ")
        if not re.search(rf"^{re.escape(part)}", text, re.MULTILINE)
    ]
    points = re.search(r"## What to remember\n\n((?:- .+\n?(?:  .+\n?)*)*)", text)
    count = len(re.findall(r"^- ", points[1], re.MULTILINE)) if points else 0
    if not 3 <= count <= 5:
        problems.append(f"'What to remember' has {count} points, not 3 to 5")
    return problems


def rule_next(notebook, path, all_paths):
    """The line Next leads to the next chapter that exists; the last chapter's has no link."""
    later = [other.name for other in all_paths if other.name > path.name]
    line = re.search(r"^\*\*Next:\*\* .*$", notebook.cells[-1].source, re.MULTILINE)
    links = LINK.findall(line[0]) if line else []
    return [] if links == later[:1] else [f"'Next' links to {links}, not to {later[:1]}"]


def rule_links(notebook, path, all_paths):
    """Links between chapters resolve."""
    names = {other.name for other in all_paths}
    links = [link for text in markdown(notebook) for link in LINK.findall(text)]
    return [f"there is no {link}" for link in links if link not in names]


# --- exercises -----------------------------------------------------------------------------------------


def rule_number_of_exercises(notebook, path, all_paths):
    counts = {tag: len(tagged(notebook, tag)) for tag in ("exercise", "check", "solution")}
    if min(counts.values()) < 2 or len(set(counts.values())) > 1:
        return [f"at least 2 exercises, each with its check and its solution; there are {counts}"]
    return []


def rule_exercise_heading(notebook, path, all_paths):
    problems = []
    for number, index in enumerate(tagged(notebook, "exercise"), start=1):
        cell = at(notebook, index - 1)
        found = EXERCISE_HEADING.findall(cell.source) if cell.cell_type == "markdown" else []
        if found != [str(number)]:
            problems.append(
                f"above exercise {number}: '### Exercise {number} · Title · 10 minutes · ●○○' is missing"
            )
    return problems


def rule_exercise_stub(notebook, path, all_paths):
    problems = []
    for index in tagged(notebook, "exercise"):
        defined = functions(notebook.cells[index])
        if len(defined) != 1:
            problems.append(f"cell {index} defines {len(defined)} functions, not the learner's one")
            continue
        [function] = defined
        if not ast.get_docstring(function):
            problems.append(f"{function.name} has no docstring with shapes and units")
        if ast.unparse(function.body[-1]) not in ("raise NotImplementedError", "raise NotImplementedError()"):
            problems.append(f"the body of {function.name} does not end in raise NotImplementedError")
    return problems


def rule_exercise_check(notebook, path, all_paths):
    problems = []
    for index in tagged(notebook, "exercise"):
        cell, names = (
            at(notebook, index + 1),
            {function.name for function in functions(notebook.cells[index])},
        )
        if "check" not in tools.tags(cell) or not names & {name for _, name in check_calls(tree(cell))}:
            problems.append(f"after cell {index} comes no cell tagged check with checks.<check>(<function>)")
        elif not "".join(output.get("text", "") for output in cell.outputs).startswith("not yet: "):
            problems.append(f"the stored output of the check in cell {index + 1} is not 'not yet: ...'")
    return problems


def rule_exercise_solution(notebook, path, all_paths):
    problems = []
    for index in tagged(notebook, "exercise"):
        stub, check, cell = (at(notebook, index + step) for step in range(3))
        if "solution" not in tools.tags(cell) or "check" not in tools.tags(check):
            problems.append(f"two cells after cell {index} stands no solution")
            continue
        stubs, own = ({function.name for function in functions(c)} for c in (stub, cell))
        asserted = [
            pair
            for node in tree(cell).body
            if isinstance(node, ast.Assert)
            for pair in check_calls(node.test)
        ]
        checks = {check for check, name in check_calls(tree(check)) if name in stubs}
        if own & stubs:
            problems.append(f"the solution in cell {index + 2} redefines {', '.join(own & stubs)}")
        if not any(name in own - stubs and check in checks for check, name in asserted):
            problems.append(
                f"the solution in cell {index + 2} does not assert the learner's check on its own function"
            )
    return problems


def rule_solution_folded(notebook, path, all_paths):
    problems = []
    for index in tagged(notebook, "solution"):
        cell = notebook.cells[index]
        folded = (
            cell.metadata.get("jupyter", {}).get("source_hidden") and cell.metadata.get("cellView") == "form"
        )
        if not folded or "hide-input" not in tools.tags(cell):
            problems.append(f"the solution in cell {index} is not folded: run `tools/notebooks.py normalise`")
        if not re.match(r"# @title Solution: \S", cell.source):
            problems.append(f"the solution in cell {index} does not start with '# @title Solution: ...'")
    return problems


# --- figures -------------------------------------------------------------------------------------------


def rule_figure(notebook, path, all_paths):
    return [] if any(tools.images(cell) for cell in notebook.cells) else ["no cell draws a figure"]


def rule_alternative_text(notebook, path, all_paths):
    """Each stored picture says in words what it shows: ``show(figure, alt=...)`` does it."""
    problems = []
    for index, cell in enumerate(notebook.cells):
        for output in tools.images(cell):
            alt = tools.alt_text(output)
            if len(alt.split()) < 5:
                problems.append(f"the picture of cell {index} has no alternative text of 5 words: {alt!r}")
            elif output.data.get("text/plain") != alt:
                problems.append(f"the picture of cell {index} is not displayed by ignite_ddl.plot.show")
    return problems + [
        "a picture in Markdown has no alternative text" for t in markdown(notebook) if "![](" in t
    ]


# --- the file ------------------------------------------------------------------------------------------


def rule_kernel(notebook, path, all_paths):
    found = notebook.metadata.get("kernelspec")
    return [] if found == tools.KERNELSPEC else [f"the kernelspec is {found}"]


def rule_normal_form(notebook, path, all_paths):
    if tools.normalise(copy.deepcopy(notebook)) != notebook:
        return ["the file is not in normal form: run `tools/notebooks.py normalise`"]
    return []


def rule_execution_counts(notebook, path, all_paths):
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        return [f"execution counts {counts}: run `tools/notebooks.py execute {path.name[:2]}`"]
    return []


def rule_no_errors(notebook, path, all_paths):
    return [
        f"cell {index} stores an error: {output.ename}"
        for index, cell in enumerate(notebook.cells)
        for output in cell.get("outputs", [])
        if output.output_type == "error" and "raises-exception" not in tools.tags(cell)
    ]


def rule_no_stderr(notebook, path, all_paths):
    return [
        f"cell {index} stores stderr: {output.text[:60]!r}"
        for index, cell in enumerate(notebook.cells)
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr"
        and not {"nbval-ignore-output", "nbval-skip"} & set(tools.tags(cell))
    ]


def rule_tags(notebook, path, all_paths):
    problems = [
        f"cell {index} has unknown tags {sorted(unknown)}"
        for index, cell in enumerate(notebook.cells)
        if (unknown := set(tools.tags(cell)) - TAGS)
    ]
    # nbval obeys such comments too, and no rule would count them.
    comments = [
        c for c in code_cells(notebook) if re.search(r"^\s*#\s*(NBVAL|PYTEST_VALIDATE)_", c.source, re.M)
    ]
    return problems + ["a comment for nbval stands in a cell: use the tag" for _ in comments]


def rule_share_of_unchecked_cells(notebook, path, all_paths):
    cells = code_cells(notebook)
    ignored = [cell for cell in cells if {"nbval-ignore-output", "nbval-skip"} & set(tools.tags(cell))]
    if 3 * len(ignored) > len(cells):
        return [f"nbval ignores {len(ignored)} of {len(cells)} code cells, a third is the most"]
    return []


def rule_skips(notebook, path, all_paths):
    return [
        f"cell {index} has nbval-skip but needs no GPU or TPU"
        for index in tagged(notebook, "nbval-skip")
        if not re.search(r"gpu|cuda|nccl|tpu|xla", notebook.cells[index].source, re.IGNORECASE)
    ]


def rule_no_machine_paths(notebook, path, all_paths):
    return tools.machine_paths(notebook)


def rule_size(notebook, path, all_paths):
    size = len(tools.dumps(notebook).encode())
    return [] if size <= 600_000 else [f"the file has {size / 1000:.0f} kB, 600 are the most"]


RULES = [rule for name, rule in sorted(globals().items()) if name.startswith("rule_")]


# --- every rule on every chapter -----------------------------------------------------------------------


CHAPTERS = tools.chapters()


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__.removeprefix("rule_"))
def test_chapter(rule, path):
    problems = rule(tools.read(path), path, CHAPTERS)
    assert not problems, "\n".join([path.name, *problems])


def test_files_in_notebooks_are_chapters():
    found = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert found == CHAPTERS, "a chapter's file is named NN_name.ipynb"
    numbers = [path.name[:2] for path in found]
    assert len(set(numbers)) == len(numbers), "two chapters have one number"


def test_the_address_stands_in_pyproject_only():
    assert tools.stamp(ROOT, check=True) == 0, "run `make stamp`"


# --- the rules can fail --------------------------------------------------------------------------------


PATHS = [Path("notebooks") / name for name in ("00_start_here.ipynb", "04_training.ipynb", "05_data.ipynb")]
PNG = base64.b64encode(b"\x89PNG, as far as a rule looks").decode()
ALT = "Four bars, one a rank: two hold three rows, two hold two."


def good_chapter(path=PATHS[1]):
    """The skeleton that `tools/notebooks.py new` writes, with the outputs that a run would store."""
    before = [other for other in PATHS if other < path]
    later = [other for other in PATHS if other > path]
    notebook = nbformat.from_dict(GOOD[bool(before)])
    first, last = notebook.cells[0], notebook.cells[-1]
    first.source = first.source.replace("# 04 ·", f"# {path.name[:2]} ·").replace(PATHS[1].name, path.name)
    if later:
        last.source = last.source.replace("what comes after this.", f"[{later[0].stem}]({later[0].name})")
    return notebook


def _run_skeleton(needs):
    notebook = tools.skeleton(PATHS[1].name, "Training", tools.repository(), needs)
    for count, cell in enumerate(code_cells(notebook), start=1):
        cell.execution_count = count
        if "check" in tools.tags(cell):
            cell.outputs = [stream("not yet: write the body of it, then run this cell again\n")]
        elif "plot.show(figure" in cell.source:
            cell.outputs = [picture(ALT)]
        elif "print(" in cell.source:
            cell.outputs = [stream("4 rows\n")]
    return tools.normalise(notebook)


def stream(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def picture(alt):
    data = {"image/png": PNG, "text/plain": alt}
    return nbformat.v4.new_output("display_data", data=data, metadata={"image/png": {"alt": alt}})


GOOD = {
    True: _run_skeleton("[00 · Start here](00_start_here.ipynb)"),
    False: _run_skeleton("PyTorch, nothing else."),
}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__.removeprefix("rule_"))
def test_good_chapter_passes(rule, path):
    assert rule(good_chapter(path), path, PATHS) == []


def replace(tag_or_index, old, new):
    """Changes a text in the cell with a tag (its first), or at an index."""

    def break_it(notebook):
        index = tag_or_index if isinstance(tag_or_index, int) else tagged(notebook, tag_or_index)[0]
        cell = notebook.cells[index]
        assert old in cell.source, "the table below is out of date"
        cell.source = cell.source.replace(old, new, 1)

    return break_it


def add(source, index=-1, kind="markdown"):
    def break_it(notebook):
        make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}[kind]
        notebook.cells.insert(index % len(notebook.cells), make(source))

    return break_it


def tag(name, source="print(1)", times=1):
    def break_it(notebook):
        for _ in range(times):
            notebook.cells.insert(3, nbformat.v4.new_code_cell(source, metadata={"tags": [name]}))

    return break_it


def drop(tag_name):
    def break_it(notebook):
        del notebook.cells[tagged(notebook, tag_name)[0]]

    return break_it


def output(value, tag_name="check"):
    def break_it(notebook):
        notebook.cells[tagged(notebook, tag_name)[0]].outputs = [value]

    return break_it


def metadata(tag_name, key):
    def break_it(notebook):
        notebook.cells[tagged(notebook, tag_name)[0]].metadata.pop(key)

    return break_it


def each_picture(change):
    def break_it(notebook):
        for cell in notebook.cells:
            for found in tools.images(cell):
                change(cell, found)

    return break_it


def long_cells(notebook):
    for cell in code_cells(notebook):
        cell.source += "\n# more" * 12


def keep_first_code_cells(notebook):
    notebook.cells = notebook.cells[:10]


def second_figure_without_show(notebook):
    bare = nbformat.v4.new_output(
        "display_data", data={"image/png": PNG, "text/plain": "<Figure size 700x300>"}
    )
    cell = nbformat.v4.new_code_cell("figure", outputs=[bare])
    notebook.cells.insert(5, cell)


def shift_counts(notebook):
    code_cells(notebook)[3].execution_count = 9


def uncount(notebook):
    code_cells(notebook)[-1].execution_count = None


def other_kernel(notebook):
    notebook.metadata.kernelspec = {"display_name": "ml", "language": "python", "name": "ml"}


def widget_state(notebook):
    notebook.metadata["widgets"] = {"state": {}}


def remove_guesses(notebook):
    for cell in code_cells(notebook):
        cell.source = cell.source.replace("guess", "hope")


def remove_asserts(notebook):
    for cell in code_cells(notebook):
        if "solution" not in tools.tags(cell):
            cell.source = re.sub(r"^assert .*", "pass", cell.source, flags=re.MULTILINE)


ERROR = nbformat.v4.new_output("error", ename="ValueError", evalue="7", traceback=["ValueError: 7"])
TABLE = {
    "title": [replace(0, "# 04 ·", "# 05 ·"), replace(0, "# 04 · ", "# 04: "), add("text", 0)],
    "badge": [
        replace(0, "04_training.ipynb)", "03_training.ipynb)"),
        replace(0, "/github/", "/github/someone-"),
    ],
    "promise": [
        replace(0, "this chapter?", "this chapter."),
        replace(0, "in one run.", "in one run. And another."),
        replace(0, "**The promise:** ", ""),
    ],
    "minutes": [
        replace(0, "**20 minutes**", "20 minutes"),
        replace(0, "(00_start_here.ipynb)", "(05_data.ipynb)"),
        replace(0, "[00 · Start here](00_start_here.ipynb)", "PyTorch"),
    ],
    "objectives": [replace(0, "\n- say why it matters.", ""), replace(0, "be able to:", "see:")],
    "setup": [replace("setup", "[course]", ""), add("text", 1), metadata("setup", "tags")],
    "guess": [remove_guesses],
    "asserts": [remove_asserts],
    "number_of_cells": [keep_first_code_cells, tag("parameters", times=30)],
    "words": [add("word " * 2500)],
    "length_of_cells": [add("x = 1\n" * 31, kind="code"), long_cells],
    "voice": [add("It is simply so."), add("A Powerful idea."), add("It runs!")],
    "ending": [
        replace(-1, "## What to remember", "## Remember"),
        replace(-1, "## Sources", "## Papers"),
        replace(-1, "**Next:**", "Next:"),
        replace(-1, "\n- The third thing.", ""),
        lambda notebook: notebook.cells.append(nbformat.v4.new_code_cell("1")),
    ],
    "next": [replace(-1, "(05_data.ipynb)", "(00_start_here.ipynb)"), replace(-1, "(05_data.ipynb)", "")],
    "links": [add("See [07 · Profiler](07_profiler.ipynb).")],
    "number_of_exercises": [drop("exercise"), drop("check"), drop("solution")],
    "exercise_heading": [
        replace(8, "minutes · ●○○", "minutes · ●"),
        replace(8, " · 5 minutes", ""),
        replace(8, "Exercise 1", "Exercise 2"),
        lambda notebook: notebook.cells.insert(9, nbformat.v4.new_markdown_cell("between")),
    ],
    "exercise_stub": [
        replace("exercise", "raise NotImplementedError", "return 2 * n_rows"),
        lambda notebook: setattr(
            notebook.cells[tagged(notebook, "exercise")[0]],
            "source",
            "def f():\n    raise NotImplementedError",
        ),
        replace("exercise", "def double", "def helper():\n    pass\n\n\ndef double"),
    ],
    "exercise_check": [
        output(stream("right: it passes without work\n")),
        replace("check", "(double)", "(double_solution)"),
        drop("check"),
        metadata("check", "tags"),
    ],
    "exercise_solution": [
        replace("solution", "def double_solution", "def double"),
        replace("solution", "assert checks.", "checks."),
        replace("solution", "checks.double(double_solution)", "checks.double(double)"),
        replace("solution", "assert checks.double", "assert checks.largest_shard"),
        metadata("solution", "tags"),
    ],
    "solution_folded": [
        metadata("solution", "jupyter"),
        metadata("solution", "cellView"),
        replace("solution", "# @title Solution: ", "# Solution: "),
    ],
    "figure": [each_picture(lambda cell, found: cell.outputs.clear())],
    "alternative_text": [
        each_picture(lambda cell, found: found.metadata.clear()),
        each_picture(lambda cell, found: found.metadata["image/png"].update(alt="A figure.")),
        each_picture(lambda cell, found: found.data.update({"text/plain": "<Figure>"})),
        second_figure_without_show,
        add("![](picture.png)"),
    ],
    "kernel": [other_kernel],
    "normal_form": [
        other_kernel,
        widget_state,
        lambda notebook: notebook.cells[2].metadata.update(scrolled=True),
        each_picture(lambda cell, found: cell.metadata.pop("mystnb")),
    ],
    "execution_counts": [shift_counts, uncount],
    "no_errors": [output(ERROR)],
    "no_stderr": [output(stream("UserWarning\n", "stderr"))],
    "tags": [tag("nbval-ignore"), add("# NBVAL_IGNORE_OUTPUT\nprint(1)", kind="code")],
    "share_of_unchecked_cells": [tag("nbval-ignore-output", times=8)],
    "skips": [tag("nbval-skip")],
    "no_machine_paths": [
        add("See /home/ada/data."),
        add('open("/tmp/x")', kind="code"),
        output(stream("File /opt/x.py\n")),
        output(stream("C:\\Users\\ada\n")),
        output(ERROR | {"evalue": "python3.11/site-packages/torch"}),
    ],
    "size": [each_picture(lambda cell, found: found.data.update({"image/png": PNG * 20_000}))],
}


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, breaks in TABLE.items() for number in range(len(breaks))]
)
def test_rules_can_fail(name, number):
    notebook = good_chapter()
    TABLE[name][number](notebook)
    assert globals()[f"rule_{name}"](notebook, PATHS[1], PATHS), "the broken chapter passes"


def test_each_rule_has_a_chapter_that_breaks_it():
    assert {f"rule_{name}" for name in TABLE} == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (output(ERROR), rule_no_errors),
        (output(stream("progress\n", "stderr")), rule_no_stderr),
    ],
)
def test_tags_that_permit(broken, rule):
    """The tag that allows what the rule forbids does allow it."""
    notebook = good_chapter()
    broken(notebook)
    notebook.cells[tagged(notebook, "check")[0]].metadata.tags += ["raises-exception", "nbval-ignore-output"]
    assert rule(notebook, PATHS[1], PATHS) == []


@pytest.mark.parametrize(
    "text",
    [
        "In a cell: `x != y`.",
        "The formula $n!$ and $$\nn! = 1 \\cdot 2\n$$",
        "```\nbang!\n```",
        "![a tree](tree.png)",
        "https://example.org/opt/tmp/home/x",
        "see ../opt/x and a/home",
    ],
)
def test_what_is_no_prose_and_no_path(text):
    notebook = good_chapter()
    add(text)(notebook)
    assert rule_voice(notebook, PATHS[1], PATHS) == []
    assert rule_no_machine_paths(notebook, PATHS[1], PATHS) == []
