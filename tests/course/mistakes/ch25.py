"""Natural mistakes in chapter 25's exercises."""


def one_by_one(differs, n_layers):
    return next((n - 1 for n in range(1, n_layers + 1) if differs(n)), None)


def by_row(x):
    scale = x.detach().abs().amax((1, 2), keepdim=True).clamp(min=1e-12)
    return x + ((x / scale).round() * scale - x).detach()


def by_batch(x):
    scale = x.detach().abs().max().clamp(min=1e-12)
    return x + ((x / scale).round() * scale - x).detach()


OF_ROW = {"function": by_row}
MISTAKES = {
    "count_weights": {
        "is the head's weight the embedding's?": {"(0 if tied else vocabulary * width)": "vocabulary * width"},
        "biases and norms are 13 · width a block": {" + 13 * width": ""},
        "width 64, 2 blocks, tied: you count 108,032 of 107,264": {"12 * width**2": "(12 * width**2 + 6 * width)"},
    },
    "build": {
        "return a dict of model, optimizer, trainer and loader": {'"loader": loader': '"rows": loader'},
        "look at rows, weights and the loss": {"shuffle=True": "shuffle=False"},
        "look at the optimizer, its rate and the clipping": {"lr=5e-3": "lr=1e-3"},
        "the rows of a step are those of all ranks together": {
            "ddl.auto_dataloader(text, batch_size=ROWS, shuffle=True)": "ddl.auto_dataloader("
            "text, batch_size=ROWS * ddl.get_mesh().dp_size, shuffle=True)"
        },
        "with {'shard': True} as cut, rank 0 of 2 holds 107,264 of 107,264 weights": {", **cut)": ")"},
        "with tp=2, rank 0 of 2 holds 107,264 of 107,264 weights": {"GPT.tensor_plan, ": ""},
    },
    "first_wrong": {
        "you run 0 layers; it should be 1 to": {"differs(middle)": "differs(middle - 1)"},
        "you return 1: differs(n) runs layers 0 to n - 1": {"return high - 1": "return high"},
        "none wrong: you return": {" if high <= n_layers else None": ""},
        "runs; 3 are enough": one_by_one,
        "1 layers, none wrong: 21 runs and no end; the last two are of 1 and 1 layers": {
            "low, high = 0": "low, high = 1",
            "high - low > 1": "low < high",
        },
    },
    "positions_that_leak": {
        "return a list of positions, not True": lambda model, x: True,
        "put the model into eval mode first": {"model.eval()": "model.train()"},
        "compare with a tolerance, such as 1e-9": {"> 1e-9": "> 0"},
        "you name position 5, after which nothing comes": lambda model, x: (
            list(range(x.shape[1])) * bool(float((model.eval()(x) - model(x[:, :1])).abs().max()) > 10)
        ),
        "it reads the next character: you return [], it is [0, 1, 2, 3, 4]": {
            "model(x[:, : t + 1])[:, t]": "model(x[:, : t + 2])[:, t]"
        },
    },
    "rounded": {
        "return a tensor of the shape of x": lambda x: x.abs().amax(-1),
        "a row alone is rounded otherwise than among four": by_batch,
        "the scale sees later ones": by_row,
        "each number should be −1, 0 or 1 times": {"1e-12": "1.0"},
        "−1, 0 or 1 times the largest size of its character": lambda x: x + (x.round() - x).detach(),
        "not yet: the gradient should pass": {"return x + (": "x = x.detach()\n    return x + ("},
        "the gradient should pass as if nothing were rounded": {"x + (": "(", " - x).detach()": ")"},
        "a character of zeros becomes nan": {".clamp(min=1e-12)": ""},
    },
}
