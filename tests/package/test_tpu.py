"""The TPU's device, and the backend of the older torch_xla, which is refused without it."""

from types import SimpleNamespace

import ignite.distributed as idist
import pytest
import torch

import ignite_ddl
from ignite_ddl import tpu
from ignite_ddl.course import xla

without_xla = pytest.mark.skipif(xla.has_xla(), reason="torch_xla is installed")


@without_xla
def test_the_backend_is_refused_by_name_without_torch_xla():
    with pytest.raises(ValueError, match="backend should be one of .* but given 'xla-tpu'"):
        ignite_ddl.Parallel(backend="xla-tpu")


@without_xla
def test_the_device_is_idists():
    assert tpu.device() == idist.device()


@pytest.mark.parametrize("found", ["tpu", "cuda", None])
def test_a_tpu_of_torch_is_taken_where_torch_tpu_finds_one(found, tmp_path, monkeypatch):
    """With a stand-in for torch_tpu: that it takes a real TPU was never tried."""
    (tmp_path / "torch_tpu.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    native = found and SimpleNamespace(type=found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: native)
    monkeypatch.setattr(idist, "device", lambda: "idist's")
    assert tpu.device() is native if found == "tpu" else tpu.device() == "idist's"
