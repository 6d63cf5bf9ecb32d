"""Natural mistakes in chapter 00's exercises."""

import ignite.distributed as idist
import torch


def as_a_pair(local_mean, n_rows):  # in float32
    total, rows = idist.all_reduce(torch.tensor([local_mean * n_rows, n_rows]))
    return total / rows


RIGHT = {"mean_of_all": [as_a_pair], "cut_by_inputs": [{"(mine @ piece.T)": "((mine @ piece.T).T.contiguous()).T"}]}
MISTAKES = {
    "cut_by_inputs": {
        "rank 0 should return a tensor of shape (8, 12)": lambda rows, piece, first: piece,
        "ranks with 2, 1, 1 and 1 inputs: you used all_gather": {
            "all_reduce(mine @ piece.T)": "all_gather((mine @ piece.T)[None]).sum(0)"
        },
        "on rank 0 it is 5: it has only its own inputs' part": {"idist.all_reduce": ""},
        "the ranks' parts make a sum, not a mean": {"@ piece.T)": "@ piece.T) / 4"},
        # Rank r takes the inputs from r * n_mine on, right for equal shares only.
        "output 0 of row 0 should be": {"first :": "idist.get_rank() :", "first +": "idist.get_rank() +"},
        "right, but you called all_reduce 2 times": {"@ piece.T)": "@ piece.T) + 0 * idist.all_reduce(0.0)"},
    },
    "mean_of_all": {
        "your function returns nothing": {"return total": "total"},
        "you used all_gather": {"all_reduce(local_mean * n_rows)": "all_gather(local_mean * n_rows)[0]"},
        "the mean is 5.5, yours is 6: the mean of the four means": {
            " * n_rows": "",
            "all_reduce(n_rows)": "get_world_size()",
        },
        "with 1, 2, 3 and 4 rows the mean is 4, yours is 5.5": lambda mean, n: 5.5,
        "rank 0 returns 5.5, rank 1 returns 0: all need": {"return ": "return (idist.get_rank() == 0) * "},
        "right, but a rank sends 3 numbers": {"return ": "return 0 * idist.all_reduce(0.0) + "},
    },
}
WAITING = {
    "mean_of_all": {
        "your ranks wait for each other": {"return ": "return n_rows if idist.get_rank() else "},
        "rank 0 did not finish within 2 s, and waited for no rank then: does a loop": {
            "return ": "while True:\n        pass\n    return "
        },
    }
}
