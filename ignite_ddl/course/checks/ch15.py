"""The checks of chapter 15: the cheapest cut of each layer, and a convolution cut by input channels."""

import torch
import torch.nn.functional as F

from ignite_ddl.course.exercises import Hint, exercise


@exercise
def cheapest_cuts(function):
    for rows, widths in (
        (64, [64, 64, 64]),
        (256, [64, 64, 64]),
        (32, [784, 1024, 1024, 10]),
        (200, [300, 500, 100]),
        (100, [784, 400, 100, 10]),
        (128, [100, 100]),
    ):
        case = f"{rows} rows through layers of widths {widths}"
        cuts = function(rows, list(widths))
        if not isinstance(cuts, list | tuple) or len(cuts) != len(widths) - 1:
            raise Hint(f"{case}: return a list of {len(widths) - 1} words, one for each layer")
        if unknown := [cut for cut in cuts if cut not in ("data", "inside")]:
            raise Hint(f'{case}: the words are "data" and "inside", you return {unknown[0]!r}')
        for layer, cut in enumerate(cuts):
            sent = _sent(rows, widths, layer)
            if sent[cut] > min(sent.values()):
                first = " (nobody asks for the gradient of its input)" if layer == 0 else ""
                raise Hint(
                    f'{case}: layer {layer}{first} sends {sent[cut]:,} numbers with "{cut}", '
                    f"{min(sent.values()):,} can be had"
                )
    return "no other choice sends fewer numbers"


def _sent(rows, widths, layer):
    inputs, outputs = widths[layer : layer + 2]
    inside = rows * (outputs + (2 * inputs if layer > 0 else 0))  # an all-reduce sends twice on a ring
    return {"data": 2 * inputs * outputs, "inside": inside}


@exercise
def partial_convolution(function):
    torch.manual_seed(0)
    for channels, outputs, size, n_ranks in ((8, 6, 3, 4), (4, 3, 1, 2), (6, 5, 5, 3), (3, 2, 3, 1)):
        case = f"{channels} input channels on {n_ranks} ranks"
        x = torch.randn(2, channels, 9, 9, dtype=torch.float64)
        weight = torch.randn(outputs, channels, size, size, dtype=torch.float64)
        bias = torch.randn(outputs, dtype=torch.float64)
        right = F.conv2d(x, weight, bias, padding="same")
        parts = []
        for rank in range(n_ranks):
            part = function(x.clone(), weight.clone(), bias.clone(), rank, n_ranks)
            if not isinstance(part, torch.Tensor) or part.shape != right.shape:
                given = tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
                raise Hint(f"{case}: each rank's part should be {tuple(right.shape)}, yours is {given}")
            parts.append(part)
            if not torch.equal(part, function(*_without_others(x, weight, rank, n_ranks), bias.clone(), rank, n_ranks)):
                raise Hint(f"{case}: rank {rank} uses channels that another rank holds")
        total = sum(parts)
        if (total - right).abs().max() < 1e-12:
            continue
        if (total - right - (n_ranks - 1) * bias[:, None, None]).abs().max() < 1e-12:
            raise Hint(f"{case}: the sum has the bias {n_ranks} times, once from each rank")
        if (total + bias[:, None, None] - right).abs().max() < 1e-12:
            raise Hint(f"{case}: the sum lacks the bias")
        raise Hint(f"{case}: the sum of the parts is off by {(total - right).abs().max():.2g}")
    return "the parts sum to the convolution, and no rank looks at another's channels"


def _without_others(x, weight, rank, n_ranks):
    """The same with zeros for all channels but this rank's."""
    mine = torch.zeros(x.shape[1], dtype=torch.bool)
    mine.chunk(n_ranks)[rank][:] = True
    return x * mine[None, :, None, None], weight * mine[None, :, None, None]
