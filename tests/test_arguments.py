"""Every public function with a hostile value for each of its arguments: what does not fit is refused by name.

Each call succeeds, where the value is a plausible one, or raises a ValueError that names the argument, in this process,
before a rank is started or anything is sent; none of them hangs. ``TABLE`` has valid arguments for every public
function, and what fits each of them; ``HOSTILE`` has the values, ``PLAUSIBLE`` which of them fit.
"""

import contextlib
import decimal
import fractions
import functools
import inspect
import math
import re
import resource
import shutil
import signal
import sys
import tempfile
import timeit
import warnings
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine
from ignite.metrics import Accuracy
from torch import nn
from torch.distributed.tensor import Replicate

import ignite_ddl as ddl
from ignite_ddl.lab import (
    SavedBytes,
    Timeline,
    bubble,
    bytes as counted,
    cost,
    count_bytes,
    draw,
    memory,
    parity,
    plan,
    simulate,
    timeline,
)  # fmt: skip
from ignite_ddl.lab.record import Record
from ignite_ddl.lab.simulate import world
from ignite_ddl.pipeline.schedules import divisors

SECONDS = 5  # of a call
GIGABYTES = 8  # of address space beside what is mapped already


class Text(str):
    pass


class Odd:
    """Neither its text nor its length nor its truth can be had."""

    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __len__ = __bool__ = __eq__ = __iter__ = __index__ = __float__ = __repr__
    __hash__ = object.__hash__


HOSTILE = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "10**30": lambda: 10**30,
    "10**5000": lambda: 10**5000,
    "''": lambda: "",
    "'x'": lambda: "x",
    "a str": lambda: Text("x"),
    "a NUL": lambda: "\0",
    "a long str": lambda: "x" * 10**6,
    "bytes": lambda: b"x",
    "[]": list,
    "[None]": lambda: [None],
    "['x']": lambda: ["x"],
    "{}": dict,
    "{'x': 1}": lambda: {"x": 1},
    "()": tuple,
    "a set": lambda: {1},
    "a generator": lambda: (n for n in "ab"),
    "an object": object,
    "odd": Odd,
    "a function": lambda: lambda *args, **kwargs: None,
    "a class": lambda: int,
    "a type": lambda: nn.Linear,
    "a module": lambda: nn.Linear(2, 2),
    "math": lambda: math,
    "...": lambda: ...,
    "1j": lambda: 1j,
    "Decimal": lambda: decimal.Decimal("1.5"),
    "Fraction": lambda: fractions.Fraction(3, 2),
    "int64": lambda: numpy.int64(2),
    "float64": lambda: numpy.float64(1.5),
    "numpy bool": lambda: numpy.bool_(True),
    "an array": lambda: numpy.array([1.0, 2.0]),
    "a tensor": lambda: torch.tensor([1.0, 2.0]),
    "0-d tensor": lambda: torch.tensor(2),
    "bool tensor": lambda: torch.tensor(True),
    "nan tensor": lambda: torch.tensor(math.nan),
    "meta tensor": lambda: torch.empty((), device="meta"),
}

WHOLE = {"int64", "0-d tensor"}
REAL = WHOLE | {"1.5", "10**30", "float64", "Fraction"}
CALLED = {"a function", "a class", "a type", "a module"}
EACH = {"[]", "()", "an array", "a tensor"}
STRINGS = {"''", "'x'", "a str", "a NUL", "a long str"}
PLAUSIBLE = {
    "count": WHOLE,
    "from 0": WHOLE | {"0"},
    "integer": WHOLE | {"0", "-1"},
    "amount": REAL | {"0"},
    "positive": REAL,
    "inf too": REAL | {"inf"},
    "number": REAL | {"0", "-1"},
    "below 1": {"0"},
    "share": {"0"},
    "seconds": REAL - {"10**30"},
    "amounts": EACH,
    "one or each": REAL | {"0"} | EACH,
    "counts": EACH,
    "flag": {"True", "0", "numpy bool", "bool tensor"},
    "text": STRINGS,
    "shown": STRINGS | WHOLE | REAL | {"-1", "0"},
    "path": {"'x'", "a str"},
    "choice": set(),
    "few": WHOLE | {"0"},
    "amount or inf": REAL | {"0", "inf"},
    "line": {"''"},
    "point": {"an array", "a tensor"},
    "drawn": {"[]", "()", "an array", "a tensor", "['x']", "a generator"},
    "collection": EACH | {"{}", "a set"},
    "choices": {"[]", "()", "{}"},
    "names": {"[]", "()"},
    "function": CALLED,
    "module": {"a module"},
    "model": {"a module", "a function", "a class", "a type"},
    "dict": {"{}"},
    "given": {"{}", "{'x': 1}"},
    "object": set(),
    "any": set(HOSTILE),
    "rows": {"a tensor"},
    "tensor": {"a tensor", "0-d tensor", "bool tensor", "nan tensor", "meta tensor"},
}
# A value that fits and fails later, in the user's own function or model, may raise what that raises.
USERS_OWN = {
    "function", "model", "any", "tensor", "module", "given", "path", "rows", "divisor", "factory",
    "one or each or function", "amount or function",
}  # fmt: skip


class Made:
    """A valid argument that is made anew for each call."""

    def __init__(self, make):
        self.make = make


TABLE = {}


def case(name, function, /, **arguments):
    """``arguments``: a name to what fits and a valid value; what fits with a "?" may be None."""
    TABLE[name] = function, arguments


def layers():
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 2))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


MODEL = layers()
OPTIMIZER = optimizer_of(MODEL)
LINK = cost.Link(1e-6, 1e9)
X, Y = torch.ones(4, 2), torch.zeros(4, 2)
PASSES = [Record(0, "forward", "0F0", 0, 1, None, 0, 0), Record(0, "backward", "0B0", 1, 3, None, 0, 0)]

# ------------------------------------------------------------------------------------------- cost, simulate, plan

BY_NAME = {
    **dict.fromkeys(("n_workers", "n_servers", "batch_size", "batch_per_rank"), ("count", 2)),
    **dict.fromkeys(("n_microbatches", "n_ranks", "n_nodes", "n_shards", "n_replicas", "accumulation"), ("count", 4)),
    **dict.fromkeys(("hidden", "kv_hidden", "heads", "sequence", "layers", "vocabulary", "n_samples"), ("amount", 64)),
    "n_updates": ("from 0", 4),
    "n_steps": ("count", 4),
    "loss_bytes": ("amount", 56),
    "n_chunks": ("count", 1),
    "n_rounds": ("count", 1),
    "fragments": ("count", 1),
    "overlapped": ("flag", False),
    **dict.fromkeys(("n_bytes", "weight_bytes", "input_bytes", "output_bytes", "gradient_bytes"), ("amount", 8.0)),
    **dict.fromkeys(("optimizer_bytes", "value_bytes", "mask_bytes", "activation_bytes"), ("amount", 2)),
    "gradient_value_bytes": ("amount", 4),
    **dict.fromkeys(("forward_seconds", "loss_seconds", "compute_seconds", "server_seconds"), ("amount", 0.5)),
    **dict.fromkeys(("transfer", "overhead", "save", "restart"), ("amount", 0.1)),
    "backward_seconds": ("amount", 2.0),
    "link": ("object", LINK),
    "bucket_bytes": ("amounts", [4, 4]),
    "parameter_bytes": ("amounts", [4, 4]),
    "first_bucket_bytes": ("amount?", 4),
    "ready": ("amounts?", [0.5, 1.0]),
    "enter": ("one or each?", [0, 1, 2, 3]),
    "slowdown": ("one or each?", [1, 1, 1, 2]),
    "overlap": ("share", 0.5),
    "momentum": ("below 1", 0.5),
    "learning_rate": ("amount", 0.1),
    "new_learning_rate": ("positive", 0.2),
    "n_parameters": ("amount", 1e6),
    "stage": ("few", 1),
    "rank": ("from 0", 1),
    "schedule": ("choice", "1f1b"),
    "order": ("choice", "daly"),
    "recompute": ("choice", "none"),
    "sequence_parallel": ("flag", False),
    "rendezvous": ("flag", False),
    "interval": ("amount", 20.0),
    "mean_time": ("amount", 186.0),
    "node_mean_time": ("positive", 744.0),
    "work": ("amount", 100.0),
    "seed": ("integer", 0),
    "mode": ("choice", "sync"),
    "staleness": ("from 0?", None),
    "backup": ("from 0", 0),
    "seconds": ("one or each", 1.0),
    "median": ("positive", 1.0),
    "sigma": ("amount", 0.5),
    "schedules": ("choices", ["1f1b", "gpipe"]),
    "max_peak_samples": ("amount or inf", 100.0),
    **dict.fromkeys(("forward", "backward_input", "backward_weight"), ("one or each", 1.0)),
}
OWN = {
    "simulate.failures": {"interval": ("positive", 20.0)},
    "cost.activation_bytes": {"hidden": ("positive", 64)},
    "cost.sharded_step": {"reshard_after_forward": ("flag", True)},
    "cost.ddp_buckets": {"bucket_bytes": ("amount?", 8)},
    "cost.transformer_flops": {"recompute": ("flag", True)},
    "cost.zero_bubble_seconds": dict.fromkeys(("forward", "backward_input", "backward_weight"), ("amount", 1.0)),
    "cost.parameter_server_step": {"compute_seconds": ("amount", 0.5)},
    "simulate.parameter_server_step": {"compute_seconds": ("one or each", 0.5)},
    "simulate.parameter_server": {"seconds": ("one or each or function", 1.0)},
    "simulate.local_rounds": {"seconds": ("amount or function", 1.0)},
    "simulate.pipeline": {"n_chunks": ("count?", 1)},
    "simulate.best_pipelines": {
        "batch_size": ("count", 8), "n_microbatches": ("counts?", [4, 8]), "link": ("object?", LINK)
    },
    "simulate.run": {"program": ("function", Made(lambda: lambda rank: (yield rank.compute(1.0))))},
}  # fmt: skip
PLAUSIBLE["one or each or function"] = PLAUSIBLE["one or each"] | CALLED
PLAUSIBLE["amount or function"] = PLAUSIBLE["amount"] | CALLED
RESULTS = {  # made by the library
    "cost": {
        "RESNET50_P100",
        *[
            "Collective",
            "DDPStep",
            "ForwardBackward",
            "LocalRound",
            "MasterStep",
            "ScaledStep",
            "ServerStep",
            "ShardedStep",
            "ZeroMemory",
        ],
    },
    "simulate": {
        *["Gradient", "PipeDream", "Pipeline", "PipelinePlan", "Rank", "RunWithFailures", "ServerRun", "Simulation"]
    },
    "plan": {"A100", "H100", "Plan"},
    "draw": {"ACTIVITY", "GREY", "INK", "RANK", "SHADE"},
    "memory": set(),
    "counted": {"Call", "Traffic"},
    "timeline": set(),
    "ddl": {*["HangReport", "Mesh", "OutOfSync", "ParityReport", "RankError", "UnlikeCalls", "tpu"]},
}
for module in (cost, simulate):
    short = module.__name__.rpartition(".")[2]
    for name in set(module.__all__) - RESULTS[short] - {"Link", "ring"}:
        known = BY_NAME | OWN.get(f"{short}.{name}", {})
        function = getattr(module, name)
        case(f"{short}.{name}", function, **{one: known[one] for one in inspect.signature(function).parameters})
case("cost.Link", cost.Link, latency=("amount", 1.0), bandwidth=("inf too", 1e9))
case("cost.Link.seconds", lambda **given: LINK.seconds(**given), n_bytes=("amount", 8))


def in_a_program(method):
    """Calls a method of a Rank inside a simulated program."""

    def call(**given):
        def program(rank):
            yield getattr(rank, method)(**given)

        return simulate.run(program, 1, LINK)

    return call


case("Rank.compute", in_a_program("compute"), seconds=("amount", 1.0), name=("any", "x"), kind=("any", "compute"))
case("Rank.send", in_a_program("send"), to=("from 0", 0), n_bytes=("amount", 1.0), value=("any", 0), tag=("any", 0))


def ring_in_a_program(**given):
    def program(rank):
        yield from simulate.ring(**({"rank": rank} | given))

    simulate.run(program, 2, LINK)


case("simulate.ring", ring_in_a_program, chunks=("object", Made(lambda: [1, 2])), n_bytes=("amount", 8), tag=("any", 0))
case("Lognormal()", lambda **given: simulate.Lognormal(1, 1)(**given), worker=("from 0", 0), step=("from 0", 1))


def firing(**given):
    def program(rank):
        rank.fire(**given)
        yield rank.compute(1.0)

    simulate.run(program, 1, LINK)


case("Rank.fire", firing, event=("object", Made(world.Event)))
case("Rank.background", in_a_program("background"), body=("body", Made(lambda: (pause for pause in ()))))
PLAUSIBLE["body"] = {"a generator"}
USERS_OWN.add("body")

GPT = plan.Model(layers=4, width=64, heads=4, vocabulary=100, sequence=16)
CLUSTER = plan.Cluster(4, **plan.A100)
PLANS = plan.plan(GPT, CLUSTER, 8, schedules=["1f1b"], recompute=["none"])
case(
    "plan.Model", plan.Model, **dict.fromkeys(("layers", "heads", "vocabulary", "sequence"), ("count", 4)),
    width=("count", 64), **dict.fromkeys(("tied", "sequence_parallel"), ("flag", True)),
    **dict.fromkeys(("weight_bytes", "gradient_bytes", "optimizer_bytes", "value_bytes", "mask_bytes"), ("amount", 2)),
    **dict.fromkeys(("gated", "bias"), ("flag", True)), kv_heads=("count?", 4), head_width=("count?", 16),
    mlp_width=("count?", 64), positions=("from 0?", 16), experts=("from 0", 0), chosen=("from 0", 0),
    expert_width=("count?", None), shared_width=("from 0", 0), expert_layers=("from 0?", None),
    kernels=("choice", "fused"), loss_bytes=("amount?", 4),
)  # fmt: skip


def small_gpt():
    from ignite_ddl.course import GPT

    return GPT(80, length=16, width=32, n_heads=4, n_blocks=2)


BUILT = small_gpt()
case("plan.Model.of", plan.Model.of, module=("module", BUILT), sequence=("count", 16))
case(
    "plan.Cluster", plan.Cluster, devices=("count", 4), memory=("amount", 8e10), flops=("positive", 3e14),
    inside=("object", LINK), between=("object", LINK), node=("count", 8), best=("positive", 0.5),
    half_width=("amount", 1.0), overlap=("share", 0.5), reserved=("amount", 0.0), eager=("amount?", 2.0),
    spread=("flag", True), peaks=("plan?", {"float32": 1e13}),
)  # fmt: skip
case("plan.Model.parameters_on", GPT.parameters_on, pp=("count", 1), tp=("count", 1), layers=("from 0", 4))
case("plan.Cluster.efficiency", CLUSTER.efficiency, width=("positive", 64))
case("plan.Cluster.link", CLUSTER.link, n_ranks=("count", 2), apart=("count", 1))
case(
    "plan.predict", plan.predict, model=("object", GPT), cluster=("object", CLUSTER), batch=("count", 8),
    **dict.fromkeys(("dp", "tp"), ("count", 1)), pp=("count", 2), schedule=("choice", "1f1b"), n_chunks=("count?", 1),
    microbatches=("count?", 2), zero=("few", 0), recompute=("choice", "none"), cp=("count", 1), ep=("count", 1),
    dp_shard=("count?", None), full_layers=("from 0?", None),
)  # fmt: skip
case(
    "plan.plan", plan.plan, model=("object", GPT), cluster=("object", CLUSTER), batch=("count", 8),
    schedules=("choices", ["1f1b"]), recompute=("choices", ["none"]),
)  # fmt: skip
case("plan.table", plan.table, plans=("names", PLANS), n=("count", 3))
case("plan.figure", plan.figure, colour=("choice", "pp"), plans=("object", PLANS[:2]), title=("text", "t"))

# ------------------------------------------------------------------------------------------- what measures and draws


def spanned(**given):
    with Timeline().span(**given):
        pass


LINE = Timeline()
LINE._recorder.spans.append(("compute", "work", 0.0, 1.0, None))
case("timeline.Timeline", Timeline, synchronize=("flag", False))
ENGINE = ("object", Made(lambda: Engine(lambda e, b: None)))
case("Timeline.attach", Timeline().attach, engine=ENGINE, name=("text", "x"))
case("Timeline.span", spanned, name=("text", "x"), kind=("choice", "data"))
case("Timeline.merge", Timeline.merge, timelines=("names", [LINE]))
case("Timeline.to_chrome", LINE.to_chrome, path=("path", Made(lambda: Path(tempfile.gettempdir()) / "trace.json")))
case("timeline.bubble", bubble, records=("object", PASSES))
case("counted.count_bytes", count_bytes)
case("Traffic.of", lambda op: counted.Traffic().of(op), op=("text", "send"))
case("memory.SavedBytes", SavedBytes, model=("module?", MODEL))

AXES = ("object", None)
BY_NAME_DRAWN = {
    "axes": AXES,
    "figure": ("object", None),
    "records": ("object", PASSES),
    "panels": ("dict", {"a": PASSES}),
    "title": ("text", "t"),
    "unit": ("text", "ms"),
    "text": ("shown", "t"),
    "colour": ("choice", "#0072B2"),
    "colours": ("names", ["#0072B2"]),
    "edge": ("choice", "white"),
    "linestyle": ("line", "-"),
    **dict.fromkeys(("width", "height", "size", "row", "columns", "base"), ("positive", 2)),
    "linewidth": ("amount", 2),
    **dict.fromkeys(("left", "top", "start", "end", "low", "high", "x", "y", "place", "scale"), ("number", 1.0)),
    "strength": ("share", 0.5),
    "bold": ("flag", False),
    "bare": ("flag", False),
    "upright": ("flag", False),
    "pad": ("number?", 3),
    "names": ("drawn", ["a", "b"]),
    "at": ("amounts", [1, 2]),
    "ratios": ("amounts", [1, 2]),
    "entries": ("choices", {"a": "#0072B2"}),
    "parts": ("names", [(1.0, "#0072B2", "a")]),
    "value": ("from 0", 5),
    "rank": ("from 0", 1),
    "offset": ("point", (7, 0)),
    "predicted": ("dict", {"a": {1: 2, 2: 3}}),
    "measured": ("dict", {"a": {1: 2}}),
}
OWN_DRAWN = {
    "arrow": {"start": ("point", (0, 0)), "end": ("point", (1, 1)), "colour": ("choice", "#555555")},
    "note": {"at": ("point", (0, 0)), "colour": ("choice?", "#555555"), "text": ("shown", "t")},
    **dict.fromkeys(("tile", "stripes", "span"), dict.fromkeys(("width", "height", "row"), ("number", 1))),
    "heading": {"text": ("shown", "t")},
    "new_figure": {"columns": ("count", 1)},
    "new_drawing": {"columns": ("count", 1)},
    "log_axis": {"base": ("positive", 10), "at": ("collection", [1, 2])},
    "step_rows": {"panels": ("dict", {"a": {"b": PASSES}}), "ends_marked": ("flag", True)},
    "bar": {"size": ("positive", 0.8)},
}


@functools.cache
def drawn():
    import matplotlib

    matplotlib.use("Agg")
    return draw.new_figure("t")


for name in set(draw.__all__) - RESULTS["draw"]:
    function = getattr(draw, name)
    known = BY_NAME_DRAWN | OWN_DRAWN.get(name, {})
    given = {one.name: known[one.name] for one in inspect.signature(function).parameters.values() if one.kind != 4}
    given |= {"axes": ("object", Made(lambda: drawn()[1]))} if "axes" in given else {}
    given |= {"figure": ("object", Made(lambda: drawn()[0]))} if "figure" in given else {}
    case(f"draw.{name}", function, **given)

# ------------------------------------------------------------------------------------------- the package

CUT = {
    "schedule": ("choice", "1f1b"),
    "n_microbatches": ("count?", 4),
    "split": ("counts?", [2, 2]),
    "costs": ("amounts?", [1, 1, 1, 1]),
}
PLAN = {"0": ddl.Column(), "2": ddl.Row()}
case(
    "ddl.check_model", ddl.check_model, model=("module", MODEL), tensor_plan=("dict?", PLAN), dp=("count?", 1),
    pp=("count", 2), tp=("count", 1), dp_replicate=("count?", None), dp_shard=("count?", None), cp=("count", 1),
    ep=("count", 1), **CUT, batches=("counts", [8]),
)  # fmt: skip
case("ddl.check_model (no pp)", ddl.check_model, model=("module", MODEL), tensor_plan=("dict?", PLAN),
     **{name: (kind, None if name != "schedule" else valid) for name, (kind, valid) in CUT.items()},
     batches=("counts", [8]))  # fmt: skip
case(
    "ddl.auto_model", ddl.auto_model, model=("module", Made(layers)), tensor_plan=("dict?", PLAN), **CUT,
    shard=("flag?", False), checks=("flag", True), mp_policy=("object?", None),
    reshard_after_forward=("flag?", None), offload=("flag", False), dp_sync=("choice", "step"),
    comm_hook=("choice or function?", "powersgd:2"),
)  # fmt: skip
PLAUSIBLE["choice or function"] = PLAUSIBLE["choice"] | CALLED
case("ddl.auto_optim", ddl.auto_optim, optimizer=("object", OPTIMIZER), checks=("flag", True))
case(
    "ddl.check_parity", ddl.check_parity, model=("model", Made(layers)), plan=("dict?", PLAN),
    batch=("rows", (X, Y)), loss_fn=("function", F.mse_loss), dp=("count?", 1), pp=("count", 2), tp=("count", 1),
    dp_replicate=("count?", None), dp_shard=("count?", None), cp=("count", 1), ep=("count", 1),
    reshard_after_forward=("flag?", None), offload=("flag", False), **CUT, shard=("flag?", False),
    steps=("count", 1), lr=("amount?", 0.1),
    max_norm=("inf too?", 1.0), atol=("amount", 1e-10), timeout=("seconds", 60), smaller=("given?", None),
    trainer=("given?", None),
)  # fmt: skip
case(
    "ddl.Parallel", ddl.Parallel, backend=("choice?", "gloo"), nproc_per_node=("count?", 2), nnodes=("count?", 1),
    node_rank=("from 0?", 0), master_addr=("host?", None), master_port=("port?", None), init_method=("choice?", None),
    dp=("axis?", 2), pp=("axis?", 1), tp=("axis?", 1), dp_replicate=("axis?", None), dp_shard=("axis?", None),
    cp=("axis?", None), ep=("count?", None), timeout=("seconds?", 60), group_timeout=("seconds?", 60),
    threads_per_rank=("count?", 1), start_method=("choice?", None), servers=("from 0", 0),
    on_failure=("choice", "raise"),
)  # fmt: skip
PLAUSIBLE |= {"host": {"'x'", "a str", "a long str"}, "port": WHOLE, "axis": WHOLE | {"-1"}}
case("Parallel.run", ddl.Parallel().run, func=("function", Made(lambda: lambda rank: rank)))
case(
    "ddl.initialize_mesh", ddl.initialize_mesh, pp=("axis", 1), tp=("axis", 1), cp=("axis", 1), ep=("count", 1),
    **dict.fromkeys(("dp", "dp_replicate", "dp_shard"), ("axis?", 1)),
)  # fmt: skip
case("ddl.get_mesh", ddl.get_mesh)
for attention in (ddl.ring_attention, ddl.ulysses_attention):
    case(
        f"ddl.{attention.__name__}", attention,
        **dict.fromkeys(("query", "key", "value"), ("object", torch.ones(1, 2, 4, 2))),
        attn_mask=("object?", None), dropout_p=("below 1", 0.0), is_causal=("flag", True), scale=("number?", 1.0),
        enable_gqa=("flag", False), documents=("object?", None), window=("count?", 2), group=("object?", None),
    )  # fmt: skip
case("ddl.sequence_positions", ddl.sequence_positions, tokens=("count", 4), device=("object?", torch.device("cpu")))
case("ddl.gather_rows", ddl.gather_rows, rows=("rows", torch.ones(3, 2)))
ROUTER = {"normalize": ("flag", True), "capacity_factor": ("amount?", 1.5)}
ROUTER |= dict.fromkeys(("balance_weight", "z_weight", "bias_rate"), ("amount", 0.1))
SIZES = {"n_features": ("count", 4), "n_experts": ("count", 4), "top_k": ("count", 2)}
case("ddl.Router", ddl.Router, **SIZES, **ROUTER)
case("ddl.MixtureOfExperts", ddl.MixtureOfExperts, **SIZES, n_hidden=("count", 4), shared=("module?", None), **ROUTER)
case("ddl.Experts", ddl.Experts, tp=("plan?", {"up": 1}))
PLAUSIBLE["plan"] = {"{}", "{'x': 1}"}
case("ddl.pickle_shards", ddl.pickle_shards)
case(
    "ddl.ParameterServer", ddl.ParameterServer, model=("module", Made(layers)),
    optimizer=("function", Made(lambda: lambda p: torch.optim.SGD(p, lr=0.1))), mode=("choice", "bounded"),
    staleness=("from 0", 1), backup=("from 0", 0), timeout=("seconds", 60),
)  # fmt: skip


def pushed(**given):
    model = layers()
    server = ddl.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=0.1))
    server.pull()
    model(X).sum().backward()
    server.push(**given)


case("ParameterServer.push", pushed, gradients=("given?", None), rows=("from 0", 2))
case("ddl.Throughput", ddl.Throughput, flops=("positive?", 1e6), peak_flops=("positive?", 1e12), window=("count", 20))
case("Throughput.attach", ddl.Throughput().attach, engine=ENGINE)
case("ddl.LocalSGD", ddl.LocalSGD, H=("count", 4))
case("ddl.DiLoCo", ddl.DiLoCo, H=("count", 4), outer_optimizer=("function?", optimizer_of))
for rounds in (ddl.LocalSGD, ddl.DiLoCo):
    case(
        f"{rounds.__name__}.attach", lambda rounds=rounds, **given: rounds(4).attach(**given),
        trainer=("object", Made(lambda: ddl.MeshEngine(lambda engine, batch: None))),
        model=("object", Made(lambda: ddl.auto_model(layers(), dp_sync="local"))), optimizer=("object", OPTIMIZER),
    )  # fmt: skip
DATA = torch.utils.data.TensorDataset(X, Y)
case(
    "ddl.auto_dataloader", ddl.auto_dataloader, dataset=("data", DATA), batch_size=("count", 2),
    shuffle=("flag?", False), sampler=("sampler?", None), batch_sampler=("sampler?", None), num_workers=("from 0", 0),
    collate_fn=("function?", None), drop_last=("flag", False), timeout=("amount", 0), pin_memory=("flag", False),
    worker_init_fn=("function?", None), generator=("object?", None), prefetch_factor=("count?", None),
    persistent_workers=("flag", False),
)  # fmt: skip
SEQUENCES = {"[]", "[None]", "['x']", "()", "{}", "{'x': 1}", "''", "'x'", "a str", "a NUL", "a long str", "bytes"}
PLAUSIBLE["data"] = SEQUENCES | {"an array", "a tensor", "a set"}
PLAUSIBLE["sampler"] = EACH | {"[None]", "['x']", "a set", "a generator", "odd"}
DIVISOR = ("divisor?", "rows")
GPUS = {"0", "1", "2", "3"} if torch.backends.cuda.is_built() else set()  # numbers of GPUs, to a torch that knows them
PLAUSIBLE |= {"divisor": CALLED, "device": GPUS, "scaler": PLAUSIBLE["flag"]}
TRAINER = {
    "device": ("device?", "cpu"),
    "non_blocking": ("flag", False),
    "prepare_batch": ("function", Made(lambda: lambda batch, **_: batch)),
    "model_transform": ("function", Made(lambda: lambda output: output)),
    "amp_mode": ("choice?", "bfloat16"),
    "model_fn": ("function", Made(lambda: lambda model, x: model(x))),
}
case(
    "ddl.create_supervised_trainer", ddl.create_supervised_trainer, model=("module", MODEL),
    optimizer=("object", OPTIMIZER), loss_fn=("function", F.mse_loss), **TRAINER,
    output_transform=("function?", Made(lambda: lambda *_: 0)), deterministic=("flag", False),
    scaler=("scaler", False), gradient_accumulation_steps=("count", 1), max_norm=("inf too?", 1.0),
    loss_divisor=DIVISOR, checks=("flag", True),
)  # fmt: skip
case(
    "ddl.create_supervised_evaluator", ddl.create_supervised_evaluator, model=("module", MODEL),
    metrics=("dict?", Made(lambda: {"accuracy": Accuracy()})), **TRAINER,
    output_transform=("function", Made(lambda: lambda *_: 0)),
)  # fmt: skip
case(
    "ddl.forward_backward", ddl.forward_backward, engine=("object", Made(lambda: ddl.MeshEngine(lambda e, b: None))),
    model=("module", MODEL), x=("any", X), y=("any", Y), loss_fn=("function", F.mse_loss), loss_divisor=DIVISOR,
    scale=("number", 1.0), last=("flag", True), amp_mode=("choice?", None),
)  # fmt: skip
case(
    "ddl.clip_grad_norm_",
    ddl.clip_grad_norm_,
    model=("module", MODEL),
    max_norm=("inf too", 1.0),
    optimizer=("object?", None),
    parameters=("weights?", None),
)
PLAUSIBLE["weights"] = {"[]", "()"}
case("ddl.MeshEngine", ddl.MeshEngine, process_function=("function", Made(lambda: lambda engine, batch: None)))
case(
    "ddl.cross_entropy", ddl.cross_entropy, logits=("tensor", torch.ones(4, 3)),
    target=("tensor", torch.tensor([0] * 4)), ignore_index=("integer", -100), reduction=("choice", "mean"),
    weight=("tensor?", None), label_smoothing=("share", 0.0),
)  # fmt: skip
case("ddl.check_in_sync", ddl.check_in_sync, model=("module", MODEL))
case("ddl.check_same_calls", ddl.check_same_calls)
case("ddl.empty_weights", ddl.empty_weights)
case("ddl.lazy", ddl.lazy, factory=("factory", nn.Linear))
PLAUSIBLE["factory"] = CALLED - {"a module"}
case("ddl.full_state_dict", ddl.full_state_dict, model=("module", MODEL), on_rank=("from 0?", 0))
case(
    "ddl.load_full_state_dict", ddl.load_full_state_dict, model=("module", MODEL), state=("object", MODEL.state_dict())
)
case(
    "ddl.distribute_like",
    ddl.distribute_like,
    value=("tensor", torch.ones(3, 4)),
    parameter=("object", nn.Parameter(torch.ones(3, 4))),
)
case(
    "ddl.layer_costs",
    ddl.layer_costs,
    model=("module", MODEL),
    x=("tensor", X),
    unit=("choice", "seconds"),
    repeats=("count", 2),
)
case("ddl.report_hangs", ddl.report_hangs, after=("seconds", 60))
case("ddl.trace_layers", ddl.trace_layers, model=("module", MODEL), x=("rows", X), before=("object", ["2"]))
FOLDER = Path(tempfile.mkdtemp(prefix="ignite_ddl_arguments_"))
case(
    "ddl.export_weights", ddl.export_weights, model=("module", MODEL), folder=("path", FOLDER / "weights"),
    max_shard_size=("count?", 100),
)  # fmt: skip
case("ddl.import_weights", ddl.import_weights, model=("module", MODEL), folder=("path", FOLDER / "weights"))
SAVED = {"model": MODEL}
ANY_FOLDER = ("path", FOLDER)
case(
    "ddl.Checkpoint", ddl.Checkpoint, to_save=("object", SAVED), save_handler=ANY_FOLDER, filename_prefix=("text", ""),
    score_function=("function?", None), score_name=("text?", None), n_saved=("count?", 1),
    global_step_transform=("function?", None), filename_pattern=("text?", None), include_self=("flag", False),
    greater_or_equal=("flag", False), asynchronous=("flag", False), digests=("flag", True),
)  # fmt: skip
case(
    "Checkpoint.load_objects", ddl.Checkpoint.load_objects, to_load=("object", SAVED),
    checkpoint=("path", FOLDER / "one"), strict=("flag", True),
)  # fmt: skip
case(
    "Checkpoint.load_newest",
    ddl.Checkpoint.load_newest,
    to_load=("object", SAVED),
    folder=("path", FOLDER),
    strict=("flag", True),
)
case(
    "Checkpoint.save_on_signal", lambda **given: ddl.Checkpoint(SAVED, FOLDER).save_on_signal(**given),
    trainer=ENGINE, signum=("few", signal.SIGUSR2),
)  # fmt: skip
case(
    "Checkpoint()", lambda **given: ddl.Checkpoint(SAVED, FOLDER / "own", score_function=lambda _: 1)(**given),
    engine=ENGINE,
)  # fmt: skip
case("Checkpoint.save", lambda **given: ddl.Checkpoint(SAVED, FOLDER / "own").save(**given), name=("path", "x"))
case(
    "Checkpoint.reload_objects",
    lambda **given: ddl.Checkpoint(SAVED, FOLDER, filename_pattern="{name}").reload_objects(SAVED, **given),
    load_kwargs=("choices?", {}), name=("any", "one"),
)  # fmt: skip

PLAUSIBLE["batches"] = set(HOSTILE) & {
    *STRINGS, *EACH, "bytes", "[None]", "['x']", "{}", "{'x': 1}", "a set", "a generator", "odd",
}  # fmt: skip
USERS_OWN.add("batches")
RUNNING = {
    "data": ("batches?", [1, 2]), "max_epochs": ("count?", 1), "max_iters": ("count?", None),
    "epoch_length": ("count?", 1),
}  # fmt: skip
case("MeshEngine.run", lambda **given: ddl.MeshEngine(lambda engine, batch: None).run(**given), **RUNNING)
case(
    "MeshEngine.set_data", lambda **given: ddl.MeshEngine(lambda engine, batch: None).set_data(**given),
    data=("batches", [1]),
)  # fmt: skip


def rows_of(method):
    return lambda **given: getattr(ddl.auto_dataloader(DATA, batch_size=2), method)(**given)


case("loader.set_epoch", rows_of("set_epoch"), epoch=("from 0", 1))
case(
    "loader.state_dict", rows_of("state_dict"), engine=("object?", Made(lambda: Engine(lambda e, b: None))),
    new_pass=("flag", False),
)  # fmt: skip
case(
    "loader.load_state_dict", rows_of("load_state_dict"), state=("object", Made(rows_of("state_dict"))),
    engine=("object?", Made(lambda: Engine(lambda e, b: None))),
)  # fmt: skip
case("Mesh.coordinates", lambda **given: ddl.get_mesh().coordinates(**given), rank=("place", 0))
case("Mesh.rank_at", lambda **given: ddl.get_mesh().rank_at(**given), **dict.fromkeys(("dp", "pp", "tp"), ("place", 0)))
PLAUSIBLE["place"] = {"0"}
LAYOUT = ("object?", Replicate())
case("ddl.Column", ddl.Column, units=("units?", 2), parts=("counts", 1), output_layouts=LAYOUT, input_layouts=LAYOUT,
     use_local_output=("flag", True))  # fmt: skip
PLAUSIBLE["units"] = WHOLE | STRINGS
PLAUSIBLE["counts"] = EACH | WHOLE
case("ddl.Row", ddl.Row, input_layouts=LAYOUT, output_layouts=LAYOUT, use_local_output=("flag", True))
case("ddl.SharedInput", ddl.SharedInput, input_layouts=LAYOUT)
case("ddl.InputChannels", ddl.InputChannels, whole_input=("flag", True))
case("ddl.SplitSequence", ddl.SplitSequence, dim=("integer", 1))
case("ddl.Sequence", ddl.Sequence, dim=("integer", 1))
for style in (ddl.OutputChannels, ddl.ShardedRandom, ddl.SharedWeight):
    case(f"ddl.{style.__name__}", style)


# ------------------------------------------------------------------------------------------- how


class Hung(BaseException):
    pass


def alarm(*_):
    raise Hung


class Reached(Exception):
    """The arguments were accepted: ranks would start now."""


class Accepted(ddl.Parallel):
    def run(self, *args, **kwargs):
        raise Reached


def outcome(function, name, arguments, label, kind):
    """What is wrong with this call; None if nothing is."""
    given = valid(arguments) | {name: HOSTILE[label]()}
    optional, kind = kind.endswith("?"), kind.removesuffix("?")
    fits = label in PLAUSIBLE[kind] or (optional and label == "None")
    try:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            function(**given)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Reached:
        pass
    except Hung:
        return "hung"
    except BaseException as error:
        with contextlib.suppress(Exception):
            text = str(error)
            told = arguments if fits else [name]  # what fits by itself may not suit another argument
            if isinstance(error, ValueError) and any(re.search(rf"\b(tensor_)?{one}\b", text) for one in told):
                return None if len(text) < 2000 else "too long a message"
            if label in PLAUSIBLE[kind] and kind in USERS_OWN:
                return None
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None if fits else "accepted"


@contextlib.contextmanager
def guarded(patch):
    """No call takes all memory or all time, or starts ranks; what it prints and draws is thrown away."""
    patch.setattr(parity, "Parallel", Accepted)
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, alarm)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + GIGABYTES * 2**30, before[1]))
    usr2 = signal.getsignal(signal.SIGUSR2)
    try:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.signal(signal.SIGUSR2, usr2)
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module", autouse=True)
def _saved():
    ddl.export_weights(MODEL, FOLDER / "weights")
    ddl.Checkpoint(SAVED, FOLDER).save("one")
    yield
    shutil.rmtree(FOLDER)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


def valid(arguments):
    return {name: one.make() if isinstance(one, Made) else one for name, (_, one) in arguments.items()}


# ------------------------------------------------------------------------------------------- the tests


def test_the_table_has_every_public_name():
    modules = {"ddl": ddl, "cost": cost, "simulate": simulate, "plan": plan, "draw": draw, "memory": memory}
    for short, module in (modules | {"counted": counted, "timeline": timeline}).items():
        for name in set(module.__all__) - RESULTS[short]:
            function, arguments = TABLE[f"{short}.{name}"]
            parameters = inspect.signature(function).parameters.values()
            named = {one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
            assert named <= arguments.keys(), name


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(TABLE))
def test_hostile_values(name, every, monkeypatch):
    """With every third value, which begin with another one for each argument; and with all."""
    function, arguments = TABLE[name]
    with guarded(monkeypatch):
        with contextlib.suppress(Reached):
            function(**valid(arguments))  # so that what is refused is the one value
        for number, (argument, (kind, _)) in enumerate(arguments.items()):
            for label in list(HOSTILE)[(number + len(name)) % every :: every]:
                wrong = outcome(function, argument, arguments, label, kind)
                assert wrong is None, f"{name}({argument}={label}): {wrong}"


@pytest.mark.parametrize("name", sorted(TABLE))
def test_numbers_of_numpy_and_torch_are_numbers(name, monkeypatch):
    function, arguments = TABLE[name]
    with guarded(monkeypatch):
        for argument, number in valid(arguments).items():
            kinds = {bool: (numpy.bool_, torch.tensor), int: (numpy.int64, numpy.uint8, torch.tensor)}
            kinds[float] = numpy.float64, numpy.float32, torch.tensor
            for kind in kinds.get(type(number), ()):
                if number not in (-100, signal.SIGUSR2):
                    with contextlib.suppress(Reached):
                        function(**valid(arguments) | {argument: kind(number)})


@pytest.mark.parametrize("name", sorted(TABLE))
def test_none_fits_where_the_signature_says_so(name, monkeypatch):
    function, arguments = TABLE[name]
    with guarded(monkeypatch):
        for one in inspect.signature(function).parameters.values():
            if "None" in str(one.annotation) and one.name in arguments:
                try:
                    function(**valid(arguments) | {one.name: None})
                except Reached:
                    pass
                except ValueError as error:
                    if str(error).startswith(f"{one.name} should be ") and "with mode=" not in str(error):
                        raise  # else it does not suit another argument


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ddl.check_model(MODEL, tp=1.5), "tp should be a positive integer, but given 1.5"),
        (lambda: ddl.check_model(MODEL, dp="x"), "dp should be a positive integer, but given 'x'"),
        (lambda: ddl.check_model(MODEL, schedule="1b1f"), "schedule should be one of gpipe, 1f1b, .* given '1b1f'"),
        (lambda: ddl.check_model("gpt"), "model should be an nn.Module, but given 'gpt'"),
        (lambda: ddl.check_model(MODEL, pp=2, batches=[10**30]), r"batches should be numbers of rows, .* \["),
        (lambda: ddl.Parallel("gloo", 2, master_port="x"), "master_port should be a port, but given 'x'"),
        (lambda: ddl.auto_dataloader(DATA, num_workers=10**30), "num_workers should .*; the largest is 4,096"),
        (lambda: ddl.auto_dataloader(3), "dataset should be a dataset, with __getitem__ and __len__, .* given 3"),
        (lambda: ddl.cross_entropy(X, Y, label_smoothing=-1), "label_smoothing should be a number from 0 to 1, but"),
        (lambda: ddl.clip_grad_norm_(MODEL, math.nan), "max_norm should be a positive number, .* nan, which is not f"),
        (lambda: cost.goodput(math.inf, 1, 1, 1), "interval should .* at least 0, but given inf, which is not finite"),
        (lambda: cost.ring_pass(10**30, 1, LINK), f"n_ranks .* but given {10**30}; the largest is 1,000,000"),
        (lambda: simulate.Lognormal(-1, 1), "median should be a positive number, but given -1"),
        (lambda: simulate.run(lambda rank: 3, 2, LINK), "program should be a function with a yield, .* but given 3"),
        (lambda: simulate.run(lambda rank: (yield 3), 2, LINK), "program should yield what .* but yielded 3"),
        (lambda: simulate.failures(1, 1e9, 1, 0, 0, 1e30), "work should be 1e.08 intervals of 1 s at most, but"),
        (lambda: draw.pale("bluish", 0.5), "colour should be a colour of matplotlib, but given 'bluish'"),
    ],
)  # fmt: skip
def test_what_is_said(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_valid_numbers_at_the_edges():
    assert cost.goodput(1e30, 1, 1, 1) == cost.goodput(1, 1, 1e30, 1) == 0
    assert cost.data_parallel_step(2, 0, cost.Link(0, 1), 0, 0).share == 0
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(1) == [1]
    assert ddl.check_model(MODEL, pp=2, batches=[10**9]) is None
    assert ddl.Parallel("gloo", 2, master_port="29500").master_port == 29500


def test_a_check_costs_microseconds():
    logits, target = torch.ones(1, 2), torch.tensor([0])
    bare = min(timeit.repeat(lambda: F.cross_entropy(logits, target), number=200, repeat=5))
    checked = min(timeit.repeat(lambda: ddl.cross_entropy(logits, target, ignore_index=-1), number=200, repeat=5))
    assert (checked - bare) / 200 < 50e-6  # 4 when nothing else runs
