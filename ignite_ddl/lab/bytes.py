"""Counts the bytes of a rank's collectives and messages.

All collectives and messages pass torch's dispatcher on their way to the process group: those of
``torch.distributed`` and idist, object collectives, DDP's buckets in backward, FSDP2, DTensor's redistributions and
pipeline schedules. :func:`count_bytes` counts the calls there; no count is taken from a formula.

It counts the *payload*: the bytes of a call's input and output tensors. How many bytes a collective then sends
depends on its algorithm, which runs below. To count those, build the algorithm from messages (``dist.send`` and
``dist.recv``), whose payload is what is sent.

Not counted: pulls and pushes (``ParameterServer.statistics`` has their bytes), RPC, the store of the rendezvous
(``new_group`` uses it too), collectives called by another thread of the rank, and code compiled by ``torch.compile``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_ddl.arguments import check, one_of

__all__ = ["Call", "Traffic", "count_bytes"]


@dataclass(frozen=True)
class Call:
    """One call of a collective, or one message, on this rank.

    Attributes:
        op: its name in ``torch.distributed``: "all_reduce", "all_gather", "send", ...
        put_in: bytes of the input tensors on this rank.
        got: bytes of the output tensors on this rank; 0 on the source of a broadcast.
        ranks: global ranks of the group.
        peer: global rank of the other end of a message; None for a collective, and for ``recv`` from any source.
    """

    op: str
    put_in: int
    got: int
    ranks: tuple[int, ...]
    peer: int | None = None

    @property
    def on_a_ring(self) -> float:
        """Bytes that this rank sends if a ring of its group carries the call out.

        Each of n ranks sends (n - 1) / n of the full tensor in a pass, and an all-reduce takes two passes; sources:
        ``ring_pass`` and ``all_reduce_ring`` of ``lab.cost``. A formula, unlike all other counts here.

        Raises:
            ValueError: if the call is neither an all_reduce nor a reduce_scatter nor an all_gather.
        """
        passed = {"all_reduce": 2 * self.put_in, "reduce_scatter": self.put_in, "all_gather": self.got}
        if self.op not in passed:
            raise ValueError(f"op should be one of {', '.join(passed)}, but is {self.op}")
        return (len(self.ranks) - 1) / len(self.ranks) * passed[self.op]


@dataclass
class Traffic:
    """The calls of this rank, in order.

    Attributes:
        calls: a list of :class:`Call`.
    """

    calls: list[Call] = field(default_factory=list)

    @property
    def put_in(self) -> int:
        """Bytes of the inputs of all calls."""
        return sum(call.put_in for call in self.calls)

    @property
    def got(self) -> int:
        """Bytes of the outputs of all calls."""
        return sum(call.got for call in self.calls)

    @property
    def on_a_ring(self) -> float:
        """Bytes that this rank sends if rings carry out all calls; see :attr:`Call.on_a_ring`."""
        return sum(call.on_a_ring for call in self.calls)

    @property
    def ops(self) -> list[str]:
        """The names of the calls, in order."""
        return [call.op for call in self.calls]

    @property
    def volume(self) -> dict[str, int]:
        """For each operation, the bytes of its full tensors: of a call's inputs or outputs, whichever are more."""
        sizes = dict.fromkeys(sorted(self.ops), 0)
        for call in self.calls:
            sizes[call.op] += max(call.put_in, call.got)
        return sizes

    def of(self, *ops: str) -> Traffic:
        """Only the calls of the given names, as in ``traffic.of("send").put_in``.

        Args:
            ops: names as in :attr:`Call.op`.
        """
        for op in ops:
            check("op", op, one_of(*_OPERATORS))
        return Traffic([call for call in self.calls if call.op in ops])

    def __len__(self) -> int:
        return len(self.calls)


@contextmanager
def count_bytes() -> Iterator[Traffic]:
    """Counts the bytes of this rank's collectives and messages inside the ``with`` block.

    Counters may be nested; each counts everything inside it.

    Returns:
        Traffic: the calls so far; can be read at any time and returned from the rank.

    Raises:
        NotImplementedError: if an unknown collective is called, because a count without it would be wrong.

    Examples:
        .. code-block:: python

            import ignite.distributed as idist
            import ignite_ddl as ddl
            import torch
            from ignite_ddl.lab import count_bytes

            def gather(local_rank):
                with count_bytes() as traffic:
                    idist.all_gather(torch.zeros(3))
                return traffic.put_in, traffic.got

            with ddl.Parallel(backend="gloo", nproc_per_node=4) as parallel:
                assert parallel.run(gather) == [(12, 48)] * 4
    """
    traffic = Traffic()
    with _Counter(traffic):
        yield traffic


class _Counter(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Modes run before tensor subclasses: NotImplemented lets a DTensor first turn into its collectives.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            self.traffic.calls += _calls(func, given | (kwargs or {}), result)
        return result


# The names in torch.distributed, and the operators below them, without a trailing underscore.
_OPERATORS = {
    "all_gather": (
        *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
        *("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"),
    ),
    "all_reduce": ("allreduce", "allreduce_coalesced", "all_reduce", "all_reduce_coalesced"),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single", "shard_dim_alltoall"),
    "barrier": ("barrier", "monitored_barrier"),
    "broadcast": ("broadcast",),
    "gather": ("gather",),
    "recv": ("recv", "recv_any_source", "irecv"),
    "reduce": ("reduce",),
    "reduce_scatter": (
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor"),
        *("reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
    ),
    "scatter": ("scatter",),
    "send": ("send", "isend"),
}
_NAMES = {operator: name for name, operators in _OPERATORS.items() for operator in operators}


def _calls(func: Any, given: dict[str, Any], result: Any) -> list[Call]:
    operator = func._schema.name.split("::")[1].rstrip("_")
    group = _group(given)
    if group is None:  # no communication: wait_tensor and the like
        return []
    ranks = tuple(dist.get_process_group_ranks(group))
    if operator == "batch_p2p_ops":
        parts = zip(given["op_list"], given["peer_list"], given["tensors"], strict=True)
        return [_message(_NAMES[name], tensor, ranks, peer) for name, peer, tensor in parts]
    if operator not in _NAMES:
        raise NotImplementedError(f"count_bytes does not know {func}: add it to ignite_ddl/lab/bytes.py")
    name = _NAMES[operator]
    if name in ("send", "recv"):
        return [_message(name, _first(given, "tensors", "tensor"), ranks, _first(given, "dst", "src"))]
    if name == "barrier":  # the tensor in its arguments is a dummy
        return [Call(name, 0, 0, ranks)]
    # Collectives work in place, have inputs and outputs, or (functional ones) return their outputs.
    both = _bytes(_first(given, "tensors", "inputs", "input"))
    if name == "all_reduce":
        return [Call(name, both, both, ranks)]
    if name in ("broadcast", "reduce"):
        is_root = group.rank() == _first(given, "root_rank", "src")
        put_in, got = (is_root, not is_root) if name == "broadcast" else (True, is_root)
        return [Call(name, put_in * both, got * both, ranks)]
    put_in = _first(given, "input_tensors", "input_tensor", "input_list", "inputs", "input")
    got = _first(given, "output_tensors", "output_tensor", "output_lists", "outputs", "output", "out")
    return [Call(name, _bytes(put_in), _bytes(result if got is None else got), ranks)]


def _message(op: str, tensors: Any, ranks: tuple[int, ...], peer: int | None) -> Call:
    size = _bytes(tensors)
    peer = None if peer is None else ranks[peer]  # torch's operators count ranks inside the group
    return Call(op, size if op == "send" else 0, size if op == "recv" else 0, ranks, peer)


def _group(given: dict[str, Any]) -> dist.ProcessGroup | None:
    group = _first(given, "process_group", "group_name")
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    return dist.ProcessGroup.unbox(group)


def _first(given: dict[str, Any], *names: str) -> Any:
    return next((given[name] for name in names if name in given), None)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return math.prod(value.shape) * value.element_size()  # nbytes fails on some wrappers
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0
