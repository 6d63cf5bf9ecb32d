"""Tensor parallelism: a plan of styles, by module name, applied on the tp axis.

A plan is a dict from globs of module names to styles: those of :mod:`ignite_ddl.tensor.styles`, which check that
nothing is cut that must stay whole, or torch's own. What the plan leaves out stays replicated on every tp rank.
`docs/tensor_styles.md` lists what each style moves, counted.

**Cut and whole.** The input and the output of a styled module are plain tensors, as the module's code expects:
whole, or this rank's part. :class:`Column` and :class:`OutputChannels` leave their output cut, :class:`Row` and
:class:`InputChannels` take it cut and give the whole again. Between the two, code sees fewer heads, features or
channels than it asked for. What works on each by itself and has no weights (ReLU, pooling, attention of a head) needs
no style. A weight that all of them share (``nn.PReLU``, a norm of each head) gets a part of its gradient on each rank:
:class:`SharedWeight` sums it, and the trainer raises an error where a plan forgets it. Weights of single channels
(BatchNorm, GroupNorm, ``nn.PReLU(C)``) have no style, and what mixes features, such as a softmax over them, has no
place there.

The rule for random numbers stands in :mod:`ignite_ddl.tensor.random`.
"""

from ignite_ddl.tensor.loss import cross_entropy
from ignite_ddl.tensor.styles import (
    Column,
    InputChannels,
    OutputChannels,
    Row,
    Sequence,
    ShardedRandom,
    SharedInput,
    SharedWeight,
    SplitSequence,
)

__all__ = [
    "Column",
    "InputChannels",
    "OutputChannels",
    "Row",
    "Sequence",
    "ShardedRandom",
    "SharedInput",
    "SharedWeight",
    "SplitSequence",
    "cross_entropy",
]
