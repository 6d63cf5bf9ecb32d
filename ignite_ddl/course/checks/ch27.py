"""The checks of chapter 27: blocks of attention that become one, and a cut of tokens that is even under a mask."""

import torch

from ignite_ddl.course.exercises import Hint, exercise

BOUND = 1e-10  # float64; what is wrong here is wrong by far more
INFINITY = float("-inf")


@exercise(
    cases=("two blocks", "large scores", "a row that sees nothing of the first", "a row that sees nothing of either"),
    about="{case}",
    right="the attention to both blocks, also where a row sees nothing of one or of both",
)
def merge(function, case):
    """Two blocks of keys, beside the softmax over all keys."""
    draw = torch.Generator().manual_seed(1)
    scores, value = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((3, 8), (8, 2)))
    if case == "large scores":
        scores = scores + torch.tensor([[2000.0], [0.0], [-2000.0]], dtype=torch.float64)
    if "row" in case:
        scores[1, : 4 if "first" in case else 8] = INFINITY
    blocks = [_block(scores[:, part], value[part]) for part in (slice(4), slice(4, None))]
    given = [tensor.clone() for block in blocks for tensor in block]
    found = function(*given)
    if not (isinstance(found, tuple) and len(found) == 2 and all(isinstance(one, torch.Tensor) for one in found)):
        raise Hint("it should return two tensors: the output and the logarithm")
    output, logsumexp = found
    if output.shape != (3, 2) or logsumexp.shape != (3,):
        raise Hint(f"the shapes should be (3, 2) and (3,), but are {tuple(output.shape)} and {tuple(logsumexp.shape)}")
    expected, of_all = _block(scores, value)
    (first, first_log), (second, second_log) = blocks
    if output.isnan().any() or logsumexp.isnan().any():
        raise Hint("there is a NaN: " + _cause_of_nan(case))
    if logsumexp.isposinf().any():
        raise Hint("the logarithm is infinite: take no exponential of it that has not been shifted")
    if case == "two blocks":
        if _same(output, (first + second) / 2):
            raise Hint("the output is the mean of both; a block with larger scores counts for more")
        if _same(output, first + second):
            raise Hint("the output is the sum of both, each of which is already divided by its own sum")
        if _same(logsumexp, first_log + second_log):
            raise Hint("the logarithm of a sum is not the sum of the logarithms")
    for tensor, right, name in ((output, expected, "output"), (logsumexp, of_all, "logarithm")):
        if not _same(tensor, right):
            raise Hint(f"the {name} is not that of the softmax over all keys")


@exercise(
    cases=((2, 8), (4, 32), (3, 24)),
    about="{n_ranks} ranks, {n_tokens} tokens",
    right="each rank has as many tokens and as many pairs as the others, in two pieces at most",
)
def tokens_of(function, n_ranks, n_tokens):
    """Every token once; equal tokens, equal pairs, at most two runs of neighbours a rank."""
    ranks = [sorted(int(token) for token in function(rank, n_ranks, n_tokens)) for rank in range(n_ranks)]
    if sorted(token for tokens in ranks for token in tokens) != list(range(n_tokens)):
        raise Hint(f"each of the tokens 0 to {n_tokens - 1} should be on one rank")
    numbers = [len(tokens) for tokens in ranks]
    if len(set(numbers)) > 1:
        raise Hint(f"the ranks have {numbers} tokens: the other layers want as many on each")
    pairs = [sum(token + 1 for token in tokens) for tokens in ranks]
    if len(set(pairs)) > 1:
        raise Hint(f"the ranks have {pairs} pairs: all wait for the slowest")
    pieces = [1 + sum(b - a > 1 for a, b in zip(tokens, tokens[1:], strict=False)) for tokens in ranks]
    if max(pieces) > 2:
        raise Hint(f"rank {pieces.index(max(pieces))} has its tokens in {max(pieces)} pieces, where two will do")


def _block(scores, value):
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp.unsqueeze(-1)).exp().nan_to_num(0.0) @ value, logsumexp


def _cause_of_nan(case):
    if "either" in case:
        return "minus infinity less minus infinity"
    return "a quotient of infinities; weigh by differences of logarithms"


def _same(a, b):
    return torch.allclose(a, b, atol=BOUND, rtol=1e-12)
