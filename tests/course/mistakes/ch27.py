"""Natural mistakes in chapter 27's exercises."""


def by_sums(output, logsumexp, other, logsumexp_other):
    first, second = logsumexp.exp(), logsumexp_other.exp()
    share = (second / (first + second)).unsqueeze(-1)
    return output + share * (other - output), (first + second).log()


def in_a_row(rank, n_ranks, n_tokens):
    size = n_tokens // n_ranks
    return list(range(rank * size, (rank + 1) * size))


def back_and_forth(rank, n_ranks, n_tokens):
    """One token at a time, in alternating order."""
    return [t for t in range(n_tokens) if min(t % (2 * n_ranks), 2 * n_ranks - 1 - t % (2 * n_ranks)) == rank]


MISTAKES = {
    "merge": {
        "should return two tensors": lambda output, *_: output,
        "the shapes should be (3, 2) and (3,)": {"logsumexp_other)\n": "logsumexp_other)[:, None]\n"},
        "minus infinity less minus infinity": {".nan_to_num(0.0)": ""},
        "a quotient of infinities": by_sums,
        "the logarithm is infinite": {
            "torch.logaddexp(logsumexp, logsumexp_other)": "(logsumexp.exp() + logsumexp_other.exp()).log()"
        },
        "the output is the mean of both": {
            "torch.sigmoid(logsumexp_other - logsumexp)": "torch.full_like(logsumexp, 0.5)"
        },
        "the output is the sum of both": {"share.unsqueeze(-1) * (other - output)": "other + 0 * share.sum()"},
        "the logarithm of a sum is not": {"torch.logaddexp(logsumexp, logsumexp_other)": "logsumexp + logsumexp_other"},
        "the output is not that of the softmax": {"logsumexp_other - logsumexp": "logsumexp - logsumexp_other"},
        "the logarithm is not that of the softmax": {"torch.logaddexp": "torch.maximum"},
    },
    "tokens_of": {
        "cannot read what <lambda> returns (TypeError: 'NoneType' object is not iterable); it": lambda *given: None,
        "each of the tokens 0 to 7 should be on one rank": lambda rank, n_ranks, n_tokens: [rank],
        "tokens: the other layers want as many on each": lambda rank, n_ranks, n_tokens: (
            list(range(n_tokens - n_ranks + 1)) if rank == 0 else [n_tokens - rank]
        ),
        "pairs: all wait for the slowest": in_a_row,
        "pieces, where two will do": back_and_forth,
    },
}
