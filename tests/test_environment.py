"""What a learner's machine is given: the pins, the conda file, the Makefile, set-up and its failures."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import rattler
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = ["3.11.0", "3.12.0", "3.13.0", "3.14.0"]  # what constraints.txt promises to serve
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
RELEASE = yaml.safe_load((ROOT / ".github/workflows/workbook.yml").read_text())
TARGETS = ["lab", "test", "test-all", "notebooks", "run", "stamp", "lint", "format", "clean"]

SETUP = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/setup_venv.py")))

# Only there is the installed set the tested one: `make test CONSTRAINTS=`, `make test-oldest` and others differ.
TESTED_SET = SETUP.wanted_stamp(SETUP.version(sys.version_info), "constraints.txt")
on_tested_set = pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv" or SETUP.read(SETUP.STAMP) != TESTED_SET,
    reason="needs the .venv that `make` set up with constraints.txt",
)


def pin_lines():
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [line for line in lines if line]


def pins():
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in pin_lines()}


def pinned(name):
    (specifier,) = pins()[canonicalize_name(name)].specifier
    return Version(specifier.version)


# The tested set


def test_pins_are_exact_and_have_no_local_part():
    exact = re.compile(r"[\w.-]+==\d[\w.]*(; \w+ [=<>!]+ \"[\w.]+\")?")
    assert [line for line in pin_lines() if not exact.fullmatch(line)] == []
    assert len(pin_lines()) == len(pins()), "a package is pinned twice"


def test_requirements_are_met_by_their_pins():
    requirements = [Requirement(line) for line in PROJECT["dependencies"] + sum(EXTRAS.values(), [])]
    assert [r for r in requirements if not r.specifier.contains(pinned(r.name))] == []


def reached_from_project():
    """Names of every distribution that ignite-ddl[course,lab,test] brings to this machine."""
    seen, todo = set(), [Requirement(line) for line in PROJECT["dependencies"] + sum(EXTRAS.values(), [])]
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), requirement.extras or {""}
        if (name, *sorted(extras)) in seen:
            continue
        seen.add((name, *sorted(extras)))
        for line in importlib.metadata.requires(name) or []:
            child = Requirement(line)
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(child)
    # A CUDA build of torch pins its own libraries.
    return {key[0] for key in seen if not key[0].startswith(("nvidia-", "cuda-", "triton"))}


@on_tested_set
def test_pins_are_the_whole_set():
    assert reached_from_project() - set(pins()) == set()


@on_tested_set
def test_what_is_installed_is_what_is_pinned():
    installed = {name: Version(importlib.metadata.version(name)).public for name in reached_from_project()}
    assert installed == {name: str(pinned(name)) for name in installed}


@on_tested_set
def test_every_pin_serves_every_python():
    # Debian 12's Python is 3.11.2: "3.11.5 or newer" somewhere deep in the set would shut it out.
    for name in reached_from_project():
        needs = SpecifierSet(importlib.metadata.metadata(name)["Requires-Python"] or "")
        assert all(needs.contains(python) for python in PYTHONS), f"{name} needs Python {needs}"


# conda


def conda():
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def conda_lines():
    return [line for line in conda()["dependencies"] if isinstance(line, str)]


def test_conda_lines_are_strict_match_specs():
    names = {rattler.MatchSpec(line, strict=True).name.normalized for line in conda_lines()}
    assert names == {"python", "pip", "make"}, "what else is needed belongs in pyproject.toml"


def test_conda_python_range_is_the_projects():
    (line,) = [line for line in conda_lines() if line.startswith("python ")]
    assert SpecifierSet(line.removeprefix("python ")) == SpecifierSet(PROJECT["requires-python"])


def test_conda_brings_the_tested_set_by_pip():
    (pip,) = [entry["pip"] for entry in conda()["dependencies"] if isinstance(entry, dict)]
    assert conda()["channels"] == ["conda-forge"]
    assert "-c constraints.txt" in pip
    assert len(pip) == 2
    (extras,) = [re.fullmatch(r"-e \.\[([\w,]+)\]", line)[1] for line in pip if line.startswith("-e")]
    assert set(extras.split(",")) == set(EXTRAS)


# No file sends a reader to an index of our choosing, or knows the machine it was written on


def config_files():
    globs = ["pyproject.toml", "constraints.txt", "environment.yml", "Makefile", ".ci/*", ".git[ai]*"]
    globs += [".github/**/*.yml", "tools/setup_venv.py"]
    return sorted(path for glob in globs for path in ROOT.glob(glob) if path.is_file())


def test_config_names_no_index_and_no_local_path():
    allowed = PROJECT["urls"]["Repository"].split("/")[2]
    assert len(config_files()) > 5
    for path in config_files():
        text = path.read_text()
        assert not re.search(r"\b(pypi|pythonhosted|anaconda|pytorch|npmjs)\.(org|com|io)\b", text), path
        assert not re.search(r"--((extra-)?index-url|find-links)\b", text), path
        assert not re.search(r"(?<![\w.}~])/(root|home|work|Users|opt)/", text), path
        assert {url.split("/")[2] for url in re.findall(r"https?://[^\s\"')]+", text)} <= {allowed}, path


# make


def make(*args, **env):
    return subprocess.run(
        ["make", "-C", ROOT, "--no-print-directory", *args],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
    )


def test_make_alone_lists_every_target():
    listed = dict(line.removeprefix("make ").split(maxsplit=1) for line in make().stdout.splitlines())
    assert set(TARGETS) <= set(listed)
    assert all(listed.values())


def test_targets_set_up_before_they_run_anything():
    for target in TARGETS:
        shown = make("-n", target, "CHAPTER=04").stdout
        if target == "clean":
            assert "setup_venv" not in shown
        else:
            assert 0 <= shown.find("setup_venv.py") < shown.find(".venv/bin/"), target


def test_make_test_is_one_strict_pytest_command():
    shown = make("-n", "test", "TEST_ARGS=-x").stdout.replace("\\\n", " ")
    (line,) = [line for line in shown.splitlines() if "pytest" in line]
    for word in ["tests", "notebooks", "--nbval", "--nbval-current-env", "loadfile", "-x"]:
        assert word in line.split()
    assert "--nbval-lax" not in line
    assert '-m "not slow"' in line


@pytest.mark.parametrize("target", ["test-all", "test-oldest"])
def test_weekly_targets_run_the_slow_tests_too(target):
    shown = make("-n", target).stdout
    assert "--nbval" in shown
    assert "not slow" not in shown


def test_make_lab_refreshes_the_workbook_and_opens_it():
    shown = make("-n", "lab", "LAB_ARGS=--no-browser").stdout.replace("\\\n", " ")
    refresh, lab = (shown.find(text) for text in ("python tools/workbook.py", "jupyter lab"))
    assert 0 <= refresh < lab
    assert "default_url=/lab/tree/workbook/00_" in shown
    assert shown.rstrip().endswith("--no-browser")


def test_what_colab_installs_opens_nothing():
    brought = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"] + EXTRAS["course"]}
    assert not brought & {"jupyterlab", "notebook", "jupyter"}
    assert {Requirement(line).name for line in EXTRAS["lab"]} == {"jupyterlab"}


def test_make_says_that_there_is_no_such_python():
    done = make("setup", PYTHON="python3.99")
    assert done.returncode != 0
    assert done.stderr.startswith("ignite-ddl needs Python 3.11 or newer; there is no python3.99 here.")


def test_workflow_calls_make_targets_only():
    runs = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    wanted = {"make lint", "make test", "make test-all", "make test-oldest", "make test SLOW=1 CONSTRAINTS="}
    assert wanted == set(runs)
    assert set(WORKFLOW[True]) == {"push", "pull_request", "schedule"}  # YAML reads the key `on` as True


def test_only_the_release_may_write():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert RELEASE["permissions"] == {"contents": "write"}


def test_the_oldest_set_has_the_lowest_versions_that_are_allowed():
    pins = dict(re.findall(r"/(torch|torchvision|pytorch-ignite)==([\d.]+)/'", (ROOT / "Makefile").read_text()))
    allowed = PROJECT["dependencies"] + sum(PROJECT["optional-dependencies"].values(), [])
    floors = {r.name: str(r.specifier) for r in map(Requirement, allowed) if r.name in pins}
    assert len(floors) == 3
    for name, floor in floors.items():
        assert re.match(rf">={re.escape(pins[name])}(,|$)|>={re.escape(pins[name].removesuffix('.0'))}(,|$)", floor)


def test_ci_run_is_what_the_workflow_runs():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make")] == ["make lint", "make test"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


# The release; tests/extra_release.sh builds and installs it


def test_the_readmes_links_lead_somewhere_from_outside_of_the_repository(monkeypatch):
    given = {}
    monkeypatch.setattr("setuptools.setup", given.update)
    runpy.run_path(str(ROOT / "setup.py"))
    text, readme = given["long_description"], (ROOT / "README.md").read_text()
    links = re.findall(r"(!?)\[[^\]\n]*\]\(([^)]+)\)", text)
    base, release = PROJECT["urls"]["Repository"], f"v{PROJECT['version']}"
    assert len(links) == len(re.findall(r"\]\([^)]+\)", readme)) > 30
    assert all(link.startswith(("https://", "#")) for _, link in links)
    assert f"({base}/blob/{release}/notebooks/00_start_here.ipynb)" in text
    assert [link for picture, link in links if picture] == [
        f"{base}/raw/{release}/docs/images/data_and_model_parallel.png"
    ]
    code = re.compile(r"^```.*?^```", re.M | re.S)
    assert code.findall(text) == code.findall(readme)


def test_what_says_who_and_where_says_the_same():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    [who] = [author["name"] for author in citation["authors"]]
    assert [author["name"] for author in PROJECT["authors"]] == [who]
    assert f"Copyright (c) 2026, {who.replace('The', 'the')}\n" in (ROOT / "LICENSE").read_text()
    assert citation["license"] == PROJECT["license"] == "BSD-3-Clause"
    assert all(url.startswith(PROJECT["urls"]["Repository"]) for url in PROJECT["urls"].values())


def test_publishing_keeps_no_secret_and_is_said_to_be_untried():
    text = (ROOT / ".github/workflows/publish.yml").read_text()
    publish = yaml.safe_load(text)
    assert set(publish[True]["push"]) == {"tags"}
    assert publish["jobs"]["publish"]["permissions"] == {"contents": "read", "id-token": "write"}
    assert "secrets." not in text
    assert "Never run yet" in text


# Set-up: in a tree of its own, with pip left out unless a test says so


class Tree:
    """A copy of tools/setup_venv.py, loaded, beside a pyproject.toml and a constraints.txt of its own."""

    def __init__(self, root, monkeypatch):
        (root / "tools").mkdir()
        shutil.copy(ROOT / "tools/setup_venv.py", root / "tools")
        (root / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0"\n')
        (root / "constraints.txt").write_text("torch==2.13.0\n")
        spec = importlib.util.spec_from_file_location("setup_venv_copy", root / "tools/setup_venv.py")
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.root, self.patch, self.calls, self.failure = root, monkeypatch, [], None
        self.real_make_venv, self.real_install = self.module.make_venv, self.module.install
        self.replace("make_venv", self.make_venv)
        self.replace("install", self.install)
        self.free(100)

    def replace(self, name, value):
        self.patch.setattr(self.module, name, value)

    def free(self, gigabytes):
        usage = shutil._ntuple_diskusage(0, 0, gigabytes * 1e9)
        self.patch.setattr(self.module.shutil, "disk_usage", lambda path: usage)

    def make_venv(self):
        self.calls.append("venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.root / ".venv"], check=True)

    def install(self, constraints):
        self.calls.append(f"install {constraints}".strip())
        if self.failure:
            raise self.failure

    def run(self, *args):
        self.calls.clear()
        return self.module.main(args)

    @property
    def stamp(self):
        return Path(self.module.STAMP).exists()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    return Tree(tmp_path, monkeypatch)


FIRST = ["venv", "install constraints.txt"]
REFRESH = ["install constraints.txt"]


def test_setup_parses_on_old_pythons():
    ast.parse((ROOT / "tools/setup_venv.py").read_text(), feature_version=(3, 6))


def test_oldest_python_is_the_projects(tree):
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={tree.module.version(tree.module.OLDEST)}")


def test_second_setup_does_nothing(tree, capsys):
    assert (tree.run(), tree.calls) == (0, FIRST)
    assert re.search(r"set up in \d+ s\n$", capsys.readouterr().out)
    assert (tree.run(), tree.calls) == (0, [])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_setup_refreshes_what_has_changed(tree, name):
    tree.run()
    with open(tree.root / name, "a") as file:
        file.write("# changed\n")
    assert (tree.run(), tree.calls) == (0, REFRESH)
    assert (tree.run(), tree.calls) == (0, [])


def test_setup_without_constraints_and_back(tree):
    tree.run()
    assert (tree.run("--constraints", ""), tree.calls) == (0, ["install"])
    assert (tree.run(), tree.calls) == (0, REFRESH)


@pytest.mark.parametrize("failure", ["no network", KeyboardInterrupt()])
def test_failed_setup_leaves_no_stamp(tree, capsys, failure):
    tree.failure = tree.module.Stop(failure) if isinstance(failure, str) else failure
    assert tree.run() == 1
    error = capsys.readouterr().err
    assert error == f"{failure}\n" if isinstance(failure, str) else "Traceback" not in error
    assert not tree.stamp
    (tree.root / ".venv/half").touch()
    tree.failure = None
    assert (tree.run(), tree.calls) == (0, FIRST)
    assert (tree.root / ".venv/half").exists() == isinstance(failure, str)  # an interrupted one starts from nothing


@pytest.mark.parametrize(("interrupted", "calls"), [(False, []), (True, FIRST)])
def test_a_failed_refresh_keeps_the_environment_for_the_old_files(tree, interrupted, calls):
    tree.run()
    before = (tree.root / "constraints.txt").read_text()
    (tree.root / "constraints.txt").write_text("torch==99\n")
    tree.failure = KeyboardInterrupt() if interrupted else tree.module.Stop("no network")
    assert (tree.run(), tree.calls) == (1, REFRESH)
    assert tree.stamp != interrupted
    tree.failure = None
    (tree.root / "constraints.txt").write_text(before)
    assert (tree.run(), tree.calls) == (0, calls)


def test_venv_made_by_hand_is_completed(tree):
    tree.make_venv()
    (tree.root / ".venv/mine").touch()
    assert (tree.run(), tree.calls) == (0, FIRST)
    assert (tree.root / ".venv/mine").exists()


def test_lost_python_and_moved_tree_are_repaired(tree):
    tree.run()
    python = tree.root / ".venv/bin/python"
    python.unlink()
    python.symlink_to(tree.root / "no-such-python")
    assert (tree.run(), tree.calls) == (0, FIRST)
    assert python.exists()
    stamp = Path(tree.module.STAMP)
    stamp.write_text(stamp.read_text().replace(str(tree.root), "/elsewhere"))
    assert (tree.run(), tree.calls) == (0, FIRST)


def test_old_python_is_named_in_one_line(tree, capsys):
    tree.patch.setattr(sys, "version_info", (3, 8, 18))
    assert (tree.run(), tree.calls) == (1, [])
    expected = "ignite-ddl needs Python 3.11 or newer; python3 is 3.8.18. Try: make lab PYTHON=python3.12\n"
    assert capsys.readouterr().err == expected
    assert not (tree.root / ".venv").exists()


def test_working_venv_is_kept_unless_a_python_is_chosen(tree):
    tree.run()
    tree.patch.setattr(sys, "version_info", (3, 8, 18))
    assert (tree.run(), tree.calls) == (0, [])
    assert (tree.run("--chosen", "--name", "python3.8"), tree.calls) == (1, [])


def test_missing_venv_module_says_what_to_install(tree, capsys):
    tree.patch.setitem(sys.modules, "ensurepip", None)
    assert tree.run() == 1
    major, minor = sys.version_info[:2]
    assert f"sudo apt install python{major}.{minor}-venv" in capsys.readouterr().err


def test_small_disk_is_refused_before_anything_is_made(tree, capsys):
    tree.free(2)
    assert (tree.run(), tree.calls) == (1, [])
    assert "Set-up needs about 3 GB here and 2.0 GB are free" in capsys.readouterr().err
    assert not (tree.root / ".venv").exists()


@pytest.mark.parametrize(("config", "status"), [("", 1), ("global.extra-index-url='file:///x'", 0)])
def test_middling_disk_needs_a_source_of_cpu_builds_on_linux(tree, capsys, config, status):
    tree.patch.setattr(sys, "platform", "linux")
    tree.replace("pip_config", lambda: config)
    tree.free(5)
    assert tree.run() == status
    assert ("PIP_EXTRA_INDEX_URL" in capsys.readouterr().err) == bool(status)
    assert tree.stamp == (not status)


def test_missing_constraints_file_is_one_line(tree, capsys):
    assert tree.run("--constraints", "no-such.txt") == 1
    assert capsys.readouterr().err == "There is no no-such.txt to install from: give CONSTRAINTS an existing file.\n"


@pytest.mark.slow
def test_no_network_is_one_line(tree, capfd):
    """The one test with a real pip: its index is a port where nobody listens."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        tree.patch.delenv(name)
    tree.patch.setenv("PIP_CONFIG_FILE", os.devnull)
    tree.patch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    tree.patch.setenv("PIP_RETRIES", "1")
    tree.replace("make_venv", tree.real_make_venv)
    tree.replace("install", tree.real_install)
    assert tree.run() == 1
    error = capfd.readouterr().err
    assert error == "pip cannot reach its package index: check the network, the proxy and PIP_INDEX_URL.\n"
    assert not tree.stamp
