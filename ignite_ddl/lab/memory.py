"""How many bytes autograd keeps for the backward pass: now, and at most. The activations that a schedule is about."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["SavedBytes"]


class SavedBytes:
    """Counts what forward passes inside it save for their backward passes, and what of that is still alive.

    A tensor counts once, however many operations save it, and a microbatch of a batch with its own rows only; of two
    views that begin at one address the larger counts, until both are freed. The
    weights of ``model`` do not count, nor does what is alive without being saved, such as the receive buffers that
    torch's pipeline stages keep for every microbatch.

    Args:
        model: its parameters and buffers are left out. Default: none.

    Attributes:
        now: Bytes that are saved and not yet freed.
        peak: The most bytes at any time, since the beginning or :meth:`reset`.

    Example:
        >>> import torch
        >>> from ignite_ddl.lab import SavedBytes
        >>> layer, x = torch.nn.Linear(16, 16), torch.zeros(4, 16)
        >>> with SavedBytes(layer) as saved:
        ...     torch.tanh(layer(x)).sum().backward()
        >>> saved.peak, saved.now                       # the input and tanh's output, 4 x 16 numbers of 4 bytes each
        (512, 0)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        weights = [] if model is None else [*model.parameters(), *model.buffers()]
        self._left_out = {_local(weight).untyped_storage().data_ptr() for weight in weights}
        self._counted: dict[
            int, tuple[int, int]
        ] = {}  # by address: how often it is saved, and its bytes in `now`
        self.now = self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda held: held.tensor)

    def reset(self) -> None:
        """Begins a new peak."""
        self.peak = self.now

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._hooks.__exit__(*exc_info)

    def _save(self, tensor: torch.Tensor) -> _Held:
        return _Held(
            tensor.detach(), self
        )  # not the tensor: saved by the operation that made it, it would hold itself

    def _add(self, tensor: torch.Tensor, times: int) -> None:
        tensor = _local(tensor)
        if tensor.untyped_storage().data_ptr() in self._left_out:
            return
        before, counted = self._counted.pop(tensor.data_ptr(), (0, 0))
        size = max(counted, min(tensor.nbytes, tensor.untyped_storage().nbytes()))
        if before + times:
            self._counted[tensor.data_ptr()] = before + times, size
        else:
            size = 0
        self.now += size - counted
        self.peak = max(self.peak, self.now)


class _Held:
    def __init__(self, tensor: torch.Tensor, counter: SavedBytes) -> None:
        self.tensor, self.counter = tensor, counter
        counter._add(tensor, 1)

    def __del__(self) -> None:
        self.counter._add(self.tensor, -1)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)  # of a DTensor
