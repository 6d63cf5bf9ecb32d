"""Private names and repairs of torch and Ignite. Those of other files are listed here.

Tested with torch 2.11, 2.13 and 2.15 and Ignite 0.5.4 and 0.5.5 unless noted otherwise; README says what was run when.

======================================  ===============================================================
file                                    what it uses
======================================  ===============================================================
``compat.py``                           below
``tpu.py``                              Ignite's XLA classes, with torch_xla 2.7 to 2.9
``data.py``                             ``torch.utils._pytree``, as most of the following
``parity.py``                           ``torch.utils._pytree``
``divisor.py``                          ``nn``'s ``_Loss``, the base of its losses
``guards.py``                           ``Parameter._backward_hooks``
``step.py``                             ``torch.utils._pytree``
``engine.py``                           Ignite's ``_prepare_batch``, the default of a public argument, and the order of
                                        an engine's handlers
``state.py``                            ``DTensor.__create_chunk_list__``, the protocol of torch's DCP
``checkpoint/form.py``                  DCP's ``_StorageInfo``; of the standard library ``pickle._Unpickler``
``checkpoint/handler.py``               how Ignite's Checkpoint sets up its states and file names
``metrics.py``                          idist's ``_model``, ``_NativeDistModel``: a group instead of the world
``pipeline/stage.py``                   ``PipelineStage``: its call of a stage, its first message
``pipeline/structure.py``               ``torch.utils._pytree``
``pipeline/pipeline.py``                ``torch.utils._pytree``
``pipeline/trace.py``                   ``torch.distributed.pipelining.Pipe._from_traced``, ``torch.utils._pytree``
``tensor/styles.py``                    ``ParallelStyle._apply``, which every style overrides, ``nn``'s ``_NormBase``
``tensor/loss.py``                      ``DTensor._spec``
``lab/bytes.py``                        torch's dispatch mode, the names of its collectives' operators
``lab/timeline/watch.py``               process groups, ``Work``, DDP, pipeline stages, torch's dispatcher
``lab/timeline/timeline.py``            the order of an Ignite engine's handlers
``course/checks/ch14.py``               torch's dispatch mode
``course/memory.py``                    ``torch.distributed._tools.mem_tracker.MemTracker``
``course/ranks.py``                     torch's dispatch mode
``throughput.py``                       ``torch.utils._pytree``
======================================  ===============================================================
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from ignite.distributed.comp_models.base import _SerialModel
from ignite.distributed.comp_models.native import _NativeDistModel
from ignite.engine import Engine
from ignite.metrics import Metric
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.library import Library

__all__ = [
    "PART_OF_A_MODEL",
    "address_for_ignite",
    "attach_metrics_over",
    "called_by_ignites_checkpoint",
    "calls_counted",
    "guard_clipping",
    "hide_gpus_if_too_few",
    "is_rpc_noise",
    "job_store",
    "quiet_redistribution",
    "quiet_warnings",
    "recorded_calls",
    "repair_torchvision",
    "replicate",
    "serial_on_cpu",
    "tell_ignite_nproc",
    "torchrun_not_slurm",
    "wait_as_the_world",
]


def replicate(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """torch's data parallelism for modules with DTensors and in pipelines; a private module, torch 2.11 to 2.13."""
    from torch.distributed._composable.replicate_with_fsdp import replicate  # here: a slow import

    return replicate(module, mesh=mesh)


@contextlib.contextmanager
def quiet_redistribution() -> Iterator[None]:
    """Silences a message that every rank logs for each weight that is cut by both tp and FSDP."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def quiet_warnings() -> None:
    """Filters warnings of torch that a user cannot avoid. Called on ranks only."""
    for message in (
        "FSDP2-wrapped module .* returned a view tensor",  # a DTensor's local part is a view; it is not changed
        ".*alltoall.*gloo.*",  # DTensor then uses another collective
        "While redistributing from .* sequentially",
    ):
        warnings.filterwarnings("ignore", message=message)


def is_rpc_noise(line: str) -> bool:
    """Whether a printed line is one by which RPC's C++ code logs the normal exit of a peer as an error."""
    return "tensorpipe_agent.cpp" in line


def called_by_ignites_checkpoint() -> bool:
    """Whether the function that asks was called, some frames up, by Ignite's Checkpoint, which offers no hook."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("ignite_ddl.checkpoint"):  # ddl.Checkpoint is one of Ignite's
            return False
        if name == "ignite.handlers.checkpoint":
            return True
        frame = frame.f_back
    return False


def guard_clipping() -> None:
    """Makes ``torch.nn.utils.clip_grad_norm_`` refuse parameters of a model that pp or tp has cut."""
    from torch.nn.utils import clip_grad

    if hasattr(clip_grad._clip_grads_with_norm_, "guarded"):
        return
    original = clip_grad._clip_grads_with_norm_

    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(hasattr(parameter, PART_OF_A_MODEL) for parameter in given):
            raise ValueError(
                "torch.nn.utils.clip_grad_norm_ computes the norm of this rank's part of a model that is cut over "
                "ranks: call ddl.clip_grad_norm_(model, max_norm), or pass max_norm to ddl.create_supervised_trainer"
            )
        return original(given, *args, **kwargs)

    guarded.guarded = True
    clip_grad._clip_grads_with_norm_ = guarded


PART_OF_A_MODEL = "_part_of_a_model"  # on a parameter of a model that pp or tp has cut


def attach_metrics_over(over_data_parallel: Callable[[Metric], Metric]) -> None:
    """Makes metrics on Ignite's Engine reduce as on a MeshEngine: otherwise each tp peer would count the rows."""
    if hasattr(Engine.add_event_handler, "over_data_parallel"):
        return
    original = Engine.add_event_handler

    @functools.wraps(original)
    def add_event_handler(engine: Engine, event_name: Any, handler: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(handler, "__self__", None)
        if isinstance(owner, Metric):
            over_data_parallel(owner)
        return original(engine, event_name, handler, *args, **kwargs)

    add_event_handler.over_data_parallel = True
    Engine.add_event_handler = add_event_handler


def address_for_ignite(init_method: str, rank: int, world_size: int) -> str:
    """An address that Ignite cannot mistake for "env://".

    Ignite passes the rank to torch only if the address does not contain "env", which the name of a folder may contain
    (one in eight thousand random names). In that case, the rank and the world size are added to the address itself.
    """
    if init_method.startswith("env") or "env" not in init_method or "rank=" in init_method:
        return init_method
    return f"{init_method}{'&' if '?' in init_method else '?'}rank={rank}&world_size={world_size}"


def recorded_calls(newest: int | None = None) -> list[dict[str, Any]]:
    """The collectives that this rank has called, oldest first, as torch's flight recorder has them.

    With ``newest`` only so many, those that are not done, and the last one of each group.
    It records gloo's and NCCL's; of gloo's it has no sends and receives, its states and times are not set, and only
    ``retired`` says whether a call is done. The recorder is on by default (``TORCH_FR_BUFFER_SIZE``, 0: off).
    """
    from torch.distributed.distributed_c10d import _world

    try:
        entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace()).get("entries", [])
    except Exception:  # another build, another version: then a report has the stacks alone
        return []
    last = {entry["process_group"][0]: entry for entry in entries}
    if newest is not None:
        old = [e for e in entries[:-newest] if not e["retired"] or last[e["process_group"][0]] is e]
        entries = old + entries[-newest:]
    members = {
        group.group_name: sorted(ranks)
        for group, ranks in dict(_world.pg_group_ranks).items()
        if isinstance(group, torch.distributed.ProcessGroup)
    }
    return [
        {
            "group": entry["process_group"][0],
            "ranks": members.get(entry["process_group"][0], []),
            "number": entry["collective_seq_id"],
            "operation": entry["profiling_name"].partition(":")[2],
            "sizes": ", ".join(
                f"{dtype}{sizes}" for dtype, sizes in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
            ),
            "done": entry["retired"],
            "frames": [(frame["filename"], frame["line"], frame["name"]) for frame in entry["frames"]],
        }
        for entry in entries
        if not entry["is_p2p"]
    ]


def calls_counted() -> bytes:
    """Changes with each collective that this rank calls or completes; cheap, unlike :func:`recorded_calls`."""
    try:
        return torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=False)
    except Exception:
        return b""


def job_store() -> torch.distributed.Store:
    """The store by which the ranks of the job have met, by a connection of its own, for another thread."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store().clone()


def tell_ignite_nproc(nproc: int) -> None:
    """Tells idist the number of ranks here, for which it would make and destroy a process group (30 ms)."""
    if hasattr(_NativeDistModel, "_compute_nproc_per_node"):
        _NativeDistModel._compute_nproc_per_node = lambda model: nproc


def serial_on_cpu() -> None:
    """Makes a serial run compute on the CPU, as ranks do where there is no CUDA: idist would take a Mac's own GPU.

    That GPU has no float64, and its numbers are not those of the ranks.
    """
    _SerialModel.device = lambda model: torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def torchrun_not_slurm() -> Iterator[None]:
    """Hides Slurm's job from idist where torchrun, itself started by srun, has said where each rank is.

    idist wants torchrun's ranks to be those of srun's tasks, but one task a machine starts all ranks of it.
    """
    says_all = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    job = os.environ.pop("SLURM_JOB_ID", None) if says_all else None
    try:
        yield
    finally:
        if job is not None:
            os.environ["SLURM_JOB_ID"] = job


def wait_as_the_world(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Gives a group the time-out of the world and returns it: torch gives every new group its default, 30 minutes."""
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):  # a backend without time-outs
            timeout = dist.group.WORLD._get_backend(device).options._timeout
            group._get_backend(device)._set_default_timeout(timeout)
    return group


def hide_gpus_if_too_few(nproc: int) -> None:
    """Hides GPUs if there are fewer than ranks: idist assigns GPU r to rank r, also for gloo."""
    if torch.cuda.device_count() < nproc:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if hasattr(torch.cuda.device_count, "cache_clear"):
            torch.cuda.device_count.cache_clear()


def repair_torchvision() -> None:
    """From now on, ``import torchvision`` works in this process also beside a torch without CUDA.

    On Linux, torchvision's default wheel is a CUDA build, whose C++ operators cannot load beside a torch without CUDA.
    Then its import fails, since it attaches shape rules to the operators ``nms`` and ``qnms`` (the latter since 0.28).
    Where that happens, these two are declared without code and the import is repeated: datasets, transforms and models
    work, box operators raise torchvision's own message when they are called. Where torchvision can be imported, nothing
    is declared.
    """
    if not any(isinstance(finder, _FindTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FindTorchvision())


class _FindTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoadTorchvision(spec.loader.name, spec.loader.path)
        return spec


class _LoadTorchvision(importlib.machinery.SourceFileLoader):
    declared: list[Library] = []  # torch forgets a declaration when the Library that made it is collected

    def exec_module(self, module: Any) -> None:
        try:
            super().exec_module(module)
        except RuntimeError as error:
            if self.declared or "operator torchvision::" not in str(error):
                raise
            self.declared.append(Library("torchvision", "FRAGMENT"))
            for operator in ("nms", "qnms"):
                self.declared[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]
            super().exec_module(module)
