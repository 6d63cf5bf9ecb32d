"""The exercises of chapter 03: one shape for every batch, and which slice of a tensor a device holds."""

from itertools import pairwise

import torch
import torch.nn.functional as F

from ignite_ddl.course.exercises import Hint, exercise


@exercise
def pad_batch(function):
    """pad_batch(x, y, rows) -> (x, y, weights): `rows` rows, and the mean loss and gradient of the real ones."""
    generator = torch.Generator().manual_seed(3)
    for n_rows, rows in ((48, 64), (64, 64), (1, 8)):
        x = torch.randn(n_rows, 6, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 4, (n_rows,), generator=generator)
        padded = function(x.clone(), y.clone(), rows)
        if not (isinstance(padded, tuple | list) and len(padded) == 3):
            raise Hint("return three tensors: x, y and weights")
        px, py, weights = padded
        shapes = [tuple(tensor.shape) for tensor in (px, py, weights)]
        if shapes != [(rows, 6), (rows,), (rows,)]:
            raise Hint(
                f"{n_rows} rows padded to {rows}: your x, y and weights have the shapes {shapes}, "
                f"expected {[(rows, 6), (rows,), (rows,)]}"
            )
        if py.dtype != y.dtype or px.dtype != x.dtype:
            raise Hint(
                f"x and y keep their dtypes, {x.dtype} and {y.dtype}; yours are {px.dtype} and {py.dtype}"
            )
        if not torch.equal(px[:n_rows], x) or not torch.equal(py[:n_rows], y):
            raise Hint(f"the first {n_rows} rows should be the batch itself, in its order")
        if not torch.isfinite(px).all():
            raise Hint("fill with numbers, such as zeros: a weight of 0 times a NaN is NaN")
        if not 0 <= int(py.min()) <= int(py.max()) < 4:
            raise Hint(
                f"a label of {int(py.min())} is no class: the loss of a padded row has to be computable"
            )
        _compare(x, y, px, py, weights, n_rows, rows)
    return "one shape, and the mean loss and gradient of the real rows"


def _compare(x, y, px, py, weights, n_rows, rows):
    error = 1e-12 if weights.dtype == torch.float64 else 1e-6  # float32 holds 1/48 to 9 digits
    weights = weights.double()
    real = _loss_and_gradient(x, y, torch.full((n_rows,), 1 / n_rows, dtype=torch.float64))
    filled = _loss_and_gradient(px, py, weights)
    if all(torch.allclose(a, b, rtol=0, atol=error) for a, b in zip(real, filled, strict=True)):
        return
    if n_rows < rows and weights[n_rows:].abs().max() > 0:
        raise Hint(f"{n_rows} rows padded to {rows}: rows that are only padding have a weight in your mean")
    total = float(weights.sum())
    if abs(total - 1) > 10 * error:
        raise Hint(
            f"{n_rows} rows padded to {rows}: your weights add up to {total:.4g}, those of a mean over the "
            f"{n_rows} real rows to 1"
        )
    raise Hint(
        f"{n_rows} rows padded to {rows}: the weighted loss is not the mean over the {n_rows} real rows"
    )


def _loss_and_gradient(x, y, weights):
    weight = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6).requires_grad_()
    loss = (weights.double() * F.cross_entropy(x @ weight.T, y, reduction="none")).sum()
    loss.backward()
    return loss.detach(), weight.grad


GRIDS = {"2 × 2": {"data": 2, "model": 2}, "4 × 2": {"data": 4, "model": 2}, "1 × 4": {"data": 1, "model": 4}}
CASES = [
    ((8, 6), ("data", None), "2 × 2"),
    ((6, 8), (None, "model"), "2 × 2"),
    ((8, 8), ("data", "model"), "2 × 2"),
    ((8, 8), ("model", "data"), "4 × 2"),
    ((16, 4), (None, None), "4 × 2"),
    ((12, 4), ("data", "model"), "1 × 4"),
    ((10, 4), ("data", None), "4 × 2"),  # 3, 3, 3 and 1 rows
    ((5, 4), ("data", None), "4 × 2"),  # 2, 2, 1 and 0 rows
]


@exercise
def device_tile(function):
    """device_tile(shape, axes, grid, device) -> a pair (start, stop) for each dim."""
    for shape, axes, name in CASES:
        grid = GRIDS[name]
        n_devices = grid["data"] * grid["model"]
        expected = [tile(shape, axes, grid, device) for device in range(n_devices)]
        given = [[_pair(pair) for pair in function(shape, axes, grid, device)] for device in range(n_devices)]
        if given == expected:
            continue
        place = f"shape {shape} cut by {axes} on the {name} grid"
        if any(len(pairs) != len(shape) for pairs in given):
            raise Hint(f"{place}: return {len(shape)} pairs, one for each dim")
        if sorted(map(str, given)) == sorted(map(str, expected)):
            raise Hint(
                f"{place}: the right tiles on the wrong devices. Device 1 stands beside device 0 on the last axis, "
                f"'model': it holds {expected[1]}, yours {given[1]}"
            )
        device = next(i for i in range(n_devices) if given[i] != expected[i])
        _explain(place, shape, axes, grid, device, given[device], expected[device])
    return "each device knows its tile, on three grids, the uneven cut too"


def _pair(pair):
    try:
        start, stop = pair
    except (TypeError, ValueError):
        raise Hint(f"give (start, stop) for each dim; one of yours is {pair!r}") from None
    return int(start), int(stop)


def _explain(place, shape, axes, grid, device, given, expected):
    for dim, axis in enumerate(axes):
        if given[dim] == expected[dim]:
            continue
        if axis is None:
            raise Hint(f"{place}: dim {dim} has no axis, so every device holds all of it; device {device} of yours "
                       f"holds {given[dim]}")  # fmt: skip
        if shape[dim] % grid[axis]:
            start, stop = expected[dim]
            if start == stop:
                raise Hint(
                    f"{place}: nothing is left for device {device}; its slice is empty, {expected[dim]}, "
                    f"yours is {given[dim]}"
                )
            raise Hint(
                f"{place}: {shape[dim]} rows over {grid[axis]} are cut as XLA and torch.chunk cut them, into shares "
                f"of {-(-shape[dim] // grid[axis])} with a smaller last one; device {device} holds {expected[dim]}, "
                f"yours {given[dim]}"
            )
        raise Hint(
            f"{place}: '{axis}' cuts dim {dim} into {grid[axis]}; device {device} holds {expected[dim]}, "
            f"yours {given[dim]}"
        )


def tile(shape, axes, grid, device):
    """The answer of :func:`device_tile`: [(start, stop), ...] for one device, axes of the grid in row-major order."""
    place = dict(zip(grid, divmod(device, grid["model"]), strict=True))
    tiles = []
    for size, axis in zip(shape, axes, strict=True):
        parts = 1 if axis is None else grid[axis]
        share = -(-size // parts)
        edges = [min(size, share * part) for part in range(parts + 1)]
        tiles.append(list(pairwise(edges))[0 if axis is None else place[axis]])
    return tiles
