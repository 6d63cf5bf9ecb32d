"""Natural mistakes in chapter 20's exercises."""

import torch


def by_place(rank, axis, sizes):
    """As the solution, with a grid of torch's."""
    grid = torch.arange(torch.Size(sizes.values()).numel()).reshape(*sizes.values())
    lines = grid.movedim(list(sizes).index(axis), -1).reshape(-1, sizes[axis])
    return next(line for line in lines.tolist() if rank in line)


OVER_DP, OVER_PP = (f"dist.all_reduce(counts, group=ddl.get_mesh().{axis}_group)" for axis in ("dp", "pp"))
ONE_SUM = "dist.all_reduce(counts.mul_(ddl.get_mesh().tp_rank == 0))"
RIGHT = {"peers": [by_place], "count_once": [{OVER_DP: ONE_SUM, OVER_PP: "", "tuple(counts.tolist())": "counts"}]}
MISTAKES = {
    "peers": {
        "rank 0 on pp: return a list of ranks in ascending order": lambda rank, *_: {rank},
        "rank 0 on pp: a rank is in its own group, and [4] lacks it": {"range(": "range(1, "},
        "rank 0 on pp: a group has 2 ranks, and [0] has 1": lambda rank, *_: [rank],
        "rank 0 on pp: not [0, 1]; peers differ on pp alone, and rank 1": {"list(sizes)": "list(sizes)[::-1]"},
        "tp2 × pp3 × dp4, rank 0 on tp: not [0, 1]": {"list(sizes)": '["pp", "dp", "tp"]'},
    },
    "count_once": {
        "rank 0, stage 0 of 2: return two numbers, correct and rows, not (None, None)": lambda *given: given,
        "(12, 16) where (6, 8) is right: each row counts 2 times": {OVER_DP: "dist.all_reduce(counts)", OVER_PP: ""},
        "rank 0, stage 0 of 2: still nothing": {OVER_PP: ""},
        "rank 0, stage 0 of 2: (4, 5), but all rows together are 8": {OVER_DP: ""},
        "right, but puts in 48 bytes": {
            "return ": "dist.broadcast(counts, src=dist.get_world_size() - 1)\n    return "
        },
    },
}
