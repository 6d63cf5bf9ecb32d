"""Natural mistakes in chapter 21's exercises."""


def epoch_cut_first(order, done, batch_size, rank, n_ranks):
    """Each rank has a part of the rest for itself."""
    rest, size = order[done:], batch_size // n_ranks
    steps = -(-len(rest) // batch_size)
    mine = rest[size * steps * rank : size * steps * (rank + 1)]
    return [mine[size * i : size * (i + 1)] for i in range(steps)]


SHARE = "rows[len(rows) * rank // n_ranks : len(rows) * (rank + 1) // n_ranks]"
RIGHT = {"rows_after": [{SHARE: "rows[rank::n_ranks]"}]}
MISTAKES = {
    "rows_after": {
        "a list of rows for each step, not [1, 8, 15": lambda order, done, *_: order[done:],
        "3 steps are left, but rank 0 gets 5": {"range(done,": "range(0,"},
        "together the ranks read [1, 6, 8, 11, 13, 16, 18, 23]": epoch_cut_first,
        "in the first step that differs": {SHARE: "rows[(n := len(rows) // n_ranks) * rank : n * (rank + 1)]"},
        "some row is read by two ranks in one step": {SHARE: f"{SHARE} or rows[:1]"},
        "5 rows are cut into [2, 2, 1, 0]; sizes may": {
            SHARE: "rows[(n := -(-len(rows) // n_ranks)) * rank : n * (rank + 1)]"
        },
    },
    "best_interval": {
        "return minutes, a positive number, not None": lambda *args: None,
        "after 4.3 min the save before is still being": {"max(write, ": "("},
        "does training wait for the whole write?": {"2 * copy": "2 * write"},
        "that is for one GPU": {" / n_gpus": ""},
        "are all times in minutes?": {" * 24 * 60": ""},
        "100.0 min lose 27.41 % of the time": lambda *args: 100,
    },
}
