"""What ranks tell each other, where each has a GPU of its own."""

import pickle
import time
from collections import defaultdict
from types import SimpleNamespace

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from ranks import run

import ignite_ddl as ddl
from ignite_ddl import collectives
from ignite_ddl.pipeline.transfer import Transfer


class OnAnotherGpu(torch.Tensor):
    """As a tensor of another rank's GPU."""

    device = property(lambda _: torch.device("cuda", 5))


def tensors():
    return {"y": [torch.arange(3.0).as_subclass(OnAnotherGpu)], "n": 3, "cpu": torch.ones(2)}


def check_arrived(value):
    assert type(value["y"][0]) is torch.Tensor
    assert (value["y"][0].device.type, value["cpu"].device.type, value["n"]) == ("meta", "cpu", 3)


@pytest.fixture
def my_gpu(monkeypatch):
    monkeypatch.setattr(idist, "device", lambda: torch.device("meta"))  # in place of this rank's GPU


def test_tensors_arrive_on_the_gpu_of_the_rank_that_reads_them(my_gpu):
    check_arrived(pickle.loads(collectives.packed(tensors())))


def test_a_dict_with_a_lambda_for_its_defaults_arrives():
    arrived = pickle.loads(collectives.packed(defaultdict(lambda: 2.0, mean=1.0)))
    assert (arrived["mean"], arrived["other"]) == (1.0, 2.0)


def test_the_last_stage_sends_its_outputs_to_the_gpus_of_its_peers(my_gpu, monkeypatch):
    sent = []
    monkeypatch.setattr(dist, "get_rank", lambda *_: len(sent))

    def broadcast(box, src, group):
        if sent:
            box[:] = sent[0]
        else:
            sent.append(pickle.loads(pickle.dumps(box)))

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    mesh = SimpleNamespace(rank=0, coordinates=lambda _: {"pp": 0}, rank_at=lambda pp: 0, pp_group=None)
    transfer = Transfer(SimpleNamespace(owners=[0]), mesh)
    own = tensors()
    assert transfer.from_last_stage(own) is own
    check_arrived(transfer.from_last_stage(None))


def of_odd_types(rank, given):
    bias = torch.nn.Parameter(torch.full((), rank, dtype=torch.float8_e4m3fn), requires_grad=False)
    layer = torch.nn.Module()
    layer.register_parameter("bias", bias)
    return given, collectives.gathered_values((given, bias)), [str(found) for found in ddl.check_in_sync(layer)]


def test_types_of_tensors_that_torch_cannot_unpickle():
    given = torch.arange(6).to(torch.uint16).view(2, 3).T, torch.empty(0, 3, dtype=torch.complex32)
    for back, gathered, out_of_sync in run(of_odd_types, 2, given, dp=2):
        for found in (back, *(of_rank for of_rank, _ in gathered)):
            assert [(t.dtype, t.tolist()) for t in found] == [(t.dtype, t.tolist()) for t in given]
        assert [(type(bias), float(bias)) for _, bias in gathered] == [(torch.nn.Parameter, 0), (torch.nn.Parameter, 1)]
        assert out_of_sync == ["bias: ranks 0 | 1 differ by up to 1"]


def meets_again(rank):
    """Rank 0 is alone at first, and handles the error; rank 1 comes late, so that its call is met by the next one."""
    if rank == 0:
        with pytest.raises(ValueError, match="but some did not call it within 0.2 s: call it"):
            collectives.meet("a call", 0.2, "call it")
    dist.barrier()
    for seconds in (0.3, 0.0):
        if rank == 0:
            time.sleep(seconds)
        start = time.monotonic()
        collectives.meet("a call", 60, "call it")
        waited = time.monotonic() - start
        assert waited > 0.1 or rank == 0 or not seconds
    return collectives._meetings["a call"]


def test_a_meeting_that_failed_is_held_again():
    assert run(meets_again, 2) == [2, 2]


SCRIPT = """
import enum
from typing import NamedTuple


class Kind(enum.Enum):
    A = 1


class Point(NamedTuple):
    x: int
    kind: Kind


def on_a_rank(rank):
    found = gathered_values(Point(rank, Kind.A))
    return [type(p) is Point and p.kind is Kind.A and p.x for p in found], value_of(0, Point(5, Kind.A)).x
"""


def test_a_class_of_the_script_stays_itself():
    script = {"__name__": "__main__", **{name: getattr(collectives, name) for name in ("gathered_values", "value_of")}}
    exec(SCRIPT, script)
    assert run(script["on_a_rank"], 2) == [([0, 1], 5)] * 2
