"""Trains on two ranks under a timeline, with a checkpoint in between, to see who waits for it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from ignite.engine import Events
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.course.ranks import on_ranks
from ignite_ddl.lab.timeline import Timeline

__all__ = ["watch_save"]

_SECONDS = 0.1  # of sleep in a forward pass


def watch_save(folder: Path, asynchronous: bool, width: int = 2000) -> Timeline:
    """Six steps on two ranks, sharded, with momentum; ``ddl.Checkpoint`` saves both after step 3.

    From the second step on, a forward pass begins with a sleep, as of a host whose GPU computes: its cores are free
    for the writing.

    Args:
        folder: for the checkpoint.
        asynchronous: of ``ddl.Checkpoint``.
        width: of the one linear layer. Default: 2000, which is 32 MB of weights and momentum in two files.

    Returns:
        Timeline: of both ranks; ``background`` holds the writing.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from ignite_ddl.course.watch_save import watch_save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     timeline = watch_save(Path(folder), asynchronous=True, width=8)
        >>> sorted({record.rank for record in timeline.background})
        [0, 1]
    """
    return Timeline.merge(on_ranks(2, _on_a_rank, folder, asynchronous, width))


def _on_a_rank(local_rank: int, folder: Path, asynchronous: bool, width: int) -> Timeline:
    logging.disable(logging.INFO)
    model = ddl.auto_model(nn.Linear(width, width), shard=True)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer = ddl.create_supervised_trainer(model, optimizer, nn.functional.mse_loss)
    checkpoint = ddl.Checkpoint({"model": model, "optimizer": optimizer}, folder, asynchronous=asynchronous)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), checkpoint)

    @trainer.on(Events.ITERATION_COMPLETED(once=1))  # not earlier: the first step's checks pass the model several times
    def sleep_in_forward():
        model.register_forward_pre_hook(lambda *_: time.sleep(_SECONDS))

    timeline = Timeline().attach(trainer)
    trainer.run([(torch.zeros(8, width), torch.zeros(8, width))] * 6)
    return timeline
