"""Natural mistakes in chapter 03's exercises."""

import torch

FIRST_ROWS = "*(tensor[torch.arange(rows).clamp(max=len(x) - 1)] for tensor in (x, y))"
RIGHT = {
    "pad_batch": [  # weights in float32; real rows as filling
        {", dtype=x.dtype": ""},
        {"F.pad(x, (0, 0, 0, missing)), F.pad(y, (0, missing))": FIRST_ROWS},
    ],
    "all_reduces": [{"return found": "return {name: found.get(name) for name in products}"}],
}
MISTAKES = {
    "pad_batch": {
        "return three tensors": lambda x, y, rows: (x, y),
        "48 rows padded to 64: your x, y and weights": lambda x, y, rows: (x, y, torch.ones(len(x)) / len(x)),
        "keep their dtypes": {"F.pad(x,": "F.pad(x.float(),"},
        "the first 48 rows should be": {"(0, 0, 0, missing)": "(0, 0, missing, 0)"},
        "0 times a NaN is NaN": {"(0, 0, 0, missing)": "(0, 0, 0, missing), value=float('nan')"},
        "a label of -1 is no class": {"F.pad(y, (0, missing)": "F.pad(y, (0, missing), value=-1"},
        "only padding have a weight": {"F.pad(weights, (0, missing))": "torch.ones(rows) / rows"},
        "your weights add up to 0.75": {"1 / len(x)": "1 / rows"},
        "is not the mean over the 48 real rows": {"weights, (0,": "torch.arange(len(x)).double().softmax(0), (0,"},
    },
    "all_reduces": {
        "return a dict, with no other names": {"return found": "return list(found.items())"},
        "w.grad is a sum over rows, of which a device has a part": {"products.items()": "[*products.items()][:1]"},
        "does not add the parts of x.grad up": {"products.items()": "[*products.items()][:2]"},
        "w.grad is a sum over rows, which a device has whole": {"is not None": "or name == 'w.grad'"},
        "your w.grad is 'data'": {"(cut[summed], piece)": "cut[summed]"},
        "in x.grad? Not the devices along 'data'": {"(cut[summed], piece)": "('data', piece)"},
        "a device's piece of w.grad has the shape (6, 8), yours (6, 16)": {" // grid.get(cut[dim], 1)": ""},
    },
}
