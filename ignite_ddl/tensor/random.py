"""Random numbers of a model replica: one stream for all its ranks, and streams derived from it.

The rule, which is the same on every device:

1. Each model replica has one random stream, that of torch's default generator. ``ddl.auto_model`` gives every rank
   of a replica (its tp and pp peers) the state of the replica's first rank. From then on they stay alike if all of
   them draw alike: one ``torch.rand(1)`` on one rank alone, and replicated dropout drops other values on each.
2. *Replicated regions*, which are all modules but those of 3, draw from it: the same on all tp peers, and just what
   one process draws.
3. *Sharded regions*, which are the modules that :class:`ShardedRandom` and :class:`Sequence` name, draw from a stream
   of each tp rank: at each call in training a number n is drawn from the replica's stream, and on tp rank r the
   module draws from a stream seeded with n + r.
4. Under pp, each batch takes one number n from the replica's stream; the forward pass of microbatch m on stage s is
   a draw from a stream seeded with n + 2²⁰·s + m, to which 2 and 3 apply.
5. dp ranks keep the streams that you seeded, as in idist: seeded alike they draw alike masks for their different
   rows; for masks of their own call ``torch.manual_seed(seed + ddl.get_mesh().dp_rank)`` before ``auto_model``.

So the replica's stream is all the state there is: torch's own ``get_rng_state`` is enough to resume, and activation
checkpointing, which restores it, draws the same masks again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import ignite.distributed as idist
import torch
import torch.distributed as dist

from ignite_ddl.mesh import Mesh

__all__ = ["draw_seed", "random_stream", "share_random_stream"]


def draw_seed() -> int:
    """A number from the CPU's stream, to seed others with."""
    return int(torch.randint(2**62, ()))


@contextlib.contextmanager
def random_stream(seed: int) -> Iterator[None]:
    """Inside, torch draws from a stream of its own, on the CPU and on this rank's device; after it, as before.

    Args:
        seed: where the stream starts.
    """
    generators = [torch.default_generator]
    if idist.device().type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    before = [(generator, generator.get_state()) for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def share_random_stream(mesh: Mesh) -> None:
    """Gives tp and pp peers the random state of their replica's first rank; all ranks call it."""
    for group, first in ((mesh.tp_group, {"tp": 0}), (mesh.pp_group, {"pp": 0})):
        source = mesh.rank_at(**(mesh.coordinates(mesh.rank) | first))
        state = torch.get_rng_state().to(idist.device())
        dist.broadcast(state, src=source, group=group)
        torch.set_rng_state(state.cpu())
        if idist.device().type == "cuda":
            state = torch.cuda.get_rng_state().to(idist.device())
            dist.broadcast(state, src=source, group=group)
            torch.cuda.set_rng_state(state.cpu())
