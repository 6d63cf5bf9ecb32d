"""A small GPT that can be split by layers on the pp axis, and by heads and vocabulary on the tp axis.

The layers are those of GPT-2 (Radford et al. 2019) with the plan of Megatron-LM (Shoeybi et al. 2019). In the
comments N is the batch, T the tokens of a row, D the width, H the heads and V the vocabulary; on a tp rank, H and
the 4·D in the middle of a block are that rank's part.
"""

from collections import OrderedDict

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from ignite_ddl.arguments import check, whole
from ignite_ddl.course.models import _check_counts, _layers_at
from ignite_ddl.structure import full_tensors
from ignite_ddl.tensor import Column, Row, Sequence, ShardedRandom, SharedInput, SplitSequence


class Embedding(nn.Module):
    """A vector for each token, and one for its place in the row."""

    def __init__(self, vocabulary_size, length, width):
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, ids):  # (N, T)
        if ids.shape[1] > len(self.position):
            raise ValueError(f"ids has rows of {ids.shape[1]} tokens; the model's length is {len(self.position)}")
        return self.token(ids) + self.position[: ids.shape[1]]  # (N, T, D)


class Heads(nn.Module):
    """Scaled dot-product attention of each head, with dropout of the attention weights."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, q, k, v):  # (N, H, T, D / n_heads) each
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, width, n_heads, dropout):
        super().__init__()
        self.n_heads = n_heads
        self.head_width = width // n_heads
        # Three layers, not one of three times the width, so that each can be sharded by whole heads.
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.mix = Heads(dropout)
        self.out = nn.Linear(width, width)

    def forward(self, x):  # (N, T, D)
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))  # (N, H, T, D / n_heads) each
        y = self.mix(q, k, v)  # (N, H, T, D / n_heads)
        return self.out(y.transpose(1, 2).flatten(2))  # (N, T, D)

    def heads(self, x):  # (N, T, H · D / n_heads), with the H of this rank
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Block(nn.Module):
    """Attention, then an MLP for each token; each adds to its input."""

    def __init__(self, width, n_heads, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, n_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):  # (N, T, D)
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))  # D -> 4·D -> D


class Head(nn.Module):
    """The logits of the next token."""

    def __init__(self, vocabulary_size, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary_size, bias=False)

    def forward(self, x):  # (N, T, D)
        return self.out(self.norm(x))  # (N, T, V)


class GPT(nn.Sequential):
    """A decoder-only transformer: embed, block0, block1, ..., head.

    The weights come from torch's random stream: call `torch.manual_seed` first where they must be the same.

    Args:
        vocabulary_size: Number of tokens; the tp axis need not divide it.
        length: Longest row, in tokens. Default: 64.
        width: Numbers per token. Default: 128, which makes 0.8 million parameters with four blocks.
        n_heads: Attention heads per block; divides ``width``, and is divisible by the size of tp. Default: 4.
        n_blocks: Number of blocks; the model has ``n_blocks + 2`` layers to be cut into stages. Default: 4.
        tied: Whether the head uses the embedding's weight. Default: True.
        dropout: Dropout probability of the attention weights and of each block's additions; for its random numbers
            on a mesh see ``ignite_ddl.tensor``. Default: 0.0.

    Attributes:
        tensor_plan: The tensor-parallel plan, for ``ddl.auto_model(model, GPT.tensor_plan)``: attention by heads,
            the MLP by columns and rows, embedding and head by vocabulary, so that they stay tied; logits are
            replicated.
        cut_logits_plan: The same, but logits are sharded by vocabulary, for ``ddl.cross_entropy`` as the loss.
        sequence_plan: The same as cut_logits_plan, with sequence parallel between the sharded layers: each tp rank
            has its part of the tokens. The size of the tp axis must divide the number of tokens of a row.

    Returns:
        Of its forward: logits of shape (N, T, vocabulary_size), for ids of shape (N, T) with T ≤ ``length``.

    Raises:
        ValueError: If a count is not a whole number of at least 1, ``n_heads`` does not divide ``width``, or
            ``dropout`` is not in [0, 1).

    Example:
        >>> import torch
        >>> from ignite_ddl.course import GPT
        >>> model = GPT(vocabulary_size=80, length=16, width=32, n_heads=4, n_blocks=2)
        >>> model(torch.zeros(3, 16, dtype=torch.long)).shape
        torch.Size([3, 16, 80])
    """

    tensor_plan = {
        "embed.token": Row(),  # a rank holds some tokens; outputs are summed
        "block*.attention": SharedInput(),  # q, k and v share one input, whose gradient is reduced once
        "block*.attention.[qkv]": Column(units="n_heads"),
        "block*.attention.mix": ShardedRandom(),  # each rank draws the dropout of its own heads
        "block*.attention.out": Row(),
        "block*.up": Column(),
        "block*.down": Row(),
        "head.out": Column(output_layouts=Replicate()),
    }
    cut_logits_plan = tensor_plan | {"head.out": Column(use_local_output=False)}
    sequence_plan = tensor_plan | {
        "embed": SplitSequence(),  # T tokens -> T / tp
        "block*.norm[12]": Sequence(),
        "block*.attention": SharedInput(input_layouts=Shard(1)),  # T / tp -> T
        "block*.attention.out": Row(output_layouts=Shard(1)),  # T -> T / tp
        "block*.dropout": Sequence(),
        "block*.up": Column(input_layouts=Shard(1)),
        "block*.down": Row(output_layouts=Shard(1)),
        "head.norm": Sequence(),
        "head.out": Column(input_layouts=Shard(1), use_local_output=False),
    }

    def __init__(self, vocabulary_size, length=64, width=128, n_heads=4, n_blocks=4, tied=True, dropout=0.0):
        _check_counts(vocabulary_size=vocabulary_size, length=length, width=width, n_heads=n_heads, n_blocks=n_blocks)
        if width % n_heads:
            raise ValueError(f"n_heads is {n_heads}; it has to divide the width, {width}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout!r}; it has to be at least 0 and below 1")
        layers = OrderedDict(embed=Embedding(vocabulary_size, length, width))
        layers |= {f"block{index}": Block(width, n_heads, dropout) for index in range(n_blocks)}
        layers["head"] = Head(vocabulary_size, width)
        super().__init__(layers)
        self.length = length
        if tied:
            self.head.out.weight = self.embed.token.weight

    def __getitem__(self, index):
        return _layers_at(self, index)


@torch.no_grad()
def generate(model, ids, n, temperature=1.0, seed=0, length=None):
    """Samples a continuation, token by token; on a mesh every rank calls it and gets the same.

    Args:
        model: A :class:`GPT`, also one that ``ddl.auto_model`` has cut. The model reads all tokens again for each new
            one: under pp each token takes a pass through all stages.
        ids: The prompt: a long tensor of shape (T,) or a list, at least one id.
        n: Number of tokens to sample.
        temperature: Divides the logits: below 1, likely tokens become more likely. Default: 1.0.
        seed: Of the samples; the global random stream is not used. Default: 0.
        length: Number of last tokens that the model reads. Default: ``model.length``, which a model that DDP has
            wrapped or pp has cut does not have.

    Returns:
        A long tensor of shape (T + n,) on the CPU, including the prompt.

    Raises:
        ValueError: If ``length`` is not known, ``ids`` is empty, ``n`` is negative or ``temperature`` not positive.

    Example:
        >>> from ignite_ddl.course import GPT, generate
        >>> generate(GPT(vocabulary_size=8, length=4, width=8, n_heads=2, n_blocks=1), [1, 2], n=5).shape
        torch.Size([7])
    """
    length = getattr(model, "length", None) if length is None else length
    if length is None:
        raise ValueError(f"length is None, and a {type(model).__name__} has none: give the length of the GPT")
    check("n", n, whole(0))
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature!r}; it has to be positive")
    ids = torch.as_tensor(ids).long()
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"ids has the shape {tuple(ids.shape)}; it has to be a row of at least one id")
    draws = torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    for _ in range(n):
        logits = full_tensors(model(ids[None, -length:].to(idist.device())))[0, -1]  # (V,), after the last token
        chances = (logits.double().cpu() / temperature).softmax(0)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=draws)])
    model.train(training)
    return ids
