"""Natural mistakes in chapter 03's exercises."""

from functools import partial

import torch
import torch.nn.functional as F

from ignite_ddl.course.checks.ch03 import tile


def padded(x, y, rows, fill=0.0, label=0, weigh=lambda n, rows: (torch.arange(rows) < n).float() / n):
    missing = rows - len(x)
    padding = F.pad(x, (0, 0, 0, missing), value=fill), F.pad(y, (0, missing), value=label)
    return *padding, weigh(len(x), rows)


def with_the_first_rows(x, y, rows):
    index = torch.arange(rows).clamp(max=len(x) - 1)
    return x[index], y[index], (torch.arange(rows) < len(x)).double() / len(x)


def uneven(n, rows):
    weights = torch.arange(1, rows + 1) * (torch.arange(rows) < n)
    return weights / weights.sum()


def cut_by(cut):
    """An answer whose pairs are cut(size, parts, place)."""

    def device_tile(shape, axes, grid, device):
        place = dict(zip(grid, divmod(device, grid["model"]), strict=True))
        pairs = zip(shape, axes, strict=True)
        return [cut(size, grid[axis], place[axis]) if axis else (0, size) for size, axis in pairs]

    return device_tile


def unclamped(size, parts, place):
    share = -(-size // parts)
    return share * place, min(size, share * (place + 1))


def data_first(shape, axes, grid, device):
    return tile(shape, axes, grid, device % grid["data"] * grid["model"] + device // grid["data"])


RIGHT = {
    "pad_batch": [padded, with_the_first_rows],  # weights in float32; real rows as filling
    "device_tile": [lambda *args: [list(pair) for pair in tile(*args)]],
}
MISTAKES = {
    "pad_batch": {
        "return three tensors": lambda x, y, rows: (x, y),
        "48 rows padded to 64: your x, y and weights": lambda x, y, rows: (x, y, torch.ones(len(x)) / len(x)),
        "keep their dtypes": lambda x, y, rows: padded(x.float(), y, rows),
        "the first 48 rows should be": lambda *args: [part.flip(0) for part in padded(*args)],
        "0 times a NaN is NaN": partial(padded, fill=float("nan")),
        "a label of -1 is no class": partial(padded, label=-1),
        "only padding have a weight": partial(padded, weigh=lambda n, rows: torch.ones(rows) / rows),
        "your weights add up to 0.75": partial(padded, weigh=lambda n, rows: (torch.arange(rows) < n) / rows),
        "is not the mean over the 48 real rows": partial(padded, weigh=uneven),
    },
    "device_tile": {
        "give (start, stop) for each dim; one of yours is 8": lambda shape, *_: shape,
        "return 2 pairs, one for each dim": lambda shape, *_: [(0, shape[0])],
        "the right tiles on the wrong devices": data_first,
        "yours holds (0, 3)": lambda shape, axes, grid, device: tile(shape, ("data", "model"), grid, device),
        "nothing is left for device 6; its slice is empty, (5, 5), yours is (6, 5)": cut_by(unclamped),
        "10 rows over 4 are cut as XLA and torch.chunk cut them, into shares of 3": cut_by(
            lambda size, parts, place: (size // parts * place, size // parts * (place + 1))
        ),
        "'data' cuts dim 0 into 2; device 0 holds (0, 4)": lambda shape, *_: [(0, size) for size in shape],
    },
}
