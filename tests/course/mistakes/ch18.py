"""Natural mistakes in chapter 18's exercises."""

LAST = "n_microbatches)]"
TIME = "(m + n_ranks - 1) * (rows / m * row_seconds + overhead)"
RIGHT = {
    "one_f_one_b": [{"return order": "return iter(order", LAST: f"{LAST})"}],
    "backward_again": [{"hidden.detach()": "hidden"}, {"stage(hidden)": "stage.forward(hidden)"}],
    "choose_microbatches": [{"return min": "import numpy\n    return numpy.int64(min", TIME: f"{TIME})"}],
}
MISTAKES = {
    "one_f_one_b": {
        # Four hints of reading an order, which chapter 19 uses as well.
        "return a list of names": lambda rank, p, m: [0, 1],
        "rank 0 has a pass 'F8'": {LAST: f"{LAST} + ['F8']"},
        "rank 0 leaves out B7": {LAST: f"{LAST}[:-1]"},
        "rank 0 has 17 passes, 16 are there to do": {LAST: f"{LAST} + ['B0']"},
        "nobody can go on, rank 0 stands before B7": {"return order": "return (order", LAST: f"{LAST})[::-1]"},
        "your step takes 96 time units, 1F1B takes 33": {"n_ranks - rank - 1": "0"},
        # GPipe
        "33 time units, as it should, but rank 0 keeps the activations of 8 microbatches at once; 1F1B keeps 4": {
            "n_ranks - rank - 1": "n_microbatches"
        },
    },
    "backward_again": {
        "return the gradient of hidden, a tensor of shape (4, 8)": lambda *given: None,
        "the gradient of hidden is not that of the first forward pass": {
            "return hidden.grad": "return hidden.grad * float('nan')"
        },
        "runs the stage forward 2 times": {"output = stage(hidden)": "stage(hidden)\n    output = stage(hidden)"},
        "did dropout set the same numbers to zero": {"torch.set_rng_state(state)": ""},
        "the weights' gradients are not in .grad": {
            "output.backward(gradient)": "return torch.autograd.grad(output, hidden, gradient)[0]"
        },
        "put the generator's state back": {"torch.set_rng_state(now)": ""},
    },
    "choose_microbatches": {
        "which does not cut 64 rows into equal microbatches": {" if rows % m == 0": ""},
        "your 4 microbatches rank 0 keeps 64 rows": {" if min(m, n_ranks) * rows // m <= max_rows": ""},
        "your 1 microbatches a step takes 1376.0 ms, 1360.0 can be had": {
            TIME: "abs(m - ((n_ranks - 1) * rows * row_seconds / overhead) ** 0.5)"
        },
        "your 4 microbatches a step takes 1652.0 ms, 1360.0 can be had": {"min(m, n_ranks)": "n_ranks"},
        "your 1 microbatches a step takes": {"(m + n_ranks - 1)": "m"},
    },
}
