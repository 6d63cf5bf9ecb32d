"""The checks of chapter 10: which gradients share a bucket, and an accumulation that sends once."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import try_on_ranks
from ignite_ddl.lab.bytes import count_bytes

WAIT_SECONDS = 60  # what is right takes a second, or many on a busy machine


@exercise
def buckets(function):
    """Indices of parameters, bucket after bucket, as DDP fills them."""
    for sizes, cap, first_cap in (
        ([40, 10, 40, 10, 40, 10], 50, 50),
        ([40, 10, 40, 10, 40, 10], 60, 10),
        ([200, 10, 30, 10], 40, 10),
        ([8, 8, 8, 8, 8, 8, 8], 20, 8),
    ):
        found = function(list(sizes), cap, first_cap)
        case = f"parameters of {sizes} bytes, cap {cap}, first cap {first_cap}"
        if not isinstance(found, list) or not all(isinstance(bucket, list) for bucket in found):
            raise Hint(f"{case}: return a list of lists of indices")
        right = _buckets(sizes, cap, first_cap)
        if found == right:
            continue
        flat = [index for bucket in found for index in bucket]
        if [] in found:
            raise Hint(f"{case}: one of your buckets is empty, and would still cost an all-reduce")
        if missing := sorted(set(range(len(sizes))) - set(flat)):
            raise Hint(f"{case}: parameter {missing[0]} is in no bucket, so its gradient never leaves the rank")
        if len(flat) != len(sizes):
            raise Hint(f"{case}: {len(sizes)} parameters, but your buckets hold {len(flat)}")
        if flat == sorted(flat):
            raise Hint(
                f"{case}: your first bucket waits for parameter {flat[0]}, whose gradient comes last: backward "
                "goes from the last layer to the first"
            )
        if flat != sorted(flat, reverse=True):
            raise Hint(f"{case}: fill in reverse order, bucket by bucket; yours are {found}")
        if found == _buckets(sizes, cap, cap):
            raise Hint(f"{case}: the first bucket has a cap of its own, so that sending begins early")
        if found == _never_above(sizes, cap, first_cap):
            raise Hint(
                f"{case}: a bucket is closed as soon as it holds its cap or more; yours never hold more, and make "
                f"{len(found)} all-reduces of {len(right)}"
            )
        place = next(i for i, bucket in enumerate(right) if found[i : i + 1] != [bucket])
        raise Hint(f"{case}: bucket {place} should hold {right[place]}; yours are {found}")
    return "the buckets that DDP makes"


def _buckets(sizes, cap, first_cap):
    buckets, filling = [], []
    for index in reversed(range(len(sizes))):
        filling.append(index)
        if sum(sizes[i] for i in filling) >= (cap if buckets else first_cap):
            buckets.append(filling)
            filling = []
    return [*buckets, filling] if filling else buckets


def _never_above(sizes, cap, first_cap):
    """What comes out if a bucket may not grow beyond its cap."""
    buckets = [[]]
    for index in reversed(range(len(sizes))):
        limit = cap if len(buckets) > 1 else first_cap
        if buckets[-1] and sum(sizes[i] for i in buckets[-1]) + sizes[index] > limit:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


N_RANKS = 2


@exercise(
    cases=((4, 4, 4), (4, 4, 2), (3,), (1, 5)),  # rows of each microbatch of a rank
    about=lambda *rows: f"microbatches of {', '.join(map(str, rows))} rows on each of {N_RANKS} ranks",
    right="the big batch's gradient, for one all-reduce",
)
def accumulate(function, *rows):
    """The gradient of all microbatches together, for one all-reduce."""
    ranks = try_on_ranks(N_RANKS, _accumulate_on_a_rank, function, rows, timeout=WAIT_SECONDS)
    right, alike, added = (_gradient(rows, weights) for weights in ("rows", "alike", "added"))
    for rank, (gradient, n_sent, _) in enumerate(ranks):
        if gradient is None:
            raise Hint(f"rank {rank} has no gradient; did you call backward, and leave .grad alone?")
        if n_sent == 0:
            raise Hint(f"rank {rank} sends nothing: the last microbatch has to leave no_sync")
        if _near(gradient, right):
            continue
        if _near(gradient, added):
            raise Hint(
                f"the gradients add up, one mean loss for each microbatch; you want one mean over all {sum(rows)} rows"
            )
        if _near(gradient, alike):
            raise Hint("a row of a small microbatch counts more than a row of a large one; weight by rows")
        error = float((gradient - right).norm() / right.norm())
        raise Hint(f"the gradient of rank {rank} is {error:.0%} off that of the big batch")
    if (most := max(longest for _, _, longest in ranks)) > max(rows):
        raise Hint(
            f"right, but a forward pass of {most} rows; the largest microbatch has {max(rows)}, and more do not fit"
        )
    if (most := max(n_sent for _, n_sent, _ in ranks)) > 1:
        raise Hint(
            f"right, but {most} all-reduces; one is enough. DDP decides in forward whether backward will send, so "
            "forward belongs inside no_sync, too"
        )


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _microbatches(rank, rows):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(sum(rows), 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (sum(rows),), generator=generator)
    return list(zip(x.split(rows), y.split(rows), strict=True))


def _accumulate_on_a_rank(local_rank, function, rows):
    passed, model = [], _model()
    model.register_forward_pre_hook(lambda module, inputs: passed.append(len(inputs[0])))
    replica = DistributedDataParallel(model)
    with count_bytes() as traffic:
        function(replica, _microbatches(local_rank, rows))
    gradients = [parameter.grad for parameter in replica.parameters()]
    whole = None if None in gradients else torch.cat([gradient.flatten() for gradient in gradients])
    return whole, len(traffic.of("all_reduce")), max(passed, default=0)


def _gradient(rows, weights):
    """One process's, with the losses of microbatches weighted by rows, all alike, or added up."""
    model = _model()
    for rank in range(N_RANKS):
        for x, y in _microbatches(rank, rows):
            share = {"rows": len(x) / sum(rows), "alike": 1 / len(rows), "added": 1.0}[weights]
            (F.cross_entropy(model(x), y) * share / N_RANKS).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def _near(gradient, right):
    return float((gradient - right).norm()) <= 1e-12 * float(right.norm())
