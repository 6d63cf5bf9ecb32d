"""Attention of some queries to some keys, and how the results of several blocks of keys become one.

The softmax over all keys is the mean of the blocks' softmaxes, weighted by the sums of their exponentials, whose
logarithms a kernel returns with its output (Milakov and Gimelshein, arXiv 1805.02867; Liu et al., arXiv 2310.01889).
The backward pass of a block needs the *merged* output and logarithm: with them a block's probabilities are those of
the softmax over all keys, and its gradients are exact. Autograd through the merge is not used.
"""

from __future__ import annotations

import torch

from ignite_ddl.context.kernels import attention, attention_backward, has_kernel

__all__ = ["Block", "block_backward", "block_forward", "merge"]

Block = tuple[torch.Tensor, torch.Tensor]  # output, and the logarithm of the sum of exponentials, (batch, heads, rows)


def block_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    visible: torch.Tensor | None,
    scale: float,
) -> Block:
    """Attention of ``query`` to one block of keys.

    Args:
        query: (batch, heads, rows, head width).
        key: (batch, key heads, columns, head width).
        value: as ``key``.
        causal: whether row i sees columns up to i alone.
        visible: (batch or 1, 1, rows, columns), True where a row sees a column; None for all.
        scale: factor of the scores.

    Returns:
        tuple: the output and the logarithm of the sum of exponentials, -inf for rows that see no column.
    """
    bias = _bias(visible, query)
    if has_kernel(query, bias):
        output, logsumexp = attention(query, key, value, causal, bias, scale)
    else:
        scores = _scores(query, key, causal, bias, scale)
        logsumexp = scores.logsumexp(-1)
        output = torch.exp(scores - logsumexp.unsqueeze(-1)).nan_to_num() @ _repeated(value, query)
        output = output.to(query.dtype)
    if visible is not None:  # the CPU's kernel returns 0 where a row sees nothing
        empty = ~visible.any(-1).expand(logsumexp.shape)
        logsumexp = logsumexp.masked_fill(empty, float("-inf"))
        output = output.masked_fill(empty.unsqueeze(-1), 0)
    return output, logsumexp


def merge(first: Block, second: Block) -> Block:
    """The attention to two blocks of keys together, from the attention to each."""
    output, logsumexp = first
    other, logsumexp_other = second
    share = torch.sigmoid(logsumexp_other - logsumexp).nan_to_num(0.0)  # two empty blocks: -inf - -inf
    return torch.lerp(output, other, share.unsqueeze(-1)), torch.logaddexp(logsumexp, logsumexp_other)


def block_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    merged: Block,
    causal: bool,
    visible: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What one block of keys adds to the gradients of query, key and value.

    Args:
        gradient: the gradient of the merged output.
        query: as in the forward pass; so are key, value, causal, visible and scale.
        key: see ``query``.
        value: see ``query``.
        merged: output and logarithm of all blocks together, of the query's dtype and at least float32.
        causal: see ``query``.
        visible: see ``query``.
        scale: see ``query``.

    Returns:
        tuple: the gradients of query, key and value.
    """
    output, logsumexp = merged
    bias = _bias(visible, query)
    if has_kernel(query, bias):
        return attention_backward(gradient, query, key, value, output, logsumexp, causal, bias, scale)
    # Dao et al., FlashAttention, arXiv 2205.14135, appendix B.4
    probabilities = torch.exp(_scores(query, key, causal, bias, scale) - logsumexp.unsqueeze(-1)).nan_to_num()
    gradient = gradient.to(probabilities.dtype)
    of_value = probabilities.transpose(-1, -2) @ gradient
    of_probabilities = gradient @ _repeated(value, query).transpose(-1, -2)
    rows = (gradient * output.to(gradient.dtype)).sum(-1, keepdim=True)
    of_scores = probabilities * (of_probabilities - rows) * scale
    of_query = of_scores @ _repeated(key, query)
    of_key = of_scores.transpose(-1, -2) @ query.to(of_scores.dtype)
    return of_query, _by_key_head(of_key, key), _by_key_head(of_value, value)


def _bias(visible: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    if visible is None:
        return None
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(visible, zero, float("-inf")).expand(query.shape[0], -1, -1, -1)


def _scores(
    query: torch.Tensor, key: torch.Tensor, causal: bool, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ _repeated(key, query).transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _repeated(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values with as many heads as the query, of at least float32."""
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _by_key_head(gradient: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return gradient.unflatten(1, (key.shape[1], -1)).sum(2)
