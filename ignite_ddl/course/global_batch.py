"""The same data in steps of a stated global batch, on one rank or several: chapter 09 compares the losses."""

from __future__ import annotations

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ignite_ddl.course.data import fashion_mnist_tensors
from ignite_ddl.course.models import MLP

__all__ = ["train_global_batch"]


def train_global_batch(local_rank: int, rows_a_step: int, lr: float, n_seeds: int = 3) -> list[list[tuple[int, float]]]:
    """Trains ``MLP`` by plain SGD, once over 6,000 images of Fashion-MNIST, with each seed; under DDP on several ranks.

    Every rank draws the same order of the rows, and of each step's rows it takes every n-th, n being the world size.

    Args:
        local_rank: this process, as ``on_ranks`` gives it; 0 in a single process.
        rows_a_step: rows of a step, all ranks together.
        lr: the learning rate, constant.
        n_seeds: how many trainings. Default: 3.

    Returns:
        for each seed (step, loss over all 6,000 images) after every 25th step, the same on every rank.

    Example:
        >>> from ignite_ddl.course import train_global_batch
        >>> history, = train_global_batch(0, 60, lr=0.01, n_seeds=1)
        >>> [step for step, loss in history]
        [25, 50, 75, 100]
    """
    world_size, rank = idist.get_world_size(), idist.get_rank()
    images, labels = fashion_mnist_tensors().tensors
    histories = []
    for seed in range(n_seeds):
        torch.manual_seed(seed)
        model, history = MLP(), []
        replica = DDP(model) if world_size > 1 else model
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for step, rows in enumerate(torch.randperm(6000).split(rows_a_step), start=1):
            mine = rows[rank::world_size]
            optimizer.zero_grad()
            F.cross_entropy(replica(images[mine]), labels[mine]).backward()
            optimizer.step()
            if step % 25 == 0:
                with torch.no_grad():
                    history.append((step, F.cross_entropy(model(images), labels).item()))
        histories.append(history)
    return histories
