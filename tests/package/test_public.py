"""The public names: what `ddl.<tab>` shows, and keywords that are misspelt."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ignite_ddl as ddl
from ignite_ddl.data import LoaderOptions
from ignite_ddl.model import DDPOptions


def test_dir_and_tab_show_the_public_names():
    assert dir(ddl) == sorted(ddl.__all__)
    assert all(getattr(ddl, name) is not None for name in ddl.__all__)
    jedi = pytest.importorskip("jedi")
    shown = {name.name for name in jedi.Interpreter("ddl.", [{"ddl": ddl}]).complete()}
    assert {name for name in shown if not name.startswith("__")} == set(ddl.__all__)


def test_a_misspelt_name_is_an_error():
    with pytest.raises(AttributeError, match="has no attribute 'auto_modle'"):
        _ = ddl.auto_modle


def test_names_that_are_imported_late_are_those_that_checkers_see():
    # In a new process: nothing else has imported them.
    code = (
        "import ignite_ddl as d; a = set(vars(d)); late = set(d.__all__) - a; assert late == set(d._LATE); print(*late)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    source = inspect.getsource(ddl)
    seen = source[source.index("if TYPE_CHECKING") : source.index("else:")]
    assert all(f" {name}" in seen for name in done.stdout.split())
    assert len(done.stdout.split()) > 3


def with_keywords():
    for name in ddl.__all__:
        thing = getattr(ddl, name)
        if not callable(thing) or name in ("lazy", "HangReport", "Mesh", "OutOfSync", "ParityReport", "UnlikeCalls"):
            continue  # lazy hands them on; the others are what functions return
        named = [p for p in inspect.signature(thing).parameters.values() if p.kind in (1, 3)]
        if named and not (isinstance(thing, type) and issubclass(thing, BaseException)):
            yield pytest.param(thing, max((p.name for p in named), key=lambda name: (len(name), name)), id=name)


@pytest.mark.parametrize(("function", "keyword"), list(with_keywords()))
def test_a_misspelt_keyword_is_named_with_the_nearest_right_one(function, keyword):
    wrong = keyword[:-2] + keyword[-1] if len(keyword) > 2 else keyword + keyword[-1]
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got .* '{wrong}'\. Did you mean '{keyword}'\?$"):
        function(**{wrong: 1})


@pytest.mark.parametrize(
    ("call", "wrong", "right"),
    [
        (lambda **k: ddl.auto_model(torch.nn.Linear(2, 2), **k), "find_unused_parameter", "find_unused_parameters"),
        (lambda **k: ddl.auto_dataloader([1, 2], **k), "batch_sise", "batch_size"),
        (lambda **k: ddl.Column(**k), "output_layout", "output_layouts"),
        (lambda **k: ddl.MeshEngine(lambda *_: None).run([1], **k), "max_epoch", "max_epochs"),
        (lambda **k: ddl.Checkpoint.load_newest({}, "x", **k), "stric", "strict"),
    ],
)
def test_so_are_keywords_that_are_handed_on_and_those_of_methods(call, wrong, right):
    with pytest.raises(TypeError, match=f"'{wrong}'. Did you mean '{right}'"):
        call(**{wrong: 1})


def test_a_keyword_like_no_other_lists_those_that_there_are():
    with pytest.raises(
        TypeError, match=r"auto_dataloader\(\) got .* 'zzz'; it has batch_sampler, batch_size, .*shuffle"
    ):
        ddl.auto_dataloader([1, 2], zzz=1)
    with pytest.raises(TypeError, match="it has .*servers, start_method") as refused:
        ddl.Parallel(zzz=1)
    assert "self" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "function", "more"),
    [(LoaderOptions, DataLoader, {"dataset"}), (DDPOptions, DistributedDataParallel, {"module"})],
)
def test_what_is_handed_on_is_what_torch_takes(options, function, more):
    assert set(inspect.signature(function).parameters) - more <= set(options.__annotations__)
