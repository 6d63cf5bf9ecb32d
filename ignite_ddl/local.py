"""Training that averages weights over dp after rounds of local steps: local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import nn
from torch.distributed.tensor import DTensor

from ignite_ddl.arguments import COUNT, FUNCTION, MODULE, OPTIMIZER, a, takes
from ignite_ddl.checkpoint.per_rank import row_order
from ignite_ddl.data_parallel import local_round, share_buffers
from ignite_ddl.engine import MeshEngine
from ignite_ddl.mesh import get_mesh
from ignite_ddl.optim import adapt_optimizer
from ignite_ddl.pipeline.local_stages import stages_of
from ignite_ddl.state import local_state
from ignite_ddl.structure import local_tensor


class LocalSGD:
    """Averages the weights of dp ranks every ``H`` optimizer steps, which each rank makes for itself.

    The model is made with ``ddl.auto_model(..., dp_sync="local")``. In a round, a rank's gradient is that of the mean
    loss of its own rows; the average at its end is weighted by what the ranks' losses divided by in the round, such as
    rows. With ``H=1`` and SGD without momentum this is the training of one process; with ``H > 1``, with momentum or
    with AdamW it is another algorithm, whose numbers depend on the number of dp ranks (Stich 2019, arXiv:1805.09767).
    A rank without rows in a step makes it with gradients of zeros. A loss that is a sum is refused. On a mesh with
    ``dp_replicate`` and ``dp_shard``, a replica trains as one rank: its dp_shard peers share weights by FSDP2, and the
    average goes over dp_replicate.

    In a round each step sends over dp the few numbers of the global loss, which the trainer returns as ever, and the
    overflow flag of a GradScaler: where a gradient of one rank is not finite, all skip the step, so that each has made
    the same number of steps at the end of a round. Clipping goes by the norm of a dp rank. The optimizer's state stays
    with its rank. BatchNorm's running statistics are those of dp rank 0 from the end of a round. The end of a run ends
    its round.

    The evaluator and ``ddl.full_state_dict`` are refused in the middle of a round. A checkpoint there holds the average
    of the weights as the model; put this object into ``to_save``, which holds what is each rank's own, also at the end
    of a round. On another mesh, leave it out of ``to_load``: a round begins there, with dp rank 0's optimizer state.

    Args:
        H: optimizer steps per round.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def training(local_rank):
                torch.manual_seed(0)
                data = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
                model = ddl.auto_model(torch.nn.Linear(3, 1), dp_sync="local")
                optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
                trainer = ddl.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
                ddl.LocalSGD(H=2).attach(trainer, model, optimizer)
                trainer.run(ddl.auto_dataloader(data, batch_size=4))
                return model.weight.tolist()

            with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                first, second = parallel.run(training)
            assert first == second
    """

    is_per_rank = True  # read by checkpoints

    @takes(H=COUNT)
    def __init__(self, H: int) -> None:
        self.H, self.round = H, None

    @takes(trainer=a("the ddl.MeshEngine that trains", MeshEngine), model=MODULE, optimizer=OPTIMIZER)
    def attach(self, trainer: MeshEngine, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Ends rounds in the trainer's ITERATION_COMPLETED, before other handlers, and at the end of the run.

        Args:
            trainer: the engine that trains the model.
            model: what ``ddl.auto_model(..., dp_sync="local")`` returned.
            optimizer: the optimizer of the model, whose state belongs to a rank.

        Raises:
            ValueError: if the model was made otherwise, or one of the two has been attached before.
        """
        local = local_round(model)
        if local is None:
            raise ValueError('model should be made with ddl.auto_model(..., dp_sync="local"), but was made otherwise')
        if local.averager is not None or self.round is not None:
            raise ValueError("a model takes one ddl.LocalSGD or ddl.DiLoCo, which is for one model, but has been given")
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self._prepare()
        self.model, self.optimizer, self.round = model, optimizer, local
        local.averager = self
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._completed)
        trainer.add_event_handler(Events.COMPLETED | Events.TERMINATE, self.end_round)

    def _prepare(self) -> None:
        """What may raise an error of the script, before anything is attached."""

    def _completed(self) -> None:
        if self.round.steps >= self.H:
            self.end_round()

    @torch.no_grad()
    def end_round(self) -> None:
        """Averages now, if there were steps since the last time; every rank calls it.

        Use it as a handler before one that evaluates, where ``H`` does not divide the number of steps.
        """
        if self.round is None or not self.round.steps:
            return
        averages = self.averages()
        self._apply_averages({p: averages[id(p)] for p in self.trained})
        for stage in stages_of(self.model).local_stages():
            share_buffers(stage, get_mesh())
        self.round.steps, self.round.counted = 0, 0.0

    _completed.runs_last = end_round.runs_last = -1  # before all others

    def _apply_averages(self, averages: Mapping[nn.Parameter, torch.Tensor]) -> None:
        for p, average in averages.items():
            p.copy_(average)

    @torch.no_grad()
    def averages(self) -> dict[int, torch.Tensor]:
        """The weights that are trained, averaged over dp as at the end of a round, by id; every rank calls it."""
        if {id(p) for p in self.trained} != {id(p) for p in self.model.parameters() if p.requires_grad}:
            raise ValueError(
                "weights were frozen, unfrozen or replaced since they were given to ddl.LocalSGD or ddl.DiLoCo, which "
                "average those that were trained then: call ddl.auto_model and attach again after such a change"
            )
        mesh, locals_ = get_mesh(), [local_tensor(p.detach()) for p in self.trained]
        if mesh.dp_size == 1:
            return {id(p): p.detach() for p in self.trained}
        group = mesh.groups[mesh.round_axis]
        counted = torch.tensor([self.round.counted], dtype=torch.float64, device=idist.device())
        total = counted.clone()
        dist.all_reduce(total, group=group)
        share = float(counted / total) if total else 1 / dist.get_world_size(group)
        means: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(t.dtype for t in locals_):  # one message per dtype
            same_dtype = [(p, t) for p, t in zip(self.trained, locals_, strict=True) if t.dtype == dtype]
            wide = torch.promote_types(dtype, torch.float32)
            flat = torch.cat([t.reshape(-1).to(idist.device(), wide) for _, t in same_dtype]).mul_(share)
            dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, group=group)
            for (p, t), mean in zip(same_dtype, flat.split([t.numel() for _, t in same_dtype]), strict=True):
                means[id(p)] = _like(mean.view(t.shape).to(t), p)
        return means

    # ------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What belongs to this rank: weights and buffers, the optimizer's state, and how far the round is."""
        self._check_attached()
        names = self._names()
        weights = local_state(self.model)[0]
        tensors = {f"weights.{name}": local_tensor(t.detach()) for name, t in weights.items()}
        tensors |= _tensors_of("inner", self.optimizer, names)
        orders = {name: order for name, t in weights.items() if (order := row_order(t)) is not None}
        return {"steps": self.round.steps, "counted": self.round.counted, "orders": orders, "tensors": tensors}

    def _misfit(self, state: Mapping[str, Any]) -> str | None:
        """What does not fit a state whose tensors are shapes and dtypes; None: nothing."""
        own = self.state_dict()
        was, here = {name: tuple(shape) for name, (shape, _) in state["tensors"].items()}, own["tensors"]
        for name in (name for name in was | here if name.startswith(("weights.", "old."))):
            shape = tuple(here[name].shape) if name in here else None
            if was.get(name) != shape:
                return f"has {name!r} of the shape {shape} on this rank, but had {was.get(name)} when it was saved"
        if state.get("orders", own["orders"]) != own["orders"]:  # not in checkpoints of earlier versions
            return "has rows in another order than when it was saved (Column(parts=))"
        return None

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave on this rank, after model and optimizer have been loaded."""
        self._check_attached()
        for name, tensor in local_state(self.model)[0].items():
            local_tensor(tensor.detach()).copy_(state["tensors"][f"weights.{name}"])
        _set_tensors("inner", self.optimizer, self._names(), state["tensors"])
        self.round.steps, self.round.counted = state["steps"], state["counted"]

    def _check_attached(self) -> None:
        if self.round is None:
            raise ValueError(f"ddl.{type(self).__name__} should be attached before it is saved or loaded")

    def _names(self) -> dict[int, str]:
        return {id(t): name for name, t in reversed(local_state(self.model)[0].items())}


class DiLoCo(LocalSGD):
    """:class:`LocalSGD` with an outer optimizer, for which a round's change of the weights is the gradient.

    At the end of a round, ``old - average`` is the gradient of the weights ``old`` at its beginning, which the outer
    optimizer steps (Douillard et al. 2023, arXiv:2311.08105). SGD with rate 1 and no momentum is :class:`LocalSGD`.
    ``outer`` is the outer optimizer, once attached; a scheduler may set its rate. Its state and ``old`` take the memory
    of two more copies of the weights, and go into checkpoints with this object. All weights are averaged at once, while
    training waits: fragments and overlap (Streaming DiLoCo) are in ``lab.simulate.local_rounds`` alone.

    Args:
        H: optimizer steps per round.
        outer_optimizer: takes weights and returns an optimizer of them. Default: SGD with rate 0.7 and a Nesterov
            momentum of 0.9.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def training(local_rank):
                torch.manual_seed(0)
                data = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
                model = ddl.auto_model(torch.nn.Linear(3, 1), dp_sync="local")
                optimizer = ddl.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.01))
                trainer = ddl.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
                ddl.DiLoCo(H=4, outer_optimizer=lambda weights: torch.optim.SGD(weights, lr=0.5)).attach(
                    trainer, model, optimizer
                )
                trainer.run(ddl.auto_dataloader(data, batch_size=4), max_epochs=2)
                return model.weight.tolist()

            with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                first, second = parallel.run(training)
            assert first == second
    """

    @takes(outer_optimizer=FUNCTION)
    def __init__(
        self, H: int, outer_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    ) -> None:
        super().__init__(H)
        self.make_outer = outer_optimizer or _nesterov

    def attach(self, trainer: MeshEngine, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """As :meth:`LocalSGD.attach`, and makes the outer optimizer."""
        super().attach(trainer, model, optimizer)
        trainer.add_event_handler(Events.ITERATION_STARTED, self._keep_old)

    def _prepare(self) -> None:
        self.old = [nn.Parameter(p.detach().clone()) for p in self.trained]
        self.outer = self.make_outer(self.old)
        adapt_optimizer(self.outer)

    @torch.no_grad()
    def _keep_old(self) -> None:
        if not self.round.steps:  # weights may have been loaded since the last round
            for old, p in zip(self.old, self.trained, strict=True):
                old.copy_(p)

    def _apply_averages(self, averages: Mapping[nn.Parameter, torch.Tensor]) -> None:
        for old, p in zip(self.old, self.trained, strict=True):
            old.grad = old - averages[p]
        self.outer.step()
        for old, p in zip(self.old, self.trained, strict=True):
            old.grad = None
            p.copy_(old)

    def state_dict(self) -> dict[str, Any]:
        """As that of :class:`LocalSGD`, with ``old`` and the outer optimizer's state."""
        state, names = super().state_dict(), self._names_of_old()
        old = {f"old.{names[id(old)]}": local_tensor(old.detach()) for old in self.old}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.outer.param_groups]
        tensors = state["tensors"] | old | _tensors_of("outer", self.outer, names)
        return state | {"tensors": tensors, "outer": groups, "outer_kind": type(self.outer).__name__}

    def _misfit(self, state: Mapping[str, Any]) -> str | None:
        """As that of :class:`LocalSGD`."""
        here, n = type(self.outer).__name__, len(self.outer.param_groups)
        if (was := state.get("outer_kind", here)) != here or len(state.get("outer", [])) not in (0, n):
            groups = len(state.get("outer", []))
            return f"has {here} as outer optimizer ({n} groups), but had {was} ({groups} groups) when it was saved"
        return super()._misfit(state)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As that of :class:`LocalSGD`."""
        super().load_state_dict(state)
        names = self._names_of_old()
        for old in self.old:
            local_tensor(old.detach()).copy_(state["tensors"][f"old.{names[id(old)]}"])
        for group, saved in zip(self.outer.param_groups, state["outer"], strict=True):
            group.update(saved)
        _set_tensors("outer", self.outer, names, state["tensors"])

    def _names_of_old(self) -> dict[int, str]:
        names = self._names()
        return {id(old): names.get(id(p), "none") for old, p in zip(self.old, self.trained, strict=True)}


def _nesterov(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)


def _like(local: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """This rank's part as the parameter's type: a DTensor, or a plain tensor."""
    if not isinstance(p, DTensor) or local.shape != local_tensor(p.detach()).shape:
        return local
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _tensors_of(key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """The state of an optimizer on this rank."""
    return {
        f"{key}.{part}.{names[id(p)]}": local_tensor(value.detach())
        for p, state in optimizer.state.items()
        if id(p) in names
        for part, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _set_tensors(
    key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], tensors: Mapping[str, torch.Tensor]
) -> None:
    of_groups = ((group, p) for group in optimizer.param_groups for p in group["params"])
    for group, p in ((group, p) for group, p in of_groups if id(p) in names):
        steps_on_device = group.get("fused") or group.get("capturable")  # whose kernels would read the CPU's memory
        values = {part: v for part, v in optimizer.state.pop(p, {}).items() if not isinstance(v, torch.Tensor)}
        if values:
            optimizer.state[p] = values
        for name, value in tensors.items():
            kind, part, of = name.split(".", 2)
            if (kind, of) == (key, names[id(p)]):
                on_device = value.to(p.device) if part != "step" or steps_on_device else value
                optimizer.state[p][part] = _like(on_device.clone(), p)
