"""Experts in plain torch, token by token, as the reference for those of ignite_ddl/experts: no code is shared."""

import contextlib
import math
from unittest import mock

import torch
import torch.nn.functional as F

import ignite_ddl as ddl


class ByHand:
    """The forward of a ``ddl.MixtureOfExperts``: a loop over tokens, in the batch's order, with losses in the open."""

    def __init__(self):
        self.losses = []  # of routers, since somebody looked
        self.counts = {}  # choices in this optimizer step by router

    def forward(self, layer, x):
        router, experts, flat = layer.router, layer.experts, x.reshape(-1, x.shape[-1])
        logits = flat @ router.weight.T
        p = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
        n, n_experts = p.shape
        capacity = math.inf
        if router.capacity_factor is not None:
            capacity = math.ceil(router.capacity_factor * router.top_k * n / n_experts)
        chosen, rows, taken = torch.zeros(n_experts, dtype=torch.int64), [], [0] * n_experts
        for token in range(n):
            scores = [p[token, e].item() + router.bias_rate * int(router.raised[e]) for e in range(n_experts)]
            best = sorted(range(n_experts), key=lambda e: (-scores[e], e))[: router.top_k]
            total = sum(p[token, e] for e in best) if router.normalize else 1.0
            row = torch.zeros_like(flat[token])
            for e in best:
                chosen[e] += 1
                if taken[e] < capacity:
                    taken[e] += 1
                    hidden = F.silu(experts.gate[e] @ flat[token]) * (experts.up[e] @ flat[token])
                    row = row + p[token, e] / total * (experts.down[e] @ hidden)
            rows.append(row)
        f = chosen / chosen.sum()
        loss = router.balance_weight * n_experts * sum(f[e] * p[:, e].mean() for e in range(n_experts))
        self.losses.append(loss + router.z_weight * (torch.exp(logits).sum(1).log() ** 2).mean())
        self.counts[router] = self.counts.get(router, 0) + chosen
        y = torch.stack(rows).view_as(x)
        return y if layer.shared is None else y + layer.shared(x)

    def take(self):
        """The sum of the losses of the layers since the last call."""
        losses, self.losses = self.losses, []
        return sum(losses)

    def end_step(self):
        for router, chosen in self.counts.items():
            mean = chosen.sum() / len(chosen)
            router.raised += (chosen < mean).long() - (chosen > mean).long()
        self.counts = {}

    @contextlib.contextmanager
    def used(self):
        with mock.patch.object(ddl.MixtureOfExperts, "forward", lambda layer, x: self.forward(layer, x)):
            yield self
