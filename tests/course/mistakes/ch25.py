"""Natural mistakes in chapter 25's exercises."""


def one_by_one(differs, n_layers):
    return next((n - 1 for n in range(1, n_layers + 1) if differs(n)), None)


MISTAKES = {
    "first_wrong": {
        "you run 0 layers; it should be 1 to": {"differs(middle)": "differs(middle - 1)"},
        "you return 1: differs(n) runs layers 0 to n - 1": {"return high - 1": "return high"},
        "none wrong: you return": {" if high <= n_layers else None": ""},
        "runs; 3 are enough": one_by_one,
    },
    "their_numbers": {
        "return three whole numbers, not (2, 1.0, 16)": {"return dp, rows": "return dp, batch / dp / microbatches"},
        "dp 8, but 4 ranks share one model": {"pp * tp": "1", "if left_ranks or left_rows or not rows": "if False"},
        "2 · 16 · 16 is 512 rows, not 32": {"return dp, rows": "return dp, batch // dp"},
        "1 micro-batches follow one another; the pipeline was planned for 16": {
            "return dp, rows, microbatches": "return dp, batch // dp, 1"
        },
        "does not come out whole, but you return (2, 0, 16)": {"if left_ranks or left_rows or not rows": "if False"},
    },
}
