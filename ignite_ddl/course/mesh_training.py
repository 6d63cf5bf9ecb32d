"""A small run that trains on any mesh, for what is done with a run: saving it and going on."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.course.data import fashion_mnist_tensors

__all__ = ["MeshTraining", "mesh_network"]

PLAN = {"linear1": ddl.Column(), "linear2": ddl.Row(), "linear3": ddl.Column(), "linear4": ddl.Row()}


def mesh_network(dropout: float) -> nn.Sequential:
    """Four linear layers in float64, for pictures of 28 x 28 and ten classes; a pipeline can split it.

    Args:
        dropout: share of the first layer's outputs that is dropped in training.

    Returns:
        the model.

    Example:
        >>> import torch
        >>> from ignite_ddl.course.mesh_training import mesh_network
        >>> mesh_network(0.0)(torch.zeros(3, 1, 28, 28).double()).shape
        torch.Size([3, 10])
    """
    layers = {"flatten": nn.Flatten(), "linear1": nn.Linear(784, 128), "dropout": nn.Dropout(dropout)}
    layers |= {"relu1": nn.ReLU(), "linear2": nn.Linear(128, 32), "relu2": nn.ReLU()}
    layers |= {"linear3": nn.Linear(32, 64), "relu3": nn.ReLU(), "linear4": nn.Linear(64, 10)}
    return nn.Sequential(OrderedDict(layers)).double()


class MeshTraining:
    """Two epochs of five steps on 37 pictures, with Adam and sharded states, on the mesh of the calling rank.

    Args:
        dropout: as in :func:`mesh_network`.
        seed: of the weights, the dropout masks and the order of rows.

    Attributes:
        parts: "model", "optimizer", "trainer" and "loader", as ``ddl.Checkpoint`` takes them.
        steps: of each step the loss, and the sums of this rank's pictures, by which one knows them again.

    Example:
        >>> from ignite_ddl.course.mesh_training import MeshTraining
        >>> training = MeshTraining(dropout=0.0, seed=0)
        >>> [len(sums) for _, sums in training.go_on()]
        [8, 8, 8, 8, 5, 8, 8, 8, 8, 5]
    """

    def __init__(self, dropout: float, seed: int) -> None:
        before = logging.root.manager.disable
        logging.disable(logging.INFO)  # of idist, about each loader and model
        torch.manual_seed(seed)
        self.steps: list[tuple[float, list[float]]] = []
        loader = ddl.auto_dataloader(_pictures(), batch_size=8, shuffle=True)
        model = ddl.auto_model(mesh_network(dropout), tensor_plan=PLAN, shard=True)
        optimizer = ddl.auto_optim(torch.optim.Adam(model.parameters(), lr=0.01))
        logging.disable(before)
        trainer = ddl.create_supervised_trainer(model, optimizer, F.cross_entropy)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._note)
        self.parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader}

    def _note(self, trainer: Engine) -> None:
        self.steps.append((trainer.state.output, trainer.state.batch[0].sum((1, 2, 3)).tolist()))

    def go_on(self) -> list[tuple[float, list[float]]]:
        """Trains to the end of the second epoch, step 10; returns ``steps``."""
        self.parts["trainer"].run(self.parts["loader"], max_epochs=2)
        return self.steps


@functools.cache
def _pictures() -> TensorDataset:
    pictures, labels = (part[:37] for part in fashion_mnist_tensors().tensors)
    return TensorDataset(pictures.double(), labels)
