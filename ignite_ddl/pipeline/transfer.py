"""What a pipeline sends besides torch's schedules: values between stages, results, gradients of shared weights."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn

from ignite_ddl.collectives import gathered, gathered_values, packed, value_of
from ignite_ddl.mesh import Mesh
from ignite_ddl.pipeline.cut import Cut
from ignite_ddl.structure import flatten, local_tensor
from ignite_ddl.tensor.gradients import redistribute_gradient

_NOT_HELD, _FROZEN, _NO_GRADIENT, _HAS_GRADIENT = range(4)  # of a weight that stages share, on a rank


class Transfer:
    """Messages between the pp ranks of a model replica.

    Args:
        cut: the stages.
        mesh: the mesh.
    """

    def __init__(self, cut: Cut, mesh: Mesh) -> None:
        self.cut, self.mesh = cut, mesh

    def pass_through(self, microbatches: Sequence[Any], run: Callable[[int, Any], Any]) -> list[Any]:
        """Passes microbatches through the stages in order, by ``run(stage, value)``.

        Returns:
            list: what the last stage returns for each microbatch, on its rank; empty on the others.
        """
        owners, rank, outputs, sent = self.cut.owners, self.mesh.pp_rank, [], []
        for value in microbatches:
            for s in self.cut.stages_of(rank):
                if s > 0 and owners[s - 1] != rank:
                    value = self._receive(owners[s - 1])
                value = run(s, value)
                if s + 1 == len(owners):
                    outputs.append(value)
                elif owners[s + 1] != rank:
                    sent += self._send(value, owners[s + 1], self.cut.describe(s))
        for work, _ in sent:
            work.wait()
        return outputs

    def from_last_stage(self, value: Any) -> Any:
        """Sends a value from the rank with the last stage to its pp peers."""
        return value_of(self._peer(self.cut.owners[-1]), value, self.mesh.pp_group)

    def gather(self, entries: dict[str, Any]) -> dict[str, Any]:
        """The state dict entries of all stages, in the order of the uncut model's."""
        parts = gathered_values(entries, self.mesh.pp_group)
        merged = {name: tensor for part in parts for name, tensor in part.items()}
        return {name: merged[name] for name in self.cut.shapes if name in merged}

    def sum_shared_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sums the gradients of weights that several stages share, so that the copies stay equal.

        Raises:
            ValueError: on all pp ranks, if a weight is frozen in some of these stages only.
        """
        held = [[parameters[name] for name in names if name in parameters] for names in self.cut.shared]
        states = [[_NOT_HELD, *map(_state_of, copies)] for copies in held]
        found = torch.tensor([[min(of[1:], default=_NOT_HELD), max(of)] for of in states], device=idist.device())
        of_ranks = torch.stack(gathered(found, self.mesh.pp_group)).tolist()
        for i, (names, copies) in enumerate(zip(self.cut.shared, held, strict=True)):
            known = {state for of_rank in of_ranks for state in of_rank[i]} - {_NOT_HELD}
            if _FROZEN in known and len(known) > 1:
                raise ValueError(
                    f"{', '.join(map(repr, names))} are names of one weight, which stages share, but some of these "
                    "stages have frozen it and others have not: freeze it by all its names, or none"
                )
            if _HAS_GRADIENT not in known or not copies:  # no gradient of zero, by which an optimizer would move it
                continue
            for p in copies:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                redistribute_gradient(p)
            total = sum(local_tensor(p.grad) for p in copies)
            ranks = sorted({self.cut.owners[self.cut.stage_of[name]] for name in names})
            if len(ranks) > 1:
                total = self._sum(total.contiguous(), ranks)
            for p in copies:
                local_tensor(p.grad).copy_(total)

    def _sum(self, part: torch.Tensor, ranks: list[int]) -> torch.Tensor:
        parts = {r: torch.empty_like(part) for r in ranks} | {self.mesh.pp_rank: part}
        peers = [(self._peer(r), parts[r]) for r in ranks if r != self.mesh.pp_rank]
        operations = [dist.P2POp(dist.isend, part, peer) for peer, _ in peers]
        operations += [dist.P2POp(dist.irecv, received, peer) for peer, received in peers]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return sum(parts[r] for r in ranks)  # in the same order on all ranks: equal to the last bit

    def _peer(self, pp_rank: int) -> int:
        return self.mesh.rank_at(**(self.mesh.coordinates(self.mesh.rank) | {"pp": pp_rank}))

    def _send(self, value: Any, pp_rank: int, stage: str) -> list[tuple[dist.Work, torch.Tensor]]:
        tensors, structure = flatten(value, stage)
        header = packed((structure, [(t.shape, t.dtype, t.requires_grad) for t in tensors]))
        device = idist.device()
        announced = [torch.tensor([len(header)], device=device), torch.frombuffer(bytearray(header), dtype=torch.uint8)]
        values = [t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors]
        parts = [*(part.to(device) for part in announced), *values]
        return [(dist.isend(t, self._peer(pp_rank), group=self.mesh.pp_group), t) for t in parts]

    def _receive(self, pp_rank: int) -> Any:
        def received(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=idist.device())
            dist.recv(tensor, self._peer(pp_rank), group=self.mesh.pp_group)
            return tensor

        header = received([int(received([1], torch.long))], torch.uint8)
        structure, known = pickle.loads(bytes(header.tolist()))
        return structure.unflatten(
            [received(shape, dtype).requires_grad_(needs_grad) for shape, dtype, needs_grad in known]
        )


def _state_of(parameter: nn.Parameter) -> int:
    if not parameter.requires_grad:
        return _FROZEN
    return _NO_GRADIENT if parameter.grad is None else _HAS_GRADIENT
