"""The rules of a chapter, as far as a program can check them.

docs/WRITING_A_CHAPTER.md holds the exact forms, for authors. The rules are generators of pairs (name of a rule, what
is wrong in words), and a chapter's test lists all of them. A good chapter passes them all, and each rule fails a copy
of it that breaks the rule. What the normal form, the stamps and nbval hold has no rule here.
"""

import ast
import base64
import copy
import functools
import io
import math
import re
import symtable
import tokenize
from pathlib import Path

import nbformat
import pytest
from loading import ROOT, load
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from ignite_ddl.course import guess as guesses_of_readers

tools = load("tools/notebooks.py")

TAGS = {
    *("setup", "imports", "score", "exercise", "check", "solution", "hide-input", "parameters"),
    *("raises-exception", "nbval-ignore-output", "nbval-skip"),
}
UNCHECKED = {"nbval-ignore-output", "nbval-skip"}
EXERCISE = re.compile(r"^#{2,4} Exercise (\d+) · \S.* · \d+ minutes · (?:●○○|●●○|●●●)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\(([\w./-]+\.ipynb)(?:#[^)]*)?\)")
POINTS = r"\n\n((?:- .+\n?(?:  .+\n?)*)*)"
DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Lambda)
RUN_AGAIN = {"score", "exercise", "check", "solution"}
# The page says that it gives these names another value further down, and a guess above is judged as before.
OTHERWISE_BELOW = {"09": {"link"}, "10": {"line"}}
NO_PROSE = (r"```.*?```", r"<!--.*?-->", r"\$\$.*?\$\$", r"`[^`]*`", r"\$[^$\n]+\$", r"!\[[^\]]*\]\([^)]*\)")


class Chapter:
    """What the rules read: a notebook, its path, and the paths of all chapters."""

    def __init__(self, notebook, path, paths):
        self.notebook, self.path, self.paths, self.cells = notebook, path, paths, notebook.cells
        self.code = [cell for cell in self.cells if cell.cell_type == "code"]
        self.markdown = [cell.source for cell in self.cells if cell.cell_type == "markdown"]
        self.first = self.cells[0].source
        self.last = self.cells[-1].source if self.cells[-1].cell_type == "markdown" else ""
        self.paragraphs = self.first.split("\n\n") + [""] * 5

    def at(self, index):
        """The cell at an index, or an empty one past the end."""
        return self.cells[index] if 0 <= index < len(self.cells) else nbformat.v4.new_raw_cell()

    def tagged(self, tag):
        return [index for index, cell in enumerate(self.cells) if tag in tools.tags(cell)]


def tree(cell):
    """The cell as Python, without its magics."""
    if cell.source.startswith("%%"):
        return ast.Module(body=[], type_ignores=[])
    lines = [re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in cell.source.split("\n")]
    return ast.parse("\n".join(lines))


def functions(cell):
    return [node for node in tree(cell).body if isinstance(node, ast.FunctionDef)]


def check_calls(cell, of_asserts=False):
    """The pairs (check, function given to it) of each ``checks.check(function)``."""
    nodes = [node for node in tree(cell).body if isinstance(node, ast.Assert) or not of_asserts]
    calls = [call for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call)]
    found = [re.match(r"checks\.(\w+)\((\w+)[,)]", ast.unparse(call)) for call in calls]
    return [match.groups() for match in found if match]


def prose(text):
    """Markdown without code, formulas, comments, pictures and the targets of links."""
    for pattern in NO_PROSE:
        text = re.sub(pattern, " ", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def minutes_to_read(chapter):
    """Words / 130 + lines of code to be read / 12, without exercises and sources, rounded up to five."""
    text = "\n\n".join(cell.split("### Exercise")[0].split("## Sources")[0] for cell in chapter.markdown)
    apart = {"setup", "exercise", "check", "solution"}
    read = [cell.source for cell in chapter.code if apart.isdisjoint(tools.tags(cell))]
    n_words = len(re.findall(r"\w[\w'’-]*", prose(text)))
    n_lines = sum(bool(line.strip()) for source in read for line in source.split("\n"))
    return 5 * math.ceil((n_words / 130 + n_lines / 12) / 5)


def points(text, heading):
    """How many points follow a heading."""
    match = re.search(f"^{heading}{POINTS}", text, re.MULTILINE)
    return len(re.findall(r"^- ", match[1], re.MULTILINE)) if match else 0


# --- the rules -----------------------------------------------------------------------------------------


def opening(chapter):
    line, number = chapter.first.split("\n")[0], chapter.path.name[:2]
    if chapter.cells[0].cell_type != "markdown" or not re.fullmatch(rf"# {number} · \S.*", line):
        yield "title", f"the first line is {line!r}, not '# {number} · Title'"
    if chapter.first.split("\n")[1:3] != ["", tools.badge(tools.repository(), chapter.path.name)]:
        yield "badge", "below the title stands another badge than `tools/notebooks.py stamp` writes"
    question, promise, minutes = chapter.paragraphs[2:5]
    if "?" not in question:
        yield "promise", "below the badge stands no question that a person has"
    one_sentence = promise.endswith(".") and not re.search(r"[.?]\s", promise)
    if not promise.startswith("**The promise:** ") or not one_sentence:
        yield "promise", "after the question stands no '**The promise:** ...' of one sentence"
    links = LINK.findall(minutes)
    if not re.fullmatch(r"\*\*\d{1,3} minutes\*\* · Before this: (.+)", minutes):
        yield "minutes", f"not {minutes[:60]!r}, but '**20 minutes** · Before this: ...' follows the promise"
    elif not links and chapter.path != chapter.paths[0]:
        yield "minutes", "the prerequisites link to no chapter"
    elif int(minutes[2:].split()[0]) != (true := minutes_to_read(chapter)):
        yield "minutes", f"{minutes.split('**')[1]} are stated, {true} are true"
    for link in links:
        if link >= chapter.path.name:
            yield "minutes", f"{link} does not come before this chapter"
    if not 2 <= (count := points(chapter.first, "You will be able to:")) <= 5:
        yield "objectives", f"'You will be able to:' is followed by {count} points, not 2 to 5"
    if chapter.tagged("setup") != [1] or chapter.at(1).cell_type != "code":
        yield "setup", "the second cell, and only it, has the tag setup"
    first = next((cell for cell in chapter.code[1:] if "from ignite_ddl.course import" in cell.source), None)
    if first is None or "imports" not in tools.tags(first) or not first.source.startswith("# @title Imports"):
        yield "imports", "the cell that imports has no tag imports, or does not start with '# @title Imports'"


def body(chapter):
    own = [cell for cell in chapter.code if "solution" not in tools.tags(cell)]
    count = sum(any(isinstance(node, ast.Assert) for node in ast.walk(tree(cell))) for cell in own)
    if count < 3:
        yield "asserts", f"{count} cells assert a claim of the chapter, 3 are the least"
    if not 12 <= len(chapter.code) <= 40:
        yield "number_of_cells", f"{len(chapter.code)} code cells, not 12 to 40"
    if (minutes := minutes_to_read(chapter)) > 40:
        yield "too_long", f"{minutes} minutes to read, 40 are the most"
    lines = [cell.source.count("\n") + 1 for cell in chapter.code if "imports" not in tools.tags(cell)]
    if max(lines) > 30:
        yield "length_of_cells", f"a cell has {max(lines)} lines, 30 are the most"
    if sum(lines) > 14 * len(lines):
        yield ("length_of_cells", f"a code cell has {sum(lines) / len(lines):.1f} lines on average, 14 are the most")
    for text in map(prose, chapter.markdown):
        for match in re.finditer(r"\bsimply\b|\bpowerful\b|!", text, re.IGNORECASE):
            yield "voice", f"in prose: ...{text[max(0, match.start() - 30) : match.end() + 10]!r}"
    known = {other.name for other in chapter.paths}
    for link in [link for text in chapter.markdown for link in LINK.findall(text)]:
        if link not in known:
            yield "links", f"there is no {link}"


def asked(cell):
    """The names of the guesses that a cell asks for: ``guess_rows = None``."""
    nodes = [node for node in tree(cell).body if isinstance(node, ast.Assign)]
    names = [name.id for node in nodes for target in node.targets for name in ast.walk(target) if hasattr(name, "id")]
    return [name for name in names if name.startswith("guess")]


def score_calls(cell):
    calls = [node for node in ast.walk(tree(cell)) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "id", "") == "score"]


def judged(cell):
    """What ``score`` has stored with a cell's outputs: name, answer, unit, within and mistakes of each guess."""
    stored = [output.get("metadata", {}).get("text/plain", {}).get("score") for output in cell.get("outputs", [])]
    return [record for record in stored if record]


def told(cell):
    """Comments, asserts inside a loop and texts to be shown: what a reader sees before the cell has run."""
    for token in tokenize.generate_tokens(io.StringIO(cell.source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(tree(cell)):
        if isinstance(node, ast.Assert):
            yield ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg in ("alt", "title") and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def gives_away(text, answer):
    """Whether a text holds an answer; of numbers those with two digits, as one digit stands everywhere."""
    if isinstance(answer, bool) or not isinstance(answer, (int, float, str)):
        return False
    if isinstance(answer, str):
        return re.search(rf"\b{re.escape(answer)}\b", text) is not None and " or " not in text
    numbers = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]
    return abs(answer) >= 10 and any(abs(number - answer) <= 0.005 * abs(answer) for number in numbers)


def guesses(chapter):
    """Each is judged, not given away, and counted at the end."""
    names = [name for cell in chapter.code for name in asked(cell)]
    if not names or len(set(names)) < len(names):
        yield "guess", "no cell stores the reader's guess (a name that starts with guess), or two have one name"
    if len(names) > 8:
        yield "guess", f"{len(names)} guesses, 8 are the most: the weakest become sentences"
    scored = [ast.unparse(call.args[0]) for cell in chapter.code for call in score_calls(cell)]
    if sorted(scored) != sorted(names):
        yield "guess", f"each is scored once: asked {sorted(names)}, scored {sorted(scored)}"
    for index, cell in enumerate(chapter.cells):
        if cell.cell_type != "code":
            continue
        calls, records = score_calls(cell), judged(cell)
        if {record["name"] for record in records} != {ast.unparse(call.args[0]) for call in calls}:
            yield "guess_is_judged", f"cell {index} stores {[record['name'] for record in records]}: execute it"
        if asked(cell) and any(isinstance(node, ast.Assert) for node in ast.walk(tree(cell))):
            yield "given_away", f"an assert stands in cell {index}, which asks; it belongs into the next cell"
        if calls and not asked(cell) and "score" not in tools.tags(cell):
            yield "given_away", f"cell {index} scores in the open under the question: fold it, with the tag score"
        if asked(cell) and any(keyword.arg == "mistakes" for call in calls for keyword in call.keywords):
            yield "given_away", f"cell {index} asks, and its hints tell; score in the next cell, with the tag score"
        for call in calls:
            answer = call.args[1]
            if isinstance(answer, (ast.Constant, ast.JoinedStr)):
                yield "given_away", f"cell {index} scores against {ast.unparse(answer)!r}, which nothing has computed"
        for record in records:
            yield from judgement(index, record)
            said = guesses_of_readers.judge(None, *answer_of(record))[1]
            if all(output.get("data", {}).get("text/plain") != said for output in cell.outputs):
                yield "guess_is_judged", f"cell {index} does not store {said!r}: execute it without a guess"
            for text in told(cell) if asked(cell) else ():
                if gives_away(text, record["answer"]):
                    yield "given_away", f"cell {index} asks, and tells {record['answer']!r}: {text!r}"
    shown = "".join(output.get("text", "") for output in chapter.code[-1].outputs)
    if chapter.code[-1].source != "tally()" or not shown.startswith(f"0 of {len(names)}\n"):
        yield "tally", f"the last code cell is not `tally()`, or does not show that there are {len(names)} guesses"


def answer_of(record):
    answer = set(record["answer"]) if record["any_order"] else record["answer"]
    return answer, record["unit"], record["within"]


def judgement(index, record):
    """The answer as a guess is right, and what is known as a mistake is not."""
    answer, unit, within = answer_of(record)
    if (verdict := guesses_of_readers.judge(answer, answer, unit, within)[0]) != "right":
        yield "judgement", f"the answer of cell {index} as a guess is {verdict}"
    if isinstance(answer, str) and (len(re.findall(r"[a-z]+", answer)) > 3 or re.search(r"\d \w|about", answer)):
        yield "given_away", f"cell {index} scores against a sentence: {answer!r}"
    for value, hint in record["mistakes"]:
        mistakes = {tuple(value) if isinstance(value, list) else value: hint}
        verdict, said = guesses_of_readers.judge(value, answer, unit, within, mistakes)
        if verdict not in ("close", "off") or not said.endswith(hint):
            yield "judgement", f"the mistake {value} of cell {index} is judged: {said}"


def scopes(table):
    return [table, *(scope for child in table.get_children() for scope in scopes(child))]


class Names:
    """The globals that a cell binds, those that it reads, and those that each of its functions and classes reads;
    those that it reads other than by item, ``x`` and not ``x[0]``, and those in which it stores an item."""

    def __init__(self, cell):
        module = tree(cell)
        top = symtable.symtable(ast.unparse(module), "cell", "exec")
        symbols = [
            symbol for scope in scopes(top) for symbol in scope.get_symbols() if scope is top or symbol.is_global()
        ]
        self.bound = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
        self.read = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
        self.by_function = {
            child.get_name(): {
                each.get_name() for scope in scopes(child) for each in scope.get_symbols() if each.is_global()
            }
            for child in top.get_children()
        }
        items = [node for node in ast.walk(module) if isinstance(node, ast.Subscript)]
        inner = {
            node for function in ast.walk(module) if isinstance(function, DEFINITIONS) for node in ast.walk(function)
        }
        of_items = {node.value for node in items}
        self.whole = {node.id for node in ast.walk(module) if isinstance(node, ast.Name) and node not in of_items}
        stores = [node for node in items if isinstance(node.ctx, ast.Store) and node not in inner]
        self.stored = {node.value.id for node in stores if isinstance(node.value, ast.Name)}


def one_meaning(chapter):
    """A cell that asks, scores or checks finds what it has found when readers run it again, after the last one.

    So no cell below it binds a name that it reads, itself or in a function that it calls, or adds an item to what it
    reads as a whole; and of the cells above it that are run again at most one binds the name.
    """
    names = {index: Names(cell) for index, cell in enumerate(chapter.cells) if cell.cell_type == "code"}
    binding = {
        name: [index for index in names if name in names[index].bound] for cell in names.values() for name in cell.bound
    }
    again = [
        index
        for index, cell in enumerate(chapter.cells)
        if index in names and (asked(cell) or score_calls(cell) or RUN_AGAIN & set(tools.tags(cell)))
    ]
    for index in again:
        read, waiting = set(), sorted(names[index].read)
        while waiting:
            name = waiting.pop()
            homes = [cell for cell in binding.get(name, ()) if cell <= index]
            if name in read or not homes:
                continue
            read.add(name)
            home = homes[-1]
            waiting += sorted(names[home].by_function.get(name, ()))
            others = [cell for cell in binding[name] if cell > index or (cell in again and cell != home)]
            if name in names[index].whole:
                others += [cell for cell in names if cell > index and name in names[cell].stored - names[cell].bound]
            if others and home < index and name not in OTHERWISE_BELOW.get(chapter.path.name[:2], ()):
                yield (
                    "one_meaning",
                    f"readers run cell {index} again, and it reads {name} of cell {home}, which cells {others} change: "
                    "call it otherwise there",
                )
    for name in sorted(name for name, cells in binding.items() if name.startswith("guess_") and len(cells) > 1):
        yield "one_meaning", f"cells {binding[name]} bind {name}, one should ask for it"


def ending(chapter):
    for part in ("## What to remember\n", "## Sources\n", "**Next:** "):
        if not re.search(rf"^{re.escape(part)}", chapter.last, re.MULTILINE):
            yield "ending", f"the last cell has no {part!r}"
    if not 3 <= (count := points(chapter.last, "## What to remember")) <= 5:
        yield "ending", f"'What to remember' has {count} points, not 3 to 5"
    later = [other.name for other in chapter.paths if other.name > chapter.path.name]
    line = re.search(r"^\*\*Next:\*\* .*$", chapter.last, re.MULTILINE)
    if (links := LINK.findall(line[0]) if line else []) != later[:1]:  # the last chapter's has no link
        yield "next", f"'Next' links to {links}, not to {later[:1]}"


def exercises(chapter):
    counts = {tag: len(chapter.tagged(tag)) for tag in ("exercise", "check", "solution")}
    if min(counts.values()) < 2 or len(set(counts.values())) > 1:
        yield ("number_of_exercises", f"2 exercises or more, each with its check and solution; there are {counts}")
    for number, index in enumerate(chapter.tagged("exercise"), start=1):
        above, stub, check, solution = (chapter.at(index + step) for step in (-1, 0, 1, 2))
        here = f"exercise {number}"
        if above.cell_type != "markdown" or EXERCISE.findall(above.source) != [str(number)]:
            yield "exercise_heading", f"no '### Exercise {number} · Title · 10 minutes · ●○○' above {here}"
        if len(defined := functions(stub)) != 1:
            yield "exercise_stub", f"{here} defines {len(defined)} functions, not the learner's one"
        for function in defined[:1]:
            if not ast.get_docstring(function):
                yield "exercise_stub", f"{function.name} has no docstring with shapes and units"
            if not re.fullmatch(r"raise NotImplementedError(\(\))?", ast.unparse(function.body[-1])):
                yield ("exercise_stub", f"the body of {function.name} does not end in raise NotImplementedError")

        stubs = {function.name for function in defined}
        checks = {name for name, function in check_calls(check) if function in stubs}
        if "check" not in tools.tags(check) or not checks:
            yield "exercise_check", f"after {here} comes no cell tagged check with checks.<check>(<function>)"
        elif not "".join(output.get("text", "") for output in check.outputs).startswith("not yet: "):
            yield "exercise_check", f"the stored output of the check of {here} is not 'not yet: ...'"

        if "solution" not in tools.tags(solution) or "check" not in tools.tags(check):
            yield "exercise_solution", f"no solution follows the check of {here}"
            continue
        own = {function.name for function in functions(solution)}
        if own & stubs:
            yield "exercise_solution", f"the solution of {here} redefines {', '.join(own & stubs)}"
        asserted = check_calls(solution, of_asserts=True)
        if not any(name in checks and function in own - stubs for name, function in asserted):
            yield "exercise_solution", f"{here}: no assert of the learner's check on the solution's function"
    for cell in (chapter.cells[index] for index in chapter.tagged("solution")):
        if not re.match(r"# @title Solution: \S", cell.source):
            yield "solution_title", "a solution does not start with '# @title Solution: ...'"


def figures(chapter):
    """Each stored picture says in words what it shows: ``show(figure, alt=...)`` does it."""
    if not any(tools.images(cell) for cell in chapter.cells):
        yield "figure", "no cell draws a figure"
    for index, cell in enumerate(chapter.cells):
        for output in tools.images(cell):
            alt = tools.alt_text(output)
            if len(alt.split()) < 5:
                yield "alternative_text", f"the picture of cell {index} has no text of 5 words: {alt!r}"
            elif output.data.get("text/plain") != alt:
                yield (
                    "alternative_text",
                    f"the picture of cell {index} is not displayed by show of ignite_ddl.course.figures",
                )
        if cell.cell_type == "markdown" and "![](" in cell.source:
            yield "alternative_text", f"a picture in Markdown has no alternative text (cell {index})"


def the_file(chapter):
    if tools.normalise(copy.deepcopy(chapter.notebook)) != chapter.notebook:
        yield "normal_form", "the file is not in normal form: run `tools/notebooks.py normalise`"
    counts = [cell.execution_count for cell in chapter.code]
    if counts != list(range(1, len(counts) + 1)):
        yield ("execution_counts", f"they are {counts}: run `tools/notebooks.py execute {chapter.path.name[:2]}`")
    for index, cell in enumerate(chapter.cells):
        tags = set(tools.tags(cell))
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr" and not tags & UNCHECKED:
                yield "no_stderr", f"cell {index} stores stderr: {output.text[:60]!r}"
        if tags - TAGS:
            yield "tags", f"cell {index} has unknown tags {sorted(tags - TAGS)}"
        # nbval obeys such comments too, and no rule would count them.
        if cell.cell_type == "code" and re.search(r"^\s*#\s*(NBVAL|PYTEST_VALIDATE)_", cell.source, re.M):
            yield "tags", f"a comment for nbval stands in cell {index}: use the tag"
        if "score" in tags and (not cell.source.startswith("# @title Your guess\n") or not score_calls(cell)):
            yield "tags", f"cell {index} has the tag score, but does not begin with '# @title Your guess' and score"
        if "nbval-skip" in tags and not re.search(r"gpu|cuda|nccl|tpu|xla", cell.source, re.IGNORECASE):
            yield "skips", f"cell {index} has nbval-skip but needs no GPU or TPU"
    ignored = sum(not UNCHECKED.isdisjoint(tools.tags(cell)) for cell in chapter.code)
    if 3 * ignored > len(chapter.code):
        yield ("share_of_unchecked_cells", f"nbval ignores {ignored} of {len(chapter.code)}, a third is the most")
    for path in tools.machine_paths(chapter.notebook):
        yield "no_machine_paths", path
    if (size := len(tools.dumps(chapter.notebook).encode())) > 600_000:
        yield "size", f"the file has {size / 1000:.0f} kB, 600 are the most"


def problems(notebook, path, paths):
    chapter = Chapter(notebook, path, paths)
    parts = (opening, body, guesses, one_meaning, ending, exercises, figures, the_file)
    return [problem for part in parts for problem in part(chapter)]


# --- every rule on every chapter -----------------------------------------------------------------------


CHAPTERS = tools.chapters()


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapter(path):
    found = problems(tools.read(path), path, CHAPTERS)
    assert not found, "\n".join([path.name, *(f"{name}: {problem}" for name, problem in found)])


def test_files_in_notebooks_are_chapters():
    found = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert found == CHAPTERS, "a chapter's file is named NN_name.ipynb"
    numbers = [path.name[:2] for path in found]
    assert len(set(numbers)) == len(numbers), "two chapters have one number"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_readme_states_the_minutes_of_the_chapter(path):
    stated = re.search(r"\*\*(\d+) minutes\*\*", tools.read(path).cells[0].source)[1]
    assert f"(notebooks/{path.name}) | {stated} |" in (ROOT / "README.md").read_text()


def test_the_address_stands_in_pyproject_only():
    assert tools.stamp(ROOT, check=True) == 0, "run `make stamp`"


# --- the rules can fail --------------------------------------------------------------------------------


PATHS = [Path("notebooks") / name for name in ("00_start_here.ipynb", "04_training.ipynb", "05_data.ipynb")]
ALT = "Four bars, one a rank: two hold three rows, two hold two."


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def picture(alt, png=b"\x89PNG, as far as a rule looks"):
    data = {"image/png": base64.b64encode(png).decode(), "text/plain": alt}
    return new_output("display_data", data=data, metadata={"image/png": {"alt": alt}})


def scored(name, answer, mistakes=()):
    """What ``score`` displays."""
    record = {"name": name, "answer": answer, "unit": "", "within": None, "mistakes": list(mistakes)}
    metadata = {"text/plain": {"score": record | {"any_order": False}}}
    said = guesses_of_readers.judge(None, answer)[1]
    return new_output("display_data", data={"text/plain": said}, metadata=metadata)


@functools.cache
def good_chapter(path=PATHS[1]):
    """The skeleton that `tools/notebooks.py new` writes, with the outputs that a run would store."""
    needs = "PyTorch, nothing else." if path == PATHS[0] else "[00 · Start here](00_start_here.ipynb)"
    notebook = tools.skeleton(path.name, "Training", tools.repository(), needs)
    for count, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = count
        if "check" in tools.tags(cell):
            cell.outputs = [stream("not yet: write the body of it, then run this cell again\n")]
        elif "show(figure" in cell.source:
            cell.outputs = [picture(ALT)]
        elif "print(" in cell.source:
            cell.outputs = [stream("4 rows\n")]
        elif cell.source == "tally()":
            cell.outputs = [stream("0 of 2\nno guesses yet\n")]
        for call in score_calls(cell):
            cell.outputs = [scored(ast.unparse(call.args[0]), 10, [[12, "All?"]])]
    for later in [other for other in PATHS if other > path][:1]:
        last = notebook.cells[-1]
        last.source = last.source.replace("what comes after this.", f"[{later.stem}]({later.name})")
    return tools.normalise(notebook)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_good_chapter_passes(path):
    assert problems(good_chapter(path), path, PATHS) == []


# Ways to break a copy. A place is an index, or a tag: its first cell.


def on(place, change):
    def broken(notebook):
        index = place if isinstance(place, int) else Chapter(notebook, None, []).tagged(place)[0]
        change(notebook.cells[index])

    return broken


def replace(place, old, new):
    def change(cell):
        assert old in cell.source, "the table below is out of date"
        cell.source = cell.source.replace(old, new)

    return on(place, change)


def everywhere(old, new):
    return lambda notebook: [
        cell.update(source=re.sub(old, new, cell.source, flags=re.MULTILINE)) for cell in notebook.cells
    ]


def insert(cell, times=1):
    def broken(notebook):
        for _ in range(times):
            notebook.cells.insert(3, nbformat.from_dict(cell | {"id": f"new-{len(notebook.cells)}"}))

    return broken


def text(source):
    return insert(new_markdown_cell(source))


def code(source, *tags, times=1, **fields):
    return insert(new_code_cell(source, metadata={"tags": list(tags)}, **fields), times)


def output(value):
    return on("check", lambda cell: cell.update(outputs=[value]))


BROKEN = {  # a rule, and a change that breaks it
    "title": replace(0, "# 04 ·", "# 05 ·"),
    "badge": replace(0, "/github/", "/github/someone-"),
    "promise": replace(0, "in one run.", "in one run. And another."),
    "minutes": replace(0, "**5 minutes**", "**10 minutes**"),
    "objectives": replace(0, "\n- say why it matters.", ""),
    "setup": on("setup", lambda cell: cell.metadata.tags.clear()),
    "imports": on("imports", lambda cell: cell.metadata.tags.remove("imports")),
    "guess": everywhere("guess", "hope"),
    "guess_is_judged": code("guess_more = None\nscore(guess_more, rows)"),
    "given_away": code("guess_more = None  # 10 is right\nscore(guess_more, rows)", outputs=[scored("guess_more", 10)]),
    "judgement": code("score(guess_more, rows)", outputs=[scored("guess_more", 10, [[10, "Not ten."]])]),
    "one_meaning": replace(-2, "tally()", "rows = [4, 2, 2, 2]\ntally()"),
    "tally": lambda notebook: notebook.cells.pop(-2),
    "asserts": everywhere("^assert (?!checks)", "test = "),
    "number_of_cells": code("print(1)", "parameters", times=30),
    "too_long": text("word " * 5200),
    "length_of_cells": code("x = 1\n" * 31),
    "voice": text("A Powerful idea."),
    "links": text("See [07 · Profiler](07_profiler.ipynb)."),
    "ending": replace(-1, "\n- The third thing.", ""),
    "next": replace(-1, "(05_data.ipynb)", "(00_start_here.ipynb)"),
    "number_of_exercises": lambda notebook: notebook.cells.pop(Chapter(notebook, None, []).tagged("check")[0]),
    "exercise_heading": replace(8, "minutes · ●○○", "minutes · ●"),
    "exercise_stub": replace("exercise", "raise NotImplementedError", "return 2 * n_rows"),
    "exercise_check": output(stream("right: it passes without work\n")),
    "exercise_solution": replace("solution", "checks.double(double_solution)", "checks.double(double)"),
    "solution_title": replace("solution", "# @title Solution: ", "# Solution: "),
    "figure": lambda notebook: [cell.outputs.clear() for cell in notebook.cells if tools.images(cell)],
    "alternative_text": code("figure", outputs=[picture("<Figure size 700x300>")]),
    "normal_form": on(2, lambda cell: cell.metadata.update(scrolled=True)),
    "execution_counts": on("exercise", lambda cell: cell.update(execution_count=9)),
    "no_stderr": output(stream("UserWarning\n", "stderr")),
    "tags": code("# NBVAL_IGNORE_OUTPUT\nprint(1)"),
    "share_of_unchecked_cells": code("print(1)", "nbval-ignore-output", times=8),
    "skips": code("print(1)", "nbval-skip"),
    "no_machine_paths": output(stream("File /opt/x.py\n")),
    "size": code("figure", outputs=[picture(ALT, bytes(600_000))]),
}


def test_each_rule_fails_on_a_copy_that_breaks_it():
    assert BROKEN.keys() == set(re.findall(r'yield \(?\s*"(\w+)",', Path(__file__).read_text()))
    for rule, change in BROKEN.items():
        notebook = copy.deepcopy(good_chapter())
        change(notebook)
        assert rule in {name for name, _ in problems(notebook, PATHS[1], PATHS)}


def below_a_function(notebook):
    notebook.cells[4].source += "\n\n\ndef n_ranks():\n    return n\n\n\nn = 4"
    notebook.cells[7].source += "\nassert n_ranks() == 4"
    notebook.cells[-2].source = "n = 3\ntally()"


CHANGED = {  # how a name gets another meaning
    "in a cell below": replace(-2, "tally()", "for total in range(3):\n    pass\ntally()"),
    "by an item": replace(-2, "tally()", "rows[0] = 4\ntally()"),
    "below a cell whose function reads it": below_a_function,
    "in a cell above that is run again": replace("score", "assert rows", "total = 0\nassert rows"),
    "as a guess": replace(-2, "tally()", "guess_rows = 3\ntally()"),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_name_that_changes_is_found(change):
    notebook = copy.deepcopy(good_chapter())
    change(notebook)
    assert list(one_meaning(Chapter(notebook, PATHS[1], PATHS)))
