"""Ring attention: queries stay, keys and values visit each rank once.

In step s, rank r holds the keys and values of rank r - s, computes its queries' attention to them, and meanwhile
sends them on to rank r + 1. In the backward pass keys and values travel once more, and their gradients travel with
them, one rank behind, and arrive after P steps where they belong (Liu, Zaharia and Abbeel, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ignite_ddl.context.blocks import Block, block_backward, block_forward, merge
from ignite_ddl.context.layout import local_positions
from ignite_ddl.context.visible import Mask

__all__ = ["Ring", "ring"]


@dataclass(frozen=True)
class Ring:
    """What all steps of one attention share.

    Attributes:
        group: the process group of the cp axis; None if this process has the full sequence.
        mask: which token sees which.
        documents: (P, batch, local tokens), the document of each rank's tokens, if the mask goes by them.
        scale: factor of the scores.
        device: where the tensors are.
    """

    group: dist.ProcessGroup | None
    mask: Mask
    documents: torch.Tensor | None
    scale: float
    device: torch.device

    @property
    def rank(self) -> int:
        """This rank's position in the ring."""
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        """Number of ranks in the ring."""
        return 1 if self.group is None else self.group.size()

    def pairs(self, source: int, length: int) -> Iterator[tuple[slice, slice, bool, torch.Tensor | None]]:
        """What this rank computes with the keys of rank ``source``: rows, columns, whether causal, and what is visible.

        Without documents and window, chunks r and 2 P - 1 - r of a causal sequence need no mask but the kernel's
        causal one: keys of an earlier rank are seen by all rows in their first half alone, keys of a later rank by the
        second half of the rows.
        """
        everything, half = slice(None), length // 2
        if self.mask.needs_pairs:
            visible = self._visible(source, length)
            if visible.any():
                yield everything, everything, False, visible
        elif not self.mask.causal:
            yield everything, everything, False, None
        elif source == self.rank:
            yield everything, everything, True, None
        elif source < self.rank:
            yield everything, slice(half), False, None
        else:
            yield slice(half, None), everything, False, None

    def _visible(self, source: int, length: int) -> torch.Tensor:
        ranks, full = (self.rank, source), length * self.size
        positions = (local_positions(full, rank, self.size, self.device) for rank in ranks)
        documents = () if self.documents is None else (self.documents[rank] for rank in ranks)
        return self.mask.visible(*positions, *documents)

    def send_to_next(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        """Starts an exchange: to the next rank goes ``tensor``, from the previous rank comes what is returned."""
        if self.size == 1:
            return tensor, []
        received = torch.empty_like(tensor)
        following, previous = ((self.rank + step) % self.size for step in (1, -1))
        operations = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=following),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=previous),
        ]
        return received, dist.batch_isend_irecv(operations)


def ring(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shared: Ring) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks."""
    with torch.autocast(query.device.type, enabled=False):  # blocks are merged in float32 or better
        return _RingAttention.apply(query, torch.stack((key, value)), shared)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, pair: torch.Tensor, shared: Ring) -> torch.Tensor:
        ctx.shared = shared
        dtype = torch.promote_types(query.dtype, torch.float32)  # blocks are summed in float32 or better
        output: torch.Tensor = torch.zeros_like(query, dtype=dtype)
        merged: Block = output, output.new_full(query.shape[:-1], float("-inf"))
        for source, (key, value) in _circulate(pair, shared):
            for rows, columns, causal, visible in shared.pairs(source, query.shape[2]):
                part = query[:, :, rows], key[:, :, columns], value[:, :, columns]
                block = block_forward(*part, causal, visible, shared.scale)
                before = merged[0][:, :, rows], merged[1][:, :, rows]
                for total, new in zip(merged, merge(before, (block[0].to(dtype), block[1].to(dtype))), strict=True):
                    total[:, :, rows] = new
        output, logsumexp = merged[0].to(query.dtype), merged[1]
        ctx.save_for_backward(query, pair, output, logsumexp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, pair, output, logsumexp = ctx.saved_tensors
        shared, gradient = ctx.shared, gradient.contiguous()
        dtype = torch.promote_types(query.dtype, torch.float32)  # gradients of keys and values travel in this dtype
        of_query = torch.zeros_like(query, dtype=dtype)
        of_pair, works, added = torch.zeros_like(pair, dtype=dtype), [], None
        for source, (key, value) in _circulate(pair, shared):
            sent, added = added, torch.zeros_like(pair, dtype=dtype)  # a tensor that is being sent must not change
            for rows, columns, causal, visible in shared.pairs(source, query.shape[2]):
                part = query[:, :, rows], key[:, :, columns], value[:, :, columns]
                merged = output[:, :, rows], logsumexp[:, :, rows]
                gradients = block_backward(gradient[:, :, rows], *part, merged, causal, visible, shared.scale)
                of_query[:, :, rows] += gradients[0]
                added[0, :, :, columns] += gradients[1]
                added[1, :, :, columns] += gradients[2]
            for work in works:
                work.wait()
            del sent
            added += of_pair
            of_pair, works = shared.send_to_next(added)
        for work in works:
            work.wait()
        return of_query.to(query.dtype), of_pair.to(query.dtype), None


def _circulate(pair: torch.Tensor, shared: Ring) -> Iterator[tuple[int, torch.Tensor]]:
    """The keys and values of each rank, this rank's first; the next ones are under way while they are used."""
    for step in range(shared.size):
        last = step == shared.size - 1
        following, works = (pair, []) if last else shared.send_to_next(pair)
        yield (shared.rank - step) % shared.size, pair
        for work in works:
            work.wait()
        pair = following
