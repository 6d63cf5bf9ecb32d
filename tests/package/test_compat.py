"""What breaks when idist, Ignite or torch meet a world that is not pure data parallel.

Each plain way is wrong, in the way asserted: where a new release of Ignite or torch mends it, the test fails and ddl
may drop its own way, which other files here show to be right on the same ground. What can run together runs in one
launch of dp2 × tp2. What breaks ties, norms and sums of gradients is among parity.py's wrong variants.
"""

import inspect
import os
import warnings
from unittest import mock

import ignite.distributed as idist
import ignite.distributed.utils as idist_utils
import pytest
import torch
import torch.distributed as dist
from ignite.distributed.comp_models.base import _SerialModel
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import EarlyStopping, TerminateOnNan
from ignite.metrics import Accuracy, ConfusionMatrix, EpochMetric, Frequency
from ranks import launch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import RandomSampler, TensorDataset

import ignite_ddl as ddl

pytestmark = pytest.mark.slow
DP, TP = 2, 2
SECONDS = 0.5  # what Frequency's clock shows


def blocks(function, where, **mesh):
    """Asserts that the ranks hang at ``where``: a run's time-out shows the stack; a busy machine needs a longer one."""
    for timeout in (2, 6, 18):
        with pytest.raises(ddl.RankError, match=f"did not finish within {timeout} s") as error:
            launch(mesh, function, timeout=timeout)
        if where in str(error.value):
            return
    pytest.fail(f"not in {where}: {error.value}")


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 4).double()


def rows(n, *sizes):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(n, size, generator=generator, dtype=torch.double) for size in sizes)


@pytest.fixture(scope="module")
def seen():
    """What the ranks of dp2 × tp2 saw: for each break's name, a list by rank."""

    def all_breaks(local_rank):
        return {function.__name__: function() for function in IN_RANKS}

    results = launch({"dp": DP, "tp": TP}, all_breaks)
    return {name: [result[name] for result in results] for name in results[0]}


# ------------------------------------------------------------------------------------------------- the loader


def loader():
    plain = idist.auto_dataloader(torch.arange(8), batch_size=8, shuffle=False)
    return [batch.tolist() for batch in plain]


def test_tp_peers_see_other_rows(seen):
    """``idist.auto_dataloader`` divides the batch by the world and shards by global rank."""
    assert seen["loader"] == [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]]  # ranks 0 and 1 are tp peers


def padding():
    """10 rows on 4 data-parallel ranks; a model that is right on rows 0 and 1 only; one step of SGD."""
    right = TensorDataset(torch.eye(2)[[0] * 2 + [1] * 8], torch.zeros(10, dtype=torch.long))
    Accuracy().attach(engine := Engine(lambda engine, batch: batch), "accuracy")
    engine.run(idist.auto_dataloader(right, batch_size=12, shuffle=False))
    batches = idist.auto_dataloader(TensorDataset(*rows(10, 3, 4)), batch_size=12, shuffle=False)
    model = idist.auto_model(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    create_supervised_trainer(model, optimizer, nn.functional.mse_loss).run(batches)
    return engine.state.metrics["accuracy"], model.module.weight.detach()


def test_padding_counts_rows_twice(seen):
    """``idist.auto_dataloader`` pads 10 rows to 12 on 4 ranks: metrics and gradients count two rows twice."""
    model = linear()
    x, y = rows(10, 3, 4)
    nn.functional.mse_loss(model(x), y).backward()
    for accuracy, weight in seen["padding"]:
        assert accuracy == 4 / 12
        assert (weight - (model.weight - model.weight.grad)).abs().max() > 1e-3


def epochs():
    data, found = torch.arange(64), []
    for options in ({"shuffle": True}, {"sampler": RandomSampler(data, generator=torch.Generator())}):
        torch.manual_seed(5)
        plain = idist.auto_dataloader(data, batch_size=64, **options)
        found.append([([batch.tolist() for batch in plain], float(torch.rand(()))) for epoch in range(2)])
    return found


def test_epochs_and_the_random_stream_repeat(seen):
    """Nobody calls ``set_epoch`` for idist's loader; ``DistributedProxySampler`` reseeds the global generator."""
    for (first, second), (drawn, drawn_again) in seen["epochs"]:
        assert first[0] == second[0]
        assert drawn[1] == drawn_again[1]


# -------------------------------------------------------------------------------------------------- the model


def shards():
    """A linear layer cut over tp by hand, then wrapped over the world."""
    mesh = ddl.get_mesh()
    mine = nn.Linear(3, 2).double()
    with torch.no_grad():
        mine.weight.copy_(linear().weight.chunk(TP)[mesh.tp_rank])
    before = mine.weight.detach().clone()
    idist.auto_model(mine)
    cut = parallelize_module(nn.Sequential(linear()), mesh.device_mesh["tp"], {"0": ColwiseParallel()})
    with pytest.raises(NotImplementedError, match=r"broadcast_.* does not have a sharding strategy"):
        idist.auto_model(cut)
    return before, mine.weight.detach()


def test_ddp_over_the_world_overwrites_shards(seen):
    """``idist.auto_model`` gives every rank rank 0's shard where shapes agree, and refuses DTensors."""
    for rank, (before, overwritten) in enumerate(seen["shards"]):
        assert torch.equal(overwritten, seen["shards"][0][0])
        assert torch.equal(overwritten, before) == (rank % TP == 0)  # the other half is lost


def lost_parameters():
    """One step on a model of DTensors in DDP with ``device_mesh=``."""
    mesh = ddl.get_mesh()
    x, y = (t.chunk(DP)[mesh.dp_rank] for t in rows(4, 3, 3))
    model = nn.Sequential(linear(), nn.Linear(4, 3).double())
    parallelize_module(model, mesh.device_mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    parameters = list(model.parameters())
    plain = DistributedDataParallel(model, device_mesh=mesh.device_mesh["dp"])
    counts = [len(list(plain.parameters()))]
    loss = nn.functional.mse_loss(plain(x), y)
    counts += [len(list(plain.parameters())), len(plain.state_dict())]
    loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    return counts, norm, all(p.grad is None for p in parameters)


def test_ddp_with_a_device_mesh_loses_parameters(seen):
    """``DistributedDataParallel(device_mesh=)`` over DTensors: after one forward pass nothing is left to train."""
    assert seen["lost_parameters"] == [([4, 0, 0], 0, True)] * 4


def four_layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(4)]


def ddp_in_a_pipeline(local_rank):
    mesh = ddl.get_mesh()
    own = [mesh.pp_rank, mesh.pp_rank + 2]
    layers = [DistributedDataParallel(four_layers()[s], process_group=mesh.dp_group) for s in own]
    stages = [
        PipelineStage(layer, s, 4, torch.device("cpu"), group=mesh.pp_group)
        for layer, s in zip(layers, own, strict=True)
    ]
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    x, y = (tensor.chunk(DP)[mesh.dp_rank] for tensor in rows(8, 4, 4))
    schedule.step(*([x] if 0 in own else []), target=y if 3 in own else None)
    return {s: layer.module[0].weight.grad for s, layer in zip(own, layers, strict=True)}


def test_ddp_in_a_zero_bubble_pipeline_averages_nothing():
    """Its weight gradients come in a pass of their own, which DDP does not see: dp ranks keep theirs, silently."""
    whole = nn.Sequential(*four_layers())
    x, y = rows(8, 4, 4)
    nn.functional.mse_loss(whole(x), y).backward()
    errors = [
        (grad - whole[s][0].weight.grad).abs().max()
        for gradients in launch({"dp": DP, "pp": 2}, ddp_in_a_pipeline)
        for s, grad in gradients.items()
    ]
    assert max(errors) > 1e-3


# ---------------------------------------------------------------------------------------------------- metrics


def metrics():
    """The same metrics on Ignite's engine, before and after a model was cut; tp peers share rows."""
    mesh, results = ddl.get_mesh(), []
    batch = torch.eye(2)[[0, mesh.dp_rank, 1]], torch.tensor([0, 0, 0])
    clock = mock.Mock(**{"value.return_value": SECONDS})
    with mock.patch("ignite.metrics.frequency.Timer", return_value=clock):
        for is_cut in (False, True):
            if is_cut:
                ddl.auto_model(nn.Sequential(linear()), tensor_plan={"0": ddl.Column()})
            engine = Engine(lambda engine, batch: batch)
            confusion = ConfusionMatrix(num_classes=2)
            confusion.attach(engine, "confusion")
            Frequency(output_transform=lambda output: len(output[1])).attach(engine, "rows per second")
            EpochMetric(lambda predicted, _: len(predicted)).attach(engine, "rows of the epoch")
            found = engine.run([batch]).metrics
            states = next(iter(confusion.state_dict().values()))
            counts = found["rows per second"], found["rows of the epoch"]
            results.append((found["confusion"].tolist(), *counts, len(states)))
    return results


def test_metrics_count_replicas(seen):
    """Metrics, ``Frequency``, ``state_dict`` reduce over the world: each row would count once for each tp peer.

    They do so on Ignite's own Engine until ``ddl.auto_model`` has cut a model; from then on they count on it, too.
    """
    for before, after in seen["metrics"]:
        assert before == ([[6, 6], [0, 0]], 2 * DP * 3 / SECONDS, 2 * DP * 3, DP * TP)
        assert after == ([[3, 3], [0, 0]], DP * 3 / SECONDS, DP * 3, DP)


def last_stage_only(local_rank):
    """Outputs arise on the last stage, so the metric is attached there: its all-reduce waits for stage 0."""
    engine = Engine(lambda engine, batch: (torch.eye(2), torch.tensor([0, 0])))
    if ddl.get_mesh().pp_rank == 1:
        Accuracy().attach(engine, "accuracy")
    engine.run([0])


def test_a_metric_on_the_last_stage_only_blocks():
    blocks(last_stage_only, pp=2, where="_do_all_reduce")


# ------------------------------------------------------------------------------------------------ collectives


def string_in_a_group(local_rank):
    if ddl.get_mesh().tp_rank == 0:
        idist.all_gather("of a rank", group=ddl.get_mesh().dp_group)


def test_all_gather_of_a_string_in_a_group():
    """With ``group=``, idist finds the longest string of the world, not of the group: the group blocks."""
    blocks(string_in_a_group, dp=DP, tp=TP, where="_get_max_length")


def first_call(local_rank, through_ddl=False):
    """A process group that idist has not looked at, on ranks that no launcher told their place on the machine."""
    os.environ.pop("LOCAL_RANK")
    idist_utils._model, idist_utils._need_to_sync = _SerialModel(), True
    if through_ddl:
        ddl.initialize_mesh(dp=2)
    return idist.get_world_size() if dist.get_rank() == 0 else None


def test_first_call_on_a_group_made_elsewhere():
    """idist's first call gathers host names over the world, so on one rank it blocks; ddl's mesh does it for all."""
    blocks(first_call, dp=2, where="_get_all_hostnames")
    assert launch({"dp": 2}, first_call, True) == [2, None]


def groups():
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        for _ in range(3):
            idist.all_reduce(1, group=[0, 1, 2, 3])
    return made.call_count


def test_collectives_without_a_group(seen):
    """idist's broadcast, barrier and one_rank_only take no group; a list as group makes a new group each time."""
    for function in (idist.broadcast, idist.barrier, idist.one_rank_only):
        assert "group" not in inspect.signature(function).parameters
    assert "group" in inspect.signature(idist.all_reduce).parameters
    assert seen["groups"] == [3] * 4


# --------------------------------------------------------------------------------------------------- handlers


def early_stopping():
    """A score that falls on dp rank 0 from the second value on, on dp rank 1 from the fifth."""
    values = [[3, 2, 1, 0, -1, -2, -3, -4], [0, 2, 3, 4, 3, 2, 1, 0]][ddl.get_mesh().dp_rank]
    trainer = Engine(lambda engine, batch: None)
    evaluator = Engine(lambda engine, batch: float(batch))
    stopping = EarlyStopping(2, lambda engine: engine.state.output, trainer)
    evaluator.add_event_handler(Events.COMPLETED, stopping)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: evaluator.run([values[engine.state.iteration - 1]])
    )
    return trainer.run(range(8)).iteration


def test_early_stopping_on_local_values(seen):
    """Ranks that decide on their own values stop apart, and the next collective of the others blocks."""
    assert seen["early_stopping"] == [3, 3, 6, 6]


def nan():
    x, y = rows(4, 3, 4)
    x[3] = torch.nan  # in the second global batch of 2, on dp rank 1
    model, data = linear(), ddl.auto_dataloader(TensorDataset(x, y), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    engine = Engine(lambda engine, batch: None)  # a stage without the loss
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    with pytest.raises(TypeError):
        engine.run([0])
    return trainer.run(data, max_epochs=2).iteration


def test_terminate_on_nan_on_local_values(seen):
    """Ignite's trainer knows its own rows' loss: only the dp rank with the NaN stops. None as output raises."""
    assert seen["nan"] == [4, 4, 2, 2]


IN_RANKS = (loader, padding, epochs, shards, lost_parameters, metrics, groups, early_stopping, nan)
