"""The exercises of chapter 15: what is right passes, and each natural mistake gets a hint that helps."""

import pytest
import torch
import torch.nn.functional as F
from checking import said, stub, wrong

from ignite_ddl.course.checks import ch15 as checks

# --- the cheapest cut -----------------------------------------------------------------------------------


def cheapest(rows, widths):
    pairs = enumerate(zip(widths, widths[1:], strict=False))
    return ["data" if a * b <= rows * (b + a * (i > 0)) else "inside" for i, (a, b) in pairs]


def with_the_first_input(rows, widths):
    return ["data" if a * b <= rows * (a + b) else "inside" for a, b in zip(widths, widths[1:], strict=False)]


def forward_alone(rows, widths):
    return ["data" if a <= rows else "inside" for a in widths[:-1]]


def test_the_cheapest_cuts_pass(capsys):
    assert checks.cheapest_cuts(cheapest)
    assert said(capsys) == "right: no other choice moves fewer numbers"


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (stub, "write the body of stub"),
        (lambda rows, widths: ["data"] * (len(widths) - 1), "can be had"),
        (lambda rows, widths: ["inside"] * (len(widths) - 1), "can be had"),
        (with_the_first_input, "nobody asks for the gradient of its input"),
        (forward_alone, "can be had"),
        (lambda rows, widths: cheapest(rows, widths)[1:], "one for each layer"),
        (lambda rows, widths: ["model"] * (len(widths) - 1), 'the words are "data" and "inside"'),
        (lambda rows, widths: "data", "one for each layer"),
    ],
)
def test_other_cuts_get_a_hint(function, hint, capsys):
    wrong(checks.cheapest_cuts, function, hint, capsys)


# --- a convolution by input channels --------------------------------------------------------------------


def partial(x, weight, bias, rank, n_ranks, own=lambda rank: rank == 0):
    mine = [tensor.chunk(n_ranks, dim=1)[rank] for tensor in (x, weight)]
    return F.conv2d(*mine, bias if own(rank) else None, padding="same")


def by_outputs(x, weight, bias, rank, n_ranks):
    return F.conv2d(x, weight.chunk(n_ranks)[rank], bias.chunk(n_ranks)[rank], padding="same")


def test_parts_by_input_channels_pass(capsys):
    assert checks.partial_convolution(partial)
    assert said(capsys).startswith("right: the parts sum to the convolution")


def test_a_share_of_the_bias_from_each_rank_passes_too():
    def shared(x, weight, bias, rank, n_ranks):
        return partial(x, weight, bias / n_ranks, rank, n_ranks, own=lambda rank: True)

    assert checks.partial_convolution(shared)


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (stub, "write the body of stub"),
        (lambda *args: partial(*args, own=lambda rank: True), "the bias 4 times, once from each rank"),
        (lambda *args: partial(*args, own=lambda rank: False), "lacks the bias"),
        (by_outputs, "each rank's part should be"),
        (
            lambda x, weight, bias, rank, n: F.conv2d(x, weight, bias, padding="same") / n,
            "another rank holds",
        ),
        (lambda *args: None, "yours is NoneType"),
        (lambda *args: 2 * partial(*args), "off by"),
    ],
)
def test_other_parts_get_a_hint(function, hint, capsys):
    wrong(checks.partial_convolution, function, hint, capsys)


def test_the_check_can_tell_one_rank_from_four():
    x, weight, bias = torch.ones(1, 2, 3, 3), torch.ones(1, 2, 1, 1), torch.zeros(1)
    assert not torch.equal(partial(x, weight, bias, 0, 2), partial(x, weight, bias, 0, 1))
