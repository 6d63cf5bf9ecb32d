"""Which experts a token visits, the same on any mesh: losses and drops are those of all ranks' tokens."""

from __future__ import annotations

import math
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ignite_ddl.arguments import COUNT, FLAG, number, or_none, takes
from ignite_ddl.collectives import gathered
from ignite_ddl.experts.balance import add_loss, balance_loss, change_of_bias, has_rows, z_loss
from ignite_ddl.experts.dispatch import sorted_by_expert
from ignite_ddl.mesh import get_mesh


@takes(
    n_features=COUNT, n_experts=COUNT, top_k=COUNT, normalize=FLAG, capacity_factor=or_none(number(0.0)),
    **dict.fromkeys(("balance_weight", "z_weight", "bias_rate"), number(0.0)),
)  # fmt: skip
class Router(nn.Module):
    """Chooses ``top_k`` experts for each token by a linear layer and a softmax, computed in float32 at least.

    Of equal probabilities, the expert of the lowest number is chosen. In training, the gradient of ``balance_weight`` ×
    :func:`balance_loss <ignite_ddl.experts.balance.balance_loss>` + ``z_weight`` × :func:`z_loss
    <ignite_ddl.experts.balance.z_loss>` is added in the backward pass; the trainer's loss is without them. Both are of
    all tokens of a batch, on all ranks of dp × cp: one all-reduce sums E counts in the forward pass.

    The batch is what one forward pass has on all ranks: under pp a microbatch, of which the losses are averaged. Of
    several batches before one optimizer step, they are weighted as the losses of these batches. Nothing is counted in
    evaluation or where a forward pass is recomputed, and rows that are lent to a rank without rows count nowhere.

    Args:
        n_features: width of a token.
        n_experts: number of experts, E.
        top_k: number of experts that a token visits.
        normalize: whether the weights of a token's experts sum to 1. Default: True; False: their probabilities.
        balance_weight: factor of the balance loss. Default: 0.
        z_weight: factor of the z-loss. Default: 0.
        bias_rate: by how much the bias of each expert changes in an optimizer step, up if it has had less than the
            mean of all choices, down if more (:func:`change_of_bias <ignite_ddl.experts.balance.change_of_bias>`). It
            is added to probabilities for choosing, and is not in the weights. ``ddl.create_supervised_trainer`` and
            ``ddl.forward_backward`` change it, also where a scaler skips the step; in a loop without these, call
            :func:`update_biases`. Default: 0.
        capacity_factor: in training, an expert takes up to ceil(capacity_factor · top_k · tokens / E) of the batch's
            choices (GShard, Lepikhin et al. 2020, arXiv:2006.16668, section 2.2), the first ones in the order of
            tokens; others are dropped. On ranks these are the tokens of all, in the order of rows. Not with cp.
            Default None: nothing is dropped.

    Attributes:
        load: (experts,) integers, the choices of all ranks' tokens in the last optimizer step; None before it, and
            where nothing but the task's loss needs counts.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            torch.manual_seed(0)
            router = ddl.Router(n_features=4, n_experts=8, top_k=2)
            index, weights = router(torch.randn(3, 4))
            assert index.shape == weights.shape == (3, 2) and torch.allclose(weights.sum(1), torch.ones(3))
    """

    def __init__(
        self,
        n_features: int,
        n_experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        balance_weight: float = 0.0,
        z_weight: float = 0.0,
        bias_rate: float = 0.0,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        if top_k > n_experts:
            raise ValueError(f"top_k should be at most n_experts, {n_experts}, but given {top_k}")
        if top_k == 1 and normalize:
            warnings.warn(
                "with top_k=1, normalize=True makes each weight 1, so the loss gives the router no gradient: "
                "normalize=False trains it",
                stacklevel=2,
            )
        self.n_experts, self.top_k, self.normalize = n_experts, top_k, normalize
        self.balance_weight, self.z_weight, self.bias_rate = balance_weight, z_weight, bias_rate
        self.capacity_factor, self.load = capacity_factor, None
        self.over_ranks = False  # ddl.auto_model: whether tokens of other ranks count
        self.weight = nn.Parameter(torch.empty(n_experts, n_features))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear
        # Integers, which no cast of the model rounds: choices since the last optimizer step, and the bias / bias_rate.
        self.register_buffer("counts", torch.zeros(n_experts, dtype=torch.int64))
        self.register_buffer("raised", torch.zeros(n_experts, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, and their weights; an expert of number E is none: this choice was dropped.

        Args:
            x: (tokens, width).

        Returns:
            tuple: (tokens, top_k) integers, and (tokens, top_k) weights.
        """
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
            probabilities = logits.softmax(1)
            scores = probabilities.detach() + self.bias_rate * self.raised
            index = scores.argsort(dim=1, descending=True, stable=True)[:, : self.top_k]
            weights = probabilities.gather(1, index)
            if self.normalize:
                weights = weights / weights.sum(1, keepdim=True)
            adds = self.training and torch.is_grad_enabled() and self.counts_choices
            drops = self.training and self.capacity_factor is not None
            if adds or drops:
                index, weights = self._with_all_tokens(logits, probabilities, index, weights, adds, drops)
        return index, weights

    def _with_all_tokens(
        self,
        logits: torch.Tensor,
        probabilities: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        adds: bool,
        drops: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        order, local = sorted_by_expert(index, self.n_experts)
        local = local * has_rows()
        of_ranks, rank = _counts_of_ranks(local, drops) if self.over_ranks else (local.unsqueeze(0), 0)
        counts = of_ranks.sum(0)
        n_tokens = max(1, int(counts.sum()) // self.top_k)
        if adds:
            loss = self.balance_weight * balance_loss(probabilities, counts, n_tokens)
            loss = loss + self.z_weight * z_loss(logits, n_tokens)
            # The average of ranks' gradients is what an optimizer takes.
            factor = (get_mesh().dp_cp_size if self.over_ranks else 1) * has_rows()
            weights = add_loss(weights, loss * factor, lambda: self.counts.add_(counts))
        if drops and has_rows():
            # Where an expert's choices begin on this rank, less those of the ranks before it.
            starts = local.cumsum(0) - local - of_ranks[:rank].sum(0)
            places = torch.arange(len(order), device=order.device) - starts[index.flatten()[order]]
            late = order[places >= math.ceil(self.capacity_factor * self.top_k * n_tokens / self.n_experts)]
            index = index.flatten().index_fill(0, late, self.n_experts).view_as(index)
            weights = weights.masked_fill(index == self.n_experts, 0.0)
        return index, weights

    @property
    def counts_choices(self) -> bool:
        """Whether a loss or the bias needs to know how often each expert is chosen."""
        return bool(self.balance_weight or self.z_weight or self.bias_rate)

    def extra_repr(self) -> str:
        return f"n_features={self.weight.shape[1]}, n_experts={self.n_experts}, top_k={self.top_k}"


def routers_of(model: nn.Module) -> list[Router]:
    """The routers inside of a model whose numbers in training depend on the tokens of all ranks."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return [router for router in routers if router.counts_choices or router.capacity_factor is not None]


def update_biases(model: nn.Module) -> None:
    """Ends a step for the model's routers: changes biases by what was counted since the last call.

    ``ddl.create_supervised_trainer`` and ``ddl.forward_backward`` call it. In a loop without these, call it once for
    each step of the optimizer.

    Args:
        model: a module.
    """
    with torch.no_grad():
        for router in routers_of(model):
            router.load = router.counts.clone()
            if router.bias_rate:
                router.raised.add_(change_of_bias(router.counts))
            router.counts.zero_()


def _counts_of_ranks(local: torch.Tensor, each: bool) -> tuple[torch.Tensor, int]:
    """Counts of all ranks of dp × cp, of each of them or their sum, and this rank's place."""
    mesh = get_mesh()
    if not each:
        summed = local.clone()
        dist.all_reduce(summed, group=mesh.dp_cp_group)
        return summed.unsqueeze(0), 0
    return torch.stack(gathered(local, mesh.dp_cp_group)), mesh.dp_cp_rank
