"""Random numbers of a model replica: one stream shared by its ranks, and streams derived from it.

The rule, which is the same on every device:

1. Each model replica has one random stream, that of torch's default generator. ``ddl.auto_model`` gives every rank
   of a replica (tp and pp peers) the state of the replica's first rank. The ranks keep the same state as long as
   they all draw the same numbers: after a ``torch.rand(1)`` on a single rank, replicated dropout differs. Python's
   and NumPy's streams, by which some models leave out layers, are shared in the same way, by cp peers, too.
2. *Replicated regions*, which are all modules except those of 3, draw from it: the same numbers on all tp peers, and
   those of one process.
3. *Sharded regions*, which are the modules that the plan names as :class:`ShardedRandom` or :class:`Sequence`, draw
   from a stream for each tp rank: at each call in training, a number n is drawn from the replica's stream,
   and the module draws from a stream seeded with n + r on tp rank r.
4. Under pp, a number n is drawn from the replica's stream for each batch; the forward pass of microbatch m on stage s
   draws from a stream seeded with n + 2²⁰·s + m, to which 2 and 3 apply.
5. dp ranks keep the user's seeds, as in idist. With equal seeds they draw the same masks for their different rows;
   for different masks, call ``torch.manual_seed(seed + ddl.get_mesh().dp_rank)`` before ``auto_model``.
6. cp ranks hold other tokens of the same rows, so no two of them draw the same masks, whatever the seeds: each is a
   replica in the sense of 1, and on cp rank r > 0 ``auto_model`` draws a number n from the stream and seeds the stream
   with n + r. cp rank 0 goes on with the stream as it is.

The replica's stream is the only state: torch's ``get_rng_state`` is enough to resume, and activation checkpointing,
which restores it, draws the same masks again.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist

from ignite_ddl.mesh import Mesh


def draw_seed() -> int:
    """A number from the CPU's stream, to seed another stream."""
    return int(torch.randint(2**62, ()))


@contextlib.contextmanager
def random_stream(seed: int) -> Iterator[None]:
    """Inside, torch draws from a separate stream, on the CPU and on this rank's device.

    Args:
        seed: the seed of the stream.
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
    """Gives tp and pp peers the random state of their replica's first rank, and cp peers others; all ranks call it."""
    for group, first in ((mesh.tp_group, {"tp": 0}), (mesh.pp_group, {"pp": 0})):
        source = mesh.rank_at(**(mesh.coordinates(mesh.rank) | first))
        state = torch.get_rng_state().to(idist.device())
        dist.broadcast(state, src=source, group=group)
        torch.set_rng_state(state.cpu())
        if idist.device().type == "cuda":
            state = torch.cuda.get_rng_state().to(idist.device())
            dist.broadcast(state, src=source, group=group)
            torch.cuda.set_rng_state(state.cpu())
    for group, first in ((mesh.tp_group, {"tp": 0}), (mesh.pp_group, {"pp": 0}), (mesh.cp_group, {"cp": 0})):
        if group is not None and dist.get_world_size(group) > 1:
            states = [{k: v for k, v in random_states().items() if k in ("python", "numpy")}]
            source = mesh.rank_at(**(mesh.coordinates(mesh.rank) | first))
            dist.broadcast_object_list(states, src=source, group=group)
            set_random_states({"torch": torch.get_rng_state()} | states[0])
    if mesh.cp_rank > 0:  # not on rank 0, whose seed decides the order of rows
        torch.manual_seed(draw_seed() + mesh.cp_rank)


def state_of(generator: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """The state of a generator of torch, Python or NumPy, and a function that sets it; None of anything else."""
    if isinstance(generator, torch.Generator):
        return generator.get_state(), generator.set_state
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return generator.getstate(), generator.setstate
    if str(type(generator).__module__).startswith("numpy.random."):
        bits = getattr(generator, "_bit_generator", getattr(generator, "bit_generator", generator))
        return (bits.state, partial(setattr, bits, "state")) if hasattr(bits, "random_raw") else None
    return None


def random_states() -> dict[str, Any]:
    """The states of all random number generators of this process: torch's on the CPU and the GPU, Python's, NumPy's."""
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    version, words, gauss = random.getstate()
    states["python"] = [version, torch.tensor(words, dtype=torch.int64), gauss]
    if "numpy" in sys.modules:
        kind, words, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [kind, torch.from_numpy(words.astype("int64")), *rest]
    return states


def has_drawn(before: Mapping[str, Any]) -> bool:
    """Whether random numbers have been drawn since :func:`random_states` returned this."""
    states = (before, random_states())
    leaves = ([x for state in of.values() for x in (state if isinstance(state, list) else [state])] for of in states)
    pairs = zip(*leaves, strict=False)  # NumPy may have come since
    return any(not torch.equal(a, b) if isinstance(a, torch.Tensor) else a != b for a, b in pairs)


def set_random_states(states: Mapping[str, Any]) -> None:
    """Sets what :func:`random_states` returned."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "numpy" in states and "numpy" in sys.modules:
        kind, words, *rest = states["numpy"]
        sys.modules["numpy"].random.set_state((kind, words.numpy().astype("uint32"), *rest))
