"""Whether ranks that should hold the same weights and buffers do: a digest of each, compared over dp, tp and pp."""

from __future__ import annotations

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.mesh import get_mesh
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.state import local_state

__all__ = ["check_replicas", "dp_local_statistics"]

_CUDA_TOLERANCE = 0.01  # over tp: its kernels may add in another order on each rank; not run on several GPUs yet


def check_replicas(model: nn.Module) -> None:
    """Raises a ValueError if weights or buffers differ on ranks that should hold the same; every rank calls it.

    Compared are copies over dp, what is replicated over tp, and weights that stages share. BatchNorm's running
    statistics are those of a dp rank's own rows until the next forward pass, and are left out over dp. A digest is the
    sum and the sum of absolute values, in float64: equal to the last bit on a CPU.

    Args:
        model: what ``ddl.auto_model`` returned, or a plain module that each rank has.
    """
    mesh = get_mesh()
    if mesh.world_size == 1:
        return
    tensors, _, _ = local_state(model)
    _compare_caches(model, tensors)
    left_out = dp_local_statistics(model)
    for axis, group in (("dp", mesh.dp_group), ("tp", mesh.tp_group)):
        if mesh.sizes[axis] > 1:
            alike = {
                name: tensor
                for name, tensor in tensors.items()
                if not _is_cut(tensor, axis) and not (axis == "dp" and id(tensor) in left_out)
            }
            _compare(list(alike), [_digest(tensor) for tensor in alike.values()], axis, group)
    shared = stages_of(model).shared_names()
    if shared:
        held = [[_digest(tensors[name]) for name in names if name in tensors] for names in shared]
        for names, digests in zip(shared, held, strict=True):
            if any(not torch.equal(digest, digests[0]) for digest in digests[1:]):
                _raise(names[0], "pp")
        nowhere = torch.full((2,), torch.nan, dtype=torch.float64, device=idist.device())
        _compare([names[0] for names in shared], [d[0] if d else nowhere for d in held], "pp", mesh.pp_group)


def _compare_caches(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Buffers that are not saved: a rank may have made some, or longer ones, so they are compared by name and shape."""
    mesh, known = get_mesh(), {id(tensor) for tensor in saved.values()}
    caches = {name: b for name, b in model.named_buffers() if id(b) not in known} if mesh.dp_size > 1 else {}
    if not any(True for module in model.modules() if module._non_persistent_buffers_set):
        return
    digests = {(name, tuple(b.shape)): _digest(b).tolist() for name, b in caches.items()}
    peers: list[dict] = [{} for _ in range(mesh.dp_size)]
    dist.all_gather_object(peers, digests, group=mesh.dp_group)
    for key in digests:
        if any(str(peer.get(key, digests[key])) != str(digests[key]) for peer in peers):
            _raise(key[0], "dp")


def dp_local_statistics(model: nn.Module) -> set[int]:
    """The ids of tensors that differ between dp ranks by a stated rule: running statistics, DDP's ignored ones."""
    found = {id(b) for m in model.modules() if isinstance(m, _NormBase) for b in m.buffers(recurse=False)}
    if isinstance(model, DistributedDataParallel):
        ignored = model.parameters_to_ignore
        named = [*model.module.named_parameters(), *model.module.named_buffers()]
        found |= {id(tensor) for name, tensor in named if name in ignored}
    return found


def _is_cut(tensor: torch.Tensor, axis: str) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return any(name == axis and not p.is_replicate() for name, p in zip(names, tensor.placements, strict=True))


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    local = torch.view_as_real(local) if local.is_complex() else local
    local = local if local.is_floating_point() else local.double()
    total, size = local.sum(dtype=torch.float64), torch.linalg.vector_norm(local, 1, dtype=torch.float64)
    return torch.stack([total, size]).to(idist.device())


def _compare(names: list[str], digests: list[torch.Tensor], axis: str, group: dist.ProcessGroup) -> None:
    if not names:
        return
    here = torch.stack(digests)
    peers = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(peers, here, group=group)
    peers = torch.stack(peers).cpu()  # (ranks, names, 2); NaN where a stage does not hold the weight
    tolerance = _CUDA_TOLERANCE if axis == "tp" and here.device.type == "cuda" else 0.0
    for name, values in zip(names, peers.unbind(1), strict=True):
        known = values if axis != "pp" else values[~values.isnan().any(dim=1)]
        same = torch.isclose(known, known[:1], rtol=tolerance, atol=0.0, equal_nan=True)
        if len(known) and not same.all():
            _raise(name, axis)


def _raise(name: str, axis: str) -> None:
    raise ValueError(
        f"{name!r} should be the same on all {axis} ranks, but differs: after ddl.auto_model, something has changed it "
        "on each rank in its own way, such as an initialisation with a seed of each rank, nn.Embedding(max_norm=), a "
        "buffer that forward computes from its own rows, or other options of the optimizer. Do it before "
        "ddl.auto_model, or alike on all ranks; ddl.check_in_sync(model) names all that differ"
    )
