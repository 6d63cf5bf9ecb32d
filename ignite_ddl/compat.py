"""Private names and repairs of torch and Ignite. Those of other files are listed here.

Tested with torch 2.11, 2.13 and 2.15 and Ignite 0.5.4 and 0.5.5 unless noted otherwise; README says what was run when.

======================================  ===============================================================
file                                    what it uses
======================================  ===============================================================
``compat.py``                           below
``parts.py``                            the dispatcher of DTensors, ``AsyncCollectiveTensor``, how optimizers and
                                        ``torch.nn.utils`` group lists
``comm_hooks.py``                       ``Reducer._get_zeros_like_grad_buckets``
``data.py``                             ``DataLoader._get_iterator``, an Ignite engine's ``_dataloader_iter``
``lent_row.py``                         ``torch.utils._pytree``, as most of the following
``collectives.py``                      ``distributed_c10d._get_default_store``
``checks/same_samples.py``              ``torch.utils._pytree``
``loss_contract.py``                    ``torch.utils._pytree``
``checks/loss_state.py``                ``torch.utils._pytree``
``checks/loss_graph.py``                the numbers of autograd's nodes
``checks/replicas.py``                  ``_NormBase``, ``nn.Module._non_persistent_buffers_set``,
                                        ``_forward_pre_hooks``, ``FSDPModule._get_fsdp_state``
``audit.py``                            ``torch.utils._pytree``
``checks/traceless.py``                 ``_NormBase``, ``nn.Module._buffers``, torch's dispatch mode, the ``_schema``
                                        of its operators
``checks/kept_state.py``                ``torch.utils._pytree``
``checks/rows_alone.py``                ``_NormBase``, ``torch.utils._pytree``
``checks/fingerprint.py``               ``nn.Module._parameters``, ``_modules``, ``Parameter._backward_hooks``
``checks/backward.py``                  ``nn.Module._backward_hooks``, ``_backward_pre_hooks``; a Function's node
                                        (``BackwardCFunction``) and its ``_forward_cls``
``checks/guards.py``                    ``Parameter._backward_hooks``
``step.py``                             ``torch._foreach_mul_``
``model.py``                            ``_ddp_params_and_buffers_to_ignore``, which DDP reads
``engine.py``                           of Ignite's Engine the order of handlers, ``_setup_dataloader_iter``,
                                        ``_dataloader_iter``, ``_fire_event``, ``_init_iter``,
                                        ``_internal_run_generator``
``supervised.py``                       Ignite's ``_prepare_batch``, the default of a public argument; of its Engine
                                        ``_dataloader_iter``
``state.py``                            ``DTensor.__create_chunk_list__``, the protocol of torch's DCP
``checkpoint/form.py``                  DCP's ``_StorageInfo``
``checkpoint/resume.py``                of Ignite's Engine ``_dataloader_iter``, ``_init_iter``, ``_is_done``,
                                        ``_internal_run_generator`` and ``_internal_run_as_gen``
``checkpoint/handler.py``               how Ignite's Checkpoint sets up its states and file names
``idist_view.py``                       idist's ``_model``, ``_NativeDistModel``: a group instead of the world
``metrics.py``                          idist's ``_model``; methods of Ignite's Metric
``pipeline/cut.py``                     ``nn.Module._forward_hooks``, ``_forward_pre_hooks``, ``_modules``
``pipeline/stage.py``                   ``PipelineStage``: its call of a stage, its backward pass and what it keeps for
                                        that, its first message; ``Tensor._backward_hooks``
``structure.py``                        ``torch.utils._pytree``
``pipeline/pipeline.py``                ``torch.utils._pytree``
``pipeline/local_stages.py``            ``torch.utils._pytree``
``pipeline/trace.py``                   ``torch.distributed.pipelining.Pipe._from_traced``, ``torch.utils._pytree``,
                                        ``nn.Module._backward_hooks``, ``_backward_pre_hooks``, a Function's node and
                                        its ``_forward_cls``, ``ShapeEnv._log_guard``, ``_NormBase``
``tensor/linear.py``                    ``ParallelStyle._apply``, which every style overrides, as in the next two
``tensor/sequence.py``                  and ``SequenceParallel._replicate_module_fn``
``tensor/inside.py``                    and ``nn``'s ``_NormBase``
``tensor/loss.py``                      ``DTensor._spec``
``lab/bytes.py``                        torch's dispatch mode, the names of its collectives' operators
``lab/timeline/watch.py``               process groups, ``Work``, DDP, pipeline stages, torch's dispatcher
``lab/timeline/timeline.py``            the order of an Ignite engine's handlers
``course/checks/ch14.py``               torch's dispatch mode
``launch/pickling.py``                  storages; a Tensor's ``_base``, ``_backward_hooks`` and
                                        ``_post_accumulate_grad_hooks``; autograd's ``DelayedError``
``course/machine.py``                   idist's ``_SerialModel``
``course/memory.py``                    ``torch.distributed._tools.mem_tracker.MemTracker``
``course/ranks.py``                     torch's dispatch mode
``course/tpu.py``                       Ignite's XLA classes, with torch_xla 2.7 to 2.9
``throughput.py``                       ``torch.utils._pytree``; an Ignite engine's ``_dataloader_iter``
``checks/mixing.py``                    ``torch.utils._pytree``
``checks/trying.py``                    torch's dispatch mode
``diagnose/calls.py``                   torch's flight recorder and its store, ``distributed_c10d._world``
``lab/parity.py``                       ``torch.utils._pytree``
======================================  ===============================================================
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ignite.distributed.comp_models.native import _NativeDistModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def replicate(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """torch's data parallelism for modules with DTensors and in pipelines; a private module, torch 2.11 to 2.13."""
    from torch.distributed._composable.replicate_with_fsdp import replicate  # a slow import

    return replicate(module, mesh=mesh)


def gathers(module: nn.Module) -> bool:
    """Whether FSDP2 gathers weights of this module before its forward pass; those of ``replicate`` are whole."""
    return isinstance(module, FSDPModule) and all(kind.__name__ != "ReplicateModule" for kind in type(module).__mro__)


def leaves_gradients(module: nn.Module) -> bool:
    """Whether DDP has not reduced gradients of a backward pass, in which some weights had none; private, torch 2.11 to
    2.15.
    """
    try:
        module._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh of one dim with the ranks of all dims of a mesh; private, torch 2.11 to 2.15."""
    return mesh._flatten(name)


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """What FSDP2 and ``replicate`` keep of the parameters of a unit; private, torch 2.11 to 2.15."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # the latter in 2.11
    return [group for group in groups if group is not None]


def use_usual_strides(buffers: Iterable[torch.Tensor]) -> None:
    """Lets DDP broadcast buffers of a dim of size 1 with an unusual stride, as of a transposed table of positions, and
    those whose numbers share memory, as of ``expand``.

    DDP copies into what it takes for the same memory, and torch refuses that (2.11 to 2.15).
    """
    for buffer in (one for one in buffers if one.layout is torch.strided):
        reaches = 1 + sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
        is_unusual = buffer.is_contiguous() and buffer.stride() != torch.empty(buffer.shape, device="meta").stride()
        if is_unusual or reaches < buffer.numel():
            buffer.data = buffer.detach().contiguous().flatten().view(buffer.shape)


def forget_forward_pass(root: nn.Module) -> None:
    """Lets FSDP2 and DDP begin anew after a pass that has failed, which leaves them as if they were still in it.

    They would not reduce gradients, gather in another order than on other ranks, or compute with weights gathered
    before. Gradients stay, as in one process; private, torch 2.11 to 2.15.
    """
    for module in root.modules():
        if isinstance(module, DistributedDataParallel) and leaves_gradients(module):
            UNREDUCED.add(root)
            module.reducer._reset_state()
            module.reducer._push_all_rebuilt_params()  # for new buckets: these are perhaps still being reduced
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            state._modules_to_run_forward.clear()
            for one in (state, *_fsdp_groups(module)):
                one._training_state = TrainingState.IDLE
            for group in _fsdp_groups(module):
                group.wait_for_unshard()  # of weights gathered ahead, the next pass's may be others
                group._wait_for_post_backward()
                group._post_forward_indices.clear()
                vars(group.comm_ctx).get("post_forward_order", []).clear()  # none before the first pass
            module.reshard()
    if any(unreduced for _, unreduced in local_gradients(root).values()):
        UNREDUCED.add(root)


def is_left_in_a_pass(unit: FSDPModule, forward: bool) -> bool:
    """Whether an error has ended a backward pass or, with ``forward``, a forward pass that has begun with this unit;
    private, torch 2.11 to 2.15. In a backward pass, autograd may run the forward pass again, and ends it by an error.
    """
    state, in_backward = unit._get_fsdp_state(), torch._C._current_graph_task_id() != -1
    context = state._state_ctx
    is_left = context.post_backward_final_callback_queued or (forward and context.iter_forward_root is state)
    return is_left and not in_backward


def _fsdp_parameters(model: nn.Module) -> dict[int, Any]:
    """What FSDP2 and ``replicate`` keep of each parameter, by its id."""
    groups = [group for module in model.modules() for group in _fsdp_groups(module)]
    return {id(one.sharded_param): one for group in groups for one in group.fsdp_params}


def replaced_parameter(unit: FSDPModule) -> tuple[nn.Module, str] | None:
    """A module and the name of a parameter in it that is not FSDP2's own, which FSDP2 is about to put there."""
    is_first = unit._get_fsdp_state()._is_root is None  # when FSDP2 takes the parameters of all units for its own
    groups = [group for part in (unit.modules() if is_first else [unit]) for group in _fsdp_groups(part)]
    for one in (one for group in groups if not group.is_unsharded for one in group.fsdp_params):
        info = one._module_info
        if info.module._parameters.get(info.param_name) is one.sharded_param and not info.shared_modules:
            continue  # what follows takes three times as long
        names = info.param_name, *info.shared_param_names
        for module, name in zip((info.module, *info.shared_modules), names, strict=True):
            held = module._parameters.get(name, one.sharded_param)
            if held is not one.sharded_param and held is not getattr(one, "_unsharded_param", None):
                return module, name
    return None


def held_by_fsdp(model: nn.Module) -> set[int]:
    """The ids of the parameters that FSDP2 or ``replicate`` holds."""
    return set(_fsdp_parameters(model))


def local_gradients(model: nn.Module) -> dict[int, tuple[torch.Tensor, bool]]:
    """This rank's gradients by id of the parameter, and whether FSDP2 or ``replicate`` has still to reduce them."""
    found = {id(p): (p.grad, False) for p in model.parameters() if p.grad is not None}
    for key, one in _fsdp_parameters(model).items():
        gradient = one.unsharded_accumulated_grad
        if gradient is None:
            gradient = getattr(getattr(one, "_unsharded_param", None), "grad", None)
        if gradient is not None:
            found[key] = gradient, True
    return found


def set_local_gradients(
    model: nn.Module, gradients: Mapping[int, tuple[torch.Tensor, Sequence[Any] | None, bool]]
) -> None:
    """Sets what :func:`local_gradients` found: local tensors, placements of DTensors, and whether to reduce them."""

    def as_gradient(local: torch.Tensor, of: torch.Tensor, placements: Sequence[Any] | None) -> torch.Tensor:
        local = local.to(of.device)
        if placements is None:
            return local
        return DTensor.from_local(
            local, of.device_mesh, placements, run_check=False, shape=of.shape, stride=of.stride()
        )

    for parameter in model.parameters():
        local, placements, unsharded = gradients.get(id(parameter), (None, None, False))
        parameter.grad = None if local is None or unsharded else as_gradient(local, parameter, placements)
    if any(unsharded for _, _, unsharded in gradients.values()):
        UNREDUCED.add(model)
        for module in model.modules():  # torch makes the unsharded parameters when it first gathers
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()
    for key, one in _fsdp_parameters(model).items():
        parameter = getattr(one, "_unsharded_param", None)
        if parameter is None:
            continue
        local, placements, unsharded = gradients.get(key, (None, None, False))
        gradient = as_gradient(local, parameter, placements) if unsharded else None
        if isinstance(getattr(type(one), "unsharded_accumulated_grad", None), property):  # torch 2.15
            parameter.grad = gradient
        else:
            parameter.grad, one.unsharded_accumulated_grad = None, gradient


UNREDUCED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose last backward pass has left gradients so


def zero_unreduced_gradients() -> None:
    """Lets ``zero_grad`` of optimizers and modules reach gradients that FSDP2 or ``replicate`` has still to reduce:
    torch keeps them elsewhere, and adds them to those of the next backward pass.
    """
    for kind, parameters_of in (torch.optim.Optimizer, _stepped), (nn.Module, nn.Module.parameters):
        if not hasattr(kind.zero_grad, "_reaches_unreduced"):
            kind.zero_grad = _reaching_unreduced(kind.zero_grad, parameters_of)


def _stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _reaching_unreduced(zero_grad: Callable, parameters_of: Callable) -> Callable:
    @functools.wraps(zero_grad)
    def reaching(owner: Any, set_to_none: bool = True) -> None:
        zero_grad(owner, set_to_none)
        ids = set(map(id, parameters_of(owner))) if UNREDUCED else ()
        models = list(UNREDUCED)
        for key, one in (pair for model in models for pair in _fsdp_parameters(model).items()):
            unsharded = getattr(one, "_unsharded_param", None)
            if unsharded is None or ids.isdisjoint((key, id(unsharded))):
                continue
            for gradient in (unsharded.grad, one.unsharded_accumulated_grad):
                if gradient is not None and not set_to_none:
                    gradient.zero_()
            if set_to_none:
                unsharded.grad = None  # in torch 2.15 this is the other, too
                if one.unsharded_accumulated_grad is not None:
                    one.unsharded_accumulated_grad = None
        UNREDUCED.difference_update([model for model in models if not local_gradients(model)])

    reaching._reaches_unreduced = True
    return reaching


@contextlib.contextmanager
def quiet_redistribution() -> Iterator[None]:
    """Silences a message that every rank logs for each weight that is cut by both tp and FSDP."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def quiet_warnings() -> None:
    """Filters warnings of torch that a user cannot avoid; called on ranks only."""
    for message in (
        "FSDP2-wrapped module .* returned a view tensor",  # a DTensor's local part is a view; it is not changed
        ".*alltoall.*gloo.*",  # DTensor then uses another collective
        "While redistributing from .* sequentially",
    ):
        warnings.filterwarnings("ignore", message=message)


def called_by_ignites_checkpoint() -> bool:
    """Whether Ignite's Checkpoint, which offers no hook, is among the callers of the function that calls this one."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("ignite_ddl.checkpoint") or name == "ignite_ddl.state":  # ddl.Checkpoint is one of Ignite's
            return False
        if name == "ignite.handlers.checkpoint":
            return True
        frame = frame.f_back
    return False


def allow_empty_parameter_lists() -> None:
    """Lets torch's optimizers take an empty list: a stage may have none of the parameters that a script optimizes."""
    init = torch.optim.Optimizer.__init__
    if hasattr(init, "_allows_empty_lists"):
        return

    @functools.wraps(init)
    def allowing(optimizer: torch.optim.Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        given = params if isinstance(params, torch.Tensor) else list(params) or [{"params": []}]
        init(optimizer, given, *args, **kwargs)

    allowing._allows_empty_lists = True
    torch.optim.Optimizer.__init__ = allowing


def keep_missing_gradients() -> None:
    """Lets FSDP2 pass on that an input of a module has no gradient, in place of zeros, on which weight decay acts;
    private, torch 2.11 to 2.15.
    """
    kind = dist.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction
    name = "setup_context" if "setup_context" in vars(kind) else "forward"
    begin = getattr(kind, name)
    if hasattr(begin, "_keeps_missing"):
        return

    def keeping(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        return begin(ctx, *args)

    keeping._keeps_missing = True
    setattr(kind, name, staticmethod(keeping))


BELONGS_TO_A_MODEL = "_belongs_to_a_model"  # on a parameter from ddl.auto_model: whether its gradient is reduced


def quiet_shape_errors() -> None:
    """Torch logs a shape error of DTensors with thirty lines of its own traceback before it raises the same error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    if _no_shape_errors not in logger.filters:
        logger.addFilter(_no_shape_errors)


def _no_shape_errors(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


def keep_sparse_gradients_apart(model: nn.Module) -> None:
    """DDP divides a sparse gradient in place, whose values may be those that autograd goes on with: it gets copies."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            module.weight.register_hook(_own_values)


def _own_values(gradient: torch.Tensor) -> torch.Tensor | None:
    return gradient.clone() if gradient.is_sparse else None


_own_values.__torch_unserializable__ = True  # type: ignore[attr-defined]  # of which torch does not warn


def newest_node() -> int:
    """A number of autograd's nodes: each node that is made from now on has at least this one."""
    return torch._C._autograd._get_sequence_nr()


def without_dispatch_modes() -> contextlib.AbstractContextManager:
    """Inside, the caller's dispatch modes, which count bytes, memory or operations, are off."""
    return torch.utils._python_dispatch._disable_current_modes()


def no_transforms() -> contextlib.AbstractContextManager:
    """Inside, the transforms of torch.func, such as vmap, are off."""
    return torch._C._DisableFuncTorch()


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with which torch.func computes outside of its transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def unsharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that FSDP2 computes with, in place of those that the optimizer steps."""
    return [one._unsharded_param for one in _fsdp_parameters(module).values() if hasattr(one, "_unsharded_param")]


def gathered_parameters(unit: FSDPModule) -> list[nn.Parameter]:
    """The same of this unit alone, without those inside it."""
    held = [one for group in _fsdp_groups(unit) for one in group.fsdp_params]
    return [one._unsharded_param for one in held if hasattr(one, "_unsharded_param")]


def address_for_ignite(init_method: str, rank: int, world_size: int) -> str:
    """An address that Ignite cannot mistake for "env://".

    Ignite passes the rank to torch only if the address does not contain "env", which the name of a folder may contain
    (one in eight thousand random names). In that case, the rank and the world size are added to the address itself.
    """
    if init_method.startswith("env") or "env" not in init_method or "rank=" in init_method:
        return init_method
    return f"{init_method}{'&' if '?' in init_method else '?'}rank={rank}&world_size={world_size}"


def set_nproc_per_node(nproc: int) -> None:
    """Sets idist's number of ranks a machine, to compute which it would make and destroy a process group (30 ms)."""
    _NativeDistModel._compute_nproc_per_node = lambda model: nproc


@contextlib.contextmanager
def hide_slurm_under_torchrun() -> Iterator[None]:
    """Hides Slurm's job from idist where torchrun, itself started by srun, has set each rank's variables.

    idist takes srun's tasks for the ranks, but srun starts one task a machine, torchrun, which starts all ranks there.
    """
    under_torchrun = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    job = os.environ.pop("SLURM_JOB_ID", None) if under_torchrun else None
    try:
        yield
    finally:
        if job is not None:
            os.environ["SLURM_JOB_ID"] = job


def use_world_timeout(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Gives a group the time-out of the world and returns it: torch gives every new group its default, 30 minutes."""
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):  # a backend without time-outs
            timeout = dist.group.WORLD._get_backend(device).options._timeout
            group._get_backend(device)._set_default_timeout(timeout)
    return group
