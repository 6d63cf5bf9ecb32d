"""The TPU's device."""

from __future__ import annotations

import importlib.util

import ignite.distributed as idist
import torch

__all__ = ["device"]


def device() -> torch.device:
    """The TPU if torch_tpu finds one, else idist's device: XLA's in an "xla-tpu" job, a GPU, or the CPU.

    torch_tpu (torch 2.11 to 2.15) adds a device "tpu" to torch, which Ignite 0.5.5 does not support yet. This branch
    has not been tested: no machine of the project has a TPU.

    Returns:
        torch.device: the device of a model and its batches.

    Examples:
        .. code-block:: python

            import torch
            from ignite_ddl import tpu

            batch = torch.ones(2, 3).to(tpu.device())
            assert batch.device.type == tpu.device().type
    """
    if importlib.util.find_spec("torch_tpu") is not None:
        import torch_tpu  # noqa: F401, registers the device

        native = torch.accelerator.current_accelerator(check_available=True)
        if native is not None and native.type == "tpu":
            return native
    return idist.device()
