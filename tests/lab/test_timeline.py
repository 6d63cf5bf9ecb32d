"""What a timeline says of delays that were put in, on one rank, on several, and of made-up clocks."""

import contextlib
import functools
import json
import pickle
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import BasicTimeProfiler, HandlersTimeProfiler
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import ignite_ddl as ddl
from ignite_ddl.course import on_ranks
from ignite_ddl.lab import Timeline, bubble
from ignite_ddl.lab.record import KINDS, PASSES, Record
from ignite_ddl.lab.timeline import watch
from ignite_ddl.pipeline.local_stages import stages_of

DELAY = 0.06  # seconds of a sleep; on a loaded machine one takes longer, never shorter
SLACK = 0.5  # what a loaded machine may add to the delays of a test; nothing may be below them


def merged(n, function, *args, **kwargs):
    return Timeline.merge(on_ranks(n, function, *args, **kwargs))


def compute_names(timeline):
    return [record.name for record in timeline.records if record.kind == "compute"]


def about(seconds, expected):
    return 0.98 * expected <= seconds <= expected + SLACK


def patiently(test):
    """Up to three tries: other programs may spoil a measurement; a wrong timeline is wrong each time."""

    @functools.wraps(test)
    def tries(*args, **kwargs):
        for left in (2, 1, 0):
            try:
                test(*args, **kwargs)
                break
            except (AssertionError, KeyError):
                if not left:
                    raise

    return tries


def waited(timeline, rank, late):
    """Checks what a rank waited for another against what both did: they went through the same collectives."""
    totals, waits = timeline.totals(), timeline.waits()
    working = ("compute", "data", "handlers", *PASSES)
    busy = {r: sum(totals[r].get(kind, 0) for kind in working) for r in (rank, late)}
    expected = busy[late] + totals[late]["idle"] - busy[rank]
    assert abs(totals[rank]["idle"] - expected) < 0.15
    assert busy[late] >= busy[rank] + DELAY
    assert waits[rank, late] >= waits.get((late, rank), 0)
    return waits[rank, late]


@pytest.fixture
def quiet():
    """Whatever a test does, nothing is watched afterwards."""
    before = {name: vars(dist.ProcessGroup)[name] for name in ("allreduce", "send")}
    yield
    assert watch._watching == []
    assert {name: vars(dist.ProcessGroup)[name] for name in before} == before


# ------------------------------------------------------------------------------------------------ one rank


def slow_data(n):
    for i in range(n):
        time.sleep(DELAY)
        yield i


@pytest.mark.usefixtures("quiet")
@patiently
def test_data_steps_and_handlers_of_an_engine():
    trainer = Engine(lambda engine, batch: time.sleep(2 * DELAY))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: time.sleep(DELAY / 2))
    timeline = Timeline().attach(trainer)
    # added later: outside, too
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: time.sleep(DELAY / 2))
    trainer.run(slow_data(3), epoch_length=3)
    [(rank, totals)] = timeline.totals().items()
    assert rank == 0
    assert list(totals) == ["compute", "data", "handlers"]
    assert about(totals["compute"], 6 * DELAY)
    assert about(totals["data"], 3 * DELAY)
    assert about(totals["handlers"], 3 * DELAY)
    assert compute_names(timeline) == ["step 1", "step 2", "step 3"]


@pytest.mark.parametrize("profiler", [BasicTimeProfiler, HandlersTimeProfiler])
@patiently
def test_beside_a_profiler_of_ignite(profiler):
    """Both profilers rearrange handlers when a run begins, one of them wraps them."""
    trainer = Engine(lambda engine, batch: time.sleep(DELAY))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: time.sleep(DELAY))
    timeline = Timeline().attach(trainer)
    profiler().attach(trainer)
    trainer.run(slow_data(3), epoch_length=3)
    totals = timeline.totals()[0]
    assert list(totals) == ["compute", "data", "handlers"]
    assert all(about(seconds, 3 * DELAY) for seconds in totals.values())


def test_records_follow_each_other_without_a_gap():
    trainer = Engine(lambda engine, batch: None)
    timeline = Timeline().attach(trainer)
    trainer.run([0, 1], max_epochs=3)
    records = timeline.records
    for before, after in zip(records, records[1:], strict=False):
        assert before.end == after.start
    assert compute_names(timeline) == [f"step {i}" for i in range(1, 7)]


@pytest.mark.usefixtures("quiet")
@patiently
def test_an_evaluation_inside_a_handler_is_shown_in_its_parts():
    trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: time.sleep(DELAY))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0, 1]))
    timeline = Timeline().attach(trainer).attach(evaluator, name="evaluation")
    trainer.run([0], max_epochs=2)
    found = [record for record in timeline.records if record.name.startswith("evaluation")]
    assert [record.name for record in found] == ["evaluation 1", "evaluation 2"] * 2
    assert about(sum(record.seconds for record in found), 4 * DELAY)
    assert timeline.totals()[0]["handlers"] < SLACK  # not the evaluation once more


@patiently
def test_spans_of_ones_own_and_of_nested_ones_the_inner():
    timeline = Timeline()
    with timeline, timeline.span("outer"):
        time.sleep(DELAY)
        with timeline.span("tokenise", kind="data"):
            time.sleep(DELAY)
    found = [(record.name, record.kind) for record in timeline.records]
    assert found[:2] == [("outer", "compute"), ("tokenise", "data")]
    assert found[2:] in ([], [("outer", "compute")])  # what is left of it after the inner one
    assert about(timeline.totals()[0]["compute"], DELAY)
    assert about(timeline.totals()[0]["data"], DELAY)


@pytest.mark.usefixtures("quiet")
@patiently
def test_a_run_that_raises_is_recorded_and_the_next_one_too(monkeypatch):
    monkeypatch.setattr(Engine, "interrupt_resume_enabled", False)  # else Ignite runs such an engine no more

    def step(engine, batch):
        if batch == 1:
            raise RuntimeError("on purpose")

    trainer = Engine(step)
    trainer.logger.disabled = True
    timeline = Timeline().attach(trainer)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.run([0, 1])
    time.sleep(DELAY)
    trainer.run([0, 0], max_epochs=2)  # Ignite goes on with the second epoch
    assert compute_names(timeline) == ["step 1", "step 3", "step 4"]
    assert timeline.totals()[0]["handlers"] < DELAY  # the time between the runs belongs to neither
    with pytest.raises(RuntimeError):
        trainer.run([1, 1], max_epochs=3)
    timeline.stop()


@pytest.mark.parametrize("ends", ["by itself", "stop", "stop in a handler", "late stop", "skip_completed"])
@patiently
def test_a_run_that_did_not_complete_ends_before_the_next(ends):
    timeline = Timeline()

    def step(engine, batch):
        if ends == "skip_completed":
            engine.terminate(skip_completed=True)
        elif engine.state.iteration == 2 and ends != "stop in a handler":
            raise RuntimeError("on purpose")

    trainer, evaluator = Engine(step), Engine(lambda engine, batch: None)
    trainer.logger.disabled = True
    timeline.attach(trainer)
    if ends == "stop in a handler":
        trainer.add_event_handler(Events.ITERATION_STARTED(once=2), timeline.stop)
    with contextlib.suppress(RuntimeError):
        trainer.run([0, 1])
    if ends == "stop":
        timeline.stop()
    time.sleep(DELAY)
    timeline.attach(evaluator, "evaluation")
    evaluator.run([0])
    if ends == "late stop":
        timeline.stop()
    with timeline:
        pass
    timeline.stop()
    assert sum(record.seconds for record in timeline.records) < DELAY
    assert compute_names(timeline)[-1] == "evaluation 1"


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("event", [Events.EPOCH_STARTED(once=2), Events.ITERATION_COMPLETED(once=2)])
def test_attached_in_the_midst_of_a_run_it_records_the_rest(event):
    trainer, timeline, others = Engine(lambda engine, batch: dist.is_available()), Timeline(), []
    trainer.add_event_handler(event, lambda: timeline.attach(trainer))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: others.append(bool(watch._watching)))
    trainer.run([0, 1], max_epochs=2)
    assert compute_names(timeline) == ["step 3", "step 4"]
    assert others[2:] == [True, True]  # collectives are watched, too


@pytest.mark.parametrize(
    ("act", "steps"),
    [
        (lambda trainer, timeline: trainer.terminate(), [1, 2]),
        (lambda trainer, timeline: trainer.terminate_epoch(), [1, 2]),
        (lambda trainer, timeline: timeline.stop(), [1, 2]),
        (lambda trainer, timeline: timeline.clear(), [3, 4]),  # forgets the warm-up
    ],
    ids=["terminate", "terminate_epoch", "stop", "clear"],
)
@pytest.mark.usefixtures("quiet")
def test_what_happens_after_the_second_step(act, steps):
    trainer = Engine(lambda engine, batch: None)
    timeline = Timeline().attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: act(trainer, timeline))
    trainer.run([0] * 4, max_epochs=1)
    assert compute_names(timeline) == [f"step {i}" for i in steps]
    trainer.add_event_handler(Events.STARTED, timeline.clear)
    trainer.run([0], max_epochs=1)  # the next run is recorded anew
    assert compute_names(timeline) == ["step 1"]


@pytest.mark.parametrize("recording", [Timeline.__enter__, contextlib.nullcontext], ids=["with", "a span alone"])
def test_a_timeline_travels_and_records_anew_where_it_arrives(recording):
    timeline = Timeline()
    recording(timeline)
    with timeline.span("here"):
        pass
    timeline.stop()
    copy = pickle.loads(pickle.dumps(timeline))
    assert copy.records == timeline.records
    recording(copy)
    with copy.span("there"):
        pass
    copy.stop()
    assert [record.name for record in copy.records] == ["there"]
    assert "Timeline(1 spans of rank 0)" in repr(copy)


def test_nothing_recorded():
    empty = Timeline.merge([])
    assert (empty.records, empty.totals(), empty.waits(), empty.in_flight) == ([], {}, {}, [])
    assert Timeline.merge([Timeline()]).records == []


def test_synchronize_waits_for_the_device(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append(0))
    trainer = Engine(lambda engine, batch: None)
    timeline = Timeline(synchronize=True).attach(trainer)
    trainer.run([0])
    assert len(calls) == 6  # run, data, its end, step, its end, end of the run
    with timeline.span("mine"):
        pass
    assert len(calls) == 8
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert not Timeline(synchronize=True).synchronize


# --------------------------------------------------------------------------------- ranks, with delays put in


def ones(n=1):
    """Four numbers for each of n ranks."""
    return torch.ones(4 * n)


COLLECTIVES = {  # on three ranks
    "all_reduce": lambda: dist.all_reduce(ones()),
    "barrier": lambda: dist.barrier(),
    "all_gather": lambda: dist.all_gather([ones() for _ in range(3)], ones()),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(3), ones()),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(ones(), ones(3)),
    "all_to_all": lambda: dist.all_to_all_single(ones(3), ones(3)),
    "async": lambda: dist.all_reduce(ones(), async_op=True).wait(),
    "objects": lambda: dist.all_gather_object([None] * 3, "x"),
    "functional": lambda: funcol.all_reduce(ones(), "sum", dist.group.WORLD).sum(),
    "monitored_barrier": lambda: dist.monitored_barrier(wait_all_ranks=True),
    "inference": lambda: torch.inference_mode()(lambda: dist.all_reduce(ones()))(),
}


def waiting(local_rank, late, calls):
    """For each collective four times: a rank is late for it, and all have some work of their own."""
    timelines = {call: Timeline() for call in calls}
    for call, timeline in timelines.items():
        dist.barrier()
        with timeline:
            for _ in range(4):
                with timeline.span("work"):
                    time.sleep(DELAY)
                    if local_rank == late:
                        time.sleep(DELAY)
                COLLECTIVES[call]()
    return timelines


def timelines_of(calls):
    ranks = on_ranks(3, waiting, 1, calls)
    return {call: Timeline.merge([timelines[call] for timelines in ranks]) for call in calls}


@pytest.fixture(scope="module")
def first_tries():
    return timelines_of(list(COLLECTIVES))


@pytest.mark.parametrize("call", COLLECTIVES)
@patiently
def test_who_waits_for_the_late_rank(call, first_tries):
    timeline = first_tries.pop(call, None) or timelines_of([call])[call]
    totals, waits = timeline.totals(), timeline.waits()
    assert about(totals[1]["compute"], 8 * DELAY)
    assert all(totals[rank]["communication"] > 0 for rank in range(3))
    for rank in (0, 2):
        assert about(totals[rank]["compute"], 4 * DELAY)
        assert waited(timeline, rank, late=1) > DELAY  # 4 of them, on a machine that has nothing else to do
        mine = {late: seconds for (waiter, late), seconds in waits.items() if waiter == rank}
        assert max(mine, key=mine.get) == 1
        assert totals[rank]["idle"] == pytest.approx(sum(mine.values()))


def rooted(local_rank, root):
    timeline, tensor = Timeline(), torch.ones(4)
    dist.barrier()
    with timeline:
        time.sleep(3 * DELAY if local_rank == 1 else DELAY if local_rank == 2 else 0)
        dist.broadcast(tensor, src=root)
    return timeline


@patiently
def test_who_receives_a_broadcast_waits_for_the_root_only():
    waits = merged(3, rooted, root=2).waits()
    assert about(waits[0, 2], DELAY - 0.02)
    assert (0, 1) not in waits
    assert (1, 2) not in waits


def messages(local_rank):
    timeline, tensor = Timeline(), torch.ones(1000)
    dist.barrier()
    with timeline:
        if local_rank == 0:
            time.sleep(2 * DELAY)
            dist.send(tensor, dst=1)
            dist.recv(tensor, src=1)
        else:
            received = dist.irecv(tensor, src=0)
            with timeline.span("meanwhile"):
                time.sleep(DELAY)
            received.wait()
            time.sleep(3 * DELAY)
            dist.send(tensor, dst=0)
    return timeline


@patiently
def test_messages_between_two_ranks():
    timeline = merged(2, messages)
    waits = timeline.waits()
    assert DELAY - 0.03 <= waits[1, 0] <= DELAY + SLACK  # of the 2 delays one was used
    assert 3 * DELAY - 0.03 <= waits[0, 1] <= 3 * DELAY + SLACK
    [flight] = [record for record in timeline.in_flight if record.rank == 1 and record.name == "recv"]
    assert about(flight.seconds, 2 * DELAY - 0.02)


def of_the_group_itself(local_rank, by_name):
    """The methods of a process group, below torch.distributed, their arguments by place and by name."""
    group, tensor, opts = dist.group.WORLD, torch.ones(4), dist.BroadcastOptions()
    opts.rootRank = 1
    timeline = Timeline()
    dist.barrier()
    with timeline:
        if local_rank == 1:
            time.sleep(DELAY)
        if local_rank == 1:
            work = group.send([tensor], dstRank=0, tag=3) if by_name else group.send([tensor], 0, 3)
        else:
            work = group.recv([tensor], srcRank=1, tag=3) if by_name else group.recv([tensor], 1, 3)
        work.wait()
        if local_rank == 1:
            time.sleep(DELAY)
        (group.broadcast(tensor, root=1) if by_name else group.broadcast(tensor, 1)).wait()
        (group.broadcast([tensor], opts=opts) if by_name else group.broadcast([tensor], opts)).wait()
        with pytest.raises(TypeError, match="incompatible function arguments"):
            group.send([tensor])
    return timeline


def mixed(local_rank):
    """One argument by place, the other by name, beside a call without a timeline."""
    timeline, found = Timeline(), []
    for watched in (False, True):
        tensor = torch.full((2,), float(local_rank))
        with timeline if watched else contextlib.nullcontext():
            if local_rank == 0:
                dist.group.WORLD.send([tensor], 1, tag=0).wait()
            else:
                dist.group.WORLD.recv([tensor], 0, tag=0).wait()
        found.append(tensor.tolist())
    return found


@pytest.mark.parametrize("by_name", [False, True])
@patiently
def test_calls_of_a_process_group_itself(by_name):
    timeline = merged(2, of_the_group_itself, by_name=by_name)
    assert timeline.waits()[0, 1] >= 2 * DELAY - 0.03
    messages = [call for call in timeline._loaded[1] if call.name in ("send", "recv") and call.key]
    assert {call.key[1:4] for call in messages} == {("message", 1, 0)}
    assert {call.needs for call in timeline._loaded[1] if call.name == "broadcast"} == {(1, 0), (0, 1)}


def test_a_timeline_takes_every_call_that_torch_takes():
    assert on_ranks(2, mixed) == [[[0.0, 0.0]] * 2] * 2


def spans_only(local_rank):
    timeline = Timeline()
    with timeline.span("mine"):
        dist.barrier()
    return timeline


def records_on_the_first(local_rank):
    timeline = Timeline()
    if local_rank == 0:
        with timeline.span("alone"):
            pass
    return timeline


def test_a_rank_that_records_nothing_is_merged_as_another():
    assert [(record.rank, record.name) for record in merged(2, records_on_the_first).records] == [(0, "alone")]


def test_spans_of_ranks_that_record_nothing_else_are_of_different_ranks():
    assert [(record.rank, record.kind) for record in merged(2, spans_only).records] == [(0, "compute"), (1, "compute")]


def unlike(local_rank):
    timeline, tensor = Timeline(), torch.ones(2)
    timeline.__enter__() if local_rank == 0 else None
    dist.all_reduce(tensor)
    timeline.__enter__() if local_rank == 1 else None
    dist.all_reduce(tensor)
    timeline.stop()
    return timeline


def test_ranks_that_begin_at_different_collectives_are_told_of():
    with pytest.warns(UserWarning, match="different numbers of collectives: 2 by rank 0, 1 by rank 1") as caught:
        merged(2, unlike)
    assert caught[0].filename == __file__


def overlap(local_rank):
    timeline, tensor = Timeline(), torch.ones(4)
    dist.barrier()
    with timeline:
        work = dist.all_reduce(tensor, async_op=True)
        with timeline.span("meanwhile"):
            time.sleep(2 * DELAY)
        work.wait()
    return timeline


@patiently
def test_what_runs_beside_compute_is_in_flight_and_no_wait(tmp_path):
    timeline = merged(2, overlap)
    for rank, totals in timeline.totals().items():
        assert about(totals["compute"], 2 * DELAY)
        [flight] = [record for record in timeline.in_flight if record.rank == rank]
        assert about(flight.seconds, 2 * DELAY)
    begun, ended = ([e for e in trace(timeline, tmp_path) if e["ph"] == phase] for phase in "be")
    pair = lambda event: (event["cat"], event["id"], event["name"], event["pid"], event["tid"])  # noqa: E731
    assert len(begun) == len({event["id"] for event in begun}) == 2
    starts = {pair(event): event["ts"] for event in begun}
    assert starts.keys() == {pair(event) for event in ended}
    assert all(starts[pair(event)] <= event["ts"] for event in ended)


# ------------------------------------------------------------------------------------------- training


class Buffered(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


def training(local_rank, late, make, build=Buffered, steps=4):
    torch.manual_seed(0)
    data = [(torch.randn(4, 8), torch.randn(4, 1))] * steps
    shard = {"shard": True} if make == "sharded" else {}
    model = DistributedDataParallel(build()) if make == "ignite" else ddl.auto_model(build(), **shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    create = create_supervised_trainer if make == "ignite" else ddl.create_supervised_trainer
    trainer = create(model, optimizer, torch.nn.functional.mse_loss)
    if local_rank == late:
        model.register_forward_pre_hook(lambda *_: time.sleep(DELAY))
    timeline = Timeline().attach(trainer)
    trainer.run(data, max_epochs=1)
    return timeline


@pytest.mark.parametrize(
    ("make", "build", "names"),
    [
        ("ddl", Buffered, {"gradients", "buckets", "broadcast"}),
        ("ignite", lambda: torch.nn.Linear(8, 1), {"gradients", "buckets"}),
        ("sharded", lambda: torch.nn.Linear(8, 1), {"gather", "reduce_scatter"}),
    ],
    ids=["ddl", "ignite", "sharded"],
)
@patiently
def test_waits_inside_ddp_and_fsdp2_are_seen(make, build, names):
    timeline = merged(2, training, late=1, make=make, build=build)
    assert waited(timeline, 0, late=1) > DELAY
    assert timeline.totals()[1]["compute"] > 0.98 * 4 * DELAY
    found = " ".join(record.name for record in timeline.records if record.kind == "communication")
    assert all(name in found for name in names)
    assert build is Buffered or "broadcast" not in found


def pipeline(local_rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    model = ddl.auto_model(model, schedule="gpipe", n_microbatches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = ddl.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    timeline = Timeline().attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), timeline.clear)  # the first step builds stages
    if local_rank == 0:
        for stage in stages_of(model).local_stages():
            stage.register_forward_pre_hook(lambda *_: time.sleep(DELAY))
    trainer.run([(torch.randn(4, 8), torch.randn(4, 8))] * 3)
    return timeline


@patiently
def test_a_pipeline_stage_waits_for_the_one_before_it():
    with ddl.Parallel(backend="gloo", nproc_per_node=2, pp=2, threads_per_rank=1, timeout=120) as parallel:
        timeline = Timeline.merge(parallel.run(pipeline))
    # 2 steps of 2 microbatches each: stage 1 waits for each forward pass of stage 0.
    assert waited(timeline, 1, late=0) > DELAY
    assert timeline.totals()[0]["forward"] >= 0.98 * 4 * DELAY


# ------------------------------------------------------------------------------------------- a pipeline's passes


def test_the_bubble_is_what_the_passes_leave_empty():
    step = [
        Record(0, "forward", "0F0", 1.0, 2.0), Record(1, "forward", "1F0", 2.0, 3.5),
        Record(1, "backward", "1I0", 3.5, 4.0), Record(1, "backward_weight", "1W0", 4.5, 5.0),
        Record(0, "backward", "0B0", 5.0, 6.0),
        Record(0, "communication", "recv", 2.0, 4.0), Record(1, "idle", "", 0.0, 1.0), Record(2, "compute", "", 0, 9),
    ]  # fmt: skip
    assert bubble(step) == pytest.approx({0: 1 - 2.0 / 5, 1: 1 - 2.5 / 5})
    assert bubble(iter(step[:1])) == {0: 0.0}
    with pytest.raises(ValueError, match="records should contain forward or backward passes"):
        bubble(step[-3:])


def test_steps_are_told_apart_whatever_their_number_of_microbatches():
    timeline = Timeline()
    names = ["0F0", "0F1", "0B0", "0B1", "0F0", "0B0", "0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    for at, name in enumerate(names):
        kind = "forward" if name[1] == "F" else "backward"
        timeline._recorder.spans.append((kind, name, at, at + 0.5, None, 0, int(name[2])))
        timeline._recorder.spans.append(("communication", "between", at + 0.6, at + 0.9, None))
        timeline._recorder.spans.append(("communication", "inside", at + 0.1, at + 0.2, None))
    for read in (timeline, pickle.loads(pickle.dumps(timeline)), Timeline.merge([timeline])):
        steps = read.actions()
        assert [[r.name for r in step if r.microbatch is not None] for step in steps] == [
            names[:4], names[4:6], names[6:]
        ]  # fmt: skip
        assert [[r.name for r in step if r.microbatch is None] for step in steps] == [
            ["between"] * 3, ["between"], ["between"] * 5
        ]  # fmt: skip
    assert Timeline().actions() == []


def by_hand(local_rank):
    """torch's own stages and schedule, without ddl.auto_model."""
    stage = PipelineStage(torch.nn.Linear(4, 4), local_rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    x = torch.zeros(4, 4)
    step = functools.partial(schedule.step, x) if local_rank == 0 else functools.partial(schedule.step, target=x)
    step()
    before = PipelineStage.forward_one_chunk
    with Timeline() as timeline:
        step()
        assert PipelineStage.forward_one_chunk is not before
    assert PipelineStage.forward_one_chunk is before
    step()
    return timeline


def test_a_pipeline_written_by_hand_is_seen_too_and_only_while_recording(tmp_path):
    [step] = Timeline.merge(timelines := on_ranks(2, by_hand)).actions()
    assert len(timelines[0].actions()) == 1
    for rank in range(2):
        passes = [(r.name, r.kind, r.stage, r.microbatch) for r in step if r.rank == rank and r.kind in PASSES]
        assert passes == [
            (f"{rank}F0", "forward", rank, 0), (f"{rank}F1", "forward", rank, 1),
            (f"{rank}B0", "backward", rank, 0), (f"{rank}B1", "backward", rank, 1),
        ]  # fmt: skip
    path = Timeline.merge(timelines).to_chrome(tmp_path / "trace.json")
    assert {"0F0", "1B1"} <= {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def hybrid(local_rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    model = ddl.auto_model(model, tensor_plan={"0": ddl.Column(), "2": ddl.Row()})
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.01))
    trainer = ddl.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    timeline = Timeline().attach(trainer)
    if local_rank == 3:
        model.register_forward_pre_hook(lambda *_: time.sleep(DELAY))
    trainer.run([(torch.randn(4, 8), torch.randn(4, 8))] * 4)
    return timeline


@patiently
def test_tensor_parallel_peers_wait_for_each_other():
    with ddl.Parallel(backend="gloo", nproc_per_node=4, dp=2, tp=2, threads_per_rank=1, timeout=120) as parallel:
        waits = Timeline.merge(parallel.run(hybrid)).waits()
    assert waits[2, 3] > DELAY  # its tp peer, in each layer
    for rank in (0, 1):  # the other pair waits too, for 3, or for 2, which waited for 3
        assert waits.get((rank, 2), 0) + waits.get((rank, 3), 0) > DELAY


def twice(local_rank):
    """The same training with and without a timeline, which must not change it."""
    losses = []
    for with_timeline in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Buffered())
        trainer = create_supervised_trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss
        )
        if with_timeline:
            Timeline().attach(trainer)
        torch.manual_seed(local_rank)
        found = []
        remember = lambda engine, found=found: found.append(engine.state.output)  # noqa: E731
        trainer.add_event_handler(Events.ITERATION_COMPLETED, remember)
        trainer.run([(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(5)])
        losses.append(found)
    hooks = [name for name in ("allreduce", "broadcast") if "watched" in repr(vars(dist.ProcessGroup)[name])]
    return losses, hooks


def test_a_timeline_changes_nothing_and_leaves_nothing_behind():
    for (without, with_it), hooks in on_ranks(2, twice):
        assert without == with_it
        assert len(without) == 5
        assert hooks == []


def raising(local_rank):
    timeline = Timeline()
    with timeline:
        dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX)


def test_an_error_of_torch_stays_the_same():
    with pytest.raises(ddl.RankError, match="all_reduce does not support"):
        on_ranks(2, raising)


# ----------------------------------------------------------------------------------------- merging, made up


def made_up(rank, machine, entered, left, shift=0.0, start=0.0):
    """A rank that works until it enters a collective, as its own clock says."""
    timeline = Timeline()
    timeline.rank, timeline._machine = rank, machine
    call = watch.Call(rank, "allreduce", ("world", "", (0, 1), 1), (0, 1), entered + shift)
    timeline._recorder.calls.append(call)
    timeline._recorder.spans.append(("compute", "work", start + shift, entered + shift, None))
    timeline._recorder.spans.append(("wait", "allreduce", entered + shift, left + shift, call))
    return pickle.loads(pickle.dumps(timeline))


def test_a_wait_is_cut_where_the_last_rank_came():
    timeline = Timeline.merge([made_up(0, "a", entered=1.0, left=3.5, shift=100), made_up(1, "a", 3.0, 3.5, 100)])
    assert timeline.records == [
        Record(0, "compute", "work", 0.0, 1.0),
        Record(0, "idle", "waits for rank 1", 1.0, 3.0, 1),
        Record(0, "communication", "allreduce", 3.0, 3.5),
        Record(1, "compute", "work", 0.0, 3.0),
        Record(1, "communication", "allreduce", 3.0, 3.5),
    ]
    assert timeline.totals()[0] == {"compute": 1.0, "communication": 0.5, "idle": 2.0}
    assert timeline.totals()[1] == {"compute": 3.0, "communication": 0.5, "idle": 0.0}
    assert timeline.waits() == {(0, 1): 2.0}


def test_without_the_other_rank_a_wait_stays_whole():
    for timeline in (made_up(0, "a", 1.0, 3.5), Timeline.merge([made_up(0, "a", 1.0, 3.5)])):
        assert timeline.totals() == {0: {"compute": 1.0, "communication": 2.5}}
        assert timeline.waits() == {}


@pytest.mark.parametrize("shift", [0.25, -7e5])
def test_clocks_of_two_machines_are_set_by_the_ends_of_their_collectives(shift):
    timeline = Timeline.merge([made_up(0, "a", 1.0, 3.5), made_up(1, "b", 3.0, 3.5, shift)])
    assert timeline.waits()[0, 1] == pytest.approx(2.0, abs=1e-6)
    assert timeline.totals()[1]["compute"] == pytest.approx(3.0, abs=1e-6)


def test_clocks_without_a_common_collective_start_together():
    other = Timeline()
    other.rank, other._machine = 1, "b"
    other._recorder.spans.append(("compute", "work", 500.0, 501.0, None))
    with pytest.warns(UserWarning, match="1 by rank 0, 0 by rank 1"):
        timeline = Timeline.merge([made_up(0, "a", 1.0, 3.5), other])
    assert timeline.records[-1] == Record(1, "compute", "work", 0.0, 1.0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Timeline().span("x", kind="computing").__enter__(), "kind should be one of .*but given"),
        (lambda: Timeline().attach(3), "engine should be an ignite.engine.Engine, but given 3"),
        (lambda: Timeline.merge([made_up(0, "a", 1.0, 2.0)] * 2), r"different ranks, but given ranks \[0, 0\]"),
        (lambda: bubble([Record(0, "forward", "0F0", 1.0, 1.0)]), "last longer than 0, but .* from 1.0 to 1.0"),
        (lambda: Timeline.merge([3]), "one Timeline per rank, in a list, but given .3."),
        (lambda: Timeline.merge(Timeline()), "one Timeline per rank, in a list, but given Timeline"),
        (lambda: Timeline.merge(None), "one Timeline per rank, in a list, but given None"),
        (lambda: Timeline.merge([Timeline.merge([made_up(0, "a", 1.0, 2.0)])]), "one Timeline per rank"),
    ],
)
def test_bad_input_says_which(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_merging_leaves_its_parts_as_they_were():
    part = made_up(1, "a", 3.0, 3.5, 100)
    before = part.records
    Timeline.merge([made_up(0, "a", 1.0, 3.5, 100), part])
    assert part.records == before


# -------------------------------------------------------------------------------------------------- the trace


def trace(timeline, folder):
    text = json.loads(timeline.to_chrome(folder / "trace.json").read_text())
    assert set(text) == {"traceEvents", "displayTimeUnit"}
    assert text["displayTimeUnit"] in ("ms", "ns")  # the two that the format knows
    return text["traceEvents"]


@patiently
def test_the_trace_keeps_to_the_format_is_in_microseconds_and_nests(tmp_path):
    """Chrome's "Trace Event Format": X has ts and dur, M names; an event lies inside its parent."""
    events = trace(merged(2, training, late=1, make="ddl"), tmp_path)
    assert {event["ph"] for event in events} <= {"X", "M", "b", "e"}
    assert {(event["pid"], event["tid"]) for event in events} == {(1, 1), (2, 1)}  # 0 is special in Perfetto
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1"}
    assert all(event["ts"] >= 0 for event in events if event["ph"] != "M")
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in complete} <= set(KINDS)
    assert any(event["args"].get("waits for") == 1 and event["pid"] == 1 for event in complete)
    steps = [event for event in complete if event["name"].startswith("step ") and event["pid"] == 2]
    assert [event["name"] for event in steps] == ["step 1", "step 2", "step 3", "step 4"]
    assert 0.98 * DELAY <= steps[0]["dur"] / 1e6 <= 13 * DELAY + SLACK  # it has the twelve passes of its checks, too
    assert all(about(event["dur"] / 1e6, DELAY) for event in steps[1:])
    for pid in (1, 2):
        mine = [event for event in complete if event["pid"] == pid]
        assert mine
        stack = []
        for event in sorted(mine, key=lambda event: (event["ts"], -event["dur"])):
            begin, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1], event  # inside its parent, to the nanosecond
            stack.append(end)


# --- other threads


def beside(local_rank):
    group, done = dist.new_group(), threading.Event()
    dist.barrier()  # rank 0 waits from the time when rank 1 begins to sleep

    def write():
        time.sleep(3 * DELAY * local_rank)  # rank 0's thread waits for rank 1's
        dist.barrier(group=group)
        done.set()

    with Timeline() as timeline:
        thread = threading.Thread(target=write, name="writer")
        thread.start()
        with timeline.span("step"):
            done.wait()
        thread.join()
    return timeline


@patiently
def test_a_wait_in_another_thread_does_not_block_the_rank():
    timeline = merged(2, beside)
    assert {(record.kind, record.name) for record in timeline.records} == {("compute", "step")}
    assert [(record.rank, record.name) for record in timeline.background] == [(0, "writer"), (1, "writer")]
    of_rank_0 = timeline.background[0]
    assert about(of_rank_0.seconds, 3 * DELAY)
    pickled = pickle.loads(pickle.dumps(timeline))
    assert pickled.background == timeline.background
