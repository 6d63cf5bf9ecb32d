"""Every example of a public docstring runs: code as a cell would run it, doctests with their output."""

import doctest
import importlib
import inspect
import logging
import pkgutil
import re
import textwrap

import pytest

import ignite_ddl
from ignite_ddl.course.figures import show

# ignite_ddl.course.checks.* have none, and code of the course, but for its figures, shows cells of a chapter.
MODULES = [m.name for m in pkgutil.walk_packages(ignite_ddl.__path__, "ignite_ddl.") if "course.checks" not in m.name]
FIGURES = "ignite_ddl.course.figures.ch"


def examples():
    for name in MODULES:
        module = importlib.import_module(name)
        names = () if name.startswith("ignite_ddl.course") else [each for each in vars(module) if each[0] != "_"]
        for public in getattr(module, "__all__", names):
            thing = getattr(module, public)
            if getattr(thing, "__module__", None) != name or not callable(thing):  # handed on, not defined here
                continue
            place, doc = f"{name.removeprefix('ignite_ddl.')}.{public}", inspect.getdoc(thing) or ""
            blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n?|\n)+)", doc)
            assert blocks or not name.startswith(FIGURES), f"{place} has no example"
            if not name.startswith("ignite_ddl.course") or name.startswith(FIGURES):
                yield from (pytest.param(textwrap.dedent(block), id=place) for block in blocks)
            tests = doctest.DocTestFinder().find(thing, public)
            yield from (pytest.param(test, id=f"{place} >>>") for test in tests if test.examples)


EXAMPLES = list(examples())


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example, no_window):
    before = logging.root.manager.disable
    run_example(example)
    assert logging.root.manager.disable == before, "the reader's own messages are not shown any more"


def run_example(example):
    if isinstance(example, doctest.DocTest):
        assert doctest.DocTestRunner().run(example).failed == 0
        return
    space = {"__name__": "__main__"}  # functions of a cell: they travel by value
    exec(example, space)
    if "figure" in space:
        show(space["figure"], alt="Five words or more here.")


def test_the_main_names_have_examples():
    with_example = {param.id for param in EXAMPLES}
    wanted = {
        "launch.parallel.Parallel",
        "mesh.initialize_mesh",
        "data.auto_dataloader",
        "model.auto_model",
        "supervised.create_supervised_trainer",
        "supervised.create_supervised_evaluator",
    }
    assert wanted <= with_example
