"""Model parallelism for PyTorch-Ignite: name a mesh, keep the Engine, the metrics and the handlers."""

from ignite_ddl.auto import auto_dataloader, auto_model, auto_optim, full_state_dict, load_full_state_dict
from ignite_ddl.engine import clip_grad_norm_, create_supervised_evaluator, create_supervised_trainer
from ignite_ddl.launch import Parallel, RankError
from ignite_ddl.mesh import Mesh, get_mesh, initialize_mesh
from ignite_ddl.tensor import Column, Row
from ignite_ddl.timeline import Timeline

__all__ = [
    "Column",
    "Mesh",
    "Parallel",
    "RankError",
    "Row",
    "Timeline",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "clip_grad_norm_",
    "create_supervised_evaluator",
    "create_supervised_trainer",
    "full_state_dict",
    "get_mesh",
    "initialize_mesh",
    "load_full_state_dict",
]
