"""Whether ranks that should hold the same weights and buffers do: a digest of each, compared over dp, tp and pp; and
whether FSDP2 would lose what a forward pass changes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.checks.kept_state import is_dense
from ignite_ddl.collectives import gathered, gathered_values, octets, on_any_rank
from ignite_ddl.compat import unsharded_parameters
from ignite_ddl.data_parallel import local_round, share_buffers
from ignite_ddl.mesh import get_mesh
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.state import local_state
from ignite_ddl.structure import local_tensor
from ignite_ddl.tensor.gradients import is_cut

_CUDA_TOLERANCE = 0.01  # over tp: its kernels may add in another order on each rank; not run on several GPUs yet
_CHUNK = 2**16  # words that are summed at once, so that large weights need little extra memory


def check_replicas(model: nn.Module) -> None:
    """Raises a ValueError if weights or buffers differ on ranks that should hold the same; every rank calls it.

    Compared are copies over dp, what is replicated over tp, and weights that stages share. BatchNorm's running
    statistics are those of a dp rank's own rows until the next forward pass, and are left out over dp; so is all of a
    model that is in the middle of a round of local steps. On a CPU they have to be equal to the last bit.

    Args:
        model: what ``ddl.auto_model`` returned, or a plain module that each rank has.
    """
    mesh = get_mesh()
    if mesh.world_size == 1:
        return
    found = list(_differences(model))[:1]
    one_group = mesh.world_size in (mesh.dp_size, mesh.tp_size) and mesh.ep_size == 1 and not mesh.hybrid
    if bool(found) if one_group else on_any_rank(bool(found)):  # another group's is not known here
        name, axis = next(of_rank[0] for of_rank in gathered_values(found) if of_rank)
        raise ValueError(
            f"{name!r} should be the same on all {axis} ranks, but differs: after ddl.auto_model, something has "
            "changed it on each rank in its own way, such as an initialisation with a seed of each rank, "
            "a moving average that one rank alone updates, nn.Embedding(max_norm=), a buffer that forward computes "
            "from its own rows, or other options of the optimizer. Do it before ddl.auto_model, or alike on all ranks; "
            "ddl.check_in_sync(model) names all that differ"
        )


def make_alike_for_evaluation(model: nn.Module, checks: bool) -> None:
    """Gives dp ranks the running statistics of dp rank 0, as DDP does before a forward pass; every rank calls it.

    A copy of a model, such as a moving average, has no DDP that would, and an evaluation would mix several models.

    Args:
        model: what is evaluated.
        checks: whether to compare weights and buffers, too.

    Raises:
        ValueError: if weights or buffers differ on ranks that should hold the same.
    """
    norms = nn.ModuleList(module for module in model.modules() if isinstance(module, _NormBase))
    share_buffers(norms, get_mesh())
    if checks:
        check_replicas(model)


def _differences(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names that differ on ranks of this rank's groups, and over which axis; each rank iterates over all."""
    mesh = get_mesh()
    tensors, _, _ = local_state(model)
    local = local_round(model)
    in_a_round = local is not None and local.steps > 0
    if not in_a_round:
        yield from _compare_caches(model, tensors)
    left_out = dp_local_statistics(model)
    for axis in ("dp", *(["dp_replicate"] * mesh.hybrid), *(["edp"] * (mesh.ep_size > 1)), "tp"):
        group = mesh.dp_cp_group if axis == "dp" else mesh.groups[axis]
        if dist.get_world_size(group) > 1 and not (axis != "tp" and in_a_round):
            copies = {name: tensor for name, tensor in tensors.items() if _is_copied(tensor, axis, left_out)}
            yield from _compare(copies, axis, group)
    shared: dict[str, torch.Tensor | None] = {}
    for names in stages_of(model).shared_names():
        held = [tensors[name] for name in names if name in tensors]
        if len({digest(tensor) for tensor in held}) > 1:
            yield names[0], "pp"
        shared[names[0]] = held[0] if held else None
    yield from _compare(shared, "pp", mesh.pp_group)


def _is_copied(tensor: torch.Tensor, axis: str, left_out: set[int]) -> bool:
    """Whether ranks on this axis hold the same tensor, which is not compared over another one."""
    if is_cut(tensor, axis):
        return False
    if axis == "dp":
        return id(tensor) not in left_out
    if axis in ("dp_replicate", "edp"):  # the others have been compared over dp
        return is_cut(tensor, "dp") and (axis != "edp" or "ep" in tensor.device_mesh.mesh_dim_names)
    return True


def _compare_caches(model: nn.Module, saved: dict[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Buffers that are not saved: a rank may have made some, or longer ones, so they are compared by name and shape."""
    mesh, known = get_mesh(), {id(tensor) for tensor in saved.values()}
    caches = {name: b for name, b in model.named_buffers() if id(b) not in known} if mesh.dp_size > 1 else {}
    if not any(True for module in model.modules() if module._non_persistent_buffers_set):
        return
    digests = {(name, tuple(b.shape)): digest(b) for name, b in caches.items()}
    peers = gathered_values(digests, mesh.dp_group)  # cp peers may keep something of their own positions
    for key in digests:
        if any(peer.get(key, digests[key]) != digests[key] for peer in peers):
            yield key[0], "dp"


def dp_local_statistics(model: nn.Module) -> set[int]:
    """The ids of tensors that differ between dp ranks by a stated rule: running statistics, DDP's ignored ones."""
    found = {id(b) for m in model.modules() if isinstance(m, _NormBase) for b in m.buffers(recurse=False)}
    if isinstance(model, DistributedDataParallel):
        ignored = model.parameters_to_ignore
        named = [*model.module.named_parameters(), *model.module.named_buffers()]
        found |= {id(tensor) for name, tensor in named if name in ignored}
    return found


def digest(tensor: torch.Tensor) -> int:
    """64 bits that depend on each bit of what this rank holds, and on its place; the same for any number of threads.

    It is 0 of a sparse, nested or quantized tensor, whose numbers are not in one place.
    """
    if not is_dense(tensor):
        return 0
    held = octets(local_tensor(tensor))
    if held.storage_offset() % 8:  # where words of 8 octets cannot begin
        held = held.clone()
    n_words, n_rest = divmod(len(held), 8)
    odd = _odd_numbers(held.device)
    chunks = held[: n_words * 8].view(torch.int64).split(_CHUNK) if n_words else ()
    sums = [(words * odd[: len(words)]).sum() for words in chunks]
    if n_rest:
        sums.append((held[n_words * 8 :] * odd[:n_rest]).sum())
    total = 0 if not sums else sums[0]
    for chunk in sums[1:]:
        total = total * 31 + chunk
    return int(total)


@functools.lru_cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    """Factors of a digest's words: odd, so that no change is lost."""
    return torch.arange(1, 2 * _CHUNK, 2, device=device)


@contextlib.contextmanager
def lost_changes(stages: Iterable[nn.Module], found: list[str]) -> Iterator[None]:
    """Adds to ``found`` the names of weights that FSDP2 gathers for forward passes inside, and that these change."""
    handles, before = [], {}

    def digests(module: nn.Module) -> dict[str, int]:
        gathered = {id(p) for p in unsharded_parameters(module) if p.untyped_storage().size()}
        return {name: digest(p) for name, p in module.named_parameters() if id(p) in gathered}

    def note(module: nn.Module, *_: Any) -> None:
        before[module] = digests(module)

    def compare(module: nn.Module, *_: Any) -> None:
        after, was = digests(module), before.pop(module, {})
        found.extend(name for name in after if name in was and after[name] != was[name])

    for module in (module for stage in stages for module in stage.modules() if isinstance(module, FSDPModule)):
        hooks = module._forward_pre_hooks
        of_fsdp = [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is module._get_fsdp_state()]
        later = list(hooks)[list(hooks).index(of_fsdp[0]) + 1 :] if of_fsdp else []  # than FSDP2's, which gathers
        handles += module.register_forward_pre_hook(note), module.register_forward_hook(compare, prepend=True)
        for key in later:  # the user's hooks may change weights, too
            hooks.move_to_end(key)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compare(
    tensors: Mapping[str, torch.Tensor | None], axis: str, group: dist.ProcessGroup
) -> Iterator[tuple[str, str]]:
    """The names that differ, with the axis; None of what is not on this rank."""
    if not tensors:
        return
    numbers = [[0, 0] if t is None else [local_tensor(t).numel(), digest(t)] for t in tensors.values()]
    local_digests = torch.tensor(numbers, device=idist.device())
    of_names = torch.stack(gathered(local_digests, group), 1).tolist()
    for (name, tensor), of_ranks in zip(tensors.items(), of_names, strict=True):
        held = {pair for pair in map(tuple, of_ranks) if pair[0]}  # FSDP2 does not cut a stage that is all frozen
        differs = len(held) > len({size for size, _ in held})
        if differs and not (axis == "tp" and local_digests.device.type == "cuda" and _nearly_equal(tensor, group)):
            yield name, axis


def _nearly_equal(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    peers = gathered(local_tensor(tensor).detach().to(idist.device()), group)  # offloaded weights are not there
    first = peers[0].double()
    return all((peer.double() - first).norm() <= _CUDA_TOLERANCE * first.norm() for peer in peers)
