"""Natural mistakes in chapter 16's exercises."""

MISTAKES = {
    "gated_mlp": {
        "should return a float64 tensor of shape (6, 8)": lambda x, gate, up, down: (x @ gate)[:, 1:],
        "y has no backward": {"Leave.apply(": "idist.all_reduce(", "down)": "down.detach()).detach()"},
        "rank 0 returns its own term of y": {"Leave.apply": ""},
        "y on rank 0 is not that of one process": {"F.silu": "F.gelu"},
        "dx on rank 0 is 4 times too large": {"return ": "return Enter.apply(", "down)": "down))"},
        "dx on rank 0 is only its share": {"Enter.apply(x)": "x"},
        "dx on rank 0 is not that of one process": {"Enter.apply(x)": "x", "entered @ gate": "Enter.apply(x) @ gate"},
        "768 bytes backward, in 2 collectives": {"Enter.apply(x)": "x", "entered @": "Enter.apply(x) @"},
        "768 bytes forward, in 2 collectives": {"return ": "idist.all_reduce((x @ up).detach())\n    return "},
    },
    "rms_norm": {
        "should return a float64 tensor of shape (5, 2)": lambda x, *_: x[:, 1:],
        "rank 0 divides by what it knows of its own features": {"Leave.apply": "", "Enter.apply": ""},
        "0 divides the sum of all squares by": {"/ n_features": "/ x.shape[1]"},
        "y on rank 0 is not that of one process": {"mean + eps": "mean"},
        "the mean counts as a constant": {"Leave.apply(squares)": "idist.all_reduce(squares.detach())"},
        "only what comes back from its own features": {"Enter.apply": ""},
        "dx on rank 0 is not that of one process": {"Enter.apply(total)": "Enter.apply(Enter.apply(total))"},
        "puts in 120 bytes forward, in 2 collectives; one number a row is 40": {
            "return ": "return 0 * idist.all_reduce(x.detach().clone()).sum() + "
        },
    },
}
