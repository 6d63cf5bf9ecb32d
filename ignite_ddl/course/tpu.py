"""Repairs of Ignite 0.5.5 for torch_xla 2.7 to 2.9, on which chapter 03 runs; the package wants a newer torch.

``import ignite_ddl.course`` calls :func:`repair_ignite`. Without torch_xla, and with a torch_xla older than 2.7, it
imports nothing and changes nothing. With it, five methods of Ignite's private XLA classes are replaced:

- ``get_rank`` and ``get_world_size`` call ``xm.get_ordinal`` and ``xm.xrt_world_size``, which torch_xla 2.7
  removed; ``torch_xla.runtime`` has both.
- ``spawn`` passes ``nproc_per_node`` to ``xmp.spawn``, which accepts only 1, or None for a process on each device.
- ``_XLADistributedOptimizer.__init__``, used by ``idist.auto_optim``, raises ``TypeError: super(type, obj)``, because
  Ignite copies its methods into another class, while ``super()`` refers to the first. The replacement also makes
  wrapper and optimizer share their groups and their state, before and after ``load_state_dict``.
- ``create_from_context`` detects an XLA job whenever torch_xla can be imported, also in gloo jobs and plain processes.
  The replacement does so only after this process has used an XLA device, or ``idist.initialize("xla-tpu")``.

Delete :func:`repair_ignite` when the oldest supported Ignite runs with torch_xla 2.9, or when the course no longer
runs on torch_xla: 2.9 is its last release, torch_tpu its successor. tests/course/test_xla.py shows each failure without
the repair, and fails when a repair is no longer needed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

__all__ = ["repair_ignite"]


def repair_ignite() -> bool:
    """Makes Ignite run on torch_xla 2.7 to 2.9; without it, does nothing. A second call changes nothing.

    Returns:
        bool: whether Ignite was repaired, that is, whether a torch_xla that needs it is installed.

    Examples:
        .. code-block:: python

            from importlib.util import find_spec

            from ignite_ddl.course.tpu import repair_ignite

            assert find_spec("torch_xla") or not repair_ignite()
    """
    if importlib.util.find_spec("torch_xla") is None:
        return False
    from ignite.distributed.comp_models import xla

    if not xla.has_xla_support or hasattr(xla.xm, "xrt_world_size"):
        return False
    from ignite.distributed import auto

    model = xla._XlaDistModel
    model.get_rank = _get_rank
    model.get_world_size = _get_world_size
    model.spawn = staticmethod(_spawn)
    model.create_from_context = staticmethod(_create_from_context)
    auto._XLADistributedOptimizer.__init__ = _wrap_optimizer
    return True


# ------------------------------------------------------------------------- methods for Ignite's XLA classes


def _get_rank(model: Any) -> int:
    import torch_xla.runtime as xr

    return xr.global_ordinal()


def _get_world_size(model: Any) -> int:
    import torch_xla.runtime as xr

    return xr.world_size()


def _create_from_context() -> Any:
    import torch_xla
    from ignite.distributed.comp_models.xla import _XlaDistModel

    # As _NativeDistModel checks torch.distributed.is_initialized(). An installed torch_xla is not enough.
    return _XlaDistModel() if torch_xla._XLAC._xla_runtime_is_initialized() else None


def _spawn(
    fn: Any,
    args: tuple,
    kwargs_dict: Any = None,
    nproc_per_node: int = 1,
    nnodes: int = 1,
    node_rank: int = 0,
    backend: str = "xla-tpu",
    **kwargs: Any,
) -> None:
    import torch_xla.distributed.xla_multiprocessing as xmp

    kwargs.setdefault("start_method", "fork")
    # Not checked here: counting devices initialises the runtime, and then no process can be started.
    args = (nproc_per_node, backend, fn, args, kwargs_dict or {})
    xmp.spawn(_worker, args=args, nprocs=1 if nproc_per_node == 1 else None, **kwargs)


def _worker(rank: int, nproc: int, backend: str, fn: Any, args: tuple, kwargs_dict: dict) -> None:
    import torch_xla.runtime as xr
    from ignite.distributed.comp_models.xla import _XlaDistModel

    if nproc not in (1, xr.local_device_count()):
        raise ValueError(
            f"nproc_per_node should be 1 or the number of XLA devices here, {xr.local_device_count()}, "
            f"but given {nproc}"
        )
    _XlaDistModel._dist_worker_task_fn(rank, backend, fn, args, kwargs_dict)


def _wrap_optimizer(self: Any, optimizer: torch.optim.Optimizer) -> None:
    # type(self) is made by auto_optim as a subclass of the optimizer's class.
    super(type(self), self).__init__(optimizer.param_groups)
    self.wrapped_optimizer = optimizer
    self.param_groups = optimizer.param_groups  # else add_param_group would add to the wrapper alone
    self.state = optimizer.state  # else a checkpoint would hold no momentum
    self.register_load_state_dict_post_hook(_share_state)  # load_state_dict makes new dicts


def _share_state(wrapper: Any) -> None:
    wrapper.wrapped_optimizer.state = wrapper.state
    wrapper.wrapped_optimizer.param_groups = wrapper.param_groups
