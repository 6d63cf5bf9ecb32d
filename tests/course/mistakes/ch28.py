"""Natural mistakes in chapter 28's exercises."""

import torch
import torch.distributed as dist


def a_row_a_choice(x, index, weights, experts):
    """Right, with a copy of a token for each of its experts."""
    n, m, k = dist.get_world_size(), len(experts), index.shape[1]
    order = index.flatten().argsort(stable=True)
    counts = torch.bincount(index.flatten(), minlength=n * m)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent, got = (each.view(n, m).sum(1).tolist() for each in (counts, arriving))
    rows = x.new_empty(sum(got), x.shape[1])
    dist.all_to_all_single(rows, x[order // k], got, sent)
    expert = torch.arange(m).repeat(n).repeat_interleave(arriving)
    made = torch.zeros_like(rows)
    for e in range(m):
        made[expert == e] = experts[e](rows[expert == e])
    home = x.new_empty(sum(sent), x.shape[1])
    dist.all_to_all_single(home, made, sent, got)
    return torch.zeros_like(x).index_add(0, order // k, weights.flatten()[order, None] * home)


def own(probabilities, index):
    n_experts = probabilities.shape[1]
    f = torch.bincount(index.flatten(), minlength=n_experts) / max(index.numel(), 1)
    return n_experts * (f * probabilities.sum(0)).sum() / max(len(index), 1)


def own_means(probabilities, index):
    counts = torch.bincount(index.flatten(), minlength=probabilities.shape[1])
    dist.all_reduce(counts)
    f = counts / counts.sum()
    return len(f) * (f * probabilities.sum(0) / max(len(index), 1)).sum()


def of_one_rank(probabilities, index):
    """The right number on each rank, whose gradient is of this rank's own choices."""
    n_experts = probabilities.shape[1]
    counts = torch.bincount(index.flatten(), minlength=n_experts)
    dist.all_reduce(counts)
    total = probabilities.sum(0).detach().clone()
    dist.all_reduce(total)
    part = total + probabilities.sum(0) - probabilities.sum(0).detach()
    return n_experts * (counts / counts.sum() * part).sum() / (counts.sum() / index.shape[1])


def gathered(probabilities, index):
    n_experts, n = probabilities.shape[1], dist.get_world_size()
    counts = torch.bincount(index.flatten(), minlength=n_experts)
    found = [torch.empty_like(counts) for _ in range(n)]
    dist.all_gather(found, counts)
    counts = sum(found)
    return n * n_experts * (counts / counts.sum() * probabilities.sum(0)).sum() / (counts.sum() / index.shape[1])


GATES = "arrived[here, width + e, None] * "
MISTAKES = {
    "once_a_rank": {
        "rank 0 should return (5, 16), not (3, 16)": lambda x, *_: x[:3],
        "should return (5, 16), not ()": lambda *_: None,
        "rank 0 adds up its experts without their weights": {GATES: ""},
        "rank 0 takes the weights twice": {"gates[token, rank]], dim=1)": "gates[token, rank].square()], dim=1)"},
        "rank 0 asks the experts of each rank by the numbers of rank 0's": {
            "scatter(1, index, weights)": "scatter_add(1, index % m, weights)"
        },
        "rank 0 has the right rows at the wrong places": {
            "index_add(0, token, home)": "index_add(0, token, home).flip(0)"
        },
        "rank 0 is wrong by": {"made[here] +=": "made[here] ="},
        "right, but expert 0 computes": {
            "here = arrived[:, width + e].nonzero()[:, 0]": "here = torch.arange(len(arrived))"
        },
        "right, but rank 0 puts in": a_row_a_choice,
    },
    "global_balance": {
        "rank 0 should return a tensor of one number": lambda probabilities, index: 1.0,
        "rank 1 returns nan: it has 0 tokens": {"probabilities.sum(dim=0)": "probabilities.mean(dim=0) * len(index)"},
        "2 times too small": {"dist.get_world_size() * ": ""},
        "2 times too large": {"dist.get_world_size() * ": "dist.get_world_size() ** 2 * "},
        "the loss is right, its gradient is not": of_one_rank,
        "that is the mean of the ranks' own losses": own,
        "each token counts as much as any other": own_means,
        "the mean over ranks is": {"n_experts * (": "("},
        "right, but a rank puts 8 numbers": gathered,
    },
}
WAITING = {
    "once_a_rank": {
        "your ranks wait for each other": {
            "    dist.all_to_all_single(home": "    if len(x):\n        dist.all_to_all_single(home"
        }
    }
}
