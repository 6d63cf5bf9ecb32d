"""The house has three storeys and a stair that only goes down; the page that leads through it shows what there is."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ignite_ddl

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    str(path.relative_to(ROOT)).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
    for path in sorted((ROOT / "ignite_ddl").rglob("*.py"))
}


def imports(name):
    """The files of the package that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {file for file in found if file in FILES} - {name}


IMPORTS = {name: imports(name) for name in FILES}


def storey(name):
    return name.split(".")[1] if name.split(".")[1:2] in (["lab"], ["course"]) else "package"


@pytest.mark.parametrize("name", [name for name in FILES if name != "ignite_ddl"])
def test_the_stair_only_goes_down(name):
    below = {"package": {"package"}, "lab": {"package", "lab"}, "course": {"package", "lab", "course"}}
    above = {other for other in IMPORTS[name] if storey(other) not in below[storey(name)]}
    assert not above


def test_one_door_goes_up_the_stair():
    """``ddl.check_parity`` and its report are the lab's; for all other files the stair is tested above."""
    above = {name for name in IMPORTS["ignite_ddl"] if storey(name) != "package"}
    assert above == {"ignite_ddl.lab.parity"}
    late = {f"ignite_ddl.{room}" for room in ignite_ddl._LATE.values()}
    assert late <= IMPORTS["ignite_ddl"]
    assert {room for room in late if storey(room) != "package"} == above


def test_launch_knows_companions_and_not_what_they_do():
    hook = "ignite_ddl.launch.companions"
    launch = [name for name in FILES if name.startswith("ignite_ddl.launch")]
    assert [name for name in launch if any("parameter_server" in other for other in IMPORTS[name])] == [hook]
    text = {name: re.sub(r'"""(?s:.*?)"""', "", FILES[name].read_text()) for name in launch}
    assert [name for name in text if re.search("(?i)parameter.?server", text[name])] == [hook]


def test_no_two_files_import_each_other_whatever_way_round():
    defining = {name: set(IMPORTS[name]) for name in FILES}
    path, done = [], set()

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        # A package's face hands on what its files define; they do not need it.
        for other in defining[name] - {name.rpartition(".")[0]}:
            visit(other)
        done.add(path.pop())

    for name in FILES:
        visit(name)


LOADED = """
import sys, torch
def used(*a): raise SystemExit("CUDA was asked for at import")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = used
import ignite_ddl
print(*(name for name in sys.modules if name.startswith("ignite_ddl")), "matplotlib" in sys.modules)
from ignite_ddl.launch.parallel import PRELOAD
for name in PRELOAD:
    __import__(name)
import ignite_ddl.lab.draw, ignite_ddl.course.figures.ch00
print("matplotlib" in sys.modules)  # that comes with the first figure
"""


def test_importing_the_package_loads_the_ground_floor_alone_and_opens_no_gpu():
    """A forkserver that had opened CUDA would give ranks in which CUDA does not work."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert loaded.pop() == loaded.pop() == "False"
    unwanted = ("ignite_ddl.lab", "ignite_ddl.course", "ignite_ddl.parameter_server", "ignite_ddl.diagnose")
    assert not [name for name in loaded if name.startswith(unwanted)]
    assert "ignite_ddl.model" in loaded


WITHOUT_TORCH = """
import sys
sys.path[:] = [sys.argv[1], *(p for p in sys.path if p and "site-packages" not in p)]
sys.modules.update(dict.fromkeys(("torch", "ignite", "numpy")))
from ignite_ddl.lab import cost, plan, simulate
step = simulate.pipeline("zbv", n_ranks=4, n_microbatches=8)
print(simulate.__file__.startswith(sys.argv[1]), step.seconds, cost.pipeline_bubble(4, 8))
"""


def test_predicting_and_simulating_need_neither_torch_nor_ignite(tmp_path):
    """As a web page has them: only what they import, under empty ``__init__`` files."""
    wanted, needed = ["ignite_ddl.lab.plan", "ignite_ddl.lab.simulate"], set()
    while wanted:
        name = wanted.pop()
        if name not in needed and name not in ("ignite_ddl", "ignite_ddl.lab", "ignite_ddl.pipeline"):
            needed.add(name)
            wanted += IMPORTS[name]
    for name in needed:
        target = tmp_path / FILES[name].relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(FILES[name].read_text())
    for folder in (tmp_path / "ignite_ddl").rglob("*"):
        if folder.is_dir() and not (folder / "__init__.py").exists():
            (folder / "__init__.py").touch()
    (tmp_path / "ignite_ddl" / "__init__.py").touch()
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("True"), done.stderr


def private_names(path):
    """Those of torch and Ignite that a file imports, or takes from a module of theirs."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "ignite"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"(torch|dist|idist|nn|rpc|ignite)(\.\w+)+", name):
                yield name


def test_each_private_name_of_torch_and_ignite_is_in_compat_or_listed_there():
    listed = set(re.findall(r"^``([\w/.]+\.py)``", (ROOT / "ignite_ddl/compat.py").read_text(), re.M))
    assert all((ROOT / "ignite_ddl" / name).exists() for name in listed)
    for path in FILES.values():
        private = [name for name in private_names(path) if re.search(r"\._(?!_)", name)]
        assert not private or str(path.relative_to(ROOT / "ignite_ddl")) in listed, (path.name, private)


PAGE = (ROOT / "docs/how_it_works.md").read_text()


def defined(file, name):
    """The source of a function, a class or a table of a file."""
    text = file.read_text()
    scope = ast.parse(text)
    for part in name.split("."):
        found = [n for n in scope.body if part == getattr(n, "name", None)]
        found += [n for n in scope.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == part]
        assert found, f"{file.name} has no {name}"
        scope = found[0]
    return ast.get_source_segment(text, scope)


def test_how_it_works_names_what_there_is():
    named = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", PAGE)
    assert len(named) > 20
    for file, name in named:
        defined(ROOT / "ignite_ddl" / file, name)
    for path in re.findall(r"`([\w/]+(?:\.py|/))`", PAGE):
        assert (ROOT / path).exists() or (ROOT / "ignite_ddl" / path).exists(), path


def test_how_it_works_shows_code_as_it_is():
    blocks = re.findall(r"```python\n# (\S+\.py): ([\w.]+)\n(.*?)```", PAGE, re.S)
    assert len(blocks) == PAGE.count("```python")
    for file, name, code in blocks:
        base = Path(torch.__file__).parents[1] if file.startswith("torch/") else ROOT
        source = defined(base / file, name)
        assert [line for line in code.splitlines() if line not in source.splitlines()] == [], file
