"""Whether a loss keeps to its divisor (divisor.py): that of all rows is the mean of those of parts of them.

Losses are compared in each of the first 16 steps, every 17th and the last one of a run, in each step until a comparison
was conclusive, and where targets are smaller or larger than those before; in steps 1, 2, 4, 8, … and the last one where
that takes forward passes. The first mask or padding may come later, and a loss may change.

Declared and checked losses are compared alike: by :meth:`LossContract.compare` with the outputs of the step; if the
loss uses more than their rows, by :meth:`LossContract.compare_by_passes` with outputs of further forward passes.

This holds for each loss function and each model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import ignite.distributed as idist
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ignite_ddl.arguments import first_line
from ignite_ddl.checks.kept_state import captured, cloned, reached, states_kept, streams_kept, versions
from ignite_ddl.checks.loss_graph import dependencies, parameter_ids
from ignite_ddl.checks.loss_state import LossState
from ignite_ddl.checks.rows_alone import several_rows
from ignite_ddl.checks.traceless import WatchForSums, address_of, evaluating, without_trace
from ignite_ddl.checks.trying import may_fail
from ignite_ddl.checks.unlike_results import CURE, unlike_results
from ignite_ddl.collectives import gathered_values, on_any_rank
from ignite_ddl.compat import BELONGS_TO_A_MODEL, gathers, unsharded_parameters
from ignite_ddl.context.sequence import two_halves
from ignite_ddl.divisor import IGNORED, Divisor, divisor_of
from ignite_ddl.mesh import Mesh
from ignite_ddl.parts import MODELS
from ignite_ddl.structure import (
    SomeRows,
    concatenated,
    detached,
    have_rows,
    map_leaves,
    may_be_a_sample,
    n_rows,
    n_samples,
    pickled,
    some_rows,
    tensors_of,
    unpickled,
)
from ignite_ddl.tensor.random import has_drawn, random_states

_CONTRACTS_KEPT = 64  # of a model
_FIRST, _EACH = 16, 17  # steps that are all checked, then each one of these: a prime, to meet each batch of an epoch
BY_PASSES = 2.0**20  # in place of 1 for an inconclusive comparison, if it needs forward passes; more than all ranks
_FEW, _MOST_SENT = 4, 2**16  # rows whose targets dp ranks give each other, and the most numbers in them
ASKS_PEERS = 2.0**40  # added to that where targets of other ranks are to be compared, too
ROUNDINGS = 16  # of 16 bits, by which the loss of a model's rows may differ from that of parts of them
_FEW_NUMBERS = 2**20  # in output and targets, of which there is a copy before it is known that the loss changes none
_MAX_INCONCLUSIVE = 16  # inconclusive checks, after which there is a warning
_DECLARE = (
    'pass loss_divisor="rows" for a mean over rows, "sum" for a sum, or a function from targets to the divisor of the '
    "loss, such as lambda y: (y != 0).sum()"
)
_ROWS_MEET = (
    "A loss in which rows meet (negatives of the batch, statistics over rows, a balance of experts) needs those of all "
    'ranks: gather them in the loss by ddl.gather_rows, with loss_divisor="local"; use a mesh of tp alone, and for '
    'experts balance_weight of ddl.Router; or pass loss_divisor="local" for the mean of what each rank and microbatch '
    "computes from its own rows, which is not the number of one process"
)

_EACH_TERM = (
    "If terms divide by different numbers, call ddl.forward_backward for each term, with its loss_divisor, all but the "
    "last with last=False"
)
_NO_LOSS = (
    "Parts have no loss: where nothing counts in them, let loss_divisor give 0 (not max(1, count)), and if one of "
    f"several terms ignores all their targets: {_EACH_TERM[0].lower()}{_EACH_TERM[1:]}"
)
_CAPTURES = (
    "It captures tensors with as many rows as a batch: pass them with the targets, as y=(y, x), so that it gets the "
    "rows of them that belong to the output's rows"
)
_SHARED = "a tensor of the output that all rows share"
_GRADIENT = "a gradient by a tensor that is not one of its arguments"
_BY_WEIGHTS = (
    "loss_fn takes gradients by weights (torch.autograd.grad), which are those of a rank's rows and not of the batch: "
    "take them between two steps and average them over ranks, or use a mesh of tp alone"
)


def _has_rows(leaf: Any, n: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == n


class LossContract:
    """One loss function of one model, and what is known of it.

    Args:
        loss_fn: takes an output and targets.
        divisor: its :class:`Divisor`.
        mesh: the mesh.
        model: the model. DDP reduces gradients of its weights also where the loss function uses them; FSDP2, tp and pp
            only where the model does.

    Attributes:
        density: the divisor per row of the first batch, the same on all ranks; None before that.
        others: other models of ``ddl.auto_model`` on whose weights the loss depends.
        is_checking: whether this step checks the loss.
        is_confirmed: whether the divisor is certain, or a check was conclusive.
        uses_more: what else than rows of the output the loss depends on, in words; "" if on nothing.
    """

    def __init__(self, loss_fn: Callable, divisor: Divisor, mesh: Mesh, model: nn.Module) -> None:
        self.loss_fn, self.divisor, self.mesh, self.model = loss_fn, divisor, mesh, model
        self.density: float | None = None
        self.others: list[nn.Module] = []
        self.n_steps = self.n_inconclusive = 0
        self.padded = False  # whether targets of a step were padding
        self.may_pad = False  # whether those of this one may be
        self.is_checking = False
        self.is_split = mesh.dp_cp_size * mesh.pp_size > 1  # whether ranks or microbatches have parts of a batch
        self.accumulates = False
        self.is_confirmed = divisor.certain
        self.is_compared = divisor.declared or not divisor.certain
        self.uses_more = ""  # what else than rows of the output the loss depends on
        self.has_whole_rows = mesh.pp_size * mesh.cp_size == 1  # whether a rank sees its rows as a whole
        self.by_passes = model is not None and self.is_split and self.has_whole_rows  # if uses_more: can be compared
        self.addresses: set[int] = set()  # where tensors of the batch are
        self.is_local = divisor.is_local
        self.communicates = False  # whether it sums or gathers over ranks by itself
        self.calls_sharded = False  # whether it reaches a model whose weights are gathered
        self.seen: dict[Any, tuple[float, float]] = {}  # the least and the largest targets, by dtype, dims and NaN
        self.n_rows: int | None = None  # of this rank's batch, as its loader counts them
        self.is_uneven = False  # whether dp ranks may have unlike numbers of them
        self.counted, self.is_clamped = 0.0, False  # what counts on this rank; whether nothing does by max(1, count)
        self.least, self.most = math.inf, 0.0  # the divisors that a declared function has given for parts
        self.state = LossState(loss_fn, mesh)
        self.refusal = ""  # of this step's comparison, if forward passes have to confirm it
        self.pairs: list[tuple[Any, Any]] = []  # detached outputs and targets of this step, by microbatch
        self.given: Any = None  # output and targets of a call, with containers of their own
        self.copies: tuple[Any, Any] | None = None  # the same, if the call may change them in place
        self.earlier_pairs: list[tuple[Any, Any]] = []  # of earlier steps, until there are two rows
        self.has_warned = False  # of what differs between dp ranks
        self.asks_peers = False  # whether dp ranks compare it with targets of each other in this step

    def begin(self, x: Any, y: Any, accumulates: bool = False, last: bool = False) -> None:
        """Starts a step; one with targets of -100, which torch's losses ignore by default, is always checked.

        Args:
            x: this rank's rows.
            y: their targets.
            accumulates: whether gradients of several steps are those of one large batch. Default: False.
            last: whether this is the last step of a run. Default: False.
        """
        self.n_steps += 1
        self.accumulates = accumulates
        self.may_pad = self.mesh.world_size > 1 and self.divisor.may_pad(y)  # before a GPU has work to wait for
        has_parts, asks = self.is_split or accumulates, last or self.n_steps & (self.n_steps - 1) == 0
        is_new = asks
        if self.n_steps == 1:  # ranks call such a model equally often
            held = [one for one in reached(self.loss_fn) if isinstance(one, nn.Module)]
            self.calls_sharded = any(gathers(module) for one in held for module in one.modules())
        if has_parts and not (self.divisor.certain or self.communicates or self.calls_sharded):
            for new, is_class in self._values(x, y):  # each of them has to be seen
                is_new, asks = is_new or new, asks or new and is_class
        self.is_checking = has_parts and (is_new or self._has_to_be_checked())
        self.pairs, self.refusal = [], ""
        if self.is_checking:
            self.addresses = {address for tensor in tensors_of((x, y)) if (address := address_of(tensor))}
        self.state.begin(self.is_checking)
        has_state = bool(self.state.owners) and not self.is_local
        self.asks_peers = self.is_checking and asks and (self.is_compared or has_state) and self.mesh.dp_size > 1

    def _has_to_be_checked(self) -> bool:
        if self.is_compared and not self.uses_more and (self.n_steps <= _FIRST or self.n_steps % _EACH == 0):
            return True
        return not self.is_confirmed and self.n_inconclusive < _MAX_INCONCLUSIVE

    def _values(self, x: Any, y: Any) -> list[tuple[bool, bool]]:
        """Of each tensor of targets, whether it has -100 or a value below or above those of earlier steps, as of a mask
        that comes late; and whether this is a class, which other ranks may not have.
        """
        found, needs_passes = [], bool(self.uses_more)
        in_x = [t for t in tensors_of(x) if needs_passes and not t.is_floating_point()]  # such as labels in x
        for tensor in [*tensors_of(y), *in_x]:
            if not tensor.numel() or tensor.is_complex() or tensor.is_nested or tensor.layout is not torch.strided:
                continue
            low, high, has_nan = _range_of(tensor.detach())
            key = tensor.dtype, tensor.ndim, has_nan
            least, most = self.seen.get(key, (math.inf, -math.inf))
            self.seen[key] = min(least, low), max(most, high)
            is_class, is_new = not tensor.is_floating_point(), not (least <= low and high <= most)
            ignores = low <= IGNORED and bool((tensor == IGNORED).any())
            found.append((ignores or is_new and (is_class or not needs_passes), is_class and is_new))
        return found

    def count(self, y: Any, divisor: float | None) -> float:
        """What counts of these targets, of which ranks add up: their divisor, or nothing where ``max(1, count)`` is 1.

        It is what a declared function gives more for the same targets twice, asked where it gives the least, or 1.

        Raises:
            ValueError: if it gives neither as much nor twice as much, or if it is not known which of both.
        """
        self.is_clamped, divisor = False, divisor or 0.0
        alone = self.mesh.dp_cp_size == 1  # microbatches are weighted by the divisor of the batch
        if not divisor or alone and divisor != 1 or not (self.divisor.declared and callable(self.divisor.kind)):
            return divisor
        is_least = divisor <= self.least and divisor < self.most
        self.least, self.most = min(self.least, divisor), max(self.most, divisor)
        n = n_rows(y)
        has_rows = all(_has_rows(leaf, n) for leaf in tree_leaves(y))
        if divisor != 1 and not ((is_least or self.is_checking) and has_rows):
            return divisor
        found = self._of_twice(y)
        self.is_clamped = divisor == 1 and max(found, default=0) == 1
        adds_up = any(value >= 2 if divisor == 1 else math.isclose(value, 2 * divisor, rel_tol=1e-6) for value in found)
        if found and not (self.is_clamped or adds_up or alone):
            raise ValueError(
                f"loss_divisor should add up over parts of a batch, but gives {divisor:g} for some targets and "
                f"{found[0]:g} for twice these (a clamp, a mean, an epsilon?): let it count, and loss_fn divide by "
                "that, or let loss_fn return a "
                'sum divided by a constant, with loss_divisor="sum"'
            )
        if divisor == 1 and not (found or alone):
            raise ValueError(
                f"loss_divisor gives 1 for targets of type {type(y).__name__}, of which it cannot be seen whether one "
                "counts, or none (max(1, count)?): give targets as tensors, numbers and strings in lists, tuples and "
                "dicts"
            )
        return 0.0 if self.is_clamped else divisor

    def _of_twice(self, y: Any) -> list[float]:
        """The divisor of the same targets twice, by whatever way they may be joined."""
        found = []
        for kinds in ((), (list,), (list, tuple)):
            with may_fail("divisors that count unlike for more targets"):
                found.append(self.divisor.of(_twice(y, kinds)))
        return found

    def check_rows(self, rows: tuple[int, int | None] | None) -> None:
        """Raises a ValueError, on all ranks, if a "local" loss meets over ranks that have unlike numbers of rows."""
        n_ranks = self.mesh.dp_size
        if self.is_local and self.communicates and rows is not None and (rows[1] or 0) % n_ranks:
            raise ValueError(
                'loss_divisor="local" should come with as many rows on each rank where loss_fn sums or gathers over '
                f"ranks, but {n_ranks} dp ranks share {rows[1]} rows: pass drop_last=True to ddl.auto_dataloader, and "
                f"a batch_size that {n_ranks} divides"
            )

    def check_total(self, total: float) -> None:
        """Raises a ValueError if what counts on all ranks may be less than the divisor that one of them has given."""
        if self.is_clamped and total != round(total):
            raise ValueError(
                f"loss_divisor gives 1 at least, but what counts adds up to {total:g} over ranks, which is no whole "
                "number, so a rank's part of it is not known: let it give what counts, without a clamp"
            )

    def before_call(self, output: Any, y: Any) -> None:
        """Keeps what a call of ``loss_fn`` gets, which may take entries out of it, or change tensors in place."""
        self.given = map_leaves(lambda leaf: leaf, (output, y))
        self.versions, changes = versions(self.given), self.state.changes_arguments
        is_small = sum(tensor.numel() for tensor in tensors_of(self.given)) <= _FEW_NUMBERS
        self.copies = detached(cloned(self.given, True)) if changes or changes is None and is_small else None

    def inspect(self, loss: torch.Tensor, since: int) -> None:
        """After a call, inspects the graph of a loss, and keeps what :meth:`compare` needs; in steps that check.

        Args:
            loss: what ``loss_fn`` returned.
            since: the number of the newest node of autograd before it was called.

        Raises:
            ValueError: if the loss depends on weights whose gradients would be wrong, or, if its divisor was not
                declared and the model cannot run with parts of the rows here, on anything else than rows of the output.
        """
        output, y = self.given
        changes = self.versions != versions(self.given)
        pair = self.copies or (None if changes else detached(self.given))  # the next step that checks has copies
        self.given = self.copies = None
        self.state.changes_arguments = changes or bool(self.state.changes_arguments)
        if not self.pairs:
            outputs, weights, uses_older = dependencies(loss, output, since)
            if self.is_split:
                self._check_weights(weights)
            n = self._n_samples(output, y)
            of_rows = [tensor.ndim > 0 and len(tensor) == n for tensor in outputs]
            numbers = any(tensor.numel() == 1 and (n > 1 or not tensor.ndim) for tensor in outputs)
            no_rows = bool(outputs) and (numbers or not any(of_rows))
            kept = "something that the model has kept besides its output" if uses_older else ""
            weight = "a weight that the model returns" if any(isinstance(t, nn.Parameter) for t in outputs) else ""
            self.uses_more = weight or ("a number without rows" if no_rows else kept)
            if not self.divisor.certain and self.uses_more and self.is_split and not self.by_passes:
                raise ValueError(self._cannot_be_checked("" if self.has_whole_rows else " (on a mesh with pp or cp)"))
        if pair is not None and (self.is_compared or self.state.owners):
            self.pairs.append(pair)
            self.state.pair = self.pairs[0]

    def _n_samples(self, output: Any, y: Any) -> int:
        """The number of rows of targets, which under pp are those of a microbatch."""
        return n_samples(output, y, self.n_rows if self.mesh.pp_size == 1 else None)

    def find_others(self, weights: list[nn.Parameter]) -> None:
        """Finds the models to which weights belong that the loss depends on."""
        if used := set(map(id, weights)):  # of no rows, a loss has none
            self.others = [m for m in MODELS if m is not self.model and not used.isdisjoint(parameter_ids(m))]

    def _check_weights(self, weights: list[nn.Parameter]) -> None:
        if not weights:
            return
        used = set(map(id, weights))
        if not used.isdisjoint(parameter_ids(self.model)) and not isinstance(self.model, DistributedDataParallel):
            raise ValueError(
                "loss_fn uses weights besides the model's output (a regulariser?), whose gradients are not summed over "
                "ranks: use weight_decay, or let forward (under pp each layer) compute the term and return it beside "
                "the output, with a number for each row, term.expand(len(x)), of p.full_tensor() where a weight p is a "
                "DTensor; for a second call of the model (a critic's), give it both inputs in one call, such as "
                "torch.stack([real, fake], 1), or use dp alone without shard, or tp alone"
            )
        self.find_others(weights)
        known = {id(p) for model in MODELS for p in unsharded_parameters(model)}
        unknown = [w for w in weights if not getattr(w, BELONGS_TO_A_MODEL, False) and id(w) not in known]
        if unknown and not isinstance(self.loss_fn, DistributedDataParallel):
            raise ValueError(
                f"loss_fn has weights of its own, such as one of shape {tuple(unknown[0].shape)}, whose gradients are "
                "not averaged over ranks: make them a part of the model, whose forward returns them with a row for "
                "each of the batch (weight.expand(len(x), *weight.shape).clone()), or, without pp, pass loss_fn to "
                "ddl.auto_model"
            )

    def compare(self) -> float:
        """Compares the loss of this step's rows with those of parts of them.

        The one rule: *the loss of a rank's rows is the sum of those of two or three parts of them, each times its
        divisor over that of all rows*. The rows of a part are those of the output and the targets, and of tensors with
        as many rows that ``loss_fn`` captures; where it uses more than these (what the model keeps, a gradient by its
        input), the model runs with a part's rows instead, see :meth:`compare_by_passes`. It is conclusive if parts have
        different values. What fails with a part has to be declared; of a declared loss, nothing is concluded from that,
        nor if it draws random numbers, sums over ranks by itself, or does not count a part.

        ``loss_fn`` is called four times, on every rank that computes losses; the user's random stream does not change.

        Returns:
            float: 0 if it is conclusive, 1 if not, ``BY_PASSES`` if the model has to run; ranks add it up.

        Raises:
            ValueError: if the values do not add up, or, of a loss that is not declared, cannot be compared.
        """
        self.state.compare()
        if not self.is_compared:
            return 0.0
        if self.mesh.cp_size > 1:
            for output, y in self.pairs:
                self._compare_tokens(output, y)
        has_parts = self.mesh.dp_size * self.mesh.pp_size > 1 or self.accumulates
        if self.uses_more or self.divisor.certain and not has_parts:
            return BY_PASSES if self.uses_more and self.by_passes else 1.0
        declared, shapes = self.divisor.certain, _shapes_of_rows(self.pairs)
        pairs = [*(one for one in self.earlier_pairs if _shapes_of_rows([one]) == shapes), *self.pairs]
        sizes = [self._n_samples(*pair) for pair in pairs]
        n, have = sum(sizes), [have_rows(size, *pair) for size, pair in zip(sizes, pairs, strict=True)]
        if n == 0 or declared and not all(have):  # without rows, or with rows in another dim
            return 1.0
        joins = n < 2 and self.n_rows in (n, None) and not may_be_a_sample(pairs)  # not of packed samples
        self.earlier_pairs = pairs if joins else []
        output, y = (concatenated(of, sizes) for of in zip(*pairs, strict=True))
        captures, may_be_constant = self._captures(n)
        may_be_constant = may_be_constant and self.has_whole_rows  # else nothing was cut

        def sums(cuts_captured: bool) -> _Sums | None:
            def loss_of(rows: SomeRows, cuts: bool = cuts_captured and self.has_whole_rows) -> torch.Tensor:
                return self.state.call(rows.of(output), rows.of(y), rows if cuts else None)

            try:
                found, error = self._added_up(loss_of, y, n), None
            except Exception as raised:
                found, error = None, raised
            is_wrong = error is not None if found is None else found.differ
            if captures and is_wrong:
                self._check_broadcast(functools.partial(loss_of, cuts=True), y, n)
            if error is None:
                return found
            if not self.is_split or cuts_captured and may_be_constant:
                return None
            return self._cannot_compare(error, captures, len(tensors_of(output)) > 1)

        try:
            (found,) = self._checked(sums, may_be_constant)
        except ValueError as error:
            if not self.by_passes:
                raise
            self.refusal = str(error)  # unless a tensor of the output that all rows share has as many rows, too
        if self.uses_more or self.refusal:  # as a part has shown
            return BY_PASSES
        return float(found is None or not found.says_something)

    def _check_broadcast(self, loss_of_cut: Callable[[SomeRows], torch.Tensor], y: Any, n: int) -> None:
        """Raises a ValueError under pp if the loss is that of parts only where captured tensors are cut, too: to all of
        their rows a microbatch of one would be broadcast.
        """
        if self.has_whole_rows or self.communicates:
            return
        cut = None
        with contextlib.suppress(Exception):
            cut = self._added_up(loss_of_cut, y, n)
        if cut is not None and not cut.differ:
            raise ValueError(f"loss_fn should compute with rows of a microbatch alone under pp. {_CAPTURES}")

    def compare_by_passes(self, stages: Any, transform: Callable[[Any], Any], x: Any, y: Any) -> int:
        """The comparison of :meth:`compare` by forward passes of the model, on all dp ranks together.

        Args:
            stages: the model as stages.
            transform: a function of its output.
            x: this rank's rows.
            y: their targets.

        Returns:
            int: the number of dp ranks for which it is inconclusive.

        Raises:
            ValueError: on every rank, if the values of one do not add up, or, of a loss that is not declared, can be
                compared on none.
        """
        if self.mesh.dp_size > 1:
            x, y = several_rows((x, y))
        modules, n = [stages.plain_module()], self._n_samples(x, (x, y))
        n = 1 if on_any_rank(not have_rows(n, x, y), self.mesh.dp_cp_group) else n  # as many passes on each rank

        owners = reached(getattr(transform, "transform", transform))  # of a CheckedTransform that of the user
        draws = False  # in another way than by modules of dropout, which evaluate here
        why = "" if n > 1 else "it takes two rows of x and of targets"

        def run(part: Any) -> Any:
            nonlocal draws
            before, output = random_states(), stages.forward_only(cloned(part))
            with states_kept(owners), streams_kept(owners):
                output = transform(output)
            draws = draws or has_drawn(before)
            return output

        def sums(cuts_captured: bool) -> _Sums | None:
            def loss_of(rows: SomeRows) -> torch.Tensor:
                with without_trace(modules):
                    return self.state.call(rows.of(x), rows.of(y), rows if cuts_captured else None, run)

            nonlocal why
            try:
                with evaluating(modules, all_of_them=False):
                    found = self._added_up(loss_of, y, n, by_passes=True)
            except Exception as error:
                why = why or f"that fails: {first_line(error)}"
                return None
            why = "the model draws random numbers" if draws else why
            return None if draws else found

        _, may_be_constant = self._captures(n)
        found = self._checked(sums, may_be_constant, lambda value: gathered_values(value, self.mesh.dp_cp_group))
        refusals, reasons = zip(*gathered_values((self.refusal, why), self.mesh.dp_cp_group), strict=True)
        refusals = list(filter(None, refusals))
        if not any(found) and (refusals or not self.is_confirmed):
            why = next(filter(None, reasons), "")
            raise ValueError(refusals[0] if refusals else self._cannot_be_checked(f" ({why})" if why else ""))
        self.uses_more = self.uses_more or (_SHARED if refusals else "")
        return sum(one is None or not one.says_something for one in found)

    def compare_with_peers(self) -> None:
        """Compares the loss of this rank's rows, and of some more whose targets are those of other dp ranks.

        The rows of a rank may be alike (of one class, all counted), so that parts of them say nothing. All dp ranks
        call it, also those without rows. What fails with such targets, or captures rows of the batch, is left out.

        Raises:
            ValueError: if the losses of parts of these rows do not add up.
        """
        output, y = self.pairs[0] if self.pairs else (None, None)
        n = self._n_samples(output, y) if self.pairs else 0
        n = n if n and have_rows(n, output, y) and not (n == 1 and isinstance(y, list | tuple)) else 0  # of a sample?
        if self.model is not None and not (self.has_warned or self.is_local):
            self._warn_of_unlike_results()
        if not self.is_compared:
            return
        few = min(n, _FEW)
        given = some_rows(y, slice(few), n) if n else None
        is_sent = given is not None and sum(t.numel() for t in tensors_of(given)) <= _MOST_SENT
        peers = gathered_values((few, pickled(given) if is_sent else None), self.mesh.dp_group)
        peers = [*peers[self.mesh.dp_rank + 1 :], *peers[: self.mesh.dp_rank]]
        peers = [(size, theirs) for size, theirs in peers if size and theirs is not None][:_FEW]
        of_rows, may_be_constant = self._captures(n) if n else (False, False)
        if not n or not peers or self.uses_more or self.communicates or of_rows and not may_be_constant:
            return
        sizes, more = [n, *(size for size, _ in peers)], sum(size for size, _ in peers)
        found = None
        with may_fail("losses that depend on other rows' targets"):  # which may be of another length
            theirs = [unpickled(y, of_peer) for _, of_peer in peers]
            targets, times = concatenated([y, *theirs], sizes), 1 + -(-more // n)
            outputs = some_rows(concatenated([output] * times, [n] * times), slice(n + more), n * times)
            found = self._added_up(lambda rows: self.state.call(rows.of(outputs), rows.of(targets)), targets, n + more)
        if found is not None and found.differ:
            raise ValueError(self._refusal(found, f"Some of them have targets of other ranks. {_ROWS_MEET}"))

    def _warn_of_unlike_results(self) -> None:
        """Warns, once, if dp ranks give other losses to the same rows; all of them call it."""
        sizes = [self._n_samples(*pair) for pair in self.pairs]
        have = all(have_rows(size, *pair) for size, pair in zip(sizes, self.pairs, strict=True))
        n = sum(sizes) if have and not (self.uses_more or self.communicates) else 0
        rows = [concatenated(of, sizes) for of in zip(*self.pairs, strict=True)] if n else None
        self.has_warned = unlike_results(functools.partial(_of_pair, self.loss_fn), rows, n)
        if self.has_warned and self.mesh.dp_rank == self.mesh.cp_rank == self.mesh.tp_rank == 0:  # of the last stage
            warnings.warn(
                f"loss_fn gives dp ranks different values for the same rows, since it reads what differs. {CURE}",
                stacklevel=2,
            )

    def _checked(
        self,
        sums: Callable[[bool], _Sums | None],
        may_be_constant: bool,
        gather: Callable[[Any], list] = lambda value: [value],
    ) -> tuple[_Sums | None, ...]:
        """What :meth:`_added_up` returns on each rank that gathers it.

        Captured tensors with as many rows as the batch are cut, too; if that is wrong or fails, and these may be
        constants (weights of classes, of which there are as many), everything is computed again with all of them.

        Args:
            sums: takes whether to cut captured tensors.
            may_be_constant: whether this rank's may be constants.
            gather: a function that gathers a value of each rank. Default: of this rank alone.

        Raises:
            ValueError: if values of some rank do not add up.
        """
        wrong, advice = None, ""
        for cuts_captured in (True, False):
            found, of_constants = zip(*gather((sums(cuts_captured), may_be_constant)), strict=True)
            differing = next((one for one in found if one is not None and one.differ), None)
            if differing is None and any(found):
                return found
            if wrong is None:
                wrong, advice = differing, _ROWS_MEET if cuts_captured else _CAPTURES
            if not any(of_constants):
                break
        if wrong is not None:
            raise ValueError(self._refusal(wrong, advice))
        return found

    def _added_up(
        self, loss_of: Callable[[SomeRows], torch.Tensor], y: Any, n: int, by_passes: bool = False
    ) -> _Sums | None:
        """The loss of n rows, and what those of parts of them add up to; None if it says nothing."""
        declared, edges = self.divisor.certain, {0, n}
        if n > 1:
            edges |= {max(1, n // 3)} if declared else {max(1, n // 4), 2 * n // 3}
        whole, *parts = (SomeRows(slice(*ends), n) for ends in ((0, n), *itertools.pairwise(sorted(edges))))
        try:
            with self.state.trying(), self.watch(by_passes) as watch:
                first = loss_of(whole)
                self.communicates = self.communicates or watch.found
                if declared and watch.found:
                    return None
                others = [*parts, *[whole] * (3 - len(parts))]  # as many on each rank
                losses = [float(loss_of(rows)) for rows in others]
        except Exception as error:
            if self.state.needs_graph or "does not require grad" not in str(error):
                raise
            self.state.needs_graph = True
            return self._added_up(loss_of, y, n, by_passes)
        loss, values = float(first), losses[: len(parts)]
        shares = [self._share(rows, y) for rows in parts]
        share = max(torch.finfo(first.dtype).eps ** 0.5, ROUNDINGS * watch.coarsest)
        tolerance = share * max(1e-3, abs(loss))
        is_same = not declared or abs(losses[-1] - loss) <= tolerance
        if n < 2 or not is_same or not math.isfinite(loss) or not all(shares):  # see check_that_nothing_counts
            return None
        together = sum(value * share for value, share in zip(values, shares, strict=True))
        return _Sums(n, loss, together, tolerance, max(values) - min(values) > tolerance)

    def watch(self, by_passes: bool = False) -> WatchForSums:
        """For calls of the loss function; ``by_passes`` if the model runs in them."""
        return WatchForSums(every_way=self.mesh.tp_size == 1 and not (by_passes or self.calls_sharded))

    def _captures(self, n: int) -> tuple[bool, bool]:
        """Whether ``loss_fn`` captures tensors with n rows, and whether these may be constants: not if some have the
        memory of the batch's.
        """
        found = captured(self.state.owners_and_models(), n) if self.mesh.cp_size == 1 else []
        of_batch = self.addresses.intersection(address_of(t) for held, name in found for t in tensors_of(held[name]))
        return bool(found), bool(found) and not of_batch

    def _share(self, rows: SomeRows, y: Any) -> float:
        if self.divisor.kind == "rows":
            return (rows.rows.stop - rows.rows.start) / rows.n
        return self.divisor.share(rows.of(y), y)

    def _cannot_compare(self, error: Exception, captures: bool, several: bool) -> None:
        """Says so, where the loss of parts fails."""
        if "differentiated Tensor" in str(error):
            if not self.by_passes:
                raise ValueError(_BY_WEIGHTS) from error
            self.uses_more = _GRADIENT
        elif not self.divisor.certain:
            shared = " A vector in the output that all rows share is cut, too, if it is as long as a microbatch."
            raise ValueError(
                f"loss_fn should be a mean over rows, but fails with a part of them ({first_line(error)}), so "
                f"what it divides by cannot be checked: {_DECLARE}.{shared if several else ''}"
                f"{' ' + _CAPTURES if captures else ''}"
            ) from error

    def _refusal(self, found: _Sums, advice: str) -> str:
        if math.isnan(found.together):
            advice = _NO_LOSS
        elif self.uses_more == _GRADIENT:
            advice = _BY_WEIGHTS
        elif self.divisor.certain:
            advice = f"{_EACH_TERM}. {advice}"
        if self.divisor.certain:
            is_sum = self.divisor.kind == "sum"
            of_sums = ' (nothing if "sum", or reduction="sum"; "rows" is for a mean over rows)' if is_sum else ""
            return (
                f"loss_divisor should be what the loss divides by{of_sums}, but the loss of {found.n} rows is "
                f"{found.loss:.6g}, and the losses of two parts of them, weighted by loss_divisor, add up to "
                f"{found.together:.6g}. {advice}"
            )
        return (
            f"loss_fn should be a mean over rows, but {self._used()}gives {found.loss:.6g} for {found.n} rows and "
            f"{found.together:.6g} for the weighted mean of parts of them: {_DECLARE}. {advice}"
        )

    def _used(self) -> str:
        terms = "a loss or an auxiliary term that the model computes, or a gradient by its input"
        return f"uses {self.uses_more} ({terms}), and " if self.uses_more else ""

    def _cannot_be_checked(self, why: str = "") -> str:
        return (
            f"loss_fn should be a mean over rows, but {self._used()}cannot be computed for parts of them here{why}, so "
            f"what it divides by cannot be checked: {_DECLARE}"
        )

    def check_that_nothing_counts(self, loss: float) -> None:
        """Raises a ValueError if the loss of targets whose declared divisor is 0 is a number all the same.

        Such a part has no weight; a loss that divides by ``count.clamp(min=1)`` would lose it.
        """
        if self.divisor.declared and self.n_steps and math.isfinite(loss) and abs(loss) > 1e-12:
            raise ValueError(
                f"loss_divisor is 0 for the targets of a rank or microbatch whose loss is {loss:.6g}, so that these "
                "rows would be left out: let it give 1 at least if the loss divides by that (max(1, count)); or let "
                'loss_fn return the sum divided by a constant, with loss_divisor="sum"'
            )

    def _compare_tokens(self, output: Any, y: Any) -> None:
        """Over cp, raises a ValueError unless the losses of two halves of a rank's tokens add up to that of all."""
        halves = two_halves((output, y), self.n_rows if self.mesh.pp_size == 1 else None)
        if halves is None:  # prepare_batch has made rows of tokens
            return
        try:
            with self.state.trying():
                of_all, *of_halves = (self._with_divisor(*pair) for pair in ((output, y), *halves))
        except Exception as error:
            if self.divisor.declared:
                return
            raise ValueError(
                f"loss_fn should be a mean over tokens on a mesh with cp, but fails with a part of them "
                f"({first_line(error)}): pass loss_divisor=, a function from targets to the number that counts"
            ) from error
        loss, *_, eps = of_all
        parts, share = [found[:3] for found in of_halves], max(1e-4, 4 * eps)
        divisor = 1.0 if self.divisor.kind == "sum" else sum(counts for *_, counts in parts) or 1.0
        together = sum(value * part for value, part, _ in parts if part) / divisor
        if not any(part for _, part, _ in parts) or not math.isfinite(loss):
            return

        def is_off(value: float) -> bool:
            return not abs(value - loss) <= share * max(1e-3, abs(loss))

        if is_off(together):
            cure = (
                "shift targets in prepare_batch, and pass loss_divisor=, a function from targets to the divisor; "
                "weights of tokens by place go beside the targets, y=(y, w) of prepare_batch"
            )
            if not is_off(sum(value for value, *_ in parts)):
                cure = 'divide its sum over tokens and rows by a constant (the batch size), with loss_divisor="sum"'
            elif callable(self.divisor.kind):
                cure = (
                    "let loss_divisor give what loss_fn divides by, which has to be one number for all of its terms; "
                    "weights of tokens by place go beside the targets, y=(y, w) of prepare_batch"
                )
            raise ValueError(
                "loss_fn should be a mean over tokens on a mesh with cp, but its values for two halves of the "
                f"tokens of each row add up to {together:.6g} and not to {loss:.6g}, that of all (a sum over tokens, a "
                f"mean over those that count, or targets that it shifts by one?): {cure}"
            )

    def _with_divisor(self, output: Any, y: Any) -> tuple[float, float, float, float]:
        """The loss, its divisor, what counts, and how far apart two numbers of the loss's dtype are, relative to 1."""
        divisor = self.divisor.of(y) if callable(self.divisor.kind) else 1.0
        nothing = divisor == 1 and callable(self.divisor.kind) and max(self._of_twice(y), default=0) == 1
        loss = self.state.call(output, y) if divisor else 0.0
        eps = torch.finfo(loss.dtype).eps if isinstance(loss, torch.Tensor) and loss.is_floating_point() else 0.0
        return float(loss), divisor, 0.0 if nothing else divisor, eps

    def conclude(self, n_inconclusive: float) -> None:
        """Records the result of a check, given the number of dp ranks whose comparison was inconclusive."""
        self.pairs, self.state.pair = [], None  # of a loss that is made anew in each step, many contracts are kept
        if not self.is_checking or self.is_confirmed:
            return
        self.is_confirmed = n_inconclusive < self.mesh.dp_cp_size
        self.n_inconclusive += not self.is_confirmed
        if self.n_inconclusive == _MAX_INCONCLUSIVE and idist.get_rank() == 0:
            warnings.warn(
                f"what loss_fn divides by could not be checked in {_MAX_INCONCLUSIVE} steps, since it gave the same "
                "value for all rows, or there was one row: it is assumed to be a mean over rows. To declare it, "
                f"{_DECLARE}",
                stacklevel=2,
            )


class LossContracts:
    """The contracts of one model, by loss function: of those last used, since some are made anew in each step."""

    def __init__(self, mesh: Mesh, model: nn.Module) -> None:
        self.mesh, self.model = mesh, model
        self.by_key: dict[Hashable, LossContract] = {}

    def of(self, loss_fn: Callable, declared: str | Callable[[Any], Any] | None) -> LossContract:
        """The contract of a loss function, with what the user declared as its divisor."""
        divisor = divisor_of(loss_fn, declared)
        key, divisor.known = (_key_of(loss_fn, declared), divisor.certain, divisor.declared), {}
        if key not in self.by_key:
            while len(self.by_key) >= _CONTRACTS_KEPT:
                del self.by_key[next(iter(self.by_key))]
            self.by_key[key] = LossContract(loss_fn, divisor, self.mesh, self.model)
        contract = self.by_key[key]
        contract.loss_fn = contract.state.loss_fn = loss_fn
        contract.divisor = divisor
        return contract


class _Sums(NamedTuple):
    """The loss of n rows, what the losses of parts of them add up to, and whether these are different numbers."""

    n: int
    loss: float
    together: float
    tolerance: float
    says_something: bool

    @property
    def differ(self) -> bool:
        return not abs(self.together - self.loss) <= self.tolerance  # also if that of a part is NaN


def _range_of(tensor: torch.Tensor) -> tuple[float, float, bool]:
    """The least and the largest number of a tensor, but for NaN, and whether it has some, as for what is missing."""
    try:
        low, high = torch.stack(tensor.aminmax()).tolist()
    except NotImplementedError:  # of uint16, float8
        low = high = math.nan
    if low == low:
        return low, high, False
    numbers = tensor.double()
    return *torch.stack(numbers.nan_to_num().aminmax()).tolist(), bool(numbers.isnan().any())


def _twice(y: Any, kinds: tuple[type, ...]) -> Any:
    """Targets twice: each tensor, or samples in lists or tuples, if these are among the kinds."""
    if isinstance(y, kinds):
        return y + y
    if type(y) in (list, tuple):
        return type(y)(_twice(item, kinds) for item in y)
    if isinstance(y, Mapping):
        return {key: _twice(value, kinds) for key, value in y.items()}
    if isinstance(y, torch.Tensor) and y.ndim:
        return torch.cat([y, y])
    if y is None or isinstance(y, str):
        return y
    if isinstance(y, torch.Tensor | int | float):
        return y * 2
    raise TypeError(type(y).__name__)


def _of_pair(loss_fn: Callable, pair: tuple[Any, Any]) -> Any:
    return loss_fn(*pair)


def _shapes_of_rows(tree: Any) -> list[torch.Size]:
    return [tensor.shape[1:] for tensor in tensors_of(tree)]


def _key_of(loss_fn: Callable, declared: Any) -> Hashable:
    """A key by which a lambda or a ``functools.partial`` that is made anew in each step is recognised."""
    if isinstance(loss_fn, functools.partial):
        return _key_of(loss_fn.func, declared), tuple(sorted(loss_fn.keywords)), len(loss_fn.args)
    code = getattr(loss_fn, "__code__", None)
    if code is None:
        return id(loss_fn), _key_of(declared, None) if callable(declared) else declared
    closure = []
    for cell in getattr(loss_fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one, of a name that is given a value later, or never
            closure.append(cell.cell_contents)
    values = tuple(
        id(value) if callable(value) else value for value in closure if callable(value) or type(value) is str
    )
    owner = id(getattr(loss_fn, "__self__", None))
    return code, owner, values, _key_of(declared, None) if callable(declared) else declared
