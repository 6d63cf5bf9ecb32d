"""Rows of all dp ranks in a loss: contrastive training has the numbers of one process."""

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Events
from ranks import in_float64, launch, refused, trainer_of
from torch import nn
from torch.utils.data import TensorDataset

import ignite_ddl as ddl

PLAN = {"0": ddl.Column(), "2": ddl.Row()}


def contrastive(features, others):
    features, others = ddl.gather_rows(features), ddl.gather_rows(others)
    return F.cross_entropy(features @ others.T, torch.arange(len(features)))


@in_float64
def trained(local_rank, rows=25, **options):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(rows, 4), torch.randn(rows, 2))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model = ddl.auto_model(model, PLAN if ddl.get_mesh().tp_size > 1 else None, **options)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5))
    trainer, losses = ddl.create_supervised_trainer(model, optimizer, contrastive, loss_divisor="local"), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(ddl.auto_dataloader(data, batch_size=8), max_epochs=2)
    return losses, torch.cat([weight.flatten() for weight in ddl.full_state_dict(model).values()])


@pytest.mark.parametrize(
    ("axes", "options"),
    [({"dp": 2}, {}), ({"dp": 4}, {}), ({"dp": 4}, {"shard": True}), ({"dp": 2, "tp": 2}, {}), ({"tp": 2}, {})],
    ids=str,
)
def test_a_contrastive_loss_of_gathered_rows_is_that_of_one_process(axes, options):
    """The last batch of an epoch has one row: dp ranks have unlike numbers of rows, and some none."""
    losses, weights = trained(0)
    for of_rank, found in launch(axes, lambda local_rank: trained(local_rank, **options)):
        assert of_rank == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(found, weights, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint32, torch.bfloat16, torch.complex64], ids=str)
def test_rows_of_any_type_are_gathered(dtype):
    def labels(local_rank):
        return ddl.gather_rows(torch.full((1 + local_rank,), local_rank).to(dtype)).to(torch.complex64).tolist()

    assert launch({"dp": 2}, labels) == [[0, 1, 1]] * 2


@in_float64
def penalized(local_rank, by_gathered=True, create_graph=True):
    def loss_fn(output, y):
        features, others = ddl.gather_rows(output), ddl.gather_rows(y)
        loss = F.mse_loss(features, others.roll(1, 0))
        (by_rows,) = torch.autograd.grad(
            loss, features if by_gathered else output, create_graph=create_graph, retain_graph=True
        )
        return loss + by_rows.pow(2).sum()

    torch.manual_seed(0)
    model = ddl.auto_model(nn.Linear(3, 2))
    trainer = trainer_of(model, loss_fn=loss_fn, loss_divisor="local")
    data = TensorDataset(torch.randn(6, 3), torch.randn(6, 2))
    return trainer.run(ddl.auto_dataloader(data, batch_size=3), max_epochs=2).output


def test_a_gradient_inside_of_a_loss_is_taken_by_gathered_rows():
    assert launch({"dp": 2}, penalized) == pytest.approx([penalized(0)] * 2, abs=1e-12)
    for create_graph in True, False:
        words = "takes a gradient through ddl.gather_rows"
        refused(lambda local_rank, g=create_graph: penalized(local_rank, False, g), words, dp=2)


def test_what_cannot_be_gathered_is_refused():
    refused(trained, "under pp loss_fn gets the rows of a microbatch", dp=2, pp=2)
    refused(lambda local_rank: ddl.gather_rows(torch.ones(2, 1 + local_rank)), "the same shape and type on all", dp=2)
    with pytest.raises(ValueError, match="rows should be a tensor, but given 3"):
        ddl.gather_rows(3)
    with pytest.raises(ValueError, match="a row for each sample, but given one without dim"):
        ddl.gather_rows(torch.ones(()))
