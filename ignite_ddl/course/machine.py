"""What this machine has for ranks, and that a run without ranks computes where they would."""

from __future__ import annotations

import os

import ignite.distributed as idist
import torch
from ignite.distributed.comp_models.base import _SerialModel

__all__ = ["describe_machine"]


def keep_serial_runs_on_cpu() -> None:
    """Makes a serial run compute on the CPU, as gloo's ranks do: idist would take a GPU of CUDA or of a Mac.

    Chapters compare the two, tensor by tensor. (A Mac's GPU has no float64, either.)
    """
    _SerialModel.device = lambda model: torch.device("cpu")


def describe_machine() -> list[str]:
    """Prints cores, memory, GPUs, TPU and the backends by which ranks can talk, each with what it means for ranks.

    Returns:
        list: the backends, as ``idist.available_backends`` has them.
    """
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total / 1e9  # GB
    backends = list(idist.available_backends())
    tpu = "yes" if "xla-tpu" in backends else "no"
    print(f"cores     {cores:>10}     ranks take turns on them")
    print(f"memory    {memory:>7.0f} GB     four ranks with a model each hold it four times")
    print(f"GPUs      {torch.cuda.device_count():>10}     chapter 02 uses them")
    print(f"TPU       {tpu:>10}     chapter 03 runs without one, too")
    print(f"backends  {', '.join(backends):>10}     how ranks talk: gloo on CPUs, nccl between GPUs")
    return backends
