"""torch's attention kernels that return the logarithm of the sum of exponentials, and their backward passes.

On a CPU one kernel takes every dtype, masks, and fewer key heads than query heads. On CUDA the flash kernels take
float16 and bfloat16 without a mask, on devices of compute capability 8.0 or higher, and read the logarithms as
contiguous memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


class Pairs(NamedTuple):
    """Some queries and one block of keys, and which of their pairs count.

    Attributes:
        query: (batch, heads, rows, head width).
        key: (batch, key heads, columns, head width).
        value: as ``key``.
        causal: whether row i sees columns up to i alone.
        visible: (batch or 1, 1, rows, columns), True where a row sees a column; None for all.
        scale: factor of the scores.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    causal: bool
    visible: torch.Tensor | None
    scale: float

    @property
    def bias(self) -> torch.Tensor | None:
        """What kernels add to the scores: -inf where a row does not see a column."""
        if self.visible is None:
            return None
        zero = torch.zeros((), dtype=self.query.dtype, device=self.query.device)
        return torch.where(self.visible, zero, float("-inf")).expand(len(self.query), -1, -1, -1)


def has_kernel(pairs: Pairs) -> bool:
    """Whether torch has a kernel for tensors and a mask of this kind."""
    query = pairs.query
    if query.device.type == "cpu":
        return True
    if query.device.type != "cuda" or pairs.visible is not None:
        return False
    fits = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256  # torch's dispatcher would pad
    half = query.dtype in (torch.float16, torch.bfloat16)
    return fits and half and torch.cuda.get_device_capability(query.device) >= (8, 0)


def attention(pairs: Pairs) -> Tensors:
    """Output, and the logarithm of the sum of exponentials."""
    query, key, value, causal, _, scale = pairs
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=pairs.bias, scale=scale
        )
    key, value = (repeated(tensor, query) for tensor in (key, value))
    return _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]


def attention_backward(gradient: torch.Tensor, pairs: Pairs, output: torch.Tensor, logsumexp: torch.Tensor) -> Tensors:
    """The gradients of query, key and value."""
    query, key, value, causal, _, scale = pairs
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, logsumexp, 0.0, causal, attn_mask=pairs.bias, scale=scale
        )
    rows, columns = query.shape[2], key.shape[2]
    of_all_heads = (repeated(tensor, query) for tensor in (key, value))
    seed = torch.empty((), dtype=torch.int64, device="cpu")  # of dropout, which is 0
    of_query, *of_key_value = _aten._scaled_dot_product_flash_attention_backward(
        *(gradient, query, *of_all_heads, output, logsumexp.contiguous(), None, None, rows, columns, 0.0, causal),
        *(seed, seed),
        scale=scale,
    )
    return of_query, *(sum_by_key_head(tensor, key) for tensor in of_key_value)


def repeated(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values with as many heads as the query."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def sum_by_key_head(gradient: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The gradient of keys or values, from that of :func:`repeated` ones."""
    return gradient.unflatten(1, (key.shape[1], -1)).sum(2)
