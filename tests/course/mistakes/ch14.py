"""Natural mistakes in chapter 14's exercises."""

import ignite.distributed as idist


def all_reduced(weights, gradient, lr, max_norm):
    mean = idist.all_reduce(gradient) / idist.get_world_size()
    weights -= lr * mean * (max_norm / mean.norm()).clamp(max=1)


NORM = "idist.all_reduce(mine.square().sum()).sqrt()"
GATHER = "dist.all_gather(list(weights.chunk(n)), shard)"
LAYER = "        x = (x @ torch.cat(parts).T).tanh()\n"
WHOLE = "x @ torch.cat(parts).T"
RIGHT = {
    "clipped_step": [{"max_norm / norm": "max_norm / (norm + 1e-6)"}],  # as torch does
    "forward_ahead": [
        {WHOLE: "torch.cat([x @ part.T for part in parts], 1)"},
        {WHOLE: "torch.einsum('ri,oi->ro', x, torch.cat(parts))"},
        {WHOLE: "torch.stack([torch.cat(parts) @ row for row in x])"},
    ],
}
MISTAKES = {
    "clipped_step": {
        "should keep their shape": lambda weights, *_: weights.resize_(3),
        "the weights of rank 0 are as they were: update in place": lambda *args: None,
        "max_norm 1e+06: rank 0 divides the sum of gradients by nothing": {"mine /= n": ""},
        "the gradient is not clipped": {" * (max_norm / norm).clamp(max=1)": ""},
        "rank 0 clips by the norm of its shard": {NORM: "mine.norm()"},
        "rank 0 adds up the norms of the shards": {NORM: "idist.all_reduce(mine.norm())"},
        "each rank clips its own gradient before the mean": {
            " * (max_norm / norm).clamp(max=1)": "",
            "mine = torch": "gradient = gradient * (max_norm / gradient.norm()).clamp(max=1)\n    mine = torch",
        },
        "rank 0 scales the gradient up": {".clamp(max=1)": ""},
        "rank 0's own shard is right, the others' are not: gather the": {GATHER: ""},
        "right, but an all-reduce leaves the whole mean gradient on every rank": all_reduced,
        "right, but your rank 0 sends 216 bytes": {NORM: "idist.all_gather(mine[None]).norm()"},
    },
    "forward_ahead": {
        "return all 4 features of the 3 rows, not (3, 2)": lambda x, shards: (x @ shards[0].T).tanh(),
        "the outputs of rank 0 are wrong; gather rows in rank order": {"cat(parts)": "cat(parts[::-1])"},
        "3 layers: one gather a layer is enough, rank 0 calls 6": {
            "coming = gather(shards[0])": "for shard in [*shards, shards[0]]:\n        coming = gather(shard)"
        },
        "while layer 0 multiplies, the gather of layer 1 has not been called": {
            LAYER: "",
            "        if layer": f"{LAYER}        if layer",
        },
        "the gather of layer 2 is called before layer 0 has multiplied": {
            "coming = gather(shards[0])": "coming = [gather(shard) for shard in shards]",
            "work = coming": "work = coming[layer]",
            "if layer + 1 < len(shards)": "if False",
        },
    },
}
WAITING = {"clipped_step": {"your ranks wait for each other": {GATHER: f"if rank:\n        {GATHER}"}}}
