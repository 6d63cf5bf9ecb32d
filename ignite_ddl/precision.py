"""Mixed precision: what runs under autocast, and a GradScaler whose ranks agree on each step."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch.amp import GradScaler

from ignite_ddl.arguments import Fits, check, one_of
from ignite_ddl.mesh import get_mesh
from ignite_ddl.structure import local_tensor

AMP_MODES = {"amp": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
AMP_MODE = Fits(f"None or one of {', '.join(AMP_MODES)}", one_of(*AMP_MODES).read)


def autocast_for(amp_mode: str | None, device: str | torch.device) -> contextlib.AbstractContextManager:
    """The context of forward passes and losses; backward passes run outside of it, as torch recommends.

    Args:
        amp_mode: None, or one of ``AMP_MODES``: "amp" is the device's default dtype, float16 on CUDA, bfloat16 on CPU.
        device: where the model is.

    Returns:
        the context, which may be entered several times.

    Raises:
        ValueError: if ``amp_mode`` is another one.
    """
    if amp_mode is None:
        return contextlib.nullcontext()  # not autocast(enabled=False): the user's own autocast stays on
    return torch.autocast(torch.device(device).type, dtype=AMP_MODES[check("amp_mode", amp_mode, AMP_MODE)])


def make_scaler(scaler: bool | GradScaler, amp_mode: str | None, device: str | torch.device) -> GradScaler | None:
    """Ignite's ``scaler`` argument as a GradScaler, or None.

    Raises:
        ValueError: if a scaler is given without ``amp_mode``.
    """
    if not scaler:
        return None
    if amp_mode is None:
        raise ValueError('scaler is for amp_mode="amp", "bfloat16" or "float16", but amp_mode is None')
    return GradScaler(torch.device(device).type) if scaler is True else scaler


class ScaledOptimizer:
    """An optimizer with a GradScaler, of which all ranks make a step or all skip it.

    torch's scaler skips a step if it finds an infinite or NaN gradient. On a mesh each rank holds other gradients. So
    the ranks look for such gradients together, and the scaler gets, in place of an optimizer, this object with one
    parameter, whose gradient says whether one was found.

    Args:
        optimizer: what ``ddl.auto_optim`` returned.
        scaler: the scaler.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.found = torch.zeros(())
        self.param_groups = [{"params": [self.found]}]

    def loss_scale(self, device: str | torch.device) -> float:
        """The factor of losses."""
        return float(self.scaler.scale(torch.ones((), device=device)))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.step(*args, **kwargs)  # by which a scheduler, perhaps made later, counts steps

    def step_if_finite(self) -> None:
        """Steps the optimizer unless a gradient of a rank is not finite; updates the scale."""
        self.scaler.step(self)
        self.scaler.update()

    def unscale(self) -> None:
        """Divides the gradients by the scale, and tells the scaler whether those of any rank are not finite.

        Raises:
            ValueError: if a parameter is float16, whose gradients have been rounded before.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if any(p.dtype == torch.float16 for p in parameters):
            raise ValueError("scaler is for float32 parameters under amp_mode, but the model has float16 ones")
        gradients = [local_tensor(p.grad).detach() for p in parameters if p.grad is not None]
        finite = torch.nn.utils.get_total_norm(gradients, math.inf).isfinite()
        device = parameters[0].device if parameters else idist.device()  # under pp it may hold none of this stage
        found = (~finite).to(device, torch.float32)  # and not the norm: a maximum of NaN may be a number
        if get_mesh().world_size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        factor = 1 / self.scaler.get_scale()  # once: a GPU is waited for
        for gradient in gradients:
            gradient.mul_(factor)
        self.found = torch.zeros_like(found)
        self.found.grad = torch.zeros_like(found).masked_fill_(found > 0, math.inf)  # whatever the default dtype
        self.param_groups = [{"params": [self.found]}]
        self.scaler.unscale_(self)
