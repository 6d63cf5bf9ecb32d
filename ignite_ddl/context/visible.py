"""Which token sees which: causal, a window, documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Mask"]


@dataclass(frozen=True)
class Mask:
    """What a token may see.

    Attributes:
        causal: only itself and the tokens before it.
        window: only tokens less than so many positions away; None for all.
        by_document: only tokens of its own document.
    """

    causal: bool = False
    window: int | None = None
    by_document: bool = False

    @property
    def needs_pairs(self) -> bool:
        """Whether a kernel's causal flag is not enough."""
        return self.window is not None or self.by_document

    def visible(
        self,
        rows: torch.Tensor,
        columns: torch.Tensor,
        row_documents: torch.Tensor | None = None,
        column_documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Which of the tokens at positions ``columns`` each token at positions ``rows`` sees.

        Args:
            rows: positions in the full sequence, (rows).
            columns: positions in the full sequence, (columns).
            row_documents: the document of each row, (batch, rows), if ``by_document``.
            column_documents: the document of each column, (batch, columns), if ``by_document``.

        Returns:
            torch.Tensor: (batch or 1, 1, rows, columns), True where a row sees a column.
        """
        distance = rows.unsqueeze(-1) - columns
        visible = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            visible = visible & (distance.abs() < self.window)
        visible = visible.expand(1, 1, *visible.shape)
        if self.by_document:
            same = row_documents.unsqueeze(-1) == column_documents.unsqueeze(-2)
            visible = visible & same.unsqueeze(1)
        return visible
