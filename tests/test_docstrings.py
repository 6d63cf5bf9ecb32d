"""Every example of a public docstring runs, as a cell would run it."""

import importlib
import inspect
import pkgutil
import re
import textwrap

import pytest

import ignite_ddl

# The examples of lab and course are checked beside them.
MODULES = [m.name for m in pkgutil.iter_modules(ignite_ddl.__path__) if m.name not in ("lab", "course")]


def examples():
    for name in MODULES:
        module = importlib.import_module(f"ignite_ddl.{name}")
        for public in module.__all__:
            thing = getattr(module, public)
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
        "launch.Parallel",
        "mesh.initialize_mesh",
        "auto.auto_dataloader",
        "auto.auto_model",
        "engine.create_supervised_trainer",
        "engine.create_supervised_evaluator",
    }
    assert wanted <= with_example
