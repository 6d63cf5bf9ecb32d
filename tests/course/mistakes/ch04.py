"""Natural mistakes in chapter 04's exercises."""

import ignite.distributed as idist
import torch


def batches(order, batch_size):
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def dealt(order, batch_size, world_size, rank):
    return [batch[rank::world_size] for batch in batches(order, batch_size)]


def quarter_of_the_data(order, batch_size, world_size, rank):
    size = -(-len(order) // world_size)
    return batches(order[rank * size : (rank + 1) * size], batch_size // world_size)


def rounded_up(order, batch_size, world_size, rank):
    share = -(-batch_size // world_size)
    return [batch[rank * share : (rank + 1) * share] for batch in batches(order, batch_size)]


def gathered(gradient, n_rows):
    rows = torch.tensor(idist.all_gather(n_rows), dtype=torch.float64)
    return torch.tensordot(rows / rows.sum(), idist.all_gather(gradient[None]), dims=1)


def gradients_by(change):
    def average_gradients(model, n_rows):
        for parameter in model.parameters():
            parameter.grad = change(parameter.grad, n_rows)

    return average_gradients


RIGHT = {  # pieces of neighbours
    "deal_rows": [
        lambda order, b, n, r: [x[r * len(x) // n : (r + 1) * len(x) // n] for x in batches(order, b)]
    ]
}
MISTAKES = {
    "deal_rows": {
        "return a list with one list of row numbers for each step": lambda *_: 16,
        # With 21 rows in batches of 8 on 4 ranks every rank has a row at every step; with 50 in 12 not.
        "waiting in all-reduce": lambda *args: [rows for rows in dealt(*args) if rows],
        "is dealt more than once": lambda order, batch_size, *_: batches(order, batch_size),
        "at step 0 your ranks miss 12 rows of the batch of one process and see 12": quarter_of_the_data,
        "deal as evenly as it goes": rounded_up,
    },
    "average_gradients": {
        "without a gradient": gradients_by(lambda gradient, n_rows: None),
        "still each rank's own": lambda model, n_rows: 0,
        "4, 4, 4 and 4 rows: you added the gradients up": gradients_by(lambda g, n: idist.all_reduce(g)),
        "7, 5, 3 and 1 rows: your mean weighs each": gradients_by(lambda g, n: idist.all_reduce(g) / 4),
        "the ranks end with different gradients": gradients_by(lambda g, n: idist.all_reduce(g) * n / 16),
        "not those of one process": gradients_by(lambda g, n: idist.all_reduce(g * n)),
        "right values, but a rank handles": gradients_by(gathered),
    },
}
