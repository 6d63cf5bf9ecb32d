"""Natural mistakes in chapter 15's exercises."""

BIAS = "bias if rank == 0 else None"
RIGHT = {
    "partial_convolution": [{BIAS: "bias / n_ranks"}, {BIAS: "bias.div_(n_ranks)"}]
}  # a share of the bias from each rank
MISTAKES = {
    "cheapest_cuts": {
        "return a list of 2 words, one for each layer": {"return cuts": "return cuts[1:]"},
        'the words are "data" and "inside"': {'"data"': '"model"'},
        "nobody asks for the gradient of its input": {" if layer > 0 else 0": ""},
        'numbers with "data"': {"2 * inputs * outputs <= inside": "True"},
        'numbers with "inside"': {"2 * inputs * outputs <= inside": "False"},
        "can be had": {"2 * inputs * outputs <= inside": "inputs <= rows"},
    },
    "partial_convolution": {
        "each rank's part should be": {
            f"mine_x, mine, {BIAS}": "x, weight.chunk(n_ranks)[rank], bias.chunk(n_ranks)[rank]"
        },
        "another rank holds": {f"mine_x, mine, {BIAS}": "x, weight / n_ranks, bias / n_ranks"},
        "the bias 4 times, once from each rank": {BIAS: "bias"},
        "lacks the bias": {BIAS: "None"},
        "off by": {"return ": "return 2 * "},
    },
}
