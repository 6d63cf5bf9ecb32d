"""count_bytes sees every way of communicating, counts its payload, and counts nothing that is not sent."""

import logging
import pickle
import warnings

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from ignite_ddl.course import on_ranks
from ignite_ddl.lab import cost
from ignite_ddl.lab.bytes import Call, Traffic, count_bytes

WORLD = (0, 1, 2, 3)
PICKLED = pickle.dumps(["x"])


def ones(n):
    return torch.ones(n)


def four():
    return [torch.zeros(3) for _ in range(4)]


def root(values):
    return values if dist.get_rank() == 0 else None


def pass_around():
    """A message to the next rank and one from the one before, as a ring sends them."""
    rank = dist.get_rank()
    send = dist.P2POp(dist.isend, ones(3), (rank + 1) % 4)
    receive = dist.P2POp(dist.irecv, torch.zeros(3), (rank - 1) % 4)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def one_message(source=0):
    if dist.get_rank() == 0:
        dist.send(ones(3), dst=1)
    elif dist.get_rank() == 1:
        dist.recv(torch.zeros(3), src=source)


def coalesced():
    with dist._coalescing_manager():
        dist.all_reduce(ones(3))
        dist.all_reduce(ones(4))


# name: (what is called, (operation, bytes put in, bytes got) of each call on rank 0, and on rank 1)
PLAIN = {
    "all_reduce": (lambda: dist.all_reduce(ones(3)), [("all_reduce", 12, 12)], None),
    "async": (lambda: dist.all_reduce(ones(3), async_op=True).wait(), [("all_reduce", 12, 12)], None),
    "float64": (lambda: dist.all_reduce(ones(3).double()), [("all_reduce", 24, 24)], None),
    "coalesced": (coalesced, [("all_reduce", 28, 28)], None),
    "idist number": (lambda: idist.all_reduce(1), [("all_reduce", 8, 8)], None),
    "idist all_gather": (lambda: idist.all_gather(ones(3)), [("all_gather", 12, 48)], None),
    "all_gather": (lambda: dist.all_gather(four(), ones(3)), [("all_gather", 12, 48)], None),
    "into": (lambda: dist.all_gather_into_tensor(ones(12), ones(3)), [("all_gather", 12, 48)], None),
    "broadcast": (lambda: dist.broadcast(ones(3), 0), [("broadcast", 12, 0)], [("broadcast", 0, 12)]),
    "idist broadcast": (lambda: idist.broadcast(ones(3), 1), [("broadcast", 0, 12)], [("broadcast", 12, 0)]),
    "reduce": (lambda: dist.reduce(ones(3), 1), [("reduce", 12, 0)], [("reduce", 12, 12)]),
    "gather": (lambda: dist.gather(ones(3), root(four())), [("gather", 12, 48)], [("gather", 12, 0)]),
    "scatter": (lambda: dist.scatter(ones(3), root(four())), [("scatter", 48, 12)], [("scatter", 0, 12)]),
    "reduce_scatter": (lambda: dist.reduce_scatter(ones(3), four()), [("reduce_scatter", 48, 12)], None),
    "tensor": (lambda: dist.reduce_scatter_tensor(ones(3), ones(12)), [("reduce_scatter", 48, 12)], None),
    "all_to_all": (lambda: dist.all_to_all_single(ones(12), ones(12)), [("all_to_all", 48, 48)], None),
    "barrier": (idist.barrier, [("barrier", 0, 0)], None),
    "monitored": (dist.monitored_barrier, [("barrier", 0, 0)], None),
    "message": (one_message, [("send", 12, 0)], [("recv", 0, 12)]),
    "from anybody": (lambda: one_message(None), [("send", 12, 0)], [("recv", 0, 12)]),
    "messages": (pass_around, [("send", 12, 0), ("recv", 0, 12)], None),
    "objects": (
        lambda: idist.all_gather(["x"]),
        [("all_gather", 8, 32), ("all_gather", len(PICKLED), 4 * len(PICKLED))],
        None,
    ),
    "no collective": (lambda: (ones(3) @ ones(3)).item(), [], None),
}


def in_ddp():
    logging.disable(logging.INFO)
    model = idist.auto_model(torch.nn.Linear(3, 2))  # 8 numbers
    with count_bytes() as traffic:
        for _ in range(3):
            model(ones(3)).sum().backward()
    return traffic.of("all_reduce")


def in_dtensor():
    logging.disable(logging.WARNING)
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(ones(32).reshape(8, 4), mesh, [Shard(0)])  # 32 bytes a rank
    with count_bytes() as traffic:
        x.full_tensor()  # gathers
        (x.t() @ x).full_tensor()  # adds up 16 numbers
    return traffic


def in_fsdp():
    model = torch.nn.Linear(8, 4)  # 36 numbers, 9 a rank
    fully_shard(model)
    with count_bytes() as traffic:
        model(ones(8)).sum().backward()
    return traffic


def in_functional():
    world, x = dist.group.WORLD, torch.ones(4, requires_grad=True)
    with count_bytes() as traffic:
        funcol.broadcast(ones(3), 1, world).sum()
        funcol.all_to_all_single(ones(4), None, None, world).sum()
        funcol.all_gather_tensor_autograd(x, 0, world).square().sum().backward()  # a contiguous gradient
    return traffic


OVER_ALL = [("all_to_all", 16, 16), ("all_gather", 16, 64), ("reduce_scatter", 64, 16)]
LIBRARIES = {  # as in PLAIN, but for functions that count by themselves
    "ddp": (in_ddp, [("all_reduce", 32, 32)] * 3, None),
    "dtensor": (in_dtensor, [("all_gather", 32, 128), ("all_reduce", 64, 64)], None),
    "fsdp": (in_fsdp, [("all_gather", 36, 144), ("reduce_scatter", 144, 36)], None),
    "functional": (in_functional, [("broadcast", 0, 12), *OVER_ALL], [("broadcast", 12, 0), *OVER_ALL]),
}


def count_all(rank):
    warnings.simplefilter("ignore")  # of names that newer versions of torch deprecate
    found = {}
    for name, (call, _, _) in PLAIN.items():
        with count_bytes() as traffic:
            call()
        found[name] = traffic
    return found | {name: library() for name, (library, _, _) in LIBRARIES.items()}


@pytest.fixture(scope="module")
def plain():
    return on_ranks(4, count_all)


@pytest.mark.parametrize("name", PLAIN | LIBRARIES)
def test_payload(plain, name):
    _, rank_0, rank_1 = (PLAIN | LIBRARIES)[name]
    for found, expected in zip(plain, (rank_0, rank_1 or rank_0), strict=False):
        traffic = found[name]
        assert [(call.op, call.put_in, call.got) for call in traffic.calls] == expected
        assert traffic.put_in == sum(put_in for _, put_in, _ in expected)
        assert traffic.got == sum(got for _, _, got in expected)
        assert all(call.ranks == WORLD for call in traffic.calls)


def test_peers(plain):
    assert [call.peer for call in plain[0]["message"].calls] == [1]
    assert [call.peer for call in plain[1]["message"].calls] == [0]
    assert [call.peer for call in plain[1]["from anybody"].calls] == [None]
    assert [[call.peer for call in found["messages"].calls] for found in plain] == [[1, 3], [2, 0], [3, 1], [0, 2]]
    assert [call.peer for call in plain[0]["all_reduce"].calls] == [None]


def in_a_group(rank):
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    with count_bytes() as traffic:
        idist.all_reduce(ones(3), group=group)
        dist.broadcast(ones(3), src=3, group=group)  # a global rank
        if rank == 1:
            dist.send(ones(2), dst=3, group=group)
        else:
            dist.recv(ones(2), src=1, group=group)
    return traffic


def test_a_group_is_named_by_global_ranks():
    _, low, _, high = on_ranks(4, in_a_group)
    assert low.calls == [
        Call("all_reduce", 12, 12, (1, 3)),
        Call("broadcast", 0, 12, (1, 3)),
        Call("send", 8, 0, (1, 3), peer=3),
    ]
    assert high.calls == [
        Call("all_reduce", 12, 12, (1, 3)),
        Call("broadcast", 12, 0, (1, 3)),
        Call("recv", 0, 8, (1, 3), peer=1),
    ]


def in_a_pipeline(rank):
    layer = torch.nn.Linear(4, 4)
    stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=lambda y, _: y.sum())
    x = ones(16).reshape(4, 4)
    schedule.step(x) if rank == 0 else schedule.step(target=x)  # shapes are inferred in the first step
    with count_bytes() as traffic:
        schedule.step(x) if rank == 0 else schedule.step(target=x)
    return traffic


def test_a_pipeline_sends_activations_on_and_gradients_back():
    for rank, traffic in enumerate(on_ranks(2, in_a_pipeline)):
        assert [call.put_in for call in traffic.of("send").calls] == [32, 32]  # a microbatch of 2 × 4 numbers
        assert [call.got for call in traffic.of("recv").calls] == [32, 32]
        assert {call.peer for call in traffic.calls} == {1 - rank}


def nested(rank):
    with count_bytes() as outer:
        idist.all_reduce(1)
        with count_bytes() as inner:
            idist.barrier()
            during = len(inner)
        idist.all_reduce(2)
    idist.all_reduce(3)  # after both
    return outer.ops, inner.ops, during


def test_counters_nest_and_can_be_read_meanwhile():
    assert on_ranks(2, nested) == [(["all_reduce", "barrier", "all_reduce"], ["barrier"], 1)] * 2


def test_traffic_can_be_filtered_without_ranks():
    traffic = Traffic([Call("send", 12, 0, (0, 1), 1), Call("recv", 0, 8, (0, 1), 1), Call("barrier", 0, 0, (0, 1))])
    assert (traffic.put_in, traffic.got, len(traffic)) == (12, 8, 3)
    assert traffic.of("send", "barrier").ops == ["send", "barrier"]
    assert traffic.of("all_reduce").calls == []


def test_a_ring_passes_all_but_a_part_of_the_whole_tensor_and_an_all_reduce_takes_two_passes():
    calls = [Call("all_reduce", 48, 48, WORLD), Call("reduce_scatter", 48, 12, WORLD)]
    calls.append(Call("all_gather", 12, 48, WORLD))
    assert [call.on_a_ring for call in calls] == [72, 36, 36]
    assert Traffic(calls).on_a_ring == 144
    assert Traffic(calls * 2).volume == {"all_gather": 96, "all_reduce": 96, "reduce_scatter": 96}
    assert calls[0].on_a_ring == cost.all_reduce_ring(4, 48, cost.Link(0, 1)).bytes[0]
    with pytest.raises(ValueError, match="op should be one of all_reduce, .*, but is send"):
        _ = Call("send", 12, 0, (0, 1), 1).on_a_ring


def test_an_unknown_collective_is_an_error():
    def unknown(rank):
        from ignite_ddl.lab import bytes as counting

        del counting._NAMES["allreduce"]
        with pytest.raises(NotImplementedError, match="does not know c10d.allreduce_"), count_bytes():
            idist.all_reduce(1)

    on_ranks(2, unknown)
