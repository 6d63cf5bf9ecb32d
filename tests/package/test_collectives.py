"""What ranks tell each other, where each has a GPU of its own."""

import pickle
from types import SimpleNamespace

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist

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
