"""torch's attention kernels that return the logarithm of the sum of exponentials, and their backward passes.

On a CPU one kernel takes every dtype, masks, and fewer key heads than query heads. On CUDA the flash kernels take
float16 and bfloat16 without a mask; they were written from torch's schemas and have not been run on a GPU here.
"""

from __future__ import annotations

import torch

__all__ = ["attention", "attention_backward", "has_kernel"]

_aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


def has_kernel(query: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether torch has a kernel for a query and a mask of this kind."""
    if query.device.type == "cpu":
        return True
    return query.device.type == "cuda" and bias is None and query.dtype in (torch.float16, torch.bfloat16)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, bias: torch.Tensor | None, scale: float
) -> Tensors:
    """Output, and the logarithm of the sum of exponentials."""
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    return _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]


def attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    causal: bool,
    bias: torch.Tensor | None,
    scale: float,
) -> Tensors:
    """The gradients of query, key and value."""
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, logsumexp, 0.0, causal, attn_mask=bias, scale=scale
        )
    heads, rows, columns = key.shape[1], query.shape[2], key.shape[2]
    key, value = (tensor.repeat_interleave(query.shape[1] // heads, dim=1) for tensor in (key, value))
    seed = torch.empty((), dtype=torch.int64, device="cpu")  # of dropout, which is 0
    of_query, *of_pair = _aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, output, logsumexp, None, None, rows, columns, 0.0, causal, seed, seed, scale=scale
    )
    return of_query, *(tensor.unflatten(1, (heads, -1)).sum(2) for tensor in of_pair)
