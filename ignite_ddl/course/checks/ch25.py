"""The checks of chapter 25, the capstone, and its checklist of what is still open."""

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ignite.engine import Events
from torch import nn

import ignite_ddl as ddl
from ignite_ddl.arguments import is_count
from ignite_ddl.course.exercises import Hint, exercise
from ignite_ddl.course.gpt import GPT
from ignite_ddl.course.ranks import try_on_ranks
from ignite_ddl.course.text import CharacterText
from ignite_ddl.state import shard_of


@exercise(
    cases=((80, 32, 64, 2, True), (80, 32, 64, 2, False), (50, 16, 8, 3, True)),
    about=lambda vocabulary, length, width, blocks, tied: f"width {width}, {blocks} blocks, {'' if tied else 'un'}tied",
    right="as many as the model has",
)
def count_weights(function, vocabulary, length, width, blocks, tied):
    """The number of weights of the course's GPT."""
    model = GPT(vocabulary, length, width, n_heads=4, n_blocks=blocks, tied=tied)
    wanted = sum(weight.numel() for weight in model.parameters())
    found = function(vocabulary, length, width, blocks, tied)
    if abs(found - wanted) == vocabulary * width:
        raise Hint(f"you count {found:,} of {wanted:,}: is the head's weight the embedding's?")
    if abs(found - wanted) == 13 * width * blocks:
        raise Hint(f"you count {found:,} of {wanted:,}: biases and norms are 13 · width a block")
    if found != wanted:
        raise Hint(f"you count {found:,} of {wanted:,}")


def _first_losses(local_rank: int, build: Callable, cut: dict, n_steps: int = 3) -> tuple[list[float], int]:
    """The losses of a run's first steps, and the numbers in the weights that this rank holds."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)  # of idist, about each loader and model
    try:
        with warnings.catch_warnings(action="ignore"):  # of a mesh without a plan, which gets a hint
            return _losses_and_weights(build(dict(cut)), n_steps)
    finally:
        logging.disable(before)


def _losses_and_weights(parts: dict, n_steps: int) -> tuple[list[float], int]:
    losses = []
    if not isinstance(parts, dict) or set(parts) != {"model", "optimizer", "trainer", "loader"}:
        raise Hint(f"return a dict of model, optimizer, trainer and loader, not {parts!r:.40}")
    held = sum(piece.numel() for weight in parts["model"].parameters() for _, piece in shard_of(weight).pieces)

    @parts["trainer"].on(Events.ITERATION_COMPLETED)
    def note(trainer):
        losses.append(float(trainer.state.output))
        if len(losses) == n_steps:
            trainer.terminate()

    parts["trainer"].run(parts["loader"])
    return losses, held


def _reference(cut: dict) -> dict:
    torch.manual_seed(0)
    loader = ddl.auto_dataloader(CharacterText("train", 32), batch_size=16, shuffle=True)
    torch.manual_seed(0)
    model = ddl.auto_model(GPT(80, length=32, width=64, n_heads=4, n_blocks=2).double(), **cut)
    optimizer = ddl.auto_optim(torch.optim.AdamW(model.parameters(), lr=5e-3))

    def loss_fn(logits, y):
        return nn.functional.cross_entropy(logits.transpose(1, 2), y) / math.log(2)

    trainer = ddl.create_supervised_trainer(model, optimizer, loss_fn, max_norm=1.0)
    return {"model": model, "optimizer": optimizer, "trainer": trainer, "loader": loader}


@exercise
def build(function):
    """The losses of the reference, in one process and on two ranks, which hold half of the weights each."""
    found, _ = _first_losses(0, function, {})
    wanted, n_weights = _first_losses(0, _reference, {})
    for step, (loss, right) in enumerate(zip(found, wanted, strict=True), start=1):
        if not abs(loss - right) <= 1e-9:
            look = "rows, weights and the loss" if step == 1 else "the optimizer, its rate and the clipping"
            raise Hint(f"the loss of step {step} is {loss:.4f}, not {right:.4f}: look at {look}")
    for axis, cut, cure in (("dp", {"shard": True}, "it"), ("tp", {}, "GPT.tensor_plan")):
        on_two = try_on_ranks(2, _first_losses, function, cut, timeout=60, **{axis: 2})
        if not all(
            abs(loss - right) <= 1e-9 for losses, _ in on_two for loss, right in zip(losses, wanted, strict=True)
        ):
            raise Hint(
                f"one process is right, two ranks on {axis} begin with {on_two[0][0][0]:.4f} in place of "
                f"{wanted[0]:.4f}: the rows of a step are those of all ranks together"
            )
        if (held := on_two[0][1]) > 0.6 * n_weights:
            given = f"{cut} as cut" if cut else f"{axis}=2"
            raise Hint(
                f"with {given}, rank 0 of 2 holds {held:,} of {n_weights:,} weights: hand {cure} to ddl.auto_model"
            )
    return "the same losses in one process and on two ranks"


@exercise
def first_wrong(function):
    """Right for each place, within the runs that bisection needs."""
    for n_layers in (1, 2, 7, 100):
        allowed = math.ceil(math.log2(n_layers + 1))
        for wrong in [*range(min(n_layers, 9)), n_layers - 1, None]:
            case = f"{n_layers} layers, " + ("none wrong" if wrong is None else f"layer {wrong} is the first wrong one")
            asked = []

            def differs(n, wrong=wrong, asked=asked, n_layers=n_layers, case=case):
                if not is_count(n) or n > n_layers:
                    raise Hint(f"{case}: you run {n!r} layers; it should be 1 to {n_layers}")
                asked.append(n)
                if len(asked) > 10 * n_layers + 10:
                    raise Hint(f"{case}: {len(asked)} runs and no end; the last two are of {asked[-2]} and {n} layers")
                return wrong is not None and n > wrong

            found = function(differs, n_layers)
            if found != wrong or isinstance(found, bool):
                near = isinstance(found, int) and wrong is not None and abs(found - wrong) == 1
                why = ": differs(n) runs layers 0 to n - 1" if near else ""
                raise Hint(f"{case}: you return {found!r}{why}")
            if len(asked) > allowed:
                raise Hint(f"{case}: {len(asked)} runs; {allowed} are enough")
    return "no more runs than it takes"


class _Reads(nn.Module):
    """A model whose output at each place is a function of the numbers that it is given."""

    def __init__(self, function: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (rows, characters) -> (rows, characters, 1)
        return self.function(x.double(), self.training).unsqueeze(-1)


def _later(x: torch.Tensor, by: int) -> torch.Tensor:
    return torch.cat([x[:, by:], torch.zeros(len(x), min(by, x.shape[1]))], dim=1)


MODELS = {
    "a sum of what came before": (lambda x, training: x.cumsum(1), []),
    "it reads the next character": (lambda x, training: x + _later(x, 1), [0, 1, 2, 3, 4]),
    "it reads two ahead": (lambda x, training: x + _later(x, 2), [0, 1, 2, 3]),
    "the largest number of the row": (lambda x, training: x / x.amax(1, keepdim=True), [0, 1, 2, 3]),
    "dropout, and no leak": (lambda x, training: x * torch.rand(x.shape) if training else x, []),
    "rounding of 1e-13, and no leak": (lambda x, training: x + 1e-13 * x.shape[1], []),
}


@exercise(cases=MODELS, about="{case}")
def positions_that_leak(function, case):
    """Each place whose output depends on a later one, in any row."""
    model, leaks = MODELS[case]
    ids = torch.tensor([[9, 2, 3, 1, 2, 1], [1, 2, 5, 3, 9, 4]])
    found = function(_Reads(model), ids)
    if not isinstance(found, list):
        raise Hint(f"return a list of positions, not {found!r:.40}")
    if case.startswith("dropout") and found:
        raise Hint("put the model into eval mode first")
    if case.startswith("rounding") and found:
        raise Hint("compare with a tolerance, such as 1e-9")
    if 5 in found:
        raise Hint("you name position 5, after which nothing comes")
    if found != leaks:
        raise Hint(f"you return {found}, it is {leaks}")


@exercise
def rounded(function):
    """Rows and prefixes alone are rounded as among others; three values; the gradient passes."""
    x = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1] *= 0.01  # a small number has a scale, too
    x.requires_grad_()
    values = function(x)
    if not isinstance(values, torch.Tensor) or values.shape != x.shape:
        raise Hint("return a tensor of the shape of x")
    if not torch.cat([function(row) for row in x.split(1)]).allclose(values):
        raise Hint("a row alone is rounded otherwise than among four")
    if not function(x[:, :3]).allclose(values[:, :3]):
        raise Hint("three characters alone are rounded otherwise than among five: the scale sees later ones")
    scale = x.abs().amax(-1, keepdim=True)
    if not values.allclose((x / scale).round() * scale):
        raise Hint("each number should be −1, 0 or 1 times the largest size of its character")
    if not values.requires_grad or not torch.autograd.grad(values.sum(), x)[0].allclose(torch.ones_like(x)):
        raise Hint("the gradient should pass as if nothing were rounded")
    if not function(torch.zeros(1, 1, 8)).isfinite().all():
        raise Hint("a character of zeros becomes nan")
    return "no row and no character sees another one"


CHECKLIST = {
    "count_weights": (count_weights, "the weights are counted"),
    "build": (build, "the run is built, on one process and on ranks"),
    "first_wrong": (first_wrong, "the wrong layer is found in few runs"),
    "positions_that_leak": (positions_that_leak, "there is a test for what sees the future"),
    "rounded": (rounded, "the layer is mended"),
}


def checklist(names: Mapping[str, Any]) -> None:
    """Runs the checks of the capstone's five parts and prints which are done, and what the others lack.

    Args:
        names: the notebook's, ``globals()``.

    Examples:
        .. code-block:: python

            checks.checklist(globals())
    """
    n_done = 0
    for name, (check, what) in CHECKLIST.items():
        said, done = io.StringIO(), False
        with contextlib.redirect_stdout(said):
            done = name in names and bool(check(names[name]))
        hint = said.getvalue().strip().removeprefix("not yet: ") or "further down this page"
        hint = "to be written" if hint.startswith("write the body") else hint
        print(f"done  {what}" if done else f"open  {what}: {hint}")
        n_done += done
    print(f"{n_done} of {len(CHECKLIST)} done")
