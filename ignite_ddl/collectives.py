"""What all ranks of a group tell each other: tensors, values, a yes; and rows, with a gradient that goes back."""

from __future__ import annotations

import io
import pickle
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from cloudpickle import cloudpickle
from ignite.engine.engine import _EngineTerminateException, _EngineTerminateSingleEpochException
from torch.distributed.tensor import DTensor

from ignite_ddl.arguments import first_line

_SMALL = 1 << 12  # bytes that travel with whether they are all
SENT = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64}
SENT |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}  # by gloo; other types as bytes


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The tensors of all ranks of a group, which have one shape, in the order of ranks."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather([octets(part) for part in parts], octets(tensor), group=group)
    return parts


def gathered_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of a group, by pickle, in the order of ranks: one collective, of large values three."""
    raw = packed(value)
    head = bytearray(bytes([len(raw) < _SMALL]) + raw.ljust(_SMALL)[: _SMALL - 1])
    device = "cpu" if dist.get_backend(group) == "gloo" else idist.device()
    heads = [h.cpu().numpy().tobytes() for h in gathered(torch.frombuffer(head, dtype=torch.uint8).to(device), group)]
    if all(head[0] for head in heads):
        return [pickle.loads(head[1:]) for head in heads]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, raw, group=group)
    return list(map(pickle.loads, values))


def value_of(rank: int, value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The value of one rank, by its number in the world, on all ranks of a group; by pickle."""
    if dist.get_rank() == rank:
        dist.broadcast_object_list([packed(value)], src=rank, group=group)
        return value
    box: list[Any] = [None]
    dist.broadcast_object_list(box, src=rank, group=group)
    return pickle.loads(box[0])


def packed(value: Any) -> bytes:
    """A value by pickle, whose tensors are on the CPU or on the GPU of the rank that reads it, and not on another's."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) or obj is types.CodeType:  # such as the one that fills a defaultdict
            return super().reducer_override(obj)
        if isinstance(obj, type) and getattr(sys.modules.get(obj.__module__), obj.__qualname__, None) is not obj:
            # Of the script: ranks got it by cloudpickle with the function they run, and know it by this.
            known = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
            return NotImplemented if known is None else (_class_of_script, (known,))
        is_plain = isinstance(obj, torch.Tensor) and not isinstance(obj, DTensor)
        if not is_plain or obj.device.type in ("cpu", "meta"):
            return reduced(obj) or NotImplemented
        return _on_this_device, (obj.detach().cpu().as_subclass(torch.Tensor),)


def reduced(obj: Any) -> tuple | None:
    """How pickle takes a tensor of a type that torch cannot unpickle, such as uint16 and float8; None: any other."""
    if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.dtype in SENT or obj.is_quantized:
        return None
    if obj.layout != torch.strided or obj.device.type != "cpu":
        return None
    return _from_octets, (type(obj), octets(obj), obj.dtype, obj.shape, obj.requires_grad)


def _from_octets(kind: type, raw: torch.Tensor, dtype: torch.dtype, shape: torch.Size, has_grad: bool) -> torch.Tensor:
    tensor = raw.view(dtype).view(shape)
    return tensor.requires_grad_(has_grad) if kind is torch.Tensor else kind(tensor, requires_grad=has_grad)


def _class_of_script(known: str) -> type:
    found = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(known)
    if found is None:
        raise ValueError("a class that one rank has made cannot be sent to another: define it at the top of the script")
    return found


def _on_this_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(idist.device())


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in its own memory if it is contiguous: gloo sends few types by themselves."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one number may have any stride


def on_any_rank(found: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether this is so on any rank of a group."""
    flag = torch.tensor(float(found), device=idist.device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag)


SECONDS_IN_AN_ERROR = 30.0  # that a rank which handles an error waits for others, which may not know of it
_meetings: dict[str, int] = {}  # how often this rank has come to each


def error_in_flight() -> BaseException | None:
    """The error that is being handled here; none where Ignite ends a run or an epoch early, which it does by one."""
    error = sys.exc_info()[1]
    return None if isinstance(error, _EngineTerminateException | _EngineTerminateSingleEpochException) else error


def meet(what: str, seconds: float, cure: str) -> None:
    """Waits until all ranks have called: by the store, since peers that are elsewhere wait in other collectives.

    Args:
        what: the name of what should be called, in the error.
        seconds: the most to wait.
        cure: the end of the error's sentence.

    Raises:
        ValueError: if some ranks have not called by then.
    """
    error = error_in_flight()
    if hasattr(error, "ranks_are_missing"):  # Ignite fires EXCEPTION_RAISED for a run and for the engine
        raise error
    seconds = seconds if error is None else min(seconds, SECONDS_IN_AN_ERROR)
    store, n, n_ranks = dist.distributed_c10d._get_default_store(), _meetings.get(what, 0), dist.get_world_size()
    deadline, pause, key = time.monotonic() + seconds, 1e-4, f"{what} {n}"
    _meetings[what] = n + 1
    store.add(key, 1)
    while store.add(key, 0) < n_ranks:
        if time.monotonic() > deadline:
            store.add(key, -1)  # so that a later call, which may be right, is not out of step with other ranks
            time.sleep(0.1)  # others that leave in this moment look again, too
            if store.add(key, 0) == n_ranks - 1:  # the last one has just come, and may have gone on
                store.add(key, 1)
                continue
            _meetings[what] = n
            handles = "" if error is None else f", while this rank handles {type(error).__name__}: {first_line(error)}"
            missing = ValueError(
                f"{what} should be called on every rank, but some did not call it within {seconds:g} s{handles}: {cure}"
            )
            missing.ranks_are_missing = True
            raise missing from error
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    if dist.get_rank() == 0 and n:
        store.delete_key(f"{what} {n - 1}")  # all have left it


def exchange(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    sent: Sequence[int] | None = None,
    got: Sequence[int] | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """Sends rows to each rank of a group, and returns those of each rank, rank 0's first.

    Args:
        x: (rows, ...), those for rank 0 first.
        group: the ranks that call it together.
        sent: how many rows go to each rank. Default: as many to each.
        got: how many come from each rank. Default: as many from each.
        factor: of the gradient on its way back. Default: 1.
    """
    return _Exchange.apply(x, sent, got, group, factor)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: Any, got: Any, group: Any, factor: float) -> torch.Tensor:
        ctx.back, ctx.factor = (got, sent, group, 1.0), factor
        arrived = x.new_empty(len(x) if got is None else sum(got), *x.shape[1:])
        dist.all_to_all_single(arrived, x.contiguous(), got, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return _Exchange.apply(gradient * ctx.factor, *ctx.back), None, None, None, None
