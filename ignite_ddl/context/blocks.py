"""Attention of some queries to some keys, and how the results of several blocks of keys become one.

The softmax over all keys is the mean of the blocks' softmaxes, weighted by the sums of their exponentials, whose
logarithms a kernel returns with its output (Milakov and Gimelshein, arXiv 1805.02867; Liu et al., arXiv 2310.01889).
The backward pass of a block needs the *merged* output and logarithm: with them a block's probabilities are those of
the softmax over all keys, and its gradients are exact. Autograd through the merge is not used.
"""

from __future__ import annotations

import torch

from ignite_ddl.context.kernels import Pairs, attention, attention_backward, has_kernel, repeated, sum_by_key_head

Block = tuple[torch.Tensor, torch.Tensor]  # output, and the logarithm of the sum of exponentials, (batch, heads, rows)


def block_forward(pairs: Pairs) -> Block:
    """Attention of queries to one block of keys.

    Returns:
        tuple: the output and the logarithm of the sum of exponentials, -inf for rows that see no column.
    """
    if has_kernel(pairs):
        output, logsumexp = attention(pairs)
    else:
        scores, value = _scores(pairs)
        logsumexp = scores.logsumexp(-1)
        output = torch.exp(scores - logsumexp.unsqueeze(-1)).nan_to_num() @ value
        output = output.to(pairs.query.dtype)
    if pairs.visible is not None:  # the CPU's kernel returns 0 where a row sees nothing
        empty = ~pairs.visible.any(-1).expand(logsumexp.shape)
        logsumexp = logsumexp.masked_fill(empty, float("-inf"))
        output = output.masked_fill(empty.unsqueeze(-1), 0)
    return output, logsumexp


def merge(first: Block, second: Block) -> Block:
    """The attention to two blocks of keys together, from the attention to each."""
    output, logsumexp = first
    other, logsumexp_other = second
    share = torch.sigmoid(logsumexp_other - logsumexp).nan_to_num(0.0)  # two empty blocks: -inf - -inf
    return torch.lerp(output, other, share.unsqueeze(-1)), torch.logaddexp(logsumexp, logsumexp_other)


def block_backward(gradient: torch.Tensor, pairs: Pairs, merged: Block) -> tuple[torch.Tensor, ...]:
    """What one block of keys adds to the gradients of query, key and value.

    Args:
        gradient: the gradient of the merged output.
        pairs: as in the forward pass.
        merged: output and logarithm of all blocks together, of the query's dtype and at least float32.
    """
    output, logsumexp = merged
    if has_kernel(pairs):
        return attention_backward(gradient, pairs, output, logsumexp)
    # Dao et al., FlashAttention, arXiv 2205.14135, appendix B.4
    query, key = pairs.query, pairs.key
    scores, value = _scores(pairs)
    probabilities = torch.exp(scores - logsumexp.unsqueeze(-1)).nan_to_num()
    gradient = gradient.to(probabilities.dtype)
    rows = (gradient * output.to(gradient.dtype)).sum(-1, keepdim=True)
    of_scores = probabilities * (gradient @ value.mT - rows) * pairs.scale
    of_query = of_scores @ repeated(key, query).to(of_scores.dtype)
    of_key_value = of_scores.mT @ query.to(of_scores.dtype), probabilities.mT @ gradient
    return of_query, *(sum_by_key_head(tensor, key) for tensor in of_key_value)


def _scores(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of all pairs, -inf where a row does not see a column, and values of as many heads and this dtype."""
    dtype = torch.promote_types(pairs.query.dtype, torch.float32)
    key, value = (repeated(tensor, pairs.query).to(dtype) for tensor in (pairs.key, pairs.value))
    scores = pairs.query.to(dtype) @ key.mT * pairs.scale
    if pairs.visible is not None:
        scores = scores.masked_fill(~pairs.visible, float("-inf"))
    if pairs.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, value
