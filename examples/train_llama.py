"""Trains a small Llama of Hugging Face's transformers on Jane Austen's "Persuasion", tensor and data parallel:

    python train_llama.py                                      # one process
    python train_llama.py --ranks 4 --dp 2 --tp 2              # four processes on this machine
    torchrun --nproc_per_node 8 train_llama.py --tp 2 --shard  # four copies of two ranks each, sharded by FSDP2
    python train_llama.py --load FOLDER                        # go on from a folder of safetensors

The model is transformers' own, from a configuration: nothing is downloaded, and not a line of it is changed. It
brings its tensor plan along. It needs `pip install transformers`. Each mesh gives the losses of one process.
"""

import argparse
import math

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Events

import ignite_ddl as ddl
from ignite_ddl.course import CharacterText, import_torchvision


def new_model(args):
    import_torchvision()  # transformers imports it; see ignite_ddl/course/vision.py
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=CharacterText.vocabulary_size,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.length,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def bits_per_character(logits, y):
    return F.cross_entropy(logits, y) / math.log(2)


def logits_of(output):  # (N, T, V) -> (N, V, T), as cross entropy takes it
    return output.logits.transpose(1, 2)


def training(local_rank, args):
    torch.manual_seed(args.seed)
    text = CharacterText("train", args.length)
    loader = ddl.auto_dataloader(text, batch_size=args.batch_size, shuffle=True)
    if args.load:
        with ddl.empty_weights():  # no rank ever holds more than its part and one tensor
            model = new_model(args)
        model = ddl.auto_model(model, "auto", shard=args.shard)
        ddl.import_weights(model, args.load)
    else:
        model = ddl.auto_model(new_model(args), "auto", shard=args.shard)
    optimizer = ddl.auto_optim(torch.optim.AdamW(model.parameters(), lr=args.lr))
    trainer = ddl.create_supervised_trainer(
        model, optimizer, bits_per_character, model_transform=logits_of, amp_mode=args.amp, max_norm=1.0
    )
    ddl.Throughput().attach(trainer)

    @trainer.on(Events.ITERATION_COMPLETED(every=args.every))
    def report(engine):
        if idist.get_rank() == 0:
            speed = engine.state.metrics.get("tokens/s", math.nan)
            print(
                f"step {engine.state.iteration}: {engine.state.output:.5f} bits per character, {speed:.0f} tokens/s",
                flush=True,
            )

    trainer.run(loader, max_epochs=1, epoch_length=args.steps)
    if args.save:
        ddl.export_weights(model, args.save)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, help="processes to start here; leave it out under torchrun and srun")
    add("--dp", type=int, default=-1, help="data-parallel ranks, default -1: all that tp leaves")
    add("--tp", type=int, default=1, help="ranks that share each layer, default 1")
    add("--shard", action="store_true", help="shard weights and optimizer over dp (FSDP2)")
    add("--backend", default="gloo", help="default gloo; nccl for one GPU per rank")
    add("--amp", choices=["bfloat16", "float16"], help="mixed precision, default none")
    add("--steps", type=int, default=50, help="default 50")
    add("--every", type=int, default=10, help="steps between two lines, default 10")
    add("--batch-size", type=int, default=32, help="rows of a step, over all ranks; default 32")
    add("--lr", type=float, default=2e-3, help="learning rate of AdamW, default 0.002")
    add("--length", type=int, default=64, help="characters per row, default 64")
    add("--width", type=int, default=64, help="numbers per character in the model, default 64")
    add("--blocks", type=int, default=2, help="transformer blocks, default 2")
    add("--seed", type=int, default=0, help="default 0")
    add("--load", metavar="FOLDER", help="begin with the weights of these safetensors")
    add("--save", metavar="FOLDER", help="write the weights there, as safetensors")
    args = parser.parse_args()
    with ddl.Parallel(backend=args.backend, nproc_per_node=args.ranks, dp=args.dp, tp=args.tp) as parallel:
        parallel.run(training, args)


if __name__ == "__main__":
    main()
