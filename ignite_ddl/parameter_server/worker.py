"""The worker's side: pulls the parameters, pushes gradients."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import cloudpickle
import ignite.distributed as idist
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.arguments import MODULE, SECONDS, is_count, one_of, shown, takes, whole
from ignite_ddl.mesh import get_mesh
from ignite_ddl.parameter_server.server import MODES
from ignite_ddl.parameter_server.wire import Servers
from ignite_ddl.uneven_rows import warn_of_uneven_rows


class ParameterServer:
    """A worker's connection to the parameter server: pull the parameters, push gradients.

    The server, started by ``ddl.Parallel(..., servers=1)``, holds the parameters and their optimizer. Every worker
    makes a ``ParameterServer`` for its own copy of the model, and all start from worker 0's weights. A worker is an
    ordinary Ignite trainer, whose update step is pull, forward, backward, push. Its loader and its metrics involve
    the workers only. On a serial run the server is in-process, so the same code runs.

    The mode decides when a gradient is applied, and which workers wait:

    - ``mode="sync"``: when all workers have pushed, their mean is one update. A pull waits for it. The result is
      that of one process with the global batch (Dean et al., Large Scale Distributed Deep Networks, 2012, has the
      server; Chen et al., 2016, the synchronous form).
    - ``mode="async"``: each gradient is applied on arrival, and no worker waits. Other workers may have changed the
      parameters since the gradient's pull (Dean et al., section 4.1, Downpour SGD).
    - ``mode="bounded"``: as async, but the pull of a worker that is more than ``staleness`` steps ahead of the
      slowest waits (Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server,
      2013, section 2). The staleness of a gradient is then at most (workers − 1)(2 · staleness + 1) updates.
    - ``mode="backup"``: with N + b workers, the mean of the first N gradients of a step is the update; later ones are
      dropped and counted (Chen et al., Revisiting Distributed Synchronous SGD, 2016). A step is the
      server's, not the worker's: end training at a version, not after a number of batches.

    With several servers each holds full parameters, balanced by bytes, so any optimizer that treats parameters one
    by one is exact. A pull from a server is always one version. In "async" and "bounded" each server counts its own
    versions, and a pull may return version 7 of one and 8 of another; in "sync" and "backup" the versions agree.

    Buffers, such as BatchNorm's running statistics, are not on the server: they start as worker 0's, then each worker
    keeps its own. Evaluate on one worker, or average them.

    A worker that dies ends the run with a :class:`RankError` that names it. With ``on_failure="continue"`` in
    ``ddl.Parallel``, "async" and "bounded" continue without it, and "backup" on one server while N workers are left. A
    ParameterServer made later involves the remaining workers only. Call no collective after a worker is lost: it needs
    every rank, so it fails, and its caller is lost too.

    Workers and servers talk by sockets without a name or port, which the launcher makes: no other process can connect.
    Threads of a worker take turns: while one waits in a pull, the others' calls wait, too.

    Args:
        model: a plain module, the same on every worker. Parameters that require no gradient stay on the workers.
        optimizer: a function that takes the list of a server's parameters and returns an optimizer of all of them,
            for example ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``. It is called once on each server,
            which keeps the state. To schedule the learning rate, step the scheduler in a ``register_step_post_hook``
            of the optimizer.
        mode: "sync" (default), "async", "bounded" or "backup".
        staleness: for "bounded": number of steps that a worker may be ahead of the slowest, 0 or more.
        backup: for "backup": b, number of gradients that a step does not wait for, 1 or more.
        timeout: seconds (or a ``timedelta``) that a pull or a push may take, including waiting for other workers.
            Default 300. Making a ParameterServer waits up to 600 s for worker 0, which may be reading data.

    Raises:
        ValueError: if an argument is invalid, there is no server, the model is wrapped by DDP or cut by pp or tp,
            or differs from worker 0's, or if ``optimizer`` does not return an optimizer of all the parameters that it
            is given. The server is not changed then.
        RuntimeError: if worker 0, which provides the initial weights, has ended.
        TimeoutError: if worker 0 does not make its ParameterServer within 600 seconds.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl
            from ignite.engine import Engine

            def training(local_rank):
                torch.manual_seed(0)
                data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
                loader = ddl.auto_dataloader(data, batch_size=6)        # 6 rows over all workers
                model = torch.nn.Linear(3, 1)
                server = ddl.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=0.1), mode="sync")

                def step(engine, batch):
                    x, y = batch
                    server.pull()
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    server.push(rows=len(x))
                    return loss.item()

                Engine(step).run(loader, max_epochs=2)
                server.pull()                                           # the weights after the last update
                return model.weight.detach(), server.statistics()["updates"]

            with ddl.Parallel(backend="gloo", nproc_per_node=2, servers=1) as parallel:
                (weight, updates), _ = parallel.run(training)
            assert [(u["worker"], u["version"]) for u in updates[:3]] == [(0, 0), (1, 0), (0, 1)]
            assert torch.allclose(weight, training(0)[0], atol=1e-6)    # one process, the same script
    """

    @takes(model=MODULE, mode=one_of(*MODES), timeout=SECONDS)
    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        mode: str = "sync",
        *,
        staleness: int | None = None,
        backup: int = 0,
        timeout: float | timedelta = 300.0,
    ) -> None:
        self.mode, self.timeout = mode, timeout
        self._worker = idist.get_rank()
        workers = idist.get_world_size()
        _check_arguments(optimizer, mode, staleness, backup, workers)
        _check_model(model)
        self._servers = Servers(mode, self.timeout)
        if workers > 1 and self._servers.count == 0:
            raise ValueError(
                f"a ParameterServer of {workers} workers needs a server, but given none: start the workers by "
                "ddl.Parallel(..., servers=1)"
            )
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        self._names = _assign_parameters(self._parameters, max(1, self._servers.count))
        # Several servers must agree which gradients are late: the first server decides, and is asked first.
        self._averages = mode in ("sync", "backup")
        self._first_decides = mode == "backup" and self._servers.count > 1
        self._pulled: list[int] | None = None  # the versions of the latest pull; None after a push
        self.versions: list[int] = []
        self._start(model, optimizer, staleness, backup if workers > 1 else 0, workers)

    def _start(self, model, optimizer, staleness, backup, workers) -> None:
        others = [p for p in model.parameters() if not p.requires_grad] + list(model.buffers())
        shapes = {
            name: (tuple(p.shape), str(p.dtype)) + (() if p.requires_grad else ("no gradient",))
            for name, p in model.named_parameters()
        }
        agreed = {"mode": self.mode, "staleness": staleness, "backup": backup, "workers": workers}
        agreed |= {"servers": len(self._names), "parameters": shapes, "other tensors": len(others)}
        if self._worker == 0:
            make, requests = cloudpickle.dumps(optimizer), []
            for names in self._names:
                held = [self._parameters[name].detach().cpu() for name in names]
                requests.append((agreed, make, held, [] if requests else [t.detach().cpu() for t in others]))
            self._servers.ask("create", requests)
        answers = self._servers.ask("join", [()] * len(self._names))
        if any(theirs is None for theirs, _ in answers):
            raise RuntimeError("a ParameterServer starts with the weights of worker 0, and worker 0 has ended")
        theirs = answers[0][0]
        for what, value in agreed.items():
            if theirs[what] != value:
                raise ValueError(_difference(what, value, theirs[what], self._worker))
        with torch.no_grad():
            for tensor, first in zip(others, answers[0][1], strict=True):
                tensor.copy_(first)

    def pull(self) -> list[int]:
        """Copies the server's parameters into the model, waiting as the mode requires.

        Returns:
            list: the version pulled from each server, its number of updates.

        Raises:
            TimeoutError: if other workers keep this one waiting for more than ``timeout`` seconds.
            ConnectionError: if a server is gone.
        """
        answers = self._ask_for_parameters()
        while self._first_decides and len({version for version, _ in answers}) > 1:
            # An update was made in between: a gradient of these parameters would be late.
            answers = self._ask_for_parameters()
        with torch.no_grad():
            for names, (_, tensors) in zip(self._names, answers, strict=True):
                for name, tensor in zip(names, tensors, strict=True):
                    self._parameters[name].copy_(tensor)
        self.versions = [version for version, _ in answers]
        self._pulled = self.versions
        return list(self.versions)

    def _ask_for_parameters(self) -> list[tuple[int, list[torch.Tensor]]]:
        if not self._first_decides:
            return self._servers.ask("pull", [(self._worker, 0)] * len(self._names))
        answers = self._servers.ask("pull", [(self._worker, 0)], servers=slice(1))
        request = (self._worker, answers[0][0])
        return answers + self._servers.ask("pull", [request] * (len(self._names) - 1), servers=slice(1, None))

    @takes(rows=whole(0))
    def push(self, gradients: Mapping[str, torch.Tensor] | None = None, rows: int = 1) -> bool:
        """Sends a gradient and clears it: ``p.grad`` is None afterwards.

        Args:
            gradients: parameter names to gradients of their shapes. Default: each ``p.grad`` that is not None.
                A parameter without gradient is not updated, as in torch's optimizers.
            rows: number of rows over which this gradient is the mean. In "sync" and "backup", gradients are averaged
                with these weights, so an uneven last batch is exact. The default 1 weights all equally, with a
                warning where the loader dealt unlike numbers of rows; with 0, the worker takes part in the step without
                a gradient.

        Returns:
            bool: False if the gradient was too late and was dropped (``mode="backup"``), else True.

        Raises:
            RuntimeError: if there was no pull since the last push.
            ValueError: if a gradient is not finite, not dense, of another shape or dtype, or of no trainable
                parameter, or if there is none. Nothing was sent then, each ``p.grad`` is unchanged, and push can be
                called again: with other gradients, or with ``rows=0``, which skips this batch and clears ``p.grad``
                (to which the next ``backward()`` would add otherwise).
            TimeoutError: if a server does not answer within ``timeout`` seconds.
            ConnectionError: if a server is gone.
        """
        if self._pulled is None:
            raise RuntimeError(
                "push needs a pull before it, and a new one after each push: a gradient belongs to the version "
                "of the parameters that it was computed with"
            )
        if rows == 1 and self._averages:
            warn_of_uneven_rows("pass rows=len(x) to push", counted=rows)
        if gradients is None:
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if rows:
            self._check_gradients(gradients)
        else:
            gradients = {}
        requests = []
        for names, version in zip(self._names, self._pulled, strict=True):
            version = self._pulled[0] if self._first_decides else version
            parts = [gradients[n].detach().cpu().contiguous() if n in gradients else None for n in names]
            requests.append((self._worker, version, parts, rows))
        if self._first_decides:
            accepted = self._servers.ask("push", requests[:1], servers=slice(1))[0]
            if accepted:
                self._servers.ask("push", requests[1:], servers=slice(1, None))
        else:
            accepted = all(self._servers.ask("push", requests))
        self._pulled = None
        for parameter in self._parameters.values():
            parameter.grad = None
        return accepted

    def end_epoch(self, engine: Any = None) -> None:
        """Signals that this worker has no more batches in this epoch, so that no worker waits for it.

        Needed only if the workers' loaders have different lengths. The next pull then waits until all workers have
        ended the epoch (except in "async"). An Ignite handler:
        ``trainer.add_event_handler(Events.EPOCH_COMPLETED, server.end_epoch)``.

        Args:
            engine: not used.
        """
        self._pulled = None
        if self.mode != "async":
            self._servers.ask("end_epoch", [(self._worker,)] * len(self._names))

    def statistics(self) -> dict[str, Any]:
        """The statistics so far, as plain data.

        Returns:
            dict: "mode"; "updates", a list of dicts, one for each applied gradient, in the order of application:
            "server", "worker", "step" (of this worker, from 0), "pulled" (the version that the gradient was computed
            with), "version" (the version that it was applied to), "staleness" (their difference), "rows", and in
            seconds on the server's clock "waited" (by the pull), "pulled_at", "pushed_at", "applied_at"; "dropped",
            the same for gradients that were too late ("version" is that of their arrival); "lost", failed workers to
            their failures; "servers", a list of dicts with "name", "parameters" (names), "bytes" (of its parameters),
            "version" (number of updates), "bytes_in" and "bytes_out" (tensors of pushes and pulls). To include the
            last pushes of all workers, call ``idist.barrier()`` first.
        """
        parts = self._servers.ask("statistics", [()] * len(self._names))
        result = {"mode": self.mode, "updates": [], "dropped": [], "lost": parts[0]["lost"], "servers": []}
        for index, (part, names) in enumerate(zip(parts, self._names, strict=True)):
            for kind in ("updates", "dropped"):
                result[kind] += [{"server": index} | record for record in part[kind]]
            counts = {key: part[key] for key in ("bytes", "version", "bytes_in", "bytes_out")}
            result["servers"].append({"name": f"server{index}", "parameters": list(names)} | counts)
        return result

    def _check_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        if not isinstance(gradients, Mapping):
            raise ValueError(
                f"gradients should be a dict, parameter names to gradients, but given {type(gradients).__name__}"
            )
        if not gradients:
            raise ValueError("no parameter has a gradient: call loss.backward() before push, or push(rows=0)")
        for name, gradient in gradients.items():
            parameter = self._parameters.get(name)
            if parameter is None:
                why = "requires no gradient" if name in self._frozen else "is unknown"
                raise ValueError(f"gradients should be of trainable parameters, but {name!r} {why}")
            if not isinstance(gradient, torch.Tensor):
                raise ValueError(
                    f"the gradient of {name!r} should be a tensor, but given {type(gradient).__name__}; omit a "
                    "parameter without gradient"
                )
            if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
                raise ValueError(
                    f"the gradient of {name!r} should be {tuple(parameter.shape)}, {parameter.dtype}, "
                    f"but given {tuple(gradient.shape)}, {gradient.dtype}"
                )
            if gradient.layout != torch.strided:
                raise ValueError(f"the gradient of {name!r} should be dense, but given {gradient.layout}")
            # The sum needs no memory; if it is not finite, it may have overflowed, so each number is checked.
            if not cmath.isfinite(gradient.sum().item()) and not (finite := gradient.isfinite()).all():
                raise ValueError(
                    f"the gradient of {name!r} should be finite, but {int((~finite).sum())} of its "
                    f"{gradient.numel()} numbers are not; push(rows=0) leaves this batch out"
                )


def _check_arguments(optimizer: Any, mode: str, staleness: int | None, backup: int, workers: int) -> None:
    if not callable(optimizer):
        raise ValueError(
            "optimizer should be a function that takes parameters and returns their optimizer, for example "
            f"lambda parameters: torch.optim.SGD(parameters, lr=0.1), but given {type(optimizer).__name__}"
        )
    if mode == "bounded":
        if not is_count(staleness, least=0):
            raise ValueError(
                f"staleness should be a number of steps, 0 or more, with mode='bounded', but given {shown(staleness)}"
            )
    elif staleness is not None:
        raise ValueError(f"staleness={shown(staleness)} needs mode='bounded', but given mode={mode!r}")
    if mode == "backup":
        if not is_count(backup) or 1 < workers <= backup:
            raise ValueError(
                f"backup should be between 1 and {max(1, workers - 1)} of {workers} workers with mode='backup', "
                f"but given {shown(backup)}"
            )
    elif not is_count(backup, 0) or backup:
        raise ValueError(f"backup={shown(backup)} needs mode='backup', but given mode={mode!r}")


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel) or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            f"model should be the plain module, but given a {type(model).__name__} from ddl.auto_model, which also "
            "averages gradients"
        )
    mesh = get_mesh()
    if mesh.pp_size > 1 or mesh.tp_size > 1:
        raise ValueError(f"a parameter server needs a data-parallel mesh, but given {mesh!r}")


def _assign_parameters(parameters: Mapping[str, nn.Parameter], servers: int) -> list[list[str]]:
    """The parameter names of each server: the largest first, each to the server with the fewest bytes."""
    if len(parameters) < servers:
        raise ValueError(
            f"model should have a trainable parameter for each server, but given {len(parameters)} for "
            f"{servers} servers"
        )
    shares: list[list[str]] = [[] for _ in range(servers)]
    held = [0] * servers
    for name in sorted(parameters, key=lambda name: -parameters[name].nbytes):
        least = held.index(min(held))
        shares[least].append(name)
        held[least] += parameters[name].nbytes
    return [[name for name in parameters if name in share] for share in shares]


def _difference(what: str, mine: Any, theirs: Any, worker: int) -> str:
    if what == "parameters":
        name = next(n for n in [*mine, *theirs] if mine.get(n) != theirs.get(n))
        what, mine, theirs = repr(name), mine.get(name, "missing"), theirs.get(name, "missing")
    return f"{what} should be the same on all workers, but given {mine} on worker {worker} and {theirs} on worker 0"
