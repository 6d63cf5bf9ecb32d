"""How DDP compresses gradients before it averages them: torch's hooks by name, and their state in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import ignite.distributed as idist
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as power, quantization_hooks

from ignite_ddl.arguments import COUNT, FUNCTION, Fits, shown
from ignite_ddl.mesh import Mesh

_STATELESS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
_NOT_ON_GLOO = {
    default_hooks.bf16_compress_hook: "gloo cannot average bfloat16",
    quantization_hooks.quantization_pertensor_hook: "torch implements it for GPUs",
    quantization_hooks.quantization_perchannel_hook: "torch implements it for GPUs",
}


def _read(given: Any) -> Any:
    if not isinstance(given, str):
        return FUNCTION.read(given)
    if given in _STATELESS:
        return given
    name, _, rank = given.partition(":")
    if name != "powersgd":
        raise ValueError
    return f"powersgd:{COUNT.read(int(rank or 1))}"


COMM_HOOK = Fits('"fp16", "bf16", "powersgd", "powersgd:" and its rank, or a function', _read)


def _function(hook: str | Callable[..., Any]) -> Any:
    return _STATELESS.get(hook, hook) if isinstance(hook, str) else hook


class CommState:
    """PowerSGD's state on this rank, for ``to_save``: what steps have left out (error feedback), and Q.

    Args:
        rank: of the approximation.
        group: the process group over which DDP averages; None: the world.
    """

    is_per_rank = True  # read by checkpoints

    def __init__(self, rank: int, group: Any) -> None:
        # As early as DDP's buckets allow, and every matrix. The epsilon keeps gradients of zeros from becoming NaN.
        options = {"start_powerSGD_iter": 2, "min_compression_rate": 1e-9, "orthogonalization_epsilon": 1e-30}
        self.power = power.PowerSGDState(group, rank, **options)
        self.reducer: Any = None  # DDP's; None on a serial run

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copy of the model averages nothing

    def _parts(self) -> dict[str, dict[int, torch.Tensor]]:
        return {"error": self.power.error_dict, "p": self.power.p_memory_dict, "q": self.power.q_memory_dict}

    def state_dict(self) -> dict[str, Any]:
        """The tensors of each bucket, and the number of steps."""
        tensors = {f"{part}.{i}": t for part, of_buckets in self._parts().items() for i, t in of_buckets.items()}
        return {"iter": self.power.iter, "rank": self.power.matrix_approximation_rank, "tensors": tensors}

    def _misfit(self, state: Mapping[str, Any]) -> str | None:
        """What does not fit a state whose tensors are shapes and dtypes; None: nothing."""
        rank, saved = self.power.matrix_approximation_rank, state["tensors"]
        sizes = {int(name.partition(".")[2]): math.prod(saved[name][0]) for name in saved if name.startswith("error.")}
        if not sizes or self.reducer is None:  # no step was compressed, or none will be
            return None
        if (was := state.get("rank", rank)) != rank:  # not in checkpoints of earlier versions
            return f"approximates by the rank {rank}, but did so by {was} when it was saved"
        buckets = {b.index(): b.buffer().numel() for b in self.reducer._get_zeros_like_grad_buckets()}
        if any(buckets.get(i) != size for i, size in sizes.items()):
            return f"has buckets of {list(buckets.values())} numbers, but had {list(sizes.values())} (bucket_cap_mb)"
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave on this rank."""
        self.power.iter = state["iter"]
        for part, of_buckets in self._parts().items():
            found = {name.partition(".")[2]: t for name, t in state["tensors"].items() if name.startswith(f"{part}.")}
            of_buckets.clear()
            of_buckets.update({int(i): t.to(idist.device(), copy=True) for i, t in found.items()})


def _powersgd_in_order(state, bucket):  # DDP compares annotations with classes
    """Waits on gloo, whose threads start PowerSGD's later collectives in an order that may differ by rank."""
    future = power.powerSGD_hook(state, bucket)
    if bucket.buffer().device.type == "cpu":
        future.wait()
    return future


def check_comm_hook(hook: str | Callable[..., Any], mesh: Mesh, by_ddp: bool, ddp: dict[str, Any]) -> None:
    """Raises a ValueError where a hook does not hold; lets DDP keep its buckets where the hook's state needs that."""
    if not by_ddp:
        raise ValueError(
            f"comm_hook compresses what DDP sends, but on {mesh!r}, with these arguments, torch's replicate or FSDP2 "
            "averages gradients, or nothing does: leave it out, or use a mesh of dp alone without shard and dp_sync"
        )
    reason = _NOT_ON_GLOO.get(_function(hook)) if isinstance(_function(hook), Hashable) else None
    if reason and idist.backend() == "gloo":
        raise ValueError(f"comm_hook={shown(hook)} fails on gloo ({reason}): use fp16, powersgd or none there")
    of_power = isinstance(hook, str) and hook.startswith("powersgd")
    if of_power and (ddp.get("static_graph") or not ddp.setdefault("find_unused_parameters", True)):
        raise ValueError(
            f"comm_hook={hook!r} needs find_unused_parameters=True and no static_graph: else DDP orders its buckets "
            "anew after the first step, and those of a resumed run would not fit the error feedback"
        )


def register_comm_hook(model: nn.Module, hook: str | Callable[..., Any] | None, mesh: Mesh) -> nn.Module:
    """Gives DDP its hook; ``model.comm_state`` is that of PowerSGD, also on a serial run, where nothing is sent."""
    if hook is None:
        return model
    state, function = None, _function(hook)
    if isinstance(function, str):
        state = model.comm_state = CommState(int(function.partition(":")[2]), mesh.dp_cp_group)
        function = _powersgd_in_order
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.register_comm_hook(state and state.power, function)
        if state is not None:
            state.reducer = model.reducer
    return model
