"""The checks of chapter 28: dispatch and combine with one copy of a token for each rank, and a global balance loss."""

import torch
import torch.distributed as dist

from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.ranks import NumbersSent, try_on_ranks
from ignite_ddl.lab.bytes import count_bytes

WAIT_SECONDS = 20  # what is right takes well under one
WIDTH = 16
TOKENS = 5, 0, 9, 3  # of ranks 0 to 3


def _numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _near(found, right):
    return bool((found - right).abs().max() <= 1e-12 * max(1.0, float(right.abs().max())))


# ------------------------------------------------------------------------------ dispatch and combine


@exercise(
    cases=((2, 4, 4), (4, 2, 2)),
    about="{n_ranks} ranks, {n_own} experts on each, top {top_k}",
    right="each token goes to a rank once, and comes back once",
)
def once_a_rank(function, n_ranks, n_own, top_k):
    """The sum over experts on any rank, for at most one row a token and rank each way."""
    found = try_on_ranks(n_ranks, _dispatched, function, n_own, top_k, timeout=WAIT_SECONDS)
    given = [_tokens(rank, n_ranks * n_own, top_k) for rank in range(n_ranks)]
    for rank, ((y, _, _), (x, index, weights)) in enumerate(zip(found, given, strict=True)):
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            raise Hint(f"rank {rank} should return {tuple(x.shape)}, not {tuple(getattr(y, 'shape', ()))}")
        if len(x) and not _near(y, _visited(x, index, weights)):
            raise Hint(f"rank {rank} {_what_went_wrong(y, x, index, weights, n_own)}")
    asked = torch.bincount(torch.cat([index.flatten() for _, index, _ in given]), minlength=n_ranks * n_own)
    visits = [[len({expert // n_own for expert in row}) for row in index.tolist()] for _, index, _ in given]
    arriving = [
        sum(any(expert // n_own == rank for expert in row) for _, index, _ in given for row in index.tolist())
        for rank in range(n_ranks)
    ]
    for rank, (_, computed, traffic) in enumerate(found):
        for own, rows in enumerate(computed):
            if rows > (due := int(asked[rank * n_own + own])):
                raise Hint(f"right, but expert {rank * n_own + own} computes {rows} rows, and {due} chose it")
        # A row there with its weights, and numbers of experts; a row back; and some counts.
        enough = 8 * (
            sum(visits[rank]) * (WIDTH + 2 * max(n_own, top_k)) + arriving[rank] * WIDTH + 4 * n_ranks * n_own
        )
        if traffic.put_in > enough:
            raise Hint(
                f"right, but rank {rank} puts in {traffic.put_in:,} bytes; its tokens make {sum(visits[rank])} visits, "
                f"and with {arriving[rank]} rows back {enough:,} are enough"
            )


def _expert(number, rows):
    return (rows @ _numbers(1000 + number, WIDTH, WIDTH)).tanh()


def _tokens(rank, n_experts, top_k):
    scores = _numbers(rank, TOKENS[rank], n_experts).softmax(dim=1)
    return _numbers(100 + rank, TOKENS[rank], WIDTH), *reversed(scores.topk(top_k))


def _dispatched(local_rank, function, n_own, top_k):
    x, index, weights = _tokens(local_rank, dist.get_world_size() * n_own, top_k)
    computed = [0] * n_own

    def counted(own):
        def expert(rows):
            computed[own] += len(rows)
            return _expert(local_rank * n_own + own, rows)

        return expert

    with count_bytes() as traffic:
        y = function(x, index, weights, [counted(own) for own in range(n_own)])
    return y, computed, traffic


def _visited(x, index, weights, of=lambda expert: expert):
    """The right result; ``of`` says which expert is asked in place of one."""
    return torch.stack(
        [
            sum(weight * _expert(of(expert), token) for expert, weight in zip(experts.tolist(), own, strict=True))
            for token, experts, own in zip(x, index, weights, strict=True)
        ]
    )


def _what_went_wrong(y, x, index, weights, n_own):
    if _near(y, _visited(x, index, torch.ones_like(weights))):
        return "adds up its experts without their weights"
    if _near(y, _visited(x, index, weights.square())):
        return "takes the weights twice: either where the experts are or at home"
    if _near(y, _visited(x, index, weights, of=lambda expert: expert % n_own)):
        return "asks the experts of each rank by the numbers of rank 0's: rank r's first one is r * m"
    right = _visited(x, index, weights)
    if all(any(_near(row, other) for other in right) for row in y):
        return "has the right rows at the wrong places: what comes home is in the order in which it was sent"
    return f"is wrong by {float((y - right).abs().max()):.1e}"


# -------------------------------------------------------------------------------------- global balance


def _close(found, right):
    """A quotient of counts is a float32, as a rule."""
    return bool((found - right).abs().max() <= 1e-6 * max(1.0, float(right.abs().max())))


@exercise(
    cases=((2, 4, 1, (6, 2)), (4, 8, 2, (5, 0, 9, 2))),
    about="{n_ranks} ranks with {n_tokens} tokens, top {top_k} of {n_experts}",
    right="the loss of all ranks' tokens, for one number an expert",
)
def global_balance(function, n_ranks, n_experts, top_k, n_tokens):
    """Value and gradient of the loss of all tokens, by one all-reduce of as many numbers as there are experts."""
    scores = [3 * _numbers(rank, n, n_experts) + _numbers(50 + rank, n_experts) for rank, n in enumerate(n_tokens)]
    given = [(logits, logits.topk(top_k).indices) for logits in scores]
    found = try_on_ranks(n_ranks, _balanced, function, given, timeout=WAIT_SECONDS)
    for rank, (value, gradient, _) in enumerate(found):
        if value is None:
            raise Hint(f"rank {rank} should return a tensor of one number, with the gradient of probabilities")
        if not torch.isfinite(value) or not gradient.isfinite().all():
            raise Hint(f"rank {rank} returns {float(value)}: it has {n_tokens[rank]} tokens")
    value, gradient = sum(value for value, _, _ in found) / n_ranks, torch.cat([gradient for _, gradient, _ in found])
    leaves = [logits.softmax(dim=1) for logits, _ in given]
    joined = torch.cat(leaves).requires_grad_()
    right = _loss(joined, torch.cat([index for _, index in given]))
    right.backward()
    if not _close(value, right.detach()) or not _close(gradient / n_ranks, joined.grad):
        raise Hint(_what_is_off(value, gradient / n_ranks, right.item(), joined.grad, leaves, given))
    numbers = max(sent for *_, sent in found)
    if numbers > n_experts + 2:
        raise Hint(f"right, but a rank puts {numbers} numbers into collectives; {n_experts} are enough")


def _loss(probabilities, index):
    n_experts = probabilities.shape[1]
    part = torch.bincount(index.flatten(), minlength=n_experts) / index.numel()
    return n_experts * (part * probabilities.mean(dim=0)).sum()


def _what_is_off(value, gradient, right, right_gradient, leaves, given):
    n = len(leaves)
    for factor, says in ((1 / n, f"{n} times too small: the mean over ranks divides"), (n, f"{n} times too large")):
        if _close(value, torch.tensor(right * factor)) and _close(gradient, right_gradient * factor):
            return f"loss and gradient are {says}"
    if _close(value, torch.tensor(right)):
        return "the loss is right, its gradient is not: each rank's is the sum of its own tokens' summands"
    own = [_loss(p, index) if len(p) else torch.zeros(()) for p, (_, index) in zip(leaves, given, strict=True)]
    if _close(value, sum(own) / n):
        return "that is the mean of the ranks' own losses: count the choices of all"
    joined = torch.cat([index for _, index in given])
    f = torch.bincount(joined.flatten(), minlength=leaves[0].shape[1]) / joined.numel()
    means = [len(f) * (f * p.sum(dim=0) / max(len(p), 1)).sum() for p in leaves]
    if _close(value, sum(means) / n):
        return "each token counts as much as any other, on whichever rank: P is a mean over all tokens"
    return f"the mean over ranks is {float(value):.4f}, the loss of all tokens {right:.4f}"


def _balanced(local_rank, function, given):
    logits, index = given[local_rank]
    probabilities = logits.softmax(dim=1).requires_grad_()
    with NumbersSent() as sent:
        value = function(probabilities, index)
    if not isinstance(value, torch.Tensor) or value.ndim or not value.requires_grad:
        return None, None, 0
    value.backward()
    return value.detach(), probabilities.grad, sent.numbers
