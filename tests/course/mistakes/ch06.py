"""Natural mistakes in chapter 06's exercises."""

import ignite.distributed as idist
import torch


def by_squares(errors, reduce=idist.all_reduce):
    count = torch.tensor(float(len(errors)), dtype=errors.dtype)
    n, total, squares = reduce(torch.stack([count, errors.sum(), errors.square().sum()])).tolist()
    return max(0.0, squares / n - (total / n) ** 2) ** 0.5


def by_all_numbers(errors):
    return by_squares(errors, lambda mine: idist.all_gather(mine).view(-1, 3).sum(0))


RIGHT = {"std_of_all": [by_squares], "stop_epoch": [{"return epoch": "return torch.tensor(epoch)"}]}
MISTAKES = {
    "std_of_all": {
        "the check cannot read what std_of_all returns (TypeError: unsupported operand type(s) for -: 'list' and "
        "'float'); it should be float": {"return ": "return [] and "},
        "your function returns nothing": lambda errors: None,
        "[7, 9]: the standard deviation is 3.162, rank 0 returns 1.000, the mean of the ranks' own": lambda errors: (
            errors.std(correction=0).item() if len(errors) else 0.0
        ),
        "divide by the number of errors, not by one less": {"/ n) **": "/ (n - 1)) **"},
        "rank 1 returns 0.000": {"return ": "return (idist.get_rank() == 0) * "},
        "errors [4] and [0, 0, 0, 8, 8, 4]": lambda errors: 10**0.5,
        "right, but a rank hands 32 bytes": {"return ": "return 0 * idist.all_reduce(0.0) + "},
        "right, but a rank is handed 48 bytes, the numbers of every rank": by_all_numbers,
    },
    "stop_epoch": {
        "your function returns nothing": lambda right, patience: None,
        "your ranks stop after epochs [5, 4]; the later ones wait for ever": {"idist.all_reduce(mine)": "mine"},
        "rank 0 alone would do that": {"all_reduce(mine": "all_reduce(mine * (idist.get_rank() == 0)"},
        "and stop after epoch 5, yours after 6": {"score > best": "score >= best"},
        "after epoch 5, yours after 4; with a better score the count begins anew": {
            "(score, 0) if": "(score, waited) if"
        },
        "yours after 6; better is better than the best so far": {"else (best, waited": "else (score, waited"},
        "until epoch 5 one number an epoch is enough (40 bytes)": {
            "idist.all_reduce(mine)": "mine",
            "(right, ": "(idist.all_reduce(torch.tensor(right)).tolist(), ",
        },
    },
}
WAITING = {"stop_epoch": {"your ranks wait for each other": {"(score, 0) if score": "(mine, 0) if mine"}}}
