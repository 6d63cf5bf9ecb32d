"""What breaks when idist, Ignite or torch meet a world that is not pure data parallel, and ddl's way beside it.

Each test has two halves. The plain way is wrong, in the way asserted: where a new release of Ignite or torch
mends it, the test fails and ddl may drop its own way. ddl's way is right on the same data.
All that can run together runs in one launch of dp2 × tp2; each ``in_...`` function is one break's ranks' side.
What breaks ties, norms and sums of gradients is among parity.py's wrong variants.
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
from ignite.metrics import Accuracy, Average, ConfusionMatrix, EpochMetric, Frequency
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.engine import MeshEngine
from ignite_ddl.metrics import data_parallel_view, over_data_parallel

DP, TP = 2, 2
SECONDS = 0.5  # what Frequency's clock shows


def launch(function, *args, nproc=DP * TP, timeout=60, **mesh):
    return ddl.Parallel(backend="gloo", nproc_per_node=nproc, timeout=timeout, **mesh).run(function, *args)


def blocks(function, *args, where, **kwargs):
    """Asserts that the ranks hang at ``where``: a run's time-out shows the stack; a busy machine needs a longer one."""
    for timeout in (2, 6, 18):
        with pytest.raises(ddl.RankError, match=f"did not finish within {timeout} s") as error:
            launch(function, *args, timeout=timeout, **kwargs)
        if where in str(error.value):
            return
    pytest.fail(f"not in {where}: {error.value}")


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()


def plan():
    """A plan that leaves the LayerNorm out."""
    return {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": RowwiseParallel(input_layouts=Replicate()),
    }


def rows(n):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(n, size, generator=generator, dtype=torch.double) for size in (3, 2))


@pytest.fixture(scope="module")
def seen():
    """What the ranks of dp2 × tp2 saw: for each break's name, a list by rank."""

    def all_breaks(local_rank):
        return {name: function() for name, function in sorted(IN_RANKS.items())}

    results = launch(all_breaks, dp=DP, tp=TP)
    return {name: [result[name] for result in results] for name in results[0]}


IN_RANKS = {}


def on_the_mesh(function):
    IN_RANKS[function.__name__.removeprefix("in_")] = function
    return function


# ------------------------------------------------------------------------------------------------- the loader


@on_the_mesh
def in_loader():
    plain = idist.auto_dataloader(torch.arange(8), batch_size=8, shuffle=False)
    ours = ddl.auto_dataloader(torch.arange(8), batch_size=8)
    return [batch.tolist() for batch in plain], [batch.tolist() for batch in ours]


def test_tp_peers_see_the_same_rows(seen):
    """``idist.auto_dataloader`` divides the batch by the world and shards by global rank."""
    plain, ours = zip(*seen["loader"], strict=True)
    assert plain == ([[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]])  # ranks 0 and 1 are tp peers
    assert ours == ([[0, 1, 2, 3]], [[0, 1, 2, 3]], [[4, 5, 6, 7]], [[4, 5, 6, 7]])


@on_the_mesh
def in_padding():
    """10 rows on 4 data-parallel ranks; a model that is right on rows 0 and 1 only; one step of SGD."""
    mesh = ddl.initialize_mesh(dp=4)
    try:
        right = TensorDataset(torch.eye(2)[[0] * 2 + [1] * 8], torch.zeros(10, dtype=torch.long))
        plain = idist.auto_dataloader(right, batch_size=12, shuffle=False)
        accuracy = Accuracy()
        accuracy.attach(engine := Engine(lambda engine, batch: batch), "accuracy")
        ours = ddl.auto_dataloader(right, batch_size=12)
        over = over_data_parallel(Accuracy())
        over.attach(mesh_engine := MeshEngine(lambda engine, batch: batch), "accuracy")
        values = [engine.run(plain).metrics["accuracy"], mesh_engine.run(ours).metrics["accuracy"]]

        steps = []
        for package, options in ((idist, {"shuffle": False}), (ddl, {})):
            loader = package.auto_dataloader(TensorDataset(*rows(10)), batch_size=12, **options)
            model = package.auto_model(layers())
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            make = create_supervised_trainer if package is idist else ddl.create_supervised_trainer
            make(model, optimizer, nn.functional.mse_loss).run(loader)
            steps.append(ddl.full_state_dict(model)["2.weight"])
        return mesh.dp_size, values, steps
    finally:
        ddl.initialize_mesh(dp=DP, tp=TP)


def test_padding_counts_rows_twice(seen):
    """``idist.auto_dataloader`` pads 10 rows to 12 on 4 ranks: metrics and gradients count two rows twice."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = rows(10)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    weight = model[2].weight.detach()
    for dp_size, (plain, ours), (plain_weight, our_weight) in seen["padding"]:
        assert dp_size == 4
        assert plain == 4 / 12
        assert ours == 2 / 10
        assert (plain_weight - weight).abs().max() > 1e-3
        assert (our_weight - weight).abs().max() <= 1e-12


@on_the_mesh
def in_epochs():
    orders = []
    for package in (idist, ddl):
        torch.manual_seed(5)
        loader = package.auto_dataloader(torch.arange(64), batch_size=64, shuffle=True)
        orders.append([[batch.tolist() for batch in loader] for epoch in range(2)])
    drawn = []
    for package in (idist, ddl):
        torch.manual_seed(5)
        sampler = torch.utils.data.RandomSampler(torch.arange(64), generator=torch.Generator().manual_seed(1))
        loader = package.auto_dataloader(torch.arange(64), batch_size=64, sampler=sampler)
        drawn.append([(list(loader), float(torch.rand(())))[1] for epoch in range(2)])
    return orders, drawn


def test_epochs_differ_and_the_random_stream_goes_on(seen):
    """Nobody calls ``set_epoch`` for idist's loader; ``DistributedProxySampler`` reseeds the global generator."""
    for (plain, ours), (plain_drawn, our_drawn) in seen["epochs"]:
        assert plain[0] == plain[1]
        assert ours[0] != ours[1]
        assert plain_drawn[0] == plain_drawn[1]  # the user's "random" numbers repeat with every epoch
        assert our_drawn[0] != our_drawn[1]


# -------------------------------------------------------------------------------------------------- the model


@on_the_mesh
def in_shards():
    """A linear layer cut over tp by hand, then wrapped over the world; and cut by ddl."""
    mesh = ddl.get_mesh()
    whole = layers()[0]
    mine = nn.Linear(3, 2).double()
    with torch.no_grad():
        mine.weight.copy_(whole.weight.chunk(TP)[mesh.tp_rank])
    before = mine.weight.detach().clone()
    idist.auto_model(mine)
    overwritten = mine.weight.detach().clone()
    with torch.no_grad():
        mine.weight.copy_(before)
    idist.auto_model(mine, process_group=mesh.dp_group)
    kept = bool((mine.weight == before).all())

    cut = parallelize_module(nn.Sequential(layers()[0]), mesh.device_mesh["tp"], {"0": ColwiseParallel()})
    with pytest.raises(NotImplementedError, match=r"broadcast_.* does not have a sharding strategy"):
        idist.auto_model(cut)
    ours = ddl.auto_model(layers(), tensor_plan=plan())
    return before, overwritten, kept, ddl.full_state_dict(ours)


def test_ddp_over_the_world_overwrites_shards(seen):
    """``idist.auto_model`` gives every rank rank 0's shard where shapes agree, and refuses DTensors."""
    for rank, (before, overwritten, kept, ours) in enumerate(seen["shards"]):
        rank_0 = seen["shards"][0][0]
        assert bool((overwritten == rank_0).all())
        assert bool((overwritten == before).all()) == (rank % TP == 0)  # the other half is lost
        assert kept  # DDP over the data-parallel group is right for plain tensors
        for name, weight in layers().state_dict().items():
            assert bool((ours[name] == weight).all()), name


@on_the_mesh
def in_lost_parameters():
    """One step on a model of DTensors: DDP with ``device_mesh=``, and ddl. Different rows on the dp ranks."""
    mesh = ddl.get_mesh()
    x, y = (t.chunk(DP)[mesh.dp_rank] for t in rows(4))
    model = nn.Sequential(layers()[0], layers()[2])
    parallelize_module(model, mesh.device_mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plain = DistributedDataParallel(model, device_mesh=mesh.device_mesh["dp"])
    counts = [len(list(plain.parameters()))]
    loss = nn.functional.mse_loss(plain(x), y)
    counts += [len(list(plain.parameters())), len(plain.state_dict())]
    loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    idle = all(p.grad is None for p in optimizer.param_groups[0]["params"])

    model = ddl.auto_model(layers(), tensor_plan=plan())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = ddl.create_supervised_trainer(model, optimizer, nn.functional.mse_loss, max_norm=1e9)
    trainer.run(ddl.auto_dataloader(TensorDataset(*rows(4)), batch_size=4))
    ours = len(list(model.parameters())), len(model.state_dict()), trainer.state.grad_norm
    return counts, norm, idle, ours, ddl.full_state_dict(model)


def test_ddp_with_a_device_mesh_loses_parameters(seen):
    """``DistributedDataParallel(device_mesh=)`` over DTensors: after one forward pass nothing is left to train."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = rows(4)
    nn.functional.mse_loss(model(x), y).backward()
    reference = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    optimizer.step()
    for counts, norm, idle, (n_parameters, n_state, our_norm), weights in seen["lost_parameters"]:
        assert counts == [4, 0, 0]
        assert norm == 0
        assert idle  # an optimizer that was made before gets no gradient
        assert (n_parameters, n_state) == (6, 6)
        assert abs(our_norm - reference) <= 1e-12
        for name, weight in model.state_dict().items():
            assert (weights[name] - weight).abs().max() <= 1e-12, name


# --------------------------------------------------------------------------------------------- tensor parallel


def four_layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(4)]


def rows_of_four():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator, dtype=torch.double) for _ in range(2)]


def ddp_in_a_pipeline(local_rank):
    mesh = ddl.get_mesh()
    own = [mesh.pp_rank, mesh.pp_rank + 2]
    layers = [DistributedDataParallel(four_layers()[s], process_group=mesh.dp_group) for s in own]
    stages = [
        PipelineStage(layer, s, 4, torch.device("cpu"), group=mesh.pp_group)
        for layer, s in zip(layers, own, strict=True)
    ]
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    x, y = (tensor.chunk(DP)[mesh.dp_rank] for tensor in rows_of_four())
    schedule.step(*([x] if 0 in own else []), target=y if 3 in own else None)
    return {s: layer.module[0].weight.grad for s, layer in zip(own, layers, strict=True)}


def ddl_in_a_pipeline(local_rank):
    model = ddl.auto_model(
        nn.Sequential(*four_layers()), schedule="interleaved_zero_bubble", n_microbatches=4
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ddl.create_supervised_trainer(model, optimizer, nn.functional.mse_loss)
    trainer.run(ddl.auto_dataloader(TensorDataset(*rows_of_four()), batch_size=8))
    return {int(n[0]): p.grad.to_local() for n, p in model.named_parameters() if n.endswith("weight")}


def test_ddp_in_a_zero_bubble_pipeline_averages_nothing():
    """Its weight gradients come in a pass of their own, which DDP does not see: dp ranks keep theirs, silently."""
    whole = nn.Sequential(*four_layers())
    x, y = rows_of_four()
    nn.functional.mse_loss(whole(x), y).backward()
    kept = []
    for function in (ddp_in_a_pipeline, ddl_in_a_pipeline):
        errors = [
            (grad - whole[s][0].weight.grad).abs().max()
            for gradients in launch(function, dp=DP, pp=2)
            for s, grad in gradients.items()
        ]
        kept.append(max(errors))
    plain, ours = kept
    assert plain > 1e-3
    assert ours <= 1e-12


# ---------------------------------------------------------------------------------------------------- metrics


@on_the_mesh
def in_metrics():
    """The same metrics on Ignite's engine, before and after a model was cut, and on ddl's; tp peers share rows."""
    ddl.auto_model(layers(), tensor_plan=plan())

    class Untouched(Engine):
        add_event_handler = inspect.unwrap(Engine.add_event_handler)

    mesh, results = ddl.get_mesh(), []
    batch = torch.eye(2)[[0, mesh.dp_rank, 1]], torch.tensor([0, 0, 0])
    clock = mock.Mock(**{"value.return_value": SECONDS})
    with mock.patch("ignite.metrics.frequency.Timer", return_value=clock):
        for kind in (Untouched, Engine, MeshEngine):
            engine = kind(lambda engine, batch: batch)
            confusion = ConfusionMatrix(num_classes=2)
            confusion.attach(engine, "confusion")
            Frequency(output_transform=lambda output: len(output[1])).attach(engine, "rows per second")
            EpochMetric(lambda predicted, _: len(predicted)).attach(engine, "rows of the epoch")
            metrics = engine.run([batch]).metrics
            states = next(iter(confusion.state_dict().values()))
            counts = metrics["rows per second"], metrics["rows of the epoch"]
            results.append((metrics["confusion"].tolist(), *counts, len(states)))
    return results


def test_metrics_count_replicas(seen):
    """Metrics, ``Frequency``, ``state_dict`` reduce over the world: each row would count once for each tp peer.

    They do so on Ignite's own Engine until ``ddl.auto_model`` has cut a model; from then on they count on it, too.
    """
    for before, plain, ours in seen["metrics"]:
        assert before == ([[6, 6], [0, 0]], 2 * DP * 3 / SECONDS, 2 * DP * 3, DP * TP)
        assert plain == ours == ([[3, 3], [0, 0]], DP * 3 / SECONDS, DP * 3, DP)


def last_stage_only(local_rank):
    """Outputs arise on the last stage, so the metric is attached there: its all-reduce waits for stage 0."""
    engine = Engine(lambda engine, batch: (torch.eye(2), torch.tensor([0, 0])))
    if ddl.get_mesh().pp_rank == 1:
        Accuracy().attach(engine, "accuracy")
    return engine.run([0]).metrics


def all_stages(local_rank):
    linear = nn.Linear(2, 2, bias=False)
    nn.init.eye_(linear.weight)
    model = ddl.auto_model(nn.Sequential(linear, nn.Identity()))
    loader = ddl.auto_dataloader(TensorDataset(torch.eye(2), torch.tensor([0, 0])), batch_size=2)
    evaluator = ddl.create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})
    return evaluator.run(loader).metrics


@pytest.mark.slow
def test_a_metric_on_the_last_stage_only_blocks():
    blocks(last_stage_only, nproc=2, pp=2, where="_do_all_reduce")
    assert launch(all_stages, nproc=2, pp=2) == [{"accuracy": 0.5}] * 2


# ------------------------------------------------------------------------------------------------ collectives


def string_in_a_group(local_rank, view):
    mesh = ddl.get_mesh()
    group = mesh.dp_group
    if mesh.tp_rank == 1:
        return None
    if not view:
        return idist.all_gather(f"dp {mesh.dp_rank}", group=group)
    with data_parallel_view():
        return idist.all_gather(f"dp {mesh.dp_rank}")


@pytest.mark.slow
def test_all_gather_of_a_string_in_a_group():
    """With ``group=``, idist finds the longest string of the world, not of the group: the group blocks."""
    blocks(string_in_a_group, False, dp=DP, tp=TP, where="_get_max_length")
    strings = ["dp 0", "dp 1"]
    assert launch(string_in_a_group, True, dp=DP, tp=TP) == [strings, None, strings, None]


def first_call(local_rank, package):
    """A process group that idist has not looked at, on ranks that no launcher told their place on the machine."""
    os.environ.pop("LOCAL_RANK")
    idist_utils._model, idist_utils._need_to_sync = _SerialModel(), True
    if package == "ddl":
        ddl.initialize_mesh(dp=2)
    return idist.get_world_size() if dist.get_rank() == 0 else None


@pytest.mark.slow
def test_first_call_on_a_group_made_elsewhere():
    """idist's first call gathers host names over the world, so on one rank it blocks; ddl's mesh does it for all."""
    blocks(first_call, "idist", nproc=2, where="_get_all_hostnames")
    assert launch(first_call, "ddl", nproc=2) == [2, None]


@on_the_mesh
def in_groups():
    mesh = ddl.get_mesh()
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        for _ in range(3):
            idist.all_reduce(1, group=[0, 1, 2, 3])
        plain_made = made.call_count
        with data_parallel_view():
            for _ in range(3):
                idist.all_reduce(1)
        ours_made = made.call_count - plain_made
    plain = idist.broadcast(10 * mesh.rank, src=1)
    with data_parallel_view():
        ours = idist.broadcast(10 * mesh.rank, src=1)
    return plain_made, ours_made, plain, ours


def test_collectives_without_a_group(seen):
    """idist's broadcast, barrier and one_rank_only take no group; a list as group makes a new group each time."""
    for function in (idist.broadcast, idist.barrier, idist.one_rank_only):
        assert "group" not in inspect.signature(function).parameters
    assert "group" in inspect.signature(idist.all_reduce).parameters
    for rank, (plain_made, ours_made, plain, ours) in enumerate(seen["groups"]):
        assert (plain_made, ours_made) == (3, 0)
        assert plain == 10  # rank 1's, which is no dp peer of ranks 0 and 2
        assert ours == 10 * (2 + rank % TP)  # that of dp rank 1


# --------------------------------------------------------------------------------------------------- handlers


@on_the_mesh
def in_early_stopping():
    """A score that falls on dp rank 0 from the second value on, on dp rank 1 from the fifth."""
    mesh = ddl.get_mesh()
    values = {0: [3, 2, 1, 0, -1, -2, -3, -4], 1: [0, 2, 3, 4, 3, 2, 1, 0]}
    stopped = []
    for kind, score in (
        (Engine, lambda engine: float(engine.state.output)),
        (MeshEngine, lambda engine: engine.state.metrics["score"]),
    ):
        trainer = Engine(lambda engine, batch: None)
        evaluator = kind(lambda engine, batch: torch.tensor(float(batch)))
        Average().attach(evaluator, "score") if kind is MeshEngine else None
        evaluator.add_event_handler(Events.COMPLETED, EarlyStopping(2, score, trainer))
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED,
            lambda engine, evaluator=evaluator: evaluator.run(
                [values[mesh.dp_rank][engine.state.iteration - 1]]
            ),
        )
        trainer.run(range(8))
        stopped.append(trainer.state.iteration)
    return stopped


def test_early_stopping_on_local_values(seen):
    """Ranks that decide on their own values stop apart, and the next collective of the others blocks."""
    plain, ours = zip(*seen["early_stopping"], strict=True)
    assert plain == (3, 3, 6, 6)
    assert ours == (4, 4, 4, 4)  # the means are 1.5, 2, 2, 2


@on_the_mesh
def in_nan():
    mesh = ddl.get_mesh()
    x, y = rows(8)
    x[7] = torch.nan  # in the second global batch of 4, on dp rank 1
    ends = []
    for package in ("ignite", "ddl"):
        model = layers() if package == "ignite" else ddl.auto_model(layers(), tensor_plan=plan())
        loader = ddl.auto_dataloader(TensorDataset(x, y), batch_size=4)
        make = create_supervised_trainer if package == "ignite" else ddl.create_supervised_trainer
        trainer = make(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        ends.append(trainer.run(loader, max_epochs=2).iteration)
    engine = Engine(lambda engine, batch: None)  # a stage without the loss
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    with pytest.raises(TypeError):
        engine.run([0])
    return ends, mesh.dp_rank


def test_terminate_on_nan_on_local_values(seen):
    """Ignite's trainer knows its own rows' loss: only the dp rank with the NaN stops. None as output raises."""
    for (plain, ours), dp_rank in seen["nan"]:
        assert plain == (2 if dp_rank == 1 else 4)
        assert ours == 2
