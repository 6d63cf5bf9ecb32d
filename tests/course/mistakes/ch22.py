"""Natural mistakes in chapter 22's exercises."""

import math

import torch
import torch.distributed as dist


def flags(loss, extra=0):
    numbers = torch.zeros(dist.get_world_size() + 1 + extra, dtype=torch.float64)
    numbers[-1 if math.isfinite(loss) else dist.get_rank()] = loss if math.isfinite(loss) else 1.0
    dist.all_reduce(numbers)
    bad = numbers[: dist.get_world_size()].nonzero().flatten().tolist()
    return float(numbers[-1]) / max(1, dist.get_world_size() - len(bad)), bad


def over_all_ranks(loss):
    mean, bad = flags(loss)
    return mean * (dist.get_world_size() - len(bad)) / dist.get_world_size(), bad


def sum_with_nan(loss):
    numbers = torch.tensor([loss])
    dist.all_reduce(numbers)
    return float(numbers) / dist.get_world_size(), []


def gathered(loss):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, loss)
    good = [one for one in everyone if math.isfinite(one)]
    bad = [rank for rank, one in enumerate(everyone) if not math.isfinite(one)]
    return (sum(good) / len(good) if good else math.nan), bad


def made(records, rank, group):
    return sum(members == group for members, _ in records[rank])


def standing(records):
    return {rank: calls[-1][0] for rank, calls in enumerate(records) if calls and not calls[-1][1]}


def absent(records):
    """Also those that wait themselves."""
    waits = standing(records).items()
    return {r for rank, group in waits for r in group if made(records, r, group) < made(records, rank, group)}


def all_that_do_not_wait(records):
    return set(range(len(records))) - set(standing(records))


def counted_on_all_groups(records):
    waits = standing(records)
    late = {r for rank, group in waits.items() for r in group if len(records[r]) < len(records[rank])}
    return late - set(waits)


MISTAKES = {
    "mean_and_bad_ranks": {
        "return the mean and a list of ranks, not 1.0": lambda loss: loss,
        "rank 0 says that [] are not finite; it is [2]": sum_with_nan,
        "rank 0 has 1 as the mean of the finite ones, not 1.5": over_all_ranks,
        "one all_reduce is allowed; rank 0 called all_gather, all_gather": gathered,
        "you summed 7 numbers, 5 are allowed": lambda loss: flags(loss, extra=3),
    },
    "to_blame": {
        "return a set of ranks, not [3]": lambda records: [3],
        "nobody waits: you blame [0, 1, 2, 3], it is nobody": all_that_do_not_wait,
        "rank 0 waits for 1, 1 for 3: you blame [1, 3], it is [3]": absent,
        "1 for 3: you blame nobody, it is [3]": counted_on_all_groups,
    },
}
