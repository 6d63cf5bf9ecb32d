"""Checks by forward passes, where a GPU's kernels round apart what is the same in one process."""

import argparse
import array
import collections
import enum
import functools
import itertools
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.metrics import Average
from torch import nn

from ignite_ddl.checks import regions
from ignite_ddl.checks.backward import row_gradients_depend
from ignite_ddl.checks.kept_state import is_dense, kept_beside, reached, same_value, states_kept
from ignite_ddl.checks.loss_state import LossState
from ignite_ddl.checks.mixing import rows_meet
from ignite_ddl.checks.replicas import digest
from ignite_ddl.checks.rows_alone import rows_depend_on_each_other
from ignite_ddl.checks.traceless import WatchForSums, exact_float32, outputs_depend_on, without_trace
from ignite_ddl.context.sequence import are_shards
from ignite_ddl.divisor import divisor_of
from ignite_ddl.loss_contract import LossContract, _key_of
from ignite_ddl.mesh import get_mesh

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Kernel(nn.Linear):
    """As on a GPU: the same for as many rows, otherwise rounded apart, float32 only where TF32 is allowed."""

    def forward(self, x):
        exact = super().forward(x)
        coarse = torch.backends.cuda.matmul.fp32_precision == "tf32"
        eps = torch.finfo(exact.dtype).eps if exact.dtype != torch.float32 else 2**-7 * coarse  # of many layers
        noise = torch.rand(exact.shape, generator=torch.Generator().manual_seed(len(x))).mul(2).sub(1)
        return exact * (1 + 0.5 * eps * noise).to(exact.dtype)


class InFloat32(nn.Module):
    """Numbers of 16 bits inside, a result of 32 bits, as many language models have."""

    def __init__(self, depth=12):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Kernel(16, 16) for _ in range(depth))

    def forward(self, x):
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.float()


class Centred(InFloat32):
    def forward(self, x):
        return super().forward(x - x.mean(0))


@pytest.fixture(params=["bfloat16", "float16", "autocast", "tf32", "new tf32"])
def rounding(request):
    """How a model is made to round, in a context; yields what changes the model."""
    if request.param == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            yield lambda model: model
    elif request.param == "tf32":
        torch.set_float32_matmul_precision("high")
        yield lambda model: model
        torch.set_float32_matmul_precision("highest")
    elif request.param == "new tf32":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        yield lambda model: model
        torch.set_float32_matmul_precision("highest")
    else:
        yield lambda model: model.to(getattr(torch, request.param))


def test_rows_are_independent_where_a_kernel_rounds_by_their_number(rounding):
    model = rounding(InFloat32())
    assert not rows_depend_on_each_other(model, X, [model])
    assert not row_gradients_depend(model, X, [model])
    wrong = rounding(Centred())
    assert rows_depend_on_each_other(wrong, X, [wrong])


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("by_cudnn", [True, False])
def test_settings_of_tf32_are_restored(precision, by_cudnn):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = by_cudnn
        with exact_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
            assert not torch.backends.cuda.matmul.allow_tf32
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (precision, by_cudnn)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


CALLS = itertools.count()


class Atomics(nn.Linear):
    """As index_add on a GPU, which adds in another order in each call."""

    factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor * (1 + 1e-4 * (next(CALLS) % 3))


def test_outputs_that_no_two_calls_have_in_common_do_not_depend_on_what_is_stored():
    model = Atomics(16, 4)
    model.last_loss = 1.0
    assert not outputs_depend_on(model, X, [model], {"last_loss": 2.0})
    assert outputs_depend_on(model, X, [model], {"Atomics.factor": 1.1})


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("uses", [False, True])
def test_a_loss_that_no_two_calls_have_in_common_depends_on_what_it_uses_alone(rounds, uses):
    kept = {"last": 0.0}

    def loss_fn(output, y):
        loss = F.cross_entropy(output, y) * (1 + 1e-6 * (next(CALLS) % 3) * rounds)
        return loss * (1 + kept["last"] * uses)

    state = LossState(loss_fn, get_mesh())
    state.begin(True)
    state.pair = X, torch.arange(8)
    assert state._differ(lambda: kept.update(last=0.1)) == uses


def contract_of(loss_fn):
    contract = LossContract(loss_fn, divisor_of(loss_fn), get_mesh(), None)
    contract.accumulates, contract.pairs = True, [(X, torch.arange(8) % 5)]
    return contract


def test_a_loss_adds_up_where_products_of_16_bits_round_by_the_number_of_rows():
    torch.manual_seed(0)
    head = Kernel(16, 5).bfloat16()
    assert contract_of(lambda o, y: F.cross_entropy(head(o.bfloat16()).float(), y)).compare() == 0.0
    with pytest.raises(ValueError, match="should be a mean over rows"):
        contract_of(lambda o, y: F.cross_entropy(head(o.bfloat16()).float(), y, reduction="sum")).compare()


def test_parts_of_features_and_tokens_may_round_apart_as_16_bits_do(monkeypatch):
    weight = torch.eye(16, dtype=torch.bfloat16)

    def both_ways(*_):
        known = (X.bfloat16() @ weight).float()  # such as a norm's, under autocast
        return {"down": known}, {"down": known}, {"down": known * 1.03}

    monkeypatch.setattr(regions, "_run_both_ways", both_ways)
    monkeypatch.setattr(regions, "on_any_rank", lambda found, group: found)
    regions._check(nn.Identity(), (), {}, trains=False)
    with WatchForSums() as watch:
        torch.mm(weight, weight)
    assert are_shards([X], [X * 1.03], 16, get_mesh(), watch.coarsest)
    assert not are_shards([X], [X * 1.03], 16, get_mesh())


class Counter:
    n = 0


class Slots:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


class Phase(enum.Enum):
    FIRST, SECOND = 1, 2


class Annealed(nn.Linear):
    """Divides by a number that its calls change, where it keeps it."""

    n = 0

    def __init__(self, make):
        super().__init__(16, 4)
        self.kept = make()

    def forward(self, x):
        global CALLED  # noqa: PLW0603
        kept = self.kept
        if isinstance(kept, torch.Generator):
            n = torch.rand((), generator=kept)
        elif hasattr(kept, "__next__"):
            n = next(kept)
        elif isinstance(kept, np.generic):
            n = self.kept = kept + np.int64(1)
        elif isinstance(kept, Phase):
            self.kept = Phase(3 - kept.value)
            n = kept.value
        elif kept == "class":
            Annealed.n += 1
            n = Annealed.n
        elif kept == "global":
            CALLED += 1
            n = CALLED
        elif isinstance(kept, np.ndarray):
            kept += 1
            n = float(kept[0])
        else:
            kept = kept[0] if isinstance(kept, list) else kept
            kept.n += 1
            n = kept.n
        return super().forward(x) / (1 + n)


CALLED = 0
KEPT = {
    "object": Counter,
    "slots": Slots,
    "in a list": lambda: [Counter()],
    "namespace": lambda: types.SimpleNamespace(n=0),
    "arguments": lambda: argparse.Namespace(n=0),
    "array": lambda: np.zeros(1),
    "scalar": lambda: np.int64(0),
    "enum": lambda: Phase.FIRST,
    "count": itertools.count,
    "generator": lambda: (i for i in itertools.count()),
    "class": lambda: "class",
    "global": lambda: "global",
}


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_checks_leave_no_trace_in_what_is_kept_beside_a_module(make):
    model, same = Annealed(make), Annealed(make)
    same.load_state_dict(model.state_dict())
    before = Annealed.n, CALLED
    right = [same(X) for _ in range(4)]
    Annealed.n, globals()["CALLED"] = before
    assert not rows_depend_on_each_other(model, X, [model])
    found = []
    for _ in range(4):
        with without_trace([model]):
            model(X)
        found.append(model(X))
    assert all(map(torch.equal, found, right))


def test_checks_leave_no_trace_in_a_generator_inside_an_object():
    model = Annealed(lambda: types.SimpleNamespace(n=0, of=torch.Generator().manual_seed(0)))
    before = model.kept.of.get_state()
    with without_trace([model]):
        torch.rand(3, generator=model.kept.of)
    assert torch.equal(model.kept.of.get_state(), before)


def test_an_iterator_in_two_places_stays_one():
    model = nn.Module()
    model.first = model.second = (i for i in range(9))
    for i in range(0, 4, 2):
        with without_trace([model]):
            assert (next(model.first), next(model.second)) == (i, i + 1)
        assert (next(model.second), next(model.first)) == (i, i + 1)


class Attributes(dict):
    __getattr__ = dict.get


class Frozen(dict):
    def _refuse(self, *_, **__):
        raise TypeError("frozen")

    clear = update = __setitem__ = __delitem__ = _refuse


class Numbers:
    n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return self.n


class MeanOf:
    def __get__(self, instance, owner):
        return float(owner.values[0])


class Statistics:
    values = [1.0]  # noqa: RUF012
    mean = MeanOf()

    @property
    def first(self):
        return self.values[0]


HELD = [itertools.chain, Numbers, Attributes(n=1), Frozen(n=1)]


@pytest.mark.parametrize("held", HELD, ids=lambda held: getattr(held, "__name__", None) or type(held).__name__)
def test_what_only_looks_like_an_iterator_or_like_a_change_lets_rows_be_found_that_meet(held):
    model = Annealed(lambda: held)
    model.forward = lambda x: nn.Linear.forward(model, x - x.mean(0))
    assert rows_depend_on_each_other(model, X, [model])
    assert rows_meet(functools.partial(lambda held, x: x - x.mean(0), held), X, 8)[0]
    with states_kept([model]) as kept:
        pass
    assert not any(state.changed() for state in kept)


def test_descriptors_of_a_class_stay():
    model = Annealed(Statistics)
    with without_trace([model]):
        Statistics.values.append(2.0)
        Statistics.values = [2.0]
    assert type(vars(Statistics)["mean"]) is MeanOf
    assert Statistics.mean == 1.0
    assert len(Statistics.values) == 1


def test_names_of_what_is_kept_are_those_of_another_rank_that_has_one_thing_more():
    first, second, more = types.SimpleNamespace(n=0), types.SimpleNamespace(n=0), Slots()
    of_ranks = [kept_beside([first, *others, second]) for others in ([more], [])]
    assert [[k for k, (held, _) in of.items() if held is vars(second)] for of in of_ranks] == [
        ["SimpleNamespace.n (1)"]
    ] * 2


def test_installed_packages_that_know_no_torch_are_no_code_of_a_user(monkeypatch):
    module = types.ModuleType("installed_package")
    module.__file__ = "/lib/site-packages/installed_package/__init__.py"
    exec("n = 0\ndef tick():\n    global n\n    n += 1", vars(module))
    monkeypatch.setitem(sys.modules, "installed_package", module)
    assert reached(module.tick) == []


class Frequencies(dict):
    n = 0

    def tick(self):
        self.n += 1


class Lazy:
    def __init__(self):
        self.calls = []

    @property
    def now(self):
        return self.calls.append(1)


def cached():
    calls = []
    return functools.cache(lambda: calls), lambda: calls


STATES = {
    "array": lambda: (of := array.array("d", [0.0]), lambda: of.__setitem__(0, of[0] + 1), lambda: of[0]),
    "bytearray": lambda: (of := bytearray(1), lambda: of.append(1), lambda: len(of)),
    "UserDict": lambda: (of := collections.UserDict(), lambda: of.update(n=1), lambda: len(of)),
    "Metric": lambda: (of := Average(), lambda: of.update(1.0), lambda: of.num_examples),
    "attribute of a dict": lambda: (of := Frequencies(), of.tick, lambda: of.n),
    "method of a list": lambda: (of := [], functools.partial(of.append, 1), lambda: len(of)),
    "property": lambda: (of := Lazy(), lambda: of.now, lambda: len(of.calls)),
    "cache": lambda: (of := cached(), lambda: of[0]().append(1), lambda: len(of[1]())),
}


@pytest.mark.parametrize("kind", STATES)
def test_checks_leave_no_trace_in_states_of_many_kinds(kind):
    _, tick, read = STATES[kind]()
    before = read()
    with states_kept(reached(lambda: tick())):
        tick()
        assert read() != before
    assert read() == before


OTHERS = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(4, device="meta"),
    "a cycle": lambda: (one := {}, one.update(itself=one)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_rows_that_meet_are_found_beside_tensors_of_other_layouts(make):
    model, held = Annealed(make), make()
    model.forward = lambda x: nn.Linear.forward(model, x - x.mean(0))
    assert rows_depend_on_each_other(model, X, [model])
    assert contract_of(lambda o, y: F.cross_entropy(o, y) * (1 if held is not None else 0)).compare() == 0.0
    if isinstance(held, torch.Tensor):
        assert (is_dense(held), digest(held)) == (False, 0)
        assert (same_value(held, held), same_value(held, make())) == (True, False)


def echoing():
    sent = 1
    while True:
        sent = (yield sent) or sent + 1


def test_a_generator_of_which_checks_have_read_may_be_sent_values():
    model = nn.Module()
    model.of = echoing()
    for n in (1, 8):
        for _ in range(2):
            with states_kept([model]):
                assert [next(model.of), next(model.of)] == [n, n + 1]
                with states_kept([model]):
                    assert next(model.of) == n + 2
                assert next(model.of) == n + 2
                with pytest.raises(ValueError, match="cannot be sent a value"):
                    model.of.send(3)
        assert [next(model.of) for _ in range(3)] == [n, n + 1, n + 2]
        assert model.of.send(7) == 7
    model.of.close()
    assert list(model.of) == []


def test_a_loss_may_use_a_name_that_has_no_value():
    def loss_fn(output, y):
        return F.cross_entropy(output, y) if later is None else 0

    def compare():
        return _key_of(loss_fn, None)

    assert compare() == compare()
    later = None
