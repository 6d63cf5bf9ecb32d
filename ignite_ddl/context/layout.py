"""Which tokens of a sequence a cp rank holds, chunk r from the front and chunk r from the back; which token sees which.

Under a causal mask the last token attends to all others and the first to itself alone. So a sequence is cut into
2 P chunks of equal length, and rank r holds chunks r and 2 P - 1 - r: each rank has the same number of pairs of
tokens to compute (Llama 3, arXiv 2407.21783, section 3.3.2). The order serves attention without a mask as well.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's place among those that share a sequence, and their number."""
    return (0, 1) if group is None else (group.rank(), group.size())


def check_length(length: int, size: int) -> None:
    """Raises if a sequence of this length cannot be cut into two chunks for each of ``size`` ranks."""
    if size > 1 and length % (2 * size):
        raise ValueError(
            f"the sequence should have a multiple of 2 × cp = {2 * size} tokens, but has {length}: pad it to "
            f"{-(-length // (2 * size)) * 2 * size}, with targets that the loss ignores; if dim 1 counts features, not "
            "tokens, there is no sequence to share: take a mesh without cp"
        )


def local_positions(length: int, rank: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """The positions in the full sequence of the tokens that a cp rank holds.

    Args:
        length: tokens of the full sequence.
        rank: the cp rank.
        size: number of cp ranks.
        device: of the result, default the CPU.

    Returns:
        torch.Tensor: ``length / size`` integers, ascending.

    Examples:
        .. code-block:: python

            from ignite_ddl.context.layout import local_positions

            assert local_positions(8, rank=1, size=2).tolist() == [2, 3, 4, 5]
    """
    check_length(length, size)
    positions = torch.arange(length, device=device)
    if size == 1:
        return positions
    chunks = positions.view(2 * size, -1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))  # not [[…]], a list that would be copied to the GPU


def natural_order(length: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """The position of each token of the full sequence in the concatenated parts of ranks 0, 1, ...."""
    return torch.cat([local_positions(length, rank, size, device) for rank in range(size)]).argsort()


def shard_sequence(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """The part of a tensor that a cp rank holds, cut along ``dim``."""
    return tensor.index_select(dim, local_positions(tensor.shape[dim], rank, size, tensor.device))


def visible_pairs(
    rows: torch.Tensor,
    columns: torch.Tensor,
    causal: bool,
    window: int | None = None,
    documents: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Which of the tokens at positions ``columns`` each token at positions ``rows`` sees.

    Args:
        rows: positions in the full sequence, (rows).
        columns: positions in the full sequence, (columns).
        causal: whether a token sees only itself and the tokens before it.
        window: a token sees those less than so many positions away. Default: all.
        documents: the document of each row, (batch, rows), and of each column; a token sees only its own. Default: all.

    Returns:
        torch.Tensor: (batch or 1, 1, rows, columns), True where a row sees a column.
    """
    distance = rows.unsqueeze(-1) - columns
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        visible = visible & (distance.abs() < window)
    visible = visible.unsqueeze(0)
    if documents is not None:
        of_rows, of_columns = documents
        visible = visible & (of_rows.unsqueeze(-1) == of_columns.unsqueeze(-2))
    return visible.unsqueeze(1)
