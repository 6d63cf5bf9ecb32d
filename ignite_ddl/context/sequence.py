"""A batch whose sequences are shared by the cp ranks: which rank has which tokens, and whether the model mixes them.

``ddl.auto_dataloader`` shards the tokens of its batches, so the model, the loss and the metrics see a rank's tokens
alone. Of everything that a model computes only attention may look at other tokens, by :func:`ring_attention` or
:func:`ulysses_attention`; :func:`check_tokens` finds what else does.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn

from ignite_ddl.arguments import a, takes, whole
from ignite_ddl.checks.kept_state import cloned
from ignite_ddl.checks.replicas import digest
from ignite_ddl.checks.rows_alone import norm_over_rows
from ignite_ddl.checks.traceless import UnlikeModules, WatchForSums, differ, evaluating, without_trace
from ignite_ddl.collectives import gathered
from ignite_ddl.context.layout import check_length, local_positions, natural_order, place_in, shard_sequence
from ignite_ddl.errors import THIS_WAS_IN
from ignite_ddl.mesh import Mesh, get_mesh
from ignite_ddl.structure import local_tensor, map_leaves, n_rows, tensors_of

NOT_SHARED = (
    "on a mesh with cp, batches should come from ddl.auto_dataloader, which gives each cp rank its tokens: run the "
    "engine on that loader"
)
_FULL = contextvars.ContextVar("the model has full sequences", default=False)
_CONVOLUTIONS = (*(nn.Conv1d, nn.Conv2d, nn.Conv3d), *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
_CHUNK = 2  # tokens of a chunk in check_tokens
_FEW = 16  # numbers of unlike rows, which may be the same on all ranks by chance
_ROWS, _WINDOWS = 4, 4  # on which a model is tried: rows of a batch, and windows of each
_rows, _tokens = 0, 0  # of the last batch, and of each of its rows on this rank


def cp_group() -> dist.ProcessGroup | None:
    """The ranks that share each sequence; None if this process has all of it.

    Raises:
        ValueError: inside a model, if each of them was given the full sequences.
    """
    if _FULL.get():
        return None
    group = get_mesh().cp_group
    while SharedSequences.given:
        _check_shared(SharedSequences.given.pop(), group)
    return group


class SharedSequences:
    """Hooks of a model that keep what it was given until it asks, in :func:`cp_group`, who has the other tokens.

    Not in each call, but in calls 1, 2, 4, 8, … with as many tokens, in training and in evaluation, and not of a model
    that does not ask: it may have full sequences.
    """

    given: ClassVar[list[list[torch.Tensor]]] = []

    def __init__(self, model: nn.Module) -> None:
        self.calls: Counter[tuple[bool, ...]] = Counter()
        model.register_forward_pre_hook(self.begin, prepend=True, with_kwargs=True)
        model.register_forward_hook(self.end, always_call=True)

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        sequences = [tensor for tensor in tensors_of((args, kwargs)) if tensor.ndim > 1]
        kind = (model.training, *(tensor.shape[1] for tensor in sequences))
        self.calls[kind] += 1
        if self.calls[kind] & (self.calls[kind] - 1) == 0:
            self.given.append(sequences)

    def end(self, *_: Any) -> None:
        self.given.clear()


def _check_shared(given: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Raises a ValueError if all ranks of the group have the same tokens, unless these repeat."""
    halves = [tensor.chunk(2, 1) for tensor in given]
    repeats = all(len(of) == 1 or torch.equal(*of) for of in halves if of[0].shape == of[-1].shape)
    n_unlike = sum(len({digest(row) for row in tensor}) * tensor[0].numel() for tensor in given if len(tensor))
    first = torch.tensor([repeats or n_unlike < _FEW, *map(digest, given)], device=idist.device())
    peers = gathered(first, group)
    if not first[0] and all(torch.equal(peer, first) for peer in peers):
        raise ValueError(
            f"cp ranks should have different tokens of a sequence, but all {len(peers)} got the same: on a mesh with "
            "cp, call the model with the batches of ddl.auto_dataloader, or with x[:, ddl.sequence_positions(T // cp)] "
            "of T tokens; to generate, or for outputs of full sequences, take a mesh without cp"
        )


@takes(tokens=whole(most=10**8), device=a("a torch.device", torch.device))
def sequence_positions(tokens: int, device: torch.device | None = None) -> torch.Tensor:
    """The positions in the full sequence of this rank's tokens; on a mesh without cp they are 0, 1, 2, ...

    A model that numbers its tokens (a position table, rotary embeddings) calls this instead of counting from 0.

    Args:
        tokens: number of tokens that this rank has.
        device: of the result, default the CPU.

    Returns:
        torch.Tensor: ``tokens`` integers, ascending.

    Examples:
        .. code-block:: python

            import ignite_ddl as ddl

            def positions(local_rank):
                return ddl.sequence_positions(4).tolist()

            with ddl.Parallel(backend="gloo", nproc_per_node=2, cp=2) as parallel:
                assert parallel.run(positions) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    rank, size = place_in(cp_group())
    return local_positions(tokens * size, rank, size, device)


def shard_batch(batch: Any) -> Any:
    """This rank's tokens of a batch: the same part of each tensor that has a dim 1.

    Raises:
        ValueError: if there is no such tensor, or their lengths differ or cannot be shared.
    """
    mesh = get_mesh()
    if mesh.cp_size == 1:
        return batch
    lengths = {tensor.shape[1] for tensor in tensors_of(batch) if tensor.ndim > 1}
    if len(lengths) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(batch)) or "no tensor"
        raise ValueError(
            f"a batch should count the tokens of its sequences in dim 1, as many in each tensor that has one, since "
            f"cp={mesh.cp_size} ranks share them, but has {shapes}; a mask of pairs of tokens is said by documents=, "
            "window= or is_causal= of ddl.ring_attention instead"
        )

    global _rows, _tokens
    _rows, _tokens = n_rows(batch), lengths.pop() // mesh.cp_size
    return _part(batch, mesh)


def _part(batch: Any, mesh: Mesh) -> Any:
    def part(leaf: Any) -> Any:
        is_sequence = isinstance(leaf, torch.Tensor) and leaf.ndim > 1
        return shard_sequence(leaf, 1, mesh.cp_rank, mesh.cp_size) if is_sequence else leaf

    return map_leaves(part, batch)


def shard_prepared(prepared: Any, batch: Any) -> Any:
    """This rank's tokens of what ``prepare_batch`` made of full sequences, in each tensor that counts tokens.

    That is in dim 1 or later, or in dim 0 where it made a row of each token. A number for each row stays as it is.

    Args:
        prepared: what it made.
        batch: the batch with full sequences, which has a dim 1 of tokens.

    Raises:
        ValueError: if a tensor of more than one dim counts no tokens, or pairs of them, or they cannot be shared.
    """
    global _rows, _tokens
    mesh, n, tensors = get_mesh(), n_rows(batch), [tensor for tensor in tensors_of(prepared) if tensor.ndim > 1]
    length = next((tensor.shape[1] for tensor in tensors_of(batch) if tensor.ndim > 1), 0)
    dims = [_token_dim(tensor, n, length) for tensor in tensors]
    if tensors and set(dims) == {None}:  # prepare_batch has left some out, such as the last one of x and the first of y
        length = tensors[0].shape[1]
        dims = [_token_dim(tensor, n, length) for tensor in tensors]
    pairs = any(dim != 1 and list(t.shape[1:]).count(length) > 1 for dim, t in zip(dims, tensors, strict=True))
    if not tensors or None in dims or pairs:
        return shard_batch(prepared)  # which refuses it
    check_length(length, mesh.cp_size)
    _rows, _tokens = n, length // mesh.cp_size
    return shard_tokens(prepared, n, length)


def _token_dim(tensor: torch.Tensor, n: int, length: int) -> int | None:
    """Where a tensor of n rows counts their tokens: 0 if it has a row for each of them, None if nowhere."""
    if tensor.ndim and len(tensor) == n * length:  # first: there may be as many classes as tokens
        return 0
    return list(tensor.shape).index(length, 1) if length in tensor.shape[1:] else None


def shard_tokens(tree: Any, n: int, length: int) -> Any:
    """This rank's tokens of each tensor that counts those of n rows with ``length`` tokens."""
    mesh = get_mesh()

    def part(leaf: Any) -> Any:
        dim = _token_dim(leaf, n, length) if isinstance(leaf, torch.Tensor) else None
        if dim is None:
            return leaf
        if dim:
            return shard_sequence(leaf, dim, mesh.cp_rank, mesh.cp_size)
        return shard_sequence(leaf.unflatten(0, (n, length)), 1, mesh.cp_rank, mesh.cp_size).flatten(0, 1)

    return map_leaves(part, tree)


def full_rows(tree: Any) -> tuple[Any, int, int]:
    """Few rows with all their tokens, gathered from the cp ranks that share them, their number, and that of tokens.

    Args:
        tree: a tree of tensors for this rank's tokens of the last batch. One that does not count them stays as it is.
    """
    mesh = get_mesh()
    n = _n_counted(tree)
    few, length = min(n, _ROWS), _tokens * mesh.cp_size

    def full(leaf: Any) -> Any:
        dim = _token_dim(leaf, n, _tokens) if isinstance(leaf, torch.Tensor) else None
        if dim is None:
            return leaf[:few] if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == n else leaf
        rows = (local_tensor(leaf.detach()) if dim else leaf.detach().unflatten(0, (n, _tokens)))[:few]
        of_all = torch.cat(gathered(rows, mesh.cp_group), max(dim, 1))
        of_all = of_all.index_select(max(dim, 1), natural_order(length, mesh.cp_size, of_all.device))
        return of_all if dim else of_all.flatten(0, 1)

    return (map_leaves(full, tree) if few else tree), few, length


def _n_counted(tree: Any) -> int:
    """The rows of what was made of the last batch; 0 if none of its tensors counts tokens in a dim of their own."""
    counting = [tensor for tensor in tensors_of(tree) if _tokens in tensor.shape[1:]]
    if any(len(tensor) == _rows * _tokens for tensor in counting):  # a row of each token, and as many classes
        return _rows
    return len(counting[0]) if counting else 0


def two_halves(tree: Any, n: int | None = None) -> list[Any] | None:
    """A tree made of this rank's part of the last batch, in two halves of its tokens; None if it has no tokens.

    Args:
        tree: made of some rows.
        n: how many they are. Default: as many as its first tensor that counts tokens in a dim of their own has.
    """
    counted = _n_counted(tree)
    if not counted or _tokens < 2:
        return None
    n = n or counted

    def half(leaf: Any, part: slice) -> Any:
        dim = _token_dim(leaf, n, _tokens) if isinstance(leaf, torch.Tensor) else None
        if dim == 0:
            return leaf.unflatten(0, (-1, _tokens))[:, part].flatten(0, 1)
        return leaf if dim is None else leaf[(slice(None),) * dim + (part,)]

    parts = slice(_tokens // 2), slice(_tokens // 2, None)
    return [map_leaves(functools.partial(half, part=part), tree) for part in parts]


@contextlib.contextmanager
def tokens_kept() -> Iterator[None]:
    """Inside, other batches are read, as by an evaluator in a handler; afterwards, the last one is that of before."""
    global _tokens
    before = _tokens
    try:
        yield
    finally:
        _tokens = before


@contextlib.contextmanager
def full_sequences() -> Iterator[None]:
    """Inside, this process has all tokens of its sequences."""
    token = _FULL.set(True)
    try:
        yield
    finally:
        _FULL.reset(token)


def check_tokens(
    run: Callable[[Any], Any], x: Any, stages: Sequence[nn.Module], mesh: Mesh, in_full: bool = False
) -> tuple[int, str] | None:
    """Runs the model on short windows of rows twice, shared by the cp ranks and full on each of them.

    Every rank calls it. Random numbers, buffers and modes of the model are as before afterwards. It runs in evaluation
    mode, on four tokens of a window for each rank: what mixes tokens in training alone is not seen, nor what only
    reaches tokens farther away, but for convolutions, whose kernels tell, nor what mixes tokens only where a token is
    in none of the windows, such as the end of a document.

    Args:
        run: the forward pass.
        x: this rank's part of a batch.
        stages: this rank's stages.
        mesh: the mesh.
        in_full: whether to run it on rows in full instead. Default: False.

    Returns:
        tuple: the first module whose output depends on other tokens than it gets: its place among the calls, and its
        name; None if there is none.
    """
    norm = norm_over_rows(stages)  # which a pass in evaluation mode does not show
    if norm is not None:
        return 0, norm
    first = map_leaves(lambda leaf: _windows(leaf, mesh, in_full), x)
    if not any(tensor.ndim > 1 for tensor in tensors_of(first)):
        return None
    try:
        with WatchForSums() as watch:
            shared, full = _calls(run, first, stages, mesh)
    except UnlikeModules:
        return None
    except (AssertionError, IndexError, RuntimeError) as error:
        if mesh.pp_size == 1 and not in_full:  # perhaps it takes blocks of more tokens
            return check_tokens(run, x, stages, mesh, in_full=True)
        given = next(tensor for tensor in tensors_of(x) if tensor.ndim > 1)
        if given.shape[1] != _tokens:
            raise ValueError(
                "x should count the tokens of its sequences in dim 1 on a mesh with cp, but prepare_batch gives this "
                f"rank shape {tuple(given.shape)} for {_tokens} tokens of a row: transpose or flatten it in the model"
            ) from error
        raise
    length = next(tensor.shape[1] for tensor in tensors_of(first) if tensor.ndim > 1)
    for index, ((name, module, given, found), (*_, of_all, expected)) in enumerate(zip(shared, full, strict=False)):
        is_part = are_shards(found, expected, length, mesh, watch.coarsest)
        mixes = not is_part or _convolves_tokens(module, given, of_all)
        if are_shards(given, of_all, length, mesh, watch.coarsest) and mixes:
            return index, name
    return None


def length_matters(run: Callable[[Any], Any], x: Any, stages: Sequence[nn.Module], mesh: Mesh) -> bool:
    """Whether outputs for the tokens of one row in full are others than for this rank's part of them.

    A branch on the number of tokens does not show on short windows. Every rank calls it; False of a model that fails.
    """
    row = map_leaves(lambda leaf: _first_row(_windows(leaf, mesh, in_full=True)), x)
    lengths = [tensor.shape[1] for tensor in tensors_of(row) if tensor.ndim > 1]
    try:
        with torch.no_grad(), evaluating(stages), WatchForSums() as watch:
            with without_trace(stages), full_sequences():
                expected = [local_tensor(tensor).clone() for tensor in tensors_of(run(cloned(row)))]
            with without_trace(stages):
                found = [local_tensor(tensor) for tensor in tensors_of(run(_part(row, mesh)))]
            return bool(lengths) and not are_shards(found, expected, lengths[0], mesh, watch.coarsest)
    except (AssertionError, IndexError, RuntimeError, UnlikeModules):
        return False


def _calls(run: Callable[[Any], Any], x: Any, stages: Sequence[nn.Module], mesh: Mesh) -> tuple[list, list]:
    """The calls of modules with this rank's tokens, and with all."""
    with torch.no_grad(), evaluating(stages):
        with without_trace(stages), _recorded_calls(stages) as full, full_sequences():
            run(cloned(x))
        try:
            with without_trace(stages), _recorded_calls(stages) as shared:
                run(cloned(_part(x, mesh)))
        except (AssertionError, IndexError, RuntimeError) as error:
            error.add_note(
                f"{THIS_WAS_IN}a model that gets a cp rank's part of the tokens of a sequence: what needs all of them "
                "(a layer over tokens, a table as long as the sequence that is not indexed by ddl.sequence_positions) "
                "cannot run on a mesh with cp"
            )
            raise
    return shared, full


def _first_row(leaf: Any) -> Any:
    return leaf[:1] if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf


def _convolves_tokens(module: nn.Module, given: list[torch.Tensor], of_all: list[torch.Tensor]) -> bool:
    """Whether a kernel reaches other tokens, even if its weights are 0 or its reach is longer than the tokens here."""
    if not isinstance(module, _CONVOLUTIONS):
        return False
    dims = len(module.kernel_size)
    local_lengths, full = (tensors[0].shape[-dims:] for tensors in (given, of_all))
    return any(kernel > 1 and a < b for kernel, a, b in zip(module.kernel_size, local_lengths, full, strict=True))


def _windows(leaf: Any, mesh: Mesh, in_full: bool) -> Any:
    """Windows of the first rows, or these rows in full, gathered from the ranks that share them; each is a row.

    What numbers the tokens of each row (position ids) begins with 0 in each window, as ``sequence_positions`` does.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
        return leaf
    leaf, n = leaf[:_ROWS], 1 if in_full else _WINDOWS
    if leaf.ndim == 1:
        return leaf.repeat_interleave(n)
    full = torch.cat(gathered(leaf, mesh.cp_group), 1)
    full = full.index_select(1, natural_order(full.shape[1], mesh.cp_size, full.device))
    length = full.shape[1] if in_full else min(full.shape[1], 2 * mesh.cp_size * _CHUNK)
    numbers = full.ndim == 2 and bool((full == torch.arange(full.shape[1], device=full.device)).all())
    last = 0 if numbers else full.shape[1] - length
    places = [last * i // max(n - 1, 1) for i in range(n)]
    return torch.stack([full.narrow(1, place, length) for place in places], 1).flatten(0, 1)


@contextlib.contextmanager
def _recorded_calls(stages: Sequence[nn.Module]) -> Iterator[list[tuple[str, nn.Module, list, list]]]:
    """Notes the name, the inputs and the outputs of each module that ends its call inside."""
    notes: list[tuple[str, nn.Module, list, list]] = []
    handles = []
    for stage in stages:
        for name, module in stage.named_modules():

            def note(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                trees = ([local_tensor(t).clone() for t in tensors_of(tree)] for tree in ((args, kwargs), output))
                notes.append((name, module, *trees))

            handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        yield notes
    finally:
        for handle in handles:
            handle.remove()


def are_shards(
    some: list[torch.Tensor], full: list[torch.Tensor], length: int, mesh: Mesh, coarsest: float = 0.0
) -> bool:
    """Whether tensors are this rank's parts of others, along the dim that is longer there."""
    if len(some) != len(full):
        return False
    for part, expected in zip(some, full, strict=True):
        if part.ndim != expected.ndim:
            return False
        longer = [d for d in range(part.ndim) if expected.shape[d] != part.shape[d]]
        if longer:
            dim = longer[0]
            if len(longer) > 1 or expected.shape[dim] % length:
                return False
            sequences = expected.unflatten(dim, (-1, length))  # several, where rows and tokens are one dim
            expected = shard_sequence(sequences, dim + 1, mesh.cp_rank, mesh.cp_size)
            if expected.numel() != part.numel():  # such as the tokens of an expert
                return False
            expected = expected.reshape(part.shape)
        if differ(part, expected, coarsest) if part.is_floating_point() else not torch.equal(part, expected):
            return False
    return True
