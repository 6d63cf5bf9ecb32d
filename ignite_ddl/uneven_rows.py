"""Steps of loops that average over ranks with unlike numbers of rows: refused, or warned of."""

from __future__ import annotations

import warnings
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.distributed import DistributedSampler

from ignite_ddl.compat import BELONGS_TO_A_MODEL
from ignite_ddl.mesh import get_mesh

_uneven_loader: weakref.ref[Any] | None = None  # of the last batch of loops, if its rows are uneven
# Open loops whose last batch was uneven: its rows, and whether it was read to be trained on, not under torch.no_grad().
_uneven_loops: WeakKeyDictionary[Any, tuple[tuple[int, int], bool]] = WeakKeyDictionary()
_is_watching = False


def watch_optimizer_steps(of_loop: Any) -> None:
    """Refuses a step, in this loop, of an average over ranks that is not the average over rows; after it, warns."""
    global _is_watching, _uneven_loader
    for left in [loop for loop in _uneven_loops if loop.was_left]:  # and kept, as beside a list of its batches
        del _uneven_loops[left]
    is_uneven = of_loop.rows[1] % get_mesh().dp_size != 0
    _uneven_loader = weakref.ref(of_loop.loader) if is_uneven else None
    if is_uneven:
        _uneven_loops[of_loop] = of_loop.rows, torch.is_grad_enabled()
    else:
        for looked_at in [loop for loop, (_, is_trained_on) in _uneven_loops.items() if not is_trained_on]:
            del _uneven_loops[looked_at]
    if is_uneven and not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_refuse_uneven_rows)


def _refuse_uneven_rows(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if any(hasattr(p, BELONGS_TO_A_MODEL) for group in optimizer.param_groups for p in group["params"]):
        cure = (
            "let ddl.create_supervised_trainer, or ddl.forward_backward in a ddl.MeshEngine, compute them, take a "
            "batch_size and drop_last=True by which all ranks have the same number of rows, or weight each rank's loss "
            "by loader.rows (once it has been read, this is not checked); read batches that are not trained on under "
            "torch.no_grad()"
        )
        used = {rows for loop, (rows, _) in _uneven_loops.items() if loop.loader._rows_are_used}
        if unused := {rows for loop, (rows, _) in _uneven_loops.items() if not loop.loader._rows_are_used} - used:
            raise ValueError(_not_the_average(max(unused), cure))
        warn_of_uneven_rows(cure)


def _not_the_average(rows: tuple[int, int], cure: str) -> str:
    return (
        f"this rank has {rows[0]} of the batch's {rows[1]} rows, so the average of gradients over ranks is not that of "
        f"one process, which counts each row once: {cure}"
    )


def forget_uneven_rows() -> None:
    """Says that the rows of the last batch were counted in a step."""
    global _uneven_loader
    _uneven_loader = None
    _uneven_loops.clear()


def warn_of_padded_rows(loader: Any) -> None:
    """Warns of a DistributedSampler (``idist.auto_dataloader``) that reads rows twice or leaves some out."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.total_size != len(sampler.dataset):
        warnings.warn(
            f"a {type(sampler).__name__} makes {sampler.total_size} rows of {len(sampler.dataset)}, so that some count "
            "twice, or not at all, and the numbers are not those of one process: take ddl.auto_dataloader, which adds "
            "and drops nothing",
            stacklevel=4,
        )


def warn_of_uneven_rows(cure: str, counted: int | None = None) -> None:
    """Warns once if ranks have unlike numbers of rows of the batch that was read last, and nothing weights them.

    Args:
        cure: what to do.
        counted: how many rows this rank has been said to have. Default: not said.
    """
    loader = _uneven_loader and _uneven_loader()
    if loader is not None and not loader._rows_are_used and loader._rows[0] != counted:
        loader._rows_are_used = True
        warnings.warn(_not_the_average(loader._rows, cure), stacklevel=3)
