"""ddl.check_parity says "equal" where a mesh is right; where it is wrong, it says what, where and by how much."""

import functools
import textwrap
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.lab.parity import main

PLAN = {"0": ddl.Column(), "2": ddl.Row()}


def layers(act=None, hidden=8):
    return nn.Sequential(nn.Linear(4, hidden), act or nn.Tanh(), nn.Linear(hidden, 2))


def batch(rows=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


class Pair(nn.Module):
    """Its input is a dict; it drops, and normalises over the batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x):
        return {"y": self.layers(x["a"] + x["b"]).float()}  # and computes in float32, unless told otherwise


PAIR = {"prepare_batch": lambda batch, **_: ({"a": batch["x"], "b": batch["x"]}, batch["y"]),
        "model_transform": lambda output: output["y"], "gradient_accumulation_steps": 2}  # fmt: skip


class Gated(nn.Module):
    """On ranks its rows stand in another order, and are compared in the model's."""

    def __init__(self):
        super().__init__()
        self.gated, self.down = nn.Linear(4, 16), nn.Linear(8, 2)

    def forward(self, x):
        gate, value = self.gated(x).chunk(2, -1)
        return self.down(gate.tanh() * value)


@pytest.mark.parametrize(
    ("make", "plan", "options"),
    [
        (layers, PLAN, {"dp": 2, "max_norm": 0.1}),
        (layers, PLAN, {"tp": 2}),
        (layers, PLAN, {"pp": 2, "split": [1, 2], "steps": 2}),
        (Gated, {"gated": ddl.Column(parts=2), "down": ddl.Row()}, {"dp": 2, "tp": 2, "shard": True}),
    ],
    ids=["dp", "tp", "pp", "dp tp shard"],
)
def test_what_is_right_is_equal(make, plan, options):
    report = ddl.check_parity(make(), plan, batch(), F.mse_loss, **options)
    assert report.equal, report
    assert report.first is None
    assert report.dead == []
    assert 0 <= report.worst.error < 1e-13
    assert [step.rows for step in report.steps] == [8, 7, 8][: options.get("steps", 3)]
    assert all(max(step.loss_error, step.gradient_error) <= report.worst.error for step in report.steps)
    assert report.steps[0].loss != report.steps[-1].loss
    assert "\nequal: the largest error is" in str(report)


def test_dropout_batchnorm_and_float32_are_no_part_of_it_and_the_caller_keeps_its_state():
    x, y = batch()
    model, before = Pair(), torch.get_rng_state()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = ddl.check_parity(model, None, {"x": x, "y": y}, F.mse_loss, dp=2, trainer=PAIR, steps=4)
    assert report.equal, report
    assert report.worst.error < 1e-13
    assert "dropout was off" in str(report)
    assert "BatchNorm took its running statistics" in str(report)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    none = ddl.check_parity(layers(nn.Dropout(0.0)), None, batch(), F.mse_loss, dp=2, steps=1)
    assert "dropout" not in str(none)


def test_a_tp_axis_without_a_plan_warns_once_at_the_users_line(capfd):
    with pytest.warns(UserWarning, match="the mesh has tp=2, but tensor_plan is None") as caught:
        report = ddl.check_parity(layers(), None, batch(), F.mse_loss, tp=2, steps=1)
    assert report.equal, report
    assert [one.filename for one in caught if "tensor_plan" in str(one.message)] == [__file__]
    assert "tensor_plan" not in capfd.readouterr().err  # where the ranks' warnings would stand


# --------------------------------------------------------------------------------------------- what is wrong


class TwiceTheGradient(ddl.Column):
    def _apply(self, module, device_mesh):
        module = super()._apply(module, device_mesh)
        module.bias.register_hook(lambda gradient: 2 * gradient)
        return module


def test_a_wrong_gradient_is_named_with_step_ranks_size_and_factor():
    report = ddl.check_parity(layers(), PLAN | {"0": TwiceTheGradient()}, batch(), F.mse_loss, tp=2)
    first = report.first
    assert not report.equal
    assert (first.kind, first.name, first.step, first.rank) == ("gradient", "0.bias", 1, 0)
    assert first.factor == pytest.approx(2)
    assert 0.01 < first.error <= report.worst.error
    assert report.steps[0].loss_error < 1e-13 < report.steps[1].loss_error
    assert "differs: first the gradient of '0.bias' in step 1 on ranks 0, 1, 2 times" in str(report)
    assert "the factor is tp=2" in str(report)


def test_a_weight_that_one_rank_has_otherwise_is_named_with_that_rank():
    class Drifts(nn.Linear):
        def forward(self, x):
            if self.training and ddl.get_mesh().rank == 1:
                self.weight.register_hook(lambda gradient: gradient + 1e-6)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Drifts(8, 2))
    report = ddl.check_parity(model, None, batch(), F.mse_loss, tp=2, steps=1)
    assert (report.first.kind, report.first.name, report.first.rank) == ("gradient", "2.weight", 1)
    assert "on rank 1, off by" in str(report)


class Centred(nn.Module):
    """What a row becomes depends on the other rows of the batch."""

    def forward(self, x):
        return x - x.mean(0)


def test_rows_that_depend_on_each_other_are_named_as_the_cause():
    report = ddl.check_parity(layers(Centred()), None, batch(), F.mse_loss, pp=2, n_microbatches=2)
    assert (report.first.name, report.first.step) == ("loss", 1)
    assert "rows of a batch depend on each other" in str(report)


class Remembers(nn.Module):
    """Adds the mean of the batch before, which each rank knows of its own rows, where no check looks."""

    def __init__(self):
        super().__init__()
        KEPT.mean = torch.zeros(8, dtype=torch.float64)

    def forward(self, x):
        y = x + getattr(KEPT, "mean", torch.zeros(8, dtype=torch.float64)).clone()
        if self.training:
            KEPT.mean = x.detach().mean(0)
        return y


KEPT = threading.local()


def test_what_a_step_leaves_behind_shows_in_the_next():
    report = ddl.check_parity(layers(Remembers()), None, batch(), F.mse_loss, dp=2)
    assert (report.first.name, report.first.step) == ("loss", 2)
    assert report.steps[0].gradient_error < 1e-13
    assert "a buffer" in str(report)


def test_a_dead_model_is_no_proof():
    with_unused = layers()
    nn.init.zeros_(with_unused[2].weight)
    with_unused[2].weight.requires_grad_(False)
    report = ddl.check_parity(with_unused, None, batch(), F.mse_loss, dp=2)
    assert report.equal
    assert report.dead == ["0.weight", "0.bias"]
    assert "gradients are zero in one process, or at most 1e-10 of the largest: 0.weight, 0.bias" in str(report)
    report = ddl.check_parity(layers(), None, batch(), lambda output, y: 0 * output.mean() + 1, dp=2)
    assert not report.equal
    assert report.first is None
    assert report.dead[-1] == "loss"
    assert "the loss does not move" in str(report)


class Faint(nn.Module):
    """In its branch rows depend on each other, by less than what counts."""

    def __init__(self):
        super().__init__()
        self.net, self.branch = layers(), nn.Linear(4, 2)

    def forward(self, x):
        y = self.branch(x)
        return self.net(x) + 1e-11 * (y - y.mean(0)).tanh() * x[:, :2]


def test_what_is_too_small_to_compare_is_named():
    report = ddl.check_parity(Faint(), None, batch(), F.mse_loss, dp=2, lr=1e-30)
    assert report.first is None
    assert report.dead == ["branch.weight", "branch.bias", "loss"]  # the last: no weight moves
    assert not report.equal


# --------------------------------------------------------------------------------- what the caller's objects do


class WarmsUp:
    def __init__(self):
        self.calls = 0

    def __call__(self, output, y):
        self.calls += 1
        return F.mse_loss(output, y) * min(1.0, self.calls / 3)


CELL = """
unit = 1.0

class Scaled(torch.nn.Sequential):
    def forward(self, x):
        return unit * super().forward(x)
"""


def test_the_caller_s_own_model_and_criterion_stay_and_the_ranks_begin_with_them():
    space = {"__name__": "__main__", "torch": torch}
    exec(CELL, space)
    model, criterion = space["Scaled"](layers()), WarmsUp()
    weights = [p.clone() for p in model.parameters()]
    report = ddl.check_parity(lambda: model, None, batch(), lambda output, y: criterion(output, y), dp=2)
    assert report.equal, report
    assert criterion.calls == 0
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))
    space["unit"] = 0.0
    assert not model(torch.ones(1, 4)).any()  # its class is the caller's, too, and sees the caller's globals


class CountsLate(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = layers()
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x):
        self.n += self.training
        if self.n > 2:
            self.seen += x.detach().sum(0)
        return self.net(x)


def test_what_the_end_of_the_run_refuses_is_refused():
    with pytest.raises(ValueError, match="'seen' should be the same on all dp ranks"):
        ddl.check_parity(CountsLate(), None, batch(), F.mse_loss, dp=2)


class OfAllSorts(nn.Module):
    """Complex weights, dropout of torch's own functions, and a weight that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(4, 6, 2, dropout=0.5, batch_first=True)
        self.mixes = nn.Parameter(torch.randn(6, 6, dtype=torch.cfloat))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.out = nn.utils.weight_norm(nn.Linear(6, 2))

    def forward(self, x):
        y = torch.dropout(self.recurrent(x)[0][:, -1], 0.5, self.training)
        return self.out((y.cfloat() @ self.mixes).abs() * x[:, 0].abs().mean(-1, keepdim=True))


def class_weights(y):
    return (1 + y).sum()


def in_halves(criterion, output, y, pos_weight):
    one_hot = F.one_hot(y, 2).to(output.dtype)
    of_rows = F.binary_cross_entropy_with_logits(output, one_hot, pos_weight=pos_weight, reduction="none").sum(1)
    return criterion(output, y) + of_rows.sum() / class_weights(y)


def test_complex_numbers_weights_of_a_loss_and_other_dropouts():
    x = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1))
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    loss_fn = functools.partial(in_halves, criterion, pos_weight=torch.tensor([1.0, 2.0]))
    report = ddl.check_parity(OfAllSorts(), None, (x, torch.arange(8) % 2), loss_fn, dp=2,
                              trainer={"loss_divisor": class_weights})  # fmt: skip
    assert report.equal, report
    assert (report.worst.error < 1e-13, report.dead) == (True, [])
    assert "dropout was off" in str(report)
    assert criterion.weight.dtype == torch.float32


# ----------------------------------------------------------------------------- factories, refusals, the command


def test_a_factory_makes_lazy_layers_of_a_smaller_size():
    def make(n_layers=10**9, hidden=8):
        hiddens = [ddl.lazy(nn.Linear, hidden, hidden) for _ in range(n_layers)]
        return nn.Sequential(ddl.lazy(nn.Linear, 4, hidden), *hiddens, nn.Tanh(), nn.Linear(hidden, 2))

    report = ddl.check_parity(make, None, batch(), F.mse_loss, pp=2,
                              smaller={"n_layers": 2})  # fmt: skip
    assert report.equal, report
    with pytest.raises(ValueError, match="smaller is for a function"):
        ddl.check_parity(layers(), None, batch(), F.mse_loss, smaller={"n_layers": 2})


def test_a_refusal_comes_through_as_it_is_and_another_failure_as_a_rank_error():
    with pytest.raises(ValueError, match="a model of 3 layers cannot be cut into 4 stages"):
        ddl.check_parity(layers(), None, batch(), F.mse_loss, pp=4)
    words = "tp ranks have different gradients of '1.weight'"
    with pytest.raises(ValueError, match=words) as caught:
        ddl.check_parity(layers(nn.PReLU()), PLAN, batch(), F.mse_loss, tp=2)  # known on the ranks alone
    assert "Traceback" not in str(caught.value)
    for name in ("output_transform", "max_norm", "device"):  # check_parity's own
        with pytest.raises(ValueError, match=f"trainer should hold some of non_blocking, .* but given '{name}'"):
            ddl.check_parity(layers(), None, batch(), F.mse_loss, dp=2, trainer={name: None})
    with pytest.raises(ValueError, match=r"lr should be a positive number, but given 0\.0"):
        ddl.check_parity(layers(), None, batch(), F.mse_loss, dp=2, lr=0.0)
    with pytest.raises(ValueError, match="a row for each sample"):
        ddl.check_parity(layers(), None, (torch.zeros(3, 4), torch.zeros(2, 2)), F.mse_loss)

    def loss_fn(output, y):
        if ddl.get_mesh().world_size > 1:
            raise ValueError("not of ignite_ddl")
        return F.mse_loss(output, y)

    with pytest.raises(ddl.RankError, match="not of ignite_ddl"):
        ddl.check_parity(layers(), None, batch(), loss_fn, dp=2)


SCRIPT = """
import torch
from torch import nn

def make(hidden=10**9):
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))

def right():
    return make, None, (torch.ones(4, 4), torch.ones(4, 2)), nn.functional.mse_loss

class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))

def wrong():
    x = torch.arange(16.0).view(4, 4).sin()
    return dict(model=lambda hidden: Centred(4, 2), batch=(x, x[:, :2]), loss_fn=nn.functional.mse_loss)
"""


def test_the_command_says_it_by_its_exit_code(tmp_path, monkeypatch, capsys):
    (tmp_path / "of_a_user.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["of_a_user:right", "--pp", "2", "--smaller", "hidden=8"]) == 0
    assert "equal: the largest error is" in capsys.readouterr().out
    assert main(["of_a_user:wrong", "--dp", "2", "--smaller", "hidden=8", "--steps", "1"]) == 1
    assert "differs: first the loss in step 1 on ranks 0, 1" in capsys.readouterr().out
    assert main(["of_a_user:right", "--pp", "4", "--smaller", "hidden=8"]) == 2
    assert "refused: a model of 3 layers cannot be cut into 4 stages" in capsys.readouterr().out
    assert main(["of_nobody:right", "--dp", "2"]) == 3
