"""What a loss function keeps from call to call, and calls of it that leave no trace there.

A centre, a queue or a counter that each rank would compute from its own rows, and on which the loss depends, has to be
the same on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ignite_ddl.collectives import gathered_values, on_any_rank, value_of
from ignite_ddl.kept_state import LARGE, captured_rows, random_kept, reached, same_value, saved_states, states_kept
from ignite_ddl.mesh import Mesh
from ignite_ddl.parts import MODELS
from ignite_ddl.pipeline.structure import SomeRows, n_rows, tensors_of
from ignite_ddl.replicas import digest
from ignite_ddl.traceless import differ, exact_float32, weights_kept


class LossState:
    """What a loss function keeps from call to call: in its closure, globals, defaults and objects.

    Args:
        loss_fn: takes an output and targets.
        mesh: the mesh.

    Attributes:
        owners: what keeps something, but for models, whose state has its own checks.
        variables: their states at the begin of the step.
        pair: output and targets of the first call in this step; None before it.
        digest: a number of the state in the end, if the step has changed it and the loss depends on it; else 0.
        kept_digest: a number of what the step has read and not changed; 0 where it is not compared.
        needs_graph: whether the loss function calls ``torch.autograd.grad``, which fails without a graph.
    """

    def __init__(self, loss_fn: Callable, mesh: Mesh) -> None:
        self.loss_fn, self.mesh = loss_fn, mesh
        self.needs_graph = False
        self.n_unlike, self.has_warned = 0, False  # how often what was kept has differed between ranks
        self._reached: list[Any] | None = None
        self.begin(False)

    def begin(self, is_checking: bool) -> None:
        """Begins a step."""
        self._reached, self.owners = None, []
        if is_checking:
            models = {id(module) for model in MODELS for module in model.modules()}
            self._reached = reached(self.loss_fn)
            self.owners = [one for one in self._reached if id(one) not in models]
        self.variables, self.of_batch = saved_states(self.owners), []  # of_batch: names of features of this batch
        self.pair: tuple[Any, Any] | None = None
        self.digest = self.kept_digest = 0.0

    def call(
        self, output: Any, y: Any, rows: SomeRows | None = None, run: Callable[[Any], Any] = lambda same: same
    ) -> torch.Tensor:
        """The loss, by a call that leaves no trace in what the loss function keeps.

        Args:
            output: of the model.
            y: the targets.
            rows: those which tensors that it captures should have. Default: all.
            run: makes the output of it. Default: nothing has to be done.
        """
        owners = self.owners_and_models()
        kept = weights_kept(one for one in owners if isinstance(one, nn.Module))
        with kept, states_kept(owners), captured_rows(owners, rows):
            loss = self.loss_fn(run(output), y)
            return loss.detach() if isinstance(loss, torch.Tensor) else loss

    def owners_and_models(self) -> list[Any]:
        """What may keep a state from call to call, models included."""
        return reached(self.loss_fn) if self._reached is None else self._reached

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """For calls of the loss function that leave no trace, together with :meth:`call`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(exact_float32())  # it may run a model of its own, such as a teacher
            stack.enter_context(torch.set_grad_enabled(self.needs_graph))
            stack.enter_context(random_kept(self.owners_and_models()))
            for model in MODELS if self.needs_graph else ():
                if isinstance(model, DistributedDataParallel):  # which expects a backward pass after a forward one
                    stack.enter_context(model.no_sync())
            yield

    def compare(self) -> None:
        """Looks whether this step's calls have changed a state on which the loss depends: ranks have to hold the same.

        Raises:
            ValueError: if so under pp, where there is a call for each microbatch.
        """
        if self.pair is None or not any(state.changed() for state in self.variables):
            return
        self.of_batch = self._of_batch()
        pairs = list(zip(self.variables, self.of_batch, strict=True))
        names = [name for state, of_batch in pairs for name in state.changed() if name not in of_batch]
        if not names or not self._differ(lambda: [state.restore(but=of_batch) for state, of_batch in pairs]):
            return  # such as the last loss, kept to be looked at
        if self.mesh.pp_size > 1:
            raise ValueError(
                f"loss_fn changes {', '.join(names)}, on which its result depends, but under pp it runs once for each "
                "microbatch and not once for a batch: change it in a handler, once for each iteration; if forward "
                "stores it, let forward return it, with a number for each row; or use dp and tp only"
            )
        held = [tree_map_only(torch.Tensor, digest, plain) for plain in self._changed()]
        self.digest = float(zlib.crc32(repr(held).encode()) % 2**20)

    def take_kept(self) -> None:
        """Notes a number of what this step's calls have read and not changed, for comparison over dp."""
        if self.pair is None or self.has_warned or self.mesh.dp_size == 1 or self.mesh.pp_size * self.mesh.cp_size > 1:
            return
        held = [tree_map_only(torch.Tensor, digest, kept) for kept in self._kept()]
        self.kept_digest = float(zlib.crc32(repr(held).encode()) % 2**20)

    def depends_on_unlike_states(self) -> bool:
        """Whether a rank's loss would be another with what dp rank 0 keeps; all of them call it."""
        group = self.mesh.dp_cp_group
        of_rank_0 = value_of(dist.get_global_rank(group, 0), self._changed(), group)

        def put() -> None:
            for state, values in zip(self.variables, of_rank_0, strict=True):
                state.held.update(values)

        return on_any_rank(self.pair is not None and self._differ(put), group)

    def warn_of_unlike_values(self) -> None:
        """Warns once of what the loss reads, and a script has computed on each dp rank; all of them call it.

        Called where something differs, it looks the first, second, fourth, … time: an entry of a bank is read an epoch
        after it was written.
        """
        self.n_unlike += 1
        if self.has_warned or self.n_unlike & (self.n_unlike - 1):
            return
        group, kept = self.mesh.dp_cp_group, self._kept()
        of_rank_0 = value_of(dist.get_global_rank(group, 0), kept, group)
        names = [name for of_rank in gathered_values(self._unlike(kept, of_rank_0), group) for name in of_rank]
        self.has_warned = bool(names)
        if names and dist.get_rank() == 0:
            warnings.warn(
                f"what loss_fn reads differs between dp ranks, and its result depends on it: {names[0]}. If a script "
                "computes it from its rank's rows (a queue of keys, a bank of features, counts of classes), gather "
                "these over ranks before (torch.distributed.all_gather), since one process has all rows; if it belongs "
                "to the rows of this batch, pass it with the targets, as y=(y, it)",
                stacklevel=2,
            )

    def _unlike(self, kept: list[dict[str, Any]], of_rank_0: list[dict[str, Any]]) -> list[str]:
        """The names of what differs from dp rank 0's, if with that this rank's loss would be another."""
        differing = [
            (state, name, theirs[name])
            for state, own, theirs in zip(self.variables, kept, of_rank_0, strict=False)
            for name in own
            if name in theirs and not _same(own[name], theirs[name])
        ]
        with _RefusesCollectives():  # peers may not call it
            return [
                name
                for state, name, value in differing[:_MOST_NAMES]
                if self._differ(lambda state=state, name=name, value=value: state.held.update({name: value}))
            ]

    def _kept(self) -> list[dict[str, Any]]:
        """The numbers and small tensors that this step's calls have not changed; not those with this batch's rows."""
        if self.pair is None:
            return [{} for _ in self.variables]
        n = n_rows(self.pair[1]) if tensors_of(self.pair[1]) else n_rows(self.pair[0])

        def is_kept(value: Any) -> bool:
            leaves = tree_leaves(value)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            plain = all(type(t) is torch.Tensor and t.layout is torch.strided and not t.requires_grad for t in tensors)
            of_batch = any(t.ndim and len(t) == n for t in tensors)
            numbers = all(isinstance(leaf, bool | int | float | complex | torch.Tensor) for leaf in leaves)
            return numbers and plain and not of_batch and len(leaves) + sum(t.numel() for t in tensors) <= LARGE

        states = [(state.state(), set(state.changed())) for state in self.variables]
        return [{k: v for k, v in held.items() if k not in changed and is_kept(v)} for held, changed in states]

    def _of_batch(self) -> list[set[str]]:
        """For each state the names of what forward, and not the loss, has put there of this batch: features of rows."""
        output, y = self.pair
        n = n_rows(y) if tensors_of(y) else n_rows(output)

        def is_of_batch(leaf: Any) -> bool:
            return isinstance(leaf, torch.Tensor) and (leaf.grad_fn is not None or leaf.ndim > 0 and len(leaf) == n)

        def of_rows(state: Any) -> set[str]:
            leaves = {name: tree_leaves(state.held[name]) for name in state.changed() if name in state.held}
            return {name for name, of_name in leaves.items() if of_name and all(map(is_of_batch, of_name))}

        found = [of_rows(state) for state in self.variables]
        models = [one for one in self.owners_and_models() if isinstance(one, nn.Module)]
        try:  # also where nothing was found: the loss may sum over ranks, of which one has a single row
            with torch.no_grad(), weights_kept(models), states_kept(self.owners) as kept, self.trying():
                self.loss_fn(*self.pair)
                by_loss = [set(state.changed()) for state in kept]
        except Exception:
            return [set() for _ in found]
        return [names - changed for names, changed in zip(found, by_loss, strict=True)]

    def _changed(self) -> list[dict[str, Any]]:
        """The numbers and tensors that this step has changed, of all that is kept from call to call."""
        pairs = zip(self.variables, self.of_batch or [()] * len(self.variables), strict=True)
        changed = [
            {k: state.held[k] for k in state.changed() if k in state.held and k not in of} for state, of in pairs
        ]
        return [{k: v for k, v in of.items() if all(map(_is_plain, tree_leaves(v)))} for of in changed]

    def _differ(self, put: Callable[[], Any]) -> bool:
        """Whether the loss of this step's first rows would be another with what is kept as ``put`` puts it."""

        def loss_with(put: Callable[[], Any]) -> torch.Tensor:
            with states_kept(self.owners), self.trying():
                put()
                return torch.as_tensor(self.call(*self.pair))

        try:
            with torch.no_grad():
                first, again, other = loss_with(lambda: None), loss_with(lambda: None), loss_with(put)
                if not torch.equal(first, again):  # a GPU adds up by atomic operations (classes of pixels, CTC)
                    return differ(first, other)
                return differ(first.double(), other.double())
        except Exception:
            return False


_MOST_NAMES = 16  # that are tried


class _RefusesCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("a collective that other ranks do not call")
        return func(*args, **(kwargs or {}))


def _same(own: Any, other: Any) -> bool:
    pairs = itertools.zip_longest(tree_leaves(own), tree_leaves(other))
    return all(type(a) is type(b) and same_value(a, b) for a, b in pairs)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex | str | torch.Tensor)
