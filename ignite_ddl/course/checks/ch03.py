"""The exercises of chapter 03: one shape for every batch, and the all-reduces of a layer that is cut."""

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
            raise Hint(f"x and y keep their dtypes, {x.dtype} and {y.dtype}; yours are {px.dtype} and {py.dtype}")
        if not torch.equal(px[:n_rows], x) or not torch.equal(py[:n_rows], y):
            raise Hint(f"the first {n_rows} rows should be the batch itself, in its order")
        if not torch.isfinite(px).all():
            raise Hint("fill with numbers, such as zeros: a weight of 0 times a NaN is NaN")
        if not 0 <= int(py.min()) <= int(py.max()) < 4:
            raise Hint(f"a label of {int(py.min())} is no class: the loss of a padded row has to be computable")
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
    if not abs(total - 1) <= 10 * error:
        raise Hint(
            f"{n_rows} rows padded to {rows}: your weights add up to {total:.4g}, those of a mean over the "
            f"{n_rows} real rows to 1"
        )
    raise Hint(f"{n_rows} rows padded to {rows}: the weighted loss is not the mean over the {n_rows} real rows")


def _loss_and_gradient(x, y, weights):
    weight = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6).requires_grad_()
    loss = (weights.double() * F.cross_entropy(x @ weight.T, y, reduction="none")).sum()
    loss.backward()
    return loss.detach(), weight.grad


GRID, WIDE = {"data": 2, "model": 2}, {"data": 4, "model": 2}
CASES = [  # rows, inner and columns; the axis that cuts each; the grid
    ((8, 6, 16), ("data", None, None), GRID),
    ((8, 6, 16), (None, None, "model"), GRID),
    ((8, 16, 2), (None, "model", None), GRID),
    ((8, 6, 16), ("data", None, "model"), GRID),
    ((8, 16, 2), ("data", "model", None), GRID),
    ((8, 6, 16), (None, None, None), GRID),
    ((4, 8, 12), ("model", None, "data"), WIDE),
    ((4, 8, 12), (None, "data", "model"), WIDE),
]
DIMS = "rows", "inner", "columns"
PRODUCTS = {  # the dims that it has, and the one that it sums over
    "y": ("rows", "columns", "inner"),
    "w.grad": ("inner", "columns", "rows"),
    "x.grad": ("rows", "inner", "columns"),
}


@exercise
def all_reduces(function):
    """all_reduces(sizes, cut, grid) -> {name: (axis, shape of a device's piece)}, of "y", "w.grad", "x.grad"."""
    for sizes, axes, grid in CASES:
        sizes, cut = (dict(zip(DIMS, values, strict=True)) for values in (sizes, axes))
        given = function(dict(sizes), dict(cut), dict(grid))
        expected = layer(sizes, cut, grid)
        if not isinstance(given, dict) or not set(given) <= set(PRODUCTS):
            raise Hint(f"return a dict, with no other names than {list(PRODUCTS)}")
        shown = ", ".join(f"{sizes[dim]} {dim} " + (f"cut by {cut[dim]!r}" if cut[dim] else "whole") for dim in DIMS)
        for name, (*_, summed) in PRODUCTS.items():
            if given.get(name) is None and name in expected:
                raise Hint(
                    f"{shown}: {name} is a sum over {summed}, of which a device has a part; yours does not add "
                    f"the parts of {name} up"
                )
            if given.get(name) is not None:
                _compare_piece(f"{shown}: ", name, summed, given[name], expected.get(name))
    return "y and both gradients, in eight cuts on two grids"


def _compare_piece(place, name, summed, given, expected):
    if expected is None:
        raise Hint(f"{place}{name} is a sum over {summed}, which a device has whole; yours adds it up all the same")
    try:
        axis, shape = given
        shape = tuple(map(int, shape))
    except (TypeError, ValueError):
        raise Hint(f"give (axis, shape) for each name; your {name} is {given!r}") from None
    if axis != expected[0]:
        raise Hint(f"{place}who has another part of the sum in {name}? Not the devices along {axis!r}")
    if shape != expected[1]:
        raise Hint(f"{place}a device's piece of {name} has the shape {expected[1]}, yours {shape}")


def layer(sizes, cut, grid):
    """The answer of :func:`all_reduces`."""
    return {
        name: (cut[summed], tuple(sizes[dim] // grid.get(cut[dim], 1) for dim in dims))
        for name, (*dims, summed) in PRODUCTS.items()
        if cut[summed]
    }
