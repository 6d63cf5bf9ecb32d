"""The schedules on ranks: BatchNorm and dropout, failures, actions, bubbles and memory; parity is test_parity's."""

import functools
import logging
import time

import pytest
import torch
from ranks import TIMEOUT, run
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.course import Delay
from ignite_ddl.lab import SavedBytes, Timeline, bubble, simulate
from ignite_ddl.lab.cost import pipeline_bubble
from ignite_ddl.lab.record import PASSES
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.pipeline.schedules import SCHEDULES, microbatches_for


def sums(output, target):
    """A loss that saves nothing for its backward pass."""
    return output.sum()


# ------------------------------------------------------------------------------------- what torch does not say


def with_statistics():
    """BatchNorm and dropout in every stage."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)]
    return nn.Sequential(*blocks).double()


BATCHES = (12, 12, 6)  # the last one is smaller


def batch(i, rows):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(i), dtype=torch.double)


def replayed(split, schedule, pp):
    """One process, microbatch by microbatch and stage by stage, drawing by tensor.py's rule for random numbers."""
    model, losses = with_statistics(), []
    starts = [sum(split[:s]) for s in range(len(split) + 1)]
    for i, rows in enumerate(BATCHES):
        x, n, loss = batch(i, rows), int(torch.randint(2**62, ())), 0.0
        for m, hidden in enumerate(x.chunk(microbatches_for(rows, 4, schedule, pp)[0])):
            target = hidden.tanh()
            for s in range(len(split)):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(n + 2**20 * s + m)
                    for layer in model[starts[s] : starts[s + 1]]:
                        hidden = layer(hidden)
            part = (hidden - target).square().sum()
            part.backward()
            loss += part.item()
        losses.append(loss)
    return losses, {n: p.grad for n, p in model.named_parameters()}, model


REPLAYED = [name for name in SCHEDULES if name != "dualpipev"]


def with_statistics_on_ranks(local_rank):
    logging.disable(logging.INFO)
    return {schedule: trained_with_statistics(schedule) for schedule in REPLAYED}


def trained_with_statistics(schedule):
    model = ddl.auto_model(with_statistics(), schedule=schedule, n_microbatches=4)
    losses = []
    for i, rows in enumerate(BATCHES):
        x = batch(i, rows)
        _, loss = model.train_step(x, x.tanh(), lambda output, target: (output - target).square().sum())
        losses.append(stages_of(model).from_last_stage(None if loss is None else loss.item()))
    gradients, buffers = {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())
    model.eval()
    return [len(names) for names in model._local_stages.cut.layers], losses, gradients, buffers, model(batch(9, 3))


@pytest.fixture(scope="module")
def on_two_stages():
    return run(with_statistics_on_ranks, 2, pp=2)


@pytest.mark.parametrize("schedule", REPLAYED)
def test_batchnorm_and_dropout_are_those_of_a_process_that_replays_the_microbatches(schedule, on_two_stages):
    found = [of_rank[schedule] for of_rank in on_two_stages]
    losses, gradients, model = replayed(found[0][0], schedule, 2)
    buffers = dict(model.named_buffers())
    evaluated = model.eval()(batch(9, 3)).detach()
    assert {n for _, _, g, b, _ in found for n in (*g, *b)} == {*gradients, *buffers}
    for _, own_losses, own_gradients, own_buffers, own_evaluated in found:
        assert own_losses == pytest.approx(losses, abs=1e-12)
        assert max((g - gradients[n]).abs().max().item() for n, g in own_gradients.items()) < 1e-12
        assert max((b - buffers[n]).abs().max().item() for n, b in own_buffers.items()) < 1e-12
        assert (own_evaluated - evaluated).abs().max().item() < 1e-12
    plain = with_statistics()
    whole = (plain(batch(0, 12)) - batch(0, 12).tanh()).square().sum().item()
    assert abs(whole - losses[0]) > 1e-3  # the reference has to replay: a plain run is something else


class Falls(nn.Module):
    def forward(self, x):
        if x.grad_fn is not None and torch.is_grad_enabled():
            Falls.passes = getattr(Falls, "passes", 0) + 1
            if Falls.passes == 3:
                raise ArithmeticError("this stage falls over")
        return x


def falling(local_rank):
    model = ddl.auto_model(nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)], nn.Linear(2, 2), Falls()), split=[2, 3])
    x = torch.zeros(4, 2)
    for _ in range(3):
        model.train_step(x, x, nn.functional.mse_loss)


def test_a_stage_that_fails_in_the_middle_of_a_schedule_leaves_no_peer_waiting():
    start = time.monotonic()
    with pytest.raises(ddl.RankError, match="(?s)rank 1 raised .*this stage falls over"):
        run(falling, 2, pp=2)
    assert time.monotonic() - start < TIMEOUT / 2


# ---------------------------------------------------------------------------------- actions, memory, against simulate


def watched(local_rank):
    """Of each schedule two steps, with 16 rows in 8 microbatches."""
    logging.disable(logging.INFO)
    return {schedule: watched_steps(schedule, 16, 8) for schedule in SCHEDULES}


def watched_steps(schedule, rows, n_microbatches):
    """Their timeline, and the bytes that were saved at most, in those of one microbatch's layer."""
    torch.manual_seed(0)
    n_layers = 2 * ddl.get_mesh().pp_size
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(n_layers)]
    model = ddl.auto_model(nn.Sequential(*layers), schedule=schedule, n_microbatches=n_microbatches)
    x = torch.randn(rows, 8)
    model.train_step(x, x, sums)
    with Timeline() as timeline, SavedBytes(model) as saved:
        model.train_step(x, x, sums)
        model.train_step(x, x, sums)
    a_layer = 2 * (rows // n_microbatches) * 8 * 4  # the inputs of its two Linears, one of them tanh's output
    layers_of_stage = n_layers // len(model._local_stages.cut.owners)
    return timeline, saved.peak / (a_layer * layers_of_stage), saved.now


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.slow)])  # lab/test_orders.py has more
def test_actions_and_memory_are_those_of_the_simulator(pp):
    of_ranks = run(watched, pp, pp=pp)
    for schedule in SCHEDULES:
        found = [of_rank[schedule] for of_rank in of_ranks]
        planned = simulate.pipeline(schedule, pp, 8)
        assert [peak for _, peak, _ in found] == planned.peak_activations, schedule
        assert all(left == 0 for *_, left in found), schedule
        steps = Timeline.merge([timeline for timeline, *_ in found]).actions()
        assert len(steps) == 2
        for step in steps:
            for rank in range(pp):
                passes = [r.name for r in step if r.rank == rank and r.kind in PASSES]
                assert passes == [f"{a.stage}{a.kind}{a.microbatch}" for a in planned.actions[rank]], schedule
            assert {r.kind for r in step} - set(PASSES) <= {"communication", "idle"}


def test_of_views_that_begin_at_one_address_the_larger_counts():
    leaf = torch.ones(4, 4, requires_grad=True)
    for first, second in ((slice(2), slice(4)), (slice(4), slice(2))):
        with SavedBytes() as saved:
            a = leaf * 2
            sums_ = [(a[part] * a[part]).sum() for part in (first, second)]
            assert saved.now == a.nbytes
            sums_.pop(0).backward()
            assert saved.now in (a.nbytes, a[second].nbytes)
            sums_.clear()
            del a
        assert (saved.now, saved.peak) == (0, 64)


# ------------------------------------------------------------------------------------------ bubbles with stated delays

N = 6


def delayed(local_rank, schedule, forward, backward):
    logging.disable(logging.INFO)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), Delay(forward, backward)) for _ in range(4)]
    model = ddl.auto_model(nn.Sequential(*layers), schedule=schedule, n_microbatches=N)
    x = torch.randn(2 * N, 4)
    model.train_step(x, x, sums)
    with Timeline() as timeline:
        for _ in range(2):
            model.train_step(x, x, sums)
    return timeline


def patiently(test):
    """Up to four tries, each with delays twice as long: what other programs take is less of a longer step, while
    a wrong bubble is wrong each time."""

    @functools.wraps(test)
    def tries(schedule):
        for stretch in (1, 2, 4, 8):
            try:
                test(schedule, 0.03 * stretch, 0.06 * stretch)
                break
            except AssertionError:
                if stretch == 8:
                    raise

    del tries.__wrapped__  # pytest would read the test's own arguments
    return tries


def makespan(step):
    passes = [record for record in step if record.kind in PASSES]
    return max(record.end for record in passes) - min(record.start for record in passes)


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "1f1b"])
@patiently
def test_the_measured_bubble_is_within_5_points_of_the_formula_and_of_the_simulator(schedule, forward, backward):
    timeline = Timeline.merge(run(delayed, 4, schedule, forward, backward, pp=4))
    step = min(timeline.actions(), key=makespan)
    planned = simulate.pipeline(
        schedule, 4, N, forward=forward, backward_input=backward / 2, backward_weight=backward / 2
    )
    formula = pipeline_bubble(4, N)
    assert formula == pytest.approx(3 / (N + 3))
    assert makespan(step) >= (N + 3) * (forward + backward)  # a sleep takes longer, never shorter
    for share, simulated in zip(bubble(step).values(), bubble(planned.records).values(), strict=True):
        assert share == pytest.approx(formula, abs=0.05)
        assert share == pytest.approx(simulated, abs=0.05)
