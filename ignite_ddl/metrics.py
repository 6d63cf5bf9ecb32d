"""Any Ignite metric, reduced over the ranks that had different rows.

Ignite's metrics reduce over the world. On a mesh, tp and pp peers have the same rows, so this would count each row
more than once. During a metric's methods, idist's world is therefore replaced by the data-parallel group; the
metric's class is not changed.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ignite.distributed.utils as idist_utils
import torch
import torch.distributed as dist
from ignite.exceptions import NotComputableError
from ignite.metrics import HSIC, GpuInfo, Loss, MaximumMeanDiscrepancy, Metric, RunningAverage, VariableAccumulation
from torch.utils._pytree import tree_leaves, tree_map

from ignite_ddl.checks.kept_state import random_kept, reached, states_kept
from ignite_ddl.checks.mixing import check_tokens_of
from ignite_ddl.collectives import gathered, gathered_values
from ignite_ddl.context.sequence import two_halves
from ignite_ddl.divisor import divisor_of
from ignite_ddl.idist_view import PeerError, data_parallel_view, is_in_view
from ignite_ddl.loss_contract import LossContract
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.structure import n_rows, tensors_of

_COMPLETED = contextvars.ContextVar("the output of an iteration that all ranks complete", default=None)


@contextlib.contextmanager
def completing(output: Any) -> Iterator[None]:
    """Inside, metrics that get this output may compare between ranks: each rank calls them once for it.

    Not so where ranks have different numbers of batches, or lists of samples that a ``MetricGroup`` takes one by one.
    """
    token = _COMPLETED.set(output)
    try:
        yield
    finally:
        _COMPLETED.reset(token)


def over_data_parallel(metric: Metric) -> Metric:
    """Makes a metric reduce over the data-parallel group, in place, and returns it.

    The engines of ``ddl`` do this for every metric attached to them. After ``ddl.auto_model`` the first update does it
    for any other metric of Ignite's, which you may update and compute yourself. A metric of your own then reduces over
    that group, too; for ranks without rows, call this before its first update.

    Ignite cannot reduce over a rank whose batches had no rows: means of no rows are NaN, sums per class have no shape
    yet. Updates without rows are skipped, and if a rank had no rows since the reset, the others compute the result
    and send it to that rank. Metrics that gather rows, such as ``EpochMetric``, have those of one rank after those of
    another: their function should not depend on the order. What counts updates counts those of all dp ranks:
    ``VariableAccumulation`` of one number a batch gives ``dp`` times as many as in one process.

    Args:
        metric: any Ignite metric; metrics inside it (``RunningAverage``, ``MetricsLambda``) are included.

    Returns:
        Metric: the same object.
    """
    if "_over_data_parallel" in vars(metric):  # getattr makes a MetricsLambda of any name
        return metric
    metric._over_data_parallel = True
    inner_metrics = list(_metrics_inside(list(vars(metric).values())))
    methods = _Methods(metric, is_composed=bool(inner_metrics))
    for name, original in methods.original.items():
        setattr(metric, name, functools.partial(_in_view, getattr(methods, name, original)))  # can be copied
    mesh = get_mesh()
    if methods.counts_rows and (mesh.cp_size > 1 or methods.losses is not None and mesh.dp_size > 1):
        metric._output_transform = functools.partial(methods.transform, metric._output_transform)
    for inner in inner_metrics:
        over_data_parallel(inner)
    return metric


def _in_view(method: Callable, *args: Any, **kwargs: Any) -> Any:
    with data_parallel_view():
        return method(*args, **kwargs)


def reduce_metrics_over_dp(cls: type[Metric] = Metric) -> None:
    """Lets metrics that are not attached to an engine of ``ddl`` reduce over the data-parallel group, too: a loop or
    Ignite's Engine updates them.

    Args:
        cls: of these metrics; subclasses, also later ones, are included. Default: all.
    """
    for name in ("update", "compute", "state_dict", "load_state_dict"):
        method = vars(cls).get(name)
        if method is not None and not hasattr(method, "is_by_hand"):
            setattr(cls, name, _by_hand(name, method))
    for each in cls.__subclasses__():
        reduce_metrics_over_dp(each)
    if cls is Metric:
        Metric.__init_subclass__ = classmethod(_reduce_later_ones)


def _reduce_later_ones(later: type[Metric], **options: Any) -> None:
    super(Metric, later).__init_subclass__(**options)
    reduce_metrics_over_dp(later)


def _by_hand(name: str, method: Callable) -> Callable:
    @functools.wraps(method)
    def by_hand(metric: Metric, *args: Any, **kwargs: Any) -> Any:
        is_one_ranks = is_in_view()  # as in data_parallel_view([rank])
        is_ignites = type(metric).__module__.startswith("ignite.")  # a user's own may be updated on one rank alone
        is_first = name != "compute" and "_over_data_parallel" not in vars(metric)
        if is_first and is_ignites and not is_one_ranks:
            return getattr(over_data_parallel(metric), name)(*args, **kwargs)
        return _in_view(method, metric, *args, **kwargs)

    by_hand.is_by_hand = True
    return by_hand


class _Methods:
    """What a metric's methods do on a mesh, by calling the original ones."""

    def __init__(self, metric: Metric, is_composed: bool) -> None:
        self.metric = metric
        self.counts_rows = not is_composed and not isinstance(metric, NOT_REDUCED)  # what others count is theirs
        self.compares_rows = isinstance(metric, _COMPARE_ROWS)
        self.original = {name: getattr(metric, name) for name in _METHODS}
        is_loss = all(getattr(type(metric), name) is getattr(Loss, name) for name in ("reset", "update", "compute"))
        self.losses = _BatchLosses(metric) if is_loss else None
        self.had_rows = False  # since the reset
        self.transforms_checked = False
        self.computed = 0 if self.counts_rows and not type(metric).__module__.startswith("ignite") else None

    def reset(self) -> None:
        self.had_rows = False
        if self.losses is not None:
            self.losses.clear()
        self.original["reset"]()

    def transform(self, transform: Callable, output: Any) -> Any:
        """Calls a transform; checks it over cp, and over dp a loss, of an output that all ranks have."""
        if get_mesh().cp_size > 1:
            self._check_transform(transform, output)
        rows = transform(output)
        if self.losses is not None and output is not None and output is _COMPLETED.get():
            self.losses.compare_with_peers(rows)
        return rows

    def _check_transform(self, transform: Callable, output: Any) -> None:
        """Refuses a transform that picks tokens of rows, pools or shifts them: each cp rank would give other ones."""
        if not self.transforms_checked:
            self.transforms_checked = True
            check_tokens_of(f"output_transform of {type(self.metric).__name__}", transform, output)
        with states_kept(owners := reached(transform)), random_kept(owners):
            rows = transform(output)
            drops_tokens = two_halves(rows) is None and any(tensor.ndim for tensor in tensors_of(rows))
            halves = two_halves(output) if drops_tokens and not self.had_rows else None
            n_of_halves = n_rows(rows)
            with contextlib.suppress(Exception):  # no value of so few tokens
                n_of_halves = sum(n_rows(transform(half)) for half in halves or ()) or n_of_halves
        if n_of_halves != n_rows(rows):
            raise ValueError(
                f"output_transform of {type(self.metric).__name__} should make rows of all tokens, as flatten(0, 1) "
                "does, but picks or pools some, and each cp rank has other ones: evaluate this on a mesh without cp"
            )

    def update(self, output: Any) -> None:
        if self.compares_rows:
            output = _gather_rows(output)
        empty = self.counts_rows and _without_rows(output)
        if self.losses is not None:
            self.losses.add(output, empty)
        if empty:
            return
        by_ignite = self.losses is None or self.losses.adds_up
        if self.counts_rows and not self.had_rows and by_ignite and get_mesh().cp_size > 1:
            _check_tokens_count(self.metric, self.original, output, get_mesh())
        self.had_rows = True
        self.original["update"](output)

    def compute(self) -> Any:
        if not self.counts_rows:
            return self.original["compute"]()
        mesh = get_mesh()
        if self.losses is not None and not self.losses.adds_up and mesh.dp_cp_size > 1:
            return self.losses.compute(mesh)
        if isinstance(self.metric, VariableAccumulation) and mesh.dp_cp_size > 1:
            _check_accumulators(self.metric, self.had_rows, mesh)
        value = _compute_on_ranks_with_rows(self.original["compute"], self.had_rows, mesh)
        if self.computed is not None and mesh.dp_cp_size > 1:
            self.computed += 1
            if self.computed & (self.computed - 1) == 0:
                _warn_of_local_value(self.metric, value, mesh)
        return value

    def _state_dict_per_rank(self) -> dict[str, Any]:  # also of a metric inside another one
        state = self.original["_state_dict_per_rank"]()
        return state if self.losses is None else state | {_LOSSES: self.losses.state()}

    def _load_state_dict_per_rank(self, state: Mapping) -> None:
        self.had_rows = True  # assumed: the state does not say
        if self.losses is not None:
            self.losses.load(state.get(_LOSSES))
        self.original["_load_state_dict_per_rank"](state)


def _warn_of_local_value(metric: Metric, value: Any, mesh: Mesh) -> None:
    """Warns of a metric of the user's own that gives another value on each rank: that of its own rows."""
    numbers = [torch.as_tensor(leaf).detach().double().cpu() for leaf in tree_leaves(value) if _is_number(leaf)]
    peers = gathered_values(numbers, mesh.dp_cp_group)
    alike = all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, equal_nan=True)
        for peer in peers
        for one, other in zip(peer, peers[0], strict=False)
    )
    if not alike and mesh.rank == 0:
        warnings.warn(
            f"{type(metric).__name__} gives another value on each dp rank, that of its own rows: decorate its compute "
            'with ignite.metrics.metric.sync_all_reduce("name", ...), which sums these attributes over ranks',
            stacklevel=2,
        )


def _check_accumulators(metric: VariableAccumulation, had_rows: bool, mesh: Mesh) -> None:
    """Refuses sums of rows, of which ranks have unlike numbers; warns of a sum of numbers that all ranks have."""
    name, own = type(metric).__name__, torch.as_tensor(metric.accumulator).detach().double().cpu()
    found = gathered_values((tuple(own.shape), own.tolist()) if had_rows else None, mesh.dp_cp_group)
    of_ranks = [of_rank for of_rank in found if of_rank is not None]
    shapes = {shape for shape, _ in of_ranks}
    if len(shapes) > 1:
        raise ValueError(
            f"{name} adds up tensors of one shape, but dp ranks have shapes {', '.join(map(str, sorted(shapes)))}, of "
            "their rows: let its output_transform give a number, or a column of them, of shape (rows, 1)"
        )
    alike = len(of_ranks) == len(found) and all(of_rank == of_ranks[0] for of_rank in of_ranks) and bool(own.any())
    if type(metric) is VariableAccumulation and alike and mesh.rank == 0:
        warnings.warn(
            f"{name} adds up what it gets on each of {len(found)} dp ranks, and all have the same: if that is a number "
            "of all ranks, such as the trainer's loss, it counts so many times; take RunningAverage or Average, or "
            "divide it by that number",
            stacklevel=2,
        )


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | torch.Tensor)


def _check_tokens_count(metric: Metric, methods: Mapping[str, Callable], output: Any, mesh: Mesh) -> None:
    """Raises a ValueError unless a metric is the same for two halves of the tokens as for all; it ends reset."""
    halves = two_halves(output)
    if halves is None:
        return
    values = []
    with data_parallel_view([mesh.rank]):
        try:
            for updates in ([output], halves):
                for update in updates:
                    methods["update"](update)
                values.append([torch.as_tensor(leaf).double() for leaf in tree_leaves(methods["compute"]())])
                methods["reset"]()
        except Exception:  # no value of so few tokens, or the update itself will raise it
            methods["reset"]()
            return
    if not all(torch.allclose(one, other, rtol=1e-4, equal_nan=True) for one, other in zip(*values, strict=True)):
        raise ValueError(
            f"{type(metric).__name__} counts rows, of whose tokens each cp rank has a part: make a row of each token "
            "in its output_transform, lambda output: (output[0].flatten(0, 1), output[1].flatten())"
        )


class _BatchLosses:
    """The losses of the batches of Ignite's Loss, which takes them for means over rows; some are not."""

    def __init__(self, metric: Loss) -> None:
        self.metric = metric
        self._find_divisor(metric._loss_fn)
        # Of each batch: the loss times its divisor, the divisor, and what _weight returns.
        self.losses: list[torch.Tensor] = []
        self.lost = False  # whether those of earlier batches are not known
        self.updates, self.least = 0, math.inf  # Ignite's least weight of a batch
        self.batches = 0  # of an engine, those without rows on this rank included

    def _find_divisor(self, loss_fn: Callable) -> None:
        """What a loss divides by, and whether Ignite's sums over ranks are right."""
        self.divisor, batch_size = divisor_of(loss_fn), self.metric._batch_size
        if not self.divisor.certain and batch_size is not len:  # by which Ignite weights batches
            self.divisor = divisor_of(loss_fn, batch_size)
        self.divides = callable(self.divisor.kind)
        self.adds_up = not self.divides and self.divisor.kind != "sum"

    def clear(self) -> None:
        self.losses.clear()
        self.lost = False

    def state(self) -> tuple[list[list[float]], bool, bool]:
        return [of_batch.tolist() for of_batch in self.losses], self.divides, self.adds_up

    def load(self, state: tuple[list[list[float]], bool, bool] | None) -> None:
        """Goes on from a :meth:`state`; None: that of earlier versions and of Ignite itself, without losses."""
        self.clear()
        self.lost = state is None
        if state is not None:
            losses, self.divides, self.adds_up = state
            self.losses = [torch.tensor(of_batch, dtype=torch.float64) for of_batch in losses]

    def add(self, output: Any, empty: bool) -> None:
        if get_mesh().dp_cp_size == 1:
            return
        numbers: list[Any] = [0.0] * 5
        y_pred, y, *options = output
        loss_fn = self.metric._loss_fn
        if options:  # such as weights of classes, by which it divides
            loss_fn = functools.partial(loss_fn, **options[0])
            self._find_divisor(loss_fn)
        if self.adds_up or self.divisor.declared:
            self.updates += not empty
            if not empty and self.updates & (self.updates - 1) == 0:
                self._check_mean(loss_fn, [(y_pred, y)], LossContract.compare)
        if self.adds_up:
            return
        if not empty:
            loss = loss_fn(y_pred, y).detach()
            counted = self.divisor.of(y) if self.divides else 1.0
            numbers = [loss * counted if counted else 0.0, counted, *self._weight(y)]
        self.losses.append(torch.stack([torch.as_tensor(n, dtype=torch.float64, device="cpu") for n in numbers]))

    def _weight(self, y: Any) -> tuple[float, float, float]:
        """Ignite's weight of the batch: ``(weight, 0, 0)`` if it adds up over rows, else ``(0, weight, 1)``, as of
        a constant, or of ``max(1, n)`` where nothing counts.
        """
        weight = float(self.metric._batch_size(y))
        if self.metric._batch_size is len or weight > self.least or not weight:
            return weight, 0.0, 0.0
        self.least = weight
        twice = float(self.metric._batch_size(tree_map(lambda t: torch.cat([t, t]) if t.ndim else t, y)))
        if twice not in (weight, 2 * weight):
            raise ValueError(
                "batch_size of Loss should add up over rows, as len does, or be the same for every batch, but "
                f"gave {weight:g} for some targets and {twice:g} for twice as many"
            )
        return (0.0, weight, 1.0) if twice == weight else (weight, 0.0, 0.0)

    def compare_with_peers(self, output: Any) -> None:
        """In batches 1, 2, 4, 8, … compares the loss with targets of another dp rank; all of them call it."""
        self.batches += 1
        if not (self.adds_up or self.divisor.declared) or self.batches & (self.batches - 1) or get_mesh().dp_size == 1:
            return
        values = list(output.values()) if isinstance(output, Mapping) else output
        is_pair = isinstance(values, list | tuple) and len(values) == 2 and not _without_rows(values)
        self._check_mean(self.metric._loss_fn, [tuple(values)] if is_pair else [], LossContract.compare_with_peers)

    def _check_mean(self, loss_fn: Callable, pairs: list[tuple[Any, Any]], compare: Callable) -> None:
        contract = LossContract(loss_fn, self.divisor, get_mesh(), None)
        contract.has_whole_rows = get_mesh().cp_size == 1  # no microbatches, under pp either
        contract.pairs = pairs
        try:
            compare(contract)
        except ValueError as error:
            raise ValueError(
                "Ignite's Loss adds up means over rows, but loss_fn seems to give something else, such as a weighted "
                "mean, so that ranks cannot be added up: give it torch's loss itself, with weight, ignore_index or "
                "reduction (torch.nn.CrossEntropyLoss(weight=...)), by which it is known what it divides by, or say it "
                "by batch_size=, a function from targets to the divisor; where rows of the output are in dim 1, put "
                "them in dim 0, such as by output_transform=lambda output: (output[0].transpose(0, 1), output[1])"
            ) from error

    def compute(self, mesh: Mesh) -> float:
        if self.lost:
            raise ValueError(
                "Loss of a weighted mean or of a sum was loaded from a state that has no losses of batches, so that "
                "those of ranks cannot be added up: leave it out of to_load, or reset it, and it counts from there"
            )
        if not self.losses:
            raise NotComputableError("Loss must have at least one example before it can be computed.")
        losses = torch.stack(self.losses).to(idist_utils.device())
        dist.all_reduce(losses, group=mesh.dp_cp_group)
        total, counted, weight, alike, n_alike = losses.unbind(1)
        if not weight.any():  # the same for every batch
            weight = alike / n_alike.clamp(min=1)
        elif (alike == n_alike).all():  # those that do not add up are 1: max(1, n) where nothing counts
            weight = torch.where(n_alike > 0, weight.clamp(min=1), weight)
        else:
            raise ValueError(
                "batch_size of Loss should add up over rows, as len does, or be the same for every batch, but gave "
                f"{float(alike.max()):g} both for some targets and for twice as many (a clamp?): let it return the "
                "number n that counts, or max(1, n)"
            )
        if self.divisor.declared:
            counted = weight
        loss = total / counted if self.divides else total
        return float((loss * weight).sum() / weight.sum())


_COMPARE_ROWS = HSIC, MaximumMeanDiscrepancy  # those of a batch with each other; the mean over batches counts


def _gather_rows(output: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """All rows of a batch: gathered over dp, or as they are if every dp rank has all (a loader that does not shard)."""
    ranks = idist_utils.get_world_size()
    gathered = [idist_utils.all_gather(tensor.detach()) for tensor in output] if ranks > 1 else output
    copies = [torch.cat([tensor.detach()] * ranks) for tensor in output]
    has_all = all(map(torch.equal, gathered, copies))
    return output if idist_utils.all_reduce(int(has_all)) == ranks else gathered


NOT_REDUCED = RunningAverage, GpuInfo  # in compute; they may be attached on one rank alone
_PER_RANK = ("_state_dict_per_rank", "_load_state_dict_per_rank")
_METHODS = ("reset", "update", "compute", "state_dict", "load_state_dict", *_PER_RANK)
_LOSSES = "_losses_of_batches"  # in a state


def _metrics_inside(value: Any) -> Iterator[Metric]:
    if isinstance(value, Metric):
        yield value
    elif isinstance(value, Mapping):
        yield from _metrics_inside(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _metrics_inside(item)


def _without_rows(output: Any) -> bool:
    leaves = tree_leaves(output, is_leaf=lambda leaf: isinstance(leaf, list) and not leaf)
    batched = [leaf for leaf in leaves if isinstance(leaf, list) or isinstance(leaf, torch.Tensor) and leaf.ndim > 0]
    return bool(batched) and all(len(leaf) == 0 for leaf in batched)


def _compute_on_ranks_with_rows(compute: Callable[[], Any], had_rows: bool, mesh: Mesh) -> Any:
    if mesh.dp_cp_size == 1:
        return compute()
    flags = gathered(torch.tensor(int(had_rows), device=idist_utils.device()), mesh.dp_cp_group)
    ranks = [rank for rank, had in zip(mesh.dp_cp_ranks, flags, strict=True) if had]
    if len(ranks) in (0, mesh.dp_cp_size):
        return compute()
    result: tuple[Any, Exception | None] = None, None
    with data_parallel_view(ranks):
        if had_rows:
            try:
                result = compute(), None
            except Exception as error:
                result = None, error
        results = idist_utils._model.finish(result)
    errors = [error for _, error in results if error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
    return results[0][0]
