"""Model parallelism for PyTorch-Ignite: name a mesh, keep the Engine, the metrics and the handlers."""

import importlib
from typing import TYPE_CHECKING

from ignite_ddl import tpu
from ignite_ddl.compat import pickle_shards
from ignite_ddl.data import auto_dataloader
from ignite_ddl.engine import (
    MeshEngine,
    clip_grad_norm_,
    create_supervised_evaluator,
    create_supervised_trainer,
    forward_backward,
)
from ignite_ddl.launch import HangReport, Parallel, RankError, UnlikeCalls, report_hangs
from ignite_ddl.lazy import empty_weights, lazy
from ignite_ddl.mesh import Mesh, get_mesh, initialize_mesh
from ignite_ddl.model import auto_model, auto_optim, check_model
from ignite_ddl.pipeline.costs import layer_costs
from ignite_ddl.pipeline.trace import trace_layers
from ignite_ddl.state import full_state_dict, load_full_state_dict
from ignite_ddl.sync import OutOfSync, check_in_sync, check_same_calls
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
    "HangReport",
    "InputChannels",
    "Mesh",
    "MeshEngine",
    "OutOfSync",
    "OutputChannels",
    "Parallel",
    "ParameterServer",
    "ParityReport",
    "RankError",
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
    "empty_weights",
    "export_weights",
    "forward_backward",
    "full_state_dict",
    "get_mesh",
    "import_weights",
    "initialize_mesh",
    "layer_costs",
    "lazy",
    "load_full_state_dict",
    "pickle_shards",
    "report_hangs",
    "tpu",
    "trace_layers",
]

tpu.repair_ignite()  # without torch_xla: nothing


_LATE = {  # imported when they are asked for: most runs have no server, and torch's DCP takes its time
    "ParameterServer": "parameter_server",
    **dict.fromkeys(("Checkpoint", "export_weights", "import_weights"), "checkpoint"),
    **dict.fromkeys(("ParityReport", "check_parity"), "parity"),
}


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from ignite_ddl.checkpoint import Checkpoint, export_weights, import_weights
    from ignite_ddl.parameter_server import ParameterServer
    from ignite_ddl.parity import ParityReport, check_parity
else:  # unseen by type checkers, for which a __getattr__ would make any name right

    def __getattr__(name):
        if name in _LATE:
            return getattr(importlib.import_module(f"ignite_ddl.{_LATE[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
