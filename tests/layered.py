"""Models of named layers, for the tests of layers that are named, made late and costed."""

import torch
from torch import nn


class Block(nn.Module):
    """Draws its weights in two ways, and has a buffer."""

    def __init__(self, width, scale=1.0):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        nn.init.normal_(self.down.weight, std=0.1 * scale)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """No Sequential: its layers are in a list and beside it."""

    def __init__(self, width=4, n=6):
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(n)])
        self.head = nn.Linear(width, 5)

    def pipeline_layers(self):
        return ["embed", *(f"blocks.{i}" for i in range(len(self.blocks))), "head"]

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
