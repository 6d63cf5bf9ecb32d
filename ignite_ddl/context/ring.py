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
from ignite_ddl.context.kernels import Pairs
from ignite_ddl.context.layout import local_positions, place_in, visible_pairs


@dataclass(frozen=True)
class Ring:
    """What all steps of one attention share.

    Attributes:
        group: the process group of the cp axis; None if this process has the full sequence.
        causal: whether a token sees only itself and the tokens before it.
        window: a token sees those less than so many positions away; None: all.
        documents: (P, batch, local tokens), the document of each rank's tokens; None if a row is one.
        scale: factor of the scores.
    """

    group: dist.ProcessGroup | None
    causal: bool
    window: int | None
    documents: torch.Tensor | None
    scale: float

    rank = property(lambda self: place_in(self.group)[0], doc="This rank's position in the ring.")
    size = property(lambda self: place_in(self.group)[1], doc="Number of ranks in the ring.")

    def part(
        self, source: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[slice, slice, Pairs | None]:
        """What this rank's queries have to do with the keys of rank ``source``: rows, columns, and their pairs, if any.

        Without documents and window, chunks r and 2 P - 1 - r of a causal sequence need no mask but the kernel's
        causal one: keys of an earlier rank are seen by all rows in their first half alone, keys of a later rank by the
        second half of the rows.
        """
        rows = columns = slice(None)
        half, causal, visible = query.shape[2] // 2, False, None
        if self.window is not None or self.documents is not None:
            visible = self._visible(source, query)
            if not visible.any():
                return rows, columns, None
        elif self.causal and source < self.rank:
            columns = slice(half)
        elif self.causal and source > self.rank:
            rows = slice(half, None)
        else:
            causal = self.causal
        part = query[:, :, rows], key[:, :, columns], value[:, :, columns]
        return rows, columns, Pairs(*part, causal, visible, self.scale)

    def _visible(self, source: int, query: torch.Tensor) -> torch.Tensor:
        ranks, length = (self.rank, source), query.shape[2] * self.size
        positions = (local_positions(length, rank, self.size, query.device) for rank in ranks)
        documents = None if self.documents is None else tuple(self.documents[rank] for rank in ranks)
        return visible_pairs(*positions, self.causal, self.window, documents)

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
    query = query if query.stride(-1) == 1 else query.contiguous()  # CUDA's flash kernels refuse others
    with torch.autocast(query.device.type, enabled=False):  # blocks are merged in float32 or better
        return _RingAttention.apply(query, torch.stack((key, value)), shared)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key_value: torch.Tensor, shared: Ring) -> torch.Tensor:
        ctx.shared = shared
        dtype = torch.promote_types(query.dtype, torch.float32)  # blocks are summed in float32 or better
        output: torch.Tensor = torch.zeros_like(query, dtype=dtype)
        merged: Block = output, output.new_full(query.shape[:-1], float("-inf"))
        for source, (key, value) in _circulate(key_value, shared):
            rows, _, pairs = shared.part(source, query, key, value)
            if pairs is not None:
                before, block = (merged[0][:, :, rows], merged[1][:, :, rows]), block_forward(pairs)
                for total, new in zip(merged, merge(before, (block[0].to(dtype), block[1].to(dtype))), strict=True):
                    total[:, :, rows] = new
        output, logsumexp = merged[0].to(query.dtype), merged[1]
        ctx.save_for_backward(query, key_value, output, logsumexp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key_value, output, logsumexp = ctx.saved_tensors
        shared, gradient = ctx.shared, gradient.contiguous()
        dtype = torch.promote_types(query.dtype, torch.float32)  # gradients of keys and values travel in this dtype
        of_query = torch.zeros_like(query, dtype=dtype)
        of_key_value, works, added = torch.zeros_like(key_value, dtype=dtype), [], None
        for source, (key, value) in _circulate(key_value, shared):
            sent, added = added, torch.zeros_like(key_value, dtype=dtype)  # a tensor that is being sent must not change
            rows, columns, pairs = shared.part(source, query, key, value)
            if pairs is not None:
                merged = output[:, :, rows], logsumexp[:, :, rows]
                gradients = block_backward(gradient[:, :, rows], pairs, merged)
                of_query[:, :, rows] += gradients[0]
                added[0, :, :, columns] += gradients[1]
                added[1, :, :, columns] += gradients[2]
            for work in works:
                work.wait()
            del sent
            added += of_key_value
            of_key_value, works = shared.send_to_next(added)
        for work in works:
            work.wait()
        return of_query.to(query.dtype), of_key_value.to(query.dtype), None


def _circulate(key_value: torch.Tensor, shared: Ring) -> Iterator[tuple[int, torch.Tensor]]:
    """The keys and values of each rank, this rank's first; the next ones are under way while they are used."""
    for step in range(shared.size):
        last = step == shared.size - 1
        following, works = (key_value, []) if last else shared.send_to_next(key_value)
        yield (shared.rank - step) % shared.size, key_value
        for work in works:
            work.wait()
        key_value = following
