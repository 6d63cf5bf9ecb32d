"""Model parallelism for PyTorch-Ignite: name a mesh, keep the Engine, the metrics and the handlers."""

from ignite_ddl import cost, simulate, tpu
from ignite_ddl.auto import (
    auto_dataloader,
    auto_model,
    auto_optim,
    check_model,
    full_state_dict,
    load_full_state_dict,
)
from ignite_ddl.engine import clip_grad_norm_, create_supervised_evaluator, create_supervised_trainer
from ignite_ddl.launch import Parallel, RankError
from ignite_ddl.layers import layer_costs, lazy
from ignite_ddl.mesh import Mesh, get_mesh, initialize_mesh
from ignite_ddl.parameter_server import ParameterServer
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
from ignite_ddl.timeline import Timeline

__all__ = [
    "Column",
    "InputChannels",
    "Mesh",
    "OutputChannels",
    "Parallel",
    "ParameterServer",
    "RankError",
    "Row",
    "Sequence",
    "ShardedRandom",
    "SharedInput",
    "SharedWeight",
    "SplitSequence",
    "Timeline",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "check_model",
    "clip_grad_norm_",
    "cost",
    "create_supervised_evaluator",
    "create_supervised_trainer",
    "cross_entropy",
    "full_state_dict",
    "get_mesh",
    "initialize_mesh",
    "layer_costs",
    "lazy",
    "load_full_state_dict",
    "simulate",
    "tpu",
]

tpu.repair_ignite()  # without torch_xla: nothing
