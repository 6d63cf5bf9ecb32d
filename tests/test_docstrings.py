"""Every example of a public docstring runs, as a cell would run it."""

import importlib
import inspect
import pkgutil
import re
import textwrap

import pytest

import ignite_ddl

# The course's figures need a notebook and data, its other examples are doctests, checked beside the course.
MODULES = [
    m.name.removeprefix("ignite_ddl.")
    for m in pkgutil.walk_packages(ignite_ddl.__path__, "ignite_ddl.")
    if not m.name.startswith(("ignite_ddl.course", "ignite_ddl.plot"))
]


def examples():
    for name in MODULES:
        module = importlib.import_module(f"ignite_ddl.{name}")
        for public in getattr(module, "__all__", ()):
            thing = getattr(module, public)
            if getattr(thing, "__module__", None) != module.__name__:  # handed on, not defined here
                continue
            doc = inspect.getdoc(thing) if callable(thing) else None
            for block in re.findall(r"\.\. code-block:: python\n\n((?:    .*\n?|\n)+)", doc or ""):
                yield pytest.param(textwrap.dedent(block), id=f"{name}.{public}")


@pytest.mark.parametrize("example", examples())
def test_example_runs(example):
    space = {"__name__": "__main__"}  # functions of a cell: they travel by value
    exec(example, space)


def test_the_main_names_have_examples():
    with_example = {param.id for param in examples()}
    wanted = {
        "launch.parallel.Parallel",
        "mesh.initialize_mesh",
        "data.auto_dataloader",
        "model.auto_model",
        "engine.create_supervised_trainer",
        "engine.create_supervised_evaluator",
    }
    assert wanted <= with_example
