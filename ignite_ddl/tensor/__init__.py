"""Tensor parallelism: a plan of styles, by module name, applied on the tp axis.

A plan is a dict from globs of module names to styles: those of this package, which check that nothing is sharded that
must stay full, or torch's own. Modules that the plan does not name are replicated on every tp rank.
`docs/tensor_styles.md` lists the measured communication of each style.

**Sharded regions.** The input and the output of a styled module are plain tensors: full, or this rank's part.
:class:`Column` and :class:`OutputChannels` leave their output sharded; :class:`Row` and :class:`InputChannels` take a
sharded input and return a full output. Between the two, code sees fewer heads, features or channels than in one
process:

- Modules without weights that treat each head, feature or channel separately (ReLU, pooling, attention of a head)
  need no style.
- A weight that all heads, features or channels share (``nn.PReLU``, a norm of each head) gets only a part of its
  gradient on each rank: :class:`SharedWeight` sums the parts. The trainer raises an error if it is missing.
- Modules with a weight for each channel (BatchNorm, GroupNorm, ``nn.PReLU(C)``) and code that mixes features, such as
  a softmax over them, cannot be in a sharded region.

:mod:`ignite_ddl.tensor.random` states the rule for random numbers.
"""

from ignite_ddl.tensor.convolution import InputChannels, OutputChannels
from ignite_ddl.tensor.inside import ShardedRandom, SharedWeight
from ignite_ddl.tensor.linear import Column, Row, SharedInput
from ignite_ddl.tensor.loss import cross_entropy
from ignite_ddl.tensor.sequence import Sequence, SplitSequence

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
