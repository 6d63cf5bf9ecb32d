"""Natural mistakes in chapter 25's exercises."""


def one_by_one(differs, n_layers):
    return next((n - 1 for n in range(1, n_layers + 1) if differs(n)), None)


def number_of_layers(differs, n_layers):
    """The number of layers that were run, not the index of the last one."""
    low, high = 0, n_layers + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(middle) else (middle, high)
    return high if high <= n_layers else None


def runs_none(differs, n_layers):
    low, high = 0, n_layers
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(middle) else (middle + 1, high)
    return low


def never_none(differs, n_layers):
    low, high = 0, n_layers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(middle) else (middle, high)
    return high - 1


def whole_world(batch, world_size, pp, tp, microbatches):
    return world_size, batch // world_size // microbatches, microbatches


def of_the_rank(batch, world_size, pp, tp, microbatches):
    """The rows of a dp rank as those of a micro-batch."""
    dp = world_size // (pp * tp)
    return dp, batch // dp, microbatches


def all_at_once(batch, world_size, pp, tp, microbatches):
    dp = world_size // (pp * tp)
    return dp, batch // dp, 1


def rounded_down(batch, world_size, pp, tp, microbatches):
    dp = world_size // (pp * tp)
    return dp, batch // dp // microbatches, microbatches


def divided(batch, world_size, pp, tp, microbatches):
    dp = world_size // (pp * tp)
    return dp, batch / dp / microbatches, microbatches


RIGHT = {}
MISTAKES = {
    "first_wrong": {
        "you run 0 layers; it should be 1 to": runs_none,
        "you return 1: differs(n) runs layers 0 to n - 1": number_of_layers,
        "none wrong: you return 0": never_none,
        "runs; 3 are enough": one_by_one,
    },
    "their_numbers": {
        "return three whole numbers, not (2, 1.0, 16)": divided,
        "dp 8, but 4 ranks share one model": whole_world,
        "2 · 16 · 16 is 512 rows, not 32": of_the_rank,
        "1 micro-batches follow one another; the pipeline was planned for 16": all_at_once,
        "does not come out whole, but you return (2, 0, 16)": rounded_down,
    },
}
