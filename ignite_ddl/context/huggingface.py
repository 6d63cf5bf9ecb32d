"""Ring attention for models of Hugging Face's transformers, through its attention interface and its mask function.

Imported by those who use it. transformers has been tried in version 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ignite_ddl.arguments import takes
from ignite_ddl.context.api import ring_attention
from ignite_ddl.context.sequence import sequence_positions

__all__ = ["register_attention"]

_SUPPORTED = ("causal_mask_function", "packed_sequence_mask_function.<locals>.inner_mask")  # by is_causal and positions
_WRAPPERS = ("and_masks", "remap_positions_for_packed_sequence", "add_offsets_to_mask_function")  # other mask functions
_WINDOW = "sliding_window_overlay"
_POSITIONS = (
    "position_ids should be the tokens' places in the full sequence, which a cp rank has a part of: put them into the "
    "batch, torch.arange(T) for each row, so that ddl.auto_dataloader shards them with the tokens; where they begin "
    'anew in each of several documents, take attn_implementation="ddl_ring_packed"'
)


@takes()
def register_attention() -> None:
    """Makes ``attn_implementation="ddl_ring"`` and ``"ddl_ring_packed"`` known to transformers; every rank calls it.

    Both are causal :func:`ring_attention`, with the sliding window that the model has. Batches bring ``position_ids``:
    of "ddl_ring" the tokens' places in the row, of "ddl_ring_packed" their places in their document, of which a row
    has several side by side. (transformers' own attention, with which one may compare, sees these documents with
    ``use_cache=False`` only: where a model makes a cache, it attends across them.) Masks of other kinds, padding among
    them, are refused: pad on the right, with targets of -100, and leave ``attention_mask`` out. Losses are computed by
    the trainer, from targets that the dataset has shifted; a model's own (``labels=``) would lose a target at each cut.

    Examples:
        .. code-block:: python

            from ignite_ddl.context.huggingface import register_attention

            def training(local_rank, config):
                register_attention()
                model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="ddl_ring")
                ...                                                     # batches: input_ids, position_ids
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, packed in (("ddl_ring", False), ("ddl_ring_packed", True)):
        AttentionInterface.register(name, _attention(packed))
        AttentionMaskInterface.register(name, _mask)


def _attention(packed: bool) -> Callable:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        position_ids: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        extra = next((name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None), None)
        if extra is not None or (attention_mask is not None and attention_mask.ndim):
            raise ValueError(f"{extra or 'attention_mask'} is not carried by ddl_ring: leave it out")
        if is_causal is False or not getattr(module, "is_causal", True):
            raise ValueError("is_causal should be True: ddl_ring is causal attention")
        if key.shape[2] != query.shape[2]:
            raise ValueError("past_key_values are not carried by ddl_ring: pass use_cache=False")
        window = others.get("sliding_window") if attention_mask is None else int(attention_mask)
        documents = _documents(position_ids, query, packed)
        output = ring_attention(
            *(query, key, value), None, dropout, True, scaling, True, documents=documents, window=window
        )
        return output.transpose(1, 2), None

    return attention


def _documents(positions: torch.Tensor | None, query: torch.Tensor, packed: bool) -> torch.Tensor | None:
    """Where the document of each token begins; None if a row is one document."""
    local = sequence_positions(query.shape[2], query.device)
    if positions is None or positions.ndim != 2 or not (packed or torch.equal(local.expand_as(positions), positions)):
        raise ValueError(_POSITIONS)
    return (local - positions).expand(len(query), -1) if packed else None


def _mask(
    mask_function: Callable, attention_mask: torch.Tensor | None = None, device: Any = None, **_: Any
) -> torch.Tensor | None:
    """The mask that the attention gets: None, or the sliding window as a single number."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            "attention_mask should be left out with ddl_ring, which does not carry padding: pad on the right, where a "
            "causal model's other tokens do not see it, with targets of -100"
        )
    windows = set(_windows(mask_function))
    if len(windows) > 1:
        raise ValueError(f"a layer should have one sliding window with ddl_ring, but has {sorted(windows)}")
    return torch.tensor(windows.pop(), device=device) if windows else None


def _windows(function: Callable) -> list[int]:
    name = function.__qualname__
    inside = [cell.cell_contents for cell in function.__closure__ or ()]
    kind = name.split(".")[0]
    if name in _SUPPORTED:
        return []
    if kind == _WINDOW:
        return [value for value in inside if isinstance(value, int)]
    if kind not in _WRAPPERS:
        raise ValueError(f"ddl_ring does not carry the mask of transformers' {kind}: take a model without it")
    functions = [one for value in inside for one in (value if isinstance(value, tuple) else (value,)) if callable(one)]
    return [window for one in functions for window in _windows(one)]
