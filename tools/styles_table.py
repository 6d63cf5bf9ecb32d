"""Writes docs/tensor_styles.md: what each tensor-parallel style moves, counted at the process group.

python tools/styles_table.py            writes the page
python tools/styles_table.py --check    says whether it is up to date (tests/package/test_tensor.py does too)
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import ignite_ddl as ddl
from ignite_ddl.lab.bytes import count_bytes
from ignite_ddl.tensor.gradients import redistribute_gradient

PAGE = Path(__file__).parents[1] / "docs" / "tensor_styles.md"
TP, ROWS, TOKENS, WIDTH, WORDS, CHANNELS, SIDE = 4, 2, 8, 16, 65, 8, 6


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        gate, values = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * values)


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) + self.v(x)


def linear():
    return nn.Linear(WIDTH, 4 * WIDTH)


def head():
    return nn.Linear(WIDTH, WORDS, bias=False)


def convolution():
    return nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, padding=1)


def tokens(cut=None, width=WIDTH):
    """Of (N, T, D), what a rank has: all of it, or its part of a dim."""
    shape = [ROWS, TOKENS, width]
    if cut is not None:
        shape[cut] //= TP
    return lambda: torch.randn(shape, requires_grad=True)


def ids():
    return torch.randint(WORDS, (ROWS, TOKENS))


def images(cut=False):
    return lambda: torch.randn(ROWS, CHANNELS // (TP if cut else 1), SIDE, SIDE, requires_grad=True)


def of_words(logits):
    return ddl.cross_entropy(logits.flatten(0, 1), torch.zeros(ROWS * TOKENS, dtype=torch.long))


class Attention(Three):
    n_heads = 4


class Activated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.PReLU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


columns = {name: ddl.Column() for name in "qkv"}
# the style as written, the module, its plan, this rank's input, and what is differentiated
CASES = {
    "Linear layers and embeddings": [
        ("`Column()`", "Linear D → 4·D", linear, {"": ddl.Column()}, tokens(), torch.sum),
        ("`Column(output_layouts=Replicate())`", "Linear D → 4·D", linear,
         {"": ddl.Column(output_layouts=Replicate())}, tokens(), torch.sum),
        ("`Row()`", "Linear 4·D → D", lambda: nn.Linear(4 * WIDTH, WIDTH), {"": ddl.Row()},
         tokens(2, 4 * WIDTH), torch.sum),
        ("`Row(input_layouts=Replicate())`", "Linear 4·D → D", lambda: nn.Linear(4 * WIDTH, WIDTH),
         {"": ddl.Row(input_layouts=Replicate())}, tokens(None, 4 * WIDTH), torch.sum),
        ("`Column()`, then `Row()`", "Linear D → 4·D → D", Pair, {"up": ddl.Column(), "down": ddl.Row()},
         tokens(), torch.sum),
        ("three times `Column()`", "q, k, v: Linear D → D", Three, columns, tokens(), torch.sum),
        ("the same in `SharedInput()`", "q, k, v: Linear D → D", Three, columns | {"": ddl.SharedInput()},
         tokens(), torch.sum),
        ('`Column(units="n_heads")`, three times, in `SharedInput()`', "q, k, v: D → D, by whole heads", Attention,
         {name: ddl.Column(units="n_heads") for name in "qkv"} | {"": ddl.SharedInput()}, tokens(), torch.sum),
        ("`Column(parts=3)`", "Linear D → 3·D, q, k and v in one", lambda: nn.Linear(WIDTH, 3 * WIDTH),
         {"": ddl.Column(parts=3)}, tokens(), torch.sum),
        ("`Column(parts=2)`, then `Row()`", "Linear D → 8·D, gate and values in one, Linear 4·D → D", Gated,
         {"up": ddl.Column(parts=2), "down": ddl.Row()}, tokens(), torch.sum),
        ("`Column()`, `SharedWeight()`, `Row()`", "Linear D → 4·D, PReLU, Linear 4·D → D", Activated,
         {"up": ddl.Column(), "act": ddl.SharedWeight(), "down": ddl.Row()}, tokens(), torch.sum),
        ("`Column()`", "Embedding V × D", lambda: nn.Embedding(WORDS, WIDTH), {"": ddl.Column()}, ids, torch.sum),
        ("`Column(output_layouts=Replicate())`", "Embedding V × D", lambda: nn.Embedding(WORDS, WIDTH),
         {"": ddl.Column(output_layouts=Replicate())}, ids, torch.sum),
        ("`Row()`", "Embedding V × D", lambda: nn.Embedding(WORDS, WIDTH), {"": ddl.Row()}, ids, torch.sum),
    ],
    "The head and its loss": [
        ("`Column(output_layouts=Replicate())`", "Linear D → V, `ddl.cross_entropy`", head,
         {"": ddl.Column(output_layouts=Replicate())}, tokens(), of_words),
        ("`Column(use_local_output=False)`", "Linear D → V, `ddl.cross_entropy`", head,
         {"": ddl.Column(use_local_output=False)}, tokens(), of_words),
    ],
    "Convolutions": [
        ("`OutputChannels()`", "Conv2d C → 2·C, 3 × 3", convolution, {"": ddl.OutputChannels()}, images(), torch.sum),
        ("`InputChannels()`", "Conv2d C → 2·C, 3 × 3", convolution, {"": ddl.InputChannels()}, images(True), torch.sum),
        ("`InputChannels(whole_input=True)`", "Conv2d C → 2·C, 3 × 3", convolution,
         {"": ddl.InputChannels(whole_input=True)}, images(), torch.sum),
    ],
    "Sequence parallelism, random numbers": [
        ("`SplitSequence()`", "any, output (N, T, D)", nn.Identity, {"": ddl.SplitSequence()}, tokens(), torch.sum),
        ("`Sequence()`", "LayerNorm D", lambda: nn.LayerNorm(WIDTH), {"": ddl.Sequence()}, tokens(1), torch.sum),
        ("`Sequence()`", "Dropout", nn.Dropout, {"": ddl.Sequence()}, tokens(1), torch.sum),
        ("`Column(input_layouts=Shard(1))`", "Linear D → 4·D", linear, {"": ddl.Column(input_layouts=Shard(1))},
         tokens(1), torch.sum),
        ("three times `Column()` in `SharedInput(input_layouts=Shard(1))`", "q, k, v: Linear D → D", Three,
         columns | {"": ddl.SharedInput(input_layouts=Shard(1))}, tokens(1), torch.sum),
        ("`Row(output_layouts=Shard(1))`", "Linear 4·D → D", lambda: nn.Linear(4 * WIDTH, WIDTH),
         {"": ddl.Row(output_layouts=Shard(1))}, tokens(2, 4 * WIDTH), torch.sum),
        ("`ShardedRandom()`", "Dropout", nn.Dropout, {"": ddl.ShardedRandom()}, tokens(), torch.sum),
    ],
}  # fmt: skip


def measure(local_rank):
    """Of each case: numbers of the weights that rank 0 holds, and its calls forward and backward."""
    found = []
    for cases in CASES.values():
        for _, _, module, plan, data, loss in cases:
            torch.manual_seed(0)
            model = ddl.auto_model(module(), plan)
            weights = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
            x = data()
            with count_bytes() as forward:
                output = loss(model(x))
            with count_bytes() as backward:
                output.backward()
                for parameter in model.parameters():
                    redistribute_gradient(parameter)
            found.append((weights, forward.calls, backward.calls))
    return found


def say(calls):
    """ "2 × all_reduce 1,024 → 1,024", calls that are alike in one."""
    if not calls:
        return "–"
    lines = [f"{call.op} {call.put_in:,} → {call.got:,}" for call in calls]
    return "<br>".join(
        f"{lines.count(line)} × {line}" if lines.count(line) > 1 else line for line in dict.fromkeys(lines)
    )


HEAD = (
    "# What each tensor-parallel style moves\n\n"
    f"Written by `python tools/styles_table.py`, which runs every line on tp = {TP} and counts at the process group; a "
    "test compares. The numbers are bytes of rank 0 in float32, *put in → got back*, for "
    f"N = {ROWS} rows of T = {TOKENS} tokens of width D = {WIDTH}, a vocabulary of V = {WORDS}, and images of "
    f"C = {CHANNELS} channels and {SIDE} × {SIDE} points. A whole (N, T, D) has {4 * ROWS * TOKENS * WIDTH:,} bytes, "
    f"the logits (N, T, V) {4 * ROWS * TOKENS * WORDS:,}, "
    f"the convolution's output {4 * ROWS * 2 * CHANNELS * SIDE**2:,}. "
    f"Where V is cut, {TP} ranks hold {-(-WORDS // TP)} words each but for the last, and a gather pads its part.\n\n"
    "Backward is what the gradient of the input takes, as of a layer inside a model, and what the gradients of the "
    "weights take before the optimizer steps. *Parameters* are numbers: of the whole layer → on rank 0. How random "
    "numbers are drawn is said at the top of `ignite_ddl/tensor/random.py`. The gradient of a `Row()` embedding is "
    "whole, V × D on every rank, until the trainer cuts it.\n\n"
    "`units=` moves nothing: it says what must stay whole on a rank, such as heads. `parts=` moves nothing either: of "
    "a layer that computes several things in one, which code takes apart again by `chunk`, each rank gets its piece of "
    "each. Code that takes them apart by their whole sizes (`split(width)`) needs all: "
    "`Column(output_layouts=Replicate())`, then `Row(input_layouts=Replicate())`. A `Conv1D` of transformers is cut as "
    "a Linear is, without `parts=`. Weights of single channels between "
    "two layers that are cut (BatchNorm, GroupNorm, `nn.PReLU(C)`) have no style: an error. One weight that all "
    "heads or features share (`nn.PReLU()`, a norm of each head) is a `SharedWeight()`; the trainer says so where a "
    "plan forgets it.\n\n"
    '`tensor_plan="auto"` takes the plan that a model of Hugging Face\'s transformers brings along '
    "(`base_model_tp_plan`): its `colwise` is a `Column()`, `rowwise` and `embedding_rowwise` a `Row()`, "
    "`colwise_gather_output` and `embedding_colwise` a `Column(output_layouts=Replicate())`, `rowwise_split_input` a "
    "`Row(input_layouts=Replicate())`, `packed_colwise` a `Column(parts=2)`, `replicated_with_grad_allreduce` a "
    "`SharedWeight()`. A plan with another style, such as those of experts, is refused.\n\n"
    "`ddl.Experts()` is for ep, not tp, so it has no line here: a rank sends a row of width D for each choice of its "
    "tokens, to the rank of the expert, and gets it back; in the backward pass again. With `tp=` the output of those "
    "rows is summed by an all_reduce over tp.\n"
)


def page():
    ranks = ddl.Parallel("gloo", TP, tp=TP, timeout=60).run(measure)
    found = iter(ranks[0])
    lines = [HEAD]
    for title, cases in CASES.items():
        lines += [f"## {title}\n", "| style | layer | parameters | forward | backward |", "|---|---|---|---|---|"]
        for style, layer, module, *_ in cases:
            held, forward, backward = next(found)
            whole = sum(p.numel() for p in module().parameters())
            weights = f"{whole:,} → {held:,}" if whole else "–"
            lines.append(f"| {style} | {layer} | {weights} | {say(forward)} | {say(backward)} |")
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is out of date")
    check = parser.parse_args().check
    text = page()
    if check:
        if text != PAGE.read_text():
            sys.exit(f"{PAGE.name} is out of date: python tools/styles_table.py")
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
