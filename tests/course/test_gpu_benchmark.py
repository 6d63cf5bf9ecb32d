"""What chapter 02 keeps for a GPU, run without one.

benchmarks/gpu.py runs on the CPU, refuses to pass that off as a result, and the chapter shows what it writes. The
chapter's own GPU cells run with the CPU in the GPU's place: that finds what is misspelt, not what a GPU does.
"""

import json
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import nbformat
import pytest
import torch

from ignite_ddl.course import median_seconds
from ignite_ddl.course.recorded import PATH, gpu_here, recorded

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")  # its ranks are started by name
        import gpu

        yield gpu


@pytest.fixture(scope="module")
def record(benchmark, tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "cpu.json"
    benchmark.main(["--device", "cpu", "--output", str(path), "--size", "0.001"])
    return json.loads(path.read_text())


def test_every_section_measures_something(record):
    assert list(record["results"]) == ["copies", "timing", "pinned", "memory", "amp", "nccl"]
    for rows in record["results"].values():
        assert rows
        for name, value, unit in rows:
            assert name
            assert isinstance(value, str) or (value > 0 and unit) or name.startswith("a copy of")


def test_ranks_on_one_device_add_up(record):
    one, four, two = record["results"]["nccl"]
    assert one[1] == "1"
    assert four[1] == "10"
    assert two[1] == "3"  # gloo in NCCL's place


def test_a_rank_that_fails_is_quoted(benchmark, tmp_path):
    answers = SimpleQueue()
    benchmark._rank(0, 1, "no_such_backend", "cpu", str(tmp_path / "store"), answers)
    rank, text = answers.get_nowait()
    assert rank == 0
    assert "no_such_backend" in text.lower()


def test_numbers_of_a_cpu_are_no_recorded_results(benchmark, record, tmp_path, capsys):
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="measured on 'cpu'"):
        recorded("copies", path)
    for arguments in (["--device", "cpu"], ["--device", "cpu", "--output", str(PATH)]):
        with pytest.raises(SystemExit):
            benchmark.main(arguments)
        assert "no recorded results" in capsys.readouterr().err


def test_recorded_results_name_date_and_hardware(record, tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(record | {"device": "cuda", "hardware": "Tesla T4", "date": "2026-11-21"}))
    first, *rows = recorded("timing", path).splitlines()
    assert first.startswith("Recorded on Tesla T4, 2026-11-21, torch ")
    assert [row.split(":")[0].strip() for row in rows] == [row[0] for row in record["results"]["timing"]]
    assert all(row.endswith(" ms") for row in rows)
    with pytest.raises(ValueError, match=r"section should be one of .*'copies'.* given 'speed'"):
        recorded("speed", path)


def test_without_a_file_the_chapter_says_so(tmp_path):
    assert recorded("copies", tmp_path / "none.json").startswith("Not yet verified on a GPU")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_skipped_cell_says_why(capsys):
    assert not gpu_here("copies")
    assert capsys.readouterr().out == f"skipped: this machine has no GPU. {recorded('copies')}\n"


@pytest.mark.skipif(not PATH.exists(), reason="no GPU run has been recorded")
def test_the_recorded_file_holds_every_section():
    for section in ("copies", "timing", "pinned", "memory", "amp", "nccl"):
        assert recorded(section).startswith("Recorded on ")


CELLS = {
    section: cell.source
    for cell in nbformat.read(ROOT / "notebooks" / "02_gpu_basics.ipynb", as_version=4).cells
    for section in ("pinned", "memory")
    if cell.cell_type == "code" and f'gpu_here("{section}")' in cell.source
}


@pytest.fixture
def cpu_for_gpu(monkeypatch):
    """The names that a GPU cell finds, and the CPU where it says cuda."""
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.accelerator, name, lambda: 2**20)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    return {
        "batch": torch.randn(8, 16),
        "gpu_here": lambda section: True,
        "median_seconds": partial(median_seconds, rounds=1),
        "model": torch.nn.Linear(16, 16),
        "time": time,
        "torch": torch,
    }


@pytest.mark.parametrize("section", ["pinned", "memory"])
def test_gpu_cells_run_with_the_cpu_in_its_place(section, cpu_for_gpu, capsys):
    source = CELLS[section].replace('"cuda"', '"cpu"')
    exec(source.replace("2**28", "2**12"), cpu_for_gpu)
    assert capsys.readouterr().out.count("\n") >= 1


@pytest.mark.skipif(not PATH.exists(), reason="no GPU run has been recorded")
def test_the_recorded_memory_is_what_chapter_02_predicts_and_64_mib_of_workspaces():
    found = {name: value for name, value, _ in json.loads(PATH.read_text())["results"]["memory"]}
    moments = ("after forward", "peak", "after backward", "after the step")
    assert [round(found[moment]) - 64 for moment in moments] == [40, 60, 40, 32]
