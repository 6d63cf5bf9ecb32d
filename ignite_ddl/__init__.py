"""Model parallelism for PyTorch-Ignite: name a mesh, keep the Engine, the metrics and the handlers."""

import importlib
from typing import TYPE_CHECKING

from ignite_ddl import tpu
from ignite_ddl.clipping import clip_grad_norm_
from ignite_ddl.context.api import ring_attention, ulysses_attention
from ignite_ddl.context.sequence import sequence_positions
from ignite_ddl.data import auto_dataloader
from ignite_ddl.engine import MeshEngine
from ignite_ddl.experts.layer import MixtureOfExperts
from ignite_ddl.experts.routing import Router
from ignite_ddl.experts.style import Experts
from ignite_ddl.gather import gather_rows
from ignite_ddl.launch import Parallel, RankError
from ignite_ddl.lazy import empty_weights, lazy
from ignite_ddl.local import DiLoCo, LocalSGD
from ignite_ddl.mesh import Mesh, get_mesh, initialize_mesh
from ignite_ddl.model import auto_model, auto_optim, check_model
from ignite_ddl.parts import pickle_shards
from ignite_ddl.pipeline.costs import layer_costs
from ignite_ddl.pipeline.trace import trace_layers
from ignite_ddl.state import distribute_like, full_state_dict, load_full_state_dict
from ignite_ddl.supervised import create_supervised_evaluator, create_supervised_trainer, forward_backward
from ignite_ddl.tensor import (
    Column,
    InputChannels,
    OutputChannels,
    Row,
    Sequence,
    ShardedRandom,
    SharedInput,
    SharedWeight,
    SplitSequence,
    cross_entropy,
)
from ignite_ddl.throughput import Throughput

__all__ = [
    "Checkpoint",
    "Column",
    "DiLoCo",
    "Experts",
    "HangReport",
    "InputChannels",
    "LocalSGD",
    "Mesh",
    "MeshEngine",
    "MixtureOfExperts",
    "OutOfSync",
    "OutputChannels",
    "Parallel",
    "ParameterServer",
    "ParityReport",
    "RankError",
    "Router",
    "Row",
    "Sequence",
    "ShardedRandom",
    "SharedInput",
    "SharedWeight",
    "SplitSequence",
    "Throughput",
    "UnlikeCalls",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "check_in_sync",
    "check_model",
    "check_parity",
    "check_same_calls",
    "clip_grad_norm_",
    "create_supervised_evaluator",
    "create_supervised_trainer",
    "cross_entropy",
    "distribute_like",
    "empty_weights",
    "export_weights",
    "forward_backward",
    "full_state_dict",
    "gather_rows",
    "get_mesh",
    "import_weights",
    "initialize_mesh",
    "layer_costs",
    "lazy",
    "load_full_state_dict",
    "pickle_shards",
    "report_hangs",
    "ring_attention",
    "sequence_positions",
    "tpu",
    "trace_layers",
    "ulysses_attention",
]

_LATE = {  # imported when they are asked for: most runs have no server and do not hang, and DCP takes its time
    **dict.fromkeys(("Checkpoint", "export_weights", "import_weights"), "checkpoint"),
    **dict.fromkeys(("HangReport", "OutOfSync", "UnlikeCalls"), "diagnose"),
    **dict.fromkeys(("check_in_sync", "check_same_calls", "report_hangs"), "diagnose"),
    **dict.fromkeys(("ParityReport", "check_parity"), "lab.parity"),  # the one door up the stair
    "ParameterServer": "parameter_server",
}


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from ignite_ddl.checkpoint import Checkpoint, export_weights, import_weights
    from ignite_ddl.diagnose import HangReport, OutOfSync, UnlikeCalls, check_in_sync, check_same_calls, report_hangs
    from ignite_ddl.lab.parity import ParityReport, check_parity
    from ignite_ddl.parameter_server import ParameterServer
else:  # unseen by type checkers, for which a __getattr__ would make any name right

    def __getattr__(name):
        if name in _LATE:
            return getattr(importlib.import_module(f"ignite_ddl.{_LATE[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
