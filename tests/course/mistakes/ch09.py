"""Natural mistakes in chapter 09's exercises."""

import ignite.distributed as idist
import torch


def of_squares(x):
    sums = idist.all_reduce(torch.cat([torch.tensor([float(len(x))]), x.sum(dim=0), x.square().sum(dim=0)]))
    mean, squares = (sums[1:] / sums[0]).chunk(2)
    return mean, squares - mean.square()


RETURN = "mean, (squares + between).sum(dim=0) / n_rows.sum()"
RIGHT = {"moments": [{RETURN: f"[{RETURN}]"}]}
SEND = "send(chunks[going], to=(rank + 1) % n)"
MISTAKES = {
    "reduce_scatter": {
        "rank 0 should return a float64 tensor of shape (3,)": lambda gradient: gradient,
        "returns chunk 1 of the sum, not chunk 0: which": {
            "(rank - step - 1) % n, (rank - step - 2)": "(rank - step) % n, (rank - step - 1)",
            "return chunks[rank]": "return chunks[(rank + 1) % n]",
        },
        "0 should return [15, 30, 45], the sum of all 4 ranks' chunk 0, but returns [1.0": lambda g: g[:3],
        "right, but your rank 0 sent 96 bytes, a ring's first round sends 72": lambda gradient: idist.all_reduce(
            gradient.clone()
        ).chunk(idist.get_world_size())[idist.get_rank()],
        # Every chunk goes to its owner at once: as many bytes, but no ring.
        "right, but rank 0 sent to rank 2; in the ring it sends to rank 1 only": {
            "(rank - step - 1) % n, (rank - step - 2) % n": "(rank + step + 1) % n, rank",
            "to=(rank + 1) % n": "to=going",
            "source=(rank - 1) % n": "source=(rank - step - 1) % n",
        },
        "gloo gave up: a rank was sent a tensor": {"send(chunks[going]": "send(gradient"},
    },
    "crossover_bytes": {
        "return a number of bytes, not NoneType": lambda n_ranks, latency, bandwidth: None,
        "the tree is faster, so the answer is above 0": lambda n_ranks, latency, bandwidth: 0,
        "4 ranks, 1e-05 s, 1e+09 bytes/s: with your 3.765e+04 bytes the tree": lambda *_: 37647.0588235294,
        "Does your tree round log2(3) up?": {"math.ceil": "math.floor"},
        "5 ranks need 3 rounds up": {"math.ceil": "round"},
    },
    "moments": {
        "rank 0 should return two float32 tensors of shape (5,)": lambda x: None,
        "rank 0 takes the moments of its own rows": lambda x: (x.mean(dim=0), x.var(dim=0, correction=0)),
        "7, 5, 3, 1 rows of 5 features with mean 0: the mean of means": {
            "full_like(mean, len(x))": "full_like(mean, 4)"
        },
        "rank 0's mean is off": {"return mean": "return mean + 1"},
        "the ranks' means differ, and that is variance, too": {"(squares + between)": "squares"},
        "rank 0's variance is off": {"(squares + between)": "(squares + 2 * between)"},
        "drowned in float32's rounding": of_squares,
        "right, but a rank puts in 48 bytes; two numbers a feature and its number of rows are 44": {
            "own[2]])": "own[2], own[0, :1]])",
            "squares = idist": "squares, _ = idist",
            "x.shape[1]], dim": "x.shape[1], 1], dim",
        },
        "right, but in 2 collectives": {
            "idist.all_gather(own[None])": "torch.cat([idist.all_gather(half[None]) for half in own.chunk(2)], dim=1)"
        },
    },
}
WAITING = {
    "reduce_scatter": {
        "your ranks wait for each other: start sending before you receive": {
            f"sending = {SEND}": "",
            "sending.wait()": f"{SEND}.wait()",
        }
    }
}
