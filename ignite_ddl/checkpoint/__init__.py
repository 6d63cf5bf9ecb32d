"""Checkpoints of a model on a mesh. Imported when they are asked for: torch's DCP takes its time."""

from ignite_ddl.checkpoint.export import export_weights, import_weights
from ignite_ddl.checkpoint.form import DamagedCheckpoint
from ignite_ddl.checkpoint.handler import Checkpoint

__all__ = ["Checkpoint", "DamagedCheckpoint", "export_weights", "import_weights"]
