"""The checks of chapter 16: a gated MLP by columns and rows, and a norm over features that are cut."""

import torch
import torch.nn.functional as F

from ignite_ddl.course.cut import derivatives, part_of, run_cut
from ignite_ddl.course.exercises import Hint, exercise

WAIT_SECONDS = 60  # what is right takes well under one; a loaded machine may start slowly
BOUND = 1e-10  # float64; what is wrong here is wrong by far more


@exercise(
    cases=((4, 6, 8, 32), (2, 3, 6, 10)),
    about="{n_ranks} ranks, x of {rows} × {features}, hidden {hidden}",
    right="every derivative is that of one process, for one all-reduce each way",
)
def gated_mlp(function, n_ranks, rows, features, hidden):
    """One all-reduce of a narrow tensor each way, and every derivative that of one process."""
    numbers = torch.Generator().manual_seed(n_ranks)
    shapes = {"x": (rows, features), "gate": (features, hidden), "up": (features, hidden)}
    shapes |= {"down": (hidden, features), "upstream": (rows, features)}
    given = {name: _randn(shape, numbers) for name, shape in shapes.items()}
    dims = {"x": None, "gate": 1, "up": 1, "down": 0, "upstream": None}
    right = derivatives(lambda x, gate, up, down: F.silu(x @ gate) * (x @ up) @ down, **given)
    ranks = _run(n_ranks, function, given, dims)
    _check_output(ranks, [right["y"]] * n_ranks)
    terms = [
        F.silu(part["x"] @ part["gate"]) * (part["x"] @ part["up"]) @ part["down"]
        for part in _parts(given, dims, n_ranks)
    ]
    for rank, (found, _) in enumerate(ranks):
        if _same(found["y"], terms[rank]):
            raise Hint(f"rank {rank} returns its own term of y; who adds the terms of all ranks?")
        if not _same(found["y"], right["y"]):
            raise Hint(f"y on rank {rank} is not that of one process: is the sum in the right place?")
    _check_derivatives(ranks, right, dims, n_ranks)
    _check_cost(ranks, 8 * rows * features, "one all-reduce of a narrow tensor")


@exercise(
    cases=((4, 5, 8, 1e-5), (2, 3, 6, 0.5)),
    about="{n_ranks} ranks, x of {rows} × {features}, eps {eps:g}",
    right="the norm of whole rows and its derivatives, for one number a row each way",
)
def rms_norm(function, n_ranks, rows, features, eps):
    """A number a row is summed forward, and one backward."""
    numbers = torch.Generator().manual_seed(n_ranks)
    shapes = {"x": (rows, features), "gain": (features,), "upstream": (rows, features)}
    given = {name: _randn(shape, numbers) for name, shape in shapes.items()}
    dims = {"x": 1, "gain": 0, "upstream": 1}

    def normalise(x, gain, mean, eps=eps):
        return x / (mean + eps).sqrt() * gain

    right = derivatives(lambda x, gain: normalise(x, gain, x.square().mean(1, keepdim=True)), **given)
    outputs = right["y"].chunk(n_ranks, 1)
    ranks = _run(n_ranks, function, given, dims, features, eps)
    _check_output(ranks, outputs)
    mean = given["x"].square().mean(1, keepdim=True)
    for rank, (part, (found, _)) in enumerate(zip(_parts(given, dims, n_ranks), ranks, strict=True)):
        squares = part["x"].square()
        for wrong in (squares.mean(1, keepdim=True), squares.sum(1, keepdim=True) / features):
            if _same(found["y"], normalise(part["x"], part["gain"], wrong)):
                raise Hint(f"rank {rank} divides by what it knows of its own features; a row has more")
        if _same(found["y"], normalise(part["x"], part["gain"], n_ranks * mean)):
            raise Hint(f"rank {rank} divides the sum of all squares by its own number of features")
        if not _same(found["y"], outputs[rank]):
            raise Hint(f"y on rank {rank} is not that of one process")
    for rank, (part, (found, _)) in enumerate(zip(_parts(given, dims, n_ranks), ranks, strict=True)):
        direct = part["upstream"] * part["gain"] / (mean + eps).sqrt()
        own = (direct * part["x"]).sum(1, keepdim=True)
        if _same(found["dx"], direct):
            raise Hint(f"y is right, but in dx of rank {rank} the mean counts as a constant")
        if _same(found["dx"], direct - part["x"] * own / features / (mean + eps)):
            raise Hint(
                f"y is right, but dx of rank {rank} has only what comes back from its own features: all "
                "ranks read the mean, so its gradient has a share on each"
            )
    _check_derivatives(ranks, right, dims, n_ranks)
    _check_cost(ranks, 8 * rows, "one number a row")


def _randn(shape, generator):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _parts(given, dims, n_ranks):
    return [
        {name: part_of(value, dims[name], rank, n_ranks) for name, value in given.items()} for rank in range(n_ranks)
    ]


def _run(n_ranks, function, given, dims, *args):  # by position: a learner may rename arguments
    return run_cut(n_ranks, lambda **inputs: function(*inputs.values(), *args), given, dims, WAIT_SECONDS)


def _same(found, right):
    return found is not None and found.shape == right.shape and (found - right).abs().max() <= BOUND


def _check_output(ranks, outputs):
    for rank, ((found, _), right) in enumerate(zip(ranks, outputs, strict=True)):
        y = found["y"]
        if not isinstance(y, torch.Tensor) or y.shape != right.shape or y.dtype != torch.float64:
            raise Hint(f"rank {rank} should return a float64 tensor of shape {tuple(right.shape)}")
        if len(found) == 1:
            raise Hint("y has no backward; a plain all-reduce knows none, Leave does")


def _check_derivatives(ranks, right, dims, n_ranks):
    for name in right:
        if name == "y":
            continue
        dim, found = dims[name[1:]], [found[name] for found, _ in ranks]
        parts = [right[name]] * n_ranks if dim is None else right[name].chunk(n_ranks, dim)
        for rank, part in enumerate(parts):
            if _same(found[rank], part):
                continue
            if _same(found[rank], n_ranks * part):
                raise Hint(f"{name} on rank {rank} is {n_ranks} times too large: copies of one gradient were added")
            if dim is None and None not in found and _same(sum(found), right[name]):
                raise Hint(
                    f"y is right, but {name} on rank {rank} is only its share; the shares of all ranks have to be added"
                )
            raise Hint(f"y is right, but {name} on rank {rank} is not that of one process")


def _check_cost(ranks, enough, what):
    for way in ("forward", "backward"):
        for rank, (_, sent) in enumerate(ranks):
            put_in = sum(size for _, size in sent[way])
            if put_in > enough:
                calls = f"{len(sent[way])} collective{'s' if len(sent[way]) > 1 else ''}"
                raise Hint(f"right, but rank {rank} puts in {put_in} bytes {way}, in {calls}; {what} is {enough}")
