"""The worker's side: pull the parameters, push gradients."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import cloudpickle
import ignite.distributed as idist
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.arguments import check_count, is_count, limit_in_seconds
from ignite_ddl.mesh import get_mesh
from ignite_ddl.parameter_server.server import MODES
from ignite_ddl.parameter_server.wire import LONGEST_SECONDS, Servers

__all__ = ["ParameterServer"]


class ParameterServer:
    """What a worker holds of the parameter server: pull the parameters, push a gradient.

    Started by ``ddl.Parallel(..., servers=1)``, the server keeps the parameters and their optimizer. Every worker
    makes a ``ParameterServer`` of its own copy of the model; all then begin with worker 0's weights. A worker
    is an ordinary Ignite trainer, whose update step is pull, forward, backward, push. Its loader and its metrics
    see the workers alone, and on a serial run the server is in-process, so the same code runs.

    When is a gradient applied, and who waits?

    - ``mode="sync"``: when all workers have pushed, their average is one update. A pull waits for it. The result is
      that of one process with the global batch (Dean et al., Large Scale Distributed Deep Networks, 2012, has the
      server; Chen et al., 2016, the synchronous form).
    - ``mode="async"``: each as it comes. Nobody waits; a gradient may be of parameters that others have changed
      since (Dean et al., section 4.1, Downpour SGD).
    - ``mode="bounded"``: as async, but the pull of a worker that is more than ``staleness`` steps ahead of the
      slowest waits (Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server,
      2013, section 2). A gradient is then at most (workers − 1)(2 · staleness + 1) updates old when it is applied.
    - ``mode="backup"``: of the N + b workers, the first N gradients of a step make the update; those that come
      later are dropped and counted (Chen et al., Revisiting Distributed Synchronous SGD, 2016, section 3). A step
      is the server's here, not the worker's: end training at a version, not after a number of batches.

    With several servers each holds whole parameters, shared out by bytes, so any optimizer that treats parameters one
    by one is exact. A pull is always one version of a server, never half an update. The servers of "async" and
    "bounded" count their versions each for itself, and a pull may be version 7 of one and 8 of another; in "sync" and
    "backup" they go in step.

    BatchNorm's running statistics, as all buffers, are not the server's: they start as worker 0's, then each
    worker keeps its own. Evaluate on one worker, or average them yourself.

    A worker that dies ends the run with a :class:`RankError` that names it. With ``on_failure="continue"`` in
    ``ddl.Parallel``, "async" and "bounded" go on without it, and "backup" on one server as long as N are left. A
    ParameterServer that is made later counts on the living. Use no collective after a loss: it needs every rank, so
    it fails, and whoever called it is lost too.

    RPC runs what it is sent: whoever can reach its port owns the process. It listens on loopback; the environment's
    ``TP_SOCKET_IFNAME`` names another interface, and says that you trust all of that network.

    Args:
        model: a plain module, the same on every worker. Parameters that require no gradient stay with the workers.
        optimizer: takes the list of a server's parameters and returns their optimizer, say
            ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``: of all of these, not of the model's, which are
            elsewhere. It is called once on each server, and its state stays there. To schedule the rate, step the
            scheduler in a ``register_step_post_hook`` of the optimizer.
        mode: "sync" (default), "async", "bounded" or "backup".
        staleness: for "bounded": how many steps a worker may be ahead of the slowest, 0 or more.
        backup: for "backup": b, how many of the workers' gradients a step can do without, 1 or more.
        timeout: seconds (or a ``timedelta``) that a pull or a push may take, waiting for other workers included.
            Default 300. Making a ParameterServer waits for worker 0, which may be reading data: up to 600 s.

    Raises:
        ValueError: if an argument does not fit, there is no server, the model is wrapped by DDP or cut by pp or tp,
            or differs from worker 0's, or if ``optimizer`` makes no optimizer of all the parameters that it is
            given. The server is untouched then.
        RuntimeError: if worker 0, whose weights are to be the first, has ended.
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
        self.mode = mode
        self.timeout = limit_in_seconds(timeout, longest=LONGEST_SECONDS)
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
        self._names = _share_out(self._parameters, max(1, self._servers.count))
        # Several servers must agree which gradients are late: the first decides, and is asked first.
        self._first_decides = mode == "backup" and self._servers.count > 1
        self._pulled: list[int] | None = None  # the versions of a pull that no push has answered yet
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
            make = cloudpickle.dumps(optimizer)
            found = self._servers.ask(
                "create",
                [
                    (agreed, make, self._on_cpu(names), [t.detach().cpu() for t in others] if i == 0 else [])
                    for i, names in enumerate(self._names)
                ],
            )
            for wrong in filter(None, found):
                raise ValueError(wrong)
        answers = self._servers.ask("join", [()] * len(self._names))
        if any(theirs is None for theirs, _ in answers):
            raise RuntimeError(
                "a ParameterServer begins with the weights of worker 0, and worker 0 has ended"
            )
        theirs = answers[0][0]
        for what, value in agreed.items():
            if theirs[what] != value:
                raise ValueError(_difference(what, value, theirs[what], self._worker))
        with torch.no_grad():
            for tensor, first in zip(others, answers[0][1], strict=True):
                tensor.copy_(first)

    def pull(self) -> list[int]:
        """Copies the server's parameters into the model, waiting where the mode asks for it.

        Returns:
            list: the version pulled from each server: the number of updates that it has seen.

        Raises:
            TimeoutError: if other workers keep this one waiting for more than ``timeout`` seconds.
            ConnectionError: if a server is gone.
        """
        answers = self._ask_for_parameters()
        while self._first_decides and len({version for version, _ in answers}) > 1:
            # An update came in between: a gradient of these would be late.
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

    def push(self, gradients: Mapping[str, torch.Tensor] | None = None, rows: int = 1) -> bool:
        """Sends a gradient and takes it away from the model: ``p.grad`` is None afterwards.

        Args:
            gradients: parameter names to gradients of their shapes. Default: each ``p.grad`` that is not None.
                A parameter without gradient is left alone, as torch's optimizers do.
            rows: how many rows this gradient is the mean of. Where gradients are averaged ("sync", "backup") they
                weigh as their rows, so an uneven last batch is exact; the default 1 weighs all alike. With 0 the
                worker takes part in the step and sends nothing.

        Returns:
            bool: False if it came too late and was dropped (``mode="backup"``), else True.

        Raises:
            RuntimeError: if there was no pull since the last push.
            ValueError: if a gradient is not finite, not dense, of another shape or dtype, or of no trainable
                parameter, or if there is none. Nothing has been sent then, each ``p.grad`` is as it was, and push
                can be called again: with other gradients, or with ``rows=0``, which leaves this batch out and
                takes its ``p.grad`` away. (Without that the next ``backward()`` would add to them.)
            TimeoutError: if a server does not answer within ``timeout`` seconds.
            ConnectionError: if a server is gone.
        """
        if self._pulled is None:
            raise RuntimeError(
                "push needs a pull before it, and a new one after each push: a gradient belongs to the version "
                "of the parameters that it was computed with"
            )
        check_count("rows", rows, least=0)
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
        """Says that this worker has no more batches in this epoch, so that nobody waits for it.

        Needed only where the workers' loaders are of different lengths. The next pull then waits until all workers
        have ended theirs (in "async" nobody waits, ever). An Ignite handler:
        ``trainer.add_event_handler(Events.EPOCH_COMPLETED, server.end_epoch)``.

        Args:
            engine: not used.
        """
        self._pulled = None
        if self.mode != "async":
            self._servers.ask("end_epoch", [(self._worker,)] * len(self._names))

    def statistics(self) -> dict[str, Any]:
        """What has happened so far, as plain data for plots.

        Returns:
            dict: "mode"; "updates", a list of dicts, one for each gradient that went into an update, in the order of
            application: "server", "worker", "step" (of this worker, from 0), "pulled" (the version that
            the gradient was computed with), "version" (the version that it was applied to), "staleness" (their
            difference: updates in between), "rows", and in seconds on the server's clock "waited" (by the pull),
            "pulled_at", "pushed_at", "applied_at"; "dropped", the same of gradients that came too late ("version"
            is the one they met); "lost", workers to what happened to them; "servers", a list of dicts with
            "name", "parameters" (names), "bytes" (of its parameters), "version" (number of updates), "bytes_in" and
            "bytes_out" (tensors of pushes and pulls). Workers that still push go on being counted: meet at an
            ``idist.barrier()`` first if all are to be in.
        """
        parts = self._servers.ask("statistics", [()] * len(self._names))
        result = {"mode": self.mode, "updates": [], "dropped": [], "lost": parts[0]["lost"], "servers": []}
        for index, (part, names) in enumerate(zip(parts, self._names, strict=True)):
            for kind in ("updates", "dropped"):
                result[kind] += [{"server": index} | record for record in part[kind]]
            counts = {key: part[key] for key in ("bytes", "version", "bytes_in", "bytes_out")}
            result["servers"].append({"name": f"server{index}", "parameters": list(names)} | counts)
        return result

    def _on_cpu(self, names: list[str]) -> list[torch.Tensor]:
        return [self._parameters[name].detach().cpu() for name in names]

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
                    f"the gradient of {name!r} should be a tensor, but given {type(gradient).__name__}; leave a "
                    "parameter without gradient out"
                )
            if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
                raise ValueError(
                    f"the gradient of {name!r} should be {tuple(parameter.shape)}, {parameter.dtype}, "
                    f"but given {tuple(gradient.shape)}, {gradient.dtype}"
                )
            if gradient.layout != torch.strided:
                raise ValueError(f"the gradient of {name!r} should be dense, but given {gradient.layout}")
            # One pass without memory of its own; a sum of finite numbers may overflow, then look at each.
            if not cmath.isfinite(gradient.sum().item()) and not (finite := gradient.isfinite()).all():
                raise ValueError(
                    f"the gradient of {name!r} should be finite, but {int((~finite).sum())} of its "
                    f"{gradient.numel()} numbers are not; push(rows=0) leaves this batch out"
                )


def _check_arguments(optimizer: Any, mode: str, staleness: int | None, backup: int, workers: int) -> None:
    if not callable(optimizer):
        raise ValueError(
            "optimizer should be a function that takes parameters and returns their optimizer, say "
            f"lambda parameters: torch.optim.SGD(parameters, lr=0.1), but given {type(optimizer).__name__}"
        )
    if mode not in MODES:
        raise ValueError(f"mode should be one of {MODES}, but given {mode!r}")
    if mode == "bounded":
        if not is_count(staleness, least=0):
            raise ValueError(
                f"staleness should be a number of steps, 0 or more, with mode='bounded', but given {staleness!r}"
            )
    elif staleness is not None:
        raise ValueError(f"staleness={staleness!r} needs mode='bounded', but given mode={mode!r}")
    if mode == "backup":
        if not is_count(backup) or 1 < workers <= backup:
            raise ValueError(
                f"backup should be between 1 and {max(1, workers - 1)} of {workers} workers with mode='backup', "
                f"but given {backup!r}"
            )
    elif backup != 0:
        raise ValueError(f"backup={backup!r} needs mode='backup', but given mode={mode!r}")


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "model should be the plain module, but given a DistributedDataParallel, which averages too"
        )
    mesh = get_mesh()
    if mesh.pp_size > 1 or mesh.tp_size > 1:
        raise ValueError(f"a parameter server trains data-parallel workers, but given {mesh!r}")


def _share_out(parameters: Mapping[str, nn.Parameter], servers: int) -> list[list[str]]:
    """The names for each server: the largest first, each to the server that holds the fewest bytes."""
    if len(parameters) < servers:
        raise ValueError(
            f"model should have a trainable parameter for each server, but given {len(parameters)} for "
            f"{servers} servers"
        )
    order = {name: index for index, name in enumerate(parameters)}
    shares: list[list[str]] = [[] for _ in range(servers)]
    held = [0] * servers
    for name in sorted(parameters, key=lambda name: (-parameters[name].nbytes, order[name])):
        least = held.index(min(held))
        shares[least].append(name)
        held[least] += parameters[name].nbytes
    return [sorted(share, key=order.__getitem__) for share in shares]


def _difference(what: str, mine: Any, theirs: Any, worker: int) -> str:
    if what == "parameters":
        name = next(n for n in [*mine, *theirs] if mine.get(n) != theirs.get(n))
        what, mine, theirs = repr(name), mine.get(name, "missing"), theirs.get(name, "missing")
    return f"{what} should be the same on all workers, but given {mine} on worker {worker} and {theirs} on worker 0"
