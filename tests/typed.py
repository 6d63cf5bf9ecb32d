"""A user's script for type checkers, run by tests/extra_types.sh: they report the lines marked `wrong` and no other.

Nothing runs it.
"""

import torch
from ignite.engine import Events
from ignite.metrics import Accuracy
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.lab import Timeline, cost, plan


def training(local_rank: int, lr: float, epochs: int = 1) -> float:
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
    loader = ddl.auto_dataloader(data, batch_size=16, shuffle=True, num_workers=0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    styles = {"0": ddl.Column(), "2": ddl.Row()}
    ddl.check_model(layers, styles, tp=2, batches=[16])
    model = ddl.auto_model(layers, styles, schedule="1f1b", n_microbatches=2, find_unused_parameters=True)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=lr))
    trainer = ddl.create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, max_norm=1.0)
    evaluator = ddl.create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})
    checkpoint = ddl.Checkpoint({"model": model, "optimizer": optimizer}, "folder", n_saved=2)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
    ddl.Throughput(window=10).attach(trainer)
    trainer.run(loader, max_epochs=epochs)
    weights: dict[str, torch.Tensor] = ddl.full_state_dict(model)
    print(ddl.get_mesh().dp_rank, len(weights), loader.rows[0], trainer.rows)
    return evaluator.run(loader).metrics["accuracy"]


def step(engine: ddl.MeshEngine, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    output, loss = ddl.forward_backward(engine, nn.Linear(8, 3), *batch, nn.functional.cross_entropy, last=True)
    return loss.item() + float(ddl.clip_grad_norm_(nn.Linear(8, 3), 1.0))


with ddl.Parallel(backend="gloo", nproc_per_node=4, dp=2, tp=2, timeout=60) as parallel:
    accuracies: list[float] = parallel.run(training, 0.1, epochs=2)
batch = torch.randn(8, 4), torch.randn(8, 4)
report = ddl.check_parity(nn.Linear(4, 4), None, batch, nn.functional.mse_loss, dp=2)
print(report.equal, report.worst.error, Timeline, cost, plan.Model)
with ddl.empty_weights():
    lazy = nn.Sequential(ddl.lazy(nn.Linear, 8, 8, bias=False), nn.ReLU())
server = ddl.ParameterServer(nn.Linear(3, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1), mode="async")
server.pull()
rows = ddl.auto_dataloader(torch.arange(10), batch_size=4)
engine = ddl.MeshEngine(step)
paths = [str(path) for path in ddl.export_weights(lazy, "folder")]

ddl.auto_modle(lazy)  # wrong: no such name
ddl.Chekpoint({}, "folder")  # wrong
ddl.auto_model(lazy, tensor_plam={})  # wrong
ddl.auto_model(lazy, find_unused_parameter=True)  # wrong
ddl.auto_model("lazy")  # wrong
ddl.auto_dataloader(rows.dataset, batch_sise=4)  # wrong
ddl.auto_dataloader(5)  # wrong
ddl.auto_optim(torch.optim.SGD([], lr=0.1), check=False)  # wrong
ddl.Parallel(backend="gloo", nproc_per_nodes=2)  # wrong
ddl.Parallel("gloo", nproc_per_node="2")  # wrong
ddl.Column(output_layout=None)  # wrong
ddl.Row(unit=2)  # wrong
ddl.check_parity(lazy, None, batch, nn.functional.mse_loss, dq=2)  # wrong
ddl.lazy(nn.Linear, 8, 8, biass=False)  # wrong
ddl.Checkpoint({}, "folder", n_save=2)  # wrong
engine.run(rows, max_epoch=2)  # wrong
parallel.run(training, "fast")  # wrong
parallel.run(training, 0.1, epoch=2)  # wrong
names: list[str] = parallel.run(training, 0.1)  # wrong
print(report.equall)  # wrong
