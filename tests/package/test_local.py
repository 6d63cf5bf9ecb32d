"""Rounds of local steps (local SGD, DiLoCo) against all-reduce and by hand, and DDP's compressed gradients."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Events
from ranks import in_float64, launch, trainer_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.lab import cost, count_bytes
from ignite_ddl.local import _set_tensors

PLAN = {"0": ddl.Column(), "2": ddl.Row()}
slow = pytest.mark.slow


def model_of(seed=0, batch_norm=False):
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(4)] if batch_norm else []
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), *norm, nn.Tanh(), nn.Linear(4, 3))


def rows_of(n=11):
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(3, (n,), generator=draw)
    y[::4] = -100  # so that ranks divide by unlike numbers
    return TensorDataset(torch.randn(n, 6, generator=draw), y)


def plain_sgd(weights, lr=1.0):
    return torch.optim.SGD(weights, lr=lr)


def make(
    local, inner=torch.optim.SGD, batch_norm=False, frozen=False, rows=11, batch_size=5, axes=("tp", "pp"), **options
):
    """Model, optimizer, loader and trainer; ``local`` is None for all-reduce."""
    mesh = ddl.get_mesh()
    plan = PLAN if mesh.tp_size > 1 else None
    model = model_of(batch_norm=batch_norm)
    model[2].requires_grad_(not frozen)
    model = ddl.auto_model(model, plan, **({} if local is None else {"dp_sync": "local"}))
    optimizer = ddl.auto_optim(inner(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.cross_entropy, **options)
    if local is not None:
        local.attach(trainer, model, optimizer)
    return model, optimizer, ddl.auto_dataloader(rows_of(rows), batch_size=batch_size), trainer


@in_float64
def trained(local_rank, local=None, epochs=2, **options):
    model, _, loader, trainer = make(local and local(), **options)
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(loader, max_epochs=epochs)
    assert ddl.check_in_sync(model) == []
    return losses, ddl.full_state_dict(model)


def off(found, right):
    (losses, weights), (right_losses, right_weights) = found, right
    assert losses[0] == pytest.approx(right_losses[0], abs=1e-12)
    return max(float((weights[name] - right_weights[name]).abs().max()) for name in right_weights)


EVERY_STEP = functools.partial(ddl.LocalSGD, H=1)
OUTER_SGD = functools.partial(ddl.DiLoCo, H=1, outer_optimizer=plain_sgd)


@pytest.mark.parametrize("axes", [{"dp": 2}, pytest.param({"dp": 4}, marks=slow),
                                  pytest.param({"dp": 2, "tp": 2}, marks=slow),
                                  pytest.param({"dp": 2, "pp": 2}, marks=slow),
                                  pytest.param({"dp_replicate": 2, "dp_shard": 2}, marks=slow),
                                  pytest.param({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, marks=slow),
                                  pytest.param({"dp_replicate": 2, "dp_shard": 2, "pp": 2}, marks=slow)],
                         ids=str)  # fmt: skip
def test_rounds_of_one_step_are_all_reduce(axes):
    right = trained(0)
    for local in (EVERY_STEP, OUTER_SGD):
        assert all(off(found, right) <= 1e-12 for found in launch(axes, trained, local))


@slow
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "pp": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
def test_a_round_of_one_window_is_one_large_batch(axes):
    right = trained(0, gradient_accumulation_steps=3)
    found = launch(axes, functools.partial(trained, gradient_accumulation_steps=3), EVERY_STEP)
    assert all(off(one, right) <= 1e-12 for one in found)


@slow
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_running_statistics_are_those_of_dp_rank_0(axes):
    run = functools.partial(trained, batch_norm=True, rows=24, batch_size=8)
    right = launch(axes, run)[0]
    assert all(off(found, right) <= 1e-12 for found in launch(axes, run, EVERY_STEP))


@in_float64
def norms(local_rank):
    """The gradient's norm before clipping in the first step, and that of this rank's rows by hand."""
    _, _, _, trainer = make(ddl.LocalSGD(H=9), max_norm=0.01)
    x, y = rows_of()[:5]
    trainer.run(ddl.auto_dataloader(TensorDataset(x, y), batch_size=5))
    mesh, model = ddl.get_mesh(), model_of()
    a, b = (5 * (mesh.replica + i) // 2 for i in (0, 1))
    F.cross_entropy(model(x[a:b]), y[a:b]).backward()
    by_hand = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return trainer.state.grad_norm, float(by_hand)


@slow
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2},
                                  {"dp_replicate": 2, "dp_shard": 2}], ids=str)  # fmt: skip
def test_clipping_goes_by_the_norm_of_a_dp_rank(axes):
    found = launch(axes, norms)
    assert all(norm == pytest.approx(by_hand, rel=1e-9) for norm, by_hand in found)
    assert len({round(norm, 6) for norm, _ in found}) == 2


def scales_and_moves(local_rank):
    """After each of three steps of a round: the scale, and whether weights moved; rank 1 overflows in the second."""
    scaler, found = torch.amp.GradScaler("cpu", init_scale=4.0), []
    model, _, loader, trainer = make(ddl.LocalSGD(H=9), rows=15, max_norm=0.5, amp_mode="bfloat16", scaler=scaler)
    first, before = next(model.parameters()), []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: before.append(first.detach().clone()))

    @model[-1].register_forward_hook
    def overflow(module, given, output):
        if ddl.get_mesh().rank == 1 and len(before) == 2 and output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.inf)

    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: found.append((scaler.get_scale(), not first.equal(before[-1])))
    )
    trainer.run(loader)
    return found


def test_where_one_rank_overflows_in_a_round_all_skip_the_step():
    assert launch({"dp": 2}, scales_and_moves) == [[(4.0, True), (2.0, False), (2.0, True)]] * 2


class Unweighted(ddl.LocalSGD):
    """Deliberately wrong: ranks count the same, whatever their rows."""

    def averages(self):
        self.round.counted = 1.0
        return super().averages()


def wrong_variants(local_rank):
    two_steps = trained(local_rank, functools.partial(ddl.LocalSGD, H=2))
    adam = trained(local_rank, EVERY_STEP, inner=torch.optim.AdamW)
    return two_steps, adam, trained(local_rank, functools.partial(Unweighted, H=1))


@slow
def test_wrong_variants_are_seen():
    """More steps a round and AdamW inside are other algorithms; ranks of equal weight are a fault."""
    right = trained(0)
    two_steps, adam, unweighted = launch({"dp": 2}, wrong_variants)[0]
    assert min(off(two_steps, right), off(unweighted, right)) > 1e-3
    assert off(adam, trained(0, inner=torch.optim.AdamW)) > 1e-3


# ------------------------------------------------------------------------------------------------- by hand


@in_float64
def by_hand(n_ranks, H, outer=None, epochs=2):
    """Each rank's rows of each batch with plain torch: the last rank has one more where they do not divide."""
    data, models = rows_of(), [model_of() for _ in range(n_ranks)]
    old = model_of()
    outer = outer and outer(list(old.parameters()))
    counted, steps = [0.0] * n_ranks, 0

    def end_round():
        means = [sum(c * p for c, p in zip(counted, ps, strict=True)) / sum(counted)
                 for ps in zip(*(list(m.parameters()) for m in models), strict=True)]  # fmt: skip
        with torch.no_grad():
            for p, mean in zip(old.parameters(), means, strict=True):
                p.grad = p - mean
                if outer is None:
                    p.copy_(mean)
        if outer is not None:
            outer.step()
        for model in models:
            model.load_state_dict(old.state_dict())

    for _, start in itertools.product(range(epochs), range(0, 11, 5)):
        x, y = data[start : start + 5]
        for r, model in enumerate(models):
            a, b = len(x) * r // n_ranks, len(x) * (r + 1) // n_ranks
            if (count := float((y[a:b] != -100).sum())) > 0:
                grads = torch.autograd.grad(F.cross_entropy(model(x[a:b]), y[a:b]), list(model.parameters()))
                with torch.no_grad():
                    for p, g in zip(model.parameters(), grads, strict=True):
                        p -= 0.1 * g
                counted[r] += count
        steps += 1
        if steps == H:
            end_round()
            counted, steps = [0.0] * n_ranks, 0
    if steps:
        end_round()
    return old.state_dict()


@slow
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
def test_rounds_against_a_loop_of_plain_torch(axes):
    nesterov = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    for local, outer in ((functools.partial(ddl.LocalSGD, H=4), None), (functools.partial(ddl.DiLoCo, H=4), nesterov)):
        right = by_hand(2, 4, outer)
        for _, weights in launch(axes, trained, local):
            assert max(float((weights[name] - right[name]).abs().max()) for name in right) <= 1e-12


# ------------------------------------------------------------------------------------- checkpoints, evaluation


def resumed(local_rank, folder, local, stop, epochs=2):
    """The weights of a run that was stopped after ``stop`` iterations and resumed in new objects, and of one not."""
    options = {"inner": torch.optim.AdamW, "batch_norm": True, "rows": 24, "batch_size": 8}

    def run(stop=None, load=None):
        model, optimizer, loader, trainer = make(own := local(), **options)
        everything = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader, "local": own}
        if load:
            ddl.Checkpoint.load_objects(everything, load)
        if stop:
            saves = ddl.Checkpoint(everything, folder)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda: saves.save("mid"))
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), saves_nothing)
        trainer.run(loader, max_epochs=epochs)
        return ddl.full_state_dict(model)

    uninterrupted = run(stop)
    later = run(load=f"{folder}/mid")
    return all(torch.equal(later[name], uninterrupted[name]) for name in later)


def saves_nothing():
    """Another handler of the same event."""


@pytest.mark.parametrize("local", [pytest.param(functools.partial(ddl.LocalSGD, H=4), marks=slow),
                                   functools.partial(ddl.DiLoCo, H=4)], ids=["LocalSGD", "DiLoCo"])  # fmt: skip
@pytest.mark.parametrize("axes", [{"dp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=slow),
                                  pytest.param({"dp": 2, "pp": 2}, marks=slow),
                                  pytest.param({"dp_replicate": 2, "dp_shard": 2}, marks=slow)], ids=str)  # fmt: skip
@pytest.mark.parametrize("stop", [2, pytest.param(4, marks=slow)])
def test_a_run_goes_on_from_the_middle_of_a_round(tmp_path, axes, local, stop):
    assert launch(axes, resumed, str(tmp_path), local, stop) == [True] * len(launch_sizes(axes))


def launch_sizes(axes):
    return range(functools.reduce(lambda a, b: a * b, axes.values()))


def saved_in_a_round(local_rank, folder, **options):
    model, optimizer, loader, trainer = make(own := ddl.LocalSGD(H=10), **options)
    everything = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader, "local": own}
    evaluator = ddl.create_supervised_evaluator(model)
    said = []

    def in_a_round():
        differ = len(ddl.check_in_sync(model))
        for call in (
            lambda: evaluator.run(loader),
            lambda: ddl.full_state_dict(model),
            lambda: ddl.Checkpoint({k: v for k, v in everything.items() if k != "local"}, folder).save("x"),
        ):
            with pytest.raises(ValueError, match=".") as error:
                call()
            said.append(str(error.value))
        ddl.Checkpoint(everything, folder).save("mid")
        own.end_round()
        said.append(differ)
        evaluator.run(loader)

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), in_a_round)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: said.append(ddl.full_state_dict(model)))
    trainer.run(loader, max_epochs=1)
    return said


def loaded_elsewhere(local_rank, folder, **options):
    model, optimizer, loader, trainer = make(own := ddl.LocalSGD(H=10), **options)
    everything = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader, "local": own}
    with pytest.raises(ValueError, match="leave it out of to_load"):
        ddl.Checkpoint.load_objects(everything, f"{folder}/mid")
    del everything["local"]
    ddl.Checkpoint.load_objects(everything, f"{folder}/mid")
    return ddl.full_state_dict(model)


@slow
def test_in_the_middle_of_a_round(tmp_path):
    """What needs one model is refused; a checkpoint holds the average, which another mesh can load."""
    evaluates, gathers, saves, differ, ended = launch({"dp": 2}, saved_in_a_round, str(tmp_path))[0]
    assert "the evaluator runs in the middle of a round of local steps (after 2)" in evaluates
    assert "the weights are gathered in the middle of a round" in gathers
    assert "to_save should have its ddl.LocalSGD or ddl.DiLoCo beside 'model'" in saves
    assert differ == 0  # by a stated rule
    for weights in (loaded_elsewhere(0, str(tmp_path)), launch({"dp": 4}, loaded_elsewhere, str(tmp_path))[3]):
        assert all(torch.equal(weights[name], ended[name]) for name in ended)


@slow
def test_in_the_middle_of_a_round_of_sharded_replicas(tmp_path):
    """As above, with FSDP2 inside: the average is gathered from the shards of one replica."""
    options = {"frozen": True, "inner": torch.optim.Adam}
    run = functools.partial(saved_in_a_round, **options)
    *_, differ, ended = launch({"dp_replicate": 2, "dp_shard": 2}, run, str(tmp_path))[3]
    assert differ == 0
    elsewhere = functools.partial(loaded_elsewhere, **options)
    for weights in (elsewhere(0, str(tmp_path)), launch({"dp": 4}, elsewhere, str(tmp_path))[3]):
        assert all(torch.equal(weights[name], ended[name]) for name in ended)


def laid_otherwise(local_rank, folder):
    def things(local, parts=2):
        model = ddl.auto_model(nn.Sequential(nn.Linear(4, 4)), {"0": ddl.Column(parts=parts)}, dp_sync="local")
        optimizer = plain_sgd(model.parameters())
        local.attach(ddl.create_supervised_trainer(model, optimizer, F.mse_loss), model, optimizer)
        return {"model": model, "local": local}

    ddl.Checkpoint(things(ddl.DiLoCo(2)), folder).save("x")
    for other, words in (
        (things(ddl.DiLoCo(2), parts=1), r"has rows in another order .* \(Column\(parts=\)\)"),
        (things(ddl.DiLoCo(2, plain_sgd)), None),  # another rate
        (things(ddl.DiLoCo(2, torch.optim.Adam)), "has Adam as outer optimizer .* but had SGD"),
        (things(ddl.LocalSGD(2)), "has 'old.0.weight' of the shape None on this rank, but had"),
    ):
        with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
            ddl.Checkpoint.load_objects(other, f"{folder}/x")


def test_the_state_of_other_rounds_is_refused(tmp_path):
    launch({"tp": 2}, laid_otherwise, str(tmp_path))


# ---------------------------------------------------------------------------------------- bytes, refusals


def bytes_of_rounds(local_rank, local, H):
    model, _, loader, trainer = make(local(H=H), rows=32, batch_size=4, checks=False)
    counts = []
    with count_bytes() as traffic:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: counts.append(traffic.put_in))
        trainer.run(loader)
    return counts, traffic.on_a_ring, sum(p.numel() * p.element_size() for p in model.parameters())


@slow
@pytest.mark.parametrize("local", [ddl.LocalSGD, ddl.DiLoCo])
def test_a_round_sends_the_weights_once(local):
    """And each step, unchecked, 3 numbers: the loss, by what it divides, and whether its check was inconclusive."""
    loss, H = 3 * 8, 4
    for counts, on_a_ring, weights in launch({"dp": 2}, bytes_of_rounds, local, H):
        assert on_a_ring == 2 * cost.local_round(2, H, 0, weights, cost.Link(0, 1), loss).bytes
        assert counts == [n * loss + n // H * (weights + 8) for n in range(1, 9)]


def refused(local_rank, **options):
    with pytest.raises(ValueError, match=".") as error:
        ddl.auto_model(model_of(), **options)
    return str(error.value)


def steps_refused(local_rank):
    said = []
    for attach, loss_fn in ((False, F.cross_entropy), (True, functools.partial(F.cross_entropy, reduction="sum"))):
        model = ddl.auto_model(model_of(), dp_sync="local")
        optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
        trainer = ddl.create_supervised_trainer(model, optimizer, loss_fn)
        if attach:
            ddl.LocalSGD(H=2).attach(trainer, model, optimizer)
        with pytest.raises(ValueError, match=".") as error:
            trainer.run(ddl.auto_dataloader(rows_of(), batch_size=5))
        said.append(str(error.value))
    model = ddl.auto_model(model_of())
    with pytest.raises(ValueError, match='dp_sync="local"'):
        ddl.LocalSGD(H=2).attach(trainer, model, optimizer)
    return said


class OddWeights(nn.Module):
    """Of no dimensions, and with sparse gradients, neither of which FSDP2 takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.words = nn.Parameter(torch.tensor(1.0)), nn.Embedding(6, 3, sparse=True)

    def forward(self, x):
        return self.words(x.argmax(1)) * self.scale


@in_float64
def odd_weights(local_rank):
    model = ddl.auto_model(OddWeights(), dp_sync="local")
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.cross_entropy)
    with pytest.raises(TypeError, match="rate"):
        ddl.DiLoCo(1, lambda weights: torch.optim.SGD(weights, rate=1.0)).attach(trainer, model, optimizer)
    ddl.LocalSGD(1).attach(trainer, model, optimizer)  # nothing was attached before
    trainer.run(ddl.auto_dataloader(rows_of(), batch_size=5), max_epochs=2)
    return dict(ddl.full_state_dict(model))


def test_rounds_of_one_step_with_weights_that_are_not_sharded():
    right = odd_weights(0)
    for found in launch({"dp": 2}, odd_weights):
        assert all((found[name] - right[name]).abs().max() <= 1e-12 for name in right)


@slow
@pytest.mark.parametrize("option", [None, "fused", "capturable"])
def test_steps_are_on_the_gpu_where_its_kernels_count_them(option):
    weight = nn.Parameter(torch.empty(2, device="meta"))  # in place of a GPU
    optimizer = torch.optim.Adam([weight])
    optimizer.param_groups[0] |= {option: True} if option else {}
    saved = {"inner.step.w": torch.tensor(3.0), "inner.exp_avg.w": torch.zeros(2), "inner.mu.w": torch.ones(())}
    _set_tensors("inner", optimizer, {id(weight): "w"}, saved)
    devices = {part: value.device.type for part, value in optimizer.state[weight].items()}
    assert devices == {"step": "meta" if option else "cpu", "exp_avg": "meta", "mu": "meta"}


def test_what_does_not_hold_is_refused():
    for axes, options, words in (
        ({"dp": 2}, {"dp_sync": "local", "shard": True}, "needs all weights"),
        ({"dp_replicate": 1, "dp_shard": 2}, {"dp_sync": "local"}, "needs all weights"),
        ({"dp": 2, "cp": 2}, {"dp_sync": "local"}, "needs all weights and full sequences"),
        ({"dp": 2}, {"dp_sync": "local", "comm_hook": "fp16"}, "comm_hook compresses what DDP sends"),
        ({"dp": 2, "pp": 2}, {"comm_hook": "fp16"}, "comm_hook compresses what DDP sends"),
        ({"dp": 2}, {"shard": True, "comm_hook": "powersgd"}, "comm_hook compresses what DDP sends"),
        ({"dp": 2}, {"comm_hook": "bf16"}, "fails on gloo"),
        ({"dp": 2}, {"comm_hook": default_hooks.bf16_compress_hook}, "fails on gloo"),
        ({"dp": 2}, {"comm_hook": quantization_hooks.quantization_pertensor_hook}, "fails on gloo"),
        ({"dp": 2}, {"comm_hook": "powersgd", "static_graph": True}, "needs find_unused_parameters"),
    ):
        assert all(words in said for said in launch(axes, functools.partial(refused, **options))), options
    nothing, sums = launch({"dp": 2}, steps_refused)[0]
    assert "nothing averages the weights" in nothing
    assert "a loss that is a sum" in sums


# ------------------------------------------------------------------------------------------ compressed gradients


@in_float64
def compressed(local_rank, comm_hook=None, folder=None, layers=1, steps=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), *(nn.Linear(16, 16) for _ in range(layers - 1)))
    model = ddl.auto_model(model, comm_hook=comm_hook, bucket_cap_mb=1e-3)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss, checks=layers > 1)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(2 * steps, 8, generator=draw), torch.randn(2 * steps, 16, generator=draw))
    loader = ddl.auto_dataloader(data, batch_size=2)
    everything = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader}
    if folder:
        with pytest.raises(ValueError, match="to_save should have its comm_state beside 'model'"):
            ddl.Checkpoint(everything, folder).save("without")
        everything["comm"] = model.comm_state
        saves = ddl.Checkpoint(everything, folder)
        if (saves.folder / "mid").exists():
            ddl.Checkpoint.load_objects(everything, saves.folder / "mid")
        else:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: saves.save("mid"))
    sent = []
    with count_bytes() as traffic:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: sent.append(traffic.put_in))
        trainer.run(loader)
    power = getattr(getattr(model, "comm_state", None), "power", None)
    numbers = power and (power.total_numel_before_compression, power.total_numel_after_compression) or ()
    return ddl.full_state_dict(model), sent, *numbers


def difference(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def test_powersgd_is_exact_at_the_rank_of_the_gradient_and_not_below():
    """A linear layer's gradient on two rows has rank 2; the third step is the first that compresses."""
    right = compressed(0)[0]
    exact, below, plain = (launch({"dp": 2}, compressed, hook)[0] for hook in ("powersgd:2", "powersgd:1", None))
    assert max(difference(exact[0], right), difference(plain[0], right)) <= 1e-12
    assert difference(below[0], right) > 1e-3
    m, n, steps = 16, 8, 4  # by torch's count, since its hook sends from gloo's threads, which count_bytes cannot see
    assert exact[2:] == (steps * m * n, steps * 2 * (m + n))
    assert below[2:] == (steps * m * n, steps * (m + n))
    assert plain[1][-1] - plain[1][-2] == (m * n + 3) * 8  # with the numbers of the loss


@slow
def test_a_compressed_run_goes_on_with_its_error_feedback(tmp_path):
    """Several buckets, whose order DDP has to keep; on other ranks, the state is refused."""
    uninterrupted, *_ = launch({"dp": 2}, compressed, "powersgd:1", str(tmp_path), 4)[0]
    resumed_weights, sent, *_ = launch({"dp": 2}, compressed, "powersgd:1", str(tmp_path), 4)[0]
    assert len(sent) == 2
    assert difference(resumed_weights, uninterrupted) == 0
    with pytest.raises(ddl.RankError, match="leave it out of to_load, and it starts from the beginning there"):
        launch({"dp": 3}, compressed, "powersgd:1", str(tmp_path), 4)


def compressed_otherwise(local_rank, folder):
    def run(hook, load=True, **options):
        model = ddl.auto_model(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), comm_hook=hook, **options)
        things = {"model": model, "comm": model.comm_state}
        if load:
            ddl.Checkpoint.load_objects(things, f"{folder}/x")
        else:
            draw = torch.Generator().manual_seed(1)
            data = TensorDataset(torch.randn(12, 8, generator=draw), torch.randn(12, 4, generator=draw))
            trainer_of(model).run(ddl.auto_dataloader(data, batch_size=4))
            ddl.Checkpoint(things, folder).save("x")

    run("powersgd:2", load=False)
    for hook, options, words in (
        ("powersgd:1", {}, "approximates by the rank 1, but did so by 2 .* leave it out of to_load"),
        ("powersgd:2", {"bucket_cap_mb": 5e-4}, r"has buckets of .* but had \[212\] \(bucket_cap_mb\)"),
    ):
        with pytest.raises(ValueError, match=words):
            run(hook, **options)
    run("powersgd:2", bucket_cap_mb=30)


def test_the_state_of_another_compression_is_refused(tmp_path):
    launch({"dp": 2}, compressed_otherwise, str(tmp_path))


@slow
@pytest.mark.parametrize("hook", ["fp16", default_hooks.fp16_compress_hook])
def test_fp16_is_close(hook):
    assert 1e-8 < difference(launch({"dp": 2}, compressed, hook)[0][0], compressed(0)[0]) < 1e-2
