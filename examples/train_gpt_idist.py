"""Trains a small character GPT on Jane Austen's "Persuasion" with plain Ignite: one process, or data parallel.

    python train_gpt_idist.py                                  # one process, about a minute
    python train_gpt_idist.py --ranks 4                        # four processes on this machine
    torchrun --nproc_per_node 4 train_gpt_idist.py
    srun -n 4 python train_gpt_idist.py

`train_gpt.py` is this script on a mesh; `diff train_gpt_idist.py train_gpt.py` shows what that takes.
"""

import argparse
import math
from pathlib import Path

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import PiecewiseLinear, ProgressBar
from ignite.metrics import Accuracy, Average, Loss, RunningAverage

from ignite_ddl.course import GPT, CharacterText, generate

PROMPT = "Captain Wentworth "


def new_model(args):
    sizes = {"width": args.width, "n_heads": args.heads, "n_blocks": args.blocks, "tied": not args.untied}
    return GPT(CharacterText.vocabulary_size, args.length, **sizes)


def bits_per_character(logits, y):
    return F.cross_entropy(logits, y) / math.log(2)


def classes_second(logits):  # (N, T, V) -> (N, V, T), as cross entropy and Ignite's metrics take it
    return logits.transpose(1, 2)


def training(local_rank, args):
    torch.manual_seed(args.seed)
    texts = [CharacterText(split, args.length) for split in ("train", "test")]
    train_loader = idist.auto_dataloader(texts[0], batch_size=args.batch_size, shuffle=True)
    test_loader = idist.auto_dataloader(texts[1], batch_size=args.batch_size)
    model = idist.auto_model(new_model(args))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=args.lr))
    options = {"device": idist.device(), "model_transform": classes_second}
    trainer = create_supervised_trainer(model, optimizer, bits_per_character, **options)

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    optimizer.register_step_pre_hook(clip)
    if idist.get_world_size() > 1:
        set_epoch = train_loader.sampler.set_epoch
        trainer.add_event_handler(Events.EPOCH_STARTED, lambda engine: set_epoch(engine.state.epoch))
    metrics = {"accuracy": Accuracy(), "bits": Loss(bits_per_character)}
    evaluator = create_supervised_evaluator(model, metrics, **options)

    n_steps = args.epochs * (args.steps or len(train_loader))
    rates = [(0, 0.0), (n_steps // 20, args.lr), (n_steps, args.lr / 10)]  # warm up, then down in a line
    trainer.add_event_handler(Events.ITERATION_STARTED, PiecewiseLinear(optimizer, "lr", rates))
    Average().attach(trainer, "bits")
    RunningAverage(output_transform=lambda bits: bits).attach(trainer, "running bits")
    if idist.get_rank() == 0:
        ProgressBar().attach(trainer, ["running bits"], event_name=Events.ITERATION_COMPLETED(every=5))

    @trainer.on(Events.EPOCH_COMPLETED)
    def report(engine):
        seconds = engine.state.times["EPOCH_COMPLETED"]
        test = evaluator.run(test_loader).metrics
        if idist.get_rank() == 0:
            print(
                f"epoch {engine.state.epoch}: {engine.state.metrics['bits']:.5f} bits per character, "
                f"test {test['bits']:.5f} (accuracy {test['accuracy']:.2%}), {seconds:.1f} s",
                flush=True,
            )

    trainer.run(train_loader, max_epochs=args.epochs, epoch_length=args.steps)

    weights = getattr(model, "module", model).state_dict()
    if idist.get_rank() == 0:
        whole = new_model(args)
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
    add("--backend", default="gloo", help="default gloo; nccl for one GPU per rank")
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
    return parser


def check(args):
    """Raises what is wrong with the arguments before any rank is started."""
    if args.save and not args.save.absolute().parent.is_dir():
        raise ValueError(f"--save should name a file in a folder that exists, but given {args.save}")
    for split in ("train", "test"):
        CharacterText(split, args.length)
    new_model(args)


def main():
    parser = make_parser()
    args = parser.parse_args()
    try:
        parallel = idist.Parallel(backend=args.backend, nproc_per_node=args.ranks)
        check(args)
    except (ValueError, OSError) as error:
        parser.error(str(error).replace("nproc_per_node", "--ranks"))
    with parallel:
        parallel.run(training, args)


if __name__ == "__main__":
    main()
