"""Trains a small character GPT on Jane Austen's "Persuasion", on one process or on a mesh of them:

    python train_gpt.py                                        # one process, about a minute
    python train_gpt.py --ranks 8 --dp 2 --pp 2 --tp 2         # eight processes on this machine
    torchrun --nproc_per_node 8 train_gpt.py --plan auto       # the planner chooses the mesh
    torchrun --nproc_per_node 8 train_gpt.py --dp-shard 4      # HSDP: two replicas, each sharded over four ranks
    srun -n 8 python train_gpt.py --dp 2 --pp 2 --tp 2

Each trains the same model on the same rows. With --checkpoints FOLDER the run is saved, and --resume goes on from
there, on the same mesh or another one. Ranks that share one CPU are slower than one process: eight on two cores take
minutes an epoch, so try them with --steps 20. A mesh pays where every rank has a device of its own.
"""

import argparse
import math
from pathlib import Path

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Events
from ignite.handlers import PiecewiseLinear, ProgressBar
from ignite.metrics import Accuracy, Loss, RunningAverage

import ignite_ddl as ddl
from ignite_ddl.course import GPT, CharacterText, generate
from ignite_ddl.pipeline.schedules import SCHEDULES
from ignite_ddl.precision import AMP_MODES

PROMPT = "Captain Wentworth "
PLANNED = ("dp", "pp", "tp", "dp_replicate", "dp_shard", "schedule", "microbatches", "shard")


def new_model(args):
    sizes = {"width": args.width, "n_heads": args.heads, "n_blocks": args.blocks, "tied": not args.untied}
    return GPT(CharacterText.vocabulary_size, args.length, **sizes).to(getattr(torch, args.dtype))


def bits_per_character(logits, y):
    return F.cross_entropy(logits, y) / math.log(2)


def classes_second(logits):  # (N, T, V) -> (N, V, T), as cross entropy and Ignite's metrics take it
    return logits.transpose(1, 2)


def training(local_rank, args):
    torch.manual_seed(args.seed)
    texts = [CharacterText(split, args.length) for split in ("train", "test")]
    train_loader = ddl.auto_dataloader(texts[0], batch_size=args.batch_size, shuffle=True)
    test_loader = ddl.auto_dataloader(texts[1], batch_size=args.batch_size)
    cut = {"schedule": args.schedule, "n_microbatches": args.microbatches, "shard": args.shard}
    model = ddl.auto_model(new_model(args), GPT.tensor_plan, **cut)
    optimizer = ddl.auto_optim(torch.optim.AdamW(model.parameters(), lr=args.lr))
    options = {"device": idist.device(), "model_transform": classes_second, "amp_mode": args.amp_mode}
    trainer = ddl.create_supervised_trainer(model, optimizer, bits_per_character, max_norm=1.0, **options)
    metrics = {"accuracy": Accuracy(), "bits": Loss(bits_per_character)}
    evaluator = ddl.create_supervised_evaluator(model, metrics, **options)

    n_steps = args.epochs * (args.steps or len(train_loader))
    rates = [(0, 0.0), (n_steps // 20, args.lr), (n_steps, args.lr / 10)]  # warm up, then down in a line
    schedule = PiecewiseLinear(optimizer, "lr", rates)
    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)
    trainer.state.bits = []  # of each step
    trainer.state_dict_user_keys.append("bits")  # so that checkpoints have them
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: engine.state.bits.append(engine.state.output))
    RunningAverage(output_transform=lambda bits: bits).attach(trainer, "running bits")
    if idist.get_rank() == 0:
        ProgressBar().attach(trainer, ["running bits"], event_name=Events.ITERATION_COMPLETED(every=5))
        if idist.get_world_size() > 1:
            print(ddl.get_mesh())

    @trainer.on(Events.EPOCH_COMPLETED)
    def report(engine):
        seconds, bits = engine.state.times["EPOCH_COMPLETED"], engine.state.bits[-engine.state.epoch_length :]
        test = evaluator.run(test_loader).metrics
        if idist.get_rank() == 0:
            print(
                f"epoch {engine.state.epoch}: {sum(bits) / len(bits):.5f} bits per character, "
                f"test {test['bits']:.5f} (accuracy {test['accuracy']:.2%}), {seconds:.1f} s",
                flush=True,
            )

    if args.checkpoints:
        parts = {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": train_loader}
        parts["schedule"] = schedule
        found = ddl.Checkpoint.load_newest(parts, args.checkpoints) if args.resume else None
        if idist.get_rank() == 0 and args.resume:
            print(f"resumes from {found.name}" if found else f"{args.checkpoints} has no checkpoint: starts anew")
        saves = ddl.Checkpoint(parts, args.checkpoints, n_saved=2)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=args.every), saves)

    trainer.run(train_loader, max_epochs=args.epochs, epoch_length=args.steps)

    weights = ddl.full_state_dict(model)
    if idist.get_rank() == 0:
        whole = new_model(args).to(idist.device())
        whole.load_state_dict(weights)
        if args.save:
            torch.save(weights, args.save)
        drawn = generate(whole, CharacterText.encode(PROMPT), args.sample, temperature=0.8, seed=args.seed)
        print(f"a sample:\n{CharacterText.decode(drawn)}")


def positive(kind):
    def parse(text):
        if not 0 < kind(text) < math.inf:
            raise argparse.ArgumentTypeError(f"should be positive, but given {text}")
        return kind(text)

    parse.__name__ = kind.__name__  # argparse's messages have it
    return parse


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    count, rate = positive(int), positive(float)
    add = parser.add_argument
    add("--ranks", type=count, help="processes to start here; leave it out under torchrun and srun")
    add("--dp", type=int, default=-1, help="data-parallel ranks, default -1: all that pp and tp leave")
    add("--pp", type=int, default=1, help="pipeline ranks, default 1")
    add("--tp", type=int, default=1, help="ranks that share each layer, default 1")
    add("--dp-replicate", type=int, help="HSDP: replicas of the model, over which gradients are averaged")
    add("--dp-shard", type=int, help="HSDP: data-parallel ranks over which the weights of a replica are sharded")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline, default 1f1b")
    add("--microbatches", type=count, help="of the pipeline, default one per stage")
    add("--shard", action="store_true", default=None, help="shard weights and optimizer over dp (FSDP2)")
    add("--plan", choices=["auto"], help="let ignite_ddl.lab.plan choose the eight above for the ranks at hand")
    add("--backend", default="gloo", help="default gloo, on the CPU; nccl for one GPU per rank")
    add("--amp-mode", choices=AMP_MODES, help="mixed precision by autocast, such as bfloat16")
    add("--dtype", choices=["float32", "float64"], default="float32", help="of the weights, default float32")
    add("--epochs", type=count, default=4, help="default 4")
    add("--steps", type=count, help="steps per epoch, default all: 206")
    add("--batch-size", type=count, default=32, help="rows of a step, over all ranks; default 32")
    add("--lr", type=rate, default=2e-3, help="highest learning rate of AdamW, default 0.002")
    add("--length", type=count, default=64, help="characters per row, default 64")
    add("--width", type=count, default=128, help="numbers per character in the model, default 128")
    add("--heads", type=count, default=4, help="attention heads, default 4")
    add("--blocks", type=count, default=4, help="transformer blocks, default 4")
    add("--untied", action="store_true", help="give the head a weight of its own, not the embedding's")
    add("--seed", type=int, default=0, help="default 0")
    add("--sample", type=count, default=400, help="characters to draw at the end, default 400")
    add("--save", type=Path, metavar="FILE", help="write the weights there, as a plain state dict")
    add("--checkpoints", type=Path, metavar="FOLDER", help="save the run there; all machines see it")
    add("--every", type=count, default=50, help="steps between two checkpoints, default 50")
    add("--resume", action="store_true", help="go on from the newest checkpoint, on any mesh")
    return parser


def choose(args, n_ranks):
    """Sets the mesh and the cut as the lab's planner finds them best: the same on every rank."""
    from ignite_ddl.lab.cost import Link
    from ignite_ddl.lab.plan import A100, Cluster, Model, plan

    model = Model.of(new_model(args), args.length, sequence_parallel=False)
    # ASSUMED of a CPU rank: two ranks a core, and what gloo takes for a message. Of a GPU: an A100's numbers.
    link = Link(latency=2e-4, bandwidth=1e9)
    device = A100 if args.backend == "nccl" else {"memory": 1e9, "flops": 5e9, "inside": link, "between": link}
    plans = plan(model, Cluster(n_ranks, **device), args.batch_size, recompute=["selective"])
    # Without a pipeline, microbatches would be gradient accumulation, which this script does not do; nor cp and HSDP.
    able = [one for one in plans if one.fits and not one.lacks and one.cp == 1 and one.dp_shard == one.dp]
    best = next((one for one in able if one.pp > 1 or (one.microbatches == 1 and one.zero != 2)), None)
    if best is None:
        raise ValueError("--plan auto found no mesh on which the model fits")
    args.dp, args.pp, args.tp, args.shard = best.dp, best.pp, best.tp, best.zero > 0
    if best.pp > 1:
        args.schedule, args.microbatches = best.schedule, best.microbatches


def check(args, mesh):
    """Raises what is wrong with the arguments before any rank is started; ``mesh`` has the size of each axis."""
    if args.resume and not args.checkpoints:
        raise ValueError("--resume needs --checkpoints, the folder to go on from")
    if args.save and not args.save.absolute().parent.is_dir():
        raise ValueError(f"--save should name a file in a folder that exists, but given {args.save}")
    texts = [CharacterText(split, args.length) for split in ("train", "test")]
    cut = {"schedule": args.schedule, "n_microbatches": args.microbatches}
    rows = args.batch_size, len(texts[0]) % args.batch_size  # of the last batch
    ddl.check_model(new_model(args), GPT.tensor_plan, **cut, **mesh, batches=rows)


def main():
    parser = make_parser()
    args = parser.parse_args()
    try:
        if args.plan:
            given = [name for name in PLANNED if getattr(args, name) != parser.get_default(name)]
            if given:
                raise ValueError(f"--plan auto chooses --{given[0].replace('_', '-')} itself: leave out one of the two")
            whole = ddl.Parallel(backend=args.backend, nproc_per_node=args.ranks, dp=-1)
            choose(args, whole.mesh_sizes["dp"])
        mesh = {name: getattr(args, name) for name in ("dp", "pp", "tp", "dp_replicate", "dp_shard")}
        parallel = ddl.Parallel(backend=args.backend, nproc_per_node=args.ranks, **mesh)
        check(args, parallel.mesh_sizes)
    except (ValueError, OSError) as error:
        parser.error(str(error).replace("nproc_per_node", "--ranks"))
    with parallel:
        parallel.run(training, args)


if __name__ == "__main__":
    main()
