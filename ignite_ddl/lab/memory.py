"""Counts the bytes that autograd saves for backward: the current number and the peak."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ignite_ddl.arguments import MODULE, takes

__all__ = ["SavedBytes"]


class SavedBytes:
    """Counts the bytes of the tensors that forward passes inside the ``with`` block save for backward.

    A tensor counts once, however many operations save it, and a microbatch that is a view of a batch with its own
    rows only; of two views that begin at one address the larger counts, until both are freed. Not counted are the
    weights of ``model`` and tensors that are alive without being saved, such as the receive buffers of torch's
    pipeline stages.

    Args:
        model: its parameters and buffers are not counted. Default: none.

    Attributes:
        now: Bytes that are saved and not yet freed.
        peak: The peak of ``now`` since the start or :meth:`reset`.

    Example:
        >>> import torch
        >>> from ignite_ddl.lab import SavedBytes
        >>> layer, x = torch.nn.Linear(16, 16), torch.zeros(4, 16)
        >>> with SavedBytes(layer) as saved:
        ...     torch.tanh(layer(x)).sum().backward()
        >>> saved.peak, saved.now                       # the input and tanh's output, 4 x 16 numbers of 4 bytes each
        (512, 0)
    """

    @takes(model=MODULE)
    def __init__(self, model: nn.Module | None = None) -> None:
        weights = [] if model is None else [*model.parameters(), *model.buffers()]
        self._left_out = {_local(weight).untyped_storage().data_ptr() for weight in weights}
        # By address: how often a tensor is saved, and its bytes in `now`.
        self._counted: dict[int, tuple[int, int]] = {}
        self.now = self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda held: held.tensor)

    def reset(self) -> None:
        """Resets the peak to the current number of bytes."""
        self.peak = self.now

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._hooks.__exit__(*exc_info)

    def _save(self, tensor: torch.Tensor) -> _Held:
        # Detached: a tensor saved by the operation that made it would form a reference cycle.
        return _Held(tensor.detach(), self)

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
