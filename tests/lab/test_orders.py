"""The pipeline schedules and their orders against torch's own classes, and alone, as a web page runs the table."""

import contextlib
import gc
import re
import subprocess
import sys

import pytest
import torch
from torch.distributed.pipelining import schedules

from ignite_ddl.lab import orders
from ignite_ddl.pipeline import schedules as table
from ignite_ddl.pipeline.schedules import SCHEDULES

NUMBERS = [(p, m) for p in range(1, 9) for m in range(1, 65)]  # of ranks and microbatches
SOME = [(p, m) for p, m in NUMBERS if m <= 20 or p in (3, 8)]  # of all, which agree (2026-11, torch 2.13)
LOOPS = [name for name, one in SCHEDULES.items() if one.stages_per_rank == 1]  # in torch a loop, not a plan
PLANS = [name for name in SCHEDULES if name not in LOOPS]
FREE = [name for name in PLANS if not SCHEDULES[name].v_shaped]  # take any number of chunks


@pytest.fixture(autouse=True)
def _no_garbage_collection():
    """Millions of tuples, none of them in a circle: a third of the time."""
    gc.disable()
    yield
    gc.enable()


def plans_of_torch(name, p, m, v):
    """For each rank torch's own entries: tuples of an action, or of two that overlap."""
    # The constructor wants stages and process groups, the plan does not.
    planner = object.__new__(getattr(schedules, SCHEDULES[name].torch_class))
    planner.pp_group_size, planner._n_microbatches = p, m
    planner.num_stages = planner._num_stages = p * v
    planner.n_local_stages, planner._stages = v, [None] * v
    planner.number_of_rounds = max(1, m // p)
    planner.microbatches_per_round = m // planner.number_of_rounds
    for rank in range(p):
        entries = []
        for one in planner._calculate_single_rank_operations(rank):
            if one is not None:
                both = one.sub_actions or (one,)
                entries.append(tuple((a.computation_type._value_, a.stage_index, a.microbatch_index) for a in both))
        yield entries


@pytest.mark.parametrize(
    ("name", "v", "numbers"),
    [(name, 2, SOME) for name in PLANS]
    + [(name, v, [(p, m) for p, m in SOME if p <= 5 and m <= 16]) for name in FREE for v in (1, 3, 4)]
    + [(name, 11, [(2, 4)]) for name in FREE],  # chunks of two digits
)
def test_each_ranks_order_is_torchs(name, v, numbers):
    fitting = [(p, m) for p, m in numbers if table.suits(name, m, p)]
    assert len(fitting) > len(numbers) / 3
    for p, m in fitting:
        ours = orders.schedule_entries(name, p, m, v)
        assert ours == list(plans_of_torch(name, p, m, v)), f"{name} on {p} ranks, {m} microbatches"


def _none(*args, **kwargs):
    return []


class Stage:
    """What torch's constructors and loops ask of a stage; writes down its passes."""

    has_backward, group, dw_builder, device = True, None, None, torch.device("cpu")

    def __init__(self, index, owners):
        self.stage_index, self.num_stages = index, len(owners)
        self.is_first, self.is_last = index == 0, index == len(owners) - 1
        self.group_size, self.group_rank = max(owners) + 1, owners[index]
        self.stage_index_to_group_rank = dict(enumerate(owners))
        self.submod, self.actions = torch.nn.Identity(), []

    def __getattr__(self, name):  # messages to send and receive: none
        return _none

    def forward_one_chunk(self, m, *args, **kwargs):
        self.actions.append(("F", self.stage_index, m))

    def backward_one_chunk(self, m, *args, **kwargs):
        self.actions.append(("B", self.stage_index, m))


def made_by_torch(name, p, m):
    """torch's schedule of rank 0, up to its plan; None if its constructor refuses the numbers."""
    owners = table.stage_owners(name, p)
    stages = [Stage(index, owners) for index, owner in enumerate(owners) if owner == 0]
    try:
        make = getattr(schedules, SCHEDULES[name].torch_class)
        return make(stages[0] if name in LOOPS else stages, m, loss_fn=lambda *args: None)
    except ValueError:
        return None


@pytest.mark.parametrize("name", LOOPS)
def test_the_order_of_a_loop_is_that_of_torchs_loop(name, monkeypatch):
    nothing = contextlib.nullcontext()
    monkeypatch.setattr(schedules, "record_function", lambda name: nothing)
    monkeypatch.setattr(schedules, "_sorted_batch_p2p", lambda ops, desc: {})
    monkeypatch.setattr(schedules, "_batch_p2p", lambda ops, desc: [])
    for p, m in SOME:
        if not table.suits(name, m, p):
            continue
        ours, loop = orders.schedule_actions(name, p, m), made_by_torch(name, p, m)
        loop._internal_losses, loop._check_inputs = [], lambda *args, m=m: ([()] * m, [()] * m)
        for method in ("_maybe_get_loss", "_maybe_compute_loss", "_update_losses", "_initialize_stage"):
            setattr(loop, method, _none)
        for rank in range(p):
            loop._stage = stage = Stage(rank, list(range(p)))
            loop._step_microbatches()
            assert ours[rank] == stage.actions, f"{name} on {p} ranks, {m} microbatches, rank {rank}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers_are_refused_exactly_where_torchs_constructor_refuses(name, monkeypatch):
    kind = getattr(schedules, SCHEDULES[name].torch_class)
    if name in PLANS:  # which come after the constructor's checks and take time
        monkeypatch.setattr(kind, "_calculate_single_rank_operations", lambda self, rank: [])
        monkeypatch.setattr(kind, "_prepare_schedule_with_comms", lambda *args: None)
    for p, m in NUMBERS:
        fits = made_by_torch(name, p, m) is not None
        assert table.suits(name, m, p) == fits, f"{name} on {p} ranks, {m} microbatches"
        if fits:
            table.check_microbatches(name, m, p)
            continue
        with pytest.raises(ValueError, match=f"n_microbatches={m} does not suit schedule='{name}' on pp={p}") as info:
            orders.schedule_actions(name, p, m)
        multiple, least, or_more = re.search(r"use (a multiple of )?(\d+)( or more)?$", str(info.value)).groups()
        assert bool(multiple) != bool(or_more), info.value
        advised = [int(least) * n if multiple else int(least) + n for n in range(8)]
        assert all(table.suits(name, n, p) for n in advised if n), info.value


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: table.stage_owners("GPipe", 2), "schedule should be one of gpipe, 1f1b, .* but given 'GPipe'"),
        (lambda: table.stage_owners(["1f1b"], 2), r"schedule should be one of .* but given \['1f1b'\]"),
        (lambda: table.stage_owners("1f1b", 0), "n_ranks should be a positive integer, but given 0"),
        (lambda: table.stage_owners("looped_bfs", 2, 0), "n_chunks should be a positive integer, but given 0"),
        (lambda: table.stage_owners("zbv", 2, 3), "schedule='zbv' has 2 stages on each rank, but given n_chunks=3"),
        (lambda: orders.schedule_actions("1f1b", 2, 4, 2), "has 1 stages on each rank, but given n_chunks=2"),
        (lambda: table.suits("1f1b", 4, 0), "n_ranks should be a positive integer, but given 0"),
        (lambda: orders.schedule_actions("gpipe", 2, 0), "n_microbatches should be a positive integer, but given 0"),
        (lambda: orders.schedule_actions("gpipe", 2, 2.0), "n_microbatches should be .* integer, but given 2.0"),
        (lambda: orders.schedule_actions("gpipe", 2, True), "n_microbatches should be a positive integer"),
        (lambda: table.microbatches_for(0, 4, "1f1b", 2), "rows should be a positive integer, but given 0"),
        (lambda: table.microbatches_for(4, 4, "1f1b", 0), "n_ranks should be a positive integer, but given 0"),
        (lambda: table.microbatches_for(4, 0, "1f1b", 2), "wanted should be a positive integer, but given 0"),
        (lambda: table.microbatches_for(4, 4, "foo", 2), "schedule should be one of .* but given 'foo'"),
        (lambda: table.microbatches_for(3, 4, "dualpipev", 2), "a batch of 3 rows cannot be cut into microbatches"),
    ],
)  # fmt: skip
def test_what_no_schedule_can_do_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


ALONE = """
import sys
for name in ("torch", "ignite", "numpy"):
    sys.modules[name] = None
import importlib.util, pathlib, types
package = sys.modules["ignite_ddl"] = types.ModuleType("ignite_ddl")  # without its __init__
package.__path__ = [str(pathlib.Path(sys.argv[1]).parents[1])]
spec = importlib.util.spec_from_file_location("table", sys.argv[1])
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)
for name in table.SCHEDULES:
    print(name, *table.microbatches_for(16, 5, name, 2))
others = {name.partition(".")[0] for name, module in sys.modules.items() if module} - sys.stdlib_module_names
assert others <= {"__main__", "ignite_ddl"}, others
"""


def test_the_file_runs_where_there_is_no_torch():
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE, table.__file__], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    counts = [f"{name} 4 {name}" for name in SCHEDULES]
    assert ran.stdout.splitlines() == counts
