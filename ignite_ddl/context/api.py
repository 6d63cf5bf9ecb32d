"""Attention over a sequence that is sharded over the cp axis, with the arguments of torch's."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ignite_ddl.arguments import COUNT, FLAG, a, number, takes
from ignite_ddl.context.layout import check_length, natural_order
from ignite_ddl.context.ring import Ring, ring
from ignite_ddl.context.sequence import cp_group
from ignite_ddl.context.ulysses import heads_to_tokens, tokens_to_heads
from ignite_ddl.context.visible import Mask

__all__ = ["ring_attention", "ulysses_attention"]


def _is_query(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 4 and value.is_floating_point()


def _is_documents(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and not value.is_floating_point()


FITS = {
    **dict.fromkeys(("query", "key", "value"), a("a tensor, (batch, heads, tokens, head width)", _is_query)),
    **dict.fromkeys(("is_causal", "enable_gqa"), FLAG),
    "dropout_p": number(0.0, 1.0),
    "scale": number(),
    "window": COUNT,
    "documents": a("a tensor of integers, (batch, tokens)", _is_documents),
    "group": a("a process group", dist.ProcessGroup),
}


@takes(FITS)
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    documents: torch.Tensor | None = None,
    window: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Attention of this rank's tokens to the full sequence, which the ranks of ``group`` share.

    Exact: the output and the gradients are those of ``torch.nn.functional.scaled_dot_product_attention`` on the full
    sequence, under autocast in its dtype. Keys and values visit each rank once in the forward pass and once, with
    their gradients, in the backward pass; a rank holds its own part, a visitor and one on the way. Gradients of keys
    and values travel in float32, or in float64 if the input is float64.

    Args:
        query: this rank's tokens, (batch, heads, tokens, head width).
        key: as ``query``, perhaps with fewer heads (``enable_gqa=True``).
        value: as ``key``.
        attn_mask: not supported: say ``is_causal``, ``documents`` and ``window``.
        dropout_p: not supported but 0.
        is_causal: whether a token sees only itself and the tokens before it, default False.
        scale: factor of the scores, default one over the square root of the head width.
        enable_gqa: whether ``key`` and ``value`` have fewer heads than ``query``, default False.
        documents: (batch, tokens) integers: a token sees only tokens of its own document, default None: all.
        window: a token sees those less than ``window`` positions away, itself included, default None: all.
        group: the ranks that share the sequence, default None: those of the mesh's cp axis.

    Returns:
        torch.Tensor: as ``query``.

    Raises:
        ValueError: for a mask, dropout, shapes or dtypes that do not fit.

    Examples:
        .. code-block:: python

            import torch
            import torch.nn.functional as F
            import ignite_ddl as ddl

            query, key, value = torch.randn(3, 1, 2, 8, 4).unbind(0)

            def attention(local_rank):
                here = ddl.sequence_positions(4)
                return ddl.ring_attention(*(t[:, :, here] for t in (query, key, value)), is_causal=True)

            with ddl.Parallel(backend="gloo", nproc_per_node=2, cp=2) as parallel:
                first, second = parallel.run(attention)

            expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            assert torch.allclose(expected[:, :, [0, 1, 6, 7]], first, atol=1e-6)
            assert torch.allclose(expected[:, :, [2, 3, 4, 5]], second, atol=1e-6)
    """
    group = cp_group() if group is None else group
    query, key, value = _as_autocast(query, key, value)
    size = _check(query, key, value, attn_mask, dropout_p, enable_gqa, documents, window, group)
    mask = Mask(is_causal, window, documents is not None)
    everybodys = None if documents is None else _gather(documents, group, size)
    return ring(query, key, value, Ring(group, mask, everybodys, _scale(query, scale), query.device))


@takes(FITS)
def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    documents: torch.Tensor | None = None,
    window: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Attention of this rank's tokens to the full sequence: for a while each rank has all tokens of some heads.

    Exact, as :func:`ring_attention`, with the same arguments. Two exchanges turn tokens into heads and back (Jacobs et
    al., DeepSpeed Ulysses, arXiv 2309.14509); between them torch's own attention runs. The number of ranks has to
    divide the number of key heads.

    Args:
        query: as in :func:`ring_attention`; so are the others.
        key: see ``query``.
        value: see ``query``.
        attn_mask: see ``query``.
        dropout_p: see ``query``.
        is_causal: see ``query``.
        scale: see ``query``.
        enable_gqa: see ``query``.
        documents: see ``query``.
        window: see ``query``.
        group: see ``query``.

    Returns:
        torch.Tensor: as ``query``.

    Raises:
        ValueError: as :func:`ring_attention`, and if the ranks do not divide the heads.
    """
    group = cp_group() if group is None else group
    query, key, value = _as_autocast(query, key, value)
    size = _check(query, key, value, attn_mask, dropout_p, enable_gqa, documents, window, group)
    if key.shape[1] % size:
        raise ValueError(
            f"ulysses_attention gives each rank some heads: cp = {size} should divide the {key.shape[1]} heads of "
            f"key and value; ring_attention takes any number"
        )
    length = query.shape[2] * size
    order = natural_order(length, size, query.device)
    query, key, value = (tokens_to_heads(tensor, group)[:, :, order] for tensor in (query, key, value))
    mask, visible = Mask(is_causal, window, documents is not None), None
    if mask.needs_pairs:
        positions = torch.arange(length, device=query.device)
        everybodys = ()
        if documents is not None:
            everybodys = (_gather(documents, group, size).movedim(0, 1).flatten(1)[:, order],) * 2
        visible = mask.visible(positions, positions, *everybodys)
    causal = is_causal and visible is None
    output = F.scaled_dot_product_attention(
        query, key, value, visible, is_causal=causal, scale=scale, enable_gqa=enable_gqa
    )
    return heads_to_tokens(output[:, :, order.argsort()], group)


def _as_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In autocast's dtype, as torch's own attention takes them; float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors]


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _gather(documents: torch.Tensor, group: dist.ProcessGroup | None, size: int) -> torch.Tensor:
    if group is None:
        return documents.unsqueeze(0)
    parts = [torch.empty_like(documents) for _ in range(size)]
    dist.all_gather(parts, documents.contiguous(), group=group)
    return torch.stack(parts)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None,
    dropout_p: float,
    enable_gqa: bool,
    documents: torch.Tensor | None,
    window: int | None,
    group: dist.ProcessGroup | None,
) -> int:
    """The number of ranks that share the sequence, after a look at all arguments."""
    if attn_mask is not None:
        raise ValueError(
            "attn_mask should be None where the sequence is sharded, since a mask of this rank's tokens says nothing "
            "of the other ranks': say is_causal=True, documents= or window="
        )
    if dropout_p:
        raise ValueError(f"dropout_p should be 0 where the sequence is sharded, but is {dropout_p}")
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.dim() != 4 or key.shape != value.shape or key.dim() != 4 or query.shape[::2] != key.shape[::2]:
        raise ValueError(
            f"query, key and value should be (batch, heads, tokens, head width) with equal batch and tokens, and key "
            f"and value of one shape, but are {shapes}"
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key should have heads of one width, but are {shapes}")
    if query.shape[1] != key.shape[1] and (not enable_gqa or query.shape[1] % key.shape[1]):
        cure = "key's heads should divide query's" if enable_gqa else "say enable_gqa=True if key has fewer heads"
        raise ValueError(f"{cure}, but they are {shapes}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value should have one dtype, but have {query.dtype}, {key.dtype} and {value.dtype}"
        )
    if documents is not None and documents.shape != (query.shape[0], query.shape[2]):
        raise ValueError(
            f"documents should be (batch, tokens), {(query.shape[0], query.shape[2])}, but is {tuple(documents.shape)}"
        )
    size = 1 if group is None else group.size()
    check_length(query.shape[2] * size, size)
    return size
