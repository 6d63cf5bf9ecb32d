"""Trains on ranks that may be killed at any time, and goes on from the last checkpoint:

    torchrun --standalone --nproc_per_node 4 --max-restarts 10 elastic.py --folder run        # on this machine
    torchrun --nnodes 1:2 --nproc_per_node 2 --max-restarts 10 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \\
        elastic.py --folder run                                                               # on two, one may leave

When a worker dies, torchrun ends the others and starts all of them again. `load_newest` finds the last whole
checkpoint, so that no more than the steps since then are done twice. On the same number of ranks the run ends with the
weights of one that nobody disturbed. Fewer ranks go on with the same rows, but with other dropout masks. The folder has
to be on a disk that all machines see. A machine that is lost is missed after `keep_alive_interval` (of `--rdzv_conf`).
"""

import argparse
import logging
import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from ignite.engine import Events

import ignite_ddl as ddl


def training(local_rank, args):
    logging.disable(logging.INFO)
    torch.manual_seed(0)
    rows = torch.randn(200, 8, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(rows, rows.sin().sum(1, keepdim=True))
    layers = [torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(args.dropout), torch.nn.Linear(32, 1)]

    loader = ddl.auto_dataloader(data, batch_size=12, shuffle=True)
    model = ddl.auto_model(torch.nn.Sequential(*layers).double(), shard=args.shard)
    optimizer = ddl.auto_optim(torch.optim.Adam(model.parameters(), lr=0.01))
    trainer = ddl.create_supervised_trainer(model, optimizer, F.mse_loss)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader}

    ddl.report_hangs(after=60)
    found = ddl.Checkpoint.load_newest(parts, args.folder)
    start, rank = trainer.state.iteration, ddl.get_mesh().rank
    if rank == 0:
        print(f"{ddl.get_mesh().world_size} ranks start after step {start}, from {found and found.name}", flush=True)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=args.every), ddl.Checkpoint(parts, args.folder))

    @trainer.on(Events.ITERATION_COMPLETED)
    def die():  # what a machine does by itself: once at each of these steps
        step = trainer.state.iteration
        killed = args.folder / f"killed_{step}"
        if step in args.kill and rank == step % ddl.get_mesh().world_size and not killed.exists():
            killed.touch()
            if args.machine:
                os.kill(os.getppid(), signal.SIGKILL)  # torchrun
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.run(loader, max_epochs=args.epochs)
    weights = ddl.full_state_dict(model)
    if rank == 0:
        torch.save(weights, args.folder / "weights.pt")
        print(f"done: {trainer.state.iteration} steps, loss {trainer.state.output:.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints; all machines see it")
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints, default 5")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--shard", action="store_true", help="shard weights and optimizer over the ranks")
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="steps after which a rank kills itself, once")
    parser.add_argument("--machine", action="store_true", help="kill the rank's torchrun, too")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with ddl.Parallel(backend="gloo") as parallel:
        parallel.run(training, args)


if __name__ == "__main__":
    main()
