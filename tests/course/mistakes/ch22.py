"""Natural mistakes in chapter 22's exercises."""

MISTAKES = {
    "mean_and_bad_ranks": {
        "return the mean and a list of ranks, not 1.0": lambda loss: loss,
        "rank 0 says that [] are not finite; it is [2]": {"math.nan), bad": "math.nan), []"},
        "rank 0 has 1 as the mean of the finite ones, not 1.5": {"/ n_good if": "/ dist.get_world_size() if"},
        "one all_reduce is allowed; rank 0 called all_gather, all_gather": {
            "dist.all_reduce(numbers)": "everyone = [None] * dist.get_world_size()\n"
            "    dist.all_gather_object(everyone, numbers)\n    numbers = sum(everyone)"
        },
        "numbers, 5 are allowed": {"() + 1": "() + 3", "len(numbers) - 1": "len(numbers) - 3"},
    },
    "to_blame": {
        "return a set of ranks, not [3]": lambda records: [3],
        "nobody waits: you blame [0, 1, 2, 3], it is nobody": {"return late": "return set(range(len(records)))"},
        "rank 0 waits for 1, 1 for 3: you blame [1, 3], it is [3]": {" - set(waiting)": ""},
        "rank 2 has not come: you blame [1, 2], it is [2]": {" if made(other, group) < made(rank, group)": ""},
        "1 for 3: you blame nobody, it is [3]": {"members == group for": "True for"},
    },
}
