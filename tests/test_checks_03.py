"""The exercises of chapter 03: what is right passes, and each natural mistake gets a hint that helps."""

import pytest
import torch
import torch.nn.functional as F
from checking import said, stub

from ignite_ddl.course.checks import ch03 as checks

# --- one shape for every batch -------------------------------------------------------------------------


def padded(x, y, rows, fill=0.0, label=0):
    missing = rows - len(x)
    return F.pad(x, (0, 0, 0, missing), value=fill), F.pad(y, (0, missing), value=label), missing


def with_zeros(x, y, rows):
    px, py, missing = padded(x, y, rows)
    return px, py, F.pad(torch.full((len(x),), 1 / len(x), dtype=x.dtype), (0, missing))


def with_the_first_row(x, y, rows):
    """Real rows as filling, with weight 0; also right."""
    index = torch.arange(rows).clamp(max=len(x) - 1)
    return x[index], y[index], (torch.arange(rows) < len(x)).double() / len(x)


def in_float32(x, y, rows):
    """Weights of torch.zeros(rows), whatever the dtype of x."""
    px, py, _ = padded(x, y, rows)
    weights = torch.zeros(rows)
    weights[: len(x)] = 1 / len(x)
    return px, py, weights


def halves_in_float32(x, y, rows):
    px, py, weights = in_float32(x, y, rows)
    return px, py, weights / 2


def mean_of_all_rows(x, y, rows):
    px, py, _ = padded(x, y, rows)
    return px, py, torch.full((rows,), 1 / rows, dtype=x.dtype)


def mean_over_the_padded_count(x, y, rows):
    px, py, missing = padded(x, y, rows)
    return px, py, F.pad(torch.full((len(x),), 1 / rows, dtype=x.dtype), (0, missing))


def ones_and_zeros(x, y, rows):
    px, py, missing = padded(x, y, rows)
    return px, py, F.pad(torch.ones(len(x), dtype=x.dtype), (0, missing))


def duplicates(x, y, rows):
    """What DistributedSampler does: the first rows once more."""
    index = torch.arange(rows) % len(x)
    return x[index], y[index], torch.full((rows,), 1 / rows, dtype=x.dtype)


def uneven_weights(x, y, rows):
    weights = torch.arange(1, len(x) + 1, dtype=x.dtype)
    px, py, missing = padded(x, y, rows)
    return px, py, F.pad(weights / weights.sum(), (0, missing))


def shuffled(x, y, rows):
    px, py, weights = with_zeros(x, y, rows)
    return px.flip(0), py.flip(0), weights.flip(0)


@pytest.mark.parametrize("function", [with_zeros, with_the_first_row, in_float32])
def test_padding_right(function, capsys):
    assert checks.pad_batch(function)
    assert said(capsys) == "right: one shape, and the mean loss and gradient of the real rows"


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (stub, "write the body of stub, then run this cell again"),
        (lambda x, y, rows: (x, y), "return three tensors"),
        (
            lambda x, y, rows: (x, y, torch.ones(len(x)) / len(x)),
            "48 rows padded to 64: your x, y and weights have",
        ),
        (
            lambda x, y, rows: (*padded(x, y, rows, fill=float("nan"))[:2], torch.ones(rows)),
            "0 times a NaN is NaN",
        ),
        (
            lambda x, y, rows: (*padded(x, y, rows, label=-1)[:2], torch.ones(rows)),
            "a label of -1 is no class",
        ),
        (
            lambda x, y, rows: (padded(x, y, rows)[0], padded(x, y, rows)[1].float(), torch.ones(rows)),
            "keep their d",
        ),
        (mean_of_all_rows, "rows that are only padding have a weight"),
        (duplicates, "rows that are only padding have a weight"),
        (mean_over_the_padded_count, "your weights add up to 0.75"),
        (ones_and_zeros, "your weights add up to 48"),
        (halves_in_float32, "your weights add up to 0.5"),
        (uneven_weights, "is not the mean over the 48 real rows"),
        (shuffled, "the first 48 rows should be the batch itself"),
    ],
)
def test_padding_wrong(function, hint, capsys):
    assert not checks.pad_batch(function)
    line = said(capsys)
    assert line.startswith("not yet: ")
    assert hint in line


# --- which tile a device holds -------------------------------------------------------------------------


def right_tile(shape, axes, grid, device):
    place = {"data": device // grid["model"], "model": device % grid["model"]}
    tile = []
    for size, axis in zip(shape, axes, strict=True):
        share = size if axis is None else -(-size // grid[axis])
        start = 0 if axis is None else min(size, share * place[axis])
        tile.append((start, min(size, start + share)))
    return tile


def as_lists(*args):
    return [list(pair) for pair in right_tile(*args)]


def data_first(shape, axes, grid, device):
    """Numbers the devices along the first axis first."""
    transposed = device % grid["data"] * grid["model"] + device // grid["data"]
    return right_tile(shape, axes, grid, transposed)


def every_axis_cuts(shape, axes, grid, device):
    return right_tile(shape, ("data", "model"), grid, device)


def rounded_down(shape, axes, grid, device):
    place = {"data": device // grid["model"], "model": device % grid["model"]}
    shares = [
        (size // grid[axis], place[axis]) if axis else (size, 0)
        for size, axis in zip(shape, axes, strict=True)
    ]
    return [(share * at, share * (at + 1)) for share, at in shares]


def unclamped(shape, axes, grid, device):
    """Beyond the end a slice of its own begins: 5 rows over 4 end with (6, 5)."""
    place = {"data": device // grid["model"], "model": device % grid["model"]}
    shares = [
        (-(-size // grid[axis]), place[axis]) if axis else (size, 0)
        for size, axis in zip(shape, axes, strict=True)
    ]
    return [
        (share * at, min(size, share * (at + 1))) for size, (share, at) in zip(shape, shares, strict=True)
    ]


def evenly(shape, axes, grid, device):
    """10 rows over 4 as 2, 3, 2, 3: even, but not how XLA cuts."""
    place = {"data": device // grid["model"], "model": device % grid["model"]}
    parts = [
        (size, grid[axis], place[axis]) if axis else (size, 1, 0)
        for size, axis in zip(shape, axes, strict=True)
    ]
    return [(size * at // n, size * (at + 1) // n) for size, n, at in parts]


def all_the_devices(shape, axes, grid, device):
    """Cuts each dim over all devices."""
    n = grid["data"] * grid["model"]
    return [
        (size * device // n, size * (device + 1) // n) if axis else (0, size)
        for size, axis in zip(shape, axes, strict=True)
    ]


@pytest.mark.parametrize("function", [right_tile, as_lists])
def test_tile_right(function, capsys):
    assert checks.device_tile(function)
    assert said(capsys).startswith("right: each device knows its tile")


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (stub, "write the body of stub, then run this cell again"),
        (data_first, "the right tiles on the wrong devices"),
        (
            every_axis_cuts,
            "dim 1 has no axis, so every device holds all of it; device 0 of yours holds (0, 3)",
        ),
        (rounded_down, "10 rows over 4 are cut as XLA and torch.chunk cut them, into shares of 3"),
        (unclamped, "nothing is left for device 6; its slice is empty, (5, 5), yours is (6, 5)"),
        (evenly, "10 rows over 4 are cut as XLA and torch.chunk cut them, into shares of 3"),
        (all_the_devices, "'data' cuts dim 0 into 2; device 0 holds (0, 4), yours (0, 2)"),
        (lambda shape, *_: [(0, shape[0])], "return 2 pairs, one for each dim"),
        (lambda shape, *_: shape, "give (start, stop) for each dim; one of yours is 8"),
        (lambda shape, *_: [(0, size) for size in shape], "'data' cuts dim 0 into 2; device 0 holds (0, 4)"),
    ],
)
def test_tile_wrong(function, hint, capsys):
    assert not checks.device_tile(function)
    line = said(capsys)
    assert line.startswith("not yet: ")
    assert hint in line


def test_the_rule_is_torch_chunks():
    for size, parts in ((10, 4), (9, 2), (12, 4), (7, 3), (5, 4)):
        chunks = [len(chunk) for chunk in torch.arange(size).chunk(parts)]
        chunks += [0] * (parts - len(chunks))
        grid = {"data": parts, "model": 1}
        tiles = [checks.tile((size,), ("data",), grid, device)[0] for device in range(parts)]
        assert [stop - start for start, stop in tiles] == chunks
