"""What a loss function keeps from call to call, and calls of it that leave no trace there.

A centre, a queue or a counter that each rank would compute from its own rows, and on which the loss depends, has to be
the same on all ranks.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ignite_ddl.checks.kept_state import (
    captured_rows,
    cloned,
    leaves_of,
    random_kept,
    reached,
    saved_states,
    states_kept,
)
from ignite_ddl.checks.replicas import digest
from ignite_ddl.checks.traceless import differ, evaluating, exact_float32, weights_kept
from ignite_ddl.checks.trying import may_fail
from ignite_ddl.collectives import on_any_rank, value_of
from ignite_ddl.data_parallel import buffers_apart
from ignite_ddl.mesh import Mesh
from ignite_ddl.parts import MODELS
from ignite_ddl.structure import SomeRows, n_rows, tensors_of


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
        changes_arguments: whether the loss function changes output or targets in place; None if this is not known.
        needs_graph: whether the loss function calls ``torch.autograd.grad``, which fails without a graph.
    """

    def __init__(self, loss_fn: Callable, mesh: Mesh) -> None:
        self.loss_fn, self.mesh = loss_fn, mesh
        self.needs_graph = False
        self.changes_arguments: bool | None = None
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
        self.digest = 0.0

    def call(
        self, output: Any, y: Any, rows: SomeRows | None = None, run: Callable[[Any], Any] | None = None
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
            output = output if run is None else run(output)
            if self.changes_arguments is not False:  # of which the step has views
                output, y = cloned((output, y), all_of_them=True)
            loss = self.loss_fn(output, y)
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
            owners = self.owners_and_models()
            modules = [one for one in owners if isinstance(one, nn.Module)]
            stack.enter_context(random_kept(owners))
            stack.enter_context(evaluating(modules, all_of_them=False))  # BatchNorm and dropout have rules of their own
            stack.enter_context(buffers_apart(modules))
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
                "stores it, let forward return it, with a number for each row; or use tp only"
            )
        held = [tree_map_only(torch.Tensor, digest, plain) for plain in self._changed()]
        self.digest = float(zlib.crc32(repr(held).encode()) % 2**20)

    def depends_on_unlike_states(self) -> bool:
        """Whether a rank's loss would be another with what dp rank 0 keeps; all of them call it."""
        group = self.mesh.dp_cp_group
        of_rank_0 = value_of(dist.get_global_rank(group, 0), self._changed(), group)

        def put() -> None:
            for state, values in zip(self.variables, of_rank_0, strict=True):
                state.held.update(values)

        return on_any_rank(self.pair is not None and self._differ(put), group)

    def _of_batch(self) -> list[set[str]]:
        """For each state the names of what forward, and not the loss, has put there of this batch: features of rows."""
        output, y = self.pair
        n = n_rows(y) if tensors_of(y) else n_rows(output)

        def is_of_batch(leaf: Any) -> bool:
            return isinstance(leaf, torch.Tensor) and (leaf.grad_fn is not None or leaf.ndim > 0 and len(leaf) == n)

        def of_rows(state: Any) -> set[str]:
            leaves = {name: leaves_of(state.held[name]) for name in state.changed() if name in state.held}
            return {name for name, of_name in leaves.items() if of_name and all(map(is_of_batch, of_name))}

        found = [of_rows(state) for state in self.variables]
        models = [one for one in self.owners_and_models() if isinstance(one, nn.Module)]
        # Also where nothing was found: the loss may sum over ranks, of which one has a single row.
        with may_fail("losses that depend on what a rank keeps"), torch.no_grad(), weights_kept(models):
            with states_kept(self.owners) as kept, self.trying():
                self.loss_fn(*cloned(self.pair, all_of_them=True))
                by_loss = [set(state.changed()) for state in kept]
            return [names - changed for names, changed in zip(found, by_loss, strict=True)]
        return [set() for _ in found]

    def _changed(self) -> list[dict[str, Any]]:
        """The numbers and tensors that this step has changed, of all that is kept from call to call."""
        pairs = zip(self.variables, self.of_batch or [()] * len(self.variables), strict=True)
        changed = [
            {k: state.held[k] for k in state.changed() if k in state.held and k not in of} for state, of in pairs
        ]
        return [{k: v for k, v in of.items() if all(map(_is_plain, leaves_of(v)))} for of in changed]

    def _differ(self, put: Callable[[], Any]) -> bool:
        """Whether the loss of this step's first rows would be another with what is kept as ``put`` puts it."""

        def loss_with(put: Callable[[], Any]) -> torch.Tensor:
            with states_kept(self.owners), self.trying():
                put()
                return torch.as_tensor(self.call(*self.pair))

        with may_fail("losses that depend on what a rank keeps"), torch.no_grad():
            first, again, other = loss_with(lambda: None), loss_with(lambda: None), loss_with(put)
            if not torch.equal(first, again):  # a GPU adds up by atomic operations (classes of pixels, CTC)
                return differ(first, other)
            return differ(first.double(), other.double())
        return False


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex | str | torch.Tensor)
