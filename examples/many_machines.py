"""Trains a small GPT on one process, one machine or many:

    python many_machines.py                        # one process
    python many_machines.py --ranks 4 --tp 2       # four processes on this machine
    torchrun --nnodes 2 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint HOST:29500 many_machines.py --tp 2
    srun --nodes 2 --ntasks-per-node 2 python many_machines.py --tp 2

Each prints the same losses, to 12 digits after the point and more. Run the line of torchrun on every machine, with the
name of one of them as HOST. machines.sbatch is the last line as a job for Slurm.
"""

import argparse
import socket
import tempfile
from pathlib import Path

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Events

import ignite_ddl as ddl
from ignite_ddl.course import GPT, CharacterText


def download(folder):
    """Stands for a download: writes the text to a folder of this machine, unless it is there."""
    file = Path(folder) / "text.pt"
    if not file.exists():
        print(f"{socket.gethostname()}: rank {idist.get_rank()} downloads")
        text = CharacterText(length=64)
        torch.save([text[i] for i in range(1000)], file)
    return torch.load(file)


def training(local_rank, args):
    rank, n_ranks = idist.get_rank(), idist.get_world_size()
    print(f"{socket.gethostname()}: rank {rank} of {n_ranks}, local rank {local_rank}", flush=True)
    with idist.one_rank_first(local=True):  # the first rank of each machine; the others find the file
        rows = download(args.folder)
    loader = ddl.auto_dataloader(rows, batch_size=args.batch_size)  # rows of a step, over all machines
    torch.manual_seed(0)
    model = ddl.auto_model(GPT(CharacterText.vocabulary_size, width=args.width, n_blocks=2).double(), GPT.tensor_plan)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5))
    trainer = ddl.create_supervised_trainer(
        model, optimizer, F.cross_entropy, model_transform=lambda logits: logits.transpose(1, 2)
    )

    @trainer.on(Events.ITERATION_COMPLETED)
    def report():
        if rank == 0:  # one line a step, not one a rank
            print(f"step {trainer.state.iteration}: loss {trainer.state.output:.15f}", flush=True)

    trainer.run(loader, max_epochs=1, epoch_length=args.steps)
    weights = ddl.full_state_dict(model)  # every rank calls it
    if rank == 0 and args.save:
        torch.save(weights, args.save)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, help="processes to start here; leave it out under torchrun and srun")
    add("--tp", type=int, default=1, help="ranks that share each layer; the others are data parallel")
    add("--backend", default="gloo", help="default gloo; nccl for one GPU per rank")
    add("--steps", type=int, default=5)
    add("--batch-size", type=int, default=16, help="rows of a step, over all ranks; default 16")
    add("--width", type=int, default=32, help="numbers per character in the model, default 32")
    add("--group-timeout", type=float, default=60, help="seconds that a rank waits for others, default 60")
    add("--folder", default=tempfile.gettempdir(), help="of this machine, for what is downloaded")
    add("--save", help="file for the trained weights, written by rank 0")
    args = parser.parse_args()
    with ddl.Parallel(args.backend, args.ranks, tp=args.tp, group_timeout=args.group_timeout) as parallel:
        parallel.run(training, args)


if __name__ == "__main__":
    main()
