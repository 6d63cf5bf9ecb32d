"""Looks at what lies in memory during a training step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import ignite.distributed as idist
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = ["StepMemory"]

_KINDS = {
    "Parameter": "parameters",
    "Optstate": "optimizer",
    "Other": "input",
    "Activation": "activations",
    "Temp": "on the way",
    "Gradient": "gradients",
}


class StepMemory:
    """Looks at what lies in memory at named moments of a ``with`` block, and at its peak, by torch's MemTracker.

    MemTracker counts every tensor that is made or freed in the block, on the CPU as on a GPU. That takes longer than
    the step, so of several ranks only rank 0 looks: on the others nothing is found.

    Args:
        model: the model.
        optimizer: its optimizer.
        batch: the input.

    Attributes:
        mib: name of a moment to the MiB of "parameters", "optimizer", "input", "activations", "on the way" (what
            backward makes and frees) and "gradients".

    Example:
        >>> import torch
        >>> from ignite_ddl.course import StepMemory
        >>> model, batch = torch.nn.Linear(512, 512, bias=False), torch.zeros(1024, 512)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with StepMemory(model, optimizer, batch) as memory:
        ...     for _ in memory.steps(2):
        ...         optimizer.zero_grad()
        ...         model(batch).sum().backward()
        ...         memory.look("after backward")
        >>> memory.mib["after backward"]["gradients"]
        1.0
        >>> memory.peak()["input"]
        2.0
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        from torch.distributed._tools.mem_tracker import MemTracker

        self.mib: dict[str, dict[str, float]] = {}
        self._device = batch.device
        self._tracker = MemTracker() if idist.get_rank() == 0 else None
        if self._tracker:
            self._tracker.track_external(model, optimizer, batch)

    def __enter__(self) -> StepMemory:
        if not self._tracker:
            return self
        warnings.filterwarnings("ignore", message="Expected a tensor")  # of MemTracker, at a gradient that is None
        # MemTracker refuses a model that is called again in a step, as microbatches do: let it forget the call before.
        calls = self._tracker.memory_tracking
        self._forget = register_module_forward_pre_hook(lambda module, _: calls.pop(module, None) and None)
        self._tracker.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._tracker:
            self._forget.remove()
            self._tracker.__exit__(*exc_info)

    def steps(self, n: int) -> Iterator[int]:
        """Counts steps from 0; MemTracker has to be told where each begins. An optimizer makes its state in the first.

        Args:
            n: number of steps.
        """
        for step in range(n):
            if self._tracker:
                self._tracker.reset_mod_stats()
            yield step

    def look(self, moment: str) -> None:
        """Writes down what lies in memory now; a moment of the same name is overwritten."""
        self.mib[moment] = self._snapshot("current")

    def peak(self) -> dict[str, float]:
        """What lay in memory at the moment in the block when most did."""
        return self._snapshot("peak")

    def _snapshot(self, which: str) -> dict[str, float]:
        if not self._tracker:
            return {}
        sizes = self._tracker.get_tracker_snapshot(which)[self._device]
        return {name: sizes[kind] / 2**20 for kind, name in _KINDS.items()}
