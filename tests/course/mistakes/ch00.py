"""Natural mistakes in chapter 00's exercises."""

import ignite.distributed as idist
import torch


def mean(local_mean, n_rows):
    return idist.all_reduce(local_mean * n_rows) / idist.all_reduce(n_rows)


def as_a_pair(local_mean, n_rows):  # in float32
    total, rows = idist.all_reduce(torch.tensor([local_mean * n_rows, n_rows]))
    return total / rows


RIGHT = {
    "rows_of_rank": [lambda n, w, r: range(r * n // w, (r + 1) * n // w)],  # last ranks first
    "mean_of_all": [as_a_pair],
}
MISTAKES = {
    "rows_of_rank": {
        "there is no row 10": lambda n, w, r: range(r * -(-n // w), (r + 1) * -(-n // w)),
        "no rank has row 8; your ranks hold 2, 2": lambda n, w, r: range(r * (n // w), (r + 1) * (n // w)),
        "row 0 is held twice, by ranks 0, 1, 2 and 3": lambda n, w, r: range(n),
        "3, 3, 3 and 1 rows": lambda n, w, r: range(r * -(-n // w), min(n, (r + 1) * -(-n // w))),
        "not in order": lambda n, w, r: range(r, n, w),
    },
    "mean_of_all": {
        "your function returns nothing": lambda mean, n: print(end=""),
        "you used all_gather": lambda mean, n: sum(idist.all_gather(mean * n)) / idist.all_reduce(n),
        "the mean is 5.5, yours is 6: the mean of the four means": lambda mean, n: idist.all_reduce(mean) / 4,
        "with 1, 2, 3 and 4 rows the mean is 4, yours is 5.5": lambda mean, n: 5.5,
        "rank 0 returns 5.5, rank 1 returns 0: all need": lambda m, n: mean(m, n) * (idist.get_rank() == 0),
        "right, but a rank sends 3 numbers": lambda m, n: mean(m, n) + 0 * idist.all_reduce(0.0),
    },
}
WAITING = {
    "mean_of_all": {
        "your ranks wait for each other": lambda m, n: idist.all_reduce(m) if idist.get_rank() == 0 else m
    }
}
