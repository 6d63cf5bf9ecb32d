"""Attention over a sequence that is sharded over the cp axis, with the arguments of torch's."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ignite_ddl.arguments import COUNT, FLAG, Fits, a, number, takes
from ignite_ddl.collectives import gathered
from ignite_ddl.context.layout import check_length, natural_order, place_in, visible_pairs
from ignite_ddl.context.ring import Ring, ring
from ignite_ddl.context.sequence import cp_group
from ignite_ddl.context.ulysses import heads_to_tokens, tokens_to_heads


def _is_query(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 4 and value.is_floating_point()


def _is_documents(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and not value.is_floating_point()


_QKV = ("query", "key", "value")
FITS = {
    **dict.fromkeys(_QKV, a("a tensor, (batch, heads, tokens, head width)", _is_query)),
    "attn_mask": a(
        "None where the sequence is sharded, since a mask of this rank's tokens says nothing of the other ranks' (say "
        "is_causal=True, documents= or window=)",
        type(None),
    ),
    "dropout_p": Fits("0 where the sequence is sharded", number(0.0, 0.0).read),
    **dict.fromkeys(("is_causal", "enable_gqa"), FLAG),
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
        attn_mask: only None: say ``is_causal``, ``documents`` and ``window`` instead.
        dropout_p: only 0.
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
    query, key, value, documents, group = _prepared(query, key, value, enable_gqa, documents, group)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return ring(query, key, value, Ring(group, is_causal, window, documents, scale))


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
    query, key, value, documents, group = _prepared(query, key, value, enable_gqa, documents, group)
    _, size = place_in(group)
    if key.shape[1] % size:
        raise ValueError(
            f"ulysses_attention gives each rank some heads: cp = {size} should divide the {key.shape[1]} heads of "
            f"key and value; ring_attention takes any number"
        )
    length = query.shape[2] * size
    order = natural_order(length, size, query.device)
    query, key, value = (tokens_to_heads(tensor, group)[:, :, order] for tensor in (query, key, value))
    visible = None
    if window is not None or documents is not None:
        positions = torch.arange(length, device=query.device)
        of_all = None if documents is None else (documents.movedim(0, 1).flatten(1)[:, order],) * 2
        visible = visible_pairs(positions, positions, is_causal, window, of_all)
    causal = is_causal and visible is None
    output = F.scaled_dot_product_attention(
        query, key, value, visible, is_causal=causal, scale=scale, enable_gqa=enable_gqa
    )
    return heads_to_tokens(output[:, :, order.argsort()], group)


def _prepared(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    enable_gqa: bool,
    documents: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, dist.ProcessGroup | None]:
    """Checks arguments; the tensors in autocast's dtype, all ranks' documents, (P, batch, tokens), and the group."""
    query, key, value = _as_autocast(query, key, value)
    (batch, heads, tokens, width), key_heads = query.shape, key.shape[1]
    heads_fit = heads % key_heads == 0 if enable_gqa else heads == key_heads
    one_dtype = query.dtype == key.dtype == value.dtype
    if not (one_dtype and heads_fit and key.shape == value.shape == (batch, key_heads, tokens, width)):
        given = (f"{name} {tuple(t.shape)} {t.dtype}" for name, t in zip(_QKV, (query, key, value), strict=True))
        raise ValueError(
            "query, key and value should be (batch, heads, tokens, head width) of one shape and one dtype, but for the "
            "heads of key and value, which may be fewer and divide query's where enable_gqa=True says so, but given "
            f"{', '.join(given)}"
        )
    group = cp_group() if group is None else group
    _, size = place_in(group)
    check_length(tokens * size, size)
    if documents is not None:
        if documents.shape != (batch, tokens):
            raise ValueError(f"documents should be {(batch, tokens)}, but is {tuple(documents.shape)}")
        documents = torch.stack(gathered(documents, group) if size > 1 else [documents])
    return query, key, value, documents, group


def _as_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In autocast's dtype, as torch's own attention takes them; float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors]
