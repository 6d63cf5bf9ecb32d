"""The checks of the exercises, against natural mistakes. That each solution passes, and that each stub gets its line,
nbval sees in the notebooks.

``mistakes/chNN.py`` holds a chapter's mistakes as data, for each check a dict from a piece of the hint to the answer
that gets it: ``MISTAKES``, and ``WAITING`` where ranks wait for each other; ``RIGHT`` holds right answers unlike the
notebook's. An answer is a function, or a dict of what to replace in the text of the notebook's solution. Each
``raise Hint`` of a chapter has to be reached.
"""

import ast
import importlib
import inspect
import logging
import re
from pathlib import Path
from symtable import symtable

import nbformat
import pytest
import torch
import torch.distributed as dist

import ignite_ddl as ddl
import ignite_ddl.course.exercises as exercises
from ignite_ddl.course.checks.ch10 import _buckets
from ignite_ddl.course.checks.ch13 import _arrivals, _n_of
from ignite_ddl.course.orders import most_kept, play, read
from ignite_ddl.lab import cost
from ignite_ddl.lab.orders import schedule_actions

CHECKS = "ignite_ddl.course.checks.ch{}"  # module of chapter NN
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHAPTERS = sorted(path.name[:2] for path in NOTEBOOKS.glob("*.ipynb"))
# Chapters in which each mistake is a launch; of these 01, 09, 17 and 22 are among the quick tests.
SLOW = ("00", "04", "05", "06", "08", "10", "12", "14", "16", "20", "28")
CHECK = re.compile(r"^@exercise\b.*?^def (\w+)", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def _ranks_have_started_once():
    """The first launch of a process loads torch, which on a busy machine takes longer than a check waits."""
    with ddl.Parallel(backend="gloo", nproc_per_node=1, threads_per_rank=1) as parallel:
        parallel.run(int)


@pytest.fixture
def reached(monkeypatch):
    """The pairs (name of a file, line) through which hints were raised, on a rank as well."""
    lines, explain = set(), exercises._explain

    def record(error, function):
        lines.update((Path(code.co_filename).name, line) for code, line in exercises._frames(error))
        lines.update((name, int(line)) for name, line in re.findall(r'(\w+\.py)", line (\d+)', str(error)))
        return explain(error, function)

    monkeypatch.setattr(exercises, "_explain", record)
    return lines


class Solutions:
    """The solutions of a chapter's notebook, and what they use of the notebook."""

    def __init__(self, chapter):
        [path] = NOTEBOOKS.glob(f"{chapter}_*.ipynb")
        self.sources, self.nodes = {}, {}
        for cell in nbformat.read(path, as_version=4).cells:
            tags = cell.metadata.get("tags", [])
            if cell.cell_type != "code" or "setup" in tags or cell.source.startswith("%%"):
                continue
            if "solution" in tags:
                [name] = re.findall(r"^def (\w+)_solution\(", cell.source, re.MULTILINE)
                self.sources[name] = cell.source.partition("\nassert ")[0].replace(f"{name}_solution", name)
            for node in ast.parse(re.sub("^[%!].*", "", cell.source, flags=re.MULTILINE)).body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    self.nodes |= {alias.asname or alias.name.split(".")[0]: node for alias in node.names}
                elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self.nodes[node.name] = node
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.nodes[node.targets[0].id] = node

    def edited(self, name, edits):
        source = self.sources[name]
        for old, new in edits.items():
            assert old in source, f"the solution of {name} has no {old!r}"
            source = source.replace(old, new)
        space = {"__name__": "__main__"}  # as in a notebook: functions travel to ranks by value
        self.run(source, space)
        return space[name]

    def run(self, source, space):
        """Runs code after what it names of the notebook."""
        for name in global_names(symtable(source, "a solution", "exec")) & self.nodes.keys():
            if name not in space:
                space[name] = None  # so that a function may call itself
                self.run(ast.unparse(self.nodes[name]), space)
        exec(source, space)


def global_names(table):
    here = {
        name.get_name()
        for name in table.get_symbols()
        if name.is_referenced() and (name.is_global() or table.get_type() == "module")
    }
    return here.union(*map(global_names, table.get_children()))


def wrong_hints(check, mistakes, capsys):
    """What is wrong with what a check says of mistakes, one line for each."""
    for hint, function in mistakes.items():
        passed, (out, err) = check(function), capsys.readouterr()
        if passed or not out.startswith("not yet: ") or out.count("\n") != 1 or hint not in out:
            yield f"{check.__name__}: not {hint!r}, but {out!r}"
        if err and "gloo" not in err:  # gloo has last words of its own
            yield f"{check.__name__}: {hint!r} comes with {err!r} on stderr"


@pytest.mark.parametrize(
    "chapter",
    [pytest.param(chapter, marks=[pytest.mark.slow] * (chapter in SLOW)) for chapter in CHAPTERS],
    ids="ch{}".format,
)
def test_each_mistake_gets_its_hint(chapter, reached, capsys, monkeypatch):
    module, data = (importlib.import_module(name) for name in (CHECKS.format(chapter), f"mistakes.ch{chapter}"))
    checks = {name: getattr(module, name) for name in CHECK.findall(inspect.getsource(module))}
    assert set(data.MISTAKES) == set(checks)
    solutions, problems, silenced = Solutions(chapter), [], logging.root.manager.disable
    for name, check in checks.items():

        def function(answer, name=name):
            return answer if callable(answer) else solutions.edited(name, answer)

        mistakes, waiting = (
            {hint: function(answer) for hint, answer in getattr(data, part, {}).get(name, {}).items()}
            for part in ("MISTAKES", "WAITING")
        )
        problems += wrong_hints(check, mistakes, capsys)
        for answer in getattr(data, "RIGHT", {}).get(name, []):
            passed, (out, _) = check(function(answer)), capsys.readouterr()
            if not passed or not out.startswith("right"):
                problems.append(f"{name}: a right answer does not pass, but {out!r}")
        if waiting:
            with monkeypatch.context() as patch:
                patch.setattr(module, "WAIT_SECONDS", 2)
                problems += wrong_hints(check, waiting, capsys)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Raise) and ast.unparse(node).startswith("raise Hint("):
            lines = {(Path(module.__file__).name, line) for line in range(node.lineno, node.end_lineno + 1)}
            if reached.isdisjoint(lines):
                problems.append(f"line {node.lineno}: no mistake reaches {ast.unparse(node)}")
    assert not problems, "\n".join(problems)
    assert logging.root.manager.disable == silenced  # the learner's kernel logs as before


# --- what the checks take for right is so ---------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[40, 12, 40, 12, 40, 12], [200, 12, 32, 12], [8] * 7, [4]])
@pytest.mark.parametrize(("cap", "first_cap"), [(50, 50), (60, 10), (20, 8), (1000, 1000)])
def test_buckets_are_torchs(sizes, cap, first_cap):
    tensors = [torch.zeros(size // 4) for size in reversed(sizes)]
    torchs, _ = dist._compute_bucket_assignment_by_size(tensors, [first_cap, cap])
    ours = _buckets(sizes, cap, first_cap)
    assert ours == [[len(sizes) - 1 - index for index in bucket] for bucket in torchs]
    assert [sum(sizes[i] for i in bucket) for bucket in ours] == cost.ddp_buckets(sizes, cap, first_cap)


@pytest.mark.parametrize(("n", "b", "seed"), [(4, 1, 0), (6, 2, 1), (5, 3, 2)])
def test_arrivals_hold_late_gradients_and_an_open_group(n, b, seed):
    arrivals = _arrivals(n, b, seed)
    means, dropped = _n_of(arrivals, n - b)
    assert len(means) == arrivals[-1][0] == 7
    assert dropped


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 12), (3, 3)])  # where torch can do the check's numbers
def test_torchs_order_fills_the_bubble(p, m):
    actions = schedule_actions("interleaved_zero_bubble", p, m, n_chunks=1)
    ranks = [[f"{kind}{m}" for kind, _, m in actions[rank]] for rank in range(p)]
    ranks = [read(order, "FIW", rank, m) for rank, order in enumerate(ranks)]
    assert play(ranks) == 3 * m + p - 1
    assert max(map(most_kept, ranks)) <= p
