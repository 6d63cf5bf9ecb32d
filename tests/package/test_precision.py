"""Mixed precision on every mesh: gradients as good as those of one process, and one decision of all ranks."""

from functools import partial

import ignite.distributed as idist
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Events
from ranks import on, trainer_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.precision import ScaledOptimizer

X = torch.randn(16, 24, generator=torch.Generator().manual_seed(1))
Y = torch.arange(16) % 5


def model_of_blocks():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24), nn.LayerNorm(24),
        nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 16), nn.Linear(16, 5),
    )  # fmt: skip


PLAN = {"0": ddl.Column(), "2": ddl.Row(), "4": ddl.Column(), "6": ddl.Row()}


def gradients(local_rank, amp_mode, scaler=False, batch_size=16, **options):
    """Those of one step, and the loss."""
    model = ddl.auto_model(model_of_blocks(), PLAN, **options)
    before = ddl.full_state_dict(model)
    trainer = trainer_of(model, F.cross_entropy, lr=1.0, amp_mode=amp_mode, scaler=scaler)
    trainer.run(ddl.auto_dataloader(TensorDataset(X, Y), batch_size=batch_size))
    after = ddl.full_state_dict(model)
    gradient = torch.cat([(before[name] - after[name]).flatten() for name in before])
    return gradient, trainer.state.output


def error(found, right):
    return float((found - right).norm() / right.norm())


MESHES = {
    "dp2 shard": ({"dp": 2}, {"shard": True}),
    "tp2": ({"tp": 2}, {}),
    "pp2": ({"pp": 2}, {}),
    "dp2 x pp2 x tp2": ({"dp": 2, "pp": 2, "tp": 2}, {}),
    "dp2 x pp2 x tp2 shard": ({"dp": 2, "pp": 2, "tp": 2}, {"shard": True}),
}


MODES = {"bfloat16": False, "float16": True}  # with or without a scaler


def in_each_mode(local_rank, options):
    return [gradients(local_rank, mode, scaler, **options) for mode, scaler in MODES.items()]


@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=[pytest.mark.slow] * ("x" in mesh)) for mesh in MESHES])
def test_gradients_are_as_near_to_float32_as_those_of_one_process(mesh):
    axes, options = MESHES[mesh]
    right, loss = gradients(0, None)
    ranks = on(in_each_mode, options, **axes)
    for (alone, _), *found in zip(in_each_mode(0, {}), *ranks, strict=True):
        assert 1e-5 < error(alone, right) < 0.05  # autocast was on
        for gradient, found_loss in found:
            assert 1e-5 < error(gradient, right) <= 2 * error(alone, right)
            assert found_loss == pytest.approx(loss, rel=0.02)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_fsdps_policy_gathers_and_computes_in_its_dtype(axes):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    right, _ = gradients(0, None)
    alone, _ = gradients(0, "bfloat16")
    for found, _ in on(partial(gradients, amp_mode=None, shard=True, mp_policy=policy), **axes):
        assert 1e-5 < error(found, right) <= 3 * error(alone, right)  # norms are bfloat16 here, too


class First(nn.Linear):
    """A first layer whose gradients are infinite, and perhaps NaN; those of later layers are neither."""

    overflow = None

    def forward(self, x):
        output = super().forward(x)
        if self.overflow == "NaN" and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))
        if self.overflow == "inf" and output.requires_grad:
            output.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
        return output


def skipped(local_rank, overflow, max_norm=None, **options):
    """Weights after each of three steps, and the scale after each; gradients overflow in the second."""
    torch.manual_seed(0)
    model = ddl.auto_model(nn.Sequential(First(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)), **options)
    scaler = torch.amp.GradScaler(idist.device().type, init_scale=4.0)
    trainer = trainer_of(model, amp_mode="bfloat16", scaler=scaler, max_norm=max_norm)
    weights, scales = [], []

    @trainer.on(Events.ITERATION_STARTED)
    def next_overflow():
        First.overflow = overflow if trainer.state.iteration == 2 else None

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        weights.append(torch.cat([w.flatten() for w in ddl.full_state_dict(model).values()]))
        scales.append(scaler.get_scale())

    trainer.run([(X[:4, :4].abs(), X[:4, 4:6])] * 3)
    return weights, scales


@pytest.mark.parametrize(("overflow", "max_norm"), [("NaN", None), ("NaN", 0.1), ("inf", None)])
@pytest.mark.parametrize(
    ("axes", "options"),
    [({"pp": 2}, {}), ({"dp": 2}, {"shard": True}), ({"tp": 2}, {"tensor_plan": {"0": ddl.Column(), "2": ddl.Row()}})],
    ids=["pp2", "dp2 shard", "tp2"],
)
def test_all_ranks_skip_a_step_if_a_gradient_of_one_overflows(axes, options, overflow, max_norm):
    alone, _ = skipped(0, overflow, max_norm)
    assert torch.equal(alone[0], alone[1])
    for (first, second, third), scales in on(partial(skipped, overflow=overflow, max_norm=max_norm, **options), **axes):
        assert torch.equal(first, second)  # of all stages
        assert (third - alone[2]).abs().max() < 0.05 * (alone[2] - alone[1]).abs().max()  # bfloat16: 2 ** -8
        assert scales == [4.0, 2.0, 2.0]


def scaled_head(local_rank):
    """The weight after a step of the last layer alone, and the scale."""
    torch.manual_seed(0)
    model = ddl.auto_model(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    head = [p for name, p in model.named_parameters() if name.startswith("2.")]
    optimizer = ddl.auto_optim(torch.optim.SGD([{"params": head}], lr=0.1))
    scaler = torch.amp.GradScaler(idist.device().type, init_scale=4.0)
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss, amp_mode="bfloat16", scaler=scaler)
    trainer.run([(X[:4, :4], X[:4, 4:6])])
    return ddl.full_state_dict(model)["2.weight"], scaler.get_scale()


def test_a_scaler_steps_an_optimizer_that_holds_nothing_of_a_stage():
    alone, scale = scaled_head(0)
    for weight, of_rank in on(scaled_head, pp=2):
        assert (weight - alone).abs().max() < 2**-8 * alone.abs().max()  # bfloat16
        assert scale == of_rank == 4.0


def test_clipping_sees_unscaled_gradients():
    def norm(local_rank, scaler):
        model = ddl.auto_model(model_of_blocks())
        trainer = trainer_of(model, F.cross_entropy, amp_mode="bfloat16", scaler=scaler, max_norm=1.0)
        trainer.run([(X, Y)])
        return trainer.state.grad_norm, hasattr(trainer.state, "scaler")

    plain, with_scaler = norm(0, False), norm(0, True)
    assert with_scaler[0] == pytest.approx(plain[0], rel=1e-2)
    assert (plain[1], with_scaler[1]) == (False, True)


def model_fn(local_rank):
    torch.manual_seed(0)
    model = ddl.auto_model(nn.Linear(24, 5))
    options = {"model_fn": lambda model, x: model(x["pixels"]), "deterministic": True}
    trainer = trainer_of(model, F.cross_entropy, **options)
    return trainer.run([({"pixels": X}, Y)]).output


def test_ignites_model_fn():
    assert on(model_fn, dp=2) == [pytest.approx(model_fn(0), rel=1e-5)] * 2
    with pytest.raises(ValueError, match="model_fn cannot be given under pp"):
        on(piped_model_fn, pp=2)


def piped_model_fn(local_rank):
    trainer_of(ddl.auto_model(model_of_blocks()), model_fn=lambda model, x: model(x))


def test_wrong_arguments():
    model = nn.Linear(24, 5)
    with pytest.raises(ValueError, match="amp_mode should be None or one of amp, bfloat16, float16, but given 'apex'"):
        trainer_of(model, amp_mode="apex")
    with pytest.raises(ValueError, match="scaler is for amp_mode="):
        trainer_of(model, scaler=True)
    with pytest.raises(ValueError, match="mp_policy is for shard=True"):
        ddl.auto_model(model, mp_policy=MixedPrecisionPolicy())
    trainer = trainer_of(nn.Linear(24, 5).half(), F.cross_entropy, amp_mode="float16", scaler=True)
    with pytest.raises(ValueError, match="scaler is for float32 parameters"):
        trainer.run([(X, Y)])


def scaled_in_float64(local_rank):
    torch.set_default_dtype(torch.float64)
    model = ddl.auto_model(nn.Linear(4, 2))
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss, amp_mode="float16", scaler=True)
    x = torch.ones(8, 4)
    x[5] = 1e308  # the second batch overflows
    trainer.run(ddl.auto_dataloader(TensorDataset(x, torch.ones(8, 2)), batch_size=4))
    return trainer.state.scaler.get_scale()


def test_a_scaler_works_under_another_default_dtype():
    assert on(scaled_in_float64, dp=2) == [2.0**15] * 2  # halved once


def test_a_schedule_that_is_made_later_sees_steps_of_a_scaler(recwarn):
    model = nn.Linear(24, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ddl.create_supervised_trainer(model, optimizer, F.cross_entropy, amp_mode="bfloat16", scaler=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: schedule.step())
    trainer.run([(X, Y)])
    assert not any("lr_scheduler.step()" in str(each.message) for each in recwarn)


def test_the_scale_is_read_once_for_all_gradients(monkeypatch):
    scaler, read = torch.amp.GradScaler("cpu"), []
    scaler.scale(torch.ones(()))
    monkeypatch.setattr(scaler, "get_scale", lambda: read.append(1) or 4.0)
    model = model_of_blocks()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 8.0)
    ScaledOptimizer(torch.optim.SGD(model.parameters()), scaler).unscale()
    assert len(read) == 1
    assert all(bool((parameter.grad == 2).all()) for parameter in model.parameters())
