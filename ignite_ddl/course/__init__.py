"""What only the chapters use: data, small models, figures and the checks of the exercises."""

from ignite_ddl.course.bucket_steps import watch_buckets
from ignite_ddl.course.clock import median_seconds, other_programs, time_steps
from ignite_ddl.course.copies import steps_to_target, train_copies
from ignite_ddl.course.cut import compare_cut
from ignite_ddl.course.data import CLASSES, fashion_mnist, fashion_mnist_tensors, normalise
from ignite_ddl.course.delay import Delay
from ignite_ddl.course.examples import example
from ignite_ddl.course.global_batch import train_global_batch
from ignite_ddl.course.gpt import GPT, generate
from ignite_ddl.course.guess import score, tally
from ignite_ddl.course.kill import killed_before_sync
from ignite_ddl.course.line import SlowLine
from ignite_ddl.course.loaders import loader_traps
from ignite_ddl.course.machine import describe_machine, keep_serial_runs_on_cpu
from ignite_ddl.course.memory import StepMemory
from ignite_ddl.course.messages import all_gather_by_messages, all_reduce_by_messages, reduce_scatter_by_messages
from ignite_ddl.course.models import CNN, MLP
from ignite_ddl.course.pipeline_steps import steps_by_hand, time_pipeline
from ignite_ddl.course.planned_step import measure_plan
from ignite_ddl.course.ranks import on_nodes, on_ranks
from ignite_ddl.course.ring import watch_ring
from ignite_ddl.course.server_step import time_server_step
from ignite_ddl.course.sharded_step import flatten_parameters, overlapped, sharded_step
from ignite_ddl.course.side_by_side import SideBySide
from ignite_ddl.course.text import CharacterText
from ignite_ddl.course.toolbox import train_with
from ignite_ddl.course.tpu import repair_ignite
from ignite_ddl.course.vision import import_torchvision, repair_torchvision
from ignite_ddl.course.watch_save import watch_save
from ignite_ddl.course.watch_step import watch_step

__all__ = [
    "CLASSES",
    "CNN",
    "GPT",
    "MLP",
    "CharacterText",
    "Delay",
    "SideBySide",
    "SlowLine",
    "StepMemory",
    "all_gather_by_messages",
    "all_reduce_by_messages",
    "compare_cut",
    "describe_machine",
    "example",
    "fashion_mnist",
    "fashion_mnist_tensors",
    "flatten_parameters",
    "generate",
    "import_torchvision",
    "killed_before_sync",
    "loader_traps",
    "measure_plan",
    "median_seconds",
    "normalise",
    "on_nodes",
    "on_ranks",
    "other_programs",
    "overlapped",
    "reduce_scatter_by_messages",
    "score",
    "sharded_step",
    "steps_by_hand",
    "steps_to_target",
    "tally",
    "time_pipeline",
    "time_server_step",
    "time_steps",
    "train_copies",
    "train_global_batch",
    "train_with",
    "watch_buckets",
    "watch_ring",
    "watch_save",
    "watch_step",
]

keep_serial_runs_on_cpu()  # every chapter compares ranks with one process
repair_ignite()  # without torch_xla: nothing
repair_torchvision()
