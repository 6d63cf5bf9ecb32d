"""The checks of chapter 26: the best round for a link, and error feedback."""

import math

import torch

from ignite_ddl.course.exercises import Hint, exercise

_NEEDED = {1: 100, 4: 104, 16: 121, 64: 200, 256: 700}


def _seconds(needed, compute, exchange, rounds=lambda steps, H: math.ceil(steps / H)):
    return {H: rounds(steps, H) * (H * compute + exchange) for H, steps in needed.items()}


def _least(seconds):
    return min(seconds, key=seconds.get)


@exercise(
    cases=((0.5, 0.0), (0.5, 0.1), (0.5, 1.0), (0.5, 4.0), (0.5, 12.0), (0.5, 32.0), (0.01, 32.0), (0.5, 2000.0)),
    about="{compute} s a step, {exchange} s an exchange",
    right="the fewest seconds to the same loss, for a fast link and for a slow one",
)
def best_round(function, compute, exchange):
    found = function(dict(_NEEDED), compute, exchange)
    seconds = _seconds(_NEEDED, compute, exchange)
    if found not in seconds:
        raise Hint(f"return one of the rounds that were tried, {list(_NEEDED)}, not {found!r}")
    right = _least(seconds)
    if seconds[found] == seconds[right]:
        return
    text = f"with H = {found} it takes {seconds[found]:,.1f} s, with {right} {seconds[right]:,.1f} s"
    if found == max(_NEEDED):
        text += "; a long round needs more steps"
    elif found == _least(_seconds(_NEEDED, compute, exchange, lambda steps, H: steps / H)):
        text += "; a run ends with a whole round, and a round that has begun has to end"
    elif found == min(_NEEDED):
        text += "; fewest steps are not fewest seconds"
    raise Hint(text)


def _largest(x):
    """Keeps the entry of largest size."""
    return torch.where(x.abs() == x.abs().max(), x, 0.0)


def _signs(x):
    return x.sign() * x.abs().mean()


def _right(gradients, compress):
    error, sent = torch.zeros_like(gradients[0]), []
    for gradient in gradients:
        sent.append(compress(gradient + error))
        error = gradient + error - sent[-1]
    return torch.stack(sent), error


def _gradients(n_steps, seed):
    return torch.randn(n_steps, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@exercise(
    cases=((_largest, 6, 0), (_signs, 4, 1), (_largest, 9, 2)),
    about=lambda compress, n_steps, seed: f"{n_steps} gradients, {'signs' if compress is _signs else 'one entry'} sent",
    right="nothing is lost: what was sent and what is left add up to the gradients",
)  # fmt: skip
def send_with_memory(function, compress, n_steps, seed):
    gradients, calls = _gradients(n_steps, seed), []

    def counted(x):
        calls.append(x)
        return compress(x)

    answer = function(gradients.clone(), counted)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise Hint("return two tensors: what was sent, and what is left")
    sent, error = answer
    if not isinstance(sent, torch.Tensor) or sent.shape != gradients.shape:
        raise Hint(f"what was sent has shape {tuple(gradients.shape)}, a row for each gradient: use torch.stack")
    if len(calls) != n_steps:
        raise Hint(f"you compress {len(calls)} times in {n_steps} steps")
    right, left = _right(gradients, compress)
    if torch.equal(sent, torch.stack([compress(g) for g in gradients])):
        raise Hint("each gradient is sent without what the steps before have left out")
    if not torch.allclose(sent, right):
        step = int((~torch.isclose(sent, right)).any(dim=1).nonzero()[0])
        raise Hint(
            f"gradient {step} (from 0) is the first that you send wrong: what was left then is what was wanted minus "
            "what was sent"
        )
    if not isinstance(error, torch.Tensor) or error.shape != left.shape or not torch.allclose(error, left):
        raise Hint("what is left at the end is that of the last step: sent and left add up to the sum of the gradients")
