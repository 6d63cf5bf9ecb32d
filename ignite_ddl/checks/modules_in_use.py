"""Which modules a step calls, the same on all dp ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.checks.traceless import UNLIKE_MODULES, peers_are_elsewhere
from ignite_ddl.compat import gathers, leaves_gradients
from ignite_ddl.mesh import Mesh

END = -1  # instead of a module's number: the end of a stage's first forward pass in a step


class ModulesInUse:
    """Checks that all dp ranks call the same modules with weights in a step.

    Otherwise, gradients of different weights would be added where they are reduced in one flat tensor, or torch would
    abort if sizes differ. In steps 1, 2, 4, 8, …, the ranks compare their calls at each gather of FSDP2 and at the end
    of the forward pass, before anything is reduced; others reduce a digest together with the loss. DDP needs all
    weights to be used, which each rank checks alone by their gradients: the hooks are removed after the first step,
    since they take a third of a millisecond per step in a small GPT.

    Args:
        stages: this rank's stages.
        mesh: the mesh.
    """

    def __init__(self, stages: list[nn.Module], mesh: Mesh) -> None:
        self.mesh, self.compares = mesh, False
        # In order, each module once, since dp ranks may have different numbers of microbatches.
        self.calls: dict[int, None] = {}
        self.names: list[str] = []
        self.handles: list[Any] = []
        self.ddp: list[DistributedDataParallel] = []  # those of the stages, whose hooks are for the first step only
        self.weights: list[tuple[str, nn.Parameter]] = []  # whose gradients DDP waits for
        if mesh.dp_cp_size == 1 or any(finds_unused(stage) for stage in stages):
            return
        self.ddp = [stage for stage in stages if isinstance(stage, DistributedDataParallel)]
        for stage in self.ddp:
            if not stage.static_graph:  # static_graph allows unused weights
                named = stage.module.named_parameters()
                self.weights += [(k, p) for k, p in named if p.requires_grad and k not in stage.parameters_to_ignore]
        for stage in stages:
            for name, module in stage.named_modules():
                if any(True for _ in module.parameters(recurse=False)) or isinstance(module, FSDPModule):
                    hook = self._hook(len(self.names), module)
                    self.handles.append(module.register_forward_pre_hook(hook, prepend=True))
                    self.names.append(name.removeprefix("module.") or type(module).__name__)
            self.handles.append(stage.register_forward_hook(self._hook(END, stage)))

    def begin(self, compares: bool) -> None:
        """Starts a step; in its forward pass, ranks compare their calls or not."""
        self.compares = compares
        self.calls.clear()

    def digest(self) -> int:
        """After the forward pass, a number below 2 ** 20 for the modules called in it, in order."""
        self.compares = False
        while self.ddp and self.handles:
            self.handles.pop().remove()
        return hash(tuple(self.calls)) % 2**20

    def check_gradients(self) -> None:
        """Raises a ValueError if DDP waits for gradients after the last backward pass of a step.

        This rank's peers may wait, too: the launcher ends them.
        """
        none_has_one = bool(self.weights) and self.weights[0][1].grad is None  # then DDP has not begun
        if not none_has_one and not any(map(leaves_gradients, self.ddp)):
            return
        unused = next((name for name, parameter in self.weights if parameter.grad is None), None)
        if unused is not None:
            raise ValueError(
                f"DDP waits for the gradients of all weights, but this rank did not use {unused!r} in this step: "
                "pass find_unused_parameters=True to ddl.auto_model if each row chooses by itself, or make the same "
                "choice on all ranks and pass shard=True, which second derivatives do not allow; if the loss is made "
                "of derivatives alone (a gradient penalty), add 0 * output.sum() to it"
            )
        raise ValueError(
            "DDP waits for a gradient of each weight in the last backward pass before an optimizer step, but its loss "
            "gives some weights none (derivatives of the output do not depend on the last bias): add 0 * output.sum() "
            "to the loss, or call ddl.forward_backward with another loss last"
        )

    def _hook(self, number: int, module: nn.Module) -> Any:
        communicates = number == END or isinstance(module, FSDPModule)
        each_time = number != END and gathers(module) and self.mesh.pp_size == 1

        def hook(*_: Any) -> None:
            is_new = torch.is_grad_enabled() and number not in self.calls
            if is_new:
                self.calls[number] = None
            if communicates and self.compares and (is_new or each_time):
                self._compare(number)

        return hook

    def _compare(self, number: int) -> None:
        """Raises a ValueError unless all dp ranks have called the same modules."""
        if peers_are_elsewhere(hash(tuple(self.calls)) % 2**20, number, self.mesh.dp_cp_group):
            at = "the end of forward" if number == END else repr(self.names[number])
            raise ValueError(f"{UNLIKE_MODULES} This rank was at {at}")


def finds_unused(stage: nn.Module) -> bool:
    """Whether a step may leave out modules, other ones on each rank."""
    return isinstance(stage, DistributedDataParallel) and stage.find_unused_parameters
