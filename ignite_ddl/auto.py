"""idist's trio on a mesh: a loader that deals rows to the dp axis, a model that is cut, an optimizer.

Each is a no-op on a serial run, and idist's own on a mesh that is data parallel only, but for the loader: it
pads nothing and drops nothing, so that a mesh trains on the rows of one process, in their order.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torch.utils.data import SequentialSampler as InOrder
from torch.utils.data.dataloader import default_collate
from torch.utils.data.distributed import DistributedSampler

from ignite_ddl.layers import LazyLayers, put
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.pipeline import Pipeline, microbatches_for, reshard, share_buffers
from ignite_ddl.simulate import stage_owners
from ignite_ddl.tensor import apply_plan, check_plan, share_random_stream

__all__ = [
    "ShardedDataLoader",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "check_model",
    "full_state_dict",
    "load_full_state_dict",
]

# ------------------------------------------------------------------------------------------------ the loader


def auto_dataloader(dataset: Dataset, **kwargs: Any) -> ShardedDataLoader:
    """A ``DataLoader`` whose global batches are those of one process, dealt to the dp axis as evenly as it goes.

    Every dp rank takes its contiguous part of each global batch; tp and pp peers get the same rows. Nothing is
    padded and nothing dropped: the last global batch may leave a rank with fewer rows, or none.
    ``ddl.create_supervised_trainer`` weights losses and gradients by rows, so that this changes no result.
    Shuffling is the same on every rank and differs by epoch without ``set_epoch``. The epoch is over when a pass
    has given its last batch; a pass that is left before that, by a peek or a ``break``, is followed by one in the
    same order. So a rank may look at a batch alone, as long as an epoch has more than one. Samplers and transforms
    that draw should draw from torch's random stream: tp and pp peers then see the same rows. An iterable dataset,
    and a sampler or a ``generator`` with a random state of its own, move on with every pass that begins: begin
    those on all ranks.

    Args:
        dataset: a map-style or an iterable dataset. An iterable one is read whole on each rank; what it draws is
            alike on all.
        kwargs: those of ``torch.utils.data.DataLoader``. ``batch_size`` is the global one, ``num_workers`` is
            divided among the ranks of a machine, ``sampler`` and ``batch_sampler`` are those of one process, and end:
            an epoch's batches are listed as it begins.

    Returns:
        ShardedDataLoader: the loader; its ``rows`` tells how many rows the batch at hand has here and in all.

    Raises:
        ValueError: if a sampler is given that already divides the data.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def rows_seen(local_rank):
                loader = ddl.auto_dataloader(torch.arange(10), batch_size=4)
                return [batch.tolist() for batch in loader]

            with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                first, second = parallel.run(rows_seen)

            assert first == [[0, 1], [4, 5], [8]]
            assert second == [[2, 3], [6, 7], [9]]
    """
    mesh = get_mesh()
    loader = _make_loader(dataset, mesh, **kwargs)
    streamed = isinstance(
        dataset, IterableDataset
    )  # and read whole by each dp rank: their parts must fit together
    if mesh.dp_size < mesh.world_size or (streamed and mesh.world_size > 1):
        seed = _common_seed(mesh) + 1 + (0 if streamed else mesh.dp_rank)
        loader.stream = torch.Generator().manual_seed(seed)
    return loader


def _make_loader(dataset: Dataset, mesh: Mesh, **kwargs: Any) -> ShardedDataLoader:
    for name in ("sampler", "batch_sampler"):
        given = kwargs.get(name)
        inner = getattr(given, "sampler", None)  # of a BatchSampler
        divided = next((s for s in (given, inner) if isinstance(s, DistributedSampler)), None)
        if divided is not None:
            raise ValueError(
                f"{name} should be the sampler of one process, which auto_dataloader divides among the ranks, "
                f"but given a {type(divided).__name__}"
            )
    if kwargs.get("batch_sampler") is not None and ({"batch_size", "drop_last"} & set(kwargs)):
        raise ValueError("batch_sampler excludes batch_size and drop_last: it decides the batches")
    batch_size = kwargs.pop("batch_size", 1)
    if kwargs.get("batch_sampler") is None and (not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(
            f"batch_size should be the global batch size, a positive integer, but given {batch_size!r}"
        )
    workers = kwargs.get("num_workers", 0)
    if workers and idist.get_world_size() > 1:
        kwargs["num_workers"] = -(-workers // idist.get_nproc_per_node())
    kwargs.setdefault("pin_memory", idist.device().type == "cuda")
    drop_last = kwargs.pop("drop_last", False)
    if isinstance(dataset, IterableDataset):
        shares = _IterableShares(
            dataset, batch_size, drop_last, mesh, kwargs.pop("collate_fn", None) or default_collate
        )
        return ShardedDataLoader(shares, batch_size=None, **kwargs)
    batches = kwargs.pop("batch_sampler", None)
    if batches is None:
        sampler = kwargs.pop("sampler", None)
        if kwargs.pop("shuffle", False):
            if sampler is not None:
                raise ValueError("sampler and shuffle=True exclude each other: the sampler decides the order")
            sampler = RandomSampler(dataset, generator=kwargs.get("generator"))
        batches = BatchSampler(sampler if sampler is not None else InOrder(dataset), batch_size, drop_last)
    shares = _Shares(batches, _common_seed(mesh), mesh.dp_rank, mesh.dp_size)
    return ShardedDataLoader(dataset, batch_sampler=shares, **kwargs)


class ShardedDataLoader(DataLoader):
    """This rank's part of every global batch. Made by :func:`auto_dataloader`.

    Attributes:
        rows: ``(here, in all)``: the rows of the batch at hand on this rank and on the whole dp axis.
        filler: where ``rows[0]`` is 0, a batch of one row of the global batch: a rank without rows computes it
            with weight 0, so that its peers do not wait.
    """

    rows: tuple[int, int] = (0, 0)
    filler: Any = None
    stream: torch.Generator | None = None  # the random stream of transforms, shared by tp and pp peers

    def __iter__(self) -> Iterator[Any]:
        shares = self.batch_sampler
        if shares is None:  # an iterable dataset, whose batches carry their sizes
            for batch, here, in_all in self._batches(self.stream):
                yield self._present(batch, here, in_all)
            return
        # A pass has its own sizes, filled when it reads its first batch, and a stream of its own until it is over.
        epoch, sizes = shares.epoch, deque()
        shares.sizes, stream = sizes, self.stream and self.stream.clone_state()
        for batch in self._batches(stream):
            here, in_all = sizes.popleft()
            # Not when it begins, which a rank may do alone, nor at its end, for which Ignite's last one is not asked.
            if not sizes and shares.epoch == epoch:
                shares.epoch, self.stream = epoch + 1, stream
            yield self._present(batch, here, in_all)

    def _batches(self, stream: torch.Generator | None) -> Iterator[Any]:
        with _draws_of_peers(stream):
            batches = super().__iter__()
        while True:
            with _draws_of_peers(stream):
                batch = next(batches, self)
            if batch is self:
                return
            yield batch

    def _present(self, batch: Any, here: int, in_all: int) -> Any:
        self.rows = here, in_all
        self.filler = None
        if here == 0:
            self.filler = batch
            return without_rows(batch)
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next pass shuffles for, say after a resume; else it goes on after each whole pass."""
        if isinstance(self.batch_sampler, _Shares):
            self.batch_sampler.epoch = epoch


def without_rows(batch: Any) -> Any:
    """A batch, or the output for one, that has none of its rows any more."""
    return tree_map(_no_rows, batch, is_leaf=_is_words)


def _is_words(leaf: Any) -> bool:
    """What the default collate function makes of strings."""
    return isinstance(leaf, list | tuple) and len(leaf) > 0 and all(isinstance(w, str | bytes) for w in leaf)


def _no_rows(leaf: Any) -> Any:
    rows = isinstance(leaf, torch.Tensor) and leaf.ndim > 0  # a number of the whole batch stays
    return leaf[:0] if rows or _is_words(leaf) else leaf


@contextlib.contextmanager
def _draws_of_peers(stream: torch.Generator | None) -> Iterator[None]:
    """tp and pp peers must see the same rows, so what draws while rows are read draws alike on them."""
    if stream is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(stream.get_state())
        yield
        stream.set_state(torch.get_rng_state())


class _Shares(Sampler[list[int]]):
    """This rank's part of each batch of one process's batch sampler, in the same order on every rank."""

    def __init__(self, batches: Any, seed: int, rank: int, size: int) -> None:
        self.batches, self.seed, self.rank, self.size = batches, seed, rank, size
        self.epoch = 0  # that the next pass shuffles for; the loader counts
        self.sizes: deque[tuple[int, int]] = deque()  # (here, in all) of the latest pass, those not yet given

    def __iter__(self) -> Iterator[list[int]]:
        with torch.random.fork_rng(devices=[]):  # the user's random stream stays as it is
            torch.manual_seed(self.seed + self.epoch)
            batches = [list(batch) for batch in self.batches]
        parts = [part(len(batch), self.rank, self.size) for batch in batches]
        self.sizes.extend(
            (end - start, len(batch)) for (start, end), batch in zip(parts, batches, strict=True)
        )
        for (start, end), batch in zip(parts, batches, strict=True):
            yield batch[start:end] or batch[:1]

    def __len__(self) -> int:
        return len(self.batches)


class _IterableShares(IterableDataset):
    """This rank's part of each ``batch_size`` samples of a stream."""

    def __init__(
        self, dataset: IterableDataset, batch_size: int, drop_last: bool, mesh: Mesh, collate: Any
    ) -> None:
        self.dataset, self.batch_size, self.drop_last, self.collate = dataset, batch_size, drop_last, collate
        self.rank, self.size = mesh.dp_rank, mesh.dp_size

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        stream = iter(self.dataset)
        while batch := list(islice(stream, self.batch_size)):
            if self.drop_last and len(batch) < self.batch_size:
                return
            start, end = part(len(batch), self.rank, self.size)
            yield self.collate(batch[start:end] or batch[:1]), end - start, len(batch)

    def __len__(self) -> int:
        n = len(self.dataset)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)


def part(n: int, rank: int, size: int) -> tuple[int, int]:
    """Start and end of a rank's contiguous part of ``n`` rows; sizes differ by one at most."""
    return n * rank // size, n * (rank + 1) // size


def _common_seed(mesh: Mesh) -> int:
    """Rank 0's seed, so that ranks shuffle alike also where the user seeded them differently."""
    seed = torch.tensor([torch.initial_seed() % 2**62], device=idist.device())
    if mesh.world_size > 1:
        dist.broadcast(seed, src=0)
    return int(seed)


# ------------------------------------------------------------------------------------------------- the model


def auto_model(
    model: nn.Module,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    *,
    schedule: str = "1f1b",
    n_microbatches: int | None = None,
    split: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    shard: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """Cuts a built model for the mesh; the weights are those of rank 0, which are those of one process.

    On a mesh that is data parallel only this is ``idist.auto_model`` (DDP). With tp the plan's modules become
    DTensors, with pp the model becomes a :class:`~ignite_ddl.pipeline.Pipeline` of this rank's stages, and the
    dp axis is torch's ``replicate``, or FSDP2 with ``shard=True``.

    Args:
        model: any module; where the mesh has a pp axis, an ``nn.Sequential`` or a module whose attribute
            ``pipeline_layers`` lists the names of its layers, in order. Layers may be ``ddl.lazy``.
        tensor_plan: globs of module names to styles, see :mod:`ignite_ddl.tensor`. Checked on every mesh.
        schedule: a name of ``ignite_ddl.pipeline.SCHEDULES``, default "1f1b". Used with pp.
        n_microbatches: microbatches per batch, default the number of stages. Used with pp.
        split: layers per stage, default balanced by ``costs``. Used with pp.
        costs: what each layer costs, in any unit, such as of ``ddl.layer_costs``; the same on every rank. Default
            its number of parameters. Used with pp.
        shard: shard parameters, gradients and optimizer state over dp (FSDP2). Default False. Weights are gathered
            when their turn comes, as one: on the way down from the model, a module that holds no list of layers
            (``nn.Sequential``, ``nn.ModuleList``, ``nn.ModuleDict``), or that has a twin of the same shapes in such
            a list, as a transformer block has. Tied weights and what is left over, such as parameters of the model
            itself, are gathered with the whole model. Weights that are read without a call of the module that is
            gathered with them are not there.
        kwargs: for ``idist.auto_model`` on a mesh that is data parallel only, say ``find_unused_parameters``.

    Returns:
        nn.Module: the model to train. With pp, call it under ``ddl.create_supervised_trainer``.

    Raises:
        ValueError: if a key of the plan matches nothing, a module cannot be cut, or the model and the schedule
            do not suit the mesh; nothing has been sent then.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def weights_held(local_rank):
                torch.manual_seed(0)
                model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
                model = ddl.auto_model(model, tensor_plan={"0": ddl.Column(), "2": ddl.Row()})
                held = model[0].weight.to_local().numel()
                return held, model(torch.ones(1, 8)).sum().item()

            with ddl.Parallel(backend="gloo", nproc_per_node=2, tp=2) as parallel:
                (held, cut), _ = parallel.run(weights_held)

            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
            assert held == 64                                   # of the first layer's 128 weights
            assert abs(cut - model(torch.ones(1, 8)).sum().item()) < 1e-5
    """
    mesh = get_mesh()
    for_ddp = mesh.dp_size == mesh.world_size and not (shard and mesh.world_size > 1)
    late = LazyLayers(model)
    with late.sketched():  # what does not fit is refused here, before anything is made or sent
        styles = check_plan(model, tensor_plan or {}, mesh.tp_size)
        if kwargs and not for_ddp:
            raise ValueError(
                f"{', '.join(kwargs)} are for DDP, but the mesh is {mesh!r}, shard={shard}: leave them out"
            )
        cut = Pipeline(model, mesh, schedule, n_microbatches, split, costs) if mesh.pp_size > 1 else model
    stages = list(cut.local.values()) if isinstance(cut, Pipeline) else [model]
    if not for_ddp:
        _copy_weights_of_rank_0(model)  # not those that are yet to be made
    late.build(
        mesh, [cut, *stages], lambda layer, names: _cut_alone(layer, names, stages, styles, mesh, shard)
    )
    if for_ddp:
        return idist.auto_model(model, **kwargs)
    if mesh.tp_size * mesh.pp_size > 1:
        share_random_stream(mesh)
    if isinstance(cut, Pipeline) and mesh.dp_size > 1:
        cut.copy_shared_layers()
    if mesh.tp_size > 1:
        apply_plan(cut, styles, mesh.device_mesh["tp"])
    for stage in stages:
        _over_dp(stage, mesh, shard)
    return cut


def check_model(
    model: nn.Module,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    *,
    dp: int = 1,
    pp: int = 1,
    tp: int = 1,
    schedule: str = "1f1b",
    n_microbatches: int | None = None,
    split: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    batches: Sequence[int] = (),
) -> None:
    """Raises in one process, before any rank is started, what :func:`auto_model` would raise on a mesh.

    Args:
        model: the model; it stays as it is.
        tensor_plan: as in :func:`auto_model`.
        dp: size of the mesh's data-parallel axis.
        pp: number of pipeline ranks.
        tp: number of ranks that share each layer.
        schedule: as in :func:`auto_model`.
        n_microbatches: as in :func:`auto_model`.
        split: as in :func:`auto_model`.
        costs: as in :func:`auto_model`.
        batches: rows of the global batches that will come, say ``batch_size`` and those of the last batch: some
            schedules cannot cut each number of rows.

    Raises:
        ValueError: if the model, the plan, the schedule or a batch does not suit the mesh.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
            ddl.check_model(layers, {"0": ddl.Column(), "2": ddl.Row()}, dp=2, tp=4)
            try:
                ddl.check_model(layers, pp=4)
            except ValueError as error:
                assert "a model of 3 layers cannot be cut into 4 stages" in str(error)
    """
    with LazyLayers(model).sketched():
        check_plan(model, tensor_plan or {}, tp)
        if pp == 1:
            return
        mesh = Mesh({"pp": pp, "dp": dp, "tp": tp}, 0, None, {})
        Pipeline(model, mesh, schedule, n_microbatches, split, costs)  # a cut for practice, which nobody runs
    wanted = n_microbatches or len(stage_owners(schedule, pp))
    for rows in batches:
        for here in {rows // dp, -(-rows // dp)} - {0}:  # of a dp rank
            microbatches_for(here, wanted, schedule, pp)


def _cut_alone(
    layer: nn.Module, names: list[str], stages: list[nn.Module], styles: dict[str, ParallelStyle], mesh: Mesh,
    shard: bool,
) -> None:  # fmt: skip
    """Cuts a layer that was made late as the whole model is going to be, before the next one takes memory."""
    layer.to(idist.device())
    if mesh.tp_size > 1:
        holder = nn.Module()
        for name in names:
            put(holder, name, layer)
        inside = tuple(f"{name}." for name in names)
        own = {name: styles.pop(name) for name in list(styles) if f"{name}.".startswith(inside)}
        apply_plan(holder, own, mesh.device_mesh["tp"])
    alone = sum(layer in set(stage.modules()) for stage in stages) == 1  # else it is copied first
    if shard and alone and mesh.dp_size > 1 and any(True for _ in layer.parameters()):
        _fully_shard(layer, mesh)


def _over_dp(module: nn.Module, mesh: Mesh, shard: bool) -> nn.Module:
    # A DTensor's local part is a view, of which torch warns on every rank: nothing here changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if mesh.dp_size == 1:
        return module
    if mesh.pp_size == 1:  # a pipeline does it itself, once a batch
        module.register_forward_pre_hook(lambda root, _: share_buffers(root, mesh))
    if not any(p.requires_grad for p in module.parameters()):
        return module
    if shard:
        return _resharded_after_evaluation(_fully_shard(module, mesh))
    # Not DistributedDataParallel, which loses parameters beside DTensors and pipelines (see tests/test_auto.py).
    # Still a private module of torch, from 2.11 to 2.13: its one import is here.
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return _resharded_after_evaluation(replicate(module, mesh=mesh.device_mesh["dp"]))


def _fully_shard(module: nn.Module, mesh: Mesh) -> nn.Module:
    # Weights are gathered when their turn comes. Under pp they stay until the backward pass is through:
    # once a batch, however many microbatches a dp rank has.
    how = {"mesh": mesh.device_mesh["dp"], "reshard_after_forward": mesh.pp_size == 1}
    for unit in _gathered_alone(module):
        fully_shard(unit, **how)
    return fully_shard(module, **how)  # what is left


def _resharded_after_evaluation(module: nn.Module) -> nn.Module:
    """Without a backward pass FSDP2 keeps its working copies: an optimizer made then would train those, in vain."""
    if get_mesh().pp_size == 1:  # a pipeline does it itself, after its last microbatch
        module.register_forward_hook(lambda root, *_: None if torch.is_grad_enabled() else reshard(root))
    return module


_LISTS = nn.Sequential | nn.ModuleList | nn.ModuleDict


def _gathered_alone(root: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 gathers one at a time, by the rule that :func:`auto_model` states."""
    passed, units = [root], []
    for module in passed:  # it grows meanwhile
        shapes = {child: tuple(p.shape for p in child.parameters()) for child in module.children()}
        alike = Counter(shapes.values() if isinstance(module, _LISTS) else ())
        for child in (child for child in shapes if shapes[child]):
            block = alike[shapes[child]] > 1 and not isinstance(child, _LISTS)
            made_late = isinstance(child, FSDPModule)  # and sharded already
            known = units if block or made_late or not _holds_layers(child) else passed
            if child not in known:
                known.append(child)
    # A weight that is tied across them has to be there for all of them: it is left to the root.
    holders = Counter(id(p) for unit in units for p in unit.parameters())
    holders.update(id(p) for module in passed for p in module.parameters(recurse=False))
    return [
        unit
        for unit in units
        if not isinstance(unit, FSDPModule) and all(holders[id(p)] == 1 for p in unit.parameters())
    ]


def _holds_layers(module: nn.Module) -> bool:
    return any(isinstance(m, _LISTS) and any(True for _ in m.parameters()) for m in module.modules())


def _copy_weights_of_rank_0(model: nn.Module) -> None:
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(idist.device()))
    with torch.no_grad():
        for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()] if not t.is_meta}.values():
            # A channels_last weight is not: it could be neither sent nor sharded.
            tensor.data = tensor.contiguous()
            dist.broadcast(tensor, src=0)


def auto_optim(optimizer: torch.optim.Optimizer, **kwargs: Any) -> torch.optim.Optimizer:
    """``idist.auto_optim``: the optimizer itself on gloo and NCCL, adapted on Horovod and XLA.

    Args:
        optimizer: an optimizer of the parameters of what :func:`auto_model` returned.
        kwargs: those of ``idist.auto_optim``.

    Returns:
        torch.optim.Optimizer: the optimizer to step.
    """
    return idist.auto_optim(optimizer, **kwargs)


# --------------------------------------------------------------------------------------------- plain weights


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the uncut model, on the CPU of every rank; every rank calls it.

    Args:
        model: what :func:`auto_model` returned.

    Returns:
        dict: names as in the model that was given to :func:`auto_model`, to plain tensors.
    """
    mesh = get_mesh()
    for part_ in model.local.values() if isinstance(model, Pipeline) else [model]:
        share_buffers(
            part_, mesh
        )  # DDP has shared them before the last forward pass, and that one changed them
    with _quiet_gathers():
        mine = {name: _whole(tensor) for name, tensor in _plain_state(model).items()}
    if not isinstance(model, Pipeline):
        return mine
    parts: list[dict] = [{} for _ in range(model.mesh.pp_size)]
    dist.all_gather_object(parts, mine, group=model.mesh.pp_group)
    merged = {name: tensor for part_ in parts for name, tensor in part_.items()}
    return {name: merged[name] for name in model.shapes if name in merged}


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Loads a plain state dict into a cut model, in place; every rank calls it with the whole dict.

    Args:
        model: what :func:`auto_model` returned.
        state: a state dict of the uncut model.

    Raises:
        ValueError: if a name is missing, unknown, or has another shape.
    """
    targets = _plain_state(model)
    # Of every stage, so that all ranks refuse alike.
    known = model.shapes if isinstance(model, Pipeline) else {n: tuple(t.shape) for n, t in targets.items()}
    if set(state) != set(known):
        raise ValueError(
            f"state should have the model's names, but lacks {sorted(set(known) - set(state))} and has "
            f"{sorted(set(state) - set(known))} besides"
        )
    for name, shape in known.items():
        if shape != tuple(state[name].shape):
            raise ValueError(f"state[{name!r}] should have shape {shape}, but has {tuple(state[name].shape)}")
    with torch.no_grad():
        for name, target in targets.items():
            value = state[name].to(target.device, target.dtype)
            if isinstance(target, DTensor):
                value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(value)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


def _plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return (model.module if isinstance(model, DistributedDataParallel) else model).state_dict()


@contextlib.contextmanager
def _quiet_gathers() -> Iterator[None]:
    """torch logs on every rank that a weight cut by tp and by FSDP takes two gathers: it does, once a state dict."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
