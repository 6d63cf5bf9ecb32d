"""Runs a step of a GPT by a plan of ``lab.plan`` and measures what the plan predicts."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.course.gpt import GPT
from ignite_ddl.course.memory import StepMemory
from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab.bytes import count_bytes
from ignite_ddl.lab.plan import Plan

__all__ = ["measure_plan"]


def measure_plan(plan: Plan, rounds: int = 3, timeout: float = 120) -> dict[str, Any]:
    """Trains a :class:`GPT` as a plan says, on gloo ranks, with Adam in float32.

    Args:
        plan: of at most 8 ranks, for a model of float32 without dropout.
        rounds: steps that are timed, after one that is not. Default: 3.
        timeout: seconds that the run may take. Default: 120.

    Returns:
        dict: of rank 0, which is on the first stage: "memory", bytes by part at the moment when most lay there, and
        "sent", bytes by axis (messages of at least a row's activations); "seconds", the median of the slowest rank.

    Example:
        >>> from ignite_ddl.course import measure_plan
        >>> from ignite_ddl.lab.plan import Cluster, Model, predict
        >>> from ignite_ddl.lab.cost import Link
        >>> model = Model(2, 32, 4, 80, 16, False, False, 4, 4, 8, 4, 0)
        >>> laptop = Cluster(2, 8e9, 1e10, Link(1e-4, 1e9), Link(1e-4, 1e9))
        >>> plan = predict(model, laptop, batch=4, dp=2, recompute="selective")
        >>> measure_plan(plan)["sent"]["dp"] == plan.sent["dp"]
        True
    """
    results = on_ranks(
        plan.dp * plan.pp * plan.tp, _on_a_rank, plan, rounds, dp=plan.dp, pp=plan.pp, tp=plan.tp, timeout=timeout
    )
    found = results[0]
    found["seconds"] = sorted(map(max, zip(*(result["seconds"] for result in results), strict=True)))[rounds // 2]
    return found


def _on_a_rank(local_rank: int, plan: Plan, rounds: int) -> dict[str, Any]:
    logging.disable(logging.INFO)  # of idist, about each loader and model
    of, mesh = plan.model, ddl.get_mesh()
    torch.manual_seed(0)
    model = GPT(of.vocabulary, of.sequence, of.width, of.heads, of.layers, tied=of.tied)
    styles = GPT.sequence_plan if of.sequence_parallel and plan.tp > 1 else GPT.cut_logits_plan
    given = plan.arguments()
    model = ddl.auto_model(model, styles if plan.tp > 1 else None, **given["auto_model"])
    optimizer = ddl.auto_optim(torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False))
    # Without checks, whose own messages in steps 1, 2, 4, 8, … are not the plan's.
    trainer = ddl.create_supervised_trainer(model, optimizer, _loss, checks=False, **given["create_supervised_trainer"])
    ids = torch.randint(of.vocabulary, (plan.batch, of.sequence + 1))
    rows = TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    loader = ddl.auto_dataloader(rows, **given["auto_dataloader"])
    trainer.run(loader)  # not measured: torch's schedules probe their stages
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        trainer.run(loader)
        seconds.append(time.perf_counter() - start)
    optimizer.zero_grad()
    with StepMemory(model, optimizer, ids) as memory, count_bytes() as traffic:
        for _ in memory.steps(1):
            trainer.run(loader)
    sent = dict.fromkeys(("tp", "pp", "dp"), 0.0)
    axis_of = {tuple(dist.get_process_group_ranks(group)): axis for axis, group in mesh.groups.items()}
    for call in traffic.calls:
        if call.op != "recv" and max(call.put_in, call.got) >= of.sequence * of.width * of.value_bytes / plan.tp:
            # Stages send their gradients of a tied embedding in the world's group.
            axis = "pp" if call.op == "send" else axis_of[tuple(call.ranks)]
            sent[axis] += call.put_in if call.op == "send" else call.on_a_ring
    return {"memory": {name: 2**20 * size for name, size in memory.peak().items()}, "sent": sent, "seconds": seconds}


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ddl.cross_entropy(logits.flatten(0, 1), targets.flatten())
