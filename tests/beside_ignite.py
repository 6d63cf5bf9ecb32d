"""A small training: the same names for Ignite alone on one process, and for ddl on a mesh."""

import torch
from ignite.engine import Engine, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ignite_ddl as ddl

# Global batches of 7, 7, and 1: dp ranks have unlike numbers of rows, then some have none.
ROWS, BATCH, CLASSES = 15, 7, 4
PLAN = {"0": ddl.Column(), "2": ddl.Row()}
loss_fn = nn.functional.cross_entropy


def data(seed, nan_at=None):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.double)
    if nan_at is not None:
        x[nan_at] = torch.nan
    return TensorDataset(x, torch.randint(CLASSES, (ROWS,), generator=generator))


def classifier():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, CLASSES)]
    return nn.Sequential(*layers).double()


def clipping_trainer(model, optimizer, loss_fn, max_norm, steps):
    """What ``max_norm`` and ``gradient_accumulation_steps`` mean, in plain torch on one process."""
    rows = []

    def update(engine, batch):
        if (engine.state.iteration - 1) % steps == 0:
            optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        rows.append(len(batch[0]))
        (loss * rows[-1]).backward()
        if engine.state.iteration % steps == 0:
            for parameter in model.parameters():  # of a window the mean over all its rows
                parameter.grad /= sum(rows[-steps:])
            if max_norm is not None:
                engine.state.grad_norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
        return loss.item()

    return Engine(update)


class Setting:
    """The same names for Ignite alone on one process, and for ddl on a mesh."""

    def __init__(self, plain):
        self.plain = plain

    def loader(self, dataset):
        if self.plain:
            return DataLoader(dataset, batch_size=BATCH)
        return ddl.auto_dataloader(dataset, batch_size=BATCH)

    def model(self, lr, **kwargs):
        model = classifier() if self.plain else ddl.auto_model(classifier(), tensor_plan=PLAN)
        return model, torch.optim.SGD(model.parameters(), lr=lr, **kwargs)

    def trainer(self, model, optimizer, max_norm=None, steps=1, **kwargs):
        if not self.plain:
            return ddl.create_supervised_trainer(
                model, optimizer, loss_fn, max_norm=max_norm, gradient_accumulation_steps=steps, **kwargs
            )
        if max_norm is not None or steps > 1:
            return clipping_trainer(model, optimizer, loss_fn, max_norm, steps)
        return create_supervised_trainer(model, optimizer, loss_fn, **kwargs)

    def evaluator(self, model, **kwargs):
        make = create_supervised_evaluator if self.plain else ddl.create_supervised_evaluator
        return make(model, **({"metrics": {"loss": Loss(loss_fn), "accuracy": Accuracy()}} | kwargs))

    def weights(self, model):
        return model.state_dict() if self.plain else ddl.full_state_dict(model)
