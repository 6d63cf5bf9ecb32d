"""What autograd keeps for the backward pass, counted."""

import torch
from torch import nn

from ignite_ddl.lab.memory import SavedBytes


def test_saved_bytes_are_counted_once_and_until_their_backward_pass():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU())
    x, row = torch.randn(6, 8), 8 * 4
    with SavedBytes(layers) as saved:
        first, second = layers(x[:2]), layers(x[2:])
        # x, of which a microbatch counts its own rows, and the outputs of tanh and relu
        assert saved.now == saved.peak == 6 * 3 * row
        first.sum().backward()
        assert saved.now == 4 * 3 * row
        third = layers(x[:2])
        assert saved.peak == 6 * 3 * row
        second.sum().backward()
        third.sum().backward()
        assert saved.now == 0
        saved.reset()
        assert saved.peak == 0
        layers(x)  # and thrown away
        assert (saved.now, saved.peak) == (0, 6 * 3 * row)
    layers(x)
    assert saved.peak == 6 * 3 * row  # outside nothing is counted
